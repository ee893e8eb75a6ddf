package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testsize"
)

// briefSoak is a soak of a few seconds.
func briefSoak(t *testing.T, length time.Duration, plant ...string) (v *soakVerdict, temp string) {
	t.Helper()
	temp = tempDir(t)
	var log strings.Builder
	s := newSoak(options{soak: true, seed: 15, length: length, plant: plant, samples: filepath.Join(t.TempDir(), "samples"),
		slack: time.Minute}, &log) // nothing here is about the speed of the machine
	s.warmUp = max(2*time.Second, length/4)
	v, err := s.run(t.Context(), func(string) {})
	if errors.Is(err, devpg.ErrNoServer) {
		t.Skip("there are no PostgreSQL server binaries on this machine")
	}
	require.NoError(t, err, log.String())
	t.Log(log.String())
	t.Log(v)
	return v, temp
}

func TestSoak_Sound_HasNoViolations(t *testing.T) {
	if !testsize.Full() {
		t.Skip("make soak does the same")
	}
	v, temp := briefSoak(t, 6*time.Second)
	assert.Empty(t, v.violations)
	a := v.accounts
	for what, n := range map[string]int{"items": a.items, "given back": a.returns, "renewed": a.renewals, "rolled back": a.rolledBack, "waits": len(a.waits)} {
		assert.Positive(t, n, what)
	}
	assert.Greater(t, v.vitals.Opened, int64(2*soakNodes), "one comes and goes")
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestSoak_Planted_IsFound(t *testing.T) {
	wanted := []string{
		"process 0: heap in use, MB grew", "process 0: goroutines grew", "connections grew", "rows of waiters, but for short-lived lanes grew",
		"is lost: sent at", "exists a second time", "deadlock detected",
	}
	var v *soakVerdict
	var temp, all string
	for _, length := range []time.Duration{8 * time.Second, 40 * time.Second} {
		v, temp = briefSoak(t, length, "memory", "goroutine", "connection", "waiter", "lost", "twice", "deadlock")
		all = strings.Join(v.violations, "\n")
		if !strings.Contains(all, "process 1: ") && !slices.ContainsFunc(wanted, func(want string) bool { return !strings.Contains(all, want) }) {
			break // or this machine does not get far enough in that time
		}
	}
	for _, want := range wanted {
		assert.Contains(t, all, want)
	}
	assert.NotContains(t, all, "process 1: ")
	assert.True(t, v.failed())
	ledgers, err := filepath.Glob(filepath.Join(temp, "pgwake-soak-*", "*.ledger"))
	require.NoError(t, err)
	assert.Len(t, ledgers, soakNodes, "a failed run keeps them")
}

func TestVitals_Wrong_SaysWhich(t *testing.T) {
	sound := vitals{Items: 1, Looks: 1, Fallbacks: 1, Reconnects: 1, Opened: 1}
	assert.Empty(t, sound.wrong(false))
	var all vitals
	all.sum(vitals{FallbackFinds: 1})
	all.sum(vitals{FallbackFinds: 1, ScoutFinds: 4, Panics: 3})
	assert.Equal(t, []string{"2 unannounced finds of fallbacks", "4 unannounced finds of scouts", "3 panics of the engine"}, all.wrong(false))
	assert.Equal(t, []string{"3 panics of the engine"}, all.wrong(true))
}

func TestPlantsOf_Unknown_IsAnError(t *testing.T) {
	names, err := plantsOf("memory,lost", true)
	require.NoError(t, err)
	assert.Equal(t, []string{"memory", "lost"}, names)
	none, err := plantsOf("", true)
	require.NoError(t, err)
	assert.Empty(t, none)
	for name, soak := range map[string]bool{"gremlin": true, "goroutine": false, plantAsync: true} {
		_, err = plantsOf(name, soak)
		assert.ErrorContains(t, err, name)
	}
}

func TestNotPlanted_ErrorBeforeTheEnd_IsAViolation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger")
	ledger, err := openLedger(path)
	require.NoError(t, err)
	defer ledger.file.Close()
	w := &workload{ledger: ledger}
	w.alive, w.die = context.WithCancel(t.Context())
	w.notPlanted(nil)
	w.notPlanted(errors.New("no room"))
	w.die()
	w.notPlanted(context.Canceled)
	said, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, 1, strings.Count(string(said), "\n"), string(said))
	assert.Contains(t, string(said), wrong)
	assert.Contains(t, string(said), "no room")
}
