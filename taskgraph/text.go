package taskgraph

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// This file answers: how does a task look in a terminal?

// TextOptions says how View.Text looks. The zero value means the defaults, and so does nil.
type TextOptions struct {
	// Color adds the escape sequences of terminals for colours. Defaults to false.
	Color bool
}

// Text returns the view as a table for a terminal, or a log: steps by level, which is the length of the longest way to them, and
// then in the order of the View.
func (v *View) Text(options *TextOptions) string {
	t := textView{View: v, color: options != nil && options.Color}
	t.head()
	t.steps()
	return t.b.String()
}

// mostParents is how many are named of those that a step waits for.
const mostParents = 10

type textView struct {
	*View
	color bool
	b     strings.Builder
}

func (t *textView) head() {
	t.b.WriteString(t.title())
	if t.State != "" {
		t.b.WriteString(": " + t.colored(t.State, visible(t.State)))
	}
	if t.TaskID != "" {
		t.b.WriteString("\ntask " + visible(t.TaskID))
	}
	done := 0
	for i := range t.Steps {
		if s := t.Steps[i].State; s == "complete" || s == "resolved_manually" {
			done++
		}
	}
	if t.State != "" {
		fmt.Fprintf(&t.b, "\n%d of %d steps complete", done, len(t.Steps))
	}
	t.b.WriteByte('\n')
}

// colored returns text in the colour of the state.
func (t *textView) colored(state, text string) string {
	const reset = "\x1b[0m"
	if style := stateStyles[state]; t.color && style.ansi != "" {
		return style.ansi + text + reset
	}
	return text
}

// columns are what is in front of the name of a step. Only what is in ASCII is, so that they are aligned whatever the width of
// a name.
var columns = [...]string{"level", "state", "attempts", "time"}

func (t *textView) steps() {
	if len(t.Steps) == 0 {
		return
	}
	levels, never := t.levels()
	order := make([]int, len(t.Steps))
	cells := make([][len(columns)]string, len(t.Steps))
	var widths [len(columns)]int
	for i := range t.Steps {
		order[i] = i
		s := &t.Steps[i]
		level := strconv.Itoa(levels[i])
		if levels[i] == never {
			level = "-"
		}
		cells[i] = [...]string{level, visible(s.state()), s.attempts(), s.duration()}
		for c, cell := range cells[i] {
			if cell != "" {
				widths[c] = max(widths[c], len(cell), len(columns[c]))
			}
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return levels[a] - levels[b] })
	pad := func(c int, cell, shown string) {
		if widths[c] > 0 { // else no step has it
			t.b.WriteString(shown + strings.Repeat(" ", widths[c]-len(cell)+2))
		}
	}
	t.b.WriteByte('\n')
	for c, name := range columns {
		pad(c, name, name)
	}
	t.b.WriteString("step\n")
	for _, i := range order {
		s := &t.Steps[i]
		for c, cell := range cells[i] {
			shown := cell
			if columns[c] == "state" {
				shown = t.colored(s.state(), cell)
			}
			pad(c, cell, shown)
		}
		t.b.WriteString(textName(s.Name) + textParents(s.After) + "\n")
		if problem := s.errorLine(); problem != "" {
			for c := range columns {
				pad(c, "", "")
			}
			t.b.WriteString("  " + t.colored("error", problem) + "\n")
		}
	}
}

// levels are those of the steps; one that is higher than all others is that of templates, and of what is in a cycle.
func (t *textView) levels() (levels []int, never int) {
	parents := make([][]int, len(t.Steps))
	for _, e := range t.edges() {
		parents[e.child] = append(parents[e.child], e.parent)
	}
	k := newKahn(parents)
	never = slices.Max(k.levels) + 1
	for i := range t.Steps {
		if !k.taken[i] || t.Steps[i].OnDemand {
			k.levels[i] = never
		}
	}
	return k.levels, never
}

func textParents(after []Dependency) string {
	if len(after) == 0 {
		return ""
	}
	var names []string
	for _, d := range after[:min(len(after), mostParents)] {
		name := textName(d.Step)
		if d.If != "" {
			name += " if " + visible(d.If)
		}
		names = append(names, name)
	}
	if more := len(after) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "  <- " + strings.Join(names, ", ")
}

// textName returns a name, in quotes if it could be taken for more than one.
func textName(name string) string {
	odd := func(r rune) bool {
		return !unicode.In(r, unicode.L, unicode.M, unicode.Nd) && !strings.ContainsRune("_-./:@#", r)
	}
	if name == "" || strings.ContainsFunc(name, odd) {
		name = strconv.Quote(name)
	}
	return leftToRight(name)
}
