package taskgraph_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: what comes of what people do to tasks and steps by hand?

// blocked returns a Graph that runs, with a task of which step a has failed for good and b waits for it.
func blocked(t *testing.T, attempts int32) (*graph, string) {
	g := newGraph(t, nil)
	h, _ := failing(attempts, taskgraph.Permanent(errBroken))
	g.Handle("h", h)
	g.Handle("next", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		all, err := s.Results(ctx)
		return all, err
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "blocked", "1").Step("a", "h").Step("b", "next", taskgraph.After("a")))
	g.until(task, taskgraph.TaskBlockedByFailures)
	return g, task
}

func did(t *testing.T) func(bool, error) {
	return func(done bool, err error) {
		t.Helper()
		require.NoError(t, err)
		require.True(t, done)
	}
}

func didNot(t *testing.T) func(bool, error) {
	return func(done bool, err error) {
		t.Helper()
		require.NoError(t, err)
		require.False(t, done)
	}
}

func TestT20_ResetForRetry_RunsAgainAsIfForTheFirstTime(t *testing.T) {
	t.Parallel()
	g, task := blocked(t, 1)
	did(t)(g.ResetStep(t.Context(), g.step(task, "a").ID, "the server is back"))
	g.complete(task)
	a := g.step(task, "a")
	require.Equal(t, 1, a.Attempts)
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_as_error_for_orchestration", "error", "pending", "enqueued", "in_progress",
		"enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"))
	states := g.states(task)
	at := indexOf(states, "blocked_by_failures")
	require.Equal(t, []string{"blocked_by_failures", "evaluating_results", "enqueuing_steps", "steps_in_process"}, states[at:at+4])
}

func indexOf(all []string, wanted string) int {
	for i, s := range all {
		if s == wanted {
			return i
		}
	}
	return -1
}

func TestT21_ResolveManually_TheChildRunsAndTheStepHasNoResult(t *testing.T) {
	t.Parallel()
	g, task := blocked(t, 1000)
	did(t)(g.ResolveStep(t.Context(), g.step(task, "a").ID, ""))
	done := g.complete(task)
	require.Equal(t, 2, done.CompletedSteps)
	require.Empty(t, g.step(task, "a").Results)
	require.JSONEq(t, `{}`, string(g.step(task, "b").Results))
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.EqualValues(t, 2, c.Completed)
}

func TestT22_CompleteManually_TheChildSeesTheResult(t *testing.T) {
	t.Parallel()
	g, task := blocked(t, 1000)
	did(t)(g.CompleteStep(t.Context(), g.step(task, "a").ID, map[string]int{"x": 1}, "by hand"))
	g.complete(task)
	require.JSONEq(t, `{"a": {"x": 1}}`, string(g.step(task, "b").Results))
}

func TestT23_StepThatHasEnded_IsLeftAsItIs(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	bad, _ := failing(1000, taskgraph.Permanent(errBroken))
	g.Handle("ok", ok)
	g.Handle("bad", bad)
	g.run()
	task := g.submit(taskgraph.Define("shop", "ended", "1").Step("done", "ok").Step("cancelled", "ok", taskgraph.After("bad")).Step("bad", "bad", taskgraph.After("done")))
	g.until(task, taskgraph.TaskBlockedByFailures)
	did(t)(g.CancelStep(t.Context(), g.step(task, "cancelled").ID, ""))
	for _, name := range []string{"done", "cancelled"} {
		before, id := g.stepStates(task, name), g.step(task, name).ID
		didNot(t)(g.ResolveStep(t.Context(), id, ""))
		didNot(t)(g.CompleteStep(t.Context(), id, nil, ""))
		didNot(t)(g.CancelStep(t.Context(), id, ""))
		didNot(t)(g.FailStep(t.Context(), id, ""))
		didNot(t)(g.ResetStep(t.Context(), id, ""))
		require.Equal(t, before, g.stepStates(task, name))
	}
}

// quickLeases is a Config with which a handler soon learns that its step is nobody's any more.
func quickLeases() *taskgraph.Config {
	config := &taskgraph.Config{}
	config.Steps.LockTimeout = 3 * time.Second
	return config
}

func TestT24_Cancel_WhatIsDoneStaysAndTheRestIsCancelledInOneTransaction(t *testing.T) {
	t.Parallel()
	g := newGraph(t, quickLeases())
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	began, left := make(chan struct{}), make(chan error, 1)
	g.Handle("slow", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		close(began)
		<-ctx.Done() // since its lease is lost
		left <- context.Cause(ctx)
		return "too late", nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "cancel", "1").Step("done", "ok").Step("flying", "slow", taskgraph.After("done")).
		Step("pending", "ok", taskgraph.After("flying")).Step("enqueued", "nobody has this handler", taskgraph.After("done")))
	<-began
	did(t)(g.Cancel(t.Context(), task, "the customer left"))
	require.Equal(t, taskgraph.StepComplete, g.step(task, "done").State)
	for _, name := range []string{"flying", "pending", "enqueued"} {
		require.Equal(t, taskgraph.StepCancelled, g.step(task, name).State, name)
	}
	ended, err := g.Wait(g.within(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskCancelled, ended.State)
	require.ErrorIs(t, <-left, pgwake.ErrLockLost)
	require.NoError(t, g.stop())
	require.Equal(t, taskgraph.StepCancelled, g.step(task, "flying").State)
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	require.Equal(t, "the customer left", g.one(`SELECT metadata ->> 'reason' FROM task_transitions WHERE task_id = $1 AND to_state = 'cancelled'`, task))
	require.Equal(t, "4 1", g.one(`SELECT count(*) || ' ' || count(DISTINCT xact) FROM (
		SELECT xact FROM task_transitions WHERE task_id = $1 AND to_state = 'cancelled' UNION ALL SELECT xact FROM step_transitions WHERE task_id = $1 AND to_state = 'cancelled') AS x`, task))
}

func TestT25_TaskThatHasEnded_AnythingMoreIsRefusedAndFinalizeSaysTheSame(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	g.run()
	task := g.submit(taskgraph.Define("shop", "ended", "1").Step("a", "ok"))
	g.complete(task)
	before := g.states(task)
	didNot(t)(g.Cancel(t.Context(), task, ""))
	didNot(t)(g.GiveUp(t.Context(), task, ""))
	didNot(t)(g.ResolveTask(t.Context(), task, ""))
	for range 2 {
		action, state, err := g.Finalize(t.Context(), task)
		require.NoError(t, err)
		require.Equal(t, taskgraph.FinalizeCompleted, action)
		require.Equal(t, taskgraph.TaskComplete, state)
	}
	_, err := g.AddSteps(t.Context(), task, taskgraph.AddedStep{Name: "more", Template: "a"})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.Equal(t, before, g.states(task))
}

func TestT26_OneStepIsCancelled_TheTaskIsBlockedAndDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	task := g.submit(taskgraph.Define("shop", "cancel", "1").Step("a", "ok").Step("b", "ok", taskgraph.After("a")))
	did(t)(g.CancelStep(t.Context(), g.step(task, "a").ID, ""))
	g.run()
	g.until(task, taskgraph.TaskBlockedByFailures)
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
	did(t)(g.GiveUp(t.Context(), task, ""))
	ended, err := g.Wait(g.within(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskError, ended.State)
}

func TestDecision_AddsStepsWithItsResult(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Result: "two", Steps: []taskgraph.AddedStep{
			{Name: "mail-1", Template: "mail", Inputs: map[string]int{"n": 1}, After: []string{"decide"}, Before: []string{"last"}},
			{Name: "mail-2", Template: "mail", After: []string{"mail-1"}, Before: []string{"last"}},
		}}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "decide", "1").Step("decide", "decide").Step("last", "h", taskgraph.After("decide")).Template("mail", "h"))
	done := g.complete(task)
	require.Equal(t, []string{"mail-1", "mail-2", "last"}, r.names())
	require.Equal(t, 4, done.TotalSteps)
	require.JSONEq(t, `"two"`, string(g.step(task, "decide").Results))
	require.JSONEq(t, `{"n": 1}`, string(g.step(task, "mail-1").Inputs))
}

func TestDecision_CannotBe_TheStepFailsForGoodAndNothingIsAdded(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Steps: []taskgraph.AddedStep{{Name: "more", Template: "nobody knows this"}}}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "decide", "1").Step("decide", "decide"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Contains(t, g.step(task, "decide").Err(), "nobody knows this")
	steps, err := g.Steps(t.Context(), task)
	require.NoError(t, err)
	require.Len(t, steps, 1)
}

func TestT9_EdgesAtRunTime_TwoCallersThatOnlyTogetherMakeACycle_OneIsRefused(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	task := g.submit(taskgraph.Define("shop", "cycle", "1").Step("root", "h").Step("a", "h", taskgraph.After("root")).Step("b", "h", taskgraph.After("root")).Template("x", "h"))
	var wait sync.WaitGroup
	errs := make([]error, 2)
	for i, s := range []taskgraph.AddedStep{{Name: "x1", Template: "x", After: []string{"a"}, Before: []string{"b"}}, {Name: "x2", Template: "x", After: []string{"b"}, Before: []string{"a"}}} {
		wait.Go(func() { _, errs[i] = g.AddSteps(g.within(), task, s) })
	}
	wait.Wait()
	require.True(t, (errs[0] == nil) != (errs[1] == nil), "%v", errs)
	for _, err := range errs {
		if err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			require.ErrorContains(t, err, "cycle")
		}
	}
	steps, err := g.Steps(t.Context(), task)
	require.NoError(t, err)
	require.Len(t, steps, 4)
}

func TestPause_NothingBeginsUntilResume(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	require.NoError(t, g.Pause(t.Context(), "shop"))
	g.run()
	task := g.submit(taskgraph.Define("shop", "paused", "1").Step("a", "ok"))
	other := g.submit(taskgraph.Define("bakery", "open", "1").Step("a", "ok"))
	g.complete(other)
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, []string{"pending"}, g.states(task))
	require.NoError(t, g.Resume(t.Context(), "shop"))
	g.complete(task)
}

func TestSubmit_Delay_NothingBeginsBeforeWhateverHappensToItsSteps(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	g.run()
	task := g.submit(taskgraph.Define("shop", "later", "1").Step("a", "ok").Step("b", "ok"), func(s *taskgraph.Submission) { s.Delay = 3 * time.Second })
	did(t)(g.ResolveStep(t.Context(), g.step(task, "a").ID, ""))
	done := g.complete(task)
	require.EqualValues(t, 1, calls.Load())
	require.False(t, g.step(task, "b").LastAttemptAt.Before(done.StartAt))
}

func TestPurge_RemovesWhatHasEndedAndNothingElse(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	g.run()
	gone := g.submit(taskgraph.Define("shop", "gone", "1").Step("a", "ok").Step("b", "ok", taskgraph.After("a")))
	g.complete(gone)
	stays := g.submit(taskgraph.Define("shop", "stays", "1").Step("a", "nobody has this handler"))
	g.until(stays, taskgraph.TaskStepsInProcess)
	eventually(t, func() bool { // once transactions of others on the server have ended that were open when it did
		n, err := g.Purge(t.Context(), time.Now().Add(time.Hour), 0)
		require.NoError(t, err)
		return n == 1
	})
	_, err := g.Task(t.Context(), gone)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	for _, table := range []string{"steps", "task_transitions", "step_transitions"} {
		require.Equal(t, "0", g.one(`SELECT count(*)::text FROM `+table+` WHERE task_id <> $1`, stays), table)
	}
	require.Equal(t, []string{stays}, g.query(`SELECT instance_id FROM instances`))
	_, err = g.Task(t.Context(), stays)
	require.NoError(t, err)
}

func TestResolveTask_ItEndsAndWhatHasNotEndedIsCancelled(t *testing.T) {
	t.Parallel()
	g, task := blocked(t, 1000)
	did(t)(g.ResolveTask(t.Context(), task, "by phone"))
	ended, err := g.Wait(g.within(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskResolvedManually, ended.State)
	require.NotNil(t, ended.CompletedAt)
	require.Equal(t, taskgraph.StepError, g.step(task, "a").State, "it has ended")
	require.Equal(t, taskgraph.StepCancelled, g.step(task, "b").State)
	require.Equal(t, "by phone", g.one(`SELECT metadata ->> 'reason' FROM task_transitions WHERE task_id = $1 AND to_state = 'resolved_manually'`, task))
	didNot(t)(g.ResolveTask(t.Context(), task, ""))
	didNot(t)(g.ResetStep(t.Context(), g.step(task, "a").ID, ""))
	didNot(t)(g.ResolveTask(t.Context(), noID, ""))
}

func TestResetStep_WhatAnAttemptHasKept_IsThereForTheNext(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		at := 0
		if found, err := s.LastCheckpoint(&at); found || err != nil {
			return at, errors.Join(err, s.Checkpoint(ctx, nil))
		}
		return nil, taskgraph.Permanent(errors.Join(errBroken, s.Checkpoint(ctx, 7)))
	})
	g.run()
	task := g.submit(single("kept"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	did(t)(g.ResetStep(t.Context(), g.step(task, "a").ID, ""))
	g.complete(task)
	require.JSONEq(t, "7", string(g.step(task, "a").Results))
	require.Empty(t, g.step(task, "a").Checkpoint, "nil removes it")
}

func TestActions_BadArguments_AreInvalidBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	g := closed(t)
	for name, err := range map[string]error{
		"cancel":          second(g.Cancel(t.Context(), "7", "")),
		"result":          second(g.CompleteStep(t.Context(), "7", 1, "")),
		"limit":           second(g.Recover(t.Context(), time.Minute, -1)),
		"large limit":     second(g.Recover(t.Context(), time.Minute, 1<<31)),
		"age":             second(g.Recover(t.Context(), -1, 1)),
		"purge":           second(g.Purge(t.Context(), time.Now(), -1)),
		"purge many":      second(g.Purge(t.Context(), time.Now(), 1<<31)),
		"backoff":         second(g.SetStepBackoff(t.Context(), noID, -1)),
		"long backoff":    second(g.SetStepBackoff(t.Context(), noID, math.MaxInt32*time.Second+1)),
		"longest backoff": second(g.SetStepBackoff(t.Context(), noID, math.MaxInt64)),
		"transition":      second(g.TransitionTask(t.Context(), "7", taskgraph.TaskPending, taskgraph.TaskInitializing, "")),
		"step transition": second(g.TransitionStep(t.Context(), "7", taskgraph.StepPending, taskgraph.StepEnqueued, "")),
		"list":            second(g.ListTasks(t.Context(), &taskgraph.TaskFilter{Limit: -1})),
		"list many":       second(g.ListTasks(t.Context(), &taskgraph.TaskFilter{Limit: 10_001})),
		"list payloads":   second(g.ListTasks(t.Context(), &taskgraph.TaskFilter{PayloadBytes: -1})),
	} {
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
	}
}

func TestSetStepBackoff_TheLongest_IsKept(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.task(single("backoff"))
	did(t)(l.SetStepBackoff(t.Context(), l.step(task, "a"), math.MaxInt32*time.Second))
	require.Equal(t, math.MaxInt32, one[int](l, `SELECT backoff_request_seconds FROM steps WHERE task_id = $1`, task))
	did(t)(l.SetStepBackoff(t.Context(), l.step(task, "a"), 1500*time.Millisecond))
	require.Equal(t, 2, one[int](l, `SELECT backoff_request_seconds FROM steps WHERE task_id = $1`, task), "rounded up")
}

// A worker that has no such handler gives the item up, and the step fails, which nobody has begun.
func TestItem_GivenUpWithoutAHandler_TheStepFailsForGood(t *testing.T) {
	t.Parallel()
	config := &taskgraph.Config{}
	config.Steps.Retry = func(int, error) time.Duration { return 0 }
	g := newGraph(t, config)
	ok, _ := failing(0, nil)
	g.Handle("another", ok)
	g.run()
	task := g.submit(taskgraph.Define("shop", "unknown", "1").Step("a", "nobody has this handler").Step("b", "another"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Contains(t, g.step(task, "a").Err(), dispatch.ErrNoHandler.Error())
	require.Equal(t, []string{"pending", "enqueued", "error"}, g.stepStates(task, "a"))
	require.Zero(t, g.step(task, "a").Attempts)
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	require.Equal(t, "0", g.one(`SELECT count(*)::text FROM dead_letters`))
	did(t)(g.CompleteStep(t.Context(), g.step(task, "a").ID, 1, ""))
	g.complete(task)
}

// upkept has upkeep be done as of an interval before.
func (g *graph) upkept() taskgraph.Upkept {
	g.t.Helper()
	taskgraph.SetClock(g.Engine, func() time.Time { return time.Now().Add(-upkeepInterval) })
	done, err := g.Upkeep(g.within())
	require.NoError(g.t, err)
	taskgraph.SetClock(g.Engine, time.Now)
	return done
}

// upkeepInterval is less than by how much the server's clock may be ahead.
const upkeepInterval = 30 * time.Second

func TestUpkeep_FailStale_EndsWhatTakesTooLong(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{FailStale: true, UpkeepInterval: upkeepInterval})
	d := single("stale")
	d.Lifecycle.MaxLifetime = time.Minute
	stale := g.submit(d)
	g.submit(single("fresh"))
	require.Zero(t, g.upkept())
	pgwaketest.Advance(t, g.p, 2*time.Minute)
	for _, want := range []taskgraph.Upkept{{Failed: 1}, {}} {
		done, err := g.Upkeep(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, done)
	}
	task, err := g.Task(t.Context(), stale)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskError, task.State)
}

// What has made a task stale may be a time in which nobody could do anything about it.
func TestUpkeep_FailStaleAfterAnOutageOrAClockThatWasSet_EndsNothingForAnInterval(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	g := newGraph(t, &taskgraph.Config{FailStale: true, UpkeepInterval: upkeepInterval, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	d := single("stale")
	d.Lifecycle.MaxLifetime = time.Minute
	g.submit(d)
	pgwaketest.Advance(t, g.p, 2*time.Minute)
	at := time.Duration(0)
	taskgraph.SetClock(g.Engine, func() time.Time { return time.Now().Add(at) })
	fails := func(passed time.Duration) int {
		t.Helper()
		at += passed
		done, err := g.Upkeep(g.within())
		require.NoError(t, err)
		return done.Failed
	}
	require.Zero(t, fails(0), "it is the first: nobody knows what was before")
	require.Zero(t, fails(upkeepInterval/2))
	require.Empty(t, log.String())
	require.Zero(t, fails(-2*time.Hour), "the server's clock is ahead of what it was")
	require.Zero(t, fails(2*time.Hour), "it was set back")
	require.Equal(t, 2, log.count("the server's clock was set"))
	g.query(`ALTER FUNCTION upkeep_tasks RENAME TO away`)
	at += upkeepInterval
	_, err := g.Upkeep(g.within())
	require.Error(t, err)
	g.query(`ALTER FUNCTION away RENAME TO upkeep_tasks`)
	require.Zero(t, fails(0), "it was away")
	g.query(`SELECT pg_terminate_backend(pid)::text FROM pg_locks WHERE locktype = 'advisory' AND classid = (hashtext('pgwake nodes of ' || current_schema())::bigint & 4294967295)::oid`)
	require.Eventually(t, func() bool { return g.p.Stats().Reconnects == 1 }, patience, time.Millisecond)
	require.Zero(t, fails(upkeepInterval), "it was away, and nobody had asked")
	require.Equal(t, 1, fails(upkeepInterval))
}

// A statement of upkeep gets no answer, and no sign of why.
func TestUpkeep_NoAnswer_GivesUpAndGoesOn(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	g := newGraph(t, &taskgraph.Config{UpkeepInterval: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	taskgraph.SetUpkeepPatience(g.Engine, 50*time.Millisecond)
	tx, err := g.p.Pool().Begin(g.within())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(g.within(), `LOCK TABLE `+pgx.Identifier{g.p.Schema(), "tasks"}.Sanitize()+` IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	g.run()
	failures := func() int { return log.count("upkeep failed") }
	eventually(t, func() bool { return failures() >= 2 })
}

// A stranger has the lock of upkeep: advisory locks are the database's, and have no owner. What needs no upkeep goes on, what ended long ago
// is removed, and what was lost waits until he lets go.
func TestUpkeep_StrangerHoldsTheLock_TasksGoOnAndWhatWasLostIsNotForgotten(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{FailStale: true, KeepFor: time.Hour})
	ok, _ := failing(0, nil)
	g.Handle("h", ok)
	stranger := session(t, g.p)
	_, err := stranger.Exec(t.Context(), `SELECT pg_advisory_lock(hashtext('pgwake upkeep of tasks'), hashtext(current_schema()))`)
	require.NoError(t, err)
	lost := g.submit(taskgraph.Define("shop", "lost", "1").Step("a", "h"))
	require.Len(t, g.query(`DELETE FROM orchestrator_queue RETURNING kind`), 1)
	pgwaketest.Advance(t, g.p, 10*time.Minute)
	done, err := g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Zero(t, done)
	g.run()
	g.complete(g.submit(taskgraph.Define("shop", "works", "1").Step("a", "h")))
	_, err = stranger.Exec(t.Context(), `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, err)
	done, err = g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Equal(t, taskgraph.Upkept{Recovered: 1}, done)
	g.complete(lost)
}

// Somebody has registered, by SQL, definitions whose thresholds nobody can read.
func TestUpkeep_ThresholdsCannotBeRead_AreTheDefaults(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	g := onProvider(t, p, &taskgraph.Config{FailStale: true, UpkeepInterval: upkeepInterval})
	g.upkept()
	for i, lifecycle := range []string{`{"max_lifetime": "a week or so"}`, `{"max_duration_minutes": 1e300}`, `{"max_steps_in_process": "1e9 years"}`, `7`} {
		_, err := session(t, p).Exec(t.Context(), `SELECT register_task_definition('shop', 'bad', $1, NULL, jsonb_build_object('lifecycle', $2::jsonb), ARRAY['a'], ARRAY['h'])`, strconv.Itoa(i), lifecycle)
		require.NoError(t, err)
	}
	_, err := g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"1440", "52596000", "60", "1440"}, g.query(`SELECT lifecycle_minutes(configuration,
		CASE version WHEN '2' THEN 'max_steps_in_process_minutes' ELSE 'max_duration_minutes' END, CASE version WHEN '2' THEN 60 ELSE 1440 END)::text
		FROM task_definitions ORDER BY version`))
}

// What stands in the way of one thing that upkeep does keeps it from nothing else.
func TestUpkeep_StaleTasksCannotBeFound_TheRestIsDone(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	g := onProvider(t, p, &taskgraph.Config{KeepFor: time.Hour, FailStale: true, UpkeepInterval: upkeepInterval})
	g.submit(taskgraph.Define("shop", "kept", "1"))
	g.upkept()
	g.query(`UPDATE tasks SET state = 'complete', completed_at = clock_timestamp()`)
	g.query(`DELETE FROM orchestrator_queue`)
	pgwaketest.Advance(t, p, 2*time.Hour)
	g.query(`ALTER FUNCTION stale_tasks RENAME TO renamed`)
	g.undone(`ALTER FUNCTION renamed RENAME TO stale_tasks`)
	eventually(t, func() bool { // once transactions of others on the server have ended
		done, err := g.Upkeep(t.Context())
		return assert.ErrorContains(t, err, "42883") && done.Purged == 1
	})
}

// However large tasks are, one statement removes what it can in its time, and upkeep goes on until nothing is left. That of one
// transaction can be removed at the same moment.
func TestUpkeep_KeepForOfLargeTasks_RemovesAFewAtATimeAndAll(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	g := onProvider(t, p, &taskgraph.Config{KeepFor: time.Hour})
	d := taskgraph.Define("shop", "large", "1")
	g.register(d)
	submit := func(steps ...int) {
		t.Helper()
		all := make([]taskgraph.Submission, len(steps))
		for i := range all {
			all[i] = aTask(d)
		}
		tasks, err := g.SubmitMany(t.Context(), all)
		require.NoError(t, err)
		for i, task := range tasks {
			g.query(`UPDATE tasks SET state = 'complete', completed_at = clock_timestamp() - interval '2 h' + $2 * interval '1 s', total_steps = $3 WHERE task_id = $1`, task.ID, i, steps[i])
		}
		g.query(`DELETE FROM orchestrator_queue`)
	}
	until := func(purge func() int) (n []int) { // once transactions of others on the server have ended
		t.Helper()
		eventually(t, func() bool {
			done := purge()
			if done > 0 {
				n = append(n, done)
			}
			return done == 0 && len(n) > 0
		})
		return n
	}
	submit(15_000, 5_000, 1, taskgraph.MaxSteps+1, 3, 4)
	require.Equal(t, []int{2, 1, 1, 2}, until(func() int {
		n, err := g.Purge(t.Context(), time.Now(), 0)
		require.NoError(t, err)
		return n
	}))
	submit(15_000, 15_000, 15_000)
	require.Equal(t, []int{3}, until(func() int {
		done, err := g.Upkeep(t.Context())
		require.NoError(t, err)
		return done.Purged
	}))
}

func TestUpkeep_KeepFor_RemovesWhatEndedBefore(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	g := onProvider(t, p, &taskgraph.Config{KeepFor: time.Hour})
	without := onProvider(t, p, nil)
	d := taskgraph.Define("shop", "kept", "1")
	g.register(d)
	submit := func(n int) []taskgraph.Submitted {
		all := make([]taskgraph.Submission, n)
		for i := range all {
			all[i] = aTask(d)
		}
		tasks, err := g.SubmitMany(t.Context(), all)
		require.NoError(t, err)
		return tasks
	}
	submit(1001) // more than one statement removes
	g.query(`UPDATE tasks SET state = 'complete', completed_at = clock_timestamp()`)
	g.query(`DELETE FROM orchestrator_queue`)
	pgwaketest.Advance(t, p, 59*time.Minute)
	open := submit(1)[0].ID
	done, err := g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Zero(t, done)
	pgwaketest.Advance(t, p, 2*time.Minute)
	done, err = without.Upkeep(t.Context())
	require.NoError(t, err)
	require.Zero(t, done)
	purged := 0
	eventually(t, func() bool { // once transactions of others on the server have ended
		done, err := g.Upkeep(t.Context())
		purged += done.Purged
		return err == nil && purged >= 1001
	})
	require.Equal(t, 1001, purged)
	require.Equal(t, []string{open}, g.query(`SELECT task_id::text FROM tasks`))
}

func TestUpkeep_ClocksOfServerAndNodeDisagree_NothingIsRemoved(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	var log lockedBuffer
	g := onProvider(t, p, &taskgraph.Config{KeepFor: time.Hour, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	g.submit(taskgraph.Define("shop", "kept", "1"))
	g.query(`UPDATE tasks SET state = 'complete', completed_at = clock_timestamp() - interval '2 h'`)
	g.query(`DELETE FROM orchestrator_queue`)
	removes := func(off time.Duration) bool {
		t.Helper()
		taskgraph.SetClock(g.Engine, func() time.Time { return time.Now().Add(off) })
		done, err := g.Upkeep(t.Context())
		require.NoError(t, err)
		return done.Purged > 0
	}
	eventually(t, func() bool { // once transactions of others on the server have ended
		for _, off := range []time.Duration{-25 * time.Hour, 25 * time.Hour} {
			require.False(t, removes(off), off)
		}
		return removes(23 * time.Hour)
	})
	require.Contains(t, log.String(), "differ by more than a day")
}

func TestSubTask_ResolvedByHand_WhatFailedInItIsNoResult(t *testing.T) {
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h").Step("y", "h"), taskgraph.Define("shop", "outer", "1").SubTask("a", "inner", "1"))
	l.turns()
	child := one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task)
	l.ran(child, "x", `7`)
	l.finish(l.begin(child, "y"), false, `{"error": "secret", "retryable": false}`)
	l.turns()
	did(t)(l.ResolveTask(l.within(), child, ""))
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	require.JSONEq(t, `{"x": 7}`, one[string](l, `SELECT results::text FROM steps WHERE task_id = $1`, task))
}

// What cannot be kept as one value is told to whoever waits for it, and not tried over and over.
func TestSubTask_ResultsAreTooLargeTogether_TheStepFailsForGood(t *testing.T) {
	l := newLab(t)
	width := testsize.Of(66, 257) // times 1 MiB is more than results may be together, or more than jsonb takes
	inner := taskgraph.Define("shop", "inner", "1")
	for i := range width {
		inner.Step(fmt.Sprintf("x%d", i), "h")
	}
	task := l.submit(inner, taskgraph.Define("shop", "outer", "1").SubTask("a", "inner", "1"))
	l.turns()
	child := one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task)
	l.exec(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps WHERE task_id = $1), ARRAY['enqueued', 'in_progress', 'enqueued_for_orchestration'], NULL, '{}')`, child)
	l.exec(`UPDATE steps SET results = to_jsonb(repeat('x', 1 << 20)) WHERE task_id = $1`, child)
	l.exec(`SELECT wake_task($1, 'test')`, child)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(child))
	require.Equal(t, []string{"error"}, l.stepStates(task))
	require.Equal(t, taskgraph.TaskBlockedByFailures, l.stateOf(task))
	require.Contains(t, one[string](l, `SELECT results ->> 'error' FROM steps WHERE task_id = $1`, task), "67108864 bytes")
	require.Equal(t, 0, one[int](l, `SELECT retries FROM tasks WHERE task_id = $1`, task))
}

func TestSubTask_ThatIsATaskOfItsOwnKind_EndsAtADepth(t *testing.T) {
	l := newLab(t)
	l.submit(taskgraph.Define("shop", "again", "1").SubTask("a", "again", "1"))
	l.turns()
	require.Equal(t, 100, one[int](l, `SELECT count(*) FROM tasks`))
	require.Equal(t, 99, one[int](l, `SELECT max(depth) FROM tasks`))
	require.Equal(t, []string{"blocked_by_failures"}, all[string](l, `SELECT state FROM tasks WHERE depth = 99`))
	require.Contains(t, one[string](l, `SELECT results ->> 'error' FROM steps WHERE state = 'error'`), "100")
	require.Equal(t, 99, one[int](l, `SELECT count(*) FROM steps WHERE state = 'in_progress'`))
}

// The ids of steps are made of the whole id of the task.
func TestSubmit_TasksWhoseIDsEndAlike_HaveStepsOfTheirOwn(t *testing.T) {
	l := newLab(t)
	l.define("shop", "work", "1", `{}`, "a", "b")
	l.exec(`SELECT create_task_many(ARRAY(SELECT (lpad(to_hex(n), 8, '0') || '-0000-1000-8000-0123456789ab')::uuid FROM generate_series(1, 50) AS n),
		array_fill('shop'::text, ARRAY[50]), array_fill('work'::text, ARRAY[50]), array_fill('1'::text, ARRAY[50]))`)
	require.Equal(t, 100, one[int](l, `SELECT count(*) FROM steps`))
	require.Equal(t, []string{"7", "8"}, all[string](l, `SELECT DISTINCT CASE WHEN place = 15 THEN substr(step_id::text, 15, 1)
		ELSE CASE WHEN substr(step_id::text, 20, 1) IN ('8', '9', 'a', 'b') THEN '8' END END FROM steps, unnest(ARRAY[15, 20]) AS place ORDER BY 1`), "version and variant")
	require.Empty(t, all[string](l, `SELECT a.name FROM steps a JOIN steps b USING (task_id) WHERE a.position < b.position AND a.step_id > b.step_id`))
}

// Its message does not stay until it would have been due.
func TestCancel_TaskThatWasToBeginLater_NothingOfItIsLeftInTheQueue(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.run()
	for _, act := range []func(task string) (bool, error){
		func(task string) (bool, error) { return g.Cancel(t.Context(), task, "") },
		func(task string) (bool, error) {
			return g.TransitionTask(t.Context(), task, taskgraph.TaskPending, taskgraph.TaskCancelled, "")
		},
	} {
		task := g.submit(taskgraph.Define("shop", "later", "1").Step("a", "h"), func(s *taskgraph.Submission) { s.Delay = time.Hour })
		action, state, err := g.Finalize(t.Context(), task)
		require.NoError(t, err)
		require.Equal(t, taskgraph.FinalizePending, action)
		require.Equal(t, taskgraph.TaskPending, state)
		did(t)(act(task))
		_, err = g.Wait(g.within(), task)
		require.NoError(t, err)
		eventually(t, func() bool { return len(g.query(`SELECT kind FROM orchestrator_queue`)) == 0 })
	}
}

// Other messages of a task that is to begin later do not take its beginning away.
func TestSubmit_Delay_ItsMessageIsTheTimer(t *testing.T) {
	l := newLab(t)
	l.define("shop", "later", "1", `{}`, "a", "b")
	task := one[string](l, `SELECT create_task('shop', 'later', '1', p_delay => '1 h')::text`)
	require.Zero(t, l.turns())
	did(t)(l.ResolveStep(l.within(), l.step(task, "a"), ""))
	require.Equal(t, 1, l.turns())
	require.Equal(t, []string{"start"}, all[string](l, `SELECT kind FROM orchestrator_queue`), "and no second one")
	require.Equal(t, []string{"resolved_manually", "pending"}, l.stepStates(task))
	pgwaketest.Advance(t, l.p, time.Hour)
	require.Equal(t, 1, l.turns())
	require.Equal(t, []string{"resolved_manually", "enqueued"}, l.stepStates(task))
}

func TestAddSteps_CannotBe_SaysWhatIsWrong(t *testing.T) {
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "grows", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")).Template("x", "h"))
	one := func(name string, with func(*taskgraph.AddedStep)) []taskgraph.AddedStep {
		s := taskgraph.AddedStep{Name: name, Template: "x"}
		if with != nil {
			with(&s)
		}
		return []taskgraph.AddedStep{s}
	}
	many := make([]taskgraph.AddedStep, 19_999)
	for i := range many {
		many[i] = taskgraph.AddedStep{Name: fmt.Sprint("m", i), Template: "x"}
	}
	for says, steps := range map[string][]taskgraph.AddedStep{
		"has a step b already": one("b", nil),
		"over 20000":           many,
		"have a cycle":         {{Name: "y", Template: "x", After: []string{"z"}}, {Name: "z", Template: "x", After: []string{"y"}}},
		"a cycle":              one("y", func(s *taskgraph.AddedStep) { s.After, s.Before = []string{"b"}, []string{"a"} }),
	} {
		_, err := l.AddSteps(l.within(), task, steps...)
		require.ErrorIs(t, err, pgwake.ErrInvalid, says)
		require.ErrorContains(t, err, says)
	}
	l.fails("PW003", `SELECT add_steps($1, ARRAY['y', 'y'], ARRAY['x', 'x'])`, task)
	l.exec(`SELECT add_steps($1, ARRAY['ok'], ARRAY['x'], p_parents => ARRAY['a', 'a'], p_children => ARRAY['ok', 'b'], p_conditions => ARRAY['strict exists($.x ? (@ > 1))', '$.x == "cost$"'])`, task)
	for _, condition := range []string{`$.x`, `$.x ? (@ > 1)`, `1 + 1`, `$.x == `, `$.x == $y`, `$.x == 1 || $."$" == $"y"`, `$.x == 1) || ($.y == 2`, ``,
		`$.x.datetime() < "2026-01-01".datetime()`, `exists($.x ? (@.datetime("YYYY") == $.y.datetime()))`} {
		l.fails("PW003", `SELECT add_steps($1, ARRAY['y'], ARRAY['x'], p_parents => ARRAY['a'], p_children => ARRAY['y'], p_conditions => ARRAY[$2])`, task, condition)
		l.fails("PW003", `SELECT register_task_definition('shop', 'bad', '1', NULL, '{}', ARRAY['a', 'b'], ARRAY['h', 'h'], p_parents => ARRAY['a'], p_children => ARRAY['b'], p_conditions => ARRAY[$1])`, condition)
	}
	l.exec(`SELECT check_conditions(ARRAY['$.size() > 1 && $.x.type() == "date" && $.y.double() < 1 && $."date(" == 1'])`)
	for _, arrays := range []string{`ARRAY['y'], NULL`, `NULL, ARRAY['x']`, `ARRAY['y', 'z'], ARRAY['x']`,
		`ARRAY['y'], ARRAY['x'], p_parents => ARRAY['a']`, `ARRAY['y'], ARRAY['x'], p_parents => ARRAY['a'], p_children => ARRAY['y', 'b']`} {
		l.fails("PW003", `SELECT add_steps($1, `+arrays+`)`, task)
	}
	l.fails("PW003", `SELECT register_task_definition('shop', 'bad', '1', NULL, '{}', ARRAY['a', 'b'], ARRAY['h', 'h'], p_parents => ARRAY['a'])`)
	require.Equal(t, []string{"pending", "pending", "pending"}, l.stepStates(task))
	l.exec(`SELECT add_steps($1, NULL, NULL, p_parents => ARRAY['ok'], p_children => ARRAY['b'])`, task)
	require.Contains(t, l.edges(task), "ok-b")
	require.Equal(t, []int{3}, all[int](l, `SELECT total_steps FROM tasks`))
}
