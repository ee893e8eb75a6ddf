package taskgraph

import (
	"context"
	"fmt"

	"github.com/pgwake/pgwake"
)

// This file answers: which task is next?

// ReadyTask is a task that waits to be taken up.
type ReadyTask struct {
	TaskID    string    `db:"task_uuid"`
	Name      string    `db:"task_name"`
	Priority  int       `db:"priority"` // that it was created with
	Namespace string    `db:"namespace_name"`
	Ready     int       `db:"ready_steps_count"`
	State     TaskState `db:"current_state"`

	// ComputedPriority is Priority and, by the weights of the settings, its age in hours, its namespace, how often steps of
	// it went to wait for another attempt, and how many hours it is past its deadline. By default it grows by 0.1 an hour.
	ComputedPriority float64 `db:"computed_priority"`
}

// NextReadyTasks returns up to limit tasks that wait to be taken up, those of the highest computed priority first, then by
// age and id: pending ones, and those waiting for dependencies or a retry of which a step is ready.
//
// In a transaction the tasks are locked until its end: meanwhile other callers get others. Elsewhere the locks end with the
// call, and two callers may be told of the same task: the transition that takes it up succeeds for one.
func (g *Graph) NextReadyTasks(ctx context.Context, limit int) ([]ReadyTask, error) {
	return rows[ReadyTask](ctx, g, "next ready tasks", "get_next_ready_tasks", limit)
}

// NextReadyTask returns the first of NextReadyTasks. ErrNoWork if there is none.
func (g *Graph) NextReadyTask(ctx context.Context) (*ReadyTask, error) {
	const op = "next ready task"
	found, err := rows[ReadyTask](ctx, g, op, "get_next_ready_task")
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, failed(op, fmt.Errorf("%w: no task is ready", pgwake.ErrNoWork))
	}
	return &found[0], nil
}

// TaskReadyInfo returns what NextReadyTasks tells of a task, whatever its state and whoever holds it. ErrNotFound if there
// is no such task.
func (g *Graph) TaskReadyInfo(ctx context.Context, taskID string) (*ReadyTask, error) {
	const op = "task ready info"
	found, err := rows[ReadyTask](ctx, g, op, "get_task_ready_info", taskID)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, noTask(op, taskID)
	}
	return &found[0], nil
}
