package dispatch

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how does an item that is done leave the queue?
//
// A handler's place is free as soon as it returns. Its item is acknowledged together with whatever else is done by then: one
// statement at once if nothing else is on its way, and a large one under load. Such a statement waits for each of its items
// that another transaction has locked, and all others with it. So it has little time, and one attempt: if it fails, because of
// that or because the database is away, its items are set apart, and acknowledged each by itself, for as long as their leases
// hold: an ack that is lost costs another attempt, and no more.

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
	apartNow chan struct{} // something was set apart

	mu        sync.Mutex
	done      []*held          // to be acknowledged
	unflushed []*held          // acknowledged asynchronously
	apart     map[*held]*apart // to be acknowledged each by itself
}

func newAcker(d *Dispatcher) *acker {
	return &acker{d: d, bell: make(chan struct{}, ackers), flushNow: make(chan struct{}, 1), apartNow: make(chan struct{}, 1),
		apart: make(map[*held]*apart)}
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
	allowance := a.allowance()
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

// allowance is what a statement may take: as a renewal, since what hangs holds up others, and keeps its items from being renewed.
func (a *acker) allowance() *allowance {
	length := a.d.cfg.LockTimeout
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
	var failure *pgwake.Error
	switch {
	case ok:
		a.lost(slices.DeleteFunc(slices.Clone(batch), func(h *held) bool { return !lost[h.item.LockToken] }))
		if async {
			a.flush(batch)
			return
		}
	case errors.As(err, &failure) && failure.Retryable:
		a.setApart(batch, failure.Unknown)
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
	if !a.anyApart() { // a fetch that waits for what is locked keeps its connection for longer than anybody waits for it
		n = a.d.work.inPlaceOf(len(tokens))
	}
	if n == 0 {
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
		bounded, cancel := context.WithTimeout(a.d.work.settling, verbTimeout)
		err := a.d.p.Flush(bounded)
		cancel()
		if failure := (*pgwake.Error)(nil); errors.As(err, &failure) && failure.Retryable {
			a.setApart(batch, true)
			continue
		}
		if err != nil {
			a.d.cfg.Logger.Warn("dispatch: items were acknowledged, and perhaps not on the disk when this ended", "error", err,
				"items", len(batch), "ids", idsOf(batch))
		}
		a.ended(batch)
	}
}

// apart is what is known of an item that is set apart.
type apart struct {
	underWay bool // its ack
	mayHave  bool // been acknowledged, since an answer did not come
}

// setApart has items acknowledged each by itself.
func (a *acker) setApart(items []*held, mayHave bool) {
	a.mu.Lock()
	for _, h := range items {
		a.apart[h] = &apart{mayHave: mayHave}
	}
	a.mu.Unlock()
	select {
	case a.apartNow <- struct{}{}:
	default:
	}
}

func (a *acker) anyApart() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.apart) > 0
}

// runApart acknowledges what is set apart until ctx ends.
func (a *acker) runApart(ctx context.Context) {
	allowance := a.allowance()
	pause := time.NewTimer(0)
	defer pause.Stop()
	over := a.d.work.settling.Done()
	for next := firstPause; ; next = min(2*next, lastPause) {
		select {
		case <-ctx.Done():
			return
		case <-over: // what is left ends
			over = nil
		case <-a.apartNow:
			next = firstPause
		case <-pause.C:
		}
		a.mu.Lock()
		items := slices.Collect(maps.Keys(a.apart))
		a.mu.Unlock()
		for batch := range slices.Chunk(items, ackedAtOnce) {
			a.ackEach(batch, allowance)
		}
		if len(items) > 0 {
			pause.Reset(jittered(next))
		}
	}
}

// ackEach has each of these acknowledged that can be now. Those acks travel together all the same, but what is locked again by
// then holds up itself alone.
func (a *acker) ackEach(batch []*held, allowance *allowance) {
	sent := time.Now()
	free, ok := a.free(batch, allowance.now)
	allowance.after(time.Since(sent), ok)
	for _, h := range batch {
		over := a.d.work.settling.Err() != nil || !time.Now().Before(a.d.leases.end(h))
		a.mu.Lock()
		state := a.apart[h]
		begin := state != nil && !state.underWay && (free[h] || over)
		if begin {
			state.underWay = true
		}
		a.mu.Unlock()
		switch {
		case begin && over:
			a.settled(h, errNoTime)
		case begin:
			go func() {
				bounded, cancel := context.WithDeadline(a.d.work.settling, minTime(time.Now().Add(verbTimeout), a.d.leases.end(h)))
				defer cancel()
				a.settled(h, a.d.p.AckBatched(bounded, h.item.LockToken, nil))
			}()
		}
	}
}

var errNoTime = errors.New("the lease, or the Dispatcher, lasts no longer")

// free returns those of a batch that nobody has locked, or that are lost: to wait for what is locked takes a connection for each.
// One alone is not looked at, but tried.
func (a *acker) free(batch []*held, allowed time.Duration) (free map[*held]bool, ok bool) {
	if len(batch) == 1 {
		return map[*held]bool{batch[0]: true}, true
	}
	renewed, ok := a.d.leases.renew(a.d.work.settling, batch, allowed)
	if !ok {
		return nil, false
	}
	free = make(map[*held]bool, len(batch))
	for _, h := range batch {
		_, is := renewed[h.item.LockToken]
		free[h] = is || a.d.leases.isLost(h)
	}
	return free, true
}

// settled takes note of what became of an item that is set apart. If it may be tried again it stays.
func (a *acker) settled(h *held, err error) {
	var failure *pgwake.Error
	again := errors.As(err, &failure) && failure.Retryable && a.d.work.settling.Err() == nil && time.Now().Before(a.d.leases.end(h))
	a.mu.Lock()
	mayHave := a.apart[h].mayHave
	if again {
		a.apart[h] = &apart{mayHave: mayHave || failure.Unknown}
	} else {
		delete(a.apart, h)
	}
	a.mu.Unlock()
	switch {
	case again:
		return
	case err == nil, errors.Is(err, pgwake.ErrLockLost) && mayHave:
	case errors.Is(err, pgwake.ErrLockLost):
		a.lost([]*held{h})
	default:
		a.failed([]*held{h}, err)
	}
	a.ended([]*held{h})
}
