package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when are items claimed, and how many?

// fetchPause bounds the pauses between fetches while the database is away.
const (
	firstFetchPause = 50 * time.Millisecond
	lastFetchPause  = time.Second
)

// claim claims until ctx ends. Its error is one that will not go away.
func (d *Dispatcher) claim(ctx context.Context) error {
	options := &pgwake.FetchOptions{
		LockTimeout: d.cfg.LockTimeout, Namespaces: d.cfg.Namespaces, Tags: d.cfg.Tags, Session: d.cfg.Session,
		MaxAttempts: d.mostAttempts(),
	}
	pause := firstFetchPause
	for {
		n := d.work.places(ctx)
		if n == 0 {
			return nil
		}
		sent := time.Now() // the leases begin later
		items, err := d.p.FetchWorkItems(ctx, n, options)
		var failure *pgwake.Error
		switch {
		case err == nil:
			pause = firstFetchPause
			d.work.take(items, sent.Add(d.cfg.LockTimeout))
		case errors.Is(err, pgwake.ErrNoWork):
			pause = firstFetchPause
		case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
			return nil
		case errors.As(err, &failure) && failure.Retryable:
			d.cfg.Logger.Warn("dispatch: cannot fetch", "error", err, "again_in", pause)
			nap(ctx, pause)
			pause = min(2*pause, lastFetchPause)
		default:
			return err
		}
	}
}

// mostAttempts is from how many claims on the Provider is to put an item aside although nobody said so: each of them ended
// its process. Handlers with fewer attempts are dealt with here.
func (d *Dispatcher) mostAttempts() int {
	most := d.cfg.MaxAttempts
	for _, r := range d.handlers {
		if most == Unlimited || r.maxAttempts == Unlimited {
			return 0
		}
		most = max(most, r.maxAttempts)
	}
	return max(most, 0)
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
