package dispatch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
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
	settling context.Context // of the calls that settle items
	giveUp   context.CancelFunc

	mu        sync.Mutex
	news      chan struct{} // something of the following has changed
	places    *places
	busy      int // places that are taken
	running   map[*held]bool
	ahead     []*held
	more      bool // the last claim got all that it asked for, so there was probably more
	unsettled int
	mean      time.Duration // of what handlers took for an item lately; 0: none has ended
	stopping  bool
	stale     *time.Timer
}

func newWorkshop(d *Dispatcher) *workshop {
	w := &workshop{d: d, running: make(map[*held]bool), news: make(chan struct{}, 1), places: newPlaces(&d.cfg)}
	w.working, w.cutShort = context.WithCancelCause(context.Background())
	w.settling, w.giveUp = context.WithCancel(context.Background())
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

// room waits until there is room for an item, and returns for how many there is; 0: ctx has ended.
func (w *workshop) room(ctx context.Context) int {
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
	idle, window := w.places.now-w.busy, w.window()
	switch {
	case w.unsettled >= mostUnsettled:
		return 0
	case idle <= 0 && len(w.ahead) > window/2: // or each fetch would be for one
		return 0
	}
	return max(idle, 0)*w.d.largest + window - len(w.ahead)
}

// window is how many items to have ahead. It is called with mu held.
func (w *workshop) window() int {
	if w.mean == 0 || w.d.cfg.Ahead == NotAhead {
		return 0
	}
	return int(min(int64(w.d.cfg.Ahead), int64(w.places.now)*int64(lookAhead/max(w.mean, 1))))
}

// take begins the items, or keeps them ahead.
func (w *workshop) take(items []*pgwake.ClaimedWorkItem, asked int) {
	taken := make([]*held, len(items))
	for i, item := range items {
		taken[i] = &held{item: item, since: time.Now(), until: w.d.p.LocalTime(item.LockedUntil)}
	}
	w.d.leases.add(taken)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ahead, w.more = append(w.ahead, taken...), len(items) >= asked
	w.fill()
	if len(w.ahead) > 0 {
		w.stale.Reset(staleAhead)
	}
}

// fill has what is ahead begun in all places that are free. It is called with mu held.
func (w *workshop) fill() {
	for w.busy < w.places.now && !w.stopping && len(w.ahead) > 0 {
		w.busy++
		go w.handleAll(w.next())
	}
}

// next takes the next item to work, and with it those that its handler takes at once. It is called with mu held.
func (w *workshop) next() (unit []*held) {
	first := w.ahead[0]
	most := w.d.registration(first.item.Name).most
	if most == 1 { // as nearly always
		unit, w.ahead = w.ahead[:1:1], w.ahead[1:]
	} else {
		var rest []*held
		for _, h := range w.ahead {
			if len(unit) < most && h.item.Name == first.item.Name {
				unit = append(unit, h)
			} else {
				rest = append(rest, h)
			}
		}
		w.ahead = rest
	}
	for _, h := range unit {
		w.running[h] = true
	}
	return unit
}

// handleAll handles items, and then what is ahead, in their place.
func (w *workshop) handleAll(unit []*held) {
	for unit != nil {
		began := time.Now()
		w.handle(unit)
		took := max(time.Since(began)/time.Duration(len(unit)), 1)
		w.mu.Lock()
		for _, h := range unit {
			delete(w.running, h)
		}
		if w.mean == 0 {
			w.mean = took
		}
		w.mean += (took - w.mean) / 8
		if w.places.ended(time.Now(), len(unit), w.busy == w.places.now && w.more) {
			w.d.telemetry.hasPlaces(w.places.now)
		}
		unit = nil
		if len(w.ahead) > 0 && !w.stopping && w.busy <= w.places.now {
			unit = w.next()
		} else {
			w.busy--
		}
		w.fill() // there may be a place more than before
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
		w.settle(h, verdict{fate: retry, free: true}, attempt{})
	}
}

// handle runs the handler of items and sees to what becomes of each.
func (w *workshop) handle(unit []*held) {
	r := w.d.registration(unit[0].item.Name)
	ctx, end := context.WithCancelCause(w.working)
	defer end(nil)
	var kept atomic.Int32
	kept.Store(int32(len(unit)))
	lose := func(cause error) { // of one of them
		if kept.Add(-1) == 0 {
			end(cause)
		}
	}
	var inHand []*held
	for _, h := range unit {
		switch {
		case !w.d.leases.guard(h, lose):
			lose(pgwake.ErrLockLost)
			w.settle(h, verdict{fate: forsake, err: pgwake.ErrLockLost}, attempt{})
		case r.maxAttempts != Unlimited && h.item.Attempt > r.maxAttempts: // each attempt before ended its process
			lose(nil)
			w.settle(h, r.judge(h, errNoAttemptEnded, nil), attempt{})
		default:
			inHand = append(inHand, h)
		}
	}
	if inHand == nil {
		return
	}
	if r.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, r.timeout, ErrTimeout)
		defer cancel()
	}
	began := time.Now()
	ctx = w.d.telemetry.begin(ctx, w.d, inHand)
	attempts := r.try(ctx, inHand)
	var cause error
	if ctx.Err() != nil {
		cause = context.Cause(ctx)
	}
	verdicts := make([]verdict, len(inHand))
	for i, h := range inHand {
		verdicts[i] = r.judge(h, attempts[i].err, cause)
	}
	w.d.telemetry.end(ctx, inHand, verdicts, began)
	for i, h := range inHand {
		w.settle(h, verdicts[i], attempts[i])
	}
}

// errNoAttemptEnded is that of an item of which every attempt ended its process.
var errNoAttemptEnded = errors.New("no attempt came to its end")

// attempt is what came of handling an item.
type attempt struct {
	result Result
	err    error
}

// try runs the handler; a panic is an error of all items.
func (r *registration) try(ctx context.Context, unit []*held) (attempts []attempt) {
	defer func() {
		if panicked := recover(); panicked != nil {
			attempts = allFailed(len(unit), &PanicError{panicked, debug.Stack()})
		}
	}()
	return r.run(ctx, unit)
}

func allFailed(n int, err error) []attempt {
	attempts := make([]attempt, n)
	for i := range attempts {
		attempts[i].err = err
	}
	return attempts
}

// settle has the verdict carried out. It waits for nothing.
func (w *workshop) settle(h *held, v verdict, a attempt) {
	d, item := w.d, h.item
	w.mu.Lock()
	w.unsettled++
	w.mu.Unlock()
	var completion *pgwake.Message
	if item.Instance != "" && (v.fate == acknowledge || v.fate == bury) {
		var err error
		if completion, err = d.cfg.Completion(item, a.result, v.err); err != nil {
			v = verdict{fate: bury, reason: ReasonPermanent, err: fmt.Errorf("make the completion: %w", err)}
		}
	}
	d.tell(h, v)
	var carryOut func(context.Context) error
	switch {
	case v.fate == forsake, v.fate == committed:
		w.ended(h)
		return
	case completion != nil: // of a failure the orchestration learns, and nobody needs a dead letter
		carryOut = func(ctx context.Context) error { return d.p.AckBatched(ctx, item.LockToken, completion) }
	case v.fate == acknowledge:
		d.acks.add(h)
		return
	case v.fate == bury:
		carryOut = func(ctx context.Context) error {
			return d.p.DeadLetterWorkItem(ctx, item.LockToken, v.reason, text(v.err))
		}
	default:
		o := &pgwake.AbandonOptions{Delay: v.delay, IgnoreAttempt: v.free, Error: text(v.err)}
		carryOut = func(ctx context.Context) error { return d.p.AbandonWorkItem(ctx, item.LockToken, o) }
	}
	go func() {
		defer w.ended(h)
		err := persist(w.settling, func() time.Time { return d.leases.end(h) }, carryOut)
		switch {
		case errors.Is(err, pgwake.ErrLockLost):
			d.log(h).Warn("dispatch: the lease was lost", "error", err)
		case err != nil:
			d.log(h).Warn("dispatch: left to the end of its lease", "error", err)
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

// stop ends the work in two stages, and returns how many handlers have not ended. What has become of the items is in the
// database then, unless that is away for longer than Config.CancelTimeout.
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
	stuck := slices.Collect(maps.Keys(w.running))
	w.mu.Unlock()
	for _, h := range stuck {
		w.settle(h, verdict{fate: retry, free: true, err: ErrStopping}, attempt{})
	}
	settled := func() bool { return w.unsettled == 0 }
	if !w.waitFor(w.d.cfg.CancelTimeout, settled) {
		w.giveUp()
		w.waitFor(verbTimeout, settled)
	}
	return len(stuck)
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
