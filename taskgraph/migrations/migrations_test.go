package migrations_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	root "github.com/pgwake/pgwake/migrations"
	"github.com/pgwake/pgwake/taskgraph/migrations"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { testschema.Main(m) }

// schemas are those of tests that change no more than rows.
var schemas = testschema.With(migrations.Layer())

// schema is one with the Provider's migrations, and a connection to look at it.
type schema struct {
	name   string
	config *pgx.ConnConfig
	conn   *pgx.Conn
}

func newSchema(t *testing.T, name string) *schema {
	t.Helper()
	if name == "" {
		name = testdb.Schema(t)
	} else {
		testdb.OwnSchema(t, name)
	}
	s := look(t, name)
	require.NoError(t, root.Up(t.Context(), s.config, name))
	return s
}

// migrated is a schema with the migrations of tasks as well.
func migrated(t *testing.T) *schema {
	t.Helper()
	return look(t, schemas.Borrow(t))
}

func look(t *testing.T, name string) *schema {
	t.Helper()
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	looking := config.Copy()
	looking.RuntimeParams["search_path"] = pgx.Identifier{name}.Sanitize()
	looking.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), looking)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return &schema{name, config, conn}
}

func (s *schema) up(t *testing.T) {
	t.Helper()
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
}

func (s *schema) down(t *testing.T) error {
	t.Helper()
	return migrations.Down(t.Context(), s.config, s.name)
}

func (s *schema) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := s.conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

func (s *schema) list(t *testing.T, sql string, args ...any) []string {
	t.Helper()
	rows, err := s.conn.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// objects are all relations, functions, constraints and triggers of the schema.
func (s *schema) objects(t *testing.T) []string {
	t.Helper()
	return s.list(t, `
		SELECT 'relation ' || relname || ' ' || relkind::text FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema()))
		 UNION ALL SELECT 'function ' || oid::regprocedure || ' ' || md5(prosrc) FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(current_schema()))
		 UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND NOT tgisinternal
		 UNION ALL SELECT 'constraint ' || conname || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace(quote_ident(current_schema()))
		 ORDER BY 1`)
}

func (s *schema) version(t *testing.T) (current, latest int64) {
	t.Helper()
	current, latest, err := migrations.Version(t.Context(), s.conn, s.name)
	require.NoError(t, err)
	return current, latest
}

func stateOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func TestUp_TwentyAtOnce_AllSucceedAndItIsMigratedOnce(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	current, _ := s.version(t)
	require.Zero(t, current)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if err := migrations.Up(t.Context(), s.config.Copy(), s.name); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	current, latest := s.version(t)
	require.Equal(t, latest, current)
	require.Len(t, s.list(t, `SELECT version_id::text FROM taskgraph_migrations WHERE version_id > 0`), int(latest))
}

func TestUp_Again_ChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, definition)
	before, rows := s.objects(t), s.list(t, `SELECT to_json(d)::text FROM task_definitions d`)
	s.up(t)
	require.NoError(t, root.Up(t.Context(), s.config, s.name))
	require.Equal(t, before, s.objects(t))
	require.Equal(t, rows, s.list(t, `SELECT to_json(d)::text FROM task_definitions d`))
}

func TestUp_NameThatNeedsQuoting_NothingLandsElsewhere(t *testing.T) {
	t.Parallel()
	s, plain := newSchema(t, `Graph "quoted", 1`), newSchema(t, "")
	s.up(t)
	plain.up(t)
	require.Equal(t, len(plain.objects(t)), len(s.objects(t)))
	require.NoError(t, s.down(t))
}

func TestUp_ProviderIsNotMigrated_IsRefused(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	require.NoError(t, root.Down(t.Context(), s.config, s.name))
	require.ErrorIs(t, migrations.Up(t.Context(), s.config, s.name), root.ErrNotMigrated)
	require.NoError(t, root.Up(t.Context(), s.config, s.name))
	s.up(t)
}

func TestUp_SchemaWasMadeByOthers_IsRefusedUnchanged(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `COMMENT ON TABLE taskgraph_migrations IS 'of another time'`)
	before := s.objects(t)
	require.ErrorIs(t, migrations.Up(t.Context(), s.config, s.name), root.ErrForeign)
	_, _, err := migrations.Version(t.Context(), s.conn, s.name)
	require.ErrorIs(t, err, root.ErrForeign)
	require.Equal(t, before, s.objects(t))
}

func TestDown_NoRows_LeavesWhatTheProviderHasAndUpBringsEverythingBack(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	bare := s.objects(t)
	s.up(t)
	before := s.objects(t)
	for range 2 {
		require.NoError(t, s.down(t))
		for _, object := range s.objects(t) {
			if !strings.Contains(object, "taskgraph_migrations") {
				require.Contains(t, bare, object)
			}
		}
		current, _ := s.version(t)
		require.Zero(t, current)
		require.NoError(t, s.down(t), "again")
		s.up(t)
		require.Equal(t, before, s.objects(t))
	}
	require.Equal(t, "PW006", stateOf(root.Down(t.Context(), s.config, s.name)), "it comes last")
	require.Equal(t, before, s.objects(t))
	require.NoError(t, s.down(t))
	require.NoError(t, root.Down(t.Context(), s.config, s.name))
}

const definition = `INSERT INTO task_definitions (task_definition_id, namespace, name) VALUES (gen_random_uuid(), 'default', 'order')`

// rows are statements that put one row into one of the tables whose loss would hurt.
var rows = map[string]string{
	"task_definitions": definition,
	"tasks": `WITH d AS (INSERT INTO task_definitions (task_definition_id, namespace, name) VALUES (gen_random_uuid(), 'default', 'order') RETURNING task_definition_id)
		INSERT INTO tasks (task_id, task_definition_id, namespace, correlation_id) SELECT gen_random_uuid(), task_definition_id, 'default', gen_random_uuid() FROM d`,
	"task_transitions": `INSERT INTO task_transitions (task_id, sort_key, to_state) VALUES (gen_random_uuid(), 1, 'pending')`,
	"step_transitions": `INSERT INTO step_transitions (step_id, task_id, sort_key, to_state) VALUES (gen_random_uuid(), gen_random_uuid(), 1, 'pending')`,
}

func TestDown_AnyTableHoldsARow_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	for table, insert := range rows {
		t.Run(table, func(t *testing.T) {
			s := migrated(t)
			s.exec(t, insert)
			before := s.objects(t)
			kept := s.list(t, `SELECT to_json(q)::text FROM `+table+` q`)
			require.Len(t, kept, 1)
			require.Equal(t, "PW006", stateOf(s.down(t)))
			require.Equal(t, "PW006", stateOf(root.Down(t.Context(), s.config, s.name)))
			require.Equal(t, before, s.objects(t))
			require.Equal(t, kept, s.list(t, `SELECT to_json(q)::text FROM `+table+` q`))
		})
	}
}

func TestDown_RowIsNotYetCommitted_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := migrated(t)
	before := s.objects(t)
	producer, err := pgx.ConnectConfig(t.Context(), s.conn.Config())
	require.NoError(t, err)
	defer producer.Close(context.Background())
	tx, err := producer.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), definition)
	require.NoError(t, err)
	down := make(chan error, 1)
	go func() { down <- migrations.Down(context.Background(), s.config, s.name) }()
	require.Eventually(t, func() bool {
		return s.list(t, `SELECT count(*)::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
			WHERE NOT l.granted AND c.relnamespace = to_regnamespace(quote_ident(current_schema()))`)[0] != "0"
	}, 20*time.Second, 5*time.Millisecond, "it waits for the transaction")
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "PW006", stateOf(<-down))
	require.Equal(t, before, s.objects(t))
}

func TestSchema_EveryTableAndFunction_HasAComment(t *testing.T) {
	t.Parallel()
	s := migrated(t)
	require.Empty(t, s.list(t, `SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND relkind IN ('r', 'p', 'v', 'm')
		AND relname <> 'schema_migrations' AND coalesce(obj_description(oid, 'pg_class'), '') = ''`), "tables and views")
	require.Empty(t, s.list(t, `SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(current_schema()))
		AND coalesce(obj_description(oid, 'pg_proc'), '') = ''`), "functions")
}

// A function that has a backslash in a literal says how literals are read: it is parsed in the sessions that call it.
func TestSchema_EveryFunctionWithABackslash_SaysHowLiteralsAreRead(t *testing.T) {
	t.Parallel()
	require.Empty(t, testdb.ReadByTheirCallers(t, migrated(t).name))
}

func TestSchema_EveryTable_CanBeReplicated(t *testing.T) {
	t.Parallel()
	require.Empty(t, testdb.WithoutIdentity(t, migrated(t).name))
}

func TestSchema_EveryFunctionOfTables_PinsItsSearchPath(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `Graph "path"`)
	s.up(t)
	want := "search_path=" + pgx.Identifier{s.name}.Sanitize() + ", pg_temp"
	require.Empty(t, s.list(t, `SELECT proname || ': ' || coalesce(array_to_string(proconfig, '; '), 'none') FROM pg_proc
		WHERE pronamespace = to_regnamespace(quote_ident(current_schema())) AND prosrc ~ '\m(FROM|UPDATE|INTO|JOIN|PERFORM) ' AND provolatile <> 'i'
		  AND proname NOT IN ('notify_inserted', 'new_uuid') AND NOT coalesce($1 = ANY (proconfig), false)`, want))
}
