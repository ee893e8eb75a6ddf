package pgwake_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: does what runs the tests say so if it did not run them?

// standIns are programs, by name, as shell scripts, before those that there are.
func standIns(t *testing.T, scripts map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, script := range scripts {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	return dir
}

// execute runs a command in a directory, with stand-ins, and returns what it said and its exit code.
func execute(t *testing.T, in, standIns string, command ...string) (said string, code int) {
	t.Helper()
	if _, err := exec.LookPath(command[0]); err != nil {
		t.Skip(err)
	}
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Dir = in
	cmd.Env = append(os.Environ(), "PATH="+standIns+string(os.PathListSeparator)+os.Getenv("PATH"), "MAKEFLAGS=", "PGWAKE_AMQP_URL=")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		require.NoError(t, err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// ci is a directory with the Makefile and its scripts, and with modules that are empty.
func ci(t *testing.T, modules ...string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(filepath.Join(dir, ".ci"), os.DirFS(".ci")))
	text, err := os.ReadFile("Makefile")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "Makefile"), text, 0o644))
	for _, m := range modules {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, m), 0o755))
	}
	return dir
}

func TestModules_PackagesCannotBeListedOrTested_ItFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script string
		want   int
	}{
		"all is well":                {`test "$1" != list || printf 'root\nroot/one\n'`, 0},
		"go list fails":              {`test "$1" != list || { echo root; exit 1; }`, 1},
		"the first package fails":    {`case "$*" in list*) printf 'root\nroot/one\n' ;; *" .") exit 1 ;; esac`, 1},
		"another package fails":      {`case "$*" in list*) printf 'root\nroot/one\n' ;; *root/one*) exit 1 ;; esac`, 1},
		"another module fails":       {`case "$*" in list*) echo root ;; *./...*) exit 1 ;; esac`, 1},
		"nothing but the first root": {`case "$*" in list*) echo root ;; esac`, 0},
	} {
		dir := ci(t, "a", "b")
		said, code := execute(t, dir, standIns(t, map[string]string{"fake-go": c.script}), ".ci/modules", "3", "fake-go test", ".", "a", "b")
		require.Equal(t, c.want, code, "%s: %s", name, said)
	}
}

// What an earlier run has left says nothing of this one.
func TestMakeTest_ItsSubStepsFail_ItFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ build, modules string }{
		"withpg is not built":         {"exit 1", "exit 0"},
		"whoever runs them is killed": {"kill -9 $PPID", "exit 0"},
		"a package fails":             {`mkdir -p bin; printf '#!/bin/sh\nshift 2\n"$@"\n' >bin/withpg; chmod +x bin/withpg`, "exit 1"},
		"modules is killed":           {`mkdir -p bin; printf '#!/bin/sh\nshift 2\nexec "$@"\n' >bin/withpg; chmod +x bin/withpg`, "kill -9 $$"},
		"":                            {`mkdir -p bin; printf '#!/bin/sh\nshift 2\nexec "$@"\n' >bin/withpg; chmod +x bin/withpg`, "exit 0"},
	} {
		dir := ci(t)
		for script, text := range map[string]string{"packages": "exit 0", "modules": c.modules} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, ".ci", script), []byte("#!/bin/sh\n"+text+"\n"), 0o755))
		}
		require.NoError(t, os.Mkdir(filepath.Join(dir, "bin"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "bin", "test.status"), []byte("0\n"), 0o644))
		said, code := execute(t, dir, standIns(t, map[string]string{"fake-go": `test "$1" != build || { ` + c.build + `; }`}), "make", "test", "GO=fake-go")
		require.Equal(t, name == "", code == 0, "%s: %s", name, said)
	}
}

func TestPackages_OneCannotBeInstalled_WhoeverInsistsIsTold(t *testing.T) {
	t.Parallel()
	const root = `echo 0`
	nothing := `exit 1`
	some := `test "$1" = update && exit; for last; do :; done; test $# = 4 && test "$last" != chromium && : >"$(dirname "$0")/$last" && chmod +x "$(dirname "$0")/$last"`
	all := `test "$1" = update && exit; shift 3; for p; do : >"$(dirname "$0")/$p"; done`
	for name, c := range map[string]struct {
		id, apt        string
		insists, tells bool
	}{
		"all are installed":    {root, all, true, false},
		"one is not to be had": {root, some, false, true},
		"nobody is there":      {root, nothing, false, true},
		"who is not root":      {`echo 7`, nothing, true, false},
	} {
		there := standIns(t, map[string]string{"id": c.id, "apt-get": c.apt,
			"dpkg-query": `for last; do :; done; test ! -e "$(dirname "$0")/$last" || echo "ii "`})
		// Without what this machine has.
		for _, tool := range []string{"sh", "dirname", "grep", "nice", "chmod"} {
			path, err := exec.LookPath(tool)
			if err != nil {
				t.Skip(err)
			}
			require.NoError(t, os.Symlink(path, filepath.Join(there, tool)))
		}
		run := func(args ...string) (string, int) {
			script, err := filepath.Abs(".ci/packages")
			require.NoError(t, err)
			cmd := exec.CommandContext(t.Context(), filepath.Join(there, "sh"), append([]string{script}, args...)...)
			cmd.Env = []string{"PATH=" + there}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState == nil {
				require.NoError(t, err)
			}
			return string(out), cmd.ProcessState.ExitCode()
		}
		said, code := run()
		require.Zero(t, code, "%s: %s", name, said)
		require.Equal(t, c.tells, strings.Contains(said, "could not be installed"), "%s: %s", name, said)
		said, code = run("insist")
		require.Equal(t, c.insists, code == 0, "%s: %s", name, said)
		if name == "one is not to be had" {
			require.Contains(t, said, "chromium")
			require.NotContains(t, said, "tmux")
		}
	}
}

var fuzzTarget = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// Inputs of each target are kept, beside those that it begins with, and none is of a target that is gone.
func TestFuzz_EachTarget_HasInputsThatAreKept(t *testing.T) {
	t.Parallel()
	kept, targets := map[string]int{}, 0
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(filepath.ToSlash(path), "testdata/fuzz/") {
			kept[filepath.Dir(path)]++
		}
		return err
	}))
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, of := range fuzzTarget.FindAllStringSubmatch(string(source), -1) {
			dir := filepath.Join(filepath.Dir(path), "testdata", "fuzz", of[1])
			require.GreaterOrEqual(t, kept[dir], 5, dir)
			delete(kept, dir)
			targets++
		}
		return err
	}))
	require.Greater(t, targets, 20)
	require.Empty(t, kept)
}

func TestFuzz_TargetFindsSomethingOrIsNotThere_ItFails(t *testing.T) {
	t.Parallel()
	const ended = `printf '%s\n' '--- FAIL: FuzzB (1.04s)' '    context deadline exceeded' FAIL; exit 1`
	const found, none = `echo 'Failing input written to testdata/fuzz/FuzzB/1'; exit 1`, `echo 'testing: warning: no fuzz tests to fuzz'`
	for _, quick := range []bool{false, true} {
		for name, c := range map[string]struct {
			b, server string
			want      int
		}{
			"all is well": {"echo PASS", "echo PASS", 0}, "one finds something": {found, "echo PASS", 1}, "one is not built": {none, "echo PASS", 1},
			"the time of one ends": {ended, "echo PASS", 0}, "one finds something at the end": {"(" + ended + "); " + found, "echo PASS", 1},
			"one that needs a server finds something": {"echo PASS", found, map[bool]int{true: 0, false: 1}[quick]},
		} {
			dir := ci(t, "b")
			require.NoError(t, os.WriteFile(filepath.Join(dir, "a_test.go"), []byte("package a\n\nfunc FuzzA(f *testing.F) {\n}\n\nfunc FuzzServer(f *testing.F) {\n\tpgwaketest.New(f, nil)\n}\n"), 0o644))
			require.NoError(t, os.WriteFile(filepath.Join(dir, "b", "b_test.go"), []byte("package b\n\nfunc FuzzB(f *testing.F) {\n}\n"), 0o644))
			does := `case "$*" in *FuzzB*) ` + c.b + ` ;; *FuzzServer*) ` + c.server + ` ;; esac`
			// Of go test -c, what is built does so; else it itself.
			there := standIns(t, map[string]string{"fake-go": `for a; do test "$out" != next || out=$a; test "$a" != -o || out=next; done
if [ "$out" ]; then printf '%s\n' '#!/bin/sh' "$DOES" >"$out"; chmod +x "$out"; else eval "$DOES"; fi`})
			args := []string{"env", "GO=fake-go", "DOES=" + does, ".ci/fuzz"}
			if quick {
				args = append(args, "-quick")
			}
			said, code := execute(t, dir, there, append(args, "1s")...)
			require.Equal(t, c.want, code, "%s: %s", name, said)
			require.Contains(t, said, ". FuzzA", name)
		}
	}
}
