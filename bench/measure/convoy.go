package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: do workers that report to one instance wait for one another, or for its turns?

//go:embed convoy_waits.sql
var convoyWaitsSQL string

// ConvoyOptions are the sizes of Convoy.
type ConvoyOptions struct {
	Acks        int           // of work items, in each of the ways. Defaults to 5,000.
	Workers     int           // that acknowledge at a time. Defaults to 16.
	Dispatchers int           // that look for turns in the last of the ways. Defaults to 4.
	Slices      int           // into which the acks of the other two are cut. Defaults to 4.
	Interval    time.Duration // between two looks at what the backends wait for. Defaults to 3 ms.
	Progress    func(Progress)
}

// ConvoyResult is what Convoy found.
type ConvoyResult struct {
	Workers     int `json:"workers"`
	Dispatchers int `json:"dispatchers"` // of Crowded; the others have one

	Apart   Convoy `json:"apart"`   // each worker reports to an instance of its own
	Shared  Convoy `json:"shared"`  // all report to one
	Crowded Convoy `json:"crowded"` // the same, while several dispatchers look for turns, of which there is one at a time
}

// Convoy is how acks with a completion went.
type Convoy struct {
	Took  time.Duration `json:"took"` // by all of them together
	Acks  Samples       `json:"acks"` // from the call to the return
	Turns int64         `json:"turns"`
	Looks int           `json:"looks"` // at what the backends wait for
	Waits []LockWait    `json:"waits"` // for heavyweight locks
}

// LockWait is how often a backend was seen to wait for a heavyweight lock.
type LockWait struct {
	Kind     string `json:"kind"`     // of lock, a wait_event of pg_stat_activity
	Function string `json:"function"` // of pgwake, in which it waited
	Seen     int    `json:"seen"`
}

// OfRow reports whether the wait is for a row, or the transaction that changed it, and not for the end of a table to be
// extended ("extend") or for the turn to notify ("object"), which have nothing to do with instances.
func (w *LockWait) OfRow() bool { return w.Kind == "transactionid" || w.Kind == "tuple" }

// PerSecond is the throughput in acks.
func (c *Convoy) PerSecond() float64 { return float64(len(c.Acks)) / c.Took.Seconds() }

// Waiting is how often a backend was seen to wait, of those that which selects.
func (c *Convoy) Waiting(which func(*LockWait) bool) (n int) {
	for i := range c.Waits {
		if which(&c.Waits[i]) {
			n += c.Waits[i].Seen
		}
	}
	return n
}

// add counts waits together with those that were seen before.
func (c *Convoy) add(waits []LockWait) {
	for _, w := range waits {
		i := slices.IndexFunc(c.Waits, func(of LockWait) bool { return of.Kind == w.Kind && of.Function == w.Function })
		if i < 0 {
			c.Waits = append(c.Waits, w)
		} else {
			c.Waits[i].Seen += w.Seen
		}
	}
}

// LockConvoy has workers acknowledge work items with a completion, to an instance of each worker's own and to one of all,
// while a dispatcher of another Provider takes the turns. These two ways alternate. At last there are more dispatchers.
func LockConvoy(ctx context.Context, url string, o ConvoyOptions) (r *ConvoyResult, err error) {
	orDefault(&o.Acks, 5000)
	orDefault(&o.Workers, 16)
	orDefault(&o.Dispatchers, 4)
	orDefault(&o.Slices, 4)
	orDefault(&o.Interval, 3*time.Millisecond)
	defer func(ctx context.Context) { err = about(ctx, "the lock convoy", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	named := s // so that the looks tell our backends from others
	if named.url, err = withSetting(s.url, "application_name", s.schema); err != nil {
		return nil, err
	}
	dispatcher, err := named.open(ctx, o.Dispatchers)
	if err != nil {
		return nil, err
	}
	defer dispatcher.close(&err)
	workers, err := named.open(dispatcher.ctx, o.Workers)
	if err != nil {
		return nil, err
	}
	defer workers.close(&err)
	eye, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer hangUp(eye)

	c := &convoy{dispatcher: dispatcher, workers: workers, eye: eye, schema: s.schema, o: &o}
	shared := func(int) string { return "shared" }
	own := func(worker int) string { return "own-" + strconv.Itoa(worker) }
	for w := range o.Workers {
		if err := c.start(ctx, own(w)); err != nil {
			return nil, err
		}
	}
	if err := c.start(ctx, shared(0)); err != nil {
		return nil, err
	}
	dispatcher.loop(c.turn)

	r = &ConvoyResult{Workers: o.Workers, Dispatchers: o.Dispatchers}
	if err := c.run(ctx, o.Workers, own, &Convoy{}); err != nil { // connects, and prepares the statements
		return nil, err
	}
	m := newMeter(o.Progress)
	for i := range o.Slices {
		for _, way := range []struct {
			to    func(worker int) string
			found *Convoy
		}{{own, &r.Apart}, {shared, &r.Shared}} {
			if err := c.run(ctx, max(o.Acks/o.Slices, 1), way.to, way.found); err != nil {
				return nil, err
			}
		}
		m.report(Progress{Done: i + 1, Total: o.Slices + 1, Figures: r.Shared.Acks.Summary()})
	}
	for range o.Dispatchers - 1 {
		dispatcher.loop(c.turn)
	}
	if err := c.run(ctx, o.Acks, shared, &r.Crowded); err != nil {
		return nil, err
	}
	m.report(Progress{Done: o.Slices + 1, Total: o.Slices + 1, Figures: r.Crowded.Acks.Summary()})
	return r, nil
}

// convoy is what LockConvoy plays with.
type convoy struct {
	dispatcher, workers *node
	eye                 *pgx.Conn // looks at what the backends of the nodes wait for
	schema              string    // which is their application_name
	o                   *ConvoyOptions
	sent                int64        // completions
	taken               atomic.Int64 // completions that had their turn
	turns               atomic.Int64
}

// start gives an instance its first turn.
func (c *convoy) start(ctx context.Context, instance string) error {
	_, err := turn(ctx, c.dispatcher, instance, pgwake.Event{ID: 1, Type: "started"})
	return err
}

// turn takes whatever is queued for an instance, and adds an event for each completion.
func (c *convoy) turn() error {
	item, err := c.dispatcher.FetchOrchestrationItem(c.dispatcher.ctx, &pgwake.FetchOptions{WithoutHistory: true})
	if err != nil {
		return err
	}
	if err := c.dispatcher.AckOrchestrationItem(c.dispatcher.ctx, item.LockToken, pgwake.OrchestrationAck{History: eventsOf(item)}); err != nil {
		return err
	}
	c.turns.Add(1)
	c.taken.Add(int64(len(item.Messages)))
	return nil
}

// run has the workers acknowledge items, each with a completion to the instance that to names, and adds to what was found.
func (c *convoy) run(ctx context.Context, items int, to func(worker int) string, found *Convoy) error {
	tokens, err := c.claim(ctx, items)
	if err != nil {
		return err
	}
	looking, stopLooking := context.WithCancel(ctx)
	defer stopLooking()
	var looks errgroup.Group
	looks.Go(func() error { return c.look(looking, found) })

	turns, began := c.turns.Load(), time.Now()
	took := make([]Samples, c.o.Workers)
	group, acking := errgroup.WithContext(c.dispatcher.ctx)
	for w := range c.o.Workers {
		group.Go(func() error {
			for token := range tokens {
				report := completion(to(w), 1)
				sent := time.Now()
				if err := c.workers.AckWorkItem(acking, token, &report); err != nil {
					return err
				}
				took[w] = append(took[w], time.Since(sent))
			}
			return nil
		})
	}
	err = group.Wait()
	found.Took += time.Since(began)
	found.Turns += c.turns.Load() - turns
	stopLooking()
	if err := errors.Join(err, looks.Wait()); err != nil {
		return err
	}
	for _, samples := range took {
		found.Acks = append(found.Acks, samples...)
	}
	c.sent += int64(items)
	return c.settled(ctx)
}

// claim returns the lock tokens of so many work items.
func (c *convoy) claim(ctx context.Context, items int) (<-chan pgwake.LockToken, error) {
	const batch = 1000
	tokens := make(chan pgwake.LockToken, items)
	defer close(tokens)
	for len(tokens) < items {
		chunk := make([]pgwake.WorkEnqueue, min(batch, items-len(tokens)))
		for i := range chunk {
			chunk[i].Name = "activity"
		}
		if _, err := c.workers.EnqueueForWorkerMany(ctx, chunk); err != nil {
			return nil, err
		}
		claimed, err := c.workers.FetchWorkItems(ctx, len(chunk), &pgwake.FetchOptions{LockTimeout: 10 * time.Minute})
		if err != nil {
			return nil, err
		}
		for _, item := range claimed {
			tokens <- item.LockToken
		}
	}
	return tokens, nil
}

// look counts the waits for heavyweight locks until ctx ends.
func (c *convoy) look(ctx context.Context, found *Convoy) error {
	for pause(ctx, c.o.Interval) == nil {
		// Not with ctx, which would cost the connection.
		waits, err := lockWaits(context.WithoutCancel(ctx), c.eye, c.schema)
		if err != nil {
			return err
		}
		found.Looks++
		found.add(waits)
	}
	return nil
}

// lockWaits returns for which heavyweight locks the backends with an application_name wait at this moment.
func lockWaits(ctx context.Context, conn *pgx.Conn, name string) ([]LockWait, error) {
	rows, err := conn.Query(ctx, convoyWaitsSQL, name)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[LockWait])
}

// settled waits until each completion had its turn, so that the next slice finds nothing of this one.
func (c *convoy) settled(ctx context.Context) error {
	stuck, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("completions had no turn for %v", patience))
	defer cancel()
	for c.taken.Load() < c.sent {
		if c.dispatcher.ctx.Err() != nil {
			return context.Cause(c.dispatcher.ctx)
		}
		if err := pause(stuck, time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
