package taskgraph

import (
	"context"
	"math"

	"github.com/pgwake/pgwake"
)

// This file answers: how does a task get more steps while it runs?

// AddedStep is a step that a task gets while it runs.
type AddedStep struct {
	Name     string // required; no other step of the task has it
	Template string // the step of the definition that it is like; required

	// Inputs, of at most pgwake.Config.MaxPayload, and MaxAttempts are instead of those of the template. Default to those.
	Inputs      any
	MaxAttempts int

	// After are the steps that it waits for, of the task or added with it. Before are those that are to wait for it; they must not have
	// begun. Default to none: it is ready at once, and the task is complete when it is.
	After, Before []string

	// AfterIf and BeforeIf are the same with a condition (ParseCondition) on the result of the step that is waited for, which with BeforeIf is
	// this one: if it does not hold, the step that waits is completed without being run. Default to none.
	AfterIf, BeforeIf []Dependency
}

// AddSteps adds steps to a task that has not ended, all or none, and returns their ids: up to MaxSteps, with MaxDependencies, at a time. A
// dependency that is named twice is one. A handler returns a Decision instead, which adds them together with its result.
// Errors: pgwake.ErrNotFound for a task, template or step that does not exist, pgwake.ErrInvalid with all that is wrong with the steps
// themselves, if the task has ended, if a step that is to wait has begun, for a name that is taken, and for a cycle.
func (g *Graph) AddSteps(ctx context.Context, task string, steps ...AddedStep) ([]string, error) {
	const op = "add steps"
	if err := checkID(op, "task", task); err != nil {
		return nil, err
	}
	args, err := addedArguments(op, steps, g.p.MaxPayload())
	if err != nil {
		return nil, err
	}
	return values[string](ctx, g, op, "add_steps", append([]any{task}, args...)...)
}

// addedArguments are those of add_steps, but for the task. maxPayload is for the inputs of each.
func addedArguments(op string, steps []AddedStep, maxPayload int) ([]any, error) {
	edges := make([]addedEdge, 0, len(steps))
	for i := range steps {
		edges = steps[i].edges(edges)
	}
	var wrong problems
	if len(steps) > MaxSteps || len(edges) > MaxDependencies {
		wrong.add("%d steps with %d dependencies; %d and %d are the most", len(steps), len(edges), MaxSteps, MaxDependencies)
		return nil, wrong.err(op)
	}
	names, templates, inputs, attempts := make([]string, len(steps)), make([]string, len(steps)), make([]*string, len(steps)), make([]*int32, len(steps))
	added := make(map[string]bool, len(steps))
	for i := range steps {
		s := &steps[i]
		bad := func(format string, args ...any) { wrong.addStep(s.Name, format, args...) }
		for _, t := range [...]struct{ what, text string }{{"name", s.Name}, {"template", s.Template}} {
			if problem := textProblem(t.text, 1, pgwake.MaxNameLength); problem != "" {
				bad("%s %s", t.what, problem)
			}
		}
		if added[s.Name] {
			bad("added more than once")
		}
		added[s.Name] = true
		if s.MaxAttempts < 0 || s.MaxAttempts > math.MaxInt32 {
			bad("max_attempts of %d is not between 0 and %d", s.MaxAttempts, math.MaxInt32)
		} else if s.MaxAttempts > 0 {
			n := int32(s.MaxAttempts)
			attempts[i] = &n
		}
		text, err := jsonText(s.Inputs, maxPayload)
		if err != nil {
			bad("inputs: %v", err)
		}
		names[i], templates[i], inputs[i] = s.Name, s.Template, text
	}
	parents, children, conditions := make([]string, len(edges)), make([]string, len(edges)), make([]*string, len(edges))
	known := make(map[[2]string]string, len(edges))
	for i, e := range edges {
		bad := func(format string, args ...any) { wrong.addStep(e.child, format, args...) }
		parents[i], children[i], conditions[i] = e.parent, e.child, optional(e.condition)
		before, again := known[[2]string{e.parent, e.child}]
		known[[2]string{e.parent, e.child}] = e.condition
		switch {
		case !added[e.parent] && textProblem(e.parent, 1, pgwake.MaxNameLength) != "", !added[e.child] && textProblem(e.child, 1, pgwake.MaxNameLength) != "":
			bad("depends on %s: one of the two is no name", quoteShort(e.parent))
		case e.parent == e.child:
			bad("depends on itself")
		case again && before != e.condition:
			bad("depends on %s twice, with different conditions", quoteShort(e.parent))
		}
		if e.conditional {
			if problem := conditionProblem(e.condition); problem != "" {
				bad("condition on %s%s", quoteShort(e.parent), problem)
			}
		}
	}
	return []any{names, templates, inputs, attempts, parents, children, conditions}, wrong.err(op)
}

// addedEdge is a dependency of a step that is added, or of another on it.
type addedEdge struct {
	parent, child string
	conditional   bool
	condition     string
}

// edges appends those of a step.
func (s *AddedStep) edges(to []addedEdge) []addedEdge {
	for _, parent := range s.After {
		to = append(to, addedEdge{parent: parent, child: s.Name})
	}
	for _, parent := range s.AfterIf {
		to = append(to, addedEdge{parent.Step, s.Name, true, parent.If})
	}
	for _, child := range s.Before {
		to = append(to, addedEdge{parent: s.Name, child: child})
	}
	for _, child := range s.BeforeIf {
		to = append(to, addedEdge{s.Name, child.Step, true, child.If})
	}
	return to
}
