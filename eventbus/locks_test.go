package eventbus_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: do those who settle, emit, replay and remove a group at the same time wait for each other in one order?

// underWay is a statement that another session runs.
type underWay struct {
	pid  uint32
	done chan struct{}
	err  error
}

// run runs a statement in a transaction of its own, and returns once it waits for somebody, or has ended.
func (l *lab) run(sql string, args ...any) *underWay {
	l.t.Helper()
	conn := session(l.t, l.p)
	u := &underWay{pid: conn.PgConn().PID(), done: make(chan struct{})}
	go func() {
		defer close(u.done)
		_, u.err = conn.Exec(l.t.Context(), sql, args...)
	}()
	l.eventually(func() bool { return !u.waits() || one[bool](l, `SELECT pg_blocking_pids($1) <> '{}'`, u.pid) }, "it waits, or has ended")
	return u
}

// waits says whether it has not ended.
func (u *underWay) waits() bool {
	select {
	case <-u.done:
		return false
	default:
		return true
	}
}

// end waits until it has ended.
func (u *underWay) end(t *testing.T) {
	t.Helper()
	select {
	case <-u.done:
		require.NoError(t, u.err)
	case <-t.Context().Done():
	}
}

// settling is a transaction that has settled a delivery, which it locks, and not committed.
func (l *lab) settling(item *pgwake.ClaimedWorkItem) pgx.Tx {
	l.t.Helper()
	tx := l.begin()
	require.NoError(l.t, l.p.AckWorkItemTx(l.within(), tx, item.LockToken, nil))
	return tx
}

// holding is a transaction that has run a statement, and holds what that has locked.
func (l *lab) holding(sql string) pgx.Tx {
	l.t.Helper()
	tx := l.begin()
	for _, sql := range []string{`SET LOCAL search_path = ` + pgx.Identifier{l.p.Schema()}.Sanitize(), sql} {
		_, err := tx.Exec(l.within(), sql)
		require.NoError(l.t, err, sql)
	}
	return tx
}

// committing commits a transaction, and returns once that waits for somebody. The outcome is sent.
func (l *lab) committing(tx pgx.Tx) <-chan error {
	l.t.Helper()
	pid, committed := tx.Conn().PgConn().PID(), make(chan error, 1)
	go func() { committed <- tx.Commit(l.t.Context()) }()
	l.eventually(func() bool { return one[bool](l, `SELECT pg_blocking_pids($1) <> '{}'`, pid) }, "it waits")
	return committed
}

const deleteGroup = `SELECT delete_group(NULL, 'g')`

// gone asserts that nothing is left of the group, once what others had in hand has been looked at.
func (l *lab) gone() {
	l.t.Helper()
	l.afterOthers(func() bool {
		l.exec(`SELECT remove_strays()`)
		return one[int](l, `SELECT count(*) FROM event_retirements`) == 0
	}, "its subscriptions are retired")
	require.Empty(l.t, l.queued())
	require.Zero(l.t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

func TestDeleteGroup_DeliveryIsBeingSettled_NoDeadlock(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		waits func(*lab) // puts what comes next into the line of k
		ends  func(context.Context, pgx.Tx) error
	}{
		"the next is an event":                   {func(l *lab) { l.emitKey("a", "k") }, func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }},
		"the next is one, and it is not settled": {func(l *lab) { l.emitKey("a", "k") }, func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }},
		"the next is a letter that was redriven": {func(l *lab) {
			_, err := l.Redrive(l.within(), nil)
			require.NoError(l.t, err)
		}, func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			l.emitKey("a", "k")
			l.bury(tagA, "no") // of which a redriven one has a lower id than the head
			l.emitKey("a", "k")
			c.waits(l)
			l.exec(`DELETE FROM dead_letters`)
			settles := l.settling(l.claim(tagA))
			deletes := l.run(deleteGroup)
			require.NoError(t, c.ends(l.within(), settles))
			deletes.end(t)
			l.gone()
		})
	}
}

// Whoever settles several locks their keys in the order of the items.
func TestDeleteGroup_DeliveriesOfSeveralKeysAreBeingSettled_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	for _, key := range []string{"m", "z", "a"} {
		l.emitKey("a", key)
		l.emitKey("a", key)
	}
	settles := l.begin()
	for range 3 {
		require.NoError(t, l.p.AckWorkItemTx(l.within(), settles, l.claim(tagA).LockToken, nil))
	}
	held := l.holding(`SELECT FROM event_keys WHERE key = 'z' FOR UPDATE`)
	committed := l.committing(settles) // it has m, waits for z, and wants a
	deletes := l.run(deleteGroup)
	require.NoError(t, held.Rollback(l.within()))
	require.NoError(t, <-committed)
	deletes.end(t)
	l.gone()
}

// What a subscription had routed goes elsewhere, or away, while it is settled.
func TestUnsubscribe_DeliveryIsBeingSettledBeforeOneThatWasRedriven_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.emitKey("a", "k")
	l.bury(tagA, "no")
	l.emitKey("a", "k")
	_, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	settles := l.settling(l.claim(tagA))
	ends := l.run(`SELECT unsubscribe(NULL, 'g', 'a')`)
	require.NoError(t, settles.Commit(l.within()))
	ends.end(t)
	l.gone()
}

// A group that is behind is locked by whoever settles one of its deliveries, before the key.
func TestDeleteGroup_DeliveryOfAGroupThatIsBehindIsBeingSettled_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for range 2 {
		l.emitKey("a", "k")
	}
	l.log(2)
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.eventually(func() bool {
		l.exec(`SELECT replay_some(replay_id) FROM event_replays`)
		return len(l.heads("k")) == 1 && one[bool](l, `SELECT behind FROM event_groups`)
	}, "it has begun")
	l.exec(`DELETE FROM worker_queue WHERE name = 'eventbus|replay'`)
	settles := l.settling(l.claim(tagA))
	emits := l.holding(`SELECT FROM event_keys FOR UPDATE`) // of this key
	committed := l.committing(settles)
	deletes := l.run(deleteGroup)
	require.NoError(t, emits.Rollback(l.within()))
	require.NoError(t, <-committed)
	deletes.end(t)
	l.gone()
}

// A replay is about to end that a group was behind for, and waits for whoever emits and has seen that.
func TestDeleteGroup_ReplayFromTheBeginningIsAboutToEnd_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.exec(`SELECT replay_some(replay_id) FROM event_replays`) // it waits for nobody who emits from now on
	l.afterOthers(func() bool {
		return one[bool](l, `SELECT horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot())) FROM event_replays`)
	}, "transactions of other tests have ended")
	emits := l.holding(`SELECT FROM event_groups FOR KEY SHARE`) // as is_behind
	deletes := l.run(deleteGroup)
	replays := l.run(`SELECT replay_some(replay_id) FROM event_replays`)
	require.True(t, replays.waits())
	require.NoError(t, emits.Rollback(l.within()))
	deletes.end(t)
	replays.end(t)
	l.exec(`DELETE FROM worker_queue WHERE name = 'eventbus|replay'`)
	l.gone()
}

// A group that is behind has another replay, which delivers to it as those who emit do.
func TestDeleteGroup_AnotherReplayOfAGroupThatIsBehindIsUnderWay_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.emitKey("a", "k")
	l.log(1)
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	id, err := l.Replay(l.within(), "g", eventbus.Range{})
	require.NoError(t, err)
	held := l.holding(`LOCK TABLE event_log IN ACCESS EXCLUSIVE MODE`)
	replays := l.run(`SELECT replay_some($1)`, id)
	deletes := l.run(deleteGroup)
	require.NoError(t, held.Rollback(l.within()))
	replays.end(t)
	deletes.end(t)
	l.exec(`DELETE FROM worker_queue WHERE name = 'eventbus|replay'`)
	l.gone()
}

// Strays of a subscription are removed that begins anew.
func TestSubscribe_StraysOfAGroupThatIsBehindAreBeingRemoved_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.emitKey("a", "k")
	l.exec(`UPDATE event_groups SET behind = true`)
	l.exec(`DELETE FROM event_subscriptions`)
	l.exec(`INSERT INTO event_retirements (namespace, tag, horizon) VALUES ('default', $1, '3')`, tagA)
	emits := l.holding(`SELECT FROM event_keys FOR UPDATE`)
	removes := l.run(`SELECT remove_strays()`)
	subscribes := l.run(`SELECT subscribe(NULL, 'g', '{a}')`)
	require.NoError(t, emits.Rollback(l.within()))
	removes.end(t)
	subscribes.end(t)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_retirements`))
}

// Groups come and go, and are replayed, while nodes handle what they get.
func TestDeleteGroup_WhileHandlersSettleAndReplaysRun_NoDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var handled atomic.Int64
	for range 2 {
		n := l.nodeOn(l.another(), quick("g"))
		require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { handled.Add(1); return nil }))
	}
	stop := make(chan struct{})
	var others sync.WaitGroup
	for i := range 2 {
		others.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				if _, err := l.Emit(t.Context(), "a", nil, &eventbus.EmitOptions{Key: fmt.Sprint((n + i) % 3)}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 6 {
		for _, sql := range []string{
			`SELECT subscribe(NULL, 'g', '{a}', true)`, `SELECT replay_events(NULL, 'g')`, `SELECT`,
			deleteGroup, `SELECT remove_strays()`,
		} {
			if sql == `SELECT` {
				was := handled.Load()
				l.eventually(func() bool { return handled.Load() >= was+10 }, "deliveries are handled")
				continue
			}
			_, err := l.conn.Exec(l.within(), sql)
			var failure *pgconn.PgError
			if errors.As(err, &failure) && failure.Code == "40P01" {
				t.Fatalf("%s: %v, %s", sql, err, failure.Detail)
			}
			require.NoError(t, err, sql)
		}
	}
	close(stop)
	others.Wait()
}
