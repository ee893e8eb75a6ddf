package providertest

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does a turn take effect as a whole?

var atomicity = group{"atomicity", []row{
	{"atomicity_failure_rollback", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{
			History:   events(2, 1), // 1 is taken
			WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "work"}}},
			Messages:  []pgwake.MessageEnqueue{{Message: startMessage("child")}},
			Metadata:  pgwake.Metadata{Status: pgwake.StatusCompleted, Output: "done"},
		})
		requirePermanent(t, err, pgwake.ErrDuplicateEvent)

		n.requireHistoryOf(t, "i", events(1))
		n.requireNoWork(t)
		n.requireNoTurn(t) // neither the child's nor, since it is still locked, this one's
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, pgwake.StatusRunning, info.Status)
		require.Empty(t, info.Output)

		n.ackTurn(t, turn, pgwake.OrchestrationAck{History: events(2)})
		n.requireHistoryOf(t, "i", events(1, 2))
	}},
	{"multi_operation_atomic_ack", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{
			History:   events(1, 2, 3, 4, 5),
			WorkItems: activities("i", 1, 2, 3),
			Messages: []pgwake.MessageEnqueue{
				{Message: pgwake.Message{Instance: "i", Kind: "first", Data: []byte(`1`)}},
				{Message: pgwake.Message{Instance: "i", Kind: "second", Data: []byte(`2`)}},
			},
			Metadata: running,
		})
		n.requireHistoryOf(t, "i", events(1, 2, 3, 4, 5))
		require.Equal(t, []string{"activity 1", "activity 2", "activity 3"}, n.drain(t))
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{"first", "second"}, kinds(turn))
		require.JSONEq(t, `1`, string(turn.Messages[0].Data))
		requireHistory(t, events(1, 2, 3, 4, 5), turn.History)
	}},
	{"lock_released_only_on_successful_ack", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, n.brief(now))
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{History: events(1)})
		require.Error(t, err)
		n.ackTurn(t, n.awaitRetaken(t, turn), pgwake.OrchestrationAck{})
	}},
	{"concurrent_ack_prevention", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		var errs [2]error
		together(len(errs), func(i int) {
			errs[i] = n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{History: events(int64(10 + i))})
		})
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(t, errs[winner], "the other: %v", errs[1-winner])
		require.ErrorIs(t, errs[1-winner], pgwake.ErrLockLost)
		n.requireHistoryOf(t, "i", events(1, int64(10+winner)))
	}},
}}
