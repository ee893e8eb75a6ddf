package pgwake_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what may producers in other languages pass in? What the functions accept, Go can fetch
// and finish; the rest they refuse, and nothing is written.

func TestSQLFunctions_ArgumentThatGoRefuses_IsRefusedAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := n.content(t)
	long := strings.Repeat("x", 256)
	for _, call := range []string{
		`enqueue_work('')`,
		`enqueue_work('` + long + `')`,
		`enqueue_work('w', p_dedup_key => '')`,
		`enqueue_work('w', p_dedup_key => '` + long + `')`,
		`enqueue_work('w', p_delay => '-1 hour')`,
		`enqueue_work('w', p_priority => 10)`,
		`enqueue_work('w', p_namespace => 'No')`,
		`enqueue_work('w', p_visible_at => 'infinity')`,
		`enqueue_message('', 'start')`,
		`enqueue_message('` + long + `', 'start')`,
		`enqueue_message('i', '')`,
		`enqueue_message('i', '` + long + `')`,
		`enqueue_message('i', 'start', p_name => '` + long + `')`,
		`enqueue_message('i', 'start', p_version => '')`,
		`enqueue_message('i', 'k', p_delay => '-1 second')`,
	} {
		tx := n.begin(t)
		_, err := tx.Exec(t.Context(), `SELECT `+call)
		require.Error(t, err, call)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.Equal(t, before, n.content(t))
}

func TestSQLFunctions_LimitsExactlyReached_GoFetchesAndFinishesIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	long := strings.Repeat("x", pgwake.MaxNameLength)
	n.exec(t, fmt.Sprintf(`SELECT enqueue_work(%[1]s, p_dedup_key => %[1]s, p_delay => '0'), enqueue_message(%[1]s, %[1]s, p_name => %[1]s, p_version => %[1]s)`,
		"'"+long+"'"))
	item, err := n.FetchWorkItem(t.Context(), now)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	turn, err := n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}))
}
