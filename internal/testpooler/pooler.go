//go:build linux

// Package testpooler puts a real PgBouncer between a test and its server.
package testpooler

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/pgbouncer"
)

// Start starts a PgBouncer in front of the server at a URL, in a pool mode such as transaction, and returns what has a connection go
// through it. The test is skipped where none is installed.
func Start(tb testing.TB, server, mode string) (through func(*pgx.ConnConfig)) {
	tb.Helper()
	p, err := pgbouncer.Start(server, mode)
	if errors.Is(err, pgbouncer.ErrNotInstalled) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return p.Through
}
