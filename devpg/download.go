package devpg

// The fourth way to a server: binaries that embedded-postgres downloads. It only
// fetches and unpacks them. The server is booted by internal/devpg, which ends it
// with this process and runs it for root too; embedded-postgres does neither.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"

	"github.com/pgwake/pgwake/internal/devpg"
)

// repository has the archives: Maven Central. Tests have their own.
var repository = "https://repo1.maven.org/maven2"

// downloads are the versions that embedded-postgres knows, by major version.
var downloads = map[string]embeddedpostgres.PostgresVersion{
	"14": embeddedpostgres.V14,
	"15": embeddedpostgres.V15,
	"16": embeddedpostgres.V16,
	"17": embeddedpostgres.V17,
	"18": embeddedpostgres.V18,
}

func fromDownload(ctx context.Context, o *Options) (*Server, error) {
	version, known := downloads[o.Version]
	if !known {
		return nil, fmt.Errorf("there is no download of PostgreSQL %s", o.Version)
	}
	cache, err := cacheDir(o)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "postgres-"+string(version))
	if !complete(dir) {
		if err := within(ctx, func() error { return download(cache, dir, version) }); err != nil {
			return nil, fmt.Errorf("download PostgreSQL %s: %w", version, err)
		}
	}

	local := o.local()
	local.BinDir, local.IgnoreURL, local.Logf = filepath.Join(dir, "bin"), true, nil
	srv, err := devpg.Start(ctx, local)
	var none *devpg.NoServerError
	if errors.As(err, &none) && len(none.Tried) > 0 {
		err = none.Tried[len(none.Tried)-1].Err // the only place that was tried
	}
	if err != nil {
		return nil, err
	}
	srv.Source = "embedded-postgres, " + srv.Source
	return fromLocal(srv), nil
}

func cacheDir(o *Options) (string, error) {
	switch {
	case o.CacheDir != "":
		return filepath.Abs(o.CacheDir)
	case os.Geteuid() == 0: // root's own cache is closed to the server's user
		return "/var/cache/pgwake", nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a place for a download: %w", err)
	}
	return filepath.Join(dir, "pgwake"), nil
}

// complete says whether dir has been unpacked. A directory gets its name only when
// it has been.
func complete(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "bin", "initdb"))
	return err == nil
}

// download fetches a version and unpacks it to dir, through a temporary directory
// beside it, so that several processes may do so at once.
func download(cache, dir string, version embeddedpostgres.PostgresVersion) error {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)

	// embedded-postgres can unpack only on the way to starting a server. A data
	// directory that has nothing but its version ends that way after the unpacking,
	// with an error that is expected.
	data := filepath.Join(temp, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(string(version)), 0o600); err != nil {
		return err
	}
	unpacked := filepath.Join(temp, "unpacked")
	defer forgottenLogs()()
	err = embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(version).
		Port(0). // never listened on; 0 passes the check for a free port
		BinaryRepositoryURL(repository).
		CachePath(filepath.Join(temp, "archive")).
		RuntimePath(filepath.Join(temp, "run")).
		DataPath(data).
		BinariesPath(unpacked).
		Logger(io.Discard)).Start()
	if !complete(unpacked) {
		if err == nil {
			err = errors.New("the archive has no initdb")
		}
		return err
	}
	if err := os.Rename(unpacked, dir); err != nil && !complete(dir) {
		return err
	}
	return nil
}

// forgottenLogs notes which log files of embedded-postgres there are, and returns
// a function that removes those that have come since: it leaves them behind.
func forgottenLogs() func() {
	pattern := filepath.Join(os.TempDir(), "embedded_postgres_log*")
	before, _ := filepath.Glob(pattern)
	return func() {
		after, _ := filepath.Glob(pattern)
		for _, path := range after {
			if !slices.Contains(before, path) {
				_ = os.Remove(path)
			}
		}
	}
}

// within runs f, which knows no ctx, and returns when either ends.
func within(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
