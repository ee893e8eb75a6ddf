package taskgraph_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: is what is reported of the past what happened, whether it was added up before or not?

func TestT56_Analytics_TaskIsCompleteByItsState_RatesArePercent(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("other", "unused", "1", `{}`)
	l.define("default", "work", "2", `{}`)
	d := l.define("default", "work", "1", `{}`, "a", "b", "c")
	done := map[string][]attempt{"a": {succeeded(time.Second)}, "b": {failed(9 * time.Second), succeeded(3 * time.Second)}, "c": {succeeded(2 * time.Second)}}
	l.was(past{d, 10 * time.Minute, 10 * time.Second, taskgraph.TaskComplete, done})
	l.was(past{d, 11 * time.Minute, 20 * time.Second, taskgraph.TaskComplete, done})
	l.was(past{d, 12 * time.Minute, 90 * time.Second, taskgraph.TaskError, map[string][]attempt{"a": {failed(time.Second)}}})
	l.was(past{d, 13 * time.Minute, 5 * time.Second, taskgraph.TaskStepsInProcess, map[string][]attempt{"a": {succeeded(4 * time.Second)}}}) // one of three done
	l.was(past{d, 90 * time.Minute, 500 * time.Second, taskgraph.TaskComplete, done})                                                        // before the hour
	l.was(past{d, 91 * time.Minute, 500 * time.Second, taskgraph.TaskError, nil})
	l.refreshed(func(t *testing.T) {
		m, err := l.AnalyticsMetrics(l.within(), time.Time{})
		require.NoError(t, err)
		require.InDelta(t, time.Hour.Seconds(), m.CalculatedAt.Sub(m.PeriodStart).Seconds(), 1)
		m.CalculatedAt, m.PeriodStart = time.Time{}, time.Time{}
		require.Equal(t, taskgraph.AnalyticsMetrics{
			ActiveTasks: 1, Namespaces: 2, TaskTypes: 2, HealthScore: 0.667, TaskThroughput: 4, Completions: 2, Errors: 1,
			CompletionRate: 50, ErrorRate: 25, AvgTaskSeconds: 15, AvgStepSeconds: 2.286, StepThroughput: 7,
		}, m)

		m, err = l.AnalyticsMetrics(l.within(), time.Now().Add(-3*time.Hour))
		require.NoError(t, err)
		require.EqualValues(t, 6, m.TaskThroughput)
		require.EqualValues(t, 3, m.Completions)
		require.EqualValues(t, 2, m.Errors)
		require.InDelta(t, 0.6, m.HealthScore, 1e-9)
	})
}

func TestAnalytics_NothingHappened_IsNotDividedByZero(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	m, err := l.AnalyticsMetrics(l.within(), time.Time{})
	require.NoError(t, err)
	m.CalculatedAt, m.PeriodStart = time.Time{}, time.Time{}
	require.Equal(t, taskgraph.AnalyticsMetrics{Namespaces: 1, HealthScore: 1}, m)
	steps, err := l.SlowestSteps(l.within(), nil)
	require.NoError(t, err)
	require.Empty(t, steps)
	tasks, err := l.SlowestTasks(l.within(), nil)
	require.NoError(t, err)
	require.Empty(t, tasks)
}

// It says so when more ends than begins.
func TestAnalytics_BacklogIsWorkedOff_RateIsOver100(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := l.define("default", "work", "1", `{}`)
	for range 3 {
		l.was(past{d, time.Minute, 3 * time.Hour, taskgraph.TaskComplete, nil})
	}
	l.was(past{d, time.Minute, time.Second, taskgraph.TaskComplete, nil})
	m, err := l.AnalyticsMetrics(l.within(), time.Time{})
	require.NoError(t, err)
	require.EqualValues(t, 1, m.TaskThroughput)
	require.InDelta(t, 400, m.CompletionRate, 1e-9)
}

func TestT57_SlowestSteps_AreInOrderAndFiltered(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d1 := l.define("billing", "invoice", "1", `{}`, "draw", "send", "never")
	d2 := l.define("billing", "invoice", "2", `{}`, "draw")
	d3 := l.define("shop", "order", "1", `{}`, "draw")
	l.was(past{d1, 2 * time.Hour, time.Minute, taskgraph.TaskComplete, map[string][]attempt{
		"draw": {succeeded(4 * time.Second)}, "send": {failed(time.Second), failed(3 * time.Second), succeeded(2 * time.Second)}}})
	l.was(past{d1, time.Hour, time.Minute, taskgraph.TaskError, map[string][]attempt{"draw": {failed(8 * time.Second)}, "send": {{0, taskgraph.StepError}}}})
	l.was(past{d2, time.Hour, time.Minute, taskgraph.TaskComplete, map[string][]attempt{"draw": {succeeded(20 * time.Second)}}})
	l.was(past{d3, 30 * time.Hour, time.Minute, taskgraph.TaskComplete, map[string][]attempt{"draw": {succeeded(50 * time.Second)}}})
	l.was(past{d3, time.Hour, time.Minute, taskgraph.TaskStepsInProcess, map[string][]attempt{"draw": {{0, taskgraph.StepError}}}})
	l.refreshed(func(t *testing.T) {
		slowest := func(f *taskgraph.SlowestFilter) []string {
			t.Helper()
			steps, err := l.SlowestSteps(l.within(), f)
			require.NoError(t, err)
			var rows []string
			for _, s := range steps {
				seconds := func(v *float64) string {
					if v == nil {
						return "-"
					}
					return fmt.Sprint(*v)
				}
				require.NotEmpty(t, s.DefinitionID)
				require.False(t, s.LastExecutedAt.IsZero())
				rows = append(rows, fmt.Sprintf("%s/%s/%s/%s avg %s max %s min %s runs %d errors %d rate %v",
					s.Namespace, s.TaskName, s.Version, s.Name, seconds(s.AvgSeconds), seconds(s.MaxSeconds), seconds(s.MinSeconds), s.Executions, s.Errors, s.ErrorRate))
			}
			return rows
		}
		all := []string{
			"billing/invoice/2/draw avg 20 max 20 min 20 runs 1 errors 0 rate 0",
			"billing/invoice/1/draw avg 6 max 8 min 4 runs 2 errors 1 rate 0.5",
			"billing/invoice/1/send avg 2 max 3 min 1 runs 4 errors 3 rate 0.75",
			"shop/order/1/draw avg - max - min - runs 1 errors 1 rate 1",
		}
		require.Equal(t, all, slowest(nil))
		require.Equal(t, all[:2], slowest(&taskgraph.SlowestFilter{Limit: 2}))
		require.Equal(t, all[:3], slowest(&taskgraph.SlowestFilter{Namespace: "billing"}))
		require.Equal(t, all[3:], slowest(&taskgraph.SlowestFilter{TaskName: "order"}))
		require.Equal(t, all[1:3], slowest(&taskgraph.SlowestFilter{Namespace: "billing", TaskName: "invoice", Version: "1"}))
		require.Empty(t, slowest(&taskgraph.SlowestFilter{Namespace: "billing", TaskName: "order"}))
		require.Equal(t, []string{
			"billing/invoice/2/draw avg 20 max 20 min 20 runs 1 errors 0 rate 0",
			"billing/invoice/1/draw avg 8 max 8 min 8 runs 1 errors 1 rate 1",
			"billing/invoice/1/send avg - max - min - runs 1 errors 1 rate 1",
			"shop/order/1/draw avg - max - min - runs 1 errors 1 rate 1",
		}, slowest(&taskgraph.SlowestFilter{Since: time.Now().Add(-90 * time.Minute)}))
		require.Equal(t, "shop/order/1/draw avg 50 max 50 min 50 runs 2 errors 1 rate 0.5", slowest(&taskgraph.SlowestFilter{Since: time.Now().Add(-40 * time.Hour)})[0])
		require.Empty(t, slowest(&taskgraph.SlowestFilter{Since: time.Now().Add(time.Hour)}))
	})
}

func TestT57_SlowestTasks_AreInOrderAndFiltered(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d1 := l.define("billing", "invoice", "1", `{}`, "a", "b", "c")
	d2 := l.define("billing", "invoice", "2", `{}`)
	d3 := l.define("shop", "order", "1", `{}`, "a")
	l.was(past{d1, 2 * time.Hour, 10 * time.Second, taskgraph.TaskComplete, nil})
	l.was(past{d1, time.Hour, 40 * time.Second, taskgraph.TaskError, nil})
	l.was(past{d1, time.Hour, 400 * time.Second, taskgraph.TaskCancelled, nil})        // is no execution
	l.was(past{d1, time.Hour, 400 * time.Second, taskgraph.TaskResolvedManually, nil}) // neither
	l.was(past{d2, time.Hour, 60 * time.Second, taskgraph.TaskComplete, nil})
	l.was(past{d3, 30 * time.Hour, 90 * time.Second, taskgraph.TaskComplete, nil})
	l.refreshed(func(t *testing.T) {
		slowest := func(f *taskgraph.SlowestFilter) []string {
			t.Helper()
			tasks, err := l.SlowestTasks(l.within(), f)
			require.NoError(t, err)
			var rows []string
			for _, s := range tasks {
				require.NotEmpty(t, s.DefinitionID)
				require.False(t, s.LastExecutedAt.IsZero())
				rows = append(rows, fmt.Sprintf("%s/%s/%s avg %v max %v min %v runs %d steps %v errors %d rate %v",
					s.Namespace, s.Name, s.Version, s.AvgSeconds, s.MaxSeconds, s.MinSeconds, s.Executions, s.AvgSteps, s.Errors, s.ErrorRate))
			}
			return rows
		}
		all := []string{
			"billing/invoice/2 avg 60 max 60 min 60 runs 1 steps 0 errors 0 rate 0",
			"billing/invoice/1 avg 25 max 40 min 10 runs 2 steps 3 errors 1 rate 0.5",
		}
		require.Equal(t, all, slowest(nil))
		require.Equal(t, all[:1], slowest(&taskgraph.SlowestFilter{Limit: 1}))
		require.Equal(t, all[1:], slowest(&taskgraph.SlowestFilter{Namespace: "billing", TaskName: "invoice", Version: "1"}))
		require.Empty(t, slowest(&taskgraph.SlowestFilter{Namespace: "shop"}))
		require.Equal(t, "shop/order/1 avg 90 max 90 min 90 runs 1 steps 1 errors 0 rate 0", slowest(&taskgraph.SlowestFilter{Since: time.Now().Add(-40 * time.Hour)})[0])
		require.Equal(t, "billing/invoice/1 avg 40 max 40 min 40 runs 1 steps 3 errors 1 rate 1", slowest(&taskgraph.SlowestFilter{Since: time.Now().Add(-90 * time.Minute)})[1])
	})
}

func TestSlowest_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, err := l.SlowestSteps(l.within(), &taskgraph.SlowestFilter{Limit: -1})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	_, err = l.SlowestTasks(l.within(), &taskgraph.SlowestFilter{Limit: 10_001})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	l.fails("PW003", `SELECT get_slowest_steps(p_limit_count => -1)`)
	l.fails("PW003", `SELECT get_slowest_tasks(p_limit_count => -1)`)
}

// What is counted of any window is what is in the tables, wherever the cursor is and the window begins within a bucket.
func TestSlowestSteps_AnyWindowAndAnyCursor_IsWhatIsInTheLog(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := l.define("default", "work", "1", `{}`, "a")
	rapid.Check(t, func(r *rapid.T) {
		for range rapid.IntRange(1, 4).Draw(r, "tasks") {
			ago := time.Duration(rapid.IntRange(0, 40*60).Draw(r, "seconds ago")) * time.Second
			took := time.Duration(rapid.IntRange(1, 900).Draw(r, "took")) * time.Second
			attempts := []attempt{succeeded(took / 3)}
			if rapid.Bool().Draw(r, "failed before") {
				attempts = []attempt{failed(took / 5), succeeded(took / 7)}
			}
			l.was(past{d, ago, took, taskgraph.TaskComplete, map[string][]attempt{"a": attempts}})
		}
		if most := rapid.IntRange(0, 12).Draw(r, "to refresh"); most > 0 {
			l.exec(`SELECT refresh_rollups($1)`, most)
		}
		since := time.Now().Add(-time.Duration(rapid.IntRange(0, 60*60).Draw(r, "window")) * time.Second)
		steps, err := l.SlowestSteps(l.within(), &taskgraph.SlowestFilter{Since: since})
		require.NoError(r, err)
		var runs, errors int64
		if len(steps) > 0 {
			runs, errors = steps[0].Executions, steps[0].Errors
		}
		require.Equal(r, one[int64](l, `SELECT count(*) FROM step_transitions WHERE from_state = 'in_progress' AND created_at >= $1`, since), runs)
		require.Equal(r, one[int64](l, `SELECT count(*) FROM step_transitions WHERE to_state = 'enqueued_as_error_for_orchestration' AND created_at >= $1`, since), errors)
		m, err := l.AnalyticsMetrics(l.within(), since)
		require.NoError(r, err)
		require.Equal(r, one[int64](l, `SELECT count(*) FROM tasks WHERE created_at >= $1`, since), m.TaskThroughput)
		require.Equal(r, one[int64](l, `SELECT count(*) FROM tasks WHERE completed_at >= $1`, since), m.Completions)
	})
}

// Each transition is counted once, by whom ever, although transactions commit late and tasks are purged meanwhile.
func TestRefreshRollups_AmongWritersAndPurges_EachTransitionIsCountedOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b")
	const writers, rounds = 4, 25
	p := pool(t, l.p, writers+2)
	ends := []taskgraph.TaskState{taskgraph.TaskComplete, taskgraph.TaskCancelled, taskgraph.TaskWaitingForRetry, taskgraph.TaskPending}
	var work, upkeep sync.WaitGroup
	for w := range writers {
		work.Go(func() {
			for i := range rounds {
				tx, err := p.Begin(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				var task string
				err = tx.QueryRow(t.Context(), `SELECT create_task('default', 'work', '1')::text`).Scan(&task)
				if err == nil {
					if i%3 == w%3 { // others commit in between
						_, err = tx.Exec(t.Context(), `SELECT pg_sleep(0.005)`)
					}
					if path := taskPath(ends[(i+w)%len(ends)]); err == nil && len(path) > 1 {
						_, err = tx.Exec(t.Context(), `SELECT transition_task($1, $2, NULL, '{}', true)`, task, path)
					}
				}
				if err == nil && i%5 == 0 {
					err = tx.Rollback(t.Context())
				} else if err == nil {
					err = tx.Commit(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	stop := make(chan struct{})
	for _, statement := range []string{
		`SELECT refresh_rollups(7)`,
		`WITH gone AS (DELETE FROM orchestrator_queue) SELECT purge_tasks(clock_timestamp() - interval '20 ms', 3)`,
	} {
		upkeep.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := p.Exec(t.Context(), statement); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	work.Wait()
	close(stop)
	upkeep.Wait()
	l.refreshed(func(t *testing.T) { l.requireCounts() })
	eventually(t, func() bool { // once transactions of others on the server have ended
		return one[int64](l, `SELECT count(*) FROM task_transitions`) == one[int64](l, `SELECT count(*) FROM read_transitions(p_limit => 1000000) WHERE workflow_step_uuid IS NULL`)
	})
}

func TestRefreshRollups_AnotherIsAtIt_ReturnsAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	l.create("default", "work")
	tx, err := l.conn.Begin(t.Context())
	require.NoError(t, err)
	refreshed := func() bool { // once transactions of others on the server have ended
		var n int
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT refresh_rollups()`).Scan(&n))
		return n == 1
	}
	eventually(t, refreshed)
	other, err := l.RefreshRollups(l.within())
	require.NoError(t, err)
	require.Zero(t, other)
	require.NoError(t, tx.Rollback(t.Context()))
	eventually(t, func() bool {
		other, err = l.RefreshRollups(l.within())
		return err == nil && other == 1
	})
}

func TestRefreshRollups_WhatIsOlderThan32Days_IsForgotten(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := l.define("default", "work", "1", `{}`)
	l.was(past{d, 33 * 24 * time.Hour, time.Second, taskgraph.TaskComplete, nil})
	l.was(past{d, 31 * 24 * time.Hour, time.Second, taskgraph.TaskComplete, nil})
	eventually(t, func() bool { // once transactions of others on the server have ended
		_, err := l.RefreshRollups(l.within())
		return err == nil && one[int](l, `SELECT coalesce(sum(runs), 0)::int FROM run_rollups`) == 1
	})
	l.requireCounts()
}

// What is removed is added up before, or nobody would know any more that it was there.
func TestPurge_RunsThatWereNotAddedUp_AreStillKnown(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.turns()
	l.ran(task, "a", `1`)
	l.turns()
	l.purged(1)
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM tasks) + (SELECT count(*) FROM steps) + (SELECT count(*) FROM task_transitions) + (SELECT count(*) FROM instances)`))
	l.refreshed(func(t *testing.T) {
		m, err := l.AnalyticsMetrics(l.within(), time.Time{})
		require.NoError(t, err)
		require.EqualValues(t, []int64{1, 1, 1}, []int64{m.TaskThroughput, m.Completions, m.StepThroughput})
		steps, err := l.SlowestSteps(l.within(), nil)
		require.NoError(t, err)
		require.Len(t, steps, 1)
		l.requireCounts()
	})

	// What cannot be added up yet stays.
	open, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = open.Exec(t.Context(), `SELECT pg_current_xact_id()`)
	require.NoError(t, err)
	l.bring(l.create("default", "work"), taskgraph.TaskCancelled)
	l.exec(`DELETE FROM orchestrator_queue`)
	require.Zero(t, one[int](l, `SELECT purge_tasks(clock_timestamp())`))
	require.NoError(t, open.Rollback(t.Context()))
	l.purged(1)
}

// restored makes the tables as if they were those of a server whose transactions have far higher numbers.
func (l *lab) restored() {
	l.t.Helper()
	const ahead = `(1000000000000 + xact::text::bigint)::text::xid8`
	l.exec(`UPDATE task_transitions SET xact = ` + ahead)
	l.exec(`UPDATE step_transitions SET xact = ` + ahead)
	l.exec(`UPDATE rollup_cursor SET xact = ` + ahead)
	l.exec(`UPDATE run_rollups SET first_xact = (1000000000000 + first_xact::text::bigint)::text::xid8, last_xact = (1000000000000 + last_xact::text::bigint)::text::xid8`)
}

func TestRefreshRollups_TablesWereRestoredFromAnotherServer_GoesOnFromThere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := l.define("default", "work", "1", `{}`, "a", "b")
	more := func() { // of everything
		l.was(past{d, time.Hour, time.Minute, taskgraph.TaskComplete, map[string][]attempt{"a": {succeeded(time.Second)}, "b": {failed(time.Second), succeeded(time.Second)}}})
		l.create("default", "work")
	}
	lived := func() { // as of now
		task := l.create("default", "work")
		l.turns()
		l.finish(l.begin(task, "a"), false, `{"error": "x", "retryable": false}`)
		l.ran(task, "b", `1`)
		l.turns()
	}
	check := func(t *testing.T) {
		t.Helper()
		l.requireCounts()
		m, err := l.AnalyticsMetrics(l.within(), time.Now().Add(-24*time.Hour))
		require.NoError(t, err)
		require.Equal(t, one[int64](l, `SELECT count(*) FROM tasks`), m.TaskThroughput)
		require.Equal(t, one[int64](l, `SELECT count(*) FROM tasks WHERE state = 'complete'`), m.Completions)
		require.Equal(t, one[int64](l, `SELECT count(*) FROM step_transitions WHERE from_state = 'in_progress' AND to_state = 'enqueued_for_orchestration'`), m.StepThroughput)
		steps, err := l.SlowestSteps(l.within(), &taskgraph.SlowestFilter{Since: time.Now().Add(-24 * time.Hour)})
		require.NoError(t, err)
		var runs int64
		for _, s := range steps {
			runs += s.Executions
		}
		require.Equal(t, one[int64](l, `SELECT count(*) FROM step_transitions WHERE from_state = 'in_progress'`), runs)
	}
	read := func(t *testing.T) {
		t.Helper()
		eventually(t, func() bool { // once transactions of others on the server have ended
			read, _ := l.readAll(taskgraph.Cursor{}, 7)
			last := make(map[string]int)
			for _, x := range read {
				of := x.TaskID
				if x.StepID != nil {
					of = *x.StepID
				}
				if last[of]++; last[of] != x.SortKey {
					t.Errorf("transition %d of %s came as number %d", x.SortKey, of, last[of])
				}
			}
			return len(read) == one[int](l, `SELECT (SELECT count(*) FROM task_transitions) + (SELECT count(*) FROM step_transitions)`)
		})
	}
	more()
	lived()
	l.refreshed(check)
	more()
	lived() // which the other server did not add up
	l.restored()
	lived() // and which this one has seen
	_, err := l.RefreshRollups(l.within())
	require.NoError(t, err)
	check(t)
	read(t)
	more()
	lived()
	check(t)
	l.refreshed(check)
	read(t)
}

// A turn that commits while tables that were restored are adopted is one of this server, and not one of the other.
func TestRefreshRollups_TurnsWhileRestoredTablesAreAdopted_KeepTheirNumbers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	l.create("default", "work")
	_, err := l.RefreshRollups(l.within())
	require.NoError(t, err)
	l.restored()
	other, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), `LOCK TABLE run_rollups IN EXCLUSIVE MODE`)
	require.NoError(t, err)
	adopted := l.meanwhile(`SELECT refresh_rollups()`)
	created, _ := l.beside(session(t, l.p), `SELECT create_task('default', 'work', '1', p_priority => 7)`)
	require.NoError(t, other.Commit(t.Context()))
	require.NoError(t, adopted())
	require.NoError(t, created())
	require.Equal(t, []string{"3", "its own"}, all[string](l, `SELECT CASE WHEN t.priority = 7 AND x.xact > '3' THEN 'its own' ELSE x.xact::text END FROM task_transitions x JOIN tasks t USING (task_id) ORDER BY t.priority`))
	l.refreshed(func(t *testing.T) { l.requireCounts() })
}
