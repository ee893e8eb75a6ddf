// Quickstart is a first program with pgwake, followed by a measured tour of what it does.
//
//	go run ./examples/quickstart
//	go run ./examples/quickstart -console 127.0.0.1:7276 # look at the first program in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. The first program is this file; the tour is in tour.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/examples/internal/show"
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once

	err := run(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "\ninterrupted")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	server, err := devpg.Start(ctx, &devpg.Options{Fsync: true, Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	fmt.Printf("PostgreSQL %s: %s\n\n", server.Version, server.Source)

	if err := firstProgram(ctx, server.URL); err != nil || ctx.Err() != nil {
		return err
	}
	return tour(ctx, server.URL, newScreen(os.Stdout))
}

// firstProgram has 8 dispatchers wait for work, and enqueues some in three ways.
func firstProgram(ctx context.Context, databaseURL string) (err error) {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()

	// One Provider per process and database. It makes its tables and functions in a schema of its own.
	schema := fmt.Sprintf("quickstart_%d", os.Getpid())
	defer func() {
		_, dropped := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: schema})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()

	greeted := make(chan struct{}, 8)
	greet := func(item *pgwake.ClaimedWorkItem) error {
		var guest struct{ Name string }
		if err := json.Unmarshal(item.Input, &guest); err != nil {
			return err
		}
		fmt.Println("hello,", guest.Name)
		greeted <- struct{}{}
		return nil
	}
	fetching, stopFetching := context.WithCancel(ctx)
	var dispatchers sync.WaitGroup
	for range 8 {
		dispatchers.Go(func() { dispatch(fetching, p, greet) })
	}
	defer dispatchers.Wait()
	defer stopFetching()
	stay, err := show.Console(ctx, os.Stdout, p, console.Options{}) // nowhere without -console
	if err != nil {
		return err
	}
	defer func() { err = stay(err) }()

	// Enqueue, and the item is durable.
	ada := pgwake.WorkItem{Name: "greet", Input: json.RawMessage(`{"name": "Ada"}`)}
	if _, err := p.EnqueueForWorker(ctx, ada, nil); err != nil {
		return err
	}
	// For later.
	grace := pgwake.WorkItem{Name: "greet", Input: json.RawMessage(`{"name": "Grace, half a second later"}`)}
	if _, err := p.EnqueueForWorker(ctx, grace, &pgwake.EnqueueOptions{Delay: time.Second / 2}); err != nil {
		return err
	}
	// By any program that speaks SQL, and in its transaction if it has one.
	_, err = pool.Exec(ctx, "SELECT "+schema+`.enqueue_work('greet', '{"name": "Edgar, by plain SQL"}')`)
	if err != nil {
		return err
	}
	for range 3 {
		select {
		case <-greeted:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// dispatch handles one item after another, until ctx ends. While nothing is due it waits in FetchWorkItem,
// which asks the database nothing.
func dispatch(ctx context.Context, p *pgwake.Provider, handle func(*pgwake.ClaimedWorkItem) error) {
	for {
		item, err := p.FetchWorkItem(ctx, nil)
		if errors.Is(err, pgwake.ErrNoWork) {
			continue // nothing came for half a minute
		}
		if err != nil {
			return // interrupted; a program that is to last would log other errors, pause, and go on
		}
		// Acknowledged, it is gone. Given back, it is due again a second later. A process that dies before
		// either leaves it to the others when the lease ends, by default after 30 s.
		if err = handle(item); err == nil {
			err = p.AckWorkItem(context.WithoutCancel(ctx), item.LockToken, nil)
		} else {
			err = p.AbandonWorkItem(context.WithoutCancel(ctx), item.LockToken, &pgwake.AbandonOptions{Delay: time.Second})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}
