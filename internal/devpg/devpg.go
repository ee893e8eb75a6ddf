// Package devpg finds or boots a PostgreSQL for demos and tests.
//
//	srv, err := devpg.Start(ctx, nil)
//	if err != nil {
//		return err // says the three ways to get a PostgreSQL, and why each failed
//	}
//	defer srv.Stop(context.Background())
//	pool, err := pgxpool.New(ctx, srv.URL)
//
// The first that works is taken:
//
//  1. the server at $PGWAKE_DATABASE_URL, then the one at $DATABASE_URL;
//  2. server binaries on this machine: initdb and postgres from $PGWAKE_PG_BIN,
//     or else from PATH, from `pg_config --bindir` and from where packages put
//     them.
//
// Module github.com/pgwake/pgwake/devpg goes on with Docker and with a download;
// its dependencies are the reason that it is a module of its own.
//
// # A booted server
//
// It has its own directory under os.TempDir and its own port on 127.0.0.1, so any
// number of them may run side by side. It trusts every local connection: it is
// for data that nobody needs to keep or to hide. Run by root, the server runs as
// user postgres, or nobody if there is no such user, as PostgreSQL refuses root.
//
// It ends with its process, and so does its directory: after Stop, after Ctrl-C,
// SIGTERM and a panic, and after kill -9. The process holds one end of a pipe,
// and a small shell in a session of its own, the watchdog, holds the other and
// stops the server at end of file (watchdog.sh). Only a kill -9 of process and
// watchdog together leaves a server behind.
//
// No goroutine runs on behalf of a server between calls, so that tests that look
// for leaked goroutines find none here.
package devpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
)

// The environment that Start reads. The two URLs are read in this order. EnvPristine is a directory where servers share what
// initdb makes, so that it runs once for all of them: withpg -keep-sessions sets it, and removes the directory.
const (
	EnvURL         = "PGWAKE_DATABASE_URL"
	EnvFallbackURL = "DATABASE_URL"
	EnvVersion     = "PGWAKE_PG"
	EnvBinDir      = "PGWAKE_PG_BIN"
	EnvPristine    = "PGWAKE_DEVPG_PRISTINE"
)

// OldestMajor is the oldest PostgreSQL that pgwake supports. An older one is
// taken only if it is asked for by its version.
const OldestMajor = 14

// Options say which PostgreSQL is wanted. The zero value takes the first one that
// is found.
type Options struct {
	// Version is a major version such as "16". A server of another version is
	// passed over. Defaults to $PGWAKE_PG, else to any that pgwake supports.
	Version string

	// BinDir is the directory of initdb and postgres. If it is set, binaries are
	// looked for nowhere else; a URL in the environment still comes first, unless
	// IgnoreURL. Defaults to $PGWAKE_PG_BIN, else to all usual places.
	BinDir string

	// Fsync makes a booted server write as a server in production does, which
	// benchmarks need. Without it fsync and full_page_writes are off, and a crash
	// of the machine loses the data; a crash of the server does not.
	// synchronous_commit is on in both cases. Defaults to false.
	Fsync bool

	// Settings are further settings for a booted server, as in postgresql.conf,
	// such as "max_connections": "20". They win over the ones that this package
	// chooses. Defaults to none.
	Settings map[string]string

	// IgnoreURL boots a server even if the environment has the URL of one: for
	// tests that break servers. Defaults to false.
	IgnoreURL bool

	// Logf is told in one line which server was taken, and of each that was passed
	// over. It is called only during Start. Defaults to silence.
	Logf func(format string, args ...any)
}

// Start returns the first server that works, as the package comment says. If none
// does, the error is a [*NoServerError], and errors.Is(err, ErrNoServer). The
// caller stops the server with [Server.Stop].
//
// A boot takes one to two seconds on a small machine; ctx bounds it. Start is safe
// for concurrent use, in one process and across processes.
func Start(ctx context.Context, opts *Options) (*Server, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	none := &NoServerError{}
	pass := func(way string, err error) {
		if !errors.Is(err, errNotSet) {
			o.Logf("devpg: not %s: %v", way, err)
		}
		none.Tried = append(none.Tried, Attempt{Way: way, Err: err})
	}

	srv := fromURL(ctx, o, pass)
	if srv == nil {
		srv = fromBinaries(ctx, o, pass)
	}
	if err := ctx.Err(); err != nil {
		if srv != nil {
			_ = srv.Stop(context.WithoutCancel(ctx))
		}
		return nil, fmt.Errorf("start a PostgreSQL: %w", context.Cause(ctx))
	}
	if srv == nil {
		return nil, none
	}
	o.Logf("devpg: PostgreSQL %s from %s", srv.Version, srv.Source)
	return srv, nil
}

var (
	majorVersion = regexp.MustCompile(`^[1-9][0-9]*$`)
	settingName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?$`)
)

// withDefaults returns a copy that is complete and valid.
func (o *Options) withDefaults() (*Options, error) {
	full := Options{}
	if o != nil {
		full = *o
	}
	if full.Version == "" {
		full.Version = os.Getenv(EnvVersion)
	}
	if full.BinDir == "" {
		full.BinDir = os.Getenv(EnvBinDir)
	}
	if full.Logf == nil {
		full.Logf = func(string, ...any) {}
	}
	if full.Version != "" && !majorVersion.MatchString(full.Version) {
		return nil, fmt.Errorf(`start a PostgreSQL: version %q is not a major version such as "16"`, full.Version)
	}
	for name, value := range full.Settings {
		if !settingName.MatchString(name) {
			return nil, fmt.Errorf("start a PostgreSQL: %q is not the name of a setting", name)
		}
		if containsControl(value) {
			return nil, fmt.Errorf("start a PostgreSQL: setting %s: value %q has a control character", name, value)
		}
	}
	return &full, nil
}

// accepts says why a server of this version is not what is wanted, or nil.
func (o *Options) accepts(version string) error {
	major := majorOf(version)
	if o.Version != "" && strconv.Itoa(major) != o.Version {
		return fmt.Errorf("it is PostgreSQL %s, and %s is asked for", version, o.Version)
	}
	if o.Version == "" && major < OldestMajor {
		return fmt.Errorf("it is PostgreSQL %s, and %d is the oldest that pgwake supports", version, OldestMajor)
	}
	return nil
}
