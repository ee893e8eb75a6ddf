package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: which pictures does a run make?

// charts returns the pictures that the run has samples for, by file name.
func (r *results) charts() map[string]string {
	charts := map[string]string{
		"latency.svg": r.latencyChart().svg(),
		"writers.svg": r.writersChart().svg(),
		"idle.svg":    r.idleChart().svg(),
	}
	for name, svg := range charts {
		if svg == "" {
			delete(charts, name)
		}
	}
	return charts
}

// writeCharts puts the pictures into a directory and returns their names, in order.
func (r *results) writeCharts(dir string) (files []string, err error) {
	for name, svg := range r.charts() {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("keep the charts: %w", err)
		}
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(svg), 0o644); err != nil {
			return nil, fmt.Errorf("keep the charts: %w", err)
		}
		files = append(files, file)
	}
	slices.Sort(files)
	return files, nil
}

// chartPoints is how many points a distribution is drawn with.
const chartPoints = 200

// distribution is the share of samples, in percent, that is not above a value in milliseconds.
func distribution(name string, samples measure.Samples) series {
	s := series{name: name}
	if len(samples) == 0 {
		return s
	}
	sorted := slices.Sorted(slices.Values(samples))
	for i := range chartPoints + 1 {
		share := 100 * float64(i) / chartPoints
		s.points = append(s.points, point{max(inMillis(measure.NearestRank(sorted, share)), 0.01), share})
	}
	return s
}

// latencyChart is of all rounds together.
func (r *results) latencyChart() *lineChart {
	c := &lineChart{title: "Commit of the enqueue to item in hand", x: "milliseconds", y: "% of the items", logX: true}
	keep := func(name string, samples measure.Samples) {
		if len(samples) > 0 {
			c.series = append(c.series, distribution(name, samples))
		}
	}
	var ours, second, bare measure.Samples
	for _, s := range r.singlesBy(measure.OtherProvider) {
		ours = append(ours, s.FromCommit...)
	}
	for _, p := range r.Pairs {
		second = append(second, p.Second.FromCommit...)
	}
	for _, b := range r.Baseline {
		for i := range min(len(b.Trip.FromSend), len(b.Claim)) {
			bare = append(bare, b.Trip.FromSend[i]+b.Claim[i])
		}
	}
	keep("pgwake, single items", ours)
	keep("pgwake, second of a pair", second)
	for _, peer := range allPeers {
		var of measure.Samples
		for _, p := range r.PeerPairs {
			if p.Peer == peer.Name() {
				of = append(of, p.Second.FromCommit...)
			}
		}
		keep(peer.Name()+", second", of)
	}
	keep("bare insert+notify, and claim", bare)
	return c
}

// writersChart has medians over the rounds.
func (r *results) writersChart() *lineChart {
	c := &lineChart{title: "Enqueues, dispatchers saturated", x: "writers", y: "enqueues per second"}
	var ways []string
	for _, w := range r.Writers {
		if !slices.Contains(ways, w.Way) {
			ways = append(ways, w.Way)
		}
	}
	for _, way := range ways {
		s := series{name: way}
		var counts []int
		for _, w := range r.Writers {
			if w.Way == way && !slices.Contains(counts, w.Writers) {
				counts = append(counts, w.Writers)
			}
		}
		slices.Sort(counts)
		for _, n := range counts {
			if rates := r.writersOf(measure.WritersWay(way), n, false); len(rates) > 0 {
				s.points = append(s.points, point{float64(n), measure.Median(rates)})
			}
		}
		c.series = append(c.series, s)
	}
	return c
}

func (r *results) idleChart() *barChart {
	c := &barChart{title: "Statements per second while there is nothing to do", unit: "statements per second"}
	put := func(name string, statements int64, perSecond float64, d time.Duration) {
		label := fmt.Sprintf("%.3g", perSecond)
		if statements == 0 {
			label = fmt.Sprintf("0 in %v", d.Round(time.Second))
		}
		c.bars = append(c.bars, bar{name, label, perSecond})
	}
	for _, i := range r.Idle {
		put(fmt.Sprintf("pgwake, %d dispatchers, poll timeout %v", i.Workers+i.Orchestrators, i.PollTimeout), i.Statements, i.PerSecond(), i.Duration)
	}
	for _, p := range r.PeerIdle {
		put(fmt.Sprintf("%s, %d workers", p.Peer, p.Workers), p.Statements, p.PerSecond(), p.Duration)
	}
	for _, p := range r.ShortPoll {
		put(fmt.Sprintf("poll each %v, 2x%d dispatchers", p.Interval, p.Dispatchers), p.Statements, p.PerSecond(), p.Duration)
	}
	return c
}
