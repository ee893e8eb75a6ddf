package taskgraph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what is lost, or done twice, when processes are slow, stop or die?

func TestT27_ManyCompareAndSwap_OneSucceedsAndSortKeysHaveNoGaps(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const callers = 8
	rounds := testsize.Of(24, 200)
	p := pool(t, l.p, callers)
	d := single("swap")
	require.NoError(t, l.Register(t.Context(), d))
	all := make([]taskgraph.Submission, rounds)
	for i := range all {
		all[i] = aTask(d)
	}
	tasks, err := l.SubmitMany(t.Context(), all)
	require.NoError(t, err)
	for _, task := range tasks {
		var won atomic.Int32
		var wait sync.WaitGroup
		for range callers {
			wait.Go(func() {
				err := l.apart(p, func(g *taskgraph.Graph) error {
					done, err := g.TransitionTask(t.Context(), task.ID, taskgraph.TaskPending, taskgraph.TaskInitializing, "")
					if done {
						won.Add(1)
					}
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		require.EqualValues(t, 1, won.Load())
	}
	require.Zero(t, one[int](l, `SELECT count(*) FROM (SELECT task_id, count(*) AS n, max(sort_key) AS last FROM task_transitions GROUP BY task_id) x
		JOIN tasks t USING (task_id) WHERE x.n <> x.last OR x.last <> t.sort_key OR x.n <> 2`))
	transitions, err := l.TaskTransitions(t.Context(), tasks[0].ID)
	require.NoError(t, err)
	require.Len(t, transitions, 2)
	require.False(t, transitions[0].MostRecent)
	require.True(t, transitions[1].MostRecent)
}

// turn claims the turn of the only task that has one, as another processor would.
func (g *graph) turn(lease time.Duration) *pgwake.OrchestrationItem {
	g.t.Helper()
	turn, err := g.p.FetchOrchestrationItem(g.within(), &pgwake.FetchOptions{Queues: []string{"taskgraph"}, LockTimeout: lease, WithoutHistory: true})
	require.NoError(g.t, err)
	return turn
}

// force brings a task into a state, as if a processor of another version, which commits in between, had.
func (g *graph) force(task string, owner string, path ...taskgraph.TaskState) {
	g.t.Helper()
	for i := range path[1:] {
		done, err := g.TransitionTask(g.within(), task, path[i], path[i+1], owner)
		require.NoError(g.t, err)
		require.True(g.t, done, "%s to %s", path[i], path[i+1])
	}
}

func TestT30_OwnerWithALiveLease_OthersAreRefused(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	task := g.submit(taskgraph.Define("shop", "owned", "1").Step("a", "h"))
	turn := g.turn(time.Minute)
	require.Equal(t, task, turn.Instance)
	const a, b = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"
	g.force(task, a, taskgraph.TaskPending, taskgraph.TaskInitializing)
	before := g.states(task)
	didNot(t)(g.TransitionTask(t.Context(), task, taskgraph.TaskInitializing, taskgraph.TaskWaitingForDependencies, b))
	didNot(t)(g.TransitionTask(t.Context(), task, taskgraph.TaskInitializing, taskgraph.TaskWaitingForDependencies, ""))
	require.Equal(t, before, g.states(task))
	did(t)(g.TransitionTask(t.Context(), task, taskgraph.TaskInitializing, taskgraph.TaskWaitingForDependencies, a))
}

func TestT31_OwnerIsKilledInAnActiveState_AnotherResumesAndStepsAreEnqueuedOnce(t *testing.T) {
	t.Parallel()
	const owner = "00000000-0000-4000-8000-00000000000a"
	for state, path := range map[taskgraph.TaskState][]taskgraph.TaskState{
		taskgraph.TaskInitializing:      {taskgraph.TaskPending, taskgraph.TaskInitializing},
		taskgraph.TaskEnqueuingSteps:    {taskgraph.TaskPending, taskgraph.TaskInitializing, taskgraph.TaskEnqueuingSteps},
		taskgraph.TaskStepsInProcess:    {taskgraph.TaskPending, taskgraph.TaskInitializing, taskgraph.TaskEnqueuingSteps, taskgraph.TaskStepsInProcess},
		taskgraph.TaskEvaluatingResults: {taskgraph.TaskPending, taskgraph.TaskInitializing, taskgraph.TaskEnqueuingSteps, taskgraph.TaskStepsInProcess, taskgraph.TaskEvaluatingResults},
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			g := newGraph(t, nil)
			ok, calls := failing(0, nil)
			g.Handle("h", ok)
			task := g.submit(taskgraph.Define("shop", "killed", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")))
			g.turn(200 * time.Millisecond) // nobody ends it
			g.force(task, owner, path...)
			g.run()
			g.complete(task)
			require.EqualValues(t, 2, calls.Load())
			require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"))
		})
	}
}

func TestT32_OwnerWasOnlySlow_WhatItSaysLateIsRefused(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("h", ok)
	task := g.submit(taskgraph.Define("shop", "slow", "1").Step("a", "h"))
	turn := g.turn(50 * time.Millisecond)
	g.run()
	g.complete(task)
	before := g.states(task)
	instance, token, err := turn.LockToken.Turn()
	require.NoError(t, err)
	_, err = g.p.Pool().Exec(t.Context(), `SELECT `+pgx.Identifier{g.p.Schema()}.Sanitize()+`.evaluate_task($1, $2, NULL)`, instance, token)
	require.ErrorIs(t, pgwake.WrapError("evaluate", err), pgwake.ErrLockLost)
	require.Equal(t, before, g.states(task))
	require.EqualValues(t, 1, calls.Load())
}

func TestT33_EnqueueAndWorkItem_AreOneTransaction(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("h", ok)
	task := g.submit(taskgraph.Define("shop", "atomic", "1").Step("a", "h"))
	turn := g.turn(time.Minute)
	instance, token, err := turn.LockToken.Turn()
	require.NoError(t, err)
	rolledBack := errors.New("the process dies here")
	err = pgx.BeginFunc(t.Context(), g.p.Pool(), func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SELECT `+pgx.Identifier{g.p.Schema()}.Sanitize()+`.evaluate_task($1, $2, NULL)`, instance, token); err != nil {
			return err
		}
		return rolledBack
	})
	require.ErrorIs(t, err, rolledBack)
	require.Equal(t, taskgraph.StepPending, g.step(task, "a").State)
	require.Empty(t, g.query(`SELECT name FROM worker_queue`))
	require.NoError(t, g.p.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil)) // as the end of its lease would
	g.run()
	g.complete(task)
	require.EqualValues(t, 1, calls.Load())
}

// worker is a process of somebody else's, which works by hand as an Engine does, and may die between any two statements.
type worker struct {
	*graph
	in string // the quoted schema, and a dot
}

func newWorker(t *testing.T, config *taskgraph.Config) worker {
	g := newGraph(t, config)
	return worker{g, pgx.Identifier{g.p.Schema()}.Sanitize() + "."}
}

func (w worker) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.p.Pool().Exec(w.within(), sql, args...)
	require.NoError(w.t, err)
}

// evaluates takes the turn of a task.
func (w worker) evaluates() {
	w.t.Helper()
	instance, token, err := w.turn(time.Minute).LockToken.Turn()
	require.NoError(w.t, err)
	w.exec(`SELECT `+w.in+`evaluate_task($1, $2, NULL)`, instance, token)
}

// claim is a work item of a step that somebody has.
type claim struct {
	step  string
	item  int64
	token string
}

// claims claims the item of a step.
func (w worker) claims() claim {
	w.t.Helper()
	item, err := w.p.FetchWorkItem(w.within(), &pgwake.FetchOptions{Tags: pgwake.Tags("taskgraph"), LockTimeout: time.Minute})
	require.NoError(w.t, err)
	id, token, err := item.LockToken.WorkItem()
	require.NoError(w.t, err)
	var of struct{ Step string }
	require.NoError(w.t, json.Unmarshal(item.Input, &of))
	return claim{of.Step, id, token}
}

func (w worker) starts(c claim) {
	w.t.Helper()
	w.exec(`SELECT `+w.in+`start_step($1, $2, $3, NULL)`, c.step, c.item, c.token)
}

func (w worker) finishes(c claim, result string) error {
	w.t.Helper()
	_, err := w.p.Pool().Exec(w.within(), `SELECT `+w.in+`finish_step($1, $2, $3, NULL, true, $4)`, c.step, c.item, c.token, result)
	return pgwake.WrapError("finish step", err)
}

// dies has all leases end, and others go on.
func (w worker) dies() {
	w.t.Helper()
	pgwaketest.Advance(w.t, w.p, time.Minute)
	w.run()
}

func TestT34_WorkerDiesAtAStep_TheAttemptCountsAndItsLateResultIsRefused(t *testing.T) {
	t.Parallel()
	for attempts, want := range map[int]taskgraph.TaskState{1: taskgraph.TaskBlockedByFailures, 2: taskgraph.TaskComplete} {
		t.Run(fmt.Sprint(attempts), func(t *testing.T) {
			t.Parallel()
			w := newWorker(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
			ok, calls := failing(0, nil)
			w.Handle("h", ok)
			task := w.submit(taskgraph.Define("shop", "dies", "1").Step("a", "h", taskgraph.MaxAttempts(attempts)))
			w.evaluates()
			c := w.claims()
			w.starts(c)
			require.Equal(t, taskgraph.StepInProgress, w.step(task, "a").State)
			w.dies()
			w.until(task, want)
			require.EqualValues(t, attempts-1, calls.Load())
			require.Equal(t, attempts, w.step(task, "a").Attempts)
			require.Equal(t, "1", w.lostWorkers())
			before := w.stepStates(task, "a")
			require.ErrorIs(t, w.finishes(c, "1"), pgwake.ErrLockLost)
			require.Equal(t, before, w.stepStates(task, "a"))
		})
	}
}

func TestT35_SameResultTwice_OneTransition(t *testing.T) {
	t.Parallel()
	w := newWorker(t, nil)
	task := w.submit(taskgraph.Define("shop", "twice", "1").Step("a", "h").Step("b", "h"))
	w.evaluates()
	var claims []claim
	for range 2 {
		c := w.claims()
		w.starts(c)
		claims = append(claims, c)
	}
	slices.Reverse(claims) // out of order
	for _, c := range claims {
		require.NoError(t, w.finishes(c, "1"))
		require.ErrorIs(t, w.finishes(c, "2"), pgwake.ErrLockLost)
	}
	w.evaluates()
	state, err := w.CurrentTaskState(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskComplete, state)
	for _, name := range []string{"a", "b"} {
		require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, w.stepStates(task, name))
		require.JSONEq(t, "1", string(w.step(task, name).Results))
	}
}

func TestKill_AfterTheClaimBeforeStartStep_NoAttemptIsLost(t *testing.T) {
	t.Parallel()
	w := newWorker(t, nil)
	ok, calls := failing(0, nil)
	w.Handle("h", ok)
	task := w.submit(taskgraph.Define("shop", "killed", "1").Step("a", "h", taskgraph.MaxAttempts(1)))
	w.evaluates()
	w.claims()
	w.dies()
	w.complete(task)
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, 1, w.step(task, "a").Attempts)
	require.Equal(t, "0", w.lostWorkers())
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, w.stepStates(task, "a"))
}

func TestKill_AfterFinishStepBeforeTheNextTurn_TheResultIsThere(t *testing.T) {
	t.Parallel()
	w := newWorker(t, nil)
	ok, calls := failing(0, nil)
	w.Handle("h", ok)
	task := w.submit(taskgraph.Define("shop", "killed", "1").Step("a", "h", taskgraph.MaxAttempts(1)).Step("b", "h", taskgraph.After("a")))
	w.evaluates()
	c := w.claims()
	w.starts(c)
	require.NoError(t, w.finishes(c, `"from the dead"`))
	require.Equal(t, taskgraph.StepEnqueuedForOrchestration, w.step(task, "a").State)
	w.turn(time.Minute) // and whoever takes the turn dies as well
	w.dies()
	w.complete(task)
	require.EqualValues(t, 1, calls.Load())
	require.JSONEq(t, `"from the dead"`, string(w.step(task, "a").Results))
	require.Equal(t, "0", w.lostWorkers())
}

func TestKill_BetweenAddStepsAndFinishStep_NothingIsAdded(t *testing.T) {
	t.Parallel()
	w := newWorker(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	ok, calls := failing(0, nil)
	w.Handle("ok", ok)
	more := taskgraph.AddedStep{Name: "more", Template: "more", After: []string{"a"}}
	w.Handle("h", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Result: 1, Steps: []taskgraph.AddedStep{more}}, nil
	})
	task := w.submit(taskgraph.Define("shop", "killed", "1").Step("a", "h", taskgraph.MaxAttempts(2)).Template("more", "ok"))
	w.evaluates()
	c := w.claims()
	w.starts(c)
	conn := session(t, w.p)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = w.WithTx(tx).AddSteps(t.Context(), task, more)
	require.NoError(t, err)
	require.NoError(t, conn.PgConn().Conn().Close()) // as the end of a process does
	w.dies()
	done := w.complete(task)
	require.Equal(t, 2, done.TotalSteps)
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, "1", w.lostWorkers())
	require.Equal(t, 2, w.step(task, "a").Attempts)
}

func TestT60_Stop_StepsAtWorkFinishOrAreReadyAtOnceWithoutALostAttempt(t *testing.T) {
	t.Parallel()
	config := &taskgraph.Config{}
	config.Steps.StopTimeout, config.Steps.CancelTimeout = 100*time.Millisecond, 5*time.Second
	g := newGraph(t, config)
	began := make(chan struct{}, 2)
	g.Handle("quick", func(context.Context, *taskgraph.Step) (any, error) { began <- struct{}{}; return "finished", nil })
	g.Handle("long", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		began <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "stop", "1").Step("a", "quick", taskgraph.MaxAttempts(1)).Step("b", "long", taskgraph.MaxAttempts(1)))
	<-began
	<-began
	require.NoError(t, g.stop())
	require.Contains(t, []taskgraph.StepState{taskgraph.StepEnqueuedForOrchestration, taskgraph.StepComplete}, g.step(task, "a").State)
	b := g.step(task, "b")
	require.Equal(t, taskgraph.StepWaitingForRetry, b.State)
	require.Zero(t, b.Attempts)

	other := onProvider(t, g.p, nil)
	ok, calls := failing(0, nil)
	other.Handle("long", ok)
	other.run()
	other.complete(task)
	require.EqualValues(t, 1, calls.Load())
}

func TestT61_SameIdempotencyKeyByMany_OneTask(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const rounds, callers = 20, 8
	p := pool(t, l.p, callers)
	require.NoError(t, l.Register(t.Context(), single("once")))
	for round := range rounds {
		s := aTask(single("once"))
		s.IdempotencyKey, s.Context = fmt.Sprint("order-", round), map[string]int{"n": 7}
		results := make([]taskgraph.Submitted, callers)
		var wait sync.WaitGroup
		for i := range callers {
			wait.Go(func() {
				err := l.apart(p, func(g *taskgraph.Graph) (err error) {
					results[i], err = g.Submit(t.Context(), s)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		duplicates := 0
		for _, r := range results {
			require.Equal(t, results[0].ID, r.ID)
			if r.Duplicate {
				duplicates++
			}
		}
		require.Equal(t, callers-1, duplicates)
		s.Context = map[string]int{"n": 8}
		_, err := l.Submit(t.Context(), s)
		require.ErrorIs(t, err, taskgraph.ErrConflict)
	}
	require.Equal(t, rounds, one[int](l, `SELECT count(*) FROM tasks`))
	require.Equal(t, rounds, one[int](l, `SELECT count(*) FROM orchestrator_queue`))
}

func TestT62_HandlerPanicsTimesOutOrEndsItsGoroutine_TheStepFailsAndTheWorkerGoesOn(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.Handle("panics", func(context.Context, *taskgraph.Step) (any, error) { panic("oh no") })
	g.Handle("exits", func(context.Context, *taskgraph.Step) (any, error) { runtime.Goexit(); return nil, nil })
	g.Handle("slow", func(ctx context.Context, _ *taskgraph.Step) (any, error) { <-ctx.Done(); return nil, ctx.Err() })
	g.Handle("no json", func(context.Context, *taskgraph.Step) (any, error) { return func() {}, nil })
	g.Handle("nul", func(context.Context, *taskgraph.Step) (any, error) { return "a\x00b", nil })
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	g.run()
	for handler, says := range map[string]string{"panics": "oh no", "exits": "ended its goroutine", "slow": "timed out", "no json": "result", "nul": `\u0000`} {
		timeout := time.Minute
		if handler == "slow" {
			timeout = 50 * time.Millisecond
		}
		task := g.submit(taskgraph.Define("shop", handler, "1").Step("a", handler, taskgraph.MaxAttempts(1), taskgraph.Timeout(timeout)))
		g.until(task, taskgraph.TaskBlockedByFailures)
		require.Contains(t, g.step(task, "a").Err(), says)
		require.Equal(t, "0", g.one(`SELECT count(*)::text FROM step_transitions WHERE metadata ->> 'event' = 'WorkerLost'`))
	}
	g.complete(g.submit(taskgraph.Define("shop", "fine", "1").Step("a", "ok")))
}

func TestT62_HandlerPanicsTimesOutOrEndsItsGoroutine_ItIsTriedAgainIfThereIsAnotherAttempt(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	for name, fails := range map[string]func(ctx context.Context){
		"panics": func(context.Context) { panic("oh no") },
		"exits":  func(context.Context) { runtime.Goexit() },
		"slow":   func(ctx context.Context) { <-ctx.Done() },
	} {
		g.Handle(name, func(ctx context.Context, s *taskgraph.Step) (any, error) {
			if s.Attempt < 3 {
				fails(ctx)
			}
			return s.Attempt, nil
		})
	}
	g.run()
	for handler, option := range map[string]taskgraph.StepOption{"panics": nil, "exits": nil, "slow": taskgraph.Timeout(time.Second)} { // in which the last attempt is to end
		task := g.submit(taskgraph.Define("shop", handler, "1").Step("a", handler, option))
		g.complete(task)
		a := g.step(task, "a")
		require.Equal(t, []any{3, "3"}, []any{a.Attempts, string(a.Results)}, handler)
		failed := []string{"pending", "enqueued", "in_progress", "enqueued_as_error_for_orchestration", "waiting_for_retry"}
		require.Equal(t, slices.Concat(failed, failed, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}), g.stepStates(task, "a"), handler)
	}
	require.Equal(t, "0", g.lostWorkers())
}

func TestCheckpoint_TheNextAttemptGoesOnFromThere(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	var from []int
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		at := 0
		if _, err := s.LastCheckpoint(&at); err != nil {
			return nil, err
		}
		from = append(from, at)
		if at == 20 {
			return "all of it", nil
		}
		if err := s.Checkpoint(ctx, at+10); err != nil {
			return nil, err
		}
		return nil, errBroken
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "resumes", "1").Step("a", "h", taskgraph.MaxAttempts(5)))
	g.complete(task)
	require.Equal(t, []int{0, 10, 20}, from)
}

// A request that was given up for lost may arrive after the one that repeated it.
func TestStartStep_AgainByTheSameClaim_IsTheSameAttempt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.turns()
	c := l.begin(task, "a")
	const start = `SELECT outcome || ' ' || attempts FROM start_step($1, $2, $3, NULL)`
	for range 2 {
		require.Equal(t, "run 1", one[string](l, start, c.step, c.item, c.token))
	}
	require.Equal(t, 3, one[int](l, `SELECT count(*)::int FROM step_transitions WHERE step_id = $1`, c.step))
	again := l.take(task, "a")
	l.fails("PW001", start, c.step, c.item, c.token)
	require.Equal(t, "lost", l.start(again))
	require.Equal(t, 1, one[int](l, `SELECT attempts FROM steps WHERE step_id = $1`, c.step))
}

func TestRecover_MessageWasRemovedByHand_TheTaskGoesOn(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	g.Handle("h", ok)
	task := g.submit(taskgraph.Define("shop", "lost", "1").Step("a", "h"))
	require.Len(t, g.query(`DELETE FROM orchestrator_queue RETURNING kind`), 1)
	pgwaketest.Advance(t, g.p, 10*time.Minute)
	done, err := g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Equal(t, taskgraph.Upkept{Recovered: 1}, done)
	g.run()
	g.complete(task)
	require.Equal(t, "shop", g.one(`SELECT namespace FROM instances`))
	done, err = g.Upkeep(t.Context())
	require.NoError(t, err)
	require.Zero(t, done)
}

// Without a work item nothing would ever be heard of a step that is enqueued, or begun. Its own dispatcher tells when it gives one up.
func TestRecover_WorkItemIsGone_TheStepIsTriedAgainOrFails(t *testing.T) {
	for how, remove := range map[string]func(l *lab){
		"deleted": func(l *lab) { l.exec(`DELETE FROM worker_queue`) },
		"made a dead letter": func(l *lab) {
			l.exec(`SELECT bury_work(ARRAY(SELECT id FROM worker_queue), 'by hand', NULL)`)
		},
	} {
		t.Run(how, func(t *testing.T) {
			l := newLab(t)
			task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h"), taskgraph.Define("shop", "outer", "1").
				Step("enqueued", "h", taskgraph.MaxAttempts(1)).Step("begun", "h").Step("last", "h", taskgraph.MaxAttempts(1)).SubTask("child", "inner", "1"))
			l.turns()
			l.begin(task, "begun")
			l.begin(task, "last")
			recovered := func() int {
				t.Helper()
				n, err := l.Recover(l.within(), 5*time.Minute, 100)
				require.NoError(t, err)
				return n
			}
			pgwaketest.Advance(t, l.p, 10*time.Minute)
			require.Zero(t, recovered(), "they have their items")
			remove(l)
			l.exec(`INSERT INTO instance_locks (instance_id, lock_token, locked_until) VALUES ($1, gen_random_uuid(), clock_timestamp() + interval '1 min')`, task)
			require.Equal(t, 1, recovered(), "somebody is at the turn of one")
			l.exec(`DELETE FROM instance_locks`)
			l.turns()
			require.Equal(t, 1, recovered())
			require.Zero(t, recovered(), "there is a message")
			require.Equal(t, []string{"waiting_for_retry", "waiting_for_retry", "error", "in_progress"}, l.stepStates(task))
			l.turns()
			require.Equal(t, taskgraph.TaskBlockedByFailures, l.stateOf(task))
			did(t)(l.ResetStep(l.within(), l.step(task, "last"), ""))
			l.turns()
			for _, step := range []string{"enqueued", "begun", "last"} {
				l.ran(task, step, `1`)
			}
			l.ran(one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task), "x", `1`)
			l.turns()
			require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
			require.Equal(t, []int{1, 2, 1, 1}, all[int](l, `SELECT attempts FROM steps WHERE task_id = $1 ORDER BY position`, task))
			require.Equal(t, 4, one[int](l, `SELECT count(*) FROM step_transitions WHERE metadata ->> 'event' = 'WorkerLost'`))
			for _, id := range all[string](l, `SELECT task_id::text FROM tasks`) {
				_, err := l.Replay(l.within(), id)
				require.NoError(t, err)
			}
		})
	}
}

// The timer of a step that waits for hours is no sign that anything will be heard of another one.
func TestRecover_WorkItemIsGoneAndAnotherStepWaits_TheStepIsTriedAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "waits", "1").Step("gone", "h").Step("waits", "h"))
	l.turns()
	l.begin(task, "gone")
	c := l.begin(task, "waits")
	l.exec(`SELECT finish_step($1, $2, $3, NULL, false, '{"error": "not now", "retryable": true}', '2 hours')`, c.step, c.item, c.token)
	l.turns()
	require.Equal(t, []string{"in_progress", "waiting_for_retry"}, l.stepStates(task))
	l.exec(`DELETE FROM worker_queue`)
	pgwaketest.Advance(t, l.p, 10*time.Minute)
	recovered := func() int {
		t.Helper()
		n, err := l.Recover(l.within(), 5*time.Minute, 100)
		require.NoError(t, err)
		return n
	}
	// A turn that has failed comes again with what its messages say, which may be what became of the item.
	sent, err := l.p.EnqueueForOrchestrator(l.within(), pgwake.Message{Instance: task, Kind: "step"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.NoError(t, err)
	require.Zero(t, recovered(), "there is a message")
	l.exec(`DELETE FROM orchestrator_queue WHERE id = $1`, sent.ID)
	l.exec(`UPDATE orchestrator_queue SET lock_token = gen_random_uuid(), visible_at = clock_timestamp() + interval '1 min'`)
	l.exec(`INSERT INTO instance_locks (instance_id, lock_token, locked_until) VALUES ($1, gen_random_uuid(), clock_timestamp() + interval '1 min')`, task)
	require.Zero(t, recovered(), "somebody is at the turn")
	l.exec(`DELETE FROM instance_locks`)
	require.Equal(t, 1, recovered())
	require.Equal(t, []string{"waiting_for_retry", "waiting_for_retry"}, l.stepStates(task))
	l.turns()
	require.Equal(t, []string{"enqueued", "waiting_for_retry"}, l.stepStates(task))
}

// The task that has the key is removed between the insert that meets it and the answer: no id is returned of a task that does not exist.
func TestSubmit_TaskOfTheKeyIsPurgedAtTheSameMoment_FailsAndMayBeRepeated(t *testing.T) {
	l := newLab(t)
	l.define("shop", "work", "1", `{}`)
	const create = `SELECT create_task_many(NULL, ARRAY['shop', 'shop'], ARRAY['work', 'work'], ARRAY['1', '1'], p_idempotency_keys => ARRAY['a', 'b'])`
	gone := one[string](l, `SELECT create_task('shop', 'work', '1', p_idempotency_key => 'a')::text`)
	other, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), `SELECT create_task('shop', 'work', '1', p_idempotency_key => 'b')`)
	require.NoError(t, err)
	end := l.meanwhile(create) // has met the first key, and waits for the second
	l.exec(`DELETE FROM task_transitions WHERE task_id = $1`, gone)
	l.exec(`DELETE FROM tasks WHERE task_id = $1`, gone)
	require.NoError(t, other.Commit(t.Context()))
	err = pgwake.WrapError("submit tasks", end())
	var e *pgwake.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "40001", e.SQLState)
	require.True(t, e.Retryable)
	l.exec(create)
	require.Equal(t, []string{"a", "b"}, all[string](l, `SELECT idempotency_key FROM tasks ORDER BY 1`))
}
