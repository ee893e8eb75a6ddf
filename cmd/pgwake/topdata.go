package main

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does top know, and what follows from two looks one after the other?

// picture is one look at everything.
type picture struct {
	at      time.Time // by the clock of this machine, as are all instants below
	depths  []pgwake.QueueDepth
	oldest  time.Time // since when what is due longest has been so; zero: nothing is due
	nodes   []pgwake.NodeInfo
	reports map[int32]pgwake.NodeReport
	letters int64
	paused  []pausedNamespace
	came    int64 // work items and messages, since statistics began
	went    int64
	err     error // nothing else is known then
}

// look asks for everything but the reports, which come by themselves.
func look(ctx context.Context, p *pgwake.Provider, now func() time.Time, reports []pgwake.NodeReport) (pic picture) {
	pic = picture{reports: make(map[int32]pgwake.NodeReport)}
	for _, r := range reports {
		pic.reports[r.Key] = r
	}
	if pic.depths, pic.err = p.GetQueueDepths(ctx); pic.err != nil {
		return pic
	}
	for i := range pic.depths {
		d := &pic.depths[i]
		if d.Due == 0 {
			continue
		}
		d.OldestDue = p.LocalTime(d.OldestDue)
		if pic.oldest.IsZero() || d.OldestDue.Before(pic.oldest) {
			pic.oldest = d.OldestDue
		}
	}
	if pic.nodes, pic.err = p.ListNodes(ctx); pic.err != nil {
		return pic
	}
	if pic.letters, _, pic.err = countLetters(ctx, p, nil); pic.err != nil {
		return pic
	}
	if pic.paused, pic.err = pausedOf(ctx, p); pic.err != nil {
		return pic
	}
	rows, err := p.Pool().Query(ctx, query("traffic"), p.Schema())
	if err != nil {
		pic.err = err
		return pic
	}
	defer rows.Close()
	for rows.Next() {
		var table string
		var came, went int64
		if pic.err = rows.Scan(&table, &came, &went); pic.err != nil {
			return pic
		}
		pic.came += came
		pic.went += went
	}
	pic.err = rows.Err()
	pic.at = now()
	return pic
}

// pausedNamespace is one that nobody is to fetch from, or pgwake.AllNamespaces.
type pausedNamespace struct {
	queue     pgwake.Queue
	namespace string
}

func (p pausedNamespace) String() string { return p.queue.String() + " " + p.namespace }

// has says that it is for a part of a queue.
func (p pausedNamespace) has(d pgwake.QueueDepth) bool {
	return p.queue == d.Queue && (p.namespace == pgwake.AllNamespaces || p.namespace == d.Namespace)
}

func pausedOf(ctx context.Context, p *pgwake.Provider) (all []pausedNamespace, err error) {
	for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
		paused, err := p.GetPaused(ctx, queue)
		if err != nil {
			return nil, err
		}
		if paused.All {
			all = append(all, pausedNamespace{queue, pgwake.AllNamespaces})
		}
		for _, name := range paused.Namespaces {
			all = append(all, pausedNamespace{queue, name})
		}
	}
	return all, nil
}

// pictures come as long as ctx lets them, also when the database was away in between.
func pictures(ctx context.Context, p *pgwake.Provider, every time.Duration, now func() time.Time) <-chan picture {
	to := make(chan picture)
	send := func(pic picture) bool {
		select {
		case to <- pic:
			return true
		case <-ctx.Done():
			return false
		}
	}
	go func() {
		defer close(to)
		for ctx.Err() == nil {
			for reports, err := range p.NodeReports(ctx, every) {
				pic := picture{err: err}
				if err == nil {
					pic = look(ctx, p, now, reports)
				}
				if !send(pic) {
					return
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
	}()
	return to
}

// change is what happened between two pictures.
type change struct {
	came, went float64          // items a second
	found      map[string]int64 // queries that found something, by reason, of all nodes
	latency    pgwake.Histogram // signal to item, of all nodes
	looks      float64          // queries for work a second, of all nodes
}

func changeOf(from, to picture) change {
	c := change{found: make(map[string]int64)}
	took := to.at.Sub(from.at).Seconds()
	if took <= 0 {
		return c
	}
	c.came, c.went = perSecond(to.came-from.came, took), perSecond(to.went-from.went, took)
	var looks int64
	for key, now := range to.reports {
		was, known := from.reports[key]
		if !known {
			continue // what it did before is not of this time
		}
		for _, of := range [][2]pgwake.QueueStats{{was.Stats.Worker, now.Stats.Worker}, {was.Stats.Orchestrator, now.Stats.Orchestrator}} {
			for reason, n := range of[1].Finds {
				c.found[reason] += n - of[0].Finds[reason]
			}
			for i := range c.latency {
				c.latency[i] += of[1].WakeLatency[i] - of[0].WakeLatency[i]
			}
			looks += of[1].Looks + of[1].Polls - of[0].Looks - of[0].Polls
		}
	}
	c.looks = perSecond(looks, took)
	return c
}

func perSecond(n int64, seconds float64) float64 { return max(0, float64(n)/seconds) }

// sums are the totals of a picture.
type sums struct{ due, delayed, leased, keptBack int64 }

func sumsOf(depths []pgwake.QueueDepth) (s sums) {
	for _, d := range depths {
		s.due += d.Due
		s.delayed += d.Delayed
		s.leased += d.Leased
		s.keptBack += d.KeptBack
	}
	return s
}

// reasonsOf are the totals by reason of all nodes, since they began.
func reasonsOf(reports map[int32]pgwake.NodeReport) map[string]int64 {
	all := make(map[string]int64)
	for _, r := range reports {
		for _, s := range []pgwake.QueueStats{r.Stats.Worker, r.Stats.Orchestrator} {
			for reason, n := range s.Finds {
				all[reason] += n
			}
		}
	}
	return all
}

// byCount are the keys, those first of which there is most.
func byCount(counts map[string]int64) []string {
	keys := slices.Sorted(maps.Keys(counts))
	slices.SortStableFunc(keys, func(a, b string) int { return int(counts[b] - counts[a]) })
	return keys
}
