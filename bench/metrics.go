package main

import (
	"slices"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: which figures does a run come down to? Their names are those of the specification, and stay.

// metrics returns the figures that the run has samples for: medians over the rounds, and ratios taken within a round.
func (r *results) metrics() map[string]float64 {
	m := map[string]float64{}
	put := func(name string, perRound []float64) {
		if len(perRound) > 0 {
			m[name] = measure.Median(perRound)
		}
	}
	worst := 0.0
	for _, idle := range r.Idle {
		worst = max(worst, idle.PerSecond())
		m["idle_statements_per_s"] = worst
	}
	var ratio, late []float64
	for i, s := range r.singlesBy(measure.OtherProvider) {
		ratio = append(ratio, float64(s.FromCommit.Summary().P50)/float64(r.tripAndClaim(p50)(i)))
		late = append(late, inMillis(s.FromCommit.Summary().P99))
	}
	put("wake_p50_ratio", ratio)
	put("wake_p99_ms", late)
	put("pair_second_p50_ms", each(r.Pairs, func(p *measure.PairsResult) float64 { return inMillis(p.Second.FromCommit.Summary().P50) }))
	put("timer_late_p99_ms", each(r.Timers, func(t *measure.TimersResult) float64 { return inMillis(t.All().Summary().P99) }))
	put("redelivery_extra_ms", each(r.Redelivery, func(t *measure.RedeliveryResult) float64 { return inMillis(t.Lateness.Summary().Max) }))

	bare := r.writersOf(measure.BareTable, maxWriters, false)
	put("enqueue_ratio_32", ratios(r.writersOf(measure.Library, maxWriters, false), bare))
	put("enqueue_trigger_ratio_32", ratios(r.writersOf(measure.Trigger, maxWriters, false), bare))
	put("enqueue_half_idle_ratio_32", ratios(r.writersOf(measure.Library, maxWriters, true), r.writersOf(measure.BareTable, maxWriters, true)))

	put("wake_queries_per_item_10x8", each(r.nodesOf("", 10), (*measure.NodesResult).PerItem))

	drain := r.drainsOf("pgwake, "+string(measure.InBatches), 8)
	put("drain_items_per_s", drain)
	put("drain_vs_limit", ratios(drain, r.drainsOf("bare table", 8)))
	if _, best := r.bestRiver(); best != nil {
		put("drain_vs_river", ratios(drain, best))
	}
	for name, of := range map[string]string{
		"fetch_ratio_backlog": measure.CaseBacklog, "fetch_ratio_locked": measure.CaseLocked,
		"fetch_ratio_timers": measure.CaseTimers, "fetch_ratio_locked_instances": measure.CaseLockedInstances,
	} {
		put(name, each(filter(r.FetchCosts, func(c *measure.FetchCost) bool { return c.Case == of }), (*measure.FetchCost).Ratio))
	}
	r.namespaceMetrics(put)
	r.taskMetrics(put)
	r.eventMetrics(put)
	r.workflowMetrics(put)
	return m
}

// singlesBy returns the rounds of one kind of producer.
func (r *results) singlesBy(by measure.Producer) []*measure.SinglesResult {
	return filter(r.Singles, func(s *measure.SinglesResult) bool { return s.Producer == by })
}

// writersOf returns the rate in each round. half: with half of the dispatchers idle, or as much load by a bare table's
// consumers.
func (r *results) writersOf(way measure.WritersWay, writers int, half bool) []float64 {
	return each(filter(r.Writers, func(w *measure.WritersResult) bool {
		return w.Way == string(way) && w.Writers == writers && (w.Working > 0) == half
	}), (*measure.WritersResult).PerSecond)
}

func (r *results) nodesOf(peer string, nodes int) []*measure.NodesResult {
	return filter(r.Nodes, func(n *measure.NodesResult) bool { return n.Peer == peer && n.Nodes == nodes })
}

// drainsOf returns the throughput in each round.
func (r *results) drainsOf(who string, dispatchers int) []float64 {
	return each(filter(r.Drains, func(d *measure.DrainResult) bool { return d.Who == who && d.Dispatchers == dispatchers }),
		(*measure.DrainResult).PerSecond)
}

// bestRiver returns the throughput of River at the settings of its own benchmark with the number of workers that suits it
// best, and that number.
func (r *results) bestRiver() (workers int, best []float64) {
	for _, d := range r.Drains {
		if d.Who != riverBench.Name() || d.Dispatchers == workers {
			continue
		}
		if rate := r.drainsOf(d.Who, d.Dispatchers); best == nil || measure.Median(rate) > measure.Median(best) {
			workers, best = d.Dispatchers, rate
		}
	}
	return workers, best
}

func filter[T any](of []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(of), func(v T) bool { return !keep(v) })
}

func each[T any](of []T, figure func(T) float64) (figures []float64) {
	for _, v := range of {
		figures = append(figures, figure(v))
	}
	return figures
}

// ratios are taken within each round.
func ratios(of, base []float64) (ratios []float64) {
	for i := range min(len(of), len(base)) {
		ratios = append(ratios, of[i]/base[i])
	}
	return ratios
}

func inMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
