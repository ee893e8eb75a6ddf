package taskgraph

import (
	"fmt"
	"slices"

	"github.com/pgwake/pgwake"
)

// This file answers: which states are there, and which may follow which? It is the same as is_task_edge and is_step_edge in
// migrations/00002_states.sql; a test compares them.

// TaskState is one of twelve.
type TaskState string

// The states of a task. It begins as pending. Initializing, enqueuing_steps, steps_in_process and evaluating_results are active: somebody
// is, or was, at it. It waits in waiting_for_dependencies for something outside, in waiting_for_retry for the next attempt at a step,
// and in blocked_by_failures for somebody who decides what is to become of failed steps. It ends in one of the other four.
const (
	TaskPending                TaskState = "pending"
	TaskInitializing           TaskState = "initializing"
	TaskEnqueuingSteps         TaskState = "enqueuing_steps"
	TaskStepsInProcess         TaskState = "steps_in_process"
	TaskEvaluatingResults      TaskState = "evaluating_results"
	TaskWaitingForDependencies TaskState = "waiting_for_dependencies"
	TaskWaitingForRetry        TaskState = "waiting_for_retry"
	TaskBlockedByFailures      TaskState = "blocked_by_failures"
	TaskComplete               TaskState = "complete"
	TaskError                  TaskState = "error"
	TaskCancelled              TaskState = "cancelled"
	TaskResolvedManually       TaskState = "resolved_manually"
)

// taskEdges has, of each state, those that may follow.
var taskEdges = map[TaskState][]TaskState{
	TaskPending:        {TaskInitializing, TaskCancelled, TaskResolvedManually},
	TaskInitializing:   {TaskEnqueuingSteps, TaskComplete, TaskWaitingForDependencies, TaskCancelled, TaskResolvedManually},
	TaskEnqueuingSteps: {TaskStepsInProcess, TaskEvaluatingResults, TaskError, TaskCancelled, TaskResolvedManually},
	TaskStepsInProcess: {TaskEvaluatingResults, TaskWaitingForRetry, TaskCancelled, TaskResolvedManually},
	TaskEvaluatingResults: {TaskComplete, TaskEnqueuingSteps, TaskStepsInProcess, TaskWaitingForDependencies, TaskWaitingForRetry,
		TaskBlockedByFailures, TaskCancelled, TaskResolvedManually},
	TaskWaitingForDependencies: {TaskEvaluatingResults, TaskCancelled, TaskResolvedManually},
	TaskWaitingForRetry:        {TaskEnqueuingSteps, TaskCancelled, TaskResolvedManually},
	TaskBlockedByFailures:      {TaskEvaluatingResults, TaskError, TaskCancelled, TaskResolvedManually},
	TaskComplete:               nil,
	TaskError:                  nil,
	TaskCancelled:              nil,
	TaskResolvedManually:       nil,
}

// TaskStates returns all of them, from first to last.
func TaskStates() []TaskState {
	return []TaskState{TaskPending, TaskInitializing, TaskEnqueuingSteps, TaskStepsInProcess, TaskEvaluatingResults, TaskWaitingForDependencies,
		TaskWaitingForRetry, TaskBlockedByFailures, TaskComplete, TaskError, TaskCancelled, TaskResolvedManually}
}

// ParseTaskState returns the state of this name; in_progress, which others have, is steps_in_process. Fails with pgwake.ErrInvalid for
// a name that is none.
func ParseTaskState(name string) (TaskState, error) {
	if name == "in_progress" {
		return TaskStepsInProcess, nil
	}
	if s := TaskState(name); s.IsValid() {
		return s, nil
	}
	return "", fmt.Errorf("%w: there is no task state %.100q", pgwake.ErrInvalid, name)
}

// IsValid reports whether there is such a state.
func (s TaskState) IsValid() bool { _, ok := taskEdges[s]; return ok }

// CanBecome reports whether a task may go from s to the other state in one transition.
func (s TaskState) CanBecome(to TaskState) bool { return slices.Contains(taskEdges[s], to) }

// Next returns the states that may follow s; none for one in which a task has ended.
func (s TaskState) Next() []TaskState { return slices.Clone(taskEdges[s]) }

// IsTerminal reports whether a task in this state has ended.
func (s TaskState) IsTerminal() bool { return s.IsValid() && len(taskEdges[s]) == 0 }

// IsActive reports whether somebody is to be at the task: such a state belongs to whoever brought the task into it, as long as the lease
// of its turn holds.
func (s TaskState) IsActive() bool {
	return s == TaskInitializing || s == TaskEnqueuingSteps || s == TaskStepsInProcess || s == TaskEvaluatingResults
}

// IsWaiting reports whether the task waits for something.
func (s TaskState) IsWaiting() bool {
	return s == TaskWaitingForDependencies || s == TaskWaitingForRetry || s == TaskBlockedByFailures
}

// CanBePickedUp reports whether a task in this state may be taken up by whoever looks for tasks that are ready.
func (s TaskState) CanBePickedUp() bool {
	return s == TaskPending || s == TaskWaitingForDependencies || s == TaskWaitingForRetry
}

// StepState is one of ten.
type StepState string

// The states of a step. It begins as pending; enqueued, it has a work item, and in_progress a handler at work. What that returned waits in
// enqueued_for_orchestration, or in enqueued_as_error_for_orchestration, for the turn of the task, which makes it complete,
// waiting_for_retry or error. It has ended when it is complete, cancelled or resolved_manually; error is left only by what somebody does.
const (
	StepPending                         StepState = "pending"
	StepEnqueued                        StepState = "enqueued"
	StepInProgress                      StepState = "in_progress"
	StepEnqueuedForOrchestration        StepState = "enqueued_for_orchestration"
	StepEnqueuedAsErrorForOrchestration StepState = "enqueued_as_error_for_orchestration"
	StepWaitingForRetry                 StepState = "waiting_for_retry"
	StepComplete                        StepState = "complete"
	StepError                           StepState = "error"
	StepCancelled                       StepState = "cancelled"
	StepResolvedManually                StepState = "resolved_manually"
)

var stepEdges = map[StepState][]StepState{
	StepPending:  {StepEnqueued, StepWaitingForRetry, StepError, StepCancelled, StepResolvedManually, StepComplete},
	StepEnqueued: {StepInProgress, StepWaitingForRetry, StepError, StepCancelled, StepResolvedManually, StepComplete},
	StepInProgress: {StepEnqueuedForOrchestration, StepEnqueuedAsErrorForOrchestration, StepWaitingForRetry, StepError,
		StepCancelled, StepResolvedManually, StepComplete},
	StepEnqueuedForOrchestration:        {StepComplete, StepError, StepCancelled, StepResolvedManually},
	StepEnqueuedAsErrorForOrchestration: {StepWaitingForRetry, StepError, StepComplete, StepCancelled, StepResolvedManually},
	StepWaitingForRetry:                 {StepPending, StepCancelled, StepResolvedManually, StepComplete},
	StepError:                           {StepPending, StepCancelled, StepResolvedManually, StepComplete},
	StepComplete:                        nil,
	StepCancelled:                       nil,
	StepResolvedManually:                nil,
}

// StepStates returns all of them, from first to last.
func StepStates() []StepState {
	return []StepState{StepPending, StepEnqueued, StepInProgress, StepEnqueuedForOrchestration, StepEnqueuedAsErrorForOrchestration,
		StepWaitingForRetry, StepComplete, StepError, StepCancelled, StepResolvedManually}
}

// ParseStepState returns the state of this name. Fails with pgwake.ErrInvalid for a name that is none.
func ParseStepState(name string) (StepState, error) {
	if s := StepState(name); s.IsValid() {
		return s, nil
	}
	return "", fmt.Errorf("%w: there is no step state %.100q", pgwake.ErrInvalid, name)
}

// IsValid reports whether there is such a state.
func (s StepState) IsValid() bool { _, ok := stepEdges[s]; return ok }

// CanBecome reports whether a step may go from s to the other state in one transition.
func (s StepState) CanBecome(to StepState) bool { return slices.Contains(stepEdges[s], to) }

// Next returns the states that may follow s; none for one in which a step has ended.
func (s StepState) Next() []StepState { return slices.Clone(stepEdges[s]) }

// IsTerminal reports whether a step in this state has ended, whatever anybody does.
func (s StepState) IsTerminal() bool { return s.IsValid() && len(stepEdges[s]) == 0 }

// IsInProcess reports whether the step has a work item, or a result that the turn of its task has not seen.
func (s StepState) IsInProcess() bool {
	return s == StepEnqueued || s == StepInProgress || s == StepEnqueuedForOrchestration || s == StepEnqueuedAsErrorForOrchestration
}

// SatisfiesDependencies reports whether the steps that wait for this one may begin.
func (s StepState) SatisfiesDependencies() bool {
	return s == StepComplete || s == StepResolvedManually
}
