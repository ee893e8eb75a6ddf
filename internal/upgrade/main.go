// Program upgrade runs an earlier state and this one on one schema during traffic, in the order of a rolling deployment, and then the way back.
//
//	go run ./internal/upgrade -from v1.2.0
//
// It builds internal/load from both, the earlier one in a git worktree of its own. A ledger tells whether everything that was sent was done, and exactly
// once where the effect is in the transaction that acknowledges. It runs at the root of the repository.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

//go:embed stages
var stages string

//go:embed load/main.go
var loadSource []byte

// sets are the directories of migrations.
var sets = []string{"migrations", "taskgraph/migrations", "eventbus/migrations"}

func main() {
	from := flag.String("from", "", "commit or tag of the earlier state; none: the newest stage whose migrations these continue, or else HEAD")
	length := flag.Duration("for", 5*time.Second, "how long each of the four phases takes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, ".", *from, *length); err != nil {
		fmt.Fprintln(os.Stderr, "upgrade:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, repository, from string, length time.Duration) (err error) {
	from, err = choose(ctx, repository, from)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "pgwake-upgrade")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	old, now, err := build(ctx, repository, from, dir)
	if err != nil {
		return err
	}
	server, err := devpg.Start(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	conn, err := pgx.Connect(ctx, server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	d, err := newDeployment(ctx, conn, server.URL, fmt.Sprintf("upgrade_%d", os.Getpid()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close(context.WithoutCancel(ctx))) }()
	return d.roll(ctx, old, now, length)
}

// git runs git in the repository, and returns what it says.
func git(ctx context.Context, repository string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", repository}, args...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// choose returns the commit of the earlier state.
func choose(ctx context.Context, repository, from string) (string, error) {
	if from != "" {
		commit, err := git(ctx, repository, "rev-parse", "--verify", from+"^{commit}")
		if err != nil {
			return "", err
		}
		changed, err := changedMigrations(ctx, repository, commit)
		if err == nil && changed != "" {
			err = fmt.Errorf("migrations of %s have changed since, or are gone, so its schema is refused (migrations.ErrForeign):\n%s", from, changed)
		}
		fmt.Printf("from %s\n", from)
		return commit, err
	}
	lines := strings.Split(strings.TrimSpace(stages), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		name, commit, _ := strings.Cut(lines[i], " ")
		changed, err := changedMigrations(ctx, repository, commit)
		if err != nil {
			return "", err
		}
		if changed == "" {
			fmt.Printf("from %s\n", name)
			return commit, nil
		}
	}
	fmt.Println("The migrations of every stage were edited since: until the first release they are. From HEAD, so that only the mechanism is tested.")
	return git(ctx, repository, "rev-parse", "HEAD")
}

// changedMigrations are the files of a state that are not the same here. What is new here is none of them.
func changedMigrations(ctx context.Context, repository, commit string) (string, error) {
	args := []string{"diff", "--name-only", "--diff-filter=a", commit, "--"}
	for _, set := range sets {
		args = append(args, ":(glob)"+set+"/*.sql")
		if _, err := git(ctx, repository, "cat-file", "-e", commit+":"+set); err != nil {
			return set + " is not there yet", nil
		}
	}
	return git(ctx, repository, args...)
}

// build builds the load of the earlier state, and that of now.
func build(ctx context.Context, repository, from, dir string) (old, now string, err error) {
	tree := filepath.Join(dir, "tree")
	if _, err := git(ctx, repository, "worktree", "add", "--detach", tree, from); err != nil {
		return "", "", err
	}
	defer func() {
		_, removed := git(context.WithoutCancel(ctx), repository, "worktree", "remove", "--force", tree)
		err = errors.Join(err, removed)
	}()
	load := filepath.Join(tree, "internal", "upgrade", "load")
	if err := os.MkdirAll(load, 0o755); err != nil {
		return "", "", err
	}
	if err := os.WriteFile(filepath.Join(load, "main.go"), loadSource, 0o644); err != nil {
		return "", "", err
	}
	old, now = filepath.Join(dir, "old"), filepath.Join(dir, "now")
	for in, binary := range map[string]string{tree: old, repository: now} {
		cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, "./internal/upgrade/load")
		cmd.Dir, cmd.Env = in, append(os.Environ(), "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", "", fmt.Errorf("build the load in %s: %w: %s", in, err, out)
		}
	}
	return old, now, nil
}
