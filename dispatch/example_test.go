package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
)

// openProvider opens a Provider for an example, as pgwake.Open(ctx, databaseURL, nil) does. end closes it.
func openProvider() (ctx context.Context, p *pgwake.Provider, end func()) {
	tb := &exampletb.TB{}
	return context.Background(), testschema.Core.New(tb, nil), tb.End
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

type email struct{ To string }

type receipt struct{ ID int }

func sendEmails(ctx context.Context, p *pgwake.Provider) error {
	d := dispatch.New(p, nil)
	dispatch.Handle(d, "email.send", func(ctx context.Context, in email) (receipt, error) {
		fmt.Println("to", in.To)
		return receipt{7}, nil
	})
	return d.Run(ctx) // until ctx ends
}

// A program has signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM) for ctx.
func Example() {
	ctx, p, end := openProvider()
	defer end()
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- sendEmails(ctx, p) }()

	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: json.RawMessage(`{"To":"ada"}`)}, nil)
	check(err)
	for depths := []pgwake.QueueDepth{{}}; len(depths) > 0; { // until nothing is left
		depths, err = p.GetQueueDepths(ctx)
		check(err)
	}
	stop()
	check(<-ended)
	// Output: to ada
}

// The item and the row are committed together, or neither is.
func ExampleHandleTx() {
	ctx, p, end := openProvider()
	defer end()
	pool, err := pgxpool.New(ctx, pgwaketest.URL(&exampletb.TB{}))
	check(err)
	defer pool.Close()
	_, err = pool.Exec(ctx, `CREATE TABLE example_receipts (recipient text)`)
	check(err)
	defer pool.Exec(context.WithoutCancel(ctx), `DROP TABLE example_receipts`)
	ctx, stop := context.WithCancel(ctx)

	d := dispatch.New(p, &dispatch.Config{Begin: pool.Begin, OnEnd: func(e dispatch.Ended) {
		fmt.Println(e.Item.Name, e.Outcome)
		stop()
	}})
	dispatch.HandleTx(d, "email.send", func(ctx context.Context, tx pgx.Tx, in email) (receipt, error) {
		_, err := tx.Exec(ctx, `INSERT INTO example_receipts VALUES ($1)`, in.To)
		return receipt{7}, err
	})
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: json.RawMessage(`{"To":"ada"}`)}, nil)
	check(err)
	check(d.Run(ctx))
	// Output: email.send done
}

// One statement keeps the receipt and acknowledges the item.
func ExampleAckBy() {
	ctx, p, end := openProvider()
	defer end()
	receipts, ack := pgx.Identifier{p.Schema(), "receipts"}.Sanitize(), pgx.Identifier{p.Schema(), "ack_work"}.Sanitize()
	_, err := p.Pool().Exec(ctx, "CREATE TABLE "+receipts+" (recipient text)")
	check(err)
	running, stop := context.WithCancel(ctx)

	d := dispatch.New(p, &dispatch.Config{OnEnd: func(e dispatch.Ended) {
		fmt.Println(e.Item.Name, e.Outcome)
		stop()
	}})
	dispatch.Handle(d, "email.send", func(ctx context.Context, in email) (receipt, error) {
		return receipt{}, dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
			id, claim, err := token.WorkItem()
			if err != nil {
				return err
			}
			return p.Do(ctx, "keep receipt", func(ctx context.Context, q pgwake.Querier) error {
				_, err := q.Exec(ctx, "WITH kept AS (INSERT INTO "+receipts+" VALUES ($3)) SELECT "+ack+"($1, $2)", id, claim, in.To)
				return err
			})
		})
	})
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: json.RawMessage(`{"To":"ada"}`)}, nil)
	check(err)
	check(d.Run(running))
	var kept int
	check(p.Pool().QueryRow(ctx, "SELECT count(*) FROM "+receipts).Scan(&kept))
	fmt.Println(kept, "receipt")
	// Output:
	// email.send done
	// 1 receipt
}

// What an error asks for.
func ExampleRetryAfter() {
	ctx, p, end := openProvider()
	defer end()
	ctx, stop := context.WithCancel(ctx)

	d := dispatch.New(p, &dispatch.Config{Logger: slog.New(slog.DiscardHandler), OnEnd: func(e dispatch.Ended) {
		fmt.Println(e.Outcome, e.Err, e.Delay)
		if e.Outcome == dispatch.DeadLettered {
			stop()
		}
	}})
	dispatch.Handle(d, "email.send", func(ctx context.Context, in email) (receipt, error) {
		switch dispatch.ItemFrom(ctx).Attempt {
		case 1:
			return receipt{}, dispatch.RetryAfter(errors.New("the server is busy"), 20*time.Millisecond)
		default:
			return receipt{}, dispatch.Permanent(errors.New("no such mailbox"))
		}
	})
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: json.RawMessage(`{"To":"ada"}`)}, nil)
	check(err)
	check(d.Run(ctx))
	// Output:
	// retried the server is busy 20ms
	// dead-lettered no such mailbox 0s
}

func ExampleDispatcher_HandleBatch() {
	ctx, p, end := openProvider()
	defer end()
	ctx, stop := context.WithCancel(ctx)
	for n := range 3 {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "sample", Input: fmt.Append(nil, n)}, nil)
		check(err)
	}

	d := dispatch.New(p, &dispatch.Config{Concurrency: 1})
	d.HandleBatch("sample", 100, func(_ context.Context, items []*pgwake.ClaimedWorkItem) error {
		fmt.Println(len(items), "at once")
		stop()
		return nil
	})
	check(d.Run(ctx))
	// Output: 3 at once
}

// Middleware is around every handler of single items.
func ExampleMiddleware() {
	ctx, p, end := openProvider()
	defer end()
	ctx, stop := context.WithCancel(ctx)

	audited := func(next dispatch.Handler) dispatch.Handler {
		return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			defer fmt.Println("audited", item.Name)
			return next(ctx, item)
		}
	}
	d := dispatch.New(p, &dispatch.Config{Middleware: []dispatch.Middleware{audited}})
	dispatch.Handle(d, "email.send", func(ctx context.Context, in email) (receipt, error) {
		fmt.Println("to", in.To)
		stop()
		return receipt{7}, nil
	})
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: json.RawMessage(`{"To":"ada"}`)}, nil)
	check(err)
	check(d.Run(ctx))
	// Output:
	// to ada
	// audited email.send
}

// A runtime in a few lines: an instance that counts its messages to three.
func ExampleOrchestrator() {
	ctx, p, end := openProvider()
	defer end()
	running, stop := context.WithCancel(ctx)

	o := dispatch.NewOrchestrator(p, func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
		for i, m := range turn.Messages {
			ack.History = append(ack.History, pgwake.Event{ID: turn.LastEventID + int64(i) + 1, Type: string(m.Kind), Data: m.Data})
		}
		if len(turn.History)+len(turn.Messages) == 3 {
			ack.Metadata.Status, ack.Metadata.Output = pgwake.StatusCompleted, "three"
		}
		return ack, nil
	}, nil)
	ended := make(chan error)
	go func() { ended <- o.Run(running) }()
	for _, m := range []pgwake.Message{
		{Instance: "i", Kind: pgwake.MessageStart, Name: "count"}, {Instance: "i", Kind: "event"}, {Instance: "i", Kind: "event"},
	} {
		_, err := p.EnqueueForOrchestrator(ctx, m, nil)
		check(err)
	}
	outcome, err := p.WaitForInstance(ctx, "i")
	check(err)
	fmt.Println(outcome.Status, outcome.Output)
	stop()
	check(<-ended)
	// Output: Completed three
}
