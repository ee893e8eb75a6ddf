package testroles_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: can somebody who has a schema on the path of others have them do something else?

// decoys are things of the names that the library uses. Each fails, or leads elsewhere, if it is met: functions and an operator that are a
// better match than those of pg_catalog, if only for the path, and tables and types. Those of pg_temp are of the session.
const decoys = `
	CREATE TABLE worker_queue (nothing int); CREATE TABLE orchestrator_queue (nothing int); CREATE TABLE waiters (nothing int); CREATE TABLE namespaces (nothing int);
	CREATE TABLE event_log (nothing int); CREATE TABLE tasks (nothing int); CREATE TABLE schema_migrations (version_id text); CREATE TABLE inserted (nothing int);
	CREATE FUNCTION trap() RETURNS int LANGUAGE plpgsql AS 'BEGIN RAISE ''a decoy was met''; END';
	CREATE FUNCTION pg_notify(text, text) RETURNS int LANGUAGE plpgsql AS 'BEGIN RAISE ''pg_notify was met''; END';
	CREATE FUNCTION now() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE ''now was met''; END';
	CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE ''clock_timestamp was met''; END';
	CREATE FUNCTION hashtext(text) RETURNS int LANGUAGE plpgsql AS 'BEGIN RAISE ''hashtext was met''; END';
	CREATE FUNCTION current_setting(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''current_setting was met''; END';
	CREATE FUNCTION current_setting(text, bool) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''current_setting was met''; END';
	CREATE FUNCTION set_config(text, text, bool) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''set_config was met''; END';
	CREATE FUNCTION to_regclass(text) RETURNS regclass LANGUAGE plpgsql AS 'BEGIN RAISE ''to_regclass was met''; END';
	CREATE FUNCTION obj_description(oid, name) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''obj_description was met''; END';
	CREATE FUNCTION array_to_json(text[]) RETURNS json LANGUAGE plpgsql AS 'BEGIN RAISE ''array_to_json was met''; END';
	CREATE FUNCTION channel(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''channel was met''; END';
	CREATE FUNCTION wake(text, text, text, bigint) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''wake was met''; END';
	CREATE FUNCTION never(text, text) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RAISE ''= was met''; END';
	CREATE FUNCTION never(timestamptz, timestamptz) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RAISE ''<= was met''; END';
	CREATE FUNCTION never(bigint, int) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RAISE ''> was met''; END';
	CREATE FUNCTION never(timestamptz, interval) RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE ''- was met''; END';
	CREATE FUNCTION gather(text[], text) RETURNS text[] LANGUAGE plpgsql AS 'BEGIN RAISE ''array_agg was met''; END';
	CREATE OPERATOR = (LEFTARG = text, RIGHTARG = text, FUNCTION = never);
	CREATE OPERATOR <= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = never);
	CREATE OPERATOR > (LEFTARG = bigint, RIGHTARG = int, FUNCTION = never);
	CREATE OPERATOR - (LEFTARG = timestamptz, RIGHTARG = interval, FUNCTION = never);
	CREATE AGGREGATE array_agg(text) (SFUNC = gather, STYPE = text[], INITCOND = '{}');
	CREATE DOMAIN text AS pg_catalog.int4;
	CREATE DOMAIN timestamptz AS pg_catalog.int4`

func TestPath_HasOtherThingsOfOurNames_DivertsNothing(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	evil := testdb.Schema(t)
	in, quoted := pgx.Identifier{s.schema}.Sanitize()+".", pgx.Identifier{evil}.Sanitize()
	s.exec(`CREATE SCHEMA ` + quoted + `; GRANT USAGE ON SCHEMA ` + quoted + ` TO PUBLIC; SET search_path = ` + quoted + `;` + decoys + `; RESET search_path`)

	config, err := pgxpool.ParseConfig(testroles.URL(t, s.role(testroles.Worker)))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = quoted + ", pg_catalog"
	pool, err := pgxpool.NewWithConfig(s.within(), config)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(s.within(), `SELECT 1 WHERE 'a'::pg_catalog.text = 'b'::pg_catalog.text`)
	require.ErrorContains(t, err, "= was met", "the path is hostile")

	ctx := s.within()
	p, err := pgwake.New(ctx, pool, &pgwake.Config{Schema: s.schema, Logger: silent, SkipMigrate: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(s.within())) }()
	require.True(t, p.Health().OK, p.Health().Problems)
	fetched := make(chan error, 1)
	go func() {
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{PollTimeout: patience})
		if err == nil {
			err = p.AckWorkItem(ctx, item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
		}
		fetched <- err
	}()
	require.Eventually(t, func() bool { return p.Stats().Worker.Parked > 0 }, patience, patience/1000)
	// The trigger runs on the path of whoever inserts, and somebody waits.
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `CREATE TEMP TABLE waiters (nothing pg_catalog.int4); CREATE TEMP TABLE worker_queue (nothing pg_catalog.int4);
			INSERT INTO `+in+`worker_queue (name, visible_at) VALUES ('x', pg_catalog.now()), ('later', '2999-01-01')`)
		return err
	}))
	require.NoError(t, <-fetched)
	require.Zero(t, p.Stats().Worker.FallbackFinds)

	turn, err := p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{PollTimeout: patience})
	require.NoError(t, err)
	require.NoError(t, p.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
		History: []pgwake.Event{{ID: 1, Type: "e", Data: json.RawMessage(`1`)}}, Metadata: pgwake.Metadata{Name: "flow"}}))
	_, err = p.GetQueueDepths(ctx)
	require.NoError(t, err)

	e, err := taskgraph.New(ctx, p, &taskgraph.Config{KeepFor: patience, Logger: silent})
	require.NoError(t, err)
	require.NoError(t, e.Register(ctx, taskgraph.Define("shop", "order", "1").Step("pack", "pack")))
	_, err = e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "order", Version: "1"})
	require.NoError(t, err)
	_, err = e.ListTasks(ctx, nil)
	require.NoError(t, err)
	_, err = e.Upkeep(ctx)
	require.NoError(t, err)
	bus, err := eventbus.New(ctx, p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, bus.Subscribe(ctx, "g", []string{"#"}, &eventbus.SubscribeOptions{MissNothing: true}))
	_, err = bus.Emit(ctx, "x", nil, &eventbus.EmitOptions{Key: "k"})
	require.NoError(t, err)
	_, err = bus.Read(ctx, eventbus.Cursor{}, 10)
	require.NoError(t, err)
	_, err = bus.Nodes(ctx)
	require.NoError(t, err)
	was, err := bus.Unsubscribe(ctx, "g", "#")
	require.NoError(t, err)
	require.True(t, was)
	node, err := bus.Node(ctx, &eventbus.NodeConfig{Group: "g"})
	require.NoError(t, err)
	require.NoError(t, node.Start(ctx)) // with a heartbeat, which finds the end of the subscription
	require.NoError(t, node.Stop(ctx))
	require.Equal(t, []string{"0"}, s.list(`SELECT count(*)::text FROM `+quoted+`.worker_queue`))
	require.Empty(t, p.Health().Problems)
}

// A role of one schema gets nothing of another: neither what is in it nor what is said about it.
func TestSchemas_DoNotMeet(t *testing.T) {
	t.Parallel()
	a, b := newStage(t), newStage(t)
	in := pgx.Identifier{b.schema}.Sanitize() + "."
	of := testroles.Connect(t, a.owner)
	a.refused(of, `SELECT * FROM `+in+`worker_queue`, `SELECT `+in+`channel('worker')`, `SELECT `+in+`enqueue_work('x')`, `SELECT `+in+`fetch_work(pg_catalog.gen_random_uuid(), '1 min')`,
		`SELECT nextval('`+in+`worker_queue_id_seq')`, `CREATE TABLE `+in+`x (n int)`, `SELECT payload FROM `+in+`event_log`, `DROP SCHEMA `+pgx.Identifier{b.schema}.Sanitize()+` CASCADE`)

	// Each listens to whatever there is; a notification says nothing of the item.
	heard := testroles.Connect(t, b.owner)
	for _, queue := range []string{"worker", "orchestrator", "instance"} {
		names := func(s *stage) []string {
			return s.list(`SELECT `+pgx.Identifier{s.schema}.Sanitize()+`.channel($1)`, queue)
		}
		require.NotEqual(t, names(a), names(b))
		_, err := heard.Exec(b.within(), `LISTEN `+pgx.Identifier{names(b)[0]}.Sanitize())
		require.NoError(t, err)
	}
	p := b.open(b.owner, &pgwake.Config{Mode: pgwake.ModeDisabled})
	const secret = `"s3cr3t of a payload"`
	_, err := p.EnqueueForWorker(b.within(), pgwake.WorkItem{Name: "s3cr3t.name", Input: json.RawMessage(secret), Headers: map[string]string{"h": "s3cr3t"}}, nil)
	require.NoError(t, err)
	_, err = p.EnqueueForOrchestrator(b.within(), pgwake.Message{Instance: "s3cr3t", Kind: "k", Data: json.RawMessage(secret)}, nil)
	require.NoError(t, err)
	b.exec(`SELECT ` + in + `notify_queue('worker', 1, NULL)`)
	for last := ""; last != "worker"; {
		n, err := heard.WaitForNotification(b.within())
		require.NoError(t, err)
		require.NotContains(t, n.Payload, "s3cr3t")
		require.Less(t, len(n.Payload), 100)
		if n.Channel == b.list(`SELECT ` + in + `channel('worker')`)[0] {
			last = "worker"
		}
	}
}
