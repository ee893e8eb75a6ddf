package taskgraph_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are the tasks listed that somebody asks for, and is one shown as it is?

func TestListTasks_FiltersAndPages(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, namespace := range []string{"shop", "bakery"} {
		for _, name := range []string{"a", "b"} {
			require.NoError(t, l.Register(t.Context(), taskgraph.Define(namespace, name, "1").Step("a", "h")))
		}
	}
	var ids []string
	named := make(map[string]string)
	for i := range 12 { // four at a time, which were created at the same instant
		if i%4 == 0 {
			var batch []taskgraph.Submission
			for range 4 {
				batch = append(batch, taskgraph.Submission{Namespace: []string{"shop", "bakery"}[len(batch)%2], Name: []string{"a", "b"}[len(batch)/2], Version: "1"})
			}
			done, err := l.SubmitMany(t.Context(), batch)
			require.NoError(t, err)
			for n, d := range done {
				ids = append(ids, d.ID)
				named[d.ID] = batch[n].Namespace + "/" + batch[n].Name
			}
		}
	}
	l.bring(ids[0], taskgraph.TaskComplete)
	l.bring(ids[5], taskgraph.TaskComplete)
	l.exec(`UPDATE tasks SET parent_task_id = $1 WHERE task_id = ANY ($2)`, ids[0], ids[9:11])
	list := func(f *taskgraph.TaskFilter) []string {
		t.Helper()
		found, err := l.ListTasks(t.Context(), f)
		require.NoError(t, err)
		var got []string
		for _, task := range found {
			got = append(got, task.ID)
		}
		return got
	}
	everything := list(nil)
	require.Len(t, everything, 12)
	require.ElementsMatch(t, ids, everything)
	for i, batch := range [][]string{ids[8:], ids[4:8], ids[:4]} {
		require.ElementsMatch(t, batch, everything[4*i:4*i+4], "those first that were created last")
	}
	among := func(is func(id string) bool) []string {
		return slices.DeleteFunc(slices.Clone(everything), func(id string) bool { return !is(id) })
	}
	require.Equal(t, everything, list(&taskgraph.TaskFilter{}))
	require.Equal(t, among(func(id string) bool { return strings.HasPrefix(named[id], "shop/") }), list(&taskgraph.TaskFilter{Namespace: "shop"}))
	require.Equal(t, among(func(id string) bool { return strings.HasSuffix(named[id], "/b") }), list(&taskgraph.TaskFilter{Name: "b"}))
	require.Equal(t, among(func(id string) bool { return named[id] == "bakery/a" }), list(&taskgraph.TaskFilter{Namespace: "bakery", Name: "a"}))
	require.Equal(t, among(func(id string) bool { return id == ids[0] || id == ids[5] }), list(&taskgraph.TaskFilter{State: taskgraph.TaskComplete}))
	require.Equal(t, []string{ids[5]}, list(&taskgraph.TaskFilter{State: taskgraph.TaskComplete, Namespace: "bakery"}))
	require.Equal(t, among(func(id string) bool { return id == ids[9] || id == ids[10] }), list(&taskgraph.TaskFilter{ParentTask: ids[0]}))
	require.Empty(t, list(&taskgraph.TaskFilter{Namespace: "nowhere"}))
	require.Empty(t, list(&taskgraph.TaskFilter{State: "none"}))
	require.Equal(t, everything[:3], list(&taskgraph.TaskFilter{Limit: 3}))

	for _, size := range []int{1, 3, 5, 12} {
		var paged []string
		var last *taskgraph.Task
		for len(paged) <= len(everything) {
			page, err := l.ListTasks(t.Context(), &taskgraph.TaskFilter{Limit: size, Before: last})
			require.NoError(t, err)
			if len(page) == 0 {
				break
			}
			require.LessOrEqual(t, len(page), size)
			for _, task := range page {
				paged = append(paged, task.ID)
			}
			last = &page[len(page)-1]
		}
		require.Equal(t, everything, paged, "pages of %d", size)
	}
	_, err := l.ListTasks(t.Context(), &taskgraph.TaskFilter{ParentTask: "7"})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	_, err = l.Task(t.Context(), noID)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	none, err := l.Steps(t.Context(), noID)
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestView_ATaskAtWork_IsShownAsItIs(t *testing.T) {
	t.Parallel()
	config := &taskgraph.Config{}
	config.Steps.StopTimeout = time.Millisecond
	g := newGraph(t, config)
	began := make(chan struct{})
	g.Handle("ok", func(context.Context, *taskgraph.Step) (any, error) { return map[string]int{"n": 1}, nil })
	g.Handle("slow", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		close(began)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	g.Handle("fails", func(context.Context, *taskgraph.Step) (any, error) { return nil, errBroken })
	g.run()
	d := taskgraph.Define("shop", "seen", "2").Step("done", "ok").
		Step("skipped", "ok", taskgraph.AfterIf("done", "$.n == 2")).
		Step("retried", "fails", taskgraph.After("done"), taskgraph.RetryEvery(time.Minute)).
		Step("failed", "fails", taskgraph.After("done"), taskgraph.MaxAttempts(1)).
		Step("waiting", "ok", taskgraph.After("retried", "failed")).
		Step("running", "slow", taskgraph.After("done")).
		Template("more", "ok")
	d.OnFailure = taskgraph.Drain
	task := g.submit(d)
	<-began
	eventually(t, func() bool {
		return g.step(task, "retried").State == taskgraph.StepWaitingForRetry && g.step(task, "failed").State == taskgraph.StepError
	})
	pgwaketest.Advance(t, g.p, 10*time.Second)
	before := time.Now()
	v, err := g.View(t.Context(), task)
	require.NoError(t, err)
	took := time.Since(before)
	require.Equal(t, []string{"shop", "seen", "2", task, "steps_in_process"}, []string{v.Namespace, v.Name, v.Version, v.TaskID, v.State})
	shown := make(map[string]taskgraph.StepView)
	for _, s := range v.Steps {
		shown[s.Name] = s
	}
	require.Len(t, shown, 6)
	// It began before the clock was moved on.
	require.GreaterOrEqual(t, shown["running"].Duration, 10*time.Second)
	require.Less(t, shown["running"].Duration, 10*time.Second+patience+took)
	for name, s := range shown {
		switch name {
		case "done", "retried", "failed":
			require.Positive(t, s.Duration, name)
			require.Less(t, s.Duration, 10*time.Second, name)
		case "waiting", "skipped":
			require.Zero(t, s.Duration, name)
		}
		s.Duration = 0
		shown[name] = s
	}
	after := func(names ...string) (all []taskgraph.Dependency) {
		for _, name := range names {
			all = append(all, taskgraph.Dependency{Step: name})
		}
		return all
	}
	require.Equal(t, map[string]taskgraph.StepView{
		"done":    {Name: "done", State: "complete", Attempts: 1, MaxAttempts: 3},
		"skipped": {Name: "skipped", State: "complete", MaxAttempts: 3, After: []taskgraph.Dependency{{Step: "done", If: `($."n" == 2)`}}, Skipped: true},
		"retried": {Name: "retried", State: "waiting_for_retry", Attempts: 1, MaxAttempts: 3, After: after("done"), Error: errBroken.Error()},
		"failed":  {Name: "failed", State: "error", Attempts: 1, MaxAttempts: 1, After: after("done"), Error: errBroken.Error()},
		"waiting": {Name: "waiting", State: "pending", MaxAttempts: 3, After: after("retried", "failed")},
		"running": {Name: "running", State: "in_progress", Attempts: 1, MaxAttempts: 3, After: after("done")},
	}, shown)
	for _, text := range []string{v.DOT(), v.Mermaid(), v.Text(nil)} {
		require.Contains(t, text, "running")
	}
	did(t)(g.ResetStep(t.Context(), g.step(task, "failed").ID, ""))
	eventually(t, func() bool { return g.step(task, "failed").State == taskgraph.StepError })

	_, err = g.View(t.Context(), noID)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, err = g.View(t.Context(), "7")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

// A step that was put back has begun nothing yet, whatever it did before.
func TestView_AStepThatWasPutBack_HasNotBegun(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.task(single("back"))
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued', 'in_progress', 'error'], NULL, '{}')`, l.step(task, "a"))
	duration := func() time.Duration {
		v, err := l.View(t.Context(), task)
		require.NoError(t, err)
		return v.Steps[0].Duration
	}
	l.exec(`UPDATE steps SET last_attempted_at = updated_at - interval '7 s' WHERE task_id = $1`, task)
	require.Equal(t, 7*time.Second, duration())
	did(t)(l.ResetStep(t.Context(), l.step(task, "a"), ""))
	require.Zero(t, duration())
}
