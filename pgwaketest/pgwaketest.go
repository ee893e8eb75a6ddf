// Package pgwaketest makes Providers for tests: each on a schema of its own, closed and dropped when the
// test ends.
//
//	func TestShipping(t *testing.T) {
//		p := pgwaketest.New(t, nil)
//		placeOrder(t.Context(), p, 7) // the code under test
//		pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "ship", Input: []byte(`{"order": 7}`)}, 1)
//	}
//
// RequireWork and RequireMessage look into the queues without claiming anything, Advance lets time pass without
// waiting for it, and Drain and DrainTurns work off what is due.
//
// The server is the one at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else one that is booted from the
// server binaries on the machine and ends with the test process.
package pgwaketest

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
)

// closeDeadline bounds how long a test may hold up the Close of its Provider, and what happens behind its back.
const closeDeadline = 10 * time.Second

// defaultSchema is what Config.Schema defaults to.
const defaultSchema = "pgwake"

// New returns a Provider on a fresh schema, which is dropped when the test ends. config may be nil; if it names a
// Schema, the test fails if that exists already. The Provider logs nothing unless config has a Logger.
func New(tb testing.TB, config *pgwake.Config) *pgwake.Provider {
	tb.Helper()
	var c pgwake.Config
	if config != nil {
		c = *config
	}
	if c.Schema == "" {
		c.Schema = testdb.Schema(tb)
	} else {
		testdb.OwnSchema(tb, c.Schema)
	}
	return Open(tb, &c)
}

// Open returns one more Provider on the schema that config names: another node of the same deployment. What the
// schema holds stays as it is. A nil config means the default schema.
func Open(tb testing.TB, config *pgwake.Config) *pgwake.Provider {
	tb.Helper()
	var c pgwake.Config
	if config != nil {
		c = *config
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	c.Schema = cmp.Or(c.Schema, defaultSchema)
	p, err := pgwake.Open(context.Background(), URL(tb), &c)
	if err != nil {
		tb.Fatalf("open a provider: %v", err)
	}
	schemas.Store(p, c.Schema)
	tb.Cleanup(func() {
		schemas.Delete(p)
		ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			tb.Errorf("close the provider: %v", err)
		}
	})
	return p
}

// URL returns the URL of the test server.
func URL(tb testing.TB) string {
	tb.Helper()
	return testdb.URL(tb)
}

// schemas are those of the open Providers, by *pgwake.Provider.
var schemas sync.Map

// backstage runs something on the schema of a Provider, on a connection of its own whose search path is that schema.
func backstage(tb testing.TB, p *pgwake.Provider, do func(context.Context, *pgx.Conn) error) error {
	tb.Helper()
	schema, ok := schemas.Load(p)
	if !ok {
		tb.Fatalf("the Provider was not opened by pgwaketest, or its test has ended")
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	config, err := pgx.ParseConfig(testdb.URL(tb))
	if err != nil {
		return err
	}
	config.RuntimeParams["search_path"] = pgx.Identifier{schema.(string)}.Sanitize()
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return do(ctx, conn)
}
