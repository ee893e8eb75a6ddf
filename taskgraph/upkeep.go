package taskgraph

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what does some node have to do now and then?

// rollupsPerUpkeep is how often rollups are refreshed from one upkeep to the next, as long as there are turns.
const rollupsPerUpkeep = 5

// upkeepPatience is how long that takes at most. What it does is small, or goes on the next time: what takes as long has lost its peer, of
// which a network that loses what is sent gives no sign.
const upkeepPatience = 10 * time.Minute

// keepUp does now and then what some node has to.
func (e *Engine) keepUp(ctx context.Context) {
	for n := 1; ; n++ {
		pause := (e.cfg.UpkeepInterval + rand.N(e.cfg.UpkeepInterval/4)) / rollupsPerUpkeep
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		bounded, cancel := context.WithTimeout(ctx, e.patience)
		var err error
		if e.turned.Swap(false) {
			if _, err = e.RefreshRollups(bounded); err != nil {
				e.turned.Store(true)
			}
		}
		if n%rollupsPerUpkeep == 0 {
			_, failed := e.Upkeep(bounded)
			err = errors.Join(err, failed)
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			e.cfg.Logger.Warn("taskgraph: upkeep failed", "error", err)
		}
	}
}

// Upkept is what Upkeep did.
type Upkept struct {
	Recovered int // tasks, see Recover
	Failed    int // tasks that were stale
	Purged    int // tasks that ended longer than Config.KeepFor ago
}

// purgedAtOnce is how many tasks one statement of Upkeep removes at most, and fewer if they are large: it is to hold no locks for long.
const purgedAtOnce = 1000

// Upkeep does what some node has to now and then, unless another is at it. An Engine does it by itself while it runs.
func (e *Engine) Upkeep(ctx context.Context) (Upkept, error) {
	const op = "upkeep"
	var done Upkept
	first := func(failStale bool) error {
		did, err := row[struct {
			Recovered int `db:"recovered"`
			Failed    int `db:"failed"`
		}](ctx, e.Graph, op, "upkeep_tasks", failStale)
		done.Recovered += did.Recovered
		done.Failed += did.Failed
		return err
	}
	// What cannot be done does not keep the rest from being done.
	err := first(false)
	if e.cfg.FailStale {
		err = errors.Join(err, first(true))
	}
	if e.cfg.KeepFor > 0 {
		err = errors.Join(err, e.purgeOld(ctx, &done.Purged))
	}
	return done, err
}

// farApart is by how much the clocks of server and node may differ for tasks to be removed by them.
const farApart = 24 * time.Hour

// purgeOld removes tasks that ended longer than Config.KeepFor ago, and counts them.
//
// Invariant: no clock that is wrong is enough for anything to be removed. What is old is so by the server's, as it was read here, and is all there
// is if that is far ahead.
func (e *Engine) purgeOld(ctx context.Context, purged *int) error {
	now, err := e.serverClock(ctx)
	if err != nil {
		return err
	}
	if ahead := now.Sub(e.clock()); ahead.Abs() > farApart {
		e.cfg.Logger.Warn("taskgraph: removes no tasks: the clocks of the server and of this node differ by more than a day", "ahead", ahead)
		return nil
	}
	for {
		n, err := e.Purge(ctx, now.Add(-e.cfg.KeepFor), purgedAtOnce)
		if *purged += n; err != nil || n == 0 {
			return err
		}
	}
}

// serverClock returns what the server's clock shows, as it is now, whatever it was when the Provider began.
func (e *Engine) serverClock(ctx context.Context) (time.Time, error) {
	all, err := collect(ctx, e.Graph, "read clock", "get", "SELECT pg_catalog.clock_timestamp()", pgx.RowTo[time.Time], nil)
	if err != nil {
		return time.Time{}, err
	}
	return all[0], nil
}
