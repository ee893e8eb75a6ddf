package dispatch

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how does an item that is done leave the queue?
//
// A handler's place is free as soon as it returns. Its item is acknowledged together with whatever else is done by then: one
// statement at once if nothing else is on its way, and a large one under load. If the database is away it is tried again for as
// long as the lease holds: an ack that is lost costs another attempt, and no more.

const (
	ackers      = 2    // statements on their way at one time
	ackedAtOnce = 1000 // most of one statement
)

type acker struct {
	d *Dispatcher

	bell chan struct{}

	mu   sync.Mutex
	done []*held // to be acknowledged
}

func newAcker(d *Dispatcher) *acker {
	return &acker{d: d, bell: make(chan struct{}, ackers)}
}

// add has an item acknowledged.
func (a *acker) add(h *held) {
	a.mu.Lock()
	a.done = append(a.done, h)
	a.mu.Unlock()
	select {
	case a.bell <- struct{}{}:
	default:
	}
}

func (a *acker) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.bell:
		}
		for batch := a.begin(); batch != nil; batch = a.begin() {
			a.ack(batch)
		}
	}
}

func (a *acker) begin() []*held {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.done) == 0 {
		return nil
	}
	n := min(len(a.done), ackedAtOnce)
	batch := a.done[:n:n]
	a.done = a.done[n:]
	return batch
}

func (a *acker) ack(batch []*held) {
	defer func() {
		for _, h := range batch {
			a.d.work.ended(h)
		}
	}()
	tokens := make([]pgwake.LockToken, len(batch))
	for i, h := range batch {
		tokens[i] = h.item.LockToken
	}
	// Each ack of the batch is good for itself, so there is hope as long as one lease lasts.
	end := func() (latest time.Time) {
		for _, h := range batch {
			if until := a.d.leases.end(h); until.After(latest) {
				latest = until
			}
		}
		return latest
	}
	mayHave, err := persist(a.d.work.settling, end, func(ctx context.Context) error { return a.call(ctx, tokens) })
	if lost, ok := lostOf(err); ok {
		if len(lost) > 0 && !mayHave {
			a.d.cfg.Logger.Warn("dispatch: items were done, and their leases were lost before they could be acknowledged", "items", len(lost))
		}
		return
	}
	a.d.cfg.Logger.Warn("dispatch: items are done and cannot be acknowledged: they come again", "error", err, "items", len(batch))
}

// call acknowledges items. Where a limit leaves few places, as many others are claimed in the same moment: a place that is
// free is to be taken, and nobody else is to be woken for it.
func (a *acker) call(ctx context.Context, tokens []pgwake.LockToken) error {
	n := a.d.work.inPlaceOf(len(tokens))
	if n == 0 {
		return a.d.p.AckWorkItems(ctx, tokens)
	}
	options := a.d.fetchOptions()
	options.NoWait, options.Ack = true, tokens
	items, err := a.d.p.FetchWorkItems(ctx, n, options)
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil
	}
	if err == nil {
		a.d.work.take(items, n)
	}
	return err
}
