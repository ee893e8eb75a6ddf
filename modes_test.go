package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: does a node learn of work as its modes say, and is nothing lost or done twice while they change?

// producer opens a Provider that only adds: what it does, a node hears from another session.
func (n *node) producer(t *testing.T) *node {
	t.Helper()
	return &node{Provider: pgwaketest.Open(t, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModeDisabled}), schema: n.schema}
}

// listeners is how many LISTEN connections there are for the schema: each has its row while it lives.
func (n *node) listeners(t *testing.T) int {
	t.Helper()
	return len(query[int32](t, n, `SELECT DISTINCT listener FROM waiters`))
}

func awaitOne(t *testing.T, got <-chan *pgwake.ClaimedWorkItem) *pgwake.ClaimedWorkItem {
	t.Helper()
	select {
	case item := <-got:
		return item
	case <-time.After(patience):
		require.Fail(t, "nothing came")
		return nil
	}
}

// fetching fetches from a namespace, acknowledges, and hands out what came.
func (n *node) fetching(t *testing.T, namespace string) <-chan *pgwake.ClaimedWorkItem {
	got := make(chan *pgwake.ClaimedWorkItem, 10)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			item, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: lease, Namespaces: []string{namespace}})
			if err == nil && n.AckWorkItem(context.Background(), item.LockToken, nil) == nil {
				got <- item
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return got
}

func TestModes_ByNamespace_OneHearsAndTheOtherPolls(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Modes: map[string]pgwake.Mode{"slow": pgwake.ModePolling}, PollInterval: 10 * time.Millisecond})
	add := n.producer(t)
	quick, slow := n.fetching(t, "quick"), n.fetching(t, "slow")
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 && pgwake.WorkSettled(n.Provider, "quick") }, patience, 10*time.Millisecond)
	add.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "quick"})
	awaitOne(t, quick)
	finds := n.Stats().Worker.Finds
	require.Zero(t, finds["scout"])
	add.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "slow"})
	awaitOne(t, slow)
	after := n.Stats().Worker.Finds
	require.Equal(t, finds["notify"], after["notify"])
	require.Equal(t, int64(1), after["scout"])
	require.Equal(t, []string{"quick"}, query[string](t, n, `SELECT namespace FROM waiters WHERE lane > 0`), "who polls is not told")
}

func TestSetModes_ListenConnection_ComesAndGoes(t *testing.T) {
	t.Parallel()
	// A notification that is taken up late would have it poll in every mode, and find what it was told of by that.
	n := newNode(t, &pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 10 * time.Millisecond, NotifyDeliveryTimeout: patience})
	add := n.producer(t)
	got := n.fetching(t, "default")
	require.Zero(t, n.listeners(t))
	require.True(t, n.Health().OK)
	for range 3 {
		add.enqueue(t, "polled")
		awaitOne(t, got)

		require.NoError(t, n.SetModes(pgwake.ModeEventDriven, nil))
		require.Eventually(t, func() bool { s := n.Stats(); return s.Listening && s.Worker.Parked == 1 && s.Worker.Settled }, patience, 10*time.Millisecond)
		before := n.Stats().Worker.Finds
		add.enqueue(t, "heard")
		awaitOne(t, got)
		after := n.Stats().Worker.Finds
		require.Equal(t, before["notify"]+1, after["notify"])
		require.Equal(t, before["scout"], after["scout"])
		require.Equal(t, 1, n.listeners(t))

		require.NoError(t, n.SetModes(pgwake.ModePolling, nil))
		require.Eventually(t, func() bool { return !n.Stats().Listening && n.listeners(t) == 0 }, patience, 10*time.Millisecond)
		require.True(t, n.Health().OK)
	}
	require.Zero(t, n.Stats().Panics)
}

func TestModes_Shadow_HearsAndDoesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Mode: pgwake.ModeShadow, FallbackInterval: 100 * time.Millisecond})
	add := n.producer(t)
	got := n.fetching(t, "default")
	add.enqueue(t, "x")
	require.Eventually(t, func() bool { return n.Stats().Worker.Notifications > 0 }, patience, 10*time.Millisecond)
	_, err := n.FetchWorkItem(t.Context(), now)
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	require.Zero(t, n.Stats().Worker.Items)
	require.Empty(t, got)

	require.NoError(t, n.SetModes(pgwake.ModeHybrid, nil))
	awaitOne(t, got)
	require.NoError(t, n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"default": pgwake.ModeDisabled}))
	require.Eventually(t, func() bool { return len(query[int32](t, n, `SELECT lane FROM waiters WHERE armed`)) == 0 }, patience, 10*time.Millisecond,
		"nobody tells it any more, once a fallback has removed what a query that was under way then may have written")
	add.enqueue(t, "y")
	_, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"default", "other"}})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
}

// Another node takes over what this one was told of alone, and no longer fetches.
func TestSetModes_NodeIsDisabled_OthersTakeOver(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	got := n.fetching(t, "default")
	other := n.anotherWith(t, &pgwake.Config{NotifyDeliveryTimeout: patience}) // or what it takes up late has it poll, and find by that
	theirs := other.fetching(t, "default")
	settled := func(n *node) bool { s := n.Stats().Worker; return s.Parked == 1 && s.Settled }
	require.Eventually(t, func() bool { return settled(n) && settled(other) }, patience, 10*time.Millisecond)
	require.NoError(t, n.SetModes(pgwake.ModeDisabled, nil))
	add := n.producer(t)
	for range 20 {
		add.enqueue(t, "x")
		awaitOne(t, theirs)
	}
	require.Empty(t, got)
	s := other.Stats().Worker
	require.Zero(t, s.FallbackFinds+s.ScoutFinds)
}

func TestSetModes_UnderLoad_NothingIsLostOrDoneTwice(t *testing.T) {
	t.Parallel()
	const items = 1000
	n := newNode(t, &pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 5 * time.Millisecond})
	add := n.producer(t)
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	done := make(map[string]int)
	var workers sync.WaitGroup
	for i := range 8 {
		workers.Go(func() {
			o := &pgwake.FetchOptions{LockTimeout: lease}
			if i%2 == 0 {
				o.Namespaces = []string{"default"}
			}
			for ctx.Err() == nil {
				item, err := n.FetchWorkItem(ctx, o)
				if err != nil {
					continue
				}
				if err := n.AckWorkItem(context.Background(), item.LockToken, nil); err == nil {
					mu.Lock()
					done[item.Name]++
					mu.Unlock()
				}
			}
		})
	}
	defer func() { cancel(); workers.Wait() }()
	modes := []pgwake.Mode{pgwake.ModeHybrid, pgwake.ModeEventDriven, pgwake.ModeDisabled, pgwake.ModePolling, pgwake.ModeShadow, pgwake.ModeEventDriven}
	for i := range items {
		if i%50 == 0 {
			mode := modes[i/50%len(modes)]
			require.NoError(t, n.SetModes(mode, map[string]pgwake.Mode{"default": modes[(i/50+1)%len(modes)]}))
		}
		add.enqueue(t, fmt.Sprint(i))
	}
	require.NoError(t, n.SetModes(pgwake.ModeEventDriven, nil))
	require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(done) == items }, patience, 10*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	for name, times := range done {
		require.Equal(t, 1, times, name)
	}
	require.Zero(t, n.Stats().Panics)
}

func TestSetModes_BadOnes_ChangeNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, bad := range []error{
		n.SetModes(99, nil), n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"Bad": pgwake.ModePolling}),
		n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"good": -1}),
	} {
		requireError(t, bad, pgwake.ErrInvalid)
	}
	mode, of := n.GetModes()
	require.Equal(t, pgwake.ModeHybrid, mode)
	require.Empty(t, of)
	require.NoError(t, n.Close(t.Context()))
	require.True(t, errors.Is(n.SetModes(pgwake.ModePolling, nil), pgwake.ErrClosed))
}

// statements counts those of a connection.
type statements struct{ made atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.made.Add(1)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A namespace in another mode than the others comes: those do not notice, and neither does the LISTEN connection.
func TestSetModes_OneMoreNamespace_ConcernsNoOther(t *testing.T) {
	t.Parallel()
	var onListen statements
	n := newNode(t, nil)
	listen := n.userPool(t, 1).Config().ConnConfig.Copy()
	listen.Tracer = &onListen
	p := n.openAt(t, n.urlWith(t, func(*pgx.ConnConfig) {}), &pgwake.Config{ListenConfig: listen})
	require.Eventually(t, func() bool { return p.Stats().Listening }, patience, 10*time.Millisecond)
	modes := map[string]pgwake.Mode{"off": pgwake.ModeDisabled, "shadow": pgwake.ModeShadow, "polled": pgwake.ModePolling}
	require.NoError(t, p.SetModes(pgwake.ModeHybrid, modes))
	for _, namespace := range []string{"hears", "off", "shadow"} {
		p.fetching(t, namespace)
	}
	still := func() bool {
		all, inVain := pgwake.WorkWaiting(p.Provider)
		return all == 3 && inVain == 2 && p.Stats().Worker.Settled
	}
	require.Eventually(t, still, patience, 10*time.Millisecond)
	before, looks := onListen.made.Load(), p.Stats().Worker.Looks
	for i := range 5 {
		modes[fmt.Sprint("polled-", i)] = pgwake.ModePolling
		modes[fmt.Sprint("off-", i)] = pgwake.ModeDisabled
		require.NoError(t, p.SetModes(pgwake.ModeHybrid, modes))
	}
	require.Eventually(t, still, patience, 10*time.Millisecond)
	require.Equal(t, looks, p.Stats().Worker.Looks, "somebody began anew")
	require.Zero(t, p.Stats().Fallbacks)
	require.Equal(t, before, onListen.made.Load())
}

// Of those that wait in vain, one is concerned; and of one that serves others too, its lane does not say what else it was asked for.
func TestSetModes_NamespaceIsFetchedAgain_WhoAskedForItGetsIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Modes: map[string]pgwake.Mode{"a": pgwake.ModeDisabled, "b": pgwake.ModeDisabled}})
	add := n.producer(t)
	once := func(namespaces ...string) chan *pgwake.ClaimedWorkItem {
		got := make(chan *pgwake.ClaimedWorkItem, 1)
		go func() {
			item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience, Namespaces: namespaces})
			assert.NoError(t, err)
			got <- item
		}()
		return got
	}
	a, both, b := once("a"), once("a", "c"), n.fetching(t, "b") // each takes one: the faster is not to have both
	still := func() bool {
		all, inVain := pgwake.WorkWaiting(n.Provider)
		return all == 3 && inVain == 2 && n.Stats().Worker.Settled
	}
	require.Eventually(t, still, patience, 10*time.Millisecond)
	for range 2 {
		add.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "a"})
	}
	add.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "b"})
	before := n.Stats().Worker.Looks
	require.NoError(t, n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"a": pgwake.ModeDisabled, "b": pgwake.ModeDisabled, "d": pgwake.ModeDisabled}))
	require.Eventually(t, still, patience, 10*time.Millisecond)
	require.Equal(t, before, n.Stats().Worker.Looks)
	require.NoError(t, n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{"b": pgwake.ModeDisabled}))
	awaitOne(t, a)
	require.Equal(t, "a", awaitOne(t, both).Namespace)
	require.Empty(t, b)
}

// Where nothing is fetched nothing is asked.
func TestModes_Disabled_CostsNoQuery(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Mode: pgwake.ModeDisabled})
	for range 3 {
		_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: time.Millisecond})
		require.ErrorIs(t, err, pgwake.ErrNoWork)
		_, err = n.FetchWorkItem(t.Context(), now)
		require.ErrorIs(t, err, pgwake.ErrNoWork)
	}
	require.Zero(t, n.Stats().Worker.Looks)
	// But for what else the query is to do.
	require.NoError(t, n.SetModes(pgwake.ModeHybrid, nil))
	n.enqueue(t, "x")
	item := n.take(t)
	require.NoError(t, n.SetModes(pgwake.ModeDisabled, nil))
	_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Ack: []pgwake.LockToken{item.LockToken}})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	require.Empty(t, query[int64](t, n, `SELECT id FROM worker_queue`))
}
