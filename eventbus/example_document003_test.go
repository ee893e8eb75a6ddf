package eventbus_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
)

// The usage example of document 003. A Provider is what it connects with, and it emits and subscribes as it does there; the
// id that Emit returns is the event's, as the log has it and as each handler gets it, in whatever group.
func Example_document003() {
	ctx := context.Background()
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		log.Fatal(err)
	}
	p, end := opened("example_document003")
	defer end()
	if _, err := p.Pool().Exec(ctx, `CREATE TABLE example_document003.user_events (user_id text, event_id bigint)`); err != nil {
		log.Fatal(err)
	}

	// Initialize the system.
	system, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "myapp", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}

	// Register a node.
	node, err := system.Node(ctx, &eventbus.NodeConfig{
		ID: "api-server-1", DisplayName: "API Server", Metadata: map[string]string{"role": "producer"},
	})
	if err != nil {
		log.Fatal(err)
	}

	// Register an event handler.
	handled := make(chan struct{}, 1)
	err = node.On(ctx, "user.created", func(ctx context.Context, event *eventbus.Event, tx pgx.Tx) error {
		var user struct {
			UserID string `json:"userId"`
		}
		if err := event.Decode(&user); err != nil {
			return eventbus.DeadLetter(err)
		}
		_, err := tx.Exec(ctx, `INSERT INTO example_document003.user_events (user_id, event_id) VALUES ($1, $2)`, user.UserID, event.ID)
		if err == nil {
			handled <- struct{}{}
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	// Start consuming.
	if err := node.Start(ctx); err != nil {
		log.Fatal(err)
	}

	// Emit an event.
	id, err := node.Emit(ctx, "user.created", map[string]string{"userId": "123", "email": "user@example.com"}, nil)
	if err != nil {
		log.Fatal(err)
	}

	// Schedule a recurring task.
	_, err = node.Schedule(ctx, eventbus.Schedule{
		Name: "daily-cleanup", Cron: "0 2 * * *", TimeZone: "Europe/Berlin", Type: "maintenance.cleanup", Payload: map[string]int{"retentionDays": 30},
	})
	if err != nil {
		log.Fatal(err)
	}
	schedules, err := node.Schedules(ctx, "", 10)
	if err != nil {
		log.Fatal(err)
	}

	<-handled
	if err := node.Stop(ctx); err != nil { // it waits for handlers: what they did is committed
		log.Fatal(err)
	}
	var user string
	if err := p.Pool().QueryRow(ctx, `SELECT user_id FROM example_document003.user_events WHERE event_id = $1`, id).Scan(&user); err != nil {
		log.Fatal(err)
	}
	fmt.Println("user", user, "was created")
	fmt.Println(schedules[0].Name, "comes at", schedules[0].Next.In(berlin).Format("15:04"))
	// Output:
	// user 123 was created
	// daily-cleanup comes at 02:00
}
