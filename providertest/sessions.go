package providertest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: who is given the work of a session, and for how long?

var sessions = group{"sessions", []row{
	{"non_session_items_fetchable_by_any_worker", func(t *testing.T, n *node) {
		n.enqueue(t, "a", "b", "c")
		for name, o := range map[string]*pgwake.FetchOptions{"A": by("A"), "B": by("B"), "nobody": now} {
			require.Empty(t, n.takeWith(t, o).Session, name)
		}
		n.requireNoWorkWith(t, by("A"))
	}},
	{"session_item_claimable_when_no_session", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "work")
		item := n.takeWith(t, by("A"))
		require.Equal(t, "work", item.Name)
		require.Equal(t, "s", item.Session)
	}},
	{"session_affinity_same_worker", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.requireTake(t, "A", "s", "1")
		n.requireTake(t, "A", "s", "2")
		n.enqueueIn(t, "s", "3")
		n.requireTake(t, "A", "s", "3")
	}},
	{"session_affinity_blocks_other_worker", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.ack(t, n.requireTake(t, "A", "s", "1"))
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "2")
	}},
	{"different_sessions_different_workers", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "s1", "s2")
		n.enqueueIn(t, "r", "r1", "r2")
		n.requireTake(t, "A", "s", "s1")
		n.requireTake(t, "B", "r", "r1")
		n.requireTake(t, "A", "s", "s2")
		n.requireNoWorkWith(t, by("A"))
		n.requireTake(t, "B", "r", "r2")
		n.requireNoWorkWith(t, by("B"))
	}},
	{"mixed_session_and_non_session_items", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.enqueue(t, "plain")
		n.requireTake(t, "A", "s", "1")
		n.requireTake(t, "B", "", "plain")
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "2")
	}},
	{"session_claimable_after_lock_expiry", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		first := n.takeWith(t, byFor("A", moment))
		n.ack(t, first)
		second := n.takeWith(t, patiently(by("B")))
		require.Equal(t, "2", second.Name)
		requireNotBefore(t, sessionEnd(first), claimedAt(second.LockedUntil))
	}},
	{"none_session_skips_session_items", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.enqueue(t, "plain")
		n.enqueueIn(t, "r", "2")
		require.Equal(t, []string{"plain"}, n.drain(t))
		n.requireTake(t, "A", "s", "1")
		n.requireNoWork(t)
		n.requireTake(t, "A", "r", "2")
	}},
	{"some_session_returns_all_items", func(t *testing.T, n *node) {
		n.enqueue(t, "1")
		n.enqueueIn(t, "s", "2")
		n.enqueue(t, "3")
		n.enqueueIn(t, "r", "4")
		n.requireTake(t, "A", "", "1")
		n.requireTake(t, "A", "s", "2")
		n.requireTake(t, "A", "", "3")
		n.requireTake(t, "A", "r", "4")
		n.requireNoWorkWith(t, by("A"))
	}},
	{"renew_session_lock_active", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.enqueueIn(t, "r", "2")
		n.requireTake(t, "A", "s", "1")
		n.requireRenewed(t, 1, "A", lease)
		n.requireRenewed(t, 0, "B", lease)
		n.requireTake(t, "A", "r", "2")
		n.requireRenewed(t, 2, "A", lease)
	}},
	{"renew_session_lock_skips_idle", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.requireTake(t, "A", "s", "1")
		n.requireRenewed(t, 0, "A", 0)
		n.requireRenewed(t, 1, "A", lease)
	}},
	{"renew_session_lock_no_sessions", func(t *testing.T, n *node) {
		n.requireRenewed(t, 0, "A", lease)
		renewed, err := n.RenewSessionLock(t.Context(), nil, lease, lease)
		require.NoError(t, err)
		require.Zero(t, renewed)
	}},
	{"cleanup_removes_expired_no_items", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.ack(t, n.takeAndLoseSession(t, "A"))
		n.requireCleanup(t, 1)
		n.requireCleanup(t, 0)
	}},
	{"cleanup_keeps_sessions_with_pending_items", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.ack(t, n.takeAndLoseSession(t, "A"))
		n.requireCleanup(t, 0)
		second := n.takeAndLoseSession(t, "A")
		n.requireCleanup(t, 0) // one that is claimed still queues
		n.ack(t, second)
		n.requireCleanup(t, 1)
	}},
	{"cleanup_keeps_active_sessions", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.ack(t, n.requireTake(t, "A", "s", "1"))
		n.requireCleanup(t, 0)
		n.enqueueIn(t, "s", "2")
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "2")
	}},
	{"ack_updates_session_last_activity", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		item := n.requireTake(t, "A", "s", "1")
		n.passed(t, claimedAt(item.LockedUntil).Add(n.LockTimeout))
		n.requireRenewed(t, 0, "A", n.LockTimeout)
		n.ack(t, item)
		n.requireRenewed(t, 1, "A", n.LockTimeout)
	}},
	{"renew_work_item_updates_session_last_activity", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		item := n.requireTake(t, "A", "s", "1")
		n.passed(t, claimedAt(item.LockedUntil).Add(n.LockTimeout))
		n.requireRenewed(t, 0, "A", n.LockTimeout)
		n.renew(t, item)
		n.requireRenewed(t, 1, "A", n.LockTimeout)
	}},
	{"session_items_processed_in_order", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2", "3")
		for _, name := range []string{"1", "2", "3"} {
			n.ack(t, n.requireTake(t, "A", "s", name))
		}
		n.requireNoWorkWith(t, by("A"))
	}},
	{"non_session_items_returned_with_session_config", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.requireTake(t, "A", "s", "1")
		n.enqueue(t, "plain")
		n.requireTake(t, "A", "", "plain")
	}},
	{"shared_worker_id_any_caller_can_fetch_owned_session", func(t *testing.T, n *node) {
		caller := n
		if n.Another != nil {
			caller = n.another(t)
		}
		n.enqueueIn(t, "s", "1", "2", "3")
		n.requireTake(t, "A", "s", "1")
		caller.requireNoWorkWith(t, by("B"))
		caller.requireTake(t, "A", "s", "2")
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "3")
	}},
	{"concurrent_session_claim_only_one_wins", func(t *testing.T, n *node) {
		const claimants = 8
		for i := range claimants + 1 {
			n.enqueueIn(t, "s", fmt.Sprint(i))
		}
		items, errs := make([]*pgwake.ClaimedWorkItem, claimants), make([]error, claimants)
		together(claimants, func(i int) {
			items[i], errs[i] = n.FetchWorkItem(t.Context(), by(fmt.Sprint(i)))
		})
		var winner string
		for i, item := range items {
			if errors.Is(errs[i], pgwake.ErrNoWork) {
				continue
			}
			require.NoError(t, errs[i])
			require.Equal(t, "0", item.Name)
			require.Empty(t, winner, "%d has it as well", i)
			winner = fmt.Sprint(i)
		}
		require.NotEmpty(t, winner)
		n.requireNoWorkWith(t, by("too late"))
		n.requireTake(t, winner, "s", "1")
	}},
	{"session_takeover_after_lock_expiry", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2", "3")
		n.takeAndLoseSession(t, "A")
		n.requireTake(t, "B", "s", "2")
		n.requireNoWorkWith(t, by("A"))
		n.requireTake(t, "B", "s", "3")
	}},
	{"poisoned_item_claims_no_session", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "poisoned")
		item := n.takeAndLoseSession(t, "A")
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
		once := by("B")
		once.MaxAttempts = 1
		n.requireNoWorkWith(t, once)
		n.enqueueIn(t, "s", "sound")
		n.requireTake(t, "C", "s", "sound")
	}},
	{"cleanup_then_new_item_recreates_session", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		n.ack(t, n.takeAndLoseSession(t, "A"))
		n.requireCleanup(t, 1)
		n.enqueueIn(t, "s", "2", "3")
		n.requireTake(t, "B", "s", "2")
		n.requireNoWorkWith(t, by("A"))
		n.requireTake(t, "B", "s", "3")
	}},
	{"abandoned_session_item_retryable", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		item := n.requireTake(t, "A", "s", "1")
		require.Equal(t, 1, item.Attempt)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
		n.requireNoWorkWith(t, by("B"))
		require.Equal(t, 2, n.requireTake(t, "A", "s", "1").Attempt)
	}},
	{"abandoned_session_item_ignore_attempt", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		for range 3 {
			item := n.requireTake(t, "A", "s", "1")
			require.Equal(t, 1, item.Attempt)
			require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
		}
	}},
	{"renew_session_lock_after_expiry_returns_zero", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.takeAndLoseSession(t, "A")
		n.requireRenewed(t, 0, "A", lease)
		n.requireTake(t, "B", "s", "2")
	}},
	{"original_worker_reclaims_expired_session", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2", "3")
		n.ack(t, n.takeAndLoseSession(t, "A"))
		n.requireTake(t, "A", "s", "2")
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "3")
	}},
	{"activity_lock_expires_session_lock_valid_same_worker_refetches", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		o := by("A")
		o.LockTimeout = moment
		item := n.takeWith(t, o)
		n.passed(t, item.LockedUntil)
		n.requireNoWorkWith(t, by("B"))
		again := n.requireTake(t, "A", "s", "1")
		require.Equal(t, item.ID, again.ID)
		require.Equal(t, 2, again.Attempt)
		require.NotEqual(t, item.LockToken, again.LockToken)
	}},
	{"session_lock_expires_new_owner_gets_redelivery", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		o := byFor("A", moment)
		o.LockTimeout = 2 * moment
		first := n.takeWith(t, o)
		attempts := make(map[string]int)
		for range 2 {
			item := n.takeWith(t, patiently(by("B")))
			requireNotBefore(t, first.LockedUntil.Add(-moment), claimedAt(item.LockedUntil))
			if item.ID == first.ID {
				requireNotBefore(t, first.LockedUntil, claimedAt(item.LockedUntil))
			}
			attempts[item.Name] = item.Attempt
		}
		require.Equal(t, map[string]int{"1": 2, "2": 1}, attempts)
		n.enqueueIn(t, "s", "3")
		n.requireNoWorkWith(t, by("A"))
		n.requireTake(t, "B", "s", "3")
	}},
	{"session_lock_expires_same_worker_reacquires", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2", "3")
		first := n.takeAndLoseSession(t, "A")
		n.requireTake(t, "A", "s", "2")
		n.requireNoWorkWith(t, by("B"))
		n.requireRenewed(t, 1, "A", lease)
		n.ack(t, first)
	}},
	{"both_locks_expire_different_worker_claims", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1")
		o := byFor("A", moment)
		o.LockTimeout = 2 * moment
		first := n.takeWith(t, o)
		second := n.takeWith(t, patiently(by("B")))
		require.Equal(t, first.ID, second.ID)
		require.Equal(t, 2, second.Attempt)
		requireNotBefore(t, first.LockedUntil, claimedAt(second.LockedUntil))
		requirePermanent(t, n.AckWorkItem(t.Context(), first.LockToken, nil), pgwake.ErrLockLost)
		n.enqueueIn(t, "s", "2")
		n.requireNoWorkWith(t, by("A"))
		n.requireTake(t, "B", "s", "2")
	}},
	{"session_lock_expires_activity_lock_valid_ack_succeeds", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2", "3")
		first := n.takeAndLoseSession(t, "A")
		n.ack(t, first)
		second := n.takeAndLoseSession(t, "A")
		n.requireTake(t, "B", "s", "3")
		n.ack(t, second)
		n.requireNoWorkWith(t, by("B"))
	}},
	{"session_lock_renewal_extends_past_original_timeout", func(t *testing.T, n *node) {
		timeout := 2 * n.LockTimeout // the machine may stall between 0.6 and 1.0 of it
		n.enqueueIn(t, "s", "1", "2")
		claimed := claimedAt(n.takeWith(t, byFor("A", timeout)).LockedUntil)
		n.passed(t, claimed.Add(timeout*6/10))
		n.requireRenewed(t, 1, "A", lease)
		n.passed(t, claimed.Add(timeout))
		n.requireNoWorkWith(t, by("B"))
		n.requireTake(t, "A", "s", "2")
	}},
	{"released_session_is_anybody_s", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		n.enqueueIn(t, "r", "3")
		n.ack(t, n.requireTake(t, "A", "s", "1"))
		n.ack(t, n.requireTake(t, "A", "s", "2"))
		n.ack(t, n.requireTake(t, "C", "r", "3"))
		n.enqueueIn(t, "s", "4")
		n.enqueueIn(t, "r", "5")
		n.requireNoWorkWith(t, by("B"))
		n.requireReleased(t, 0, "B")
		n.requireReleased(t, 1, "A")
		n.requireReleased(t, 0, "A")
		n.requireTake(t, "B", "s", "4")
		n.requireNoWorkWith(t, by("B"))
	}},
	{"release_leaves_a_session_of_which_an_item_is_leased", func(t *testing.T, n *node) {
		n.enqueueIn(t, "s", "1", "2")
		item := n.requireTake(t, "A", "s", "1")
		n.requireReleased(t, 0, "A")
		n.requireNoWorkWith(t, by("B"))
		n.ack(t, item)
		n.requireReleased(t, 1, "A")
		n.requireTake(t, "B", "s", "2")
	}},
	{"release_of_a_session_wakes_whoever_waits", func(t *testing.T, n *node) {
		other := n.another(t)
		n.enqueueIn(t, "s", "1", "2")
		n.ack(t, n.requireTake(t, "A", "s", "1"))
		back := other.waitingWith(t.Context(), t, pgwake.Worker, patiently(by("B")))
		n.requireReleased(t, 1, "A")
		(<-back).got(t)
	}},
}}

// moment is for leases that have only to end.
const moment = 20 * time.Millisecond

// by are options for a fetch of what is due to the owner of sessions. The leases of the item and of its session
// outlive the row.
func by(owner string) *pgwake.FetchOptions { return byFor(owner, lease) }

// byFor is by with another lease of the session.
func byFor(owner string, timeout time.Duration) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: owner, LockTimeout: timeout}}
}

// patiently are the same options for a fetch that waits.
func patiently(o *pgwake.FetchOptions) *pgwake.FetchOptions {
	o = new(*o)
	o.NoWait, o.PollTimeout = false, patience
	return o
}

// enqueueIn adds work items of a session with these names, due at once, in one call each.
func (n *node) enqueueIn(t *testing.T, session string, names ...string) {
	t.Helper()
	for _, name := range names {
		n.enqueueWith(t, pgwake.WorkItem{Name: name, Session: session}, nil)
	}
}

// requireTake has an owner take the item that is due, and asserts which it is.
func (n *node) requireTake(t *testing.T, owner, session, name string) *pgwake.ClaimedWorkItem {
	t.Helper()
	item := n.takeWith(t, by(owner))
	require.Equal(t, name, item.Name)
	require.Equal(t, session, item.Session)
	return item
}

// takeAndLoseSession has an owner take an item of a session, and returns when the session's lock has ended. The lease
// of the item has not.
func (n *node) takeAndLoseSession(t *testing.T, owner string) *pgwake.ClaimedWorkItem {
	t.Helper()
	item := n.takeWith(t, byFor(owner, moment))
	n.passed(t, sessionEnd(item))
	return item
}

// sessionEnd is when the lock of a session ends whose item was claimed with byFor(owner, moment).
func sessionEnd(item *pgwake.ClaimedWorkItem) time.Time {
	return claimedAt(item.LockedUntil).Add(moment)
}

// requireRenewed renews the sessions of an owner, until after the row, and asserts how many those are.
func (n *node) requireRenewed(t *testing.T, want int, owner string, idle time.Duration) {
	t.Helper()
	renewed, err := n.RenewSessionLock(t.Context(), []string{owner}, lease, idle)
	require.NoError(t, err)
	require.Equal(t, want, renewed)
}

// requireReleased releases the sessions of an owner, and asserts how many those are.
func (n *node) requireReleased(t *testing.T, want int, owner string) {
	t.Helper()
	released, err := n.ReleaseSessions(t.Context(), []string{owner})
	require.NoError(t, err)
	require.Equal(t, want, released)
}

func (n *node) requireCleanup(t *testing.T, want int) {
	t.Helper()
	removed, err := n.CleanupSessions(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, removed)
}
