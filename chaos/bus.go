package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
)

// This file answers: who emits events, who handles them, and what is written down of it?
//
// Each of these processes emits, with and without keys, by itself and in transactions with a row of its own, some of which are
// rolled back; and it has a Node of each group. One group handles without a transaction, one in transactions that emit more,
// and one refuses some events for good, whose dead letters are redriven. Schedules emit as well.

const busSchema = "bus"

// busTables: effects of handlers have no key, so that a second one is seen, but the order in which they were made.
const busTables = `CREATE TABLE bus_effects (place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, by_group text NOT NULL, name text NOT NULL, run text NOT NULL);
	CREATE TABLE bus_orders (batch text NOT NULL);
	CREATE TABLE bus_redriven (name text PRIMARY KEY)`

// The groups.
const (
	plainGroup = "plain" // without transactions
	txGroup    = "tx"
	pickyGroup = "picky"  // in transactions too; it refuses some
	probeGroup = "probes" // in a namespace of its own, so that probes wait for nothing but their way
)

// The types of events.
const (
	orderCreated  = "order.created"
	orderPaid     = "order.paid"
	orderFollowed = "order.followed" // emitted by the handler of order.created in txGroup
	noted         = "misc.note"
	probed        = "probe"
	ticked        = "tick" // by schedules
)

// patterns say what the groups are subscribed to.
var patterns = map[string][]string{
	plainGroup: {"#"},
	txGroup:    {"order.*", ticked},
	pickyGroup: {"order.*"},
	probeGroup: {probed},
}

// spaceOf is the namespace of a group, or of a schedule.
func spaceOf(name string) string {
	if name == probeGroup || name == probing {
		return probeSpace
	}
	return pgwake.DefaultNamespace
}

// takes reports whether a group gets events of a type.
func takes(group, kind string) bool {
	return (group == probeGroup) == (kind == probed) && slices.ContainsFunc(patterns[group], func(p string) bool { return eventbus.Match(p, kind) })
}

// What pickyGroup makes of an event. It handles what is redriven, but for the first of these.
const (
	refuseAlways = "always"
	refuseOnce   = "once"
	exhaustAll   = "exhaust" // fails at all attempts
)

// mostTries is far more than faults take, so that nothing becomes a dead letter by these.
const mostTries = 20

// schedules are there from the beginning, by name, with what lies between two of their occurrences.
var schedules = map[string]time.Duration{"every": 2 * time.Second, "cron": 4 * time.Second, "keyed": 6 * time.Second, probing: time.Second}

const probing = "probing" // the schedule of probes

func scheduleOf(name string) eventbus.Schedule {
	s := eventbus.Schedule{Name: name, Cron: fmt.Sprintf("@every %v", schedules[name]), Type: ticked, Payload: news{Name: name}, CatchUp: eventbus.CatchUpAll}
	switch name {
	case "cron":
		s.Cron = fmt.Sprintf("*/%d * * * * *", schedules[name]/time.Second)
	case "keyed":
		s.Key = "ticks"
	case probing:
		s.Type = probed
	}
	return s
}

// news is the payload of all events.
type news struct {
	Name   string `json:"name"`
	Refuse string `json:"refuse,omitempty"`
}

// tickName is what an occurrence is called in the ledgers.
func tickName(schedule string, at time.Time) string {
	return fmt.Sprintf("tick of %s at %s", schedule, at.UTC().Format(time.RFC3339Nano))
}

// What lines say of events, besides what they say of items: a delivery is got, then done, failing or refusing, which is for good;
// a redrive is redriving, then redriven or nothing.
const (
	refusing  = "refusing"
	redriving = "redriving"
	redriven  = "redriven"
)

// busLine is what lines of events have besides others. Their Key is the name of the event, their ID that of the log.
type busLine struct {
	Type   string    `json:"type,omitempty"`
	Key    string    `json:"key,omitempty"` // by which it is ordered
	Refuse string    `json:"refuse,omitempty"`
	Batch  string    `json:"batch,omitempty"` // all of it is there, or nothing
	Place  int       `json:"place,omitempty"` // in it
	Order  bool      `json:"order,omitempty"` // it has a row in bus_orders
	Of     string    `json:"of,omitempty"`    // the event whose handler emits it
	Group  string    `json:"group,omitempty"`
	Run    string    `json:"run,omitempty"`
	Due    time.Time `json:"due,omitzero"` // of an occurrence
}

func (c *chaos) prepareBus(ctx context.Context, p *pgwake.Provider) error {
	bus, err := eventbus.New(ctx, p, nil)
	for group, of := range patterns {
		if err == nil {
			err = bus.In(spaceOf(group)).Subscribe(ctx, group, of, nil)
		}
	}
	c.schedules.from = time.Now()
	for _, name := range slices.Sorted(maps.Keys(schedules)) {
		if err == nil {
			_, err = bus.In(spaceOf(name)).Schedule(ctx, scheduleOf(name))
		}
	}
	c.schedules.made = time.Now()
	return err
}

// pauseSchedules has no more occurrences come.
func (c *chaos) pauseSchedules(ctx context.Context) error {
	return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		c.schedules.pausing = time.Now()
		for name := range schedules {
			if _, err := conn.Exec(ctx, `SELECT bus.activate_schedule($1, $2, false)`, spaceOf(name), name); err != nil {
				return err
			}
		}
		c.schedules.paused = time.Now()
		return nil
	})
}

// openBus makes the Bus and its nodes, which begin at once.
func (w *workload) openBus(ctx context.Context) (err error) {
	if w.bus, err = eventbus.New(ctx, w.provider, nil); err != nil {
		return err
	}
	w.busNodes = nil
	for group, of := range patterns {
		n, err := w.bus.In(spaceOf(group)).Node(ctx, &eventbus.NodeConfig{
			ID: fmt.Sprintf("%s-%s", w.process(), group), Group: group, Concurrency: 2, Visibility: lease, MaxAttempts: mostTries, Timeout: handlerTimeout,
			Retry: dispatch.Backoff(5*time.Millisecond, 50*time.Millisecond), StopTimeout: time.Second, CancelTimeout: time.Second,
		})
		for _, pattern := range of {
			switch {
			case err != nil:
			case group == plainGroup:
				err = n.OnPlain(ctx, pattern, func(ctx context.Context, e *eventbus.Event) error { return w.handleEvent(ctx, n, group, e, nil) })
			default:
				err = n.On(ctx, pattern, func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
					return w.handleEvent(ctx, n, group, e, tx)
				})
			}
		}
		if err == nil {
			err = n.Start(ctx)
		}
		if err != nil {
			return err
		}
		w.busNodes = append(w.busNodes, n)
	}
	return nil
}

// beginBus starts the loops of a process of the bus.
func (w *workload) beginBus() {
	for _, n := range w.busNodes {
		w.loop("node "+n.ID(), func(*rand.Rand) { w.stopNode(n) })
	}
	w.loop("emit", w.emitEvents)
	w.loop("emit probes", w.emitProbes)
	w.loop("redrive", w.redriveLetters)
}

// stopNode ends a node when the process is to end. That of a Provider that was closed has ended by itself.
func (w *workload) stopNode(n *eventbus.Node) {
	select {
	case <-w.alive.Done():
	case <-n.Done():
		if w.loud.Err() == nil {
			w.ledger.write(wrong, entry{Err: fmt.Sprintf("node %s has ended by itself", n.ID())})
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	if err := n.Stop(ctx); err != nil && !errors.Is(err, dispatch.ErrHandlersLeft) {
		w.failed(fickle(ctx), "stop node", err)
	}
}

// emitEvents emits until the process is to be quiet.
func (w *workload) emitEvents(rng *rand.Rand) {
	for n := 0; w.loud.Err() == nil; n++ {
		began := time.Now()
		w.emitBatch(rng, fmt.Sprintf("%s-event-%d", w.process(), n))
		w.rest(rng, began, 20*time.Millisecond, 300*time.Millisecond)
	}
}

func (w *workload) emitProbes(rng *rand.Rand) {
	for n := 0; w.loud.Err() == nil; n++ {
		line := entry{Key: fmt.Sprintf("%s-probe-%d", w.process(), n), Do: doProbe, Bus: &busLine{Type: probed}}
		w.emit([]entry{line}, func(ctx context.Context) ([]eventbus.Emitted, error) {
			id, err := w.bus.In(probeSpace).Emit(ctx, probed, news{Name: line.Key}, nil)
			return []eventbus.Emitted{{ID: id}}, err
		})
		w.restProbes(between(rng, 200*time.Millisecond, 1000*time.Millisecond))
	}
}

// emitBatch emits some events of one key, or without any. One that emits for several may meet in a deadlock with whoever settles deliveries of
// several keys, as docs/eventbus.md has it.
func (w *workload) emitBatch(rng *rand.Rand, batch string) {
	var key string
	if rng.IntN(5) > 1 {
		key = fmt.Sprint("k", rng.IntN(5))
	}
	mode := rng.IntN(10)
	var lines []entry
	var events []eventbus.Emission
	for i := range 1 + rng.IntN(4) {
		line := busLine{Type: []string{orderCreated, orderPaid, noted}[rng.IntN(3)], Key: key, Batch: batch, Place: i, Order: mode < 4}
		if takes(pickyGroup, line.Type) {
			switch p := rng.IntN(100); {
			case p < 3:
				line.Refuse = refuseAlways
			case p < 7:
				line.Refuse = refuseOnce
			case p < 8:
				line.Refuse = exhaustAll
			}
		}
		name := fmt.Sprintf("%s-%d", batch, i)
		e := eventbus.Emission{Type: line.Type, Payload: news{Name: name, Refuse: line.Refuse}, EmitOptions: eventbus.EmitOptions{Key: key}}
		if mode == 9 {
			e.DedupKey = name
		}
		lines, events = append(lines, entry{Key: name, Bus: &line}), append(events, e)
	}
	switch {
	case mode < 4:
		commit := rng.IntN(4) > 0
		pause := between(rng, 0, 20*time.Millisecond)
		w.emit(lines, func(ctx context.Context) (came []eventbus.Emitted, err error) {
			err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, `INSERT INTO bus_orders VALUES ($1)`, batch); err != nil {
					return err
				}
				if came, err = w.bus.WithTx(tx).EmitMany(ctx, events); err != nil {
					return err
				}
				nap(ctx, pause)
				if !commit {
					return errRevoked
				}
				return nil
			})
			return came, err
		})
	case mode == 9: // again, whatever came of it: it is emitted once
		for range 2 {
			w.emit(lines, func(ctx context.Context) ([]eventbus.Emitted, error) { return w.bus.EmitMany(ctx, events) })
		}
	default:
		w.emit(lines, func(ctx context.Context) ([]eventbus.Emitted, error) { return w.bus.EmitMany(ctx, events) })
	}
}

// emit makes the call between the lines that say so.
func (w *workload) emit(lines []entry, call func(context.Context) ([]eventbus.Emitted, error)) {
	w.ledger.write(sending, lines...)
	ctx, cancel := verb(context.Background())
	defer cancel()
	came, err := call(ctx)
	switch {
	case errors.Is(err, errRevoked):
		w.ledger.write(revoked, lines...)
	case err != nil:
		w.failed(ctx, "emit", err)
	default:
		told := slices.Clone(lines)
		for i, e := range came {
			told[i].ID, told[i].Duplicate = e.ID, e.Duplicate
		}
		w.ledger.write(sent, told...)
	}
}

// handleEvent is the handler of a group. tx is nil if it has no transaction.
func (w *workload) handleEvent(ctx context.Context, n *eventbus.Node, group string, e *eventbus.Event, tx pgx.Tx) error {
	var what news
	if err := e.Decode(&what); err != nil {
		return eventbus.DeadLetter(err)
	}
	line := entry{Key: what.Name, ID: e.ID, Bus: &busLine{Type: e.Type, Group: group, Run: fmt.Sprintf("%s/%d", w.process(), calls.Add(1))}}
	if e.ScheduledTaskID != "" {
		var occurrence struct {
			At time.Time `json:"scheduled_at"`
		}
		if err := json.Unmarshal(e.Metadata, &occurrence); err != nil {
			return eventbus.DeadLetter(err)
		}
		at := w.local(occurrence.At)
		line.Key, line.Bus.Due = tickName(what.Name, at), at
	}
	w.ledger.write(got, line)
	fail := func(err error) error {
		w.ledger.write(failing, line)
		return err
	}
	if tx != nil {
		if _, err := tx.Exec(ctx, `INSERT INTO bus_effects (by_group, name, run) VALUES ($1, $2, $3)`, group, line.Key, line.Bus.Run); err != nil {
			return fail(err)
		}
	}
	rng := rand.New(rand.NewPCG(w.Seed, uint64(hash(line.Bus.Run))))
	switch {
	case e.Type == probed:
	case rng.IntN(200) == 0:
		nap(ctx, lease+lease/2)
	default:
		nap(ctx, between(rng, 0, 20*time.Millisecond))
	}
	if e.Type == orderCreated && group == txGroup {
		more := entry{Key: "of " + line.Key, Bus: &busLine{Type: orderFollowed, Key: e.Key, Of: line.Key}}
		w.ledger.write(sending, more)
		if _, err := n.WithTx(tx).Emit(ctx, orderFollowed, news{Name: more.Key}, &eventbus.EmitOptions{Key: e.Key}); err != nil {
			return fail(err)
		}
	}
	if group == pickyGroup && what.Refuse != "" {
		var again bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM bus_redriven WHERE name = $1)`, line.Key).Scan(&again); err != nil {
			return fail(err)
		}
		switch {
		case again && what.Refuse != refuseAlways:
		case what.Refuse == exhaustAll:
			return fail(errOnPurpose)
		default:
			w.ledger.write(refusing, line)
			return eventbus.DeadLetter(errOnPurpose)
		}
	}
	if e.Redelivery == 0 && e.Type != probed && rng.IntN(30) == 0 {
		return fail(errOnPurpose)
	}
	w.ledger.write(done, line)
	return nil
}

// redriveLetters redrives each dead letter once, until the process is to end.
func (w *workload) redriveLetters(rng *rand.Rand) {
	known := map[string]bool{}
	for nap(w.alive, between(rng, 100*time.Millisecond, 400*time.Millisecond)) {
		for after := int64(0); ; {
			ctx, cancel := verb(w.alive)
			letters, err := w.bus.DeadLetters(ctx, &eventbus.LetterFilter{After: after})
			if err != nil {
				w.failed(ctx, "list dead letters", err)
			}
			cancel()
			if len(letters) == 0 {
				break
			}
			for _, l := range letters {
				var what news
				if _ = l.Event.Decode(&what); !known[what.Name] {
					known[what.Name] = w.redrive(l.ID, what.Name)
				}
				after = l.ID
			}
		}
	}
}

// redrive redrives a dead letter, together with a row that says so, and reports whether that was done.
func (w *workload) redrive(letter int64, name string) bool {
	ctx, cancel := verb(context.Background())
	defer cancel()
	line := entry{Key: name, Bus: &busLine{Group: pickyGroup}}
	was := false
	w.ledger.write(redriving, line)
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `INSERT INTO bus_redriven VALUES ($1) ON CONFLICT DO NOTHING`, name)
		if err != nil {
			return err
		}
		if was = tag.RowsAffected() == 0; was {
			return errRevoked
		}
		n, err := w.bus.WithTx(tx).Redrive(ctx, &eventbus.LetterFilter{IDs: []int64{letter}})
		if err == nil && n != 1 {
			err = fmt.Errorf("dead letter %d: %d were redriven", letter, n)
			w.ledger.write(wrong, entry{Err: err.Error()})
		}
		return err
	})
	switch {
	case err == nil:
		w.ledger.write(redriven, line)
	case !errors.Is(err, errRevoked):
		w.failed(ctx, "redrive", err)
	}
	return err == nil || was
}
