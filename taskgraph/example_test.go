package taskgraph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/taskgraph"
)

// The examples run against the tests' server, each on an empty schema. Where they call check you return the error.

// openProvider opens a Provider for an example, as pgwake.Open(ctx, databaseURL, nil) does. end closes it.
func openProvider() (ctx context.Context, p *pgwake.Provider, end func()) {
	tb := &exampletb.TB{}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p = schemas.New(tb, nil)
	return ctx, p, func() {
		cancel()
		tb.End()
	}
}

// openEngine also makes an Engine with the handler "print", which has the name of its step for a result.
func openEngine() (context.Context, *pgwake.Provider, *taskgraph.Engine, func()) {
	ctx, p, end := openProvider()
	e, err := taskgraph.New(ctx, p, &taskgraph.Config{Logger: slog.New(slog.DiscardHandler)})
	check(err)
	e.Handle("print", func(_ context.Context, s *taskgraph.Step) (any, error) {
		fmt.Println(s.Name)
		return s.Name, nil
	})
	return ctx, p, e, end
}

// inBackground has an Engine run until stop is called. A program has signal.NotifyContext for the context, and Run in the foreground.
func inBackground(e *taskgraph.Engine) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	return func() {
		cancel()
		check(<-ended)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

type purchase struct {
	ID    int `json:"id"`
	Cents int `json:"cents"`
}

// newShop makes the Engine of a shop, which every process has that is to take part.
func newShop(ctx context.Context, p *pgwake.Provider) (*taskgraph.Engine, error) {
	e, err := taskgraph.New(ctx, p, nil) // its tables are in the schema of the Provider
	if err != nil {
		return nil, err
	}
	e.Handle("order.check", func(_ context.Context, s *taskgraph.Step) (any, error) {
		var o purchase
		if err := s.DecodeContext(&o); err != nil {
			return nil, err
		}
		if o.Cents <= 0 {
			return nil, taskgraph.Permanent(errors.New("there is nothing to pay")) // no further attempt would help
		}
		return o.Cents, nil
	})
	e.Handle("stock.reserve", func(context.Context, *taskgraph.Step) (any, error) { return "shelf 3", nil })
	e.Handle("card.charge", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var cents int
		err := s.Result(ctx, "check", &cents) // of a step before
		return fmt.Sprintf("%d cents", cents), err
	})
	e.Handle("parcel.ship", func(context.Context, *taskgraph.Step) (any, error) { return "on its way", nil })

	err = e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").
		Step("check", "order.check").
		Step("reserve", "stock.reserve", taskgraph.After("check")).
		Step("charge", "card.charge", taskgraph.After("check"), taskgraph.MaxAttempts(5)).
		Step("ship", "parcel.ship", taskgraph.After("reserve", "charge")))
	return e, err
}

// fulfil submits a task and waits for its end.
func fulfil(ctx context.Context, e *taskgraph.Engine, p purchase) (*taskgraph.Task, error) {
	task, err := e.Submit(ctx, taskgraph.Submission{
		Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Context: p})
	if err != nil {
		return nil, err
	}
	return e.Wait(ctx, task.ID) // pushed: it costs no query while it waits
}

// A first program: two steps run side by side, and the last one when both are done.
func Example() {
	ctx, p, end := openProvider()
	defer end()
	e, err := newShop(ctx, p)
	check(err)
	defer inBackground(e)() // e.Run(ctx)

	done, err := fulfil(ctx, e, purchase{ID: 7, Cents: 1250})
	check(err)
	fmt.Println(done.State)

	steps, err := e.Steps(ctx, done.ID)
	check(err)
	for _, s := range steps {
		fmt.Printf("%s: %s\n", s.Name, s.Results)
	}
	// Output:
	// complete
	// check: 1250
	// reserve: "shelf 3"
	// charge: "1250 cents"
	// ship: "on its way"
}

// Definitions from YAML. A step whose condition does not hold is skipped, and what comes after it goes on.
func ExampleParseDefinitions() {
	ctx, _, e, end := openEngine()
	defer end()

	definitions, err := taskgraph.ParseDefinitions([]byte(`
namespace: shop
name: fulfil_order
version: 1.0.0
steps:
  - name: pack
    handler: print
  - name: gift note
    handler: print
    after:
      - step: pack
        if: $ == "a gift"
  - name: ship
    handler: print
    after: [gift note]
    max_attempts: 5
    retry_every: 30s
`))
	check(err)
	check(e.Register(ctx, definitions...))
	defer inBackground(e)()

	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0"})
	check(err)
	done, err := e.Wait(ctx, task.ID)
	check(err)
	fmt.Println(done.State, done.CompletedSteps)
	// Output:
	// pack
	// ship
	// complete 3
}

// The task is created with the order, or neither is; and however often the form is sent, there is one.
func ExampleGraph_WithTx() {
	ctx, p, e, end := openEngine()
	defer end()
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").Step("pack", "print")))

	place := func(o purchase, pay func() error) error {
		return pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
			// INSERT INTO orders ... ON CONFLICT DO NOTHING
			task, err := e.WithTx(tx).Submit(ctx, taskgraph.Submission{
				Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Context: o,
				IdempotencyKey: fmt.Sprintf("order %d", o.ID),
			})
			if err != nil {
				return err
			}
			fmt.Println("duplicate:", task.Duplicate)
			return pay()
		})
	}
	for _, outcome := range []error{errors.New("the bank is closed"), nil, nil} {
		fmt.Println(place(purchase{ID: 7}, func() error { return outcome }))
	}
	tasks, err := e.ListTasks(ctx, nil)
	check(err)
	fmt.Println("tasks:", len(tasks))
	// Output:
	// duplicate: false
	// the bank is closed
	// duplicate: false
	// <nil>
	// duplicate: true
	// <nil>
	// tasks: 1
}

// A step has failed for good. Somebody finds out what its result is to be, and the task goes on.
func ExampleGraph_CompleteStep() {
	ctx, _, e, end := openEngine()
	defer end()
	e.Handle("carrier.label", func(context.Context, *taskgraph.Step) (any, error) {
		return nil, taskgraph.Permanent(errors.New("the address has no house number"))
	})
	check(e.Register(ctx, taskgraph.Define("shop", "ship_order", "1.0.0").
		Step("label", "carrier.label").Step("ship", "print", taskgraph.After("label"))))
	defer inBackground(e)()
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "ship_order", Version: "1.0.0"})
	check(err)

	for progress, err := range e.Watch(ctx, task.ID) {
		check(err)
		if progress.State != taskgraph.TaskBlockedByFailures {
			continue
		}
		steps, err := e.Steps(ctx, task.ID)
		check(err)
		for _, s := range steps {
			if s.State == taskgraph.StepError {
				fmt.Printf("%s: %s\n", s.Name, s.Err())
				_, err := e.CompleteStep(ctx, s.ID, "Main Street 7", "asked the customer") // or ResetStep, or ResolveStep
				check(err)
			}
		}
	}
	done, err := e.Wait(ctx, task.ID)
	check(err)
	fmt.Println(done.State)
	// Output:
	// label: the address has no house number
	// ship
	// complete
}

// A decision point: how many parcels there are is known only when the order is split, so that step adds one for each.
func ExampleDecision() {
	ctx, _, e, end := openEngine()
	defer end()
	e.Handle("order.split", func(_ context.Context, s *taskgraph.Step) (any, error) {
		var items []string
		if err := s.DecodeContext(&items); err != nil {
			return nil, err
		}
		d := taskgraph.Decision{Result: len(items)}
		for i, item := range items {
			d.Steps = append(d.Steps, taskgraph.AddedStep{Name: fmt.Sprintf("pack-%d", i+1), Template: "pack",
				Inputs: item, After: []string{"split"}, Before: []string{"ship"}})
		}
		return d, nil
	})
	e.Handle("parcel.pack", func(_ context.Context, s *taskgraph.Step) (any, error) {
		var item string
		err := s.DecodeInputs(&item)
		return "a box with " + item, err
	})
	e.Handle("parcels.ship", func(ctx context.Context, s *taskgraph.Step) (any, error) { return s.Results(ctx) })
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").
		Step("split", "order.split").
		Template("pack", "parcel.pack").
		Step("ship", "parcels.ship", taskgraph.After("split"))))
	defer inBackground(e)()

	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Context: []string{"a kettle", "tea"}})
	check(err)
	_, err = e.Wait(ctx, task.ID)
	check(err)
	steps, err := e.Steps(ctx, task.ID)
	check(err)
	for _, s := range steps {
		if s.Name == "ship" {
			var shipped map[string]any
			check(json.Unmarshal(s.Results, &shipped))
			fmt.Println(shipped)
		}
	}
	// Output: map[pack-1:a box with a kettle pack-2:a box with tea split:2]
}

// Everything that happens, each transition once, in an order that never changes: for an audit, or for a table of one's own. The cursor is kept
// with what was made of the transitions, in the same transaction.
func ExampleGraph_ReadTransitions() {
	ctx, _, e, end := openEngine()
	defer end()
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").Step("pack", "print")))
	stop := inBackground(e)
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0"})
	check(err)
	_, err = e.Wait(ctx, task.ID)
	check(err)
	stop()

	var kept string // of a process that went down
	follow := func() (ended bool) {
		var cursor taskgraph.Cursor // the beginning
		if kept != "" {
			cursor, err = taskgraph.ParseCursor(kept)
			check(err)
		}
		transitions, err := e.ReadTransitions(ctx, cursor, 4)
		check(err)
		for _, t := range transitions {
			kept = t.Cursor().String()
			if t.StepName != nil {
				fmt.Println(*t.StepName, t.ToState)
			}
			ended = ended || t.StepName == nil && taskgraph.TaskState(t.ToState).IsTerminal()
		}
		return ended
	}
	every := time.NewTicker(10 * time.Millisecond) // or when a channel says so
	defer every.Stop()
	for !follow() {
		<-every.C
	}
	// Output:
	// pack
	// pack pending
	// pack enqueued
	// pack in_progress
	// pack enqueued_for_orchestration
	// pack complete
}

// What was the matter when the card was charged?
func ExampleGraph_TaskAsOf() {
	ctx, _, e, end := openEngine()
	defer end()
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").
		Step("charge", "print").Step("pack", "print", taskgraph.After("charge")).Step("ship", "print", taskgraph.After("pack"))))
	defer inBackground(e)()
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0"})
	check(err)
	_, err = e.Wait(ctx, task.ID)
	check(err)

	transitions, err := e.AllTransitions(ctx, task.ID)
	check(err)
	for _, t := range transitions {
		if t.StepName == nil || *t.StepName != "pack" || t.ToState != string(taskgraph.StepInProgress) {
			continue
		}
		then, err := e.TaskAsOf(ctx, task.ID, t.CreatedAt)
		check(err)
		fmt.Println(then.Name, then.State)
		for _, s := range then.Steps {
			fmt.Println(s.Name, s.State)
		}
	}
	// Output:
	// charge
	// pack
	// ship
	// fulfil_order steps_in_process
	// charge complete
	// pack in_progress
	// ship pending
}

// Whoever waits may be in another process than those who work. One who gives up waiting changes nothing about the task.
func ExampleEngine_Wait() {
	ctx, p, e, end := openEngine()
	defer end()
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").Step("pack", "print")))
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0"})
	check(err)

	other, err := taskgraph.New(ctx, p, nil) // has no handlers, and does not run
	check(err)
	brief, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	_, err = other.Wait(brief, task.ID)
	fmt.Println("not yet:", errors.Is(err, context.DeadlineExceeded))

	defer inBackground(e)()
	done, err := other.Wait(ctx, task.ID)
	check(err)
	fmt.Println(done.State)
	// Output:
	// not yet: true
	// pack
	// complete
}

// How far a task has got, pushed. What changes in quick succession is told once.
func ExampleEngine_Watch() {
	ctx, _, e, end := openEngine()
	defer end()
	check(e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").Step("pack", "print").Step("ship", "print", taskgraph.After("pack"))))
	defer inBackground(e)()
	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0"})
	check(err)

	var last taskgraph.Progress
	for progress, err := range e.Watch(ctx, task.ID) {
		check(err)
		last = progress
	}
	fmt.Printf("%s, %d of %d steps\n", last.State, last.Completed, last.Total)
	// Output:
	// pack
	// ship
	// complete, 2 of 2 steps
}
