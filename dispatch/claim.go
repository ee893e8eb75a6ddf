package dispatch

import (
	"context"

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
		d.work.learn(n, len(items))
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
