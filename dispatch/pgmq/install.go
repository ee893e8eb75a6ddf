package pgmq

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
)

// This file answers: what does a database with pgmq need, and how does it get it?

//go:embed install.sql
var installation string

// Install adds what this package needs to a database with pgmq 1.5 or newer, or brings it up to date. The role must own pgmq's tables. It
// waits for transactions that have sent to a queue, and keeps others from sending until it is done, for some milliseconds. Safe to call
// again, and by several at a time. Fails with pgwake.ErrConfig if there is no such pgmq, and with pgwake.ErrPermission.
func Install(ctx context.Context, pool *pgxpool.Pool) error {
	// Whatever the role's isolation level: a queue that somebody else has made before it is the turn of this one is to be seen.
	err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		var found bool
		if err := tx.QueryRow(ctx, `SELECT to_regprocedure('pgmq.send_batch(text, jsonb[], jsonb[], timestamptz)') IS NOT NULL`).Scan(&found); err != nil {
			return err
		}
		if !found {
			return fmt.Errorf("%w: there is no pgmq of version 1.5 or newer in the database", pgwake.ErrConfig)
		}
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('pgwake_pgmq', 0))`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, installation)
		return err
	})
	return failed("install", err)
}

// Uninstall removes what Install has added, and nothing of pgmq. Streams on the database fail from then on.
func Uninstall(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `DROP SCHEMA IF EXISTS pgwake_pgmq CASCADE`)
	return failed("uninstall", err)
}
