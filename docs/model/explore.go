package model

// This file answers: which states can be reached, and is one of them wrong?

import (
	"errors"
	"slices"
)

// Fault is what can be wrong.
type Fault int

const (
	// Nothing is wrong.
	Nothing Fault = iota
	// Stranded: nothing that is owed is left to do, and an item is due while somebody is parked who could take it.
	Stranded
	// Endless: what is owed can go on for ever while the world stands still.
	Endless
)

func (f Fault) String() string {
	return [...]string{"nothing", "stranded item", "endless steps"}[f]
}

// Result is what an exploration found.
type Result struct {
	States int
	Parts  int // so many of the states are those of one node alone: see covered.go
	Steps  int
	Depth  int
	Fault  Fault
	Trace  []string // how to get there: one line a step
	Taken  [transitionCount]int
}

// ErrTooLarge is returned for a space with more states than allowed.
var ErrTooLarge = errors.New("too many states")

// Explore visits every state that can be reached, breadth first, so that a trace is as short as can be (where a token
// is taken at once, that counts for nothing), and then looks for a cycle of owed steps. limit bounds the number of states; 0: none.
func Explore(cfg Config, limit int) (Result, error) {
	m := newMachine(cfg)
	x := &explorer{m: m, codec: newCodec(m), limit: limit}
	x.space, x.remains, x.walk = newSpace(x.codec.words), newRemains(m, x.codec, &x.result), walk{m: m, whole: cfg.neverCovered()}
	r, err := x.run()
	if errors.Is(err, errPerhapsEndless) {
		cfg.Whole = true
		return Explore(cfg, limit)
	}
	return r, err
}

// errPerhapsEndless: what comes once nothing can be stranded may go on for ever. Only a search of the whole tells.
var errPerhapsEndless = errors.New("perhaps endless")

type explorer struct {
	m       *machine
	codec   *codec
	space   *space
	remains *remains
	walk    walk
	limit   int
	result  Result

	// Where the owed steps of each state lead, one after the other, and where those of a state end; nil: they are too many,
	// and have to be taken once more.
	next []uint32
	ends []uint32
}

// maxNext is how many numbers of states are kept in order not to take owed steps twice.
const maxNext = 1 << 27

func (x *explorer) run() (Result, error) {
	start := x.m.initial()
	x.space.add(x.codec.encode(&start), 0)
	x.ends = []uint32{0}
	depth, levelEnd := 0, 1
	for at := 0; at < x.space.len(); at++ {
		if at == levelEnd {
			depth, levelEnd = depth+1, x.space.len()
		}
		s := x.codec.decode(x.space.at(at))
		owed := false
		x.walk.from(&s, func(t *step, is visited) {
			owed = owed || t.owed && is.first
			x.result.Steps++
			x.result.Taken[t.what]++
			if !is.last || x.remains.add(&t.after) {
				return
			}
			if number := x.space.add(x.codec.encode(&t.after), at); is.owed && x.ends != nil {
				x.next = append(x.next, uint32(number))
			}
		})
		if x.ends != nil {
			x.ends = append(x.ends, uint32(len(x.next)))
		}
		if len(x.next) > maxNext {
			x.next, x.ends = nil, nil
		}
		if !owed && x.m.stranded(&s) {
			return x.fail(Stranded, x.path(at), depth), nil
		}
		if x.limit > 0 && x.space.len() > x.limit {
			x.result.States, x.result.Depth = x.space.len(), depth
			return x.result, ErrTooLarge
		}
	}
	if states := cycle(x.space.len(), x.owed); states != nil {
		path := x.path(int(states[0]))
		for _, at := range states[1:] {
			path = append(path, int(at))
		}
		return x.fail(Endless, path, depth), nil
	}
	if x.remains.endlessly() {
		return Result{}, errPerhapsEndless
	}
	x.result.Parts = x.remains.space.len()
	x.result.States, x.result.Depth = x.space.len()+x.result.Parts, depth
	return x.result, nil
}

// Sketch visits every state as Explore does, but for the chance that sketch tells of; it does not look for cycles, and
// of a fault it says only what the state is. It keeps 4 bytes for each slot, a power of two. progress is called after
// each level.
func Sketch(cfg Config, slots int, progress func(Result)) (Result, error) {
	m := newMachine(cfg)
	c := newCodec(m)
	seen := newSketch(c.words, slots)
	start := m.initial()
	seen.add(c.encode(&start))
	var r Result
	rest, w := newRemains(m, c, &r), walk{m: m, whole: cfg.neverCovered()}
	for len(seen.next) > 0 {
		level := seen.next
		seen.next = nil
		for ; len(level) > 0; level = level[c.words:] {
			var e encoded
			copy(e[:], level[:c.words])
			s := c.decode(e)
			owed := false
			w.from(&s, func(t *step, is visited) {
				owed = owed || t.owed && is.first
				r.Steps++
				r.Taken[t.what]++
				if is.last && !rest.add(&t.after) {
					seen.add(c.encode(&t.after))
				}
			})
			if !owed && m.stranded(&s) {
				r.States, r.Fault, r.Trace = seen.count, Stranded, []string{m.summary(&s)}
				return r, nil
			}
		}
		r.States = seen.count
		progress(r)
		if len(seen.next) > 0 {
			r.Depth++
		}
		if seen.full() {
			return r, ErrTooLarge
		}
	}
	if rest.endlessly() {
		return r, errPerhapsEndless
	}
	r.Parts = rest.space.len()
	r.States += r.Parts
	return r, nil
}

func (x *explorer) fail(f Fault, path []int, depth int) Result {
	x.result.States, x.result.Depth, x.result.Fault = x.space.len(), depth, f
	x.result.Trace = x.trace(path)
	return x.result
}

// stranded reports whether an item is due, and free, while a dispatcher waits that could take it: parked. The
// only excuse is a sweep that waits for K: how long a death goes unnoticed is bounded by the fallback.
func (m *machine) stranded(s *state) bool {
	for n := range m.cfg.Nodes {
		if s.nodes[n].status == sweepingK {
			return false
		}
	}
	for l := range m.lanes {
		if s.nodes[m.node[l]].status == live && m.freeTags(s, l) != 0 && m.any(s, l, (*dispatcher).waits) {
			return true
		}
	}
	return false
}

// path returns the states on the way to one, itself included.
func (x *explorer) path(at int) (path []int) {
	for ; at != 0; at = x.space.parent(at) {
		path = append(path, at)
	}
	path = append(path, 0)
	slices.Reverse(path)
	return path
}

// cycle looks for states, of the numbers below n, that lead to one another by owed steps alone, depth first. It returns
// them, the first also as the last; nil: there are none.
func cycle(n int, owed func(at int) []uint32) []uint32 {
	type frame struct {
		at   uint32
		next []uint32
	}
	const (
		open   = 1
		closed = 2
	)
	color := make([]uint8, n)
	var stack []frame
	push := func(at uint32) {
		color[at] = open
		stack = append(stack, frame{at, owed(int(at))})
	}
	for root := range color {
		if color[root] != 0 {
			continue
		}
		for push(uint32(root)); len(stack) > 0; {
			top := &stack[len(stack)-1]
			if len(top.next) == 0 {
				color[top.at] = closed
				stack = stack[:len(stack)-1]
				continue
			}
			next := top.next[0]
			top.next = top.next[1:]
			switch color[next] {
			case 0:
				push(next)
			case open:
				var states []uint32
				for _, f := range stack {
					if f.at == next || states != nil {
						states = append(states, f.at)
					}
				}
				return append(states, next)
			}
		}
	}
	return nil
}

// owed returns the states that an owed step leads to. What is covered leads to nothing but what is.
func (x *explorer) owed(at int) (next []uint32) {
	if x.ends != nil {
		return x.next[x.ends[at]:x.ends[at+1]]
	}
	s := x.codec.decode(x.space.at(at))
	x.walk.from(&s, func(t *step, is visited) {
		if is.last && is.owed && !x.remains.takes(&t.after) {
			next = append(next, uint32(x.space.find(x.codec.encode(&t.after))))
		}
	})
	return next
}

// walk takes steps. Where a token meets a parked dispatcher nothing comes between (successors), so unless every state
// is to be explored, these are not kept: what they lead to, is.
type walk struct {
	m     *machine
	whole bool
	steps [maxDispatchers + 1][]step // of a state, and of those on the way: each has one dispatcher less parked
}

// visited is where a step is taken.
type visited struct {
	first bool // from the state itself
	last  bool // to a state that is kept
	owed  bool // and all from the state up to here are owed
}

// from calls visit with each step from s, and from those on the way.
func (w *walk) from(s *state, visit func(*step, visited)) {
	w.goOn(s, visited{first: true, owed: true}, 0, visit)
}

func (w *walk) goOn(s *state, is visited, depth int, visit func(*step, visited)) {
	w.m.steps = w.steps[depth]
	steps := w.m.successors(s)
	w.steps[depth] = steps
	for i := range steps {
		t := &steps[i]
		here := visited{is.first, w.whole || !w.m.wakesAny(&t.after), is.owed && t.owed}
		visit(t, here)
		if !here.last {
			w.goOn(&t.after, visited{owed: here.owed}, depth+1, visit)
		}
	}
}
