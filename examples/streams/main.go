// Streams has the same handlers serve whichever queue the configuration names: that of pgwake, one of pgmq, or a RabbitMQ.
//
//	go run ./examples/streams -stream pgwake
//	go run ./examples/streams -console 127.0.0.1:7276 # and look at the queue of pgwake in a browser, until Ctrl-C
//	go run ./examples/streams -stream pgmq
//	go run ./examples/streams -stream amqp -amqp amqp://guest:guest@localhost/
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes whatever it made there.
// For pgmq it makes a database of its own, with a stand-in where the server does not have pgmq, and says which it is. The RabbitMQ is the
// one at -amqp, or else at $PGWAKE_AMQP_URL: there is no other default. Its queues remain there, and are empty.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/amqp"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/examples/internal/show"
)

// config is what a program would read from its environment.
type config struct {
	stream      string // pgwake, pgmq or amqp
	databaseURL string // of the first two
	amqpURL     string
}

func main() {
	var c config
	flag.StringVar(&c.stream, "stream", "pgwake", "the queue: pgwake, pgmq or amqp")
	flag.StringVar(&c.amqpURL, "amqp", os.Getenv("PGWAKE_AMQP_URL"), "URL of the RabbitMQ for -stream amqp, such as "+amqpExample+"; defaults to $PGWAKE_AMQP_URL")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if err := run(ctx, c, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const amqpExample = "amqp://guest:guest@localhost/"

// check says what is wrong before anything is started.
func (c config) check() error {
	switch c.stream {
	case "pgwake", "pgmq":
		return nil
	case "amqp":
		if c.amqpURL == "" {
			return fmt.Errorf("stream amqp needs the URL of a RabbitMQ: set the flag -amqp, or PGWAKE_AMQP_URL, such as to %s", amqpExample)
		}
		return nil
	}
	return fmt.Errorf("there is no stream %q: it is pgwake, pgmq or amqp", c.stream)
}

func run(ctx context.Context, c config, out io.Writer) (err error) {
	if err := c.check(); err != nil {
		return err
	}
	if c.stream != "amqp" {
		server, err := devpg.Start(ctx, &devpg.Options{Fsync: true})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
		fmt.Fprintf(out, "PostgreSQL %s: %s\n\n", server.Version, server.Source)
		c.databaseURL = server.URL
	}
	return demo(ctx, c, out)
}

// open returns the stream that the configuration names. This is all that differs.
func open(ctx context.Context, c config, out io.Writer) (stream dispatch.EventStream, end func() error, err error) {
	switch c.stream {
	case "pgwake":
		return openPgwake(ctx, c.databaseURL, out)
	case "pgmq":
		return openPgmq(ctx, c.databaseURL, out)
	case "amqp":
		s, err := amqp.New(c.amqpURL, &amqp.Config{Prefix: "pgwake.example."})
		if err != nil {
			return nil, nil, fmt.Errorf("use the URL of -amqp or PGWAKE_AMQP_URL: %w", err)
		}
		return s, func() error { s.Close(); return nil }, nil
	}
	return nil, nil, c.check()
}

func openPgwake(ctx context.Context, databaseURL string, out io.Writer) (dispatch.EventStream, func() error, error) {
	schema := fmt.Sprintf("streams_%d", os.Getpid())
	p, err := pgwake.Open(ctx, databaseURL, &pgwake.Config{Schema: schema})
	if err != nil {
		return nil, nil, err
	}
	stay, err := show.Console(ctx, out, p, console.Options{})
	if err != nil {
		return nil, nil, errors.Join(err, p.Close(context.WithoutCancel(ctx)))
	}
	return dispatch.ProviderStream(p), func() error {
		return errors.Join(stay(nil), p.Close(context.WithoutCancel(ctx)), execute(context.WithoutCancel(ctx), databaseURL, "DROP SCHEMA "+schema+" CASCADE"))
	}, nil
}

func openPgmq(ctx context.Context, databaseURL string, out io.Writer) (_ dispatch.EventStream, end func() error, err error) {
	u, err := url.Parse(databaseURL)
	if err != nil {
		return nil, nil, err
	}
	database := fmt.Sprintf("streams_%d", os.Getpid())
	if err := execute(ctx, databaseURL, "CREATE DATABASE "+database); err != nil {
		return nil, nil, err
	}
	ends := []func() error{func() error {
		return execute(context.WithoutCancel(ctx), databaseURL, "DROP DATABASE "+database+" WITH (FORCE)")
	}}
	end = func() (err error) {
		for i := len(ends) - 1; i >= 0; i-- {
			err = errors.Join(err, ends[i]())
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, end())
		}
	}()
	u.Path = "/" + database
	pool, err := pgxpool.New(ctx, u.String())
	if err != nil {
		return nil, nil, err
	}
	ends = append(ends, func() error { pool.Close(); return nil })
	if _, err := pool.Exec(ctx, "CREATE EXTENSION pgmq"); err == nil {
		fmt.Fprintln(out, "pgmq: the extension of this server")
	} else {
		fmt.Fprintf(out, "pgmq: a stand-in, since the extension cannot be created: %v\n", err)
		if err := pgmqtest.Install(ctx, pool); err != nil {
			return nil, nil, err
		}
	}
	if err := pgmq.Install(ctx, pool); err != nil { // once, in a program
		return nil, nil, err
	}
	s, err := pgmq.New(ctx, pool, nil)
	if err != nil {
		return nil, nil, err
	}
	ends = append(ends, func() error { s.Close(); return nil })
	return s, end, nil
}

func execute(ctx context.Context, databaseURL, sql string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, sql)
	return err
}

type invoice struct {
	Number int `json:"number"`
}

// tenants have a namespace each, and nobody has told the Coordinators of them.
var tenants = []string{"acme", "initech", "umbrella"}

const invoices = 20 // of each

// demo publishes invoices, and waits until all of them are sent; every tenth fails the first time.
func demo(ctx context.Context, c config, out io.Writer) (err error) {
	stream, end, err := open(ctx, c, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	var sent, failed atomic.Int64
	all := make(chan struct{})
	handlers := func(d *dispatch.Dispatcher) {
		dispatch.Handle(d, "invoice.send", func(ctx context.Context, in invoice) (struct{}, error) {
			if in.Number%10 == 0 && dispatch.ItemFrom(ctx).Attempt == 1 {
				failed.Add(1)
				return struct{}{}, errors.New("the mail server is busy")
			}
			if sent.Add(1) == int64(len(tenants)*invoices) {
				close(all)
			}
			return struct{}{}, nil
		})
	}
	coordinators := dispatch.NewCoordinators(dispatch.StreamSource(stream, nil), &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{
		Namespaces: []string{"*"}, Handlers: handlers,
		Config: dispatch.Config{Retry: dispatch.Backoff(50*time.Millisecond, time.Second)},
	}}})
	serving, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- coordinators.Run(serving) }()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()
	begun := time.Now()
	for _, tenant := range tenants {
		for n := range invoices {
			message := dispatch.StreamMessage{Name: "invoice.send", Payload: fmt.Appendf(nil, `{"number": %d}`, n)}
			if err := stream.Publish(ctx, tenant, message); err != nil {
				return err
			}
		}
	}
	select {
	case <-all:
	case <-ctx.Done():
		return ctx.Err()
	}
	fmt.Fprintf(out, "%s: %d invoices of %d tenants sent in %v, %d of them at the second attempt\n",
		c.stream, sent.Load(), len(tenants), time.Since(begun).Round(time.Millisecond), failed.Load())
	return nil
}
