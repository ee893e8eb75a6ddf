package taskgraph_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
)

// unknown is an id that nothing has.
const unknown = "ffffffff-ffff-ffff-ffff-ffffffffffff"

func TestT13_BackoffDelay_DoublesUpToTheCap(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for attempts, want := range []int{0, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60} {
		require.Equal(t, want, value[int](t, s, `SELECT calculate_backoff_delay($1)`, attempts), "%d attempts", attempts)
		require.Equal(t, want, model.Delay(attempts))
		require.Equal(t, time.Duration(want)*time.Second, taskgraph.StepReadiness{Attempts: attempts}.EffectiveBackoff())
	}
	for call, want := range map[string]int{
		`40`: 60, `2147483647`: 60, `2147483647, 1, 2147483647, 1000000`: 2147483647,
		`3, 0.5`: 4, `1, 0.3`: 1, `1, 5, 7`: 7, `1, 5, 7.9`: 7, `3, 0`: 0, `3, 1, 0`: 0, `5, 3, 60, 1`: 3,
		`100, 1, 60, 1.01`: 3, `1000, 1, 60, 1.01`: 60, // slow growth reaches the cap as well
	} {
		require.Equal(t, want, value[int](t, s, `SELECT calculate_backoff_delay(`+call+`)`), call)
	}
	for _, call := range []string{`-1`, `1, -1`, `1, 1, -1`, `1, 1, 60, 0.9`, `1, 'NaN'`, `1, 1, 'Infinity'`, `1, 1, 60, 'NaN'`} {
		_, err := s.pool.Exec(t.Context(), `SELECT calculate_backoff_delay(`+call+`)`)
		require.ErrorContains(t, err, "PW003", call)
	}
	require.Nil(t, value[*int](t, s, `SELECT calculate_backoff_delay(NULL)`))
}

func TestEffectiveBackoff_AskedForOrManyAttempts_IsThatOrAMinute(t *testing.T) {
	t.Parallel()
	seven := 7
	require.Equal(t, 7*time.Second, taskgraph.StepReadiness{Attempts: 3, BackoffSeconds: &seven}.EffectiveBackoff())
	require.Equal(t, time.Minute, taskgraph.StepReadiness{Attempts: 1 << 30}.EffectiveBackoff())
	require.Zero(t, taskgraph.StepReadiness{}.EffectiveBackoff())
}

func TestBlockingReason_EachCombination_IsTheFirstThatApplies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		satisfied, eligible, ready bool
		state                      taskgraph.StepState
		want                       taskgraph.BlockingReason
	}{
		{true, true, true, "pending", taskgraph.NotBlocked},
		{false, false, true, "error", taskgraph.NotBlocked}, // ready comes first
		{false, false, false, "error", taskgraph.DependenciesNotSatisfied},
		{true, false, false, "error", taskgraph.RetryNotEligible},
		{true, true, false, "waiting_for_retry", taskgraph.BackoffNotElapsed},
		{true, true, false, "pending", taskgraph.BackoffNotElapsed},
		{true, true, false, "complete", taskgraph.InvalidState},
	} {
		r := taskgraph.StepReadiness{State: c.state, DependenciesSatisfied: c.satisfied, RetryEligible: c.eligible, Ready: c.ready}
		require.Equal(t, c.want, r.BlockingReason(), "%+v", c)
		require.Equal(t, c.ready, r.CanExecuteNow())
	}
}

func TestT16_FewAttempts_TheFirstIsMadeAndNoOther(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for name, step := range map[string]model.Step{
		"not retryable": {MaxAttempts: 3},
		"no attempts":   {Retryable: true, MaxAttempts: 0},
		"one attempt":   {Retryable: true, MaxAttempts: 1},
	} {
		first, second := step, step
		first.State = "pending"
		second.State, second.Attempts, second.NextAttempt = "waiting_for_retry", 1, instant(-time.Minute)
		p := s.insert(t, model.Task{Steps: []model.Step{first, second}})[0]
		found, err := s.StepReadiness(t.Context(), p.id)
		require.NoError(t, err)
		require.Len(t, found, 2)
		for _, r := range found {
			before := p.place(r.StepID) == 0
			require.Equal(t, before, r.RetryEligible, name)
			require.Equal(t, before, r.Ready, name)
			if !before {
				require.Equal(t, taskgraph.RetryNotEligible, r.BlockingReason())
			}
		}
	}
}

func TestStepReadiness_Backoff_IsReadyAtTheStoredInstantOrElseAtTheOneCalculated(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	ten, zero := 10, 0
	waiting := func(change func(*model.Step)) model.Step {
		step := oneStep("waiting_for_retry")
		step.Attempts = 2
		change(&step)
		return step
	}
	task := model.Task{State: "waiting_for_retry", Steps: []model.Step{
		waiting(func(s *model.Step) { s.NextAttempt = instant(time.Hour) }),
		waiting(func(s *model.Step) {
			s.NextAttempt = instant(-time.Hour)
			s.Backoff, s.LastAttempt = &ten, instant(time.Hour)
		}),
		waiting(func(s *model.Step) { s.Backoff, s.LastAttempt = &ten, instant(-time.Second) }),
		waiting(func(s *model.Step) { s.Backoff, s.LastAttempt = &zero, instant(-time.Second) }),
		waiting(func(s *model.Step) { s.LastFailure = instant(-time.Second) }), // 4 s after that
		waiting(func(s *model.Step) { s.LastFailure = instant(-time.Minute) }),
		waiting(func(s *model.Step) { s.Backoff, s.LastFailure = &ten, instant(-time.Second) }), // after no known attempt
		waiting(func(s *model.Step) { s.Attempts = 0; s.LastFailure = instant(-time.Second) }),  // reset
	}}
	p := s.insert(t, task)[0]
	found, err := s.StepReadiness(t.Context(), p.id)
	require.NoError(t, err)
	for i, want := range []bool{false, true, false, true, false, true, false, true} {
		for _, r := range found {
			if p.place(r.StepID) != i {
				continue
			}
			require.Equal(t, want, r.Ready, "step %d: %+v", i, r)
			if !want {
				require.Equal(t, taskgraph.BackoffNotElapsed, r.BlockingReason())
			}
			require.Equal(t, task.Steps[i].NextRetry().UTC(), r.NextRetryAt.UTC(), "step %d", i)
		}
	}
}

func TestStepReadiness_ConditionOnAResult_HoldsOrItIsNotSatisfied(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	done := oneStep("complete")
	done.Result = map[string]int{"n": 3}
	child := func(parent int, want int) model.Step {
		step := oneStep("pending")
		step.Parents = []model.Parent{{Step: parent, Condition: &model.Condition{Key: "n", Want: want}}}
		return step
	}
	p := s.insert(t, model.Task{Steps: []model.Step{done, oneStep("complete"), oneStep("in_progress"), child(0, 3), child(0, 4), child(1, 3), child(2, 3)}})[0]
	for i, want := range map[int]bool{3: true, 4: false, 5: false, 6: false} {
		satisfied, err := s.CheckDependencies(t.Context(), p.steps[i])
		require.NoError(t, err)
		require.Equal(t, want, satisfied, "step %d", i)
	}
	found, err := s.StepReadiness(t.Context(), p.id, p.steps[4])
	require.NoError(t, err)
	require.Equal(t, 1, found[0].CompletedParents)
	require.Equal(t, taskgraph.DependenciesNotSatisfied, found[0].BlockingReason())
}

func TestStepReadiness_ParentInEachState_OnlyCompleteAndResolvedSatisfy(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, state := range model.StepStates {
		p := s.insert(t, model.Task{Steps: []model.Step{oneStep(state), oneStep("pending", 0)}})[0]
		satisfied, err := s.CheckDependencies(t.Context(), p.steps[1])
		require.NoError(t, err)
		require.Equal(t, state == "complete" || state == "resolved_manually", satisfied, state)
		ready, err := s.ReadySteps(t.Context(), p.id)
		require.NoError(t, err)
		for _, r := range ready {
			if place := p.place(r.StepID); place == 0 {
				require.Contains(t, []string{"pending", "waiting_for_retry"}, state)
			} else {
				require.True(t, satisfied)
			}
		}
	}
}

func TestT51_SomeStepsAskedFor_HaveTheSameRowsAsAmongAll(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, model.Task{Steps: []model.Step{oneStep("complete"), oneStep("complete"), oneStep("pending", 0, 1), oneStep("pending", 2)}})[0]
	other := s.insert(t, chain(2))[0]
	all, err := s.StepReadiness(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, all, 4)
	for i, want := range all {
		found, err := s.StepReadiness(t.Context(), p.id, want.StepID)
		require.NoError(t, err)
		require.Equal(t, []taskgraph.StepReadiness{want}, found)
		require.Equal(t, p.place(want.StepID) == 2, want.Ready, "step %d", i)
	}
	found, err := s.StepReadiness(t.Context(), p.id, p.steps[2], other.steps[0], unknown, p.steps[2])
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.True(t, found[0].Ready)
	found, err = s.StepReadiness(t.Context(), p.id, []string{}...)
	require.NoError(t, err)
	require.Empty(t, found, "no steps were asked for")
}

func TestT54_UnknownIDs_AreNoRowOrNotFound(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	ctx := t.Context()
	for name, none := range map[string]func() (int, error){
		"readiness": func() (int, error) { found, err := s.StepReadiness(ctx, unknown); return len(found), err },
		"readiness of many": func() (int, error) {
			found, err := s.StepReadinessMany(ctx, []string{unknown})
			return len(found), err
		},
		"ready steps": func() (int, error) { found, err := s.ReadySteps(ctx, unknown); return len(found), err },
		"levels":      func() (int, error) { found, err := s.DependencyLevels(ctx, unknown); return len(found), err },
		"ancestors":   func() (int, error) { found, err := s.TransitiveDependencies(ctx, unknown); return len(found), err },
		"results":     func() (int, error) { found, err := s.DependencyResults(ctx, unknown); return len(found), err },
		"contexts": func() (int, error) {
			found, err := s.ExecutionContexts(ctx, []string{unknown})
			return len(found), err
		},
		"next tasks": func() (int, error) { found, err := s.NextReadyTasks(ctx, 5); return len(found), err },
	} {
		n, err := none()
		require.NoError(t, err, name)
		require.Zero(t, n, name)
	}
	for name, call := range map[string]func() error{
		"dependencies": func() error { _, err := s.CheckDependencies(ctx, unknown); return err },
		"depth":        func() error { _, err := s.StepDepth(ctx, unknown); return err },
		"context":      func() error { _, err := s.ExecutionContext(ctx, unknown); return err },
		"ready info":   func() error { _, err := s.TaskReadyInfo(ctx, unknown); return err },
	} {
		err := call()
		require.ErrorIs(t, err, pgwake.ErrNotFound, name)
		require.ErrorAs(t, err, new(*pgwake.Error))
		require.ErrorContains(t, err, unknown, name)
	}
	_, err := s.NextReadyTask(ctx)
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	cycle, err := s.DetectCycle(ctx, unknown, theStep)
	require.NoError(t, err)
	require.False(t, cycle)
	require.Nil(t, value[*string](t, s, `SELECT get_current_task_state($1)`, unknown))
	_, err = s.CurrentTaskState(ctx, unknown)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, _, err = s.Finalize(ctx, unknown)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	didNot(t)(s.TransitionTask(ctx, unknown, taskgraph.TaskPending, taskgraph.TaskInitializing, ""))
	didNot(t)(s.TransitionStep(ctx, unknown, taskgraph.StepEnqueued, taskgraph.StepInProgress, ""))
}

func TestReadinessVerbs_IDsThatAreNone_AreInvalid(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"readiness":    func() error { _, err := s.StepReadiness(ctx, "x"); return err },
		"steps":        func() error { _, err := s.StepReadiness(ctx, unknown, "x"); return err },
		"many":         func() error { _, err := s.StepReadinessMany(ctx, []string{"x"}); return err },
		"dependencies": func() error { _, err := s.CheckDependencies(ctx, "x"); return err },
		"cycle":        func() error { _, err := s.DetectCycle(ctx, "x", unknown); return err },
		"results":      func() error { _, err := s.DependencyResults(ctx, ""); return err },
		"context":      func() error { _, err := s.ExecutionContext(ctx, "x"); return err },
		"ready info":   func() error { _, err := s.TaskReadyInfo(ctx, "x"); return err },
		"limit":        func() error { _, err := s.NextReadyTasks(ctx, -1); return err },
	} {
		require.ErrorIs(t, call(), pgwake.ErrInvalid, name)
	}
}

func TestStepReadinessMany_SeveralTasks_AreInTheOrderOfTaskAndStep(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	puts := s.insert(t, chain(3), chain(2), model.Task{}, chain(1))
	var ids []string
	for _, p := range puts {
		ids = append(ids, p.id, p.id, unknown) // what is named twice is told of once
	}
	found, err := s.StepReadinessMany(t.Context(), ids)
	require.NoError(t, err)
	require.Len(t, found, 6)
	for i := 1; i < len(found); i++ {
		require.Less(t, fmt.Sprint(found[i-1].TaskID, found[i-1].StepID), fmt.Sprint(found[i].TaskID, found[i].StepID))
	}
}
