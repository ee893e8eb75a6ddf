package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"
)

// This file answers: what do others do to a server that pgwake shares with them: limits of time, and of connections?

// chaosRole is whom the processes connect as, so that what is taken from it leaves the parent alone. So do the server's limits of time.
const (
	chaosRole     = "chaos"
	makeChaosRole = `CREATE ROLE chaos SUPERUSER LOGIN; ALTER ROLE CURRENT_USER SET statement_timeout = 0; ALTER ROLE CURRENT_USER SET lock_timeout = 0`
	endSessions   = `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'chaos'`
)

// limit gives all sessions of the processes a timeout. Rows are locked meanwhile, so that somebody waits.
func limit(setting string) func(*chaos, context.Context, fault, *node) (func() error, error) {
	return func(c *chaos, ctx context.Context, f fault, n *node) (func() error, error) {
		set := func(ctx context.Context, how string) error {
			return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				if _, err := conn.Exec(ctx, `ALTER SYSTEM `+how); err != nil {
					return err
				}
				_, err := conn.Exec(ctx, `SELECT pg_reload_conf()`)
				return err
			})
		}
		unlock, err := c.lockRows(ctx, f, n)
		if err != nil {
			return nil, errMissed
		}
		heal := func() error { return errors.Join(unlock(), set(ctx, "RESET "+setting)) }
		if err := set(ctx, fmt.Sprintf("SET %s = %d", setting, f.Size)); err != nil {
			return nil, errors.Join(errMissed, heal())
		}
		return heal, nil
	}
}

// exhaustPool has the process keep all connections of its pool, which in half of the processes is the Provider's too.
func (c *chaos) exhaustPool(_ context.Context, _ fault, n *node) (func() error, error) {
	select {
	case <-n.process.ready:
	default:
		return nil, errMissed
	}
	p := n.process
	p.tell("hog")
	return func() error { p.tell("release"); return nil }, nil
}

// hog takes all connections of the pool as they become free, until release.
func (w *workload) hog() {
	ctx, cancel := context.WithCancel(w.alive)
	w.hogging = cancel
	for range w.pool.Config().MaxConns {
		w.loops.Go(func() {
			if conn, err := w.pool.Acquire(ctx); err == nil {
				<-ctx.Done()
				conn.Release()
			}
		})
	}
}

func (w *workload) release() {
	if w.hogging != nil {
		w.hogging()
	}
}

// useUpConnections has strangers take all connections that the server gives, those of the processes too.
func (c *chaos) useUpConnections(ctx context.Context, _ fault, _ *node) (func() error, error) {
	var (
		mu    sync.Mutex
		taken []*pgx.Conn
	)
	giveBack := func() error {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		for _, conn := range taken {
			_ = conn.Close(closing) // the server may be gone
		}
		return nil
	}
	take := func(ctx context.Context) error {
		for {
			conn, err := pgx.Connect(ctx, c.server.URL)
			if full := (*pgconn.PgError)(nil); errors.As(err, &full) && full.Code == "53300" {
				return nil
			}
			if err != nil {
				return err
			}
			mu.Lock()
			taken = append(taken, conn)
			mu.Unlock()
		}
	}
	fill := func() error { // many at once, since those who lose theirs try again as well
		filling, cancel := context.WithTimeout(ctx, askBound)
		defer cancel()
		takers, filling := errgroup.WithContext(filling)
		for range 8 {
			takers.Go(func() error { return take(filling) })
		}
		return takers.Wait()
	}
	if fill() != nil || len(taken) == 0 {
		_ = giveBack()
		return nil, errMissed
	}
	_, err := taken[0].Exec(ctx, endSessions)
	// They try again at once, and so does this: whoever is first has it.
	if err = errors.Join(err, fill()); err != nil {
		_ = giveBack()
		return nil, errMissed
	}
	return giveBack, nil
}

// holdOpen has a transaction of somebody else stay open for the whole run, if that is to be. It has written, so that all
// snapshots reckon with it. What ends the server ends it as well; then another one takes its place.
func (c *chaos) holdOpen(ctx context.Context) (err error) {
	if !c.heldOpen {
		return nil
	}
	asking, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	if c.held != nil {
		if _, err := c.held.Exec(asking, `SELECT 1`); err == nil {
			return nil
		}
		c.letGo()
	}
	if c.held, err = pgx.Connect(asking, c.server.URL); err != nil {
		return err
	}
	_, err = c.held.Exec(asking, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*), pg_current_xact_id() FROM pg_class`)
	return err
}

// letGo ends the transaction that holdOpen began.
func (c *chaos) letGo() {
	if c.held == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.held.Close(ctx)
	c.held = nil
}
