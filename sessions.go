package pgwake

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: who keeps a session, and until when?
//
// A fetch with SessionOptions claims the session of the item that it claims. While its lock lasts, nobody else is given
// an item of that session; the owner makes it last longer by fetching, or with RenewSessionLock, and ends it with
// ReleaseSessions.

// RenewSessionLock makes the sessions of these owners end extend from now (0: DefaultLockTimeout) and returns how many
// that were. Sessions that have ended are not revived, and those without activity for idle (a fetch, an ack or a renewal
// of one of their items) are left to end; idle 0 leaves all. One that another transaction has locked for longer than a moment, as an open one has
// that acknowledged an item of it, is not waited for and not counted: it holds as it is, nobody else is given an item of it meanwhile, and the next
// renewal makes it longer if it has not ended by then.
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
	if err := checkOwners("session owner", owners); err != nil {
		return 0, until, err
	}
	err = q.QueryRow(ctx, p.sql.renewSessions, owners, extend, idle).Scan(&renewed, &until)
	return renewed, until, err
}

func checkOwners(what string, owners []string) error {
	for i, owner := range owners {
		if err := checkText(what, owner, true); err != nil {
			return at(i, len(owners), err)
		}
	}
	return nil
}

// ReleaseSessions ends the sessions of these owners now, so that others have their items at once and not when the locks end,
// and returns how many that were. Sessions of which an item is leased are left as they are. It is for owners that leave: settle
// what is in hand, claim no more, and then release. The owner who fetches all the same gets a session again that
// is free. Fails with ErrInvalid for an owner that is empty or has more than 255 bytes. Safe for concurrent use; it waits for
// whoever claims, acknowledges or renews an item of such a session at this moment.
func (p *Provider) ReleaseSessions(ctx context.Context, owners []string) (released int, err error) {
	return p.letGo(ctx, "release sessions", Worker, func(ctx context.Context, q querier) (int, error) {
		return p.releaseSessions(ctx, q, owners)
	})
}

// ReleaseSessionsTx is ReleaseSessions as part of the transaction: until that ends, nobody is given an item of these sessions.
func (p *Provider) ReleaseSessionsTx(ctx context.Context, tx pgx.Tx, owners []string) (released int, err error) {
	err = p.doTx(ctx, tx, "release sessions", func(ctx context.Context, q querier) error {
		released, err = p.releaseSessions(ctx, q, owners)
		return err
	})
	return released, err
}

func (p *Provider) releaseSessions(ctx context.Context, q querier, owners []string) (released int, err error) {
	if err := checkOwners("session owner", owners); err != nil {
		return 0, err
	}
	err = q.QueryRow(ctx, p.sql.releaseSessions, owners).Scan(&released)
	return released, err
}

// letGo runs a verb that leaves to anybody what was an owner's.
func (p *Provider) letGo(ctx context.Context, op string, queue Queue, verb func(context.Context, querier) (int, error)) (released int, err error) {
	err = p.doAndTell(ctx, op, func(ctx context.Context, q querier) error {
		released, err = verb(ctx, q)
		return err
	}, func() {
		if released > 0 {
			p.engine.letGo(queue)
		}
	}, queue)
	return released, err
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
