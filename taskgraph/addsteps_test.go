package taskgraph_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what can be added to a task while it runs, and how does it become part of the graph?

// edges are the dependencies of a task, as parent-child or parent-child if condition.
func (l *lab) edges(task string) []string {
	l.t.Helper()
	return all[string](l, `SELECT p.name || '-' || c.name || coalesce(' if ' || d.condition, '') FROM step_dependencies d
		JOIN steps p ON p.step_id = d.from_step_id JOIN steps c ON c.step_id = d.to_step_id WHERE d.task_id = $1 ORDER BY 1`, task)
}

// unmet are the steps of a task with the number of dependencies that are not met, as far as it says.
func (l *lab) unmet(task string) map[string]int {
	l.t.Helper()
	found := make(map[string]int)
	for _, text := range all[string](l, `SELECT name || ' ' || unmet FROM steps WHERE task_id = $1`, task) {
		var name string
		var n int
		_, err := fmt.Sscan(text, &name, &n)
		require.NoError(l.t, err)
		found[name] = n
	}
	return found
}

func TestAddSteps_Conditions_HoldOrTheStepIsSkipped(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Result: map[string]any{"n": 7}, Steps: []taskgraph.AddedStep{
			{Name: "many", Template: "more", AfterIf: []taskgraph.Dependency{{Step: "decide", If: "$.n > 5"}}, Before: []string{"last"}},
			{Name: "few", Template: "more", AfterIf: []taskgraph.Dependency{{Step: "decide", If: "$.n <= 5"}}, Before: []string{"last"}},
			{Name: "check", Template: "more", After: []string{"many"}, BeforeIf: []taskgraph.Dependency{{Step: "good", If: `$.from == "check"`}, {Step: "bad", If: `$.from == "nobody"`}}},
			{Name: "late", Template: "more", AfterIf: []taskgraph.Dependency{{Step: "first", If: `$.from == "nobody"`}}},
		}}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "conditions", "1").Step("first", "h").Step("decide", "decide", taskgraph.After("first")).
		Step("good", "h", taskgraph.After("decide")).Step("bad", "h", taskgraph.After("decide")).Step("last", "h", taskgraph.After("decide")).Template("more", "h"))
	g.complete(task)
	skipped := make(map[string]bool)
	steps, err := g.Steps(t.Context(), task)
	require.NoError(t, err)
	for _, s := range steps {
		skipped[s.Name] = s.Skipped
	}
	require.Equal(t, map[string]bool{"first": false, "decide": false, "good": false, "bad": true, "last": false, "many": false, "few": true, "check": false, "late": true}, skipped)
	require.ElementsMatch(t, []string{"first", "many", "check", "good", "last"}, r.names())
}

func TestAddSteps_BadInput_AllOfItIsToldBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	g := closed(t)
	after := func(step, condition string) []taskgraph.Dependency {
		return []taskgraph.Dependency{{Step: step, If: condition}}
	}
	_, err := g.AddSteps(t.Context(), noID,
		taskgraph.AddedStep{Name: "", Template: "t"},
		taskgraph.AddedStep{Name: "100%d", Template: "", MaxAttempts: -1, Inputs: func() {}},
		taskgraph.AddedStep{Name: "100%d", Template: "t\x00", MaxAttempts: 1 << 31},
		taskgraph.AddedStep{Name: "a", Template: "t", After: []string{"a", "b", "b", ""}, Before: []string{strings.Repeat("x", 256)}},
		taskgraph.AddedStep{Name: "c", Template: "t", After: []string{"b"}, AfterIf: append(after("b", "$ == 1"), after("d", "?")...), BeforeIf: append(after("c", ""), after("e", strings.Repeat(" ", 5000))...)})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.EqualError(t, err, `pgwake: add steps: invalid argument: 14 problems:
	step "": name is empty
	step "100%d": template is empty
	step "100%d": max_attempts of -1 is not between 0 and 2147483647
	step "100%d": inputs: json: unsupported type: func()
	step "100%d": template "t\x00" contains NUL
	step "100%d": added more than once
	step "100%d": max_attempts of 2147483648 is not between 0 and 2147483647
	step "a": depends on itself
	step "`+strings.Repeat("x", 100)+`"…: depends on "a": one of the two is no name
	step "c": depends on "b" twice, with different conditions
	step "c": condition on "d": condition "?": at character 1: expected a path, a string, a number, true, false or null, found '?'
	step "c": depends on itself
	step "c": condition on "c" is empty
	step "e": condition on "c" is 5000 bytes long, more than 4096`)
	_, err = g.AddSteps(t.Context(), "7", taskgraph.AddedStep{Name: "a", Template: "t"})
	require.ErrorContains(t, err, `"7" is not the id of a task`)
	_, err = g.AddSteps(t.Context(), noID, make([]taskgraph.AddedStep, taskgraph.MaxSteps+1)...)
	require.ErrorContains(t, err, "20001 steps with 0 dependencies; 20000 and 200000 are the most")
	_, err = g.AddSteps(t.Context(), noID, taskgraph.AddedStep{Name: "a", Template: "t", After: make([]string, taskgraph.MaxDependencies+1)})
	require.ErrorContains(t, err, "1 steps with 200001 dependencies; 20000 and 200000 are the most")
	_, err = g.AddSteps(t.Context(), noID, make([]taskgraph.AddedStep, taskgraph.MaxSteps)...)
	require.Less(t, len(err.Error()), 20_000)
}

func TestT10_DuplicateEdges_AreOne_AndThoseToAnotherTaskAreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := taskgraph.Define("shop", "edges", "1").Step("a", "h").Step("b", "h", taskgraph.AfterIf("a", "$.n == 1")).Template("x", "h")
	require.NoError(t, l.Register(t.Context(), d, taskgraph.Define("shop", "edges", "2").Step("theirs", "h")))
	submit := func(d *taskgraph.Definition) string {
		done, err := l.Submit(t.Context(), aTask(d))
		require.NoError(t, err)
		return done.ID
	}
	task, other, twin := submit(d), submit(taskgraph.Define("shop", "edges", "2")), submit(d)

	_, err := l.AddSteps(t.Context(), task, taskgraph.AddedStep{Name: "x", Template: "x", After: []string{"a", "a"}, Before: []string{"b", "b"}})
	require.NoError(t, err)
	_, err = l.AddSteps(t.Context(), task, taskgraph.AddedStep{Name: "y", Template: "x", After: []string{"z"}}, taskgraph.AddedStep{Name: "z", Template: "x", Before: []string{"y"}})
	require.NoError(t, err)
	want := []string{`a-b if ($."n" == 1)`, "a-x", "x-b", "z-y"}
	require.Equal(t, want, l.edges(task))
	require.Equal(t, map[string]int{"a": 0, "b": 2, "x": 1, "y": 1, "z": 0}, l.unmet(task))
	// Between steps that are there, which only SQL can say; the condition that is there stays.
	l.exec(`SELECT add_steps($1, '{}', '{}', p_parents => ARRAY['a', 'a', 'x'], p_children => ARRAY['b', 'x', 'b'], p_conditions => ARRAY['$.n == 2', NULL, NULL])`, task)
	require.Equal(t, want, l.edges(task))
	require.Equal(t, map[string]int{"a": 0, "b": 2, "x": 1, "y": 1, "z": 0}, l.unmet(task))

	for name, step := range map[string]taskgraph.AddedStep{
		"after":  {Name: "w", Template: "x", After: []string{"theirs"}},
		"before": {Name: "w", Template: "x", Before: []string{"theirs"}},
	} {
		_, err = l.AddSteps(t.Context(), task, step)
		require.ErrorIs(t, err, pgwake.ErrNotFound, name)
		require.ErrorContains(t, err, "theirs", name)
	}
	l.fails("23503", `INSERT INTO step_dependencies (task_id, from_step_id, to_step_id) VALUES ($1, $2, $3)`, task, l.step(task, "a"), l.step(other, "theirs"))
	l.fails("23503", `INSERT INTO step_dependencies (task_id, from_step_id, to_step_id) VALUES ($1, $2, $3)`, other, l.step(task, "a"), l.step(other, "theirs"))
	require.Equal(t, want, l.edges(task))
	require.Len(t, l.unmet(task), 5)
	require.Equal(t, want[:1], l.edges(twin), "that has steps of the same names")
}
