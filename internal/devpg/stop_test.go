//go:build unix

package devpg_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

func TestStop_LeavesNeitherProcessNorDirectory(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	require.Greater(t, len(remains(home(srv))), 5, "the look at what is left sees nothing")
	require.NoError(t, srv.Stop(t.Context()))
	// Without a wait: what Stop has returned from is over.
	require.Empty(t, remains(home(srv)))
}

func TestStop_RepeatedAndConcurrent_IsOneStop(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() { assert.NoError(t, srv.Stop(context.Background())) })
	}
	group.Wait()
	require.NoError(t, srv.Stop(t.Context()))
	require.Empty(t, remains(home(srv)))
	for _, err := range []error{
		srv.Restart(t.Context(), devpg.Fast), srv.Halt(t.Context(), devpg.Fast), srv.Resume(t.Context()),
	} {
		assert.ErrorIs(t, err, devpg.ErrStopped)
	}
}

func TestStop_CtxHasEnded_SaysSoAndStillStops(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := srv.Stop(ended); err != nil { // a stop may be as fast as the look at ctx
		require.ErrorIs(t, err, context.Canceled)
	}
	requireNothingLeft(t, home(srv))
	require.NoError(t, srv.Stop(t.Context()))
}

func TestStop_RestartUnderWay_EndsBoth(t *testing.T) {
	t.Parallel()
	srv := start(t, nil)
	before := srv.PostmasterPID()
	restarted := make(chan error, 1)
	go func() { restarted <- srv.Restart(context.Background(), devpg.Fast) }()
	require.True(t, eventually(func() bool { return srv.PostmasterPID() != before }))
	require.NoError(t, srv.Stop(t.Context()))
	require.Empty(t, remains(home(srv)))
	if err := <-restarted; err != nil { // it may have been done
		require.ErrorIs(t, err, devpg.ErrStopped)
	}
}

// Each way in which tests and people break a server: Stop cleans up after it.
func TestStop_BrokenServer_LeavesNothing(t *testing.T) {
	breakages := map[string]func(t *testing.T, srv *devpg.Server){
		"postmaster killed": func(t *testing.T, srv *devpg.Server) {
			kill(t, srv.PostmasterPID(), syscall.SIGKILL)
		},
		"postmaster stopped": func(t *testing.T, srv *devpg.Server) {
			kill(t, srv.PostmasterPID(), syscall.SIGSTOP)
		},
		"backend stopped and postmaster killed": func(t *testing.T, srv *devpg.Server) {
			kill(t, backend(t, srv), syscall.SIGSTOP)
			kill(t, srv.PostmasterPID(), syscall.SIGKILL)
		},
		"halted": func(t *testing.T, srv *devpg.Server) {
			require.NoError(t, srv.Halt(t.Context(), devpg.Immediate))
		},
		"directory removed": func(t *testing.T, srv *devpg.Server) {
			require.NoError(t, os.RemoveAll(home(srv)))
		},
		"watchdog terminated": func(t *testing.T, srv *devpg.Server) {
			kill(t, devpg.WatchdogPID(srv), syscall.SIGTERM)
		},
		"watchdog killed": func(t *testing.T, srv *devpg.Server) {
			kill(t, devpg.WatchdogPID(srv), syscall.SIGKILL)
		},
	}
	for name, break_ := range breakages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := start(t, nil)
			shared := sharedMemory(t, srv)
			break_(t, srv)
			stop(t, srv)
			requireNothingLeft(t, home(srv))
			assert.NotContains(t, allSharedMemory(), shared)
		})
	}
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	require.NotZero(t, pid)
	require.NoError(t, syscall.Kill(pid, sig))
}

// backend is the process of a session that lasts as long as the test.
func backend(t *testing.T, srv *devpg.Server) int {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), srv.URL)
	require.NoError(t, err)
	t.Cleanup(func() {
		ended, cancel := context.WithCancel(context.Background())
		cancel() // no farewell: the server is gone
		_ = conn.Close(ended)
	})
	return int(conn.PgConn().PID())
}

// sharedMemory is the server's System V segment as allSharedMemory would list it.
// It outlives a server that is killed.
func sharedMemory(t *testing.T, srv *devpg.Server) string {
	t.Helper()
	lock, err := os.ReadFile(filepath.Join(srv.DataDir(), "postmaster.pid"))
	require.NoError(t, err)
	lines := strings.Split(string(lock), "\n")
	require.Greater(t, len(lines), 6)
	var key, id int
	_, err = fmt.Sscan(lines[6], &key, &id)
	require.NoError(t, err)
	segment := fmt.Sprint(id)
	if all := allSharedMemory(); all != nil {
		require.Contains(t, all, segment)
	}
	return segment
}

func allSharedMemory() []string {
	table, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		return nil // not Linux
	}
	ids := []string{}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 1 {
			ids = append(ids, fields[1])
		}
	}
	return ids
}
