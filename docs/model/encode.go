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
const maxWords = 5

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

// The widths. What a phase does not use is zero, and is left out where the phase alone tells; so is what no state of the
// configuration has.
const (
	phaseBits    = 3
	fetchBits    = 21 // the rest of a dispatcher
	producerBits = 5  // and two sets of lanes
	laneBits     = 27
	rareBits     = 6 // of a lane, with stand-bys, or rows that go
	bounceBits   = 2 // of a lane that says something, or writes: and a set of lanes
	nodeBits     = 9
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
		bit(d.fresh, 9)|uint32(d.newer)<<10|uint32(d.rank)<<12|uint32(d.tag)<<14|uint32(d.more)<<16|bit(d.lastOne, 18)|bit(d.old, 19)|bit(d.stands, 20))<<phaseBits
}

func unpackDispatcher(v uint32) dispatcher {
	r := v >> phaseBits
	return dispatcher{phase: phase(v & (1<<phaseBits - 1)), answer: answer(r & 3), by: token(r >> 2 & 3), arms: r>>4&1 != 0, disarms: r>>5&1 != 0,
		clean: r>>6&1 != 0, void: r>>7&1 != 0, passed: r>>8&1 != 0, fresh: r>>9&1 != 0, newer: uint8(r >> 10 & 3), rank: uint8(r >> 12 & 3),
		tag: uint8(r >> 14 & 3), more: Tags(r >> 16 & 3), lastOne: r>>18&1 != 0, old: r>>19&1 != 0, stands: r>>20&1 != 0}
}

func packProducer(p *producer) uint32 {
	return uint32(p.phase) | bit(p.locked, 3) | bit(p.all, 4) | uint32(p.tells)<<producerBits | uint32(p.seen)<<producerBits<<maxLanes
}

func unpackProducer(v uint32) producer {
	return producer{phase: producerPhase(v & 7), locked: v>>3&1 != 0, all: v>>4&1 != 0, tells: laneSet(v >> producerBits & 15), seen: laneSet(v >> producerBits >> maxLanes & 15)}
}

// packLane returns the bits of a lane: laneBits, rareBits, and, if it says something or writes, bounceBits and a set.
func packLane(l *lane) uint64 {
	common := bit(l.armed, 0) | bit(l.settled, 1) | bit(l.empty, 2) | bit(l.contended, 3) | bit(l.alone, 4) | bit(l.scout, 5) | bit(l.lastOne, 6) | bit(l.hot, 7) |
		uint32(l.settle)<<8 | uint32(l.directed)<<10 | uint32(l.handed)<<12 | uint32(l.broadcast)<<14 | uint32(l.tokens[0])<<16 | uint32(l.tokens[1])<<18 |
		uint32(l.pending)<<20 | uint32(l.said)<<saidAt | bit(l.unused, unusedAt) | bit(l.stale, 25) | bit(l.retired, 26)
	rare := uint32(l.standBys) | bit(l.standsBy, 2) | bit(l.row, 3)
	return uint64(common) | (uint64(rare)|(uint64(l.rank)|uint64(l.tells)<<bounceBits)<<rareBits)<<laneBits
}

const (
	saidAt   = 22
	unusedAt = 24
)

// says reports whether there is more to a lane than laneBits and rareBits.
func says(v uint64) bool { return v>>saidAt&3 != 0 || v>>unusedAt&1 != 0 }

func unpackLane(v uint64) lane {
	r := v >> laneBits
	b := r >> rareBits
	return lane{armed: v&1 != 0, settled: v>>1&1 != 0, empty: v>>2&1 != 0, contended: v>>3&1 != 0, alone: v>>4&1 != 0, scout: v>>5&1 != 0, lastOne: v>>6&1 != 0, hot: v>>7&1 != 0,
		settle: settlePhase(v >> 8 & 3), directed: uint8(v >> 10 & 3), handed: uint8(v >> 12 & 3), broadcast: uint8(v >> 14 & 3),
		tokens: [maxOfLane]token{token(v >> 16 & 3), token(v >> 18 & 3)}, pending: bounce(v >> 20 & 3), said: bounce(v >> saidAt & 3), unused: v>>unusedAt&1 != 0,
		stale: v>>25&1 != 0, retired: v>>26&1 != 0, standBys: uint8(r & 3), standsBy: r>>2&1 != 0, row: r>>3&1 != 0,
		rank: uint8(b & 3), tells: laneSet(b >> bounceBits & 15)}
}

func packNode(n node) uint64 {
	return uint64(n.status) | uint64(n.settler)<<4 | uint64(bit(n.alone, 7)|bit(n.greets, 8))
}

func unpackNode(v uint64) node {
	return node{status: nodeStatus(v & 15), settler: settlerPhase(v >> 4 & 7), alone: v>>7&1 != 0, greets: v>>8&1 != 0}
}

// codec encodes the states of a configuration.
type codec struct {
	m     *machine
	perms []permutation
	set   uint // bits of a set of lanes
	rare  uint // bits of a lane that some configurations have
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
	if m.cfg.Fanout > 1 || m.rowsGo() {
		c.rare = rareBits
	}
	n := dueBits*tagCount + 3*faultBits + (producerBits+2*m.lanes)*len(m.cfg.Producers) + nodeBits*len(m.cfg.Nodes)
	n += m.lanes*(laneBits+int(c.rare)+bounceBits+m.lanes) + m.first[m.lanes]*(phaseBits+fetchBits)
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
		self.stands = self.stands && s.lanes[m.lane[d]].standsBy
		self.old = self.old && (self.arms || self.disarms)
		self.void, self.lastOne = self.void && self.arms, self.lastOne && self.arms
		if self.by == passed && s.faults == 0 {
			self.by = sole // it makes no difference to what comes of it
		}
		settled := self.phase == reported || self.phase == foundNone || self.phase == answered
		if settled && s.faults == 0 && self.more == 0 && self.answer != failed {
			if self.answer != contended || !self.by.isSole() {
				self.by = noToken // nothing to chain
			}
		}
		if settled && (self.more != 0 || self.answer == contended || self.answer == failed) {
			self.newer, self.clean, self.passed, self.stands = 0, false, false, false // nothing is paid
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
		h = (h ^ packLane(&lane)) * odd
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
	w.put(uint64(s.lapses), faultBits)
	c.writeProducers(&w, s, p)
	for n := range m.cfg.Nodes {
		w.put(packNode(s.nodes[p.nodes[n]]), nodeBits)
	}
	for l := range m.lanes {
		lane := s.lanes[p.lanes[l]]
		lane.tells = p.move(lane.tells, m.lanes)
		v := packLane(&lane)
		w.put(v&(1<<laneBits-1), laneBits)
		w.put(v>>laneBits&(1<<c.rare-1), c.rare)
		if says(v) || s.nodes[p.nodes[m.node[l]]].status == sweptSoon {
			w.put(v>>(laneBits+rareBits), bounceBits+c.set)
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
	s.lapses = uint8(r.get(faultBits))
	for i := range m.cfg.Producers {
		v := r.get(producerBits + c.set)
		s.producers[i] = unpackProducer(uint32(v | r.get(c.set)<<maxLanes<<producerBits))
	}
	for n := range m.cfg.Nodes {
		s.nodes[n] = unpackNode(r.get(nodeBits))
	}
	for l := range m.lanes {
		v := r.get(laneBits)
		v |= r.get(c.rare) << laneBits
		if says(v) || s.nodes[m.node[l]].status == sweptSoon {
			v |= r.get(bounceBits+c.set) << (laneBits + rareBits)
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
