// Package hostile answers: which texts does whoever means harm, or whoever is unlucky, give as a name?
//
// A place where callers say a text refuses it, by a typed error and before anything is written, or carries it byte for byte.
package hostile

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Texts returns texts that PostgreSQL can hold, all of them different and of 1 to most bytes, for most of 40 and more. Those that are not of
// exactly most bytes are short.
func Texts(most int) []string {
	all := []string{
		// Quotes, and what breaks out of them.
		`'`, `"`, "`", `''`, `$$`, `$1`, `$x$`, `E'\''`, `'); DROP TABLE worker_queue; --`, `" OR "" = "`, `/*`, `*/ x`, `;`, `--`,
		// Formats, patterns, escapes, lists.
		`%s`, `%`, `%%`, `_`, `a%`, `a_`, `ab`, `*`, `#`, `.*`, `?`, `[a]`, `^a$`, `\`, `\\`, `\x41`, `\n`, `\u0041`, `{}`, `{a,b}`, `{"a":1}`, `a,b`, `a|b`, `a/b`, `/`, `a.b`, `..`, `<&>`,
		// White space and what moves the cursor.
		" ", " a", "a ", "a\nb", "\n", "a\r\nb", "\t", "\v", "\x01", "\x7f", "\x1b[2J\x1b]0;a\a", "\u0085", "\u00a0", "\u2028", "\ufeff", "\u200b",
		// Characters beyond ASCII and beyond 16 bits, such as look alike or turn what is around them.
		"é", "e\u0301", "ａ", "ﬁ", "ſ", "\u212a", "ß", "ı", "İ", "\u0430", "\U0001F600", "\U0001F468\u200d\U0001F469", "\U0010FFFF", "\uFFFD", "\u202ea", "\u0661",
		// What some reader takes for something else than a text, or for the default.
		"0", "-1", "1e3", "0x10", "1_000", "1", "01", "NaN", "Infinity", "null", "NULL", "nil", "~", "true", "false", "yes", "on", "default", "DEFAULT", "Default", "a", "A", "undefined",
		"2026-11-25", "1h", "<<", "=", "&a", "!x", "@a", "__proto__", "CON", "..\\x", "start", "public",
	}
	return append(all, strings.Repeat("x", most), full(most, "é"), full(most, "\U0001F600"))
}

// full returns a text of exactly so many bytes, of a character as often as it fits in the end.
func full(most int, char string) string {
	return strings.Repeat("x", most%len(char)) + strings.Repeat(char, most/len(char))
}

// NoTexts are what PostgreSQL cannot hold as a text, by what is wrong.
var NoTexts = map[string]string{
	"NUL":                  "\x00",
	"NUL within":           "a\x00b",
	"NUL in the end":       "a\x00",
	"no UTF-8":             "a\xffb",
	"half of a character":  "a\xf0\x9f\x98",
	"too long an encoding": "\xc0\x80",
	"half of a surrogate":  "a\xed\xa0\x80b",
	"beyond Unicode":       "\xf4\x90\x80\x80",
}

// Refused are NoTexts and what has more than most bytes, also where that is so only because its characters have several.
func Refused(most int) map[string]string {
	all := map[string]string{
		"a byte too long":             strings.Repeat("x", most+1),
		"a character over the limit":  full(most-1, "é") + "é",
		"an emoji over the limit":     strings.Repeat("x", most-3) + "\U0001F600",
		"as many characters as bytes": strings.Repeat("é", most),
	}
	for what, text := range NoTexts {
		all[what] = text
	}
	return all
}

// IsLine reports whether a text can be written to a log, or shown, without breaking its line or moving the cursor.
func IsLine(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool {
		return unicode.IsControl(r) && r != '\x7f' || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029' // those end a line
	})
}
