// Package pgwaketest makes Providers for tests: each on a schema of its own, closed and dropped when the
// test ends.
//
//	func TestShipping(t *testing.T) {
//		p := pgwaketest.New(t, nil)
//		...
//	}
//
// The server is the one at $PGWAKE_DATABASE_URL or $DATABASE_URL, or else one that is booted from the
// server binaries on the machine and ends with the test process.
package pgwaketest

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
)

// closeDeadline bounds how long a test may hold up the Close of its Provider.
const closeDeadline = 10 * time.Second

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
	p, err := pgwake.Open(context.Background(), URL(tb), &c)
	if err != nil {
		tb.Fatalf("open a provider: %v", err)
	}
	tb.Cleanup(func() {
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
