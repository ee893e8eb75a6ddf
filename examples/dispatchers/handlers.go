package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: what is there to do, and what goes wrong with it?

const (
	mailCount     = 6
	transferCount = 20
	sampleCount   = 1000
	encoding      = lease + time.Second // longer than everything else together, and than the lease unless that is renewed
)

// world is what the handlers work on.
type world struct {
	provider     *pgwake.Provider
	accounts     string // the table
	samples      atomic.Int64
	encoderBegan chan struct{}

	transfers, mostTransfers atomic.Int64 // at work now, and at most
}

// work is all there is to do.
func (w *world) work() (work []pgwake.WorkEnqueue) {
	add := func(name string, input any, o pgwake.EnqueueOptions) {
		work = append(work, pgwake.WorkEnqueue{WorkItem: item(name, input), EnqueueOptions: o})
	}
	add("video.encode", "holiday", pgwake.EnqueueOptions{Priority: pgwake.MaxPriority})
	add("report.build", 2026, pgwake.EnqueueOptions{})
	add("mail.send", "nobody", pgwake.EnqueueOptions{})
	for i := range mailCount {
		add("mail.send", fmt.Sprint("reader ", i+1), pgwake.EnqueueOptions{})
	}
	for i := range transferCount {
		add("account.transfer", i, pgwake.EnqueueOptions{})
		work[len(work)-1].Key = "ada" // with whom it shares the limit
	}
	for i := range sampleCount {
		add("sample", i+1, pgwake.EnqueueOptions{Namespace: samples})
	}
	return work
}

func item(name string, input any) pgwake.WorkItem {
	data, err := json.Marshal(input)
	if err != nil {
		panic(err) // strings and numbers
	}
	return pgwake.WorkItem{Name: name, Input: data}
}

// limits hold over all processes: of the transfers of an account, which wait for each other in the database, two are at work
// at a time, and take no places from other work.
var limits = pgwake.Limits{MaxRunningPerKey: 2}

// none is the result of handlers that have none.
type none struct{}

// register registers the handlers of single items.
func (w *world) register(d *dispatch.Dispatcher) {
	dispatch.Handle(d, "mail.send", w.sendMail)
	dispatch.Handle(d, "report.build", w.buildReport)
	dispatch.Handle(d, "video.encode", w.encodeVideo)
	dispatch.HandleTx(d, "account.transfer", w.transfer)
}

// sendMail fails now and then, and always for nobody.
func (w *world) sendMail(ctx context.Context, to string) (none, error) {
	switch {
	case to == "nobody":
		return none{}, errors.New("no such mailbox")
	case to == "reader 3" && dispatch.ItemFrom(ctx).Attempt < 3:
		return none{}, errors.New("the server is busy")
	}
	return none{}, nil
}

// buildReport has a bug. When it has got over that it sends a mail, which belongs to the same trace by the context; and
// once, however often it is tried, by the dedup key.
func (w *world) buildReport(ctx context.Context, _ int) (none, error) {
	if dispatch.ItemFrom(ctx).Attempt == 1 {
		panic("index out of range")
	}
	_, err := w.provider.EnqueueForWorker(ctx, item("mail.send", "the boss"), &pgwake.EnqueueOptions{DedupKey: "report 2026", DedupFor: time.Hour})
	return none{}, err
}

// encodeVideo takes longer than the lease, and need not care: that is renewed.
func (w *world) encodeVideo(ctx context.Context, _ string) (none, error) {
	if dispatch.ItemFrom(ctx).Attempt == 1 {
		close(w.encoderBegan)
	}
	select {
	case <-time.After(encoding):
		return none{}, nil
	case <-ctx.Done(): // work that takes long should look at it now and then
		return none{}, context.Cause(ctx)
	}
}

// transfer moves 5 from ada to grace. What fails after that is rolled back with it, the ack included.
func (w *world) transfer(ctx context.Context, tx pgx.Tx, n int) (none, error) {
	now := w.transfers.Add(1)
	defer w.transfers.Add(-1)
	for most := w.mostTransfers.Load(); now > most && !w.mostTransfers.CompareAndSwap(most, now); {
		most = w.mostTransfers.Load()
	}
	for _, entry := range []struct {
		owner  string
		amount int
	}{{"ada", -5}, {"grace", +5}} { // always in this order, so that two transfers cannot deadlock
		_, err := tx.Exec(ctx, "UPDATE "+w.accounts+" SET balance = balance + $1 WHERE owner = $2", entry.amount, entry.owner)
		if err != nil {
			return none{}, err
		}
	}
	if n%5 == 0 && dispatch.ItemFrom(ctx).Attempt == 1 {
		return none{}, errors.New("the line went dead")
	}
	return none{}, nil
}

// addSamples handles many at once.
func (w *world) addSamples(_ context.Context, items []*pgwake.ClaimedWorkItem) error {
	for _, item := range items {
		var n int64
		if err := json.Unmarshal(item.Input, &n); err != nil {
			return err
		}
		w.samples.Add(n)
	}
	return nil
}
