package main

import (
	"fmt"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what do the results say of namespaces that have a coordinator each?

// namespaceFigure is one of each round.
type namespaceFigure = func(*measure.NamespacesResult) float64

// Of namespaces, for the table and for the figures by name.
var (
	chainRatio namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return n.Chain.PerSecond() / n.PolledChain.PerSecond()
	}
	fewerPolls namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return 1 - (n.Served.ByClockPerSecond()+n.Retired.ByClockPerSecond())/2/max(n.Polled.ByClockPerSecond(), 1e-9)
	}
	fewerIdle namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return 1 - n.Many.PerSecond()/n.Many.PolledPerSecond()
	}
	fewerBusy namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return 1 - n.Many.BusyPerSecond()/n.Many.PolledPerSecond()
	}
	lostItems namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return float64(n.Restarts.Lost + n.Restarts.Left)
	}
	idleBytes namespaceFigure = func(n *measure.NamespacesResult) float64 {
		return float64(max(n.Many.Bytes, n.Many.BytesAfter))
	}
)

// linear is the rate of the i-th number of namespaces over that of the first as many times.
func linear(i int) namespaceFigure {
	return func(n *measure.NamespacesResult) float64 {
		first, of := n.Scale.Rates[0], n.Scale.Rates[i]
		return of.PerSecond() / first.PerSecond() * float64(first.Namespaces) / float64(of.Namespaces)
	}
}

const (
	linearFor   = 8   // namespaces, for which there is a goal
	leastLinear = 0.9 // of as many times what one gets done

	fewerGoal    = 0.99
	mostToCreate = 100 * time.Millisecond
	mostIdle     = 20 << 10 // bytes of a namespace that has nothing to do
	chainFaster  = 10
)

func (r *results) namespaceMetrics(put func(string, []float64)) {
	of := func(name string, f namespaceFigure) { put(name, each(r.Namespaces, f)) }
	of("namespace_claim_p50_ms", func(n *measure.NamespacesResult) float64 { return inMillis(n.Served.FromCommit.Summary().P50) })
	of("namespace_claim_p99_ms", func(n *measure.NamespacesResult) float64 { return inMillis(n.Served.FromCommit.Summary().P99) })
	of("namespace_chain_ratio", chainRatio)
	of("namespace_polls_fewer", fewerPolls)
	of("namespace_idle_fewer", fewerIdle)
	of("namespace_busy_fewer", fewerBusy)
	of("namespace_lost", lostItems)
	of("namespace_idle_bytes", idleBytes)
	if len(r.Namespaces) > 0 {
		for i, rate := range r.Namespaces[0].Scale.Rates {
			of(fmt.Sprintf("namespace_linear_%d", rate.Namespaces), linear(i))
		}
	}
}

func (r *results) namespaceRows() (rows []row) {
	if len(r.Namespaces) == 0 {
		return nil
	}
	rows = append(rows, r.namespaceSingleRows()...)
	rows = append(rows, r.namespaceRateRows()...)
	rows = append(rows, r.namespaceRestartRows()...)
	rows = append(rows, r.namespaceScaleRows()...)
	return append(rows, r.manyNamespacesRows()...)
}

// namespaceMedian is over the rounds.
func (r *results) namespaceMedian(f namespaceFigure) float64 {
	return measure.Median(each(r.Namespaces, f))
}

func (r *results) namespaceSingleRows() (rows []row) {
	n, first := len(r.Namespaces), r.Namespaces[0]
	commit := func(of func(*measure.NamespacesResult) *measure.NamespaceSingles) func(int) measure.Summary {
		return func(i int) measure.Summary { return of(r.Namespaces[i]).FromCommit.Summary() }
	}
	served := commit(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Served })
	retired := commit(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Retired })
	created := func(i int) measure.Summary { return r.Namespaces[i].Created.FromCommit.Summary() }
	polled := commit(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Polled })
	loops := fmt.Sprintf("polling each %v", first.Interval)
	var baseP50, baseP99 perRound // nil: that scenario was not run
	if len(r.Baseline) == n {
		baseP50, baseP99 = r.tripAndClaim(p50), r.tripAndClaim(p99)
	}
	perItem := func(of func(*measure.NamespacesResult) *measure.NamespaceSingles) namespaceFigure {
		return func(n *measure.NamespacesResult) float64 {
			return float64(of(n).Looks) / float64(len(of(n).FromCommit))
		}
	}
	byClock := func(of func(*measure.NamespacesResult) *measure.NamespaceSingles) float64 {
		return r.namespaceMedian(func(n *measure.NamespacesResult) float64 { return float64(of(n).ByClock) })
	}
	fewer := r.namespaceMedian(fewerPolls)
	return append(rows,
		r.compare(fmt.Sprintf("single item in one of %d idle namespaces, commit to handler, p50", first.Namespaces), n, p50(served), baseP50, tripAndClaim, under(2*time.Millisecond)),
		r.compare("  p99", n, p99(served), baseP99, tripAndClaim, under(5*time.Millisecond)),
		r.compare("  max", n, longest(served), nil, "", noGoal),
		r.compare("  where the last Dispatcher had ended, p50", n, p50(retired), baseP50, tripAndClaim, under(2*time.Millisecond)),
		r.compare("  p99", n, p99(retired), baseP99, tripAndClaim, under(5*time.Millisecond)),
		r.compare("  where it is the first, and creates its namespace, p50", n, p50(created), baseP50, tripAndClaim, noGoal),
		r.compare("  until it is handled, max", n, longest(created), nil, "", under(mostToCreate)),
		r.compare("  over "+loops+", p50", n, p50(served), p50(polled), " ("+loops+")", noGoal),
		row{
			measure:  fmt.Sprintf("  statements for which time alone was the reason, in %v", first.Served.Took.Round(time.Second)),
			figure:   fmt.Sprintf("%.0f, %.0f (ended)", byClock(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Served }), byClock(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Retired })),
			baseline: fmt.Sprintf("%.0f (%s)", byClock(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Polled }), loops),
			ratio:    fmt.Sprintf("%.1f%% fewer", 100*fewer), goal: ">= 99% fewer", met: fewer >= fewerGoal,
		},
		row{
			measure:  "  queries for work per item, whatever the reason",
			figure:   fmt.Sprintf("%.2f", r.namespaceMedian(perItem(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Served }))),
			baseline: fmt.Sprintf("%.2f (%s)", r.namespaceMedian(perItem(func(n *measure.NamespacesResult) *measure.NamespaceSingles { return n.Polled })), loops),
		})
}

func (r *results) namespaceRateRows() []row {
	first := r.Namespaces[0]
	rates := func(of func(*measure.NamespacesResult) *measure.NamespaceRate) []float64 {
		return each(r.Namespaces, func(n *measure.NamespacesResult) float64 { return of(n).PerSecond() })
	}
	steps := rates(func(n *measure.NamespacesResult) *measure.NamespaceRate { return n.Chain })
	tasks := each(r.Namespaces, func(n *measure.NamespacesResult) float64 { return n.Chain.PerSecond() / float64(n.Steps) })
	return []row{
		rate(fmt.Sprintf("%d tasks at a time of %d steps, each of which enqueues the next, one coordinator", first.Tasks, first.Steps), "steps/s", steps,
			rates(func(n *measure.NamespacesResult) *measure.NamespaceRate { return n.PolledChain }), fmt.Sprintf("polling each %v", first.Interval), chainFaster),
		{measure: "  tasks/s", figure: fmt.Sprintf("%.0f", measure.Median(tasks))},
		rate(fmt.Sprintf("flood of %d, one coordinator", first.Flood.Items), "items/s",
			rates(func(n *measure.NamespacesResult) *measure.NamespaceRate { return n.Flood }),
			rates(func(n *measure.NamespacesResult) *measure.NamespaceRate { return n.PolledFlood }),
			fmt.Sprintf("polling again while there is work, %d a poll", first.Batch), 0),
	}
}

func (r *results) namespaceRestartRows() []row {
	first := r.Namespaces[0].Restarts
	samples := func(of func(*measure.NamespaceRestarts) measure.Samples) func(int) measure.Summary {
		return func(i int) measure.Summary { return of(r.Namespaces[i].Restarts).Summary() }
	}
	calm := samples(func(n *measure.NamespaceRestarts) measure.Samples { return n.Calm })
	shaken := samples(func(n *measure.NamespaceRestarts) measure.Samples { return n.Shaken })
	sum := func(of func(*measure.NamespaceRestarts) int) (n int) {
		for _, round := range r.Namespaces {
			n += of(round.Restarts)
		}
		return n
	}
	lost := sum(func(n *measure.NamespaceRestarts) int { return n.Lost + n.Left })
	again := sum(func(n *measure.NamespaceRestarts) int { return n.Again })
	twice := sum(func(n *measure.NamespaceRestarts) int { return n.Twice })
	n := len(r.Namespaces)
	return []row{
		r.compare(fmt.Sprintf("coordinators restarted under load (%d of single namespaces, %d times all), commit to handler, p50", first.Retired, first.Runs),
			n, p50(shaken), p50(calm), " (no restart)", noGoal),
		r.compare("  the longest", n, longest(shaken), longest(calm), " (no restart)", noGoal),
		{measure: fmt.Sprintf("  of %d items, lost", n*first.Items), figure: fmt.Sprint(lost), goal: "0", met: lost == 0},
		{measure: "  handled again, acknowledged twice", figure: fmt.Sprintf("%d, %d", again, twice), goal: "-, 0", met: twice == 0},
	}
}

func (r *results) namespaceScaleRows() (rows []row) {
	first := r.Namespaces[0].Scale
	per := func(i int) []float64 {
		return each(r.Namespaces, func(n *measure.NamespacesResult) float64 { return n.Scale.Rates[i].PerSecond() })
	}
	one := measure.Median(per(0)) / float64(first.Rates[0].Namespaces)
	for i, of := range first.Rates {
		name := fmt.Sprintf("  %d namespaces", of.Namespaces)
		if i == 0 {
			name = fmt.Sprintf("namespaces with %d handlers of %v each, %d: items/s", first.Places, first.Handler, of.Namespaces)
		}
		w := row{measure: name, figure: fmt.Sprintf("%.0f", measure.Median(per(i)))}
		if i > 0 {
			ratio := r.namespaceMedian(linear(i))
			w.baseline = fmt.Sprintf("%.0f (%d times one)", one*float64(of.Namespaces), of.Namespaces)
			w.ratio = fmt.Sprintf("%.2fx", ratio)
			if of.Namespaces <= linearFor {
				w.goal, w.met = fmt.Sprintf(">= %gx", leastLinear), ratio >= leastLinear
			}
		}
		rows = append(rows, w)
	}
	last := len(first.Rates) - 1
	return append(rows, rate(fmt.Sprintf("  %d, over one with as many handlers in all", first.Rates[last].Namespaces), "items/s", per(last),
		each(r.Namespaces, func(n *measure.NamespacesResult) float64 { return n.Scale.Single.PerSecond() }),
		"one namespace", 0))
}

func (r *results) manyNamespacesRows() []row {
	first := r.Namespaces[0].Many
	per := func(f func(*measure.ManyNamespaces) float64) float64 {
		return r.namespaceMedian(func(n *measure.NamespacesResult) float64 { return f(n.Many) })
	}
	listening := per(func(m *measure.ManyNamespaces) float64 { return float64(m.Listening) })
	connections := per(func(m *measure.ManyNamespaces) float64 { return float64(m.Connections) })
	statements := per(func(m *measure.ManyNamespaces) float64 { return float64(m.Statements) })
	ofOne := per(func(m *measure.ManyNamespaces) float64 { return float64(m.OfOne) })
	fewer, busyFewer := r.namespaceMedian(fewerIdle), r.namespaceMedian(fewerBusy)
	kib := func(bytes float64) string { return fmt.Sprintf("%.1f KiB", bytes/(1<<10)) }
	return []row{
		{
			measure: fmt.Sprintf("%d idle namespaces on one node: LISTEN connections, connections", first.Namespaces),
			figure:  fmt.Sprintf("%.0f, %.0f", listening, connections), goal: "1, -", met: listening == 1,
		},
		{
			measure:  fmt.Sprintf("  statements in %v", first.Duration.Round(100*time.Millisecond)),
			figure:   fmt.Sprintf("%.0f", statements),
			baseline: fmt.Sprintf("%.0f (1 namespace)", ofOne), goal: "as 1", met: statements <= ofOne+1, // that of the fallback may be in the one time and not in the other
		},
		{
			measure:  "  statements/s",
			figure:   fmt.Sprintf("%.2f", per((*measure.ManyNamespaces).PerSecond)),
			baseline: fmt.Sprintf("%.0f (polling each %v)", per((*measure.ManyNamespaces).PolledPerSecond), r.Namespaces[0].Interval),
			ratio:    fmt.Sprintf("%.3f%% fewer", 100*fewer), goal: ">= 99% fewer", met: fewer >= fewerGoal,
		},
		{
			measure:  "  while one of them has an item each second",
			figure:   fmt.Sprintf("%.1f", per((*measure.ManyNamespaces).BusyPerSecond)),
			baseline: fmt.Sprintf("%.0f (polling each %v)", per((*measure.ManyNamespaces).PolledPerSecond), r.Namespaces[0].Interval),
			ratio:    fmt.Sprintf("%.2f%% fewer", 100*busyFewer), goal: ">= 99% fewer", met: busyFewer >= fewerGoal,
		},
		{
			measure: "  memory of each, without an item so far; after one",
			figure:  kib(per(func(m *measure.ManyNamespaces) float64 { return float64(m.Bytes) })) + "; " + kib(per(func(m *measure.ManyNamespaces) float64 { return float64(m.BytesAfter) })),
			goal:    "< 20 KiB", met: r.namespaceMedian(idleBytes) < mostIdle,
		},
	}
}
