// Package testdb gives each test a schema of its own on the test server: one server per run of `make test`,
// or else one per test process, found or booted by devpg.
package testdb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/devpg"
)

// URL returns the URL of the test server. A server that it has to boot ends with the process.
func URL(tb testing.TB) string {
	tb.Helper()
	s, err := server()
	if err != nil {
		tb.Fatalf("these tests need a PostgreSQL: %v", err)
	}
	return s.URL
}

var server = sync.OnceValues(func() (*devpg.Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return devpg.Start(ctx, &devpg.Options{Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
})

var schemas atomic.Int64

// Schema returns the name of a schema that does not exist. It is dropped when the test ends.
func Schema(tb testing.TB) string {
	tb.Helper()
	name := fmt.Sprintf("test_%d_%d_%d", os.Getpid(), time.Now().UnixNano()%1_000_000, schemas.Add(1))
	drop(tb, name)
	return name
}

// OwnSchema drops the schema when the test ends. The test fails if it exists already: the server may be one with
// a queue that somebody uses.
func OwnSchema(tb testing.TB, name string) {
	tb.Helper()
	Exec(tb, URL(tb), `DO $$ BEGIN IF to_regnamespace(`+literal(pgx.Identifier{name}.Sanitize())+`) IS NOT NULL THEN
		RAISE 'the schema exists, and a test would drop it'; END IF; END $$`)
	drop(tb, name)
}

func literal(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

func drop(tb testing.TB, name string) {
	tb.Helper()
	url := URL(tb)
	tb.Cleanup(func() {
		sql := `DROP SCHEMA IF EXISTS ` + pgx.Identifier{name}.Sanitize() + ` CASCADE`
		err, deadlock := exec(tb, url, sql), (*pgconn.PgError)(nil)
		for errors.As(err, &deadlock) && deadlock.Code == "40P01" { // with what a process that was killed had begun, and the server goes on with
			err = exec(tb, url, sql)
		}
		if err != nil {
			tb.Fatalf("%s: %v", sql, err)
		}
	})
}

// Exec runs a statement on a connection of its own.
func Exec(tb testing.TB, url, sql string, args ...any) {
	tb.Helper()
	if err := exec(tb, url, sql, args...); err != nil {
		tb.Fatalf("%s: %v", sql, err)
	}
}

func exec(tb testing.TB, url, sql string, args ...any) error {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		tb.Fatalf("connect to the test server: %v", err)
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql, args...)
	return err
}

// WithoutIdentity returns the tables of a schema of which a row that changes cannot be replicated: by a publication FOR ALL TABLES the server
// refuses to change it, or the subscription stops there. Of a table that has an identity, that is one with a generated column, which is not published.
func WithoutIdentity(tb testing.TB, schema string) []string {
	tb.Helper()
	return list(tb, `
		SELECT c.relname::text FROM pg_class c
		 WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
		   AND NOT EXISTS (
		       SELECT FROM pg_index i
		        WHERE i.indrelid = c.oid AND i.indisvalid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary ELSE false END
		          AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey) AND a.attgenerated <> ''))
		   AND NOT (c.relreplident = 'f' AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped))
		 ORDER BY 1`, schema)
}

// ReadByTheirCallers returns the functions of a schema in which a backslash in a literal is what the session that calls them takes it for: they do
// not set standard_conforming_strings.
func ReadByTheirCallers(tb testing.TB, schema string) []string {
	tb.Helper()
	return list(tb, `
		SELECT p.proname::text FROM pg_proc p
		 WHERE p.pronamespace = to_regnamespace(quote_ident($1)) AND strpos(regexp_replace(p.prosrc, 'E''[^'']*''', '', 'g'), chr(92)) > 0
		   AND NOT coalesce('standard_conforming_strings=on' = ANY (p.proconfig), false)
		 ORDER BY 1`, schema)
}

func list(tb testing.TB, sql string, args ...any) []string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, URL(tb))
	if err != nil {
		tb.Fatalf("connect to the test server: %v", err)
	}
	defer conn.Close(ctx)
	rows, _ := conn.Query(ctx, sql, args...) // its error is that of the rows
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	return found
}
