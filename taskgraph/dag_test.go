package taskgraph_test

import (
	"encoding/json"
	"testing"

	"github.com/pgwake/pgwake/taskgraph"
	"github.com/pgwake/pgwake/taskgraph/internal/model"
	"github.com/stretchr/testify/require"
)

func TestT4_ChainOf300_NothingIsCutOff(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, chain(300))[0]
	levels, err := s.DependencyLevels(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, levels, 300)
	for i, l := range levels {
		require.Equal(t, taskgraph.StepLevel{StepID: p.steps[i], Level: i}, l)
	}
	depth, err := s.StepDepth(t.Context(), p.steps[299])
	require.NoError(t, err)
	require.Equal(t, 299, depth)
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[299])
	require.NoError(t, err)
	require.Len(t, ancestors, 299)
	for i, a := range ancestors {
		require.Equal(t, i+1, a.Distance)
		require.Equal(t, p.steps[298-i], a.StepID)
	}
}

// ladder is a task of layers of two, each of which waits for both of the layer before: the number of ways through it
// doubles with each.
func ladder(layers int) model.Task {
	task := model.Task{Steps: steps(2*layers, "pending")}
	for i := 2; i < len(task.Steps); i++ {
		above := i - i%2 - 2
		task.Steps[i] = after(task.Steps[i], above, above+1)
	}
	return task
}

func TestT5_LadderOf20_TakesNoLongerThanItHasDependencies(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, ladder(20))[0]
	levels, err := s.DependencyLevels(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, levels, 40)
	for i, l := range levels {
		require.Equal(t, i/2, l.Level)
	}
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[39])
	require.NoError(t, err)
	require.Len(t, ancestors, 38)
	for i, a := range ancestors {
		require.Equal(t, i/2+1, a.Distance)
	}
}

func TestT7_TwoRootsAndAnIsolatedStep_AreAllAtLevel0(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, model.Task{Steps: []model.Step{oneStep("pending"), oneStep("pending"), oneStep("pending"), oneStep("pending", 0, 1)}})[0]
	levels, err := s.DependencyLevels(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, levels, 4)
	for _, l := range levels {
		want := 0
		if p.place(l.StepID) == 3 {
			want = 1
		}
		require.Equal(t, want, l.Level)
	}
	c, err := s.ExecutionContext(t.Context(), p.id)
	require.NoError(t, err)
	require.Equal(t, 4, c.Total)
	require.Equal(t, 3, c.Ready, "the isolated step counts like any other")
}

func TestT9_DependencyThatClosesALoop_IsDetected(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, chain(5))[0]
	other := s.insert(t, chain(2))[0]
	for _, c := range []struct {
		name     string
		from, to string
		want     bool
	}{
		{"self", p.steps[2], p.steps[2], true},
		{"of two", p.steps[1], p.steps[0], true},
		{"of five", p.steps[4], p.steps[0], true},
		{"forward", p.steps[0], p.steps[4], false},
		{"there already", p.steps[0], p.steps[1], false},
		{"another task", p.steps[4], other.steps[0], false},
	} {
		cycle, err := s.DetectCycle(t.Context(), c.from, c.to)
		require.NoError(t, err)
		require.Equal(t, c.want, cycle, c.name)
	}
}

func TestT9_UncommittedDependencies_AreSeenInTheirTransaction(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	p := s.insert(t, model.Task{Steps: steps(2, "pending")})[0]
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `INSERT INTO step_dependencies (task_id, from_step_id, to_step_id) VALUES ($1, $2, $3)`, p.id, p.steps[0], p.steps[1])
	require.NoError(t, err)
	inside, err := s.WithTx(tx).DetectCycle(t.Context(), p.steps[1], p.steps[0])
	require.NoError(t, err)
	outside, err := s.DetectCycle(t.Context(), p.steps[1], p.steps[0])
	require.NoError(t, err)
	require.True(t, inside)
	require.False(t, outside)
}

func TestDAG_CycleThatGotIn_EndsAndIsTold(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	// 0 -> 1, and 2 -> 3 -> 4 -> 2, of which 5 and 1 hang.
	p := s.insert(t, model.Task{Steps: []model.Step{oneStep("pending"), oneStep("pending", 0, 4), oneStep("pending", 4), oneStep("pending", 2), oneStep("pending", 3), oneStep("pending", 4)}})[0]
	levels, err := s.DependencyLevels(t.Context(), p.id)
	require.NoError(t, err)
	require.Len(t, levels, 6)
	for _, l := range levels {
		want := -1
		if p.place(l.StepID) == 0 {
			want = 0
		}
		require.Equal(t, want, l.Level)
	}
	require.Nil(t, value[*int](t, s, `SELECT dependency_level FROM calculate_dependency_levels($1) OFFSET 5`, p.id), "in SQL")
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[2])
	require.NoError(t, err)
	require.Len(t, ancestors, 2, "it is none of its own")
	cycle, err := s.DetectCycle(t.Context(), p.steps[0], p.steps[2])
	require.NoError(t, err)
	require.False(t, cycle, "to wait for 0 closes none")
}

func TestDependencyResults_AncestorsInEachState_AreThoseWithAResult(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	task := model.Task{}
	for _, state := range model.StepStates {
		step := oneStep(state)
		step.Result = map[string]int{"n": len(task.Steps)}
		task.Steps = append(task.Steps, step)
	}
	task.Steps = append(task.Steps, oneStep("complete")) // skipped: complete, and no result
	between := oneStep("complete")
	for i := range task.Steps {
		between.Parents = append(between.Parents, model.Parent{Step: i})
	}
	between.Result = map[string]int{"n": 99}
	task.Steps = append(task.Steps, between, oneStep("pending", len(task.Steps)))
	p := s.insert(t, task)[0]
	results, err := s.DependencyResults(t.Context(), p.steps[len(p.steps)-1])
	require.NoError(t, err)
	require.Equal(t, map[string]json.RawMessage{
		"s6": json.RawMessage(`{"n": 6}`), "s8": json.RawMessage(`{"n": 8}`), "s9": json.RawMessage(`{"n": 9}`), "s11": json.RawMessage(`{"n": 99}`),
	}, results)
	results, err = s.DependencyResults(t.Context(), p.steps[0])
	require.NoError(t, err)
	require.Empty(t, results)
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[len(p.steps)-1])
	require.NoError(t, err)
	require.Len(t, ancestors, 12)
	for _, a := range ancestors {
		step := task.Steps[p.place(a.StepID)]
		require.Equal(t, step.State == "complete" || step.State == "cancelled" || step.State == "resolved_manually", a.Processed)
		require.Equal(t, p.id, a.TaskID)
		require.Equal(t, step.Result == nil, a.Results == nil)
	}
}

func TestDAG_LongestAndShortestWay_AreLevelAndDistance(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	task := chain(4)
	task.Steps[3] = after(task.Steps[3], 0) // a shortcut
	p := s.insert(t, task)[0]
	depth, err := s.StepDepth(t.Context(), p.steps[3])
	require.NoError(t, err)
	require.Equal(t, 3, depth)
	ancestors, err := s.TransitiveDependencies(t.Context(), p.steps[3])
	require.NoError(t, err)
	distances := make(map[int]int)
	for _, a := range ancestors {
		distances[p.place(a.StepID)] = a.Distance
	}
	require.Equal(t, map[int]int{0: 1, 1: 2, 2: 1}, distances)
}
