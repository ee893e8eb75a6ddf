package taskgraph_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: does an attempt survive what passes, and is what does not pass told?

// lostWorkers is how many attempts were taken for lost.
func (g *graph) lostWorkers() string {
	g.t.Helper()
	return g.one(`SELECT count(*)::text FROM step_transitions WHERE metadata ->> 'event' = 'WorkerLost'`)
}

func TestSettle_ErrorsThatPass_CostNoAttempt(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	g.Handle("bad", func(context.Context, *taskgraph.Step) (any, error) { return nil, taskgraph.Permanent(errBroken) })
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Result: "one more", Steps: []taskgraph.AddedStep{{Name: "more", Template: "more"}}}, nil
	})
	g.run()
	for i, state := range []string{"40P01", "57014", "53300", "55P03", "57P03", "28P01", "58030", "42501"} {
		for _, function := range []string{"start_step", "end_attempt"} {
			g.breaks(function, state, 3, "true")
		}
		name := fmt.Sprint("n", i)
		for handler, want := range map[string]taskgraph.TaskState{"ok": taskgraph.TaskComplete, "bad": taskgraph.TaskBlockedByFailures, "decide": taskgraph.TaskComplete} {
			task := g.submit(taskgraph.Define("shop", name+handler, "1").Step("a", handler, taskgraph.NotRetryable()).Template("more", "ok", taskgraph.MaxAttempts(1)))
			g.until(task, want)
			require.Equal(t, 1, g.step(task, "a").Attempts, state)
			if handler == "bad" {
				require.Equal(t, errBroken.Error(), g.step(task, "a").Err())
			}
		}
		require.EqualValues(t, 2*(i+1), calls.Load(), state)
	}
	require.Equal(t, "0", g.lostWorkers())
}

func TestSettle_ErrorsThatPassWhileTheEngineStops_TheResultIsKept(t *testing.T) {
	t.Parallel()
	config := &taskgraph.Config{}
	config.Steps.StopTimeout = time.Millisecond
	g := newGraph(t, config)
	began := make(chan struct{})
	g.Handle("ok", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		close(began)
		<-ctx.Done()
		return "done all the same", nil
	})
	g.breaks("end_attempt", "40P01", 3, "true")
	g.run()
	task := g.submit(taskgraph.Define("shop", "stops", "1").Step("a", "ok", taskgraph.MaxAttempts(1)))
	<-began
	require.NoError(t, g.stop())
	require.JSONEq(t, `"done all the same"`, string(g.step(task, "a").Results))
}

// The connection hangs for longer than one acknowledgement may take. The lease holds all the same.
func TestSettle_NoAnswerForTenSeconds_TheResultIsKept(t *testing.T) {
	t.Parallel()
	g, net := onNetwork(t, nil)
	g.Handle("h", func(context.Context, *taskgraph.Step) (any, error) {
		net.loses(connection, "end_attempt(")
		return "done", nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "hangs", "1").Step("a", "h", taskgraph.MaxAttempts(1)))
	g.complete(task)
	require.EqualValues(t, 1, net.lost.Load())
	require.JSONEq(t, `"done"`, string(g.step(task, "a").Results))
}

// What looks as if it passed, and does not, holds the step up no longer than the death of a worker would.
func TestSettle_ErrorsThatShouldPassAndDoNot_CostTheAttemptInTheEnd(t *testing.T) {
	t.Parallel()
	g := newGraph(t, quickLeases())
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	g.breaks("end_attempt", "57014", 1<<30, "true")
	g.run()
	task := g.submit(taskgraph.Define("shop", "never", "1").Step("a", "ok", taskgraph.MaxAttempts(1)))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, "the worker was lost", g.step(task, "a").Err())
	require.EqualValues(t, 1, calls.Load())
}

// What refuses the beginning of an attempt for hours, as a server that is short of something may, costs neither attempts nor, in the end, the
// step, which begins soon after it is over.
func TestSettle_BeginningIsRefusedForLong_ItemIsPutOffForAWhileAndNoAttemptIsCounted(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	config := quickLeases()
	config.Logger = slog.New(slog.NewTextHandler(&log, nil))
	g := newGraph(t, config)
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	g.breaks("start_step", "57014", 1<<30, "true")
	g.run()
	task := g.submit(taskgraph.Define("shop", "refused", "1").Step("a", "ok", taskgraph.MaxAttempts(1)))
	var item []string
	eventually(t, func() bool {
		item = g.query(`SELECT concat_ws(' ', attempt_count, visible_at < clock_timestamp() + interval '1 min')
			FROM worker_queue WHERE lock_token IS NULL AND visible_at > clock_timestamp()`)
		return len(item) == 1
	})
	require.Equal(t, []string{"0 t"}, item)
	require.Contains(t, log.String(), "cannot begin")
	g.breaks("start_step", "57014", 0, "true")
	pgwaketest.Advance(t, g.p, time.Minute)
	g.complete(task)
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, 1, g.step(task, "a").Attempts)
}

// A statement, or the answer to it, is lost with its connection. What it was to do is done once, and nobody is told of a failure.
func TestSettle_NobodyKnowsWhetherItTookEffect_ItDoesOnce(t *testing.T) {
	t.Parallel()
	config := &taskgraph.Config{}
	var mu sync.Mutex
	var outcomes []dispatch.Outcome
	config.Steps.OnEnd = func(e dispatch.Ended) {
		mu.Lock()
		defer mu.Unlock()
		outcomes = append(outcomes, e.Outcome)
	}
	g, net := onNetwork(t, config)
	var began []int
	var what loss
	var of string
	g.Handle("h", func(_ context.Context, s *taskgraph.Step) (any, error) {
		began = append(began, s.Attempt)
		if string(s.Inputs) != `{"n": 7}` || string(s.Context) != `{"order": 1}` || s.Name != "a" || s.Handler != "h" || s.TaskVersion != "1" || s.MaxAttempts != 1 {
			return nil, fmt.Errorf("it is given %+v", s)
		}
		decides := of == "add_steps(" || of == "commit"
		if of != "start_step(" {
			net.loses(what, of)
		}
		if decides {
			return &taskgraph.Decision{Result: 1, Steps: []taskgraph.AddedStep{{Name: "more", Template: "more", After: []string{"a"}}}}, nil
		}
		return 1, nil
	})
	more, calls := failing(0, nil)
	g.Handle("more", more)
	g.run()
	steps := 0
	for _, what = range []loss{question, answer} {
		for _, of = range []string{"start_step(", "end_attempt(", "add_steps(", "commit"} {
			name := fmt.Sprint(of, what)
			began = nil
			if of == "start_step(" {
				net.loses(what, of)
			}
			task := g.submit(taskgraph.Define("shop", name, "1").Step("a", "h", taskgraph.MaxAttempts(1), taskgraph.Inputs(map[string]int{"n": 7})).Template("more", "more"),
				func(s *taskgraph.Submission) { s.Context = map[string]int{"order": 1} })
			done := g.complete(task)
			require.Equal(t, []int{1}, began, name)
			require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"), name)
			want := 1
			if of == "add_steps(" || of == "commit" {
				want = 2
			}
			require.Equal(t, want, done.TotalSteps, name)
			steps += want
		}
	}
	require.EqualValues(t, 8, net.lost.Load())
	require.EqualValues(t, 4, calls.Load())
	require.Equal(t, "0", g.lostWorkers())
	require.NoError(t, g.stop())
	require.Equal(t, slices.Repeat([]dispatch.Outcome{dispatch.Done}, steps), outcomes)
}

// The attempt of a worker that was lost is not taken for one's own, though it was the same process that began it.
func TestSettle_NobodyKnowsWhetherItBegan_AnAttemptOfBeforeIsLost(t *testing.T) {
	t.Parallel()
	for _, what := range []loss{question, answer} {
		t.Run(fmt.Sprint(what), func(t *testing.T) {
			t.Parallel()
			g, net := onNetwork(t, nil)
			ended := make(chan struct{})
			ok, calls := failing(0, nil)
			g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
				if s.Attempt == 1 {
					net.loses(what, "start_step(")
					g.query(`UPDATE worker_queue SET visible_at = clock_timestamp() - interval '1 s' RETURNING name`) // its lease ends, and it comes again
					g.query(`SELECT notify_queue('worker', 1, NULL)::text`)
					<-ended
				}
				return ok(ctx, s)
			})
			g.run()
			task := g.submit(taskgraph.Define("shop", "before", "1").Step("a", "h", taskgraph.MaxAttempts(1)))
			g.until(task, taskgraph.TaskBlockedByFailures)
			require.Equal(t, "the worker was lost", g.step(task, "a").Err())
			require.EqualValues(t, 1, net.lost.Load())
			close(ended)
			require.NoError(t, g.stop())
			require.EqualValues(t, 1, calls.Load())
			require.Equal(t, []string{"pending", "enqueued", "in_progress", "error"}, g.stepStates(task, "a"))
		})
	}
}

func TestFinish_TheDatabaseRefusesTheResult_TheStepFailsForGoodWithWhatItSays(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, calls := failing(0, nil)
	g.Handle("ok", ok)
	g.breaks("end_attempt", "XX000", 1000, "$5")
	g.run()
	task := g.submit(taskgraph.Define("shop", "refused", "1").Step("a", "ok"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Contains(t, g.step(task, "a").Err(), "the test has it fail")
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, "0", g.lostWorkers())
}

func TestDecision_NameIsTaken_TheStepFailsForGood(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	ok, _ := failing(0, nil)
	g.Handle("ok", ok)
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return taskgraph.Decision{Steps: []taskgraph.AddedStep{{Name: "other", Template: "other"}}}, nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "taken", "1").Step("a", "decide").Step("other", "ok"))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, taskgraph.StepError, g.step(task, "a").State)
	require.NotContains(t, g.step(task, "a").Err(), "lost")
	require.Equal(t, 1, g.step(task, "a").Attempts)
}

// Somebody has taken the step out of in_progress, and its work item is there yet.
func TestDecision_StepIsNotInProgressAnyMore_NothingIsAddedAndTheItemIsGone(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	g := newGraph(t, &taskgraph.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	g.Handle("decide", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		did(t)(g.TransitionStep(ctx, s.ID, taskgraph.StepInProgress, taskgraph.StepResolvedManually, ""))
		return taskgraph.Decision{Result: 1, Steps: []taskgraph.AddedStep{{Name: "more", Template: "more"}}}, nil
	})
	open := make(chan struct{})
	g.Handle("keeps it open", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		select {
		case <-open:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "dropped", "1").Step("a", "decide").Step("b", "keeps it open").Template("more", "decide"))
	eventually(t, func() bool {
		return g.step(task, "a").State == taskgraph.StepResolvedManually && slices.Equal([]string{"keeps it open"}, g.query(`SELECT name FROM worker_queue`))
	})
	close(open)
	done := g.complete(task)
	require.Equal(t, 2, done.TotalSteps)
	require.Empty(t, g.step(task, "a").Results)
	require.NoError(t, g.stop())
	require.Empty(t, log.String(), "nothing has failed")
}

// A failover loses what its commit has told nobody, and before that the beginning of the attempt, and not the claim. The worker has not noticed.
func TestDecision_ServerHasLostTheBeginningOfTheAttemptAndTheCommit_StepsAreAdded(t *testing.T) {
	t.Parallel()
	g, net := onNetwork(t, nil)
	g.Handle("decide", func(_ context.Context, s *taskgraph.Step) (any, error) {
		g.losesBeginning(s.ID)
		net.loses(question, "commit")
		return taskgraph.Decision{Result: 1, Steps: []taskgraph.AddedStep{{Name: "more", Template: "more", After: []string{"a"}}}}, nil
	})
	more, calls := failing(0, nil)
	g.Handle("more", more)
	g.run()
	task := g.submit(taskgraph.Define("shop", "failover", "1").Step("a", "decide", taskgraph.MaxAttempts(1)).Template("more", "more"))
	done := g.complete(task)
	require.EqualValues(t, 1, net.lost.Load())
	require.Equal(t, 2, done.TotalSteps)
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, 1, g.step(task, "a").Attempts)
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"}, g.stepStates(task, "a"))
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) count(what string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.Buffer.String(), what)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

func TestDecision_ByPointer_IsOneAsWell(t *testing.T) {
	t.Parallel()
	g, r := newGraph(t, nil), recorder{}
	g.Handle("h", r.handle)
	g.Handle("decide", func(context.Context, *taskgraph.Step) (any, error) {
		return &taskgraph.Decision{Result: "two", Steps: []taskgraph.AddedStep{{Name: "more", Template: "more", After: []string{"decide"}}}}, nil
	})
	g.Handle("nothing", func(context.Context, *taskgraph.Step) (any, error) { return (*taskgraph.Decision)(nil), nil })
	g.run()
	task := g.submit(taskgraph.Define("shop", "pointer", "1").Step("decide", "decide").Step("nothing", "nothing").Template("more", "h"))
	g.complete(task)
	require.Equal(t, []string{"more"}, r.names())
	require.JSONEq(t, `"two"`, string(g.step(task, "decide").Results))
	require.Empty(t, g.step(task, "nothing").Results)
}
