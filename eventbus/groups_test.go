package eventbus_test

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

func TestUnsubscribe_WhatIsNotHandled_GoesByAnotherPatternOrAway(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "order.*", "order.created", "item.*")
	l.emit("order.created")
	l.emit("item.added")
	for _, pattern := range []string{"order.created", "item.*"} {
		was, err := l.Unsubscribe(l.within(), "g", pattern)
		require.NoError(t, err)
		require.True(t, was)
		was, err = l.Unsubscribe(l.within(), "g", pattern)
		require.NoError(t, err)
		require.False(t, was)
	}
	require.Equal(t, []string{"order.created eventbus/g|order.*"}, l.queued())
	groups, err := l.Groups(l.within())
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.Equal(t, []string{"order.*"}, groups[0].Patterns)
}

// An event that was routed before its subscription ended, and commits later, is not left in the queue for ever.
func TestUnsubscribe_WhileAnEmitIsUnderWay_NothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	tx := l.begin()
	_, err := l.WithTx(tx).EmitMany(l.within(), []eventbus.Emission{{Type: "a"}, {Type: "a", EmitOptions: eventbus.EmitOptions{Key: "k"}}, {Type: "b"}})
	require.NoError(t, err)
	_, err = l.Unsubscribe(l.within(), "g", "a")
	require.NoError(t, err)
	l.exec(`SELECT remove_strays()`)
	require.NoError(t, tx.Commit(l.within()))
	require.Contains(t, l.queued(), "a eventbus/g|a")
	l.node(quick("other")) // does it with its heartbeat
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM event_retirements`) == 0 }, "it is looked after")
	require.Equal(t, []string{"b eventbus/g|b"}, l.queued())
}

func TestDeleteGroup_TakesItsDeliveriesAndLinesWithIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "#")
	l.subscribe("", "#")
	for range 3 {
		l.emitKey("a", "k")
		l.emit("a")
	}
	was, err := l.DeleteGroup(l.within(), "g")
	require.NoError(t, err)
	require.True(t, was)
	require.Equal(t, 4, one[int](l, `SELECT count(*) FROM worker_queue WHERE tag = 'eventbus/default|#'`))
	require.Len(t, l.queued(), 4)
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_keys`))
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM event_lines`))
	was, err = l.DeleteGroup(l.within(), "g")
	require.NoError(t, err)
	require.False(t, was)
	for _, bad := range []string{"a|b", "a b", "\x00"} {
		require.ErrorIs(t, l.Subscribe(l.within(), bad, nil, nil), pgwake.ErrInvalid)
		_, err = l.DeleteGroup(l.within(), bad)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	_, err = l.conn.Exec(l.within(), `SELECT subscribe('default', 'g', '{a..b}')`)
	require.Error(t, err)
}
