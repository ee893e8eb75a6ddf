package pgwake

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: who goes to look if the one who was told cannot come?
//
// A producer that is sure who waits tells few of them, and they are all that know (SQL function wake). So a token may be
// sole: without a query for it, what it stands for would wait although somebody else waits for it. The node was chosen
// a moment before its last dispatcher became busy; or it ends. Then the node passes the token on: it has the database see
// what is due for the lane, and for each namespace and label of that tell another lane that waits. If that cannot come
// either, all are told, and nobody has a sole token any more. Whoever passed on looks by himself when he is back, since
// he has not been told that there is nothing.
//
// What was told to all, and instants, which all who wait know of, are nobody's alone. Neither is what a lane finds when it
// settles: the others do so as well.

// backSoon is how long somebody whose fetch ended with nothing counts as present: he is likely to fetch again.
const backSoon = 10 * time.Millisecond

// bounce has the sole tokens passed on if nobody of the lane will take them. The caller holds mu.
func (l *lane) bounce() {
	if l.inside > 0 || l.alone() || !slices.ContainsFunc(l.tokens, token.isSole) {
		return
	}
	if back := l.leftAt.Add(backSoon); l.now().Before(back) {
		l.bounceAt = back
		l.moved()
		return
	}
	hop := 0
	l.tokens = slices.DeleteFunc(l.tokens, func(t token) bool {
		if t.sole {
			hop = max(hop, t.hop)
		}
		return t.sole
	})
	l.empty = false
	// This costs a statement, as a query by somebody would.
	l.trust.spend()
	l.stats.passedOn.Add(1)
	l.passOn(l, hop)
}

func (t token) isSole() bool { return t.sole }

// reconsider is bounce for whoever does not hold mu.
func (l *lane) reconsider() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bounce()
}

// standBy is how much later whoever is told as well looks: if it is before the first has committed, he sees a row that
// is locked, and has to look again.
const standBy = 20 * time.Millisecond

// called gives the lane a token of which few others know, or nobody.
func (l *lane) called(c call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !c.standBy {
		l.notified(token{reason: WakeNotify, sole: true, hop: c.hop})
		return
	}
	l.heardSignal(WakeNotify)
	l.standsBy = l.signals
	if l.standByAt.IsZero() {
		l.standByAt = l.now().Add(standBy)
		l.moved()
	}
}

// reconnected has the lane look for what this node alone was told of, and did not hear.
func (l *lane) reconnected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.emit(token{reason: WakeReconnect, sole: true})
}

// callParked gives a token to somebody who waits and can take d, and reports whether there is one.
func (l *lane) callParked(d produced) bool {
	if f := l.filter; !l.serves(d.namespace) || f.Labels != nil && !slices.Contains(f.Labels, *d.label) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		return false
	}
	l.emit(token{reason: WakeLocal, sole: true})
	return true
}

// others is what the database says of the other nodes.
type others struct {
	none  bool
	joins int64    // engine.joins before it was asked
	count int64    // of the nodes, about
	dead  []string // queues for which there are rows of nodes whose connection has ended
}

// learnOf takes in what the database says of the other nodes. Whoever begins to listen later says so: a node that was heard while the
// answer was on its way is not in it.
func (e *engine) learnOf(o others) {
	e.trust.among(o.count)
	switch {
	case !o.none:
		e.inCompany()
	case o.joins == e.joins.Load():
		e.alone.Store(true)
	}
	if len(o.dead) > 0 {
		e.sweeper.sweep(o.dead)
	}
}

// leave has producers choose this node no more, and passes on what those who chose it have committed. If one of them is still
// open, that is left to the others, as if the node had died.
func (e *engine) leave(ctx context.Context) {
	if e.epoch() != 0 {
		e.leaveBy(ctx, e.exec)
	}
}

// leaveBy is leave with the statements run by exec. It reports whether nothing of the node is left.
func (e *engine) leaveBy(ctx context.Context, exec func(ctx context.Context, dest any, sql string, args ...any) error) (left bool) {
	var queues []string
	if err := exec(ctx, &queues, e.sql.disarmNode, e.node); err != nil {
		return false
	}
	left = true
	for _, queue := range queues {
		var removed bool
		err := exec(ctx, &removed, e.sql.removeWaiters, queue, e.node, true, leavePatience)
		left = left && err == nil && removed
	}
	return left
}

// leavePatience is how long a node that leaves waits for producers that may have chosen it.
const leavePatience = 250 * time.Millisecond

// sweeper removes the rows of nodes that have ended without that, and passes on what they were told of.
type sweeper struct {
	e    *engine
	bell bell

	mu     sync.Mutex
	queues []string
}

func newSweeper(e *engine) *sweeper { return &sweeper{e: e, bell: newBell()} }

// sweep has the goroutine remove the rows for these queues. It never blocks.
func (s *sweeper) sweep(queues []string) {
	s.mu.Lock()
	s.queues = queues
	s.mu.Unlock()
	s.bell.ring()
}

func (s *sweeper) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.bell:
		}
		s.e.inject("sweeper")
		s.mu.Lock()
		queues := s.queues
		s.mu.Unlock()
		for _, queue := range queues {
			_ = s.removeDead(ctx, queue) // the next fallback finds the rows again
		}
	}
}

// removeDead removes what rows it can in settlePatience. The protocol counts on a new snapshot for each statement, also
// where the default is another; and the LISTEN connection is not to wait for others.
func (s *sweeper) removeDead(ctx context.Context, queue string) error {
	return s.e.patiently(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return inTransaction(ctx, conn, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, s.e.sql.removeWaiters, queue, s.e.node, false, settlePatience).Scan(new(bool))
		})
	})
}
