package dispatch

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
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
// Invariant: each item that was taken is settled once (settle.go, apart.go), and its lease is renewed until that has been carried out.

type workshop struct {
	d *Dispatcher

	working  context.Context // of handlers
	cutShort context.CancelCauseFunc
	settling context.Context // of the calls that settle items
	giveUp   context.CancelFunc

	mu       sync.Mutex
	news     chan struct{} // something of the following has changed
	places   *places
	busy     int // places that are taken
	taken    int // items that are not ended
	asked    int // items that calls on their way ask for
	running  map[*held]bool
	ahead    []*held
	more     bool          // the last claim got all that it asked for, so there was probably more
	allowed  int           // how many items like those of the last claim may be at work, over all nodes; 0: any number
	plenty   bool          // the last fetch that was for many, or got less than it asked for, got many: places are not scarce
	mean     time.Duration // of what handlers took for an item lately; 0: none has ended
	each     int           // how many items to claim for a place: of the largest batch, unless what came lately was not for that
	opened   bool          // Run has begun
	stopping bool
	stale    *time.Timer
}

func newWorkshop(d *Dispatcher) *workshop {
	w := &workshop{d: d, running: make(map[*held]bool), news: make(chan struct{}, 1), places: newPlaces(&d.cfg)}
	w.working, w.cutShort = context.WithCancelCause(context.Background())
	w.settling, w.giveUp = context.WithCancel(context.Background())
	w.stale = time.AfterFunc(time.Hour, w.returnStale)
	w.stale.Stop()
	return w
}

// begin opens the places, for the items of a call that was made before and asked for so many; 0: there was none.
func (w *workshop) begin(first []*pgwake.ClaimedWorkItem, asked int) {
	w.mu.Lock()
	w.opened = true
	w.d.telemetry.addPlaces(w.places.now)
	w.each = w.d.largest
	w.asked += asked
	w.mu.Unlock()
	if asked > 0 {
		w.take(first, asked)
	}
}

// isIdle reports whether nothing is in hand, or about to be.
func (w *workshop) isIdle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.taken == 0 && w.asked == 0
}

// resize changes the number of places. Handlers that are at work beyond it come to their end.
func (w *workshop) resize(least, most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.places.now
	w.places.resize(least, most)
	if w.opened && !w.stopping {
		w.d.telemetry.addPlaces(w.places.now - before)
	}
	w.fill()
	w.changed()
}

// changed is called with mu held.
func (w *workshop) changed() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// take takes items to work, which are those of a call that asked for so many. Those that come when the Dispatcher is about to
// end are given back.
func (w *workshop) take(items []*pgwake.ClaimedWorkItem, asked int) {
	w.d.telemetry.claimedItems(items)
	taken := make([]*held, len(items))
	for i, item := range items {
		until := w.d.p.LocalTime(item.LockedUntil)
		taken[i] = &held{d: w.d, item: item, since: time.Now(), until: until, latest: until}
	}
	w.d.leases.add(taken)
	if !w.keep(taken, asked) {
		w.giveBack(taken)
	}
}

// keep begins the items, or keeps them ahead, unless the Dispatcher is about to end.
func (w *workshop) keep(taken []*held, asked int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken += len(taken)
	w.asked -= asked
	w.changed()
	if w.stopping {
		return false
	}
	w.ahead, w.more = append(w.ahead, taken...), len(taken) >= asked
	if len(taken) > 0 {
		w.allowed = fewest(taken)
	}
	w.fill()
	w.watchAhead()
	return true
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
		if len(unit) < most && w.more { // it would have taken others that are there
			w.each = min(2*w.each, w.d.largest)
		}
	}
	for _, h := range unit {
		w.running[h] = true
	}
	return unit
}

// handleAll handles items, and then what is ahead, in their place. A handler that ends its goroutine (runtime.Goexit) does
// not take that place with it.
func (w *workshop) handleAll(unit []*held) {
	began := time.Now()
	defer func() {
		if unit != nil {
			if unit = w.over(unit, began); unit != nil {
				go w.handleAll(unit)
			}
		}
	}()
	for unit != nil {
		began = time.Now()
		w.handle(unit)
		unit = w.over(unit, began)
	}
}

// over frees the place of items that have been handled, unless it returns others for it.
func (w *workshop) over(unit []*held, began time.Time) (next []*held) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range unit {
		delete(w.running, h)
	}
	took := max(time.Since(began)/time.Duration(len(unit)), 1)
	if w.mean == 0 {
		w.mean = took
	}
	w.mean = max(w.mean+(took-w.mean)/8, 1)
	if before := w.places.now; !w.stopping && w.places.ended(time.Now(), len(unit), w.busy == before && w.more) {
		w.d.telemetry.addPlaces(w.places.now - before)
	}
	if len(w.ahead) > 0 && !w.stopping && w.busy <= w.places.now {
		next = w.next()
	} else {
		w.busy--
	}
	w.fill() // there may be a place more than before
	w.changed()
	return next
}

// watchAhead has the first of what is ahead given back when it has been there for too long. It is called with mu held.
func (w *workshop) watchAhead() {
	if len(w.ahead) > 0 {
		w.stale.Reset(staleAhead - time.Since(w.ahead[0].since))
	}
}

// returnStale gives back what has been ahead for too long. That it was is a sign that handlers take longer than they did.
func (w *workshop) returnStale() {
	w.mu.Lock()
	var stale []*held
	for len(w.ahead) > 0 && time.Since(w.ahead[0].since) >= staleAhead {
		stale = append(stale, w.ahead[0])
		w.ahead = w.ahead[1:]
	}
	w.watchAhead()
	if len(stale) > 0 {
		w.mean = max(w.mean, lookAhead+1)
		w.each = 1 // what was claimed for a batch, say, belonged to none
	}
	w.changed()
	w.mu.Unlock()
	w.giveBack(stale)
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
		switch { // what is not handled is not guarded: nobody is to be told twice that it is gone
		case r.maxAttempts != Unlimited && h.item.Attempt > r.maxAttempts:
			lose(nil)
			w.settle(h, r.judge(h, noAttemptEnded(h.item.LastError), nil), nil)
		case !w.d.leases.guard(h, lose):
			lose(pgwake.ErrLockLost)
			w.settle(h, verdict{fate: forsake, free: true, err: pgwake.ErrLockLost}, nil)
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
	l := r.labels
	if l == nil {
		l = w.d.telemetry.others.get(inHand[0].item.Name)
	}
	ctx = w.d.telemetry.begin(ctx, w.d, l, inHand)
	attempts := allFailed(len(inHand), errGoexit)
	defer func() {
		var cause error
		if ctx.Err() != nil {
			cause = context.Cause(ctx)
		}
		verdicts := make([]verdict, len(inHand))
		for i, h := range inHand {
			h.byHandler.over()
			if verdicts[i] = r.judge(h, attempts[i].err, cause); verdicts[i].fate != committed && w.isSettled(h) {
				verdicts[i] = verdict{fate: retry, free: true, err: ErrStopping}
			}
		}
		w.d.telemetry.end(ctx, l, inHand, verdicts, began)
		for i, h := range inHand {
			w.settle(h, verdicts[i], attempts[i].result)
		}
	}()
	attempts = r.try(ctx, inHand)
}

var (
	errNoAttemptEnded = errors.New("the last attempt did not come to its end")
	errGoexit         = errors.New("the handler ended its goroutine")
)

// noAttemptEnded is the error of an item that has had all of its attempts, of which the last did not come to its end; before is that
// of the last that did.
func noAttemptEnded(before string) error {
	if before == "" {
		return errNoAttemptEnded
	}
	return fmt.Errorf("%w; the error before that: %s", errNoAttemptEnded, before)
}

// isSettled reports whether it is: a handler that was left behind may come to its end after its item was given back.
func (w *workshop) isSettled(h *held) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return h.settled
}

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
