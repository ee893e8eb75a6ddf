//go:build linux

// Package testpooler puts a real PgBouncer between a test and its server.
package testpooler

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// patience bounds how long a start may take.
const patience = 20 * time.Second

// Start starts a PgBouncer in front of the server at a URL, in a pool mode such as transaction, and returns what has a connection go
// through it. The test is skipped where none is installed.
func Start(tb testing.TB, server, mode string) (through func(*pgx.ConnConfig)) {
	tb.Helper()
	path := program(tb)
	to, err := pgx.ParseConfig(server)
	require(tb, err)
	port := freePort(tb)
	cmd := exec.Command(path, configFile(tb, to, port, mode))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 { // it refuses to run as root
		cmd.SysProcAttr.Credential = nobody(tb)
	}
	var log logbook
	cmd.Stderr = &log
	require(tb, cmd.Start())
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	await(tb, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), &log)
	return func(c *pgx.ConnConfig) {
		c.Host, c.Port, c.TLSConfig, c.Fallbacks = "127.0.0.1", uint16(port), nil, nil
		c.DefaultQueryExecMode = pgx.QueryExecModeExec // prepared statements stay behind on other sessions
	}
}

func program(tb testing.TB) string {
	tb.Helper()
	path, err := exec.LookPath("pgbouncer")
	if errors.Is(err, exec.ErrNotFound) {
		path, err = exec.LookPath("/usr/sbin/pgbouncer")
	}
	if err != nil {
		tb.Skip("needs pgbouncer, which is not installed here")
	}
	return path
}

func configFile(tb testing.TB, to *pgx.ConnConfig, port int, mode string) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "pgwake-pgbouncer-")
	require(tb, err)
	tb.Cleanup(func() { require(tb, os.RemoveAll(dir)) })
	require(tb, os.Chmod(dir, 0o755))
	path := filepath.Join(dir, "pgbouncer.ini")
	require(tb, os.WriteFile(path, fmt.Appendf(nil, `
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
	return path
}

// await returns once something listens there.
func await(tb testing.TB, address string, log *logbook) {
	tb.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("pgbouncer does not start: %v\n%s", err, log)
		}
	}
}

func freePort(tb testing.TB) int {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require(tb, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func nobody(tb testing.TB) *syscall.Credential {
	tb.Helper()
	u, err := user.Lookup("nobody")
	require(tb, err)
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	require(tb, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	require(tb, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

func require(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// logbook is what the process has said. Safe for concurrent use.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
