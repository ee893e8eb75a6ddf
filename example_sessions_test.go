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
