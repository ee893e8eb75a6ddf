package eventbus_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: does the log go on where the numbers of transactions are others?

// moved makes the tables as if they had come from a server whose transactions have far higher numbers, and returns a cursor of there.
func (l *lab) moved(after eventbus.Cursor) eventbus.Cursor {
	l.t.Helper()
	const ahead = 1_000_000_000_000
	for table, column := range map[string]string{"event_log": "xact", "event_replays": "horizon", "event_retirements": "horizon"} {
		l.exec(`UPDATE ` + table + ` SET ` + column + ` = (1000000000000 + ` + column + `::text::bigint)::text::xid8`)
	}
	l.exec(`UPDATE event_replays SET after_xact = (1000000000000 + after_xact::text::bigint)::text::xid8 WHERE after_xact <> '0'`)
	after.Xact += ahead
	return after
}

// tail reads what is after a cursor until there are so many.
func (l *lab) tail(after *eventbus.Cursor, n int) (ids []int64) {
	l.t.Helper()
	l.afterOthers(func() bool {
		var more []int64
		more, *after = l.read(*after)
		ids = append(ids, more...)
		return len(ids) >= n
	}, "what comes after the cursor")
	return ids
}

func TestAdoptEventLog_LogCameFromAServerWithHigherNumbers_NothingIsLostOrOutOfOrder(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	first := l.emit("a")
	var cursor eventbus.Cursor
	require.Equal(t, []int64{first}, l.tail(&cursor, 1))
	second := l.emit("a")
	require.False(t, one[bool](l, `SELECT adopt_event_log()`), "they are of this server")

	// A replay is half way, and a subscription was just removed.
	replay := one[int64](l, `SELECT replay_events(NULL, 'g')`)
	l.exec(`SELECT remove_strays()`)
	l.afterOthers(func() bool { return one[string](l, `SELECT replay_some($1, 1)`, replay) == "more" }, "transactions of others are over")
	l.subscribe("g", "b")
	l.exec(`SELECT unsubscribe(NULL, 'g', 'b')`)
	l.exec(`UPDATE event_retirements SET horizon = horizon()`)
	cursor = l.moved(cursor)
	events, err := l.Read(l.within(), eventbus.Cursor{}, 10)
	require.NoError(t, err)
	require.Empty(t, events, "they are of transactions that are still to come")

	// Whoever has emitted and not committed yet is waited for.
	open := l.begin()
	early, err := l.WithTx(open).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	adopted := make(chan error, 1)
	conn := session(t, l.p)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), `SELECT adopt_event_log()`)
		adopted <- err
	}()
	l.eventually(func() bool {
		return one[bool](l, `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)`, int32(conn.PgConn().PID()))
	}, "it waits")
	require.NoError(t, open.Commit(l.within()))
	require.NoError(t, <-adopted)
	require.False(t, one[bool](l, `SELECT adopt_event_log()`), "once")

	third := l.emitKey("a", "k")
	l.exec(`SELECT emit(NULL, 'a', p_key => 'k'), emit(NULL, 'a', p_key => 'k')`)
	require.Equal(t, []int64{second, third, third + 1, third + 2}, l.tail(&cursor, 4), "the cursor is as good as before")
	var all eventbus.Cursor
	require.Equal(t, []int64{early, first, second, third, third + 1, third + 2}, l.tail(&all, 6), "what was emitted too early comes first")
	require.EqualValues(t, 2, one[int64](l, `SELECT count(*) FROM event_lines`), "each is in line once")

	l.afterOthers(func() bool { return one[string](l, `SELECT replay_some($1)`, replay) == "done" }, "the replay goes on")
	require.EqualValues(t, 2, one[int64](l, `SELECT delivered FROM event_replays WHERE replay_id = $1`, replay), "early came after the call, and was delivered when it was emitted")
	l.afterOthers(func() bool {
		l.exec(`SELECT remove_strays()`)
		return one[int64](l, `SELECT count(*) FROM event_retirements`) == 0
	}, "what was removed is gone")
}

func TestAdoptEventLog_LogMovesTwice_AndToHigherNumbers_CursorsStayGood(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var want []int64
	var cursor eventbus.Cursor
	for range 2 {
		want = append(want, l.emit("a"))
		require.Equal(t, want[len(want)-1:], l.tail(&cursor, 1))
		cursor = l.moved(cursor)
		l.another() // eventbus.New adopts it
		require.False(t, one[bool](l, `SELECT adopt_event_log()`))
	}
	l.exec(`UPDATE event_log SET xact = (xact::text::bigint - 1000000000000)::text::xid8`) // as on a server whose numbers are higher
	require.False(t, one[bool](l, `SELECT adopt_event_log()`))
	cursor.Xact -= 1_000_000_000_000
	want = append(want, l.emit("a"))
	require.Equal(t, want[2:], l.tail(&cursor, 1))
	var all eventbus.Cursor
	require.Equal(t, want, l.tail(&all, 3))
}

func TestKeepEventLog_LogCameFromAnotherServer_AdoptsIt_OrGivesWayToWhoEmits(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.emit("a")
	l.moved(eventbus.Cursor{})
	open := l.begin()
	_, err := l.WithTx(open).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	require.Equal(t, "wait", one[string](l, `SELECT keep_event_log()`))
	require.NoError(t, open.Commit(l.within()))
	for _, want := range []string{"more", "done"} {
		l.eventually(func() bool {
			state := one[string](l, `SELECT keep_event_log()`)
			require.Contains(t, []string{want, "wait"}, state)
			return state == want
		}, "it gives way to nobody any more")
	}
}

// Whoever reads the offset has a lock on the log, and no snapshot hides a new one from him.
func TestAdoptEventLog_WhoEmitsHasAnOldSnapshot_NumberIsThatOfNow(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.emit("a")
	l.moved(eventbus.Cursor{})
	tx, err := l.p.Pool().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), `SELECT 1`)
	require.NoError(t, err)
	require.True(t, one[bool](l, `SELECT adopt_event_log()`))
	_, err = l.WithTx(tx).Emit(l.within(), "late", nil, nil)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(l.within()))
	require.Equal(t, []string{"a", "late"}, all[string](l, `SELECT event_type FROM event_log ORDER BY xact`))
}
