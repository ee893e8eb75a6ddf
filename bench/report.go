package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// This file answers: how does a run look as text, on the terminal and in the documentation?

// print writes what was run on what, how everybody was set, and the table.
func (r *record) print(to io.Writer) {
	fmt.Fprintf(to, "PostgreSQL %s, %s, %s, %d CPUs; %s; rounds: %d; took %v.\n\n",
		r.Postgres, r.Platform, r.Go, r.CPUs, r.Started.UTC().Format("2006-01-02"), r.Rounds, r.Finished.Sub(r.Started).Round(time.Second))
	for _, line := range r.Settings {
		fmt.Fprintf(to, "- %s\n", line)
	}
	fmt.Fprintln(to)
	printTable(to, r.Results.rows())
}

// The text between the marks is replaced by a run with -docs.
const (
	docsBegin = "<!-- results of a run: begin -->\n"
	docsEnd   = "<!-- results of a run: end -->\n"
)

// writeDocs replaces the results in a Markdown file, and the charts in images/benchmarks beside it.
func (r *record) writeDocs(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(text), docsBegin)
	_, after, ends := strings.Cut(rest, docsEnd)
	if !ok || !ends {
		return errors.New(file + " has no place for results: " + strings.TrimSpace(docsBegin) + " and " + strings.TrimSpace(docsEnd))
	}
	images := filepath.Join("images", "benchmarks")
	charts, err := r.Results.writeCharts(filepath.Join(filepath.Dir(file), images))
	if err != nil {
		return err
	}
	var b bytes.Buffer
	b.WriteString(before + docsBegin)
	r.print(&b)
	for _, chart := range charts {
		name := filepath.Base(chart)
		fmt.Fprintf(&b, "\n![%s](%s)\n", strings.TrimSuffix(name, ".svg"), filepath.ToSlash(filepath.Join(images, name)))
	}
	b.WriteString(docsEnd + after)
	return os.WriteFile(file, b.Bytes(), 0o644)
}
