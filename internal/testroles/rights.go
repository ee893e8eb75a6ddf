package testroles

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
)

// This file answers: has each role what docs/security.md says in words, and nothing else?

// layered is what is named there for a layer, or "" for the Provider: the functions that a producer calls, the tables that it reads, and what
// changes nothing although it is not declared so, which a reader calls.
var layered = map[string]struct{ producer, read, reader []string }{
	"": {
		producer: []string{"enqueue_work", "enqueue_work_many", "enqueue_message", "enqueue_message_many", "enqueue_work_item", "notify_queues"},
		read:     []string{"schema_migrations"},
		reader:   []string{"read_history", "resume_history", "node_listens", "ask_nodes"},
	},
	"taskgraph":   {producer: []string{"create_task", "create_task_many"}, read: []string{"taskgraph_migrations"}},
	"eventbus":    {producer: []string{"emit", "emit_many"}, read: []string{"eventbus_migrations"}, reader: []string{"list_nodes", "list_patterns", "log_xact"}},
	"goworkflows": {},
}

// differences lists, for a role, everything of a schema on which it has a right that it is not to have, or has not one that it is to have. A right
// on one column of a table is one on the table.
const differences = `
	WITH things AS (
		SELECT 'schema ' || nspname AS thing, r.name AS right_name, has_schema_privilege($2, oid, r.name) AS has, $2 <> 'public' AND r.name = 'USAGE' AS is_to
		  FROM pg_namespace, unnest('{USAGE,CREATE}'::text[]) AS r (name) WHERE nspname = $1
		UNION ALL
		SELECT 'function ' || p.oid::regprocedure, 'EXECUTE', has_function_privilege($2, p.oid, 'EXECUTE'),
		       CASE $3 WHEN 'pgwake_worker' THEN p.prorettype <> 'trigger'::regtype WHEN 'pgwake_producer' THEN p.proname = ANY ($4)
		               WHEN 'pgwake_reader' THEN p.provolatile <> 'v' OR p.proname = ANY ($6) ELSE false END
		  FROM pg_proc p WHERE p.pronamespace = to_regnamespace(quote_ident($1))
		UNION ALL
		SELECT 'table ' || c.relname, r.name,
		       has_table_privilege($2, c.oid, r.name) OR r.name IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES') AND has_any_column_privilege($2, c.oid, r.name),
		       CASE $3 WHEN 'pgwake_worker' THEN r.name = 'SELECT' OR r.name IN ('INSERT', 'UPDATE', 'DELETE') AND c.relname NOT LIKE '%\_migrations'
		               WHEN 'pgwake_producer' THEN r.name = 'SELECT' AND c.relname = ANY ($5) WHEN 'pgwake_reader' THEN r.name = 'SELECT' ELSE false END
		  FROM pg_class c, unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS r (name)
		 WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
		UNION ALL
		SELECT 'sequence ' || c.relname, r.name, has_sequence_privilege($2, c.oid, r.name),
		       CASE $3 WHEN 'pgwake_worker' THEN r.name IN ('USAGE', 'SELECT') WHEN 'pgwake_reader' THEN r.name = 'SELECT' ELSE false END
		  FROM pg_class c, unnest('{USAGE,SELECT,UPDATE}'::text[]) AS r (name) WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind = 'S')
	SELECT thing || ': ' || CASE WHEN has THEN 'has ' ELSE 'lacks ' END || right_name FROM things WHERE has <> is_to
	UNION ALL SELECT 'there is next to nothing' FROM things HAVING count(*) < 200
	UNION ALL SELECT 'there is no ' || n FROM unnest($4 || $6) AS n WHERE NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident($1)) AND proname = n)
	ORDER BY 1`

// RequireRights asserts that each role of the page, made by its SQL, has the rights on a schema with these layers that the page says in words,
// and nobody else has any.
func RequireRights(tb testing.TB, schema string, layers ...string) {
	tb.Helper()
	var producer, read, reader []string
	for _, layer := range append([]string{""}, layers...) {
		of, known := layered[layer]
		if !known {
			tb.Fatalf("which rights are there to be for layer %s?", layer)
		}
		producer, read, reader = append(producer, of.producer...), append(read, of.read...), append(reader, of.reader...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, testdb.URL(tb))
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close(ctx)
	for _, role := range []string{Worker, Producer, Reader, "public"} {
		name := role
		if role != "public" {
			name = New(tb, role, schema, layers...)
		}
		rows, err := conn.Query(ctx, differences, schema, name, role, producer, read, reader)
		if err != nil {
			tb.Fatal(err)
		}
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			tb.Fatal(err)
		}
		for _, of := range all {
			tb.Errorf("%s: %s", role, of)
		}
	}
}
