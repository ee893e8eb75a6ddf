package eventbus

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what may callers pass in? The tables have checks of the same rules, for those who come by SQL.

const (
	// MaxTypeLength bounds event types and patterns, in bytes.
	MaxTypeLength = 180
	// MaxGroupLength bounds the names of groups, in bytes.
	MaxGroupLength = 64
	// MaxDepth bounds how deeply the arrays and objects of a payload are nested.
	MaxDepth = pgwake.MaxDepth
)

// CheckType fails with pgwake.ErrInvalid unless there can be events of this type: up to MaxTypeLength bytes, in segments with dots between
// them, each of one or more characters, without spaces, control characters, '*', '#' and '|'.
func CheckType(eventType string) error {
	return checkSegments("event type", eventType, func(segment string) bool { return !strings.ContainsAny(segment, "*#") })
}

// CheckPattern fails with pgwake.ErrInvalid unless this can be a pattern: as a type, but that a segment may be '*' or '#'.
func CheckPattern(pattern string) error {
	return checkSegments("pattern", pattern, func(segment string) bool {
		return segment == one || segment == anyNumber || !strings.ContainsAny(segment, "*#")
	})
}

func checkSegments(what, text string, good func(segment string) bool) error {
	if len(text) > MaxTypeLength || !isName(text) {
		return invalid("%s %.200q is empty, has more than %d bytes, or characters that it may not have", what, text, MaxTypeLength)
	}
	for segment := range strings.SplitSeq(text, ".") {
		if segment == "" || !good(segment) {
			return invalid("%s %q has a segment %q", what, text, segment)
		}
	}
	return nil
}

// CheckGroup fails with pgwake.ErrInvalid unless there can be a group of this name: up to MaxGroupLength bytes, without spaces, control
// characters and '|'.
func CheckGroup(group string) error {
	if len(group) > MaxGroupLength || !isName(group) {
		return invalid("group %.200q is empty, has more than %d bytes, or characters that it may not have", group, MaxGroupLength)
	}
	return nil
}

func isName(text string) bool {
	return text != "" && utf8.ValidString(text) &&
		!strings.ContainsFunc(text, func(r rune) bool { return r == '|' || unicode.IsSpace(r) || unicode.IsControl(r) })
}

func checkText(what, text string) error {
	if len(text) > pgwake.MaxNameLength || !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
		return invalid("%s %.100q is not UTF-8 without NUL of at most %d bytes", what, text, pgwake.MaxNameLength)
	}
	return nil
}

// checkDescription checks a text that may be as long as a payload.
func checkDescription(text string, most int) error {
	if len(text) > most {
		return fmt.Errorf("%w: description is %d bytes, more than %d", pgwake.ErrPayloadTooLarge, len(text), most)
	}
	if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
		return invalid("description contains NUL or invalid UTF-8")
	}
	return nil
}

// checkCron refuses what the server would take for a field with nothing in it: around an expression it removes fewer kinds of white space than it
// has fields end with, and so four fields and a vertical tab would be five. What else an expression may be is up to the server.
func checkCron(cron string) error {
	const around = " \t\r\n"
	if trimmed := strings.Trim(cron, around); trimmed != strings.TrimSpace(cron) {
		return invalid("cron expression %.100q begins or ends with white space other than %q", cron, around)
	}
	return checkText("cron expression", cron)
}

func checkInstant(at time.Time) error {
	if !at.IsZero() && (at.Year() < 1 || at.Year() > 9999) {
		return invalid("%v is not between the years 1 and 9999", at)
	}
	return nil
}

// payloadLimit is up to how many bytes payloads are read whole; nil: all are.
func payloadLimit(bytes int) (*int32, error) {
	if bytes < 0 {
		return nil, invalid("payloads of up to %d bytes are none", bytes)
	}
	return unless(bytes == 0, int32(min(bytes, math.MaxInt32))), nil
}

// encode returns a value as JSON that the log can hold. Of nil it is null.
func encode(what string, v any, most int) (string, error) {
	data, given := v.(json.RawMessage)
	if !given {
		var err error
		if data, err = json.Marshal(v); err != nil {
			return "", invalid("%s: %v", what, err)
		}
	}
	if len(data) == 0 {
		data = json.RawMessage("null")
	}
	if err := pgwake.CheckJSON(what, data, most); err != nil {
		return "", err
	}
	if jsonvalue.Zeros(data) > mostPayload { // or else nobody could read it, and who waits for its key would do so for ever
		return "", invalid("%s has numbers that are more than %d bytes when they are written out", what, mostPayload)
	}
	return string(data), nil
}
