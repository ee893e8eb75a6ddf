package console

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: which tasks are there, and how far is one of them?

type tasks struct {
	Missing bool // there is no task graph
	Rows    []taskgraph.Task
	States  []taskgraph.TaskState
	Pager   pager
}

func loadTasks(v *view) (any, error) {
	g := v.c.o.Tasks
	if g == nil {
		return &tasks{Missing: true}, nil
	}
	f := &taskgraph.TaskFilter{Namespace: v.text("namespace"), Name: v.text("name"), State: taskgraph.TaskState(v.text("state")), ParentTask: v.text("parent"), Limit: perPage,
		PayloadBytes: unlisted}
	if before := v.text("before"); before != "" {
		data, err := base64.RawURLEncoding.DecodeString(before)
		if f.Before = new(taskgraph.Task); err != nil || json.Unmarshal(data, &taskPlace{&f.Before.ID, &f.Before.RequestedAt}) != nil {
			return nil, badRequest("that is no place in the list")
		}
	}
	found, err := g.ListTasks(v.r.Context(), f)
	if err != nil {
		return nil, err
	}
	list := &tasks{Rows: found, States: taskgraph.TaskStates()}
	next := ""
	if len(found) == perPage {
		last := &found[perPage-1]
		data, err := json.Marshal(taskPlace{&last.ID, &last.RequestedAt})
		if err != nil {
			return nil, err
		}
		next = base64.RawURLEncoding.EncodeToString(data)
	}
	list.Pager = v.pagerOf("before", next)
	return list, nil
}

// taskPlace is where a page of the list ends.
type taskPlace struct {
	ID *string
	At *time.Time
}

type task struct {
	Missing bool
	*taskgraph.Task
	Steps      []step
	Many       int  // steps, if that is too many to be drawn
	Dense      bool // they wait for too many others to be drawn
	Graph      *graph
	Why        string // Task.Reason
	Summary    string // of the graph, for those who do not see it
	Parts      []shown
	Pager      pager
	History    []taskgraph.Transition
	Later      int // transitions that are not shown
	AskHistory string
	Ended      bool
	Failed     int

	SeenFailures string // for the button that has them run again
}

// Seen is for the buttons that are about the task.
func (t *task) Seen() string { return taskSeen(t.Task) }

func loadTask(v *view) (any, error) {
	g := v.c.o.Tasks
	if g == nil {
		return &task{Missing: true}, nil
	}
	ctx, id := v.r.Context(), v.text("id")
	found, err := g.Task(ctx, id)
	if err != nil {
		return nil, err
	}
	infos, err := g.Steps(ctx, id)
	if err != nil {
		return nil, err
	}
	t := &task{Task: found, Ended: found.State.IsTerminal(), AskHistory: v.With("history", "1")}
	t.SeenFailures = failuresSeen(infos)
	v.Title = "Task " + found.Name
	if found.Reason != nil {
		t.Why = string(v.c.redacted(Payload{"reason", found.Namespace, found.Name, []byte(*found.Reason)}))
	}
	counts := make(map[string]int64)
	for i := range infos {
		s := v.step(found.Namespace, &infos[i])
		counts[s.Shown]++
		if s.State == taskgraph.StepError {
			t.Failed++
		}
		t.Steps = append(t.Steps, s)
	}
	for _, state := range glance.ByCount(counts) {
		t.Summary += fmt.Sprintf(", %d %s", counts[state], state)
	}
	t.Graph = drawn(t.Steps)
	t.Dense = t.Graph == nil && len(t.Steps) > 0 && len(t.Steps) <= maxDrawn
	if len(t.Steps) > maxDrawn {
		t.Many = len(t.Steps)
		if t.Steps, t.Pager, err = paged(v, t.Steps, maxRows); err != nil {
			return nil, err
		}
	}
	pairs := []any{"Context", Payload{"context", found.Namespace, found.Name, found.Context}}
	for i := range infos {
		if s := &infos[i]; s.Name == v.Value("step") {
			of := func(kind string, data []byte) Payload { return Payload{kind, found.Namespace, s.Name, data} }
			pairs = append(pairs, "Inputs of the step", of("inputs", s.Inputs), "Results of the step", of("results", s.Results), "Checkpoint of the step", of("checkpoint", s.Checkpoint))
		}
	}
	if t.Parts, err = v.parts(pairs...); err != nil {
		return nil, err
	}
	if v.text("history") != "" && !v.Live {
		if t.History, err = g.AllTransitions(ctx, id); err != nil {
			return nil, err
		}
		if len(t.History) > maxRows {
			t.History, t.Later = t.History[:maxRows], len(t.History)-maxRows
		}
	}
	return t, nil
}

func (v *view) step(namespace string, s *taskgraph.StepInfo) step {
	of := step{StepInfo: *s, Shown: words(s.State), Error: string(v.c.redacted(Payload{"error", namespace, s.Name, []byte(s.Err())}))}
	if s.Skipped {
		of.Shown = "skipped"
	}
	of.Took = s.Took(func(at time.Time) time.Duration { return v.Now.Sub(v.c.p.LocalTime(at)) })
	if of.Error == "" {
		of.Brief = v.brief(Payload{"results", namespace, s.Name, s.Results})
	}
	return of
}
