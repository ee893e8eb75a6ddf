package pgwake

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: does a stranger who notifies the nodes cost them no more than is said, and does nobody miss anything for it?

func TestTrust_Credit_IsSpentPaidBackAndEarned(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		c := newTrust(time.Now)
		for range mostCredit {
			c.spend()
			require.Zero(t, c.until())
		}
		require.Empty(t, c.problem())
		c.spend()
		require.Equal(t, spendPause, time.Until(c.until()))
		require.Contains(t, c.problem(), "50 times a second")
		time.Sleep(spendPause)
		require.Zero(t, c.until())
		for range mostCredit {
			c.spend()
		}
		require.Equal(t, mostDebt, time.Until(c.until()), "nothing is put off for longer")
		var at time.Time
		require.True(t, c.putOff(&at))
		first := at
		for range mostDebt / foundWorth {
			require.NotZero(t, c.until())
			c.earn()
		}
		require.Zero(t, c.until())
		c.among(20)
		for range 2 * mostCredit {
			c.spend()
		}
		c.earn()
		require.Equal(t, mostDebt-40*spendPause, time.Until(c.until()), "each of twenty is told, and one finds it")
		c.among(2)
		for !c.until().IsZero() {
			c.earn()
		}
		require.True(t, c.putOff(&at), "it is put off already")
		require.Equal(t, first, at)
		c.earn()
		time.Sleep(24 * time.Hour)
		for range mostCredit {
			c.spend()
		}
		require.Zero(t, c.until())
		c.spend()
		require.NotZero(t, c.until(), "there is no more than the most of it")
	})
}

// Invariant (3) for lanes, and the promise.
func TestTrust_StrangerNotifiesAllTheTime_FewLookAndNoDueItemWaitsLong(t *testing.T) {
	t.Parallel()
	for seed := range virtualtime.Seeds(4) {
		virtualtime.Test(t, func(t *testing.T) {
			s := newSimulation(t, seed, &Config{AggressivePolicy: Never})
			s.stranger = true
			began := time.Now()
			s.run(200*time.Millisecond, nil, nil, []string{"blue"}, []string{"blue", "red"}, []string{"red"})
			stats := s.e.queueStats(Worker)
			require.Greater(t, s.events, 300)
			require.NotZero(t, stats.PutOff)
			finds := int64(0)
			for _, n := range stats.Finds {
				finds += n
			}
			most := mostCredit + int64(time.Since(began)/spendPause) + finds*int64(foundWorth/spendPause)
			require.Less(t, stats.Misses-stats.Tokens["chain"]-stats.Tokens["settle"]+stats.Polls, most)
		})
	}
}

// flood is somebody who knows how notifications look.
func (s *simulation) flood(ctx context.Context) {
	for ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		if s.e.epoch() == 0 {
			continue
		}
		s.e.heard(Worker, note{due: 1})
		s.e.heard(Worker, note{next: time.Now().Add(time.Duration(s.random(int(time.Second)))), namespace: []string{"", "red"}[s.random(2)]})
		for _, l := range s.e.waiters.lanes(Worker) {
			l.called(call{lane: l.id, standBy: s.random(2) == 0})
		}
	}
}

// floodLasts is for how long strangers notify, in virtual time: they send ten times as much as there is credit for.
const floodLasts = 10 * time.Second

func TestTrust_StrangerSaysThatInstancesChanged_FewReadsAndNoChangeIsMissed(t *testing.T) {
	for what, payload := range map[string]string{"instance": fmt.Sprintf("%016x", hashOf("i")), "any": "*"} {
		t.Run(what, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				w, f := testWaits(t, Config{}, true)
				f.known["i"] = 1
				out := waitFor(t.Context(), w, "i")
				synctest.Wait()
				before := f.count()
				for began := time.Now(); time.Since(began) < floodLasts; time.Sleep(time.Millisecond) {
					w.heard(payload)
				}
				synctest.Wait()
				require.InDelta(t, mostCredit+int(floodLasts/spendPause), f.count()-before, 2)

				f.end("i")
				began := time.Now()
				w.heard(payload)
				require.NoError(t, <-out)
				require.LessOrEqual(t, time.Since(began), spendPause)

				// Whoever comes is answered at once.
				f.end("j")
				w.heard(payload)
				began = time.Now()
				require.NoError(t, <-waitFor(t.Context(), w, "j"))
				require.Zero(t, time.Since(began))
			})
		})
	}
}

func TestTrust_StrangerNotifiesATopic_FewTokensAndOneForTheLast(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w, _ := testWaits(t, Config{}, true)
		x := &Watch{of: w, Interval: time.Hour, hash: hashOf("topic"), tokens: newBell(), late: time.NewTimer(24 * time.Hour)}
		require.NoError(t, w.watch(x))
		defer x.Close()
		tokens := 0
		for began := time.Now(); time.Since(began) < floodLasts; time.Sleep(time.Millisecond) {
			w.heard(fmt.Sprintf("%016x", x.hash))
			if x.tokens.silence() {
				tokens++
			}
		}
		require.InDelta(t, mostCredit+int(floodLasts/spendPause), tokens, 2)
		x.tokens.silence()
		w.heard("*")
		select {
		case <-x.tokens:
		case <-time.After(2 * spendPause):
			require.Fail(t, "no token")
		}
	})
}

// Many nodes that begin to listen at the same time, as after a deployment, are answered by one statement.
func TestTrust_ManyNodesJoinAtOnce_IsOneAnswer(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		e.leases.heard(Worker, time.Now().Add(time.Second))
		for range 5 * mostCredit {
			e.heard(Worker, joined)
		}
		require.Zero(t, e.trust.until())
		require.True(t, e.coalescer.bell.silence())

		e.coalescer.pending = pending{} // it was said
		for range 2 * mostCredit {
			e.trust.spend()
		}
		e.heard(Worker, joined)
		require.False(t, e.coalescer.bell.silence(), "without credit it waits")
		time.Sleep(mostDebt)
		e.timer.fire()
		require.True(t, e.coalescer.bell.silence())
		require.NotNil(t, e.coalescer.pending.notes[Worker])
	})
}

// floodFor has a stranger notify each millisecond, and requires that this leads to no more statements than there is credit for.
func floodFor(t *testing.T, notify func(), statements func() int64) {
	t.Helper()
	for began := time.Now(); time.Since(began) < floodLasts; time.Sleep(time.Millisecond) {
		notify()
	}
	require.InDelta(t, mostCredit+int64(floodLasts/spendPause), statements(), 2)
}

// Each is a statement of the coalescer's.
func TestTrust_NodeIsCalledAndNobodyIsThere_FewArePassedOn(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		l, err := e.waiters.enter(Worker, filter{})
		require.NoError(t, err)
		l.leave(true)
		floodFor(t, func() {
			e.called(Worker, call{lane: l.id})
			e.timer.fire()
		}, l.stats.passedOn.Load)
	})
}

func TestTrust_LaneIsCalledThatIsGone_FewAnswers(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		said := int64(0)
		floodFor(t, func() {
			e.called(Worker, call{lane: 1, namespace: "n"})
			e.timer.fire()
			if c := e.coalescer; c.bell.silence() {
				require.NotNil(t, c.pending.notes[Worker])
				c.pending, c.answerAt = pending{}, time.Time{} // it was said
				said++
			}
		}, func() int64 { return said })
	})
}

// The lanes look together, and by themselves if that has no answer.
func TestTrust_PutOffInSeveralLanesAndThePollHangs_EachLooks(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		const lanes = 3
		e := testEngine(t, Config{})
		e.alarms[Worker].look = func(ctx context.Context, _ []string, _ func(int, report)) error {
			<-ctx.Done()
			return ctx.Err()
		}
		var looked atomic.Int64
		for i := range lanes {
			l, err := e.waiters.enter(Worker, filter{Namespaces: []string{fmt.Sprint("n", i)}})
			require.NoError(t, err)
			go func() {
				if t, err := l.park(t.Context(), nil); err == nil && t.reason == WakeNotify {
					looked.Add(1)
				}
			}()
		}
		synctest.Wait()
		e.group.Go("timer", e.timer.run)
		e.group.Go("alarm", e.alarms[Worker].run)
		for e.trust.until().IsZero() {
			e.trust.spend()
		}
		e.heard(Worker, note{due: 1})
		synctest.Wait()
		require.Zero(t, looked.Load())
		time.Sleep(spendPause + instantPatience + lanes*lanePatience)
		synctest.Wait()
		require.EqualValues(t, lanes, looked.Load())
		e.waiters.close()
		e.stop()
		e.group.Wait()
	})
}

// stranger is a role that may connect to the database, and nothing else.
func stranger(t *testing.T) *pgx.Conn {
	t.Helper()
	conn := plain(t, "public")
	role := testdb.Schema(t) + "_stranger"
	mustExec(t, conn, `CREATE ROLE `+role)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP ROLE `+role) })
	mustExec(t, conn, `SET SESSION AUTHORIZATION `+role)
	return conn
}

// target is a node of which everything waits that can be called, with no credit left.
type target struct {
	*Provider
	sent  *sentStatements
	works chan *ClaimedWorkItem // what its dispatchers fetch
}

const targetDispatchers = 4

func newTarget(t *testing.T, schema string) *target {
	t.Helper()
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	x := &target{sent: &sentStatements{}, works: make(chan *ClaimedWorkItem, 1)}
	config.ConnConfig.Tracer = x.sent
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	x.Provider, err = New(t.Context(), pool, &Config{Schema: schema, Logger: silent, NotifyDeliveryTimeout: patient, FallbackInterval: time.Hour})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close(context.Background())) })

	ctx, end := context.WithCancel(t.Context())
	var all sync.WaitGroup
	t.Cleanup(func() { end(); all.Wait() })
	for range targetDispatchers {
		all.Go(func() {
			for ctx.Err() == nil {
				if item, err := x.FetchWorkItem(ctx, longPoll); err == nil {
					x.works <- item
				}
			}
		})
		all.Go(func() { _, _ = x.FetchOrchestrationItem(ctx, longPoll) })
	}
	awaitParked(t, x.Provider, Worker, targetDispatchers)
	awaitParked(t, x.Provider, Orchestrator, targetDispatchers)
	_, err = x.FetchWorkItem(ctx, &FetchOptions{NoWait: true, Namespaces: []string{"nobody"}}) // a lane in which nobody is
	require.ErrorIs(t, err, ErrNoWork)
	all.Go(func() { _, _ = x.WaitForInstance(ctx, "i") })
	watch, err := x.Watch(ctx, WatchOptions{Topic: "weather", Beat: "node_listens"})
	require.NoError(t, err)
	t.Cleanup(watch.Close)
	all.Go(func() {
		for ctx.Err() == nil {
			select {
			case <-watch.C:
				x.sent.Add(1) // what a layer would do
			case <-ctx.Done():
			}
		}
	})
	x.engine.leases.heard(Worker, time.Now().Add(time.Hour)) // what nodes that join are told of
	eventually(t, "it waits", func() bool { return x.Stats().Waits == 1 && x.Stats().WaitReads > 0 })
	for x.engine.trust.until().IsZero() {
		x.engine.trust.spend()
	}
	return x
}

// lane returns the id of the lane of work items for as many namespaces; 0 is any.
func (x *target) lane(namespaces int) int32 {
	for _, l := range x.engine.waiters.lanes(Worker) {
		if len(l.filter.Namespaces) == namespaces {
			return l.id
		}
	}
	return 0
}

// heardAll waits until the node has taken in whatever was notified before: the server sends that ahead of the end of a statement.
func (x *target) heardAll(t *testing.T) {
	t.Helper()
	var one any
	require.NoError(t, x.engine.listener.exec(t.Context(), &one, `SELECT 1`))
}

// A query for work takes so many statements at most, with its transaction; and so many are made because of one item that is found.
const (
	statementsOfLook = 5
	statementsOfFind = 20
)

func TestTrust_StrangerFloodsANode_StatementsAreBoundedAndWorkIsFound(t *testing.T) {
	owner := testProvider(t, Config{Mode: ModeDisabled})
	schema := owner.cfg.Schema
	require.NoError(t, owner.RegisterNamespace(t.Context(), "nobody"))
	producer, hostile := plain(t, schema), stranger(t)
	channel := func(sql string, args ...any) (name string) {
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT `+sql, args...).Scan(&name))
		return name
	}
	queue, instances := channel(`channel('worker')`), channel(`channel('instance')`)
	transactions, each := testsize.Of(200, 400), 5
	if os.Getenv("PGWAKE_STRESS") != "" {
		transactions, each = 2500, 20
	}
	hash := func(instance string) string {
		return fmt.Sprintf("repeat('0', (i %% 50)::integer) || '%016x'", hashOf(instance))
	}
	const later = ` || (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + i * 1000 || `
	for what, c := range map[string]struct {
		own      bool // channel of the node
		channel  string
		payload  string // SQL, by the number i, which no other has; %d is the lane
		nobody   bool   // it is that in which nobody is
		costs    int64  // statements each time that it is answered
		unlisted bool
	}{
		"due":                    {channel: queue, payload: `'1 0 default ' || i`, costs: statementsOfLook},
		"due anywhere":           {channel: queue, payload: `'1 0 * ' || i`, costs: statementsOfLook},
		"later":                  {channel: queue, payload: `'0 '` + later + `' default ' || i`, costs: statementsOfLook},
		"later anywhere":         {channel: queue, payload: `'0 '` + later + `' * ' || i`, costs: statementsOfLook},
		"unreadable":             {channel: queue, payload: `i || repeat('x', 7900)`, costs: statementsOfLook},
		"joined":                 {channel: queue, payload: `'0 0 * ' || i`, costs: 1},
		"called":                 {own: true, payload: `'%d 0 0 default ' || i`, costs: statementsOfLook},
		"called to stand by":     {own: true, payload: `'%d 0 1 default ' || i`, costs: statementsOfLook},
		"called, nobody there":   {own: true, nobody: true, payload: `'%d 0 0 nobody ' || i`, costs: 1},
		"called, none was there": {own: true, nobody: true, payload: `'%d 9 0 nobody ' || i`, costs: statementsOfLook + 1},
		"called, lane retired":   {own: true, payload: `'99999%d 0 0 default ' || i`, costs: statementsOfLook + 1},
		"called unreadably":      {own: true, payload: `i || repeat('x', 7900)`, costs: statementsOfLook + 1},
		"instance":               {channel: instances, payload: hash("i"), costs: 1},
		"any instance":           {channel: instances, payload: `i || repeat('x', 7900)`, costs: 1},
		"topic":                  {channel: instances, payload: hash("weather"), costs: 1},
		"question":               {channel: instances, payload: `'` + askPrefix + replyPrefix + `' || i`, costs: 1},
	} {
		t.Run(what, func(t *testing.T) {
			x := newTarget(t, schema)
			if c.own {
				c.channel = channel(`node_channel('worker', $1)`, x.engine.node)
			}
			if strings.Contains(c.payload, "%d") {
				namespaces := 0
				if c.nobody {
					namespaces = 1
				}
				c.payload = fmt.Sprintf(c.payload, x.lane(namespaces))
			}
			sent, began := x.sent.Load(), time.Now()
			for n := range transactions {
				mustExec(t, hostile, `SELECT pg_notify($1, `+c.payload+`) FROM generate_series($2::bigint + 1, $2::bigint + $3) AS i`, c.channel, n*each, each)
				if n == transactions/2 {
					mustExec(t, producer, `SELECT enqueue_work('work')`)
				}
			}
			x.heardAll(t)
			select {
			case item := <-x.works:
				require.Equal(t, "work", item.Name)
			case <-time.After(patient):
				require.Fail(t, "a wake-up was lost")
			}
			looks := int64(time.Since(began)/spendPause) + int64(foundWorth/spendPause) + 2
			sent = x.sent.Load() - sent
			t.Logf("%d notifications in %v: %d statements", transactions*each, time.Since(began), sent)
			require.LessOrEqual(t, sent, looks*c.costs+statementsOfFind)
			requireNoSafetyNet(t, x.Provider)
		})
	}
}

// What comes while a statement is under way on the LISTEN connection is not kept.
func TestListener_FloodDuringAStatement_TakesNoMemory(t *testing.T) {
	p := testProvider(t, Config{})
	hostile, producer := stranger(t), plain(t, p.cfg.Schema)
	const notifications, size = 5_000, 7_900
	before := heap()
	asleep := make(chan error, 1)
	go func() {
		var void any
		asleep <- p.engine.listener.exec(t.Context(), &void, `SELECT pg_sleep(0.5)`)
	}()
	channel := channelOf(t, p, Worker)
	mustExec(t, hostile, `SELECT pg_notify($1, i || repeat('x', $3 - 20)) FROM generate_series(1, $2::bigint) AS i`, channel, notifications, size)
	require.NoError(t, <-asleep)
	eventually(t, "it has heard them", func() bool { return p.Stats().Worker.Notifications >= notifications })
	require.Less(t, heap()-before, int64(notifications*size/4))

	wait := fetchWork(t, p, longPoll)
	mustExec(t, producer, `SELECT enqueue_work('work')`)
	require.Equal(t, "work", get(t, wait).item.Name)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// The same holds for whoever observes: while a statement of his waits for a lock, he is told more than he can take in.
func TestObserve_FloodDuringAStatement_TakesNoMemory(t *testing.T) {
	p := testProvider(t, Config{})
	hostile, blocker, producer := stranger(t), plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	const notifications, size = 5_000, 7_900
	channel := channelOf(t, p, Worker)
	ctx, end := context.WithCancel(t.Context())
	hears, told, goOn, over := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		for what, err := range p.Observe(ctx) {
			switch {
			case err != nil:
				t.Error(err)
				return
			case what.For == afterHearing:
				hears <- struct{}{}
			case what.For > 0 && ctx.Err() == nil:
				select {
				case told <- struct{}{}:
					<-goOn
				case <-ctx.Done():
				}
			}
		}
	}()
	await := func(c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(patient):
			require.Fail(t, "it says nothing")
		}
	}
	defer func() { end(); await(over) }()
	await(hears)
	before := heap()
	mustExec(t, hostile, `BEGIN`) // nothing waits for it yet: the statement that is to has no longer than the LISTEN connection has
	mustExec(t, hostile, `SELECT pg_notify($1, i || repeat('x', $3 - 20)) FROM generate_series(1, $2::bigint) AS i`, channel, notifications, size)
	mustExec(t, blocker, `BEGIN; LOCK TABLE waiters`)
	mustExec(t, producer, `SELECT pg_notify($1, 'x')`, channel)
	await(told)
	goOn <- struct{}{} // and it says that it need not be told for a while
	eventually(t, "its statement waits for the lock", func() bool {
		waits := false
		require.NoError(t, blocker.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'waiters'::regclass)`).Scan(&waits))
		return waits
	})
	mustExec(t, hostile, `COMMIT`)
	mustExec(t, blocker, `COMMIT`)
	await(told)
	require.Less(t, heap()-before, int64(notifications*size/4))
	end()
	goOn <- struct{}{}
}

// What producers do pays for itself: of many items, of all kinds, on several nodes, no wake-up is put off.
func TestTrust_ManyProducersAndNodes_NothingIsPutOff(t *testing.T) {
	const nodes = 12
	items := testsize.Of(40, 80)
	for how, notify := range map[string]NotifyPolicy{"directed": NotifyDirected, "broadcast": NotifyBroadcast} {
		t.Run(how, func(t *testing.T) {
			var all []*Provider
			var working sync.WaitGroup
			ctx, end := context.WithCancel(t.Context())
			defer working.Wait()
			defer end()
			var schema string
			done := make(chan string, 3*items)
			for range nodes {
				p := testProvider(t, Config{Schema: schema, Notify: notify, FallbackInterval: 500 * time.Millisecond})
				schema = p.cfg.Schema
				all = append(all, p)
				for range 2 {
					working.Go(func() {
						for ctx.Err() == nil {
							item, err := p.FetchWorkItem(ctx, longPoll)
							if err == nil && p.AckWorkItem(ctx, item.LockToken, nil) == nil {
								done <- item.Name
							}
						}
					})
				}
			}
			for _, p := range all {
				awaitParked(t, p, Worker, 2)
				eventually(t, "it knows how many there are", func() bool {
					p.engine.trust.mu.Lock()
					defer p.engine.trust.mu.Unlock()
					return p.engine.trust.nodes == nodes
				})
			}
			for _, p := range all {
				for p.engine.trust.until().IsZero() {
					p.engine.trust.spend()
				}
				for range 3 { // the rest they have to earn
					p.engine.trust.earn()
				}
			}
			producer := plain(t, schema)
			for range items {
				mustExec(t, producer, `SELECT enqueue_work('sql')`)
				_, err := all[0].EnqueueForWorker(ctx, WorkItem{Name: "library"}, nil)
				require.NoError(t, err)
				_, err = all[1].EnqueueForWorker(ctx, WorkItem{Name: "timer"}, &EnqueueOptions{Delay: 50 * time.Millisecond})
				require.NoError(t, err)
			}
			for range 3 * items {
				select {
				case <-done:
				case <-time.After(patient):
					require.Fail(t, "an item is left")
				}
			}
			for _, p := range all {
				require.Zero(t, p.Stats().Worker.PutOff)
				require.Zero(t, p.engine.trust.until())
			}
		})
	}
}

// However many nodes wait, an item costs the query that finds it and the next one of that dispatcher, and hardly more.
func TestDirected_ManyNodesWait_ItemCostsFewQueries(t *testing.T) {
	const nodes, items = 12, 60
	var all []*Provider
	var working sync.WaitGroup
	ctx, end := context.WithCancel(t.Context())
	defer working.Wait()
	defer end()
	var schema string
	done := make(chan struct{}, items)
	for range nodes {
		p := testProvider(t, Config{Schema: schema})
		schema = p.cfg.Schema
		all = append(all, p)
		working.Go(func() {
			for ctx.Err() == nil {
				item, err := p.FetchWorkItem(ctx, &FetchOptions{PollTimeout: time.Minute, LockTimeout: time.Hour}) // at the end of a lease all look
				if err == nil && p.AckWorkItem(ctx, item.LockToken, nil) == nil {
					done <- struct{}{}
				}
			}
		})
	}
	looks := func() (sum int64) {
		for _, p := range all {
			s := p.Stats().Worker
			sum += s.Looks + s.Polls - s.Tokens["scout"] // who looks before a claim has ended, which may take long, sees a row that is locked, and looks again
		}
		return sum
	}
	for _, p := range all {
		awaitParked(t, p, Worker, 1)
		eventually(t, "it is settled", func() bool { return p.Stats().Worker.Settled })
	}
	producer, before := plain(t, schema), looks()
	for range items {
		mustExec(t, producer, `SELECT enqueue_work('work')`)
		select {
		case <-done:
		case <-time.After(patient):
			require.Fail(t, "an item is left")
		}
	}
	t.Logf("%d nodes: %.2f queries per item", nodes, float64(looks()-before)/items)
	require.Less(t, looks()-before, int64(4*items))
}

// What a node alone was told of is passed on, also if that was put off together with what all know of.
func TestTrust_PutOffAndBusy_IsPassedOn(t *testing.T) {
	busy, idle, wait, producer := busyAndIdle(t, Config{})
	spend := func() {
		for range 2 * mostCredit {
			busy.engine.trust.spend()
		}
	}
	spend()
	busy.engine.heard(Worker, note{due: 1})
	silently(t, producer, `SELECT enqueue_work('work')`)
	spend() // some of it may have been paid back
	callAlone(t, producer, busy, theLane(busy).id, 0)
	require.Equal(t, "work", get(t, wait).item.Name)
	require.EqualValues(t, 2, busy.Stats().Worker.PutOff)
	require.EqualValues(t, 1, busy.Stats().Worker.PassedOn)
	require.EqualValues(t, 1, idle.Stats().Worker.Finds["notify"])
}
