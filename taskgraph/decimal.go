package taskgraph

import (
	"cmp"
	"strconv"
	"strings"
)

// This file answers: which of two numbers is the greater, exactly? As PostgreSQL's numeric does, whatever their size.

// decimal is 0.digits * 10^exponent, or minus that; digits neither begin nor end with a zero, and 0 has none.
type decimal struct {
	negative bool
	digits   string
	exponent int64
	scale    int64 // digits after the point, as written
}

// parseDecimal takes a number of JSON apart.
func parseDecimal(text string) decimal {
	d := decimal{}
	text, d.negative = strings.CutPrefix(text, "-")
	mantissa := text
	var power int64
	if e := strings.IndexAny(text, "eE"); e >= 0 {
		mantissa = text[:e]
		power = clampedInt(text[e+1:])
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	d.scale = max(int64(len(fraction))-power, 0)
	all := whole + fraction
	significant := strings.TrimLeft(all, "0")
	if d.digits = strings.TrimRight(significant, "0"); d.digits == "" {
		d.negative = false
		return d
	}
	d.exponent = power + int64(len(whole)) - int64(len(all)-len(significant))
	return d
}

// clampedInt is a number that is as good as any that is further from 0, if it is far enough.
func clampedInt(text string) int64 {
	const most = 1 << 40
	n, _ := strconv.ParseInt(text, 10, 64) // the nearest there is, if it is out of range
	return min(max(n, -most), most)
}

// compare returns -1, 0 or +1 if d is less than, equal to or greater than e.
func (d decimal) compare(e decimal) int {
	sign := func(d decimal) int {
		switch {
		case d.digits == "":
			return 0
		case d.negative:
			return -1
		}
		return 1
	}
	if s := sign(d); s != sign(e) || s == 0 {
		return cmp.Compare(s, sign(e))
	} else if c := cmp.Compare(d.exponent, e.exponent); c != 0 {
		return s * c
	} else {
		return s * cmp.Compare(d.digits, e.digits)
	}
}

// String is the same for numbers that are equal, and a number of JSON.
func (d decimal) String() string {
	if d.digits == "" {
		return "0"
	}
	sign := ""
	if d.negative {
		sign = "-"
	}
	return sign + "0." + d.digits + "e" + strconv.FormatInt(d.exponent, 10)
}

// fits reports whether a numeric of PostgreSQL can hold it: 131,072 digits before the point, and 16,383 after it.
func (d decimal) fits() bool { return d.exponent <= 131_072 && d.scale <= 16_383 }
