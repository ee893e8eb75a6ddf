package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/spf13/cobra"
)

// This file answers: how far is a task, and what is to become of it?

// taskJSON is what task show prints as JSON.
type taskJSON struct {
	ID          string          `json:"id"`
	Namespace   string          `json:"namespace"`
	Name        string          `json:"name"`
	Version     string          `json:"version"`
	State       string          `json:"state"`
	RequestedAt moment          `json:"requested_at"`
	CompletedAt moment          `json:"completed_at,omitzero"`
	Context     json.RawMessage `json:"context,omitempty"`
	Steps       []stepJSON      `json:"steps,omitempty"`
}

type stepJSON struct {
	ID          string          `json:"id"`
	Name        string          `json:"name"`
	State       string          `json:"state"`
	Skipped     bool            `json:"skipped,omitempty"`
	Attempts    int             `json:"attempts"`
	MaxAttempts int             `json:"max_attempts"`
	After       []string        `json:"after,omitempty"`
	Error       string          `json:"error,omitempty"`
	Results     json.RawMessage `json:"results,omitempty"`
}

func (a *app) taskCommand() *cobra.Command {
	return group("task", "Look at tasks, and decide what is to become of them",
		a.taskListCommand(), a.taskShowCommand(), a.taskCancelCommand(), a.taskRetryCommand(), a.taskResolveCommand())
}

// withGraph opens the task graph for as long as a function takes.
func (a *app) withGraph(ctx context.Context, do func(*pgwake.Provider, *taskgraph.Graph) error) error {
	p, end, err := a.provider(ctx)
	if err != nil {
		return err
	}
	defer end()
	g, err := a.graph(ctx, p)
	if err != nil {
		return err
	}
	return do(p, g)
}

func (a *app) taskListCommand() *cobra.Command {
	var f taskgraph.TaskFilter
	var state, before string
	c := &cobra.Command{
		Use: "list", Short: "List tasks, those first that were created last", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if state != "" {
				var err error
				if f.State, err = taskgraph.ParseTaskState(state); err != nil {
					return usagef("one of "+fmt.Sprint(taskgraph.TaskStates()), "there is no state %q", state)
				}
			}
			return a.withGraph(c.Context(), func(p *pgwake.Provider, g *taskgraph.Graph) (err error) {
				if before != "" {
					if f.Before, err = g.Task(c.Context(), before); err != nil {
						return noTask(err, before)
					}
				}
				return a.taskList(c.Context(), p, g, &f)
			})
		},
	}
	s := c.Flags()
	s.StringVarP(&f.Namespace, "namespace", "n", "", "of this namespace alone")
	s.StringVar(&f.Name, "name", "", "of this name alone")
	s.StringVar(&state, "state", "", "in this state alone, such as blocked_by_failures")
	s.StringVar(&before, "before", "", "before this task, the last one of the page before")
	limitFlag(c, &f.Limit)
	return c
}

func (a *app) taskList(ctx context.Context, p *pgwake.Provider, g *taskgraph.Graph, f *taskgraph.TaskFilter) error {
	if !a.asJSON {
		f.PayloadBytes = unlisted
	}
	tasks, err := g.ListTasks(ctx, f)
	if err != nil {
		return err
	}
	if a.asJSON {
		all := make([]taskJSON, 0, len(tasks))
		for i := range tasks {
			all = append(all, ofTask(&tasks[i], nil))
		}
		return a.printJSON(all)
	}
	table := &rows{heads: []string{"TASK", "NAMESPACE", "NAME", "VERSION", "STATE", "AGE"}, none: "there are no tasks of the kind"}
	for _, t := range tasks {
		table.add(t.ID, t.Namespace, glance.Short(t.Name, nameWidth), glance.Short(t.Version, nameWidth), string(t.State), glance.Span(a.now().Sub(p.LocalTime(t.RequestedAt))))
	}
	a.printRows(table)
	if len(tasks) == f.Limit {
		a.more("--before", tasks[len(tasks)-1].ID)
	}
	return nil
}

func ofTask(t *taskgraph.Task, steps []taskgraph.StepInfo) taskJSON {
	of := taskJSON{ID: t.ID, Namespace: t.Namespace, Name: t.Name, Version: t.Version, State: string(t.State), RequestedAt: moment{t.RequestedAt}, Context: t.Context}
	if t.CompletedAt != nil {
		of.CompletedAt = moment{*t.CompletedAt}
	}
	for _, s := range steps {
		of.Steps = append(of.Steps, stepJSON{ID: s.ID, Name: s.Name, State: string(s.State), Skipped: s.Skipped, Attempts: s.Attempts, MaxAttempts: s.MaxAttempts, After: s.Parents, Error: s.Err(), Results: s.Results})
	}
	return of
}

// drawings are what a task can be shown as.
var drawings = []string{"text", "dot", "mermaid"}

func (a *app) taskShowCommand() *cobra.Command {
	var as string
	c := &cobra.Command{
		Use: "show TASK", Short: "Draw a task with its steps", Args: cobra.ExactArgs(1),
		Example: "  pgwake task show 0197c1c8-54b4-7a3e-9d3c-2f1b1c9d0e11\n  pgwake task show 0197c1c8-54b4-7a3e-9d3c-2f1b1c9d0e11 --as dot | dot -Tsvg > task.svg",
		RunE: func(c *cobra.Command, args []string) error {
			if a.asJSON && c.Flags().Changed("as") {
				return usagef("one of the two", "--as %s and --json cannot both be", as)
			}
			if !slices.Contains(drawings, as) {
				return usagef("text, dot or mermaid; or --json", "a task cannot be shown as %q", as)
			}
			return a.withGraph(c.Context(), func(_ *pgwake.Provider, g *taskgraph.Graph) error { return a.taskShow(c.Context(), g, args[0], as) })
		},
	}
	c.Flags().StringVar(&as, "as", "text", "text, dot or mermaid")
	return c
}

func (a *app) taskShow(ctx context.Context, g *taskgraph.Graph, id, as string) error {
	if a.asJSON {
		t, err := g.Task(ctx, id)
		if err != nil {
			return noTask(err, id)
		}
		steps, err := g.Steps(ctx, id)
		if err != nil {
			return err
		}
		return a.printJSON(ofTask(t, steps))
	}
	view, err := g.View(ctx, id)
	if err != nil {
		return noTask(err, id)
	}
	switch as {
	case "dot":
		a.printf("%s", view.DOT())
	case "mermaid":
		a.printf("%s", view.Mermaid())
	default:
		a.printf("%s", view.Text(&taskgraph.TextOptions{Color: a.color}))
	}
	return nil
}

func noTask(err error, id string) error {
	failed := fmt.Errorf("task %s: %w", id, err)
	if known := (*hinted)(nil); errors.As(err, &known) {
		return failed
	}
	if errors.Is(err, pgwake.ErrNotFound) || errors.Is(err, pgwake.ErrInvalid) && !errors.Is(err, pgwake.ErrPayloadTooLarge) {
		return &hinted{failed, "pgwake task list shows those that there are"}
	}
	return failed // what else there is to do about it others know
}

func (a *app) taskCancelCommand() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use: "cancel TASK", Short: "Cancel a task that has not ended, with its steps", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := a.confirm(c.Context(), "Cancel task %s, and all of its steps that have not ended?", args[0]); err != nil {
				return err
			}
			return a.decide(c.Context(), args[0], "cancelled", func(ctx context.Context, g *taskgraph.Graph) (bool, error) { return g.Cancel(ctx, args[0], reason) })
		},
	}
	reasonFlag(c, &reason)
	return c
}

func reasonFlag(c *cobra.Command, reason *string) {
	c.Flags().StringVar(reason, "reason", "by hand", "why, for those who read the transitions")
}

// decide does something to a task, and says what came of it.
func (a *app) decide(ctx context.Context, task, done string, do func(context.Context, *taskgraph.Graph) (bool, error)) error {
	return a.withGraph(ctx, func(_ *pgwake.Provider, g *taskgraph.Graph) error {
		changed, err := do(ctx, g)
		if err != nil {
			return noTask(err, task)
		}
		t, err := g.Task(ctx, task)
		if err != nil {
			return noTask(err, task)
		}
		if !changed {
			return &hinted{fmt.Errorf("task %s is %s: nothing was %s", task, t.State, done), "pgwake task show " + task}
		}
		if a.asJSON {
			return a.printJSON(ofTask(t, nil))
		}
		a.printf("%s: task %s\n", a.style.ok.Render(done), task)
		return nil
	})
}

func (a *app) taskRetryCommand() *cobra.Command {
	var steps []string
	var reason string
	c := &cobra.Command{
		Use: "retry TASK", Short: "Have steps that failed for good run again, with all their attempts", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkSteps(steps); err != nil {
				return err
			}
			return a.decide(c.Context(), args[0], "reset", func(ctx context.Context, g *taskgraph.Graph) (bool, error) {
				return eachStep(ctx, g, args[0], steps, taskgraph.StepError, func(step string) (bool, error) { return g.ResetStep(ctx, step, reason) })
			})
		},
	}
	reasonFlag(c, &reason)
	c.Flags().StringArrayVar(&steps, "step", nil, "this step alone, by its name; may be repeated (default all that failed)")
	return c
}

// checkSteps refuses the name that a variable has which is not set: it is not all steps, nor the task itself.
func checkSteps(names []string) error {
	if slices.Contains(names, "") {
		return usagef("the name of one; or no --step", "--step is empty")
	}
	return nil
}

// eachStep does something to the steps of those names, or to all in a state. It says whether anything has changed. Nothing is done if one of the
// names is none.
func eachStep(ctx context.Context, g *taskgraph.Graph, task string, names []string, state taskgraph.StepState, do func(step string) (bool, error)) (bool, error) {
	all, err := g.Steps(ctx, task)
	if err != nil {
		return false, err
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(s taskgraph.StepInfo) bool { return s.Name == name }) {
			return false, &hinted{fmt.Errorf("%w: it has no step %q", pgwake.ErrNotFound, name), "pgwake task show " + task}
		}
	}
	changed := false
	for _, s := range all {
		if len(names) > 0 && !slices.Contains(names, s.Name) || len(names) == 0 && s.State != state {
			continue
		}
		did, err := do(s.ID)
		if err != nil {
			return changed, fmt.Errorf("step %s: %w", s.Name, err)
		}
		changed = changed || did
	}
	return changed, nil
}

func (a *app) taskResolveCommand() *cobra.Command {
	var steps []string
	var reason, result string
	c := &cobra.Command{
		Use: "resolve TASK", Short: "Take a task, or steps of it, for done", Args: cobra.ExactArgs(1),
		Long: `Take a task for done, and cancel its steps that have not ended; or with --step take steps of it for done, so that it goes on.
With --result a step is complete with that result, as if its handler had returned it; without one, dependencies with a condition do not hold.`,
		RunE: func(c *cobra.Command, args []string) error {
			return a.taskResolve(c, args[0], steps, reason, result)
		},
	}
	reasonFlag(c, &reason)
	c.Flags().StringArrayVar(&steps, "step", nil, "this step, by its name; may be repeated (default the task itself)")
	c.Flags().StringVar(&result, "result", "", "JSON that the steps return, or what standard input has, if it is -")
	c.Flags().IntVar(&a.maxResult, "max-result", 1<<20, "how many bytes that may have: taskgraph.Config.MaxResult of the nodes")
	return c
}

func (a *app) taskResolve(c *cobra.Command, task string, steps []string, reason, result string) error {
	if a.maxResult < 1 {
		return usagef("as for the nodes, such as 4194304 for 4 MiB", "--max-result is not positive")
	}
	if err := checkSteps(steps); err != nil {
		return err
	}
	withResult := c.Flags().Changed("result")
	if len(steps) == 0 {
		if withResult {
			return usagef("--step with the name of one", "--result is that of a step")
		}
		if err := a.confirm(c.Context(), "Take task %s for done, and cancel its steps that have not ended?", task); err != nil {
			return err
		}
		return a.decide(c.Context(), task, "resolved", func(ctx context.Context, g *taskgraph.Graph) (bool, error) { return g.ResolveTask(ctx, task, reason) })
	}
	var data json.RawMessage
	if withResult {
		if result == "" {
			return usagef("null, if that is what is meant; or no --result", "--result is empty")
		}
		var err error
		if data, err = a.payload(c.Context(), []string{result}); err != nil {
			return err
		}
	}
	return a.decide(c.Context(), task, "resolved", func(ctx context.Context, g *taskgraph.Graph) (bool, error) {
		return eachStep(ctx, g, task, steps, "", func(step string) (bool, error) {
			if data != nil {
				did, err := g.CompleteStep(ctx, step, data, reason)
				if errors.Is(err, pgwake.ErrPayloadTooLarge) && len(data) > a.maxResult {
					err = &hinted{err, "--max-result, if the nodes take more"}
				}
				return did, err
			}
			return g.ResolveStep(ctx, step, reason)
		})
	})
}
