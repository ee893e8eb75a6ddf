package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what comes when, in which order, and how often was it tried?

var queueSemantics = group{"queue_semantics", []row{
	{"worker_queue_fifo_ordering", func(t *testing.T, n *node) {
		names := []string{"a", "b", "c", "d", "e"}
		n.enqueue(t, names...)
		for _, name := range names {
			require.Equal(t, name, n.take(t).Name)
		}
		n.requireNoWork(t)
	}},
	{"worker_peek_lock_semantics", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.take(t)
		n.requireNoWork(t)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil)) // so it is there
		item = n.take(t)
		n.ack(t, item)
		n.requireNoWork(t)
		requirePermanent(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
	}},
	{"worker_ack_atomicity", func(t *testing.T, n *node) {
		n.startWith(t, "i", pgwake.OrchestrationAck{WorkItems: activities("i", 7), Metadata: running})
		item := n.take(t)
		done := &pgwake.Message{Instance: "i", Kind: "done", Data: []byte(`{"activity": 7}`)}
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, done))
		requirePermanent(t, n.AckWorkItem(t.Context(), item.LockToken, done), pgwake.ErrLockLost)
		n.requireNoWork(t)
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{"done"}, kinds(turn))
		require.Equal(t, string(done.Data), string(turn.Messages[0].Data))
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		n.requireNoTurn(t)
	}},
	{"timer_delayed_visibility", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		fireAt := claimedAt(turn.LockedUntil).Add(5 * time.Second)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{
			Messages: []pgwake.MessageEnqueue{{
				Message:        pgwake.Message{Instance: "i", Kind: "timer_fired"},
				EnqueueOptions: pgwake.EnqueueOptions{At: fireAt},
			}},
			Metadata: running,
		})
		n.requireNoTurn(t)
		fired := n.awaitTurn(t)
		require.Equal(t, []pgwake.MessageKind{"timer_fired"}, kinds(fired))
		requireNotBefore(t, fireAt, claimedAt(fired.LockedUntil))
	}},
	{"lost_lock_token_handling", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		again := n.awaitWorkRetaken(t, n.takeWith(t, n.brief(now)))
		n.ack(t, again)
		n.requireNoWork(t)
	}},
	{"worker_item_immediate_visibility", func(t *testing.T, n *node) {
		n.requireNoWork(t)
		n.enqueue(t, "work")
		require.Equal(t, "work", n.take(t).Name)
	}},
	{"worker_delayed_visibility_skips_future_items", func(t *testing.T, n *node) {
		n.enqueue(t, "a", "b")
		a := n.take(t)
		require.Equal(t, "a", a.Name)
		require.NoError(t, n.AbandonWorkItem(t.Context(), a.LockToken, &pgwake.AbandonOptions{Delay: lease}))
		require.Equal(t, "b", n.take(t).Name)
		n.requireNoWork(t)
	}},
	{"orphan_queue_messages_dropped", func(t *testing.T, n *node) {
		n.send(t, "unknown", pgwake.MessageQueued)
		n.requireNoTurn(t)
		n.sendWith(t, startMessage("unknown"), nil)
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageStart}, kinds(n.takeTurnOf(t, "unknown")), "it was to be deleted")

		n.start(t, "known")
		n.send(t, "known", pgwake.MessageQueued)
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageQueued}, kinds(n.takeTurnOf(t, "known")))

		n.sendWith(t, startMessage("opened"), nil)
		n.send(t, "opened", pgwake.MessageQueued)
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageStart, pgwake.MessageQueued}, kinds(n.takeTurnOf(t, "opened")))
	}},
}}

var poisonMessage = group{"poison_message", []row{
	{"orchestration_attempt_count_starts_at_one", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		require.Equal(t, 1, n.takeTurnOf(t, "i").Attempt)
	}},
	{"orchestration_attempt_count_increments_on_refetch", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		for attempt := 1; attempt <= 3; attempt++ {
			n.giveBackTurn(t, attempt, nil)
		}
	}},
	{"worker_attempt_count_starts_at_one", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		require.Equal(t, 1, n.take(t).Attempt)
	}},
	{"worker_attempt_count_increments_on_lock_expiry", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		again := n.awaitWorkRetaken(t, n.takeWith(t, n.brief(now)))
		require.Equal(t, 2, again.Attempt)
	}},
	{"attempt_count_is_per_message", func(t *testing.T, n *node) {
		n.enqueue(t, "a", "b")
		a := n.take(t)
		require.Equal(t, "a", a.Name)
		require.NoError(t, n.AbandonWorkItem(t.Context(), a.LockToken, nil))
		attempts := make(map[string]int)
		for range 2 {
			item := n.take(t)
			attempts[item.Name] = item.Attempt
		}
		require.Equal(t, map[string]int{"a": 2, "b": 1}, attempts)
	}},
	{"abandon_work_item_ignore_attempt_decrements", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		n.giveBack(t, 1, nil)
		n.giveBack(t, 2, &pgwake.AbandonOptions{IgnoreAttempt: true})
		n.giveBack(t, 2, nil)
		n.giveBack(t, 3, nil)
	}},
	{"abandon_orchestration_item_ignore_attempt_decrements", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		n.giveBackTurn(t, 1, nil)
		n.giveBackTurn(t, 2, &pgwake.AbandonOptions{IgnoreAttempt: true})
		n.giveBackTurn(t, 2, nil)
		n.giveBackTurn(t, 3, nil)
	}},
	{"ignore_attempt_never_goes_negative", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		n.sendWith(t, startMessage("i"), nil)
		for range 4 {
			n.giveBack(t, 1, &pgwake.AbandonOptions{IgnoreAttempt: true})
			n.giveBackTurn(t, 1, &pgwake.AbandonOptions{IgnoreAttempt: true})
		}
	}},
	{"max_attempt_count_across_message_batch", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		n.giveBackTurn(t, 1, nil)
		n.giveBackTurn(t, 2, nil)
		n.send(t, "i", "new")
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, 3, turn.Attempt)
		require.Len(t, turn.Messages, 2)
		require.Equal(t, 3, turn.Messages[0].Attempt)
		require.Equal(t, 1, turn.Messages[1].Attempt)
	}},
}}

// giveBack takes the only item, asserts which attempt it is, and abandons it.
func (n *node) giveBack(t *testing.T, attempt int, o *pgwake.AbandonOptions) {
	t.Helper()
	item := n.take(t)
	require.Equal(t, attempt, item.Attempt)
	require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, o))
}

// giveBackTurn is giveBack for the only turn.
func (n *node) giveBackTurn(t *testing.T, attempt int, o *pgwake.AbandonOptions) {
	t.Helper()
	turn := n.takeTurn(t)
	require.Equal(t, attempt, turn.Attempt)
	require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, o))
}
