package dispatch_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testdb"
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

	mu    sync.Mutex
	paths map[string][]pgwake.Path // of what was handled, by namespace
}

func newModal(t *testing.T, config pgwake.Config) *modal {
	config.Schema = testdb.Schema(t)
	m := &modal{Provider: pgwaketest.New(t, &config), schema: config.Schema, paths: make(map[string][]pgwake.Path)}
	m.c = dispatch.NewCoordinators(m, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, RetireAfter: time.Millisecond,
		Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
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
	require.Eventually(t, func() bool { s := m.Stats().Worker; return s.Parked == namespaces && s.Settled }, patience, time.Millisecond)
}

func (m *modal) awaits(t *testing.T, namespace string, paths ...pgwake.Path) {
	t.Helper()
	require.Eventually(t, func() bool { return len(m.handled(namespace)) >= len(paths) }, patience, time.Millisecond)
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

func TestT38_ListenBackendIsTerminated_ItListensAgain_AndAllIsDone(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	const items = 20
	pids := m.listeners(t)
	require.Len(t, pids, 1)
	m.exec(t, `SELECT pg_terminate_backend($1)`, pids[0])
	require.Eventually(t, func() bool { return !m.Health().OK || m.Stats().Reconnects > 0 }, patience, time.Millisecond, "it is said")
	for range items {
		m.enqueue(t, "default", true)
	}
	require.Eventually(t, func() bool { return len(m.handled("default")) == items && m.Health().OK }, patience, time.Millisecond)
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
			require.Eventually(t, func() bool { return m.Stats().Fallbacks >= before+3 }, patience, time.Millisecond)
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
	require.Eventually(t, func() bool { return m.Stats().Worker.Parked == 1 }, patience, time.Millisecond)
	require.Empty(t, m.listeners(t))
	began := time.Now()
	m.enqueue(t, "default", true)
	m.awaits(t, "default", pgwake.PathPolling)
	require.Less(t, time.Since(began), 10*time.Second)
	require.Zero(t, m.Stats().Worker.Notifications)
}

func TestT41_HybridByNamespace_EachByItsPath(t *testing.T) {
	m := newModal(t, pgwake.Config{Modes: map[string]pgwake.Mode{"polled": pgwake.ModePolling}, PollInterval: 10 * time.Millisecond})
	running(t, m.c)
	require.NoError(t, m.c.Spawn("heard"))
	require.NoError(t, m.c.Spawn("polled"))
	require.Eventually(t, func() bool { return m.Stats().Worker.Parked == 3 }, patience, time.Millisecond)
	m.enqueue(t, "heard", true)
	m.enqueue(t, "polled", true)
	m.awaits(t, "heard", pgwake.PathEvent)
	m.awaits(t, "polled", pgwake.PathPolling)
	require.Equal(t, map[pgwake.Path]int64{pgwake.PathEvent: 1, pgwake.PathPolling: 1, pgwake.PathFetch: 0}, m.Stats().Worker.ItemsBy)
}

func TestT43_Shadow_HearsAndClaimsNothing(t *testing.T) {
	m := newModal(t, pgwake.Config{Mode: pgwake.ModeShadow})
	running(t, m.c)
	require.Eventually(t, func() bool { return m.Stats().Listening }, patience, time.Millisecond)
	m.enqueue(t, "default", true)
	require.Eventually(t, func() bool { return m.Stats().Worker.Notifications > 0 }, patience, time.Millisecond)
	require.Zero(t, m.Stats().Worker.Items)
	require.NoError(t, m.SetModes(pgwake.ModeHybrid, nil))
	require.Eventually(t, func() bool { return len(m.handled("default")) == 1 }, patience, time.Millisecond)
}

// What is said a hundred times over is looked into as often as there are dispatchers, and done once.
func TestT44_NotifiedAHundredTimes_HandledOnce(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	m.enqueue(t, "default", true)
	for range 100 {
		m.exec(t, `SELECT notify_queue('worker', 1, NULL), notify_queue('worker', 1, NULL, 'default')`)
	}
	require.Eventually(t, func() bool { return m.Stats().Worker.Notifications >= 200 }, patience, time.Millisecond)
	m.waits(t, 1)
	require.Len(t, m.handled("default"), 1)
	require.EqualValues(t, 1, m.Stats().Worker.Items)
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
	require.Eventually(t, func() bool { return m.Stats().Worker.Notifications > before.Notifications }, patience, time.Millisecond)
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
	require.Eventually(t, func() bool { return len(m.handled(long[:40])) == 1 }, patience, time.Millisecond)
}

func TestT47_MalformedPayloads_AreCounted_AndTheListenerLives(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	for _, payload := range []string{"", "{}", "1 0 Not-A-Name 0", "1 0 default", strings.Repeat("x", 7000)} {
		m.exec(t, `SELECT pg_notify(channel('worker'), $1)`, payload)
	}
	m.exec(t, `SELECT notify_queue('worker', 1, NULL, 'nobody-has-it')`)
	require.Eventually(t, func() bool { return m.Stats().Worker.Unreadable == 5 }, patience, time.Millisecond)
	m.waits(t, 1)
	m.enqueue(t, "default", true)
	m.awaits(t, "default", pgwake.PathEvent)
	require.Zero(t, m.Stats().Reconnects)
	require.Zero(t, m.Stats().Panics)
}
