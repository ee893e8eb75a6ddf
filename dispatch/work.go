package dispatch

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: which items are at work, and what happens to one of them?
//
// An item that was claimed is at work, or ahead: it waits for a place here. Nobody else can take it meanwhile, so as many are
// claimed ahead as the handlers are likely to begin within lookAhead, by how long they took lately; that is none if handlers
// take their time. What is not begun by staleAhead, since one of them took longer than the others, is given back.
//
// Invariant: each item that was taken is ended once, by ended; until then its lease is renewed.

const (
	lookAhead  = 20 * time.Millisecond
	staleAhead = 10 * lookAhead

	mostUnsettled = 2 * ackedAtOnce // items that have been handled, and are still in the queue
)

type workshop struct {
	d *Dispatcher

	working  context.Context // of handlers
	cutShort context.CancelCauseFunc

	mu        sync.Mutex
	news      chan struct{} // something of the following has changed
	running   map[*held]bool
	ahead     []*held
	unsettled int
	mean      time.Duration // of what handlers took lately; 0: none has ended
	stopping  bool
	stale     *time.Timer
}

func newWorkshop(d *Dispatcher) *workshop {
	w := &workshop{d: d, running: make(map[*held]bool), news: make(chan struct{}, 1)}
	w.working, w.cutShort = context.WithCancelCause(context.Background())
	w.stale = time.AfterFunc(time.Hour, w.returnStale)
	w.stale.Stop()
	return w
}

// changed is called with mu held.
func (w *workshop) changed() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// places waits until there is a place for an item, and returns how many there are; 0: ctx has ended.
func (w *workshop) places(ctx context.Context) int {
	for ctx.Err() == nil {
		w.mu.Lock()
		n := w.free()
		w.mu.Unlock()
		if n > 0 {
			return min(n, pgwake.MaxFetch)
		}
		select {
		case <-w.news:
		case <-ctx.Done():
		}
	}
	return 0
}

// free is called with mu held.
func (w *workshop) free() int {
	idle, window := w.d.cfg.Concurrency-len(w.running), w.window()
	switch {
	case w.unsettled >= mostUnsettled:
		return 0
	case idle <= 0 && len(w.ahead) > window/2: // or each fetch would be for one
		return 0
	}
	return idle + window - len(w.ahead)
}

// window is how many items to have ahead. It is called with mu held.
func (w *workshop) window() int {
	if w.mean == 0 || w.d.cfg.Ahead == NotAhead {
		return 0
	}
	return int(min(int64(w.d.cfg.Ahead), int64(w.d.cfg.Concurrency)*int64(lookAhead/max(w.mean, 1))))
}

// take begins the items, or keeps them ahead.
func (w *workshop) take(items []*pgwake.ClaimedWorkItem, until time.Time) {
	taken := make([]*held, len(items))
	for i, item := range items {
		taken[i] = &held{item: item, since: time.Now(), until: until}
	}
	w.d.leases.add(taken)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ahead = append(w.ahead, taken...)
	for len(w.running) < w.d.cfg.Concurrency && len(w.ahead) > 0 {
		go w.handleAll(w.next())
	}
	if len(w.ahead) > 0 {
		w.stale.Reset(staleAhead)
	}
}

// next takes the next item to work, nil: there is none. It is called with mu held.
func (w *workshop) next() *held {
	if len(w.ahead) == 0 || w.stopping {
		return nil
	}
	h := w.ahead[0]
	w.ahead = w.ahead[1:]
	w.running[h] = true
	return h
}

// handleAll handles the item, and then what is ahead, in its place.
func (w *workshop) handleAll(h *held) {
	for h != nil {
		began := time.Now()
		w.handle(h)
		w.mu.Lock()
		delete(w.running, h)
		took := max(time.Since(began), 1)
		if w.mean == 0 {
			w.mean = took
		}
		w.mean += (took - w.mean) / 8
		h = w.next()
		w.changed()
		w.mu.Unlock()
	}
}

// returnStale gives back what has been ahead for too long.
func (w *workshop) returnStale() {
	w.mu.Lock()
	var stale []*held
	for len(w.ahead) > 0 && time.Since(w.ahead[0].since) >= staleAhead {
		stale = append(stale, w.ahead[0])
		w.ahead = w.ahead[1:]
	}
	if len(w.ahead) > 0 {
		w.stale.Reset(staleAhead - time.Since(w.ahead[0].since))
	}
	w.changed()
	w.mu.Unlock()
	w.giveBack(stale)
}

// giveBack returns items that were not begun, or not ended in time.
func (w *workshop) giveBack(items []*held) {
	for _, h := range items {
		w.settle(h, verdict{fate: retry, free: true}, nil)
	}
}

// handle runs the handler of an item and sees to what becomes of it.
func (w *workshop) handle(h *held) {
	r := w.d.handlers[h.item.Name]
	if r == nil {
		r = &registration{maxAttempts: w.d.cfg.MaxAttempts, retry: w.d.cfg.Retry, run: noHandler}
	}
	ctx, lose := context.WithCancelCause(w.working)
	defer lose(nil)
	if !w.d.leases.guard(h, lose) {
		w.settle(h, verdict{fate: forsake, err: pgwake.ErrLockLost}, nil)
		return
	}
	if r.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, r.timeout, ErrTimeout)
		defer cancel()
	}
	var result Result
	var err error
	if r.maxAttempts != Unlimited && h.item.Attempt > r.maxAttempts { // each attempt before ended its process
		err = errors.New("no attempt came to its end")
	} else {
		result, err = r.try(ctx, h.item)
	}
	var cause error
	if ctx.Err() != nil {
		cause = context.Cause(ctx)
	}
	w.settle(h, r.judge(h.item, err, cause), result)
}

func noHandler(context.Context, *pgwake.ClaimedWorkItem) (Result, error) { return nil, ErrNoHandler }

// try runs the handler; a panic is an error.
func (r *registration) try(ctx context.Context, item *pgwake.ClaimedWorkItem) (result Result, err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = &PanicError{panicked, debug.Stack()}
		}
	}()
	return r.run(ctx, item)
}

// settle has the verdict carried out. It waits for nothing.
func (w *workshop) settle(h *held, v verdict, result Result) {
	d, item := w.d, h.item
	w.mu.Lock()
	w.unsettled++
	w.mu.Unlock()
	log := d.cfg.Logger.With("item", item.ID, "name", item.Name, "namespace", item.Namespace, "attempt", item.Attempt)
	var completion *pgwake.Message
	if item.Instance != "" && (v.fate == acknowledge || v.fate == bury) {
		var err error
		if completion, err = d.cfg.Completion(item, result, v.err); err != nil {
			v = verdict{fate: bury, reason: ReasonPermanent, err: fmt.Errorf("make the completion: %w", err)}
		}
	}
	var carryOut func(context.Context) error
	switch {
	case v.fate == forsake:
		log.Warn("dispatch: the lease was lost", "error", v.err)
		w.ended(h)
		return
	case completion != nil: // of a failure the orchestration learns, and nobody needs a dead letter
		carryOut = func(ctx context.Context) error { return d.p.AckBatched(ctx, item.LockToken, completion) }
	case v.fate == acknowledge:
		d.acks.add(h)
		return
	case v.fate == bury:
		log.Error("dispatch: given up", "reason", v.reason, "error", v.err)
		carryOut = func(ctx context.Context) error {
			return d.p.DeadLetterWorkItem(ctx, item.LockToken, v.reason, text(v.err))
		}
	default:
		if v.err != nil {
			log.Warn("dispatch: failed", "again_in", v.delay, "error", v.err)
		}
		o := &pgwake.AbandonOptions{Delay: v.delay, IgnoreAttempt: v.free, Error: text(v.err)}
		carryOut = func(ctx context.Context) error { return d.p.AbandonWorkItem(ctx, item.LockToken, o) }
	}
	go func() {
		defer w.ended(h)
		err := persist(context.Background(), func() time.Time { return d.leases.end(h) }, carryOut)
		switch {
		case errors.Is(err, pgwake.ErrLockLost):
			log.Warn("dispatch: the lease was lost", "error", err)
		case err != nil:
			log.Warn("dispatch: left to the end of its lease", "error", err)
		}
	}()
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// ended is the last of an item.
func (w *workshop) ended(h *held) {
	w.d.leases.drop(h)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled--
	w.changed()
}

// stop ends the work in two stages, and returns how many handlers have not ended.
func (w *workshop) stop() (left int) {
	w.mu.Lock()
	w.stopping = true
	ahead := w.ahead
	w.ahead = nil
	w.stale.Stop()
	w.mu.Unlock()
	w.giveBack(ahead)
	if !w.waitFor(w.d.cfg.StopTimeout, func() bool { return len(w.running) == 0 }) {
		w.cutShort(ErrStopping)
		w.waitFor(w.d.cfg.CancelTimeout, func() bool { return len(w.running) == 0 })
	}
	w.cutShort(ErrStopping)
	w.mu.Lock()
	for h := range w.running {
		defer w.settle(h, verdict{fate: retry, free: true, err: ErrStopping}, nil)
	}
	left = len(w.running)
	w.mu.Unlock()
	return left
}

// waitFor waits until a condition holds, which is judged with mu held, and reports whether it does in time.
func (w *workshop) waitFor(d time.Duration, holds func() bool) bool {
	timeUp := time.NewTimer(d)
	defer timeUp.Stop()
	for {
		w.mu.Lock()
		ok := holds()
		w.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-w.news:
		case <-timeUp.C:
			return false
		}
	}
}
