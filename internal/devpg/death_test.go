//go:build unix

package devpg_test

// The promise that the end of a process, however it comes, ends its servers. This
// test binary, run again with an environment variable, is the process.

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

const envChild = "DEVPG_TEST_CHILD"

// childMain starts a server, says so, and then does what envChild names.
func childMain() {
	srv, err := devpg.Start(context.Background(), nil)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(srv.URL)
	switch os.Getenv(envChild) {
	case "exit":
		os.Exit(0)
	case "panic":
		panic("as asked")
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed
}

// child is a process with a server, in a process group of its own, as a shell
// with job control would start it.
type child struct {
	*exec.Cmd
	out *bufio.Reader
}

func startChild(t *testing.T, base, what string) *child {
	t.Helper()
	needBinaries(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "TMPDIR="+base, envChild+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = cmd.Stdout
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	return &child{cmd, bufio.NewReader(out)}
}

// booted waits until the child's server answers.
func (c *child) booted(t *testing.T) {
	t.Helper()
	url, err := c.out.ReadString('\n')
	require.NoError(t, err)
	_, err = query(t.Context(), url[:len(url)-1], "SELECT 1")
	require.NoError(t, err)
}

// drained reads what the child printed to its end, as `go test` does.
func (c *child) drained(t *testing.T) {
	t.Helper()
	_, err := io.Copy(io.Discard, c.out)
	require.NoError(t, err)
}

func TestDeath_OfTheProcess_EndsItsServer(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{
		"kill -9": syscall.SIGKILL, "SIGTERM": syscall.SIGTERM, "Ctrl-C": syscall.SIGINT,
		"hangup": syscall.SIGHUP, "Ctrl-backslash": syscall.SIGQUIT,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := newBase(t)
			c := startChild(t, base, "serve")
			c.booted(t)
			require.NoError(t, syscall.Kill(-c.Process.Pid, sig))
			c.drained(t)
			requireNothingLeft(t, base)
		})
	}
	for _, end := range []string{"exit", "panic"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			base := newBase(t)
			startChild(t, base, end).drained(t)
			requireNothingLeft(t, base)
		})
	}
}

// `go test` reads a test's output to its end, and hangs if a process that the test
// left behind still has it open. And a server with an end of a pipe to its own
// watchdog would keep itself alive.
func TestStart_ServerHasNothingOfOursOpen(t *testing.T) {
	t.Parallel()
	srv := shared(t)
	watchdog, server := strconv.Itoa(devpg.WatchdogPID(srv)), strconv.Itoa(srv.PostmasterPID())
	if len(openFiles(server)) == 0 {
		t.Skip("there is no /proc to look at")
	}
	stdio := openFiles("self", "0", "1", "2")
	for _, ours := range stdio {
		assert.NotContains(t, openFiles(watchdog), ours)
	}
	pipes := openFiles(watchdog, "0", "1")
	require.Len(t, pipes, 2)
	for _, ours := range append(stdio, pipes...) {
		assert.NotContains(t, openFiles(server), ours)
	}
}

// openFiles names what a process has open as these descriptors, else as any. The
// null device does not count.
func openFiles(pid string, fds ...string) []string {
	if len(fds) == 0 {
		fds = []string{"*"}
	}
	var files []string
	for _, fd := range fds {
		links, _ := filepath.Glob("/proc/" + pid + "/fd/" + fd)
		for _, link := range links {
			if file, err := os.Readlink(link); err == nil && file != os.DevNull {
				files = append(files, file)
			}
		}
	}
	return files
}

// bootStages are moments of a boot, told from the files that are there.
var bootStages = []struct {
	name    string
	reached func(base string) bool
}{
	{"directory made", seen(1, "*")},
	{"initdb began", seen(1, "*/data")},
	{"initdb bootstraps", seen(1, "*/data/global/pg_control")},
	{"initdb goes on", seen(2, "*/data/base/*")}, // the second database
	{"postgres began", seen(1, "*/data/postmaster.opts")},
	{"postgres listens", seen(1, "*/.s.PGSQL.*")},
}

func seen(n int, pattern string) func(base string) bool {
	return func(base string) bool {
		found, _ := filepath.Glob(filepath.Join(base, pattern))
		return len(found) >= n
	}
}

func TestDeath_InTheMiddleOfABoot_LeavesNothing(t *testing.T) {
	for _, stage := range bootStages {
		t.Run(stage.name, func(t *testing.T) {
			t.Parallel()
			base := newBase(t)
			c := startChild(t, base, "serve")
			require.True(t, eventually(func() bool { return stage.reached(base) }))
			require.NoError(t, c.Process.Kill())
			c.drained(t)
			requireNothingLeft(t, base)
		})
	}
}

func TestDeath_OfOneOfTwoProcesses_LeavesTheOthersServer(t *testing.T) {
	t.Parallel()
	base := newBase(t)
	one, two := startChild(t, base, "serve"), startChild(t, base, "serve")
	one.booted(t)
	two.booted(t)
	require.Len(t, mustGlob(t, base, "*/data"), 2)

	require.NoError(t, one.Process.Kill())
	require.True(t, eventually(func() bool { return len(mustGlob(t, base, "*")) == 1 }))
	require.Len(t, mustGlob(t, base, "*/data/postmaster.pid"), 1)

	require.NoError(t, two.Process.Kill())
	requireNothingLeft(t, base)
}

func mustGlob(t *testing.T, base, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(base, pattern))
	require.NoError(t, err)
	return found
}
