package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A round whose faults end 10 s after the start, and by 15 s work flows.
func recovering(alone bool, kinds ...string) *story {
	return &story{rounds: []round{{bound: at(15_000), calm: span{at(10_000), at(19_000)}, kinds: kinds, alone: alone}}}
}

func (s *story) probed(key string, due, inHand int) *story {
	s.line(due-5, sending, entry{Key: key, Do: doProbe}).line(due+1, sent, entry{Key: key, ID: 1, Due: at(due)})
	return s.claimed(inHand, key, "t-"+key).ends(inHand+1, key, "t-"+key, acking, acked)
}

// tried are the lines of what a process tries with what it has.
func tried(e entry) bool { return e.What == acking || e.What == acked }

func TestRecovery_IsUntilProbesFlow(t *testing.T) {
	for name, c := range map[string]struct {
		story *story
		want  time.Duration
	}{
		"at once":                      {recovering(true, "reset").probed("a", 9000, 10_020).probed("b", 12_000, 12_030), 30 * time.Millisecond},
		"what waited before the end":   {recovering(true, "reset").probed("a", 2000, 11_500).probed("b", 12_000, 12_030), 1500 * time.Millisecond},
		"what is due again":            {recovering(true, "reset").probed("a", 8000, 8010).drop(tried).claimed(10_700, "a", "t2").ends(10_710, "a", "t2", acking, acked).probed("b", 12_000, 12_030), 700 * time.Millisecond},
		"and at once":                  {recovering(true, "reset").probed("a", 8500, 8510).drop(tried).claimed(10_550, "a", "t2").ends(10_560, "a", "t2", acking, acked).probed("b", 12_000, 12_030), 40 * time.Millisecond},
		"what is sent meanwhile":       {recovering(true, "reset").probed("a", 12_000, 13_000), 3 * time.Second},
		"not what came before the end": {recovering(true, "reset").probed("a", 1000, 9000).probed("b", 12_000, 12_030), 30 * time.Millisecond},
		"nor what is sent after":       {recovering(true, "reset").probed("a", 16_000, 16_900), 0},
	} {
		t.Run(name, func(t *testing.T) {
			v := new(chaos).judge(c.story.lines, c.story.tables, c.story.rounds)
			assert.Empty(t, v.violations)
			assert.Equal(t, map[string]time.Duration{"reset": c.want}, v.recovered)
		})
	}
	many := recovering(false, "reset", "refuse").probed("a", 12_000, 12_030)
	assert.Contains(t, new(chaos).judge(many.lines, many.tables, many.rounds).recovered, mixed)
	assert.Empty(t, new(chaos).judge(nil, tables{}, recovering(true).rounds).recovered, "it was missed")
}

func TestJudge_BoundsThatGrew_AreAddedUp(t *testing.T) {
	grown := []round{{bound: at(5000), grew: time.Second}, {bound: at(25_000), grew: 2 * time.Second}}
	assert.Equal(t, 3*time.Second, new(chaos).judge(nil, tables{}, grown).stalled)
}

func TestJudge_ProcessOpensLate_IsAViolation(t *testing.T) {
	opens := func(ms int) *story {
		return &story{rounds: []round{{bound: at(60_000), calm: span{at(50_000), at(64_000)}, opened: []opening{{"node-1-2", span{at(1000), at(ms)}}}}}}
	}
	assert.Empty(t, opens(21_000).violations())
	late := opens(21_500)
	found := late.violations()
	require.Len(t, found, 1)
	assert.Contains(t, found[0], "round 1: node-1-2 took 20.5s to open")

	stalled := &chaos{stalls: []span{{at(20_000), at(20_600)}}}
	v := stalled.judge(nil, tables{}, late.rounds)
	assert.Empty(t, v.violations)
	assert.Equal(t, 20_500*time.Millisecond, v.opening)
	slow := &chaos{options: options{slack: time.Second}}
	assert.Empty(t, slow.judge(nil, tables{}, late.rounds).violations)
}

func TestProcess_OpenedAfter_CountsFromTheEndOfTheFaults(t *testing.T) {
	p := &process{name: "p", started: at(1000), readyAt: at(3000)}
	_, was := p.openedAfter(at(3500))
	assert.False(t, was)
	o, was := p.openedAfter(at(2000))
	assert.True(t, was)
	assert.Equal(t, opening{"p", span{at(2000), at(3000)}}, o)
	o, _ = p.openedAfter(at(500))
	assert.Equal(t, span{at(1000), at(3000)}, o.took, "it was started later")
}

func TestRecovery_NoProbe_IsAViolation(t *testing.T) {
	const want = "round 1 (reset): no probe was sent in the calm of 9s"
	silent := recovering(true, "reset")
	for name, s := range map[string]*story{
		"none":                   silent,
		"before":                 recovering(true, "reset").probed("a", 9000, 9010),
		"after":                  recovering(true, "reset").probed("a", 20_000, 20_010),
		"of unknown outcome":     recovering(true, "reset").probed("a", 12_000, 12_010).drop(func(e entry) bool { return e.What == sent }),
		"something that is none": recovering(true, "reset").line(12_000, sending, entry{Key: "a"}).line(12_001, revoked, entry{Key: "a"}),
	} {
		t.Run(name, func(t *testing.T) {
			found := s.violations()
			if assert.Len(t, found, 1) {
				assert.Contains(t, found[0], want)
			}
		})
	}
	assert.Empty(t, recovering(true).violations(), "nothing went wrong")
	c := &chaos{options: options{slack: 10 * time.Second}}
	assert.Empty(t, c.judge(nil, tables{}, silent.rounds).violations, "what is late by less does not count")
}

func TestRecovery_LaterThanTheBound_IsAViolation(t *testing.T) {
	s := recovering(true, "reset").probed("a", 12_000, 15_200)
	found := s.violations()
	assert.Len(t, found, 1)
	assert.Contains(t, found[0], "round 1 (reset): work flowed again only 5.2s after the faults, and 5s is the bound")

	s.rounds[0].bound = at(15_300)
	c := &chaos{stalls: []span{{at(13_000), at(13_300)}}}
	assert.Empty(t, c.judge(s.lines, s.tables, s.rounds).violations, "the machine stalled")
}
