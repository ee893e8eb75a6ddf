// Command pgwake is what an operator works with: it migrates and examines a database of package pgwake, shows what goes on there,
// and takes a hand in it. docs/cli.md has every command with an example.
//
// It is built on the exported API of the library, and on the catalogs and views of PostgreSQL.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// This file answers: how does a process become a command?

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	code := run(ctx, os.Args[1:], world{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ(), now: time.Now})
	stop()
	os.Exit(code)
}

// world is what a command has around it, so that tests can be it.
type world struct {
	in       io.Reader
	out, err io.Writer
	environ  []string
	now      func() time.Time
}
