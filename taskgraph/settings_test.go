package taskgraph_test

import (
	"math"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: what do settings change, and for whom?

func TestSettings_WhatIsNotGiven_StaysAsItIs(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s, err := l.Settings(l.within())
	require.NoError(t, err)
	require.Equal(t, taskgraph.Settings{AgeWeight: 0.1, NamespacePriority: map[string]float64{}}, s)
	set := func(c taskgraph.SettingsChange) taskgraph.Settings {
		t.Helper()
		require.NoError(t, l.SetSettings(l.within(), c))
		s, err := l.Settings(l.within())
		require.NoError(t, err)
		return s
	}
	want := s
	want.OutsideChannels = true
	require.Equal(t, want, set(taskgraph.SettingsChange{OutsideChannels: new(true)}))
	want.AgeWeight, want.RetryWeight, want.DeadlineWeight = 0, 2, 0.5
	require.Equal(t, want, set(taskgraph.SettingsChange{AgeWeight: new(0.0), RetryWeight: new(2.0), DeadlineWeight: new(0.5)}))
	want.NamespacePriority = map[string]float64{"billing": 2, "bulk": -3.5}
	require.Equal(t, want, set(taskgraph.SettingsChange{NamespacePriority: want.NamespacePriority}))
	require.Equal(t, want, set(taskgraph.SettingsChange{}))
	want.NamespacePriority = map[string]float64{}
	require.Equal(t, want, set(taskgraph.SettingsChange{NamespacePriority: want.NamespacePriority}))
	want.OutsideChannels = false
	require.Equal(t, want, set(taskgraph.SettingsChange{OutsideChannels: new(false)}))
}

func TestSettings_OutOfRange_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, c := range []taskgraph.SettingsChange{
		{AgeWeight: new(-0.1)}, {AgeWeight: new(1e7)}, {RetryWeight: new(math.NaN())}, {DeadlineWeight: new(math.Inf(1))},
		{NamespacePriority: map[string]float64{"A": 1}}, {NamespacePriority: map[string]float64{"a": 1e7}}, {NamespacePriority: map[string]float64{"a": math.NaN()}},
	} {
		require.ErrorIs(t, l.SetSettings(l.within(), c), pgwake.ErrInvalid)
	}
	for _, call := range []string{
		`p_age_weight => -1`, `p_age_weight => 'NaN'`, `p_retry_weight => 'infinity'`, `p_deadline_weight => 1000001`, `p_namespace_priority => '[]'`, `p_namespace_priority => 'null'`,
		`p_namespace_priority => '{"A": 1}'`, `p_namespace_priority => '{"a": "1"}'`, `p_namespace_priority => '{"a": null}'`, `p_namespace_priority => '{"a": 1e7}'`,
	} {
		l.fails("PW003", `SELECT set_taskgraph_settings(`+call+`)`)
	}
	s, err := l.Settings(l.within())
	require.NoError(t, err)
	require.Equal(t, taskgraph.Settings{AgeWeight: 0.1, NamespacePriority: map[string]float64{}}, s)
}

// The order of tasks that are there already follows the weights.
func TestSettings_WeightChanges_OpenTasksAreOrderedAnew(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.define("billing", "work", "1", `{}`)
	l.define("bulk", "work", "1", `{}`)
	old, young := l.create("bulk", "work"), l.create("billing", "work")
	l.older(old, 3*time.Hour)
	ended := l.create("bulk", "work")
	l.bring(ended, taskgraph.TaskComplete)
	order := func() []string {
		return all[string](l, `SELECT task_id::text FROM tasks WHERE task_id = ANY ($1::uuid[]) ORDER BY priority_key DESC`, []string{old, young})
	}
	asItShouldBe := func() {
		t.Helper()
		require.Empty(t, all[string](l, `SELECT task_id::text FROM tasks
			WHERE NOT is_terminal(state) AND abs(priority_key - task_priority_key(namespace, priority, retries, created_at)) > 1e-6`))
	}
	before := one[float64](l, `SELECT priority_key FROM tasks WHERE task_id = $1`, ended)
	require.NoError(t, l.SetSettings(l.within(), taskgraph.SettingsChange{AgeWeight: new(1.0)}))
	require.Equal(t, []string{old, young}, order())
	asItShouldBe()
	require.NoError(t, l.SetSettings(l.within(), taskgraph.SettingsChange{NamespacePriority: map[string]float64{"billing": 5}}))
	require.Equal(t, []string{young, old}, order())
	asItShouldBe()
	l.exec(`UPDATE tasks SET retries = 4 WHERE task_id = $1`, old)
	require.NoError(t, l.SetSettings(l.within(), taskgraph.SettingsChange{RetryWeight: new(1.0)}))
	require.Equal(t, []string{old, young}, order())
	asItShouldBe()
	require.Equal(t, before, one[float64](l, `SELECT priority_key FROM tasks WHERE task_id = $1`, ended), "one that has ended is left alone")
}
