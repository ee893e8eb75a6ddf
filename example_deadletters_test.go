package pgwake_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/exampletb"
	"github.com/pgwake/pgwake/pgwaketest"
)

// An item that can never succeed leaves the queue, and is kept with the reason.
func ExampleProvider_DeadLetterWorkItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"nobody"}`)}, nil)
	check(err)

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	check(p.DeadLetterWorkItem(ctx, item.LockToken, "bad address", "no @ in nobody"))

	letters, err := p.ListDeadLetters(ctx, nil)
	check(err)
	for _, l := range letters {
		fmt.Printf("%s %s: %s: %s\n", l.Name, l.Data, l.Reason, l.Error)
	}
	// Output: email.send {"to":"nobody"}: bad address: no @ in nobody
}

// The instance that scheduled the item is told in the same transaction.
func ExampleProvider_DeadLetterWorkItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "charge", Instance: "order-7", ExecutionID: 1, ActivityID: 2}, nil)
	check(err)

	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := p.DeadLetterWorkItemTx(ctx, tx, item.LockToken, "card refused", ""); err != nil {
			return err
		}
		_, err := p.EnqueueForOrchestratorTx(ctx, tx, pgwake.Message{Instance: item.Instance, Kind: "activity_failed", Data: []byte(`{"id":2}`)}, nil)
		return err
	})
	check(err)

	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println(turn.Instance, turn.Messages[0].Kind)
	// Output: order-7 activity_failed
}

// A turn that fails again and again no longer holds up its instance.
func ExampleProvider_DeadLetterOrchestrationItem() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "poison"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "payment"}, nil)
	check(err)

	check(p.DeadLetterOrchestrationItem(ctx, turn.LockToken, "too many attempts", "panic: index out of range"))
	next, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	fmt.Println(next.Messages[0].Kind)
	// Output: payment
}

func ExampleProvider_DeadLetterOrchestrationItemTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "poison"}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)

	// Give up on the messages, and mark the instance, or neither.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := p.AppendHistoryTx(ctx, tx, turn.Instance, turn.ExecutionID, []pgwake.Event{{ID: 99999, Type: "broken"}}); err != nil {
			return err
		}
		return p.DeadLetterOrchestrationItemTx(ctx, tx, turn.LockToken, "no such workflow", "")
	})
	check(err)

	letters, err := p.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{Instance: "order-7"})
	check(err)
	fmt.Println(letters[0].Kind, letters[0].Reason)
	// Output: poison no such workflow
}

// Page by page, those of one reason.
func ExampleProvider_ListDeadLetters() {
	ctx, p, end := openProvider()
	defer end()
	for _, name := range []string{"a", "b", "c"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name}, nil)
		check(err)
		item, err := p.FetchWorkItem(ctx, nil)
		check(err)
		check(p.DeadLetterWorkItem(ctx, item.LockToken, "timeout", ""))
	}

	page := &pgwake.DeadLetterFilter{Reason: "timeout", Limit: 2}
	for {
		letters, err := p.ListDeadLetters(ctx, page)
		check(err)
		if len(letters) == 0 {
			break
		}
		for _, l := range letters {
			fmt.Println(l.Name, l.Attempts)
		}
		page.After = letters[len(letters)-1].ID
	}
	// Output:
	// a 1
	// b 1
	// c 1
}

// How many there are costs less than the letters, and a namespace or a reason narrows it down.
func ExampleProvider_CountDeadLetters() {
	ctx, p, end := openProvider()
	defer end()
	for _, name := range []string{"report", "email.send", "report"} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: name}, nil)
		check(err)
		item, err := p.FetchWorkItem(ctx, nil)
		check(err)
		check(p.DeadLetterWorkItem(ctx, item.LockToken, "broken", ""))
	}
	counts, err := p.CountDeadLetters(ctx, &pgwake.DeadLetterFilter{Name: "report"})
	check(err)
	for _, c := range counts {
		fmt.Printf("%s queue, namespace %s: %d\n", c.Queue, c.Namespace, c.Letters)
	}
	// Output: worker queue, namespace default: 2
}

// After the bug was fixed: everything that failed because of it, however much that is.
func ExampleProvider_RedriveDeadLetters() {
	ctx, p, end := openProvider()
	defer end()
	for range 3 {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, nil)
		check(err)
		item, err := p.FetchWorkItem(ctx, nil)
		check(err)
		check(p.DeadLetterWorkItem(ctx, item.LockToken, "division by zero", ""))
	}

	total := 0
	for {
		redriven, err := p.RedriveDeadLetters(ctx, &pgwake.DeadLetterFilter{Queue: new(pgwake.Worker), Reason: "division by zero", Limit: 2})
		check(err)
		if redriven == 0 {
			break
		}
		total += redriven
	}
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(total, item.Name, item.Attempt)
	// Output: 3 report 1
}

func ExampleProvider_RedriveDeadLettersTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	check(p.DeadLetterWorkItem(ctx, item.LockToken, "division by zero", ""))
	letters, err := p.ListDeadLetters(ctx, nil)
	check(err)

	// One letter, by its id; it is back when the transaction commits.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		redriven, err := p.RedriveDeadLettersTx(ctx, tx, &pgwake.DeadLetterFilter{IDs: []int64{letters[0].ID}})
		fmt.Println(redriven)
		return err
	})
	check(err)
	item, err = p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output:
	// 1
	// report
}

// Whatever has been dead for a month.
func ExampleProvider_PurgeDeadLetters() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	check(p.DeadLetterWorkItem(ctx, item.LockToken, "division by zero", ""))

	purged, err := p.PurgeDeadLetters(ctx, &pgwake.DeadLetterFilter{DiedBefore: time.Now().AddDate(0, -1, 0)})
	check(err)
	fmt.Println(purged)
	// Output: 0
}

func ExampleProvider_PurgeDeadLettersTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	check(p.DeadLetterWorkItem(ctx, item.LockToken, "division by zero", ""))

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		purged, err := p.PurgeDeadLettersTx(ctx, tx, &pgwake.DeadLetterFilter{Name: "report"})
		fmt.Println(purged)
		return err
	})
	check(err)
	// Output: 1
}

// openArchive opens a Provider on a schema whose archive has one item, which one with Config.ArchiveFor
// acknowledged.
func openArchive() (ctx context.Context, p *pgwake.Provider, pool *pgxpool.Pool, end func()) {
	tb := &exampletb.TB{}
	n := newNode(tb, nil)
	n.archive(tb, "email.send")
	pool, err := pgxpool.New(tctx, pgwaketest.URL(tb))
	check(err)
	return tctx, n.Provider, pool, func() { pool.Close(); tb.End() }
}

func ExampleProvider_ListArchive() {
	ctx, p, _, end := openArchive()
	defer end()

	items, err := p.ListArchive(ctx, &pgwake.ArchiveFilter{Name: "email.send"})
	check(err)
	for _, a := range items {
		fmt.Println(a.Name, a.FinishedAt.After(a.EnqueuedAt))
	}
	// Output: email.send true
}

// What was acknowledged before today, although Config.ArchiveFor would keep it.
func ExampleProvider_PurgeArchive() {
	ctx, p, _, end := openArchive()
	defer end()

	purged, err := p.PurgeArchive(ctx, time.Now().Truncate(24*time.Hour).Add(-time.Hour))
	check(err)
	fmt.Println(purged)
	// Output: 0
}

func ExampleProvider_PurgeArchiveTx() {
	ctx, p, pool, end := openArchive()
	defer end()

	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		purged, err := p.PurgeArchiveTx(ctx, tx, time.Now().Add(time.Minute))
		fmt.Println(purged)
		return err
	})
	check(err)
	// Output: 1
}
