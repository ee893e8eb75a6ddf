package taskgraph

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/pgwake/pgwake"
)

// This file answers: what depends on what, and how far apart are they?

// DetectCycle reports whether a dependency of one step on another would close a cycle: whether the second, if it were to
// wait for the first, would wait for itself. A step that is to wait for itself would. Steps that do not exist depend on
// nothing.
//
// Of two who add dependencies at once each would be told what the other has not committed yet; AddSteps, which asks this
// itself, has one wait for the other.
func (g *Graph) DetectCycle(ctx context.Context, fromStepID, toStepID string) (bool, error) {
	return value[bool](ctx, g, "detect cycle", "detect_cycle", fromStepID, toStepID)
}

// StepLevel is the level of a step. Steps of the same level do not depend on each other.
type StepLevel struct {
	StepID string
	Level  int // 0 without parents, or else 1 more than the highest of a parent; -1: on a cycle, or behind one
}

// DependencyLevels returns the levels of the steps of a task, by level and id; none for an unknown task. A task that was
// created by this package has no cycles.
func (g *Graph) DependencyLevels(ctx context.Context, taskID string) ([]StepLevel, error) {
	found, err := rows[struct {
		StepID string `db:"workflow_step_uuid"`
		Level  *int   `db:"dependency_level"`
	}](ctx, g, "dependency levels", "calculate_dependency_levels", taskID)
	levels := make([]StepLevel, len(found))
	for i, l := range found {
		if levels[i] = (StepLevel{l.StepID, -1}); l.Level != nil {
			levels[i].Level = *l.Level
		}
	}
	return levels, err
}

// StepDepth returns the level of one step. ErrNotFound if there is no such step.
func (g *Graph) StepDepth(ctx context.Context, stepID string) (int, error) {
	const op = "step depth"
	depth, err := value[*int](ctx, g, op, "calculate_step_depth", stepID)
	if err != nil {
		return 0, err
	}
	if depth == nil {
		return 0, noStep(op, stepID)
	}
	return *depth, nil
}

// Ancestor is a step that another depends on, directly or by way of others.
type Ancestor struct {
	Name      string          `db:"step_name"`
	StepID    string          `db:"step_uuid"`
	TaskID    string          `db:"task_uuid"`
	Distance  int             `db:"distance"`  // dependencies on the shortest way to it: 1 for a parent
	Processed bool            `db:"processed"` // complete, cancelled or resolved_manually
	Results   json.RawMessage `db:"results"`   // nil: none
}

// TransitiveDependencies returns all steps that a step depends on, each once, by distance and id; none for an unknown step.
func (g *Graph) TransitiveDependencies(ctx context.Context, stepID string) ([]Ancestor, error) {
	return rows[Ancestor](ctx, g, "transitive dependencies", "get_step_transitive_dependencies", stepID)
}

// DependencyResults returns, by name, the results of all steps that a step depends on, directly or by way of others: of
// those that are processed and have one. A step that was skipped or resolved manually has none. It is empty for an unknown
// step.
func (g *Graph) DependencyResults(ctx context.Context, stepID string) (map[string]json.RawMessage, error) {
	const op = "dependency results"
	all, err := value[[]byte](ctx, g, op, "get_step_dependency_results_map", stepID)
	if err != nil {
		return nil, err
	}
	var results map[string]json.RawMessage
	return results, failed(op, json.Unmarshal(all, &results))
}

// DependencyResult returns the result of one of the steps that DependencyResults tells of, whatever the size of all of them together.
// ErrNotFound if there is no such step among those that the step depends on, or if it has none.
func (g *Graph) DependencyResult(ctx context.Context, stepID, name string) (json.RawMessage, error) {
	const op = "dependency result"
	result, err := value[[]byte](ctx, g, op, "get_step_dependency_result", stepID, name)
	if err == nil && result == nil {
		err = failed(op, fmt.Errorf("%w: of a step %s, for step %s", pgwake.ErrNotFound, quoteShort(name), stepID))
	}
	return result, err
}
