// Package migrations holds the schema as numbered SQL files and applies them.
//
// The SQL functions that the files create are the wire contract of pgwake: every verb of the Go API
// calls exactly one of them, and any language can call them too.
package migrations

import (
	"context"
	"embed"

	"github.com/jackc/pgx/v5"
)

//go:embed *.sql
var files embed.FS

// root are the migrations of the Provider, on which all others stand.
var root = Layer{Files: files, Table: "schema_migrations", Empty: "require_empty", root: true}

// Up creates the schema if it is missing and applies every migration that it lacks. It may be called
// again, and by any number of processes at once: they take turns by an advisory lock, and only the
// first finds work to do. It needs the right to create in the schema, and the right to create schemas
// only if the schema is missing.
//
// It gives way to who is at work: nobody waits for it for more than about half a second at a time, and it tries again for up to
// two minutes, or until ctx ends, while others hold locks on what it changes; then it fails with ErrBusy. So it does when its turn has not come for
// ten minutes. When ctx ends it returns as soon as the server is done with what it was at, within a second.
func Up(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return root.Up(ctx, config, schema)
}

// Down takes every migration back. It is refused with SQLSTATE PW006 while a table still holds rows,
// so it cannot lose any, and while there is a Layer on the schema. The empty schema itself remains.
func Down(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return root.Down(ctx, config, schema)
}

// Version returns the version that the schema is at, and the newest one that this package knows.
// A schema that does not exist is at version 0. ErrForeign if others made it.
func Version(ctx context.Context, conn *pgx.Conn, schema string) (current, latest int64, err error) {
	return root.Version(ctx, conn, schema)
}
