package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: how does a function with types of its own become a handler?

// Result is what a handler returns, as JSON; empty: nothing.
type Result = json.RawMessage

// Handle registers a function for the items of a name. The input is decoded into a T by package encoding/json; one that does not fit is a
// permanent error. What the function returns is encoded for the orchestration that scheduled the item, if one did; what cannot be is a
// permanent error as well. See Dispatcher.Handle.
func Handle[T, R any](d *Dispatcher, name string, fn func(context.Context, T) (R, error), options ...Option) {
	if fn == nil {
		d.Handle(name, nil, options...)
		return
	}
	d.Handle(name, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) {
		in, err := decode[T](item)
		if err != nil {
			return nil, err
		}
		out, err := fn(ctx, in)
		if err != nil {
			return nil, err
		}
		return encode(item, out)
	}, options...)
}

func decode[T any](item *pgwake.ClaimedWorkItem) (in T, err error) {
	if len(item.Input) == 0 {
		return in, nil
	}
	if err := json.Unmarshal(item.Input, &in); err != nil {
		return in, Permanent(fmt.Errorf("decode the input of %q: %w", item.Name, misfit[T](err)))
	}
	return in, nil
}

// misfit says where an input does not fit, and nothing of what it is: the errors of package encoding/json, and of types that decode
// themselves, quote it, so none of them is wrapped.
func misfit[T any](err error) error {
	var field *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	into := reflect.TypeFor[T]()
	switch {
	case errors.As(err, &field) && field.Field != "":
		return fmt.Errorf("it does not fit %v: field %s, which ends at byte %d, is no %v", into, field.Field, field.Offset, field.Type)
	case errors.As(err, &field):
		return fmt.Errorf("it does not fit %v: what ends at byte %d is no %v", into, field.Offset, field.Type)
	case errors.As(err, &syntax):
		return fmt.Errorf("it is no JSON from byte %d on", syntax.Offset)
	}
	return fmt.Errorf("it does not fit %v: %T", into, err)
}

func encode(item *pgwake.ClaimedWorkItem, out any) (Result, error) {
	text, err := json.Marshal(out)
	switch {
	case err != nil && item.Instance == "": // nobody asked for it
		return nil, nil
	case err != nil:
		return nil, Permanent(fmt.Errorf("encode the result: %w", err))
	}
	return text, nil
}

// heldKey is for what is inHand.
type heldKey struct{}

// ItemFrom returns the item that a handler is at work on; nil outside of one, and in a BatchHandler.
func ItemFrom(ctx context.Context) *pgwake.ClaimedWorkItem {
	if h, ok := ctx.Value(heldKey{}).(*held); ok {
		return h.item
	}
	return nil
}

// sourceKey is for what items and turns were fetched from.
type sourceKey struct{}

func withSource(ctx context.Context, fetchedFrom any) context.Context {
	return context.WithValue(ctx, sourceKey{}, fetchedFrom)
}

// SourceFrom returns where a handler's items, or a Decider's turn, were fetched from: the Source, as Coordinators know it, whose database
// AckBy has to do with. It need not be the one to which the namespace belongs (Coordinators.SourceOf), since all Sources are served. nil
// outside of a handler, and where a Dispatcher is on a Provider that is no Source.
func SourceFrom(ctx context.Context) Source {
	s, _ := ctx.Value(sourceKey{}).(Source)
	return s
}

// TxFunc is a function whose effects are those of a transaction.
type TxFunc[T, R any] func(ctx context.Context, tx pgx.Tx, in T) (R, error)

// HandleTx is Handle for a function that does its work in a transaction of Config.Begin, which also acknowledges the item: so
// what it does there happens exactly once, however often the function is called. The transaction is committed if the
// function returns no error, and rolled back otherwise. It must not end the transaction itself: that is a permanent error,
// since its effects may be there without the item being acknowledged. So is a message for the orchestration that scheduled the
// item which cannot be made, or is refused. Of Coordinators with several Sources the transaction is on the database that the item is in:
// see Shard.Begin. Where no transaction can be had, Run says so before anything is taken.
func HandleTx[T, R any](d *Dispatcher, name string, fn TxFunc[T, R], options ...Option) {
	d.transacts = name
	if fn == nil {
		d.Handle(name, nil, options...)
		return
	}
	d.Handle(name, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (result Result, err error) {
		if ItemFrom(ctx) == nil {
			return nil, Permanent(errors.New("middleware has replaced the handler's context, and not wrapped it"))
		}
		in, err := decode[T](item)
		if err != nil {
			return nil, err
		}
		if d.cfg.Begin == nil { // of a stream, beside which Coordinators have other Sources
			return nil, Permanent(fmt.Errorf("%w: the item is of a stream, which has no transactions", pgwake.ErrConfig))
		}
		// Only BEGIN is bounded: on database/sql the transaction would end with a context that has.
		beginning, cancel := context.WithCancel(ctx)
		defer cancel()
		late := time.AfterFunc(verbTimeout, cancel)
		tx, err := d.cfg.Begin(beginning)
		if err == nil {
			defer func() {
				// After a commit it does nothing. The handler's context may have ended.
				ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
				defer cancel()
				_ = tx.Rollback(ending)
			}()
		}
		if !late.Stop() {
			err = fmt.Errorf("no answer within %v: %w", verbTimeout, context.DeadlineExceeded)
		}
		if err != nil {
			return nil, d.cannotBegin(ctx, err)
		}
		out, err := fn(ctx, tx, in)
		if err != nil {
			return nil, err
		}
		if result, err = encode(item, out); err != nil {
			return nil, err
		}
		var completion *pgwake.Message
		if item.Instance != "" {
			if completion, err = d.makeCompletion(item, result, nil); err != nil {
				return nil, Permanent(fmt.Errorf("make the completion: %w", err))
			}
		}
		return result, AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
			switch err := d.p.AckWorkItemTx(ctx, tx, token, completion); {
			case errors.Is(err, pgx.ErrTxClosed):
				return Permanent(errors.New("the handler has ended its transaction"))
			case errors.Is(err, pgwake.ErrInvalid):
				return Permanent(fmt.Errorf("the completion was refused: %w", err))
			case err != nil:
				return err
			}
			return pgwake.WrapError("commit", tx.Commit(ctx)) // if it has committed all the same, nobody can give the item back
		})
	}, options...)
}

// cannotBegin says what comes of it: the function was not called, so what passes costs no attempt.
func (d *Dispatcher) cannotBegin(ctx context.Context, err error) error {
	over := ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrTimeout)
	passes := errors.Is(err, context.DeadlineExceeded) || outage.Passes(pgwake.WrapError("begin", err))
	if passes && !over {
		d.cfg.Logger.Warn("dispatch: cannot begin the transaction of a handler", "error", err, "again_in", lastPause)
		return Snooze(lastPause)
	}
	return fmt.Errorf("begin: %w", err)
}

// The kinds of the messages that CompletionMessage makes.
const (
	KindCompleted pgwake.MessageKind = "activity_completed"
	KindFailed    pgwake.MessageKind = "activity_failed"
)

// Completion is the data of the messages that CompletionMessage makes.
type Completion struct {
	ExecutionID int64           `json:"execution_id"`
	ActivityID  int64           `json:"activity_id"`
	Name        string          `json:"name"`
	Result      json.RawMessage `json:"result,omitempty"`
	Error       string          `json:"error,omitempty"`
}

// CompletionMessage makes the message for the orchestration that scheduled an item: KindCompleted with the result, or
// KindFailed with the error.
func CompletionMessage(item *pgwake.ClaimedWorkItem, result Result, failure error) (*pgwake.Message, error) {
	c := Completion{ExecutionID: item.ExecutionID, ActivityID: item.ActivityID, Name: item.Name, Result: result}
	m := &pgwake.Message{Instance: item.Instance, Kind: KindCompleted}
	if failure != nil {
		m.Kind, c.Result, c.Error = KindFailed, nil, text(failure)
	}
	data, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	m.Data = data
	return m, nil
}
