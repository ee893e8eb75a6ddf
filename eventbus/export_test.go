package eventbus

import (
	"context"
	"time"
)

// SetStepPatience sets how long a step of a chore takes at most. Before Start.
func SetStepPatience(n *Node, d time.Duration) { n.patience = d }

// SetWall sets what the node takes for the time. Before Start.
func SetWall(n *Node, now func() time.Time) { n.wall = now }

// KeepLogOnce has a node keep the log, and returns what there is to say of that.
func KeepLogOnce(ctx context.Context, n *Node) string {
	state, err := n.keepLogOnce(ctx)
	if err != nil {
		return err.Error()
	}
	return state
}

// MostSpared is how many commits of one delivery may fail in a row that cost no attempt.
const MostSpared = mostSpared
