package eventbus_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// This file answers: does the log last for years without anybody who looks after it, and is nothing lost by that?

// partitions are the months that have one, without the default.
func (l *lab) partitions() []string {
	l.t.Helper()
	return all[string](l, `SELECT right(inhrelid::regclass::text, 7) FROM pg_inherits WHERE inhparent = 'event_log'::regclass AND inhrelid::regclass::text ~ '\d' ORDER BY 1`)
}

// month is the one so many months from now, in UTC, as partitions are called.
func (l *lab) month(n int) string {
	l.t.Helper()
	return one[string](l, `SELECT to_char(date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => $1), 'YYYY_MM')`, n)
}

// monthsUndone has the partitions of the log be made anew when the test ends, as they are of a new schema.
func (l *lab) monthsUndone() {
	l.t.Helper()
	l.undone(`DELETE FROM event_log_default;
		DO $$ BEGIN
			EXECUTE (SELECT coalesce(string_agg(format('DROP TABLE %I', p.name), ';'), 'SELECT') FROM event_partitions() p);
			PERFORM make_event_partitions();
		END $$`)
}

// keepFor keeps the log for so long, null for ever, until there is no more to do at once.
func (l *lab) keepFor(retention *time.Duration) (state string) {
	l.t.Helper()
	for state = "more"; state == "more"; {
		state = one[string](l, `SELECT keep_event_log($1)`, retention)
	}
	return state
}

// keep keeps the log for 30 days, in the middle of the month so many months from now, until there is no more to do at once.
func (l *lab) keep(months int) (state string) {
	l.t.Helper()
	for state = "more"; state == "more"; {
		state = one[string](l, `SELECT keep_event_log('30 days', 2, (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => $1, days => 14)) AT TIME ZONE 'UTC')`, months)
	}
	return state
}

// kept keeps the log as keep does, and again while that gives way: whoever else has a lock for 25 ms holds it up, a vacuum, or a node that does the same.
func (l *lab) kept(months int) {
	l.t.Helper()
	l.eventually(func() bool { return l.keep(months) == "done" }, "there is no more to do")
}

// keptWithout is kept until these months have no partition: of those that are empty some may be left for another day, for the same reason.
func (l *lab) keptWithout(months int, gone ...string) {
	l.t.Helper()
	l.eventually(func() bool {
		state, left := l.keep(months), l.partitions()
		return state == "done" && !slices.ContainsFunc(gone, func(month string) bool { return slices.Contains(left, month) })
	}, "they are gone")
}

// step is one step of those who keep the log for ever, again while that gives way.
func (l *lab) step() (state string) {
	l.t.Helper()
	l.eventually(func() bool {
		state = one[string](l, `SELECT keep_event_log(NULL)`)
		return state != "wait"
	}, "nobody is in the way")
	return state
}

// keptAll is kept now, and nothing of it is old.
func (l *lab) keptAll() {
	l.t.Helper()
	l.eventually(func() bool { return l.keepFor(nil) == "done" }, "there is no more to do")
}

func TestKeepLog_MonthsPass_PartitionsAreMadeAheadAndOldOnesRemoved(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	id := l.emit("a")
	l.kept(0)
	require.Equal(t, []string{l.month(0), l.month(1), l.month(2)}, l.partitions())
	l.kept(1)
	require.Equal(t, []string{l.month(0), l.month(1), l.month(2), l.month(3)}, l.partitions(), "a part of what was emitted may not be old yet")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_log WHERE event_id = $1`, id))
	l.keptWithout(4, l.month(0), l.month(1), l.month(2))
	require.Equal(t, []string{l.month(3), l.month(4), l.month(5), l.month(6)}, l.partitions())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log WHERE event_id = $1`, id))
}

// Whatever of an old event is still to be done keeps it, and its month with it.
func TestKeepLog_OldEventHasDeliveries_Stays(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		owe  func(l *lab)
		done string
	}{
		"in the queue": {func(l *lab) { l.emit("a") }, `SELECT remove_work(ARRAY(SELECT id FROM worker_queue))`},
		"in a line": {func(l *lab) {
			l.emitKey("a", "k")
			l.emitKey("a", "k")
			l.exec(`UPDATE worker_queue SET input = '{"event_id": 0}'`) // the first of them is not what keeps it
		}, `DELETE FROM event_lines`},
		"a dead letter": {func(l *lab) {
			l.emit("a")
			l.exec(`SELECT bury_work(ARRAY(SELECT id FROM worker_queue), 'x', NULL)`)
		}, `DELETE FROM dead_letters`},
		"a dead letter of nobody's": {func(l *lab) { l.exec(`SELECT emit(NULL, 'nobody', p_strict => true)`) }, `DELETE FROM dead_letters`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.monthsUndone()
			l.subscribe("g", "a")
			c.owe(l)
			l.keptWithout(12, l.month(1)) // others go
			require.Equal(t, l.month(0), l.partitions()[0])
			require.NotZero(t, one[int](l, `SELECT count(*) FROM event_log`))
			l.exec(c.done)
			l.keptWithout(12, l.month(0))
		})
	}
}

func TestKeepLog_ItemsThatNothingOfTheBusHasMade_HoldNothingUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	for _, input := range []string{`"x"`, `{"emitted_at": "never"}`, `{"emitted_at": {}}`} {
		l.exec(`SELECT enqueue_work('a', $1, p_tag => 'eventbus/g|a')`, input)
	}
	l.emit("a")
	l.keptWithout(12, l.month(0))
}

func TestKeepLog_ReplayIsOpen_Waits(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.subscribe("g", "a")
	l.exec(`SELECT append_event_log('default', 'a', NULL, NULL)`)
	replay := one[int64](l, `SELECT replay_events(NULL, 'g')`)
	require.Equal(t, "wait", l.keep(12))
	require.Contains(t, l.partitions(), l.month(0))
	l.afterOthers(func() bool { return one[string](l, `SELECT replay_some($1)`, replay) == "done" }, "it has delivered")
	l.keep(12)
	require.Contains(t, l.partitions(), l.month(0), "which is to be handled")
}

// A replay of other months has nothing to do with those that are old.
func TestKeepLog_ReplayOfOtherMonthsIsOpen_GoesOn(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.subscribe("g", "a")
	l.exec(`SELECT append_event_log('default', 'a', NULL, NULL)`)
	l.exec(`SELECT replay_events(NULL, 'g', p_from => now() + interval '10 months')`)
	l.keptWithout(4, l.month(0))
}

// What is known of nodes and replays that ended long ago goes with the events of that time.
func TestKeepLog_NodesAndReplaysOfOldTimes_AreForgotten(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.node(nil)
	l.exec(`INSERT INTO event_nodes (node_id, namespace, display_name, last_heartbeat, stopped_at) VALUES
		('crashed', 'default', '', now() - interval '3 months', NULL), ('stopped', 'default', '', now() - interval '3 months', now() - interval '3 months'),
		('late', 'default', '', now() - interval '3 months', now())`)
	for range 2 {
		replay := one[int64](l, `SELECT replay_events(NULL, 'g')`)
		l.eventually(func() bool { return one[bool](l, `SELECT ended_at IS NOT NULL FROM get_replay($1)`, replay) }, "it ends")
	}
	l.exec(`UPDATE event_replays SET ended_at = now() - interval '3 months' WHERE replay_id = (SELECT min(replay_id) FROM event_replays)`)
	l.kept(0)
	require.Equal(t, []string{"late"}, all[string](l, `SELECT node_id FROM event_nodes WHERE node_id IN ('crashed', 'stopped', 'late')`))
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM event_nodes`), "and the one that runs")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_replays`))
}

// Somebody who emits has not committed yet: the log gives way, soon, and nothing of his is lost.
func TestKeepLog_TransactionIsOpen_GivesWay(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	tx := l.begin()
	_, err := l.WithTx(tx).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	require.Equal(t, "wait", l.keep(12))
	require.Contains(t, l.partitions(), l.month(0))
	l.emit("a")
	require.NoError(t, tx.Commit(l.within()))
	l.keptWithout(12, l.month(0))
}

// Where there is always a transaction that has emitted, and is open, old months are emptied all the same.
func TestKeepLog_SomeTransactionIsAlwaysOpen_MonthsAreEmptied(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`SELECT make_event_partitions(1, (date_trunc('month', now() AT TIME ZONE 'UTC') - interval '20 months') AT TIME ZONE 'UTC')`)
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) SELECT 'default', 'old', date_trunc('month', now()) - make_interval(months => n) + interval '5 days' FROM unnest('{19,20,40}'::integer[]) AS n`)
	tx := l.begin()
	_, err := l.WithTx(tx).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	l.kept(0)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log`))
	require.Len(t, l.partitions(), 5, "which are empty, and dropped another day")
	require.NoError(t, tx.Commit(l.within()))
	l.eventually(func() bool {
		l.kept(0)
		return len(l.partitions()) == 3
	}, "they are dropped")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_log`))
}

// Partitions of months to come are made while somebody emits, and none waits for the other.
func TestKeepLog_MakesPartitionsAhead_KeepsNobodyFromEmitting(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	emitting, making := l.begin(), l.begin()
	_, err := l.WithTx(emitting).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	_, err = making.Exec(l.within(), `SET LOCAL lock_timeout = '10 s'`)
	require.NoError(t, err)
	var made int
	require.NoError(t, making.QueryRow(l.within(), `SELECT `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.make_event_partitions(4)`).Scan(&made))
	require.Equal(t, 2, made)
	l.exec(`SET lock_timeout = '10 s'`)
	l.exec(`SELECT emit(NULL, 'b')`)
	require.NoError(t, making.Commit(l.within()))
	require.NoError(t, emitting.Commit(l.within()))
	require.Len(t, l.partitions(), 5)
}

func TestKeepLog_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, call := range []string{`keep_event_log('23 hours')`, `keep_event_log(p_months => NULL)`, `make_event_partitions(-1)`, `make_event_partitions(121)`,
		`make_event_partitions(2, 'infinity')`} {
		_, err := l.conn.Exec(l.within(), `SELECT `+call)
		requireRefused(t, err, call)
	}
}

func TestKeepLog_SomebodyElseIsAtIt_Waits(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	tx := l.begin()
	_, err := tx.Exec(l.within(), `SELECT `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.make_event_partitions()`)
	require.NoError(t, err)
	require.Equal(t, "wait", l.keep(12))
	require.Equal(t, l.month(0), l.partitions()[0])
}

// A stranger has the lock, for years: advisory locks are the database's, and have no owner. Events go where they have to all the same.
func TestKeepLog_StrangerHoldsTheLock_EventsAreHandledAndNothingIsRemoved(t *testing.T) {
	t.Parallel()
	for _, function := range []string{"pg_advisory_lock", "pg_advisory_lock_shared"} {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.monthsUndone()
			l.redefines(`lock_patience`, `CREATE OR REPLACE FUNCTION lock_patience() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT '50ms' $$`)
			l.exec(`DO $$ BEGIN EXECUTE (SELECT string_agg(format('DROP TABLE %I', p.name), ';') FROM event_partitions() p); END $$`)
			stranger := session(t, l.p)
			_, err := stranger.Exec(l.within(), `SELECT `+function+`(hashtext('pgwake event partitions of ' || current_schema()), 0)`)
			require.NoError(t, err)
			n := l.node(quick("g"))
			got := make(chan int64, 1)
			require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error { got <- e.ID; return nil }))
			require.Equal(t, l.emit("a"), <-got)
			require.Equal(t, "wait", l.keep(12))
			require.Len(t, l.log(1), 1)
			require.Empty(t, l.partitions(), "it is in the default one")
			require.NoError(t, n.Stop(l.within()))
			_, err = l.conn.Exec(l.within(), `SELECT make_event_partitions()`)
			require.ErrorContains(t, err, "the partitions of the log")
			require.True(t, pgwake.WrapError("make partitions", err).(*pgwake.Error).Retryable)
			_, err = stranger.Exec(l.within(), `SELECT pg_advisory_unlock_all()`)
			require.NoError(t, err)
			l.kept(0)
			require.Len(t, l.partitions(), 3)
			require.Len(t, l.log(1), 1)
		})
	}
}

// Nobody made partitions for a long time: what came to be in the default one grows old there.
func TestKeepLog_DefaultPartition_IsEmptiedOfWhatIsOld(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) SELECT 'default', 'old', now() - interval '3 years' + n * interval '1 s' FROM generate_series(1, 10003) AS n`)
	owed := l.emit("a")
	l.exec(`UPDATE event_log SET emitted_at = now() - interval '2 years' WHERE event_id = $1`, owed)
	l.exec(`UPDATE worker_queue SET input = json_build_object('event_id', $1::bigint, 'emitted_at', now() - interval '2 years')`, owed)
	l.kept(0)
	require.Equal(t, 10004, one[int](l, `SELECT count(*) FROM event_log_default`), "one of them is still to be handled")
	l.exec(`SELECT remove_work(ARRAY(SELECT id FROM worker_queue))`)
	l.emit("a")
	l.kept(0)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log_default`))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_log`))
}

func TestKeepLog_Nodes_DoIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.exec(`SELECT make_event_partitions(2, date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - interval '9 months' + interval '5 days')`)
	l.exec(`DROP TABLE event_log_p` + l.month(2))
	require.Equal(t, []string{l.month(-9), l.month(-8), l.month(-7), l.month(0), l.month(1)}, l.partitions())
	forever, err := eventbus.New(l.within(), l.p, &eventbus.Config{KeepFor: -1})
	require.NoError(t, err)
	first := l.nodeOn(forever, nil)
	l.eventually(func() bool { return slices.Contains(l.partitions(), l.month(2)) }, "that of the month after the next is made")
	require.NoError(t, first.Stop(l.within()))
	require.Contains(t, l.partitions(), l.month(-9))
	l.node(nil)
	l.eventually(func() bool { return !slices.Contains(l.partitions(), l.month(-8)) }, "old ones go")
	require.Contains(t, l.partitions(), l.month(0))
	_, err = eventbus.New(l.within(), l.p, &eventbus.Config{KeepFor: time.Hour})
	require.ErrorIs(t, err, pgwake.ErrConfig)
}

// neglect has no partitions for a year, and so many events an hour in the default one; nobody has made one since.
func (l *lab) neglect(hourly int) (events int) {
	l.t.Helper()
	for n := range 3 {
		l.exec(`DROP TABLE event_log_p` + l.month(n))
	}
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at)
		SELECT 'default', 'a', h + n * interval '1 us' FROM generate_series(now() - interval '11 months', now(), interval '1 h') AS h, generate_series(1, $1) AS n`, hourly)
	return one[int](l, `SELECT count(*) FROM event_log_default`)
}

// Nobody made partitions for a long time, and much was emitted: nothing is searched or moved while somebody waits for that.
func TestKeepLog_DefaultPartitionIsLarge_BecomesOneOfThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	events := l.neglect(2)
	keep := func(tx pgx.Tx) (state string) {
		require.NoError(t, tx.QueryRow(l.within(), `SELECT `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.keep_event_log(NULL)`).Scan(&state))
		return state
	}
	cursor := func() []int64 { return all[int64](l, `SELECT event_id FROM read_events(NULL, p_limit => 1000000)`) }
	var before []int64
	l.afterOthers(func() bool { before = cursor(); return len(before) == events }, "they can be read")
	for range 2 { // a constraint, and its validation
		tx := l.begin()
		l.eventually(func() bool {
			state := keep(tx)
			require.Contains(t, []string{"more", "wait"}, state)
			return state == "more"
		}, "it has the lock, as a vacuum may")
		require.NoError(t, tx.Commit(l.within()))
		before = append(before, l.emit("a"))
	}
	tx := l.begin()
	read := func() (rows int) {
		require.NoError(t, tx.QueryRow(l.within(), `SELECT sum(seq_tup_read) FROM pg_stat_xact_user_tables WHERE schemaname = $1`, l.p.Schema()).Scan(&rows))
		return rows
	}
	l.eventually(func() bool {
		already := read()
		state := keep(tx)
		require.Contains(t, []string{"more", "wait"}, state)
		require.Less(t, read()-already, 1000, "it was not searched while it was locked")
		return state == "more"
	}, "it has the lock")
	require.NoError(t, tx.Commit(l.within()))
	l.keptAll()
	made := l.partitions()
	require.Equal(t, all[string](l, `SELECT name FROM event_partitions()`)[0], "event_log_p"+one[string](l, `SELECT to_char(now() AT TIME ZONE 'UTC' - interval '11 months', 'YYYY_MM')`)+"_to_"+made[0])
	require.Contains(t, made, l.month(2))
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log_default`))
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) VALUES ('default', 'a', now() + interval '3 years')`)
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_log_default`))
	l.exec(`DELETE FROM event_log_default`)
	before = append(before, l.emit("a"))
	l.afterOthers(func() bool { return slices.Equal(before, cursor()) }, "whoever reads the log gets each once, in order")
	require.Equal(t, all[string](l, `SELECT indkey::text FROM pg_index WHERE indrelid = 'event_log_default'::regclass ORDER BY 1`),
		all[string](l, `SELECT indkey::text FROM pg_index WHERE indrelid = (SELECT name FROM event_partitions() LIMIT 1)::text::regclass ORDER BY 1`))
	l.kept(12)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log`), "it goes like the others")
}

// What is out of line would be moved as well.
func TestKeepLog_DefaultPartitionHasFewEventsWithLargePayloads_BecomesOneOfThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`DROP TABLE event_log_p` + l.month(0) + `, event_log_p` + l.month(1) + `, event_log_p` + l.month(2))
	l.exec(`INSERT INTO event_log (namespace, event_type, payload)
		SELECT 'default', 'a', to_jsonb((SELECT string_agg(md5((n + m)::text), '') FROM generate_series(1, 3000) AS m)) FROM generate_series(1, 20) AS n`)
	l.keptAll()
	require.Contains(t, all[string](l, `SELECT name FROM event_partitions()`)[0], "_to_")
	require.Equal(t, 20, one[int](l, `SELECT count(*) FROM event_log`))
}

// Whoever began it died: no event is refused for that.
func TestKeepLog_DefaultPartitionWasAboutToBecomeOne_TakesEventsAllTheSame(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		calls int
		then  func(l *lab)
	}{
		"somebody goes on":             {1, func(l *lab) { l.keptAll() }},
		"the last step was left":       {2, func(l *lab) { l.keptAll() }},
		"long after, in another month": {2, func(l *lab) { l.kept(4) }},
		"an operator makes partitions": {2, func(l *lab) { require.Equal(l.t, 3, one[int](l, `SELECT make_event_partitions()`)) }},
		"a bus, in the last month": {2, func(l *lab) {
			l.boundUntil(0)
			l.eventually(func() bool {
				l.another()
				return one[int](l, `SELECT count(*) FROM bounded_default()`) == 0
			}, "it has the lock")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			events := l.neglect(2)
			for range c.calls {
				require.Equal(t, "more", l.step())
			}
			require.Equal(t, 1, one[int](l, `SELECT count(*) FROM bounded_default()`))
			c.then(l)
			require.Zero(t, one[int](l, `SELECT count(*) FROM bounded_default()`))
			l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) VALUES ('default', 'a', now() + interval '3 years')`)
			require.Contains(t, []int{events + 1, 1}, one[int](l, `SELECT count(*) FROM event_log`), "as it was, or old and gone")
		})
	}
}

// boundUntil has the default partition refuse what comes after a month, as if it had been about to become one of them for long.
func (l *lab) boundUntil(month int) {
	l.t.Helper()
	bound := one[string](l, `SELECT name::text FROM bounded_default()`)
	l.exec(`ALTER TABLE event_log_default RENAME CONSTRAINT ` + bound + ` TO ` + bound[:len(bound)-len("2026_01")] + l.month(month))
}

// A transaction that has emitted stays open, up to the last days before the default partition would refuse events. That is no error of who begins
// with a bus, and is given up as soon as it can be.
func TestKeepLog_TransactionThatHasEmittedStaysOpen_DefaultPartitionTakesEventsAllTheSame(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.neglect(2)
	for range 2 {
		require.Equal(t, "more", l.step())
	}
	open := l.begin()
	_, err := l.WithTx(open).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	require.Equal(t, "wait", one[string](l, `SELECT keep_event_log(NULL)`))
	require.NoError(t, open.Commit(l.within()))
	l.boundUntil(0)
	open = l.begin()
	_, err = l.WithTx(open).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	l.another()
	require.Equal(t, "wait", one[string](l, `SELECT keep_event_log(NULL)`))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM bounded_default()`))
	require.NoError(t, open.Commit(l.within()))
	l.eventually(func() bool {
		var begins errgroup.Group
		for range 4 {
			begins.Go(func() error {
				_, err := l.p.Pool().Exec(l.within(), `SELECT `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.adopt_event_log()`)
				return err
			})
		}
		require.NoError(t, begins.Wait())
		return one[int](l, `SELECT count(*) FROM bounded_default()`) == 0
	}, "one of them has the lock, as a vacuum may")
	l.keptAll()
}

// Of what is of a time that is still to come no partition is made that lasts until then, and none is refused.
func TestKeepLog_DefaultPartitionIsLargeAndHasAnEventOfAFarFuture_IsLeftToTheOperator(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	events := l.neglect(2)
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) VALUES ('default', 'a', now() + interval '70 years')`)
	require.Equal(t, "large", one[string](l, `SELECT keep_event_log(NULL)`))
	require.Zero(t, one[int](l, `SELECT count(*) FROM bounded_default()`))
	l.exec(`DELETE FROM event_log WHERE emitted_at > now() + interval '1 year'`)
	l.keptAll()
	require.Equal(t, events, one[int](l, `SELECT count(*) FROM event_log`))
	require.Len(t, l.partitions(), 1, "of the year, and until two months from now")
	l.emit("a")
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log_default`))
}

// Nothing else is done in the transaction that gives it up: others wait for the end of that.
func TestKeepLog_DefaultPartitionIsAboutToRefuseEvents_GivesThatUpAndNothingElse(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.neglect(2)
	require.Equal(t, "more", l.step())
	l.boundUntil(0)
	require.Equal(t, "more", l.step())
	require.Zero(t, one[int](l, `SELECT count(*) FROM bounded_default()`))
	l.keptAll()
	require.Contains(t, l.partitions(), l.month(2))
}

// What was in it is gone, and nobody has vacuumed it.
func TestKeepLog_DefaultPartitionIsLargeAndEmpty_PartitionsAreMade(t *testing.T) {
	t.Parallel()
	for name, there := range map[string]int{"none": -1, "that of the next month": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.neglect(2)
			l.exec(`DELETE FROM event_log`)
			if there >= 0 {
				l.exec(`SELECT make_event_partitions(0, (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => $1)) AT TIME ZONE 'UTC')`, there)
			}
			l.keptAll()
			l.emit("a")
			require.Zero(t, one[int](l, `SELECT count(*) FROM event_log_default`))
			require.Contains(t, l.partitions(), l.month(2))
		})
	}
}

// By a clock that is far ahead all of the log is old, and all of it would go at once.
func TestKeepLog_ClocksOfServerAndNodeDisagree_NothingIsRemoved(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.exec(`SELECT make_event_partitions(0, (now() AT TIME ZONE 'UTC' - interval '20 months') AT TIME ZONE 'UTC')`)
	for _, off := range []time.Duration{-25 * time.Hour, 25 * time.Hour, 0} {
		n, err := l.Node(l.within(), nil)
		require.NoError(t, err)
		eventbus.SetWall(n, func() time.Time { return time.Now().Add(off) })
		l.exec(`DROP TABLE event_log_p` + l.month(2))
		l.eventually(func() bool {
			return eventbus.KeepLogOnce(l.within(), n) == "done" && (off != 0 || !slices.Contains(l.partitions(), l.month(-20)))
		}, "it gives way to nobody any more, and what is old is gone by clocks that agree")
		require.Contains(t, l.partitions(), l.month(2), "it is made all the same")
		require.Equal(t, off != 0, slices.Contains(l.partitions(), l.month(-20)), off)
	}
}

// Between the events of the default partition there are months that have one: it cannot be one itself.
func TestKeepLog_DefaultPartitionIsLargeAndHasAGap_IsLeftToTheOperator(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.exec(`SELECT make_event_partitions(0, (now() AT TIME ZONE 'UTC' - interval '5 months') AT TIME ZONE 'UTC')`)
	l.neglect(2)
	events := one[int](l, `SELECT count(*) FROM event_log`)
	require.Equal(t, "large", l.keepFor(nil))
	require.Len(t, l.partitions(), 1)
	require.Zero(t, one[int](l, `SELECT count(*) FROM bounded_default()`))
	require.Equal(t, 3, one[int](l, `SELECT make_event_partitions()`))
	l.keptAll()
	require.Equal(t, events, one[int](l, `SELECT count(*) FROM event_log`))
}

func TestUsePartman_MakesThePartitions_UntilItIsGivenBack(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	if !one[bool](l, `SELECT EXISTS (SELECT FROM pg_available_extension_versions WHERE name = 'pg_partman' AND version ~ '^4\.')`) {
		t.Skip("pg_partman 4 is not there to be installed in this server: Debian's package is postgresql-15-partman")
	}
	_, err := l.UsePartman(l.within(), true)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.False(t, one[bool](l, `SELECT use_partman(false)`))
	l.exec(`CREATE SCHEMA "test partman"`)
	l.exec(`CREATE EXTENSION pg_partman SCHEMA "test partman"`)
	defer func() {
		l.exec(`DROP EXTENSION pg_partman`)
		l.exec(`DROP SCHEMA "test partman" CASCADE`)
	}()
	l.kept(0)
	for _, changed := range []bool{true, false} {
		got, err := l.UsePartman(l.within(), true)
		require.NoError(t, err)
		require.Equal(t, changed, got)
	}
	l.emit("a")
	l.exec(`SET timezone = 'America/New_York'`)
	l.exec(`DROP TABLE event_log_p` + l.month(2))
	l.exec(`UPDATE "test partman".part_config SET premake = 5`)
	l.kept(0)
	ahead := []string{l.month(0), l.month(1), l.month(2), l.month(3), l.month(4), l.month(5)}
	require.Equal(t, ahead, l.partitions(), "as pg_partman was told")
	l.exec(`SET timezone = 'UTC'`)
	require.Equal(t, []string{"00:00:00"}, all[string](l, `SELECT DISTINCT (regexp_match(pg_get_expr(c.relpartbound, c.oid), '([0-9:]+)\+00''\) TO'))[1]
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'event_log'::regclass AND c.relname <> 'event_log_default'`), "months of UTC")

	// What it cannot make is made all the same.
	l.exec(`DROP TABLE event_log_p` + l.month(2))
	l.exec(`UPDATE "test partman".part_config SET control = 'nothing'`)
	l.kept(0)
	require.Equal(t, ahead, l.partitions())

	got, err := l.UsePartman(l.within(), false)
	require.NoError(t, err)
	require.True(t, got)
	l.exec(`DROP TABLE event_log_p` + l.month(5) + `, event_log_p` + l.month(4))
	l.keptWithout(3, ahead[:2]...)
	require.Equal(t, ahead[2:], l.partitions(), "two months ahead, and old ones are gone")
}

// Partitions are made and months removed while others emit all the time.
func TestKeepLog_WhileOthersEmit_KeepsThemForNoLongerThanItsLocks(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.monthsUndone()
	l.exec(`SELECT make_event_partitions(2, (date_trunc('month', now() AT TIME ZONE 'UTC') - interval '20 months') AT TIME ZONE 'UTC')`)
	began := time.Now()
	l.exec(`INSERT INTO event_log (namespace, event_type, emitted_at) SELECT 'default', 'old', date_trunc('month', now()) - interval '19 months' + n * interval '1 s' FROM generate_series(1, $1) AS n`,
		testsize.Of(25_000, 50_000))
	took := time.Since(began)
	var most time.Duration
	var emits int
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			began := time.Now()
			if _, err := l.Emit(l.within(), "a", nil, nil); err != nil {
				stopped <- err
				return
			}
			most, emits = max(most, time.Since(began)), emits+1
		}
	}()
	l.keptWithout(0, l.month(-20))
	for i := 3; i < 10; i++ {
		require.Equal(t, 1, one[int](l, `SELECT make_event_partitions($1)`, i))
	}
	close(stop)
	require.NoError(t, <-stopped)
	require.Equal(t, emits, one[int](l, `SELECT count(*) FROM event_log`))
	t.Logf("%d events were emitted meanwhile, none in more than %v", emits, most)
	require.Less(t, most, max(500*time.Millisecond, took), "also where all takes its time")
}
