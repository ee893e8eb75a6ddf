package taskgraph

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what can be done to a task, and to a step of it, by hand? All of it says false, and changes nothing, if the
// task or step is not in a state in which it can be done, or does not exist. A reason is for people, and may be "".

// MaxReasonLength is how many bytes a reason has at most, as the cause of FailStep and the notes of ResolveDLQ; more is a
// pgwake.ErrPayloadTooLarge. That of a task is written for each of its steps which has not ended. What handlers return as their errors is
// cut there.
const MaxReasonLength = 16 << 10

// Cancel cancels a task that has not ended, and with it its steps that have not, in one transaction. What handlers at work return later
// is dropped; they learn of it by the end of their context. Tasks that are steps of it are cancelled after it.
func (g *Graph) Cancel(ctx context.Context, task, reason string) (bool, error) {
	return g.act(ctx, "cancel task", "cancel_task", task, reason)
}

// ResolveTask ends a task that has not ended as resolved by somebody. Its steps that have not ended are cancelled.
func (g *Graph) ResolveTask(ctx context.Context, task, reason string) (bool, error) {
	return g.act(ctx, "resolve task", "resolve_task_manually", task, reason)
}

// GiveUp ends a task that is blocked by failures as failed. Its steps that have not ended are cancelled.
func (g *Graph) GiveUp(ctx context.Context, task, reason string) (bool, error) {
	return g.act(ctx, "give up task", "give_up_task", task, reason)
}

// ResetStep has a step that has failed for good run again, with all its attempts, and its task go on. What an attempt before has kept
// (Step.Checkpoint) is there for it, as after any failure: a handler that is to begin anew has to pass over it.
func (g *Graph) ResetStep(ctx context.Context, step, reason string) (bool, error) {
	return g.act(ctx, "reset step", "reset_step_for_retry", step, reason)
}

// ResolveStep takes a step that has not ended, or has failed, for done, without a result: what waits for it goes on, but for
// dependencies with a condition, which then does not hold.
func (g *Graph) ResolveStep(ctx context.Context, step, reason string) (bool, error) {
	return g.act(ctx, "resolve step", "resolve_step_manually", step, reason)
}

// CompleteStep completes a step that has not ended, or has failed, with a result, as if its handler had returned it: any value of
// which package encoding/json makes JSON. pgwake.ErrPayloadTooLarge for one of more than Config.MaxResult.
func (g *Graph) CompleteStep(ctx context.Context, step string, result any, reason string) (bool, error) {
	const op = "complete step"
	text, err := jsonText(result, g.maxResult)
	if err != nil {
		return false, invalid(op, "the result: %w", err)
	}
	if err := checkID(op, "step", step); err != nil {
		return false, err
	}
	if err := checkReason(op, "reason", reason); err != nil {
		return false, err
	}
	return value[bool](ctx, g, op, "complete_step_manually", step, text, reason)
}

func checkReason(op, what, text string) error {
	if len(text) > MaxReasonLength {
		return invalid(op, "the %s %w", what, tooLarge{len(text), MaxReasonLength})
	}
	if problem := textProblem(text, 0, MaxReasonLength); problem != "" {
		return invalid(op, "the %s %s", what, problem)
	}
	return nil
}

// CancelStep cancels one step that has not ended, or has failed. Its task is then blocked, since what waits for the step never runs.
func (g *Graph) CancelStep(ctx context.Context, step, reason string) (bool, error) {
	return g.act(ctx, "cancel step", "cancel_step", step, reason)
}

// FailStep fails a step for good that has not ended.
func (g *Graph) FailStep(ctx context.Context, step, cause string) (bool, error) {
	return g.act(ctx, "fail step", "fail_step", step, cause)
}

func (g *Graph) act(ctx context.Context, op, function, id, reason string) (bool, error) {
	if !isUUID(id) {
		return false, invalid(op, "%q is no id", id[:min(len(id), 64)])
	}
	if err := checkReason(op, "reason", reason); err != nil {
		return false, err
	}
	return value[bool](ctx, g, op, function, id, reason)
}

// SetStepBackoff has the next attempt at a step wait so long from now on, in whole seconds, rounded up.
func (g *Graph) SetStepBackoff(ctx context.Context, step string, backoff time.Duration) (bool, error) {
	const op = "set backoff of step"
	if err := checkID(op, "step", step); err != nil {
		return false, err
	}
	if backoff < 0 || seconds(backoff) > maxBackoffSeconds {
		return false, invalid(op, "a backoff of %v is not between 0 and %d s", backoff, maxBackoffSeconds)
	}
	return value[bool](ctx, g, op, "set_step_backoff_atomic", step, seconds(backoff))
}

// seconds rounds up.
func seconds(d time.Duration) int64 {
	n := int64(d / time.Second)
	if d%time.Second > 0 {
		n++
	}
	return n
}

// TransitionTask takes a task from one state to another, if it is in the first: of several callers one succeeds. False also if the
// task is in an active state that another processor brought it into, whose lease holds, unless it is to be cancelled or resolved; and if
// there is no such task. With one that ends the task, its steps that have not ended are cancelled. pgwake.ErrInvalid if there is no such
// transition. processor is a UUID, or "" for nobody.
func (g *Graph) TransitionTask(ctx context.Context, task string, from, to TaskState, processor string) (bool, error) {
	const op = "transition task"
	if err := checkID(op, "task", task); err != nil {
		return false, err
	}
	return value[bool](ctx, g, op, "transition_task_state_atomic", task, string(from), string(to), optional(processor))
}

// TransitionStep takes a step from one state to another, if it is in the first, and has its task evaluated. False also if its task has ended,
// or if there is no such step. If the step is a task of its own, that is cancelled when the step leaves StepInProgress. pgwake.ErrInvalid if
// there is no such transition; for any to StepEnqueued, which is for turns of the task alone, since a work item comes with it; and for one to
// StepWaitingForRetry, if the step has no attempt left. processor is a UUID, or "" for nobody.
func (g *Graph) TransitionStep(ctx context.Context, step string, from, to StepState, processor string) (bool, error) {
	const op = "transition step"
	if err := checkID(op, "step", step); err != nil {
		return false, err
	}
	return value[bool](ctx, g, op, "transition_step_state_atomic", step, string(from), string(to), optional(processor))
}

// CurrentTaskState returns the state of a task; pgwake.ErrNotFound if there is none.
func (g *Graph) CurrentTaskState(ctx context.Context, task string) (TaskState, error) {
	const op = "get state of task"
	if err := checkID(op, "task", task); err != nil {
		return "", err
	}
	state, err := value[*string](ctx, g, op, "get_current_task_state", task)
	if err == nil && state == nil {
		err = failed(op, fmt.Errorf("%w: task %s", pgwake.ErrNotFound, task))
	}
	if err != nil {
		return "", err
	}
	return TaskState(*state), nil
}

// FinalizeAction is what Finalize did.
type FinalizeAction string

const (
	FinalizeCompleted  FinalizeAction = "Completed"  // the task is complete
	FinalizeFailed     FinalizeAction = "Failed"     // it is blocked by failures, or, at the second call, in error
	FinalizeReenqueued FinalizeAction = "Reenqueued" // steps were ready, and are enqueued
	FinalizePending    FinalizeAction = "Pending"    // it waits
	FinalizeNoAction   FinalizeAction = "NoAction"   // steps are at work
)

// Finalize does what is to be done about a task, without waiting for its turn. Of one that has ended it says the same each time.
// pgwake.ErrNotFound if there is none.
func (g *Graph) Finalize(ctx context.Context, task string) (FinalizeAction, TaskState, error) {
	const op = "finalize task"
	if err := checkID(op, "task", task); err != nil {
		return "", "", err
	}
	done, err := row[struct {
		Action    FinalizeAction `db:"action"`
		TaskState TaskState      `db:"task_state"`
	}](ctx, g, op, "finalize_task_completion", task)
	return done.Action, done.TaskState, err
}

// Purge removes tasks that ended before an instant of the server's clock, with all that belongs to them, those first that ended
// first, at most limit of them (1000 for 0) and as many as have MaxSteps steps together, and returns how many that were: call it until it
// returns 0. See Config.KeepFor for what does so by itself.
func (g *Graph) Purge(ctx context.Context, before time.Time, limit int) (int, error) {
	const op = "purge tasks"
	if err := checkLimit(op, limit); err != nil {
		return 0, err
	}
	n, err := value[int32](ctx, g, op, "purge_tasks", before, cmp.Or(limit, 1000))
	return int(n), err
}

// Recover has tasks evaluated that could go on for so long and of which no queue knows, at most limit of them (100 for 0), and returns how
// many that were. It is of no use unless the tables were changed by hand.
func (g *Graph) Recover(ctx context.Context, olderThan time.Duration, limit int) (int, error) {
	const op = "recover tasks"
	if err := checkLimit(op, limit); err != nil {
		return 0, err
	}
	if olderThan < 0 {
		return 0, invalid(op, "an age of %v", olderThan)
	}
	n, err := value[int32](ctx, g, op, "recover_tasks", olderThan, cmp.Or(limit, 100))
	return int(n), err
}

func checkLimit(op string, limit int) error {
	if limit < 0 || limit > math.MaxInt32 {
		return invalid(op, "a limit of %d is not between 0 and %d", limit, math.MaxInt32)
	}
	return nil
}

// raw is a value that is JSON already.
func raw(text *string) json.RawMessage {
	if text == nil {
		return nil
	}
	return json.RawMessage(*text)
}
