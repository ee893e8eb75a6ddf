// Eventbus has a shop and its billing, two services that know of each other by events alone, and shows what becomes of an event.
//
//	go run ./examples/eventbus
//	go run ./examples/eventbus -console 127.0.0.1:7276 # and look at it in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes whatever it made there. An
// order and the event that tells of it are written in one transaction, so that one which is rolled back tells nobody; an event that cannot
// be handled becomes a dead letter, and is handled after all once the fault is mended; and a service that comes last gets what was there
// before it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/examples/internal/show"
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
	fmt.Printf("PostgreSQL %s: %s\n", server.Version, server.Source)

	_, err = demo(ctx, server.URL, os.Stdout)
	return err
}

// result is what is in the database at the end.
type result struct {
	Orders   []string // with the number of the invoice
	Log      []string // the types and keys of all events, in the order in which they were emitted
	Takings  []string // of each country
	Attempts int      // of the dead letter
}

// demo tells the whole story in a schema of its own, which it drops.
func demo(ctx context.Context, databaseURL string, out io.Writer) (r *result, err error) {
	schema := fmt.Sprintf("eventbus_%d", os.Getpid())
	defer func() { err = errors.Join(err, dropSchema(context.WithoutCancel(ctx), databaseURL, schema)) }()
	d := &deployment{databaseURL: databaseURL, schema: schema, out: out, happened: make(chan string, 100), seen: map[string]bool{}}
	// Every service is stopped before the schema is dropped, and what its handlers do is committed by then.
	defer func() { err = errors.Join(err, d.stop(context.WithoutCancel(ctx))) }()

	shop, err := d.shop(ctx)
	if err != nil {
		return nil, err
	}
	stay, err := show.Console(ctx, out, shop.p, console.Options{Events: shop.bus})
	if err != nil {
		return nil, err
	}
	defer func() { err = stay(err) }()
	billing, err := d.billing(ctx)
	if err != nil {
		return nil, err
	}

	d.chapter("Three orders, and one that is not to be")
	for _, o := range []order{{1, "a kettle", "DE", 3000}, {2, "two cups", "FR", 1200}, {3, "a lamp", "DE", 9900}, {4, "tea", "NZ", 800}} {
		switch err := shop.place(ctx, o); {
		case errors.Is(err, errRefused):
			d.say("shop", "order %d is rolled back (%v), and its event with it", o.ID, err)
		case err != nil:
			return nil, err
		}
	}
	if err := d.until(ctx, "invoiced 1", "invoiced 2"); err != nil {
		return nil, err
	}
	letter, err := d.deadLetter(ctx, billing)
	if err != nil {
		return nil, err
	}

	d.chapter("Billing has given up order 4")
	d.say("operator", "a dead letter of group %s: %s after %d attempts: %s", letter.Group, letter.Event.Type, letter.Attempts, letter.Error)

	d.chapter("Somebody enters the rate, and has the event delivered once more")
	if _, err := billing.p.Pool().Exec(ctx, `INSERT INTO tax_rates VALUES ('NZ', 15)`); err != nil {
		return nil, err
	}
	// To billing alone: it is from there. The event keeps its id.
	if _, err := billing.bus.Redrive(ctx, &eventbus.LetterFilter{Group: billing.group}); err != nil {
		return nil, err
	}
	if err := d.until(ctx, "invoiced 4"); err != nil {
		return nil, err
	}

	d.chapter("Statistics is new, and begins at the beginning; events without a common key may come in any order")
	statistics, err := d.statistics(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.until(ctx, "counted 1", "counted 2", "counted 4"); err != nil {
		return nil, err
	}

	// All three are stopped here: then their handlers have ended, and what they did is committed.
	for _, s := range []*service{shop, billing, statistics} {
		if err := s.node.Stop(ctx); err != nil {
			return nil, err
		}
	}
	r = &result{Attempts: letter.Attempts}
	if r.Orders, err = texts(ctx, shop, `SELECT format('order %s: %s, invoice %s', id, item, invoice) FROM orders ORDER BY id`); err != nil {
		return nil, err
	}
	if r.Takings, err = texts(ctx, shop, `SELECT format('%s %s orders, %s cents', country, orders, cents) FROM takings ORDER BY country`); err != nil {
		return nil, err
	}
	d.chapter("In the end")
	for _, line := range append(r.Orders, r.Takings...) {
		fmt.Fprintf(out, "  %s\n", line)
	}
	d.chapter("The log, which any program can read by a cursor")
	r.Log, err = d.log(ctx, shop, 6)
	return r, err
}

// deadLetter looks for a dead letter of the namespace until there is one, as somebody would whom a metric has called.
func (d *deployment) deadLetter(ctx context.Context, s *service) (letter eventbus.Letter, err error) {
	err = look(ctx, func() (bool, error) {
		letters, err := s.bus.DeadLetters(ctx, nil)
		if len(letters) > 0 {
			letter = letters[0]
		}
		return len(letters) > 0, err
	})
	return letter, err
}

// log reads and prints the log, a page at a time, until there are so many events: it waits for transactions that write, whoever's.
func (d *deployment) log(ctx context.Context, s *service, events int) (log []string, err error) {
	var after eventbus.Cursor // the beginning; a program would keep the one of the last event that it has read
	err = look(ctx, func() (bool, error) {
		page, err := s.node.Read(ctx, after, 10)
		for _, e := range page {
			after = e.Cursor()
			fmt.Fprintf(d.out, "  event %d  %-12s  key %s  by %-9s  %s\n", e.ID, e.Type, e.Key, e.Producer, e.Payload)
			log = append(log, e.Type+" "+e.Key)
		}
		return len(log) >= events, err
	})
	return log, err
}

// texts returns the only column of a query.
func texts(ctx context.Context, s *service, sql string) ([]string, error) {
	rows, err := s.p.Pool().Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func dropSchema(ctx context.Context, databaseURL, schema string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
	return err
}
