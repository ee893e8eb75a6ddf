package pgwake

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/pgwake/pgwake/internal/testpooler"
	"github.com/stretchr/testify/require"
)

// A pooler has numbers of its own for the connections to it.
func TestSettle_PoolerIsInBetween_KnowsForWhomItWaits(t *testing.T) {
	listen, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	testpooler.Start(t, testdb.URL(t), "session")(listen)
	p := testProvider(t, Config{AggressivePolicy: Never, FallbackInterval: time.Hour, ListenConfig: listen, SkipMigrate: true})
	open := plain(t, p.cfg.Schema)
	mustExec(t, open, `BEGIN`)
	mustExec(t, open, `SELECT enqueue_work('silent')`)
	wait := fetchWork(t, p, longPoll)
	eventually(t, "health says who", func() bool { return !p.Health().OK })
	require.Contains(t, fmt.Sprint(p.Health().Problems), fmt.Sprintf("process ids [%d]", open.PgConn().PID()))
	mustExec(t, open, `COMMIT`)
	require.Equal(t, "silent", get(t, wait).item.Name)
}
