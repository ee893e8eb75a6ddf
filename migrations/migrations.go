// Package migrations holds the schema as numbered SQL files and applies them.
//
// The SQL functions that the files create are the wire contract of pgwake: every verb of the Go API
// calls exactly one of them, and any language can call them too.
package migrations

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

//go:embed *.sql
var files embed.FS

// ErrForeign: the schema was made by other migrations than the ones of the same number here, such as those of a
// version before the first release. Nothing was changed. What it holds has to be moved by hand.
var ErrForeign = errors.New("the schema was made by other migrations than these")

// versionTable records the applied migrations. It lives in the schema that they were applied to.
const versionTable = "schema_migrations"

// Up creates the schema if it is missing and applies every migration that it lacks. It may be called
// again, and by any number of processes at once: they take turns by an advisory lock, and only the
// first finds work to do. It needs the right to create in the schema, and the right to create schemas
// only if the schema is missing.
func Up(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return run(ctx, config, schema, func(ctx context.Context, db *sql.DB, p *goose.Provider) error {
		current, err := p.GetDBVersion(ctx)
		if err != nil {
			return err
		}
		var known sql.NullString
		if err := db.QueryRowContext(ctx, `SELECT obj_description(to_regclass($1), 'pg_class')`, versionTable).Scan(&known); err != nil {
			return err
		}
		if err := check(current, known.String); err != nil {
			return err
		}
		if latest, err := latestVersion(); err != nil || current >= latest {
			return err
		}
		// Before they are applied: a process that dies in between leaves a version that is known.
		sums, err := checksums()
		if err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, `COMMENT ON TABLE `+versionTable+` IS '`+strings.Join(sums, ", ")+`'`); err != nil {
			return err
		}
		_, err = p.Up(ctx)
		return err
	})
}

// check compares the migrations that made a schema with those here. A schema of a newer version knows ours as well.
func check(current int64, known string) error {
	sums, err := checksums()
	if err != nil || current == 0 {
		return err
	}
	newest := sums[min(int(current), len(sums))-1]
	if !slices.Contains(strings.Split(known, ", "), newest) {
		return fmt.Errorf("version %d: %w", current, ErrForeign)
	}
	return nil
}

// checksums are those of the migrations, each of all up to its number.
func checksums() (sums []string, err error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	for i, e := range entries {
		text, err := files.ReadFile(e.Name())
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(hash, "%s %d\n%s", e.Name(), len(text), text)
		sums = append(sums, fmt.Sprintf("%d %x", i+1, hash.Sum(nil)[:8]))
	}
	return sums, nil
}

// Down takes every migration back. It is refused with SQLSTATE PW006 while a table still holds rows,
// so it cannot lose any. The empty schema itself remains.
func Down(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return run(ctx, config, schema, func(ctx context.Context, db *sql.DB, p *goose.Provider) error {
		// Each migration goes down in a transaction of its own, so the refusal comes before the first.
		if version, err := p.GetDBVersion(ctx); err != nil || version == 0 {
			return err
		}
		if _, err := db.ExecContext(ctx, `SELECT require_empty()`); err != nil {
			return err
		}
		_, err := p.DownTo(ctx, 0)
		return err
	})
}

// Version returns the version that the schema is at, and the newest one that this package knows.
// A schema that does not exist is at version 0. ErrForeign if others made it.
func Version(ctx context.Context, conn *pgx.Conn, schema string) (current, latest int64, err error) {
	latest, err = latestVersion()
	if err != nil {
		return 0, 0, err
	}
	table := pgx.Identifier{schema, versionTable}.Sanitize()
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, table).Scan(&exists); err != nil {
		return 0, 0, fmt.Errorf("read the migration version of schema %q: %w", schema, err)
	}
	if !exists {
		return 0, latest, nil
	}
	var made string
	err = conn.QueryRow(ctx, `SELECT coalesce(max(version_id), 0), coalesce(obj_description(to_regclass($1), 'pg_class'), '')
		FROM `+table+` WHERE is_applied`, table).Scan(&current, &made)
	if err == nil {
		err = check(current, made)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read the migration version of schema %q: %w", schema, err)
	}
	return current, latest, nil
}

func latestVersion() (int64, error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return 0, err
	}
	return goose.NumericComponent(entries[len(entries)-1].Name())
}

func run(ctx context.Context, config *pgx.ConnConfig, schema string, apply func(context.Context, *sql.DB, *goose.Provider) error) (err error) {
	config = config.Copy()
	// The files name nothing by schema: the first entry decides where objects land, pg_catalog is
	// searched before it, and functions pin this very path (SET search_path FROM CURRENT).
	config.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize() + ", pg_temp"
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	defer func() {
		// The end of ctx breaks the connection, and then a statement may fail for no other reason than that.
		if ended := ctx.Err(); err != nil && ended != nil && !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", ended, err)
		}
	}()

	endTurn, err := takeTurn(ctx, db, schema)
	if err != nil {
		return fmt.Errorf("migrate schema %q: %w", schema, err)
	}
	defer func() { err = errors.Join(err, endTurn()) }()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(versionTable),
		goose.WithDisableGlobalRegistry(true),
	)
	if err != nil {
		return fmt.Errorf("load the migrations: %w", err)
	}
	if err := apply(ctx, db, provider); err != nil {
		return fmt.Errorf("migrate schema %q: %w", schema, err)
	}
	return nil
}

// takeTurn lets one process at a time migrate a schema, and makes sure that the schema exists. It goes
// before goose's own session locker, which comes after goose has created its table: in pg_temp, as long as
// there is no schema. It does not poll either: the server's lock queue wakes the next process at once.
func takeTurn(ctx context.Context, db *sql.DB, schema string) (endTurn func() error, err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	// The end of the session releases the lock: when db is closed, and also when this process dies. To ask the server
	// for it could take for ever.
	_, err = conn.ExecContext(ctx, `SELECT pg_advisory_lock(hashtextextended('pgwake migrations of ' || $1, 0))`, schema)
	if err == nil {
		err = createSchema(ctx, conn, schema)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn.Close, nil
}

// createSchema looks before it creates, since CREATE SCHEMA IF NOT EXISTS demands the right to create
// schemas even where there is nothing to create.
func createSchema(ctx context.Context, conn *sql.Conn, schema string) error {
	var exists bool
	err := conn.QueryRowContext(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = conn.ExecContext(ctx, `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize())
	return err
}
