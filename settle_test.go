package pgwake

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// unsettledLane is a lane of one dispatcher, inside a fetch.
func unsettledLane() *lane {
	l := newLane(Worker, filter{}, time.Now, func() {}, &queueStats{})
	l.id, l.quietAbove, l.settler, l.overheard = 1, 200, newSettler(nil, Worker), func() {}
	l.enter()
	return l
}

// lookOf makes a look that has its say at once.
func lookOf(l *lane, found int) look {
	k := l.beginLook(session{epoch: 1, node: 7})
	l.endLook(k, report{now: time.Now(), found: found}, nil, 1)
	return k
}

func TestSettle_EmptyAnswer_IsGoodOnlyOnceTheLaneHasSettled(t *testing.T) {
	l := unsettledLane()
	k := lookOf(l, 0)
	require.Equal(t, rowWrite{node: 7, lane: 1, number: 1, places: 1}, k.row)
	require.False(t, l.isEmpty(true, 0))
	l.settleSince(l.disarms)
	require.Len(t, l.tokens, 1, "somebody looks once more")
	require.Zero(t, lookOf(l, 0).row, "the row says what it should")
	require.True(t, l.isEmpty(true, 0))
	require.Empty(t, l.tokens)
}

// A look that was slow, and began before, makes nothing of it undone.
func TestSettle_SlowLookFromBefore_LeavesTheLaneEmpty(t *testing.T) {
	l := unsettledLane()
	slow := l.beginLook(session{epoch: 1})
	lookOf(l, 0)
	l.settleSince(l.disarms)
	lookOf(l, 0)
	l.endLook(slow, report{now: time.Now()}, nil, 1)
	require.True(t, l.isEmpty(true, 0))
}

func TestSettle_LaneDisarmsMeanwhile_IsNotSettled(t *testing.T) {
	l := unsettledLane()
	lookOf(l, 0)
	since := l.disarms
	for range hotStreak {
		require.False(t, lookOf(l, 1).row.disarm)
	}
	require.True(t, lookOf(l, 1).row.disarm, "it is hot")
	l.settleSince(since)
	require.False(t, l.arming.settled)
	require.Empty(t, l.tokens)
	require.Equal(t, int64(hotStreak+3), lookOf(l, 0).row.number, "the next look arms it again")
}

func TestSettle_SomebodyElseIsHere_NoDisarming(t *testing.T) {
	l := unsettledLane()
	lookOf(l, 0)
	l.settleSince(l.disarms)
	l.enter()
	for range 2 * hotStreak {
		require.Zero(t, lookOf(l, 1).row)
	}
	l.leave(true)
	require.True(t, lookOf(l, 1).row.disarm)
	require.False(t, lookOf(l, 1).row.disarm, "not twice in a second")
}

func TestSettle_LostConnection_MakesTheRowVoid(t *testing.T) {
	l := unsettledLane()
	k := l.beginLook(session{epoch: 1})
	l.forget()
	l.endLook(k, report{now: time.Now()}, nil, 2)
	require.False(t, l.settling, "what it wrote was the other connection's")
	require.Zero(t, l.beginLook(session{}).row, "without a connection there is no row")
	require.NotZero(t, l.beginLook(session{epoch: 2}).row)
}

// Who has read the session, and then waited for a processor while the connection was made anew, has the key of the one that is gone.
func TestSettle_SessionWasReadBeforeTheConnectionWasLost_WritesNothing(t *testing.T) {
	l := unsettledLane()
	require.NotZero(t, l.beginLook(session{epoch: 1}).row)
	l.forget()
	k := l.beginLook(session{epoch: 2})
	require.NotZero(t, k.row)
	require.Zero(t, l.beginLook(session{epoch: 1}).row)
	l.endLook(k, report{now: time.Now()}, nil, 2)
	require.True(t, l.settling, "what the other one was to write is not written")
}

// A write that began earlier and comes later changes nothing.
func TestArm_LateWrite_ChangesNothing(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	armed := func() (armed bool) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT somebody_waits('worker')`).Scan(&armed))
		return armed
	}
	arm := func(number int, armed bool) {
		mustExec(t, conn, `SELECT arm(1, 1, 1, 'worker', $1, $2, NULL, NULL, 2, 1)`, number, armed)
	}
	arm(2, true)
	arm(1, false)
	require.True(t, armed())
	arm(3, false)
	require.False(t, armed())
	require.False(t, func() (armed bool) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT somebody_waits('orchestrator')`).Scan(&armed))
		return armed
	}())
}

// A lane that comes while the fallback is on its way is no lane that has retired.
func TestLook_RowsOfLanesThatRetired_Go(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	for lane := range 3 {
		mustExec(t, conn, `SELECT arm(1, $1, 1, 'worker', 1, true, NULL, NULL, 2, 1)`, lane+1)
	}
	mustExec(t, conn, `SELECT look('{}', '{}', 1, '{1}', 2)`)
	rows, err := conn.Query(t.Context(), `SELECT lane FROM waiters WHERE node = 1 ORDER BY lane`)
	require.NoError(t, err)
	lanes, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	require.Equal(t, []int{1, 3}, lanes)
}

// A disarm of which the answer is late says nothing about a row that was armed since.
func TestSettle_SlowFindThatDisarms_LeavesTheRowThatIsArmedSince(t *testing.T) {
	l := unsettledLane()
	lookOf(l, 0)
	l.settleSince(l.disarms)
	for range hotStreak {
		lookOf(l, 1)
	}
	slow := l.beginLook(session{epoch: 1, node: 7})
	require.True(t, slow.row.disarm)
	lookOf(l, 0)
	l.endLook(slow, report{now: time.Now(), found: 1}, nil, 1)
	require.True(t, l.armed)
}

// notifications counts those of a queue, to all nodes and to this one, that a connection hears while produce runs.
func notifications(t *testing.T, p *Provider, q Queue, produce func()) (heard int) {
	t.Helper()
	ear := plain(t, p.cfg.Schema)
	mustExec(t, ear, "LISTEN "+channelOf(t, p, q))
	mustExec(t, ear, "LISTEN "+quoted(fmt.Sprintf("%s_%d", channelOf(t, p, q), p.engine.node)))
	produce()
	mustExec(t, plain(t, p.cfg.Schema), `SELECT pg_notify($1, 'end ' || (extract(epoch FROM now()) * 1000000)::bigint)`, channelOf(t, p, q))
	for {
		_, payload := hear(t, ear)
		switch payload {
		case "end":
			return heard
		case "0 0 *": // somebody's greeting
		default:
			heard++
		}
	}
}

// While everybody is busy nobody is notified, and whoever comes back finds all of it.
func TestQuiescent_AllDispatchersBusy_ProducersAreSilent(t *testing.T) {
	// Its goroutines panic on the way.
	bombs := map[string]*atomic.Bool{"settler": new(atomic.Bool), "disarmer": new(atomic.Bool)}
	p := testProvider(t, Config{QuietAbove: 1, fault: func(at string) {
		if bomb := bombs[at]; bomb != nil && bomb.CompareAndSwap(true, false) {
			panic("injected")
		}
	}})
	for _, bomb := range bombs {
		bomb.Store(true)
	}
	producer := plain(t, p.cfg.Schema)
	insert := func() { mustExec(t, producer, `SELECT enqueue_work('a')`) }
	wait := fetchWork(t, p, longPoll)
	eventually(t, "it says that it waits", func() (armed bool) { // which it cannot before it listens
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT somebody_waits('worker')`).Scan(&armed))
		return armed
	})
	awaitParked(t, p, Worker, 1)
	require.NotZero(t, notifications(t, p, Worker, insert), "somebody waits")
	get(t, wait)
	// They are in handlers now, and nobody takes what is notified. What the settler that panicked takes up again has producers be unsure
	// meanwhile, so that they notify.
	inserted := 0
	eventually(t, "it is quiet", func() bool {
		return notifications(t, p, Worker, func() {
			for range 50 {
				insert()
				inserted++
			}
		}) == 0
	})
	for range inserted {
		get(t, fetchWork(t, p, longPoll))
	}
	eventually(t, "all is well", func() bool { return p.Stats().Panics == 2 && p.Health().OK })
	requireNoSafetyNet(t, p)
}

// Whoever cannot know whether somebody waits notifies.
func TestQuiescent_ProducerThatCannotBeSure_Notifies(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	require.Zero(t, notifications(t, p, Worker, func() { mustExec(t, producer, `SELECT enqueue_work('a')`) }))
	for _, isolation := range []string{"REPEATABLE READ", "SERIALIZABLE"} {
		require.Equal(t, 1, notifications(t, p, Worker, func() {
			mustExec(t, producer, `BEGIN ISOLATION LEVEL `+isolation)
			mustExec(t, producer, `SELECT enqueue_work('a')`)
			mustExec(t, producer, `COMMIT`)
		}), isolation)
	}
	// Somebody waits for those that are open, and not for those that come.
	open := plain(t, p.cfg.Schema)
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT enqueue_work('a')`)
	settling := make(chan error, 1)
	settler := plain(t, p.cfg.Schema)
	go func() {
		_, err := settler.Exec(context.WithoutCancel(t.Context()), `SELECT wait_for_producers('worker', '1 min')`)
		settling <- err
	}()
	eventually(t, "it waits", func() (waits bool) {
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)`,
			settler.PgConn().PID()).Scan(&waits))
		return waits
	})
	require.Equal(t, 1, notifications(t, p, Worker, func() { mustExec(t, producer, `SELECT enqueue_work('a')`) }))
	require.Zero(t, notifications(t, p, Orchestrator, func() { mustExec(t, producer, `SELECT enqueue_message('i', 'k')`) }), "the other queue")
	mustExec(t, open, `ROLLBACK`)
	require.NoError(t, <-settling)
}

// Hole 12, the other side: a producer that saw nobody waiting commits when somebody does.
func TestSettle_SilentProducerCommitsLate_IsFound(t *testing.T) {
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: time.Hour})
	var open []*pgx.Conn
	for range 2 {
		conn := plain(t, p.cfg.Schema)
		mustExec(t, conn, `BEGIN`)
		mustExec(t, conn, `SELECT enqueue_work('silent')`)
		open = append(open, conn)
	}
	first := fetchWork(t, p, longPoll)
	eventually(t, "it waits", func() bool { return p.engine.waiters.parked(Worker) == 1 })
	// One of two: nothing but a look every now and then finds it, since the other one keeps the lane from settling.
	mustExec(t, open[0], `COMMIT`)
	get(t, first)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["scout"])
	// The last one ends the wait.
	second := fetchWork(t, p, longPoll)
	eventually(t, "health says why", func() bool { return !p.Health().OK })
	require.Contains(t, fmt.Sprint(p.Health().Problems), "open transactions have added to the worker queue")
	eventually(t, "nobody looks any more", func() bool {
		l := p.engine.waiters.lanes(Worker)[0]
		l.mu.Lock()
		defer l.mu.Unlock()
		return !l.lastOne.IsZero() && l.scoutAt.IsZero() && len(l.waiting) == 1
	})
	mustExec(t, open[1], `COMMIT`)
	get(t, second)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["settle"])
	eventually(t, "it is well again", func() bool { return p.Health().OK })
}

// A transaction that is prepared belongs to no session, and cannot notify.
func TestSettle_PreparedTransaction_IsWaitedForOrLeftToTheFallback(t *testing.T) {
	start := func(fallback time.Duration) (p *Provider, prepare func(name, notify string) error, commit func()) {
		p = testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: fallback})
		producer := plain(t, p.cfg.Schema)
		var most int
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT current_setting('max_prepared_transactions')::int`).Scan(&most))
		if most == 0 {
			t.Skip("the server has max_prepared_transactions = 0")
		}
		return p, func(name, notify string) error {
			mustExec(t, producer, `BEGIN`)
			mustExec(t, producer, `SELECT set_config('pgwake.notify', $1, true), enqueue_work($2)`, notify, name)
			_, err := producer.Exec(t.Context(), `PREPARE TRANSACTION '`+p.cfg.Schema+`'`)
			return err
		}, func() { mustExec(t, producer, `COMMIT PREPARED '`+p.cfg.Schema+`'`) }
	}

	p, prepare, commit := start(time.Hour)
	require.NoError(t, prepare("silent, since nobody waits", "on"))
	wait := fetchWork(t, p, longPoll)
	eventually(t, "it waits for it", func() bool { return !p.Health().OK })
	require.Contains(t, fmt.Sprint(p.Health().Problems), "process ids [0]")
	commit()
	get(t, wait)
	finds := p.Stats().Worker.Finds
	require.EqualValues(t, 1, finds["settle"]+finds["scout"], "a scout may fall between the commit and who learns of it: %v", finds)

	p, prepare, commit = start(200 * time.Millisecond)
	wait = fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	require.ErrorContains(t, prepare("notifies", "on"), "NOTIFY")
	require.NoError(t, prepare("silenced", "off"))
	commit()
	require.Equal(t, "silenced", get(t, wait).item.Name)
	finds = p.Stats().Worker.Finds
	require.EqualValues(t, 1, finds["fallback"]+finds["settle"]+finds["scout"], "a fallback that falls between the two waits for the transaction: %v", finds)
}

// The first item of a namespace would notify as well.
func TestSettle_PreparedTransaction_AddsANamespace_WhichTheFallbackFinds(t *testing.T) {
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: 200 * time.Millisecond})
	producer := plain(t, p.cfg.Schema)
	var most int
	require.NoError(t, producer.QueryRow(t.Context(), `SELECT current_setting('max_prepared_transactions')::int`).Scan(&most))
	if most == 0 {
		t.Skip("the server has max_prepared_transactions = 0")
	}
	known := []string{DefaultNamespace}
	for namespace, add := range map[string]string{
		"work":    `SELECT enqueue_work('x', p_namespace => 'work')`,
		"batch":   `SELECT * FROM enqueue_work_many('{x}', NULL, '{batch}', p_quiet => true)`,
		"message": `SELECT enqueue_message('i', 'k', p_namespace => 'message')`,
		"nothing": `SELECT register_namespace('nothing')`,
	} {
		prepare := func(before string) error {
			mustExec(t, producer, `BEGIN`)
			mustExec(t, producer, before)
			mustExec(t, producer, add)
			_, err := producer.Exec(t.Context(), `PREPARE TRANSACTION '`+p.cfg.Schema+`'`)
			return err
		}
		require.ErrorContains(t, prepare(`SELECT 'loud'`), "NOTIFY", namespace)
		reads := p.Stats().WaitReads
		added := make(chan []string, 1)
		go func() {
			names, err := p.WaitForNamespaces(t.Context(), known)
			assert.NoError(t, err)
			added <- names
		}()
		eventually(t, "it waits", func() bool { return p.Stats().WaitReads > reads })
		require.NoError(t, prepare(`SET LOCAL pgwake.notify = off`), namespace)
		mustExec(t, producer, `COMMIT PREPARED '`+p.cfg.Schema+`'`)
		select {
		case names := <-added:
			require.Equal(t, []string{namespace}, names)
		case <-time.After(patient):
			require.Fail(t, "the fallback has not found it", namespace)
		}
		known = append(known, namespace)
	}
}

// While somebody waits for a producer nobody is silent. So that ends when the lane is busy again.
func TestSettle_LaneIsBusyAgain_WaitsForNobody(t *testing.T) {
	p := testProvider(t, Config{QuietAbove: 1, AggressivePolicy: Never, FallbackInterval: time.Hour})
	open, producer := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	forLong := &FetchOptions{PollTimeout: time.Minute, LockTimeout: time.Hour} // nothing is to come again
	insert := func() { mustExec(t, producer, `SELECT enqueue_work('a')`) }
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT enqueue_work('open')`)
	wait := fetchWork(t, p, forLong)
	eventually(t, "it waits for long", func() bool { return !p.Health().OK })
	insert()
	get(t, wait)
	for range idleSignals { // nobody takes these, so the lane disarms
		insert()
	}
	eventually(t, "the wait is over", func() bool { return p.Health().OK })
	eventually(t, "nobody is told of more", func() bool { return notifications(t, p, Worker, insert) == 0 }) // it was well before it had disarmed
	// What was open is found all the same.
	for more := true; more; {
		d := <-fetchWork(t, p, &FetchOptions{NoWait: true, LockTimeout: time.Hour})
		more = d.err == nil
	}
	wait = fetchWork(t, p, forLong)
	eventually(t, "it waits for it again", func() bool { return !p.Health().OK })
	mustExec(t, open, `COMMIT`)
	require.Equal(t, "open", get(t, wait).item.Name)
	requireNoSafetyNet(t, p)
}

// patiences notes how long waits for producers may take.
type patiences struct{ got chan time.Duration }

func (p patiences) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "wait_for_producers") {
		select {
		case p.got <- q.Args[1].(time.Duration):
		default:
		}
	}
	return ctx
}

func (p patiences) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// An item that is notified meanwhile is not to wait for the connection.
func TestSettle_LastConnectionOfThePool_IsNotKept(t *testing.T) {
	schema := testProvider(t, Config{}).cfg.Schema
	for connections, patience := range map[int32]time.Duration{1: producersPatience, 4: settlePatience} {
		config, err := pgxpool.ParseConfig(testdb.URL(t))
		require.NoError(t, err)
		asked := patiences{make(chan time.Duration, 1)}
		config.MaxConns, config.ConnConfig.Tracer = connections, asked
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		p, err := New(t.Context(), pool, &Config{Schema: schema, Logger: silent})
		require.NoError(t, err)
		_, err = p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true})
		require.ErrorIs(t, err, ErrNoWork)
		require.Equal(t, patience, <-asked.got)
		require.NoError(t, p.Close(t.Context()))
	}
}

// The server lets it in and says nothing more.
func TestSettle_ConnectionForALongWaitGetsNoAnswer_IsMadeAnew(t *testing.T) {
	var deaf atomic.Bool
	tried := make(chan struct{}, 1)
	listen, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	listen.AfterConnect = func(ctx context.Context, _ *pgconn.PgConn) error {
		if !deaf.CompareAndSwap(true, false) {
			return nil
		}
		tried <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: time.Hour, ListenConfig: listen})
	open := plain(t, p.cfg.Schema)
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT enqueue_work('silent')`)
	deaf.Store(true)
	wait := fetchWork(t, p, longPoll)
	<-tried
	require.True(t, p.Health().OK)
	require.Eventually(t, func() bool { return !p.Health().OK }, 2*patient, time.Millisecond, "it waits for long")
	mustExec(t, open, `COMMIT`)
	require.Equal(t, "silent", get(t, wait).item.Name)
}

// A lane that is armed in the middle of a wait joins it: one producer that stays open costs it no polling, either.
func TestSettle_LaneIsNewWhileAnotherWaits_RestsAsWell(t *testing.T) {
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: time.Hour})
	open := plain(t, p.cfg.Schema)
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT enqueue_work('open', p_namespace => 'late')`)
	fetchWork(t, p, &FetchOptions{Namespaces: []string{"early"}, PollTimeout: time.Minute})
	eventually(t, "it waits for long", func() bool { return !p.Health().OK })
	late := fetchWork(t, p, &FetchOptions{Namespaces: []string{"late"}, PollTimeout: time.Minute})
	eventually(t, "both wait, and nobody looks any more", func() bool {
		resting := 0
		for _, l := range p.engine.waiters.lanes(Worker) {
			l.mu.Lock()
			if !l.lastOne.IsZero() && l.scoutAt.IsZero() && len(l.waiting) == 1 {
				resting++
			}
			l.mu.Unlock()
		}
		return resting == 2
	})
	mustExec(t, open, `COMMIT`)
	require.Equal(t, "open", get(t, late).item.Name)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["settle"])
}

// The fallback removes the rows of lanes that have retired. One that is new since it listed them has one all the same.
func TestSettle_LaneIsNewWhileTheFallbackLooks_KeepsItsRow(t *testing.T) {
	p := testProvider(t, Config{Mode: ModeEventDriven, AggressivePolicy: Never, FallbackInterval: 100 * time.Millisecond})
	producer := plain(t, p.cfg.Schema)
	fetchTurn(t, p, longPoll)
	eventually(t, "the lane for turns has settled", func() bool { return p.Stats().Orchestrator.Settled })
	mustExec(t, producer, `BEGIN`)
	mustExec(t, producer, `LOCK TABLE orchestrator_queue`)
	eventually(t, "the fallback has begun", func() (blocked bool) {
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)`,
			p.engine.listener.pid.Load()).Scan(&blocked))
		return blocked
	})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	fallbacks := p.Stats().Fallbacks
	mustExec(t, producer, `COMMIT`)
	eventually(t, "the fallback has ended", func() bool { return p.Stats().Fallbacks > fallbacks })
	mustExec(t, producer, `SELECT enqueue_work('work')`)
	require.Equal(t, "work", get(t, wait).item.Name)
}

func TestSettle_LastLaneHasRetired_ItsRowGoes(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: 100 * time.Millisecond})
	conn := plain(t, p.cfg.Schema)
	_, err := p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true})
	require.ErrorIs(t, err, ErrNoWork)
	rows := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM waiters WHERE lane > 0`).Scan(&n))
		return n
	}
	require.Equal(t, 1, rows())
	l := theLane(p)
	l.mu.Lock()
	l.idle = time.Time{}
	l.mu.Unlock()
	eventually(t, "its row goes", func() bool { return rows() == 0 })
}
