package taskgraph_test

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: which tasks are said to be stuck or stale, and what is done about it?

// enqueued gives a step of a task a work item, as if it had been enqueued, and returns the id of that.
func (l *lab) enqueued(task, step string) int64 {
	l.t.Helper()
	id := one[int64](l, `SELECT item_id FROM enqueue_work_many(ARRAY['handler'], ARRAY['{}'], NULL, p_instances => ARRAY[$1], p_executions => ARRAY[1::bigint], p_activities => ARRAY[1::bigint])`, task)
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued'], NULL, '{}', p_work_items => ARRAY[$2::bigint])`, l.step(task, step), id)
	return id
}

func (l *lab) claim(lease time.Duration) *pgwake.ClaimedWorkItem {
	l.t.Helper()
	item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true})
	require.NoError(l.t, err)
	return item
}

func TestFindStuckTasks_OldActiveStates_AreFoundUnlessSomebodyIsAtWork(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	for _, s := range taskgraph.TaskStates() {
		task := l.create("default", "work")
		l.bring(task, s)
		l.older(task, 11*time.Minute)
		l.bring(l.create("default", "work"), s) // not old
	}
	stuck := func() (states []taskgraph.TaskState) {
		t.Helper()
		tasks, err := l.StuckTasks(l.within(), 10*time.Minute)
		require.NoError(t, err)
		for _, s := range tasks {
			require.GreaterOrEqual(t, s.Minutes, 11)
			states = append(states, s.State)
		}
		return states
	}
	active := []taskgraph.TaskState{taskgraph.TaskInitializing, taskgraph.TaskEnqueuingSteps, taskgraph.TaskStepsInProcess, taskgraph.TaskEvaluatingResults}
	require.Equal(t, active, stuck())
	none, err := l.StuckTasks(l.within(), 12*time.Minute)
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = l.StuckTasks(l.within(), -time.Minute)
	require.ErrorIs(t, err, pgwake.ErrInvalid)

	long := one[string](l, `SELECT task_id::text FROM tasks WHERE state = 'steps_in_process' ORDER BY state_entered_at LIMIT 1`)
	l.exec(`DELETE FROM orchestrator_queue`)
	l.enqueued(long, "a")
	require.Equal(t, active, stuck(), "its work item is nobody's")
	item := l.claim(time.Minute)
	require.Equal(t, []taskgraph.TaskState{taskgraph.TaskInitializing, taskgraph.TaskEnqueuingSteps, taskgraph.TaskEvaluatingResults}, stuck(), "a step takes long")
	pgwaketest.Advance(t, l.p, 2*time.Minute)
	require.Equal(t, active, stuck(), "the lease has ended")
	require.ErrorIs(t, l.p.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)

	turn := one[string](l, `SELECT task_id::text FROM tasks WHERE state = 'evaluating_results' ORDER BY state_entered_at LIMIT 1`)
	l.exec(`INSERT INTO instance_locks (instance_id, lock_token, locked_until) VALUES ($1, gen_random_uuid(), clock_timestamp() + interval '1 min')`, turn)
	require.NotContains(t, stuck(), taskgraph.TaskEvaluatingResults, "somebody has its turn")

	child := l.create("default", "work")
	l.exec(`UPDATE tasks SET parent_task_id = $2 WHERE task_id = $1`, child, long)
	require.NotContains(t, stuck(), taskgraph.TaskStepsInProcess, "a step of it is a task that has not ended")
	l.bring(child, taskgraph.TaskCancelled)
	require.Contains(t, stuck(), taskgraph.TaskStepsInProcess)
}

// stale returns what DetectStaleTasks does, by task.
func (l *lab) stale(o *taskgraph.StaleOptions) map[string]taskgraph.StaleTask {
	l.t.Helper()
	tasks, err := l.DetectStaleTasks(l.within(), o)
	require.NoError(l.t, err)
	byID := make(map[string]taskgraph.StaleTask)
	for _, s := range tasks {
		byID[s.ID] = s
	}
	require.Len(l.t, byID, len(tasks))
	return byID
}

func TestDetectStaleTasks_EachThreshold_IsWarnedOfAndThenPassed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	l.define("default", "quick", "1", `{"lifecycle": {"max_waiting_for_dependencies_minutes": 5, "max_waiting_for_retry_minutes": 4.5,
		"max_steps_in_process_minutes": 3, "max_duration_minutes": 100}}`, "a")
	l.define("default", "slow", "1", `{"lifecycle": {"max_waiting_for_dependencies_minutes": 600, "max_waiting_for_retry_minutes": 600,
		"max_steps_in_process_minutes": 600, "max_duration_minutes": 6000}}`, "a")
	l.define("default", "durations", "1", `{"lifecycle": {"max_waiting_for_dependencies": "5m0s"}}`, "a")
	l.define("default", "odd", "1", `{"lifecycle": {"max_waiting_for_dependencies_minutes": "5", "max_waiting_for_retry_minutes": null}}`, "a")
	for _, c := range []struct {
		definition string
		state      taskgraph.TaskState
		minutes    float64
		rule       string
	}{
		{"work", taskgraph.TaskWaitingForDependencies, 60, "max_waiting_for_dependencies_minutes"},
		{"durations", taskgraph.TaskWaitingForDependencies, 5, "max_waiting_for_dependencies_minutes"},
		{"work", taskgraph.TaskWaitingForRetry, 30, "max_waiting_for_retry_minutes"},
		{"work", taskgraph.TaskStepsInProcess, 30, "max_steps_in_process_minutes"},
		{"work", taskgraph.TaskPending, 24 * 60, "max_duration_minutes"},
		{"work", taskgraph.TaskInitializing, 24 * 60, "max_duration_minutes"},
		{"work", taskgraph.TaskEnqueuingSteps, 24 * 60, "max_duration_minutes"},
		{"work", taskgraph.TaskEvaluatingResults, 24 * 60, "max_duration_minutes"},
		{"work", taskgraph.TaskBlockedByFailures, 24 * 60, "max_duration_minutes"},
		{"quick", taskgraph.TaskWaitingForDependencies, 5, "max_waiting_for_dependencies_minutes"},
		{"quick", taskgraph.TaskWaitingForRetry, 4.5, "max_waiting_for_retry_minutes"},
		{"quick", taskgraph.TaskStepsInProcess, 3, "max_steps_in_process_minutes"},
		{"quick", taskgraph.TaskBlockedByFailures, 100, "max_duration_minutes"},
		{"slow", taskgraph.TaskWaitingForDependencies, 600, "max_waiting_for_dependencies_minutes"},
		{"slow", taskgraph.TaskWaitingForRetry, 600, "max_waiting_for_retry_minutes"},
		{"slow", taskgraph.TaskStepsInProcess, 600, "max_steps_in_process_minutes"},
		{"odd", taskgraph.TaskWaitingForDependencies, 60, "max_waiting_for_dependencies_minutes"},
		{"odd", taskgraph.TaskWaitingForRetry, 30, "max_waiting_for_retry_minutes"},
	} {
		t.Run(fmt.Sprintf("%s/%s", c.definition, c.state), func(t *testing.T) {
			task := l.create("default", c.definition)
			l.bring(task, c.state)
			threshold := time.Duration(c.minutes * float64(time.Minute))
			l.older(task, threshold*79/100)
			require.Empty(t, l.stale(nil))
			l.older(task, threshold*2/100)
			warned := l.stale(&taskgraph.StaleOptions{Fail: true})[task]
			require.Equal(t, taskgraph.HealthWarning, warned.Health)
			require.Equal(t, "none", warned.Action)
			require.False(t, warned.Failed || warned.MovedToDLQ)
			l.older(task, threshold*20/100)
			found := l.stale(nil)[task]
			require.InDelta(t, c.minutes*1.01, found.Minutes, 0.1)
			require.InDelta(t, c.minutes*1.01, found.MinutesInState, 0.1)
			found.Minutes, found.MinutesInState = 0, 0
			require.Equal(t, taskgraph.StaleTask{ID: task, Namespace: "default", Name: c.definition, State: c.state, Rule: c.rule, Threshold: c.minutes,
				Health: taskgraph.HealthStale, Action: "would_transition_to_dlq_and_error"}, found)
			require.Equal(t, c.state, one[taskgraph.TaskState](l, `SELECT state FROM tasks WHERE task_id = $1`, task))

			ended := l.stale(&taskgraph.StaleOptions{Fail: true})[task]
			require.Equal(t, "transitioned_to_dlq_and_error", ended.Action)
			require.True(t, ended.Failed && ended.MovedToDLQ)
			require.Equal(t, c.state, ended.State)
			require.Equal(t, taskgraph.TaskError, one[taskgraph.TaskState](l, `SELECT state FROM tasks WHERE task_id = $1`, task))
			require.Equal(t, []string{"cancelled"}, all[string](l, `SELECT state FROM steps WHERE task_id = $1`, task))
			_, err := l.Replay(l.within(), task)
			require.NoError(t, err, "it went along edges that there are")
			require.Equal(t, 1, one[int](l, `SELECT count(*) FROM orchestrator_queue WHERE instance_id = $1 AND kind = 'ended'`, task), "its turn is to end the instance")
			require.Empty(t, l.stale(&taskgraph.StaleOptions{Fail: true}))
		})
	}
}

func TestDetectStaleTasks_SomethingIsToCome_IsNotStale(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := func(s taskgraph.TaskState) string {
		task := l.create("default", "work")
		l.bring(task, s)
		l.older(task, 2*time.Hour)
		return task
	}
	retry := task(taskgraph.TaskWaitingForRetry)
	l.exec(`UPDATE tasks SET next_ready_at = clock_timestamp() + interval '1 hour' WHERE task_id = $1`, retry)
	require.Empty(t, l.stale(nil), "the next attempt is to come")
	l.exec(`UPDATE tasks SET next_ready_at = clock_timestamp() - interval '31 min' WHERE task_id = $1`, retry)
	require.Equal(t, taskgraph.HealthStale, l.stale(nil)[retry].Health)
	l.hop(retry, taskgraph.TaskWaitingForRetry, taskgraph.TaskCancelled)

	later := l.create("default", "work")
	l.older(later, 48*time.Hour)
	l.exec(`UPDATE tasks SET start_at = clock_timestamp() + interval '1 hour' WHERE task_id = $1`, later)
	require.Empty(t, l.stale(nil), "it is to begin later")

	long := task(taskgraph.TaskStepsInProcess)
	require.Contains(t, l.stale(nil), long)
	l.enqueued(long, "a")
	require.Contains(t, l.stale(nil), long, "nobody takes its step")
	l.claim(time.Hour)
	require.Empty(t, l.stale(nil), "a step takes long")
	l.older(long, 24*time.Hour)
	require.Equal(t, "max_duration_minutes", l.stale(nil)[long].Rule, "but not for ever")
	l.hop(long, taskgraph.TaskStepsInProcess, taskgraph.TaskCancelled)

	for _, namespaces := range [][]string{{"default"}, nil} {
		paused := task(taskgraph.TaskWaitingForDependencies)
		require.Contains(t, l.stale(nil), paused)
		l.exec(`SELECT pause('orchestrator', $1)`, namespaces)
		require.Empty(t, l.stale(nil), "its namespace is paused")
		l.exec(`SELECT pause('orchestrator', $1, false)`, namespaces)
		require.Contains(t, l.stale(nil), paused)
		l.hop(paused, taskgraph.TaskWaitingForDependencies, taskgraph.TaskCancelled)
	}
}

// Nobody is at work at that instant, but somebody was, or something came, a moment ago.
func TestDetectStaleTasks_NobodyIsAtWorkSinceAMomentAgo_IsNotStale(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	long := l.create("default", "work")
	l.bring(long, taskgraph.TaskStepsInProcess)
	l.older(long, 2*time.Hour)
	l.enqueued(long, "a")
	l.claim(time.Hour)
	lost := func(ago time.Duration) {
		l.exec(`UPDATE worker_queue SET visible_at = clock_timestamp() - $2::interval WHERE instance_id = $1`, long, ago)
	}
	lost(29 * time.Minute)
	require.Equal(t, taskgraph.HealthWarning, l.stale(nil)[long].Health, "it was lost a while ago")
	lost(time.Minute)
	require.Empty(t, l.stale(nil), "it was lost a moment ago, as when the database was away, and others are to get it")
	lost(time.Hour)
	require.Equal(t, taskgraph.HealthStale, l.stale(nil)[long].Health)
	l.exec(`DELETE FROM orchestrator_queue`) // of its creation
	_, err := l.p.EnqueueForOrchestrator(l.within(), pgwake.Message{Instance: long, Kind: "step"}, nil)
	require.NoError(t, err)
	require.Empty(t, l.stale(nil), "a step has ended, and the turn is to come")
	l.exec(`UPDATE orchestrator_queue SET visible_at = clock_timestamp() - interval '1 hour' WHERE instance_id = $1`, long)
	require.Equal(t, taskgraph.HealthStale, l.stale(nil)[long].Health, "nobody takes turns")
}

// hop takes a task from one state to another in one transition.
func (l *lab) hop(task string, from, to taskgraph.TaskState) {
	l.t.Helper()
	require.True(l.t, one[bool](l, `SELECT transition_task($1, ARRAY[$2, $3], NULL, '{}', true)`, task, from, to))
}

func TestDetectStaleTasks_Thresholds_AreThoseOfTheCaller(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	tasks := make(map[taskgraph.TaskState]string)
	for _, s := range []taskgraph.TaskState{taskgraph.TaskWaitingForDependencies, taskgraph.TaskWaitingForRetry, taskgraph.TaskStepsInProcess, taskgraph.TaskPending} {
		tasks[s] = l.create("default", "work")
		l.bring(tasks[s], s)
		l.older(tasks[s], 25*time.Hour)
	}
	found := l.stale(&taskgraph.StaleOptions{WaitingForDependencies: 26 * time.Hour, WaitingForRetry: -1, StepsInProcess: 26*time.Hour - 30*time.Second, Lifetime: -1})
	require.Len(t, found, 2)
	require.Equal(t, taskgraph.HealthWarning, found[tasks[taskgraph.TaskWaitingForDependencies]].Health)
	require.InDelta(t, 26*60, found[tasks[taskgraph.TaskStepsInProcess]].Threshold, 1e-9)
	require.Len(t, l.stale(&taskgraph.StaleOptions{WaitingForDependencies: -1, WaitingForRetry: -1, StepsInProcess: -1}), 4)
	require.Len(t, l.stale(&taskgraph.StaleOptions{Limit: 3}), 3)
	for _, o := range []taskgraph.StaleOptions{{Limit: -1}, {Limit: 10_001}, {Lifetime: 200 * 365 * 24 * time.Hour}} {
		_, err := l.DetectStaleTasks(l.within(), &o)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	l.fails("PW003", `SELECT detect_and_transition_stale_tasks(p_batch_size => -1)`)
	l.fails("PW003", `SELECT detect_and_transition_stale_tasks(p_default_waiting_retry_threshold => -1)`)
	require.Empty(t, all[string](l, `SELECT task_id::text FROM task_dlq`))
}

// Those that are furthest over it come first, and warnings last.
func TestDetectStaleTasks_MoreThanTheLimit_WorstFirst(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	for _, minutes := range []int{50, 70, 90, 80} {
		task := l.create("default", "work")
		l.bring(task, taskgraph.TaskWaitingForDependencies)
		l.older(task, time.Duration(minutes)*time.Minute)
	}
	tasks, err := l.DetectStaleTasks(l.within(), nil)
	require.NoError(t, err)
	var minutes []int
	for _, s := range tasks {
		minutes = append(minutes, int(s.Minutes))
	}
	require.Equal(t, []int{90, 80, 70, 50}, minutes)
}

func TestDetectStaleTasks_SnapshotSaysWhatThereIsToSee(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b", "c")
	task := l.create("default", "work")
	l.bring(task, taskgraph.TaskStepsInProcess)
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued', 'in_progress', 'enqueued_for_orchestration', 'complete'], NULL, '{}')`, l.step(task, "a"))
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued', 'in_progress', 'enqueued_as_error_for_orchestration', 'error'], NULL, '{}', ARRAY['{"error": "no route", "retryable": false}'::jsonb])`, l.step(task, "b"))
	l.older(task, time.Hour)
	l.stale(&taskgraph.StaleOptions{Fail: true})
	entries, err := l.ListDLQ(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	e := entries[0]
	require.Equal(t, task, e.TaskID)
	require.Equal(t, taskgraph.DLQStaleness, e.Reason)
	require.Equal(t, taskgraph.TaskStepsInProcess, e.OriginalState)
	require.Equal(t, taskgraph.TaskError, e.State)
	var seen struct {
		Namespace, Version string
		TaskName           string                                `json:"task_name"`
		CurrentState       string                                `json:"current_state"`
		Minutes            float64                               `json:"time_in_state_minutes"`
		TotalSteps         int                                   `json:"total_steps"`
		StepsByState       map[string]int                        `json:"steps_by_state"`
		OpenSteps          []struct{ Name, State, Error string } `json:"open_steps"`
	}
	require.NoError(t, json.Unmarshal(e.Snapshot, &seen))
	require.Equal(t, []any{"default", "1", "work", "steps_in_process", 3}, []any{seen.Namespace, seen.Version, seen.TaskName, seen.CurrentState, seen.TotalSteps})
	require.InDelta(t, 60, seen.Minutes, 1)
	require.Equal(t, map[string]int{"complete": 1, "error": 1, "pending": 1}, seen.StepsByState)
	require.Equal(t, []struct{ Name, State, Error string }{{"b", "error", "no route"}, {"c", "pending", ""}}, seen.OpenSteps)
	require.JSONEq(t, `{"rule": "max_steps_in_process_minutes", "minutes": 60.0, "threshold_minutes": 30}`, string(e.Metadata))
}

func TestDetectStaleTasks_SomebodyHasTheRow_IsSkipped(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	task := l.create("default", "work")
	l.bring(task, taskgraph.TaskWaitingForDependencies)
	l.older(task, 2*time.Hour)
	other := session(t, l.p)
	tx, err := other.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM tasks FOR UPDATE`)
	require.NoError(t, err)
	found := l.stale(&taskgraph.StaleOptions{Fail: true})[task]
	require.Equal(t, "skipped", found.Action)
	require.False(t, found.Failed || found.MovedToDLQ)
	require.NoError(t, tx.Rollback(t.Context()))
	require.True(t, l.stale(&taskgraph.StaleOptions{Fail: true})[task].Failed)
}

func TestDetectStaleTasks_ManyNodesAtOnce_EachTaskFailsOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	const tasks, nodes = 40, 8
	for range tasks {
		task := l.create("default", "work")
		l.bring(task, taskgraph.TaskWaitingForDependencies)
		l.older(task, 2*time.Hour)
	}
	p := pool(t, l.p, nodes)
	var mu sync.Mutex
	failed := make(map[string]int)
	var wait sync.WaitGroup
	for range nodes {
		wait.Go(func() {
			for {
				var found []taskgraph.StaleTask
				err := l.apart(p, func(g *taskgraph.Graph) (err error) {
					found, err = g.DetectStaleTasks(t.Context(), &taskgraph.StaleOptions{Fail: true, Limit: 10})
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
				if len(found) == 0 {
					return
				}
				mu.Lock()
				for _, s := range found {
					if s.Failed {
						failed[s.ID]++
					}
				}
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	require.Len(t, failed, tasks)
	for task, n := range failed {
		require.Equal(t, 1, n, task)
	}
	require.Equal(t, tasks, one[int](l, `SELECT count(*) FROM task_dlq`))
}
