package console

import (
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how is it, at a glance?

type overview struct {
	Ready  bool   // it has been looked at; otherwise it is being counted
	Err    string // of the latest look
	Sums   glance.Sums
	Oldest time.Time
	Change glance.Change

	Letters int64
	Paused  []string            // at most shownQueues
	Others  int                 // that are paused as well
	Rows    []pgwake.QueueDepth // those that have waited longest, at most shownQueues
	Hidden  int                 // so many others

	Arrivals, Leavings, Backlog spark

	Latency      pgwake.Histogram
	P50, P99     time.Duration
	Bars         []bar
	BarsWidth    float64
	Reasons      []bar
	Nodes        []nodeRow
	Live         int
	Troubled     int
	Asked        bool // the nodes were
	Unannounced  int64
	NodesProblem string
}

const shownQueues = 8

// moment is what the page is to show: on a stream what was just taken, and else what can be had at once.
func (v *view) moment() *moment {
	if v.Live {
		return v.c.hub.latest()
	}
	return v.c.hub.moment(v.r.Context())
}

func loadOverview(v *view) (any, error) {
	m := v.moment()
	if m == nil {
		return &overview{}, nil
	}
	o := &overview{Ready: !m.At.IsZero(), Sums: glance.SumsOf(m.Depths), Oldest: m.Oldest, Change: m.Change, Letters: m.Letters,
		Paused: m.Paused, Arrivals: sparkOf(m.Arrivals), Leavings: sparkOf(m.Leavings), Backlog: sparkOf(m.Backlog), Asked: m.Asked}
	if m.Err != nil {
		o.Err = glance.Short(m.Err.Error(), 300)
	}
	if m.Unanswered != nil {
		o.NodesProblem = glance.Short(m.Unanswered.Error(), 300)
	}
	o.Latency = m.Latency()
	o.P50, o.P99 = o.Latency.Quantile(0.5), o.Latency.Quantile(0.99)
	o.Bars, o.BarsWidth = latencyBars(o.Latency)
	o.Reasons = reasonBars(m.Reasons(), m.Change.Found)
	o.Nodes = nodeRows(m)
	for _, n := range o.Nodes {
		if n.State == "live" {
			o.Live++
		} else {
			o.Troubled++
		}
	}
	for _, r := range m.Reports {
		o.Unannounced += r.Stats.Worker.FallbackFinds + r.Stats.Orchestrator.FallbackFinds
	}
	if len(o.Paused) > shownQueues {
		o.Paused, o.Others = o.Paused[:shownQueues], len(o.Paused)-shownQueues
	}
	o.Rows = longest(m.Depths)
	if len(o.Rows) > shownQueues {
		o.Rows, o.Hidden = o.Rows[:shownQueues], len(o.Rows)-shownQueues
	}
	return o, nil
}
