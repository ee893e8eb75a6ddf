package eventbus

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what do nodes do with work items that are no deliveries?

// The names of such items; no type can be so. What they are for does not end by itself: they are tried again for ever,
// however often a node dies of them, and take as long as they take.
const (
	nameSchedule = "eventbus|schedule" // an occurrence of a schedule
	nameReplay   = "eventbus|replay"
)

// chore is the input of one.
type chore struct {
	TaskID   pgtype.UUID `json:"task_id"`
	ReplayID int64       `json:"replay_id"`
}

// handleChores has a dispatcher handle them, which claims until working ends.
func (n *Node) handleChores(working context.Context, d *dispatch.Dispatcher) {
	for name, kind := range map[string]struct {
		is func(chore) bool // Invariant: what was enqueued by anybody, and names nothing, is not tried for ever, and no other with it
		do func(context.Context, chore) error
	}{
		nameSchedule: {func(c chore) bool { return c.TaskID.Valid }, n.occur},
		nameReplay:   {func(c chore) bool { return c.ReplayID > 0 }, func(ctx context.Context, c chore) error { return n.replay(ctx, working, c) }},
	} {
		d.Handle(name, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			var c chore
			err := jsonvalue.Unmarshal(item.Input, &c)
			if err == nil && !kind.is(c) {
				err = errors.New("it does not say of what")
			}
			if err != nil {
				return nil, n.bury(ctx, item, reasonNoEvent, err.Error())
			}
			return nil, kind.do(ctx, c)
		}, dispatch.WithMaxAttempts(dispatch.Unlimited), dispatch.WithTimeout(0))
	}
}

// occur carries out an occurrence of a schedule.
func (n *Node) occur(ctx context.Context, c chore) error {
	defer n.occurrences.take()()
	schedule := c.TaskID.String()
	err := dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
		item, claim, err := token.WorkItem()
		if err != nil || n.occurrences.withOthers(ctx, item, claim, schedule) {
			return err
		}
		_, err = value[int](ctx, n.Bus, verb{op: "carry out schedule", function: "occur", enqueues: true, args: []any{item, claim, schedule}})
		return err
	})
	if err != nil && !errors.Is(err, pgwake.ErrLockLost) { // perhaps it was carried out: then the item is gone
		n.cfg.Logger.Warn("eventbus: cannot carry out a schedule", "schedule", schedule, "error", err, "again_in", readPause)
		return dispatch.Snooze(readPause)
	}
	return err
}

// occurMany carries out occurrences of schedules, and says of each whether it was one that can be carried out with others.
func (n *Node) occurMany(ctx context.Context, items []int64, claims, schedules []string) ([]bool, error) {
	return value[[]bool](ctx, n.Bus, verb{op: "carry out schedules", function: "occur_many", enqueues: true, args: []any{items, claims, schedules}})
}

// replayed is how far a step of a replay has got.
type replayed struct {
	State  string
	Waited *time.Duration // for how long it had found nothing and waited before, by the server's clock; nil: it had not
}

// replay goes on with a replay, to its end, or until the node stops: each step stands by itself, and another node takes the next.
func (n *Node) replay(ctx, working context.Context, c chore) error {
	some := verb{op: "replay events", function: "replay_some", enqueues: true, args: []any{c.ReplayID},
		columns: "replay_some, (SELECT pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) r.waiting_since FROM " + n.in +
			"event_replays AS r WHERE r.replay_id OPERATOR(pg_catalog.=) $1)"}
	for {
		step, err := oneStep(ctx, n, some, pgx.RowToStructByPos[replayed])
		switch {
		case err != nil:
			n.cfg.Logger.Warn("eventbus: cannot replay", "replay", c.ReplayID, "error", err)
			return dispatch.Snooze(readPause)
		case step.State == "done":
			return nil
		case step.State == "wait":
			return dispatch.Snooze(replayPause(step.Waited))
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case working.Err() != nil:
			return dispatch.Snooze(0)
		}
	}
}

// replayPause is how long a replay waits for transactions that are open, of whatever program and database of the server, if it has waited for so long.
// PostgreSQL tells nobody of their end. Most end at once; while one stays open for hours nobody is to ask ten times a second. A quarter makes it a
// quarter later than it could be, and a minute at most.
func replayPause(waited *time.Duration) time.Duration {
	if waited == nil {
		return noTrouble
	}
	return min(max(*waited/4, noTrouble), time.Minute)
}

// stepPatience is how long one step takes at most of what has no end of its own. Each is small: one that takes as long has lost its peer, of
// which a network that loses what is sent gives no sign.
const stepPatience = 10 * time.Minute

// oneStep makes one, and returns what it says of how to go on.
func oneStep[T any](ctx context.Context, n *Node, v verb, row pgx.RowToFunc[T]) (said T, err error) {
	bounded, cancel := context.WithTimeout(ctx, n.patience)
	defer cancel()
	all, err := query(bounded, n.Bus, v, row)
	if err != nil {
		return said, err
	}
	return all[0], nil
}
