package providertest

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what is refused, and what comes of it?

var errorHandling = group{"error_handling", []row{
	{"invalid_lock_token_on_ack", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		for _, token := range []pgwake.LockToken{"no such token", turn.LockToken} {
			err := n.AckOrchestrationItem(t.Context(), token, pgwake.OrchestrationAck{History: events(2)})
			requirePermanent(t, err, pgwake.ErrLockLost)
			require.ErrorContains(t, err, "lock token")
		}
		n.requireHistoryOf(t, "i", events(1))
	}},
	{"duplicate_event_id_rejection", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnOf(t, "i")
		other := pgwake.Event{ID: 1, Type: "other", Data: json.RawMessage(`"other"`)}
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{History: []pgwake.Event{other}})
		requirePermanent(t, err, pgwake.ErrDuplicateEvent)
		n.requireHistoryOf(t, "i", events(1))
	}},
	{"missing_instance_metadata", func(t *testing.T, n *node) {
		n.requireHistoryOf(t, "unknown", nil)
		history, err := n.ReadHistoryExecution(t.Context(), "unknown", 1, 0)
		require.NoError(t, err)
		require.Empty(t, history)
	}},
	{"corrupted_serialization_data", func(t *testing.T, n *node) {
		odd := []string{
			"", `null`, `""`, `0`, `-0`, `1e400`, "  [ ]\n", `{"a":1,"a":2}`, `"\ud83d\ude00 \\u0000"`, `"` + strings.Repeat("ü", 1000) + `"`,
			strings.Repeat("[", 500) + strings.Repeat("]", 500),
		}
		for _, data := range odd {
			n.sendWith(t, pgwake.Message{Instance: "i", Kind: "odd", Data: json.RawMessage(data)}, nil)
			n.enqueueWith(t, pgwake.WorkItem{Name: "odd", Input: json.RawMessage(data)}, nil)
		}
		turn := n.takeTurnOf(t, "i")
		require.Len(t, turn.Messages, len(odd))
		for i, data := range odd {
			require.Equal(t, data, string(turn.Messages[i].Data))
			require.Equal(t, data, string(n.take(t).Input))
		}
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	}},
	{"lock_expiration_during_ack", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, n.brief(now))
		n.passed(t, turn.LockedUntil)
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{History: events(2)})
		requirePermanent(t, err, pgwake.ErrLockLost)
		n.requireHistoryOf(t, "i", events(1))
		require.Equal(t, []pgwake.MessageKind{"poke"}, kinds(n.takeTurnOf(t, "i")))
	}},
}}

var instanceCreation = group{"instance_creation", []row{
	{"instance_creation_via_metadata", func(t *testing.T, n *node) {
		m := startMessage("i")
		m.Name, m.Version = "asked", "1.0.0"
		n.sendWith(t, m, nil)
		n.requireUnknown(t, "i")
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, "asked", turn.Name)
		require.Equal(t, "1.0.0", turn.Version)
		n.requireUnknown(t, "i")

		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "given", Version: "2.0.0"}})
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, "i", info.Instance)
		require.Equal(t, "given", info.Name)
		require.Equal(t, "2.0.0", info.Version)
		require.EqualValues(t, 1, info.ExecutionID)
	}},
	{"no_instance_creation_on_enqueue", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		n.requireUnknown(t, "i")
		all, err := n.ListInstances(t.Context(), nil)
		require.NoError(t, err)
		require.Empty(t, all)
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageStart}, kinds(turn))
		require.EqualValues(t, 1, turn.ExecutionID)
		require.Empty(t, turn.History)
	}},
	{"null_version_handling", func(t *testing.T, n *node) {
		m := startMessage("i")
		m.Version = ""
		n.sendWith(t, m, nil)
		turn := n.takeTurnOf(t, "i")
		require.Empty(t, turn.Version)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
		info, err := n.GetInstanceInfo(t.Context(), "i")
		require.NoError(t, err)
		require.Equal(t, running.Version, info.Version)
		n.send(t, "i", "poke")
		require.Equal(t, running.Version, n.takeTurnOf(t, "i").Version)
	}},
	{"sub_orchestration_instance_creation", func(t *testing.T, n *node) {
		n.startWith(t, "parent", pgwake.OrchestrationAck{
			Messages: []pgwake.MessageEnqueue{{Message: startMessage("child")}},
			Metadata: running,
		})
		n.requireUnknown(t, "child")
		child := running
		child.Parent = "parent"
		n.ackTurn(t, n.takeTurnOf(t, "child"), pgwake.OrchestrationAck{Metadata: child})
		info, err := n.GetInstanceInfo(t.Context(), "child")
		require.NoError(t, err)
		require.Equal(t, "parent", info.Parent)
	}},
}}
