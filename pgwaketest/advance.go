package pgwaketest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
)

// This file answers: how does time pass in a test?

// Advance makes everything on the Provider's schema as if d more had passed: delayed items and timers become due, leases
// and sessions end, what is finished grows old, tasks of the task graph likewise, and fetches that wait wake up. It moves
// what is stored, not the server's clock: an item enqueued afterwards with a delay of an hour is due in an hour, and
// instants that were returned before, such as LockedUntil, are d too late. Other Providers on the schema see it too. What
// an open transaction has added stays as it is; one that has changed or removed something is waited for, and if that takes
// 10 s the test fails.
func Advance(tb testing.TB, p *pgwake.Provider, d time.Duration) {
	tb.Helper()
	if d <= 0 {
		tb.Fatalf("advance by %v: time goes forward only", d)
	}
	err := backstage(tb, p, func(ctx context.Context, conn *pgx.Conn) error {
		moved, err := whatMoves(ctx, conn)
		if err != nil {
			return err
		}
		for alone := true; ; alone = !alone {
			err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
				return advance(ctx, tx, moved, d, alone)
			})
			if err != nil && ctx.Err() != nil {
				return fmt.Errorf("a transaction on the schema stays open: %w", err)
			}
			var refused *pgconn.PgError
			if !errors.As(err, &refused) {
				return err
			}
			switch refused.Code {
			case "40001", "40P01", "55P03": // somebody was faster, or has a row
			default:
				return err
			}
		}
	})
	if err != nil {
		tb.Fatalf("advance by %v: %v", d, err)
	}
}

// tables are those with instants. The schema may hold other tables, of its user.
var tables = []string{"namespaces", "worker_queue", "dedup_keys", "rates", "limits", "orchestrator_queue", "realignments",
	"instance_locks", "instances", "executions", "history", "sessions", "dead_letters", "archive"}

// layers have tables of their own on the schema, if their migrations are there. Otherwise tables of these names are somebody else's.
var layers = []struct {
	migrations string   // the table of those that were applied
	tables     []string // those with instants
	also       string   // what else depends on the time, of which $1 has passed
}{{
	migrations: "taskgraph_migrations",
	tables: []string{"task_definitions", "step_definitions", "tasks", "steps", "step_dependencies", "task_transitions", "step_transitions",
		"task_dlq", "rollup_cursor"},
	also: `UPDATE tasks SET priority_key = priority_key + s.age_weight * extract(epoch FROM $1::interval)::float8 / 3600 FROM taskgraph_settings s`,
}, {
	migrations: "eventbus_migrations", // what the log says stays as it is: deliveries refer to its rows by their time as well
	tables:     []string{"event_dedup_keys", "event_nodes"},
	also:       `SELECT $1::interval`,
}}

// moves are the tables whose instants Advance moves, and what else it does.
type moves struct {
	tables []string
	also   []string
}

// whatMoves looks which layers there are. That is before the transaction, whose first lock comes before its snapshot.
func whatMoves(ctx context.Context, conn *pgx.Conn) (moves, error) {
	m := moves{tables: tables}
	for _, l := range layers {
		var applied bool
		err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, l.migrations).Scan(&applied)
		if err == nil && applied { // the table outlives them
			err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+l.migrations+` WHERE version_id > 0 AND is_applied)`).Scan(&applied)
		}
		if err != nil {
			return m, err
		}
		if applied {
			m.tables, m.also = append(slices.Clone(m.tables), l.tables...), append(m.also, l.also)
		}
	}
	return m, nil
}

// advance moves every instant on the schema in one snapshot, so that a claim lies before it or after it as a whole. It
// gives way to others rather than have one of them become the victim of a deadlock, which is noticed after 1 s. Alone,
// it cannot meet a conflict, but cannot begin while somebody's transaction is open, either.
func advance(ctx context.Context, tx pgx.Tx, moved moves, d time.Duration, alone bool) error {
	if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '100ms'`); err != nil {
		return err
	}
	if alone { // before there is a snapshot
		if _, err := tx.Exec(ctx, `LOCK TABLE `+strings.Join(moved.tables, ", ")+` IN EXCLUSIVE MODE`); err != nil {
			return err
		}
	}
	rows, err := tx.Query(ctx, `
		SELECT format('UPDATE %I SET %s', c.relname, string_agg(format('%1$I = %1$I - $1::interval', a.attname), ', '))
		  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
		 WHERE c.relnamespace = to_regnamespace(quote_ident(current_schema())) AND c.relname = ANY ($1)
		   AND a.atttypid = 'timestamptz'::regtype AND NOT a.attisdropped
		 GROUP BY c.relname ORDER BY c.relname`, moved.tables)
	if err != nil {
		return err
	}
	updates, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, update := range append(updates, moved.also...) {
		if _, err := tx.Exec(ctx, update, d); err != nil {
			return err
		}
	}
	_, err = tx.Exec(ctx, `SELECT notify_queue(queue, 1, NULL) FROM unnest(ARRAY['worker', 'orchestrator']) AS queue`)
	return err
}
