//go:build linux

package pgwake_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what happens behind PgBouncer?

// bouncer starts a PgBouncer in front of the server and returns how a connection goes through it.
func bouncer(t *testing.T, server, mode string) (through func(*pgx.ConnConfig)) {
	t.Helper()
	path, err := exec.LookPath("pgbouncer")
	if errors.Is(err, exec.ErrNotFound) {
		path, err = exec.LookPath("/usr/sbin/pgbouncer")
	}
	if err != nil {
		t.Skip("needs pgbouncer, which is not installed here")
	}
	to, err := pgx.ParseConfig(server)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "pgwake-pgbouncer-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	port := freePort(t)
	config := filepath.Join(dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `
[databases]
* = host=%s port=%d user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = %s
default_pool_size = 4
`, to.Host, to.Port, to.User, port, mode), 0o644))

	cmd := exec.Command(path, config)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 { // it refuses to run as root
		cmd.SysProcAttr.Credential = nobody(t)
	}
	var log logbook
	cmd.Stderr = &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, patience, 10*time.Millisecond, "pgbouncer does not start: %s", &log)
	return func(c *pgx.ConnConfig) {
		c.Host, c.Port, c.TLSConfig, c.Fallbacks = "127.0.0.1", uint16(port), nil, nil
		c.DefaultQueryExecMode = pgx.QueryExecModeExec // prepared statements stay behind on other sessions
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func nobody(t *testing.T) *syscall.Credential {
	t.Helper()
	u, err := user.Lookup("nobody")
	require.NoError(t, err)
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	require.NoError(t, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

// A LISTEN through a pooler that shares sessions succeeds, and nothing ever comes. The node finds out, says
// so, and polls; and it leaves the shared sessions as they are.
func TestPooler_ListenThroughATransactionPooler_SaysSoAndPolls(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := bouncer(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		through(pool.ConnConfig)
		through(listen)
	})
	require.False(t, n.Stats().Listening)
	require.Contains(t, fmt.Sprint(n.Health().Problems), "transaction pooler")
	for range 3 {
		n.flows(t, back)
	}
	require.True(t, n.Stats().Worker.Aggressive, "it polls")

	// What the node set on a session would be set for whoever gets the session next.
	shared, err := pgxpool.ParseConfig(server)
	require.NoError(t, err)
	through(shared.ConnConfig)
	shared.MaxConns = 4
	stranger, err := pgxpool.NewWithConfig(t.Context(), shared)
	require.NoError(t, err)
	defer stranger.Close()
	for range 20 {
		var commits, channels string
		require.NoError(t, stranger.QueryRow(t.Context(),
			`SELECT current_setting('synchronous_commit'), coalesce((SELECT string_agg(c, ',') FROM pg_listening_channels() c), '')`).Scan(&commits, &channels))
		require.Equal(t, "on", commits)
		require.NotContains(t, channels, "_worker")
	}
}

func TestPooler_ListenConfigGoesAroundIt_IsPushed(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := bouncer(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, _ *pgx.ConnConfig) { through(pool.ConnConfig) })
	n.pushed(t, patience)
}

func TestPooler_SessionsAreNotShared_IsPushed(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := bouncer(t, server, "session")
	n := trouble(t, server, pgwake.Config{}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		pool.MaxConns = 2
		through(pool.ConnConfig)
		through(listen)
	})
	n.pushed(t, patience)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "own"}, nil)
	require.NoError(t, err)
	n.await(t, "own", patience)
}

// A node without a connection of its own, for places where a pooler is all there is.
func TestPooler_ModePolling_NeedsNothingElse(t *testing.T) {
	t.Parallel()
	server := breakableServer(t).URL
	through := bouncer(t, server, "transaction")
	n := trouble(t, server, pgwake.Config{Mode: pgwake.ModePolling}, func(pool *pgxpool.Config, listen *pgx.ConnConfig) {
		through(pool.ConnConfig)
		through(listen)
	})
	n.flows(t, patience)
	require.True(t, n.Health().OK)
}
