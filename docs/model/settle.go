package model

// This file answers: how does a lane become sure that there is nothing for it?
//
// Settling belongs to the lane: one dispatcher does it at a time. It waits for K, and looks again in a snapshot
// that is younger than the grant.

// settling reports whether somebody of the lane settles.
func (m *machine) settling(s *state, l int) bool {
	return m.any(s, l, func(d *dispatcher) bool { return d.phase == waitingK || d.settling })
}

func (m *machine) beginSettle(s *state, d int) {
	l := m.lane[d]
	self := &s.dispatchers[d]
	self.phase = waitingK
	*self = dispatcher{phase: waitingK, duty: true, remote: !m.parkedMatch(s, l)}
	if !m.keeps(SettleSnapshot) {
		self.more = m.freeTags(s, l)
	}
}

// settle is what can happen to a dispatcher that waits for K.
func (m *machine) settle(s *state, d int) {
	l := m.lane[d]
	if s.lanes[l].tokens > 0 { // it ends the wait, and looks at once
		m.takeToken(s, d)
	}
	if m.keeps(ScoutWhileWaiting) && m.freeTags(s, l) != 0 && !m.exclusiveFree(s) {
		m.fetch(s, d, SettleScouts, true)
	}
	if m.exclusiveFree(s) {
		m.settleClaim(s, d)
	}
}

// settleClaim is the grant of K and the claim after it. Whatever others do between the two they may as well do
// before the grant, when the wait has the same effect on them; so it is one step. Finding nothing it commits at
// once: whoever tries K in between fails, as it would while the wait lasts.
func (m *machine) settleClaim(s *state, d int) {
	l := m.lane[d]
	free := m.freeTags(s, l)
	if !m.keeps(SettleSnapshot) {
		free &= s.dispatchers[d].more
	}
	for t := range tagCount {
		if free&(1<<t) != 0 {
			after := *s
			after.due[t]--
			self := &after.dispatchers[d]
			self.phase, self.settling, self.answer, self.tag, self.more = claimed, true, found, uint8(t), 0
			m.add(SettleClaims, d, &after)
		}
	}
	if free != 0 {
		return
	}
	after := *s
	self := &after.dispatchers[d]
	self.phase, self.settling, self.clean, self.duty, self.remote, self.more = answered, true, true, false, false, 0
	if m.lockedTags(s, d)&m.takes[l] != 0 && m.keeps(Contended) {
		self.answer, self.clean = contended, false
	}
	m.add(SettleClaims, d, &after)
}

// takeOver: nobody of the lane settles, because who did left with an item, or because the lane was asked to settle
// again. One of the parked does.
func (m *machine) takeOver(s *state, d int) {
	l := m.lane[d]
	if s.lanes[l].settled || m.settling(s, l) || !m.keeps(TakeOver) || !m.keeps(Settle) || !m.keeps(SkipByMemory) || s.nodes[m.node[l]] != live {
		return
	}
	after := *s
	m.beginSettle(&after, d)
	m.add(SettleTakenOver, d, &after)
}

// lookAgain is the scout of a lane that met rows which others had locked. It looks until it meets none; the looks
// that say the same again are left out.
func (m *machine) lookAgain(s *state, d int) {
	l := m.lane[d]
	if !s.lanes[l].contended {
		return
	}
	if m.freeTags(s, l) != 0 || m.lockedTags(s, d)&m.takes[l] == 0 {
		m.fetch(s, d, ScoutLooks, true)
	}
}
