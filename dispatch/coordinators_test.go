package dispatch_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: is each namespace served, once, from its first item on, and does it cost nothing when it is idle?

// ledger is who handled what.
type ledger struct {
	mu   sync.Mutex
	seen map[string]int // items by "namespace/name"
}

func newLedger() *ledger { return &ledger{seen: make(map[string]int)} }

// register has the ledger handle everything.
func (l *ledger) register(d *dispatch.Dispatcher) {
	d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.seen[item.Namespace+"/"+item.Name]++
		return nil, nil
	})
}

func (l *ledger) count(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen[key]
}

func (l *ledger) total() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, times := range l.seen {
		n += times
	}
	return n
}

// all is a Group for all namespaces.
func (l *ledger) all() dispatch.Group {
	return dispatch.Group{Namespaces: []string{"*"}, Handlers: l.register}
}

func enqueueIn(t *testing.T, p *pgwake.Provider, namespace string, names ...string) {
	t.Helper()
	items := make([]pgwake.WorkEnqueue, len(names))
	for i, name := range names {
		items[i] = pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: name}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: namespace}}
	}
	_, err := p.EnqueueForWorkerMany(t.Context(), items)
	require.NoError(t, err)
}

// served waits until a coordinator serves each of these.
func served(t *testing.T, c *dispatch.Coordinators, namespaces ...string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var all []string
		for _, n := range c.Namespaces() {
			all = append(all, n.Namespace)
		}
		return !slices.ContainsFunc(namespaces, func(name string) bool { return !slices.Contains(all, name) })
	}, patience, 10*time.Millisecond)
}

// nodes opens several on one schema.
func nodes(t *testing.T, n int, config pgwake.Config) []*pgwake.Provider {
	config.Schema = testschema.Core.Borrow(t)
	all := []*pgwake.Provider{pgwaketest.Open(t, &config)}
	for len(all) < n {
		all = append(all, pgwaketest.Open(t, &config))
	}
	return all
}

// promptly is how soon the first item of a namespace is handled that is created with it, also by a node that hears of nothing, apart from
// the statements for it. The fastest of several is held against it: a machine stalls now and then.
const promptly = 100 * time.Millisecond

// createNamespace does so by a transaction that adds its first item, and returns how long after the commit that was handled, less what a
// few such transactions take here and now.
func createNamespace(t *testing.T, pool *pgxpool.Pool, p *pgwake.Provider, l *ledger, namespace string) time.Duration {
	t.Helper()
	began := time.Now()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if err := p.RegisterNamespaceTx(t.Context(), tx, namespace); err != nil {
			return err
		}
		_, err := p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "first"}, &pgwake.EnqueueOptions{Namespace: namespace})
		return err
	}))
	committed := time.Now()
	require.Eventually(t, func() bool { return l.count(namespace+"/first") == 1 }, patience, 10*time.Millisecond)
	return time.Since(committed) - 5*committed.Sub(began)
}

// Of eight nodes each serves a namespace that comes while they run, by one coordinator, and its first item is handled once, at once.
func TestT36_NamespaceCreatedWhileRunning_EachNodeHasOneCoordinator(t *testing.T) {
	providers := nodes(t, 8, pgwake.Config{})
	l := newLedger()
	var all []*dispatch.Coordinators
	for _, p := range providers {
		c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
		all = append(all, c)
		running(t, c)
		served(t, c, pgwake.DefaultNamespace)
	}
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	const rounds = 10
	var took []time.Duration
	for i := range rounds {
		namespace := fmt.Sprintf("n%d", i)
		took = append(took, createNamespace(t, pool, providers[0], l, namespace))
		for _, c := range all {
			served(t, c, namespace)
		}
	}
	require.Less(t, slices.Min(took), promptly, "%v", took)
	awaitEmpty(t, providers[0])
	require.Equal(t, rounds, l.total(), "each once")
	var atOnce sync.WaitGroup
	for i, c := range all {
		for range 8 {
			atOnce.Go(func() { _ = c.Spawn("n0") })
		}
		atOnce.Wait()
		require.Equal(t, rounds+1, c.Stats().Active)
		require.EqualValues(t, rounds+1, c.Stats().Spawned)
		require.Zero(t, providers[i].Stats().Fallbacks, "each was told")
	}
}

// cutListener is a statement that ends the LISTEN connections of a schema.
func cutListener(schema string) string {
	return `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()
		AND objid IN (SELECT listener::oid FROM ` + pgx.Identifier{schema}.Sanitize() + `.waiters)`
}

// The transaction with a namespace's first item takes the listener's connection with it. Nobody polls, so it is for whoever listens again to look.
func TestT37_NamespaceCreatedWhileTheListenerIsDown_IsServedAfterwards(t *testing.T) {
	schema := testschema.Core.Borrow(t)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: schema, AggressivePolicy: pgwake.Never})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	running(t, c)
	served(t, c, pgwake.DefaultNamespace)
	require.Eventually(t, func() bool { return p.Stats().Listening }, patience, 10*time.Millisecond)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "first"}, &pgwake.EnqueueOptions{Namespace: "new"}); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), cutListener(schema))
		return err
	}))
	served(t, c, "new")
	require.Eventually(t, func() bool { return l.count("new/first") == 1 }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return p.Stats().Reconnects == 1 }, patience, 10*time.Millisecond)
}

// It stays down, so namespaces are counted.
func TestT37_NamespacesCreatedWhileTheListenerStaysDown_AreServedAtOnce(t *testing.T) {
	schema := testschema.Core.Borrow(t)
	listen, down := severable(t)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: schema, ListenConfig: listen})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	running(t, c)
	served(t, c, pgwake.DefaultNamespace)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	down.Store(true)
	_, err = pool.Exec(t.Context(), cutListener(schema))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return !p.Stats().Listening }, patience, 10*time.Millisecond)
	const rounds = 5
	var took []time.Duration
	for i := range rounds {
		took = append(took, createNamespace(t, pool, p, l, fmt.Sprintf("n%d", i)))
	}
	require.Less(t, slices.Min(took), promptly, "%v", took)
	s := p.Stats()
	require.False(t, s.Listening, "it heard of none")
	require.Zero(t, s.Fallbacks)
	down.Store(false)
	require.Eventually(t, func() bool { return p.Stats().Reconnects == 1 }, patience, 10*time.Millisecond)
	awaitEmpty(t, p)
	require.Equal(t, rounds, l.total(), "each once")
}

func TestCoordinators_Idle_TheDispatcherRetires_AndComesBack(t *testing.T) {
	p := testschema.Core.New(t, nil)
	l := newLedger()
	g := l.all()
	g.RetireAfter = 20 * time.Millisecond
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{g}})
	running(t, c)
	for round := range 3 {
		enqueueIn(t, p, "a", "x")
		require.Eventually(t, func() bool { return l.count("a/x") == round+1 && c.Stats().Working == 0 }, patience, 10*time.Millisecond)
		require.EqualValues(t, round+1, c.Stats().Shifts)
	}
	require.Eventually(t, func() bool { s := p.Stats().Worker; return s.Parked == 2 && s.Settled }, patience, time.Millisecond, "one for each namespace")
}

func TestCoordinators_RetireAndSpawn_ItemsWaitMeanwhile(t *testing.T) {
	p := testschema.Core.New(t, nil)
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	require.NoError(t, c.Spawn("early"), "before there is such a namespace, and before Run")
	running(t, c)
	served(t, c, "early")
	c.Retire("early")
	enqueueIn(t, p, "early", "x")
	enqueueIn(t, p, "other", "x")
	require.Eventually(t, func() bool { return l.count("other/x") == 1 }, patience, 10*time.Millisecond)
	require.Zero(t, l.count("early/x"))
	require.NoError(t, c.Spawn("early"))
	require.Eventually(t, func() bool { return l.count("early/x") == 1 }, patience, 10*time.Millisecond)
	s := c.Stats()
	require.EqualValues(t, 1, s.Retired)
	require.EqualValues(t, 4, s.Spawned, "default, early twice, other")
	require.ErrorIs(t, c.Scale("nowhere", 1, 1), pgwake.ErrNotFound)
	require.ErrorIs(t, c.Scale("early", 2, 1), pgwake.ErrConfig)
}

func TestCoordinators_Namespaces_OnlyThoseOfTheNodeAreServed(t *testing.T) {
	p := testschema.Core.New(t, nil)
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{
		Namespaces: []string{"tenant-*", "one"},
		Groups: []dispatch.Group{
			{Name: "tenants", Namespaces: []string{"tenant-*"}, Handlers: l.register},
			{Name: "large", Namespaces: []string{"tenant-large"}, Extends: "tenants", Config: dispatch.Config{Concurrency: 3}},
			{Name: "rest", Namespaces: []string{"*"}, Extends: "large"},
		},
	})
	running(t, c)
	for _, namespace := range []string{"two", "one", "tenant-a", "tenant-large"} {
		enqueueIn(t, p, namespace, "x")
	}
	require.Eventually(t, func() bool { return l.total() == 3 }, patience, 10*time.Millisecond)
	require.Zero(t, l.count("two/x"))
	groups := map[string]string{}
	places := map[string]int{}
	for _, n := range c.Namespaces() {
		require.Equal(t, p, n.Source)
		groups[n.Namespace], places[n.Namespace] = n.Group, n.Places
	}
	require.Equal(t, map[string]string{"one": "rest", "tenant-a": "tenants", "tenant-large": "large"}, groups)
	require.Equal(t, map[string]int{"one": 3, "tenant-a": 10, "tenant-large": 3}, places, "settings are inherited")
	require.ErrorIs(t, c.Spawn("two"), pgwake.ErrInvalid)
}

// A namespace that needs more has it at once, and so has its next Dispatcher.
func TestCoordinators_Scale_WorkIsDoneSideBySide(t *testing.T) {
	p := testschema.Core.New(t, nil)
	began, release := make(chan bool, 8), make(chan bool)
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, RetireAfter: 20 * time.Millisecond, Config: dispatch.Config{Concurrency: 1},
		Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				began <- true
				<-release
				return nil, nil
			})
		},
	}}})
	running(t, c)
	enqueueIn(t, p, "a", "x", "x", "x", "x")
	await(t, began)
	require.NoError(t, c.Scale("a", 4, 4))
	for range 3 {
		await(t, began)
	}
	require.Equal(t, 4, c.Stats().Places)
	for range 4 {
		release <- true
	}
	awaitEmpty(t, p)
	require.Eventually(t, func() bool { return c.Stats().Working == 0 }, patience, 10*time.Millisecond)
	enqueueIn(t, p, "a", "x", "x", "x", "x")
	for range 4 {
		await(t, began)
	}
	close(release)
	awaitEmpty(t, p)
}

// What is on its way when all is to end is done, or given back, in each namespace.
func TestCoordinators_Stop_WhatIsAtWorkEnds_NothingIsLeftClaimed(t *testing.T) {
	p := testschema.Core.New(t, nil)
	const namespaces, items = 5, 20
	var began sync.WaitGroup
	began.Add(namespaces)
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"n*"}, Config: dispatch.Config{Concurrency: 1},
		Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				if item.Name == "0" {
					began.Done()
					began.Wait()
				}
				return nil, nil
			})
		},
	}}})
	stop := running(t, c)
	names := make([]string, items)
	for i := range names {
		names[i] = fmt.Sprint(i)
	}
	for i := range namespaces {
		enqueueIn(t, p, fmt.Sprintf("n%d", i), names...)
	}
	began.Wait()
	require.NoError(t, stop())
	require.Eventually(t, func() bool { _, leased := depth(t, p); return leased == 0 }, patience, 10*time.Millisecond) // a claim that was cut short is undone
	require.NoError(t, c.Spawn("n9"), "which does nothing any more")
	require.Zero(t, c.Stats().Active)
}

// The Decider of a namespace has its turns, whose Orchestrator comes and goes as Dispatchers do.
func TestCoordinators_Turns_AreTakenByNamespace(t *testing.T) {
	p := testschema.Core.New(t, nil)
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, RetireAfter: 20 * time.Millisecond, Turns: dispatch.OrchestratorConfig{Concurrency: 3},
		Decider: func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			return pgwake.OrchestrationAck{
				ExecutionID: turn.ExecutionID, Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusCompleted, Output: turn.Namespace},
			}, nil
		},
	}}})
	running(t, c)
	for round := range 3 {
		for i := range 5 {
			instance := fmt.Sprintf("%d-%d", round, i)
			_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "flows"})
			require.NoError(t, err)
			outcome, err := p.WaitForInstance(t.Context(), instance)
			require.NoError(t, err)
			require.Equal(t, "flows", outcome.Output)
		}
		require.GreaterOrEqual(t, c.Stats().Shifts, int64(round+1))
		require.Eventually(t, func() bool { return c.Stats().Working == 0 }, patience, 10*time.Millisecond)
	}
	require.Eventually(t, func() bool { return p.Stats().Orchestrator.Parked == 2 }, patience, time.Millisecond, "one for each namespace")
}

func TestCoordinators_BadConfig_IsAllSaidByRun(t *testing.T) {
	p := testschema.Core.New(t, nil)
	handlers := func(*dispatch.Dispatcher) {}
	decider := func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		return pgwake.OrchestrationAck{}, nil
	}
	for problem, config := range map[string]*dispatch.CoordinatorsConfig{
		"there is no Group with Namespaces": nil,
		"neither Handlers nor a Decider":    {Groups: []dispatch.Group{{Namespaces: []string{"*"}}}},
		`"[" is neither`:                    {Namespaces: []string{"["}, Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers}}},
		`"" is neither`:                     {Groups: []dispatch.Group{{Namespaces: []string{""}, Handlers: handlers}}},
		"two Groups are called":             {Groups: []dispatch.Group{{Name: "a", Namespaces: []string{"*"}, Handlers: handlers}, {Name: "a"}}},
		`extends "b"`:                       {Groups: []dispatch.Group{{Extends: "b", Namespaces: []string{"*"}, Handlers: handlers}}},
		"extends itself":                    {Groups: []dispatch.Group{{Name: "a", Extends: "a", Namespaces: []string{"*"}, Handlers: handlers}}},
		"Namespaces of its Config":          {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, Config: dispatch.Config{Namespaces: []string{"a"}}}}},
		"RetireAfter":                       {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, RetireAfter: 1}}},
		"Warm -1":                           {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, Warm: -1}}},
		"Source 1 is nil":                   {Shards: []dispatch.Shard{{Namespaces: []string{"a"}}}, Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers}}},
		"Concurrency -1":                    {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, Config: dispatch.Config{Concurrency: -1}}}},
		"Concurrency -2":                    {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, Turns: dispatch.OrchestratorConfig{Concurrency: -2}}}},
		"Concurrency -3":                    {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Decider: decider, Config: dispatch.Config{Concurrency: -3}}}},
		"boom":                              {Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: func(*dispatch.Dispatcher) { panic("boom") }}}},
	} {
		c := dispatch.NewCoordinators(p, config)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		require.ErrorContains(t, c.Run(ctx), problem)
		cancel()
		require.ErrorContains(t, c.Spawn("a"), problem)
	}
}
