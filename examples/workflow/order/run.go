package order

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/examples/internal/show"
)

// This file answers: does the workflow survive? The process that begins it dies in the middle, another one
// goes on, and in the end everything is checked.

const (
	instance     = "order-1"
	articleCount = 20
	diesAfter    = 8 // reservations

	// The customer takes longer to pay than the timer of the workflow runs, so that the payment is the last
	// thing that it waits for.
	customerThinks = coolingOff + 200*time.Millisecond
)

// Result is what came out.
type Result struct {
	Reservations map[string]int   // how often each article was reserved: at least once
	Histories    [][]pgwake.Event // of each execution
	Statuses     []pgwake.Status  // of each execution
	Output       string           // of the last one

	FromCrash   time.Duration // from the death of the first process until all articles were reserved
	FromPayment time.Duration // from the customer's payment to the news of the end
}

// Run has one order fulfilled, in a schema of its own, which it drops. The error says if anything is not as it
// should be.
func Run(ctx context.Context, databaseURL string, print func(line string)) (r Result, err error) {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return r, err
	}
	defer pool.Close()
	d := demo{
		url:    databaseURL,
		config: &pgwake.Config{Schema: fmt.Sprintf("workflow_%d", os.Getpid())},
		pool:   pool,
		printf: func(format string, args ...any) { print(fmt.Sprintf(format, args...)) },
		prices: map[string]int{}, invoiced: make(chan int, 1),
	}
	for i := range articleCount {
		d.prices[fmt.Sprintf("book-%02d", i+1)] = 995 + 100*i
	}
	defer func() {
		_, dropped := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+d.config.Schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()

	if err := d.firstProcess(ctx); err != nil {
		return r, err
	}
	if err := d.secondProcess(ctx, &r); err != nil {
		return r, err
	}
	return r, d.check(ctx, &r)
}

// demo is the world around the workflow.
type demo struct {
	url    string
	config *pgwake.Config
	pool   *pgxpool.Pool
	printf func(format string, args ...any)

	prices   map[string]int // of articles, in cents
	invoiced chan int       // the customer's mailbox
}

// firstProcess begins the workflow and dies: a few reservations are made, and nobody has heard of the last of
// them.
func (d *demo) firstProcess(ctx context.Context) error {
	p, err := pgwake.Open(ctx, d.url, d.config)
	if err != nil {
		return err
	}
	var made atomic.Int32
	fatal := make(chan struct{})
	activities := d.activities()
	activities["reserve"] = func(ctx context.Context, input json.RawMessage) (any, error) {
		price, err := d.reserve(ctx, input)
		if n := made.Add(1); n >= diesAfter {
			if n == diesAfter {
				close(fatal)
			}
			<-ctx.Done() // it is done, and nobody will hear of it
		}
		return price, err
	}
	first := startProcess(ctx, p, map[string]workflow{workflowName: fulfil}, activities)
	err = func() error {
		_, err := d.pool.Exec(ctx, "CREATE TABLE "+d.config.Schema+".reservations (article text)")
		if err != nil {
			return err
		}
		_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart,
			Name: workflowName, Version: "1.0.0", Data: encode(d.order())}, nil)
		if err != nil {
			return err
		}
		d.printf("process 1   began %s: %d activities at once", instance, articleCount)
		return await(ctx, fatal, nil)
	}()
	if err := errors.Join(err, first.crash()); err != nil {
		return err
	}
	d.printf("process 1   died after %d reservations, at least one of them unacknowledged", made.Load())
	return nil
}

// secondProcess is told nothing of the first. It finds everything in the database.
func (d *demo) secondProcess(ctx context.Context, r *Result) (err error) {
	died := time.Now()
	p, err := pgwake.Open(ctx, d.url, d.config)
	if err != nil {
		return err
	}
	second := startProcess(ctx, p, map[string]workflow{workflowName: fulfil}, d.activities())
	defer func() { err = errors.Join(err, second.stop()) }()
	stay, err := show.Console(ctx, os.Stdout, p, console.Options{})
	if err != nil {
		return err
	}
	defer func() { err = stay(err) }()

	var total int
	if err := await(ctx, d.invoiced, &total); err != nil {
		return err
	}
	r.FromCrash = time.Since(died)
	d.printf("process 2   has all reservations %d ms later: the leases of process 1 were for %v",
		r.FromCrash.Milliseconds(), lockTimeout)
	d.printf("customer    has an invoice of %d.%02d, thinks for %v, and pays", total/100, total%100, customerThinks)
	if err := await(ctx, time.After(customerThinks), nil); err != nil {
		return err
	}

	// An event from outside is one message, by whatever program.
	_, err = p.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: instance, Kind: paid, Data: encode("ACME Bank")}, nil)
	if err != nil {
		return err
	}
	paidAt := time.Now()
	news, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{endings}, PollTimeout: time.Minute})
	if err != nil {
		return err
	}
	r.FromPayment = time.Since(paidAt)
	var end ending
	if err := json.Unmarshal(news.Input, &end); err != nil {
		return err
	}
	if err := p.AckWorkItem(ctx, news.LockToken, nil); err != nil {
		return err
	}
	d.printf("customer    hears of the end: %s, %s", end.Status, end.Output)

	for execution := int64(1); execution <= 2; execution++ {
		history, err := p.ReadHistoryExecution(ctx, end.Instance, execution, 0)
		if err != nil {
			return err
		}
		r.Histories = append(r.Histories, history)
	}
	return nil
}

// await waits for something; a nil target drops it.
func await[T any](ctx context.Context, from <-chan T, target *T) error {
	select {
	case v := <-from:
		if target != nil {
			*target = v
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// order is of one piece of everything.
func (d *demo) order() (o order) {
	for article := range d.prices {
		o.Articles = append(o.Articles, article)
	}
	slices.Sort(o.Articles)
	return o
}

func (d *demo) activities() map[string]activity {
	return map[string]activity{"reserve": d.reserve, "invoice": d.invoice, "ship": d.ship}
}

// reserve returns the price of an article. It is not idempotent, so that its repetitions can be counted; yours
// should be: ON CONFLICT DO NOTHING, or an idempotency key made of instance, execution and call.
func (d *demo) reserve(ctx context.Context, input json.RawMessage) (any, error) {
	var article string
	if err := json.Unmarshal(input, &article); err != nil {
		return nil, err
	}
	_, err := d.pool.Exec(ctx, "INSERT INTO "+d.config.Schema+".reservations VALUES ($1)", article)
	return d.prices[article], err
}

func (d *demo) invoice(_ context.Context, input json.RawMessage) (any, error) {
	var total int
	if err := json.Unmarshal(input, &total); err != nil {
		return nil, err
	}
	select {
	case d.invoiced <- total:
	default: // the customer has one
	}
	return nil, nil
}

func (d *demo) ship(context.Context, json.RawMessage) (any, error) { return "parcel 7", nil }

// check shows what is stored and compares it with what must have happened.
func (d *demo) check(ctx context.Context, r *Result) error {
	// Every activity has had its effect. Those whose process died before it could say so have had it twice.
	rows, err := d.pool.Query(ctx, "SELECT article, count(*) FROM "+d.config.Schema+".reservations GROUP BY article")
	if err != nil {
		return err
	}
	r.Reservations = map[string]int{}
	total := 0
	var article string
	var count int
	_, err = pgx.ForEachRow(rows, []any{&article, &count}, func() error {
		r.Reservations[article] = count
		total += count
		return nil
	})
	if err != nil {
		return err
	}
	d.printf("")
	d.printf("%d articles were reserved, by %d reservations", len(r.Reservations), total)
	if len(r.Reservations) != articleCount {
		return fmt.Errorf("%d articles were reserved instead of %d", len(r.Reservations), articleCount)
	}

	// The tables are there to be read.
	rows, err = d.pool.Query(ctx, "SELECT status, coalesce(output, '') FROM "+d.config.Schema+`.executions
		WHERE instance_id = $1 ORDER BY execution_id`, instance)
	if err != nil {
		return err
	}
	var status pgwake.Status
	_, err = pgx.ForEachRow(rows, []any{&status, &r.Output}, func() error {
		r.Statuses = append(r.Statuses, status)
		return nil
	})
	if err != nil {
		return err
	}
	if want := []pgwake.Status{pgwake.StatusContinuedAsNew, pgwake.StatusCompleted}; !slices.Equal(r.Statuses, want) {
		return fmt.Errorf("the executions are %v instead of %v", r.Statuses, want)
	}

	for i, want := range []map[string]int{
		{started: 1, activityScheduled: articleCount + 1, activityCompleted: articleCount + 1, timerSet: 1, timerFired: 1, paid: 1, continuedAsNew: 1},
		{started: 1, activityScheduled: 1, activityCompleted: 1, completed: 1},
	} {
		d.printf("execution %d  %-14s %2d events: %s", i+1, r.Statuses[i], len(r.Histories[i]), summary(r.Histories[i]))
		events := map[string]int{}
		for _, e := range r.Histories[i] {
			events[e.Type]++
		}
		if !maps.Equal(events, want) {
			return fmt.Errorf("the history of execution %d has %v instead of %v", i+1, events, want)
		}
	}
	d.printf("from the payment to the news of the end: %.1f ms, in 3 turns, an activity and a last item",
		float64(r.FromPayment.Microseconds())/1000)
	return nil
}

// summary lists the types of events in order.
func summary(history []pgwake.Event) string {
	var b strings.Builder
	for i := 0; i < len(history); {
		n := 1
		for i+n < len(history) && history[i+n].Type == history[i].Type {
			n++
		}
		if i > 0 {
			b.WriteString(", ")
		}
		if n > 1 {
			fmt.Fprintf(&b, "%d x ", n)
		}
		b.WriteString(history[i].Type)
		i += n
	}
	return b.String()
}
