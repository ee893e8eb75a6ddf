package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of messages when that changes by which fetches select their instance?

// homes are the rows about queue name, pinned version, namespace and stickiness of an instance, and its messages.
var homes = []row{
	{"message_committed_after_a_new_pin_is_found", meetsChange(change{
		before: func(ack *pgwake.OrchestrationAck) { ack.Metadata.PinnedVersion = &pgwake.Version{Major: 1} },
		with:   func(ack *pgwake.OrchestrationAck) { ack.Metadata.PinnedVersion = &pgwake.Version{Major: 2} },
		serve:  func(o *pgwake.FetchOptions) { o.Versions = only(2) },
	})},
	{"message_committed_after_a_new_queue_name_is_found", meetsChange(change{
		with:  func(ack *pgwake.OrchestrationAck) { ack.Metadata.Queue = "new" },
		serve: func(o *pgwake.FetchOptions) { o.Queues = []string{"new"} },
	})},
	{"message_committed_after_stickiness_ended_is_anybody_s", meetsChange(change{
		before: func(ack *pgwake.OrchestrationAck) { ack.Sticky = &pgwake.Sticky{Owner: "A", For: time.Hour} },
		serve:  func(o *pgwake.FetchOptions) { o.Queues = []string{""} },
	})},
	{"message_committed_after_the_start_is_where_that_is", func(t *testing.T, n *node) {
		n.requireTransactions(t)
		tx := n.Begin(t, n.Provider)
		_, err := n.transactional(t).EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "i", Kind: "early"}, nil)
		require.NoError(t, err)
		n.sendWith(t, startMessage("i"), &pgwake.EnqueueOptions{Namespace: "space"})
		n.ackTurn(t, n.takeTurnOf(t, "i"), pgwake.OrchestrationAck{Metadata: running})
		o := *soon
		o.Namespaces = []string{"space"}
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, &o)
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, "space", (<-back).got(t).namespace)
	}},
	{"timer_follows_the_queue_name", followsChange(change{
		with:  func(ack *pgwake.OrchestrationAck) { ack.Metadata.Queue = "new" },
		old:   func(o *pgwake.FetchOptions) { o.Queues = []string{""} },
		serve: func(o *pgwake.FetchOptions) { o.Queues = []string{"new"} },
	})},
	{"timer_follows_the_pin", followsChange(change{
		before: func(ack *pgwake.OrchestrationAck) { ack.Metadata.PinnedVersion = &pgwake.Version{Major: 1} },
		with:   func(ack *pgwake.OrchestrationAck) { ack.Metadata.PinnedVersion = &pgwake.Version{Major: 2} },
		old:    func(o *pgwake.FetchOptions) { o.Versions = only(1) },
		serve:  func(o *pgwake.FetchOptions) { o.Versions = only(2) },
	})},
	{"queue_message_waits_for_a_start_that_was_given_back", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		before := n.clock(t, pgwake.Orchestrator)
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{Delay: n.LockTimeout}))
		n.send(t, "i", pgwake.MessageQueued)
		n.requireNoTurn(t)
		turn = n.awaitTurn(t)
		requireNotBefore(t, before.Add(n.LockTimeout), claimedAt(turn.LockedUntil))
		require.Len(t, turn.Messages, 2)
		require.Equal(t, pgwake.MessageStart, turn.Messages[0].Kind)
	}},
	{"timer_is_set_again_in_its_own_turn", func(t *testing.T, n *node) {
		n.start(t, "i")
		timer := []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "timer"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "timer"}}}
		n.turn(t, "i", pgwake.OrchestrationAck{Messages: timer})
		for range 3 {
			turn := n.takeTurnOf(t, "i")
			require.Equal(t, pgwake.MessageKind("timer"), turn.Messages[0].Kind)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{Messages: timer})
		}
	}},
	{"timer_is_reset_by_cancelling_it_in_the_same_ack", func(t *testing.T, n *node) {
		n.start(t, "i")
		timer := func(kind pgwake.MessageKind, delay time.Duration) []pgwake.MessageEnqueue {
			return []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: kind}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "timer", Delay: delay}}}
		}
		n.turn(t, "i", pgwake.OrchestrationAck{Messages: timer("first", lease)})
		n.turn(t, "i", pgwake.OrchestrationAck{CancelMessages: []string{"timer"}, Messages: timer("second", 0)})
		turn := n.takeTurnOf(t, "i")
		require.Len(t, turn.Messages, 1)
		require.Equal(t, pgwake.MessageKind("second"), turn.Messages[0].Kind)
		require.Equal(t, pgwake.QueueDepth{Leased: 1}, n.depth(t, pgwake.Orchestrator))
	}},
	{"activity_replaces_a_cancelled_one_of_the_same_key", func(t *testing.T, n *node) {
		n.start(t, "i")
		activity := func(id int64) []pgwake.WorkEnqueue {
			work := activities("i", id)
			work[0].DedupKey = "key"
			return work
		}
		n.turn(t, "i", pgwake.OrchestrationAck{WorkItems: activity(7)})
		n.turn(t, "i", pgwake.OrchestrationAck{CancelActivities: []pgwake.ActivityRef{{ExecutionID: 1, ActivityID: 7}}, WorkItems: activity(8)})
		require.Equal(t, []string{"activity 8"}, n.drain(t))
	}},
}

// change is one in what fetches select by.
type change struct {
	before, with func(*pgwake.OrchestrationAck) // the acks before it, and that which makes it; nil: nothing special
	old, serve   func(*pgwake.FetchOptions)     // fetches that served the instance before, and that do after
}

// narrowed is o with what a change selects by.
func narrowed(o *pgwake.FetchOptions, by func(*pgwake.FetchOptions)) *pgwake.FetchOptions {
	o = new(*o)
	by(o)
	return o
}

// decided is the ack of a running instance with what a change adds to it, if anything.
func decided(by func(*pgwake.OrchestrationAck)) pgwake.OrchestrationAck {
	ack := pgwake.OrchestrationAck{Metadata: running}
	if by != nil {
		by(&ack)
	}
	return ack
}

// meetsChange asserts that a message which was added before the change, by a transaction that commits after it, comes to
// whoever serves the instance then.
func meetsChange(c change) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		n.requireTransactions(t)
		n.startWith(t, "i", decided(c.before))
		n.send(t, "i", "go")
		turn := n.takeTurnWith(t, owned("A"))
		tx := n.Begin(t, n.Provider)
		_, err := n.transactional(t).EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
		require.NoError(t, err)
		n.ackTurn(t, turn, decided(c.with))
		n.requireNoTurnWith(t, narrowed(now, c.serve))
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, narrowed(soon, c.serve))
		require.NoError(t, tx.Commit(t.Context()))
		(<-back).got(t)
	}
}

// followsChange asserts that a timer which was set before the change wakes whoever serves the instance after it, on
// another node, although he that made the change goes on fetching.
func followsChange(c change) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		other := n.another(t)
		n.sendWith(t, startMessage("i"), nil)
		n.ackTurn(t, n.takeTurnWith(t, narrowed(now, c.old)), decided(c.before)) // a fetch of everything would look as well
		timer := n.sendWith(t, pgwake.Message{Instance: "i", Kind: "timer"}, &pgwake.EnqueueOptions{Delay: n.LockTimeout})
		n.send(t, "i", "go")
		turn := n.takeTurnWith(t, narrowed(now, c.old))
		back := other.waitingWith(t.Context(), t, pgwake.Orchestrator, narrowed(soon, c.serve))
		n.ackTurn(t, turn, decided(c.with))
		n.requireNoTurnWith(t, narrowed(now, c.old))
		requireNotBefore(t, timer.DueAt, (<-back).got(t).claimedAt)
	}
}

// only selects one major version.
func only(major int) *pgwake.VersionFilter {
	return &pgwake.VersionFilter{Ranges: []pgwake.VersionRange{{Min: pgwake.Version{Major: major}, Max: pgwake.Version{Major: major, Minor: 9}}}}
}
