package console

import (
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: who is there, and how is he?

type nodes struct {
	Ready   bool
	Err     string
	Rows    []nodeRow
	Hidden  int
	Present int // all of them
}

type nodeRow struct {
	pgwake.NodeInfo
	Said     bool // it has answered
	Report   pgwake.NodeReport
	State    string // live, polling, no answer, died or in trouble
	Problems []string
	Parked   int
	Items    int64
	Looks    int64
	P50, P99 time.Duration
}

func loadNodes(v *view) (any, error) {
	m := v.moment()
	if m == nil {
		return &nodes{}, nil
	}
	n := &nodes{Ready: m.Asked || m.Unanswered != nil, Rows: nodeRows(m), Present: len(m.Nodes)}
	if m.Unanswered != nil {
		n.Err = glance.Short(m.Unanswered.Error(), 300)
	}
	if len(n.Rows) > maxRows {
		n.Rows, n.Hidden = n.Rows[:maxRows], len(n.Rows)-maxRows
	}
	return n, nil
}

func nodeRows(m *moment) (all []nodeRow) {
	for _, n := range m.Nodes {
		row := nodeRow{NodeInfo: n, State: "no answer"}
		if row.Report, row.Said = m.Reports[n.Key]; row.Said {
			w, o := &row.Report.Stats.Worker, &row.Report.Stats.Orchestrator
			row.Parked, row.Items, row.Looks = w.Parked+o.Parked, w.Items+o.Items, w.Looks+w.Polls+o.Looks+o.Polls
			latency := w.WakeLatency
			for i, count := range o.WakeLatency {
				latency[i] += count
			}
			row.P50, row.P99 = latency.Quantile(0.5), latency.Quantile(0.99)
			for _, p := range row.Report.Problems {
				row.Problems = append(row.Problems, glance.Short(p.String(), 300))
			}
			switch state := glance.NodeState(row.Report); {
			case len(row.Problems) > 0:
				row.State = "in trouble"
			case state == "ok":
				row.State = "live"
			default:
				row.State = state
			}
		}
		if !n.Listening {
			row.State = "died"
		}
		all = append(all, row)
	}
	return all
}
