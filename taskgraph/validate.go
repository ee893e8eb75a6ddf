package taskgraph

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what is wrong with a definition? All of it, at once.

// Limits of a Definition.
const (
	MaxSteps           = 20_000
	MaxDependencies    = 200_000
	MaxDefinitionSize  = 16 << 20  // bytes of texts and inputs
	MaxTagLength       = 200       // bytes
	MaxConditionLength = 4096      // bytes
	maxListed          = 100       // problems in one error
	maxCycleNames      = 10        // of a cycle in an error
	maxBackoffSeconds  = 1<<31 - 1 // what the column holds
)

// DefinitionError lists everything that is wrong with a definition. It is a pgwake.ErrInvalid.
type DefinitionError struct {
	Definition string   // its namespace, name and version, quoted
	Problems   []string // sorted, up to 100; those of steps begin with the name of the step
	More       int      // how many others there are
}

func (e *DefinitionError) Error() string {
	return fmt.Sprintf("%v: definition %s: %s", pgwake.ErrInvalid, e.Definition, &problems{texts: e.Problems, more: e.More})
}

// Unwrap makes errors.Is(err, pgwake.ErrInvalid) hold.
func (e *DefinitionError) Unwrap() error { return pgwake.ErrInvalid }

// Validate fails with a *DefinitionError, which lists all that is wrong, unless tasks can be made of d. Nothing is registered
// that fails it.
func (d *Definition) Validate() error {
	v := validation{byName: make(map[string]int, len(d.Steps))}
	v.definition(d)
	if v.sizes(d) { // the time that all else takes is bounded
		v.steps(d)
		v.edges(d)
	}
	return v.err(d)
}

type validation struct {
	general, ofSteps []string
	byName           map[string]int // the first step of that name
	zeros            int            // of the numbers of all inputs
}

func (v *validation) err(d *Definition) error {
	if len(v.general)+len(v.ofSteps) == 0 {
		return nil
	}
	slices.Sort(v.ofSteps)
	problems := append(v.general, v.ofSteps...)
	e := &DefinitionError{
		Definition: d.title(),
		Problems:   problems[:min(len(problems), maxListed)],
	}
	e.More = len(problems) - len(e.Problems)
	return e
}

// title says which definition it is.
func (d *Definition) title() string {
	return quoteShort(d.Namespace+"/"+d.Name) + " " + quoteShort(d.Version)
}

func (v *validation) bad(format string, args ...any) {
	v.general = append(v.general, fmt.Sprintf(format, args...))
}

func (v *validation) badStep(name, format string, args ...any) {
	v.ofSteps = append(v.ofSteps, fmt.Sprintf("step %s: "+format, append([]any{quoteShort(name)}, args...)...))
}

func (v *validation) definition(d *Definition) {
	if err := pgwake.CheckNamespace(d.Namespace); err != nil {
		v.bad("%s", strings.TrimPrefix(err.Error(), pgwake.ErrInvalid.Error()+": "))
	}
	for _, t := range [...]struct {
		what, text string
	}{{"name", d.Name}, {"version", d.Version}} {
		if problem := textProblem(t.text, 1, pgwake.MaxNameLength); problem != "" {
			v.bad("%s %s", t.what, problem)
		}
	}
	if problem := textProblem(d.Description, 0, math.MaxInt); problem != "" {
		v.bad("description %s", problem)
	}
	switch d.OnFailure {
	case "", FailFast, Drain:
	default:
		v.bad("on_failure is %s, neither %s nor %s", quoteShort(string(d.OnFailure)), FailFast, Drain)
	}
	for _, limit := range [...]struct {
		what string
		time.Duration
	}{
		{"max_waiting_for_dependencies", d.Lifecycle.MaxWaitingForDependencies},
		{"max_waiting_for_retry", d.Lifecycle.MaxWaitingForRetry},
		{"max_steps_in_process", d.Lifecycle.MaxStepsInProcess},
		{"max_lifetime", d.Lifecycle.MaxLifetime},
	} {
		if limit.Duration < 0 {
			v.bad("lifecycle %s of %v is negative", limit.what, limit.Duration)
		} else if limit.Duration%time.Millisecond != 0 {
			v.bad("lifecycle %s of %v is not in whole milliseconds", limit.what, limit.Duration)
		}
	}
}

// sizes reports whether the definition is of a size to be looked at.
func (v *validation) sizes(d *Definition) bool {
	dependencies, size := 0, len(d.Description)
	for i := range d.Steps {
		s := &d.Steps[i]
		dependencies += len(s.After)
		size += len(s.Name) + len(s.Description) + len(s.Handler) + len(s.Inputs)
		for _, after := range s.After {
			size += len(after.Step) + len(after.If)
		}
	}
	if len(d.Steps) > MaxSteps {
		v.bad("%d steps are more than %d", len(d.Steps), MaxSteps)
	}
	if dependencies > MaxDependencies {
		v.bad("%d dependencies are more than %d", dependencies, MaxDependencies)
	}
	if size > MaxDefinitionSize {
		v.bad("texts and inputs of %d bytes are more than %d", size, MaxDefinitionSize)
	}
	return len(d.Steps) <= MaxSteps && dependencies <= MaxDependencies && size <= MaxDefinitionSize
}

func (v *validation) steps(d *Definition) {
	count := make(map[string]int, len(d.Steps))
	for i := range d.Steps {
		s := &d.Steps[i]
		if count[s.Name]++; count[s.Name] == 1 {
			v.byName[s.Name] = i
		}
		v.step(i, s)
	}
	if v.zeros > mostWrittenOut { // the configuration, which is the whole definition, has the inputs of all
		v.bad("the inputs together: %v", errWrittenOut)
	}
	for name, n := range count {
		if n > 1 && name != "" {
			v.badStep(name, "defined %d times", n)
		}
	}
}

func (v *validation) step(i int, s *StepDefinition) {
	bad := func(format string, args ...any) { v.badStep(s.Name, format, args...) }
	if s.Name == "" {
		v.bad("step %d has no name", i+1)
	}
	for _, t := range [...]struct {
		what, text string
		most       int
	}{
		{"name", s.Name, pgwake.MaxNameLength},
		{"handler", s.Handler, pgwake.MaxNameLength},
		{"sub_task_name", s.SubTaskName, pgwake.MaxNameLength},
		{"sub_task_version", s.SubTaskVersion, pgwake.MaxNameLength},
		{"tag", s.Tag, MaxTagLength},
		{"limit_key", s.LimitKey, pgwake.MaxNameLength},
		{"description", s.Description, math.MaxInt},
	} {
		if problem := textProblem(t.text, 0, t.most); problem != "" {
			bad("%s %s", t.what, problem)
		}
	}
	switch handler, task, version := s.Handler != "", s.SubTaskName != "", s.SubTaskVersion != ""; {
	case handler && (task || version):
		bad("has both a handler and a sub-task")
	case !handler && !task && !version:
		bad("has neither a handler nor a sub-task")
	case !handler && !task:
		bad("sub-task has no name")
	case !handler && !version:
		bad("sub-task has no version")
	}
	if s.Handler == "" { // nobody runs it, and nothing of this would have an effect
		for _, o := range [...]struct {
			what string
			is   bool
		}{{"timeout", s.Timeout != nil}, {"tag", s.Tag != ""}, {"limit_key", s.LimitKey != ""}} {
			if o.is {
				bad("%s is for steps that a handler runs", o.what)
			}
		}
	}
	if n := s.maxAttempts(); n < 0 {
		bad("max_attempts of %d is negative", n)
	} else if n > math.MaxInt32 {
		bad("max_attempts of %d is more than %d", n, math.MaxInt32)
	}
	if d := s.RetryEvery; d != nil {
		switch {
		case *d < 0:
			bad("retry_every of %v is negative", *d)
		case *d%time.Second != 0:
			bad("retry_every of %v is not in whole seconds", *d)
		case *d/time.Second > maxBackoffSeconds:
			bad("retry_every of %v is more than %d s", *d, maxBackoffSeconds)
		}
	}
	if d := s.Timeout; d != nil {
		switch {
		case *d <= 0:
			bad("timeout of %v is not positive", *d)
		case *d%time.Millisecond != 0:
			bad("timeout of %v is not in whole milliseconds", *d)
		}
	}
	for _, problem := range s.problems {
		bad("%s", problem)
	}
	if err := checkJSON(s.Inputs); err != nil {
		bad("inputs: %v", err)
	} else {
		v.zeros += jsonvalue.Zeros(s.Inputs)
	}
}

// textProblem says what is wrong with a text that PostgreSQL is to hold; "": nothing.
func textProblem(s string, least, most int) string {
	switch {
	case len(s) < least:
		return "is empty"
	case len(s) > most:
		return fmt.Sprintf("is %d bytes long, more than %d", len(s), most)
	case !utf8.ValidString(s):
		return fmt.Sprintf("%s is not valid UTF-8", quoteShort(s))
	case strings.ContainsRune(s, 0):
		return fmt.Sprintf("%s contains NUL", quoteShort(s))
	}
	return ""
}

func (v *validation) edges(d *Definition) {
	parents := make([][]int, len(d.Steps)) // without those that were found bad
	for i := range d.Steps {
		s := &d.Steps[i]
		if s.OnDemand && len(s.After) > 0 {
			v.badStep(s.Name, "is added on demand, and its dependencies with it: it can have none here")
		}
		count := make(map[string]int, len(s.After))
		for _, after := range s.After {
			v.condition(s.Name, after)
			if count[after.Step]++; count[after.Step] > 1 {
				continue
			}
			parent, known := v.byName[after.Step]
			switch {
			case after.Step == s.Name:
				v.badStep(s.Name, "depends on itself")
			case !known:
				v.badStep(s.Name, "depends on %s, which there is not", quoteShort(after.Step))
			case d.Steps[parent].OnDemand:
				v.badStep(s.Name, "depends on %s, which is added on demand", quoteShort(after.Step))
			default:
				parents[i] = append(parents[i], parent)
			}
		}
		for parent, n := range count {
			if n > 1 {
				v.badStep(s.Name, "depends on %s %d times", quoteShort(parent), n)
			}
		}
	}
	for _, cycle := range findCycles(parents) {
		v.cycle(d, cycle)
	}
}

func (v *validation) condition(step string, after Dependency) {
	if after.If == "" {
		return
	}
	if problem := conditionProblem(after.If); problem != "" {
		v.badStep(step, "condition on %s%s", quoteShort(after.Step), problem)
	}
}

// conditionProblem says what is wrong with a condition, to follow after its name; "": nothing.
func conditionProblem(condition string) string {
	switch {
	case condition == "":
		return " is empty"
	case len(condition) > MaxConditionLength:
		return fmt.Sprintf(" is %d bytes long, more than %d", len(condition), MaxConditionLength)
	}
	_, err := ParseCondition(condition)
	if err == nil {
		return ""
	}
	return ": " + strings.TrimPrefix(err.Error(), pgwake.ErrInvalid.Error()+": ")
}

// cycle reports steps each of which waits for the one before.
func (v *validation) cycle(d *Definition, cycle []int) {
	first := 0
	for at, i := range cycle {
		if d.Steps[i].Name < d.Steps[cycle[first]].Name {
			first = at
		}
	}
	var names []string
	for n := range min(len(cycle), maxCycleNames) {
		names = append(names, quoteShort(d.Steps[cycle[(first+n)%len(cycle)]].Name))
	}
	if more := len(cycle) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("(%d more)", more))
	}
	v.badStep(d.Steps[cycle[first]].Name, "is in a cycle of dependencies: %s", strings.Join(append(names, names[0]), " -> "))
}

// quoteShort returns a caller's text for an error message, shortened to what a log line bears.
func quoteShort(s string) string {
	most := 100
	if len(s) <= most {
		return strconv.Quote(s)
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return strconv.Quote(s[:most]) + "…"
}
