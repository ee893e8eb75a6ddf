package model

// This file answers: which states are the same, and how is one kept in few bits?
//
// Dispatchers of one lane are alike, and so are producers of the same kind, and nodes with the same lanes: a state
// and what becomes of it by exchanging such are one. Items have no identity at all, only a number by tag. All
// rules treat the exchanged alike, so a state has a counterpart of each step of the other.

import (
	"slices"
)

// maxWords bounds an encoded state.
const maxWords = 4

type encoded [maxWords]uint64

// bitWriter appends numbers of a few bits.
type bitWriter struct {
	words encoded
	at    uint
}

func (w *bitWriter) put(v uint64, width uint) {
	word, bit := w.at/64, w.at%64
	w.words[word] |= v << bit
	if bit+width > 64 {
		w.words[word+1] |= v >> (64 - bit)
	}
	w.at += width
}

type bitReader struct {
	words encoded
	at    uint
}

func (r *bitReader) get(width uint) uint64 {
	word, bit := r.at/64, r.at%64
	v := r.words[word] >> bit
	if bit+width > 64 {
		v |= r.words[word+1] << (64 - bit)
	}
	r.at += width
	return v & (1<<width - 1)
}

// The widths. What a phase does not use is zero, and is left out where the phase alone tells.
const (
	phaseBits    = 3
	fetchBits    = 20 // the rest of a dispatcher
	producerBits = 5  // and two sets of lanes
	laneBits     = 20
	bounceBits   = 3 // and a set of lanes
	nodeBits     = 8
	dueBits      = 2
	faultBits    = 2
)

func bit(b bool, at uint) uint32 {
	if b {
		return 1 << at
	}
	return 0
}

func packDispatcher(d *dispatcher) uint32 {
	return uint32(d.phase) | (uint32(d.answer)|uint32(d.by)<<2|bit(d.arms, 4)|bit(d.disarms, 5)|bit(d.clean, 6)|bit(d.void, 7)|bit(d.passed, 8)|
		bit(d.fresh, 9)|uint32(d.newer)<<10|uint32(d.rank)<<12|uint32(d.tag)<<14|uint32(d.more)<<16|bit(d.alone, 18)|bit(d.old, 19))<<phaseBits
}

func unpackDispatcher(v uint32) dispatcher {
	r := v >> phaseBits
	return dispatcher{phase: phase(v & (1<<phaseBits - 1)), answer: answer(r & 3), by: token(r >> 2 & 3), arms: r>>4&1 != 0, disarms: r>>5&1 != 0,
		clean: r>>6&1 != 0, void: r>>7&1 != 0, passed: r>>8&1 != 0, fresh: r>>9&1 != 0, newer: uint8(r >> 10 & 3), rank: uint8(r >> 12 & 3),
		tag: uint8(r >> 14 & 3), more: Tags(r >> 16 & 3), alone: r>>18&1 != 0, old: r>>19&1 != 0}
}

func packProducer(p *producer) uint32 {
	return uint32(p.phase) | bit(p.locked, 3) | bit(p.all, 4) | uint32(p.tells)<<producerBits | uint32(p.seen)<<producerBits<<maxLanes
}

func unpackProducer(v uint32) producer {
	return producer{phase: producerPhase(v & 7), locked: v>>3&1 != 0, all: v>>4&1 != 0, tells: laneSet(v >> producerBits & 15), seen: laneSet(v >> producerBits >> maxLanes & 15)}
}

func packLane(l *lane) uint32 {
	return bit(l.armed, 0) | bit(l.settled, 1) | bit(l.empty, 2) | bit(l.contended, 3) | bit(l.stuck, 4) | bit(l.scout, 5) |
		uint32(l.settle)<<6 | uint32(l.directed)<<8 | uint32(l.broadcast)<<10 | uint32(l.tokens[0])<<12 | uint32(l.tokens[1])<<14 | uint32(l.bounce)<<bounceAt | bit(l.stale, 18) | bit(l.row, 19) |
		(bit(l.stay, 0)|uint32(l.rank)<<1|uint32(l.tells)<<3)<<laneBits
}

func unpackLane(v uint32) lane {
	b := v >> laneBits
	return lane{armed: v&1 != 0, settled: v>>1&1 != 0, empty: v>>2&1 != 0, contended: v>>3&1 != 0, stuck: v>>4&1 != 0, scout: v>>5&1 != 0,
		settle: settlePhase(v >> 6 & 3), directed: uint8(v >> 8 & 3), broadcast: uint8(v >> 10 & 3),
		stale: v>>18&1 != 0, row: v>>19&1 != 0, tokens: [maxOfLane]token{token(v >> 12 & 3), token(v >> 14 & 3)}, bounce: bouncePhase(v >> bounceAt & 3),
		stay: b&1 != 0, rank: uint8(b >> 1 & 3), tells: laneSet(b >> 3 & 15)}
}

const bounceAt = 16

func packNode(n node) uint64 {
	return uint64(n.status) | uint64(n.settler)<<4 | uint64(bit(n.sweep, 7))
}

func unpackNode(v uint64) node {
	return node{status: nodeStatus(v & 15), settler: settlerPhase(v >> 4 & 7), sweep: v>>7&1 != 0}
}

// codec encodes the states of a configuration.
type codec struct {
	m     *machine
	perms []permutation
	set   uint // bits of a set of lanes
	words int  // so many of an encoded state are in use
}

// permutation says which node takes the place of which, and thereby lanes and dispatchers.
type permutation struct {
	nodes       [maxNodes]int
	lanes       [maxLanes]int
	dispatchers [maxDispatchers]int
}

func newCodec(m *machine) *codec {
	c := &codec{m: m}
	c.permute(nil)
	n := dueBits*tagCount + 2*faultBits + (producerBits+2*m.lanes)*len(m.cfg.Producers) + nodeBits*len(m.cfg.Nodes)
	n += m.lanes*(laneBits+bounceBits+m.lanes) + m.first[m.lanes]*(phaseBits+fetchBits)
	c.set = uint(m.lanes)
	c.words = int(n+63) / 64
	return c
}

// permute adds all permutations of nodes that have the same lanes.
func (c *codec) permute(nodes []int) {
	all := c.m.cfg.Nodes
	if len(nodes) < len(all) {
		for n := range all {
			if !slices.Contains(nodes, n) && c.m.alike(n, len(nodes)) {
				c.permute(append(slices.Clip(nodes), n))
			}
		}
		return
	}
	var p permutation
	l, d := 0, 0
	for to, from := range nodes {
		p.nodes[to] = from
		for lane := range c.m.lanes {
			if c.m.node[lane] != from {
				continue
			}
			p.lanes[l] = lane
			l++
			for dispatcher := c.m.first[lane]; dispatcher < c.m.first[lane+1]; dispatcher++ {
				p.dispatchers[d] = dispatcher
				d++
			}
		}
	}
	c.perms = append(c.perms, p)
}

// move returns the set with its lanes in their new places.
func (p *permutation) move(set laneSet, lanes int) (moved laneSet) {
	if set == 0 {
		return 0
	}
	for to := range lanes {
		if set&(1<<p.lanes[to]) != 0 {
			moved |= 1 << to
		}
	}
	return moved
}

// forget drops what no step will ask for any more.
func (m *machine) forget(s *state) {
	for d := range m.first[m.lanes] {
		self := &s.dispatchers[d]
		if !self.inside() {
			continue
		}
		if self.by == check {
			self.by = plain // it has begun
		}
		self.old = self.old && (self.arms || self.disarms)
		self.void, self.alone = self.void && self.arms, self.alone && self.arms
		settled := self.phase == reported || self.phase == foundNone || self.phase == answered
		if settled && s.faults == 0 && self.more == 0 && self.answer != failed {
			self.by = noToken // nothing to chain
		}
		if settled && (self.more != 0 || self.answer == contended || self.answer == failed) {
			self.newer, self.clean, self.passed = 0, false, false // nothing is paid
		}
	}
}

// encode returns the representative of the state.
func (c *codec) encode(state *state) encoded {
	copied := *state
	s := &copied
	if !c.m.cfg.Split {
		c.m.forget(s)
	}
	if len(c.perms) == 1 {
		return c.write(s, &c.perms[0])
	}
	var keys [maxNodes]uint64
	for n := range c.m.cfg.Nodes {
		keys[n] = c.key(s, n)
	}
	var least encoded
	first := true
	for i := range c.perms {
		p := &c.perms[i]
		if !c.ordered(&keys, p) {
			continue
		}
		e := c.write(s, p)
		if first || slices.Compare(e[:], least[:]) < 0 {
			least, first = e, false
		}
	}
	return least
}

// key orders the nodes of a state: what does not refer to other nodes, mixed. Only nodes with equal keys are tried in
// each order.
func (c *codec) key(s *state, n int) uint64 {
	m := c.m
	const odd = 0x9E3779B97F4A7C15
	h := packNode(s.nodes[n]) + 1
	for l := range m.lanes {
		if m.node[l] != n {
			continue
		}
		lane := s.lanes[l]
		lane.tells = 0
		h = (h ^ uint64(packLane(&lane))) * odd
		h ^= h >> 29
		sum := uint64(0)
		for d := m.first[l]; d < m.first[l+1]; d++ {
			v := (uint64(packDispatcher(&s.dispatchers[d])) + 1) * odd
			sum += v ^ v>>31
		}
		h = (h ^ sum) * odd
		h ^= h >> 32
	}
	return h
}

func (c *codec) ordered(keys *[maxNodes]uint64, p *permutation) bool {
	all := c.m.cfg.Nodes
	for i := range len(all) - 1 {
		for j := i + 1; j < len(all); j++ {
			if c.m.alike(i, j) && keys[p.nodes[i]] > keys[p.nodes[j]] {
				return false
			}
		}
	}
	return true
}

func (c *codec) write(s *state, p *permutation) encoded {
	m := c.m
	var w bitWriter
	for t := range tagCount {
		w.put(uint64(s.due[t]), dueBits)
	}
	w.put(uint64(s.faults), faultBits)
	w.put(uint64(s.losses), faultBits)
	c.writeProducers(&w, s, p)
	for n := range m.cfg.Nodes {
		w.put(packNode(s.nodes[p.nodes[n]]), nodeBits)
	}
	for l := range m.lanes {
		lane := s.lanes[p.lanes[l]]
		lane.tells = p.move(lane.tells, m.lanes)
		v := packLane(&lane)
		w.put(uint64(v&(1<<laneBits-1)), laneBits)
		if lane.bounce != noBounce {
			w.put(uint64(v>>laneBits), bounceBits+c.set)
		}
		c.writeDispatchers(&w, s, p, l)
	}
	return w.words
}

func (c *codec) writeProducers(w *bitWriter, s *state, p *permutation) {
	m := c.m
	var packed [maxProducers]uint32
	for i := range m.cfg.Producers {
		self := s.producers[i]
		self.seen, self.tells = p.move(self.seen, m.lanes), p.move(self.tells, m.lanes)
		packed[i] = packProducer(&self)
		for j := i; j > 0 && m.cfg.Producers[j-1] == m.cfg.Producers[j] && packed[j-1] > packed[j]; j-- {
			packed[j-1], packed[j] = packed[j], packed[j-1]
		}
	}
	for i := range m.cfg.Producers {
		w.put(uint64(packed[i]&(1<<maxLanes<<producerBits-1)), producerBits+c.set)
		w.put(uint64(packed[i]>>maxLanes>>producerBits), c.set)
	}
}

func (c *codec) writeDispatchers(w *bitWriter, s *state, p *permutation, l int) {
	m := c.m
	var packed [maxDispatchers]uint32
	first, end := m.first[l], m.first[l+1]
	for d := first; d < end; d++ {
		packed[d] = packDispatcher(&s.dispatchers[p.dispatchers[d]])
		for j := d; j > first && packed[j-1] > packed[j]; j-- {
			packed[j-1], packed[j] = packed[j], packed[j-1]
		}
	}
	for d := first; d < end; d++ {
		w.put(uint64(packed[d]&(1<<phaseBits-1)), phaseBits)
		if hasFetch(phase(packed[d] & (1<<phaseBits - 1))) {
			w.put(uint64(packed[d]>>phaseBits), fetchBits)
		}
	}
}

// hasFetch reports whether a dispatcher in the phase has more to it than that.
func hasFetch(p phase) bool { return p >= begunFetch && p <= answered }

func (c *codec) decode(e encoded) state {
	m := c.m
	s := m.initial()
	r := bitReader{words: e}
	for t := range tagCount {
		s.due[t] = uint8(r.get(dueBits))
	}
	s.faults = uint8(r.get(faultBits))
	s.losses = uint8(r.get(faultBits))
	for i := range m.cfg.Producers {
		v := r.get(producerBits + c.set)
		s.producers[i] = unpackProducer(uint32(v | r.get(c.set)<<maxLanes<<producerBits))
	}
	for n := range m.cfg.Nodes {
		s.nodes[n] = unpackNode(r.get(nodeBits))
	}
	for l := range m.lanes {
		v := uint32(r.get(laneBits))
		if bouncePhase(v>>bounceAt&3) != noBounce {
			v |= uint32(r.get(bounceBits+c.set)) << laneBits
		}
		s.lanes[l] = unpackLane(v)
		for d := m.first[l]; d < m.first[l+1]; d++ {
			v := uint32(r.get(phaseBits))
			if hasFetch(phase(v)) {
				v |= uint32(r.get(fetchBits)) << phaseBits
			}
			s.dispatchers[d] = unpackDispatcher(v)
		}
	}
	return s
}
