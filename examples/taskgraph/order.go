package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what is an order made of, and what do its steps do?

const namespace, name, version = "shop", "fulfil_order", "1.0.0"

// definition is the graph of an order:
//
//	validate ─┬─ reserve ─┬─ plan ─┬─ pack-1 ─┬─ label ── ship ── notify
//	          └─ charge  ─┘        ├─ pack-2 ─┤
//	          └─ gift note ────────┴─ pack-3 ─┘
//
// How many parcels there are is decided while it runs: plan adds a step for each.
func definition() *taskgraph.Definition {
	return taskgraph.Define(namespace, name, version).
		Step("validate", "order.validate").
		Step("reserve", "stock.reserve", taskgraph.After("validate")).
		Step("charge", "card.charge", taskgraph.After("validate"), taskgraph.MaxAttempts(5)).
		Step("gift note", "print.note", taskgraph.AfterIf("validate", `$.gift == true`)).
		Step("plan", "parcels.plan", taskgraph.After("reserve", "charge")).
		Step("label", "carrier.label", taskgraph.After("plan", "gift note")).
		Step("ship", "carrier.ship", taskgraph.After("label")).
		Step("notify", "mail.send", taskgraph.After("ship"), taskgraph.Timeout(10*time.Second)).
		Template("pack", "parcels.pack", taskgraph.Describe("a parcel; as many as plan says"))
}

// order is what a task is about.
type order struct {
	ID    int      `json:"id"`
	Items []string `json:"items"`
	Gift  bool     `json:"gift"`
}

var (
	errNoAnswer = errors.New("the bank does not answer")
	errAddress  = errors.New("the address has no house number")
)

// handlers registers what runs the steps. Each takes a moment, so that there is something to see.
func handlers(e *taskgraph.Engine, moment time.Duration) {
	handle := func(name string, fn func(ctx context.Context, s *taskgraph.Step, o order) (any, error)) {
		e.Handle(name, func(ctx context.Context, s *taskgraph.Step) (any, error) {
			var o order
			if err := s.DecodeContext(&o); err != nil {
				return nil, err
			}
			select {
			case <-time.After(moment):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			return fn(ctx, s, o)
		})
	}
	handle("order.validate", func(_ context.Context, _ *taskgraph.Step, o order) (any, error) {
		return map[string]any{"items": len(o.Items), "gift": o.Gift}, nil
	})
	handle("stock.reserve", func(_ context.Context, _ *taskgraph.Step, o order) (any, error) { return o.Items, nil })
	handle("card.charge", func(_ context.Context, s *taskgraph.Step, _ order) (any, error) {
		if s.Attempt < 3 {
			return nil, errNoAnswer // tried again, after a backoff
		}
		return map[string]any{"receipt": 4711}, nil
	})
	handle("print.note", func(context.Context, *taskgraph.Step, order) (any, error) { return nil, nil })
	handle("parcels.plan", func(_ context.Context, _ *taskgraph.Step, o order) (any, error) {
		d := taskgraph.Decision{Result: map[string]int{"parcels": len(o.Items)}}
		for i, item := range o.Items {
			d.Steps = append(d.Steps, taskgraph.AddedStep{
				Name: fmt.Sprintf("pack-%d", i+1), Template: "pack", Inputs: item, After: []string{"plan"}, Before: []string{"label"}})
		}
		return d, nil
	})
	handle("parcels.pack", func(_ context.Context, s *taskgraph.Step, _ order) (any, error) {
		var item string
		err := s.DecodeInputs(&item)
		return "a box with " + item, err
	})
	handle("carrier.label", func(context.Context, *taskgraph.Step, order) (any, error) {
		return nil, taskgraph.Permanent(errAddress) // no further attempt would help
	})
	handle("carrier.ship", func(ctx context.Context, s *taskgraph.Step, _ order) (any, error) {
		var label string
		if err := s.Result(ctx, "label", &label); err != nil {
			return nil, err
		}
		return map[string]string{"shipped to": label}, nil
	})
	handle("mail.send", func(ctx context.Context, s *taskgraph.Step, o order) (any, error) {
		var receipt struct{ Receipt int }
		if err := s.Result(ctx, "charge", &receipt); err != nil {
			return nil, err
		}
		return fmt.Sprintf("order %d, receipt %d", o.ID, receipt.Receipt), nil
	})
}
