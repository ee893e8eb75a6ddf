package taskgraph_test

import (
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does Finalize do about a task in each condition, however often it is called?

// finalizes asserts what Finalize says of a task.
func (l *lab) finalizes(task string, action taskgraph.FinalizeAction, state taskgraph.TaskState) {
	l.t.Helper()
	did, is, err := l.Finalize(l.within(), task)
	require.NoError(l.t, err)
	require.Equal(l.t, []any{action, state}, []any{did, is})
}

// task registers a definition and creates a task of it, which nobody runs.
func (l *lab) task(d *taskgraph.Definition, with ...func(*taskgraph.Submission)) string {
	l.t.Helper()
	require.NoError(l.t, l.Register(l.within(), d))
	s := aTask(d)
	for _, set := range with {
		set(&s)
	}
	done, err := l.Submit(l.within(), s)
	require.NoError(l.t, err)
	return done.ID
}

func (l *lab) logged(task string) int {
	l.t.Helper()
	return one[int](l, `SELECT (SELECT count(*) FROM task_transitions WHERE task_id = $1) + (SELECT count(*) FROM step_transitions WHERE task_id = $1)`, task)
}

func TestF43_Finalize_EachCondition_IsDealtWith(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := taskgraph.Define("shop", "finalize", "1").Step("a", "h", taskgraph.MaxAttempts(2)).Step("b", "h", taskgraph.After("a"))

	t.Run("ready, at work, waiting", func(t *testing.T) {
		task := l.task(d)
		l.finalizes(task, taskgraph.FinalizeReenqueued, taskgraph.TaskStepsInProcess)
		require.Equal(t, []string{"a enqueued", "b pending"}, all[string](l, `SELECT name || ' ' || state FROM steps WHERE task_id = $1 ORDER BY name`, task))
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue WHERE instance_id = $1`, task))
		before := l.logged(task)
		l.finalizes(task, taskgraph.FinalizeNoAction, taskgraph.TaskStepsInProcess)
		l.finalizes(task, taskgraph.FinalizeNoAction, taskgraph.TaskStepsInProcess)
		require.Equal(t, before, l.logged(task))

		l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['enqueued', 'in_progress', 'enqueued_as_error_for_orchestration'], NULL, '{}', ARRAY['{"error": "x"}'::jsonb], ARRAY[now() + interval '1 h'])`,
			l.step(task, "a"))
		l.finalizes(task, taskgraph.FinalizePending, taskgraph.TaskWaitingForRetry)
		before = l.logged(task)
		l.finalizes(task, taskgraph.FinalizePending, taskgraph.TaskWaitingForRetry)
		require.Equal(t, before, l.logged(task))
		did(t)(l.SetStepBackoff(t.Context(), l.step(task, "a"), 0))
		l.finalizes(task, taskgraph.FinalizeReenqueued, taskgraph.TaskStepsInProcess)
	})
	t.Run("a result, and another step is at work", func(t *testing.T) {
		task := l.task(taskgraph.Define("shop", "two", "1").Step("a", "h").Step("b", "h"))
		l.finalizes(task, taskgraph.FinalizeReenqueued, taskgraph.TaskStepsInProcess)
		did(t)(l.CompleteStep(t.Context(), l.step(task, "a"), 1, ""))
		l.finalizes(task, taskgraph.FinalizeNoAction, taskgraph.TaskStepsInProcess)
	})
	t.Run("blocked", func(t *testing.T) {
		task := l.task(d)
		did(t)(l.FailStep(t.Context(), l.step(task, "a"), "no"))
		l.finalizes(task, taskgraph.FinalizeFailed, taskgraph.TaskBlockedByFailures)
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM steps WHERE task_id = $1 AND state = 'pending'`, task), "it can be put right yet")
		l.finalizes(task, taskgraph.FinalizeFailed, taskgraph.TaskError)
		before := l.logged(task)
		l.finalizes(task, taskgraph.FinalizeFailed, taskgraph.TaskError)
		require.Equal(t, before, l.logged(task))
	})
	t.Run("blocked and put right", func(t *testing.T) {
		task := l.task(d)
		did(t)(l.FailStep(t.Context(), l.step(task, "a"), "no"))
		l.finalizes(task, taskgraph.FinalizeFailed, taskgraph.TaskBlockedByFailures)
		did(t)(l.ResetStep(t.Context(), l.step(task, "a"), ""))
		l.finalizes(task, taskgraph.FinalizeReenqueued, taskgraph.TaskStepsInProcess)
	})
	t.Run("complete", func(t *testing.T) {
		task := l.task(d)
		did(t)(l.CompleteStep(t.Context(), l.step(task, "a"), 1, ""))
		did(t)(l.ResolveStep(t.Context(), l.step(task, "b"), ""))
		l.finalizes(task, taskgraph.FinalizeCompleted, taskgraph.TaskComplete)
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM tasks WHERE task_id = $1 AND completed_at IS NOT NULL AND completed_steps = 2`, task))
	})
	t.Run("no steps", func(t *testing.T) {
		l.finalizes(l.task(taskgraph.Define("shop", "nothing", "1")), taskgraph.FinalizeCompleted, taskgraph.TaskComplete)
	})
	t.Run("not to begin yet", func(t *testing.T) {
		l.finalizes(l.task(d, func(s *taskgraph.Submission) { s.Delay = time.Hour }), taskgraph.FinalizePending, taskgraph.TaskPending)
	})
	t.Run("ended", func(t *testing.T) {
		for state, action := range map[taskgraph.TaskState]taskgraph.FinalizeAction{taskgraph.TaskComplete: taskgraph.FinalizeCompleted,
			taskgraph.TaskResolvedManually: taskgraph.FinalizeCompleted, taskgraph.TaskError: taskgraph.FinalizeFailed, taskgraph.TaskCancelled: taskgraph.FinalizeFailed} {
			task := l.task(d)
			l.bring(task, state)
			before, messages := l.logged(task), one[int](l, `SELECT count(*) FROM orchestrator_queue WHERE instance_id = $1`, task)
			for range 2 {
				l.finalizes(task, action, state)
			}
			require.Equal(t, before, l.logged(task), state)
			require.Equal(t, messages, one[int](l, `SELECT count(*) FROM orchestrator_queue WHERE instance_id = $1`, task), state)
		}
	})
	t.Run("unknown", func(t *testing.T) {
		_, _, err := l.Finalize(t.Context(), noID)
		require.ErrorIs(t, err, pgwake.ErrNotFound)
		_, _, err = l.Finalize(t.Context(), "7")
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	})
}

// Of callers at once one does what there is to do, and each says what is so then.
func TestF43_Finalize_ByManyAtOnce_ItIsDoneOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const rounds, callers = 10, 8
	p := pool(t, l.p, callers)
	ready := taskgraph.Define("shop", "ready", "1").Step("a", "h").Step("b", "h")
	finalize := func(task string) map[taskgraph.FinalizeAction]int {
		said := make(map[taskgraph.FinalizeAction]int)
		var mu sync.Mutex
		var wait sync.WaitGroup
		for range callers {
			wait.Go(func() {
				err := l.apart(p, func(g *taskgraph.Graph) error {
					action, _, err := g.Finalize(t.Context(), task)
					mu.Lock()
					defer mu.Unlock()
					said[action]++
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		return said
	}
	for range rounds {
		task := l.task(ready)
		require.Equal(t, map[taskgraph.FinalizeAction]int{taskgraph.FinalizeReenqueued: 1, taskgraph.FinalizeNoAction: callers - 1}, finalize(task))
		require.Equal(t, 2, one[int](l, `SELECT count(*) FROM worker_queue WHERE instance_id = $1`, task))
		for _, name := range []string{"a", "b"} {
			did(t)(l.CompleteStep(t.Context(), l.step(task, name), 1, ""))
		}
		require.Equal(t, map[taskgraph.FinalizeAction]int{taskgraph.FinalizeCompleted: callers}, finalize(task))
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1 AND to_state = 'complete'`, task))
	}
}
