package peers

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what would the published design reach, as it is written?
//
// It is "Long Polling Design (Simplified)": a trigger for each row that notifies with the due time; one LISTEN connection
// per node; a bounded channel of tokens, each of which wakes one dispatcher; one atomic with the earliest due time, set to 0
// when it has come or when a fetch finds something; a chain token after a find by a token; a fallback after 60 s. Of its
// two notifications this is the one with a due time, the better one. Claims take one row. The same code without
// the listener is a short poll.

var (
	//go:embed published_table.sql
	publishedTableSQL string
	//go:embed published_trigger.sql
	publishedTriggerSQL string
	//go:embed published_enqueue.sql
	publishedEnqueueSQL string
	//go:embed published_fill.sql
	publishedFillSQL string
	//go:embed published_claim.sql
	publishedClaimSQL string
	//go:embed published_ack.sql
	publishedAckSQL string
)

// The defaults of the published design.
const (
	publishedFallback  = time.Minute
	publishedGrace     = 50 * time.Millisecond
	publishedReconnect = time.Second
)

// alongTheIndex has claims walk along the index whatever the statistics say: those of a queue are wrong most of the time.
var alongTheIndex = map[string]string{"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off"}

type published struct {
	poll time.Duration // 0: it listens
}

// Published is the published design with its defaults.
func Published() measure.Peer { return published{} }

// ShortPoll is a loop that asks, and asks again after so long if there was nothing.
func ShortPoll(every time.Duration) measure.Peer { return published{poll: every} }

func (p published) Name() string {
	if p.poll > 0 {
		return fmt.Sprintf("poll each %v", p.poll)
	}
	return "published design"
}

func (p published) Settings() string {
	if p.poll > 0 {
		return "1 row per claim, no trigger"
	}
	return fmt.Sprintf("row trigger, broadcast, 1 row per claim, fallback %v, grace %v", publishedFallback, publishedGrace)
}

func (p published) Prepare(ctx context.Context, url, schema string) error {
	pool, err := newPool(ctx, url, schema, 1, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, publishedTableSQL); err != nil || p.poll > 0 {
		return err
	}
	// The channel's name is a constant of the trigger, as published; schemas here have no quotes in their names.
	_, err = pool.Exec(ctx, fmt.Sprintf(publishedTriggerSQL, "'"+schema+"_orch_work'"))
	return err
}

func (p published) Produce(ctx context.Context, url, schema string, writers int) (measure.PeerProducer, error) {
	pool, err := newPool(ctx, url, schema, writers, nil)
	if err != nil {
		return nil, err
	}
	return publishedProducer{pool}, nil
}

type publishedProducer struct{ pool *pgxpool.Pool }

func (p publishedProducer) Enqueue(ctx context.Context, n int, at time.Time) error {
	due := &at
	if at.IsZero() {
		due = nil
	}
	_, err := p.pool.Exec(ctx, publishedEnqueueSQL, strconv.Itoa(n), due)
	return err
}

func (p publishedProducer) Fill(ctx context.Context, first, count int) error {
	_, err := p.pool.Exec(ctx, publishedFillSQL, first, count)
	return err
}

func (p publishedProducer) Close() { p.pool.Close() }

// Open starts the dispatchers, and unless it polls the listener and the timer.
func (p published) Open(ctx context.Context, url, schema string, workers int, h measure.PeerHandler) (measure.PeerNode, error) {
	pool, err := newPool(ctx, url, schema, 0, alongTheIndex)
	if err != nil {
		return nil, err
	}
	n := &publishedNode{pool: pool, poll: p.poll, channel: schema + "_orch_work", h: h,
		tokens: make(chan struct{}, workers), sooner: make(chan struct{}, 1), failed: make(chan struct{})}
	ctx, n.stop = context.WithCancel(ctx)
	if p.poll == 0 {
		listener, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
		if err == nil {
			_, err = listener.Exec(ctx, "LISTEN "+pgx.Identifier{n.channel}.Sanitize())
		}
		if err != nil {
			n.stop()
			pool.Close()
			return nil, err
		}
		n.all.Go(func() { n.listen(ctx, listener) })
		n.all.Go(func() { n.timer(ctx) })
	}
	for range workers {
		n.all.Go(func() {
			for {
				if err := n.turn(ctx); err != nil {
					if ctx.Err() == nil {
						n.fail(err)
					}
					return
				}
			}
		})
	}
	return n, nil
}

type publishedNode struct {
	pool    *pgxpool.Pool
	poll    time.Duration
	channel string
	h       measure.PeerHandler

	tokens chan struct{} // each wakes one dispatcher
	next   atomic.Int64  // earliest due time in ms; 0: none
	sooner chan struct{} // next has changed
	looks  atomic.Int64

	all    sync.WaitGroup
	stop   context.CancelFunc
	once   sync.Once
	failed chan struct{}
	err    error
}

func (n *publishedNode) fail(err error) {
	n.once.Do(func() {
		n.err = err
		close(n.failed)
		n.stop()
	})
}

func (n *publishedNode) Looks() int64            { return n.looks.Load() }
func (n *publishedNode) Failed() <-chan struct{} { return n.failed }

func (n *publishedNode) Close(context.Context) error {
	n.stop()
	n.all.Wait()
	n.pool.Close()
	return n.err
}

// wake sends a token unless the channel is full.
func (n *publishedNode) wake() {
	select {
	case n.tokens <- struct{}{}:
	default:
	}
}

// turn is a fetch, the handler, and the ack.
func (n *publishedNode) turn(ctx context.Context) error {
	found, err := n.try(ctx) // the tight loop: no token
	if found || err != nil {
		return err
	}
	if n.poll > 0 {
		select {
		case <-time.After(n.poll):
		case <-ctx.Done():
		}
		return ctx.Err()
	}
	select {
	case <-n.tokens:
	case <-ctx.Done():
		return ctx.Err()
	}
	return n.chained(ctx)
}

// chained is the fetch after a token: if it finds something it passes a token on.
func (n *publishedNode) chained(ctx context.Context) error {
	_, err := n.claim(ctx, n.wake)
	return err
}

func (n *publishedNode) try(ctx context.Context) (bool, error) { return n.claim(ctx, func() {}) }

func (n *publishedNode) claim(ctx context.Context, found func()) (bool, error) {
	var id int64
	var input string
	n.looks.Add(1)
	switch err := n.pool.QueryRow(ctx, publishedClaimSQL).Scan(&id, &input); {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil
	case err != nil:
		return false, err
	}
	n.next.Store(0)
	found()
	number, err := strconv.Atoi(input)
	if err != nil {
		return true, err
	}
	if n.h.Hand != nil {
		n.h.Hand(number)
	}
	if _, err := n.pool.Exec(ctx, publishedAckSQL, id); err != nil {
		return true, err
	}
	if n.h.Done != nil {
		n.h.Done(1)
	}
	return true, nil
}

// listen turns notifications into tokens and timers, and reconnects after a second.
func (n *publishedNode) listen(ctx context.Context, conn *pgx.Conn) {
	for {
		err := n.hear(ctx, conn)
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishedReconnect)
		_ = conn.Close(closing)
		cancel()
		for err != nil {
			select {
			case <-time.After(publishedReconnect):
			case <-ctx.Done():
				return
			}
			if conn, err = pgx.ConnectConfig(ctx, n.pool.Config().ConnConfig); err == nil {
				_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{n.channel}.Sanitize())
			}
		}
	}
}

func (n *publishedNode) hear(ctx context.Context, conn *pgx.Conn) error {
	for {
		note, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		due, _ := strconv.ParseInt(note.Payload, 10, 64)
		if due <= time.Now().UnixMilli() {
			n.wake()
			continue
		}
		for {
			next := n.next.Load()
			if next != 0 && next <= due || n.next.CompareAndSwap(next, due) {
				break
			}
		}
		select {
		case n.sooner <- struct{}{}:
		default:
		}
	}
}

// timer sleeps until the earliest due time or the fallback, and then wakes one dispatcher.
func (n *publishedNode) timer(ctx context.Context) {
	for {
		sleep := publishedFallback
		if next := n.next.Load(); next > 0 {
			// Within the grace it wakes somebody as often as its clock ticks, which is each millisecond.
			sleep = min(sleep, max(time.Millisecond, time.Until(time.UnixMilli(next))-publishedGrace))
		}
		t := time.NewTimer(sleep)
		select {
		case <-t.C:
			n.wake()
			if next := n.next.Load(); next > 0 && next <= time.Now().UnixMilli() {
				n.next.Store(0)
			}
		case <-n.sooner:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}
