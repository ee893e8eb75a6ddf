package pgwake

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/dbclock"
	"github.com/pgwake/pgwake/internal/supervise"
)

// This file answers: how do the pieces work together to make one fetch?

// engine is what a Provider adds to the verbs: it knows when to ask the database for work.
type engine struct {
	cfg   *Config
	sql   *statements
	pool  *pgxpool.Pool
	clock *dbclock.Clock
	modes *modes
	stats engineStats
	trust *trust

	waiters   *waiters
	waits     *waits
	leases    leases
	timer     *timer
	coalescer *coalescer
	settlers  [queueCount]*settler
	scouts    [queueCount]*scout
	alarms    [queueCount]*scout // for instants that have come, apart from those, so that neither waits for the other
	disarmer  *disarmer
	sweeper   *sweeper
	listener  *listener // nil: no long polling

	node     int32        // key of this node
	alone    atomic.Bool  // no other node listens
	joins    atomic.Int64 // how often another node has said that it begins to
	lanes    atomic.Int32 // so far
	failing  atomic.Bool  // the last query for work got no answer
	failures atomic.Int64 // such queries so far

	mu       sync.Mutex
	trouble  [queueCount]*aggressive
	nextPoll [queueCount]time.Time // of the lanes that poll
	doubts   [queueCount]doubt
	breaker  breaker
	shareAt  [queueCount]time.Time // server time: the instant that all were last told of by tellShare

	group *supervise.Group
	ctx   context.Context
	stop  context.CancelFunc

	// lost is told when the LISTEN connection is lost, and whether that was by its silence.
	lost func(silent bool)

	// tidy is called every now and then while the node hibernates: connections that nobody uses are to be closed.
	tidy func()

	// poolSilent is called when a connection of the pool did not answer, or leads to a server that takes no writes.
	poolSilent func()

	readCommitted bool // as the role's default isolation level
}

func newEngine(cfg *Config, sql *statements, pool *pgxpool.Pool, listen dialer, lost func(silent bool)) *engine {
	e := &engine{cfg: cfg, sql: sql, pool: pool, clock: dbclock.New(cfg.clock), modes: newModes(cfg), lost: lost, tidy: func() {}, poolSilent: func() {}, node: cmp.Or(int32(rand.Uint32()), 1)}
	e.trust = newTrust(e.clock.Now)
	e.timer = newTimer(e)
	e.coalescer = newCoalescer(e)
	e.waits = newWaits(e)
	e.waiters = newWaiters(e.modes, func(q Queue, f filter) *lane {
		l := newLane(q, f, e.clock.Now, e.timer.moved, &e.stats.queues[q])
		l.id, l.settler, l.overheard, l.trust = e.lanes.Add(1), e.settlers[q], e.disarmer.bell.ring, e.trust
		l.alone, l.passOn = func() bool { return e.alone.Load() && e.waiters.oneLane(q) }, e.coalescer.passOn
		if cfg.Notify != NotifyBroadcast {
			l.quietAbove = cfg.QuietAbove
		}
		if cfg.Notify == NotifyDirected {
			l.fanout = cfg.WakeFanout
		}
		return l
	})
	e.disarmer = newDisarmer(e)
	e.sweeper = newSweeper(e)
	for q := range Queue(queueCount) {
		e.settlers[q], e.scouts[q], e.alarms[q] = newSettler(e, q), newScout(e, q), newScout(e, q)
	}
	for q := range e.trouble {
		e.trouble[q] = newAggressive(cfg)
	}
	if !cfg.DisableLongPoll {
		e.listener = newListener(e, listen)
	}
	e.ctx, e.stop = context.WithCancel(context.Background())
	e.group = supervise.New(e.ctx, cfg.Logger)
	return e
}

// start sets the goroutines going and waits until the first attempt to listen has ended, so that a
// Provider hears from the moment it is returned.
func (e *engine) start(ctx context.Context) {
	e.group.Go("timer", e.timer.run)
	e.group.Go("coalescer", e.coalescer.run)
	e.group.Go("waits", e.waits.run)
	for q, s := range e.settlers {
		e.group.Go("settler "+Queue(q).String(), s.run)
	}
	for q := range Queue(queueCount) {
		for range pollsAtOnce {
			e.group.Go("scout "+q.String(), e.scouts[q].run)
			e.group.Go("alarm "+q.String(), e.alarms[q].run)
		}
	}
	e.group.Go("disarmer", e.disarmer.run)
	e.group.Go("sweeper", e.sweeper.run)
	if e.listener != nil {
		e.group.Go("listener", e.listener.run)
		select {
		case <-e.listener.tried:
		case <-ctx.Done():
		}
	}
}

func (e *engine) log() *slog.Logger { return e.cfg.Logger }

// inject is where a test may make the engine fail.
func (e *engine) inject(point string) {
	if e.cfg.fault != nil {
		e.cfg.fault(point)
	}
}

// session returns the LISTEN connection; the zero value: none.
func (e *engine) session() session {
	if e.listener == nil {
		return session{}
	}
	return e.listener.session()
}

// epoch identifies the LISTEN connection; 0: none.
func (e *engine) epoch() uint64 { return e.session().epoch }

// exec runs one of the engine's own small statements, which returns one value: on the LISTEN connection, so
// that an exhausted pool does not delay it, or else on the pool. What it notifies is not heard by this node.
// A connection that broke may have run it all the same: each of them may be run twice.
func (e *engine) exec(ctx context.Context, dest any, sql string, args ...any) error {
	if e.listener != nil {
		if err := e.listener.exec(ctx, dest, sql, args...); !errors.Is(err, errNotListening) {
			return err
		}
	}
	return e.onPool(ctx, time.Now().Add(answerDeadline), func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, sql, args...).Scan(dest)
	})
}

// onPool has do use a connection of the pool, until then, and longer while something comes. What gives no sign, be it a connection that is
// tried or made, or what do sends, has the pool reset: so another attempt is worth it.
func (e *engine) onPool(ctx context.Context, until time.Time, do func(context.Context, *pgxpool.Conn) error) error {
	conn, err := e.acquire(ctx, until)
	if err != nil {
		return err
	}
	return e.use(ctx, conn, until, do)
}

// undo runs a statement that gives back a claim, which takes the server as long as that is large, or as its rows are locked. On the LISTEN
// connection it has listenPatience, since notifications wait meanwhile; then it goes on the pool, with this patience.
func (e *engine) undo(ctx context.Context, patience time.Duration, dest any, sql string, args ...any) error {
	if e.listener != nil {
		err := e.listener.execJob(ctx, &job{sql: sql, args: args, dest: dest, patience: listenPatience})
		if ended := serverError(err); !errors.Is(err, errNotListening) && (ended == nil || ended.Code != "57014") {
			return err
		}
	}
	conn, err := e.acquire(ctx, time.Now().Add(answerDeadline))
	if err != nil {
		return err
	}
	return e.use(ctx, conn, time.Now().Add(patience), func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, sql, args...).Scan(dest)
	})
}

// patiently is onPool for what waits for others for settlePatience at most. While all connections are in use it waits for one, as
// Provider.acquire does.
func (e *engine) patiently(ctx context.Context, do func(context.Context, *pgxpool.Conn) error) error {
	conn, err := e.acquire(ctx, time.Now().Add(answerDeadline))
	for errors.Is(err, errPoolBusy) {
		conn, err = e.acquire(ctx, time.Now().Add(answerDeadline))
	}
	if err != nil {
		return err
	}
	return e.use(ctx, conn, time.Now().Add(settlePatience+answerDeadline), do)
}

// acquire waits for a connection until then. The error is errPoolBusy if all were in use.
func (e *engine) acquire(ctx context.Context, until time.Time) (*pgxpool.Conn, error) {
	conn, over, err := acquireUntil(ctx, e.pool, until)
	if over && !errors.Is(err, errPoolBusy) && !errors.Is(err, conns.ErrMaking) {
		e.poolSilent()
	}
	return conn, err
}

// use has do use the connection until then, and longer while something comes on it, and gives it back.
func (e *engine) use(ctx context.Context, conn *pgxpool.Conn, until time.Time, do func(context.Context, *pgxpool.Conn) error) error {
	defer conns.Release(conn) // also after a panic
	bounded, end := conns.WhileHeard(ctx, conns.LastHeard(conn.Conn()), until, answerDeadline)
	defer end()
	err := do(bounded, conn)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil || takesNoWrites(err) {
		e.poolSilent()
	}
	return err
}

// claim is one query for work that matches a filter. by is what demanded it; announce says whether to tell the other nodes when the
// leases end, and row what to write to the lane's row of waiters.
type claim func(ctx context.Context, f filter, by Path, announce bool, row rowWrite) (report, error)

// fetch makes the claim until it finds something, as often as there is reason to, or returns ErrNoWork
// when the time is up:
//
//  1. It asks once, unless the lane is known to be empty and the fetch is one that waits, or it asks for nothing.
//  2. It parks. That costs no query and holds no connection.
//  3. Each token makes it ask again.
//  4. When the time is up it returns, without asking: the lane's last answer still holds.
//
// If a mode changes that concerns it while it waits, it begins anew, with the time that is left.
func (e *engine) fetch(ctx context.Context, q Queue, plan fetchPlan, ask claim) error {
	for began := e.clock.Now(); ; {
		err := e.fetchOnce(ctx, q, plan, began, ask)
		if !errors.Is(err, errModeChanged) {
			return err
		}
		plan.ack = nil
	}
}

func (e *engine) fetchOnce(ctx context.Context, q Queue, plan fetchPlan, began time.Time, ask claim) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	l, err := e.waiters.enter(q, plan.filter)
	if err != nil {
		return err
	}
	defer func() { l.leave(err == nil) }()

	mayPark := !plan.noWait && !e.cfg.DisableLongPoll
	known := l.filter.nothing || mayPark && l.isEmpty(l.filter.manner.hears && e.epoch() != 0, e.staleAfter(l))
	if plan.ack != nil || !known {
		found, err := e.look(ctx, l, plan.lock, nil, ask)
		if found || err != nil {
			return err
		}
	}
	if !mayPark {
		return ErrNoWork
	}
	timeUp := time.NewTimer(plan.poll - e.clock.Now().Sub(began))
	defer timeUp.Stop()
	for {
		t, err := l.park(ctx, timeUp.C)
		if err != nil {
			return err
		}
		e.woken(q, t)
		found, err := e.look(ctx, l, plan.lock, &t, ask)
		if found || err != nil {
			return err
		}
	}
}

// staleAfter is how long an empty answer is good for without a LISTEN connection: past the scout's next poll,
// which renews it as long as anyone waits. So many dispatchers that call Fetch in short turns cost no more
// queries than one.
func (e *engine) staleAfter(l *lane) time.Duration {
	switch {
	case l.filter.manner.polls:
		return 2 * e.cfg.PollInterval
	case e.hibernates():
		return 2 * e.cfg.HibernatePoll
	case e.isAggressive(l.queue):
		return 2 * e.cfg.AggressiveInterval
	}
	return 0
}

// look queries for work until it gets an answer: one that is unfinished is none. by is the token that demanded it.
func (e *engine) look(ctx context.Context, l *lane, lockTimeout time.Duration, by *token, ask claim) (found bool, err error) {
	for {
		found, unfinished, err := e.lookOnce(ctx, l, lockTimeout, by, ask)
		if err != nil || !unfinished {
			return found, err
		}
	}
}

// lookOnce makes one query for work and lets the lane know what it says.
func (e *engine) lookOnce(ctx context.Context, l *lane, lockTimeout time.Duration, by *token, ask claim) (found, unfinished bool, err error) {
	answered := false
	session := e.session()
	k := l.beginLook(l.known(session))
	defer func() {
		if !answered {
			l.unanswered(k, by) // also when ask panics
		}
	}()
	sent := e.clock.Now()
	joined, announce := e.leases.announce(l.queue, e.clock.Server(sent), lockTimeout)
	if session.epoch == 0 {
		announce = true // who may have joined since, this node has not heard
	}
	owed := announce && e.coalescer.isFull() // work goes on: to hear of its leases is for the others, and later
	r, err := ask(ctx, l.filter, pathOf(by), announce && !owed, k.row)
	if announce && !owed && notificationsFull(err) {
		e.coalescer.full()
		owed = true
		r, err = ask(ctx, l.filter, pathOf(by), false, k.row)
	}
	if err != nil {
		// A cancelled caller says nothing about the database, and neither do others who use the pool. Whoever was told
		// that a lease has ended got an answer.
		if ctx.Err() == nil && e.ctx.Err() == nil && !errors.Is(err, errPoolBusy) && !errors.Is(err, ErrLockLost) {
			e.lookFailed(l.queue, err)
		}
		return false, false, err
	}
	answered = true
	l.endLook(k, r, by, l.known(e.session()).epoch)
	if r.limited {
		e.tellShare(l.queue, r)
	}
	e.keepInstants(l, r.now)
	e.lookAnswered()
	if r.found == 0 {
		e.observe(l.queue, outcomeEmpty)
		if by != nil && by.reason.announces() && !r.unfinished {
			e.stats.queues[l.queue].misses.Add(1)
		}
		return false, r.unfinished, nil
	}
	e.observe(l.queue, outcomeFound)
	e.trust.earn()
	e.stir()
	switch {
	case owed: // later, and with others: no claim may count on it
		e.coalescer.tell(l.queue, note{next: r.leaseEnd, all: true})
	case announce:
		e.leases.told(l.queue, r.leaseEnd, joined)
	}
	// The end of the lease is an instant for every lane here, whatever becomes of this dispatcher.
	e.waiters.each(l.queue, "", func(any *lane) { any.heard(r.leaseEnd, true) })
	c := &e.stats.queues[l.queue]
	c.items.Add(int64(r.found))
	c.finds[reasonOf(by)].Add(1)
	c.itemsBy[slices.Index(paths[:], pathOf(by))].Add(int64(r.found))
	return true, false, nil
}

// tellShare lets everybody know of the next instant. A claim puts off what comes too early for its key, to when that has a share for it, and
// nobody else hears of that; its own lane may have all hands full then, or its node be gone.
//
// Invariant: whoever waits knows of an instant no later than that of any item that was put off, and learns by the answer then of the next. So
// there is nothing to say of one that does not come before the last that was told.
func (e *engine) tellShare(q Queue, r report) {
	e.mu.Lock()
	told := !r.earliest.After(r.now) || e.shareAt[q].After(r.now) && !r.earliest.Before(e.shareAt[q])
	if !told {
		e.shareAt[q] = r.earliest
	}
	e.mu.Unlock()
	if told {
		return
	}
	n := note{next: r.earliest}
	e.signal(q, n, WakeLocal)
	e.coalescer.tell(q, n)
}

// lookAnswered takes note of a query for work that the database answered.
func (e *engine) lookAnswered() {
	e.guard(nil)
	if e.failing.Swap(false) && e.listener != nil {
		e.listener.retryNow()
	}
}

// lookFailed takes note of one that failed in the database.
func (e *engine) lookFailed(q Queue, err error) {
	e.failures.Add(1)
	e.failing.Store(true)
	e.stir() // who hibernates finds out what is wrong by listening
	e.enterAggressive(q, troubleFetch)
	e.observe(q, outcomeFailed)
	e.guard(err)
}

// keepInstants has the lane look at the next instant that this node was told of, whatever an answer said: those
// who claimed count on it (leases.go).
func (e *engine) keepInstants(l *lane, now time.Time) {
	if next := e.leases.next(l.queue, now); !next.IsZero() {
		l.keep(next)
	}
}

func reasonOf(by *token) WakeReason {
	if by == nil {
		return WakeFetch
	}
	return by.reason
}

func pathOf(by *token) Path {
	if by != nil && by.path != "" {
		return by.path
	}
	return reasonOf(by).path()
}

// woken accounts for a token that a parked dispatcher took.
func (e *engine) woken(q Queue, t token) {
	// A poll would lead to the next for ever; and settling, like polling, is the node's own doing.
	if e.cfg.AggressivePolicy == OnEveryWake && t.reason != WakeScout && t.reason != WakeSettle && !e.hibernates() {
		e.enterAggressive(q, troubleWake)
	}
	if t.reason == WakeNotify && !t.handed.IsZero() && e.clock.Now().Sub(t.handed) > e.cfg.NotifyDeliveryTimeout {
		e.enterAggressive(q, troubleDelivery)
	}
}

// heard takes in what a notification says.
func (e *engine) heard(q Queue, n note) {
	if n != joined {
		e.stir()
	}
	switch {
	case n == joined:
		e.joins.Add(1)
		e.inCompany()
		// It looks at what was told before only if it is told again, and what is claimed from here on counts on
		// what is told from here on.
		if next := e.leases.joined(q, e.clock.Server(e.clock.Now())); !next.IsZero() {
			e.coalescer.answer(q, note{next: next, all: true})
		}
	case !n.next.IsZero() && n.namespace == "": // every lane of every node will look then
		e.leases.heard(q, n.next)
	}
	e.signal(q, n, WakeNotify)
}

// inCompany is called when another node has begun to listen: it may take what nobody here can.
func (e *engine) inCompany() {
	e.alone.Store(false)
	for q := range Queue(queueCount) {
		for _, l := range e.waiters.lanes(q) {
			l.reconsider()
		}
	}
}

// called takes in a notification that came to a lane of this node alone, or to few others.
func (e *engine) called(q Queue, c call) {
	e.stir()
	if l := e.waiters.byID(q, c.lane); l != nil {
		l.called(c)
		return
	}
	// The lane has retired. Its dispatchers may be back in another one, or it is for others.
	n := note{due: 1, namespace: c.namespace}
	e.signal(q, n, WakeNotify)
	e.coalescer.answer(q, n)
}

// signal passes a note on to the lanes that it concerns.
func (e *engine) signal(q Queue, n note, why WakeReason) {
	e.waiters.each(q, n.namespace, func(l *lane) {
		if !n.next.IsZero() {
			l.heard(n.next, n.namespace == "")
		}
		if n.due > 0 && (why != WakeNotify || l.filter.manner.hears) {
			l.signal(why)
		}
	})
}

// quiet reports whether an enqueue of this Provider may leave the notification to the coalescer.
func (e *engine) quiet() bool { return e.epoch() != 0 }

// produced is something that a committed transaction made due, at once or later.
type produced struct {
	queue      Queue
	namespace  string
	label      *string   // tag or queue name; nil: not whoever serves that can take it, for all that is known
	dueAt, now time.Time // server time
}

// tell lets this node know what was just committed, and the others if the transaction was quiet.
func (e *engine) tell(all []produced, quiet bool) {
	e.stir()
	var notes [queueCount]*note
	type kind struct {
		queue            Queue
		namespace, label string
	}
	var unwanted map[kind]bool // for those nobody was found to wait: a large batch need not look again for each of its items
	for _, d := range all {
		n := note{namespace: d.namespace}
		if d.dueAt.After(d.now) {
			n.next = d.dueAt
		} else {
			// One of this node who can come takes care of it, and if he finds more than that, of the rest.
			n.due = 1
			if d.label != nil && e.cfg.Notify == NotifyDirected {
				if k := (kind{d.queue, d.namespace, *d.label}); quiet && !unwanted[k] {
					if e.waiters.callParked(d) {
						continue
					}
					if unwanted == nil {
						unwanted = make(map[kind]bool)
					}
					unwanted[k] = true
				}
				n.forAny, n.label = true, d.label
			}
		}
		if notes[d.queue] != nil {
			n = notes[d.queue].merge(n)
		}
		notes[d.queue] = &n
	}
	for q, n := range notes {
		if n == nil {
			continue
		}
		e.signal(Queue(q), *n, WakeLocal)
		if quiet {
			e.coalescer.tell(Queue(q), *n)
		}
	}
}

// acked is called after the commit of an ack that ended a turn.
func (e *engine) acked(freed string, due []produced, quiet bool) {
	e.tell(due, quiet)
	e.released(freed, quiet)
}

// renewed is called after the commit of a renewal. If it made the lease end sooner, the other nodes were notified
// of that, and so was this one if it listens.
func (e *engine) renewed(q Queue, until time.Time) {
	e.stir()
	e.signal(q, note{next: until}, WakeLocal)
}

// letGo is called after the commit of what leaves to anybody what was an owner's. The other nodes were notified, and so was
// this one if it listens.
func (e *engine) letGo(q Queue) {
	e.stir()
	e.signal(q, note{due: 1}, WakeLocal)
}

// A request whose sender has given up may still be under way: it arrives, waits for a lock, and commits whenever
// that is free. So after a doubt everybody looks not once but after each of these pauses; what commits later than all of
// them is the fallback's to find.
var doubtPauses = [...]time.Duration{100 * time.Millisecond, 400 * time.Millisecond, 1500 * time.Millisecond, 6 * time.Second, 20 * time.Second}

// doubt is a queue to which a statement without an answer may add something.
type doubt struct {
	pauses int       // how many of them are over
	next   time.Time // local: the end of the next; zero: there is no doubt
}

// unsure is called when nobody knows whether a transaction that was to feed the queues was committed, or will be.
// A look also learns of what is not due yet.
func (e *engine) unsure(queues ...Queue) {
	if len(queues) > 0 {
		e.stir()
	}
	for _, q := range queues {
		e.mu.Lock()
		e.doubts[q] = doubt{next: e.clock.Now().Add(doubtPauses[0])}
		e.mu.Unlock()
		e.assumeDue(q)
	}
	e.timer.moved()
}

// assumeDue makes everybody look.
func (e *engine) assumeDue(q Queue) {
	e.signal(q, note{due: 1}, WakeLocal)
	if q == Orchestrator {
		e.waits.lookAtAll()
	}
	e.coalescer.assumeDue(q)
}

// resolveDoubt makes everybody look if it is time to, and returns when it will be next.
func (e *engine) resolveDoubt(q Queue) (next time.Time, doubtful bool) {
	e.mu.Lock()
	d, now := &e.doubts[q], e.clock.Now()
	over := !d.next.IsZero() && !d.next.After(now)
	if over {
		d.pauses++
		d.next = time.Time{}
		if d.pauses < len(doubtPauses) {
			d.next = now.Add(doubtPauses[d.pauses])
		}
	}
	next = d.next
	e.mu.Unlock()
	if over {
		e.assumeDue(q)
	}
	return next, !next.IsZero()
}

// undone makes this node look for what an undone claim gave back. The notification of that reached the other
// nodes only if it came from the LISTEN connection, whose own voice is not heard.
func (e *engine) undone(q Queue) { e.signal(q, note{due: 1}, WakeLocal) }

// How soon after a release a dispatcher of this node must have looked by itself before one is called, and
// before the other nodes are asked to. Whoever acknowledged a turn is likely to fetch the next at once.
const (
	callAfter  = 2 * time.Millisecond
	relayAfter = 10 * time.Millisecond
)

// released is called after the commit of what freed an instance. A message that committed between that
// transaction's last snapshot and its commit was seen by neither side: its wake-up found the lease still
// held. So somebody looks once more: a dispatcher of this node, the one that acknowledged or else one that is
// called, or another node's.
func (e *engine) released(namespace string, quiet bool) {
	asked := false
	e.waiters.each(Orchestrator, namespace, func(l *lane) {
		asked = true
		l.released(quiet)
	})
	if quiet && !asked {
		e.coalescer.tell(Orchestrator, note{due: 1, namespace: namespace})
	}
}

func (e *engine) enterAggressive(q Queue, why trouble) {
	e.mu.Lock()
	e.trouble[q].enter(why, e.clock.Now())
	e.mu.Unlock()
	e.timer.moved()
}

func (e *engine) observe(q Queue, o outcome) {
	if o == outcomeEmpty && e.listener != nil && !e.listener.rests() && e.epoch() == 0 {
		return // no sign that notifications get through: there are none
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.trouble[q].observe(o, e.clock.Now())
}

// guard has the breaker take note of a query for work, or of the periodic statement: nil, it was answered.
func (e *engine) guard(err error) {
	e.mu.Lock()
	before := e.breaker.state
	if err == nil {
		e.breaker.succeeded()
	} else {
		e.breaker.failed(err, e.clock.Now())
	}
	now := e.breaker.state
	e.mu.Unlock() // whoever takes the log may ask for Health
	switch {
	case now == before:
	case now == breakerOpen:
		e.log().Warn("pgwake: no polls for a while, or until a query for work succeeds: one after the other has failed", "error", err)
	case now == breakerClosed:
		e.log().Info("pgwake: polling again")
	}
}

// mayPoll reports whether to make a poll, or to skip it.
func (e *engine) mayPoll() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.breaker.allows(e.clock.Now())
}

func (e *engine) isAggressive(q Queue) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, active := e.trouble[q].poll()
	return active
}

// pollQueue polls a queue if it is time to, and returns when it will be next.
func (e *engine) pollQueue(q Queue) (next time.Time, polling bool) {
	e.mu.Lock()
	now := e.clock.Now()
	var p polls
	if e.modes.any(func(m Mode) bool { return m == ModePolling }) {
		if p.byMode = !e.nextPoll[q].After(now); p.byMode {
			e.nextPoll[q] = now.Add(e.cfg.PollInterval)
		}
		next, polling = e.nextPoll[q], true
	}
	if at, aggressive := e.trouble[q].poll(); aggressive {
		if p.troubled = !at.After(now); p.troubled {
			e.trouble[q].polled(now)
			at, _ = e.trouble[q].poll()
		}
		if !polling || at.Before(next) {
			next, polling = at, true
		}
	}
	if p != (polls{}) && !e.breaker.allows(now) {
		p = polls{}
	}
	e.mu.Unlock()
	e.poll(q, p)
	return next, polling
}

// listenerLost voids what was known by listening.
func (e *engine) listenerLost(watched bool) {
	if e.ctx.Err() != nil {
		return
	}
	if watched {
		e.waits.lookAtWatches()
	}
	e.waits.bell.ring() // from here on it polls
	for q := range Queue(queueCount) {
		for _, l := range e.waiters.lanes(q) {
			if l.filter.manner.hears {
				l.forget()
			}
		}
		e.enterAggressive(q, troubleListener)
	}
}

// listenerUp makes every lane, and whoever waits for an instance, look once, in a snapshot that is younger than the
// LISTEN, and lets the other nodes know that there is one more to tell of leases.
func (e *engine) listenerUp() {
	e.waits.lookAtAll()
	for q := range Queue(queueCount) {
		e.leases.joined(q, e.clock.Server(e.clock.Now())) // others may have, unheard
		for _, l := range e.waiters.lanes(q) {
			if l.filter.manner.hears {
				l.reconnected()
			}
		}
	}
	e.coalescer.join()
}

// endWaits ends every wait, for work and for instances, with ErrClosed, and lets none begin.
func (e *engine) endWaits() {
	e.waiters.close()
	e.waits.close()
}

// close ends the waits, says what is left to say, and ends the goroutines; ctx bounds it.
func (e *engine) close(ctx context.Context) {
	e.endWaits()
	// Before the goroutines end, since one of them may be in the middle of saying it. A node that cannot get
	// it said is a node that died: the fallback's case.
	for q := range Queue(queueCount) {
		e.mu.Lock()
		doubtful := !e.doubts[q].next.IsZero()
		e.mu.Unlock()
		if doubtful {
			e.coalescer.assumeDue(q)
		}
	}
	flushing, cancel := context.WithTimeout(ctx, time.Second)
	_ = e.coalescer.flush(flushing)
	e.leave(flushing)
	cancel()
	e.stop()
	if e.listener != nil {
		defer context.AfterFunc(ctx, e.listener.cut)()
	}
	e.group.Wait()
}
