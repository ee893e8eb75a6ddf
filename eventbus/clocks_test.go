package eventbus_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testclock"
	"github.com/stretchr/testify/require"
)

// This file answers: what do schedules make of a clock that jumps?

// jumpy is a bus on a server whose clock can be set.
type jumpy struct {
	*lab
	*testclock.Server
}

func newJumpy(t *testing.T) *jumpy {
	t.Helper()
	server := testclock.Start(t)
	p, err := pgwake.Open(t.Context(), server.URL, &pgwake.Config{Schema: "clocks", FallbackInterval: 200 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return &jumpy{&lab{bus, t, p, session(t, p)}, server}
}

// counts are the events of each schedule. That none is of a tick of which there is another one is asserted.
func (j *jumpy) counts() map[string]int {
	j.t.Helper()
	require.Zero(j.t, one[int](j.lab, `SELECT count(*) - count(DISTINCT (scheduled_task_id, metadata ->> 'scheduled_at')) FROM event_log`), "a tick came twice")
	n := map[string]int{}
	for _, name := range all[string](j.lab, `SELECT t.name FROM event_log e JOIN scheduled_tasks t ON t.task_id = e.scheduled_task_id`) {
		n[name]++
	}
	return n
}

func TestClock_OfTheServerJumps_CatchUpDecidesAndNoTickComesTwice(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a server")
	}
	t.Parallel()
	j := newJumpy(t)
	var s seen
	n := j.node(quick("g"))
	require.NoError(t, n.On(j.within(), "a", s.types))
	for _, catchUp := range []eventbus.CatchUp{eventbus.CatchUpOne, eventbus.CatchUpAll, eventbus.CatchUpSkip} {
		j.schedule(eventbus.Schedule{Name: string(catchUp), Cron: "@every 10m", CatchUp: catchUp})
	}
	j.schedule(eventbus.Schedule{Name: "second", Cron: "* * * * * *"})
	j.eventually(func() bool { return j.counts()["second"] >= 2 }, "it ticks")
	ahead := func() bool {
		return one[bool](j.lab, `SELECT bool_and(t.next_at > clock_timestamp() - interval '2 s' AND q.id IS NOT NULL) FROM scheduled_tasks t LEFT JOIN worker_queue q ON q.id = t.item_id`)
	}

	// Three hours ahead, and some: 18 ticks of ten minutes.
	j.Set(t, 3*time.Hour+time.Minute+30*time.Second)
	j.eventually(ahead, "all have caught up")
	came := j.counts()
	require.Equal(t, []int{1, 18, 0}, []int{came["one"], came["all"], came["skip"]})
	require.Equal(t, []int64{1, 0}, all[int64](j.lab, `SELECT skipped FROM scheduled_tasks WHERE name IN ('skip', 'all') ORDER BY name DESC`))
	j.eventually(func() bool { return j.counts()["second"] > came["second"] }, "it ticks on")

	// An hour back: what has come until then is not to come again, so nothing is due.
	j.Set(t, 2*time.Hour+time.Minute+30*time.Second)
	j.eventually(func() bool {
		return len(j.dueSoon()) == 0 && j.claimedBefore() == 0 &&
			one[int](j.lab, `SELECT count(*) FROM worker_queue WHERE lock_token IS NOT NULL OR visible_at < clock_timestamp() + interval '1 minute'`) == 0
	}, "what was due has come, also what somebody was at, or was about to claim")
	came = j.counts()
	require.True(t, ahead())
	// Two of its minutes later that is so still. What is made or resumed reckons by the clock as it is.
	j.Set(t, 2*time.Hour+3*time.Minute+30*time.Second)
	j.schedule(eventbus.Schedule{Name: "new", Cron: "* * * * * *"})
	j.eventually(func() bool { return j.counts()["new"] >= 2 }, "a new one ticks meanwhile")
	now := j.counts()
	delete(now, "new")
	require.Equal(t, came, now)
	for _, active := range []bool{false, true} {
		j.exec(`SELECT activate_schedule(NULL, 'skip', $1)`, active)
	}
	require.True(t, one[bool](j.lab, `SELECT next_at < clock_timestamp() + interval '11 minutes' FROM scheduled_tasks WHERE name = 'skip'`))

	// When the clock has come so far again they go on.
	j.Set(t, 3*time.Hour+2*time.Minute)
	j.eventually(func() bool { return j.counts()["second"] >= came["second"]+2 }, "it ticks again")
	j.Set(t, 3*time.Hour+12*time.Minute)
	j.eventually(func() bool { return j.counts()["all"] > came["all"] }, "the others too")
	j.eventually(ahead, "none is stuck")
	j.eventually(func() bool { return len(s.list()) >= one[int](j.lab, `SELECT count(*) FROM event_log`) }, "all are handled")
	require.Zero(t, one[int](j.lab, `SELECT count(*) FROM dead_letters`))
}

// claimedBefore is how many transactions go on that began when the clock was ahead of now.
func (j *jumpy) claimedBefore() int {
	j.t.Helper()
	return one[int](j.lab, `SELECT count(*) FROM pg_stat_activity WHERE xact_start > clock_timestamp() + interval '1 minute'`)
}

// dueSoon are the schedules of which a tick is due within a minute.
func (j *jumpy) dueSoon() []string {
	j.t.Helper()
	return all[string](j.lab, `SELECT name FROM scheduled_tasks WHERE next_at < clock_timestamp() + interval '1 minute'`)
}
