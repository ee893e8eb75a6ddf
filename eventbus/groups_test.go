package eventbus_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
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

// routedPast emits an event that a group gets by a pattern whose node is gone, and which that of the one that is there does not cover. What that one
// handles is noted. No heartbeat of it comes but those that it is told to send.
func (l *lab) routedPast(emit func()) *seen {
	l.t.Helper()
	config := quick("g")
	config.Heartbeat = time.Hour
	s := &seen{}
	n := l.node(config)
	require.NoError(l.t, n.On(l.within(), "#.b.c", s.types))
	l.subscribe("g", "a.*.c")
	l.eventually(func() bool {
		return one[bool](l, `SELECT patterns = '{#.b.c,a.*.c}' FROM event_nodes WHERE node_id = $1`, n.ID())
	}, "the node has heard of both")
	emit()
	return s
}

// waits waits until the one node here waits for deliveries, and looks for none before it is told.
func (l *lab) waits() {
	l.t.Helper()
	l.eventually(func() bool { s := l.p.Stats().Worker; return s.Parked == 1 && s.Settled }, "it waits")
}

// What goes by another pattern from now on has not come by an insert, and is not late by a look of whoever handles it.
func TestUnsubscribe_DeliveryGoesByAPatternOfANodeThatWaits_IsHandledAtOnce(t *testing.T) {
	t.Parallel()
	for name, unsubscribe := range map[string]func(*lab){
		"by Go": func(l *lab) {
			l.exec(`ALTER FUNCTION beat RENAME TO beat_away`) // nothing but the verb tells
			l.undone(`ALTER FUNCTION beat_away RENAME TO beat`)
			was, err := l.Unsubscribe(l.within(), "g", "a.*.c")
			require.NoError(l.t, err)
			require.True(l.t, was)
		},
		"in a transaction": func(l *lab) {
			l.exec(`ALTER FUNCTION beat RENAME TO beat_away`)
			l.undone(`ALTER FUNCTION beat_away RENAME TO beat`)
			tx := l.begin()
			was, err := l.WithTx(tx).Unsubscribe(l.within(), "g", "a.*.c")
			require.NoError(l.t, err)
			require.True(l.t, was)
			require.NoError(l.t, tx.Commit(l.within()))
		},
		"by SQL": func(l *lab) { l.exec(`SELECT unsubscribe(NULL, 'g', 'a.*.c')`) }, // a heartbeat of whoever hears of it tells
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLabOn(t, &seldom, nil)
			s := l.routedPast(func() {
				l.emit("a.b.c")
				require.Equal(t, []string{"a.b.c " + eventTag("g", "a.*.c")}, l.queued())
			})
			l.waits()
			unsubscribe(l)
			l.eventually(func() bool { return len(s.list()) == 1 && len(l.queued()) == 0 }, "it is handled")
		})
	}
}

// A delivery by a subscription that has ended comes later than that, and goes by another pattern once a heartbeat, of any node, has found it.
func TestUnsubscribe_StrayGoesByAPatternOfANodeThatWaits_IsHandledWithTheHeartbeatThatFindsIt(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &seldom, nil)
	l.openTransaction() // of anybody, which nothing here waits for
	tx := l.begin()
	s := l.routedPast(func() {
		_, err := l.WithTx(tx).Emit(l.within(), "a.b.c", nil, nil)
		require.NoError(t, err)
	})
	_, err := l.Unsubscribe(l.within(), "g", "a.*.c")
	require.NoError(t, err)
	l.eventually(func() bool { return one[bool](l, `SELECT horizon IS NOT NULL FROM event_retirements`) }, "it was looked at while the transaction is open")
	var queued string // before its commit, after which whoever still has a heartbeat to send may find it
	require.NoError(t, tx.QueryRow(l.within(), `SELECT name || ' ' || tag FROM `+pgx.Identifier{l.p.Schema(), "worker_queue"}.Sanitize()).Scan(&queued))
	require.Equal(t, "a.b.c "+eventTag("g", "a.*.c"), queued)
	require.NoError(t, tx.Commit(l.within()))
	l.waits()
	l.nodeOn(l.another(), quick("other"))
	l.eventually(func() bool { return len(s.list()) == 1 && len(l.queued()) == 0 }, "it is handled")
}

// A delivery that comes back after its subscription was removed is the group's all the same.
func TestDeleteGroup_LettersWereRedrivenUnderAFormerPattern_TakesThoseToo(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	l.subscribe("gg", "a")
	for range 2 {
		l.emitKey("a", "k")
		l.bury(eventTag("g", "a"), "broken")
	}
	l.emit("a")
	l.bury(eventTag("g", "a"), "broken")
	_, err := l.Unsubscribe(l.within(), "g", "a")
	require.NoError(t, err)
	l.afterOthers(func() bool {
		l.exec(`SELECT remove_strays()`)
		return one[int](l, `SELECT count(*) FROM event_retirements`) == 0
	}, "its subscription is retired")
	redriven, err := l.p.RedriveDeadLetters(l.within(), nil) // which knows nothing of groups
	require.NoError(t, err)
	require.Equal(t, 3, redriven)
	l.deletedGroup("g")
	require.Zero(t, one[int](l, `SELECT count(*) FROM worker_queue WHERE starts_with(tag, 'eventbus/g|')`))
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM worker_queue`), "those of the other group")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_keys`))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_lines`))
}

// The upper end of a snapshot says nothing about transactions that began since the last one that ended.
func TestHorizon_TransactionIsOpenAboveAllThatHaveEnded_IsBelowIt(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		l := newLab(t, nil)
		asks, err := l.conn.BeginTx(l.within(), pgx.TxOptions{IsoLevel: isolation})
		require.NoError(t, err)
		if isolation == pgx.ReadCommitted {
			_, err = asks.Exec(l.within(), `SELECT pg_current_xact_id()`)
			require.NoError(t, err)
		}
		emits := l.begin()
		var number int64
		require.NoError(t, emits.QueryRow(l.within(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&number))
		var below bool
		require.NoError(t, asks.QueryRow(l.within(), `SELECT $1 < horizon()::text::bigint - log_xact('0')::text::bigint`, number).Scan(&below))
		require.True(t, below, isolation)
	}
}

// Who means a group to have it all is told if it would not, and then nothing has changed.
func TestSubscribe_MissNothing_GroupThatIsThereHasToGetItAlready(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	missNothing := &eventbus.SubscribeOptions{MissNothing: true}
	l.emit("order.created")
	l.subscribe("empty")
	l.subscribe("late", "item.#")
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"order.*", "item.#"}, missNothing))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_replays JOIN event_groups USING (group_id) WHERE name = 'g' AND undelivered`))
	for _, again := range [][]string{{"order.*", "item.#"}, {"order.created"}, {"item.*.added", "order.*"}, {}, nil} {
		require.NoError(t, l.Subscribe(l.within(), "g", again, missNothing), again)
	}
	for group, patterns := range map[string][]string{"g": {"order.*", "order.#"}, "late": {"item.added", "order.created"}, "empty": {"a"}} {
		before := l.patterns(group)
		require.ErrorIs(t, l.Subscribe(l.within(), group, patterns, missNothing), pgwake.ErrInvalid, group)
		require.Equal(t, before, l.patterns(group))
		tx := l.begin()
		require.ErrorIs(t, l.WithTx(tx).Subscribe(l.within(), group, patterns, missNothing), pgwake.ErrInvalid, group)
		require.NoError(t, tx.Rollback(l.within()))
		require.Equal(t, before, l.patterns(group))
	}
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_replays`))
	tx := l.begin()
	require.NoError(t, second(tx.Exec(l.within(), `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)))
	require.ErrorIs(t, l.WithTx(tx).Subscribe(l.within(), "of what it sees", []string{"a"}, missNothing), pgwake.ErrInvalid)
	require.NoError(t, tx.Rollback(l.within()))
	tx = l.begin()
	for _, pattern := range []string{"a", "b"} { // it is new as long as nobody else has seen it
		require.NoError(t, l.WithTx(tx).Subscribe(l.within(), "new", []string{pattern}, missNothing))
	}
	require.NoError(t, tx.Commit(l.within()))
	require.Equal(t, []string{"a", "b"}, l.patterns("new"))
}

// patterns are those of a group, which nil is for if it is not there.
func (l *lab) patterns(group string) []string {
	l.t.Helper()
	groups, err := l.Groups(l.within())
	require.NoError(l.t, err)
	for _, g := range groups {
		if g.Name == group {
			return append([]string{}, g.Patterns...)
		}
	}
	return nil
}

// Somebody else changes the group at that moment, and has come first if he commits.
func TestSubscribe_MissNothingWhileAnotherChangesTheGroup_GoesByWhatTheGroupIsThen(t *testing.T) {
	t.Parallel()
	fromBeginning := &eventbus.SubscribeOptions{FromBeginning: true}
	subscribes := func(patterns ...string) func(*lab, *eventbus.Bus) error {
		return func(l *lab, b *eventbus.Bus) error { return b.Subscribe(l.within(), "g", patterns, fromBeginning) }
	}
	for name, c := range map[string]struct {
		before  []string // patterns of the group; nil: it is not there
		does    func(*lab, *eventbus.Bus) error
		refused bool     // if the other one commits
		after   []string // then
	}{
		"makes it for another type":  {does: subscribes("b"), refused: true, after: []string{"b"}},
		"makes it for all types":     {does: subscribes("#"), after: []string{"#", "a"}},
		"makes it for the same type": {does: subscribes("a"), after: []string{"a"}},
		"makes it for none":          {does: subscribes(), refused: true, after: []string{}},
		"subscribes it":              {before: []string{"b"}, does: subscribes("*"), after: []string{"*", "a", "b"}},
		"unsubscribes it": {before: []string{"*", "b"}, does: func(l *lab, b *eventbus.Bus) error { return second(b.Unsubscribe(l.within(), "g", "*")) },
			refused: true, after: []string{"b"}},
		"deletes it": {before: []string{"b"}, does: func(l *lab, b *eventbus.Bus) error { return second(b.DeleteGroup(l.within(), "g")) }, after: []string{"a"}},
	} {
		for _, level := range []string{"read committed", "repeatable read"} {
			for _, commits := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, at %s, commits: %t", name, level, commits), func(t *testing.T) {
					t.Parallel()
					l := newLab(t, nil)
					if c.before != nil {
						l.subscribe("g", c.before...)
					}
					tx := l.begin()
					require.NoError(t, c.does(l, l.WithTx(tx)))
					subscribed := make(chan error, 1)
					bus := l.at(level)
					go func() {
						subscribed <- bus.Subscribe(t.Context(), "g", []string{"a"}, &eventbus.SubscribeOptions{MissNothing: true})
					}()
					l.eventually(func() bool {
						return one[bool](l, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, tx.Conn().PgConn().PID())
					}, "it waits")
					refused, after := c.refused, c.after
					if commits {
						require.NoError(t, tx.Commit(l.within()))
					} else {
						require.NoError(t, tx.Rollback(l.within()))
						refused = c.before != nil && !slices.Contains(c.before, "*")
						after = c.before
						if !refused {
							after = slices.Sorted(slices.Values(append([]string{"a"}, c.before...)))
						}
					}
					err := <-subscribed
					if refused {
						require.ErrorIs(t, err, pgwake.ErrInvalid)
					} else {
						require.NoError(t, err)
					}
					require.Equal(t, after, l.patterns("g"))
				})
			}
		}
	}
}

// at is a Bus of a role whose default isolation level is another.
func (l *lab) at(level string) *eventbus.Bus {
	l.t.Helper()
	config := l.p.Pool().Config()
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
	pool, err := pgxpool.NewWithConfig(l.t.Context(), config)
	require.NoError(l.t, err)
	l.t.Cleanup(pool.Close)
	p, err := pgwake.New(l.t.Context(), pool, &pgwake.Config{Schema: l.p.Schema(), SkipMigrate: true, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(l.t, err)
	l.t.Cleanup(func() { require.NoError(l.t, p.Close(context.Background())) })
	bus, err := eventbus.New(l.t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(l.t, err)
	return bus
}
