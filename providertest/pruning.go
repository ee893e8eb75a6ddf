package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: which executions of an instance may go, and which stay?

var prune = group{"prune", []row{
	{"prune_options_combinations", func(t *testing.T, n *node) {
		n.startExecutions(t, "i", 4)
		n.requirePrune(t, "i", &pgwake.PruneOptions{KeepLast: 4}, 0)
		n.requirePrune(t, "i", &pgwake.PruneOptions{KeepLast: 2}, 2)
		require.Equal(t, []int64{3, 4}, n.executions(t, "i"))
		n.requireExecution(t, "i", 1, nil)
		n.requireExecution(t, "i", 2, nil)
		n.requireExecution(t, "i", 3, events(1))
		n.requirePrune(t, "i", &pgwake.PruneOptions{}, 1)
		require.Equal(t, []int64{4}, n.executions(t, "i"))
		n.requireHistoryOf(t, "i", events(1))

		n.startExecutions(t, "both", 4)
		second := n.execution(t, "both", 2).CompletedAt
		n.requirePrune(t, "both", &pgwake.PruneOptions{CompletedBefore: second.Add(time.Hour), KeepLast: 4}, 0)
		n.requirePrune(t, "both", &pgwake.PruneOptions{CompletedBefore: second, KeepLast: 1}, 1)
		require.Equal(t, []int64{2, 3, 4}, n.executions(t, "both"))
		n.requirePrune(t, "both", &pgwake.PruneOptions{CompletedBefore: second.Add(time.Hour)}, 2)
		require.Equal(t, []int64{4}, n.executions(t, "both"))
	}},
	{"prune_safety", func(t *testing.T, n *node) {
		for instance, o := range map[string]*pgwake.PruneOptions{
			"nil": nil, "zero": {}, "one": {KeepLast: 1},
			"future": {CompletedBefore: time.Now().Add(24 * time.Hour)},
		} {
			n.startExecutions(t, instance, 3)
			n.end(t, instance, 3, pgwake.StatusCompleted, "done")
			for _, want := range []int64{2, 0} {
				n.requirePrune(t, instance, o, want)
				require.Equal(t, []int64{3}, n.executions(t, instance), instance)
			}
			n.requireHistoryOf(t, instance, events(1))
			info, err := n.GetInstanceInfo(t.Context(), instance)
			require.NoError(t, err)
			require.Equal(t, pgwake.StatusCompleted, info.Status)
			require.Equal(t, "done", info.Output)
		}
		n.start(t, "both running")
		n.turn(t, "both running", pgwake.OrchestrationAck{ExecutionID: 2, History: events(1), Metadata: running})
		n.requirePrune(t, "both running", nil, 0)
		require.Equal(t, []int64{1, 2}, n.executions(t, "both running"))

		p, err := n.PruneExecutions(t.Context(), "unknown", nil)
		requirePermanent(t, err, pgwake.ErrNotFound)
		require.Zero(t, p)
	}},
	{"prune_bulk", func(t *testing.T, n *node) {
		for _, instance := range []string{"a", "b", "c"} {
			n.startExecutions(t, instance, 3)
			n.end(t, instance, 3, pgwake.StatusCompleted, "done")
		}
		p, err := n.PruneExecutionsBulk(t.Context(), &pgwake.BulkFilter{Instances: []string{"a", "unknown", "b"}}, &pgwake.PruneOptions{KeepLast: 2})
		require.NoError(t, err)
		require.Equal(t, pgwake.Pruned{Instances: 2, Executions: 2, Events: 2}, p)
		require.Equal(t, []int64{2, 3}, n.executions(t, "a"))
		require.Equal(t, []int64{2, 3}, n.executions(t, "b"))
		require.Equal(t, []int64{1, 2, 3}, n.executions(t, "c"))
		n.requireExecution(t, "c", 1, events(1))
	}},
	{"prune_bulk_includes_running_instances", func(t *testing.T, n *node) {
		n.startExecutions(t, "i", 3)
		p, err := n.PruneExecutionsBulk(t.Context(), &pgwake.BulkFilter{Instances: []string{"i"}}, nil)
		require.NoError(t, err)
		require.Equal(t, pgwake.Pruned{Instances: 1, Executions: 2, Events: 2}, p)
		require.Equal(t, []int64{3}, n.executions(t, "i"))
		n.requireHistoryOf(t, "i", events(1))
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, pgwake.StatusRunning, info.Status)
		n.turn(t, "i", pgwake.OrchestrationAck{ExecutionID: 3, History: events(2)})
	}},
}}

// startExecutions makes an instance that is Running in its execution with this id; each has the event 1.
func (n *node) startExecutions(t *testing.T, instance string, last int64) {
	t.Helper()
	n.start(t, instance)
	for id := int64(2); id <= last; id++ {
		n.continueAsNew(t, instance, id)
	}
}

// requirePrune prunes an instance whose executions have one event each, and asserts how many went.
func (n *node) requirePrune(t *testing.T, instance string, o *pgwake.PruneOptions, want int64) {
	t.Helper()
	p, err := n.PruneExecutions(t.Context(), instance, o)
	require.NoError(t, err)
	require.Equal(t, pgwake.Pruned{Instances: min(want, 1), Executions: want, Events: want}, p)
}
