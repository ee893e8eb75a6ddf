package cloudevents

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/cloudevents/sdk-go/v2/types"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: which CloudEvent is an event?

// FromEvent returns the CloudEvent that an event is. One that came as a CloudEvent has its id, source and time; any other has that of the
// event, and as source the base, which may be "" and is better a URI that nobody else has, with the namespace and the producer after it:
// "https://shop.example/orders/api-1". An Error for what a CloudEvent cannot have. The event is left as it is.
func FromEvent(e *eventbus.Event, base string) (event.Event, error) {
	ce := event.Event{}
	rest, err := members(e.Metadata)
	if err != nil {
		return ce, invalid(metadata, "the metadata is no JSON object: %w", err)
	}
	kept := record{ID: strconv.FormatInt(e.ID, 10), Source: source(e, base), Time: types.FormatTime(e.EmittedAt), DataContentType: event.StringOfApplicationJSON()}
	if data, came := rest[MetadataKey]; came {
		kept = record{}
		if err := jsonvalue.UnmarshalStrict(data, &kept); err != nil {
			return ce, invalid(metadata, "metadata %q is for this package: %w", MetadataKey, err)
		}
		delete(rest, MetadataKey)
	}
	context := &event.EventContextV1{ID: kept.ID, Type: e.Type, DataContentType: kept.DataContentType}
	if e.Key != "" {
		context.Subject = new(e.Key)
	}
	if err := kept.locate(context); err != nil {
		return ce, err
	}
	if context.Extensions, err = extensions(e, kept.Types, rest); err != nil {
		return ce, err
	}
	ce.Context = context
	if ce.DataEncoded, ce.DataBase64, err = kept.Data.read(e.Payload); err != nil {
		return event.Event{}, err
	}
	if err := validate(ce); err != nil {
		return event.Event{}, err
	}
	return ce, nil
}

// source is that of an event that did not come as a CloudEvent.
func source(e *eventbus.Event, base string) string {
	s := strings.TrimSuffix(base, "/") + "/" + url.PathEscape(e.Namespace)
	if e.Producer != "" {
		s += "/" + url.PathEscape(e.Producer)
	}
	return s
}

// locate sets the attributes that are not texts.
func (r *record) locate(context *event.EventContextV1) error {
	from := types.ParseURIRef(r.Source)
	if from == nil {
		return invalid("source", "it is no URI reference")
	}
	context.Source = *from
	if r.DataSchema != "" {
		if context.DataSchema = types.ParseURI(r.DataSchema); context.DataSchema == nil {
			return invalid("dataschema", "it is no URI")
		}
	}
	if r.Time == "" {
		return nil
	}
	at, err := types.ParseTimestamp(r.Time)
	if err != nil {
		return invalid("time", "it is no timestamp of RFC 3339")
	}
	context.Time = at
	return nil
}

// extensions are the headers, and what the event has no other place for.
func extensions(e *eventbus.Event, as map[string]extensionType, rest map[string]json.RawMessage) (map[string]any, error) {
	texts := maps.Clone(e.Headers)
	if texts == nil {
		texts = map[string]string{}
	}
	if _, taken := texts[metadata]; taken {
		return nil, invalid(metadata, "the extension is for the metadata, and no header can have its name")
	}
	if len(rest) > 0 {
		data, err := json.Marshal(rest) // compact, and in the order of its keys
		if err != nil {
			return nil, invalid(metadata, "%w", err)
		}
		texts[metadata] = string(data)
	}
	if e.ScheduledTaskID != "" {
		if _, taken := texts[scheduledTaskID]; taken {
			return nil, invalid(scheduledTaskID, "there are a scheduled task and a header of this name")
		}
		texts[scheduledTaskID] = e.ScheduledTaskID
	}
	var all map[string]any
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if err := checkExtension(name, texts[name]); err != nil {
			return nil, err
		}
		value, err := as[name].parse(texts[name])
		if err != nil {
			return nil, invalid(name, "it is no extension of the type that the metadata says")
		}
		if all == nil {
			all = map[string]any{}
		}
		all[name] = value
	}
	return all, nil
}

// parse is the value of an extension whose canonical text this is.
func (t extensionType) parse(text string) (any, error) {
	switch t {
	case typeString:
		return text, nil
	case typeBoolean:
		return types.ParseBool(text)
	case typeInteger:
		return types.ParseInteger(text)
	}
	return nil, errors.New("there is no such type")
}

// read is the data that a payload is, and whether it is binary.
func (k dataKind) read(payload json.RawMessage) (data []byte, binary bool, err error) {
	if len(payload) == 0 {
		payload = json.RawMessage("null")
	}
	switch k {
	case dataJSON:
		return bytes.Clone(payload), false, nil
	case dataNone:
		return nil, false, nil
	case dataText, dataBase64:
		var text *string
		if err := json.Unmarshal(payload, &text); err != nil || text == nil {
			return nil, false, invalid("data", "the payload is to be a string of kind %q", k)
		}
		if k == dataText {
			return []byte(*text), false, nil
		}
		if data, err = base64.StdEncoding.DecodeString(*text); err != nil {
			return nil, false, invalid("data", "%w", err)
		}
		return data, true, nil
	}
	return nil, false, invalid("data", "there is no such kind of data")
}
