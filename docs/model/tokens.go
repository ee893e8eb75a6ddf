package model

// This file answers: what becomes of the tokens of a lane?

func (l *lane) stored() (n uint8) {
	for _, t := range l.tokens {
		if t != noToken {
			n++
		}
	}
	return n
}

func (l *lane) hasSole() bool { return l.tokens[0].isSole() || l.tokens[1].isSole() }

// ofLane calls visit with each dispatcher of the lane that is inside a fetch.
func (m *machine) ofLane(s *state, l int, visit func(*dispatcher)) {
	for d := m.first[l]; d < m.first[l+1]; d++ {
		if s.dispatchers[d].inside() {
			visit(&s.dispatchers[d])
		}
	}
}

// signal gives the lane a token, which is newer than all. If everybody has been called the oldest goes; but what it was
// for, nobody else may know.
func (m *machine) signal(s *state, l int, t token) {
	m.hears(s, l)
	lane := &s.lanes[l]
	size := uint8(m.first[l+1] - m.first[l])
	m.ofLane(s, l, func(d *dispatcher) { d.newer = min(d.newer+1, size) })
	if lane.stored() < size {
		lane.tokens[lane.stored()] = t
		return
	}
	oldest := lane.tokens[0]
	copy(lane.tokens[:size-1], lane.tokens[1:size])
	lane.tokens[size-1] = t
	m.inherit(&lane.tokens[0], oldest)
}

// hears: there may be due work that a look under way is too old to have seen.
func (m *machine) hears(s *state, l int) {
	s.lanes[l].empty = false
	m.ofLane(s, l, func(d *dispatcher) { d.clean = false })
}

// inherit leaves what a token that goes was to the one that stays.
func (m *machine) inherit(stays *token, goes token) {
	if goes.isSole() && m.keeps(OverflowKeepsSole) {
		*stays = max(*stays, goes)
	}
}

// take takes the oldest token.
func (m *machine) take(s *state, l int) token {
	lane := &s.lanes[l]
	t := lane.tokens[0]
	lane.tokens = [maxOfLane]token{lane.tokens[1]}
	m.fewer(s, l)
	return t
}

// fewer is called when tokens were taken out.
func (m *machine) fewer(s *state, l int) {
	n := s.lanes[l].stored()
	m.ofLane(s, l, func(d *dispatcher) { d.newer = min(d.newer, n) })
}

// handBack returns a token whose fetch got no answer. It is older than those in store.
func (m *machine) handBack(s *state, l int, t token, fresh bool) {
	lane := &s.lanes[l]
	lane.empty = false
	if int(lane.stored()) == m.first[l+1]-m.first[l] {
		m.inherit(&lane.tokens[0], t)
		return
	}
	copy(lane.tokens[1:], lane.tokens[:])
	lane.tokens[0] = t
	if fresh {
		m.ofLane(s, l, func(d *dispatcher) { d.newer++ })
	}
}

// pay removes the tokens that are older than a fetch which left nothing due.
func (m *machine) pay(s *state, l int, newer uint8) {
	lane := &s.lanes[l]
	for lane.stored() > newer {
		lane.tokens = [maxOfLane]token{lane.tokens[1]}
	}
	m.fewer(s, l)
}

// takeSole removes all tokens that nobody else was told of, and returns how they go on.
func (m *machine) takeSole(s *state, l int) bounce {
	lane := &s.lanes[l]
	how := toOne
	var rest [maxOfLane]token
	at := 0
	for _, t := range lane.tokens {
		if t == passed && m.keeps(HopLimit) {
			how = toAll
		}
		if !t.isSole() {
			rest[at] = t
			at++
		}
	}
	lane.tokens = rest
	m.fewer(s, l)
	return how
}
