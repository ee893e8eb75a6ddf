// Package testclock boots a PostgreSQL whose clock can be set while it runs. That of the tests cannot, so the two disagree as well.
package testclock

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/devpg"
)

// Server is one below libfaketime.
type Server struct {
	URL string

	offset string // file
}

// Start boots one, which ends with the test. The test is skipped where what that takes is not installed. Where it is, and no server starts, the
// test fails, but for programs that were given: libfaketime may be made for another C library than they are.
func Start(tb testing.TB) *Server {
	tb.Helper()
	library, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	programs, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if dir := os.Getenv("PGWAKE_PG_BIN"); dir != "" {
		programs = []string{filepath.Join(dir, "postgres")}
	}
	if len(library) == 0 || len(programs) == 0 {
		tb.Skip("needs libfaketime (Debian: faketime), and the programs of a server")
	}
	dir := tb.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // the server's user is another one
		tb.Fatal(err)
	}
	s := &Server{offset: filepath.Join(dir, "offset")}
	s.Set(tb, 0)
	real := filepath.Dir(programs[len(programs)-1])
	for program, setting := range map[string]string{
		"initdb": "",
		"postgres": fmt.Sprintf("LD_PRELOAD=%s FAKETIME_TIMESTAMP_FILE=%s FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1 ",
			library[0], s.offset),
	} {
		script := fmt.Sprintf("#!/bin/sh\n%sexec %s/%s \"$@\"\n", setting, real, program)
		if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	server, err := devpg.Start(tb.Context(), &devpg.Options{IgnoreURL: true, BinDir: dir})
	switch {
	case err != nil && os.Getenv("PGWAKE_PG_BIN") != "":
		tb.Skipf("the server at PGWAKE_PG_BIN does not start below libfaketime: %v", err)
	case err != nil:
		tb.Fatalf("no server can be booted below libfaketime: %v", err)
	}
	tb.Cleanup(func() {
		if err := server.Stop(context.Background()); err != nil {
			tb.Error(err)
		}
	})
	s.URL = server.URL
	return s
}

// Set has the server's clock show that of the machine and so much more, in whole seconds, from now on.
func (s *Server) Set(tb testing.TB, ahead time.Duration) {
	tb.Helper()
	next := s.offset + ".new"
	err := os.WriteFile(next, fmt.Appendf(nil, "%+d", int(ahead.Seconds())), 0o644)
	if err == nil {
		err = os.Rename(next, s.offset)
	}
	if err != nil {
		tb.Fatal(err)
	}
}
