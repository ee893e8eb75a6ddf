package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// busLine adds a line of an event.
func (s *story) busLine(ms int, what, name string, l busLine) *story {
	return s.line(ms, what, entry{Key: name, ID: 7, Bus: &l})
}

// emitted is an event that was emitted at that time, and is in the log.
func (s *story) emitted(ms int, name string, l busLine) *story {
	s.busLine(ms, sending, name, l).busLine(ms+5, sent, name, l)
	return s.logged(name, l)
}

func (s *story) logged(name string, l busLine) *story {
	h := &s.tables.layers.bus
	h.log = append(h.log, loggedEvent{id: 7, name: name, kind: l.Type, key: l.Key})
	return s
}

// handled is a call of a handler of a group, which ends in that way; with an effect if it is done, and has a transaction.
func (s *story) handled(ms int, group, name, run, how string) *story {
	l := busLine{Group: group, Run: run}
	s.busLine(ms, got, name, l)
	if how != "" {
		s.busLine(ms+2, how, name, l)
	}
	if how == done && group != plainGroup {
		h := &s.tables.layers.bus
		h.effects = append(h.effects, busEffect{group, name, run})
	}
	return s
}

// event is one of which everything went as it should.
func (s *story) event(ms int, name string, l busLine) *story {
	s.emitted(ms, name, l)
	for i, group := range []string{plainGroup, txGroup, pickyGroup, probeGroup} {
		if takes(group, l.Type) && !(group == pickyGroup && l.Refuse != "") {
			s.handled(ms+10+5*i, group, name, name+"/"+group, done)
		}
	}
	return s
}

// refused is one that a group refused, and that was redriven.
func (s *story) refused(name, how, again string) *story {
	s.event(0, name, busLine{Type: orderPaid, Refuse: how}).handled(30, pickyGroup, name, name+"/1", refusing)
	h := &s.tables.layers.bus
	h.redriven = append(h.redriven, name)
	s.busLine(40, redriving, name, busLine{Group: pickyGroup}).busLine(41, redriven, name, busLine{Group: pickyGroup})
	s.handled(50, pickyGroup, name, name+"/2", again)
	if again == refusing {
		h.letters = append(h.letters, busLetter{group: pickyGroup, name: name})
	}
	return s
}

// ticking has each schedule tick, from when it was made to when it was paused, but for what is left out, in ms.
func (s *story) ticking(from, made, pausing, paused int, but ...int) *story {
	h := &s.tables.layers.bus
	h.schedules = scheduleTimes{at(from), at(made), at(pausing), at(paused)}
	for schedule, every := range schedules {
		for ms := int(every / time.Millisecond); ms < pausing; ms += int(every / time.Millisecond) {
			if !slices.Contains(but, ms) {
				s.tick(schedule, ms)
			}
		}
	}
	return s
}

func (s *story) tick(schedule string, ms int) *story {
	of := scheduleOf(schedule)
	h := &s.tables.layers.bus
	h.log = append(h.log, loggedEvent{id: 7, name: schedule, kind: of.Type, key: of.Key, schedule: schedule, due: at(ms)})
	name := tickName(schedule, at(ms))
	for group := range patterns {
		if takes(group, of.Type) {
			s.handled(ms+2, group, name, name+"/"+group, done)
		}
	}
	return s
}

func (s *story) changeBus(how func(*busHeld)) *story {
	how(&s.tables.layers.bus)
	return s
}

// busViolations are what there is to say of events; of schedules, only if they are part of the story.
func (s *story) busViolations() []string {
	j := newJudge(lease)
	j.crashes, j.rounds, j.v = s.crashes, s.rounds, &verdict{}
	b := s.tables.layers.bus
	_, lines, _ := apart(s.lines)
	j.judgeBus(lines, b)
	if b.schedules.made.IsZero() {
		return slices.DeleteFunc(j.v.violations, func(v string) bool { return strings.HasPrefix(v, "schedule ") })
	}
	return j.v.violations
}

func ofGroup(what, group string) func(entry) bool {
	return func(e entry) bool { return e.What == what && e.Bus.Group == group }
}

func TestJudgeBus_WhatMayHappen_IsNoViolation(t *testing.T) {
	created, followed := busLine{Type: orderCreated, Key: "k"}, busLine{Type: orderFollowed, Key: "k", Of: "a"}
	for name, s := range map[string]*story{
		"handled":                        new(story).event(0, "a", busLine{Type: orderPaid}),
		"of no group but one":            new(story).event(0, "a", busLine{Type: noted}),
		"a probe":                        new(story).event(0, "a", busLine{Type: probed}),
		"unknown outcome, and not there": new(story).busLine(0, sending, "a", busLine{Type: noted, Batch: "b", Order: true}),
		"unknown outcome, and there":     new(story).event(0, "a", busLine{Type: noted}).drop(func(e entry) bool { return e.What == sent }),
		"rolled back":                    new(story).busLine(0, sending, "a", busLine{Type: noted, Batch: "b", Order: true}).busLine(5, revoked, "a", busLine{}),
		"with its order":                 new(story).event(0, "a", busLine{Type: noted, Batch: "b", Order: true}).changeBus(func(h *busHeld) { h.orders = []string{"b"} }),
		"emitted again, and not twice":   new(story).event(0, "a", busLine{Type: noted}).busLine(50, sending, "a", busLine{Type: noted}).line(60, sent, entry{Key: "a", ID: 7, Duplicate: true, Bus: &busLine{}}),
		"failed, and handled again": new(story).event(0, "a", busLine{Type: orderPaid}).handled(8, txGroup, "a", "r1", failing).
			handled(9, plainGroup, "a", "r2", "").handled(90, plainGroup, "a", "r3", done),
		"two of a key, one after the other":  new(story).event(0, "a", busLine{Type: orderPaid, Key: "k"}).event(50, "b", busLine{Type: orderPaid, Key: "k"}),
		"two of a key, emitted at one time":  new(story).event(50, "b", busLine{Type: orderPaid, Key: "k"}).event(0, "a", busLine{Type: orderPaid, Key: "k"}).unordered(),
		"followed by what its handler emits": new(story).event(0, "a", created).busLine(15, sending, "of a", followed).logged("of a", followed).handled(40, plainGroup, "of a", "1", done).handled(40, txGroup, "of a", "2", done).handled(40, pickyGroup, "of a", "3", done),
		"refused once":                       new(story).refused("a", refuseOnce, done),
		"refused always":                     new(story).refused("a", refuseAlways, refusing),
		"schedules":                          new(story).ticking(0, 1, 10_500, 10_501),
		"late, but not in a calm":            (&story{rounds: []round{{bound: at(30_000), calm: span{at(25_000), at(60_000)}}}}).emitted(0, "a", busLine{Type: probed}).handled(9000, probeGroup, "a", "r", done).probe(),
	} {
		t.Run(name, func(t *testing.T) { assert.Empty(t, s.busViolations()) })
	}
}

// unordered has nobody know in which order events were emitted.
func (s *story) unordered() *story {
	return s.drop(func(e entry) bool { return e.What == sent }).changeBus(func(h *busHeld) { slices.Reverse(h.effects) })
}

func TestJudgeBus_WhatMustNotHappen_IsAViolation(t *testing.T) {
	paid, keyed := busLine{Type: orderPaid}, busLine{Type: orderPaid, Key: "k"}
	batch := func(i int, order bool) busLine {
		return busLine{Type: noted, Batch: "x", Place: i, Order: order, Key: "k"}
	}
	for want, s := range map[string]*story{
		"nobody emitted it":                     new(story).event(0, "a", paid).drop(func(e entry) bool { return e.What == sending || e.What == sent }),
		"in the log, but its transaction":       new(story).event(0, "a", paid).busLine(6, revoked, "a", busLine{}),
		"handled, but its transaction":          new(story).busLine(0, sending, "a", paid).busLine(5, revoked, "a", busLine{}).handled(9, plainGroup, "a", "r", done),
		"and not in the log":                    new(story).event(0, "a", paid).changeBus(func(h *busHeld) { h.log = nil }),
		"is in the log 2 times":                 new(story).event(0, "a", paid).logged("a", paid),
		"and 8 was returned":                    new(story).event(0, "a", paid).changeBus(func(h *busHeld) { h.log[0].id = 7 }).drop(func(e entry) bool { return e.What == sent }).line(5, sent, entry{Key: "a", ID: 8, Bus: &busLine{}}),
		"was emitted as 7 and as 8":             new(story).event(0, "a", paid).line(6, sent, entry{Key: "a", ID: 8, Bus: &busLine{}}),
		"and was emitted with":                  new(story).event(0, "a", keyed).changeBus(func(h *busHeld) { h.log[0].key = "x" }),
		"the transaction that emits it has":     new(story).event(0, "a", busLine{Type: orderFollowed, Of: "b"}),
		"is not in the log":                     new(story).busLine(0, sending, "a", paid).handled(9, plainGroup, "a", "r", done),
		"which does not take it":                new(story).event(0, "a", busLine{Type: noted}).handled(9, txGroup, "a", "r", done),
		"group plain did not get it":            new(story).event(0, "a", paid).drop(func(e entry) bool { return e.Bus.Group == plainGroup }),
		"never came to an end":                  new(story).event(0, "a", paid).drop(ofGroup(done, plainGroup)),
		"came to group plain as 9":              new(story).event(0, "a", paid).line(9, got, entry{Key: "a", ID: 9, Bus: &busLine{Group: plainGroup, Run: "r"}}),
		"took effect 2 times in group tx":       new(story).event(0, "a", paid).handled(50, txGroup, "a", "r", done),
		"took effect 0 times in group picky":    new(story).event(0, "a", paid).changeBus(func(h *busHeld) { h.effects = h.effects[:1] }),
		"took effect 1 times in group picky":    new(story).refused("a", refuseAlways, refusing).changeBus(func(h *busHeld) { h.effects = append(h.effects, busEffect{pickyGroup, "a", "a/1"}) }),
		"which was not about to commit":         new(story).event(0, "a", paid).drop(ofGroup(done, txGroup)),
		"a dead letter of group tx":             new(story).event(0, "a", paid).changeBus(func(h *busHeld) { h.letters = []busLetter{{txGroup, "a", "why"}} }),
		"a dead letter of group picky":          new(story).refused("a", refuseOnce, done).changeBus(func(h *busHeld) { h.letters = []busLetter{{pickyGroup, "a", "why"}} }),
		"there are 0 dead letters":              new(story).refused("a", refuseAlways, refusing).changeBus(func(h *busHeld) { h.letters = nil }),
		"there are 2 dead letters":              new(story).refused("a", refuseAlways, refusing).changeBus(func(h *busHeld) { h.letters = append(h.letters, h.letters[0]) }),
		"to be refused: true; it was redriven":  new(story).refused("a", refuseOnce, done).changeBus(func(h *busHeld) { h.redriven = nil }),
		"to be refused: false; it was redriven": new(story).event(0, "a", paid).changeBus(func(h *busHeld) { h.redriven = []string{"a"} }),
		"1 events of 2 are there":               new(story).event(0, "a", batch(0, false)).busLine(0, sending, "b", batch(1, false)),
		"batch x has 0 rows":                    new(story).event(0, "a", batch(0, true)),
		"batch x has 1 rows":                    new(story).busLine(0, sending, "a", batch(0, true)).changeBus(func(h *busHeld) { h.orders = []string{"x"} }),
		"before event a (order.paid) was handled": new(story).event(0, "a", keyed).event(1, "b", keyed).
			drop(ofGroup(done, plainGroup)).busLine(70, done, "a", busLine{Group: plainGroup, Run: "a/plain"}),
		"and took effect before it":           new(story).event(0, "a", keyed).event(50, "b", keyed).changeBus(func(h *busHeld) { slices.Reverse(h.effects) }),
		"is before it in its batch":           new(story).event(0, "b", batch(1, false)).event(50, "a", batch(0, false)),
		"and after it in group tx":            new(story).event(0, "a", keyed).event(50, "b", keyed).drop(ofGroup(got, plainGroup)).drop(ofGroup(done, plainGroup)).handled(200, plainGroup, "b", "1", done).handled(250, plainGroup, "a", "2", done),
		"whose emit had returned":             new(story).emitted(0, "a", keyed).event(10, "b", keyed).handled(60, txGroup, "a", "1", done).handled(60, pickyGroup, "a", "2", done).handled(60, plainGroup, "a", "3", done),
		"by a handler that nobody":            new(story).event(0, "a", paid).busLine(40, done, "a", busLine{Group: txGroup, Run: "x"}),
		"left out what is between":            new(story).ticking(0, 1, 10_500, 10_501, 6000),
		"began only at":                       new(story).ticking(0, 1, 10_500, 10_501, 1000),
		"at Jan  1 00:00:06.000000 twice":     new(story).ticking(0, 1, 10_500, 10_501).tick("every", 6000),
		"emitted nothing from":                new(story).ticking(0, 1, 10_500, 10_501, 9000, 10_000),
		"and had been paused":                 new(story).ticking(0, 1, 10_500, 10_501).tick("every", 11_000),
		"emitted 500ms after":                 new(story).ticking(0, 1, 10_500, 10_501).tick("every", 6500),
		"is lost: group tx did not get it":    new(story).ticking(0, 1, 10_500, 10_501).drop(func(e entry) bool { return e.Key == tickName("every", at(4000)) && e.Bus.Group == txGroup }),
		"came to group probes in p only 1.5s": (&story{rounds: []round{{bound: at(0), calm: span{at(0), at(9000)}}}}).emitted(0, "a", busLine{Type: probed}).handled(1505, probeGroup, "a", "r", done).probe(),
		"came to group tx in p only 5.1s":     (&story{rounds: []round{{bound: at(0), calm: span{at(0), at(9000)}}}}).ticking(0, 1, 10_500, 10_501).handledLate(),
	} {
		t.Run(want, func(t *testing.T) {
			found := s.busViolations()
			assert.True(t, slices.ContainsFunc(found, func(v string) bool { return strings.Contains(v, want) }), "%q", found)
		})
	}
}

// probe has what is emitted be probes.
func (s *story) probe() *story {
	for i := range s.lines {
		s.lines[i].Do = doProbe
	}
	return s
}

// handledLate has an occurrence come late to a group.
func (s *story) handledLate() *story {
	name := tickName("every", at(2000))
	s.drop(func(e entry) bool { return e.Key == name && e.Bus.Group == txGroup })
	return s.handled(7100, txGroup, name, name+"/"+txGroup, done)
}

func TestJudgeBus_SlownessOfTheMachine_IsAdded(t *testing.T) {
	s := (&story{rounds: []round{{bound: at(0), calm: span{at(0), at(9000)}}}}).ticking(0, 1, 10_500, 10_501).emitted(0, "a", busLine{Type: probed}).
		handled(1505, probeGroup, "a", "r", done).probe()
	c := &chaos{stalls: []span{{at(300), at(1200)}}}
	v := c.judge(s.lines, s.tables, s.rounds)
	assert.Empty(t, v.violations)
	assert.Contains(t, fmt.Sprint(&v.bus), "event bus:")
}
