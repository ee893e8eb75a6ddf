package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: where on a picture is each step of a task, and what leads to it? From left to right, each step one column after the
// last one that it waits for.

const (
	maxDrawn  = 300  // steps; of a task that has more there is the table
	maxPassed = 3000 // columns, by all lines together; likewise
	boxWidth  = 176
	boxHeight = 44
	gapX      = 64
	gapY      = 16
	margin    = 14
)

// graph is a picture of a task.
type graph struct {
	Width, Height int
	Boxes         []box
	Edges         []edge
}

type box struct {
	X, Y        int
	Name, State string
	Tone, Glyph string
	How         string // state, attempts and duration
	Title       string
}

type edge struct {
	Path  string
	Arrow string // points of the head
	If    string // condition; "": none
	Title string
}

// step is what is drawn, and is a row of the table.
type step struct {
	taskgraph.StepInfo
	Shown string // its state, as people say it
	Took  time.Duration
	Error string
	Brief string // of its results
}

// spot is what has a place in a column: a step, or where a line passes by that leads further.
type spot struct {
	step   int // -1: a line
	before []*spot
	order  float64
	x, y   int // of its middle on the left
}

func (s *spot) height() int {
	if s.step < 0 {
		return gapY
	}
	return boxHeight
}

func (s *spot) right() int {
	if s.step < 0 {
		return s.x
	}
	return s.x + boxWidth
}

// drawn lays steps out; nil if there are none, or too many, or too many that wait for too many.
func drawn(steps []step) *graph {
	if len(steps) == 0 || len(steps) > maxDrawn {
		return nil
	}
	place := make(map[string]int, len(steps))
	for i := range steps {
		place[steps[i].Name] = i
	}
	depths := depthsOf(steps, place)
	if passedBy(steps, place, depths) > maxPassed {
		return nil
	}
	columns, lines := arranged(steps, place, depths)
	g := &graph{Width: 2*margin + len(columns)*(boxWidth+gapX) - gapX}
	tall := make([]int, len(columns))
	for n, column := range columns {
		for _, s := range column {
			tall[n] += s.height() + gapY
		}
		g.Height = max(g.Height, tall[n]-gapY+2*margin)
	}
	for n, column := range columns {
		y := (g.Height - tall[n] + gapY) / 2
		for _, s := range column {
			s.x, s.y = margin+n*(boxWidth+gapX), y+s.height()/2
			if s.step < 0 {
				s.x += boxWidth / 2
			}
			y += s.height() + gapY
		}
	}
	for _, column := range columns {
		for _, s := range column {
			if s.step >= 0 {
				g.Boxes = append(g.Boxes, boxOf(&steps[s.step], s))
			}
		}
	}
	for _, l := range lines {
		g.Edges = append(g.Edges, l.drawn(steps))
	}
	return g
}

// line is a dependency, by way of the spots that it passes.
type line struct {
	spots []*spot
	If    string
}

// arranged puts each step into the column after the last one that it waits for, and orders columns so that lines cross little, and none runs
// through a step.
func arranged(steps []step, place map[string]int, depths []int) (columns [][]*spot, lines []line) {
	spots := make([]*spot, len(steps))
	put := func(column int, s *spot) {
		for len(columns) <= column {
			columns = append(columns, nil)
		}
		columns[column] = append(columns[column], s)
	}
	for i := range steps {
		spots[i] = &spot{step: i}
		put(depths[i], spots[i])
	}
	for i := range steps {
		for n, parent := range steps[i].Parents {
			p, known := place[parent]
			if !known {
				continue
			}
			l := line{spots: []*spot{spots[p]}}
			if n < len(steps[i].Conditions) {
				l.If = steps[i].Conditions[n]
			}
			for column := depths[p] + 1; column < depths[i]; column++ {
				passing := &spot{step: -1, before: []*spot{l.spots[len(l.spots)-1]}}
				put(column, passing)
				l.spots = append(l.spots, passing)
			}
			spots[i].before = append(spots[i].before, l.spots[len(l.spots)-1])
			l.spots = append(l.spots, spots[i])
			lines = append(lines, l)
		}
	}
	for _, column := range columns {
		for n, s := range column {
			sum := 0.0
			for _, b := range s.before {
				sum += b.order
			}
			if s.order = float64(n) - float64(len(column)-1)/2; len(s.before) > 0 {
				s.order = sum / float64(len(s.before))
			}
		}
		slices.SortStableFunc(column, func(a, b *spot) int { return cmp.Compare(a.order, b.order) })
		for n, s := range column {
			s.order = float64(n) - float64(len(column)-1)/2
		}
	}
	return columns, lines
}

// passedBy is how many columns lines lead to or through, of all lines together.
func passedBy(steps []step, place map[string]int, depths []int) (n int) {
	for i := range steps {
		for _, parent := range steps[i].Parents {
			if p, known := place[parent]; known {
				n += max(1, depths[i]-depths[p])
			}
		}
	}
	return n
}

// depthsOf are the columns of steps.
func depthsOf(steps []step, place map[string]int) []int {
	depths := make([]int, len(steps))
	seen := make([]bool, len(steps))
	var depth func(i int) int
	depth = func(i int) int {
		if seen[i] {
			return depths[i]
		}
		seen[i] = true // also what ends a circle, which there should not be
		for _, parent := range steps[i].Parents {
			if p, ok := place[parent]; ok {
				depths[i] = max(depths[i], depth(p)+1)
			}
		}
		return depths[i]
	}
	for i := range steps {
		depth(i)
	}
	return depths
}

func boxOf(s *step, at *spot) box {
	t := tone(s.Shown)
	b := box{X: at.x, Y: at.y - boxHeight/2, Name: glance.Short(s.Name, 24), State: s.Shown, Tone: t, Glyph: glyph(t), How: glance.Short(s.Shown, 20)}
	if s.Shown == "enqueued for orchestration" || s.Shown == "enqueued as error for orchestration" {
		b.How = "returned"
	}
	if s.Attempts > 1 || s.State == taskgraph.StepError {
		b.How += fmt.Sprintf(" · %d/%d", s.Attempts, max(1, s.MaxAttempts))
	}
	if s.Took > 0 {
		b.How += " · " + glance.Span(s.Took)
	}
	b.Title = glance.Short(s.Name, 200) + ": " + s.Shown
	if s.Error != "" {
		b.Title += ": " + glance.Short(s.Error, 200)
	}
	return b
}

func (l *line) drawn(steps []step) edge {
	first, last := l.spots[0], l.spots[len(l.spots)-1]
	var b strings.Builder
	fmt.Fprintf(&b, "M%d,%d", first.right(), first.y)
	for n, to := range l.spots[1:] {
		from := l.spots[n]
		x := to.x
		if to == last {
			x -= 5 // the arrow covers it
		}
		bend := (x - from.right()) / 2
		fmt.Fprintf(&b, " C%d,%d %d,%d %d,%d", from.right()+bend, from.y, x-bend, to.y, x, to.y)
	}
	e := edge{Path: b.String(), Arrow: fmt.Sprintf("%d,%d %d,%d %d,%d", last.x-7, last.y-4, last.x-7, last.y+4, last.x, last.y), If: l.If}
	e.Title = glance.Short(steps[first.step].Name, 60) + " before " + glance.Short(steps[last.step].Name, 60)
	if l.If != "" {
		e.Title += " if " + glance.Short(l.If, 100)
	}
	return e
}
