package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: which services are there, and what do they do with events? Each has a pool, a Provider and a group of its own, as in
// a process of its own.

const (
	namespace = "store"
	attempts  = 3
)

type order struct {
	ID      int    `json:"id"`
	Item    string `json:"item"`
	Country string `json:"country"`
	Cents   int    `json:"cents"`
}

type invoice struct {
	Number string `json:"number"`
	Order  int    `json:"order"`
	Cents  int    `json:"cents"`
}

// deployment is the services, and what is told of them.
type deployment struct {
	databaseURL, schema string
	services            []*service

	mu       sync.Mutex
	out      io.Writer
	happened chan string // what handlers have done, or are about to
	seen     map[string]bool
}

type service struct {
	d     *deployment
	group string
	pool  *pgxpool.Pool
	p     *pgwake.Provider
	bus   *eventbus.Bus
	node  *eventbus.Node
}

// open makes a service with one node; a second process of the same group would share its events.
func (d *deployment) open(ctx context.Context, group string) (*service, error) {
	config, err := pgxpool.ParseConfig(d.databaseURL)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.RuntimeParams["search_path"] = d.schema // for the tables of the services
	config.MaxConns = 8
	s := &service{d: d, group: group}
	pgwake.TunePool(config)
	if s.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	d.services = append(d.services, s)
	if s.p, err = pgwake.New(ctx, s.pool, &pgwake.Config{Schema: d.schema}); err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler) // what fails is shown
	if s.bus, err = eventbus.New(ctx, s.p, &eventbus.Config{Namespace: namespace, Logger: quiet}); err != nil {
		return nil, err
	}
	s.node, err = s.bus.Node(ctx, &eventbus.NodeConfig{
		ID: group + "-1", Group: group, Concurrency: 4, MaxAttempts: attempts,
		Retry: dispatch.Backoff(50*time.Millisecond, time.Second), // or else the first pause is 1 s
	})
	return s, err
}

// stop ends all services: handlers first.
func (d *deployment) stop(ctx context.Context) (err error) {
	for _, s := range d.services {
		if s.node != nil {
			err = errors.Join(err, s.node.Stop(ctx))
		}
		if s.p != nil {
			err = errors.Join(err, s.p.Close(ctx))
		}
		s.pool.Close()
	}
	return err
}

// errRefused is what comes of an order above the limit of the customer's card.
var errRefused = errors.New("the card is refused")

const cardLimit = 5000

// shop takes orders, and notes which of them are invoiced.
func (d *deployment) shop(ctx context.Context) (*service, error) {
	s, err := d.open(ctx, "shop")
	if err != nil {
		return nil, err
	}
	if _, err := s.pool.Exec(ctx, `CREATE TABLE orders (id int PRIMARY KEY, item text NOT NULL, invoice text)`); err != nil {
		return nil, err
	}
	err = s.node.On(ctx, "invoice.*", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var i invoice
		if err := e.Decode(&i); err != nil {
			return eventbus.DeadLetter(err) // no further attempt would help
		}
		if _, err := tx.Exec(ctx, `UPDATE orders SET invoice = $1 WHERE id = $2`, i.Number, i.Order); err != nil {
			return err
		}
		d.say("shop", "order %d has invoice %s", i.Order, i.Number)
		return d.tell(ctx, "invoiced %d", i.Order)
	})
	if err != nil {
		return nil, err
	}
	return s, s.node.Start(ctx)
}

// place writes an order and its event in one transaction: there is never one without the other.
func (s *service) place(ctx context.Context, o order) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO orders (id, item) VALUES ($1, $2)`, o.ID, o.Item); err != nil {
			return err
		}
		// The key has the events of an order come one at a time, in their order.
		id, err := s.node.WithTx(tx).Emit(ctx, "order.placed", o, &eventbus.EmitOptions{Key: fmt.Sprint(o.ID)})
		if err != nil {
			return err
		}
		if o.Cents > cardLimit {
			return errRefused
		}
		s.d.say("shop", "order %d of %s: event %d", o.ID, o.Item, id)
		return nil
	})
}

// billing sends invoices for orders.
func (d *deployment) billing(ctx context.Context) (*service, error) {
	s, err := d.open(ctx, "billing")
	if err != nil {
		return nil, err
	}
	if _, err := s.pool.Exec(ctx, `CREATE TABLE tax_rates (country text PRIMARY KEY, percent int NOT NULL);
		CREATE TABLE invoices (number text PRIMARY KEY, cents int NOT NULL);
		INSERT INTO tax_rates VALUES ('DE', 19), ('FR', 20)`); err != nil {
		return nil, err
	}
	err = s.node.On(ctx, "order.placed", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var o order
		if err := e.Decode(&o); err != nil {
			return eventbus.DeadLetter(err)
		}
		var percent int
		err := tx.QueryRow(ctx, `SELECT percent FROM tax_rates WHERE country = $1`, o.Country).Scan(&percent)
		if errors.Is(err, pgx.ErrNoRows) {
			d.say("billing", "order %d, attempt %d: there is no tax rate of %s", o.ID, e.Redelivery+1, o.Country)
			return fmt.Errorf("there is no tax rate of %s", o.Country)
		}
		if err != nil {
			return err
		}
		// The invoice, the event that tells of it and the end of the delivery are one transaction.
		i := invoice{Number: fmt.Sprintf("%s-%d", o.Country, o.ID), Order: o.ID, Cents: o.Cents * (100 + percent) / 100}
		if _, err := tx.Exec(ctx, `INSERT INTO invoices VALUES ($1, $2)`, i.Number, i.Cents); err != nil {
			return err
		}
		id, err := s.node.WithTx(tx).Emit(ctx, "invoice.sent", i, &eventbus.EmitOptions{Key: e.Key})
		if err != nil {
			return err
		}
		d.say("billing", "invoice %s of %d cents: event %d", i.Number, i.Cents, id)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s, s.node.Start(ctx)
}

// statistics adds up what was ordered, from the first order on, whenever that was.
func (d *deployment) statistics(ctx context.Context) (*service, error) {
	s, err := d.open(ctx, "statistics")
	if err != nil {
		return nil, err
	}
	if _, err := s.pool.Exec(ctx, `CREATE TABLE takings (country text PRIMARY KEY, orders int NOT NULL, cents int NOT NULL)`); err != nil {
		return nil, err
	}
	// The group is made by this, and not by On, which has it begin now.
	if err := s.bus.Subscribe(ctx, s.group, []string{"order.placed"}, &eventbus.SubscribeOptions{FromBeginning: true}); err != nil {
		return nil, err
	}
	err = s.node.On(ctx, "order.placed", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var o order
		if err := e.Decode(&o); err != nil {
			return eventbus.DeadLetter(err)
		}
		// That this adds up right is what exactly once is for.
		if _, err := tx.Exec(ctx, `INSERT INTO takings AS t VALUES ($1, 1, $2)
			ON CONFLICT (country) DO UPDATE SET orders = t.orders + 1, cents = t.cents + excluded.cents`, o.Country, o.Cents); err != nil {
			return err
		}
		d.say("statistics", "order %d, of which event %d told %v ago", o.ID, e.ID, time.Since(e.EmittedAt).Round(time.Millisecond))
		return d.tell(ctx, "counted %d", o.ID)
	})
	if err != nil {
		return nil, err
	}
	return s, s.node.Start(ctx)
}

func (d *deployment) chapter(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, "\n%s\n", fmt.Sprintf(format, args...))
}

func (d *deployment) say(who, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, "  %-10s %s\n", who, fmt.Sprintf(format, args...))
}

// tell says to until that something happens.
func (d *deployment) tell(ctx context.Context, format string, args ...any) error {
	select {
	case d.happened <- fmt.Sprintf(format, args...):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// until waits until all of these have happened.
func (d *deployment) until(ctx context.Context, all ...string) error {
	for _, what := range all {
		for !d.seen[what] {
			select {
			case happened := <-d.happened:
				d.seen[happened] = true
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

// look calls f again and again until it says that it has what it looks for. For what is pushed to handlers nobody has to look.
func look(ctx context.Context, f func() (bool, error)) error {
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		if found, err := f(); found || err != nil {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
