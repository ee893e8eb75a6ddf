package taskgraph_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are the states and what may follow them the same in Go and in SQL?

func TestT28_EveryPairOfTaskStates_OnlyTheEdgesAreTaken(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	states := taskgraph.TaskStates()
	require.Len(t, states, 12)
	edges := 0
	for _, from := range states {
		for _, to := range states {
			require.Equal(t, from.CanBecome(to), one[bool](l, `SELECT is_task_edge($1, $2)`, from, to), "%s to %s", from, to)
			if from.CanBecome(to) {
				edges++
			}
			for by, transition := range map[string]func(task string) (bool, error){
				"SQL": func(task string) (done bool, err error) {
					err = l.conn.QueryRow(t.Context(), `SELECT transition_task_state_atomic($1, $2, $3)`, task, from, to).Scan(&done)
					return done, pgwake.WrapError("transition", err)
				},
				"Go": func(task string) (bool, error) { return l.TransitionTask(t.Context(), task, from, to, "") },
			} {
				task := l.create("default", "work")
				l.bring(task, from)
				before := one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1`, task)
				done, err := transition(task)
				state, found := l.CurrentTaskState(t.Context(), task)
				require.NoError(t, found)
				if from.CanBecome(to) {
					require.NoError(t, err)
					require.True(t, done, "%s to %s by %s", from, to, by)
					require.Equal(t, to, state)
					before++
				} else {
					require.ErrorIs(t, err, pgwake.ErrInvalid, "%s to %s by %s", from, to, by)
					require.Equal(t, from, state)
				}
				require.Equal(t, before, one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1`, task))
			}
		}
	}
	require.Equal(t, 35, edges)
}

func TestT28_EveryPairOfStepStates_OnlyTheEdgesAreTaken(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	states := taskgraph.StepStates()
	require.Len(t, states, 10)
	edges := 0
	for _, from := range states {
		for _, to := range states {
			require.Equal(t, from.CanBecome(to), one[bool](l, `SELECT is_step_edge($1, $2)`, from, to), "%s to %s", from, to)
			if from.CanBecome(to) {
				edges++
			}
			for by, transition := range map[string]func(step string) (bool, error){
				"SQL": func(step string) (done bool, err error) {
					err = l.conn.QueryRow(t.Context(), `SELECT transition_step_state_atomic($1, $2, $3)`, step, from, to).Scan(&done)
					return done, pgwake.WrapError("transition", err)
				},
				"Go": func(step string) (bool, error) { return l.TransitionStep(t.Context(), step, from, to, "") },
			} {
				step := l.step(l.create("default", "work"), "a")
				if path := stepPath(from); len(path) > 1 {
					require.Equal(t, []string{step}, all[string](l, `SELECT transition_steps(ARRAY[$1::uuid], $2, NULL, '{}')::text`, step, path))
				}
				before := one[int](l, `SELECT count(*) FROM step_transitions WHERE step_id = $1`, step)
				done, err := transition(step)
				state := one[taskgraph.StepState](l, `SELECT state FROM steps WHERE step_id = $1`, step)
				if from.CanBecome(to) && to != taskgraph.StepEnqueued { // for which there has to be a work item: turns alone do that
					require.NoError(t, err)
					require.True(t, done, "%s to %s by %s", from, to, by)
					require.Equal(t, to, state)
					before++
				} else {
					require.ErrorIs(t, err, pgwake.ErrInvalid, "%s to %s by %s", from, to, by)
					require.Equal(t, from, state)
				}
				require.Equal(t, before, one[int](l, `SELECT count(*) FROM step_transitions WHERE step_id = $1`, step))
			}
		}
	}
	require.Equal(t, 36, edges)
}

// Each state has one row on the page, which names those that may follow, but for what may follow every state that is not final.
func TestTransitionStep_FromAStateThatItIsNotIn_ChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	step := l.step(l.create("default", "work"), "a")
	for _, from := range taskgraph.StepStates()[1:] { // it is in the first
		for _, to := range from.Next() {
			done, err := l.TransitionStep(t.Context(), step, from, to, "")
			require.NoError(t, err)
			require.False(t, done, "%s to %s", from, to)
		}
	}
	require.Equal(t, "pending", one[string](l, `SELECT state FROM steps`))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM step_transitions`))
}

func TestStates_Page_HasTheEdgesThatThereAre(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/taskgraph.md")
	require.NoError(t, err)
	requirePage(t, string(page), "task", taskgraph.TaskStates(), taskgraph.TaskState.Next, taskgraph.TaskCancelled, taskgraph.TaskResolvedManually)
	requirePage(t, string(page), "step", taskgraph.StepStates(), taskgraph.StepState.Next, taskgraph.StepComplete, taskgraph.StepCancelled, taskgraph.StepResolvedManually)
}

func requirePage[S ~string](t *testing.T, page, of string, states []S, next func(S) []S, always ...S) {
	t.Helper()
	_, table, found := strings.Cut(page, "| State of a "+of+" |")
	require.True(t, found, of)
	table, _, _ = strings.Cut(table, "\n\n")
	var listed []S
	for _, line := range strings.Split(table, "\n")[2:] {
		columns := strings.Split(line, "|")
		require.Len(t, columns, 6, line)
		state := S(strings.Trim(columns[1], " `"))
		listed = append(listed, state)
		require.Equal(t, len(next(state)) == 0, strings.HasPrefix(columns[2], " final"), "%s: final", state)
		may := slices.Clone(always)
		for _, name := range regexp.MustCompile("`[a-z_]+`").FindAllString(columns[4], -1) {
			if to := S(strings.Trim(name, "`")); slices.Contains(states, to) {
				may = append(may, to)
			}
		}
		if len(next(state)) == 0 {
			require.Empty(t, strings.TrimSpace(columns[4]), state)
			continue
		}
		require.ElementsMatch(t, next(state), sortedSet(may), "what may follow %s of a %s", state, of)
	}
	require.ElementsMatch(t, states, listed)
}

func sortedSet[S ~string](all []S) []S {
	slices.Sort(all)
	return slices.Compact(all)
}

func TestTransition_StateThatIsNone_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	for _, pair := range [][2]any{{"pending", "done"}, {"none", "complete"}, {"pending", nil}, {nil, "initializing"}} {
		l.fails("PW003", `SELECT transition_task_state_atomic($1, $2, $3)`, task, pair[0], pair[1])
		l.fails("PW003", `SELECT transition_step_state_atomic($1, $2, $3)`, l.step(task, "a"), pair[0], pair[1])
	}
}

func TestParseState_EveryName_IsItself(t *testing.T) {
	t.Parallel()
	for _, s := range taskgraph.TaskStates() {
		parsed, err := taskgraph.ParseTaskState(string(s))
		require.NoError(t, err)
		require.Equal(t, s, parsed)
		require.True(t, s.IsValid())
	}
	for _, s := range taskgraph.StepStates() {
		parsed, err := taskgraph.ParseStepState(string(s))
		require.NoError(t, err)
		require.Equal(t, s, parsed)
		require.True(t, s.IsValid())
	}
	other, err := taskgraph.ParseTaskState("in_progress")
	require.NoError(t, err)
	require.Equal(t, taskgraph.TaskStepsInProcess, other)
	for _, name := range []string{"", "done", "Pending", "enqueued"} {
		_, err := taskgraph.ParseTaskState(name)
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
	}
	for _, name := range []string{"", "done", "steps_in_process"} {
		_, err := taskgraph.ParseStepState(name)
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
	}
}

func TestState_Kinds_AreAsTheTablesHaveThem(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	kinds := make(map[string]int)
	for _, s := range taskgraph.TaskStates() {
		require.Equal(t, one[bool](l, `SELECT is_terminal($1)`, s), s.IsTerminal(), s)
		require.Equal(t, len(s.Next()) == 0, s.IsTerminal(), s)
		for kind, is := range map[string]bool{"active": s.IsActive(), "waiting": s.IsWaiting(), "terminal": s.IsTerminal(), "pick-up": s.CanBePickedUp()} {
			if is {
				kinds[kind]++
			}
		}
	}
	require.Equal(t, map[string]int{"active": 4, "waiting": 3, "terminal": 4, "pick-up": 3}, kinds)
	task := l.create("default", "work")
	for _, s := range taskgraph.StepStates() {
		l.exec(`UPDATE steps SET state = $2 WHERE task_id = $1`, task, s)
		require.Equal(t, one[bool](l, `SELECT in_process FROM steps WHERE task_id = $1`, task), s.IsInProcess(), s)
		require.Equal(t, one[bool](l, `SELECT processed FROM steps WHERE task_id = $1`, task), s.IsTerminal(), s)
		require.Equal(t, s == taskgraph.StepComplete || s == taskgraph.StepResolvedManually, s.SatisfiesDependencies(), s)
	}
	require.False(t, taskgraph.TaskState("none").IsTerminal())
	require.False(t, taskgraph.StepState("none").IsTerminal())
}

// Nobody makes a step enqueued that has no work item, nor changes one whose task has ended.
func TestTransitionStep_TaskHasEnded_IsRefused(t *testing.T) {
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	for _, end := range taskgraph.TaskStates() {
		if !end.IsTerminal() {
			continue
		}
		task := l.create("default", "work")
		l.bring(task, end)
		for _, to := range []taskgraph.StepState{taskgraph.StepError, taskgraph.StepComplete, taskgraph.StepWaitingForRetry} {
			didNot(t)(l.TransitionStep(l.within(), l.step(task, "a"), taskgraph.StepPending, to, ""))
		}
		require.Equal(t, []string{"pending"}, l.stepStates(task))
		require.Equal(t, 1, one[int](l, `SELECT count(*) FROM step_transitions WHERE task_id = $1`, task))
	}
	didNot(t)(l.TransitionStep(l.within(), noID, taskgraph.StepPending, taskgraph.StepError, ""))
}

func TestTransitionTask_ToAnEnd_ItsStepsAndTheirTasksEndWithIt(t *testing.T) {
	for _, end := range []taskgraph.TaskState{taskgraph.TaskCancelled, taskgraph.TaskResolvedManually, taskgraph.TaskComplete} {
		t.Run(string(end), func(t *testing.T) {
			l := newLab(t)
			task := l.submit(taskgraph.Define("shop", "inner", "1").Step("x", "h"),
				taskgraph.Define("shop", "outer", "1").Step("a", "h").SubTask("b", "inner", "1").Step("c", "h").Step("d", "h", taskgraph.After("c")))
			l.turns()
			l.ran(task, "c", `1`)
			l.turns()
			from := l.stateOf(task)
			if end == taskgraph.TaskComplete { // whatever somebody is thinking of
				did(t)(l.TransitionTask(l.within(), task, from, taskgraph.TaskEvaluatingResults, ""))
				from = taskgraph.TaskEvaluatingResults
			}
			did(t)(l.TransitionTask(l.within(), task, from, end, ""))
			require.Equal(t, []string{"cancelled", "cancelled", "complete", "cancelled"}, l.stepStates(task))
			l.turns()
			require.Equal(t, []string{"cancelled"}, all[string](l, `SELECT state FROM tasks WHERE parent_task_id = $1`, task))
			require.Zero(t, one[int](l, `SELECT count(*) FROM worker_queue`))
		})
	}
}

func TestTransitionStep_SubTaskLeavesInProgress_TheTaskIsCancelled(t *testing.T) {
	l := newLab(t)
	require.NoError(t, l.Register(l.within(), taskgraph.Define("shop", "inner", "1").Step("x", "h")))
	for _, to := range taskgraph.StepInProgress.Next() {
		task := l.submit(taskgraph.Define("shop", "outer", "1").SubTask("a", "inner", "1").Step("b", "h"))
		l.turns()
		did(t)(l.TransitionStep(l.within(), l.step(task, "a"), taskgraph.StepInProgress, to, ""))
		l.turns()
		require.Equal(t, "cancelled", all[string](l, `SELECT state FROM tasks WHERE parent_task_id = $1 ORDER BY created_at`, task)[0], to)
	}
}

// Whoever goes by what he has read does nothing once it is out of date, although the task is in the same state again.
func TestTransitionTaskAfter_ThereWasAnotherSince_IsRefused(t *testing.T) {
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	l.bring(task, taskgraph.TaskStepsInProcess)
	transitions, err := l.TaskTransitions(l.within(), task)
	require.NoError(t, err)
	seen := transitions[len(transitions)-1]
	l.hop(task, taskgraph.TaskStepsInProcess, taskgraph.TaskEvaluatingResults)
	l.hop(task, taskgraph.TaskEvaluatingResults, taskgraph.TaskStepsInProcess)
	didNot(t)(l.TransitionTaskAfter(l.within(), &seen, taskgraph.TaskEvaluatingResults, ""))
	transitions, err = l.TaskTransitions(l.within(), task)
	require.NoError(t, err)
	require.Len(t, transitions, 6)
	did(t)(l.TransitionTaskAfter(l.within(), &transitions[5], taskgraph.TaskEvaluatingResults, ""))
	didNot(t)(l.TransitionTaskAfter(l.within(), &transitions[5], taskgraph.TaskEvaluatingResults, ""))
	_, err = l.TransitionTaskAfter(l.within(), &taskgraph.Transition{TaskID: task, SortKey: 7, ToState: "evaluating_results"}, taskgraph.TaskPending, "")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	step, err := l.StepTransitions(l.within(), l.step(task, "a"))
	require.NoError(t, err)
	_, err = l.TransitionTaskAfter(l.within(), &step[0], taskgraph.TaskCancelled, "")
	require.ErrorIs(t, err, pgwake.ErrInvalid)

	// Also if the other one commits at the same moment.
	transitions, err = l.TaskTransitions(l.within(), task)
	require.NoError(t, err)
	other, err := session(t, l.p).Begin(t.Context())
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), `SELECT transition_task($1, ARRAY['evaluating_results', 'steps_in_process', 'evaluating_results'], NULL, '{}', true)`, task)
	require.NoError(t, err)
	end := l.meanwhile(`SELECT 1 / (NOT transition_task_state_atomic($1, 'evaluating_results', 'complete', p_expected_sort_key => $2))::integer`, task, transitions[6].SortKey)
	require.NoError(t, other.Commit(t.Context()))
	require.NoError(t, end())
	require.Equal(t, taskgraph.TaskEvaluatingResults, l.stateOf(task))
}

func TestTransitions_StateThatIsNone_CannotBeWritten(t *testing.T) {
	l := newLab(t)
	for _, table := range []string{"task_transitions (task_id", "step_transitions (task_id, step_id"} {
		id := `gen_random_uuid()`
		if table[0] == 's' {
			id += `, gen_random_uuid()`
		}
		l.exec(`INSERT INTO ` + table + `, sort_key, from_state, to_state) VALUES (` + id + `, 1, NULL, 'pending')`)
		l.fails("23514", `INSERT INTO `+table+`, sort_key, from_state, to_state) VALUES (`+id+`, 2, 'nowhere', 'complete')`)
		l.fails("23514", `INSERT INTO `+table+`, sort_key, from_state, to_state) VALUES (`+id+`, 2, 'pending', 'nowhere')`)
	}
}
