package console

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what do the small charts show? Each has its numbers in words beside it.

// spark is a line of values, the highest of which fills its height.
type spark struct {
	Width, Height int
	Line, Area    string // points of SVG
	Most          float64
}

func sparkOf(values []float64) spark {
	s := spark{Width: 160, Height: 32}
	for _, v := range values {
		s.Most = max(s.Most, v)
	}
	if len(values) < 2 {
		return s
	}
	var b strings.Builder
	step := float64(s.Width) / float64(max(len(values), past/3)-1) // it fills its width early, and then becomes finer
	x := float64(s.Width) - step*float64(len(values)-1)
	first := x
	for _, v := range values {
		y := float64(s.Height) - 1
		if s.Most > 0 {
			y -= v / s.Most * float64(s.Height-3)
		}
		fmt.Fprintf(&b, "%.1f,%.1f ", x, y)
		x += step
	}
	s.Line = strings.TrimSpace(b.String())
	s.Area = fmt.Sprintf("%.1f,%d %s %d,%d", first, s.Height, s.Line, s.Width, s.Height)
	return s
}

// bar is one of a chart of bars.
type bar struct {
	Label     string
	Count     int64
	Now       int64
	X, Y      float64
	Width     float64
	Height    float64
	LabelX    float64
	Marked    bool // has a label below
	Highlight bool
}

// Sizes of the chart of latencies, in units of its own.
const (
	barWidth, barGap = 22.0, 4.0
	barsHeight       = 110.0
)

// latencyBars are the buckets of a histogram, without those at both ends that have nothing.
func latencyBars(h pgwake.Histogram) (bars []bar, width float64) {
	first, last := len(h), -1
	var most int64
	for i, n := range h {
		if n > 0 {
			first, last, most = min(first, i), i, max(most, n)
		}
	}
	if last < 0 {
		return nil, 0
	}
	first, last = max(0, min(first, 4)), min(len(h)-1, max(last, 14)) // at least from 16 µs to 16 ms, so that charts look alike
	for i := first; i <= last; i++ {
		b := bar{Label: glance.Span(time.Duration(1<<i) * time.Microsecond), Count: h[i], X: float64(i-first) * (barWidth + barGap), Width: barWidth, Marked: i%2 == 0}
		b.Height = barsHeight * float64(h[i]) / float64(most)
		if h[i] > 0 {
			b.Height = max(b.Height, 2)
		}
		b.Y, b.LabelX = barsHeight-b.Height, b.X+b.Width/2
		bars = append(bars, b)
	}
	return bars, float64(len(bars))*(barWidth+barGap) - barGap
}

// reasonBars are what woke dispatchers that then found work, those first that did so most.
func reasonBars(all, now map[string]int64) (bars []bar) {
	var most int64
	for _, n := range all {
		most = max(most, n)
	}
	for _, reason := range glance.ByCount(all) {
		if all[reason] > 0 {
			bars = append(bars, bar{Label: reason, Count: all[reason], Now: now[reason], Width: max(1, 100*float64(all[reason])/float64(most))})
		}
	}
	return bars
}

// reasons says what the wake reasons mean.
var reasons = map[string]string{
	"notify":    "a notification of the database",
	"timer":     "something came due",
	"chain":     "another dispatcher found that there is more",
	"local":     "this process enqueued it, or freed it",
	"fetch":     "a dispatcher that came from its handler looked",
	"reconnect": "the connection came back",
	"fallback":  "the safety net: nothing had announced it",
	"scout":     "a poll",
	"settle":    "the second look before waiting",
}
