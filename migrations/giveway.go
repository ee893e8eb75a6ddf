package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: who waits while a table is changed that somebody works with?
//
// A statement that changes a table waits for all who use it, and all who want to use it from then on wait behind it. So with one
// transaction that stays open every producer would stand still.

const (
	// lockTimeout is how long a statement of a migration waits for a lock, and so do others behind it.
	lockTimeout = "400ms"

	// defaultPatience is for how long a migration is tried again.
	defaultPatience = 2 * time.Minute

	// turnPatience is how long to wait for others that migrate the schema: a migration of a large table takes a while.
	turnPatience = 10 * time.Minute

	// endPatience is how long Up goes on for at most when its session broke off, as when its context ends.
	endPatience = time.Second

	lockNotAvailable = "55P03"
	deadlockDetected = "40P01"
)

// giveWay calls apply until it has got its locks. Each migration is a transaction of its own, so apply goes on with the one that failed.
func (l Layer) giveWay(ctx context.Context, db *sql.DB, schema string, apply func() error) error {
	patience := l.patience
	if patience == 0 {
		patience = defaultPatience
	}
	until := time.Now().Add(patience)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		err := apply()
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != lockNotAvailable && refused.Code != deadlockDetected {
			return err
		}
		if time.Now().Add(pause).After(until) {
			return fmt.Errorf("%w, after %v of trying: %s: %w", ErrBusy, patience, lockHolders(ctx, db, schema), err)
		}
		select {
		case <-time.After(pause - rand.N(pause/4)):
		case <-ctx.Done():
			return fmt.Errorf("%w: %s: %w", ctx.Err(), ErrBusy, err)
		}
	}
}

// waitForTurn takes the advisory lock of the migrations of a schema, for the session. Any session of the database can take it, and keep it:
// advisory locks have no owner. It leaves lock_timeout at its own patience.
func (l Layer) waitForTurn(ctx context.Context, db *sql.DB, schema string) error {
	patience := l.patience
	if patience == 0 {
		patience = turnPatience
	}
	// Those of them that this version of the server has: of a role's, for statements of an application.
	_, err := db.ExecContext(ctx, `SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')`)
	if err != nil {
		return err
	}
	if err := setLockTimeout(ctx, db, fmt.Sprintf("%dms", patience.Milliseconds())); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `SELECT pg_advisory_lock(hashtextextended('pgwake migrations of ' || $1, 0))`, schema)
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != lockNotAvailable {
		return err
	}
	var holder sql.NullInt64
	lookErr := db.QueryRowContext(ctx, `
		SELECT max(l.pid) FROM pg_locks l, hashtextextended('pgwake migrations of ' || $1, 0) AS key
		 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		   AND l.classid::bigint = (key >> 32) & 4294967295 AND l.objid::bigint = key & 4294967295`, schema).Scan(&holder)
	return fmt.Errorf("%w, after %v: pid %d migrates the schema, or holds the advisory lock of that: %w", ErrBusy, patience, holder.Int64, errors.Join(err, lookErr))
}

func setLockTimeout(ctx context.Context, db *sql.DB, timeout string) error {
	_, err := db.ExecContext(ctx, `SELECT set_config('lock_timeout', $1, false)`, timeout)
	return err
}

// lockHolders says which transactions have locks on tables of the schema, the oldest first.
func lockHolders(ctx context.Context, db *sql.DB, schema string) string {
	rows, err := db.QueryContext(ctx, `
		SELECT format('%s of pid %s (%s) in transaction for %s s', string_agg(DISTINCT l.relation::regclass::text, ', '), a.pid,
		              coalesce(nullif(a.application_name, ''), 'no application_name'), extract(epoch FROM clock_timestamp() - a.xact_start)::bigint)
		  FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_stat_activity a ON a.pid = l.pid
		 WHERE l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		   AND c.relnamespace = to_regnamespace($1) AND c.relkind IN ('r', 'p') AND l.pid <> pg_backend_pid()
		 GROUP BY a.pid, a.application_name, a.xact_start ORDER BY a.xact_start LIMIT 5`, pgx.Identifier{schema}.Sanitize())
	if err != nil {
		return err.Error()
	}
	defer rows.Close()
	var holders []string
	for rows.Next() {
		var holder string
		if err := rows.Scan(&holder); err != nil {
			return err.Error()
		}
		holders = append(holders, holder)
	}
	if err := rows.Err(); err != nil {
		return err.Error()
	}
	if holders == nil {
		return "by now nobody does"
	}
	return strings.Join(holders, "; ")
}
