package taskgraph_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a question about readiness read while the server believes that there are no tasks?
//
// A table that is analyzed just after it was emptied has pages and, to the planner, no rows, until the next time. Then any
// index is as good as another, and so is a walk over all of one.

// fillTasks adds so many tasks of 4 steps in a diamond, of which the first is complete, and has failed once. All are ready.
func fillTasks(n int) string {
	return strings.ReplaceAll(manyTasks, "5000", strconv.Itoa(n))
}

const manyTasks = `
	INSERT INTO tasks (task_id, task_definition_id, namespace, state, priority_key, next_ready_at, correlation_id, created_at, deadline)
		SELECT lpad(n::text, 32, '0')::uuid, '` + theDefinition + `', 'default', 'waiting_for_dependencies', -n, now() - interval '1 min', gen_random_uuid(), now(),
		CASE WHEN n % 100 = 0 THEN now() END FROM generate_series(1, 5000) n;
	INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state, sort_key, attempts)
		SELECT lpad(n::text || p, 32, '0')::uuid, lpad(n::text, 32, '0')::uuid, '` + theStep + `', p, 's' || p, CASE WHEN p = 1 THEN 'complete' ELSE 'pending' END,
		CASE WHEN p = 1 THEN 5 ELSE 1 END, 2 - least(p, 2) FROM generate_series(1, 5000) n, generate_series(1, 4) p;
	INSERT INTO step_dependencies (task_id, from_step_id, to_step_id)
		SELECT lpad(n::text, 32, '0')::uuid, lpad(n::text || f, 32, '0')::uuid, lpad(n::text || t, 32, '0')::uuid
		FROM generate_series(1, 5000) n, (VALUES (1, 2), (1, 3), (2, 4), (3, 4)) e (f, t);
	INSERT INTO step_transitions (step_id, task_id, sort_key, to_state)
		SELECT step_id, task_id, k, (ARRAY['pending', 'enqueued', 'in_progress', 'waiting_for_retry', 'complete'])[k] FROM steps, generate_series(1, 5) k WHERE k <= sort_key`

const emptiedTasks = `step_transitions, step_dependencies, steps, tasks`

func TestReadiness_TablesAnalyzedWhenEmpty_ReadsHardlyMoreThanTheTasksAskedFor(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for table := range strings.SplitSeq(emptiedTasks, ", ") {
		s.exec(t, `ALTER TABLE `+table+` SET (autovacuum_enabled = off)`)
	}
	s.fill(t, fillTasks(500))
	for table := range strings.SplitSeq(emptiedTasks, ", ") {
		s.fill(t, `DELETE FROM `+table)
	}
	s.exec(t, `ANALYZE `+emptiedTasks+`, task_definitions, step_definitions, taskgraph_settings`)
	s.fill(t, fillTasks(5000))

	const task, tasks = `'00000000-0000-0000-0000-000000000700'`, `'{00000000-0000-0000-0000-000000000700,00000000-0000-0000-0000-000000000701}'`
	const first, last = `'00000000-0000-0000-0000-000000007001'`, `'00000000-0000-0000-0000-000000007004'`
	s.requirePages(t, 60, `SELECT * FROM get_step_readiness_status(`+task+`)`)
	s.requirePages(t, 60, `SELECT * FROM get_step_readiness_status(`+task+`, ARRAY[`+last+`]::uuid[])`)
	s.requirePages(t, 100, `SELECT * FROM get_step_readiness_status_batch(`+tasks+`)`)
	s.requirePages(t, 60, `SELECT * FROM get_ready_steps(`+task+`)`)
	s.requirePages(t, 60, `SELECT check_step_dependencies(`+last+`)`)
	s.requirePages(t, 60, `SELECT * FROM get_task_execution_context(`+task+`)`)
	s.requirePages(t, 100, `SELECT * FROM get_task_execution_contexts_batch(`+tasks+`)`)
	s.requirePages(t, 60, `SELECT detect_cycle(`+last+`, `+first+`)`)
	s.requirePages(t, 60, `SELECT * FROM calculate_dependency_levels(`+task+`)`)
	s.requirePages(t, 60, `SELECT calculate_step_depth(`+last+`)`)
	s.requirePages(t, 60, `SELECT * FROM get_step_transitive_dependencies(`+last+`)`)
	s.requirePages(t, 60, `SELECT get_step_dependency_results_map(`+last+`)`)
	s.requirePages(t, 60, `SELECT get_step_dependency_result(`+last+`, 's1')`)
	s.requirePages(t, 60, `SELECT * FROM get_task_ready_info(`+task+`)`)
	s.requirePages(t, 100, `SELECT * FROM list_steps(`+tasks+`)`)
	s.requirePages(t, 100, `SELECT * FROM get_next_ready_task()`)
	s.requirePages(t, 300, `SELECT * FROM get_next_ready_tasks(5)`)
	s.requirePages(t, 4000, `SELECT * FROM get_next_ready_tasks(100)`)
	s.requirePages(t, 800, `SELECT advance_task(`+task+`, NULL)`)
	s.exec(t, `UPDATE taskgraph_settings SET deadline_weight = 1`)
	s.requirePages(t, 500, `SELECT * FROM get_next_ready_tasks(5)`) // those past their deadline are fifty
}

// fillAll adds so many tasks with a definition each, and all that belongs to them: the first quarter waits for dependencies and has somebody to look
// into it, of the next some steps are enqueued, of the third one is in progress, and the last has ended long ago. A message waits for those that
// have not ended, but for the first 20 and the last one, for which upkeep is to look, and which are as old.
func fillAll(n int) string {
	return strings.NewReplacer("{n}", strconv.Itoa(n), "{a}", strconv.Itoa(n/4), "{b}", strconv.Itoa(n/2), "{c}", strconv.Itoa(n/4*3)).Replace(allOfTasks)
}

const allOfTasks = `
	INSERT INTO task_definitions (task_definition_id, namespace, name) SELECT lpad(n || '0', 32, '0')::uuid, 'default', 'task ' || n FROM generate_series(1, {n}) n;
	INSERT INTO step_definitions (step_definition_id, task_definition_id, position, name, handler, parents)
		SELECT lpad(n::text || p, 32, '0')::uuid, lpad(n || '0', 32, '0')::uuid, p, 's' || p, 'handler', (ARRAY[0, 1, 1, 2])[p] FROM generate_series(1, {n}) n, generate_series(1, 4) p;
	INSERT INTO step_definition_dependencies (task_definition_id, parent, child)
		SELECT lpad(n || '0', 32, '0')::uuid, f, t FROM generate_series(1, {n}) n, (VALUES (1, 2), (1, 3), (2, 4), (3, 4)) e (f, t);
	INSERT INTO tasks (task_id, task_definition_id, namespace, state, priority_key, next_ready_at, correlation_id, created_at, state_entered_at, completed_at,
			total_steps, idempotency_key)
		SELECT lpad(n::text, 32, '0')::uuid, lpad(n || '0', 32, '0')::uuid, 'default',
		CASE WHEN n <= {a} THEN 'waiting_for_dependencies' WHEN n <= {c} THEN 'steps_in_process' ELSE 'complete' END, -n,
		CASE WHEN n <= {a} THEN now() - interval '1 h' END, gen_random_uuid(), now(), CASE WHEN n <= 20 THEN now() - interval '1 h' ELSE now() + interval '1 h' END,
		CASE WHEN n > {c} THEN now() - make_interval(days => 30, secs => n) END, 4, 'key ' || n FROM generate_series(1, {n}) n;
	INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state, sort_key, attempts, unmet, passed_on, work_item_id, claim, updated_at)
		SELECT lpad(n::text || p, 32, '0')::uuid, lpad(n::text, 32, '0')::uuid, lpad(n::text || p, 32, '0')::uuid, p, 's' || p,
		CASE WHEN n <= {a} THEN CASE WHEN p = 1 THEN 'complete' ELSE 'pending' END WHEN n > {c} THEN 'complete'
		     ELSE (ARRAY['complete', CASE WHEN n <= {b} THEN 'enqueued' ELSE 'in_progress' END, 'enqueued', 'pending'])[p] END, 3, 1,
		CASE WHEN n <= {a} THEN (ARRAY[0, 1, 1, 2])[p] ELSE 0 END, n > {a} AND p = 1, CASE WHEN n > {a} AND n <= {c} AND p IN (2, 3) THEN n * 10 + p END,
		CASE WHEN n > {b} AND n <= {c} AND p = 2 THEN lpad('77', 32, '0')::uuid END, now() - interval '1 h' FROM generate_series(1, {n}) n, generate_series(1, 4) p;
	INSERT INTO step_dependencies (task_id, from_step_id, to_step_id)
		SELECT lpad(n::text, 32, '0')::uuid, lpad(n::text || f, 32, '0')::uuid, lpad(n::text || t, 32, '0')::uuid
		FROM generate_series(1, {n}) n, (VALUES (1, 2), (1, 3), (2, 4), (3, 4)) e (f, t);
	INSERT INTO task_transitions (task_id, sort_key, to_state) SELECT task_id, 1, 'pending' FROM tasks;
	INSERT INTO step_transitions (step_id, task_id, sort_key, from_state, to_state)
		SELECT step_id, task_id, k, (ARRAY[NULL, 'pending', 'enqueued'])[k], (ARRAY['pending', 'enqueued', 'in_progress'])[k] FROM steps, generate_series(1, 3) k;
	INSERT INTO task_dlq (dlq_entry_id, task_id, original_state, reason) SELECT lpad(n::text, 32, '0')::uuid, lpad(n::text, 32, '0')::uuid, 'error', 'manual_dlq' FROM generate_series(21, {a}) n;
	INSERT INTO instances (instance_id, namespace, name, version, queue) SELECT task_id::text, 'default', 'task', '1', 'taskgraph' FROM tasks;
	INSERT INTO executions (instance_id, execution_id) SELECT task_id::text, 1 FROM tasks;
	INSERT INTO worker_queue (id, name, namespace, instance_id, execution_id, activity_id, lock_token, visible_at)
		SELECT work_item_id, 'handler', 'default', task_id::text, 1, position, claim, CASE WHEN claim IS NULL THEN now() ELSE now() + interval '1 h' END FROM steps WHERE work_item_id IS NOT NULL;
	INSERT INTO orchestrator_queue (instance_id, namespace, kind, queue, lock_token)
		SELECT task_id::text, 'default', 'step', 'taskgraph', lpad('88', 32, '0')::uuid FROM tasks WHERE state <> 'complete' AND state_entered_at > now();
	INSERT INTO instance_locks (instance_id, lock_token, locked_until) SELECT instance_id, lock_token, now() + interval '1 h' FROM orchestrator_queue`

const emptiedAll = `instance_locks, orchestrator_queue, worker_queue, executions, instances, task_dlq, step_transitions, task_transitions, step_dependencies, steps, tasks,
	step_definition_dependencies, step_definitions, task_definitions`

// What changes a task, adds one or removes some reads as much as belongs to these, and upkeep as what it has to look at. To look up a step by its id
// may take a walk along an index, of a hundred pages here: nobody can keep the server from that where it takes the two that there are for equal.
func TestVerbs_TablesAnalyzedWhenEmpty_ReadHardlyMoreThanTheTasksThatTheyAreOf(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	tables := strings.Fields(strings.ReplaceAll(emptiedAll, ",", ""))
	for _, table := range tables {
		s.exec(t, `ALTER TABLE `+table+` SET (autovacuum_enabled = off)`)
	}
	s.fill(t, fillAll(400))
	for _, table := range tables {
		s.fill(t, `DELETE FROM `+table)
	}
	s.exec(t, `ANALYZE `+emptiedAll)
	s.fill(t, fillAll(4000))
	eventually(t, func() bool { // while others have old snapshots not all is added up
		s.exec(t, `SELECT refresh_rollups()`)
		return value[bool](t, s, `SELECT NOT EXISTS (SELECT FROM step_transitions x CROSS JOIN rollup_cursor c WHERE x.xact >= c.xact)`)
	})

	const waiting, enqueued, running = `'00000000-0000-0000-0000-000000000700'`, `'00000000-0000-0000-0000-000000001900'`, `'00000000-0000-0000-0000-000000002600'`
	const pending, first, begun = `'00000000-0000-0000-0000-000000007002'`, `'00000000-0000-0000-0000-000000019002'`, `'00000000-0000-0000-0000-000000026002'`
	const token, turn = `'00000000-0000-0000-0000-000000000077'`, `'00000000-0000-0000-0000-000000000088'`
	s.requirePages(t, 200, `SELECT transition_steps(ARRAY[`+pending+`::uuid], ARRAY['pending', 'error'], NULL, '{}')`)
	s.requirePages(t, 1500, `SELECT transition_steps(ARRAY(SELECT lpad(n || '2', 32, '0')::uuid FROM generate_series(701, 710) n), ARRAY['pending', 'error'], NULL, '{}')`)
	s.requirePages(t, 100, `SELECT transition_task(`+waiting+`, ARRAY['waiting_for_dependencies', 'evaluating_results'], NULL, '{}', false)`)
	s.requirePages(t, 600, `SELECT transition_step_state_atomic(`+begun+`, 'in_progress', 'waiting_for_retry')`)
	s.requirePages(t, 100, `SELECT wake_task(`+waiting+`, 'test')`)
	s.requirePages(t, 400, `SELECT fail_step(`+pending+`, 'it is wrong')`)
	s.requirePages(t, 400, `SELECT set_step_backoff_atomic(`+pending+`, 1)`)
	s.requirePages(t, 800, `SELECT cancel_task(`+running+`)`)
	s.requirePages(t, 400, `SELECT checkpoint_step(`+begun+`, 26002, `+token+`, '1')`)
	s.requirePages(t, 600, `SELECT start_step(`+begun+`, 26002, `+token+`, NULL)`)
	s.requirePages(t, 400, `SELECT finish_step(`+begun+`, 26002, `+token+`, NULL, true, '1')`)
	s.requirePages(t, 400, `SELECT finish_step(`+begun+`, 26002, `+token+`, NULL, false, '{}', '1 s', 1)`)
	s.requirePages(t, 400, `SELECT release_step(`+begun+`, 26002, `+token+`, NULL)`)
	s.requirePages(t, 800, `SELECT advance_task(`+waiting+`, NULL)`)
	s.requirePages(t, 800, `SELECT * FROM evaluate_task(`+waiting+`, `+turn+`, NULL)`)
	s.requirePages(t, 800, `SELECT * FROM evaluate_task(`+enqueued+`, `+turn+`, NULL, true)`)
	s.requirePages(t, 300, `SELECT * FROM evaluate_task(`+enqueued+`, `+turn+`, NULL, false, '{2}', '{it is gone}', p_quiet => true)`)
	s.requirePages(t, 800, `SELECT finalize_task_completion(`+waiting+`)`)
	s.requirePages(t, 400, `SELECT create_task('default', 'task 70', '0.1.0')`)
	s.requirePages(t, 100, `SELECT create_task('default', 'task 70', '0.1.0', p_idempotency_key => 'key 70')`)
	s.requirePages(t, 800, `SELECT add_steps(`+waiting+`, '{n1, n2}', '{s3, s3}', p_parents => '{n1, s1}', p_children => '{n2, n1}')`)
	s.requirePages(t, 300, `SELECT register_task_definition('default', 'another', '1', NULL, '{}', '{a, b}', '{h, h}', p_parents => '{a}', p_children => '{b}')`)
	s.requirePages(t, 100, `SELECT add_to_dlq('00000000-0000-0000-0000-000000000003')`)
	s.requirePages(t, 60, `SELECT resolve_dlq(`+waiting+`, 'cancelled')`)
	s.requirePages(t, 60, `SELECT * FROM list_dlq(p_task_uuid => `+waiting+`)`)
	s.requirePages(t, 100, `SELECT * FROM get_all_transitions(`+waiting+`)`)
	s.requirePages(t, 60, `SELECT task_at_work(`+waiting+`)`)
	s.requirePages(t, 400, `SELECT purge_tasks(now() - interval '20 days', 1)`)
	s.requirePages(t, 3500, `SELECT recover_tasks()`) // twenty are woken
	s.requirePages(t, 3000, `SELECT * FROM detect_and_transition_stale_tasks(p_default_waiting_deps_threshold => 30)`)
	s.exec(t, `UPDATE steps SET state = 'pending', unmet = 0 WHERE task_id = `+enqueued+` AND position = 2`)
	s.exec(t, `UPDATE steps SET state = 'enqueued_as_error_for_orchestration' WHERE step_id = `+begun)
	s.requirePages(t, 800, `SELECT advance_task(`+enqueued+`, NULL)`)
	s.requirePages(t, 800, `SELECT advance_task(`+running+`, NULL)`)
	s.exec(t, `UPDATE step_definitions SET handler = NULL, sub_task_name = 'task 1', sub_task_version = '0.1.0' WHERE step_definition_id = `+first)
	s.requirePages(t, 1000, `SELECT advance_task(`+enqueued+`, NULL)`) // with the task that the step is
	s.exec(t, `UPDATE steps SET state = 'in_progress', sub_task_id = `+waiting+` WHERE step_id = `+first)
	s.exec(t, `UPDATE tasks SET parent_task_id = `+enqueued+`, parent_step_id = `+first+` WHERE task_id = `+waiting)
	s.requirePages(t, 200, `SELECT end_sub_task(t) FROM tasks t WHERE t.task_id = `+waiting)
}

// The parents of all steps are found at once, however many one of them has, and whatever the statistics say.
func TestListSteps_StepWithManyParents_ReadsEachDependencyOnce(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	const task = `'00000000-0000-0000-0000-000000000000'`
	s.exec(t, `INSERT INTO tasks (task_id, task_definition_id, namespace, state, correlation_id, total_steps) VALUES (`+task+`, '`+theDefinition+`', 'default', 'pending', new_uuid(), 3000)`)
	s.exec(t, `INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state)
		SELECT lpad(n::text, 32, '0')::uuid, `+task+`, '`+theStep+`', n, 's' || n, 'pending' FROM generate_series(1, 3000) AS n`)
	s.exec(t, `INSERT INTO step_dependencies (task_id, from_step_id, to_step_id) SELECT task_id, step_id, lpad('3000', 32, '0')::uuid FROM steps WHERE position < 3000`)
	s.exec(t, `ANALYZE tasks, steps, step_dependencies`)
	s.requirePages(t, 2000, `SELECT * FROM list_steps(ARRAY[`+task+`::uuid])`)
	require.Equal(t, 2999, value[int](t, s, `SELECT cardinality(parents) FROM list_steps(ARRAY[`+task+`::uuid]) WHERE name = 's3000'`))
}

// What one of many tasks that are steps of a task does when it ends does not grow with how many there are.
func TestSubTask_OneOfManyEnds_ReadsHardlyMoreThanItself(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	const parent, child = `'00000000-0000-0000-0000-000000000000'`, `'00000000-0000-0000-0000-000000000700'`
	s.exec(t, `UPDATE step_definitions SET handler = NULL, sub_task_name = 'inner', sub_task_version = '1'`)
	s.exec(t, `INSERT INTO tasks (task_id, task_definition_id, namespace, state, correlation_id, total_steps) VALUES (`+parent+`, '`+theDefinition+`', 'default', 'steps_in_process', new_uuid(), 20000)`)
	s.fill(t, `INSERT INTO steps (step_id, task_id, step_definition_id, position, name, state)
		SELECT lpad(n || '1', 32, '0')::uuid, `+parent+`, '`+theStep+`', n, 's' || n, 'in_progress' FROM generate_series(1, 20000) AS n`)
	s.fill(t, `INSERT INTO tasks (task_id, task_definition_id, namespace, state, correlation_id, parent_task_id, parent_step_id, created_at)
		SELECT lpad(n::text, 32, '0')::uuid, '`+theDefinition+`', 'default', 'complete', new_uuid(), `+parent+`, lpad(n || '1', 32, '0')::uuid, now() FROM generate_series(1, 20000) AS n`)
	s.exec(t, `ANALYZE tasks, steps`)
	s.requirePages(t, 150, `SELECT end_sub_task(t) FROM tasks t WHERE t.task_id = `+child)
	s.requirePages(t, 150, `SELECT cancel_step('00000000-0000-0000-0000-000000007001')`)
	require.Equal(t, 1, value[int](t, s, `WITH ended AS (SELECT end_sub_task(t) FROM tasks t WHERE t.task_id = `+child+`) SELECT count(*) FROM ended`))
	require.Equal(t, "enqueued_for_orchestration", value[string](t, s, `SELECT state FROM steps WHERE name = 's700'`))
}

// requirePages asserts that a statement, which is undone, reads fewer pages. While other tests on the server have old snapshots, what
// earlier statements left behind stays, and is walked over: that is allowed for.
func (s *stage) requirePages(t *testing.T, fewerThan int64, statement string) {
	t.Helper()
	conn, err := s.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	testdb.RequirePages(t, conn, 3*fewerThan, statement)
}
