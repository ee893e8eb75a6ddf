package pgwake

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// This file answers: what may callers pass in? Everything is checked before anything is sent.

const (
	// MaxNameLength bounds names, instance ids, versions and dedup keys, in bytes. They are index keys.
	MaxNameLength = 255

	// MinPriority and MaxPriority bound the priority of an item; the highest is fetched first.
	MinPriority, MaxPriority = 0, 9

	// MaxFetch bounds how many items one FetchWorkItems claims.
	MaxFetch = 10_000

	// MaxDepth bounds how deep arrays and objects of JSON are in each other, so that no parser runs out of stack, neither the
	// server's nor that of whoever reads it later.
	MaxDepth = 1000

	// MaxKVBytes bounds the key-value pairs of an instance: the bytes of all keys and values, and two more for each pair. Each claim of a turn brings
	// all of them as one value, in which a byte may become six.
	MaxKVBytes = 128 << 20

	// mostPayload bounds Config.MaxPayload. The server works with several copies of a value, each of which has to stay under 1 GB.
	mostPayload = 100 << 20
)

// DefaultNamespace is where items without a namespace live.
const DefaultNamespace = "default"

var namespacePattern = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,39}$`)

// CheckNamespace fails with ErrInvalid unless there can be a namespace of this name: 1 to 40 lower-case letters, digits, '_' and '-', a
// letter first.
func CheckNamespace(namespace string) error {
	if !namespacePattern.MatchString(namespace) {
		return invalid("namespace %s does not match %s", quote(namespace), namespacePattern)
	}
	return nil
}

// namespaceSet returns the sorted, distinct namespaces; nil for none.
func namespaceSet(namespaces []string) ([]string, error) {
	if len(namespaces) == 0 {
		return nil, nil
	}
	for _, n := range namespaces {
		if err := CheckNamespace(n); err != nil {
			return nil, err
		}
	}
	set := slices.Clone(namespaces)
	slices.Sort(set)
	return slices.Compact(set), nil
}

// quote returns a caller's text for an error message, shortened to what a log line bears.
func quote(s string) string {
	const most = 100
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// checkText checks a short text that becomes a key or a label.
func checkText(what, s string, required bool) error {
	switch {
	case s == "" && required:
		return invalid("%s is empty", what)
	case len(s) > MaxNameLength:
		return invalid("%s is %d bytes long, more than %d", what, len(s), MaxNameLength)
	case !utf8.ValidString(s):
		return invalid("%s %s is not valid UTF-8", what, quote(s))
	case strings.ContainsRune(s, 0):
		return invalid("%s %s contains NUL", what, quote(s))
	}
	return nil
}

// checkUTF8 checks a text that PostgreSQL is to hold.
func checkUTF8(what, s string) error {
	if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return invalid("%s contains NUL or invalid UTF-8", what)
	}
	return nil
}

// checkJSON checks a payload, or nothing.
func (c *Config) checkJSON(what string, data []byte) error {
	return CheckJSON(what, data, c.MaxPayload)
}

// CheckJSON fails with ErrInvalid unless data is nothing, or JSON of at most so many bytes that PostgreSQL can hold and take apart:
// without NUL, also as an escape, without half of a surrogate pair, and nested MaxDepth deep at most. What is it called in the error. It is for layers with payloads of
// their own.
func CheckJSON(what string, data []byte, most int) error {
	switch {
	case len(data) > most:
		return fmt.Errorf("%w: %s is %d bytes, more than %d", ErrPayloadTooLarge, what, len(data), most)
	case len(data) == 0:
		return nil
	case bytes.IndexByte(data, 0) >= 0:
		return invalid("%s contains NUL", what)
	case !utf8.Valid(data):
		return invalid("%s is not valid UTF-8", what)
	case !json.Valid(data):
		return invalid("%s is not valid JSON", what)
	case isDeep(data):
		return invalid("%s is nested more than %d deep", what, MaxDepth)
	}
	return checkEscapes(what, data)
}

// isDeep reports whether valid JSON is nested more than MaxDepth deep.
func isDeep(data []byte) bool {
	if bytes.Count(data, []byte("["))+bytes.Count(data, []byte("{")) <= MaxDepth { // nearly all, at the speed of memory
		return false
	}
	depth, quoted := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			if depth++; depth > MaxDepth {
				return true
			}
		case c == ']' || c == '}':
			depth--
		}
	}
	return false
}

// checkEscapes refuses the two escapes that JSON allows and PostgreSQL's text cannot hold: NUL, and half of
// a surrogate pair. A json column would store them, and every later look inside would fail.
func checkEscapes(what string, data []byte) error {
	for {
		at := bytes.IndexByte(data, '\\')
		if at < 0 {
			return nil
		}
		data = data[at:]
		if data[1] != 'u' {
			data = data[2:]
			continue
		}
		unit := codeUnit(data)
		data = data[6:]
		switch {
		case unit == 0:
			return invalid(`%s contains the escape \u0000`, what)
		case utf16.IsSurrogate(unit):
			if !bytes.HasPrefix(data, []byte(`\u`)) || utf16.DecodeRune(unit, codeUnit(data)) == utf8.RuneError {
				return invalid("%s contains half of a surrogate pair", what)
			}
			data = data[6:]
		}
	}
}

// codeUnit returns the value of the escape \uXXXX that valid JSON begins with.
func codeUnit(escape []byte) rune {
	unit, _ := strconv.ParseUint(string(escape[2:6]), 16, 16)
	return rune(unit)
}

// checkValue checks a text that is kept as it is.
func (c *Config) checkValue(what, s string) error {
	if len(s) > c.MaxPayload {
		return fmt.Errorf("%w: %s is %d bytes, more than %d", ErrPayloadTooLarge, what, len(s), c.MaxPayload)
	}
	return checkUTF8(what, s)
}

// payload returns JSON as an argument: NULL if there is none.
func payload(data []byte) *string {
	if len(data) == 0 {
		return nil
	}
	return new(string(data))
}

// text returns an optional text as an argument: NULL if empty.
func text(s string) *string { return optional(s, s == "") }

// maxDelay keeps due times within what timestamptz and time.Duration can both express.
const maxDelay = 100 * 365 * 24 * time.Hour

func checkDelay(d time.Duration) error {
	if d < 0 || d > maxDelay {
		return invalid("delay %v is not between 0 and %v", d, maxDelay)
	}
	return nil
}

// checkInstant checks a point in time; the zero time is none.
func checkInstant(what string, at time.Time) error {
	if !at.IsZero() && (at.Year() < 1 || at.Year() > 9999) {
		return invalid("%s %v is not between the years 1 and 9999", what, at)
	}
	return nil
}

// payloadLimit is up to how many bytes payloads are read whole; nil: all are.
func payloadLimit(bytes int) (*int32, error) {
	if bytes < 0 {
		return nil, invalid("payloads of up to %d bytes are none", bytes)
	}
	return optional(int32(min(bytes, math.MaxInt32)), bytes == 0), nil
}

// pageLimit checks where a page begins and completes how long it is.
func pageLimit(after int64, limit, byDefault int) (int, error) {
	if after < 0 {
		return 0, invalid("id %d to begin after is negative", after)
	}
	if limit < 0 || limit > MaxFetch {
		return 0, invalid("limit %d is not between 0 and %d", limit, MaxFetch)
	}
	return cmp.Or(limit, byDefault), nil
}
