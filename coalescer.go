package pgwake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// This file answers: how do the other nodes learn what this one did?
//
// A notification inside a producer's transaction makes its commit take the one lock of the whole server
// that orders notifications, and hold it while the commit reaches the disk: writers queue up behind each
// other. So the library's own producers commit without one and leave what there is to say here. The
// coalescer says it right after, where somebody waits to hear it, in a small transaction of its own that waits for no
// disk: the first few at once (leading edge), and on average at most one per CoalesceInterval; whatever cannot go at
// once is merged into the next (trailing edge). What cannot be sent now is sent later. Dropped is only what the server refuses for what it
// says: it would for ever, and all that is merged into it.
//
// Changes of instances travel the same way, by the hash of their ids; of more than maxChanges it says: any.
//
// A process that dies between its commit and this transaction leaves the item to the other nodes'
// fallback. Producers that cannot accept that, or that bring their own transaction, use the Tx twins.

// note is what a notification says: how many items are due, when the next one will be, and where.
type note struct {
	due       int64
	next      time.Time // server time; zero: none
	namespace string    // "": any

	// all: every node is told, whether it waits or not, because what this is about may not be there to be seen yet. It
	// does not travel.
	all bool

	// forAny: what is due can be taken by whoever serves its namespace, and tag or queue name, which is label if it is the
	// same for all of it. Neither travels.
	forAny bool
	label  *string
}

// joined is the note by which a node says that it has begun to listen.
var joined = note{}

// merge returns a note that says at least what both say.
func (n note) merge(m note) note {
	switch {
	case n.due == 0:
		n.forAny, n.label = m.forAny, m.label
	case m.due > 0:
		n.forAny = n.forAny && m.forAny
		if n.label != nil && (m.label == nil || *n.label != *m.label) {
			n.label = nil
		}
	}
	n.due += m.due
	n.all = n.all || m.all
	if n.next.IsZero() || (!m.next.IsZero() && m.next.Before(n.next)) {
		n.next = m.next
	}
	if n.namespace != m.namespace {
		n.namespace = ""
	}
	return n
}

type coalescer struct {
	e        *engine
	interval time.Duration

	mu      sync.Mutex
	pending pending
	bell    bell
	turn    chan struct{} // held while something is being sent

	answerAt time.Time // local: when to say what a notification has called for, without credit (trust.go); zero: at once
}

// pending is what there is to say.
type pending struct {
	notes   [queueCount]*note
	bounced map[*lane]int   // tokens to pass on: how often they were, the most of them
	changed map[string]bool // payloads of the instance channel
	joined  bool            // this node has begun to listen
	readOn  bool            // the server's queue is full, as far as is known
	answers bool            // some of it a notification has called for
}

func (p *pending) tell(q Queue, n note) {
	if p.notes[q] != nil {
		n = p.notes[q].merge(n)
	}
	p.notes[q] = &n
}

func (p *pending) passOn(l *lane, hop int) {
	if p.bounced == nil {
		p.bounced = make(map[*lane]int)
	}
	p.bounced[l] = max(p.bounced[l], hop)
}

func (p *pending) change(payloads map[string]bool) {
	if p.changed == nil {
		p.changed = make(map[string]bool)
	}
	maps.Copy(p.changed, payloads)
	if len(p.changed) > maxChanges || p.changed[anyInstance] {
		p.changed = map[string]bool{anyInstance: true}
	}
}

func newCoalescer(e *engine) *coalescer {
	return &coalescer{e: e, interval: e.cfg.CoalesceInterval, bell: newBell(), turn: make(chan struct{}, 1)}
}

// tell has the other nodes told. It never blocks.
func (c *coalescer) tell(q Queue, n note) {
	c.mu.Lock()
	c.pending.tell(q, n)
	c.mu.Unlock()
	c.bell.ring()
}

// answer is tell for what a notification calls for. Without credit it is said when there is some, or with what there is to say before.
func (c *coalescer) answer(q Queue, n note) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending.tell(q, n)
	if c.pending.answers {
		return // one statement says all
	}
	c.pending.answers = true
	if c.e.trust.putOff(&c.answerAt) {
		c.e.timer.moved()
		return
	}
	c.e.trust.spend()
	c.bell.ring()
}

// answerLate says what was put off, if it is time to, and returns when it will be.
func (c *coalescer) answerLate(now time.Time) (next time.Time, waits bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.answerAt.After(now) {
		return c.answerAt, true
	}
	if !c.answerAt.IsZero() {
		c.answerAt = time.Time{}
		c.e.trust.spend()
		c.bell.ring()
	}
	return time.Time{}, false
}

// full has the server find out whether its queue of notifications is still full. It never blocks.
func (c *coalescer) full() {
	c.mu.Lock()
	c.pending.readOn = true
	c.mu.Unlock()
	c.bell.ring()
}

// isFull reports whether it is, as far as is known.
func (c *coalescer) isFull() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pending.readOn
}

// passOn has the token of a lane passed on. It never blocks.
func (c *coalescer) passOn(l *lane, hop int) {
	c.mu.Lock()
	c.pending.passOn(l, hop)
	c.mu.Unlock()
	c.bell.ring()
}

// anyInstance is a payload that stands for every instance.
const anyInstance = "*"

// maxChanges is how many instances are told apart in one notification.
const maxChanges = 100

// tellChange has the other nodes told that an instance has changed, by the hash of its id. It never blocks.
func (c *coalescer) tellChange(hash uint64) {
	c.tellChanges(map[string]bool{fmt.Sprintf("%016x", hash): true})
}

// tellChanges is tellChange for payloads.
func (c *coalescer) tellChanges(payloads map[string]bool) {
	c.mu.Lock()
	c.pending.change(payloads)
	c.mu.Unlock()
	c.bell.ring()
}

// assumeDue makes the other nodes look. It never blocks.
func (c *coalescer) assumeDue(q Queue) {
	c.tell(q, note{due: 1, all: true})
	if q == Orchestrator { // what feeds it may be an ack that changes an instance
		c.tellChanges(map[string]bool{anyInstance: true})
	}
}

// join has the other nodes told that this one has begun to listen. It never blocks.
func (c *coalescer) join() {
	c.mu.Lock()
	c.pending.joined = true
	c.mu.Unlock()
	c.bell.ring()
}

// burst is how many notifications may go out at once after a pause. With one alone, an item that came 2 ms
// after another would wait for 3 ms: at random arrivals that is every tail.
const burst = 4

func (c *coalescer) run(ctx context.Context) {
	c.bell.ring()      // whatever was left by a run that panicked
	var paid time.Time // the notifications so far are paid for up to here, at one per interval
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.bell:
		}
		c.e.inject("coalescer")
		if !sleep(ctx, time.Until(paid.Add(-(burst-1)*c.interval))) {
			return
		}
		if err := c.flush(ctx); err != nil {
			// The database is out of reach, as a rule; what is pending stays so.
			if !sleep(ctx, time.Second) {
				return
			}
			c.bell.ring()
		}
		now := time.Now()
		if paid.Before(now) {
			paid = now
		}
		paid = paid.Add(c.interval)
	}
}

// sleep waits for d, if that is positive, and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// flush sends what is pending in one statement, after what is being sent already.
func (c *coalescer) flush(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	c.mu.Lock()
	taken := c.pending
	c.pending, c.answerAt = pending{}, time.Time{}
	c.mu.Unlock()

	var say saying
	for q, n := range taken.notes {
		q := Queue(q)
		if taken.joined { // in a note of its own: merged with another it could not be told from that
			say.add(q, joined, "all", nil)
		}
		if n == nil {
			continue
		}
		say.add(q, *n, n.how(), nil)
		if n.namespace == "" && !n.next.IsZero() { // the others count on every lane here to look then
			c.e.waiters.each(q, "", func(l *lane) { l.heard(n.next, true) })
		}
	}
	for l, hop := range taken.bounced {
		if hop == 0 {
			say.add(l.queue, note{due: 1}, "bounce", &l.id)
			continue
		}
		say.add(l.queue, note{due: 1}, "waiting", nil)
		c.e.signal(l.queue, note{due: 1}, WakeNotify) // what this node says to all it does not hear
	}
	if len(say.queues) == 0 && len(taken.changed) == 0 && !taken.readOn {
		return nil
	}
	said := false
	defer func() {
		if !said {
			c.putBack(taken) // also when something panics
		}
	}()
	c.e.inject("flush")
	var void any
	if taken.readOn {
		if err := c.e.exec(ctx, &void, "SELECT "+readOn); err != nil {
			return err
		}
	}
	err := c.e.exec(ctx, &void, c.e.sql.tell, c.e.node, say.queues, say.due, say.next, say.namespaces, say.labels, say.hows, say.lanes,
		slices.Collect(maps.Keys(taken.changed)))
	said = err == nil
	switch {
	case notificationsFull(err):
		taken.readOn = true
	case refusedForGood(err):
		c.e.log().Error("pgwake: the other nodes are not told, the server refuses it: they find it by polling", "error", err)
		taken = pending{joined: taken.joined, readOn: taken.readOn}
	}
	return err
}

// how says to whom notify_queues is to say the note.
func (n note) how() string {
	switch {
	case n.all:
		return "all"
	case n.forAny && n.label != nil && n.namespace != "":
		return "one kind"
	case n.forAny:
		return "any"
	}
	return "waiting"
}

// saying is the arguments of notify_queues, a column each.
type saying struct {
	queues     []string
	due        []int64
	next       []*time.Time
	namespaces []*string
	labels     []*string
	hows       []string
	lanes      []*int32
}

func (s *saying) add(q Queue, n note, how string, lane *int32) {
	s.queues, s.due = append(s.queues, q.String()), append(s.due, n.due)
	s.next = append(s.next, optional(n.next, n.next.IsZero()))
	s.namespaces = append(s.namespaces, optional(n.namespace, n.namespace == ""))
	s.labels = append(s.labels, n.label)
	s.hows, s.lanes = append(s.hows, how), append(s.lanes, lane)
}

// putBack keeps what could not be said.
func (c *coalescer) putBack(taken pending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending.joined, c.pending.answers = c.pending.joined || taken.joined, c.pending.answers || taken.answers
	c.pending.readOn = c.pending.readOn || taken.readOn
	c.pending.change(taken.changed)
	for l, hop := range taken.bounced {
		c.pending.passOn(l, hop)
	}
	for q, n := range taken.notes {
		if n != nil {
			c.pending.tell(Queue(q), *n)
		}
	}
}

// optional returns a pointer to v, or nil if it is absent: how arguments say NULL.
func optional[T any](v T, absent bool) *T {
	if absent {
		return nil
	}
	return &v
}
