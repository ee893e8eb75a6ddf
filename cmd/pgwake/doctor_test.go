package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: does doctor speak of what is wrong, of that alone, and of nothing where nothing is?
//
// Some of what is planted would be found by whoever looks closely enough, so each test looks closely at its own check alone. What
// everybody on the server would see is planted while nobody else looks.

// examined is what doctor says.
func (c *cli) examined(args ...string) (report, int) {
	c.t.Helper()
	// Schemas are lent, and statistics may be late to count what was deleted in one before.
	r := c.run(append([]string{"doctor", "--json", "--max-dead-tuples", "1000000"}, args...)...)
	var of report
	require.NoError(c.t, json.Unmarshal([]byte(r.out), &of), "%s%s", r.out, r.err)
	return of, r.code
}

// spoken are the checks that have something to say.
func spoken(r report) (names []string) {
	for _, f := range r.Findings {
		if f.Verdict == warning || f.Verdict == failure {
			names = append(names, f.Check)
		}
	}
	return names
}

func TestDoctor_AllIsWell_SaysSoOfEachCheck(t *testing.T) {
	c, _ := newCLIOn(t, layered, &pgwake.Config{})
	r, code := c.examined("--strict")
	require.Empty(t, spoken(r), "%+v", r.Findings)
	require.Zero(t, code)
	require.Equal(t, fine, r.Verdict)
	require.Len(t, r.Findings, len(checks()))
	for _, f := range r.Findings {
		require.Equal(t, fine, f.Verdict, "%+v", f)
		require.NotEmpty(t, f.Reason)
		require.Empty(t, f.Fix)
	}
	out := c.ok("doctor")
	require.Contains(t, out, fmt.Sprintf("%d ok, 0 warn, 0 fail", len(checks())))
}

// plant is something that is wrong.
type plant struct {
	check   string
	verdict verdict
	says    string // part of the reason
	mends   string // part of the fix
	seen    bool   // by others on the server as well
	plant   func(t *testing.T, c *cli, p *pgwake.Provider) (args []string)
}

// plants are at least one for each check that can be planted on a server that others use.
var plants = map[string]plant{
	"the schema is behind": {"schema", failure, "at version", "pgwake migrate up", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`DELETE FROM schema_migrations WHERE version_id = (SELECT max(version_id) FROM schema_migrations)`)
		return nil
	}},
	"the schema is not there": {"schema", failure, "is not there", "pgwake migrate up", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		return []string{"--schema", "no such schema"}
	}},
	"the schema is somebody else's": {"schema", failure, "other migrations", "--schema", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`COMMENT ON TABLE schema_migrations IS 'of another time'`)
		return nil
	}},
	"a layer is behind": {"layers", failure, "eventbus is at version", "--layer eventbus", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`DELETE FROM eventbus_migrations WHERE version_id = (SELECT max(version_id) FROM eventbus_migrations)`)
		return nil
	}},
	"the role lacks a right": {"rights", failure, "DELETE on tables worker_queue", "schema_migrations FROM", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		role := c.role("")
		c.exec(`REVOKE DELETE ON worker_queue FROM ` + role)
		return []string{"--database-url", c.as(role)}
	}},
	"the role has no right at all": {"rights", failure, "USAGE on the schema", "GRANT USAGE ON SCHEMA", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		role := c.role("")
		c.exec(`REVOKE ALL ON SCHEMA ` + pgx.Identifier{c.schema}.Sanitize() + ` FROM ` + role)
		return []string{"--database-url", c.as(role)}
	}},
	"LISTEN leads to another database": {"notifications", failure, "none came within", "compare the two URLs", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		return []string{"--listen-url", with(t, c.url, func(config *pgx.ConnConfig) { config.Database = "template1" })}
	}},
	"the queue of notifications fills": {"notify queue", warning, "does not read", "pg_terminate_backend", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		deaf := c.connect(c.url)
		for _, sql := range []string{"LISTEN pgwake_deaf", "BEGIN", "SELECT 1"} {
			_, err := deaf.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		c.exec(`SELECT pg_notify('pgwake_deaf', i || repeat('x', 7000)) FROM generate_series(1, 500) AS i`)
		return []string{"--max-notify-queue", "0.00001"}
	}},
	"the clock is wrong": {"clock", warning, "behind this machine's", "set-ntp", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.now = func() time.Time { return time.Now().Add(time.Hour) }
		return nil
	}},
	"the role has hardly any connection left": {"connections", warning, "that the role admits", "CONNECTION LIMIT", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		role := c.role("CONNECTION LIMIT 14")
		for range 11 {
			c.connect(c.as(role))
		}
		return []string{"--database-url", c.as(role)}
	}},
	"a transaction takes long": {"long transactions", warning, "vacuum clears nothing away", "pg_cancel_backend", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		role := c.role("")
		c.exec(`REVOKE pg_read_all_stats FROM ` + role) // those of other tests are not to be seen, and cancelled
		at := c.as(role)
		conn := c.connect(at)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = conn.Exec(ctx, `SELECT pg_sleep(60)`)
		}()
		t.Cleanup(func() { cancel(); <-ended })
		c.awaits(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND state = 'active' AND xact_start < clock_timestamp() - interval '20 ms')`, conn.PgConn().PID())
		return []string{"--database-url", at, "--max-transaction", "10ms"}
	}},
	"a session is idle in a transaction": {"idle in transaction", warning, "does nothing in it", "pg_terminate_backend", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		conn := c.connect(c.url)
		_, err := conn.Exec(t.Context(), "BEGIN; SELECT txid_current()")
		require.NoError(t, err)
		c.awaits(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND state_change < clock_timestamp() - interval '20 ms')`, conn.PgConn().PID())
		return []string{"--max-idle", "10ms"}
	}},
	"a prepared transaction is left": {"prepared transactions", warning, "nobody has ended", "ROLLBACK PREPARED", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.needs(`SELECT current_setting('max_prepared_transactions')::int > 0`)
		gid := "left by " + c.schema
		conn := c.connect(c.url)
		_, err := conn.PgConn().Exec(t.Context(), `BEGIN; SELECT txid_current(); PREPARE TRANSACTION '`+gid+`'`).ReadAll()
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = conn.Exec(context.Background(), `ROLLBACK PREPARED '`+gid+`'`) })
		c.awaits(`SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE gid = $1 AND prepared < clock_timestamp() - interval '20 ms')`, gid)
		return []string{"--max-prepared", "10ms"}
	}},
	"nobody reads a replication slot": {"replication slots", warning, "of WAL", "pg_drop_replication_slot", true, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.needs(`SELECT current_setting('wal_level') <> 'minimal' AND current_setting('max_replication_slots')::int > 0`)
		conn := c.connect(c.url)
		_, err := conn.Exec(t.Context(), `SELECT pg_create_physical_replication_slot($1, true)`, c.schema)
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = conn.Exec(context.Background(), `SELECT pg_drop_replication_slot($1)`, c.schema) })
		return nil
	}},
	"a query on a standby takes long": {"standbys", warning, "a query on a standby", "hot_standby_feedback", true, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.feedback("")
		return []string{"--max-xmin-age", "5"}
	}},
	"a query on a standby with a slot takes long": {"replication slots", warning, "the standby that reads", "hot_standby_feedback", true, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.needs(`SELECT current_setting('max_replication_slots')::int > 0`)
		c.feedback(c.schema)
		return []string{"--max-xmin-age", "5"}
	}},
	"autovacuum is off for a table": {"autovacuum", failure, "worker_queue", "RESET (autovacuum_enabled)", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`ALTER TABLE worker_queue SET (autovacuum_enabled = off)`)
		return nil
	}},
	"a table has lost its settings": {"autovacuum", warning, "orchestrator_queue", "autovacuum_vacuum_scale_factor", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`ALTER TABLE orchestrator_queue RESET (autovacuum_vacuum_scale_factor)`)
		return nil
	}},
	"many rows are dead": {"dead tuples", warning, "worker_queue has", "VACUUM", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`ALTER TABLE worker_queue SET (autovacuum_vacuum_threshold = 1000000)`) // it would come first now and then
		c.exec(`SET pgwake.notify = off; INSERT INTO worker_queue (name) SELECT 'x' FROM generate_series(1, 3000); DELETE FROM worker_queue`)
		c.awaits(`SELECT coalesce((SELECT n_dead_tup > 2000 FROM pg_stat_all_tables WHERE schemaname = $1 AND relname = 'worker_queue'), false)`, c.schema)
		return []string{"--max-dead-tuples", "2000"}
	}},
	"an index is bloated": {"index bloat", warning, "worker_queue_", "REINDEX INDEX CONCURRENTLY", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`SET pgwake.notify = off; INSERT INTO worker_queue (name, dedup_key) SELECT 'x', repeat('x', 200) || i FROM generate_series(1, 8000) AS i`)
		c.exec(`DELETE FROM worker_queue`)
		c.exec(`VACUUM ANALYZE worker_queue`) // which leaves the index as large as it is
		c.awaits(`SELECT coalesce((SELECT n_live_tup < 100 FROM pg_stat_all_tables WHERE schemaname = $1 AND relname = 'worker_queue'), false)`, c.schema)
		return []string{"--max-bloat", "1"}
	}},
	"a node died without a word": {"waiters", warning, "1 node that died", "DELETE FROM", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		c.exec(`INSERT INTO waiters (node, lane, listener, queue, armed, number, namespace, fanout, places) VALUES (7, 0, 7, 'worker', false, 0, '*', 0, 0)`)
		return nil
	}},
	"a namespace is paused": {"pauses", warning, "mail of the worker queue", "false)", false, func(t *testing.T, c *cli, p *pgwake.Provider) []string {
		require.NoError(t, p.Pause(t.Context(), pgwake.Worker, "mail"))
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: "mail"})
		require.NoError(t, err)
		pgwaketest.Advance(t, p, time.Hour)
		return nil
	}},
	"a queue is paused": {"pauses", warning, "from the orchestrator queue", "NULL, false)", false, func(t *testing.T, c *cli, p *pgwake.Provider) []string {
		require.NoError(t, p.Pause(t.Context(), pgwake.Orchestrator, pgwake.AllNamespaces))
		return nil
	}},
	"nobody does the work": {"backlog", warning, "no node listens", "pgwake top", false, func(t *testing.T, c *cli, p *pgwake.Provider) []string {
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
		require.NoError(t, err)
		pgwaketest.Advance(t, p, 2*time.Minute)
		return nil
	}},
	"there are dead letters": {"dead letters", warning, "no such printer", "pgwake dlq", false, func(t *testing.T, c *cli, p *pgwake.Provider) []string {
		bury(t, p, pgwake.WorkItem{Name: "x"}, "no such printer")
		return nil
	}},
	"transactions are serializable": {"server", warning, "serializable by default", "ALTER ROLE", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		role := c.role("")
		c.exec(`ALTER ROLE ` + role + ` SET default_transaction_isolation = 'serializable'`)
		return []string{"--database-url", c.as(role)}
	}},
	"the database has few characters": {"server", warning, "LATIN1", "ENCODING 'UTF8'", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		return []string{"--database-url", c.encoded("LATIN1")}
	}},
	"the database takes anything for text": {"server", warning, "any bytes", "ENCODING 'UTF8'", false, func(t *testing.T, c *cli, _ *pgwake.Provider) []string {
		return []string{"--database-url", c.encoded("SQL_ASCII")}
	}},
}

// encoded is the URL of a database of that encoding, in which the schema is.
func (c *cli) encoded(encoding string) string {
	c.t.Helper()
	name := pgx.Identifier{strings.ToLower(encoding) + " of " + c.schema}.Sanitize()
	c.exec(`CREATE DATABASE ` + name + ` TEMPLATE template0 ENCODING '` + encoding + `' LC_COLLATE 'C' LC_CTYPE 'C'`)
	c.t.Cleanup(func() { testdb.Exec(c.t, c.url, `DROP DATABASE `+name+` WITH (FORCE)`) })
	url := with(c.t, c.url, func(config *pgx.ConnConfig) { config.Database = "'" + strings.Trim(name, `"`) + "'" })
	c.ok("migrate", "up", "--database-url", url)
	return url
}

func TestDoctor_RoleHasItsOwnStyleOfDatesAndEncoding_AllIsWell(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	role := c.role("")
	c.exec(`ALTER ROLE ` + role + ` SET datestyle = 'German'`)
	c.exec(`ALTER ROLE ` + role + ` SET client_encoding = 'LATIN1'`)
	r, code := c.examined("--database-url", c.as(role))
	require.Empty(t, spoken(r), "%+v", r.Findings)
	require.Zero(t, code)
	c.ok("enqueue", "größer ✉", "--database-url", c.as(role))
	require.Contains(t, c.ok("peek", "--database-url", c.as(role)), "größer ✉")
	require.Contains(t, c.ok("peek"), "größer ✉")
}

// canBeRun are the fixes that are one statement for whoever owns the database, and mend it at once.
var canBeRun = regexp.MustCompile(`^(ALTER TABLE|ALTER ROLE .* CONNECTION LIMIT|DELETE FROM|GRANT|ROLLBACK PREPARED|SELECT pg_cancel_backend|SELECT "[a-z0-9_]+"\."pause")`)

// mended waits until a check has nothing to say.
func (c *cli) mended(check string, args ...string) {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		r, _ := c.examined(args...)
		return !slices.Contains(spoken(r), check)
	}, 20*time.Second, 20*time.Millisecond)
}

func TestDoctor_SomethingIsWrong_ThatCheckAloneSpeaks(t *testing.T) {
	for name, of := range plants {
		t.Run(name, func(t *testing.T) {
			if !of.seen {
				t.Parallel() // and so after those that are seen
			}
			kind := testschema.Core
			if of.check == "layers" {
				kind = layered
			}
			c, p := newCLIOn(t, kind, nil)
			args := of.plant(t, c, p)
			r, code := c.examined(args...)
			require.Equal(t, []string{of.check}, spoken(r), "%+v", r.Findings)
			require.Equal(t, of.verdict, r.Verdict)
			require.Equal(t, map[verdict]int{warning: exitOK, failure: exitFailed}[of.verdict], code)
			require.Equal(t, exitFailed, c.run(append([]string{"doctor", "--strict"}, args...)...).code)
			for _, f := range r.Findings {
				if f.Check != of.check {
					continue
				}
				require.Contains(t, f.Reason, of.says)
				require.Contains(t, f.Fix, of.mends)
				if canBeRun.MatchString(f.Fix) {
					c.exec(f.Fix)
					c.mended(of.check, args...)
				}
			}
		})
	}
}

// Each check has been seen to speak.
func TestDoctor_EveryCheck_HasAPlant(t *testing.T) {
	planted := map[string]bool{"pooler": true} // TestDoctor_PoolerSharesSessions…
	for _, of := range plants {
		planted[of.check] = true
	}
	for _, c := range checks() {
		require.True(t, planted[c.name], c.name)
	}
}

// feedback is a standby that tells of a snapshot, and does not go on: of a slot, if there is a name of one.
func (c *cli) feedback(slot string) {
	c.t.Helper()
	c.needs(`SELECT current_setting('wal_level') <> 'minimal' AND current_setting('max_wal_senders')::int > 0`)
	config, err := pgconn.ParseConfig(c.url)
	require.NoError(c.t, err)
	config.RuntimeParams["replication"] = "true"
	conn, err := pgconn.ConnectConfig(c.t.Context(), config)
	require.NoError(c.t, err)
	c.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	of := ""
	if slot != "" {
		c.exec(`SELECT pg_create_physical_replication_slot($1)`, slot)
		c.t.Cleanup(func() {
			_ = conn.Close(context.Background())
			conn, err := pgx.Connect(context.Background(), c.url)
			require.NoError(c.t, err)
			defer conn.Close(context.Background())
			require.Eventually(c.t, func() bool {
				_, err := conn.Exec(context.Background(), `SELECT pg_drop_replication_slot($1)`, slot)
				return err == nil // once the sender has noticed
			}, 20*time.Second, 20*time.Millisecond)
		})
		of = `SLOT "` + slot + `" `
	}
	var xid uint32
	var at string
	require.NoError(c.t, c.connect(c.url).QueryRow(c.t.Context(), `SELECT pg_current_xact_id()::text::bigint & 4294967295, pg_current_wal_flush_lsn()`).Scan(&xid, &at))
	conn.Frontend().Send(&pgproto3.Query{String: "START_REPLICATION " + of + "PHYSICAL " + at})
	message := binary.BigEndian.AppendUint64([]byte{'h'}, 0) // at no time
	for _, n := range []uint32{xid, 0, 0, 0} {               // its snapshot, and that of its catalogs, each with an epoch
		message = binary.BigEndian.AppendUint32(message, n)
	}
	conn.Frontend().Send(&pgproto3.CopyData{Data: message})
	require.NoError(c.t, conn.Frontend().Flush())
	for range 10 {
		c.exec(`SELECT pg_current_xact_id()`)
	}
	c.awaits(`SELECT EXISTS (SELECT FROM pg_stat_replication WHERE pid = $1 AND backend_xmin IS NOT NULL) OR EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $2 AND xmin IS NOT NULL)`,
		conn.PID(), slot)
}

// awaits returns once a query says true.
func (c *cli) awaits(sql string, args ...any) {
	c.t.Helper()
	conn := c.connect(c.url)
	require.Eventually(c.t, func() bool {
		var done bool
		return conn.QueryRow(c.t.Context(), sql, args...).Scan(&done) == nil && done
	}, 20*time.Second, 20*time.Millisecond)
}

// needs skips the test on a server of which a query does not say true.
func (c *cli) needs(sql string) {
	c.t.Helper()
	var has bool
	require.NoError(c.t, c.connect(c.url).QueryRow(c.t.Context(), sql).Scan(&has))
	if !has {
		c.t.Skip("the server does not say: " + sql)
	}
}

var roles atomic.Int64

// role makes one that may do all that a node does, and returns its quoted name.
func (c *cli) role(options string) string {
	c.t.Helper()
	name := fmt.Sprintf("role_%d_of_%s", roles.Add(1), c.schema) // a session that is kept belongs to a role of its name that is gone
	quoted, schema := pgx.Identifier{name}.Sanitize(), pgx.Identifier{c.schema}.Sanitize()
	c.exec(`CREATE ROLE ` + quoted + ` LOGIN PASSWORD 'secret' ` + options)
	c.exec(`GRANT pg_read_all_stats TO ` + quoted)
	c.t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), c.url)
		require.NoError(c.t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(context.Background(), `DROP OWNED BY `+quoted)
		require.NoError(c.t, err)
		_, err = conn.Exec(context.Background(), `DROP ROLE `+quoted)
		require.NoError(c.t, err)
	})
	for _, grant := range []string{"USAGE ON SCHEMA ", "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ", "USAGE ON ALL SEQUENCES IN SCHEMA ", "EXECUTE ON ALL FUNCTIONS IN SCHEMA "} {
		c.exec(`GRANT ` + grant + schema + ` TO ` + quoted)
	}
	return quoted
}

// as is the URL of a role.
func (c *cli) as(quotedRole string) string {
	return with(c.t, c.url, func(config *pgx.ConnConfig) { config.User, config.Password = strings.Trim(quotedRole, `"`), "secret" })
}

// with is a URL with a change.
func with(t *testing.T, url string, change func(*pgx.ConnConfig)) string {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	change(config)
	return fmt.Sprintf("host=%s port=%d user=%s password='%s' dbname=%s sslmode=disable", config.Host, config.Port, config.User, config.Password, config.Database)
}

// bury makes a dead letter.
func bury(t *testing.T, p *pgwake.Provider, item pgwake.WorkItem, reason string) {
	t.Helper()
	worker := pgwaketest.Open(t, &pgwake.Config{Schema: p.Schema(), Mode: pgwake.ModePolling})
	_, err := worker.EnqueueForWorker(t.Context(), item, nil)
	require.NoError(t, err)
	claimed, err := worker.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{pgwake.DefaultNamespace}})
	require.NoError(t, err)
	require.NoError(t, worker.DeadLetterWorkItem(t.Context(), claimed.LockToken, reason, "550 no such mailbox"))
}

func TestDoctor_Interrupted_SaysSoAndNothingOfChecksThatWereNotMade(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	c.now = func() time.Time { cancel(); return time.Now() } // the check of the clock
	for _, args := range [][]string{{"doctor"}, {"doctor", "--json"}} {
		r := c.runIn(ctx, args...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.err, "interrupted")
		require.NotContains(t, r.out, "fail", "%v", args)
	}
}

// What needs a connection more is not taken for well.
func TestDoctor_HasOneConnection_SaysWhatItCannotExamine(t *testing.T) {
	t.Parallel()
	c, _ := newCLI(t, nil)
	r, code := c.examined("--database-url", c.as(c.role("CONNECTION LIMIT 1")))
	require.Equal(t, exitFailed, code)
	require.Equal(t, []string{"connection", "notifications", "connections"}, spoken(r), "%+v", r.Findings)
	require.Contains(t, r.Findings[0].Fix, "as a superuser")
	require.Contains(t, r.Findings[0].Reason, "too many connections")
}

// What the fix grants is enough, and triggers are nothing to call.
func TestDoctor_RoleHasNoRights_TheFixMendsIt(t *testing.T) {
	t.Parallel()
	c, _ := newCLIOn(t, layered, nil)
	role, schema := c.role(""), pgx.Identifier{c.schema}.Sanitize()
	for _, things := range []string{"ALL TABLES IN SCHEMA ", "ALL SEQUENCES IN SCHEMA ", "ALL FUNCTIONS IN SCHEMA ", "SCHEMA "} {
		c.exec(`REVOKE ALL ON ` + things + schema + ` FROM ` + role)
	}
	rights := func() finding {
		t.Helper()
		r, _ := c.examined("--database-url", c.as(role))
		at := slices.IndexFunc(r.Findings, func(f finding) bool { return f.Check == "rights" })
		return r.Findings[at]
	}
	lacks := rights()
	require.Equal(t, failure, lacks.Verdict)
	require.Contains(t, lacks.Reason, "EXECUTE on functions ")
	c.exec(lacks.Fix)
	require.Equal(t, fine, rights().Verdict, "%+v", rights())
	var triggers, callable int
	require.NoError(t, c.connect(c.url).QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE has_function_privilege($1::regrole, oid, 'EXECUTE'))
		FROM pg_proc WHERE pronamespace = $2::regnamespace AND prorettype = 'trigger'::regtype`, role, schema).Scan(&triggers, &callable))
	require.Positive(t, triggers)
	require.Zero(t, callable)
}

// It can be asked for little of what a primary says, and one finding tells why.
func TestDoctor_Standby_NothingElseIsExamined(t *testing.T) {
	t.Parallel()
	require.Equal(t, "server", checks()[0].name, "which sees that it is one")
	for _, c := range checks()[1:] {
		require.Equal(t, finding{Check: c.name, Verdict: skipped, Reason: "see server"}, c.examine(t.Context(), &patient{standby: true}))
	}
}

func TestPercent_SmallAndLarge_AreWrittenPlainly(t *testing.T) {
	for share, want := range map[float64]string{0: "0 %", 0.00000095: "0 %", 0.00012: "0.01 %", 0.0512345: "5.12 %", 0.5: "50 %", 1: "100 %"} {
		require.Equal(t, want, percent(share))
	}
}
