package taskgraph

import (
	"context"
	"encoding/json"

	"github.com/pgwake/pgwake"
)

// This file answers: what holds for all nodes on a schema?

// Settings are what holds for all nodes. The computed priority of a task is the one that it was created with, and what the weights add to that.
type Settings struct {
	OutsideChannels   bool               // whether the channels for listeners that know nothing of pgwake are told; at first false
	AgeWeight         float64            // levels for each hour since the task was created; at first 0.1
	RetryWeight       float64            // levels for each time that a step of it went to wait for another attempt; at first 0
	DeadlineWeight    float64            // levels for each hour past its deadline; at first 0
	NamespacePriority map[string]float64 // levels by namespace; at first none. If it has less than 0 in all, a task is claimed as if it had 0
}

// Settings returns them.
func (g *Graph) Settings(ctx context.Context) (Settings, error) {
	const op = "get settings"
	set, err := row[struct {
		OutsideChannels   bool    `db:"outside_channels"`
		AgeWeight         float64 `db:"age_weight"`
		RetryWeight       float64 `db:"retry_weight"`
		DeadlineWeight    float64 `db:"deadline_weight"`
		NamespacePriority []byte  `db:"namespace_priority"`
	}](ctx, g, op, "get_taskgraph_settings")
	if err != nil {
		return Settings{}, err
	}
	s := Settings{OutsideChannels: set.OutsideChannels, AgeWeight: set.AgeWeight, RetryWeight: set.RetryWeight, DeadlineWeight: set.DeadlineWeight}
	return s, failed(op, json.Unmarshal(set.NamespacePriority, &s.NamespacePriority))
}

// SettingsChange is what is to be changed; what is nil stays as it is.
type SettingsChange struct {
	OutsideChannels                        *bool
	AgeWeight, RetryWeight, DeadlineWeight *float64           // 0 to 1,000,000
	NamespacePriority                      map[string]float64 // all of them, each at most 1,000,000; an empty map, and not nil: none
}

// SetSettings changes settings, for all nodes. A change of what orders tasks rewrites all that have not ended, so with many of those it takes
// its time. pgwake.ErrInvalid for what is out of range.
func (g *Graph) SetSettings(ctx context.Context, c SettingsChange) error {
	const op = "change settings"
	const most = 1e6
	for _, w := range []*float64{c.AgeWeight, c.RetryWeight, c.DeadlineWeight} {
		if w != nil && !(*w >= 0 && *w <= most) { // nor NaN
			return invalid(op, "a weight of %v is not between 0 and %v", *w, most)
		}
	}
	var priorities *string
	if c.NamespacePriority != nil {
		for namespace, p := range c.NamespacePriority {
			if err := pgwake.CheckNamespace(namespace); err != nil {
				return failed(op, err)
			}
			if !(p >= -most && p <= most) {
				return invalid(op, "a priority of %v for namespace %s is not between %v and %v", p, namespace, -most, most)
			}
		}
		text, err := json.Marshal(c.NamespacePriority)
		if err != nil {
			return failed(op, err)
		}
		priorities = optional(string(text))
	}
	return exec(ctx, g, op, "set_taskgraph_settings", c.OutsideChannels, c.AgeWeight, c.RetryWeight, c.DeadlineWeight, priorities)
}
