package eventbus

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: what is an event, as the log has it and handlers get it?

// Event is an event that was emitted.
type Event struct {
	ID        int64 // ids go up, though neither without gaps nor in the order of commits
	Namespace string
	Type      string
	Payload   json.RawMessage // as jsonb keeps it: equal to what was emitted, not byte for byte
	EmittedAt time.Time       // server time

	Producer        string // id of the node that emitted it; "": nobody said
	ScheduledTaskID string // "": no schedule emitted it
	Metadata        json.RawMessage
	Headers         map[string]string // such as the trace that it belongs to
	Key             string            // "": none

	// PayloadCut has its beginning in place of a Payload that is longer than FindFilter.PayloadBytes, or LetterFilter.PayloadBytes.
	PayloadCut *pgwake.Cut

	// Of a delivery; 0 for an event that is read from the log.
	MessageID  int64 // of the delivery, which keeps it through retries, and as a dead letter
	Redelivery int   // how often it was delivered before

	xact uint64
}

// Decode puts the payload into what v points to, as json.Unmarshal does. Its error says where something does not fit, and what it was to be,
// but not what is there: a handler that returns it has it logged, and kept with a dead letter. It wraps none of package encoding/json.
func (e *Event) Decode(v any) error {
	if err := jsonvalue.Unmarshal(e.Payload, v); err != nil {
		return fmt.Errorf("decode the payload of event %d: %w", e.ID, err)
	}
	return nil
}

// Cursor returns the place of an event of the log, from which to read on; see Bus.Read. Of a delivery it is the same place.
func (e *Event) Cursor() Cursor { return Cursor{e.xact, e.ID} }

const eventColumns = "event_id, namespace, event_type, payload::pg_catalog.text, emitted_at, producer_node_id, coalesce(scheduled_task_id::pg_catalog.text, ''), metadata::pg_catalog.text, headers::pg_catalog.text, coalesce(key, ''), xact::pg_catalog.text::bigint"

func scanEvent(row pgx.CollectableRow) (*Event, error) {
	e := &Event{}
	return e, scanEventAnd(row, e)
}

// scanCutEvent takes in eventColumns and payload_cut.
func scanCutEvent(row pgx.CollectableRow) (*Event, error) {
	e := &Event{}
	return e, scanEventAnd(row, e, &e.PayloadCut)
}

func scanEventAnd(row pgx.CollectableRow, e *Event, more ...any) error {
	var metadata string
	var payload, headers *string
	var xact int64
	err := row.Scan(append([]any{&e.ID, &e.Namespace, &e.Type, &payload, &e.EmittedAt, &e.Producer, &e.ScheduledTaskID, &metadata, &headers, &e.Key, &xact}, more...)...)
	if err == nil && headers != nil {
		err = json.Unmarshal([]byte(*headers), &e.Headers)
	}
	if payload != nil {
		e.Payload = json.RawMessage(*payload)
	}
	e.Metadata, e.xact = json.RawMessage(metadata), uint64(xact)
	return err
}
