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
	full // with PGWAKE_MODEL=full: minutes to hours, and up to 3 GB
)

// A configuration is named nodes x dispatchers of each x producers. A transaction that stays open is in all of
// them: no step of a producer is owed.
var sizes = []struct {
	cfg    Config
	states int // exactly so many: whoever changes the protocol says so here
	length length
}{
	{cfg: Config{Name: "1x1x1", Nodes: alike(1, 1), Producers: one}, states: 505},
	{cfg: Config{Name: "1x2x2", Nodes: alike(1, 2), Producers: two}, states: 162_856},
	{cfg: Config{Name: "1x2x3", Nodes: alike(1, 2), Producers: three}, states: 1_637_826, length: long},
	{cfg: Config{Name: "2x1x1", Nodes: alike(2, 1), Producers: one}, states: 11_469},
	{cfg: Config{Name: "2x1x1, as a whole", Nodes: alike(2, 1), Producers: one, Whole: true}, states: 56_114},
	{cfg: Config{Name: "2x1x2", Nodes: alike(2, 1), Producers: two}, states: 331_254, length: long},
	{cfg: Config{Name: "2x1x2, as a whole", Nodes: alike(2, 1), Producers: two, Whole: true}, states: 3_920_025, length: full},
	{cfg: Config{Name: "2x1x3, stays armed", Nodes: alike(2, 1), Producers: three, StayArmed: true}, states: 3_999_807, length: long},
	{cfg: Config{Name: "2x1x3, stays armed, from parked", Nodes: alike(2, 1), Producers: three, StayArmed: true, Parked: true, NoRollback: true}, states: 38_229},
	{cfg: Config{Name: "2x1x3, from parked", Nodes: alike(2, 1), Producers: three, Parked: true, NoRollback: true}, states: 292_795, length: long},
	{cfg: Config{Name: "2x1x3", Nodes: alike(2, 1), Producers: three}, states: 24_790_666, length: full},
	{cfg: Config{Name: "2x1x3, fanout 2, from parked", Nodes: alike(2, 1), Producers: three, Fanout: 2, Parked: true, NoRollback: true}, length: full},

	{cfg: Config{Name: "1x2x2, waits time out", Nodes: alike(1, 2), Producers: two, TimeOuts: true, NoRollback: true}, states: 273_127, length: long},
	{cfg: Config{Name: "2x1x1, waits time out", Nodes: alike(2, 1), Producers: one, TimeOuts: true}, states: 30_759, length: long},
	{cfg: Config{Name: "2x1, 2 items at once, waits time out, from parked", Nodes: alike(2, 1), Producers: batch, TimeOuts: true, Parked: true}, states: 17_354, length: long},
	{cfg: Config{Name: "3x1, 3 items at once, from parked", Nodes: alike(3, 1), Producers: []Producer{{Tag: TagA, Items: 3}}, Parked: true, NoRollback: true}, states: 10_999, length: long},
	// As a whole: what may happen to a node with two dispatchers, when anything may arrive, is more than what does happen.
	{cfg: Config{Name: "2 and 1, 3 items at once, from parked", Nodes: crowded, Producers: []Producer{{Tag: TagA, Items: 3}}, Parked: true, NoRollback: true, Whole: true}, states: 48_671},
	{cfg: Config{Name: "2x1x2, waits time out, from parked", Nodes: alike(2, 1), Producers: two, TimeOuts: true, Parked: true, NoRollback: true}, states: 541_730, length: long},
	{cfg: Config{Name: "2 and 1 x0, after a bounce, waits time out", Nodes: crowded, TimeOuts: true, Parked: true, Bounced: 2, Whole: true}, states: 1_832_348, length: long},

	{cfg: Config{Name: "1x1x2, long waits for producers", Nodes: alike(1, 1), Producers: two, Patience: true}, states: 9_423},
	{cfg: Config{Name: "1x2x2, long waits for producers", Nodes: alike(1, 2), Producers: two, Patience: true, NoRollback: true}, states: 299_820, length: long},
	{cfg: Config{Name: "1 node with lanes a and b x2, long waits for producers", Nodes: []Node{{{TagA, 1}, {TagB, 1}}}, Producers: mixed, Patience: true, NoRollback: true}, states: 693_236, length: long},
	{cfg: Config{Name: "1x2x3, long waits for producers", Nodes: alike(1, 2), Producers: three, Patience: true, NoRollback: true}, states: 3_234_553, length: full},

	{cfg: Config{Name: "1x2x2, absences", Nodes: alike(1, 2), Producers: two, Absences: true}, states: 199_045, length: long},
	{cfg: Config{Name: "2x1x1, absences, waits time out", Nodes: alike(2, 1), Producers: one, Absences: true, TimeOuts: true}, states: 74_985, length: long},
	{cfg: Config{Name: "2x1x2, absences, from parked", Nodes: alike(2, 1), Producers: two, Absences: true, Parked: true, NoRollback: true}, states: 18_342},

	{cfg: Config{Name: "1x2x2, one not READ COMMITTED", Nodes: alike(1, 2), Producers: old}, states: 142_368, length: long},
	{cfg: Config{Name: "2x1x2, one not READ COMMITTED, from parked", Nodes: alike(2, 1), Producers: old, Parked: true, NoRollback: true}, states: 16_736, length: long},

	{cfg: Config{Name: "1x2x2, one by the coalescer", Nodes: alike(1, 2), Producers: quiet}, states: 311_264, length: long},
	{cfg: Config{Name: "2x1x1, by the coalescer, waits time out", Nodes: alike(2, 1), Producers: home, TimeOuts: true}, states: 174_200, length: long},
	{cfg: Config{Name: "2x1, 2 items by the coalescer, waits time out, from parked", Nodes: alike(2, 1), Producers: homeBatch, TimeOuts: true, Parked: true}, states: 34_672, length: long},
	{cfg: Config{Name: "2x1x2, one by the coalescer, from parked", Nodes: alike(2, 1), Producers: quiet, Parked: true, NoRollback: true}, states: 39_877},
	{cfg: Config{Name: "2x1x2, both by the coalescer, from parked", Nodes: alike(2, 1), Producers: []Producer{{Tag: TagA, Coalesced: true}, {Tag: TagA, Coalesced: true, Node: 1}}, Parked: true}, states: 41_748},
	{cfg: Config{Name: "2x1x2, one by the coalescer", Nodes: alike(2, 1), Producers: quiet}, states: 4_592_876, length: full},
	{cfg: Config{Name: "3x1x2, one by the coalescer, a node leaves, from parked", Nodes: alike(3, 1), Producers: quiet, Leaves: 1, Parked: true, NoRollback: true}, length: full},

	{cfg: Config{Name: "1 node with lanes a and b x2", Nodes: []Node{{{TagA, 1}, {TagB, 1}}}, Producers: mixed}, states: 294_199, length: long},
	{cfg: Config{Name: "1 node with lanes a and ab x2, from parked", Nodes: []Node{{{TagA, 1}, {TagA | TagB, 1}}}, Producers: mixed, Parked: true, NoRollback: true}, states: 35_814},
	{cfg: Config{Name: "1 node with lanes a and ab x2", Nodes: []Node{{{TagA, 1}, {TagA | TagB, 1}}}, Producers: mixed}, states: 2_763_904, length: full},
	{cfg: Config{Name: "nodes for a and for ab x2, from parked", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed, Parked: true, NoRollback: true, TimeOuts: true}, states: 1_011_201, length: long},
	{cfg: Config{Name: "nodes for a and for ab x2", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed}, states: 706_935, length: long},

	{cfg: Config{Name: "1x2x1, a fetch or a bounce fails", Nodes: alike(1, 2), Producers: one, Faults: 1}, states: 215_339, length: long},
	{cfg: Config{Name: "2x1x1, a fetch or a bounce fails, from parked", Nodes: alike(2, 1), Producers: one, Faults: 1, Parked: true}, states: 55_718},
	{cfg: Config{Name: "2x1x1, by the coalescer, a fetch or a bounce fails, from parked", Nodes: alike(2, 1), Producers: home, Faults: 1, Parked: true}, states: 61_982},
	{cfg: Config{Name: "2x1, 2 items at once, a fetch or a bounce fails, from parked", Nodes: alike(2, 1), Producers: batch, Faults: 1, Parked: true}, states: 3_821_748, length: full},
	{cfg: Config{Name: "2x1x1, a fetch or a bounce fails", Nodes: alike(2, 1), Producers: one, Faults: 1}, states: 3_473_194, length: full},

	{cfg: Config{Name: "2x1x1, a node leaves", Nodes: alike(2, 1), Producers: one, Leaves: 1}, states: 252_770, length: long},
	{cfg: Config{Name: "2x1x2, a node leaves, from parked", Nodes: alike(2, 1), Producers: two, Leaves: 1, Parked: true, NoRollback: true}, states: 315_522, length: long},
	{cfg: Config{Name: "3x1x1, two nodes leave, from parked", Nodes: alike(3, 1), Producers: one, Leaves: 2, Parked: true}, states: 101_317},
	{cfg: Config{Name: "3x1, 2 items at once, a node leaves, from parked", Nodes: alike(3, 1), Producers: batch, Leaves: 1, Parked: true, NoRollback: true}, states: 530_261, length: long},
	{cfg: Config{Name: "3x1x2, a node leaves, from parked", Nodes: alike(3, 1), Producers: two, Leaves: 1, Parked: true, NoRollback: true}, length: full},
	{cfg: Config{Name: "2x1x1, a node dies", Nodes: alike(2, 1), Producers: one, Deaths: 1}, states: 92_211},
	{cfg: Config{Name: "2x1x2, a node dies, from parked", Nodes: alike(2, 1), Producers: two, Deaths: 1, Parked: true, NoRollback: true}, states: 87_406},
	{cfg: Config{Name: "3x1x1, two nodes die, from parked", Nodes: alike(3, 1), Producers: one, Deaths: 2, Parked: true}, states: 21_733},
	{cfg: Config{Name: "3x1x2, a node dies, from parked", Nodes: alike(3, 1), Producers: two, Deaths: 1, Parked: true, NoRollback: true}, length: full},
	{cfg: Config{Name: "nodes for a and for ab x2, a node leaves, from parked", Nodes: []Node{{{TagA, 1}}, {{TagA | TagB, 1}}}, Producers: mixed, Leaves: 1, Parked: true, NoRollback: true}, states: 337_833, length: long},
	{cfg: Config{Name: "2x1x1, leaving, dying, failing, from parked", Nodes: alike(2, 1), Producers: one, Leaves: 1, Deaths: 1, Faults: 1, TimeOuts: true, Parked: true}, length: full},

	{cfg: Config{Name: "2x1x1, a session is lost", Nodes: alike(2, 1), Producers: one, Losses: 1}, states: 1_158_920, length: long},
	{cfg: Config{Name: "2x1, 2 items at once, a session is lost, from parked", Nodes: alike(2, 1), Producers: batch, Losses: 1, Parked: true}, states: 109_705},
	{cfg: Config{Name: "2x1x2, a session is lost, from parked", Nodes: alike(2, 1), Producers: two, Losses: 1, Parked: true, NoRollback: true}, states: 3_422_752, length: full},
	{cfg: Config{Name: "2x1x1, a session is lost, waits time out, from parked", Nodes: alike(2, 1), Producers: one, Losses: 1, TimeOuts: true, Parked: true}, states: 2_743_793, length: full},

	{cfg: Config{Name: "2x1x2, one stands by, from parked", Nodes: alike(2, 1), Producers: two, Fanout: 2, Parked: true, NoRollback: true}, states: 39_890, length: long},
	{cfg: Config{Name: "2x1x1, one stands by, waits time out", Nodes: alike(2, 1), Producers: one, Fanout: 2, TimeOuts: true, Parked: true}, states: 27_772, length: long},
	{cfg: Config{Name: "2x1x1, one node joins, waits time out, from parked", Nodes: alike(2, 1), Producers: one, Joins: 1, TimeOuts: true, Parked: true}, states: 2_514_942, length: full},
	{cfg: Config{Name: "2x1x1, one node joins, stays armed, waits time out, from parked", Nodes: alike(2, 1), Producers: one, Joins: 1, StayArmed: true, TimeOuts: true, Parked: true}, length: long},
	{cfg: Config{Name: "2x1x1, both nodes join", Nodes: alike(2, 1), Producers: one, Joins: 2}, states: 9_421_946, length: full},
	{cfg: Config{Name: "2x1x1, a lane retires, waits time out, from parked", Nodes: alike(2, 1), Producers: one, Lapses: 1, TimeOuts: true, Parked: true}, states: 74_960},
	{cfg: Config{Name: "1 node with lanes a and ab x1, a lane retires, waits time out, from parked", Nodes: overlapping, Producers: one, Lapses: 1, TimeOuts: true, Parked: true}, states: 128_982},
	{cfg: Config{Name: "1x1x2, long waits for producers, one fails", Nodes: alike(1, 1), Producers: two, Patience: true, Faults: 1, NoRollback: true}, states: 72_030},
	{cfg: Config{Name: "3x1x1, two nodes die, by the coalescer, from parked", Nodes: alike(3, 1), Producers: home, Deaths: 2, Parked: true, NoRollback: true}, states: 16_757},
	{cfg: Config{Name: "2x1x1, retries stay sole, waits time out", Nodes: alike(2, 1), Producers: one, TimeOuts: true, RetriesStaySole: true}, states: 34_273, length: long},

	// Too many states to keep within 3 GB: it is sketched.
	{cfg: Config{Name: "2x2x2", Nodes: alike(2, 2), Producers: two}, length: full},
}

// maxStates is what fits into 3 GB. Of what has more, a sketch of so many slots does.
const (
	maxStates = 45_000_000
	slots     = 1 << 28
)

func TestPromise_AllInterleavings(t *testing.T) {
	for _, size := range sizes {
		t.Run(size.cfg.Name, func(t *testing.T) {
			skip(t, size.length)
			if size.states > 10_000 {
				notWithDetector(t)
			}
			t.Parallel()
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
	if l == long && testing.Short() {
		t.Skip("takes longer than a second")
	}
	if l == long {
		notWithDetector(t)
	}
}

// notWithDetector leaves out what takes the race detector seconds, in which it has nothing to find: make model-quick has all.
func notWithDetector(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("takes ten times as long under the race detector, for nothing: it is one goroutine")
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
	skip(t, long)
	for _, cfg := range []Config{
		{Name: "1x2x1", Nodes: alike(1, 2), Producers: one, Split: true},
		{Name: "2x1x1", Nodes: alike(2, 1), Producers: one, Split: true},
		{Name: "2x1x2, from parked", Nodes: alike(2, 1), Producers: two, Parked: true, NoRollback: true, Split: true},
		{Name: "lanes a and ab, from parked", Nodes: []Node{{{TagA, 1}, {TagA | TagB, 1}}}, Producers: mixed, Parked: true, NoRollback: true, Split: true},
	} {
		t.Run(cfg.Name, func(t *testing.T) {
			r := exploreAll(t, cfg)
			require.Equal(t, Nothing, r.Fault, "\n"+strings.Join(r.Trace, "\n"))
		})
	}
}

// A sketch of a space that fits has as many states as the space.
func TestSketch_SmallSpace_MissesNothing(t *testing.T) {
	cfg := Config{Nodes: alike(2, 1), Producers: one, TimeOuts: true, Parked: true}
	r, err := Explore(cfg, 0)
	require.NoError(t, err)
	sketch, err := Sketch(cfg, 1<<18, func(Result) {})
	require.NoError(t, err)
	require.Equal(t, r.States, sketch.States)
}

func TestTransitions_Each_IsReached(t *testing.T) {
	notWithDetector(t)
	var taken [transitionCount]int
	for _, cfg := range []Config{
		{Nodes: alike(1, 2), Producers: one, TimeOuts: true},
		{Nodes: alike(1, 1), Producers: batch, Faults: 1, Parked: true},
		{Nodes: alike(2, 1), Producers: one, Deaths: 1, Parked: true},
		{Nodes: alike(2, 1), Producers: one, Leaves: 1, Parked: true},
		{Nodes: alike(2, 1), Producers: one, Losses: 1, Parked: true},
		{Nodes: alike(1, 1), Producers: one, Without: FreshRead},
		{Nodes: alike(2, 1), Producers: home, Absences: true},
		{Nodes: alike(1, 1), Producers: two, Patience: true},
		{Nodes: alike(1, 1), Producers: one, Split: true},
		{Nodes: alike(2, 1), Producers: one, Fanout: 2, Lapses: 1, Parked: true, StayArmed: true, NoRollback: true},
		{Nodes: alike(2, 1), Producers: one, Faults: 1, Parked: true, TimeOuts: true, StayArmed: true, NoRollback: true},
		{Nodes: alike(2, 1), Producers: one, Joins: 1, Parked: true},
		{Nodes: alike(1, 1), Producers: two, Patience: true, Faults: 1, NoRollback: true},
		{Nodes: alike(2, 1), Producers: one, Parked: true, TimeOuts: true},
	} {
		r, err := Explore(cfg, 0)
		require.NoError(t, err)
		for what, n := range r.Taken {
			taken[what] += n
		}
	}
	for what := range Transition(transitionCount) {
		require.NotZero(t, taken[what], "%v is never taken", what)
	}
}

// What is kept of a state is the whole of it, and the same for all that it stands for.
func TestEncode_RandomWalks_RoundTrip(t *testing.T) {
	notWithDetector(t)
	for seed, cfg := range []Config{
		{Nodes: alike(2, 2), Producers: three, Leaves: 1, Deaths: 1, Faults: 2, TimeOuts: true},
		{Nodes: alike(3, 1), Producers: mixed, Leaves: 1, Deaths: 1, Faults: 1},
		{Nodes: []Node{{{TagA, 1}, {TagB, 1}}, {{TagA, 1}, {TagB, 1}}}, Producers: mixed, Leaves: 1, Faults: 1},
		{Nodes: alike(2, 1), Producers: old, Without: OldSnapshotTellsAll},
		{Nodes: alike(2, 2), Producers: homeBatch, Absences: true, Patience: true, Faults: 1, Split: true},
		{Nodes: alike(3, 1), Producers: two, Fanout: 2, Joins: 1, Losses: 1, Lapses: 1, Deaths: 1, TimeOuts: true},
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
