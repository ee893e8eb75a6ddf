package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/bench/peers"
)

// This file answers: what do the results say of peers, limits and scale?

// rate makes a row of throughputs, with a ratio if there is a base. A least of 0 is no goal.
func rate(name, unit string, figures, bases []float64, baseName string, least float64) row {
	w := row{measure: name + ": " + unit, figure: fmt.Sprintf("%.0f", measure.Median(figures))}
	if len(bases) == 0 {
		return w
	}
	w.baseline = fmt.Sprintf("%.0f (%s)", measure.Median(bases), baseName)
	ratio := measure.Median(ratios(figures, bases))
	w.ratio = fmt.Sprintf("%.2fx", ratio)
	if least > 0 {
		w.goal, w.met = fmt.Sprintf(">= %gx", least), ratio >= least
	}
	return w
}

func (r *results) limitRows() []row {
	n := len(r.Baseline)
	if n == 0 {
		return nil
	}
	of := func(samples func(*measure.BaselineResult) measure.Samples) perRound {
		return p50(func(i int) measure.Summary { return samples(r.Baseline[i]).Summary() })
	}
	return []row{
		r.compare("limit: round trip, p50", n, of(func(b *measure.BaselineResult) measure.Samples { return b.RoundTrip }), nil, "", noGoal),
		r.compare("limit: insert of a row, to disk, p50", n, of(func(b *measure.BaselineResult) measure.Samples { return b.Insert }), nil, "", noGoal),
		r.compare("limit: insert and notification in another connection, p50", n, of(func(b *measure.BaselineResult) measure.Samples { return b.Trip.FromSend }), nil, "", noGoal),
		r.compare("limit: claim of a row, p50", n, of(func(b *measure.BaselineResult) measure.Samples { return b.Claim }), nil, "", noGoal),
	}
}

func (r *results) peerIdleRows() (rows []row) {
	for _, p := range r.PeerIdle {
		rows = append(rows, row{
			measure: fmt.Sprintf("  %s, %d workers", p.Peer, p.Workers),
			figure:  fmt.Sprintf("%.4f (%d in %v)", p.PerSecond(), p.Statements, p.Duration.Round(time.Second)),
		})
	}
	return rows
}

func (r *results) peerPairRows() (rows []row) {
	for _, peer := range allPeers {
		of := filter(r.PeerPairs, func(p *measure.PairsResult) bool { return p.Peer == peer.Name() })
		if len(of) == 0 {
			continue
		}
		first := func(i int) measure.Summary { return of[i].First.FromCommit.Summary() }
		second := func(i int) measure.Summary { return of[i].Second.FromCommit.Summary() }
		rows = append(rows,
			r.compare("  "+peer.Name()+", first item, p50", len(of), p50(first), nil, "", noGoal),
			r.compare("  "+peer.Name()+", second item, p50", len(of), p50(second), p50(first), " (its first items)", noGoal),
			r.compare("  "+peer.Name()+", second item, max", len(of), longest(second), nil, "", noGoal))
	}
	return rows
}

func (r *results) peerTimerRows() (rows []row) {
	for _, p := range r.PeerTimers {
		late := func(int) measure.Summary { return p.Lateness.Summary() }
		rows = append(rows,
			r.compare("  "+p.Peer+", scheduled by another, lateness, p50", 1, p50(late), nil, "", noGoal),
			r.compare("  "+p.Peer+", lateness, p99", 1, p99(late), nil, "", noGoal))
	}
	return rows
}

func (r *results) writersRows() (rows []row) {
	bare := r.writersOf(measure.BareTable, maxWriters, false)
	if len(bare) == 0 {
		return nil
	}
	const bareName = "bare table, same indexes"
	rows = append(rows,
		rate(fmt.Sprintf("%d writers, dispatchers saturated", maxWriters), "enqueues/s", r.writersOf(measure.Library, maxWriters, false), bare, bareName, 0.85),
		rate("  by plain SQL, with the trigger", "enqueues/s", r.writersOf(measure.Trigger, maxWriters, false), bare, bareName, 0.7))
	if half := r.writersOf(measure.Library, maxWriters, true); len(half) > 0 {
		rows = append(rows, rate("  half of the dispatchers idle", "enqueues/s", half, r.writersOf(measure.BareTable, maxWriters, true), "bare table, as many consumers", 0.6))
	}
	for _, peer := range []measure.Peer{published, river} {
		if of := r.writersOf(measure.WritersWay(peer.Name()), maxWriters, false); len(of) > 0 {
			rows = append(rows, rate("  "+peer.Name(), "enqueues/s", of, bare, bareName, 0))
		}
	}
	return rows
}

func (r *results) nodesRows() (rows []row) {
	for _, nodes := range []int{2, 5, 10} {
		ours, theirs := r.nodesOf("", nodes), r.nodesOf(published.Name(), nodes)
		if len(ours) == 0 {
			continue
		}
		per := measure.Median(each(ours, (*measure.NodesResult).PerItem))
		w := row{
			measure: fmt.Sprintf("%d nodes of %d dispatchers: queries per item", nodes, ours[0].Dispatchers),
			figure:  fmt.Sprintf("%.2f", per),
		}
		if len(theirs) > 0 {
			base := each(theirs, (*measure.NodesResult).PerItem)
			w.baseline = fmt.Sprintf("%.2f (%s)", measure.Median(base), published.Name())
			w.ratio = fmt.Sprintf("%.2fx", measure.Median(ratios(each(ours, (*measure.NodesResult).PerItem), base)))
		}
		if nodes == 10 {
			w.goal, w.met = "<= 2", per <= 2
		}
		latency := func(i int) measure.Summary { return ours[i].Latency.FromCommit.Summary() }
		rows = append(rows, w, r.compare("  commit to hand, p50", len(ours), p50(latency), nil, "", noGoal))
	}
	return rows
}

func (r *results) drainRows() (rows []row) {
	ours := r.drainsOf("pgwake, "+string(measure.InBatches), 8)
	limit := r.drainsOf("bare table", 8)
	if len(ours) == 0 {
		return nil
	}
	const unit = "items/s"
	name := fmt.Sprintf("drain of %d, 8 dispatchers, %s", r.Drains[0].Items, measure.InBatches)
	rows = append(rows, rate(name, unit, ours, limit, "bare table, batches", 0.6))
	rate10k := row{measure: "  its throughput: " + unit, figure: fmt.Sprintf("%.0f", measure.Median(ours)), goal: ">= 10000", met: measure.Median(ours) >= 10_000}
	rows = append(rows, rate10k)
	if workers, best := r.bestRiver(); best != nil {
		rows = append(rows, rate("  against River at its bench settings", unit, ours, best, fmt.Sprintf("River, %d workers", workers), 2))
	}
	seen := map[string]bool{}
	for _, d := range r.Drains {
		key := fmt.Sprintf("  %s, %d workers", d.Who, d.Dispatchers)
		if seen[key] || d.Who == "bare table" || d.Who == "pgwake, "+string(measure.InBatches) {
			continue
		}
		seen[key] = true
		rows = append(rows, rate(key, unit, r.drainsOf(d.Who, d.Dispatchers), limit, "bare table, batches", 0))
	}
	return rows
}

func (r *results) quotaRows() (rows []row) {
	if len(r.Quotas) == 0 {
		return nil
	}
	first := r.Quotas[0]
	of := func(f func(*measure.QuotasResult) float64) []float64 { return each(r.Quotas, f) }
	for i, d := range first.Drains {
		rows = append(rows, rate(fmt.Sprintf("drain of %d, limited, not so that it binds: %s; by %s", d.Free.Items, d.Limits, strings.TrimPrefix(d.Free.Who, "pgwake, ")), "items/s",
			of(func(q *measure.QuotasResult) float64 { return q.Drains[i].Limited.PerSecond() }),
			of(func(q *measure.QuotasResult) float64 { return q.Drains[i].Free.PerSecond() }), "no limit", 0.8))
	}
	for i, s := range first.Shared {
		busy, highest := measure.Median(of(func(q *measure.QuotasResult) float64 { return q.Shared[i].Busy })), 0
		empty := measure.Median(of(func(q *measure.QuotasResult) float64 { return float64(q.Shared[i].Empty) }))
		for _, q := range r.Quotas {
			highest = max(highest, q.Shared[i].Highest)
		}
		nodes := fmt.Sprintf("%d nodes", s.Nodes)
		if s.Nodes == 1 {
			nodes = "one node"
		}
		inUse := row{measure: "  of it in use", figure: fmt.Sprintf("%.1f%%", 100*busy)}
		what := fmt.Sprintf("limit of %d over %s, handlers of %v", s.Most, nodes, s.Handler)
		if s.Keys > 0 {
			what = fmt.Sprintf("limit of %d of each of %d keys over %s, handlers of %v", s.Most/s.Keys, s.Keys, nodes, s.Handler)
		} else {
			inUse.goal, inUse.met = ">= 95%", busy >= 0.95
		}
		rows = append(rows, row{measure: what + ": at work, at most", figure: fmt.Sprint(highest), goal: fmt.Sprintf("<= %d", s.Most), met: highest <= s.Most},
			inUse, row{measure: "  a place is empty between two items for", figure: millis(time.Duration(empty))})
	}
	delays := func(i int) measure.Summary { return r.Quotas[i].Delays.Summary() }
	return append(rows,
		r.compare(fmt.Sprintf("a tenant's item beside %d of another, commit to handler, p50", first.Flood), len(r.Quotas), p50(delays), nil, "", noGoal),
		r.compare("  the longest", len(r.Quotas), longest(delays), nil, "", under(50*time.Millisecond)))
}

func (r *results) fetchRows() (rows []row) {
	for _, of := range []struct{ name, what string }{
		{measure.CaseBacklog, "items that are due"}, {measure.CaseLocked, "locked items"}, {measure.CaseTimers, "timers"},
		{measure.CaseLockedInstances, "locked instances that have messages"},
	} {
		costs := filter(r.FetchCosts, func(c *measure.FetchCost) bool { return c.Case == of.name })
		if len(costs) == 0 {
			continue
		}
		full := func(i int) measure.Summary { return costs[i].Full.Summary() }
		empty := func(i int) measure.Summary { return costs[i].Empty.Summary() }
		rows = append(rows, r.compare(fmt.Sprintf("fetch among %d %s, p50", costs[0].Rows, of.what), len(costs), p50(full), p50(empty), " (none)", atMost(1.3)))
	}
	return rows
}

func (r *results) bloatRows() (rows []row) {
	for i, b := range r.Bloat {
		name := "  " + b.Who
		if i == 0 {
			name = fmt.Sprintf("transaction open for %v, chunks of items, at the end", (b.Duration[1] * 5).Round(time.Second))
		}
		w := rate(name, "items/s", []float64{b.Last}, []float64{b.Before}, "before", 0)
		w.figure += fmt.Sprintf(" (%d MiB)", b.Size>>20)
		rows = append(rows, w)
	}
	return rows
}

// settings says how everybody was set.
func (r *results) settings() (lines []string) {
	lines = append(lines,
		"pgwake: its defaults; pools of 4 to 16 connections, as many as dispatchers query at a time; Provider of producers and of consumers apart",
		published.Name()+": "+published.Settings(),
		poll.Name()+": "+poll.Settings(),
		river.Name()+": "+river.Settings(),
		riverBench.Name()+": "+riverBench.Settings()+fmt.Sprintf("; its bench has %d workers", peers.RiverBenchWorkers),
		"all: the same server and driver, fsync on; what is enqueued and what is done is committed to disk (synchronous_commit on); a claim of pgwake that acknowledges nothing is not, those of the others are")
	return lines
}
