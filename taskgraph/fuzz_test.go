package taskgraph_test

import (
	"encoding/json"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what do cursors, notifications and headers from outside mean, whatever they are? `make fuzz` looks for more than the seeds.

// A text is refused, or is a cursor that can be written down and asked for.
func FuzzParseCursor_AnyText_IsRefusedOrAPlace(f *testing.F) {
	for _, text := range []string{"", "0/0", "/", "7", "+7/+8", "07/08", "7/-8", "18446744073709551615/9223372036854775807", "18446744073709551616/1", "1/2/3", "1/2 ", "\xff/1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := taskgraph.ParseCursor(text)
		if err != nil {
			requireForALog(t, err)
			return
		}
		again, err := taskgraph.ParseCursor(c.String())
		require.NoError(t, err)
		require.Equal(t, c, again)
		require.GreaterOrEqual(t, c.ID, int64(0))
	})
}

// requireForALog fails unless an input was refused, in a line for a log.
func requireForALog(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.True(t, utf8.ValidString(err.Error()) && len(err.Error()) < 1000, "%q", err)
}

// The payload of a notification is refused, or is what it is when it is written down and read again.
func FuzzParsePayload_AnyText_IsRefusedOrComplete(f *testing.F) {
	for _, payload := range []string{
		"", "null", "[]", `{"task_uuid": 7}`,
		`{"task_uuid": "018f4e5a-0000-7000-8000-000000000001", "namespace": "n", "ready_steps": 1, "triggered_by": "x", "task_state": "complete", "action_needed": "y",
			"namespace_uuid": "018f4e5a-0000-7000-8000-000000000002", "namespace_name": "n", "msg_id": 1, "queue_name": "q", "emitted_at": "2026-11-25T10:30:15Z", "new": {}}`,
	} {
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		samePayload(t, payload, taskgraph.ParseTaskReady)
		samePayload(t, payload, taskgraph.ParseTaskStateChange)
		samePayload(t, payload, taskgraph.ParseNamespaceCreated)
		samePayload(t, payload, taskgraph.ParseMessageReady)
	})
}

func samePayload[T any](t *testing.T, payload string, parse func(string) (T, error)) {
	t.Helper()
	event, err := parse(payload)
	if err != nil {
		requireForALog(t, err)
		return
	}
	written, err := json.Marshal(event)
	require.NoError(t, err)
	again, err := parse(string(written))
	require.NoError(t, err, "%s", written)
	rewritten, err := json.Marshal(again)
	require.NoError(t, err)
	require.Equal(t, string(written), string(rewritten))
}

// Whatever a header says, nobody waits for less than nothing, and longer for the same date when it is earlier.
func FuzzParseRetryAfter_AnyHeader_IsNoneOrADelay(f *testing.F) {
	for _, header := range []string{"", "20", "99999999999999999999", "Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "-1", "１"} {
		f.Add(header, int64(784_111_747))
	}
	f.Fuzz(func(t *testing.T, header string, second int64) {
		now := time.Unix(second%(1<<40), 0)
		d, ok := taskgraph.ParseRetryAfter(header, now)
		require.True(t, d >= 0 && (ok || d == 0), d)
		earlier, same := taskgraph.ParseRetryAfter(header, now.Add(-time.Hour))
		require.Equal(t, ok, same)
		require.GreaterOrEqual(t, earlier, d)
	})
}
