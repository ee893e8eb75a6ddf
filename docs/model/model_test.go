package model

import (
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: does the protocol keep its promise, in each of the sizes and variants?

// alike returns nodes with one lane each.
func alike(n, dispatchers int) (nodes []Node) {
	for range n {
		nodes = append(nodes, Node{{TagA, dispatchers}})
	}
	return nodes
}

func producers(tags ...Tags) (all []Producer) {
	for _, tag := range tags {
		all = append(all, Producer{Tag: tag})
	}
	return all
}

var (
	one   = producers(TagA)
	two   = producers(TagA, TagA)
	three = producers(TagA, TagA, TagA)
	mixed = producers(TagA, TagB)
	old   = []Producer{{Tag: TagA, OldSnapshot: true}, {Tag: TagA}}
	quiet = []Producer{{Tag: TagA, Coalesced: true}, {Tag: TagA}}

	crowded = []Node{{{TagA, 2}}, {{TagA, 1}}}
)

// How long an exploration takes: those that take over a second are left out with -short and under the race detector,
// which has nothing to find here.
type length int

const (
	quick length = iota
	long
	full // with PGWAKE_MODEL=full: minutes to hours, and up to 2 GB
)

// A configuration is named nodes x dispatchers of each x producers. A transaction that stays open is in all of
// them: no step of a producer is owed.
var sizes = []struct {
	cfg    Config
	states int // exactly so many: whoever changes the protocol says so here
	length length
}{
	{cfg: Config{Name: "1x1x1", Nodes: alike(1, 1), Producers: one}, states: 95},
	{cfg: Config{Name: "1x2x3", Nodes: alike(1, 2), Producers: three}, states: 145_544},
	{cfg: Config{Name: "2x1x2", Nodes: alike(2, 1), Producers: two}, states: 736_644, length: long},
	{cfg: Config{Name: "2x1x3", Nodes: alike(2, 1), Producers: three}, states: 8_656_354, length: long},
	{cfg: Config{Name: "2x1x3, fanout 2", Nodes: alike(2, 1), Producers: three, Fanout: 2}, states: 8_457_674, length: full},

	{cfg: Config{Name: "1x2x2, waits time out", Nodes: alike(1, 2), Producers: two, TimeOuts: true}, states: 40_608},
	{cfg: Config{Name: "2x1x1, waits time out", Nodes: alike(2, 1), Producers: one, TimeOuts: true}, states: 38_990},
	{cfg: Config{Name: "2x1x2, waits time out, from parked", Nodes: alike(2, 1), Producers: two, TimeOuts: true, Parked: true, NoRollback: true}, states: 407_324, length: long},
	{cfg: Config{Name: "2 and 1 x0, after a bounce, waits time out", Nodes: crowded, TimeOuts: true, Parked: true, Bounced: 2}, states: 586_156, length: long},
	{cfg: Config{Name: "2x1x2, waits time out", Nodes: alike(2, 1), Producers: two, TimeOuts: true}, states: 1_975_286, length: long},

	{cfg: Config{Name: "1x2x2, absences", Nodes: alike(1, 2), Producers: two, Absences: true}, states: 23_574},
	{cfg: Config{Name: "2x1x1, absences, waits time out", Nodes: alike(2, 1), Producers: one, Absences: true, TimeOuts: true}, states: 1_084_092, length: long},
	{cfg: Config{Name: "2x1x2, absences", Nodes: alike(2, 1), Producers: two, Absences: true}, states: 981_420, length: long},

	{cfg: Config{Name: "1x2x2, one not READ COMMITTED", Nodes: alike(1, 2), Producers: old}, states: 26_227},
	{cfg: Config{Name: "2x1x2, one not READ COMMITTED", Nodes: alike(2, 1), Producers: old}, states: 929_385, length: long},

	{cfg: Config{Name: "1x2x2, one by the coalescer", Nodes: alike(1, 2), Producers: quiet}, states: 35_412},
	{cfg: Config{Name: "2x1x2, one by the coalescer", Nodes: alike(2, 1), Producers: quiet}, states: 1_014_506, length: long},
	{cfg: Config{Name: "3x1x2, one by the coalescer, a node leaves, from parked", Nodes: alike(3, 1), Producers: quiet, Leaves: 1, Parked: true, NoRollback: true}, states: 3_721_646, length: full},

	{cfg: Config{Name: "1 node with lanes a and b x2", Nodes: []Node{{{TagA, 1}, {TagB, 1}}}, Producers: mixed}, states: 18_741},
	{cfg: Config{Name: "1 node with lanes a and ab x2", Nodes: []Node{{{TagA, 1}, {TagA | TagB, 1}}}, Producers: mixed}, states: 556_144, length: long},
	{cfg: Config{Name: "nodes for a and for ab x2", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed}, states: 410_839, length: long},

	{cfg: Config{Name: "1x2x2, a fetch fails", Nodes: alike(1, 2), Producers: two, Faults: 1}, states: 239_297},
	{cfg: Config{Name: "2x1x1, a fetch fails", Nodes: alike(2, 1), Producers: one, Faults: 1}, states: 755_647, length: long},
	{cfg: Config{Name: "2x1x2, a fetch fails", Nodes: alike(2, 1), Producers: two, Faults: 1}, length: full},

	{cfg: Config{Name: "2x1x1, a node leaves", Nodes: alike(2, 1), Producers: one, Leaves: 1}, states: 36_630},
	{cfg: Config{Name: "2x1x2, a node leaves", Nodes: alike(2, 1), Producers: two, Leaves: 1}, states: 3_283_766, length: long},
	{cfg: Config{Name: "3x1x1, two nodes leave, from parked", Nodes: alike(3, 1), Producers: one, Leaves: 2, Parked: true}, states: 153_206},
	{cfg: Config{Name: "3x1x2, a node leaves, from parked", Nodes: alike(3, 1), Producers: two, Leaves: 1, Parked: true, NoRollback: true}, states: 6_969_193, length: full},

	{cfg: Config{Name: "2x1x2, a node dies", Nodes: alike(2, 1), Producers: two, Deaths: 1}, states: 838_361, length: long},
	{cfg: Config{Name: "3x1x1, two nodes die, from parked", Nodes: alike(3, 1), Producers: one, Deaths: 2, Parked: true}, states: 3_487},
	{cfg: Config{Name: "2x1x1, leaving, dying, failing, from parked", Nodes: alike(2, 1), Producers: one, Leaves: 1, Deaths: 1, Faults: 1, TimeOuts: true, Parked: true}, states: 5_780_285, length: full},
	{cfg: Config{Name: "nodes for a and for ab x2, a node leaves, from parked", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed, Leaves: 1, Parked: true}, states: 50_871},
	{cfg: Config{Name: "3x1x2, a node dies, from parked", Nodes: alike(3, 1), Producers: two, Deaths: 1, Parked: true, NoRollback: true}, states: 492_915, length: long},

	// Too many states to keep within 2 GB: it is sketched.
	{cfg: Config{Name: "2x2x2", Nodes: alike(2, 2), Producers: two}, length: full},
}

// maxStates is what fits into 2 GB. Of what has more, a sketch of so many slots does.
const (
	maxStates = 45_000_000
	slots     = 1 << 28
)

func TestPromise_AllInterleavings(t *testing.T) {
	for _, size := range sizes {
		t.Run(size.cfg.Name, func(t *testing.T) {
			skip(t, size.length)
			r := exploreAll(t, size.cfg)
			require.Equal(t, Nothing, r.Fault, "\n"+strings.Join(r.Trace, "\n"))
			if size.states != 0 {
				require.Equal(t, size.states, r.States)
			}
		})
	}
}

func skip(t *testing.T, l length) {
	if l == full && os.Getenv("PGWAKE_MODEL") != "full" {
		t.Skip("takes minutes to hours; PGWAKE_MODEL=full runs it")
	}
	if l == long && (testing.Short() || raceEnabled) {
		t.Skip("takes longer than a second, and ten times as long under the race detector, for nothing: it is one goroutine")
	}
}

func exploreAll(t *testing.T, cfg Config) Result {
	t.Helper()
	began := time.Now()
	r, err := Explore(cfg, maxStates)
	if errors.Is(err, ErrTooLarge) {
		t.Logf("more than %d states: a sketch must do", maxStates)
		r, err = Sketch(cfg, slots, func(r Result) {
			t.Logf("depth %d: %d states, %v", r.Depth, r.States, time.Since(began).Round(time.Second))
		})
	}
	require.NoError(t, err)
	t.Logf("%d states, %d steps, depth %d, %v", r.States, r.Steps, r.Depth, time.Since(began).Round(time.Millisecond))
	return r
}

// Steps that Explore takes as one are taken one by one.
func TestPromise_NoStepsMerged(t *testing.T) {
	for i, cfg := range []Config{
		{Name: "1x2x2", Nodes: alike(1, 2), Producers: two, Split: true},
		{Name: "2x1x1", Nodes: alike(2, 1), Producers: one, Split: true},
		{Name: "2x1x2", Nodes: alike(2, 1), Producers: two, Split: true},
		{Name: "lanes a and ab", Nodes: []Node{{{TagA, 1}, {TagA | TagB, 1}}}, Producers: mixed, Split: true},
	} {
		t.Run(cfg.Name, func(t *testing.T) {
			if i > 1 {
				skip(t, long)
			}
			r := exploreAll(t, cfg)
			require.Equal(t, Nothing, r.Fault, "\n"+strings.Join(r.Trace, "\n"))
		})
	}
}

// A sketch of a space that fits has as many states as the space.
func TestSketch_SmallSpace_MissesNothing(t *testing.T) {
	cfg := Config{Nodes: alike(2, 1), Producers: one, TimeOuts: true}
	r, err := Explore(cfg, 0)
	require.NoError(t, err)
	sketch, err := Sketch(cfg, 1<<16, func(Result) {})
	require.NoError(t, err)
	require.Equal(t, r.States, sketch.States)
}

func TestTransitions_EachIsReachedAndImplemented(t *testing.T) {
	var taken [transitionCount]int
	for _, cfg := range []Config{
		{Nodes: alike(1, 2), Producers: two, TimeOuts: true},
		{Nodes: alike(2, 1), Producers: one, Leaves: 1, Deaths: 1, Faults: 1, Parked: true},
		{Nodes: alike(1, 1), Producers: one, Without: FreshRead},
		{Nodes: alike(1, 1), Producers: quiet},
	} {
		r, err := Explore(cfg, 0)
		require.NoError(t, err)
		for what, n := range r.Taken {
			taken[what] += n
		}
	}
	for what := range Transition(transitionCount) {
		require.NotZero(t, taken[what], "%v is never taken", what)
		require.NotEmpty(t, Implementation[what], "what implements %v?", what)
	}
	require.Len(t, Implementation, transitionCount)
}

// What is kept of a state is the whole of it, and the same for all that it stands for.
func TestEncode_RandomWalks_RoundTrip(t *testing.T) {
	for seed, cfg := range []Config{
		{Nodes: alike(2, 2), Producers: three, Leaves: 1, Deaths: 1, Faults: 2, TimeOuts: true},
		{Nodes: alike(3, 1), Producers: mixed, Leaves: 1, Deaths: 1, Faults: 1},
		{Nodes: []Node{{{TagA, 1}, {TagB, 1}}, {{TagA, 1}, {TagB, 1}}}, Producers: mixed, Leaves: 1, Faults: 1},
		{Nodes: alike(2, 1), Producers: old, Without: OldSnapshotTellsAll},
	} {
		random := rand.New(rand.NewPCG(1, uint64(seed)))
		m := newMachine(cfg)
		c := newCodec(m)
		for range 200 {
			s := m.initial()
			for range 60 {
				e := c.encode(&s)
				for p := range c.perms {
					exchanged := c.decode(c.write(&s, &c.perms[p]))
					require.Equal(t, e, c.encode(&exchanged), "%+v", s)
				}
				for _, unused := range e[c.words:] {
					require.Zero(t, unused)
				}
				steps := m.successors(&s)
				if len(steps) == 0 {
					break
				}
				s = steps[random.IntN(len(steps))].after
			}
		}
	}
}
