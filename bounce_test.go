package pgwake

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// silently adds what the statement adds, and tells nobody.
func silently(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	mustExec(t, conn, `SET pgwake.notify = off`)
	mustExec(t, conn, sql)
	mustExec(t, conn, `RESET pgwake.notify`)
}

// theLane is the one lane of the node for work items.
func theLane(p *Provider) *lane { return p.engine.waiters.lanes(Worker)[0] }

// callAlone notifies a lane of the node, and nobody else.
func callAlone(t *testing.T, conn *pgx.Conn, p *Provider, lane int32, hop int) {
	t.Helper()
	mustExec(t, conn, `SELECT pg_notify(node_channel('worker', $1), $2)`, p.engine.node, fmt.Sprintf("%d %d 0 default %d", lane, hop, time.Now().UnixMicro()))
}

// busyAndIdle are two nodes: the one dispatcher of the first is in a handler, that of the second waits.
func busyAndIdle(t *testing.T, cfg Config) (busy, idle *Provider, waits <-chan delivery, producer *pgx.Conn) {
	t.Helper()
	busy = testProvider(t, Config{})
	producer = plain(t, busy.cfg.Schema)
	wait := fetchWork(t, busy, longPoll)
	awaitParked(t, busy, Worker, 1)
	mustExec(t, producer, `SELECT enqueue_work('busy')`)
	require.Equal(t, "busy", get(t, wait).item.Name)
	cfg.Schema = busy.cfg.Schema
	idle = testProvider(t, cfg)
	waits = fetchWork(t, idle, longPoll)
	awaitParked(t, idle, Worker, 1)
	eventually(t, "they know of each other", func() bool { return !busy.engine.alone.Load() && !idle.engine.alone.Load() })
	return busy, idle, waits, producer
}

func TestBounce_NodeWasToldAloneAndIsBusy_PassesItOn(t *testing.T) {
	for hop, name := range []string{"to one", "to all"} {
		t.Run(name, func(t *testing.T) {
			busy, idle, wait, producer := busyAndIdle(t, Config{})
			silently(t, producer, `SELECT enqueue_work('work')`)
			callAlone(t, producer, busy, theLane(busy).id, hop)
			require.Equal(t, "work", get(t, wait).item.Name)
			require.EqualValues(t, 1, busy.Stats().Worker.PassedOn)
			require.EqualValues(t, 1, idle.Stats().Worker.Finds["notify"])
			require.Zero(t, idle.Stats().Worker.PassedOn)
		})
	}
}

// Another was faster.
func TestBounce_NothingIsDueAnyMore_NobodyIsCalled(t *testing.T) {
	busy, idle, wait, producer := busyAndIdle(t, Config{})
	looks := idle.Stats().Worker.Looks
	callAlone(t, producer, busy, theLane(busy).id, 0)
	eventually(t, "it is passed on", func() bool { return busy.Stats().Worker.PassedOn == 1 })
	require.NoError(t, busy.engine.coalescer.flush(t.Context()))
	mustExec(t, producer, `SELECT enqueue_work('end')`)
	get(t, wait)
	require.Equal(t, looks+1, idle.Stats().Worker.Looks)
}

// Also while somebody looks who wants to hear of everything: what a node says to all it does not hear itself.
func TestBounce_AnotherLaneOfTheNodeCanTakeIt_GetsIt(t *testing.T) {
	for name, observed := range map[string]bool{"alone": false, "observed": true} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, Config{})
			producer := plain(t, p.cfg.Schema)
			wait := fetchWork(t, p, longPoll)
			awaitParked(t, p, Worker, 1)
			mustExec(t, producer, `SELECT enqueue_work('busy')`)
			get(t, wait)
			busy := theLane(p).id
			other := fetchWork(t, p, &FetchOptions{Namespaces: []string{DefaultNamespace}, PollTimeout: time.Minute})
			awaitParked(t, p, Worker, 1)
			require.True(t, p.engine.alone.Load())
			mustExec(t, producer, `SELECT observe(1, $1)`, observed)
			silently(t, producer, `SELECT enqueue_work('work')`)
			callAlone(t, producer, p, busy, 0)
			get(t, other)
			requireNoSafetyNet(t, p)
		})
	}
}

func TestBounce_LaneHasRetired_OthersAreTold(t *testing.T) {
	busy, _, wait, producer := busyAndIdle(t, Config{})
	silently(t, producer, `SELECT enqueue_work('work')`)
	callAlone(t, producer, busy, 999, 0)
	get(t, wait)
}

// The answer that there is no other node was on its way while one said that it begins to listen.
func TestBounce_AnotherNodeJoinsDuringTheStatement_IsNotForgotten(t *testing.T) {
	p := testProvider(t, Config{})
	e := p.engine
	asked := others{none: true, joins: e.joins.Load()}
	testProvider(t, Config{Schema: p.cfg.Schema})
	eventually(t, "it is heard", func() bool { return e.joins.Load() > asked.joins })
	e.learnOf(asked)
	require.False(t, e.alone.Load())
}

// Whoever believed to be alone kept what he could not do himself.
func TestBounce_AnotherNodeJoins_GetsWhatWasKept(t *testing.T) {
	busy, _, wait, producer := busyAndIdle(t, Config{})
	eventually(t, "all of its greeting is heard", func() bool { return busy.engine.joins.Load() >= int64(queueCount) })
	busy.engine.alone.Store(true)
	silently(t, producer, `SELECT enqueue_work('work')`)
	callAlone(t, producer, busy, theLane(busy).id, 0)
	eventually(t, "it is there", func() bool {
		l := theLane(busy)
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.tokens) > 0
	})
	require.Zero(t, busy.Stats().Worker.PassedOn)
	mustExec(t, producer, `SELECT notify_queue('worker', 0, NULL)`) // the greeting
	get(t, wait)
}

// What was said while the connection was down, nobody else has heard.
func TestBounce_NodeReconnectsAndIsBusy_PassesOnWhatItMissed(t *testing.T) {
	busy, _, wait, producer := busyAndIdle(t, Config{})
	busy.engine.listener.mu.Lock() // nobody listens again before this is free
	mustExec(t, producer, `SELECT pg_terminate_backend($1)`, busy.engine.listener.pid.Load())
	silently(t, producer, `SELECT enqueue_work('work')`)
	busy.engine.listener.mu.Unlock()
	get(t, wait)
	require.EqualValues(t, 1, busy.Stats().Worker.PassedOn)
}

// chooses is a producer that has chosen the node, and is open. What it notifies will come too late.
func chooses(t *testing.T, p *Provider) *pgx.Conn {
	t.Helper()
	open := plain(t, p.cfg.Schema)
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT pg_advisory_xact_lock_shared(hashtext('pgwake producers'), 'worker_queue'::regclass::oid::integer)`)
	silently(t, open, `SELECT enqueue_work('work')`)
	return open
}

func TestLeave_ProducerHasChosenTheNode_ItsItemIsPassedOn(t *testing.T) {
	for try := 1; ; try++ {
		leaving, _, wait, producer := busyAndIdle(t, Config{})
		open := chooses(t, leaving)
		closed := make(chan error, 1)
		go func() { closed <- leaving.Close(context.Background()) }()
		eventually(t, "it waits for the producer, or has ceased to", func() (waits bool) {
			require.NoError(t, open.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`).Scan(&waits))
			return waits || len(closed) > 0
		})
		mustExec(t, open, `COMMIT`)
		require.NoError(t, <-closed)
		var left int
		require.NoError(t, producer.QueryRow(t.Context(), `SELECT count(*) FROM waiters WHERE node = $1`, leaving.engine.node).Scan(&left))
		if left == 0 || try == 10 {
			get(t, wait)
			return
		} // else the producer ended after leavePatience, and it is left to the others
	}
}

// Whoever cannot wait that long leaves it to the others, as whoever dies does. The fallback wakes nobody here.
// What producers have committed since would not be seen, and so not be passed on.
func TestSweep_OldSnapshot_RemovesNothing(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	for isolation, removes := range map[string]bool{"READ COMMITTED": true, "REPEATABLE READ": false} {
		var removed bool
		mustExec(t, conn, `BEGIN ISOLATION LEVEL `+isolation)
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT remove_waiters('worker', 1, true, '1 s')`).Scan(&removed))
		require.Equal(t, removes, removed, isolation)
		mustExec(t, conn, `ROLLBACK`)
	}
}

// A node that lost its connection listens again while another one, which took it for dead, removes its rows one after the other: both in the
// order of lanes, whatever the table has.
func TestSweep_NodeListensAgainMeanwhile_NoDeadlock(t *testing.T) {
	p := testProvider(t, Config{})
	sweeper, listener, observer := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	const node = -1
	for _, lane := range []int{2, 1} {
		mustExec(t, observer, `INSERT INTO waiters (node, lane, listener, queue, armed, number, namespace, fanout, places)
			VALUES ($1, $2, $1, 'worker', false, 0, '*', 1, 1)`, node, lane)
	}
	remove := func(lane int) {
		t.Helper()
		mustExec(t, sweeper, `DELETE FROM waiters WHERE node = $1 AND lane = $2`, node, lane)
	}
	mustExec(t, sweeper, `BEGIN`)
	remove(1)
	listens := make(chan error, 1)
	pid := listener.PgConn().PID()
	go func() {
		_, err := listener.Exec(t.Context(), `SET enable_indexscan = off; SELECT listen_session(-1, -2)`) // as the planner likes
		listens <- err
	}()
	eventually(t, "it waits for the other one", func() (waits bool) {
		require.NoError(t, observer.QueryRow(t.Context(), `SELECT pg_blocking_pids($1) <> '{}'`, pid).Scan(&waits))
		return waits
	})
	remove(2)
	mustExec(t, sweeper, `COMMIT`)
	require.NoError(t, <-listens)
}

func TestSweep_NodeHasEnded_WhatItWasToldOfIsPassedOn(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, p *Provider){
		"left": func(t *testing.T, p *Provider) { require.NoError(t, p.Close(t.Context())) },
		"died": func(_ *testing.T, p *Provider) { p.engine.stop(); p.engine.group.Wait() },
	} {
		t.Run(name, func(t *testing.T) {
			ended, other, wait, producer := busyAndIdle(t, Config{Mode: ModeEventDriven, FallbackInterval: 100 * time.Millisecond})
			open := chooses(t, ended)
			end(t, ended)
			rows := func() (n int) {
				require.NoError(t, producer.QueryRow(t.Context(), `SELECT count(*) FROM waiters WHERE node = $1`, ended.engine.node).Scan(&n))
				return n
			}
			fallbacks := other.Stats().Fallbacks
			eventually(t, "the others look after it", func() bool { return other.Stats().Fallbacks > fallbacks+1 })
			require.NotZero(t, rows(), "the producer is open")
			mustExec(t, open, `COMMIT`)
			get(t, wait)
			eventually(t, "its rows go", func() bool { return rows() == 0 })
			eventually(t, "the other knows that it is alone", other.engine.alone.Load)
		})
	}
}

// Hole 11: each node asks for each item.
func TestHole11_OneItemTenNodes_TwoLook(t *testing.T) {
	schema := testProvider(t, Config{}).cfg.Schema
	const dispatchers = 4
	var nodes []*Provider
	for range 10 {
		p := testProvider(t, Config{Schema: schema})
		nodes = append(nodes, p)
		for range dispatchers {
			fetchWork(t, p, longPoll)
		}
	}
	for _, p := range nodes {
		awaitParked(t, p, Worker, dispatchers)
	}
	parked := func() (n int) {
		for _, p := range nodes {
			n += p.Stats().Worker.Parked
		}
		return n
	}
	// What concerned each node: its queries, and what it was told.
	concerned := func() map[int][2]int64 {
		counts := make(map[int][2]int64)
		for i, p := range nodes {
			s := p.Stats().Worker
			counts[i] = [2]int64{s.Looks, s.Tokens["notify"] + s.Tokens["local"]}
		}
		return counts
	}
	// settled waits until every node has heard all that was said so far, and nobody stands by because of it.
	lane := func(p *Provider) (heardOf uint64, standsBy bool) {
		l := p.engine.waiters.lanes(Worker)[0]
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.heardOf, !l.standByAt.IsZero()
	}
	settled := func() {
		before := make(map[*Provider]uint64)
		for _, p := range nodes {
			before[p], _ = lane(p)
		}
		mustExec(t, plain(t, schema), `SELECT notify_queue('worker', 0, clock_timestamp() + interval '1 hour')`)
		for _, p := range nodes {
			eventually(t, "it has heard, and looked if it was to", func() bool {
				heardOf, standsBy := lane(p)
				return heardOf > before[p] && !standsBy && p.Stats().Worker.Settled
			})
		}
	}
	enqueue := func(p *Provider) {
		_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "work"}, nil)
		require.NoError(t, err)
	}
	waiting := parked()
	for name, produce := range map[string]func(){
		"plain SQL":                func() { mustExec(t, plain(t, schema), `SELECT enqueue_work('work')`) },
		"the library":              func() { enqueue(testProvider(t, Config{Schema: schema})) },
		"a node that waits itself": func() { enqueue(nodes[0]) },
	} {
		settled()
		before := concerned()
		produce()
		waiting--
		eventually(t, "somebody takes it", func() bool { return parked() == waiting })
		settled()
		after := concerned()
		maps.DeleteFunc(after, func(i int, counts [2]int64) bool { return counts == before[i] })
		require.LessOrEqual(t, len(after), 2, name)
	}
	for _, p := range nodes {
		require.Zero(t, p.Stats().Worker.PassedOn)
		requireNoSafetyNet(t, p)
	}
}

// A lane that cannot take it is not told, and what only some of a lane's dispatchers can take is told to all.
func TestWake_ItemsOfAllKinds_GoToWhoeverCanTakeThem(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	other := testProvider(t, Config{Schema: p.cfg.Schema})
	with := func(o FetchOptions) *FetchOptions {
		o.PollTimeout = time.Minute
		return &o
	}
	by := func(owner string) *FetchOptions {
		return with(FetchOptions{Namespaces: []string{"own"}, Session: &SessionOptions{Owner: owner}})
	}
	waits := map[string]<-chan delivery{
		"plain":  fetchWork(t, p, longPoll),
		"red":    fetchWork(t, p, with(FetchOptions{Namespaces: []string{"red"}})),
		"tagged": fetchWork(t, p, with(FetchOptions{Tags: Tags("x")})),
	}
	mine, yours := fetchWork(t, other, by("me")), fetchWork(t, p, by("you"))
	awaitParked(t, p, Worker, 4)
	awaitParked(t, other, Worker, 1)
	looks := func() int64 { return p.Stats().Worker.Looks + other.Stats().Worker.Looks }
	for _, kind := range []struct{ name, sql string }{
		{"plain", `SELECT enqueue_work('plain', p_namespace => 'blue')`},
		{"tagged", `SELECT enqueue_work('tagged', p_tag => 'x')`},
		{"red", `SELECT enqueue_work('red', p_namespace => 'red')`}, // those who take all namespaces are busy
	} {
		before := looks()
		mustExec(t, producer, kind.sql)
		require.Equal(t, kind.name, get(t, waits[kind.name]).item.Name)
		require.Equal(t, before+1, looks(), kind.name)
	}
	mustExec(t, producer, `SELECT enqueue_work('first', p_namespace => 'own', p_session => 's')`)
	var owner <-chan delivery
	select {
	case <-mine:
		owner = fetchWork(t, other, by("me"))
		awaitParked(t, other, Worker, 1)
	case <-yours:
		owner = fetchWork(t, p, by("you"))
		awaitParked(t, p, Worker, 1)
	}
	mustExec(t, producer, `SELECT enqueue_work('second', p_namespace => 'own', p_session => 's')`)
	require.Equal(t, "second", get(t, owner).item.Name)
}
