package pgwaketest_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { testschema.Main(m) }

const innerSchema = `Inner "test"`

// schemas returns the schemas that hold a queue and that this process made; others share the server.
func schemas(t *testing.T) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), `SELECT schemaname::text FROM pg_tables WHERE tablename = 'worker_queue'
		AND (schemaname = $1 OR schemaname LIKE $2)`, innerSchema, fmt.Sprintf(`test\_%d\_%%`, os.Getpid()))
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

func TestNew_TwoProviders_HaveSchemasOfTheirOwn(t *testing.T) {
	before := len(schemas(t))
	a, b := pgwaketest.New(t, nil), pgwaketest.New(t, nil)
	require.Len(t, schemas(t), before+2)
	_, err := a.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	_, err = b.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	item, err := a.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, "x", item.Name)
}

func TestNew_TestEnds_ProviderIsClosedAndItsSchemaDropped(t *testing.T) {
	before := schemas(t)
	var p *pgwake.Provider
	waiting := make(chan error, 1)
	t.Run("inner", func(t *testing.T) {
		p = pgwaketest.New(t, &pgwake.Config{Schema: innerSchema, MaxPayload: 3})
		require.Contains(t, schemas(t), innerSchema)
		_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: []byte(`"long"`)}, nil)
		require.ErrorIs(t, err, pgwake.ErrPayloadTooLarge, "the rest of the Config counts")
		go func() {
			_, err := p.FetchWorkItem(context.Background(), &pgwake.FetchOptions{PollTimeout: time.Hour})
			waiting <- err
		}()
		require.Eventually(t, func() bool { return p.Stats().Worker.Parked == 1 }, 10*time.Second, 10*time.Millisecond)
	})
	require.ErrorIs(t, <-waiting, pgwake.ErrClosed)
	_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.ErrorIs(t, err, pgwake.ErrClosed)
	require.ElementsMatch(t, before, schemas(t))
}

// The server may be a developer's own.
func TestNew_SchemaExists_FailsAndLeavesIt(t *testing.T) {
	url := pgwaketest.URL(t)
	const schema = "somebody's own"
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `CREATE SCHEMA "`+schema+`"`)
	require.NoError(t, err)
	var tb recorder
	done := make(chan struct{})
	go func() { // Fatalf ends the goroutine
		defer close(done)
		pgwaketest.New(&tb, &pgwake.Config{Schema: schema})
	}()
	<-done
	require.Contains(t, tb.failure, "the schema exists")
	require.Empty(t, tb.cleanups)
	_, err = conn.Exec(t.Context(), `DROP SCHEMA "`+schema+`"`)
	require.NoError(t, err)
}

// recorder is a test that fails.
type recorder struct {
	testing.TB
	failure  string
	cleanups []func()
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Fatalf(format string, args ...any) {
	r.failure = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestNew_ConfigOfTheCaller_IsNotChanged(t *testing.T) {
	c := pgwake.Config{}
	pgwaketest.New(t, &c)
	require.Equal(t, pgwake.Config{}, c)
}

func TestOpen_SameSchema_IsAnotherNodeOfTheDeployment(t *testing.T) {
	const schema = "pgwaketest_two_nodes"
	a := pgwaketest.New(t, &pgwake.Config{Schema: schema})
	b := pgwaketest.Open(t, &pgwake.Config{Schema: schema})
	got := make(chan error, 1)
	go func() {
		_, err := b.FetchWorkItem(context.Background(), &pgwake.FetchOptions{PollTimeout: 10 * time.Second})
		got <- err
	}()
	require.Eventually(t, func() bool { return b.Stats().Worker.Parked == 1 }, 10*time.Second, 10*time.Millisecond)
	_, err := a.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, nil)
	require.NoError(t, err)
	require.NoError(t, <-got)
}

func TestNew_InParallel_EachTestHasItsOwn(t *testing.T) {
	for i := range 6 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			p := pgwaketest.New(t, nil)
			for range 3 {
				_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: fmt.Sprint(i)}, nil)
				require.NoError(t, err)
			}
			items, err := p.FetchWorkItems(t.Context(), 10, nil)
			require.NoError(t, err)
			require.Len(t, items, 3)
			require.Equal(t, fmt.Sprint(i), items[0].Name)
		})
	}
}

// fatal is a test that fails by Fatal without ending this one.
type fatal struct {
	testing.TB
	said string
}

func (f *fatal) Fatalf(format string, args ...any) {
	f.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestOpen_ProviderCannotBeOpened_FailsTheTestAndSaysWhy(t *testing.T) {
	f := &fatal{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pgwaketest.Open(f, &pgwake.Config{Schema: strings.Repeat("x", 64)})
	}()
	<-done
	require.Contains(t, f.said, "Schema")
}

// The server that a test process boots lives as long as the process, also if nobody remembers it.
func TestURL_AfterGarbageCollections_ServerStillAnswers(t *testing.T) {
	url := pgwaketest.URL(t)
	for range 3 {
		runtime.GC()
		// What ends a server takes a moment, so this asks for a while. Three good answers are no proof; a
		// server that is gone gives none.
		for range 20 {
			conn, err := pgx.Connect(t.Context(), url)
			require.NoError(t, err, "the server went away")
			_, err = conn.Exec(t.Context(), `SELECT pg_sleep(0.01)`)
			require.NoError(t, err, "the server went away")
			require.NoError(t, conn.Close(t.Context()))
		}
	}
}
