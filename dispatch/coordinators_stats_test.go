package dispatch_test

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: does OpenTelemetry see what the Stats of Coordinators say, of all of them together?

func TestTelemetry_CoordinatorsOfOneProcess_AddUp(t *testing.T) {
	m := testmeter.New()
	coordinators := func(source dispatch.Source, g dispatch.Group, namespaces ...string) *dispatch.Coordinators {
		g.Namespaces = []string{"*"}
		return dispatch.NewCoordinators(source, &dispatch.CoordinatorsConfig{
			Namespaces: namespaces, Groups: []dispatch.Group{g}, MeterProvider: m, Logger: slog.New(slog.DiscardHandler),
		})
	}
	gate, atWork := make(chan struct{}), make(chan struct{}, 2)
	blocked := dispatch.Group{Config: dispatch.Config{Concurrency: 1}, Handlers: func(d *dispatch.Dispatcher) {
		d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			if item.Name == "slow" {
				atWork <- struct{}{}
				<-gate
			}
			return nil, nil
		})
	}}
	one, two := testschema.Core.New(t, nil), testschema.Core.New(t, nil)
	all := []*dispatch.Coordinators{
		coordinators(one, blocked, "a", "idle"),
		coordinators(two, blocked, "a"),
		coordinators(dispatch.StreamSource(&plain{err: pgwake.ErrPermission}, nil), blocked, "broken"),
	}
	for i, namespaces := range [][]string{{"a", "idle"}, {"a"}, {"broken"}} {
		running(t, all[i])
		for _, namespace := range namespaces {
			require.Eventually(t, func() bool { return all[i].Spawn(namespace) == nil }, patience, 10*time.Millisecond)
		}
	}
	defer close(gate)
	require.Eventually(t, func() bool { return all[2].Stats().Failing == 1 }, patience, 10*time.Millisecond)
	quick := slices.Repeat([]string{"quick"}, 500) // so many that the Dispatcher claims ahead, and more than it claims at once
	for began := time.Now(); ; {
		for _, p := range []*pgwake.Provider{one, two} {
			enqueueIn(t, p, "a", slices.Concat(quick, []string{"slow"}, quick)...)
		}
		await(t, atWork)
		await(t, atWork)
		seen := sameAsStats(t, m, all)
		require.Equal(t, 4., seen[testmeter.Key(dispatch.MetricCoordinators)])
		require.Equal(t, 4., seen[testmeter.Key(dispatch.MetricSpawned)])
		require.Equal(t, 2., seen[testmeter.Key(dispatch.MetricWorking)])
		require.Equal(t, 2., seen[testmeter.Key(dispatch.MetricWorkers)])
		require.Equal(t, 1., seen[testmeter.Key(dispatch.MetricFailing)])
		if seen[testmeter.Key(dispatch.MetricAhead)] > 0 {
			break
		}
		require.Less(t, time.Since(began), patience, "nothing is ahead: it was given back before anybody looked")
		gate <- struct{}{}
		gate <- struct{}{}
	}
}

// sameAsStats returns what is collected, at a moment at which the Stats of all Coordinators do not change: it is their sum, and nothing else.
func sameAsStats(t *testing.T, m *testmeter.Meters, all []*dispatch.Coordinators) map[string]float64 {
	t.Helper()
	sum := func() map[string]float64 {
		values := make(map[string]float64)
		for _, c := range all {
			s := c.Stats()
			for name, value := range map[string]int64{
				dispatch.MetricCoordinators: int64(s.Active), dispatch.MetricSpawned: s.Spawned, dispatch.MetricWorking: int64(s.Working),
				dispatch.MetricWorkers: int64(s.Places), dispatch.MetricAhead: int64(s.Ahead), dispatch.MetricFailing: int64(s.Failing),
			} {
				values[testmeter.Key(name)] += float64(value)
			}
		}
		return values
	}
	for {
		before := sum()
		seen, err := m.Collect(t.Context())
		require.NoError(t, err)
		if maps.Equal(before, sum()) {
			require.Equal(t, before, seen)
			return seen
		}
	}
}

// Each constant is what the documents call it.
func TestTelemetry_CoordinatorsMetrics_HaveTheirNames(t *testing.T) {
	for name, constant := range map[string]string{
		"":         dispatch.MetricCoordinators,
		".spawned": dispatch.MetricSpawned,
		".working": dispatch.MetricWorking,
		".workers": dispatch.MetricWorkers,
		".ahead":   dispatch.MetricAhead,
		".failing": dispatch.MetricFailing,
	} {
		require.Equal(t, "pgwake.dispatch.coordinators"+name, constant)
	}
}
