package eventbus

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what has become of deliveries that were given up?

// Letter is a dead letter: a delivery that was given up, with its event.
type Letter struct {
	ID       int64  // ids go up, though not without gaps
	Group    string // that it goes to when it is redriven, if that is there; "": no group was subscribed to the event (Config.StrictRouting)
	Reason   string // such as ReasonHandler
	Error    string // of the last attempt, with the stack of a panic
	Attempts int
	FailedAt time.Time // server time

	// Event is as it was delivered the last time. If it is large, and the log does not have it any more, it has no Payload. Of an item that
	// nothing of the bus has made it has no ID.
	Event *Event
}

// LetterFilter says which dead letters of the namespace, all of its conditions together. The zero value and nil mean all, up to the limit.
type LetterFilter struct {
	Group      string    // "": all, and those of no group
	Type       string    // of the event; "": all
	Reason     string    // "": all
	DiedBefore time.Time // server time; the zero time: no such condition

	// IDs are those of the letters. Nil means all; empty and not nil means none.
	IDs []int64

	After int64 // only letters with a higher id: to list on, pass the last one listed

	// Limit is how many letters at most, those with the lowest ids; up to pgwake.MaxFetch. Defaults to 100 for a list, and to 1000 for a
	// redrive and a purge.
	Limit int

	// PayloadBytes is up to how many bytes a payload is read whole. Of a longer one there is the beginning, see Event.PayloadCut. Defaults to
	// 0: all are.
	PayloadBytes int
}

func (f *LetterFilter) args(namespace string, limit int) ([]any, error) {
	if f == nil {
		f = &LetterFilter{}
	}
	if f.Group != "" {
		if err := CheckGroup(f.Group); err != nil {
			return nil, err
		}
	}
	if f.Type != "" {
		if err := CheckType(f.Type); err != nil {
			return nil, err
		}
	}
	if err := checkText("reason", f.Reason); err != nil {
		return nil, err
	}
	if err := checkInstant(f.DiedBefore); err != nil {
		return nil, err
	}
	if f.Limit < 0 || f.Limit > pgwake.MaxFetch || f.After < 0 {
		return nil, invalid("a limit of %d after %d, and up to %d after 0 or more is possible", f.Limit, f.After, pgwake.MaxFetch)
	}
	if f.Limit > 0 {
		limit = f.Limit
	}
	return []any{namespace, text(f.Group), text(f.Type), text(f.Reason), unless(f.DiedBefore.IsZero(), f.DiedBefore), f.IDs, f.After, limit}, nil
}

// DeadLetters returns dead letters of the namespace in the order of their ids; empty if there are none.
func (b *Bus) DeadLetters(ctx context.Context, f *LetterFilter) ([]Letter, error) {
	const op = "list dead letters"
	args, err := f.args(b.namespace, 100)
	if err != nil {
		return nil, failed(op, err)
	}
	var bytes int
	if f != nil {
		bytes = f.PayloadBytes
	}
	payload, err := payloadLimit(bytes)
	if err != nil {
		return nil, failed(op, err)
	}
	return query(ctx, b, verb{op: op, function: "list_event_dead_letters", args: append(args, payload),
		columns: "letter_id, item_id, coalesce(group_name, ''), reason, coalesce(error, ''), attempts, failed_at, coalesce(event_id, 0), event_type, payload::pg_catalog.text, emitted_at, " +
			"producer_node_id, coalesce(scheduled_task_id::pg_catalog.text, ''), metadata::pg_catalog.text, headers::pg_catalog.text, coalesce(key, ''), coalesce(xact::pg_catalog.text, '0'), payload_cut",
	}, func(row pgx.CollectableRow) (l Letter, err error) {
		e := &Event{Namespace: b.namespace}
		l.Event = e
		var payload, headers *string
		var emitted *time.Time
		var metadata, xact string
		err = row.Scan(&l.ID, &e.MessageID, &l.Group, &l.Reason, &l.Error, &l.Attempts, &l.FailedAt, &e.ID, &e.Type, &payload, &emitted,
			&e.Producer, &e.ScheduledTaskID, &metadata, &headers, &e.Key, &xact, &e.PayloadCut)
		if err == nil && headers != nil {
			err = json.Unmarshal([]byte(*headers), &e.Headers)
		}
		if payload != nil {
			e.Payload = json.RawMessage(*payload)
		}
		if emitted != nil {
			e.EmittedAt = *emitted
		}
		e.Metadata, e.Redelivery = json.RawMessage(metadata), max(l.Attempts-1, 0)
		e.xact, _ = strconv.ParseUint(xact, 10, 64) // it is one
		return l, err
	})
}

// Purge removes dead letters for good, at most LetterFilter.Limit of them, and returns how many. Their events stay in the log. To purge any
// number of letters, call it until it returns 0.
func (b *Bus) Purge(ctx context.Context, f *LetterFilter) (int, error) {
	const op = "purge dead letters"
	args, err := f.args(b.namespace, 1000)
	if err != nil {
		return 0, failed(op, err)
	}
	ids, err := query(ctx, b, verb{op: op, function: "list_event_dead_letters", columns: "letter_id", args: args}, pgx.RowTo[int64])
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	letters := &pgwake.DeadLetterFilter{IDs: ids, Limit: len(ids)}
	if b.tx != nil {
		return b.p.PurgeDeadLettersTx(ctx, b.tx, letters)
	}
	return b.p.PurgeDeadLetters(ctx, letters)
}
