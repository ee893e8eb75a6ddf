package model

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: is what covered.go leaves out really not needed?

// Every covered state of a search that leaves out nothing, and each of its steps, is what covered.go says that it is. It
// leads to none that is not covered, and strands nothing; its steps are those of one part, and a surprise at most to the
// others; and no owed step adds to what there is to be done.
func TestCovered_FullSearch_IsMadeOfParts(t *testing.T) {
	skip(t, long)
	for _, cfg := range []Config{
		{Name: "2x1x1", Nodes: alike(2, 1), Producers: one},
		{Name: "2x1x2, from parked, waits time out", Nodes: alike(2, 1), Producers: two, Parked: true, TimeOuts: true, StayArmed: true},
		{Name: "2x1x2, from parked", Nodes: alike(2, 1), Producers: two, Parked: true, NoRollback: true},
		{Name: "3x1, 3 items at once, from parked", Nodes: alike(3, 1), Producers: []Producer{{Tag: TagA, Items: 3}}, Parked: true, StayArmed: true},
		{Name: "2 and 1, 3 items at once, from parked", Nodes: crowded, Producers: []Producer{{Tag: TagA, Items: 3}}, Parked: true},
		{Name: "2x1x2, absences, from parked", Nodes: alike(2, 1), Producers: two, Absences: true, Parked: true, NoRollback: true},
		{Name: "2x1x2, one by the coalescer, from parked", Nodes: alike(2, 1), Producers: quiet, Parked: true, NoRollback: true},
		{Name: "2x1x1, long waits, from parked", Nodes: alike(2, 1), Producers: one, Patience: true, Parked: true, RetriesStaySole: true},
		{Name: "2x1x1, one stands by, waits time out", Nodes: alike(2, 1), Producers: one, Fanout: 2, TimeOuts: true, Parked: true, StayArmed: true},
		{Name: "nodes for a and for ab x2, from parked", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed, Parked: true, NoRollback: true},
		{Name: "nodes with lanes a and b, and for ab x2, from parked", Nodes: []Node{{{TagA, 1}, {TagB, 1}}, {{TagA | TagB, 1}}}, Producers: mixed, Parked: true, NoRollback: true, StayArmed: true},
	} {
		t.Run(cfg.Name, func(t *testing.T) {
			skipUnless(t, cfg)
			p := &partChecker{t: t, m: newMachine(cfg), steps: make(map[encoded]map[partEdge]bool)}
			p.c = newCodec(p.m)
			p.run()
		})
	}
}

// skipUnless leaves the larger ones to those who have the time.
func skipUnless(t *testing.T, cfg Config) {
	if cfg.Name != "2x1x2, from parked" && cfg.Name != "2x1x1, long waits, from parked" {
		skip(t, long)
	}
}

type partChecker struct {
	t     *testing.T
	m     *machine
	c     *codec
	steps map[encoded]map[partEdge]bool // by part: where it goes, and whether that is owed
}

func (p *partChecker) run() {
	states := newSpace(p.c.words)
	start := p.m.initial()
	states.add(p.c.encode(&start), 0)
	covered := 0
	for at := 0; at < states.len(); at++ {
		s := p.c.decode(states.at(at))
		is := p.m.covered(&s)
		if is {
			covered++
		}
		quiet := true
		for _, step := range slices.Clone(p.m.successors(&s)) {
			quiet = quiet && !step.owed
			states.add(p.c.encode(&step.after), at)
			if is {
				p.check(&s, &step)
			}
		}
		require.False(p.t, is && quiet && s.due != [tagCount]uint8{}, "nobody is on the way: %s", p.m.summary(&s))
	}
	p.t.Logf("%d of %d states are covered; %d parts of theirs", covered, states.len(), len(p.steps))
	require.NotZero(p.t, covered)
}

// check: a step of a covered state.
func (p *partChecker) check(s *state, step *step) {
	require.True(p.t, p.m.covered(&step.after), "%v leads out of %s", step.what, p.m.summary(s))
	mover := int(strings.TrimPrefix(p.m.actor(step), "node ")[0] - 'A')
	before, after := p.m.weight(s), p.m.weight(&step.after)
	if step.owed {
		require.LessOrEqual(p.t, after, before, "%v of %s", step.what, p.m.summary(s))
	}
	if step.owed && (isBounce(step.what) || step.what == NotificationArrives || p.m.lockedTags(s, -1) != p.m.lockedTags(&step.after, -1) || s.due != step.after.due) {
		require.Less(p.t, after, before, "%v of %s", step.what, p.m.summary(s))
	}
	for n := range p.m.cfg.Nodes {
		from, to := p.encode(s, n), p.encode(&step.after, n)
		if n != mover && from == to {
			continue
		}
		owed := n == mover && step.owed && step.what != NotificationArrives
		require.True(p.t, p.from(from)[partEdge{to, owed}], "%v in node %d: %s is no step of its part: %s", step.what, n, p.m.describe(s, step), p.m.summary(s))
	}
}

func (p *partChecker) encode(s *state, n int) encoded {
	part := p.m.part(s, n)
	return p.c.encode(&part)
}

// partEdge is where a step leads, and whether it is owed.
type partEdge struct {
	to   encoded
	owed bool
}

// from returns the steps of a part.
func (p *partChecker) from(e encoded) map[partEdge]bool {
	if known := p.steps[e]; known != nil {
		return known
	}
	part := p.c.decode(e)
	steps, proved := p.m.partSteps(&part)
	require.True(p.t, proved, "a step of %s weighs too much", p.m.summary(&part))
	next := make(map[partEdge]bool)
	for i := range steps {
		next[partEdge{p.c.encode(&steps[i].after), steps[i].owed}] = true
	}
	p.steps[e] = next
	return next
}

// A search of parts says the same as one of the whole, of each configuration that is small enough, with each rule taken
// away in turn.
func TestCovered_SearchByParts_SameVerdict(t *testing.T) {
	skip(t, long)
	for _, cfg := range []Config{
		{Name: "2x1x1, from parked, waits time out", Nodes: alike(2, 1), Producers: one, Parked: true, TimeOuts: true, NoRollback: true, StayArmed: true},
		{Name: "2x1, 2 items at once, from parked", Nodes: alike(2, 1), Producers: batch, Parked: true, NoRollback: true},
		{Name: "2x1x2, from parked, stays armed", Nodes: alike(2, 1), Producers: two, Parked: true, NoRollback: true, StayArmed: true},
	} {
		for rule := Rule(1); rule <= allRules; rule <<= 1 {
			cfg.Without, cfg.Whole = rule, false
			parts, err := Explore(cfg, 0)
			require.NoError(t, err)
			cfg.Whole = true
			whole, err := Explore(cfg, 0)
			require.NoError(t, err)
			require.Equal(t, whole.Fault, parts.Fault, "%s without rule %b", cfg.Name, rule)
			require.GreaterOrEqual(t, len(parts.Trace), len(whole.Trace), "the whole is searched for the shortest")
		}
	}
}
