package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// These stand in docs/moving-from-river.md and docs/moving-from-pgmq.md.

type resize struct {
	Image string `json:"image"`
	Width int    `json:"width"`
}

// insertResize was client.InsertTx.
func insertResize(ctx context.Context, p *pgwake.Provider, tx pgx.Tx, args resize) error {
	input, err := json.Marshal(args)
	if err != nil {
		return err
	}
	_, err = p.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "resize", Input: input}, &pgwake.EnqueueOptions{
		Namespace: "images",               // InsertOpts.Queue
		Priority:  8,                      // InsertOpts.Priority, but here the highest is first
		Delay:     10 * time.Millisecond,  // InsertOpts.ScheduledAt; At is an instant
		DedupKey:  "resize " + args.Image, // UniqueOpts.ByArgs
		DedupFor:  time.Hour,              // UniqueOpts.ByPeriod, but it begins with the enqueue
	})
	return err
}

// resizeImage was Work of a river.Worker.
func resizeImage(ctx context.Context, args resize) (struct{}, error) {
	switch attempt := dispatch.ItemFrom(ctx).Attempt; {
	case args.Width > 10_000:
		return struct{}{}, dispatch.Permanent(errors.New("nobody has such a screen")) // river.JobCancel
	case attempt == 1:
		return struct{}{}, dispatch.RetryAfter(errors.New("the disk is full"), 10*time.Millisecond) // an error, and NextRetry
	}
	fmt.Println("resized", args.Image)
	return struct{}{}, nil
}

// newClient was river.NewClient with its workers; d.Run(ctx) was client.Start, and the end of ctx client.Stop.
func newClient(p *pgwake.Provider) *dispatch.Dispatcher {
	d := dispatch.New(p, &dispatch.Config{
		Namespaces:  []string{"images"},
		Concurrency: 100,         // QueueConfig.MaxWorkers
		Timeout:     time.Minute, // Config.JobTimeout
		StopTimeout: 10 * time.Second,
	})
	dispatch.Handle(d, "resize", resizeImage, dispatch.WithMaxAttempts(10))
	return d
}

func Example_movingFromRiver() {
	ctx, p, end := openProvider()
	defer end()
	for range 2 { // the second one adds nothing
		check(pgx.BeginFunc(ctx, p.Pool(), func(tx pgx.Tx) error { return insertResize(ctx, p, tx, resize{"ada.png", 640}) }))
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- newClient(p).Run(running) }()
	for depths := []pgwake.QueueDepth{{}}; len(depths) > 0; {
		var err error
		depths, err = p.GetQueueDepths(ctx)
		check(err)
	}
	stop()
	check(<-ended)
	// Output: resized ada.png
}

// readAndArchive was pgmq.read with a vt of 30 and a qty of 10, and pgmq.archive for each message.
func readAndArchive(ctx context.Context, p *pgwake.Provider, handle func(*pgwake.ClaimedWorkItem) error) error {
	items, err := p.FetchWorkItems(ctx, 10, &pgwake.FetchOptions{Namespaces: []string{"orders"}, LockTimeout: 30 * time.Second, PollTimeout: 5 * time.Second})
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil // read_with_poll has returned no row
	}
	if err != nil {
		return err
	}
	var done []pgwake.LockToken
	for _, item := range items {
		if err := handle(item); err == nil { // an item that failed comes again when its lease ends, as it did
			done = append(done, item.LockToken)
		}
	}
	return p.AckWorkItems(ctx, done) // with Config.ArchiveFor: pgmq.archive; without: pgmq.delete
}

func Example_movingFromPgmq() {
	ctx, p, end := openProvider()
	defer end()
	_, err := p.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{ // pgmq.send_batch
		{WorkItem: pgwake.WorkItem{Name: "order", Input: []byte(`{"id":1}`)}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "orders"}},
		{WorkItem: pgwake.WorkItem{Name: "order", Input: []byte(`{"id":2}`)}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "orders"}},
	})
	check(err)
	check(readAndArchive(ctx, p, func(item *pgwake.ClaimedWorkItem) error {
		fmt.Println(string(item.Input))
		return nil
	}))
	depths, err := p.GetQueueDepths(ctx)
	check(err)
	fmt.Println(len(depths), "left")
	// Output:
	// {"id":1}
	// {"id":2}
	// 0 left
}
