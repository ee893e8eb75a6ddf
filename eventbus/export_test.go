package eventbus

import "time"

// SetStepPatience sets how long a step of a chore takes at most. Before Start.
func SetStepPatience(n *Node, d time.Duration) { n.patience = d }
