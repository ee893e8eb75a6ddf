package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/examples/workflow/order"
)

// This file answers: what does pgwake do, in figures? Every one of them is measured here and now; package
// measure says how.

// dispatcherCount is how many dispatchers wait in each scenario.
const dispatcherCount = 8

// station of the tour.
type station struct {
	title string
	// show runs a scenario. It tells status how far it is, and returns lines that say what came out.
	show func(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error)
}

var stations = []station{
	{fmt.Sprintf("Idle: %d dispatchers wait for 15 s", dispatcherCount), idle},
	{"Single items: 500, one at a time at random instants, from another provider", singles},
	{"Pairs: the second item 1 to 200 ms after the first", pairs},
	{"Timers: 200, due at random instants", timers},
	{"Burst: 50,000 items come while the dispatchers wait", burst},
	{"Workflow: 20 activities, a timer, an event from outside; the process dies in the middle of it", workflow},
}

// tour shows each station, live, and sums up.
func tour(ctx context.Context, url string, s *screen) error {
	began := time.Now()
	var net measure.SafetyNet
	for _, station := range stations {
		s.line("")
		s.line(station.title)
		lines, found, err := station.show(ctx, url, s.status)
		s.clear()
		if err != nil {
			return err
		}
		for _, line := range lines {
			s.line("  " + line)
		}
		net = net.Plus(found)
	}
	s.line("")
	s.line("In all of this, work that no notification and no timer announced:")
	s.line(fmt.Sprintf("  fallback_finds %d  scout_finds %d", net.FallbackFinds, net.ScoutFinds))
	s.line("Latencies are those of this machine as busy as it is: what else runs on it adds to them, most of all to p99.")
	s.line(fmt.Sprintf("The tour took %.0f s. Figures with baselines, in rounds: make bench", time.Since(began).Seconds()))
	return nil
}

func idle(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	const duration = 15 * time.Second
	status("starting")
	r, err := measure.Idle(ctx, url, measure.IdleOptions{
		Duration: duration, Workers: dispatcherCount, Orchestrators: -1,
		Progress: func(p measure.Progress) {
			status(fmt.Sprintf("%2.0f of %.0f s: %d statements", p.Elapsed.Seconds(), duration.Seconds(), p.Statements))
		},
	})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	lines := []string{
		fmt.Sprintf("%d statements in %.1f s, and %d before that to make the schema, start up and settle", r.Statements, r.Duration.Seconds(), r.StartUp),
		"counted by the server: " + r.How,
	}
	for _, text := range slices.Sorted(maps.Keys(r.Texts)) {
		lines = append(lines, fmt.Sprintf("%d x %s", r.Texts[text], text))
	}
	return lines, r.Net, nil
}

func singles(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	const gap = 14 * time.Millisecond
	status("bare PostgreSQL, to compare with")
	bare, err := measure.Baseline(ctx, url, measure.BaselineOptions{Rounds: 50, Gap: gap / 2})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	r, err := measure.Singles(ctx, url, measure.SinglesOptions{
		Items: 500, Gap: gap, Dispatchers: dispatcherCount, Progress: progress(status)})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	return []string{
		row("commit to item in hand", r.FromCommit),
		fmt.Sprintf("for comparison, bare: a notification's trip %s + a claim %s (p50)",
			millis(bare.Trip.FromSend.Summary().P50), millis(bare.Claim.Summary().P50)),
	}, r.Net, nil
}

func pairs(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	r, err := measure.Pairs(ctx, url, measure.PairsOptions{Pairs: 40, Dispatchers: dispatcherCount, Progress: progress(status)})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	return []string{
		row("first, commit to in hand", r.First.FromCommit),
		row("second", r.Second.FromCommit),
	}, r.Net, nil
}

func timers(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	r, err := measure.Timers(ctx, url, measure.TimersOptions{
		Timers: 200, Window: 5 * time.Second, Dispatchers: dispatcherCount, Progress: progress(status)})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	lines := []string{
		row("set before the provider started", r.Before),
		row("set by other connections", r.Other),
		row("set by the provider itself", r.Own),
		fmt.Sprintf("lateness; the earliest was in hand %s after it was due (clocks compared to %s)", millis(r.Earliest), millis(r.ClockError)),
	}
	if r.TooSoon > 0 {
		lines = append(lines, fmt.Sprintf("%d left out: due before anybody waited for them", r.TooSoon))
	}
	return lines, r.Net, nil
}

func burst(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	r, err := measure.Burst(ctx, url, measure.BurstOptions{
		Items: 50_000, Dispatchers: dispatcherCount,
		Progress: func(p measure.Progress) { status(fmt.Sprintf("%d of %d", p.Done, p.Total)) },
	})
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	return []string{
		fmt.Sprintf("drained in %.2f s: %.0f items/s, each claimed under a lease and acknowledged", r.Drain.Seconds(), r.PerSecond()),
		fmt.Sprintf("%d tokens (wake-ups), %d queries for work", r.TokenCount(), r.Looks),
	}, r.Net, nil
}

func workflow(ctx context.Context, url string, status func(string)) ([]string, measure.SafetyNet, error) {
	r, err := order.Run(ctx, url, status)
	if err != nil {
		return nil, measure.SafetyNet{}, err
	}
	reservations := 0
	for _, times := range r.Reservations {
		reservations += times
	}
	return []string{
		r.Output,
		fmt.Sprintf("all articles reserved %s after the crash, %d of them again", millis(r.FromCrash), reservations-len(r.Reservations)),
		fmt.Sprintf("from the event to the end of the second execution %s", millis(r.FromPayment)),
	}, measure.SafetyNet{}, nil
}

// progress shows how far a scenario is, and its figures so far.
func progress(status func(string)) func(measure.Progress) {
	return func(p measure.Progress) {
		status(fmt.Sprintf("%3d of %d  p50 %s  max %s", p.Done, p.Total, millis(p.Figures.P50), millis(p.Figures.Max)))
	}
}

// row is one line of a little table.
func row(name string, s measure.Samples) string {
	f := s.Summary()
	return fmt.Sprintf("%-32s n %3d  p50 %s  p95 %s  p99 %s  max %s",
		name, f.N, millis(f.P50), millis(f.P95), millis(f.P99), millis(f.Max))
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%5.2f ms", float64(d)/float64(time.Millisecond))
}
