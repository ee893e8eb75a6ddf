package migrations_test

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/eventbus/migrations"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	root "github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { testschema.Main(m) }

// schemas are those of tests that change no more than rows.
var schemas = testschema.With(migrations.Layer())

// schema is one with the Provider's migrations and those of the bus, and a connection to look at it.
type schema struct {
	name   string
	config *pgx.ConnConfig
	conn   *pgx.Conn
	bare   []string // objects before those of the bus
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
	s.bare = s.objects(t)
	require.NoError(t, migrations.Up(t.Context(), s.config, name))
	return s
}

// look returns a schema that is there already, or is to be.
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
	return &schema{name: name, config: config, conn: conn}
}

func (s *schema) down(t *testing.T) error {
	t.Helper()
	return migrations.Down(t.Context(), s.config, s.name)
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
		 UNION ALL SELECT 'trigger ' || pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND NOT tgisinternal
		 UNION ALL SELECT 'constraint ' || conname || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace(quote_ident(current_schema()))
		 ORDER BY 1`)
}

func stateOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func TestDown_NoRows_LeavesWhatTheProviderHasAndUpBringsEverythingBack(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", `Bus "quoted", 1`} {
		s := newSchema(t, name)
		before := s.objects(t)
		for range 2 {
			require.NoError(t, migrations.Up(t.Context(), s.config, s.name), "again")
			require.Equal(t, before, s.objects(t))
			require.NoError(t, s.down(t))
			for _, object := range s.objects(t) {
				if !strings.Contains(object, "eventbus_migrations") {
					require.Contains(t, s.bare, object)
				}
			}
			require.NoError(t, s.down(t), "again")
			require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
			current, latest, err := migrations.Version(t.Context(), s.conn, s.name)
			require.NoError(t, err)
			require.Equal(t, latest, current)
		}
		require.Equal(t, "PW006", stateOf(root.Down(t.Context(), s.config, s.name)), "it comes last")
	}
}

func TestDown_AnyTableHoldsARow_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	for table, insert := range map[string]string{
		"event_log":        `SELECT emit('default', 'a')`,
		"event_groups":     `SELECT subscribe('default', 'g', '{a}')`,
		"event_nodes":      `SELECT register_node('n')`,
		"scheduled_tasks":  `SELECT schedule_task('default', 's', '@daily', 'a')`,
		"event_dedup_keys": `INSERT INTO event_dedup_keys VALUES ('default', 'k', 1, now())`,
	} {
		t.Run(table, func(t *testing.T) {
			s := look(t, schemas.Borrow(t))
			s.list(t, strings.Replace(insert, "SELECT ", "SELECT 'x' || ", 1)+map[bool]string{true: " RETURNING dedup_key"}[strings.HasPrefix(insert, "INSERT")])
			before, kept := s.objects(t), s.list(t, `SELECT to_json(q)::text FROM `+table+` q`)
			require.Len(t, kept, 1)
			require.Equal(t, "PW006", stateOf(s.down(t)))
			require.Equal(t, before, s.objects(t))
			require.Equal(t, kept, s.list(t, `SELECT to_json(q)::text FROM `+table+` q`))
		})
	}
}

func TestSchema_EveryTableAndFunction_HasACommentAndPinsItsSearchPath(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `Bus "path"`)
	require.Empty(t, s.list(t, `SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema())) AND relkind IN ('r', 'p', 'v', 'm')
		AND relname <> 'schema_migrations' AND coalesce(obj_description(oid, 'pg_class'), '') = ''`), "tables")
	require.Empty(t, s.list(t, `SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(current_schema()))
		AND coalesce(obj_description(oid, 'pg_proc'), '') = ''`), "functions")
	require.Empty(t, s.list(t, `SELECT proname || ': ' || coalesce(array_to_string(proconfig, '; '), 'none') FROM pg_proc
		WHERE pronamespace = to_regnamespace(quote_ident(current_schema())) AND prosrc ~ '\m(FROM|UPDATE|INTO|JOIN|PERFORM) ' AND provolatile <> 'i'
		  AND proname <> 'notify_inserted' AND NOT coalesce($1 = ANY (proconfig), false)`, "search_path="+pgx.Identifier{s.name}.Sanitize()+", pg_temp"))
}

func TestSchema_EveryTable_CanBeReplicated(t *testing.T) {
	t.Parallel()
	require.Empty(t, testdb.WithoutIdentity(t, newSchema(t, "").name))
}

// A function that has a backslash in a literal says how literals are read: it is parsed in the sessions that call it.
func TestSchema_EveryFunctionWithABackslash_SaysHowLiteralsAreRead(t *testing.T) {
	t.Parallel()
	require.Empty(t, testdb.ReadByTheirCallers(t, newSchema(t, "").name))
}

// Whoever emits in a month for which nobody has made a partition loses nothing, and making it brings the events there.
func TestMakeEventPartitions_EventsInTheDefaultPartition_AreMovedAndStayInTheLog(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.list(t, `INSERT INTO event_log (namespace, event_type, emitted_at) VALUES ('default', 'a', '2031-03-15'), ('default', 'b', '2031-03-31 23:59:59+00'), ('default', 'c', '2031-04-01 00:00:00+00') RETURNING event_type`)
	where := `SELECT event_type || ' ' || tableoid::regclass::text FROM event_log ORDER BY event_type`
	require.Equal(t, []string{"a event_log_default", "b event_log_default", "c event_log_default"}, s.list(t, where))
	require.Equal(t, []string{"1"}, s.list(t, `SELECT make_event_partitions(0, '2031-03-01')::text`))
	require.Equal(t, []string{"a event_log_p2031_03", "b event_log_p2031_03", "c event_log_default"}, s.list(t, where))
	require.Equal(t, []string{"2"}, s.list(t, `SELECT make_event_partitions(2, '2031-03-01')::text`), "those that are missing")
	require.Equal(t, []string{"a event_log_p2031_03", "b event_log_p2031_03", "c event_log_p2031_04"}, s.list(t, where))
	require.Equal(t, []string{"3"}, s.list(t, `SELECT count(*)::text FROM pg_class WHERE relname = ANY (ARRAY(
		SELECT 'event_log_p' || to_char(date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => n), 'YYYY_MM') FROM generate_series(0, 2) n))
		AND relnamespace = to_regnamespace(quote_ident(current_schema()))`), "this month and two more are there from the beginning")
}

// olderSchema is a newSchema as far as it was before a file was there.
func olderSchema(t *testing.T, before string) *schema {
	t.Helper()
	s := newSchema(t, "")
	require.NoError(t, s.down(t))
	older := migrations.Layer()
	files := make(fstest.MapFS)
	names, err := fs.Glob(older.Files, "*.sql")
	require.NoError(t, err)
	for _, name := range names {
		if name < before {
			text, err := fs.ReadFile(older.Files, name)
			require.NoError(t, err)
			files[name] = &fstest.MapFile{Data: text}
		}
	}
	older.Files = files
	require.NoError(t, older.Up(t.Context(), s.config, s.name))
	return s
}

// What a schedule was given before it was seen to is as it would be given now.
func TestUp_SchedulesHaveJitterOfDays_ItIsHours(t *testing.T) {
	t.Parallel()
	s := olderSchema(t, "00011")
	for name, jitter := range map[string]string{"a": "1 day", "b": "1 mon -29 days", "c": "01:02:03.000004", "d": "0"} {
		s.list(t, `SELECT schedule_task('default', $1, '@daily', 'a', p_jitter => $2::text::interval)::text`, name, jitter)
	}
	jitters := func() []string { return s.list(t, `SELECT jitter::text FROM scheduled_tasks ORDER BY name`) }
	require.Equal(t, []string{"1 day", "1 mon -29 days", "01:02:03.000004", "00:00:00"}, jitters())
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
	require.Equal(t, []string{"24:00:00", "24:00:00", "01:02:03.000004", "00:00:00"}, jitters())
}

// Groups that are gone have left keys and lines, which keep the log and schedules of their keys for ever.
func TestUp_KeysAndLinesOfGroupsThatAreGone_GoWithTheNextHeartbeat(t *testing.T) {
	t.Parallel()
	s := olderSchema(t, "00013")
	s.list(t, `SELECT subscribe('default', 'g', '{a}')::text`)
	for _, key := range []string{"k", "k", "l"} {
		s.list(t, `SELECT emit('default', 'a', p_key => $1)::text`, key)
	}
	keys := `SELECT concat_ws(' ', 'key', group_id, key, item_id) FROM event_keys UNION ALL SELECT concat_ws(' ', 'line', group_id, key, event_id) FROM event_lines ORDER BY 1`
	stay := s.list(t, keys)
	require.Len(t, stay, 3)
	for _, sql := range []string{
		`INSERT INTO event_keys (group_id, key, item_id) VALUES (7, 'k', NULL), (8, 'k', 1000) RETURNING key`,
		`INSERT INTO event_lines (group_id, key, event_id, emitted_at, event_type) VALUES (7, 'k', 1, now(), 'a'), (8, 'k', 2, now(), 'a'), (9, 'k', 1, now(), 'a') RETURNING key`,
		`INSERT INTO worker_queue (id, name, tag, key) VALUES (1000, 'a', 'eventbus/former|a', 'k') RETURNING key`,
	} {
		s.list(t, sql)
	}
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name), "again")
	s.list(t, `SELECT remove_strays()::text`)
	require.Equal(t, stay, s.list(t, keys))
	require.Equal(t, []string{"2"}, s.list(t, `SELECT count(*)::text FROM worker_queue`), "the heads of both lines")
}

// Work items that were enqueued twice have left the places of those that were not added, and nodes by SQL heartbeats that nobody can count with.
func TestUp_ItemsThatWereNeverThereHaveKeysAndPlaces_LinesGoOnWithTheNextHeartbeat(t *testing.T) {
	t.Parallel()
	s := olderSchema(t, "00016")
	s.list(t, `SELECT subscribe('default', 'g', '{a}')::text`)
	forge := func(key string) {
		s.list(t, `SELECT enqueue_work('x', p_tag => 'eventbus/g|a', p_key => $1, p_dedup_key => 'd')::text`, key)
	}
	emit := func(key string) { s.list(t, `SELECT emit('default', 'a', p_key => $1)::text`, key) }
	s.list(t, `SELECT enqueue_work('x', p_dedup_key => 'd')::text`)
	forge("alone")
	forge("head")
	emit("head")
	emit("waits")
	forge("waits")
	emit("waits")
	emit("good")
	heads := func() []string { return s.list(t, `SELECT key FROM worker_queue WHERE key IS NOT NULL ORDER BY id`) }
	require.Equal(t, []string{"waits", "good"}, heads())
	for id, heartbeats := range map[string]string{"long": "100000 years", "mixed": "-100000 years 36000001 days", "good": "1 day"} {
		s.list(t, `SELECT register_node($1, p_heartbeats => $2::text::interval)::text`, id, heartbeats)
	}
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
	s.list(t, `SELECT remove_strays()::text`)
	require.Equal(t, []string{"waits", "good", "head"}, heads())
	require.Equal(t, []string{"good", "head", "waits"}, s.list(t, `SELECT key FROM event_keys ORDER BY key`))
	s.list(t, `DELETE FROM worker_queue WHERE key = 'waits' RETURNING key`)
	require.Equal(t, []string{"good", "head", "waits"}, heads())
	s.list(t, `DELETE FROM worker_queue RETURNING name`)
	require.Empty(t, s.list(t, `SELECT key FROM event_keys UNION ALL SELECT key FROM event_lines`))
	require.Equal(t, []string{"good 1 day", "long 00:00:30", "mixed 00:00:30"}, s.list(t, `SELECT node_id || ' ' || heartbeats FROM event_nodes ORDER BY node_id`))
	require.Len(t, s.list(t, `SELECT node_id FROM list_nodes()`), 3)
}

// Sessions that read backslashes as escapes have made another schema, and subscribed to other types than they were asked to.
func TestUp_BackslashesWereReadAsEscapes_IsAsIfTheyHadNotBeen(t *testing.T) {
	t.Parallel()
	const check = `SELECT DISTINCT pg_get_constraintdef(oid) || convalidated FROM pg_constraint WHERE connamespace = current_schema()::regnamespace AND conname = 'event_log_event_type_check'`
	fresh := newSchema(t, "").list(t, check)
	for what, test := range map[string]struct {
		types []string
		mends bool
	}{"a log that is as it should be": {[]string{"a.b"}, true}, "a type that there is not": {[]string{"a.b", "a|b"}, false}} {
		s := olderSchema(t, "00021")
		_, err := s.conn.PgConn().Exec(t.Context(), `SET standard_conforming_strings = off;
			DO $$
			DECLARE
				v_table regclass;
			BEGIN
				ALTER TABLE event_log DROP CONSTRAINT event_log_event_type_check;
				FOR v_table IN SELECT conrelid::regclass FROM pg_constraint WHERE conname = 'event_log_event_type_check' AND connamespace = current_schema()::regnamespace LOOP
					EXECUTE format('ALTER TABLE %s DROP CONSTRAINT event_log_event_type_check', v_table);
				END LOOP;
				ALTER TABLE event_log ADD CONSTRAINT event_log_event_type_check
					CHECK (octet_length(event_type) <= 180 AND event_type ~ '^[^.*#|[:space:][:cntrl:]]+(\.[^.*#|[:space:][:cntrl:]]+)*$');
			END
			$$;
			SELECT subscribe('default', 'g', '{a.*}');
			RESET standard_conforming_strings`).ReadAll()
		require.NoError(t, err)
		s.list(t, `SELECT make_event_partitions(3)::text`) // one more, with a constraint of its own
		require.NotEqual(t, fresh, s.list(t, check))
		const regex = `SELECT regex FROM event_subscriptions`
		require.Equal(t, []string{`^.a.[^.]+$`}, s.list(t, regex))
		for _, eventType := range test.types {
			s.list(t, `SELECT emit('default', $1)::text`, eventType)
		}
		require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
		require.Equal(t, []string{`^\.a\.[^.]+$`}, s.list(t, regex), what)
		require.Equal(t, test.mends, slices.Equal(fresh, s.list(t, check)), what)
		require.Len(t, s.list(t, `SELECT event_type FROM event_log`), len(test.types), what)
	}
}

// Sessions whose times were read as those of another zone have made partitions that begin hours after their months. All of an event's past stays as it was.
func TestUp_PartitionsBeginAfterTheirMonths_AreThoseOfTheirMonths(t *testing.T) {
	t.Parallel()
	s := olderSchema(t, "00021")
	s.list(t, `SELECT subscribe('default', 'g', '{a}')::text`)
	const partitions = `SELECT p.name || ' ' || pg_get_expr(c.relpartbound, c.oid) FROM event_partitions() p JOIN pg_class c ON c.oid = p.name::text::regclass ORDER BY 1`
	s.list(t, `SELECT set_config('timezone', 'UTC', false)`)
	want := s.list(t, partitions)
	require.Len(t, want, 3)
	_, err := s.conn.Exec(t.Context(), `DO $$
		DECLARE
			p record;
		BEGIN
			FOR p IN SELECT * FROM event_partitions() ORDER BY 1 DESC LOOP
				EXECUTE format('ALTER TABLE event_log DETACH PARTITION %I', p.name);
				EXECUTE format('ALTER TABLE event_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', p.name, p.from_at + interval '3:30', p.to_at + interval '3:30');
			END LOOP;
		END
		$$`)
	require.NoError(t, err)
	require.NotEqual(t, want, s.list(t, partitions))
	begins := `date_trunc('month', now(), 'UTC') + `
	for _, emitted := range []string{`interval '1 hour'`, `interval '1 day'`, `interval '1 month 1 hour'`, `interval '1 month 1 day'`, `interval '3 months 1 hour'`, `interval '4 months'`} {
		require.NotEmpty(t, s.list(t, `WITH e AS (SELECT emit('default', 'a', p_key => 'k') AS id) SELECT id::text FROM e`))
		s.list(t, `UPDATE event_log SET emitted_at = `+begins+emitted+` WHERE event_id = (SELECT max(event_id) FROM event_log) RETURNING 'done'`)
	}
	const all = `SELECT to_jsonb(e)::text FROM event_log e UNION ALL SELECT to_jsonb(q)::text FROM worker_queue q UNION ALL SELECT to_jsonb(f)::text FROM event_lines f ORDER BY 1`
	before := s.list(t, all)
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
	require.Equal(t, want, s.list(t, partitions))
	require.Equal(t, before, s.list(t, all))
	require.Equal(t, []string{"2"}, s.list(t, `SELECT count(*)::text FROM event_log_default`))
	require.Equal(t, []string{"2"}, s.list(t, `SELECT make_event_partitions(4)::text`))
	require.Equal(t, []string{"0"}, s.list(t, `SELECT count(*)::text FROM event_log_default`))
	require.NotEmpty(t, s.list(t, `SELECT emit('default', 'a', p_key => 'l')::text`))
	require.Equal(t, []string{"1"}, s.list(t, `SELECT count(*)::text FROM worker_queue WHERE key = 'l'`), "there are triggers again")
}
