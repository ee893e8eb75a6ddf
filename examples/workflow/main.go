// Workflow is a durable workflow that goes on elsewhere when the node that runs it stops dead, written with nothing
// but pgwake: no workflow engine.
//
//	go run ./examples/workflow
//	go run ./examples/workflow -console 127.0.0.1:7276 # and look at it in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. Everything of interest is in package order beside this file:
//
//	order.go    the workflow: what happens to an order, as a plain function
//	replay.go   how such a function lives on in its history; pure, without a database
//	runtime.go  the dispatcher loops that connect the two to a Provider
//	run.go      this demonstration: a process that dies, one that takes over, and a customer
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/examples/workflow/order"
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

	_, err = order.Run(ctx, server.URL, func(line string) { fmt.Println(line) })
	return err
}
