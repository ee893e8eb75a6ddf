package pgmq_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: in which order are the messages of a call locked, and what counts for one that had to wait?

// Two calls with the same messages wait for each other if they lock them in different orders.
func TestVerbsOfSeveral_LockInTheOrderOfTheIds(t *testing.T) {
	s := standIn(t)
	s.exec(t, `DROP FUNCTION pgwake_pgmq.extend_free`)
	for verb, call := range map[string]func(context.Context, []pgwake.LockToken) error{
		"ack":                           s.Ack,
		"extend where Install is older": func(ctx context.Context, all []pgwake.LockToken) error { return s.Extend(ctx, all, time.Hour) },
	} {
		for _, c := range []struct {
			does, sql string
			lost      bool
		}{
			{"nothing", "", false},
			{"changes it", `UPDATE pgmq.q_%s SET vt = vt + interval '1 hour' WHERE msg_id = 1`, false},
			{"reads it", `UPDATE pgmq.q_%s SET read_ct = read_ct + 1 WHERE msg_id = 1`, true},
			{"frees it", `UPDATE pgmq.q_%s SET vt = clock_timestamp() WHERE msg_id = 1`, true},
			{"removes it", `DELETE FROM pgmq.q_%s WHERE msg_id = 1`, true},
		} {
			t.Run(verb+"/"+c.does, func(t *testing.T) {
				namespace := fmt.Sprintf("n%d", databases.Add(1))
				queue := namespace + "_queue"
				s.exec(t, `SELECT pgmq.create($1)`, queue)
				s.exec(t, `SELECT pgmq.send_batch($1, ARRAY['1', '2']::jsonb[], ARRAY['{}', '{}']::jsonb[], clock_timestamp())`, queue)
				both, err := s.Receive(t.Context(), namespace, 2, time.Minute)
				require.NoError(t, err)
				require.Len(t, both, 2)
				slices.SortFunc(both, func(a, b dispatch.StreamDelivery) int { return int(b.ID - a.ID) })
				receipts := []pgwake.LockToken{both[0].Receipt, both[1].Receipt} // of 2 and 1

				holder, err := pgx.Connect(t.Context(), s.url)
				require.NoError(t, err)
				defer holder.Close(context.Background())
				tx, err := holder.Begin(t.Context())
				require.NoError(t, err)
				lock := func(id int64, how string) error {
					return tx.QueryRow(t.Context(), fmt.Sprintf(`SELECT msg_id FROM pgmq.q_%s WHERE msg_id = $1 FOR UPDATE %s`, queue, how), id).Scan(new(int64))
				}
				require.NoError(t, lock(1, ""))
				called := make(chan error, 1)
				go func() { called <- call(t.Context(), receipts) }()
				require.Eventually(t, func() (waits bool) {
					require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
						WHERE wait_event_type = 'Lock' AND $1::int = ANY (pg_blocking_pids(pid)))`, holder.PgConn().PID()).Scan(&waits))
					return waits
				}, patience, 10*time.Millisecond, "nobody waits for message 1")
				require.NoError(t, lock(2, "NOWAIT"))
				if c.sql != "" {
					_, err = tx.Exec(t.Context(), fmt.Sprintf(c.sql, queue))
					require.NoError(t, err)
				}
				require.NoError(t, tx.Commit(t.Context()))

				err = <-called
				var lost *pgwake.LostLocksError
				if c.lost {
					require.ErrorAs(t, err, &lost)
					require.Equal(t, receipts[1:], lost.Tokens)
				} else {
					require.NoError(t, err)
				}
			})
		}
	}
}

// A transaction that holds a message, such as that of its handler, costs no lease of the others: they do not wait for it.
func TestExtend_OneIsLocked_ExtendsTheOthers(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue'), pgmq.create('worker_a_queue')`)
	for _, queue := range []string{"a_queue", "worker_a_queue"} {
		s.exec(t, `SELECT pgmq.send_batch($1, ARRAY['1', '2', '3']::jsonb[], ARRAY['{}', '{}', '{}']::jsonb[], clock_timestamp())`, queue)
	}
	var receipts []pgwake.LockToken
	for len(receipts) < 6 {
		got, err := s.Receive(t.Context(), "a", 10, time.Minute)
		require.NoError(t, err)
		for _, d := range got {
			receipts = append(receipts, d.Receipt)
		}
	}
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `DELETE FROM pgmq.q_a_queue WHERE msg_id = 1`)
	require.NoError(t, err)
	s.exec(t, `UPDATE pgmq.q_a_queue SET vt = clock_timestamp() WHERE msg_id = 3`)

	bounded, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = s.Extend(bounded, receipts, time.Hour)
	var locked *dispatch.NotExtendedError
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &locked)
	require.ErrorAs(t, err, &lost)
	require.Equal(t, []pgwake.LockToken{"1/1/a_queue"}, locked.Receipts)
	require.Equal(t, []pgwake.LockToken{"1/3/a_queue"}, lost.Tokens)
	var extended int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pgmq.q_a_queue WHERE vt > now() + interval '30 min')
		+ (SELECT count(*) FROM pgmq.q_worker_a_queue WHERE vt > now() + interval '30 min')`).Scan(&extended))
	require.Equal(t, 4, extended)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, s.Extend(t.Context(), locked.Receipts, time.Hour))
}

// The same through a Dispatcher: a handler deletes its message to begin with, for exactly once, and is at it for longer than a lease.
func TestDispatcher_HandlerHoldsItsMessage_CostsNoOtherLease(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `SELECT pgmq.send_batch('a_queue', ARRAY['1', '2']::jsonb[], ARRAY['{}', '{}']::jsonb[], clock_timestamp())`)
	other := open(t, s.url)
	require.NoError(t, other.Ping(t.Context()))
	handled := make(chan string, 10)
	twoIsDone := make(chan struct{})
	done := sync.OnceFunc(func() { close(twoIsDone) })
	d := dispatch.New(dispatch.StreamSource(s.Stream, nil), &dispatch.Config{Namespaces: []string{"a"}, Concurrency: 2, LockTimeout: 3 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	d.HandleOthers(func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		handled <- string(item.Input)
		if string(item.Input) == "1" {
			return nil, pgx.BeginFunc(context.WithoutCancel(ctx), other, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), `SELECT pgmq.delete('a_queue', 1)`)
				<-twoIsDone
				return err
			})
		}
		defer done()
		select {
		case <-time.After(7 * time.Second): // longer than two leases
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	require.Eventually(t, func() (empty bool) {
		require.NoError(t, other.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM pgmq.q_a_queue)`).Scan(&empty))
		return empty
	}, patience, 10*time.Millisecond)
	stop()
	require.NoError(t, <-ended)
	close(handled)
	var all []string
	for name := range handled {
		all = append(all, name)
	}
	require.ElementsMatch(t, []string{"1", "2"}, all)
}
