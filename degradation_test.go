//go:build unix

package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: what happens while the world misbehaves? Work keeps flowing wherever the database
// answers at all, push comes back by itself, and Close returns within its context.

const (
	// back is how soon after the server push must be there again.
	back = 5 * time.Second

	// quickFallback bounds how long a fault that gives no sign goes unnoticed: this, its jitter, and 5 s.
	quickFallback = 300 * time.Millisecond
	unnoticed     = quickFallback + time.Second + 5*time.Second
)

// breakable is a server that the tests of this file share and break, each in a way that leaves the others
// alone.
var breakable = sync.OnceValues(func() (*devpg.Server, error) {
	return devpg.Start(context.Background(), &devpg.Options{IgnoreURL: true})
})

// bootOne boots a server for a test that takes it down.
func bootOne(t *testing.T) *devpg.Server {
	t.Helper()
	return boot(t, &devpg.Options{IgnoreURL: true})
}

func boot(t *testing.T, o *devpg.Options) *devpg.Server {
	t.Helper()
	s, err := devpg.Start(t.Context(), o)
	if errors.Is(err, devpg.ErrNoServer) {
		t.Skipf("breaks a server, and none can be booted here: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop(context.Background())) })
	return s
}

func breakableServer(t *testing.T) *devpg.Server {
	t.Helper()
	s, err := breakable()
	if errors.Is(err, devpg.ErrNoServer) {
		t.Skipf("breaks a server, and none can be booted here: %v", err)
	}
	require.NoError(t, err)
	return s
}

// breakableLink is a network to that server.
func breakableLink(t *testing.T) (server string, l *link) {
	t.Helper()
	server = breakableServer(t).URL
	config, err := pgx.ParseConfig(server)
	require.NoError(t, err)
	return server, newLink(t, config)
}

// patientNode is a node in trouble, with two dispatchers of work items that take no error for an answer, and
// a producer who knows nothing of the library.
type patientNode struct {
	*pgwake.Provider
	schema string
	pool   *pgxpool.Pool // the node's
	direct *pgxpool.Pool // around whatever is broken

	mu      sync.Mutex
	handled map[string]int
	news    chan struct{}
	quit    func()
}

func listenName(schema string) string { return schema + " listen" }

var nodesInTrouble atomic.Int64

// trouble opens a node on server. change may send its connections elsewhere; listen is the configuration of
// the LISTEN connection.
func trouble(t *testing.T, server string, c pgwake.Config, change func(pool *pgxpool.Config, listen *pgx.ConnConfig)) *patientNode {
	t.Helper()
	n := &patientNode{handled: make(map[string]int), news: make(chan struct{}, 1)}
	n.schema = fmt.Sprintf("trouble_%d", nodesInTrouble.Add(1))
	var err error
	n.direct, err = pgxpool.New(t.Context(), server)
	require.NoError(t, err)
	t.Cleanup(n.direct.Close)

	config, err := pgxpool.ParseConfig(server)
	require.NoError(t, err)
	config.MaxConns = 4
	listen := config.ConnConfig.Copy()
	listen.RuntimeParams["application_name"] = listenName(n.schema)
	if change != nil {
		change(config, listen)
	}
	// The node has been here before: what is broken does not keep it from migrating.
	require.NoError(t, migrations.Up(t.Context(), n.direct.Config().ConnConfig, n.schema))
	n.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(n.pool.Close)
	c.Schema, c.ListenConfig = n.schema, listen
	c.AggressiveDuration = 200 * time.Millisecond
	c.NotifyDeliveryTimeout = patience // that this process stands still is no trouble here
	if c.FallbackInterval == 0 {
		c.FallbackInterval = time.Minute // so that nothing of this is found by it
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	n.Provider, err = pgwake.New(t.Context(), n.pool, &c)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	var dispatchers sync.WaitGroup
	n.quit = sync.OnceFunc(func() { cancel(); dispatchers.Wait() })
	t.Cleanup(func() {
		n.quit()
		closing, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, n.Close(closing))
	})
	for range 2 {
		dispatchers.Go(func() { n.dispatch(t, ctx) })
	}
	return n
}

// dispatch handles items until ctx ends or the Provider closes. Whatever happens meanwhile, another attempt is worth it.
func (n *patientNode) dispatch(t *testing.T, ctx context.Context) {
	for ctx.Err() == nil {
		item, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Second, PollTimeout: time.Minute})
		switch {
		case errors.Is(err, pgwake.ErrClosed):
			return
		case err == nil:
			n.mu.Lock()
			n.handled[item.Name]++
			n.mu.Unlock()
			select {
			case n.news <- struct{}{}:
			default:
			}
			// It comes again if this fails, unless the server had committed it and could not say so any more.
			acking, cancel := context.WithTimeout(ctx, back)
			_ = n.AckWorkItem(acking, item.LockToken, nil)
			cancel()
		case !errors.Is(err, pgwake.ErrNoWork):
			if failed := (*pgwake.Error)(nil); ctx.Err() == nil && (!errors.As(err, &failed) || !failed.Retryable || errors.Is(err, context.Canceled)) {
				t.Errorf("a dispatcher would give up, or believe that it was asked to: %v", err)
			}
			pause := time.NewTimer(10 * time.Millisecond) // as a dispatcher would
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
		}
	}
}

func (n *patientNode) has(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.handled[name] > 0
}

// produce enqueues by plain SQL.
func (n *patientNode) produce(t tester, name string) {
	t.Helper()
	_, err := n.direct.Exec(context.Background(), `SELECT `+pgx.Identifier{n.schema}.Sanitize()+`.enqueue_work($1)`, name)
	require.NoError(t, err)
}

func (n *patientNode) await(t tester, name string, within time.Duration) {
	t.Helper()
	deadline := time.After(within)
	for !n.has(name) {
		select {
		case <-n.news:
		case <-deadline:
			var rows []string
			_ = n.direct.QueryRow(context.Background(), `SELECT array_agg(to_jsonb(q)::text) FROM `+
				pgx.Identifier{n.schema}.Sanitize()+`.worker_queue q WHERE name = $1`, name).Scan(&rows)
			require.Failf(t, "not delivered", "%s within %v; queued: %v; health: %v; %+v", name, within, rows, n.Health().Problems, n.Stats())
		}
	}
}

// flows asserts that an item of somebody else is delivered.
func (n *patientNode) flows(t tester, within time.Duration) {
	t.Helper()
	name := "flow " + strconv.FormatUint(rand.Uint64(), 36)
	n.produce(t, name)
	n.await(t, name, within)
}

// pushed waits until the node listens, and asserts that a notification then brings an item.
func (n *patientNode) pushed(t tester, within time.Duration) {
	t.Helper()
	require.Eventually(t, func() bool { return n.Stats().Listening }, within, time.Millisecond, "push is not back: %v", n.Health().Problems)
	before := n.Stats().Worker.Finds["notify"]
	for range 5 { // a fallback of 300 ms, or the end of a lease, may come at the same moment
		// Whoever is on his way back from the item before would find the next by himself.
		require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 && !n.Stats().Worker.Aggressive }, patience, 10*time.Millisecond)
		if n.flows(t, patience); n.Stats().Worker.Finds["notify"] > before {
			break
		}
	}
	require.Greater(t, n.Stats().Worker.Finds["notify"], before, "found, and not by push: %v", n.Stats().Worker.Finds)
	require.True(t, n.Health().OK, n.Health().Problems)
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 }, patience, time.Millisecond, "the last ack")
}

// listener returns the process of the LISTEN connection's backend.
func (n *patientNode) listener(t tester) (pid int) {
	t.Helper()
	require.NoError(t, n.direct.QueryRow(context.Background(),
		`SELECT pid FROM pg_stat_activity WHERE application_name = $1`, listenName(n.schema)).Scan(&pid))
	return pid
}

func signal(t tester, pid int, s syscall.Signal) {
	t.Helper()
	require.NoError(t, syscall.Kill(pid, s))
}

// The backend of the LISTEN connection hangs: TCP answers, and nothing comes.
func TestDegradation_ListenBackendStops_WorkFlowsAndPushReturns(t *testing.T) {
	t.Parallel()
	n := trouble(t, breakableServer(t).URL, pgwake.Config{FallbackInterval: quickFallback}, nil)
	n.pushed(t, patience)
	pid := n.listener(t)
	signal(t, pid, syscall.SIGSTOP)
	t.Cleanup(func() { signal(t, pid, syscall.SIGCONT) })

	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "own"}, nil)
	require.NoError(t, err)
	n.await(t, "own", patience/4)

	n.flows(t, unnoticed+patience/4) // the bound of a fault that gives no sign
	require.Eventually(t, func() bool { return n.Stats().Reconnects > 0 }, unnoticed+back, 10*time.Millisecond)
	n.pushed(t, back)
}

// The bytes of the LISTEN connection vanish, in both directions.
func TestDegradation_ListenBytesVanish_WorkFlowsAndPushReturns(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{FallbackInterval: quickFallback}, func(_ *pgxpool.Config, listen *pgx.ConnConfig) { link.use(listen) })
	n.pushed(t, patience)
	lost := link.made.Load()
	link.mode.Store(swallow)
	require.Eventually(t, func() bool { return !n.Stats().Listening }, unnoticed+patience/4, 10*time.Millisecond)
	require.NotEmpty(t, n.Health().Problems)
	// To the server it seems to live for as long as it keeps the connection that it has given up, as the driver does.
	require.Eventually(t, func() bool { _, closed := link.closed.Load(lost); return closed }, back, 10*time.Millisecond)
	n.flows(t, back)
	n.flows(t, back)
	link.mode.Store(carry)
	n.pushed(t, 5*time.Second+back) // an attempt that began before may have to give up first
}

// All that the node has vanishes at once. When it has noticed that LISTEN is silent, nobody has to find out for himself, by another deadline,
// that the connections of the pool are so too.
func TestDegradation_AllConnectionsVanish_OneDeadlineFindsOut(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{FallbackInterval: quickFallback}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		link.use(pool.ConnConfig)
		link.use(listen)
	})
	t.Cleanup(link.cut) // before the pool ends
	n.pushed(t, patience)
	n.rest(t)

	link.forget()
	n.produce(t, "unheard")
	require.Eventually(t, func() bool { return !n.Stats().Listening }, unnoticed+back, 10*time.Millisecond)
	n.await(t, "unheard", back/2)
	n.pushed(t, back)
}

// The pool vanishes, and LISTEN ends in a way that everybody sees. What the engine then asks of the pool by itself finds out about it once, and
// the new connection proves itself without it.
func TestDegradation_PoolVanishesAndListenIsKilled_OneDeadlineFindsOut(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	var attempts atomic.Int64
	c := pgwake.Config{}
	pgwake.InjectFault(&c, func(point string) {
		if point == "connect" {
			attempts.Add(1)
		}
	})
	n := trouble(t, server, c, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
		link.use(pool.ConnConfig)
		pool.MaxConns = 16
	})
	t.Cleanup(link.cut) // before the pool ends
	n.pushed(t, patience)
	n.rest(t)

	link.forget()
	pid, before := n.listener(t), n.Stats().Reconnects
	attempts.Store(0)
	_, err := n.direct.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, pid)
	require.NoError(t, err)
	n.produce(t, "unheard")
	require.Eventually(t, func() bool { s := n.Stats(); return s.Listening && s.Reconnects > before }, patience, 10*time.Millisecond)
	require.EqualValues(t, 1, attempts.Load())
	n.await(t, "unheard", 5*time.Second+back)
	n.pushed(t, back)
}

// A request on a connection of the pool vanishes, while LISTEN is well: the fetch's own, or that of a pool which
// tries its connections before use and gives that no limit.
func TestDegradation_PoolBytesVanish_WorkFlowsOnAnotherConnection(t *testing.T) {
	t.Parallel()
	for name, tries := range map[string]bool{"fetch": false, "ping": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, link := breakableLink(t)
			n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
				link.use(pool.ConnConfig)
				pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return tries }
			})
			n.pushed(t, patience)
			link.mode.Store(swallow)
			n.produce(t, "unanswered")
			require.Eventually(t, func() bool { return link.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
			link.mode.Store(carry)
			n.await(t, "unanswered", 5*time.Second+back)
			require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 }, 5*time.Second+back, time.Millisecond, "a fetch hangs")
		})
	}
}

// What the engine itself asks draws a connection that has lost its peer, from a pool which tries its connections before use and gives that
// no limit.
func TestDegradation_PoolVanishesUnderTheEngine_ItAsksAgainOnAnotherConnection(t *testing.T) {
	t.Parallel()
	open := func(t *testing.T, c pgwake.Config) (*patientNode, *link) {
		server, l := breakableLink(t)
		n := trouble(t, server, c, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
			l.use(pool.ConnConfig)
			pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
		})
		t.Cleanup(l.cut) // before the pool ends
		n.pushed(t, patience)
		release := n.exhaust(t) // so that all are there
		release()
		require.Eventually(t, func() bool { return pgwake.WorkSettled(n.Provider, "new") }, patience, 10*time.Millisecond)
		return n, l
	}

	t.Run("a lane settles", func(t *testing.T) {
		t.Parallel()
		var vanish atomic.Pointer[func()]
		c := pgwake.Config{}
		pgwake.InjectFault(&c, func(point string) {
			if do := vanish.Load(); do != nil && point == "settler" && vanish.CompareAndSwap(do, nil) {
				(*do)()
			}
		})
		n, l := open(t, c)
		vanish.Store(new(l.forget))
		ctx, cancel := context.WithCancel(t.Context())
		var fetch sync.WaitGroup
		fetch.Go(func() {
			for ctx.Err() == nil { // it may draw one as well
				_, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"new"}, PollTimeout: time.Minute})
				assert.Error(t, err)
			}
		})
		defer fetch.Wait()
		defer cancel()
		require.Eventually(t, func() bool { return l.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
		require.Eventually(t, func() bool { return pgwake.WorkSettled(n.Provider, "new") }, patience, time.Millisecond, "it is still looked for")
	})
	t.Run("rows of a node that has died go", func(t *testing.T) {
		t.Parallel()
		n, l := open(t, pgwake.Config{FallbackInterval: quickFallback})
		l.forget()
		waiters := pgx.Identifier{n.schema, "waiters"}.Sanitize()
		_, err := n.direct.Exec(t.Context(), `INSERT INTO `+waiters+` (node, lane, listener, queue, armed, number, namespace, fanout, places)
			VALUES (-1, 1, -1, 'worker', true, 1, '*', 1, 1)`)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return l.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
		require.Eventually(t, func() bool {
			var left bool
			err := n.direct.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM `+waiters+` WHERE node = -1)`).Scan(&left)
			return assert.NoError(t, err) && !left
		}, patience, 10*time.Millisecond, "producers choose it still")
	})
}

// Connections lose their peer under enqueues, and some of their callers wait for as long as it takes. Connections that are made anew work: for
// those callers, too, if nothing but an attempt was sent on those that were lost.
func TestDegradation_EnqueuesVanishAndTheirCallersWait_OthersAreMade(t *testing.T) {
	t.Parallel()
	for name, tries := range map[string]bool{"statement": false, "ping": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const singles, groups = 4, 4
			server, link := breakableLink(t)
			n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
				link.use(pool.ConnConfig)
				pool.MaxConns = singles + groups + 4
				pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return tries }
			})
			t.Cleanup(link.cut) // before the pool ends
			n.pushed(t, patience)
			n.rest(t) // a look at the end of a lease would take a connection, and be taken for a caller

			link.forget()
			ctx, cancel := context.WithCancel(t.Context())
			var stuck sync.WaitGroup
			defer stuck.Wait()
			defer cancel()
			for i := range singles + groups {
				stuck.Go(func() {
					_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: fmt.Sprint("stuck ", i)}, nil)
					if !tries || err != nil {
						assert.ErrorIs(t, err, context.Canceled)
					}
				})
				require.Eventually(t, func() bool { // each of the last ones is a group
					return n.pool.Stat().AcquiredConns() == int32(i+1)
				}, patience, 10*time.Millisecond)
			}
			n.pool.Reset() // as somebody does who has met the silence
			for _, name := range []string{"one", "and another"} {
				_, err := n.EnqueueForWorker(within(t, patience), pgwake.WorkItem{Name: name}, nil)
				require.NoError(t, err)
				n.await(t, name, patience)
			}
			if tries { // they have got another connection, since nothing was sent on those that were tried
				for i := range singles + groups {
					n.await(t, fmt.Sprint("stuck ", i), 5*time.Second+back)
				}
				return
			}
			require.Eventually(t, func() bool { return n.pool.Stat().AcquiredConns() == singles+groups }, patience, time.Millisecond, "those wait still")
		})
	}
}

// Nothing is carried while each connection of the pool is in use, or tried before use, and neither is what the driver sends to cancel that. Then
// all is well, and so is the pool.
func TestDegradation_WholePoolIsInUseInABlackHole_VerbsGoOnAfterIt(t *testing.T) {
	t.Parallel()
	verb := func(n *patientNode, ctx context.Context) error {
		_, err := n.GetParent(ctx, "nobody")
		return err
	}
	for name, c := range map[string]struct {
		tries bool
		use   func(*patientNode, context.Context) error
	}{
		"statement": {false, verb},
		"ping":      {true, verb},
		"transaction": {false, func(n *patientNode, ctx context.Context) error {
			return pgx.BeginTxFunc(ctx, conns.Transactions{Pool: n.pool}, pgx.TxOptions{}, func(pgx.Tx) error { return nil })
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, link := breakableLink(t)
			n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
				link.use(pool.ConnConfig)
				pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return c.tries }
				pgwake.TunePool(pool)
			})
			t.Cleanup(link.cut) // before the pool ends
			n.pushed(t, patience)
			n.rest(t)
			before := link.made.Load()
			link.mode.Store(swallow)
			lost := within(t, time.Second)
			var uses sync.WaitGroup
			for range n.pool.Config().MaxConns {
				uses.Go(func() { assert.ErrorIs(t, c.use(n, lost), context.DeadlineExceeded) })
			}
			uses.Wait()
			for i := range int64(n.pool.Config().MaxConns) {
				require.Eventually(t, func() bool { _, is := link.silenced.Load(before + 1 + i); return is }, patience, time.Millisecond, "it is cancelled")
			}
			link.mode.Store(carry)
			_, err := n.EnqueueForWorker(within(t, back), pgwake.WorkItem{Name: "after"}, nil)
			require.NoError(t, err)
			n.await(t, "after", patience)
		})
	}
}

// A connection takes longer to be made than a fetch waits for it. The fetch gives up, and the next has that connection.
func TestDegradation_ConnectingTakesLong_WorkFlows(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	var slow atomic.Bool
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
		dial := pool.ConnConfig.DialFunc
		pool.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if slow.Load() {
				select {
				case <-ctx.Done():
				case <-t.Context().Done():
				case <-time.After(5500 * time.Millisecond): // a fetch waits for 5 s
				}
			}
			return dial(ctx, network, address)
		}
		pool.ConnConfig.ConnectTimeout = patience
		pgwake.TunePool(pool)
	})
	n.pushed(t, patience)
	slow.Store(true)
	n.pool.Reset()
	n.produce(t, "patience")
	n.await(t, "patience", patience)
}

// The connection on which the node waits for the end of a transaction that may have added something in silence vanishes, and the transaction
// ends. LISTEN goes the same way, and comes back.
func TestDegradation_LongWaitForAProducerVanishes_SettlesAllTheSame(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{FallbackInterval: quickFallback}, func(_ *pgxpool.Config, listen *pgx.ConnConfig) { link.use(listen) })
	t.Cleanup(link.cut) // before the driver has waited for its peer
	n.pushed(t, patience)
	n.quit()
	tx, err := n.direct.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "open"}, &pgwake.EnqueueOptions{Namespace: "other"})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var fetching sync.WaitGroup
	defer fetching.Wait()
	defer cancel()
	fetching.Go(func() {
		for ctx.Err() == nil {
			_, _ = n.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"new"}, PollTimeout: time.Minute})
		}
	})
	require.Eventually(t, func() bool { return !n.Health().OK }, patience, time.Millisecond, "it waits for long")
	require.False(t, n.Stats().Worker.Settled)
	link.forget()
	require.NoError(t, tx.Commit(t.Context()))
	require.Eventually(t, func() bool { s := n.Stats(); return s.Listening && s.Worker.Settled && s.Worker.Parked == 1 }, patience, 10*time.Millisecond)
}

// Nothing answers any more. Whoever begins to watch nodes then is told so.
func TestDegradation_NothingAnswers_WatchingNodesFails(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{}, func(_ *pgxpool.Config, listen *pgx.ConnConfig) { link.use(listen) })
	t.Cleanup(link.cut) // before the driver has waited for its peer
	n.pushed(t, patience)
	link.mode.Store(swallow)
	var ended sync.WaitGroup
	over := make(chan struct{})
	ended.Go(func() {
		for _, err := range n.Observe(t.Context()) {
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		}
	})
	ended.Go(func() {
		for _, err := range n.NodeReports(t.Context(), time.Second) {
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		}
	})
	go func() { ended.Wait(); close(over) }()
	select {
	case <-over:
	case <-time.After(patience):
		require.Fail(t, "somebody waits still")
	}
}

// Nothing answers any more. A caller without a deadline is told so when the pool says that it cannot connect.
func TestDegradation_NothingAnswers_VerbWithoutADeadlineFails(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
		link.use(pool.ConnConfig)
		pool.ConnConfig.ConnectTimeout = 6 * time.Second // longer than what is tried may take
		pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
	})
	t.Cleanup(link.cut) // before the pool ends
	n.pushed(t, patience)
	link.mode.Store(swallow)
	ended := make(chan error, 1)
	go func() {
		_, err := n.GetParent(context.Background(), "nobody")
		ended <- err
	}()
	select {
	case err := <-ended:
		var failed *pgwake.Error
		require.ErrorAs(t, err, &failed)
		require.True(t, failed.Retryable)
	case <-time.After(patience):
		require.Fail(t, "it waits still")
	}
	link.mode.Store(carry)
	n.flows(t, patience)
}

// All connections of the pool lose their peer while statements are under way on them. Those made anew work, once the
// pool has places for them.
func TestDegradation_WholePoolVanishes_VerbsGoOnAfterTheirDeadlines(t *testing.T) {
	t.Parallel()
	server, link := breakableLink(t)
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) {
		link.use(pool.ConnConfig)
		pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	})
	n.pushed(t, patience)
	release := n.exhaust(t) // so that all are there
	release()

	link.forget()
	lost := within(t, time.Second)
	var verbs sync.WaitGroup
	for range n.pool.Config().MaxConns {
		verbs.Go(func() {
			_, err := n.GetParent(lost, "nobody")
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	verbs.Wait()
	_, err := n.EnqueueForWorker(within(t, back), pgwake.WorkItem{Name: "after"}, nil)
	require.NoError(t, err)
	n.await(t, "after", patience)
}

func TestDegradation_ServerIsDownForHalfAMinute_NothingIsLostAndPushReturns(t *testing.T) {
	t.Parallel()
	server := bootOne(t)
	n := trouble(t, server.URL, pgwake.Config{}, nil)
	n.pushed(t, patience)
	n.produce(t, "before")
	require.NoError(t, server.Halt(t.Context(), devpg.Fast))
	require.Eventually(t, func() bool { return !n.Stats().Listening }, patience, 10*time.Millisecond)
	require.False(t, n.Health().OK)
	outage := time.NewTimer(30 * time.Second)
	defer outage.Stop()
	select {
	case <-outage.C:
	case <-t.Context().Done():
	}
	require.NoError(t, server.Resume(t.Context()))
	n.pushed(t, back)
	n.await(t, "before", patience)
}

// The server lets the connection in and refuses LISTEN.
func TestDegradation_ListenRefused_PollsAndPushComes(t *testing.T) {
	t.Parallel()
	var refuse atomic.Bool
	refuse.Store(true)
	var log logbook
	n := trouble(t, breakableServer(t).URL, pgwake.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(_ *pgxpool.Config, listen *pgx.ConnConfig) {
		listen.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
			if refuse.Load() { // in a transaction that has failed, the server refuses everything
				_, _ = conn.Exec(ctx, "BEGIN; SELECT 1/0").ReadAll()
			}
			return nil
		}
	})
	require.False(t, n.Stats().Listening)
	require.Contains(t, fmt.Sprint(n.Health().Problems), "polling every 100ms")
	for range 3 {
		// Whoever is on his way back from the item before would find the next by himself.
		require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 }, patience, 10*time.Millisecond)
		n.flows(t, back)
	}
	require.Positive(t, n.Stats().Worker.Finds["scout"])
	require.Equal(t, 1, log.count("not listening"), "an operator is told once:\n%s", &log)
	refuse.Store(false)
	n.pushed(t, back)
	require.Equal(t, 1, log.count("listening again"))
}

// Without the scout, the fallback still asks while there is no LISTEN connection.
func TestDegradation_ListenRefusedAndPollingForbidden_FallbackFindsTheWork(t *testing.T) {
	t.Parallel()
	n := trouble(t, breakableServer(t).URL, pgwake.Config{AggressivePolicy: pgwake.Never, FallbackInterval: quickFallback},
		func(_ *pgxpool.Config, listen *pgx.ConnConfig) { listen.Port, listen.Fallbacks = 1, nil })
	require.Contains(t, fmt.Sprint(n.Health().Problems), "asking every 300ms")
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 2 }, patience, 10*time.Millisecond)
	n.flows(t, patience)
	require.Positive(t, n.Stats().Worker.Finds["fallback"])
	require.Zero(t, n.Stats().Worker.Finds["scout"])
}

// Somebody has listened, and not read since for an old transaction, so that the server keeps all notifications until it can keep no more.
func TestDegradation_NotificationsFull_VerbsSucceedOnceTheyAreRead(t *testing.T) {
	t.Parallel()
	n := trouble(t, serverOfFewNotifications(t), pgwake.Config{}, nil)
	n.pushed(t, patience)
	readOn := n.fillNotifications(t)
	enqueue := func() error {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "there"}, &pgwake.EnqueueOptions{Namespace: "new"}) // which nodes are told of
		return err
	}
	var typed *pgwake.Error
	require.ErrorAs(t, enqueue(), &typed)
	require.Equal(t, "54000", typed.SQLState)
	require.True(t, typed.Retryable)
	require.NotErrorIs(t, typed, pgwake.ErrInvalid)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "here"}, nil)
	require.NoError(t, err)
	n.await(t, "here", back)

	readOn()
	require.Eventually(t, func() bool { return enqueue() == nil }, back, 10*time.Millisecond)
	n.pushed(t, back)
}

// A claim cannot tell the others when its lease ends. It does so later, or nobody would look for what its node leaves behind.
func TestDegradation_NotificationsFull_ClaimsAndOthersHearOfTheLeaseOnceTheyAreRead(t *testing.T) {
	t.Parallel()
	n := trouble(t, serverOfFewNotifications(t), pgwake.Config{}, nil)
	other := n.another(t)
	turns := make(chan *pgwake.OrchestrationItem, 1)
	go func() {
		turn, err := other.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{PollTimeout: time.Minute})
		assert.NoError(t, err)
		turns <- turn
	}()
	require.Eventually(t, func() bool { return other.Stats().Orchestrator.Parked == 1 && other.Stats().Orchestrator.Settled }, patience, 10*time.Millisecond)
	readOn := n.fillNotifications(t)
	n.slipIn(t, "left")
	turn, err := n.FetchOrchestrationItem(within(t, back), &pgwake.FetchOptions{LockTimeout: 5 * time.Second, PollTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	require.Equal(t, "left", turn.Instance)
	readOn()
	again := <-turns
	require.Equal(t, "left", again.Instance)
	require.Equal(t, int64(1), other.Stats().Orchestrator.Finds["timer"])
}

// What was to be told then, and was not, is nothing that a later claim may count on.
func TestDegradation_NotificationsFull_NoClaimCountsOnWhatWasNotTold(t *testing.T) {
	t.Parallel()
	n := trouble(t, serverOfFewNotifications(t), pgwake.Config{}, nil)
	other := n.another(t)
	waiting, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		_, err := other.FetchOrchestrationItem(waiting, &pgwake.FetchOptions{PollTimeout: time.Minute})
		assert.ErrorIs(t, err, context.Canceled)
	}()
	require.Eventually(t, func() bool { return other.Stats().Orchestrator.Parked == 1 && other.Stats().Orchestrator.Settled }, patience, 10*time.Millisecond)
	claimed := func(instance string, lease time.Duration) *pgwake.OrchestrationItem {
		n.slipIn(t, instance)
		turn, err := n.FetchOrchestrationItem(within(t, back), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 50 * time.Millisecond})
		require.NoError(t, err)
		require.Equal(t, instance, turn.Instance)
		return turn
	}
	readOn := n.fillNotifications(t)
	began := time.Now()
	for _, lease := range []time.Duration{2 * time.Second, 6 * time.Second} { // of which the nearer end is told
		turn := claimed(lease.String(), lease)
		require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{ExecutionID: turn.ExecutionID}))
	}
	readOn()
	require.Eventually(t, func() bool {
		return other.Stats().Orchestrator.Tokens["timer"] > 0 && other.Stats().Orchestrator.Parked == 1
	}, back, 10*time.Millisecond)
	told := other.Stats().Orchestrator.Notifications
	claimed("third", max(6*time.Second-time.Since(began), 0)+time.Second) // the end of the second lease is in the half of this one in which others look
	require.Eventually(t, func() bool { return other.Stats().Orchestrator.Notifications > told }, patience, 10*time.Millisecond)
	leave()
	<-left
}

// Nobody uses a verb: it is the periodic statement that has the server go on.
func TestDegradation_NotificationsFull_ProducersOfPlainSQLSucceedOnceTheyAreRead(t *testing.T) {
	t.Parallel()
	n := trouble(t, serverOfFewNotifications(t), pgwake.Config{FallbackInterval: quickFallback}, nil)
	n.pushed(t, patience)
	readOn := n.fillNotifications(t)
	enqueue := func() error {
		_, err := n.direct.Exec(t.Context(), `SELECT `+pgx.Identifier{n.schema}.Sanitize()+`.enqueue_work('there')`)
		return err
	}
	require.ErrorContains(t, enqueue(), "54000")
	readOn()
	require.Eventually(t, func() bool { return enqueue() == nil }, back, 10*time.Millisecond)
	n.await(t, "there", back)
	n.pushed(t, back)
}

// serverOfFewNotifications boots a server that keeps half a megabyte of notifications.
func serverOfFewNotifications(t *testing.T) (url string) {
	t.Helper()
	if version := breakableServer(t).Version; version < "17" {
		t.Skipf("before version 17 a server keeps 8 GB of notifications, and this one is %s", version)
	}
	return boot(t, &devpg.Options{IgnoreURL: true, Settings: map[string]string{"max_notify_queue_pages": "64"}}).URL
}

// another is a node beside this one.
func (n *patientNode) another(t *testing.T) *pgwake.Provider {
	t.Helper()
	other, err := pgwake.New(t.Context(), n.direct, &pgwake.Config{Schema: n.schema, FallbackInterval: time.Minute, AggressivePolicy: pgwake.Never})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, other.Close(context.Background())) })
	return other
}

// slipIn enqueues a message of which nobody is told.
func (n *patientNode) slipIn(t *testing.T, instance string) {
	t.Helper()
	_, err := n.direct.Exec(t.Context(), `BEGIN; SET LOCAL pgwake.notify = off;
		SELECT `+pgx.Identifier{n.schema}.Sanitize()+`.enqueue_message('`+instance+`', 'start', p_name => 'n'); COMMIT`)
	require.NoError(t, err)
}

// fillNotifications has the server keep notifications until it can keep no more, not even an empty one, for somebody who listens and does not
// read, until readOn is called.
func (n *patientNode) fillNotifications(t *testing.T) (readOn func()) {
	t.Helper()
	conn, err := n.direct.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	for _, sql := range []string{"LISTEN anything", "BEGIN", "SELECT"} {
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	for size := 7900; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = n.direct.Exec(t.Context(), "SELECT pg_notify('anything', repeat('x', $1))", size)
		}
		require.ErrorContains(t, err, "54000")
	}
	return func() {
		_, err := conn.Exec(t.Context(), "ROLLBACK")
		require.NoError(t, err)
	}
}

// slowly hands out what comes bit by bit.
type slowly struct{ net.Conn }

func (s slowly) Read(b []byte) (int, error) {
	time.Sleep(50 * time.Millisecond)
	return s.Conn.Read(b[:min(len(b), 2<<10)])
}

// A row that takes longer to arrive than a server may be silent is no silence.
func TestDegradation_NetworkIsSlow_WhatIsLargeIsClaimed(t *testing.T) {
	t.Parallel()
	n := trouble(t, breakableServer(t).URL, pgwake.Config{}, nil)
	far, slow := n.far(t)
	text := takesLong(t)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "large", Input: text, Tag: "far"}, nil)
	require.NoError(t, err)
	slow()
	item, err := far.FetchWorkItem(within(t, 3*patience), &pgwake.FetchOptions{Tags: pgwake.Tags("far"), LockTimeout: time.Hour})
	require.NoError(t, err)
	require.Equal(t, 1, item.Attempt)
	require.JSONEq(t, string(text), string(item.Input))
}

// Nor is an answer to those who wait for an instance.
func TestDegradation_NetworkIsSlow_WhatIsLargeIsWaitedFor(t *testing.T) {
	t.Parallel()
	n := trouble(t, breakableServer(t).URL, pgwake.Config{}, nil)
	far, slow := n.far(t)
	output := string(takesLong(t))
	n.slipIn(t, "i")
	turn, err := n.FetchOrchestrationItem(within(t, patience), nil)
	require.NoError(t, err)
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{ExecutionID: turn.ExecutionID,
		Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusCompleted, Output: output}}))
	slow()
	outcome, err := far.WaitForInstance(within(t, 3*patience), "i")
	require.NoError(t, err)
	require.Equal(t, output, outcome.Output)
}

// takesLong is a text that takes seven seconds to come slowly, at least.
func takesLong(t *testing.T) json.RawMessage {
	t.Helper()
	text, err := json.Marshal(strings.Repeat("0123456789abcdef", 16<<10)) // at 40 kB/s
	require.NoError(t, err)
	return text
}

// far opens a Provider to whose pool everything comes slowly, once slow was called.
func (n *patientNode) far(t *testing.T) (far *pgwake.Provider, slow func()) {
	t.Helper()
	config := n.direct.Config()
	var isSlow atomic.Bool
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err == nil && isSlow.Load() {
			conn = slowly{conn}
		}
		return conn, err
	}
	pgwake.TunePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	far, err = pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, ListenConfig: n.direct.Config().ConnConfig})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close(context.Background())) })
	return far, func() {
		isSlow.Store(true)
		pool.Reset()
	}
}

// Somebody else holds every connection of the pool.
func TestDegradation_PoolIsExhausted_WorkFlowsOnceItIsNot(t *testing.T) {
	t.Parallel()
	n := trouble(t, breakableServer(t).URL, pgwake.Config{}, nil)
	n.pushed(t, patience)
	release := n.exhaust(t)
	_, err := n.FetchWorkItem(within(t, 100*time.Millisecond), now)
	require.True(t, requireError(t, err, context.DeadlineExceeded).Retryable)
	told := n.Stats().Worker.Tokens["notify"]
	n.produce(t, "while none is free")
	require.Eventually(t, func() bool { return n.Stats().Worker.Tokens["notify"] > told }, patience, 10*time.Millisecond)
	_, err = n.FetchWorkItem(within(t, patience), &pgwake.FetchOptions{PollTimeout: 50 * time.Millisecond})
	require.True(t, requireError(t, err, context.DeadlineExceeded).Retryable)
	require.False(t, n.Stats().Worker.Aggressive, "the database is well")
	sessions := n.Stats().Reconnects
	signal(t, n.listener(t), syscall.SIGTERM) // and push is gone, too
	require.Eventually(t, func() bool { return n.Stats().Reconnects > sessions && n.Stats().Listening }, back, time.Millisecond, "and comes back")
	require.False(t, n.has("while none is free"))
	release()
	n.await(t, "while none is free", back)
	n.pushed(t, back)
}

// exhaust takes every connection of the node's pool.
func (n *patientNode) exhaust(t *testing.T) (release func()) {
	t.Helper()
	var held []*pgxpool.Conn
	for range n.pool.Config().MaxConns {
		c, err := n.pool.Acquire(within(t, patience))
		require.NoError(t, err)
		held = append(held, c)
	}
	release = sync.OnceFunc(func() {
		for _, c := range held {
			c.Release()
		}
	})
	t.Cleanup(release)
	return release
}

// rest has the pool make all of its connections, and waits until nobody has a reason to use any.
func (n *patientNode) rest(t *testing.T) {
	t.Helper()
	n.exhaust(t)()
	require.Eventually(t, func() bool {
		return pgwake.WorkSettled(n.Provider, pgwake.DefaultNamespace) && pgwake.ExpectsNoWork(n.Provider, pgwake.DefaultNamespace)
	}, patience, 10*time.Millisecond)
}

// within returns a context that ends after d, or with the test.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestDegradation_CloseDuringAnyOfIt_ReturnsWithinItsContext(t *testing.T) {
	t.Parallel()
	const given = time.Second
	quick := pgwake.Config{FallbackInterval: quickFallback}
	for name, c := range map[string]struct {
		shake func(*testing.T) *patientNode
	}{
		"the LISTEN backend is stopped": {func(t *testing.T) *patientNode {
			n := trouble(t, breakableServer(t).URL, quick, nil)
			n.pushed(t, patience)
			pid := n.listener(t)
			signal(t, pid, syscall.SIGSTOP)
			t.Cleanup(func() { signal(t, pid, syscall.SIGCONT) })
			return n
		}},
		"all bytes vanish": {func(t *testing.T) *patientNode {
			server, link := breakableLink(t)
			n := trouble(t, server, quick, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
				link.use(pool.ConnConfig)
				link.use(listen)
			})
			n.pushed(t, patience)
			link.mode.Store(swallow)
			// One verb and one notification are under way, and no answer will come.
			go func() { _, _ = n.EnqueueForWorker(context.Background(), pgwake.WorkItem{Name: "w"}, nil) }()
			require.Eventually(t, func() bool { return link.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
			return n
		}},
		"a connection attempt gets no answer": {func(t *testing.T) *patientNode {
			server, link := breakableLink(t)
			n := trouble(t, server, quick, func(_ *pgxpool.Config, listen *pgx.ConnConfig) { link.use(listen) })
			n.pushed(t, patience)
			link.mode.Store(swallow)
			signal(t, n.listener(t), syscall.SIGTERM)
			require.Eventually(t, func() bool { return link.swallowed.Load() > 0 }, patience, 10*time.Millisecond)
			return n
		}},
		"the server is down": {func(t *testing.T) *patientNode {
			server := bootOne(t)
			n := trouble(t, server.URL, quick, nil)
			n.pushed(t, patience)
			require.NoError(t, server.Halt(t.Context(), devpg.Immediate))
			return n
		}},
		"LISTEN cannot be had": {func(t *testing.T) *patientNode {
			return trouble(t, breakableServer(t).URL, quick, func(_ *pgxpool.Config, listen *pgx.ConnConfig) { listen.Port, listen.Fallbacks = 1, nil })
		}},
		"the pool is exhausted": {func(t *testing.T) *patientNode {
			n := trouble(t, breakableServer(t).URL, quick, nil)
			n.exhaust(t)
			n.produce(t, "found by nobody")
			return n
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := c.shake(t)
			closed := make(chan error, 1)
			ctx := within(t, given)
			go func() { closed <- n.Close(ctx) }()
			select {
			case err := <-closed:
				if err != nil {
					requireError(t, err, context.DeadlineExceeded)
				}
			case <-time.After(patience): // how soon is the machine's business
				require.Fail(t, "Close hangs", "it had %v", given)
			}
			n.quit()
		})
	}
}

// rounds is how often the next test breaks something. The whole number of them is for make stress.
func rounds(t *testing.T, unless int) int {
	t.Helper()
	text := os.Getenv("PGWAKE_ROUNDS")
	if text == "" {
		return unless
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "PGWAKE_ROUNDS")
	return n
}

func TestDegradation_ListenerKilledAndServerRestartedUnderLoad_LosesNothing(t *testing.T) {
	t.Parallel()
	server := bootOne(t)
	n := trouble(t, server.URL, pgwake.Config{}, nil)
	n.pushed(t, patience)
	// Under load the next query finds whatever a lost wake-up left. Here nothing but a wake-up does.
	quiet := trouble(t, server.URL, pgwake.Config{AggressivePolicy: pgwake.Never, FallbackInterval: time.Hour}, nil)

	// Two producers, one of them the node itself. What they were told is queued must be delivered; of what
	// failed nobody knows.
	var mu sync.Mutex
	var promised []string
	producing, stop := context.WithCancel(t.Context())
	var producers sync.WaitGroup
	for name, enqueue := range map[string]func(string) error{
		"sql": func(name string) error {
			_, err := n.direct.Exec(producing, `SELECT `+n.schema+`.enqueue_work($1)`, name)
			return err
		},
		"own": func(name string) error {
			_, err := n.EnqueueForWorker(producing, pgwake.WorkItem{Name: name}, nil)
			return err
		},
	} {
		producers.Go(func() {
			for i := 0; producing.Err() == nil; i++ {
				item := fmt.Sprintf("%s %d", name, i)
				if enqueue(item) == nil {
					mu.Lock()
					promised = append(promised, item)
					mu.Unlock()
				}
				pause := time.NewTimer(time.Duration(rand.Int64N(int64(4 * time.Millisecond))))
				select {
				case <-pause.C:
				case <-producing.Done():
				}
			}
		})
	}
	t.Cleanup(func() { stop(); producers.Wait() })

	delivered := func() int {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.handled)
	}
	var slowest time.Duration
	for round := range rounds(t, 4) {
		loaded := delivered() + 40
		require.Eventually(t, func() bool { return delivered() >= loaded }, patience, time.Millisecond, "work does not flow")
		sessions, quietSessions := n.Stats().Reconnects, quiet.Stats().Reconnects
		switch round % 4 {
		case 0, 2:
			signal(t, n.listener(t), syscall.SIGTERM)
			signal(t, quiet.listener(t), syscall.SIGTERM)
		case 1:
			require.NoError(t, server.Restart(t.Context(), devpg.Fast))
		case 3:
			require.NoError(t, server.Restart(t.Context(), devpg.Immediate))
		}
		answers := time.Now()
		require.Eventually(t, func() bool {
			return n.Stats().Reconnects > sessions && n.Stats().Listening && quiet.Stats().Reconnects > quietSessions && quiet.Stats().Listening
		}, back, time.Millisecond, "round %d: push is not back", round)
		slowest = max(slowest, time.Since(answers))
		n.direct.Reset() // the producers' connections are gone as well
		quiet.direct.Reset()
		quiet.flows(t, back)
	}
	stop()
	producers.Wait()
	for _, item := range promised {
		n.await(t, item, patience)
	}
	n.pushed(t, back)
	t.Logf("%d items delivered; push was back after %v at most", len(promised), slowest)
}

// logbook collects what a logger writes.
type logbook struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logbook) count(what string) int { return strings.Count(l.String(), what) }
