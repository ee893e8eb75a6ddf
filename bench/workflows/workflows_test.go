package workflows

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var server = sync.OnceValues(func() (*devpg.Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return devpg.Start(ctx, &devpg.Options{Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
})

// Timed assertions belong to the bench command. This test says that what should be counted is.
func TestMeasure_CountsEveryHopAndWorkflowOfBoth(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	var last measure.Progress
	r, err := Measure(t.Context(), s.URL, Options{Activities: 3, Runs: 2, SlowRuns: 1, Backlog: 4, SlowBacklog: 3, Workers: []int{1, 2},
		Idle: 50 * time.Millisecond, SlowIdle: 500 * time.Millisecond, Progress: func(p measure.Progress) { last = p }})
	require.NoError(t, err)
	for subject, want := range map[*Subject]struct{ runs, backlog int }{r.Ours: {2, 4}, r.Theirs: {1, 3}} {
		assert.Equal(t, want.runs, subject.Runs)
		assert.Len(t, subject.Hops, want.runs*5, "3 activities begin, the workflow goes on after each")
		assert.Positive(t, subject.Took)
		assert.Positive(t, subject.IdleFor)
		require.Len(t, subject.Rates, 2)
		for i, rate := range subject.Rates {
			assert.Equal(t, i+1, rate.Workers)
			assert.Equal(t, want.backlog, rate.Workflows)
			assert.Positive(t, rate.PerSecond())
		}
	}
	assert.Positive(t, r.Theirs.Idle, "it polls")
	assert.Equal(t, 1, last.Total)
	requireNoDatabaseLeft(t, s.URL)
}

func TestMeasure_Interrupted_LeavesNothing(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	_, err = Measure(ctx, s.URL, Options{Activities: 2, Idle: 50 * time.Millisecond, Progress: func(measure.Progress) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)
	requireNoDatabaseLeft(t, s.URL)
}

// requireNoDatabaseLeft looks for those of this process: others have theirs on the same server meanwhile.
func requireNoDatabaseLeft(t *testing.T, url string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_database WHERE starts_with(datname, $1)`, fmt.Sprintf("pgwake_measure_%x_", os.Getpid())).Scan(&left))
	require.Zero(t, left)
}
