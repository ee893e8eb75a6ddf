package pgwake

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: how does a fetch claim, and leave nothing stranded when its caller, its connection or the server
// goes away in the middle?

// errPoolBusy is not ErrNoWork, which would hide it: a pool that is too small looks like an idle queue.
var errPoolBusy = fmt.Errorf("no connection of the pool came free within the poll timeout: %w", context.DeadlineExceeded)

// errPoolSilent: a connection was there, and did not answer when it was tried, or one could not be made.
var errPoolSilent = fmt.Errorf("no connection of the pool answered within %v: %w", answerDeadline, context.DeadlineExceeded)

// connectGrace is how much longer a connection is waited for that is being made, or tried: like a query in flight.
const connectGrace = time.Second

// acquire waits for a connection, until giveUp unless that is zero. A pool may try a connection before it hands it
// out, and wait for as long as its caller does for an answer that never comes; so this waits in short stretches,
// and has lost its peer unless all connections were in use.
func (p *Provider) acquire(ctx context.Context, giveUp time.Time) (*pgxpool.Conn, error) {
	for graced := false; ; {
		until, last := time.Now().Add(answerDeadline), false
		if !giveUp.IsZero() && giveUp.Before(until) {
			until, last = giveUp, true
		}
		conn, over, err := acquireUntil(ctx, p.pool, until)
		switch busy := errors.Is(err, errPoolBusy); {
		case last && over && !busy && !graced:
			giveUp, graced = giveUp.Add(connectGrace), true
		case last || !over:
			return conn, err
		case !busy:
			if !errors.Is(err, conns.ErrMaking) {
				p.unanswered()
			}
			return nil, errPoolSilent
		}
	}
}

// acquireUntil waits for a connection until then. over says that the time is what ended the wait, and the error is errPoolBusy
// then if all connections were in use.
func acquireUntil(ctx context.Context, pool *pgxpool.Pool, until time.Time) (conn *pgxpool.Conn, over bool, err error) {
	bounded, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	if conn, err = conns.Acquire(bounded, pool); err == nil {
		return conn, false, nil
	}
	over = bounded.Err() != nil && ctx.Err() == nil
	if s := pool.Stat(); over && s.AcquiredConns() == s.MaxConns() {
		err = errPoolBusy
	}
	return nil, over, err
}

// unanswered resets the pool, since what took one of its connections without a sign may have taken all; so may they lead to
// a server that takes no writes any more, and would for as long as they last. If it is the server that is slow, connections made
// anew at each turn would not help it.
func (p *Provider) unanswered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.lastReset) >= answerDeadline {
		p.pool.Reset()
		p.lastReset = time.Now()
	}
}

// claimDeadline bounds the silence of the server during a claim of so many items. A longer one means that it is
// gone, unless it says on another connection that it is at work (see silence); a long history may take as long to
// arrive as it needs.
func claimDeadline(items int) time.Duration {
	return answerDeadline + time.Duration(items)*time.Millisecond
}

// claimed is what a query for work brought back.
type claimed[T any] struct {
	item T
	report
}

// closingPatience is for how long Close, which may have no end of its own, has a claim undone that cannot be.
const closingPatience = 10 * time.Second

// undoing gives a claim back, if it can within that time, and reports whether there was one.
type undoing func(ctx context.Context, patience time.Duration) (undone bool, err error)

// claimQuery asks for work, and reports each row of the answer as it comes.
type claimQuery[T any] func(ctx context.Context, conn *pgxpool.Conn, rowCame func()) (claimed[T], error)

// detached makes a claim so that a caller who leaves in the middle strands nothing. The query runs to its
// end, whatever happens to the caller's context; if the caller is gone by then, or if nobody knows whether
// the server committed, undo gives back what was claimed and reports whether there was something. Only the
// wait for a connection is the caller's to cancel, and ends when plan says.
func detached[T any](ctx context.Context, p *Provider, q Queue, plan fetchPlan, query claimQuery[T], undo undoing) (claimed[T], error) {
	conn, err := p.acquire(ctx, plan.giveUp)
	if err != nil {
		return claimed[T]{}, err
	}
	type outcome struct {
		claimed[T]
		err error
	}
	outcomes := make(chan outcome, 1)
	p.inFlight.Go(func() {
		var o outcome
		defer func() {
			if value := recover(); value != nil {
				o.err = panicError{value, debug.Stack()}
			}
			conns.Release(conn)
			outcomes <- o
		}()
		bounded, cancel := context.WithCancelCause(p.abort)
		defer cancel(nil)
		quiet := p.listen(bounded, cancel, conn.Conn(), q, plan)
		defer quiet.stop()
		if o.claimed, o.err = query(bounded, conn, quiet.rowCame); errors.Is(o.err, context.Canceled) && bounded.Err() != nil && p.abort.Err() == nil {
			o.err = fmt.Errorf("%w: %v", context.Cause(bounded), o.err) // nobody asked for this to end: it is not to say so
			if errors.Is(o.err, errPoolSilent) {
				p.unanswered()
			}
		}
		if takesNoWrites(o.err) {
			p.unanswered()
		}
		if notificationsFull(o.err) { // by the commit, when the rows were there: nothing was claimed
			o.claimed = claimed[T]{}
		}
	})
	unsure := func(err error) error {
		if plan.ack == nil { // what was claimed is given back
			return err
		}
		return unknownOutcome{err}
	}
	select {
	case o := <-outcomes:
		if outcomeUnknown(o.err) {
			o.err = unsure(o.err)
		}
		if outcomeUnknown(o.err) || o.err != nil && o.found > 0 { // the latter: claimed, but not all of it was read
			p.inFlight.Go(func() { p.giveBack(undo, plan.lock) })
		}
		if o.err == nil && o.found > 0 && plan.ack == nil && p.isClosing() { // whoever has it could do nothing with it
			p.inFlight.Go(func() { p.giveBack(undo, plan.lock) })
			return claimed[T]{}, ErrClosed
		}
		return o.claimed, o.err
	case <-ctx.Done():
		p.inFlight.Go(func() {
			if o := <-outcomes; o.found > 0 || outcomeUnknown(o.err) {
				p.giveBack(undo, plan.lock)
			}
		})
		return claimed[T]{}, unsure(ctx.Err())
	}
}

// claimRows sends a query that claims, and hands its rows to scan. If it does nothing else, its commit does not wait
// for the disk: what a crash of the server may take back is a lease, and the token then fails. Both statements
// travel together and are one transaction; the setting ends with it. No SQL function could do this: its own
// setting would be gone at the commit, or stay for the rest of a caller's transaction.
func (p *Provider) claimRows(ctx context.Context, conn *pgxpool.Conn, rowCame func(), onlyClaims bool, scan func(pgx.Rows) error, sql string, args ...any) error {
	batch := &pgx.Batch{}
	if onlyClaims {
		batch.Queue(p.sql.asyncCommit)
	}
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			rowCame()
			if err := scan(rows); err != nil {
				return err
			}
		}
		return rows.Err()
	})
	err := atReadCommitted(ctx, conn, p.readCommitted, func(q sender) error { return q.SendBatch(ctx, batch).Close() })
	if said := serverError(err); said != nil && said.Code == "54000" && !notificationsFull(err) { // a row is more than the server can send
		return unreadable{err}
	}
	return err
}

// giveBack undoes a claim. The first attempt may come before the claim commits, if the server is still busy
// with it, and then finds nothing to undo; so there are several, and more for as long as the database cannot be asked, until
// the lease ends, each of which may take twice as long as the one before: the server may have much to undo. Close waits for them, so
// they come quickly then, and are made for closingPatience if the database cannot be asked.
func (p *Provider) giveBack(undo undoing, lease time.Duration) {
	defer func() {
		if panicked := recover(); panicked != nil {
			p.cfg.Logger.Error("pgwake: panic while a claim was undone", "panic", panicked, "stack", string(debug.Stack()))
		}
	}()
	end := time.Now().Add(lease)
	pauses := []time.Duration{0, 100 * time.Millisecond, time.Second, 5 * time.Second}
	closing := p.closing
	for i := 0; ; i++ {
		patience := answerDeadline << min(i, 4)
		if closing == nil {
			patience = min(patience, max(time.Until(end), time.Second))
		}
		wait := time.NewTimer(pauses[min(i, len(pauses)-1)])
		select {
		case <-wait.C:
		case <-closing:
			wait.Stop()
			closing, pauses = nil, []time.Duration{0, 100 * time.Millisecond, 100 * time.Millisecond, 100 * time.Millisecond}
			if most := time.Now().Add(closingPatience); most.Before(end) {
				end = most
			}
		}
		undone, err := undo(p.abort, patience)
		switch tries := i + 1; {
		case err != nil && time.Now().Before(end) && p.abort.Err() == nil: // nobody knows yet
		case undone || err == nil && tries >= len(pauses), err != nil:
			return
		}
	}
}
