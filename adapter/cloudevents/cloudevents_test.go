package cloudevents_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/cloudevents/sdk-go/v2/types"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/cloudevents"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestFromEvent_EventOfTheBus_IsInTheJSONFormat(t *testing.T) {
	t.Parallel()
	ce, err := cloudevents.FromEvent(&eventbus.Event{
		ID: 17, Namespace: "shop", Type: "order.created", Payload: json.RawMessage(`{"id": 7}`), EmittedAt: time.Date(2026, 11, 21, 10, 30, 0, 123456000, time.UTC),
		Producer: "api-server-1", ScheduledTaskID: "6f1c6a52-6f3a-4c0e-9d43-3f3e5a0e8f10", Metadata: json.RawMessage(`{"why": "<test>"}`), Key: "customer-7",
		Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "acme"},
		// Of a delivery:
		MessageID: 99, Redelivery: 2,
	}, "https://shop.example/")
	require.NoError(t, err)
	data, _ := asJSON(t, ce)
	require.JSONEq(t, `{
		"specversion": "1.0", "id": "17", "source": "https://shop.example/shop/api-server-1", "type": "order.created", "subject": "customer-7",
		"time": "2026-11-21T10:30:00.123456Z", "datacontenttype": "application/json", "data": {"id": 7},
		"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "acme",
		"scheduledtaskid": "6f1c6a52-6f3a-4c0e-9d43-3f3e5a0e8f10", "pgwakemetadata": "{\"why\":\"\\u003ctest\\u003e\"}"}`, data)
}

func TestFromEvent_NothingButAType_HasASource(t *testing.T) {
	t.Parallel()
	ce, err := cloudevents.FromEvent(&eventbus.Event{ID: 1, Namespace: "default", Type: "a", EmittedAt: time.Unix(0, 0)}, "")
	require.NoError(t, err)
	data, _ := asJSON(t, ce)
	require.JSONEq(t, `{"specversion": "1.0", "id": "1", "source": "/default", "type": "a", "time": "1970-01-01T00:00:00Z",
		"datacontenttype": "application/json", "data": null}`, data)
}

func TestToEmission_AllAttributes_AreInTheEnvelope(t *testing.T) {
	t.Parallel()
	var ce event.Event
	require.NoError(t, json.Unmarshal([]byte(`{
		"specversion": "1.0", "id": "A234-1234", "source": "https://other.example/orders", "type": "com.example.order.created", "subject": "customer-7",
		"time": "2026-11-21T12:30:00+02:00", "dataschema": "https://other.example/order.json", "datacontenttype": "application/json",
		"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "priority": 3, "urgent": true, "data": {"id": 7}}`), &ce))
	emission, err := cloudevents.ToEmission(ce)
	require.NoError(t, err)
	metadata, err := json.Marshal(emission.Metadata)
	require.NoError(t, err)
	require.JSONEq(t, `{"cloudevents": {
		"id": "A234-1234", "source": "https://other.example/orders", "time": "2026-11-21T10:30:00Z", "dataschema": "https://other.example/order.json",
		"datacontenttype": "application/json", "types": {"priority": "integer", "urgent": "boolean"}}}`, string(metadata))
	require.JSONEq(t, `{"id": 7}`, string(emission.Payload.(json.RawMessage)))
	emission.Metadata, emission.Payload = nil, nil
	require.Equal(t, eventbus.Emission{
		Type: "com.example.order.created",
		EmitOptions: eventbus.EmitOptions{
			Key: "customer-7", DedupKey: "https://other.example/orders\nA234-1234",
			Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "priority": "3", "urgent": "true"},
		},
	}, emission)
}

func TestToEmission_DataOfAllKinds_IsAPayloadThatHandlersCanRead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		contentType string
		data        []byte
		binary      bool
		payload     string
	}{
		"JSON":                {"application/json", []byte(`[1]`), false, `[1]`},
		"JSON as bytes":       {"application/json", []byte(`[1]`), true, `[1]`}, // what the SDK makes of []byte
		"JSON in capitals":    {"Application/JSON ; charset=utf-8", []byte(`[1]`), false, `[1]`},
		"JSON by default":     {"", []byte(`[1]`), false, `[1]`},
		"JSON of a vendor":    {"application/vnd.shop+json", []byte(`[1]`), false, `[1]`},
		"bytes for JSON":      {"application/json", []byte(`[1`), true, `"WzE="`},
		"text":                {"text/plain", []byte(`[1]`), false, `"[1]"`},
		"no text":             {"text/plain", []byte("\xff"), false, `"/w=="`},
		"text with NUL":       {"text/plain", []byte("a\x00"), false, `"YQA="`},
		"bytes":               {"application/octet-stream", []byte("a"), true, `"YQ=="`},
		"none":                {"text/plain", nil, false, ``},
		"text that is empty":  {"text/plain", []byte{}, false, `""`},
		"bytes that are none": {"text/plain", []byte{}, true, `""`},
	} {
		t.Run(name, func(t *testing.T) {
			ce := minimal()
			ce.SetDataContentType(c.contentType)
			ce.DataEncoded, ce.DataBase64 = c.data, c.binary
			emission, err := cloudevents.ToEmission(ce)
			require.NoError(t, err)
			require.Equal(t, c.payload, string(emission.Payload.(json.RawMessage)))
		})
	}
}

// minimal has no more than it has to.
func minimal() event.Event {
	ce := event.New()
	ce.SetID("1")
	ce.SetSource("/here")
	ce.SetType("a.b")
	return ce
}

// Invariant: what ToEmission takes comes back from FromEvent, as far as the JSON format tells.
func TestRoundTrip_CloudEvent_ComesBackFromTheBus(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	rapid.Check(t, func(t *rapid.T) {
		ce := anyCloudEvent.Draw(t, "CloudEvent")
		if _, read := asJSON(t, ce); rapid.Bool().Draw(t, "is read from JSON") {
			ce = read
		}
		emission, err := cloudevents.ToEmission(ce)
		require.NoError(t, err, "%v", ce)
		emission.DedupKey = "" // two may have the same id
		back, err := cloudevents.FromEvent(l.emit(t, emission), "https://elsewhere.example")
		require.NoError(t, err, "%v", ce)
		requireSame(t, ce, back)
	})
}

// requireSame asserts that two CloudEvents are the same in the JSON format. The SDK puts JSON of a vendor's type into a string, so
// data are compared apart.
func requireSame(t require.TestingT, want, got event.Event) {
	require.Equal(t, want.Data() == nil, got.Data() == nil)
	require.Equal(t, want.DataBase64, got.DataBase64)
	if json.Valid(want.Data()) {
		require.JSONEq(t, string(want.Data()), string(got.Data()))
	} else {
		require.Equal(t, want.Data(), got.Data())
	}
	want.DataEncoded, got.DataEncoded = nil, nil
	before, _ := asJSON(t, want)
	after, _ := asJSON(t, got)
	require.JSONEq(t, before, after)
}

// Invariant: what FromEvent takes comes back from ToEmission: all that an Emission has, and what it has not from another FromEvent.
func TestRoundTrip_Event_ComesBackFromACloudEvent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := anyEvent.Draw(t, "event")
		ce, err := cloudevents.FromEvent(e, "https://shop.example")
		require.NoError(t, err)
		text, read := asJSON(t, ce)
		emission, err := cloudevents.ToEmission(read)
		require.NoError(t, err, text)

		require.Equal(t, []string{e.Type, e.Key}, []string{emission.Type, emission.Key})
		require.JSONEq(t, string(e.Payload), string(emission.Payload.(json.RawMessage)))
		headers := maps.Clone(e.Headers)
		if e.ScheduledTaskID != "" {
			headers["scheduledtaskid"] = e.ScheduledTaskID
		}
		if len(headers) > 0 {
			require.Equal(t, headers, emission.Headers)
		}
		all, err := json.Marshal(emission.Metadata)
		require.NoError(t, err)
		rest := emission.Metadata.(map[string]json.RawMessage)
		delete(rest, cloudevents.MetadataKey)
		others, err := json.Marshal(rest)
		require.NoError(t, err)
		require.JSONEq(t, string(e.Metadata), string(others))

		again, err := cloudevents.FromEvent(&eventbus.Event{ID: 1, Namespace: "other", Type: emission.Type, Payload: emission.Payload.(json.RawMessage),
			Metadata: all, Headers: emission.Headers, Key: emission.Key}, "")
		require.NoError(t, err)
		after, _ := asJSON(t, again)
		require.JSONEq(t, text, after)
	})
}

func TestToEmission_TheSameCloudEventTwice_IsEmittedOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	emission := func(source, id string) eventbus.Emission {
		ce := minimal()
		ce.SetSource(source)
		ce.SetID(id)
		e, err := cloudevents.ToEmission(ce)
		require.NoError(t, err)
		return e
	}
	long := strings.Repeat("long", 100)
	emitted, err := l.EmitMany(t.Context(), []eventbus.Emission{
		emission("/a", "1"), emission("/a", "2"), emission("/b", "1"), emission("/a", "1"), emission("/a", long), emission("/a", long+"er"), emission("/a", long),
	})
	require.NoError(t, err)
	var twice []bool
	for _, e := range emitted {
		twice = append(twice, e.Duplicate)
	}
	require.Equal(t, []bool{false, false, false, true, false, false, true}, twice)
}

func TestFromEvent_WhatACloudEventCannotHave_IsAnErrorThatNamesIt(t *testing.T) {
	t.Parallel()
	kept := func(record string) func(*eventbus.Event) {
		return func(e *eventbus.Event) { e.Metadata = json.RawMessage(`{"cloudevents": ` + record + `}`) }
	}
	header := func(name, value string) func(*eventbus.Event) {
		return func(e *eventbus.Event) { e.Headers = map[string]string{name: value} }
	}
	for name, c := range map[string]struct {
		attribute string
		change    func(*eventbus.Event)
	}{
		"header with a hyphen":             {"x-request-id", header("x-request-id", "1")},
		"header with capitals":             {"Tenant", header("Tenant", "1")},
		"header that is an attribute":      {"subject", header("subject", "1")},
		"header that is the data":          {"data", header("data", "1")},
		"header that is the metadata":      {"pgwakemetadata", header("pgwakemetadata", "{}")},
		"header that is the schedule":      {"scheduledtaskid", func(e *eventbus.Event) { header("scheduledtaskid", "1")(e); e.ScheduledTaskID = "2" }},
		"header with a line":               {"tenant", header("tenant", "a\nb")},
		"header with no character":         {"tenant", header("tenant", "a\uFFFF")},
		"key with a control character":     {"subject", func(e *eventbus.Event) { e.Key = "a\tb" }},
		"key of spaces":                    {"subject", func(e *eventbus.Event) { e.Key = "  " }},
		"metadata with what is no text":    {"pgwakemetadata", func(e *eventbus.Event) { e.Metadata = json.RawMessage("{\"a\": \"\x7f\"}") }},
		"metadata that is no object":       {"pgwakemetadata", func(e *eventbus.Event) { e.Metadata = json.RawMessage(`[]`) }},
		"metadata of somebody else":        {"pgwakemetadata", kept(`"mine"`)},
		"metadata with more than there is": {"pgwakemetadata", kept(`{"id": "1", "source": "/", "more": 1}`)},
		"no source":                        {"source", kept(`{"id": "1"}`)},
		"no id":                            {"id", kept(`{"source": "/"}`)},
		"time that is none":                {"time", kept(`{"id": "1", "source": "/", "time": "noon"}`)},
		"schema that is none":              {"dataschema", kept(`{"id": "1", "source": "/", "dataschema": "%"}`)},
		"unknown kind of data":             {"data", kept(`{"id": "1", "source": "/", "data": "clay"}`)},
		"text that is none":                {"data", kept(`{"id": "1", "source": "/", "data": "text"}`)},
		"base64 that is none": {"data", func(e *eventbus.Event) {
			kept(`{"id": "1", "source": "/", "data": "base64"}`)(e)
			e.Payload = json.RawMessage(`"?"`)
		}},
		"number that is none": {"n", func(e *eventbus.Event) {
			kept(`{"id": "1", "source": "/", "types": {"n": "integer"}}`)(e)
			header("n", "many")(e)
		}},
		"unknown type of an extension": {"n", func(e *eventbus.Event) {
			kept(`{"id": "1", "source": "/", "types": {"n": "complex"}}`)(e)
			header("n", "1")(e)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			e := &eventbus.Event{ID: 1, Namespace: "shop", Type: "a", Payload: json.RawMessage(`{}`), EmittedAt: time.Now()}
			c.change(e)
			ce, err := cloudevents.FromEvent(e, "")
			isError(t, err, c.attribute)
			require.Equal(t, event.Event{}, ce)
		})
	}
	_, err := cloudevents.FromEvent(&eventbus.Event{ID: 1, Namespace: "shop", Type: "a"}, "https://%")
	isError(t, err, "source")
}

func TestToEmission_WhatAnEventCannotHave_IsAnErrorThatNamesIt(t *testing.T) {
	t.Parallel()
	extension := func(name string, value any) func(*event.Event) {
		return func(ce *event.Event) { ce.Context.(*event.EventContextV1).Extensions = map[string]any{name: value} }
	}
	data := func(contentType, data string, binary bool) func(*event.Event) {
		return func(ce *event.Event) {
			ce.SetDataContentType(contentType)
			ce.DataEncoded, ce.DataBase64 = []byte(data), binary
		}
	}
	for name, c := range map[string]struct {
		attribute string
		change    func(*event.Event)
	}{
		"nothing":                     {"specversion", func(ce *event.Event) { *ce = event.Event{} }},
		"version 0.3":                 {"specversion", func(ce *event.Event) { ce.SetSpecVersion("0.3") }},
		"no id":                       {"id", func(ce *event.Event) { ce.Context.(*event.EventContextV1).ID = "" }},
		"attribute that the SDK said": {"source", func(ce *event.Event) { ce.SetSource("%") }},
		"id with a line":              {"id", func(ce *event.Event) { ce.SetID("a\nb") }},
		"id that is no text":          {"id", func(ce *event.Event) { ce.SetID("a\xff") }},
		"source that is no URI":       {"source", func(ce *event.Event) { ce.Context.(*event.EventContextV1).Source.Path = "// " }},
		"source that is no text":      {"source", func(ce *event.Event) { ce.SetSource("urn:\u0085") }},
		"schema that is no URI": {"dataschema", func(ce *event.Event) {
			ce.Context.(*event.EventContextV1).DataSchema = &types.URI{URL: url.URL{Scheme: "1"}}
		}},
		"type with a space":    {"type", func(ce *event.Event) { ce.SetType("order created") }},
		"type with a wildcard": {"type", func(ce *event.Event) { ce.SetType("order.*") }},
		"type that is long":    {"type", func(ce *event.Event) { ce.SetType(strings.Repeat("a", eventbus.MaxTypeLength+1)) }},
		"subject that is long": {"subject", func(ce *event.Event) { ce.SetSubject(strings.Repeat("a", pgwake.MaxNameLength+1)) }},
		"subject with NUL":     {"subject", func(ce *event.Event) { ce.SetSubject("a\x00") }},
		"year of five digits": {"time", func(ce *event.Event) {
			ce.Context.(*event.EventContextV1).Time = &types.Timestamp{Time: time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)}
		}},
		"extension with a bad name":        {"my_ext", extension("my_ext", "a")},
		"extension that is an attribute":   {"data", extension("data", "a")},
		"extension that is no value":       {"a", extension("a", []string{"a"})},
		"extension with a line":            {"a", extension("a", "a\nb")},
		"extensions that are much":         {"extensions", extension("a", strings.Repeat("a", pgwake.MaxHeaderBytes))},
		"metadata that is none":            {"pgwakemetadata", extension("pgwakemetadata", "a")},
		"metadata that is null":            {"pgwakemetadata", extension("pgwakemetadata", "null")},
		"metadata with nothing":            {"pgwakemetadata", extension("pgwakemetadata", "{}")},
		"metadata of a CloudEvent":         {"pgwakemetadata", extension("pgwakemetadata", `{"cloudevents": null}`)},
		"metadata that PostgreSQL refuses": {"pgwakemetadata", extension("pgwakemetadata", `{"a": "\u0000"}`)},
		"data that is not JSON":            {"data", data("application/json", `{`, false)},
		"data that PostgreSQL refuses":     {"data", data("application/json", `"\u0000"`, false)},
	} {
		t.Run(name, func(t *testing.T) {
			ce := minimal()
			c.change(&ce)
			emission, err := cloudevents.ToEmission(ce)
			isError(t, err, c.attribute)
			require.Equal(t, eventbus.Emission{}, emission)
		})
	}
}

// What cannot be may be a secret, and an error goes to logs: it says of which attribute, and what that was to be.
func TestError_WhatCannotBe_IsNotInIt(t *testing.T) {
	t.Parallel()
	const secret = "s73731"
	var all []error
	events := map[string]*eventbus.Event{}
	for record, payload := range map[string]string{
		`"` + secret + `"`: `{}`,
		`{"id": "1", "source": "/", "` + secret + `": 1}`:                      `{}`,
		`{"id": {"` + secret + `": 1}, "source": "/"}`:                         `{}`,
		`{"id": "1", "source": "%` + secret + `"}`:                             `{}`,
		`{"id": "1", "source": "/", "dataschema": "%` + secret + `"}`:          `{}`,
		`{"id": "1", "source": "/", "time": "` + secret + `"}`:                 `{}`,
		`{"id": "\u007f` + secret + `", "source": "/"}`:                        `{}`,
		`{"id": "1", "source": "/", "datacontenttype": "` + secret + `;x"}`:    `{}`,
		`{"id": "1", "source": "/", "datacontenttype": "a/b; ` + secret + `"}`: `{}`,
		`{"id": "1", "source": "/", "data": "` + secret + `"}`:                 `{}`,
		`{"id": "1", "source": "/", "data": "text"}`:                           `{"a": "` + secret + `"}`,
		`{"id": "1", "source": "/", "data": "base64"}`:                         `"` + secret + `?"`,
		`{"id": "1", "source": "/", "types": {"n": "integer"}}`:                `{}`,
		`{"id": "1", "source": "/", "types": {"n": "boolean"}}`:                `{}`,
		`{"id": "1", "source": "/", "types": {"n": "` + secret + `"}}`:         `{}`,
	} {
		events[record] = &eventbus.Event{ID: 1, Namespace: "shop", Type: "a", Payload: json.RawMessage(payload), Metadata: json.RawMessage(`{"cloudevents": ` + record + `}`),
			Headers: map[string]string{"n": secret}}
	}
	for name, change := range map[string]func(*eventbus.Event){
		"header":   func(e *eventbus.Event) { e.Headers = map[string]string{"n": "\u0085" + secret} },
		"key":      func(e *eventbus.Event) { e.Key = secret + "\x7f" },
		"metadata": func(e *eventbus.Event) { e.Metadata = json.RawMessage(`["` + secret + `"]`) },
	} {
		events[name] = &eventbus.Event{ID: 1, Namespace: "shop", Type: "a", Payload: json.RawMessage(`{}`)}
		change(events[name])
	}
	for name, e := range events {
		_, err := cloudevents.FromEvent(e, "")
		require.Error(t, err, name)
		all = append(all, err)
	}
	for name, change := range map[string]func(*event.Event, *event.EventContextV1){
		"id":           func(ce *event.Event, _ *event.EventContextV1) { ce.SetID(secret + "\nx") },
		"source":       func(ce *event.Event, _ *event.EventContextV1) { ce.SetSource("%" + secret) },
		"schema":       func(ce *event.Event, _ *event.EventContextV1) { ce.SetDataSchema("%" + secret) },
		"subject":      func(ce *event.Event, _ *event.EventContextV1) { ce.SetSubject("\x00" + secret) },
		"long subject": func(ce *event.Event, _ *event.EventContextV1) { ce.SetSubject(strings.Repeat(secret, 100)) },
		"content type": func(ce *event.Event, _ *event.EventContextV1) { ce.SetDataContentType("a/b; " + secret) },
		"no value":     func(_ *event.Event, c *event.EventContextV1) { c.Extensions = map[string]any{"a": []string{secret}} },
		"line":         func(_ *event.Event, c *event.EventContextV1) { c.Extensions = map[string]any{"a": secret + "\n"} },
		"long extension": func(_ *event.Event, c *event.EventContextV1) {
			c.Extensions = map[string]any{"a": strings.Repeat(secret, pgwake.MaxHeaderBytes)}
		},
		"metadata": func(_ *event.Event, c *event.EventContextV1) { c.Extensions = map[string]any{"pgwakemetadata": secret} },
		"metadata that is text": func(_ *event.Event, c *event.EventContextV1) {
			c.Extensions = map[string]any{"pgwakemetadata": `"` + secret + `"`}
		},
		"metadata with NUL": func(_ *event.Event, c *event.EventContextV1) {
			c.Extensions = map[string]any{"pgwakemetadata": `{"` + secret + `": "\u0000"}`}
		},
		"no JSON": func(ce *event.Event, _ *event.EventContextV1) {
			ce.SetDataContentType("application/json")
			ce.DataEncoded = []byte(secret)
		},
		"JSON with NUL": func(ce *event.Event, _ *event.EventContextV1) {
			ce.SetDataContentType("application/json")
			ce.DataEncoded = []byte(`"` + secret + `\u0000"`)
		},
	} {
		ce := minimal()
		change(&ce, ce.Context.(*event.EventContextV1))
		_, err := cloudevents.ToEmission(ce)
		require.Error(t, err, name)
		all = append(all, err)
	}
	var chain func(error) []error
	chain = func(err error) []error {
		switch of := err.(type) {
		case interface{ Unwrap() error }:
			return append(chain(of.Unwrap()), err)
		case interface{ Unwrap() []error }:
			all := []error{err}
			for _, one := range of.Unwrap() {
				all = append(all, chain(one)...)
			}
			return all
		}
		return []error{err}
	}
	for _, err := range all {
		for _, one := range chain(err) {
			assert.NotContains(t, fmt.Sprintf("%v %+v %#v", one, one, one), secret)
		}
	}
}

func isError(t *testing.T, err error, attribute string) {
	t.Helper()
	var failure *cloudevents.Error
	require.ErrorAs(t, err, &failure)
	require.Equal(t, attribute, failure.Attribute, "%v", err)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}
