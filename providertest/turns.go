package providertest

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: how far does a turn reach, and what is written without one?

var turns = []row{
	{"current_execution_never_goes_down", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.continueAsNew(t, "i", 2)
		n.turn(t, "i", pgwake.OrchestrationAck{ExecutionID: 1, History: events(7)})
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.EqualValues(t, 2, info.ExecutionID)
		n.requireHistoryOf(t, "i", events(1))
		n.requireExecution(t, "i", 1, events(1, 7))
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		require.EqualValues(t, 2, turn.ExecutionID)
		requireHistory(t, events(1), turn.History)
	}},
	{"cancellation_is_of_one_execution_of_one_instance", func(t *testing.T, n *node) {
		later := activities("i", 1)
		later[0].ExecutionID = 2
		n.startWithActivities(t, "other", 1)
		n.startWith(t, "i", pgwake.OrchestrationAck{WorkItems: append(activities("i", 1), later...), Metadata: running})
		n.cancel(t, "i", 1)
		n.takeActivity(t, "other", 1)
		require.Equal(t, later[0].WorkItem, n.take(t).WorkItem)
		n.requireNoWork(t)
	}},
	{"cancelled_messages_are_removed", func(t *testing.T, n *node) {
		n.start(t, "i", "other")
		timer := func(instance, key string) pgwake.Enqueued {
			return n.sendWith(t, pgwake.Message{Instance: instance, Kind: "timer"}, &pgwake.EnqueueOptions{Delay: lease, DedupKey: key})
		}
		timer("i", "cancelled")
		timer("i", "kept")
		timer("other", "of the other")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: "due"}, &pgwake.EnqueueOptions{DedupKey: "due"})
		n.ackTurn(t, turn, pgwake.OrchestrationAck{CancelMessages: []string{"cancelled", "due", "of the other", "unknown"}})
		n.requireNoTurn(t)
		require.Equal(t, pgwake.QueueDepth{Delayed: 2}, n.depth(t, pgwake.Orchestrator))
		require.True(t, timer("i", "kept").Duplicate)
		require.True(t, timer("other", "of the other").Duplicate)
		require.False(t, timer("i", "cancelled").Duplicate)
	}},
	{"history_is_appended_without_a_turn", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		require.NoError(t, n.AppendHistory(t.Context(), "i", 1, events(5, 3)), "nor does one hinder it")
		n.requireHistoryOf(t, "i", events(1, 3, 5))
		requirePermanent(t, n.AppendHistory(t.Context(), "i", 1, events(6, 5)), pgwake.ErrDuplicateEvent)
		n.requireHistoryOf(t, "i", events(1, 3, 5))
		require.EqualValues(t, 3, n.execution(t, "i", 1).Events)

		n.ackTurn(t, turn, pgwake.OrchestrationAck{History: events(2)})
		require.NoError(t, n.AppendHistory(t.Context(), "i", 2, events(1)))
		n.requireExecution(t, "i", 2, events(1))
		n.requireHistoryOf(t, "i", events(1, 2, 3, 5))
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.EqualValues(t, 1, info.ExecutionID, "only a turn begins an execution")
		requirePermanent(t, n.AppendHistory(t.Context(), "i", 0, events(9)), pgwake.ErrInvalid)
	}},
}
