package pgmq_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: are messages received that are large, or take their time, and in how much memory?

const mib = 1 << 20

// All messages are received once, in some answers of which none has more than 64 MiB, unless it is one message; and what one leaves is there
// for the next at once, as it was.
func TestReceive_LargeMessages_OneAnswerIsBounded(t *testing.T) {
	t.Parallel()
	s := standIn(t)
	same := func(size int) string { return fmt.Sprintf(`to_jsonb(repeat('x', %d))`, size) }
	for i, c := range []struct {
		what, message, headers string // SQL
		storage                string
		count, answers         int
	}{
		{"as large as they are stored", same(20 * mib), "NULL", "EXTERNAL", 4, 2},
		{"smaller as they are stored", same(20 * mib), "NULL", "EXTENDED", 4, 2},
		{"larger than an answer", same(70 * mib), "NULL", "EXTERNAL", 2, 2},
		{"large headers", "'1'", fmt.Sprintf(`jsonb_build_object('k', %s)`, same(20*mib)), "EXTENDED", 4, 2},
		{"small, until their numbers are written out", `'[7' || repeat('e131071, 7', 200) || ']'`, "NULL", "EXTENDED", 4, 2},
		{"small", `'1'`, "NULL", "EXTENDED", 1000, 1},
	} {
		t.Run(c.what, func(t *testing.T) {
			if c.what != "small" && !testsize.Full() {
				t.Skip("with PGWAKE_FULL=1: all of these take half a minute, and a gigabyte")
			}
			namespace := fmt.Sprintf("n%d", i)
			table := "pgmq.q_" + namespace + "_queue"
			s.exec(t, `SELECT pgmq.create($1)`, namespace+"_queue")
			s.exec(t, fmt.Sprintf(`ALTER TABLE %s ALTER message SET STORAGE %s`, table, c.storage))
			s.exec(t, fmt.Sprintf(`INSERT INTO %s (vt, message, headers) SELECT clock_timestamp(), m, h FROM (SELECT (%s)::jsonb, %s::jsonb) AS x (m, h), generate_series(1, %d)`,
				table, c.message, c.headers, c.count))
			answers, seen := 0, make(map[int64]bool)
			for ; len(seen) < c.count; answers++ {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				got, err := s.Receive(ctx, namespace, 1000, time.Hour)
				cancel()
				require.NoError(t, err)
				bytes := 0
				for _, d := range got {
					require.False(t, seen[d.ID])
					seen[d.ID] = true
					require.Equal(t, 1, d.Attempt)
					bytes += len(d.Payload)
				}
				require.True(t, bytes <= 64*mib || len(got) == 1, "%d messages of %d bytes", len(got), bytes)
				var due, untouched int
				require.NoError(t, s.pool.QueryRow(t.Context(), fmt.Sprintf(`SELECT count(*) FILTER (WHERE vt <= clock_timestamp()),
					count(*) FILTER (WHERE read_ct = 0) FROM %s`, table)).Scan(&due, &untouched))
				require.Equal(t, []int{c.count - len(seen), c.count - len(seen)}, []int{due, untouched})
				s.ack(t, got...)
			}
			require.Equal(t, c.answers, answers)
		})
	}
}

// trickling is a connection by which so much comes at a time, once it is slow.
type trickling struct {
	net.Conn
	slow *atomic.Bool
	mu   sync.Mutex // pgx reads what is left of a connection that it gives up in another goroutine
	left int
}

const (
	trickle      = 2 * mib
	trickleEvery = 200 * time.Millisecond
)

func (c *trickling) Read(b []byte) (int, error) {
	if !c.slow.Load() {
		return c.Conn.Read(b)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left == 0 {
		time.Sleep(trickleEvery)
		c.left = trickle
	}
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	return n, err
}

// slowStream is one with a slow network, and so many messages of a size.
func slowStream(t *testing.T, patience time.Duration, count, size int) *pgmq.Stream {
	t.Helper()
	config, err := pgxpool.ParseConfig(database(t, pgmqtest.Install))
	require.NoError(t, err)
	var slow atomic.Bool
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return &trickling{Conn: conn, slow: &slow}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s, err := pgmq.New(t.Context(), pool, &pgmq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	s.SetPatience(patience)
	_, err = pool.Exec(t.Context(), `SELECT pgmq.create('a_queue')`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `SELECT pgmq.send('a_queue', to_jsonb(repeat('x', $1))) FROM generate_series(1, $2)`, size, count)
	require.NoError(t, err)
	slow.Store(true)
	return s
}

// What comes takes longer than the server may be silent, and each message less.
func TestReceive_SlowNetwork_AllOfAnAnswerComes(t *testing.T) {
	t.Parallel()
	const count, silence = 30, 5 * time.Second
	s := slowStream(t, silence, count, trickle)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	begun := time.Now()
	got, err := s.Receive(ctx, "a", count, time.Minute)
	require.NoError(t, err)
	require.Len(t, got, count)
	require.Greater(t, time.Since(begun), silence)
}

// One message takes longer than the server may be silent. It is waited for longer each time, and so it comes.
func TestReceive_SlowNetwork_OneLargeMessageComesAfterAll(t *testing.T) {
	t.Parallel()
	s := slowStream(t, 500*time.Millisecond, 1, 16*trickle)
	begun := time.Now()
	for {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		got, err := s.Receive(ctx, "a", 1, time.Second)
		cancel()
		if err == nil {
			require.Len(t, got, 1)
			break
		}
		require.ErrorContains(t, err, "no answer")
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, context.Canceled)
		require.Less(t, time.Since(begun), time.Minute)
	}
}
