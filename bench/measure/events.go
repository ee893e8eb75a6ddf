package measure

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"golang.org/x/sync/errgroup"
)

// This file answers: how soon, and how fast, are events handled, beside work items on the same Provider?

// EventsOptions are the sizes of Events.
type EventsOptions struct {
	Singles     int           // events, and items, that come one at a time. Defaults to 500.
	Gap         time.Duration // mean time from the end of one to the next. Defaults to 20 ms.
	Backlog     int           // events, and items, that are there before anybody handles them. Defaults to 20,000.
	Dispatchers int           // that wait, or handle at a time. Defaults to 8.
	Progress    func(Progress)
}

// EventsResult is what Events found.
type EventsResult struct {
	// Of those that come one at a time, in turns: items by FetchWorkItem, as Singles has them, and events until their handler is called, one
	// with a transaction or one without. All by another Provider.
	Items Latency   `json:"items"`
	Tx    Latency   `json:"tx"`
	Plain Latency   `json:"plain"`
	Again int       `json:"again"` // deliveries beyond the first
	Net   SafetyNet `json:"safety_net"`

	// Of a backlog, by as many handlers that do nothing, each done durably: events with a transaction each; items by the verbs of the Provider,
	// one by one; items by dispatch.HandleTx, with a transaction each; and by dispatch.Handle, whose acks share commits.
	Drain        *DrainResult `json:"drain"`
	ItemsDrain   *DrainResult `json:"items_drain"`
	ItemsTxDrain *DrainResult `json:"items_tx_drain"`
	SharedDrain  *DrainResult `json:"shared_drain"`
}

// RateRatio is the throughput of events over that of items.
func (r *EventsResult) RateRatio() float64 { return r.Drain.PerSecond() / r.ItemsDrain.PerSecond() }

// Events measures them beside each other.
func Events(ctx context.Context, url string, o EventsOptions) (r *EventsResult, err error) {
	orDefault(&o.Singles, 500)
	orDefault(&o.Gap, 20*time.Millisecond)
	orDefault(&o.Backlog, 20_000)
	orDefault(&o.Dispatchers, 8)
	defer func(ctx context.Context) { err = about(ctx, "events", err) }(ctx)
	r = &EventsResult{}
	if err := r.singles(ctx, url, &o); err != nil {
		return nil, err
	}
	if r.Drain, err = o.drain(ctx, url, "events, with a transaction", eventBacklog); err != nil {
		return nil, err
	}
	items := DrainOptions{Items: o.Backlog, Dispatchers: o.Dispatchers, Way: OneByOne, Progress: o.Progress}
	if r.ItemsDrain, err = Drain(ctx, url, items); err != nil {
		return nil, err
	}
	if r.ItemsTxDrain, err = o.drain(ctx, url, "items, with a transaction", txItemBacklog); err != nil {
		return nil, err
	}
	items.Way = ByDispatcher
	r.SharedDrain, err = Drain(ctx, url, items)
	return r, err
}

// eventNodeConnections suffice for handlers of events that have one each.
const eventNodeConnections = 16

// measured is the type of all events, and the name of all items.
const measured = "measure"

// openBus opens a Provider with a Bus.
func (s stage) openBus(ctx context.Context, connections int) (*node, *eventbus.Bus, error) {
	n, err := s.openPooled(ctx, connections, pgwake.Config{})
	if err != nil {
		return nil, nil, err
	}
	bus, err := eventbus.New(ctx, n.Provider, nil)
	if err != nil {
		n.close(&err)
		return nil, nil, err
	}
	return n, bus, nil
}

// castEvents is cast for events, which are handled with a transaction or without.
func (s stage) castEvents(ctx context.Context, transactional bool, dispatchers int, l *ledger) (_ *cast, err error) {
	n, bus, err := s.openBus(ctx, eventNodeConnections)
	if err != nil {
		return nil, err
	}
	other, emitting, err := s.openBus(ctx, connectionsFor(1))
	if err != nil {
		n.close(&err)
		return nil, err
	}
	c := &cast{ctx: n.ctx, exit: n.close}
	c.producer = &producer{close: other.close, enqueue: func(ctx context.Context, n int, _ time.Time) error {
		_, err := emitting.Emit(ctx, measured, number(n), nil)
		return err
	}}
	c.net = func(ctx context.Context) (SafetyNet, error) { return safetyNet(ctx, n.Provider) }
	take := func(payload json.RawMessage) error {
		inHand := time.Now()
		number, err := strconv.Atoi(string(payload))
		if err == nil {
			l.arrive(number, inHand)
		}
		return err
	}
	worker, err := bus.Node(ctx, &eventbus.NodeConfig{Concurrency: dispatchers})
	if err == nil && transactional {
		err = worker.On(ctx, measured, func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error { return take(e.Payload) })
	} else if err == nil {
		err = worker.OnPlain(ctx, measured, func(_ context.Context, e *eventbus.Event) error { return take(e.Payload) })
	}
	if err == nil {
		err = worker.Start(ctx)
	}
	if err != nil {
		c.leave(&err)
		return nil, err
	}
	c.exit = func(err *error) {
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		*err = errors.Join(*err, worker.Stop(ctx))
		n.close(err)
	}
	return c, nil
}

// singles has items and events come in turns, each on a stage of its own.
func (r *EventsResult) singles(ctx context.Context, url string, o *EventsOptions) (err error) {
	of := []*Latency{&r.Items, &r.Tx, &r.Plain}
	casts, ledgers := make([]*cast, len(of)), make([]*ledger, len(of))
	for i := range of {
		s := newStage(url)
		defer s.drop(&err)
		l := newLedger(warmUps + o.Singles)
		var c *cast
		if i == 0 {
			c, err = s.cast(ctx, nil, OtherProvider, o.Dispatchers, l)
		} else {
			c, err = s.castEvents(ctx, i == 1, o.Dispatchers, l)
		}
		if err != nil {
			return err
		}
		defer c.leave(&err)
		if err := c.warmUp(c.ctx, l, ignore); err != nil {
			return err
		}
		casts[i], ledgers[i] = c, l
	}
	m := newMeter(o.Progress)
	for n := warmUps; n < warmUps+o.Singles; n++ {
		for i, c := range casts {
			if err := pause(c.ctx, Uniform.draw(o.Gap)); err != nil {
				return err
			}
			if err := c.now(c.ctx, ledgers[i], n); err != nil {
				return err
			}
			if err := ledgers[i].wait(c.ctx, 1, ignore); err != nil {
				return err
			}
			of[i].add(ledgers[i].line(n))
		}
		if done := n - warmUps + 1; m.due() || done == o.Singles {
			m.report(Progress{Done: done, Total: o.Singles, Figures: r.Tx.FromCommit.Summary()})
		}
	}
	for i, c := range casts {
		r.Again += ledgers[i].redelivered()
		net, err := c.net(ctx)
		if err != nil {
			return err
		}
		r.Net = r.Net.Plus(net)
	}
	return nil
}

// backlog is something to be done: it begins to do it, tells of each that was handled, and ends when its context has ended and what was handled
// is done.
type backlog func(ctx context.Context, handled func()) error

// drain has a backlog done. Its time is that from the start to the end of all acknowledgements.
func (o *EventsOptions) drain(ctx context.Context, url, who string, of func(context.Context, stage, *EventsOptions, *node) (backlog, error)) (r *DrainResult, err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.openPooled(ctx, eventNodeConnections, pgwake.Config{})
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := n.connectAll(eventNodeConnections); err != nil {
		return nil, err
	}
	b, err := of(ctx, s, o, n)
	if err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	t := newTally(o.Backlog)
	group, running := errgroup.WithContext(n.ctx)
	running, stop := context.WithCancel(running)
	defer stop()
	group.Go(func() error { return b(running, func() { t.add(1) }) })
	waited := t.wait(running, 0, o.Progress)
	stop()
	if err := errors.Join(waited, group.Wait()); err != nil {
		return nil, err
	}
	drained := t.result(who, "defaults", &DrainOptions{Items: o.Backlog, Dispatchers: o.Dispatchers})
	drained.Took = time.Since(t.began)
	var left int
	if err := s.one(ctx, &left, `SELECT count(*) FROM worker_queue`); err != nil {
		return nil, err
	}
	drained.Done -= left
	return drained, nil
}

func eventBacklog(ctx context.Context, _ stage, o *EventsOptions, n *node) (backlog, error) {
	bus, err := eventbus.New(ctx, n.Provider, nil)
	if err != nil {
		return nil, err
	}
	worker, err := bus.Node(ctx, &eventbus.NodeConfig{Concurrency: o.Dispatchers})
	if err != nil {
		return nil, err
	}
	handled := func() {}
	err = worker.On(ctx, measured, func(context.Context, *eventbus.Event, pgx.Tx) error {
		handled()
		return nil
	})
	const chunk = 1000
	for first := 0; err == nil && first < o.Backlog; first += chunk {
		events := make([]eventbus.Emission, min(chunk, o.Backlog-first))
		for i := range events {
			events[i] = eventbus.Emission{Type: measured, Payload: number(first + i)}
		}
		_, err = bus.EmitMany(ctx, events)
	}
	return func(ctx context.Context, each func()) error {
		handled = each
		if err := worker.Start(ctx); err != nil {
			return err
		}
		<-ctx.Done()
		stopping, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		return worker.Stop(stopping)
	}, err
}

func txItemBacklog(ctx context.Context, s stage, o *EventsOptions, n *node) (backlog, error) {
	return func(ctx context.Context, handled func()) error {
		d := dispatch.New(n.Provider, &dispatch.Config{Concurrency: o.Dispatchers, Begin: n.Pool().Begin})
		dispatch.HandleTx(d, measured, func(context.Context, pgx.Tx, json.RawMessage) (json.RawMessage, error) {
			handled()
			return nil, nil
		})
		return d.Run(ctx)
	}, s.fillWork(ctx, 0, o.Backlog, 0, false)
}
