//go:build unix

package main

// This test binary, run again with an environment variable, is withpg, or the
// command that withpg runs.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgwake/pgwake/devpg"
)

const envRole = "WITHPG_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(envRole) {
	case "withpg":
		os.Setenv(envRole, "command")
		main()
	case "command":
		askServer()
	default:
		os.Unsetenv("PGWAKE_DATABASE_URL")
		os.Unsetenv("DATABASE_URL")
		code := m.Run()
		var err error
		if shared.Server != nil {
			err = shared.Stop(context.Background())
		}
		if err = errors.Join(err, goleak.Find()); code == 0 && err != nil {
			fmt.Fprintf(os.Stderr, "the server that tests share does not end, or goroutines were left behind: %v\n", err)
			code = 1
		}
		os.Exit(code)
	}
}

// askServer prints what the server that it was given says about itself.
func askServer() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, os.Getenv("PGWAKE_DATABASE_URL"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	defer conn.Close(ctx)
	for _, setting := range []string{"data_directory", "fsync", "server_version"} {
		var value string
		if err := conn.QueryRow(ctx, "SHOW "+setting).Scan(&value); err != nil {
			value = err.Error()
		}
		fmt.Println(value)
	}
}

// withpg prepares withpg with a temporary directory that it has to itself.
func withpg(t *testing.T, args ...string) (cmd *exec.Cmd, base string) {
	t.Helper()
	base, err := os.MkdirTemp("", "withpg-test-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(base) })
	require.NoError(t, os.Chmod(base, 0o777))
	cmd = exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), envRole+"=withpg", "TMPDIR="+base,
		"GORACE=atexit_sleep_ms=0") // or each end takes a second under -race
	return cmd, base
}

// finish runs withpg to its end.
func finish(t *testing.T, cmd *exec.Cmd) (status int, stdout, stderr string) {
	t.Helper()
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	_ = cmd.Run()
	require.NotNil(t, cmd.ProcessState)
	return cmd.ProcessState.ExitCode(), out.String(), complaints.String()
}

// shared is a server for the tests that leave it as it is, which runs from the first of them to the end of the process.
var shared struct {
	sync.Once
	*devpg.Server
	err error
}

// needServer returns that server, and skips a test if none can be started on this machine.
func needServer(t *testing.T) *devpg.Server {
	t.Helper()
	shared.Do(func() { shared.Server, shared.err = devpg.Start(context.Background(), nil) })
	if errors.Is(shared.err, devpg.ErrNoServer) {
		t.Skip(shared.err)
	}
	require.NoError(t, shared.err)
	return shared.Server
}

func requireEmpty(t *testing.T, base string) {
	t.Helper()
	left := func() []string {
		found, _ := filepath.Glob(filepath.Join(base, "*"))
		return found
	}
	if !assert.Eventually(t, func() bool { return len(left()) == 0 }, 30*time.Second, 10*time.Millisecond) {
		t.Fatal(left())
	}
}

func TestWithpg_CommandHasTheServer_NothingIsLeft(t *testing.T) {
	needServer(t)
	for _, fsync := range []string{"off", "on"} {
		args := []string{"--", os.Args[0]}
		if fsync == "on" {
			args = append([]string{"-fsync"}, args...)
		}
		cmd, base := withpg(t, args...)
		status, out, stderr := finish(t, cmd)
		require.Zero(t, status, stderr)
		said := strings.Split(out, "\n")
		assert.True(t, strings.HasPrefix(said[0], base), said[0])
		assert.Equal(t, fsync, said[1])
		assert.Regexp(t, `^withpg: PostgreSQL \S+ from .*fsync `+fsync+`.*\n$`, stderr)
		left, err := os.ReadDir(base)
		require.NoError(t, err)
		assert.Empty(t, left, "withpg returns when the server is gone")
	}
}

func TestWithpg_ExitStatus_IsTheCommands(t *testing.T) {
	running := needServer(t)
	notExecutable := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.WriteFile(notExecutable, nil, 0o644))
	for want, command := range map[int][]string{
		0:                                   {"true"},
		7:                                   {"sh", "-c", "exit 7"},
		statusSignal + int(syscall.SIGKILL): {"sh", "-c", "kill -9 $$"},
		statusNotFound:                      {"no-such-command"},
		statusCannot:                        {notExecutable},
	} {
		cmd, base := withpg(t, append([]string{"--"}, command...)...)
		if want != 7 && want != statusNotFound { // one that ran and one that did not have a server of their own, which is stopped
			cmd.Env = append(cmd.Env, "DATABASE_URL="+running.URL)
		}
		status, _, stderr := finish(t, cmd)
		assert.Equal(t, want, status, "%v: %s", command, stderr)
		requireEmpty(t, base)
	}
}

func TestWithpg_WrongUse_SaysSo(t *testing.T) {
	for _, args := range [][]string{{}, {"-no-such-flag", "--", "true"}} {
		cmd, _ := withpg(t, args...)
		status, _, stderr := finish(t, cmd)
		assert.Equal(t, statusUsage, status)
		assert.Contains(t, stderr, "usage: withpg")
	}
	help, _ := withpg(t, "-h")
	status, _, usage := finish(t, help)
	assert.Zero(t, status)
	assert.Contains(t, usage, "usage: withpg")
	cmd, _ := withpg(t, "-pg", "16.3", "--", "true")
	status, _, stderr := finish(t, cmd)
	assert.Equal(t, statusNoServer, status)
	assert.Contains(t, stderr, `"16.3" is not a major version`)
}

func TestWithpg_URLInTheEnvironment(t *testing.T) {
	running := needServer(t)
	const print = `echo "$PGWAKE_DATABASE_URL"`

	t.Run("is used", func(t *testing.T) {
		cmd, _ := withpg(t, "--", "sh", "-c", print)
		cmd.Env = append(cmd.Env, "DATABASE_URL="+running.URL)
		status, out, stderr := finish(t, cmd)
		require.Zero(t, status, stderr)
		assert.Equal(t, running.URL+"\n", out)
		assert.Contains(t, stderr, " from DATABASE_URL ")
	})
	for _, flag := range []string{"-ignore-url", "-fsync"} {
		t.Run("is replaced with "+flag, func(t *testing.T) {
			cmd, _ := withpg(t, flag, "--", "sh", "-c", print)
			cmd.Env = append(cmd.Env, "PGWAKE_DATABASE_URL="+running.URL)
			status, out, stderr := finish(t, cmd)
			require.Zero(t, status, stderr)
			assert.NotEqual(t, running.URL+"\n", out)
			assert.Contains(t, out, "postgres://")
		})
	}
	t.Run("is kept unseen with -keep-url", func(t *testing.T) {
		cmd, _ := withpg(t, "-keep-url", "--", "sh", "-c", print)
		cmd.Env = append(cmd.Env, "PGWAKE_DATABASE_URL=postgres://elsewhere")
		status, out, stderr := finish(t, cmd)
		require.Zero(t, status, stderr)
		assert.Equal(t, "postgres://elsewhere\n", out)
		assert.Equal(t, "withpg: PGWAKE_DATABASE_URL is kept as it is\n", stderr)
	})
}

func TestWithpg_VersionAsked_CommandIsAskedForItToo(t *testing.T) {
	major, _, _ := strings.Cut(needServer(t).Version, ".")
	cmd, _ := withpg(t, "-pg", major, "--", "sh", "-c", "echo $PGWAKE_PG")
	cmd.Env = append(cmd.Env, "PGWAKE_PG=7")
	status, out, stderr := finish(t, cmd)
	require.Zero(t, status, stderr)
	assert.Equal(t, major+"\n", out)
}

// serving starts withpg with a command that goes on until it is told to end.
func serving(t *testing.T) (cmd *exec.Cmd, base string, command int) {
	t.Helper()
	cmd, base = withpg(t, "--", "sh", "-c",
		`trap 'exit 9' TERM; trap 'exit 10' INT; echo $$; while :; do sleep 0.02; done`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no terminal
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	_, err = fmt.Sscan(line, &command)
	require.NoError(t, err)
	return cmd, base, command
}

func TestWithpg_Signal_IsPassedOnAndTheServerStopped(t *testing.T) {
	needServer(t)
	for sig, want := range map[syscall.Signal]int{syscall.SIGTERM: 9, syscall.SIGINT: 10} {
		cmd, base, _ := serving(t)
		require.NoError(t, cmd.Process.Signal(sig))
		_ = cmd.Wait()
		assert.Equal(t, want, cmd.ProcessState.ExitCode())
		left, err := os.ReadDir(base)
		require.NoError(t, err)
		assert.Empty(t, left)
	}
}

func TestWithpg_Killed_NothingIsLeft(t *testing.T) {
	needServer(t)
	cmd, base, command := serving(t)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	requireEmpty(t, base)
	if runtime.GOOS == "linux" {
		require.Eventually(t, func() bool { return syscall.Kill(command, 0) != nil },
			30*time.Second, 10*time.Millisecond, "the command is left")
	}
}

func TestWithpg_SignalWhileItBoots_EndsItCleanly(t *testing.T) {
	needServer(t)
	cmd, base := withpg(t, "--", "echo", "the command ran")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, io.Discard
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		found, _ := filepath.Glob(filepath.Join(base, "*", "data"))
		return len(found) > 0
	}, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_ = cmd.Wait()
	assert.Equal(t, statusSignal+int(syscall.SIGTERM), cmd.ProcessState.ExitCode())
	assert.Empty(t, out.String())
	requireEmpty(t, base)
}
