package taskgraph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: what happens between a work item and the result of its step?
//
// Invariant: each of these calls is one transaction, which fails unless the lease holds. A worker may die between any two of them:
// before start_step the item comes again to somebody else; after it the lease ends, and start_step by another claim takes the attempt for
// lost; after the last one there is nothing left to do. While the worker lives a call that fails for a reason that passes is repeated
// (settle.go): the attempt may be the only one that the step has.

// ErrTimeout is the cause of the end of a handler's context when the step has had its time.
var ErrTimeout = dispatch.ErrTimeout

var (
	// errRuns: the item is not acknowledged, for its step is begun.
	errRuns = errors.New("the step is begun")
	// errDropped: the step was cancelled or resolved meanwhile, so what came of the attempt is for nobody.
	errDropped = errors.New("the step is not in progress any more")
)

// runs is the outcome of a start_step that has begun an attempt.
const runs = "run"

// started is what start_step returns.
type started struct {
	Outcome        string          `db:"outcome"`
	TaskID         *string         `db:"task_uuid"`
	Namespace      *string         `db:"namespace"`
	TaskName       *string         `db:"task_name"`
	TaskVersion    *string         `db:"task_version"`
	StepName       *string         `db:"step_name"`
	Handler        *string         `db:"handler"`
	Attempts       *int            `db:"attempts"`
	MaxAttempts    *int            `db:"max_attempts"`
	Context        json.RawMessage `db:"context"`
	Inputs         json.RawMessage `db:"inputs"`
	Checkpoint     json.RawMessage `db:"checkpoint"`
	Tags           json.RawMessage `db:"tags"`
	CorrelationID  *string         `db:"correlation_id"`
	BackoffSeconds *int            `db:"backoff_seconds"`
	Timeout        *time.Duration  `db:"timeout"`
}

// runStep returns the handler of work items whose steps a Handler runs.
func (e *Engine) runStep(handler Handler) dispatch.Handler {
	return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		var of struct{ Step string }
		if err := json.Unmarshal(item.Input, &of); err != nil || !isUUID(of.Step) {
			return nil, dispatch.Permanent(fmt.Errorf("work item %d names no step", item.ID))
		}
		id, claim, err := item.LockToken.WorkItem()
		if err != nil {
			return nil, err
		}
		s := &Step{ID: of.Step, token: item.LockToken, item: id, claim: claim, g: e.Graph}
		var timeout time.Duration
		var st started
		// If there is nothing to run, start_step acknowledges the item.
		err = e.settle(ctx, func(ctx context.Context, _ bool) (err error) {
			st, err = row[started](ctx, e.Graph, "start step", "start_step", s.ID, id, claim, e.processor, e.lostDelays())
			if err == nil && st.Outcome == runs {
				return errRuns
			}
			return err
		})
		if err != errRuns {
			if st.Outcome == "lost" {
				e.cfg.Logger.Warn("taskgraph: the worker of a step was lost", "task", *st.TaskID, "step", *st.StepName, "attempt", *st.Attempts, "of", *st.MaxAttempts)
			}
			// No handler was called, so what passes costs no attempt, however long it takes: but for a beginning that has come true with
			// nobody here to know it, and whose lease has ended since, which counts as one whose worker was lost.
			if errors.As(err, new(unsettled)) && ctx.Err() == nil {
				e.cfg.Logger.Warn("taskgraph: cannot begin a step", "step", s.ID, "error", err, "again_in", beforeItemAgain)
				return nil, dispatch.Snooze(beforeItemAgain)
			}
			return nil, err
		}
		s.Name, s.Handler, s.TaskID, s.Namespace = *st.StepName, *st.Handler, *st.TaskID, *st.Namespace
		s.TaskName, s.TaskVersion, s.CorrelationID = *st.TaskName, *st.TaskVersion, *st.CorrelationID
		s.Attempt, s.MaxAttempts, s.BackoffSeconds = *st.Attempts, *st.MaxAttempts, st.BackoffSeconds
		s.Context, s.Inputs, s.Tags, s.checkpoint = st.Context, st.Inputs, st.Tags, st.Checkpoint
		if st.Timeout != nil {
			timeout = *st.Timeout
		}
		result, err := e.runHandler(ctx, handler, s, timeout)
		return nil, e.finish(ctx, s, result, err)
	}
}

// lostDelays are how long a step waits after an attempt whose worker was lost, by the number of attempts.
func (e *Engine) lostDelays() []time.Duration {
	delays := make([]time.Duration, 16)
	for i := range delays {
		delays[i] = e.cfg.Backoff.Delay(i + 1)
	}
	return delays
}

// runHandler calls a handler on a goroutine of its own, so that neither a panic nor runtime.Goexit ends that of the worker.
func (e *Engine) runHandler(ctx context.Context, handler Handler, s *Step, timeout time.Duration) (result any, err error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout, ErrTimeout)
		defer cancel()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = errors.New("the handler has ended its goroutine")
		defer func() {
			if panicked := recover(); panicked != nil {
				err = &dispatch.PanicError{Value: panicked, Stack: debug.Stack()}
			}
		}()
		result, err = handler(ctx, s)
	}()
	<-ended
	if err == nil && ctx.Err() != nil && errors.Is(context.Cause(ctx), ErrTimeout) {
		return nil, ErrTimeout // it took longer than it may, whatever it says
	}
	if err != nil && errors.Is(err, ctx.Err()) && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return result, err
}

// finish settles an attempt.
func (e *Engine) finish(ctx context.Context, s *Step, result any, err error) error {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, pgwake.ErrLockLost):
		return cause // it is somebody else's: whatever is said now would be refused
	case err != nil && errors.Is(cause, dispatch.ErrStopping):
		// It was not the handler's fault, so the attempt does not count, and the step is tried at once, elsewhere.
		return e.settle(ctx, func(ctx context.Context, _ bool) error {
			_, err := value[bool](ctx, e.Graph, "release step", "release_step", s.ID, s.item, s.claim, e.processor, time.Duration(0), "the worker stops")
			return err
		})
	case err != nil:
		return e.fail(ctx, s, err)
	}
	var added []AddedStep
	switch decision := result.(type) {
	case Decision:
		result, added = decision.Result, decision.Steps
	case *Decision:
		if result = nil; decision != nil {
			result, added = decision.Result, decision.Steps
		}
	}
	text, err := jsonText(result, e.maxResult)
	if err != nil {
		return e.fail(ctx, s, Permanent(fmt.Errorf("the result: %w", err)))
	}
	err = e.settle(ctx, func(ctx context.Context, unsure bool) error {
		if len(added) > 0 {
			return e.decide(ctx, s, text, added, unsure)
		}
		return e.finishStep(ctx, s, true, text, nil, nil)
	})
	if refused(err) { // what it returned, or decided, cannot be, and could not the next time
		return e.fail(ctx, s, Permanent(err))
	}
	return err
}

// readCommitted is what the SQL functions count on, whatever the role's default is.
var readCommitted = pgx.TxOptions{IsoLevel: pgx.ReadCommitted}

// decide ends an attempt with a result and with steps that are added to the task, both or none. unsure: it was called before, and
// nobody knows whether that took effect.
func (e *Engine) decide(ctx context.Context, s *Step, result *string, added []AddedStep, unsure bool) error {
	plainly := func() error { return e.finishStep(ctx, s, true, result, nil, nil) }
	if unsure {
		// If it did, the steps have their names already, and that would look like a decision that cannot be.
		switch runs, err := e.isAt(ctx, s); {
		case err != nil:
			return err
		case !runs:
			return plainly()
		}
	}
	err := pgx.BeginTxFunc(ctx, conns.Transactions{Pool: e.pool}, readCommitted, func(tx pgx.Tx) error {
		in := e.WithTx(tx)
		if _, err := in.AddSteps(ctx, s.TaskID, added...); err != nil {
			return err
		}
		done, err := value[bool](ctx, in, opFinish, "finish_step", e.finishArgs(ctx, s, true, result, nil, nil)...)
		if err == nil && !done {
			return errDropped
		}
		return err
	})
	if errors.Is(err, errDropped) { // the end of the item was rolled back as well; a step that has left in_progress does not come back to it with this item
		return plainly()
	}
	return failed(opFinish, err)
}

// fail keeps what went wrong with an attempt, and when there may be another.
func (e *Engine) fail(ctx context.Context, s *Step, cause error) error {
	delay := e.cfg.Backoff.Delay(s.Attempt)
	var asked *int64
	var after retryError
	switch {
	case errors.As(cause, &after):
		delay = e.cfg.Backoff.Requested(after.after)
		n := min(seconds(delay), maxBackoffSeconds)
		asked = &n
	case s.BackoffSeconds != nil:
		delay = e.cfg.Backoff.Requested(time.Duration(*s.BackoffSeconds) * time.Second)
	}
	said, err := json.Marshal(failure{text(cause), !isPermanent(cause)})
	if err != nil {
		return err
	}
	result := string(said)
	e.cfg.Logger.Warn("taskgraph: step failed", "task", s.TaskID, "step", s.Name, "attempt", s.Attempt, "of", s.MaxAttempts, "error", text(cause))
	return e.settle(ctx, func(ctx context.Context, _ bool) error {
		return e.finishStep(ctx, s, false, &result, &delay, asked)
	})
}

const opFinish = "finish step"

// finishStep keeps what came of an attempt, unless the step is not in progress any more.
func (e *Engine) finishStep(ctx context.Context, s *Step, success bool, result *string, delay *time.Duration, asked *int64) error {
	return failed(opFinish, e.p.DoAck(ctx, opFinish, s.token, func(ctx context.Context, q pgwake.Querier, quiet bool) (pgx.Rows, error) {
		args := append(e.finishArgs(ctx, s, success, result, delay, asked), quiet)
		return q.Query(ctx, "SELECT * FROM "+e.call("end_attempt", len(args)), args...)
	}))
}

// finishArgs are the arguments of finish_step.
func (e *Engine) finishArgs(ctx context.Context, s *Step, success bool, result *string, delay *time.Duration, asked *int64) []any {
	return []any{s.ID, s.item, s.claim, e.processor, success, result, delay, asked, e.headers(ctx)}
}

// text is what an error says, up to MaxReasonLength, as jsonb takes it.
func text(err error) (said string) {
	defer func() {
		if panicked := recover(); panicked != nil { // a nil pointer in an error, say
			said = fmt.Sprintf("%T, whose text cannot be had: %v", err, panicked)
		}
	}()
	said = err.Error()
	said = strings.ToValidUTF8(said[:min(len(said), MaxReasonLength)], "\uFFFD")
	said = strings.ReplaceAll(said, "\x00", "\uFFFD") // three bytes where there was one
	return strings.ToValidUTF8(said[:min(len(said), MaxReasonLength)], "")
}
