package pgwake_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what is too much, and what becomes of it?

// nested is JSON that is so deep: arrays, or objects.
func nested(depth int, open, end string) json.RawMessage {
	return json.RawMessage(strings.Repeat(open, depth) + "1" + strings.Repeat(end, depth))
}

// bombs are payloads that a check may miss, and that the server or a reader trips over.
func bombs() map[string]json.RawMessage {
	return map[string]json.RawMessage{
		"deep arrays":     nested(pgwake.MaxDepth+1, "[", "]"),
		"deep objects":    nested(pgwake.MaxDepth+1, `{"a":`, "}"),
		"very deep":       nested(9_000, "[", "]"),
		"unclosed":        json.RawMessage(strings.Repeat("[", 1<<20)),
		"NUL":             json.RawMessage("\"\x00\""),
		"escaped NUL":     json.RawMessage(`{"a\u0000":1}`),
		"invalid UTF-8":   json.RawMessage("\"\xff\""),
		"encoded half":    json.RawMessage("\"\xed\xa0\x80\""),
		"lone surrogate":  json.RawMessage(`"\ud83d"`),
		"turned pair":     json.RawMessage(`"\ude00\ud83d"`),
		"deep in a quote": append(append(json.RawMessage(`["`+strings.Repeat("[", 2*pgwake.MaxDepth)+`\"",`), nested(pgwake.MaxDepth, "[", "]")...), ']'),
	}
}

func TestVerbs_PayloadBomb_InvalidAndNothingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	before := n.content(t)
	for what, data := range bombs() {
		m := pgwake.Message{Instance: "i", Kind: "k", Data: data}
		event := pgwake.Event{ID: 1, Type: "e", Data: data}
		for verb, call := range map[string]func() error{
			"work": func() error {
				return dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: data}, nil))
			},
			"message": func() error { return dropped(n.EnqueueForOrchestrator(t.Context(), m, nil)) },
			"ack":     func() error { return n.AckWorkItem(t.Context(), c.work, &m) },
			"event":   func() error { return n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event}) },
			"turn": func() error {
				return n.AckOrchestrationItem(t.Context(), c.turn, pgwake.OrchestrationAck{History: []pgwake.Event{event}})
			},
			"attributes": func() error {
				return n.AckOrchestrationItem(t.Context(), c.turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Attributes: data}})
			},
		} {
			err := requireError(t, call(), pgwake.ErrInvalid)
			require.Empty(t, err.SQLState, "%s, %s: it was sent: %v", what, verb, err)
			require.Less(t, len(err.Error()), 1000)
		}
	}
	require.Equal(t, before, n.content(t))
}

func TestEnqueueForWorker_AsDeepAsMayBe_ComesBackAndTheServerCanTakeItApart(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	quoted := json.RawMessage(`"` + strings.Repeat(`[\"{\\`, pgwake.MaxDepth) + `"`) // brackets that nest nothing
	for _, data := range []json.RawMessage{nested(pgwake.MaxDepth, "[", "]"), nested(pgwake.MaxDepth, `{"a":`, "}"), quoted} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: data}, nil)
		require.NoError(t, err)
		require.Len(t, query[string](t, n, `SELECT jsonb_typeof(input::jsonb) FROM worker_queue`), 1)
		item := n.take(t)
		require.Equal(t, data, item.Input)
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	}
}

// What comes by SQL has met no check in Go. Of 128 MiB each of these would take seconds.
func TestSQL_PayloadBeyondTheServer_IsInvalidByItsConstraint(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const bounds = `SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND conname LIKE '%\_payload\_check'`
	all := query[string](t, n, bounds)
	require.Len(t, all, 7)
	for _, bound := range all {
		require.Contains(t, bound, "<= 134217728")
	}
	n.exec(t, `ALTER TABLE worker_queue DROP CONSTRAINT worker_queue_payload_check, ADD CONSTRAINT worker_queue_payload_check CHECK (pg_column_size(input) <= 128)`)
	_, err := n.begin(t).Exec(t.Context(), `SELECT enqueue_work('x', ('"' || repeat('x', 128) || '"')::json)`)
	requireError(t, pgwake.WrapError("enqueue", err), pgwake.ErrPayloadTooLarge)
	require.ErrorIs(t, pgwake.WrapError("enqueue", err), pgwake.ErrInvalid)

	// JSON deeper than the stack of the server: it says so by an SQLSTATE of its own.
	_, err = n.begin(t).Exec(t.Context(), `SELECT (repeat('[', 100000) || repeat(']', 100000))::jsonb`)
	require.Equal(t, "54001", requireError(t, pgwake.WrapError("cast", err), pgwake.ErrInvalid).SQLState)
}

func TestConfig_MaxPayloadBeyondTheServer_IsErrConfig(t *testing.T) {
	t.Parallel()
	_, err := pgwake.Open(t.Context(), "postgres://localhost/none", &pgwake.Config{MaxPayload: 100<<20 + 1})
	require.ErrorContains(t, requireError(t, err, pgwake.ErrConfig), "MaxPayload")
}

// Namespaces

// atMost has there be so few namespaces.
func (n *node) atMost(t *testing.T, most int) {
	n.exec(t, fmt.Sprintf(`CREATE OR REPLACE FUNCTION max_namespaces() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS 'SELECT %d'`, most))
}

func TestNamespaces_OneTooMany_IsRefusedAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.atMost(t, 3) // with the default one
	in := func(namespace string) *pgwake.EnqueueOptions { return &pgwake.EnqueueOptions{Namespace: namespace} }
	for _, known := range []string{"a", "b", "a", "b", "default"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: known}, in(known))
		require.NoError(t, err)
	}
	before := n.content(t)
	for what, call := range map[string]func() error{
		"work": func() error {
			return dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, in("c")))
		},
		"message": func() error {
			return dropped(n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: "k"}, in("c")))
		},
		"many": func() error {
			return dropped(n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{{pgwake.WorkItem{Name: "x"}, *in("a")}, {pgwake.WorkItem{Name: "x"}, *in("c")}}))
		},
		"register": func() error { return n.RegisterNamespace(t.Context(), "c") },
		"limits":   func() error { return n.SetLimits(t.Context(), "c", pgwake.Limits{MaxRunning: 1}) },
	} {
		t.Run(what, func(t *testing.T) {
			err := requireError(t, call(), pgwake.ErrTooManyNamespaces)
			require.Equal(t, "PW008", err.SQLState)
			require.False(t, err.Retryable)
			require.False(t, err.Unknown)
		})
	}
	require.Equal(t, before, n.content(t))
	require.NoError(t, n.RegisterNamespace(t.Context(), "b"))
	require.ElementsMatch(t, []string{"a", "b", "a", "b", "default"}, n.takeAll(t))
}

// The limit as it is. To find that there are too many takes milliseconds, and who adds none does not come to it.
func TestNamespaces_HundredThousand_OneMoreIsRefusedAtOnceAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `ALTER TABLE namespaces DISABLE TRIGGER USER`) // who would be told one by one
	n.exec(t, `INSERT INTO namespaces (name) SELECT 'n' || i FROM generate_series(2, max_namespaces()) AS i`)
	n.exec(t, `ALTER TABLE namespaces ENABLE TRIGGER USER`)
	require.Equal(t, []int64{100_000}, query[int64](t, n, `SELECT count(*) FROM namespaces`))
	began := time.Now()
	for range 3 {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: "more"})
		requireError(t, err, pgwake.ErrTooManyNamespaces)
		n.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "n100000"})
	}
	require.Less(t, time.Since(began), 10*time.Second)
	require.Equal(t, []string{"x", "x", "x"}, n.takeAll(t))
	n.exec(t, `DELETE FROM namespaces WHERE name = 'n7'`)
	n.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "more"})
}

// Ids that were given to what was rolled back are gone, and count for nothing.
func TestNamespaces_IdsBeyondTheMost_DoNotCount(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.atMost(t, 3)
	for range 5 {
		tx := n.begin(t)
		require.NoError(t, n.RegisterNamespaceTx(t.Context(), tx, "gone"))
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.NoError(t, n.RegisterNamespace(t.Context(), "a"))
	require.NoError(t, n.RegisterNamespace(t.Context(), "b"))
	requireError(t, n.RegisterNamespace(t.Context(), "c"), pgwake.ErrTooManyNamespaces)
}
