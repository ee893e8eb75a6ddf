package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: do the commands about tasks, events and schedules do what the layers do?

// blockedTask is one of which a step has failed for good, and an engine that goes on with it.
func blockedTask(t *testing.T, p *pgwake.Provider, fails func() error) (e *taskgraph.Engine, task string) {
	t.Helper()
	e, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	e.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return "fine", nil })
	e.Handle("fails", func(context.Context, *taskgraph.Step) (any, error) { return nil, fails() })
	require.NoError(t, e.Register(t.Context(), taskgraph.Define("default", "order", "1.0.0").
		Step("reserve", "ok").Step("charge", "fails", taskgraph.NotRetryable(), taskgraph.After("reserve")).Step("ship", "ok", taskgraph.After("charge"))))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = e.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	s, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: "order", Version: "1.0.0"})
	require.NoError(t, err)
	awaitState(t, e, s.ID, taskgraph.TaskBlockedByFailures)
	return e, s.ID
}

func awaitState(t *testing.T, e *taskgraph.Engine, task string, state taskgraph.TaskState) {
	t.Helper()
	require.Eventually(t, func() bool {
		now, err := e.CurrentTaskState(t.Context(), task)
		return err == nil && now == state
	}, 20*time.Second, 10*time.Millisecond)
}

func TestTask_ShowAndRetry(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	broken := make(chan error, 2)
	broken <- errors.New("card declined")
	e, task := blockedTask(t, p, func() error {
		select {
		case err := <-broken:
			return err
		default:
			return nil
		}
	})
	require.Contains(t, c.ok("task", "list", "--state", "blocked_by_failures"), task)
	require.Empty(t, into[[]taskJSON](c, "task", "list", "--state", "complete"))
	out := c.ok("task", "show", task)
	require.Contains(t, out, "charge  <- reserve")
	require.Contains(t, out, "card declined")
	require.Contains(t, c.ok("task", "show", task, "--as", "dot"), "digraph")
	require.Contains(t, c.ok("task", "show", task, "--as", "mermaid"), "flowchart")
	require.Contains(t, c.refused(exitUsage, "task", "show", task, "--as", "poem"), "text, dot or mermaid")
	require.Contains(t, c.refused(exitUsage, "task", "show", task, "--as", "dot", "--json"), "one of the two")
	require.Len(t, into[taskJSON](c, "task", "show", task).Steps, 3)

	said := c.refused(exitFailed, "task", "retry", task, "--step", "nothing")
	require.Contains(t, said, `no step "nothing"`)
	require.Contains(t, said, "pgwake task show "+task)
	c.ok("task", "retry", task, "--reason", "the bank is back")
	awaitState(t, e, task, taskgraph.TaskComplete)
	require.Contains(t, c.refused(exitFailed, "task", "retry", task), "nothing was reset")
	require.Contains(t, c.ok("tail", "transitions", "--all", "--limit", "3"), "pending")
}

func TestTask_ResolveAStep_TheTaskGoesOn(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	e, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	require.Contains(t, c.refused(exitUsage, "task", "resolve", task, "--result", "1", "--yes"), "--step")
	c.ok("task", "resolve", task, "--step", "charge", "--result", `{"paid":true}`)
	awaitState(t, e, task, taskgraph.TaskComplete)
}

// What is not there is said before anything is done to what is; and a name that is empty is not all steps, nor the task.
func TestTask_StepsOrResultAreNotSaidWell_NothingIsWritten(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	_, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	before := into[taskJSON](c, "task", "show", task)
	for _, verb := range []string{"resolve", "retry"} {
		said := c.refused(exitFailed, "task", verb, task, "--step", "charge", "--step", "carge")
		require.Contains(t, said, `not found: it has no step "carge"`)
		require.Contains(t, said, "pgwake task show "+task)
		require.Contains(t, c.refused(exitUsage, "task", verb, task, "--step", "", "--yes"), "--step is empty")
		require.Contains(t, c.refused(exitUsage, "task", verb, task, "--step", "charge", "--step", ""), "--step is empty")
	}
	require.Contains(t, c.refused(exitUsage, "task", "resolve", task, "--step", "charge", "--result", ""), "--result is empty")
	require.Contains(t, c.refused(exitUsage, "task", "resolve", task, "--result", "", "--yes"), "--step with the name of one")
	for _, in := range []string{"", " \n"} {
		c.in = in
		require.Contains(t, c.refused(exitUsage, "task", "resolve", task, "--step", "charge", "--result", "-"), "standard input is empty")
	}
	require.Equal(t, before, into[taskJSON](c, "task", "show", task))
}

func TestTask_ResolveAStep_ItsResultIsAsLargeAsTheNodesAllow(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	e, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	resolve := func(result string, more ...string) []string {
		c.in = result
		return append([]string{"task", "resolve", task, "--step", "charge", "--result", "-"}, more...)
	}
	large := `"` + strings.Repeat("x", 2<<20) + `"`
	said := c.refused(exitUsage, resolve(large)...)
	require.Contains(t, said, "1048576 is the most")
	require.Contains(t, said, "--max-result")
	require.NotContains(t, said, "task list")
	require.Contains(t, c.refused(exitUsage, resolve(`"xx"`, "--max-result", "3")...), "3 is the most")
	require.Contains(t, c.refused(exitUsage, resolve(`"xx"`, "--max-result", "0")...), "--max-result")
	c.ok(resolve(large, "--max-result", "4194304")...)
	awaitState(t, e, task, taskgraph.TaskComplete)
}

func TestTask_CancelAndResolve_AreAsked(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	e, task := blockedTask(t, p, func() error { return errors.New("card declined") })
	c.in = "n\n"
	require.Contains(t, c.refused(exitFailed, "task", "cancel", task), "nothing was done")
	require.Equal(t, "cancelled", into[taskJSON](c, "task", "cancel", task, "--yes").State)
	require.Contains(t, c.refused(exitFailed, "task", "resolve", task, "--yes"), "nothing was resolved")
	state, err := e.CurrentTaskState(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskCancelled, state)
	require.Contains(t, c.refused(exitFailed, "task", "show", "0197c1c8-54b4-7a3e-9d3c-2f1b1c9d0e11"), "not found")
}

// A graph is a line for each step and is drawn whole, however wide, deep or oddly named.
func TestTask_LargeGraphsAndOddNames_AreDrawnWhole(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	e, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	e.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	wide := taskgraph.Define("default", "wide", "1.0.0").Step("root", "ok")
	var children []string
	for i := range 500 {
		children = append(children, fmt.Sprintf("child-%d", i))
		wide.Step(children[i], "ok", taskgraph.After("root"))
	}
	wide.Step("join", "ok", taskgraph.After(children...))
	deep := taskgraph.Define("default", "deep", "1.0.0").Step("level-0", "ok")
	for i := 1; i < 200; i++ {
		deep.Step(fmt.Sprintf("level-%d", i), "ok", taskgraph.After(fmt.Sprintf("level-%d", i-1)))
	}
	odd := []string{"שלום עולם", "👩‍💻 🎉", strings.Repeat("long", 60), "two\nlines \x1b[2J \u202e back"}
	strange := taskgraph.Define("default", "מוזר 🎉", "1.0.0").Step("first", "ok")
	for _, name := range odd {
		strange.Step(name, "ok", taskgraph.After("first"))
	}
	strange.Step("last", "ok", taskgraph.After(odd...))
	for of, steps := range map[*taskgraph.Definition]int{wide: 502, deep: 200, strange: 6} {
		require.NoError(t, e.Register(t.Context(), of))
		s, err := e.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: of.Name, Version: "1.0.0"})
		require.NoError(t, err)
		require.Len(t, into[taskJSON](c, "task", "show", s.ID).Steps, steps)
		out := c.ok("task", "show", s.ID)
		_, table, found := strings.Cut(out, "\nlevel ")
		require.True(t, found, out)
		require.Equal(t, steps+1, strings.Count(table, "\n"), "a line for each")
		const leftToRight = "\u200e" // after a name that is written the other way
		require.Equal(t, -1, strings.IndexFunc(strings.NewReplacer("\n", "", leftToRight, "").Replace(out), glance.Unprintable), "%q", out)
		for _, line := range strings.Split(out, "\n") {
			require.Less(t, ansi.StringWidth(line), 1200)
		}
	}
	require.Contains(t, c.ok("task", "list", "--limit", "2"), "… more: --before ")
	first := into[[]taskJSON](c, "task", "list", "--limit", "2")
	rest := into[[]taskJSON](c, "task", "list", "--limit", "2", "--before", first[1].ID)
	require.Len(t, rest, 1)
	require.NotContains(t, []string{first[0].ID, first[1].ID}, rest[0].ID)
	require.Contains(t, c.refused(exitFailed, "task", "list", "--before", "0197c1c8-54b4-7a3e-9d3c-2f1b1c9d0e11"), "not found")
}

func TestTask_SchemaHasNoTaskGraph_SaysHowItGetsThere(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	require.Contains(t, c.refused(exitFailed, "task", "list"), "pgwake migrate up --layer taskgraph")
}

func TestSchedule_ListPauseResumeRun(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	require.Contains(t, c.ok("schedule", "list"), "has no schedules")
	_, err = bus.Schedule(t.Context(), eventbus.Schedule{Name: "report", Cron: "30 4 * * *", TimeZone: "Europe/Berlin", Type: "report.due"})
	require.NoError(t, err)
	require.Contains(t, c.ok("schedule", "list"), "30 4 * * *")
	require.NotZero(t, into[[]scheduleJSON](c, "schedule", "list")[0].Next)
	require.Contains(t, c.ok("schedule", "list", "--limit", "1"), "… more: --after report")
	require.Contains(t, c.ok("schedule", "pause", "report"), "paused")
	require.True(t, into[[]scheduleJSON](c, "schedule", "list")[0].Paused)
	require.Contains(t, c.ok("schedule", "pause", "report"), "was paused already")
	require.Contains(t, c.refused(exitFailed, "schedule", "run", "report"), "pgwake schedule resume report")
	c.ok("schedule", "resume", "report")
	c.ok("schedule", "run", "report")
	require.Contains(t, c.ok("tail", "events", "--all", "--limit", "1"), "report.due")
	require.Contains(t, c.refused(exitFailed, "schedule", "run", "nothing"), "pgwake schedule list")
}

// Nobody would claim it, so it stays where it can be seen.
func TestDLQ_DeliveryWhoseGroupWasDeleted_IsNotRedriven(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, bus.Subscribe(t.Context(), "billing", []string{"order.created"}, nil))
	_, err = bus.Emit(t.Context(), "order.created", nil, nil)
	require.NoError(t, err)
	item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Tags: pgwake.Tags("eventbus/billing|order.created")})
	require.NoError(t, err)
	require.NoError(t, p.DeadLetterWorkItem(t.Context(), item.LockToken, "no such printer", ""))
	_, err = bus.DeleteGroup(t.Context(), "billing")
	require.NoError(t, err)
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "no such printer")

	out := c.ok("dlq", "redrive", "--all")
	require.Contains(t, out, "1 dead letter redriven")
	require.Contains(t, out, "1 letter stayed")
	left := into[[]deadLetter](c, "dlq", "list")
	require.Len(t, left, 1)
	require.Equal(t, "order.created", left[0].Name)
	require.Equal(t, map[string]int{"redriven": 0}, into[map[string]int](c, "dlq", "redrive", "--id", text(left[0].ID)))
}

func TestTail_Events_WhatIsEmittedFromNowOn(t *testing.T) {
	t.Parallel()
	c, p := newCLIOn(t, layered, &pgwake.Config{})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	c.exec(`SELECT setval('event_log_offset_seq', 1000000000000)`) // the log came from a server that had seen so much more
	_, err = bus.Emit(t.Context(), "order.created", map[string]int{"id": 1}, nil)
	require.NoError(t, err)
	done := make(chan result, 1)
	go func() {
		done <- c.run("tail", "events", "--type", "order.created", "--limit", "1", "--every", "20ms", "--json")
	}()
	for {
		_, err = bus.Emit(t.Context(), "order.created", map[string]int{"id": 2}, nil)
		require.NoError(t, err)
		select {
		case r := <-done:
			require.Zero(t, r.code, r.err)
			var h happened
			require.NoError(t, json.Unmarshal([]byte(r.out), &h))
			require.JSONEq(t, `{"id":2}`, string(h.Data))
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}
