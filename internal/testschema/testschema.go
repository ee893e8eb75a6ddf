// Package testschema lends schemas to tests: on each the migrations have run, and it is as they leave it. Most of the time that
// a test takes would go into them otherwise.
package testschema

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/migrations"
	"github.com/pgwake/pgwake/pgwaketest"
	"go.uber.org/goleak"
)

// patience bounds what happens between two tests: somebody may have left a transaction open.
const patience = time.Minute

// Kind is the schemas with the same migrations. A schema of a test that has ended is lent to another, emptied, if it is as it was
// made but for its rows; else it is dropped. Safe for concurrent use.
type Kind struct {
	layers []migrations.Layer

	mu      sync.Mutex
	conn    *pgx.Conn
	made    int
	free    []string
	objects string            // of a schema as it was made
	marks   map[string]string // of those of which that is known, by name
	empty   string            // the statement that makes it so again
}

// Core are the schemas of a Provider without layers.
var Core = With()

var (
	kindsMu sync.Mutex
	kinds   []*Kind
)

// With returns the schemas of a Provider with these layers. It is called once per kind, for a variable of the package.
func With(layers ...migrations.Layer) *Kind {
	k := &Kind{layers: layers, marks: make(map[string]string)}
	kindsMu.Lock()
	defer kindsMu.Unlock()
	kinds = append(kinds, k)
	return k
}

// Main is what TestMain does in a package whose tests borrow schemas: it drops them in the end, and fails if a goroutine is left behind.
func Main(m *testing.M, ignored ...goleak.Option) {
	code := m.Run()
	Drop()
	if err := goleak.Find(ignored...); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

// Drop drops what was lent, when all tests of the process have ended.
func Drop() {
	kindsMu.Lock()
	defer kindsMu.Unlock()
	for _, k := range kinds {
		k.close()
	}
}

// New is pgwaketest.New on a lent schema. config names none.
func (k *Kind) New(tb testing.TB, config *pgwake.Config) *pgwake.Provider {
	tb.Helper()
	var c pgwake.Config
	if config != nil {
		c = *config
	}
	if c.Schema != "" {
		tb.Fatalf("the schema is lent: it cannot be %s", c.Schema)
	}
	if c.NotifyDeliveryTimeout == 0 {
		c.NotifyDeliveryTimeout = patience // a machine that stands still is no trouble: the queues would be polled for a minute
	}
	c.Schema = k.Borrow(tb)
	return pgwaketest.Open(tb, &c)
}

// Borrow returns a schema that is the test's until its end, after the cleanups that it adds from now on.
func (k *Kind) Borrow(tb testing.TB) string {
	tb.Helper()
	name, err := k.take(testdb.URL(tb))
	if err != nil {
		tb.Fatalf("make a schema: %v", err)
	}
	tb.Cleanup(func() {
		if err := k.give(name); err != nil {
			tb.Errorf("empty schema %s: %v", name, err)
		}
	})
	return name
}

func (k *Kind) take(url string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience) // from when it is this one's turn
	defer cancel()
	if last := len(k.free) - 1; last >= 0 {
		name := k.free[last]
		k.free = k.free[:last]
		return name, nil
	}
	if err := k.connect(ctx, url); err != nil {
		return "", err
	}
	k.made++
	name := fmt.Sprintf("test_lent_%d_%d_%d", os.Getpid(), time.Now().UnixNano()%1_000_000, k.made)
	if err := k.migrate(ctx, url, name); err != nil {
		return "", err
	}
	if k.empty != "" || k.conn.PgConn().ParameterStatus("is_superuser") != "on" { // who is none cannot empty a schema
		return name, nil
	}
	return name, k.within(ctx, name, func(tx pgx.Tx) (err error) {
		if err = tx.QueryRow(ctx, objects).Scan(&k.objects); err == nil {
			k.empty, err = emptying(ctx, tx)
		}
		return err
	})
}

// connect makes the connection that empties schemas, if there is none.
func (k *Kind) connect(ctx context.Context, url string) (err error) {
	if k.conn == nil || k.conn.IsClosed() {
		var config *pgx.ConnConfig
		if config, err = pgx.ParseConfig(url); err == nil {
			config.DefaultQueryExecMode = pgx.QueryExecModeExec // names mean another schema each time
			k.conn, err = pgx.ConnectConfig(ctx, config)
		}
		if err == nil {
			_, err = k.conn.Prepare(ctx, marksOf, marks)
		}
	}
	return err
}

// migrate has the server not look at what functions are made of: tests of the migrations do, once and for all.
func (k *Kind) migrate(ctx context.Context, url, name string) error {
	direct, err := pgx.ParseConfig(url)
	if err != nil {
		return err
	}
	direct.RuntimeParams["check_function_bodies"] = "off"
	p, err := pgwake.Open(ctx, url, &pgwake.Config{Schema: name, Mode: pgwake.ModeDisabled, ListenConfig: direct, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	for _, layer := range k.layers {
		err = errors.Join(err, p.Migrate(ctx, layer))
	}
	return errors.Join(err, p.Close(ctx))
}

// give takes a schema back: emptied to be lent again, or dropped.
func (k *Kind) give(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience) // from when it is this one's turn
	defer cancel()
	if k.empty != "" {
		var found string
		if err := k.conn.QueryRow(ctx, marksOf, name).Scan(&found); err != nil {
			return err
		}
		known := found == k.marks[name]
		again := known
		err := k.within(ctx, name, func(tx pgx.Tx) error {
			if !known {
				var now string
				if err := tx.QueryRow(ctx, objects).Scan(&now); err != nil {
					return err
				}
				again = now == k.objects
			}
			if !again {
				return nil
			}
			_, err := tx.Exec(ctx, k.empty)
			return err
		})
		if err == nil && again && !known { // also for what was emptied by truncating it
			err = k.conn.QueryRow(ctx, marksOf, name).Scan(&found)
			k.marks[name] = found
		}
		if err != nil {
			return err
		}
		if again {
			k.free = append(k.free, name)
			return nil
		}
		delete(k.marks, name)
	}
	_, err := k.conn.Exec(ctx, `DROP SCHEMA IF EXISTS `+pgx.Identifier{name}.Sanitize()+` CASCADE`)
	return err
}

// within does something in a transaction in which names are those of the schema.
func (k *Kind) within(ctx context.Context, name string, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, k.conn, func(tx pgx.Tx) error {
		// Rows are removed without what hangs on it: all others go as well.
		if _, err := tx.Exec(ctx, `SELECT set_config('search_path', $1, true), set_config('session_replication_role', 'replica', true)`,
			pgx.Identifier{name}.Sanitize()); err != nil {
			return err
		}
		return do(tx)
	})
}

func (k *Kind) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, name := range k.free {
		_, _ = k.conn.Exec(ctx, `DROP SCHEMA `+pgx.Identifier{name}.Sanitize()+` CASCADE`)
	}
	_ = k.conn.Close(ctx)
}

// marksOf is the name of marks as a prepared statement.
const marksOf = "marks"

// marks says which versions of rows of the catalogs a schema is made of. While they are the same, so are its objects, which take some ten
// times as long to write down.
const marks = `
	WITH s AS (SELECT oid, xmin FROM pg_namespace WHERE nspname = $1),
	     c AS MATERIALIZED (SELECT oid, xmin FROM pg_class WHERE relnamespace = (SELECT oid FROM s)),
	     p AS MATERIALIZED (SELECT oid, xmin FROM pg_proc WHERE pronamespace = (SELECT oid FROM s))
	SELECT coalesce(md5(string_agg(concat_ws(' ', kind, oid, sub, version), ',' ORDER BY kind, oid, sub)), 'none') FROM (
		SELECT 1 AS kind, oid, 0 AS sub, xmin::text AS version FROM s
		UNION ALL SELECT 2, oid, 0, xmin::text FROM c
		UNION ALL SELECT 3, oid, 0, xmin::text FROM p
		UNION ALL SELECT 4, attrelid, attnum, a.xmin::text FROM pg_attribute a JOIN c ON attrelid = c.oid
		UNION ALL SELECT 5, adrelid, adnum, d.xmin::text FROM pg_attrdef d JOIN c ON adrelid = c.oid
		UNION ALL SELECT 6, indexrelid, 0, i.xmin::text FROM pg_index i JOIN c ON indexrelid = c.oid
		UNION ALL SELECT 7, r.oid, 0, r.xmin::text FROM pg_rewrite r JOIN c ON ev_class = c.oid
		UNION ALL SELECT 8, t.oid, 0, t.xmin::text FROM pg_trigger t JOIN c ON tgrelid = c.oid
		UNION ALL SELECT 9, o.oid, 0, o.xmin::text FROM pg_constraint o WHERE connamespace = (SELECT oid FROM s)
		UNION ALL SELECT 10, objoid, objsubid, d.xmin::text FROM pg_description d JOIN c ON objoid = c.oid AND classoid = 'pg_class'::regclass
		UNION ALL SELECT 11, objoid, objsubid, d.xmin::text FROM pg_description d JOIN p ON objoid = p.oid AND classoid = 'pg_proc'::regclass) AS rows`

// objects identifies everything in the schema that is no row, in one order: a trigger has its name on each partition. Functions may
// have the schema's name in them. Rights that were granted and are gone leave those that there are by default written down.
const objects = `
	SELECT md5(replace(concat_ws('; ',
		(SELECT string_agg(concat(relname, relkind, relpersistence, relrowsecurity, reloptions,
		                          coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)), obj_description(oid, 'pg_class'),
		                          CASE relkind WHEN 'i' THEN pg_get_indexdef(oid) WHEN 'v' THEN pg_get_viewdef(oid) END), ',' ORDER BY relname)
		   FROM pg_class WHERE relnamespace = current_schema()::regnamespace),
		(SELECT string_agg(concat(relname, attname, format_type(atttypid, atttypmod), attnotnull, attidentity, attstattarget, attstorage, attacl,
		                          attoptions, col_description(attrelid, attnum), pg_get_expr(adbin, adrelid)), ',' ORDER BY relname, attnum)
		   FROM pg_class c JOIN pg_attribute ON attrelid = c.oid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
		  WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v', 'm') AND attnum > 0),
		(SELECT string_agg(concat(pg_get_functiondef(oid), coalesce(proacl, acldefault('f', proowner)), obj_description(oid, 'pg_proc')), ',' ORDER BY proname, pg_get_function_arguments(oid))
		   FROM pg_proc WHERE pronamespace = current_schema()::regnamespace),
		(SELECT string_agg(concat(conrelid::regclass, conname, pg_get_constraintdef(oid)), ',' ORDER BY conrelid::regclass::text, conname)
		   FROM pg_constraint WHERE connamespace = current_schema()::regnamespace),
		(SELECT string_agg(concat(pg_get_triggerdef(t.oid), tgenabled), ',' ORDER BY tgname, relname)
		   FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = current_schema()::regnamespace AND NOT tgisinternal),
		(SELECT coalesce(nspacl, acldefault('n', nspowner))::text FROM pg_namespace WHERE nspname = current_schema())), coalesce(current_schema(), 'none'), ''))`

// emptying returns the statement that gives tables the rows that they have now, and sequences their values. Moments in those rows
// become the one at which it is executed. To truncate a table and its indexes is to make new files for them, which takes as long
// as most tests.
func emptying(ctx context.Context, tx pgx.Tx) (string, error) {
	rows, err := tx.Query(ctx, `
		SELECT format('%I', relname),
		       string_agg(format('%I', attname), ', ' ORDER BY attnum),
		       string_agg(format(CASE atttypid WHEN 'timestamptz'::regtype THEN 'CASE WHEN %I IS NOT NULL THEN now() END' ELSE '%I' END, attname), ', ' ORDER BY attnum)
		  FROM pg_class c JOIN pg_attribute ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
		 WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
		 GROUP BY relname ORDER BY relname`)
	if err != nil {
		return "", err
	}
	type table struct{ Name, Columns, Values string }
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[table])
	if err != nil {
		return "", err
	}
	var remove, insert strings.Builder
	for _, t := range tables {
		fmt.Fprintf(&remove, "IF pg_relation_size('%[1]s') > 100000 THEN TRUNCATE %[1]s CASCADE; ELSIF pg_relation_size('%[1]s') > 0 THEN DELETE FROM %[1]s; END IF;\n", t.Name)
		var seed *string
		if err := tx.QueryRow(ctx, `SELECT quote_literal(json_agg(t)) FROM `+t.Name+` t`).Scan(&seed); err != nil {
			return "", err
		}
		if seed != nil {
			fmt.Fprintf(&insert, "INSERT INTO %[1]s (%[2]s) OVERRIDING SYSTEM VALUE SELECT %[3]s FROM json_populate_recordset(NULL::%[1]s, %[4]s);\n",
				t.Name, t.Columns, t.Values, *seed)
		}
	}
	rows, err = tx.Query(ctx, `
		SELECT format(E'PERFORM setval(%L, %s, %L);\n', quote_ident(sequencename), coalesce(last_value, start_value), last_value IS NOT NULL)
		  FROM pg_sequences WHERE schemaname = current_schema() ORDER BY 1`)
	if err != nil {
		return "", err
	}
	sequences, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return "DO $empty$ BEGIN\n" + remove.String() + insert.String() + strings.Join(sequences, "") + "END $empty$", err
}
