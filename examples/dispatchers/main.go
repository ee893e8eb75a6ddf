// Dispatchers is a program whose work goes wrong in every way: handlers that fail, panic, take longer than their
// lease or never succeed, and a shutdown in the middle. Package dispatch deals with all of it. Of one kind of work only so
// much is at work at a time, over all processes; and a trace goes from who enqueues through the handler to what that enqueues.
//
//	go run ./examples/dispatchers
//	go run ./examples/dispatchers -stay -listen 127.0.0.1:8080 # until it is told to stop: curl 127.0.0.1:8080/readyz, kill -TERM
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. The part to reuse is service.go. /metrics and the probes are there while it runs, at an address that it
// prints, or that -listen says.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/dispatch"
	"go.opentelemetry.io/otel/sdk/trace"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "`address` of /metrics, /livez and /readyz")
	stay := flag.Bool("stay", false, "go on until a signal comes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once

	switch err := run(ctx, *listen, *stay); {
	case ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)): // it was told to stop, and did
		fmt.Fprintln(os.Stderr, "stopped")
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen string, stay bool) (err error) {
	server, err := devpg.Start(ctx, &devpg.Options{Fsync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	fmt.Printf("PostgreSQL %s: %s\n\n", server.Version, server.Source)

	_, err = demo(ctx, server.URL, listen, stay, os.Stdout)
	return err
}

const (
	places  = 6
	lease   = 3 * time.Second // short, so that the program is, too, but longer than a disk may stall
	samples = "samples"       // a namespace
)

// result is what came out.
type result struct {
	Done, Dead  int                 // items that were acknowledged, and given up
	DeadLetters []pgwake.DeadLetter // what became of those
	Balances    map[string]int      // of the accounts
	Samples     int64               // sum of all
	Transfers   int64               // most at one time
	Trace       []string            // names of the spans from the beginning to the mail that the report sends
	Stats       pgwake.Stats
}

// spans keeps what a collector would get.
type spans struct {
	mu   sync.Mutex
	list []trace.ReadOnlySpan
}

func (s *spans) ExportSpans(_ context.Context, list []trace.ReadOnlySpan) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, list...)
	return nil
}

func (s *spans) Shutdown(context.Context) error { return nil }

// path returns the names of the spans from the first of a trace to the deepest.
func (s *spans) path() (deepest []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	byID := map[any]trace.ReadOnlySpan{}
	for _, span := range s.list {
		byID[span.SpanContext().SpanID()] = span
	}
	for _, span := range s.list {
		var names []string
		for ok := true; ok; span, ok = byID[span.Parent().SpanID()] {
			names = append(names, span.Name())
		}
		if len(names) > len(deepest) {
			slices.Reverse(names)
			deepest = names
		}
	}
	return deepest
}

// demo runs a service on a schema of its own, which it drops.
func demo(ctx context.Context, databaseURL, address string, stay bool, out io.Writer) (r result, err error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return r, err
	}
	config.MaxConns = places + 4 // the transactions of handlers, and what dispatchers do beside; waiting needs none
	pgwake.TunePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return r, err
	}
	defer pool.Close()
	schema := fmt.Sprintf("dispatchers_%d", os.Getpid())
	defer func() {
		_, dropped := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()
	meters, err := newMeters()
	if err != nil {
		return r, err
	}
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: schema, Propagator: propagator, MeterProvider: meters})
	if err != nil {
		return r, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second) // the server may not answer
		defer cancel()
		err = errors.Join(err, p.Close(closing))
	}()
	_, err = pool.Exec(ctx, "CREATE TABLE "+schema+".accounts AS SELECT 'ada' AS owner, 100 AS balance UNION ALL SELECT 'grace', 0")
	if err != nil {
		return r, err
	}

	// Each process may say so when it begins, or somebody with psql when it is time: SELECT pgwake.set_limits(...).
	if err := p.SetLimits(ctx, pgwake.DefaultNamespace, limits); err != nil {
		return r, err
	}

	collector := &spans{}
	s, err := newService(p, meters, address, collector)
	if err != nil {
		return r, err
	}
	w := &world{provider: p, accounts: schema + ".accounts", encoderBegan: make(chan struct{})}
	work := w.work()
	settled := make(chan dispatch.Ended, len(work)+1) // each item leaves the queue once, and the report adds one
	logger := slog.New(slog.NewTextHandler(out, nil))
	common := dispatch.Config{
		Concurrency: places, LockTimeout: lease, MaxAttempts: 4, Begin: pool.Begin, StopTimeout: 10 * time.Second,
		Namespaces: []string{pgwake.DefaultNamespace}, Retry: dispatch.Backoff(30*time.Millisecond, time.Second),
		MeterProvider: meters, TracerProvider: s.tracers, Propagator: propagator, Logger: logger,
		OnEnd: func(e dispatch.Ended) {
			if e.Outcome == dispatch.Done || e.Outcome == dispatch.DeadLettered {
				settled <- e
			}
		},
	}
	single := dispatch.New(p, &common)
	w.register(single)
	batches := common
	batches.Concurrency, batches.Namespaces = 2, []string{samples}
	many := dispatch.New(p, &batches)
	many.HandleBatch("sample", 100, w.addSamples)
	s.dispatchers = []*dispatch.Dispatcher{single, many}

	running, shutDown := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.run(running) }()
	defer func() {
		shutDown()
		err = errors.Join(err, <-ended)
	}()
	fmt.Fprintf(out, "probes, metrics, console: http://%s/readyz /livez /metrics /console/\n", s.listener.Addr())

	beginning, span := s.tracers.Tracer("dispatchers").Start(ctx, "the day begins")
	_, err = p.EnqueueForWorkerMany(beginning, work)
	span.End()
	if err != nil {
		return r, err
	}
	count := func(e dispatch.Ended) {
		if e.Outcome == dispatch.Done {
			r.Done++
		} else {
			r.Dead++
		}
	}
	for others := len(work); others > 0; { // all but the video, and the mail of the report
		select {
		case e := <-settled:
			count(e)
			if e.Item.Name != "video.encode" {
				others--
			}
		case <-ctx.Done():
			return r, ctx.Err()
		}
	}
	select {
	case <-w.encoderBegan:
	case <-ctx.Done():
		return r, ctx.Err()
	}
	if stay {
		fmt.Fprintln(out, "nothing is left but the video: waiting for a signal")
		<-ctx.Done()
	}
	fmt.Fprintln(out, "shutting down: nothing is left but the video")
	shutDown()
	err = <-ended
	ended <- nil
	if err != nil {
		return r, err
	}
	fmt.Fprintln(out, "down")
	close(settled)
	for e := range settled {
		count(e)
	}
	if ctx.Err() != nil {
		return r, ctx.Err()
	}

	// One would look into the errors, mend what is broken, and call RedriveDeadLetters.
	if r.DeadLetters, err = p.ListDeadLetters(ctx, nil); err != nil {
		return r, err
	}
	rows, err := pool.Query(ctx, "SELECT owner, balance FROM "+w.accounts)
	if err != nil {
		return r, err
	}
	r.Balances = map[string]int{}
	var owner string
	var balance int
	_, err = pgx.ForEachRow(rows, []any{&owner, &balance}, func() error {
		r.Balances[owner] = balance
		return nil
	})
	if err != nil {
		return r, err
	}
	r.Samples, r.Transfers, r.Trace, r.Stats = w.samples.Load(), w.mostTransfers.Load(), collector.path(), p.Stats()
	r.print(out)
	return r, nil
}

func (r *result) print(out io.Writer) {
	fmt.Fprintf(out, "\n%d items done, %d given up\n", r.Done, r.Dead)
	for _, letter := range r.DeadLetters {
		fmt.Fprintf(out, "  a dead letter after %d attempts: %s %s: %s\n", letter.Attempts, letter.Name, letter.Data, letter.Error)
	}
	fmt.Fprintf(out, "balances after %d transfers, every fifth of which was tried twice: ada %d, grace %d\n",
		transferCount, r.Balances["ada"], r.Balances["grace"])
	fmt.Fprintf(out, "transfers of an account at work at a time: at most %d; the limit is %d\n", r.Transfers, limits.MaxRunningPerKey)
	fmt.Fprintf(out, "a trace: %s\n", strings.Join(r.Trace, " > "))

	s := r.Stats.Worker
	fmt.Fprintln(out, "\np.Stats().Worker")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "  items fetched\t%d\n", s.Items)
	fmt.Fprintf(table, "  queries for work\t%d\n", s.Looks)
	fmt.Fprintf(table, "  wake-ups\t%s\n", byReason(s.Tokens))
	fmt.Fprintf(table, "  queries that found some\t%s\n", byReason(s.Finds))
	fmt.Fprintf(table, "  found by the safety net\t%d\n", s.FallbackFinds+s.ScoutFinds)
	fmt.Fprintf(table, "  from the wake-up to the item\tp50 < %v, p99 < %v\n", s.WakeLatency.Quantile(0.5), s.WakeLatency.Quantile(0.99))
	table.Flush()
}

func byReason(counts map[string]int64) string {
	var list []string
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		if n := counts[reason]; n > 0 {
			list = append(list, fmt.Sprintf("%s %d", reason, n))
		}
	}
	return strings.Join(list, ", ")
}
