package pgwake_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/taskgraph"
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

// Whoever names one that is new: each verb of the Provider and of its layers, and each SQL function.
func TestNamespaces_OneTooMany_IsRefusedAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	bus, err := eventbus.New(ctx, n.Provider, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	graph, err := taskgraph.New(ctx, n.Provider, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	layers := `SELECT count(*) FROM (SELECT FROM event_log UNION ALL SELECT FROM event_groups UNION ALL SELECT FROM event_nodes UNION ALL SELECT FROM scheduled_tasks
		UNION ALL SELECT FROM task_definitions UNION ALL SELECT FROM step_definitions) AS rows`
	n.atMost(t, 3) // with the default one
	in := func(namespace string) *pgwake.EnqueueOptions { return &pgwake.EnqueueOptions{Namespace: namespace} }
	for _, known := range []string{"a", "b", "a", "b", "default"} {
		_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: known}, in(known))
		require.NoError(t, err)
	}
	_, err = n.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	turn, err := n.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{NoWait: true, LockTimeout: time.Hour})
	require.NoError(t, err)
	item, message := pgwake.WorkItem{Name: "x"}, pgwake.Message{Instance: "j", Kind: "k"}
	before := n.content(t)
	calls := map[string]func() error{
		"work": func() error { return dropped(n.EnqueueForWorker(ctx, item, in("c"))) },
		"works": func() error {
			return dropped(n.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{item, *in("a")}, {item, *in("c")}}))
		},
		"message": func() error { return dropped(n.EnqueueForOrchestrator(ctx, message, in("c"))) },
		"messages": func() error {
			return dropped(n.EnqueueForOrchestratorMany(ctx, []pgwake.MessageEnqueue{{message, *in("a")}, {message, *in("c")}}))
		},
		"turn with work": func() error {
			return n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{WorkItems: []pgwake.WorkEnqueue{{item, *in("c")}}})
		},
		"turn with a message": func() error {
			return n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{Messages: []pgwake.MessageEnqueue{{message, *in("c")}}})
		},
		"register":  func() error { return n.RegisterNamespace(ctx, "c") },
		"limits":    func() error { return n.SetLimits(ctx, "c", pgwake.Limits{MaxRunning: 1}) },
		"event":     func() error { return dropped(bus.In("c").Emit(ctx, "e", nil, nil)) },
		"events":    func() error { return dropped(bus.In("c").EmitMany(ctx, []eventbus.Emission{{Type: "e"}, {Type: "e"}})) },
		"subscribe": func() error { return bus.In("c").Subscribe(ctx, "g", []string{"#"}, nil) },
		"schedule": func() error {
			return dropped(bus.In("c").Schedule(ctx, eventbus.Schedule{Name: "s", Cron: "@daily", Type: "e"}))
		},
		"node":       func() error { return dropped(bus.In("c").Node(ctx, &eventbus.NodeConfig{ID: "n"})) },
		"definition": func() error { return graph.Register(ctx, taskgraph.Define("c", "d", "1").Step("s", "h")) },
		"of a queue": func() error { return dropped(graph.SendWithNotify(ctx, "c_queue", 1, nil)) },
	}
	for _, function := range []string{
		`enqueue_work('x', p_namespace => 'c')`, `enqueue_work_many('{x,x}', NULL, p_namespaces => '{a,c}')`, `enqueue_message('j', 'k', p_namespace => 'c')`,
		`enqueue_message_many('{j}', '{k}', '{1}', p_namespaces => '{c}')`, `register_namespace('c')`, `set_limits('c')`, `emit('c', 'e')`, `emit_many('c', '{e}', '{1}')`,
		`append_event_log('c', 'e', '1', 'n')`, `subscribe('c', 'g', '{#}')`, `schedule_task('c', 's', '@daily', 'e')`, `register_node('n', 'c')`,
		`register_task_definition('c', 'd', '1', '', '{}', '{s}', '{h}')`, `ensure_task_queue('c_queue')`, `pgmq_send_with_notify('c_queue', '1')`,
	} {
		calls[function] = func() error {
			tx := n.begin(t)
			defer func() { require.NoError(t, tx.Rollback(ctx)) }()
			_, err := tx.Exec(ctx, `SELECT `+function)
			return pgwake.WrapError("call", err)
		}
	}
	for what, call := range calls {
		t.Run(what, func(t *testing.T) {
			err := requireError(t, call(), pgwake.ErrTooManyNamespaces)
			require.Equal(t, "PW008", err.SQLState)
			require.False(t, err.Retryable)
			require.False(t, err.Unknown)
		})
	}
	require.Equal(t, before, n.content(t))
	require.Equal(t, []int64{0}, query[int64](t, n, layers))
	require.NoError(t, n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{WorkItems: []pgwake.WorkEnqueue{{item, *in("a")}}}), "the turn is still his whose it was")
	require.NoError(t, n.RegisterNamespace(ctx, "b"))
	require.ElementsMatch(t, []string{"a", "b", "a", "b", "default", "x"}, n.takeAll(t))
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

// However many one statement adds: it comes no further than what is one too many.
func TestNamespaces_FarTooManyInOneStatement_AreRefusedAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	most := testsize.Of(1_000, 100_000)
	n.atMost(t, most)
	n.exec(t, `ANALYZE namespaces`) // plans are those of a table that is believed to be empty
	before := n.content(t)
	added := `SELECT last_value FROM namespaces_id_seq`
	for what, statement := range map[string]string{
		"a batch":           `SELECT enqueue_work_many(array_agg('x'::text), NULL, array_agg('n' || i)) FROM generate_series(1, $1::integer) AS i`,
		"item by item":      `SELECT enqueue_work('x', p_namespace => 'n' || i) FROM generate_series(1, $1::integer) AS i`,
		"name by name":      `SELECT register_namespace('n' || i) FROM generate_series(1, $1::integer) AS i`,
		"names, internally": `SELECT register_namespaces(array_agg('n' || i)) FROM generate_series(1, $1::integer) AS i`,
	} {
		first := query[int64](t, n, added)[0]
		err := n.tried(t, func(tx pgx.Tx) error { return dropped(tx.Exec(t.Context(), statement, 10*most)) })
		require.Equal(t, "PW008", requireError(t, pgwake.WrapError(what, err), pgwake.ErrTooManyNamespaces).SQLState, what)
		require.LessOrEqual(t, query[int64](t, n, added)[0]-first, int64(most+1), "%s: so many rows were written", what)
		require.Equal(t, before, n.content(t), what)
	}
}

// Open transactions do not see what the others add. Together they add no more than the limit once again, and beyond that a thousand each.
func TestNamespaces_TransactionsAtTheSameTime_AddThousandEachBeyondTheMost(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const most = 2_500
	n.atMost(t, most)
	in := func(tx pgx.Tx, first, last int) error {
		_, err := tx.Exec(t.Context(), `SELECT register_namespaces(array_agg('n' || i)) FROM generate_series($1::integer, $2::integer) AS i`, first, last)
		return pgwake.WrapError("register", err)
	}
	requireFull := func(tx pgx.Tx, name int) {
		t.Helper()
		inner, err := tx.Begin(t.Context())
		require.NoError(t, err)
		require.ErrorContains(t, requireError(t, in(inner, name, name), pgwake.ErrTooManyNamespaces), "a transaction adds at most 1000")
		require.NoError(t, inner.Rollback(t.Context()))
	}

	early := n.begin(t)
	_, err := early.Exec(t.Context(), `SELECT pg_current_xact_id()`)
	require.NoError(t, err)
	first := n.begin(t)
	require.NoError(t, in(first, 1, most-1), "as many as are left, while none has been added before")
	require.NoError(t, first.Rollback(t.Context()))

	open := []pgx.Tx{n.begin(t), n.begin(t)}
	for i, tx := range open {
		require.NoError(t, in(tx, 1000*i, 1000*i+499))
		inner, err := tx.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, in(inner, 1000*i+500, 1000*i+999))
		require.NoError(t, inner.Commit(t.Context()))
		requireFull(tx, 5_000)
	}
	for _, tx := range open {
		require.NoError(t, tx.Commit(t.Context()))
	}
	require.NoError(t, in(early, 3_000, 3_001), "what others have committed since is not of this one")
	require.NoError(t, early.Commit(t.Context()))
	require.Equal(t, []int64{2_003}, query[int64](t, n, `SELECT count(*) FROM namespaces`))

	// What was seen of the others is no more than what was committed.
	open = []pgx.Tx{n.begin(t), n.begin(t)}
	for i, tx := range open {
		require.NoError(t, in(tx, 4_000+1_000*i, 4_000+1_000*i+most-2_003-1))
		require.NotContains(t, requireError(t, in(tx, 9_000, 9_000), pgwake.ErrTooManyNamespaces).Error(), "a transaction")
	}
}
