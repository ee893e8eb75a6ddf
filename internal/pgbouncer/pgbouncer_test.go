//go:build unix

package pgbouncer

import (
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The server need not be there: a PgBouncer connects to it when somebody asks for a session.
func TestStart_Stop_LeavesNothing(t *testing.T) {
	p, err := Start("postgres://somebody@127.0.0.1:1/postgres", "transaction")
	if errors.Is(err, ErrNotInstalled) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.DirExists(t, p.dir)
	require.NoError(t, p.Stop())
	require.NoError(t, p.Stop())
	require.NoDirExists(t, p.dir)
	require.Error(t, syscall.Kill(p.cmd.Process.Pid, 0))
}

func TestStart_ModeThatIsNone_SaysWhatThePoolerSays(t *testing.T) {
	_, err := Start("postgres://somebody@127.0.0.1:1/postgres", "sometimes")
	if errors.Is(err, ErrNotInstalled) {
		t.Skip(err)
	}
	require.ErrorContains(t, err, "sometimes")
}
