package pgwake

import (
	"context"
	"fmt"
	"math"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: how can producers be silent while everybody is busy, and yet no wake-up be lost?
//
// A producer notifies only if some lane is armed: if its row of the table waiters says that somebody may wait. A
// query that finds nothing arms its lane, in its own transaction. A producer may have read the row before that, be
// silent, and commit after the query's snapshot; so the node waits for all that may have, which share a lock K, and
// then looks once more: it settles. While it waits for K nobody gets it, and who has no K is not silent.
//
// A busy lane disarms again, in the transaction of a query that finds something. That costs a write, and another
// when it next finds nothing, so a lane does it only if it is hot.
//
// Invariants
//
//	(1) While somebody waits in a lane, it is armed, or a look of it is owed that begins after it was, and after
//	    every producer has ended that may have read otherwise.
//	(2) settled is true only if the row was committed as armed, every producer that may have read otherwise has
//	    ended, and no write of "not armed" has begun since. So a look that begins then, and finds nothing, misses
//	    only what is notified after it began.
//	(3) The row is what the newest of its writes says. They are numbered when they begin, under the lane's mutex, and
//	    the row keeps the highest number: a disarm that is late changes nothing.

// rowWrite is what a query for work writes to its lane's row of waiters: that the lane is armed if it finds nothing,
// and with disarm that it is not if it finds something.
type rowWrite struct {
	node, lane, listener int32
	number               int64 // 0: nothing is written
	disarm               bool
	fanout, places       int
}

// args are those of the SQL functions that fetch.
func (w rowWrite) args() []any {
	if w.number == 0 {
		return []any{nil, nil, nil, false, nil, 0, 1}
	}
	return []any{w.node, w.lane, w.number, w.disarm, w.listener, w.fanout, w.places}
}

// A lane is hot after so many finds in a row, or more than Config.QuietAbove within a second. Under a long transaction
// each write of its row leaves a dead one for producers to read over, so between two times that it disarms lies a pause.
// It doubles if the silence before did not last.
const (
	hotStreak        = 8
	firstDisarmPause = time.Second
	lastDisarmPause  = 64 * time.Second
	lastingSilence   = 5 * time.Second
)

// arming is what a lane knows of its row. The lane's mutex guards it.
type arming struct {
	number    int64
	armed     bool          // the row may say so
	settled   bool          // invariant (2)
	settling  bool          // it is armed, and the settler has to make it settled
	disarms   uint64        // how often a write of "not armed" has begun, or what is known became void
	disarmed  time.Time     // when the latest began
	pause     time.Duration // before the next
	mostPause time.Duration
	streak    int // finds in a row
	finds     int // since second
	second    time.Time
	untaken   int // signals since somebody of the lane was here

	// A node that leaves has to know which rows it may still write.
	overEpoch uint64    // the last epoch in which none is written any more
	newest    uint64    // the latest epoch in which one was: who has read an older session since writes none, whose key would be that of a dead connection
	writing   int       // queries under way that write it
	unheardOf time.Time // when the latest query ended that may have done it, or still do, for all that is known

	// While the settler waits, a producer may end that was silent, and another keep it waiting: so somebody looks every now
	// and then.
	scoutAt   time.Time // local: when next; zero: never
	scoutStep time.Duration
	lastOne   time.Time // local: since when the settler waits for one producer only, on behalf of what the lane is; zero: it does not
}

// beginWrite returns what a query that begins now has to write. The caller holds mu.
func (l *lane) beginWrite(s session) rowWrite {
	if l.isOver(s) || l.filter.nothing {
		return rowWrite{}
	}
	a := &l.arming
	hot := l.quietAbove > 0 && (a.streak >= hotStreak || a.finds > l.quietAbove && l.now().Sub(a.second) < time.Second)
	alone := l.inside <= 1 && len(l.waiting) == 0
	disarm := a.armed && hot && alone && l.now().Sub(a.disarmed) >= max(a.pause, firstDisarmPause)
	if a.settled && !disarm {
		return rowWrite{}
	}
	if disarm {
		l.unsettle()
		a.disarmed = l.now()
	}
	return l.nextWrite(s, disarm)
}

// isOver reports whether nothing is written any more as of this session, or there is none. The caller holds mu.
func (l *lane) isOver(s session) bool { return s.epoch <= l.overEpoch || s.epoch < l.newest }

// nextWrite numbers a write that begins now. The caller holds mu, under which the session is not over: what a later number says is of no older session.
func (l *lane) nextWrite(s session, disarm bool) rowWrite {
	l.number++
	l.newest = s.epoch
	return rowWrite{s.node, l.id, s.listener, l.number, disarm, l.fanout, min(max(l.seen, 1), math.MaxInt16)}
}

// unsettle is called when a write of "not armed" begins, and when nobody knows what the row says. The caller holds mu.
func (l *lane) unsettle() {
	l.settled, l.settling, l.empty = false, false, false
	l.lastOne, l.scoutAt = time.Time{}, time.Time{}
	l.disarms++
}

// found takes a find into account. The caller holds mu.
func (l *lane) found(k look) {
	if k.row.disarm && l.disarms == k.disarms && l.number == k.row.number {
		l.armed = false
	}
	l.streak++
	if now := l.now(); now.Sub(l.second) >= time.Second {
		l.second, l.finds = now, 0
	}
	l.finds++
}

// foundNone takes it into account that a query found nothing, and so armed the lane if it was to. The caller holds mu.
func (l *lane) foundNone(k look, listening uint64) {
	l.streak = 0
	if k.row.number == 0 || k.session.epoch != listening || l.disarms != k.disarms || l.settled {
		return
	}
	if !l.armed {
		if l.pause *= 2; l.now().Sub(l.disarmed) >= lastingSilence {
			l.pause = 0
		}
		l.pause = min(max(l.pause, firstDisarmPause), l.mostPause)
	}
	l.armed = true
	switch {
	case !l.settling:
		l.settling, l.scoutStep = true, 0
		l.settler.bell.ring()
		l.planScout()
		l.moved()
	default:
		l.foundSilent(k)
	}
}

// foundSilent is told of a query that found nothing. If it began while the settler waited for one producer only, what was silent
// is found, but for that one, which ends the wait by its end: there is no need to look before. The caller holds mu.
func (l *lane) foundSilent(k look) {
	if l.settling && l.disarms == k.disarms && !l.lastOne.IsZero() && k.began.After(l.lastOne) {
		l.scoutAt = time.Time{}
	}
}

// planScout plans the next look. The caller holds mu.
func (l *lane) planScout() {
	l.scoutStep = max(min(2*l.scoutStep, maxRetryInterval), firstScoutInterval)
	l.scoutAt = l.now().Add(l.scoutStep)
}

// waitsForOne is told that the wait on behalf of the lane as disarms says is, or is not, for one producer only.
func (l *lane) waitsForOne(disarms uint64, one bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !l.settling || l.disarms != disarms:
	case !one:
		if l.lastOne = (time.Time{}); l.scoutAt.IsZero() {
			l.planScout()
			l.moved()
		}
	case l.lastOne.IsZero():
		l.lastOne = l.now()
	}
}

// settleSince ends the settling of a lane that was as disarms says when the wait for the producers began: somebody
// looks once more.
func (l *lane) settleSince(disarms uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.settling && l.disarms == disarms {
		l.settling, l.settled = false, true
		l.lastOne, l.scoutAt = time.Time{}, time.Time{}
		l.emit(token{reason: WakeSettle})
	}
}

// settler waits for producers on behalf of the lanes of a queue.
type settler struct {
	e     *engine
	queue Queue
	bell  bell // there are lanes to settle

	// wait returns when every producer has ended that may have been silent. Tests replace it.
	wait func(context.Context) error

	mu        sync.Mutex
	lanes     map[*lane]uint64 // on behalf of whom it waits, and how they were
	blockedBy []int32          // process ids of producers that it waits for
	since     time.Time        // when it began to
}

func newSettler(e *engine, q Queue) *settler {
	s := &settler{e: e, queue: q, bell: newBell()}
	s.wait = s.waitForProducers
	return s
}

func (s *settler) run(ctx context.Context) {
	s.bell.ring() // whatever was left by a run that panicked
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.bell:
		}
		s.e.inject("settler")
		lanes := s.unsettled()
		if len(lanes) == 0 {
			continue
		}
		s.join(lanes)
		s.mu.Lock()
		s.since = time.Now()
		s.mu.Unlock()
		if err := s.wait(ctx); err != nil {
			// The database is out of reach, or a connection gave no sign, and the lanes stay as they are: their scouts look. Each
			// attempt that fails does so soon, or no lane would settle for as long as TCP takes to give up.
			if !sleep(ctx, maxRetryInterval) {
				return
			}
			s.bell.ring()
			continue
		}
		s.mu.Lock()
		lanes = s.lanes // some have joined
		s.mu.Unlock()
		for l, disarms := range lanes {
			l.settleSince(disarms)
		}
	}
}

// unsettled returns the lanes that are to be settled, and how they are.
func (s *settler) unsettled() map[*lane]uint64 {
	lanes := make(map[*lane]uint64)
	for _, l := range s.e.waiters.lanes(s.queue) {
		l.mu.Lock()
		if l.settling {
			lanes[l] = l.disarms
		}
		l.mu.Unlock()
	}
	return lanes
}

// settlePatience is how long the wait for producers occupies a connection of the pool, unless that is the last one, before
// it goes on on a connection of its own.
const settlePatience = time.Second

// waitForProducers waits until every producer of the queue that may have been silent has ended.
func (s *settler) waitForProducers(ctx context.Context) error {
	e := s.e
	var over bool
	err := e.patiently(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		patience := settlePatience
		if pool := e.pool.Stat(); pool.AcquiredConns() == pool.MaxConns() {
			patience = producersPatience // whoever is woken meanwhile needs one
		}
		return conn.QueryRow(ctx, e.sql.waitForProducers, s.queue.String(), patience).Scan(&over)
	})
	if refused := serverError(err); refused != nil && refused.Code == "57014" {
		err = nil // the role's statement_timeout has less patience
	}
	if err != nil || over {
		return err
	}
	return s.waitLong(ctx)
}

// waitLong waits for producers that stay open, for as long as a lane is to be settled: while it waits no producer is
// silent. The wait holds back the removal of dead rows no more than they do, since each of them has written. It costs no
// statement but one a second while they are several, and one in FallbackInterval while there is one.
func (s *settler) waitLong(ctx context.Context) error {
	e := s.e
	preparing, cancel := context.WithTimeout(ctx, e.listener.dialer.patience(ctx)) // as that of the LISTEN connection
	defer cancel()
	conn, err := e.listener.dialer.connect(preparing)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	keepAlive(conn.PgConn().Conn())
	var pid uint32 // what the connection has is a pooler's number, if there is one in between
	// Those of them that this version of the server has.
	if err := conn.QueryRow(preparing, `SELECT pg_catalog.pg_backend_pid(), pg_catalog.count(pg_catalog.set_config(name, '0', false))
		FROM pg_catalog.pg_settings WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')`).Scan(&pid, nil); err != nil {
		return err
	}
	defer s.blocked(nil)
	waiting, giveUp := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		var err error
		defer func() {
			if panicked := recover(); panicked != nil { // a tracer's
				err = fmt.Errorf("panic: %v\n%s", panicked, debug.Stack())
			}
			ended <- err
		}()
		var over bool
		err = conn.QueryRow(waiting, e.sql.waitForProducers, s.queue.String(), time.Duration(0)).Scan(&over)
	}()
	defer func() {
		giveUp()
		<-ended // nobody else uses the connection when it is closed
	}()
	again := time.NewTimer(0)
	defer again.Stop()
	var pids []int32
	var asked time.Time
	heard := time.Now() // that it waits
	for {
		select {
		case err := <-ended:
			ended <- nil
			return err
		case <-again.C:
		}
		again.Reset(settlePatience)
		lanes := s.unsettled() // as they are before it asks
		covered := s.covers(lanes)
		if covered && len(lanes) == 0 {
			return nil
		}
		if covered && len(pids) == 1 && time.Since(asked) < e.cfg.FallbackInterval {
			continue
		}
		// Once the wait has begun they only become fewer. Of several, one may end unseen, and is looked for.
		var open []int32
		if err := e.exec(ctx, &open, e.sql.producers, s.queue.String(), pid); err != nil {
			continue // what was known of them still is
		}
		asked = time.Now()
		switch pids = open; {
		case pids != nil:
			heard = asked
			s.join(lanes)
		case asked.Sub(heard) >= answerDeadline: // its answer is lost, or has been: nobody waits there any more
			return errWaitLost
		}
		s.blocked(pids)
	}
}

// errWaitLost ends a wait whose connection has lost its peer, and gave no sign.
var errWaitLost = fmt.Errorf("the session that waits for producers does not, and has not said so for %v: %w", answerDeadline, context.DeadlineExceeded)

// covers reports whether the wait is on behalf of all these lanes, as they are.
func (s *settler) covers(lanes map[*lane]uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l, disarms := range lanes {
		if known, ok := s.lanes[l]; !ok || known != disarms {
			return false
		}
	}
	return true
}

// join has the wait be on behalf of these lanes, which were armed before it was granted: whoever may have read otherwise
// got K before that, and so has ended by then.
func (s *settler) join(lanes map[*lane]uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes = lanes
}

// blocked keeps whom the wait is for.
func (s *settler) blocked(pids []int32) {
	s.mu.Lock()
	s.blockedBy = pids
	lanes := s.lanes
	s.mu.Unlock()
	for l, disarms := range lanes {
		l.waitsForOne(disarms, len(pids) == 1)
	}
}

// problem says, for operators, that producers keep the lanes from settling.
func (s *settler) problem() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.blockedBy) == 0 || time.Since(s.since) < settlePatience {
		return ""
	}
	return fmt.Sprintf("open transactions have added to the %v queue and not ended for more than %v: process ids %v", s.queue,
		time.Since(s.since).Round(time.Second), s.blockedBy)
}

// disarmer disarms lanes that are told of work while nobody of them is here to take it: all of them are in handlers.
type disarmer struct {
	e    *engine
	bell bell // there are lanes to disarm
}

func newDisarmer(e *engine) *disarmer { return &disarmer{e: e, bell: newBell()} }

func (d *disarmer) run(ctx context.Context) {
	d.bell.ring() // whatever was left by a run that panicked
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.bell:
		}
		d.e.inject("disarmer")
		for q := range Queue(queueCount) {
			for _, l := range d.e.waiters.lanes(q) {
				row := l.disarmUnused(d.e.session())
				if row.number == 0 {
					continue
				}
				var void any
				err := d.e.exec(ctx, &void, d.e.sql.arm, row.node, row.lane, row.listener, q.String(), row.number, false,
					l.filter.Namespaces, l.filter.Labels, row.fanout, row.places)
				if err != nil {
					l.mu.Lock()
					l.armed = true // for all that is known
					l.mu.Unlock()
				}
			}
		}
	}
}

// idleSignals is how many notifications nobody takes before the lane asks for silence.
const idleSignals = 8

// isUnused reports whether the lane should disarm although nobody fetches. The caller holds mu.
func (l *lane) isUnused() bool {
	return l.quietAbove > 0 && l.armed && l.inside == 0 && l.untaken >= idleSignals && l.now().Sub(l.disarmed) >= l.pause
}

// disarmUnused begins the write that disarms the lane, if it is to.
func (l *lane) disarmUnused(s session) rowWrite {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isOver(s) || !l.isUnused() {
		return rowWrite{}
	}
	l.unsettle()
	l.armed, l.disarmed, l.untaken = false, l.now(), 0
	return l.nextWrite(s, true)
}
