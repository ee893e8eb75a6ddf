// Timers has items become due at random instants, set by whoever, and shows how late each was.
//
//	go run ./examples/timers
//	go run ./examples/timers -console 127.0.0.1:7276 # and look at it in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. A due time is an instant of the server's clock. Nobody polls for it: each Provider
// knows the next one, whoever set it and whenever, and has one dispatcher look at that instant.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
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
	fmt.Printf("PostgreSQL %s: %s\n\n", server.Version, server.Source)

	_, err = demo(ctx, server.URL, os.Stdout)
	return err
}

const (
	dispatcherCount = 4
	randomCount     = 60              // timers at random instants
	timerCount      = randomCount + 3 // and three special ones
	window          = 2 * time.Second // in which these are due
	lockTimeout     = time.Minute
)

// place from which a timer is set. The letter stands for it in the histogram.
type place struct{ letter, name string }

var (
	before = place{"b", "before the provider that waits was started"}
	own    = place{"o", "by that provider itself"}
	other  = place{"p", "by another provider"}
	plain  = place{"s", "by plain SQL"}
)

// timer that came.
type timer struct {
	n    int
	due  time.Time // server's clock, like everything here
	late time.Duration
	by   place
}

// demo sets timers and waits for all of them, in a schema of its own, which it drops. It returns them in the
// order in which they came.
func demo(ctx context.Context, databaseURL string, out io.Writer) (came []timer, err error) {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	schema := fmt.Sprintf("timers_%d", os.Getpid())
	defer func() {
		_, dropped := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()
	open := func() (*pgwake.Provider, error) { return pgwake.Open(ctx, databaseURL, &pgwake.Config{Schema: schema}) }

	// Another node sets a timer before the provider that will wait for it exists.
	another, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, another.Close(context.WithoutCancel(ctx))) }()
	s := &setter{pool: pool, schema: schema, providers: map[place]*pgwake.Provider{before: another, other: another}}
	if _, err := s.set(ctx, before, 1500*time.Millisecond); err != nil {
		return nil, err
	}

	p, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()
	s.providers[own] = p
	items := make(chan *pgwake.ClaimedWorkItem, timerCount)
	waiting, stop := context.WithCancel(ctx)
	var dispatchers sync.WaitGroup
	defer dispatchers.Wait()
	defer stop()
	for range dispatcherCount {
		dispatchers.Go(func() { dispatch(waiting, p, items) })
	}
	stay, err := show.Console(ctx, out, p, console.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = stay(err) }()

	// A later one first, and then one that is due before it: whoever waits for the first must not sleep
	// through the second.
	later, err := s.set(ctx, own, window)
	if err != nil {
		return nil, err
	}
	sooner, err := s.set(ctx, plain, window/4)
	if err != nil {
		return nil, err
	}
	for i := range randomCount {
		if _, err := s.set(ctx, []place{own, other, plain}[i%3], rand.N(window)); err != nil {
			return nil, err
		}
	}

	fmt.Fprintf(out, "%d timers are set, and %d dispatchers wait for them\n\n", timerCount, dispatcherCount)
	for range timerCount {
		select {
		case item := <-items:
			t, err := s.came(item)
			if err != nil {
				return nil, err
			}
			came = append(came, t)
			switch t.n {
			case sooner:
				fmt.Fprintf(out, "number %d is here: it was set after number %d, to be due before it\n", sooner, later)
			case later:
				fmt.Fprintf(out, "number %d is here\n", later)
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	histogram(out, came)
	did := p.Stats().Worker
	fmt.Fprintf(out, "queries for work: %d; wake-ups because something was due: %d; found by the safety net: %d\n",
		did.Looks, did.Tokens[pgwake.WakeTimer.String()], did.FallbackFinds+did.ScoutFinds)
	return came, nil
}

// dispatch hands over one item after another, until ctx ends.
func dispatch(ctx context.Context, p *pgwake.Provider, items chan<- *pgwake.ClaimedWorkItem) {
	for {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: lockTimeout})
		if errors.Is(err, pgwake.ErrNoWork) {
			continue
		}
		if err != nil {
			return // interrupted; a program that is to last would log other errors, pause, and go on
		}
		items <- item
		if err := p.AckWorkItem(context.WithoutCancel(ctx), item.LockToken, nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// setter sets timers, from wherever it is told to.
type setter struct {
	pool      *pgxpool.Pool
	schema    string
	providers map[place]*pgwake.Provider
	timers    []timer // by number
}

// set sets a timer, half of them by a delay and half by an instant.
func (s *setter) set(ctx context.Context, by place, in time.Duration) (n int, err error) {
	n = len(s.timers)
	t := timer{n: n, by: by}
	input := strconv.Itoa(n)
	if p := s.providers[by]; p != nil {
		options := &pgwake.EnqueueOptions{Delay: in}
		if n%2 == 0 {
			// An instant is one of the server's clock. Whoever derives it from the local one should know by
			// how much they differ.
			options = &pgwake.EnqueueOptions{At: time.Now().Add(p.Stats().ClockOffset + in)}
		}
		added, err := p.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "timer", Input: json.RawMessage(input)}, options)
		if err != nil {
			return 0, err
		}
		t.due = added.DueAt
	} else {
		err := s.pool.QueryRow(ctx, `WITH t AS MATERIALIZED (SELECT clock_timestamp() + $2::interval AS due)
			SELECT due FROM t, `+s.schema+`.enqueue_work('timer', $1, p_visible_at => due)`, input, in).Scan(&t.due)
		if err != nil {
			return 0, err
		}
	}
	s.timers = append(s.timers, t)
	return n, nil
}

// came completes a timer. Its lateness is from the due time to the claim, both on the server's clock; the way
// of the answer to this process is not in it.
func (s *setter) came(item *pgwake.ClaimedWorkItem) (timer, error) {
	n, err := strconv.Atoi(string(item.Input))
	if err != nil {
		return timer{}, err
	}
	t := &s.timers[n]
	t.late = item.LockedUntil.Add(-lockTimeout).Sub(t.due)
	return *t, nil
}

// histogram shows each timer as the letter of its place, in rows of doubling lateness.
func histogram(out io.Writer, timers []timer) {
	const shortest, rowCount = time.Millisecond / 2, 8
	rows := make([][]string, rowCount)
	var late []time.Duration
	for _, t := range timers {
		late = append(late, t.late)
		row := 0
		for limit := shortest; t.late >= limit && row < rowCount-1; limit *= 2 {
			row++
		}
		rows[row] = append(rows[row], t.by.letter)
	}
	fmt.Fprintln(out, "\nlateness")
	for i, letters := range rows {
		name := fmt.Sprint("under ", shortest<<i)
		if i == rowCount-1 {
			name = "more"
		}
		slices.Sort(letters)
		fmt.Fprintf(out, "  %-11s %2d  %s\n", name, len(letters), strings.Join(letters, ""))
	}
	slices.Sort(late)
	fmt.Fprintf(out, "  half of them under %v, the latest %v\n", late[len(late)/2].Round(10*time.Microsecond), late[len(late)-1].Round(10*time.Microsecond))
	fmt.Fprintln(out, "\nset")
	for _, p := range []place{before, own, other, plain} {
		fmt.Fprintf(out, "  %s  %s\n", p.letter, p.name)
	}
	fmt.Fprintln(out)
}
