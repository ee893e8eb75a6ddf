package taskgraph

import (
	"encoding/json"
	"fmt"
	"time"
)

// This file answers: what is a task made of, and how does a program say so?

// Definition says what the tasks of one name and version are made of. It is data: fill it by hand, with Define and its
// methods, or from YAML (ParseDefinitions). A version that is registered never changes, since tasks of it may be under way;
// what differs is another version.
//
// As JSON, and in YAML, durations are texts such as "90s", and what equals its default is left out.
type Definition struct {
	Namespace   string // see pgwake.CheckNamespace
	Name        string // up to pgwake.MaxNameLength bytes, as is Version
	Version     string
	Description string

	// OnFailure says what becomes of the other branches once a step has failed for good. Defaults to FailFast.
	OnFailure FailurePolicy

	Lifecycle Lifecycle

	// Steps are in the order in which they are listed everywhere; when they run is a matter of After alone.
	Steps []StepDefinition
}

// FailurePolicy says what becomes of the other branches of a task of which a step has failed for good.
type FailurePolicy string

const (
	FailFast FailurePolicy = "fail_fast" // nothing more begins
	Drain    FailurePolicy = "drain"     // what does not depend on the step that failed is run
)

// Lifecycle says how long tasks may take before they count as stale. 0 is the default of each: that of whoever looks for them.
type Lifecycle struct {
	MaxWaitingForDependencies time.Duration // in waiting_for_dependencies
	MaxWaitingForRetry        time.Duration // in waiting_for_retry
	MaxStepsInProcess         time.Duration // in steps_in_process
	MaxLifetime               time.Duration // since it was created
}

// StepDefinition is a step of a Definition: a call of a handler, or a task of its own. A task of its own has no Timeout, Tag and LimitKey: its
// steps have.
type StepDefinition struct {
	Name        string // unique within the definition
	Description string

	// Handler is the name of the function that runs the step. Empty for a sub-task.
	Handler string

	// SubTaskName and SubTaskVersion are the definition, of the same namespace, of the task that the step is.
	SubTaskName, SubTaskVersion string

	// After are the steps that it waits for. Defaults to none: it begins with the task.
	After []Dependency

	// Retryable says whether there is another attempt after one that failed. Defaults to true.
	Retryable *bool

	// MaxAttempts is how often it is tried in all; the first attempt is always made. Defaults to DefaultMaxAttempts.
	MaxAttempts *int

	// RetryEvery is how long to wait after each attempt that failed, in whole seconds. Defaults to the exponential Backoff of
	// whoever runs it; for a task of its own, which nobody runs, to the one of StepReadiness.EffectiveBackoff.
	RetryEvery *time.Duration

	// Timeout is how long an attempt may take, in whole milliseconds. Defaults to none.
	Timeout *time.Duration

	// Tag is what a worker has to ask for, such as hardware. Up to MaxTagLength bytes. Defaults to "": nothing.
	Tag string

	// LimitKey is what it shares limits with other steps of the namespace by; see pgwake.Provider.SetLimits. Defaults to "":
	// none.
	LimitKey string

	// Inputs is JSON for the handler. Defaults to none.
	Inputs json.RawMessage

	// OnDemand makes it a template: not part of a new task, but of it steps are added while the task runs.
	OnDemand bool

	problems []string // of what options were given
}

// DefaultMaxAttempts is how often a step is tried that does not say so.
const DefaultMaxAttempts = 3

func (s *StepDefinition) maxAttempts() int {
	if s.MaxAttempts == nil {
		return DefaultMaxAttempts
	}
	return *s.MaxAttempts
}

func (s *StepDefinition) retryable() bool { return s.Retryable == nil || *s.Retryable }

// Dependency is a step that another one waits for.
type Dependency struct {
	Step string // its name

	// If is a condition on the result of that step (see ParseCondition): if it does not hold, the one that waits is completed
	// without being run. Defaults to "": none.
	If string
}

// Define begins a definition. Set its other fields, add steps, and have it registered; whatever is wrong with it is told
// then, or by Validate.
func Define(namespace, name, version string) *Definition {
	return &Definition{Namespace: namespace, Name: name, Version: version}
}

// Step adds a step that the handler of that name runs, and returns d.
func (d *Definition) Step(name, handler string, options ...StepOption) *Definition {
	return d.add(StepDefinition{Name: name, Handler: handler}, options)
}

// SubTask adds a step that is a task of its own: it begins when the step would, and the step ends as it does. Returns d.
func (d *Definition) SubTask(name, taskName, taskVersion string, options ...StepOption) *Definition {
	return d.add(StepDefinition{Name: name, SubTaskName: taskName, SubTaskVersion: taskVersion}, options)
}

// Template adds a step on demand: a new task does not have it, but steps of it are added while the task runs, with their
// dependencies. Returns d.
func (d *Definition) Template(name, handler string, options ...StepOption) *Definition {
	return d.add(StepDefinition{Name: name, Handler: handler, OnDemand: true}, options)
}

func (d *Definition) add(s StepDefinition, options []StepOption) *Definition {
	for _, set := range options {
		if set != nil {
			set(&s)
		}
	}
	d.Steps = append(d.Steps, s)
	return d
}

// StepOption sets something of a step that is not at its default. The later of two that differ prevails, but for After and
// AfterIf, which add to one another.
type StepOption func(*StepDefinition)

// After has it wait for the steps of those names.
func After(steps ...string) StepOption {
	return func(s *StepDefinition) {
		for _, name := range steps {
			s.After = append(s.After, Dependency{Step: name})
		}
	}
}

// AfterIf has it wait for the step of that name, and be completed without being run if the condition does not hold for the
// result; see ParseCondition.
func AfterIf(step, condition string) StepOption {
	return func(s *StepDefinition) {
		if condition == "" { // as data it would mean that there is none
			s.problems = append(s.problems, fmt.Sprintf("condition on %s is empty", quoteShort(step)))
		}
		s.After = append(s.After, Dependency{Step: step, If: condition})
	}
}

// Describe says for people what it does.
func Describe(text string) StepOption { return func(s *StepDefinition) { s.Description = text } }

// MaxAttempts sets how often it is tried in all.
func MaxAttempts(n int) StepOption { return func(s *StepDefinition) { s.MaxAttempts = &n } }

// NotRetryable leaves it at the first attempt, whatever comes of it.
func NotRetryable() StepOption { return func(s *StepDefinition) { s.Retryable = new(false) } }

// RetryEvery sets how long to wait after each attempt that failed, in whole seconds, instead of exponential backoff.
func RetryEvery(d time.Duration) StepOption { return func(s *StepDefinition) { s.RetryEvery = &d } }

// Timeout ends an attempt that takes longer.
func Timeout(d time.Duration) StepOption { return func(s *StepDefinition) { s.Timeout = &d } }

// Tag leaves it to workers that ask for the tag.
func Tag(tag string) StepOption { return func(s *StepDefinition) { s.Tag = tag } }

// LimitKey has it share the limits of the key.
func LimitKey(key string) StepOption { return func(s *StepDefinition) { s.LimitKey = key } }

// Inputs gives the handler v, as JSON; nil: nothing.
func Inputs(v any) StepOption {
	data, err := marshal(v)
	if string(data) == "null" {
		data = nil
	}
	return func(s *StepDefinition) {
		s.Inputs = data
		if err != nil {
			s.problems = append(s.problems, fmt.Sprintf("inputs are not JSON: %v", err))
		}
	}
}
