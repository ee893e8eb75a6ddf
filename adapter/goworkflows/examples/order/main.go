// Order is an order as a durable workflow of github.com/cschleiden/go-workflows on pgwake: activities, a timer, a signal and a sub-workflow,
// begun by a process that is killed, and finished by another.
//
//	go run ./adapter/goworkflows/examples/order
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there.
//
//	order.go    the workflow and its activities
//	process.go  a process that carries workflows out; the program starts two of itself
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/cschleiden/go-workflows/client"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

func main() {
	if schema := os.Getenv(workerVariable); schema != "" {
		if err := beWorker(place{os.Getenv("PGWAKE_DATABASE_URL"), schema}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once

	_, err := run(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "\ninterrupted")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const (
	articles  = 12
	diesAfter = 5 // reservations
	orderID   = "order-1"
)

// outcome is what came out.
type outcome struct {
	result  string
	effects map[string]int // by whom
	pids    [2]int
}

func run(ctx context.Context) (o outcome, err error) {
	server, err := devpg.Start(ctx, &devpg.Options{Fsync: true})
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	fmt.Printf("PostgreSQL %s: %s\n\n", server.Version, server.Source)

	return demonstrate(ctx, place{server.URL, fmt.Sprintf("order_%d", os.Getpid())})
}

// demonstrate has one order fulfilled, in a schema of its own, which it drops.
func demonstrate(ctx context.Context, at place) (o outcome, err error) {
	d, err := at.open(ctx)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, d.close(ctx, `DROP SCHEMA `+at.schema+` CASCADE`)) }()
	if _, err := d.pool.Exec(ctx, `CREATE TABLE effects (what text PRIMARY KEY, pid int NOT NULL)`); err != nil {
		return o, err
	}

	first, err := at.startWorker()
	if err != nil {
		return o, err
	}
	defer func() { _ = first.kill() }()
	c := client.New(d.backend)
	instance, err := c.CreateWorkflowInstance(ctx, client.WorkflowInstanceOptions{InstanceID: orderID}, Order, orderID, articles)
	if err != nil {
		return o, err
	}
	fmt.Printf("Process %d begins with %s of %d articles.\n", first.Process.Pid, orderID, articles)
	for n := 0; n < diesAfter; {
		if err := d.pool.QueryRow(ctx, `SELECT count(*) FROM effects`).Scan(&n); err != nil {
			return o, err
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err := first.kill(); err != nil {
		return o, err
	}
	died := time.Now()
	fmt.Printf("It has reserved %d of them when it is killed, in the middle of the next.\n", diesAfter)

	second, err := at.startWorker()
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, second.stop()) }()
	fmt.Printf("Process %d goes on, as soon as the leases of the first have ended.\n", second.Process.Pid)
	if err := c.SignalWorkflow(ctx, orderID, paid, 1995); err != nil {
		return o, err
	}
	if err := d.backend.WaitForWorkflowInstance(ctx, instance); err != nil {
		return o, err
	}
	if o.result, err = client.GetWorkflowResult[string](ctx, c, instance, time.Second); err != nil {
		return o, err
	}
	fmt.Printf("%.1f s after the first one's death the order is %s.\n\n", time.Since(died).Seconds(), o.result)

	o.pids, o.effects = [2]int{first.Process.Pid, second.Process.Pid}, map[string]int{}
	rows, err := d.pool.Query(ctx, `SELECT what, pid FROM effects ORDER BY what`)
	if err != nil {
		return o, err
	}
	var what string
	var pid int
	_, err = pgx.ForEachRow(rows, []any{&what, &pid}, func() error {
		o.effects[what] = pid
		fmt.Printf("  %-40s by process %d\n", what, pid)
		return nil
	})
	return o, err
}
