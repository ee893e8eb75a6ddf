package pgmq_test

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/stretchr/testify/require"
)

// This file answers: does the Stream listen whatever the pool is at?

// The notification that tests LISTEN comes from the pool, or else by a connection of its own.
func TestListen_OthersHaveTheWholePool_ListensAllTheSame(t *testing.T) {
	url := database(t, pgmqtest.Install)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	listen := config.ConnConfig.Copy()
	listen.RuntimeParams["application_name"] = "listens"
	held := make(chan struct{})
	listen.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		select {
		case <-held:
			return new(net.Dialer).DialContext(ctx, network, address)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s, err := pgmq.New(t.Context(), pool, &pgmq.Config{Logger: slog.New(slog.DiscardHandler), ListenConfig: listen})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	close(held)
	awaitListening(t, url, "listens")
}
