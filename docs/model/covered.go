package model

// This file answers: what need not be told apart once nothing can be stranded any more?
//
// A state is covered if all producers have ended, nothing can fail or leave, and for each item that is due there is
// somebody on the way: a dispatcher whose claim is to come, or one that will begin another fetch for a token or a
// notification that is there already. Nothing due is the usual case. What follows is covered too: a claim that finds an
// item is one dispatcher less for one item less, one that comes for all tags that are due finds one, and nothing takes a
// token from those who are to look again. And where an item is due, a step is owed, of those who are on the way. So in no
// quiet state after it is an item due (property 1).
//
// That is most of all states: whatever order of steps was explored, its remains end here in every order again. What is
// left to show is that owed steps lead in no circle (property 2). It is shown node by node, which makes a sum of what is a
// product otherwise.
//
// The part of a node (part) is what it knows, what its dispatchers do, what is due, and which tags others have locked.
// Notifications under way are left out: in a part one of any kind may arrive at any time. So are the rows of others: in a
// part they may be armed or not, as is convenient. Then the steps of one node are steps of its part, and those of others
// leave it as it is, but that they may claim, and end a claim, at any time. So the parts that are explored are more
// than those that exist.
//
// Let C be a circle of owed steps between covered states. weight is a number that no owed step of a part makes greater,
// that of what it sends included, and that gets smaller whenever a notification arrives, something is claimed, reported
// or committed, and at each step of a bounce. So C has none of these steps. But nothing else of a node is seen by
// another: what is armed is read by bounces alone (partSteps compares), what is due and what is locked is constant in C,
// and nobody sends. So the steps in C of one node alone are a circle of its part, with the same items due, and the same
// locks, all of them owed. If no part has such a circle, C does not exist.
//
// That weight is as it says, and that no part has a circle, is looked at in each exploration, for each step of each
// part; and if it is not so, every state is explored after all (Config.Whole). So what remains to be believed is
// that covered is as it says, and that parts have all steps: TestCovered_FullSearch_IsMadeOfParts compares.

import "math/bits"

// neverCovered reports whether the configuration is explored as a whole. Where a claim can be undone, or a node comes or
// goes, something may be due again, or a node is more than its part; and a node alone is not less than itself.
func (c *Config) neverCovered() bool {
	return c.Whole || c.Split || len(c.Nodes) == 1 || c.Faults+c.Leaves+c.Deaths+c.Losses+c.Joins+c.Lapses > 0
}

// covered reports whether all producers have ended, and as many are on the way as items are due.
func (m *machine) covered(s *state) bool {
	for p := range m.cfg.Producers {
		if s.producers[p].phase != ended {
			return false
		}
	}
	items := uint8(0)
	var due Tags
	for t := range tagCount {
		if s.due[t] > 0 {
			items += s.due[t]
			due |= 1 << t
		}
	}
	if items == 0 {
		return true
	}
	for l := range m.lanes {
		if due&^m.takes[l] == 0 {
			items -= min(items, m.onTheWay(s, l))
		}
	}
	return items == 0
}

// onTheWay returns how many dispatchers of a lane are bound to claim: at least so many.
func (m *machine) onTheWay(s *state, l int) (n uint8) {
	lane := &s.lanes[l]
	called := lane.directed+lane.handed+lane.broadcast > 0
	for d := m.first[l]; d < m.first[l+1]; d++ {
		switch self := &s.dispatchers[d]; {
		case self.phase == begunFetch:
			n++
		case m.cfg.TimeOuts: // who is parked may go
		case self.phase == foundNone, self.phase == answered && self.answer != found:
			// Alone in its lane, it takes what it leaves behind, once it parks.
			if m.first[l+1]-m.first[l] == 1 && (called || self.newer > 0 && lane.tokens[0] != noToken && m.keeps(BounceAfterFetch)) {
				n++
			}
		}
	}
	if m.parked(s, l) >= 0 && !m.cfg.TimeOuts && (called || lane.tokens[0] != noToken) {
		n++ // the first
	}
	return n
}

// part returns what a covered state is to a node. All others have left; one dispatcher of theirs stays for each tag
// that they have locked. Whom of them a bounce tells does not matter: how many, does.
func (m *machine) part(s *state, n int) state {
	part := *s
	var locked Tags
	others := laneSet(1<<m.lanes-1) &^ m.of[n]
	for l := range m.lanes {
		if m.node[l] == n {
			own := &part.lanes[l]
			own.directed, own.handed, own.standBys, own.broadcast = 0, 0, 0, 0
			own.tells = own.tells&m.of[n] | lowest(others, bits.OnesCount8(uint8(own.tells&others)))
			continue
		}
		part.nodes[m.node[l]], part.lanes[l] = node{status: left}, lane{}
		for d := m.first[l]; d < m.first[l+1]; d++ {
			if s.dispatchers[d].locks() {
				locked |= 1 << s.dispatchers[d].tag
			}
			part.dispatchers[d] = dispatcher{phase: gone}
		}
	}
	for d := 0; locked != 0; d++ {
		if m.node[m.lane[d]] != n {
			part.dispatchers[d] = dispatcher{phase: reported, answer: found, tag: uint8(bits.TrailingZeros8(uint8(locked)))}
			locked &= locked - 1
		}
	}
	return part
}

// lowest returns the first n lanes of a set.
func lowest(set laneSet, n int) (low laneSet) {
	for ; n > 0; n-- {
		low |= set & -set
		set &= set - 1
	}
	return low
}

// weight is what a covered state, or a part, has left to do, as far as others may see it. What is due and what is claimed
// counts most, since nothing else may let others look again. A sole token counts more than all that a bounce makes of
// it, and less than what it may come from.
func (m *machine) weight(s *state) (w int) {
	for d := range m.first[m.lanes] {
		switch s.dispatchers[d].phase {
		case claimed:
			w += 2 * weightOfLock
		case reported:
			w += weightOfLock
		}
	}
	for t := range tagCount {
		w += int(s.due[t]) * 3 * weightOfLock
	}
	locked := m.lockedTags(s, -1)
	for l := range m.lanes {
		lane := &s.lanes[l]
		w += int(lane.directed)*(weightOfSole+1) + int(lane.standBys)*(weightOfSole+2) + int(lane.handed)*(weightOfPassed+1) + int(lane.broadcast)
		for _, t := range lane.tokens {
			w += [...]int{noToken: 0, plain: 0, sole: weightOfSole, passed: weightOfPassed}[t]
		}
		w += [...]int{noBounce: 0, toOne: weightOfSole - 2, toAll: weightOfPassed - 1}[lane.pending]
		w += [...]int{noBounce: 0, toOne: weightOfSole - 4, toAll: weightOfPassed - 2}[lane.said]
		if lane.standsBy {
			w += weightOfSole + 1
		}
		if lane.unused {
			w++
		}
		w += m.weightOfScout(s, l, locked&m.takes[l] != 0 && m.freeTags(s, l) == 0)
	}
	return w
}

const (
	weightOfPassed = 6 // more than a broadcast to each of 3 lanes, in three steps
	weightOfSole   = 20
	weightOfLock   = 10_000
)

// weightOfScout is that of a lane which met locked rows, and of those who will say that it has. While all it could have is
// locked, only the scout of a lane where nobody is has anything to do; and somebody who is there, stays.
func (m *machine) weightOfScout(s *state, l int, locked bool) (w int) {
	switch lane := &s.lanes[l]; {
	case !lane.contended:
	case !locked || lane.alone && !m.present(s, l, -1):
		w = weightOfSole + 1
	}
	if !locked {
		m.ofLane(s, l, func(d *dispatcher) {
			if d.answer == contended {
				w += weightOfSole + 2
			}
		})
	}
	return w
}

// partStep is a step from a part to a part.
type partStep struct {
	what  Transition
	who   uint8
	owed  bool
	after state
}

// partSteps returns the steps of a part, and whether each weighs what it is to weigh.
func (m *machine) partSteps(part *state) (steps []partStep, proved bool) {
	n := m.whose(part)
	s := *part
	var others laneSet
	for other := range m.cfg.Nodes {
		if other != n {
			s.nodes[other].status = live
			others |= m.of[other]
		}
	}
	proved = true
	inAnyCase := 0 // so many steps there are whoever is armed, and these come first
	for armed := laneSet(0); ; armed = (armed - others) & others {
		x := s
		m.each(armed, func(l int) { x.lanes[l].armed = true })
		m.ofNode(&x, n)
		var bounces []partStep
		same := 0
		for i := range m.steps {
			t := &m.steps[i]
			next := partStep{t.what, t.who, t.owed, m.part(&t.after, n)}
			lighter := m.weight(&x) - m.weight(&t.after)
			switch {
			case isBounce(t.what):
				proved = proved && lighter > 0
				bounces = append(bounces, next)
			case armed == 0:
				locks := m.lockedTags(&x, -1) != m.lockedTags(&t.after, -1)
				proved = proved && (lighter > 0 || lighter == 0 && !locks || !t.owed)
				steps = append(steps, next)
				inAnyCase++
			default:
				proved = proved && same < inAnyCase && steps[same] == next
				same++
			}
		}
		proved = proved && (armed == 0 || same == inAnyCase)
		steps = append(steps, bounces...)
		if armed == others {
			break
		}
	}
	if m.wakes(part, n) {
		return steps, proved // at once, before anything else
	}
	return m.partSurprises(&s, n, steps, proved)
}

// partSurprises adds what others may do to a part: send it something, claim, and end their claims.
func (m *machine) partSurprises(s *state, n int, steps []partStep, proved bool) ([]partStep, bool) {
	arrives := func(x *state) {
		for i := range m.steps {
			if t := &m.steps[i]; t.what == NotificationArrives {
				proved = proved && m.weight(&t.after) < m.weight(x)
				steps = append(steps, partStep{t.what, t.who, false, m.part(&t.after, n)})
			}
		}
		m.steps = m.steps[:0]
	}
	m.steps = m.steps[:0]
	m.each(m.of[n], func(l int) {
		for _, t := range []token{sole, passed, plain} {
			x := *s
			*x.lanes[l].underWay(t) = 1
			m.arrives(&x, l, t)
			arrives(&x)
		}
		if m.cfg.Fanout > 1 {
			x := *s
			x.lanes[l].standBys = 1
			m.standsBy(&x, l)
			arrives(&x)
		}
	})
	for t := range tagCount {
		for d := range m.first[m.lanes] {
			if s.due[t] == 0 || m.node[m.lane[d]] == n {
				continue
			}
			// Where d stands for another claim, it is as if that had ended as well: which may be.
			x := *s
			x.due[t]--
			x.dispatchers[d] = dispatcher{phase: reported, answer: found, tag: uint8(t)}
			proved = proved && m.weight(&x) < m.weight(s)
			steps = append(steps, partStep{FetchClaims, 0, false, m.part(&x, n)})
		}
	}
	for d := range m.first[m.lanes] {
		if m.node[m.lane[d]] != n && s.dispatchers[d].locks() {
			x := *s
			x.dispatchers[d] = dispatcher{phase: gone}
			proved = proved && m.weight(&x) < m.weight(s)
			steps = append(steps, partStep{FetchCommits, uint8(d), false, m.part(&x, n)})
		}
	}
	return steps, proved
}

// whose returns whose part it is.
func (m *machine) whose(part *state) int {
	for n := range m.cfg.Nodes {
		if part.nodes[n].status != left {
			return n
		}
	}
	panic("nobody's part")
}

func isBounce(t Transition) bool { return t >= BounceBegins && t <= BounceCommits }

// remains keeps the parts of the covered states that a search has met.
type remains struct {
	m      *machine
	whole  bool // takes nothing
	codec  *codec
	space  *space
	result *Result
}

func newRemains(m *machine, c *codec, r *Result) *remains {
	return &remains{m, m.cfg.neverCovered(), c, newSpace(c.words), r}
}

// takes reports whether a state is kept as its parts.
func (r *remains) takes(s *state) bool { return !r.whole && r.m.covered(s) }

// add takes a state if it is covered.
func (r *remains) add(s *state) bool {
	if !r.takes(s) {
		return false
	}
	for n := range r.m.cfg.Nodes {
		part := r.m.part(s, n)
		r.space.add(r.codec.encode(&part), 0)
	}
	return true
}

// endlessly reports whether a part has a circle of owed steps, or may be part of one.
func (r *remains) endlessly() bool {
	var owed [][]uint32
	for at := 0; at < r.space.len(); at++ {
		part := r.codec.decode(r.space.at(at))
		steps, proved := r.m.partSteps(&part)
		if !proved {
			return true
		}
		var next []uint32
		for i := range steps {
			t := &steps[i]
			r.result.Steps++
			r.result.Taken[t.what]++
			if number := r.space.add(r.codec.encode(&t.after), 0); t.owed {
				next = append(next, uint32(number))
			}
		}
		owed = append(owed, next)
	}
	return cycle(r.space.len(), func(at int) []uint32 { return owed[at] }) != nil
}
