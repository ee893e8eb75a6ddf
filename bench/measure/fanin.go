package measure

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what do many messages cost a turn, those that it takes and those that it leaves to others?

//go:embed fanin_instances.sql
var fanInInstancesSQL string

// FanInOptions are the sizes of FanIn.
type FanInOptions struct {
	Turns int // that take many messages of one instance. Defaults to 5.
	Small int // messages in each of the small turns that they are compared with. Defaults to 100.
	Large int // messages in each of those turns. Defaults to 10,000.

	Singles int // turns of one message each, with few and with many instances queued. Defaults to 300.
	Few     int // Defaults to 1,000.
	Many    int // Defaults to 100,000.

	Progress func(Progress)
}

// FanInResult is what FanIn found.
type FanInResult struct {
	Small int `json:"small"` // messages
	Large int `json:"large"`
	Few   int `json:"few"` // instances
	Many  int `json:"many"`

	// One sample for each turn, all of it.
	SmallTurns TurnTimes `json:"small_turns"`
	LargeTurns TurnTimes `json:"large_turns"`
	AmongFew   TurnTimes `json:"among_few"`
	AmongMany  TurnTimes `json:"among_many"`

	// Fetches that find nothing but one more message of an instance whose turn is in somebody's hands.
	BehindSmall Samples `json:"behind_small"`
	BehindLarge Samples `json:"behind_large"`
}

// TurnTimes are what fetches and acks took, from the call to the return.
type TurnTimes struct {
	Fetch Samples `json:"fetch"`
	Ack   Samples `json:"ack"`
}

// smallPerLarge is how many small turns are taken beside each large one, which is so much longer.
const smallPerLarge = 10

// FanIn takes turns of few and of many messages that were sent to one instance, each of which an event comes from; and
// then turns of one message each while few and while many instances have one queued. Those that are compared take turns.
func FanIn(ctx context.Context, url string, o FanInOptions) (r *FanInResult, err error) {
	orDefault(&o.Turns, 5)
	orDefault(&o.Small, 100)
	orDefault(&o.Large, 10_000)
	orDefault(&o.Singles, 300)
	orDefault(&o.Few, 1000)
	orDefault(&o.Many, 100_000)
	defer func(ctx context.Context) { err = about(ctx, "fan-in", err) }(ctx)
	if o.Few < fanInWarmUps+o.Singles {
		return nil, fmt.Errorf("%d turns of one message each need more than %d instances", o.Singles, o.Few)
	}
	r = &FanInResult{Small: o.Small, Large: o.Large, Few: o.Few, Many: o.Many}
	m := newMeter(o.Progress)
	if err := r.turns(ctx, url, &o, m); err != nil {
		return nil, err
	}
	if err := r.singles(ctx, url, &o, m); err != nil {
		return nil, err
	}
	m.report(Progress{Done: o.Turns + o.Singles, Total: o.Turns + o.Singles, Figures: r.AmongMany.Fetch.Summary()})
	return r, nil
}

// turns takes the turns that differ by how many messages they take. Each is the second turn of an instance of its own,
// so that no history grows.
func (r *FanInResult) turns(ctx context.Context, url string, o *FanInOptions, m *meter) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 1)
	if err != nil {
		return err
	}
	defer n.close(&err)

	count := 0
	take := func(messages int, to *TurnTimes, behind *Samples) error {
		count++
		instance := "instance-" + strconv.Itoa(count)
		if _, err := turn(ctx, n, instance, pgwake.Event{ID: 1, Type: "started"}); err != nil {
			return err
		}
		if err := sendTo(ctx, n, messages, func(int) string { return instance }); err != nil {
			return err
		}
		if err := to.take(ctx, n, messages, func() error { return behind.takeHeld(ctx, n, instance) }); err != nil {
			return err
		}
		return new(TurnTimes).take(ctx, n, looksBehind, nil) // what was sent meanwhile
	}
	if err := take(o.Small, &TurnTimes{}, &Samples{}); err != nil { // prepares the statements
		return err
	}
	for i := range o.Turns {
		for range smallPerLarge {
			if err := take(o.Small, &r.SmallTurns, &r.BehindSmall); err != nil {
				return err
			}
		}
		if err := take(o.Large, &r.LargeTurns, &r.BehindLarge); err != nil {
			return err
		}
		if m.due() {
			m.report(Progress{Done: i + 1, Total: o.Turns + o.Singles, Figures: r.LargeTurns.Fetch.Summary()})
		}
	}
	return nil
}

const fanInWarmUps = 10

// singles takes the turns that differ by how many instances wait for theirs.
func (r *FanInResult) singles(ctx context.Context, url string, o *FanInOptions, m *meter) (err error) {
	few, many := newStage(url), newStage(url)
	defer few.drop(&err)
	defer many.drop(&err)
	nodes := make([]*node, 2)
	for i, of := range []struct {
		stage     stage
		instances int
	}{{few, o.Few}, {many, o.Many}} {
		if nodes[i], err = of.stage.open(ctx, 1); err != nil {
			return err
		}
		defer nodes[i].close(&err)
		if err := of.stage.createInstances(ctx, of.instances); err != nil {
			return err
		}
		if err := sendTo(ctx, nodes[i], of.instances, func(i int) string { return "instance-" + strconv.Itoa(i+1) }); err != nil {
			return err
		}
	}
	for i := range fanInWarmUps + o.Singles {
		if i == fanInWarmUps {
			r.AmongFew, r.AmongMany = TurnTimes{}, TurnTimes{}
		}
		if err := r.AmongFew.take(ctx, nodes[0], 1, nil); err != nil {
			return err
		}
		if err := r.AmongMany.take(ctx, nodes[1], 1, nil); err != nil {
			return err
		}
		if m.due() {
			m.report(Progress{Done: o.Turns + max(i+1-fanInWarmUps, 0), Total: o.Turns + o.Singles, Figures: r.AmongMany.Fetch.Summary()})
		}
	}
	return nil
}

// createInstances makes instances that had their first turns.
func (s stage) createInstances(ctx context.Context, instances int) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	_, err = conn.Exec(ctx, fanInInstancesSQL, instances)
	return err
}

// fanInChunk is how many messages are sent at a time.
const fanInChunk = 1000

// sendTo sends messages, each to the instance that to names.
func sendTo(ctx context.Context, n *node, messages int, to func(i int) string) error {
	for first := 0; first < messages; first += fanInChunk {
		chunk := make([]pgwake.MessageEnqueue, min(fanInChunk, messages-first))
		for i := range chunk {
			chunk[i].Message = completion(to(first+i), int64(first+i+1))
		}
		if _, err := n.EnqueueForOrchestratorMany(ctx, chunk); err != nil {
			return err
		}
	}
	return nil
}

// completion is what a worker reports to the instance that asked for an activity.
func completion(instance string, activity int64) pgwake.Message {
	return pgwake.Message{Instance: instance, Kind: "completed", Data: json.RawMessage(`{"activity":` + strconv.FormatInt(activity, 10) + `,"result":"done"}`)}
}

// take takes the time of a turn, of so many messages. It adds an event for each. Between the fetch and the ack it calls
// meanwhile, if that is not nil.
func (t *TurnTimes) take(ctx context.Context, n *node, messages int, meanwhile func() error) error {
	began := time.Now()
	item, err := n.FetchOrchestrationItem(ctx, nil)
	if err != nil {
		return err
	}
	fetched := time.Since(began)
	if len(item.Messages) != messages {
		return fmt.Errorf("a turn of %s has %d messages instead of %d", item.Instance, len(item.Messages), messages)
	}
	if meanwhile != nil {
		if err := meanwhile(); err != nil {
			return err
		}
	}
	ack := pgwake.OrchestrationAck{ExecutionID: item.ExecutionID, History: eventsOf(item)}
	began = time.Now()
	if err := n.AckOrchestrationItem(ctx, item.LockToken, ack); err != nil {
		return err
	}
	t.Fetch, t.Ack = append(t.Fetch, fetched), append(t.Ack, time.Since(began))
	return nil
}

// looksBehind is how many fetches are made while a turn is in hand.
const looksBehind = 5

// takeHeld takes the time of fetches that each meet one more message of an instance that is locked.
func (s *Samples) takeHeld(ctx context.Context, n *node, instance string) error {
	for range looksBehind {
		if err := sendTo(ctx, n, 1, func(int) string { return instance }); err != nil {
			return err
		}
		began := time.Now()
		_, err := n.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{NoWait: true})
		took := time.Since(began)
		if err == nil {
			return fmt.Errorf("a turn of %s while it was locked", instance)
		}
		if !errors.Is(err, pgwake.ErrNoWork) {
			return err
		}
		*s = append(*s, took)
	}
	return nil
}

// eventsOf makes an event of each message.
func eventsOf(item *pgwake.OrchestrationItem) []pgwake.Event {
	events := make([]pgwake.Event, len(item.Messages))
	for i, m := range item.Messages {
		events[i] = pgwake.Event{ID: item.LastEventID + int64(i) + 1, Type: string(m.Kind), Data: m.Data}
	}
	return events
}
