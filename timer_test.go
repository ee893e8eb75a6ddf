package pgwake

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// testEngine is an engine without a database, on the clock of the test.
func testEngine(t *testing.T, cfg Config) *engine {
	t.Helper()
	cfg.Logger = silent
	resolved, err := cfg.resolve()
	require.NoError(t, err)
	e := newEngine(&resolved, newStatements("s"), nil, dialer{}, func(bool) {})
	t.Cleanup(e.stop)
	return e
}

// The goroutine sleeps until the first of all instants, whichever lane it belongs to, and sees one that moves
// up while it sleeps.
func TestTimer_InstantsOfSeveralLanes_FireInOrder(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		e.group.Go("timer", e.timer.run)
		red, err := e.waiters.enter(Worker, filter{Namespaces: []string{"red"}})
		require.NoError(t, err)
		blue, err := e.waiters.enter(Orchestrator, filter{Namespaces: []string{"blue"}})
		require.NoError(t, err)
		start := time.Now()
		red.heard(start.Add(time.Hour), false)
		blue.heard(start.Add(10*time.Minute), false)
		synctest.Wait()
		red.heard(start.Add(time.Minute), false)

		_, err = red.park(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, time.Minute, time.Since(start))
		_, err = blue.park(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, 10*time.Minute, time.Since(start))
		e.stop()
		e.group.Wait()
	})
}

// An instant that has passed already, of a transaction that took longer than the delay it gave, fires at once.
func TestTimer_InstantInThePast_FiresAtOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		e.group.Go("timer", e.timer.run)
		l, err := e.waiters.enter(Worker, filter{})
		require.NoError(t, err)
		start := time.Now()
		l.heard(start.Add(-time.Second), false)
		tok, err := l.park(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, WakeTimer, tok.reason)
		require.Zero(t, time.Since(start))
		e.stop()
		e.group.Wait()
	})
}

// After a release somebody looks: whoever fetches anyway, or one who is called after 2 ms; and if nobody of
// this node has after 10 ms, the others are asked to.
func TestTimer_Release_CallsOneWhoLooksAndElseTellsTheOthers(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		e.group.Go("timer", e.timer.run)
		l, err := e.waiters.enter(Orchestrator, filter{})
		require.NoError(t, err)
		told := func() bool {
			e.coalescer.mu.Lock()
			defer e.coalescer.mu.Unlock()
			return e.coalescer.pending.notes[Orchestrator] != nil
		}
		tokens := func() int {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.tokens)
		}
		e.released("default", true)
		l.beginLook(session{epoch: 1}) // one does
		time.Sleep(relayAfter)
		synctest.Wait()
		require.False(t, told())
		require.Zero(t, tokens(), "nobody had to be called")

		e.released("default", true)
		time.Sleep(callAfter - time.Nanosecond)
		synctest.Wait()
		require.Zero(t, tokens())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, 1, tokens(), "one is called")
		time.Sleep(relayAfter - callAfter - time.Nanosecond)
		synctest.Wait()
		require.False(t, told())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.True(t, told())
		e.stop()
		e.group.Wait()
	})
}

func TestTimerGrace_WakesEarlyOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{TimerGrace: 50 * time.Millisecond})
		l, err := e.waiters.enter(Worker, filter{})
		require.NoError(t, err)
		due := time.Now().Add(time.Second)
		l.heard(due, false)
		time.Sleep(960 * time.Millisecond)
		e.timer.fire()
		require.Len(t, l.tokens, 1, "within the grace")
		// The early look finds nothing and hears of the same instant again.
		k := l.beginLook(session{})
		l.endLook(k, report{now: time.Now(), earliest: due}, nil, 0)
		next, ok := e.timer.fire()
		require.True(t, ok)
		require.Empty(t, l.tokens)
		require.WithinDuration(t, due, next, time.Millisecond)
	})
}

// A node that polls hears nothing; what its own verbs make due, and when, it knows all the same.
func TestPolling_OwnAbandonAndRenewal_AreMetAtTheirInstants(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: time.Hour})
	claim := func() *ClaimedWorkItem {
		_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "a"}, nil)
		require.NoError(t, err)
		item, err := p.FetchWorkItem(t.Context(), &FetchOptions{LockTimeout: time.Hour})
		require.NoError(t, err)
		return item
	}
	for what, giveUp := range map[string]func(*ClaimedWorkItem) error{
		"abandon": func(item *ClaimedWorkItem) error { return p.AbandonWorkItem(t.Context(), item.LockToken, nil) },
		"delay": func(item *ClaimedWorkItem) error {
			return p.AbandonWorkItem(t.Context(), item.LockToken, &AbandonOptions{Delay: 50 * time.Millisecond})
		},
		"renewal": func(item *ClaimedWorkItem) error {
			_, err := p.RenewWorkItemLock(t.Context(), item.LockToken, 50*time.Millisecond)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			item := claim()
			wait := fetchWork(t, p, longPoll)
			awaitParked(t, p, Worker, 1)
			require.NoError(t, giveUp(item))
			got := get(t, wait)
			require.Equal(t, item.ID, got.item.ID)
			require.NoError(t, p.AckWorkItem(t.Context(), got.item.LockToken, nil))
		})
	}
	t.Run("turn", func(t *testing.T) {
		_, err := p.EnqueueForOrchestrator(t.Context(), Message{Instance: "i", Kind: "k"}, nil)
		require.NoError(t, err)
		turn, err := p.FetchOrchestrationItem(t.Context(), &FetchOptions{LockTimeout: time.Hour})
		require.NoError(t, err)
		again := fetchTurn(t, p, longPoll)
		awaitParked(t, p, Orchestrator, 1)
		require.NoError(t, p.AbandonOrchestrationItem(t.Context(), turn.LockToken, &AbandonOptions{Delay: 50 * time.Millisecond}))
		require.Equal(t, "i", get(t, again).turn.Instance)
	})
}

// A request outlives its sender: this one waits on the server for somebody's dedup key, and commits, without a
// notification, after its sender has given up and everybody has looked in vain.
func TestDoubt_EnqueueCommitsAfterItsSenderGaveUp_EveryNodeFindsIt(t *testing.T) {
	for _, who := range []string{"own node", "other node"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			config := Config{AggressivePolicy: Never, FallbackInterval: time.Hour}
			other := testProvider(t, config)
			config.Schema, config.Logger = other.cfg.Schema, silent
			sender, unreachable := behindDialer(t, config)
			finder := sender
			if who == "other node" {
				finder = other
			}
			wait := fetchWork(t, finder, longPoll)
			awaitParked(t, finder, Worker, 1)
			blocker := plain(t, sender.cfg.Schema)
			mustExec(t, blocker, `BEGIN`)
			mustExec(t, blocker, `SELECT enqueue_work('blocker', p_dedup_key => 'key')`)

			impatient, cancel := context.WithCancel(t.Context())
			sent := make(chan error, 1)
			go func() {
				_, err := sender.EnqueueForWorker(impatient, WorkItem{Name: "late"}, &EnqueueOptions{DedupKey: "key"})
				sent <- err
			}()
			peek := plain(t, sender.cfg.Schema)
			eventually(t, "it waits for the key", func() bool {
				var blocked bool
				err := peek.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND $1::int = ANY (pg_blocking_pids(pid)))`,
					blocker.PgConn().PID()).Scan(&blocked)
				return err == nil && blocked
			})
			looks := finder.Stats().Worker.Looks
			reachable := unreachable() // nor can the request be cancelled
			cancel()
			require.ErrorIs(t, <-sent, context.Canceled)
			reachable()
			eventually(t, "everybody has looked in vain", func() bool {
				stats := finder.Stats().Worker
				return stats.Looks > looks && stats.Parked == 1
			})
			mustExec(t, blocker, `ROLLBACK`)
			require.Equal(t, "late", get(t, wait).item.Name)
			requireNoSafetyNet(t, finder)
		})
	}
}

// behindDialer is a Provider that can be kept from making connections: from the call of unreachable until what that
// returns is called, which first waits for an attempt.
func behindDialer(t *testing.T, cfg Config) (p *Provider, unreachable func() (reachable func())) {
	t.Helper()
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	var refuse atomic.Bool
	refused := make(chan struct{}, 100)
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if refuse.Load() {
			refused <- struct{}{}
			return nil, errors.New("out of reach")
		}
		return dial(ctx, network, address)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	for range 3 { // enough for the verbs of a test
		warm, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		defer warm.Release()
	}
	p, err = New(t.Context(), pool, &cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patient)
		defer cancel()
		require.NoError(t, p.Close(ctx))
	})
	return p, func() func() {
		refuse.Store(true)
		return func() {
			select {
			case <-refused:
			case <-time.After(patient):
				require.Fail(t, "nobody tried to connect")
			}
			refuse.Store(false)
		}
	}
}
