package glance

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// This file answers: how are times, sizes and the texts of others said to people?

// OneLine keeps what others have written from breaking out of its place: control characters, and so escape sequences for the terminal and
// marks that change the direction of a text, are shown as what they are.
func OneLine(text string) string { return visible(text, Unprintable) }

// Lines is OneLine for a text that may have several lines, and tabs.
func Lines(text string) string {
	return visible(text, func(r rune) bool { return r != '\n' && r != '\t' && Unprintable(r) })
}

// rightToLeft are the scripts that are read that way.
var rightToLeft = []*unicode.RangeTable{
	unicode.Hebrew, unicode.Arabic, unicode.Syriac, unicode.Thaana, unicode.Nko, unicode.Samaritan, unicode.Mandaic, unicode.Adlam,
}

// LeftToRight is a text after which a terminal goes on from left to right: the numbers in the next columns stay where they are.
func LeftToRight(text string) string {
	for _, r := range text {
		if unicode.IsOneOf(rightToLeft, r) {
			return text + "\u200e"
		}
	}
	return text
}

func visible(text string, hidden func(rune) bool) string {
	if strings.IndexFunc(text, hidden) < 0 {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if hidden(r) {
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// Unprintable says that OneLine shows a character as what it is.
func Unprintable(r rune) bool { return !strconv.IsPrint(r) }

// Short cuts a text to so many characters, in one line.
func Short(text string, most int) string {
	if len(text) > 16*most+16 { // a rune and its escape are shorter than that
		text = strings.ToValidUTF8(text[:16*most+16], "")
	}
	text = OneLine(text)
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return text
}

// Span is a duration as people say it: with its two largest units.
func Span(d time.Duration) string {
	sign := ""
	if d < 0 {
		sign, d = "-", -d
	}
	switch {
	case d < time.Millisecond:
		return sign + d.Round(time.Microsecond).String()
	case d < time.Second:
		return sign + d.Round(time.Millisecond/10).String()
	case d < time.Minute:
		return sign + d.Round(time.Second/10).String()
	case d < time.Hour:
		return fmt.Sprintf("%s%dm%02ds", sign, d/time.Minute, d%time.Minute/time.Second)
	case d < 48*time.Hour:
		return fmt.Sprintf("%s%dh%02dm", sign, d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%s%dd%dh", sign, d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// Size is a number of bytes as people say it.
func Size(bytes int64) string {
	n := float64(bytes)
	for _, unit := range []string{"B", "kB", "MB", "GB"} {
		if n < 1000 {
			return strings.TrimSuffix(fmt.Sprintf("%.1f", n), ".0") + " " + unit
		}
		n /= 1000
	}
	return fmt.Sprintf("%.1f TB", n)
}

// DueIn says how far off an instant is.
func DueIn(at, now time.Time) string {
	if d := at.Sub(now); d > 0 {
		return "in " + Span(d)
	}
	return Span(now.Sub(at)) + " ago"
}

// Bound is what Histogram.Quantile tells.
func Bound(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return "< " + Span(d)
}
