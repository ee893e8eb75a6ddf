package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/migrations"
	"github.com/spf13/cobra"
)

// This file answers: how quick is pgwake on this database, from this machine?
//
// All of it happens in a schema of its own, which is removed in the end, whatever happened. Beside each figure is what the
// database takes for the least that there is: a round trip, and the commit of a row.

// benchFlags say how much is measured.
type benchFlags struct {
	long               time.Duration
	dispatchers, batch int
	payload            int
}

// benchmark is what bench prints as JSON. Durations are in milliseconds.
type benchmark struct {
	Database    string   `json:"database"`
	Server      string   `json:"server"`
	RoundTrip   spread   `json:"round_trip_ms"`
	Commit      spread   `json:"commit_ms"`
	Hand        spread   `json:"enqueue_to_hand_ms"`
	Enqueued    rate     `json:"enqueued"`
	Done        rate     `json:"done"`
	Dispatchers int      `json:"dispatchers"`
	Batch       int      `json:"batch"`
	Listening   bool     `json:"listening"`
	Problems    []string `json:"problems,omitempty"`
}

// spread is how durations are distributed.
type spread struct {
	Samples int     `json:"samples"`
	P50     float64 `json:"p50"`
	P95     float64 `json:"p95"`
	P99     float64 `json:"p99"`
	Max     float64 `json:"max"`
}

// rate is how many there were in a time.
type rate struct {
	Items     int64   `json:"items"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
}

func (a *app) benchCommand() *cobra.Command {
	f := benchFlags{payload: 100}
	c := &cobra.Command{
		Use: "bench", Short: "Measure, in a schema of its own that is removed again, how quick the database is", Args: cobra.NoArgs,
		Long: `Measure how long an item takes from the enqueue to the hand of a dispatcher that waits, and how many items a second are enqueued and done.
It makes a schema of its own, for which the role needs CREATE on the database, and removes it in the end. It loads the server.`,
		RunE: func(c *cobra.Command, _ []string) error { return a.bench(c.Context(), f) },
	}
	s := c.Flags()
	s.DurationVar(&f.long, "for", 6*time.Second, "how long it measures, in all")
	s.IntVar(&f.dispatchers, "dispatchers", 10, "how many items are at work at a time")
	s.IntVar(&f.batch, "batch", 100, "how many items are enqueued at a time, when it is about how many")
	return c
}

func (a *app) bench(ctx context.Context, f benchFlags) error {
	if f.long < 300*time.Millisecond || f.dispatchers < 1 || f.batch < 1 || f.batch > pgwake.MaxFetch {
		return usagef("--for 6s --dispatchers 10 --batch 100", "so little, or so much, cannot be measured")
	}
	config, err := a.listenConfig()
	if err != nil {
		return err
	}
	schema := fmt.Sprintf("pgwake_bench_%d", rand.Uint64()>>1)
	if err := migrations.Up(ctx, config, schema); err != nil {
		return benchError(errors.Join(err, dropSchema(ctx, config, schema)), config)
	}
	result, err := a.measure(ctx, f, schema)
	if err := errors.Join(err, dropSchema(ctx, config, schema)); err != nil {
		return err
	}
	return a.printBenchmark(result)
}

func benchError(err error, config *pgx.ConnConfig) error {
	if isForbidden(err) {
		return &hinted{err, "GRANT CREATE ON DATABASE " + pgx.Identifier{config.Database}.Sanitize() + " TO " + pgx.Identifier{config.User}.Sanitize()}
	}
	return err
}

// dropSchema removes the schema, also when the command was interrupted.
func dropSchema(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, config)
	if err == nil {
		defer func() { _ = conn.Close(ctx) }()
		_, err = conn.Exec(ctx, `DROP SCHEMA IF EXISTS `+pgx.Identifier{schema}.Sanitize()+` CASCADE`)
	}
	if err != nil {
		return fmt.Errorf("remove the schema of the measurement, %s: %w", schema, err)
	}
	return nil
}

// measure takes its time by thirds: what the database takes, how soon an item is in hand, and how many are done.
func (a *app) measure(ctx context.Context, f benchFlags, schema string) (b benchmark, err error) {
	// The one that enqueues does not dispatch, so whoever waits has to be told by the database.
	producer, endProducer, err := a.openProvider(ctx, &pgwake.Config{Schema: schema, Mode: pgwake.ModeDisabled})
	if err != nil {
		return b, err
	}
	defer endProducer()
	worker, endWorker, err := a.openProvider(ctx, &pgwake.Config{Schema: schema})
	if err != nil {
		return b, err
	}
	defer endWorker()
	bar := a.progress("measuring", 3)
	defer bar.end()
	config, err := a.config()
	if err != nil {
		return b, err
	}
	b.Database, b.Dispatchers, b.Batch = place(config), f.dispatchers, f.batch
	bar.at(0)
	if err := b.measureDatabase(ctx, producer, f.long/6); err != nil {
		return b, err
	}
	bar.at(1)
	arrived := make(chan time.Time, 1)
	var done atomic.Int64
	end := startDispatcher(ctx, worker, f.dispatchers, arrived, &done)
	err = b.measureHand(ctx, producer, worker, f.long/2, arrived, f)
	if err == nil {
		bar.at(2)
		err = b.measureThroughput(ctx, producer, f.long/3, &done, f)
	}
	b.Listening = worker.Stats().Listening
	for _, p := range worker.Health().Problems {
		b.Problems = append(b.Problems, a.withoutSecrets(p.String()))
	}
	return b, errors.Join(err, end())
}

// startDispatcher has items handled: those of latency tell when they are in hand, and all others are counted.
func startDispatcher(ctx context.Context, p *pgwake.Provider, places int, arrived chan<- time.Time, done *atomic.Int64) (end func() error) {
	ctx, cancel := context.WithCancel(ctx)
	d := dispatch.New(p, &dispatch.Config{Concurrency: places, Logger: silent})
	d.Handle("latency", func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		arrived <- time.Now()
		return nil, nil
	})
	d.Handle("throughput", func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		done.Add(1)
		return nil, nil
	})
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	return func() error {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}
}

// measureDatabase is the least that anything can take.
func (b *benchmark) measureDatabase(ctx context.Context, p *pgwake.Provider, long time.Duration) error {
	conn, err := p.Pool().Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if err := conn.QueryRow(ctx, `SELECT split_part(current_setting('server_version'), ' ', 1)`).Scan(&b.Server); err != nil {
		return err
	}
	table := pgx.Identifier{p.Schema(), "least"}.Sanitize()
	if _, err := conn.Exec(ctx, `CREATE TABLE `+table+` (n bigint)`); err != nil {
		return err
	}
	if b.RoundTrip, err = repeat(ctx, long/2, func() error { _, err := conn.Exec(ctx, `SELECT 1`); return err }); err != nil {
		return err
	}
	b.Commit, err = repeat(ctx, long/2, func() error { _, err := conn.Exec(ctx, `INSERT INTO `+table+` VALUES (1)`); return err })
	return err
}

// repeat measures something again and again.
func repeat(ctx context.Context, long time.Duration, do func() error) (spread, error) {
	var all []time.Duration
	for until := time.Now().Add(long); time.Now().Before(until) || len(all) == 0; {
		began := time.Now()
		if err := do(); err != nil {
			return spread{}, err
		}
		all = append(all, time.Since(began))
	}
	return spreadOf(all), ctx.Err()
}

// patience is how long an item may take before it is an error.
const patience = 30 * time.Second

// measureHand enqueues one item at a time, with a pause in between, in which the dispatcher goes back to waiting.
func (b *benchmark) measureHand(ctx context.Context, producer, worker *pgwake.Provider, long time.Duration, arrived <-chan time.Time, f benchFlags) error {
	var all []time.Duration
	input := payload(f.payload)
	for until := time.Now().Add(long); time.Now().Before(until) || len(all) == 0; {
		if err := awaitIdle(ctx, worker); err != nil {
			return err
		}
		began := time.Now()
		if _, err := producer.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "latency", Input: input}, nil); err != nil {
			return err
		}
		select {
		case at := <-arrived:
			all = append(all, at.Sub(began))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(patience):
			return fmt.Errorf("an item was not in hand after %s", glance.Span(patience))
		}
	}
	b.Hand = spreadOf(all)
	return nil
}

// awaitIdle returns once a dispatcher waits, and looks only when told to; after a second in any case, since a node that polls never does.
func awaitIdle(ctx context.Context, p *pgwake.Provider) error {
	for until := time.Now().Add(time.Second); time.Now().Before(until); {
		if s := p.Stats().Worker; s.Parked > 0 && s.Settled {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// measureThroughput enqueues as much as it can, and waits until all of it is done.
func (b *benchmark) measureThroughput(ctx context.Context, producer *pgwake.Provider, long time.Duration, done *atomic.Int64, f benchFlags) error {
	items := make([]pgwake.WorkEnqueue, f.batch)
	for i := range items {
		items[i].WorkItem = pgwake.WorkItem{Name: "throughput", Input: payload(f.payload)}
	}
	began := time.Now()
	var added int64
	for until := began.Add(long); time.Now().Before(until) || added == 0; {
		if _, err := producer.EnqueueForWorkerMany(ctx, items); err != nil {
			return err
		}
		added += int64(len(items))
	}
	b.Enqueued = rateOf(added, time.Since(began))
	for last, since := done.Load(), time.Now(); done.Load() < added; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
		if n := done.Load(); n > last {
			last, since = n, time.Now()
		} else if time.Since(since) > patience {
			return fmt.Errorf("%d of %d items were done, and none for %s", n, added, glance.Span(patience))
		}
	}
	b.Done = rateOf(added, time.Since(began))
	return nil
}

// payload is JSON of about so many bytes.
func payload(bytes int) json.RawMessage {
	text := make([]byte, bytes)
	for i := range text {
		text[i] = 'x'
	}
	return json.RawMessage(`"` + string(text) + `"`)
}

func rateOf(items int64, took time.Duration) rate {
	return rate{items, took.Seconds(), float64(items) / took.Seconds()}
}

func spreadOf(all []time.Duration) spread {
	slices.Sort(all)
	at := func(q float64) float64 {
		return float64(all[min(len(all)-1, int(q*float64(len(all))))]) / float64(time.Millisecond)
	}
	return spread{len(all), at(0.5), at(0.95), at(0.99), at(1)}
}

func (a *app) printBenchmark(b benchmark) error {
	if a.asJSON {
		return a.printJSON(b)
	}
	a.printf("%s\n\n", a.style.head.Render(fmt.Sprintf("%s, PostgreSQL %s", b.Database, b.Server)))
	table := &rows{heads: []string{"", "P50", "P95", "P99", "MAX", "SAMPLES"}}
	for _, of := range []struct {
		what string
		spread
	}{{"enqueue to hand", b.Hand}, {"  beside: commit of a row", b.Commit}, {"  beside: round trip", b.RoundTrip}} {
		table.add(of.what, millis(of.P50), millis(of.P95), millis(of.P99), millis(of.Max), text(int64(of.Samples)))
	}
	a.printRows(table)
	a.printf("\n%.0f items/s enqueued, %d at a time; %.0f items/s done, by %d dispatchers (%d items)\n", b.Enqueued.PerSecond, b.Batch, b.Done.PerSecond, b.Dispatchers, b.Done.Items)
	for _, problem := range b.Problems {
		a.printf("%s\n", a.style.warn.Render(problem))
	}
	return nil
}

func millis(ms float64) string { return fmt.Sprintf("%.2f ms", ms) }
