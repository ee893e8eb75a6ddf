package taskgraph_test

import (
	"context"
	"math"
	"strconv"
	"strings"
	"testing"

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
	s.requirePages(t, 100_000, `SELECT advance_task(`+task+`, NULL)`) // of 20,000 steps: each at most, and not each for each
	s.exec(t, `UPDATE taskgraph_settings SET deadline_weight = 1`)
	s.requirePages(t, 500, `SELECT * FROM get_next_ready_tasks(5)`) // those past their deadline are fifty
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

// requirePages asserts that a statement, which is undone, reads fewer pages: those of what is planned already. While other
// tests on the server have old snapshots, what earlier statements left behind stays, and is walked over: that is allowed for.
func (s *stage) requirePages(t *testing.T, fewerThan int64, statement string) {
	t.Helper()
	conn, err := s.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	read := int64(math.MaxInt64)
	for range 4 { // the first call also plans, and so may others, when somebody has changed tables
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		var plan []struct {
			Plan struct {
				Hit  int64 `json:"Shared Hit Blocks"`
				Read int64 `json:"Shared Read Blocks"`
			}
		}
		err = tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) `+statement).Scan(&plan)
		_ = tx.Rollback(context.Background())
		require.NoError(t, err, statement)
		read = min(read, plan[0].Plan.Hit+plan[0].Plan.Read)
	}
	t.Logf("%6d pages, of less than %d: %s", read, fewerThan, statement)
	if read >= 3*fewerThan {
		t.Errorf("%s read %d pages", statement, read)
	}
}
