package pgwake

import (
	"context"
	"time"
)

// This file answers: at which instants does a node act by itself?
//
// One goroutine per node meets every instant that its lanes wait for: the next due time, the next look at rows that
// others had locked or that silent producers may leave, the end of standing by, the look that a release owes, or that was put
// off (trust.go), the next poll of a queue in trouble or in doubt. It sleeps until the first of them, or until one moves
// up. It asks the database nothing: at an instant it gives a lane a token, and the dispatcher that takes it makes the query, whose answer says
// which due time is the next (wakechain.go); or it has several lanes polled together (scout.go).

// maxRetryInterval bounds the pause before another look at rows that somebody keeps locked.
const maxRetryInterval = 100 * time.Millisecond

type timer struct {
	e    *engine
	bell bell // an instant moved up
}

func newTimer(e *engine) *timer { return &timer{e: e, bell: newBell()} }

// moved wakes the goroutine to see an instant that is earlier than the one it sleeps for. It never blocks.
func (t *timer) moved() { t.bell.ring() }

func (t *timer) run(ctx context.Context) {
	sleep := time.NewTimer(0)
	defer sleep.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.bell:
		case <-sleep.C:
		}
		t.e.inject("timer")
		if next, ok := t.fire(); ok {
			sleep.Reset(next.Sub(t.e.clock.Now()))
		} else {
			sleep.Stop()
		}
	}
}

// fire emits what is due and returns the next instant to wake at, in local time.
func (t *timer) fire() (next time.Time, ok bool) {
	earliest := func(at time.Time) {
		if !ok || at.Before(next) {
			next, ok = at, true
		}
	}
	for q := range Queue(queueCount) {
		var p polls
		var together []*lane
		for _, l := range t.e.waiters.lanes(q) {
			ahead, settling, shared := l.fire(t.e)
			for _, at := range ahead {
				earliest(at)
			}
			p.settling = p.settling || settling
			if shared {
				together = append(together, l)
			}
		}
		t.e.lookTogether(q, together)
		t.e.poll(q, p)
		if at, polling := t.e.pollQueue(q); polling {
			earliest(at)
		}
		if at, doubtful := t.e.resolveDoubt(q); doubtful {
			earliest(at)
		}
	}
	if at, waits := t.e.coalescer.answerLate(t.e.clock.Now()); waits {
		earliest(at)
	}
	return next, ok
}

// fire emits a token for each instant of the lane that has come, and returns those still to come, whether the lane is to be
// polled for what silent producers may have left, and whether it is to look with others (lookTogether).
func (l *lane) fire(e *engine) (ahead []time.Time, settling, shared bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	looks := false
	if !l.earliest.IsZero() {
		at := e.clock.Local(l.earliest)
		// Early, by the grace, but only once for each instant, or an empty answer would bring us back
		// here at once until the instant comes.
		if !l.early.Equal(l.earliest) {
			at = at.Add(-e.cfg.TimerGrace)
		}
		if at.After(now) {
			ahead = append(ahead, at)
		} else {
			l.early, l.earliest = l.earliest, time.Time{} // invariant (3)
			l.notified(token{reason: WakeTimer})
			looks = true
		}
	}
	if !l.told.IsZero() {
		switch at := e.clock.Local(l.told); {
		case at.After(now):
			ahead = append(ahead, at)
		case looks:
			l.told = time.Time{}
		default:
			l.told = time.Time{}
			if t := (token{reason: WakeTimer}); l.trust.until().IsZero() {
				shared = l.meet(t, e)
			} else {
				l.notified(t)
			}
		}
		// The one after it is met whatever becomes of the answers: others count on each (leases.go).
		if l.told.IsZero() {
			if l.told = e.leases.next(l.queue, e.clock.Server(now)); !l.told.IsZero() {
				ahead = append(ahead, e.clock.Local(l.told))
			}
		}
	}
	comes := func(at *time.Time) bool {
		switch {
		case at.IsZero():
			return false
		case at.After(now):
			ahead = append(ahead, *at)
			return false
		}
		*at = time.Time{}
		return true
	}
	if comes(&l.putOffTo) {
		shared = l.meet(l.late, e) || shared
	}
	// After all that may set it.
	if comes(&l.instantBy) {
		l.give(l.instant)
	}
	if comes(&l.call) {
		l.emit(token{reason: WakeLocal})
	}
	if comes(&l.relay) {
		e.coalescer.tell(l.queue, note{due: 1})
	}
	if comes(&l.scoutAt) { // until something says that it is enough
		l.planScout()
		ahead, settling = append(ahead, l.scoutAt), true
	}
	if comes(&l.standByAt) {
		l.notified(token{reason: WakeNotify, sole: true})
	}
	if comes(&l.bounceAt) {
		l.bounce()
	}
	if comes(&l.retryAt) {
		// Of what it may find besides those rows, others were told, or nobody yet.
		l.emit(token{reason: WakeScout, sole: l.retrySole, silent: l.fanout > 0 || !l.settled})
	}
	return ahead, settling, shared
}

// meet has somebody look for what has come, and reports whether with others: then it is for lookTogether. The caller holds mu.
func (l *lane) meet(t token, e *engine) (shared bool) {
	if len(l.waiting) > 0 && l.instantBy.IsZero() {
		l.heardSignal(t.reason)
		l.instantBy, l.instant = l.now().Add(e.instantPatience(l.queue)), t
		return true
	}
	l.emit(t) // it lies in store for whoever comes; and a poll that is under way may be too old to count
	return false
}
