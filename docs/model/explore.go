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

// Explore visits every state that can be reached, breadth first, so that a trace is as short as can be, and then
// looks for a cycle of owed steps. limit bounds the number of states; 0: none.
func Explore(cfg Config, limit int) (Result, error) {
	m := newMachine(cfg)
	x := &explorer{m: m, codec: newCodec(m), limit: limit}
	x.space, x.remains = newSpace(x.codec.words), newRemains(m, x.codec, &x.result)
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
	limit   int
	result  Result

	// Where the owed steps of each state lead, one after the other, and where those of a state end; nil: they are too many,
	// and have to be taken once more.
	next []uint32
	ends []int
}

// maxNext is how many numbers of states are kept in order not to take owed steps twice.
const maxNext = 1 << 26

func (x *explorer) run() (Result, error) {
	start := x.m.initial()
	x.space.add(x.codec.encode(&start), 0)
	x.ends = []int{0}
	depth, levelEnd := 0, 1
	for at := 0; at < x.space.len(); at++ {
		if at == levelEnd {
			depth, levelEnd = depth+1, x.space.len()
		}
		s := x.codec.decode(x.space.at(at))
		owed := false
		for i := range x.m.successors(&s) {
			t := &x.m.steps[i]
			owed = owed || t.owed
			x.result.Steps++
			x.result.Taken[t.what]++
			if x.remains.add(&t.after) {
				continue
			}
			if number := x.space.add(x.codec.encode(&t.after), at); t.owed && x.ends != nil {
				x.next = append(x.next, uint32(number))
			}
		}
		if x.ends != nil {
			x.ends = append(x.ends, len(x.next))
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
	rest := newRemains(m, c, &r)
	for len(seen.next) > 0 {
		level := seen.next
		seen.next = nil
		for ; len(level) > 0; level = level[c.words:] {
			var e encoded
			copy(e[:], level[:c.words])
			s := c.decode(e)
			owed := false
			for i := range m.successors(&s) {
				t := &m.steps[i]
				owed = owed || t.owed
				r.Steps++
				r.Taken[t.what]++
				if !rest.add(&t.after) {
					seen.add(c.encode(&t.after))
				}
			}
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
	for i := range x.m.successors(&s) {
		if t := &x.m.steps[i]; t.owed && !x.remains.takes(&t.after) {
			next = append(next, uint32(x.space.find(x.codec.encode(&t.after))))
		}
	}
	return next
}
