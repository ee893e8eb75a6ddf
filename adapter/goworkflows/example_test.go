package goworkflows_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/internal/devpg"
)

// opened is a Provider on a schema of its own, for the examples.
func opened(schema string) (*pgwake.Provider, func()) {
	ctx := context.Background()
	server, err := devpg.Start(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	drop := func() {
		conn, err := pgx.Connect(ctx, server.URL)
		if err == nil {
			_, err = conn.Exec(ctx, `DROP SCHEMA IF EXISTS `+pgx.Identifier{schema}.Sanitize()+` CASCADE`)
			err = errors.Join(err, conn.Close(ctx))
		}
		if err != nil {
			log.Fatal(err)
		}
	}
	drop()
	p, err := pgwake.Open(ctx, server.URL, &pgwake.Config{Schema: schema})
	if err != nil {
		log.Fatal(err)
	}
	return p, func() { _ = p.Close(ctx); drop(); _ = server.Stop(ctx) }
}

func reserve(_ context.Context, article string) (string, error) { return "shelf 3", nil }

func fulfil(ctx workflow.Context, article string) (string, error) {
	shelf, err := workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, reserve, article).Get(ctx)
	if err != nil {
		return "", err
	}
	to, _ := workflow.NewSignalChannel[string](ctx, "address").Receive(ctx)
	return fmt.Sprintf("%s, from %s to %s", article, shelf, to), nil
}

// runWorker carries workflows out until ctx ends.
func runWorker(ctx context.Context, p *pgwake.Provider) error {
	b, err := goworkflows.New(ctx, p, backend.WithStickyTimeout(5*time.Second))
	if err != nil {
		return err
	}
	defer b.Close()
	w := worker.New(b, b.WorkerOptions())
	if err := errors.Join(w.RegisterWorkflow(fulfil), w.RegisterActivity(reserve)); err != nil {
		return err
	}
	if err := w.Start(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	return w.WaitForCompletion()
}

func Example() {
	p, end := opened("example_goworkflows")
	defer end()
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan error)
	go func() { stopped <- runWorker(ctx, p) }()

	b, err := goworkflows.New(ctx, p)
	if err != nil {
		log.Fatal(err)
	}
	c := client.New(b)
	order, err := c.CreateWorkflowInstance(ctx, client.WorkflowInstanceOptions{InstanceID: "order-7"}, fulfil, "book")
	if err != nil {
		log.Fatal(err)
	}
	if err := c.SignalWorkflow(ctx, "order-7", "address", "Ada"); err != nil {
		log.Fatal(err)
	}
	if err := b.WaitForWorkflowInstance(ctx, order); err != nil {
		log.Fatal(err)
	}
	result, err := client.GetWorkflowResult[string](ctx, c, order, time.Second)
	fmt.Println(result, err)

	stop()
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}
	// Output: book, from shelf 3 to Ada <nil>
}

// The workflow begins if and only if the order is stored.
func ExampleBackend_WithTx() {
	p, end := opened("example_goworkflows_tx")
	defer end()
	ctx := context.Background()
	b, err := goworkflows.New(ctx, p)
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
		// ... INSERT INTO orders ...
		_, err := client.New(b.WithTx(tx)).CreateWorkflowInstance(ctx, client.WorkflowInstanceOptions{InstanceID: "order-8"}, fulfil, "lamp")
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	stats, err := b.GetStats(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(stats.ActiveWorkflowInstances, "is active")
	// Output: 1 is active
}
