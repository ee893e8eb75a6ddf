package testroles_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what may those do whom nobody has given a right?

// granted lists everything of a schema on which PUBLIC has a right. Row types have those of their tables.
const granted = `
	WITH things (thing, acl) AS (
		SELECT 'schema', coalesce(nspacl, acldefault('n', nspowner)) FROM pg_namespace WHERE nspname = $1
		UNION ALL SELECT 'function ' || oid::regprocedure, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident($1))
		UNION ALL SELECT relkind::text || ' ' || relname, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
		            FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
		UNION ALL SELECT 'columns of ' || c.relname, a.attacl FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace = to_regnamespace(quote_ident($1))
		UNION ALL SELECT 'type ' || t.typname, coalesce(typacl, acldefault('T', typowner)) FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
		           WHERE t.typnamespace = to_regnamespace(quote_ident($1)) AND t.typelem = 0 AND coalesce(c.relkind, 'c') = 'c')
	SELECT thing || ': ' || a.privilege_type FROM things, aclexplode(acl) AS a WHERE a.grantee = 0 ORDER BY 1`

func TestSchema_OfAllLayers(t *testing.T) {
	t.Parallel()
	s := newStage(t)

	t.Run("PUBLIC has no right on anything", func(t *testing.T) {
		require.Empty(t, s.list(granted, s.schema))
		require.Greater(t, len(s.list(`SELECT 'x' FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident($1))`, s.schema)), 300)
	})

	// Who calls a function has a path of his own, and what it names is looked up there unless the function has its own path, whose last
	// entry is then pg_temp. Where it was parsed when it was made (BEGIN ATOMIC, RETURN) it looks up nothing. For the trigger that has all
	// names in full, see TestPath_HasOtherThingsOfOurNames_DivertsNothing.
	t.Run("functions look up names on a path of their own", func(t *testing.T) {
		require.Equal(t, []string{"notify_inserted"}, s.list(`SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident($1)) AND prosqlbody IS NULL
			AND NOT coalesce('search_path=' || $2 || ', pg_temp' = ANY (proconfig), false)`, s.schema, pgx.Identifier{s.schema}.Sanitize()))
	})

	// Each of these acts for whoever may call it with the owner's rights: a new one is to be thought about.
	t.Run("functions with the rights of the owner are these", func(t *testing.T) {
		require.Equal(t, []string{
			"adopt_event_log", "create_task", "create_task_many", "emit", "emit_many", "enqueue_message", "enqueue_message_many", "enqueue_work", "enqueue_work_item", "enqueue_work_many",
			"event_of_key_emitted", "keep_event_log", "make_event_partitions", "notify_queues", "tell_namespace_created",
		}, s.list(`SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident($1)) AND prosecdef ORDER BY proname COLLATE "C"`, s.schema))
	})

	t.Run("a trigger with the rights of the owner fires for its own table alone", func(t *testing.T) {
		in := pgx.Identifier{s.schema}.Sanitize() + "."
		s.list(`SELECT ` + in + `set_taskgraph_settings(true)::text`)
		role := s.role(testroles.Worker)
		worker := testroles.Connect(t, role)
		_, err := worker.Exec(s.within(), `
			CREATE TYPE pg_temp.bait AS (x int);
			CREATE FUNCTION pg_temp.spring(pg_temp.bait) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''sprung as %'', current_user; END';
			CREATE CAST (pg_temp.bait AS text) WITH FUNCTION pg_temp.spring AS ASSIGNMENT;
			CREATE TABLE pg_temp.namespaces (name pg_temp.bait, created_at timestamptz)`)
		require.NoError(t, err)
		trigger := `CREATE TRIGGER mine AFTER INSERT ON pg_temp.namespaces FOR EACH ROW EXECUTE FUNCTION ` + in + `tell_namespace_created()`
		s.refused(worker, trigger)
		s.exec(`GRANT EXECUTE ON FUNCTION ` + in + `tell_namespace_created TO ` + role) // as those who were granted all functions have it
		_, err = worker.Exec(s.within(), trigger)
		require.NoError(t, err)
		_, err = worker.Exec(s.within(), `INSERT INTO pg_temp.namespaces VALUES (ROW(1), now())`)
		require.ErrorContains(t, err, "tell_namespace_created is the trigger of the table namespaces")
		require.NotContains(t, err.Error(), "sprung")
		_, err = worker.Exec(s.within(), `SELECT `+in+`register_namespaces(ARRAY['told'])`)
		require.NoError(t, err)
	})

	t.Run("what a worker needs no owner's right for, it has none for", func(t *testing.T) {
		in := pgx.Identifier{s.schema}.Sanitize() + "."
		s.refused(testroles.Connect(t, s.role(testroles.Worker)),
			`UPDATE `+in+`schema_migrations SET version_id = 1`, `DELETE FROM `+in+`taskgraph_migrations`, `INSERT INTO `+in+`eventbus_migrations (version_id, is_applied) VALUES (9, true)`,
			`DROP TABLE `+in+`worker_queue`, `TRUNCATE `+in+`history`, `ALTER TABLE `+in+`worker_queue DISABLE TRIGGER ALL`, `CREATE TABLE `+in+`mine (n int)`,
			`CREATE OR REPLACE FUNCTION `+in+`channel(p_queue text) RETURNS text LANGUAGE sql AS 'SELECT 1'`, `DROP SCHEMA `+pgx.Identifier{s.schema}.Sanitize()+` CASCADE`)
	})
}

// See adapter/goworkflows for the layer that is another module's.
func TestRights_WhateverLayersThereAre_AreWhatThePageSays(t *testing.T) {
	t.Parallel()
	for _, layers := range [][]string{{"taskgraph", "eventbus"}, {"eventbus"}} {
		t.Run(strings.Join(layers, " "), func(t *testing.T) {
			t.Parallel()
			s := stageOf(t)
			for n := range len(layers) + 1 { // one layer after the other
				s.migrate(layers[:n]...)
				t.Run(fmt.Sprint("the first ", n), func(t *testing.T) { testroles.RequireRights(t, s.schema, layers[:n]...) })
			}
		})
	}
}

// An administrator's default privileges give away what is made later; and not all in the schema is the migrations'.
func TestPublic_DefaultPrivilegesGiveTablesAway_AreTakenBack_AndOthersThingsAreLeftAlone(t *testing.T) {
	t.Parallel()
	s := &stage{t: t, schema: testdb.Schema(t)}
	conn, err := pgx.Connect(t.Context(), testdb.URL(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	s.super = conn
	in := pgx.Identifier{s.schema}.Sanitize()
	s.exec(`CREATE SCHEMA ` + in + `;
		ALTER DEFAULT PRIVILEGES IN SCHEMA ` + in + ` GRANT SELECT ON TABLES TO PUBLIC;
		ALTER DEFAULT PRIVILEGES IN SCHEMA ` + in + ` GRANT USAGE ON SEQUENCES TO PUBLIC;
		CREATE TABLE ` + in + `.orders (n int); CREATE FUNCTION ` + in + `.order_total() RETURNS int LANGUAGE sql AS 'SELECT 1'`)
	p, err := pgwake.Open(s.within(), testdb.URL(t), &pgwake.Config{Schema: s.schema, Logger: silent, Mode: pgwake.ModeDisabled})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(s.within())) }()
	_, err = taskgraph.New(s.within(), p, nil)
	require.NoError(t, err)
	_, err = eventbus.New(s.within(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	s.list(`SELECT ` + in + `.keep_event_log(p_months => 4)`)
	require.Equal(t, []string{"function " + s.schema + ".order_total(): EXECUTE", "r orders: SELECT"}, s.list(granted, s.schema))
}
