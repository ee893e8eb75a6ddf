package taskgraph

import (
	"context"
	"time"
)

// This file answers: how much is done, how fast, and what takes long?

// AnalyticsMetrics is what happened since PeriodStart.
type AnalyticsMetrics struct {
	ActiveTasks    int64     `db:"active_tasks_count"` // that have not ended by now
	Namespaces     int64     `db:"total_namespaces_count"`
	TaskTypes      int64     `db:"unique_task_types_count"` // definitions, whatever versions they have
	HealthScore    float64   `db:"system_health_score"`     // share of the complete ones among the tasks that became complete or ended in error; 1 if none did
	TaskThroughput int64     `db:"task_throughput"`         // tasks that were created
	Completions    int64     `db:"completion_count"`        // tasks that became complete
	Errors         int64     `db:"error_count"`             // tasks that ended in error
	CompletionRate float64   `db:"completion_rate"`         // completions in percent of the throughput; over 100 while more end than begin
	ErrorRate      float64   `db:"error_rate"`              // errors in percent of the throughput
	AvgTaskSeconds float64   `db:"avg_task_duration"`       // that a complete task took from its creation; 0 if there is none
	AvgStepSeconds float64   `db:"avg_step_duration"`       // that a successful attempt at a step took; 0 if there is none
	StepThroughput int64     `db:"step_throughput"`         // successful attempts at steps
	PeriodStart    time.Time `db:"analysis_period_start"`
	CalculatedAt   time.Time `db:"calculated_at"`
}

// AnalyticsMetrics returns what happened since an instant of the server's clock, not further back than 32 days; the zero time is an hour ago.
func (g *Graph) AnalyticsMetrics(ctx context.Context, since time.Time) (AnalyticsMetrics, error) {
	return row[AnalyticsMetrics](ctx, g, "get analytics metrics", "get_analytics_metrics", instant(since))
}

// SlowestFilter says what to look at, all of its conditions together. The zero value and nil mean the defaults.
type SlowestFilter struct {
	Since     time.Time // on the server's clock, not further back than 32 days. Defaults to 24 hours ago
	Limit     int       // how many at most. Defaults to 10
	Namespace string    // "": any
	TaskName  string    // "": any
	Version   string    // "": any
}

func (f *SlowestFilter) args(op string) ([]any, error) {
	if f == nil {
		f = &SlowestFilter{}
	}
	if f.Limit < 0 || f.Limit > maxList {
		return nil, invalid(op, "a limit of %d is not between 0 and %d", f.Limit, maxList)
	}
	limit := f.Limit
	if limit == 0 {
		limit = 10
	}
	return []any{instant(f.Since), limit, optional(f.Namespace), optional(f.TaskName), optional(f.Version)}, nil
}

// SlowStep is how long a step of a definition took.
type SlowStep struct {
	DefinitionID   string    `db:"named_step_uuid"`
	Namespace      string    `db:"namespace_name"`
	TaskName       string    `db:"task_name"`
	Version        string    `db:"version"`
	Name           string    `db:"step_name"`
	AvgSeconds     *float64  `db:"avg_duration_seconds"` // nil, and the two next: each time the worker was lost
	MaxSeconds     *float64  `db:"max_duration_seconds"`
	MinSeconds     *float64  `db:"min_duration_seconds"`
	Executions     int64     `db:"execution_count"` // attempts that ended, at least 1
	Errors         int64     `db:"error_count"`     // attempts that failed
	ErrorRate      float64   `db:"error_rate"`      // share of these, 0 to 1
	LastExecutedAt time.Time `db:"last_executed_at"`
}

// SlowestSteps returns steps of definitions by how long an attempt takes on average, the slowest first. Those at which there was no attempt
// are absent.
func (g *Graph) SlowestSteps(ctx context.Context, f *SlowestFilter) ([]SlowStep, error) {
	const op = "list slowest steps"
	args, err := f.args(op)
	if err != nil {
		return nil, err
	}
	return rows[SlowStep](ctx, g, op, "get_slowest_steps", args...)
}

// SlowTask is how long the tasks of a definition took.
type SlowTask struct {
	DefinitionID   string    `db:"named_task_uuid"`
	Namespace      string    `db:"namespace_name"`
	Name           string    `db:"task_name"`
	Version        string    `db:"version"`
	AvgSeconds     float64   `db:"avg_duration_seconds"` // from creation to end
	MaxSeconds     float64   `db:"max_duration_seconds"`
	MinSeconds     float64   `db:"min_duration_seconds"`
	Executions     int64     `db:"execution_count"` // tasks that became complete or ended in error, at least 1
	AvgSteps       float64   `db:"avg_step_count"`
	Errors         int64     `db:"error_count"` // tasks that ended in error
	ErrorRate      float64   `db:"error_rate"`  // share of these, 0 to 1
	LastExecutedAt time.Time `db:"last_executed_at"`
}

// SlowestTasks returns definitions by how long their tasks take on average, the slowest first. Those of which none ended are absent.
func (g *Graph) SlowestTasks(ctx context.Context, f *SlowestFilter) ([]SlowTask, error) {
	const op = "list slowest tasks"
	args, err := f.args(op)
	if err != nil {
		return nil, err
	}
	return rows[SlowTask](ctx, g, op, "get_slowest_tasks", args...)
}

// RefreshRollups adds up what happened since it was last called, so that the methods above, and SystemHealthCounts, need not, and
// returns how many changes of state that were. What they answer is the same before and after. An Engine that runs does it by itself.
// While one does it, others return at once. It takes a transaction for every 100,000 changes.
func (g *Graph) RefreshRollups(ctx context.Context) (int64, error) {
	const most = 100_000
	for total := int64(0); ; {
		n, err := value[int64](ctx, g, "refresh rollups", "refresh_rollups", most)
		total += n
		if err != nil || n < most {
			return total, err
		}
	}
}

// maxList bounds how much one call returns.
const maxList = 10_000

// instant is a time as an argument; the zero time is null.
func instant(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
