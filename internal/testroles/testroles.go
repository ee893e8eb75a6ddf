// Package testroles makes the roles of docs/security.md for tests: by the SQL that stands there, so that nobody copies what was never run.
package testroles

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
)

// The roles of the page.
const (
	Owner    = "pgwake_owner"
	Worker   = "pgwake_worker"
	Producer = "pgwake_producer"
	Reader   = "pgwake_reader"
)

var made atomic.Int64

// New makes a role like that of the page, for a schema with these layers ("taskgraph", "eventbus"), and returns its name, which needs no
// quotes. It goes when the test ends, with what it owns. It has no password: see URL.
func New(tb testing.TB, role, schema string, layers ...string) string {
	tb.Helper()
	name := fmt.Sprintf("%s_%d_%d", role, os.Getpid(), made.Add(1))
	testdb.Exec(tb, testdb.URL(tb), SQL(tb, role, name, schema, layers...))
	tb.Cleanup(func() { testdb.Exec(tb, testdb.URL(tb), "DROP OWNED BY "+name+" CASCADE; DROP ROLE "+name) })
	return name
}

var block = regexp.MustCompile("(?ms)^```sql\n(?:-- with package (\\w+)\n)?(.*?)^```$")

// SQL is what the page has for a role, with another name for it, and for the schema.
func SQL(tb testing.TB, role, name, schema string, layers ...string) string {
	tb.Helper()
	sql, err := Statements(page(tb), role, name, schema, layers...)
	if err != nil {
		tb.Fatal(err)
	}
	return sql
}

// Statements is SQL, of what the page is.
func Statements(page, role, name, schema string, layers ...string) (string, error) {
	quoted := pgx.Identifier{schema}.Sanitize()
	literal := "'" + strings.ReplaceAll(quoted, "'", "''") + "'"
	var all strings.Builder
	for _, found := range block.FindAllStringSubmatch(page, -1) {
		if layer, sql := found[1], found[2]; strings.Contains(sql, role) && (layer == "" || slices.Contains(layers, layer)) {
			all.WriteString(sql)
		}
	}
	if all.Len() == 0 {
		return "", fmt.Errorf("docs/security.md has nothing for %s", role)
	}
	return strings.NewReplacer(role, name, "SCHEMA pgwake ", "SCHEMA "+quoted+" ", "'pgwake'::", literal+"::", " pgwake.", " "+quoted+".").Replace(all.String()), nil
}

// page is docs/security.md, above the directory of the package that is tested.
func page(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	for err == nil && !exists(filepath.Join(dir, "go.work")) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
	}
	text, err := os.ReadFile(filepath.Join(dir, "docs", "security.md"))
	if err != nil {
		tb.Fatal(err)
	}
	return string(text)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// URL is that of the test server, as this role.
func URL(tb testing.TB, name string) string {
	tb.Helper()
	return As(testdb.URL(tb), name)
}

// As is the URL of a database, as this role.
func As(url, name string) string {
	switch {
	case !strings.Contains(url, "://"):
		return url + " role=" + name
	case strings.Contains(url, "?"):
		return url + "&role=" + name
	}
	return url + "?role=" + name
}

// Connect returns a connection as this role, which is closed when the test ends.
func Connect(tb testing.TB, name string) *pgx.Conn {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, URL(tb, name))
	if err != nil {
		tb.Fatalf("connect as %s: %v", name, err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}
