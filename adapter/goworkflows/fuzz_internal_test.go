package goworkflows

import (
	"encoding/json"
	"testing"

	"github.com/cschleiden/go-workflows/core"
	"github.com/stretchr/testify/require"
)

// This file answers: what is read of what is in the queues and in the history, whatever it is?

// An event is refused, or can be written down, and is then read as the same. The runtime's decoder does not panic.
func FuzzEvent_AnyText_IsRefusedOrReadsAsItIsWritten(f *testing.F) {
	for _, text := range []string{
		"", "null", "[]", "{}", `{"t": 1}`, `{"t": 1, "attr": null}`, `{"t": 4, "attr": {}}`, `{"t": -1, "attr": {}}`, `{"t": 999, "attr": {}}`, `{"t": 1, "attr": []}`,
		`{"id": "1", "sid": 7, "t": 18, "sched_event_id": 3, "ts": "2026-11-25T10:30:15Z", "attr": {"name": "paid", "arg": {"a": 1}}}`,
		`{"t": 13, "vis_at": "2026-11-25T10:30:15.5+01:00", "attr": {"error": {"type": "x", "message": "\ud800", "cause": {"cause": null}}}}`,
		`{"T": 1, "ATTR": {"Name": "w", "inputs": [1, "a", {}], "metadata": {"a": "b"}}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var open opening
		_ = json.Unmarshal(text, &open)
		e, err := decodeEvent(text)
		if err != nil {
			return
		}
		written, err := encode(e)
		require.NoError(t, err)
		again, err := decodeEvent(written)
		require.NoError(t, err, "%s", written)
		rewritten, err := encode(again)
		require.NoError(t, err)
		require.JSONEq(t, string(written), string(rewritten))
	})
}

// An execution that may be is what the name of its instance stands for.
func FuzzInstance_AnyIDs_AreRefusedOrComeBack(f *testing.F) {
	f.Add("order", "1")
	f.Add("order/7/", "018f4e5a")
	f.Add("", "")
	f.Add("a", "b/c")
	f.Fuzz(func(t *testing.T, instance, execution string) {
		if w := core.NewWorkflowInstance(instance, execution); checkInstance(w) == nil {
			require.Equal(t, w, executionOf(instanceOf(w)))
		}
		require.NotNil(t, executionOf(instance))
	})
}

// What does not fit may be a secret, and errors of turns go to logs.
func TestDecodeEvent_WhatDoesNotFit_IsNotInTheError(t *testing.T) {
	for text, says := range map[string]string{
		`{"t": 73731.5}`:                     "read an event: field t, at byte 13, does not fit",
		`{"t": "73731"}`:                     "read an event: field t, at byte 13, does not fit",
		`{"t": 1, "sid": 73731.5}`:           ".sid, at byte 23, does not fit int64",
		`{"t": 1, "ts": "s73731"}`:           "read an event: something in it does not fit",
		`{"t": 1, "attr": {"name": 73731}}`:  "read an event: ",
		`{"t": 1, "attr": {"queue": 73731}}`: "read an event: ",
	} {
		_, err := decodeEvent(json.RawMessage(text))
		require.ErrorContains(t, err, says, text)
		require.NotContains(t, err.Error(), "73731", text)
	}
}
