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

// sqlPage is a page of docs with what the functions of a directory of migrations say of themselves.
type sqlPage struct {
	path, migrations string
	sections         [][2]string // files with functions for everybody, and the headings of the page
}

const sqlMarker = "<!-- Written by make docs from the comments of the functions: -->\n"

var providerSQL = sqlPage{"docs/sql.md", "migrations", [][2]string{
	{"00002_notify.sql", "Queues"},
	{"00003_worker.sql", "Work items"},
	{"00004_orchestrator.sql", "Messages, turns and history"},
	{"00005_state.sql", "State of an instance"},
	{"00006_management.sql", "Instances"},
	{"00007_dead_letters.sql", "Dead letters and the archive"},
	{"00008_limits.sql", "Limits"},
}}

var taskGraphSQL = sqlPage{"docs/sql-taskgraph.md", "taskgraph/migrations", [][2]string{
	{"00004_tasks.sql", "Tasks and steps"},
	{"00002_states.sql", "States"},
	{"00003_readiness.sql", "Readiness, dependencies and order"},
	{"00005_analytics.sql", "Health, analytics and what was when"},
	{"00006_messages.sql", "Settings, messages and channels for others"},
}}

var eventBusSQL = sqlPage{"docs/sql-eventbus.md", "eventbus/migrations", [][2]string{
	{"00004_emit.sql", "Emitting"},
	{"00002_groups.sql", "Groups"},
	{"00005_log.sql", "The log"},
	{"00009_schedules.sql", "Schedules"},
	{"00008_cron.sql", "Cron expressions"},
	{"00007_dead_letters.sql", "Dead letters"},
	{"00006_nodes.sql", "Nodes"},
	{"00001_tables.sql", "Upkeep"},
}}

var (
	sqlFunction = regexp.MustCompile(`(?s)CREATE FUNCTION (\w+)(\([^$]*?)\nLANGUAGE`)
	sqlComment  = regexp.MustCompile(`COMMENT ON FUNCTION (\w+) IS '((?:[^']|'')*)';`)
)

// reference returns the written part of the page.
func (p sqlPage) reference(t *testing.T) string {
	t.Helper()
	comments := make(map[string]string) // as the newest migration has them
	files, err := filepath.Glob(filepath.Join(p.migrations, "*.sql"))
	require.NoError(t, err)
	for _, file := range files { // sorted
		up, _, _ := strings.Cut(readFile(t, file), "\n-- +goose Down")
		for _, m := range sqlComment.FindAllStringSubmatch(up, -1) {
			comments[m[1]] = strings.ReplaceAll(m[2], "''", "'")
		}
	}
	var page strings.Builder
	for _, section := range p.sections {
		source := readFile(t, filepath.Join(p.migrations, section[0]))
		fmt.Fprintf(&page, "\n## %s\n", section[1])
		for _, m := range sqlFunction.FindAllStringSubmatch(source, -1) {
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

// check fails unless the page is up to date, and writes it anew if it is to. It returns what was written by hand, and which functions the
// page has.
func (p sqlPage) check(t *testing.T) (intro string, listed []string) {
	t.Helper()
	intro, reference, found := strings.Cut(readFile(t, p.path), sqlMarker)
	require.True(t, found)
	want := p.reference(t)
	if os.Getenv("PGWAKE_WRITE_DOCS") != "" {
		require.NoError(t, os.WriteFile(p.path, []byte(intro+sqlMarker+want), 0o644))
	} else {
		require.True(t, want == reference, p.path+" is out of date: make docs")
	}
	for _, h := range heading.FindAllStringSubmatch(want, -1) {
		if strings.HasPrefix(h[0], "### ") {
			listed = append(listed, h[1])
		}
	}
	return intro, listed
}

func TestDocs_SQLOfLayers_ListsEveryFunctionThatIsNotInternalAsItIs(t *testing.T) {
	t.Parallel()
	for _, page := range []sqlPage{taskGraphSQL, eventBusSQL} {
		_, listed := page.check(t)
		var public []string
		for _, section := range page.sections {
			for _, m := range sqlComment.FindAllStringSubmatch(readFile(t, filepath.Join(page.migrations, section[0])), -1) {
				if !strings.HasPrefix(m[2], "Internal: ") {
					public = append(public, m[1])
				}
			}
		}
		require.ElementsMatch(t, public, listed)
	}
}

func TestDocs_SQL_ListsEveryFunctionThatIsNotInternalAsItIs(t *testing.T) {
	t.Parallel()
	intro, listed := providerSQL.check(t)
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
