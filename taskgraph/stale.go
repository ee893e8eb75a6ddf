package taskgraph

import (
	"context"
	"time"
)

// This file answers: which tasks do not get on?

// StuckTask is a task in an active state on which nobody is at work.
type StuckTask struct {
	ID        string    `db:"task_uuid"`
	State     TaskState `db:"current_state"`
	Processor *string   `db:"processor_uuid"` // who brought it into that state
	Minutes   int       `db:"stuck_duration_minutes"`
}

// StuckTasks returns tasks that have been in the same active state (TaskState.IsActive) for longer than this, in whole minutes, rounded up,
// while nobody is at work on them: no turn of them, and none of their steps, is claimed under a lease that holds, nor is one a task that
// has not ended. A step that takes long is not stuck.
func (g *Graph) StuckTasks(ctx context.Context, longerThan time.Duration) ([]StuckTask, error) {
	const op = "find stuck tasks"
	minutes, err := wholeMinutes(op, longerThan)
	if err != nil {
		return nil, err
	}
	return rows[StuckTask](ctx, g, op, "find_stuck_tasks", minutes)
}

// StaleOptions says what DetectStaleTasks does. The zero value and nil mean the defaults.
type StaleOptions struct {
	// Fail takes tasks that are stale to error, cancels their steps that have not ended, and adds them to the DLQ. Defaults to false:
	// they are returned, and nothing is changed.
	Fail bool

	// Limit is how many tasks at most, those that are furthest over their threshold first. Defaults to 100.
	Limit int

	// The thresholds, in whole minutes, rounded up, for definitions without their own (Lifecycle). Negative: there is none. Default to 1 h
	// in waiting_for_dependencies, 30 min in waiting_for_retry after the next attempt was due, 30 min in steps_in_process since
	// somebody was at work on a step, or a turn became due, and 24 h since the task was to begin, in whole hours.
	WaitingForDependencies, WaitingForRetry, StepsInProcess, Lifetime time.Duration
}

// StaleHealth is how close a task is to its threshold.
type StaleHealth string

// What DetectStaleTasks returns is over the threshold, or over 80 % of it.
const (
	HealthWarning StaleHealth = "warning"
	HealthStale   StaleHealth = "stale"
)

// StaleTask is a task that does not get on.
type StaleTask struct {
	ID             string      `db:"task_uuid"`
	Namespace      string      `db:"namespace_name"`
	Name           string      `db:"task_name"`
	State          TaskState   `db:"current_state"` // before anything was done
	MinutesInState float64     `db:"time_in_state_minutes"`
	Rule           string      `db:"staleness_rule"`              // which threshold, as it is called in a definition: max_duration_minutes, ...
	Minutes        float64     `db:"staleness_minutes"`           // by that rule
	Threshold      float64     `db:"staleness_threshold_minutes"` // of that rule
	Health         StaleHealth `db:"health_status"`
	Action         string      `db:"action_taken"`       // none, would_transition_to_dlq_and_error, transitioned_to_dlq_and_error, transitioned_to_error_only, skipped
	MovedToDLQ     bool        `db:"moved_to_dlq"`       // an entry was added; false also if there was one
	Failed         bool        `db:"transition_success"` // it is in error now
}

// DetectStaleTasks returns tasks that wait for too long, and with StaleOptions.Fail ends those that are stale. A namespace that is paused has
// none, but for those that are too old. A task that somebody is changing at the moment is skipped. Safe to call on any number of nodes.
func (g *Graph) DetectStaleTasks(ctx context.Context, o *StaleOptions) ([]StaleTask, error) {
	const op = "detect stale tasks"
	if o == nil {
		o = &StaleOptions{}
	}
	if o.Limit < 0 || o.Limit > maxList {
		return nil, invalid(op, "a limit of %d is not between 0 and %d", o.Limit, maxList)
	}
	limit := o.Limit
	if limit == 0 {
		limit = 100
	}
	args := []any{!o.Fail, limit}
	for _, threshold := range []struct{ given, usual, unit time.Duration }{
		{o.WaitingForDependencies, time.Hour, time.Minute},
		{o.WaitingForRetry, 30 * time.Minute, time.Minute},
		{o.StepsInProcess, 30 * time.Minute, time.Minute},
		{o.Lifetime, 24 * time.Hour, time.Hour},
	} {
		t := threshold.given
		if t == 0 {
			t = threshold.usual
		}
		if t < 0 {
			args = append(args, nil)
			continue
		}
		n, err := wholeUnits(op, t, threshold.unit)
		if err != nil {
			return nil, err
		}
		args = append(args, n)
	}
	return rows[StaleTask](ctx, g, op, "detect_and_transition_stale_tasks", args...)
}

func wholeMinutes(op string, d time.Duration) (int, error) { return wholeUnits(op, d, time.Minute) }

// wholeUnits returns how many units a time has, rounded up.
func wholeUnits(op string, d, unit time.Duration) (int, error) {
	const most = 100 * 365 * 24 * time.Hour
	if d < 0 || d > most {
		return 0, invalid(op, "%v is not between 0 and %v", d, most)
	}
	return int((d + unit - 1) / unit), nil
}
