package taskgraph_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: can everybody read what somebody has said?

// writtenOut is JSON of n numbers of so many digits each once jsonb has written them out.
func writtenOut(n, digits int) json.RawMessage {
	return json.RawMessage(`[` + strings.Repeat(fmt.Sprintf("7e%d, ", digits-1), n) + `7]`)
}

// The exponent of a number is what makes it long.
func TestVerbs_NumbersThatAreLongWhenWrittenOut_AreRefusedOrRead(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	kept := writtenOut(100, 300)
	g.Handle("h", func(ctx context.Context, s *taskgraph.Step) (any, error) {
		if err := s.Checkpoint(ctx, writtenOut(8500, 131072)); !errors.Is(err, pgwake.ErrInvalid) {
			return nil, fmt.Errorf("a checkpoint: %w", err)
		}
		var context []json.Number
		if err := errors.Join(s.Checkpoint(ctx, kept), json.Unmarshal(s.Context, &context)); err != nil || len(context[0]) != 300 {
			return nil, fmt.Errorf("a context of %d: %w", len(context), err)
		}
		if s.Name == "long" {
			return writtenOut(8500, 131072), nil
		}
		return kept, nil
	})
	g.run()
	d := taskgraph.Define("shop", "numbers", "1").Step("short", "h", taskgraph.Inputs(kept)).Step("long", "h", taskgraph.After("short"))
	task := g.submit(d, func(s *taskgraph.Submission) { s.Context = kept })
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, taskgraph.StepComplete, g.step(task, "short").State, g.step(task, "short").Err())
	require.Equal(t, "the result: numbers that are more than 104857600 bytes when they are written out", g.step(task, "long").Err())
	require.Equal(t, 1, g.step(task, "long").Attempts)
	for _, exponent := range []string{"7e131071, ", "7E+131071, ", "0.5e-16382, "} {
		s := taskgraph.Submission{Namespace: "shop", Name: "numbers", Version: "1", Context: json.RawMessage(`[` + strings.Repeat(exponent, 8500) + `7]`)}
		_, err := g.Submit(t.Context(), s)
		require.ErrorIs(t, err, pgwake.ErrInvalid, exponent)
	}
}

// Each of its inputs may be, and all of them together are in its configuration.
func TestValidate_InputsThatAreTooLongTogetherWhenWrittenOut_AreRefused(t *testing.T) {
	t.Parallel()
	d := taskgraph.Define("n", "t", "1").Step("a", "h", taskgraph.Inputs(writtenOut(700, 131072))).Step("b", "h", taskgraph.Inputs(writtenOut(99, 131072)))
	require.NoError(t, d.Validate())
	d.Step("c", "h", taskgraph.Inputs(writtenOut(2, 131072)))
	require.Equal(t, []string{"the inputs together: numbers that are more than 104857600 bytes when they are written out"}, problemsOf(t, d))
}

// smaller has a function count with a smaller number in the place of one of its own.
func (l *lab) smaller(function, number, with string) {
	l.t.Helper()
	l.undone(one[string](l, `SELECT pg_get_functiondef($1::text::regproc)`, function))
	l.exec(one[string](l, `SELECT replace(pg_get_functiondef($1::text::regproc), $2, $3)`, function, number, with))
}

// Who calls the functions meets no Config. What no node could read is refused all the same, whatever its digits took; what is there stays.
func TestSQL_WhatNobodyCouldRead_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("shop", "x", "1", `{}`, "a")
	task := l.create("shop", "x")
	l.exec(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps), '{pending,enqueued,in_progress}', NULL, '{}')`)
	if testsize.Full() { // PostgreSQL takes many seconds to find that this is too large for itself
		_, err := l.conn.Exec(t.Context(), `SELECT create_task_many(NULL, '{shop}', '{x}', '{1}', ARRAY['[7' || repeat('e131071,7', 8500) || ']'])`)
		require.ErrorContains(t, err, "(SQLSTATE PW003)")
	}
	l.smaller("refuse_unreadable", "268435456", "1000000")
	for _, number := range []string{`'7' || repeat('e999,7', 1100)`, `'-7.5' || repeat('E-999, -7.5', 1100)`, `'"' || repeat('x', 1000000) || '"'`} {
		json := `('[' || ` + number + ` || ']')`
		for _, call := range []string{
			`create_task_many(NULL, '{shop}', '{x}', '{1}', ARRAY[` + json + `])`,
			`create_task_many(NULL, '{shop,shop}', '{x,x}', '{1,1}', p_tags => ARRAY['1', ` + json + `])`,
			`create_task('shop', 'x', '1', ` + json + `::jsonb)`,
			`register_task_definition('shop', 'y', '1', NULL, ` + json + `::jsonb, '{a}', '{h}')`,
			`register_task_definition('shop', 'y', '1', NULL, '{}', '{a,b}', '{h,h}', p_inputs => ARRAY[NULL, ` + json + `])`,
			`add_steps('` + task + `', '{b}', '{a}', ARRAY[` + json + `])`,
			`complete_step_manually(step_id, ` + json + `::jsonb) FROM steps`,
			`add_to_dlq('` + task + `', p_metadata => ` + json + `::jsonb)`,
			`transition_task_state_atomic('` + task + `', 'pending', 'cancelled', NULL, ` + json + `::jsonb)`,
			`transition_step_state_atomic(step_id, 'in_progress', 'cancelled', NULL, ` + json + `::jsonb) FROM steps`,
		} {
			l.fails("PW003", `SELECT `+call)
		}
	}
	l.exec(`SELECT create_task('shop', 'x', '1', ('["e999,7' || repeat('7e999,7', 100000) || '"]')::jsonb)`)
	l.exec(`SELECT create_task('shop', 'x', '1', ('[7' || repeat('e9,7', 1100) || ']')::jsonb)`)
	tasks, err := l.ListTasks(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, tasks, 3)

	l.exec(`ALTER TABLE steps DISABLE TRIGGER USER`)
	l.exec(`UPDATE steps SET results = to_jsonb(repeat(md5('1'), 100000)) WHERE task_id = $1`, task)
	l.exec(`ALTER TABLE steps ENABLE TRIGGER USER`)
	l.exec(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps WHERE task_id = $1), '{in_progress,enqueued_for_orchestration}', NULL, '{}')`, task)
}

// Of an attempt, as its worker says it: one that was built before, and whose role may call what there was then.
func TestFinishStep_BySQL_WhatNobodyCouldRead_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.submit(taskgraph.Define("shop", "x", "1").Step("a", "h"))
	l.turns()
	item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Tags: pgwake.Tags("taskgraph"), LockTimeout: time.Minute})
	require.NoError(t, err)
	step := one[string](l, `SELECT step_id::text FROM steps`)
	token, _, _ := strings.Cut(string(item.LockToken), "/")
	require.Equal(t, "run", one[string](l, `SELECT outcome FROM start_step($1, $2, $3, gen_random_uuid())`, step, item.ID, token))
	l.smaller("refuse_unreadable", "268435456", "1000000")
	worker := l.role(testroles.Worker)
	l.exec(`REVOKE EXECUTE ON FUNCTION refuse_unreadable, refuse_row FROM ` + worker)
	l.exec(`SET ROLE ` + worker)
	const long = `('[7' || repeat('e999,7', 1100) || ']')::jsonb`
	l.fails("PW003", `SELECT checkpoint_step($1, $2, $3, `+long+`)`, step, item.ID, token)
	l.fails("PW003", `SELECT finish_step($1, $2, $3, gen_random_uuid(), true, `+long+`)`, step, item.ID, token)
	l.fails("PW003", `SELECT finish_step($1, $2, $3, gen_random_uuid(), false, '{"retryable": true}', '9000 years')`, step, item.ID, token)
	l.fails("PW003", `SELECT release_step($1, $2, $3, gen_random_uuid(), '9000 years')`, step, item.ID, token)
	l.exec(`SELECT checkpoint_step($1, $2, $3, to_jsonb(repeat('x', 900000)))`, step, item.ID, token)
	require.True(t, one[bool](l, `SELECT finish_step($1, $2, $3, gen_random_uuid(), true, to_jsonb(repeat('x', 900000)))`, step, item.ID, token))
}

// Clients have no infinite instants, and JSON none after the year 9999: one task would keep everybody from listing all.
func TestCreateTaskMany_BySQL_InstantsThatNobodyCanRead_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("shop", "x", "1", `{}`, "a")
	for _, deadline := range []string{"infinity", "-infinity", "10000-01-01 00:00+00", "294276-01-01 00:00+00", "0001-12-31 23:59+00 BC"} {
		l.fails("PW003", `SELECT create_task_many(NULL, '{shop}', '{x}', '{1}', p_deadlines => ARRAY[$1::text::timestamptz])`, deadline)
	}
	l.fails("PW003", `SELECT create_task('shop', 'x', '1', p_delay => '9000 years')`)
	if one[int](l, `SELECT current_setting('server_version_num')::integer`) >= 170000 {
		l.fails("PW003", `SELECT create_task('shop', 'x', '1', p_delay => 'infinity')`)
	}
	for _, deadline := range []string{"0001-01-01 00:00+00", "9999-12-31 23:59:59.999999+00"} {
		l.exec(`SELECT create_task_many(NULL, '{shop}', '{x}', '{1}', p_deadlines => ARRAY[$1::text::timestamptz])`, deadline)
	}
	l.exec(`SELECT create_task('shop', 'x', '1', p_delay => '100 years')`)
	tasks, err := l.ListTasks(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, tasks, 3)
	s := taskgraph.Submission{Namespace: "shop", Name: "x", Version: "1", Deadline: time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -5*60*60))}
	_, err = l.Submit(l.within(), s)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, "the year 10000", "the server has no zones")
}

// Nor do they have a time of more than 2^63 ns: an attempt with it would have ended before it began, or could not begin at all.
func TestRegister_BySQL_TimeoutThatNobodyHas_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const register = `SELECT register_task_definition('shop', 'x', '1', NULL, '{}', '{a}', '{h}', p_timeouts => ARRAY[$1::text::interval])`
	timeouts := []string{"300 years", "170000000 years"}
	if one[int](l, `SELECT current_setting('server_version_num')::integer`) >= 170000 {
		timeouts = append(timeouts, "infinity")
	}
	for _, timeout := range timeouts {
		l.fails("PW003", register, timeout)
	}
	longest := time.Duration(math.MaxInt64).Truncate(time.Second)
	l.submit(taskgraph.Define("shop", "x", "1").Step("a", "h", taskgraph.Timeout(longest)))
	require.Equal(t, longest, one[time.Duration](l, `SELECT timeout FROM step_definitions`))
}

// The contexts of all steps of a turn that are tasks may be more than an array holds; each is what a context may be.
func TestSubTask_ContextsAreTooLargeTogether_SomeAtATime(t *testing.T) {
	t.Parallel()
	for _, inputs := range []taskgraph.StepOption{taskgraph.Inputs(nil), taskgraph.Inputs(strings.Repeat("x", 400))} {
		l := newLab(t)
		l.smaller("enqueue_steps", "(64 << 20)", "1000")
		outer := taskgraph.Define("shop", "outer", "1")
		for i := range 7 {
			outer.SubTask(fmt.Sprint("s", i), "inner", "1", inputs)
		}
		require.NoError(t, l.Register(l.within(), taskgraph.Define("shop", "inner", "1").Step("a", "h"), outer))
		done, err := l.Submit(l.within(), taskgraph.Submission{Namespace: "shop", Name: "outer", Version: "1", Context: strings.Repeat("x", 400)})
		require.NoError(t, err)
		l.turns()
		require.Equal(t, 4, one[int](l, `SELECT count(DISTINCT created_at) FROM tasks WHERE parent_task_id = $1`, done.ID), "two at a time")
		require.Equal(t, 7, one[int](l, `SELECT count(*) FROM tasks t JOIN steps s ON s.step_id = t.parent_step_id AND s.sub_task_id = t.task_id
			WHERE t.parent_task_id = $1 AND t.context = to_jsonb(repeat('x', 400))`, done.ID))
	}
}

// What it would come to nobody could read.
func TestSubTask_ResultsAreTooLongTogetherWhenWrittenOut_TheStepFailsForGood(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.smaller("end_sub_task", "64 << 20", "1000000")
	task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h").Step("y", "h"), taskgraph.Define("shop", "outer", "1").SubTask("a", "inner", "1"))
	l.turns()
	child := one[string](l, `SELECT task_id::text FROM tasks WHERE parent_task_id = $1`, task)
	l.exec(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps WHERE task_id = $1), ARRAY['enqueued', 'in_progress', 'enqueued_for_orchestration'], NULL, '{}')`, child)
	l.exec(`UPDATE steps SET results = $2 WHERE task_id = $1`, child, writtenOut(15, 131072)) // 2 MB each
	l.exec(`SELECT wake_task($1, 'test')`, child)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(child))
	require.Equal(t, []string{"error"}, l.stepStates(task))
	require.Contains(t, one[string](l, `SELECT results ->> 'error' FROM steps WHERE task_id = $1`, task), "written out")
}

// A definition that somebody has registered by SQL may say anything.
func TestStale_WhateverAThresholdIs_AllOthersAreFound(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	thresholds := []string{`{"max_duration_minutes": -1e300}`, `{"max_duration_minutes": 1e-320}`, `{"max_steps_in_process_minutes": -1e300}`, `{"max_waiting_for_retry": "-178000000 years"}`,
		`{"max_waiting_for_dependencies_minutes": 1e-300}`, `{"max_lifetime": "-infinity"}`, `{"max_lifetime": "infinity"}`, `{"max_duration_minutes": 0}`}
	for i, lifecycle := range thresholds {
		name := fmt.Sprint("odd", i)
		l.define("shop", name, "1", `{"lifecycle": `+lifecycle+`}`, "a")
		for _, state := range []taskgraph.TaskState{taskgraph.TaskPending, taskgraph.TaskWaitingForDependencies, taskgraph.TaskWaitingForRetry, taskgraph.TaskStepsInProcess} {
			task := l.create("shop", name)
			l.bring(task, state)
			l.older(task, time.Hour)
		}
	}
	l.define("shop", "plain", "1", `{}`, "a")
	plain := l.create("shop", "plain")
	l.bring(plain, taskgraph.TaskWaitingForRetry)
	l.older(plain, 40*time.Minute)
	require.Equal(t, "stale", one[string](l, `SELECT health_status FROM detect_and_transition_stale_tasks(false, 1000) WHERE task_uuid = $1`, plain))
	require.GreaterOrEqual(t, one[float64](l, `SELECT min(lifecycle_minutes(configuration, 'max_duration_minutes', 7)) FROM task_definitions`), 0.0)
}
