package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/dbclock"
	"go.uber.org/goleak"
)

// This file answers: how does a process of the deployment begin, and how does it end?
//
// It is this program again, told by its environment what to be. On its standard output it says "ready" and,
// after it has closed, what its engine did. On its standard input it is told to "probe" only or to "work"
// again, to "hog" all connections of its pool and to "release" them, to be "quiet", that is to enqueue no more, and to "close"; when it soaks, also at which pace to enqueue,
// and to "sample" itself, which it answers. If that input ends, the parent is gone, and so is the process.

// envOrder makes a process a child. It holds its order, as JSON.
const envOrder = "PGWAKE_CHAOS_ORDER"

// order is what a child is to be.
type order struct {
	Node       int
	Generation int // how often this node was started before
	Nodes      int
	Role       string
	Seed       uint64
	PoolURL    string
	ListenURL  string
	Ledger     string
	Plant      []string // defects to plant; see plants
	Rest       float64  // by which pauses of producers are multiplied

	Ahead time.Duration // by how much the server's clock is ahead of the machine's
	Skew  time.Duration // and the node's
}

func (o *order) process() string { return fmt.Sprintf("node-%d-%d", o.Node, o.Generation) }

// farewell is what a child says last.
type farewell struct {
	Closing time.Duration // how long Close took
	Cut     bool          // Close ran out of time
	Error   string        // what else Close returned, or which goroutines are left
	Stats   pgwake.Stats
}

// The settings of every node. The bounds that the checker holds it to follow from them.
const (
	lease            = 2 * time.Second
	fallbackInterval = 2 * time.Second
	closeDeadline    = 5 * time.Second
	verbTimeout      = 3 * time.Second
)

// childMain does nothing in the parent, and never returns in a child.
func childMain() {
	text, ok := os.LookupEnv(envOrder)
	if !ok {
		return
	}
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bye, err := beChild(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	line, _ := json.Marshal(bye)
	fmt.Println(string(line))
	if bye.Error != "" {
		os.Exit(1)
	}
	os.Exit(0)
}

func beChild(o order) (bye farewell, err error) {
	if o.Skew != 0 {
		dbclock.Machine = func() time.Time { return time.Now().Add(o.Skew) }
	}
	w := &workload{order: o}
	if w.ledger, err = openLedger(o.Ledger); err != nil {
		return bye, err
	}
	defer w.ledger.file.Close()
	w.alive, w.die = context.WithCancel(context.Background())
	w.loud, w.quiet = context.WithCancel(w.alive)
	opened := make(chan error, 1)
	go func() {
		err := w.open()
		if err == nil {
			w.begin()
			fmt.Println("ready")
		}
		opened <- err
	}()
	for commands := bufio.NewScanner(os.Stdin); commands.Scan(); {
		switch commands.Text() {
		case "probe", "work":
			w.resting.Store(commands.Text() == "probe")
		case paceBusy, paceTrickle, paceIdle:
			w.pace.Store(new(commands.Text()))
		case "sample":
			line, _ := json.Marshal(map[string]any{"Vitals": w.sample()})
			fmt.Println(string(line))
		case "hog":
			w.hog()
		case "release":
			w.release()
		case "quiet":
			w.quiet()
		case "close":
			return w.end(opened)
		}
	}
	return bye, errors.New("the parent is gone")
}

// open connects. The server may be out of reach at this moment; then it tries again.
func (w *workload) open() error {
	for patience := 2 * verbTimeout; ; patience += verbTimeout { // a busy machine may take longer at every attempt
		err := w.tryOpen(patience)
		if err == nil || w.alive.Err() != nil {
			return err
		}
		slog.Warn("open", "error", err)
		nap(w.alive, 100*time.Millisecond)
	}
}

func (w *workload) tryOpen(patience time.Duration) error {
	ctx, cancel := context.WithTimeout(w.alive, patience)
	defer cancel()
	listen, err := pgx.ParseConfig(w.ListenURL)
	if err != nil {
		return err
	}
	config := &pgwake.Config{
		ListenConfig:     listen,
		FallbackInterval: fallbackInterval,
		// Short, so that polling does not hide for long what pushing fails to do.
		AggressiveDuration: time.Second,
		Schema:             schemas[w.Role],
	}
	if w.Role == soaker { // nothing goes wrong, so nothing needs polling: it would hide what is lost
		config.AggressivePolicy = pgwake.Never
	}
	pool, err := pgxpool.ParseConfig(w.PoolURL)
	if err != nil {
		return err
	}
	// What the process itself asks for may hang as well. See internal/conns.
	pool.BeforeClose = func(c *pgx.Conn) {
		if c.IsClosed() {
			time.AfterFunc(time.Second, func() { _ = c.PgConn().Conn().Close() })
		}
	}
	pgwake.TunePool(pool)
	if w.pool, err = pgxpool.NewWithConfig(ctx, pool); err != nil {
		return err
	}
	// Half of the nodes have a pool of their own for the library.
	if w.Node%2 == 0 {
		w.provider, err = pgwake.Open(ctx, w.PoolURL, config)
	} else {
		w.provider, err = pgwake.New(ctx, w.pool, config)
	}
	if err == nil {
		if err = w.openLayer(ctx); err != nil {
			closing, cancel := context.WithTimeout(context.Background(), closeDeadline)
			defer cancel()
			_ = w.provider.Close(closing)
		}
	}
	if err != nil {
		w.pool.Close()
	}
	return err
}

// end stops the work and closes everything.
func (w *workload) end(opened chan error) (bye farewell, err error) {
	w.quiet()
	select {
	case err = <-opened:
	case <-time.After(closeDeadline):
		err = errors.New("neither open nor failed to")
	}
	if err != nil {
		return bye, err
	}
	// Either order is legal: half of the processes close under the feet of their dispatchers.
	if orderly := w.Generation%2 == 0; orderly {
		w.die()
		w.loops.Wait()
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	began := time.Now()
	err = w.provider.Close(ctx)
	bye.Closing = time.Since(began)
	if bye.Cut = errors.Is(err, context.DeadlineExceeded); bye.Cut {
		err = nil
	}
	w.die()
	w.loops.Wait()
	bye.Stats = w.provider.Stats()
	w.pool.Close()
	// A connection whose peer does not answer takes up to 15 s to go.
	leaks := goleak.Find()
	for patience := time.Now().Add(16 * time.Second); leaks != nil && time.Now().Before(patience); {
		leaks = goleak.Find()
	}
	if err := errors.Join(err, leaks); err != nil {
		bye.Error = err.Error()
	}
	return bye, nil
}
