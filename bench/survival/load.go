package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: what load goes on while there is trouble? One node enqueues items at a fixed rate, and others do them.

const (
	consumers   = 2
	places      = 8 // of each, for handlers
	producers   = 8 // goroutines
	handling    = 2 * time.Millisecond
	lockTimeout = 5 * time.Second
	verbTimeout = 5 * time.Second
	retryPause  = 20 * time.Millisecond
	schema      = "pgwake"
)

// way is how nodes reach the server.
type way struct {
	mode   pgwake.Mode
	pool   func(*pgx.ConnConfig) // nil: directly
	listen func(*pgx.ConnConfig) // nil: directly
}

// fate is what became of an item.
type fate struct {
	committed time.Time // zero: the enqueue has not returned, or nobody knows its outcome
	began     time.Time // of the first handler
	runs      int
}

// pace says when an item is to be enqueued: the first at an instant, and then one after the other.
type pace struct {
	from  time.Time
	first int64
}

// load is the items, and who enqueues and does them. Its methods are called by one goroutine, but for handlers and producers.
type load struct {
	url  string
	rate int

	nodes   []*pgwake.Provider // those that do items
	end     context.CancelFunc // of the dispatchers
	running sync.WaitGroup     // the dispatchers
	failure atomic.Pointer[error]

	source  *pgwake.Provider // which enqueues
	stop    context.CancelFunc
	sending sync.WaitGroup
	pace    atomic.Pointer[pace]
	next    atomic.Int64 // number of the next item

	mu      sync.Mutex
	items   []fate // by number
	refused int    // enqueues that failed, and were repeated
	unknown int    // enqueues that failed, perhaps after they had taken effect
	earlier map[string]int64
}

func newLoad(url string, rate int) *load {
	return &load{url: url, rate: rate, earlier: map[string]int64{}}
}

// begin opens all nodes, which reach the server in some way, and has the producers enqueue.
func (l *load) begin(ctx context.Context, w way) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	l.end = end
	for range consumers {
		p, err := l.open(ctx, w)
		if err != nil {
			return err
		}
		l.nodes = append(l.nodes, p)
		d := dispatch.New(p, &dispatch.Config{Concurrency: places, LockTimeout: lockTimeout, Logger: silent})
		d.Handle("survive", l.handle)
		l.running.Go(func() {
			if err := d.Run(life); err != nil && life.Err() == nil {
				l.failure.CompareAndSwap(nil, &err)
			}
		})
	}
	if l.source, err = l.open(ctx, w); err != nil {
		return err
	}
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = stop
	l.keepPace()
	for range producers {
		l.sending.Go(func() { l.produce(sending) })
	}
	return nil
}

// keepPace forgets what is behind its time: the pace is kept from here on.
func (l *load) keepPace() { l.pace.Store(&pace{time.Now(), l.next.Load()}) }

var silent = slog.New(slog.DiscardHandler) // trouble is what this is about

func (l *load) open(ctx context.Context, w way) (*pgwake.Provider, error) {
	config, err := pgxpool.ParseConfig(l.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = places
	config.MinConns = 1
	listen := config.ConnConfig.Copy()
	if w.pool != nil {
		w.pool(config.ConnConfig)
	}
	if w.listen != nil {
		w.listen(listen)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: schema, SkipMigrate: true, Mode: w.mode, ListenConfig: listen, Logger: silent})
	if err != nil {
		pool.Close()
	}
	return p, err
}

// produce enqueues item after item, each at its time, and repeats what has certainly failed.
func (l *load) produce(ctx context.Context) {
	for {
		n := l.next.Add(1) - 1
		p := l.pace.Load()
		at := p.from.Add(time.Duration(n-p.first) * time.Second / time.Duration(l.rate))
		if !pause(ctx, time.Until(at)) {
			return
		}
		input, _ := json.Marshal(n)
		for {
			err := l.enqueue(ctx, input)
			l.mu.Lock()
			var failed *pgwake.Error
			switch {
			case err == nil:
				l.item(int(n)).committed = time.Now()
			case errors.As(err, &failed) && failed.Unknown:
				l.unknown++
			default:
				l.refused++
			}
			l.mu.Unlock()
			if err == nil || failed != nil && failed.Unknown {
				break
			}
			if !pause(ctx, retryPause) {
				return
			}
		}
	}
}

// enqueue goes on for a moment when ctx has ended, so that its outcome is known.
func (l *load) enqueue(ctx context.Context, input json.RawMessage) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
	defer cancel()
	_, err := l.source.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "survive", Input: input}, nil)
	return err
}

func (l *load) handle(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
	began := time.Now()
	var n int
	if err := json.Unmarshal(item.Input, &n); err != nil {
		return nil, dispatch.Permanent(err)
	}
	l.mu.Lock()
	f := l.item(n)
	if f.runs++; f.runs == 1 {
		f.began = began
	}
	l.mu.Unlock()
	pause(ctx, handling)
	return nil, nil
}

// item is that with this number. The lock is held.
func (l *load) item(n int) *fate {
	for len(l.items) <= n {
		l.items = append(l.items, fate{})
	}
	return &l.items[n]
}

// drain ends the sending, and waits until all that was enqueued has been begun and the queue is empty, or for so long. Then it
// closes the nodes.
func (l *load) drain(ctx context.Context, patience time.Duration) error {
	l.stop()
	l.sending.Wait()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		var queued int
		if err := l.source.Pool().QueryRow(ctx, countQueued).Scan(&queued); err == nil && queued == 0 && l.waiting() == 0 {
			break
		}
		if !pause(ctx, 20*time.Millisecond) {
			break
		}
	}
	return errors.Join(context.Cause(ctx), l.close())
}

const countQueued = `SELECT count(*) FROM ` + schema + `.worker_queue`

// waiting is how many were enqueued and not begun.
func (l *load) waiting() (count int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.items {
		if !f.committed.IsZero() && f.runs == 0 {
			count++
		}
	}
	return count
}

// close ends everything, and keeps what the nodes have counted.
func (l *load) close() (err error) {
	if l.stop != nil {
		l.stop()
		l.sending.Wait()
		l.stop = nil
	}
	if l.end != nil {
		l.end()
		l.running.Wait()
		l.end = nil
	}
	l.mu.Lock()
	l.earlier = l.count()
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, p := range append(l.nodes, l.source) {
		if p == nil {
			continue
		}
		err = errors.Join(err, p.Close(ctx))
		p.Pool().Close()
	}
	l.nodes, l.source = nil, nil
	if failure := l.failure.Load(); failure != nil {
		err = errors.Join(err, fmt.Errorf("a dispatcher ended: %w", *failure))
	}
	return err
}

// counts is how many queries found work so far, by what made them.
func (l *load) counts() map[string]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count()
}

func (l *load) count() map[string]int64 {
	counts := map[string]int64{}
	for reason, n := range l.earlier {
		counts[reason] += n
	}
	for _, p := range l.nodes {
		for reason, n := range p.Stats().Worker.Finds {
			counts[reason] += n
		}
	}
	return counts
}

// pause waits, and reports whether ctx goes on.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	wait := time.NewTimer(d)
	defer wait.Stop()
	select {
	case <-wait.C:
		return true
	case <-ctx.Done():
		return false
	}
}
