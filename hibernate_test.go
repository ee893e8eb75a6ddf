package pgwake

import (
	"bytes"
	"context"
	"log/slog"
	"net/url"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: does a node let its server suspend, and come back when there is work?

// drowsy is a node that hibernates as soon as it may, and whose next poll no test lives to see, but for one in an hour.
var drowsy = Config{HibernateAfter: 100 * time.Millisecond, HibernatePoll: 24 * time.Hour, FallbackInterval: time.Hour}

func awaitHibernation(t *testing.T, p *Provider) {
	t.Helper()
	eventually(t, "it hibernates", func() bool { s := p.Stats(); return s.Hibernating && s.Hibernations > 0 })
}

// awaitPolled waits until the poll with which hibernation begins is over.
func awaitPolled(t *testing.T, p *Provider) {
	t.Helper()
	awaitHibernation(t, p)
	eventually(t, "it has polled", func() bool {
		for _, l := range p.engine.waiters.lanes(Worker) { // of whom there is none before the first fetch
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.empty && len(l.waiting) > 0
		}
		return false
	})
}

func TestHibernate_NoWork_LeavesNeitherConnectionNorRow(t *testing.T) {
	where, err := url.Parse(testdb.URL(t))
	require.NoError(t, err)
	schema := testdb.Schema(t)
	settings := where.Query()
	settings.Set("application_name", schema)
	where.RawQuery = settings.Encode()
	var log bytes.Buffer
	cfg := drowsy
	cfg.Schema, cfg.Logger, cfg.Notify = schema, slog.New(slog.NewTextHandler(&log, nil)), NotifyBroadcast
	p, err := Open(t.Context(), where.String(), &cfg)
	require.NoError(t, err)
	work, turn := fetchWork(t, p, longPoll), fetchTurn(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	awaitParked(t, p, Orchestrator, 1)
	before := p.Stats()
	p.engine.stir() // it may have begun before they waited
	eventually(t, "it hibernates", func() bool { s := p.Stats(); return s.Hibernating && s.Hibernations > before.Hibernations })
	conn := plain(t, schema)
	count := func(sql string, arg any) (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), sql, arg).Scan(&n))
		return n
	}
	require.Zero(t, count(`SELECT count(*) FROM waiters WHERE node = $1`, p.engine.node))
	eventually(t, "it has polled, and its connections are gone", func() bool {
		return p.Stats().Worker.Looks > before.Worker.Looks && count(`SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, schema) == 0
	})
	s := p.Stats()
	require.True(t, s.Hibernating)
	require.False(t, s.Listening)
	require.Equal(t, [2]bool{}, [2]bool{s.Worker.Aggressive, s.Orchestrator.Aggressive})
	require.Equal(t, Health{OK: true}, p.Health())
	require.Empty(t, log.String())

	require.NoError(t, p.Close(t.Context()))
	require.ErrorIs(t, (<-work).err, ErrClosed)
	require.ErrorIs(t, (<-turn).err, ErrClosed)
}

func TestHibernate_PlainSQLAddsAnItem_NextPollFindsItAndTheNodeListensAgain(t *testing.T) {
	for _, mode := range []Mode{ModeHybrid, ModeEventDriven} {
		t.Run(mode.String(), func(t *testing.T) {
			cfg := drowsy
			cfg.Mode, cfg.HibernatePoll = mode, time.Second
			p := testProvider(t, cfg)
			producer := plain(t, p.cfg.Schema)
			wait := fetchWork(t, p, longPoll)
			awaitPolled(t, p)
			mustExec(t, producer, `SELECT enqueue_work('w')`)
			require.Equal(t, "w", get(t, wait).item.Name)
			eventually(t, "it has listened", func() bool { return p.engine.listener.hibernation.returns.Load() > 0 })
			s := p.Stats()
			require.EqualValues(t, 1, s.Worker.Finds["scout"])
			require.Zero(t, s.Reconnects)
			requireNoSafetyNet(t, p)
		})
	}
}

func TestHibernate_WaitForStatus_NextPollAnswersIt(t *testing.T) {
	cfg := drowsy
	cfg.HibernatePoll = time.Second
	p := testProvider(t, cfg)
	conn := plain(t, p.cfg.Schema)
	status := make(chan error, 1)
	go func() {
		_, err := p.WaitForStatus(t.Context(), "i", 0)
		status <- err
	}()
	eventually(t, "it waits", func() bool { return p.Stats().Waits == 1 })
	awaitHibernation(t, p)
	mustExec(t, conn, `INSERT INTO instances (instance_id, namespace, name, custom_status, custom_status_version) VALUES ('i', 'default', 'flow', 'x', 1)`)
	select {
	case err := <-status:
		require.NoError(t, err)
	case <-time.After(patient):
		require.Fail(t, "nobody has looked at the instance")
	}
}

// enqueuesW is a statement that enqueues a work item.
func enqueuesW(p *Provider) func(context.Context, Querier) error {
	return func(ctx context.Context, q Querier) error {
		_, err := q.Exec(ctx, `SELECT `+pgx.Identifier{p.Schema(), "enqueue_work"}.Sanitize()+`('w')`)
		return err
	}
}

func TestHibernate_SomethingIsDoneHere_WakesAtOnce(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, p *Provider){
		"enqueue": func(t *testing.T, p *Provider) {
			_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil)
			require.NoError(t, err)
		},
		"enqueue in a transaction": func(t *testing.T, p *Provider) {
			tx, err := plain(t, p.cfg.Schema).Begin(t.Context())
			require.NoError(t, err)
			_, err = p.EnqueueForWorkerTx(t.Context(), tx, WorkItem{Name: "w"}, nil)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
		},
		"a statement of a layer's": func(t *testing.T, p *Provider) {
			require.NoError(t, p.Do(t.Context(), "enqueue", enqueuesW(p), Worker))
		},
		"a statement of a layer's in a transaction": func(t *testing.T, p *Provider) {
			tx, err := p.Pool().Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, p.DoTx(t.Context(), tx, "enqueue", enqueuesW(p)))
			require.NoError(t, tx.Commit(t.Context()))
		},
		"wait for an instance": func(t *testing.T, p *Provider) {
			producer := plain(t, p.cfg.Schema)
			mustExec(t, producer, `BEGIN`)
			mustExec(t, producer, `SELECT enqueue_work('w')`) // until its end, whoever listens does not hibernate
			go func() { _, _ = p.WaitForStatus(t.Context(), "i", 0) }()
			eventually(t, "it listens", func() bool { return p.Stats().Listening })
			mustExec(t, producer, `COMMIT`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, drowsy)
			wait := fetchWork(t, p, longPoll)
			awaitPolled(t, p)
			do(t, p)
			require.Equal(t, "w", get(t, wait).item.Name)
			eventually(t, "it has listened, and hibernates again", func() bool { return p.Stats().Hibernations >= 2 })
			require.Zero(t, p.Stats().Reconnects)
		})
	}
}

func TestHibernate_DueTimeIsKnown_IsMet(t *testing.T) {
	p := testProvider(t, drowsy)
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('later', p_delay => '2 s')`)
	wait := fetchWork(t, p, longPoll)
	awaitHibernation(t, p)
	require.Equal(t, "later", get(t, wait).item.Name)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["timer"])
}

func TestHibernate_ManyShortFetches_AskOnce(t *testing.T) {
	p := testProvider(t, drowsy)
	awaitHibernation(t, p)
	for range 20 {
		_, err := p.FetchWorkItem(t.Context(), &FetchOptions{PollTimeout: time.Millisecond})
		require.ErrorIs(t, err, ErrNoWork)
	}
	require.True(t, p.Stats().Hibernating)
	require.EqualValues(t, 1, p.Stats().Worker.Looks)
}

// Whoever hibernates cannot come. A producer that has chosen the node keeps it from leaving, and then its item goes to another.
func TestHibernate_ProducerHasChosenTheNode_ItsItemIsPassedOn(t *testing.T) {
	var turns atomic.Int64
	cfg := drowsy
	cfg.fault = func(at string) {
		if at == "listener" {
			turns.Add(1)
		}
	}
	leaving := testProvider(t, cfg)
	other := testProvider(t, Config{Schema: leaving.cfg.Schema, AggressivePolicy: Never})
	wait := fetchWork(t, other, longPoll)
	awaitParked(t, other, Worker, 1)
	open := chooses(t, leaving) // whoever listens does not leave from here on
	leaving.engine.stir()
	eventually(t, "it listens", func() bool { return leaving.Stats().Listening })
	_, err := leaving.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true}) // and so has a row
	require.ErrorIs(t, err, ErrNoWork)
	before := turns.Load()
	eventually(t, "it tries to leave", func() bool { return turns.Load() > before+5 })
	require.True(t, leaving.Stats().Listening)
	mustExec(t, open, `COMMIT`)
	get(t, wait)
	require.EqualValues(t, 1, other.Stats().Worker.Finds["notify"])
	awaitHibernation(t, leaving)
}

func TestHibernate_QueryFails_WakesAndHibernatesOnceAllIsWell(t *testing.T) {
	cfg := drowsy
	cfg.AggressiveDuration, cfg.AggressiveExitThreshold, cfg.AggressiveInterval = time.Millisecond, 1, 5*time.Millisecond
	p := testProvider(t, cfg)
	conn := plain(t, p.cfg.Schema)
	wait := fetchWork(t, p, &FetchOptions{PollTimeout: time.Minute, Namespaces: []string{"other"}})
	awaitPolled(t, p)
	mustExec(t, conn, `ALTER FUNCTION fetch_work RENAME TO gone`)
	theLane(p).signal(WakeTimer)
	require.Error(t, (<-wait).err)
	mustExec(t, conn, `ALTER FUNCTION gone RENAME TO fetch_work`)
	fetchWork(t, p, longPoll)
	eventually(t, "it hibernates again, and all is well", func() bool { return p.Stats().Hibernations >= 2 && p.Health().OK })
}

// The promise to the server: one dispatcher of each lane, at once and then at instants that all nodes share.
func TestHibernate_Polls_OneDispatcherOfEachLaneAtSharedInstants(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		const poll = 10 * time.Minute
		time.Sleep(3 * time.Minute) // off the instants
		e := testEngine(t, Config{HibernateAfter: time.Minute, HibernatePoll: poll})
		polls := make(chan time.Time, 100)
		for _, namespace := range []string{"red", "blue"} {
			for range 3 {
				l, err := e.waiters.enter(Worker, filter{Namespaces: []string{namespace}})
				require.NoError(t, err)
				go func() {
					for {
						tok, err := l.park(t.Context(), nil)
						if err != nil {
							return
						}
						if tok.reason == WakeScout && tok.silent && namespace == "red" {
							polls <- time.Now()
						}
					}
				}()
			}
		}
		away, err := e.waiters.enter(Worker, filter{Namespaces: []string{"away"}})
		require.NoError(t, err)
		synctest.Wait()
		began := time.Now()
		e.group.Go("listener", func(ctx context.Context) { e.listener.hibernate(ctx) })
		require.Equal(t, began, <-polls)
		synctest.Wait()
		away.mu.Lock()
		away.empty = true
		away.mu.Unlock()
		first := <-polls
		require.Zero(t, first.Sub(first.Truncate(poll)))
		require.Equal(t, poll, (<-polls).Sub(first))
		require.Empty(t, polls, "one of them looks")
		require.False(t, away.isEmpty(false, 24*time.Hour), "whoever fetches next asks")
		e.waiters.close()
		e.stop()
		e.group.Wait()
	})
}

// What counts as work, and what does not.
func TestHibernate_Work_PutsItOff(t *testing.T) {
	due := []produced{{queue: Worker, namespace: "default"}}
	for name, c := range map[string]struct {
		happens func(e *engine)
		work    bool
	}{
		"an enqueue or an ack":      {func(e *engine) { e.tell(due, false) }, true},
		"a renewal":                 {func(e *engine) { e.renewed(Worker, time.Now().Add(time.Hour)) }, true},
		"a commit that is in doubt": {func(e *engine) { e.unsure(Worker) }, true},
		"a notification":            {func(e *engine) { e.heard(Worker, note{due: 1}) }, true},
		"one to this node alone":    {func(e *engine) { e.called(Worker, call{namespace: "default"}) }, true},
		"a node that joins":         {func(e *engine) { e.heard(Worker, joined) }, false},
		"a wait for an instance":    {func(e *engine) { _, _ = e.waits.enter(question{instance: "i"}) }, true},
		"a change of another":       {func(e *engine) { e.waits.changed("i", false) }, false},
		"a read of nothing":         {func(e *engine) { e.unsure() }, false},
		"an empty answer":           {func(e *engine) { e.observe(Worker, outcomeEmpty) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				e := testEngine(t, Config{HibernateAfter: time.Minute})
				start := time.Now()
				e.stir()
				e.listener.planHibernation()
				require.Equal(t, start.Add(time.Minute), e.listener.hibernation.next)
				time.Sleep(40 * time.Second)
				c.happens(e)
				e.listener.planHibernation()
				require.Equal(t, c.work, e.listener.hibernation.next.Equal(start.Add(100*time.Second)))
			})
		})
	}
}

// Whatever ends an item is work, also where it has nobody to tell.
func TestHibernate_ItemEnds_IsWork(t *testing.T) {
	p := testProvider(t, Config{HibernateAfter: time.Hour})
	for name, end := range map[string]func(*ClaimedWorkItem) error{
		"an ack":         func(i *ClaimedWorkItem) error { return p.AckWorkItem(t.Context(), i.LockToken, nil) },
		"one of a group": func(i *ClaimedWorkItem) error { return p.AckBatched(t.Context(), i.LockToken, nil) },
		"one of several": func(i *ClaimedWorkItem) error { return p.AckWorkItems(t.Context(), []LockToken{i.LockToken}) },
		"one by a fetch that finds nothing": func(i *ClaimedWorkItem) error {
			_, err := p.FetchWorkItem(t.Context(), &FetchOptions{Ack: []LockToken{i.LockToken}, NoWait: true})
			require.ErrorIs(t, err, ErrNoWork)
			return nil
		},
		"a dead letter": func(i *ClaimedWorkItem) error {
			return p.DeadLetterWorkItem(t.Context(), i.LockToken, "given up", "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('w')`)
			item := get(t, fetchWork(t, p, longPoll)).item
			before := p.engine.listener.hibernation.lastWork.Load()
			require.NoError(t, end(item))
			require.Greater(t, p.engine.listener.hibernation.lastWork.Load(), before)
		})
	}
}

func TestHibernate_SomethingIsWrong_StaysAwake(t *testing.T) {
	for name, trouble := range map[string]func(e *engine){
		"it polls":             func(e *engine) { e.enterAggressive(Worker, troubleFetch) },
		"a commit is in doubt": func(e *engine) { e.doubts[Orchestrator] = doubt{next: time.Now()} },
		"a row may still be written": func(e *engine) {
			l, err := e.waiters.enter(Worker, filter{})
			require.NoError(t, err)
			l.beginLook(session{epoch: 1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				e := testEngine(t, Config{HibernateAfter: time.Minute})
				e.listener.planHibernation()
				trouble(e)
				time.Sleep(2 * time.Minute)
				require.NoError(t, e.listener.tryHibernate(t.Context(), nil), "there is no connection to leave by")
				require.False(t, e.hibernates())
				require.Equal(t, time.Now().Add(6*time.Second), e.listener.hibernation.next)
			})
		})
	}
}

// A row that is written after the node has left would have producers choose it.
func TestHibernate_EpochEnds_NoRowIsWrittenAnyMore(t *testing.T) {
	now := time.Now()
	l := unsettledLane()
	l.now = func() time.Time { return now }
	k := l.beginLook(session{epoch: 1})
	require.NotZero(t, k.row)
	require.True(t, l.endEpoch(1), "that one may write it still")
	require.Zero(t, l.beginLook(session{epoch: 1}).row)
	l.endLook(k, report{now: now}, nil, 0)
	require.False(t, l.mayWrite())
	cancelled := l.beginLook(session{epoch: 2})
	require.NotZero(t, cancelled.row)
	l.unanswered(cancelled, nil)
	require.True(t, l.mayWrite(), "for all that is known")
	now = now.Add(claimDeadline(MaxFetch))
	require.False(t, l.mayWrite())
}

func TestHibernate_NothingToHibernateFrom_IsRefused(t *testing.T) {
	for _, c := range []Config{
		{HibernateAfter: time.Minute, Mode: ModePolling},
		{HibernateAfter: time.Minute, DisableLongPoll: true},
	} {
		_, err := c.resolve()
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, "HibernateAfter")
	}
	for _, setting := range []string{"pool_min_conns", "pool_min_idle_conns"} {
		_, err := Open(t.Context(), "postgres://127.0.0.1:1/nobody-listens-here?"+setting+"=1", &Config{HibernateAfter: time.Minute})
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, "keep 1 connections open")
	}
}
