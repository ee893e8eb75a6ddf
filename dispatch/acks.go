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

// This file answers: how does an item that is done leave the queue?
//
// A handler's place is free as soon as it returns. Its item is acknowledged together with whatever else is done by then: one
// statement at once if nothing else is on its way, and a large one under load. Such a statement waits for each of its items
// that another transaction has locked, and all others with it. So it has little time, and one attempt: if it fails, because of
// that, because the database is away or since one of them is refused, its items are acknowledged one by one (apart.go).

const (
	ackers      = 2    // statements on their way at one time
	ackedAtOnce = 1000 // most of one statement

	// ackPatience is how long a statement may take, unless those before it took long as well.
	ackPatience = 500 * time.Millisecond

	mostLogged = 100 // of the ids of a batch
)

type acker struct {
	d *Dispatcher

	bell     chan struct{}
	flushNow chan struct{} // something is unflushed

	mu        sync.Mutex
	done      []*held // to be acknowledged
	unflushed []*held // acknowledged asynchronously
}

func newAcker(d *Dispatcher) *acker {
	return &acker{d: d, bell: make(chan struct{}, ackers), flushNow: make(chan struct{}, 1)}
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
	allowance := a.d.ackAllowance()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.bell:
		}
		for batch := a.begin(); batch != nil; batch = a.begin() {
			a.ack(batch, allowance)
		}
	}
}

// ackAllowance is what a statement may take: as a renewal, since what hangs holds up others, and keeps its items from being renewed.
func (d *Dispatcher) ackAllowance() *allowance {
	length := d.cfg.LockTimeout
	least := min(ackPatience, length/looks)
	return &allowance{least: least, most: min(length/renewals, verbTimeout), now: least}
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

// waiting is how many items are to be acknowledged, and not on their way.
func (a *acker) waiting() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.done)
}

func (a *acker) ack(batch []*held, allowance *allowance) {
	tokens := make([]pgwake.LockToken, len(batch))
	for i, h := range batch {
		tokens[i] = h.item.LockToken
	}
	sent := time.Now()
	bounded, cancel := context.WithTimeout(a.d.work.settling, allowance.now)
	async, err := a.call(bounded, tokens)
	cancel()
	lost, ok := lostOf(err)
	allowance.after(time.Since(sent), ok)
	switch {
	case ok:
		a.lost(slices.DeleteFunc(slices.Clone(batch), func(h *held) bool { return !lost[h.item.LockToken] }))
		if async {
			a.flush(batch)
			return
		}
	case outage.Passes(err):
		a.d.apart.addAcks(batch, unknown(err))
		return
	case len(batch) > 1 && !errors.Is(err, pgwake.ErrClosed) && a.d.work.settling.Err() == nil:
		// The one that is refused is to take no other with it. Some may be acknowledged: a stream may have a statement for each queue.
		a.d.apart.addAcks(batch, true)
		return
	default:
		a.failed(batch, err)
	}
	a.ended(batch)
}

func (a *acker) ended(items []*held) {
	for _, h := range items {
		a.d.work.ended(h)
	}
}

func (a *acker) lost(items []*held) {
	if len(items) > 0 {
		a.d.cfg.Logger.Warn("dispatch: items were done, and their leases were lost before they could be acknowledged",
			"items", len(items), "ids", idsOf(items))
	}
}

func (a *acker) failed(items []*held, err error) {
	a.d.cfg.Logger.Warn("dispatch: items are done and cannot be acknowledged: they come again", "error", err,
		"items", len(items), "ids", idsOf(items))
}

// idsOf returns the ids of the first mostLogged.
func idsOf(items []*held) (ids []int64) {
	for _, h := range items[:min(len(items), mostLogged)] {
		ids = append(ids, h.item.ID)
	}
	return ids
}

// call acknowledges items. Where a limit leaves few places, as many others are claimed in the same moment: a place that is
// free is to be taken, and nobody else is to be woken for it. Nor is it to wait for a disk: async acks are yet to be flushed.
func (a *acker) call(ctx context.Context, tokens []pgwake.LockToken) (async bool, err error) {
	n := 0
	if !a.d.apart.troubled() { // a fetch that waits for what is locked keeps its connection for longer than anybody waits for it
		n = a.d.work.inPlaceOf(len(tokens))
	}
	if n == 0 {
		a.d.work.answered(0) // what room left to this ack is free
		return false, a.d.p.AckWorkItems(ctx, tokens)
	}
	options := a.d.fetchOptions()
	options.NoWait, options.Ack, options.AckAsync = true, tokens, true
	items, err := a.d.p.FetchWorkItems(ctx, n, options)
	if err == nil {
		a.d.work.take(items, n)
		return true, nil
	}
	a.d.work.answered(n)
	if errors.Is(err, pgwake.ErrNoWork) {
		return true, nil
	}
	return true, err
}

// flush has what was acknowledged asynchronously flushed.
func (a *acker) flush(batch []*held) {
	a.mu.Lock()
	a.unflushed = append(a.unflushed, batch...)
	a.mu.Unlock()
	select {
	case a.flushNow <- struct{}{}:
	default:
	}
}

// runFlush waits for the disk, for all that has come meanwhile at once, until ctx ends. If it cannot be known what is on the
// disk, since the server went away, the acks are made anew: what is gone by then was acknowledged.
func (a *acker) runFlush(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.flushNow:
		}
		a.mu.Lock()
		batch := a.unflushed
		a.unflushed = nil
		a.mu.Unlock()
		if len(batch) == 0 { // the last time took it along
			continue
		}
		bounded, cancel := context.WithTimeout(a.d.work.settling, verbTimeout)
		err := a.d.p.Flush(bounded)
		cancel()
		if outage.Passes(err) {
			a.d.apart.addAcks(batch, true)
			continue
		}
		if err != nil {
			a.d.cfg.Logger.Warn("dispatch: items were acknowledged, and perhaps not on the disk when this ended", "error", err,
				"items", len(batch), "ids", idsOf(batch))
		}
		a.ended(batch)
	}
}
