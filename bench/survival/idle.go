package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what if a transaction stays open, so that nothing of what is done can be cleared away?

const (
	heldRate = 0.9 // of what is enqueued
	heldP99  = time.Second
)

var idle = scenario{
	name: "idle-in-transaction", what: "a REPEATABLE READ transaction has a snapshot, and stays idle", rate: 800,
	promise: fmt.Sprintf("%.0f%% of what is enqueued is done in the same time, p99 under %v meanwhile and afterwards", 100*heldRate, heldP99),
	run: func(ctx context.Context, t *trial) error {
		return t.threePhases(ctx, func(ctx context.Context) error {
			return t.ask(ctx, func(conn *pgx.Conn) error {
				return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, countQueued)
					if err == nil {
						<-ctx.Done()
					}
					return err
				})
			})
		})
	},
	keep: keepHeld,
}

func keepHeld(r *result) []string {
	return slices.Concat(r.slow(during, heldRate), r.late(during, heldP99), r.late(after, heldP99))
}
