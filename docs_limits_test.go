package pgwake_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are the numbers of docs/limits.md those of the code?

func TestDocs_Limits_NumbersAreThoseOfTheCode(t *testing.T) {
	t.Parallel()
	rows := make(map[string]string) // by the first column
	for line := range strings.Lines(readFile(t, "docs/limits.md")) {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			rows[strings.TrimSpace(cells[1])] = strings.TrimSpace(cells[2])
		}
	}
	n := newNode(t, nil)
	ofSQL := func(expression string) int { return int(query[int64](t, n, `SELECT (`+expression+`)::bigint`)[0]) }
	for _, limit := range []struct {
		row  string // begins so
		unit int
		name string
		most int
	}{
		{"a payload: input", 1 << 20, "MiB", n.MaxPayload()},
		{"key-value pairs of an instance", 1 << 20, "MiB", pgwake.MaxKVBytes},
		{"arrays and objects", 1, "", pgwake.MaxDepth},
		{"names, ids", 1, "bytes", pgwake.MaxNameLength},
		{"headers of an item", 1 << 10, "KiB", pgwake.MaxHeaderBytes},
		{"namespaces", 1, "", ofSQL("max_namespaces()")},
		{"items of one `FetchWorkItems`", 1, "", pgwake.MaxFetch},
		{"a definition of a task", 1 << 20, "MiB", taskgraph.MaxDefinitionSize},
		{"a definition of a task", 1, "steps", taskgraph.MaxSteps},
		{"a definition of a task", 1, "dependencies", taskgraph.MaxDependencies},
		{"steps of a task", 1, "", taskgraph.MaxSteps},
		{"tasks of one `SubmitMany`", 1, "", taskgraph.MaxSubmissions},
		{"why somebody has cancelled", 1 << 10, "KiB", taskgraph.MaxReasonLength},
		{"of these, shorter", 1, "", taskgraph.MaxTagLength},
	} {
		number := regexp.MustCompile(`(\d)(\d{3})$`).ReplaceAllString(fmt.Sprint(limit.most/limit.unit), "$1,$2")
		text := regexp.MustCompile(`\b` + number + `\b ?` + limit.name)
		found := false
		for row, most := range rows {
			if strings.HasPrefix(row, limit.row) {
				found = true
				require.Regexp(t, text, most, row)
			}
		}
		require.True(t, found, limit.row)
	}
	for most, refused := range map[int]bool{100 << 20: false, 100<<20 + 1: true} {
		_, err := pgwake.Open(t.Context(), "postgres://localhost:1/none?connect_timeout=1", &pgwake.Config{MaxPayload: most})
		require.Equal(t, refused, strings.Contains(fmt.Sprint(err), "MaxPayload"))
		_, err = eventbus.New(t.Context(), n.Provider, &eventbus.Config{MaxPayload: most})
		require.Equal(t, refused, strings.Contains(fmt.Sprint(err), "MaxPayload"))
	}
}
