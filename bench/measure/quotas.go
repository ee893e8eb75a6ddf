package measure

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: what do limits cost, are they used up, and how long does a tenant wait for another's flood?

// QuotasOptions are the sizes of Quotas.
type QuotasOptions struct {
	Drain DrainOptions // with limits that do not bind, and without any

	Nodes   int           // that share a limit. Defaults to 5.
	Places  int           // of each node. Defaults to 8.
	Most    int           // the limit. Defaults to 10.
	Handler time.Duration // how long each item takes, or twice that. Defaults to 50 ms.
	Keys    int           // among which it is divided, where each has one of its own. Defaults to 5.
	Items   int           // to be done under it. Defaults to 2000.

	Flood   int // items of the other tenant. Defaults to 1,000,000.
	Singles int // items of the tenant that is to come through. Defaults to 100.

	Progress func(Progress)
}

// QuotasResult is what Quotas found.
type QuotasResult struct {
	Drains []*LimitedDrain `json:"drains"`
	Shared []*SharedLimit  `json:"shared"`

	Flood  int     `json:"flood"`
	Delays Samples `json:"delays"` // from the enqueue's return to the handler, of a tenant beside the flood
}

// LimitedDrain is a drain with limits that do not bind, beside the same without.
type LimitedDrain struct {
	Limits  string       `json:"limits"`
	Free    *DrainResult `json:"free"`
	Limited *DrainResult `json:"limited"`
}

// SharedLimit is a limit that binds.
type SharedLimit struct {
	Nodes   int           `json:"nodes"`
	Keys    int           `json:"keys,omitempty"` // among which it is divided; 0: it is that of the namespace
	Most    int           `json:"most"`
	Handler time.Duration `json:"handler"` // how long each item takes
	Highest int           `json:"highest"` // how many handlers ran at one time
	Busy    float64       `json:"busy"`    // share of the limit's places that were taken by handlers, from the first to the last that began
	Empty   time.Duration `json:"empty"`   // how long a place was not taken, for each item
}

// drains measures what limits cost.
func (o *QuotasOptions) drains(ctx context.Context, url string, r *QuotasResult) (err error) {
	o.Drain.setDefaults()
	o.Drain.Progress, o.Drain.Keys = o.Progress, 1000
	atWork := 4 * o.Drain.Dispatchers * o.Drain.Batch
	inBatches, byDispatcher := o.Drain, o.Drain
	byDispatcher.Way = ByDispatcher
	withHandlers := byDispatcher
	withHandlers.Handler, withHandlers.Items = time.Millisecond, o.Drain.Items/10
	for _, drain := range []DrainOptions{inBatches, byDispatcher, withHandlers} {
		free, err := Drain(ctx, url, drain)
		if err != nil {
			return err
		}
		for _, of := range []struct {
			what   string
			limits pgwake.Limits
		}{
			{"items at work", pgwake.Limits{MaxRunning: atWork}},
			{"items at work of a key", pgwake.Limits{MaxRunningPerKey: atWork}},
			{"items of a key in a second", pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Microsecond, Burst: atWork}}},
		} {
			drain.Limits = of.limits
			limited, err := Drain(ctx, url, drain)
			if err != nil {
				return err
			}
			r.Drains = append(r.Drains, &LimitedDrain{of.what, free, limited})
		}
	}
	return nil
}

// Quotas measures them one after the other.
func Quotas(ctx context.Context, url string, o QuotasOptions) (r *QuotasResult, err error) {
	orDefault(&o.Nodes, 5)
	orDefault(&o.Places, 8)
	orDefault(&o.Most, 10)
	orDefault(&o.Handler, 50*time.Millisecond)
	orDefault(&o.Keys, 5)
	orDefault(&o.Items, 2000)
	orDefault(&o.Flood, 1_000_000)
	orDefault(&o.Singles, 100)
	defer func(ctx context.Context) { err = about(ctx, "limits", err) }(ctx)
	r = &QuotasResult{Flood: o.Flood}
	if err := o.drains(ctx, url, r); err != nil {
		return nil, err
	}
	for _, shared := range []*SharedLimit{
		{Nodes: o.Nodes, Handler: o.Handler}, {Nodes: o.Nodes, Handler: 2 * o.Handler},
		{Nodes: o.Nodes, Handler: o.Handler, Keys: o.Keys}, {Nodes: 1, Handler: o.Handler, Keys: o.Keys},
	} {
		shared.Most = o.Most
		if err := o.share(ctx, url, shared); err != nil {
			return nil, err
		}
		r.Shared = append(r.Shared, shared)
	}
	return r, o.flood(ctx, url, r)
}

// share has nodes do items of which only so many may be at work.
func (o *QuotasOptions) share(ctx context.Context, url string, r *SharedLimit) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	var mu sync.Mutex
	var running, highest int
	var began, last time.Time
	var busy time.Duration
	t := newTally(o.Items)
	limits := pgwake.Limits{MaxRunning: o.Most}
	if r.Keys > 0 {
		limits = pgwake.Limits{MaxRunningPerKey: o.Most / r.Keys}
	}
	for i := range r.Nodes {
		n, err := s.open(ctx, o.Places)
		if err != nil {
			return err
		}
		defer n.close(&err)
		if i == 0 {
			if err := n.SetLimits(ctx, pgwake.DefaultNamespace, limits); err != nil {
				return err
			}
			if err := s.fillWork(ctx, 0, o.Items, 0, false); err != nil {
				return err
			}
			if err := s.giveKeys(ctx, r.Keys); err != nil {
				return err
			}
		}
		d := dispatch.New(n.Provider, &dispatch.Config{Concurrency: max(o.Places, o.Most/r.Nodes)})
		d.Handle("measure", func(ctx context.Context, _ *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			at := time.Now()
			mu.Lock()
			if running++; running > highest {
				highest = running
			}
			if last = at; began.IsZero() {
				began = at
			}
			mu.Unlock()
			err := pause(ctx, r.Handler)
			mu.Lock()
			running--
			busy += time.Since(at) // a timer may be late
			mu.Unlock()
			t.add(1)
			return nil, err
		})
		n.loop(func() error { return errors.Join(d.Run(n.ctx), pgwake.ErrClosed) })
	}
	if err := t.wait(ctx, 0, o.Progress); err != nil {
		return err
	}
	mu.Lock()
	defer mu.Unlock()
	r.Highest = highest
	// The last ones, as many as there are places, are at work when nothing is left to take those of others.
	busy -= time.Duration(o.Most) * r.Handler
	places := time.Duration(o.Most) * last.Sub(began)
	r.Busy, r.Empty = float64(busy)/float64(places), (places-busy)/time.Duration(o.Items)
	return nil
}

// giveKeys gives the queued items so many keys, by turns; 0: none.
func (s *stage) giveKeys(ctx context.Context, keys int) error {
	if keys == 0 {
		return nil
	}
	return withConn(ctx, s.url, func(conn *pgx.Conn) error {
		if err := searchPath(ctx, conn, s.schema); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `UPDATE worker_queue SET key = 'key ' || id % $1::bigint`, keys)
		return err
	})
}

// flood has one tenant's items come one by one while there are very many of another.
func (o *QuotasOptions) flood(ctx context.Context, url string, r *QuotasResult) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 8)
	if err != nil {
		return err
	}
	defer n.close(&err)
	if err := withConn(ctx, s.url, func(conn *pgx.Conn) error {
		if err := searchPath(ctx, conn, s.schema); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, `INSERT INTO worker_queue (name, namespace) SELECT 'measure', 'flood' FROM generate_series(1, $1::integer)`, o.Flood)
		return err
	}); err != nil {
		return err
	}
	if err := s.calm(ctx); err != nil {
		return err
	}
	inHand := make(chan time.Time, 1)
	var started atomic.Bool
	d := dispatch.New(n.Provider, &dispatch.Config{Concurrency: 8, Fair: true})
	d.Handle("measure", func(ctx context.Context, _ *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		started.Store(true)
		return nil, pause(ctx, 5*time.Millisecond)
	})
	d.Handle("single", func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		inHand <- time.Now()
		return nil, nil
	})
	n.loop(func() error { return errors.Join(d.Run(n.ctx), pgwake.ErrClosed) })
	for !started.Load() {
		if err := pause(n.ctx, time.Millisecond); err != nil {
			return context.Cause(n.ctx)
		}
	}
	for range o.Singles {
		if _, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "single"}, &pgwake.EnqueueOptions{Namespace: "tenant"}); err != nil {
			return err
		}
		committed := time.Now()
		select {
		case at := <-inHand:
			r.Delays = append(r.Delays, at.Sub(committed))
		case <-n.ctx.Done():
			return context.Cause(n.ctx)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}
