package eventbus_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
)

// This file answers: does pg_cron fire schedules where it is to, and is it let be where it is not?

// newPgCron is a lab on a server that has pg_cron.
func newPgCron(t *testing.T) *lab {
	t.Helper()
	libraries, _ := filepath.Glob("/usr/lib/postgresql/*/lib/pg_cron.so")
	if len(libraries) == 0 {
		t.Skip("needs pg_cron (Debian: postgresql-15-cron)")
	}
	dir := filepath.Dir(filepath.Dir(libraries[len(libraries)-1])) // whatever version is tested otherwise
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true, Version: filepath.Base(dir), BinDir: filepath.Join(dir, "bin"), Settings: map[string]string{
		"shared_preload_libraries": "pg_cron", "cron.database_name": "postgres", "cron.use_background_workers": "on", "max_worker_processes": "20"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	silent := slog.New(slog.DiscardHandler)
	p, err := pgwake.Open(t.Context(), server.URL, &pgwake.Config{Schema: "by cron", Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	l := &lab{bus, t, p, session(t, p)}
	l.exec(`CREATE EXTENSION pg_cron`)
	return l
}

// jobs are those that pg_cron has.
func (l *lab) jobs() []string {
	l.t.Helper()
	return all[string](l, `SELECT j.jobid || ': ' || j.jobname || ': ' || j.schedule || ': ' || j.command FROM cron.job j ORDER BY j.jobid`)
}

func TestPgCron_FiresWhatItIsTo_AndItsJobGoesWithTheSchedule(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a server")
	}
	t.Parallel()
	l := newPgCron(t)
	l.schedule(eventbus.Schedule{Name: "ours", Cron: "* * * * *"})
	require.Empty(t, l.jobs(), "it is not for pg_cron")
	l.exec(`SELECT delete_schedule(NULL, 'ours')`)

	minute := eventbus.Schedule{Name: "tick tock", Type: "a", Cron: " * * * *  *", ByPgCron: true, Payload: 7}
	id := l.schedule(minute)
	jobs := func() []string {
		s := l.scheduled()[0]
		require.Zero(t, l.occurrences())
		return []string{one[string](l, `SELECT $1::bigint || ': default_tick tock_' || $2 || ': ' || '* * * *  *' || ': SELECT "by cron".run_scheduled_task(''' || $2 || ''')'`, s.JobID, id)}
	}
	require.Equal(t, jobs(), l.jobs())
	s := l.scheduled()[0]
	require.True(t, s.ByPgCron && s.CatchUp == eventbus.CatchUpSkip && s.Next.IsZero(), s)
	require.Equal(t, id, l.schedule(minute))
	require.Equal(t, s, l.scheduled()[0], "to say the same again changes nothing")

	// Paused and resumed, ours and theirs, rolled back, removed by hand, deleted.
	for _, active := range []bool{false, true} {
		l.exec(`SELECT activate_schedule(NULL, 'tick tock', $1)`, active)
		require.Len(t, l.jobs(), map[bool]int{true: 1}[active])
		require.Equal(t, active, l.scheduled()[0].JobID != 0)
	}
	minute.ByPgCron = false
	l.schedule(minute)
	require.Empty(t, l.jobs())
	require.Equal(t, 1, l.occurrences())
	minute.ByPgCron = true
	l.schedule(minute)
	require.Equal(t, jobs(), l.jobs())
	tx := l.begin()
	_, err := l.WithTx(tx).DeleteSchedule(l.within(), "tick tock")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(l.within()))
	require.Equal(t, jobs(), l.jobs())

	var fired *eventbus.Event
	require.Eventually(t, func() bool {
		events, err := l.Read(l.within(), eventbus.Cursor{}, 10)
		require.NoError(t, err)
		if len(events) == 0 {
			return false
		}
		fired = events[0]
		return true
	}, 3*patience, 50*time.Millisecond, "pg_cron fires it at the next minute, without any node")
	require.Equal(t, []string{"a", "scheduler", id, "7"}, []string{fired.Type, fired.Producer, fired.ScheduledTaskID, string(fired.Payload)})

	l.exec(`SELECT cron.unschedule(job_id) FROM scheduled_tasks`)
	was, err := l.DeleteSchedule(l.within(), "tick tock")
	require.NoError(t, err)
	require.True(t, was)
	l.schedule(minute)
	was, err = l.DeleteSchedule(l.within(), "tick tock")
	require.NoError(t, err)
	require.True(t, was)
	require.Empty(t, l.jobs())

	// What it cannot do is refused, and nothing is left.
	for name, spoil := range map[string]func(*eventbus.Schedule){
		"six fields": func(s *eventbus.Schedule) { s.Cron = "0 * * * * *" }, "a minute": func(s *eventbus.Schedule) { s.Cron = "@every 1m" },
		"what it has no word for": func(s *eventbus.Schedule) { s.Cron = "? * * * *" }, "zone": func(s *eventbus.Schedule) { s.TimeZone = "Europe/Berlin" },
		"jitter": func(s *eventbus.Schedule) { s.Jitter = time.Second }, "catch up": func(s *eventbus.Schedule) { s.CatchUp = eventbus.CatchUpOne },
		"overlap": func(s *eventbus.Schedule) { s.Overlap = eventbus.OverlapSkip },
		"paused":  func(s *eventbus.Schedule) { s.Paused, s.Cron = true, "0 * * * * *" },
	} {
		s := minute
		spoil(&s)
		_, err := l.Schedule(l.within(), s)
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
	}
	require.Empty(t, l.jobs())
	require.Empty(t, l.scheduled())
	for cron, want := range map[string]string{"@daily": "0 0 * * *", "30 4 1,15 * MON-fri": "30 4 1,15 * mon-fri", "*/5 0-23/2 * * *": "*/5 0-23/2 * * *", "@every 10s": "10 seconds"} {
		require.Equal(t, want, one[string](l, `SELECT pg_cron_schedule($1, 'UTC')`, cron))
	}
	minute.Cron, minute.TimeZone = "@daily", "GMT"
	l.schedule(minute)
	require.Contains(t, l.jobs()[0], ": 0 0 * * *: ")
	l.exec(`SELECT delete_schedule(NULL, 'tick tock')`)

	// Names that are the same as far as pg_cron goes.
	for _, name := range []string{"1", "2"} {
		minute.Name = strings.Repeat("ö", 100) + name
		l.schedule(minute)
	}
	require.Len(t, l.jobs(), 2)
	require.True(t, one[bool](l, `SELECT bool_and(j.jobname = 'default_' || repeat('_', 18) || '_' || t.task_id) FROM scheduled_tasks t JOIN cron.job j ON j.jobid = t.job_id`))
	l.exec(`SELECT delete_schedule(NULL, $1)`, minute.Name)
	require.Len(t, l.jobs(), 1)
}

func TestPgCron_IsNotInstalled_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	_, err := l.Schedule(l.within(), eventbus.Schedule{Name: "s", Cron: "@daily", Type: "a", ByPgCron: true})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, "not installed")
	require.Empty(t, l.scheduled())
}
