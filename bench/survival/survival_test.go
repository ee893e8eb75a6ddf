package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/pgwake/pgwake/bench/keep"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// instant is so many milliseconds into a trial.
func instant(ms int) time.Time {
	return time.Unix(1_800_000_000, 0).Add(time.Duration(ms) * time.Millisecond)
}

func TestCount_EachItemIsInThePhaseInWhichItBegan(t *testing.T) {
	t.Parallel()
	r := &result{Phases: []*phase{
		{Name: before, Length: time.Second, from: instant(0), to: instant(1000)},
		{Name: during, Length: time.Second, from: instant(1000), to: instant(2000)},
	}}
	r.count([]fate{
		{committed: instant(10), began: instant(15), runs: 1},
		{committed: instant(990), began: instant(1100), runs: 3},
		{committed: instant(1200), began: instant(1199), runs: 1}, // before the producer heard
		{committed: instant(1300)},                                // never
		{began: instant(1500), runs: 1},                           // of unknown outcome
		{},                                                        // not sent
	})
	require.Equal(t, 4, r.Items)
	require.Equal(t, 1, r.Lost)
	require.Equal(t, 2, r.Duplicates)
	require.Equal(t, measure.Samples{5 * time.Millisecond}, r.of(before).Pickup)
	require.Equal(t, measure.Samples{110 * time.Millisecond, 0}, r.of(during).Pickup)
	require.InDelta(t, 3, r.of(during).PerSecond, 0)
	require.InDelta(t, 2, r.of(before).Enqueued, 0)
}

func TestRecovered_CountsFromTheAnswer(t *testing.T) {
	t.Parallel()
	down, up := instant(1000), instant(3000)
	items := []fate{{committed: instant(900), began: instant(3001), runs: 1}} // claimed before
	for ms := 3200; ms < 6000; ms += 100 {
		items = append(items, fate{committed: instant(ms - 10), began: instant(ms), runs: 1})
	}
	r := &result{}
	r.recovered(items, down, up, 10)
	require.Equal(t, 2*time.Second, r.Downtime)
	require.Equal(t, 200*time.Millisecond, r.FirstItem)
	require.Less(t, r.RateBack, 200*time.Millisecond)
	require.GreaterOrEqual(t, r.RateBack, time.Duration(0))

	r.recovered(items[:1], down, up, 10)
	require.Negative(t, r.FirstItem)
	require.Negative(t, r.RateBack)
	require.Len(t, keepOutage(r), 3, "neither an item, nor the rate, nor a p99")
}

// good is a round that keeps every promise.
func good() *result {
	samples := measure.Samples{time.Millisecond, 2 * time.Millisecond}
	r := &result{Counts: map[string]int{notListening: consumers, listening: consumers}, FirstItem: 1, RateBack: 1}
	for _, name := range []string{before, during, after, polling} {
		r.Phases = append(r.Phases, &phase{Name: name, Enqueued: 100, PerSecond: 100, Pickup: samples, Finds: map[string]int64{"notify": 9}})
	}
	return r
}

func TestKeep_EachPromiseCanBeBroken(t *testing.T) {
	t.Parallel()
	lateNow := func(name string) func(*result) {
		return func(r *result) { r.of(name).Pickup = measure.Samples{time.Minute} }
	}
	slowNow := func(r *result) { r.of(during).PerSecond = 10 }
	for _, c := range []struct {
		s       scenario
		breaker []func(*result)
	}{
		{restart, []func(*result){func(r *result) { r.FirstItem = time.Minute }, func(r *result) { r.RateBack = -1 }, lateNow(after)}},
		{crash, []func(*result){func(r *result) { r.FirstItem = -1 }, func(r *result) { r.RateBack = time.Minute }, lateNow(after)}},
		{kill, []func(*result){slowNow, lateNow(during), lateNow(after)}},
		{idle, []func(*result){slowNow, lateNow(during), lateNow(after)}},
		{readers, []func(*result){slowNow, lateNow(during), lateNow(after)}},
		{pooler, []func(*result){
			lateNow(during), lateNow(polling), func(r *result) { r.Counts[notListening] = 0 }, func(r *result) { r.Counts[listening] = 1 },
			func(r *result) { r.of(after).Finds["scout"] = 2 },
		}},
	} {
		require.Empty(t, c.s.keep(good()), c.s.name)
		for i, damage := range c.breaker {
			r := good()
			damage(r)
			require.Len(t, c.s.keep(r), 1, "%s, %d", c.s.name, i)
		}
	}
}

func TestReadSoak_TakesTheFiguresOfTheReport(t *testing.T) {
	t.Parallel()
	s := &trial{result: &result{}, o: &options{soak: time.Minute}}
	require.NoError(t, s.readSoak(`seed 1: 1m0s, 60 samples; the machine stalled for 0s in all
19071 items and messages, 20417 deliveries; 1100 given back, 2 renewed, 3 duplicates refused, 4 rolled back, 0 of unknown outcome
from due to in hand: p50 1.512ms, p99 12.003ms, at most 1.2s; 0 later than 1s
`))
	require.Equal(t, 19071, s.Items)
	require.Equal(t, &soaked{Length: time.Minute, P50: 1512 * time.Microsecond, P99: 12003 * time.Microsecond, Max: 1200 * time.Millisecond}, s.Soaked)
	require.ErrorContains(t, s.readSoak("nothing to say"), "nothing to say")
}

func TestSoak_ProgramThatFails_IsAnError_AndAViolationIsABrokenPromise(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "chaos")
	run := func(script string) (*trial, error) {
		require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"+script), 0o755))
		s := &trial{result: &result{}, o: &options{soak: time.Second, chaos: program}}
		return s, soakByChaos(context.Background(), s)
	}
	_, err := run("echo no server >&2; exit 1")
	require.ErrorContains(t, err, "no server")
	s, err := run(`echo "3 items and messages, 4 deliveries; 0 given back"
echo "from due to in hand: p50 1ms, p99 2ms, at most 3ms; 0 later than 1s"
echo "VIOLATION: heap grows"; echo "0:00  PostgreSQL 15.1 from somewhere" >&2; exit 1`)
	require.NoError(t, err)
	require.Equal(t, []string{"heap grows"}, s.Broken)
	require.Equal(t, "15.1", s.Postgres)
}

func TestRecord_KeepsScenariosThatAreNotRunAgain_AndWritesThePages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "survival.json")
	rec, err := readRecord(file)
	require.NoError(t, err)
	r := good()
	r.Commit, r.Postgres, r.Items, r.Downtime, r.Trouble = "f00d", "15.1", 7, time.Second, time.Minute
	for _, s := range scenarios {
		rec.Scenarios[s.name] = []*result{r}
	}
	rec.Scenarios[soak.name] = []*result{{Commit: "f00d", Items: 8, Soaked: &soaked{Length: time.Hour}}}
	require.NoError(t, keep.JSON(file, rec))
	for _, page := range []string{tablePage, detailsPage} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, page), []byte("above\n"+keep.Begin+"stale\n"+keep.End+"below\n"), 0o644))
	}

	kept, err := survive(t.Context(), []string{"-run", "", "-json", file, "-docs", dir})
	require.NoError(t, err)
	require.True(t, kept)
	read := func(page string) string {
		text, err := os.ReadFile(filepath.Join(dir, page))
		require.NoError(t, err)
		require.NotContains(t, string(text), "stale")
		return string(text)
	}
	table, details := read(tablePage), read(detailsPage)
	require.Regexp(t, `(?s)^above\n`+keep.Begin+`Commit f00d\. PostgreSQL 15\.1, .*\| \[restart\]\(reliability-scenarios\.md#restart\), 1m0s \| 100 / 100 / 100 \| 1\.0 ms / 2\.0 ms .*0 of 7.*`+keep.End+`below\n$`, table)
	require.Contains(t, table, sweep)
	require.Regexp(t, `(?s)^above\n`+keep.Begin+`### restart\n\nThe server .*### soak\n.*8 items and messages in 1h0m0s.*`+keep.End+`below\n$`, details)

	// What was published stays where there is nothing to take its place.
	_, err = survive(t.Context(), []string{"-run", "", "-json", filepath.Join(dir, "none.json"), "-docs", dir})
	require.ErrorContains(t, err, "there are no results of restart")
	require.Equal(t, table, read(tablePage))
	require.Equal(t, details, read(detailsPage))
}

func TestParse_RefusesWhatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	o, err := parse(nil)
	require.NoError(t, err)
	require.Len(t, o.scenarios, 7)
	o, err = parse([]string{"-run", "kill,readers"})
	require.NoError(t, err)
	require.Equal(t, "readers", o.scenarios[1].name)
	for _, args := range [][]string{{"-run", "flood"}, {"-rounds", "0"}, {"-for", "1s"}, {"now"}} {
		_, err := parse(args)
		require.Error(t, err, args)
	}
}

func TestScenarios_EachSaysWhatItPromises_AndWhatIsSaidOfOthers(t *testing.T) {
	t.Parallel()
	for _, s := range scenarios {
		require.NotEmpty(t, s.promise, s.name)
		require.NotEmpty(t, s.what, s.name)
		require.NotEmpty(t, others[s.name], s.name)
		require.True(t, s.once || s.rate > 0, s.name)
	}
}
