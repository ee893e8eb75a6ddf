package cloudevents_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/adapter/cloudevents"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/exampletb"
)

// opened is a Bus on a schema of its own.
func opened() (*eventbus.Bus, func()) {
	tb := &exampletb.TB{}
	bus, err := eventbus.New(context.Background(), schemas.New(tb, nil), &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	return bus, tb.End
}

// A CloudEvent comes in and is emitted. A handler sees an event like any other, and has it go on as the CloudEvent that it was.
func Example() {
	ctx := context.Background()
	bus, end := opened()
	defer end()
	node, err := bus.Node(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	lines := make(chan string, 2)
	err = node.On(ctx, "com.example.order.#", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		lines <- fmt.Sprintf("%s of %s: %s", e.Type, e.Key, e.Payload)
		ce, err := cloudevents.FromEvent(e, "https://shop.example")
		if err != nil {
			return eventbus.DeadLetter(err)
		}
		data, err := json.Marshal(ce)
		if err != nil {
			return eventbus.DeadLetter(err)
		}
		lines <- string(data)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := node.Start(ctx); err != nil {
		log.Fatal(err)
	}

	var ce event.Event
	err = json.Unmarshal([]byte(`{"specversion": "1.0", "id": "A234", "source": "https://partner.example/orders", "type": "com.example.order.created",
		"subject": "customer-7", "tenant": "acme", "datacontenttype": "application/json", "data": {"id": 7}}`), &ce)
	if err != nil {
		log.Fatal(err)
	}
	emission, err := cloudevents.ToEmission(ce)
	if err != nil {
		log.Fatal(err) // whoever sent it is to be told
	}
	for range 2 { // it comes twice, and is handled once
		if _, err := bus.EmitMany(ctx, []eventbus.Emission{emission}); err != nil {
			log.Fatal(err)
		}
	}

	fmt.Println(<-lines)
	fmt.Println(<-lines)
	if err := node.Stop(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// com.example.order.created of customer-7: {"id": 7}
	// {"specversion":"1.0","id":"A234","source":"https://partner.example/orders","type":"com.example.order.created","subject":"customer-7","datacontenttype":"application/json","data":{"id":7},"tenant":"acme"}
}

func ExampleFromEvent() {
	ce, err := cloudevents.FromEvent(&eventbus.Event{ // as a handler gets it
		ID: 17, Namespace: "shop", Type: "order.created", Payload: json.RawMessage(`{"id": 7}`), Key: "customer-7", Producer: "api-1",
		EmittedAt: time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC), Headers: map[string]string{"tenant": "acme"},
	}, "https://shop.example")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ce)
	// Output:
	// Context Attributes,
	//   specversion: 1.0
	//   type: order.created
	//   source: https://shop.example/shop/api-1
	//   subject: customer-7
	//   id: 17
	//   time: 2026-11-21T10:30:00Z
	//   datacontenttype: application/json
	// Extensions,
	//   tenant: acme
	// Data,
	//   {
	//     "id": 7
	//   }
}
