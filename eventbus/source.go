package eventbus

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how do deliveries come, with their events?

// delivery is the input of a work item that is a delivery.
type delivery struct {
	EventID   int64     `json:"event_id,omitempty"`
	EmittedAt time.Time `json:"emitted_at,omitzero"`

	// Of an event that is small, or was read: what the item has not itself.
	Payload         json.RawMessage `json:"payload,omitempty"` // nil: it is to be read
	Metadata        json.RawMessage `json:"metadata,omitempty"`
	Producer        string          `json:"producer,omitempty"`
	ScheduledTaskID string          `json:"scheduled_task_id,omitempty"`
	Xact            uint64          `json:"xact,omitempty,string"`
}

// carried is the delivery of an event that was read.
func carried(e *Event) delivery {
	return delivery{EventID: e.ID, EmittedAt: e.EmittedAt, Payload: e.Payload, Metadata: e.Metadata, Producer: e.Producer,
		ScheduledTaskID: e.ScheduledTaskID, Xact: e.xact}
}

// event is that of a delivery that carries it.
func (d *delivery) event(item *pgwake.ClaimedWorkItem) *Event {
	return &Event{ID: d.EventID, Namespace: item.Namespace, Type: item.Name, Payload: d.Payload, EmittedAt: d.EmittedAt.Local(), Producer: d.Producer,
		ScheduledTaskID: d.ScheduledTaskID, Metadata: d.Metadata, Headers: item.Headers, Key: item.Key, xact: d.Xact}
}

// source is a Provider whose deliveries come at most so many at a time, each with its event: for those that do not carry it that is one more
// round trip for all of a claim, so that a handler begins with nothing but its transaction.
type source struct {
	*pgwake.Provider
	bus   *Bus
	batch int
	log   *slog.Logger
}

// readPause is how long to wait after a claim that failed.
var readPause = 2 * time.Second

// FetchWorkItems implements dispatch.Provider.
func (s *source) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	items, err := s.Provider.FetchWorkItems(ctx, min(n, s.batch), o)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, pgwake.ErrNoWork) && !errors.Is(err, pgwake.ErrClosed) {
			s.log.Warn("eventbus: cannot read deliveries", "error", err, "again_in", readPause)
			wait(ctx, readPause)
			if failure := (*pgwake.Error)(nil); errors.As(err, &failure) { // whatever it is, it may be over by then
				again := *failure
				again.Retryable = true
				err = &again
			}
		}
		return nil, err
	}
	attaching, cancel := context.WithTimeout(ctx, attachFor(o.LockTimeout))
	defer cancel()
	s.attach(attaching, items)
	return items, nil
}

// attachFor bounds the wait for the events of a claim, of which nobody renews the leases yet: a connection may have lost its peer and give
// no sign of it.
func attachFor(lease time.Duration) time.Duration { return min(lease/3, 5*time.Second) }

// DeadLetterWorkItem implements dispatch.Provider. What a dispatcher gives up, a handler has failed at.
func (s *source) DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, _, cause string) error {
	return s.Provider.DeadLetterWorkItem(ctx, token, ReasonHandler, cause)
}

// attach has each item carry its event. Where that fails the handler's goroutine reads its event itself.
func (s *source) attach(ctx context.Context, items []*pgwake.ClaimedWorkItem) {
	var refs []delivery
	var of []*pgwake.ClaimedWorkItem
	for _, item := range items {
		var d delivery
		if json.Unmarshal(item.Input, &d) == nil && d.EventID != 0 && d.Payload == nil {
			refs, of = append(refs, d), append(of, item)
		}
	}
	events, err := s.bus.events(ctx, refs)
	if err != nil {
		return
	}
	for i, item := range of {
		if e := events[refs[i].EventID]; e != nil {
			if data, err := json.Marshal(carried(e)); err == nil {
				item.Input = data
			}
		}
	}
}

// events reads events of the log, by their ids. Those that are not there any more are missing.
func (b *Bus) events(ctx context.Context, refs []delivery) (map[int64]*Event, error) {
	if len(refs) == 0 {
		return nil, nil
	}
	ids, emitted := make([]int64, len(refs)), make([]time.Time, len(refs))
	for i, r := range refs {
		ids[i], emitted[i] = r.EventID, r.EmittedAt
	}
	byID := make(map[int64]*Event, len(refs))
	_, err := query(ctx, b, verb{op: "get events", function: "get_events", columns: eventColumns, args: []any{ids, emitted}, silence: endTimeout},
		func(row pgx.CollectableRow) (none struct{}, err error) {
			e, err := scanEvent(row)
			byID[e.ID] = e
			return none, err
		})
	return byID, err
}

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
