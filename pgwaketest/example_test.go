package pgwaketest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
)

// Each example is the body of a test; t is its *testing.T.

var t *testing.T

func TestExamples_AsTests_Pass(test *testing.T) {
	for name, example := range map[string]func(){
		"package": Example, "New": ExampleNew, "Open": ExampleOpen, "RequireWork": ExampleRequireWork, "RequireNoWork": ExampleRequireNoWork,
		"RequireMessage": ExampleRequireMessage, "RequireNoMessage": ExampleRequireNoMessage, "Advance": ExampleAdvance,
		"Drain": ExampleDrain, "DrainTurns": ExampleDrainTurns,
	} {
		test.Run(name, func(test *testing.T) {
			t = test
			defer func() { t = nil }()
			example()
		})
	}
}

// remind is the code under test: it asks for a rating, a day after the order.
func remind(ctx context.Context, p *pgwake.Provider, order int) error {
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "remind", Input: fmt.Appendf(nil, `{"order":%d}`, order)},
		&pgwake.EnqueueOptions{Delay: 24 * time.Hour})
	return err
}

// A test from the first line to the last.
func Example() {
	p := pgwaketest.New(t, nil)
	if err := remind(t.Context(), p, 7); err != nil {
		t.Fatal(err)
	}
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "remind", Input: []byte(`{"order": 7}`)}, 1)

	var sent int
	send := func(ctx context.Context, item *pgwake.ClaimedWorkItem) error { sent++; return nil }
	pgwaketest.Drain(t, p, send, nil)
	if sent != 0 {
		t.Error("the reminder came too early")
	}
	pgwaketest.Advance(t, p, 24*time.Hour)
	pgwaketest.Drain(t, p, send, nil)
	if sent != 1 {
		t.Error("the reminder did not come")
	}
	pgwaketest.RequireNoWork(t, p)
}

// A fresh schema, closed and dropped when the test ends.
func ExampleNew() {
	p := pgwaketest.New(t, nil)
	if err := remind(t.Context(), p, 7); err != nil {
		t.Fatal(err)
	}
}

// Two nodes of one deployment.
func ExampleOpen() {
	config := &pgwake.Config{Schema: "two_nodes"}
	a := pgwaketest.New(t, config)
	b := pgwaketest.Open(t, config)
	if err := remind(t.Context(), a, 7); err != nil {
		t.Fatal(err)
	}
	pgwaketest.RequireWork(t, b, pgwake.WorkItem{Name: "remind"}, 1)
}

// The items come back for a closer look.
func ExampleRequireWork() {
	p := pgwaketest.New(t, nil)
	if err := remind(t.Context(), p, 7); err != nil {
		t.Fatal(err)
	}
	queued := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "remind", Input: []byte(`{"order": 7}`)}, 1)
	if delay := queued[0].DueAt.Sub(queued[0].EnqueuedAt).Round(time.Hour); delay != 24*time.Hour {
		t.Errorf("the reminder comes after %v", delay)
	}
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "refund"}, 0)
}

func ExampleRequireNoWork() {
	p := pgwaketest.New(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := remind(ctx, p, 7); err == nil {
		t.Error("there is no time for a reminder")
	}
	pgwaketest.RequireNoWork(t, p)
}

func ExampleRequireMessage() {
	p := pgwaketest.New(t, nil)
	_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "order-7", Kind: "paid", Data: []byte(`{"cents":4200}`)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	pgwaketest.RequireMessage(t, p, pgwake.Message{Instance: "order-7", Data: []byte(`{"cents": 4200}`)}, 1)
}

func ExampleRequireNoMessage() {
	p := pgwaketest.New(t, nil)
	if err := remind(t.Context(), p, 7); err != nil {
		t.Fatal(err)
	}
	pgwaketest.RequireNoMessage(t, p)
}

// A worker that was killed: its item comes back when the lease ends.
func ExampleAdvance() {
	p := pgwaketest.New(t, nil)
	if err := remind(t.Context(), p, 7); err != nil {
		t.Fatal(err)
	}
	pgwaketest.Advance(t, p, 24*time.Hour)
	if _, err := p.FetchWorkItem(t.Context(), nil); err != nil { // and never acknowledged
		t.Fatal(err)
	}
	pgwaketest.Advance(t, p, pgwake.DefaultLockTimeout)
	item, err := p.FetchWorkItem(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if item.Attempt != 2 {
		t.Errorf("attempt %d", item.Attempt)
	}
}

// A handler that fails once is called again.
func ExampleDrain() {
	p := pgwaketest.New(t, nil)
	if _, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "charge"}, nil); err != nil {
		t.Fatal(err)
	}
	handled := pgwaketest.Drain(t, p, func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		if item.Attempt == 1 {
			return errors.New("the bank is away")
		}
		return nil
	}, nil)
	if handled != 1 {
		t.Errorf("%d were handled", handled)
	}
}

// Turns and the work that they schedule, until both queues have nothing due.
func ExampleDrainTurns() {
	p := pgwaketest.New(t, nil)
	_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "order"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	decide := func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "order"}}
		for _, m := range turn.Messages {
			switch m.Kind {
			case pgwake.MessageStart:
				ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "ship", Instance: turn.Instance}})
			case "shipped":
				ack.Metadata.Status = pgwake.StatusCompleted
			}
		}
		return ack, nil
	}
	work := func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
		return p.AckWorkItem(ctx, item.LockToken, &pgwake.Message{Instance: item.Instance, Kind: "shipped"})
	}
	for pgwaketest.DrainTurns(t, p, decide, nil)+pgwaketest.Drain(t, p, work, nil) > 0 {
	}
	if info, err := p.GetInstanceInfo(t.Context(), "order-7"); err != nil || info.Status != pgwake.StatusCompleted {
		t.Errorf("%+v, %v", info, err)
	}
}
