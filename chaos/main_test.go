package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testsize"
)

func TestMain(m *testing.M) {
	childMain() // this binary is the processes as well
	// toxiproxy forgets the goroutines of a connection that breaks while they pass on a chunk. The processes, in
	// which pgwake runs, look for leaks themselves.
	const library = "github.com/Shopify/toxiproxy/v2"
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction(library+".(*ToxicLink).read"),
		goleak.IgnoreAnyFunction(library+".(*ToxicLink).write"), goleak.IgnoreAnyFunction(library+"/toxics.(*ToxicStub).Run"))
}

// tempDir is where a run of this test leaves what it leaves.
func tempDir(t *testing.T) string {
	t.Helper()
	temp := t.TempDir()
	require.NoError(t, os.Chmod(temp, 0o777)) // the server may run as another user, for whom its programs are there
	require.NoError(t, os.Chmod(filepath.Dir(temp), 0o755))
	t.Setenv("TMPDIR", temp)
	return temp
}

// A short run, with the race detector in all processes if the test has it. What is late may be so for other tests at the same time.
func TestRun_FewFaults_KeepsThePromises(t *testing.T) {
	temp := tempDir(t)
	var v *verdict
	for _, length := range []time.Duration{11 * time.Second, time.Minute} {
		var log strings.Builder
		var err error
		v, err = run(t.Context(), options{seed: 15, length: length, nodes: 3, rest: restHere(), slack: time.Minute}, &log)
		if errors.Is(err, devpg.ErrNoServer) {
			t.Skip("there are no PostgreSQL server binaries on this machine")
		}
		require.NoError(t, err, log.String())
		t.Log(v)
		assert.Empty(t, v.violations, log.String())
		if v.items > 100 && v.effects > 10 && v.stretches > 10 && v.sessions > 0 && v.running == limits.MaxRunning && v.graphs.tasks > 10 && v.bus.events > 20 {
			break // or this machine does not get far enough in that time
		}
	}
	assert.Greater(t, v.items, 100)
	assert.Greater(t, v.effects, 10)
	assert.NotEmpty(t, v.probes)
	assert.Greater(t, v.stretches, 10)
	assert.Positive(t, v.sessions)
	assert.Equal(t, limits.MaxRunning, v.running, "the limit is reached")
	assert.Greater(t, v.graphs.tasks, 10)
	assert.NotEmpty(t, v.graphs.probes)
	assert.Greater(t, v.bus.events, 20)
	assert.NotEmpty(t, v.bus.probes)
	assert.NotEmpty(t, v.faults)
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	assert.Empty(t, left)
}

// A standby that lags behind loses what was acknowledged, and a process that stays cut off does not recover in time.
func TestRun_Planted_IsFound(t *testing.T) {
	if !testsize.Full() {
		t.Skip("in make test-full: each takes most of a minute")
	}
	for name, c := range map[string]struct {
		plant, only, found string
	}{
		"a standby that lags":       {plantAsync, "failover", "is lost"},
		"a process that is cut off": {plantLate, "reset", "work flowed again only"},
	} {
		t.Run(name, func(t *testing.T) {
			temp := tempDir(t)
			var log strings.Builder
			v, err := run(t.Context(), options{seed: 1, length: 40 * time.Second, nodes: 2, rest: restHere(), only: []string{c.only}, plant: []string{c.plant}}, &log)
			if errors.Is(err, devpg.ErrNoServer) {
				t.Skip("there are no PostgreSQL server binaries on this machine")
			}
			require.NoError(t, err, log.String())
			if v.faults[c.only] == 0 {
				t.Skipf("%s needs what this machine does not have:\n%s", c.only, log.String())
			}
			assert.True(t, slices.ContainsFunc(v.violations, func(v string) bool { return strings.Contains(v, c.found) }), "%q", v.violations)
			left, err := filepath.Glob(filepath.Join(temp, "pgwake-chaos-*", "*.ledger"))
			require.NoError(t, err)
			assert.NotEmpty(t, left, "a run that fails keeps its ledgers")
		})
	}
}

func TestSchedule_SameSeed_SameFaults(t *testing.T) {
	make := func(seed uint64) (faults []string) {
		for i, s := range (options{seed: seed, length: 3 * time.Minute, nodes: 4}).plan() {
			for _, f := range s.faults {
				assert.LessOrEqual(t, f.At+f.For, s.length)
				faults = append(faults, fmt.Sprint(i, " ", f.At, " ", f))
			}
			assert.Equal(t, i%3 == 2, s.alone)
		}
		return faults
	}
	assert.Equal(t, make(7), make(7))
	assert.NotEqual(t, make(7), make(8))
	assert.Greater(t, len(make(7)), 10)
}

func TestSchedule_ManySeeds_EveryKindHappens(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(100) {
		for _, s := range (options{seed: seed, length: 3 * time.Minute, nodes: 4}).plan() {
			for _, f := range s.faults {
				seen[f.Kind.name] = true
				if s.alone {
					seen[f.Kind.name+" alone"] = true
				}
			}
		}
	}
	for _, k := range kinds {
		assert.True(t, seen[k.name], k.name)
		assert.True(t, seen[k.name+" alone"], k.name)
	}
}

func TestPlan_OneKindAskedFor_IsAloneInEachRound(t *testing.T) {
	stages := options{seed: 7, length: time.Minute, nodes: 4, only: []string{"reset", "refuse"}}.plan()
	require.Greater(t, len(stages), 2)
	for i, s := range stages {
		require.Len(t, s.faults, 1)
		assert.Equal(t, []string{"reset", "refuse"}[i%2], s.faults[0].Kind.name)
		assert.True(t, s.alone)
	}
	_, err := kindsOf("reset,flood")
	assert.ErrorContains(t, err, `"flood"`)
}

func TestLedger_ProcessKilledInTheMiddleOfALine_LosesThatLineOnly(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "node-1-0.ledger")
	l, err := openLedger(path)
	require.NoError(t, err)
	l.write(sending, entry{Key: "a"}, entry{Key: "b", Delay: time.Second})
	_, err = l.file.WriteString(`{"what":"se`)
	require.NoError(t, err)
	require.NoError(t, l.file.Close())

	lines, err := readLedgers(dir)
	require.NoError(t, err)
	require.Len(t, lines, 2)
	assert.Equal(t, "b", lines[1].Key)
	assert.Equal(t, sending, lines[1].What)
	assert.Equal(t, time.Second, lines[1].Delay)
	assert.Equal(t, "node-1-0", lines[1].process)
	assert.WithinDuration(t, time.Now(), lines[1].At, time.Minute)
}

func TestProcess_ParentGone_Ends(t *testing.T) {
	o := `{"Ledger":"` + filepath.Join(t.TempDir(), "l") + `","PoolURL":"host=127.0.0.1 port=1","ListenURL":"host=127.0.0.1 port=1"}`
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envOrder+"="+o)
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	require.NoError(t, input.Close())
	assert.Error(t, cmd.Wait())
	assert.Equal(t, 1, cmd.ProcessState.ExitCode())
}
