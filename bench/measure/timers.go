package measure

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how late is a delayed item?

// TimersOptions are the sizes of Timers.
type TimersOptions struct {
	Timers      int           // Of all groups together. Defaults to 200.
	Window      time.Duration // Time in which they become due. Defaults to 5 s.
	Lead        time.Duration // From the first scheduling to the first due instant: enough for Providers to start. Defaults to 1.5 s.
	Dispatchers int           // Defaults to 8.
	Progress    func(Progress)
}

func (o *TimersOptions) setDefaults() {
	orDefault(&o.Timers, 200)
	orDefault(&o.Window, 5*time.Second)
	orDefault(&o.Lead, 1500*time.Millisecond)
	orDefault(&o.Dispatchers, 8)
}

// TimersResult is what Timers found: the lateness of each timer, by who scheduled it and when.
type TimersResult struct {
	Before Samples `json:"before"` // by a Provider that was closed before the consuming one was opened
	Other  Samples `json:"other"`  // by others while it ran: another Provider, and plain SQL
	Own    Samples `json:"own"`    // by the consuming Provider itself

	// Earliest is the least lateness of all. It is negative by no more than ClockError, or something
	// came too early.
	Earliest   time.Duration `json:"earliest"`
	ClockError time.Duration `json:"clock_error"`

	// TooSoon counts timers that were due before the dispatchers waited, or before their scheduling had
	// returned. They are no timers then, and left out.
	TooSoon int       `json:"too_soon"`
	Again   int       `json:"again"`
	Net     SafetyNet `json:"safety_net"`
}

// All returns the lateness of all timers.
func (r *TimersResult) All() Samples { return slices.Concat(r.Before, r.Other, r.Own) }

// timer is one item to become due.
type timer struct {
	due      time.Time // server's clock
	by       Producer  // "": the Provider that is closed before the consuming one is opened
	schedule time.Time // when, by our clock
	tooSoon  bool
}

// leastDelay is how long before it is due a timer is scheduled at the latest.
const leastDelay = 20 * time.Millisecond

// Timers has items become due at random instants within a window and takes the lateness of each. A third is
// scheduled before the consuming Provider starts, a third by others while it runs, a third by itself. There
// are always several ahead, so nearly all of them are at some time the second in line.
func Timers(ctx context.Context, url string, o TimersOptions) (r *TimersResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "timers", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	clock, err := newServerClock(ctx, url)
	if err != nil {
		return nil, err
	}
	l := newLedger(warmUps + o.Timers)
	timers := make([]timer, o.Timers)
	if err := s.scheduleAndLeave(ctx, l, timers, func() {
		from := clock.server(time.Now()).Add(o.Lead)
		for i := range timers {
			timers[i].due = from.Add(rand.N(o.Window)).Truncate(time.Microsecond)
			timers[i].by = []Producer{"", OtherProvider, SameProvider, "", PlainSQL, SameProvider}[i%6]
		}
	}); err != nil {
		return nil, err
	}

	consumer, err := s.open(ctx, o.Dispatchers)
	if err != nil {
		return nil, err
	}
	defer consumer.close(&err)
	producers := map[Producer]*producer{}
	for _, kind := range []Producer{OtherProvider, PlainSQL, SameProvider} {
		if producers[kind], err = s.produce(ctx, kind, consumer, l); err != nil {
			return nil, err
		}
		defer producers[kind].close(&err)
	}
	consumer.dispatch(o.Dispatchers, nil, l.take)
	ctx = consumer.ctx

	m := newMeter(o.Progress)
	var seen Samples
	see := func(n int) {
		if n < warmUps {
			return
		}
		seen = append(seen, clock.server(l.line(n).inHand).Sub(timers[n-warmUps].due))
		if m.due() || len(seen) == o.Timers {
			m.report(Progress{Done: len(seen), Total: o.Timers, Figures: seen.Summary()})
		}
	}
	if err := producers[PlainSQL].warmUp(ctx, l, see); err != nil {
		return nil, err
	}
	if err := consumer.parked(o.Dispatchers); err != nil {
		return nil, err
	}

	ready := time.Now()
	serverReady := clock.server(ready)
	var order []int
	for i := range timers {
		t := &timers[i]
		t.tooSoon = t.due.Before(serverReady)
		if t.by != "" {
			t.schedule = ready.Add(rand.N(max(t.due.Sub(serverReady)-leastDelay, 1)))
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return timers[a].schedule.Compare(timers[b].schedule) })
	for _, i := range order {
		t := &timers[i]
		if err := pause(ctx, time.Until(t.schedule)); err != nil {
			return nil, err
		}
		if err := producers[t.by].enqueue(ctx, warmUps+i, t.due); err != nil {
			return nil, err
		}
		t.tooSoon = t.tooSoon || clock.server(time.Now()).After(t.due)
		if err := l.wait(ctx, len(l.arrived), see); err != nil {
			return nil, err
		}
	}
	if err := l.wait(ctx, cap(l.arrived)-warmUps-len(seen), see); err != nil {
		return nil, err
	}

	if err := clock.finish(ctx); err != nil {
		return nil, err
	}
	r = &TimersResult{ClockError: clock.uncertainty(), Again: l.redelivered()}
	for i := range timers {
		t := &timers[i]
		late := clock.server(l.line(warmUps + i).inHand).Sub(t.due)
		switch {
		case t.tooSoon:
			r.TooSoon++
		case t.by == "":
			r.Before = append(r.Before, late)
		case t.by == SameProvider:
			r.Own = append(r.Own, late)
		default:
			r.Other = append(r.Other, late)
		}
	}
	r.Earliest = r.All().Summary().Min
	r.Net, err = safetyNet(ctx, consumer.Provider)
	return r, err
}

// scheduleAndLeave has the timers drawn, and schedules those of the first group by a Provider that is closed
// then.
func (s stage) scheduleAndLeave(ctx context.Context, l *ledger, timers []timer, draw func()) (err error) {
	first, err := s.open(ctx, 1)
	if err != nil {
		return err
	}
	defer first.close(&err)
	draw()
	var items []pgwake.WorkEnqueue
	for i, t := range timers {
		if t.by == "" {
			items = append(items, pgwake.WorkEnqueue{WorkItem: l.item(warmUps + i), EnqueueOptions: pgwake.EnqueueOptions{At: t.due}})
		}
	}
	_, err = first.EnqueueForWorkerMany(ctx, items)
	return err
}
