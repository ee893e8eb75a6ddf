package main

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: what are the tasks made of, and how is each to end?
//
// Producers, handlers and the judge go by the same shapes: a shape says what its steps do, so it says how a task of it ends
// that nobody cancels, and in which state each of its steps is then.

// What the handler of a step does.
const (
	stepPlain   = "plain"   // returns a result
	stepProbe   = "quick"   // the same, and nothing else
	stepFlaky   = "flaky"   // fails twice
	stepEffect  = "effect"  // completes itself, in a transaction with a row in table graph_effects
	stepRefuse  = "refuse"  // fails for good
	stepExhaust = "exhaust" // fails at all of its attempts
	stepRelent  = "relent"  // fails for good, and does not once it was reset
	stepDecide  = "decide"  // adds steps to the task, for which the last one waits
	stepExtra   = "extra"   // is added
)

var stepHandlers = []string{stepPlain, stepProbe, stepFlaky, stepEffect, stepRefuse, stepExhaust, stepRelent, stepDecide, stepExtra}

// What somebody does about a task that is blocked.
const (
	giveUp      = "give up"
	resolveTask = "resolve the task"
	resolveStep = "resolve the step"
	resetStep   = "reset the step"
)

// shape is a definition. Steps are in an order in which they could run.
type shape struct {
	name    string
	weight  int // of 100 tasks
	steps   []shapeStep
	drains  bool
	blocked string              // what is done about it then; "": nothing of it fails for good
	end     taskgraph.TaskState // unless it is cancelled
}

type shapeStep struct {
	name    string
	do      string // "": it is a task of its own, of shape sub
	sub     string
	after   []string
	skipped bool // a condition on the first of these does not hold
}

const (
	probeShape     = "probe"
	probeSpace     = "probe" // namespace
	shapeSpace     = "default"
	shapeVersion   = "1"
	enoughAttempts = 100 // for all that processes may lose
	twoAttempts    = 2
	decider        = "decide" // name of the step
	joining        = "join"
)

var shapes = byName(
	shape{name: "chain", weight: 20, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "b", do: stepFlaky, after: []string{"a"}}, {name: "c", do: stepPlain, after: []string{"b"}}}},
	shape{name: "fan", weight: 15, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "b", do: stepPlain, after: []string{"a"}}, {name: "c", do: stepFlaky, after: []string{"a"}},
		{name: "d", do: stepPlain, after: []string{"a"}}, {name: "e", do: stepPlain, after: []string{"a"}},
		{name: joining, do: stepPlain, after: []string{"b", "c", "d", "e"}}}},
	shape{name: "effects", weight: 20, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "b", do: stepEffect, after: []string{"a"}}, {name: "c", do: stepEffect, after: []string{"a"}},
		{name: joining, do: stepEffect, after: []string{"b", "c"}}}},
	shape{name: "dynamic", weight: 10, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: decider, do: stepDecide}, {name: joining, do: stepPlain, after: []string{decider}}}},
	shape{name: "skipping", weight: 8, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "b", do: stepPlain, after: []string{"a"}, skipped: true},
		{name: "c", do: stepPlain, after: []string{"b"}}}},
	shape{name: "nested", weight: 7, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "b", sub: "chain", after: []string{"a"}}, {name: "c", do: stepPlain, after: []string{"b"}}}},
	shape{name: "given up", weight: 5, blocked: giveUp, end: taskgraph.TaskError, steps: []shapeStep{
		{name: "a", do: stepPlain}, {name: "bad", do: stepRefuse, after: []string{"a"}}, {name: "b", do: stepPlain, after: []string{"a"}},
		{name: "c", do: stepPlain, after: []string{"bad"}}}},
	shape{name: "resolved", weight: 5, blocked: resolveStep, drains: true, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "bad", do: stepExhaust}, {name: "b", do: stepPlain}, {name: "c", do: stepPlain, after: []string{"bad", "b"}}}},
	shape{name: "reset", weight: 5, blocked: resetStep, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "bad", do: stepRelent}, {name: "c", do: stepPlain, after: []string{"bad"}}}},
	shape{name: "dropped", weight: 5, blocked: resolveTask, drains: true, end: taskgraph.TaskResolvedManually, steps: []shapeStep{
		{name: "bad", do: stepRefuse}, {name: "b", do: stepPlain}, {name: "c", do: stepPlain, after: []string{"bad"}}}},
	shape{name: probeShape, end: taskgraph.TaskComplete, steps: []shapeStep{
		{name: "a", do: stepProbe}, {name: "b", do: stepProbe, after: []string{"a"}}}},
)

func byName(all ...shape) map[string]*shape {
	named := map[string]*shape{}
	for _, s := range all {
		named[s.name] = &s
	}
	return named
}

func (s *shape) namespace() string {
	if s.name == probeShape {
		return probeSpace
	}
	return shapeSpace
}

// definition is the shape as the library knows it.
func (s *shape) definition() *taskgraph.Definition {
	d := taskgraph.Define(s.namespace(), s.name, shapeVersion)
	if s.drains {
		d.OnFailure = taskgraph.Drain
	}
	for _, step := range s.steps {
		options := []taskgraph.StepOption{taskgraph.MaxAttempts(step.attempts())}
		for _, parent := range step.after {
			if step.skipped && parent == step.after[0] {
				options = append(options, taskgraph.AfterIf(parent, "$.go == true"))
			} else {
				options = append(options, taskgraph.After(parent))
			}
		}
		if step.sub != "" {
			d.SubTask(step.name, step.sub, shapeVersion, options...)
		} else {
			d.Step(step.name, step.do, append(options, taskgraph.Timeout(handlerTimeout))...)
		}
		if step.do == stepDecide {
			d.Template(stepExtra, stepExtra, taskgraph.MaxAttempts(enoughAttempts), taskgraph.Timeout(handlerTimeout))
		}
	}
	return d
}

func (s shapeStep) attempts() int {
	if s.do == stepExhaust {
		return twoAttempts
	}
	return enoughAttempts
}

// fails reports whether the step fails for good, at least for once.
func (s shapeStep) fails() bool {
	return s.do == stepRefuse || s.do == stepExhaust || s.do == stepRelent
}

// of returns the steps of a task, also those that are added to it, whose number follows from its id.
func (s *shape) of(task string) []shapeStep {
	var all []shapeStep
	for _, step := range s.steps {
		if s.name == "dynamic" && step.name == joining {
			for i := range extras(task) {
				extra := shapeStep{name: fmt.Sprint(stepExtra, i), do: stepExtra, after: []string{decider}}
				all, step.after = append(all, extra), append(step.after[:len(step.after):len(step.after)], extra.name)
			}
		}
		all = append(all, step)
	}
	return all
}

func extras(task string) int { return 1 + int(hash(task)%3) }

func hash(text string) uint32 {
	h := fnv.New32()
	_, _ = h.Write([]byte(text))
	return h.Sum32()
}

// ended is the state of a step of a task that is complete.
func (s *shape) ended(step shapeStep) taskgraph.StepState {
	if s.blocked == resolveStep && step.fails() {
		return taskgraph.StepResolvedManually
	}
	return taskgraph.StepComplete
}

// stepBackoff is short, so that what is tried again is done by the end.
var stepBackoff = taskgraph.Backoff{Base: 20 * time.Millisecond, Max: 300 * time.Millisecond}
