package providertest

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what does an instance keep of each of its executions, and what does it show?

var multiExecution = group{"multi_execution", []row{
	{"execution_isolation", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1, 2, 3), Metadata: running})
		n.continueAsNew(t, "i", 2)
		n.turn(t, "i", pgwake.OrchestrationAck{ExecutionID: 2, History: events(4)})
		n.requireHistoryOf(t, "i", events(1, 4))
		n.requireExecution(t, "i", 1, events(1, 2, 3))
		n.requireExecution(t, "i", 2, events(1, 4))
		part, err := n.ReadHistoryExecution(t.Context(), "i", 1, 2)
		require.NoError(t, err)
		requireHistory(t, events(2, 3), part)
	}},
	{"latest_execution_detection", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1, 2), Metadata: running})
		n.requireHistoryOf(t, "i", events(1, 2))
		n.continueAsNew(t, "i", 2)
		n.requireHistoryOf(t, "i", events(1))
		n.requireExecution(t, "i", 1, events(1, 2))
	}},
	{"execution_id_sequencing", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		require.EqualValues(t, 1, turn.ExecutionID)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 1, History: events(1), Metadata: running})

		n.send(t, "i", "poke")
		turn = n.takeTurnOf(t, "i")
		require.EqualValues(t, 1, turn.ExecutionID)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 2, History: events(5), Metadata: running})

		n.send(t, "i", "poke")
		turn = n.takeTurnOf(t, "i")
		require.EqualValues(t, 2, turn.ExecutionID)
		requireHistory(t, events(5), turn.History)
	}},
	{"continue_as_new_creates_new_execution", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", Version: "1.0.0", ExecutionID: 2}, nil)
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageContinueAsNew}, kinds(turn))
		require.EqualValues(t, 2, turn.Messages[0].ExecutionID)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 2, History: events(1, 2), Metadata: running})

		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.EqualValues(t, 2, info.ExecutionID)
		executions, err := n.ListExecutions(t.Context(), "i")
		require.NoError(t, err)
		require.Len(t, executions, 2)
		n.requireHistoryOf(t, "i", events(1, 2))
		n.requireExecution(t, "i", 1, events(1))
	}},
	{"execution_history_persistence", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{History: events(1, 2, 3), Metadata: running})
		n.continueAsNew(t, "i", 2)
		n.turn(t, "i", pgwake.OrchestrationAck{ExecutionID: 2, History: events(2)})
		n.continueAsNew(t, "i", 3)
		n.end(t, "i", 3, pgwake.StatusCompleted, "done")
		n.requireExecution(t, "i", 1, events(1, 2, 3))
		n.requireExecution(t, "i", 2, events(1, 2))
		n.requireExecution(t, "i", 3, events(1))
	}},
}}

// requireExecution asserts what the history of one execution is.
func (n *node) requireExecution(t *testing.T, instance string, execution int64, want []pgwake.Event) {
	t.Helper()
	got, err := n.ReadHistoryExecution(t.Context(), instance, execution, 0)
	require.NoError(t, err)
	requireHistory(t, want, got)
}

var customStatus = group{"custom_status", []row{
	{"custom_status_set", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.setStatus(t, "i", "half done")
		n.requireStatus(t, "i", pgwake.CustomStatus{Value: "half done", Set: true, Version: 1})
	}},
	{"custom_status_clear", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.setStatus(t, "i", "half done")
		n.clearStatus(t, "i")
		n.requireStatus(t, "i", pgwake.CustomStatus{Version: 2})
	}},
	{"custom_status_none_preserves", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.setStatus(t, "i", "half done")
		n.turn(t, "i", pgwake.OrchestrationAck{History: events(2)})
		n.requireStatus(t, "i", pgwake.CustomStatus{Value: "half done", Set: true, Version: 1})
	}},
	{"custom_status_version_increments", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.setStatus(t, "i", "a")
		n.requireStatus(t, "i", pgwake.CustomStatus{Value: "a", Set: true, Version: 1})
		n.setStatus(t, "i", "b")
		n.requireStatus(t, "i", pgwake.CustomStatus{Value: "b", Set: true, Version: 2})
		n.clearStatus(t, "i")
		n.requireStatus(t, "i", pgwake.CustomStatus{Version: 3})
	}},
	{"custom_status_polling_no_change", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.setStatus(t, "i", "half done")
		status, err := n.GetCustomStatus(t.Context(), "i", 1)
		require.NoError(t, err)
		require.Nil(t, status)
		n.requireStatus(t, "i", pgwake.CustomStatus{Value: "half done", Set: true, Version: 1})
	}},
	{"custom_status_nonexistent_instance", func(t *testing.T, n *node) {
		status, err := n.GetCustomStatus(t.Context(), "unknown", 0)
		require.NoError(t, err)
		require.Nil(t, status)
	}},
	{"custom_status_default_on_new_instance", func(t *testing.T, n *node) {
		n.start(t, "i")
		status, err := n.GetCustomStatus(t.Context(), "i", 0)
		require.NoError(t, err)
		require.Nil(t, status, "0 is not newer than 0")
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Zero(t, info.CustomStatusVersion)
		require.Empty(t, info.CustomStatus)
	}},
}}

func (n *node) setStatus(t *testing.T, instance, value string) {
	t.Helper()
	n.turn(t, instance, pgwake.OrchestrationAck{CustomStatus: &pgwake.CustomStatusUpdate{Value: value}})
}

func (n *node) clearStatus(t *testing.T, instance string) {
	t.Helper()
	n.turn(t, instance, pgwake.OrchestrationAck{CustomStatus: &pgwake.CustomStatusUpdate{Clear: true}})
}

// requireStatus asserts the custom status that a client sees who has seen none.
func (n *node) requireStatus(t *testing.T, instance string, want pgwake.CustomStatus) {
	t.Helper()
	status, err := n.GetCustomStatus(t.Context(), instance, 0)
	require.NoError(t, err)
	require.NotNil(t, status)
	require.Equal(t, want, *status)
}
