package pgwake_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: does the tutorial work, word for word?
//
// Its blocks are carried out in their order: sh in one shell from the first to the last, sql on a connection, go as the file that was named in bold
// before it. A block of text is what comes of that: rows, or lines that the programs print, in any order, where … stands for anything.

type lesson struct{ language, text, file string }

func lessons(t *testing.T, path string) (all []lesson) {
	t.Helper()
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	file, language, text := "", "", ""
	named := regexp.MustCompile(`\*\*([\w/]+\.go)\*\*`)
	for line := range strings.Lines(string(page)) {
		fence, isFence := strings.CutPrefix(line, "```")
		switch {
		case isFence && language == "":
			language, text = strings.TrimSpace(fence), ""
		case isFence:
			all = append(all, lesson{language, text, file})
			language = ""
		case language != "":
			text += line
		default:
			if m := named.FindStringSubmatch(line); m != nil {
				file = m[1]
			}
		}
	}
	return all
}

// terminal is a shell, and all that it says, and what it starts.
type terminal struct {
	input io.Writer
	done  chan error // the shell has ended

	mu   sync.Mutex
	said bytes.Buffer
}

func (s *terminal) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.said.Write(p)
}

func (s *terminal) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.said.String()
}

func newTerminal(t *testing.T, dir string, environment ...string) *terminal {
	t.Helper()
	s := &terminal{done: make(chan error, 1)}
	shell := exec.Command("bash", "-e")
	shell.Dir, shell.Stdout, shell.Stderr, shell.Env = dir, s, s, append(os.Environ(), environment...)
	input, err := shell.StdinPipe()
	require.NoError(t, err)
	s.input = input
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	shell.WaitDelay = time.Second // for what it started in the background, and left
	require.NoError(t, shell.Start())
	go func() { s.done <- shell.Wait() }()
	t.Cleanup(func() {
		_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL)
		<-s.done
	})
	return s
}

// run carries out commands, and returns when they are done.
func (s *terminal) run(t *testing.T, commands, mark string) {
	t.Helper()
	_, err := io.WriteString(s.input, commands+"\necho '"+mark+"'\n")
	require.NoError(t, err)
	s.expect(t, 0, mark)
}

// expect waits until something like the line was said after so many bytes.
func (s *terminal) expect(t *testing.T, from int, line string) {
	t.Helper()
	parts := strings.Split(line, "…")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	like := regexp.MustCompile(`(?m)^` + strings.Join(parts, ".*") + `$`)
	said := func() bool { return like.MatchString(s.text()[from:]) }
	require.Eventually(t, func() bool { return said() || len(s.done) > 0 }, 10*patience, patience/1000, "%q in\n%s", line, s)
	require.True(t, said(), "a command failed before there was %q in\n%s", line, s)
}

func (s *terminal) String() string { return s.text() }

// cells takes a table as psql shows it apart, without its heading.
func cells(table string) (rows [][]string) {
	_, table, _ = strings.Cut(table, "+--")
	_, table, _ = strings.Cut(table, "\n")
	for line := range strings.Lines(table) {
		var row []string
		for cell := range strings.SplitSeq(line, "|") {
			row = append(row, strings.TrimSpace(cell))
		}
		rows = append(rows, row)
	}
	return rows
}

func isTable(l lesson) bool { return l.language == "text" && strings.Contains(l.text, "-+-") }

// inPsql carries statements out, and returns the rows of all.
func inPsql(ctx context.Context, conn *pgx.Conn, sql string) (rows [][]string, err error) {
	for statement := range strings.SplitSeq(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(sql), ";")), ";\n") {
		answer, err := conn.Query(ctx, statement, pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			return nil, err
		}
		for answer.Next() {
			var row []string
			for _, value := range answer.RawValues() {
				row = append(row, string(value))
			}
			rows = append(rows, row)
		}
		if answer.Err() != nil {
			return nil, answer.Err()
		}
	}
	return rows, nil
}

func TestTutorial_WordForWord_Works(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("there is no bash")
	}
	clone, err := os.Getwd()
	require.NoError(t, err)
	database := fmt.Sprintf("tutorial_%d", os.Getpid()) // the tutorial is on the default schema
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
	url := inDatabase(t, database)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	dir := t.TempDir()
	environment := []string{"HOME=" + dir, "PGWAKE=" + clone, "DATABASE_URL=" + url, "PGWAKE_DATABASE_URL=" + url}
	for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOENV"} { // which are in another home
		value, err := exec.Command("go", "env", name).Output()
		require.NoError(t, err)
		environment = append(environment, name+"="+strings.TrimSpace(string(value)))
	}
	// Nobody debugs what is built.
	flags, err := exec.Command("go", "env", "GOFLAGS").Output()
	require.NoError(t, err)
	environment = append(environment, "GOFLAGS="+strings.TrimSpace(strings.TrimSpace(string(flags))+" -ldflags=-w"))
	shell := newTerminal(t, clone, environment...) // where the page has whoever has no server begin

	from := 0
	all := lessons(t, "docs/tutorial.md")
	require.NotEmpty(t, all)
	for i, l := range all {
		switch l.language {
		case "go":
			file := filepath.Join(dir, "shop", l.file)
			require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
			require.NoError(t, os.WriteFile(file, []byte(l.text), 0o644))
		case "sh":
			from = len(shell.text())
			shell.run(t, l.text, fmt.Sprintf("lesson %d is done", i))
		case "sql":
			from = len(shell.text())
			if next := all[i+1:]; len(next) > 0 && isTable(next[0]) { // what a program says may come a moment before it is in the database
				require.Eventually(t, func() bool {
					rows, err := inPsql(t.Context(), conn, l.text)
					return err == nil && reflect.DeepEqual(cells(next[0].text), rows)
				}, patience, patience/1000, "%s\n%s", l.text, next[0].text)
				continue
			}
			_, err := inPsql(t.Context(), conn, l.text)
			require.NoError(t, err, l.text)
		case "text":
			if isTable(l) {
				continue // compared with what the statement before has returned
			}
			for line := range strings.Lines(l.text) {
				shell.expect(t, from, strings.TrimSuffix(line, "\n"))
			}
		default:
			require.Fail(t, "what is to be done with such a block?", l.language)
		}
	}
	require.NoDirExists(t, filepath.Join(dir, "shop"), "the last step cleans up")
}
