package providertest

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: who gets the turns of an instance that is sticky, and until when?

var sticky = group{"sticky", []row{
	{"turn_goes_to_owner", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		n.requireNoTurn(t)
		n.requireNoTurnWith(t, owned("B"))
		require.Equal(t, "i", n.takeTurnWith(t, owned("A")).Instance)
		n.requireNoTurnWith(t, owned("A"))
	}},
	{"owner_gets_other_turns_too", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		require.Equal(t, "i", n.takeTurnWith(t, owned("A")).Instance)
	}},
	{"owner_is_woken", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, patiently(owned("A")))
		n.send(t, "i", "poke")
		(<-back).got(t)
	}},
	{"owner_is_woken_on_another_node", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		other := n.another(t)
		back := other.waitingWith(t.Context(), t, pgwake.Orchestrator, patiently(owned("A")))
		n.send(t, "i", "poke")
		(<-back).got(t)
	}},
	{"owner_is_woken_by_a_transaction", func(t *testing.T, n *node) {
		n.requireTransactions(t)
		n.stick(t, "i", "A", lease)
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, patiently(owned("A")))
		tx := n.Begin(t, n.Provider)
		_, err := n.transactional(t).EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "i", Kind: "poke"}, nil)
		require.NoError(t, err)
		require.Empty(t, back)
		require.NoError(t, tx.Commit(t.Context()))
		(<-back).got(t)
	}},
	{"owner_is_woken_when_a_delay_ends", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, patiently(owned("A")))
		added := n.sendWith(t, pgwake.Message{Instance: "i", Kind: "poke"}, &pgwake.EnqueueOptions{Delay: n.LockTimeout})
		n.requireNoTurnWith(t, owned("A"))
		requireNotBefore(t, added.DueAt, (<-back).got(t).claimedAt)
	}},
	{"others_are_woken_when_it_ends", func(t *testing.T, n *node) {
		other := n.another(t)
		end := n.stick(t, "i", "A", n.LockTimeout)
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		n.send(t, "i", "poke")
		requireNotBefore(t, end, (<-back).got(t).claimedAt)

		end = n.stick(t, "k", "A", n.LockTimeout)
		back = other.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		n.send(t, "k", "poke")
		requireNotBefore(t, end, (<-back).got(t).claimedAt)
	}},
	{"shorter_while_counts_for_what_waits", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: "later"}, &pgwake.EnqueueOptions{Delay: 2 * n.LockTimeout})
		n.send(t, "i", "now")
		turn := n.takeTurnWith(t, owned("A"))
		require.Len(t, turn.Messages, 1)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running, Sticky: &pgwake.Sticky{Owner: "A", For: 3 * n.LockTimeout}})
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		(<-back).got(t)
	}},
	{"message_of_a_turn_under_way_follows", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		n.send(t, "i", "poke")
		n.requireNoTurn(t) // which puts the message aside until the turn ends
		n.send(t, "i", "poke")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running, Sticky: &pgwake.Sticky{Owner: "A", For: lease}})
		n.requireNoTurn(t)
		require.Len(t, n.takeTurnWith(t, owned("A")).Messages, 2)
	}},
	{"ack_without_it_ends_it", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, owned("A"))
		n.send(t, "i", "poke")
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		token := (<-back).got(t).token // what was queued is anybody's
		require.NoError(t, n.AckOrchestrationItem(t.Context(), token, pgwake.OrchestrationAck{}))
		n.send(t, "i", "poke")
		n.takeTurnOf(t, "i")
	}},
	{"ack_makes_it_another_s", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, owned("A"))
		n.send(t, "i", "poke")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Sticky: &pgwake.Sticky{Owner: "B", For: lease}})
		n.requireNoTurnWith(t, owned("A"))
		n.takeTurnWith(t, owned("B"))
	}},
	{"delay_beyond_its_end_is_anybody_s", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", n.LockTimeout)
		added := n.sendWith(t, pgwake.Message{Instance: "i", Kind: "poke"}, &pgwake.EnqueueOptions{Delay: 2 * n.LockTimeout})
		turn := n.awaitTurn(t)
		requireNotBefore(t, added.DueAt, claimedAt(turn.LockedUntil))
	}},
	{"shorter_one_brings_delayed_messages_forward", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		due := claimedAt(turn.LockedUntil).Add(time.Second)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{
			Metadata: running, Sticky: &pgwake.Sticky{Owner: "A", For: pgwake.MaxLockTimeout},
			Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "timer"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Second}}},
		})
		n.send(t, "i", "poke")
		turn = n.takeTurnWith(t, owned("A"))
		require.Len(t, turn.Messages, 1)
		back := n.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		requireNotBefore(t, due, (<-back).got(t).claimedAt)
	}},
	{"abandoned_turn_is_anybody_s", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), n.takeTurnWith(t, owned("A")).LockToken, nil))
		n.takeTurnOf(t, "i")
	}},
	{"turn_whose_lease_ended_is_anybody_s", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		turn := n.takeTurnWith(t, n.brief(owned("A")))
		n.send(t, "i", "poke")
		again := n.awaitTurn(t)
		requireNotBefore(t, turn.LockedUntil, claimedAt(again.LockedUntil))
		require.Len(t, again.Messages, 2, "with it goes whatever else is due")
	}},
	{"released_instance_is_anybody_s", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.stick(t, "k", "C", lease)
		n.send(t, "i", "poke")
		n.send(t, "k", "poke")
		for _, release := range []struct {
			owner string
			want  int
		}{{"B", 0}, {"A", 1}, {"A", 0}} {
			released, err := n.ReleaseSticky(t.Context(), []string{release.owner})
			require.NoError(t, err)
			require.Equal(t, release.want, released, release.owner)
		}
		require.Equal(t, "i", n.takeTurnWith(t, owned("B")).Instance)
		n.requireNoTurnWith(t, owned("B"))
	}},
	{"release_wakes_whoever_waits", func(t *testing.T, n *node) {
		other := n.another(t)
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		back := other.waitingWith(t.Context(), t, pgwake.Orchestrator, soon)
		released, err := n.ReleaseSticky(t.Context(), []string{"A"})
		require.NoError(t, err)
		require.Equal(t, 1, released)
		(<-back).got(t)
	}},
	{"order_is_that_of_all_turns", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		send := func(instance string, priority int) {
			n.sendWith(t, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Priority: priority})
		}
		send("first", 5)
		send("i", 5)
		send("last", 0)
		send("urgent", 9)
		for _, want := range []string{"urgent", "first", "i", "last"} {
			require.Equal(t, want, n.takeTurnWith(t, owned("A")).Instance)
		}
	}},
	{"filters_hold_for_the_owner", func(t *testing.T, n *node) {
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Queue: "q"}, &pgwake.EnqueueOptions{Namespace: "space"})
		metadata := running
		metadata.PinnedVersion = &pgwake.Version{Major: 2}
		n.ackTurn(t, n.takeTurnOf(t, "i"), pgwake.OrchestrationAck{Metadata: metadata, Sticky: &pgwake.Sticky{Owner: "A", For: lease}})
		n.send(t, "i", "poke")
		for _, o := range []pgwake.FetchOptions{
			{Namespaces: []string{"default"}}, {Queues: []string{""}}, {Versions: only(1)},
		} {
			o.Owner, o.NoWait, o.LockTimeout = "A", true, lease
			n.requireNoTurnWith(t, &o)
		}
		n.takeTurnWith(t, &pgwake.FetchOptions{Owner: "A", NoWait: true, LockTimeout: lease, Namespaces: []string{"space"}, Queues: []string{"q"}, Versions: only(2)})
	}},
	{"depths_count_it_as_due", func(t *testing.T, n *node) {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		depths, err := n.GetQueueDepths(t.Context())
		require.NoError(t, err)
		require.Len(t, depths, 1)
		require.EqualValues(t, 1, depths[0].Due)
		require.Zero(t, depths[0].Delayed)
	}},
	{"bad_ones_are_refused", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		for _, s := range []pgwake.Sticky{{For: time.Second}, {Owner: "A"}, {Owner: "A", For: -time.Second}, {Owner: "A", For: pgwake.MaxLockTimeout + 1}, {Owner: "\x00", For: time.Second}} {
			requirePermanent(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{Metadata: running, Sticky: &s}), pgwake.ErrInvalid)
		}
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
	}},
}}

// owned is now for the owner of sticky instances.
func owned(owner string) *pgwake.FetchOptions {
	o := *now
	o.Owner = owner
	return &o
}

// stick makes an instance that is sticky, and returns an instant before which it does not end. Nothing else may be due.
func (n *node) stick(t *testing.T, instance, owner string, d time.Duration) (end time.Time) {
	t.Helper()
	n.sendWith(t, startMessage(instance), nil)
	turn := n.takeTurnOf(t, instance)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running, Sticky: &pgwake.Sticky{Owner: owner, For: d}})
	return claimedAt(turn.LockedUntil).Add(d)
}
