package migrations_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a verb read while the server believes that there is nothing?
//
// A table that is analyzed just after it was emptied has pages and, to the planner, no rows, until the next time. Then any
// index is as good as another, and so is a walk over all of one, inside a walk over all of another. Queues are emptied all
// the time, and tables of instances by whoever keeps them small.

// fillEverything adds 20,000 of everything, so that some trees are higher than others. The instances i1 to i20000 have ended
// twice; t<n>/0 are roots of trees of four. Items w<n> of the worker queue are claimed under a token with their number.
const fillEverything = `
	SET pgwake.notify = off;
	INSERT INTO instances (instance_id, namespace, name, queue, current_execution, sticky_owner, sticky_until)
		SELECT 'i' || g, 'default', 'flow', '', 2, 'o' || g, now() + interval '1 day' FROM generate_series(1, 20000) g;
	INSERT INTO instances (instance_id, namespace, name, current_execution, parent_id)
		SELECT 't' || g % 20 || '/' || g / 20, 'default', 'flow', 2, CASE WHEN g >= 20 THEN 't' || g % 20 || '/0' END FROM generate_series(0, 79) g;
	INSERT INTO executions (instance_id, execution_id, status, completed_at, event_count, last_event)
		SELECT i.instance_id, x, CASE x WHEN 1 THEN 'ContinuedAsNew' ELSE 'Completed' END, now() - interval '1 day', 2, 2 FROM instances i, generate_series(1, 2) x;
	INSERT INTO history (instance_id, execution_id, event_id, type) SELECT instance_id, execution_id, e, 'e' FROM executions, generate_series(1, 2) e;
	INSERT INTO kv_store SELECT instance_id, 'k', 'v', 2 FROM instances;
	INSERT INTO kv_delta SELECT instance_id, 'd', 'v', 2 FROM instances;
	INSERT INTO instance_locks SELECT 'i' || g, ('00000000-0000-0000-0000-' || lpad(g::text, 12, '0'))::uuid, now() + interval '1 day' FROM generate_series(501, 20000) g;
	INSERT INTO orchestrator_queue (instance_id, kind, dedup_key, lock_token, visible_at)
		SELECT 'i' || g, 'k', 'm' || g, CASE WHEN g > 500 THEN ('00000000-0000-0000-0000-' || lpad(g::text, 12, '0'))::uuid END,
		CASE WHEN g > 500 THEN now() + interval '1 day' ELSE now() - interval '1 minute' END FROM generate_series(1, 20000) g;
	INSERT INTO worker_queue (name, dedup_key, instance_id, execution_id, activity_id, lock_token, visible_at)
		SELECT 'w' || g, 'k' || g, 'i' || g, 2, g, ('00000000-0000-0000-0000-' || lpad(g::text, 12, '0'))::uuid, now() + interval '1 day' FROM generate_series(1, 20000) g;
	INSERT INTO worker_queue (name, session_id, key) SELECT 'due', CASE WHEN g % 2 = 0 THEN 's' || g END, 'key ' || g FROM generate_series(1, 20000) g;
	INSERT INTO sessions (session_id, owner, locked_until) SELECT 's' || g, 'o' || g, now() + interval '1 day' FROM generate_series(1, 20000) g;
	INSERT INTO dedup_keys SELECT 'default', 'kept ' || g, g, now() + interval '1 day' FROM generate_series(1, 20000) g;
	INSERT INTO rates (namespace, tag, key, tat, forget_at) SELECT 'default', '', 'key ' || g, now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 20000) g;
	INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, kind, instance_id, dedup_key, enqueued_at, reason)
		SELECT q, g, 'default', 0, 1, 'w' || g, CASE q WHEN 'orchestrator' THEN 'k' END, 'i' || g, 'dead ' || g, now(), 'r' FROM generate_series(1, 20000) g, unnest('{worker,orchestrator}'::text[]) q;
	INSERT INTO releases (namespace, tag, key) SELECT 'ns' || g, '', 'k' FROM generate_series(1, 20000) g;
	INSERT INTO archive (item_id, namespace, priority, attempt_count, name, instance_id, enqueued_at)
		SELECT g, 'default', 0, 1, 'w', 'i' || g, now() FROM generate_series(1, 20000) g;`

const emptied = `worker_queue, orchestrator_queue, instance_locks, instances, executions, history, kv_store, kv_delta, sessions, dedup_keys, rates, releases, dead_letters, archive`

// What earlier statements left behind is walked over for as long as anybody has a snapshot from before. So that each run reads the same, somebody has
// one here all the time, in a database where nobody else is: nothing is removed, which is the most that there can be to walk over.
func TestVerbs_TablesAnalyzedWhenEmpty_ReadHardlyMoreThanWhatTheyAreFor(t *testing.T) {
	t.Parallel()
	s := newSchemaAlone(t, "verbs")
	s.fillAnalyzedWhenEmpty(t, emptied, fillEverything)

	const token, tokens = `'00000000-0000-0000-0000-000000000700'`, `'{00000000-0000-0000-0000-000000000700,00000000-0000-0000-0000-000000000701}'`
	id := s.list(t, `SELECT id::text FROM worker_queue WHERE name = 'w700'`)[0]
	due := s.list(t, `SELECT id::text FROM worker_queue WHERE session_id = 's700'`)[0]
	ids := `ARRAY[` + id + `, ` + id + ` + 1]`
	ack := `SELECT count(*) FROM ack_orchestration('i700', ` + token + `, `
	for _, verb := range []struct {
		call string
		most int64
	}{
		{`SELECT earliest_work(NULL)`, 650},
		{`SELECT earliest_work('{default}', NULL, 'o7')`, 180_000}, // for each session that has something queued
		{`SELECT earliest_message(NULL)`, 100},
		{`SELECT earliest_message('{default}', '{}', 0, 9, 'o7')`, 100},
		{`SELECT count(*) FROM enqueue_work_many('{x,y}', '{null,null}', p_dedup_keys => '{k7,dead 7}', p_dedup_scopes => '{queued,dead}')`, 120},
		{`SELECT count(*) FROM enqueue_work_many('{x,y}', '{null,null}', p_dedup_keys => '{kept 7,k8}', p_dedup_fors => '{1 min,1 min}')`, 100},
		{`SELECT count(*) FROM enqueue_work_many('{x,y}', '{null,null}', p_dedup_keys => '{k7,new}', p_dedup_scopes => '{waiting,waiting}')`, 120},
		{`SELECT enqueue_work('x', p_dedup_key => 'k7')`, 100},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`, 1300},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20)`, 1300},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, '{default}', p_fair => true)`, 1400},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, p_max_attempts => 3)`, 1400},
		{`SELECT claim_sessions(ARRAY[` + id + `, ` + due + `], 'o7', gen_random_uuid(), now(), now() + interval '1 min')`, 100},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 2, p_ack_ids => ` + ids + `, p_ack_tokens => ` + tokens + `)`, 1300},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 2, p_ack_ids => ` + ids + `, p_ack_tokens => ` + tokens + `, p_archive_for => '1 day')`, 1400},
		{`SELECT count(*) FROM ack_work_many(` + ids + `, ` + tokens + `)`, 100},
		{`SELECT count(*) FROM ack_work_many(` + ids + `, ` + tokens + `, '1 day')`, 100},
		{`SELECT count(*) FROM ack_work_group(` + ids + `, ` + tokens + `, '{i700,i701}', '{k,k}', '{null,null}', '{null,null}', '{null,null}', '{2,2}', '{null,null}')`, 100},
		{`SELECT ack_work(` + id + `, ` + token + `, 'i700', 'k')`, 100},
		{`SELECT count(*) FROM abandon_work(` + id + `, ` + token + `)`, 100},
		{`SELECT count(*) FROM renew_work(` + ids + `, ` + tokens + `, '1 min')`, 100},
		{`SELECT undo_work_claim(` + token + `, '1 day')`, 4000}, // it is rare, and walks over what has such an end
		{`SELECT dead_letter_work(` + id + `, ` + token + `, 'r')`, 100},
		{`SELECT count(*) FROM renew_sessions('{o7,o8}', '1 min', '1 min')`, 100},
		{`SELECT release_sessions('{o7,o8}')`, 100},
		{`SELECT count(*) FROM enqueue_message_many('{i7,new,t1/0}', '{k,k,k}', '{null,null,null}', p_dedup_keys => '{m8,m0,m00}')`, 120},
		{`SELECT enqueue_message('i7', 'k')`, 100},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min')`, 250},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{default}')`, 320},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{default}', p_queues => '{}', p_min_pin => 0, p_max_pin => 5)`, 150},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{default}', p_owner => 'o7')`, 320},
		{`SELECT append_history('i7', 2, '{3,4}', '{e,e}', '{null,null}')`, 100},
		{ack + `2, p_status => 'Completed')`, 220},
		{ack + `3, p_name => 'flow')`, 200},
		{ack + `2, p_parent => 't7/3', p_cancel_executions => '{2,2}', p_cancel_activities => '{700,701}', p_cancel_messages => '{m700,m7}')`, 200},
		{`SELECT release_sticky('{o7,o8}')`, 100},
		{`SELECT count(*) FROM abandon_orchestration('i700', ` + token + `)`, 100},
		{`SELECT renew_orchestration('i700', ` + token + `, '1 min')`, 100},
		{`SELECT undo_orchestration_claim(` + token + `)`, 450}, // over the locks
		{`SELECT count(*) FROM dead_letter_orchestration('i700', ` + token + `, 'r')`, 100},
		{`SELECT count(*) FROM read_history('i7')`, 100},
		{`SELECT count(*) FROM resume_history('i7', 2, 2)`, 100},
		{`SELECT count(*) FROM get_custom_status('i7')`, 100},
		{`SELECT count(*) FROM look_at_instances('{i7,i8,none}', '{null,0,null}', '{1,2,3}')`, 100},
		{`SELECT get_kv('i7', 'k')`, 100},
		{`SELECT count(*) FROM list_kv('i7')`, 100},
		{`SELECT count(*) FROM list_instances()`, 900},
		{`SELECT count(*) FROM list_instances('Completed', p_after => 'i7')`, 1800},
		{`SELECT count(*) FROM get_instance_info('i7')`, 100},
		{`SELECT count(*) FROM list_executions('i7')`, 100},
		{`SELECT list_children('t7/0')`, 100},
		{`SELECT get_parent('t7/1')`, 100},
		{`SELECT get_instance_tree('t7/0')`, 100},
		{`SELECT count(*) FROM delete_instance('t7/0')`, 700},
		{`SELECT count(*) FROM delete_instances('{i7,i8,i9}')`, 700},
		{`SELECT count(*) FROM delete_instances_bulk(p_limit => 50)`, 17_000},
		{`SELECT count(*) FROM delete_instances_bulk('{i7,i8,t1/0}')`, 1100},
		{`SELECT count(*) FROM prune_executions('i7')`, 100},
		{`SELECT count(*) FROM prune_executions_bulk(p_limit => 50)`, 3500},
		{`SELECT count(*) FROM prune_executions_bulk('{i7,i8,t1/0}')`, 220},
		{`SELECT count(*) FROM list_dead_letters()`, 1100},
		{`SELECT count(*) FROM list_dead_letters(p_instance => 'i7')`, 2500}, // along the ids, as with any filter; the same below
		{`SELECT count(*) FROM list_dead_letters('worker', 'default', p_after => 7)`, 1100},
		{`SELECT count(*) FROM redrive_dead_letters('worker', 'default', p_limit => 50)`, 4000},
		{`SELECT count(*) FROM redrive_dead_letters(p_instance => 'i7')`, 2500},
		{`SELECT purge_dead_letters('worker', 'default', p_limit => 50)`, 1500},
		{`SELECT purge_dead_letters(p_ids => '{7,8}')`, 100},
		{`SELECT take_up_releases('{ns7,ns8}')`, 100},
		{`SELECT count(*) FROM align_messages('i7')`, 100},
		{`SELECT count(*) FROM peek('worker')`, 1400},
		{`SELECT count(*) FROM peek('orchestrator', p_after => 7)`, 650},
		{`SELECT count(*) FROM list_archive()`, 500},
		{`SELECT count(*) FROM list_archive(p_instance => 'i7')`, 100},
	} {
		s.requirePages(t, verb.most, verb.call)
	}
	for _, limits := range []string{ // each after the one before has left rows behind
		`p_max_running_per_key => 50`,
		`p_rate_interval => '1 ms', p_rate_burst => 50`,
		`p_max_running => 5000`, // of which those are counted that are taken
	} {
		s.exec(t, `SELECT set_limits('default', `+limits+`)`)
		s.exec(t, `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`) // which marks what is at work
		for _, fetch := range []string{
			`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`,
			`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20)`,
			`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, p_max_attempts => 3)`,
			`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 2, p_ack_ids => ` + ids + `, p_ack_tokens => ` + tokens + `)`,
		} {
			s.requirePages(t, 5000, fetch)
		}
	}
}

// fillLimits adds limits for 4,000 namespaces n<g>: by g % 5 there is max_running (0), max_running_per_key (1), a rate (2), nothing but a weight (3), or both of
// the first two (4). Of every other one not all that is at work is marked yet. The worker queue has items in 2,000 of them: at work, due, held where
// keys may be full, and charged where there is a rate, and places of keys that became free. A thousand more, p<g>, are paused.
const fillLimits = `
	SET pgwake.notify = off;
	INSERT INTO namespaces (name) SELECT 'n' || g FROM generate_series(1, 20000) g;
	INSERT INTO limits (queue, namespace, weight, max_running, max_running_per_key, rate_interval, over, holding_since)
		SELECT 'worker', 'n' || g, 2, CASE WHEN g % 5 IN (0, 4) THEN 5000 END, CASE WHEN g % 5 IN (1, 4) THEN 50 END,
		CASE g % 5 WHEN 2 THEN interval '1 ms' END, g % 5 = 0, CASE WHEN g % 5 IN (1, 4) THEN now() - interval '1 day' END FROM generate_series(1, 4000) g;
	INSERT INTO limits (queue, namespace, paused) SELECT q, 'p' || g, true FROM generate_series(1, 1000) g, unnest('{worker,orchestrator}'::text[]) q;
	INSERT INTO marking (namespace, transactions) SELECT 'n' || g, CASE WHEN g > 2001 THEN '{}'::text[] END FROM generate_series(2001, 4000) g;
	INSERT INTO worker_queue (namespace, name, key, slot, key_slot, lock_token, visible_at)
		SELECT 'n' || g % 2000 + 1, 'at work', 'k' || g % 3, true, true, ('00000000-0000-0000-0000-' || lpad(g::text, 12, '0'))::uuid, now() + interval '1 day'
		FROM generate_series(1, 20000) g;
	INSERT INTO worker_queue (namespace, name, key) SELECT 'n' || g % 2000 + 1, 'due', 'k' || g % 7 FROM generate_series(1, 20000) g;
	INSERT INTO worker_queue (namespace, name, key, visible_at, held_due)
		SELECT 'n' || g % 2000 + 1, 'held', 'h' || g % 7, '9999-12-31', now() FROM generate_series(1, 20000) g WHERE g % 5 IN (0, 3);
	INSERT INTO worker_queue (namespace, name, key, charged, share_at)
		SELECT 'n' || g % 2000 + 1, 'charged', 'k' || g % 7, true, now() - interval '1 min' FROM generate_series(1, 20000) g
		WHERE g % 5 = 1 AND g % 2000 > 1000;
	INSERT INTO worker_queue (namespace, name) SELECT 'p' || g % 1000 + 1, 'paused' FROM generate_series(1, 20000) g;
	INSERT INTO releases (namespace, tag, key) SELECT 'n' || g % 2000 + 1, '', 'k' || g % 3 FROM generate_series(1, 20000) g WHERE g % 2000 > 1000;
	INSERT INTO rates (namespace, tag, key, tat, forget_at)
		SELECT 'n' || g, '', 'k' || k, now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 20000) g, generate_series(1, 2) k;
	INSERT INTO orchestrator_queue (instance_id, namespace, kind) SELECT 'i' || g, 'n' || g % 2000 + 1, 'k' FROM generate_series(1, 20000) g;
	INSERT INTO orchestrator_queue (instance_id, namespace, kind) SELECT 'i' || g, 'p' || g % 1000 + 1, 'k' FROM generate_series(1, 20000) g;
	INSERT INTO realignments (instance_id, next_at) SELECT 'i' || g, now() + interval '1 h' FROM generate_series(1, 20000) g;`

// Limits are there for long, but not from the beginning; releases and realignments are empty at nearly any time.
func TestVerbs_LimitsAnalyzedWhenEmpty_ReadHardlyMoreThanTheirNamespaces(t *testing.T) {
	t.Parallel()
	s := newSchemaAlone(t, "limits")
	s.fillAnalyzedWhenEmpty(t, `namespaces, limits, marking, worker_queue, orchestrator_queue, releases, rates, realignments`, fillLimits)

	const (
		ids    = `ARRAY(SELECT q.id FROM worker_queue q WHERE q.namespace = 'n6' AND q.name = 'due')`
		few    = `'{n5,n6,n7,n8,n9}'`
		tokens = `'{00000000-0000-0000-0000-000000000005,00000000-0000-0000-0000-000000000008}'`
		filter = `'{"{\"namespaces\":[\"n7\"]}","{\"namespaces\":[\"n7\"]}"}'`
	)
	acks := `'{` + strings.Join(s.list(t, `SELECT q.id::text FROM worker_queue q WHERE q.lock_token = ANY (`+tokens+`) ORDER BY q.id`), ",") + `}'`
	for _, verb := range []struct {
		call string
		most int64
	}{
		{`SELECT served('worker', '{n1}')`, 100},
		{`SELECT served('orchestrator', '{n1}')`, 100},
		{`SELECT served('orchestrator', NULL)`, 500_000},
		{`SELECT set_limits('n7', 1, 5)`, 300},
		{`SELECT set_limits('n7', 1, NULL, 5)`, 300},
		{`SELECT set_limits('n1501', 1, 5)`, 900},
		{`SELECT set_limits('n1502', 1, NULL, NULL, '1 s')`, 900},
		{`SELECT set_limits('n1502')`, 900},
		{`SELECT set_limits('new', 1, 2, 3)`, 300},
		{`SELECT pause('worker', '{n7}')`, 100},
		{`SELECT pause('worker', '{p7,p8}', false)`, 100},
		{`SELECT pause('orchestrator', '{p7}', false)`, 100},
		{`SELECT register_namespaces('{n8,new}')`, 100},
		{`SELECT count(*) FROM new_namespaces(0)`, 200_000},
		{`SELECT enqueue_work('x', p_namespace => 'n8')`, 100},
		{`SELECT enqueue_work('x', p_namespace => 'new')`, 100},
		{`SELECT enqueue_message('new', 'k', p_namespace => 'n9')`, 120},
		{`SELECT earliest_work('{n7}')`, 200},
		{`SELECT earliest_work('{n1500,n1501,n1502,n1503,n1504,n1505}')`, 1300},
		{`SELECT earliest_work('{p7}')`, 200},
		{`SELECT earliest_message('{n7}')`, 1200}, // past what was there before
		{`SELECT earliest_message('{p7}')`, 1200},
		{`SELECT earliest_of_lists('{n7,n8,n1002,n1005}', '{"","","",""}')`, 500},
		{`SELECT count(*) FROM earliest_of_lanes('{worker,orchestrator}', ` + filter + `)`, 1500},
		{`SELECT count(*) FROM due_lists('worker', '{n7,n8,n1002,p7}', NULL)`, 400},
		{`SELECT count(*) FROM due_lists('orchestrator', '{n7,n8,n1002}', NULL)`, 300},
		{`SELECT take_up_releases('{n1502,n1504,n1506}')`, 900},
		{`SELECT take_up_releases(` + few + `)`, 300},
		{`SELECT bring_back_left()`, 900_000}, // in all namespaces
		{`SELECT note_releases('{n6,n7,n5}', '{"","",""}', '{k1,k2,k1}')`, 150},
		{`SELECT tell_of_places('{n6,n7,n5}', '{"","",""}', '{k1,k2,k1}')`, 100},
		{`SELECT remove_work(` + ids + `)`, 5000}, // those are searched for
		{`SELECT bury_work(` + ids + `, 'r', NULL)`, 5000},
		{`SELECT count(*) FROM ack_work_many(` + acks + `, ` + tokens + `)`, 200},
		{`SELECT forget_rates(20, now())`, 2000}, // past what was there before
		{`SELECT mark_running('n2001', now())`, 100},
		{`SELECT mark_running('n3000', now())`, 100},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{n7}')`, 3500},
		{`SELECT count(*) FROM fetch_orchestration(gen_random_uuid(), '1 min', '{n7,n8,p7}')`, 3500},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n5}')`, 700},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n6}')`, 1200},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n7}')`, 2000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n8}')`, 500},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n9}')`, 1500},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 1, '{n1502}')`, 3000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, ` + few + `)`, 6000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, ` + few + `, p_fair => true)`, 6000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, ` + few + `, p_max_attempts => 3)`, 6000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, ` + few + `, p_owner => 'o')`, 6000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 20, '{n1505,n1506,n1507,n1508,n1509}')`, 7000},
		{`SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min', 2, '{n3}', p_ack_ids => ` + acks + `, p_ack_tokens => ` + tokens + `)`, 700},
	} {
		s.requirePages(t, verb.most, verb.call)
	}
}

// fillAnalyzedWhenEmpty fills tables, empties them, has the server believe that they are empty, and fills them again.
func (s *schema) fillAnalyzedWhenEmpty(t *testing.T, tables, fill string) {
	t.Helper()
	s.up(t)
	s.holdSnapshot(t)
	for table := range strings.SplitSeq(tables, ", ") {
		s.exec(t, `ALTER TABLE `+table+` SET (autovacuum_enabled = off)`)
	}
	s.exec(t, fill)
	for table := range strings.SplitSeq(tables, ", ") {
		s.exec(t, `DELETE FROM `+table)
	}
	s.exec(t, `ANALYZE `+tables)
	s.exec(t, fill)
	s.exec(t, `SET statement_timeout = '60 s'`) // what walks and walks is not waited for
}

// newSchemaAlone is newSchema in a database of its own, where others' snapshots keep nothing.
func newSchemaAlone(t *testing.T, name string) *schema {
	t.Helper()
	database := fmt.Sprintf("stale_%s_%d", name, os.Getpid())
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.Database = database
	s := &schema{name: "alone", config: config}
	s.conn = s.connect(t)
	return s
}

// holdSnapshot keeps what is there from being removed until the test ends.
func (s *schema) holdSnapshot(t *testing.T) {
	t.Helper()
	_, err := s.connect(t).Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM pg_class LIMIT 1`)
	require.NoError(t, err)
}

// requirePages asserts that a statement, which is undone, reads fewer pages.
func (s *schema) requirePages(t *testing.T, fewerThan int64, statement string) {
	t.Helper()
	testdb.RequirePages(t, s.conn, fewerThan, statement)
}
