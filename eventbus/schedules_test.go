package eventbus_test

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: does what is scheduled come when it is to, once, and as the schedule says?

// schedule makes a schedule of events of type a.
func (l *lab) schedule(s eventbus.Schedule) string {
	l.t.Helper()
	if s.Name == "" {
		s.Name = "s"
	}
	if s.Type == "" && s.Work == "" {
		s.Type = "a"
	}
	id, err := l.Schedule(l.within(), s)
	require.NoError(l.t, err)
	return id
}

func (l *lab) scheduled() []eventbus.ScheduleInfo {
	l.t.Helper()
	list, err := l.Schedules(l.within(), "", 100)
	require.NoError(l.t, err)
	return list
}

// occur has the pending occurrence of the only schedule be that of an instant, and carries it out as a node does.
func (l *lab) occur(at time.Time) int {
	l.t.Helper()
	l.exec(`UPDATE scheduled_tasks SET next_at = $1`, at)
	l.exec(`UPDATE worker_queue SET visible_at = now() WHERE tag = 'eventbus'`)
	return l.carryOut(l.claim("eventbus"))
}

func (l *lab) carryOut(item *pgwake.ClaimedWorkItem) int {
	l.t.Helper()
	id, token, err := item.LockToken.WorkItem()
	require.NoError(l.t, err)
	return one[int](l, `SELECT occur($1, $2, ($3::json ->> 'task_id')::uuid)`, id, token, string(item.Input))
}

// occurrences are those that are in the queue, and consistent with their schedules.
func (l *lab) occurrences() int {
	l.t.Helper()
	n := one[int](l, `SELECT count(*) FROM worker_queue WHERE tag = 'eventbus'`)
	require.Equal(l.t, n, one[int](l, `SELECT count(*) FROM scheduled_tasks t JOIN worker_queue q ON q.id = t.item_id AND q.visible_at BETWEEN t.next_at AND t.next_at + t.jitter`))
	return n
}

func (l *lab) emitted() int { return one[int](l, `SELECT count(*) FROM event_log`) }

func TestSchedule_EverySecondOverThreeNodes_EachOccurrenceOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var s seen
	for range 3 {
		n := l.nodeOn(l.another(), quick("g"))
		require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
			s.note("%s %s %s", e.Producer, e.ScheduledTaskID, e.Payload)
			return nil
		}))
	}
	id := l.schedule(eventbus.Schedule{Cron: "* * * * * *", Payload: 7})
	l.eventually(func() bool {
		return len(s.list()) >= 3 &&
			one[int](l, `SELECT count(*) FROM event_log WHERE (metadata ->> 'scheduled_at')::timestamptz = date_trunc('second', emitted_at)`) >= 2
	}, "three seconds pass, and what comes of them comes within them")
	_, err := l.PauseSchedule(l.within(), "s")
	require.NoError(t, err)
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	require.Equal(t, l.emitted(), len(s.list()))
	require.Equal(t, "scheduler "+id+" 7", s.list()[0])
	require.Equal(t, l.emitted(), one[int](l, `SELECT count(DISTINCT tick) FROM (SELECT (metadata ->> 'scheduled_at')::timestamptz AS tick, emitted_at FROM event_log) AS e
		WHERE tick = date_trunc('second', tick) AND tick <= emitted_at`), "each second once, and not before it")
	require.True(t, one[bool](l, `SELECT max(tick) - min(tick) = (count(*) - 1) * interval '1 s' FROM (SELECT (metadata ->> 'scheduled_at')::timestamptz AS tick FROM event_log) AS e`),
		"and none is left out")
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
}

func TestSchedule_LateOccurrences_AreCaughtUpWithAsItSays(t *testing.T) {
	t.Parallel()
	for how, want := range map[eventbus.CatchUp]int{eventbus.CatchUpSkip: 0, eventbus.CatchUpOne: 1, eventbus.CatchUpAll: 5, "": 1} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.schedule(eventbus.Schedule{Cron: "@every 1h", CatchUp: how})
			l.exec(`UPDATE scheduled_tasks SET since = since - interval '1 day'`)
			late := one[time.Time](l, `SELECT since + interval '20 hours' FROM scheduled_tasks`) // 20, 21, 22, 23, and now
			l.exec(`UPDATE scheduled_tasks SET since = since - interval '2 minutes'`)
			require.Equal(t, want, l.occur(late.Add(-2*time.Minute)))
			require.Equal(t, want, l.emitted())
			require.Equal(t, 1, l.occurrences())
			s := l.scheduled()[0]
			require.InDelta(t, 58*60, time.Until(s.Next).Seconds(), 60, "the next one is to come")
			require.EqualValues(t, map[bool]int{true: 1}[want == 0], s.Skipped)
			// One that is not late comes whatever it says.
			require.Equal(t, 1, l.occur(time.Now().Add(-10*time.Second)))
		})
	}
}

func TestSchedule_MoreAreLateThanAreCarriedOutAtOnce_TheRestIsDueAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.schedule(eventbus.Schedule{Cron: "* * * * * *", CatchUp: eventbus.CatchUpAll})
	now := one[time.Time](l, `SELECT date_trunc('second', now())`)
	first := l.occur(now.Add(-200 * time.Second))
	require.LessOrEqual(t, first, 100)
	require.Equal(t, now.Add(time.Duration(first-200)*time.Second), l.scheduled()[0].Next.UTC().In(now.Location()))
	rest := l.claim("eventbus")
	began := time.Now()
	n := l.carryOut(rest)
	if time.Since(began) < 2*time.Second { // after which it is to end, however many it has carried out
		require.Greater(t, n, 30)
	}
	require.Equal(t, n+first, one[int](l, `SELECT count(DISTINCT metadata ->> 'scheduled_at') FROM event_log`))
}

// What comes more rarely than the schedule has it come falls behind, and is in time again as soon as it can be: if each occurrence had to be claimed by
// itself, all that is due would have become late whenever it is its turn.
func TestSchedule_IsClaimedMoreRarelyThanItOccurs_IsInTimeAgain(t *testing.T) {
	t.Parallel()
	for _, how := range []eventbus.CatchUp{eventbus.CatchUpSkip, eventbus.CatchUpOne, eventbus.CatchUpAll} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.schedule(eventbus.Schedule{Cron: "@every 1s", CatchUp: how})
			pass := func(d time.Duration) float64 {
				l.exec(`UPDATE worker_queue SET visible_at = now() WHERE tag = 'eventbus'`)
				return one[float64](l, `UPDATE scheduled_tasks SET since = since - $1::interval, next_at = next_at - $1::interval RETURNING extract(epoch FROM clock_timestamp() - next_at)::float8`, d)
			}
			claims := 0
			for behind := pass(90 * time.Second); behind > 30; behind = pass(3 * time.Second) {
				claims++
				require.Less(t, claims, 60, "it stays behind by %v s", behind)
				l.carryOut(l.claim("eventbus"))
			}
			require.NotZero(t, l.emitted())
		})
	}
}

func TestSchedule_SeveralAreDue_EachThatIsNotLateComesOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.schedule(eventbus.Schedule{Cron: "* * * * * *"})
	n, claims := l.occur(one[time.Time](l, `SELECT date_trunc('second', now()) - interval '90 s'`)), 1
	for ; one[bool](l, `SELECT next_at <= clock_timestamp() FROM scheduled_tasks`); claims++ {
		n += l.carryOut(l.claim("eventbus"))
	}
	require.Less(t, claims, 30, "several at a time")
	require.Equal(t, n, l.emitted())
	at := append(all[time.Time](l, `SELECT (metadata ->> 'scheduled_at')::timestamptz FROM event_log ORDER BY event_id`), l.scheduled()[0].Next)
	require.Greater(t, at[1].Sub(at[0]), 20*time.Second, "one for all that are late")
	for i := range at[2:] {
		require.Equal(t, time.Second, at[i+2].Sub(at[i+1]))
	}
	require.Equal(t, 1, l.occurrences())
}

// A transaction of many that take long would hold what it has locked for as long, and be late itself.
func TestSchedule_SeveralAreDueThatTakeLong_EndsItsTransactionAfterTwoSeconds(t *testing.T) {
	t.Parallel()
	for _, how := range []eventbus.CatchUp{eventbus.CatchUpOne, eventbus.CatchUpAll} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.schedule(eventbus.Schedule{Cron: "* * * * * *", CatchUp: how})
			l.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(2.1); RETURN NEW; END'`)
			l.exec(`CREATE TRIGGER slow BEFORE INSERT ON event_log FOR EACH ROW EXECUTE FUNCTION slow()`)
			l.undone(`DROP TRIGGER slow ON event_log; DROP FUNCTION slow`)
			require.Equal(t, 1, l.occur(one[time.Time](l, `SELECT date_trunc('second', now()) - interval '90 s'`)))
		})
	}
}

func TestSchedule_OverlapSkip_OneIsLeftOutWhileTheOneBeforeIsNotDone(t *testing.T) {
	t.Parallel()
	for what, s := range map[string]eventbus.Schedule{
		"event": {Type: "a"}, "event with a key": {Type: "a", Key: "k"}, "work item": {Work: "a", WorkTag: tagA}, "work item with a key": {Work: "a", WorkTag: tagA, Key: "k"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			s.Cron, s.Overlap = "@every 1h", eventbus.OverlapSkip
			l.schedule(s)
			require.Equal(t, 1, l.occur(time.Now()))
			require.Equal(t, 0, l.occur(time.Now()))
			require.EqualValues(t, 1, l.scheduled()[0].Skipped)
			item := l.claim(tagA)
			require.Equal(t, 0, l.occur(time.Now()), "it is at work")
			require.NoError(t, l.p.AckWorkItem(l.within(), item.LockToken, nil))
			require.Equal(t, 1, l.occur(time.Now()))
		})
	}
}

func TestSchedule_OverlapSkip_OfThoseThatAreCaughtUpWithOneComes(t *testing.T) {
	t.Parallel()
	for what, s := range map[string]eventbus.Schedule{"event": {Type: "a"}, "event for nobody": {Type: "nobody"}, "work item": {Work: "a"}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			s.Cron, s.Overlap, s.CatchUp = "@every 1h", eventbus.OverlapSkip, eventbus.CatchUpAll
			l.schedule(s)
			l.exec(`UPDATE scheduled_tasks SET since = since - interval '1 day 2 minutes'`)
			late := one[time.Time](l, `SELECT since + interval '20 hours' FROM scheduled_tasks`) // and four more until now
			if s.Type == "nobody" {
				require.Equal(t, 5, l.occur(late), "it is done when it is emitted")
				return
			}
			require.Equal(t, 1, l.occur(late))
			require.EqualValues(t, 4, l.scheduled()[0].Skipped)
		})
	}
}

func TestSchedule_CatchUpSkipWithJitter_WhatIsNotLateStillComes(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	require.Equal(t, 0, l.occur(l.lateWithJitter(eventbus.CatchUpSkip)))
	require.EqualValues(t, 1, l.scheduled()[0].Skipped)
	require.InDelta(t, -55*60, time.Until(l.scheduled()[0].Next).Seconds(), 60, "it may come up to an hour later than that")
}

func TestSchedule_CatchUpOneWithJitter_WhatIsNotLateStillComes(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	require.Equal(t, 1, l.occur(l.lateWithJitter(eventbus.CatchUpOne)))
	require.InDelta(t, -55*60, time.Until(l.scheduled()[0].Next).Seconds(), 60, "it may come up to an hour later than that")
	for range 6 {
		require.Equal(t, 1, l.occur(l.scheduled()[0].Next))
	}
	require.InDelta(t, 5*60, time.Until(l.scheduled()[0].Next).Seconds(), 60)
	require.Equal(t, 7, one[int](l, `SELECT count(DISTINCT metadata ->> 'scheduled_at') FROM event_log`), "one for all that are late, and each of the others")
	require.Equal(t, 7, l.emitted())
}

// lateWithJitter makes a schedule, each of whose occurrences may come up to an hour after its time, and returns one of hours ago; the latest was 5 minutes ago.
func (l *lab) lateWithJitter(catchUp eventbus.CatchUp) time.Time {
	l.t.Helper()
	l.schedule(eventbus.Schedule{Cron: "@every 10m", CatchUp: catchUp, Jitter: time.Hour})
	l.exec(`UPDATE scheduled_tasks SET since = since - interval '1 day 5 minutes'`)
	return one[time.Time](l, `SELECT since + interval '20 hours' FROM scheduled_tasks`)
}

// A day may have 23 hours in the time zone of the session, as it has in this one, in which the clocks have just been put forward.
func TestOccur_JitterOfADay_Is24Hours(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(one[string](l, `SELECT format('SET timezone = ''STD0DST,%s/%s,%s''', day, extract(hour FROM at), (day + 180) % 360)
		FROM (VALUES (now() AT TIME ZONE 'UTC' - interval '1 hour')) AS v (at), LATERAL (SELECT extract(doy FROM at)::int - 1) AS d (day)`))
	const halfPast23 = `SELECT clock_timestamp() - interval '23 hours 30 minutes'`
	require.True(t, one[bool](l, `SELECT (`+halfPast23+`) + interval '1 day' < now()`))
	for _, jitter := range []string{"24:00:00", "1 day", "1 mon -29 days"} {
		l.exec(`SELECT schedule_task(NULL, 's', '@every 1h', 'a', p_jitter => $1::text::interval, p_catch_up => 'skip')`, jitter)
		require.Equal(t, 1, l.occur(one[time.Time](l, halfPast23)), "with %s it is not late yet", jitter)
		l.exec(`SELECT delete_schedule(NULL, 's')`)
	}
}

// claimed are the occurrences that are in the queue, claimed, as occur_many takes them, by schedule.
func (l *lab) claimed() (items []int64, tokens, schedules []string) {
	l.t.Helper()
	l.exec(`UPDATE worker_queue SET visible_at = now() WHERE name = 'eventbus|schedule'`)
	l.exec(`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 h', 1000, NULL, false, ARRAY['eventbus'])`)
	const of = ` FROM scheduled_tasks t JOIN worker_queue q ON q.id = t.item_id ORDER BY t.name`
	return all[int64](l, `SELECT q.id`+of), all[string](l, `SELECT q.lock_token::text`+of), all[string](l, `SELECT t.task_id::text`+of)
}

func TestOccurMany_CarriesOutWhatIsLikeOthers_AndLeavesTheRestAsItIs(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "#")
	for _, s := range []eventbus.Schedule{
		{Name: "a", Cron: "0 * * * *", Payload: 1}, {Name: "b", Cron: "0 * * * *", Key: "k", TimeZone: "Asia/Kolkata"}, {Name: "c", Cron: "@every 1h", Type: "other"},
		{Name: "changed", Cron: "0 3 * * *"}, {Name: "late", Cron: "@every 1h"}, {Name: "locked", Cron: "@daily"}, {Name: "lost", Cron: "@daily"},
		{Name: "overlap", Cron: "@daily", Overlap: eventbus.OverlapSkip}, {Name: "work", Cron: "@daily", Work: "w", Type: "-"},
	} {
		if s.Type = cmp.Or(s.Type, "a"); s.Type == "-" {
			s.Type = ""
		}
		_, err := l.Schedule(l.within(), s)
		require.NoError(t, err)
	}
	l.exec(`UPDATE scheduled_tasks SET next_at = date_trunc('second', now()), since = since - interval '1 h'`)
	l.exec(`UPDATE scheduled_tasks SET next_at = now() - interval '2 min' WHERE name = 'late'`)
	items, tokens, schedules := l.claimed()
	require.Len(t, items, 9)
	l.exec(`SELECT schedule_task(NULL, 'changed', '0 4 * * *', 'a')`)
	l.exec(`UPDATE worker_queue SET visible_at = now() WHERE id = (SELECT item_id FROM scheduled_tasks WHERE name = 'lost')`)
	tx := l.begin()
	_, err := tx.Exec(l.within(), `SELECT FROM `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.scheduled_tasks WHERE name = 'locked' FOR UPDATE`)
	require.NoError(t, err)
	due := one[time.Time](l, `SELECT next_at FROM scheduled_tasks WHERE name = 'a'`)
	rest := `SELECT json_agg(t ORDER BY t.name)::text FROM scheduled_tasks t WHERE length(name) > 1`
	before := one[string](l, rest)
	queued := one[int](l, `SELECT count(*) FROM worker_queue`)

	require.Equal(t, []bool{true, true, true, false, false, false, false, false, false}, one[[]bool](l, `SELECT occur_many($1, $2, $3)`, items, tokens, schedules))
	require.Equal(t, before, one[string](l, rest))
	require.Equal(t, []string{"a 1 - a", "a null k b", "other null - c"}, all[string](l, `SELECT concat_ws(' ', e.event_type, e.payload, coalesce(e.key, '-'), t.name)
		FROM event_log e JOIN scheduled_tasks t ON t.task_id = e.scheduled_task_id AND t.last_id = e.event_id AND t.last_at = $1 AND e.metadata = jsonb_build_object('scheduled_at', $1::timestamptz)
		WHERE e.producer_node_id = 'scheduler' ORDER BY t.name`, due))
	require.Equal(t, queued+3, one[int](l, `SELECT count(*) FROM worker_queue`), "three deliveries")
	require.Equal(t, 3, one[int](l, `SELECT count(*) FROM scheduled_tasks t JOIN worker_queue q ON q.id = t.item_id AND q.visible_at = t.next_at AND q.input ->> 'task_id' = t.task_id::text
		WHERE length(t.name) = 1 AND t.next_at = next_occurrence(t.cron_expression, t.timezone, $1, t.since) AND q.name = 'eventbus|schedule' AND q.lock_token IS NULL`, due))
	require.Equal(t, make([]bool, 9), one[[]bool](l, `SELECT occur_many($1, $2, $3)`, items, tokens, schedules), "each comes once")
	require.Equal(t, 3, l.emitted())
}

// A claim whose lease has ended may wait still, behind statements that get no answer, when the next one of the same item comes to it.
func TestOccurMany_AnItemTwice_OccursOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "#")
	for _, name := range []string{"a", "b"} {
		_, err := l.Schedule(l.within(), eventbus.Schedule{Name: name, Cron: "0 * * * *", Type: "a"})
		require.NoError(t, err)
	}
	l.exec(`UPDATE scheduled_tasks SET next_at = date_trunc('second', now()), since = since - interval '1 h'`)
	_, before, _ := l.claimed()
	items, tokens, schedules := l.claimed()
	twice := func(first, second []string) []string { return append(slices.Clone(first), second...) }
	require.Equal(t, []bool{true, true, true, true},
		one[[]bool](l, `SELECT occur_many($1, $2, $3)`, append(slices.Clone(items), items...), twice(before, tokens), twice(schedules, schedules)))
	require.Equal(t, 2, l.emitted())
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM worker_queue q WHERE q.name = 'eventbus|schedule'`))
}

// What is due, and what comes next, is what it was: whoever starts a new release after the nodes were away for a while may change how late it may come.
func TestSchedule_JitterChangesWhileAnOccurrenceIsDue_ItComesOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	yearly := eventbus.Schedule{Name: "yearly", Cron: "0 0 1 1 *", Type: "a"}
	change := func(jitter time.Duration) {
		t.Helper()
		yearly.Jitter = jitter
		_, err := l.Schedule(l.within(), yearly)
		require.NoError(t, err)
	}
	change(0)
	next := func() time.Time { return one[time.Time](l, `SELECT next_at FROM scheduled_tasks`) }
	newYear := next()
	l.exec(`UPDATE scheduled_tasks SET next_at = next_at + interval '1 year'`) // the clock went back
	change(time.Minute)
	require.Equal(t, newYear.AddDate(1, 0, 0), next(), "this one was made")
	l.exec(`UPDATE scheduled_tasks SET next_at = next_at - interval '2 years'`) // the nodes were away
	change(time.Millisecond)
	require.Equal(t, newYear.AddDate(-1, 0, 0), next())
	l.node(nil)
	l.eventually(func() bool { return l.emitted() == 1 && next().Equal(newYear) }, "the last one comes, and this one is next")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue WHERE name = 'eventbus|schedule'`))
}

// Many that are due at once are carried out by few transactions, each exactly once, and what is special among them by itself.
func TestSchedule_ManyAreDueAtOnce_ShareTransactions(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	const many = 300
	l.subscribe("g", "a")
	l.exec(`SELECT schedule_task(NULL, 's' || n, '@every 1h', 'a', p_overlap => CASE n % 50 WHEN 0 THEN 'skip' ELSE 'allow' END) FROM generate_series(1, $1::integer) AS n`, many)
	l.exec(`UPDATE scheduled_tasks SET next_at = now(), since = now() - interval '1 h'`)
	l.exec(`UPDATE worker_queue SET visible_at = now()`)
	l.node(&eventbus.NodeConfig{Concurrency: 50})
	l.eventually(func() bool { return l.emitted() == many }, "all have come")
	require.Equal(t, many, one[int](l, `SELECT count(DISTINCT scheduled_task_id) FROM event_log`))
	require.Less(t, one[int](l, `SELECT count(DISTINCT xact) FROM event_log`), many/3)
	require.Equal(t, many, l.occurrences())
}

func TestSchedule_ChangedWhileAnOccurrenceIsDue_ThatIsOver(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]struct {
		do   func(l *lab) error
		left int // occurrences
	}{
		"changed": {func(l *lab) error { l.schedule(eventbus.Schedule{Cron: "@every 2h"}); return nil }, 1},
		"paused":  {func(l *lab) error { _, err := l.PauseSchedule(l.within(), "s"); return err }, 0},
		"deleted": {func(l *lab) error { _, err := l.DeleteSchedule(l.within(), "s"); return err }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.schedule(eventbus.Schedule{Cron: "@every 1h"})
			l.exec(`UPDATE worker_queue SET visible_at = now()`)
			item := l.claim("eventbus")
			require.NoError(t, change.do(l))
			id, token, err := item.LockToken.WorkItem()
			require.NoError(t, err)
			_, err = l.conn.Exec(l.within(), `SELECT occur($1, $2, ($3::json ->> 'task_id')::uuid)`, id, token, string(item.Input))
			require.ErrorContains(t, err, "PW001", "its item is gone")
			require.Zero(t, l.emitted())
			require.Equal(t, change.left, l.occurrences())
		})
	}
}

func TestSchedule_SaidAgain_ChangesNothingUnlessItDiffers(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	id := l.schedule(eventbus.Schedule{Cron: "@every 1h", Payload: 1})
	first := l.scheduled()[0]
	item := one[int64](l, `SELECT item_id FROM scheduled_tasks`)
	require.Equal(t, id, l.schedule(eventbus.Schedule{Cron: "@every 1h", Payload: 1}))
	require.Equal(t, first, l.scheduled()[0])
	require.Equal(t, id, l.schedule(eventbus.Schedule{Cron: "@every 1h", Payload: 2}))
	require.Equal(t, item, one[int64](l, `SELECT item_id FROM scheduled_tasks`), "the same occurrence, with what is to come of it now")
	require.Equal(t, 1, l.occur(time.Now()))
	require.Equal(t, "2", one[string](l, `SELECT payload::text FROM event_log`))
	l.schedule(eventbus.Schedule{Cron: "@every 1h", Payload: 2, Jitter: time.Hour})
	require.Equal(t, 1, l.occurrences())
}

// A program that makes its schedules whenever it begins does not end a pause that an operator has made.
func TestSchedule_SaidAgainWhilePaused_StaysPausedUntilItIsResumed(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.schedule(eventbus.Schedule{Cron: "@every 1h"})
	_, err := l.PauseSchedule(l.within(), "s")
	require.NoError(t, err)
	for _, cron := range []string{"@every 1h", "@every 2h"} {
		l.schedule(eventbus.Schedule{Cron: cron})
		require.True(t, l.scheduled()[0].Paused)
		require.Equal(t, cron, l.scheduled()[0].Cron)
		require.Zero(t, l.occurrences())
	}
	for active, occurrences := range map[bool]int{true: 1, false: 0} {
		l.exec(`SELECT schedule_task(NULL, 's', '@every 2h', 'a', p_active => $1)`, active)
		require.Equal(t, occurrences, l.occurrences())
	}
	l.schedule(eventbus.Schedule{Cron: "@every 2h", Paused: true})
	_, err = l.ResumeSchedule(l.within(), "s")
	require.NoError(t, err)
	require.Equal(t, 1, l.occurrences())
	l.schedule(eventbus.Schedule{Cron: "@every 2h", Paused: true})
	require.Zero(t, l.occurrences())
}

func TestSchedule_PauseResumeRunAndDelete(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	id := l.schedule(eventbus.Schedule{Cron: "0 3 * * *", TimeZone: "Europe/Berlin", Paused: true, Key: "k", Payload: "x", Jitter: time.Minute, CatchUp: eventbus.CatchUpAll})
	require.Zero(t, l.occurrences())
	s := l.scheduled()[0]
	require.Equal(t, id, s.ID)
	require.Equal(t, eventbus.Schedule{Name: "s", Cron: "0 3 * * *", TimeZone: "Europe/Berlin", Type: "a", Payload: s.Payload, Key: "k", Jitter: time.Minute, CatchUp: eventbus.CatchUpAll,
		Overlap: eventbus.OverlapAllow, Paused: true}, s.Schedule)
	require.True(t, s.Next.IsZero())
	alone, err := l.GetSchedule(l.within(), "s")
	require.NoError(t, err)
	require.Equal(t, s, alone)
	ran, err := l.RunSchedule(l.within(), "s")
	require.NoError(t, err)
	require.Zero(t, ran, "it is paused")
	for _, want := range []bool{true, false} {
		was, err := l.ResumeSchedule(l.within(), "s")
		require.NoError(t, err)
		require.Equal(t, want, was)
		require.Equal(t, 1, l.occurrences())
	}
	next, err := l.NextOccurrence(l.within(), "0 3 * * *", "Europe/Berlin", time.Now())
	require.NoError(t, err)
	require.True(t, next.Equal(l.scheduled()[0].Next))
	ran, err = l.RunSchedule(l.within(), "s")
	require.NoError(t, err)
	require.Equal(t, ran, l.scheduled()[0].LastID)
	require.Equal(t, 1, l.occurrences(), "beside its occurrences")
	require.Equal(t, 1, l.emitted())
	require.NotZero(t, one[int64](l, `SELECT run_scheduled_task($1)`, id))
	tx := l.begin()
	_, err = l.WithTx(tx).DeleteSchedule(l.within(), "s")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(l.within()))
	require.Equal(t, 1, l.occurrences())
	was, err := l.DeleteSchedule(l.within(), "s")
	require.NoError(t, err)
	require.True(t, was)
	require.Zero(t, l.occurrences())
	was, err = l.DeleteSchedule(l.within(), "s")
	require.NoError(t, err)
	require.False(t, was)
	for _, verb := range []func(context.Context, string) error{
		func(ctx context.Context, name string) error { _, err := l.PauseSchedule(ctx, name); return err },
		func(ctx context.Context, name string) error { _, err := l.ResumeSchedule(ctx, name); return err },
		func(ctx context.Context, name string) error { _, err := l.RunSchedule(ctx, name); return err },
		func(ctx context.Context, name string) error { _, err := l.GetSchedule(ctx, name); return err },
	} {
		require.ErrorIs(t, verb(l.within(), "s"), pgwake.ErrNotFound)
	}
}

// As the design does it that the bus goes back to.
func TestSchedule_ActiveIsSetInTheTable_DoesNotOccurUntilItIsResumed(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.schedule(eventbus.Schedule{Cron: "@every 1h"})
	l.exec(`UPDATE scheduled_tasks SET active = false`)
	require.Zero(t, l.occur(time.Now()))
	require.Zero(t, l.emitted())
	require.Zero(t, l.occurrences())
	_, err := l.ResumeSchedule(l.within(), "s")
	require.NoError(t, err)
	require.Equal(t, 1, l.occurrences())
}

func TestSchedule_SaidAgainWhileAnotherDeletesIt_ItIsMadeAnew(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	id := l.schedule(eventbus.Schedule{Cron: "@every 1h"})
	tx := l.begin()
	_, err := tx.Exec(l.within(), `SELECT FROM `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.scheduled_tasks FOR UPDATE`)
	require.NoError(t, err)
	failures := make(chan error, 2)
	waits := func(function string) {
		l.eventually(func() bool {
			return one[bool](l, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, current_schema() || '".' || $1) > 0)`, function)
		}, "it waits for the lock")
	}
	go func() { _, err := l.DeleteSchedule(l.within(), "s"); failures <- err }()
	waits("delete_schedule")
	var again string
	go func() {
		var err error
		again, err = l.Schedule(l.within(), eventbus.Schedule{Name: "s", Cron: "@every 1h", Type: "a"})
		failures <- err
	}()
	waits("schedule_task")
	require.NoError(t, tx.Rollback(l.within()))
	require.NoError(t, <-failures)
	require.NoError(t, <-failures)
	require.NotEqual(t, id, again)
	require.Equal(t, again, l.scheduled()[0].ID)
	require.Equal(t, 1, l.occurrences())
}

// A schedule, and a group that is behind, would come to nothing without anybody being told.
func TestNode_HasDiedOfAScheduleAndAReplay_NoneIsGivenUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	id := l.emit("a")
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.schedule(eventbus.Schedule{Cron: "@every 1h", Type: "b"})
	l.exec(`UPDATE worker_queue SET visible_at = now()`)
	for range 2 { // by one that dies
		l.claim("eventbus")
	}
	l.exec(`UPDATE worker_queue SET visible_at = now()`)
	config := quick("g")
	config.MaxAttempts = 1
	n := l.node(config)
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	l.eventually(func() bool { return len(s.list()) == 1 && l.emitted() == 2 }, "they are tried again")
	require.Equal(t, []string{fmt.Sprint(id)}, s.list())
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
}

func TestSchedule_WorkItems_AreEnqueuedForWhoeverTakesThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.node(quick("g")) // carries it out
	l.schedule(eventbus.Schedule{Cron: "* * * * * *", Work: "clean up", WorkTag: "mine", Payload: map[string]int{"days": 30}})
	item := l.claim("mine")
	require.Equal(t, []string{"clean up", `{"days": 30}`}, []string{item.Name, string(item.Input)})
	require.Zero(t, l.emitted())
}

func TestSchedule_BadOnes_AreRefusedAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	good := eventbus.Schedule{Name: "s", Cron: "@daily", Type: "a"}
	for name, spoil := range map[string]func(*eventbus.Schedule){
		"no name": func(s *eventbus.Schedule) { s.Name = "" }, "long name": func(s *eventbus.Schedule) { s.Name = strings.Repeat("x", 256) },
		"NUL": func(s *eventbus.Schedule) { s.Name = "a\x00" }, "cron": func(s *eventbus.Schedule) { s.Cron = "61 * * * *" },
		"never": func(s *eventbus.Schedule) { s.Cron = "0 0 31 2 *" }, "zone": func(s *eventbus.Schedule) { s.TimeZone = "Europe/Nowhere" },
		"four fields": func(s *eventbus.Schedule) { s.Cron = "30 4 1 *" }, "four fields and a vertical tab": func(s *eventbus.Schedule) { s.Cron = "30 4 1 *\v" },
		"a form feed and four fields": func(s *eventbus.Schedule) { s.Cron = "\f4 1 * *" },
		"no type":                     func(s *eventbus.Schedule) { s.Type = "" }, "type": func(s *eventbus.Schedule) { s.Type = "a..b" },
		"both": func(s *eventbus.Schedule) { s.Work = "w" }, "tag": func(s *eventbus.Schedule) { s.WorkTag = "t" },
		"payload": func(s *eventbus.Schedule) { s.Payload = math.NaN() }, "large payload": func(s *eventbus.Schedule) { s.Payload = strings.Repeat("x", 1<<20) },
		"key": func(s *eventbus.Schedule) { s.Key = strings.Repeat("k", 256) }, "jitter": func(s *eventbus.Schedule) { s.Jitter = -1 },
		"long jitter": func(s *eventbus.Schedule) { s.Jitter = 25 * time.Hour }, "catch up": func(s *eventbus.Schedule) { s.CatchUp = "some" },
		"overlap": func(s *eventbus.Schedule) { s.Overlap = "some" },
	} {
		s := good
		spoil(&s)
		_, err := l.Schedule(l.within(), s)
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
	}
	_, err := l.In("A").Schedule(l.within(), good)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	for _, cron := range []string{"x", "0 0 * * \v", "\v0 0 * * *", " \f @daily", "@daily\u2028"} {
		_, err = l.NextOccurrence(l.within(), cron, "", time.Now())
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%q", cron)
	}
	require.Empty(t, l.scheduled())
	require.Empty(t, l.queued())
	_, err = l.Schedules(l.within(), "", 0)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	for i := range 3 {
		good.Name = fmt.Sprint(i)
		l.schedule(good)
	}
	page, err := l.Schedules(l.within(), "0", 1)
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, "1", page[0].Name)
}

// An event and a work item may have the same id.
func TestSchedule_OverlapSkipAndItEmitsNoMoreButEnqueues_WhatCameBeforeIsOver(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	s := eventbus.Schedule{Cron: "@every 1h", Type: "a", Overlap: eventbus.OverlapSkip}
	l.schedule(s)
	require.Equal(t, 1, l.occur(time.Now()))
	s.Type, s.Work, s.WorkTag = "", "a", tagA
	l.schedule(s)
	// Whatever has that id by now is not of this schedule.
	l.exec(`INSERT INTO worker_queue (id, name, input, namespace) SELECT e.event_id, 'other', '1', 'default' FROM event_log e
	         WHERE NOT EXISTS (SELECT FROM worker_queue q WHERE q.id = e.event_id)`)
	require.Equal(t, 1, l.occur(time.Now()))
	require.Equal(t, 0, l.occur(time.Now()), "it is under way")
}

// The functions that occurrences come from go by the role's style of dates, and what they are read as must not.
func TestSchedule_RoleHasItsOwnStyleOfDates_OccursAndIsListed(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	bus, _ := l.onPool(func(config *pgxpool.Config) {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
		role := strings.ToLower("german_of_" + l.p.Schema())
		l.exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN SUPERUSER PASSWORD 'secret'`, role))
		l.exec(fmt.Sprintf(`ALTER ROLE %[1]s SET datestyle = 'German'`, role))
		t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `REASSIGN OWNED BY `+role+` TO CURRENT_USER; DROP ROLE `+role) })
		config.ConnConfig.User, config.ConnConfig.Password = role, "secret"
		pgwake.TunePool(config)
	})
	n := l.nodeOn(bus, nil)
	occurred := make(chan eventbus.Event, 100)
	require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		occurred <- *e
		return nil
	}))
	_, err := bus.Schedule(l.within(), eventbus.Schedule{Name: "s", Cron: "* * * * * *", TimeZone: "Europe/Berlin", Type: "a"})
	require.NoError(t, err)
	select {
	case e := <-occurred:
		require.Less(t, time.Since(e.EmittedAt).Abs(), time.Minute)
	case <-time.After(patience):
		t.Fatal("it does not occur")
	}
	list, err := bus.Schedules(l.within(), "", 10)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Less(t, time.Since(list[0].Last).Abs(), time.Minute)
	require.Less(t, time.Until(list[0].Next).Abs(), time.Minute)
}
