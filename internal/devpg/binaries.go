package devpg

// The second way to a server: initdb and postgres on this machine. Where they
// are, and whether they run for the user that they would run as.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// binaries is a directory whose initdb and postgres run. Nothing else is expected
// in it: the packages that carry PostgreSQL in other ecosystems have neither psql
// nor createdb nor pg_config.
type binaries struct {
	dir     string
	lib     string // LD_LIBRARY_PATH that they need; "" if none
	version string // such as "15.18"
}

// packageDirs is where packages put server binaries.
var packageDirs = []string{
	"/usr/lib/postgresql/*/bin",         // Debian, Ubuntu
	"/usr/pgsql-*/bin",                  // Red Hat with PostgreSQL's own packages
	"/usr/libexec/postgresql*",          // Alpine
	"/opt/homebrew/opt/postgresql*/bin", // Homebrew, on Apple's processors
	"/usr/local/opt/postgresql*/bin",    // Homebrew, on Intel's
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/usr/local/pgsql/bin", // built from source
}

// fromBinaries boots the first directory of binaries that works, or returns nil
// after it has told pass why none does.
func fromBinaries(ctx context.Context, o *Options, pass func(string, error)) *Server {
	const way = "server binaries"
	as, err := serverAccount()
	if err != nil {
		pass(way, err)
		return nil
	}
	dirs := candidates(ctx, o.BinDir)
	if len(dirs) == 0 {
		pass(way, errors.New("no initdb and postgres in PATH, in pg_config --bindir or where packages put them"))
	}
	for _, dir := range dirs {
		bin, err := inspect(ctx, dir, as)
		if err == nil {
			err = o.accepts(bin.version)
		}
		var c *cluster
		if err == nil {
			c, err = boot(ctx, bin, as, o)
		}
		if err != nil {
			pass(dir, err)
			continue
		}
		return &Server{
			URL:     c.url(),
			Source:  fmt.Sprintf("%s on port %d%s, %s", dir, c.port, as.suffix(), Durability(o.Fsync)),
			Version: bin.version,
			cluster: c,
		}
	}
	return nil
}

// candidates are the directories that may have the binaries, best first, each
// once. A directory that was asked for is the only one.
func candidates(ctx context.Context, asked string) []string {
	if asked != "" {
		return []string{asked}
	}
	dirs := filepath.SplitList(os.Getenv("PATH"))
	dirs = append(dirs, pgConfig(ctx, "pg_config", "--bindir"))
	for _, pattern := range packageDirs {
		found, _ := filepath.Glob(pattern)
		dirs = append(dirs, newestFirst(found)...)
	}
	var usable []string
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) || !exists(filepath.Join(dir, "postgres")) {
			continue
		}
		if dir = home(dir); !slices.Contains(usable, dir) {
			usable = append(usable, dir)
		}
	}
	return usable
}

// home is the directory that the links in dir lead to, if all is there: one
// installation may be in PATH as well as in its own place.
func home(dir string) string {
	real, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
	if err != nil || !exists(filepath.Join(filepath.Dir(real), "initdb")) {
		return dir
	}
	return filepath.Dir(real)
}

var lastNumber = regexp.MustCompile(`([0-9]+)[^0-9]*$`)

// newestFirst sorts by the last number in each path; one without a number, such
// as Homebrew's link to its latest, comes first.
func newestFirst(dirs []string) []string {
	number := func(dir string) int {
		if m := lastNumber.FindStringSubmatch(dir); m != nil {
			n, _ := strconv.Atoi(m[1])
			return n
		}
		return 1 << 30
	}
	slices.SortStableFunc(dirs, func(a, b string) int { return cmp.Compare(number(b), number(a)) })
	return dirs
}

var versionLine = regexp.MustCompile(`\(PostgreSQL\) ([0-9]\S*)`)

// inspect runs both programs, as the user that the server will run as. It tries
// again with the libraries beside them: not all packages record where those are.
func inspect(ctx context.Context, dir string, as *account) (binaries, error) {
	bin := binaries{dir: dir}
	err := bin.probe(ctx, as)
	if lib := filepath.Join(filepath.Dir(dir), "lib"); err != nil && exists(lib) {
		bin.lib = lib
		if bin.probe(ctx, as) == nil {
			err = nil
		}
	}
	return bin, err
}

func (b *binaries) probe(ctx context.Context, as *account) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, name := range []string{"initdb", "postgres"} {
		cmd := exec.CommandContext(ctx, filepath.Join(b.dir, name), "--version")
		cmd.Dir = "/"
		cmd.Env = serverEnv()
		if b.lib != "" {
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+b.lib, "DYLD_LIBRARY_PATH="+b.lib)
		}
		as.run(cmd)
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("run %s --version%s: %w%s", name, as.suffix(), err, indent(complaint.String()))
		}
		m := versionLine.FindSubmatch(out)
		if m == nil {
			return fmt.Errorf("run %s --version: %q has no version of PostgreSQL", name, bytes.TrimSpace(out))
		}
		b.version = string(m[1])
	}
	return nil
}

// hasLibrary says whether the server can preload the library of this name.
func (b *binaries) hasLibrary(ctx context.Context, name string) bool {
	up := filepath.Dir(b.dir)
	for _, dir := range []string{
		pgConfig(ctx, filepath.Join(b.dir, "pg_config"), "--pkglibdir"),
		filepath.Join(up, "lib"),
		filepath.Join(up, "lib", "postgresql"),
	} {
		if found, _ := filepath.Glob(filepath.Join(dir, name+".[sd]*")); dir != "" && len(found) > 0 {
			return true // .so, or .dylib
		}
	}
	return false
}

// pgConfig is what pg_config answers, or "" if there is none that does.
func pgConfig(ctx context.Context, program, flag string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, flag).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
