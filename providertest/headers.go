package providertest

import (
	"maps"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of the headers of an item?

// traced are headers; a runtime reads nothing into their names.
var traced = map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": `"ünïcode" \ {}`, "empty": ""}

func headers() []row {
	return []row{
		{"headers_of_work_come_with_it", func(t *testing.T, n *node) {
			own := maps.Clone(traced)
			n.enqueueWith(t, pgwake.WorkItem{Name: "alone", Headers: own}, nil)
			own["tenant"] = "changed since"
			n.enqueueWith(t, pgwake.WorkItem{Name: "none", Headers: map[string]string{}}, nil)
			_, err := n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{
				{WorkItem: pgwake.WorkItem{Name: "first", Headers: map[string]string{"a": "1"}}},
				{WorkItem: pgwake.WorkItem{Name: "second"}},
				{WorkItem: pgwake.WorkItem{Name: "third", Headers: map[string]string{"b": "2"}}},
			})
			require.NoError(t, err)
			for name, want := range map[string]map[string]string{
				"alone": traced, "none": nil, "first": {"a": "1"}, "second": nil, "third": {"b": "2"}} {
				item := n.take(t)
				for item.Name != name {
					require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
					item = n.take(t)
				}
				require.Equal(t, want, item.Headers, name)
				n.ack(t, item)
			}
		}},
		{"headers_of_messages_come_with_them", func(t *testing.T, n *node) {
			m := startMessage("i")
			m.Headers = traced
			n.sendWith(t, m, nil)
			n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k"}, nil)
			turn := n.takeTurnOf(t, "i")
			require.Equal(t, traced, turn.Messages[0].Headers)
			require.Nil(t, turn.Messages[1].Headers)

			ack := pgwake.OrchestrationAck{
				Metadata:  pgwake.Metadata{Name: "flow"},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "a", Instance: "i", Headers: map[string]string{"of": "work"}}}},
				Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "k", Headers: map[string]string{"of": "the turn"}}}},
			}
			n.ackTurn(t, turn, ack)
			item := n.take(t)
			require.Equal(t, map[string]string{"of": "work"}, item.Headers)
			turn = n.takeTurnOf(t, "i")
			require.Equal(t, map[string]string{"of": "the turn"}, turn.Messages[0].Headers)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{})

			completion := &pgwake.Message{Instance: "i", Kind: "done", Headers: map[string]string{"of": "the ack"}}
			require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, completion))
			require.Equal(t, completion.Headers, n.takeTurnOf(t, "i").Messages[0].Headers)
		}},
		{"headers_of_a_completion_come_in_a_group", func(t *testing.T, n *node) {
			n.enqueue(t, "a")
			completion := &pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Headers: traced}
			require.NoError(t, n.AckBatched(t.Context(), n.take(t).LockToken, completion))
			require.Equal(t, traced, n.takeTurnOf(t, "i").Messages[0].Headers)
		}},
	}
}
