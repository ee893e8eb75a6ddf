package eventbus_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
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

// A node registers itself, subscribes with a handler, and emits.
func Example() {
	ctx := context.Background()
	p, end := opened("example_eventbus")
	defer end()
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "myapp", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	node, err := bus.Node(ctx, &eventbus.NodeConfig{ID: "api-server-1", DisplayName: "API Server", Metadata: map[string]string{"role": "producer"}})
	if err != nil {
		log.Fatal(err)
	}
	handled := make(chan string)
	err = node.On(ctx, "user.created", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var user struct{ UserID, Email string }
		if err := e.Decode(&user); err != nil {
			return eventbus.DeadLetter(err)
		}
		// What is done by tx happens exactly once for each event.
		handled <- user.UserID + " by " + e.Producer
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := node.Start(ctx); err != nil {
		log.Fatal(err)
	}
	if _, err := node.Emit(ctx, "user.created", map[string]string{"UserID": "123", "Email": "user@example.com"}, nil); err != nil {
		log.Fatal(err)
	}
	fmt.Println(<-handled)
	if err := node.Stop(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: 123 by api-server-1
}
