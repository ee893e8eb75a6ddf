package pgwake

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

func TestParseNote_WhatTheServerWrites_IsUnderstood(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	at := time.Date(2031, 5, 6, 7, 8, 9, 123456000, time.UTC)
	for _, c := range []struct {
		next      *time.Time
		namespace *string
		want      note
	}{
		{nil, nil, note{due: 3}},
		{&at, nil, note{due: 3, next: at}},
		{&at, new("red"), note{due: 3, next: at, namespace: "red"}},
	} {
		mustExec(t, conn, `SELECT notify_queue('worker', 3, $1, $2)`, c.next, c.namespace)
		n, err := ear.WaitForNotification(t.Context())
		require.NoError(t, err)
		got := noteOf(t, said(t, n))
		require.True(t, c.want.next.Equal(got.next))
		got.next = c.want.next
		require.Equal(t, c.want, got)
	}
}

func channelOf(t *testing.T, p *Provider, q Queue) (channel string) {
	t.Helper()
	require.NoError(t, plain(t, p.cfg.Schema).QueryRow(t.Context(), `SELECT channel($1)`, q.String()).Scan(&channel))
	return channel
}

// listenTo has ear listen to what all nodes are told, after the greeting of this one.
func listenTo(t *testing.T, ear *pgx.Conn, p *Provider, q Queue) (channel string) {
	t.Helper()
	require.NoError(t, p.engine.coalescer.flush(t.Context()))
	channel = channelOf(t, p, q)
	mustExec(t, ear, "LISTEN "+channel)
	return channel
}

// Whatever a stranger or a newer version sends must at worst cost a look.
func FuzzParseNote(f *testing.F) {
	for _, s := range []string{"", "1 0 *", "0 1763720000123456 red", "1", "x y z", "1 2", "-1 -1 -1", "9999999999999999999 0 *"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		n, _ := parseNote(payload)
		if n.due <= 0 && n.next.IsZero() {
			require.Regexp(t, `^[-+]?\d+ [-+]?0+ `, payload, "a payload that is not clear must make somebody look")
		}
	})
}

func TestListener_ApplicationName_IsTheCallersOrSaysWhatItIs(t *testing.T) {
	named, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	named.RuntimeParams["application_name"] = "shop"
	for _, c := range []struct {
		listen *pgx.ConnConfig
		want   string
	}{{nil, "pgwake listen"}, {named, "shop"}} {
		p := testProvider(t, Config{ListenConfig: c.listen})
		require.True(t, p.Stats().Listening)
		var name string
		require.NoError(t, plain(t, p.cfg.Schema).QueryRow(t.Context(),
			`SELECT application_name FROM pg_stat_activity WHERE pid = $1`, p.engine.listener.pid.Load()).Scan(&name))
		require.Equal(t, c.want, name)
	}
}

func TestListener_BackendKilledUnderLoad_LosesNothingAndListensAgain(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	for range 5 {
		wait := fetchWork(t, p, longPoll)
		awaitParked(t, p, Worker, 1)
		reconnects := p.Stats().Reconnects
		mustExec(t, producer, `SELECT pg_terminate_backend($1), enqueue_work('w')`, p.engine.listener.pid.Load())
		require.NoError(t, p.AckWorkItem(t.Context(), get(t, wait).item.LockToken, nil))
		eventually(t, "it listens again", func() bool { return p.Stats().Reconnects > reconnects && p.Stats().Listening })
		require.True(t, p.Health().OK)
	}
}

// What a verb has to tell is told before Close lets the coalescer have the last word.
func TestClose_VerbHasCommittedAndNotTold_WaitsForIt(t *testing.T) {
	p := testProvider(t, Config{})
	ear := plain(t, p.cfg.Schema)
	listenTo(t, ear, p, Worker)
	somebodyWaits(t, ear)
	committed := make(chan struct{})
	var verb sync.WaitGroup
	verb.Go(func() {
		_ = p.doAndTell(t.Context(), "test", func(context.Context, querier) error { return nil }, func() {
			close(committed)
			select { // what is said once Close has returned, nobody hears
			case <-p.closed:
			case <-time.After(500 * time.Millisecond):
			}
			p.engine.tell([]produced{{queue: Worker, namespace: "late"}}, true)
		})
	})
	<-committed
	require.NoError(t, p.Close(t.Context()))
	verb.Wait()
	var heard note
	for heard == joined { // the node's greeting may come first
		_, payload := hear(t, ear)
		heard, _ = parseNote(payload)
	}
	require.Equal(t, "late", heard.namespace)
}

// Where the pool makes its passwords anew, or sets a role, LISTEN and migrations do the same.
func TestNew_PoolHasHooks_EveryConnectionGoesThroughThem(t *testing.T) {
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	var before, after atomic.Int64
	config.ConnConfig.Port++ // wrong, and put right by the hook
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error { before.Add(1); c.Port--; return nil }
	config.AfterConnect = func(context.Context, *pgx.Conn) error { after.Add(1); return nil }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent})
	require.NoError(t, err)
	require.True(t, p.Stats().Listening, p.Health().Problems)
	require.NoError(t, p.Close(t.Context()))
	pool.Close()
	require.GreaterOrEqual(t, after.Load(), int64(3), "one of the pool, that of the migrations, and that of LISTEN")
	require.GreaterOrEqual(t, before.Load(), after.Load(), "one may be given up meanwhile")
}

// What a hook looks up is where it always is.
func TestNew_HookOfThePoolKnowsAType_MigrationsFindItAsWell(t *testing.T) {
	schema := testdb.Schema(t)
	name := "type of " + schema
	testdb.Exec(t, testdb.URL(t), `CREATE TYPE public.`+pgx.Identifier{name}.Sanitize()+` AS ENUM ('a')`)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP TYPE public.`+pgx.Identifier{name}.Sanitize()) })
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.LoadType(ctx, pgx.Identifier{name}.Sanitize())
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: schema, Logger: silent})
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))
}

// Nothing that a hook sets takes away what migrations need of their session.
func TestNew_PoolSetsARole_TablesBelongToThatRole(t *testing.T) {
	for name, tune := range map[string]func(*pgxpool.Config){"as it is": func(*pgxpool.Config) {}, "tuned": TunePool} {
		t.Run(name, func(t *testing.T) {
			schema := testdb.Schema(t)
			role := "owner of " + schema
			owner, in := pgx.Identifier{role}.Sanitize(), pgx.Identifier{schema}.Sanitize()
			testdb.Exec(t, testdb.URL(t), `CREATE ROLE `+owner+`; CREATE SCHEMA `+in+` AUTHORIZATION `+owner)
			t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP OWNED BY `+owner+` CASCADE; DROP ROLE `+owner) })
			config, err := pgxpool.ParseConfig(testdb.URL(t))
			require.NoError(t, err)
			config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				return execAll(ctx, conn, `SET ROLE `+owner, `SET search_path = pg_temp`, `SET lock_timeout = '1h'`, `SET datestyle = 'German'`)
			}
			tune(config)
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			defer pool.Close()
			p, err := New(t.Context(), pool, &Config{Schema: schema, Logger: silent})
			require.NoError(t, err)
			require.True(t, p.Stats().Listening, p.Health().Problems)
			require.NoError(t, p.Migrate(t.Context(), migrations.Layer{Table: "layer_migrations", Empty: "require_nothing", Files: fstest.MapFS{"00001_a.sql": {Data: []byte(`-- +goose Up
CREATE TABLE of_layer ();
CREATE FUNCTION require_nothing() RETURNS void LANGUAGE sql AS 'SELECT';
CREATE TABLE seen AS SELECT current_setting('lock_timeout')::interval < interval '1 hour' AS ours;
-- +goose Down
DROP TABLE of_layer;
`)}}}))
			require.NoError(t, p.Close(t.Context()))
			look := plain(t, schema)
			var owners, paths []string
			require.NoError(t, look.QueryRow(t.Context(), `SELECT array_agg(DISTINCT tableowner::text) FROM pg_tables WHERE schemaname = $1`, schema).Scan(&owners))
			require.Equal(t, []string{role}, owners)
			require.NoError(t, look.QueryRow(t.Context(), `SELECT array_agg(DISTINCT s) FROM pg_proc, unnest(proconfig) AS s
				WHERE pronamespace = to_regnamespace($1) AND s LIKE 'search_path%'`, in).Scan(&paths))
			require.Len(t, paths, 1)
			require.Contains(t, paths[0], schema)
			var there bool
			require.NoError(t, look.QueryRow(t.Context(), `SELECT to_regclass('of_layer') IS NOT NULL AND (SELECT ours FROM seen)`).Scan(&there))
			require.True(t, there)
		})
	}
}

func TestFetch_ConnectionTakesLongerThanThePollTimeout_ThereIsNoWork(t *testing.T) {
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	var slow atomic.Bool
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if slow.Load() {
			time.Sleep(poolGrace + 50*time.Millisecond) // what a loaded server takes, and connecting comes on top
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent})
	require.NoError(t, err)
	defer p.Close(context.Background())
	pool.Reset()
	slow.Store(true)
	_, err = p.FetchWorkItem(t.Context(), &FetchOptions{LockTimeout: time.Minute, PollTimeout: time.Millisecond})
	require.ErrorIs(t, err, ErrNoWork)
}

func TestFetch_PanicBelowTheClaim_IsAnErrorAndNothingIsLost(t *testing.T) {
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	tracer := &panicking{}
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent})
	require.NoError(t, err)
	defer p.Close(context.Background())
	_, err = p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	tracer.armed.Store(true)
	_, err = p.FetchWorkItem(t.Context(), longPoll)
	require.ErrorContains(t, err, "panic: tracer")
	var failure *Error
	require.ErrorAs(t, err, &failure)
	require.True(t, failure.Retryable, "or it would end a Dispatcher")
	item, err := p.FetchWorkItem(t.Context(), longPoll)
	require.NoError(t, err)
	require.Equal(t, "w", item.Name)
}

// A panic may come after the commit: whoever waits here is to look, as if no answer had come.
func TestEnqueue_PanicBelowTheStatement_WakesWhoeverWaits(t *testing.T) {
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	tracer := &panicking{}
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent})
	require.NoError(t, err)
	defer p.Close(context.Background())
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	tracer.enqueued.Store(true)
	require.PanicsWithValue(t, "tracer", func() { _, _ = p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil) })
	require.NoError(t, get(t, wait).err)
	require.Zero(t, p.Stats().Worker.Finds["fallback"])
}

// Whoever called the fetch could not give back what it brought, since the Provider takes no verbs any more.
func TestClose_ClaimIsUnderWay_ItemIsFetchableAtOnce(t *testing.T) {
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	tracer := &holding{began: make(chan struct{}), goOn: make(chan struct{})}
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent})
	require.NoError(t, err)
	_, err = p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	tracer.armed.Store(true)
	fetched, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := p.FetchWorkItem(t.Context(), longPoll)
		fetched <- err
	}()
	<-tracer.began
	go func() { closed <- p.Close(context.Background()) }()
	<-p.closing
	close(tracer.goOn)
	require.ErrorIs(t, <-fetched, ErrClosed)
	require.NoError(t, <-closed)
	other := testProvider(t, Config{Schema: p.cfg.Schema})
	item, err := other.FetchWorkItem(t.Context(), longPoll)
	require.NoError(t, err)
	require.Equal(t, 1, item.Attempt, "as if it had never been fetched")
}

// holding holds the end of one batch up.
type holding struct {
	panicking
	began, goOn chan struct{}
}

func (h *holding) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (h *holding) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if h.armed.CompareAndSwap(true, false) {
		close(h.began)
		<-h.goOn
	}
}

// panicking panics at the start of one batch.
type enqueuing struct{} // key of a context

type panicking struct {
	armed    atomic.Bool // before the next batch
	enqueued atomic.Bool // after the next query that enqueues work
}

func (*panicking) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, enqueuing{}, strings.Contains(d.SQL, "enqueue_work"))
}
func (p *panicking) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if enqueues, _ := ctx.Value(enqueuing{}).(bool); enqueues && p.enqueued.CompareAndSwap(true, false) {
		panic("tracer")
	}
}
func (p *panicking) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	if p.armed.CompareAndSwap(true, false) {
		panic("tracer")
	}
	return ctx
}
func (*panicking) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*panicking) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func TestListener_CannotConnect_ProviderPollsAndSaysSo(t *testing.T) {
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port = 1 // nobody listens there
	config.Fallbacks = nil
	p := testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config})
	require.False(t, p.Stats().Listening)
	require.False(t, p.Health().OK)
	require.Contains(t, p.Health().Problems[0].Text, "not listening")
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('polled')`)
	require.Equal(t, "polled", get(t, wait).item.Name)
	require.True(t, p.Stats().Worker.Aggressive)
}

// What it does meanwhile is a matter of the modes in force, whatever those were that it began with.
func TestListener_CannotConnect_ProviderSaysWhatItDoesInItsModes(t *testing.T) {
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port, config.Fallbacks = 1, nil
	providers := make(map[AggressivePolicy]*Provider)
	for _, policy := range []AggressivePolicy{OnTrouble, Never} {
		providers[policy] = testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config,
			AggressivePolicy: policy, AggressiveInterval: 70 * time.Millisecond, FallbackInterval: 50 * time.Second})
	}
	const polling, asking, finding, counting = "polling every 70ms", "asking every 50s", "finding only what this node enqueues", "counting no notifications"
	for _, c := range []struct {
		policy       AggressivePolicy
		general, one Mode // and that of a namespace
		says         string
	}{
		{OnTrouble, ModeHybrid, ModeHybrid, polling},
		{OnTrouble, ModeShadow, ModeEventDriven, polling},
		{OnTrouble, ModeShadow, ModeShadow, counting},
		{OnTrouble, ModePolling, ModeShadow, counting},
		{Never, ModeHybrid, ModeHybrid, asking},
		{Never, ModePolling, ModeHybrid, asking},
		{Never, ModeEventDriven, ModeEventDriven, finding},
		{Never, ModeShadow, ModeDisabled, counting},
	} {
		p := providers[c.policy]
		require.NoError(t, p.SetModes(c.general, map[string]Mode{"one": c.one}))
		require.Contains(t, p.Health().Problems[0].Text, "not listening; "+c.says, "%+v", c)
	}
}

// Polls that find nothing are no sign that notifications get through: without a LISTEN connection the polling goes
// on, however short AggressiveDuration is.
func TestListener_CannotConnect_PollingDoesNotEnd(t *testing.T) {
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port, config.Fallbacks = 1, nil
	p := testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config,
		AggressiveDuration: 10 * time.Millisecond, AggressiveExitThreshold: 1, AggressiveInterval: 10 * time.Millisecond})
	fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	looks, ended := p.Stats().Worker.Looks, false
	eventually(t, "it has polled 30 times", func() bool {
		ended = ended || !p.Stats().Worker.Aggressive
		return ended || p.Stats().Worker.Looks >= looks+30
	})
	require.False(t, ended)
}

// An outage made the pause long. Once the session that came after it has lived for a while, its end is another outage.
func TestPauseAfter_SessionThatWasUpForAWhile_BeginsAnew(t *testing.T) {
	require.Equal(t, firstReconnect, pauseAfter(lastReconnect, true, healthySession))
	require.Equal(t, lastReconnect, pauseAfter(lastReconnect, true, healthySession-1))
	require.Equal(t, lastReconnect, pauseAfter(lastReconnect, false, answerDeadline), "an attempt that took long to fail")
	require.Less(t, healthySession, answerDeadline, "one that falls silent at once is noticed after that, and then connects at once")
}
