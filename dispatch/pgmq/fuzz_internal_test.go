package pgmq

import (
	"encoding/json"
	"testing"

	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what is made of the headers of a message, whoever has written them?

// Whatever others have written: a delivery keeps its name unless another is given, this attempt counts, and each header is there that is not of this package.
func FuzzHeaders_AnyJSON_LeaveADelivery(f *testing.F) {
	for _, text := range []string{
		``, `null`, `[]`, `{}`, `{"a": "b", "n": 1.50, "o": {"x": [null]}, "z": null}`, `{"pgwake": null}`, `{"pgwake": "x"}`, `{"pgwake": {"name": 7, "free": 2, "error": "e"}}`,
		`{"pgwake": {"free": 3}}`, `{"pgwake": {"free": -9223372036854775808}}`, `{"pgwake": {"free": 1e3, "name": "other"}}`, `{"pgwake": {"Name": "other"}}`, `{"Pgwake": {"name": "other"}, "": ""}`,
	} {
		f.Add([]byte(text), 3)
	}
	f.Fuzz(func(t *testing.T, headers []byte, attempt int) {
		if attempt < 1 {
			return
		}
		d := dispatch.StreamDelivery{StreamMessage: dispatch.StreamMessage{Name: "queue"}, Attempt: attempt}
		addHeaders(&d, headers)
		require.NotEmpty(t, d.Name)
		require.Positive(t, d.Attempt)
		require.LessOrEqual(t, d.Attempt, attempt)
		var all map[string]json.RawMessage
		if json.Unmarshal(headers, &all) != nil {
			require.Empty(t, d.Headers)
			return
		}
		delete(all, ownHeader)
		require.Len(t, d.Headers, len(all))
		for name := range all {
			require.Contains(t, d.Headers, name)
		}
	})
}

// A message that may be sent is delivered as it was sent.
func FuzzHeaders_OfAMessage_ComeBack(f *testing.F) {
	f.Add("name", "header", "value")
	f.Add("", "Pgwake", "")
	f.Add("\u202en", "\x00", "\xff")
	f.Fuzz(func(t *testing.T, name, header, value string) {
		m := &dispatch.StreamMessage{Name: name, Headers: map[string]string{header: value}}
		if header == ownHeader || noText(m) != "" { // which Publish refuses
			return
		}
		var d dispatch.StreamDelivery
		addHeaders(&d, []byte(headersOf(m)))
		require.Equal(t, m.Name, d.Name)
		require.Equal(t, m.Headers, d.Headers)
	})
}
