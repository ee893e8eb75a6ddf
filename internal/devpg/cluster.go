package devpg

// A booted server: initdb, start, stop and start again, each by a word to the
// watchdog that owns it.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	bootTimeout  = 90 * time.Second // initdb and the first start, on a busy machine
	closeTimeout = 30 * time.Second // more than the watchdog takes at its harshest
	portAttempts = 3
)

var (
	errEnded   = errors.New("it ended before it answered")
	errForeign = errors.New("another server answers on its port")
)

// cluster is one server and the watchdog that runs it. Between boot and close,
// dir and port do not change.
type cluster struct {
	*watchdog
	dir  string
	port int
	pid  atomic.Int64 // of the postmaster

	logFrom int64         // where in the log the last child began
	busy    chan struct{} // one place: whoever has filled it acts on the server

	stop     sync.Once
	stopping chan struct{} // closed when the first close begins
	gone     chan struct{} // closed when all is over
	remains  error         // why not all is gone; written before gone is closed
}

func (c *cluster) url() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", c.port)
}

// boot makes a server in a new directory and returns when it answers. After an
// error there is neither process nor directory.
func boot(ctx context.Context, bin binaries, as *account, o *Options) (*cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	env := serverEnv()
	if !o.Fsync {
		env = append(env, shortSessions)
	}
	w, dir, err := watch(ctx, bin, as, settings(ctx, o, &bin), env)
	if err != nil {
		return nil, fmt.Errorf("boot a server%s: %w", as.suffix(), err)
	}
	c := &cluster{
		watchdog: w, dir: dir, busy: make(chan struct{}, 1),
		stopping: make(chan struct{}), gone: make(chan struct{}),
	}
	err = c.init(ctx)
	if err == nil {
		err = c.firstStart(ctx, freePort)
	}
	if err == nil {
		return c, nil
	}
	err = fmt.Errorf("boot a server%s: %w%s", as.suffix(), err, indent(c.logTail()))
	// The caller's ctx may be what ended the boot; the remains go regardless.
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return nil, errors.Join(err, c.close(ctx))
}

func (c *cluster) init(ctx context.Context) error {
	_, ended, err := c.spawn(ctx, "init")
	for err == nil && ended == "" {
		ended, err = c.ended(ctx, time.Second)
	}
	if err == nil && ended != "0" {
		err = fmt.Errorf("exit status %s", ended)
	}
	if err != nil {
		return fmt.Errorf("run initdb: %w", err)
	}
	return nil
}

// firstStart finds the port. Between finding it free and the server's bind,
// another process may take it. That shows as a server that ends at once, as does
// a bad setting: so each gets a few ports before it counts as an error.
func (c *cluster) firstStart(ctx context.Context, choose func() (int, error)) error {
	for attempt := 1; ; attempt++ {
		var err error
		if c.port, err = choose(); err != nil {
			return err
		}
		err = c.start(ctx)
		if !errors.Is(err, errEnded) || attempt == portAttempts {
			return err
		}
	}
}

// freePort finds a port below those that systems hand out to connections, so that
// none of these takes the port of a server while it restarts.
func freePort() (int, error) {
	const lowest, above = 17000, 32000
	var err error
	for range 200 {
		port := lowest + rand.IntN(above-lowest)
		var l net.Listener
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("find a free port from %d to %d: %w", lowest, above-1, err)
}

// start starts the server on c.port and returns when it answers.
func (c *cluster) start(ctx context.Context) error {
	pid, ended, err := c.spawn(ctx, fmt.Sprintf("start %d", c.port))
	if err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	c.pid.Store(int64(pid))
	for ended == "" {
		silence := c.answers(ctx)
		if silence == nil {
			return nil
		}
		if ended, err = c.ended(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("wait for postgres on port %d: %w (%v)", c.port, err, silence)
		}
	}
	return fmt.Errorf("start postgres on port %d: exit status %s: %w", c.port, ended, errEnded)
}

// answers asks the server on the port whether it is ours, as another one may have
// won the port.
func (c *cluster) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, c.url())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var dir string
	if err := conn.QueryRow(ctx, "SHOW data_directory", pgx.QueryExecModeSimpleProtocol).Scan(&dir); err != nil {
		return err
	}
	if dir != filepath.Join(c.dir, "data") {
		return errForeign
	}
	return nil
}

// spawn has the watchdog start a child, and returns the child's exit status too if
// it has ended already.
func (c *cluster) spawn(ctx context.Context, command string) (pid int, ended string, err error) {
	if info, err := os.Stat(c.logPath()); err == nil {
		c.logFrom = info.Size()
	}
	arg, ended, err := c.ask(ctx, command, "started")
	if err != nil {
		return 0, "", err
	}
	_, err = fmt.Sscan(arg, &pid)
	return pid, ended, err
}

func (c *cluster) halt(ctx context.Context, mode Mode) error {
	if mode != Fast && mode != Immediate {
		return fmt.Errorf("mode %q is neither %q nor %q", mode, Fast, Immediate)
	}
	_, _, err := c.ask(ctx, "stop "+string(mode), "stopped")
	if err == nil {
		c.pid.Store(0)
	}
	return err
}

// resume starts the server on its port again. Whatever still runs is stopped: one
// that was killed may have children left.
func (c *cluster) resume(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, restartPatience)
	defer cancel()
	if err := c.halt(ctx, Fast); err != nil {
		return err
	}
	for {
		err := c.start(ctx)
		if !errors.Is(err, errEnded) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w%s", err, indent(c.logTail()))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// act runs one action at a time, and none once the server is being stopped.
func (c *cluster) act(ctx context.Context, action func() error) error {
	select {
	case c.busy <- struct{}{}:
		defer func() { <-c.busy }()
	case <-c.stopping:
		return ErrStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	err := action()
	select {
	case <-c.stopping:
		return ErrStopped
	default:
		return err
	}
}

// close ends the watchdog, which ends everything else, and waits for that. It
// does not wait for an action that is under way: that one fails with ErrStopped.
func (c *cluster) close(ctx context.Context) error {
	c.stop.Do(func() {
		close(c.stopping)
		c.release()
		go func() {
			_ = c.wait()       // how it ended matters less than what it left
			if exists(c.dir) { // it was killed
				c.remains = c.sweep()
			}
			close(c.gone)
		}()
	})
	select {
	case <-c.gone:
		return c.remains
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sweep does the work of a watchdog that was killed.
func (c *cluster) sweep() error {
	lock, _ := os.ReadFile(filepath.Join(c.dir, "data", "postmaster.pid"))
	var pid int
	fmt.Sscan(string(lock), &pid)
	if p, err := os.FindProcess(pid); err == nil && pid != 0 && pid == int(c.pid.Load()) {
		defer p.Release()
		for _, sig := range immediateStop {
			_ = p.Signal(sig)
		}
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(closeTimeout); p.Signal(syscall.Signal(0)) == nil; <-tick.C {
			if time.Now().After(end) {
				_ = p.Kill()
				break
			}
		}
	}
	return os.RemoveAll(c.dir)
}

func (c *cluster) logPath() string { return filepath.Join(c.dir, "log") }

// logTail is the end of what the last child wrote: the reason, when it failed.
func (c *cluster) logTail() string {
	f, err := os.Open(c.logPath())
	if err != nil {
		return ""
	}
	defer f.Close()
	const most = 4000
	if info, err := f.Stat(); err == nil && info.Size()-c.logFrom > most {
		c.logFrom = info.Size() - most
	}
	text, _ := io.ReadAll(io.NewSectionReader(f, c.logFrom, most))
	return string(text)
}

// indent sets lines from elsewhere apart under a message; "" stays "".
func indent(text string) string {
	text = strings.TrimSpace(text)
	if text == "" {
		return ""
	}
	return "\n\t" + strings.ReplaceAll(text, "\n", "\n\t")
}
