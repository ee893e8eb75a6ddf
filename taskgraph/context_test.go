package taskgraph_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
)

func (s *stage) context(t *testing.T, task model.Task) *taskgraph.ExecutionContext {
	t.Helper()
	c, err := s.ExecutionContext(t.Context(), s.insert(t, task)[0].id)
	require.NoError(t, err)
	return c
}

// backoff is a step that may be tried again at an instant.
func backoff(at time.Duration) model.Step {
	step := oneStep("waiting_for_retry")
	step.Attempts, step.NextAttempt = 1, instant(at)
	return step
}

func TestT18_OkErrorAndRetryDue_IsBlockedAndTellsWhatCouldRun(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	c := s.context(t, model.Task{State: "waiting_for_retry", Steps: []model.Step{oneStep("complete"), oneStep("error"), backoff(-time.Minute)}})
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
	require.Equal(t, taskgraph.HandleFailures, c.RecommendedAction)
	require.Equal(t, taskgraph.Blocked, c.Health)
	require.Equal(t, 1, c.Ready)
	require.Equal(t, 1, c.PermanentlyBlocked)
	require.InDelta(t, 33.33, c.Completion, 0)
}

func TestT15_ErrorWithAttemptsLeft_IsPermanentAllTheSame(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	failed := oneStep("error")
	failed.Attempts = 1
	c := s.context(t, model.Task{State: "steps_in_process", Steps: []model.Step{failed}})
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
}

func TestT19_OnlyBackoffLeft_WaitsAndTellsUntilWhen(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	task := model.Task{State: "waiting_for_retry", Steps: []model.Step{oneStep("complete"), backoff(2 * time.Hour), backoff(time.Hour), oneStep("pending", 1)}}
	c := s.context(t, task)
	require.Equal(t, taskgraph.TaskState("waiting_for_retry"), c.State)
	require.Equal(t, taskgraph.WaitingForDependencies, c.ExecutionStatus)
	require.Equal(t, taskgraph.WaitForDependencies, c.RecommendedAction)
	require.Equal(t, taskgraph.Recovering, c.Health)
	require.Equal(t, 2, c.WaitingForRetry)
	require.Zero(t, c.Ready)
	require.NotNil(t, c.NextReadyAt)
	require.Equal(t, task.Steps[2].NextAttempt.UTC(), c.NextReadyAt.UTC())
}

func TestT26_CancelledStepWithAChild_BlocksAndDoesNotWaitForever(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	task := model.Task{State: "waiting_for_dependencies", Steps: []model.Step{oneStep("complete"), oneStep("cancelled"), oneStep("pending", 1)}}
	c := s.context(t, task)
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
	require.Equal(t, taskgraph.HandleFailures, c.RecommendedAction)
	require.Equal(t, 1, c.PermanentlyBlocked)

	c = s.context(t, model.Task{State: "steps_in_process", Steps: steps(3, "cancelled")})
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus, "every step")

	c = s.context(t, model.Task{State: "cancelled", Steps: []model.Step{oneStep("complete"), oneStep("cancelled")}})
	require.Zero(t, c.PermanentlyBlocked, "the task has ended")
	require.Equal(t, taskgraph.AllComplete, c.ExecutionStatus)
	require.InDelta(t, 50, c.Completion, 0)
	require.Equal(t, taskgraph.Healthy, c.Health)
}

func TestT53_AStepInEachState_IsCountedOnce(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	task := model.Task{State: "steps_in_process"}
	for _, state := range model.StepStates {
		task.Steps = append(task.Steps, oneStep(state))
	}
	c := s.context(t, task)
	require.Equal(t, 10, c.Total)
	require.Equal(t, c.Total, c.Pending+c.Enqueued+c.InProgress+c.WaitingForRetry+c.Completed+c.Failed+c.Cancelled)
	require.Equal(t, 3, c.Enqueued, "with both that a turn is to look at")
	require.Equal(t, 2, c.Completed, "with resolved_manually")
	for _, n := range []int{c.Pending, c.InProgress, c.WaitingForRetry, c.Failed, c.Cancelled} {
		require.Equal(t, 1, n)
	}
	require.Equal(t, 2, c.PermanentlyBlocked)
	require.Equal(t, 2, c.Ready, "pending, and waiting_for_retry without an instant")
	require.InDelta(t, 20, c.Completion, 0)
}

func TestExecutionContext_EachStatus_IsTheFirstThatApplies(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	tried := oneStep("pending")
	tried.Attempts = 1
	for _, c := range []struct {
		name   string
		steps  []model.Step
		status taskgraph.ExecutionStatus
		action taskgraph.RecommendedAction
		health taskgraph.TaskHealth
		done   float64
	}{
		{"no steps", nil, taskgraph.AllComplete, taskgraph.FinalizeTask, taskgraph.Healthy, 100},
		{"all done", []model.Step{oneStep("complete"), oneStep("resolved_manually")}, taskgraph.AllComplete, taskgraph.FinalizeTask, taskgraph.Healthy, 100},
		{"ready and in progress", []model.Step{oneStep("pending"), oneStep("in_progress")}, taskgraph.HasReadySteps, taskgraph.ExecuteReadySteps, taskgraph.Healthy, 0},
		{"tried before", []model.Step{tried, oneStep("complete")}, taskgraph.HasReadySteps, taskgraph.ExecuteReadySteps, taskgraph.Recovering, 50},
		{"in progress", []model.Step{oneStep("in_progress"), oneStep("pending", 0)}, taskgraph.Processing, taskgraph.WaitForCompletion, taskgraph.Healthy, 0},
		{"with a result", []model.Step{oneStep("enqueued_as_error_for_orchestration"), oneStep("pending", 0)}, taskgraph.Processing, taskgraph.WaitForCompletion, taskgraph.Healthy, 0},
		{"in a cycle", []model.Step{oneStep("pending", 1), oneStep("pending", 0)}, taskgraph.WaitingForDependencies, taskgraph.WaitForDependencies, taskgraph.Healthy, 0},
	} {
		got := s.context(t, model.Task{State: "evaluating_results", Steps: c.steps})
		require.Equal(t, c.status, got.ExecutionStatus, c.name)
		require.Equal(t, c.action, got.RecommendedAction, c.name)
		require.Equal(t, c.health, got.Health, c.name)
		require.InDelta(t, c.done, got.Completion, 0, c.name)
		require.Equal(t, theDefinition, got.TaskDefinitionID)
	}
}

func TestExecutionContexts_SeveralTasks_AreInTheOrderOfIDs(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	puts := s.insert(t, chain(3), model.Task{}, chain(1))
	ids := []string{unknown}
	for _, p := range puts {
		ids = append(ids, p.id, p.id)
	}
	found, err := s.ExecutionContexts(t.Context(), ids)
	require.NoError(t, err)
	require.Len(t, found, 3)
	require.True(t, slices.IsSortedFunc(found, func(a, b taskgraph.ExecutionContext) int { return strings.Compare(a.TaskID, b.TaskID) }))
}
