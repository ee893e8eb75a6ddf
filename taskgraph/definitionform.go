package taskgraph

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// This file answers: what does a definition look like as JSON and in YAML?

// definitionForm is a Definition as it is written.
type definitionForm struct {
	Namespace   string        `json:"namespace" yaml:"namespace"`
	Name        string        `json:"name" yaml:"name"`
	Version     string        `json:"version" yaml:"version"`
	Description string        `json:"description,omitempty" yaml:"description"`
	OnFailure   FailurePolicy `json:"on_failure,omitempty" yaml:"on_failure"`
	Lifecycle   lifecycleForm `json:"lifecycle,omitzero" yaml:"lifecycle"`
	Steps       []stepForm    `json:"steps" yaml:"steps"`
}

type lifecycleForm struct {
	MaxWaitingForDependencies durationForm `json:"max_waiting_for_dependencies,omitempty" yaml:"max_waiting_for_dependencies"`
	MaxWaitingForRetry        durationForm `json:"max_waiting_for_retry,omitempty" yaml:"max_waiting_for_retry"`
	MaxStepsInProcess         durationForm `json:"max_steps_in_process,omitempty" yaml:"max_steps_in_process"`
	MaxLifetime               durationForm `json:"max_lifetime,omitempty" yaml:"max_lifetime"`
}

type stepForm struct {
	Name           string        `json:"name" yaml:"name"`
	Description    string        `json:"description,omitempty" yaml:"description"`
	Handler        string        `json:"handler,omitempty" yaml:"handler"`
	SubTaskName    string        `json:"sub_task_name,omitempty" yaml:"sub_task_name"`
	SubTaskVersion string        `json:"sub_task_version,omitempty" yaml:"sub_task_version"`
	After          afterForm     `json:"after,omitempty" yaml:"after"`
	Retryable      *bool         `json:"retryable,omitempty" yaml:"retryable"`
	MaxAttempts    *wholeForm    `json:"max_attempts,omitempty" yaml:"max_attempts"`
	RetryEvery     *durationForm `json:"retry_every,omitempty" yaml:"retry_every"`
	Timeout        *durationForm `json:"timeout,omitempty" yaml:"timeout"`
	Tag            string        `json:"tag,omitempty" yaml:"tag"`
	LimitKey       string        `json:"limit_key,omitempty" yaml:"limit_key"`
	Inputs         inputsForm    `json:"inputs,omitzero" yaml:"inputs"`
	OnDemand       bool          `json:"on_demand,omitempty" yaml:"on_demand"`
}

// wholeForm is a number without a fraction.
type wholeForm int

// afterForm is what a step waits for.
type afterForm []dependencyForm

type dependencyForm struct {
	Step string `json:"step" yaml:"step"`
	If   string `json:"if,omitempty" yaml:"if"`
}

type inputsForm struct{ json.RawMessage }

func (i inputsForm) IsZero() bool { return len(i.RawMessage) == 0 }

// durationForm is written as "90s" or "1h30m", which PostgreSQL reads as an interval too.
type durationForm time.Duration

func (d durationForm) String() string {
	text := time.Duration(d).String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// MarshalText is for JSON, of which YAML is made.
func (d durationForm) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText is for JSON.
func (d *durationForm) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%s is not a duration, such as 90s or 1h30m", quoteShort(string(text)))
	}
	*d = durationForm(parsed)
	return nil
}

// form returns the definition as it is written. Two that mean the same are written the same.
func (d *Definition) form() (*definitionForm, error) {
	f := &definitionForm{
		Namespace: d.Namespace, Name: d.Name, Version: d.Version, Description: d.Description, OnFailure: d.OnFailure,
		Lifecycle: lifecycleForm{
			MaxWaitingForDependencies: durationForm(d.Lifecycle.MaxWaitingForDependencies),
			MaxWaitingForRetry:        durationForm(d.Lifecycle.MaxWaitingForRetry),
			MaxStepsInProcess:         durationForm(d.Lifecycle.MaxStepsInProcess),
			MaxLifetime:               durationForm(d.Lifecycle.MaxLifetime),
		},
		Steps: make([]stepForm, len(d.Steps)),
	}
	if f.OnFailure == FailFast {
		f.OnFailure = ""
	}
	for i := range d.Steps {
		var err error
		if f.Steps[i], err = d.Steps[i].form(); err != nil {
			return nil, fmt.Errorf("step %s: %w", quoteShort(d.Steps[i].Name), err)
		}
	}
	return f, nil
}

func (s *StepDefinition) form() (stepForm, error) {
	f := stepForm{
		Name: s.Name, Description: s.Description, Handler: s.Handler, SubTaskName: s.SubTaskName, SubTaskVersion: s.SubTaskVersion,
		RetryEvery: (*durationForm)(s.RetryEvery), Timeout: (*durationForm)(s.Timeout),
		Tag: s.Tag, LimitKey: s.LimitKey, OnDemand: s.OnDemand,
	}
	if !s.retryable() {
		f.Retryable = s.Retryable
	}
	if s.maxAttempts() != DefaultMaxAttempts {
		f.MaxAttempts = (*wholeForm)(s.MaxAttempts)
	}
	for _, d := range s.After {
		written := dependencyForm(d)
		if c, err := ParseCondition(d.If); err == nil {
			written.If = c.String()
		}
		f.After = append(f.After, written)
	}
	slices.SortStableFunc(f.After, func(a, b dependencyForm) int { return cmp.Compare(a.Step, b.Step) })
	inputs, err := canonicalJSON(s.Inputs)
	f.Inputs = inputsForm{inputs}
	return f, err
}

func (f *definitionForm) definition() *Definition {
	d := &Definition{
		Namespace: f.Namespace, Name: f.Name, Version: f.Version, Description: f.Description, OnFailure: f.OnFailure,
		Lifecycle: Lifecycle{
			MaxWaitingForDependencies: time.Duration(f.Lifecycle.MaxWaitingForDependencies),
			MaxWaitingForRetry:        time.Duration(f.Lifecycle.MaxWaitingForRetry),
			MaxStepsInProcess:         time.Duration(f.Lifecycle.MaxStepsInProcess),
			MaxLifetime:               time.Duration(f.Lifecycle.MaxLifetime),
		},
	}
	for _, s := range f.Steps {
		step := StepDefinition{
			Name: s.Name, Description: s.Description, Handler: s.Handler, SubTaskName: s.SubTaskName, SubTaskVersion: s.SubTaskVersion,
			Retryable: s.Retryable, MaxAttempts: (*int)(s.MaxAttempts),
			RetryEvery: (*time.Duration)(s.RetryEvery), Timeout: (*time.Duration)(s.Timeout),
			Tag: s.Tag, LimitKey: s.LimitKey, Inputs: s.Inputs.RawMessage, OnDemand: s.OnDemand,
		}
		for _, after := range s.After {
			step.After = append(step.After, Dependency(after))
		}
		d.Steps = append(d.Steps, step)
	}
	return d
}

// MarshalJSON returns the form in which a definition is stored: two that mean the same are the same text. It fails if inputs
// are not JSON; see Validate for all else.
func (d Definition) MarshalJSON() ([]byte, error) {
	f, err := d.form()
	if err != nil {
		return nil, err
	}
	return json.Marshal(f)
}

// UnmarshalJSON is the reverse of MarshalJSON. It does not validate.
func (d *Definition) UnmarshalJSON(data []byte) error {
	var f definitionForm
	if err := json.Unmarshal(data, &f); err != nil {
		return err
	}
	*d = *f.definition()
	return nil
}

// canonicalJSON returns JSON with sorted keys and without blanks. Numbers remain as they are written. Nothing, and null, is
// nothing.
func canonicalJSON(data json.RawMessage) (json.RawMessage, error) {
	if len(data) == 0 {
		return nil, nil
	}
	v, err := decodeJSON(data)
	if err != nil || v == nil {
		return nil, err
	}
	return json.Marshal(v)
}

// decodeJSON takes JSON apart, with numbers as json.Number.
func decodeJSON(data []byte) (any, error) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("more follows after the value")
	}
	return v, nil
}
