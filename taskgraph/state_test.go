package taskgraph_test

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: are the states and what may follow them the same in Go and in SQL?

func TestT28_EveryPairOfTaskStates_OnlyTheEdgesAreTaken(t *testing.T) {
	l := newLab(t)
	l.define("default", "work", "1", `{}`)
	states := taskgraph.TaskStates()
	require.Len(t, states, 12)
	edges := 0
	for _, from := range states {
		for _, to := range states {
			task := l.create("default", "work")
			l.bring(task, from)
			before := one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1`, task)
			require.Equal(t, from.CanBecome(to), one[bool](l, `SELECT is_task_edge($1, $2)`, from, to), "%s to %s", from, to)
			if from.CanBecome(to) {
				edges++
				require.True(t, one[bool](l, `SELECT transition_task_state_atomic($1, $2, $3)`, task, from, to), "%s to %s", from, to)
				require.Equal(t, to, one[taskgraph.TaskState](l, `SELECT get_current_task_state($1)`, task))
				require.Equal(t, before+1, one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1`, task))
				continue
			}
			l.fails("PW003", `SELECT transition_task_state_atomic($1, $2, $3)`, task, from, to)
			require.Equal(t, from, one[taskgraph.TaskState](l, `SELECT get_current_task_state($1)`, task))
			require.Equal(t, before, one[int](l, `SELECT count(*) FROM task_transitions WHERE task_id = $1`, task))
		}
	}
	require.Equal(t, 35, edges)
}

func TestT28_EveryPairOfStepStates_OnlyTheEdgesAreTaken(t *testing.T) {
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	states := taskgraph.StepStates()
	require.Len(t, states, 10)
	edges := 0
	for _, from := range states {
		for _, to := range states {
			step := l.step(l.create("default", "work"), "a")
			if path := stepPath(from); len(path) > 1 {
				require.Equal(t, []string{step}, all[string](l, `SELECT transition_steps(ARRAY[$1::uuid], $2, NULL, '{}')::text`, step, path))
			}
			before := one[int](l, `SELECT count(*) FROM step_transitions WHERE step_id = $1`, step)
			require.Equal(t, from.CanBecome(to), one[bool](l, `SELECT is_step_edge($1, $2)`, from, to), "%s to %s", from, to)
			state := func() taskgraph.StepState {
				return one[taskgraph.StepState](l, `SELECT state FROM steps WHERE step_id = $1`, step)
			}
			if from.CanBecome(to) {
				edges++
				require.True(t, one[bool](l, `SELECT transition_step_state_atomic($1, $2, $3)`, step, from, to), "%s to %s", from, to)
				require.Equal(t, to, state())
				require.Equal(t, before+1, one[int](l, `SELECT count(*) FROM step_transitions WHERE step_id = $1`, step))
				continue
			}
			l.fails("PW003", `SELECT transition_step_state_atomic($1, $2, $3)`, step, from, to)
			require.Equal(t, from, state())
			require.Equal(t, before, one[int](l, `SELECT count(*) FROM step_transitions WHERE step_id = $1`, step))
		}
	}
	require.Equal(t, 36, edges)
}

func TestTransition_StateThatIsNone_IsRefused(t *testing.T) {
	l := newLab(t)
	l.define("default", "work", "1", `{}`, "a")
	task := l.create("default", "work")
	for _, pair := range [][2]any{{"pending", "done"}, {"none", "complete"}, {"pending", nil}, {nil, "initializing"}} {
		l.fails("PW003", `SELECT transition_task_state_atomic($1, $2, $3)`, task, pair[0], pair[1])
		l.fails("PW003", `SELECT transition_step_state_atomic($1, $2, $3)`, l.step(task, "a"), pair[0], pair[1])
	}
}

func TestParseState_EveryName_IsItself(t *testing.T) {
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
