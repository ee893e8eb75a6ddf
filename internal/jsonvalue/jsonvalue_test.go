package jsonvalue_test

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/jsonvalue"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What does not fit may be a secret.
func TestUnmarshal_WhatDoesNotFit_IsNotInTheError(t *testing.T) {
	t.Parallel()
	type inner struct {
		N    int8
		When time.Time
		Keys map[int8]string
		Num  json.Number
		Text int `json:",string"`
	}
	type outer struct{ In []inner }
	for text, says := range map[string]string{
		`{"In": [{"N": 73731}]}`:              ", does not fit int8",
		`{"In": [{"N": "73731"}]}`:            "field In.N, at byte 21, does not fit int8",
		`{"In": [{"Keys": {"73731": ""}}]}`:   "does not fit int8",
		`{"In": [{"When": "s73731"}]}`:        "something in it does not fit jsonvalue_test.outer (*time.ParseError)",
		`{"In": [{"When": "s73731"}, {}, 3]}`: "does not fit jsonvalue_test.outer",
		`{"In": [{"Num": "73731x"}]}`:         "something in it does not fit jsonvalue_test.outer",
		`{"In": [{"Text": "73731x"}]}`:        "field In.Text, at byte",
		`"73731"`:                             "what is at byte 7 does not fit jsonvalue_test.outer",
		`73731x`:                              "not JSON from byte 6 on",
		``:                                    "not JSON from byte 0 on",
	} {
		err := jsonvalue.Unmarshal([]byte(text), new(outer))
		require.ErrorContains(t, err, says, text)
		for ; err != nil; err = errors.Unwrap(err) {
			require.NotContains(t, err.Error(), "73731", text)
		}
	}
	require.ErrorContains(t, jsonvalue.Unmarshal([]byte(`1`), outer{}), "non-pointer jsonvalue_test.outer")
	require.ErrorContains(t, jsonvalue.Unmarshal([]byte(`1`), nil), "Unmarshal(nil)")
}

func TestUnmarshal_WhatFits_IsThere(t *testing.T) {
	t.Parallel()
	var n struct{ A []int }
	require.NoError(t, jsonvalue.Unmarshal([]byte(`{"A": [1, 2]}`), &n))
	require.Equal(t, []int{1, 2}, n.A)
}

func TestUnmarshalStrict_WhatNobodyKnows_IsRefused_AndNotInTheError(t *testing.T) {
	t.Parallel()
	var n struct{ A []int }
	require.NoError(t, jsonvalue.UnmarshalStrict([]byte(`{"A": [1, 2]}`), &n))
	require.Equal(t, []int{1, 2}, n.A)
	for text, says := range map[string]string{`{"A": [1], "s73731": 2}`: "something in it does not fit struct", `{"A": ["s73731"]}`: "field A", `s73731`: "not JSON from byte 1 on", ``: "does not fit struct"} {
		err := jsonvalue.UnmarshalStrict([]byte(text), &n)
		require.ErrorContains(t, err, says, text)
		require.NotContains(t, err.Error(), "73731")
	}
}
