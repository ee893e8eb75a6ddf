package main

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/bench/workflows"
)

// This file answers: what do the results say of workflows that a runtime carries out?

const (
	mostHop        = 6 * time.Millisecond
	flowsFaster    = 20
	mostPerMinute  = 2.0
	pollingBackend = "its own backend, which polls"
)

func flowRatio(w *workflows.Result) float64 { return w.Ours.Sequential() / w.Theirs.Sequential() }

// workflowMetrics are figures by name.
func (r *results) workflowMetrics(put func(string, []float64)) {
	put("workflow_hop_p50_ms", each(r.Workflows, func(w *workflows.Result) float64 { return inMillis(w.Ours.Hops.Summary().P50) }))
	put("workflow_rate_ratio", each(r.Workflows, flowRatio))
	put("workflow_idle_statements_per_min", each(r.Workflows, func(w *workflows.Result) float64 { return w.Ours.PerMinute() }))
}

func (r *results) workflowRows() (rows []row) {
	for _, w := range r.Workflows {
		hops := func(s *workflows.Subject) func(int) measure.Summary {
			return func(int) measure.Summary { return s.Hops.Summary() }
		}
		const base = " (" + pollingBackend + ")"
		rows = append(rows,
			r.compare(fmt.Sprintf("go-workflows, workflow of %d activities one after the other: hop, p50", w.Activities), 1, p50(hops(w.Ours)), p50(hops(w.Theirs)), base, under(mostHop)),
			r.compare("  p99", 1, p99(hops(w.Ours)), p99(hops(w.Theirs)), base, noGoal),
			rate("  such workflows, one after the other", "workflows/min", []float64{60 * w.Ours.Sequential()}, []float64{60 * w.Theirs.Sequential()}, pollingBackend, flowsFaster))
		for i, ours := range w.Ours.Rates {
			rows = append(rows, rate(fmt.Sprintf("  backlog of workflows of one activity, workers: %d", ours.Workers), "workflows/s",
				[]float64{ours.PerSecond()}, []float64{w.Theirs.Rates[i].PerSecond()}, pollingBackend, 0))
		}
		// When the periodic statement falls is chance: so one is within the goal, however short the while.
		rows = append(rows, row{measure: "  idle worker, statements per minute", figure: fmt.Sprintf("%.1f", w.Ours.PerMinute()),
			baseline: fmt.Sprintf("%.0f (%s)", w.Theirs.PerMinute(), pollingBackend), goal: fmt.Sprintf("<= %.0f", mostPerMinute),
			met: w.Ours.PerMinute() <= mostPerMinute || w.Ours.Idle <= 1})
	}
	return rows
}
