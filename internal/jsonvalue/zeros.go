package jsonvalue

import "bytes"

// This file answers: how long are numbers once jsonb has written them out?

// Zeros is how many zeros the exponents of the numbers of valid JSON stand for, which jsonb writes out: at least, since those that it
// has no room for it refuses.
func Zeros(data []byte) (zeros int) {
	quoted := false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case (c == 'e' || c == 'E') && data[i-1] >= '0' && data[i-1] <= '9': // and not that of true
			zeros += exponent(data[i+1:])
		}
	}
	return zeros
}

// exponent is the size of the one that data begins with, up to a million.
func exponent(data []byte) (size int) {
	for _, c := range bytes.TrimLeft(data, "+-") {
		if c < '0' || c > '9' {
			break
		}
		size = min(10*size+int(c-'0'), 1_000_000)
	}
	return size
}
