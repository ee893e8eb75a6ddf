package cloudevents

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what do both directions have in common?

// MetadataKey is under which key the metadata of an event has what its CloudEvent has and an event of the bus has no place for.
const MetadataKey = "cloudevents"

const (
	scheduledTaskID = "scheduledtaskid"
	metadata        = "pgwakemetadata"
)

// record is what is kept as MetadataKey.
type record struct {
	ID              string                   `json:"id"`
	Source          string                   `json:"source"`
	Time            string                   `json:"time,omitempty"`
	DataSchema      string                   `json:"dataschema,omitempty"`
	DataContentType *string                  `json:"datacontenttype,omitempty"`
	Data            dataKind                 `json:"data,omitempty"`
	Types           map[string]extensionType `json:"types,omitempty"` // of extensions that are no strings
}

// dataKind is how a payload is to be read.
type dataKind string

const (
	dataJSON   dataKind = "" // the value itself
	dataNone   dataKind = "none"
	dataText   dataKind = "text"   // a string
	dataBase64 dataKind = "base64" // a string in base64
)

// extensionType is one of the types that JSON tells apart from a string.
type extensionType string

const (
	typeString  extensionType = "" // not in the record
	typeBoolean extensionType = "boolean"
	typeInteger extensionType = "integer"
)

// Error says what of an event cannot be said on the other side. It is a pgwake.ErrInvalid, or a pgwake.ErrPayloadTooLarge.
type Error struct {
	Attribute string // of the CloudEvent; or the name of the header that has none
	Err       error
}

func (e *Error) Error() string { return fmt.Sprintf("cloudevents: %q: %v", e.Attribute, e.Err) }

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// invalid is an Error of what breaks a rule. It goes to logs, and into failures that are kept: it says which rule, and nothing of what is there.
// So it wraps no error of the SDK, nor of package encoding/json.
func invalid(attribute, format string, args ...any) error {
	return &Error{attribute, fmt.Errorf("%w: %w", pgwake.ErrInvalid, fmt.Errorf(format, args...))}
}

// validate returns an Error unless the attributes are such as CloudEvents have; for their texts that is more than the SDK asks.
func validate(ce event.Event) error {
	for _, wrong := range []event.ValidationError{ce.Context.Validate(), ce.FieldErrors} { // of the latter nothing is there but the error
		if len(wrong) > 0 {
			return invalid(slices.Sorted(maps.Keys(wrong))[0], "it is empty, or not what CloudEvents have there")
		}
	}
	for _, text := range [][2]string{{"id", ce.ID()}, {"source", ce.Source()}, {"type", ce.Type()}, {"subject", ce.Subject()},
		{"datacontenttype", ce.DataContentType()}, {"dataschema", ce.DataSchema()}} {
		if err := checkString(text[0], text[1]); err != nil {
			return err
		}
	}
	return nil
}

// checkString fails unless a text is a string of the type system of CloudEvents.
func checkString(attribute, text string) error {
	for i, r := range text {
		bad := unicode.IsControl(r) || r >= 0xFDD0 && r <= 0xFDEF || r&0xFFFE == 0xFFFE
		if r == utf8.RuneError {
			_, size := utf8.DecodeRuneInString(text[i:])
			bad = size == 1
		}
		if bad {
			return invalid(attribute, "what is at byte %d cannot be in a CloudEvent: no control characters, only UTF-8", i)
		}
	}
	return nil
}

// attributes are the names that extensions cannot have.
var attributes = []string{"id", "source", "type", "specversion", "subject", "time", "datacontenttype", "dataschema", "data"}

// checkExtension fails unless there can be an extension of this name and text.
func checkExtension(name, text string) error {
	if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return invalid(name, "the name of an extension is lower-case letters and digits")
	}
	if slices.Contains(attributes, name) {
		return invalid(name, "an extension cannot have the name of an attribute")
	}
	return checkString(name, text)
}

// members returns those of a JSON object, of which there may be none.
func members(object []byte) (map[string]json.RawMessage, error) {
	all := map[string]json.RawMessage{}
	if len(object) == 0 {
		return all, nil
	}
	err := jsonvalue.Unmarshal(object, &all)
	if err == nil && all == nil {
		err = errors.New("it is null")
	}
	return all, err
}
