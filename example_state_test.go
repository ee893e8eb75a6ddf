package pgwake_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// turn plays the runtime: it opens the instance, or sends it a message, and ends the turn with the ack.
func turn(ctx context.Context, p *pgwake.Provider, instance string, kind pgwake.MessageKind, ack pgwake.OrchestrationAck) {
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: instance, Kind: kind, Name: "order"}, nil)
	check(err)
	item, err := p.FetchOrchestrationItem(ctx, nil)
	check(err)
	ack.Metadata.Name = "order"
	check(p.AckOrchestrationItem(ctx, item.LockToken, ack))
}

// A page that is loaded now and then asks for what it has not seen.
func ExampleProvider_GetCustomStatus() {
	ctx, p, end := openProvider()
	defer end()
	turn(ctx, p, "order-7", pgwake.MessageStart, pgwake.OrchestrationAck{
		CustomStatus: &pgwake.CustomStatusUpdate{Value: "packing"}})

	seen := int64(0)
	for range 2 {
		status, err := p.GetCustomStatus(ctx, "order-7", seen)
		check(err)
		if status == nil {
			fmt.Println("nothing new")
			continue
		}
		seen = status.Version
		fmt.Println(status.Version, status.Value)
	}
	// Output:
	// 1 packing
	// nothing new
}

// A page that stays open follows the progress of an instance, which need not exist yet. Each change is pushed.
func ExampleProvider_WaitForStatus() {
	ctx, p, end := openProvider()
	defer end()
	go func() {
		turn(ctx, p, "order-7", pgwake.MessageStart, pgwake.OrchestrationAck{
			CustomStatus: &pgwake.CustomStatusUpdate{Value: "packing"}})
	}()

	status, err := p.WaitForStatus(ctx, "order-7", 0)
	check(err)
	fmt.Println(status.Value)

	turn(ctx, p, "order-7", "packed", pgwake.OrchestrationAck{CustomStatus: &pgwake.CustomStatusUpdate{Value: "on its way"}})
	status, err = p.WaitForStatus(ctx, "order-7", status.Version)
	check(err)
	fmt.Println(status.Value)

	turn(ctx, p, "order-7", "delivered", pgwake.OrchestrationAck{CustomStatus: &pgwake.CustomStatusUpdate{Clear: true}})
	status, err = p.WaitForStatus(ctx, "order-7", status.Version)
	check(err)
	fmt.Println("still set:", status.Set)
	// Output:
	// packing
	// on its way
	// still set: false
}

// Whoever starts an orchestration waits for its result, on any node.
func ExampleProvider_WaitForInstance() {
	ctx, p, end := openProvider()
	defer end()
	go func() {
		turn(ctx, p, "order-7", pgwake.MessageStart, pgwake.OrchestrationAck{
			Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted, Output: `{"parcel": "X1"}`}})
	}()

	outcome, err := p.WaitForInstance(ctx, "order-7")
	check(err)
	var result struct{ Parcel string }
	check(json.Unmarshal([]byte(outcome.Output), &result))
	fmt.Println(outcome.Status, result.Parcel)
	// Output: Completed X1
}

// What a turn writes, others read at once. Turns see it once the execution has ended.
func ExampleProvider_GetKV() {
	ctx, p, end := openProvider()
	defer end()
	turn(ctx, p, "cart-7", pgwake.MessageStart, pgwake.OrchestrationAck{KV: []pgwake.KVUpdate{{Key: "tea", Value: "2"}}})

	for _, key := range []string{"tea", "milk"} {
		v, found, err := p.GetKV(ctx, "cart-7", key)
		check(err)
		fmt.Printf("%s: %q %t\n", key, v, found)
	}
	// Output:
	// tea: "2" true
	// milk: "" false
}

// The updates of a turn apply in their order.
func ExampleProvider_ListKV() {
	ctx, p, end := openProvider()
	defer end()
	turn(ctx, p, "cart-7", pgwake.MessageStart, pgwake.OrchestrationAck{KV: []pgwake.KVUpdate{
		{Key: "tea", Value: "2"},
		{Key: "milk", Value: "1"},
		{Op: pgwake.KVClear, Key: "milk"},
		{Key: "sugar", Value: "1"},
	}})

	pairs, err := p.ListKV(ctx, "cart-7")
	check(err)
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		fmt.Println(key, pairs[key])
	}
	// Output:
	// sugar 1
	// tea 2
}

// A node with a history cache has the next turns of what it works on come back to it, unless it is away for long.
func ExampleSticky() {
	ctx, p, end := openProvider()
	defer end()
	turn(ctx, p, "order-7", pgwake.MessageStart, pgwake.OrchestrationAck{
		Sticky: &pgwake.Sticky{Owner: "node 1", For: 10 * time.Second}})
	_, err := p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "order-7", Kind: "paid"}, nil)
	check(err)

	_, err = p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{NoWait: true, Owner: "node 2"})
	fmt.Println("node 2:", err)
	item, err := p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{NoWait: true, Owner: "node 1"})
	check(err)
	fmt.Println("node 1:", item.Messages[0].Kind)
	// Output:
	// node 2: pgwake: fetch orchestration: no work
	// node 1: paid
}
