//go:build unix

package devpg_test

// What all tests here share: a child mode for the tests that kill processes, and
// a look at what a server leaves behind.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgwake/pgwake/internal/devpg"
)

func TestMain(m *testing.M) {
	if os.Getenv(envChild) != "" {
		childMain()
		return
	}
	// Whatever server the rest of a test run uses is not to be touched here.
	os.Unsetenv(devpg.EnvURL)
	os.Unsetenv(devpg.EnvFallbackURL)
	goleak.VerifyTestMain(m)
}

// common is the server of all tests that only look at one. It ends with the
// process, as it should.
var common = sync.OnceValues(func() (*devpg.Server, error) {
	return devpg.Start(context.Background(), &devpg.Options{IgnoreURL: true})
})

func shared(t *testing.T) *devpg.Server {
	t.Helper()
	needBinaries(t)
	srv, err := common()
	require.NoError(t, err)
	return srv
}

// start boots a server and stops it after the test. Without binaries on the
// machine there is nothing to test; binaries that do not boot are a failure.
func start(t *testing.T, opts *devpg.Options) *devpg.Server {
	t.Helper()
	needBinaries(t)
	srv, err := devpg.Start(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { stop(t, srv) })
	return srv
}

func needBinaries(t *testing.T) {
	t.Helper()
	if len(devpg.Candidates(t.Context(), os.Getenv(devpg.EnvBinDir))) == 0 {
		t.Skip("there are no PostgreSQL server binaries on this machine")
	}
}

func stop(t *testing.T, srv *devpg.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, srv.Stop(ctx))
}

// query returns the one value that sql yields on the server at url.
func query(ctx context.Context, url, sql string) (string, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	results, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	if err != nil || len(results) == 0 || len(results[len(results)-1].Rows) == 0 {
		return "", err
	}
	return string(results[len(results)-1].Rows[0][0]), nil
}

func mustQuery(t *testing.T, srv *devpg.Server, sql string) string {
	t.Helper()
	value, err := query(t.Context(), srv.URL, sql)
	require.NoError(t, err, sql)
	return value
}

// home is the directory that is the server's own.
func home(srv *devpg.Server) string { return filepath.Dir(srv.DataDir()) }

// newBase makes a directory for temporary files, so that all that is in it is of
// the test. It is open to the user that the server runs as.
func newBase(t *testing.T) string {
	t.Helper()
	base, err := os.MkdirTemp("", "devpg-test-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(base) })
	require.NoError(t, os.Chmod(base, 0o777))
	return base
}

// tempBase makes a new base the place for the temporary files of this process.
func tempBase(t *testing.T) string {
	t.Helper()
	base := newBase(t)
	t.Setenv("TMPDIR", base)
	return base
}

// remains lists what there is of a server whose home is dir, or of all that have
// their home in the base dir: files, and processes that work there or have the
// directory on their command line.
func remains(dir string) []string {
	return append(remainingFiles(dir), remainingProcesses(dir)...)
}

func remainingFiles(dir string) (found []string) {
	if strings.HasPrefix(filepath.Base(dir), "pgwake-devpg-") {
		if _, err := os.Stat(dir); err == nil {
			found = append(found, dir)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		found = append(found, err.Error())
	}
	for _, e := range entries {
		found = append(found, filepath.Join(dir, e.Name()))
	}
	return found
}

func remainingProcesses(dir string) (found []string) {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range procs {
		cwd, _ := os.Readlink(proc + "/cwd")
		args, _ := os.ReadFile(proc + "/cmdline")
		if strings.HasPrefix(cwd, dir) || bytes.Contains(args, []byte(dir)) {
			found = append(found, fmt.Sprintf("%s in %s: %.60q", proc, cwd, args))
		}
	}
	if len(procs) == 0 { // no /proc: macOS
		out, _ := exec.Command("ps", "-A", "-o", "pid=,args=").Output()
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, dir) {
				found = append(found, line)
			}
		}
	}
	return found
}

// requireNothingLeft waits until remains finds nothing. It looks at all processes of the machine only when no file is left, which is late.
func requireNothingLeft(t *testing.T, dir string) {
	t.Helper()
	if !eventually(func() bool { return len(remainingFiles(dir)) == 0 && len(remainingProcesses(dir)) == 0 }) {
		require.Empty(t, remains(dir))
	}
}

// eventually observes until seen, for at most half a minute.
func eventually(seen func() bool) bool {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-tick.C {
		if seen() {
			return true
		}
	}
	return seen()
}
