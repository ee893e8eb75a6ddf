package taskgraph_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what does one turn do, statement by statement, whatever others do meanwhile?

// meanwhile has a statement sent by a session of its own, returns once it waits for a lock that somebody has, and returns what waits
// for its end.
func (l *lab) meanwhile(sql string, args ...any) (end func() error) {
	l.t.Helper()
	end, waits := l.beside(session(l.t, l.p), sql, args...)
	require.True(l.t, waits, "it waits for nobody: %s", sql)
	return end
}

// beside is meanwhile on a session that is there, for what may also come to its end: it says which of the two.
func (l *lab) beside(conn *pgx.Conn, sql string, args ...any) (end func() error, waits bool) {
	l.t.Helper()
	pid, ended := conn.PgConn().PID(), make(chan error, 1)
	go func() {
		_, err := conn.Exec(l.within(), sql, args...)
		ended <- err
	}()
	end = func() error { return <-ended }
	require.Eventually(l.t, func() bool {
		waits = one[bool](l, `SELECT wait_event_type = 'Lock' IS TRUE FROM pg_stat_activity WHERE pid = $1`, pid)
		return waits || len(ended) == 1
	}, labPatience, labPatience/10_000)
	return end, waits
}

// turn takes a turn that is due, and returns the task; "" if there is none.
func (l *lab) turn() string {
	l.t.Helper()
	task, evaluate := l.fetch()
	evaluate()
	return task
}

// fetch claims a turn that is due, and returns the task and what evaluates it; "" if there is none.
func (l *lab) fetch() (task string, evaluate func()) {
	l.t.Helper()
	turn, err := l.p.FetchOrchestrationItem(l.within(), &pgwake.FetchOptions{Queues: []string{"taskgraph"}, WithoutHistory: true, NoWait: true})
	if errors.Is(err, pgwake.ErrNoWork) {
		return "", func() {}
	}
	require.NoError(l.t, err)
	task, token, err := turn.LockToken.Turn()
	require.NoError(l.t, err)
	cancel := false
	for _, m := range turn.Messages {
		cancel = cancel || m.Kind == "cancel"
	}
	return task, func() {
		l.t.Helper()
		l.exec(`SELECT evaluate_task($1, $2, NULL, $3)`, task, token, cancel)
	}
}

// turns takes turns until none is due, and says how many that were.
func (l *lab) turns() (n int) {
	l.t.Helper()
	for l.turn() != "" {
		n++
	}
	return n
}

// claimed is a work item of a step that somebody has.
type claimed struct {
	step  string
	item  int64
	token string
}

// take claims the work item of a step, as another node would once the lease of whoever has it has ended.
func (l *lab) take(task, step string) claimed {
	l.t.Helper()
	c := claimed{step: l.step(task, step)}
	require.NoError(l.t, l.conn.QueryRow(l.within(), `UPDATE worker_queue q SET lock_token = gen_random_uuid(), visible_at = clock_timestamp() + interval '1 h'
		  FROM steps s WHERE s.step_id = $1 AND q.id = s.work_item_id RETURNING q.id, q.lock_token::text`, c.step).Scan(&c.item, &c.token))
	return c
}

// begin begins an attempt at a step that is enqueued, and returns what its handler has.
func (l *lab) begin(task, step string) claimed {
	l.t.Helper()
	c := l.take(task, step)
	require.Equal(l.t, "run", l.start(c))
	return c
}

func (l *lab) start(c claimed, lostDelays ...string) string {
	l.t.Helper()
	return one[string](l, `SELECT outcome FROM start_step($1, $2, $3, NULL, $4::text[]::interval[])`, c.step, c.item, c.token, lostDelays)
}

// finish ends an attempt. The next one is due long after a test has looked at what this one left, however slow the machine is.
func (l *lab) finish(c claimed, success bool, results string) {
	l.t.Helper()
	require.True(l.t, one[bool](l, `SELECT finish_step($1, $2, $3, NULL, $4, $5::text::jsonb, '20 s')`, c.step, c.item, c.token, success, results))
}

// ran has a step that is enqueued end well.
func (l *lab) ran(task, step, results string) {
	l.t.Helper()
	l.finish(l.begin(task, step), true, results)
}

func (l *lab) stateOf(task string) taskgraph.TaskState {
	l.t.Helper()
	return one[taskgraph.TaskState](l, `SELECT state FROM tasks WHERE task_id = $1`, task)
}

// stepStates are the states of the steps of a task, in the order of the definition.
func (l *lab) stepStates(task string) []string {
	l.t.Helper()
	return all[string](l, `SELECT state FROM steps WHERE task_id = $1 ORDER BY position`, task)
}

// submit registers definitions, and creates a task of the last one.
func (l *lab) submit(definitions ...*taskgraph.Definition) string {
	l.t.Helper()
	require.NoError(l.t, l.Register(l.within(), definitions...))
	d := definitions[len(definitions)-1]
	done, err := l.Submit(l.within(), taskgraph.Submission{Namespace: d.Namespace, Name: d.Name, Version: d.Version})
	require.NoError(l.t, err)
	return done.ID
}

// statementEnd is the end of a statement of PL/pgSQL, on a line of its own.
var statementEnd = regexp.MustCompile(`;\s*(--.*)?$`)

// stoppable has advance_task wait, after its nth statement, for as long as somebody has the advisory lock 1 of the schema, and returns how
// many statements there are: SET test.stop = n. With 0 it waits nowhere, and test.passed has the numbers of those that it came to.
func (l *lab) stoppable() (statements int) {
	l.t.Helper()
	l.exec(`CREATE FUNCTION stop(n integer) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
		IF n = nullif(current_setting('test.stop', true), '')::integer THEN PERFORM pg_advisory_xact_lock_shared(hashtext(current_schema()), 1); END IF;
		IF current_setting('test.stop', true) = '0' THEN
			PERFORM set_config('test.passed', concat_ws(',', nullif(current_setting('test.passed', true), ''), n), false);
		END IF;
		RETURN true; END $$`)
	before := one[string](l, `SELECT pg_get_functiondef('advance_task'::regproc)`)
	l.undone(before + `; DROP FUNCTION stop`)
	declared, body, found := strings.Cut(before, "\nBEGIN\n")
	require.True(l.t, found)
	lines := strings.Split(body, "\n")
	for i, line := range lines {
		if statementEnd.MatchString(line) && !strings.HasPrefix(strings.TrimSpace(line), "--") {
			statements++
			lines[i] = fmt.Sprintf("%s\nv_stopped := stop(%d);", line, statements) // an assignment leaves FOUND as it is
		}
	}
	l.exec(declared + "\n    v_stopped boolean;\nBEGIN\n" + strings.Join(lines, "\n"))
	return statements
}

// A worker may commit between any two statements of a turn. Whatever it does, the task is never complete with a step that is not, and
// the turn of the message that comes with it puts everything in its place.
func TestTurn_WorkerCommitsBetweenAnyTwoStatements_NothingIsPassedOver(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		step string
		does func(l *lab, c claimed)
		want taskgraph.TaskState
	}{
		"its last attempt is lost":    {"once", func(l *lab, c claimed) { require.Equal(l.t, "lost", l.start(c)) }, taskgraph.TaskBlockedByFailures},
		"an attempt is lost":          {"twice", func(l *lab, c claimed) { require.Equal(l.t, "lost", l.start(c, "1 h")) }, taskgraph.TaskWaitingForRetry},
		"it is lost, and due at once": {"twice", func(l *lab, c claimed) { require.Equal(l.t, "lost", l.start(c, "0")) }, taskgraph.TaskStepsInProcess},
		"it is given back": {"once", func(l *lab, c claimed) {
			require.True(l.t, one[bool](l, `SELECT release_step($1, $2, $3, NULL)`, c.step, c.item, c.token))
		}, taskgraph.TaskStepsInProcess},
		"it succeeds": {"once", func(l *lab, c claimed) { l.finish(c, true, `{}`) }, taskgraph.TaskComplete},
		"it fails":    {"once", func(l *lab, c claimed) { l.finish(c, false, `{"error": "no"}`) }, taskgraph.TaskBlockedByFailures},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.exec(`SELECT register_task_definition('shop', 'work', '1', NULL, '{}', ARRAY['other', 'once', 'twice'], ARRAY['h', 'h', 'h'], p_max_attempts => ARRAY[1, 1, 2])`)
			key := []any{one[int32](l, `SELECT hashtext(current_schema())`)}
			statements := l.stoppable()
			require.Greater(t, statements, 30)
			turn := session(t, l.p)
			stops := []int{0} // which it is not stopped at, and then those that it has come to by that
			for i := 0; i < len(stops); i++ {
				at := stops[i]
				task := l.create("shop", "work")
				l.exec(`SELECT advance_task($1, NULL)`, task)
				for _, step := range []string{"other", "once", "twice"} {
					if step != c.step {
						l.ran(task, step, `1`)
					}
				}
				l.begin(task, c.step)
				again := l.take(task, c.step) // the item comes again, to another worker

				l.exec(`SELECT pg_advisory_lock($1, 1)`, key...)
				_, err := turn.Exec(l.within(), fmt.Sprintf(`SET test.stop = %d`, at))
				require.NoError(t, err)
				end, stopped := l.beside(turn, `SELECT advance_task($1, NULL)`, task)
				if stopped {
					c.does(l, again)
				}
				l.exec(`SELECT pg_advisory_unlock($1, 1)`, key...)
				require.NoError(t, end())
				if !stopped {
					require.Zero(t, at, "it comes to this statement")
					c.does(l, again)
				}
				if at == 0 {
					var passed []int
					require.NoError(t, turn.QueryRow(l.within(), `SELECT array_agg(DISTINCT n ORDER BY n) FROM unnest(string_to_array(current_setting('test.passed'), ',')::integer[]) AS n`).Scan(&passed))
					stops = append(stops, passed...)
				}
				if l.stateOf(task) == taskgraph.TaskComplete {
					require.Equal(t, []string{"complete", "complete", "complete"}, l.stepStates(task), "statement %d", at)
				}
				l.exec(`SELECT advance_task($1, NULL)`, task) // as the message has it
				require.Equal(t, c.want, l.stateOf(task), "statement %d: %v", at, l.stepStates(task))
			}
			require.Greater(t, len(stops), 15)
		})
	}
}

func TestTurn_MoreIsReadyThanOneTurnEnqueues_AnotherTurnComesAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	most, retried := testsize.Of(1500, 2500), testsize.Of(1200, 1500)
	steps, handlers := make([]string, most), make([]string, most)
	for i := range steps {
		steps[i], handlers[i] = fmt.Sprintf("s%04d", i), "h"
	}
	l.exec(`SELECT register_task_definition('shop', 'wide', '1', NULL, '{}', $1, $2)`, steps, handlers)
	task := l.create("shop", "wide")
	enqueued := func() int {
		return one[int](l, `SELECT count(*) FROM steps WHERE state = 'enqueued' AND work_item_id IN (SELECT id FROM worker_queue)`)
	}
	for want := 0; want < most; {
		want = min(want+1000, most)
		require.Equal(t, task, l.turn())
		require.Equal(t, want, enqueued())
		require.Equal(t, taskgraph.TaskStepsInProcess, l.stateOf(task))
	}
	require.Empty(t, l.turn(), "nothing is left to be done")
	require.Nil(t, one[any](l, `SELECT next_ready_at FROM tasks`))

	// The same with retries.
	l.exec(fmt.Sprintf(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps ORDER BY step_id LIMIT %d), ARRAY['enqueued', 'waiting_for_retry'], NULL, '{}',
		p_next_attempts => array_fill(clock_timestamp(), ARRAY[%[1]d]))`, retried))
	l.exec(`SELECT wake_task($1, 'test')`, task)
	for _, want := range []int{most - retried + 1000, most} {
		require.Equal(t, task, l.turn())
		require.Equal(t, want, enqueued())
	}
	require.Empty(t, l.turn())
	_, err := l.Replay(l.within(), task)
	require.NoError(t, err)
}

// A chain of which each step is skipped because the one before is takes as many statements as it has steps: more than one turn may take.
func TestTurn_LongChainIsSkipped_TurnsOfSoManyStepsFollowEachOther(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := testsize.Of(1500, 2500)
	d := taskgraph.Define("shop", "chain", "1").Step("s0", "h").Step("other", "h")
	for i := 1; i < n; i++ {
		d.Step(fmt.Sprint("s", i), "h", taskgraph.AfterIf(fmt.Sprint("s", i-1), `$ == 1`))
	}
	d.Step("last", "h", taskgraph.After(fmt.Sprint("s", n-1)))
	task := l.submit(d)
	l.turns()
	l.ran(task, "s0", `2`)
	l.ran(task, "other", `2`)
	completed := func() (int, int) {
		t.Helper()
		passed := one[int](l, `SELECT completed_steps FROM tasks`)
		require.Equal(t, passed, one[int](l, `SELECT count(*) FROM steps WHERE passed_on`))
		return passed, one[int](l, `SELECT count(*) FROM steps WHERE state = 'complete'`)
	}
	for want := 1001; want <= n; want += 1000 {
		require.Equal(t, task, l.turn())
		passed, complete := completed()
		require.Equal(t, want, passed)
		require.Equal(t, want+1, complete, "the next one is skipped, and not passed on")
		require.Equal(t, taskgraph.TaskStepsInProcess, l.stateOf(task))
	}
	require.Equal(t, 1, l.turns())
	passed, complete := completed()
	require.Equal(t, n+1, passed)
	require.Equal(t, n+1, complete)
	l.ran(task, "last", `3`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	require.Equal(t, n+2, one[int](l, `SELECT completed_steps FROM tasks`))
	_, err := l.Replay(l.within(), task)
	require.NoError(t, err)
}

// So it is if the task ends with the chain, and also if it is blocked meanwhile: what is skipped is complete all the same.
func TestTurn_LongChainIsSkipped_CompleteOrBlockedInTheEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const n = 1002 // the last one is skipped in the last round of the first turn
	d := taskgraph.Define("shop", "chain", "1").Step("other", "h").Step("s0", "h")
	for i := 1; i < n; i++ {
		d.Step(fmt.Sprint("s", i), "h", taskgraph.AfterIf(fmt.Sprint("s", i-1), `$ == 1`))
	}
	require.NoError(t, l.Register(l.within(), d))
	for other, want := range map[string]taskgraph.TaskState{`1`: taskgraph.TaskComplete, ``: taskgraph.TaskBlockedByFailures} {
		task := l.create("shop", "chain")
		l.turns()
		l.ran(task, "s0", `2`)
		if other != "" {
			l.ran(task, "other", other)
		} else {
			did(t)(l.FailStep(l.within(), l.step(task, "other"), "no"))
		}
		require.Equal(t, 2, l.turns())
		require.Equal(t, want, l.stateOf(task))
		passed := one[int](l, `SELECT completed_steps FROM tasks WHERE task_id = $1`, task)
		require.Equal(t, one[int](l, `SELECT count(*) FROM steps WHERE task_id = $1 AND state = 'complete'`, task), passed)
		require.GreaterOrEqual(t, passed, n)
		require.Nil(t, one[any](l, `SELECT next_ready_at FROM tasks WHERE task_id = $1`, task))
	}
}

// With a step that is a task all the steps of that are created, in the same turn.
func TestTurn_StepsAreTasksOfManySteps_AnotherTurnComesForTheRest(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	inner := taskgraph.Define("shop", "inner", "1").Template("more", "h")
	for i := range 400 {
		inner.Step(fmt.Sprint("s", i), "h")
	}
	outer := taskgraph.Define("shop", "outer", "1")
	for i := range 5 {
		outer.SubTask(fmt.Sprint("t", i), "inner", "1", taskgraph.RetryEvery(0))
	}
	require.NoError(t, l.Register(l.within(), inner))
	task := l.submit(outer)
	subTasks := func() int { return one[int](l, `SELECT count(*) FROM tasks WHERE parent_task_id = $1`, task) }
	turn := func() {
		t.Helper()
		l.exec(`UPDATE orchestrator_queue SET visible_at = now() + interval '1 h' WHERE instance_id <> $1`, task) // it is about that one
		require.Equal(t, task, l.turn())
	}
	turn()
	require.Equal(t, 3, subTasks())
	turn()
	require.Equal(t, 5, subTasks())
	require.Equal(t, 5*400, one[int](l, `SELECT count(*) FROM steps WHERE task_id <> $1`, task))
	l.exec(`UPDATE orchestrator_queue SET visible_at = now() + interval '1 h' WHERE instance_id <> $1`, task)
	require.Empty(t, l.turn())

	// The same with retries.
	l.exec(`SELECT count(*) FROM transition_steps(ARRAY(SELECT step_id FROM steps WHERE task_id = $1), ARRAY['in_progress', 'enqueued_as_error_for_orchestration'], NULL, '{}')`, task)
	l.exec(`SELECT wake_task($1, 'test')`, task)
	turn()
	require.Equal(t, 8, subTasks())
	turn()
	require.Equal(t, 10, subTasks())
}

// What is skipped since somebody put it back, and what a result completes in the same turn, both count.
func TestTurn_StepThatIsToBeSkippedIsPutBack_ResultsOfTheSameTurnCount(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "skip", "1").Step("a", "h").Step("b", "h", taskgraph.AfterIf("a", `$ == 1`)).Step("c", "h").Step("d", "h", taskgraph.After("b", "c")))
	l.turns()
	did(t)(l.FailStep(l.within(), l.step(task, "b"), "not that one"))
	l.ran(task, "a", `2`) // so b is to be skipped
	l.turns()
	require.Equal(t, []string{"complete", "error", "enqueued", "pending"}, l.stepStates(task))
	did(t)(l.ResetStep(l.within(), l.step(task, "b"), ""))
	l.ran(task, "c", `3`)
	require.Equal(t, 1, l.turns())
	require.Equal(t, []string{"complete", "complete", "complete", "enqueued"}, l.stepStates(task))
	require.Equal(t, 3, one[int](l, `SELECT completed_steps FROM tasks`))
	l.ran(task, "d", `4`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	require.Equal(t, 4, one[int](l, `SELECT completed_steps FROM tasks`))
}

// Callers in SQL may say what they like: only false is false.
func TestTurn_ResultOfAFailureIsAnyJSON_IsTakenAsRetryable(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("shop", "work", "1", `{}`, "a")
	for results, want := range map[string]string{
		`{"error": "x", "retryable": "maybe"}`: "waiting_for_retry", `{"error": "x", "retryable": null}`: "waiting_for_retry", `{"retryable": {}}`: "waiting_for_retry",
		`"a text"`: "waiting_for_retry", `[]`: "waiting_for_retry", `7`: "waiting_for_retry", `null`: "waiting_for_retry",
		`{"error": "x", "retryable": true}`: "waiting_for_retry", `{"error": "x", "retryable": false}`: "error",
	} {
		task := l.create("shop", "work")
		l.turns()
		l.finish(l.begin(task, "a"), false, results)
		l.turns()
		require.Equal(t, []string{want}, l.stepStates(task), results)
	}
}

// One turn writes the row of the task once, whatever it does.
func TestTurn_WhateverItDoes_WritesTheTaskOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "work", "1").Step("a", "h").Step("b", "h", taskgraph.After("a")))
	l.exec(`CREATE TABLE writes (state text);
		CREATE FUNCTION note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO writes VALUES (NEW.state); RETURN NULL; END $$;
		CREATE TRIGGER note_write AFTER UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION note_write()`)
	l.undone(`DROP TABLE writes; DROP TRIGGER note_write ON tasks; DROP FUNCTION note_write`)
	writes := func() []string {
		t.Helper()
		require.Equal(t, task, l.turn())
		return all[string](l, `DELETE FROM writes RETURNING state`)
	}
	require.Equal(t, []string{"steps_in_process"}, writes())
	l.finish(l.begin(task, "a"), false, `{"error": "x"}`)
	require.Equal(t, []string{"waiting_for_retry"}, writes(), "and sets a timer")
	l.exec(`UPDATE steps SET next_attempt_at = clock_timestamp() WHERE name = 'a'; DELETE FROM writes`)
	l.exec(`SELECT enqueue_message($1, 'retry', p_queue => 'taskgraph')`, task)
	require.Equal(t, []string{"steps_in_process"}, writes())
	l.ran(task, "a", `1`)
	require.Equal(t, []string{"steps_in_process"}, writes(), "and counts a step")
	l.ran(task, "b", `1`)
	require.Equal(t, []string{"complete"}, writes())
	l.exec(`SELECT enqueue_message($1, 'late', p_queue => 'taskgraph')`, task)
	require.Empty(t, writes())
	require.Equal(t, 2, one[int](l, `SELECT completed_steps FROM tasks`))
	require.Equal(t, 1, one[int](l, `SELECT retries FROM tasks`))
	_, err := l.Replay(context.Background(), task)
	require.NoError(t, err)
}

// The instants are moved on instead, after the fetch: to a turn that is the same.
func TestTurn_ClockGoesBackBetweenFetchAndEvaluation_TimerIsSentAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	d := taskgraph.Define("shop", "timed", "1").Step("a", "h")
	require.NoError(t, l.Register(l.within(), d))
	submit := func(delay time.Duration) string {
		t.Helper()
		s := aTask(d)
		s.Delay = delay
		done, err := l.Submit(l.within(), s)
		require.NoError(t, err)
		return done.ID
	}
	move := func(task, by string) {
		t.Helper()
		l.exec(`UPDATE tasks SET start_at = start_at + $2::interval, next_ready_at = next_ready_at + $2::interval, timer_at = timer_at + $2::interval WHERE task_id = $1`, task, by)
		l.exec(`UPDATE steps SET next_attempt_at = next_attempt_at + $2::interval WHERE task_id = $1`, task, by)
	}
	for name, waiting := range map[string]func() string{
		"to begin": func() string { return submit(time.Hour) },
		"to begin at once, and its clock goes back for the second time": func() string {
			task := submit(0)
			fetched, evaluate := l.fetch()
			require.Equal(t, task, fetched)
			move(task, "1 h")
			evaluate()
			return task
		},
		"for another attempt": func() string {
			task := submit(0)
			require.Equal(t, task, l.turn())
			l.finish(l.begin(task, "a"), false, `{"error": "x"}`)
			l.exec(`UPDATE steps SET next_attempt_at = clock_timestamp() + interval '1 h' WHERE task_id = $1`, task)
			require.Equal(t, task, l.turn())
			return task
		},
	} {
		t.Run(name, func(t *testing.T) {
			task := waiting()
			due := func() { // the hour has passed
				t.Helper()
				move(task, "-1 h")
				l.exec(`UPDATE orchestrator_queue SET visible_at = visible_at - interval '1 h' WHERE instance_id = $1`, task)
			}
			due()
			fetched, evaluate := l.fetch()
			require.Equal(t, task, fetched)
			move(task, "1 h")
			evaluate()
			require.Equal(t, []bool{true}, all[bool](l, `SELECT q.visible_at = t.next_ready_at FROM orchestrator_queue q JOIN tasks t ON t.task_id::text = q.instance_id WHERE t.task_id = $1`, task),
				"it waits, and has a message for that")
			l.exec(`SELECT enqueue_message($1, 'other', p_queue => 'taskgraph')`, task)
			require.Equal(t, 1, l.turns())
			require.Equal(t, 1, one[int](l, `SELECT count(*)::int FROM orchestrator_queue WHERE instance_id = $1`, task), "that message is there yet, and the only one")
			due()
			require.Equal(t, 1, l.turns())
			require.Equal(t, []string{"enqueued"}, l.stepStates(task))
		})
	}
}

// Turns, and the steps that they enqueue, are claimed in the order of the computed priority at whatever time they were enqueued; levels
// below 0 count as 0. Without a weight of age, levels are the priorities of the Provider.
func TestT48_Claims_AreInTheOrderOfTheComputedPriority(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, namespace := range []string{"shop", "vip", "dull"} {
		require.NoError(t, l.Register(l.within(), taskgraph.Define(namespace, "work", "1").Step("a", "h")))
	}
	names := make(map[string]string)
	submit := func(name, namespace string, priority int, age time.Duration) {
		t.Helper()
		done, err := l.Submit(l.within(), taskgraph.Submission{Namespace: namespace, Name: "work", Version: "1", Priority: priority})
		require.NoError(t, err)
		l.exec(`UPDATE tasks SET created_at = created_at - $2::interval WHERE task_id = $1`, done.ID, age)
		l.exec(`UPDATE orchestrator_queue SET visible_at = visible_at - $2::interval, created_at = created_at - $2::interval WHERE instance_id = $1`, done.ID, age)
		names[done.ID] = name
	}
	claims := func() (turns, steps []string) {
		t.Helper()
		for task := l.turn(); task != ""; task = l.turn() {
			turns = append(turns, names[task])
		}
		for range turns {
			item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Tags: pgwake.Tags("taskgraph")})
			require.NoError(t, err)
			steps = append(steps, names[item.Instance])
		}
		return turns, steps
	}
	require.NoError(t, l.SetSettings(l.within(), taskgraph.SettingsChange{NamespacePriority: map[string]float64{"vip": 4, "dull": -2}}))
	submit("3 levels", "shop", 3, 0)
	submit("29 h", "shop", 0, 29*time.Hour)
	submit("31 h", "shop", 0, 31*time.Hour)
	submit("-9 levels, an hour old", "shop", -9, time.Hour)
	submit("none", "shop", 0, 0)
	submit("4 levels of its namespace", "vip", 0, 0)
	submit("3 and -2 levels", "dull", 3, 0)
	want := []string{"4 levels of its namespace", "31 h", "3 levels", "29 h", "3 and -2 levels", "-9 levels, an hour old", "none"}
	turns, steps := claims()
	require.Equal(t, want, turns)
	require.Equal(t, want, steps)

	require.NoError(t, l.SetSettings(l.within(), taskgraph.SettingsChange{AgeWeight: new(0.0)}))
	submit("3 levels", "shop", 3, 0)
	submit("31 h", "shop", 0, 31*time.Hour)
	submit("-9 levels, an hour old", "shop", -9, time.Hour)
	submit("20 levels", "vip", 16, 0)
	submit("10 levels, a minute old", "shop", 10, time.Minute)
	want = []string{"10 levels, a minute old", "20 levels", "3 levels", "31 h", "-9 levels, an hour old"}
	turns, steps = claims()
	require.Equal(t, want, turns)
	require.Equal(t, want, steps)
}

// A message came late, and its turn had the instance before the removal did: it goes on to its end, and the removal after it.
func TestPurge_TurnOfALateMessage_NeitherIsInTheWayOfTheOther(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	task := l.submit(taskgraph.Define("shop", "empty", "1"))
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	eventually(t, func() bool { // once transactions of others on the server have ended that were open when it did
		l.exec(`SELECT refresh_rollups()`)
		return one[bool](l, `SELECT NOT EXISTS (SELECT FROM task_transitions x CROSS JOIN rollup_cursor c WHERE x.xact >= c.xact)`)
	})
	turn, err := l.conn.Begin(l.within())
	require.NoError(t, err)
	l.exec(`INSERT INTO instance_locks (instance_id, lock_token, locked_until) VALUES ($1, gen_random_uuid(), clock_timestamp()) ON CONFLICT (instance_id) DO UPDATE SET held = excluded.held`, task)
	removal := l.meanwhile(`SELECT purge_tasks(clock_timestamp())`)
	l.exec(`SELECT FROM tasks WHERE task_id = $1 FOR NO KEY UPDATE`, task)
	l.exec(`UPDATE tasks SET updated_at = clock_timestamp() WHERE task_id = $1`, task)
	require.NoError(t, turn.Commit(l.within()))
	require.NoError(t, removal())
	require.Zero(t, one[int](l, `SELECT count(*) FROM tasks`))
}

// A failover to a server that has the claim, and not the beginning that came after it. The worker has not noticed.
func TestFinishStep_ServerHasLostTheBeginningOfTheAttempt_ItsEndCounts(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a", "b", "c")
	task := l.create("default", "work")
	l.turns()
	a, b, c := l.take(task, "a"), l.take(task, "b"), l.take(task, "c")
	l.finish(a, true, `"done"`)
	require.True(t, one[bool](l, `SELECT release_step($1, $2, $3, NULL)`, b.step, b.item, b.token))
	stale := c
	stale.token = "00000000-0000-0000-0000-000000000000"
	l.fails("PW001", `SELECT finish_step($1, $2, $3, NULL, true, '1')`, stale.step, stale.item, stale.token)
	require.Equal(t, []string{"a enqueued_for_orchestration 1", "b waiting_for_retry 0", "c enqueued 0"},
		all[string](l, `SELECT concat_ws(' ', name, state, attempts) FROM steps WHERE task_id = $1 ORDER BY name`, task))
	l.turns()
	require.JSONEq(t, `"done"`, one[string](l, `SELECT results::text FROM steps WHERE step_id = $1 AND state = 'complete'`, a.step))
	require.Equal(t, "run", l.start(c))
}

// As after such a failover, while the handler is at work.
func TestCheckpoint_ServerHasLostTheBeginningOfTheAttempt_IsKeptAndTheAttemptIsBegun(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.turns()
	a := l.take(task, "a")
	const checkpoint, state = `SELECT checkpoint_step($1, $2, $3, $4::int::text::jsonb)`, `SELECT concat_ws(' ', state, attempts, claim, checkpoint) FROM steps WHERE step_id = $1`
	l.fails("PW001", checkpoint, a.step, a.item, "00000000-0000-0000-0000-000000000000", 7)
	l.fails("PW001", checkpoint, a.step, a.item+1, a.token, 7)
	require.Equal(t, "enqueued 0", one[string](l, state, a.step))
	for _, at := range []int{1, 2} {
		l.exec(checkpoint, a.step, a.item, a.token, at)
		require.Equal(t, fmt.Sprintf("in_progress 1 %s %d", a.token, at), one[string](l, state, a.step))
	}
	l.finish(a, true, `"done"`)
	l.turns()
	require.Equal(t, taskgraph.TaskComplete, l.stateOf(task))
	require.Equal(t, []string{"pending", "enqueued", "in_progress", "enqueued_for_orchestration", "complete"},
		all[string](l, `SELECT to_state FROM step_transitions WHERE step_id = $1 ORDER BY sort_key`, a.step))
	l.fails("PW001", checkpoint, a.step, a.item, a.token, 3)
}

// Two calls that add to one task may be of one instant, and the clock may go back. More than 4096 steps carry into the milliseconds.
func TestAddSteps_IDsThatItsInstantWouldHave_AreTaken_OthersAre(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.exec(`INSERT INTO steps (step_id, task_id, step_definition_id, position, name, retryable, max_attempts, created_at)
		SELECT numbered_uuid($1, clock_timestamp() + n * interval '1 ms', 2), task_id, step_definition_id, 1, 'n' || n, retryable, max_attempts, created_at
		  FROM steps, generate_series(0, 10000) AS n WHERE task_id = $1 AND name = 'a' ON CONFLICT DO NOTHING`, task)
	l.exec(`SELECT FROM add_steps($1, '{more}', '{a}')`, task)
}

// Whoever follows a task is told by its turns, also of what was done to it between them.
func TestTurn_TaskWasTakenFurtherMeanwhile_WhoFollowsItIsTold(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	told := func(task string) string {
		return one[string](l, `SELECT custom_status FROM instances WHERE instance_id = $1`, task)
	}
	task := l.submit(taskgraph.Define("shop", "told", "1").Step("a", "h", taskgraph.MaxAttempts(1)).Step("b", "h", taskgraph.After("a")))
	l.turns()
	require.JSONEq(t, `{"state": "steps_in_process", "completed": 0, "total": 2}`, told(task))
	l.finish(l.begin(task, "a"), false, `{"error": "x", "retryable": false}`)
	l.finalizes(task, taskgraph.FinalizeFailed, taskgraph.TaskBlockedByFailures)
	require.Equal(t, 1, l.turns())
	require.JSONEq(t, `{"state": "blocked_by_failures", "completed": 0, "total": 2}`, told(task))
	version := one[int](l, `SELECT custom_status_version FROM instances WHERE instance_id = $1`, task)
	l.exec(`SELECT enqueue_message($1, 'step', NULL, p_queue => 'taskgraph')`, task)
	require.Equal(t, 1, l.turns())
	require.Equal(t, version, one[int](l, `SELECT custom_status_version FROM instances WHERE instance_id = $1`, task), "there is nothing new")
}

// What a turn has enqueued is told, whatever the clock says of when that was.
func TestTurn_ServersClockGoesBack_StepsThatAreDueAreTold(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.submit(taskgraph.Define("shop", "back", "1").Step("a", "h").Step("b", "h"))
	l.exec(`CREATE FUNCTION earlier_by_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.created_at := NEW.created_at - interval '1 h'; RETURN NEW; END $$`)
	l.exec(`CREATE TRIGGER earlier_by_test BEFORE INSERT ON worker_queue FOR EACH ROW EXECUTE FUNCTION earlier_by_test()`)
	turn, err := l.p.FetchOrchestrationItem(l.within(), &pgwake.FetchOptions{Queues: []string{"taskgraph"}, WithoutHistory: true, NoWait: true})
	require.NoError(t, err)
	task, token, err := turn.LockToken.Turn()
	require.NoError(t, err)
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM evaluate_task($1, $2, NULL, p_quiet => true) WHERE queue = 'worker'`, task, token))
}
