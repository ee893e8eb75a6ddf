package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
)

// This file answers: what does a program have to do around its handlers? Take it as it is, or change it; all
// of it is made of single calls to the Provider.

// handler does the work of an item. It may be called again for the same item, at any time after an error or a
// crash. ctx ends when the lease is lost, or when a shutdown cannot wait any longer.
type handler func(ctx context.Context, item *pgwake.ClaimedWorkItem) error

// txHandler is a handler whose effects are those of a transaction, which also acknowledges the item. They
// happen exactly once.
type txHandler func(ctx context.Context, tx pgx.Tx, item *pgwake.ClaimedWorkItem) error

// dispatcher serves one namespace.
type dispatcher struct {
	*pgwake.Provider
	pool        *pgxpool.Pool // of the transactions
	namespace   string
	lease       time.Duration // how long a process that died keeps its items from the others
	maxAttempts int
	grace       time.Duration // how long a shutdown waits for what is at work

	handlers     map[string]handler // by the name of the item
	transactions map[string]txHandler

	log     *log.Logger
	settled chan<- outcome
}

// outcome of an item that has left the queue.
type outcome struct {
	item *pgwake.ClaimedWorkItem
	done bool // or else a dead letter
}

// errShutdown is why a handler's context ends when the grace is over.
var errShutdown = errors.New("shutting down")

// run has goroutines call loop until ctx ends, and then waits for what is at work.
func (d *dispatcher) run(ctx context.Context, goroutines int, loop func(fetching, working context.Context)) {
	// A shutdown must not fail what is nearly done: handlers have a context that ends later.
	working, cutShort := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cutShort(nil)
	var loops sync.WaitGroup
	for range goroutines {
		loops.Go(func() { loop(ctx, working) })
	}
	<-ctx.Done()
	hurry := time.AfterFunc(d.grace, func() { cutShort(errShutdown) })
	defer hurry.Stop()
	loops.Wait()
}

// single handles one item after another.
func (d *dispatcher) single(fetching, working context.Context) {
	for {
		item, err := d.FetchWorkItem(fetching, d.fetchOptions())
		if err == nil {
			d.handle(working, item)
		} else if !d.goOn(fetching, err) {
			return
		}
	}
}

func (d *dispatcher) fetchOptions() *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: d.lease, Namespaces: []string{d.namespace}}
}

// goOn decides what to do about the error of a fetch.
func (d *dispatcher) goOn(fetching context.Context, err error) bool {
	switch {
	case errors.Is(err, pgwake.ErrNoWork):
		return true // nothing came within the poll timeout
	case fetching.Err() != nil, errors.Is(err, pgwake.ErrClosed):
		return false
	}
	d.log.Print("cannot fetch: ", err) // the database is away: it will be back
	select {
	case <-time.After(time.Second):
		return true
	case <-fetching.Done():
		return false
	}
}

// handle tries an item once and decides what becomes of it.
func (d *dispatcher) handle(working context.Context, item *pgwake.ClaimedWorkItem) {
	err := d.attempt(working, item)
	ctx := context.WithoutCancel(working)
	switch {
	case err == nil:
		d.settled <- outcome{item, true}
		return
	case errors.Is(err, pgwake.ErrLockLost): // somebody else has it by now
		d.log.Printf("%-16s lost its lease", item.Name)
		return
	case context.Cause(working) != nil: // it is not the item's fault: somebody else can have it, at once
		err = d.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true})
	case item.Attempt >= d.maxAttempts:
		d.log.Printf("%-16s attempt %d: %v; given up", item.Name, item.Attempt, err)
		// FetchOptions.MaxAttempts does it at the next fetch, also for items that took their processes down.
		if err = d.DeadLetterWorkItem(ctx, item.LockToken, "max attempts", err.Error()); err == nil {
			d.settled <- outcome{item, false}
		}
	default:
		delay := backOff(item.Attempt)
		d.log.Printf("%-16s attempt %d: %v; again in %v", item.Name, item.Attempt, err, delay)
		err = d.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: delay})
	}
	if err != nil { // no harm is done: it comes back when the lease ends
		d.log.Printf("%-16s left to its lease: %v", item.Name, err)
	}
}

// attempt runs the handler, under a lease that holds as long as it takes, and acknowledges the item.
func (d *dispatcher) attempt(working context.Context, item *pgwake.ClaimedWorkItem) (err error) {
	if item.Attempt > d.maxAttempts { // the attempts before took down their processes: do not try that here
		return errors.New("never came to an end")
	}
	ctx, release := d.keepLease(working, item.LockToken)
	defer release()
	defer func() { // a bug in one handler must not end the others
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
		// A renewal that comes right after the ack finds no lease either, and that is all right.
		if lost := context.Cause(ctx); err != nil && errors.Is(lost, pgwake.ErrLockLost) {
			err = lost
		}
	}()
	if do, ok := d.transactions[item.Name]; ok {
		return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
			if err := do(ctx, tx, item); err != nil {
				return err
			}
			return d.AckWorkItemTx(ctx, tx, item.LockToken, nil)
		})
	}
	do, ok := d.handlers[item.Name]
	if !ok {
		return errors.New("no handler") // a newer version of this program may have one
	}
	if err := do(ctx, item); err != nil {
		return err
	}
	return d.AckWorkItem(ctx, item.LockToken, nil)
}

// keepLease renews a lease at each third of its time until release is called: one renewal may fail or come late.
// The context ends when it is lost.
func (d *dispatcher) keepLease(ctx context.Context, token pgwake.LockToken) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	released := make(chan struct{})
	var renewing sync.WaitGroup
	renewing.Go(func() {
		third := time.NewTicker(d.lease / 3)
		defer third.Stop()
		for {
			select {
			case <-third.C:
			case <-released:
				return
			}
			_, err := d.RenewWorkItemLock(ctx, token, d.lease)
			if errors.Is(err, pgwake.ErrLockLost) {
				cancel(err)
				return
			}
			if err != nil {
				d.log.Print("cannot renew a lease: ", err) // there is time for another try
			}
		}
	})
	return ctx, func() {
		close(released)
		renewing.Wait()
		cancel(nil)
	}
}

// backOff is the pause after an attempt: twice as long each time, and never the same for two items that
// failed together.
func backOff(attempt int) time.Duration {
	pause := 30 * time.Millisecond << min(attempt-1, 12)
	return (pause/2 + rand.N(pause)).Round(time.Millisecond)
}

// batches returns a loop for small items of which there are many: one round trip fetches up to size of them,
// and one acknowledges them.
func (d *dispatcher) batches(size int, do func(ctx context.Context, items []*pgwake.ClaimedWorkItem) error) func(fetching, working context.Context) {
	return func(fetching, working context.Context) {
		for {
			items, err := d.FetchWorkItems(fetching, size, d.fetchOptions())
			if err == nil {
				d.handleBatch(working, items, do)
			} else if !d.goOn(fetching, err) {
				return
			}
		}
	}
}

func (d *dispatcher) handleBatch(working context.Context, items []*pgwake.ClaimedWorkItem, do func(context.Context, []*pgwake.ClaimedWorkItem) error) {
	ctx := context.WithoutCancel(working)
	if err := do(working, items); err != nil {
		d.log.Printf("%d items of %s: %v", len(items), d.namespace, err)
		for _, item := range items {
			if err := d.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: backOff(item.Attempt)}); err != nil {
				d.log.Printf("%-16s left to its lease: %v", item.Name, err)
			}
		}
		return
	}
	tokens := make([]pgwake.LockToken, len(items))
	for i, item := range items {
		tokens[i] = item.LockToken
	}
	lost := &pgwake.LostLocksError{}
	if err := d.AckWorkItems(ctx, tokens); err != nil && !errors.As(err, &lost) {
		d.log.Printf("%d items of %s left to their leases: %v", len(items), d.namespace, err)
		return
	}
	for _, item := range items { // those whose lease had ended come again, and are settled then
		if !slices.Contains(lost.Tokens, item.LockToken) {
			d.settled <- outcome{item, true}
		}
	}
}
