package measure

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does a long history cost a turn?

// HistoriesOptions are the sizes of Histories.
type HistoriesOptions struct {
	Turns     int // of each instance. Defaults to 200.
	Short     int // events of the short history. Defaults to 20.
	Long      int // and of the long one. Defaults to 20,000.
	EventSize int // bytes of data that each has. Defaults to 100.
	Progress  func(Progress)
}

// HistoriesResult is what Histories found: how long turns took, from the call of the fetch to the end of the ack.
type HistoriesResult struct {
	ShortEvents int     `json:"short_events"`
	LongEvents  int     `json:"long_events"`
	Short       Samples `json:"short"`     // with Config.HistoryCache
	Long        Samples `json:"long"`      // the same
	LongRead    Samples `json:"long_read"` // without
}

// Histories lets an instance with a short history and one with a long history take turns, each of which adds an event,
// and then the one with the long history once more on a node that keeps none.
func Histories(ctx context.Context, url string, o HistoriesOptions) (r *HistoriesResult, err error) {
	orDefault(&o.Turns, 200)
	orDefault(&o.Short, 20)
	orDefault(&o.Long, 20_000)
	orDefault(&o.EventSize, 100)
	defer func(ctx context.Context) { err = about(ctx, "histories", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	keeping, err := s.openWith(ctx, 1, pgwake.Config{HistoryCache: 1 << 30})
	if err != nil {
		return nil, err
	}
	defer keeping.close(&err)
	plain, err := s.open(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer plain.close(&err)

	data := json.RawMessage(`"` + strings.Repeat("x", max(o.EventSize-2, 0)) + `"`)
	for instance, length := range map[string]int{"short": o.Short, "long": o.Long} {
		if _, err := turn(ctx, keeping, instance, pgwake.Event{ID: 1, Type: "event", Data: data}); err != nil {
			return nil, err
		}
		events := make([]pgwake.Event, 0, length)
		for id := 2; id <= length; id++ {
			events = append(events, pgwake.Event{ID: int64(id), Type: "event", Data: data})
		}
		if err := keeping.AppendHistory(ctx, instance, 1, events); err != nil {
			return nil, err
		}
	}
	r = &HistoriesResult{ShortEvents: o.Short, LongEvents: o.Long}
	m := newMeter(o.Progress)
	for i := range o.Turns + 1 {
		for _, of := range []struct {
			node     *node
			instance string
			to       *Samples
		}{{keeping, "short", &r.Short}, {keeping, "long", &r.Long}} {
			took, err := turn(ctx, of.node, of.instance, pgwake.Event{ID: int64(o.Long + 1 + i), Type: "event", Data: data})
			if err != nil {
				return nil, err
			}
			if i > 0 { // the first one reads what the node does not know
				*of.to = append(*of.to, took)
			}
		}
		if m.due() || i == o.Turns {
			m.report(Progress{Done: len(r.Long), Total: o.Turns, Figures: r.Long.Summary()})
		}
	}
	for i := range max(o.Turns/10, 1) {
		took, err := turn(ctx, plain, "long", pgwake.Event{ID: int64(o.Long + o.Turns + 2 + i), Type: "event", Data: data})
		if err != nil {
			return nil, err
		}
		r.LongRead = append(r.LongRead, took)
	}
	return r, nil
}

// turn sends the instance a message and takes the time of the turn that it leads to, which adds the event.
func turn(ctx context.Context, n *node, instance string, e pgwake.Event) (time.Duration, error) {
	if _, err := n.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: instance, Kind: "go"}, nil); err != nil {
		return 0, err
	}
	began := time.Now()
	item, err := n.FetchOrchestrationItem(ctx, nil)
	if err != nil {
		return 0, err
	}
	err = n.AckOrchestrationItem(ctx, item.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "history"}, History: []pgwake.Event{e}})
	return time.Since(began), err
}
