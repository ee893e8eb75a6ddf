package main

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// values are samples of an hour, one a second.
func values(f func(second float64) float64) []float64 {
	all := make([]float64, 3600)
	for i := range all {
		all[i] = f(float64(i))
	}
	return all
}

func TestMeasure_Leak_IsGrowth(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	noise := func(size float64) float64 { return size * (rng.Float64() - .5) }
	const mb = 1 << 20
	for name, leak := range map[string]struct {
		gauge  string
		values []float64
	}{
		"a goroutine a minute":              {"process 0: goroutines", values(func(s float64) float64 { return 100 + noise(20) + math.Floor(s/60) })},
		"100 bytes for each of 60 items":    {"process 1: heap in use, MB", values(func(s float64) float64 { return 6*mb + noise(mb) + 100*60*s })},
		"a connection every other minute":   {"connections", values(func(s float64) float64 { return 40 + noise(5) + math.Floor(s/120) })},
		"a lane every other minute":         {"rows of waiters, but for short-lived lanes", values(func(s float64) float64 { return 40 + noise(5) + math.Floor(s/120) })},
		"an index that is never vacuumed":   {"worker_queue: indexes, MB", values(func(s float64) float64 { return mb + 1000*s })},
		"a step after the middle":           {"connections", values(func(s float64) float64 { return 40 + 20*math.Floor(s/1900) })},
		"one peak of dead tuples, too high": {"waiters: dead tuples", values(func(s float64) float64 { return 100 + mostDead*math.Floor(1-math.Abs(s-2000)/3600) })},
	} {
		t.Run(name, func(t *testing.T) {
			_, violation := gaugeNamed(t, leak.gauge).measure(leak.values)
			assert.Contains(t, violation, leak.gauge)
		})
	}
}

func TestMeasure_ComesAndGoes_IsNoGrowth(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const mb = 1 << 20
	for name, sound := range map[string]struct {
		gauge  string
		values []float64
	}{
		"noise":                      {"process 0: heap in use, MB", values(func(float64) float64 { return 6*mb + 6*mb*rng.Float64() })},
		"a saw":                      {"worker_queue: dead tuples", values(func(s float64) float64 { return math.Mod(s*170, 5000) })},
		"single peaks, near the end": {"connections", values(func(s float64) float64 { return 40 + 100*math.Floor(math.Mod(s, 10)/8)*math.Floor(s/2880) })},
		"all of it at the beginning": {"waiters: table, MB", values(func(s float64) float64 { return 4 * mb * min(s/600, 1) })},
		"ever more slowly":           {"orchestrator_queue: table, MB", values(func(s float64) float64 { return mb * math.Log(s+1) / 4 })},
		"shrinks":                    {"rows of waiters, but for short-lived lanes", values(func(s float64) float64 { return 40 - s/60 })},
	} {
		t.Run(name, func(t *testing.T) {
			_, violation := gaugeNamed(t, sound.gauge).measure(sound.values)
			assert.Empty(t, violation)
		})
	}
}

func TestMeasure_HardlyAnySamples_IsNoVerdict(t *testing.T) {
	_, violation := gauge{name: "g"}.measure(make([]float64, leastSamples-1))
	assert.Contains(t, violation, "only 19 samples")
	_, violation = gauge{name: "g"}.measure(make([]float64, leastSamples))
	assert.Empty(t, violation)
}

func TestGrowthTable_OneGrows_SaysWhich(t *testing.T) {
	var readings []reading
	for i := range 50 {
		readings = append(readings, reading{Values: map[string]float64{"steady": 7, "leaky": float64(i)}})
	}
	table, violations := growthTable([]gauge{{name: "steady"}, {name: "leaky", absolute: 5}}, readings)
	require.Len(t, violations, 1)
	assert.Equal(t, "leaky grew from 14 to 44; at most 20 is no growth", violations[0])
	lines := strings.Split(table, "\n")
	assert.Contains(t, lines[1], "ok")
	assert.Contains(t, lines[2], "GROWS")
}

func TestRecorder_Samples_AreLinesOfJSON(t *testing.T) {
	path := filepath.Join(t.TempDir(), "samples")
	r, err := newRecorder(path)
	require.NoError(t, err)
	sample := reading{At: time.Unix(1, 0).UTC(), Pace: paceIdle, Values: map[string]float64{"connections": 3}}
	require.NoError(t, r.add(sample))
	require.NoError(t, r.add(sample))
	require.NoError(t, r.file.Close())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	require.Len(t, lines, 2)
	var read reading
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &read))
	assert.Equal(t, sample, read)
}

func gaugeNamed(t *testing.T, name string) gauge {
	for _, g := range soakGauges() {
		if g.name == name {
			return g
		}
	}
	t.Fatal(name)
	return gauge{}
}
