// Package migrations holds the table and functions of the backend for go-workflows as numbered SQL files and applies them, in the
// schema of a Provider and on top of its own migrations.
package migrations

import (
	"context"
	"embed"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/migrations"
)

//go:embed *.sql
var files embed.FS

// Layer returns the migrations, for pgwake.Provider.Migrate.
func Layer() migrations.Layer {
	return migrations.Layer{Files: files, Table: "gowf_migrations", Empty: "gowf_require_none"}
}

// Up applies every migration that the schema lacks. It may be called again, and by any number of processes at once: they take
// turns, also with those that migrate for the Provider. Fails with migrations.ErrNotMigrated unless the Provider's migrations are
// there.
func Up(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return Layer().Up(ctx, config, schema)
}

// Down takes every migration back, and leaves those of the Provider, which cannot go down before. It is refused with SQLSTATE
// PW006 while there are workflows.
func Down(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return Layer().Down(ctx, config, schema)
}

// Version returns the version that the schema is at, and the newest one that this package knows. A schema without these is at
// version 0. Fails with migrations.ErrForeign if others made it.
func Version(ctx context.Context, conn *pgx.Conn, schema string) (current, latest int64, err error) {
	return Layer().Version(ctx, conn, schema)
}
