package dispatch

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: how does a handler, or a Decider, acknowledge by itself what it is at work on?
//
// In the statement, or the transaction, that has its effects. When that has committed nobody can take them back, so it is known then
// what has become of the item, whatever else the handler does: fail, panic, or not come to its end. A renewal right after the commit
// finds no lease, and the time of the handler may be up at that moment: neither is to cut the commit short, or to
// end a context for the loss of a lease that was not lost.
//
// Invariant: of an item in hand one such acknowledgement is under way at a time, and nothing else settles the item meanwhile. None
// begins once the handler has ended or the item was given back, nor after one that succeeded, or may have.

// AckBy has a handler acknowledge its item by itself, together with its effects: by one statement that also calls ack_work of the SQL
// functions, or by a transaction of its own that ends with that or with AckWorkItemTx, on the database of SourceFrom. It is to be called with the context of the
// handler, or one made of that, and calls ack with the token of the item (see pgwake.LockToken.WorkItem). If that returns nil the item
// is done, whatever the handler returns afterwards; a result is for nobody then, and no completion is sent. If it returns an error, so does
// AckBy, and the item is not done:
//
//   - pgwake.ErrLockLost, also as SQLSTATE PW001: the lease was lost, and the item is somebody else's.
//   - Another one, and nothing took effect: the handler goes on as it likes, and may call AckBy again. If it returns nil all the same, it
//     has failed with that error.
//   - An *pgwake.Error that is Unknown, or one of a connection that broke: perhaps it took effect. The handler is to return; the item
//     is given back, which is of no consequence if it is gone.
//
// The same is for a Decider and its turn, with ack_orchestration or AckOrchestrationItemTx: after nil the Orchestrator does not
// acknowledge, whatever ack the Decider returns; OrchestratorConfig.Sticky is not for such a turn.
//
// The context of ack goes on when the one of the handler ends, be it for its time or the end of the Dispatcher, but has 10 s in all. So
// ack is not to send much by a slow network: that is for before it, in the transaction, or for the Dispatcher's own acknowledgement.
// Fails with pgwake.ErrInvalid, and is not tried again, outside of a handler, in a BatchHandler, without ack, and when it was called
// before or meanwhile, unless that failed and had no effect; with pgwake.ErrLockLost without a call of ack if the lease is lost by
// then, or the handler was left behind.
func AckBy(ctx context.Context, ack func(ctx context.Context, token pgwake.LockToken) error) error {
	h, ok := ctx.Value(heldKey{}).(inHand)
	switch {
	case !ok:
		return misused("it is for handlers of single items, and for Deciders, with the context that they were called with")
	case ack == nil:
		return misused("there is nothing to call")
	}
	if err := h.own().begin(); err != nil {
		return err
	}
	outcome := errAckNotEnded // if it panics, or ends its goroutine
	defer func() { h.own().end(outcome) }()
	if outcome = h.holdOn(); outcome != nil {
		return outcome
	}
	outcome = errAckNotEnded
	defer func() { h.goOn(outcome == nil) }()
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
	defer cancel()
	defer context.AfterFunc(h.settling(), cancel)()
	err := ack(bounded, h.token())
	if lost := pgwake.WrapError("ack", err); errors.Is(lost, pgwake.ErrLockLost) { // it may be an error of the server as it came
		h.told()
		err = lost
	}
	outcome = err
	return err
}

// errAckNotEnded is the outcome of an acknowledgement of which nobody knows more.
var errAckNotEnded = errors.New("the acknowledgement did not come to its end")

// misused is an error in a program, which no further attempt would help.
func misused(format string, args ...any) error {
	return Permanent(fmt.Errorf("AckBy: %w: "+format, append([]any{pgwake.ErrInvalid}, args...)...))
}

// inHand is an item, or a turn, that a handler is at work on.
type inHand interface {
	own() *ownAck
	token() pgwake.LockToken
	settling() context.Context // ends when nothing is to be called any more
	holdOn() error             // keeps the loss of the lease from the handler's context, until goOn; ErrLockLost if it is lost
	goOn(acked bool)
	told() // the server has said that the lease is lost
}

// ownAck is what is known of the handler's own acknowledgement.
type ownAck struct {
	mu     sync.Mutex
	closed bool          // none begins any more
	under  chan struct{} // is closed when the one that is under way has ended; nil: none is
	ackOutcome
}

// ackOutcome is what came of it.
type ackOutcome struct {
	acked     bool
	lost      bool
	unsure    bool  // it may have taken effect although it failed
	retryable bool  // the failure may pass
	failure   error // of the last
}

// isWhy reports whether a Decider failed for no other reason than that its acknowledgement did.
func (o ackOutcome) isWhy(failure error) (is bool) {
	defer func() {
		if recover() != nil { // a nil pointer in an error, say, that it unwraps
			is = false
		}
	}()
	return o.failure != nil && errors.Is(failure, o.failure)
}

func (o *ownAck) begin() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.acked:
		return misused("it is acknowledged already")
	case o.lost:
		return o.failure
	case o.unsure:
		return misused("perhaps it is acknowledged already: %w", o.failure)
	case o.under != nil:
		return misused("it is about to be acknowledged already")
	case o.closed:
		return fmt.Errorf("%w: the handler has ended, or was left behind", pgwake.ErrLockLost)
	}
	o.under = make(chan struct{})
	return nil
}

func (o *ownAck) end(err error) {
	var failure *pgwake.Error
	known := err != errAckNotEnded && errors.As(pgwake.WrapError("ack", err), &failure)
	outcome := ackOutcome{acked: err == nil, lost: errors.Is(err, pgwake.ErrLockLost), failure: err, unsure: err == errAckNotEnded || known && failure.Unknown,
		retryable: known && (failure.Retryable || outage.OfTheServer(failure))} // a table that is missing may be one of the handler's own
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ackOutcome = outcome
	close(o.under)
	o.under = nil
}

// close has none begin any more. It returns what is closed when the one that is under way has ended; nil: none is.
func (o *ownAck) close() (under <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	return o.under
}

// over is close for whoever can wait. A handler that has ended, and has left one under way, waits for it.
func (o *ownAck) over() ackOutcome {
	if under := o.close(); under != nil {
		<-under
	}
	return o.outcome()
}

func (o *ownAck) outcome() ackOutcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.ackOutcome
}
