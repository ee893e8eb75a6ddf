package taskgraph_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/hostile"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of texts that callers choose, whatever they say? They come back byte for byte and find themselves alone, or are refused.

func TestTexts_OfTasks_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	texts, tags := hostile.Texts(pgwake.MaxNameLength), hostile.Texts(taskgraph.MaxTagLength)
	var definitions []*taskgraph.Definition
	var submissions []taskgraph.Submission
	for i, text := range texts {
		d := taskgraph.Define("shop", text, text).Step(text, text, taskgraph.Describe(text), taskgraph.Tag(tags[i]), taskgraph.LimitKey(text), taskgraph.Inputs(map[string]string{text: text}))
		d.Description = text
		definitions = append(definitions, d)
		submissions = append(submissions, taskgraph.Submission{Namespace: "shop", Name: text, Version: text, Context: map[string]string{text: text}, Tags: []string{text},
			IdempotencyKey: text, Initiator: text, SourceSystem: text, Reason: text})
	}
	require.NoError(t, l.Register(l.within(), definitions...))
	require.NoError(t, l.Register(l.within(), definitions...), "they are the same")
	done, err := l.SubmitMany(l.within(), submissions)
	require.NoError(t, err)
	again, err := l.SubmitMany(l.within(), submissions)
	require.NoError(t, err)

	pair := func(data json.RawMessage) (pairs map[string]string) {
		require.NoError(t, json.Unmarshal(data, &pairs))
		return pairs
	}
	for i, text := range texts {
		require.Equal(t, taskgraph.Submitted{ID: done[i].ID, Duplicate: true}, again[i], "%q", text)
		tasks, err := l.ListTasks(l.within(), &taskgraph.TaskFilter{Namespace: "shop", Name: text})
		require.NoError(t, err)
		require.Len(t, tasks, 1, "%q", text)
		task := tasks[0]
		require.Equal(t, []string{done[i].ID, text, text, text, text, text, text}, []string{task.ID, task.Name, task.Version, *task.IdempotencyKey, *task.Initiator, *task.SourceSystem, *task.Reason})
		require.Equal(t, map[string]string{text: text}, pair(task.Context))
		steps, err := l.Steps(l.within(), task.ID)
		require.NoError(t, err)
		require.Len(t, steps, 1)
		require.Equal(t, []string{text, text}, []string{steps[0].Name, *steps[0].Handler})
		require.Equal(t, map[string]string{text: text}, pair(steps[0].Inputs))

		entry, added, err := l.AddToDLQ(l.within(), task.ID, taskgraph.DLQManual, map[string]string{text: text})
		require.NoError(t, err)
		require.True(t, added)
		did(t)(l.ResolveDLQ(l.within(), entry, taskgraph.DLQManuallyResolved, text, text))
		entries, err := l.ListDLQ(l.within(), &taskgraph.DLQFilter{TaskID: task.ID, All: true})
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, []string{text, text, text, text}, []string{entries[0].TaskName, entries[0].Version, *entries[0].ResolvedBy, *entries[0].Notes})
		require.Equal(t, map[string]string{text: text}, pair(entries[0].Metadata))
		did(t)(l.Cancel(l.within(), task.ID, text))
		transitions, err := l.TaskTransitions(l.within(), task.ID)
		require.NoError(t, err)
		var why struct{ Reason string }
		require.NoError(t, json.Unmarshal(transitions[len(transitions)-1].Metadata, &why))
		require.Equal(t, text, why.Reason)
	}
}

// synced is a log that several write to.
type synced struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (s *synced) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.Write(p)
}

func (s *synced) lines() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Split(strings.TrimSuffix(s.all.String(), "\n"), "\n")
}

// They are the names of handlers and steps, results that others get and that conditions compare with, and errors in the log.
func TestTexts_OfSteps_ReachHandlersResultsAndTheLogAsTheyAre(t *testing.T) {
	t.Parallel()
	texts := hostile.Texts(pgwake.MaxNameLength)
	var log synced
	g := newGraph(t, &taskgraph.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	runs, fails := taskgraph.Define("shop", "runs", "1"), taskgraph.Define("shop", "fails", "1")
	fails.OnFailure = taskgraph.Drain
	var after []taskgraph.StepOption
	for _, text := range texts {
		g.Handle(text, func(_ context.Context, s *taskgraph.Step) (any, error) {
			if s.Name != text || s.Handler != text {
				return nil, taskgraph.Permanent(errors.New("it is another's"))
			}
			if s.TaskName == "fails" {
				return nil, taskgraph.Permanent(errors.New(text))
			}
			return text, nil
		})
		quoted, err := json.Marshal(text)
		require.NoError(t, err)
		runs.Step(text, text)
		fails.Step(text, text)
		after = append(after, taskgraph.AfterIf(text, "$ == "+string(quoted)))
	}
	var results map[string]json.RawMessage
	g.Handle("last", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var err error
		results, err = s.Results(ctx)
		return nil, err
	})
	runs.Step("the last one", "last", after...)
	g.run()
	running, failing := g.submit(runs), g.submit(fails)
	g.complete(running)
	last := g.step(running, "the last one")
	require.False(t, last.Skipped, "all conditions hold")
	require.Len(t, results, len(texts))
	for _, text := range texts {
		var result string
		require.NoError(t, json.Unmarshal(results[text], &result))
		require.Equal(t, text, result)
		one, err := g.DependencyResult(g.within(), last.ID, text)
		require.NoError(t, err)
		require.Equal(t, string(results[text]), string(one))
	}
	g.until(failing, taskgraph.TaskBlockedByFailures)
	steps, err := g.Steps(g.within(), failing)
	require.NoError(t, err)
	require.Len(t, steps, len(texts))
	for _, s := range steps {
		require.Equal(t, s.Name, s.Err())
	}
	require.NoError(t, g.stop())
	failures := 0
	for _, line := range log.lines() {
		require.True(t, hostile.IsLine(line) && strings.HasPrefix(line, "time="), "%q", line)
		if strings.Contains(line, "step failed") {
			failures++
		}
	}
	require.Equal(t, len(texts), failures)
}

// Nothing is sent: the provider is closed.
func TestTexts_ThatNoTextCanBe_AreRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	g, p := closed(t), schemas.New(t, nil)
	refused := func(err error, what string) {
		t.Helper()
		require.ErrorIs(t, err, pgwake.ErrInvalid, what)
		require.True(t, hostile.IsLine(strings.NewReplacer("\n", "", "\t", "").Replace(err.Error())), "%q", err)
	}
	for why, text := range hostile.Refused(pgwake.MaxNameLength) {
		for what, d := range map[string]*taskgraph.Definition{
			"name":      taskgraph.Define("shop", text, "1"),
			"version":   taskgraph.Define("shop", "n", text),
			"step":      taskgraph.Define("shop", "n", "1").Step(text, "h"),
			"handler":   taskgraph.Define("shop", "n", "1").Step("s", text),
			"parent":    taskgraph.Define("shop", "n", "1").Step("s", "h", taskgraph.After(text)),
			"tag":       taskgraph.Define("shop", "n", "1").Step("s", "h", taskgraph.Tag(text)),
			"limit key": taskgraph.Define("shop", "n", "1").Step("s", "h", taskgraph.LimitKey(text)),
		} {
			refused(g.Register(t.Context(), d), what+", "+why)
		}
		for what, s := range map[string]taskgraph.Submission{
			"name": {Name: text, Version: "1"}, "version": {Name: "n", Version: text}, "key": {Name: "n", Version: "1", IdempotencyKey: text},
		} {
			s.Namespace = "shop"
			refused(second(g.Submit(t.Context(), s)), what+", "+why)
		}
		for what, s := range map[string]taskgraph.AddedStep{
			"name": {Name: text, Template: "t"}, "template": {Name: "n", Template: text}, "after": {Name: "n", Template: "t", After: []string{text}}, "before": {Name: "n", Template: "t", Before: []string{text}},
		} {
			refused(second(g.AddSteps(t.Context(), noID, s)), what+", "+why)
		}
		refused(second(g.ResolveDLQ(t.Context(), noID, taskgraph.DLQManuallyResolved, text, "")), "by, "+why)
		refused(second(g.SendWithNotify(t.Context(), "jobs_queue", 1, &taskgraph.MessageOptions{Headers: map[string]string{text: "x"}})), "header, "+why)
		refused(second(g.SendWithNotify(t.Context(), text, 1, nil)), "queue, "+why)
		_, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Tags: []string{text}})
		require.ErrorIs(t, err, pgwake.ErrConfig, "tags of an engine, %s", why)
	}
	for why, text := range hostile.NoTexts {
		d := taskgraph.Define("shop", "n", "1").Step("s", "h")
		d.Description = text
		refused(g.Register(t.Context(), d), "description, "+why)
		refused(second(g.Submit(t.Context(), taskgraph.Submission{Namespace: "shop", Name: "n", Version: "1", Reason: text})), "reason, "+why)
		refused(second(g.Cancel(t.Context(), noID, text)), "reason, "+why)
		refused(second(g.FailStep(t.Context(), noID, text)), "cause, "+why)
		refused(second(g.CompleteStep(t.Context(), noID, 1, text)), "reason, "+why)
		refused(second(g.ResolveDLQ(t.Context(), noID, taskgraph.DLQManuallyResolved, "", text)), "notes, "+why)
		refused(second(g.SendWithNotify(t.Context(), "jobs_queue", 1, &taskgraph.MessageOptions{Headers: map[string]string{"x": text}})), "header's value, "+why)
		refused(second(g.TransitionTask(t.Context(), text, taskgraph.TaskPending, taskgraph.TaskInitializing, "")), "id, "+why)
	}
}

// Filters go to the server as they are.
func TestTexts_OfFilters_ThatNoTextCanBe_AreInvalid(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for why, text := range hostile.NoTexts {
		for what, err := range map[string]error{
			"namespace":      second(l.ListTasks(l.within(), &taskgraph.TaskFilter{Namespace: text})),
			"name":           second(l.ListTasks(l.within(), &taskgraph.TaskFilter{Name: text})),
			"state":          second(l.ListTasks(l.within(), &taskgraph.TaskFilter{State: taskgraph.TaskState(text)})),
			"parent":         second(l.ListTasks(l.within(), &taskgraph.TaskFilter{ParentTask: text})),
			"reason":         second(l.ListDLQ(l.within(), &taskgraph.DLQFilter{Reason: taskgraph.DLQReason(text)})),
			"status":         second(l.ListDLQ(l.within(), &taskgraph.DLQFilter{Status: taskgraph.DLQStatus(text)})),
			"result":         second(l.DependencyResult(l.within(), noID, text)),
			"depth":          second(l.StepDepth(l.within(), text)),
			"cycle":          second(l.DetectCycle(l.within(), text, noID)),
			"processor":      second(l.TransitionTask(l.within(), noID, taskgraph.TaskPending, taskgraph.TaskInitializing, text)),
			"slowest steps":  second(l.SlowestSteps(l.within(), &taskgraph.SlowestFilter{Namespace: text})),
			"slowest tasks":  second(l.SlowestTasks(l.within(), &taskgraph.SlowestFilter{TaskName: text})),
			"of a version":   second(l.SlowestTasks(l.within(), &taskgraph.SlowestFilter{Version: text})),
			"settings":       l.SetSettings(l.within(), taskgraph.SettingsChange{NamespacePriority: map[string]float64{text: 1}}),
			"as of":          second(l.TaskAsOf(l.within(), text, time.Now())),
			"ready":          second(l.TaskReadyInfo(l.within(), text)),
			"step readiness": second(l.StepReadiness(l.within(), noID, text)),
		} {
			require.ErrorIs(t, err, pgwake.ErrInvalid, "%s, %s", what, why)
			require.True(t, hostile.IsLine(err.Error()), "%q", err)
		}
	}
}
