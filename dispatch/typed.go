package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how does a function with types of its own become a handler?

// Result is what a handler returns, as JSON; empty: nothing.
type Result = json.RawMessage

// Handle registers a function for the items of a name. The input is decoded into a T, strictly: JSON that does not fit is a
// permanent error. What the function returns is encoded. See Dispatcher.Handle.
func Handle[T, R any](d *Dispatcher, name string, fn func(context.Context, T) (R, error), options ...Option) {
	d.Handle(name, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error) {
		in, err := decode[T](item)
		if err != nil {
			return nil, err
		}
		out, err := fn(withItem(ctx, item), in)
		if err != nil {
			return nil, err
		}
		return encode(out)
	}, options...)
}

func decode[T any](item *pgwake.ClaimedWorkItem) (in T, err error) {
	if len(item.Input) == 0 {
		return in, nil
	}
	if err := json.NewDecoder(bytes.NewReader(item.Input)).Decode(&in); err != nil {
		return in, Permanent(fmt.Errorf("decode the input of %q: %w", item.Name, err))
	}
	return in, nil
}

func encode(out any) (Result, error) {
	text, err := json.Marshal(out)
	if err != nil {
		return nil, Permanent(fmt.Errorf("encode the result: %w", err))
	}
	return text, nil
}

type itemKey struct{}

func withItem(ctx context.Context, item *pgwake.ClaimedWorkItem) context.Context {
	return context.WithValue(ctx, itemKey{}, item)
}

// ItemFrom returns the item that a function given to Handle or HandleTx is at work on; nil outside of one.
func ItemFrom(ctx context.Context) *pgwake.ClaimedWorkItem {
	item, _ := ctx.Value(itemKey{}).(*pgwake.ClaimedWorkItem)
	return item
}

// TxFunc is a function whose effects are those of a transaction.
type TxFunc[T, R any] func(ctx context.Context, tx pgx.Tx, in T) (R, error)

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
		m.Kind, c.Result, c.Error = KindFailed, nil, failure.Error()
	}
	data, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	m.Data = data
	return m, nil
}
