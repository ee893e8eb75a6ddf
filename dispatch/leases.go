package dispatch

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how does what is in hand stay in hand?
//
// Every item has a lease from the claim to its end, however long it is ahead, at work, or to be acknowledged. Leases are
// renewed together, in one statement, once a third of them is over. Instants are local, and rather too early than too late:
// the lease here never outlasts that of the server. If it ends all the same, because the database was away for too long or
// somebody took the item, the handler's context ends with ErrLockLost as the cause.
//
// The server's may go on: a renewal that no answer came to may have taken effect. Invariant: what became of an item is told the
// server for as long as its lease may last there, and of one that was lost here the server learns that, or else nobody would have it
// until then.

// held is an item in hand.
type held struct {
	d     *Dispatcher
	item  *pgwake.ClaimedWorkItem
	since time.Time // local, of the claim

	settled bool // under the workshop's mutex

	byHandler ownAck

	span trace.SpanContext // of the attempt, once that has begun

	// For leases, under its mutex.
	until  time.Time               // local: end of the lease, at the earliest
	latest time.Time               // local: about the latest that it can be on the server, for what was sent; never before until
	lost   bool                    // here
	gone   bool                    // there, which the server has said
	lose   context.CancelCauseFunc // nil: not at work
	acking bool                    // the handler acknowledges it, and is not to hear of that
}

func (h *held) own() *ownAck              { return &h.byHandler }
func (h *held) token() pgwake.LockToken   { return h.item.LockToken }
func (h *held) settling() context.Context { return h.d.work.settling }
func (h *held) holdOn() error             { return h.d.leases.holdOn(h) }
func (h *held) goOn(acked bool)           { h.d.leases.goOn(h, acked) }
func (h *held) told()                     { h.d.leases.told(h) }

type leases struct {
	d *Dispatcher

	mu   sync.Mutex
	held map[*held]bool
}

func newLeases(d *Dispatcher) *leases { return &leases{d: d, held: make(map[*held]bool)} }

func (l *leases) add(items []*held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range items {
		l.held[h] = true
	}
}

// guard has lose called when the lease is lost. If it is by now it reports that, and lose is not called.
func (l *leases) guard(h *held, lose context.CancelCauseFunc) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.lost || !time.Now().Before(h.until) {
		return false
	}
	h.lose = lose
	return true
}

// holdOn keeps it from the handler that the lease is lost, until goOn. If it is by now it reports that.
func (l *leases) holdOn(h *held) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.acking = !h.lost; h.lost {
		return pgwake.ErrLockLost
	}
	return nil
}

// goOn has the handler told of a lease that was lost meanwhile, unless the item is acknowledged: then there is none.
func (l *leases) goOn(h *held, acked bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h.acking = false
	switch {
	case acked:
		delete(l.held, h)
		h.lose = nil
	case h.lost && h.lose != nil:
		h.lose(pgwake.ErrLockLost)
	}
}

// told takes note that the server has said that the lease is lost.
func (l *leases) told(h *held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h.gone = true
}

// drop ends the renewals of an item.
func (l *leases) drop(h *held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, h)
	h.lose = nil
}

// end is when the lease of an item ends on the server, at the latest.
func (l *leases) end(h *held) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return h.latest
}

// lasts reports whether the lease may last on the server.
func (l *leases) lasts(h *held) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !h.gone && time.Now().Before(h.latest)
}

// Each lease is renewed once a third of it is over, in statements of at most renewedAtOnce, and looked at so often that there
// are some attempts before it ends.
const (
	renewals      = 3
	looks         = 12
	renewedAtOnce = 1000
)

// allowance is how long a renewal may take. One that hangs is not to cost the attempts after it; but where none is quicker,
// because the database is slow, all of them together would keep no lease. So each that fails leaves the next twice as long, and
// one that succeeds twice what it took.
type allowance struct{ least, most, now time.Duration }

func newAllowance(length time.Duration) *allowance {
	least, most := min(length/looks, verbTimeout), min(length/renewals, verbTimeout)
	return &allowance{least: least, most: most, now: least}
}

func (a *allowance) after(took time.Duration, ok bool) {
	if !ok {
		took = a.now
	}
	a.now = min(max(2*took, a.least), a.most)
}

func (l *leases) run(ctx context.Context) {
	allowance := newAllowance(l.d.cfg.LockTimeout)
	for next := time.Now(); ; {
		next = next.Add(jittered(l.d.cfg.LockTimeout / looks))
		if late := time.Since(next); late > 0 {
			next = next.Add(late)
		}
		if nap(ctx, time.Until(next)); ctx.Err() != nil {
			return
		}
		due := l.due()
		if len(due) == 0 {
			continue
		}
		longest, ok := time.Duration(0), true
		for _, batch := range due {
			sent := time.Now()
			_, err := l.renew(ctx, batch, allowance.now)
			ok = ok && err == nil
			longest = max(longest, time.Since(sent))
		}
		allowance.after(longest, ok)
	}
}

// expire has those lose their lease that it has ended for, at that very moment, whatever a renewal is doing.
func (l *leases) expire(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		next := l.d.cfg.LockTimeout / looks // what is claimed meanwhile does not end before
		l.mu.Lock()
		for h := range l.held {
			switch left := time.Until(h.until); {
			case h.lost:
			case left <= 0:
				l.loseIt(h)
			default:
				next = min(next, left)
			}
		}
		l.mu.Unlock()
		timer.Reset(next)
	}
}

// due returns those of which a third is over, in batches.
func (l *leases) due() (batches [][]*held) {
	length := l.d.cfg.LockTimeout
	var due []*held
	l.mu.Lock()
	for h := range l.held {
		if !h.lost && time.Until(h.until) <= length-length/renewals {
			due = append(due, h)
		}
	}
	l.mu.Unlock()
	return slices.Collect(slices.Chunk(due, renewedAtOnce))
}

// renew returns those that were renewed. Unless there is an error, it is known of each lease if it holds. Tokens of the batch may be named
// again.
func (l *leases) renew(ctx context.Context, batch []*held, allowed time.Duration, again ...pgwake.LockToken) (renewed map[pgwake.LockToken]time.Time, err error) {
	length := l.d.cfg.LockTimeout
	tokens := make([]pgwake.LockToken, len(batch), len(batch)+len(again))
	for i, h := range batch {
		tokens[i] = h.item.LockToken
	}
	tokens = append(tokens, again...)
	sent := time.Now()
	l.mayLast(batch, sent.Add(allowed+length)) // whatever is heard of it, and when
	bounded, cancel := context.WithTimeout(ctx, allowed)
	renewed, err = l.d.p.RenewWorkItemLocks(bounded, tokens, length)
	cancel()
	lost, ok := lostOf(err)
	if !ok {
		if ctx.Err() == nil && !errors.Is(err, errors.ErrUnsupported) {
			l.d.cfg.Logger.Warn("dispatch: cannot renew leases", "error", err, "items", len(batch))
		}
		return nil, err // it is tried again
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range batch {
		switch {
		case !l.held[h]: // meanwhile it has come to its end
		case lost[h.item.LockToken]:
			h.gone = true
			l.loseIt(h)
		default:
			if _, ok := renewed[h.item.LockToken]; ok { // otherwise somebody has locked it, and it is tried again
				h.until = sent.Add(length)
				h.latest = h.until
			}
		}
	}
	return renewed, nil
}

// mayLast takes note that the leases of a batch are about to be renewed.
func (l *leases) mayLast(batch []*held, latest time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range batch {
		h.latest = latest
	}
}

// isLost reports whether the lease is lost, here or on the server.
func (l *leases) isLost(h *held) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return h.lost
}

// keepSessions renews the sessions of which something is in hand: their items come here for as long as that lasts. What has
// been idle since its last item goes to whoever comes first when its lock ends.
func (l *leases) keepSessions(ctx context.Context) {
	s := l.d.cfg.Session
	length := cmp.Or(s.LockTimeout, pgwake.DefaultLockTimeout)
	allowance := newAllowance(length)
	for pause := length / renewals; ; {
		if nap(ctx, jittered(pause)); ctx.Err() != nil {
			return
		}
		pause = length / renewals
		if !l.holdsSessions() {
			continue
		}
		sent := time.Now()
		bounded, cancel := context.WithTimeout(ctx, allowance.now)
		// A renewal of an item's lease counts as activity.
		_, err := l.d.p.RenewSessionLock(bounded, []string{s.Owner}, length, l.d.cfg.LockTimeout)
		cancel()
		allowance.after(time.Since(sent), err == nil)
		if err != nil && ctx.Err() == nil {
			pause = length / looks
			l.d.cfg.Logger.Warn("dispatch: cannot renew sessions", "error", err, "owner", s.Owner)
		}
	}
}

func (l *leases) holdsSessions() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h := range l.held {
		if h.item.Session != "" {
			return true
		}
	}
	return false
}

// loseIt is called with mu held.
func (l *leases) loseIt(h *held) {
	if h.lost {
		return
	}
	h.lost = true
	if h.lose != nil && !h.acking {
		h.lose(pgwake.ErrLockLost)
	}
}

// lostOf returns which of a batch are lost. ok is false if nothing is known of it.
func lostOf(err error) (lost map[pgwake.LockToken]bool, ok bool) {
	if err == nil {
		return nil, true
	}
	var some *pgwake.LostLocksError
	if !errors.As(err, &some) {
		return nil, false
	}
	lost = make(map[pgwake.LockToken]bool, len(some.Tokens))
	for _, t := range some.Tokens {
		lost[t] = true
	}
	return lost, true
}
