package taskgraph

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// This file answers: what do people see of a task, whatever it is drawn with?

// View is a task as it is at one moment, or a definition, for people to look at: see DOT, Mermaid and Text. What it draws
// follows from it alone.
type View struct {
	Namespace, Name, Version string
	TaskID                   string // "" for a definition
	State                    string // "" for a definition
	Steps                    []StepView
}

// StepView is a step of a View.
type StepView struct {
	Name                  string
	State                 string // "" in a definition
	Attempts, MaxAttempts int
	After                 []Dependency  // on steps that are not in the View they are not drawn
	Error                 string        // what went wrong, if it did
	Duration              time.Duration // of the latest attempt, or so far if it is under way; 0: none has begun
	Skipped               bool          // a condition did not hold: it is complete without having been run
	OnDemand              bool          // a template
}

// View returns the definition for people to look at.
func (d *Definition) View() *View {
	v := &View{Namespace: d.Namespace, Name: d.Name, Version: d.Version}
	for i := range d.Steps {
		s := &d.Steps[i]
		v.Steps = append(v.Steps, StepView{Name: s.Name, MaxAttempts: s.maxAttempts(), After: s.After, OnDemand: s.OnDemand})
	}
	return v
}

// title is what the task is called.
func (v *View) title() string {
	return visible(v.Namespace) + "/" + visible(v.Name) + " " + visible(v.Version)
}

// aboutTask is what there is to say of the task, beside its title.
func (v *View) aboutTask() []string {
	var lines []string
	for _, l := range []string{v.State, v.TaskID} {
		if l != "" {
			lines = append(lines, visible(l))
		}
	}
	return lines
}

// state is what is said of the state of a step.
func (s *StepView) state() string {
	switch {
	case s.Skipped:
		return "skipped"
	case s.State == "" && s.OnDemand:
		return "on demand"
	}
	return s.State
}

// attempts is "" as long as there is nothing to tell.
func (s *StepView) attempts() string {
	if s.Skipped || s.State == "" {
		return ""
	}
	return fmt.Sprintf("%d/%d", s.Attempts, max(s.MaxAttempts, 1)) // the first is always made
}

func (s *StepView) duration() string {
	d := s.Duration
	switch {
	case d <= 0:
		return ""
	case d < time.Millisecond:
		return "<1ms"
	case d >= 10*time.Second:
		d = d.Round(time.Second)
	case d >= time.Second:
		d = d.Round(100 * time.Millisecond)
	default:
		d = d.Round(time.Millisecond)
	}
	return durationForm(d).String()
}

// longestError is how many bytes of an error text are shown.
const longestError = 200

// errorLine is the error on one line.
func (s *StepView) errorLine() string {
	text := strings.Join(strings.Fields(s.Error), " ")
	if len(text) > longestError {
		text = strings.ToValidUTF8(text[:longestError], "") + "…"
	}
	return visible(text)
}

// about is what there is to say of a step, beside its name.
func (s *StepView) about() []string {
	var lines []string
	line := visible(s.state())
	for _, more := range []string{s.attempts(), s.duration()} {
		if more != "" {
			line += " " + more
		}
	}
	for _, l := range []string{strings.TrimSpace(line), s.errorLine()} {
		if l != "" {
			lines = append(lines, l)
		}
	}
	return lines
}

// viewEdge is a dependency between two steps that are in the View, by their places.
type viewEdge struct {
	parent, child int
	condition     string
}

// edges are in the order of the steps that wait, and then of those they wait for.
func (v *View) edges() []viewEdge {
	byName := make(map[string]int, len(v.Steps))
	for i := range v.Steps {
		byName[v.Steps[i].Name] = i
	}
	var edges []viewEdge
	for child := range v.Steps {
		for _, after := range v.Steps[child].After {
			if parent, ok := byName[after.Step]; ok {
				edges = append(edges, viewEdge{parent, child, after.If})
			}
		}
	}
	return edges
}

// visible returns text in which everything can be seen: what is not printed, or would change the direction of what follows, is
// written as an escape of Go.
func visible(text string) string {
	var b strings.Builder
	for _, r := range text {
		const joiner, nonJoiner = '\u200d', '\u200c' // of emoji and Persian
		if unicode.IsPrint(r) || r == joiner || r == nonJoiner {
			b.WriteRune(r)
			continue
		}
		quoted := strconv.QuoteRune(r)
		b.WriteString(quoted[1 : len(quoted)-1])
	}
	return leftToRight(b.String())
}

var rightToLeft = []*unicode.RangeTable{
	unicode.Hebrew, unicode.Arabic, unicode.Syriac, unicode.Thaana, unicode.Nko, unicode.Samaritan, unicode.Mandaic, unicode.Adlam,
}

// leftToRight keeps text that is read from right to left from drawing the numbers and marks after it to its other side.
func leftToRight(text string) string {
	const mark = "\u200e"
	if strings.ContainsFunc(text, func(r rune) bool { return unicode.IsOneOf(rightToLeft, r) }) {
		return text + mark
	}
	return text
}

// stateStyle is how a state looks: colours of a box, and the escape sequence of a terminal.
type stateStyle struct{ fill, stroke, ansi string }

var (
	styleIdle    = stateStyle{"#f3f4f6", "#6b7280", ""}
	styleAtWork  = stateStyle{"#dbeafe", "#2563eb", "\x1b[34m"}
	styleWaiting = stateStyle{"#fef3c7", "#d97706", "\x1b[33m"}
	styleDone    = stateStyle{"#dcfce7", "#16a34a", "\x1b[32m"}
	styleFailed  = stateStyle{"#fee2e2", "#dc2626", "\x1b[31m"}
	styleByHand  = stateStyle{"#f3e8ff", "#9333ea", "\x1b[35m"}
	styleGone    = stateStyle{"#ffffff", "#9ca3af", "\x1b[90m"}
)

// stateStyles has the states of steps, and those of tasks.
var stateStyles = map[string]stateStyle{
	"pending":                             styleIdle,
	"enqueued":                            styleAtWork,
	"in_progress":                         styleAtWork,
	"enqueued_for_orchestration":          styleAtWork,
	"enqueued_as_error_for_orchestration": styleWaiting,
	"waiting_for_retry":                   styleWaiting,
	"complete":                            styleDone,
	"error":                               styleFailed,
	"cancelled":                           styleGone,
	"resolved_manually":                   styleByHand,
	"skipped":                             styleGone,
	"on demand":                           styleGone,

	"initializing":             styleAtWork,
	"enqueuing_steps":          styleAtWork,
	"steps_in_process":         styleAtWork,
	"evaluating_results":       styleAtWork,
	"waiting_for_dependencies": styleWaiting,
	"blocked_by_failures":      styleFailed,
}
