package main

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/frozen"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: does the driver roll a deployment, with this state as both, and choose what it can?

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// repository makes one with all sets of migrations, and returns it and how to commit what is in it.
func repository(t *testing.T) (dir string, commit func(name, text string) string) {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("there is no git")
	}
	dir = t.TempDir()
	run := func(args ...string) string {
		out, err := git(t.Context(), dir, append([]string{"-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"}, args...)...)
		require.NoError(t, err)
		return out
	}
	run("init", "-q")
	commit = func(name, text string) string {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		run("add", ".")
		run("commit", "-q", "-m", "change "+name)
		return run("rev-parse", "HEAD")
	}
	for _, set := range frozen.Sets {
		commit(set+"/00001_tables.sql", "of "+set)
	}
	return dir, commit
}

func TestChoose_NothingIsNamed_IsTheLatestEditOfAMigration_AndEachReleaseThatItContinues(t *testing.T) {
	t.Parallel()
	dir, commit := repository(t)
	tag := func(name string) {
		_, err := git(t.Context(), dir, "tag", name)
		require.NoError(t, err)
	}
	tag("v0.0.1")
	commit("migrations/00001_tables.sql", "edited")
	_, err := choose(t.Context(), dir, "")
	require.ErrorContains(t, err, "no stage and of no release")
	commit("main.go", "package main")
	tag("v0.1.0")
	commit("eventbus/migrations/00002_more.sql", "more")
	edited := commit("eventbus/migrations/00002_more.sql", "more, edited")
	tag("v0.2.0")
	tag("other/v0.3.0")
	states, err := choose(t.Context(), dir, "")
	require.NoError(t, err)
	var names []string
	for _, s := range states {
		names = append(names, s.name)
	}
	require.Len(t, names, 3)
	require.Equal(t, edited, states[0].commit)
	require.Contains(t, names[0], "the latest edit of a migration: change eventbus/migrations/00002_more.sql")
	require.Equal(t, []string{"v0.1.0", "v0.2.0"}, names[1:])

	states, err = choose(t.Context(), dir, "HEAD~2")
	require.NoError(t, err)
	require.Len(t, states, 1)
	_, err = choose(t.Context(), dir, "v0.0.1")
	require.ErrorContains(t, err, "ErrForeign")
	require.ErrorContains(t, err, "migrations/00001_tables.sql")
	_, err = choose(t.Context(), dir, "no-such-tag")
	require.Error(t, err)

	// What is edited and not committed is an edit as well.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "taskgraph/migrations/00001_tables.sql"), []byte("edited"), 0o644))
	_, err = choose(t.Context(), dir, "")
	require.ErrorContains(t, err, "taskgraph/migrations/00001_tables.sql")
}

func TestNewer_SetHasNoneThatIsNew_GetsOne(t *testing.T) {
	t.Parallel()
	dir, commit := repository(t)
	tree := filepath.Join(t.TempDir(), "tree")
	_, err := git(t.Context(), dir, "worktree", "add", "--detach", tree)
	require.NoError(t, err)
	commit("eventbus/migrations/00002_more.sql", "more")
	overlay, err := newer(dir, tree, t.TempDir())
	require.NoError(t, err)
	text, err := os.ReadFile(overlay)
	require.NoError(t, err)
	var of struct{ Replace map[string]string }
	require.NoError(t, json.Unmarshal(text, &of))
	require.ElementsMatch(t, []string{filepath.Join(dir, "migrations/00002_next.sql"), filepath.Join(dir, "taskgraph/migrations/00002_next.sql")}, slices.Collect(maps.Keys(of.Replace)))
	for _, file := range of.Replace {
		sql, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Contains(t, string(sql), "of_next_version")
	}
}

func TestRun_ThereAndBack_LedgerAgrees(t *testing.T) {
	if os.Getenv("PGWAKE_STRESS") == "" {
		t.Skip("it builds two programs, and takes minutes on a busy machine: make upgrade, or PGWAKE_STRESS=1s")
	}
	if _, err := git(t.Context(), "../..", "rev-parse", "HEAD"); err != nil {
		t.Skipf("there is no git, or no history: %v", err)
	}
	if changed, err := changedMigrations(t.Context(), "../..", "HEAD"); err != nil || changed != "" {
		t.Skipf("migrations were edited since the last commit: %s %v", changed, err)
	}
	require.NoError(t, run(t.Context(), "../..", "HEAD", 200*time.Millisecond))
}
