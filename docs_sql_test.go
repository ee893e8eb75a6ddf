package pgwake_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: is docs/sql.md what the functions say of themselves? `make docs` writes it anew.

// sqlSections are the migrations with functions for everybody, and the headings of the page.
var sqlSections = [][2]string{
	{"00002_notify.sql", "Queues"},
	{"00003_worker.sql", "Work items"},
	{"00004_orchestrator.sql", "Messages, turns and history"},
	{"00005_state.sql", "State of an instance"},
	{"00006_management.sql", "Instances"},
	{"00007_dead_letters.sql", "Dead letters and the archive"},
	{"00008_limits.sql", "Limits"},
}

var (
	sqlFunction = regexp.MustCompile(`(?s)CREATE FUNCTION (\w+)(\([^$]*?)\nLANGUAGE`)
	sqlComment  = regexp.MustCompile(`COMMENT ON FUNCTION (\w+) IS '((?:[^']|'')*)';`)
)

// sqlReference returns the written part of docs/sql.md.
func sqlReference(t *testing.T) string {
	t.Helper()
	var page strings.Builder
	for _, section := range sqlSections {
		source, err := os.ReadFile(filepath.Join("migrations", section[0]))
		require.NoError(t, err)
		comments := make(map[string]string)
		for _, m := range sqlComment.FindAllStringSubmatch(string(source), -1) {
			comments[m[1]] = strings.ReplaceAll(m[2], "''", "'")
		}
		fmt.Fprintf(&page, "\n## %s\n", section[1])
		for _, m := range sqlFunction.FindAllStringSubmatch(string(source), -1) {
			if name, comment := m[1], comments[m[1]]; !strings.HasPrefix(comment, "Internal: ") {
				fmt.Fprintf(&page, "\n### %s\n\n```sql\n%s%s\n```\n\n%s", name, name, m[2], wrapped(comment))
			}
		}
	}
	return page.String()
}

// wrapped breaks a paragraph into lines of at most 115 characters.
func wrapped(text string) string {
	var page strings.Builder
	length := 0
	for i, word := range strings.Fields(text) {
		switch length += 1 + len(word); {
		case i == 0:
			length--
		case length > 115:
			page.WriteString("\n")
			length = len(word)
		default:
			page.WriteString(" ")
		}
		page.WriteString(word)
	}
	return page.String() + "\n"
}

func TestDocs_SQL_ListsEveryFunctionThatIsNotInternalAsItIs(t *testing.T) {
	t.Parallel()
	const path, marker = "docs/sql.md", "<!-- Written by make docs from the comments of the functions: -->\n"
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	intro, reference, found := strings.Cut(string(page), marker)
	require.True(t, found)
	want := sqlReference(t)
	if os.Getenv("PGWAKE_WRITE_DOCS") != "" {
		require.NoError(t, os.WriteFile(path, []byte(intro+marker+want), 0o644))
		return
	}
	require.True(t, want == reference, "docs/sql.md is out of date: make docs")

	var listed []string
	for _, h := range heading.FindAllStringSubmatch(reference, -1) {
		if strings.HasPrefix(h[0], "### ") {
			listed = append(listed, h[1])
		}
	}
	n := newNode(t, nil)
	require.ElementsMatch(t, query[string](t, n, `SELECT proname::text FROM pg_proc
		WHERE pronamespace = current_schema()::regnamespace AND obj_description(oid, 'pg_proc') NOT LIKE 'Internal: %'`), listed)

	for _, m := range regexp.MustCompile(`"(PW\d+)"`).FindAllStringSubmatch(readFile(t, "errors.go"), -1) {
		require.Contains(t, intro, "`"+m[1]+"`")
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(content)
}
