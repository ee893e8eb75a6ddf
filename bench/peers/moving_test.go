package peers

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"
)

// The statement of docs/moving-from-river.md moves what River's own tables have.
func TestMovingFromRiver_TheStatementOfThePage_MovesWhatNobodyHasAtWork(t *testing.T) {
	page, err := os.ReadFile("../../docs/moving-from-river.md")
	require.NoError(t, err)
	statements := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, statements, 1)

	s, err := server()
	require.NoError(t, err)
	t.Setenv("PGWAKE_DATABASE_URL", s.URL)
	p := pgwaketest.New(t, nil)
	schema := fmt.Sprintf("moving_%d", os.Getpid())
	pool, err := pgxpool.New(t.Context(), s.URL)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(t.Context(), "CREATE SCHEMA "+schema)
	require.NoError(t, err)
	defer pool.Exec(t.Context(), "DROP SCHEMA "+schema+" CASCADE")
	require.NoError(t, (&riverPeer{}).Prepare(t.Context(), s.URL, schema))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: schema, Logger: quiet})
	require.NoError(t, err)
	later := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	for n, o := range []*river.InsertOpts{{Priority: 1}, {Queue: "images", ScheduledAt: later}, {Priority: 4}} {
		_, err = client.Insert(t.Context(), riverItem{n}, o)
		require.NoError(t, err)
	}
	jobs := pgx.Identifier{schema, "river_job"}.Sanitize()
	_, err = pool.Exec(t.Context(), "UPDATE "+jobs+" SET state = 'running' WHERE priority = 4")
	require.NoError(t, err)

	move := strings.ReplaceAll(statements[0][1], "pgwake.", pgx.Identifier{p.Schema()}.Sanitize()+".")
	move = regexp.MustCompile(`\briver_job\b`).ReplaceAllLiteralString(move, jobs)
	for _, want := range []int{2, 0} {
		var moved int
		require.NoError(t, pool.QueryRow(t.Context(), move).Scan(&moved))
		require.Equal(t, want, moved)
	}
	first := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "measure", Input: []byte(`{"n": 0}`)}, 1)[0]
	require.Equal(t, []any{"default", pgwake.MaxPriority}, []any{first.Namespace, first.Priority})
	second := pgwaketest.RequireWork(t, p, pgwake.WorkItem{Name: "measure", Input: []byte(`{"n": 1}`)}, 1)[0]
	require.Equal(t, []any{"images", true}, []any{second.Namespace, second.DueAt.Equal(later)})
	pgwaketest.RequireWork(t, p, pgwake.WorkItem{}, 2)
}
