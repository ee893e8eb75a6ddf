package pgwake

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: who keeps a session, and until when?
//
// A fetch with SessionOptions claims the session of the item that it claims. While its lock lasts, nobody else is given
// an item of that session; the owner makes it last longer by fetching, or with RenewSessionLock.

// RenewSessionLock makes the sessions of these owners end extend from now (0: DefaultLockTimeout) and returns how many
// that were. Sessions that have ended are not revived, and those without activity for idle (a fetch, an ack or a renewal
// of one of their items) are left to end; idle 0 leaves all.
func (p *Provider) RenewSessionLock(ctx context.Context, owners []string, extend, idle time.Duration) (renewed int, err error) {
	var until time.Time
	err = p.doAndTell(ctx, "renew session lock", func(ctx context.Context, q querier) error {
		renewed, until, err = p.renewSessions(ctx, q, owners, extend, idle)
		return err
	}, func() { p.engine.renewed(Worker, until) })
	return renewed, err
}

// RenewSessionLockTx is RenewSessionLock as part of the transaction.
func (p *Provider) RenewSessionLockTx(ctx context.Context, tx pgx.Tx, owners []string, extend, idle time.Duration) (renewed int, err error) {
	err = p.doTx(ctx, tx, "renew session lock", func(ctx context.Context, q querier) error {
		renewed, _, err = p.renewSessions(ctx, q, owners, extend, idle)
		return err
	})
	return renewed, err
}

func (p *Provider) renewSessions(ctx context.Context, q querier, owners []string, extend, idle time.Duration) (renewed int, until time.Time, err error) {
	if extend, err = lockTimeout(extend); err != nil {
		return 0, until, err
	}
	if idle < 0 || idle > maxDelay {
		return 0, until, invalid("idle time %v is not between 0 and %v", idle, maxDelay)
	}
	for i, owner := range owners {
		if err := checkText("session owner", owner, true); err != nil {
			return 0, until, at(i, len(owners), err)
		}
	}
	err = q.QueryRow(ctx, p.sql.renewSessions, owners, extend, idle).Scan(&renewed, &until)
	return renewed, until, err
}

// CleanupSessions removes the sessions that have ended and have no items queued, and returns how many that were. It
// changes nothing but the size of the table: a session is made anew by the first claim.
func (p *Provider) CleanupSessions(ctx context.Context) (removed int, err error) {
	err = p.do(ctx, "clean up sessions", func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, p.sql.cleanupSessions).Scan(&removed)
	})
	return removed, err
}

// CleanupSessionsTx is CleanupSessions as part of the transaction.
func (p *Provider) CleanupSessionsTx(ctx context.Context, tx pgx.Tx) (removed int, err error) {
	err = p.doTx(ctx, tx, "clean up sessions", func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, p.sql.cleanupSessions).Scan(&removed)
	})
	return removed, err
}
