package main

import (
	"context"
	"fmt"
	"time"

	"github.com/pgwake/pgwake/internal/devpg"
)

// This file answers: what if the server restarts, or crashes?

const (
	firstWithin = 5 * time.Second  // of the first item after a restart
	backWithin  = 15 * time.Second // of the rate
	calmP99     = time.Second      // of pickup in any phase that is calm
	leastRate   = 0.5              // of that before: coarse, since others may be at work on the machine
)

var restart = scenario{
	name: "restart", what: "the server is restarted (`fast`)", rate: 400,
	promise: fmt.Sprintf("the first item within %v of the server's first answer, 90%% of the rate within %v, p99 under %v afterwards", firstWithin, backWithin, calmP99),
	run:     func(ctx context.Context, t *trial) error { return t.outage(ctx, devpg.Fast) },
	keep:    keepOutage,
}

var crash = scenario{
	name: "crash", what: "the server crashes (`immediate`), and recovers", rate: 400,
	promise: restart.promise,
	run:     func(ctx context.Context, t *trial) error { return t.outage(ctx, devpg.Immediate) },
	keep:    keepOutage,
}

// outage has the server end and start again, once.
func (t *trial) outage(ctx context.Context, how devpg.Mode) error {
	var down, up time.Time
	err := t.threePhases(ctx, func(ctx context.Context) error {
		down = time.Now()
		err := t.server.Restart(context.WithoutCancel(ctx), how)
		up = time.Now()
		return err
	})
	if err != nil {
		return err
	}
	t.load.mu.Lock()
	defer t.load.mu.Unlock()
	t.count(t.load.items)
	t.recovered(t.load.items, down, up, t.of(before).PerSecond)
	return nil
}

func keepOutage(r *result) (broken []string) {
	if r.FirstItem < 0 || r.FirstItem > firstWithin {
		broken = append(broken, "the first item came "+later(r.FirstItem))
	}
	if r.RateBack < 0 || r.RateBack > backWithin {
		broken = append(broken, "the rate was back "+later(r.RateBack))
	}
	return append(broken, r.late(after, calmP99)...)
}

// late complains about a phase in which items were picked up too late.
func (r *result) late(name string, most time.Duration) (broken []string) {
	if s := r.of(name).Pickup.Summary(); s.N == 0 || s.P99 >= most {
		broken = append(broken, fmt.Sprintf("%s: of %d items picked up, p99 is %v", name, s.N, s.P99))
	}
	return broken
}

// slow complains about a phase in which less was begun than a part of what was enqueued, or that was much slower than the one before.
func (r *result) slow(name string, part float64) (broken []string) {
	p, then := r.of(name), r.of(before).PerSecond
	if p.PerSecond < part*p.Enqueued || p.PerSecond < leastRate*then {
		broken = append(broken, fmt.Sprintf("%s: %.0f items/s of %.0f that were enqueued, and %.0f before", name, p.PerSecond, p.Enqueued, then))
	}
	return broken
}
