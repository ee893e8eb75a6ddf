package pgwake

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: who looks when a queue is polled, and what does that cost a node that serves many namespaces?
//
// Where one lane is polled, the dispatcher of it that waits longest looks, by a query that claims what it finds. Where
// there are several, as with a lane for each namespace, each of them would cost a query at each poll for as long as there is
// nothing. So one statement looks for all of them (SQL function earliest_of_lanes), and only where it sees something due
// somebody is called, who claims it. The same goes for an instant at which all lanes look, such as the end of a lease: what it
// brings, if anything, is for one of them.
//
// Invariants
//
//	(1) A poll costs one statement, however many lanes there are, and a query for each of those with something due.
//	(2) To a lane, its answer is that of a query for work that found nothing it could claim: it is a plain read, in a snapshot
//	    that is taken after the lane was asked what it knows (beginPoll), by the function that tells such a query what is left.
//	    So "nothing is due" makes known empty what that would, and no more. But it arms nothing, and so pays for no token.
//	(3) While one poll has no answer no other begins, but for one that begins when the first is late: its connection may be
//	    lost. What is to be polled meanwhile is polled after it.
//	(4) A lane whose instant has come does not wait for long: where the poll has not begun, failed, or has no answer by instantBy,
//	    somebody of the lane looks.

// polls says which lanes of a queue are to be polled.
type polls struct {
	byMode   bool // those of namespaces in ModePolling
	troubled bool // those that hear, since what is notified may not come
	settling bool // those for which silent producers are waited for (settle.go)
	instants bool // those for which an instant has come at which all look (timer.go)
}

func (p polls) and(o polls) polls {
	return polls{p.byMode || o.byMode, p.troubled || o.troubled, p.settling || o.settling, p.instants || o.instants}
}

// of reports whether the lane is to be polled: while somebody waits, and no look is owed already. bySilence says that of
// what may be found nobody was to tell. The caller holds mu.
func (p polls) of(l *lane) (bySilence, ok bool) {
	m := l.filter.manner
	bySilence = p.settling && !l.scoutAt.IsZero()
	ok = bySilence || p.instants && !l.instantBy.IsZero() || p.byMode && m.polls || p.troubled && m.hears
	return bySilence, ok && len(l.waiting) > 0 && len(l.tokens) == 0
}

// lookTogether has the lanes look whose instant has come, by one statement if there are several. It never blocks. While queries for
// work fail, a statement that claims nothing would not tell whether they still do.
func (e *engine) lookTogether(q Queue, lanes []*lane) {
	if len(lanes) > 1 && !e.failing.Load() {
		e.alarms[q].want(polls{instants: true})
		return
	}
	for _, l := range lanes {
		l.lookAtInstant()
	}
}

// lookAtInstant makes one dispatcher look, if the lane is to be polled because an instant has come.
func (l *lane) lookAtInstant() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.instantBy.IsZero() {
		l.instantBy = time.Time{}
		l.give(l.instant)
	}
}

// instantPatience is how long lanes wait for a poll before they look by themselves.
func (e *engine) instantPatience(q Queue) time.Duration {
	return instantPatience + time.Duration(e.waiters.count[q].Load())*lanePatience
}

// poll has the lanes looked at that are to be. It never blocks.
//
// While queries for work fail, one of them tries whether they still do, since a statement that claims nothing could not tell: so
// polls fail for as long as queries do, and are skipped (breaker.go). The first answer has all of them polled again.
func (e *engine) poll(q Queue, p polls) {
	if p == (polls{}) {
		return
	}
	var one *lane
	for _, l := range e.waiters.lanes(q) {
		l.mu.Lock()
		_, ok := p.of(l)
		l.mu.Unlock()
		switch {
		case !ok:
		case one == nil:
			one = l
		case !e.failing.Load():
			e.scouts[q].want(p)
			return
		}
	}
	if one != nil {
		one.poll(p)
	}
}

// poll makes one waiting dispatcher look, if the lane is to be polled.
func (l *lane) poll(p polls) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if bySilence, ok := p.of(l); ok {
		l.emit(token{reason: WakeScout, silent: bySilence, again: true})
	}
}

const (
	// pollPatience is how long a poll may take before its connection may be lost, and pollsAtOnce how many are under way then.
	pollPatience = time.Second
	pollsAtOnce  = 2

	// A poll at an instant may take instantPatience and, for each lane of the queue, lanePatience.
	instantPatience = 50 * time.Millisecond
	lanePatience    = 200 * time.Microsecond

	laneDeadline = time.Millisecond // of the time that any poll may take; of each of its namespaces as well
)

// scout polls the lanes of a queue together. It has pollsAtOnce goroutines. There are two of a queue, of which one is for instants.
type scout struct {
	e     *engine
	queue Queue
	bell  bell

	// look asks what is due for lanes with these filters, and tells of each, by its place among them. Tests replace it.
	look func(ctx context.Context, filters []string, tell func(at int, r report)) error

	mu       sync.Mutex
	wanted   polls
	underWay int
	began    time.Time // the latest of them
}

func newScout(e *engine, q Queue) *scout {
	s := &scout{e: e, queue: q, bell: newBell()}
	s.look = s.ask
	return s
}

// want has the lanes polled. It never blocks.
func (s *scout) want(p polls) {
	s.mu.Lock()
	s.wanted = s.wanted.and(p)
	s.mu.Unlock()
	s.bell.ring()
}

func (s *scout) run(ctx context.Context) {
	s.bell.ring() // after a panic something may be wanted
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.bell:
		}
		s.e.inject("scout")
		if p, ok := s.begin(); ok {
			s.poll(ctx, p)
		}
	}
}

// begin returns what to poll, unless that is for whoever is at it to do afterwards. end is to be called then.
func (s *scout) begin() (p polls, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wanted == (polls{}) || s.underWay > 0 && time.Since(s.began) < pollPatience {
		return polls{}, false
	}
	p, s.wanted = s.wanted, polls{}
	s.underWay++
	s.began = time.Now()
	return p, true
}

func (s *scout) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay--
	if s.wanted != (polls{}) {
		s.bell.ring()
	}
}

// poll makes one statement for all lanes that are to be polled.
func (s *scout) poll(ctx context.Context, p polls) {
	defer s.end() // also when something panics
	e := s.e
	session := e.session()
	var asked []*lane
	var looks []look
	var filters []string
	for _, l := range e.waiters.lanes(s.queue) {
		if k, ok := l.beginPoll(p, session); ok {
			asked, looks, filters = append(asked, l), append(looks, k), append(filters, l.filter.text())
		}
	}
	if asked == nil {
		return
	}
	if p.instants {
		e.trust.spend()
	}
	failures := e.failures.Load()
	found, answered := false, false
	defer func() {
		if answered {
			return
		}
		for i, l := range asked { // also when something panics
			if !looks[i].instantBy.IsZero() {
				l.lookAtInstant()
			}
		}
	}()
	err := s.look(ctx, filters, func(at int, r report) {
		l := asked[at]
		l.endPoll(looks[at], r, l.known(e.session()).epoch)
		e.keepInstants(l, r.now)
		found = found || r.more()
	})
	if !errors.Is(err, errPoolBusy) {
		e.stats.queues[s.queue].polls.Add(1)
	}
	switch answered = err == nil; {
	case answered:
		if e.failures.Load() == failures { // or a query has failed that was made since
			e.lookAnswered()
		}
		if !found { // or the queries that follow have their say
			e.observe(s.queue, outcomeEmpty)
		}
	case ctx.Err() == nil && !errors.Is(err, errPoolBusy):
		e.lookFailed(s.queue, err)
	}
}

// lookDeadline is how long a statement may take that looks at lanes with these filters.
func lookDeadline(filters []string) time.Duration {
	lists := len(filters)
	for _, f := range filters {
		lists += strings.Count(f, ",") // that many names more, or less
	}
	return answerDeadline + time.Duration(lists)*laneDeadline
}

// ask sends the statement, on the pool: on the LISTEN connection notifications would wait for it.
func (s *scout) ask(ctx context.Context, filters []string, tell func(at int, r report)) error {
	e := s.e
	return e.onPool(ctx, time.Now().Add(lookDeadline(filters)), func(ctx context.Context, conn *pgxpool.Conn) error {
		return atReadCommitted(ctx, conn, e.readCommitted, func(q sender) error { return s.read(ctx, q, filters, tell) })
	})
}

func (s *scout) read(ctx context.Context, q querier, filters []string, tell func(at int, r report)) error {
	e := s.e
	queues := make([]string, len(filters))
	for i := range queues {
		queues[i] = s.queue.String()
	}
	sent := e.clock.Now()
	rows, err := q.Query(ctx, e.sql.earliestOfLanes, queues, filters)
	if err != nil {
		return err
	}
	var at int
	var earliest *time.Time
	var r report
	_, err = pgx.ForEachRow(rows, []any{&at, &earliest, &r.now}, func() error {
		r.earliest = value(earliest)
		tell(at-1, r)
		return nil
	})
	if err == nil {
		e.clock.Observe(sent, e.clock.Now(), r.now)
		e.timer.moved() // by the clock as it was before, it may have slept again on what the lanes have learnt
	}
	return err
}

// beginPoll returns what the lane knows, if it is to be polled.
func (l *lane) beginPoll(p polls, s session) (k look, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	bySilence, ok := p.of(l)
	if !ok {
		return look{}, false
	}
	if bySilence {
		l.scoutAt = l.now().Add(l.scoutStep) // that of the others comes with this one
	}
	k = l.knows(l.known(s))
	k.settled, k.disarms, k.bySilence, k.instantBy, k.instant = l.settled, l.disarms, bySilence, l.instantBy, l.instant
	return k, true
}

// endPoll takes the answer of a poll into account, and calls somebody for what is due. listening is the epoch of the LISTEN
// connection now.
func (l *lane) endPoll(k look, r report, listening uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.instantBy.Equal(k.instantBy) { // or the lane looks by itself, and another instant has come since
		l.instantBy = time.Time{}
	}
	if !r.more() {
		l.leftNothing(k, r, listening)
		l.foundSilent(k)
		return
	}
	l.leftSome()
	t := token{reason: WakeScout, silent: k.bySilence, again: true}
	if !k.instantBy.IsZero() {
		t = k.instant
	}
	if t.sole || l.inside > 0 && len(l.tokens) == 0 { // or whoever comes looks
		l.emit(t)
	}
}
