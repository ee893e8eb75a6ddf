package measure

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: how fast is a pile of items done, and how many wake-ups does that take?

// BurstOptions are the sizes of Burst.
type BurstOptions struct {
	Items       int  // Defaults to 50,000.
	Chunk       int  // Items per EnqueueForWorkerMany. Defaults to 1,000.
	Batch       int  // Items per FetchWorkItems. Defaults to 100.
	Dispatchers int  // Defaults to 8.
	Prefill     bool // Enqueue all before the dispatchers start, rather than while they wait.
	Progress    func(Progress)
}

// BurstResult is what Burst found.
type BurstResult struct {
	Items   int           `json:"items"`
	Prefill bool          `json:"prefill"`
	Enqueue time.Duration `json:"enqueue"` // from the first enqueue to the return of the last

	// Drain is from the first enqueue, or with Prefill from the start of the dispatchers, to the return
	// of the last ack.
	Drain time.Duration `json:"drain"`

	Tokens map[string]int64 `json:"tokens"` // wake-ups by reason
	Looks  int64            `json:"looks"`  // queries for work
	Again  int              `json:"again"`  // deliveries beyond the first
	Net    SafetyNet        `json:"safety_net"`
}

// PerSecond is the throughput in items.
func (r *BurstResult) PerSecond() float64 { return float64(r.Items) / r.Drain.Seconds() }

// TokenCount is the number of all wake-ups.
func (r *BurstResult) TokenCount() (n int64) {
	for _, count := range r.Tokens {
		n += count
	}
	return n
}

// Burst has another Provider enqueue items in chunks, and dispatchers claim and acknowledge them in batches.
func Burst(ctx context.Context, url string, o BurstOptions) (r *BurstResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "burst", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	producer, err := s.open(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer producer.close(&err)
	consumer, err := s.open(ctx, o.Dispatchers)
	if err != nil {
		return nil, err
	}
	defer consumer.close(&err)
	ctx = consumer.ctx

	l := newLedger(o.Items)
	var acked atomic.Int64
	drained := make(chan time.Time, 1)
	dispatch := func() {
		for range o.Dispatchers {
			consumer.loop(func() error {
				items, err := consumer.FetchWorkItems(ctx, o.Batch, nil)
				if err != nil {
					return err
				}
				inHand := time.Now()
				tokens := make([]pgwake.LockToken, len(items))
				for i, item := range items {
					tokens[i] = item.LockToken
					if err := l.take(item, inHand); err != nil {
						return err
					}
				}
				done := len(tokens)
				lost := (*pgwake.LostLocksError)(nil)
				if err := consumer.AckWorkItems(ctx, tokens); errors.As(err, &lost) {
					done -= len(lost.Tokens) // they come again
				} else if err != nil {
					return err
				}
				if acked.Add(int64(done)) == int64(o.Items) {
					drained <- time.Now()
				}
				return nil
			})
		}
	}
	r = &BurstResult{Items: o.Items, Prefill: o.Prefill}
	if !o.Prefill {
		dispatch()
		if err := consumer.parked(o.Dispatchers); err != nil {
			return nil, err
		}
	}
	before := consumer.Stats().Worker
	began := time.Now()
	fill := func() error {
		for first := 0; first < o.Items; first += o.Chunk {
			chunk := make([]pgwake.WorkEnqueue, min(o.Chunk, o.Items-first))
			for i := range chunk {
				chunk[i].WorkItem = l.item(first + i)
			}
			if _, err := producer.EnqueueForWorkerMany(ctx, chunk); err != nil {
				return err
			}
		}
		r.Enqueue = time.Since(began)
		return nil
	}
	var filling errgroup.Group
	if o.Prefill {
		if err := fill(); err != nil {
			return nil, err
		}
		began = time.Now()
		dispatch()
	} else {
		filling.Go(fill)
	}

	m := newMeter(o.Progress)
	err = watch(ctx, m, func() Progress { return Progress{Done: int(acked.Load()), Total: o.Items} }, drained, func(at time.Time) {
		r.Drain = at.Sub(began)
	})
	if err := errors.Join(filling.Wait(), err); err != nil {
		return nil, err
	}
	after := consumer.Stats().Worker
	r.Looks = after.Looks - before.Looks
	r.Tokens = maps.Clone(after.Tokens)
	for why := range r.Tokens {
		r.Tokens[why] -= before.Tokens[why]
	}
	r.Again = l.redelivered()
	r.Net, err = safetyNet(ctx, consumer.Provider)
	return r, err
}

func (o *BurstOptions) setDefaults() {
	orDefault(&o.Items, 50_000)
	orDefault(&o.Chunk, 1000)
	orDefault(&o.Batch, 100)
	orDefault(&o.Dispatchers, 8)
}

// watch reports progress until something comes, which it passes on.
func watch[T any](ctx context.Context, m *meter, progress func() Progress, done <-chan T, take func(T)) error {
	tick := time.NewTicker(progressPause)
	defer tick.Stop()
	stuck := time.NewTimer(patience)
	defer stuck.Stop()
	for last := 0; ; {
		select {
		case v := <-done:
			take(v)
			m.report(progress())
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			p := progress()
			m.report(p)
			if p.Done != last {
				last = p.Done
				stuck.Reset(patience)
			}
		case <-stuck.C:
			return fmt.Errorf("nothing happened for %v", patience)
		}
	}
}

// BareBurst is the baseline of Burst with Prefill: as many rows in a plain table with one index and no
// trigger, claimed and deleted in batches of the same size by as many connections. It returns how long that
// took.
func BareBurst(ctx context.Context, url string, o BurstOptions) (drain time.Duration, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "the burst's baseline", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	if err := s.createBare(ctx, o.Items); err != nil {
		return 0, err
	}
	conns := make([]*pgx.Conn, o.Dispatchers)
	for i := range conns {
		if conns[i], err = s.connect(ctx); err != nil {
			return 0, err
		}
		defer hangUp(conns[i])
	}
	var left atomic.Int64
	left.Store(int64(o.Items))
	var once sync.Once
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for _, conn := range conns {
		group.Go(func() error {
			for left.Load() > 0 {
				rows, err := conn.Query(ctx, bareClaimSQL, o.Batch)
				if err != nil {
					return err
				}
				items, err := pgx.CollectRows(rows, pgx.RowToStructByPos[bareItem])
				if err != nil {
					return err
				}
				ids := make([]int64, len(items))
				for i, item := range items {
					ids[i] = item.ID
				}
				if len(ids) == 0 {
					continue // the others hold what is left
				}
				if _, err := conn.Exec(ctx, bareAckSQL, ids); err != nil {
					return err
				}
				if left.Add(-int64(len(ids))) == 0 {
					once.Do(func() { drain = time.Since(began) })
				}
			}
			return nil
		})
	}
	err = group.Wait()
	return drain, err
}
