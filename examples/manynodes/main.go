// Manynodes is three processes on one database, and what happens when one of them is killed.
//
//	go run ./examples/manynodes
//	go run ./examples/manynodes -console 127.0.0.1:7276 # and look at it in a browser, until Ctrl-C
//
// It takes the PostgreSQL at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else starts one for itself, and removes
// whatever it made there. The nodes are further processes of this program (node.go); this process enqueues,
// kills, and counts.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/devpg"
	"github.com/pgwake/pgwake/examples/internal/show"
)

func main() {
	nodeMain()
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
	nodeCount = 3
	itemCount = 400
	chunk     = 10 // items enqueued at once
	pause     = 30 * time.Millisecond

	// Most items take 2 ms. Of a few that take longer, one is what the victim has in hand when it is killed.
	quickMillis, slowMillis, slowEvery = 2, 300, 50
)

// demo runs the nodes in a schema of its own, which it drops.
func demo(ctx context.Context, databaseURL string, out io.Writer) (_ *ledger, err error) {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	schema := fmt.Sprintf("manynodes_%d", os.Getpid())
	defer func() {
		_, dropped := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA IF EXISTS "+schema+" CASCADE")
		err = errors.Join(err, dropped)
	}()
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: schema}) // the nodes find the schema ready
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()

	running, stop := context.WithTimeoutCause(ctx, time.Minute, errors.New("not all items have come back"))
	reports := make(chan report)
	var nodes []*child
	defer func() {
		stop()
		for _, n := range nodes {
			err = errors.Join(err, n.wait())
		}
	}()
	for i := range nodeCount {
		n, err := startNode(running, role{i + 1, databaseURL, schema}, reports)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
	}
	stay, err := show.Console(ctx, out, p, console.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = stay(err) }()
	l := &ledger{items: make([]record, itemCount)}
	fmt.Fprintf(out, "%d nodes of %d dispatchers; %d items of %d ms, every %dth of %d ms\n",
		nodeCount, dispatcherCount, itemCount, quickMillis, slowEvery, slowMillis)

	enqueued, up := 0, 0
	next := time.NewTicker(pause)
	defer next.Stop()
	var patience <-chan time.Time
	for enqueued < itemCount || !l.settled() {
		select {
		case <-next.C:
			if up < nodeCount || enqueued == itemCount {
				continue
			}
			if _, err := p.EnqueueForWorkerMany(ctx, items(enqueued, chunk)); err != nil {
				return nil, err
			}
			enqueued += chunk

		case r := <-reports:
			l.note(r)
			switch {
			case r.What == ready:
				up++
			case r.What == claimed && l.killed == 0 && r.Item >= itemCount/2 && millis(r.Item) == slowMillis:
				// It has this one in hand for a while yet, and probably others.
				l.killed = r.Node
				if err := nodes[r.Node-1].kill(); err != nil {
					return nil, err
				}
				fmt.Fprintf(out, "node %d got item %d and was killed (SIGKILL)\n", r.Node, r.Item)
			case r.What == ended && r.Node == l.killed:
				fmt.Fprintf(out, "node %d is dead; it had reported no end of %d items, which are its own for up to %v more\n", r.Node, l.held(), lockTimeout)
				patience = time.After(lockTimeout + time.Second)
			case r.What == ended:
				return nil, fmt.Errorf("node %d has ended", r.Node)
			}

		case <-patience:
			// What it acknowledged and did not live to say so will never come again.
			l.impatient = true

		case <-running.Done():
			return nil, context.Cause(running)
		}
	}
	l.print(out)
	return l, nil
}

// items are n of all items.
func items(first, n int) (items []pgwake.WorkEnqueue) {
	for i := first; i < first+n; i++ {
		items = append(items, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
			Name: strconv.Itoa(i), Input: json.RawMessage(strconv.Itoa(millis(i)))}})
	}
	return items
}

// millis is how long an item takes.
func millis(item int) int {
	if item%slowEvery == 0 {
		return slowMillis
	}
	return quickMillis
}
