// Package model is what the SQL functions of the task graph are held against: tasks and steps in memory, and the rules of
// readiness written down as plainly as can be.
package model

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// This file answers: which steps are ready, and how is a task doing?

// The states of tasks and steps.
var (
	TaskStates = []string{"pending", "initializing", "enqueuing_steps", "steps_in_process", "evaluating_results",
		"waiting_for_dependencies", "waiting_for_retry", "blocked_by_failures", "complete", "error", "cancelled", "resolved_manually"}
	StepStates = []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "enqueued_as_error_for_orchestration",
		"waiting_for_retry", "complete", "error", "cancelled", "resolved_manually"}
)

// Task is a task with its steps.
type Task struct {
	State string
	Steps []Step
}

// Step is a step of a task.
type Step struct {
	State                 string
	Attempts, MaxAttempts int
	Retryable             bool
	Backoff               *int       // asked for, in seconds
	LastAttempt           *time.Time // when the latest attempt began
	LastFailure           *time.Time // when it last came into a state that tells of a failure
	NextAttempt           *time.Time // stored
	Result                map[string]int
	Parents               []Parent
}

// Parent is what a step depends on: the step of that index in its task.
type Parent struct {
	Step      int
	Condition *Condition
}

// Condition holds for a result that has the value under the key.
type Condition struct {
	Key  string
	Want int
}

// Path is the condition as a predicate of SQL/JSON.
func (c Condition) Path() string { return fmt.Sprintf("$.%s == %d", c.Key, c.Want) }

// Holds reports whether it holds for a result, which may be nil.
func (c Condition) Holds(result map[string]int) bool {
	got, ok := result[c.Key]
	return ok && got == c.Want
}

// Readiness is what is said of a step.
type Readiness struct {
	Satisfied, Eligible, Ready bool
	NextRetry                  *time.Time
	Parents, CompletedParents  int
}

// Done reports whether a step in this state satisfies those that depend on it.
func Done(state string) bool { return state == "complete" || state == "resolved_manually" }

// Ended reports whether a task in this state has ended.
func Ended(state string) bool {
	return slices.Contains([]string{"complete", "error", "cancelled", "resolved_manually"}, state)
}

// Delay is the exponential backoff after so many attempts, in seconds: none, 2, 4, 8, 16, 32, 60, 60, ...
func Delay(attempts int) int {
	if attempts == 0 {
		return 0
	}
	delay := 1
	for range attempts {
		delay = min(2*delay, 60)
	}
	return delay
}

// NextRetry is when a step may be tried again. Nil: at once, or never.
func (s Step) NextRetry() *time.Time {
	if s.NextAttempt != nil || s.State != "pending" && s.State != "waiting_for_retry" {
		return s.NextAttempt
	}
	at := func(from *time.Time, seconds int) *time.Time {
		if from == nil {
			return nil
		}
		then := from.Add(time.Duration(seconds) * time.Second)
		return &then
	}
	if s.Backoff != nil && s.LastAttempt != nil {
		return at(s.LastAttempt, *s.Backoff)
	}
	return at(s.LastFailure, Delay(s.Attempts))
}

// Readiness says whether the step of that index is ready at an instant.
func (t Task) Readiness(step int, now time.Time) Readiness {
	s := t.Steps[step]
	r := Readiness{Satisfied: true, Parents: len(s.Parents), NextRetry: s.NextRetry()}
	for _, p := range s.Parents {
		parent := t.Steps[p.Step]
		if Done(parent.State) {
			r.CompletedParents++
		}
		if !Done(parent.State) || p.Condition != nil && !p.Condition.Holds(parent.Result) {
			r.Satisfied = false
		}
	}
	r.Eligible = s.Attempts == 0 || s.Retryable && s.Attempts < s.MaxAttempts
	r.Ready = (s.State == "pending" || s.State == "waiting_for_retry") && r.Satisfied && r.Eligible &&
		(r.NextRetry == nil || !r.NextRetry.After(now))
	return r
}

// Context is how a task is doing.
type Context struct {
	Counts                  map[string]int // by state
	Ready, Blocked          int
	Status, Action, Health  string
	Completion              float64
	NextReady               *time.Time
	Total, Enqueued, Closed int // Closed: complete or resolved_manually
}

// Context says how the task is doing at an instant.
func (t Task) Context(now time.Time) Context {
	c := Context{Counts: make(map[string]int), Total: len(t.Steps)}
	recovering := false
	for i, s := range t.Steps {
		c.Counts[s.State]++
		r := t.Readiness(i, now)
		if r.Ready {
			c.Ready++
		}
		if s.State == "error" || s.State == "cancelled" && !Ended(t.State) {
			c.Blocked++
		}
		recovering = recovering || s.State == "waiting_for_retry" || s.State == "pending" && s.Attempts > 0
		waits := (s.State == "pending" || s.State == "waiting_for_retry") && r.Satisfied && r.Eligible && !r.Ready
		if waits && (c.NextReady == nil || r.NextRetry.Before(*c.NextReady)) {
			c.NextReady = r.NextRetry
		}
	}
	c.Enqueued = c.Counts["enqueued"] + c.Counts["enqueued_for_orchestration"] + c.Counts["enqueued_as_error_for_orchestration"]
	c.Closed = c.Counts["complete"] + c.Counts["resolved_manually"]
	c.Completion = 100
	if c.Total > 0 {
		c.Completion = math.Round(100*100*float64(c.Closed)/float64(c.Total)) / 100
	}
	over := c.Closed
	if Ended(t.State) {
		over += c.Counts["cancelled"]
	}
	switch {
	case c.Blocked > 0:
		c.Status, c.Action = "blocked_by_failures", "handle_failures"
	case c.Ready > 0:
		c.Status, c.Action = "has_ready_steps", "execute_ready_steps"
	case c.Counts["in_progress"]+c.Enqueued > 0:
		c.Status, c.Action = "processing", "wait_for_completion"
	case over == c.Total:
		c.Status, c.Action = "all_complete", "finalize_task"
	default:
		c.Status, c.Action = "waiting_for_dependencies", "wait_for_dependencies"
	}
	switch {
	case c.Blocked > 0:
		c.Health = "blocked"
	case recovering:
		c.Health = "recovering"
	default:
		c.Health = "healthy"
	}
	return c
}
