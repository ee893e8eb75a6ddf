package taskgraph_test

import (
	"flag"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: do the SQL functions say what the model says, of one task and of many?

// checkRounds runs a property on random cases: a thousand at full size, or as many as PGWAKE_ROUNDS says, rounded up to what rapid checks at a time.
func checkRounds(t *testing.T, property func(*rapid.T)) {
	t.Helper()
	rounds := testsize.Of(120, 1000)
	if text := os.Getenv("PGWAKE_ROUNDS"); text != "" {
		n, err := strconv.Atoi(text)
		require.NoError(t, err, "PGWAKE_ROUNDS")
		require.Positive(t, n, "PGWAKE_ROUNDS")
		rounds = n
	}
	each, err := strconv.Atoi(flag.Lookup("rapid.checks").Value.String())
	require.NoError(t, err)
	for range (rounds + each - 1) / each {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, property)
		})
	}
}

func TestT52_RandomTasks_SingleBatchFilterAndModelAgree(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	checkRounds(t, func(t *rapid.T) {
		tasks := rapid.SliceOfN(rapid.Custom(drawTask), 1, 3).Draw(t, "tasks")
		now := time.Now()
		puts := s.insert(t, tasks...)
		var ids []string
		for _, p := range puts {
			ids = append(ids, p.id)
		}
		many, err := s.StepReadinessMany(t.Context(), ids)
		require.NoError(t, err)
		contexts, err := s.ExecutionContexts(t.Context(), ids)
		require.NoError(t, err)
		require.Len(t, contexts, len(tasks))
		for n, p := range puts {
			requireReadiness(t, s, tasks[n], p, many, now)
			requireContext(t, s, tasks[n], p, contexts, now)
			requireDAG(t, s, tasks[n], p)
		}
	})
}

// requireReadiness compares what is said of the steps of a task, by itself, by way of a filter and among many, with the model.
func requireReadiness(t *rapid.T, s *stage, task model.Task, p put, many []taskgraph.StepReadiness, now time.Time) {
	t.Helper()
	single, err := s.StepReadiness(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, single, len(task.Steps))
	asked := rapid.SliceOfDistinct(rapid.IntRange(0, max(0, len(p.steps)-1)), rapid.ID[int]).Draw(t, "asked")
	var ids []string
	for _, i := range asked {
		if i < len(p.steps) {
			ids = append(ids, p.steps[i])
		}
	}
	filtered, err := s.StepReadiness(t.Context(), p.id, append([]string{}, ids...)...)
	require.NoError(t, err)
	ready, err := s.ReadySteps(t.Context(), p.id)
	require.NoError(t, err)
	var batch, wantFiltered, wantReady []taskgraph.StepReadiness
	for _, r := range many {
		if r.TaskID == p.id {
			batch = append(batch, r)
		}
	}
	for n, i := range p.byID() {
		step, got, want := task.Steps[i], single[n], task.Readiness(i, now)
		require.Equal(t, p.steps[i], got.StepID)
		require.Equal(t, taskgraph.StepState(step.State), got.State)
		require.Equal(t, want.Satisfied, got.DependenciesSatisfied, "step %d", i)
		require.Equal(t, want.Eligible, got.RetryEligible, "step %d", i)
		require.Equal(t, want.Ready, got.Ready, "step %d", i)
		require.Equal(t, want.Parents, got.TotalParents, "step %d", i)
		require.Equal(t, want.CompletedParents, got.CompletedParents, "step %d", i)
		requireInstant(t, want.NextRetry, got.NextRetryAt)
		requireInstant(t, step.LastFailure, got.LastFailureAt)
		requireInstant(t, step.LastAttempt, got.LastAttemptAt)
		require.Equal(t, []any{step.Attempts, step.MaxAttempts, step.Backoff}, []any{got.Attempts, got.MaxAttempts, got.BackoffSeconds})
		require.Equal(t, want.Ready, got.BlockingReason() == taskgraph.NotBlocked)
		for _, id := range ids {
			if id == got.StepID {
				wantFiltered = append(wantFiltered, got)
			}
		}
		if got.Ready {
			wantReady = append(wantReady, got)
		}
	}
	require.ElementsMatch(t, single, batch)
	require.Equal(t, len(wantFiltered), len(filtered))
	for i := range wantFiltered {
		require.Equal(t, wantFiltered[i], filtered[i])
	}
	require.Equal(t, len(wantReady), len(ready))
	for i := range wantReady {
		require.Equal(t, wantReady[i], ready[i])
	}
	info, err := s.TaskReadyInfo(t.Context(), p.id)
	require.NoError(t, err)
	require.Equal(t, len(ready), info.Ready)
}

func requireContext(t *rapid.T, s *stage, task model.Task, p put, many []taskgraph.ExecutionContext, now time.Time) {
	t.Helper()
	got, err := s.ExecutionContext(t.Context(), p.id)
	require.NoError(t, err)
	require.Contains(t, many, *got)
	want := task.Context(now)
	require.Equal(t, []int{want.Total, want.Counts["pending"], want.Enqueued, want.Counts["in_progress"], want.Counts["waiting_for_retry"], want.Closed,
		want.Counts["error"], want.Counts["cancelled"], want.Ready, want.Blocked},
		[]int{got.Total, got.Pending, got.Enqueued, got.InProgress, got.WaitingForRetry, got.Completed, got.Failed, got.Cancelled, got.Ready, got.PermanentlyBlocked})
	require.Equal(t, []string{task.State, want.Status, want.Action, want.Health},
		[]string{string(got.State), string(got.ExecutionStatus), string(got.RecommendedAction), string(got.Health)})
	require.InDelta(t, want.Completion, got.Completion, 0.001)
	requireInstant(t, want.NextReady, got.NextReadyAt)
}

func requireDAG(t *rapid.T, s *stage, task model.Task, p put) {
	t.Helper()
	levels, err := s.DependencyLevels(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, levels, len(task.Steps))
	want := task.Levels()
	for i, l := range levels {
		require.Equal(t, want[p.place(l.StepID)], l.Level)
		if before := max(0, i-1); l.Level >= 0 && before < i {
			require.LessOrEqual(t, levels[before].Level, l.Level)
		}
	}
	if len(task.Steps) == 0 {
		return
	}
	step := rapid.IntRange(0, len(task.Steps)-1).Draw(t, "step")
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[step])
	require.NoError(t, err)
	distances := make(map[int]int)
	for _, a := range ancestors {
		distances[p.place(a.StepID)] = a.Distance
	}
	require.Len(t, ancestors, len(distances), "each once")
	require.Equal(t, task.Ancestors(step), distances)
	if want[step] >= 0 {
		depth, err := s.StepDepth(t.Context(), p.steps[step])
		require.NoError(t, err)
		require.Equal(t, want[step], depth)
	}
	other := rapid.IntRange(0, len(task.Steps)-1).Draw(t, "other")
	cycle, err := s.DetectCycle(t.Context(), p.steps[step], p.steps[other])
	require.NoError(t, err)
	require.Equal(t, task.ClosesCycle(step, other), cycle)
}

func requireInstant(t *rapid.T, want, got *time.Time) {
	t.Helper()
	require.Equal(t, want == nil, got == nil, "%v, and it is %v", want, got)
	if want != nil {
		require.Equal(t, want.UTC(), got.UTC())
	}
}

// drawTask draws a task of up to 9 steps in any states, one in ten with a cycle. Instants are minutes from now or more, so
// that it does not matter when exactly they are looked at.
func drawTask(t *rapid.T) model.Task {
	task := model.Task{State: rapid.SampledFrom(model.TaskStates).Draw(t, "state"), Steps: make([]model.Step, rapid.IntRange(0, 9).Draw(t, "steps"))}
	cyclic := rapid.IntRange(0, 9).Draw(t, "cyclic") == 0
	moment := func(name string) *time.Time {
		switch rapid.IntRange(0, 2).Draw(t, name) {
		case 1:
			return instant(-time.Duration(rapid.IntRange(10, 100).Draw(t, "ago")) * time.Minute)
		case 2:
			return instant(time.Duration(rapid.IntRange(10, 100).Draw(t, "ahead")) * time.Minute)
		}
		return nil
	}
	for i := range task.Steps {
		// Most are such that what depends on them is not simply blocked.
		state := rapid.OneOf(rapid.SampledFrom(model.StepStates), rapid.SampledFrom([]string{"pending", "complete", "complete", "waiting_for_retry"}))
		step := model.Step{
			State: state.Draw(t, "step state"), Attempts: rapid.IntRange(0, 4).Draw(t, "attempts"), MaxAttempts: rapid.IntRange(0, 4).Draw(t, "max attempts"),
			Retryable:   rapid.IntRange(0, 3).Draw(t, "retryable") > 0,
			LastAttempt: moment("last attempt"), NextAttempt: moment("next attempt"), LastFailure: moment("last failure"),
		}
		if seconds := rapid.IntRange(0, 5).Draw(t, "backoff"); seconds > 0 {
			seconds = (seconds - 1) * 1200
			step.Backoff = &seconds
		}
		if n := rapid.IntRange(0, 3).Draw(t, "result"); n > 0 {
			step.Result = map[string]int{[]string{"", "n", "n", "other"}[n]: n}
		}
		for parent := range task.Steps {
			if parent >= i && !cyclic || parent == i || rapid.IntRange(0, 2).Draw(t, "parent") > 0 {
				continue
			}
			p := model.Parent{Step: parent}
			if rapid.IntRange(0, 4).Draw(t, "conditional") == 0 {
				p.Condition = &model.Condition{Key: "n", Want: rapid.IntRange(1, 2).Draw(t, "want")}
			}
			step.Parents = append(step.Parents, p)
			if rapid.IntRange(0, 9).Draw(t, "twice") == 0 {
				step.Parents = append(step.Parents, model.Parent{Step: parent})
			}
		}
		task.Steps[i] = step
	}
	return task
}
