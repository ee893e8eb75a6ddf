package main

import (
	"context"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what does top know, and what follows from two looks one after the other?

// picture is one look at everything.
type picture struct {
	glance.Picture
	err error // nothing else is known then
}

// look asks for everything but the reports, which come by themselves.
func look(ctx context.Context, p *pgwake.Provider, now func() time.Time, reports []pgwake.NodeReport, err error) picture {
	if err != nil {
		return picture{err: err}
	}
	pic, err := glance.Queues(ctx, p)
	if err != nil {
		return picture{err: err}
	}
	nodes, err := p.ListNodes(ctx)
	if err != nil {
		return picture{err: err}
	}
	pic.At = now()
	return picture{Picture: pic.With(nodes, reports)}
}

// pictures come as long as ctx lets them, also when the database was away in between.
func pictures(ctx context.Context, p *pgwake.Provider, every time.Duration, now func() time.Time) <-chan picture {
	to := make(chan picture)
	send := func(pic picture) bool {
		select {
		case to <- pic:
			return true
		case <-ctx.Done():
			return false
		}
	}
	go func() {
		defer close(to)
		for ctx.Err() == nil {
			for reports, err := range p.NodeReports(ctx, every) {
				if !send(look(ctx, p, now, reports, err)) {
					return
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
	}()
	return to
}
