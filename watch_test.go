package pgwake

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// This file answers: does a layer learn of what has changed, and does its node's sign of life cost nothing?

// testWatch is a Watch whose beat returns what beats has, and notes what it was called with. Its tokens so far are taken.
func testWatch(t *testing.T, p *Provider) (w *Watch, conn *pgx.Conn) {
	t.Helper()
	conn = plain(t, p.cfg.Schema)
	mustExec(t, conn, `CREATE TABLE beats (node integer, about text, news boolean); INSERT INTO beats VALUES (0, '', false);
		CREATE FUNCTION test_beat(p_node integer, p_about text) RETURNS boolean LANGUAGE sql SET search_path FROM CURRENT AS
		$$ UPDATE beats SET node = p_node, about = p_about RETURNING news $$`)
	w, err := p.Watch(t.Context(), WatchOptions{Topic: "weather", Beat: "test_beat", About: "rain"})
	require.NoError(t, err)
	t.Cleanup(w.Close)
	return w, conn
}

func requireToken(t *testing.T, w *Watch, why string) {
	t.Helper()
	select {
	case <-w.C:
	case <-time.After(patient):
		require.Fail(t, "no token: "+why)
	}
}

func listens(t *testing.T, conn *pgx.Conn, node int32) (yes bool) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT node_listens($1)`, node).Scan(&yes))
	return yes
}

func TestWatch_TopicIsNotified_GivesATokenAtOnceAndNobodyElse(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: time.Hour})
	w, conn := testWatch(t, p)
	other, err := p.Watch(t.Context(), WatchOptions{Topic: "news", Beat: "test_beat"})
	require.NoError(t, err)
	defer other.Close()
	eventually(t, "it listens", func() bool { return listens(t, conn, w.Node) })
	w.tokens.silence()
	other.tokens.silence()
	mustExec(t, conn, `BEGIN; SELECT notify_instance('weather')`)
	require.Empty(t, w.C)
	mustExec(t, conn, `COMMIT`)
	requireToken(t, w, "it was notified")
	require.Empty(t, other.C)
	w.Close()
	mustExec(t, conn, `SELECT notify_instance('weather'), notify_instance('news')`)
	requireToken(t, other, "it was notified after that")
	require.Empty(t, w.C, "it is closed")
}

func TestWatch_PeriodicStatement_CallsTheBeatAndGivesATokenIfThatSaysSo(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: 200 * time.Millisecond})
	w, conn := testWatch(t, p)
	beats := func(n int64) {
		t.Helper()
		since := p.Stats().Fallbacks
		eventually(t, "it beats", func() bool { return p.Stats().Fallbacks >= since+n })
	}
	// Each beat puts off the token that comes without any, for half again as long. Where this process did not run for so long there was one.
	eventually(t, "no news", func() bool {
		w.tokens.silence()
		beats(2) // the first may have been under way
		return len(w.C) == 0
	})
	var node int32
	var about string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT node, about FROM beats`).Scan(&node, &about))
	require.Equal(t, []any{w.Node, "rain"}, []any{node, about})
	for _, c := range []struct{ why, sql string }{
		{"there is news", `UPDATE beats SET news = true`},
		{"the beat cannot tell", `UPDATE beats SET news = NULL`},
		{"the beat fails", `ALTER TABLE beats RENAME news TO olds`},
		{"there is no such beat", `DROP FUNCTION test_beat`},
	} {
		mustExec(t, conn, c.sql)
		for range 2 { // the first may have been there
			requireToken(t, w, c.why)
		}
		beats(2)
	}
	require.True(t, p.Health().OK)
}

// Somebody holds what the beat changes: it does not keep the connection that everything else hangs on from what it is there for.
func TestWatch_BeatHasToWait_GivesUpSoon(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: time.Second})
	w, conn := testWatch(t, p)
	mustExec(t, conn, `BEGIN; LOCK TABLE beats`)
	since := p.Stats().Fallbacks
	w.tokens.silence()
	eventually(t, "the statement ends", func() bool { return p.Stats().Fallbacks > since })
	requireToken(t, w, "nobody knows")
	require.Zero(t, p.Stats().Reconnects)
	mustExec(t, conn, `ROLLBACK`)
}

func TestWatch_ConnectionBreaks_GivesATokenThenAndWhenItIsBack(t *testing.T) {
	var down atomic.Bool
	tries, gate := make(chan struct{}, 1), make(chan struct{})
	p := testProvider(t, Config{FallbackInterval: time.Hour, fault: func(point string) {
		if point == "connect" && down.Load() {
			tries <- struct{}{}
			<-gate
		}
	}})
	open := sync.OnceFunc(func() { close(gate) })
	defer open()
	w, conn := testWatch(t, p)
	eventually(t, "it listens", func() bool { return listens(t, conn, w.Node) })
	require.True(t, w.Listens())
	w.tokens.silence()
	down.Store(true) // so that it cannot be back
	mustExec(t, conn, `SELECT pg_terminate_backend($1)`, p.engine.listener.pid.Load())
	eventually(t, "it is gone", func() bool { return !listens(t, conn, w.Node) })
	requireToken(t, w, "it is gone")
	require.False(t, w.Listens())
	<-tries
	l := p.engine.listener // does nothing now
	l.watched = true       // as where it broke while the node was about to hibernate, and so current was nothing already
	l.lost(errors.New("it broke"))
	requireToken(t, w, "nobody else would say that it is gone")
	down.Store(false)
	open()
	eventually(t, "it is back", func() bool { return listens(t, conn, w.Node) && p.Stats().Reconnects == 1 })
	requireToken(t, w, "it is back")
}

func TestWatch_NobodyListens_GivesATokenNowAndThen(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling, FallbackInterval: 100 * time.Millisecond})
	w, conn := testWatch(t, p)
	for range 3 {
		requireToken(t, w, "it is late")
	}
	require.False(t, listens(t, conn, w.Node))
}

func TestWatch_Hibernates_GivesATokenWithEachPoll(t *testing.T) {
	cfg := drowsy
	cfg.HibernatePoll = time.Second
	cfg.FallbackInterval = 100 * time.Millisecond
	p := testProvider(t, cfg)
	w, _ := testWatch(t, p)
	require.Equal(t, time.Second, w.Interval)
	awaitHibernation(t, p)
	for range 3 {
		requireToken(t, w, "it polls")
	}
	require.True(t, p.Stats().Hibernating)
}

func TestWatch_AfterClose_IsRefused(t *testing.T) {
	p := testProvider(t, Config{})
	w, _ := testWatch(t, p)
	_, err := p.Watch(t.Context(), WatchOptions{Topic: "weather"})
	require.ErrorIs(t, err, ErrInvalid)
	require.NoError(t, p.Close(t.Context()))
	w.tokens.silence()
	w.look()
	require.Empty(t, w.C)
	_, err = p.Watch(t.Context(), WatchOptions{Topic: "weather", Beat: "test_beat"})
	require.ErrorIs(t, err, ErrClosed)
}
