package pgwake_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: do sessions last, and the leases of their items, while others have them locked? What they are for is in providertest.

// lockSession has a transaction lock a session, as an open one does that has acknowledged an item of it.
func (n *node) lockSession(t *testing.T, session string) (release func()) {
	t.Helper()
	tx := n.begin(t)
	tag, err := tx.Exec(t.Context(), `SELECT FROM sessions WHERE session_id = $1 FOR UPDATE`, session)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	return func() { require.NoError(t, tx.Rollback(t.Context())) }
}

// sessionEnds returns when the sessions end.
func (n *node) sessionEnds(t *testing.T) (ends map[string]time.Time) {
	t.Helper()
	ends = make(map[string]time.Time)
	for _, session := range query[string](t, n, `SELECT session_id FROM sessions`) {
		ends[session] = query[time.Time](t, n, `SELECT locked_until FROM sessions WHERE session_id = $1`, session)[0]
	}
	return ends
}

func TestRenewSessionLock_OneIsLockedByATransaction_TheOthersAreRenewed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, session := range []string{"a", "b", "c"} {
		n.ownSession(t, "we", session)
	}
	before := n.sessionEnds(t)
	release := n.lockSession(t, "b")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	renewed, err := n.RenewSessionLock(ctx, []string{"we"}, 2*time.Hour, time.Hour)
	require.NoError(t, err)
	require.Equal(t, 2, renewed)
	after := n.sessionEnds(t)
	require.True(t, after["a"].After(before["a"]) && after["c"].After(before["c"]))
	require.Equal(t, before["b"], after["b"])

	release()
	renewed, err = n.RenewSessionLock(ctx, []string{"we"}, 2*time.Hour, time.Hour)
	require.NoError(t, err)
	require.Equal(t, 3, renewed)
	require.True(t, n.sessionEnds(t)["b"].After(before["b"]))
}

// Whoever claims from a session, or acknowledges an item of it, has it locked for a moment.
func TestRenewSessionLock_LockedForAMoment_ExtendsFromTheEndOfTheWait(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `DO $$ BEGIN EXECUTE replace(pg_get_functiondef('renew_sessions'::regproc), '20ms', '1min'); END $$`)
	n.ownSession(t, "we", "s")
	release := n.lockSession(t, "s")
	renewed := make(chan int, 1)
	go func() {
		count, err := n.RenewSessionLock(context.Background(), []string{"we"}, 2*time.Hour, time.Hour)
		if err != nil {
			t.Error(err)
		}
		renewed <- count
	}()
	n.awaitBlocked(t, 1)
	waited := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	release()
	require.Equal(t, 1, <-renewed)
	require.False(t, n.sessionEnds(t)["s"].Before(waited.Add(2*time.Hour)))
}

// The lease is the item's. That there was activity in its session is noted by the next renewal, and by whoever has locked the session.
func TestRenewWorkItemLocks_SessionOfOneIsLockedByATransaction_AllAreRenewed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	var tokens []pgwake.LockToken
	for _, session := range []string{"a", "b", ""} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Session: session}, nil)
		require.NoError(t, err)
		item, err := n.FetchWorkItem(t.Context(), ownedBy("we"))
		require.NoError(t, err)
		tokens = append(tokens, item.LockToken)
	}
	n.exec(t, `UPDATE sessions SET last_activity_at = 'epoch'`)
	active := func() []string {
		return query[string](t, n, `SELECT session_id FROM sessions WHERE last_activity_at > 'epoch' ORDER BY 1`)
	}
	release := n.lockSession(t, "a")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, batch := range [][]pgwake.LockToken{tokens, tokens[:1]} {
		until, err := n.RenewWorkItemLocks(ctx, batch, 2*lease)
		require.NoError(t, err)
		require.ElementsMatch(t, batch, slices.Collect(maps.Keys(until)))
		require.Equal(t, []string{"b"}, active())
	}
	release()
	_, err := n.RenewWorkItemLocks(ctx, tokens, 2*lease)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, active())
}
