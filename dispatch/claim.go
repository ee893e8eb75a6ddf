package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when are items claimed, and how many?

// claim claims until ctx ends. Its error is one that will not go away.
func (d *Dispatcher) claim(ctx context.Context) error {
	options := d.fetchOptions()
	patience := patience{log: d.cfg.Logger}
	for {
		n := d.work.room(ctx)
		if n == 0 {
			return nil
		}
		items, err := d.p.FetchWorkItems(ctx, n, options)
		d.work.take(items, n)
		if goOn, err := patience.after(ctx, err); !goOn {
			return err
		}
	}
}

func (d *Dispatcher) fetchOptions() *pgwake.FetchOptions {
	return &pgwake.FetchOptions{
		LockTimeout: d.cfg.LockTimeout, Namespaces: d.cfg.Namespaces, Tags: d.cfg.Tags, Session: d.cfg.Session, Fair: d.cfg.Fair,
	}
}

// The pauses between fetches while the database is away.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second
)

// patience is how a loop of fetches takes their errors.
type patience struct {
	log   *slog.Logger
	pause time.Duration // 0: the last one did not fail
}

// after reports whether to fetch again after one that returned err, when it is time for that. The error is one that will
// not go away.
func (p *patience) after(ctx context.Context, err error) (goOn bool, _ error) {
	var failure *pgwake.Error
	switch {
	case err == nil, errors.Is(err, pgwake.ErrNoWork):
		p.pause = 0
		return ctx.Err() == nil, nil
	case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
		return false, nil
	case !errors.As(err, &failure) || !failure.Retryable:
		return false, err
	}
	p.pause = min(max(2*p.pause, firstPause), lastPause)
	p.log.Warn("dispatch: cannot fetch", "error", err, "again_in", p.pause)
	nap(ctx, p.pause)
	return ctx.Err() == nil, nil
}

// nap waits for d, or until ctx ends.
func nap(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
