package measure

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"golang.org/x/sync/errgroup"
)

// This file answers: how fast is a backlog of items that do nothing claimed and done, each durably?

//go:embed worker_fill.sql
var workerFillSQL string

// DrainWay is how the dispatchers of a Provider go about it.
type DrainWay string

const (
	// InBatches claims up to Batch items at a time and acknowledges them with the next claim, by one statement and one
	// commit.
	InBatches DrainWay = "batches, ack with the next claim"
	// OneByOne claims one item at a time and acknowledges it with the next claim.
	OneByOne DrainWay = "one by one, ack with the next claim"
	// GroupedAcks claims one item at a time and acknowledges it by AckBatched, which shares commits.
	GroupedAcks DrainWay = "one by one, AckBatched"
	// ByDispatcher leaves it to a dispatch.Dispatcher, whose handler does nothing, or waits for DrainOptions.Handler.
	ByDispatcher DrainWay = "dispatch.Dispatcher"
)

// DrainOptions are the sizes of Drain, BareDrain and PeerDrain.
type DrainOptions struct {
	Items       int           // Defaults to 200,000.
	Dispatchers int           // Defaults to 8.
	Batch       int           // Items per claim, with InBatches and of BareDrain. Defaults to 100.
	Way         DrainWay      // Defaults to InBatches.
	Handler     time.Duration // for which a handler waits, with ByDispatcher. Defaults to 0.
	Keys        int           // of which each item has one, of Drain. Defaults to 0: items have none.
	Limits      pgwake.Limits // of the namespace, of Drain. Defaults to none.
	Limit       time.Duration // Ends the draining although items are left. Defaults to 0: none.
	Progress    func(Progress)
}

func (o *DrainOptions) setDefaults() {
	orDefault(&o.Items, 200_000)
	orDefault(&o.Dispatchers, 8)
	orDefault(&o.Batch, 100)
	orDefault(&o.Way, InBatches)
}

// DrainResult is what one of them found.
type DrainResult struct {
	Who         string        `json:"who"`
	Settings    string        `json:"settings,omitempty"`
	Dispatchers int           `json:"dispatchers"`
	Items       int           `json:"items"` // there were
	Done        int           `json:"done"`  // durably
	Took        time.Duration `json:"took"`  // from the start of the dispatchers to the last of those
}

// PerSecond is the throughput.
func (r *DrainResult) PerSecond() float64 { return float64(r.Done) / max(r.Took.Seconds(), 1e-9) }

// tally counts what is done.
type tally struct {
	began time.Time
	items int
	done  atomic.Int64
	last  atomic.Int64  // nanoseconds from began to the latest
	all   chan struct{} // closed with the last item
}

func newTally(items int) *tally {
	return &tally{began: time.Now(), items: items, all: make(chan struct{})}
}

func (t *tally) add(count int) {
	if count == 0 {
		return
	}
	done := t.done.Add(int64(count))
	t.last.Store(int64(time.Since(t.began)))
	if done >= int64(t.items) && done-int64(count) < int64(t.items) {
		close(t.all)
	}
}

// wait returns when everything is done, when limit has passed, or with an error when ctx ends or nothing happens.
func (t *tally) wait(ctx context.Context, limit time.Duration, tell func(Progress)) error {
	over := make(<-chan time.Time)
	if limit > 0 {
		over = time.After(time.Until(t.began.Add(limit)))
	}
	done := make(chan struct{})
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer close(done)
		select {
		case <-t.all:
		case <-over:
		case <-waiting.Done():
		}
	}()
	err := watch(ctx, newMeter(tell), func() Progress { return Progress{Done: int(t.done.Load()), Total: t.items} }, done, func(struct{}) {})
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

func (t *tally) result(who, settings string, o *DrainOptions) *DrainResult {
	return &DrainResult{Who: who, Settings: settings, Dispatchers: o.Dispatchers, Items: o.Items,
		Done: int(t.done.Load()), Took: time.Duration(t.last.Load())}
}

// fillWork adds items to the worker queue of a Provider's schema by one statement.
func (s stage) fillWork(ctx context.Context, first, count int, dueIn time.Duration, leased bool) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	for _, sql := range []string{"SET pgwake.notify = off", "SET synchronous_commit = on"} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	_, err = conn.Exec(ctx, workerFillSQL, first, count, dueIn, leased)
	return err
}

// Drain has the dispatchers of one Provider do a backlog that was there before. An item counts when its ack has
// committed, to disk.
func Drain(ctx context.Context, url string, o DrainOptions) (r *DrainResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "drain", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, o.Dispatchers)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := n.connectAll(o.Dispatchers); err != nil {
		return nil, err
	}
	if o.Limits != (pgwake.Limits{}) {
		if err := n.SetLimits(ctx, pgwake.DefaultNamespace, o.Limits); err != nil {
			return nil, err
		}
	}
	if err := s.fillWork(ctx, 0, o.Items, 0, false); err != nil {
		return nil, err
	}
	if err := s.giveKeys(ctx, o.Keys); err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	t := newTally(o.Items)
	if o.Way == ByDispatcher {
		d := dispatch.New(tallied{n.Provider, t, new(atomic.Int64)}, &dispatch.Config{Concurrency: o.Dispatchers})
		dispatch.Handle(d, "measure", func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
			if o.Handler == 0 {
				return nil, nil
			}
			return nil, pause(ctx, o.Handler)
		})
		n.loop(func() error { return cmp.Or(d.Run(n.ctx), pgwake.ErrClosed) }) // it ends with the Provider
	} else {
		for range o.Dispatchers {
			n.loop(drainTurn(n, &o, t))
		}
	}
	if err := t.wait(n.ctx, o.Limit, o.Progress); err != nil {
		return nil, err
	}
	who := "pgwake, " + string(o.Way)
	if o.Handler > 0 {
		who += fmt.Sprintf(", handlers of %v", o.Handler)
	}
	return t.result(who, "defaults", &o), nil
}

// tallied counts what its Dispatcher has acknowledged, to disk.
type tallied struct {
	*pgwake.Provider
	t *tally

	unflushed *atomic.Int64
}

func (p tallied) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	err := p.Provider.AckWorkItems(ctx, tokens)
	if err == nil {
		p.t.add(len(tokens))
	}
	return err
}

func (p tallied) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	items, err := p.Provider.FetchWorkItems(ctx, n, o)
	if err == nil || errors.Is(err, pgwake.ErrNoWork) {
		if o.AckAsync {
			p.unflushed.Add(int64(len(o.Ack)))
		} else {
			p.t.add(len(o.Ack))
		}
	}
	return items, err
}

func (p tallied) Flush(ctx context.Context) error {
	n := p.unflushed.Swap(0)
	err := p.Provider.Flush(ctx)
	if err == nil {
		p.t.add(int(n))
	} else {
		p.unflushed.Add(n)
	}
	return err
}

// connectAll has so many dispatchers ask at a time, for nothing, so that connections are made and statements prepared.
func (n *node) connectAll(dispatchers int) error {
	var group errgroup.Group
	for range dispatchers {
		group.Go(func() error {
			_, err := n.FetchWorkItem(n.ctx, &pgwake.FetchOptions{NoWait: true})
			if errors.Is(err, pgwake.ErrNoWork) {
				return nil
			}
			return err
		})
	}
	return group.Wait()
}

// drainTurn is one turn of a dispatcher. It does not wait for work: there is none but the backlog.
func drainTurn(n *node, o *DrainOptions, t *tally) func() error {
	batch := 1
	if o.Way == InBatches {
		batch = o.Batch
	}
	fetch := &pgwake.FetchOptions{NoWait: true}
	return func() error {
		items, err := n.FetchWorkItems(n.ctx, batch, fetch)
		if err == nil || errors.Is(err, pgwake.ErrNoWork) {
			t.add(len(fetch.Ack))
			fetch.Ack = fetch.Ack[:0]
		}
		if err != nil {
			if errors.Is(err, pgwake.ErrNoWork) {
				return pause(n.ctx, time.Millisecond) // the others have the rest
			}
			return err
		}
		if o.Way == GroupedAcks {
			if err := n.AckBatched(n.ctx, items[0].LockToken, nil); err != nil {
				return err
			}
			t.add(1)
			return nil
		}
		for _, item := range items {
			fetch.Ack = append(fetch.Ack, item.LockToken)
		}
		return nil
	}
}

// BareDrain is the limit for Drain: a table with one index and no trigger, as many connections, each of which deletes the
// rows of its last batch and claims the next, by plain statements, in one round trip and one commit to disk.
func BareDrain(ctx context.Context, url string, o DrainOptions) (r *DrainResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "the drain's limit", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	if err := s.createBare(ctx, o.Items); err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	conns := make([]*pgx.Conn, o.Dispatchers)
	for i := range conns {
		if conns[i], err = s.connect(ctx); err != nil {
			return nil, err
		}
		defer hangUp(conns[i])
	}
	t := newTally(o.Items)
	group, ctx := errgroup.WithContext(ctx)
	for _, conn := range conns {
		group.Go(func() error {
			var ids []int64
			for t.done.Load() < int64(o.Items) {
				batch := &pgx.Batch{}
				if len(ids) > 0 {
					batch.Queue(bareAckSQL, ids)
				}
				acked := len(ids)
				batch.Queue(bareClaimSQL, o.Batch).Query(func(rows pgx.Rows) error {
					items, err := pgx.CollectRows(rows, pgx.RowToStructByPos[bareItem])
					ids = ids[:0:0]
					for _, item := range items {
						ids = append(ids, item.ID)
					}
					return err
				})
				if err := conn.SendBatch(ctx, batch).Close(); err != nil {
					return err
				}
				t.add(acked)
			}
			return nil
		})
	}
	waited := t.wait(ctx, 0, o.Progress)
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return t.result("bare table", "claim and delete in batches, one commit for both", &o), waited
}

// PeerDrain has a node of a peer do a backlog that was there before.
func PeerDrain(ctx context.Context, url string, p Peer, o DrainOptions) (r *DrainResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "drain, "+p.Name(), err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	if err := s.preparePeer(ctx, p); err != nil {
		return nil, err
	}
	producer, err := p.Produce(ctx, s.url, s.schema, 1)
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	if err := producer.Fill(ctx, 0, o.Items); err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	t := newTally(o.Items)
	n, err := s.openPeer(ctx, p, o.Dispatchers, PeerHandler{Done: t.add})
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := t.wait(n.ctx, o.Limit, o.Progress); err != nil {
		return nil, err
	}
	return t.result(p.Name(), p.Settings(), &o), nil
}
