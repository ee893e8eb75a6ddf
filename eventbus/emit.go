package eventbus

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how is an event emitted?

// EmitOptions says more of an event than its type and payload. Nil means the zero value.
type EmitOptions struct {
	// Key is what events belong together by: of those of a key a group gets one at a time, in the order in which their transactions
	// commit, and within each in the order in which it emits. Emits of one key commit one after the other. At most 255 bytes. Defaults
	// to "": in no order.
	Key string

	// Headers travel with the event, as those of pgwake.WorkItem do. Defaults to none.
	Headers map[string]string

	// Metadata is kept with the event in the log: anything that is a JSON object. Defaults to nil: an empty one.
	Metadata any

	// DedupKey has nothing be emitted if an event with the same key was, in the namespace, less than its DedupFor ago. At most 255 bytes.
	// Defaults to "": no such check.
	DedupKey string

	// DedupFor is for how long the key is taken. Up to 100 years. Defaults to 24 h.
	DedupFor time.Duration
}

// Emission is an event with its options, for emitting several at once.
type Emission struct {
	Type    string
	Payload any // see Bus.Emit
	EmitOptions
}

// Emitted is what came of an emission.
type Emitted struct {
	ID         int64
	Duplicate  bool // nothing was emitted, since the dedup key is taken; ID is that of the event that has it
	Deliveries int  // groups that get it
}

// Emit writes an event to the log and delivers it to every group that is subscribed to its type, all or nothing, and returns its id. The
// payload is anything that encoding/json can encode; a json.RawMessage is taken as it is. If the error is Unknown (pgwake.Error), the event
// may have been emitted all the same: with a DedupKey it can be emitted again.
func (b *Bus) Emit(ctx context.Context, eventType string, payload any, o *EmitOptions) (int64, error) {
	e := Emission{Type: eventType, Payload: payload}
	if o != nil {
		e.EmitOptions = *o
	}
	emitted, err := b.EmitMany(ctx, []Emission{e})
	if err != nil {
		return 0, err
	}
	return emitted[0].ID, nil
}

// EmitMany emits events, all or none, in one round trip. What came of them is in their order.
func (b *Bus) EmitMany(ctx context.Context, events []Emission) ([]Emitted, error) {
	const op = "emit"
	if len(events) == 0 {
		return nil, nil
	}
	ctx, end := b.telemetry.begin(ctx, b.namespace, events)
	args, err := b.emitArgs(ctx, events)
	if err != nil {
		end(nil, err)
		return nil, failed(op, err)
	}
	emitted, err := b.emit(ctx, op, args)
	end(emitted, err)
	return emitted, err
}

// emit calls emit_many.
func (b *Bus) emit(ctx context.Context, op string, args []any) (emitted []Emitted, err error) {
	statement := func(ctx context.Context, q pgwake.Querier, quiet bool) (due []pgwake.Due, err error) {
		rows, err := q.Query(ctx, "SELECT event_id, duplicate, deliveries, coalesce(pg_catalog.array_to_json(tags)::pg_catalog.text, '[]') FROM "+b.call("emit_many", len(args)+1), append(args[:len(args):len(args)], quiet)...)
		if err != nil {
			return nil, err
		}
		emitted, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Emitted, err error) {
			var list string
			var tags []string
			if err = row.Scan(&e.ID, &e.Duplicate, &e.Deliveries, &list); err == nil {
				err = json.Unmarshal([]byte(list), &tags)
			}
			for _, tag := range tags {
				due = append(due, pgwake.Due{Namespace: b.namespace, Tag: tag})
			}
			return e, err
		})
		return due, err
	}
	switch err = pgwake.CheckNamespace(b.namespace); {
	case err != nil:
	case b.tx != nil:
		err = b.p.DoTx(ctx, b.tx, op, func(ctx context.Context, q pgwake.Querier) error {
			_, err := statement(ctx, q, false)
			return err
		})
	default:
		err = b.p.DoEnqueue(ctx, op, statement)
	}
	return emitted, failed(op, err)
}

// emitArgs are the arguments of emit_many. A column of which no event has anything is NULL.
func (b *Bus) emitArgs(ctx context.Context, events []Emission) ([]any, error) {
	var types []string
	var payloads, keys, headers, dedupKeys, metadata []*string
	var dedupFors []*time.Duration
	for i := range events {
		e := &events[i]
		fail := func(err error) error {
			if len(events) > 1 {
				return fmt.Errorf("event %d: %w", i, err)
			}
			return err
		}
		if err := e.check(); err != nil {
			return nil, fail(err)
		}
		payload, err := encode("payload of "+e.Type, e.Payload, b.cfg.MaxPayload)
		if err != nil {
			return nil, fail(err)
		}
		types, payloads = append(types, e.Type), append(payloads, &payload)
		keys, dedupKeys = append(keys, text(e.Key)), append(dedupKeys, text(e.DedupKey))
		travels := b.telemetry.inject(ctx, e.Headers)
		var carried, meta *string
		if len(travels) > 0 {
			data, _ := json.Marshal(travels) // strings
			carried = text(string(data))
		}
		if e.Metadata != nil {
			data, err := encode("metadata of "+e.Type, e.Metadata, b.cfg.MaxPayload)
			if err != nil {
				return nil, fail(err)
			}
			meta = &data
		}
		headers, metadata = append(headers, carried), append(metadata, meta)
		dedupFor := &e.DedupFor
		if e.DedupFor == 0 {
			dedupFor = nil
		}
		dedupFors = append(dedupFors, dedupFor)
	}
	return []any{b.namespace, types, payloads, keys, headers, dedupKeys, dedupFors, text(b.producer), metadata, (*string)(nil), b.cfg.StrictRouting, b.cfg.MaxPayload}, nil
}

const longestDedup = 100 * 365 * 24 * time.Hour

func (e *Emission) check() error {
	if err := CheckType(e.Type); err != nil {
		return err
	}
	if err := checkText("key", e.Key); err != nil {
		return err
	}
	if err := checkText("dedup key", e.DedupKey); err != nil {
		return err
	}
	if e.DedupFor < 0 || e.DedupFor > longestDedup || e.DedupFor > 0 && e.DedupFor < time.Microsecond {
		return invalid("a dedup key cannot be kept for %v", e.DedupFor)
	}
	if e.DedupFor != 0 && e.DedupKey == "" {
		return invalid("DedupFor is for events with a dedup key")
	}
	return pgwake.CheckHeaders(e.Headers)
}
