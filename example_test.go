package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
)

// The examples run against the tests' server. In yours, databaseURL is os.Getenv("DATABASE_URL"), and
// config is nil or whatever you like.

// noTest lets an example, which has no *testing.T, ask for the tests' server.
type noTest struct{ testing.TB }

func (noTest) Helper()                           {}
func (noTest) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }

var examples atomic.Int64

// forExample returns the server's URL and a Config with a schema of the example's own, and a function that
// drops that.
func forExample() (databaseURL string, config *pgwake.Config, drop func()) {
	databaseURL = testdb.URL(noTest{})
	schema := fmt.Sprintf("example_%d_%d", time.Now().UnixNano(), examples.Add(1))
	return databaseURL, &pgwake.Config{Schema: schema}, func() {
		ctx := context.Background()
		conn, err := pgx.Connect(ctx, databaseURL)
		if err != nil {
			log.Fatal(err)
		}
		defer conn.Close(ctx)
		if _, err := conn.Exec(ctx, `DROP SCHEMA `+schema+` CASCADE`); err != nil {
			log.Fatal(err)
		}
	}
}

// The first program: enqueue, fetch, work, ack.
func Example() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()

	run := func() error {
		p, err := pgwake.Open(ctx, databaseURL, config) // migrates, listens
		if err != nil {
			return err
		}
		defer p.Close(context.WithoutCancel(ctx))

		_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
		if err != nil {
			return err
		}

		for {
			item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: 30 * time.Second, PollTimeout: time.Minute})
			if errors.Is(err, pgwake.ErrNoWork) {
				continue // the poll timeout passed; nothing was due
			}
			if err != nil {
				return err
			}
			fmt.Printf("%s %s\n", item.Name, item.Input) // ... do the work ...
			if err := p.AckWorkItem(ctx, item.LockToken, nil); err != nil {
				return err
			}
			return nil // an example has to end
		}
	}
	if err := run(); err != nil {
		fmt.Println(err)
	}
	// Output: email.send {"to":"ada"}
}

// On a pool of your own, which stays yours.
func ExampleNew() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()

	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, config)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("healthy:", p.Health().OK)
	fmt.Println("close:", p.Close(ctx))
	fmt.Println("the pool still answers:", pool.Ping(ctx) == nil)
	// Output:
	// healthy: true
	// close: <nil>
	// the pool still answers: true
}

// The item exists if and only if the order does.
func ExampleProvider_EnqueueForWorkerTx() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)

	placeOrder := func(id int, pay func() error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// INSERT INTO orders ...
			_, err := p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: fmt.Sprint("ship order ", id)}, nil)
			if err != nil {
				return err
			}
			return pay() // an error rolls everything back
		})
	}
	fmt.Println(placeOrder(1, func() error { return errors.New("card declined") }))
	fmt.Println(placeOrder(2, func() error { return nil }))

	item, err := p.FetchWorkItem(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(item.Name)
	// Output:
	// card declined
	// <nil>
	// ship order 2
}

// The ack commits together with what the handler wrote: its effect happens exactly once.
func ExampleProvider_AckWorkItemTx() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	p, err := pgwake.New(ctx, pool, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)
	if _, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "book"}, nil); err != nil {
		log.Fatal(err)
	}

	item, err := p.FetchWorkItem(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// INSERT INTO ledger ...
		return p.AckWorkItemTx(ctx, tx, item.LockToken, nil)
	})
	fmt.Println("booked:", err)

	// Whoever comes late with the same claim can do nothing.
	err = p.AckWorkItem(ctx, item.LockToken, nil)
	fmt.Println("lock lost:", errors.Is(err, pgwake.ErrLockLost))
	// Output:
	// booked: <nil>
	// lock lost: true
}

// One turn of an orchestration: read what happened, decide, acknowledge. The runtime that does this is
// yours; events and messages mean to the queue nothing but their ids.
func ExampleProvider_FetchOrchestrationItem() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)

	// Somebody starts the orchestration.
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{
		Instance: "order-7", Kind: pgwake.MessageStart, Name: "fulfil", Version: "1.0.0", Data: json.RawMessage(`{"sku":42}`),
	}, nil)
	if err != nil {
		log.Fatal(err)
	}

	turn := func() {
		item, err := p.FetchOrchestrationItem(ctx, nil)
		if err != nil {
			log.Fatal(err)
		}
		ack := pgwake.OrchestrationAck{ExecutionID: item.ExecutionID, Metadata: pgwake.Metadata{Name: item.Name, Version: item.Version}}
		next := int64(len(item.History)) + 1
		for _, m := range item.Messages {
			fmt.Printf("%s: %s\n", item.Instance, m.Kind)
			ack.History = append(ack.History, pgwake.Event{ID: next, Type: string(m.Kind), Data: m.Data})
			next++
			switch m.Kind {
			case pgwake.MessageStart:
				ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
					Name: "pack", Input: m.Data, Instance: item.Instance, ExecutionID: item.ExecutionID, ActivityID: next}})
			case "activity.completed":
				ack.Metadata.Status, ack.Metadata.Output = pgwake.StatusCompleted, string(m.Data)
			}
		}
		if err := p.AckOrchestrationItem(ctx, item.LockToken, ack); err != nil {
			log.Fatal(err)
		}
	}
	turn()

	// A worker runs the activity, and its ack carries the answer.
	activity, err := p.FetchWorkItem(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	err = p.AckWorkItem(ctx, activity.LockToken, &pgwake.Message{
		Instance: activity.Instance, Kind: "activity.completed", Data: json.RawMessage(`"packed"`)})
	if err != nil {
		log.Fatal(err)
	}
	turn()

	history, err := p.ReadHistory(ctx, "order-7")
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range history {
		fmt.Printf("%d %s %s\n", e.ID, e.Type, e.Data)
	}
	// Output:
	// order-7: start
	// order-7: activity.completed
	// 1 start {"sku":42}
	// 2 activity.completed "packed"
}

// Namespaces divide a queue. A fetch may serve some of them, or all.
func ExampleFetchOptions_namespaces() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)

	for _, namespace := range []string{"billing", "mail", "billing"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "for " + namespace}, &pgwake.EnqueueOptions{Namespace: namespace})
		if err != nil {
			log.Fatal(err)
		}
	}
	for {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"billing"}, NoWait: true})
		if errors.Is(err, pgwake.ErrNoWork) {
			fmt.Println("nothing more for billing")
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(item.Name)
	}
	// Output:
	// for billing
	// for billing
	// nothing more for billing
}

// A delayed item is due by the server's clock, and is fetched then without polling.
func ExampleEnqueueOptions_delay() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)

	added, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "remind"}, &pgwake.EnqueueOptions{Delay: 100 * time.Millisecond})
	if err != nil {
		log.Fatal(err)
	}
	_, err = p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true})
	fmt.Println("at first:", errors.Unwrap(err))
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Minute, PollTimeout: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	claimed := item.LockedUntil.Add(-time.Minute)
	fmt.Println("then:", item.Name, "too early:", claimed.Before(added.DueAt))
	// Output:
	// at first: no work
	// then: remind too early: false
}

// Several items cost one round trip to fetch and one to acknowledge.
func ExampleProvider_FetchWorkItems() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)

	var batch []pgwake.WorkEnqueue
	for _, name := range strings.Fields("a b c d e") {
		batch = append(batch, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: name}})
	}
	if _, err := p.EnqueueForWorkerMany(ctx, batch); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		items, err := p.FetchWorkItems(ctx, 3, nil)
		if err != nil {
			log.Fatal(err)
		}
		var names []string
		var tokens []pgwake.LockToken
		for _, item := range items {
			names = append(names, item.Name)
			tokens = append(tokens, item.LockToken)
		}
		fmt.Println(names)
		var lost *pgwake.LostLocksError
		if err := p.AckWorkItems(ctx, tokens); errors.As(err, &lost) {
			fmt.Println(len(lost.Tokens), "will come again") // their leases ended before the ack
		} else if err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// [a b c]
	// [d e]
}

// A long piece of work extends its lease while it lasts.
func ExampleProvider_RenewWorkItemLock() {
	databaseURL, config, drop := forExample()
	defer drop()
	ctx := context.Background()
	p, err := pgwake.Open(ctx, databaseURL, config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close(ctx)
	if _, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "encode"}, nil); err != nil {
		log.Fatal(err)
	}
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	until, err := p.RenewWorkItemLock(ctx, item.LockToken, time.Minute)
	if errors.Is(err, pgwake.ErrLockLost) {
		return // somebody else has it by now: stop working
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("extended:", until.Sub(item.LockedUntil) >= 50*time.Second)
	// Output: extended: true
}
