package eventbus_test

import (
	"regexp"
	"testing"
	"time"

	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: who knows which nodes there are?

func TestNodes_RegisterBeatAndStop_IsKnownToAll(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.ID, config.DisplayName, config.Description, config.Metadata = "api server #1!", "API", "the first", map[string]string{"role": "producer"}
	n := l.node(config)
	require.Equal(t, "api-server-1-", n.ID())
	info := func() eventbus.NodeInfo {
		nodes, err := l.Nodes(l.within())
		require.NoError(t, err)
		require.Len(t, nodes, 1)
		return nodes[0]
	}
	first := info()
	require.Equal(t, []any{"api-server-1-", "default", "API", "the first", true}, []any{first.ID, first.Namespace, first.DisplayName, first.Description, first.Live})
	require.JSONEq(t, `{"role": "producer"}`, string(first.Metadata))
	l.eventually(func() bool { return info().LastHeartbeat.After(first.LastHeartbeat) }, "it beats")
	config.DisplayName = "API 2"
	_, err := l.Node(l.within(), config)
	require.NoError(t, err)
	require.Equal(t, []any{"API 2", first.RegisteredAt}, []any{info().DisplayName, info().RegisteredAt}, "it is the same one")
	require.NoError(t, n.Stop(l.within()))
	require.False(t, info().Live)
	require.False(t, info().StoppedAt.IsZero())
	require.NoError(t, n.Start(l.within()))
}

func TestNodes_NoHeartbeat_IsNotLive(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n, err := l.Node(l.within(), nil)
	require.NoError(t, err)
	nodes, err := l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	pgwaketest.Advance(t, l.p, 89*time.Second)
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	pgwaketest.Advance(t, l.p, 2*time.Second)
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.False(t, nodes[0].Live)
	require.True(t, one[bool](l, `SELECT touch_node_heartbeat($1)`, n.ID()))
	nodes, err = l.Nodes(l.within())
	require.NoError(t, err)
	require.True(t, nodes[0].Live)
	require.False(t, one[bool](l, `SELECT touch_node_heartbeat('nobody')`))
}

func TestNode_NoID_HasOneThatNobodyHas(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ids := map[string]bool{}
	for _, wish := range []string{"", "", "---"} {
		n, err := l.Node(l.within(), &eventbus.NodeConfig{ID: wish})
		require.NoError(t, err)
		require.Regexp(t, regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`), n.ID())
		ids[n.ID()] = true
	}
	require.Len(t, ids, 3)
}

func TestQueueNames_AreAsTheDocumentHasThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	require.Equal(t, "core_events_my_app", one[string](l, `SELECT queue_name_for_namespace('my-app')`))
	require.Equal(t, "core_events_demo_dlq", one[string](l, `SELECT dead_letter_queue_name_for_namespace('demo')`))
}
