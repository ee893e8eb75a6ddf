package model

// This file answers: what becomes of a notification, and of a token that nobody of the lane can take?

func (m *machine) laneSteps(s *state, l int) {
	lane := &s.lanes[l]
	if !s.nodes[m.node[l]].listens() {
		return
	}
	if lane.inFlight > 0 {
		after := *s
		m.signal(&after, l)
		if lane.inFlight == many {
			m.may(NotificationArrives, l, &after)
		}
		after.lanes[l].inFlight--
		m.add(NotificationArrives, l, &after)
	}
	switch lane.bounce {
	case noBounce:
		m.beginBounce(s, l)
	case bounceBegun:
		m.chooseBounce(s, l)
	case bounceChose:
		m.commitBounce(s, l)
	}
}

// beginBounce takes the tokens, and a sequence number, once everybody of the lane is in a handler. One statement
// does for all the tokens: it looks at what is due, and whoever it calls passes on the rest.
func (m *machine) beginBounce(s *state, l int) {
	lane := &s.lanes[l]
	begin := m.add
	if m.cfg.Absences && lane.armed && lane.tokens == 0 {
		begin = m.may
	} else if lane.tokens == 0 || lane.stuck {
		return
	}
	if m.parked(s, l) >= 0 || !m.keeps(Bounce) {
		return
	}
	if m.keeps(BounceAfterFetch) && m.present(s, l, -1) {
		return
	}
	after := *s
	self := &after.lanes[l]
	self.tokens, self.bounce = 0, bounceBegun
	self.settled, self.empty = false, false
	self.rank = m.number(s, l)
	begin(BounceBegins, l, &after)
}

// chooseBounce reads what is due for the lane, and for each tag of it who else is armed. Nothing due: the token has
// served.
func (m *machine) chooseBounce(s *state, l int) {
	m.oneOfEach(s, m.dueTags(s, l, -1), l, func(set laneSet, short bool) {
		after := *s
		lane := &after.lanes[l]
		lane.bounce, lane.tells, lane.stay = bounceChose, set, short
		m.add(BounceChooses, l, &after)
	})
}

// commitBounce tells them, and disarms the lane. What has nowhere to go stays until somebody of the lane is back.
// The answer changes the node's memory only, towards more looks; so it needs no step of its own.
func (m *machine) commitBounce(s *state, l int) {
	after := *s
	lane := &after.lanes[l]
	m.notify(&after, lane.tells)
	if m.keeps(BounceDisarms) {
		m.write(&after, l, lane.rank, false)
	} else {
		m.closeRanks(&after, l, lane.rank)
	}
	stay := lane.stay
	lane.bounce, lane.tells, lane.stay, lane.rank = noBounce, 0, false, 0
	if stay {
		arrived := lane.tokens > 0 // while the bounce was under way: it bounces in its turn
		m.signal(&after, l)
		lane.stuck = !arrived || !m.keeps(BounceAgain)
	}
	m.add(BounceCommits, l, &after)
}
