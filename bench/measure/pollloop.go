package measure

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
	"golang.org/x/sync/errgroup"
)

// This file answers: what does a coordinator do that polls?

// pollLoop serves namespaces, each by a loop of its own: every so often it claims a batch, handles all of that at a time, and
// acknowledges it. Claim and ack are those of the Provider, so that the loop is all that differs.
type pollLoop struct {
	interval time.Duration
	batch    int
	eager    bool // polls again at once after it found something

	polls atomic.Int64
}

// serve begins with a namespace, at a random instant within the interval unless it is eager, and ends with the service.
func (l *pollLoop) serve(s *service, namespace string, handle itemHandler) {
	fetch := &pgwake.FetchOptions{NoWait: true, Namespaces: []string{namespace}}
	var phase time.Duration
	if !l.eager {
		phase = rand.N(l.interval)
	}
	s.group.Go(func() error {
		if pause(s.ctx, phase) != nil {
			return nil
		}
		tick := time.NewTicker(l.interval)
		defer tick.Stop()
		for {
			found, err := l.cycle(s.ctx, s.node, fetch, handle)
			switch {
			case s.ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			case l.eager && found > 0:
				continue
			}
			select {
			case <-tick.C:
			case <-s.ctx.Done():
				return nil
			}
		}
	})
}

func (l *pollLoop) cycle(ctx context.Context, n *node, fetch *pgwake.FetchOptions, handle itemHandler) (found int, err error) {
	items, err := n.FetchWorkItems(ctx, l.batch, fetch)
	if err == nil || errors.Is(err, pgwake.ErrNoWork) {
		l.polls.Add(1)
	}
	if err != nil {
		if errors.Is(err, pgwake.ErrNoWork) {
			err = nil
		}
		return 0, err
	}
	group, handling := errgroup.WithContext(ctx)
	for _, item := range items {
		group.Go(func() error { return handle(handling, item) })
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	return len(items), n.AckWorkItems(ctx, tokensOf(items))
}
