package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: did the event bus keep its promises?
//
// Of each event that was emitted the log has one row, and of each that was rolled back none; each group that takes it has
// handled it, or has it as the dead letter that it is to be; what transactions of handlers did is there once; and events of a key
// were handled one at a time, in the order in which they were committed, as far as the ledgers know that order.

// busHeld is what the database holds of events at the end.
type busHeld struct {
	log       []loggedEvent
	effects   []busEffect // in the order in which they were made
	letters   []busLetter
	redriven  []string // names
	orders    []string // batches
	schedules scheduleTimes
}

type loggedEvent struct {
	id              int64
	name, kind, key string
	schedule        string    // its name, if one emitted it
	due             time.Time // which occurrence
}

type busEffect struct{ group, name, run string }

type busLetter struct{ group, name, reason string }

// scheduleTimes are when the schedules were made, and paused at the end.
type scheduleTimes struct{ from, made, pausing, paused time.Time }

// busLeft is what is still to be handled, or to be redriven.
const busLeft = `(SELECT count(*) FROM bus.worker_queue) + (SELECT count(*) FROM bus.event_lines)
	+ (SELECT count(*) FROM bus.list_event_dead_letters('default', p_limit => 10000) WHERE payload ->> 'name' NOT IN (SELECT name FROM bus_redriven))`

func (t *busHeld) read(ctx context.Context, conn *pgx.Conn, ahead time.Duration) error {
	var e loggedEvent
	var due *time.Time
	err := each(ctx, conn, `SELECT e.event_id, e.payload ->> 'name', e.event_type, coalesce(e.key, ''), coalesce(s.name, ''),
		(e.metadata ->> 'scheduled_at')::timestamptz FROM bus.event_log e LEFT JOIN bus.scheduled_tasks s ON s.task_id = e.scheduled_task_id`,
		[]any{&e.id, &e.name, &e.kind, &e.key, &e.schedule, &due}, func() {
			if e.due = (time.Time{}); due != nil {
				e.due = due.Add(-ahead)
			}
			t.log = append(t.log, e)
		})
	if err != nil {
		return err
	}
	var effect busEffect
	if err = each(ctx, conn, `SELECT by_group, name, run FROM bus_effects ORDER BY place`, []any{&effect.group, &effect.name, &effect.run},
		func() { t.effects = append(t.effects, effect) }); err != nil {
		return err
	}
	var letter busLetter
	if err = each(ctx, conn, `SELECT coalesce(group_name, ''), coalesce(payload ->> 'name', ''), reason
		FROM bus.list_event_dead_letters('default', p_limit => 10000)`, []any{&letter.group, &letter.name, &letter.reason},
		func() { t.letters = append(t.letters, letter) }); err != nil {
		return err
	}
	var name string
	if err = each(ctx, conn, `SELECT name FROM bus_redriven`, []any{&name}, func() { t.redriven = append(t.redriven, name) }); err != nil {
		return err
	}
	return each(ctx, conn, `SELECT batch FROM bus_orders`, []any{&name}, func() { t.orders = append(t.orders, name) })
}

// eventFate is all that is known of an event.
type eventFate struct {
	busLine
	name      string
	process   string
	probe     bool
	intended  time.Time // zero: nobody set out to emit it
	confirmed time.Time
	id        int64 // that was returned
	revoked   bool
	held      []loggedEvent
	runs      map[string][]*handling // by group, in the order of their lines
	effects   map[string][]string    // by group, the runs
	places    map[string]int         // by group, of the effect
	letters   []busLetter
	redriven  bool
	schedule  string // whose occurrence it is
}

// first is when it came to a group first, which is after it was emitted.
func (f *eventFate) first() (first time.Time) {
	for _, runs := range f.runs {
		if began := runs[0].began; first.IsZero() || began.Before(first) {
			first = began
		}
	}
	return first
}

func (f *eventFate) String() string { return fmt.Sprintf("event %s (%s)", f.name, f.Type) }

// handling is a call of a handler.
type handling struct {
	busLine
	id      int64
	process string
	began   time.Time
	ended   time.Time // when it was about to end
	how     string    // done, failing, refusing
}

// busJudge judges events.
type busJudge struct {
	*judge
	fates map[string]*eventFate
}

// judgeBus judges all events.
func (j *judge) judgeBus(lines []entry, t busHeld) {
	b := &busJudge{judge: j, fates: map[string]*eventFate{}}
	b.read(lines)
	b.take(t)
	for _, name := range slices.Sorted(maps.Keys(b.fates)) {
		f := b.fates[name]
		b.checkEmitted(f)
		for group := range patterns {
			b.checkHandled(f, group)
		}
		b.checkLetters(f)
		b.checkPace(f)
	}
	b.checkBatches(t.orders)
	for group := range patterns {
		b.checkOrder(group)
	}
	for name := range schedules {
		b.checkTicks(name, t.log, t.schedules)
	}
}

func (b *busJudge) fate(name string) *eventFate {
	if b.fates[name] == nil {
		b.fates[name] = &eventFate{name: name, runs: map[string][]*handling{}, effects: map[string][]string{}, places: map[string]int{}}
	}
	return b.fates[name]
}

// read takes what the lines say into the fates.
func (b *busJudge) read(lines []entry) {
	slices.SortStableFunc(lines, func(x, y entry) int { return x.At.Compare(y.At) })
	byRun := map[string]*handling{}
	for _, e := range lines {
		f := b.fate(e.Key)
		h := byRun[e.Bus.Run]
		switch {
		case e.What == sending:
			if f.intended.IsZero() { // it may be tried again, with a dedup key or by a handler
				f.intended, f.busLine, f.process, f.probe = e.At, *e.Bus, e.process, e.Do == doProbe
			}
		case e.What == sent:
			if f.id != 0 && f.id != e.ID {
				b.complain("%v was emitted as %d and as %d", f, f.id, e.ID)
			}
			if f.id = e.ID; f.confirmed.IsZero() {
				f.confirmed = e.At
			}
		case e.What == revoked:
			f.revoked = true
		case e.What == redriving, e.What == redriven:
		case e.What == got:
			h = &handling{busLine: *e.Bus, id: e.ID, process: e.process, began: e.At}
			byRun[h.Run], f.runs[h.Group] = h, append(f.runs[h.Group], h)
		case h == nil:
			b.complain("%s: %s of %v, by a handler that nobody called", e.process, e.What, f)
		default:
			h.how, h.ended = e.What, e.At
		}
	}
}

// take takes what the tables have into the fates.
func (b *busJudge) take(t busHeld) {
	for _, e := range t.log {
		if e.schedule != "" {
			e.name = tickName(e.schedule, e.due)
		}
		f := b.fate(e.name)
		f.held, f.Type = append(f.held, e), e.kind
		if e.schedule != "" {
			f.Key, f.Due, f.schedule = e.key, e.due, e.schedule
		} else if f.Key != e.key {
			b.complain("%v is in the log with key %q, and was emitted with %q", f, e.key, f.Key)
		}
	}
	for place, e := range t.effects {
		f := b.fate(e.name)
		f.effects[e.group], f.places[e.group] = append(f.effects[e.group], e.run), place
	}
	for _, l := range t.letters {
		f := b.fate(l.name)
		f.letters = append(f.letters, l)
	}
	for _, name := range t.redriven {
		b.fate(name).redriven = true
	}
	b.v.bus.effects = len(t.effects)
}

// checkEmitted: what was emitted is in the log once, and nothing else.
func (b *busJudge) checkEmitted(f *eventFate) {
	switch {
	case f.intended.IsZero() && f.Due.IsZero():
		b.complain("%v is there, or was handled, and nobody emitted it", f)
	case f.revoked && len(f.held) > 0:
		b.complain("%v is in the log, but its transaction had been rolled back", f)
	case f.revoked && len(f.runs) > 0:
		b.complain("%v was handled, but its transaction had been rolled back", f)
	case !f.confirmed.IsZero() && len(f.held) == 0:
		b.complain("%v is lost: emitted at %v, and not in the log", f, f.confirmed.Format(time.StampMicro))
	case len(f.held) > 1:
		b.complain("%v is in the log %d times", f, len(f.held))
	case len(f.held) == 1 && f.id != 0 && f.held[0].id != f.id:
		b.complain("%v is in the log as %d, and %d was returned", f, f.held[0].id, f.id)
	}
	if f.Of != "" {
		if first := len(b.fate(f.Of).effects[txGroup]) > 0; first != (len(f.held) > 0) {
			b.complain("%v is in the log: %v; the transaction that emits it has taken effect: %v", f, !first, first)
		}
	}
	switch unknown := f.confirmed.IsZero() && !f.revoked && f.Of == "" && f.Due.IsZero(); {
	case len(f.held) > 0:
		b.v.bus.events++
		if unknown {
			b.v.unknown++
		}
	case unknown:
		b.v.unhappened++
	}
}

// checkHandled: a group has handled an event if it takes it, and no other one; in a transaction once, by a handler that was about to
// commit.
func (b *busJudge) checkHandled(f *eventFate, group string) {
	runs := f.runs[group]
	b.v.bus.handled += len(runs)
	if len(runs) > 1 {
		b.v.bus.again += len(runs) - 1
	}
	owed := len(f.held) > 0 && takes(group, f.Type) && !(group == pickyGroup && f.Refuse == refuseAlways)
	ended := slices.ContainsFunc(runs, func(h *handling) bool { return h.how == done })
	switch {
	case len(runs) > 0 && len(f.held) == 0:
		b.complain("%v was handled by group %s, and is not in the log", f, group)
	case len(runs) > 0 && !takes(group, f.Type):
		b.complain("%v was handled by group %s, which does not take it", f, group)
	case owed && len(runs) == 0:
		b.complain("%v is lost: group %s did not get it", f, group)
	case owed && !ended:
		b.complain("%v is lost: group %s got it %d times, and never came to an end", f, group, len(runs))
	}
	for _, h := range runs {
		if len(f.held) > 0 && h.id != f.held[0].id {
			b.complain("%v, %d in the log, came to group %s as %d", f, f.held[0].id, group, h.id)
		}
	}
	if group == plainGroup {
		return
	}
	want := 0
	if owed {
		want = 1
	}
	if n := len(f.effects[group]); n != want {
		b.complain("%v took effect %d times in group %s, and %d is right", f, n, group, want)
	}
	for _, run := range f.effects[group] {
		if !slices.ContainsFunc(runs, func(h *handling) bool { return h.Run == run && h.how == done }) {
			b.complain("%v took effect in group %s by %q, which was not about to commit", f, group, run)
		}
	}
}

// checkLetters: dead letters are those that the group that refuses events has refused for good, after a redrive as well; and what
// it refused at first was redriven.
func (b *busJudge) checkLetters(f *eventFate) {
	for _, l := range f.letters {
		if l.group != pickyGroup || f.Refuse != refuseAlways {
			b.complain("%v is a dead letter of group %s (%s), and has no reason to be", f, l.group, l.reason)
		}
	}
	refused := f.Refuse != "" && len(f.held) > 0 && takes(pickyGroup, f.Type)
	if refused && f.Refuse == refuseAlways {
		b.v.bus.letters++
		if len(f.letters) != 1 {
			b.complain("%v was refused for good, and there are %d dead letters of it", f, len(f.letters))
		}
	}
	if f.redriven != refused {
		b.complain("%v was to be refused: %v; it was redriven: %v", f, refused, f.redriven)
	}
	if refused {
		b.v.bus.redriven++
	}
}

// checkBatches: of what was emitted together all is there or nothing, and its row with it.
func (b *busJudge) checkBatches(orders []string) {
	rows := map[string]int{}
	for _, batch := range orders {
		rows[batch]++
	}
	batches := map[string][]*eventFate{}
	for _, f := range b.fates {
		if f.Batch != "" {
			batches[f.Batch] = append(batches[f.Batch], f)
		}
	}
	for batch, all := range batches {
		there := 0
		for _, f := range all {
			there += min(len(f.held), 1)
		}
		if there != 0 && there != len(all) {
			b.complain("of batch %s %d events of %d are there", batch, there, len(all))
		}
		want := 0
		if all[0].Order && there > 0 {
			want = 1
		}
		if rows[batch] != want {
			b.complain("batch %s has %d rows of its transaction, and %d is right", batch, rows[batch], want)
		}
	}
}

// checkOrder: a group gets one event of a key at a time, which is handled, or refused for good, before the next one comes; not an event
// before another whose emit had returned before its own was called, or that is before it in its batch. What was redriven waits for
// what is there by then, so it is in no order.
func (b *busJudge) checkOrder(group string) {
	byKey := map[string][]*eventFate{}
	for _, f := range b.fates {
		if f.Key != "" && len(f.held) > 0 && len(f.runs[group]) > 0 && (group != pickyGroup || f.Refuse == "") {
			byKey[f.Key] = append(byKey[f.Key], f)
		}
	}
	for key, all := range byKey {
		slices.SortFunc(all, func(x, y *eventFate) int { return x.runs[group][0].began.Compare(y.runs[group][0].began) })
		for i, f := range all[1:] {
			before, came := all[i], f.runs[group][0].began
			if !slices.ContainsFunc(before.runs[group], func(h *handling) bool { return h.how == done && h.ended.Before(came) }) {
				b.complain("group %s, key %s: %v came at %v, before %v was handled", group, key, f, came.Format(time.StampMicro), before)
			}
			if group != plainGroup && f.places[group] < before.places[group] {
				b.complain("group %s, key %s: %v came after %v, and took effect before it", group, key, f, before)
			}
			if f.Batch != "" && f.Batch == before.Batch && f.Place < before.Place {
				b.complain("group %s, key %s: %v comes before %v, which is before it in its batch", group, key, before, f)
			}
			// The order is that of the commits, so it is the same in all groups that are in order.
			if x, y := before.places[txGroup], f.places[txGroup]; len(before.effects[txGroup]) > 0 && len(f.effects[txGroup]) > 0 && x > y {
				b.complain("key %s: %v comes before %v in group %s, and after it in group %s", key, before, f, group, txGroup)
			}
			b.v.bus.ordered++
		}
		var earliest *eventFate // of those that come later, the one that was emitted first
		for _, f := range slices.Backward(all) {
			if earliest != nil && !f.intended.IsZero() && earliest.confirmed.Before(f.intended) {
				b.complain("group %s, key %s: %v comes before %v, whose emit had returned before its own was called", group, key, f, earliest)
			}
			if !f.confirmed.IsZero() && (earliest == nil || f.confirmed.Before(earliest.confirmed)) {
				earliest = f
			}
		}
	}
}

// checkTicks: the occurrences of a schedule are one interval apart, from when it was made to when it was paused, and each came once.
func (b *busJudge) checkTicks(schedule string, log []loggedEvent, times scheduleTimes) {
	every := schedules[schedule]
	var ticks []time.Time
	for _, e := range log {
		if e.schedule == schedule {
			ticks = append(ticks, e.due)
		}
	}
	slices.SortFunc(ticks, time.Time.Compare)
	b.v.bus.ticks += len(ticks)
	last := times.from
	for i, at := range ticks {
		switch gap := at.Sub(last); {
		case i == 0 && gap > every+times.made.Sub(times.from): // the first is counted from when it was made, or from the minute
			b.complain("schedule %s began only at %v; it was made at %v", schedule, at.Format(time.StampMicro), times.made.Format(time.StampMicro))
		case i > 0 && gap == 0:
			b.complain("schedule %s emitted its occurrence at %v twice", schedule, at.Format(time.StampMicro))
		case i > 0 && gap > every:
			b.complain("schedule %s left out what is between %v and %v", schedule, last.Format(time.StampMicro), at.Format(time.StampMicro))
		case i > 0 && gap < every:
			b.complain("schedule %s emitted %v after its occurrence at %v", schedule, gap, last.Format(time.StampMicro))
		}
		last = at
	}
	// What was due is emitted within a second by then, or when the machine lets it.
	if missing := times.pausing.Sub(last); missing > every+probePatience+b.excusedIn(last, times.pausing) {
		b.complain("schedule %s emitted nothing from %v on, and was paused %v later", schedule, last.Format(time.StampMicro), missing)
	}
	if last.After(times.paused) {
		b.complain("schedule %s emitted its occurrence at %v, and had been paused at %v", schedule, last.Format(time.StampMicro), times.paused.Format(time.StampMicro))
	}
}

// checkPace: once all must have recovered, a probe is in hand at once, and an occurrence within the time that two leases may hold it up.
func (b *busJudge) checkPace(f *eventFate) {
	from := f.Due
	if f.probe {
		from = f.confirmed
	}
	patience, into := probePatience, &b.v.bus.probes
	switch {
	case from.IsZero():
		return
	case f.Type != probed:
		patience, into = leasesPatience, nil
	}
	// A schedule that has fallen behind catches up with one occurrence after the other.
	if before := b.fates[tickName(f.schedule, f.Due.Add(-schedules[f.schedule]))]; before != nil && before.first().After(from) {
		from = before.first()
	}
	for group, runs := range f.runs {
		if after, late := b.late(from, runs[0].began, patience, into); late {
			b.complain("%v, emitted by %s, due at %v, came to group %s in %s only %v after that, and %v after all must have recovered",
				f, f.process, from.Format(time.StampMilli), group, runs[0].process, runs[0].began.Sub(from), after)
		}
	}
}

// busTotals are what a run had of events.
type busTotals struct {
	events, ticks     int
	handled, again    int
	effects           int
	letters, redriven int
	ordered           int
	probes            []time.Duration
}

func (t *busTotals) String() string {
	if t.events == 0 {
		return ""
	}
	return fmt.Sprintf("event bus: %d events, %d of schedules; %d deliveries, %d of them again; %d transactional effects; %d pairs in order; %d redriven, %d dead letters; %s\n",
		t.events, t.ticks, t.handled, t.again, t.effects, t.ordered, t.redriven, t.letters, quantiles(t.probes))
}
