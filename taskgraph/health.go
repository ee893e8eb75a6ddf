package taskgraph

import "context"

// This file answers: how are all the tasks together?

// SystemHealthCounts is how many tasks and steps are in each state, and how many connections the server has.
type SystemHealthCounts struct {
	PendingTasks                int64 `db:"pending_tasks"`
	InitializingTasks           int64 `db:"initializing_tasks"`
	EnqueuingStepsTasks         int64 `db:"enqueuing_steps_tasks"`
	StepsInProcessTasks         int64 `db:"steps_in_process_tasks"`
	EvaluatingResultsTasks      int64 `db:"evaluating_results_tasks"`
	WaitingForDependenciesTasks int64 `db:"waiting_for_dependencies_tasks"`
	WaitingForRetryTasks        int64 `db:"waiting_for_retry_tasks"`
	BlockedByFailuresTasks      int64 `db:"blocked_by_failures_tasks"`
	CompleteTasks               int64 `db:"complete_tasks"`
	ErrorTasks                  int64 `db:"error_tasks"`
	CancelledTasks              int64 `db:"cancelled_tasks"`
	ResolvedManuallyTasks       int64 `db:"resolved_manually_tasks"`
	TotalTasks                  int64 `db:"total_tasks"`

	PendingSteps                         int64 `db:"pending_steps"`
	EnqueuedSteps                        int64 `db:"enqueued_steps"`
	InProgressSteps                      int64 `db:"in_progress_steps"`
	EnqueuedForOrchestrationSteps        int64 `db:"enqueued_for_orchestration_steps"`
	EnqueuedAsErrorForOrchestrationSteps int64 `db:"enqueued_as_error_for_orchestration_steps"`
	WaitingForRetrySteps                 int64 `db:"waiting_for_retry_steps"`
	CompleteSteps                        int64 `db:"complete_steps"`
	ErrorSteps                           int64 `db:"error_steps"`
	CancelledSteps                       int64 `db:"cancelled_steps"`
	ResolvedManuallySteps                int64 `db:"resolved_manually_steps"`
	TotalSteps                           int64 `db:"total_steps"`

	ActiveConnections int64 `db:"active_connections"` // of clients, to all databases of the server
	MaxConnections    int64 `db:"max_connections"`
}

// SystemHealthCounts returns the counts as they are. It costs as much as there are tasks that have not ended, and changes of state since
// the last RefreshRollups.
func (g *Graph) SystemHealthCounts(ctx context.Context) (SystemHealthCounts, error) {
	return row[SystemHealthCounts](ctx, g, "count tasks and steps", "get_system_health_counts")
}

// HealthScore is between 0 and 1: half of it is the share of all tasks that are complete, three tenths the share that are not in error, and
// two tenths the share of the server's connections that are free. 1 if there are no tasks. A system that has just begun, with tasks that
// wait, is at about a half.
func (c *SystemHealthCounts) HealthScore() float64 {
	if c.TotalTasks == 0 {
		return 1
	}
	total := float64(c.TotalTasks)
	return 0.5*float64(c.CompleteTasks)/total + 0.3*(1-float64(c.ErrorTasks)/total) + 0.2*(1-min(c.connectionPressure(), 1))
}

// IsUnderHeavyLoad reports whether more than four fifths of the server's connections are in use, or more than a fifth of all tasks are in error.
func (c *SystemHealthCounts) IsUnderHeavyLoad() bool {
	return c.connectionPressure() > 0.8 || c.TotalTasks > 0 && float64(c.ErrorTasks)/float64(c.TotalTasks) > 0.2
}

// connectionPressure is the share of the server's connections that are in use; 0 if nobody knows how many there may be.
func (c *SystemHealthCounts) connectionPressure() float64 {
	if c.MaxConnections <= 0 {
		return 0
	}
	return float64(c.ActiveConnections) / float64(c.MaxConnections)
}
