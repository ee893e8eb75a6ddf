package providertest

import (
	"errors"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of an activity whose instance no longer waits for it?

var cancellation = group{"cancellation", []row{
	{"cancelled_activity_may_have_the_id_0", func(t *testing.T, n *node) {
		zero := pgwake.WorkItem{Name: "zero", Instance: "i"}
		n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1), Metadata: running,
			WorkItems: append(activities("i", 1), pgwake.WorkEnqueue{WorkItem: zero})})
		n.enqueueWith(t, zero, nil)
		item := n.takeActivity(t, "i", 1)
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		item = n.take(t)
		require.Equal(t, zero, item.WorkItem)
		n.turn(t, "i", pgwake.OrchestrationAck{CancelActivities: []pgwake.ActivityRef{{}}})
		requirePermanent(t, n.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
		n.requireNoWork(t)
	}},
	{"fetch_returns_running_state_for_active_orchestration", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		n.takeActivity(t, "i", 1)
	}},
	{"fetch_returns_terminal_state_when_orchestration_completed", fetchableAfter(pgwake.StatusCompleted)},
	{"fetch_returns_terminal_state_when_orchestration_failed", fetchableAfter(pgwake.StatusFailed)},
	{"fetch_returns_terminal_state_when_orchestration_continued_as_new", fetchableAfter(pgwake.StatusContinuedAsNew)},
	{"fetch_returns_missing_state_when_instance_deleted", func(t *testing.T, n *node) {
		n.enqueueWith(t, activities("unknown", 1)[0].WorkItem, nil)
		n.ack(t, n.takeActivity(t, "unknown", 1))
	}},
	{"renew_returns_running_when_orchestration_active", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		n.renew(t, n.takeActivity(t, "i", 1))
	}},
	{"renew_returns_terminal_when_orchestration_completed", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		n.end(t, "i", 1, pgwake.StatusCompleted, "done")
		n.renew(t, item)
		n.ack(t, item)
	}},
	{"renew_returns_missing_when_instance_deleted", func(t *testing.T, n *node) {
		n.enqueueWith(t, activities("unknown", 1)[0].WorkItem, nil)
		n.renew(t, n.takeActivity(t, "unknown", 1))
	}},
	{"ack_work_item_none_deletes_without_enqueue", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		n.ack(t, item)
		requirePermanent(t, n.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
		n.requireNoWork(t)
		n.requireNoTurn(t)
	}},
	{"cancelled_activities_deleted_from_worker_queue", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1, 2, 3)
		n.cancel(t, "i", 1, 2)
		n.ack(t, n.takeActivity(t, "i", 3))
		n.requireNoWork(t)
	}},
	{"ack_work_item_fails_when_entry_deleted", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		n.cancel(t, "i", 1)
		done := &pgwake.Message{Instance: "i", Kind: "done"}
		requirePermanent(t, n.AckWorkItem(t.Context(), item.LockToken, done), pgwake.ErrLockLost)
		n.requireNoTurn(t)
	}},
	{"renew_fails_when_entry_deleted", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		n.cancel(t, "i", 1)
		_, err := n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
		requirePermanent(t, err, pgwake.ErrLockLost)
	}},
	{"cancelling_nonexistent_activities_is_idempotent", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		n.cancel(t, "i", 98, 99)
		n.cancel(t, "i", 98, 99)
		n.ack(t, n.takeActivity(t, "i", 1))
	}},
	{"batch_cancellation_deletes_multiple_activities", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1, 2, 3, 4, 5)
		n.cancel(t, "i", 1, 2, 3, 4, 5)
		n.requireNoWork(t)
	}},
	{"same_activity_in_worker_items_and_cancelled_is_noop", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.turn(t, "i", pgwake.OrchestrationAck{
			WorkItems:        activities("i", 1, 2),
			CancelActivities: []pgwake.ActivityRef{{ExecutionID: 1, ActivityID: 1}},
		})
		n.ack(t, n.takeActivity(t, "i", 2))
		n.requireNoWork(t)
	}},
	{"orphan_activity_after_instance_force_deletion", func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1, 2)
		taken := n.takeActivity(t, "i", 1)
		_, err := n.DeleteInstance(t.Context(), "i", &pgwake.DeleteOptions{Force: true})
		require.NoError(t, err)
		if err := n.AckWorkItem(t.Context(), taken.LockToken, nil); err != nil {
			requirePermanent(t, err, pgwake.ErrLockLost)
		}
		if item, err := n.FetchWorkItem(t.Context(), now); !errors.Is(err, pgwake.ErrNoWork) {
			require.NoError(t, err)
			n.ack(t, item)
		}
		n.requireNoWork(t)
		n.requireNoTurn(t)
		n.requireUnknown(t, "i")
	}},
}}

// fetchableAfter asserts that the activity of an execution that ended with this status can be fetched.
func fetchableAfter(status pgwake.Status) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		n.startWithActivities(t, "i", 1)
		n.end(t, "i", 1, status, "")
		n.ack(t, n.takeActivity(t, "i", 1))
	}
}

// startWithActivities makes an instance that waits for these activities.
func (n *node) startWithActivities(t *testing.T, instance string, ids ...int64) {
	t.Helper()
	n.startWith(t, instance, pgwake.OrchestrationAck{History: events(1), WorkItems: activities(instance, ids...), Metadata: running})
}

// takeActivity takes the next item, which must be this activity.
func (n *node) takeActivity(t *testing.T, instance string, id int64) *pgwake.ClaimedWorkItem {
	t.Helper()
	item := n.take(t)
	require.Equal(t, activities(instance, id)[0].WorkItem, item.WorkItem)
	return item
}

func (n *node) renew(t *testing.T, item *pgwake.ClaimedWorkItem) {
	t.Helper()
	until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
	require.NoError(t, err)
	requireNotBefore(t, item.LockedUntil, until)
}

// cancel has an instance cancel activities of its first execution, in a turn of its own.
func (n *node) cancel(t *testing.T, instance string, ids ...int64) {
	t.Helper()
	refs := make([]pgwake.ActivityRef, len(ids))
	for i, id := range ids {
		refs[i] = pgwake.ActivityRef{ExecutionID: 1, ActivityID: id}
	}
	n.turn(t, instance, pgwake.OrchestrationAck{CancelActivities: refs})
}
