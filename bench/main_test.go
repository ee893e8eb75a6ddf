package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake/bench/keep"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/bench/workflows"
	"github.com/pgwake/pgwake/devpg"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	measure.ChildMain()
	goleak.VerifyTestMain(m)
}

func TestParse_ShortIsOneRoundOfSmallSizes_UnlessToldOtherwise(t *testing.T) {
	s, err := parse(nil)
	require.NoError(t, err)
	assert.Equal(t, names(), s.scenarios)
	assert.Equal(t, 5, s.rounds)
	assert.Equal(t, 3*time.Minute, s.sizes.idle.Duration)

	s, err = parse([]string{"-short", "-idle", "20s", "-run", "single,pairs"})
	require.NoError(t, err)
	assert.Equal(t, []string{"single", "pairs"}, s.scenarios)
	assert.Equal(t, 1, s.rounds)
	assert.Equal(t, 20*time.Second, s.sizes.idle.Duration)
	assert.Equal(t, small.singles, s.sizes.singles)

	s, err = parse([]string{"-short", "-rounds", "3"})
	require.NoError(t, err)
	assert.Equal(t, 3, s.rounds)
}

func TestParse_Quick_HasEveryScenarioThatAGoalNeeds(t *testing.T) {
	s, err := parse([]string{"-quick", "-json", "elsewhere.json", "-backlog", "7", "-items", "9"})
	require.NoError(t, err)
	assert.Equal(t, quickNames, s.scenarios)
	assert.Equal(t, 1, s.rounds)
	assert.Equal(t, "elsewhere.json", s.json)
	assert.Equal(t, 7, s.sizes.fetch.Backlog)
	assert.Equal(t, 9, s.sizes.drain.Items)
	for _, name := range quickNames {
		assert.Contains(t, names(), name)
	}
}

func TestSizes_Tell_ReachesEveryScenario(t *testing.T) {
	s := full
	s.tell(func(measure.Progress) {})
	all := reflect.ValueOf(s)
	for i := range all.NumField() {
		if of := all.Field(i); of.Kind() == reflect.Struct {
			assert.False(t, of.FieldByName("Progress").IsNil(), all.Type().Field(i).Name)
		}
	}
	assert.Nil(t, full.drain.Progress, "the sizes are copies")
}

func TestParse_UnknownScenario_IsAnErrorThatNamesTheOthers(t *testing.T) {
	_, err := parse([]string{"-run", "single,naps"})
	assert.ErrorContains(t, err, `"naps"`)
	assert.ErrorContains(t, err, "redelivery")
}

func TestRows_FiguresAndRatiosAreMediansOverRounds(t *testing.T) {
	round := func(latency, trip, claim time.Duration) results {
		ones := func(d time.Duration) measure.Samples { return measure.Samples{d * time.Millisecond} }
		return results{
			Baseline: []*measure.BaselineResult{{Trip: measure.Latency{FromSend: ones(trip)}, Claim: ones(claim), Sleep: ones(1)}},
			Singles: []*measure.SinglesResult{{Producer: measure.OtherProvider,
				Latency: measure.Latency{FromCommit: ones(latency), FromSend: ones(2 * latency)}}},
		}
	}
	var all results
	for _, r := range []results{round(3, 1, 1), round(90, 29, 1), round(4, 1, 1)} { // ratios 1.5, 3 and 2
		all.Baseline = append(all.Baseline, r.Baseline...)
		all.Singles = append(all.Singles, r.Singles...)
	}
	first := all.singleRows()[0]
	assert.Equal(t, row{
		measure: "single item by another provider, commit to hand, p50", figure: "4.00 ms",
		baseline: "2.00 ms (notify trip + claim)", ratio: "2.00x", goal: "<= 1.5x", met: false,
	}, first)

	var out bytes.Buffer
	printTable(&out, all.rows())
	assert.Contains(t, out.String(), "| <= 1.5x: **missed** |")
	assert.Contains(t, out.String(), "| < 5ms: met ")
	assert.Contains(t, out.String(), "\n| … the enqueue included, p50 ")
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for _, line := range lines {
		assert.Equal(t, utf8.RuneCountInString(lines[0]), utf8.RuneCountInString(line), "columns are aligned: %s", line)
		assert.Equal(t, 6, strings.Count(line, "|"), line)
	}
}

func TestRows_SafetyNetAddsUpAllScenarios(t *testing.T) {
	r := results{
		Pairs:      []*measure.PairsResult{{Net: measure.SafetyNet{FallbackFinds: 1}}},
		Baseline:   []*measure.BaselineResult{{}},
		Redelivery: []*measure.RedeliveryResult{{Net: measure.SafetyNet{FallbackFinds: 1, ScoutFinds: 3}}},
	}
	assert.Equal(t, measure.SafetyNet{FallbackFinds: 2, ScoutFinds: 3}, r.safetyNet())
	last := r.rows()[len(r.rows())-1]
	assert.Equal(t, "2, 3", last.figure)
	assert.False(t, last.met)
}

func TestIdleRow_NoStatementAtAll_IsABoundAndNoRatio(t *testing.T) {
	r := results{
		Idle:      []*measure.IdleResult{{Workers: 60, Orchestrators: 4, Duration: 10 * time.Second}},
		ShortPoll: []*measure.ShortPollResult{{Dispatchers: 4, Interval: 50 * time.Millisecond, Duration: time.Second, Statements: 160}},
	}
	goal := r.idleRows()[0]
	assert.Equal(t, "0.0000 (0 in 10s)", goal.figure)
	assert.Equal(t, "< 1/1600", goal.ratio)
	assert.True(t, goal.met)
}

func TestFanInRows_MessagesAreComparedOneByOne_AndTurnsAsAWhole(t *testing.T) {
	times := func(d time.Duration) measure.TurnTimes {
		return measure.TurnTimes{Fetch: measure.Samples{d * time.Millisecond}, Ack: measure.Samples{2 * d * time.Millisecond}}
	}
	r := results{FanIn: []*measure.FanInResult{{
		Small: 100, Large: 10_000, SmallTurns: times(2), LargeTurns: times(100),
		Few: 1000, Many: 100_000, AmongFew: times(1), AmongMany: times(2),
		BehindSmall: measure.Samples{time.Millisecond}, BehindLarge: measure.Samples{time.Millisecond},
	}}}
	rows := r.fanInRows()
	require.Len(t, rows, 5)
	assert.Equal(t, row{
		measure: "turn of 10000 messages, fetch, per 1000 of them, p50", figure: "10.00 ms",
		baseline: "20.00 ms (of 100)", ratio: "0.50x", goal: "<= 1.5x", met: true,
	}, rows[0])
	assert.Equal(t, row{
		measure: "turn of 1 message, 100000 instances with one, fetch, p50", figure: "2.00 ms",
		baseline: "1.00 ms (1000)", ratio: "2.00x", goal: "<= 1.5x", met: false,
	}, rows[3])
}

func TestConvoyRows_AWorkerThatWaitsForARow_MissesTheGoal_OtherWaitsDoNot(t *testing.T) {
	way := func(took time.Duration, waits ...measure.LockWait) measure.Convoy {
		return measure.Convoy{Took: took, Acks: make(measure.Samples, 100), Looks: 10, Waits: waits}
	}
	ofTable := measure.LockWait{Kind: "extend", Function: "ack_work", Seen: 3}
	ofTurn := measure.LockWait{Kind: "transactionid", Function: "ack_orchestration", Seen: 2}
	of := func(waits ...measure.LockWait) (rate, workers, dispatchers, rest row) {
		r := results{Convoy: []*measure.ConvoyResult{{
			Workers: 16, Dispatchers: 4, Apart: way(time.Second, ofTable), Shared: way(2 * time.Second), Crowded: way(time.Second, waits...)}}}
		rows := r.convoyRows()
		return rows[0], rows[2], rows[3], rows[4]
	}
	rate, workers, dispatchers, rest := of(ofTurn)
	assert.Equal(t, "0.50x", rate.ratio)
	assert.False(t, rate.met)
	assert.True(t, workers.met)
	assert.Equal(t, "0, 2", dispatchers.figure)
	assert.Equal(t, "3 (own)", rest.baseline)

	_, workers, _, _ = of(ofTurn, measure.LockWait{Kind: "tuple", Function: "ack_work", Seen: 1})
	assert.Equal(t, "0, 1", workers.figure)
	assert.False(t, workers.met)
}

// namespacesRound is a round in which every goal is met.
func namespacesRound() *measure.NamespacesResult {
	singles := func(latency time.Duration, byClock int64) *measure.NamespaceSingles {
		return &measure.NamespaceSingles{Latency: measure.Latency{FromCommit: measure.Samples{latency}}, Looks: 1 + byClock, ByClock: byClock, Took: time.Minute}
	}
	rate := func(items int) *measure.NamespaceRate { return &measure.NamespaceRate{Items: items, Took: time.Second} }
	scaled := func(namespaces, items int) measure.ScaledRate {
		return measure.ScaledRate{Namespaces: namespaces, NamespaceRate: *rate(items)}
	}
	return &measure.NamespacesResult{
		Namespaces: 8, Interval: time.Second, Batch: 100, Tasks: 10, Steps: 3,
		Served: singles(time.Millisecond, 0), Retired: singles(time.Millisecond, 0), Polled: singles(time.Second/2, 300),
		Created: &measure.Latency{FromCommit: measure.Samples{3 * time.Millisecond}},
		Chain:   rate(900), PolledChain: rate(10), Flood: rate(30), PolledFlood: rate(10),
		Restarts: &measure.NamespaceRestarts{Items: 2, Calm: measure.Samples{2}, Shaken: measure.Samples{3}},
		Scale:    &measure.NamespaceScale{Places: 2, Rates: []measure.ScaledRate{scaled(1, 100), scaled(8, 760), scaled(16, 800)}, Single: scaled(1, 1600)},
		Many:     &measure.ManyNamespaces{Namespaces: 1000, Duration: time.Second, PolledFor: time.Second, Polled: 1000, BusyFor: time.Second, BusyItems: -10, Listening: 1, Bytes: 5 << 10, BytesAfter: 20<<10 - 1},
	}
}

func TestNamespaceRows_EachGoalIsMissedByWhatItIsFor(t *testing.T) {
	judge := func(n *measure.NamespacesResult) (missed []string) {
		for _, w := range (&results{Namespaces: []*measure.NamespacesResult{n}}).namespaceRows() {
			if w.goal != "" && !w.met {
				missed = append(missed, w.measure)
			}
		}
		return missed
	}
	assert.Empty(t, judge(namespacesRound()))
	for missed, spoil := range map[string]func(*measure.NamespacesResult){
		"single item in one of 8 idle namespaces, commit to handler, p50, p99": func(n *measure.NamespacesResult) {
			n.Served.FromCommit[0] = 5 * time.Millisecond
		},
		"  where the last Dispatcher had ended, p50": func(n *measure.NamespacesResult) { n.Retired.FromCommit[0] = 2 * time.Millisecond },
		"  until it is handled, max":                 func(n *measure.NamespacesResult) { n.Created.FromCommit[0] = 100 * time.Millisecond },
		"  statements for which time alone was the reason, in 1m0s": func(n *measure.NamespacesResult) {
			n.Retired.ByClock = 7
		},
		"10 tasks at a time of 3 steps, each of which enqueues the next, one coordinator: steps/s": func(n *measure.NamespacesResult) {
			n.Chain.Items = 99
		},
		"  of 2 items, lost":                  func(n *measure.NamespacesResult) { n.Restarts.Left = 1 },
		"  handled again, acknowledged twice": func(n *measure.NamespacesResult) { n.Restarts.Twice = 1 },
		"  8 namespaces":                      func(n *measure.NamespacesResult) { n.Scale.Rates[1].Items = 719 },
		"1000 idle namespaces on one node: LISTEN connections, connections": func(n *measure.NamespacesResult) { n.Many.Listening = 2 },
		"  statements in 1s": func(n *measure.NamespacesResult) { n.Many.Statements = 2 },
		"  statements/s": func(n *measure.NamespacesResult) {
			n.Many.Statements, n.Many.OfOne, n.Many.Duration = 1, 1, time.Second/20
		},
		"  while one of them has an item each second":         func(n *measure.NamespacesResult) { n.Many.BusyItems-- },
		"  memory of each, without an item so far; after one": func(n *measure.NamespacesResult) { n.Many.BytesAfter++ },
	} {
		n := namespacesRound()
		spoil(n)
		found := strings.Join(judge(n), ",")
		assert.Equal(t, missed, strings.ReplaceAll(found, ",  p99", ", p99"))
	}
}

func TestNamespaceMetrics_RatiosAreTakenWithinARound(t *testing.T) {
	slow := namespacesRound()
	slow.Chain.Items, slow.PolledChain.Items = 30, 10
	r := results{Namespaces: []*measure.NamespacesResult{namespacesRound(), slow, namespacesRound()}}
	for _, n := range r.Namespaces { // 3, and 60, in a minute, in which loops make 600
		n.Served.ByClock, n.Retired.ByClock, n.Retired.Took, n.Polled.Took = 3, 6, time.Minute/10, 2*time.Minute
		n.Polled.ByClock = 1200
	}
	m := r.metrics()
	assert.Equal(t, 90.0, m["namespace_chain_ratio"])
	assert.Equal(t, 1.0, m["namespace_claim_p99_ms"])
	assert.Equal(t, 0.95, m["namespace_linear_8"])
	assert.Equal(t, 0.5, m["namespace_linear_16"])
	assert.InDelta(t, 1-(3+60)/2./600, m["namespace_polls_fewer"], 1e-9, "the times are not the same")
	assert.Zero(t, m["namespace_lost"])
	assert.Equal(t, float64(20<<10-1), m["namespace_idle_bytes"])
}

func TestRecord_KeepsEverySample_AndTheFiguresByName(t *testing.T) {
	r := newRecord(&devpg.Server{Version: "15.1", Source: "here"})
	r.Results.Pairs = []*measure.PairsResult{{Second: measure.Latency{FromCommit: measure.Samples{1e6, 2e6, 3e6}}}}
	r.finish(1)
	file := filepath.Join(t.TempDir(), "new", "results.json")
	require.NoError(t, keep.JSON(file, r))
	require.NoError(t, keep.JSON(file, r), "it is replaced")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var back record
	require.NoError(t, json.Unmarshal(text, &back))
	assert.Equal(t, r.Results, back.Results)
	assert.Equal(t, map[string]float64{"pair_second_p50_ms": 2}, back.Metrics)
	assert.Equal(t, r.Settings, back.Settings)
	assert.NotEmpty(t, back.Settings)
}

func TestRecord_WriteDocs_ReplacesWhatIsBetweenTheMarks(t *testing.T) {
	r := newRecord(&devpg.Server{Version: "15.1"})
	r.Results.ShortPoll = []*measure.ShortPollResult{{Dispatchers: 4, Duration: time.Second, Statements: 160}}
	r.Results.Idle = []*measure.IdleResult{{Duration: time.Second}}
	r.finish(1)
	dir := t.TempDir()
	file := filepath.Join(dir, "page.md")
	require.NoError(t, os.WriteFile(file, []byte("before\n"+keep.Begin+"outdated figures\n"+keep.End+"after\n"), 0o644))
	for range 2 {
		require.NoError(t, r.writeDocs(file))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.True(t, strings.HasPrefix(string(text), "before\n"+keep.Begin+"Commit "+r.Commit+"; PostgreSQL 15.1"), "%s", text)
		assert.True(t, strings.HasSuffix(string(text), "![idle](images/benchmarks/idle.svg)\n"+keep.End+"after\n"), "%s", text)
		assert.NotContains(t, string(text), "outdated")
	}
	assert.FileExists(t, filepath.Join(dir, "images", "benchmarks", "idle.svg"))

	require.NoError(t, os.WriteFile(file, []byte("nothing"), 0o644))
	assert.ErrorContains(t, r.writeDocs(file), "no place for results")
}

// tasksRound is a round in which every goal is met.
func tasksRound() *measure.TasksResult {
	singles := func(claim time.Duration, byClock int64) *measure.TaskSingles {
		return &measure.TaskSingles{
			Turns: measure.Samples{claim}, Steps: measure.Samples{claim}, Results: measure.Samples{claim}, Whole: measure.Samples{10 * claim},
			ByClock: byClock, Took: time.Minute,
		}
	}
	rate := func(items int) *measure.NamespaceRate { return &measure.NamespaceRate{Items: items, Took: time.Second} }
	return &measure.TasksResult{
		Namespaces: 50, Interval: time.Second, AtATime: 10, Steps: 3, Singles: singles(time.Millisecond, 3), Polled: singles(time.Second/2, 6000),
		Rate: rate(100), PolledRate: rate(2), Fan: &measure.FanOut{Width: 1000, Took: time.Second, Joins: 1},
	}
}

func TestTaskRows_EachGoalIsMissedByWhatItIsFor(t *testing.T) {
	many := func() *measure.ManyTasksResult {
		return &measure.ManyTasksResult{Tasks: 1000, Steps: 10_000, Large: 100, Edges: 500, Queries: []*measure.QueryCost{
			{SQL: measure.NextReadyTasks, Times: measure.Samples{time.Millisecond}},
			{SQL: measure.LargeReadiness, Times: measure.Samples{time.Millisecond}},
			{SQL: `SELECT * FROM get_next_ready_task()`, Times: measure.Samples{time.Hour}},
		}}
	}
	judge := func(n *measure.TasksResult, m *measure.ManyTasksResult) (missed []string) {
		for _, w := range (&results{Tasks: []*measure.TasksResult{n}, ManyTasks: []*measure.ManyTasksResult{m}}).taskRows() {
			if w.goal != "" && !w.met {
				missed = append(missed, strings.TrimSpace(w.measure))
			}
		}
		return missed
	}
	assert.Empty(t, judge(tasksRound(), many()))
	for missed, spoil := range map[string]func(*measure.TasksResult, *measure.ManyTasksResult){
		"p99": func(n *measure.TasksResult, _ *measure.ManyTasksResult) { n.Singles.Results[0] = 10 * time.Millisecond },
		"statements for which time alone was the reason, per minute": func(n *measure.TasksResult, _ *measure.ManyTasksResult) { n.Singles.ByClock = 7 },
		"tasks of 3 steps, 10 at a time, one coordinator: tasks/s":   func(n *measure.TasksResult, _ *measure.ManyTasksResult) { n.Rate.Items = 19 },
		"joins, attempts beyond the first":                           func(n *measure.TasksResult, _ *measure.ManyTasksResult) { n.Fan.Joins = 2 },
		"of 1000 tasks with 10000 steps: get_next_ready_tasks(100)": func(_ *measure.TasksResult, m *measure.ManyTasksResult) {
			m.Queries[0].Times[0] = 20 * time.Millisecond
		},
		"task of 100 steps, 500 dependencies: readiness of all": func(_ *measure.TasksResult, m *measure.ManyTasksResult) {
			m.Queries[1].Times[0] = 100 * time.Millisecond
		},
	} {
		n, m := tasksRound(), many()
		spoil(n, m)
		assert.Equal(t, missed, strings.Join(judge(n, m), ","))
	}
	r := results{Tasks: []*measure.TasksResult{tasksRound()}, ManyTasks: []*measure.ManyTasksResult{many()}}
	figures := r.metrics()
	assert.Equal(t, 50.0, figures["task_rate_ratio"])
	assert.Equal(t, 1.0, figures["task_next_ready_ms"])
	assert.InDelta(t, 0.9995, figures["task_polls_fewer"], 1e-9)
}

func TestEventRows_EachGoalIsMissedByWhatItIsFor(t *testing.T) {
	round := func() *measure.EventsResult {
		latency := func(commit, send time.Duration) measure.Latency {
			return measure.Latency{FromCommit: ms(commit), FromSend: ms(send)}
		}
		drain := func(done int) *measure.DrainResult {
			return &measure.DrainResult{Dispatchers: 8, Items: 1000, Done: done, Took: time.Second}
		}
		return &measure.EventsResult{Items: latency(2, 4), Tx: latency(3, 6), Plain: latency(2, 5), Drain: drain(500), ItemsDrain: drain(1000), ItemsTxDrain: drain(600), SharedDrain: drain(9000)}
	}
	log := func() *measure.EventLogResult {
		return &measure.EventLogResult{Rows: 1000, Full: ms(6), Empty: ms(5), Kept: 100, Beside: ms(49), Before: ms(5)}
	}
	judge := func(e *measure.EventsResult, l *measure.EventLogResult) (missed []string) {
		for _, w := range (&results{Events: []*measure.EventsResult{e}, EventLog: []*measure.EventLogResult{l}}).eventRows() {
			if w.goal != "" && !w.met {
				missed = append(missed, strings.TrimSpace(w.measure))
			}
		}
		return missed
	}
	assert.Empty(t, judge(round(), log()))
	for missed, spoil := range map[string]func(*measure.EventsResult, *measure.EventLogResult){
		"single event by another provider, commit to handler with a transaction, p50": func(e *measure.EventsResult, _ *measure.EventLogResult) { e.Tx.FromCommit = ms(4) },
		"the emit included, p50": func(e *measure.EventsResult, _ *measure.EventLogResult) { e.Tx.FromSend = ms(7) },
		"backlog of 1000, 8 handlers that do nothing, events with a transaction each: events/s": func(e *measure.EventsResult, _ *measure.EventLogResult) {
			e.Drain.Done = 499
		},
		"emit, 1000 events of the month in the log, p50": func(_ *measure.EventsResult, l *measure.EventLogResult) { l.Full = ms(7) },
		"emit while the partitions of a log are made that has 100 events in its default one, the longest of 1": func(_ *measure.EventsResult, l *measure.EventLogResult) {
			l.Beside = ms(50)
		},
	} {
		e, l := round(), log()
		spoil(e, l)
		assert.Equal(t, missed, strings.Join(judge(e, l), ","))
	}
	r := results{Events: []*measure.EventsResult{round()}, EventLog: []*measure.EventLogResult{log()}}
	figures := r.metrics()
	assert.Equal(t, 1.5, figures["event_handler_ratio"])
	assert.Equal(t, 0.5, figures["event_rate_ratio"])
	assert.Equal(t, 1.2, figures["event_log_ratio"])
	assert.Equal(t, 49.0, figures["event_log_kept_max_ms"])
}

func TestScheduleRows_EachGoalIsMissedByWhatItIsFor(t *testing.T) {
	round := func() *measure.SchedulesResult {
		return &measure.SchedulesResult{Handled: ms(9), Emitted: ms(5), Polled: ms(500), Idle: 100, With: 4, Without: 3}
	}
	judge := func(s *measure.SchedulesResult) (missed []string) {
		for _, w := range (&results{Schedules: []*measure.SchedulesResult{s}}).eventRows() {
			if w.goal != "" && !w.met {
				missed = append(missed, strings.TrimSpace(w.measure))
			}
		}
		return missed
	}
	assert.Empty(t, judge(round()))
	for missed, spoil := range map[string]func(*measure.SchedulesResult){
		"p99":                   func(s *measure.SchedulesResult) { s.Handled = ms(10) },
		"ticks that came again": func(s *measure.SchedulesResult) { s.Again = 1 },
		"statements of a node in 0s with 100 schedules that are not due": func(s *measure.SchedulesResult) { s.With = 5 },
	} {
		s := round()
		spoil(s)
		assert.Equal(t, missed, strings.Join(judge(s), ","))
	}
	figures := (&results{Schedules: []*measure.SchedulesResult{round()}}).metrics()
	assert.Equal(t, 9.0, figures["schedule_late_p99_ms"])
	assert.Equal(t, 1.0, figures["schedule_idle_statements"])
}

func TestWorkflowRows_EachGoalIsMissedByWhatItIsFor(t *testing.T) {
	round := func() *workflows.Result {
		return &workflows.Result{
			Activities: 20,
			Ours: &workflows.Subject{Runs: 20, Took: time.Second, Hops: measure.Samples{5 * time.Millisecond}, IdleFor: time.Minute, Idle: 2,
				Rates: []workflows.Rate{{Workers: 1, Workflows: 10, Took: time.Second}}},
			Theirs: &workflows.Subject{Runs: 1, Took: time.Second, Hops: measure.Samples{130 * time.Millisecond}, IdleFor: time.Second, Idle: 20,
				Rates: []workflows.Rate{{Workers: 1, Workflows: 10, Took: time.Second}}},
		}
	}
	judge := func(w *workflows.Result) (missed []string) {
		for _, row := range (&results{Workflows: []*workflows.Result{w}}).workflowRows() {
			if row.goal != "" && !row.met {
				missed = append(missed, strings.TrimSpace(row.measure))
			}
		}
		return missed
	}
	assert.Empty(t, judge(round()))
	for missed, spoil := range map[string]func(*workflows.Result){
		"go-workflows, workflow of 20 activities one after the other: hop, p50": func(w *workflows.Result) { w.Ours.Hops = measure.Samples{6 * time.Millisecond} },
		"such workflows, one after the other: workflows/min":                    func(w *workflows.Result) { w.Ours.Runs = 19 },
		"idle worker, statements per minute":                                    func(w *workflows.Result) { w.Ours.Idle = 3 },
	} {
		w := round()
		spoil(w)
		assert.Equal(t, missed, strings.Join(judge(w), ","))
	}
	figures := (&results{Workflows: []*workflows.Result{round()}}).metrics()
	assert.Equal(t, 5.0, figures["workflow_hop_p50_ms"])
	assert.Equal(t, 20.0, figures["workflow_rate_ratio"])
	assert.Equal(t, 2.0, figures["workflow_idle_statements_per_min"])
}
