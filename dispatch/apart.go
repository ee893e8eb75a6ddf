package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: how does what became of one item get into the database, whatever is locked, or away?
//
// Items that are done are acknowledged together (acks.go). All else is carried out item by item: what is given back, buried or
// completes a step of an orchestration, and acks that failed together. Each is tried for as long as the lease of its item holds:
// one that never succeeds costs another attempt, and no more. A large completion takes as long to send as the network needs: each attempt
// that was ended by its time leaves the next twice as long.
//
// Such a call waits for an item that another transaction has locked, and has a connection meanwhile. A few of them would have all
// of the pool, and the leases of everything else would end. So what is not alone, or failed before, is probed, all of it in one
// statement that passes over what is locked: a renewal. Only what is free then is carried out. Where leases cannot be renewed nobody
// can say what is locked, and all of it is carried out.

const callers = 8 // of calls that share no statement, at one time

// apart has what became of items carried out one by one.
type apart struct {
	d *Dispatcher

	bell   chan struct{} // something was added
	places chan struct{} // of callers

	mu    sync.Mutex
	items map[*held]*settlement
	tried int // how many of them have been
}

// settlement is what becomes of an item. What may change does under the mutex.
type settlement struct {
	call     func(context.Context) error
	ways     []func(refusal error) func(context.Context) error // what to call instead, one after the other, of what is refused
	together bool                                              // calls of the same moment share a statement

	underWay bool
	tried    bool          // it failed
	mayHave  bool          // it may have succeeded all the same, since no answer came: that the lease is lost is no news then
	allowed  time.Duration // what the next attempt has at the least, since the last was ended by its time
	mending  mending
	pause    time.Duration // before that
	next     time.Time     // of it
}

func newApart(d *Dispatcher) *apart {
	return &apart{d: d, bell: make(chan struct{}, 1), places: make(chan struct{}, callers), items: make(map[*held]*settlement)}
}

// add has it carried out.
func (a *apart) add(h *held, s *settlement) {
	a.mu.Lock()
	direct := s.together && a.tried == 0 && !s.tried // nothing is known to be locked
	s.underWay = direct
	a.items[h] = s
	if s.tried {
		a.tried++
	}
	a.mu.Unlock()
	if direct {
		go a.carryOut(h, s, a.d.ackAllowance().least)
		return
	}
	a.ring()
}

// addAcks has items acknowledged that could not be with others.
func (a *apart) addAcks(items []*held, mayHave bool) {
	for _, h := range items {
		a.add(h, &settlement{together: true, tried: true, mayHave: mayHave, call: func(ctx context.Context) error {
			return a.d.p.AckBatched(ctx, h.item.LockToken, nil)
		}})
	}
}

func (a *apart) ring() {
	select {
	case a.bell <- struct{}{}:
	default:
	}
}

// troubled reports whether there is anything that could not be carried out at once.
func (a *apart) troubled() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.tried > 0
}

// run sees to what was added until ctx ends.
func (a *apart) run(ctx context.Context) {
	allowance := newAllowance(a.d.cfg.LockTimeout)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	over := a.d.work.settling.Done()
	for {
		due, next := a.due()
		for batch := range slices.Chunk(due, ackedAtOnce) {
			a.begin(batch, allowance)
		}
		if len(due) > 0 {
			continue // by now others may be
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-over: // what is left ends
			over = nil
		case <-a.bell:
		case <-timer.C:
		}
	}
}

// due returns what is to be tried now, or else how long nothing is.
func (a *apart) due() (due []*held, next time.Duration) {
	next = time.Hour
	ended := a.d.work.settling.Err() != nil
	a.mu.Lock()
	defer a.mu.Unlock()
	for h, s := range a.items {
		switch left := time.Until(s.next); {
		case s.underWay:
		case left <= 0 || ended:
			due = append(due, h)
		default:
			next = min(next, left)
		}
	}
	return due, next
}

// begin has those of a batch carried out that can be now.
func (a *apart) begin(batch []*held, allowance *allowance) {
	batch = slices.DeleteFunc(batch, func(h *held) bool {
		late := a.d.work.settling.Err() != nil || !time.Now().Before(a.d.leases.end(h))
		if late {
			a.tell(h, a.take(h), errNoTime)
		}
		return late
	})
	if len(batch) == 0 {
		return
	}
	a.mu.Lock()
	direct := len(a.items) == 1 && !a.items[batch[0]].tried
	a.mu.Unlock()
	allowed := min(a.d.cfg.LockTimeout/renewals, verbTimeout)
	var free map[*held]bool
	if direct {
		allowed = a.d.ackAllowance().least
	} else {
		sent := time.Now()
		var err error
		free, err = a.free(batch, allowance.now)
		allowance.after(time.Since(sent), err == nil)
		direct = errors.As(err, new(*pgwake.Error)) && !outage.Passes(err) // the Provider is closed, say: each is to hear it
	}
	for _, h := range batch {
		a.mu.Lock()
		s, can := a.items[h], direct || free[h]
		s.underWay = can
		if !can {
			a.failed(h, s)
		}
		a.mu.Unlock()
		if can {
			go a.carryOut(h, s, allowed)
		}
	}
}

// free returns those of a batch that nobody has locked, or that are lost; where leases cannot be renewed, all of them. Invariant: what
// nobody has locked is free unless the renewal fails for a reason that may go away, so it is carried out before its lease ends. What is lost
// here is free as it is: its lease is not to go on because somebody asks, so each attempt comes to an end.
func (a *apart) free(batch []*held, allowed time.Duration) (free map[*held]bool, err error) {
	free = make(map[*held]bool, len(batch))
	var holds []*held
	for _, h := range batch {
		if free[h] = a.d.leases.isLost(h); !free[h] {
			holds = append(holds, h)
		}
	}
	if len(holds) == 0 {
		return free, nil
	}
	var again []pgwake.LockToken
	if len(holds) == 1 {
		again = append(again, holds[0].item.LockToken) // one by itself would be waited for
	}
	renewed, err := a.d.leases.renew(a.d.work.settling, holds, allowed, again...)
	never := errors.Is(err, errors.ErrUnsupported)
	if err != nil && !never {
		return free, err
	}
	for _, h := range holds {
		_, is := renewed[h.item.LockToken]
		free[h] = is || never || a.d.leases.isLost(h)
	}
	return free, nil
}

// failed has it tried again later, but not so late that the lease has ended by then. It is called with mu held.
func (a *apart) failed(h *held, s *settlement) {
	if !s.tried {
		s.tried = true
		a.tried++
	}
	s.pause = longer(s.pause)
	s.next = nextAttempt(s.pause, a.d.leases.end(h))
}

func (a *apart) carryOut(h *held, s *settlement, allowed time.Duration) {
	if !s.together {
		select {
		case a.places <- struct{}{}:
			defer func() { <-a.places }()
		case <-a.d.work.settling.Done():
			a.settled(h, s, errNoTime)
			return
		}
	}
	allowed = max(allowed, s.allowed)
	timeUp, err := try(a.d.work.settling, allowed, func() time.Time { return a.d.leases.end(h) }, s.call)
	if timeUp {
		a.mu.Lock()
		if s.allowed = 2 * allowed; !s.together { // it sends little, and is not to keep others from its place
			s.allowed = min(s.allowed, verbTimeout)
		}
		a.mu.Unlock()
	}
	a.settled(h, s, err)
}

// settled takes note of what became of an attempt.
func (a *apart) settled(h *held, s *settlement, err error) {
	refused := errors.Is(err, pgwake.ErrInvalid) && len(s.ways) > 0
	if refused {
		// What a handler said cannot be stored. It is left out.
		a.d.log(h).Error("dispatch: refused", "error", err)
	}
	if refused || outage.Passes(err) && !s.mending.over(err) && a.d.work.settling.Err() == nil && time.Now().Before(a.d.leases.end(h)) {
		a.mu.Lock()
		if s.underWay = false; refused {
			s.call, s.ways, s.together, s.allowed = s.ways[0](err), s.ways[1:], false, 0
		} else {
			s.mayHave = s.mayHave || unknown(err)
			a.failed(h, s)
		}
		a.mu.Unlock()
		a.ring()
		return
	}
	a.tell(h, a.take(h), err)
}

// take takes it out.
func (a *apart) take(h *held) *settlement {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.items[h]
	delete(a.items, h)
	if s.tried {
		a.tried--
	}
	return s
}

var errNoTime = errors.New("the lease, or the Dispatcher, lasts no longer")

// tell says what cannot be helped. It is the last of the item.
func (a *apart) tell(h *held, s *settlement, err error) {
	switch {
	case err == nil, errors.Is(err, pgwake.ErrLockLost) && s.mayHave:
	case errors.Is(err, pgwake.ErrLockLost):
		a.d.log(h).Warn("dispatch: the lease was lost", "error", err)
	default:
		a.d.log(h).Warn("dispatch: left to the end of its lease", "error", err)
	}
	a.d.work.ended(h)
}
