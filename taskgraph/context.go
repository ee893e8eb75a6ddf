package taskgraph

import (
	"context"
	"time"
)

// This file answers: how is a task doing, and what is to be done about it?

// ExecutionStatus says what a task as a whole is up to.
type ExecutionStatus string

// The values of ExecutionStatus: the first that applies.
const (
	BlockedByFailures      ExecutionStatus = "blocked_by_failures" // steps are permanently blocked
	HasReadySteps          ExecutionStatus = "has_ready_steps"
	Processing             ExecutionStatus = "processing"               // steps are enqueued or in progress
	AllComplete            ExecutionStatus = "all_complete"             // so it is without steps
	WaitingForDependencies ExecutionStatus = "waiting_for_dependencies" // or for an instant, ExecutionContext.NextReadyAt
)

// RecommendedAction is what to do about a task, one for each ExecutionStatus.
type RecommendedAction string

// The values of RecommendedAction, in the order of those of ExecutionStatus.
const (
	HandleFailures      RecommendedAction = "handle_failures"
	ExecuteReadySteps   RecommendedAction = "execute_ready_steps"
	WaitForCompletion   RecommendedAction = "wait_for_completion"
	FinalizeTask        RecommendedAction = "finalize_task"
	WaitForDependencies RecommendedAction = "wait_for_dependencies"
)

// TaskHealth says whether failures stand in the way of a task.
type TaskHealth string

// The values of TaskHealth: the first that applies.
const (
	Blocked    TaskHealth = "blocked"    // steps are permanently blocked
	Recovering TaskHealth = "recovering" // steps are tried again, or will be
	Healthy    TaskHealth = "healthy"
)

// ExecutionContext tells how a task is doing. Each step is in one of the counts from Pending to Cancelled.
type ExecutionContext struct {
	TaskID           string    `db:"task_uuid"`
	TaskDefinitionID string    `db:"named_task_uuid"`
	State            TaskState `db:"status"`

	Total           int `db:"total_steps"`
	Pending         int `db:"pending_steps"`
	Enqueued        int `db:"enqueued_steps"` // enqueued, or with a result that a turn of the task is to look at
	InProgress      int `db:"in_progress_steps"`
	WaitingForRetry int `db:"waiting_for_retry_steps"`
	Completed       int `db:"completed_steps"` // complete, or resolved manually
	Failed          int `db:"failed_steps"`    // in state error, for good
	Cancelled       int `db:"cancelled_steps"`

	Ready              int `db:"ready_steps"`               // pending or waiting for retry, and ready to be run
	PermanentlyBlocked int `db:"permanently_blocked_steps"` // failed or, until the task has ended, cancelled

	ExecutionStatus   ExecutionStatus   `db:"execution_status"`
	RecommendedAction RecommendedAction `db:"recommended_action"`
	Completion        float64           `db:"completion_percentage"` // 0 to 100, to two places; 100 without steps
	Health            TaskHealth        `db:"health_status"`

	// NextReadyAt is when the next of its steps is ready that waits for nothing but an instant. Nil: none does.
	NextReadyAt *time.Time `db:"next_ready_at"`
}

// ExecutionContext tells how a task is doing. ErrNotFound if there is no such task.
func (g *Graph) ExecutionContext(ctx context.Context, taskID string) (*ExecutionContext, error) {
	const op = "execution context"
	found, err := rows[ExecutionContext](ctx, g, op, "get_task_execution_context", taskID)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, noTask(op, taskID)
	}
	return &found[0], nil
}

// ExecutionContexts tells how several tasks are doing, by id. There is no row for an unknown one.
func (g *Graph) ExecutionContexts(ctx context.Context, taskIDs []string) ([]ExecutionContext, error) {
	return rows[ExecutionContext](ctx, g, "execution contexts", "get_task_execution_contexts_batch", taskIDs)
}
