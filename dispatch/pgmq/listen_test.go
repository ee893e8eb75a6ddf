package pgmq_test

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

// The session that listens is idle for a minute at a time.
func TestListen_IdleSessionTimeoutOfTheRole_IsForOthers(t *testing.T) {
	url := database(t, pgmqtest.Install)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	listen := config.ConnConfig.Copy()
	listen.RuntimeParams["application_name"], listen.RuntimeParams["idle_session_timeout"] = "listens", "30s"
	set := make(chan string, 1)
	listen.Tracer = settings{set}
	s, err := pgmq.New(t.Context(), open(t, url), &pgmq.Config{Logger: slog.New(slog.DiscardHandler), ListenConfig: listen})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	select {
	case value := <-set:
		require.Equal(t, "0", value)
	case <-time.After(patience):
		t.Fatal("it does not listen")
	}
}

// settings tells what the session has, once it listens.
type settings struct{ got chan<- string }

func (s settings) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, settings{}, strings.HasPrefix(q.SQL, "LISTEN pgmq_message_ready;"))
}

func (s settings) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, ended pgx.TraceQueryEndData) {
	listens, _ := ctx.Value(settings{}).(bool)
	if !listens || ended.Err != nil {
		return
	}
	results, err := conn.PgConn().Exec(context.WithoutCancel(ctx), `SHOW idle_session_timeout`).ReadAll()
	if err != nil {
		return // it is made anew
	}
	select {
	case s.got <- string(results[0].Rows[0][0]):
	default:
	}
}
