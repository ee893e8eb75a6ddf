package model

// This file answers: what becomes of a notification, and of a token that nobody of the lane can take?

func (m *machine) laneSteps(s *state, l int) {
	lane := &s.lanes[l]
	if !s.nodes[m.node[l]].runs() {
		return
	}
	m.arrives(s, l, sole)
	m.arrives(s, l, plain)
	m.settleScout(s, l)
	switch lane.bounce {
	case noBounce:
		m.beginBounce(s, l)
		m.disarmUnused(s, l)
	case bounceBegun:
		m.chooseBounce(s, l)
		m.failBounce(s, l)
	case bounceChose:
		m.commitBounce(s, l)
		m.failBounce(s, l)
	}
}

// arrives is the arrival of one of the notifications that are under way: to this lane alone, or to all.
func (m *machine) arrives(s *state, l int, t token) {
	after := *s
	n := &after.lanes[l].directed
	if t == plain {
		n = &after.lanes[l].broadcast
	}
	if *n == 0 {
		return
	}
	m.signal(&after, l, t)
	if *n == many {
		m.may(NotificationArrives, l, &after)
	}
	*n--
	m.add(NotificationArrives, l, &after)
}

// beginBounce takes the tokens that nobody else was told of, and a sequence number, once everybody of the lane is in a
// handler. One statement does for all the tokens: it looks at what is due, and whoever it calls passes on the rest.
func (m *machine) beginBounce(s *state, l int) {
	if lane := &s.lanes[l]; !lane.hasSole() || lane.stuck || m.parked(s, l) >= 0 || !m.keeps(Bounce) {
		return
	}
	if m.keeps(BounceAfterFetch) && m.present(s, l, -1) {
		return
	}
	after := *s
	self := &after.lanes[l]
	m.takeSole(&after, l)
	self.bounce = bounceBegun
	m.unsettle(&after, l, -1)
	self.rank = m.number(s, l)
	m.add(BounceBegins, l, &after)
}

// disarmUnused is a lane that is told of work which nobody of it is here to take, again and again: it asks for silence.
func (m *machine) disarmUnused(s *state, l int) {
	if !m.cfg.Absences || !s.lanes[l].armed || m.present(s, l, -1) || s.nodes[m.node[l]].status != live {
		return
	}
	after := *s
	self := &after.lanes[l]
	self.bounce, self.tells, self.stay = bounceChose, 0, false // no more than its write
	m.unsettle(&after, l, -1)
	self.rank = m.number(s, l)
	m.may(DisarmUnused, l, &after)
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

// commitBounce tells them, and disarms the lane. What has nowhere to go stays until somebody of the lane is back, or
// another token comes. The answer changes the node's memory only, towards more looks; so it needs no step of its own.
func (m *machine) commitBounce(s *state, l int) {
	after := *s
	m.executeBounce(&after, l)
	lane := &after.lanes[l]
	stay := lane.stay
	lane.bounce, lane.tells, lane.stay = noBounce, 0, false
	if stay {
		arrived := lane.hasSole() // while the bounce was under way: it bounces in its turn
		m.signal(&after, l, sole)
		lane.stuck = !arrived || !m.keeps(BounceAgain)
	}
	m.add(BounceCommits, l, &after)
}

func (m *machine) executeBounce(s *state, l int) {
	lane := &s.lanes[l]
	m.notify(s, lane.tells)
	rank := lane.rank
	lane.rank = 0
	if m.keeps(BounceDisarms) {
		lane.stale = lane.stale && rank == 0
		m.write(s, l, rank, false)
	} else {
		m.closeRanks(s, l, rank)
	}
}

// failBounce is a bounce of which nobody hears an answer, whatever became of it. Its token is there again.
func (m *machine) failBounce(s *state, l int) {
	if s.faults == 0 {
		return
	}
	for _, committed := range []bool{false, true} {
		after := *s
		lane := &after.lanes[l]
		switch {
		case !committed:
			rank := lane.rank
			lane.rank = 0
			m.closeRanks(&after, l, rank)
		case lane.bounce == bounceChose:
			m.executeBounce(&after, l)
		default:
			continue
		}
		after.faults--
		lane.bounce, lane.tells, lane.stay = noBounce, 0, false
		m.signal(&after, l, sole)
		m.may(BounceFails, l, &after)
	}
}
