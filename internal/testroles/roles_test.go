package testroles_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are the rights of docs/security.md enough for each role, and no more than that?

func TestWorker_EngineAndBus_DoTheirWork(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.open(s.role(testroles.Worker), &pgwake.Config{SkipMigrate: true})
	require.True(t, p.Health().OK, p.Health().Problems)
	producer := s.open(s.role(testroles.Producer), &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModeDisabled})

	e, err := taskgraph.New(s.within(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, e.Register(s.within(), taskgraph.Define("shop", "order", "1").Step("pack", "pack").Step("ship", "ship", taskgraph.After("pack"))))
	for _, name := range []string{"pack", "ship"} {
		e.Handle(name, func(context.Context, *taskgraph.Step) (any, error) { return name, nil })
	}
	running, stop := context.WithCancel(s.within())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(running) }()

	bus, err := eventbus.New(s.within(), p, &eventbus.Config{Namespace: "shop", Logger: silent})
	require.NoError(t, err)
	node, err := bus.Node(s.within(), &eventbus.NodeConfig{ID: "n"})
	require.NoError(t, err)
	got := make(chan string, 10)
	require.NoError(t, node.On(s.within(), "order.*", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		got <- e.Type + " " + e.Key
		return nil
	}))
	require.NoError(t, node.Start(s.within()))
	_, err = bus.Schedule(s.within(), eventbus.Schedule{Name: "often", Cron: "@every 1s", Type: "order.scheduled"})
	require.NoError(t, err)

	// Everything that is submitted comes of a producer.
	engine, err := taskgraph.New(s.within(), producer, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	task, err := engine.Submit(s.within(), taskgraph.Submission{Namespace: "shop", Name: "order", Version: "1"})
	require.NoError(t, err)
	shop, err := eventbus.New(s.within(), producer, &eventbus.Config{Namespace: "shop", Logger: silent})
	require.NoError(t, err)
	_, err = shop.Emit(s.within(), "order.paid", nil, nil)
	require.NoError(t, err)
	_, err = shop.Emit(s.within(), "order.keyed", nil, &eventbus.EmitOptions{Key: "7"})
	require.NoError(t, err)

	done, err := e.Wait(s.within(), task.ID)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskComplete, done.State)
	for want := map[string]bool{"order.paid ": true, "order.keyed 7": true, "order.scheduled ": true}; len(want) > 0; {
		select {
		case one := <-got:
			delete(want, one)
		case <-s.within().Done():
			t.Fatalf("not delivered: %v", want)
		}
	}
	_, err = e.Upkeep(s.within())
	require.NoError(t, err)
	// As a node does once a day. Partitions are their owner's.
	worker := testroles.Connect(t, s.role(testroles.Worker))
	var state string
	require.NoError(t, worker.QueryRow(s.within(), `SELECT `+pgx.Identifier{s.schema}.Sanitize()+`.keep_event_log(p_months => 5)`).Scan(&state))
	require.Equal(t, "more", state, "there were two")

	require.NoError(t, node.Stop(s.within()))
	stop()
	require.NoError(t, <-ended)
	require.True(t, p.Health().OK, p.Health().Problems)
}

func TestProducer_ReadsFetchesAndRemovesNothing(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	role := s.role(testroles.Producer)
	p := s.open(role, &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModeDisabled})
	ctx := s.within()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Input: json.RawMessage(`"secret"`)}, &pgwake.EnqueueOptions{DedupKey: "k", DedupFor: time.Hour})
	require.NoError(t, err)
	again, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w"}, &pgwake.EnqueueOptions{DedupKey: "k", DedupFor: time.Hour})
	require.NoError(t, err)
	require.True(t, again.Duplicate)
	for _, scope := range []pgwake.EnqueueOptions{{DedupKey: "a", DedupScope: pgwake.DedupWaiting}, {DedupKey: "b", DedupScope: pgwake.DedupQueuedOrDead}, {Namespace: "new", Delay: time.Hour}} {
		_, err = p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}, {WorkItem: pgwake.WorkItem{Name: "w"}}})
		require.NoError(t, err)
		_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Tag: "gpu"}, &scope)
		require.NoError(t, err)
	}
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
		_, err := p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "w"}, nil)
		return err
	}))

	nothing := &pgwake.FetchOptions{NoWait: true}
	for verb, call := range map[string]func() error{
		"peek":         func() error { _, err := p.Peek(ctx, pgwake.Worker, nil); return err },
		"depths":       func() error { _, err := p.GetQueueDepths(ctx); return err },
		"delete":       func() error { _, err := p.DeleteInstance(ctx, "i", nil); return err },
		"history":      func() error { _, err := p.ReadHistory(ctx, "i"); return err },
		"kv":           func() error { _, _, err := p.GetKV(ctx, "i", "k"); return err },
		"dead letters": func() error { _, err := p.ListDeadLetters(ctx, nil); return err },
		"purge":        func() error { _, err := p.PurgeDeadLetters(ctx, nil); return err },
		"pause":        func() error { return p.Pause(ctx, pgwake.Worker, "default") },
	} {
		err := call()
		require.ErrorIs(t, err, pgwake.ErrPermission, verb)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed, verb)
		require.False(t, typed.Retryable, verb)
	}
	listening := s.open(role, &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModePolling})
	_, err = listening.FetchWorkItem(ctx, nothing)
	require.ErrorIs(t, err, pgwake.ErrPermission)
	_, err = listening.FetchOrchestrationItem(ctx, nothing)
	require.ErrorIs(t, err, pgwake.ErrPermission)

	in := pgx.Identifier{s.schema}.Sanitize() + "."
	s.refused(testroles.Connect(t, role),
		`SELECT input FROM `+in+`worker_queue`, `SELECT id FROM `+in+`worker_queue`, `INSERT INTO `+in+`worker_queue (name) VALUES ('w')`, `DELETE FROM `+in+`orchestrator_queue`,
		`SELECT `+in+`fetch_work(gen_random_uuid(), '1 min')`, `SELECT `+in+`peek('worker')`, `SELECT `+in+`ack_work(1, gen_random_uuid())`, `SELECT `+in+`cancel_task(gen_random_uuid())`,
		`SELECT payload FROM `+in+`event_log`, `SELECT `+in+`read_events('default')`, `SELECT `+in+`keep_event_log('1 day')`, `SELECT `+in+`revoke_from_public()`, `SELECT * FROM `+in+`tasks`)
	require.Equal(t, []string{"1"}, s.list(`SELECT count(*)::text FROM `+in+`worker_queue WHERE input::text = '"secret"'`))
}

// Numbers that are short to write and long to read: more of them than the server can send.
func TestProducer_HeadersThatNobodyCouldRead_AreRefused(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	in := pgx.Identifier{s.schema}.Sanitize() + "."
	producer := testroles.Connect(t, s.role(testroles.Producer))
	headers := `(SELECT '{' || string_agg('"k' || i || '": 1e131071', ', ') || '}' FROM generate_series(1, 9000) AS i)`
	for _, call := range []string{
		`enqueue_work_item('w', NULL, NULL, 9::smallint, NULL, NULL, NULL, NULL, NULL, NULL, NULL, ` + headers + `, NULL, true)`,
		`enqueue_work_many(ARRAY['w'], NULL, p_headers => ARRAY[` + headers + `])`,
		`enqueue_message_many(ARRAY['i'], ARRAY['k'], NULL, p_headers => ARRAY[` + headers + `])`,
	} {
		_, err := producer.Exec(s.within(), `SELECT `+in+call)
		var of *pgconn.PgError
		require.ErrorAs(t, err, &of, call)
		require.Equal(t, "PW003", of.Code, call)
	}
	_, err := producer.Exec(s.within(), `SELECT `+in+`enqueue_work('good')`)
	require.NoError(t, err)
	worker := s.open(s.role(testroles.Worker), &pgwake.Config{SkipMigrate: true})
	item, err := worker.FetchWorkItem(s.within(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Equal(t, "good", item.Name)
}

func TestReader_SeesEverythingAndChangesNothing(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	owner := s.open(s.owner, &pgwake.Config{})
	ctx := s.within()
	_, err := owner.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Input: json.RawMessage(`7`)}, nil)
	require.NoError(t, err)
	_, err = owner.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	turn, err := owner.FetchOrchestrationItem(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, owner.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		History: []pgwake.Event{{ID: 1, Type: "e"}}, Metadata: pgwake.Metadata{Name: "flow"}}))

	role := s.role(testroles.Reader)
	p := s.open(role, &pgwake.Config{SkipMigrate: true, Mode: pgwake.ModeDisabled})
	items, err := p.Peek(ctx, pgwake.Worker, nil)
	require.NoError(t, err)
	require.Len(t, items, 1)
	events, err := p.ReadHistory(ctx, "i")
	require.NoError(t, err)
	require.Len(t, events, 1)
	e, err := taskgraph.New(ctx, p, nil)
	require.NoError(t, err)
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	for name, look := range map[string]func() error{
		"depths":       func() error { _, err := p.GetQueueDepths(ctx); return err },
		"metrics":      func() error { _, err := p.GetSystemMetrics(ctx); return err },
		"info":         func() error { _, err := p.GetInstanceInfo(ctx, "i"); return err },
		"instances":    func() error { _, err := p.ListInstances(ctx, nil); return err },
		"tree":         func() error { _, err := p.GetInstanceTree(ctx, "i"); return err },
		"status":       func() error { _, err := p.GetCustomStatus(ctx, "i", 0); return err },
		"kv":           func() error { _, err := p.ListKV(ctx, "i"); return err },
		"dead letters": func() error { _, err := p.ListDeadLetters(ctx, nil); return err },
		"namespaces":   func() error { _, err := p.ListNamespaces(ctx); return err },
		"limits":       func() error { _, err := p.GetLimits(ctx); return err },
		"paused":       func() error { _, err := p.GetPaused(ctx, pgwake.Worker); return err },
		"nodes":        func() error { _, err := p.ListNodes(ctx); return err },
		"archive":      func() error { _, err := p.ListArchive(ctx, nil); return err },
		"tasks":        func() error { _, err := e.ListTasks(ctx, nil); return err },
		"events":       func() error { _, err := bus.Read(ctx, eventbus.Cursor{}, 10); return err },
		"bus nodes":    func() error { _, err := bus.Nodes(ctx); return err },
		"groups":       func() error { _, err := bus.Groups(ctx); return err },
		"schedules":    func() error { _, err := bus.Schedules(ctx, "", 10); return err },
		"event dead":   func() error { _, err := bus.DeadLetters(ctx, nil); return err },
	} {
		require.NoError(t, look(), name)
	}
	for name, change := range map[string]func() error{
		"enqueue": func() error { _, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w"}, nil); return err },
		"send": func() error {
			_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: "k"}, nil)
			return err
		},
		"delete": func() error { _, err := p.DeleteInstance(ctx, "i", nil); return err },
		"prune":  func() error { _, err := p.PruneExecutions(ctx, "i", nil); return err },
		"emit":   func() error { _, err := bus.Emit(ctx, "x", nil, nil); return err },
	} {
		require.ErrorIs(t, change(), pgwake.ErrPermission, name)
	}

	// Whatever there is to call: it either may not be called, or changes nothing. That it only reads the server knows.
	in := pgx.Identifier{s.schema}.Sanitize() + "."
	s.refused(testroles.Connect(t, role), `UPDATE `+in+`worker_queue SET priority = 1`, `DELETE FROM `+in+`history`, `SELECT `+in+`fetch_work(gen_random_uuid(), '1 min')`,
		`SELECT `+in+`notify_queue('worker', 1, NULL)`, `SELECT nextval('`+in+`worker_queue_id_seq')`, `SELECT `+in+`keep_event_log('1 day')`)
	require.Empty(t, s.list(`SELECT p.proname::text FROM pg_proc p WHERE pronamespace = to_regnamespace(quote_ident($1)) AND prosecdef AND has_function_privilege($2, p.oid, 'EXECUTE')`, s.schema, role))
}

// refused asserts that the role of a connection may do none of this.
func (s *stage) refused(conn *pgx.Conn, statements ...string) {
	s.t.Helper()
	for _, sql := range statements {
		_, err := conn.Exec(s.within(), sql)
		var of *pgconn.PgError
		require.ErrorAs(s.t, err, &of, sql)
		require.Equal(s.t, "42501", of.Code, sql)
	}
}

func TestOpen_RoleThatMayNotMigrate_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	in := pgx.Identifier{s.schema}.Sanitize() + "."
	worker := s.role(testroles.Worker)
	open := func(c pgwake.Config) error {
		c.Schema, c.Logger = s.schema, silent
		p, err := pgwake.Open(s.within(), testroles.URL(t, worker), &c)
		if err == nil {
			require.NoError(t, p.Close(s.within()))
		}
		return err
	}
	require.NoError(t, open(pgwake.Config{}), "there is nothing to migrate")
	s.exec(`DELETE FROM ` + in + `schema_migrations WHERE version_id = (SELECT max(version_id) FROM ` + in + `schema_migrations)`)
	err := open(pgwake.Config{SkipMigrate: true})
	require.ErrorIs(t, err, pgwake.ErrNotMigrated)
	require.ErrorContains(t, err, s.schema)
	require.ErrorContains(t, err, " of ")
	require.ErrorIs(t, open(pgwake.Config{}), pgwake.ErrPermission)

	s.exec(`REVOKE SELECT ON ` + in + `schema_migrations FROM ` + worker)
	err = open(pgwake.Config{SkipMigrate: true})
	require.ErrorIs(t, err, pgwake.ErrPermission)
	require.ErrorContains(t, err, "schema_migrations")
	s.exec(`REVOKE USAGE ON SCHEMA ` + pgx.Identifier{s.schema}.Sanitize() + ` FROM ` + worker)
	err = open(pgwake.Config{SkipMigrate: true})
	require.ErrorIs(t, err, pgwake.ErrPermission)
	require.ErrorContains(t, err, s.schema)
}

func (s *stage) exec(sql string) {
	s.t.Helper()
	_, err := s.super.Exec(s.within(), sql)
	require.NoError(s.t, err, sql)
}
