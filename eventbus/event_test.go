package eventbus_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a handler get of an event?

// What does not fit may be a secret, and the error of a handler goes to logs, and with a dead letter.
func TestDecode_WhatDoesNotFit_IsNotInTheError(t *testing.T) {
	t.Parallel()
	type order struct {
		N    int8
		When time.Time
		Text int `json:",string"`
	}
	for payload, says := range map[string]string{
		`{"N": 73731}`:        "decode the payload of event 7: field N, at byte 11, does not fit int8",
		`{"When": "s73731"}`:  "decode the payload of event 7: something in it does not fit eventbus_test.order (*time.ParseError)",
		`{"Text": "73731x"}`:  "decode the payload of event 7: field Text, at byte",
		`{"N": "73731"}`:      "decode the payload of event 7: field N, at byte 13, does not fit int8",
		`73731x`:              "decode the payload of event 7: not JSON from byte 6 on",
		`{"N": 1, "Text": 3}`: "decode the payload of event 7: ",
	} {
		e := eventbus.Event{ID: 7, Payload: json.RawMessage(payload)}
		err := e.Decode(new(order))
		require.ErrorContains(t, err, says, payload)
		for ; err != nil; err = errors.Unwrap(err) {
			require.NotContains(t, err.Error(), "73731", payload)
		}
	}
	var o order
	require.NoError(t, (&eventbus.Event{Payload: json.RawMessage(`{"N": 3, "Text": "4"}`)}).Decode(&o))
	require.Equal(t, order{N: 3, Text: 4}, o)
}
