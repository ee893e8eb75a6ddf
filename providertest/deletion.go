package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what goes with an instance, and which instances may go?

var (
	force = &pgwake.DeleteOptions{Force: true}
	none  = pgwake.Deleted{}
)

var deletion = group{"deletion", []row{
	{"delete_terminal_instances", func(t *testing.T, n *node) {
		for _, status := range []pgwake.Status{pgwake.StatusCompleted, pgwake.StatusFailed, pgwake.StatusCancelled} {
			n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1, 2, 3), Metadata: running})
			n.continueAsNew(t, "i", 2)
			n.end(t, "i", 2, status, "")
			n.requireDelete(t, "i", nil, pgwake.Deleted{Instances: 1, Executions: 2, Events: 4})
			n.requireGone(t, "i")
		}
	}},
	{"delete_running_rejected_force_succeeds", func(t *testing.T, n *node) {
		n.start(t, "i")
		d, err := n.DeleteInstance(t.Context(), "i", nil)
		requirePermanent(t, err, pgwake.ErrInstanceRunning)
		require.ErrorContains(t, err, "running")
		require.Zero(t, d)
		n.requireHistoryOf(t, "i", events(1))
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1})
		n.requireGone(t, "i")
	}},
	{"delete_between_executions_needs_force", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.endForNext(t, "i", 2)
		refused := func() {
			for _, del := range []func() (pgwake.Deleted, error){
				func() (pgwake.Deleted, error) { return n.DeleteInstance(t.Context(), "i", nil) },
				func() (pgwake.Deleted, error) { return n.DeleteInstances(t.Context(), []string{"i"}, nil) },
			} {
				d, err := del()
				requirePermanent(t, err, pgwake.ErrInstanceRunning)
				require.Zero(t, d)
			}
		}
		refused()
		turn := n.takeTurnOf(t, "i")
		refused()
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil))
		n.beginNext(t, "i", 2)
		n.endForNext(t, "i", 3)
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 2, Events: 2, QueueItems: 1})
		n.requireGone(t, "i")
	}},
	{"delete_nonexistent_instance", func(t *testing.T, n *node) {
		n.start(t, "i")
		for _, o := range []*pgwake.DeleteOptions{nil, force} {
			d, err := n.DeleteInstance(t.Context(), "unknown", o)
			requirePermanent(t, err, pgwake.ErrNotFound)
			require.Zero(t, d)
		}
		n.requireHistoryOf(t, "i", events(1))
	}},
	{"delete_cleans_queues_and_locks", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1, 2)
		n.turn(t, "i", pgwake.OrchestrationAck{
			History:      events(2),
			CustomStatus: &pgwake.CustomStatusUpdate{Value: "half done"},
			KV:           []pgwake.KVUpdate{set("key", "value")},
		})
		n.takeActivity(t, "i", 1)
		n.send(t, "i", "in the turn")
		n.takeTurnOf(t, "i")
		n.send(t, "i", "held")
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: "timer"}, &pgwake.EnqueueOptions{Delay: lease})
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 1, Events: 2, QueueItems: 5})
		n.requireGone(t, "i")
		require.Zero(t, n.depth(t, pgwake.Worker))
		require.Zero(t, n.depth(t, pgwake.Orchestrator))

		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i") // so it is not locked
		require.EqualValues(t, 1, turn.ExecutionID)
		require.Equal(t, 1, turn.Attempt)
		require.Len(t, turn.Messages, 1)
		require.Empty(t, turn.History)
		require.Zero(t, turn.LastEventID)
		require.Empty(t, turn.KV)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{History: events(1), Metadata: running})
		n.requireHistoryOf(t, "i", events(1))
		n.requireKV(t, "i", nil)
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Zero(t, info.CustomStatusVersion)
		require.Empty(t, info.CustomStatus)
	}},
	{"cascade_delete_hierarchy", func(t *testing.T, n *node) {
		n.completedTree(t)
		for _, child := range []string{"a", "b", "leaf"} {
			for _, o := range []*pgwake.DeleteOptions{nil, force} {
				d, err := n.DeleteInstance(t.Context(), child, o)
				requirePermanent(t, err, pgwake.ErrHasParent)
				require.Zero(t, d)
			}
		}
		require.Equal(t, []string{"a", "b", "leaf", "root"}, n.instances(t, nil))
		n.requireDelete(t, "root", nil, pgwake.Deleted{Instances: 4, Executions: 4, Events: 4})
		n.requireGone(t, "root", "a", "b", "leaf")
	}},
	{"force_delete_prevents_ack_recreation", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		activity := n.takeActivity(t, "i", 1)
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1, QueueItems: 2})
		inFlight := func() {
			timer := pgwake.MessageEnqueue{Message: startMessage("i"), EnqueueOptions: pgwake.EnqueueOptions{Delay: lease}}
			err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{
				History:      events(2),
				WorkItems:    activities("i", 1),
				Messages:     []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "poke"}}, timer},
				Metadata:     running,
				CustomStatus: &pgwake.CustomStatusUpdate{Value: "half done"},
				KV:           []pgwake.KVUpdate{set("key", "value")},
			})
			requirePermanent(t, err, pgwake.ErrLockLost)
			_, err = n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, lease)
			requirePermanent(t, err, pgwake.ErrLockLost)
			requirePermanent(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil), pgwake.ErrLockLost)
			requirePermanent(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "zombie", ""), pgwake.ErrLockLost)
			done := &pgwake.Message{Instance: "i", Kind: "done"}
			requirePermanent(t, n.AckWorkItem(t.Context(), activity.LockToken, done), pgwake.ErrLockLost)
		}
		inFlight()
		n.requireGone(t, "i")
		require.Zero(t, n.depth(t, pgwake.Worker))
		require.Zero(t, n.depth(t, pgwake.Orchestrator), "not even later")

		n.start(t, "i")
		n.send(t, "i", "fresh")
		fresh := n.takeTurnOf(t, "i")
		inFlight()
		require.Equal(t, []pgwake.MessageKind{"fresh"}, kinds(fresh))
		n.ackTurn(t, fresh, pgwake.OrchestrationAck{History: events(3)})
		n.requireHistoryOf(t, "i", events(1, 3))
		n.requireNoTurn(t)
	}},
	{"list_children", func(t *testing.T, n *node) {
		n.completedTree(t)
		for instance, want := range map[string][]string{"root": {"a", "b"}, "a": {"leaf"}, "leaf": nil, "unknown": nil} {
			children, err := n.ListChildren(t.Context(), instance)
			require.NoError(t, err)
			require.ElementsMatch(t, want, children, instance)
		}
	}},
	{"delete_get_parent_id", func(t *testing.T, n *node) {
		n.completedTree(t)
		for instance, want := range map[string]string{"root": "", "a": "root", "b": "root", "leaf": "a"} {
			parent, err := n.GetParent(t.Context(), instance)
			require.NoError(t, err)
			require.Equal(t, want, parent, instance)
		}
		_, err := n.GetParent(t.Context(), "unknown")
		requirePermanent(t, err, pgwake.ErrNotFound)
	}},
	{"delete_get_instance_tree", func(t *testing.T, n *node) {
		n.completedTree(t)
		for instance, want := range map[string][]string{"root": {"root", "a", "b", "leaf"}, "a": {"a", "leaf"}, "leaf": {"leaf"}} {
			tree, err := n.GetInstanceTree(t.Context(), instance)
			require.NoError(t, err)
			require.Equal(t, want, tree, instance)
		}
		_, err := n.GetInstanceTree(t.Context(), "unknown")
		requirePermanent(t, err, pgwake.ErrNotFound)
	}},
	{"delete_instances_atomic", func(t *testing.T, n *node) {
		n.start(t, "other")
		n.startWith(t, "a", pgwake.OrchestrationAck{History: events(1, 2), Metadata: running})
		n.startWith(t, "b", pgwake.OrchestrationAck{History: events(1, 2, 3), WorkItems: activities("b", 1), Metadata: running})
		n.start(t, "c")
		n.continueAsNew(t, "c", 2)
		n.end(t, "a", 1, pgwake.StatusCompleted, "done")
		n.end(t, "b", 1, pgwake.StatusFailed, "broken")
		n.end(t, "c", 2, pgwake.StatusCompleted, "done")
		d, err := n.DeleteInstances(t.Context(), []string{"a", "b", "c"}, nil)
		require.NoError(t, err)
		require.Equal(t, pgwake.Deleted{Instances: 3, Executions: 4, Events: 7, QueueItems: 1}, d)
		n.requireGone(t, "a", "b", "c")
		require.Equal(t, []string{"other"}, n.instances(t, nil))
	}},
	{"delete_instances_atomic_force", func(t *testing.T, n *node) {
		all := []string{"a", "b", "running"}
		n.start(t, all...)
		n.end(t, "a", 1, pgwake.StatusCompleted, "done")
		n.end(t, "b", 1, pgwake.StatusCompleted, "done")
		d, err := n.DeleteInstances(t.Context(), all, nil)
		requirePermanent(t, err, pgwake.ErrInstanceRunning)
		require.Zero(t, d)
		require.Equal(t, all, n.instances(t, nil))
		n.requireHistoryOf(t, "a", events(1))
		d, err = n.DeleteInstances(t.Context(), all, force)
		require.NoError(t, err)
		require.Equal(t, pgwake.Deleted{Instances: 3, Executions: 3, Events: 3}, d)
		n.requireGone(t, all...)
	}},
	{"delete_instances_atomic_orphan_detection", func(t *testing.T, n *node) {
		n.completedTree(t)
		n.completed(t, "other")
		all := n.instances(t, nil)
		for _, part := range [][]string{{"other", "root"}, {"other", "root", "a", "b"}, {"other", "a", "leaf"}} {
			for _, o := range []*pgwake.DeleteOptions{nil, force} {
				d, err := n.DeleteInstances(t.Context(), part, o)
				requirePermanent(t, err, pgwake.ErrHasParent)
				require.Zero(t, d)
			}
		}
		require.Equal(t, all, n.instances(t, nil))
		n.requireHistoryOf(t, "other", events(1))
		d, err := n.DeleteInstances(t.Context(), []string{"other", "leaf", "b", "a", "root"}, nil)
		require.NoError(t, err)
		require.Equal(t, pgwake.Deleted{Instances: 5, Executions: 5, Events: 5}, d)
		n.requireGone(t, all...)
	}},
	{"stale_activity_after_delete_recreate", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		stale := n.takeActivity(t, "i", 1)
		n.requireDelete(t, "i", force, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1, QueueItems: 1})
		n.startWithActivities(t, "i", 1)

		err := n.AckWorkItem(t.Context(), stale.LockToken, &pgwake.Message{Instance: "i", Kind: "stale"})
		requirePermanent(t, err, pgwake.ErrLockLost)
		n.requireNoTurn(t)
		fresh := n.takeActivity(t, "i", 1)
		require.Equal(t, 1, fresh.Attempt)
		require.NoError(t, n.AckWorkItem(t.Context(), fresh.LockToken, &pgwake.Message{Instance: "i", Kind: "fresh"}))
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{"fresh"}, kinds(turn))
		requireHistory(t, events(1), turn.History)
	}},
}}

// requireDelete deletes an instance, and asserts what went with it.
func (n *node) requireDelete(t *testing.T, instance string, o *pgwake.DeleteOptions, want pgwake.Deleted) {
	t.Helper()
	d, err := n.DeleteInstance(t.Context(), instance, o)
	require.NoError(t, err)
	require.Equal(t, want, d)
}

// requireGone asserts that nothing is left of these instances, and that nothing is due.
func (n *node) requireGone(t *testing.T, instances ...string) {
	t.Helper()
	for _, instance := range instances {
		n.requireUnknown(t, instance)
		n.requireHistoryOf(t, instance, nil)
		require.Empty(t, n.executions(t, instance))
		n.requireKV(t, instance, nil)
	}
	n.requireNoWork(t)
	n.requireNoTurn(t)
}

// completed makes instances that have completed in their first execution, with the event 1.
func (n *node) completed(t *testing.T, instances ...string) {
	t.Helper()
	for _, instance := range instances {
		n.start(t, instance)
		n.end(t, instance, 1, pgwake.StatusCompleted, "done")
	}
}

// completedChild is completed for an instance that another one started.
func (n *node) completedChild(t *testing.T, parent, child string) {
	t.Helper()
	m := running
	m.Parent = parent
	n.startWith(t, child, pgwake.OrchestrationAck{History: events(1), Metadata: m})
	n.end(t, child, 1, pgwake.StatusCompleted, "done")
}

// completedTree makes an instance root with the children a and b, and leaf as a child of a.
func (n *node) completedTree(t *testing.T) {
	t.Helper()
	n.completed(t, "root")
	n.completedChild(t, "root", "b")
	n.completedChild(t, "root", "a")
	n.completedChild(t, "a", "leaf")
}

var bulkDeletion = group{"bulk_deletion", []row{
	{"delete_instance_bulk_filter_combinations", func(t *testing.T, n *node) {
		n.completed(t, "a", "b", "c", "d")
		n.start(t, "failed", "running")
		n.end(t, "failed", 1, pgwake.StatusFailed, "broken")
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"a", "b"}}, pgwake.Deleted{Instances: 2, Executions: 2, Events: 2})
		n.requireGone(t, "a", "b")
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"unknown", "a"}}, none)
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{}}, none)
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"unknown", "c"}}, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1})
		require.Equal(t, []string{"d", "failed", "running"}, n.instances(t, nil))
		n.requireBulk(t, &pgwake.BulkFilter{}, pgwake.Deleted{Instances: 2, Executions: 2, Events: 2})
		require.Equal(t, []string{"running"}, n.instances(t, nil))
		n.requireBulk(t, nil, none)
	}},
	{"delete_instance_bulk_safety_and_limits", func(t *testing.T, n *node) {
		n.start(t, "running")
		n.completed(t, "a", "b", "c", "d")
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"running"}}, none)
		for _, want := range []int64{2, 2, 0} {
			n.requireBulk(t, &pgwake.BulkFilter{Limit: 2}, pgwake.Deleted{Instances: want, Executions: want, Events: want})
		}
		n.requireGone(t, "a", "b", "c", "d")
		require.Equal(t, []string{"running"}, n.instances(t, nil))
		n.requireHistoryOf(t, "running", events(1))
	}},
	{"delete_instance_bulk_skips_what_is_between_executions", func(t *testing.T, n *node) {
		n.completed(t, "root")
		n.completedChild(t, "root", "child")
		n.turn(t, "child", pgwake.OrchestrationAck{Metadata: running}) // and again
		for next := range int64(3) {
			if next > 0 {
				n.beginNext(t, "child", next+1)
			}
			n.endForNext(t, "child", next+2)
			n.requireBulk(t, nil, none)
			n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"root", "child"}}, none)
		}
		n.beginNext(t, "child", 4)
		n.start(t, "alone")
		n.endForNext(t, "alone", 2)
		n.requireBulk(t, nil, none)
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"alone"}}, none)
	}},
	{"delete_instance_bulk_completed_before_filter", func(t *testing.T, n *node) {
		n.completed(t, "a", "b")
		n.start(t, "running")
		first, last := n.execution(t, "a", 1).CompletedAt, n.execution(t, "b", 1).CompletedAt
		n.requireBulk(t, &pgwake.BulkFilter{CompletedBefore: first.Add(-time.Hour)}, none)
		n.requireBulk(t, &pgwake.BulkFilter{CompletedBefore: first}, none)
		n.requireBulk(t, &pgwake.BulkFilter{CompletedBefore: last, Instances: []string{"b"}}, none)
		require.Equal(t, []string{"a", "b", "running"}, n.instances(t, nil))
		n.requireBulk(t, &pgwake.BulkFilter{CompletedBefore: last.Add(time.Hour)}, pgwake.Deleted{Instances: 2, Executions: 2, Events: 2})
		require.Equal(t, []string{"running"}, n.instances(t, nil))
	}},
	{"delete_instance_bulk_cascades_to_children", func(t *testing.T, n *node) {
		n.completed(t, "r1", "r2", "r3")
		n.completedChild(t, "r1", "r1 a")
		n.completedChild(t, "r1", "r1 b")
		n.completedChild(t, "r2", "r2 a")
		n.completedChild(t, "r3", "r3 a")
		n.requireBulk(t, &pgwake.BulkFilter{Instances: []string{"r1 a", "r2 a"}}, none)
		n.requireBulk(t, &pgwake.BulkFilter{Limit: 3}, pgwake.Deleted{Instances: 7, Executions: 7, Events: 7})
		require.Empty(t, n.instances(t, nil))
	}},
}}

// requireBulk deletes in bulk, and asserts what went.
func (n *node) requireBulk(t *testing.T, f *pgwake.BulkFilter, want pgwake.Deleted) {
	t.Helper()
	d, err := n.DeleteInstancesBulk(t.Context(), f)
	require.NoError(t, err)
	require.Equal(t, want, d)
}
