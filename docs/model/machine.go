package model

// This file answers: which steps are there from a state?

import (
	"math/bits"
	"slices"
)

// machine generates the steps of one configuration.
type machine struct {
	cfg   Config
	lanes int // how many there are
	takes [maxLanes]Tags
	node  [maxLanes]int     // whose lane it is
	first [maxLanes + 1]int // its dispatchers are first[l] .. first[l+1]-1
	lane  [maxDispatchers]int
	of    [maxNodes]laneSet // the lanes of a node
	tags  [maxProducers]int // what the producer inserts

	steps []step
}

// step is a transition from one state to another.
type step struct {
	what  Transition
	who   uint8 // number of the producer, dispatcher, lane or node
	owed  bool  // the protocol takes it by itself, in its own time; see the package comment
	after state
}

func newMachine(cfg Config) *machine {
	m := &machine{cfg: cfg}
	d := 0
	for n, node := range cfg.Nodes {
		for _, l := range node {
			m.takes[m.lanes], m.node[m.lanes], m.first[m.lanes] = l.Takes, n, d
			m.of[n] |= 1 << m.lanes
			for range l.Dispatchers {
				m.lane[d] = m.lanes
				d++
			}
			m.lanes++
			m.first[m.lanes] = d
		}
	}
	for p, producer := range cfg.Producers {
		m.tags[p] = bits.TrailingZeros8(uint8(producer.Tag))
	}
	return m
}

// alike reports whether two nodes are interchangeable: they have the same lanes, and neither is that of a producer.
func (m *machine) alike(a, b int) bool {
	if a == b {
		return true
	}
	for _, p := range m.cfg.Producers {
		if p.Coalesced && (p.Node == a || p.Node == b) {
			return false
		}
	}
	return slices.Equal(m.cfg.Nodes[a], m.cfg.Nodes[b])
}

func (m *machine) keeps(r Rule) bool { return m.cfg.Without&r == 0 }

// initial: nodes listen, and nobody has called Fetch yet; or, for shorter stories, everybody has, and has found nothing.
func (m *machine) initial() state {
	s := state{faults: uint8(m.cfg.Faults), losses: uint8(m.cfg.Losses), lapses: uint8(m.cfg.Lapses)}
	for d := m.first[m.lanes]; d < maxDispatchers; d++ {
		s.dispatchers[d].phase = gone
	}
	for p := len(m.cfg.Producers); p < maxProducers; p++ {
		s.producers[p].phase = ended
	}
	for n := len(m.cfg.Nodes); n < maxNodes; n++ {
		s.nodes[n].status = left
	}
	present := len(m.cfg.Nodes) - m.cfg.Joins
	for n := range m.cfg.Nodes {
		s.nodes[n].alone = present == 1
		if n >= present {
			s.nodes[n].status, s.nodes[n].alone = absent, false
		}
	}
	for l := range m.lanes {
		s.lanes[l].hot = true // for all that is known
		if m.cfg.Parked && m.node[l] < present {
			s.lanes[l].armed, s.lanes[l].settled, s.lanes[l].empty = true, true, true
			s.lanes[l].row = m.rowsGo()
			for d := m.first[l]; d < m.first[l+1]; d++ {
				s.dispatchers[d].phase = parked
			}
		}
	}
	if m.cfg.Bounced > 0 {
		s.due[0], s.lanes[0].handed = uint8(m.cfg.Bounced), 1
	}
	return s
}

// add offers a step that the protocol takes by itself.
func (m *machine) add(what Transition, who int, after *state) {
	m.steps = append(m.steps, step{what, uint8(who), true, *after})
}

// may offers a step that happens if the world, or a user, pleases.
func (m *machine) may(what Transition, who int, after *state) {
	m.steps = append(m.steps, step{what, uint8(who), false, *after})
}

// successors returns all steps from s. The result is good until the next call.
//
// A token that meets a parked dispatcher is handed over under the mutex that made the one stored, or the other
// parked: nothing comes between, so no other step is offered then.
func (m *machine) successors(s *state) []step {
	m.steps = m.steps[:0]
	for n := range m.cfg.Nodes {
		if m.wakes(s, n) {
			m.ofNode(s, n)
			return m.steps
		}
	}
	for p := range m.cfg.Producers {
		m.producer(s, p)
	}
	for d := range m.first[m.lanes] {
		m.dispatcher(s, d)
	}
	for l := range m.lanes {
		m.laneSteps(s, l)
	}
	for n := range m.cfg.Nodes {
		m.nodeSteps(s, n)
	}
	return m.steps
}

// wakes reports whether a token meets a parked dispatcher of the node.
func (m *machine) wakes(s *state, n int) bool {
	for l := range m.lanes {
		if m.node[l] == n && s.lanes[l].tokens[0] != noToken && m.parked(s, l) >= 0 {
			return true
		}
	}
	return false
}

func (m *machine) wakesAny(s *state) bool {
	for l := range m.lanes {
		if s.lanes[l].tokens[0] != noToken && m.parked(s, l) >= 0 {
			return true
		}
	}
	return false
}

// ofNode offers the steps of one node.
func (m *machine) ofNode(s *state, n int) {
	m.steps = m.steps[:0]
	for l := range m.lanes {
		if m.node[l] == n && s.lanes[l].tokens[0] != noToken && m.parked(s, l) >= 0 {
			m.takeToken(s, m.parked(s, l))
			return
		}
	}
	for d := range m.first[m.lanes] {
		if m.node[m.lane[d]] == n {
			m.dispatcher(s, d)
		}
	}
	m.each(m.of[n], func(l int) { m.laneSteps(s, l) })
	m.nodeSteps(s, n)
}

// What several rules ask.

// any reports whether a dispatcher of the lane is as asked.
func (m *machine) any(s *state, l int, is func(*dispatcher) bool) bool {
	for d := m.first[l]; d < m.first[l+1]; d++ {
		if is(&s.dispatchers[d]) {
			return true
		}
	}
	return false
}

// parked returns a parked dispatcher of the lane; -1: none. They are alike, so one will do.
func (m *machine) parked(s *state, l int) int {
	for d := m.first[l]; d < m.first[l+1]; d++ {
		if s.dispatchers[d].phase == parked {
			return d
		}
	}
	return -1
}

// present reports whether a dispatcher of the lane, but for the one given, is parked or inside a fetch.
func (m *machine) present(s *state, l, but int) bool {
	for d := m.first[l]; d < m.first[l+1]; d++ {
		if d != but && (s.dispatchers[d].phase == parked || s.dispatchers[d].inside()) {
			return true
		}
	}
	return false
}

// rowsGo reports whether a lane's row may go while the lane, or what it has to say, is there.
func (m *machine) rowsGo() bool { return m.cfg.Losses+m.cfg.Lapses > 0 }

// targets returns the lanes that a statement sees armed, on live nodes, that can use an item with the tag.
func (m *machine) targets(s *state, tag int) (set laneSet) {
	for l := range m.lanes {
		alive := s.nodes[m.node[l]].listens() || s.nodes[m.node[l]].status == sweptSoon && !m.keeps(DeadStayDead)
		if s.lanes[l].armed && !s.lanes[l].stale && alive && m.matches(l, tag) {
			set |= 1 << l
		}
	}
	return set
}

func (m *machine) matches(l, tag int) bool {
	return m.takes[l]&(1<<tag) != 0 || !m.keeps(LaneMatch)
}

// dueTags returns the tags of the lane of which a plain read sees due rows. An item that an open transaction has
// claimed still looks due to everybody else.
func (m *machine) dueTags(s *state, l, but int) (tags Tags) {
	for t := range tagCount {
		if s.due[t] > 0 {
			tags |= 1 << t
		}
	}
	return (tags | m.lockedTags(s, but)) & m.takes[l]
}

func (m *machine) lockedTags(s *state, but int) (tags Tags) {
	for d := range m.first[m.lanes] {
		if d != but && s.dispatchers[d].locks() {
			tags |= 1 << s.dispatchers[d].tag
		}
	}
	return tags
}

func (m *machine) freeTags(s *state, l int) (tags Tags) {
	for t := range tagCount {
		if s.due[t] > 0 {
			tags |= 1 << t
		}
	}
	return tags & m.takes[l]
}

// sharedFree reports whether a producer's try of K succeeds: nobody waits to have it exclusively.
func (m *machine) sharedFree(s *state) bool {
	for n := range m.cfg.Nodes {
		if settler := s.nodes[n].settler; settler == waits || settler == waitsAlone {
			return false
		}
		switch s.nodes[n].status {
		case leavingK, sweepingK:
			return false
		case sweeping, sweptSoon:
			if m.keeps(SweepHoldsK) {
				return false
			}
		}
	}
	return true
}

// exclusiveFree reports whether a wait for K can end. It is released at once, but by a sweeper. Who of several waits ends
// first is left open; PostgreSQL grants in the order of arrival, which is one of the possibilities.
func (m *machine) exclusiveFree(s *state) bool {
	return m.holders(s) == 0 && (!m.keeps(SweepHoldsK) || m.count(s, sweeping, sweptSoon) == 0)
}

// holders returns how many producers have K.
func (m *machine) holders(s *state) (n int) {
	for p := range m.cfg.Producers {
		if s.producers[p].locked {
			n++
		}
	}
	return n
}

// notify puts a notification on its way to each of the lanes whose node listens: to the lane alone.
func (m *machine) notify(s *state, set laneSet, as token) {
	for l := range m.lanes {
		if set&(1<<l) != 0 && s.nodes[m.node[l]].listens() {
			n := s.lanes[l].underWay(as)
			*n = min(*n+1, many)
		}
	}
}

// tellAll puts one on its way to all that can use an item with the tag.
func (m *machine) tellAll(s *state, tag int) {
	for l := range m.lanes { // the broadcast channel; the payload names the tag
		if m.matches(l, tag) && !s.lanes[l].retired {
			m.notify(s, 1<<l, plain)
		}
	}
}

// tellOthers puts one on its way to all, whatever they can use, but to one node.
func (m *machine) tellOthers(s *state, but int) {
	for l := range m.lanes {
		if m.node[l] != but && !s.lanes[l].retired {
			m.notify(s, 1<<l, plain)
		}
	}
}

// many notifications in flight are not counted any more: when one arrives, there may be one less, or still as many.
const many = 3

// unsettle is when a write of "not armed" begins: whatever is known of the row is void.
func (m *machine) unsettle(s *state, l, but int) {
	lane := &s.lanes[l]
	lane.settled, lane.empty = false, false
	if m.keeps(SettleVoid) {
		lane.settle, lane.scout, lane.lastOne = noSettle, false, false
	}
	for d := m.first[l]; d < m.first[l+1]; d++ {
		self := &s.dispatchers[d]
		if self.inside() {
			self.lastOne = false
		}
		if d != but && self.inside() {
			self.clean, self.void = false, true
		}
	}
}

// choices calls choose with each set of n of the lanes, or with all of them if there are fewer.
func choices(from laneSet, n int, choose func(laneSet)) {
	if bits.OnesCount8(uint8(from)) <= n {
		choose(from)
		return
	}
	for set := laneSet(1); set <= from; set++ {
		if set&^from == 0 && bits.OnesCount8(uint8(set)) == n {
			choose(set)
		}
	}
}

// oneOfEach calls choose with each way to take, for each of the tags, one lane that is armed and can use it, but for
// some lanes.
func (m *machine) oneOfEach(s *state, tags Tags, but laneSet, choose func(set laneSet)) {
	sets := []laneSet{0}
	for t := range tagCount {
		if tags&(1<<t) == 0 {
			continue
		}
		candidates := m.targets(s, t) &^ but
		if candidates == 0 {
			continue
		}
		var extended []laneSet
		choices(candidates, 1, func(one laneSet) {
			for _, set := range sets {
				extended = append(extended, set|one)
			}
		})
		sets = extended
	}
	for _, set := range sets {
		choose(set)
	}
}

// The sequence numbers of a lane. Only their order matters, so those of the writes in flight are kept as ranks: 0
// is older than what the row has, 1 the next one, and so on; no number grows.

// number gives a write that begins now the newest number of its lane.
func (m *machine) number(s *state, l int) uint8 {
	newest := s.lanes[l].rank
	for d := m.first[l]; d < m.first[l+1]; d++ {
		newest = max(newest, s.dispatchers[d].rank)
	}
	return newest + 1
}

// write commits a write of the lane's row: the newest wins.
func (m *machine) write(s *state, l int, rank uint8, armed bool) {
	if rank == 0 && m.keeps(Sequence) {
		return
	}
	s.lanes[l].armed, s.lanes[l].row = armed, m.rowsGo()
	s.lanes[l].rank = max(s.lanes[l].rank, rank) - rank
	for d := m.first[l]; d < m.first[l+1]; d++ {
		s.dispatchers[d].rank = max(s.dispatchers[d].rank, rank) - rank
	}
}

// closeRanks closes the gap that a write leaves which did not happen.
func (m *machine) closeRanks(s *state, l int, rank uint8) {
	if rank == 0 {
		return
	}
	if s.lanes[l].rank > rank {
		s.lanes[l].rank--
	}
	for d := m.first[l]; d < m.first[l+1]; d++ {
		if s.dispatchers[d].rank > rank {
			s.dispatchers[d].rank--
		}
	}
}
