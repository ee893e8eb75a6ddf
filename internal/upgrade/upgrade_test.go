package main

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: does the driver roll a deployment, with this state as both, and choose what it can?

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// history skips the test where git is not, or the history of the stages.
func history(t *testing.T) {
	t.Helper()
	if _, err := git(t.Context(), "../..", "cat-file", "-e", "63b72ed^{commit}"); err != nil {
		t.Skipf("there is no git, or no history: %v", err)
	}
}

func TestChoose_MigrationsHaveChanged_IsRefused(t *testing.T) {
	history(t)
	head, err := git(t.Context(), "../..", "rev-parse", "HEAD")
	require.NoError(t, err)
	chosen, err := choose(t.Context(), "../..", "")
	require.NoError(t, err)
	require.NotEmpty(t, chosen)
	_, err = choose(t.Context(), "../..", "63b72ed")
	require.ErrorContains(t, err, "ErrForeign")
	_, err = choose(t.Context(), "../..", "no-such-tag")
	require.Error(t, err)
	changed, err := changedMigrations(t.Context(), "../..", head)
	require.NoError(t, err)
	t.Logf("changed since %s: %q", head, changed)
}

func TestRun_ThereAndBack_LedgerAgrees(t *testing.T) {
	history(t)
	if os.Getenv("PGWAKE_STRESS") == "" {
		t.Skip("it builds two programs, and takes minutes on a busy machine: make upgrade, or PGWAKE_STRESS=1s")
	}
	head, err := git(t.Context(), "../..", "rev-parse", "HEAD")
	require.NoError(t, err)
	if changed, err := changedMigrations(t.Context(), "../..", head); err != nil || changed != "" {
		t.Skipf("migrations were edited since the last commit: %s %v", changed, err)
	}
	require.NoError(t, run(t.Context(), "../..", head, 200*time.Millisecond))
}
