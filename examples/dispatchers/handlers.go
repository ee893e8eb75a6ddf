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
	accounts     string // the table
	samples      atomic.Int64
	encoderBegan chan struct{}
}

// work is all there is to do.
func (w *world) work() (work []pgwake.WorkEnqueue) {
	add := func(name string, input any, o pgwake.EnqueueOptions) {
		data, err := json.Marshal(input)
		if err != nil {
			panic(err) // strings and numbers
		}
		work = append(work, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: name, Input: data}, EnqueueOptions: o})
	}
	add("video.encode", "holiday", pgwake.EnqueueOptions{Priority: pgwake.MaxPriority})
	add("report.build", 2026, pgwake.EnqueueOptions{})
	add("mail.send", "nobody", pgwake.EnqueueOptions{})
	for i := range mailCount {
		add("mail.send", fmt.Sprint("reader ", i+1), pgwake.EnqueueOptions{})
	}
	for i := range transferCount {
		add("account.transfer", i, pgwake.EnqueueOptions{})
	}
	for i := range sampleCount {
		add("sample", i+1, pgwake.EnqueueOptions{Namespace: "samples"})
	}
	return work
}

// sendMail fails now and then, and always for nobody.
func (w *world) sendMail(_ context.Context, item *pgwake.ClaimedWorkItem) error {
	var to string
	if err := json.Unmarshal(item.Input, &to); err != nil {
		return err
	}
	switch {
	case to == "nobody":
		return errors.New("no such mailbox")
	case to == "reader 3" && item.Attempt < 3:
		return errors.New("the server is busy")
	}
	return nil
}

// buildReport has a bug.
func (w *world) buildReport(_ context.Context, item *pgwake.ClaimedWorkItem) error {
	if item.Attempt == 1 {
		panic("index out of range")
	}
	return nil
}

// encodeVideo takes longer than the lease, and does not care: its dispatcher renews that.
func (w *world) encodeVideo(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
	if item.Attempt == 1 {
		close(w.encoderBegan)
	}
	select {
	case <-time.After(encoding):
		return nil
	case <-ctx.Done(): // work that takes long should look at it now and then
		return context.Cause(ctx)
	}
}

// transfer moves 5 from ada to grace. What fails after that is rolled back with it, the ack included.
func (w *world) transfer(ctx context.Context, tx pgx.Tx, item *pgwake.ClaimedWorkItem) error {
	for _, entry := range []struct {
		owner  string
		amount int
	}{{"ada", -5}, {"grace", +5}} { // always in this order, so that two transfers cannot deadlock
		_, err := tx.Exec(ctx, "UPDATE "+w.accounts+" SET balance = balance + $1 WHERE owner = $2", entry.amount, entry.owner)
		if err != nil {
			return err
		}
	}
	var n int
	if err := json.Unmarshal(item.Input, &n); err != nil {
		return err
	}
	if n%5 == 0 && item.Attempt == 1 {
		return errors.New("the line went dead")
	}
	return nil
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
