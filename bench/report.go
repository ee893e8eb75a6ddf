package main

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/pgwake/pgwake/bench/keep"
)

// This file answers: how does a run look as text, on the terminal and in the documentation?

// print writes what was run on what, how everybody was set, and the table.
func (r *record) print(to io.Writer) {
	fmt.Fprintf(to, "Commit %s; PostgreSQL %s, %s, %s, %d CPUs; %s; rounds: %d; took %v.\n\n",
		r.Commit, r.Postgres, r.Platform, r.Go, r.CPUs, r.Started.UTC().Format("2006-01-02"), r.Rounds, r.Finished.Sub(r.Started).Round(time.Second))
	for _, line := range r.Settings {
		fmt.Fprintf(to, "- %s\n", line)
	}
	fmt.Fprintln(to)
	printTable(to, r.Results.rows())
}

// writeDocs replaces the results in a Markdown file, and the charts in images/benchmarks beside it.
func (r *record) writeDocs(file string) error {
	return keep.Results(file, func() (string, error) {
		images := filepath.Join("images", "benchmarks")
		charts, err := r.Results.writeCharts(filepath.Join(filepath.Dir(file), images))
		if err != nil {
			return "", err
		}
		var b strings.Builder
		r.print(&b)
		for _, chart := range charts {
			name := filepath.Base(chart)
			fmt.Fprintf(&b, "\n![%s](%s)\n", strings.TrimSuffix(name, ".svg"), filepath.ToSlash(filepath.Join(images, name)))
		}
		return b.String(), nil
	})
}
