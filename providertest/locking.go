package providertest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does an instance have one turn at a time, and does a lease end when it says?

var instanceLocking = group{"instance_locking", []row{
	{"exclusive_instance_lock", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		n.awaitRetaken(t, n.takeTurnWith(t, n.brief(now)))
		n.requireNoTurn(t)
	}},
	{"lock_token_uniqueness", func(t *testing.T, n *node) {
		seen := make(map[pgwake.LockToken]bool)
		for i := range 5 {
			n.sendWith(t, startMessage(fmt.Sprint(i)), nil)
			seen[n.takeTurn(t).LockToken] = true
		}
		require.Len(t, seen, 5)
	}},
	{"invalid_lock_token_rejection", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		before := n.takeTurnOf(t, "i")
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), before.LockToken, nil))
		turn := n.takeTurnOf(t, "i")
		for _, wrong := range []pgwake.LockToken{"", "no such token", before.LockToken} {
			requirePermanent(t, n.AckOrchestrationItem(t.Context(), wrong, pgwake.OrchestrationAck{Metadata: running}), pgwake.ErrLockLost)
			requirePermanent(t, n.AbandonOrchestrationItem(t.Context(), wrong, nil), pgwake.ErrLockLost)
		}
		n.requireNoTurn(t)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
	}},
	{"concurrent_instance_fetching", func(t *testing.T, n *node) {
		const count = 10
		n.startMessages(t, count)
		require.Len(t, n.fetchTogether(t, count, soon), count)
	}},
	{"completions_arriving_during_lock_blocked", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		n.send(t, "i", "a", "b", "c")
		again := n.awaitRetaken(t, turn)
		require.Equal(t, []pgwake.MessageKind{pgwake.MessageStart, "a", "b", "c"}, kinds(again))
	}},
	{"cross_instance_lock_isolation", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("a"), nil)
		a := n.takeTurnOf(t, "a")
		n.start(t, "b")
		n.send(t, "a", "poke")
		n.send(t, "b", "poke")
		b := n.takeTurnOf(t, "b")
		n.requireNoTurn(t)
		n.ackTurn(t, b, pgwake.OrchestrationAck{History: events(2)})
		n.ackTurn(t, a, pgwake.OrchestrationAck{Metadata: running})
	}},
	{"message_tagging_during_lock", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "a", "b")
		turn := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{"a", "b"}, kinds(turn))
		n.send(t, "i", "late")
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		require.Equal(t, []pgwake.MessageKind{"late"}, kinds(n.takeTurnOf(t, "i")))
	}},
	{"ack_only_affects_locked_messages", func(t *testing.T, n *node) {
		n.start(t, "i")
		n.send(t, "i", "1")
		turn := n.takeTurnOf(t, "i")
		n.send(t, "i", "2", "3")
		n.requireNoTurn(t)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		next := n.takeTurnOf(t, "i")
		require.Equal(t, []pgwake.MessageKind{"2", "3"}, kinds(next))
		n.ackTurn(t, next, pgwake.OrchestrationAck{})
		n.requireNoTurn(t)
	}},
	{"multi_threaded_lock_contention", func(t *testing.T, n *node) {
		n.startMessages(t, 1)
		require.Len(t, n.fetchTogether(t, 16, aWhile), 1)
	}},
	{"multi_threaded_no_duplicate_processing", func(t *testing.T, n *node) {
		const instances = 5
		n.startMessages(t, instances)
		require.Len(t, n.fetchTogether(t, 4*instances, aWhile), instances)
	}},
	{"multi_threaded_lock_expiration_recovery", func(t *testing.T, n *node) {
		n.startMessages(t, 1)
		crashed := n.takeTurnWith(t, n.brief(now))
		o := &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: n.LockTimeout + aWhile.PollTimeout}
		turns := n.fetchTogether(t, 8, o)
		require.Len(t, turns, 1)
		requireNotBefore(t, crashed.LockedUntil, claimedAt(turns[0].LockedUntil))
		require.NotEqual(t, crashed.LockToken, turns[0].LockToken)
		n.ackTurn(t, turns[0], pgwake.OrchestrationAck{Metadata: running})
	}},
}}

// aWhile is for fetches of which some are to find nothing.
var aWhile = &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 3 * time.Second}

// startMessages sends start messages to so many instances.
func (n *node) startMessages(t *testing.T, count int) {
	t.Helper()
	for i := range count {
		n.sendWith(t, startMessage(fmt.Sprintf("i%d", i)), nil)
	}
}

// fetchTogether fetches turns from so many goroutines, and returns those that were got. It asserts that no two are
// of the same instance or have the same token.
func (n *node) fetchTogether(t *testing.T, count int, o *pgwake.FetchOptions) (got []*pgwake.OrchestrationItem) {
	t.Helper()
	turns, errs := make([]*pgwake.OrchestrationItem, count), make([]error, count)
	together(count, func(i int) {
		turns[i], errs[i] = n.FetchOrchestrationItem(t.Context(), o)
	})
	instances, tokens := make(map[string]bool), make(map[pgwake.LockToken]bool)
	for i, turn := range turns {
		if errors.Is(errs[i], pgwake.ErrNoWork) {
			continue
		}
		require.NoError(t, errs[i])
		require.False(t, instances[turn.Instance], "instance %s was fetched twice", turn.Instance)
		require.False(t, tokens[turn.LockToken], "token %s was given twice", turn.LockToken)
		instances[turn.Instance], tokens[turn.LockToken] = true, true
		got = append(got, turn)
	}
	return got
}

var lockExpiration = group{"lock_expiration", []row{
	{"lock_expires_after_timeout", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		again := n.awaitRetaken(t, turn)
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{Metadata: running})
		requirePermanent(t, err, pgwake.ErrLockLost)
		n.ackTurn(t, again, pgwake.OrchestrationAck{Metadata: running})
	}},
	{"abandon_releases_lock_immediately", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		n.requireNoTurn(t)
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil))
		require.NotEqual(t, turn.LockToken, n.takeTurnOf(t, "i").LockToken)
	}},
	{"lock_renewal_on_ack", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		n.send(t, "i", "meanwhile")
		n.requireNoTurn(t)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
		require.Equal(t, []pgwake.MessageKind{"meanwhile"}, kinds(n.takeTurnOf(t, "i")))
	}},
	{"concurrent_lock_attempts_respect_expiration", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		got := n.fetchTogether(t, 5, now)
		if len(got) == 0 { // or else the machine stalled until the lease had ended
			got = append(got, n.awaitTurn(t))
		}
		require.Len(t, got, 1)
		requireNotBefore(t, turn.LockedUntil, claimedAt(got[0].LockedUntil))
		n.requireNoTurn(t)
	}},
	{"worker_lock_renewal_success", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.takeWith(t, n.brief(now))
		until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
		require.NoError(t, err)
		require.True(t, until.After(item.LockedUntil))
		n.passed(t, item.LockedUntil)
		n.requireNoWork(t)
		n.ack(t, item)
	}},
	{"worker_lock_renewal_invalid_token", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.take(t)
		for _, wrong := range []pgwake.LockToken{"", "no such token"} {
			_, err := n.RenewWorkItemLock(t.Context(), wrong, lease)
			requirePermanent(t, err, pgwake.ErrLockLost)
		}
		n.ack(t, item)
	}},
	{"worker_lock_renewal_after_expiration", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.takeWith(t, n.brief(now))
		n.passed(t, item.LockedUntil)
		_, err := n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
		requirePermanent(t, err, pgwake.ErrLockLost)
		require.Equal(t, item.ID, n.take(t).ID)
	}},
	{"worker_lock_renewal_extends_timeout", func(t *testing.T, n *node) {
		timeout := 2 * n.LockTimeout // the machine may stall between 0.6 and 1.0 of it
		n.enqueue(t, "work")
		item := n.takeWith(t, &pgwake.FetchOptions{LockTimeout: timeout, NoWait: true})
		n.passed(t, item.LockedUntil.Add(-timeout*4/10))
		until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, timeout)
		require.NoError(t, err)
		requireNotBefore(t, item.LockedUntil.Add(timeout*6/10), until)
		item.LockedUntil = until
		n.awaitWorkRetaken(t, item)
	}},
	{"worker_lock_renewal_after_ack", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.take(t)
		n.ack(t, item)
		_, err := n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
		requirePermanent(t, err, pgwake.ErrLockLost)
	}},
	{"abandon_work_item_releases_lock", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.take(t)
		n.requireNoWork(t)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
		again := n.take(t)
		require.Equal(t, item.ID, again.ID)
		require.NotEqual(t, item.LockToken, again.LockToken)
		requirePermanent(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
	}},
	{"abandon_work_item_with_delay", func(t *testing.T, n *node) {
		const delay = 500 * time.Millisecond
		n.enqueue(t, "work")
		item := n.take(t)
		abandoned := time.Now()
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{Delay: delay}))
		require.Equal(t, item.ID, n.await(t).ID)
		require.GreaterOrEqual(t, time.Since(abandoned), delay)
	}},
	{"worker_ack_fails_after_lock_expiry", func(t *testing.T, n *node) {
		n.enqueue(t, "work")
		item := n.takeWith(t, n.brief(now))
		n.passed(t, item.LockedUntil)
		done := &pgwake.Message{Instance: "i", Kind: "done"}
		requirePermanent(t, n.AckWorkItem(t.Context(), item.LockToken, done), pgwake.ErrLockLost)
		n.requireNoTurn(t)
		again := n.take(t)
		require.Equal(t, item.ID, again.ID)
		n.ack(t, again)
	}},
	{"orchestration_lock_renewal_after_expiration", func(t *testing.T, n *node) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		n.passed(t, turn.LockedUntil)
		_, err := n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, lease)
		requirePermanent(t, err, pgwake.ErrLockLost)
		n.takeTurnOf(t, "i")
	}},
}}
