package migrations_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/adapter/goworkflows/migrations"
	"github.com/pgwake/pgwake/internal/testdb"
	root "github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// schema is one with the migrations, and a connection to look at it.
type schema struct {
	name   string
	config *pgx.ConnConfig
	conn   *pgx.Conn
	bare   []string // objects of the Provider alone
}

func newSchema(t *testing.T, name string) *schema {
	t.Helper()
	if name == "" {
		name = testdb.Schema(t)
	} else {
		testdb.OwnSchema(t, name)
	}
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	require.NoError(t, root.Up(t.Context(), config, name))
	looking := config.Copy()
	looking.RuntimeParams["search_path"] = pgx.Identifier{name}.Sanitize()
	looking.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), looking)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	s := &schema{name: name, config: config, conn: conn}
	s.bare = s.objects(t)
	require.NoError(t, migrations.Up(t.Context(), config, name))
	return s
}

func (s *schema) list(t *testing.T, sql string, args ...any) []string {
	t.Helper()
	rows, err := s.conn.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// objects are all relations, functions, constraints and triggers of the schema, but for the table of what was applied, which stays.
func (s *schema) objects(t *testing.T) (all []string) {
	t.Helper()
	for _, object := range s.list(t, `
		SELECT 'relation ' || relname || ' ' || relkind::text FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema()))
		 UNION ALL SELECT 'function ' || oid::regprocedure || ' ' || md5(prosrc) FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(current_schema()))
		 UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND NOT tgisinternal
		 UNION ALL SELECT 'constraint ' || conname || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace(quote_ident(current_schema()))
		 ORDER BY 1`) {
		if !strings.Contains(object, "gowf_migrations") {
			all = append(all, object)
		}
	}
	return all
}

func stateOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func TestDown_NoRows_LeavesWhatTheProviderHasAndUpBringsEverythingBack(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", `Gowf "quoted", 1`} {
		s := newSchema(t, name)
		before := s.objects(t)
		for range 2 {
			require.NoError(t, migrations.Up(t.Context(), s.config, s.name), "again")
			require.Equal(t, before, s.objects(t))
			require.NoError(t, migrations.Down(t.Context(), s.config, s.name))
			require.Equal(t, s.bare, s.objects(t))
			require.NoError(t, migrations.Down(t.Context(), s.config, s.name), "again")
			require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
			current, latest, err := migrations.Version(t.Context(), s.conn, s.name)
			require.NoError(t, err)
			require.Equal(t, latest, current)
		}
		require.Equal(t, "PW006", stateOf(root.Down(t.Context(), s.config, s.name)), "it comes last")
	}
}

func TestDown_AWorkflow_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	require.Equal(t, []string{"{t}"}, s.list(t, `SELECT gowf_create('{w}', '{1}', '{null}', '{null}', '{null}', '{n}', '{q}', '{1}', 'goworkflows')::text`))
	before := s.objects(t)
	require.Equal(t, "PW006", stateOf(migrations.Down(t.Context(), s.config, s.name)))
	require.Equal(t, before, s.objects(t))
	require.Equal(t, []string{"w/1"}, s.list(t, `SELECT instance FROM gowf_instances`))
}

func TestSchema_EveryTable_CanBeReplicated(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	require.Empty(t, testdb.WithoutIdentity(t, s.name))
	// The server makes these checks whatever wal_level is.
	publication := pgx.Identifier{s.name}.Sanitize()
	s.list(t, `CREATE PUBLICATION `+publication+` FOR TABLE gowf_instances`)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP PUBLICATION IF EXISTS `+publication) })
	s.list(t, `SELECT gowf_create('{w}', '{1}', '{null}', '{null}', '{null}', '{n}', '{q}', '{1}', 'goworkflows')::text`)
	require.Equal(t, []string{"w/1"}, s.list(t, `UPDATE gowf_instances SET state = 1, completed_at = now() RETURNING instance`))
	require.Equal(t, []string{"w/1"}, s.list(t, `DELETE FROM gowf_instances RETURNING instance`))
}

func TestSchema_EveryTableAndFunction_HasACommentAndPinsItsSearchPath(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `Gowf "path"`)
	require.Empty(t, s.list(t, `SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND relkind = 'r'
		AND relname LIKE 'gowf%' AND coalesce(obj_description(oid, 'pg_class'), '') = ''`), "tables")
	require.Empty(t, s.list(t, `SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(current_schema())) AND proname LIKE 'gowf%'
		AND coalesce(obj_description(oid, 'pg_proc'), '') = ''`), "functions")
	require.Empty(t, s.list(t, `SELECT proname || ': ' || coalesce(array_to_string(proconfig, '; '), 'none') FROM pg_proc
		WHERE pronamespace = to_regnamespace(quote_ident(current_schema())) AND proname LIKE 'gowf%' AND NOT coalesce($1 = ANY (proconfig), false)`,
		"search_path="+pgx.Identifier{s.name}.Sanitize()+", pg_temp"))
}
