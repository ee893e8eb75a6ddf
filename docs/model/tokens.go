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

func (l *lane) hasSole() bool { return l.tokens[0] == sole || l.tokens[1] == sole }

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
	lane := &s.lanes[l]
	lane.empty = false
	size := uint8(m.first[l+1] - m.first[l])
	m.ofLane(s, l, func(d *dispatcher) {
		d.clean = false
		d.newer = min(d.newer+1, size)
	})
	if lane.stored() == size {
		oldest := lane.tokens[0]
		copy(lane.tokens[:size-1], lane.tokens[1:size])
		lane.tokens[size-1] = t
		if oldest == sole && m.keeps(OverflowKeepsSole) {
			lane.tokens[0] = sole
		}
	} else {
		lane.tokens[lane.stored()] = t
	}
	lane.stuck = lane.stuck && t != sole && lane.hasSole()
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
	lane := &s.lanes[l]
	n := lane.stored()
	m.ofLane(s, l, func(d *dispatcher) { d.newer = min(d.newer, n) })
	lane.stuck = lane.stuck && lane.hasSole()
}

// handBack returns a token whose fetch got no answer. It is older than those in store.
func (m *machine) handBack(s *state, l int, t token, fresh bool) {
	lane := &s.lanes[l]
	lane.empty = false
	lane.stuck = lane.stuck && t != sole
	if int(lane.stored()) == m.first[l+1]-m.first[l] {
		if t == sole && m.keeps(OverflowKeepsSole) {
			lane.tokens[0] = sole
		}
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

// takeSole removes all tokens that nobody else was told of.
func (m *machine) takeSole(s *state, l int) {
	lane := &s.lanes[l]
	if lane.tokens[1] == sole {
		lane.tokens[1] = noToken
	}
	if lane.tokens[0] == sole {
		lane.tokens = [maxOfLane]token{lane.tokens[1]}
	}
	m.fewer(s, l)
}
