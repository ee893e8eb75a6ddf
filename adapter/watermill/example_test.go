package watermill_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"

	wm "github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/exampletb"
)

// opened is a Bus on a schema of its own, for the examples.
func opened() (*eventbus.Bus, func()) {
	tb := &exampletb.TB{}
	bus, err := eventbus.New(context.Background(), schemas.New(tb, nil), &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	return bus, tb.End
}

func Example() {
	bus, end := opened()
	defer end()
	pub, err := watermill.NewPublisher(bus, &watermill.PublisherConfig{Key: watermill.KeyOfTopic})
	if err != nil {
		log.Fatal(err)
	}
	sub, err := watermill.NewSubscriber(bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Group: "mailer"}})
	if err != nil {
		log.Fatal(err)
	}
	messages, err := sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	if err := pub.Publish("orders", message.NewMessage(wm.NewUUID(), []byte("order 7")), message.NewMessage(wm.NewUUID(), []byte("order 8"))); err != nil {
		log.Fatal(err)
	}
	for range 2 {
		m := <-messages
		fmt.Println(string(m.Payload))
		m.Ack()
	}
	if err := sub.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// order 7
	// order 8
}

// A router whose handler bills orders exactly once: what it writes, what it publishes, and the ack are one transaction.
func ExamplePublisher_WithTx() {
	ctx := context.Background()
	bus, end := opened()
	defer end()
	pub, err := watermill.NewPublisher(bus, nil)
	if err != nil {
		log.Fatal(err)
	}
	sub, err := watermill.NewSubscriber(bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Group: "billing"}, Transactional: true})
	if err != nil {
		log.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, wm.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	router.AddConsumerHandler("bill", "orders", sub, func(m *message.Message) error {
		tx := watermill.TxFrom(m.Context())
		// Here it may write the invoice by tx as well.
		return pub.WithTx(tx).Publish("invoices", message.NewMessage(wm.NewUUID(), append([]byte("invoice for "), m.Payload...)))
	})
	printed := make(chan struct{})
	printer, err := watermill.NewSubscriber(bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Group: "printer"}})
	if err != nil {
		log.Fatal(err)
	}
	router.AddConsumerHandler("print", "invoices", printer, func(m *message.Message) error {
		fmt.Println(string(m.Payload))
		close(printed)
		return nil
	})
	ran := make(chan error, 1)
	go func() { ran <- router.Run(ctx) }()
	<-router.Running()
	if err := pub.Publish("orders", message.NewMessage(wm.NewUUID(), []byte("order 7"))); err != nil {
		log.Fatal(err)
	}
	<-printed
	if err := router.Close(); err != nil {
		log.Fatal(err)
	}
	if err := <-ran; err != nil {
		log.Fatal(err)
	}
	// Output: invoice for order 7
}
