package dispatch_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: do coordinators get their work in each mode as document 000 wants it, whatever comes by the channel, or does not?

// modal is a node of Coordinators in a mode, and a producer beside it.
type modal struct {
	*pgwake.Provider
	schema   string
	c        *dispatch.Coordinators
	producer *pgx.Conn

	gate  sync.RWMutex // handlers pass it
	mu    sync.Mutex
	paths map[string][]pgwake.Path // of what was handled, by namespace
}

func newModal(t *testing.T, config pgwake.Config) *modal {
	config.Schema = testschema.Core.Borrow(t)
	m := &modal{Provider: pgwaketest.Open(t, &config), schema: config.Schema, paths: make(map[string][]pgwake.Path)}
	m.c = dispatch.NewCoordinators(m, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, RetireAfter: time.Millisecond,
		Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				m.gate.RLock()
				defer m.gate.RUnlock()
				m.mu.Lock()
				defer m.mu.Unlock()
				m.paths[item.Namespace] = append(m.paths[item.Namespace], item.Path)
				return nil, nil
			})
		},
	}}})
	var err error
	m.producer, err = pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.producer.Close(context.Background()) })
	m.exec(t, `SELECT set_config('search_path', $1, false)`, m.schema)
	return m
}

func (m *modal) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := m.producer.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// enqueue adds an item from a session of its own, and says so or not.
func (m *modal) enqueue(t *testing.T, namespace string, aloud bool) {
	t.Helper()
	notify := map[bool]string{true: "on", false: "off"}[aloud]
	m.exec(t, `SELECT set_config('pgwake.notify', $1, false)`, notify)
	m.exec(t, `SELECT enqueue_work('x', p_namespace => $1)`, namespace)
}

func (m *modal) handled(namespace string) []pgwake.Path {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]pgwake.Path(nil), m.paths[namespace]...)
}

// waits waits until nobody here looks for work unless told to.
func (m *modal) waits(t *testing.T, namespaces int) {
	t.Helper()
	require.Eventually(t, func() bool { s := m.Stats().Worker; return s.Parked == namespaces && s.Settled }, patience, 10*time.Millisecond)
}

func (m *modal) awaits(t *testing.T, namespace string, paths ...pgwake.Path) {
	t.Helper()
	require.Eventually(t, func() bool { return len(m.handled(namespace)) >= len(paths) }, patience, 10*time.Millisecond)
	require.Equal(t, paths, m.handled(namespace))
}

// listeners is how many LISTEN connections there are.
func (m *modal) listeners(t *testing.T) (pids []int32) {
	t.Helper()
	rows, err := m.producer.Query(t.Context(), `SELECT pid FROM pg_stat_activity WHERE application_name = 'pgwake listen' AND EXISTS (
		SELECT FROM pg_locks l JOIN waiters w ON w.listener = l.objid::int WHERE l.locktype = 'advisory' AND l.pid = pg_stat_activity.pid)`)
	require.NoError(t, err)
	pids, err = pgx.CollectRows(rows, pgx.RowTo[int32])
	require.NoError(t, err)
	return pids
}

// severable is for a LISTEN connection that cannot be made while it is down.
func severable(t *testing.T) (listen *pgx.ConnConfig, down *atomic.Bool) {
	listen, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	down = new(atomic.Bool)
	listen.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if down.Load() {
			return nil, errors.New("the network is down")
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	return listen, down
}

func TestT38_ListenBackendIsTerminated_ItListensAgain_AndAllIsDone(t *testing.T) {
	listen, down := severable(t)
	m := newModal(t, pgwake.Config{ListenConfig: listen})
	running(t, m.c)
	m.waits(t, 1)
	const items = 20
	pids := m.listeners(t)
	require.Len(t, pids, 1)
	down.Store(true)
	m.exec(t, `SELECT pg_terminate_backend($1)`, pids[0])
	require.Eventually(t, func() bool { return !m.Health().OK && m.c.Health().Status == dispatch.Degraded }, patience, 10*time.Millisecond)
	for range items / 2 {
		m.enqueue(t, "default", true)
	}
	require.Eventually(t, func() bool { return len(m.handled("default")) == items/2 }, patience, time.Millisecond, "work is done meanwhile")
	down.Store(false)
	for range items / 2 {
		m.enqueue(t, "default", true)
	}
	require.Eventually(t, func() bool {
		return len(m.handled("default")) == items && m.Health().OK && m.c.Health().Status == dispatch.Healthy
	}, patience, 10*time.Millisecond)
	require.EqualValues(t, 1, m.Stats().Reconnects)
}

func TestT39_NotificationSuppressed_OnlyAFallbackOrAReconnectFindsIt(t *testing.T) {
	for mode, path := range map[pgwake.Mode]pgwake.Path{pgwake.ModeEventDriven: pgwake.PathEvent, pgwake.ModeHybrid: pgwake.PathPolling} {
		m := newModal(t, pgwake.Config{Mode: mode, FallbackInterval: 200 * time.Millisecond, AggressivePolicy: pgwake.Never})
		running(t, m.c)
		m.waits(t, 1)
		m.enqueue(t, "default", false)
		if mode == pgwake.ModeEventDriven {
			before := m.Stats().Fallbacks
			require.Eventually(t, func() bool { return m.Stats().Fallbacks >= before+3 }, patience, 10*time.Millisecond)
			require.Empty(t, m.handled("default"))
			m.exec(t, `SELECT pg_terminate_backend($1)`, m.listeners(t)[0])
		}
		m.awaits(t, "default", path)
		require.EqualValues(t, 1, m.Stats().Worker.ItemsBy[path])
	}
}

func TestT40_Polling_NoListenConnection_PickedUpWithinTheInterval(t *testing.T) {
	m := newModal(t, pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 10 * time.Millisecond})
	running(t, m.c)
	require.Eventually(t, func() bool { return m.Stats().Worker.Parked == 1 }, patience, 10*time.Millisecond)
	require.Empty(t, m.listeners(t))
	m.enqueue(t, "default", true)
	m.awaits(t, "default", pgwake.PathPolling)
	require.Zero(t, m.Stats().Fallbacks, "it was a poll")
	require.Zero(t, m.Stats().Worker.Notifications)
}

func TestT41_HybridByNamespace_EachByItsPath(t *testing.T) {
	m := newModal(t, pgwake.Config{Modes: map[string]pgwake.Mode{"polled": pgwake.ModePolling}, PollInterval: 10 * time.Millisecond})
	running(t, m.c)
	require.NoError(t, m.c.Spawn("heard"))
	require.NoError(t, m.c.Spawn("polled"))
	require.Eventually(t, func() bool { return m.Stats().Worker.Parked == 3 }, patience, 10*time.Millisecond)
	m.enqueue(t, "heard", true)
	m.enqueue(t, "polled", true)
	m.awaits(t, "heard", pgwake.PathEvent)
	m.awaits(t, "polled", pgwake.PathPolling)
	require.Equal(t, map[pgwake.Path]int64{pgwake.PathEvent: 1, pgwake.PathPolling: 1, pgwake.PathFetch: 0}, m.Stats().Worker.ItemsBy)
}

// That it claimed nothing is what another node says, which gets as its first delivery what this one heard of before.
func TestT43_Shadow_HearsAndClaimsNothing(t *testing.T) {
	m := newModal(t, pgwake.Config{Mode: pgwake.ModeShadow})
	running(t, m.c)
	require.Eventually(t, func() bool { return m.Stats().Listening }, patience, 10*time.Millisecond)
	other := pgwaketest.Open(t, &pgwake.Config{Schema: m.schema})
	for i := range int64(3) {
		m.enqueue(t, "default", true)
		require.Eventually(t, func() bool { return m.Stats().Worker.Notifications > i }, patience, 10*time.Millisecond)
		item, err := other.FetchWorkItem(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, 1, item.Attempt)
		require.NoError(t, other.AckWorkItem(t.Context(), item.LockToken, nil))
	}
	require.Zero(t, m.Stats().Worker.Looks, "nobody looks for what was heard")
	require.Zero(t, m.Stats().Worker.Items)
	m.enqueue(t, "default", true)
	require.NoError(t, m.SetModes(pgwake.ModeHybrid, nil))
	require.Eventually(t, func() bool { return len(m.handled("default")) == 1 }, patience, 10*time.Millisecond)
}

// notify has so many different notifications arrive at once, by both forms that there are.
func (m *modal) notify(t *testing.T, times int64) {
	t.Helper()
	before := m.Stats().Worker.Notifications
	m.exec(t, `SELECT notify_queue('worker', i, NULL), notify_queue('worker', i, NULL, 'default') FROM generate_series(1, $1) AS i`, times/2)
	require.Eventually(t, func() bool { return m.Stats().Worker.Notifications >= before+times }, patience, 10*time.Millisecond)
}

// heap is what is in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what has finalizers
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// What is said a hundred times over is looked into as often as there are dispatchers, or little more, and done once. While they are busy
// all of it is heard, and costs no memory: no more is kept than there are dispatchers.
func TestT44_NotifiedAgainAndAgain_HandledOnce_NothingPilesUp(t *testing.T) {
	const few, soMany = 20, 20_000
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	require.NoError(t, m.c.Scale("default", 1, 1))
	waiting := m.Stats().Worker
	m.notify(t, 200)
	m.waits(t, 1)
	require.LessOrEqual(t, m.Stats().Worker.Looks, waiting.Looks+few)
	require.Zero(t, m.Stats().Worker.Items)

	m.gate.Lock()
	release := sync.OnceFunc(m.gate.Unlock)
	t.Cleanup(release) // or the end waits for the handler
	m.enqueue(t, "default", true)
	require.Eventually(t, func() bool { return m.c.Namespaces()[0].Running == 1 }, patience, 10*time.Millisecond)
	busy, inUse := m.Stats().Worker, heap()
	m.notify(t, soMany)
	require.Equal(t, busy.Looks, m.Stats().Worker.Looks, "there is nobody who could look")
	for range 2 {
		m.notify(t, soMany)
	}
	require.Eventually(t, func() bool { // what came last may still be in a buffer
		m.notify(t, 2)
		return heap() < inUse+3*soMany*20
	}, patience, 100*time.Millisecond, "tens of bytes for each")
	release()
	require.Eventually(t, func() bool { return len(m.handled("default")) == 1 }, patience, 10*time.Millisecond)
	m.waits(t, 1)
	after := m.Stats().Worker
	require.LessOrEqual(t, after.Looks, busy.Looks+few)
	require.LessOrEqual(t, after.Tokens["notify"], after.Notifications, "one lane, one token each")
	require.EqualValues(t, 1, after.Items)
	require.Len(t, m.handled("default"), 1)
}

func TestT45_RolledBack_NobodyIsWoken(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	before := m.Stats().Worker
	m.exec(t, `BEGIN`)
	m.enqueue(t, "default", true)
	m.exec(t, `ROLLBACK`)
	m.exec(t, `SELECT notify_queue('worker', 0, NULL)`) // comes after whatever was said before
	require.Eventually(t, func() bool { return m.Stats().Worker.Notifications > before.Notifications }, patience, 10*time.Millisecond)
	require.Equal(t, before.Notifications+1, m.Stats().Worker.Notifications)
	require.Equal(t, before.Tokens["notify"], m.Stats().Worker.Tokens["notify"])
	require.Zero(t, m.Stats().Worker.Items)
}

// A name that is too long is refused before anything is written, and long data never break the transaction by what is notified.
func TestT46_LongNamesAndData_TheCallersTransactionLives(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	long := strings.Repeat("n", 41)
	require.NoError(t, pgx.BeginFunc(t.Context(), m.producer, func(tx pgx.Tx) error {
		_, err := m.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: long})
		require.ErrorIs(t, err, pgwake.ErrInvalid)
		require.ErrorIs(t, m.RegisterNamespaceTx(t.Context(), tx, long), pgwake.ErrInvalid)
		_, err = m.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{
			Name: strings.Repeat("x", 200), Input: []byte(`"` + strings.Repeat("x", 100_000) + `"`),
		}, &pgwake.EnqueueOptions{Namespace: long[:40]})
		return err
	}))
	require.Eventually(t, func() bool { return len(m.handled(long[:40])) == 1 }, patience, 10*time.Millisecond)
}

func TestT47_MalformedPayloads_AreCounted_AndTheListenerLives(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	for _, payload := range []string{"", "{}", "1 0 Not-A-Name 0", "1 0 default", strings.Repeat("x", 7000)} {
		m.exec(t, `SELECT pg_notify(channel('worker'), $1)`, payload)
	}
	m.exec(t, `SELECT notify_queue('worker', 1, NULL, 'nobody-has-it')`)
	require.Eventually(t, func() bool { return m.Stats().Worker.Unreadable == 5 }, patience, 10*time.Millisecond)
	m.waits(t, 1)
	m.enqueue(t, "default", true)
	m.awaits(t, "default", pgwake.PathEvent)
	require.Zero(t, m.Stats().Reconnects)
	require.Zero(t, m.Stats().Panics)
}

// due returns the names of all that is due, in the order in which it is fetched.
func due(t *testing.T, p *pgwake.Provider) (names []string) {
	t.Helper()
	items, err := p.FetchWorkItems(t.Context(), pgwake.MaxFetch, &pgwake.FetchOptions{NoWait: true, LockTimeout: pgwake.MaxLockTimeout})
	require.NoError(t, err)
	tokens := make([]pgwake.LockToken, len(items))
	for i, item := range items {
		names, tokens[i] = append(names, item.Name), item.LockToken
	}
	require.NoError(t, p.AckWorkItems(t.Context(), tokens))
	return names
}

func urgent(t *testing.T, p *pgwake.Provider, name string, level int, step time.Duration) {
	t.Helper()
	_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name}, &pgwake.EnqueueOptions{At: pgwake.HeadStart(level, step)})
	require.NoError(t, err)
}

// TestT48_AgedBehindAStreamOfHighOnes_ALowOneRunsAtTheCrossing has a head start take the place of what document 000 computes from
// priority and age. Two high ones come for each that can be done, so by their priority the low one would never be.
func TestT48_AgedBehindAStreamOfHighOnes_ALowOneRunsAtTheCrossing(t *testing.T) {
	const high, step = 8, time.Hour // what comes within the first eight hours is before the low one
	p := pgwaketest.Open(t, &pgwake.Config{Schema: testschema.Core.Borrow(t)})
	urgent(t, p, "low", 0, step)
	var done []string
	for hour := 0; !slices.Contains(done, "low"); hour++ {
		require.Less(t, hour, 10*high, "the low one starves")
		for range 2 {
			urgent(t, p, strconv.Itoa(hour), high, step)
		}
		item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
		require.NoError(t, err)
		require.NoError(t, p.AckWorkItem(t.Context(), item.LockToken, nil))
		done = append(done, item.Name)
		pgwaketest.Advance(t, p, time.Hour)
	}
	var want []string
	for hour := range high {
		want = append(want, strconv.Itoa(hour), strconv.Itoa(hour))
	}
	require.Equal(t, append(want, "low"), done)
}

// The crossing is at level*step, on either side of an hour and of a day as well, where document 000 has its thresholds.
func TestT48_AgedForAnHourOrADay_NoCliff(t *testing.T) {
	const high = 4
	p := pgwaketest.Open(t, &pgwake.Config{Schema: testschema.Core.Borrow(t)})
	for _, crossing := range []time.Duration{time.Hour - time.Minute, time.Hour, time.Hour + time.Minute, 24*time.Hour - time.Minute, 24 * time.Hour, 24*time.Hour + time.Minute} {
		urgent(t, p, "low", 0, crossing/high)
		age := time.Duration(0)
		for _, at := range []time.Duration{1, crossing / 2, crossing - time.Minute, crossing + time.Minute, 2 * crossing} {
			pgwaketest.Advance(t, p, at-age)
			age = at
			urgent(t, p, at.String(), high, crossing/high)
		}
		require.Equal(t, []string{"1ns", (crossing / 2).String(), (crossing - time.Minute).String(), "low", (crossing + time.Minute).String(), (2 * crossing).String()}, due(t, p))
	}
}

// Whoever looks, and whenever: the order is that of level*step and age together, and what is older is never behind what came later with the
// same urgency.
func TestT48_AnyAgesAndLevels_MonotoneInAge(t *testing.T) {
	const step = 5 * time.Minute
	p := pgwaketest.Open(t, &pgwake.Config{Schema: testschema.Core.Borrow(t)})
	for seed := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, 48))
		type aged struct {
			name string
			rank time.Duration // when it came, less its head start
		}
		var items []aged
		now := time.Duration(0)
		for round := range 6 {
			for range rng.IntN(10) {
				level := rng.IntN(10)
				items = append(items, aged{fmt.Sprintf("%d: level %d at %v", len(items), level, now), now - time.Duration(level)*step})
				urgent(t, p, items[len(items)-1].name, level, step)
			}
			gap := time.Duration(rng.IntN(60)) * time.Minute
			if round == 3 { // and now and then a long one
				gap *= time.Duration(1 + rng.IntN(36))
			}
			gap += time.Duration(1+round) * time.Second // no two ranks are equal but of those that came together
			pgwaketest.Advance(t, p, gap)
			now += gap
		}
		slices.SortStableFunc(items, func(a, b aged) int { return cmp.Compare(a.rank, b.rank) })
		var want []string
		for _, item := range items {
			want = append(want, item.name)
		}
		require.Equal(t, want, due(t, p), "seed %d", seed)
	}
}
