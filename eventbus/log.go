package eventbus

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how is the log read, and delivered once more?

// Cursor is a place in the log of a namespace. The zero value is its beginning.
type Cursor struct {
	Xact uint64 // of the transaction that emitted the event
	ID   int64
}

// String returns the cursor as a text, to be kept.
func (c Cursor) String() string {
	return strconv.FormatUint(c.Xact, 10) + "/" + strconv.FormatInt(c.ID, 10)
}

// ParseCursor is the reverse of Cursor.String. Fails with pgwake.ErrInvalid.
func ParseCursor(text string) (Cursor, error) {
	first, second, _ := strings.Cut(text, "/")
	xact, err1 := strconv.ParseUint(first, 10, 63)
	id, err2 := strconv.ParseInt(second, 10, 64)
	if err1 != nil || err2 != nil || id < 0 {
		return Cursor{}, invalid("%.100q is not a cursor", text)
	}
	return Cursor{xact, id}, nil
}

// maxRead is how many events one Read returns at most.
const maxRead = 10_000

// Read returns up to limit events of the namespace that come after a cursor, such as that of the last one that was read before; of these
// types alone, if any are named. Each comes exactly once, however late its transaction committed: it appears when all transactions that
// began to write before have ended. So a transaction that stays open holds up what came after it.
func (b *Bus) Read(ctx context.Context, after Cursor, limit int, types ...string) ([]*Event, error) {
	const op = "read events"
	if limit < 1 || limit > maxRead || after.ID < 0 {
		return nil, failed(op, invalid("a limit of %d from %v, and 1 to %d is possible", limit, after, maxRead))
	}
	for _, t := range types {
		if err := CheckType(t); err != nil {
			return nil, failed(op, err)
		}
	}
	return query(ctx, b, verb{op: op, function: "read_events", columns: eventColumns,
		args: []any{b.namespace, strconv.FormatUint(after.Xact, 10), after.ID, limit, types}}, scanEvent)
}

// FindFilter says which events, all of its conditions together. The zero value and nil mean the latest, up to the limit.
type FindFilter struct {
	Types    []string  // nil: all
	Key      string    // "": whatever the key
	ID       int64     // 0: any
	From, To time.Time // when they were emitted, server time; To is excluded; the zero time is no bound

	Before Cursor // only events before it: to go on, pass that of the last one found. The zero value is the end of the log
	Limit  int    // up to 10,000. Defaults to 100

	// PayloadBytes is up to how many bytes a payload is read whole. Of a longer one there is the beginning, see Event.PayloadCut. Defaults to
	// 0: all are.
	PayloadBytes int
}

// Find returns events of the namespace, the latest first: for people who look. Unlike Read it does not wait for transactions that are open, so an
// event that commits late comes among those that were found already. It walks along the log until it has found enough: what is rare among much
// takes its time, unless it is rare by its ID or its type.
func (b *Bus) Find(ctx context.Context, f *FindFilter) ([]*Event, error) {
	const op = "find events"
	if f == nil {
		f = &FindFilter{}
	}
	limit := cmp.Or(f.Limit, 100)
	if limit < 1 || limit > maxRead || f.Before.ID < 0 || f.ID < 0 {
		return nil, failed(op, invalid("a limit of %d before %v, and 1 to %d is possible", limit, f.Before, maxRead))
	}
	for _, t := range f.Types {
		if err := CheckType(t); err != nil {
			return nil, failed(op, err)
		}
	}
	if err := cmp.Or(checkInstant(f.From), checkInstant(f.To), checkText("a key", f.Key)); err != nil {
		return nil, failed(op, err)
	}
	payload, err := payloadLimit(f.PayloadBytes)
	if err != nil {
		return nil, failed(op, err)
	}
	first := f.Before == Cursor{}
	return query(ctx, b, verb{op: op, function: "find_events", columns: eventColumns + ", payload_cut",
		args: []any{b.namespace, f.Types, unless(f.Key == "", f.Key), unless(f.ID == 0, f.ID), unless(f.From.IsZero(), f.From), unless(f.To.IsZero(), f.To),
			unless(first, strconv.FormatUint(f.Before.Xact, 10)), unless(first, f.Before.ID), limit, payload}}, scanCutEvent)
}

// Range says which events, all of its conditions together. The zero value is all.
type Range struct {
	FirstID, LastID int64     // both included; 0 is no bound
	From, To        time.Time // when they were emitted, server time; To is excluded; the zero time is no bound
}

// Replay has a group get events of the log once more, as far as it is subscribed to them, and returns an id for GetReplay. "" stands for
// DefaultGroup. The nodes of the namespace do it, in the order of the log, and none is left out that commits late; what is emitted after the
// call may be. pgwake.ErrNotFound if there is no such group.
func (b *Bus) Replay(ctx context.Context, group string, r Range) (int64, error) {
	const op = "replay events"
	group = cmp.Or(group, DefaultGroup)
	if err := CheckGroup(group); err != nil {
		return 0, failed(op, err)
	}
	if err := cmp.Or(checkInstant(r.From), checkInstant(r.To)); err != nil {
		return 0, failed(op, err)
	}
	return value[int64](ctx, b, verb{op: op, function: "replay_events", enqueues: true,
		args: []any{b.namespace, group, unless(r.FirstID == 0, r.FirstID), unless(r.LastID == 0, r.LastID), unless(r.From.IsZero(), r.From), unless(r.To.IsZero(), r.To)}})
}

// unless returns an argument; NULL if it is none.
func unless[T any](none bool, v T) *T {
	if none {
		return nil
	}
	return &v
}

// ReplayStatus is how far a replay has got.
type ReplayStatus struct {
	Delivered int64
	BeganAt   time.Time
	EndedAt   time.Time // zero: it has not delivered all
}

// GetReplay returns how far a replay has got. pgwake.ErrNotFound if there is none of this id, or its group was deleted.
func (b *Bus) GetReplay(ctx context.Context, id int64) (*ReplayStatus, error) {
	const op = "get replay"
	all, err := query(ctx, b, verb{op: op, function: "get_replay", columns: "delivered, created_at, ended_at", args: []any{id}},
		func(row pgx.CollectableRow) (s *ReplayStatus, err error) {
			s = &ReplayStatus{}
			var ended *time.Time
			if err = row.Scan(&s.Delivered, &s.BeganAt, &ended); ended != nil {
				s.EndedAt = *ended
			}
			return s, err
		})
	if err == nil && len(all) == 0 {
		err = failed(op, fmt.Errorf("%w: replay %d", pgwake.ErrNotFound, id))
	}
	if err != nil {
		return nil, err
	}
	return all[0], nil
}
