package main

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/stretchr/testify/assert"
)

func ms(ds ...time.Duration) (s measure.Samples) {
	for _, d := range ds {
		s = append(s, d*time.Millisecond)
	}
	return s
}

// everything has one round of all that a metric needs.
func everything() *results {
	writers := func(way measure.WritersWay, working int, inserted int64) *measure.WritersResult {
		return &measure.WritersResult{Way: string(way), Writers: 32, Working: working, Inserted: inserted, Took: time.Second}
	}
	drain := func(who string, dispatchers, done int) *measure.DrainResult {
		return &measure.DrainResult{Who: who, Dispatchers: dispatchers, Items: 1000, Done: done, Took: time.Second}
	}
	cost := func(name string, full time.Duration) *measure.FetchCost {
		return &measure.FetchCost{Case: name, Rows: 10, Full: ms(full), Empty: ms(10)}
	}
	return &results{
		Idle:      []*measure.IdleResult{{Duration: time.Minute, Statements: 1}, {Duration: time.Minute, Statements: 3}},
		ShortPoll: []*measure.ShortPollResult{{Dispatchers: 4, Interval: 50 * time.Millisecond, Duration: time.Second, Statements: 160}},
		Baseline:  []*measure.BaselineResult{{Trip: measure.Latency{FromSend: ms(3)}, Claim: ms(1)}},
		Singles: []*measure.SinglesResult{{Producer: measure.OtherProvider, Latency: measure.Latency{FromCommit: ms(6)}},
			{Producer: measure.SameProvider, Latency: measure.Latency{FromCommit: ms(1)}}},
		Pairs:      []*measure.PairsResult{{First: measure.Latency{FromCommit: ms(1)}, Second: measure.Latency{FromCommit: ms(5)}}},
		Timers:     []*measure.TimersResult{{Before: ms(1), Other: ms(2), Own: ms(7)}},
		Redelivery: []*measure.RedeliveryResult{{Lateness: ms(1, 9, 4)}},
		PeerIdle:   []*measure.PeerIdleResult{{Peer: river.Name(), Workers: 64, Duration: time.Second, Statements: 3}},
		PeerPairs:  []*measure.PairsResult{{Peer: river.Name(), First: measure.Latency{FromCommit: ms(2)}, Second: measure.Latency{FromCommit: ms(500)}}},
		PeerTimers: []*measure.PeerTimersResult{{Peer: river.Name(), Lateness: ms(1100)}},
		Writers: []*measure.WritersResult{
			writers(measure.BareTable, 0, 1000), writers(measure.Library, 0, 900), writers(measure.Trigger, 0, 700),
			writers(measure.BareTable, 4, 500), writers(measure.Library, 4, 400),
		},
		Nodes: []*measure.NodesResult{{Nodes: 10, Dispatchers: 8, Items: 10, Looks: 15}, {Peer: published.Name(), Nodes: 10, Items: 10, Looks: 100}},
		Drains: []*measure.DrainResult{
			drain("bare table", 8, 800), drain("pgwake, "+string(measure.InBatches), 8, 600), drain("pgwake, "+string(measure.OneByOne), 8, 1),
			drain(riverBench.Name(), 8, 100), drain(riverBench.Name(), 500, 300), drain(riverBench.Name(), 2000, 200), drain(river.Name(), 8, 999),
		},
		FetchCosts: []*measure.FetchCost{cost(measure.CaseBacklog, 11), cost(measure.CaseLocked, 12), cost(measure.CaseTimers, 13), cost(measure.CaseLockedInstances, 14)},
		Bloat:      []*measure.BloatResult{{Who: "pgwake", Before: 100, Last: 90, Size: 3 << 20, Duration: measure.Samples{time.Second, time.Second}}},
	}
}

func TestMetrics_HaveTheNamesOfTheSpecification(t *testing.T) {
	assert.Equal(t, map[string]float64{
		"idle_statements_per_s":        0.05,
		"wake_p50_ratio":               1.5,
		"wake_p99_ms":                  6,
		"pair_second_p50_ms":           5,
		"timer_late_p99_ms":            7,
		"redelivery_extra_ms":          9,
		"enqueue_ratio_32":             0.9,
		"enqueue_trigger_ratio_32":     0.7,
		"enqueue_half_idle_ratio_32":   0.8,
		"wake_queries_per_item_10x8":   1.5,
		"drain_items_per_s":            600,
		"drain_vs_river":               2,
		"drain_vs_limit":               0.75,
		"fetch_ratio_backlog":          1.1,
		"fetch_ratio_locked":           1.2,
		"fetch_ratio_timers":           1.3,
		"fetch_ratio_locked_instances": 1.4,
	}, everything().metrics())
}

func TestMetrics_RatiosAreTakenWithinARound(t *testing.T) {
	var r results
	for _, round := range []struct{ bare, ours int64 }{{100, 90}, {10, 10}, {1000, 100}} { // 0.9, 1 and 0.1
		r.Writers = append(r.Writers,
			&measure.WritersResult{Way: string(measure.BareTable), Writers: 32, Inserted: round.bare, Took: time.Second},
			&measure.WritersResult{Way: string(measure.Library), Writers: 32, Inserted: round.ours, Took: time.Second})
	}
	assert.Equal(t, 0.9, r.metrics()["enqueue_ratio_32"])
}

func TestMetrics_WhatWasNotMeasured_IsNotThere(t *testing.T) {
	assert.Empty(t, (&results{}).metrics())
}

func TestRows_GoalsOfTheSpecification(t *testing.T) {
	goals := map[string]row{}
	for _, row := range everything().rows() {
		goals[row.measure] = row
	}
	for name, want := range map[string]struct {
		ratio, goal string
		met         bool
	}{
		"32 writers, dispatchers saturated: enqueues/s":                           {"0.90x", ">= 0.85x", true},
		"  by plain SQL, with the trigger: enqueues/s":                            {"0.70x", ">= 0.7x", true},
		"  half of the dispatchers idle: enqueues/s":                              {"0.80x", ">= 0.6x", true},
		"10 nodes of 8 dispatchers: queries per item":                             {"0.15x", "<= 2", true},
		"drain of 1000, 8 dispatchers, batches, ack with the next claim: items/s": {"0.75x", ">= 0.6x", true},
		"  its throughput: items/s":                                               {"", ">= 10000", false},
		"  against River at its bench settings: items/s":                          {"2.00x", ">= 2x", true},
		"fetch among 10 timers, p50":                                              {"1.30x", "<= 1.3x", true},
		"fetch among 10 locked instances that have messages, p50":                 {"1.40x", "<= 1.3x", false},
	} {
		got, ok := goals[name]
		if assert.True(t, ok, name) {
			assert.Equal(t, want.ratio, got.ratio, name)
			assert.Equal(t, want.goal, got.goal, name)
			assert.Equal(t, want.met, got.met, name)
		}
	}
}

func TestBestRiver_IsTheOneWithTheMostSuitableNumberOfWorkers(t *testing.T) {
	workers, best := everything().bestRiver()
	assert.Equal(t, 500, workers)
	assert.Equal(t, []float64{300}, best)
}
