package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: how do the results look on the page?

// The pages, of which one has what came of each scenario, and the other the details.
const (
	tablePage   = "reliability.md"
	detailsPage = "reliability-scenarios.md"
)

// mostTold is how many broken promises of a scenario are told.
const mostTold = 5

// all are the results, in the order of the scenarios. The pages have those of each.
func (r *record) all() (all []*result, err error) {
	for _, s := range scenarios {
		if len(r.Scenarios[s.name]) == 0 {
			return nil, fmt.Errorf("there are no results of %s for the pages: run that as well", s.name)
		}
		all = append(all, r.Scenarios[s.name]...)
	}
	return all, nil
}

// table is what came of each scenario, in Markdown, beside what is said of others.
func (r *record) table() (string, error) {
	all, err := r.all()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n\n", setting(all))
	fmt.Fprintln(&b, "| Scenario, and how long its trouble lasts | items/s | p50 / p99 before | during | after | recovery | lost | twice | dead tuples, before / during | what is said of others |")
	fmt.Fprintln(&b, "|---|---|---|---|---|---|---|---|---|---|")
	for _, s := range scenarios {
		results := r.Scenarios[s.name]
		if s.once {
			fmt.Fprintf(&b, "| [%s](%s#%s) | | | %s | | | %s | | | %s |\n", s.name, detailsPage, s.name, soakedCell(results[0]), lost(results), others[s.name])
			continue
		}
		fmt.Fprintf(&b, "| [%s](%s#%s), %v | %s | %s | %s | %s | %s | %s | %d | %.0f / %.0f | %s |\n", s.name, detailsPage, s.name, results[0].Trouble,
			rates(results), pickup(results, before), pickup(results, during), pickup(results, after), recovery(results), lost(results),
			median(results, func(r *result) int64 { return int64(r.Duplicates) }), median(results, func(r *result) float64 { return float64(r.of(before).Dead) }),
			median(results, func(r *result) float64 { return float64(r.of(during).Dead) }), others[s.name])
	}
	return b.String(), nil
}

// details are the results in Markdown, a section of each scenario.
func (r *record) details() (string, error) {
	if _, err := r.all(); err != nil {
		return "", err
	}
	var sections []string
	for _, s := range scenarios {
		results := r.Scenarios[s.name]
		section := fmt.Sprintf("### %s\n\n%s. The promise, of every round: nothing lost, and %s.\n", s.name, upper(s.what), s.promise)
		for _, line := range details(results) {
			section += fmt.Sprintf("- %s\n", line)
		}
		sections = append(sections, section)
	}
	return strings.Join(sections, "\n"), nil
}

// setting is on what the results were taken.
func setting(all []*result) string {
	var versions, commits []string
	var first, last time.Time
	for _, r := range all {
		if r.Postgres != "" && !slices.Contains(versions, r.Postgres) {
			versions = append(versions, r.Postgres)
		}
		if !slices.Contains(commits, r.Commit) {
			commits = append(commits, r.Commit)
		}
		if first.IsZero() || r.Started.Before(first) {
			first = r.Started
		}
		if r.Started.After(last) {
			last = r.Started
		}
	}
	slices.Sort(versions)
	const day = "2006-01-02"
	when := first.UTC().Format(day)
	if to := last.UTC().Format(day); to != when {
		when += " to " + to
	}
	busiest, busy := slices.MaxFunc(all, func(a, b *result) int { return cmp.Compare(a.Busy, b.Busy) }).Busy, ""
	if busiest > float64(all[0].CPUs) {
		busy = fmt.Sprintf(". **Others were at work on the machine**, with load averages of up to %.0f, so that these figures say little of speed: take them again on a quiet one", busiest)
	}
	return fmt.Sprintf("Commit %s. PostgreSQL %s, fsync on (but for the soak), %s, %d CPUs that the server, the nodes and the load share, %s%s",
		strings.Join(commits, ", "), strings.Join(versions, ", "), all[0].Platform, all[0].CPUs, when, busy)
}

func rates(results []*result) string {
	of := func(name string) float64 {
		return median(results, func(r *result) float64 { return r.of(name).PerSecond })
	}
	return fmt.Sprintf("%.0f / %.0f / %.0f", of(before), of(during), of(after))
}

func pickup(results []*result, name string) string {
	of := func(p func(measure.Summary) time.Duration) time.Duration {
		return median(results, func(r *result) time.Duration { return p(r.of(name).Pickup.Summary()) })
	}
	return millis(of(func(s measure.Summary) time.Duration { return s.P50 })) + " / " + millis(of(func(s measure.Summary) time.Duration { return s.P99 }))
}

func recovery(results []*result) string {
	if results[0].Downtime == 0 {
		return ""
	}
	return fmt.Sprintf("away for %s; first item %s, rate back %s",
		millis(median(results, func(r *result) time.Duration { return r.Downtime })),
		later(median(results, func(r *result) time.Duration { return r.FirstItem })),
		later(median(results, func(r *result) time.Duration { return r.RateBack })))
}

func later(d time.Duration) string {
	switch {
	case d < 0:
		return "never"
	case d == 0:
		return "at once"
	}
	return millis(d) + " later"
}

// lost is of all rounds together.
func lost(results []*result) string {
	items, lost := 0, 0
	for _, r := range results {
		items += r.Items
		lost += r.Lost
	}
	return fmt.Sprintf("%d of %d", lost, items)
}

func soakedCell(r *result) string {
	return fmt.Sprintf("%s / %s over %v", millis(r.Soaked.P50), millis(r.Soaked.P99), r.Soaked.Length)
}

// details are the lines beneath a scenario.
func details(results []*result) (lines []string) {
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if s := results[0].Soaked; s != nil {
		add("%d items and messages in %v; the latest was in hand %s after it was due", results[0].Items, s.Length, millis(s.Max))
	} else {
		add("Rounds: %d, at %d items/s.", len(results), results[0].Rate)
	}
	for _, p := range results[0].Phases {
		worst := median(results, func(r *result) time.Duration { return r.of(p.Name).Pickup.Summary().Max })
		line := fmt.Sprintf("%s: p50 / p99 of pickup %s, the longest %s", upper(p.Name), pickup(results, p.Name), millis(worst))
		if p.Name != before {
			ratio := func(of func(measure.Summary) time.Duration) float64 {
				return median(results, func(r *result) float64 {
					return float64(of(r.of(p.Name).Pickup.Summary())) / float64(max(of(r.of(before).Pickup.Summary()), 1))
				})
			}
			line += fmt.Sprintf("; %.1fx and %.1fx of before", ratio(func(s measure.Summary) time.Duration { return s.P50 }),
				ratio(func(s measure.Summary) time.Duration { return s.P99 }))
		}
		finds := map[string]int64{}
		for _, r := range results {
			for reason, n := range r.of(p.Name).Finds {
				finds[reason] += n
			}
		}
		add("%s. Queries that found work, by what made them: %s.", line, counted(finds))
	}
	refused, unknown, counts := 0, 0, map[string]int{}
	var broken []string
	for _, r := range results {
		refused, unknown = refused+r.Refused, unknown+r.Unknown
		for name, n := range r.Counts {
			counts[name] += n
		}
		broken = append(broken, r.Broken...)
	}
	if refused+unknown > 0 {
		add("Enqueues that failed and were repeated: %d; whose outcome nobody knows: %d.", refused, unknown)
	}
	if len(counts) > 0 {
		add("%s.", upper(counted(counts)))
	}
	if results[0].Soaked == nil && results[0].Report != "" {
		add("%s.", results[0].Report)
	}
	for i, b := range broken {
		if i == mostTold {
			add("And %d more.", len(broken)-i)
			break
		}
		add("**Broken**: %s.", b)
	}
	return lines
}

func median[N cmp.Ordered](results []*result, of func(*result) N) N {
	values := make([]N, len(results))
	for i, r := range results {
		values[i] = of(r)
	}
	slices.Sort(values)
	return measure.NearestRank(values, 50)
}

func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// millis is a duration in as many digits as mean something.
func millis(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d >= time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= 10*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}
