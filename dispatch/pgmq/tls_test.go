package pgmq_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/pgwake/pgwake/internal/testtls"
	"github.com/stretchr/testify/require"
)

// This file answers: does everything go by TLS that is told to, also what listens?

// log is what a Stream has said.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.text.Bytes(), []byte(text))
}

func TestListen_VerifyFull_OnlyToTheServerOfTheAuthority(t *testing.T) {
	t.Parallel()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	ours, others := testtls.New(t, "ours"), testtls.New(t, "others")
	ours.Serve(t, server, "127.0.0.1")
	at := func(url string) *pgxpool.Pool {
		t.Helper()
		pool := open(t, url)
		t.Cleanup(pool.Reset)
		return pool
	}
	stream := func(pool *pgxpool.Pool, listen string) *log {
		t.Helper()
		said := &log{}
		config := &pgmq.Config{Logger: slog.New(slog.NewTextHandler(said, nil))}
		if listen != "" {
			config.ListenConfig, err = pgx.ParseConfig(listen)
			require.NoError(t, err)
		}
		s, err := pgmq.New(t.Context(), pool, config)
		require.NoError(t, err)
		t.Cleanup(s.Close)
		return said
	}
	listeners := func() (all []string) {
		t.Helper()
		admin := open(t, server.URL)
		defer admin.Close()
		rows, err := admin.Query(t.Context(), `SELECT 'TLS ' || s.ssl FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE query LIKE 'LISTEN pgmq_message_ready;%'`)
		require.NoError(t, err)
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	right := at(ours.URL(server, "verify-full"))
	require.NoError(t, pgmqtest.Install(t.Context(), right))
	require.NoError(t, pgmq.Install(t.Context(), right))

	listening := stream(right, "")
	require.Eventually(t, func() bool { return len(listeners()) == 1 }, patience, 10*time.Millisecond)
	require.Equal(t, []string{"TLS true"}, listeners())
	require.False(t, listening.has("WARN"))

	refused := func(pool *pgxpool.Pool, listen, why string, others int) {
		t.Helper()
		said := stream(pool, listen)
		require.Eventually(t, func() bool { return said.has("does not listen") }, patience, 10*time.Millisecond)
		require.True(t, said.has(why))
		require.Len(t, listeners(), others)
	}
	refused(right, others.URL(server, "verify-full"), "certificate signed by unknown authority", 1)
	refused(right, others.URL(server, "verify-ca"), "certificate signed by unknown authority", 1)

	_, err = pgmq.New(t.Context(), at(others.URL(server, "verify-full")), nil)
	require.ErrorContains(t, err, "certificate signed by unknown authority")

	ours.Serve(t, server, "127.0.0.2") // of another host, and restarted: who listened has to do so again
	_, err = pgmq.New(t.Context(), at(ours.URL(server, "verify-full")), nil)
	require.ErrorContains(t, err, "certificate is valid for 127.0.0.2, not 127.0.0.1")
	authority := at(ours.URL(server, "verify-ca")) // which is enough for who does not ask for the host
	refused(authority, ours.URL(server, "verify-full"), "certificate is valid for 127.0.0.2, not 127.0.0.1", 0)
	stream(authority, "")
	require.Eventually(t, func() bool { return len(listeners()) == 1 }, patience, 10*time.Millisecond)
	require.Equal(t, []string{"TLS true"}, listeners())
}
