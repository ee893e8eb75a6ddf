package pgwake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// simulation is a node against a database that exists only in memory, on virtual time: items become due,
// queries take time, notifications arrive late, connections break, dispatchers die with their leases. It
// checks the promise itself: no due item waits while a dispatcher of a lane that may take it is parked.
type simulation struct {
	t  *testing.T
	e  *engine
	wg sync.WaitGroup

	mu     sync.Mutex
	rng    *rand.Rand
	up     time.Time  // when the LISTEN connection came back
	items  []*simItem // that are not done
	events int
	silent int       // producers that notified nobody
	polls  int       // of several lanes at once
	missed time.Time // until when the safety net had no answer

	// steady leaves out what makes up for a wake-up that is lost: other signals.
	steady bool
	steps  int

	stranger bool // notifies the node all the time, of nothing

	// What producers see: the lanes' rows of waiters, and the lock K.
	rows    map[int32]rowWrite // disarm: it is not armed
	holders int
	waiting int // for K alone
}

type simItem struct {
	namespace string
	visible   time.Time
	committed time.Time // zero: not yet
}

const simLease = 2 * time.Second

func newSimulation(t *testing.T, seed uint64, c *Config) *simulation {
	c.Logger = silent
	cfg, err := c.resolve()
	require.NoError(t, err)
	e := newEngine(&cfg, newStatements("s"), nil, dialer{}, func(bool) {})
	// The simulation plays the listener: it sets the epoch and delivers what was notified.
	e.listener = &listener{e: e}
	e.listener.current.Store(&session{epoch: 1})
	e.listener.sessions.Store(1)
	s := &simulation{t: t, e: e, rng: rand.New(rand.NewPCG(seed, seed)), rows: make(map[int32]rowWrite), steps: 300}
	e.group.Go("timer", e.timer.run)
	e.group.Go("disarmer", func(ctx context.Context) { <-ctx.Done() })
	e.settlers[Worker].wait = s.waitForProducers
	made := e.waiters.newLane
	e.waiters.newLane = func(q Queue, f filter) *lane {
		l := made(q, f)
		l.mostPause = firstDisarmPause
		return l
	}
	e.group.Go("settler", e.settlers[Worker].run)
	for _, scout := range []*scout{e.scouts[Worker], e.alarms[Worker]} {
		scout.look = func(_ context.Context, filters []string, tell func(int, report)) error {
			return s.poll(scout == e.scouts[Worker], filters, tell)
		}
		for range pollsAtOnce {
			e.group.Go("scout", scout.run)
		}
	}
	return s
}

// poll is earliest_of_lanes. At an instant no lane waits for an answer that does not come; the other polls are the safety net itself.
func (s *simulation) poll(net bool, filters []string, tell func(int, report)) error {
	s.pause(2 * time.Millisecond)
	if s.random(50) == 0 {
		s.set(nil, func(*simItem) { s.missed = time.Now() })
		return errors.New("connection reset")
	}
	answers := make([]report, len(filters))
	s.set(nil, func(*simItem) {
		s.polls++
		for at, text := range filters {
			answers[at] = s.outlook(filterOf(text).Namespaces, time.Now())
		}
	})
	took := time.Duration(s.random(int([]time.Duration{2 * time.Millisecond, 1500 * time.Millisecond}[s.random(50)/49]) + 1))
	if net {
		s.set(nil, func(*simItem) { s.missed = time.Now().Add(min(took, pollPatience)) })
	}
	time.Sleep(took)
	for at, r := range answers {
		tell(at, r)
	}
	return nil
}

// filterOf reads what a statement says of a lane.
func filterOf(text string) (f filter) {
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		panic(err)
	}
	return f
}

// waitForProducers is the function of that name: while it waits nobody gets K.
func (s *simulation) waitForProducers(ctx context.Context) error {
	s.pause(time.Millisecond)
	if s.random(50) == 0 {
		return errors.New("connection reset")
	}
	s.set(nil, func(*simItem) { s.waiting++ })
	defer s.set(nil, func(*simItem) { s.waiting-- })
	for granted := false; !granted && sleep(ctx, time.Millisecond); {
		s.set(nil, func(*simItem) { granted = s.holders == 0 })
	}
	s.pause(time.Millisecond)
	return ctx.Err()
}

// somebodyWaits reads the rows. The caller holds mu.
func (s *simulation) somebodyWaits() bool {
	for _, row := range s.rows {
		if !row.disarm {
			return true
		}
	}
	return false
}

// random returns a number from 0 to n-1.
func (s *simulation) random(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n)
}

func (s *simulation) pause(most time.Duration) { time.Sleep(time.Duration(s.random(int(most) + 1))) }

// set changes an item.
func (s *simulation) set(i *simItem, change func(*simItem)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(i)
}

// claim is fetch_work: the snapshot is somewhere within the time that the query takes, and so is the commit.
func (s *simulation) claim(namespaces []string, row rowWrite) (*simItem, report) {
	s.pause(2 * time.Millisecond)
	item, r := s.query(namespaces)
	s.pause([]time.Duration{2 * time.Millisecond, 50 * time.Millisecond}[s.random(20)/19])
	s.set(item, func(*simItem) {
		write := row.number != 0 && (item == nil || row.disarm)
		if row.disarm = item != nil; write && row.listener == s.e.session().listener && row.number > s.rows[row.lane].number {
			s.rows[row.lane] = row
		}
	})
	s.pause(2 * time.Millisecond)
	return item, r
}

func (s *simulation) query(namespaces []string) (*simItem, report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var best *simItem
	for _, i := range s.items {
		if i.isFor(namespaces) && !i.visible.After(now) && (best == nil || i.visible.Before(best.visible)) {
			best = i
		}
	}
	leaseEnd := now.Add(simLease)
	if best != nil {
		best.visible = leaseEnd
	}
	r := s.outlook(namespaces, now)
	r.leaseEnd = leaseEnd
	if best != nil {
		r.found = 1
	}
	return best, r
}

// isFor reports whether a query for these namespaces sees the item.
func (i *simItem) isFor(namespaces []string) bool {
	return !i.committed.IsZero() && serves(namespaces, i.namespace)
}

// outlook is what a query says of what is left. The caller holds mu.
func (s *simulation) outlook(namespaces []string, now time.Time) report {
	r := report{now: now}
	for _, i := range s.items {
		if i.isFor(namespaces) && (r.earliest.IsZero() || i.visible.Before(r.earliest)) {
			r.earliest = i.visible
		}
	}
	return r
}

// enqueue is a transaction that adds items, and the notification some time later unless the connection is down then.
// quiet is the way of the library's own producers.
func (s *simulation) enqueue(namespace string, quiet bool, delays ...time.Duration) {
	now := time.Now()
	n := note{namespace: namespace}
	var added []*simItem
	for _, d := range delays {
		added = append(added, &simItem{namespace: namespace, visible: now.Add(d)})
		if d == 0 {
			n.due++
		} else if at := now.Add(d); n.next.IsZero() || at.Before(n.next) {
			n.next = at
		}
	}
	s.set(nil, func(*simItem) { s.items = append(s.items, added...) })
	commit := func() {
		for _, i := range added {
			i.committed = time.Now()
		}
	}
	waits, locked := true, false
	if quiet {
		s.set(nil, func(*simItem) { commit() })
		s.pause(time.Millisecond)
		s.set(nil, func(*simItem) { waits = s.somebodyWaits() })
	} else {
		s.set(nil, func(*simItem) {
			if locked = s.waiting == 0; locked {
				s.holders++
			}
		})
		s.pause(time.Millisecond)
		s.set(nil, func(*simItem) { waits = !locked || s.somebodyWaits() })
		s.pause([]time.Duration{time.Millisecond, time.Millisecond, 3 * time.Second}[s.random(3)])
		s.set(nil, func(*simItem) {
			if commit(); locked {
				s.holders--
			}
		})
	}
	if waits {
		s.notify(n)
	} else {
		s.set(nil, func(*simItem) { s.silent++ })
	}
}

func (s *simulation) notify(n note) {
	epoch := s.e.epoch()
	s.wg.Go(func() {
		s.pause(3 * time.Millisecond)
		if epoch != 0 && s.e.epoch() == epoch {
			s.e.heard(Worker, n)
		}
	})
}

// dispatcher fetches, works, and acks, abandons, or forgets what it has.
func (s *simulation) dispatcher(ctx context.Context, namespaces []string) {
	for ctx.Err() == nil {
		var got *simItem
		plan := fetchPlan{lock: simLease, poll: time.Duration(1+s.random(20_000)) * time.Millisecond, filter: filter{Namespaces: namespaces}}
		fetch, cancel := ctx, context.CancelFunc(func() {})
		if !s.steady && s.random(10) == 0 { // a caller that loses patience
			fetch, cancel = context.WithTimeout(ctx, time.Duration(s.random(300))*time.Millisecond)
		}
		err := s.e.fetch(fetch, Worker, plan, func(ctx context.Context, _ filter, _ Path, _ bool, row rowWrite) (report, error) {
			if !s.steady && s.random(50) == 0 {
				s.pause(time.Millisecond)
				return report{}, errors.New("connection reset")
			}
			item, r := s.claim(namespaces, row)
			if ctx.Err() != nil { // as detached does: the claim is undone, which notifies
				if item != nil {
					s.set(item, func(i *simItem) { i.visible = time.Now() })
					s.notify(note{due: 1, namespace: item.namespace})
				}
				return report{}, ctx.Err()
			}
			got = item
			return r, nil
		})
		cancel()
		if err != nil {
			if !errors.Is(err, ErrNoWork) {
				s.pause(5 * time.Second) // what it owed must be done by others
			}
			continue
		}
		s.set(got, func(*simItem) { s.events++ })
		event := 2
		if !s.steady {
			event = s.random(12)
		}
		switch event {
		case 0: // dies with its lease; somebody else takes its place
			continue
		case 1:
			s.pause(20 * time.Millisecond)
			s.set(got, func(i *simItem) { i.visible = time.Now() })
			s.notify(note{due: 1, namespace: got.namespace})
		default:
			s.pause(200 * time.Millisecond)
			s.set(got, func(done *simItem) {
				s.items = slices.DeleteFunc(s.items, func(i *simItem) bool { return i == done })
			})
		}
	}
}

// watch checks the promise every few milliseconds. The bound is what a wake-up may take here: a late
// notification, a failing query and its scout, and the queries themselves.
func (s *simulation) watch(ctx context.Context, bound time.Duration) {
	for ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
		if s.e.epoch() == 0 {
			continue // nothing is promised but the scout
		}
		if late := s.late(bound); late != "" {
			s.t.Error(late)
			return
		}
	}
}

func (s *simulation) late(bound time.Duration) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, i := range s.items {
		if i.committed.IsZero() || now.Sub(i.committed) <= bound || now.Sub(i.visible) <= bound || now.Sub(s.up) <= bound || now.Sub(s.missed) <= bound {
			continue
		}
		for _, l := range s.e.waiters.lanes(Worker) {
			l.mu.Lock()
			waiting := len(l.waiting)
			l.mu.Unlock()
			if l.serves(i.namespace) && waiting > 0 {
				return fmt.Sprintf("an item of %q is due since %v while %d dispatchers wait", i.namespace, now.Sub(i.visible), waiting)
			}
		}
	}
	return ""
}

func TestWorkConservation_AnythingGoes_NoDueItemWaitsForAParkedDispatcher(t *testing.T) {
	t.Parallel()
	for seed := range virtualtime.Seeds(8) {
		// Polling in trouble would make up for what is lost, so half of the runs do without it; and when
		// dispatchers are busy they look anyway, so half of the runs leave them waiting most of the time.
		virtualtime.Test(t, func(t *testing.T) {
			s := newSimulation(t, seed, &Config{AggressivePolicy: []AggressivePolicy{OnTrouble, Never}[seed%2]})
			lull := []time.Duration{200 * time.Millisecond, 4 * time.Second}[seed/2%2]
			s.run(lull, nil, nil, nil, []string{"blue"}, []string{"blue", "red"}, []string{"red"})
			require.Greater(t, s.events, 300)
			require.NotZero(t, s.polls)
		})
	}
}

// A lane that is alone, and hot whenever it can be, disarms and arms all the time: nobody else's row has producers
// notify.
func TestSettle_LaneDisarmsAndArms_NoDueItemWaitsForAParkedDispatcher(t *testing.T) {
	t.Parallel()
	for seed := range virtualtime.Seeds(16) {
		virtualtime.Test(t, func(t *testing.T) {
			s := newSimulation(t, seed, &Config{AggressivePolicy: Never, QuietAbove: 1})
			s.steady, s.steps = true, 1500
			dispatchers := make([][]string, 1+seed%2)
			s.run(300*time.Millisecond/time.Duration(len(dispatchers)), dispatchers...)
			require.NotZero(t, s.silent)
		})
	}
}

// run has dispatchers of these namespaces work while things happen, with such a pause in between at most.
func (s *simulation) run(lull time.Duration, dispatchers ...[]string) {
	ctx, cancel := context.WithCancel(s.t.Context())
	for _, namespaces := range dispatchers {
		s.wg.Go(func() { s.dispatcher(ctx, namespaces) })
	}
	bound := 250 * time.Millisecond
	if s.stranger {
		bound += mostDebt
		s.wg.Go(func() { s.flood(ctx) })
	}
	s.wg.Go(func() { s.watch(ctx, bound) })
	for range s.steps {
		switch s.random(20) {
		case 0: // the LISTEN connection is lost, and comes back
			if !s.steady && s.e.listener.current.Swap(nil) != nil {
				s.set(nil, func(*simItem) { clear(s.rows) })
				s.e.listenerLost(true)
				s.wg.Go(func() {
					s.pause(10 * time.Second)
					s.set(nil, func(*simItem) { s.up = time.Now() })
					s.e.listener.current.Store(&session{epoch: s.e.listener.sessions.Add(1), listener: int32(s.random(1 << 30))})
					s.e.listenerUp()
				})
			}
		default:
			delays := make([]time.Duration, 1+s.random(4))
			if s.steady {
				delays = delays[:1]
			}
			for i := range delays {
				if !s.steady && s.random(2) == 0 {
					delays[i] = time.Duration(s.random(3000)) * time.Millisecond
				}
			}
			namespace, quiet := []string{"blue", "red", "green"}[s.random(3)], s.random(3) == 0
			s.wg.Go(func() { s.enqueue(namespace, quiet, delays...) })
		}
		s.pause(lull)
	}
	time.Sleep(30 * time.Second) // of virtual time: leases of those that died end, retries are over
	cancel()
	s.e.waiters.close()
	s.wg.Wait()
	s.e.stop()
	s.e.group.Wait()
	require.Empty(s.t, s.items, "an item was never finished")
}

// testLane is a lane on the clock of the test.
func testLane() *lane {
	l := newLane(Worker, filter{}, time.Now, func() {}, &queueStats{})
	l.settled = true
	return l
}

// A dispatcher whose context ends at the moment at which a token comes either takes it or leaves it behind.
func TestLane_TokenToDispatcherThatLeaves_IsNotLost(t *testing.T) {
	taken, left := 0, 0
	for round := range 100 {
		virtualtime.Test(t, func(t *testing.T) {
			l := testLane()
			ctx, leave := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { _, err := l.park(ctx, nil); ended <- err }()
			synctest.Wait()
			l.mu.Lock() // neither can be seen before the other
			if round%2 == 0 {
				leave()
			}
			l.signals++
			l.hand(token{reason: WakeNotify, signal: l.signals})
			leave()
			l.mu.Unlock()
			if err := <-ended; err == nil {
				taken++
				require.Empty(t, l.tokens)
			} else {
				left++
				require.Len(t, l.tokens, 1, "the token is gone")
			}
		})
	}
	require.Positive(t, left, "the case never came up")
	require.Positive(t, taken)
}

func TestLane_MoreSignalsThanDispatchers_AreKeptUpToTheirNumber(t *testing.T) {
	l := testLane()
	for range 3 {
		l.enter()
	}
	for range 10 {
		l.signal(WakeNotify)
	}
	require.Len(t, l.tokens, 3)
}

// The one dispatcher is inside a query, and its lane is full. A signal that comes now must outlive the answer, which
// pays for the token that was there before.
func TestLane_SignalDuringAQueryOfAFullLane_IsKept(t *testing.T) {
	l := testLane()
	l.enter()
	l.signal(WakeNotify)
	k := l.beginLook(session{epoch: 1})
	l.signal(WakeNotify)
	l.endLook(k, report{now: time.Now()}, nil, 1)
	require.Len(t, l.tokens, 1)
	require.Equal(t, l.signals, l.tokens[0].signal)
}

// Of two queries at a time nobody knows which saw the newer state.
func TestLane_AnswerThatAnotherOvertook_ReplacesNothing(t *testing.T) {
	l := testLane()
	now := time.Now()
	slow, quick := l.beginLook(session{epoch: 1}), l.beginLook(session{epoch: 1})
	l.endLook(quick, report{now: now, earliest: now.Add(time.Minute)}, nil, 1) // the end of somebody's lease
	l.endLook(slow, report{now: now}, nil, 1)
	require.Equal(t, now.Add(time.Minute), l.earliest)

	slow, quick = l.beginLook(session{epoch: 1}), l.beginLook(session{epoch: 1})
	l.endLook(quick, report{now: now, earliest: now.Add(-time.Second)}, nil, 1)
	require.False(t, l.retryAt.IsZero())
	l.endLook(slow, report{now: now}, nil, 1)
	require.False(t, l.retryAt.IsZero(), "rows that somebody had locked are still to be looked at")
	require.False(t, l.isEmpty(true, 0))

	l.endLook(l.beginLook(session{epoch: 1}), report{now: now}, nil, 1)
	require.True(t, l.earliest.IsZero())
	require.True(t, l.retryAt.IsZero())
}

// A release is owed a look that was answered.
func TestLane_LookThatFails_StillOwesTheRelease(t *testing.T) {
	l := testLane()
	l.released(true)
	call, relay := l.call, l.relay
	k := l.beginLook(session{epoch: 1})
	require.True(t, l.call.IsZero())
	l.unanswered(k, nil)
	require.Equal(t, call, l.call)
	require.Equal(t, relay, l.relay)
	l.endLook(l.beginLook(session{epoch: 1}), report{now: time.Now()}, nil, 1)
	require.True(t, l.call.IsZero())
	require.True(t, l.relay.IsZero())
}

// Two releases leave one look to make; if both freed a due message, it calls somebody for the second.
func TestLane_LookForTwoReleases_PassesOnWhatItLeaves(t *testing.T) {
	l := testLane()
	l.released(false)
	l.released(false)
	now := time.Now()
	l.endLook(l.beginLook(session{epoch: 1}), report{found: 1, now: now, earliest: now.Add(-time.Second)}, nil, 1)
	require.Len(t, l.tokens, 1)
}

// While all dispatchers are in handlers, the fallback is what finds something only if they would not look by themselves.
func TestLane_FallbackFindsWhatAllAreTooBusyFor_CountsOnlyIfTheLaneIsKnownEmpty(t *testing.T) {
	for _, empty := range []bool{false, true} {
		l := testLane()
		now := time.Now()
		overdue := report{now: now, earliest: now.Add(-2 * time.Second)}
		l.enter()
		answer := report{now: now}
		if !empty {
			answer = report{found: 1, now: now, earliest: now}
		}
		l.endLook(l.beginLook(session{epoch: 1}), answer, nil, 1)
		require.Equal(t, empty, l.isEmpty(true, 0))
		l.leave(true)
		l.endFallback(l.beginFallback(), overdue, time.Minute)
		require.Len(t, l.tokens, 1)
		require.Equal(t, !empty, l.tokens[0].silent)
	}
}

func TestLane_EmptyAnswer_PaysForOlderTokensOnly(t *testing.T) {
	l := testLane()
	l.enter()
	l.enter()
	l.signal(WakeNotify)
	k := l.beginLook(session{epoch: 1})
	l.signal(WakeNotify) // after the query began: its snapshot may be older
	l.endLook(k, report{now: time.Now()}, nil, 1)
	require.Len(t, l.tokens, 1)
	require.False(t, l.isEmpty(true, 0))

	k = l.beginLook(session{epoch: 1})
	l.endLook(k, report{now: time.Now()}, nil, 1)
	require.Empty(t, l.tokens)
	require.True(t, l.isEmpty(true, 0))

	// The same answer from before a reconnect is worth nothing.
	k = l.beginLook(session{epoch: 1})
	l.forget()
	l.endLook(k, report{now: time.Now()}, nil, 2)
	require.False(t, l.isEmpty(true, 0))
}

func TestLane_InstantHeardDuringAQuery_SurvivesItsAnswer(t *testing.T) {
	l := testLane()
	now := time.Now()
	k := l.beginLook(session{epoch: 1})
	l.heard(now.Add(time.Minute), false)
	l.endLook(k, report{now: now, earliest: now.Add(time.Hour)}, nil, 1)
	require.Equal(t, now.Add(time.Minute), l.earliest)
	// An answer that heard nothing new in the meantime replaces it.
	k = l.beginLook(session{epoch: 1})
	l.endLook(k, report{now: now, earliest: now.Add(time.Hour)}, nil, 1)
	require.Equal(t, now.Add(time.Hour), l.earliest)
}

// Contended: rows that somebody keeps locked may come free without a sign, so a lane looks again, and less
// and less often.
func TestLane_RowsLockedByOthers_AreLookedAtAgain(t *testing.T) {
	l := testLane()
	due := report{now: time.Now(), earliest: time.Now().Add(-time.Second)}
	var last time.Duration
	for _, want := range []time.Duration{5, 10, 20, 40, 80, 100, 100} {
		l.endLook(l.beginLook(session{epoch: 1}), due, nil, 1)
		require.False(t, l.retryAt.IsZero())
		last = l.retryStep
		require.Equal(t, want*time.Millisecond, last)
		require.False(t, l.isEmpty(true, time.Hour))
	}
	l.endLook(l.beginLook(session{epoch: 1}), report{now: time.Now()}, nil, 1)
	require.Zero(t, l.retryStep)
	require.True(t, l.retryAt.IsZero())
}
