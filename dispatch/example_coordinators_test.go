package dispatch_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

func ExampleCoordinators() {
	ctx, p, end := openProvider()
	defer end()
	done := make(chan string)
	handlers := func(d *dispatch.Dispatcher) {
		d.Handle("invoice.send", func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			done <- item.Namespace
			return nil, nil
		})
	}
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{
		{Name: "tenants", Namespaces: []string{"tenant-*"}, Handlers: handlers},
		{Namespaces: []string{"tenant-large"}, Extends: "tenants", Config: dispatch.Config{Concurrency: 50}},
	}})
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }() // in a program: return c.Run(ctx)

	// A tenant's first item is all it takes.
	_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "invoice.send"}, &pgwake.EnqueueOptions{Namespace: "tenant-a"})
	check(err)
	fmt.Println(<-done)
	stop()
	check(<-ended)
	// Output: tenant-a
}

// A namespace in a database of its own: its items, and what is done about them, are there.
func ExampleShard() {
	ctx, first, end := openProvider()
	defer end()
	_, second, endOther := openProvider()
	defer endOther()
	firstPool, secondPool := first.Pool(), second.Pool() // in a program: pools with room for the handlers
	names := map[dispatch.Source]string{first: "first", second: "second"}
	done := make(chan string)
	handlers := func(d *dispatch.Dispatcher) {
		dispatch.HandleTx(d, "invoice.send", func(ctx context.Context, tx pgx.Tx, _ struct{}) (struct{}, error) {
			done <- dispatch.ItemFrom(ctx).Namespace + " in the " + names[dispatch.SourceFrom(ctx)]
			return struct{}{}, nil
		})
	}
	c := dispatch.NewCoordinators(first, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: handlers, Config: dispatch.Config{Begin: firstPool.Begin}}},
		Shards: []dispatch.Shard{{Namespaces: []string{"tenant-large"}, Source: second, Begin: secondPool.Begin}},
	})
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	for _, namespace := range []string{"tenant-a", "tenant-large"} {
		p := c.SourceOf(namespace).(*pgwake.Provider)
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "invoice.send"}, &pgwake.EnqueueOptions{Namespace: namespace})
		check(err)
		fmt.Println(<-done)
	}
	stop()
	check(<-ended)
	// Output:
	// tenant-a in the first
	// tenant-large in the second
}

// Probes of a process: it is ready while namespaces are served.
func ExampleCoordinators_HealthHandler() {
	_, p, end := openProvider()
	defer end()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: func(*dispatch.Dispatcher) {}}},
	})
	mux := http.NewServeMux()
	mux.Handle("/probes/", c.HealthHandler())
	server := httptest.NewServer(mux) // in a program: an http.Server that only the cluster reaches
	defer server.Close()
	for _, path := range []string{"/probes/livez", "/probes/readyz"} {
		answer, err := http.Get(server.URL + path)
		check(err)
		check(answer.Body.Close())
		fmt.Println(path, answer.StatusCode) // Run has not begun
	}
	// Output:
	// /probes/livez 200
	// /probes/readyz 503
}

func ExampleRouter() {
	ctx, p, end := openProvider()
	defer end()
	lines := make(chan string)
	says := func(line string) dispatch.Handler {
		return func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			lines <- line
			return nil, nil
		}
	}
	router, err := dispatch.Router([]dispatch.Route{
		{Namespace: "tenant-*", MinPriority: 5, Handler: says("at once")},
		{Namespace: "tenant-*", Handler: says("soon")},
	}, says("whenever"))
	check(err)
	d := dispatch.New(p, &dispatch.Config{Concurrency: 1})
	d.HandleOthers(router)
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	for _, o := range []pgwake.EnqueueOptions{{Namespace: "tenant-a", Priority: 7}, {Namespace: "tenant-a"}, {Namespace: "other"}} {
		_, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, &o)
		check(err)
		fmt.Println(<-lines)
	}
	stop()
	check(<-ended)
	// Output:
	// at once
	// soon
	// whenever
}

func ExampleCoordinators_SetRollout() {
	_, p, end := openProvider()
	defer end()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{
		Groups:  []dispatch.Group{{Namespaces: []string{"*"}, Handlers: func(*dispatch.Dispatcher) {}}},
		Rollout: dispatch.Percent(0, pgwake.ModeHybrid, pgwake.ModePolling),
	})
	check(c.Spawn("tenant-a"))
	check(c.Spawn("tenant-b"))
	fmt.Println(p.GetModes())
	check(c.SetRollout(func(namespace string) pgwake.Mode {
		if namespace == "tenant-a" {
			return pgwake.ModeHybrid
		}
		return pgwake.ModePolling
	}))
	fmt.Println(p.GetModes())
	check(c.SetRollout(dispatch.Percent(100, pgwake.ModeHybrid, pgwake.ModePolling)))
	fmt.Println(p.GetModes())
	// Output:
	// polling map[]
	// hybrid map[tenant-b:polling]
	// hybrid map[]
}
