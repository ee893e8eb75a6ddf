package pgwake

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: how does a claim tell a server that is gone from one that has much to do?
//
// A function sends its rows when it has all of them: the server is silent while it takes the fifty thousand messages of a
// turn, and while it reads a history. Were that taken for a lost connection, such a turn would never be claimed. So before
// the silence is over another connection asks whether such a claim is at work. If the server says so, it has as long again;
// not longer than the lease, which would be over before anybody heard of it.
//
// Nor is it silent while it sends a row: one that is large takes as long as the network needs.

// askAhead is how long before the end of a silence the server is asked: its answer takes no time that a lost connection had not. It is
// enough for eight round trips, with which a connection begins, of a third of a second.
const askAhead = 3 * time.Second

// askSlack is by how much a claim may seem to be younger to the server than to its sender.
const askSlack = time.Second

// silence is what one claim waits for. Its claim calls rowCame and stop.
type silence struct {
	ctx      context.Context // the claim's
	giveUp   context.CancelCauseFunc
	longest  time.Duration
	lease    time.Duration
	sent     time.Time
	heard    atomic.Int64               // how long after sent a row came, or the server said that it was at work
	came     func() time.Time           // when anything did; nil: nobody knows
	atWork   func(context.Context) bool // whether the server says so
	watching sync.Mutex                 // held while the server is asked
	timer    *time.Timer
}

// listen begins to wait for the answer to a claim of this queue. The claim's ctx ends with errPoolSilent if the server is gone.
func (p *Provider) listen(ctx context.Context, giveUp context.CancelCauseFunc, conn *pgx.Conn, q Queue, plan fetchPlan) *silence {
	s := &silence{ctx: ctx, giveUp: giveUp, longest: claimDeadline(plan.items), lease: plan.lock, sent: time.Now(), came: conns.LastHeard(conn)}
	pid := conn.PgConn().PID()
	s.begin(func(ctx context.Context) bool {
		claims := p.claimsAtWork(ctx, q)
		if slices.Contains(claims.hidden, pid) {
			return true
		}
		return claims.age > max(claims.asked.Sub(s.sent)-s.lastHeard()-askSlack, 0) // its next statement, if it was heard of, has been there for no longer
	})
	return s
}

func (s *silence) begin(atWork func(context.Context) bool) {
	s.watching.Lock() // until there is a timer
	defer s.watching.Unlock()
	s.atWork = atWork
	s.timer = time.AfterFunc(s.longest-askAhead, s.watch)
}

// rowCame notes that the server was heard of.
func (s *silence) rowCame() { s.heard.Store(int64(time.Since(s.sent))) }

// lastHeard is how long after sent the server was last heard of.
func (s *silence) lastHeard() time.Duration {
	last := time.Duration(s.heard.Load())
	if s.came != nil {
		last = max(last, s.came().Sub(s.sent))
	}
	return last
}

// watch sees whether the silence has lasted, and asks the server about it.
func (s *silence) watch() {
	s.watching.Lock()
	defer s.watching.Unlock()
	if s.ctx.Err() != nil { // it has been answered
		return
	}
	heard := s.lastHeard()
	end := s.sent.Add(heard + s.longest)
	if left := time.Until(end); left > askAhead {
		s.timer.Reset(left - askAhead)
		return
	}
	asking, cancel := context.WithDeadline(s.ctx, end)
	defer cancel()
	switch atWork := s.atWork(asking); {
	case s.ctx.Err() != nil:
	case atWork && time.Since(s.sent) >= s.lease:
		s.giveUp(fmt.Errorf("the claim takes longer than its lock timeout of %v: %w", s.lease, context.DeadlineExceeded))
	case atWork:
		s.rowCame()
		s.timer.Reset(s.longest - askAhead)
	default:
		<-asking.Done()
		if s.lastHeard() == heard {
			s.giveUp(errPoolSilent)
			return
		}
		s.timer.Reset(time.Until(s.sent.Add(s.lastHeard() + s.longest - askAhead)))
	}
}

// stop ends the claim's ctx, and returns when nobody watches any more.
func (s *silence) stop() {
	s.giveUp(nil)
	s.watching.Lock()
	defer s.watching.Unlock()
	s.timer.Stop()
}

// inquiry asks the server about the claims of a queue: for all that have become silent, one connection at a time.
type inquiry struct {
	mu   sync.Mutex
	last *findings // until it is there
}

// findings is what the server says of the claims of a queue, when it was asked or later.
type findings struct {
	asked  time.Time
	there  chan struct{} // closed when the rest is
	age    time.Duration // for how long one of them had been at work at most, of those that do not wait for somebody; 0 if there is none
	hidden []uint32      // processes of sessions of which the server does not say what they do, that have a snapshot and wait for no lock
}

// claimsAtWork asks the server. If there was no answer within askAhead, or ctx ends before, none is known to be at work. A claim is in flight, and
// stays so until this has returned.
//
// What a session does is hidden if it is one of another role, as where credentials change, or track_activities is off. Then the claim's own session
// counts, by its process, and not any: a producer may be in a transaction at any time. So behind a pooler, which gives sessions numbers of its own,
// a hidden claim is not known to be at work. One that waits for its client, since its answer is large, is taken to be at work, up to its lease.
func (p *Provider) claimsAtWork(ctx context.Context, q Queue) *findings {
	i := &p.inquiries[q]
	i.mu.Lock()
	a := i.last
	if a == nil {
		a = &findings{asked: time.Now(), there: make(chan struct{})}
		i.last = a
		p.inFlight.Go(func() { p.inquire(q, i, a) })
	}
	i.mu.Unlock()
	select {
	case <-a.there:
		return a
	case <-ctx.Done():
		return &findings{asked: a.asked}
	}
}

// inquire gets the answer.
func (p *Provider) inquire(q Queue, i *inquiry, a *findings) {
	defer func() {
		if panicked := recover(); panicked != nil { // a hook's of the pool, or a tracer's
			p.cfg.Logger.Error("pgwake: panic while the server was asked whether claims are at work", "panic", panicked, "stack", string(debug.Stack()))
		}
		i.mu.Lock()
		i.last = nil
		i.mu.Unlock()
		close(a.there)
	}()
	ctx, cancel := context.WithTimeout(p.abort, askAhead)
	defer cancel()
	conn, err := p.direct.connect(ctx)
	if err != nil {
		return
	}
	defer hangUp(ctx, conn)
	if err := execAll(ctx, conn, "SET ROLE NONE"); err != nil { // the server shows what a session does to the role that it began as
		return
	}
	var names []string
	for _, statement := range [queueCount][]string{Worker: {p.sql.fetchWork}, Orchestrator: {p.sql.fetchOrchestration, p.sql.resumeHistory}}[q] {
		name, _, _ := strings.Cut(statement, "(")
		names = append(names, name)
	}
	var seconds float64
	var hidden []uint32
	if err := conn.QueryRow(ctx, p.sql.atWork, names).Scan(&seconds, &hidden); err == nil {
		a.age, a.hidden = time.Duration(seconds*float64(time.Second)), hidden
	}
}
