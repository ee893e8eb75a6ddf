package pgwake_test

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// The items of a session are handled by one owner at a time, who keeps it for as long as there is something to do.
func ExampleProvider_RenewSessionLock() {
	ctx, p, end := openProvider()
	defer end()
	for _, name := range []string{"load the model", "answer"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name, Session: "chat-7"}, nil)
		check(err)
	}
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: "node 1"}})
	check(err)
	fmt.Println("node 1:", item.Name)

	_, err = p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true, Session: &pgwake.SessionOptions{Owner: "node 2"}})
	fmt.Println("node 2:", err)

	renewed, err := p.RenewSessionLock(ctx, []string{"node 1"}, time.Minute, time.Hour)
	check(err)
	fmt.Println(renewed, "session renewed")
	// Output:
	// node 1: load the model
	// node 2: pgwake: fetch work: no work
	// 1 session renewed
}

func ExampleProvider_RenewSessionLockTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		renewed, err := p.RenewSessionLockTx(ctx, tx, []string{"node 1"}, time.Minute, time.Hour)
		fmt.Println(renewed)
		return err
	}))
	// Output: 0
}

// Who leaves in an orderly way releases its sessions, so that others need not wait for the end of their locks.
func ExampleProvider_ReleaseSessions() {
	ctx, p, end := openProvider()
	defer end()
	for _, name := range []string{"load the model", "answer"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name, Session: "chat-7"}, nil)
		check(err)
	}
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: "node 1"}})
	check(err)
	check(p.AckWorkItem(ctx, item.LockToken, nil))

	released, err := p.ReleaseSessions(ctx, []string{"node 1"})
	check(err)
	fmt.Println(released, "session released")
	item, err = p.FetchWorkItem(ctx, &pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: "node 2"}})
	check(err)
	fmt.Println("node 2:", item.Name)
	// Output:
	// 1 session released
	// node 2: answer
}

func ExampleProvider_ReleaseSessionsTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		released, err := p.ReleaseSessionsTx(ctx, tx, []string{"node 1"})
		fmt.Println(released)
		return err
	}))
	// Output: 0
}

// Who leaves in an orderly way leaves the instances to others whose turns would come to it for another while.
func ExampleProvider_ReleaseSticky() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: pgwake.MessageStart, Name: "order"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{Owner: "node 1"})
	check(err)
	check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		ExecutionID: 1, Metadata: pgwake.Metadata{Name: "order"}, Sticky: &pgwake.Sticky{Owner: "node 1", For: time.Hour}}))
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "paid"}, nil)
	check(err)

	released, err := p.ReleaseSticky(ctx, []string{"node 1"})
	check(err)
	fmt.Println(released, "instance released")
	turn, err = p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{Owner: "node 2"})
	check(err)
	fmt.Println("node 2:", turn.Messages[0].Kind)
	// Output:
	// 1 instance released
	// node 2: paid
}

func ExampleProvider_ReleaseStickyTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		released, err := p.ReleaseStickyTx(ctx, tx, []string{"node 1"})
		fmt.Println(released)
		return err
	}))
	// Output: 0
}

// Whoever runs many sessions removes the ended ones now and then.
func ExampleProvider_CleanupSessions() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "answer", Session: "chat-7"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: "node 1", LockTimeout: 10 * time.Millisecond}})
	check(err)
	check(p.AckWorkItem(ctx, item.LockToken, nil))

	for {
		removed, err := p.CleanupSessions(ctx)
		check(err)
		if removed > 0 { // its lock has ended
			fmt.Println(removed, "session removed")
			break
		}
	}
	// Output: 1 session removed
}

func ExampleProvider_CleanupSessionsTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		removed, err := p.CleanupSessionsTx(ctx, tx)
		fmt.Println(removed)
		return err
	}))
	// Output: 0
}
