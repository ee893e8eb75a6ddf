package pgwake

import (
	"cmp"
	"container/list"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// This file answers: which histories does this node know already?
//
// Each addition to a history locks the row of its execution, so the states that a history goes through are in an
// order, each containing the one before, and a historyState, as that row has it, names one of them.
//
// Invariants
//
//	(1) An entry holds all events of its history as of one state, and that state. It takes in events only
//	    together with the state that they led to: from one snapshot that has both, or from an ack that tells which
//	    state it met.
//	(2) A turn gets the events of an entry only if the server, in a snapshot taken under the instance's lock, names
//	    the same state. Whatever else happened, be it by other nodes, AppendHistory, a deletion, or a server that
//	    lost commits, costs a query and never an event.
//	(3) What an entry holds is never written to again, and nobody outside has it.

// historyState is what executions says of a history.
type historyState struct {
	Last     *int64    `json:"last_event"` // highest id, of use for an execution that is not known; nil: no event
	Count    int       `json:"event_count"`
	Started  time.Time `json:"started_at"`  // of the execution: one with the same id, of an instance that was made anew, is another
	Appended time.Time `json:"appended_at"` // last; zero: never
}

// equal reports whether two name the same state.
func (s historyState) equal(other historyState) bool {
	return s.Count == other.Count && s.Started.Equal(other.Started) && s.Appended.Equal(other.Appended)
}

// known reports whether the execution is: before its first ack it may have a history, but nothing says which.
func (s historyState) known() bool { return !s.Started.IsZero() }

func (s historyState) empty() bool { return s.Count == 0 && (s.known() || s.Last == nil) }

type historyKey struct {
	instance  string
	execution int64
}

type historyEntry struct {
	historyKey
	historyState
	events []Event // by id
	data   int     // bytes in them
}

// perEntry is about what an entry takes that holds nothing.
const perEntry = 256

func (e *historyEntry) size() int {
	return perEntry + len(e.instance) + e.data + cap(e.events)*int(unsafe.Sizeof(Event{}))
}

// historyCache keeps the histories that were used last. A nil one keeps none.
type historyCache struct {
	limit int // of bytes

	mu      sync.Mutex
	entries map[historyKey]*list.Element // of *historyEntry
	recent  list.List                    // last used first
	size    int
}

func newHistoryCache(limit int) *historyCache {
	if limit == 0 {
		return nil
	}
	return &historyCache{limit: limit, entries: make(map[historyKey]*list.Element)}
}

// get returns the entry as it is now; the zero value if there is none. Its events are not to be given away.
func (c *historyCache) get(key historyKey) historyEntry {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, ok := c.entries[key]
	if !ok {
		return historyEntry{}
	}
	c.recent.MoveToFront(at)
	return *at.Value.(*historyEntry)
}

// put keeps events, which become the cache's own, as the history in that state.
func (c *historyCache) put(key historyKey, state historyState, events []Event) {
	e := &historyEntry{historyKey: key, historyState: state, events: events, data: sizeOf(events)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(key)
	c.add(e)
}

// add keeps an entry, unless it is larger than all that there is room for.
func (c *historyCache) add(e *historyEntry) {
	if e.size() > c.limit {
		return
	}
	c.entries[e.historyKey] = c.recent.PushFront(e)
	c.size += e.size()
	for c.size > c.limit {
		c.remove(c.recent.Back().Value.(*historyEntry).historyKey)
	}
}

// drop forgets a history.
func (c *historyCache) drop(key historyKey) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(key)
}

func (c *historyCache) remove(key historyKey) {
	if at, ok := c.entries[key]; ok {
		c.size -= at.Value.(*historyEntry).size()
		c.recent.Remove(at)
		delete(c.entries, key)
	}
}

// acked takes in what a committed ack added. after is what ack_orchestration says of the history.
func (c *historyCache) acked(instance string, ack *OrchestrationAck, after []byte) {
	if c == nil {
		return
	}
	key := historyKey{instance, ack.execution()}
	if s := ack.Metadata.Status; s != "" && s != StatusRunning {
		c.drop(key) // it has ended
		return
	}
	if len(ack.History) == 0 {
		return
	}
	var now struct {
		historyState
		Before time.Time `json:"appended_before"` // zero: nothing was there
	}
	if err := json.Unmarshal(after, &now); err != nil {
		c.drop(key)
		return
	}
	events := copyEvents(ack.History)
	for i := range events {
		events[i].CreatedAt = now.Appended.Local() // as pgx returns it
	}
	slices.SortFunc(events, byID)

	c.mu.Lock()
	defer c.mu.Unlock()
	e := &historyEntry{historyKey: key}
	met := historyState{Count: now.Count - len(events), Started: now.Started, Appended: now.Before}
	switch at, ok := c.entries[key]; {
	case ok && at.Value.(*historyEntry).equal(met):
		e = at.Value.(*historyEntry)
	case met.Count == 0:
	default:
		return // an entry is still what it was, and the next turn reads the rest
	}
	c.remove(key)
	e.historyState = now.historyState
	e.add(events)
	c.add(e)
}

// add takes in events. A reader may be at those before: they stay where they are.
func (e *historyEntry) add(events []Event) {
	if len(e.events) > 0 && events[0].ID < e.events[len(e.events)-1].ID {
		e.events = slices.Concat(e.events, events)
		slices.SortFunc(e.events, byID)
	} else {
		e.events = append(e.events, events...)
	}
	e.data += sizeOf(events)
}

func sizeOf(events []Event) (size int) {
	for i := range events {
		size += len(events[i].Type) + len(events[i].Data)
	}
	return size
}

func byID(a, b Event) int { return cmp.Compare(a.ID, b.ID) }

// copyEvents returns the events with data of their own, all of it in one piece of memory.
func copyEvents(events []Event) []Event {
	size := 0
	for i := range events {
		size += len(events[i].Data)
	}
	copied, room := slices.Clone(events), make([]byte, 0, size)
	for i := range copied {
		if data := copied[i].Data; len(data) > 0 {
			from := len(room)
			room = append(room, data...)
			copied[i].Data = room[from:len(room):len(room)]
		} else {
			copied[i].Data = nil // as it is read
		}
	}
	return copied
}

// recall gives a turn its history: what is known, and what a query adds to it, if that is not all. state is what the
// claim says of the history.
func (p *Provider) recall(ctx context.Context, conn *pgxpool.Conn, rowCame func(), item *OrchestrationItem, state historyState) error {
	if state.empty() {
		return nil
	}
	key := historyKey{item.Instance, item.ExecutionID}
	known := p.histories.get(key)
	if known.Count == 0 || !known.equal(state) {
		var err error
		if known.events, err = p.completeHistory(ctx, conn, rowCame, known, key, state); err != nil {
			return fmt.Errorf("read the history of instance %s: %w", quote(item.Instance), err)
		}
	}
	item.History = copyEvents(known.events)
	if last := len(item.History) - 1; last >= 0 {
		item.LastEventID = item.History[last].ID
	}
	return nil
}

// completeHistory reads what is missing, and keeps the whole.
func (p *Provider) completeHistory(ctx context.Context, conn *pgxpool.Conn, rowCame func(), known historyEntry, key historyKey, state historyState) ([]Event, error) {
	if last := len(known.events) - 1; last >= 0 && known.Started.Equal(state.Started) && known.Count < state.Count {
		// The last known event is read again: a server that lost commits has another one there, or none.
		anchor := known.events[last]
		more, now, err := p.readOn(ctx, conn, rowCame, key, &anchor.ID)
		if err != nil {
			return nil, err
		}
		same := len(more) > 0 && more[0].ID == anchor.ID && more[0].CreatedAt.Equal(anchor.CreatedAt)
		if same && now.Started.Equal(known.Started) && now.Count == last+len(more) {
			events := append(slices.Clip(known.events), more[1:]...)
			p.histories.put(key, now, events)
			return events, nil
		}
		// Others were added before it.
	}
	events, now, err := p.readOn(ctx, conn, rowCame, key, nil)
	if err != nil {
		return nil, err
	}
	if now.known() && now.Count == len(events) && len(events) > 0 {
		p.histories.put(key, now, events)
	}
	return events, nil
}

// readOn reads a history from an event id on (nil: from the first), and what executions says of it in the same
// snapshot.
func (p *Provider) readOn(ctx context.Context, conn *pgxpool.Conn, rowCame func(), key historyKey, from *int64) (events []Event, state historyState, err error) {
	rows, err := conn.Query(ctx, p.sql.resumeHistory, key.instance, key.execution, from)
	if err != nil {
		return nil, state, err
	}
	var id, count *int64
	var kind *string
	var data []byte
	var created, started, appended *time.Time
	_, err = pgx.ForEachRow(rows, []any{&id, &kind, &data, &created, &count, &started, &appended}, func() error {
		rowCame()
		if id == nil {
			state = historyState{Count: int(*count), Started: *started, Appended: value(appended)}
			return nil
		}
		events = append(events, Event{ID: *id, Type: *kind, Data: data, CreatedAt: *created})
		return nil
	})
	return events, state, err
}
