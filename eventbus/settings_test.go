package eventbus_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: do functions do the same whatever a session, or the database, has set?

// A backslash in a literal is nothing but one. Functions are parsed in the session that calls them.
func TestSQLFunctions_SessionReadsBackslashesAsEscapes_AreWhatTheyAre(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`SET standard_conforming_strings = off`)
	l.exec(`SELECT subscribe(NULL, 'g', '{order.*,"a+b.#",#.c.d}')`)
	require.Equal(t, []string{`#.c.d ^(\.[^.]+)*\.c\.d$`, `a+b.# ^\.a\+b(\.[^.]+)*$`, `order.* ^\.order\.[^.]+$`},
		all[string](l, `SELECT pattern || ' ' || regex FROM event_subscriptions ORDER BY pattern COLLATE "C"`))
	_, err := l.conn.Exec(l.within(), `SELECT subscribe(NULL, 'g', '{a-b*}')`)
	require.ErrorContains(t, err, "PW003")
	for zone, want := range map[string]int{"UTC": 7, "Etc/GMT+1": 8} {
		require.Equal(t, time.Date(2026, 1, 1, want, 0, 0, 0, time.UTC),
			one[time.Time](l, `SELECT next_occurrence('0  7 * * *', $1, '2026-01-01 00:00:00+00')`, zone).UTC(), zone)
	}
	l.exec(`SELECT schedule_task(NULL, 's', '@every 1h', 'order.created')`)
	_, err = l.conn.Exec(l.within(), `SELECT schedule_task(NULL, 's', '@every 1h', 'order|created')`)
	require.ErrorContains(t, err, "PW003")
}

// To who goes by the rules of Turkish, FRI is frı in lower case.
func TestNextOccurrence_CollationHasOtherLowerCase_NamesAreWhatTheyAre(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	if !one[bool](l, `SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'tr-x-icu')`) {
		t.Skip("the server knows no Turkish")
	}
	require.Equal(t, "frı", one[string](l, `SELECT lower('FRI' COLLATE "tr-x-icu")`))
	for cron, want := range map[string]time.Time{
		"0 7 * * FRI": time.Date(2026, 1, 2, 7, 0, 0, 0, time.UTC), "@MIDNIGHT": time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC),
	} {
		require.Equal(t, want, one[time.Time](l, `SELECT next_occurrence($1 COLLATE "tr-x-icu", 'UTC', '2026-01-01 00:00:00+00')`, cron).UTC(), cron)
	}
	require.Equal(t, []int32{5}, one[[]int32](l, `SELECT cron_field('', 'day', 'FRI' COLLATE "tr-x-icu", 0, 7, 'sun mon tue wed thu fri sat ')`))
}

// Bounds of partitions are literals. A session may write times so that another zone is read: IST is India's to one that is there, and Israel's where it
// is read.
func TestPartitions_SessionWritesTimesItsOwnWay_BeginWithTheMonthsOfUTC(t *testing.T) {
	t.Parallel()
	for style, zone := range map[string]string{"German": "Asia/Kolkata", "SQL, DMY": "Asia/Kolkata", "Postgres, MDY": "America/New_York"} {
		l := newLab(t, nil)
		l.monthsUndone()
		l.exec(`SELECT set_config('datestyle', $1, false), set_config('timezone', $2, false)`, style, zone)
		bounds := func(want ...string) {
			l.t.Helper()
			l.exec(`SET datestyle = 'ISO'`)
			l.exec(`SET timezone = 'UTC'`)
			require.Equal(t, want, all[string](l, `SELECT c.relname || ' ' || pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
				WHERE i.inhparent = 'event_log'::regclass AND c.relname <> 'event_log_default' ORDER BY 1`), style)
			l.exec(`SELECT set_config('datestyle', $1, false), set_config('timezone', $2, false)`, style, zone)
		}
		// An hour before midnight of UTC it is May already in India.
		l.exec(`DO $$ BEGIN EXECUTE (SELECT string_agg(format('DROP TABLE %I', p.name), ';') FROM event_partitions() p); END $$`)
		require.Equal(t, 2, one[int](l, `SELECT make_event_partitions(1, make_timestamptz(2026, 4, 30, 23, 0, 0, 'UTC'))`))
		bounds(`event_log_p2026_04 FOR VALUES FROM ('2026-04-01 00:00:00+00') TO ('2026-05-01 00:00:00+00')`,
			`event_log_p2026_05 FOR VALUES FROM ('2026-05-01 00:00:00+00') TO ('2026-06-01 00:00:00+00')`)

		// The default partition becomes that of the months from its first event on.
		l.exec(`DO $$ BEGIN EXECUTE (SELECT string_agg(format('DROP TABLE %I', p.name), ';') FROM event_partitions() p); END $$`)
		id := l.emit("a")
		l.exec(`UPDATE event_log SET emitted_at = date_trunc('month', now(), 'UTC')`)
		for range 3 {
			require.True(t, one[bool](l, `SELECT set_default_aside(now())`), style)
		}
		first, last := l.month(0), l.month(3)
		bounds("event_log_p" + first + "_to_" + l.month(2) + " FOR VALUES FROM ('" + first[:4] + "-" + first[5:] + "-01 00:00:00+00') TO ('" + last[:4] + "-" + last[5:] + "-01 00:00:00+00')")
		require.Equal(t, id, one[int64](l, `SELECT event_id FROM ONLY event_log_p`+first+`_to_`+l.month(2)))
	}
}
