package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// This file answers: how is River put through the scenarios?

// RiverSettings are those that matter here. What they leave out is River's default.
type RiverSettings struct {
	FetchCooldown     time.Duration // River's default: 100 ms
	FetchPollInterval time.Duration // River's default: 1 s
}

// RiverBench are the settings of River's own benchmark (cmd/river/riverbench), which works with 2,000 workers.
var RiverBench = RiverSettings{FetchCooldown: 2 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond}

// RiverBenchWorkers is how many workers that benchmark has.
const RiverBenchWorkers = 2000

type riverPeer struct {
	name     string
	settings RiverSettings
}

// River is the queue riverqueue.com, on one queue. An item is done when its client says that the job was completed,
// which it does after its batch completer has committed.
func River(name string, s RiverSettings) measure.Peer { return &riverPeer{name, s} }

func (p *riverPeer) Name() string { return p.name }

func (p *riverPeer) Settings() string {
	if p.settings == (RiverSettings{}) {
		return fmt.Sprintf("%s: FetchCooldown %v, FetchPollInterval %v (its defaults)", riverVersion(), river.FetchCooldownDefault, river.FetchPollIntervalDefault)
	}
	return fmt.Sprintf("%s: FetchCooldown %v, FetchPollInterval %v (those of its own bench)", riverVersion(), p.settings.FetchCooldown, p.settings.FetchPollInterval)
}

// riverItem is the job.
type riverItem struct {
	N int `json:"n"`
}

func (riverItem) Kind() string { return "measure" }

type riverWorker struct {
	river.WorkerDefaults[riverItem]
	hand func(n int)
}

func (w *riverWorker) Work(_ context.Context, job *river.Job[riverItem]) error {
	if w.hand != nil {
		w.hand(job.Args.N)
	}
	return nil
}

func (p *riverPeer) Prepare(ctx context.Context, url, schema string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: schema, Logger: quiet})
	if err != nil {
		return err
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

var quiet = slog.New(slog.DiscardHandler)

func (p *riverPeer) Produce(ctx context.Context, url, schema string, writers int) (measure.PeerProducer, error) {
	pool, err := newPool(ctx, url, schema, writers, nil)
	if err != nil {
		return nil, err
	}
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: schema, Logger: quiet})
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &riverProducer{pool, client}, nil
}

type riverProducer struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
}

func (p *riverProducer) Enqueue(ctx context.Context, n int, at time.Time) error {
	_, err := p.client.Insert(ctx, riverItem{n}, &river.InsertOpts{ScheduledAt: at})
	return err
}

// riverChunk is how many jobs River's own benchmark inserts at a time.
const riverChunk = 5000

func (p *riverProducer) Fill(ctx context.Context, first, count int) error {
	for done := 0; done < count; done += riverChunk {
		jobs := make([]river.InsertManyParams, min(riverChunk, count-done))
		for i := range jobs {
			jobs[i].Args = riverItem{first + done + i}
		}
		if _, err := p.client.InsertManyFast(ctx, jobs); err != nil {
			return err
		}
	}
	return nil
}

func (p *riverProducer) Close() { p.pool.Close() }

func (p *riverPeer) Open(ctx context.Context, url, schema string, workers int, h measure.PeerHandler) (measure.PeerNode, error) {
	pool, err := newPool(ctx, url, schema, 0, nil)
	if err != nil {
		return nil, err
	}
	registered := river.NewWorkers()
	river.AddWorker(registered, &riverWorker{hand: h.Hand})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Schema: schema, Logger: quiet, Workers: registered,
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}},
		FetchCooldown: p.settings.FetchCooldown, FetchPollInterval: p.settings.FetchPollInterval,
	})
	if err != nil {
		pool.Close()
		return nil, err
	}
	n := &riverNode{pool: pool, client: client, failed: make(chan struct{}), counted: make(chan struct{})}
	// Its subscriptions drop what a channel does not hold, so this one holds everything that there may be.
	events, cancel := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: 1 << 19,
		Kinds: []river.EventKind{river.EventKindJobCompleted, river.EventKindJobFailed, river.EventKindJobCancelled}})
	n.cancel = cancel
	go n.count(events, h.Done)
	if err := client.Start(ctx); err != nil {
		cancel()
		pool.Close()
		return nil, err
	}
	return n, nil
}

type riverNode struct {
	pool    *pgxpool.Pool
	client  *river.Client[pgx.Tx]
	cancel  func()
	failed  chan struct{}
	counted chan struct{}
	err     error
}

// count passes on what is done, as many as there are at a time.
func (n *riverNode) count(events <-chan *river.Event, done func(int)) {
	defer close(n.counted)
	for event := range events {
		count := 0
		for more := true; more; {
			if event.Kind != river.EventKindJobCompleted {
				n.err = fmt.Errorf("job %d: %s", event.Job.ID, event.Kind)
				break
			}
			count++
			select {
			case event, more = <-events:
			default:
				more = false
			}
		}
		if done != nil && count > 0 {
			done(count)
		}
		if n.err != nil {
			close(n.failed)
			return
		}
	}
}

func (n *riverNode) Looks() int64            { return -1 }
func (n *riverNode) Failed() <-chan struct{} { return n.failed }

func (n *riverNode) Close(ctx context.Context) error {
	err := n.client.StopAndCancel(ctx)
	n.cancel()
	<-n.counted
	n.pool.Close()
	return errors.Join(err, n.err)
}
