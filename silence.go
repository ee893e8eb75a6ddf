package pgwake

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// This file answers: how does a claim tell a server that is gone from one that has much to do?
//
// A function sends its rows when it has all of them: the server is silent while it takes the fifty thousand messages of a
// turn, and while it reads a history. Were that taken for a lost connection, such a turn would never be claimed. So before
// the silence is over another connection asks whether such a claim is at work. If the server says so, it has as long again;
// not longer than the lease, which would be over before anybody heard of it.

// askAhead is how long before the end of a silence the server is asked: its answer takes no time that a lost connection had not.
const askAhead = time.Second

// silence is what one claim waits for. Its claim calls rowCame and stop.
type silence struct {
	ctx      context.Context // the claim's
	giveUp   context.CancelCauseFunc
	longest  time.Duration
	lease    time.Duration
	sent     time.Time
	heard    atomic.Int64               // how long after sent the server was last heard of
	atWork   func(context.Context) bool // whether the server says so
	watching sync.Mutex                 // held while the server is asked
	timer    *time.Timer
}

// listen begins to wait for the answer to a claim of this queue. The claim's ctx ends with errPoolSilent if the server is gone.
func (p *Provider) listen(ctx context.Context, giveUp context.CancelCauseFunc, q Queue, plan fetchPlan) *silence {
	s := &silence{ctx: ctx, giveUp: giveUp, longest: claimDeadline(plan.items), lease: plan.lock, sent: time.Now()}
	s.begin(func(ctx context.Context) bool { return p.isClaiming(ctx, q, time.Since(s.sent)-askAhead) })
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

// watch sees whether the silence has lasted, and asks the server about it.
func (s *silence) watch() {
	s.watching.Lock()
	defer s.watching.Unlock()
	heard := s.heard.Load()
	end := s.sent.Add(time.Duration(heard) + s.longest)
	if left := time.Until(end); left > askAhead {
		s.timer.Reset(left - askAhead)
		return
	}
	asking, cancel := context.WithDeadline(s.ctx, end)
	defer cancel()
	switch atWork := s.atWork(asking); {
	case s.ctx.Err() != nil: // it has been answered
	case atWork && time.Since(s.sent) >= s.lease:
		s.giveUp(fmt.Errorf("the claim takes longer than its lock timeout of %v: %w", s.lease, context.DeadlineExceeded))
	case atWork:
		s.rowCame()
		s.timer.Reset(s.longest - askAhead)
	default:
		<-asking.Done()
		if s.heard.Load() == heard {
			s.giveUp(errPoolSilent)
			return
		}
		s.timer.Reset(time.Until(s.sent.Add(time.Duration(s.heard.Load()) + s.longest - askAhead)))
	}
}

// stop ends the claim's ctx, and returns when nobody asks the server any more.
func (s *silence) stop() {
	s.giveUp(nil)
	s.watching.Lock()
	defer s.watching.Unlock()
	s.timer.Stop()
}

// isClaiming asks the server, on a connection of its own, whether a claim of this queue has been at work for so long, in a session of this role, and
// waits for nobody.
func (p *Provider) isClaiming(ctx context.Context, q Queue, since time.Duration) bool {
	conn, err := p.direct.connect(ctx)
	if err != nil {
		return false
	}
	defer hangUp(ctx, conn)
	claim := p.sql.fetchWork
	if q == Orchestrator {
		claim = p.sql.fetchOrchestration
	}
	name, _, _ := strings.Cut(claim, "(")
	var atWork bool
	err = conn.QueryRow(ctx, p.sql.atWork, name, since).Scan(&atWork)
	return err == nil && atWork
}
