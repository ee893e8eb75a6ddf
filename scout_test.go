package pgwake

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// waitIn has somebody wait for work of each of these namespaces, each a lane of its own.
func waitIn(t *testing.T, p *Provider, names ...string) map[string]<-chan delivery {
	t.Helper()
	waits := make(map[string]<-chan delivery)
	for _, name := range names {
		waits[name] = fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{name}})
	}
	awaitParked(t, p, Worker, len(names))
	return waits
}

func namesOfLanes(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("n", i)
	}
	return names
}

// awaitPolls waits for so many more.
func awaitPolls(t *testing.T, p *Provider, q Queue, more int64) {
	t.Helper()
	stats := &p.engine.stats.queues[q]
	before := stats.polls.Load()
	eventually(t, "polls", func() bool { return stats.polls.Load() >= before+more })
}

// requirePollsOnly asserts that lanes in which nothing is due are polled, and that no query is made but that.
func requirePollsOnly(t *testing.T, p *Provider) {
	t.Helper()
	before := p.Stats().Worker
	awaitPolls(t, p, Worker, 8)
	after := p.Stats().Worker
	require.Equal(t, before.Looks, after.Looks, "queries for work")
	require.Equal(t, before.Tokens, after.Tokens)
}

// The LISTEN connection is lost, and comes back at once. For a minute the node polls, by a statement for all namespaces, and is told
// as ever.
func TestScout_ListenConnectionIsLost_PollsOfManyLanesAreOneStatement(t *testing.T) {
	const lanes = 300
	p := testProvider(t, Config{})
	waits := waitIn(t, p, namesOfLanes(lanes)...)
	producer := plain(t, p.cfg.Schema)
	before := p.Stats().Worker.Looks
	mustExec(t, producer, `SELECT pg_terminate_backend($1)`, p.engine.listener.pid.Load())
	eventually(t, "it listens again", func() bool { return p.Stats().Reconnects == 1 })
	awaitParked(t, p, Worker, lanes)
	after := p.Stats().Worker
	require.LessOrEqual(t, after.Looks, before+3*lanes, "one each by the reconnect, and one once it has settled")
	requirePollsOnly(t, p)
	require.True(t, p.Stats().Worker.Aggressive)

	told := waits["n17"]
	for try := int64(1); ; try++ { // a poll may be quicker, and the notification so late that it does not count
		mustExec(t, producer, `SELECT enqueue_work('told', p_namespace => 'n17')`)
		get(t, told)
		finds := p.Stats().Worker.Finds
		require.Equal(t, try, finds["notify"]+finds["scout"])
		if finds["notify"] > 0 {
			break
		}
		require.Less(t, try, int64(20), "a push was never quicker than a poll")
		told = fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{"n17"}})
		awaitParked(t, p, Worker, lanes)
	}
	late := p.Stats().Worker.Finds["scout"]
	mustExec(t, producer, `SELECT set_config('pgwake.notify', 'off', false), enqueue_work('untold', p_namespace => 'n217')`)
	get(t, waits["n217"])
	finds := p.Stats().Worker.Finds
	require.Equal(t, late+1, finds["scout"])
	require.EqualValues(t, 1, finds["notify"])
	eventually(t, "what nobody told of is counted", func() bool { return p.Stats().Worker.ScoutFinds > 0 })
	require.LessOrEqual(t, p.Stats().Worker.ScoutFinds, late+1)
}

// A node that cannot listen: no more is asked than that, and what a poll says of the future is met when it comes.
func TestScout_CannotListen_PollsOfManyLanesAreOneStatement(t *testing.T) {
	const lanes = 100
	reached := testProvider(t, Config{})
	config := reached.pool.Config().ConnConfig.Copy()
	config.Port, config.Fallbacks = 1, nil // nobody listens there
	p := testProvider(t, Config{Schema: reached.cfg.Schema, ListenConfig: config, AggressiveInterval: 50 * time.Millisecond})
	waits := waitIn(t, p, namesOfLanes(lanes)...)
	requirePollsOnly(t, p)
	producer := plain(t, p.cfg.Schema)
	finds := func() (timer, scout int64) {
		f := p.Stats().Worker.Finds
		return f["timer"], f["scout"]
	}
	wait := waits["n50"]
	met := false
	for try := range int64(10) { // a poll may come at the very instant
		mustExec(t, producer, `SELECT enqueue_work('later', p_namespace => 'n50', p_delay => '300 ms')`)
		require.Equal(t, "later", get(t, wait).item.Name)
		timer, scout := finds()
		require.Equal(t, try+1, timer+scout)
		if met = timer > 0; met {
			break
		}
		wait = fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{"n50"}})
		awaitParked(t, p, Worker, lanes)
	}
	require.True(t, met, "all were polled for")
	_, before := finds()
	mustExec(t, producer, `SELECT enqueue_work('now', p_namespace => 'n51')`)
	get(t, waits["n51"])
	_, after := finds()
	require.Equal(t, before+1, after)
}

// The trouble is over when the rule says so: by polls that find nothing. Then nothing is asked any more.
func TestScout_TroubleIsOver_NobodyPolls(t *testing.T) {
	p := testProvider(t, Config{AggressiveDuration: 4 * time.Second})
	waitIn(t, p, namesOfLanes(20)...)
	eventually(t, "it has started", func() bool { return !p.Stats().Worker.Aggressive })
	mend := breakFunction(t, p, "fetch_work")
	_, err := p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true})
	require.Error(t, err)
	mend()
	require.True(t, p.Stats().Worker.Aggressive)
	eventually(t, "one has tried, and nobody tries any more", func() bool {
		return !p.engine.failing.Load() && !slices.ContainsFunc(p.engine.waiters.lanes(Worker), func(l *lane) bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.waiting) < l.inside
		})
	})
	requirePollsOnly(t, p)
	eventually(t, "the polling ends", func() bool { return !p.Stats().Worker.Aggressive })
	eventually(t, "the last poll is over", func() bool { // another may have been wanted while the one was under way that was the last but one
		s := p.engine.scouts[Worker]
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.underWay == 0 && s.wanted == (polls{})
	})
	before := p.Stats().Worker
	require.GreaterOrEqual(t, before.Polls, int64(p.cfg.AggressiveExitThreshold))
	require.Never(t, func() bool { return p.Stats().Worker.Polls > before.Polls }, 3*p.cfg.AggressiveInterval, p.cfg.AggressiveInterval)
}

func TestScout_ModePolling_CostsTheSameHoweverManyLanes(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: 50 * time.Millisecond})
	waits := waitIn(t, p, namesOfLanes(100)...)
	turns := map[string]<-chan delivery{}
	for _, name := range []string{"a", "b"} {
		turns[name] = fetchTurn(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{name}})
	}
	awaitParked(t, p, Orchestrator, 2)
	requirePollsOnly(t, p)
	awaitPolls(t, p, Orchestrator, 2)
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_work('x', p_namespace => 'n99'), enqueue_message('i', 'k', p_namespace => 'b')`)
	require.Equal(t, PathPolling, get(t, waits["n99"]).item.Path)
	require.Equal(t, "i", get(t, turns["b"]).turn.Instance)
	require.Equal(t, []int64{1, 1}, []int64{p.Stats().Worker.Finds["scout"], p.Stats().Orchestrator.Finds["scout"]})
}

// Dispatchers that come and go in short turns park by what the last poll has said.
func TestScout_ManyShortFetches_CostNoQueries(t *testing.T) {
	const interval = time.Second // if a poll is late by another, the dispatchers rightly ask themselves
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: interval})
	waitIn(t, p, "a", "b")
	awaitPolls(t, p, Worker, 2)
	before := p.Stats().Worker.Looks
	for range 50 {
		_, err := p.FetchWorkItem(t.Context(), &FetchOptions{PollTimeout: 20 * time.Millisecond, Namespaces: []string{"a"}})
		require.ErrorIs(t, err, ErrNoWork)
	}
	require.Equal(t, before, p.Stats().Worker.Looks)
}

// Some namespaces are polled by their mode, and the others are told.
func TestScout_ModesOfNamespaces_OnlyThoseArePolledThatAreTo(t *testing.T) {
	p := testProvider(t, Config{Modes: map[string]Mode{"p1": ModePolling, "p2": ModePolling}, PollInterval: 20 * time.Millisecond})
	eventually(t, "it has started", func() bool { return !p.Stats().Worker.Aggressive })
	var mu sync.Mutex
	polled := make(map[string]bool)
	s := p.engine.scouts[Worker]
	ask := s.look
	s.look = func(ctx context.Context, filters []string, tell func(int, report)) error {
		mu.Lock()
		for _, text := range filters {
			polled[filterOf(text).Namespaces[0]] = true
		}
		mu.Unlock()
		return ask(ctx, filters, tell)
	}
	hear := waitIn(t, p, "h1", "h2")
	poll := map[string]<-chan delivery{}
	for _, name := range []string{"p1", "p2"} {
		poll[name] = fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{name}})
	}
	eventually(t, "they wait", func() bool { return p.engine.waiters.parked(Worker) == 4 })
	eventually(t, "nobody looks for what was silent", func() bool {
		return !slices.ContainsFunc(p.engine.waiters.lanes(Worker), func(l *lane) bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.filter.manner.hears && !l.settled
		})
	})
	awaitPolls(t, p, Worker, pollsAtOnce) // one may have been under way
	mu.Lock()
	clear(polled)
	mu.Unlock()
	requirePollsOnly(t, p)
	mu.Lock()
	require.Equal(t, map[string]bool{"p1": true, "p2": true}, polled)
	mu.Unlock()
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_work('x', p_namespace => 'p2')`)
	require.Equal(t, PathPolling, get(t, poll["p2"]).item.Path)
	mustExec(t, producer, `SELECT enqueue_work('x', p_namespace => 'h2')`)
	require.Equal(t, PathEvent, get(t, hear["h2"]).item.Path)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["scout"])
}

// While two silent producers stay open, what one of them leaves is looked for in all lanes together; when there is one, no more.
func TestScout_SilentProducersStayOpen_LanesThatSettleArePolledTogether(t *testing.T) {
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: time.Hour})
	var open []*pgx.Conn
	for _, namespace := range []string{"n3", "n4"} {
		conn := plain(t, p.cfg.Schema)
		mustExec(t, conn, `BEGIN`)
		mustExec(t, conn, `SELECT enqueue_work('silent', p_namespace => $1)`, namespace)
		open = append(open, conn)
	}
	waits := make(map[string]<-chan delivery)
	for _, name := range namesOfLanes(50) {
		waits[name] = fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{name}})
	}
	eventually(t, "they wait", func() bool { return p.engine.waiters.parked(Worker) == 50 })
	requirePollsOnly(t, p)
	mustExec(t, open[0], `COMMIT`)
	get(t, waits["n3"])
	s := p.Stats().Worker
	require.EqualValues(t, 1, s.Finds["scout"])
	require.Zero(t, s.ScoutFinds, "nobody need have told")
	eventually(t, "nobody looks any more", func() bool {
		return !slices.ContainsFunc(p.engine.waiters.lanes(Worker), func(l *lane) bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.waiting) > 0 && (l.lastOne.IsZero() || !l.scoutAt.IsZero())
		})
	})
	mustExec(t, open[1], `COMMIT`)
	get(t, waits["n4"])
	require.EqualValues(t, 1, p.Stats().Worker.Finds["settle"])
}

// Queries for work fail in one of the namespaces, and so they would in the others: whoever tries that is one of them, and after ten
// of that nobody does. That a statement which claims nothing succeeds is no sign.
func TestScout_QueriesForWorkFail_PollsAreSkipped(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: 10 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	var dispatchers sync.WaitGroup
	defer func() { cancel(); dispatchers.Wait() }()
	got := make(chan *ClaimedWorkItem, 1)
	for _, name := range []string{"a", "b", "c"} {
		dispatchers.Go(func() {
			for ctx.Err() == nil {
				item, err := p.FetchWorkItem(ctx, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{name}})
				if err == nil {
					got <- item
				}
				sleep(ctx, time.Second)
			}
		})
	}
	awaitPolls(t, p, Worker, 1)
	mend := breakFunction(t, p, "fetch_work")
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('x', p_namespace => 'b')`)
	eventually(t, "polls are skipped", func() bool { s := p.Stats().Breaker; return s.Open && s.Skipped >= 3 })
	require.ErrorContains(t, p.Stats().Breaker.Err, "fetch_work")
	mend()
	_, err := p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true, Namespaces: []string{"elsewhere"}})
	require.ErrorIs(t, err, ErrNoWork)
	select {
	case item := <-got:
		require.Equal(t, "b", item.Namespace)
	case <-time.After(patient):
		require.Fail(t, "nobody polls")
	}
	eventually(t, "it is closed", func() bool { return p.Health().OK })
}

// The statement itself fails, as all else does while the database is away.
func TestScout_PollFails_CountsAsAQueryForWork(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e, s := virtualScout(t, 2)
		answer := errPoll
		s.look = func(context.Context, []string, func(int, report)) error { return answer }
		poll := func() {
			s.want(polls{byMode: true})
			synctest.Wait()
		}
		for range breakerFailures {
			require.True(t, e.mayPoll())
			poll()
		}
		require.False(t, e.mayPoll())
		require.True(t, e.failing.Load())
		require.True(t, e.isAggressive(Worker))
		answer = nil
		poll()
		require.True(t, e.mayPoll())
		require.False(t, e.failing.Load())

		// What it says is no news about a query that has failed since it was sent.
		s.look = func(context.Context, []string, func(int, report)) error {
			e.lookFailed(Worker, errPoll)
			return nil
		}
		poll()
		require.True(t, e.failing.Load())
		e.stop()
		e.group.Wait()
	})
}

// At the end of a lease every lane looks, since the lease may be of a node that was killed. What it costs does not depend on how many
// there are, and whose item it is looks by the clock as ever.
func TestScout_LeaseEnds_ManyLanesLookByOneStatement(t *testing.T) {
	const lanes = 100
	p := testProvider(t, Config{})
	waits := waitIn(t, p, namesOfLanes(lanes)...)
	eventually(t, "they know that they are empty", func() bool { return p.engine.waiters.settled(Worker) })
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('left', p_namespace => 'n17')`)
	get(t, waits["n17"]) // and is not acknowledged
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('held', p_namespace => 'n17')`)
	for attempts := 1; ; attempts++ {
		first := fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{"n17"}, LockTimeout: time.Duration(min(attempts, 3)) * time.Second})
		held := get(t, first).item
		require.Equal(t, "held", held.Name)
		again := fetchWork(t, p, &FetchOptions{PollTimeout: time.Hour, Namespaces: []string{"n17"}})
		eventually(t, "all wait, or the lease was over first", func() bool {
			w := p.engine.waiters
			return len(again) > 0 || w.parked(Worker) == lanes && w.settled(Worker)
		})
		before := p.Stats().Worker
		left := held.LockedUntil.Sub(p.engine.clock.Server(p.engine.clock.Now()))
		d := get(t, again)
		require.Equal(t, "held", d.item.Name)
		if left > 200*time.Millisecond {
			eventually(t, "the others look", func() bool { return p.Stats().Worker.Polls > before.Polls })
			after := p.Stats().Worker
			if after.Looks == before.Looks+1 { // that of whoever has it
				require.Equal(t, before.Finds["timer"]+1, after.Finds["timer"])
				require.Equal(t, before.ScoutFinds, after.ScoutFinds)
				return
			}
		}
		require.Less(t, attempts, 20, "each looks by itself where the statement is late, which it is not always")
		require.NoError(t, p.AbandonWorkItem(t.Context(), d.item.LockToken, nil))
	}
}

// Whatever becomes of the poll, each lane whose instant has come has a look made, or owed.
func TestScout_InstantOfManyLanes_EachLooksWhateverBecomesOfThePoll(t *testing.T) {
	for name, c := range map[string]struct {
		look  func(tell func(int, report)) error
		waits bool // in the second lane
		timer []int64
		after time.Duration
	}{
		"nothing is due": {func(tell func(int, report)) error {
			tell(0, report{now: time.Now()})
			tell(1, report{now: time.Now()})
			return nil
		}, true, []int64{0, 0}, 0},
		"one has work":       {func(tell func(int, report)) error { tell(1, report{now: time.Now(), earliest: time.Now()}); return nil }, true, []int64{0, 1}, 0},
		"it fails":           {func(func(int, report)) error { return errPoll }, true, []int64{1, 1}, 0},
		"the pool is busy":   {func(func(int, report)) error { return errPoolBusy }, true, []int64{1, 1}, 0},
		"it panics":          {func(func(int, report)) error { panic("injected") }, true, []int64{1, 1}, 0},
		"nobody waits there": {func(func(int, report)) error { return errPoll }, false, []int64{1, 1}, 0},
		"it hangs":           {func(func(int, report)) error { time.Sleep(time.Minute); return nil }, true, []int64{1, 1}, instantPatience + 2*lanePatience},
		"it need not hang":   {func(func(int, report)) error { time.Sleep(time.Minute); return nil }, true, []int64{0, 0}, instantPatience},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				e := testEngine(t, Config{Logger: silent})
				s := e.alarms[Worker]
				s.look = func(_ context.Context, _ []string, tell func(int, report)) error { return c.look(tell) }
				var lanes []*lane
				got := make([]atomic.Int64, 2)
				for i := range got {
					l, err := e.waiters.enter(Worker, filter{Namespaces: []string{fmt.Sprint("n", i)}})
					require.NoError(t, err)
					lanes = append(lanes, l)
					if i == 0 || c.waits {
						go func() {
							if t, err := l.park(t.Context(), nil); err == nil && t.reason == WakeTimer {
								got[i].Add(1)
							}
						}()
					}
				}
				synctest.Wait()
				e.group.Go("timer", e.timer.run)
				e.group.Go("scout", s.run)
				for _, l := range lanes {
					l.heard(time.Now().Add(time.Minute), true)
				}
				time.Sleep(time.Minute - 1)
				synctest.Wait()
				require.Zero(t, got[0].Load()+got[1].Load())
				time.Sleep(1 + c.after)
				synctest.Wait()
				var owed []int64
				for i, l := range lanes {
					owed = append(owed, got[i].Load()+int64(len(l.tokens)))
				}
				require.ElementsMatch(t, c.timer, owed) // lanes are in no order
				e.stop()
				e.group.Wait()
				for _, l := range lanes {
					close(l.closed)
				}
			})
		})
	}
}

func TestScout_Panics_IsSurvived(t *testing.T) {
	var bomb atomic.Bool
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: 10 * time.Millisecond, fault: func(at string) {
		if at == "scout" && bomb.CompareAndSwap(true, false) {
			panic("injected")
		}
	}})
	waits := waitIn(t, p, "a", "b")
	bomb.Store(true)
	eventually(t, "it has gone off", func() bool { return p.Stats().Panics == 1 })
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('x', p_namespace => 'b')`)
	get(t, waits["b"])
	eventually(t, "the goroutine is back", func() bool { return p.Health().OK })
}

// virtualScout is an engine in ModePolling with so many lanes, in each of which somebody waits.
func virtualScout(t *testing.T, lanes int) (e *engine, s *scout) {
	e = testEngine(t, Config{Mode: ModePolling})
	s = e.scouts[Worker]
	defer synctest.Wait()
	for i := range lanes {
		l, err := e.waiters.enter(Worker, filter{Namespaces: []string{fmt.Sprint("n", i)}})
		require.NoError(t, err)
		go func() { _, _ = l.park(t.Context(), nil) }()
	}
	for range pollsAtOnce {
		e.group.Go("scout", s.run)
	}
	return e, s
}

// Invariant (3) of scout.go.
func TestScout_PollGetsNoAnswer_AnotherIsMadeWhenItIsLate(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		var made atomic.Int64
		e, s := virtualScout(t, 2)
		s.look = func(ctx context.Context, filters []string, tell func(int, report)) error {
			made.Add(1)
			select {
			case <-answer:
			case <-ctx.Done():
			}
			return nil
		}
		e.group.Go("timer", e.timer.run)
		synctest.Wait()
		require.EqualValues(t, 1, made.Load())
		time.Sleep(pollPatience - time.Nanosecond)
		synctest.Wait()
		require.EqualValues(t, 1, made.Load(), "another one, though the first is not late")
		time.Sleep(e.cfg.PollInterval)
		synctest.Wait()
		require.EqualValues(t, 2, made.Load())
		time.Sleep(time.Minute)
		require.EqualValues(t, 2, made.Load(), "both are under way")
		answer <- struct{}{}
		synctest.Wait()
		require.EqualValues(t, 3, made.Load(), "what was to be polled meanwhile is polled after it")
		e.stop()
		e.group.Wait()
	})
}

// A lane alone needs no such statement: whoever waits claims what he finds.
func TestScout_OneLane_IsPolledByWhoWaits(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e, s := virtualScout(t, 1)
		s.look = func(context.Context, []string, func(int, report)) error {
			panic("nobody is to ask for it")
		}
		e.group.Go("timer", e.timer.run)
		synctest.Wait()
		require.EqualValues(t, 1, e.stats.queues[Worker].tokens[WakeScout].Load())
		e.stop()
		e.group.Wait()
		require.Zero(t, e.group.Panics())
	})
}

// A pool that is exhausted is no trouble of the database.
func TestScout_PoolIsBusy_IsNoFailure(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		e, s := virtualScout(t, 2)
		var made atomic.Int64
		s.look = func(context.Context, []string, func(int, report)) error {
			made.Add(1)
			return errPoolBusy
		}
		e.group.Go("timer", e.timer.run)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Greater(t, made.Load(), int64(500))
		require.False(t, e.isAggressive(Worker))
		e.stop()
		e.group.Wait()
	})
}

// polled has somebody wait in the lane, and a poll of it begin.
func polled(t *testing.T, l *lane, s session) look {
	t.Helper()
	l.enter()
	l.waiting = append(l.waiting, &parked{wake: make(chan token, 1)})
	k, ok := l.beginPoll(polls{troubled: true}, s)
	require.True(t, ok)
	return k
}

func hearingLane() *lane {
	l := testLane()
	l.filter.manner.hears = true
	return l
}

// Invariant (2) of scout.go.
func TestLane_PollFindsNothing_KnownEmptyByTheRulesOfAQuery(t *testing.T) {
	nothing := report{now: time.Now()}
	for name, c := range map[string]struct {
		meanwhile func(l *lane)
		listening uint64
		empty     bool
	}{
		"listening and settled": {func(*lane) {}, 1, true},
		"a signal":              {func(l *lane) { l.signal(WakeNotify) }, 1, false},
		"a release":             {func(l *lane) { l.released(false) }, 1, false},
		"not settled any more":  {func(l *lane) { l.forget() }, 1, false},
		"another connection":    {func(*lane) {}, 2, false},
		"another left some":     {func(l *lane) { l.leftSome() }, 1, false},
		"settled since":         {func(l *lane) { l.settled = true }, 1, false},
	} {
		l := hearingLane()
		l.settled = name != "settled since"
		k := polled(t, l, session{epoch: 1})
		c.meanwhile(l)
		l.endPoll(k, nothing, c.listening)
		require.Equal(t, c.empty, l.isEmpty(true, 0), name)
	}
	l := hearingLane() // of a node that does not listen
	l.endPoll(polled(t, l, session{}), nothing, 0)
	require.False(t, l.isEmpty(false, 0))
	require.True(t, l.isEmpty(false, time.Minute), "until the next poll")
}

// A token may be for more than what is due: that the lane is armed by whoever looks (settle.go).
func TestLane_PollFindsNothing_WhatIsOwedRemains(t *testing.T) {
	l := hearingLane()
	k := polled(t, l, session{epoch: 1})
	l.waiting = nil // he has left
	l.handBack(token{reason: WakeReconnect, signal: k.signals})
	l.endPoll(k, report{now: time.Now()}, 1)
	require.Len(t, l.tokens, 1)
}

// What is due is for one of them, once; what will be is for the timer.
func TestLane_PollFindsSomething_OneIsCalled(t *testing.T) {
	now := time.Now()
	l := hearingLane()
	l.endLook(l.beginLook(session{epoch: 1}), report{now: now}, nil, 1)
	require.True(t, l.isEmpty(true, 0))
	k := polled(t, l, session{epoch: 1})
	waiting := l.waiting[0]
	l.endPoll(k, report{now: now, earliest: now}, 1)
	require.Len(t, waiting.wake, 1)
	require.Equal(t, WakeScout, (<-waiting.wake).reason)
	require.False(t, l.isEmpty(true, 0), "it is not, whoever comes next")
	_, ok := l.beginPoll(polls{troubled: true}, session{epoch: 1})
	require.False(t, ok, "nobody waits")

	// He has gone to look, or is about to wait, when the next answer comes.
	l.endPoll(k, report{now: now, earliest: now}, 1)
	l.endPoll(k, report{now: now, earliest: now}, 1)
	require.Len(t, l.tokens, 1)
	_, ok = l.beginPoll(polls{troubled: true}, session{epoch: 1})
	require.False(t, ok, "a look is owed")

	l = hearingLane()
	l.endPoll(polled(t, l, session{epoch: 1}), report{now: now, earliest: now.Add(time.Minute)}, 1)
	require.Equal(t, now.Add(time.Minute), l.earliest)
}

// The statement says of each lane what the functions say that a query for work asks, whatever there is.
func TestEarliestOfLanes_WhateverThereIs_SaysWhatTheQueriesSay(t *testing.T) {
	p := testProvider(t, Config{})
	conn := plain(t, p.cfg.Schema)
	names := []string{"a", "b", "c"}
	rapid.Check(t, func(rt *rapid.T) {
		exec := func(sql string, args ...any) {
			_, err := conn.Exec(t.Context(), sql, args...)
			require.NoError(rt, err, sql)
		}
		exec(`DELETE FROM worker_queue; DELETE FROM orchestrator_queue; DELETE FROM realignments; DELETE FROM limits; DELETE FROM releases; DELETE FROM marking`)
		one := func(label string, of ...string) string { return rapid.SampledFrom(of).Draw(rt, label) }
		some := func(label string, of ...string) []string {
			return sortedSet(rapid.SliceOfN(rapid.SampledFrom(of), 1, len(of)).Draw(rt, label))
		}
		sometimes := func(label string) bool { return rapid.IntRange(0, 3).Draw(rt, label) == 0 }
		for range rapid.IntRange(0, 4).Draw(rt, "items") {
			exec(`INSERT INTO worker_queue (name, namespace, tag, priority, session_id, key, visible_at) VALUES ('x', $1, $2, $3, $4, $5, clock_timestamp() + $6)`,
				one("namespace", names...), one("tag", "", "x"), rapid.IntRange(0, 9).Draw(rt, "priority"),
				optional("s", !sometimes("session")), optional("k", true), time.Duration(rapid.IntRange(-5, 5).Draw(rt, "minutes"))*time.Minute)
		}
		for range rapid.IntRange(0, 4).Draw(rt, "messages") {
			sticky := sometimes("sticky")
			exec(`INSERT INTO orchestrator_queue (instance_id, kind, namespace, queue, pin, visible_at, sticky_owner, sticky_due)
				VALUES ('i', 'k', $1, $2, $3, clock_timestamp() + $4, $5::text, CASE WHEN $5::text IS NOT NULL THEN clock_timestamp() END)`,
				one("namespace", names...), one("queue", "", "x"), rapid.SampledFrom([]int{0, 5}).Draw(rt, "pin"),
				time.Duration(rapid.IntRange(-5, 5).Draw(rt, "minutes"))*time.Minute, optional("me", !sticky))
		}
		if sometimes("a note") {
			exec(`INSERT INTO realignments (instance_id, next_at) VALUES ('i', clock_timestamp() + interval '1 h')`)
		}
		if sometimes("paused") {
			exec(`SELECT pause($1, $2, true)`, one("queue", "worker", "orchestrator"), []string{one("namespace", names...)})
		}
		if sometimes("limited") {
			exec(`SELECT set_limits($1, 1, 5, NULL, NULL, 1)`, one("namespace", names...))
			exec(`DELETE FROM marking`) // of what may be under way it says: now and then
		}
		var queues, filters []string
		for range rapid.IntRange(1, 6).Draw(rt, "lanes") {
			f := filter{Namespaces: some("namespaces", names...)}
			if sometimes("all namespaces") {
				f.Namespaces = nil
			}
			if !sometimes("all labels") {
				f.Labels = some("labels", "", "x")
			}
			if sometimes("owner") {
				f.Owner = one("owner", "me", "you")
			}
			queue := one("queue", "worker", "orchestrator")
			if queue == "orchestrator" && sometimes("pins") {
				f.MinPin, f.MaxPin = 1, int64(rapid.IntRange(1, 9).Draw(rt, "most"))
			}
			queues, filters = append(queues, queue), append(filters, f.text())
		}
		got := make(map[int]*time.Time)
		rows, err := conn.Query(t.Context(), `SELECT lane, earliest_at FROM earliest_of_lanes($1, $2)`, queues, filters)
		require.NoError(rt, err)
		var at int
		var earliest *time.Time
		_, err = pgx.ForEachRow(rows, []any{&at, &earliest}, func() error { got[at-1] = earliest; return nil })
		require.NoError(rt, err)
		require.Len(rt, got, len(queues))
		for i, text := range filters {
			f := filterOf(text)
			var want *time.Time
			if queues[i] == "worker" {
				err = conn.QueryRow(t.Context(), `SELECT earliest_work($1, $2, $3)`, f.Namespaces, f.Labels, optional(f.Owner, f.Owner == "")).Scan(&want)
			} else {
				err = conn.QueryRow(t.Context(), `SELECT earliest_message($1, $2, $3, $4, $5)`, f.Namespaces, f.Labels, optional(f.MinPin, f.MinPin == 0),
					optional(f.MaxPin, f.MaxPin == 0), optional(f.Owner, f.Owner == "")).Scan(&want)
			}
			require.NoError(rt, err)
			require.Equal(rt, want, got[i], "%s lane %s", queues[i], text)
		}
	})
}
