package dispatch

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when are items claimed, and how many?
//
// As many as there is room for: a place that is idle, and, where handlers are quick, what they are likely to begin next. Where a
// limit leaves few places, the ack of an item claims the next (acks.go), and leaves none to be fought for.

const (
	lookAhead  = 20 * time.Millisecond
	staleAhead = 10 * lookAhead

	// What is ahead counts as at work where that is limited, and keeps others from being so. It is at most this part of what
	// is allowed to be, if places are scarce, and if there are plenty.
	scarcePart, plentyPart = 16, 4

	manyAsked = 10 // a fetch that gets so many at once found the limit far away

	mostUnsettled = 2 * ackedAtOnce // items that have been handled, and are still in the queue
)

// claim claims until ctx ends, or there is nothing to do for a while (see run). Any other error is one that will not go away.
func (d *Dispatcher) claim(ctx context.Context, idle time.Duration) error {
	patience := patience{log: d.cfg.Logger, poll: idle, served: &d.served}
	for began := time.Now(); ; {
		n := d.work.room(ctx)
		if n == 0 {
			return nil
		}
		fetching, end := d.tags.during(ctx)
		options := d.fetchOptions()
		options.PollTimeout = idle
		items, err := d.p.FetchWorkItems(fetching, n, options)
		patience.heard(err)
		changed := errors.Is(context.Cause(fetching), errTagsChanged)
		end(nil)
		if changed && err != nil && ctx.Err() == nil {
			err = nil // it asks anew, for the others
		}
		if d.fetched != nil {
			d.fetched(ctx, err)
		}
		d.work.learn(n, len(items))
		d.work.take(items, n)
		if len(items) > 0 {
			began = time.Now()
		}
		if idle > 0 && errors.Is(err, pgwake.ErrNoWork) && d.work.isIdle() && time.Since(began) >= idle {
			return errIdle
		}
		if goOn, err := patience.after(ctx, err); !goOn {
			return err
		}
	}
}

// SetTags changes Config.Tags, also while it runs: a fetch that waits begins anew if they are others, and what is in hand is handled as
// before. Safe for concurrent use. Not for a Dispatcher of Coordinators, which wait by the Config of its Group.
func (d *Dispatcher) SetTags(tags pgwake.TagFilter) { d.tags.set(tags) }

// tags is what is asked for.
type tags struct {
	mu     sync.Mutex
	filter pgwake.TagFilter
	change context.CancelCauseFunc // ends the fetch that is under way; nil: there was none
}

var errTagsChanged = errors.New("the tags have changed")

func (t *tags) set(filter pgwake.TagFilter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if reflect.DeepEqual(filter, t.filter) {
		return
	}
	t.filter = filter
	if t.change != nil {
		t.change(errTagsChanged)
	}
}

func (t *tags) get() pgwake.TagFilter {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.filter
}

// during returns the context of a fetch, which ends when the tags change. Whoever reads them after that has those that it is to ask for,
// or newer ones.
func (t *tags) during(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, end := context.WithCancelCause(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.change = end
	return ctx, end
}

func (d *Dispatcher) fetchOptions() *pgwake.FetchOptions {
	return &pgwake.FetchOptions{
		LockTimeout: d.cfg.LockTimeout, Namespaces: d.cfg.Namespaces, Tags: d.tags.get(), Session: d.cfg.Session, Fair: d.cfg.Fair,
	}
}

// room waits until there is room for an item, and returns for how many there is, which are asked for then; 0: ctx has ended.
func (w *workshop) room(ctx context.Context) int {
	for ctx.Err() == nil {
		w.mu.Lock()
		n := max(min(w.free()-w.asked-w.leftToAcks(), pgwake.MaxFetch), 0)
		w.asked += n
		w.mu.Unlock()
		if n > 0 {
			return n
		}
		select {
		case <-w.news:
		case <-ctx.Done():
		}
	}
	return 0
}

// leftToAcks is for how many items acks that are about to begin ask: see inPlaceOf. It is called with mu held.
func (w *workshop) leftToAcks() int {
	if w.allowed == 0 || w.plenty {
		return 0
	}
	return w.d.acks.waiting()
}

// free is how many items there is room for. It is called with mu held.
func (w *workshop) free() int {
	idle, window := w.places.now-w.busy, w.window()
	switch {
	case w.taken-len(w.running)-len(w.ahead) >= mostUnsettled:
		return 0
	case idle <= 0 && len(w.ahead) > window/2: // or each fetch would be for one
		return 0
	}
	return max(idle, 0)*w.each + window - len(w.ahead)
}

// window is how many items to have ahead. It is called with mu held.
func (w *workshop) window() int {
	if w.mean == 0 || w.d.cfg.Ahead == NotAhead || w.d.triedOnce {
		return 0
	}
	most := w.d.cfg.Ahead
	switch {
	case w.allowed > 0 && w.plenty:
		most = min(most, w.allowed/plentyPart)
	case w.allowed > 0:
		most = min(most, w.allowed/scarcePart)
	}
	return int(min(int64(most), int64(w.places.now)*int64(lookAhead/w.mean)))
}

// answered takes note of a call that had asked for so many items, and brought none.
func (w *workshop) answered(asked int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked -= asked
	w.changed()
}

// fewest is how many items like one of these may be at work at one time; 0: any number.
func fewest(taken []*held) (places int) {
	for _, h := range taken {
		if p := h.item.Places; p > 0 && (places == 0 || p < places) {
			places = p
		}
	}
	return places
}

// learn takes note of what a fetch got that asked for so many.
func (w *workshop) learn(asked, got int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if asked >= manyAsked || got < asked {
		w.plenty = got == asked
	}
}

// inPlaceOf returns how many items to claim with the ack of so many, which are asked for then: none, unless places are scarce.
// All that is asked for may come at once, and is not to be more than can be begun: it would keep its places from others.
func (w *workshop) inPlaceOf(acked int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.allowed == 0 || w.plenty || w.stopping {
		return 0
	}
	n := max(min(acked, pgwake.MaxFetch, w.free()-w.asked), 0)
	w.asked += n
	w.changed()
	return n
}
