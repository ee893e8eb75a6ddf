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
