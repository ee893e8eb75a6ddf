package cloudevents_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/pgwake/pgwake/adapter/cloudevents"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what is made of CloudEvents, and of metadata and headers, that others have written? `make fuzz` looks for more than the seeds.

// A CloudEvent in the JSON format is refused, with what of it, or the event that it is emitted as is the same CloudEvent.
func FuzzToEmission_AnyJSON_IsRefusedOrComesBack(f *testing.F) {
	for _, text := range []string{
		`{"specversion":"1.0","id":"1","source":"/here","type":"a.b"}`,
		`{"specversion":"1.0","id":"1","source":"urn:x","type":"a","subject":"s","time":"2026-11-25T10:30:15.123456789+01:00","dataschema":"https://a/b","x":true,"n":7,"t":"2026-11-25T10:30:15Z","data":{"a":[1e400]}}`,
		`{"specversion":"1.0","id":"1","source":"/","type":"a","datacontenttype":"text/xml; charset=utf-8","data":"<a/>"}`,
		`{"specversion":"1.0","id":"1","source":"/","type":"a","datacontenttype":"application/vnd.x+json","data_base64":"AAEC"}`,
		`{"specversion":"1.0","id":"1","source":"/","type":"a","pgwakemetadata":"{\"a\":{}}","scheduledtaskid":"x","data":null}`,
		"{\"specversion\":\"1.0\",\"id\":\"1\",\"source\":\"/\",\"type\":\"a\",\"datacontenttype\":\"text/xml\",\"data\":\"\xc0\"}",
		`{"specversion":"1.0","id":"1","source":"/","type":"a","datacontenttype":"text/xml","data":"\u0000"}`, `{"specversion":"0.3","id":"1","source":"/","type":"a","data":"\u0000"}`, `{"specversion":"1.0","id":"\u0085","source":"%","type":"a.*"}`, `[]`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var ce event.Event
		if json.Unmarshal(text, &ce) != nil {
			return
		}
		comesBack(t, ce)
	})
}

// What an event of the bus has is refused, with what of it, or it is a CloudEvent that is emitted as one that is the same.
func FuzzFromEvent_AnyMetadata_IsRefusedOrComesBack(f *testing.F) {
	f.Add([]byte(`{}`), []byte(`{"cloudevents": {"id": "1", "source": "/", "data": "base64", "types": {"n": "integer"}}}`), "n", "7", "key")
	f.Add([]byte(`"AAEC"`), []byte(`{"a": 1, "cloudevents": {"id": "1", "source": "/", "data": "base64", "datacontenttype": "a/b"}}`), "traceparent", "x", "")
	f.Add([]byte(`"text"`), []byte(`{"cloudevents": {"id": "", "source": "%", "time": "x", "data": "text"}}`), "x", "", "")
	f.Add([]byte(`7`), []byte(`{"cloudevents": {"id": "1", "source": "/", "data": "none"}}`), "pgwakemetadata", "{}", "a\tb")
	f.Add([]byte(`null`), []byte(`null`), "data", "\xff", "k")
	f.Add([]byte(nil), []byte(nil), "x", "y", "k")
	f.Fuzz(func(t *testing.T, payload, metadata []byte, name, value, key string) {
		if len(payload) > 0 && !json.Valid(payload) || len(metadata) > 0 && !json.Valid(metadata) {
			return // the bus has no such
		}
		ce, err := cloudevents.FromEvent(&eventbus.Event{ID: 7, Namespace: "n", Type: "a.b", Payload: payload, Metadata: metadata, Headers: map[string]string{name: value}, Key: key}, "https://shop.example")
		if err != nil {
			requireError(t, err)
			return
		}
		comesBack(t, ce)
	})
}

// comesBack asserts that a CloudEvent is refused, or is emitted as what is that CloudEvent.
func comesBack(t *testing.T, ce event.Event) {
	t.Helper()
	emission, err := cloudevents.ToEmission(ce)
	if err != nil {
		requireError(t, err)
		return
	}
	require.NotEmpty(t, emission.DedupKey)
	metadata, err := json.Marshal(emission.Metadata)
	require.NoError(t, err)
	payload, _ := emission.Payload.(json.RawMessage)
	back, err := cloudevents.FromEvent(&eventbus.Event{ID: 1, Namespace: "other", Type: emission.Type, Payload: payload, Metadata: metadata, Headers: emission.Headers, Key: emission.Key}, "")
	require.NoError(t, err)
	require.Equal(t, string(ce.Data()), string(back.Data())) // there is no database between them
	if data := ce.Data(); !utf8.Valid(data) || bytes.IndexByte(data, 0) >= 0 {
		ce.DataBase64 = true // no text that there can be
	}
	for _, e := range []*event.Event{&ce, &back} {
		*e = e.Clone()
		e.DataEncoded = nil
		// The one extension that is read, and so written anew.
		if text, is := e.Extensions()["pgwakemetadata"].(string); is {
			all := map[string]json.RawMessage{}
			require.NoError(t, json.Unmarshal([]byte(text), &all))
			compact, err := json.Marshal(all)
			require.NoError(t, err)
			e.SetExtension("pgwakemetadata", string(compact))
		}
	}
	requireSame(t, ce, back)
}

func requireError(t *testing.T, err error) {
	t.Helper()
	var refused *cloudevents.Error
	require.ErrorAs(t, err, &refused)
	require.NotEmpty(t, refused.Error())
}
