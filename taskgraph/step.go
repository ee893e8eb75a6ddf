package taskgraph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what does the handler of a step get, and what may it say?

// Handler runs a step. It may be called again for the same step, on any node, at any time after an error or a crash. Its context ends
// when the lease is lost, when its time is up, or when the Engine cannot wait any longer; context.Cause says which. What it returns is
// the result of the step: any value of which package encoding/json makes JSON, or a Decision. An error, a panic and the end of its time are
// failures: the step waits for its next attempt if there is one, unless the error is Permanent. It is called by several goroutines
// at a time.
type Handler func(ctx context.Context, s *Step) (result any, err error)

// Step is an attempt at a step. Its methods are safe for concurrent use.
type Step struct {
	ID, Name, Handler string
	TaskID, Namespace string
	TaskName          string
	TaskVersion       string
	CorrelationID     string
	Attempt           int // this one included
	MaxAttempts       int
	Context           json.RawMessage // of the task
	Inputs            json.RawMessage // of the step; empty: none
	Tags              json.RawMessage // of the task
	BackoffSeconds    *int            // what the definition says instead of the exponential backoff
	checkpoint        json.RawMessage
	item              int64
	token             pgwake.LockToken
	claim             string // of the token
	g                 *Graph
	mu                sync.Mutex
	results           map[string]json.RawMessage // of all ancestors, once they are asked for
}

// DecodeContext decodes what the task is about. Errors of it, and of what else decodes, say where something does not fit a Go type, and not
// what is there.
func (s *Step) DecodeContext(v any) error {
	if err := jsonvalue.Unmarshal(s.Context, v); err != nil {
		return Permanent(fmt.Errorf("decode the context of task %s: %w", s.TaskID, err))
	}
	return nil
}

// DecodeInputs decodes the inputs of the step; without any it leaves v as it is.
func (s *Step) DecodeInputs(v any) error {
	if len(s.Inputs) == 0 {
		return nil
	}
	if err := jsonvalue.Unmarshal(s.Inputs, v); err != nil {
		return Permanent(fmt.Errorf("decode the inputs of step %s: %w", s.Name, err))
	}
	return nil
}

// Results returns the results of all steps that come before this one, near and far, by their names: those that are done and have one.
// They are read once, and together may not have more than 256 MiB; for some of many see Result.
func (s *Step) Results(ctx context.Context) (map[string]json.RawMessage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.results == nil {
		all, err := s.g.DependencyResults(ctx, s.ID)
		if err != nil {
			return nil, err
		}
		s.results = all
	}
	return maps.Clone(s.results), nil
}

// Result decodes the result of a step that comes before this one. It reads that one alone, unless Results has read all of them before.
// pgwake.ErrNotFound if there is no such step, or if it has none.
func (s *Step) Result(ctx context.Context, name string, v any) error {
	s.mu.Lock()
	result, ok := s.results[name]
	s.mu.Unlock()
	if !ok {
		var err error
		if result, err = s.g.DependencyResult(ctx, s.ID, name); err != nil {
			return err
		}
	}
	if err := jsonvalue.Unmarshal(result, v); err != nil {
		return Permanent(fmt.Errorf("decode the result of step %s: %w", name, err))
	}
	return nil
}

// Checkpoint keeps how far the attempt has got, durably once it returns: any value of which package encoding/json makes JSON. If the
// step is tried again, LastCheckpoint has it, also after ResetStep; nil removes it. pgwake.ErrLockLost if the step is somebody else's by now,
// pgwake.ErrPayloadTooLarge for what is larger than pgwake.Config.MaxPayload.
func (s *Step) Checkpoint(ctx context.Context, v any) error {
	const op = "checkpoint step"
	text, err := jsonText(v, s.g.p.MaxPayload())
	if err != nil {
		return invalid(op, "the checkpoint: %w", err)
	}
	if err := exec(ctx, s.g, op, "checkpoint_step", s.ID, s.item, s.claim, text); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checkpoint = raw(text)
	return nil
}

// LastCheckpoint decodes what Checkpoint has kept last, by this attempt or one before. False, and v is as it was, if there is none.
func (s *Step) LastCheckpoint(v any) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.checkpoint) == 0 {
		return false, nil
	}
	if err := jsonvalue.Unmarshal(s.checkpoint, v); err != nil {
		return false, Permanent(fmt.Errorf("decode the checkpoint of step %s: %w", s.Name, err))
	}
	return true, nil
}

// Decision is the result of a step that says what is to be done next: the steps are added to the task in the transaction that keeps the
// result. Those without After wait for nothing.
type Decision struct {
	Result any
	Steps  []AddedStep
}

// permanentError and retryError are what Permanent and RetryAfter make.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

// Permanent returns an error that no further attempt would help: the step fails for good. Of nil it returns nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanentError{err}
}

type retryError struct {
	error
	after time.Duration
}

func (e retryError) Unwrap() error { return e.error }

// RetryAfter returns an error that says how long to wait before the next attempt, such as a server that has said so (ParseRetryAfter), up
// to Backoff.Max. Of nil it returns nil.
func RetryAfter(after time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return retryError{err, max(after, 0)}
}

// failure is an attempt that failed.
type failure struct {
	Error     string `json:"error"`
	Retryable bool   `json:"retryable"`
}

func isPermanent(err error) bool { return errors.As(err, new(permanentError)) }
