package glance

import (
	"maps"
	"slices"

	"github.com/pgwake/pgwake"
)

// This file answers: what follows from two looks, and what do the nodes come to together?

// Change is what happened between two pictures.
type Change struct {
	Came, Went float64          // items a second
	Found      map[string]int64 // queries that found something, by reason, of all nodes
	Latency    pgwake.Histogram // signal to item, of all nodes
	Looks      float64          // queries for work a second, of all nodes
	Idle       float64          // those of them, and of the other statements of nodes, that found nothing
	Items      float64          // fetched a second, of all nodes
}

// ChangeOf compares two pictures. What nodes did is counted by the times at which they said so, if they are known, and else by those of the pictures.
func ChangeOf(from, to Picture) Change {
	c := Change{Found: make(map[string]int64)}
	took := to.At.Sub(from.At).Seconds()
	if took > 0 && !from.At.IsZero() {
		c.Came, c.Went = perSecond(to.Came-from.Came, took), perSecond(to.Went-from.Went, took)
	}
	for key, now := range to.Reports {
		was, known := from.Reports[key]
		if !known {
			continue // what it did before is not of this time
		}
		took := took
		if !was.At.IsZero() {
			took = now.At.Sub(was.At).Seconds()
		}
		if took <= 0 {
			continue
		}
		var looks, finds, items int64
		for _, of := range [][2]pgwake.QueueStats{{was.Stats.Worker, now.Stats.Worker}, {was.Stats.Orchestrator, now.Stats.Orchestrator}} {
			for reason, n := range of[1].Finds {
				c.Found[reason] += n - of[0].Finds[reason]
				finds += n - of[0].Finds[reason]
			}
			for i := range c.Latency {
				c.Latency[i] += of[1].WakeLatency[i] - of[0].WakeLatency[i]
			}
			looks += of[1].Looks + of[1].Polls - of[0].Looks - of[0].Polls
			items += of[1].Items - of[0].Items
		}
		others := now.Stats.Fallbacks - was.Stats.Fallbacks
		c.Looks += perSecond(looks, took)
		c.Items += perSecond(items, took)
		c.Idle += perSecond(looks-finds+others, took)
	}
	return c
}

func perSecond(n int64, seconds float64) float64 { return max(0, float64(n)/seconds) }

// Sums are the totals of a picture.
type Sums struct{ Due, Delayed, Leased, KeptBack int64 }

// SumsOf adds depths up.
func SumsOf(depths []pgwake.QueueDepth) (s Sums) {
	for _, d := range depths {
		s.Due += d.Due
		s.Delayed += d.Delayed
		s.Leased += d.Leased
		s.KeptBack += d.KeptBack
	}
	return s
}

// Reasons are the totals by reason of all nodes, since they began.
func (pic *Picture) Reasons() map[string]int64 {
	all := make(map[string]int64)
	for _, s := range pic.stats() {
		for reason, n := range s.Finds {
			all[reason] += n
		}
	}
	return all
}

// Latency is the wake latency of all nodes, since they began.
func (pic *Picture) Latency() (all pgwake.Histogram) {
	for _, s := range pic.stats() {
		for i, n := range s.WakeLatency {
			all[i] += n
		}
	}
	return all
}

func (pic *Picture) stats() (all []pgwake.QueueStats) {
	for _, r := range pic.Reports {
		all = append(all, r.Stats.Worker, r.Stats.Orchestrator)
	}
	return all
}

// ByCount are the keys, those first of which there is most.
func ByCount(counts map[string]int64) []string {
	keys := slices.Sorted(maps.Keys(counts))
	slices.SortStableFunc(keys, func(a, b string) int { return int(counts[b] - counts[a]) })
	return keys
}

// NodeState is what is wrong with a node, if anything is.
func NodeState(r pgwake.NodeReport) string {
	switch {
	case len(r.Problems) > 0:
		return r.Problems[0].String()
	case r.Stats.Worker.Aggressive || r.Stats.Orchestrator.Aggressive:
		return "polling"
	}
	return "ok"
}
