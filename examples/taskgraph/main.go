// Taskgraph fulfils an order that is a graph of steps, and shows how it gets along.
//
//	go run ./examples/taskgraph
//	go run ./examples/taskgraph -console 127.0.0.1:7276 # and look at it in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. Two steps run side by side and are joined; one fails twice and is tried again after a
// backoff; one is skipped, since its condition does not hold; one decides how many steps there are after it; and one
// fails for good, so that somebody has to put it right by hand.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/examples/internal/show"
	"github.com/pgwake/pgwake/taskgraph"
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
	server, err := devpg.Start(ctx, &devpg.Options{Fsync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	fmt.Printf("PostgreSQL %s: %s\n\n", server.Version, server.Source)

	_, err = demo(ctx, server.URL, os.Stdout, 150*time.Millisecond)
	return err
}

// demo fulfils an order in a schema of its own, which it drops, and returns the task as it ended.
func demo(ctx context.Context, databaseURL string, out io.Writer, moment time.Duration) (done *taskgraph.Task, err error) {
	schema := fmt.Sprintf("taskgraph_%d", os.Getpid())
	defer func() { err = errors.Join(err, dropSchema(context.WithoutCancel(ctx), databaseURL, schema)) }()
	p, err := pgwake.Open(ctx, databaseURL, &pgwake.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()
	e, err := taskgraph.New(ctx, p, &taskgraph.Config{
		Backoff: taskgraph.Backoff{Base: moment}, // or else the first retry comes after 2 s
		Logger:  slog.New(slog.DiscardHandler),   // what fails is shown below
	})
	if err != nil {
		return nil, err
	}
	handlers(e, moment)
	if err := e.Register(ctx, definition()); err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "%s\n", definition().View().Text(nil))
	stay, err := show.Console(ctx, out, p, console.Options{Tasks: e.Graph})
	if err != nil {
		return nil, err
	}

	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- e.Run(running) }()
	defer func() { stop(); err = errors.Join(err, <-ended) }()
	defer func() { err = stay(err) }()

	submitted, err := e.Submit(ctx, taskgraph.Submission{
		Namespace: namespace, Name: name, Version: version, IdempotencyKey: "order-7",
		Context: order{ID: 7, Items: []string{"a kettle", "two cups", "tea"}},
	})
	if err != nil {
		return nil, err
	}
	return follow(ctx, e, submitted.ID, out)
}

// follow tells what changes until the task has ended, and puts right by hand what no attempt can.
func follow(ctx context.Context, e *taskgraph.Engine, task string, out io.Writer) (*taskgraph.Task, error) {
	var began time.Time // by the server's clock
	var last taskgraph.Cursor
	tell := func() error {
		for {
			transitions, err := e.ReadTransitions(ctx, last, 100)
			if err != nil || len(transitions) == 0 {
				return err
			}
			for _, t := range transitions {
				last = t.Cursor()
				if t.TaskID != task {
					continue
				}
				if t.FromState == nil { // it was created
					if t.StepName == nil {
						began = t.CreatedAt
					}
					continue
				}
				what := "the task"
				if t.StepName != nil {
					what = *t.StepName
				}
				fmt.Fprintf(out, "%6.2f s  %-12s %s\n", t.CreatedAt.Sub(began).Seconds(), what, t.ToState)
			}
		}
	}
	for progress, err := range e.Watch(ctx, task) {
		if err == nil {
			err = tell()
		}
		if err != nil {
			return nil, err
		}
		if progress.State != taskgraph.TaskBlockedByFailures {
			continue
		}
		steps, err := e.Steps(ctx, task)
		if err != nil {
			return nil, err
		}
		for _, s := range steps {
			if s.State != taskgraph.StepError {
				continue
			}
			fmt.Fprintf(out, "\n          %s has failed for good: %s. Somebody writes the label by hand.\n\n", s.Name, s.Err())
			if _, err := e.CompleteStep(ctx, s.ID, "Main Street 7", "asked the customer"); err != nil {
				return nil, err
			}
		}
	}
	done, err := e.Wait(ctx, task)
	if err != nil {
		return nil, err
	}
	view, err := e.View(ctx, task)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "\n%s", view.Text(nil))
	return done, nil
}

func dropSchema(ctx context.Context, databaseURL, schema string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
	return err
}
