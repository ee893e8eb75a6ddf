package pgwake_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does a Provider see who else is there, and who died?

// nodeWith returns the node of a schema of which something is true, once there is one.
func (n *node) nodeWith(t *testing.T, is func(pgwake.NodeInfo) bool) (found pgwake.NodeInfo) {
	t.Helper()
	require.Eventually(t, func() bool {
		nodes, err := n.ListNodes(t.Context())
		require.NoError(t, err)
		for _, found = range nodes {
			if is(found) {
				return true
			}
		}
		return false
	}, patience, 5*time.Millisecond)
	return found
}

// ghost writes down what a node has left behind: with the key of a connection that nobody has, unless it is another's. The schema is used
// again, so it goes with the test.
func (n *node) ghost(t *testing.T, listener int32) {
	t.Helper()
	n.exec(t, `INSERT INTO waiters (node, lane, listener, queue, armed, number, namespace, fanout, places)
		VALUES (-7, 0, $1, 'worker', false, 0, '*', 0, 0), (-7, 1, $1, 'orchestrator', true, 0, '*', 2, 3)`, listener)
	t.Cleanup(func() { n.exec(t, `DELETE FROM waiters WHERE node = -7`) })
}

func TestListNodes_OneWaits_ItsLaneSaysForWhat(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = n.FetchWorkItem(ctx, &pgwake.FetchOptions{Namespaces: []string{"mail"}, Tags: pgwake.DefaultAnd("gpu"), PollTimeout: patience})
	}()
	found := n.nodeWith(t, func(i pgwake.NodeInfo) bool { return len(i.Lanes) > 0 && i.Lanes[0].Waiting })
	require.True(t, found.Listening)
	require.NotZero(t, found.PID)
	require.False(t, found.HearsAll)
	require.Equal(t, "pgwake listen", found.Application)
	require.WithinDuration(t, time.Now(), found.Since, time.Hour)
	require.ElementsMatch(t, []string{"", "gpu"}, found.Lanes[0].Labels)
	found.Lanes[0].Labels = nil
	require.Equal(t, []pgwake.LaneInfo{{Queue: pgwake.Worker, Namespaces: []string{"mail"}, Dispatchers: 1, Waiting: true, Fanout: 2}}, found.Lanes)
	cancel()
	<-done
}

func TestListNodes_OneDiedWithoutAWord_IsNotListening(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Notify: pgwake.NotifyBroadcast})
	n.nodeWith(t, func(i pgwake.NodeInfo) bool { return i.Listening && i.HearsAll })
	n.ghost(t, -7)
	dead := n.nodeWith(t, func(i pgwake.NodeInfo) bool { return i.Key == -7 })
	require.Equal(t, pgwake.NodeInfo{Key: -7, Lanes: []pgwake.LaneInfo{{Queue: pgwake.Orchestrator, Dispatchers: 3, Waiting: true, Fanout: 2}}}, dead)
}

// The lock that says that a node lives is that of its schema.
func TestListNodes_OtherSchemas_DoNotCount(t *testing.T) {
	t.Parallel()
	n, other := newNode(t, nil), newNode(t, nil)
	listener := query[int32](t, other, `SELECT listener FROM waiters LIMIT 1`)[0]
	n.ghost(t, listener)
	require.False(t, n.nodeWith(t, func(i pgwake.NodeInfo) bool { return i.Key == -7 }).Listening)
}
