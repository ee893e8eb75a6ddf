package pgwake_test

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what if a stranger holds our advisory locks? They have no owner, and are the database's.

// hold has a transaction hold advisory locks: classes and keys, as SQL.
func (n *node) hold(t *testing.T, locks ...string) (release func()) {
	tx := n.begin(t)
	for _, lock := range locks {
		_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(`+lock+`)`)
		require.NoError(t, err)
	}
	return func() { require.NoError(t, tx.Rollback(t.Context())) }
}

func TestLocks_StrangerHoldsThem_NobodyWaitsForEverAndOtherWorkFlows(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "known")
	n.start(t, "other")
	n.exec(t, `CREATE OR REPLACE FUNCTION lock_patience() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT '50ms' $$`)
	release := n.hold(t,
		`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`,
		`hashtext('pgwake histories of ' || current_schema()), hashtext('known')`,
		`hashtext('pgwake histories of ' || current_schema()), hashtext('new')`,
		`hashtext(current_schema()::text), hashtext('known')`)
	n.enqueue(t, "work")
	require.Equal(t, []string{"work"}, n.takeAll(t))
	n.send(t, "other", "message")
	turn := n.takeTurn(t)
	require.Equal(t, "other", turn.Instance)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	n.send(t, "known", "message")
	n.requireNoTurn(t) // whoever claims does not wait for the lock

	for what, call := range map[string]func() error{
		"limits":  func() error { return n.SetLimits(t.Context(), "default", pgwake.Limits{MaxRunning: 1}) },
		"history": func() error { return n.AppendHistory(t.Context(), "new", 1, []pgwake.Event{{ID: 1, Type: "e"}}) },
		"delete": func() error {
			return dropped(n.DeleteInstance(t.Context(), "known", &pgwake.DeleteOptions{Force: true}))
		},
	} {
		t.Run(what, func(t *testing.T) {
			var err *pgwake.Error
			require.ErrorAs(t, call(), &err)
			require.Equal(t, "55P03", err.SQLState, "%v", err)
			require.True(t, err.Retryable)
			require.False(t, err.Unknown)
			require.ErrorContains(t, err, "has held the advisory lock")
		})
	}
	release()
	require.Equal(t, "known", n.takeTurn(t).Instance)
	require.NoError(t, n.SetLimits(t.Context(), "default", pgwake.Limits{MaxRunning: 1}))
	require.NoError(t, n.AppendHistory(t.Context(), "new", 1, []pgwake.Event{{ID: 1, Type: "e"}}))
}
