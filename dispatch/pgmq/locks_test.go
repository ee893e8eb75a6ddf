package pgmq_test

import (
	"context"
	"fmt"
	"slices"
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
	for verb, call := range map[string]func(context.Context, []pgwake.LockToken) error{
		"ack":    s.Ack,
		"extend": func(ctx context.Context, all []pgwake.LockToken) error { return s.Extend(ctx, all, time.Hour) },
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
