package pgmqtest_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

func TestInstall_WherePgmqIs_ChangesNothing(t *testing.T) {
	admin, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer admin.Close(context.Background())
	name := fmt.Sprintf("pgmqtest_%d", os.Getpid())
	if _, err := admin.Exec(t.Context(), `CREATE DATABASE `+name); err != nil {
		t.Skipf("this test needs a role that may create databases: %v", err)
	}
	defer func() {
		_, err := admin.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`)
		require.NoError(t, err)
	}()
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	config.ConnConfig.Database = name
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, pgmqtest.Install(t.Context(), pool))
	_, err = pool.Exec(t.Context(), `SELECT pgmq.create('a'); SELECT pgmq.send('a', '1')`)
	require.NoError(t, err)
	require.ErrorContains(t, pgmqtest.Install(t.Context(), pool), "exists")
	var messages int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pgmq.read('a', 1, 10)`).Scan(&messages))
	require.Equal(t, 1, messages)
}
