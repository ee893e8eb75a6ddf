package dispatch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how is what becomes of an item carried out, and that at the end as well?

// settle has the verdict carried out. It waits for nothing, and does nothing for what is settled already: a handler that was
// left behind may come to its end after its item was given back.
func (w *workshop) settle(h *held, v verdict, result Result) {
	w.mu.Lock()
	settled := h.settled
	h.settled = true
	w.mu.Unlock()
	if settled {
		return
	}
	d, item := w.d, h.item
	var completion *pgwake.Message
	if item.Instance != "" && (v.fate == acknowledge || v.fate == bury) {
		v, completion = d.complete(item, v, result)
	}
	d.tell(h, v)
	switch {
	case v.fate == committed, v.fate == forsake && !d.leases.lasts(h):
		w.ended(h)
		return
	case v.fate == forsake: // only here: until the server knows, nobody else gets it
		d.apart.add(h, &settlement{tried: true, mayHave: true, call: d.carryOut(h, verdict{fate: retry, free: v.free, err: v.err}, nil)})
		return
	case v.fate == acknowledge && completion == nil:
		d.acks.add(h)
		return
	}
	d.apart.add(h, &settlement{together: completion != nil, mayHave: h.byHandler.outcome().unsure, call: d.carryOut(h, v, completion), ways: d.plainer(h, v, completion)})
}

// complete makes the message for the orchestration that scheduled an item. If it cannot be made of the result, the
// orchestration learns that.
func (d *Dispatcher) complete(item *pgwake.ClaimedWorkItem, v verdict, result Result) (verdict, *pgwake.Message) {
	m, err := d.makeCompletion(item, result, v.err)
	if err == nil {
		return v, m
	}
	v = verdict{fate: bury, reason: ReasonPermanent, err: errors.Join(v.err, fmt.Errorf("make the completion: %w", err))}
	m, _ = d.makeCompletion(item, nil, v.err)
	return v, m
}

func (d *Dispatcher) makeCompletion(item *pgwake.ClaimedWorkItem, result Result, failure error) (*pgwake.Message, error) {
	return hooked(func() (*pgwake.Message, error) { return d.cfg.Completion(item, result, failure) })
}

// carryOut returns the call. Of a failure the orchestration learns, and nobody needs a dead letter.
func (d *Dispatcher) carryOut(h *held, v verdict, completion *pgwake.Message) func(context.Context) error {
	item := h.item
	switch {
	case completion != nil:
		return func(ctx context.Context) error {
			// The message belongs to the trace of the attempt.
			return d.p.AckBatched(trace.ContextWithSpanContext(ctx, h.span), item.LockToken, completion)
		}
	case v.fate == bury:
		return func(ctx context.Context) error {
			return d.p.DeadLetterWorkItem(ctx, item.LockToken, v.reason, text(v.err))
		}
	}
	o := &pgwake.AbandonOptions{Delay: v.delay, IgnoreAttempt: v.free, Error: text(v.err)}
	if v.free && !v.snoozed { // it keeps its place
		o.DueAt = item.DueAt
	}
	return func(ctx context.Context) error { return d.p.AbandonWorkItem(ctx, item.LockToken, o) }
}

// plainer returns what to do instead of what the Provider refuses as it is: tell the orchestration that its completion was refused,
// keep a dead letter if it cannot be told, and leave out what the handler said.
func (d *Dispatcher) plainer(h *held, v verdict, completion *pgwake.Message) (ways []func(refusal error) func(context.Context) error) {
	if completion != nil {
		v = verdict{fate: bury, reason: ReasonPermanent}
		buried := func(refusal error) func(context.Context) error {
			return d.carryOut(h, verdict{fate: bury, reason: ReasonPermanent, err: refusal}, nil)
		}
		ways = append(ways, func(refusal error) func(context.Context) error {
			failure, err := d.makeCompletion(h.item, nil, fmt.Errorf("the completion was refused: %w", refusal))
			if err != nil || failure == nil {
				return buried(refusal)
			}
			return d.carryOut(h, v, failure)
		}, buried)
	}
	v.err = nil
	return append(ways, func(error) func(context.Context) error { return d.carryOut(h, v, nil) })
}

// settlePatience is how long nothing may succeed at the end before the rest is left to the end of its leases.
const settlePatience = 5 * time.Second

// ended is the last of an item.
func (w *workshop) ended(h *held) {
	w.d.leases.drop(h)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.taken--
	w.changed()
}

// giveBack returns items that were not begun, or not ended in time.
func (w *workshop) giveBack(items []*held) {
	for _, h := range items {
		w.settle(h, verdict{fate: retry, free: true}, nil)
	}
}

// stop ends the work in two stages, and returns how many items there are whose handlers have not ended. What has become
// of all of them is in the database then, unless for settlePatience, or Config.CancelTimeout if that is longer, none could be settled.
func (w *workshop) stop() (left int) {
	w.mu.Lock()
	w.stopping = true
	w.d.telemetry.addPlaces(-w.places.now)
	ahead := w.ahead
	w.ahead = nil
	w.stale.Stop()
	w.mu.Unlock()
	w.giveBack(ahead)
	running := func() int { return len(w.running) }
	if w.waitFor(w.d.cfg.StopTimeout, running) > 0 {
		w.cutShort(ErrStopping)
		w.waitFor(w.d.cfg.CancelTimeout, running)
	}
	w.cutShort(ErrStopping)
	w.mu.Lock()
	stuck := slices.Collect(maps.Keys(w.running))
	w.mu.Unlock()
	acking := 0
	for _, h := range stuck {
		acking += w.leaveBehind(h)
	}
	taken := func() int { return w.taken }
	for before := w.waitFor(0, taken); before > 0; {
		left := w.waitFor(max(w.d.cfg.CancelTimeout, settlePatience), taken)
		if left == before {
			break
		}
		before = left // some were settled, so the others may be
	}
	w.giveUp()
	w.waitFor(verbTimeout, taken)
	if acking > 0 { // and their handlers probably have nothing more to do
		w.waitFor(w.d.cfg.CancelTimeout, running)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range stuck {
		if w.running[h] {
			left++
		}
	}
	return left
}

// leaveBehind settles an item whose handler does not end. Of those that this is about to acknowledge it returns 1, and waits for
// nothing: such an item is settled once it is known if it was.
func (w *workshop) leaveBehind(h *held) (acking int) {
	settle := func() {
		v := verdict{fate: retry, free: true, err: ErrStopping}
		switch own := h.byHandler.outcome(); {
		case own.acked:
			v = verdict{fate: committed}
		case own.lost:
			v = verdict{fate: forsake, err: own.failure}
		}
		w.settle(h, v, nil)
	}
	if under := h.byHandler.close(); under != nil {
		go func() { <-under; settle() }()
		return 1
	}
	settle()
	return 0
}

// waitFor waits until a number, which is counted with mu held, is 0, and returns what it is in time.
func (w *workshop) waitFor(d time.Duration, count func() int) int {
	timeUp := time.NewTimer(d)
	defer timeUp.Stop()
	for {
		w.mu.Lock()
		n := count()
		w.mu.Unlock()
		if n == 0 {
			return 0
		}
		select {
		case <-w.news:
		case <-timeUp.C:
			return n
		}
	}
}
