package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does one node do? It is a process of its own, which shares nothing with the others
// but the database.

const (
	dispatcherCount = 4 // per node

	// lockTimeout is how long the items of a node that died stay with it.
	lockTimeout = 2 * time.Second
)

// envRole is set in a process that is to be a node. It holds a role as JSON.
const envRole = "PGWAKE_MANYNODES_ROLE"

type role struct {
	Node        int
	URL, Schema string
}

// What a node reports.
const (
	ready   = "ready"
	claimed = "claimed"
	handled = "handled"
	acked   = "acked"
	ended   = "ended" // this one is the parent's
)

// report is a line that a node writes for its parent.
type report struct {
	Node  int
	What  string
	Item  int       `json:",omitempty"`
	Until time.Time `json:",omitzero"` // claimed: the end of the lease, server's clock
}

// nodeMain does nothing unless this process is to be a node. Then it never returns.
func nodeMain() {
	encoded, ok := os.LookupEnv(envRole)
	if !ok {
		return
	}
	if err := node(encoded); err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func node(encoded string) (err error) {
	var r role
	if err := json.Unmarshal([]byte(encoded), &r); err != nil {
		return err
	}
	// The parent holds the other end of our standard input. It closes it to stop us, and if the parent dies
	// the system closes it. A Ctrl-C, which the terminal sends to both, is the parent's affair.
	signal.Ignore(os.Interrupt)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()

	p, err := pgwake.Open(ctx, r.URL, &pgwake.Config{Schema: r.Schema, SkipMigrate: true})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()
	n := &worker{Provider: p, number: r.Node, out: json.NewEncoder(os.Stdout)}
	n.report(report{What: ready})
	var dispatchers sync.WaitGroup
	for range dispatcherCount {
		dispatchers.Go(func() { n.dispatch(ctx) })
	}
	dispatchers.Wait()
	return nil
}

type worker struct {
	*pgwake.Provider
	number int

	mu  sync.Mutex // one line at a time
	out *json.Encoder
}

func (w *worker) dispatch(ctx context.Context) {
	for {
		item, err := w.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: lockTimeout})
		switch {
		case err == nil:
			if err := w.handle(context.WithoutCancel(ctx), item); err != nil {
				fmt.Fprintf(os.Stderr, "node %d: %v\n", w.number, err)
			}
		case errors.Is(err, pgwake.ErrNoWork):
		case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
			return
		default:
			fmt.Fprintf(os.Stderr, "node %d: %v\n", w.number, err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	}
}

// handle takes as long as the item says.
func (w *worker) handle(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
	n, err := strconv.Atoi(item.Name)
	if err != nil {
		return err
	}
	var millis int
	if err := json.Unmarshal(item.Input, &millis); err != nil {
		return err
	}
	w.report(report{What: claimed, Item: n, Until: item.LockedUntil})
	time.Sleep(time.Duration(millis) * time.Millisecond) // the work
	w.report(report{What: handled, Item: n})
	if err := w.AckWorkItem(ctx, item.LockToken, nil); err != nil {
		return err
	}
	w.report(report{What: acked, Item: n})
	return nil
}

func (w *worker) report(r report) {
	r.Node = w.number
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r) // without a parent there is nobody to tell
}
