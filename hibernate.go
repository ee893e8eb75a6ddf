package pgwake

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how does a node let a server suspend that does so when it is idle?
//
// Such a server suspends while nobody is connected, or asks. So after Config.HibernateAfter without work the node leaves,
// as it does when it is closed: no producer chooses it any more, and what those who did have committed is passed on. Then
// it closes the LISTEN connection and, of a pool of its own, the others. That is no trouble, so nothing polls but this:
// every HibernatePoll one dispatcher of each lane looks, and so does whoever waits for an instance. Instants that the
// node knows are met as always. A verb that adds or ends work, here, and a find wake it up: it listens again, and
// everybody looks.
//
// What another process commits while the node hibernates, nobody tells it of: the next poll finds it. What was committed
// before, and not passed on since nobody else waits, the first poll finds, which comes at once.

type hibernation struct {
	began    time.Time
	lastWork atomic.Int64  // when there was some, in nanoseconds since began
	on       atomic.Bool   // from when the node leaves until it listens again or has failed to
	woken    bell          // there is work
	returns  atomic.Uint64 // LISTEN connections made to end it
	times    atomic.Int64  // that it has begun

	next time.Time // when to see whether it is to begin; for the goroutine of run alone
}

// errHibernates ends a session without any trouble.
var errHibernates = errors.New("hibernating")

func newHibernation() hibernation {
	return hibernation{began: time.Now(), woken: newBell()}
}

// stir says that there is work. It never blocks.
func (e *engine) stir() {
	e.changed()
	if e.listener == nil || e.cfg.HibernateAfter == 0 {
		return
	}
	h := &e.listener.hibernation
	h.lastWork.Store(int64(time.Since(h.began)))
	if h.on.Load() { // who sets it looks at lastWork afterwards
		h.woken.ring()
	}
}

// hibernates reports whether the node does not listen because there is nothing to do.
func (e *engine) hibernates() bool { return e.listener != nil && e.listener.hibernation.on.Load() }

// isDeaf reports whether the node is to listen and does not.
func (e *engine) isDeaf() bool {
	if e.listener == nil || e.listener.rests() || e.epoch() != 0 || e.hibernates() {
		return false
	}
	return e.epoch() == 0 // it did not wake up in between
}

// planHibernation plans to see whether it is time, once that can be.
func (l *listener) planHibernation() {
	h := &l.hibernation
	h.next = h.began.Add(time.Duration(h.lastWork.Load()) + l.e.cfg.HibernateAfter)
}

// nextAction returns when the listener has to do something by itself: the fallback, answer questions, or see whether to hibernate.
func (l *listener) nextAction() time.Time {
	next := l.nextFallback
	if at := l.untilAnswer(); !at.IsZero() && at.Before(next) {
		next = at
	}
	if h := &l.hibernation; l.e.cfg.HibernateAfter > 0 && h.next.Before(next) {
		next = h.next
	}
	return next
}

// While something keeps the node from hibernating it is seen after each tenth of HibernateAfter, this at most, whether
// that is over. Meanwhile notifications wait, for so long at most as producers are waited for.
const (
	mostHibernateRetry = 10 * time.Second
	producersPatience  = 10 * time.Millisecond
)

// tryHibernate leaves if it is time to, and returns errHibernates then. Any other error is that of a connection that broke.
func (l *listener) tryHibernate(ctx context.Context, conn *pgx.Conn) error {
	h, e := &l.hibernation, l.e
	if e.cfg.HibernateAfter == 0 || time.Now().Before(h.next) {
		return nil
	}
	lastWork := h.lastWork.Load()
	if l.planHibernation(); time.Now().Before(h.next) {
		return nil
	}
	h.next = time.Now().Add(min(e.cfg.HibernateAfter/10, mostHibernateRetry))
	if e.isUneasy() {
		return nil
	}
	// Close lets this come to its end, which is near unless the connection is broken; then it cuts it.
	ctx = context.WithoutCancel(ctx)
	exec := func(ctx context.Context, dest any, sql string, args ...any) error {
		bounded, cancel := context.WithTimeout(ctx, answerDeadline)
		defer cancel()
		return conn.QueryRow(bounded, sql, args...).Scan(dest)
	}
	// A producer that stays open may have chosen this node. It keeps the server awake as well.
	for q := range Queue(queueCount) {
		var over bool
		if err := exec(ctx, &over, e.sql.waitForProducers, q.String(), producersPatience); err != nil || !over {
			return ifBroken(conn, err)
		}
	}

	h.woken.silence() // of the last time
	h.on.Store(true)
	if h.lastWork.Load() != lastWork {
		h.on.Store(false)
		return nil
	}
	epoch := e.epoch()
	l.current.Store(nil)
	l.refuseJobs()
	e.alone.Store(false) // others may come, unheard
	late := false
	for q := range Queue(queueCount) {
		for _, ln := range e.waiters.lanes(q) {
			late = ln.endEpoch(epoch) || late
		}
	}
	if left := e.leaveBy(ctx, exec); conn.IsClosed() {
		return errors.New("the LISTEN connection broke while the node was about to hibernate")
	} else if !left || late {
		h.woken.ring() // it listens again, and the rows are made anew
	}
	return errHibernates
}

func ifBroken(conn *pgx.Conn, err error) error {
	if conn.IsClosed() {
		return err
	}
	return nil
}

// isUneasy reports whether there is something to do, or may be, that is no work.
func (e *engine) isUneasy() bool {
	for q := range Queue(queueCount) {
		e.mu.Lock()
		_, aggressive := e.trouble[q].poll()
		doubtful := !e.doubts[q].next.IsZero()
		e.mu.Unlock()
		if aggressive || doubtful {
			return true
		}
		for _, l := range e.waiters.lanes(q) {
			if l.mayWrite() {
				return true
			}
		}
	}
	return false
}

// hibernate polls until there is work.
func (l *listener) hibernate(ctx context.Context) {
	if l.hibernation.woken.silence() {
		return
	}
	l.hibernation.times.Add(1)
	poll := time.NewTimer(0)
	defer poll.Stop()
	tidy := time.NewTicker(tidyInterval)
	defer tidy.Stop()
	l.e.tidy()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.hibernation.woken:
			return
		case <-l.changed:
			return
		case <-tidy.C:
			l.e.tidy()
		case <-poll.C:
			l.e.waiters.retire()
			l.e.waits.lookAtAll()
			for q := range Queue(queueCount) {
				for _, ln := range l.e.waiters.lanes(q) {
					ln.pollAsleep()
				}
			}
			poll.Reset(l.e.untilHibernatePoll())
		}
	}
}

// tidyInterval is how often the connections are closed that somebody has used, while the node hibernates.
const tidyInterval = time.Second

// untilHibernatePoll returns the time until the next poll. All nodes poll at the same instants of the server's clock: if
// each came at its own time, the server might never be idle for long.
func (e *engine) untilHibernatePoll() time.Duration {
	now := e.clock.Now()
	next := e.clock.Server(now).Truncate(e.cfg.HibernatePoll).Add(e.cfg.HibernatePoll)
	return e.clock.Local(next).Sub(now)
}

// pollAsleep has somebody of the lane look: who waits, or whoever fetches next.
func (l *lane) pollAsleep() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.empty = false
		return
	}
	l.emit(token{reason: WakeScout, silent: true})
}

// endEpoch has no query that begins from now on write the lane's row in the epoch, and makes void what is known by
// listening. It reports whether one that has begun may write it still.
func (l *lane) endEpoch(epoch uint64) (late bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.overEpoch = epoch
	l.armed = false
	l.unsettle()
	return l.writesLate()
}

// mayWrite reports whether a query that has begun may write the lane's row.
func (l *lane) mayWrite() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writesLate()
}

// writesLate is mayWrite for whoever holds mu. A query that nobody waits for any more ends by its deadline, or
// goes on while the server says that it is at work (silence.go): the row that it may leave then is removed with those of dead nodes.
func (l *lane) writesLate() bool {
	return l.writing > 0 || !l.unheardOf.IsZero() && l.now().Sub(l.unheardOf) < claimDeadline(MaxFetch)
}
