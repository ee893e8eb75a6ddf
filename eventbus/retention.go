package eventbus

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: who makes room in the log?

// keepLog makes the partitions of the log that are missing, and removes what is old, until ctx ends: once a day, which is two months before a
// partition that is not made is missed.
func (n *Node) keepLog(ctx context.Context) {
	var waits time.Time // since when others have been in the way
	for {
		state, err := n.keepLogOnce(ctx)
		pause := day
		switch {
		case ctx.Err() != nil || errors.Is(err, pgwake.ErrClosed):
			return
		case err != nil:
			n.cfg.Logger.Warn("eventbus: cannot keep the log", "error", err)
			pause = time.Hour
		case state == "wait":
			pause = 10 * time.Second
			if waits.IsZero() {
				waits = time.Now()
			} else if time.Since(waits) > time.Hour {
				n.cfg.Logger.Warn("eventbus: the log has not been kept for an hour: a transaction that has emitted stays open, a replay is not over, or somebody else holds the lock of those who keep it")
				waits = time.Now()
			}
		case state == "large":
			n.cfg.Logger.Warn("eventbus: partitions of the log are missing, its default partition is too large to make them while others emit, and there are others of months between its events, or one of a time that is still to come: call make_event_partitions at a quiet time")
		}
		if state != "wait" {
			waits = time.Time{}
		}
		wait(ctx, pause-rand.N(pause/10))
	}
}

// keepLogOnce does what there is to do at once, and returns what keep_event_log says then.
func (n *Node) keepLogOnce(ctx context.Context) (state string, err error) {
	var retention *time.Duration
	if n.cfg.KeepFor > 0 {
		ahead, err := n.serverAhead(ctx)
		if err != nil {
			return "", err
		}
		// Invariant: no clock that is wrong is enough for anything to be removed. What is old is so by the server's, and is all there is if that is far ahead.
		if ahead.Abs() <= day {
			retention = &n.cfg.KeepFor
		} else {
			n.cfg.Logger.Warn("eventbus: removes nothing from the log: the clocks of the server and of this node differ by more than a day", "ahead", ahead)
		}
	}
	for state = "more"; state == "more" && err == nil; {
		state, err = oneStep(ctx, n, verb{op: "keep log", function: "keep_event_log", columns: "*", args: []any{retention}}, pgx.RowTo[string])
	}
	return state, err
}

// serverAhead returns by how much the server's clock is ahead of that of this node, as they are now, whatever they were when the Provider began.
func (n *Node) serverAhead(ctx context.Context) (ahead time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, n.patience)
	defer cancel()
	err = n.do(ctx, "read clock", false, func(ctx context.Context, q pgwake.Querier) error {
		var at time.Time
		err := q.QueryRow(ctx, "SELECT pg_catalog.clock_timestamp()").Scan(&at)
		ahead = at.Sub(n.wall())
		return err
	})
	return ahead, err
}

// UsePartman has PostgreSQL's extension pg_partman, version 4, make the partitions of the log from now on, or, with on false, no more. It says
// whether that is new. Nodes call it, so its background worker is not needed; months are removed as before, since pg_partman does not know what is
// still to be handled. Fails with pgwake.ErrInvalid if the extension is not installed. Safe for concurrent use.
func (b *Bus) UsePartman(ctx context.Context, on bool) (changed bool, err error) {
	return value[bool](ctx, b, verb{op: "use partman", function: "use_partman", args: []any{on}})
}
