//go:build linux

package pgmq_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/internal/testpooler"
	"github.com/stretchr/testify/require"
)

// This file answers: what does the Stream do behind PgBouncer?

// logbook is a log that can be read.
type logbook struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(b)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.String()
}

// behind is a Stream whose pool goes through a pooler that shares sessions.
func behind(t *testing.T, around bool) (s *pgmq.Stream, url string, pool *pgxpool.Pool, log *logbook) {
	t.Helper()
	url = database(t, pgmqtest.Install)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	direct := config.ConnConfig.Copy()
	direct.RuntimeParams["application_name"] = "around"
	testpooler.Start(t, url, "transaction")(config.ConnConfig)
	pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	log = &logbook{}
	c := &pgmq.Config{FallbackInterval: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil))}
	if around {
		c.ListenConfig, c.FallbackInterval = direct, time.Hour
	}
	s, err = pgmq.New(t.Context(), pool, c)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s, url, pool, log
}

func send(t *testing.T, url string) {
	t.Helper()
	_, err := open(t, url).Exec(t.Context(), `SELECT pgmq.send('a_queue', '1')`)
	require.NoError(t, err)
}

// received waits for a message of namespace a.
func received(t *testing.T, s *pgmq.Stream) <-chan error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	got := make(chan error, 1)
	go func() {
		_, err := s.Receive(ctx, "a", 1, time.Minute)
		got <- err
	}()
	require.Eventually(t, func() bool { return s.Parked() == 1 }, patience, 10*time.Millisecond)
	return got
}

func TestPooler_ListenThroughATransactionPooler_SaysSoAndPolls(t *testing.T) {
	s, url, pool, log := behind(t, false)
	require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x"}))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := s.Receive(ctx, "a", 1, time.Minute)
	require.NoError(t, err, "what is there is found")
	require.Eventually(t, func() bool { return bytes.Contains([]byte(log.String()), []byte("transaction pooler")) }, patience, 10*time.Millisecond)
	got := received(t, s)
	send(t, url)
	require.NoError(t, <-got, "it is polled for")
	require.Equal(t, 1, bytes.Count([]byte(log.String()), []byte("does not listen")), "once for the outage")

	// Whoever gets a session next that the Stream had is not told of its messages.
	for range 20 {
		var channels string
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT coalesce((SELECT string_agg(c, ',') FROM pg_listening_channels() c), '')`).Scan(&channels))
		require.NotContains(t, channels, "pgmq_message_ready")
	}
}

func TestPooler_ListenConfigGoesAroundIt_IsPushed(t *testing.T) {
	s, url, _, log := behind(t, true)
	_, err := open(t, url).Exec(t.Context(), `SELECT pgmq.create('a_queue')`)
	require.NoError(t, err)
	awaitListening(t, url, "around")
	got := received(t, s)
	send(t, url)
	require.NoError(t, <-got)
	require.Empty(t, log.String())
}
