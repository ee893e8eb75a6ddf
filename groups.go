package pgwake

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
)

// This file answers: how do calls of the same moment share a commit? ackgroup.go and enqueuegroup.go say which do.
//
// A call alone goes at once; or a few do, each by itself, which direct allows. What comes while those are on their way
// makes the next group, which starts when fewer than ample are, or earlier: after groupPause, or with groupSize. So a call
// alone takes what it takes anyway, and the more there are at a time, the larger the groups.
//
// Invariants
//
//	(1) Each call gets one outcome, and it is its own. If the server refuses a group, be it because of one of it, a
//	    deadlock, or what took too long, each of it is made by itself. Nobody makes a call twice that may have been
//	    committed.
//	(2) A call is reported as done after the commit of its group, or of itself if it is made by itself, and not before.
//	(3) Whoever leaves before the group of its call has started takes the call along. A group goes on as long as
//	    anybody waits for it. A call by itself is made by its caller, who ends that and nothing else by leaving.
//	(4) What hangs holds up nobody else for longer than groupPatience. A group may take for ever: its connection has lost its
//	    peer without a sign, and one of its callers has no deadline. It stays with its callers, as (1) and (3) say, and with
//	    its connection, but after so long it is none of the maxGroups any more, as if it had ended; and those that come later
//	    may get a connection that works. Singles are counted for as long as they take: they keep others from going directly,
//	    and not from going together.

const (
	groupPause = 5 * time.Millisecond // the longest that a call waits for what is slow, while fewer than maxGroups are on their way
	groupSize  = 1000
	maxGroups  = 4 // so that they leave the pool to others

	// groupPatience is for how long a group is counted among maxGroups. While all of them take longer, maxGroups more
	// connections are in use after each such time: slow ones would take no fewer if each call were made by itself.
	groupPatience = answerDeadline
)

var (
	errAlone  = errors.New("to be made by itself") // for calls that do not travel with their group
	errDirect = errors.New("to be made directly")  // for those that were counted in singles
)

// groups are the calls of one kind that a Provider makes.
type groups[T any] struct {
	p *Provider

	// transact makes calls in one transaction. Without an error it has committed, and outcomes, which are nil before, has
	// what single ones met: errAlone for those that were not made. alone makes one. Tests replace both.
	transact func(ctx context.Context, calls []T, outcomes []error) error
	alone    func(ctx context.Context, call T) error

	direct int         // so few at a time, while there is no group, are made by their callers, directly: small groups gain nothing
	ample  int         // while so many are on their way, a group starts only after groupPause, or with groupSize
	key    func(T) any // two calls with the same do not travel together; nil: any do

	patience time.Duration // groupPatience. Tests replace it.

	mu      sync.Mutex
	waiting []*grouped[T]
	flying  int         // groups on their way, but those that take longer than patience
	singles int         // calls that are made directly, on their way
	overdue *time.Timer // starts a group beside those
}

// grouped is a call that waits for its group, or travels with it.
type grouped[T any] struct {
	call    T
	outcome chan error // holds one; errAlone, errDirect: the caller is to make it
	group   *group[T]  // nil: it has not started
}

// group is what travels together.
type group[T any] struct {
	members []*grouped[T]
	wanted  int                // so many wait for it
	cancel  context.CancelFunc // when nobody does
}

// init makes the zero value, with a Provider, ready for calls.
func (g *groups[T]) init() {
	g.patience = groupPatience
	g.overdue = time.AfterFunc(groupPause, g.hurry)
	g.overdue.Stop()
}

// do returns what became of the call.
func (g *groups[T]) do(ctx context.Context, call T) error {
	m := g.enter(call)
	var err error
	select {
	case err = <-m.outcome:
	case <-ctx.Done():
		sent := g.leave(m)
		select {
		case err = <-m.outcome: // it came at the same moment
		default:
			if err = ctx.Err(); sent {
				err = unknownOutcome{err}
			}
		}
	}
	switch err {
	case errDirect:
		defer g.ended(&g.singles)
		return g.alone(ctx, call)
	case errAlone:
		return g.alone(ctx, call)
	}
	return err
}

func (g *groups[T]) enter(call T) *grouped[T] {
	g.mu.Lock()
	defer g.mu.Unlock()
	m := &grouped[T]{call: call, outcome: make(chan error, 1)}
	g.waiting = append(g.waiting, m)
	if g.few() || g.flying+g.singles == 0 || len(g.waiting) >= groupSize {
		g.start()
	} else if len(g.waiting) == 1 {
		g.overdue.Reset(groupPause)
	}
	return m
}

// few reports whether those that wait are to be made directly. The caller holds mu.
func (g *groups[T]) few() bool { return g.flying == 0 && g.singles+len(g.waiting) <= g.direct }

// ended is called when what is counted there has, or is not to be counted any more, and lets those go that wait.
func (g *groups[T]) ended(count *int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	*count--
	if g.few() || g.flying+g.singles < g.ample {
		g.start()
	}
}

// leave is for a call that nobody waits for any longer: invariant (3). It reports whether its group is on its way.
func (g *groups[T]) leave(m *grouped[T]) (sent bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.group == nil {
		g.waiting = slices.DeleteFunc(g.waiting, func(o *grouped[T]) bool { return o == m })
		return false
	}
	if m.group.wanted--; m.group.wanted == 0 {
		m.group.cancel()
	}
	return true
}

// hurry starts a group although others are on their way. While anybody waits it is called again and again.
func (g *groups[T]) hurry() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.start()
	if len(g.waiting) > 0 {
		g.overdue.Reset(groupPause)
	}
}

// start lets those go that wait: directly if they are few, or else, as a group, the first groupSize of them. If it does
// not, since there are maxGroups, the end of one does, or overdue, which is tried again and again. The caller holds mu.
func (g *groups[T]) start() {
	if g.few() {
		g.singles += len(g.waiting)
		for _, m := range g.waiting {
			m.outcome <- errDirect
		}
		g.waiting = nil
		return
	}
	if len(g.waiting) == 0 || g.flying == maxGroups {
		return
	}
	ctx, cancel := context.WithCancel(g.p.abort)
	sent := &group[T]{cancel: cancel}
	with := make(map[any]bool)
	g.waiting = slices.DeleteFunc(g.waiting, func(m *grouped[T]) bool {
		if len(sent.members) == groupSize {
			return false
		}
		if g.key != nil {
			key := g.key(m.call)
			if with[key] {
				return false
			}
			with[key] = true
		}
		m.group = sent
		sent.members = append(sent.members, m)
		return true
	})
	sent.wanted = len(sent.members)
	if len(g.waiting) > 0 {
		g.overdue.Reset(groupPause)
	}
	g.flying++
	gone := sync.OnceFunc(func() { g.ended(&g.flying) })
	hangs := time.AfterFunc(g.patience, gone) // invariant (4)
	g.p.inFlight.Go(func() {                  // as are those who wait
		defer cancel()
		for i, err := range g.send(ctx, sent.members) {
			sent.members[i].outcome <- err
		}
		hangs.Stop()
		gone()
	})
}

// send returns what became of each member.
func (g *groups[T]) send(ctx context.Context, members []*grouped[T]) []error {
	calls := make([]T, len(members))
	for i, m := range members {
		calls[i] = m.call
	}
	outcomes := make([]error, len(members))
	if err := g.try(ctx, calls, outcomes); err != nil {
		if len(members) > 1 && refusedForOne(err) {
			err = errAlone
		}
		for i := range outcomes {
			outcomes[i] = err
		}
	}
	return outcomes
}

// refusedForOne reports whether what a group met may be the fault of one of it, and nothing of the group has been
// committed: something is wrong with one, or one of them had to wait, for a session say, until the server gave up.
func refusedForOne(err error) bool {
	pgErr := serverError(err)
	if pgErr == nil || outcomeUnknown(err) {
		return false
	}
	return !retryable(err) || strings.HasPrefix(pgErr.Code, "40") || pgErr.Code == "55P03" || pgErr.Code == "57014"
}

// try is transact for whom others wait: a panic, of a tracer or a codec, is an error.
func (g *groups[T]) try(ctx context.Context, calls []T, outcomes []error) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = unknownOutcome{panicError{panicked, debug.Stack()}}
		}
	}()
	return g.transact(ctx, calls, outcomes)
}
