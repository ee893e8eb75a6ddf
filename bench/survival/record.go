package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
)

// This file answers: what is kept of a run?

// record is the file with the results: of each scenario its latest rounds.
type record struct {
	Scenarios map[string][]*result `json:"scenarios"`
}

// readRecord is an empty one if there is no file.
func readRecord(file string) (*record, error) {
	r := &record{Scenarios: map[string][]*result{}}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(text, r)
	}
	if err != nil {
		return nil, fmt.Errorf("read the results: %w", err)
	}
	return r, nil
}

// print writes what a round came to.
func (r *result) print(to io.Writer, round int) {
	fmt.Fprintf(to, "%s, round %d: %d items, lost %d, left %d, again %d; enqueues refused %d, unknown %d\n",
		r.Scenario, round, r.Items, r.Lost, r.Left, r.Duplicates, r.Refused, r.Unknown)
	for _, p := range r.Phases {
		s := p.Pickup.Summary()
		fmt.Fprintf(to, "  %-8s %6.1f items/s of %.1f, pickup p50 %s, p99 %s, at most %s; dead tuples %d; finds by %s\n",
			p.Name, p.PerSecond, p.Enqueued, millis(s.P50), millis(s.P99), millis(s.Max), p.Dead, counted(p.Finds))
	}
	if r.Downtime > 0 {
		fmt.Fprintf(to, "  away for %s; first item %s, rate back %s\n", millis(r.Downtime), later(r.FirstItem), later(r.RateBack))
	}
	if s := r.Soaked; s != nil {
		fmt.Fprintf(to, "  %v, from due to in hand p50 %s, p99 %s, at most %s\n", s.Length, millis(s.P50), millis(s.P99), millis(s.Max))
	}
	if len(r.Counts) > 0 {
		fmt.Fprintf(to, "  %s\n", counted(r.Counts))
	}
	for _, broken := range r.Broken {
		fmt.Fprintf(to, "  BROKEN: %s\n", broken)
	}
}

// counted lists what there is most of first.
func counted[N int | int64](counts map[string]N) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return int(counts[b] - counts[a])
		}
		return strings.Compare(a, b)
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s: %d", name, counts[name])
	}
	return strings.Join(names, ", ")
}
