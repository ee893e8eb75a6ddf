package taskgraph

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: which tasks are there, and how far is one?

// Task is a task as it is.
type Task struct {
	ID             string     `db:"task_id"`
	Namespace      string     `db:"namespace"`
	Name           string     `db:"name"`
	Version        string     `db:"version"`
	State          TaskState  `db:"state"`
	StateSince     time.Time  `db:"state_entered_at"`
	Processor      *string    `db:"processor_id"` // who brought it into its state, if that is an active one
	Priority       int        `db:"priority"`
	Deadline       *time.Time `db:"deadline"`
	TotalSteps     int        `db:"total_steps"`
	CompletedSteps int        `db:"completed_steps"` // complete, skipped or resolved
	Retries        int        `db:"retries"`
	StartAt        time.Time  `db:"start_at"`
	NextReadyAt    *time.Time `db:"next_ready_at"` // when it has steps that are ready, as far as is known
	RequestedAt    time.Time  `db:"requested_at"`
	CompletedAt    *time.Time `db:"completed_at"` // when it ended, in whatever way

	Initiator      *string         `db:"initiator"`
	SourceSystem   *string         `db:"source_system"`
	Reason         *string         `db:"reason"`
	Tags           json.RawMessage `db:"tags"`
	Context        json.RawMessage `db:"context"`
	IdempotencyKey *string         `db:"idempotency_key"`

	CorrelationID       string  `db:"correlation_id"`
	ParentCorrelationID *string `db:"parent_correlation_id"`
	ParentTask          *string `db:"parent_task_id"` // of which it is a step
	ParentStep          *string `db:"parent_step_id"`

	ContextCut *pgwake.Cut `db:"context_cut"` // Context, if that is longer than TaskFilter.PayloadBytes
}

// StepInfo is a step as it is.
type StepInfo struct {
	TaskID         string          `db:"task_id"`
	ID             string          `db:"step_id"`
	Name           string          `db:"name"`
	Handler        *string         `db:"handler"`       // nil: it is a task of its own
	SubTask        *string         `db:"sub_task_name"` // name of the definition of that
	State          StepState       `db:"state"`
	Retryable      bool            `db:"retryable"`
	MaxAttempts    int             `db:"max_attempts"`
	Attempts       int             `db:"attempts"`
	Processor      *string         `db:"processor_id"`
	ProcessedAt    *time.Time      `db:"processed_at"`
	LastAttemptAt  *time.Time      `db:"last_attempted_at"`
	BackoffSeconds *int            `db:"backoff_request_seconds"`
	NextAttemptAt  *time.Time      `db:"next_attempt_at"`
	Inputs         json.RawMessage `db:"inputs"`
	Results        json.RawMessage `db:"results"` // {"error": ..., "retryable": ...} of one that failed
	Checkpoint     json.RawMessage `db:"checkpoint"`
	Skipped        bool            `db:"skipped"` // complete without being run: the condition of a dependency did not hold
	CreatedAt      time.Time       `db:"created_at"`
	UpdatedAt      time.Time       `db:"updated_at"`
	Parents        []string        `db:"parents"`    // names of the steps that it waits for
	Conditions     []string        `db:"conditions"` // of these dependencies; "": none
}

// Err returns what went wrong with the step the last time; "" if nothing is known to have.
func (s StepInfo) Err() string {
	switch s.State {
	case StepError, StepWaitingForRetry, StepEnqueuedAsErrorForOrchestration:
		var failure struct{ Error string }
		if json.Unmarshal(s.Results, &failure) == nil {
			return failure.Error
		}
	}
	return ""
}

// Task returns a task; pgwake.ErrNotFound if there is none.
func (g *Graph) Task(ctx context.Context, task string) (*Task, error) {
	const op = "get task"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	all, err := rows[Task](ctx, g, op, "list_tasks", []string{task})
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, failed(op, fmt.Errorf("%w: task %s", pgwake.ErrNotFound, task))
	}
	return &all[0], nil
}

// TaskFilter says which tasks, all of its conditions together. The zero value and nil mean all, up to the limit.
type TaskFilter struct {
	Namespace, Name string    // "": any
	State           TaskState // "": any
	ParentTask      string    // "": any

	// Before begins the list before this task, the last one of the page before. Defaults to nil: the one created last.
	Before *Task
	Limit  int // up to 10,000. Defaults to 100

	// PayloadBytes is up to how many bytes a Context is read whole. Of a longer one there is the beginning, see pgwake.Cut. Defaults to 0: all
	// are.
	PayloadBytes int
}

// ListTasks returns tasks, those first that were created last.
func (g *Graph) ListTasks(ctx context.Context, f *TaskFilter) ([]Task, error) {
	const op = "list tasks"
	if f == nil {
		f = &TaskFilter{}
	}
	if f.Limit < 0 || f.Limit > 10_000 {
		return nil, invalid(op, "a limit of %d, and 10,000 is the most", f.Limit)
	}
	if f.PayloadBytes < 0 {
		return nil, invalid(op, "payloads of up to %d bytes are none", f.PayloadBytes)
	}
	limit := f.Limit
	if limit == 0 {
		limit = 100
	}
	var before *time.Time
	var last *string
	var payload *int32
	if f.PayloadBytes > 0 {
		payload = new(int32(min(f.PayloadBytes, math.MaxInt32)))
	}
	if f.Before != nil {
		before, last = &f.Before.RequestedAt, &f.Before.ID
	}
	return rows[Task](ctx, g, op, "list_tasks", nil, optional(f.Namespace), optional(f.Name), optional(string(f.State)), optional(f.ParentTask), before, last, limit, payload)
}

// Steps returns the steps of a task in the order in which they were created; none for a task that does not exist.
func (g *Graph) Steps(ctx context.Context, task string) ([]StepInfo, error) {
	const op = "list steps"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	return rows[StepInfo](ctx, g, op, "list_steps", []string{task})
}

// View returns a task with its steps and their states, to be drawn.
func (g *Graph) View(ctx context.Context, task string) (*View, error) {
	t, err := g.Task(ctx, task)
	if err != nil {
		return nil, err
	}
	steps, err := g.Steps(ctx, task)
	if err != nil {
		return nil, err
	}
	return viewOf(t, steps, func(at time.Time) time.Duration { return time.Since(g.p.LocalTime(at)) }), nil
}

// viewOf is the View of a task and its steps. since tells for how long an instant of the server's clock has passed.
func viewOf(t *Task, steps []StepInfo, since func(time.Time) time.Duration) *View {
	v := &View{Namespace: t.Namespace, Name: t.Name, Version: t.Version, TaskID: t.ID, State: string(t.State)}
	for i := range steps {
		s := &steps[i]
		shown := StepView{Name: s.Name, State: string(s.State), Attempts: s.Attempts, MaxAttempts: s.MaxAttempts, Error: s.Err(), Skipped: s.Skipped}
		for n, parent := range s.Parents {
			shown.After = append(shown.After, Dependency{Step: parent, If: s.Conditions[n]})
		}
		shown.Duration = s.Took(since)
		v.Steps = append(v.Steps, shown)
	}
	return v
}

// Took is how long the latest attempt took, or has taken so far; 0 if there is none, or none yet since the step was put back. since tells for how
// long an instant of the server's clock has passed; see pgwake.Provider.LocalTime.
func (s *StepInfo) Took(since func(time.Time) time.Duration) time.Duration {
	var d time.Duration
	switch {
	case s.LastAttemptAt == nil:
	case s.ProcessedAt != nil:
		d = s.ProcessedAt.Sub(*s.LastAttemptAt)
	case s.State == StepInProgress:
		d = since(*s.LastAttemptAt)
	case s.State != StepPending && s.State != StepEnqueued:
		d = s.UpdatedAt.Sub(*s.LastAttemptAt) // when it came into this state, or a moment after the attempt
	}
	return max(d, 0)
}
