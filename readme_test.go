package pgwake_test

import (
	"bufio"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// The README's first program is built as it stands there, and does what it says.
func TestReadme_FirstProgram_BuildsAndRuns(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	programs := regexp.MustCompile("(?s)```go\n(package main\n.*?)```").FindAllSubmatch(readme, -1)
	require.Len(t, programs, 1)
	dir := t.TempDir()
	source, binary := filepath.Join(dir, "main.go"), filepath.Join(dir, "first")
	require.NoError(t, os.WriteFile(source, programs[0][1], 0o644))
	out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-o", binary, source).CombinedOutput()
	require.NoError(t, err, "%s", out)

	// It uses the default schema, so it gets a database of its own.
	database := fmt.Sprintf("readme_%d", os.Getpid())
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
	program := exec.CommandContext(t.Context(), binary)
	program.Env = append(os.Environ(), "DATABASE_URL="+inDatabase(t, database))
	program.Stderr = os.Stderr
	output, err := program.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, program.Start())
	line, err := bufio.NewReader(output).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, `email.send {"to":"ada"}`+"\n", line)
	require.NoError(t, program.Process.Signal(os.Interrupt))
	require.NoError(t, program.Wait())
	var left int
	conn, err := pgx.Connect(t.Context(), inDatabase(t, database))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pgwake.worker_queue`).Scan(&left))
	require.Zero(t, left, "it was interrupted before it acknowledged")

	forgotten := exec.CommandContext(t.Context(), binary)
	forgotten.Env = append(os.Environ(), "DATABASE_URL=")
	out, err = forgotten.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "DATABASE_URL is not set")
}

// inDatabase returns the URL of another database on the tests' server.
func inDatabase(t *testing.T, name string) string {
	t.Helper()
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	u := url.URL{Scheme: "postgres", Path: "/" + name, RawQuery: url.Values{
		"host": {config.Host}, "port": {fmt.Sprint(config.Port)}, "user": {config.User}, "password": {config.Password}}.Encode()}
	return u.String()
}
