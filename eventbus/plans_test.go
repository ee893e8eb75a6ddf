package eventbus_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a verb of the bus read while the server believes that there is nothing?
//
// A table that is analyzed just after it was emptied has pages and, to the planner, no rows, until the next time. Then any
// index is as good as another, and so is a walk over all of one. Queues are emptied all the time, and so is what goes with them.

// fillBus adds 20,000 of everything that there may be many of. Group n is subscribed to tn, and the first two to patterns as well. Event n is
// of that type; the keys up to k10000 are of group 1, and any other kn of group n; group 20000 is behind,
// and all others of its keys wait. Items of the worker queue up to 20,000 are the heads of their
// lines, those up to 40,000 wait in them, those up to 60,000 have no key, and those up to 80,000 are of schedules.
const fillBus = `
	SET session_replication_role = replica; SET enable_nestloop = off;
	INSERT INTO event_groups (group_id, namespace, name, created_at, first_item) OVERRIDING SYSTEM VALUE
		SELECT n, 'default', 'g' || n, now() - interval '1 day', 1 FROM generate_series(1, 20000) n;
	INSERT INTO event_subscriptions (group_id, namespace, pattern, regex, specificity, tag)
		SELECT g, 'default', p, CASE WHEN p ~ '[*#]' THEN pattern_regex(p) END, pattern_specificity(p), event_tag('g' || g, p)
		FROM (SELECT n, 't' || n FROM generate_series(1, 20000) n UNION ALL SELECT n, 'w.*.' || n FROM generate_series(1, 2) n) AS s (g, p);
	INSERT INTO event_log (event_id, namespace, event_type, emitted_at, scheduled_task_id, key, routes, xact)
		SELECT n, 'default', 't' || n, first_ms + n * interval '1 ms', CASE WHEN n % 2 = 0 THEN lpad(n::text, 32, '0')::uuid END, CASE WHEN n % 4 < 2 THEN 'k' || n END,
		ARRAY[n], (3 + n / 100)::text::xid8 FROM generate_series(1, 20000) n, date_trunc('month', now(), 'UTC') AS first_ms;
	INSERT INTO event_keys (group_id, key, item_id, passed) SELECT CASE WHEN n <= 10000 THEN 1 ELSE n END, 'k' || n, n, 0 FROM generate_series(1, 20000) n;
	INSERT INTO event_lines (group_id, key, place, event_id, emitted_at, event_type, item_id)
		SELECT k.group_id, k.key, p, e.event_id, e.emitted_at, 't' || k.group_id, CASE WHEN p = 2 THEN 20000 + k.item_id END
		FROM event_keys k JOIN event_log e ON e.event_id = k.item_id, generate_series(1, 2) p;
	INSERT INTO worker_queue (id, name, input, tag, key, visible_at, created_at, lock_token)
		SELECT n, CASE WHEN n > 60000 THEN 'eventbus|schedule' ELSE 't' || g END,
		CASE WHEN n > 60000 THEN json_build_object('task_id', lpad((n - 60000)::text, 32, '0')::uuid) ELSE json_build_object('event_id', i, 'emitted_at', e.emitted_at) END,
		CASE WHEN n > 60000 THEN 'eventbus' ELSE event_tag('g' || g, 't' || g) END, CASE WHEN n <= 40000 THEN 'k' || i END,
		CASE WHEN n BETWEEN 20001 AND 40000 THEN '9999-12-31' WHEN n > 50000 THEN now() + interval '1 day' ELSE now() - interval '1 hour' END,
		now() - interval '1 hour', CASE WHEN n > 50000 THEN lpad(n::text, 32, '0')::uuid END
		FROM (SELECT n, i, CASE WHEN n <= 40000 AND i <= 10000 THEN 1 ELSE i END AS g FROM generate_series(1, 80000) n, LATERAL (SELECT 1 + (n - 1) % 20000 AS i) AS i) AS q
		JOIN event_log e ON e.event_id = i;
	INSERT INTO dead_letters (id, queue, item_id, namespace, priority, attempt_count, name, data, tag, key, enqueued_at, reason)
		SELECT n, 'worker', 80000 + n, 'default', 0, 1, 't' || n, json_build_object('event_id', n, 'emitted_at', e.emitted_at), event_tag('g' || n, 't' || n), e.key, now(), 'r'
		FROM generate_series(1, 20000) n JOIN event_log e ON e.event_id = n;
	INSERT INTO event_dedup_keys (namespace, dedup_key, event_id, kept_until)
		SELECT 'default', k || n, n, until FROM generate_series(1, 20000) n, (VALUES ('kept ', now() + interval '1 day'), ('over ', now() - interval '1 day')) AS k (k, until);
	INSERT INTO event_replays (replay_id, group_id, undelivered, horizon, ended_at) OVERRIDING SYSTEM VALUE
		SELECT n, n, false, '100', CASE WHEN n <> 7 THEN now() END FROM generate_series(1, 20000) n;
	INSERT INTO event_nodes (node_id, namespace) SELECT 'n' || n, 'default' FROM generate_series(1, 20000) n;
	INSERT INTO scheduled_tasks (task_id, namespace, name, cron_expression, event_type, work_name, overlap, next_at, item_id, last_at, last_id)
		SELECT lpad(n::text, 32, '0')::uuid, 'default', 's' || n, '* * * * *', CASE WHEN n % 4 < 3 THEN 't' || n END, CASE WHEN n % 4 = 3 THEN 'w' END,
		CASE WHEN n % 4 = 0 THEN 'skip' ELSE 'allow' END, now() + interval '1 hour', 60000 + n, now() - interval '1 minute', n FROM generate_series(1, 20000) n;
	INSERT INTO event_keys (group_id, key) SELECT CASE WHEN n <= 3 THEN 8 ELSE 20000 END, 'r' || n FROM generate_series(1, 20000) n;
	UPDATE event_groups SET behind = true WHERE group_id = 20000;
	UPDATE event_replays SET ended_at = NULL, undelivered = true, horizon = '4', after_xact = '4' WHERE replay_id = 8;
	UPDATE worker_queue SET tag = event_tag('g1', 'w.*.1') WHERE id = 700;
	SELECT setval('worker_queue_id_seq', 200000), setval('event_log_event_id_seq', 200000), setval('event_lines_place_seq', 200000),
		setval('dead_letters_id_seq', 200000), setval('event_replays_replay_id_seq', 200000), setval('event_groups_group_id_seq', 200000);
	RESET session_replication_role; RESET enable_nestloop`

const emptiedTables = `event_groups, event_subscriptions, event_keys, event_lines, worker_queue, dead_letters, event_dedup_keys, event_replays, event_nodes, scheduled_tasks`

// What earlier statements left behind is walked over for as long as anybody has a snapshot from before. So that each run reads the same, somebody has
// one here all the time, in a database where nobody else is: nothing is removed, which is the most that there can be to walk over.
func TestBus_TablesAnalyzedWhenEmpty_ReadsHardlyMoreThanWhatItIsFor(t *testing.T) {
	t.Parallel()
	l := newLabInDatabase(t, "stale", ``)
	l.holding(oldSnapshot)
	l.exec(`DO $do$ DECLARE t regclass; BEGIN
		FOR t IN SELECT c.oid FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' LOOP
			EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', t);
		END LOOP;
	END $do$`)
	l.fill(fillBus)
	l.fill(`SET session_replication_role = replica`)
	for table := range strings.SplitSeq(emptiedTables, ", ") {
		l.fill(`DELETE FROM ` + table)
	}
	l.fill(`TRUNCATE event_log; RESET session_replication_role`)
	l.fill(`ANALYZE ` + emptiedTables + `, event_retirements`)
	l.fill(fillBus)
	l.fill(`ANALYZE event_log`)
	l.exec(`SET statement_timeout = '20 s'`) // what walks and walks is not waited for

	const task, tasks = `'00000000-0000-0000-0000-000000000700'`, `'{00000000-0000-0000-0000-000000000701,00000000-0000-0000-0000-000000000702}'`
	emitted := `'` + one[string](l, `SELECT array_agg(emitted_at ORDER BY event_id)::text FROM event_log WHERE event_id IN (700, 701)`) + `'::timestamptz[]`
	for _, verb := range []struct {
		call string
		most int64
	}{
		{`SELECT count(*) FROM routes('default', 't7')`, 100},
		{`SELECT emit(NULL, 't7')`, 100},
		{`SELECT emit(NULL, 'w.a.2', p_key => 'k')`, 100},
		{`SELECT emit(NULL, 't700', p_key => 'k700')`, 100},
		{`SELECT emit(NULL, 't7', p_dedup_key => 'kept 7')`, 600}, // over those first that somebody still sees, as the next ones
		{`SELECT emit(NULL, 't7', p_dedup_key => 'over 7')`, 600},
		{`SELECT emit(NULL, 't7', p_dedup_key => 'new')`, 600},
		{`SELECT count(*) FROM emit_many(NULL, '{t7,t8,t9}', '{1,2,3}', '{k7,k8,k8}', p_dedup_keys => '{kept 7,new,new 2}')`, 800},
		{`SELECT count(*) FROM emit_many(NULL, '{t7,nobody}', '{1,2}', p_strict => true)`, 150},
		{`SELECT count(*) FROM get_events('{700,701}', ` + emitted + `)`, 100},
		{`SELECT count(*) FROM read_events(NULL, '50', 0, 10)`, 100},
		{`SELECT count(*) FROM find_events(NULL)`, 100},
		{`SELECT count(*) FROM find_events(NULL, p_event_id => 700)`, 100},
		{`SELECT count(*) FROM find_events(NULL, p_event_types => '{t700}')`, 100},
		{`SELECT deliver('{700,701}', ` + emitted + `)`, 100},
		{`SELECT route_again(50700, lpad('50700', 32, '0')::uuid, 700, (` + emitted + `)[1])`, 100},
		{`SELECT replay_some(7, 10)`, 300},
		{`SELECT replay_some(8, 10)`, 200},
		{`SELECT replay_events(NULL, 'g7')`, 100},
		{`SELECT count(*) FROM get_replay(7)`, 100},
		{`SELECT has_replays('-infinity', 'infinity')`, 400}, // over all
		{`SELECT is_behind(7)`, 100},
		{`SELECT next_of_key(1, 'k700')`, 100},
		{`SELECT line_up(1, 'k700', 700, (` + emitted + `)[1], 't1', 'eventbus/g1|t1')`, 100},
		{`SELECT remove_work('{700,12000}')`, 250},
		{`SELECT remove_work('{20700,32000}')`, 100},
		{`SELECT count(*) FROM redrive_dead_letters(p_ids => '{7,700,12000}')`, 300},
		{`SELECT count(*) FROM list_event_dead_letters(NULL, p_limit => 10)`, 100},
		{`SELECT count(*) FROM list_event_dead_letters(NULL, p_ids => '{7,700}')`, 45_000}, // along the ids, as with any filter
		{`SELECT list_patterns(NULL, 'g7')`, 150_000},                                      // for each tag that has something queued
		{`SELECT beat_quietly(NULL, '["n7","g7"]')`, 200_000},                              // and for each group
		{`SELECT beat('n7', NULL, 'g7', NULL, '30 s')`, 200_000},
		{`SELECT register_node('n7')`, 100},
		{`SELECT touch_node_heartbeat('n7')`, 400}, // along the other index
		{`SELECT stop_node('n7')`, 400},
		{`SELECT count(*) FROM list_nodes()`, 50_000},
		{`SELECT count(*) FROM list_groups(NULL)`, 150_000},
		{`SELECT subscribe(NULL, 'g7', '{t7,t8}')`, 100},
		{`SELECT subscribe(NULL, 'new', '{t7,t8}', true)`, 100},
		{`SELECT unsubscribe(NULL, 'g700', 't700')`, 100},
		{`SELECT unsubscribe(NULL, 'g12000', 't12000')`, 400},
		{`SELECT unsubscribe(NULL, 'g1', 'w.*.1')`, 200},
		{`SELECT delete_group(NULL, 'g12000')`, 100_000}, // for each tag that has something queued
		{`SELECT retire_tag(1, 'default', 'eventbus/|1')`, 1_500_000},
		{`SELECT retire_tag(12000, 'default', 'eventbus/|12000')`, 200},
		{`SELECT retire_tag(700, 'default', 'eventbus/g700|t700')`, 100},
		{`SELECT retire_tag(700, 'default', 'eventbus/g700|t701')`, 100},
		{`SELECT retire_tag(700, 'default', 'eventbus/g701|t701')`, 100},
		{`SELECT remove_strays()`, 50_000}, // for each group
		{`SELECT occur(60700, lpad('60700', 32, '0')::uuid, ` + task + `)`, 200},
		{`SELECT occur_many('{60701,60702}', ARRAY[lpad('60701', 32, '0')::uuid, lpad('60702', 32, '0')::uuid], ` + tasks + `)`, 200},
		{`SELECT is_under_way(t, 700) FROM scheduled_tasks t WHERE task_id = ` + task, 100},
		{`SELECT run_scheduled_task(` + task + `)`, 100},
		{`SELECT run_schedule(NULL, 's701')`, 100},
		{`SELECT activate_schedule(NULL, 's700', false)`, 100},
		{`SELECT delete_schedule(NULL, 's700')`, 100},
		{`SELECT count(*) FROM list_schedules(p_limit => 10)`, 100},
		{`SELECT schedule_task(NULL, 's700', '* * * * *', 'a')`, 100},
		{`SELECT schedule_task(NULL, 'new', '* * * * *', 'a')`, 100},
	} {
		l.requireFetches(verb.most, verb.call, func(tx pgx.Tx) error {
			_, err := tx.Exec(l.within(), verb.call)
			return err
		})
	}
	l.requireFetches(800, "subscribe", func(tx pgx.Tx) error { // over all replays
		return l.WithTx(tx).Subscribe(l.within(), "new", []string{"t7"}, &eventbus.SubscribeOptions{MissNothing: true})
	})
	l.requireFetches(1500, "redrive", func(tx pgx.Tx) error { // over all subscriptions
		n, err := l.WithTx(tx).Redrive(l.within(), &eventbus.LetterFilter{Limit: 10})
		require.Equal(t, 10, n)
		return err
	})
}

// fill executes a statement that takes long.
func (l *lab) fill(sql string) {
	l.t.Helper()
	_, err := l.conn.Exec(l.t.Context(), sql)
	require.NoError(l.t, err)
}

// requireFetches asserts that something, which is undone, fetches fewer pages of what is in the schema, together with what it has deferred to the commit.
// A try that has to plan once more fetches more than others: that happens after sessions that migrate, in whatever database, have said more than this one has heard.
func (l *lab) requireFetches(fewerThan int64, what string, do func(pgx.Tx) error) {
	l.t.Helper()
	var all int64
	var most string
	var fetches map[string]int64
	for range 5 {
		var err error
		if fetches, err = l.fetches(do); err != nil {
			l.t.Errorf("%s: %v", what, err)
			return
		}
		all = 0
		for _, n := range fetches {
			all += n
		}
		most = slices.MaxFunc(slices.Collect(maps.Keys(fetches)), func(a, b string) int { return int(fetches[a] - fetches[b]) })
		if all < fewerThan {
			break
		}
	}
	l.t.Logf("%6d pages, of less than %d (%d of %s): %s", all, fewerThan, fetches[most], most, what)
	if all >= fewerThan {
		l.t.Errorf("%s read %d pages, %d of %s", what, all, fetches[most], most)
	}
}

// fetches returns how many pages of each table and index something fetches, which is undone.
func (l *lab) fetches(do func(pgx.Tx) error) (map[string]int64, error) {
	l.t.Helper()
	tx, err := l.conn.Begin(l.within())
	require.NoError(l.t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	before := fetched(l, tx)
	if err = do(tx); err == nil {
		_, err = tx.Exec(l.within(), `SET CONSTRAINTS ALL IMMEDIATE`)
	}
	if err != nil {
		return nil, err
	}
	after := fetched(l, tx)
	for relation, n := range before {
		after[relation] -= n
	}
	return after, nil
}

func fetched(l *lab, tx pgx.Tx) map[string]int64 {
	l.t.Helper()
	rows, err := tx.Query(l.within(), `SELECT relname::text, coalesce(pg_stat_get_xact_blocks_fetched(oid), 0) FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'i')`)
	require.NoError(l.t, err)
	all := make(map[string]int64)
	var relation string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&relation, &n}, func() error { all[relation] = n; return nil })
	require.NoError(l.t, err)
	return all
}
