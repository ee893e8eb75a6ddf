// Program upgrade runs an earlier state and this one on one schema during traffic, in the order of a rolling deployment, and then the way back.
//
//	go run ./internal/upgrade -from v1.2.0
//
// It builds internal/upgrade/load from both, the earlier one in a git worktree of its own. A ledger tells whether everything that was sent was done, and exactly
// once where the effect is in the transaction that acknowledges. The nodes are roles of docs/security.md. It runs at the root of the repository.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

func main() {
	from := flag.String("from", "", "commit or tag of the earlier state; none: each that choose finds")
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
	states, err := choose(ctx, repository, from)
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
	for _, s := range states {
		fmt.Printf("from %s\n", s.name)
		if err := deploy(ctx, conn, server.URL, repository, s, length); err != nil {
			return fmt.Errorf("from %s: %w", s.name, err)
		}
	}
	return nil
}

// deploy has one earlier state and this one work on a schema of their own.
func deploy(ctx context.Context, conn *pgx.Conn, url, repository string, from state, length time.Duration) (err error) {
	dir, err := os.MkdirTemp("", "pgwake-upgrade")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	old, now, err := build(ctx, repository, from.commit, dir)
	if err != nil {
		return err
	}
	page, err := os.ReadFile(filepath.Join(repository, "docs", "security.md"))
	if err != nil {
		return err
	}
	d, err := newDeployment(ctx, conn, url, fmt.Sprintf("upgrade_%d", os.Getpid()), string(page))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close(context.WithoutCancel(ctx))) }()
	return d.roll(ctx, old, now, length)
}
