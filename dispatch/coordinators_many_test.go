package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what do many namespaces cost, and what if one server is not enough for them?

// A thousand idle namespaces, or some hundreds: one LISTEN connection, and one statement for all of them each fallback interval.
func TestCoordinators_ThousandIdleNamespaces_CostNoQueries(t *testing.T) {
	namespaces := testsize.Of(300, 1000)
	schema := testschema.Core.Borrow(t)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: schema, FallbackInterval: 200 * time.Millisecond})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	running(t, c)
	testdb.Exec(t, pgwaketest.URL(t), `INSERT INTO `+schema+`.namespaces (name) SELECT 'n' || i FROM generate_series(1, $1) AS i`, namespaces)
	// To look at a thousand of them costs something, too.
	require.Eventually(t, func() bool { return c.Stats().Active == namespaces+1 && p.Stats().Worker.Parked == namespaces+1 }, 3*patience, 20*time.Millisecond)
	awaitSettled(t, p, func(s pgwake.Stats) pgwake.QueueStats { return s.Worker })
	fallbacks := func(more int64) pgwake.Stats {
		before := p.Stats().Fallbacks
		require.Eventually(t, func() bool { return p.Stats().Fallbacks >= before+more }, patience, 10*time.Millisecond)
		return p.Stats()
	}
	before := fallbacks(2) // the one that counts the new namespaces, and one after which that was looked into
	after := fallbacks(3)
	require.Equal(t, before.Worker.Looks, after.Worker.Looks)
	require.Equal(t, before.WaitReads, after.WaitReads)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var listeners int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND objid IN (SELECT listener::oid FROM `+schema+`.waiters WHERE lane = 0)`).Scan(&listeners))
	require.Equal(t, 1, listeners)

	enqueueIn(t, p, "n150", "x")
	require.Eventually(t, func() bool { return l.count("n150/x") == 1 }, patience, 10*time.Millisecond)
	require.Equal(t, 1, c.Stats().Working, "the others are idle")
	require.Zero(t, p.Stats().Worker.FallbackFinds)
}

// Where nothing is pushed, idle namespaces are polled by one statement for all of them.
func TestCoordinators_ManyIdleNamespaces_Polling_OneStatementForAll(t *testing.T) {
	const namespaces = 200
	schema := testschema.Core.Borrow(t)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: schema, Mode: pgwake.ModePolling, PollInterval: 50 * time.Millisecond})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	running(t, c)
	testdb.Exec(t, pgwaketest.URL(t), `INSERT INTO `+schema+`.namespaces (name) SELECT 'n' || i FROM generate_series(1, $1) AS i`, namespaces)
	require.Eventually(t, func() bool { return p.Stats().Worker.Parked == namespaces+1 }, patience, 10*time.Millisecond)
	before := p.Stats().Worker
	require.Eventually(t, func() bool { return p.Stats().Worker.Polls >= before.Polls+5 }, patience, 10*time.Millisecond)
	require.Equal(t, before.Looks, p.Stats().Worker.Looks)
	enqueueIn(t, p, "n150", "x")
	testdb.Exec(t, pgwaketest.URL(t), `SELECT `+schema+`.enqueue_work('x', p_namespace => 'n151')`)
	require.Eventually(t, func() bool { return l.total() == 2 }, patience, 10*time.Millisecond)
}

// A namespace in another mode than the others comes: they go on waiting.
func TestCoordinators_Rollout_NamespaceComes_TheOthersDoNotNotice(t *testing.T) {
	const namespaces = 50
	schema := testschema.Core.Borrow(t)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: schema})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}, Rollout: func(namespace string) pgwake.Mode {
		if strings.HasPrefix(namespace, "shadow-") {
			return pgwake.ModeShadow
		}
		return pgwake.ModeHybrid
	}})
	running(t, c)
	testdb.Exec(t, pgwaketest.URL(t), `INSERT INTO `+schema+`.namespaces (name) SELECT 'n' || i FROM generate_series(1, $1) AS i`, namespaces)
	require.NoError(t, p.RegisterNamespace(t.Context(), "shadow-0")) // from here on the node is told of everything
	require.Eventually(t, func() bool {
		s := p.Stats().Worker
		return c.Stats().Active == namespaces+2 && s.Parked == namespaces+1 && s.Settled
	}, patience, 10*time.Millisecond)
	before := p.Stats()
	for i := range 5 {
		require.NoError(t, p.RegisterNamespace(t.Context(), fmt.Sprint("shadow-", i+1)))
	}
	require.Eventually(t, func() bool { return c.Stats().Active == namespaces+7 }, patience, 10*time.Millisecond)
	require.Equal(t, before.Worker.Looks, p.Stats().Worker.Looks)
	require.Equal(t, before.Fallbacks, p.Stats().Fallbacks)
}

// A namespace that outgrew its server has another: what is enqueued goes there, and what was left behind is served as well.
func TestCoordinators_Shards_TwoServers(t *testing.T) {
	t.Parallel()
	second, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	if errors.Is(err, devpg.ErrNoServer) {
		t.Skip("there is no second PostgreSQL to be had: ", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, second.Stop(context.Background())) })
	one := testschema.Core.New(t, nil)
	other, err := pgwake.Open(t.Context(), second.URL, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close(context.Background())) })
	l := newLedger()
	c := dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{l.all()},
		Shards: []dispatch.Shard{{Namespaces: []string{"large-*"}, Source: other}, {Namespaces: []string{"large-but-here"}, Source: one}},
	})
	require.Equal(t, dispatch.Source(other), c.SourceOf("large-a"))
	require.Equal(t, dispatch.Source(one), c.SourceOf("large-but-here"))
	require.Equal(t, dispatch.Source(one), c.SourceOf("small"))
	running(t, c)
	enqueueIn(t, one, "large-a", "left")
	for _, namespace := range []string{"large-a", "large-b", "small"} {
		enqueueIn(t, c.SourceOf(namespace).(*pgwake.Provider), namespace, "x")
	}
	require.Eventually(t, func() bool { return l.total() == 4 }, patience, 10*time.Millisecond)
	sources := map[string][]dispatch.Source{}
	for _, n := range c.Namespaces() {
		sources[n.Namespace] = append(sources[n.Namespace], n.Source)
	}
	require.Equal(t, map[string][]dispatch.Source{
		"default": {one, other}, "large-a": {one, other}, "large-b": {other}, "small": {one},
	}, sources)
	awaitEmpty(t, one)
	awaitEmpty(t, other)
}

// barred is a Provider that refuses one namespace.
type barred struct {
	*pgwake.Provider
	namespace string
	open      atomic.Bool
	refused   atomic.Int64
}

var errBarred = errors.New("barred")

func (b *barred) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	if len(o.Namespaces) == 1 && o.Namespaces[0] == b.namespace && !b.open.Load() {
		b.refused.Add(1)
		return nil, errBarred
	}
	return b.Provider.FetchWorkItems(ctx, n, o)
}

func TestCoordinators_OneNamespaceCannotBeServed_TheOthersAre_AndItIsTriedAgain(t *testing.T) {
	p := &barred{Provider: testschema.Core.New(t, nil), namespace: "bad"}
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}})
	running(t, c)
	enqueueIn(t, p.Provider, "bad", "x")
	enqueueIn(t, p.Provider, "good", "x")
	require.Eventually(t, func() bool { return l.count("good/x") == 1 && p.refused.Load() >= 2 }, patience, 10*time.Millisecond)
	require.Equal(t, 1, c.Stats().Failing)
	p.open.Store(true)
	require.Eventually(t, func() bool { return l.count("bad/x") == 1 && c.Stats().Failing == 0 }, patience, 10*time.Millisecond)
}

// Handlers that take their time to register are there in advance.
func TestCoordinators_Warm_AreMadeInAdvance(t *testing.T) {
	p := testschema.Core.New(t, nil)
	l := newLedger()
	var made atomic.Int64
	g := dispatch.Group{Namespaces: []string{"n*"}, Warm: 2, Handlers: func(d *dispatch.Dispatcher) { made.Add(1); l.register(d) }}
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{g}})
	running(t, c)
	const inAdvance = 1 + 2 + 1 // for the settings, kept, and about to be
	require.Eventually(t, func() bool { return made.Load() == inAdvance }, patience, 10*time.Millisecond)
	for i := range 5 {
		enqueueIn(t, p, fmt.Sprintf("n%d", i), "x")
	}
	require.Eventually(t, func() bool { return l.total() == 5 && made.Load() >= inAdvance+5 }, patience, 10*time.Millisecond)
}

// What was claimed for a Dispatcher that is not there in time is as good as never claimed.
func TestCoordinators_HandlersTakeLongerThanALease_NoAttemptIsLost(t *testing.T) {
	p := testschema.Core.New(t, nil)
	var calls atomic.Int64
	registering, goOn, attempts := make(chan bool), make(chan bool), make(chan int, 1)
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, Config: dispatch.Config{LockTimeout: 3 * time.Second},
		Handlers: func(d *dispatch.Dispatcher) {
			if calls.Add(1) == 2 { // the first is by NewCoordinators
				registering <- true
				<-goOn
			}
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				attempts <- item.Attempt
				return nil, nil
			})
		},
	}}})
	running(t, c)
	enqueueIn(t, p, "default", "x")
	await(t, registering)
	require.Eventually(t, func() bool { _, leased := depth(t, p); return leased == 0 }, patience, 10*time.Millisecond)
	goOn <- true
	require.Equal(t, 1, await(t, attempts))
	awaitEmpty(t, p)
}

func TestCoordinators_Eager_BeginsWithoutAnItem(t *testing.T) {
	p := testschema.Core.New(t, nil)
	l := newLedger()
	g := l.all()
	g.Eager, g.RetireAfter = true, dispatch.Never
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{g}})
	running(t, c)
	require.NoError(t, p.RegisterNamespace(t.Context(), "new"))
	require.Eventually(t, func() bool { return c.Stats().Working == 2 }, patience, 10*time.Millisecond)
}
