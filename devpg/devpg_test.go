package devpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgwake/pgwake/internal/devpg"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// Whatever server the rest of a test run uses is not to be touched here.
	os.Unsetenv(devpg.EnvURL)
	os.Unsetenv(devpg.EnvFallbackURL)
	goleak.VerifyTestMain(m)
}

// started boots a server from the binaries on this machine.
func started(t *testing.T) *Server {
	t.Helper()
	srv, err := startBy(t.Context(), nil, nil)
	if errors.Is(err, ErrNoServer) {
		t.Skipf("no server binaries: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { stopped(t, srv) })
	return srv
}

func stopped(t *testing.T, srv *Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, srv.Stop(ctx))
}

func ask(t *testing.T, srv *Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), srv.URL)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	var value string
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

func TestStart_Binaries_AreTakenBeforeDocker(t *testing.T) {
	started(t) // or there is nothing to see
	srv, err := Start(t.Context(), &Options{Settings: map[string]string{"work_mem": "7MB"}, Fsync: true})
	require.NoError(t, err)
	defer stopped(t, srv)
	assert.True(t, srv.Owned())
	assert.Equal(t, "7MB", ask(t, srv, "SHOW work_mem"))
	assert.Equal(t, "on", ask(t, srv, "SHOW fsync"))
	dir := ask(t, srv, "SHOW data_directory")
	require.DirExists(t, dir)

	stopped(t, srv)
	stopped(t, srv)
	assert.NoDirExists(t, filepath.Dir(dir))
}

func TestStart_URLGiven_IsUsedAndNeverStopped(t *testing.T) {
	running := started(t)
	t.Setenv(devpg.EnvURL, running.URL)
	srv, err := Start(t.Context(), nil)
	require.NoError(t, err)
	assert.Equal(t, running.URL, srv.URL)
	assert.Equal(t, running.Version, srv.Version)
	assert.False(t, srv.Owned())
	stopped(t, srv)
	assert.Equal(t, "1", ask(t, running, "SELECT '1'"))
}

func TestStart_NothingHere_TakesTheWaysBeyondInTurn(t *testing.T) {
	t.Setenv(devpg.EnvVersion, "16")
	var said []string
	opts := &Options{BinDir: "/nowhere", Logf: func(format string, args ...any) {
		said = append(said, fmt.Sprintf(format, args...))
	}}
	srv, err := startBy(t.Context(), opts, []way{
		{"first", func(context.Context, *Options) (*Server, error) { return nil, errors.New("not\n\ttoday") }},
		{"second", func(_ context.Context, o *Options) (*Server, error) {
			return &Server{Source: "second", Version: o.Version + ".1"}, nil
		}},
		{"third", func(context.Context, *Options) (*Server, error) { panic("not its turn") }},
	})
	require.NoError(t, err)
	assert.Equal(t, "16.1", srv.Version)
	require.Len(t, said, 3)
	assert.Contains(t, said[0], "/nowhere")
	assert.Equal(t, []string{"devpg: not first: not today", "devpg: PostgreSQL 16.1 from second"}, said[1:])
}

func TestStart_NoWayWorks_SaysTheThreeWaysAndEachReason(t *testing.T) {
	fails := func(reason string) func(context.Context, *Options) (*Server, error) {
		return func(context.Context, *Options) (*Server, error) { return nil, errors.New(reason) }
	}
	_, err := startBy(t.Context(), &Options{BinDir: "/nowhere"}, []way{{"Docker", fails("asleep")}, {"download", fails("offline")}})
	require.ErrorIs(t, err, ErrNoServer)
	for _, want := range []string{
		"PGWAKE_DATABASE_URL=postgres://", "apt-get install postgresql", "start Docker",
		"- PGWAKE_DATABASE_URL: not set\n", "- /nowhere: ", "- Docker: asleep\n", "- download: offline",
	} {
		assert.ErrorContains(t, err, want)
	}
}

func TestStart_CtxEnds_StopsWhatWasStarted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	stops := 0
	_, err := startBy(ctx, &Options{BinDir: "/nowhere"}, []way{
		{"slow", func(context.Context, *Options) (*Server, error) {
			cancel()
			return &Server{stop: func(ctx context.Context) error { stops++; return ctx.Err() }}, nil
		}},
		{"next", func(context.Context, *Options) (*Server, error) { panic("not its turn") }},
	})
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrNoServer)
	assert.Equal(t, 1, stops)
}

func TestOneLine_KeepsALongReasonShort(t *testing.T) {
	long := make([]byte, 2000)
	for i := range long {
		long[i] = 'x'
	}
	assert.Len(t, []rune(oneLine{errors.New(string(long))}.Error()), 501)
}
