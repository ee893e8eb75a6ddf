package eventbus

import (
	"context"
	"errors"
	"time"

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
	TaskID   string `json:"task_id"`
	ReplayID int64  `json:"replay_id"`
}

// handleChores has a dispatcher handle them.
func (n *Node) handleChores(d *dispatch.Dispatcher) {
	for name, do := range map[string]func(context.Context, chore) error{nameSchedule: n.occur, nameReplay: n.replay} {
		d.Handle(name, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			var c chore
			if err := jsonvalue.Unmarshal(item.Input, &c); err != nil {
				return nil, n.bury(ctx, item, reasonNoEvent, err.Error())
			}
			return nil, do(ctx, c)
		}, dispatch.WithMaxAttempts(dispatch.Unlimited), dispatch.WithTimeout(0))
	}
}

// occur carries out an occurrence of a schedule.
func (n *Node) occur(ctx context.Context, c chore) error {
	defer n.occurrences.take()()
	err := dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
		item, claim, err := token.WorkItem()
		if err != nil || n.occurrences.withOthers(ctx, item, claim, c.TaskID) {
			return err
		}
		_, err = value[int](ctx, n.Bus, verb{op: "carry out schedule", function: "occur", enqueues: true, args: []any{item, claim, c.TaskID}})
		return err
	})
	if err != nil && !errors.Is(err, pgwake.ErrLockLost) { // perhaps it was carried out: then the item is gone
		n.cfg.Logger.Warn("eventbus: cannot carry out a schedule", "schedule", c.TaskID, "error", err, "again_in", readPause)
		return dispatch.Snooze(readPause)
	}
	return err
}

// occurMany carries out occurrences of schedules, and says of each whether it was one that can be carried out with others.
func (n *Node) occurMany(ctx context.Context, items []int64, claims, schedules []string) ([]bool, error) {
	return value[[]bool](ctx, n.Bus, verb{op: "carry out schedules", function: "occur_many", enqueues: true, args: []any{items, claims, schedules}})
}

// replay goes on with a replay, to its end.
func (n *Node) replay(ctx context.Context, c chore) error {
	for {
		state, err := n.step(ctx, verb{op: "replay events", function: "replay_some", enqueues: true, args: []any{c.ReplayID}})
		switch {
		case err != nil:
			n.cfg.Logger.Warn("eventbus: cannot replay", "replay", c.ReplayID, "error", err)
			return dispatch.Snooze(readPause)
		case state == "done":
			return nil
		case state == "wait": // for transactions that are open
			return dispatch.Snooze(noTrouble)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
	}
}

// stepPatience is how long one step takes at most of what has no end of its own. Each is small: one that takes as long has lost its peer, of
// which a network that loses what is sent gives no sign.
const stepPatience = 10 * time.Minute

// step makes one, and returns what it says of how to go on.
func (n *Node) step(ctx context.Context, v verb) (state string, err error) {
	bounded, cancel := context.WithTimeout(ctx, n.patience)
	defer cancel()
	return value[string](bounded, n.Bus, v)
}
