package pgmq_test

import (
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// The statement of docs/moving-from-pgmq.md moves what nobody has, and leaves what was read to its reader.
func TestMovingFromPgmq_TheStatementOfThePage_LeavesWhatWasRead(t *testing.T) {
	page, err := os.ReadFile("../../docs/moving-from-pgmq.md")
	require.NoError(t, err)
	statements := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, statements, 1)
	s := standIn(t)
	p, err := pgwake.New(t.Context(), s.pool, nil)
	require.NoError(t, err)
	defer p.Close(t.Context())

	s.exec(t, `SELECT pgmq.create('orders')`)
	s.exec(t, `SELECT pgmq.send('orders', '{"id": 1}')`)
	s.exec(t, `SELECT pgmq.read('orders', 3600, 1)`)
	s.exec(t, `SELECT pgmq.send('orders', '{"id": 2}')`)
	s.exec(t, `SELECT pgmq.send('orders', '{"id": 3}', 3600)`)
	for _, want := range []int{2, 0} {
		var moved int
		require.NoError(t, s.pool.QueryRow(t.Context(), statements[0][1]).Scan(&moved))
		require.Equal(t, want, moved)
	}
	var left string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT string_agg(message::text, ',') FROM pgmq.q_orders`).Scan(&left))
	require.Equal(t, `{"id": 1}`, left)
	item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{Namespaces: []string{"orders"}})
	require.NoError(t, err)
	require.Equal(t, []string{"order", `{"id": 2}`}, []string{item.Name, string(item.Input)})
	var due time.Time
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT visible_at FROM pgwake.worker_queue WHERE input::jsonb = '{"id": 3}'`).Scan(&due))
	require.WithinDuration(t, time.Now().Add(time.Hour), due, time.Minute)
}
