package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// This file answers: what came of many seeds?
//
// A line of a results file is one run. The tables of docs/reliability.md are made of such lines.

// result is a line.
type result struct {
	Seed       uint64                   `json:"seed"`
	Commit     string                   `json:"commit"`
	At         time.Time                `json:"at"`
	Command    string                   `json:"command"`
	Verdict    string                   `json:"verdict"` // passed, failed, or error: the run itself did not come to its end
	Conditions string                   `json:"conditions"`
	Faults     map[string]int           `json:"faults,omitempty"`    // by kind
	Recovered  map[string]time.Duration `json:"recovered,omitempty"` // worst by kind, ns
	Opening    time.Duration            `json:"opening,omitempty"`   // of processes that had to begin anew after the faults, at most, ns
	Stalled    time.Duration            `json:"stalled,omitempty"`   // by how much the bounds of rounds grew because the machine stalled, ns
	Items      int                      `json:"items,omitempty"`     // and messages, tasks and events
	Violations []string                 `json:"violations,omitempty"`
	Error      string                   `json:"error,omitempty"`
}

const (
	passed  = "passed"
	failed  = "failed"
	errored = "error"
)

const shownViolations = 5

// resultOf is what a run came to. v is nil if it came to no verdict.
func resultOf(o options, v *verdict, err error) result {
	r := result{Seed: o.seed, Commit: commit(), At: time.Now().UTC().Truncate(time.Second), Command: o.String(), Verdict: passed}
	r.Conditions = o.conditions().String()
	if v != nil {
		r.Faults, r.Recovered, r.Items = v.faults, v.recovered, v.items+v.graphs.tasks+v.bus.events
		r.Opening, r.Stalled = v.opening, v.stalled
		r.Conditions = v.conditions.String()
		r.Violations = v.violations[:min(len(v.violations), shownViolations)]
	}
	switch {
	case v != nil && v.failed():
		r.Verdict = failed
	case err != nil || v == nil:
		r.Verdict = errored
	}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}

// commit is what this program was built from.
func commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	of := map[string]string{}
	for _, s := range info.Settings {
		of[s.Key] = s.Value
	}
	revision := cmp.Or(of["vcs.revision"], "unknown")
	revision = revision[:min(len(revision), 10)]
	if of["vcs.modified"] == "true" {
		revision += ", changed"
	}
	return revision
}

// add appends the line to a file. Several processes may do so at the same time.
func (r result) add(path string) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// runSeeds runs one seed after the other, and says how many did not pass.
func runSeeds(ctx context.Context, o options, first, last uint64, results string, out io.Writer) (bad int, err error) {
	for o.seed = first; o.seed <= last && ctx.Err() == nil; o.seed++ {
		v, err := run(ctx, o, out)
		if ctx.Err() != nil {
			break
		}
		if v != nil {
			fmt.Fprint(out, v)
		}
		r := resultOf(o, v, err)
		if r.Verdict != passed {
			bad++
			fmt.Fprintf(out, "seed %d: %s: %s\n", r.Seed, r.Verdict, r.Error)
		}
		if err := r.add(results); err != nil {
			return bad, err
		}
	}
	return bad, ctx.Err()
}

// seedsOf reads FROM-TO.
func seedsOf(text string) (first, last uint64, err error) {
	if _, err = fmt.Sscanf(text, "%d-%d", &first, &last); err != nil || first == 0 || last < first || fmt.Sprintf("%d-%d", first, last) != text {
		return 0, 0, fmt.Errorf("%q is not FROM-TO, as in 1-100", text)
	}
	return first, last, nil
}

// readResults reads lines. All of them count: a seed that failed, and passed when it was run again, is there with both.
func readResults(from io.Reader) (all []result, err error) {
	lines := bufio.NewScanner(from)
	for lines.Buffer(nil, 1<<20); lines.Scan(); {
		var r result
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%.80q: %w", lines.Text(), err)
		}
		all = append(all, r)
	}
	slices.SortStableFunc(all, func(a, b result) int { return cmp.Or(cmp.Compare(a.Seed, b.Seed), a.At.Compare(b.At)) })
	return all, lines.Err()
}

// report writes the tables of a page anew, between the comments that mark them.
func report(results, page string) error {
	f, err := os.Open(results)
	if err != nil {
		return err
	}
	defer f.Close()
	all, err := readResults(f)
	if err != nil {
		return fmt.Errorf("%s: %w", results, err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	made := string(text)
	for _, table := range []struct{ name, text string }{{"seeds", seedsTable(all)}, {"recovery", recoveryTable(all)}} {
		if made, err = replaced(made, table.name, table.text); err != nil {
			return fmt.Errorf("%s: %w", page, err)
		}
	}
	return os.WriteFile(page, []byte(made), 0o644)
}

// replaced replaces what is between two comments.
func replaced(page, name, text string) (string, error) {
	begin, end := "<!-- "+name+" -->\n", "<!-- /"+name+" -->"
	head, rest, found := strings.Cut(page, begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		return "", fmt.Errorf("no comments %q and %q", begin, end)
	}
	return head + begin + text + end + tail, nil
}

func seedsTable(all []result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| Seed | Commit | Verdict | Items, tasks, events | Faults | Worst recovery | Began anew in | Bounds grew by | Conditions |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		faults, worst, of := 0, time.Duration(0), ""
		for _, n := range r.Faults {
			faults += n
		}
		for _, kind := range slices.Sorted(maps.Keys(r.Recovered)) {
			if took := r.Recovered[kind]; took > worst {
				worst, of = took, kind
			}
		}
		fmt.Fprintf(&b, "| %d | %s | %s | %d | %d of %d kinds | %s, %s | %s | %s | %s |\n",
			r.Seed, r.Commit, r.Verdict, r.Items, faults, len(r.Faults), inSeconds(worst), of, inSeconds(r.Opening), inSeconds(r.Stalled), r.Conditions)
	}
	return b.String()
}

// recoveryTable has every kind of fault, whether there were any or not.
func recoveryTable(all []result) string {
	happened, alone, worst := map[string]int{}, map[string]int{}, map[string]time.Duration{}
	for _, r := range all {
		for kind, n := range r.Faults {
			happened[kind] += n
		}
		for kind, took := range r.Recovered {
			alone[kind]++
			worst[kind] = max(worst[kind], took)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| Fault | How often | Runs with it alone in a round | Worst recovery then |\n|---|---|---|---|\n")
	row := func(kind string) {
		took := "–"
		if alone[kind] > 0 {
			took = inSeconds(worst[kind])
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %s |\n", kind, happened[kind], alone[kind], took)
	}
	for _, k := range kinds {
		row(k.name)
	}
	row(mixed)
	return b.String()
}

func inSeconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
