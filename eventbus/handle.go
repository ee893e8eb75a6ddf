package eventbus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/jsonvalue"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: what happens between a delivery and its end?

// Handler handles events in a transaction: what it does by tx takes effect together with the end of the delivery, exactly once, and together
// with what the other handlers of the event do. It must not end the transaction; tx.Begin is for savepoints. An error, or a panic, rolls all of it
// back. Its context ends when the delivery is somebody else's, or when the Node cannot wait any longer. It is called by many goroutines at
// a time.
type Handler func(ctx context.Context, e *Event, tx pgx.Tx) error

// PlainHandler handles events without a transaction: for effects elsewhere. It may be called more than once for an event: after an
// error, after a crash, and when a Handler of the same event fails. For the rest it is as a Handler.
type PlainHandler func(ctx context.Context, e *Event) error

// RetryAfter returns an error for a handler that says how long to wait before the next attempt, not less than 0 and not more than 100
// years. Of nil it returns nil.
func RetryAfter(err error, delay time.Duration) error { return dispatch.RetryAfter(err, delay) }

// DeadLetter returns an error for a handler that no further attempt would help: the delivery becomes a dead letter. Of nil it returns nil.
func DeadLetter(err error) error { return dispatch.Permanent(err) }

// The reasons of dead letters of the bus.
const (
	ReasonHandler   = "Handler error"         // a handler failed, or its process ended, in all attempts, or it said that none would help
	ReasonNoHandler = "No handler for event " // and the type: the event was for no group, see Config.StrictRouting
	ReasonNotInLog  = "Event not in the log"  // it was removed before it was handled
	reasonNoEvent   = "Not a delivery"        // nothing of the bus has made it
)

var errTxEnds = errors.New("the transaction of a handler ends with its delivery")

// noTrouble is how long to wait before a delivery is tried again that failed without any fault of its handlers. Such an attempt does not count.
const noTrouble = 100 * time.Millisecond

// handle is the dispatch.Handler of all deliveries.
func (n *Node) handle(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
	var d delivery
	if err := jsonvalue.Unmarshal(item.Input, &d); err != nil {
		return nil, n.bury(ctx, item, reasonNoEvent, err.Error())
	}
	if item.Tag == controlTag {
		return nil, n.routeAgain(ctx, d)
	}
	event, err := n.event(ctx, item, d)
	switch {
	case err != nil:
		n.cfg.Logger.Warn("eventbus: cannot read an event", "event", d.EventID, "error", err, "again_in", readPause)
		return nil, dispatch.Snooze(readPause)
	case event == nil:
		return nil, n.buryAbsent(ctx, item, d)
	}
	event.MessageID, event.Redelivery = item.ID, item.Attempt-1
	plain, transactional := n.handlers.of(event.Type)
	if len(plain)+len(transactional) == 0 {
		if _, pattern, _ := strings.Cut(item.Tag, "|"); !Match(pattern, event.Type) { // no handler is going to be for it
			return nil, n.bury(ctx, item, reasonNoEvent, fmt.Sprintf("events of type %q do not come by the tag %q", event.Type, item.Tag))
		}
		return nil, dispatch.Snooze(noTrouble) // it was claimed for one that is known by now, or is no more
	}
	for _, h := range plain {
		if err := h(ctx, event); err != nil {
			return nil, err
		}
	}
	if len(transactional) == 0 {
		return nil, nil
	}
	return nil, n.transact(ctx, item.LockToken, func(tx pgx.Tx) error {
		for _, h := range transactional {
			if err := h(ctx, event, tx); err != nil {
				return err
			}
		}
		return nil
	})
}

// event is that of a delivery, which carries it unless it could not be read before. Nil: it is not in the log any more.
func (n *Node) event(ctx context.Context, item *pgwake.ClaimedWorkItem, d delivery) (*Event, error) {
	if d.Payload != nil {
		return d.event(item), nil
	}
	events, err := n.events(ctx, []delivery{d})
	return events[d.EventID], err
}

// buryAbsent makes a delivery a dead letter whose event was not found.
//
// Invariant: that counts on the server alone that has the claim, and takes writes. After a switchover connections of the pool may lead to the former
// primary for a while, which has neither what was emitted since nor who claimed it.
func (n *Node) buryAbsent(ctx context.Context, item *pgwake.ClaimedWorkItem, d delivery) error {
	id, claim, err := item.LockToken.WorkItem()
	if err != nil {
		return err
	}
	var absent []bool
	err = n.do(ctx, "look for event", false, func(ctx context.Context, q pgwake.Querier) error {
		ctx, cancel := context.WithTimeout(ctx, endTimeout)
		defer cancel()
		rows, err := q.Query(ctx, "SELECT NOT EXISTS (SELECT FROM "+n.call("get_events", 2)+") FROM "+n.in+"worker_queue AS q "+
			"WHERE q.id OPERATOR(pg_catalog.=) $3 AND q.lock_token OPERATOR(pg_catalog.=) $4::pg_catalog.text::pg_catalog.uuid FOR KEY SHARE OF q",
			[]int64{d.EventID}, []time.Time{d.EmittedAt}, id, claim)
		if err == nil {
			absent, err = pgx.CollectRows(rows, pgx.RowTo[bool])
		}
		return err
	})
	if err != nil || !slices.Equal(absent, []bool{true}) {
		n.cfg.Logger.Warn("eventbus: cannot tell whether an event is in the log", "event", d.EventID, "error", err, "again_in", readPause)
		return dispatch.Snooze(readPause)
	}
	return n.bury(ctx, item, ReasonNotInLog, "")
}

// bury makes a delivery a dead letter that no handler was called for.
func (n *Node) bury(ctx context.Context, item *pgwake.ClaimedWorkItem, reason, cause string) error {
	n.cfg.Logger.Error("eventbus: given up", "item", item.ID, "type", item.Name, "reason", reason, "error", cause)
	return noFault(dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
		return n.p.DeadLetterWorkItem(ctx, token, reason, cause)
	}))
}

// noFault has what the database could not do now tried again, at nobody's expense: no handler was called.
func noFault(err error) error {
	if outage.Passes(err) {
		return dispatch.Snooze(readPause)
	}
	return err
}

// transact has the effects of handlers, and the acknowledgement, in one transaction, and acknowledges with the commit: one round trip.
func (n *Node) transact(ctx context.Context, token pgwake.LockToken, handlers func(pgx.Tx) error) error {
	item, claim, err := token.WorkItem()
	if err != nil {
		return err
	}
	archive := ""
	if keep := n.p.ArchiveFor(); keep > 0 {
		// Before PostgreSQL 15, no number in an interval may be above 2³¹.
		archive = fmt.Sprintf(", p_archive_for => '%d seconds %d microseconds'", keep/time.Second, (keep % time.Second).Microseconds())
	}
	beginning, cancel := context.WithTimeout(ctx, endTimeout) // of BEGIN alone
	defer cancel()
	tx, err := conns.Transactions{Pool: n.p.Pool()}.BeginTx(beginning, pgx.TxOptions{
		IsoLevel: pgx.ReadCommitted, CommitQuery: fmt.Sprintf("SELECT %sack_work(%d, '%s'%s); COMMIT", n.in, item, claim, archive), // numbers and a UUID
	})
	if err != nil {
		if ctx.Err() != nil && !errors.Is(context.Cause(ctx), dispatch.ErrTimeout) {
			return fmt.Errorf("begin: %w", err)
		}
		n.cfg.Logger.Warn("eventbus: cannot begin the transaction of a handler", "error", err, "again_in", readPause)
		return dispatch.Snooze(readPause)
	}
	defer func() {
		// After a commit it does nothing. The handler's context may have ended.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		_ = tx.Rollback(ending)
	}()
	if err := handlers(handlerTx{tx}); err != nil {
		if leadsToReadOnly(ctx, tx, err) {
			n.cfg.Logger.Warn("eventbus: a handler's connection leads to a server that takes no writes", "error", err, "again_in", readPause)
			return dispatch.Snooze(readPause)
		}
		return err
	}
	open := !tx.Conn().IsClosed()
	err = dispatch.AckBy(ctx, func(ctx context.Context, _ pgwake.LockToken) error {
		return pgwake.WrapError("handle event", tx.Commit(ctx)) // if it has committed all the same, nobody can give the item back
	})
	if failure := (*pgwake.Error)(nil); errors.As(err, &failure) && failure.Retryable && open && n.spares(item, failure) {
		// A deadlock, say, with others who lined up events of the same keys, or a longer wait for them than there is time for. A connection
		// that was closed before is the handler's doing, such as by a time limit of its own that it does not mention: it would be so again.
		n.cfg.Logger.Warn("eventbus: cannot commit", "error", err, "again_in", noTrouble)
		return dispatch.Snooze(noTrouble)
	}
	n.spared.Delete(item)
	return err
}

// mostSpared is how many commits of one delivery may fail in a row that cost no attempt: of those that wait for others, a hundred seconds, or more.
const mostSpared = 10

// spares reports whether a commit that failed so is to cost no attempt. Invariant: what the server is like, and others, cost a handler none, and no
// handler whose commits always fail, such as by a trigger that takes too long, or since a time limit of the server ends its session, has its key
// stand still for ever. That it had a deadlock is nothing that would be so again.
func (n *Node) spares(item int64, failure *pgwake.Error) bool {
	if strings.HasPrefix(failure.SQLState, "40") {
		return true
	}
	before, _ := n.spared.LoadOrStore(item, new(atomic.Int64))
	return before.(*atomic.Int64).Add(1) <= mostSpared
}

// leadsToReadOnly reports whether a handler failed since the connection of its transaction leads to a server that takes no writes any more, and not since it
// has its transaction take none, or for some other database. It ends the transaction, and closes that connection: nobody is to draw it again.
func leadsToReadOnly(ctx context.Context, tx pgx.Tx, err error) bool {
	if failure := (*pgwake.Error)(nil); !errors.As(pgwake.WrapError("handle event", err), &failure) || failure.SQLState != "25006" {
		return false
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	var readOnly string
	conn := tx.Conn()
	if _, err := conn.Exec(ending, "ROLLBACK"); err != nil { // not by tx, which would release the connection
		return false
	}
	if err := conn.QueryRow(ending, "SHOW transaction_read_only").Scan(&readOnly); err != nil || readOnly != "on" {
		return false
	}
	_ = conn.Close(ending)
	return true
}

// endTimeout bounds what the bus itself sends around a handler, on a connection that may have lost its peer and give no sign of it.
const endTimeout = 10 * time.Second

// handlerTx is a transaction that its user cannot end.
type handlerTx struct{ pgx.Tx }

func (handlerTx) Commit(context.Context) error   { return errTxEnds }
func (handlerTx) Rollback(context.Context) error { return errTxEnds }

// routeAgain delivers an event that was a dead letter because it was for nobody.
func (n *Node) routeAgain(ctx context.Context, d delivery) error {
	return noFault(dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
		item, claim, err := token.WorkItem()
		if err != nil {
			return err
		}
		_, err = value[int64](ctx, n.Bus, verb{op: "route event", function: "route_again", enqueues: true, args: []any{item, claim, d.EventID, d.EmittedAt}})
		return err
	}))
}
