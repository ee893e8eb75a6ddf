package taskgraph_test

import (
	"context"
	"encoding/json"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a step come to that is a task of its own?

func TestSubTask_ItsResultsAreThoseOfTheStep(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.Handle("last", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var child map[string]json.RawMessage
		err := s.Result(ctx, "child", &child)
		return len(child), err
	})
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("x", "h").Step("y", "h", taskgraph.After("x")))
	task := g.submit(taskgraph.Define("shop", "outer", "1").SubTask("child", "inner", "1").Step("last", "last", taskgraph.After("child")))
	g.complete(task)
	require.JSONEq(t, `2`, string(g.step(task, "last").Results))
	children, err := g.ListTasks(t.Context(), &taskgraph.TaskFilter{ParentTask: task})
	require.NoError(t, err)
	require.Len(t, children, 1)
	require.Equal(t, task, *children[0].ParentTask)
}

func TestSubTask_TheParentIsCancelled_SoIsTheChild(t *testing.T) {
	t.Parallel()
	g := newGraph(t, quickLeases())
	began := make(chan struct{})
	g.Handle("slow", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		close(began)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("x", "slow"))
	task := g.submit(taskgraph.Define("shop", "outer", "1").SubTask("child", "inner", "1"))
	<-began
	did(t)(g.Cancel(t.Context(), task, ""))
	children, err := g.ListTasks(t.Context(), &taskgraph.TaskFilter{ParentTask: task})
	require.NoError(t, err)
	ended, err := g.Wait(g.within(), children[0].ID)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskCancelled, ended.State)
}

func TestSubTask_NobodyHasRegisteredIt_TheStepFailsForGood(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.run()
	task := g.submit(taskgraph.Define("shop", "outer", "1").SubTask("child", "unknown", "1"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Contains(t, g.step(task, "child").Err(), "no definition")
}

// Whatever was done to it before.
func TestSubTask_NobodyHasRegisteredItAndItIsToWait_TheStepFailsForGood(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "outer", "1").SubTask("child", "unknown", "1").Step("other", "h"))
	did(t)(l.TransitionStep(l.within(), l.step(task, "child"), taskgraph.StepPending, taskgraph.StepWaitingForRetry, ""))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "child"), 0))
	l.turns()
	require.Equal(t, taskgraph.TaskBlockedByFailures, l.stateOf(task))
	require.Equal(t, []string{"error", "pending"}, l.stepStates(task))
	_, err := l.Replay(l.within(), task)
	require.NoError(t, err)
}

// outer is a task of which a step is the task inner, and another waits for that.
func outer(attempts int) *taskgraph.Definition {
	return taskgraph.Define("shop", "outer", "1").SubTask("child", "inner", "1", taskgraph.MaxAttempts(attempts)).Step("last", "last", taskgraph.After("child"))
}

// children are the tasks that a step of a task is, and was, the first one first.
func (g *graph) children(task string) []taskgraph.Task {
	g.t.Helper()
	all, err := g.ListTasks(g.within(), &taskgraph.TaskFilter{ParentTask: task})
	require.NoError(g.t, err)
	slices.Reverse(all)
	return all
}

// retried waits until a task waits for the next attempt at a step, lets the time pass, and waits until that is under way.
func (g *graph) retried(task, step string, backoff time.Duration) {
	g.t.Helper()
	attempts := g.step(task, step).Attempts // which may be one more when it has waited
	g.until(task, taskgraph.TaskWaitingForRetry)
	pgwaketest.Advance(g.t, g.p, backoff)
	eventually(g.t, func() bool { return g.step(task, step).Attempts > attempts })
}

func TestSubTask_ItEndsInError_TheStepIsTriedAgainWithANewTask(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	h, calls := failing(1, taskgraph.Permanent(errBroken))
	g.Handle("h", h)
	g.Handle("last", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		var child map[string]string
		err := s.Result(ctx, "child", &child)
		return child, err
	})
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("x", "h"))
	task := g.submit(outer(2))
	eventually(t, func() bool { return len(g.children(task)) == 1 })
	first := g.children(task)[0].ID
	g.until(first, taskgraph.TaskBlockedByFailures)
	require.Equal(t, taskgraph.StepInProgress, g.step(task, "child").State, "somebody may put it right")
	did(t)(g.GiveUp(t.Context(), first, ""))
	g.retried(task, "child", 2*time.Second)
	require.Len(t, g.children(task), 2)
	g.complete(task)
	require.EqualValues(t, 2, calls.Load())
	require.Equal(t, 2, g.step(task, "child").Attempts)
	require.JSONEq(t, `{"x": "done"}`, string(g.step(task, "last").Results))
	require.Equal(t, []taskgraph.TaskState{taskgraph.TaskError, taskgraph.TaskComplete}, []taskgraph.TaskState{g.children(task)[0].State, g.children(task)[1].State})
}

func TestSubTask_TheLastAttemptEndsInError_TheStepFails(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	h, _ := failing(1000, taskgraph.Permanent(errBroken))
	g.Handle("h", h)
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("x", "h"))
	task := g.submit(outer(1))
	eventually(t, func() bool { return len(g.children(task)) == 1 })
	child := g.children(task)[0].ID
	g.until(child, taskgraph.TaskBlockedByFailures)
	did(t)(g.GiveUp(t.Context(), child, ""))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, "task "+child+" ended as error", g.step(task, "child").Err())
	require.Len(t, g.children(task), 1)
}

func TestSubTask_SomebodyCancelsOrResolvesIt_TheStepFailsForGoodOrIsDone(t *testing.T) {
	t.Parallel()
	g := newGraph(t, quickLeases())
	g.Handle("h", func(ctx context.Context, _ *taskgraph.Step) (any, error) { <-ctx.Done(); return nil, ctx.Err() })
	ok, _ := failing(0, nil)
	g.Handle("last", ok)
	g.Handle("ok", ok)
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("w", "ok").Step("x", "h", taskgraph.After("w")))
	for want, end := range map[taskgraph.TaskState]func(context.Context, string, string) (bool, error){
		taskgraph.TaskBlockedByFailures: g.Cancel, taskgraph.TaskComplete: g.ResolveTask,
	} {
		d := outer(3)
		d.Version = string(want)
		task := g.submit(d)
		eventually(t, func() bool { return len(g.children(task)) == 1 })
		child := g.children(task)[0].ID
		eventually(t, func() bool { return g.step(child, "x").State == taskgraph.StepInProgress })
		did(t)(end(t.Context(), child, ""))
		g.until(task, want)
		require.Len(t, g.children(task), 1, "it is not tried again")
		if want == taskgraph.TaskComplete {
			require.JSONEq(t, `{"w": "done"}`, string(g.step(task, "child").Results), "what it had by then")
		} else {
			require.Equal(t, "task "+child+" ended as cancelled", g.step(task, "child").Err())
		}
	}
}

// The step was tried again while its first task was under way. That is cancelled, and what it comes to is for nobody.
func TestSubTask_AnotherHasTakenItsPlace_WhatItComesToIsIgnored(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	var calls atomic.Int32
	release := []chan struct{}{make(chan struct{}), make(chan struct{})}
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		n := calls.Add(1)
		select {
		case <-release[n-1]:
		case <-ctx.Done():
		}
		return n, ctx.Err()
	})
	ok, _ := failing(0, nil)
	g.Handle("last", ok)
	g.run()
	g.register(taskgraph.Define("shop", "inner", "1").Step("x", "h"))
	task := g.submit(outer(2))
	eventually(t, func() bool { return calls.Load() == 1 })
	step := g.step(task, "child").ID
	did(t)(g.TransitionStep(t.Context(), step, taskgraph.StepInProgress, taskgraph.StepWaitingForRetry, ""))
	did(t)(g.SetStepBackoff(t.Context(), step, 0))
	eventually(t, func() bool { return calls.Load() == 2 })
	stale, current := g.children(task)[0].ID, g.children(task)[1].ID
	close(release[0])
	g.until(stale, taskgraph.TaskCancelled)
	require.Equal(t, taskgraph.StepInProgress, g.step(task, "child").State)
	close(release[1])
	g.complete(current)
	g.complete(task)
	require.JSONEq(t, `{"x": 2}`, string(g.step(task, "child").Results))
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "waiting_for_retry", "pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"},
		g.stepStates(task, "child"))
}

// The server's clock has gone back, as it has on a standby that took over and is behind.
func TestSubTask_TriedAgainByAClockThatHasGoneBack_TheNewTaskIsTheOneThatCounts(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	child := func() string {
		l.turns()
		return one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id IS NOT NULL AND NOT is_terminal(state)`)
	}
	task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h"), taskgraph.Define("shop", "outer", "1").SubTask("child", "inner", "1", taskgraph.MaxAttempts(2)))
	first := child()
	l.exec(`UPDATE tasks SET created_at = created_at + interval '1 hour' WHERE task_id = $1`, first)
	l.finish(l.begin(first, "x"), false, `{"error": "broken", "retryable": false}`)
	l.turns()
	did(t)(l.GiveUp(l.within(), first, ""))
	l.turns()
	require.Equal(t, taskgraph.TaskWaitingForRetry, l.stateOf(task))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "child"), 0))
	second := child()
	require.NotEqual(t, first, second)
	require.Equal(t, second, one[string](l, `SELECT sub_task_id::text FROM steps WHERE task_id = $1`, task))
	l.exec(`SELECT end_sub_task(t) FROM tasks t WHERE t.task_id = $1`, first)
	require.Equal(t, []string{"in_progress"}, l.stepStates(task), "what the first one comes to is for nobody")
	l.ran(second, "x", `7`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	require.JSONEq(t, `{"x": 7}`, one[string](l, `SELECT results::text FROM steps WHERE task_id = $1`, task))
}

// As one that was in progress when the schema was migrated.
func TestSubTask_TheStepDoesNotKnowItsTask_TheOneThatWasCreatedLastCounts(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h"), taskgraph.Define("shop", "outer", "1").SubTask("child", "inner", "1"))
	l.turns()
	l.exec(`UPDATE steps SET sub_task_id = NULL WHERE task_id = $1`, task)
	l.ran(one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task), "x", `7`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
}

// With the rights of a producer, and ids that can be computed.
func TestSubTask_ProducerSaysThatItsTaskIsAStep_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	role := l.role(testroles.Producer)
	task := l.submit(taskgraph.Define("shop", "forged", "1"), taskgraph.Define("shop", "inner", "1").Step("x", "h"),
		taskgraph.Define("shop", "outer", "1").Step("a", "h").SubTask("child", "inner", "1").SubTask("later", "inner", "1", taskgraph.After("child")))
	l.turns()
	l.begin(task, "a")
	require.Equal(t, []string{"in_progress", "in_progress", "pending"}, l.stepStates(task))
	l.exec(`UPDATE steps SET sub_task_id = NULL WHERE task_id = $1`, task) // as one that was in progress when the schema was migrated to version 9
	steps := map[string]string{"a": l.step(task, "a"), "child": l.step(task, "child"), "later": l.step(task, "later")}
	l.exec(`SET ROLE ` + role)
	for _, step := range steps {
		l.fails("PW003", `SELECT create_task_many(NULL, ARRAY['shop'], ARRAY['forged'], ARRAY['1'], p_parent_tasks => ARRAY[$1::text::uuid], p_parent_steps => ARRAY[$2::text::uuid])`, task, step)
		l.fails("PW003", `SELECT create_task_many(NULL, ARRAY['shop'], ARRAY['forged'], ARRAY['1'], p_parent_steps => ARRAY[$1::text::uuid])`, step)
	}
	l.fails("PW003", `SELECT create_task_many(NULL, ARRAY['shop'], ARRAY['forged'], ARRAY['1'], p_parent_tasks => ARRAY[$1::text::uuid])`, task)
	l.exec(`RESET ROLE`)
	l.turns()
	require.Equal(t, []string{"in_progress", "in_progress", "pending"}, l.stepStates(task))
}

// One that says so since before version 11, when anybody could.
func TestSubTask_TaskSaysThatItIsAStepOfAHandler_WhatItComesToIsIgnored(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("shop", "outer", "1", `{}`, "a")
	task := l.create("shop", "outer")
	l.turns()
	handler := l.begin(task, "a")
	forged := l.submit(taskgraph.Define("shop", "forged", "1"))
	l.exec(`UPDATE tasks SET parent_task_id = $2, parent_step_id = $3 WHERE task_id = $1`, forged, task, handler.step)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(forged))
	require.Equal(t, []string{"in_progress"}, l.stepStates(task))
	l.finish(handler, true, `7`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
}
