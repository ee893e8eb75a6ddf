package watermill

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: which type do the events of a topic have?

// EventType returns the type of the events of a topic, for handlers of package eventbus and for SQL. It is the topic itself, but that what
// a type cannot have becomes % and two hexadecimal digits for each byte: spaces, characters that are not to be seen, bytes that are not
// UTF-8, '*', '#', '|', '%', and a dot without anything before or after it. Invariant: two topics never have the same type, since
// decoding gives back the topic, and of each the same.
//
// Fails with pgwake.ErrInvalid for an empty topic, and for one whose type would be longer than eventbus.MaxTypeLength.
func EventType(topic string) (string, error) {
	var b strings.Builder
	for i, width := 0, 0; i < len(topic); i += width {
		var r rune
		r, width = utf8.DecodeRuneInString(topic[i:])
		if c := topic[i : i+width]; plain(r, width) && !(c == "." && emptySegment(topic, i)) {
			b.WriteString(c)
		} else {
			for _, octet := range []byte(c) {
				fmt.Fprintf(&b, "%%%02X", octet)
			}
		}
	}
	eventType := b.String()
	if err := eventbus.CheckType(eventType); err != nil {
		return "", fmt.Errorf("topic %.200q: %w", topic, err)
	}
	return eventType, nil
}

func plain(r rune, width int) bool {
	bad := r == utf8.RuneError && width <= 1
	return !bad && unicode.IsGraphic(r) && !unicode.IsSpace(r) && !strings.ContainsRune("*#|%", r)
}

// emptySegment reports whether a dot would begin or end a segment that has nothing in it.
func emptySegment(topic string, dot int) bool {
	return dot == 0 || dot == len(topic)-1 || topic[dot-1] == '.'
}
