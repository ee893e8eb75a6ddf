package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

// schema is one that migrations are applied to, and a connection to look at it.
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
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	s := &schema{name: name, config: config}
	s.conn = s.connect(t)
	return s
}

// connect opens a connection to look at the schema. It ends with the test.
func (s *schema) connect(t *testing.T) *pgx.Conn {
	t.Helper()
	looking := s.config.Copy()
	looking.RuntimeParams["search_path"] = pgx.Identifier{s.name}.Sanitize()
	looking.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), looking)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func (s *schema) up(t *testing.T) {
	t.Helper()
	require.NoError(t, migrations.Up(t.Context(), s.config, s.name))
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

// objects are all relations, functions, types and triggers of the schema.
func (s *schema) objects(t *testing.T) []string {
	t.Helper()
	return s.list(t, `
		SELECT 'relation ' || relname || ' ' || relkind::text FROM pg_class WHERE relnamespace = to_regnamespace($1)
		 UNION ALL SELECT 'function ' || oid::regprocedure || ' ' || md5(prosrc) FROM pg_proc WHERE pronamespace = to_regnamespace($1)
		 UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = to_regnamespace($1) AND NOT tgisinternal
		 UNION ALL SELECT 'constraint ' || conname || pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace($1)
		 ORDER BY 1`, pgx.Identifier{s.name}.Sanitize())
}

func (s *schema) version(t *testing.T) (current, latest int64) {
	t.Helper()
	current, latest, err := migrations.Version(t.Context(), s.conn, s.name)
	require.NoError(t, err)
	return current, latest
}

func TestUp_TwentyAtOnceOnAFreshSchema_AllSucceedAndItIsMigratedOnce(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := migrations.Up(t.Context(), s.config.Copy(), s.name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	current, latest := s.version(t)
	require.Equal(t, latest, current)
	require.EqualValues(t, latest, len(s.list(t, `SELECT version_id::text FROM schema_migrations WHERE version_id > 0`)))
	s.exec(t, `SELECT enqueue_work('x')`)
}

func TestUp_Again_ChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `SELECT enqueue_work('x')`)
	before, rows := s.objects(t), s.list(t, `SELECT to_json(q)::text FROM worker_queue q`)
	s.up(t)
	require.Equal(t, before, s.objects(t))
	require.Equal(t, rows, s.list(t, `SELECT to_json(q)::text FROM worker_queue q`))
}

func TestUp_ContextEndsAtAnyMoment_SaysSoAndTheNextFinishes(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	for sent := int64(1); ; sent += 1 + sent/5 {
		ctx, cancel := context.WithCancel(t.Context())
		config := s.config.Copy()
		left := &atomic.Int64{}
		left.Store(sent)
		config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return endingConn{conn, left, cancel}, err
		}
		err := migrations.Up(ctx, config, s.name)
		cancel()
		if left.Load() > 0 {
			require.NoError(t, err)
			break
		}
		if err != nil { // it may be that all was done
			require.ErrorIs(t, err, context.Canceled, "after %d messages", sent)
		}
	}
	s.exec(t, `SELECT enqueue_work('x')`)
}

// Whoever gives up drops what there is by then, and that is all.
func TestUp_ContextEndsAtAnyMoment_NothingComesAfterwards(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	for sent := int64(1); sent <= 24; sent++ {
		ctx, cancel := context.WithCancel(t.Context())
		config := s.config.Copy()
		config.RuntimeParams["application_name"] = s.name
		left := &atomic.Int64{}
		left.Store(sent)
		config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return endingConn{conn, left, cancel}, err
		}
		require.ErrorIs(t, migrations.Up(ctx, config, s.name), context.Canceled)
		cancel()
		s.exec(t, `DROP SCHEMA IF EXISTS `+pgx.Identifier{s.name}.Sanitize()+` CASCADE`)
		require.Eventually(t, func() bool {
			return s.list(t, `SELECT count(*)::text FROM pg_stat_activity WHERE application_name = $1`, s.name)[0] == "0"
		}, time.Minute, time.Millisecond)
		require.Empty(t, s.list(t, `SELECT nspname FROM pg_namespace WHERE nspname = $1`, s.name), "after %d messages", sent)
	}
}

// endingConn ends a context when a number of messages were sent.
type endingConn struct {
	net.Conn
	left *atomic.Int64
	end  context.CancelFunc
}

func (c endingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if c.left.Add(-1) == 0 {
		c.end()
	}
	return n, err
}

func TestUp_SchemaExists_TheRightToCreateInItIsEnough(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	role := pgx.Identifier{"owner of " + s.name}.Sanitize()
	s.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, err := s.conn.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role)
		require.NoError(t, err)
	})
	config := s.config.Copy()
	config.RuntimeParams["role"] = "owner of " + s.name

	err := migrations.Up(t.Context(), config, s.name)
	require.Equal(t, "42501", stateOf(err), "%v", err)
	require.ErrorContains(t, err, s.name)

	s.exec(t, `CREATE SCHEMA `+pgx.Identifier{s.name}.Sanitize()+` AUTHORIZATION `+role)
	require.NoError(t, migrations.Up(t.Context(), config, s.name))
	require.Equal(t, []string{"owner of " + s.name}, s.list(t, `SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = $1`, s.name))
}

func stateOf(err error) string {
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func TestUp_NameThatNeedsQuoting_NothingLandsElsewhere(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`Mig "quoted" 1`, "mig, comma", "mig 'single'", "MIG", "mig-✉-ü", `mig \ back`, "mig\nline"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSchema(t, name)
			s.up(t)
			plain := newSchema(t, "")
			plain.up(t)
			require.Equal(t, len(plain.objects(t)), len(s.objects(t)))
			s.exec(t, `SELECT enqueue_work('x'), enqueue_message('i', 'k')`)
			require.Equal(t, []string{"1 1"}, s.list(t, `SELECT (SELECT count(*) FROM worker_queue) || ' ' || (SELECT count(*) FROM orchestrator_queue)`))
			require.NotEqual(t, plain.list(t, `SELECT channel('worker')`), s.list(t, `SELECT channel('worker')`))
			require.Less(t, len(s.list(t, `SELECT channel('orchestrator')`)[0]), 64)
			s.exec(t, `DELETE FROM worker_queue; DELETE FROM orchestrator_queue`)
			require.NoError(t, migrations.Down(t.Context(), s.config, s.name))
		})
	}
}

// A function must work whatever the search path of its caller is, and must not be made to call a stranger's.
func TestFunctions_CallersSearchPathIsHostile_TheirOwnSchemaIsUsed(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	evil := newSchema(t, "")
	evil.exec(t, `CREATE SCHEMA `+pgx.Identifier{evil.name}.Sanitize())
	evil.exec(t, `CREATE TABLE worker_queue (id bigint); CREATE FUNCTION register_namespaces(text[]) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''hijacked''; END'`)
	evil.exec(t, `CREATE TEMP TABLE namespaces (name text); CREATE TEMP TABLE orchestrator_queue (id bigint)`)
	evil.exec(t, `SELECT `+pgx.Identifier{s.name}.Sanitize()+`.enqueue_work('x', p_namespace => 'new')`)
	require.Equal(t, []string{"x"}, s.list(t, `SELECT name FROM worker_queue`))
	require.Equal(t, []string{"default", "new"}, s.list(t, `SELECT name FROM namespaces ORDER BY 1`))
}

func TestSchemas_SideBySide_NotificationsDoNotCross(t *testing.T) {
	t.Parallel()
	a, b := newSchema(t, ""), newSchema(t, "")
	a.up(t)
	b.up(t)
	for _, s := range []*schema{a, b} {
		s.exec(t, `SELECT listen_session(1, 1, true)`) // somebody waits
	}
	for _, queue := range []string{"worker", "orchestrator"} {
		channel := b.list(t, `SELECT channel($1)`, queue)[0]
		require.NotEqual(t, a.list(t, `SELECT channel($1)`, queue)[0], channel)
		b.exec(t, `LISTEN `+pgx.Identifier{channel}.Sanitize())
	}
	b.exec(t, `LISTEN barrier`)
	a.exec(t, `SELECT enqueue_work('x'), enqueue_message('i', 'k')`)
	a.exec(t, `NOTIFY barrier`) // whatever was sent before it has come when it comes
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n, err := b.conn.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "barrier", n.Channel)

	b.exec(t, `SELECT enqueue_work('x')`)
	n, err = b.conn.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, b.list(t, `SELECT channel('worker')`)[0], n.Channel)
}

func TestVersion_SchemaIsMissing_IsZero(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	current, latest := s.version(t)
	require.Zero(t, current)
	require.Positive(t, latest)
	s.up(t)
	current, _ = s.version(t)
	require.Equal(t, latest, current)
}

func TestDown_NoRows_LeavesAnEmptySchemaAndUpBringsEverythingBack(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	before := s.objects(t)
	for range 2 {
		require.NoError(t, migrations.Down(t.Context(), s.config, s.name))
		for _, object := range s.objects(t) {
			require.Contains(t, object, "schema_migrations", "only the migrations' own table is left")
		}
		current, _ := s.version(t)
		require.Zero(t, current)
		require.NoError(t, migrations.Down(t.Context(), s.config, s.name), "again")
		s.up(t)
		require.Equal(t, before, s.objects(t))
		require.Equal(t, []string{"default"}, s.list(t, `SELECT name FROM namespaces`))
	}
}

func TestDown_SchemaIsMissing_IsNoDisaster(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	require.NoError(t, migrations.Down(t.Context(), s.config, s.name))
}

// rows are statements that put one row into one of the tables whose loss would hurt.
var rows = map[string]string{
	"worker_queue":       `SELECT enqueue_work('x')`,
	"orchestrator_queue": `SELECT enqueue_message('i', 'k')`,
	"instances":          `INSERT INTO instances (instance_id, namespace, name) VALUES ('i', 'default', 'flow')`,
	"history":            `INSERT INTO history (instance_id, execution_id, event_id, type) VALUES ('i', 1, 1, 'e')`,
	"kv_store":           `INSERT INTO kv_store (instance_id, key, value, execution_id) VALUES ('i', 'k', 'v', 1)`,
	"kv_delta":           `INSERT INTO kv_delta (instance_id, key, value, execution_id) VALUES ('i', 'k', 'v', 1)`,
	"dead_letters": `INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, enqueued_at, reason)
		VALUES ('worker', 1, 'default', 0, 1, now(), 'failed')`,
	"archive": `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at)
		VALUES (1, 'default', 0, 1, 'x', now())`,
	"dedup_keys": `INSERT INTO dedup_keys VALUES ('default', 'k', 1, now())`,
	"limits":     `INSERT INTO limits (queue, namespace) VALUES ('worker', '*')`,
	"namespaces": `INSERT INTO namespaces (name) VALUES ('billing')`,
}

func TestDown_AnyTableHoldsARow_IsRefusedAndNoneIsLost(t *testing.T) {
	t.Parallel()
	for table, insert := range rows {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			s := newSchema(t, "")
			s.up(t)
			s.exec(t, insert)
			before := s.list(t, `SELECT to_json(q)::text FROM `+table+` q`)
			require.NotEmpty(t, before)
			err := migrations.Down(t.Context(), s.config, s.name)
			require.Equal(t, "PW006", stateOf(err), "%v", err)
			require.Equal(t, before, s.list(t, `SELECT to_json(q)::text FROM `+table+` q`))
			s.up(t) // and there is a way back
			require.Equal(t, before, s.list(t, `SELECT to_json(q)::text FROM `+table+` q`))
			s.exec(t, `SELECT enqueue_work('x')`)
		})
	}
}

// A refusal that leaves the functions dropped stops every node of a running deployment.
func TestDown_Refused_LeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, rows["worker_queue"])
	before := s.objects(t)
	require.Error(t, migrations.Down(t.Context(), s.config, s.name))
	current, latest := s.version(t)
	require.Equal(t, latest, current)
	require.Equal(t, before, s.objects(t))
}

func TestDown_EnqueueIsNotYetCommitted_IsRefusedAndLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	before := s.objects(t)
	producer, err := pgx.ConnectConfig(t.Context(), s.config)
	require.NoError(t, err)
	defer producer.Close(t.Context())
	tx, err := producer.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT set_config('search_path', $1, true)`, pgx.Identifier{s.name}.Sanitize())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT enqueue_work('x')`)
	require.NoError(t, err)
	down := make(chan error, 1)
	go func() { down <- migrations.Down(context.Background(), s.config, s.name) }()
	require.Eventually(t, func() bool {
		return s.list(t, `SELECT count(*)::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
			WHERE NOT l.granted AND c.relnamespace = to_regnamespace($1)`, s.name)[0] != "0"
	}, 10*time.Second, 5*time.Millisecond, "it waits for the transaction")
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "PW006", stateOf(<-down))
	require.Equal(t, before, s.objects(t))
}

func TestSchema_EveryTableAndFunction_HasAComment(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	require.Empty(t, s.list(t, `SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relkind IN ('r', 'p', 'v', 'm')
		AND relname <> 'schema_migrations' AND coalesce(obj_description(oid, 'pg_class'), '') = ''`, s.name), "tables and views")
	require.Empty(t, s.list(t, `SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace($1)
		AND coalesce(obj_description(oid, 'pg_proc'), '') = ''`, s.name), "functions")
	require.Greater(t, len(s.list(t, `SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace($1)`, s.name)), 20)
}

// A function that has a backslash in a literal says how literals are read: it is parsed in the sessions that call it.
func TestSchema_EveryFunctionWithABackslash_SaysHowLiteralsAreRead(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	require.Empty(t, testdb.ReadByTheirCallers(t, s.name))
	s.exec(t, `ALTER FUNCTION enqueue_work_many RESET standard_conforming_strings`)
	require.Equal(t, []string{"enqueue_work_many"}, testdb.ReadByTheirCallers(t, s.name), "this test can fail")
}

func TestSchema_EveryTable_CanBeReplicated(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	require.Empty(t, testdb.WithoutIdentity(t, s.name))
	s.exec(t, `ALTER TABLE kv_store DROP CONSTRAINT kv_store_pkey; ALTER TABLE archive REPLICA IDENTITY NOTHING; ALTER TABLE limits REPLICA IDENTITY FULL`)
	require.Equal(t, []string{"archive", "kv_store", "limits"}, testdb.WithoutIdentity(t, s.name), "this test can fail")
}

func TestSchema_EveryFunction_PinsItsSearchPath(t *testing.T) {
	t.Parallel()
	s := newSchema(t, `Pinned "path"`)
	s.up(t)
	want := "search_path=" + pgx.Identifier{s.name}.Sanitize() + ", pg_temp"
	require.Equal(t, []string{"notify_inserted: none"}, s.list(t, `SELECT proname || ': ' || coalesce(array_to_string(proconfig, '; '), 'none') FROM pg_proc
		WHERE pronamespace = to_regnamespace($1) AND NOT coalesce($2 = ANY (proconfig), false)`, pgx.Identifier{s.name}.Sanitize(), want),
		"that has its names in full")
}

// The trigger runs on the path of whoever inserts.
func TestTrigger_PathHasOtherThingsOfItsNames_UsesItsOwn(t *testing.T) {
	t.Parallel()
	s, other := newSchema(t, `Traced "path"`), newSchema(t, "")
	s.up(t)
	in, decoys := pgx.Identifier{s.name}.Sanitize(), pgx.Identifier{other.name}.Sanitize()
	s.exec(t, `CREATE SCHEMA IF NOT EXISTS `+decoys+`; CREATE TABLE `+decoys+`.waiters (nothing int);
		CREATE FUNCTION `+decoys+`.wake(text, text, text, bigint) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''decoy''; END';
		CREATE FUNCTION `+decoys+`.notify_queue(text, bigint, timestamptz, text) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''decoy''; END';
		INSERT INTO `+in+`.waiters VALUES (1, 1, 1, 'worker', true, 1, '*', NULL, NULL, 2, 1)`)
	for _, path := range []string{decoys + ", pg_catalog", `''`} {
		s.exec(t, `SET search_path = `+path+`; INSERT INTO `+in+`.worker_queue (name) VALUES ('now');
			INSERT INTO `+in+`.worker_queue (name, visible_at) VALUES ('later', now() + interval '1 hour'); RESET search_path`)
	}
}

// What a producer divides by, and picks one of, is there.
func TestWaiters_ALaneThatCannotBeTold_IsRefused(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	add := func(node, lane, fanout, places int) string {
		_, err := s.conn.Exec(t.Context(), `INSERT INTO waiters (node, lane, listener, queue, armed, number, namespace, fanout, places)
			VALUES ($1, $2, 1, 'worker', true, 1, '*', $3, $4)`, node, lane, fanout, places)
		return stateOf(err)
	}
	for _, lane := range [][4]int{{1, 1, 2, 0}, {1, 0, 2, 1}, {1, -1, 2, 1}, {0, 1, 2, 1}, {1, 1, -1, 1}} {
		require.Equal(t, "23514", add(lane[0], lane[1], lane[2], lane[3]), "%v", lane)
	}
	for _, lane := range [][4]int{{1, 1, 2, 1}, {1, 0, 0, 0}, {1, -1, 0, 0}, {0, -3, 0, 0}} {
		require.Empty(t, add(lane[0], lane[1], lane[2], lane[3]), "%v", lane)
	}
	for _, key := range []string{"0", "-1", "1000000001", "NULL"} {
		_, err := s.conn.Exec(t.Context(), `SELECT observe(`+key+`, true)`)
		require.Equal(t, "PW003", stateOf(err), key)
	}
	s.exec(t, `SELECT observe(1000000000, true)`)
}

// Before the first release the files change; a schema of an earlier state is left alone, and somebody is told.
func TestUp_SchemaWasMadeByOthers_IsRefusedUnchanged(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.up(t)
	s.exec(t, `COMMENT ON TABLE schema_migrations IS 'of another time'`)
	before := s.objects(t)
	require.ErrorIs(t, migrations.Up(t.Context(), s.config, s.name), migrations.ErrForeign)
	_, _, err := migrations.Version(t.Context(), s.conn, s.name)
	require.ErrorIs(t, err, migrations.ErrForeign)
	require.Equal(t, before, s.objects(t))
	require.NoError(t, migrations.Down(t.Context(), s.config, s.name), "nothing is in it")
	s.up(t)
}

// What the hot path must not be able to do: plan a sequential scan because a table was small once. peek is for people, who may ask for anything.
func TestSchema_EveryQueryOfTheHotPath_PinsItsPlan(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	var unpinned []string
	for _, f := range s.list(t, `SELECT proname || ' ' || array_to_string(proconfig, ' ') FROM pg_proc WHERE pronamespace = to_regnamespace($1)
		AND prosrc ~ '(FROM|UPDATE|INTO|JOIN) (worker_queue|orchestrator_queue|instance_locks|namespaces|instances|history)' AND prolang <> (SELECT oid FROM pg_language WHERE lanname = 'sql')
		AND proname NOT IN ('require_empty', 'peek')`, s.name) {
		if !strings.Contains(f, "enable_seqscan=off") || !strings.Contains(f, "plan_cache_mode=force_generic_plan") {
			unpinned = append(unpinned, f)
		}
	}
	require.Empty(t, unpinned)
}

// A fetch costs as much as what it takes, whatever else is queued: work of other namespaces, timers, leases.
func TestFetch_LargeBacklog_ReadsHardlyMoreThanItTakes(t *testing.T) {
	t.Parallel()
	for _, analyzed := range []bool{false, true} {
		t.Run(fmt.Sprintf("analyzed %v", analyzed), func(t *testing.T) {
			t.Parallel()
			s := newSchema(t, "")
			s.up(t)
			s.exec(t, `SET pgwake.notify = off`)
			const backlog = `'others' || g % 5, now() + interval '1 hour' * (-1) ^ (g / 5) FROM generate_series(1, 20000) g`
			s.exec(t, `INSERT INTO worker_queue (name, namespace, visible_at) SELECT 'x', `+backlog)
			s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, namespace, visible_at) SELECT 'i' || g, 'k', `+backlog)
			s.exec(t, `INSERT INTO worker_queue (name, namespace, visible_at) VALUES ('x', 'mine', now())`)
			s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, namespace, visible_at) VALUES ('mine', 'k', 'mine', now())`)
			if analyzed {
				s.exec(t, `ANALYZE worker_queue; ANALYZE orchestrator_queue`)
			}
			for _, filter := range []string{`NULL`, `'{others1}'`, `'{mine}'`, `'{nobody}'`, `'{mine,nobody,others1,others2}'`} {
				for _, fetch := range []string{
					`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, ` + filter + `)`,
					`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', ` + filter + `)`,
				} {
					s.requireReads(t, false, 500, fetch)
				}
			}
		})
	}
}

// The same for what else a fetch can select, and leave: tags, sessions, queue names, pinned versions, what is sticky.
func TestFetch_LargeBacklogOfOtherKinds_ReadsHardlyMoreThanItTakes(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `SET pgwake.notify = off`)
	s.exec(t, `INSERT INTO worker_queue (name, tag, session_id, visible_at) SELECT 'x', CASE g % 4 WHEN 0 THEN 'gpu' WHEN 1 THEN 'big' ELSE '' END,
		CASE WHEN g % 4 = 2 THEN 's' || g % 20 END, now() - interval '1 hour' FROM generate_series(1, 20000) g WHERE g % 4 <> 3`)
	s.exec(t, `INSERT INTO sessions (session_id, owner, locked_until) SELECT DISTINCT session_id, 'other', now() + interval '1 hour'
		FROM worker_queue WHERE session_id IS NOT NULL`)
	s.exec(t, `INSERT INTO worker_queue (name, visible_at) VALUES ('x', now())`)
	s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, queue, pin, visible_at)
		SELECT 'i' || g, 'k', CASE g % 2 WHEN 0 THEN 'slow' ELSE '' END, 1 + g % 3, now() - interval '1 hour' FROM generate_series(1, 20000) g`)
	s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, queue, pin, visible_at) VALUES ('mine', 'k', 'fast', 9, now())`)
	s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, queue, pin, visible_at, sticky_owner, sticky_due)
		SELECT 'i' || g, 'k', 'slow', 1, now() + interval '1 hour', CASE g % 2 WHEN 0 THEN 'me' ELSE 'you' END, now() FROM generate_series(1, 20000) g`)
	for _, fetch := range []string{
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_tags => '{gpu}')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_tags => '{tpu}')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_tags => NULL)`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_owner => 'me')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_tags => NULL, p_owner => 'me')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_queues => '{fast}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_queues => '{none}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_min_pin => 9, p_max_pin => 9)`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_min_pin => 10, p_max_pin => 10)`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_owner => 'me')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_owner => 'you', p_queues => '{fast}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_owner => 'you', p_queues => '{none}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_owner => 'nobody', p_queues => '{none}')`,
	} {
		s.requireReads(t, false, 500, fetch)
	}
}

// A turn reads nothing of other instances' messages, nor does an enqueue, also while the server believes that there are
// none: it counted when the queue had just been emptied, and the pages were still there.
func TestTurn_ManyInstancesInATableAnalyzedWhenEmpty_ReadsHardlyMoreThanItTakes(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `SET pgwake.notify = off`)
	s.exec(t, `ALTER TABLE orchestrator_queue SET (autovacuum_enabled = off)`)
	// With long names, since the planner then likes each other index better than that of instances.
	const fill = `INSERT INTO orchestrator_queue (instance_id, kind, name, dedup_key)
		SELECT repeat('i', 200) || g, 'start', 'x', 'key ' || g FROM generate_series(1, 20000) g`
	s.exec(t, fill)
	s.exec(t, `DELETE FROM orchestrator_queue; ANALYZE orchestrator_queue`)
	s.exec(t, fill)

	// Those of new instances come first, then those of known ones.
	s.exec(t, `INSERT INTO instances (instance_id, namespace, name) SELECT repeat('i', 200) || g, 'default', 'x' FROM generate_series(3, 20000) g`)
	s.exec(t, `INSERT INTO executions (instance_id, execution_id) SELECT repeat('i', 200) || g, 1 FROM generate_series(3, 20000) g`)
	statements := []string{
		`SELECT count(*) FROM enqueue_message_many(ARRAY[repeat('i', 200) || 7], '{k}', '{null}')`,
		`SELECT count(*) FROM enqueue_message_many('{new}', '{k}', '{null}')`,
		`SELECT count(*) FROM enqueue_message_many('{new}', '{k}', '{null}', p_dedup_keys => '{key 7}')`,
	}
	for n := range 4 {
		token := fmt.Sprintf("'00000000-0000-0000-0000-%012d'", n+1)
		statements = append(statements,
			`SELECT count(*) FROM fetch_orchestration(`+token+`, '1 min')`,
			`SELECT count(*) FROM instance_locks l, ack_orchestration(l.instance_id, `+token+`, 1, p_name => 'x') WHERE l.lock_token = `+token)
	}
	for _, statement := range statements {
		s.requireReads(t, true, 100, statement)
	}
	require.Equal(t, []string{"4"}, s.list(t, `SELECT (20000 + 2 - count(*))::text FROM orchestrator_queue`), "each turn was taken")
}

// The same for a work item.
func TestWork_ManyItemsInATableAnalyzedWhenEmpty_ReadsHardlyMoreThanItTakes(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `SET pgwake.notify = off`)
	s.exec(t, `ALTER TABLE worker_queue SET (autovacuum_enabled = off)`)
	const fill = `INSERT INTO worker_queue (name, dedup_key) SELECT 'x', 'key ' || g FROM generate_series(1, 20000) g`
	s.exec(t, fill)
	s.exec(t, `DELETE FROM worker_queue; ANALYZE worker_queue`)
	s.exec(t, fill)
	const token = `'00000000-0000-0000-0000-000000000001'`
	var first int64
	require.NoError(t, s.conn.QueryRow(t.Context(), `SELECT min(id) FROM worker_queue`).Scan(&first))
	for _, statement := range []string{
		`SELECT count(*) FROM enqueue_work_many('{x}', '{null}')`,
		`SELECT count(*) FROM enqueue_work_many('{x}', '{null}', p_dedup_keys => '{key 7}')`,
		`SELECT count(*) FROM fetch_work(` + token + `, '1 min', 3)`,
		`SELECT count(*) FROM renew_work(ARRAY[$1::bigint], ARRAY[` + token + `]::uuid[], '1 min')`,
		`SELECT ack_work($1, ` + token + `)`,
		`SELECT count(*) FROM ack_work_many(ARRAY[$1 + 1], ARRAY[` + token + `]::uuid[])`,
		`SELECT count(*) FROM ack_work_many(ARRAY[$1 + 2], ARRAY[` + token + `]::uuid[], '1 min')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 3, '{default}')`,
	} {
		var args []any
		if strings.Contains(statement, "$1") {
			args = append(args, first)
		}
		s.requireReads(t, true, 100, statement, args...)
	}
	require.Equal(t, []string{"3"}, s.list(t, `SELECT (20000 + 1 - count(*))::text FROM worker_queue`), "three items are done")
}

// A message that arrives during a turn is moved out of the way at a cost that does not depend on the turn, whatever the
// order in which such messages become due.
func TestFetch_MessagesBehindALargeTurn_ReadsHardlyMoreThanThose(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		arrive string
		most   int64
	}{
		"one": {`SELECT 'i', 'k', now()`, 20},
		// As many as one look moves at most. If each were moved alone, it would read those that were moved before.
		"many, latest first": {`SELECT 'i', 'k', now() - interval '1 ms' * g FROM generate_series(1, 1000) g`, 30_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSchema(t, "")
			s.up(t)
			s.exec(t, `SET pgwake.notify = off`)
			s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, visible_at) SELECT 'i', 'k', now() FROM generate_series(1, 10000)`)
			s.exec(t, `SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 h')`)
			s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, visible_at) `+test.arrive)

			s.requireReads(t, true, test.most, `SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 h')`)
			require.Empty(t, s.list(t, `SELECT id::text FROM orchestrator_queue WHERE visible_at <= now()`), "all are held")
		})
	}
}

// One that asks for a few tags or queue names does not care how many others there are.
func TestFetch_ManyTagsAndQueueNames_ReadsThoseThatItAskedFor(t *testing.T) {
	t.Parallel()
	s := newSchema(t, "")
	s.up(t)
	s.exec(t, `SET pgwake.notify = off`)
	s.exec(t, `INSERT INTO worker_queue (name, tag, visible_at) SELECT 'x', 'tag ' || g, now() FROM generate_series(1, 5000) g`)
	s.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, queue, visible_at) SELECT 'i' || g, 'k', 'queue ' || g, now() FROM generate_series(1, 5000) g`)
	for _, fetch := range []string{
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', p_tags => '{tag 7,none}')`,
		`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{default}', p_tags => '{tag 7,none}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', p_queues => '{queue 7,none}')`,
		`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{default}', p_queues => '{queue 7,none}', p_min_pin => 9, p_max_pin => 10)`,
	} {
		s.requireReads(t, false, 100, fetch)
	}
}

// requireReads asserts that a statement reads fewer rows of the schema's tables. Unless it is to commit, it is undone.
func (s *schema) requireReads(t *testing.T, commit bool, fewerThan int64, statement string, args ...any) {
	t.Helper()
	tx, err := s.conn.Begin(t.Context())
	require.NoError(t, err)
	before := rowsRead(t, tx, s.name)
	_, err = tx.Exec(t.Context(), statement, args...)
	require.NoError(t, err)
	read := rowsRead(t, tx, s.name) - before
	end := tx.Rollback
	if commit {
		end = tx.Commit
	}
	require.NoError(t, end(t.Context()))
	if read >= fewerThan {
		t.Errorf("%s read %d rows", statement, read)
	}
}

// rowsRead is how many rows of the schema's tables the session has read of late.
func rowsRead(t *testing.T, tx pgx.Tx, schema string) (read int64) {
	t.Helper()
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
		FROM pg_stat_xact_user_tables WHERE schemaname = $1`, schema).Scan(&read))
	return read
}
