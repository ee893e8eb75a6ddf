package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/taskgraph"
)

// graphLine adds a line of a task.
func (s *story) graphLine(ms int, what, task string, l graphLine) *story {
	return s.line(ms, what, entry{Key: task, Graph: &l})
}

// tries is an attempt at a step, which ends in that way: done, failing, acked and refused.
func (s *story) tries(ms int, task, step string, try int, run, how string) *story {
	l := graphLine{Step: step, Try: try, Run: run}
	s.graphLine(ms, got, task, l)
	seen := l
	seen.Seen = map[string]string{}
	s.graphLine(ms+1, saw, task, seen)
	switch how {
	case acked, refused:
		s.graphLine(ms+2, acking, task, l).graphLine(ms+3, how, task, l)
	case "":
	default:
		s.graphLine(ms+2, how, task, l)
	}
	return s
}

// task is one that was submitted, and of which everything went as it should.
func (s *story) task(id, name string) *story {
	s.line(0, sending, entry{Key: id, Do: name, Graph: &graphLine{}}).graphLine(10, sent, id, graphLine{Task: id})
	h := &s.tables.layers.graphs
	h.tasks = append(h.tasks, heldTask{id: id, shape: name, state: string(shapes[name].end)})
	return s.steps(id, shapes[name], 100, 100)
}

// steps are those of a task, each of which begins so long after the one before.
func (s *story) steps(id string, of *shape, from, each int) *story {
	h := &s.tables.layers.graphs
	blocks := ""
	for i, step := range of.of(id) {
		ms := from + i*each
		run := id + "/" + step.name
		held := heldStep{task: id, name: step.name, state: string(taskgraph.StepComplete), run: run}
		decide := func(step string) { s.graphLine(ms+40, deciding, id, graphLine{Decide: of.blocked, Step: step}) }
		switch {
		case step.skipped:
			held.skipped, held.run = true, ""
		case blocks != "" && slices.Contains(step.after, blocks):
			held.state, held.run = string(taskgraph.StepCancelled), ""
		case step.sub != "":
			held.run = ""
			sub := id + "-sub"
			h.tasks = append(h.tasks, heldTask{id: sub, shape: step.sub, state: string(taskgraph.TaskComplete), parent: id, parentStep: step.name})
			s.steps(sub, shapes[step.sub], ms, each/5)
		case step.do == stepFlaky:
			s.tries(ms, id, step.name, 1, run+"1", failing).tries(ms+4, id, step.name, 2, run+"2", failing).tries(ms+8, id, step.name, 3, run, done)
		case step.do == stepEffect:
			s.tries(ms, id, step.name, 1, run, acked)
			h.effects = append(h.effects, graphEffect{id, step.name, run})
		case step.fails():
			s.tries(ms, id, step.name, 1, run+"1", failing)
			held.state, held.run = string(taskgraph.StepError), ""
			switch of.blocked {
			case resolveStep:
				held.state = string(taskgraph.StepResolvedManually)
				decide(step.name)
			case resetStep:
				held.state, held.run = string(taskgraph.StepComplete), run
				decide(step.name)
				s.tries(ms+50, id, step.name, 1, run, done)
			default:
				blocks = step.name
				decide("")
			}
		default:
			s.tries(ms, id, step.name, 1, run, done)
		}
		h.steps = append(h.steps, held)
	}
	// Whoever runs is given the results of all that it waits for.
	for _, e := range s.lines {
		if e.What == saw && e.Key == id {
			for _, step := range of.of(id) {
				if step.name == e.Graph.Step {
					for _, parent := range step.after {
						if p := s.held(id, parent); !p.skipped && p.state == string(taskgraph.StepComplete) {
							e.Graph.Seen[parent] = p.run
						}
					}
				}
			}
		}
	}
	return s
}

// held is what the tables have of a step.
func (s *story) held(task, step string) *heldStep {
	all := s.tables.layers.graphs.steps
	return &all[slices.IndexFunc(all, func(h heldStep) bool { return h.task == task && h.name == step })]
}

// ends has the tables say another state of a task.
func (s *story) endsAs(task string, state taskgraph.TaskState) *story {
	for i, t := range s.tables.layers.graphs.tasks {
		if t.id == task {
			s.tables.layers.graphs.tasks[i].state = string(state)
		}
	}
	return s
}

// drop leaves out lines.
func (s *story) drop(which func(entry) bool) *story {
	s.lines = slices.DeleteFunc(s.lines, which)
	return s
}

// change changes something of the story.
func (s *story) change(how func(*graphsHeld)) *story {
	how(&s.tables.layers.graphs)
	return s
}

func ofRun(what, run string) func(entry) bool {
	return func(e entry) bool { return e.What == what && e.Graph.Run == run }
}

func TestJudgeGraphs_EveryShapeAsItShould_IsNoViolation(t *testing.T) {
	weights := 0
	for name, of := range shapes {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, of.definition().Validate())
			s := new(story).task("t", name)
			assert.Empty(t, s.violations())
		})
		weights += of.weight
	}
	assert.Equal(t, 100, weights)
}

func TestJudgeGraphs_WhatMayHappen_IsNoViolation(t *testing.T) {
	for name, s := range map[string]*story{
		"unknown outcome, and not there": new(story).line(0, sending, entry{Key: "t", Do: "chain", Graph: &graphLine{}}),
		"unknown outcome, and there":     new(story).task("t", "chain").drop(func(e entry) bool { return e.What == sent }),
		"rolled back":                    new(story).line(0, sending, entry{Key: "t", Do: "chain", Graph: &graphLine{Order: true}}).graphLine(5, revoked, "t", graphLine{}),
		"a duplicate": new(story).task("t", "chain").line(20, sending, entry{Key: "u", Do: "chain", Dedup: "d", Graph: &graphLine{}}).
			line(30, sent, entry{Key: "u", Duplicate: true, Graph: &graphLine{Task: "t"}}).change(func(*graphsHeld) {}).dedup("t", "d"),
		"cancelled": new(story).task("t", "chain").graphLine(150, cancelling, "t", graphLine{Decide: cancelling}).
			graphLine(160, cancelled, "t", graphLine{Decide: cancelling}).endsAs("t", taskgraph.TaskCancelled),
		"cancelled too late":  new(story).task("t", "chain").graphLine(1000, cancelling, "t", graphLine{Decide: cancelling}).graphLine(1010, refused, "t", graphLine{Decide: cancelling}),
		"an attempt was lost": new(story).task("t", probeShape).tries(50, "t", "a", 2, "lost", ""),
		"an attempt was given back, and made again": new(story).task("t", probeShape).tries(50, "t", "a", 1, "stopped", "").
			graphLine(60, returning, "t", graphLine{Step: "a", Run: "stopped"}),
		"a crash took back that an attempt had begun": (&story{crashes: []span{{at(60), at(70)}}}).task("t", probeShape).tries(50, "t", "a", 1, "crashed", ""),
		"a checkpoint before the end": new(story).task("t", probeShape).graphLine(101, kept, "t", graphLine{Step: "a", Run: "t/a", Since: at(100)}).
			graphLine(300, ended, "t", graphLine{State: string(taskgraph.TaskComplete)}),
	} {
		t.Run(name, func(t *testing.T) { assert.Empty(t, s.violations()) })
	}
}

// dedup has a task be submitted with an idempotency key.
func (s *story) dedup(task, key string) *story {
	for i := range s.lines {
		if s.lines[i].What == sending && s.lines[i].Key == task {
			s.lines[i].Dedup = key
		}
	}
	return s
}

func TestJudgeGraphs_WhatMustNotHappen_IsAViolation(t *testing.T) {
	tell := func(ms int, state taskgraph.TaskState) func(*story) *story {
		return func(s *story) *story { return s.graphLine(ms, ended, "t", graphLine{State: string(state)}) }
	}
	for want, s := range map[string]*story{
		"is lost: submitted":                        new(story).line(0, sending, entry{Key: "t", Do: "chain", Graph: &graphLine{}}).graphLine(5, sent, "t", graphLine{Task: "t"}),
		"nobody submitted it":                       new(story).task("t", "chain").drop(func(e entry) bool { return e.What == sending }),
		"had been rolled back":                      new(story).task("t", "chain").graphLine(11, revoked, "t", graphLine{}),
		"and u was returned":                        new(story).task("t", "chain").graphLine(11, sent, "t", graphLine{Task: "u"}),
		"submission had reported a duplicate":       new(story).task("t", "chain").line(11, sent, entry{Key: "t", Duplicate: true, Graph: &graphLine{Task: "t"}}),
		"have the same idempotency key":             new(story).task("t", "chain").task("u", "chain").dedup("t", "d").dedup("u", "d"),
		"a duplicate of x, which is not there":      new(story).line(0, sending, entry{Key: "t", Dedup: "d", Do: "chain", Graph: &graphLine{}}).line(11, sent, entry{Key: "t", Duplicate: true, Graph: &graphLine{Task: "x"}}),
		"rows of the transaction":                   new(story).task("t", "chain").change(func(h *graphsHeld) { h.orders = []string{"t", "t"} }),
		"has run, and is not there":                 new(story).line(0, sending, entry{Key: "t", Do: "chain", Graph: &graphLine{}}).tries(50, "t", "a", 1, "r", done),
		"is stuck":                                  new(story).task("t", "chain").endsAs("t", taskgraph.TaskStepsInProcess),
		"ended as error, and was to end as":         new(story).task("t", "chain").endsAs("t", taskgraph.TaskError),
		"and was to end as [cancelled]":             new(story).task("t", "chain").graphLine(11, cancelled, "t", graphLine{Decide: cancelling}),
		"and was to end as [complete]":              new(story).task("t", "chain").endsAs("t", taskgraph.TaskCancelled).graphLine(1, cancelling, "t", graphLine{Decide: cancelling}).graphLine(900, refused, "t", graphLine{Decide: cancelling}),
		"that it had ended as error":                tell(900, taskgraph.TaskError)(new(story).task("t", "chain")),
		"has no step c":                             new(story).task("t", "chain").change(func(h *graphsHeld) { h.steps = h.steps[:2] }),
		"has a step x, which it was not":            new(story).task("t", "chain").change(func(h *graphsHeld) { h.steps = append(h.steps, heldStep{task: "t", name: "x", state: "complete"}) }),
		"is complete, and its step c is":            new(story).task("t", "chain").state("c", taskgraph.StepPending),
		"is cancelled, and its step c is":           new(story).task("t", "chain").state("c", taskgraph.StepInProgress).graphLine(1, cancelled, "t", graphLine{Decide: cancelling}).endsAs("t", taskgraph.TaskCancelled),
		"in error, which it has no reason":          new(story).task("t", "given up").state("b", taskgraph.StepError),
		"in error, and no attempt said so":          new(story).task("t", "given up").drop(ofRun(failing, "t/bad1")),
		"which returned none":                       new(story).task("t", "chain").drop(ofRun(done, "t/c")),
		"complete with the result of attempt \"x\"": new(story).task("t", "chain").change(func(h *graphsHeld) { h.steps[2].run = "x" }),
		"was skipped, and has run":                  new(story).task("t", "skipping").tries(250, "t", "b", 1, "r", done),
		"took effect 0 times":                       new(story).task("t", "effects").change(func(h *graphsHeld) { h.effects = h.effects[1:] }),
		"took effect 2 times":                       new(story).task("t", "effects").change(func(h *graphsHeld) { h.effects = append(h.effects, h.effects[0]) }),
		"took effect by attempt x":                  new(story).task("t", "effects").change(func(h *graphsHeld) { h.effects[0].run = "x" }),
		"took effect 1 times":                       new(story).task("t", "chain").change(func(h *graphsHeld) { h.effects = []graphEffect{{"t", "a", "t/a"}} }),
		"and the task that it is is not":            new(story).task("t", "nested").endsAs("t-sub", taskgraph.TaskCancelled),
		"before a was done":                         new(story).task("t", probeShape).tries(90, "t", "b", 2, "early", done),
		"before b was done":                         new(story).task("t", "nested").drop(ofRun(done, "t-sub/c")),
		"before extra0 was done":                    new(story).task("t", "dynamic").drop(ofRun(done, "t/extra0")),
		"step x has run, which it was not":          new(story).task("t", "chain").tries(50, "t", "x", 1, "r", done),
		"made attempt 3 of 2":                       new(story).task("t", "resolved").tries(120, "t", "bad", 3, "r", failing),
		"attempt 1 at step a was made by":           new(story).task("t", probeShape).tries(50, "t", "a", 1, "again", ""),
		"was given the result of attempt \"x\"":     new(story).task("t", "chain").sees("c", "b", "x"),
		"was given no result of b":                  new(story).task("t", "chain").sees("c", "b", ""),
		"after its task had ended":                  tell(250, taskgraph.TaskComplete)(new(story).task("t", probeShape)).graphLine(300, kept, "t", graphLine{Step: "b", Run: "t/b", Since: at(260)}),
		"after u had begun":                         new(story).task("t", probeShape).tries(150, "t", "a", 2, "u", "").graphLine(170, kept, "t", graphLine{Step: "a", Run: "t/a", Since: at(160)}),
		"had completed it":                          new(story).task("t", "effects").graphLine(500, kept, "t", graphLine{Step: "b", Run: "t/b", Since: at(450)}),
		"told that the task had ended":              tell(300, taskgraph.TaskComplete)(new(story).task("t", probeShape)).tries(300+11_000, "t", "b", 2, "late", ""),
		"by an attempt that nobody made":            new(story).task("t", "chain").graphLine(50, done, "t", graphLine{Step: "a", Run: "x"}),
	} {
		t.Run(want, func(t *testing.T) {
			found := s.violations()
			assert.True(t, slices.ContainsFunc(found, func(v string) bool { return strings.Contains(v, want) }), "%q", found)
		})
	}
}

// state has the tables say another state of a step of task t.
func (s *story) state(step string, state taskgraph.StepState) *story {
	s.held("t", step).state = string(state)
	return s
}

// sees has a step of task t be given a result of another attempt; "": none.
func (s *story) sees(step, parent, run string) *story {
	for _, e := range s.lines {
		if e.What == saw && e.Graph.Step == step {
			if e.Graph.Seen[parent] = run; run == "" {
				delete(e.Graph.Seen, parent)
			}
		}
	}
	return s
}

// A probe in a calm: each of its three ways has to be short.
func TestJudgeGraphs_LateProbe_IsAViolation(t *testing.T) {
	calm := []round{{bound: at(0), calm: span{at(0), at(9000)}}}
	build := func(a, b, told int) *story {
		s := &story{rounds: calm}
		s.task("t", probeShape)
		for i, e := range s.lines {
			switch {
			case e.Graph.Run == "t/a":
				s.lines[i].At = e.At.Add(time.Duration(a) * time.Millisecond)
			case e.Graph.Run == "t/b":
				s.lines[i].At = e.At.Add(time.Duration(b) * time.Millisecond)
			}
		}
		return s.graphLine(told, ended, "t", graphLine{State: string(taskgraph.TaskComplete)})
	}
	assert.Empty(t, build(0, 0, 1000).violations())
	for want, s := range map[string]*story{
		"step a in p, due": build(2500, 2500, 3000), "step b in p, after a": build(0, 2500, 3000), "the end, in p": build(0, 0, 3000),
	} {
		found := s.violations()
		if assert.Len(t, found, 1, want) {
			assert.Contains(t, found[0], want)
		}
	}
	c := &chaos{stalls: []span{{at(300), at(1200)}}}
	late := build(0, 2500, 3000)
	assert.Empty(t, c.judge(late.lines, late.tables, late.rounds).violations, "slowness of the machine is added")
	assert.Contains(t, fmt.Sprint(&c.judge(late.lines, late.tables, late.rounds).graphs), "1 tasks")
}
