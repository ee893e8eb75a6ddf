package eventbus_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: does each tick of each schedule come exactly once while nodes are killed?

// ticking is a schedule of the test, and the ticks that are expected of it.
type ticking struct {
	eventbus.Schedule
	every time.Duration
	since time.Time // "@every" counts from it; zero: from the minute
}

// next is the first tick after an instant. It knows nothing of how the server reckons.
func (k *ticking) next(after time.Time) time.Time {
	if k.since.IsZero() {
		return after.Truncate(k.every).Add(k.every)
	}
	return k.since.Add((after.Sub(k.since)/k.every + 1) * k.every)
}

// Five nodes carry out and handle PGWAKE_SCHEDULES schedules for PGWAKE_TICK_SECONDS, and again and again one of them is killed and another comes in its
// place. What a handler does is in the transaction that ends its delivery: so a tick that came twice, or not at all, shows in what they did.
// PGWAKE_SEED draws the same victims once more.
func TestCrash_SchedulesOverFiveNodesThatAreKilled_EachTickExactlyOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	seed := fromEnvironment(t, "PGWAKE_SEED", uint64(time.Now().UnixNano()))
	t.Logf("PGWAKE_SEED=%d", seed)
	count := int(fromEnvironment(t, "PGWAKE_SCHEDULES", 12)) // forty are more than two processors keep up with that have other tests to run
	lasts := time.Duration(fromEnvironment(t, "PGWAKE_TICK_SECONDS", testsize.Of[uint64](5, 8))) * time.Second
	// A hundred ticks a second at most, so that two processors keep up with them under the race detector.
	seconds := 2
	for _, s := range []int{2, 5, 10} {
		if seconds = s; count/s <= 100 {
			break
		}
	}
	every := time.Duration(seconds) * time.Second
	var members []member
	for i := range 5 {
		members = append(members, member{ID: fmt.Sprint("node-", i), Group: "ticks", Patterns: []string{"tick"}})
	}
	c := newCrash(t, seed, members...)

	p, err := pgwake.Open(t.Context(), c.server.URL, &pgwake.Config{Schema: crashSchema, SkipMigrate: true, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	bus, err := eventbus.New(t.Context(), p, nil)
	require.NoError(t, err)
	ticks := make(map[string]*ticking, count)
	for i := range count {
		k := &ticking{every: every, Schedule: eventbus.Schedule{Name: fmt.Sprint(i), Type: "tick", Payload: note{fmt.Sprint(i)}, CatchUp: eventbus.CatchUpAll}}
		if k.Cron = fmt.Sprintf("*/%d * * * * *", seconds); i%2 == 0 {
			k.Cron = fmt.Sprintf("@every %ds", seconds)
		}
		id, err := bus.Schedule(t.Context(), k.Schedule)
		require.NoError(t, err)
		ticks[id] = k
	}

	kills := 0
	for end := time.Now().Add(lasts); time.Now().Before(end); kills++ {
		doze(t.Context(), time.Duration(c.random.Int64N(int64(time.Second))))
		if c.random.IntN(4) > 0 { // when it has something in hand: those by cron are all due at a time
			now := time.Now()
			doze(t.Context(), now.Truncate(every).Add(every).Sub(now)+time.Duration(c.random.Int64N(int64(60*time.Millisecond))))
		}
		victim := c.one(c.nodes)
		victim.kill()
		victim.start(t)
	}

	// Whatever a killed node had in hand comes to another one. Then none is late, and after the pauses nothing is left.
	var behind int64
	var looked time.Time // and found none behind, before the pauses
	c.eventually(10*patience, func() bool {
		looked = time.Now()
		behind = c.ask(`SELECT count(*) FROM crash.scheduled_tasks WHERE next_at < now() - interval '1 s'`)
		return behind == 0
	}, func() string { return fmt.Sprintf("%d schedules are behind", behind) })
	for _, k := range ticks {
		_, err := bus.PauseSchedule(t.Context(), k.Name)
		require.NoError(t, err)
	}
	c.none("items are left of what came of them", `SELECT count(*) FROM crash.worker_queue`)
	for _, n := range c.nodes {
		require.NoError(t, n.stop(), n.ID)
	}

	require.Zero(t, c.ask(`SELECT count(*) FROM crash.dead_letters`))
	begun := map[string]time.Time{}
	c.query(`SELECT task_id::text, since FROM crash.scheduled_tasks`, func(row pgx.CollectableRow) error {
		var id string
		var since time.Time
		err := row.Scan(&id, &since)
		if begun[id] = since; ticks[id].Cron[0] == '@' {
			ticks[id].since = since
		}
		return err
	})
	came := map[string][]time.Time{}
	c.query(`SELECT e.scheduled_task_id::text, (e.metadata ->> 'scheduled_at')::timestamptz FROM crash.event_log e LEFT JOIN crash.effects f ON f.event = e.event_id
		ORDER BY 2`, func(row pgx.CollectableRow) error {
		var id string
		var at time.Time
		err := row.Scan(&id, &at)
		came[id] = append(came[id], at)
		return err
	})
	require.Equal(t, c.ask(`SELECT count(*) FROM crash.event_log`), c.ask(`SELECT count(DISTINCT event) FROM crash.effects`), "each is handled")
	total := 0
	for id, k := range ticks {
		at := begun[id]
		for _, tick := range came[id] {
			at = k.next(at)
			require.True(t, tick.Equal(at), "schedule %s, %s: %v came, and %v was to come", k.Name, k.Cron, tick, at)
		}
		require.False(t, k.next(at).Before(looked.Add(-time.Second)), "schedule %s, %s: after %v there was another", k.Name, k.Cron, at)
		total += len(came[id])
	}
	t.Logf("%d ticks of %d schedules, %d kills in %v; late by nearly the time of a lease, or more: %d ticks, %d events", total, count, kills, lasts,
		c.ask(`SELECT count(*) FROM crash.event_log WHERE emitted_at > (metadata ->> 'scheduled_at')::timestamptz + $1::interval`, memberVisibility*9/10),
		c.ask(`SELECT count(*) FROM crash.effects f JOIN crash.event_log e ON e.event_id = f.event WHERE f.done_at > e.emitted_at + $1::interval`, memberVisibility*9/10))
}
