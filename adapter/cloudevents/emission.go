package cloudevents

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"maps"
	"mime"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/cloudevents/sdk-go/v2/types"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: how is a CloudEvent emitted?

// ToEmission returns how to emit a CloudEvent of version 1.0, with eventbus.Bus.EmitMany, so that FromEvent gives it back. Its dedup key is
// made of source and id: one that comes twice within a day is emitted once. Its subject is the key, so that events of a subject are handled
// one at a time in each group. An Error for what an event cannot have; how large and deep data may be is up to the Bus.
func ToEmission(ce event.Event) (eventbus.Emission, error) {
	none := eventbus.Emission{}
	context, is := ce.Context.(*event.EventContextV1)
	if !is {
		return none, invalid("specversion", "it is not 1.0")
	}
	if err := validate(ce); err != nil {
		return none, err
	}
	kept := record{ID: context.ID, Source: context.Source.String(), DataContentType: context.DataContentType}
	if context.DataSchema != nil {
		kept.DataSchema = context.DataSchema.String()
	}
	if context.Time != nil {
		kept.Time = context.Time.String()
	}
	if err := kept.locate(&event.EventContextV1{}); err != nil { // such as a year of five digits: FromEvent could not read it
		return none, err
	}
	if err := eventbus.CheckType(ce.Type()); err != nil {
		return none, &Error{"type", err}
	}
	if len(ce.Subject()) > pgwake.MaxNameLength {
		return none, invalid("subject", "it has more than %d bytes", pgwake.MaxNameLength)
	}
	emission := eventbus.Emission{Type: ce.Type(), EmitOptions: eventbus.EmitOptions{Key: ce.Subject(), DedupKey: identity(&kept)}}
	rest, err := kept.extensions(&emission, context.Extensions)
	if err != nil {
		return none, err
	}
	if emission.Payload, err = kept.payload(ce); err != nil {
		return none, err
	}
	if rest[MetadataKey], err = json.Marshal(kept); err != nil {
		return none, invalid(metadata, "%w", err)
	}
	emission.Metadata = rest
	return emission, nil
}

// identity is what a CloudEvent is known by. Neither part has control characters, so that no two are alike.
func identity(r *record) string {
	key := r.Source + "\n" + r.ID
	if len(key) > pgwake.MaxNameLength {
		hash := sha256.Sum256([]byte(key))
		return hex.EncodeToString(hash[:])
	}
	return key
}

// extensions has those that are an event's metadata returned, and the others be headers.
func (r *record) extensions(emission *eventbus.Emission, all map[string]any) (rest map[string]json.RawMessage, err error) {
	rest = map[string]json.RawMessage{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		value, err := types.Validate(all[name])
		if err != nil {
			return nil, invalid(name, "a %T is no value that there can be", all[name])
		}
		text, err := types.Format(value)
		if err != nil {
			return nil, invalid(name, "a %T has no text", value)
		}
		if err := checkExtension(name, text); err != nil {
			return nil, err
		}
		if name == metadata {
			if rest, err = members([]byte(text)); err != nil || len(rest) == 0 || rest[MetadataKey] != nil {
				return nil, invalid(name, "it is no JSON object with members other than %q", MetadataKey)
			}
			if err := pgwake.CheckJSON(name, []byte(text), len(text)); err != nil {
				return nil, &Error{name, err}
			}
			continue
		}
		if emission.Headers == nil {
			emission.Headers = map[string]string{}
		}
		emission.Headers[name] = text
		switch value.(type) {
		case bool:
			r.is(name, typeBoolean)
		case int32:
			r.is(name, typeInteger)
		}
	}
	if err := pgwake.CheckHeaders(emission.Headers); err != nil {
		return nil, &Error{"extensions", err}
	}
	return rest, nil
}

// is notes the type of an extension.
func (r *record) is(name string, t extensionType) {
	if r.Types == nil {
		r.Types = map[string]extensionType{}
	}
	r.Types[name] = t
}

// payload is the data as JSON; the record says how.
func (r *record) payload(ce event.Event) (json.RawMessage, error) {
	data := ce.Data()
	isJSON := jsonType(ce.DataContentType())
	switch {
	case data == nil:
		r.Data = dataNone
		return nil, nil
	case isJSON && json.Valid(data):
		r.Data = dataJSON
		if err := pgwake.CheckJSON("data", data, len(data)); err != nil { // what PostgreSQL does not take
			return nil, &Error{"data", err}
		}
		return data, nil
	case isJSON && !ce.DataBase64:
		return nil, invalid("data", "it is not JSON")
	}
	text := string(data)
	if r.Data = dataText; ce.DataBase64 || !utf8.Valid(data) || strings.ContainsRune(text, 0) {
		r.Data, text = dataBase64, base64.StdEncoding.EncodeToString(data)
	}
	return json.Marshal(text)
}

// jsonType reports whether data of a content type is JSON. None is application/json.
func jsonType(content string) bool {
	media, _, _ := mime.ParseMediaType(content) // without capitals; it was validated
	return content == "" || media == event.ApplicationJSON || media == event.TextJSON || strings.HasSuffix(media, "+json")
}
