package pgwake_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// At most two calls of the same customer at a time, whatever the number of nodes.
func ExampleProvider_SetLimits() {
	ctx, p, end := openProvider()
	defer end()
	check(p.SetLimits(ctx, "api", pgwake.Limits{MaxRunningPerKey: 2}))
	for i := range 4 {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: fmt.Sprint("call ", i+1), Key: "customer 7"}, &pgwake.EnqueueOptions{Namespace: "api"})
		check(err)
	}
	items, err := p.FetchWorkItems(ctx, 10, nil)
	check(err)
	for _, item := range items {
		fmt.Println(item.Name)
	}
	check(p.AckWorkItem(ctx, items[0].LockToken, nil))
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output:
	// call 1
	// call 2
	// call 3
}

func ExampleProvider_SetLimitsTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return p.SetLimitsTx(ctx, tx, "api", pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Second, Burst: 10}})
	}))
	limits, err := p.GetLimits(ctx)
	check(err)
	fmt.Println(limits["api"].RatePerKey)
	// Output: {1s 10}
}

func ExampleProvider_GetLimits() {
	ctx, p, end := openProvider()
	defer end()
	check(p.SetLimits(ctx, "premium", pgwake.Limits{Weight: 5}))
	limits, err := p.GetLimits(ctx)
	check(err)
	fmt.Println(len(limits), limits["premium"].Weight)
	// Output: 1 5
}

// Nobody sends mail until the provider is back.
func ExampleProvider_Pause() {
	ctx, p, end := openProvider()
	defer end()
	check(p.Pause(ctx, pgwake.Worker, "mail"))
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "mail.send"}, &pgwake.EnqueueOptions{Namespace: "mail"})
	check(err)
	_, err = p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true})
	fmt.Println(err)
	// Output: pgwake: fetch work: no work
}

func ExampleProvider_PauseTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return p.PauseTx(ctx, tx, pgwake.Orchestrator, pgwake.AllNamespaces) }))
	paused, err := p.GetPaused(ctx, pgwake.Orchestrator)
	check(err)
	fmt.Println(paused.All)
	// Output: true
}

func ExampleProvider_Resume() {
	ctx, p, end := openProvider()
	defer end()
	check(p.Pause(ctx, pgwake.Worker, pgwake.AllNamespaces))
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "mail.send"}, nil)
	check(err)
	time.AfterFunc(10*time.Millisecond, func() { check(p.Resume(ctx, pgwake.Worker, pgwake.AllNamespaces)) })
	item, err := p.FetchWorkItem(ctx, nil)
	check(err)
	fmt.Println(item.Name)
	// Output: mail.send
}

func ExampleProvider_ResumeTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	check(p.Pause(ctx, pgwake.Worker, "mail"))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return p.ResumeTx(ctx, tx, pgwake.Worker, "mail") }))
	paused, err := p.GetPaused(ctx, pgwake.Worker)
	check(err)
	fmt.Println(len(paused.Namespaces))
	// Output: 0
}

func ExampleProvider_GetPaused() {
	ctx, p, end := openProvider()
	defer end()
	check(p.Pause(ctx, pgwake.Worker, "mail", "reports"))
	paused, err := p.GetPaused(ctx, pgwake.Worker)
	check(err)
	fmt.Println(paused.Namespaces)
	// Output: [mail reports]
}

// The next item begins before the disk has the end of the one before.
func ExampleProvider_Flush() {
	ctx, p, end := openProvider()
	defer end()
	for i := range 3 {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: fmt.Sprint("call ", i+1)}, nil)
		check(err)
	}
	o := &pgwake.FetchOptions{NoWait: true, AckAsync: true}
	for {
		item, err := p.FetchWorkItem(ctx, o)
		if errors.Is(err, pgwake.ErrNoWork) {
			break
		}
		check(err)
		fmt.Println(item.Name)
		o.Ack = []pgwake.LockToken{item.LockToken}
	}
	check(p.Flush(ctx))
	// Output:
	// call 1
	// call 2
	// call 3
}
