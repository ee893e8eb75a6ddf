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
		steady, failed := e.steady(ctx, err == nil)
		if steady {
			failed = first(true)
		}
		err = errors.Join(err, failed)
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
	now, err := e.readClocks(ctx)
	if err != nil {
		return err
	}
	if ahead := now.server.Sub(now.here); ahead.Abs() > farApart {
		e.cfg.Logger.Warn("taskgraph: removes no tasks: the clocks of the server and of this node differ by more than a day", "ahead", ahead)
		return nil
	}
	for {
		n, err := e.Purge(ctx, now.server.Add(-e.cfg.KeepFor), purgedAtOnce)
		if *purged += n; err != nil || n == 0 {
			return err
		}
	}
}

// jolt is by how much more, or less, the server's clock is to have advanced than that of the node for it to have been set.
const jolt = time.Minute

// steady reports whether the server has been there, and its clock has not been set, for at least Config.UpkeepInterval, as far as upkeep
// can tell. there: what was done before has succeeded.
//
// Invariant: no task is ended right after a time that nobody could use, be it that of an outage or of a clock: whoever can go on does so first.
func (e *Engine) steady(ctx context.Context, there bool) (bool, error) {
	now, err := e.readClocks(ctx)
	e.steadyMu.Lock()
	defer e.steadyMu.Unlock()
	before := e.steadySince
	if err != nil || !there {
		e.steadySince = clocks{}
		return false, err
	}
	passed := now.here.Sub(before.here) // without what was done to the node's clock
	ahead := now.server.Sub(before.server) - passed
	switch {
	case before == clocks{}:
		e.steadySince = now
		return false, nil
	case now.sessions != before.sessions: // it was away, for however short a time
		e.steadySince = now
		return false, nil
	case ahead.Abs() > jolt:
		e.cfg.Logger.Warn("taskgraph: fails no stale tasks this time: the server's clock was set, or this node stood still", "ahead", ahead)
		e.steadySince = now
		return false, nil
	}
	return passed >= e.cfg.UpkeepInterval, nil
}

// clocks are what they show at one moment.
type clocks struct {
	here, server time.Time
	sessions     int64 // LISTEN connections so far that came after one that was lost: how an outage shows that was over before anybody asked
}

// readClocks returns the clocks as they are now, whatever they were when the Provider began.
func (e *Engine) readClocks(ctx context.Context) (clocks, error) {
	all, err := collect(ctx, e.Graph, "read clock", "get", "SELECT pg_catalog.clock_timestamp()", pgx.RowTo[time.Time], nil)
	if err != nil {
		return clocks{}, err
	}
	return clocks{e.clock(), all[0], e.p.Stats().Reconnects}, nil
}
