package pgmq_test

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/stretchr/testify/require"
)

// This file answers: what does a flood of notifications cost the server, and this process?

// stranger is a role that may connect to the database, and nothing else.
func stranger(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	role := fmt.Sprintf("stranger_%d_%d", time.Now().UnixNano(), databases.Add(1))
	_, err = conn.Exec(t.Context(), `CREATE ROLE `+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := conn.Exec(context.Background(), `RESET SESSION AUTHORIZATION; DROP ROLE `+role)
		require.NoError(t, err)
	})
	_, err = conn.Exec(t.Context(), `SET SESSION AUTHORIZATION `+role)
	require.NoError(t, err)
	return conn
}

// sentStatements counts what a pool sends to the server.
type sentStatements struct{ atomic.Int64 }

func (s *sentStatements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.Add(1)
	return ctx
}
func (s *sentStatements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestFlood_StrangerNotifies_StatementsAreBoundedAndMessagesAreFound(t *testing.T) {
	const transactions, each, waiters = 400, 5, 8
	const later = ` || to_json(clock_timestamp() + i * interval '1 ms')::text || `
	for what, flood := range map[string]struct {
		channel, payload string // SQL, by the number i, which no other has
	}{
		"unreadable": {"pgmq_message_ready", `i || repeat('x', 7900)`},
		"namespace":  {"pgmq_message_ready", `'{"namespace": "n' || i % 8 || '", "msg_id": ' || i || '}'`},
		"later":      {"pgmq_message_ready", `'{"namespace": "n' || i % 8 || '", "msg_id": ' || i || ', "ready_at": '` + later + `'}'`},
		"queue":      {"pgmq_queue_created", `'{"n": ' || i || '}'`},
	} {
		t.Run(what, func(t *testing.T) {
			s := standIn(t) // by which messages are sent
			config, err := pgxpool.ParseConfig(s.url)
			require.NoError(t, err)
			sent := &sentStatements{}
			config.ConnConfig.Tracer = sent
			config.MaxConns = waiters
			config.ConnConfig.RuntimeParams["application_name"] = "target"
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			target, err := pgmq.New(t.Context(), pool, &pgmq.Config{Logger: slog.New(slog.DiscardHandler), FallbackInterval: time.Hour})
			require.NoError(t, err)
			t.Cleanup(target.Close)

			ctx, end := context.WithCancel(t.Context())
			var all sync.WaitGroup
			t.Cleanup(func() { end(); all.Wait() })
			for n := range waiters {
				s.exec(t, fmt.Sprintf(`SELECT pgmq.create('n%d_queue')`, n))
			}
			got := make(chan string, 1)
			for n := range waiters {
				all.Go(func() {
					if messages, err := target.Receive(ctx, fmt.Sprintf("n%d", n), 1, time.Hour); err == nil {
						got <- messages[0].Name
					}
				})
			}
			all.Go(func() { _, _ = target.WaitForNamespaces(ctx, known(waiters)) })
			require.Eventually(t, func() bool { return target.Parked() == waiters+1 }, patience, 10*time.Millisecond)
			awaitListening(t, s.url, "target")
			target.SpendCredit()

			hostile := stranger(t, s.url)
			before, began := sent.Load(), time.Now()
			for n := range transactions {
				_, err := hostile.Exec(t.Context(), `SELECT pg_notify($1, `+flood.payload+`) FROM generate_series($2::bigint + 1, $2::bigint + $3) AS i`, flood.channel, n*each, each)
				require.NoError(t, err)
				if n == transactions/2 {
					s.exec(t, `SELECT pgmq.send('n3_queue', '1')`)
				}
			}
			select {
			case name := <-got:
				require.Equal(t, "n3_queue", name)
			case <-time.After(patience):
				require.Fail(t, "a message was not told of")
			}
			lasted := time.Since(began)
			asked := sent.Load() - before
			t.Logf("%d notifications in %v: %d statements", transactions*each, lasted, asked)
			require.LessOrEqual(t, asked, int64((lasted+pgmq.FoundWorth)/pgmq.SpendPause)+4*(waiters+1))
		})
	}
}

func known(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("n%d", i))
	}
	return all
}

// What comes while a statement is under way on the connection that listens is not kept. Here it is one of the pool's hook.
func TestFlood_DuringAStatement_TakesNoMemory(t *testing.T) {
	const notifications, size = 5_000, 7_900
	url := database(t, pgmqtest.Install)
	hostile := stranger(t, url)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 1
	config.ConnConfig.RuntimeParams["application_name"] = "target"
	var armed atomic.Bool
	kept := make(chan int64, 1)
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if !armed.CompareAndSwap(true, false) {
			return nil
		}
		if _, err := conn.Exec(ctx, `LISTEN pgmq_message_ready`); err != nil {
			return err
		}
		_, err := hostile.Exec(ctx, `SELECT pg_notify('pgmq_message_ready', i || repeat('x', $2 - 20)) FROM generate_series(1, $1::bigint) AS i`, notifications, size)
		if err != nil {
			return err
		}
		before := heap()
		if _, err := conn.Exec(ctx, `SELECT`); err != nil {
			return err
		}
		kept <- heap() - before
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pool.Ping(t.Context()))
	armed.Store(true)
	s, err := pgmq.New(t.Context(), pool, &pgmq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	select {
	case n := <-kept:
		require.Less(t, n, int64(notifications*size/4))
	case <-time.After(patience):
		require.Fail(t, "it did not connect")
	}
	awaitListening(t, url, "target")
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
