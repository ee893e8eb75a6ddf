package taskgraph_test

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: is what is said of all tasks together what is there?

func TestT55_HealthScoreAndHeavyLoad(t *testing.T) {
	for name, c := range map[string]struct {
		counts taskgraph.SystemHealthCounts
		score  float64
		heavy  bool
	}{
		"no tasks":                       {taskgraph.SystemHealthCounts{ActiveConnections: 9, MaxConnections: 10}, 1, true},
		"no tasks, idle":                 {taskgraph.SystemHealthCounts{MaxConnections: 10}, 1, false},
		"all complete, idle":             {taskgraph.SystemHealthCounts{TotalTasks: 10, CompleteTasks: 10, MaxConnections: 10}, 1, false},
		"half in error, nearly full":     {taskgraph.SystemHealthCounts{TotalTasks: 10, CompleteTasks: 5, ErrorTasks: 5, ActiveConnections: 9, MaxConnections: 10}, 0.42, true},
		"exactly at both limits":         {taskgraph.SystemHealthCounts{TotalTasks: 10, CompleteTasks: 8, ErrorTasks: 2, ActiveConnections: 8, MaxConnections: 10}, 0.4 + 0.24 + 0.04, false},
		"over the limit of errors":       {taskgraph.SystemHealthCounts{TotalTasks: 100, CompleteTasks: 79, ErrorTasks: 21, MaxConnections: 10}, 0.395 + 0.237 + 0.2, true},
		"only pending":                   {taskgraph.SystemHealthCounts{TotalTasks: 10, PendingTasks: 10, MaxConnections: 10}, 0.5, false},
		"more connections than may be":   {taskgraph.SystemHealthCounts{TotalTasks: 10, CompleteTasks: 10, ActiveConnections: 12, MaxConnections: 10}, 0.8, true},
		"nobody knows how many may be":   {taskgraph.SystemHealthCounts{TotalTasks: 10, CompleteTasks: 10, ActiveConnections: 3}, 1, false},
		"nobody knows anything at all":   {taskgraph.SystemHealthCounts{}, 1, false},
		"all in error, all of them busy": {taskgraph.SystemHealthCounts{TotalTasks: 1, ErrorTasks: 1, ActiveConnections: 10, MaxConnections: 10}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			require.InDelta(t, c.score, c.counts.HealthScore(), 1e-9)
			require.False(t, math.IsNaN(c.counts.HealthScore()))
			require.Equal(t, c.heavy, c.counts.IsUnderHeavyLoad())
		})
	}
}

// counts are the fields of SystemHealthCounts by the names of their columns.
func counts(c taskgraph.SystemHealthCounts) map[string]int64 {
	byName := make(map[string]int64)
	for v, i := reflect.ValueOf(c), 0; i < v.NumField(); i++ {
		byName[v.Type().Field(i).Tag.Get("db")] = v.Field(i).Int()
	}
	return byName
}

// counted are the same, counted in the tables.
func (l *lab) counted() map[string]int64 {
	l.t.Helper()
	byName := map[string]int64{"total_tasks": 0, "total_steps": 0}
	for _, s := range taskgraph.TaskStates() {
		byName[string(s)+"_tasks"] = one[int64](l, `SELECT count(*) FROM tasks WHERE state = $1`, s)
		byName["total_tasks"] += byName[string(s)+"_tasks"]
	}
	for _, s := range taskgraph.StepStates() {
		byName[string(s)+"_steps"] = one[int64](l, `SELECT count(*) FROM steps WHERE state = $1`, s)
		byName["total_steps"] += byName[string(s)+"_steps"]
	}
	return byName
}

// requireCounts asserts that the counts are those of the tables.
func (l *lab) requireCounts() {
	l.t.Helper()
	c, err := l.SystemHealthCounts(l.within())
	require.NoError(l.t, err)
	got := counts(c)
	require.GreaterOrEqual(l.t, got["active_connections"], int64(1))
	require.GreaterOrEqual(l.t, got["max_connections"], got["active_connections"])
	delete(got, "active_connections")
	delete(got, "max_connections")
	require.Equal(l.t, l.counted(), got)
}

func TestSystemHealthCounts_TasksAndStepsInEveryState_AreCounted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b")
	l.requireCounts() // of nothing
	for i, s := range taskgraph.TaskStates() {
		for range i + 1 {
			l.bring(l.create("default", "work"), s)
		}
	}
	steps := all[string](l, `SELECT step_id::text FROM steps ORDER BY step_id`)
	for i, s := range taskgraph.StepStates() {
		for range i + 1 {
			if path := stepPath(s); len(path) > 1 {
				l.exec(`SELECT transition_steps(ARRAY[$1::uuid], $2, NULL, '{}')`, steps[0], path)
			}
			steps = steps[1:]
		}
	}
	c, err := l.SystemHealthCounts(l.within())
	require.NoError(t, err)
	for i, s := range taskgraph.TaskStates() {
		require.EqualValues(t, i+1, counts(c)[string(s)+"_tasks"], s)
	}
	require.EqualValues(t, 78, c.TotalTasks)
	require.EqualValues(t, 156, c.TotalSteps)
	l.refreshed(func(t *testing.T) { l.requireCounts() })
	l.bring(l.create("default", "work"), taskgraph.TaskCancelled)
	l.refreshed(func(t *testing.T) { l.requireCounts() })
}

func TestSystemHealthCounts_TasksArePurged_AreCountedNoMore(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b")
	for _, s := range []taskgraph.TaskState{taskgraph.TaskComplete, taskgraph.TaskCancelled, taskgraph.TaskPending, taskgraph.TaskComplete} {
		l.bring(l.create("default", "work"), s)
	}
	eventually(t, func() bool { // once transactions of others on the server have ended
		n, err := l.RefreshRollups(l.within())
		return err == nil && n > 0
	})
	l.bring(l.create("default", "work"), taskgraph.TaskResolvedManually) // which is in no rollup yet
	l.exec(`DELETE FROM orchestrator_queue`)
	l.purged(4)
	l.refreshed(func(t *testing.T) { l.requireCounts() })
	c, err := l.SystemHealthCounts(l.within())
	require.NoError(t, err)
	require.EqualValues(t, 1, c.TotalTasks)
}

func TestRecountStates_TablesWereChangedByHand_CountsAreRightAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	for range 3 {
		l.create("default", "work")
	}
	_, err := l.RefreshRollups(l.within())
	require.NoError(t, err)
	l.exec(`UPDATE tasks SET state = 'complete'`)
	l.exec(`UPDATE steps SET state = 'cancelled'`)
	l.create("default", "work") // after the cursor
	l.exec(`SELECT recount_states()`)
	l.refreshed(func(t *testing.T) { l.requireCounts() })
}

func TestSystemHealthCounts_RoleThatMayOnlyRead_IsAnswered(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	role := l.role(testroles.Reader)
	l.exec(`SET ROLE ` + role)
	connections := one[int](l, `SELECT active_connections FROM get_system_health_counts()`)
	reports := strings.Join(all[string](l, `SELECT 'analytics' FROM get_analytics_metrics() UNION ALL SELECT 'slow' FROM get_slowest_steps()`), " ")
	l.exec(`RESET ROLE`)
	require.GreaterOrEqual(t, connections, 1)
	require.Equal(t, "analytics", reports)
}

// purged purges all that has ended, once transactions of others on the server have that were open when it did.
func (l *lab) purged(want int) {
	l.t.Helper()
	n := 0
	eventually(l.t, func() bool { n += one[int](l, `SELECT purge_tasks(clock_timestamp())`); return n == want })
}
