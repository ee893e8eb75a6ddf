package pgwake

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// This file answers: how do acks of the same moment share a commit?
//
// A group is on its way at once if none is. What comes meanwhile makes the next one, which starts when that has ended,
// or earlier: after groupPause, or with groupSize. So an ack alone takes what AckWorkItem takes, and the more there
// are at a time, the larger the groups.
//
// Invariants
//
//	(1) Each ack gets one outcome, and it is its own: a lease that was lost fails that ack alone. A group waits for no
//	    item that another transaction has locked: that ack is made by itself, and waits by itself. So is each of a group
//	    that the server refuses, be it because of one of them, a deadlock, or what took too long. Nobody makes an ack
//	    twice that may have been committed.
//	(2) An ack is reported as done after the commit of its group, or of itself if it is made by itself, and not before.
//	(3) Whoever leaves before the group of its ack has started takes the ack along. A group goes on as long as
//	    anybody waits for it. An ack by itself is made by its caller, who ends that and nothing else by leaving; it is
//	    no longer on its way with a group, so that it holds up none.

const (
	groupPause = 5 * time.Millisecond // the longest that an ack waits for a slow group, while fewer than maxGroups are on their way
	groupSize  = 1000
	maxGroups  = 4 // so that acks leave the pool to others
)

// groupedAck is the ack of one item.
type groupedAck struct {
	lease
	message Message
	outcome chan error // holds one; errAlone: the caller is to make it by itself
	group   *ackGroup  // nil: it has not started
}

// errAlone is for acks that do not travel with their group.
var errAlone = errors.New("to be acknowledged by itself")

// ackGroup is what travels together.
type ackGroup struct {
	acks   []*groupedAck
	wanted int                // so many wait for it
	cancel context.CancelFunc // when nobody does
}

// ackGroups are those of a Provider.
type ackGroups struct {
	p *Provider

	// transact makes acks in one transaction; tests replace it. Without an error it has committed, and outcomes has
	// those whose leases were lost, and errAlone for those whose items are locked. alone makes one by itself.
	transact func(ctx context.Context, acks []*groupedAck, outcomes []error) error
	alone    func(ctx context.Context, a *groupedAck) error

	mu      sync.Mutex
	waiting []*groupedAck
	flying  int         // groups on their way
	overdue *time.Timer // starts a group beside those
}

func newAckGroups(p *Provider) *ackGroups {
	g := &ackGroups{p: p}
	g.transact, g.alone = g.commit, func(ctx context.Context, a *groupedAck) error { return p.ackAlone(ctx, a.lease, a.message) }
	g.overdue = time.AfterFunc(groupPause, g.hurry)
	g.overdue.Stop()
	return g
}

// AckBatched is AckWorkItem in one transaction with the acks that other goroutines make on this Provider at the same
// moment: they share one round trip and one commit. An ack alone goes at once; one that meets others waits for 5 ms at
// most, unless four groups are on their way already. An item that another transaction has locked holds up none but its
// own ack, which is then made as AckWorkItem makes it. It returns after the commit, with the error of this item alone:
// ErrLockLost if its lease has ended, or that of the group if it failed as a whole. If ctx ends before the group has
// started nothing is acknowledged; afterwards the ack may still take effect. It has no Tx twin, since in a
// transaction of the caller's all acks share the commit anyway.
func (p *Provider) AckBatched(ctx context.Context, token LockToken, completion *Message) error {
	return p.ack(ctx, token, completion, func(ctx context.Context, l lease, m Message) error {
		return p.acks.ack(ctx, &groupedAck{lease: l, message: m, outcome: make(chan error, 1)})
	})
}

// ack returns what became of a.
func (g *ackGroups) ack(ctx context.Context, a *groupedAck) error {
	g.enter(a)
	var err error
	select {
	case err = <-a.outcome:
	case <-ctx.Done():
		g.leave(a)
		select {
		case err = <-a.outcome: // it came at the same moment
		default:
			err = ctx.Err()
		}
	}
	if err == errAlone {
		return g.alone(ctx, a)
	}
	return err
}

func (g *ackGroups) enter(a *groupedAck) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = append(g.waiting, a)
	if g.flying == 0 || len(g.waiting) >= groupSize {
		g.start()
	} else if len(g.waiting) == 1 {
		g.overdue.Reset(groupPause)
	}
}

// leave is for an ack that nobody waits for any longer: invariant (3).
func (g *ackGroups) leave(a *groupedAck) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if a.group == nil {
		g.waiting = slices.DeleteFunc(g.waiting, func(o *groupedAck) bool { return o == a })
		return
	}
	if a.group.wanted--; a.group.wanted == 0 {
		a.group.cancel()
	}
}

// hurry starts a group although others are on their way.
func (g *ackGroups) hurry() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.start()
}

// start sends off those that wait, the first groupSize of them. The caller holds mu.
func (g *ackGroups) start() {
	if len(g.waiting) == 0 || g.flying == maxGroups {
		return
	}
	ctx, cancel := context.WithCancel(g.p.abort)
	group := &ackGroup{cancel: cancel}
	with := make(map[lease]bool)
	g.waiting = slices.DeleteFunc(g.waiting, func(a *groupedAck) bool {
		if len(group.acks) == groupSize || with[a.lease] { // a second ack of an item is to learn what the first did
			return false
		}
		a.group, with[a.lease] = group, true
		group.acks = append(group.acks, a)
		return true
	})
	group.wanted = len(group.acks)
	if len(g.waiting) > 0 {
		g.overdue.Reset(groupPause)
	}
	g.flying++
	g.p.inFlight.Go(func() { // as are those who wait
		defer cancel()
		for i, err := range g.send(ctx, group.acks) {
			group.acks[i].outcome <- err
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.flying--
		g.start()
	})
}

// send returns what became of each of the acks.
func (g *ackGroups) send(ctx context.Context, acks []*groupedAck) []error {
	outcomes := make([]error, len(acks))
	if err := g.try(ctx, acks, outcomes); err != nil {
		if len(acks) > 1 && refusedForOne(err) {
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
func (g *ackGroups) try(ctx context.Context, acks []*groupedAck, outcomes []error) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("panic: %v\n%s", panicked, debug.Stack())
		}
	}()
	return g.transact(ctx, acks, outcomes)
}

func (g *ackGroups) commit(ctx context.Context, acks []*groupedAck, outcomes []error) error {
	var ids []int64
	var claims []pgtype.UUID
	places := make(map[lease]int, len(acks))
	c := &messageColumns{}
	for i, a := range acks {
		ids, claims = append(ids, a.item), append(claims, a.claim)
		places[a.lease] = i
		c.add(&a.message)
	}
	p := g.p
	quiet := p.engine.quiet()
	var namespaces []string // of the messages
	return p.run(ctx, func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.ackWorkGroup, ids, claims, c.instances, c.kinds, c.datas, c.names, c.versions, c.executions, c.queues,
			quiet, p.archiveFor())
		if err != nil {
			return err
		}
		for i := range outcomes {
			outcomes[i] = ErrLockLost
		}
		var l lease
		var namespace *string
		var busy bool
		_, err = pgx.ForEachRow(rows, []any{&l.item, &l.claim, &namespace, &busy}, func() error {
			outcomes[places[l]] = nil
			if busy {
				outcomes[places[l]] = errAlone
			}
			if namespace != nil {
				namespaces = append(namespaces, *namespace)
			}
			return nil
		})
		return err
	}, func() { p.tellOfMessages(namespaces, quiet) }, Orchestrator)
}
