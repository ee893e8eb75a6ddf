package pgwaketest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	taskgraph "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

// failureOf returns what a helper says when it fails its test; "" if it does not.
func failureOf(t *testing.T, use func(tb testing.TB)) string {
	f := &fatal{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		use(f)
	}()
	<-done
	return f.said
}

func enqueue(t *testing.T, p *pgwake.Provider, item pgwake.WorkItem, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	added, err := p.EnqueueForWorker(t.Context(), item, o)
	require.NoError(t, err)
	return added
}

func send(t *testing.T, p *pgwake.Provider, m pgwake.Message, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	added, err := p.EnqueueForOrchestrator(t.Context(), m, o)
	require.NoError(t, err)
	return added
}

func TestRequireWork_FieldsThatAreNotZero_AreCompared(t *testing.T) {
	p := testschema.Core.New(t, nil)
	full := pgwake.WorkItem{Name: "ship", Input: []byte(`{"order": 7, "gift": true}`), Instance: "order-7", ExecutionID: 2,
		ActivityID: 3, Tag: "gpu", Session: "s"}
	added := enqueue(t, p, full, &pgwake.EnqueueOptions{Namespace: "express", Priority: 4, Delay: time.Hour, DedupKey: "k"})
	enqueue(t, p, pgwake.WorkItem{Name: "plain"}, nil)

	found := pgwaketest.RequireWork(t, p, full, 1)
	require.Equal(t, full, found[0].WorkItem)
	require.Equal(t, []any{added.ID, "express", 4, "k", false, 0}, []any{found[0].ID, found[0].Namespace, found[0].Priority,
		found[0].DedupKey, found[0].Claimed, found[0].Attempts})
	require.True(t, added.DueAt.Equal(found[0].DueAt))
	require.WithinDuration(t, added.DueAt.Add(-time.Hour), found[0].EnqueuedAt, time.Minute)
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{}, 2)

	for _, like := range []pgwake.WorkItem{
		{Name: "ship"}, {Input: []byte(`{"gift":true,"order":7.0}`)}, {Instance: "order-7"}, {ExecutionID: 2}, {ActivityID: 3}, {Tag: "gpu"}, {Session: "s"},
	} {
		require.Equal(t, added.ID, pgwaketest.RequireWork(t, p, like, 1)[0].ID, "%+v", like)
	}
	for _, unlike := range []pgwake.WorkItem{
		{Name: "Ship"}, {Input: []byte(`{"order":7}`)}, {Input: []byte(`null`)}, {Instance: "order-8"}, {ExecutionID: 1}, {ActivityID: 1}, {Tag: "cpu"}, {Session: "t"},
	} {
		require.Empty(t, pgwaketest.RequireWork(t, p, unlike, 0), "%+v", unlike)
	}
}

func TestRequireWork_ClaimedAndGivenBack_IsStillQueued(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "x"}, nil)
	item, err := p.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	claimed := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "x"}, 1)[0]
	require.True(t, claimed.Claimed)
	require.Equal(t, 1, claimed.Attempts)
	require.True(t, item.LockedUntil.Equal(claimed.DueAt))
	require.NoError(t, p.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{Delay: time.Hour, Error: "broken"}))
	back := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "x"}, 1)[0]
	require.False(t, back.Claimed)
	require.Equal(t, "broken", back.LastError)
}

func TestRequireWork_OtherNumber_FailsAndSaysWhatIsQueued(t *testing.T) {
	p := testschema.Core.New(t, nil)
	want := pgwake.WorkItem{Name: "ship", Input: []byte(`{"order":7}`)}
	require.Equal(t, `0 work items like {name: "ship", input: {"order":7}} are queued, and not 1; the queue is empty`,
		failureOf(t, func(tb testing.TB) { pgwaketest.RequireWork(tb, p, want, 1) }))
	enqueue(t, p, pgwake.WorkItem{Name: "ship", Input: []byte(`{"order":8}`)}, nil)
	said := failureOf(t, func(tb testing.TB) { pgwaketest.RequireWork(tb, p, want, 1) })
	require.Contains(t, said, "the queue holds\n\t{name: \"ship\", input: {\"order\":8}}")
	for range 25 {
		enqueue(t, p, want, nil)
	}
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireWork(tb, p, want, 1) }), "and 6 more")
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireWork(tb, p, pgwake.WorkItem{Input: []byte(`{`)}, 1) }), "not valid JSON")
	require.Empty(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireWork(tb, p, want, 25) }))
}

func TestRequireNoWork_AnythingQueued_Fails(t *testing.T) {
	p := testschema.Core.New(t, nil)
	pgwaketest.RequireNoWork(t, p)
	send(t, p, pgwake.Message{Instance: "i", Kind: "ping"}, nil)
	pgwaketest.RequireNoWork(t, p)
	enqueue(t, p, pgwake.WorkItem{Name: "later"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireNoWork(tb, p) }), `{name: "later"} due at`)
}

func TestRequireMessage_FieldsThatAreNotZero_AreCompared(t *testing.T) {
	p := testschema.Core.New(t, nil)
	pgwaketest.RequireNoMessage(t, p)
	full := pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Data: []byte(`{"a": 1, "b": 2}`), Name: "order", Version: "1.0",
		ExecutionID: 1, Queue: "q"}
	added := send(t, p, full, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.Equal(t, full, pgwaketest.RequireMessage(t, p, full, 1)[0].Message)
	for _, like := range []pgwake.Message{
		{}, {Instance: "order-7"}, {Kind: pgwake.MessageStart}, {Data: []byte(`{"b":2,"a":1}`)}, {Name: "order"}, {Version: "1.0"}, {ExecutionID: 1}, {Queue: "q"},
	} {
		require.Equal(t, added.ID, pgwaketest.RequireMessage(t, p, like, 1)[0].ID, "%+v", like)
	}
	for _, unlike := range []pgwake.Message{
		{Instance: "order-8"}, {Kind: "ping"}, {Data: []byte(`{"a":1}`)}, {Name: "flow"}, {Version: "1"}, {ExecutionID: 2}, {Queue: "r"},
	} {
		require.Empty(t, pgwaketest.RequireMessage(t, p, unlike, 0), "%+v", unlike)
	}
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireMessage(tb, p, full, 2) }), `{instance: "order-7", kind: "start"`)
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireNoMessage(tb, p) }), `{instance: "order-7", kind: "start"`)
}

func TestRequireMessage_InATurnOrHeldBehindIt_IsClaimed(t *testing.T) {
	p := testschema.Core.New(t, nil)
	send(t, p, pgwake.Message{Instance: "i", Kind: "first"}, nil)
	_, err := p.FetchOrchestrationItem(t.Context(), nil)
	require.NoError(t, err)
	send(t, p, pgwake.Message{Instance: "i", Kind: "second"}, nil)
	_, err = p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true}) // meets it, and holds it
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	for _, m := range pgwaketest.RequireMessage(t, p, pgwake.Message{}, 2) {
		require.True(t, m.Claimed, m.Kind)
	}
}

func TestHelpers_ProviderOfSomebodyElse_FailTheTest(t *testing.T) {
	p := pgwaketest.New(t, &pgwake.Config{Schema: "pgwaketest_stranger"})
	stranger, err := pgwake.Open(t.Context(), pgwaketest.URL(t), &pgwake.Config{Schema: "pgwaketest_stranger"})
	require.NoError(t, err)
	defer stranger.Close(t.Context())
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireNoWork(tb, stranger) }), "not opened by pgwaketest")
	pgwaketest.RequireNoWork(t, p)
	pgwaketest.RequireNoWork(t, pgwaketest.Open(t, &pgwake.Config{Schema: "pgwaketest_stranger"}))
}

func TestAdvance_ParkedFetches_GetWhatBecameDue(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "reminder"}, &pgwake.EnqueueOptions{Delay: 24 * time.Hour})
	enqueue(t, p, pgwake.WorkItem{Name: "much later"}, &pgwake.EnqueueOptions{Delay: 48 * time.Hour})
	send(t, p, pgwake.Message{Instance: "i", Kind: "timer"}, &pgwake.EnqueueOptions{Delay: 24 * time.Hour})
	got := make(chan string, 2)
	go func() {
		item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: 20 * time.Second})
		if err != nil {
			got <- err.Error()
			return
		}
		got <- item.Name
	}()
	go func() {
		turn, err := p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{PollTimeout: 20 * time.Second})
		if err != nil {
			got <- err.Error()
			return
		}
		got <- string(turn.Messages[0].Kind)
	}()
	require.Eventually(t, func() bool { s := p.Stats(); return s.Worker.Parked == 1 && s.Orchestrator.Parked == 1 },
		10*time.Second, 10*time.Millisecond)
	pgwaketest.Advance(t, p, 24*time.Hour)
	require.ElementsMatch(t, []string{"reminder", "timer"}, []string{<-got, <-got})
	_, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
}

// Whoever waits for an instance does not mistake one that grew older for another.
func TestAdvance_SomebodyWaitsForAnInstance_WaitsOn(t *testing.T) {
	p := testschema.Core.New(t, nil)
	send(t, p, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	turn := func(status pgwake.Status) {
		require.Equal(t, 1, pgwaketest.DrainTurns(t, p, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Status: status}}, nil
		}, nil))
	}
	turn(pgwake.StatusRunning)
	got := make(chan error, 1)
	before := p.Stats().WaitReads
	go func() {
		_, err := p.WaitForInstance(t.Context(), "i")
		got <- err
	}()
	read := func(n int64) {
		require.Eventually(t, func() bool { return p.Stats().WaitReads >= before+n }, 10*time.Second, 10*time.Millisecond)
	}
	read(1)
	go func() { _, _ = p.WaitForInstance(t.Context(), "other") }()
	read(2) // so the first has ended
	pgwaketest.Advance(t, p, time.Hour)
	send(t, p, pgwake.Message{Instance: "i", Kind: "go"}, nil)
	turn(pgwake.StatusCompleted)
	require.NoError(t, <-got)
}

func TestDrainTurns_StickyInstances_AreDrainedAsTheirOwners(t *testing.T) {
	p := testschema.Core.New(t, nil)
	owners := map[string]string{"i": "A", "j": "B", "k": ""}
	handler := func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}
		if owner := owners[turn.Instance]; owner != "" {
			ack.Sticky = &pgwake.Sticky{Owner: owner, For: time.Hour}
		}
		return ack, nil
	}
	for instance := range owners {
		send(t, p, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, nil)
	}
	require.Equal(t, 3, pgwaketest.DrainTurns(t, p, handler, nil))
	for instance := range owners {
		send(t, p, pgwake.Message{Instance: instance, Kind: "go"}, nil)
	}
	found := pgwaketest.RequireMessage(t, p, pgwake.Message{Instance: "i"}, 1)
	require.Equal(t, "A", found[0].StickyOwner)
	require.Less(t, time.Since(found[0].StickyDue).Abs(), 30*time.Minute)
	require.Greater(t, time.Until(found[0].DueAt), 30*time.Minute)
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.RequireNoMessage(tb, p) }), `for the sticky owner "A", and at`)

	require.Equal(t, 2, pgwaketest.DrainTurns(t, p, handler, &pgwaketest.DrainOptions{Fetch: &pgwake.FetchOptions{Owner: "B"}}))
	require.Equal(t, 1, pgwaketest.DrainTurns(t, p, handler, nil))
	pgwaketest.RequireNoMessage(t, p)
}

func TestDrain_HandlerEnqueuesWithoutEnd_FailsTheTest(t *testing.T) {
	p := testschema.Core.New(t, nil)
	o := &pgwaketest.DrainOptions{MaxHandled: 5}
	enqueue(t, p, pgwake.WorkItem{Name: "again"}, nil)
	handled := 0
	require.Contains(t, failureOf(t, func(tb testing.TB) {
		pgwaketest.Drain(tb, p, func(context.Context, *pgwake.ClaimedWorkItem) error {
			handled++
			enqueue(t, p, pgwake.WorkItem{Name: "again"}, nil)
			return nil
		}, o)
	}), `after 5 work items there is still one due, {name: "again"}`)
	require.Equal(t, 5, handled)

	send(t, p, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.Contains(t, failureOf(t, func(tb testing.TB) {
		pgwaketest.DrainTurns(tb, p, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"},
				Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "again"}}}}, nil
		}, o)
	}), `after 5 turns there is still one due, of instance "i"`)
}

func TestAdvance_LeasesAndSessions_End(t *testing.T) {
	p := testschema.Core.New(t, nil)
	now := func(owner string) *pgwake.FetchOptions {
		return &pgwake.FetchOptions{NoWait: true, LockTimeout: time.Hour, Session: &pgwake.SessionOptions{Owner: owner, LockTimeout: time.Hour}}
	}
	enqueue(t, p, pgwake.WorkItem{Name: "x", Session: "s"}, nil)
	item, err := p.FetchWorkItem(t.Context(), now("a"))
	require.NoError(t, err)
	send(t, p, pgwake.Message{Instance: "i", Kind: "ping"}, nil)
	turn, err := p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, LockTimeout: time.Hour})
	require.NoError(t, err)

	pgwaketest.Advance(t, p, 59*time.Minute)
	_, err = p.FetchWorkItem(t.Context(), now("b"))
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	pgwaketest.Advance(t, p, time.Minute)
	require.ErrorIs(t, p.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
	require.ErrorIs(t, p.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
	again, err := p.FetchWorkItem(t.Context(), now("b"))
	require.NoError(t, err)
	require.Equal(t, 2, again.Attempt)
	turn, err = p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Equal(t, 2, turn.Attempt)
}

func TestAdvance_WhatIsFinished_GrowsOld(t *testing.T) {
	p := testschema.Core.New(t, nil)
	send(t, p, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.Equal(t, 1, pgwaketest.DrainTurns(t, p, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusCompleted}}, nil
	}, nil))
	monthAgo := &pgwake.BulkFilter{CompletedBefore: time.Now().Add(-30 * 24 * time.Hour)}
	deleted, err := p.DeleteInstancesBulk(t.Context(), monthAgo)
	require.NoError(t, err)
	require.Zero(t, deleted.Instances)
	pgwaketest.Advance(t, p, 31*24*time.Hour)
	deleted, err = p.DeleteInstancesBulk(t.Context(), monthAgo)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted.Instances)
}

// A table with an instant that Advance does not know fails here.
func TestAdvance_EveryInstantOnTheSchema_Moves(t *testing.T) {
	p := pgwaketest.New(t, &pgwake.Config{Schema: innerSchema})
	schema := pgx.Identifier{innerSchema}.Sanitize()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	columns := instants(t, conn, schema)
	require.Greater(t, len(columns), 10)

	_, err = conn.Exec(t.Context(), `SET search_path = `+schema+`; SET session_replication_role = replica; CREATE TABLE users (at timestamptz);
		INSERT INTO users VALUES ('2000-01-02'); TRUNCATE namespaces; CREATE TABLE tasks AS SELECT * FROM users;
		INSERT INTO namespaces (name) VALUES ('default');
		INSERT INTO worker_queue (name) VALUES ('x');
		INSERT INTO dedup_keys (namespace, dedup_key, item_id, kept_until) VALUES ('default', 'k', 1, now());
		INSERT INTO rates (namespace, tag, key, tat, begun, forget_at) VALUES ('default', '', 'k', now(), now(), now());
		INSERT INTO limits (queue, namespace, holding_since) VALUES ('worker', 'default', now());
		INSERT INTO orchestrator_queue (instance_id, kind, sticky_owner, sticky_due) VALUES ('i', 'ping', 'o', now());
		INSERT INTO realignments (instance_id) VALUES ('i');
		INSERT INTO instance_locks (instance_id, lock_token, locked_until) VALUES ('j', gen_random_uuid(), now());
		INSERT INTO instances (instance_id, namespace, name, sticky_owner, sticky_until) VALUES ('i', 'default', 'flow', 'o', now());
		INSERT INTO executions (instance_id, execution_id) VALUES ('i', 1);
		INSERT INTO history (instance_id, execution_id, event_id, type) VALUES ('i', 1, 1, 'x');
		INSERT INTO sessions (session_id, owner, locked_until) VALUES ('s', 'o', now());
		INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, enqueued_at, reason) VALUES ('worker', 1, 'default', 0, 1, now(), 'x');
		INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at) VALUES (1, 'default', 0, 1, 'x', now())`)
	require.NoError(t, err)
	requireMove(t, p, conn, columns)
	for _, users := range []string{"users", "tasks"} {
		var at time.Time
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT at FROM `+users).Scan(&at))
		require.Equal(t, "2000-01-02", at.Format(time.DateOnly), "a table of the user")
	}
}

// An instant of a layer that Advance does not know fails here.
func TestAdvance_TaskGraphIsThere_ItsInstantsMove(t *testing.T) {
	p := testschema.Core.New(t, nil)
	schema := pgx.Identifier{p.Schema()}.Sanitize()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	root := instants(t, conn, schema)
	require.NoError(t, p.Migrate(t.Context(), taskgraph.Layer()))
	// What was added up stays in the hours in which it was.
	columns := slices.DeleteFunc(instants(t, conn, schema), func(c instant) bool { return slices.Contains(root, c) || c.Table == "run_rollups" })
	require.Greater(t, len(columns), 10)
	_, err = conn.Exec(t.Context(), `SET search_path = `+schema)
	require.NoError(t, err)
	const one, two = `'00000000-0000-0000-0000-000000000001'`, `'00000000-0000-0000-0000-000000000002'`
	_, err = conn.Exec(t.Context(), `
		INSERT INTO task_definitions (task_definition_id, namespace, name) VALUES (`+one+`, 'default', 'd');
		INSERT INTO step_definitions (step_definition_id, task_definition_id, position, name, handler) VALUES (`+one+`, `+one+`, 1, 's', 'h');
		INSERT INTO tasks (task_id, task_definition_id, namespace, correlation_id, priority_key) VALUES (`+one+`, `+one+`, 'default', `+one+`, 7);
		INSERT INTO steps (step_id, task_id, step_definition_id, position, name) VALUES (`+one+`, `+one+`, `+one+`, 1, 's'), (`+two+`, `+one+`, `+one+`, 2, 't');
		INSERT INTO step_dependencies (task_id, from_step_id, to_step_id) VALUES (`+one+`, `+one+`, `+two+`);
		INSERT INTO task_transitions (task_id, sort_key, to_state) VALUES (`+one+`, 1, 'pending');
		INSERT INTO step_transitions (step_id, task_id, sort_key, to_state) VALUES (`+one+`, `+one+`, 1, 'pending');
		INSERT INTO task_dlq (dlq_entry_id, task_id, original_state, reason) VALUES (`+one+`, `+one+`, 'error', 'manual_dlq')`)
	require.NoError(t, err)
	requireMove(t, p, conn, columns)
	var key float64
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT priority_key FROM tasks`).Scan(&key))
	require.InDelta(t, 7+24*.1, key, 1e-9, "it has aged by a day")

	_, err = conn.Exec(t.Context(), `TRUNCATE task_definitions, task_transitions, step_transitions CASCADE`)
	require.NoError(t, err)
	config, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	require.NoError(t, taskgraph.Down(t.Context(), config, p.Schema()))
	pgwaketest.Advance(t, p, time.Hour)
}

// instant is a column with instants.
type instant struct{ Table, Name string }

func instants(t *testing.T, conn *pgx.Conn, schema string) []instant {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT relname::text, attname::text FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
		WHERE relnamespace = $1::regnamespace AND relkind = 'r' AND atttypid = 'timestamptz'::regtype AND NOT attisdropped ORDER BY 1`, schema)
	require.NoError(t, err)
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[instant])
	require.NoError(t, err)
	return columns
}

// requireMove asserts that Advance moves these instants, of which its table has one at least.
func requireMove(t *testing.T, p *pgwake.Provider, conn *pgx.Conn, columns []instant) {
	t.Helper()
	for _, c := range columns {
		_, err := conn.Exec(t.Context(), fmt.Sprintf(`UPDATE %s SET %s = '2000-01-02'`, c.Table, c.Name))
		require.NoError(t, err)
	}
	pgwaketest.Advance(t, p, 24*time.Hour)
	for _, c := range columns {
		var at time.Time
		require.NoError(t, conn.QueryRow(t.Context(), fmt.Sprintf(`SELECT %s FROM %s`, c.Name, c.Table)).Scan(&at), "%+v", c)
		require.Equal(t, "2000-01-01", at.Format(time.DateOnly), "%+v", c)
	}
}

// Whoever works meanwhile loses nothing but leases, and no transaction is the victim of a deadlock.
func TestAdvance_WhileOthersWork_GivesWay(t *testing.T) {
	p := testschema.Core.New(t, nil)
	stop := make(chan struct{})
	failures := make(chan error, 2)
	work := func(turn func() error) {
		for {
			select {
			case <-stop:
				failures <- nil
				return
			default:
			}
			if err := turn(); err != nil && !errors.Is(err, pgwake.ErrLockLost) && !errors.Is(err, pgwake.ErrNoWork) {
				failures <- err
				return
			}
		}
	}
	go work(func() error {
		if _, err := p.EnqueueForWorker(context.Background(), pgwake.WorkItem{Name: "x"}, nil); err != nil {
			return err
		}
		item, err := p.FetchWorkItem(context.Background(), &pgwake.FetchOptions{NoWait: true})
		if err != nil {
			return err
		}
		return p.AckWorkItem(context.Background(), item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
	})
	go work(func() error {
		turn, err := p.FetchOrchestrationItem(context.Background(), &pgwake.FetchOptions{NoWait: true})
		if err != nil {
			return err
		}
		return p.AckOrchestrationItem(context.Background(), turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}})
	})
	for range 30 {
		pgwaketest.Advance(t, p, time.Minute)
	}
	close(stop)
	require.NoError(t, <-failures)
	require.NoError(t, <-failures)
}

func TestAdvance_OpenTransaction_HoldsUpOnlyWhatItChanged(t *testing.T) {
	p := testschema.Core.New(t, nil)
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "not yet"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.NoError(t, err)
	pgwaketest.Advance(t, p, time.Hour) // it has added something, and changed nothing
	require.NoError(t, tx.Commit(t.Context()))
	item := pgwaketest.RequireWork(t, p, pgwake.WorkItem{}, 1)[0]
	require.Equal(t, time.Hour, item.DueAt.Sub(item.EnqueuedAt).Round(time.Minute))

	enqueue(t, p, pgwake.WorkItem{Name: "x"}, nil)
	claimed, err := p.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	tx, err = conn.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, p.AckWorkItemTx(t.Context(), tx, claimed.LockToken, nil))
	advanced := make(chan string, 1)
	go func() {
		advanced <- failureOf(t, func(tb testing.TB) { pgwaketest.Advance(tb, p, time.Hour) })
	}()
	require.Eventually(t, func() bool {
		var waiting bool
		err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))`).Scan(&waiting)
		return err == nil && waiting
	}, 10*time.Second, 10*time.Millisecond)
	require.Empty(t, advanced)
	require.NoError(t, tx.Commit(t.Context()))
	require.Empty(t, <-advanced)
}

func TestAdvance_NotForward_Fails(t *testing.T) {
	p := testschema.Core.New(t, nil)
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.Advance(tb, p, -time.Second) }), "forward")
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.Advance(tb, p, 0) }), "forward")
}

func TestDrain_HandlesWhatIsDue_AndWhatThatEnqueues(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "a"}, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "tagged", Tag: "gpu"}, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "elsewhere", Session: "s"}, &pgwake.EnqueueOptions{Namespace: "other"})
	enqueue(t, p, pgwake.WorkItem{Name: "later"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	var names []string
	handle := func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		names = append(names, item.Name)
		if item.Name == "a" {
			_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "b"}, nil)
			return err
		}
		return nil
	}
	require.Equal(t, 4, pgwaketest.Drain(t, p, handle, nil))
	require.ElementsMatch(t, []string{"a", "b", "tagged", "elsewhere"}, names)
	require.Zero(t, pgwaketest.Drain(t, p, handle, nil))
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{}, 1)
	pgwaketest.Advance(t, p, time.Hour)
	require.Equal(t, 1, pgwaketest.Drain(t, p, handle, nil))
	pgwaketest.RequireNoWork(t, p)
}

func TestDrain_FetchOptions_LimitIt(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "a"}, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "b"}, &pgwake.EnqueueOptions{Namespace: "other"})
	o := &pgwaketest.DrainOptions{Fetch: &pgwake.FetchOptions{Namespaces: []string{"other"}, PollTimeout: time.Hour}}
	require.Equal(t, 1, pgwaketest.Drain(t, p, func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }, o))
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "a"}, 1)
	require.Equal(t, time.Hour, o.Fetch.PollTimeout, "the caller's options stay as they are")
}

func TestDrain_HandlerFails_ItemComesBackUntilTheBound(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, pgwake.WorkItem{Name: "x"}, nil)
	require.Equal(t, 1, pgwaketest.Drain(t, p, func(_ context.Context, item *pgwake.ClaimedWorkItem) error {
		if item.Attempt < 3 {
			return errors.New("not yet")
		}
		require.Equal(t, "not yet", item.LastError)
		return nil
	}, nil))
	for bound, o := range map[int]*pgwaketest.DrainOptions{1: {MaxAttempts: 1}, 3: nil, 5: {MaxAttempts: 5}} {
		calls := 0
		enqueue(t, p, pgwake.WorkItem{Name: "y"}, nil)
		said := failureOf(t, func(tb testing.TB) {
			pgwaketest.Drain(tb, p, func(context.Context, *pgwake.ClaimedWorkItem) error { calls++; return errors.New("out of order") }, o)
		})
		require.Contains(t, said, fmt.Sprintf(`{name: "y"}, failed %d times, the last time with: out of order`, bound))
		require.Equal(t, bound, calls)
		left := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "y"}, 1)[0]
		require.False(t, left.Claimed, "it was given back")
		require.Equal(t, 1, pgwaketest.Drain(t, p, func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }, nil))
	}
}

func TestDrain_HandlerAcknowledgesByItself_IsFine(t *testing.T) {
	p := testschema.Core.New(t, nil)
	for range 5 {
		enqueue(t, p, pgwake.WorkItem{Name: "x"}, nil)
	}
	require.Equal(t, 5, pgwaketest.Drain(t, p, func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		return p.AckWorkItem(ctx, item.LockToken, nil)
	}, &pgwaketest.DrainOptions{MaxAttempts: 1}))
	pgwaketest.RequireNoWork(t, p)

	enqueue(t, p, pgwake.WorkItem{Name: "boomerang"}, nil)
	require.Contains(t, failureOf(t, func(tb testing.TB) {
		pgwaketest.Drain(tb, p, func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			return p.AbandonWorkItem(ctx, item.LockToken, nil)
		}, nil)
	}), "boomerang", "it would never end")
}

func TestDrainTurns_HandlesEveryTurn_AndFailsAtTheBound(t *testing.T) {
	p := testschema.Core.New(t, nil)
	send(t, p, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	var kinds []string
	failed := 0
	turns := func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}
		kind := turn.Messages[0].Kind
		switch {
		case kind == pgwake.MessageStart:
			ack.Messages = []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "next"}}}
		case failed < 2:
			failed++
			return ack, errors.New("not yet")
		}
		kinds = append(kinds, string(kind))
		return ack, nil
	}
	require.Equal(t, 2, pgwaketest.DrainTurns(t, p, turns, nil))
	require.Equal(t, "start next", strings.Join(kinds, " "))
	pgwaketest.RequireNoMessage(t, p)

	send(t, p, pgwake.Message{Instance: "i", Kind: "bad"}, nil)
	require.Contains(t, failureOf(t, func(tb testing.TB) {
		pgwaketest.DrainTurns(tb, p, func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			return pgwake.OrchestrationAck{}, errors.New("out of order")
		}, &pgwaketest.DrainOptions{MaxAttempts: 2})
	}), `instance "i" failed 2 times, the last time with: out of order`)
	require.True(t, slices.ContainsFunc(pgwaketest.RequireMessage(t, p, pgwake.Message{}, 1), func(m pgwaketest.QueuedMessage) bool { return m.Attempts == 2 }))
}

func TestDrain_ProviderIsClosed_FailsTheTest(t *testing.T) {
	p := testschema.Core.New(t, nil)
	require.NoError(t, p.Close(t.Context()))
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.Drain(tb, p, nil, nil) }), pgwake.ErrClosed.Error())
	require.Contains(t, failureOf(t, func(tb testing.TB) { pgwaketest.DrainTurns(tb, p, nil, nil) }), pgwake.ErrClosed.Error())
}
