package migrations

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pressly/goose/v3"
)

// This file answers: how are migrations applied and taken back, those of the Provider and those of a layer on it?
//
// A layer's tables and functions are in the schema of the Provider, and may use what is there. So it comes up after the
// Provider's migrations and goes down before them, and all of them take the same turn: none sees another half done.

var (
	// ErrForeign: the schema was made by other migrations than the ones of the same number here, such as those of a
	// version before the first release. Nothing was changed. What it holds has to be moved by hand.
	ErrForeign = errors.New("the schema was made by other migrations than these")

	// ErrNotMigrated: a Layer is to come up where the migrations of the Provider are not, or not all of them.
	ErrNotMigrated = errors.New("schema is not migrated")

	// ErrBusy: others held locks on what is to be changed, again and again for minutes; the text says whose they are. What was
	// applied before is there, and complete. To call it again goes on from there.
	ErrBusy = errors.New("somebody holds a lock on what is to be migrated")

	// ErrLayer: the Layer itself is unusable. No schema can change that.
	ErrLayer = errors.New("invalid layer")

	// errTurnOver: the session that had the turn has ended, and it is not known during which statement, if any. To call again goes on.
	errTurnOver = fmt.Errorf("the session that had the turn has ended: %w", pgconn.ErrConnClosed)
)

// Layer is a set of migrations on top of those of the Provider, in the same schema. A value may be used by any number of
// goroutines at a time.
type Layer struct {
	// Files has the migrations at its root: *.sql for goose, numbered from 1 without a gap. They run with search_path =
	// <schema>, pg_temp, so what they name without a schema lands there. A file that is released never changes. All run in one
	// session, of which they leave the advisory locks and settings as they are, and so have no DISCARD.
	//
	// The Down section of the newest one begins with LOCK TABLE on what must not be lost, and a call of Empty: each file goes
	// down in a transaction of its own, and there nothing is gone yet.
	Files fs.FS

	// Table is the name of the table, in the schema, of the migrations that were applied: lower-case letters, digits and
	// '_', a letter first.
	Table string

	// Empty is the name of a function of the first file, without arguments, that fails with SQLSTATE PW006 while a table holds rows
	// that Down would lose.
	Empty string

	root     bool          // they are the Provider's
	patience time.Duration // see giveWay; 0: the default
}

// layerMark is the first word of the comment on a Layer's Table, by which Down of the Provider's migrations knows it.
const layerMark = "layer"

var layerName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)

// Up applies every migration that the schema lacks. For the rest it is as the function Up, but that ErrNotMigrated is what
// a schema gets in which the Provider's migrations are not there, all that this version knows: it creates no schema.
func (l Layer) Up(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return l.run(ctx, config, schema, func(ctx context.Context, db *sql.DB, m *migrator) error {
		if !l.root {
			if err := requireRoot(ctx, db, schema); err != nil {
				return err
			}
		}
		current, err := m.GetDBVersion(ctx)
		if err != nil {
			return err
		}
		var known sql.NullString
		if err := db.QueryRowContext(ctx, `SELECT obj_description(to_regclass($1), 'pg_class')`, l.Table).Scan(&known); err != nil {
			return err
		}
		if err := m.check(current, known.String); err != nil || current >= m.latest() {
			return err
		}
		// Before they are applied: a process that dies in between leaves a version that is known.
		if _, err := db.ExecContext(ctx, `COMMENT ON TABLE `+l.Table+` IS '`+l.comment(m.sums)+`'`); err != nil {
			return err
		}
		return l.giveWay(ctx, db, schema, func() error {
			_, err := m.Up(ctx)
			return err
		})
	})
}

// Down takes every migration back, and leaves Table. It is refused with SQLSTATE PW006 while rows would be lost.
func (l Layer) Down(ctx context.Context, config *pgx.ConnConfig, schema string) error {
	return l.run(ctx, config, schema, func(ctx context.Context, db *sql.DB, m *migrator) error {
		var exists bool // or else goose would make it
		if err := db.QueryRowContext(ctx, `SELECT to_regclass($1) IS NOT NULL`, l.Table).Scan(&exists); err != nil || !exists {
			return err
		}
		// Each migration goes down in a transaction of its own, so the refusal comes before the first.
		if version, err := m.GetDBVersion(ctx); err != nil || version == 0 {
			return err
		}
		if l.root {
			if err := requireNoLayer(ctx, db, schema); err != nil {
				return err
			}
		}
		if _, err := db.ExecContext(ctx, `SELECT `+l.Empty+`()`); err != nil {
			return err
		}
		return l.giveWay(ctx, db, schema, func() error {
			_, err := m.DownTo(ctx, 0)
			return err
		})
	})
}

// Version returns the version that the schema is at, and the newest one that the Layer knows. A schema without it is at
// version 0. ErrForeign if others made it.
func (l Layer) Version(ctx context.Context, conn *pgx.Conn, schema string) (current, latest int64, err error) {
	if err := CheckSchema(schema); err != nil {
		return 0, 0, err
	}
	sums, err := l.checksums()
	if err != nil {
		return 0, 0, err
	}
	m := migrator{sums: sums}
	table := pgx.Identifier{schema, l.Table}.Sanitize()
	var exists bool
	if err := conn.QueryRow(ctx, `SELECT pg_catalog.to_regclass($1) IS NOT NULL`, table).Scan(&exists); err != nil {
		return 0, 0, fmt.Errorf("read the migration version of schema %q: %w", schema, err)
	}
	if !exists {
		return 0, m.latest(), nil
	}
	var made string
	err = conn.QueryRow(ctx, `SELECT coalesce(pg_catalog.max(version_id), 0), coalesce(pg_catalog.obj_description(pg_catalog.to_regclass($1), 'pg_class'), '')
		FROM `+table+` WHERE is_applied`, table).Scan(&current, &made)
	if err == nil {
		err = m.check(current, made)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read the migration version of schema %q: %w", schema, err)
	}
	return current, m.latest(), nil
}

// migrator applies the migrations of a Layer.
type migrator struct {
	*goose.Provider
	sums []string // see checksums
}

func (m *migrator) latest() int64 { return int64(len(m.sums)) }

// check compares the migrations that made a schema with those here. A schema of a newer version knows ours as well.
func (m *migrator) check(current int64, known string) error {
	if current == 0 {
		return nil
	}
	newest := m.sums[min(int(current), len(m.sums))-1]
	if !slices.Contains(strings.Split(known, ", "), newest) {
		return fmt.Errorf("version %d: %w", current, ErrForeign)
	}
	return nil
}

// comment is that on Table: which migrations the schema has, and that they are a Layer's.
func (l Layer) comment(sums []string) string {
	if l.root {
		return strings.Join(sums, ", ")
	}
	return layerMark + ", " + strings.Join(sums, ", ")
}

// checksums are those of the migrations, each of all up to its number.
func (l Layer) checksums() (sums []string, err error) {
	if !layerName.MatchString(l.Table) || !layerName.MatchString(l.Empty) || l.Files == nil || !l.root && l.Table == root.Table {
		return nil, fmt.Errorf("%w: it needs Files, a Table of its own, and Empty, and has table %q and function %q", ErrLayer, l.Table, l.Empty)
	}
	names, err := fs.Glob(l.Files, "*.sql")
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	for i, name := range names {
		if number, err := goose.NumericComponent(name); err != nil || number != int64(i+1) {
			return nil, fmt.Errorf("%w: %q is not number %d", ErrLayer, name, i+1)
		}
		text, err := fs.ReadFile(l.Files, name)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(hash, "%s %d\n%s", name, len(text), text)
		sums = append(sums, fmt.Sprintf("%d %x", i+1, hash.Sum(nil)[:8]))
	}
	if len(sums) == 0 {
		return nil, fmt.Errorf("%w: there are no files", ErrLayer)
	}
	return sums, nil
}

// requireRoot fails unless the schema has the Provider's migrations, all that are known here.
func requireRoot(ctx context.Context, db *sql.DB, schema string) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	var current, latest int64
	err = conn.Raw(func(driver any) (err error) {
		current, latest, err = root.Version(ctx, driver.(*stdlib.Conn).Conn(), schema)
		return err
	})
	if err == nil && current < latest {
		err = fmt.Errorf("%w: the Provider's migrations are at version %d of %d", ErrNotMigrated, current, latest)
	}
	return err
}

// requireNoLayer fails if the schema has the migrations of a Layer. None can come meanwhile: it would take the turn first.
func requireNoLayer(ctx context.Context, db *sql.DB, schema string) error {
	rows, err := db.QueryContext(ctx, `SELECT quote_ident(c.relname) FROM pg_class c
		WHERE c.relnamespace = to_regnamespace(quote_ident(current_schema())) AND c.relkind = 'r'
		  AND obj_description(c.oid, 'pg_class') ~ ('^' || $1 || ', 1 [0-9a-f]{16}') ORDER BY c.relname`, layerMark)
	if err != nil {
		return err
	}
	defer rows.Close()
	var tables []string
	for rows.Next() {
		var table string
		if err := rows.Scan(&table); err != nil {
			return err
		}
		tables = append(tables, table)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil { // there is one connection
		return err
	}
	for _, table := range tables {
		var applied bool
		if err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT FROM `+table+` WHERE version_id > 0 AND is_applied)`).Scan(&applied); err != nil {
			return err
		}
		if applied {
			return &pgconn.PgError{Severity: "ERROR", Code: "PW006",
				Message: fmt.Sprintf("schema %s still has the layer of %s; migrate that down first", schema, table)}
		}
	}
	return nil
}

func (l Layer) run(ctx context.Context, config *pgx.ConnConfig, schema string, apply func(context.Context, *sql.DB, *migrator) error) (err error) {
	if err := CheckSchema(schema); err != nil {
		return err
	}
	sums, err := l.checksums()
	if err != nil {
		return fmt.Errorf("load the migrations: %w", err)
	}
	config = config.Copy()
	// The files name nothing by schema: the first entry decides where objects land, pg_catalog is
	// searched before it, and functions pin this very path (SET search_path FROM CURRENT).
	// In literals of the files a backslash is one.
	//
	// Of a process that is gone without a sign the server has to know, or the turn is its for hours. Nor does a session that is at work pause for long.
	settings := map[string]string{"search_path": pgx.Identifier{schema}.Sanitize() + ", pg_temp", "lock_timeout": lockTimeout, "standard_conforming_strings": "on",
		"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3", "tcp_user_timeout": "25000",
		"idle_session_timeout": "1min", "idle_in_transaction_session_timeout": "1min"}
	for name, value := range settings {
		if name != "search_path" && name != "lock_timeout" { // what the caller does to his sessions goes by his own
			config.RuntimeParams[name] = value // PgBouncer refuses these, and could not carry a migration
		}
	}
	// Whoever changes something has the turn: all of it is done in the one session that has it, and no other takes its place, since what was looked
	// at before may have changed meanwhile.
	var begun atomic.Bool
	var session atomic.Pointer[pgconn.PgConn]
	db := stdlib.OpenDB(*config, stdlib.OptionBeforeConnect(func(context.Context, *pgx.ConnConfig) error {
		if begun.Swap(true) {
			return errTurnOver
		}
		return nil
	}), stdlib.OptionAfterConnect(func(ctx context.Context, conn *pgx.Conn) error {
		session.Store(conn.PgConn())
		err := prepare(ctx, conn, settings)
		if err != nil {
			_ = conn.Close(ctx) // stdlib does not
		}
		return err
	}), stdlib.OptionShouldPing(func(context.Context, stdlib.ShouldPingParams) bool {
		return false // the statement says better why its session has ended
	}))
	defer func() { awaitEnd(session.Load()) }()
	db.SetMaxOpenConns(1)
	defer func() { err = errors.Join(err, db.Close()) }() // the end of the turn
	defer func() {
		// The end of ctx breaks the connection, and then a statement may fail for no other reason than that.
		if ended := ctx.Err(); err != nil && ended != nil && !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", ended, err)
		}
	}()

	if err := l.takeTurn(ctx, db, schema); err != nil {
		return fmt.Errorf("migrate schema %q: %w", schema, err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, bySection{l.Files},
		goose.WithTableName(l.Table),
		goose.WithDisableGlobalRegistry(true),
	)
	if err != nil {
		return fmt.Errorf("load the migrations: %w", err)
	}
	if err := apply(ctx, db, &migrator{provider, sums}); err != nil {
		return fmt.Errorf("migrate schema %q: %w", schema, err)
	}
	return nil
}

// prepare has a session be as the caller's others are, of another role for instance, but for the settings that migrations need. What the caller does
// to his sessions sees them as it always does, and so comes first.
func prepare(ctx context.Context, conn *pgx.Conn, settings map[string]string) error {
	if err := conns.Prepare(ctx, conn); err != nil {
		return err
	}
	if err := conns.Legible(ctx, conn.PgConn(), conn.Config().DefaultQueryExecMode); err != nil {
		return err
	}
	var names, values []string
	for name, value := range settings {
		names, values = append(names, name), append(values, value)
	}
	_, err := conn.Exec(ctx, `SELECT pg_catalog.set_config(s.name, s.value, false)
		FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[])) AS s (name, value)`, names, values)
	return err
}

// awaitEnd waits until the server was told to end what a session that broke off was at, for endPatience at most.
func awaitEnd(session *pgconn.PgConn) {
	if session == nil {
		return
	}
	select {
	case <-session.CleanupDone():
	case <-time.After(endPatience):
	}
}

// takeTurn lets one process at a time migrate a schema, whatever the layer, and makes sure that the schema of the
// Provider exists. It goes before goose's own session locker, which comes after goose has created its table: in
// pg_temp, as long as there is no schema. It does not poll either: the server's lock queue wakes the next process at once.
func (l Layer) takeTurn(ctx context.Context, db *sql.DB, schema string) error {
	// The end of the session releases the lock: when db is closed, and also when this process dies. To ask the server
	// for it could take for ever.
	if err := l.waitForTurn(ctx, db, schema); err != nil {
		return err
	}
	if l.root {
		if err := createSchema(ctx, db, schema); err != nil {
			return err
		}
	}
	return setLockTimeout(ctx, db, lockTimeout)
}

// createSchema looks before it creates, since CREATE SCHEMA IF NOT EXISTS demands the right to create
// schemas even where there is nothing to create.
func createSchema(ctx context.Context, db *sql.DB, schema string) error {
	var exists bool
	err := db.QueryRowContext(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, schema).Scan(&exists)
	if err != nil || exists {
		return err
	}
	// A caller who gives up, and drops the schema, is not to see it come back: a commit that is under way cannot be cancelled. Whatever is created in it
	// afterwards has the drop wait.
	creating, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(endPatience, cancel) })()
	if _, err = db.ExecContext(creating, `CREATE SCHEMA `+pgx.Identifier{schema}.Sanitize()); err != nil && creating.Err() != nil {
		return fmt.Errorf("%w: %v", ctx.Err(), err)
	}
	return err
}
