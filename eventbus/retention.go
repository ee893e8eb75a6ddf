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
	var retention *time.Duration
	if n.cfg.KeepFor > 0 {
		retention = &n.cfg.KeepFor
	}
	for {
		state, err := oneStep(ctx, n, verb{op: "keep log", function: "keep_event_log", columns: "*", args: []any{retention}}, pgx.RowTo[string])
		pause := day
		switch {
		case ctx.Err() != nil || errors.Is(err, pgwake.ErrClosed):
			return
		case err != nil:
			n.cfg.Logger.Warn("eventbus: cannot keep the log", "error", err)
			pause = time.Hour
		case state == "more":
			continue
		case state == "wait":
			pause = 10 * time.Second
		case state == "large":
			n.cfg.Logger.Warn("eventbus: partitions of the log are missing, its default partition is too large to make them while others emit, and there are others of months between its events: call make_event_partitions at a quiet time")
		}
		wait(ctx, pause-rand.N(pause/10))
	}
}

// UsePartman has PostgreSQL's extension pg_partman, version 4, make the partitions of the log from now on, or, with on false, no more. It says
// whether that is new. Nodes call it, so its background worker is not needed; months are removed as before, since pg_partman does not know what is
// still to be handled. Fails with pgwake.ErrInvalid if the extension is not installed. Safe for concurrent use.
func (b *Bus) UsePartman(ctx context.Context, on bool) (changed bool, err error) {
	return value[bool](ctx, b, verb{op: "use partman", function: "use_partman", args: []any{on}})
}
