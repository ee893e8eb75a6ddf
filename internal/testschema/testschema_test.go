package testschema_test

import (
	"testing"

	eventbus "github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	taskgraph "github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

var (
	both  = testschema.With(taskgraph.Layer(), eventbus.Layer())
	plain = testschema.With()
)

func TestMain(m *testing.M) { testschema.Main(m) }

// borrowed has a test borrow a schema of a kind and do something to it, and returns its name.
func borrowed(t *testing.T, kind *testschema.Kind, do func(t *testing.T, schema string)) (name string) {
	t.Helper()
	require.True(t, t.Run("", func(t *testing.T) {
		name = kind.Borrow(t)
		do(t, name)
	}))
	return name
}

func exec(t *testing.T, schema, sql string) {
	t.Helper()
	testdb.Exec(t, testdb.URL(t), `DO $do$ BEGIN SET LOCAL search_path = `+schema+`; `+sql+` END $do$`)
}

func TestKind_RowsCameAndWent_TheNextTestHasWhatMigrationsMade(t *testing.T) {
	const asMade = `
		ASSERT (SELECT array_agg(name) FROM namespaces) = '{default}', 'namespaces';
		ASSERT (SELECT abs(age_weight - 0.1) < 0.001 FROM taskgraph_settings), 'settings';
		ASSERT (SELECT refreshed_at BETWEEN now() - interval '1 minute' AND now() FROM rollup_cursor), 'cursor';
		ASSERT (SELECT max(version_id) >= 8 FROM schema_migrations), 'versions';
		ASSERT NOT EXISTS (SELECT FROM worker_queue), 'items';
		ASSERT NOT EXISTS (SELECT FROM event_log), 'log';`
	first := borrowed(t, both, func(t *testing.T, schema string) {
		exec(t, schema, asMade+`
			INSERT INTO worker_queue (name) SELECT 'x' FROM generate_series(1, 5000);
			INSERT INTO event_log (namespace, event_type) VALUES ('default', 'e');
			PERFORM enqueue_work('x', p_namespace => 'other');
			UPDATE taskgraph_settings SET age_weight = 7;
			DELETE FROM rollup_cursor;
			DELETE FROM namespaces;
			DELETE FROM schema_migrations;`)
	})
	again := borrowed(t, both, func(t *testing.T, schema string) {
		exec(t, schema, asMade+`ASSERT enqueue_work('x') = 1, 'identity'; PERFORM enqueue_work('x', p_namespace => 'other');`)
	})
	require.Equal(t, first, again)
}

func TestKind_RightsCameAndWent_TheNextTestHasTheSchema(t *testing.T) {
	first := borrowed(t, plain, func(t *testing.T, schema string) {
		role := "reader_of_" + schema
		exec(t, schema, `CREATE ROLE `+role+`; EXECUTE format('GRANT USAGE ON SCHEMA %I TO `+role+`', current_schema());
			GRANT SELECT ON worker_queue TO `+role+`; GRANT UPDATE (name) ON worker_queue TO `+role+`; GRANT EXECUTE ON FUNCTION max_namespaces() TO `+role+`;
			GRANT USAGE ON SEQUENCE worker_queue_id_seq TO `+role+`;`)
		exec(t, schema, `DROP OWNED BY `+role+`; DROP ROLE `+role+`;`)
	})
	again := borrowed(t, plain, func(*testing.T, string) {})
	require.Equal(t, first, again)
}

func TestKind_MoreThanRowsWasChanged_IsDropped(t *testing.T) {
	for what, change := range map[string]string{
		"a table":        `CREATE TABLE mine ();`,
		"a column":       `ALTER TABLE worker_queue ADD COLUMN mine int;`,
		"a name":         `ALTER TABLE dead_letters RENAME COLUMN reason TO mine;`,
		"a default":      `ALTER TABLE worker_queue ALTER COLUMN name SET DEFAULT 'mine';`,
		"a type":         `ALTER TABLE dead_letters ALTER COLUMN reason TYPE varchar(100);`,
		"an index":       `DROP INDEX rates_forget_idx; CREATE INDEX rates_forget_idx ON rates (forget_at DESC);`,
		"a setting":      `ALTER TABLE worker_queue SET (autovacuum_enabled = off);`,
		"a function":     `CREATE OR REPLACE FUNCTION max_namespaces() RETURNS integer LANGUAGE sql AS $$ SELECT 7 $$;`,
		"how it runs":    `ALTER FUNCTION max_namespaces() COST 7;`,
		"a trigger":      `ALTER TABLE worker_queue DISABLE TRIGGER ALL;`,
		"a constraint":   `ALTER TABLE worker_queue ADD CONSTRAINT mine CHECK (id > 0);`,
		"a comment":      `COMMENT ON TABLE schema_migrations IS 'others';`,
		"a right":        `GRANT SELECT ON worker_queue TO PUBLIC;`,
		"all":            `EXECUTE format('DROP SCHEMA %I CASCADE', current_schema());`,
		"a right to use": `EXECUTE format('GRANT USAGE ON SCHEMA %I TO PUBLIC', current_schema());`,
	} {
		t.Run(what, func(t *testing.T) {
			changed := borrowed(t, plain, func(t *testing.T, schema string) { exec(t, schema, change) })
			borrowed(t, plain, func(t *testing.T, schema string) {
				require.NotEqual(t, changed, schema)
				exec(t, schema, `ASSERT to_regnamespace('`+changed+`') IS NULL;`)
			})
		})
	}
}
