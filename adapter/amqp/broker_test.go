package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: where does a RabbitMQ for tests come from?

// broker is a RabbitMQ: the one at $PGWAKE_AMQP_URL, or a node of its own in a temporary directory.
type broker struct {
	url string

	dir        string // "": it is not ours
	script     string
	node, dist int // ports
	epmdPort   int
	epmd       *exec.Cmd

	server *exec.Cmd
	ended  chan error
}

var shared struct {
	sync.Once
	*broker
	err error
}

// theBroker returns the one that tests share. It is begun with the first of them, and ends with the process.
func theBroker(tb testing.TB) *broker {
	tb.Helper()
	shared.Do(func() {
		if url := os.Getenv("PGWAKE_AMQP_URL"); url != "" {
			shared.broker = &broker{url: url}
			return
		}
		shared.broker, shared.err = newBroker()
	})
	needed(tb, shared.err)
	return shared.broker
}

var errNotInstalled = errors.New("there is no rabbitmq-server on this machine")

// needed skips a test for which no RabbitMQ is installed. One that is, and does not start, is a failure: otherwise a broken installation
// looks like success.
func needed(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case errors.Is(err, errNotInstalled):
		tb.Skipf("these tests need a RabbitMQ, at PGWAKE_AMQP_URL or installed here: %v", err)
	case err != nil:
		tb.Fatalf("start the RabbitMQ that is installed here: %v", err)
	}
}

// newBroker starts a node of what is installed.
func newBroker() (*broker, error) {
	// The script that distributions have in the PATH goes over to a user of its own.
	scripts, _ := filepath.Glob("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
	if path, err := exec.LookPath("rabbitmq-server"); err == nil && len(scripts) == 0 {
		scripts = []string{path}
	}
	epmd, err := exec.LookPath("epmd")
	if found, _ := filepath.Glob("/usr/lib/erlang/erts-*/bin/epmd"); err != nil && len(found) > 0 {
		epmd, err = found[0], nil
	}
	switch {
	case len(scripts) == 0:
		return nil, errNotInstalled
	case err != nil:
		return nil, fmt.Errorf("find the epmd of rabbitmq-server: %w", err)
	}
	return startBroker(scripts[0], epmd)
}

func startBroker(script, epmd string) (*broker, error) {
	dir, err := os.MkdirTemp("", "pgwake-amqp-")
	if err != nil {
		return nil, err
	}
	b := &broker{dir: dir, script: script}
	for _, port := range []*int{&b.node, &b.dist, &b.epmdPort} {
		if *port, err = freePort(); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	b.url = fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", b.node)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "plugins"), []byte("[].\n"), 0o600), os.WriteFile(filepath.Join(dir, "rabbitmq.conf"), nil, 0o600)); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	// A node that finds none would start one that outlives it.
	b.epmd = exec.Command(epmd, "-port", strconv.Itoa(b.epmdPort), "-address", "127.0.0.1")
	if err := b.epmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := b.start(); err != nil {
		said, _ := os.ReadFile(filepath.Join(dir, "output"))
		b.stop()
		return nil, fmt.Errorf("%w: %s", err, said)
	}
	return b, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// beginning is how long a broker may take to begin.
const beginning = time.Minute

// start starts the node, and waits until it answers.
func (b *broker) start() error {
	cmd := b.command(b.script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the script has the node as its child
	output, err := os.Create(filepath.Join(b.dir, "output"))
	if err != nil {
		return err
	}
	return b.await(cmd, output)
}

// command is one of RabbitMQ's, for this node.
func (b *broker) command(name string, args ...string) *exec.Cmd {
	path := func(name string) string { return filepath.Join(b.dir, name) }
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "HOME="+b.dir, "RABBITMQ_NODENAME=pgwake"+strconv.Itoa(b.node)+"@localhost",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1", "RABBITMQ_NODE_PORT="+strconv.Itoa(b.node), "RABBITMQ_DIST_PORT="+strconv.Itoa(b.dist),
		"ERL_EPMD_PORT="+strconv.Itoa(b.epmdPort), "ERL_EPMD_ADDRESS=127.0.0.1", "RABBITMQ_MNESIA_BASE="+path("mnesia"), "RABBITMQ_LOG_BASE="+path("log"),
		"RABBITMQ_LOGS=-", "RABBITMQ_ENABLED_PLUGINS_FILE="+path("plugins"), "RABBITMQ_CONF_ENV_FILE=/dev/null", "RABBITMQ_CONFIG_FILE="+path("rabbitmq"),
		"RABBITMQ_PID_FILE="+path("pid"), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+S 1:1 +sbwt none")
	return cmd
}

func (b *broker) await(cmd *exec.Cmd, output *os.File) error {
	defer output.Close()
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return err
	}
	b.server, b.ended = cmd, make(chan error, 1)
	go func(ended chan<- error) { ended <- cmd.Wait() }(b.ended)
	ctx, cancel := context.WithTimeout(context.Background(), beginning)
	defer cancel()
	every := time.NewTicker(100 * time.Millisecond)
	defer every.Stop()
	for {
		conn, err := amqp091.Dial(b.url)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-every.C:
		case failed := <-b.ended:
			b.ended <- failed
			return fmt.Errorf("rabbitmq-server ended: %w", errors.Join(failed, err))
		case <-ctx.Done():
			return fmt.Errorf("rabbitmq-server does not answer: %w", err)
		}
	}
}

// own skips a test that does something to the broker that others would notice.
func (b *broker) own(tb testing.TB) *broker {
	tb.Helper()
	if b.dir == "" {
		tb.Skip("the broker at PGWAKE_AMQP_URL is not one to be stopped")
	}
	return b
}

// control runs rabbitmqctl.
func (b *broker) control(tb testing.TB, args ...string) {
	tb.Helper()
	said, err := b.command(filepath.Join(filepath.Dir(b.script), "rabbitmqctl"), args...).CombinedOutput()
	require.NoError(tb, err, "%s", said)
}

// freeze has the node stand still, until it is told to go on.
func (b *broker) freeze(tb testing.TB) (thaw func()) {
	tb.Helper()
	require.NoError(tb, syscall.Kill(-b.server.Process.Pid, syscall.SIGSTOP))
	thaw = sync.OnceFunc(func() { _ = syscall.Kill(-b.server.Process.Pid, syscall.SIGCONT) })
	tb.Cleanup(thaw)
	return thaw
}

// kill ends the node without warning.
func (b *broker) kill() {
	_ = syscall.Kill(-b.server.Process.Pid, syscall.SIGKILL)
	<-b.ended
	b.ended <- nil
}

// stop ends what was started.
func (b *broker) stop() {
	if b == nil || b.dir == "" {
		return
	}
	if b.server != nil {
		b.kill()
	}
	_ = b.epmd.Process.Kill()
	_ = b.epmd.Wait()
	_ = os.RemoveAll(b.dir)
}

// verdict is what a test was told.
type verdict struct {
	testing.TB
	skipped, failed bool
}

func (v *verdict) Helper()               {}
func (v *verdict) Skipf(string, ...any)  { v.skipped = true }
func (v *verdict) Fatalf(string, ...any) { v.failed = true }

func TestBroker_InstalledAndDoesNotStart_IsAFailure(t *testing.T) {
	_, err := startBroker("false", "true")
	require.ErrorContains(t, err, "rabbitmq-server ended: exit status 1")
	var broken, missing verdict
	needed(&broken, err)
	require.Equal(t, verdict{failed: true}, broken)
	needed(&missing, fmt.Errorf("look: %w", errNotInstalled))
	require.Equal(t, verdict{skipped: true}, missing)
}
