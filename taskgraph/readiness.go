package taskgraph

import (
	"context"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: which steps of a task are ready to be run, and why are the others not?

// StepReadiness is a step, whether it is ready to be run, and what that depends on.
type StepReadiness struct {
	StepID           string    `db:"workflow_step_uuid"`
	TaskID           string    `db:"task_uuid"`
	StepDefinitionID string    `db:"named_step_uuid"`
	Name             string    `db:"name"`
	State            StepState `db:"current_state"`

	// DependenciesSatisfied: every parent is complete or resolved_manually, and the conditions on their results hold.
	DependenciesSatisfied bool `db:"dependencies_satisfied"`
	// RetryEligible: no attempt was made yet, or it is retryable and has attempts left. When is no part of this.
	RetryEligible bool `db:"retry_eligible"`
	// Ready: it is pending or waiting_for_retry, the two before hold, and NextRetryAt is not ahead.
	Ready bool `db:"ready_for_execution"`

	LastFailureAt *time.Time `db:"last_failure_at"` // nil: never
	NextRetryAt   *time.Time `db:"next_retry_at"`   // nil: at once, or its state is not one from which it is tried again

	TotalParents     int `db:"total_parents"`
	CompletedParents int `db:"completed_parents"` // complete or resolved_manually, whatever the conditions

	Attempts       int        `db:"attempts"`                // made so far
	MaxAttempts    int        `db:"retry_limit"`             // in all
	BackoffSeconds *int       `db:"backoff_request_seconds"` // asked for by its handler or somebody else; nil: nothing was
	LastAttemptAt  *time.Time `db:"last_attempted_at"`       // nil: there was none
}

// BlockingReason says why a step is not ready.
type BlockingReason string

// The reasons, in the order in which they are looked for.
const (
	NotBlocked               BlockingReason = "" // it is ready
	DependenciesNotSatisfied BlockingReason = "dependencies_not_satisfied"
	RetryNotEligible         BlockingReason = "retry_not_eligible"  // it has had its attempts
	BackoffNotElapsed        BlockingReason = "backoff_not_elapsed" // it is ready at NextRetryAt
	InvalidState             BlockingReason = "invalid_state"       // it is under way, or has ended
)

// CanExecuteNow reports whether the step is ready to be run.
func (s StepReadiness) CanExecuteNow() bool { return s.Ready }

// BlockingReason returns the first of the reasons for which the step is not ready.
func (s StepReadiness) BlockingReason() BlockingReason {
	switch {
	case s.Ready:
		return NotBlocked
	case !s.DependenciesSatisfied:
		return DependenciesNotSatisfied
	case !s.RetryEligible:
		return RetryNotEligible
	case s.State == "pending" || s.State == "waiting_for_retry":
		return BackoffNotElapsed
	}
	return InvalidState
}

// The backoff of the SQL functions, where nothing else was asked for.
const (
	defaultBackoff    = time.Second
	defaultMaxBackoff = time.Minute
)

// EffectiveBackoff is how long the step waits after its latest attempt, should that fail: what was asked for or else,
// as calculate_backoff_delay has it, 2 s after the first attempt and twice as long after each, up to a minute.
func (s StepReadiness) EffectiveBackoff() time.Duration {
	switch {
	case s.BackoffSeconds != nil:
		return time.Duration(*s.BackoffSeconds) * time.Second
	case s.Attempts <= 0:
		return 0
	case s.Attempts >= 6: // and no shift, which could overflow
		return defaultMaxBackoff
	}
	return min(defaultBackoff<<s.Attempts, defaultMaxBackoff)
}

// StepReadiness returns the steps of a task by id, or those of them that are named; none for an unknown task. The row of a
// step is the same whichever are asked for.
func (g *Graph) StepReadiness(ctx context.Context, taskID string, stepIDs ...string) ([]StepReadiness, error) {
	return rows[StepReadiness](ctx, g, "step readiness", "get_step_readiness_status", taskID, stepIDs)
}

// StepReadinessMany returns the steps of several tasks, by task and step, as StepReadiness does those of one.
func (g *Graph) StepReadinessMany(ctx context.Context, taskIDs []string) ([]StepReadiness, error) {
	return rows[StepReadiness](ctx, g, "step readiness", "get_step_readiness_status_batch", taskIDs)
}

// ReadySteps returns the steps of a task that are ready to be run, by id; none for an unknown task.
func (g *Graph) ReadySteps(ctx context.Context, taskID string) ([]StepReadiness, error) {
	return rows[StepReadiness](ctx, g, "ready steps", "get_ready_steps", taskID)
}

// CheckDependencies reports whether all that a step depends on is satisfied, see StepReadiness. ErrNotFound if there is no
// such step.
func (g *Graph) CheckDependencies(ctx context.Context, stepID string) (bool, error) {
	const op = "check dependencies"
	satisfied, err := value[*bool](ctx, g, op, "check_step_dependencies", stepID)
	if err != nil {
		return false, err
	}
	if satisfied == nil {
		return false, noStep(op, stepID)
	}
	return *satisfied, nil
}

func noStep(op, stepID string) error {
	return failed(op, fmt.Errorf("%w: there is no step %s", pgwake.ErrNotFound, stepID))
}

func noTask(op, taskID string) error {
	return failed(op, fmt.Errorf("%w: there is no task %s", pgwake.ErrNotFound, taskID))
}
