package taskgraph_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: when is a step tried again, and what becomes of its task meanwhile?

var errBroken = errors.New("it is broken")

// failing returns a handler that fails so often, and counts its calls.
func failing(times int32, err error) (taskgraph.Handler, *atomic.Int32) {
	var calls atomic.Int32
	return func(context.Context, *taskgraph.Step) (any, error) {
		if calls.Add(1) <= times {
			return nil, err
		}
		return "done", nil
	}, &calls
}

// waits returns for how long a step waits for its next attempt.
func (g *graph) waits(task, name string) time.Duration {
	g.t.Helper()
	seconds := g.one(`SELECT extract(epoch FROM s.next_attempt_at - x.created_at)::text FROM steps s
		JOIN step_transitions x ON x.step_id = s.step_id AND x.to_state = 'enqueued_as_error_for_orchestration'
		WHERE s.task_id = $1 AND s.name = $2 ORDER BY x.sort_key DESC LIMIT 1`, task, name)
	d, err := time.ParseDuration(seconds + "s")
	require.NoError(g.t, err)
	return d
}

func TestT11_RetryableStepFailsTwice_WaitsTwoAndFourSecondsAndCompletes(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	h, calls := failing(2, errBroken)
	g.Handle("h", h)
	g.run()
	task := g.submit(taskgraph.Define("shop", "retry", "1").Step("a", "h"))
	for _, want := range []time.Duration{2 * time.Second, 4 * time.Second} {
		g.until(task, taskgraph.TaskWaitingForRetry)
		require.InDelta(t, want.Seconds(), g.waits(task, "a").Seconds(), 0.9)
		c, err := g.ExecutionContext(t.Context(), task)
		require.NoError(t, err)
		require.Equal(t, taskgraph.Recovering, c.Health)
		seen := g.step(task, "a").Attempts
		pgwaketest.Advance(t, g.p, want)
		for p, err := range g.Watch(g.within(), task) { // until it is at the next attempt, or has ended
			require.NoError(t, err)
			if p.State.IsTerminal() || g.step(task, "a").Attempts > seen {
				break
			}
		}
	}
	g.complete(task)
	require.EqualValues(t, 3, calls.Load())
	require.Equal(t, 3, g.step(task, "a").Attempts)
}

func TestT12_BackoffEnds_TheStepIsReadyAtThatInstantAndWokenWithoutAPoll(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: 1500 * time.Millisecond}}) // the step is looked at before twice that has passed
	h, _ := failing(1, errBroken)
	g.Handle("h", h)
	g.run()
	task := g.submit(taskgraph.Define("shop", "backoff", "1").Step("a", "h"))
	g.until(task, taskgraph.TaskWaitingForRetry)
	step := g.step(task, "a")
	ready, err := g.StepReadiness(t.Context(), task)
	require.NoError(t, err)
	require.False(t, ready[0].Ready)
	require.Equal(t, taskgraph.BackoffNotElapsed, ready[0].BlockingReason())
	require.Equal(t, step.NextAttemptAt, ready[0].NextRetryAt)
	before := g.p.Stats()
	g.complete(task)
	again := g.step(task, "a")
	late := again.LastAttemptAt.Sub(*step.NextAttemptAt)
	require.GreaterOrEqual(t, late, time.Duration(0), "never before it is due")
	require.Less(t, late, 10*time.Second, "push, and not the fallback, which comes once a minute")
	require.Equal(t, before.Fallbacks, g.p.Stats().Fallbacks)
	require.Zero(t, g.p.Stats().Orchestrator.FallbackFinds+g.p.Stats().Worker.FallbackFinds)
}

func TestT12_BackoffEnds_NotReadyAMillisecondBeforeAndReadyAtTheInstant(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.task(single("backoff"))
	l.exec(`SELECT transition_steps(ARRAY[$1::uuid], ARRAY['pending', 'enqueued', 'in_progress', 'waiting_for_retry'], NULL, '{}', p_next_attempts => ARRAY[now() + interval '1 h'])`, l.step(task, "a"))
	readiness, err := l.StepReadiness(t.Context(), task)
	require.NoError(t, err)
	r := readiness[0]
	for _, state := range []string{"waiting_for_retry", "pending"} {
		for after, want := range map[time.Duration]bool{-time.Hour: false, -time.Millisecond: false, -time.Microsecond: false, 0: true, time.Microsecond: true, time.Hour: true} {
			require.Equal(t, want, one[bool](l, `SELECT evaluate_step_state_readiness($1, false, false, $2, $3, true, $4, p_now => $5)`,
				state, r.DependenciesSatisfied, r.RetryEligible, *r.NextRetryAt, r.NextRetryAt.Add(after)), "%s at %v", state, after)
		}
		require.True(t, one[bool](l, `SELECT evaluate_step_state_readiness($1, false, false, true, true, true, NULL)`, state))
	}
}

func TestT14_AlwaysFails_ThreeAttemptsAndTheTaskIsBlocked(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	h, calls := failing(1000, errBroken)
	g.Handle("h", h)
	g.run()
	task := g.submit(taskgraph.Define("shop", "fails", "1").Step("a", "h", taskgraph.MaxAttempts(3)).Step("b", "h", taskgraph.After("a")))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.EqualValues(t, 3, calls.Load())
	step := g.step(task, "a")
	require.Equal(t, taskgraph.StepError, step.State)
	require.Equal(t, errBroken.Error(), step.Err())
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
	require.Equal(t, taskgraph.HandleFailures, c.RecommendedAction)
	require.Equal(t, taskgraph.Blocked, c.Health)
}

func TestT15_PermanentError_OneAttemptAndTheTaskIsBlocked(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	h, calls := failing(1000, taskgraph.Permanent(errBroken))
	g.Handle("h", h)
	g.run()
	task := g.submit(taskgraph.Define("shop", "permanent", "1").Step("a", "h", taskgraph.MaxAttempts(3)))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.EqualValues(t, 1, calls.Load())
	require.NotContains(t, g.states(task), "waiting_for_retry")
}

func TestT16_NotRetryable_TheFirstAttemptIsAlwaysMadeAndThereIsNoSecond(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]taskgraph.StepOption{
		"not retryable":  {taskgraph.NotRetryable()},
		"no attempts":    {taskgraph.MaxAttempts(0)},
		"a single one":   {taskgraph.MaxAttempts(1)},
		"neither at all": {taskgraph.MaxAttempts(0), taskgraph.NotRetryable()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGraph(t, nil)
			bad, calls := failing(1000, errBroken)
			good, ran := failing(0, nil)
			g.Handle("bad", bad)
			g.Handle("good", good)
			g.run()
			task := g.submit(taskgraph.Define("shop", "fails", "1").Step("a", "bad", options...))
			g.until(task, taskgraph.TaskBlockedByFailures)
			require.EqualValues(t, 1, calls.Load())
			g.complete(g.submit(taskgraph.Define("shop", "works", "1").Step("a", "good", options...)))
			require.EqualValues(t, 1, ran.Load())
		})
	}
}

func TestT17_TheStepOrTheHandlerSaysHowLong_ThatComesBeforeExponentialBackoff(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	own, _ := failing(1, errBroken)
	asked, _ := failing(1, taskgraph.RetryAfter(20*time.Second, errBroken))
	long, _ := failing(1, taskgraph.RetryAfter(time.Hour, errBroken))
	g.Handle("own", own)
	g.Handle("asked", asked)
	g.Handle("long", long)
	g.run()
	for handler, want := range map[string]time.Duration{"own": 7 * time.Second, "asked": 20 * time.Second, "long": time.Minute} {
		task := g.submit(taskgraph.Define("shop", handler, "1").Step("a", handler, taskgraph.RetryEvery(7*time.Second)))
		g.until(task, taskgraph.TaskWaitingForRetry)
		require.InDelta(t, want.Seconds(), g.waits(task, "a").Seconds(), 0.9, handler)
	}
}

func TestT18_OneFailedForGood_FailFastRunsNothingMore(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	ok, _ := failing(0, nil)
	permanent, _ := failing(1000, taskgraph.Permanent(errBroken))
	g.Handle("ok", ok)
	g.Handle("permanent", permanent)
	blocked := make(chan struct{})
	g.Handle("late", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		<-blocked
		return nil, errBroken
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "three", "1").Step("a", "ok").Step("b", "permanent").Step("c", "late").Step("d", "ok", taskgraph.After("a", "c")))
	g.until(task, taskgraph.TaskBlockedByFailures) // although a step is at work
	close(blocked)
	eventually(t, func() bool { return g.step(task, "c").State == taskgraph.StepWaitingForRetry })
	require.Empty(t, g.query(`SELECT kind FROM orchestrator_queue WHERE kind = 'retry'`), "nothing wakes it for another attempt")
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.BlockedByFailures, c.ExecutionStatus)
	require.Equal(t, taskgraph.StepPending, g.step(task, "d").State)
	did(t)(g.ResolveStep(t.Context(), g.step(task, "b").ID, "")) // and then it is tried again at once
	eventually(t, func() bool { c := g.step(task, "c"); return c.State == taskgraph.StepError && c.Attempts == 3 })
}

func TestT18_OneFailedForGood_DrainRunsWhatIsFree(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	ok, _ := failing(0, nil)
	permanent, _ := failing(1000, taskgraph.Permanent(errBroken))
	retried, calls := failing(1, errBroken)
	g.Handle("ok", ok)
	g.Handle("permanent", permanent)
	g.Handle("retried", retried)
	g.run()
	d := taskgraph.Define("shop", "three", "1").Step("a", "ok").Step("b", "permanent").Step("c", "retried").Step("d", "ok", taskgraph.After("c")).Step("e", "ok", taskgraph.After("b"))
	d.OnFailure = taskgraph.Drain
	task := g.submit(d)
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.EqualValues(t, 2, calls.Load())
	require.Equal(t, taskgraph.StepComplete, g.step(task, "d").State)
	require.Equal(t, taskgraph.StepPending, g.step(task, "e").State)
}

func TestT19_OnlyWaitsForARetry_TheTaskSaysSoAndUntilWhen(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{Backoff: taskgraph.Backoff{Base: 10 * time.Second}})
	h, _ := failing(1, errBroken)
	g.Handle("h", h)
	g.run()
	task := g.submit(taskgraph.Define("shop", "retry", "1").Step("a", "h"))
	g.until(task, taskgraph.TaskWaitingForRetry)
	c, err := g.ExecutionContext(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, taskgraph.WaitingForDependencies, c.ExecutionStatus)
	require.NotNil(t, c.NextReadyAt)
	step := g.step(task, "a")
	require.Equal(t, step.NextAttemptAt, c.NextReadyAt)
	now, err := g.Task(t.Context(), task)
	require.NoError(t, err)
	require.Equal(t, step.NextAttemptAt, now.NextReadyAt)
	require.Equal(t, 1, now.Retries)
}

func TestT67_BackoffSetByMany_NoPairIsTornOrLost(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const callers = 8
	rounds := testsize.Of(8, 25)
	p := pool(t, l.p, callers)
	task := l.task(single("backoff"))
	step := l.step(task, "a")
	done := make(chan error)
	for i := range callers {
		go func() {
			var err error
			for n := range rounds {
				err = errors.Join(err, l.apart(p, func(g *taskgraph.Graph) error {
					found, err := g.SetStepBackoff(t.Context(), step, time.Duration(1+i*rounds+n)*time.Second)
					if err == nil && !found {
						err = fmt.Errorf("there is no step")
					}
					return err
				}))
			}
			done <- err
		}()
	}
	torn := func() int {
		return one[int](l, `SELECT count(*) FROM steps WHERE step_id = $1 AND next_attempt_at IS DISTINCT FROM last_attempted_at + make_interval(secs => backoff_request_seconds)`, step)
	}
	for range callers {
		require.NoError(t, <-done)
		require.Zero(t, torn())
	}
	require.Zero(t, one[int](l, `SELECT backoff_request_seconds FROM steps WHERE step_id = $1`, step)%rounds, "the last one of some caller")
	didNot(t)(l.SetStepBackoff(t.Context(), noID, time.Second))
}

// nextAttempt is in how many seconds the next attempt at a step is due, rounded; nil: there is no instant for that.
func (l *lab) nextAttempt(task, step string) *int {
	l.t.Helper()
	return one[*int](l, `SELECT round(extract(epoch FROM next_attempt_at - clock_timestamp()) / 10)::integer * 10 FROM steps WHERE task_id = $1 AND name = $2`, task, step)
}

// By whomever a step is made to wait for its next attempt, that has an instant: it is what readiness says, and then it is enqueued.
func TestTransitionStep_ToWaitingForRetry_IsTriedAgainWhenItIsDue(t *testing.T) {
	for _, from := range []taskgraph.StepState{taskgraph.StepPending, taskgraph.StepEnqueued, taskgraph.StepInProgress} {
		for _, every := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprintf("%s, every %v", from, every), func(t *testing.T) {
				l := newLab(t)
				var options []taskgraph.StepOption
				if every > 0 {
					options = append(options, taskgraph.RetryEvery(every))
				}
				task := l.submit(taskgraph.Define("shop", "work", "1").Step("a", "h", options...))
				want := every
				if from != taskgraph.StepPending {
					l.turns()
				}
				if from == taskgraph.StepInProgress {
					l.begin(task, "a")
					want = max(want, 2*time.Second)
				}
				did(t)(l.TransitionStep(l.within(), l.step(task, "a"), from, taskgraph.StepWaitingForRetry, ""))
				ready := func() bool {
					t.Helper()
					r, err := l.StepReadiness(l.within(), task)
					require.NoError(t, err)
					require.NotNil(t, r[0].NextRetryAt)
					return r[0].Ready
				}
				l.turns()
				if want > 0 {
					require.False(t, ready())
					require.Equal(t, []string{"waiting_for_retry"}, l.stepStates(task))
					require.Equal(t, taskgraph.TaskWaitingForRetry, l.stateOf(task))
					pgwaketest.Advance(t, l.p, want)
					require.True(t, ready())
					require.Equal(t, 1, l.turns(), "its timer")
				}
				require.Equal(t, []string{"enqueued"}, l.stepStates(task))
			})
		}
	}
}

func TestTransitionStep_ToWaitingForRetryWithoutAttemptsLeft_IsRefused(t *testing.T) {
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "work", "1").Step("a", "h", taskgraph.MaxAttempts(1)).Step("b", "h", taskgraph.NotRetryable()))
	l.turns()
	for _, name := range []string{"a", "b"} {
		l.begin(task, name)
		_, err := l.TransitionStep(l.within(), l.step(task, name), taskgraph.StepInProgress, taskgraph.StepWaitingForRetry, "")
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	require.Equal(t, []string{"in_progress", "in_progress"}, l.stepStates(task))
}

// A result is what a handler, or somebody, has given it; a failure is none, nor is a result a failure.
func TestTransitionStep_FromAFailureToCompleteAndFromAResultToError_NeitherIsTakenForTheOther(t *testing.T) {
	l := newLab(t)
	d := taskgraph.Define("shop", "work", "1").Step("a", "h").Step("b", "h", taskgraph.AfterIf("a", `exists($.error)`))
	require.NoError(t, l.Register(l.within(), d))
	for _, from := range []taskgraph.StepState{taskgraph.StepEnqueuedAsErrorForOrchestration, taskgraph.StepWaitingForRetry, taskgraph.StepError} {
		task := l.create("shop", "work")
		l.turns()
		l.finish(l.begin(task, "a"), false, fmt.Sprintf(`{"error": "x", "retryable": %t}`, from != taskgraph.StepError))
		if from != taskgraph.StepEnqueuedAsErrorForOrchestration {
			l.turns()
		}
		did(t)(l.TransitionStep(l.within(), l.step(task, "a"), from, taskgraph.StepComplete, ""))
		l.turns()
		require.Equal(t, []string{"complete", "complete"}, l.stepStates(task), from)
		require.Equal(t, 2, one[int](l, `SELECT count(*) FROM steps WHERE task_id = $1 AND results IS NULL`, task), from)
	}
	task := l.create("shop", "work")
	l.turns()
	l.finish(l.begin(task, "a"), true, `{"error": "is a result"}`)
	did(t)(l.TransitionStep(l.within(), l.step(task, "a"), taskgraph.StepEnqueuedForOrchestration, taskgraph.StepError, ""))
	require.Nil(t, one[any](l, `SELECT results FROM steps WHERE task_id = $1 AND name = 'a'`, task))
}

func TestSetStepBackoff_StepIsPending_IsEnqueuedWhenThatIsOver(t *testing.T) {
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "work", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "a"), time.Hour))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "b"), time.Minute)) // which waits for a in any case
	l.turns()
	require.Equal(t, []string{"pending", "pending"}, l.stepStates(task))
	require.Equal(t, taskgraph.TaskWaitingForRetry, l.stateOf(task))
	require.Equal(t, 3600, *one[*int](l, `SELECT round(extract(epoch FROM next_ready_at - clock_timestamp()) / 10)::integer * 10 FROM tasks`))
	pgwaketest.Advance(t, l.p, time.Hour)
	require.Equal(t, 1, l.turns(), "its timer")
	require.Equal(t, []string{"enqueued", "pending"}, l.stepStates(task))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "b"), time.Hour))
	l.ran(task, "a", `1`)
	l.turns()
	require.Equal(t, []string{"complete", "pending"}, l.stepStates(task))
	did(t)(l.SetStepBackoff(l.within(), l.step(task, "b"), 0))
	require.Equal(t, 1, l.turns())
	require.Equal(t, []string{"complete", "enqueued"}, l.stepStates(task))
}

func TestSetStepBackoff_DuringAnAttempt_WhatIsAskedForLastHolds(t *testing.T) {
	const fails = `SELECT finish_step($1, $2, $3, NULL, false, '{"error": "x"}', '30 s')`
	for name, c := range map[string]struct {
		sql      string
		want     int
		attempts int
	}{
		"the handler fails":                 {fails, 3600, 1},
		"the handler asks for another":      {`SELECT finish_step($1, $2, $3, NULL, false, '{"error": "x"}', '120 s', 120)`, 120, 1},
		"the handler asks in seconds alone": {`SELECT finish_step($1, $2, $3, NULL, false, '{"error": "x"}', NULL, 120)`, 120, 1},
		"the worker is lost":                {`SELECT start_step($1, $2, $3, NULL, ARRAY['30 s'::interval])`, 3600, 1},
		"the worker gives it back":          {`SELECT release_step($1, $2, $3, NULL)`, 3600, 0},
		"somebody has it wait for a retry":  {`SELECT transition_step_state_atomic($1, 'in_progress', 'waiting_for_retry'), $2::bigint, $3::text`, 3600, 1},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.define("shop", "work", "1", `{}`, "a")
			task := l.create("shop", "work")
			l.turns()
			c1 := l.begin(task, "a")
			did(t)(l.SetStepBackoff(l.within(), c1.step, time.Hour))
			if name == "the worker is lost" {
				c1 = l.take(task, "a")
			}
			l.exec(c.sql, c1.step, c1.item, c1.token)
			l.turns()
			require.Equal(t, c.want, *l.nextAttempt(task, "a"))
			step := one[int](l, `SELECT backoff_request_seconds FROM steps`)
			require.Equal(t, c.want, step)
			require.Equal(t, c.attempts, one[int](l, `SELECT attempts FROM steps`))
			pgwaketest.Advance(t, l.p, time.Hour)
			l.turns()
			l.finish(l.begin(task, "a"), false, `{"error": "x"}`)
			l.turns()
			require.Less(t, *l.nextAttempt(task, "a"), 30, "it was for one attempt")
		})
	}
}

// The turn that has the step wait commits while the backoff is being set: the timer goes by the new one.
func TestSetStepBackoff_TurnCommitsAtTheSameMoment_TheTimerIsSetAnew(t *testing.T) {
	l := newLab(t)
	l.define("shop", "work", "1", `{}`, "a")
	task := l.create("shop", "work")
	l.turns()
	l.finish(l.begin(task, "a"), false, `{"error": "x"}`)
	l.exec(`DELETE FROM orchestrator_queue`)
	turn, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = turn.Exec(t.Context(), `SELECT FROM tasks FOR NO KEY UPDATE`)
	require.NoError(t, err)
	end := l.meanwhile(`SELECT set_step_backoff_atomic($1, 0)`, l.step(task, "a"))
	_, err = turn.Exec(t.Context(), `SELECT advance_task($1, NULL, NULL, true)`, task)
	require.NoError(t, err)
	require.NoError(t, turn.Commit(t.Context()))
	require.NoError(t, end())
	require.Equal(t, 1, l.turns())
	require.Equal(t, []string{"enqueued"}, l.stepStates(task))
}

func TestRetryEvery_WorkerOrSubTaskIsLost_IsHowLongItWaits(t *testing.T) {
	l := newLab(t)
	l.define("shop", "inner", "1", `{}`, "x")
	require.NoError(t, l.Register(l.within(), taskgraph.Define("shop", "outer", "1").
		Step("a", "h", taskgraph.RetryEvery(7*time.Minute)).Step("b", "h").
		SubTask("c", "inner", "1", taskgraph.RetryEvery(9*time.Minute))))
	task := l.create("shop", "outer")
	l.turns()
	for _, step := range []string{"a", "b"} {
		l.begin(task, step)
		require.Equal(t, "lost", l.start(l.take(task, step), "3 min"))
	}
	child := one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task)
	l.finish(l.begin(child, "x"), false, `{"error": "no", "retryable": false}`)
	l.turns()
	did(t)(l.GiveUp(l.within(), child, ""))
	l.turns()
	for step, want := range map[string]int{"a": 420, "b": 180, "c": 540} {
		require.Equal(t, want, *l.nextAttempt(task, step), step)
	}
}
