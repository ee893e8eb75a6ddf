package console

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/pgwake/pgwake/internal/glance"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: where on a picture is each step of a task, and what leads to it? From left to right, each step one column after the
// last one that it waits for.

const (
	maxDrawn  = 300 // steps; of a task that has more there is the table
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
	Shown    string // its state, as people say it
	Took     time.Duration
	Error    string
	Brief    string // of its results
	Waits    []string
	layer, y int
	row      float64
}

// drawn lays steps out; nil if there are none, or too many.
func drawn(steps []step) *graph {
	if len(steps) == 0 || len(steps) > maxDrawn {
		return nil
	}
	place := make(map[string]int, len(steps))
	for i := range steps {
		place[steps[i].Name] = i
	}
	layers := layered(steps, place)
	g := &graph{Width: 2*margin + len(layers)*(boxWidth+gapX) - gapX}
	tallest := 0
	for _, layer := range layers {
		tallest = max(tallest, len(layer))
	}
	g.Height = 2*margin + tallest*(boxHeight+gapY) - gapY
	for _, layer := range layers {
		top := margin + (tallest-len(layer))*(boxHeight+gapY)/2
		for n, i := range layer {
			steps[i].y = top + n*(boxHeight+gapY)
		}
	}
	for i := range steps {
		g.Boxes = append(g.Boxes, boxOf(&steps[i]))
		for n, parent := range steps[i].Parents {
			if p, ok := place[parent]; ok {
				condition := ""
				if n < len(steps[i].Conditions) {
					condition = steps[i].Conditions[n]
				}
				g.Edges = append(g.Edges, edgeOf(&steps[p], &steps[i], condition))
			}
		}
	}
	return g
}

// layered puts each step into the column after the last one that it waits for, and orders columns so that lines cross little.
func layered(steps []step, place map[string]int) (layers [][]int) {
	var depth func(i, left int) int
	known := make([]int, len(steps))
	depth = func(i, left int) int {
		if known[i] > 0 || left == 0 {
			return known[i]
		}
		known[i] = 1 // also what ends a circle, which there should not be
		deepest := 0
		for _, parent := range steps[i].Parents {
			if p, ok := place[parent]; ok {
				deepest = max(deepest, depth(p, left-1))
			}
		}
		known[i] = deepest + 1
		return known[i]
	}
	for i := range steps {
		steps[i].layer = depth(i, len(steps)) - 1
		for len(layers) <= steps[i].layer {
			layers = append(layers, nil)
		}
		layers[steps[i].layer] = append(layers[steps[i].layer], i)
	}
	for _, layer := range layers {
		for n, i := range layer {
			sum, count := 0.0, 0
			for _, parent := range steps[i].Parents {
				if p, ok := place[parent]; ok {
					sum += steps[p].row
					count++
				}
			}
			steps[i].row = float64(n)
			if count > 0 {
				steps[i].row = sum / float64(count)
			}
		}
		slices.SortStableFunc(layer, func(a, b int) int { return cmp.Compare(steps[a].row, steps[b].row) })
		for n, i := range layer {
			steps[i].row = float64(n) - float64(len(layer)-1)/2
		}
	}
	return layers
}

func (s *step) x() int { return margin + s.layer*(boxWidth+gapX) }

func boxOf(s *step) box {
	t := tone(s.Shown)
	b := box{X: s.x(), Y: s.y, Name: glance.Short(s.Name, 24), State: s.Shown, Tone: t, Glyph: glyph(t), How: glance.Short(s.Shown, 20)}
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

func edgeOf(from, to *step, condition string) edge {
	x1, y1, x2, y2 := from.x()+boxWidth, from.y+boxHeight/2, to.x(), to.y+boxHeight/2
	bend := (x2 - x1) / 2
	e := edge{Path: fmt.Sprintf("M%d,%d C%d,%d %d,%d %d,%d", x1, y1, x1+bend, y1, x2-bend, y2, x2-5, y2),
		Arrow: fmt.Sprintf("%d,%d %d,%d %d,%d", x2-7, y2-4, x2-7, y2+4, x2, y2), If: condition}
	e.Title = glance.Short(from.Name, 60) + " before " + glance.Short(to.Name, 60)
	if condition != "" {
		e.Title += " if " + glance.Short(condition, 100)
	}
	return e
}
