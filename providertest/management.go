package providertest

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what can be learned about instances and queues?

var management = group{"management", []row{
	{"list_instances", func(t *testing.T, n *node) {
		require.Empty(t, n.instances(t, nil))
		n.start(t, "b", "a", "c")
		require.Equal(t, []string{"a", "b", "c"}, n.instances(t, nil))
		require.Equal(t, []string{"a", "b"}, n.instances(t, &pgwake.ListOptions{Limit: 2}))
		require.Equal(t, []string{"c"}, n.instances(t, &pgwake.ListOptions{Limit: 2, After: "b"}))
	}},
	{"list_instances_by_status", func(t *testing.T, n *node) {
		n.start(t, "completed", "failed", "running")
		n.end(t, "completed", 1, pgwake.StatusCompleted, "done")
		n.end(t, "failed", 1, pgwake.StatusFailed, "broken")
		for status, want := range map[pgwake.Status][]string{
			pgwake.StatusCompleted: {"completed"},
			pgwake.StatusFailed:    {"failed"},
			pgwake.StatusRunning:   {"running"},
			pgwake.StatusCancelled: nil,
		} {
			require.Equal(t, want, n.instances(t, &pgwake.ListOptions{Status: status}), status)
		}
	}},
	{"list_executions", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1, 2), Metadata: running})
		require.Equal(t, []int64{1}, n.executions(t, "i"))
		n.continueAsNew(t, "i", 2)
		all, err := n.ListExecutions(t.Context(), "i")
		require.NoError(t, err)
		require.Len(t, all, 2)
		require.Equal(t, "i", all[0].Instance)
		require.EqualValues(t, 1, all[0].ExecutionID)
		require.Equal(t, pgwake.StatusContinuedAsNew, all[0].Status)
		require.EqualValues(t, 2, all[0].Events)
		require.EqualValues(t, 2, all[1].ExecutionID)
		require.Equal(t, pgwake.StatusRunning, all[1].Status)
		require.Empty(t, n.executions(t, "unknown"))
	}},
	{"get_instance_info", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.continueAsNew(t, "i", 2)
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, "i", info.Instance)
		require.Equal(t, running.Name, info.Name)
		require.Equal(t, running.Version, info.Version)
		require.EqualValues(t, 2, info.ExecutionID)
		require.Equal(t, pgwake.StatusRunning, info.Status)
		require.Empty(t, info.Output)
		require.Empty(t, info.Parent)
		require.False(t, info.UpdatedAt.Before(info.CreatedAt))
		n.requireUnknown(t, "unknown")
	}},
	{"get_execution_info", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.continueAsNew(t, "i", 2)
		n.end(t, "i", 2, pgwake.StatusCompleted, "done")
		info := n.execution(t, "i", 2)
		require.Equal(t, "i", info.Instance)
		require.EqualValues(t, 2, info.ExecutionID)
		require.Equal(t, pgwake.StatusCompleted, info.Status)
		require.Equal(t, "done", info.Output)
		require.EqualValues(t, 1, info.Events)
		requireNotBefore(t, info.StartedAt, info.CompletedAt)

		first := n.execution(t, "i", 1)
		require.Equal(t, pgwake.StatusContinuedAsNew, first.Status)
		require.Empty(t, first.Output)
		_, err := n.GetExecutionInfo(t.Context(), "i", 3)
		requirePermanent(t, err, pgwake.ErrNotFound)
	}},
	{"get_system_metrics", func(t *testing.T, n *node) {
		before, err := n.GetSystemMetrics(t.Context())
		require.NoError(t, err)
		n.startWith(t, "a", pgwake.OrchestrationAck{History: events(1, 2, 3), Metadata: running})
		n.start(t, "b")
		n.end(t, "b", 1, pgwake.StatusCompleted, "done")
		after, err := n.GetSystemMetrics(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 2, after.Instances-before.Instances)
		require.EqualValues(t, 2, after.Executions-before.Executions)
		require.EqualValues(t, 4, after.Events-before.Events)
		for _, status := range []pgwake.Status{pgwake.StatusRunning, pgwake.StatusCompleted} {
			require.EqualValues(t, 1, after.ByStatus[status]-before.ByStatus[status], status)
		}
	}},
	{"get_queue_depths", func(t *testing.T, n *node) {
		require.Zero(t, n.depth(t, pgwake.Orchestrator))
		n.send(t, "a", "first", "second")
		n.sendWith(t, startMessage("b"), &pgwake.EnqueueOptions{Delay: lease})
		require.Equal(t, pgwake.QueueDepth{Due: 2, Delayed: 1}, n.depth(t, pgwake.Orchestrator))
		require.Zero(t, n.depth(t, pgwake.Worker))
		turn := n.takeTurnOf(t, "a")
		require.Equal(t, pgwake.QueueDepth{Leased: 2, Delayed: 1}, n.depth(t, pgwake.Orchestrator))
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		require.Equal(t, pgwake.QueueDepth{Delayed: 1}, n.depth(t, pgwake.Orchestrator))
	}},
}}

// instances returns the ids that are listed.
func (n *node) instances(t *testing.T, o *pgwake.ListOptions) (ids []string) {
	t.Helper()
	infos, err := n.ListInstances(t.Context(), o)
	require.NoError(t, err)
	for _, info := range infos {
		ids = append(ids, info.Instance)
	}
	return ids
}

// executions returns the ids of the executions of an instance.
func (n *node) executions(t *testing.T, instance string) (ids []int64) {
	t.Helper()
	infos, err := n.ListExecutions(t.Context(), instance)
	require.NoError(t, err)
	for _, info := range infos {
		ids = append(ids, info.ExecutionID)
	}
	return ids
}

// execution returns an execution that must exist.
func (n *node) execution(t *testing.T, instance string, id int64) *pgwake.ExecutionInfo {
	t.Helper()
	info, err := n.GetExecutionInfo(t.Context(), instance, id)
	require.NoError(t, err)
	return info
}

// depth returns the counts of all parts of a queue.
func (n *node) depth(t *testing.T, queue pgwake.Queue) (all pgwake.QueueDepth) {
	t.Helper()
	depths, err := n.GetQueueDepths(t.Context())
	require.NoError(t, err)
	for _, d := range depths {
		if d.Queue == queue {
			all.Due += d.Due
			all.Delayed += d.Delayed
			all.Leased += d.Leased
		}
	}
	return all
}
