package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestResult_SaysWhatARunCameTo(t *testing.T) {
	o := options{seed: 7, length: time.Minute, nodes: 4}
	v := &verdict{options: o, items: 3, opening: time.Minute, stalled: 1500 * time.Millisecond, faults: map[string]int{"reset": 2}, recovered: map[string]time.Duration{"reset": time.Second}}
	r := resultOf(o, v, nil)
	assert.Equal(t, passed, r.Verdict)
	assert.Equal(t, 3, r.Items)
	assert.Equal(t, v.faults, r.Faults)
	assert.Equal(t, v.recovered, r.Recovered)
	assert.Equal(t, v.opening, r.Opening)
	assert.Equal(t, v.stalled, r.Stalled)
	assert.Contains(t, v.String(), "the bounds of the rounds grew by 1.5s in all")
	v.violations = make([]string, 100)
	r = resultOf(o, v, nil)
	assert.Equal(t, failed, r.Verdict)
	assert.Len(t, r.Violations, shownViolations)
	r = resultOf(o, nil, errors.New("no room"))
	assert.Equal(t, errored, r.Verdict)
	assert.Equal(t, "no room", r.Error)
}

func TestReport_WritesTheTablesAnew(t *testing.T) {
	dir := t.TempDir()
	results, page := filepath.Join(dir, "chaos.jsonl"), filepath.Join(dir, "page.md")
	for _, r := range []result{
		{Seed: 12, Commit: "c", Command: "12", Verdict: failed, Faults: map[string]int{"reset": 1}, Recovered: map[string]time.Duration{"reset": 2 * time.Second}},
		{Seed: 7, Commit: "c", Command: "7", Verdict: failed},
		{Seed: 7, Commit: "c", Command: "7", Verdict: passed, Faults: map[string]int{"reset": 1, "refuse": 2}, Recovered: map[string]time.Duration{"reset": time.Second},
			Opening: 3 * time.Second, Stalled: 2500 * time.Millisecond},
	} {
		require.NoError(t, r.add(results))
	}
	require.NoError(t, os.WriteFile(page, []byte("A\n<!-- recovery -->\nold\n<!-- /recovery -->\nB\n<!-- seeds -->\n<!-- /seeds -->\nC\n"), 0o644))
	require.NoError(t, report(results, page))
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	made := string(text)
	assert.NotContains(t, made, "old")
	assert.Contains(t, made, "| reset | 2 | 2 | 2.00 s |\n")
	assert.Contains(t, made, "| refuse | 2 | 0 | – |\n")
	seven, twelve := strings.Index(made, "| 7 | c | passed | 0 | 3 of 2 kinds | 1.00 s, reset | 3.00 s | 2.50 s |"), strings.Index(made, "| 12 | c | failed |")
	assert.Greater(t, seven, strings.Index(made, "| 7 | c | failed |"))
	assert.Greater(t, twelve, seven)
	assert.Contains(t, made, "| 7 | c | failed |", "a seed that passes in the end has failed all the same")
	require.NoError(t, report(results, page))
	again, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Equal(t, made, string(again))

	require.NoError(t, os.WriteFile(page, []byte("nothing to replace"), 0o644))
	assert.Error(t, report(results, page))
}

func TestSeedsOf_WhatIsNoRange_IsAnError(t *testing.T) {
	first, last, err := seedsOf("3-100")
	require.NoError(t, err)
	assert.Equal(t, []uint64{3, 100}, []uint64{first, last})
	for _, bad := range []string{"3", "5-3", "0-3", "3-x", "3-5 "} {
		_, _, err := seedsOf(bad)
		assert.Error(t, err, bad)
	}
}

// What is published is of one product, which passed with a hundred seeds, from the first on, for three minutes each and without slack, and
// recovered from each kind of fault alone. A run that failed
// is published as well, and so keeps the count from being complete until what it found is mended, and all have passed anew.
func TestReport_PublishedSeedsPassedOnOneProduct(t *testing.T) {
	f, err := os.Open("../docs/reliability-seeds.jsonl")
	require.NoError(t, err)
	defer f.Close()
	all, err := readResults(f)
	require.NoError(t, err)
	require.Len(t, all, 100)
	faults, items := 0, 0
	for i, r := range all {
		assert.EqualValues(t, i+1, r.Seed)
		assert.Equal(t, all[0].Commit, r.Commit, "seed %d", r.Seed)
		assert.Equal(t, passed, r.Verdict, "seed %d", r.Seed)
		assert.Equal(t, fmt.Sprintf("go run ./chaos -seed %d -for 3m0s -nodes 2 -rest 4", r.Seed), r.Command)
		assert.NotContains(t, r.Commit, "changed")
		items += r.Items
		for _, n := range r.Faults {
			faults += n
		}
	}
	for _, k := range kinds {
		assert.True(t, slices.ContainsFunc(all, func(r result) bool {
			_, alone := r.Recovered[k.name]
			return alone
		}), k.name)
	}
	for _, page := range []string{"../docs/reliability.md", "../README.md"} {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, said := range []string{fmt.Sprintf("%d runs", len(all)), thousands(faults), thousands(items)} {
			assert.Contains(t, string(text), said, page)
		}
	}
}

// thousands is a number below a million as pages have it.
func thousands(n int) string { return fmt.Sprintf("%d,%03d", n/1000, n%1000) }

// The page shows what is published, and nothing else.
func TestReport_PublishedTablesAreThoseOfTheLines(t *testing.T) {
	const published = "../docs/reliability.md"
	was, err := os.ReadFile(published)
	require.NoError(t, err)
	page := filepath.Join(t.TempDir(), "page.md")
	require.NoError(t, os.WriteFile(page, was, 0o644))
	require.NoError(t, report("../docs/reliability-seeds.jsonl", page))
	is, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Equal(t, string(was), string(is), "make chaos-report was not run")
}
