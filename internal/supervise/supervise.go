// Package supervise keeps long-running goroutines alive: one that panics is logged once with its stack,
// counted, and started again after a pause.
package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// Pauses before a restart: they double from first to last, and a run of at least healthy resets them.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 5 * time.Second
	healthy    = 10 * time.Second
)

// Group runs goroutines until its context ends. The zero value is not usable; see New.
type Group struct {
	ctx    context.Context
	logger *slog.Logger

	wg       sync.WaitGroup
	panics   atomic.Int64
	degraded atomic.Int64
}

// New returns a Group whose goroutines live as long as ctx.
func New(ctx context.Context, logger *slog.Logger) *Group {
	return &Group{ctx: ctx, logger: logger}
}

// Go runs fn until it returns or the group's context ends. A panic in fn is recovered and fn is run
// again, with fresh state of its own, after a jittered pause.
func (g *Group) Go(name string, fn func(context.Context)) {
	g.wg.Go(func() {
		pause := firstPause
		for {
			started := time.Now()
			if !g.survive(name, fn) {
				return
			}
			if time.Since(started) >= healthy {
				pause = firstPause
			}
			g.degraded.Add(1)
			ended := g.sleep(pause + rand.N(pause/2))
			g.degraded.Add(-1)
			if ended {
				return
			}
			pause = min(2*pause, lastPause)
		}
	})
}

// survive runs fn once and reports whether it panicked.
func (g *Group) survive(name string, fn func(context.Context)) (panicked bool) {
	defer func() {
		if cause := recover(); cause != nil {
			panicked = true
			g.panics.Add(1)
			g.logger.Error("pgwake: goroutine panicked and will be restarted",
				"goroutine", name, "panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
		}
	}()
	fn(g.ctx)
	return false
}

func (g *Group) sleep(d time.Duration) (ended bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false
	case <-g.ctx.Done():
		return true
	}
}

// Panics returns how often a goroutine panicked so far.
func (g *Group) Panics() int64 { return g.panics.Load() }

// Degraded reports whether a goroutine is down at this moment, waiting to be started again.
func (g *Group) Degraded() bool { return g.degraded.Load() > 0 }

// Wait returns when every goroutine has ended, which they do when the group's context does.
func (g *Group) Wait() { g.wg.Wait() }
