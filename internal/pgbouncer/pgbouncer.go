// Package pgbouncer starts a real PgBouncer in front of a server, for tests and measurements.
package pgbouncer

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// patience bounds how long a start may take.
const patience = 20 * time.Second

// ErrNotInstalled: there is no pgbouncer on this machine.
var ErrNotInstalled = errors.New("pgbouncer is not installed here")

// Pooler is a PgBouncer that runs. Its methods are safe for concurrent use.
type Pooler struct {
	dir   string
	port  int
	cmd   *exec.Cmd     // nil until it has been started
	ended chan struct{} // closed when it has ended
	stop  func() error
}

// Start starts one in front of the server at a URL, in a pool mode such as transaction, with four sessions for each database and user.
// The caller stops it with Stop; on Linux it ends with the thread that started it at the latest.
func Start(server, mode string) (p *Pooler, err error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	to, err := pgx.ParseConfig(server)
	if err != nil {
		return nil, err
	}
	p = &Pooler{}
	if p.port, err = freePort(); err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("", "pgwake-pgbouncer-"); err != nil {
		return nil, err
	}
	p.stop = sync.OnceValue(p.end)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start pgbouncer: %w", err), p.Stop())
			p = nil
		}
	}()
	file, err := p.configure(to, mode)
	if err != nil {
		return p, err
	}
	cmd := exec.Command(path, file)
	if err := confine(cmd); err != nil {
		return p, err
	}
	var log logbook
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		return p, err
	}
	p.cmd, p.ended = cmd, make(chan struct{})
	go func() {
		defer close(p.ended)
		_ = cmd.Wait()
	}()
	return p, p.await(&log)
}

// Through has a connection go through it.
func (p *Pooler) Through(c *pgx.ConnConfig) {
	c.Host, c.Port, c.TLSConfig, c.Fallbacks = "127.0.0.1", uint16(p.port), nil, nil
	c.DefaultQueryExecMode = pgx.QueryExecModeExec // prepared statements stay behind on other sessions
}

// Stop ends it, and removes its files. It may be called any number of times.
func (p *Pooler) Stop() error { return p.stop() }

func (p *Pooler) end() error {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	return os.RemoveAll(p.dir)
}

// Version is what the program says of its version, such as "PgBouncer 1.18.0".
func Version() (string, error) {
	path, err := program()
	if err != nil {
		return "", err
	}
	out, err := exec.Command(path, "--version").Output()
	first, _, _ := bytes.Cut(out, []byte("\n"))
	return string(first), err
}

func program() (string, error) {
	path, err := exec.LookPath("pgbouncer")
	if errors.Is(err, exec.ErrNotFound) {
		path, err = exec.LookPath("/usr/sbin/pgbouncer")
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNotInstalled, err)
	}
	return path, nil
}

func (p *Pooler) configure(to *pgx.ConnConfig, mode string) (file string, err error) {
	if err := os.Chmod(p.dir, 0o755); err != nil { // for another user
		return "", err
	}
	file = filepath.Join(p.dir, "pgbouncer.ini")
	return file, os.WriteFile(file, fmt.Appendf(nil, `
[databases]
* = host=%s port=%d user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = %s
default_pool_size = 4
`, to.Host, to.Port, to.User, p.port, mode), 0o644)
}

// await returns once it listens, or has ended.
func (p *Pooler) await(log *logbook) error {
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port))
	deadline := time.After(patience)
	for {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-p.ended:
			return fmt.Errorf("it ended\n%s", log)
		case <-deadline:
			return fmt.Errorf("%w\n%s", err, log)
		}
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
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
