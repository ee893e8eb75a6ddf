package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// start is when the stories below begin, and at is so many ms later.
var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

// story is what the ledgers and the tables say. Its line adds a line of process "p".
type story struct {
	lines   []entry
	tables  tables
	crashes []span
	rounds  []round
}

func (s *story) line(ms int, what string, e entry) *story {
	e.At, e.What, e.process = at(ms), what, "p"
	s.lines = append(s.lines, e)
	return s
}

// item is a work item that is sent, and delivered under token t1.
func (s *story) item(key, do string) *story {
	s.line(0, sending, entry{Key: key, Do: do}).line(10, sent, entry{Key: key, ID: 1, Due: at(5)})
	return s.claimed(20, key, "t1")
}

// claimed is a delivery at that time.
func (s *story) claimed(ms int, key, token string) *story {
	return s.line(ms, got, entry{Key: key, ID: 1, Token: token, Until: at(ms).Add(lease)})
}

// ends is what a process tries with a claim, and what comes of it.
func (s *story) ends(ms int, key, token, tried, outcome string) *story {
	s.line(ms, tried, entry{Key: key, Token: token})
	if outcome != "" {
		s.line(ms+10, outcome, entry{Key: key, Token: token})
	}
	return s
}

// message is a message that was sent and is in the history by its turn.
func (s *story) message(ms int, key string, id int64, token string) *story {
	s.line(ms, sending, entry{Key: key, Do: doTurn, Instance: "i"}).line(ms+5, sent, entry{Key: key, ID: id, Due: at(ms)})
	s.line(ms+500, got, entry{Key: key, ID: id, Token: token, Until: at(ms + 500).Add(lease)})
	s.ends(ms+510, key, token, acking, acked)
	s.tables.history = append(s.tables.history, event{"i", remembered{Key: key, ID: id, Token: token}})
	return s
}

func (s *story) violations() []string {
	c := &chaos{crashes: s.crashes}
	return c.judge(s.lines, s.tables, s.rounds).violations
}

func TestJudge_WhatMayHappen_IsNoViolation(t *testing.T) {
	effects := tables{effects: []effect{{"a", "t1"}}}
	for name, s := range map[string]*story{
		"acknowledged": new(story).item("a", doAck).ends(30, "a", "t1", acking, acked),
		"delivered again after the lease": new(story).item("a", doAck).
			claimed(2100, "a", "t2").ends(2200, "a", "t2", acking, acked).ends(2300, "a", "t1", acking, refused),
		"given back and delivered again": new(story).item("a", doAck).ends(30, "a", "t1", returning, returned).
			claimed(50, "a", "t2").ends(60, "a", "t2", acking, acked),
		"the process died at the ack":   new(story).item("a", doAck).ends(30, "a", "t1", acking, ""),
		"unknown outcome, and not sent": new(story).line(0, sending, entry{Key: "a", Do: doEffect}),
		"rolled back":                   new(story).line(0, sending, entry{Key: "a"}).line(1, revoked, entry{Key: "a"}),
		"a crash took the claim back":   (&story{crashes: []span{{at(100), at(200)}}}).item("a", doAck).claimed(300, "a", "t2").ends(400, "a", "t1", acking, refused).ends(500, "a", "t2", acking, acked),
		"effect":                        (&story{tables: effects}).item("a", doEffect).ends(30, "a", "t1", acking, acked),
		"acknowledged late, with a lease that was renewed": new(story).item("a", doAck).
			line(1000, renewed, entry{Key: "a", Token: "t1", Until: at(3000)}).ends(2100, "a", "t1", acking, acked),
		"effect by an ack of unknown outcome":         (&story{tables: effects}).item("a", doEffect).ends(30, "a", "t1", acking, ""),
		"two messages in order":                       new(story).message(0, "a", 1, "t1").message(600, "b", 2, "t2"),
		"two messages at the same time, out of order": new(story).message(0, "a", 2, "t1").message(3, "b", 1, "t2"),
		"waited, but for something that went wrong": (&story{rounds: []round{{bound: at(30_000), calm: span{at(25_000), at(32_000)}}}}).
			line(0, sending, entry{Key: "a", Do: doProbe}).line(10, sent, entry{Key: "a", Due: at(5)}).
			claimed(30_500, "a", "t1").ends(30_600, "a", "t1", acking, acked),
	} {
		t.Run(name, func(t *testing.T) { assert.Empty(t, s.violations()) })
	}
}

func TestJudge_WhatMustNotHappen_IsAViolation(t *testing.T) {
	twice := tables{effects: []effect{{"a", "t1"}, {"a", "t1"}}}
	for want, s := range map[string]*story{
		"is lost: sent at": new(story).line(0, sending, entry{Key: "a"}).line(1, sent, entry{Key: "a", ID: 1}),
		"is lost: delivered 1 times, and gone without an ack": new(story).item("a", doAck).ends(2100, "a", "t1", acking, refused),
		"its transaction had been rolled back": new(story).line(0, sending, entry{Key: "a"}).line(1, revoked, entry{Key: "a"}).
			claimed(20, "a", "t1").ends(30, "a", "t1", acking, acked),
		"which nobody sent":                    new(story).claimed(20, "a", "t1"),
		"exists a second time":                 new(story).item("a", doAck).line(30, got, entry{Key: "a", ID: 2, Token: "t2"}).ends(40, "a", "t1", acking, acked),
		"handed out twice":                     new(story).item("a", doAck).claimed(30, "a", "t1").ends(40, "a", "t1", acking, acked),
		"before the lease of":                  new(story).item("a", doAck).claimed(1900, "a", "t2").ends(2000, "a", "t2", acking, acked),
		"was acknowledged twice":               new(story).item("a", doAck).ends(30, "a", "t1", acking, acked).claimed(2100, "a", "t2").ends(2200, "a", "t2", acking, acked),
		"but it was claimed again":             new(story).item("a", doAck).claimed(2100, "a", "t2").ends(2200, "a", "t1", acking, acked),
		"before its lease ended":               new(story).item("a", doAck).ends(1000, "a", "t1", acking, refused).claimed(2100, "a", "t2").ends(2200, "a", "t2", acking, acked),
		"accepted after its lease":             new(story).item("a", doAck).ends(2100, "a", "t1", acking, acked),
		"which was tried 80ms after its lease": (&story{tables: tables{effects: []effect{{"a", "t1"}}}}).item("a", doEffect).ends(2100, "a", "t1", acking, ""),
		"took effect 2 times":                  (&story{tables: twice}).item("a", doEffect).ends(30, "a", "t1", acking, acked),
		"gone without its effect":              new(story).item("a", doEffect).ends(30, "a", "t1", acking, acked),
		`whose outcome was "refused"`: (&story{tables: tables{effects: []effect{{"a", "t1"}}}}).item("a", doEffect).
			ends(2100, "a", "t1", acking, refused).claimed(2200, "a", "t2").ends(2300, "a", "t2", acking, acked),
		"what was to send it took no effect": new(story).message(0, "a", 1, "t1").item("a.out", doReply).ends(30, "a.out", "t1", acking, acked).
			item("b", doAck).ends(2100, "b", "t1", acking, refused).claimed(2200, "b", "t2").ends(2300, "b", "t2", returning, returned).
			message(3000, "b.done", 7, "t3"),
		"gone without its reply": new(story).message(0, "a", 1, "t1").item("a.out", doReply).ends(30, "a.out", "t1", acking, ""),
		"comes before":           new(story).message(600, "b", 2, "t2").message(0, "a", 1, "t1"),
		"comes after":            new(story).message(0, "a", 2, "t1").message(0, "b", 1, "t1"),
		"after all must have recovered": (&story{rounds: []round{{bound: at(6000), calm: span{at(1000), at(8000)}}}}).
			line(0, sending, entry{Key: "a", Do: doProbe}).line(10, sent, entry{Key: "a", ID: 1, Due: at(5)}).
			claimed(7100, "a", "t1").ends(7200, "a", "t1", acking, acked),
		"refused as a duplicate of nothing": new(story).line(0, sending, entry{Key: "a", Dedup: "d"}).line(10, sent, entry{Key: "a", Duplicate: true}),
		"was delivered, but its enqueue had reported a duplicate": new(story).item("o", doAck).
			line(0, sending, entry{Key: "a", Dedup: "d"}).line(10, sent, entry{Key: "a", Duplicate: true}).claimed(20, "a", "t1").ends(30, "a", "t1", acking, acked),
		"with its dedup key was queued": new(story).line(0, sending, entry{Key: "o", Dedup: "d"}).line(10, sent, entry{Key: "o"}).
			line(20, sending, entry{Key: "a", Dedup: "d"}).line(30, sent, entry{Key: "a"}).
			claimed(40, "o", "t1").ends(50, "o", "t1", acking, acked).claimed(40, "a", "t2").ends(50, "a", "t2", acking, acked),
		"p: something": new(story).line(0, wrong, entry{Err: "something"}),
	} {
		t.Run(want, func(t *testing.T) {
			found := s.violations()
			assert.True(t, slices.ContainsFunc(found, func(v string) bool { return strings.Contains(v, want) }), "%q", found)
		})
	}
}

// calmly is a story without faults.
func calmly() *story { return &story{rounds: []round{{bound: at(0), calm: span{at(0), at(60_000)}}}} }

// A calm of a run is long enough for whatever is late in it to be noticed.
func TestJudge_LateInACalmOfARun_IsAViolation(t *testing.T) {
	bound := at(20_000)
	for do, patience := range map[string]time.Duration{doProbe: probePatience, doAck: leasesPatience, doEffect: leasesPatience} {
		waited := func(inHand time.Time) []string {
			s := &story{rounds: []round{{bound: bound, calm: span{at(10_000), bound.Add(calmLength)}}}}
			ms := int(inHand.Sub(at(0)).Milliseconds())
			s.line(0, sending, entry{Key: "a", Do: do}).line(10, sent, entry{Key: "a", ID: 1, Due: at(12_000)}).claimed(ms, "a", "t1")
			s.tables.effects = []effect{{"a", "t1"}}
			return s.ends(ms+10, "a", "t1", acking, acked).violations()
		}
		assert.NotContains(t, fmt.Sprint(waited(bound.Add(patience))), "after all must have recovered", do)
		assert.Contains(t, fmt.Sprint(waited(bound.Add(patience+time.Millisecond))), "after all must have recovered", do)
	}
}

// again is a second delivery, which ends it.
func (s *story) again(ms int) *story {
	return s.claimed(ms, "a", "t2").ends(ms+10, "a", "t2", acking, acked)
}

func TestJudge_DueAgain_IsInHandInTime(t *testing.T) {
	given := func() *story {
		return calmly().item("a", doAck).line(30, returning, entry{Key: "a", Token: "t1", Delay: 300 * time.Millisecond})
	}
	renewedOnce := func() *story {
		return calmly().item("a", doAck).line(1000, renewed, entry{Key: "a", Token: "t1", Until: at(3000)})
	}
	probeHeld := func() *story {
		return calmly().line(0, sending, entry{Key: "a", Do: doProbe}).line(10, sent, entry{Key: "a", ID: 1, Due: at(5)}).claimed(20, "a", "t1")
	}
	for name, c := range map[string]struct {
		due, patience int // ms
		held          func() *story
	}{
		"given back":                            {340, 5000, func() *story { return given().line(40, returned, entry{Key: "a", Token: "t1"}) }},
		"given back, and nobody knows":          {2320, 5000, given},
		"its process is gone":                   {2020, 5000, func() *story { return calmly().item("a", doAck) }},
		"renewed":                               {3000, 5000, renewedOnce},
		"its enqueue is of unknown outcome":     {2020, 5000, func() *story { return calmly().item("a", doAck).drop(func(e entry) bool { return e.What == sent }) }},
		"a probe whose process is gone":         {2020, 1000, probeHeld},
		"refused, since somebody took the item": {2020, 5000, func() *story { return calmly().item("a", doAck).ends(2030, "a", "t1", acking, refused) }},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Empty(t, c.held().again(c.due+c.patience).violations())
			late := c.held().again(c.due + c.patience + 1)
			found := late.violations()
			require.Len(t, found, 1)
			assert.Contains(t, found[0], "due at "+at(c.due).Format(time.StampMilli)+", was in hand in p (delivery 2) only")
			late.rounds[0].calm.to = at(c.due + c.patience)
			assert.Empty(t, late.violations(), "it was late, but not within a calm")
		})
	}
}

func TestJudge_CallFails_IsAViolationInACalm(t *testing.T) {
	failing := func(since, ms int) *story {
		s := &story{rounds: []round{{bound: at(6000), calm: span{at(1000), at(10_000)}}}}
		return s.line(ms, erred, entry{Since: at(since), Err: "enqueue: no connection"})
	}
	for name, c := range map[string]struct {
		story   *story
		chaos   *chaos
		violate bool
	}{
		"in a calm":                          {failing(6000, 9000), &chaos{}, true},
		"it began before":                    {failing(5999, 9000), &chaos{}, false},
		"others may have brought it about":   {failing(9000, 10_001), &chaos{}, false},
		"as slow as the machine":             {failing(6500, 9600), &chaos{stalls: []span{{at(6600), at(7200)}}}, false},
		"the machine was slow before":        {failing(6500, 9600), &chaos{stalls: []span{{at(5000), at(5900)}}}, true},
		"within the slack":                   {failing(6500, 9600), &chaos{options: options{slack: time.Second}}, false},
		"its connection had lost its peer":   {failing(6500, 9600), &chaos{silences: []silence{{"p", at(500), 1}}}, false},
		"it loses that after the error":      {failing(6500, 9600), &chaos{silences: []silence{{"p", at(9700), 1}}}, true},
		"that of another had lost its peer":  {failing(6500, 9600), &chaos{silences: []silence{{"q", at(500), 1}}}, true},
		"fewer had lost theirs than do fail": {failing(6500, 9600).line(9650, erred, entry{Since: at(6600)}), &chaos{silences: []silence{{"p", at(500), 1}}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			found := c.chaos.judge(c.story.lines, c.story.tables, c.story.rounds).violations
			if !c.violate {
				assert.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			assert.Contains(t, found[0], "p: round 1: a call failed that began")
		})
	}
}

func TestFailed_WhatTheCallerBroughtAbout_IsNoError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.ledger")
	ledger, err := openLedger(path)
	require.NoError(t, err)
	defer ledger.file.Close()
	w := &workload{ledger: ledger}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	<-late.Done()
	call := func(ctx context.Context) calling { return calling{Context: ctx, since: at(0)} }
	lost := &pgwake.Error{Err: errors.New("lost"), Retryable: true}

	w.failed(call(ended), "ack", lost)
	w.failed(fickle(late), "fetch", &pgwake.Error{Err: context.DeadlineExceeded, Retryable: true})
	w.failed(call(t.Context()), "ack", &pgwake.Error{Err: pgwake.ErrLockLost})
	w.failed(call(t.Context()), "ack", &pgwake.Error{Err: pgwake.ErrClosed})
	lines, err := readLedger(nil, path, "p")
	require.NoError(t, err)
	require.Empty(t, lines)

	w.failed(call(t.Context()), "ack", lost)
	w.failed(call(late), "ack", &pgwake.Error{Err: context.DeadlineExceeded, Retryable: true})
	w.failed(fickle(t.Context()), "fetch", &pgwake.Error{Err: context.DeadlineExceeded, Retryable: true})
	w.failed(call(t.Context()), "ack", errors.New("of the pool"))
	w.failed(call(t.Context()), "ack", &pgwake.Error{Err: pgwake.ErrInvalid})
	lines, err = readLedger(nil, path, "p")
	require.NoError(t, err)
	var what []string
	for _, l := range lines {
		what = append(what, l.What)
	}
	assert.Equal(t, []string{erred, erred, erred, erred, wrong}, what)
	assert.Equal(t, at(0), lines[0].Since)
	assert.Contains(t, lines[0].Err, "ack: ")
}

func TestJudge_SlownessOfTheMachine_IsAdded(t *testing.T) {
	s := (&story{rounds: []round{{bound: at(0), calm: span{at(0), at(9000)}}}}).
		line(0, sending, entry{Key: "a", Do: doProbe}).line(10, sent, entry{Key: "a", ID: 1, Due: at(5)}).
		claimed(1500, "a", "t1").ends(1510, "a", "t1", acking, acked)
	require.Len(t, s.violations(), 1)
	c := &chaos{stalls: []span{{at(200), at(900)}}}
	assert.Empty(t, c.judge(s.lines, s.tables, s.rounds).violations)
}
