//go:build unix

package devpg_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
)

func TestStart_Binaries_BootsAndAnswers(t *testing.T) {
	t.Parallel()
	var said []string
	srv := start(t, &devpg.Options{Logf: func(format string, args ...any) {
		said = append(said, fmt.Sprintf(format, args...))
	}})

	assert.Equal(t, "1", mustQuery(t, srv, "SELECT 1"))
	assert.True(t, srv.Owned())
	assert.True(t, strings.HasPrefix(mustQuery(t, srv, "SHOW server_version"), srv.Version))
	assert.Equal(t, srv.Version[:2], strconv.Itoa(srv.Major()))
	assert.Equal(t, srv.DataDir(), mustQuery(t, srv, "SHOW data_directory"))
	assert.Equal(t, strconv.Itoa(srv.Port()), mustQuery(t, srv, "SHOW port"))
	lock, err := os.ReadFile(filepath.Join(srv.DataDir(), "postmaster.pid"))
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(string(lock), strconv.Itoa(srv.PostmasterPID())+"\n"))
	assert.Equal(t, "UTF8", mustQuery(t, srv, "SHOW server_encoding"))
	assert.Equal(t, []string{"devpg: PostgreSQL " + srv.Version + " from " + srv.Source}, said)
}

func TestStart_FsyncOption_ChangesDurabilityButNotSemantics(t *testing.T) {
	t.Parallel()
	for _, fsync := range []bool{false, true} {
		srv := shared(t)
		if fsync {
			srv = start(t, &devpg.Options{Fsync: fsync})
		}
		want := map[bool]string{false: "off", true: "on"}[fsync]
		assert.Equal(t, want, mustQuery(t, srv, "SHOW fsync"))
		assert.Equal(t, want, mustQuery(t, srv, "SHOW full_page_writes"))
		assert.Equal(t, "on", mustQuery(t, srv, "SHOW synchronous_commit"))
		assert.Equal(t, "on", mustQuery(t, srv, "SHOW autovacuum"))
		assert.Equal(t, !fsync, strings.Contains(mustQuery(t, srv, "SHOW shared_preload_libraries"), "plpgsql"))
	}
}

// Servers of one command share what initdb makes, as long as it can be read.
func TestStart_Pristine_IsMadeOnceAndNotNeeded(t *testing.T) {
	base := newBase(t)
	t.Setenv(devpg.EnvPristine, base)
	identifier := func() string {
		return mustQuery(t, start(t, &devpg.Options{IgnoreURL: true}), "SELECT system_identifier FROM pg_control_system()")
	}
	first := identifier()
	require.Equal(t, first, identifier())
	made, err := filepath.Glob(filepath.Join(base, "pristine-*", "PG_VERSION"))
	require.NoError(t, err)
	require.Len(t, made, 1)
	require.NoFileExists(t, filepath.Join(filepath.Dir(made[0]), "postmaster.opts"), "no server ran there")
	require.NoError(t, os.Chmod(made[0], 0))
	require.NotEqual(t, first, identifier())
}

func TestStart_Settings_WinOverOursAndStayAlterable(t *testing.T) {
	t.Parallel()
	srv := start(t, &devpg.Options{Settings: map[string]string{
		"Max_Connections":          "33",
		"application_name":         `it's a \ test`,
		"shared_preload_libraries": "",
	}})
	assert.Equal(t, "33", mustQuery(t, srv, "SHOW max_connections"))
	assert.Equal(t, `it's a \ test`, mustQuery(t, srv, "SHOW application_name"))
	assert.Empty(t, mustQuery(t, srv, "SHOW shared_preload_libraries"))

	mustQuery(t, srv, "ALTER SYSTEM SET fsync = on")
	require.NoError(t, srv.Restart(t.Context(), devpg.Fast))
	assert.Equal(t, "on", mustQuery(t, srv, "SHOW fsync"))
}

func TestStart_SettingThatPostgresRefuses_SaysItsReasonAndLeavesNothing(t *testing.T) {
	needBinaries(t)
	base := tempBase(t)
	_, err := devpg.Start(t.Context(), &devpg.Options{Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorIs(t, err, devpg.ErrNoServer)
	assert.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
	requireNothingLeft(t, base)
}

func TestStart_BadOption_IsRefusedByName(t *testing.T) {
	for want, opts := range map[string]devpg.Options{
		`version "16.3"`:     {Version: "16.3"},
		`"a = 1; b"`:         {Settings: map[string]string{"a = 1; b": "1"}},
		"setting work_mem: ": {Settings: map[string]string{"work_mem": "1MB\nfsync = on"}},
	} {
		_, err := devpg.Start(t.Context(), &opts)
		require.ErrorContains(t, err, want)
		require.NotErrorIs(t, err, devpg.ErrNoServer)
	}
}

func TestStart_VersionNotHere_SaysTheThreeWaysAndWhatWasTried(t *testing.T) {
	needBinaries(t)
	_, err := devpg.Start(t.Context(), &devpg.Options{Version: "7"})
	require.ErrorIs(t, err, devpg.ErrNoServer)
	for _, want := range []string{
		"PGWAKE_DATABASE_URL=postgres://", "apt-get install postgresql", "PGWAKE_PG_BIN", "Docker",
		"- PGWAKE_DATABASE_URL: not set", "- DATABASE_URL: not set", "and 7 is asked for",
	} {
		assert.ErrorContains(t, err, want)
	}
}

func TestStart_VersionAsked_PassesOverOtherVersions(t *testing.T) {
	needBinaries(t)
	if os.Getenv(devpg.EnvBinDir) != "" {
		t.Skip("one directory of binaries is prescribed")
	}
	t.Setenv("PATH", fakeBinaries(t, "[ $1 = --version ] && echo 'postgres (PostgreSQL) 99.1'")+":"+os.Getenv("PATH"))
	here := start(t, nil) // 99 cannot boot
	again := start(t, &devpg.Options{Version: strconv.Itoa(here.Major())})
	assert.Equal(t, here.Version, again.Version)

	t.Setenv(devpg.EnvVersion, "99")
	_, err := devpg.Start(t.Context(), nil)
	require.ErrorIs(t, err, devpg.ErrNoServer)
	assert.ErrorContains(t, err, "run initdb: exit status 1")
	assert.ErrorContains(t, err, "and 99 is asked for")
}

func TestStart_BinDirAsked_IsTheOnlyPlace(t *testing.T) {
	dir := fakeBinaries(t, "echo 'postgres (PostgreSQL) 13.2'")
	t.Setenv(devpg.EnvBinDir, dir)
	t.Setenv(devpg.EnvVersion, "")
	_, err := devpg.Start(t.Context(), nil)
	var none *devpg.NoServerError
	require.ErrorAs(t, err, &none)
	require.Len(t, none.Tried, 3)
	assert.Equal(t, dir, none.Tried[2].Way)
	assert.EqualError(t, none.Tried[2].Err, "it is PostgreSQL 13.2, and 14 is the oldest that pgwake supports")
}

func TestStart_LibrariesOnlyBesideBinaries_AreFound(t *testing.T) {
	real := shared(t)
	bin := mustQuery(t, real, "SELECT setting FROM pg_config() WHERE name = 'BINDIR'")
	if _, err := os.Stat(filepath.Join(bin, "initdb")); err != nil {
		t.Skip("the server's programs are not where it was built for")
	}
	dir := fakeBinaries(t, `case $LD_LIBRARY_PATH in */lib) ;; *) echo no libpq.so >&2; exit 127 ;; esac
		exec `+bin+`/$(basename "$0") "$@"`)
	t.Setenv(devpg.EnvBinDir, dir)

	_, err := devpg.Start(t.Context(), nil)
	require.ErrorContains(t, err, "no libpq.so")

	require.NoError(t, os.Mkdir(filepath.Join(filepath.Dir(dir), "lib"), 0o755))
	srv := start(t, nil)
	assert.Equal(t, "1", mustQuery(t, srv, "SELECT 1"))
}

func TestStart_AsRoot_ServerRunsAsAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("not run by root")
	}
	srv := shared(t)
	info, err := os.Stat(srv.DataDir())
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	out, err := exec.Command("ps", "-o", "user=", "-p", strconv.Itoa(srv.PostmasterPID())).Output()
	require.NoError(t, err)
	assert.Contains(t, []string{"postgres", "nobody"}, strings.TrimSpace(string(out)))
}

func TestStart_AsRoot_BinariesOutOfReach_SaysForWhom(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not run by root")
	}
	dir := fakeBinaries(t, "echo 'postgres (PostgreSQL) 16.1'")
	require.NoError(t, os.Chmod(dir, 0o700))
	_, err := devpg.Start(t.Context(), &devpg.Options{BinDir: dir})
	require.ErrorIs(t, err, os.ErrPermission)
	assert.Regexp(t, `run initdb --version as user (postgres|nobody): .*permission denied`, err.Error())
}

func TestStart_TempDirOutOfReach_TakesAnother(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	srv := start(t, nil)
	assert.Equal(t, "/tmp", filepath.Dir(filepath.Dir(srv.DataDir())))
}

func TestStart_TempDirTooLongForASocket_DoesWithout(t *testing.T) {
	base := filepath.Join(tempBase(t), strings.Repeat("long", 25))
	require.NoError(t, os.Mkdir(base, 0o777))
	require.NoError(t, os.Chmod(base, 0o777))
	t.Setenv("TMPDIR", base)
	srv := start(t, nil)
	assert.Equal(t, base, filepath.Dir(filepath.Dir(srv.DataDir())))
	assert.Empty(t, mustQuery(t, srv, "SHOW unix_socket_directories"))
}

func TestStart_SideBySide_EachHasItsOwnServer(t *testing.T) {
	t.Parallel()
	needBinaries(t)
	var group sync.WaitGroup
	servers := make([]*devpg.Server, 4)
	for i := range servers {
		group.Go(func() {
			srv, err := devpg.Start(t.Context(), nil)
			if assert.NoError(t, err) {
				servers[i] = srv
			}
		})
	}
	group.Wait()
	require.False(t, t.Failed())
	dirs := map[string]bool{}
	for _, srv := range servers {
		dirs[mustQuery(t, srv, "SHOW data_directory")] = true
	}
	assert.Len(t, dirs, len(servers))
	for _, srv := range servers {
		group.Go(func() { assert.NoError(t, srv.Stop(context.Background())) })
	}
	group.Wait()
	for _, srv := range servers {
		requireNothingLeft(t, home(srv))
	}
}

func TestStart_CtxEndsMidway_LeavesNothing(t *testing.T) {
	needBinaries(t)
	for _, stage := range bootStages {
		t.Run(stage.name, func(t *testing.T) {
			base := tempBase(t)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				eventually(func() bool { return stage.reached(base) })
				cancel()
			}()
			srv, err := devpg.Start(ctx, nil)
			if err == nil { // the boot was faster than the look at its stage
				stop(t, srv)
			} else {
				require.ErrorIs(t, err, context.Canceled)
			}
			requireNothingLeft(t, base)
			cancel()
		})
	}
}

// fakeBinaries makes a directory whose initdb and postgres are this shell script.
func fakeBinaries(t *testing.T, script string) string {
	t.Helper()
	base, err := os.MkdirTemp("", "devpg-bin-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(base) })
	dir := filepath.Join(base, "bin")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.Chmod(base, 0o755))
	for _, name := range []string{"initdb", "postgres"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	return dir
}
