package eventbus_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
)

// These stand in docs/outbox.md and docs/schedules.md.

type placed struct {
	ID       int    `json:"id"`
	Customer string `json:"customer"`
}

// place writes an order, and the event that tells of it: both, or neither.
func place(ctx context.Context, bus *eventbus.Bus, tx pgx.Tx, o placed) error {
	if _, err := tx.Exec(ctx, `INSERT INTO shop.orders (id, customer) VALUES ($1, $2)`, o.ID, o.Customer); err != nil {
		return err
	}
	_, err := bus.WithTx(tx).Emit(ctx, "order.placed", o, &eventbus.EmitOptions{Key: fmt.Sprint("order ", o.ID)})
	return err
}

// bill has an effect in the database, so it is exactly once: the invoice and the end of the delivery are one transaction.
func bill(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
	var o placed
	if err := e.Decode(&o); err != nil {
		return eventbus.DeadLetter(err) // no other attempt would help
	}
	_, err := tx.Exec(ctx, `INSERT INTO shop.invoices (order_id) VALUES ($1)`, o.ID)
	return err
}

// publisher is a broker, or another service.
type publisher interface {
	Publish(ctx context.Context, id, topic, key string, payload []byte) error
}

// relay sends every event on, at least once and those of a key in their order. The other side can tell by the id what it has.
func relay(ctx context.Context, node *eventbus.Node, to publisher) error {
	return node.OnPlain(ctx, "#", func(ctx context.Context, e *eventbus.Event) error {
		return to.Publish(ctx, fmt.Sprint(e.ID), e.Type, e.Key, e.Payload) // an error: again, after a pause
	})
}

type broker chan string

func (b broker) Publish(_ context.Context, _, topic, key string, payload []byte) error {
	b <- fmt.Sprintf("%s of %s %s", topic, key, payload)
	return nil
}

func Example_outbox() {
	ctx := context.Background()
	p, end := opened("shop")
	defer end()
	if _, err := p.Pool().Exec(ctx, `CREATE TABLE shop.orders (id int PRIMARY KEY, customer text); CREATE TABLE shop.invoices (order_id int)`); err != nil {
		log.Fatal(err)
	}
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	to := make(broker)
	billing, err1 := bus.Node(ctx, &eventbus.NodeConfig{Group: "billing"})
	sending, err2 := bus.Node(ctx, &eventbus.NodeConfig{Group: "broker"})
	if err := errors.Join(err1, err2); err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(billing.On(ctx, "order.placed", bill), relay(ctx, sending, to), billing.Start(ctx), sending.Start(ctx)); err != nil {
		log.Fatal(err)
	}
	for _, payment := range []error{errors.New("the card is refused"), nil} {
		err := pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error {
			return errors.Join(place(ctx, bus, tx, placed{7, "ada"}), payment)
		})
		fmt.Println("placed:", err == nil)
	}
	fmt.Println(<-to)
	invoices := 0
	for invoices == 0 {
		if err := p.Pool().QueryRow(ctx, `SELECT count(*) FROM shop.invoices`).Scan(&invoices); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(invoices, "invoice")
	if err := errors.Join(billing.Stop(ctx), sending.Stop(ctx)); err != nil {
		log.Fatal(err)
	}
	// Output:
	// placed: false
	// placed: true
	// order.placed of order 7 {"id": 7, "customer": "ada"}
	// 1 invoice
}

// Find is for people who look: the latest first, page by page.
func ExampleBus_Find() {
	ctx := context.Background()
	p, end := opened("example_find")
	defer end()
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	for order := range 5 {
		if _, err := bus.Emit(ctx, "order.created", map[string]int{"order": order}, &eventbus.EmitOptions{Key: "ada"}); err != nil {
			log.Fatal(err)
		}
	}
	f := eventbus.FindFilter{Types: []string{"order.created"}, Key: "ada", Limit: 2}
	for {
		found, err := bus.Find(ctx, &f)
		if err != nil {
			log.Fatal(err)
		}
		if len(found) == 0 {
			break
		}
		for _, e := range found {
			fmt.Println(string(e.Payload))
		}
		fmt.Println("--")
		f.Before = found[len(found)-1].Cursor()
	}
	// Output:
	// {"order": 4}
	// {"order": 3}
	// --
	// {"order": 2}
	// {"order": 1}
	// --
	// {"order": 0}
	// --
}

// keepSchedules makes the schedules of a program, or changes them to this. Every process may call it whenever it begins.
func keepSchedules(ctx context.Context, bus *eventbus.Bus) error {
	for _, s := range []eventbus.Schedule{
		{Name: "report", Cron: "0 7 * * mon-fri", TimeZone: "Europe/Berlin", Work: "report.build", Payload: map[string]string{"for": "sales"}},
		{Name: "tick", Cron: "@every 1s", Type: "clock.ticked"},
		{Name: "sync", Cron: "*/15 * * * *", Work: "crm.sync", CatchUp: eventbus.CatchUpSkip, Overlap: eventbus.OverlapSkip, Jitter: time.Minute},
	} {
		if _, err := bus.Schedule(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// runSchedules has a process carry schedules out, and handle what comes of them.
func runSchedules(ctx context.Context, p *pgwake.Provider, bus *eventbus.Bus, build func(context.Context, map[string]string) (struct{}, error)) error {
	node, err := bus.Node(ctx, nil)
	if err != nil {
		return err
	}
	if err := node.Start(ctx); err != nil { // of the namespace: it has the schedules, whether or not it handles events
		return err
	}
	defer node.Stop(context.WithoutCancel(ctx))
	d := dispatch.New(p, &dispatch.Config{Namespaces: []string{bus.Namespace()}})
	dispatch.Handle(d, "report.build", build)
	return d.Run(ctx)
}

func Example_schedules() {
	p, end := opened("example_schedules")
	defer end()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Namespace: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(keepSchedules(ctx, bus), keepSchedules(ctx, bus)); err != nil { // to say it again changes nothing
		log.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		ended <- runSchedules(ctx, p, bus, func(_ context.Context, report map[string]string) (struct{}, error) {
			fmt.Println("a report for", report["for"])
			stop()
			return struct{}{}, nil
		})
	}()
	if _, err := bus.RunSchedule(context.Background(), "report"); err != nil { // now, beside its times; ctx may be over before it returns
		log.Fatal(err)
	}
	if err := <-ended; err != nil {
		log.Fatal(err)
	}
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		log.Fatal(err)
	}
	schedules, err := bus.Schedules(context.Background(), "", 10)
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range schedules {
		if s.Name == "report" {
			fmt.Println("the next one comes at", s.Next.In(berlin).Format("15:04"))
		}
	}
	// Output:
	// a report for sales
	// the next one comes at 07:00
}
