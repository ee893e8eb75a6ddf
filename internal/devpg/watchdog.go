package devpg

// This process's side of the watchdog: its start, and words to and from it. The
// other side is watchdog.sh, which says what the words are.

import (
	"bytes"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

//go:embed watchdog.sh
var watchdogSource string

// watchdogScript is the source without its comments, as it goes onto a command
// line. No string in the script has a line that begins with #.
var watchdogScript = func() string {
	var b strings.Builder
	for line := range strings.Lines(watchdogSource) {
		if !strings.HasPrefix(strings.TrimSpace(line), "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}()

var errWatchdogEnded = errors.New("the watchdog has ended")

// watchdog is a running watchdog.sh. One caller at a time.
type watchdog struct {
	cmd      *exec.Cmd
	commands *os.File // its standard input; no other process has this end
	replies  *os.File // its standard output
	pending  []byte   // read, and not yet a line
}

// watch starts a watchdog, whose server has conf and env, and returns the directory that it made.
func watch(ctx context.Context, bin binaries, as *account, conf string, env []string) (*watchdog, string, error) {
	name := "pgwake-devpg-" + strings.ToLower(rand.Text()[:16])
	// The temporary directory of root need not be open to the server's user.
	dirs := slices.Compact([]string{filepath.Join(os.TempDir(), name), filepath.Join("/tmp", name)})

	// Both pipes are closed on exec, in this process and in every child of it but
	// the watchdog; so nobody keeps them open by accident.
	stdin, commands, err := os.Pipe()
	if err != nil {
		return nil, "", fmt.Errorf("start a watchdog: %w", err)
	}
	answers, stdout, err := os.Pipe()
	if err != nil {
		stdin.Close()
		commands.Close()
		return nil, "", fmt.Errorf("start a watchdog: %w", err)
	}
	// Standard error is /dev/null, and never ours: `go test` would wait for its end.
	args := append([]string{"-c", watchdogScript, "pgwake-devpg-watchdog", bin.dir, bin.lib, conf, pristine(bin)}, dirs...)
	cmd := exec.Command("/bin/sh", args...)
	cmd.Dir = "/"
	cmd.Env = env
	cmd.Stdin, cmd.Stdout = stdin, stdout
	as.run(cmd)
	err = cmd.Start()
	stdin.Close()
	stdout.Close()
	w := &watchdog{cmd: cmd, commands: commands, replies: answers}
	if err != nil {
		commands.Close()
		answers.Close()
		return nil, "", fmt.Errorf("start a watchdog: %w", err)
	}

	var dir string
	verb, arg, err := w.next(ctx)
	switch {
	case err == nil && verb == "dir":
		dir = arg
	case err == nil:
		err = fmt.Errorf("make a directory for the server: %s", arg)
	}
	if err != nil {
		w.release()
		return nil, "", errors.Join(err, w.wait())
	}
	return w, dir, nil
}

// pristine is where servers of these binaries share what initdb makes, or "".
func pristine(bin binaries) string {
	dir := os.Getenv(EnvPristine)
	if dir == "" {
		return ""
	}
	h := fnv.New64a()
	_, _ = io.WriteString(h, bin.dir+"\x00"+bin.lib)
	return filepath.Join(dir, fmt.Sprintf("pristine-%x", h.Sum64()))
}

// release is the signal to end everything. Its end comes by itself.
func (w *watchdog) release() { w.commands.Close() }

// wait returns when the watchdog has ended.
func (w *watchdog) wait() error {
	defer w.replies.Close()
	if err := w.cmd.Wait(); err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	return nil
}

// ask sends a command and returns the argument of its answer, and the exit status
// of the child if that ended meanwhile.
func (w *watchdog) ask(ctx context.Context, command, want string) (arg, ended string, err error) {
	if _, err := w.commands.WriteString(command + "\n"); err != nil {
		return "", "", fmt.Errorf("%w: %w", errWatchdogEnded, err)
	}
	for {
		verb, arg, err := w.next(ctx)
		switch {
		case err != nil:
			return "", "", err
		case verb == "exited":
			ended = arg
		case verb == want:
			return arg, ended, nil
		}
	}
}

// ended returns the child's exit status as soon as it ends, and "" if it still
// runs after patience.
func (w *watchdog) ended(ctx context.Context, patience time.Duration) (string, error) {
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, status, err := w.next(waiting)
	if err != nil && ctx.Err() == nil && waiting.Err() != nil {
		return "", nil
	}
	return status, err
}

// next is the next line, in two words. After a ctx that ended, the rest of a line
// is kept for the next call.
func (w *watchdog) next(ctx context.Context) (verb, arg string, err error) {
	// The read runs in this goroutine, so that none is left behind; the end of ctx
	// interrupts it by a deadline in the past.
	interrupted := make(chan struct{})
	release := context.AfterFunc(ctx, func() {
		_ = w.replies.SetReadDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	defer func() {
		if !release() {
			<-interrupted
			_ = w.replies.SetReadDeadline(time.Time{})
		}
	}()
	for {
		if line, rest, found := bytes.Cut(w.pending, []byte("\n")); found {
			w.pending = rest
			verb, arg, _ = strings.Cut(string(line), " ")
			return verb, arg, nil
		}
		buf := make([]byte, 512)
		n, err := w.replies.Read(buf)
		w.pending = append(w.pending, buf[:n]...)
		switch {
		case n > 0:
		case errors.Is(err, os.ErrDeadlineExceeded):
			return "", "", context.Cause(ctx)
		case err != nil:
			return "", "", fmt.Errorf("%w: %w", errWatchdogEnded, err)
		}
	}
}
