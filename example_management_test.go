package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// endInstance runs an instance through one turn, as a runtime would, that leaves it with the status.
func endInstance(ctx context.Context, p *pgwake.Provider, instance string, execution int64, m pgwake.Metadata) {
	kind := pgwake.MessageStart
	if execution > 1 {
		kind = pgwake.MessageContinueAsNew
	}
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: instance, Kind: kind, Name: "order", ExecutionID: execution}, nil)
	check(err)
	turn, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	m.Name = "order"
	check(p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		ExecutionID: execution,
		History:     []pgwake.Event{{ID: 1, Type: "started"}},
		Metadata:    m,
	}))
}

var (
	completed   = pgwake.Metadata{Status: pgwake.StatusCompleted, Output: "shipped"}
	running     = pgwake.Metadata{Status: pgwake.StatusRunning}
	continued   = pgwake.Metadata{Status: pgwake.StatusContinuedAsNew}
	childOfRoot = pgwake.Metadata{Status: pgwake.StatusCompleted, Parent: "order-1"}
)

// Page after page, two instances at a time.
func ExampleProvider_ListInstances() {
	ctx, p, end := openProvider()
	defer end()
	for i := range 5 {
		endInstance(ctx, p, fmt.Sprintf("order-%d", i), 1, completed)
	}
	o := &pgwake.ListOptions{Status: pgwake.StatusCompleted, Limit: 2}
	for {
		page, err := p.ListInstances(ctx, o)
		check(err)
		for _, info := range page {
			fmt.Println(info.Instance, info.Status)
		}
		if len(page) < o.Limit {
			break
		}
		o.After = page[len(page)-1].Instance
	}
	// Output:
	// order-0 Completed
	// order-1 Completed
	// order-2 Completed
	// order-3 Completed
	// order-4 Completed
}

func ExampleProvider_GetInstanceInfo() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	info, err := p.GetInstanceInfo(ctx, "order-1")
	check(err)
	fmt.Println(info.Name, info.ExecutionID, info.Status, info.Output)
	_, err = p.GetInstanceInfo(ctx, "order-2")
	fmt.Println(errors.Is(err, pgwake.ErrNotFound))
	// Output:
	// order 1 Completed shipped
	// true
}

func ExampleProvider_ListExecutions() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, continued)
	endInstance(ctx, p, "order-1", 2, running)
	executions, err := p.ListExecutions(ctx, "order-1")
	check(err)
	for _, x := range executions {
		fmt.Println(x.ExecutionID, x.Status, x.Events)
	}
	// Output:
	// 1 ContinuedAsNew 1
	// 2 Running 1
}

func ExampleProvider_GetExecutionInfo() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	x, err := p.GetExecutionInfo(ctx, "order-1", 1)
	check(err)
	fmt.Println(x.Status, x.Output, x.CompletedAt.IsZero())
	// Output: Completed shipped false
}

func ExampleProvider_ListChildren() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "invoice-1", 1, childOfRoot)
	fmt.Println(p.ListChildren(ctx, "order-1"))
	// Output: [invoice-1] <nil>
}

func ExampleProvider_GetParent() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "invoice-1", 1, childOfRoot)
	fmt.Println(p.GetParent(ctx, "invoice-1"))
	// Output: order-1 <nil>
}

func ExampleProvider_GetInstanceTree() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "parcel-1", 1, childOfRoot)
	endInstance(ctx, p, "invoice-1", 1, childOfRoot)
	fmt.Println(p.GetInstanceTree(ctx, "order-1"))
	// Output: [order-1 invoice-1 parcel-1] <nil>
}

// What is running needs force, and then whoever has a turn of it loses its lock.
func ExampleProvider_DeleteInstance() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, running)
	_, err := p.DeleteInstance(ctx, "order-1", nil)
	fmt.Println(errors.Is(err, pgwake.ErrInstanceRunning))
	deleted, err := p.DeleteInstance(ctx, "order-1", &pgwake.DeleteOptions{Force: true})
	check(err)
	fmt.Println(deleted.Instances, deleted.Executions, deleted.Events)
	// Output:
	// true
	// 1 1 1
}

// Together with the row of the caller's own table, or not at all.
func ExampleProvider_DeleteInstanceTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	tx, err := pool.Begin(ctx)
	check(err)
	_, err = p.DeleteInstanceTx(ctx, tx, "order-1", nil)
	check(err)
	check(tx.Rollback(ctx))
	info, err := p.GetInstanceInfo(ctx, "order-1")
	check(err)
	fmt.Println(info.Instance, "is still there")
	// Output: order-1 is still there
}

// All or none: a set that leaves a child behind is refused.
func ExampleProvider_DeleteInstances() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "order-2", 1, completed)
	endInstance(ctx, p, "invoice-1", 1, childOfRoot)
	_, err := p.DeleteInstances(ctx, []string{"order-1", "order-2"}, nil)
	fmt.Println(errors.Is(err, pgwake.ErrHasParent))
	deleted, err := p.DeleteInstances(ctx, []string{"order-1", "order-2", "invoice-1"}, nil)
	check(err)
	fmt.Println(deleted.Instances)
	// Output:
	// true
	// 3
}

func ExampleProvider_DeleteInstancesTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	tx, err := pool.Begin(ctx)
	check(err)
	deleted, err := p.DeleteInstancesTx(ctx, tx, []string{"order-1"}, nil)
	check(err)
	check(tx.Commit(ctx))
	fmt.Println(deleted.Instances)
	// Output: 1
}

// A retention of 30 days, enforced in portions.
func ExampleProvider_DeleteInstancesBulk() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	monthAgo := time.Now().Add(-30 * 24 * time.Hour)
	for {
		deleted, err := p.DeleteInstancesBulk(ctx, &pgwake.BulkFilter{CompletedBefore: monthAgo})
		check(err)
		fmt.Println("deleted", deleted.Instances)
		if deleted.Instances == 0 {
			break
		}
	}
	// Output: deleted 0
}

func ExampleProvider_DeleteInstancesBulkTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "order-2", 1, running)
	tx, err := pool.Begin(ctx)
	check(err)
	deleted, err := p.DeleteInstancesBulkTx(ctx, tx, &pgwake.BulkFilter{Instances: []string{"order-1", "order-2"}})
	check(err)
	check(tx.Commit(ctx))
	fmt.Println(deleted.Instances)
	// Output: 1
}

// An instance that continues as new for ever keeps its last executions.
func ExampleProvider_PruneExecutions() {
	ctx, p, end := openProvider()
	defer end()
	for x := range int64(4) {
		endInstance(ctx, p, "order-1", x+1, continued)
	}
	pruned, err := p.PruneExecutions(ctx, "order-1", &pgwake.PruneOptions{KeepLast: 2})
	check(err)
	fmt.Println(pruned.Executions, pruned.Events)
	// Output: 2 2
}

func ExampleProvider_PruneExecutionsTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	endInstance(ctx, p, "order-1", 1, continued)
	endInstance(ctx, p, "order-1", 2, running)
	tx, err := pool.Begin(ctx)
	check(err)
	pruned, err := p.PruneExecutionsTx(ctx, tx, "order-1", nil)
	check(err)
	check(tx.Commit(ctx))
	fmt.Println(pruned.Executions)
	// Output: 1
}

// Of all instances, whatever ended more than a week ago.
func ExampleProvider_PruneExecutionsBulk() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, continued)
	endInstance(ctx, p, "order-1", 2, running)
	weekAgo := time.Now().Add(-7 * 24 * time.Hour)
	pruned, err := p.PruneExecutionsBulk(ctx, nil, &pgwake.PruneOptions{CompletedBefore: weekAgo})
	check(err)
	fmt.Println(pruned.Instances, pruned.Executions)
	// Output: 0 0
}

func ExampleProvider_PruneExecutionsBulkTx() {
	ctx, p, pool, end := openProviderAndPool()
	defer end()
	endInstance(ctx, p, "order-1", 1, continued)
	endInstance(ctx, p, "order-1", 2, running)
	tx, err := pool.Begin(ctx)
	check(err)
	pruned, err := p.PruneExecutionsBulkTx(ctx, tx, &pgwake.BulkFilter{Instances: []string{"order-1"}}, nil)
	check(err)
	check(tx.Commit(ctx))
	fmt.Println(pruned.Instances, pruned.Executions)
	// Output: 1 1
}

func ExampleProvider_GetSystemMetrics() {
	ctx, p, end := openProvider()
	defer end()
	endInstance(ctx, p, "order-1", 1, completed)
	endInstance(ctx, p, "order-2", 1, running)
	m, err := p.GetSystemMetrics(ctx)
	check(err)
	fmt.Println(m.Instances, m.ByStatus[pgwake.StatusRunning], m.Events, m.DeadLetters)
	// Output: 2 1 2 0
}

func ExampleProvider_GetQueueDepths() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send"}, nil)
	check(err)
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	check(err)
	depths, err := p.GetQueueDepths(ctx)
	check(err)
	for _, d := range depths {
		fmt.Println(d.Queue, d.Namespace, "due:", d.Due, "delayed:", d.Delayed, "leased:", d.Leased)
	}
	// Output: worker default due: 1 delayed: 1 leased: 0
}

func ExampleProvider_Peek() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send", Input: []byte(`{"to":"ada"}`)}, nil)
	check(err)
	_, err = p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "report"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	check(err)
	items, err := p.Peek(ctx, pgwake.Worker, &pgwake.PeekFilter{Namespace: "default"})
	check(err)
	for _, i := range items {
		fmt.Println(i.Name, i.State, string(i.Data))
	}
	// Output:
	// email.send due {"to":"ada"}
	// report delayed
}

func ExampleProvider_ListNodes() {
	ctx, p, end := openProvider()
	defer end()
	nodes, err := p.ListNodes(ctx)
	check(err)
	for _, n := range nodes {
		fmt.Println("listening:", n.Listening, "lanes:", len(n.Lanes))
	}
	// Output: listening: true lanes: 0
}

func ExampleProvider_NodeReports() {
	ctx, p, end := openProvider()
	defer end()
	for reports, err := range p.NodeReports(ctx, time.Second) {
		check(err)
		for _, r := range reports {
			fmt.Println(r.Stats.Mode, "listening:", r.Stats.Listening, "problems:", len(r.Problems))
		}
		if len(reports) > 0 { // an example has to end
			break
		}
	}
	// Output: hybrid listening: true problems: 0
}

func ExampleProvider_Observe() {
	ctx, p, end := openProvider()
	defer end()
	for o, err := range p.Observe(ctx) {
		check(err)
		if o.Asked {
			fmt.Println("nodes:", len(o.Nodes))
			_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "email.send"}, nil)
			check(err)
		} else if o.For > 0 { // look now, and again for so long
			depths, err := p.GetQueueDepths(ctx)
			check(err)
			if len(depths) > 0 {
				fmt.Println("due:", depths[0].Due)
				break
			}
		}
	}
	// Output:
	// nodes: 1
	// due: 1
}

func ExampleProvider_LocalTime() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "video.encode"}, nil)
	check(err)
	item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: time.Minute})
	check(err)
	left := time.Until(p.LocalTime(item.LockedUntil)) // whatever the clocks show
	fmt.Println(left.Round(10 * time.Second))
	// Output: 1m0s
}
