package pgmq_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of names that somebody has made up to do harm?

// hostile are texts that become namespaces, and so queues and tables; names, headers and bodies of messages.
var hostile = map[string]string{
	"one character":   "a",
	"one digit":       "1",
	"underscore":      "_",
	"upper case":      "AB",
	"quotes":          `it's "quoted"`,
	"SQL":             "x'; DROP SCHEMA pgmq CASCADE; --",
	"identifier":      `x"; DROP SCHEMA pgmq CASCADE; --`,
	"comment":         "x/*",
	"dollars":         "$$; SELECT 1; $$",
	"format":          `%I %L %s %1$I \ $1`,
	"pattern":         ".*",
	"combined":        "a\u0308ß\U0001F600",
	"letters":         "ñandú",
	"right to left":   "\u202egnp.exe\u2066",
	"invisible":       "a\u200b\ufeff",
	"white":           " \t ",
	"lines":           "a\nb\r",
	"line at the end": "ab\n",
	"control":         "\x01\x1b[2J\x7f",
	"NUL":             "a\x00b",
	"no UTF-8":        "a\xffb",
	"half a pair":     "a\xed\xa0\x80",
	"longest":         strings.Repeat("x", 41),
	"longer":          strings.Repeat("x", 42),
	"much longer":     strings.Repeat("é", 10_000),
	"of a worker":     "worker_",
	"none":            "",
}

// Each name is refused, and then nothing was created or sent, or it is another one than all others, and comes out as it was.
func TestNames_Hostile_AreRefusedOrCarriedUnchanged(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('ab_queue'), pgmq.create('odd')`)
	queues := func() (n int) {
		t.Helper()
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_tables WHERE schemaname = 'pgmq'`).Scan(&n))
		return n
	}
	check := func(t *testing.T, namespace string, m dispatch.StreamMessage) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		before := queues()
		if err := s.Publish(ctx, namespace, m); err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			require.Equal(t, before, queues())
			if namespace != "plain" { // it has no messages, or cannot be
				short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				_, err := s.Receive(short, namespace, 1, time.Minute)
				cancel()
				require.True(t, errors.Is(err, pgwake.ErrInvalid) || errors.Is(err, context.DeadlineExceeded), "%v", err)
			}
		} else {
			got, err := s.Receive(ctx, namespace, 10, time.Minute)
			require.NoError(t, err)
			require.Len(t, got, 1)
			if m.Name == "" { // it is for the handler that is called as the queue is
				m.Name = namespace + "_queue"
			}
			if len(m.Payload) > 0 {
				require.JSONEq(t, string(m.Payload), string(got[0].Payload))
			}
			m.Payload = got[0].Payload
			require.Equal(t, m, got[0].StreamMessage)
			require.Equal(t, namespace, got[0].Namespace)
			s.ack(t, got...)
		}
		for _, other := range []string{"ab", "default"} {
			short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			_, err := s.Receive(short, other, 1, time.Minute)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded, "nothing is there of another")
		}
	}
	plain := dispatch.StreamMessage{Name: "n", Payload: []byte(`"p"`), Headers: map[string]string{"k": "v"}}
	for what, text := range hostile {
		t.Run(what, func(t *testing.T) {
			quoted, err := json.Marshal(text)
			require.NoError(t, err)
			t.Run("namespace", func(t *testing.T) { check(t, text, plain) })
			for part, change := range map[string]func(*dispatch.StreamMessage){
				"name":   func(m *dispatch.StreamMessage) { m.Name = text },
				"value":  func(m *dispatch.StreamMessage) { m.Headers = map[string]string{"k": text} },
				"header": func(m *dispatch.StreamMessage) { m.Headers = map[string]string{text: "v"} },
				"text":   func(m *dispatch.StreamMessage) { m.Payload = quoted },
				"body":   func(m *dispatch.StreamMessage) { m.Payload = []byte(text) },
			} {
				m := plain
				change(&m)
				t.Run(part, func(t *testing.T) { check(t, "plain", m) })
			}
		})
	}
}

// pgmq has names of tables in lower case: two queues that differ by that alone are one.
func TestPublish_NamespacesThatDifferByCase_AreNotOne(t *testing.T) {
	s := standIn(t)
	namespaces := []string{"ab", "AB", "aB"}
	var sent []string
	for _, namespace := range namespaces {
		if err := s.Publish(t.Context(), namespace, dispatch.StreamMessage{Name: namespace}); err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			continue
		}
		sent = append(sent, namespace)
	}
	require.Equal(t, []string{"ab", "AB"}, sent, "there are two names for a queue")
	for _, namespace := range sent {
		d := s.receive(t, namespace)
		require.Equal(t, namespace, d.Name)
		s.ack(t, d)
	}
	since := s.now(t)
	got := make(chan dispatch.StreamDelivery, 1)
	go func() { got <- s.receive(t, "ab") }()
	s.waits(t, since)
	s.exec(t, `SELECT pgmq.send('ab_queue', '1')`)
	s.ack(t, <-got) // at once, since it is told of as that of ab
}
