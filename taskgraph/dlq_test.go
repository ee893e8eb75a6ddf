package taskgraph_test

import (
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: who looks into which task, and in which order?

const noID = "00000000-0000-0000-0000-000000000000"

func TestAddToDLQ_OnePendingEntryPerTask(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("shop", "order", "1", `{}`, "a")
	task := l.create("shop", "order")
	entry, added, err := l.AddToDLQ(l.within(), task, "", map[string]string{"ticket": "T-7"})
	require.NoError(t, err)
	require.True(t, added)
	again, added, err := l.AddToDLQ(l.within(), task, taskgraph.DLQMaxRetriesExceeded, nil)
	require.NoError(t, err)
	require.False(t, added)
	require.Equal(t, entry, again)

	entries, err := l.ListDLQ(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	e := entries[0]
	require.Equal(t, []any{entry, task, "shop", "order", "1", taskgraph.TaskPending, taskgraph.TaskPending, taskgraph.DLQManual, taskgraph.DLQPending},
		[]any{e.ID, e.TaskID, e.Namespace, e.TaskName, e.Version, e.OriginalState, e.State, e.Reason, e.Status})
	require.JSONEq(t, `{"ticket": "T-7"}`, string(e.Metadata))
	require.Contains(t, string(e.Snapshot), `"open_steps"`)
	require.Nil(t, e.ResolvedAt)
	require.Equal(t, taskgraph.TaskPending, one[taskgraph.TaskState](l, `SELECT state FROM tasks`), "the task goes on")

	resolved, err := l.ResolveDLQ(l.within(), entry, taskgraph.DLQManuallyResolved, "ada", "called them")
	require.NoError(t, err)
	require.True(t, resolved)
	resolved, err = l.ResolveDLQ(l.within(), entry, taskgraph.DLQCancelled, "bob", "")
	require.NoError(t, err)
	require.False(t, resolved, "only once")
	another, added, err := l.AddToDLQ(l.within(), task, taskgraph.DLQWorkerUnavailable, nil)
	require.NoError(t, err)
	require.True(t, added, "the first is not pending any more")
	require.NotEqual(t, entry, another)

	entries, err = l.ListDLQ(l.within(), &taskgraph.DLQFilter{Status: taskgraph.DLQManuallyResolved})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, []string{"ada", "called them"}, []string{*entries[0].ResolvedBy, *entries[0].Notes})
	require.WithinDuration(t, time.Now(), *entries[0].ResolvedAt, time.Minute)
	entries, err = l.ListDLQ(l.within(), &taskgraph.DLQFilter{All: true, TaskID: task})
	require.NoError(t, err)
	require.Len(t, entries, 2)
}

func TestAddToDLQ_ManyAtOnce_OneEntry(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	task := l.create("default", "work")
	const callers = 8
	p := pool(t, l.p, callers)
	var wait sync.WaitGroup
	results := make(chan bool, callers)
	for range callers {
		wait.Go(func() {
			err := l.apart(p, func(g *taskgraph.Graph) error {
				_, added, err := g.AddToDLQ(t.Context(), task, taskgraph.DLQManual, nil)
				results <- added
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	close(results)
	won := 0
	for added := range results {
		if added {
			won++
		}
	}
	require.Equal(t, 1, won)
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM task_dlq`))
}

func TestListDLQ_MostUrgentFirst(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	add := func(reason taskgraph.DLQReason, minutes int) string {
		entry, _, err := l.AddToDLQ(l.within(), l.create("default", "work"), reason, nil)
		require.NoError(t, err)
		l.exec(`UPDATE task_dlq SET created_at = created_at - make_interval(mins => $2) WHERE dlq_entry_id = $1`, entry, minutes)
		return entry
	}
	manual, worker, stale := add(taskgraph.DLQManual, 0), add(taskgraph.DLQWorkerUnavailable, 0), add(taskgraph.DLQStaleness, 0)
	retries, cycle, old := add(taskgraph.DLQMaxRetriesExceeded, 0), add(taskgraph.DLQDependencyCycle, 0), add(taskgraph.DLQManual, 495)
	entries, err := l.ListDLQ(l.within(), nil)
	require.NoError(t, err)
	var ids []string
	var scores []int
	for _, e := range entries {
		ids, scores = append(ids, e.ID), append(scores, int(e.Priority))
		require.InDelta(t, e.Priority, float64(int(e.Priority)), 0.9)
	}
	require.Equal(t, []string{cycle, old, retries, stale, worker, manual}, ids)
	require.Equal(t, []int{1000, 505, 500, 100, 50, 10}, scores)

	page, err := l.ListDLQ(l.within(), &taskgraph.DLQFilter{Limit: 2, Offset: 1})
	require.NoError(t, err)
	require.Equal(t, []string{old, retries}, []string{page[0].ID, page[1].ID})
	only, err := l.ListDLQ(l.within(), &taskgraph.DLQFilter{Reason: taskgraph.DLQManual})
	require.NoError(t, err)
	require.Len(t, only, 2)

	_, err = l.ResolveDLQ(l.within(), old, taskgraph.DLQPermanentlyFailed, "", "")
	require.NoError(t, err)
	l.exec(`UPDATE task_dlq SET created_at = created_at - interval '1 hour', resolved_at = resolved_at - interval '1 hour' WHERE dlq_entry_id = $1`, old)
	done, err := l.ListDLQ(l.within(), &taskgraph.DLQFilter{Status: taskgraph.DLQPermanentlyFailed})
	require.NoError(t, err)
	require.InDelta(t, 505, done[0].Priority, 0.9, "it does not grow any more")
}

func TestDLQ_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	task := l.create("default", "work")
	add := func(task string, reason taskgraph.DLQReason, metadata any) error {
		_, _, err := l.AddToDLQ(l.within(), task, reason, metadata)
		return err
	}
	require.ErrorIs(t, add(noID, "", nil), pgwake.ErrNotFound)
	require.ErrorIs(t, add("7", "", nil), pgwake.ErrInvalid)
	require.ErrorIs(t, add(task, "boredom", nil), pgwake.ErrInvalid)
	require.ErrorIs(t, add(task, "", func() {}), pgwake.ErrInvalid)
	require.ErrorIs(t, add(task, "", "a\x00b"), pgwake.ErrInvalid)
	for _, f := range []taskgraph.DLQFilter{{Limit: -1}, {Limit: 10_001}, {Offset: -1}, {TaskID: "7"}} {
		_, err := l.ListDLQ(l.within(), &f)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	_, err := l.ResolveDLQ(l.within(), noID, taskgraph.DLQCancelled, "", "")
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, err = l.ResolveDLQ(l.within(), "7", taskgraph.DLQCancelled, "", "")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	entry, _, err := l.AddToDLQ(l.within(), task, "", nil)
	require.NoError(t, err)
	for _, status := range []taskgraph.DLQStatus{taskgraph.DLQPending, "", "gone"} {
		_, err = l.ResolveDLQ(l.within(), entry, status, "", "")
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
}
