package pgwake_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: does the way to back up that docs/operations.md shows bring everything back?

// clientBinaries is the directory of a pg_dump that can talk to the server.
func clientBinaries(t *testing.T, version string) string {
	t.Helper()
	dirs := []string{os.Getenv("PGWAKE_PG_BIN"), "/usr/lib/postgresql/" + version + "/bin"}
	if path, err := exec.LookPath("pg_dump"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, dir := range dirs {
		out, err := exec.Command(filepath.Join(dir, "pg_dump"), "--version").Output()
		if err == nil && strings.Contains(string(out), ") "+version) {
			if _, err := os.Stat(filepath.Join(dir, "psql")); err == nil {
				return dir
			}
		}
	}
	t.Skipf("there is no pg_dump of PostgreSQL %s", version)
	return ""
}

func TestDocs_Operations_DumpAndRestore_BringsBackWhatWasQueuedAndLeased(t *testing.T) {
	t.Parallel()
	var script string
	blocks, _ := fences(docPages(t)["docs/operations.md"], "sh")
	for _, b := range blocks {
		if strings.Contains(b, "pg_dump") {
			script = b
		}
	}
	require.NotEmpty(t, script)
	var urls []string
	for _, name := range []string{"from", "to"} {
		database := fmt.Sprintf("backup_%s_%d", name, os.Getpid())
		testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
		t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
		urls = append(urls, inDatabase(t, database))
	}
	conn, err := pgx.Connect(t.Context(), urls[0])
	require.NoError(t, err)
	defer conn.Close(t.Context())
	var version string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT split_part(current_setting('server_version'), '.', 1)`).Scan(&version))
	binaries := clientBinaries(t, version)

	const lease = 3 * time.Second
	p, err := pgwake.Open(t.Context(), urls[0], nil)
	require.NoError(t, err)
	for _, name := range []string{"leased", "due", "dead"} {
		_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name}, nil)
		require.NoError(t, err)
	}
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "delayed"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease})
	require.NoError(t, err)
	others, err := p.FetchWorkItems(t.Context(), 2, nil)
	require.NoError(t, err)
	require.NoError(t, p.AbandonWorkItem(t.Context(), others[0].LockToken, nil))
	require.NoError(t, p.DeadLetterWorkItem(t.Context(), others[1].LockToken, "no use", ""))
	require.NoError(t, p.Close(t.Context()))

	shell := exec.CommandContext(t.Context(), "bash", "-ec", script)
	shell.Dir = t.TempDir()
	shell.Env = append(os.Environ(), "DATABASE_URL="+urls[0], "OTHER_URL="+urls[1], "PATH="+binaries+":"+os.Getenv("PATH"))
	out, err := shell.CombinedOutput()
	require.NoError(t, err, "%s", out)

	p, err = pgwake.Open(t.Context(), urls[1], nil)
	require.NoError(t, err)
	defer p.Close(t.Context())
	for _, want := range []string{"due", "leased"} {
		item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
		require.NoError(t, err)
		require.Equal(t, want, item.Name)
		require.NoError(t, p.AckWorkItem(t.Context(), item.LockToken, nil))
	}
	depths, err := p.GetQueueDepths(t.Context())
	require.NoError(t, err)
	require.Len(t, depths, 1)
	require.EqualValues(t, 1, depths[0].Delayed)
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, "dead", letters[0].Name)
}
