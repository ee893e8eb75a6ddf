package eventbus_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: for which instants are cron expressions? What is expected is enumerated minute by minute, with the time zones
// of Go.

// field is what one of an expression's is for.
type field func(int) bool

func always(int) bool { return true }

func in(values ...int) field { return func(n int) bool { return slices.Contains(values, n) } }

func each(step int) field { return func(n int) bool { return n%step == 0 } }

// schedule is an expression, and the same for the enumeration.
type schedule struct {
	cron                  string
	minute, hour          field
	day, month, weekday   field
	eitherDay, byRealTime bool
}

func (s *schedule) onDay(local time.Time) bool {
	day, weekday := s.day(local.Day()), s.weekday(int(local.Weekday()))
	return s.month(int(local.Month())) && (day && weekday || s.eitherDay && (day || weekday))
}

// occurrences are those between two instants, by going through all minutes.
func (s *schedule) occurrences(zone *time.Location, from, to time.Time) (all []time.Time) {
	var offset int64
	var changed time.Time              // from when on there is another offset; zero: never
	wall := func(at time.Time) int64 { // what the clock shows, as a time of UTC, in minutes
		if at.Equal(from) || !changed.IsZero() && !at.Before(changed) {
			local := at.In(zone)
			_, seconds := local.Zone()
			offset = int64(seconds)
			_, changed = local.ZoneBounds()
		}
		return (at.Unix() + offset) / 60
	}
	matches := func(w int64) bool {
		return s.minute(int(w%60)) && s.hour(int(w/60%24)) && s.onDay(time.Unix(w*60, 0).UTC())
	}
	shown := wall(from) // the latest so far
	for at := from.Add(time.Minute); at.Before(to); at = at.Add(time.Minute) {
		now := wall(at)
		is := s.byRealTime && matches(now)
		if !s.byRealTime { // all that it shows for the first time, or has left out
			for shown < now {
				shown++
				is = is || matches(shown)
			}
		}
		if is {
			all = append(all, at)
		}
	}
	return all
}

// changes are the minutes at which a clock was put forward or back.
func changes(zone *time.Location, from, to time.Time) (all []time.Time) {
	offset := func(at time.Time) int { _, o := at.In(zone).Zone(); return o }
	for day := from; day.Before(to); day = day.AddDate(0, 0, 1) {
		if offset(day) == offset(day.AddDate(0, 0, 1)) {
			continue
		}
		at := day
		for offset(at) == offset(day) {
			at = at.Add(time.Minute)
		}
		all = append(all, at)
	}
	return all
}

var schedules = []schedule{
	{"*/20 * * * *", each(20), always, always, always, always, false, true},
	{"15,45 */2 * * *", in(15, 45), each(2), always, always, always, false, true},
	{"30 0-3 * * *", in(30), in(0, 1, 2, 3), always, always, always, false, false},
	{"0 2 * * *", in(0), in(2), always, always, always, false, false},
	{"@daily", in(0), in(0), always, always, always, false, false},
	{"5 1,23 1,15,31 * *", in(5), in(1, 23), in(1, 15, 31), always, always, false, false},
	{"0 12 29 FEB *", in(0), in(12), in(29), in(2), always, false, false},
	{"10 3 * mar-apr,10-NOV sun", in(10), in(3), always, in(3, 4, 10, 11), in(0), false, false},
	{"0 4 13 * fri", in(0), in(4), in(13), always, in(5), true, false},
}

func TestNextOccurrence_ClocksAreChangedInTwentyZonesForTenYears_EachIsWhatIsShown(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	turns := testsize.Of(20, 12)
	if os.Getenv("PGWAKE_STRESS") != "" {
		turns = 4
	}
	begin, end := time.Date(2009, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2019, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, name := range strings.Fields(`Europe/Berlin Europe/London Europe/Lisbon Europe/Dublin Europe/Moscow America/New_York America/Los_Angeles America/St_Johns
		America/Sao_Paulo America/Havana America/Santiago America/Caracas Asia/Tehran Asia/Beirut Asia/Gaza Australia/Sydney Australia/Lord_Howe Pacific/Auckland
		Pacific/Chatham Antarctica/Troll Pacific/Apia Africa/Casablanca`) {
		zone, err := time.LoadLocation(name)
		require.NoError(t, err)
		for j, change := range changes(zone, begin, end) {
			for k, s := range schedules {
				if (i+j+k)%turns > 0 {
					continue
				}
				s.check(l, zone, change.Add(-25*time.Hour), change.Add(26*time.Hour))
			}
		}
	}
}

// In a session's own time zone a day has 23 hours, or 25, when its clocks are changed.
func TestNextOccurrence_SessionsTimeZone_DoesNotMatter(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`SET timezone = 'Europe/Berlin'`)
	for after, want := range map[string]string{
		"2026-03-28 12:00:00+00": "2026-03-29 00:00:00+00", "2026-03-29 00:00:00+00": "2026-03-30 00:00:00+00",
		"2026-10-25 00:00:00+00": "2026-10-26 00:00:00+00", "2026-10-25 23:00:00+00": "2026-10-26 00:00:00+00",
	} {
		require.True(t, one[bool](l, `SELECT next_occurrence('0 */24 * * *', 'UTC', $1::text::timestamptz) = $2::text::timestamptz`, after, want), "after %s", after)
	}
	require.True(t, one[bool](l, `SELECT next_occurrence('0 */24 1 */2 *', 'UTC', '2026-03-01 00:00:00+00') = '2026-05-01 00:00:00+00'`))
}

func TestNextOccurrence_Years_MonthsAndLeapDaysAndWeekdays(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	zone, err := time.LoadLocation("America/New_York")
	require.NoError(t, err)
	begin, end := time.Date(2023, 12, 1, 0, 0, 0, 0, zone), time.Date(2025, 4, 1, 0, 0, 0, 0, zone) // a February of each length, and two turns of the year
	if testsize.Full() {
		begin, end = begin.AddDate(-1, 0, 0), end.AddDate(2, 0, 0)
	}
	for _, s := range schedules {
		if !s.byRealTime && s.cron != "30 0-3 * * *" {
			s.check(l, zone, begin, end)
		}
	}
}

// check asks from one instant for the next, and so on.
func (s *schedule) check(l *lab, zone *time.Location, from, to time.Time) {
	l.t.Helper()
	want := s.occurrences(zone, from, to)
	got := all[time.Time](l, `
		WITH RECURSIVE o (at) AS (
			SELECT next_occurrence($1, $2, $3::timestamptz)
			UNION ALL
			SELECT next_occurrence($1, $2, o.at) FROM o WHERE o.at < $4)
		SELECT at FROM o WHERE at < $4`, s.cron, zone.String(), from, to)
	for k := range max(len(want), len(got)) {
		if k >= len(want) || k >= len(got) || !want[k].Equal(got[k]) {
			require.Fail(l.t, "they differ", "%s in %v, %d: wanted %v, got %v", s.cron, zone, k, tail(want, k, zone), tail(got, k, zone))
		}
	}
}

func tail(times []time.Time, from int, zone *time.Location) (texts []string) {
	for _, at := range times[min(max(from-1, 0), len(times)):min(from+3, len(times))] {
		texts = append(texts, at.In(zone).Format(time.RFC3339))
	}
	return texts
}

func TestNextOccurrence_OfOneInstant_IsAfterIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	at := time.Date(2026, 11, 25, 10, 30, 15, 5e8, time.UTC)
	for cron, want := range map[string]string{
		"* * * * * *":           "2026-11-25T10:30:16Z",
		"*/20 * * * * *":        "2026-11-25T10:30:20Z",
		"0 30 10 * * *":         "2026-11-26T10:30:00Z",
		"15 30 10 * * *":        "2026-11-26T10:30:15Z",
		"30 10 * * *":           "2026-11-26T10:30:00Z",
		"59 23 31 12 ?":         "2026-12-31T23:59:00Z",
		" 0  0 * * 7 ":          "2026-11-29T00:00:00Z",
		"\n0\t0 * * 7\r\n":      "2026-11-29T00:00:00Z",
		"0 0 29 2 *":            "2028-02-29T00:00:00Z",
		"0 0 31 2 *":            "",
		"@hourly":               "2026-11-25T11:00:00Z",
		"@midnight":             "2026-11-26T00:00:00Z",
		"@weekly":               "2026-11-29T00:00:00Z",
		"@monthly":              "2026-12-01T00:00:00Z",
		"@Yearly":               "2027-01-01T00:00:00Z",
		"@annually":             "2027-01-01T00:00:00Z",
		"@every 1h30m":          "2026-11-25T11:00:15.5Z", // since an hour ago
		"@every 7s":             "2026-11-25T10:30:20.5Z",
		"@every 48h":            "2026-11-27T09:30:15.5Z",
		"0 0 * * mon-wed/2":     "2026-11-30T00:00:00Z",
		"10/25 * * * *":         "2026-11-25T10:35:00Z",
		"0 0 1,2,3-5 jan-mar *": "2027-01-01T00:00:00Z",
	} {
		got := one[*time.Time](l, `SELECT next_occurrence($1, NULL, $2::timestamptz, $2::timestamptz - interval '1 hour')`, cron, at)
		if want == "" {
			require.Nil(t, got, cron)
			continue
		}
		require.NotNil(t, got, cron)
		require.Equal(t, want, got.UTC().Format(time.RFC3339Nano), cron)
	}
	// The longest pause: 1896 to 1904 was one, and the next is this.
	require.Equal(t, 2104, one[time.Time](l, `SELECT next_occurrence('0 0 29 2 *', 'Europe/Berlin', '2096-03-01 UTC')`).Year())
}

func TestNextOccurrence_BadExpressionsAndZones_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, c := range []string{"", " ", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *", "* * * * 8", "-1 * * * *",
		"5-1 * * * *", "*/0 * * * *", "1, * * * *", ",1 * * * *", "a * * * *", "* * * foo *", "* * * * mo", "1.5 * * * *", "* * L * *", "* * * * 5#2", "@reboot", "@every", "@every 0s",
		"@every 1.5h", "@every -1h", "@every 1", "1 2 3 4 5; DROP TABLE x", "99999999999 * * * *", "*/99999 * * * *", strings.Repeat("1,", 124) + "1 * * * *", "* * * an *"} {
		_, err := l.conn.Exec(l.within(), `SELECT next_occurrence($1, NULL, now())`, c)
		requireRefused(t, err, c)
	}
	for _, zone := range []string{"", "CET", "CEST", "Europe/Nowhere", "Foo/Bar5", "+02", "posixrules", "europe/berlin", "Europe/Berlin ", "Europe//Berlin", "../etc/passwd", "Europe/Berlin5",
		"Etc/XYZ+5", "Etc/GMT+99", "Etc/GMT-15", "Japan"} {
		_, err := l.conn.Exec(l.within(), `SELECT next_occurrence('@daily', $1, now())`, zone)
		requireRefused(t, err, zone)
	}
	for _, zone := range []string{"GMT", "Etc/UTC", "Etc/GMT-14", "Etc/GMT+12", "America/Port-au-Prince", "America/Argentina/Buenos_Aires"} {
		l.exec(`SELECT next_occurrence('@daily', $1, now())`, zone)
	}
	for _, at := range []string{"infinity", "-infinity"} {
		_, err := l.conn.Exec(l.within(), `SELECT next_occurrence('@daily', NULL, $1)`, at)
		requireRefused(t, err, at)
		_, err = l.conn.Exec(l.within(), `SELECT next_occurrence('@every 1h', NULL, now(), $1)`, at)
		requireRefused(t, err, at)
	}
}

func requireRefused(t *testing.T, err error, what string) {
	t.Helper()
	var failure *pgconn.PgError
	require.ErrorAs(t, err, &failure, fmt.Sprintf("%.50q", what))
	require.Equal(t, "PW003", failure.Code, "%.50q: %v", what, err)
}
