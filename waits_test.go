package pgwake

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/dbclock"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// fakeInstances is a database of instances that counts the queries for them.
type fakeInstances struct {
	mu      sync.Mutex
	answers map[question]answer // complete ones
	known   map[string]int64
	reads   int
	asked   int
	err     error
	during  func()                // called in the middle of a query, once its snapshot was taken
	of      func(question) answer // nil: as above; those for namespaces
}

func (f *fakeInstances) look(_ context.Context, asked []question, tell func(int, answer)) error {
	f.mu.Lock()
	f.reads++
	f.asked += len(asked)
	err, during := f.err, f.during
	f.during = nil
	told := make(map[int]answer)
	for i, q := range asked {
		if f.of != nil && q.namespaces {
			told[i] = f.of(q)
			continue
		}
		known := q.known
		q.known = 0
		a, ok := f.answers[q]
		if a.known = f.known[q.instance]; ok || a.known != known {
			a.complete = ok
			told[i] = a
		}
	}
	f.mu.Unlock()
	if during != nil {
		during()
	}
	if err != nil {
		return err
	}
	for i, a := range told {
		tell(i, a)
	}
	return nil
}

// end is the change that the waiters for the instance's outcome wait for.
func (f *fakeInstances) end(instance string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known[instance] = max(f.known[instance], 1)
	f.answers[question{instance: instance, outcome: true}] = answer{status: string(StatusCompleted)}
}

func (f *fakeInstances) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeInstances) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

// testWaits runs a registry in virtual time. It listens, or else has no LISTEN connection at the moment.
func testWaits(t *testing.T, cfg Config, listening bool) (*waits, *fakeInstances) {
	t.Helper()
	cfg.Logger = silent
	resolved, err := cfg.resolve()
	require.NoError(t, err)
	e := &engine{cfg: &resolved, modes: newModes(&resolved), clock: dbclock.New(nil)}
	e.trust = newTrust(e.clock.Now)
	if resolved.listens() {
		e.listener = newListener(e, dialer{})
	}
	if listening {
		e.listener.current.Store(&session{epoch: 1})
	}
	w := newWaits(e)
	f := &fakeInstances{answers: make(map[question]answer), known: make(map[string]int64)}
	w.look = f.look
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		require.Empty(t, w.byHash, "waiters are left")
		require.Empty(t, w.due)
		require.Zero(t, w.count)
	})
	return w, f
}

// waitFor starts a wait for the outcome of an instance and returns the channel for its error.
func waitFor(ctx context.Context, w *waits, instance string) <-chan error {
	out := make(chan error, 1)
	go func() {
		_, err := w.wait(ctx, question{instance: instance, outcome: true})
		out <- err
	}()
	return out
}

func TestWaits_NothingChanges_NoQuery(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		ctx, cancel := context.WithCancel(t.Context())
		var outs []<-chan error
		for i := range 1000 {
			outs = append(outs, waitFor(ctx, w, strconv.Itoa(i%10)))
		}
		synctest.Wait()
		before := f.count()
		time.Sleep(24 * time.Hour)
		require.Equal(t, before, f.count())
		w.heard(fmt.Sprintf("%016x", hashOf("of nobody here")))
		synctest.Wait()
		require.Equal(t, before, f.count(), "asked for an instance that nobody waits for")
		require.Equal(t, 1000, w.parked())
		cancel()
		for _, out := range outs {
			require.Equal(t, context.Canceled, <-out)
		}
	})
}

func TestWaits_ManyWaitersOfOneInstance_AreOneQuestionOfOneQuery(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		f.known["i"] = 1
		var outs []<-chan error
		for range testsize.Of(1000, 5000) {
			outs = append(outs, waitFor(t.Context(), w, "i"))
		}
		synctest.Wait()
		before, asked := f.count(), f.asked
		f.end("i")
		w.heard(fmt.Sprintf("%016x", hashOf("i")))
		for _, out := range outs {
			require.NoError(t, <-out)
		}
		require.Equal(t, 1, f.count()-before)
		require.Equal(t, 1, f.asked-asked)
	})
}

// Whatever is notified during a query is dealt with by one more.
func TestWaits_ChangesDuringAQuery_AreOneMoreQuery(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		instances := testsize.Of(1000, 5000)
		var outs []<-chan error
		for i := range instances {
			outs = append(outs, waitFor(t.Context(), w, strconv.Itoa(i)))
		}
		synctest.Wait()
		before := f.count()
		f.mu.Lock()
		f.during = func() {
			for i := range instances {
				f.end(strconv.Itoa(i))
				w.heard(fmt.Sprintf("%016x", hashOf(strconv.Itoa(i))))
			}
		}
		f.mu.Unlock()
		w.heard(fmt.Sprintf("%016x", hashOf("0")))
		for _, out := range outs {
			require.NoError(t, <-out)
		}
		require.Equal(t, 2, f.count()-before)
	})
}

// Invariants (1) and (2): the change comes after the first query's snapshot, and its notification before the answer.
func TestWaits_ChangeDuringTheFirstQuery_IsNotLost(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		f.during = func() {
			f.end("i")
			w.heard(fmt.Sprintf("%016x", hashOf("i")))
		}
		require.NoError(t, <-waitFor(t.Context(), w, "i"))
		require.Equal(t, 2, f.count())
	})
}

func TestWaits_PayloadThatIsNotClear_MeansAnyInstance(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		for i, payload := range []string{"", "of a newer version", "-1", "00000000000000000000"} {
			instance := strconv.Itoa(i)
			out := waitFor(t.Context(), w, instance)
			synctest.Wait()
			f.end(instance)
			if i == 3 { // a number: of nobody
				w.heard(payload)
				synctest.Wait()
				require.Empty(t, out)
				payload = ""
			}
			w.heard(payload)
			require.NoError(t, <-out)
		}
	})
}

// Invariant (3): what changed while nobody listened went unheard.
func TestWaits_ListeningBegins_EveryWaiterIsReadOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{AggressivePolicy: Never}, false)
		var outs []<-chan error
		for i := range 100 {
			outs = append(outs, waitFor(t.Context(), w, strconv.Itoa(i)))
		}
		synctest.Wait()
		for i := range 100 {
			f.end(strconv.Itoa(i))
		}
		before := f.count()
		time.Sleep(time.Hour)
		require.Equal(t, before, f.count(), "polling is forbidden")
		w.e.listener.current.Store(&session{epoch: 1})
		w.lookAtAll()
		for _, out := range outs {
			require.NoError(t, <-out)
		}
		require.Equal(t, 1, f.count()-before)
	})
}

func TestWaits_NobodyTellsThisNode_OneQueryAnIntervalForAll(t *testing.T) {
	const interval = 200 * time.Millisecond
	for name, cfg := range map[string]Config{
		"not listening":      {AggressiveInterval: interval},
		"ModePolling":        {Mode: ModePolling, PollInterval: interval},
		"long poll disabled": {DisableLongPoll: true, PollInterval: interval},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				w, f := testWaits(t, cfg, false)
				time.Sleep(time.Hour)
				require.Zero(t, f.count(), "asked for nobody")
				var outs []<-chan error
				for i := range testsize.Of(200, 1000) {
					outs = append(outs, waitFor(t.Context(), w, strconv.Itoa(i)))
				}
				synctest.Wait()
				before := f.count()
				time.Sleep(100*interval + interval/2)
				require.Equal(t, 100, f.count()-before)
				for i := range outs {
					f.end(strconv.Itoa(i))
				}
				changed := time.Now()
				for _, out := range outs {
					require.NoError(t, <-out)
				}
				require.LessOrEqual(t, time.Since(changed), interval)
				require.Equal(t, 101, f.count()-before)

				// What this node did itself it need not wait for.
				out := waitFor(t.Context(), w, "own")
				synctest.Wait()
				f.end("own")
				changed = time.Now()
				w.changed("own", false)
				require.NoError(t, <-out)
				require.Zero(t, time.Since(changed))
			})
		})
	}
}

// askFor waits for namespaces besides these.
func askFor(ctx context.Context, w *waits, besides string) <-chan error {
	out := make(chan error, 1)
	go func() {
		_, err := w.wait(ctx, question{namespaces: true, besides: besides})
		out <- err
	}()
	return out
}

// A namespace that nobody tells of is noticed in half of the time in which an item is, since it is only then that one is fetched.
func TestWaits_NobodyTellsOfNamespaces_TheyAreCountedTwiceAnInterval(t *testing.T) {
	const interval = 200 * time.Millisecond
	for name, cfg := range map[string]Config{
		"not listening": {AggressiveInterval: interval},
		"ModePolling":   {Mode: ModePolling, PollInterval: interval},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				w, f := testWaits(t, cfg, false)
				var known []int64
				f.mu.Lock()
				f.of = func(q question) answer {
					known = append(known, q.known)
					return answer{known: 7}
				}
				f.mu.Unlock()
				ctx, cancel := context.WithCancel(t.Context())
				of, instance := askFor(ctx, w, "default"), waitFor(ctx, w, "i")
				time.Sleep(10*interval + interval/4)
				f.mu.Lock()
				reads, asked := f.reads, f.asked
				f.of = nil
				f.mu.Unlock()
				require.InDelta(t, 21, reads, 1)
				require.InDelta(t, 21+11, asked, 2, "the instance is asked for half as often")
				require.Zero(t, known[0])
				require.EqualValues(t, 7, known[len(known)-1], "how many there were it says with each question")
				cancel()
				require.Error(t, <-of)
				require.Error(t, <-instance)
			})
		})
	}
}

// While queries for work fail, those who wait do not poll either.
func TestWaits_BreakerIsOpen_NobodyPolls(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{Mode: ModePolling}, false)
		w.e.breaker.state, w.e.breaker.until = breakerOpen, time.Now().Add(breakerPause)
		ctx, cancel := context.WithCancel(t.Context())
		outs := []<-chan error{waitFor(ctx, w, "i"), askFor(ctx, w, "default")}
		synctest.Wait()
		before := f.count()
		time.Sleep(breakerPause - time.Second)
		require.Equal(t, before, f.count())
		time.Sleep(2 * time.Second)
		require.Greater(t, f.count(), before)
		cancel()
		for _, out := range outs {
			require.Error(t, <-out)
		}
	})
}

// Nodes that wait for a namespace and are told of none have the registry added up again and again.
func TestNewNamespaces_ThoseThatAreKnown_AreNotRead(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	mustExec(t, conn, `SELECT register_namespace('a'), register_namespace('b')`)
	read := func(known int64) (names []string, ids int64) {
		rows, err := p.pool.Query(t.Context(), p.sql.newNamespaces, known)
		require.NoError(t, err)
		var name string
		_, err = pgx.ForEachRow(rows, []any{&name, &ids}, func() error { names = append(names, name); return nil })
		require.NoError(t, err)
		return names, ids
	}
	names, ids := read(0)
	require.Equal(t, []string{"a", "b", "default"}, names)
	names, _ = read(ids)
	require.Empty(t, names)
	mustExec(t, conn, `DELETE FROM namespaces WHERE name = 'a'`)
	mustExec(t, conn, `SELECT register_namespace('c')`)
	names, _ = read(ids)
	require.Equal(t, []string{"b", "c", "default"}, names)
	mustExec(t, conn, `DELETE FROM namespaces`)
	names, _ = read(ids)
	require.Empty(t, names)
}

// What is known of the namespaces is a hash, which may be any number, and one of those who ask may know less than another.
func TestNewNamespaces_OneKnowsLessThanAnother_IsTold(t *testing.T) {
	p := testProvider(t, Config{})
	var ids int64
	conn := plain(t, p.cfg.Schema)
	mustExec(t, conn, `SELECT register_namespace('new')`)
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT bit_xor(hashint8extended(id, 0)) FROM namespaces`).Scan(&ids))
	for _, known := range []int64{-1, -7, 7, 0} {
		for range 20 { // a map has no order
			told := make(map[int]answer)
			err := p.engine.waits.newNamespaces(t.Context(), p.pool, map[int]question{
				1: {namespaces: true, besides: "default,new", known: ids},
				2: {namespaces: true, besides: "default", known: known},
			}, func(i int, a answer) { told[i] = a })
			require.NoError(t, err)
			require.True(t, told[2].complete, "known: %d", known)
			require.Equal(t, "new", *told[2].value)
			require.False(t, told[1].complete)
		}
	}
}

// A fallback has those look that know of other namespaces than it has added up.
func TestWaits_FallbackCountsNamespaces_OnlyThoseAreReadThatCountOthers(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		f.mu.Lock()
		f.of = func(question) answer { return answer{known: 3} }
		f.mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		out := askFor(ctx, w, "default")
		synctest.Wait()
		before := f.count()
		w.fallback(3)
		synctest.Wait()
		require.Equal(t, before, f.count())
		w.fallback(4)
		synctest.Wait()
		require.Equal(t, before+1, f.count())
		cancel()
		require.Error(t, <-out)
	})
}

func TestWaits_ListeningAgain_PollingEnds(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		ctx, cancel := context.WithCancel(t.Context())
		out := waitFor(ctx, w, "i")
		synctest.Wait()
		w.e.listener.current.Store(nil)
		w.bell.ring()
		before := f.count()
		time.Sleep(time.Second)
		require.InDelta(t, 10, f.count()-before, 1)
		w.e.listener.current.Store(&session{epoch: 2})
		w.lookAtAll()
		synctest.Wait()
		before = f.count()
		time.Sleep(time.Hour)
		require.Equal(t, before, f.count())
		w.changed("i", false) // the notification of that is on its way
		synctest.Wait()
		require.Equal(t, before, f.count(), "read twice for one change")
		cancel()
		require.Error(t, <-out)
	})
}

func TestWaits_QueryFails_IsRetriedAndNobodyIsForgotten(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{}, true)
		var outs []<-chan error
		for i := range 100 {
			outs = append(outs, waitFor(t.Context(), w, strconv.Itoa(i)))
		}
		synctest.Wait()
		f.fail(errors.New("server is gone"))
		for i := range 100 {
			f.end(strconv.Itoa(i))
			w.heard(fmt.Sprintf("%016x", hashOf(strconv.Itoa(i))))
		}
		before := f.count()
		time.Sleep(time.Minute)
		require.InDelta(t, time.Minute/lastRetry, f.count()-before, float64(time.Minute/lastRetry))
		for _, out := range outs {
			require.Empty(t, out)
		}

		// Whoever leaves in the meantime is told what was wrong.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := <-waitFor(ctx, w, "impatient")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "server is gone")

		f.fail(nil)
		for _, out := range outs {
			require.NoError(t, <-out)
		}
	})
}

func TestWaits_Close_EndsAllAndLetsNoneBegin(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, _ := testWaits(t, Config{}, true)
		var outs []<-chan error
		for i := range 1000 {
			outs = append(outs, waitFor(t.Context(), w, strconv.Itoa(i%7)))
		}
		synctest.Wait()
		w.close()
		w.close()
		for _, out := range outs {
			require.Equal(t, ErrClosed, <-out)
		}
		require.Equal(t, ErrClosed, <-waitFor(t.Context(), w, "late"))
	})
}

// At random: whatever happens in whatever order, nobody whose instance has changed waits on.
func TestWaits_AnythingGoes_NoWaiterMissesAChange(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, f := testWaits(t, Config{AggressivePolicy: Never}, true)
		var all sync.WaitGroup
		for i := range 500 {
			instance := strconv.Itoa(i % 50)
			all.Go(func() {
				time.Sleep(time.Duration(i*7919%1000) * time.Millisecond)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if err := <-waitFor(ctx, w, instance); err != nil {
					t.Errorf("waiter %d: %v", i, err)
				}
			})
		}
		for i := range 50 {
			all.Go(func() {
				time.Sleep(time.Duration(i*104729%1000) * time.Millisecond)
				f.end(strconv.Itoa(i))
				if i%5 == 0 { // the query that sees it has not begun, or is under way
					f.mu.Lock()
					f.during = func() { w.heard(fmt.Sprintf("%016x", hashOf(strconv.Itoa(i)))) }
					f.mu.Unlock()
				}
				w.heard(fmt.Sprintf("%016x", hashOf(strconv.Itoa(i))))
			})
		}
		all.Go(func() {
			for i := range 10 {
				time.Sleep(100 * time.Millisecond)
				f.fail(map[bool]error{true: errors.New("server is gone")}[i%2 == 0])
			}
		})
		all.Wait()
	})
}

func TestNotifyInstance_HashOfTheID_IsWhatTheNodeComputes(t *testing.T) {
	p := testProvider(t, Config{})
	conn, ear := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	var channel string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT channel('instance')`).Scan(&channel))
	mustExec(t, ear, "LISTEN "+channel)
	for _, instance := range []string{"i", "order 7/ö/\U0001F600", "'; --", " "} {
		// Equal payloads of one transaction are one notification.
		mustExec(t, conn, `SELECT notify_instance($1), notify_instance($1)`, instance)
		n, err := ear.WaitForNotification(t.Context())
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("%016x", hashOf(instance)), n.Payload)
	}
	mustExec(t, conn, `SELECT set_config('pgwake.notify', 'off', false), notify_instance('silent')`)
	mustExec(t, conn, `SELECT set_config('pgwake.notify', '', false), notify_instance('loud')`)
	n, err := ear.WaitForNotification(t.Context())
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%016x", hashOf("loud")), n.Payload)
}

// waited is what a wait for a custom status returned.
type waited struct {
	instance string
	status   *CustomStatus
	err      error
}

func waitForStatus(ctx context.Context, p *Provider, instance string, to chan<- waited) {
	go func() {
		s, err := p.WaitForStatus(ctx, instance, 0)
		to <- waited{instance, s, err}
	}()
}

func getStatus(t *testing.T, from <-chan waited) waited {
	t.Helper()
	select {
	case got := <-from:
		require.NoError(t, got.err)
		return got
	case <-time.After(patient):
		require.Fail(t, "a change was lost")
		return waited{}
	}
}

// makeInstances makes instances known behind the scenes: i1 to in.
func makeInstances(t *testing.T, conn *pgx.Conn, n int) {
	t.Helper()
	mustExec(t, conn, `WITH made AS (
			INSERT INTO instances (instance_id, namespace, name)
			SELECT 'i' || i, 'default', 'flow' FROM generate_series(1, $1::int) i RETURNING instance_id)
		INSERT INTO executions (instance_id, execution_id) SELECT instance_id, 1 FROM made`, n)
}

// awaitRead waits until n waiters wait, all for instances that exist, and have been read.
func awaitRead(t *testing.T, p *Provider, n int) {
	t.Helper()
	w := p.engine.waits
	eventually(t, "the waiters were read", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		read := 0
		for _, same := range w.byHash {
			for x := range same {
				if x.known != 0 {
					read++
				}
			}
		}
		return read == n && len(w.due) == 0
	})
}

func TestWaitForStatus_Changed_IsPushedByOneReadAndHoldsNoConnection(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, 2)
	got := make(chan waited, 2)
	waitForStatus(t.Context(), p, "i1", got)
	waitForStatus(t.Context(), p, "i2", got)
	awaitRead(t, p, 2)
	require.Equal(t, 2, p.Stats().Waits)
	eventually(t, "none has a connection, once that of the last read is back", func() bool { return p.pool.Stat().AcquiredConns() == 0 })
	before := p.Stats().WaitReads
	for i, instance := range []string{"i1", "i2"} {
		mustExec(t, conn, `SELECT apply_custom_status($1, false, 'half way')`, instance)
		w := getStatus(t, got)
		require.Equal(t, instance, w.instance)
		require.Equal(t, CustomStatus{Value: "half way", Set: true, Version: 1}, *w.status)
		require.EqualValues(t, i+1, p.Stats().WaitReads-before)
		require.Equal(t, 1-i, p.Stats().Waits)
	}
}

func TestWaitForStatus_ThousandsOfWaiters_ReadsAreShared(t *testing.T) {
	n, alone := testsize.Of(1200, 3000), testsize.Of(400, 1000) // changes, and how many of them in transactions of their own
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, n)
	got := make(chan waited, n)
	for i := range n {
		waitForStatus(t.Context(), p, fmt.Sprint("i", i+1), got)
	}
	awaitRead(t, p, n)
	before := p.Stats().WaitReads
	require.Less(t, before, int64(n/10), "reads when they came")

	// One transaction after the other, as fast as one connection can: the node reads what came meanwhile.
	mustExec(t, conn, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP
		PERFORM apply_custom_status('i' || i, false, 'done'); COMMIT; END LOOP; END $$`, alone))
	// And all at once.
	mustExec(t, conn, `SELECT count(apply_custom_status('i' || i, false, 'done')) FROM generate_series($1::int, $2::int) i`, alone+1, n)
	seen := make(map[string]bool)
	for range n {
		seen[getStatus(t, got).instance] = true
	}
	require.Len(t, seen, n)
	reads := p.Stats().WaitReads - before
	t.Logf("%d changes in %d transactions: %d reads", n, alone+1, reads)
	require.LessOrEqual(t, reads, int64(alone+1+20))
	require.Zero(t, p.Stats().Waits)
}

func TestWaitForStatus_SeveralNodes_EachIsToldAndReadsOnce(t *testing.T) {
	here := testProvider(t, Config{})
	there := testProvider(t, Config{Schema: here.cfg.Schema})
	polls := testProvider(t, Config{Schema: here.cfg.Schema, Mode: ModePolling, PollInterval: 20 * time.Millisecond})
	conn := plain(t, here.cfg.Schema)
	makeInstances(t, conn, 1)
	nodes := []*Provider{here, there, polls}
	got := make(chan waited, len(nodes))
	var before []int64
	for _, p := range nodes {
		waitForStatus(t.Context(), p, "i1", got)
		awaitRead(t, p, 1)
		before = append(before, p.Stats().WaitReads)
	}
	// On a connection of one of the pools: a node hears what it did itself.
	_, err := here.pool.Exec(t.Context(), "SELECT "+pgx.Identifier{here.cfg.Schema}.Sanitize()+".apply_custom_status('i1', true, NULL)")
	require.NoError(t, err)
	for range nodes {
		require.Equal(t, CustomStatus{Version: 1}, *getStatus(t, got).status)
	}
	for i, p := range nodes[:2] {
		require.EqualValues(t, 1, p.Stats().WaitReads-before[i])
	}
}

// The commit of an ack does not take the lock of all notifications, whoever waits: the coalescer says it afterwards.
func TestWaitForStatus_ChangedByAnAck_IsToldAfterItsCommit(t *testing.T) {
	held, free := make(chan struct{}), make(chan struct{})
	p := testProvider(t, Config{fault: func(point string) {
		select {
		case <-held:
			if point == "flush" {
				<-free
			}
		default:
		}
	}})
	var once sync.Once
	defer once.Do(func() { close(free) })
	_, err := p.EnqueueForOrchestrator(t.Context(), Message{Instance: "i", Kind: MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	turn, err := p.FetchOrchestrationItem(t.Context(), nil)
	require.NoError(t, err)
	conn, ear := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	var channel string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT channel('instance')`).Scan(&channel))
	mustExec(t, ear, "LISTEN "+channel)
	hears := func(payload string) {
		n, err := ear.WaitForNotification(t.Context())
		require.NoError(t, err)
		require.Equal(t, payload, n.Payload)
	}
	got := make(chan waited, 1)
	waitForStatus(t.Context(), p, "i", got)

	close(held)
	require.NoError(t, p.AckOrchestrationItem(t.Context(), turn.LockToken, OrchestrationAck{
		Metadata: Metadata{Name: "flow"}, CustomStatus: &CustomStatusUpdate{Value: "half way"}}))
	require.Equal(t, "half way", getStatus(t, got).status.Value, "this node knows")
	mustExec(t, conn, `SELECT pg_notify($1, 'afterwards')`, channel)
	hears("afterwards")
	once.Do(func() { close(free) })
	hears(fmt.Sprintf("%016x", hashOf("i")))
}

// As hole 3: what is notified while the LISTEN connection is down is lost.
func TestWaitForStatus_ChangedWhileNotListening_FoundOnReconnect(t *testing.T) {
	gate := make(chan struct{}, 1)
	gate <- struct{}{} // the first connection
	p := testProvider(t, Config{AggressivePolicy: Never, fault: func(point string) {
		if point == "connect" {
			select {
			case <-gate:
			case <-time.After(patient):
			}
		}
	}})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, 1)
	got := make(chan waited, 1)
	waitForStatus(t.Context(), p, "i1", got)
	awaitRead(t, p, 1)
	mustExec(t, conn, `SELECT pg_terminate_backend($1)`, p.engine.listener.pid.Load())
	eventually(t, "the loss is noticed", func() bool { return !p.Stats().Listening })
	mustExec(t, conn, `SELECT apply_custom_status('i1', false, 'unheard')`)
	before := p.Stats().WaitReads
	gate <- struct{}{}
	require.Equal(t, "unheard", getStatus(t, got).status.Value)
	require.EqualValues(t, 1, p.Stats().WaitReads-before)
}

func TestWaitForStatus_CannotListen_IsPolled(t *testing.T) {
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port, config.Fallbacks = 1, nil // nobody listens there
	p := testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, 1)
	got := make(chan waited, 1)
	waitForStatus(t.Context(), p, "i1", got)
	awaitRead(t, p, 1)
	mustExec(t, conn, `SELECT apply_custom_status('i1', false, 'polled')`)
	require.Equal(t, "polled", getStatus(t, got).status.Value)
}

func TestWaitForStatus_ChangeThatNobodyAnnounced_IsFoundByTheFallbackIfItIsOn(t *testing.T) {
	for name, c := range map[string]struct {
		cfg   Config
		found bool
	}{
		"on":  {Config{FallbackInterval: 100 * time.Millisecond}, true},
		"off": {Config{FallbackInterval: 100 * time.Millisecond, Mode: ModeEventDriven}, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, c.cfg)
			conn := plain(t, p.cfg.Schema)
			makeInstances(t, conn, 1)
			got := make(chan waited, 1)
			waitForStatus(t.Context(), p, "i1", got)
			awaitRead(t, p, 1)
			mustExec(t, conn, `SELECT set_config('pgwake.notify', 'off', false), apply_custom_status('i1', false, 'silent')`)
			if !c.found {
				began := p.Stats().Fallbacks
				eventually(t, "the keep-alive runs", func() bool { return p.Stats().Fallbacks >= began+3 })
				require.Empty(t, got)
				mustExec(t, conn, `SELECT set_config('pgwake.notify', '', false), notify_instance('i1')`)
			}
			require.Equal(t, "silent", getStatus(t, got).status.Value)
		})
	}
}

func TestWaitForStatus_PanicInTheGoroutine_IsSurvived(t *testing.T) {
	bomb := make(chan struct{}, 1)
	p := testProvider(t, Config{fault: func(at string) {
		if at == "waits" {
			select {
			case <-bomb:
				panic("injected")
			default:
			}
		}
	}})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, 1)
	got := make(chan waited, 1)
	waitForStatus(t.Context(), p, "i1", got)
	awaitRead(t, p, 1)
	bomb <- struct{}{}
	mustExec(t, conn, `SELECT apply_custom_status('i1', false, 'survived')`)
	require.Equal(t, "survived", getStatus(t, got).status.Value)
	require.EqualValues(t, 1, p.Stats().Panics)
}

// The pool is exhausted and then is not; nobody is told of an error in between.
func TestWaitForStatus_PoolIsExhausted_WaitsOnAndSaysWhyIfItEnds(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	makeInstances(t, conn, 1)
	var held []func()
	for range p.pool.Config().MaxConns {
		c, err := p.pool.Acquire(t.Context())
		require.NoError(t, err)
		held = append(held, c.Release)
	}
	got := make(chan waited, 1)
	waitForStatus(t.Context(), p, "i1", got)
	eventually(t, "it waits", func() bool { return p.Stats().Waits == 1 })
	mustExec(t, conn, `SELECT apply_custom_status('i1', false, 'late')`)
	require.Empty(t, got)
	for _, release := range held {
		release()
	}
	require.Equal(t, "late", getStatus(t, got).status.Value)
}

func TestClose_WaitersOfInstances_ReturnAtOnce(t *testing.T) {
	p := testProvider(t, Config{})
	const n = 200
	got := make(chan waited, n)
	for i := range n {
		waitForStatus(t.Context(), p, fmt.Sprint("unknown ", i), got)
	}
	eventually(t, "all wait", func() bool { return p.Stats().Waits == n })
	closing, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, p.Close(closing))
	for range n {
		require.ErrorIs(t, (<-got).err, ErrClosed)
	}
	require.Zero(t, p.Stats().Waits)
	_, err := p.WaitForInstance(t.Context(), "i")
	require.ErrorIs(t, err, ErrClosed)
}
