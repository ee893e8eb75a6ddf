package eventbus_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: who knows which nodes there are?

func TestNodes_RegisterBeatAndStop_IsKnownToAll(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.ID, config.DisplayName, config.Description, config.Metadata = "api server #1!", "API", "the first", map[string]string{"role": "producer"}
	n := l.node(config)
	require.Equal(t, "api-server-1-", n.ID())
	info := func() eventbus.NodeInfo {
		nodes, err := l.Nodes(l.within())
		require.NoError(t, err)
		require.Len(t, nodes, 1)
		return nodes[0]
	}
	first := info()
	require.Equal(t, []any{"api-server-1-", "default", "API", "the first"}, []any{first.ID, first.Namespace, first.DisplayName, first.Description})
	require.JSONEq(t, `{"role": "producer"}`, string(first.Metadata))
	l.eventually(func() bool { i := info(); return i.Live && i.LastHeartbeat.After(first.LastHeartbeat) }, "it beats")
	config.DisplayName, config.Metadata = "API 2", map[string]int{"version": 2}
	_, err := l.Node(l.within(), config)
	require.NoError(t, err)
	require.Equal(t, []any{"API 2", first.RegisteredAt}, []any{info().DisplayName, info().RegisteredAt}, "it is the same one")
	require.JSONEq(t, `{"version": 2}`, string(info().Metadata))
	require.NoError(t, n.Stop(l.within()))
	require.False(t, info().Live)
	require.False(t, info().StoppedAt.IsZero())
	require.NoError(t, n.Start(l.within()))
	require.True(t, info().StoppedAt.IsZero())
	l.eventually(func() bool { return info().Live }, "it beats again")
}

func TestNodes_NoHeartbeat_IsNotLive(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n, err := l.Node(l.within(), nil)
	require.NoError(t, err)
	nodes, err := l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	pgwaketest.Advance(t, l.p, 70*time.Second) // and not 89: what is done here takes its time as well
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	pgwaketest.Advance(t, l.p, 21*time.Second)
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.False(t, nodes[0].Live)
	require.True(t, one[bool](l, `SELECT touch_node_heartbeat($1)`, n.ID()))
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	require.False(t, one[bool](l, `SELECT touch_node_heartbeat('nobody')`))
}

// live reports whether the one node is.
func (l *lab) live() bool {
	l.t.Helper()
	return one[bool](l, `SELECT live FROM list_nodes()`)
}

func TestNodes_ProcessDies_IsNotLiveFromThenOn(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	bus, p := l.mortal()
	n, err := bus.Node(l.within(), nil)
	require.NoError(t, err)
	require.NoError(t, n.Start(l.within()))
	l.eventually(func() bool { return one[bool](l, `SELECT waiter IS NOT NULL FROM event_nodes`) }, "it listens")
	require.True(t, l.live())
	require.NoError(t, p.Close(l.within())) // it stops nothing: all that is known of it is that its sessions are gone
	l.eventually(func() bool { return !l.live() }, "the server has ended them, long before three heartbeats are missed")
	require.True(t, one[bool](l, `SELECT stopped_at IS NULL AND last_heartbeat > clock_timestamp() - interval '1 min' FROM list_nodes()`))
}

// The LISTEN connection alone breaks, and is not back for as long as the test likes.
func TestNodes_ConnectionIsMadeAnew_IsLiveByHeartbeatsMeanwhile(t *testing.T) {
	t.Parallel()
	var away atomic.Bool
	config, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("no way")
		}
		return dial(ctx, network, addr)
	}
	l := newLabOn(t, &pgwake.Config{ListenConfig: config, FallbackInterval: time.Hour, Logger: slog.New(slog.DiscardHandler)}, nil)
	l.node(nil)
	hears := func() bool { return one[bool](l, `SELECT waiter IS NOT NULL FROM event_nodes`) }
	l.eventually(hears, "its first attempt to listen may have failed")
	away.Store(true)
	l.exec(`SELECT pg_terminate_backend(a.pid) FROM pg_locks a, waiters w WHERE a.locktype = 'advisory' AND a.pid <> pg_backend_pid()
		AND a.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND a.objid::bigint = (w.listener::bigint & 4294967295) AND w.lane = 0`)
	l.eventually(func() bool { return !hears() }, "it says so by another connection")
	require.True(t, l.live())
	l.eventually(func() bool { return !l.p.Stats().Listening }, "the Provider knows, who may be told after the server")
	away.Store(false)
	l.eventually(func() bool {
		require.True(t, l.live())
		return hears()
	}, "it is back")
	l.eventually(func() bool { return l.p.Stats().Listening }, "the server knows of the session before it is up")
}

// torn is a connection whose end the server does not hear of, once it is cut.
type torn struct {
	net.Conn
	cut *atomic.Bool
}

func (c torn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.cut.Load() {
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func (c torn) Write(b []byte) (int, error) {
	if c.cut.Load() {
		return 0, io.ErrClosedPipe
	}
	return c.Conn.Write(b)
}

func (c torn) Close() error {
	if c.cut.Load() {
		return nil
	}
	return c.Conn.Close()
}

// To the server the session goes on that was the LISTEN connection's.
func TestNodes_ConnectionBreaks_ServerDoesNotKnow_IsLiveByHeartbeats(t *testing.T) {
	t.Parallel()
	var cut atomic.Bool
	var dialed []net.Conn
	var mu sync.Mutex
	config, err := pgx.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if cut.Load() {
			return nil, errors.New("no way")
		}
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		dialed = append(dialed, conn)
		return torn{conn, &cut}, nil
	}
	l := newLabOn(t, &pgwake.Config{ListenConfig: config, FallbackInterval: time.Hour, Logger: slog.New(slog.DiscardHandler)}, nil)
	l.node(nil)
	listens := func() bool { return one[bool](l, `SELECT waiter IS NOT NULL FROM event_nodes`) }
	l.eventually(listens, "its first attempt to listen may have failed")
	cut.Store(true)
	mu.Lock()
	defer mu.Unlock()
	for _, conn := range dialed {
		_ = conn.SetDeadline(time.Unix(1, 0))
		defer conn.Close()
	}
	l.eventually(func() bool { return !listens() }, "it goes by heartbeats")
	require.True(t, one[bool](l, `SELECT node_listens(node) FROM waiters WHERE lane = 0`), "to the server it listens")
	require.True(t, l.live())
}

// What a heartbeat needs of its own is taken away, and they come all the same.
func TestNodes_HeartbeatsByDefault_GoWithThePeriodicStatement(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &pgwake.Config{FallbackInterval: 100 * time.Millisecond}, nil)
	n := l.node(nil)
	require.NoError(t, n.On(l.within(), "a", new(seen).ids))
	l.eventually(func() bool { return one[bool](l, `SELECT patterns = '{a}' FROM event_nodes`) }, "it has heard of its own pattern")
	l.exec(`ALTER FUNCTION beat RENAME TO beat_away`)
	for range 3 {
		since := one[time.Time](l, `SELECT last_heartbeat FROM event_nodes`)
		l.eventually(func() bool { return one[time.Time](l, `SELECT last_heartbeat FROM event_nodes`).After(since) }, "it beats")
	}
	l.eventually(l.live, "which it is for 300 ms after each")
	l.exec(`ALTER FUNCTION beat_away RENAME TO beat`)
}

func TestNodes_NobodyListens_BeatByStatementsOfTheirOwn(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &pgwake.Config{Mode: pgwake.ModePolling, FallbackInterval: 100 * time.Millisecond}, nil)
	l.node(nil)
	for range 3 {
		since := one[time.Time](l, `SELECT last_heartbeat FROM event_nodes`)
		l.eventually(func() bool { return one[time.Time](l, `SELECT last_heartbeat FROM event_nodes`).After(since) }, "it beats")
	}
	l.eventually(l.live, "which it is for 300 ms after each")
	require.True(t, one[bool](l, `SELECT waiter IS NULL AND heartbeats = '100 ms' FROM event_nodes`))
}

// Two have the same id, as during a restart, and one of them stops.
func TestNodes_OneOfTwoWithTheSameIDStops_IsLiveAgainWithTheNextHeartbeat(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &pgwake.Config{FallbackInterval: 100 * time.Millisecond}, nil)
	l.node(&eventbus.NodeConfig{ID: "api"})
	old := l.nodeOn(l.another(), &eventbus.NodeConfig{ID: "api"})
	require.NoError(t, old.Stop(l.within()))
	l.eventually(l.live, "the other one says so")
}

// It was suspended for longer than nodes are remembered.
func TestNodes_OthersHaveForgottenIt_IsListedAgainWithTheNextHeartbeat(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &pgwake.Config{FallbackInterval: 100 * time.Millisecond}, nil)
	l.node(&eventbus.NodeConfig{ID: "api", DisplayName: "API", Metadata: map[string]int{"port": 80}})
	l.exec(`DELETE FROM event_nodes`)
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM list_nodes() WHERE live`) == 1 }, "it says so")
	require.Equal(t, `API 80`, one[string](l, `SELECT display_name || ' ' || (metadata ->> 'port') FROM event_nodes`))
}

func TestNode_NoID_HasOneThatNobodyHas(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ids := map[string]bool{}
	for _, wish := range []string{"", "", "---"} {
		n, err := l.Node(l.within(), &eventbus.NodeConfig{ID: wish})
		require.NoError(t, err)
		require.Regexp(t, regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`), n.ID())
		ids[n.ID()] = true
	}
	require.Len(t, ids, 3)
}

func TestQueueNames_AreAsTheDocumentHasThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	require.Equal(t, "core_events_my_app", one[string](l, `SELECT queue_name_for_namespace('my-app')`))
	require.Equal(t, "core_events_demo_dlq", one[string](l, `SELECT dead_letter_queue_name_for_namespace('demo')`))
}

// A beat whose caller has given up may be carried out long after. What the node has said before it was stopped is no news then.
func TestNodes_StopsWhileABeatIsUnderWay_StaysStopped(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	const beat = `SELECT beat('n', 'default', 'g', NULL, '1 hour')`
	l.exec(`SELECT register_node('n')`)
	for _, what := range []string{"it is stopped", "it was stopped, begins, and is stopped before it has"} {
		stopping := l.holding(`SELECT stop_node('n')`)
		beating := l.run(beat)
		require.True(t, beating.waits(), what)
		require.NoError(t, stopping.Commit(l.within()))
		beating.end(t)
		require.False(t, l.live(), what)
	}
	require.False(t, one[bool](l, `SELECT stop_node('n')`), "it is already")

	beating := l.holding(beat)
	stopping := l.run(`SELECT stop_node('n')`)
	require.True(t, stopping.waits())
	require.NoError(t, beating.Commit(l.within()))
	stopping.end(t)
	require.False(t, l.live(), "it was stopped after it had begun")

	l.exec(beat)
	require.True(t, l.live(), "a beat that begins later is one of a node that has begun anew")
	require.True(t, one[bool](l, `SELECT stop_node('n')`))
	require.False(t, one[bool](l, `SELECT stop_node('nobody')`))
}
