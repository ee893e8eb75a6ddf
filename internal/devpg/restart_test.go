//go:build unix

package devpg_test

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

func TestRestart_KeepsPortAndData(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	mustQuery(t, srv, "CREATE TABLE kept AS SELECT 42 AS n")
	port := srv.Port()
	for _, mode := range []devpg.Mode{devpg.Fast, devpg.Immediate} {
		before := srv.PostmasterPID()
		require.NoError(t, srv.Restart(t.Context(), mode))
		assert.NotEqual(t, before, srv.PostmasterPID())
		assert.Equal(t, port, srv.Port())
		assert.Equal(t, "42", mustQuery(t, srv, "SELECT n FROM kept"))
	}
}

func TestRestart_Immediate_IsACrash(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	mustQuery(t, srv, "CREATE UNLOGGED TABLE lost AS SELECT 42 AS n")
	require.NoError(t, srv.Restart(t.Context(), devpg.Fast))
	assert.Equal(t, "1", mustQuery(t, srv, "SELECT count(*) FROM lost"))
	require.NoError(t, srv.Restart(t.Context(), devpg.Immediate))
	assert.Equal(t, "0", mustQuery(t, srv, "SELECT count(*) FROM lost"))
}

func TestRestart_ServerThatWasBroken_ComesBackWithItsData(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{
		"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP, "terminated": syscall.SIGTERM,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := start(t, nil)
			mustQuery(t, srv, "CREATE TABLE kept AS SELECT 42 AS n")
			backend(t, srv) // a child that the postmaster leaves behind
			kill(t, srv.PostmasterPID(), sig)
			require.NoError(t, srv.Restart(t.Context(), devpg.Immediate))
			assert.Equal(t, "42", mustQuery(t, srv, "SELECT n FROM kept"))
		})
	}
}

func TestRestart_StoppedPostmaster_StillShutsDownCleanly(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	mustQuery(t, srv, "CREATE UNLOGGED TABLE kept AS SELECT 42 AS n")
	kill(t, srv.PostmasterPID(), syscall.SIGSTOP)
	require.NoError(t, srv.Restart(t.Context(), devpg.Fast))
	assert.Equal(t, "1", mustQuery(t, srv, "SELECT count(*) FROM kept"))
}

func TestHalt_RefusesConnectionsUntilResume(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	require.NoError(t, srv.Halt(t.Context(), devpg.Fast))
	require.NoError(t, srv.Halt(t.Context(), devpg.Fast))
	assert.Zero(t, srv.PostmasterPID())
	_, err := query(t.Context(), srv.URL, "SELECT 1")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)

	require.NoError(t, srv.Resume(t.Context()))
	assert.Equal(t, "1", mustQuery(t, srv, "SELECT 1"))
}

func TestRestart_UnknownMode_IsRefused(t *testing.T) {
	t.Parallel()
	srv := shared(t)
	require.ErrorContains(t, srv.Restart(t.Context(), "smart"), `mode "smart"`)
	assert.Equal(t, "1", mustQuery(t, srv, "SELECT 1"))
}
