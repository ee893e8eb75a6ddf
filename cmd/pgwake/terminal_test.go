//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does all of it work in a real terminal?

// terminal is a shell in tmux, with the command in its PATH.
type terminal struct {
	t      *testing.T
	socket string
}

func newTerminal(t *testing.T, c *cli) *terminal {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("needs tmux, which is not installed here")
	}
	dir, err := os.MkdirTemp("", "pgwake-tmux-") // the path of a socket may not be long
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	program, err := os.Executable()
	require.NoError(t, err)
	require.NoError(t, os.Symlink(program, filepath.Join(dir, "pgwake")))
	term := &terminal{t, filepath.Join(dir, "socket")}
	term.tmux("-f", os.DevNull, "new-session", "-d", "-x", "120", "-y", "40", "env", "PATH="+dir+":"+os.Getenv("PATH"), asCommand+"=1", "LC_ALL=C.UTF-8",
		"PGWAKE_DATABASE_URL="+c.url, "PGWAKE_SCHEMA="+c.schema, "sh")
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", term.socket, "kill-server").Run() })
	return term
}

func (term *terminal) tmux(args ...string) string {
	term.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-u", "-S", term.socket}, args...)...).CombinedOutput()
	require.NoError(term.t, err, "%s", out)
	return string(out)
}

// types a line.
func (term *terminal) types(line string) {
	term.t.Helper()
	term.tmux("send-keys", "-l", line)
	term.tmux("send-keys", "Enter")
}

func (term *terminal) presses(keys ...string) { term.tmux(append([]string{"send-keys"}, keys...)...) }

func (term *terminal) screen(options ...string) string {
	return term.tmux(append([]string{"capture-pane", "-p"}, options...)...)
}

// shows waits until the screen has all of the texts.
func (term *terminal) shows(texts ...string) {
	term.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(30 * time.Millisecond) {
		screen := term.screen()
		missing := ""
		for _, text := range texts {
			if !strings.Contains(screen, text) {
				missing = text
			}
		}
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			term.t.Fatalf("%q is not on the screen:\n%s", missing, screen)
		}
	}
}

func TestTerminal_TopDoctorAndAQuestion(t *testing.T) {
	t.Parallel()
	c, p := newCLI(t, &pgwake.Config{})
	term := newTerminal(t, c)
	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "no such printer")

	term.types("pgwake top --every 200ms; echo ended $?")
	term.shows("pgwake top", "overview", "hybrid", "dead letters 1")
	for i := range 3 {
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: fmt.Sprintf("live-%d", i)})
		require.NoError(t, err)
	}
	term.presses("Tab")
	term.shows("live-0", "live-2", "OLDEST")
	term.presses("?")
	term.shows("page before", "hold, go on")
	term.presses("?", "p")
	term.shows("held")
	term.tmux("resize-window", "-x", "60", "-y", "15")
	term.shows("held", "live-0")
	term.tmux("resize-window", "-x", "120", "-y", "40")
	term.presses("q")
	term.shows("ended 0")

	term.types("clear; pgwake doctor; echo ended $?")
	term.shows("dead letters", "no such printer", "ended 0")
	require.Contains(t, term.screen("-e"), "\x1b[", "in colours")
	term.types("clear; pgwake doctor | od -c | grep -c 033; echo ended $?")
	term.shows("ended 1") // none was found

	term.types("clear; pgwake dlq purge --all; echo ended $?")
	term.shows("Purge 1 dead letter for good? [y/N]")
	term.types("n")
	term.shows("nothing was done", "ended 1")
	term.types("clear; pgwake dlq purge --all; echo ended $?")
	term.shows("[y/N]")
	term.types("y")
	term.shows("purged", "ended 0")

	bury(t, p, pgwake.WorkItem{Name: "mail.send"}, "no such recipient")
	term.types("clear; pgwake tail letters --all; echo ended $?")
	term.shows("no such recipient")
	term.presses("C-c")
	term.shows("ended 0")
}
