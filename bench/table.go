package main

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: what do the results say, beside the baseline and the goal?

// row of the table. The fields are ready to print.
type row struct {
	measure, figure, baseline, ratio, goal string
	met                                    bool // if there is a goal
}

// rows makes the table. Every figure is the median over the rounds, and every ratio is taken within a round.
func (r *results) rows() (rows []row) {
	rows = append(rows, r.limitRows()...)
	rows = append(rows, r.idleRows()...)
	rows = append(rows, r.peerIdleRows()...)
	rows = append(rows, r.singleRows()...)
	rows = append(rows, r.pairRows()...)
	rows = append(rows, r.peerPairRows()...)
	rows = append(rows, r.timerRows()...)
	rows = append(rows, r.peerTimerRows()...)
	rows = append(rows, r.redeliveryRows()...)
	rows = append(rows, r.restartRows()...)
	rows = append(rows, r.writersRows()...)
	rows = append(rows, r.nodesRows()...)
	rows = append(rows, r.quotaRows()...)
	rows = append(rows, r.namespaceRows()...)
	rows = append(rows, r.taskRows()...)
	rows = append(rows, r.eventRows()...)
	rows = append(rows, r.workflowRows()...)
	rows = append(rows, r.drainRows()...)
	rows = append(rows, r.fetchRows()...)
	rows = append(rows, r.bloatRows()...)
	rows = append(rows, r.burstRows()...)
	rows = append(rows, r.stressRows()...)
	rows = append(rows, r.historyRows()...)
	rows = append(rows, r.fanInRows()...)
	rows = append(rows, r.convoyRows()...)
	net := r.safetyNet()
	return append(rows, row{
		measure: "found by fallback, by scout (all scenarios)",
		figure:  fmt.Sprintf("%d, %d", net.FallbackFinds, net.ScoutFinds),
		goal:    "0, 0", met: net == measure.SafetyNet{},
	})
}

func (r *results) idleRows() (rows []row) {
	if len(r.Idle) == 0 {
		return nil
	}
	poll := r.ShortPoll[0]
	for _, idle := range r.Idle {
		goal := row{
			measure: fmt.Sprintf("idle, %d dispatchers, poll timeout %v: statements/s",
				idle.Workers+idle.Orchestrators, idle.PollTimeout),
			figure:   fmt.Sprintf("%.4f (%d in %v)", idle.PerSecond(), idle.Statements, idle.Duration.Round(time.Second)),
			baseline: fmt.Sprintf("%.0f (2x%d polling each %v)", poll.PerSecond(), poll.Dispatchers, poll.Interval),
			ratio:    fmt.Sprintf("1/%.0f", poll.PerSecond()/max(idle.PerSecond(), 1/idle.Duration.Seconds())),
			goal:     "<= 1/60", met: idle.PerSecond() <= 1.0/60,
		}
		if idle.Statements == 0 {
			goal.ratio = "< " + goal.ratio
		}
		fewer := 1 - idle.PerSecond()/poll.PerSecond()
		rows = append(rows, goal, row{
			measure: "  fewer than by polling", figure: fmt.Sprintf("%.3f%%", 100*fewer), goal: ">= 99.9%", met: fewer >= 0.999,
		}, row{measure: "  statements to start up", figure: fmt.Sprint(idle.StartUp)})
	}
	return append(rows, row{measure: "  counted by: " + r.Idle[0].How})
}

const (
	tripAndClaim  = " (notify trip + claim)"
	sleepAndClaim = " (Go timer + claim)"
)

func (r *results) singleRows() (rows []row) {
	for _, by := range producers {
		of := r.singlesBy(by)
		if len(of) == 0 {
			continue
		}
		commit := func(i int) measure.Summary { return of[i].FromCommit.Summary() }
		send := func(i int) measure.Summary { return of[i].FromSend.Summary() }
		name := "single item by " + string(by)
		rows = append(rows,
			r.compare(name+", commit to hand, p50", len(of), p50(commit), r.tripAndClaim(p50), tripAndClaim, atMost(1.5)),
			// The trip begins when it is sent, so this is the strict reading of the same goal.
			r.compare("  the enqueue included, p50", len(of), p50(send), r.tripAndClaim(p50), tripAndClaim, atMost(1.5)),
			r.compare("  commit to hand, p95", len(of), p95(commit), r.tripAndClaim(p95), tripAndClaim, noGoal),
			r.compare("  commit to hand, p99", len(of), p99(commit), r.tripAndClaim(p99), tripAndClaim, under(5*time.Millisecond)),
			r.compare("  commit to hand, max", len(of), longest(commit), nil, "", noGoal))
	}
	return rows
}

func (r *results) pairRows() []row {
	n := len(r.Pairs)
	if n == 0 {
		return nil
	}
	first := func(i int) measure.Summary { return r.Pairs[i].First.FromCommit.Summary() }
	second := func(i int) measure.Summary { return r.Pairs[i].Second.FromCommit.Summary() }
	return []row{
		r.compare("second item 1..200 ms later, commit to hand, p50", n, p50(second), p50(first), " (first items)", atMost(1.2)),
		r.compare("  p95", n, p95(second), p95(first), " (first items)", noGoal),
		r.compare("  max", n, longest(second), longest(first), " (first items)", noGoal),
	}
}

func (r *results) timerRows() (rows []row) {
	for _, group := range []struct {
		name string
		of   func(*measure.TimersResult) measure.Samples
	}{
		{"timers, scheduled before the start", func(t *measure.TimersResult) measure.Samples { return t.Before }},
		{"timers, scheduled by others", func(t *measure.TimersResult) measure.Samples { return t.Other }},
		{"timers, the node's own", func(t *measure.TimersResult) measure.Samples { return t.Own }},
	} {
		n := len(r.Timers)
		if n == 0 {
			break
		}
		late := func(i int) measure.Summary { return group.of(r.Timers[i]).Summary() }
		rows = append(rows,
			r.compare(group.name+", lateness, p50", n, p50(late), r.sleepAndClaim(p50), sleepAndClaim, noGoal),
			r.compare("  lateness, p99", n, p99(late), r.sleepAndClaim(p99), sleepAndClaim, under(5*time.Millisecond)),
			r.compare("  earliest", n, func(i int) time.Duration { return late(i).Min }, nil, "", noGoal))
	}
	return rows
}

func (r *results) redeliveryRows() []row {
	n := len(r.Redelivery)
	if n == 0 {
		return nil
	}
	late := func(i int) measure.Summary { return r.Redelivery[i].Lateness.Summary() }
	return []row{
		r.compare("redelivery after kill -9, past the lock timeout, p50", n, p50(late), r.sleepAndClaim(p50), sleepAndClaim, noGoal),
		r.compare("  max", n, longest(late), nil, "", under(50*time.Millisecond)),
	}
}

func (r *results) restartRows() []row {
	n := len(r.Restarts)
	if n == 0 {
		return nil
	}
	first, lost := r.Restarts[0], 0
	for _, of := range r.Restarts {
		lost += of.Lost
	}
	summary := func(f func(*measure.RestartsResult) measure.Samples) func(int) measure.Summary {
		return func(i int) measure.Summary { return f(r.Restarts[i]).Summary() }
	}
	calm := summary(func(of *measure.RestartsResult) measure.Samples { return of.Calm })
	rolling := summary(func(of *measure.RestartsResult) measure.Samples { return of.Rolling })
	beyond := summary(func(of *measure.RestartsResult) measure.Samples {
		var beyond measure.Samples
		for _, back := range of.Again {
			beyond = append(beyond, back-of.LockTimeout)
		}
		return beyond
	})
	return []row{
		r.compare(fmt.Sprintf("%d processes restarted under load, commit to handler, p50", first.Processes), n, p50(rolling), p50(calm), " (no restart)", noGoal),
		r.compare("  the longest", n, longest(rolling), longest(calm), " (no restart)", under(first.Handler+100*time.Millisecond)),
		r.compare(fmt.Sprintf("one of %d killed under load, its items in hand again, past the lock timeout, the longest", first.Processes), n,
			longest(beyond), nil, "", under(50*time.Millisecond)),
		{measure: "  lost", figure: fmt.Sprint(lost), goal: "0", met: lost == 0},
	}
}

func (r *results) burstRows() (rows []row) {
	burst := func(name string, of []*measure.BurstResult) {
		if len(of) == 0 {
			return
		}
		var figures, bare, ratios, looks, tokens []float64
		for i, b := range of {
			figures = append(figures, b.PerSecond())
			bare = append(bare, float64(b.Items)/r.BareBurst[i].Seconds())
			ratios = append(ratios, figures[i]/bare[i])
			looks = append(looks, float64(b.Looks))
			tokens = append(tokens, float64(b.TokenCount()))
		}
		rows = append(rows, row{
			measure:  fmt.Sprintf("burst of %d, %s: items/s", of[0].Items, name),
			figure:   fmt.Sprintf("%.0f", measure.Median(figures)),
			baseline: fmt.Sprintf("%.0f (bare table, filled before)", measure.Median(bare)),
			ratio:    fmt.Sprintf("%.2fx", measure.Median(ratios)),
		}, row{
			measure: "  wake-ups, queries for work",
			figure:  fmt.Sprintf("%.0f, %.0f", measure.Median(tokens), measure.Median(looks)),
		})
	}
	if len(r.SmallBurst) > 0 {
		b := r.SmallBurst[0]
		wakes := measure.Median(each(r.SmallBurst, func(b *measure.BurstResult) float64 { return float64(b.TokenCount()) }))
		looks := measure.Median(each(r.SmallBurst, func(b *measure.BurstResult) float64 { return float64(b.Looks) }))
		rows = append(rows, row{
			measure: fmt.Sprintf("burst of %d on 4 dispatchers, one by one: wake-ups", b.Items),
			figure:  fmt.Sprintf("%.0f", wakes), baseline: fmt.Sprintf("%.0f queries", looks), goal: "<= 10", met: wakes <= 10,
		})
	}
	burst("enqueued while 8 dispatchers wait", r.Burst)
	burst("enqueued before", r.Prefilled)
	return rows
}

func (r *results) stressRows() []row {
	if len(r.Stress) == 0 {
		return nil
	}
	var pushed, polled, ratios, pushedLooks, polledLooks []float64
	for i, push := range r.Stress {
		poll := r.Polled[i]
		pushed, polled = append(pushed, push.PerSecond()), append(polled, poll.PerSecond())
		ratios = append(ratios, push.PerSecond()/poll.PerSecond())
		pushedLooks = append(pushedLooks, float64(push.Looks)/float64(len(push.Completed)))
		polledLooks = append(polledLooks, float64(poll.Looks)/float64(len(poll.Completed)))
	}
	byPolling := fmt.Sprintf(" (polling each %v)", shortPoll)
	took := func(of []*measure.StressResult) func(int) measure.Summary {
		return func(i int) measure.Summary { return of[i].Completed.Summary() }
	}
	return []row{
		{
			measure:  "stress, instances of 5 tasks: completed/s",
			figure:   fmt.Sprintf("%.1f", measure.Median(pushed)),
			baseline: fmt.Sprintf("%.1f", measure.Median(polled)) + byPolling,
			ratio:    fmt.Sprintf("%.2fx", measure.Median(ratios)),
			goal:     ">= 1.0x", met: measure.Median(ratios) >= 1,
		},
		r.compare("  start to completion, p50", len(r.Stress), p50(took(r.Stress)), p50(took(r.Polled)), byPolling, noGoal),
		r.compare("  p99", len(r.Stress), p99(took(r.Stress)), p99(took(r.Polled)), byPolling, noGoal),
		{
			measure:  "  queries for work per instance",
			figure:   fmt.Sprintf("%.1f", measure.Median(pushedLooks)),
			baseline: fmt.Sprintf("%.1f", measure.Median(polledLooks)) + byPolling,
		},
	}
}

func (r *results) historyRows() []row {
	n := len(r.Histories)
	if n == 0 {
		return nil
	}
	of := func(turns func(*measure.HistoriesResult) measure.Samples) func(int) measure.Summary {
		return func(i int) measure.Summary { return turns(r.Histories[i]).Summary() }
	}
	short := of(func(h *measure.HistoriesResult) measure.Samples { return h.Short })
	long := of(func(h *measure.HistoriesResult) measure.Samples { return h.Long })
	read := of(func(h *measure.HistoriesResult) measure.Samples { return h.LongRead })
	base := fmt.Sprintf(" (%d events)", r.Histories[0].ShortEvents)
	events := r.Histories[0].LongEvents
	return []row{
		r.compare(fmt.Sprintf("turn with %d events, from the cache, p50", events), n, p50(long), p50(short), base, atMost(2)),
		r.compare("  p95", n, p95(long), p95(short), base, noGoal),
		r.compare("  read each time, p50", n, p50(read), p50(short), base, noGoal),
	}
}

func (r *results) safetyNet() (net measure.SafetyNet) {
	for _, s := range r.Idle {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Singles {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Pairs {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Timers {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Redelivery {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Burst {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Stress {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Prefilled {
		net = net.Plus(s.Net)
	}
	for _, s := range r.SmallBurst {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Nodes {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Events {
		net = net.Plus(s.Net)
	}
	for _, s := range r.Namespaces {
		net = net.Plus(s.Served.Net).Plus(s.Retired.Net)
	}
	return net
}

// perRound is a figure of each round.
type perRound func(round int) time.Duration

// quantile takes one figure of each round's summary.
type quantile func(func(round int) measure.Summary) perRound

func p50(of func(int) measure.Summary) perRound {
	return func(i int) time.Duration { return of(i).P50 }
}

func p95(of func(int) measure.Summary) perRound {
	return func(i int) time.Duration { return of(i).P95 }
}

func p99(of func(int) measure.Summary) perRound {
	return func(i int) time.Duration { return of(i).P99 }
}

func longest(of func(int) measure.Summary) perRound {
	return func(i int) time.Duration { return of(i).Max }
}

// tripAndClaim is what it takes at the least to wake somebody, the producer's commit included, and to claim.
func (r *results) tripAndClaim(q quantile) perRound {
	trip := q(func(i int) measure.Summary { return r.Baseline[i].Trip.FromSend.Summary() })
	claim := q(func(i int) measure.Summary { return r.Baseline[i].Claim.Summary() })
	return func(i int) time.Duration { return trip(i) + claim(i) }
}

// sleepAndClaim is what it takes at the least to meet an instant and to claim.
func (r *results) sleepAndClaim(q quantile) perRound {
	sleep := q(func(i int) measure.Summary { return r.Baseline[i].Sleep.Summary() })
	claim := q(func(i int) measure.Summary { return r.Baseline[i].Claim.Summary() })
	return func(i int) time.Duration { return sleep(i) + claim(i) }
}

// goal is judged by the median figure and the median ratio.
type goal struct {
	text string
	met  func(figure time.Duration, ratio float64) bool
}

var noGoal goal

func atMost(x float64) goal {
	return goal{fmt.Sprintf("<= %.1fx", x), func(_ time.Duration, ratio float64) bool { return ratio <= x }}
}

func under(d time.Duration) goal {
	return goal{fmt.Sprintf("< %v", d), func(figure time.Duration, _ float64) bool { return figure < d }}
}

// compare makes a row. A nil base means that there is nothing to compare with.
func (r *results) compare(name string, rounds int, figure, base perRound, baseName string, g goal) row {
	var figures, bases []time.Duration
	var ratios []float64
	for i := range rounds {
		figures = append(figures, figure(i))
		if base != nil {
			bases = append(bases, base(i))
			ratios = append(ratios, float64(figures[i])/float64(bases[i]))
		}
	}
	w := row{measure: name, figure: millis(measure.Median(figures)), goal: g.text}
	if base != nil {
		w.baseline = millis(measure.Median(bases)) + baseName
		w.ratio = fmt.Sprintf("%.2fx", measure.Median(ratios))
	}
	if g.met != nil {
		w.met = g.met(measure.Median(figures), measure.Median(ratios))
	}
	return w
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

// printTable prints Markdown, in columns.
func printTable(to io.Writer, rows []row) {
	lines := [][]string{{"Measure", "Figure", "Baseline", "Ratio", "Goal"}, {"-", "-", "-", "-", "-"}}
	for _, r := range rows {
		verdict := ""
		switch {
		case r.goal == "":
		case r.met:
			verdict = ": met"
		default:
			verdict = ": **missed**"
		}
		name := r.measure
		if detail, ok := strings.CutPrefix(name, "  "); ok {
			name = "… " + detail
		}
		lines = append(lines, []string{name, r.figure, r.baseline, r.ratio, r.goal + verdict})
	}
	widths := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, cell := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for n, line := range lines {
		for i, cell := range line {
			fill := " "
			if n == 1 {
				fill = "-"
			}
			fmt.Fprint(to, "| ", cell, strings.Repeat(fill, widths[i]-utf8.RuneCountInString(cell)), " ")
		}
		fmt.Fprintln(to, "|")
	}
}
