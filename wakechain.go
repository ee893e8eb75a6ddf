package pgwake

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// This file answers: which of the waiting dispatchers goes to look, and when need nobody look at all?
//
// A lane is the set of this node's dispatchers that fetch the same thing: one queue, one filter. It hands out tokens. A
// token is the duty to query once, in a snapshot taken after the token was made; one token wakes one parked dispatcher.
//
// Invariants
//
//	(1) Every signal, and every release, is followed by a query that begins after it, or finds as many such
//	    queries already owed as the lane has dispatchers. What is put off (trust.go) is a signal when its instant
//	    comes. A token is spent only by a query that the server answered; a dispatcher that leaves without having made
//	    one hands the token on (handBack). But a poll that fails is made up for by the next.
//	(2) empty is true only if a query, or a poll (scout.go), left nothing due, no other has since it began, it began
//	    while the node was listening and the lane settled (settle.go), both have been so ever since, and no signal
//	    came after it began. Whoever commits due work after that query's snapshot causes a signal, so there is nothing to find
//	    until one comes.
//	(3) earliest, or told, is never later than the next instant at which something becomes due, unless a token is
//	    owed: earliest is replaced only by what a query reports during which no new instant and no other answer
//	    came in, lowered by every instant heard of, and cleared only together with the emission of a token, or when that is put
//	    off. So is told, for the instants at which all lanes look; but instead of a token the lane may be polled, and owes one
//	    from instantBy on unless the poll has paid for it (scout.go).
//	(4) While the query that a token or a release demands reports more due work than it took, it passes a
//	    token on.
//	(5) A token that is sole, because nobody else was told of what it is for, lies in store only while somebody of the lane
//	    is inside a fetch, or about to be back, or while no other node listens. Otherwise the node has it passed on
//	    (bounce.go).

// Queue names one of the two queues.
type Queue int

const (
	// Orchestrator is the queue of messages to instances, fetched as turns.
	Orchestrator Queue = iota
	// Worker is the queue of single work items.
	Worker

	queueCount = 2
)

func (q Queue) String() string {
	if q == Orchestrator {
		return "orchestrator"
	}
	return "worker"
}

// WakeReason says what made a dispatcher look for work.
type WakeReason int

const (
	WakeFetch     WakeReason = iota // nothing: the query at the start of a fetch
	WakeNotify                      // a notification
	WakeTimer                       // an instant at which something became due
	WakeChain                       // another dispatcher, which found more than it could take
	WakeLocal                       // an enqueue or a release by this Provider itself
	WakeReconnect                   // the LISTEN connection is up (again)
	WakeFallback                    // the periodic statement found something due
	WakeScout                       // a poll: ModePolling, trouble, hibernation, rows that others had locked, or a producer that stays open
	WakeSettle                      // producers that may have been silent have ended

	wakeReasons = 9
)

func (r WakeReason) String() string {
	return [...]string{"fetch", "notify", "timer", "chain", "local", "reconnect", "fallback", "scout", "settle"}[r]
}

// announces reports whether a signal for this reason means that somebody, or the clock, told the node of
// due work. The others are the safety net.
func (r WakeReason) announces() bool { return r != WakeFallback && r != WakeScout }

// Path says how a claim came about, for whoever compares them.
type Path string

const (
	PathEvent   Path = "event"   // somebody, or the clock, told the node of due work
	PathPolling Path = "polling" // a poll, or the fallback, found it
	PathFetch   Path = "fetch"   // nobody had to tell: it was there when the fetch began
)

var paths = [...]Path{PathEvent, PathPolling, PathFetch}

// path is that of a claim to which a token of this reason led, unless it was passed on by the chain, which goes by its beginning.
func (r WakeReason) path() Path {
	switch r {
	case WakeFetch:
		return PathFetch
	case WakeFallback, WakeScout:
		return PathPolling
	}
	return PathEvent
}

type token struct {
	reason WakeReason
	path   Path   // how what it is for was found; "": as the reason says
	sole   bool   // nobody else was told
	hop    int    // how often it was passed on
	silent bool   // nobody need have told this lane of what it is for
	again  bool   // another one follows in a while, whatever becomes of it
	signal uint64 // the signal that made it
	at     time.Time
	handed time.Time // when it was given to a parked dispatcher; zero: it lay in store
}

// parked is a dispatcher that waits. Its channel holds one token.
type parked struct{ wake chan token }

type lane struct {
	queue  Queue
	filter filter
	now    func() time.Time
	moved  func() // called, with mu held, when the timer goroutine has an earlier instant to meet
	stats  *queueStats

	id         int32 // unique on this node
	fanout     int   // how many lanes are to be told of an item; 0: all
	alone      func() bool
	passOn     func(l *lane, hop int) // called, with mu held, for a token that is to be passed on
	quietAbove int                    // Config.QuietAbove; 0: it stays armed
	settler    *settler
	overheard  func() // called, with mu held, when the lane should disarm although nobody of it fetches
	trust      *trust

	mu      sync.Mutex
	closed  chan struct{}
	dropped chan struct{} // closed when a mode changes that concerns the lane
	waiting []*parked     // first come, first served
	tokens  []token       // not taken yet, oldest first
	inside  int           // dispatchers inside a fetch
	seen    int           // most of them at one time: the capacity of tokens
	idle    time.Time     // when the last one left

	signals   uint64 // so far
	announced uint64 // those of them for which announces() holds
	answered  uint64 // announced, when the last query began that left nothing: what they announced is found
	heardOf   uint64 // due instants heard of so far
	answers   uint64 // of queries, so far
	left      uint64 // those of them that left something due
	empty     bool   // invariant (2)
	lookedAt  time.Time
	earliest  time.Time // invariant (3), server time; zero: none
	early     time.Time // the earliest for which TimerGrace has been used up
	told      time.Time // the next instant at which all lanes of the queue look, such as the end of a lease, server time; zero: none
	instantBy time.Time // local: told has come, or putOffTo, and by then somebody is to have looked, or a poll: invariant (3); zero: nothing is owed
	instant   token     // what somebody looks for then

	retryAt   time.Time // local: when to look again at rows that somebody had locked; zero: never
	retryStep time.Duration
	retrySole bool // nobody else was told of what is there

	standByAt time.Time // local: when to look for what another lane should have taken; zero: never
	standsBy  uint64    // the latest signal that asked for it

	putOffTo time.Time // local: when to look for what was notified without credit (trust.go); zero: never
	late     token     // all of that as one

	leftAt   time.Time // when the last one left who is likely to be back
	bounceAt time.Time // local: when to see whether he is; zero: never

	// After a release, unless a look begins before; local, zero: never.
	call  time.Time // when to give a token
	relay time.Time // when to ask another node to look

	suspects []suspect // finds that may turn out not to have been announced

	arming
}

// suspect is a find by the safety net. It counts as unannounced unless a signal comes by the deadline.
type suspect struct {
	reason    WakeReason
	announced uint64
	deadline  time.Time
}

func newLane(q Queue, f filter, now func() time.Time, moved func(), stats *queueStats) *lane {
	return &lane{queue: q, filter: f, now: now, moved: moved, stats: stats,
		trust: newTrust(now), closed: make(chan struct{}), dropped: make(chan struct{}), idle: now(), alone: func() bool { return true }, arming: arming{mostPause: lastDisarmPause}}
}

// known is the LISTEN connection by which the lane learns of work; the zero value: none.
func (l *lane) known(s session) session {
	if !l.filter.manner.hears {
		return session{}
	}
	return s
}

// serves reports whether the lane may take items of the namespace; "" stands for any.
func (l *lane) serves(namespace string) bool {
	return l.filter.Namespaces == nil || namespace == "" || slices.Contains(l.filter.Namespaces, namespace)
}

// signal tells the lane that there may be due work: one dispatcher is to look.
func (l *lane) signal(why WakeReason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if why == WakeNotify {
		l.notified(token{reason: why})
		return
	}
	l.emit(token{reason: why})
}

// notified is emit for what others have called for, or may have. Without credit that is put off. Until then it is an instant that the lane
// knows of, and no signal. The caller holds mu.
func (l *lane) notified(t token) {
	first := l.putOffTo.IsZero()
	if !l.trust.putOff(&l.putOffTo) {
		l.emit(t)
		return
	}
	l.stats.putOff.Add(1)
	if !first {
		l.late.sole, l.late.hop = l.late.sole || t.sole, max(l.late.hop, t.hop)
		return
	}
	l.late = t
	l.moved()
}

// emit is signal for whoever holds mu, and for a token with more to it than the reason.
func (l *lane) emit(t token) {
	l.heardSignal(t.reason)
	l.give(t)
}

// give is emit for a signal that was heard already.
func (l *lane) give(t token) {
	l.stats.tokens[t.reason].Add(1)
	if t.reason == WakeNotify {
		if l.untaken++; l.isUnused() {
			l.overheard()
		}
	}
	t.signal, t.at = l.signals, l.now()
	l.hand(t)
}

// heardSignal takes it in that there may be due work. The caller holds mu.
func (l *lane) heardSignal(why WakeReason) {
	l.signals++
	if why.announces() {
		l.judge()
		l.suspects = l.suspects[:0] // this announces them
		l.announced++
	}
	if why != WakeScout { // a poll says nothing about the queue
		l.empty = false
	}
}

// hand gives the token to the dispatcher that waits longest, or keeps it. A lane that owes as many queries
// as it has dispatchers has called everyone, and one token can go: the oldest. A query that serves a newer one
// serves it as well; a query under way may serve the older ones alone.
func (l *lane) hand(t token) {
	if len(l.waiting) > 0 {
		first := l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		t.handed = l.now()
		l.pay(t)
		first.wake <- t
		return
	}
	at, _ := slices.BinarySearchFunc(l.tokens, t.signal, func(stored token, signal uint64) int { return cmp.Compare(stored.signal, signal) })
	l.tokens = slices.Insert(l.tokens, at, t)
	if len(l.tokens) > max(l.seen, 1) {
		if first, second := l.tokens[0], &l.tokens[1]; first.sole {
			second.sole, second.hop = true, max(first.hop, second.hop)
		}
		l.tokens = slices.Delete(l.tokens, 0, 1)
	}
	l.bounce()
}

// pay spends credit for the query that somebody makes who has been given the token.
func (l *lane) pay(t token) {
	if t.reason == WakeNotify || t.reason == WakeTimer {
		l.trust.spend()
	}
}

// handBack returns a token whose query was not made, or not answered.
func (l *lane) handBack(t token) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.empty = false
	l.hand(t)
}

func (l *lane) enter() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside++
	l.untaken = 0
	l.seen = max(l.seen, l.inside)
}

// leave ends what enter began; busy says that it was with something to do.
func (l *lane) leave(busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside--
	l.idle = l.now()
	if !busy {
		l.leftAt = l.idle
	}
	l.bounce()
}

// isEmpty reports whether a query would find nothing, by invariant (2). Without a LISTEN connection, an
// answer is good for `stale`, the time until the scout looks anyway; 0 then means not at all.
func (l *lane) isEmpty(listening bool, stale time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.empty && (listening || l.now().Sub(l.lookedAt) < stale)
}

// forget drops what is known about the lane, because notifications may have been lost.
func (l *lane) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = false
	l.unsettle()
}

// errModeChanged: a fetch is to begin anew.
var errModeChanged = errors.New("the mode has changed")

// park waits for a token. It returns ErrNoWork when the deadline fires, the context's error, ErrClosed, or errModeChanged.
func (l *lane) park(ctx context.Context, deadline <-chan time.Time) (token, error) {
	select {
	case <-l.closed:
		return token{}, ErrClosed
	case <-l.dropped:
		return token{}, errModeChanged
	default:
	}
	l.mu.Lock()
	if len(l.tokens) > 0 {
		t := l.tokens[0]
		l.tokens = slices.Delete(l.tokens, 0, 1)
		l.mu.Unlock()
		l.pay(t)
		return t, nil
	}
	self := &parked{wake: make(chan token, 1)}
	l.waiting = append(l.waiting, self)
	l.mu.Unlock()

	var err error
	select {
	case t := <-self.wake:
		return t, nil
	case <-deadline:
		err = ErrNoWork
	case <-ctx.Done():
		err = ctx.Err()
	case <-l.closed:
		err = ErrClosed
	case <-l.dropped:
		err = errModeChanged
	}

	l.mu.Lock()
	at := slices.Index(l.waiting, self)
	if at >= 0 {
		l.waiting = slices.Delete(l.waiting, at, at+1)
	}
	l.mu.Unlock()
	if at < 0 { // a token came at the same moment: invariant (1)
		l.handBack(<-self.wake)
	}
	return token{}, err
}

// look is a query for work in flight: what the lane knew when it began.
type look struct {
	began     time.Time
	call      time.Time // what was owed for a release, and is paid by an answer
	relay     time.Time
	answers   uint64
	left      uint64
	signals   uint64
	announced uint64
	heardOf   uint64
	session   session

	row     rowWrite
	settled bool
	disarms uint64

	bySilence bool      // a poll: of what it finds nobody was to tell
	instantBy time.Time // a poll: what it pays for
	instant   token
}

func (l *lane) beginLook(s session) look {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.looks.Add(1)
	k := l.knows(s)
	if k.row = l.beginWrite(s); k.row.number != 0 {
		l.writing++
	}
	k.settled, k.disarms = l.settled, l.disarms
	k.call, k.relay = l.call, l.relay
	l.call, l.relay = time.Time{}, time.Time{}
	return k
}

// unanswered returns what a query was to pay for, and did not: the token that demanded it, and a release.
func (l *lane) unanswered(k look, by *token) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.row.number != 0 {
		l.writing--
		l.unheardOf = l.now()
	}
	if by != nil {
		l.empty = false
		if !by.again { // or a database that fails one query would be asked at once by all who wait
			l.hand(*by)
		}
	}
	if !k.call.IsZero() {
		l.empty = false
		l.call = k.call // earlier than any since
		l.moved()
	}
	if !k.relay.IsZero() {
		l.relay = k.relay
		l.moved()
	}
}

// knows is what a query begins with.
func (l *lane) knows(s session) look {
	return look{began: l.now(), answers: l.answers, left: l.left, signals: l.signals, announced: l.announced, heardOf: l.heardOf, session: s}
}

// report is what a query for work brought back.
type report struct {
	found    int
	earliest time.Time // earliest visible_at that is left, server time; zero: none
	now      time.Time // server time
	leaseEnd time.Time // of what was found, server time
	limited  bool      // limits hold somewhere

	// unfinished: it found nothing so far, got somewhere, and has to be asked again at once.
	unfinished bool
}

func (r *report) more() bool { return !r.earliest.IsZero() && !r.earliest.After(r.now) }

// endLook takes the answer of a query into account. listening is the epoch of the LISTEN connection now.
func (l *lane) endLook(k look, r report, by *token, listening uint64) {
	// Several releases may have left one look to make, and each of them a due item.
	sole := by != nil && by.sole || !k.call.IsZero()
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.row.number != 0 {
		l.writing--
	}
	if demanded := by != nil || !k.call.IsZero(); r.found > 0 && demanded && r.more() {
		defer l.emit(token{reason: WakeChain, path: pathOf(by), sole: sole}) // invariant (4)
	}
	if by != nil && r.found > 0 {
		// Another dispatcher may be on its way because of an announcement, and this one was faster.
		if !by.reason.announces() && !by.silent && l.announced == l.answered {
			l.suspects = append(l.suspects, suspect{by.reason, l.announced, l.now().Add(announceGrace)})
		}
		l.stats.latency.observe(l.now().Sub(by.at))
	}
	if r.found > 0 {
		l.found(k)
	} else {
		l.foundNone(k, listening)
	}
	if r.more() {
		l.leftSome()
		if r.found == 0 { // contended: a plain read sees due rows
			l.retryStep = max(min(2*l.retryStep, maxRetryInterval), firstScoutInterval)
			l.retryAt = l.now().Add(l.retryStep)
			l.retrySole = l.retrySole || sole
			l.moved()
		}
		return
	}

	// Nothing is left that this query could have seen: it has paid for every token made before it began.
	l.tokens = slices.DeleteFunc(l.tokens, func(t token) bool { return t.signal <= k.signals })
	if l.standsBy <= k.signals {
		l.standByAt = time.Time{}
	}
	l.leftNothing(k, r, listening)
}

// leftSome takes it into account that an answer left something due. The caller holds mu.
func (l *lane) leftSome() {
	l.answers++
	l.left++
	l.empty = false
}

// leftNothing takes it into account that one left nothing due. The caller holds mu.
func (l *lane) leftNothing(k look, r report, listening uint64) {
	l.answered = max(l.answered, k.announced)
	l.learn(k, r)
	if l.left == k.left { // or one that overtook this one saw what this one may be too old to have seen
		l.retryAt, l.retryStep, l.retrySole = time.Time{}, 0, false
		l.lookedAt = k.began
		missed := k.session.epoch != listening || listening != 0 && !(k.settled && l.disarms == k.disarms)
		l.empty = l.empty || l.signals == k.signals && !missed
	}
}

// learn takes over the earliest instant that an answer reports. If another answer came in since its query began,
// nobody knows which of the two saw the newer state; and an instant that was heard of meanwhile it need not have
// seen: then only an earlier instant counts.
func (l *lane) learn(k look, r report) {
	latest := l.answers == k.answers
	l.answers++
	if latest && l.heardOf == k.heardOf {
		l.earliest, l.told = r.earliest, time.Time{} // what others count on is told again (keepInstants)
		l.moved()
	} else {
		l.lower(&l.earliest, r.earliest)
	}
}

// heard tells the lane of an instant, in server time, at which something becomes due. shared says that all lanes of the queue are told,
// few of which will find it: they look together.
func (l *lane) heard(at time.Time, shared bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heardOf++
	if shared {
		l.lower(&l.told, at)
	} else {
		l.lower(&l.earliest, at)
	}
}

// released tells the lane that a look is owed that begins after now: whoever fetches next makes it, or in
// time the timer calls somebody. relay says whether to ask another node too, if nobody here has looked.
func (l *lane) released(relay bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.signals++ // a look that is under way does not count
	l.empty = false
	if l.call.IsZero() {
		l.call = l.now().Add(callAfter)
		l.moved()
	}
	if relay && l.relay.IsZero() {
		l.relay = l.now().Add(relayAfter)
	}
}

// keep has the lane look at an instant at which it knows of nothing.
func (l *lane) keep(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lower(&l.told, at)
}

func (l *lane) lower(known *time.Time, at time.Time) {
	if !at.IsZero() && (known.IsZero() || at.Before(*known)) {
		*known = at
		l.moved()
	}
}

// retire reports whether nobody has used the lane for a minute, so that it can be dropped.
func (l *lane) retire() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inside == 0 && l.putOffTo.IsZero() && l.call.IsZero() && l.relay.IsZero() && l.now().Sub(l.idle) > time.Minute
}

// announceGrace is how long after a find by the safety net the signal that should have led to it may come.
const announceGrace = 100 * time.Millisecond

// judge counts the finds whose deadline has passed without a signal. The others wait on.
func (l *lane) judge() {
	now := l.now()
	l.suspects = slices.DeleteFunc(l.suspects, func(s suspect) bool {
		late := now.After(s.deadline)
		if late && s.announced == l.announced {
			l.stats.unannounced[s.reason].Add(1)
		}
		return late || s.announced != l.announced
	})
}

// audit is judge for whoever does not hold mu.
func (l *lane) audit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.judge()
}
