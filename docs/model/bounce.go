package model

// This file answers: what becomes of a notification, and of a token that nobody of the lane can take?

func (m *machine) laneSteps(s *state, l int) {
	lane := &s.lanes[l]
	if !s.nodes[m.node[l]].runs() {
		return
	}
	if lane.retired {
		m.rowGoes(s, l)
	}
	m.arrives(s, l, sole)
	m.arrives(s, l, passed)
	m.arrives(s, l, plain)
	m.standsBy(s, l)
	m.settleScout(s, l)
	m.retryAbsent(s, l)
	m.beginBounce(s, l)
	m.sayBounce(s, l)
	m.failBounce(s, l)
	m.disarmUnused(s, l)
	m.retire(s, l)
}

// arrives is the arrival of one of the notifications that are under way: to this lane alone, or to all.
func (m *machine) arrives(s *state, l int, t token) {
	lane := &s.lanes[l]
	n := *lane.underWay(t)
	if n == 0 || lane.retired && lane.said != noBounce {
		return
	}
	after := *s
	if lane.retired {
		m.unknown(&after, l, t)
	} else {
		m.signal(&after, l, t)
	}
	if n == many {
		m.may(NotificationArrives, l, &after)
	}
	*after.lanes[l].underWay(t)--
	m.add(NotificationArrives, l, &after)
}

// underWay returns how many notifications of a kind are.
func (l *lane) underWay(t token) *uint8 {
	switch t {
	case sole:
		return &l.directed
	case passed:
		return &l.handed
	}
	return &l.broadcast
}

// unknown is a notification for a lane that has retired: the others of the node are told, and all other nodes.
func (m *machine) unknown(s *state, l int, t token) {
	if t == plain || !m.keeps(UnknownTellsAll) {
		return
	}
	m.tellOwn(s, l)
	s.lanes[l].said = toAll
}

// tellOwn gives a token to each lane of the node, as if it had been told with all others.
func (m *machine) tellOwn(s *state, l int) {
	m.each(m.of[m.node[l]], func(own int) {
		if !s.lanes[own].retired {
			m.signal(s, own, plain)
		}
	})
}

// standsBy is a notification to a lane that others have been told of as well, and are to come first: it looks later, unless
// a look that began after it left nothing.
func (m *machine) standsBy(s *state, l int) {
	lane := &s.lanes[l]
	if lane.standBys > 0 {
		after := *s
		after.lanes[l].standBys--
		if lane.retired {
			if lane.said == noBounce {
				m.unknown(&after, l, sole)
				m.add(NotificationArrives, l, &after)
			}
		} else {
			m.hears(&after, l)
			m.ofLane(&after, l, func(d *dispatcher) { d.stands = false })
			after.lanes[l].standsBy = true
			m.add(NotificationArrives, l, &after)
		}
	}
	if lane.standsBy {
		after := *s
		after.lanes[l].standsBy = false
		m.signal(&after, l, sole)
		m.add(StandByEnds, l, &after)
	}
}

// beginBounce takes the tokens that nobody else was told of, once everybody of the lane is in a handler. Whoever comes
// back looks by himself. One statement does for all the tokens: it looks at what is due, and whoever it calls passes on
// the rest.
func (m *machine) beginBounce(s *state, l int) {
	lane := &s.lanes[l]
	if !lane.hasSole() || m.parked(s, l) >= 0 || !m.keeps(Bounce) || m.keepsTokens(s, l) {
		return
	}
	if m.keeps(BounceAfterFetch) && m.present(s, l, -1) {
		return
	}
	after := *s
	how := m.takeSole(&after, l)
	if m.keeps(BounceAgain) || lane.pending == noBounce && lane.said == noBounce {
		after.lanes[l].pending = max(after.lanes[l].pending, how)
	}
	m.add(BounceBegins, l, &after)
}

// keepsTokens reports whether there is nobody else to pass a token on to.
func (m *machine) keepsTokens(s *state, l int) bool {
	n := m.node[l]
	return s.nodes[n].alone && (len(m.cfg.Nodes[n]) == 1 || !m.keeps(AloneAmongLanes))
}

// sayBounce is the statement that passes on what is pending. It reads what is due for the lane, and for each tag of it who
// else is armed: one of them is told. Nothing due: the token has served. Nobody armed: whoever arms from here on looks
// after that. What was passed on before goes to all, and to the other lanes here.
func (m *machine) sayBounce(s *state, l int) {
	lane := &s.lanes[l]
	if lane.said != noBounce {
		after := *s
		m.executeBounce(&after, l)
		after.lanes[l].said, after.lanes[l].tells = noBounce, 0
		m.add(BounceCommits, l, &after)
		return
	}
	switch noRow := !lane.row && m.rowsGo(); {
	case lane.pending == noBounce:
	case lane.pending == toAll || noRow:
		after := *s
		if lane.pending == toAll && m.keeps(HopTellsOwnLanes) || lane.pending == toOne && m.keeps(NoRowTellsOwn) {
			m.tellOwn(&after, l)
		}
		after.lanes[l].pending, after.lanes[l].said = noBounce, toAll
		m.add(BounceTells, l, &after)
	default:
		but := laneSet(1) << l
		if !m.keeps(BounceToOwnLanes) {
			but = m.of[m.node[l]]
		}
		m.oneOfEach(s, m.dueTags(s, l, -1), but, func(set laneSet) {
			after := *s
			lane := &after.lanes[l]
			lane.pending, lane.said, lane.tells = noBounce, toOne, set
			if set == 0 && m.keeps(BounceAgain) && !m.cfg.Split {
				lane.said = noBounce // nobody can see it end
			}
			m.add(BounceChooses, l, &after)
		})
	}
}

func (m *machine) executeBounce(s *state, l int) {
	lane := &s.lanes[l]
	if lane.said == toOne {
		m.notify(s, lane.tells, passed)
		return
	}
	for other := range m.lanes {
		if s.lanes[other].armed { // somebody waits
			m.tellOthers(s, m.node[l])
			return
		}
	}
}

// failBounce is a bounce of which nobody hears an answer, whatever became of it. It will be said again.
func (m *machine) failBounce(s *state, l int) {
	if s.faults == 0 || s.lanes[l].said == noBounce {
		return
	}
	for _, committed := range []bool{false, true} {
		after := *s
		lane := &after.lanes[l]
		if committed {
			m.executeBounce(&after, l)
		}
		after.faults--
		lane.pending = max(lane.pending, lane.said)
		lane.said, lane.tells = noBounce, 0
		m.may(BounceFails, l, &after)
	}
}

// disarmUnused is a lane that is told of work which nobody of it is here to take, again and again: it asks for silence.
func (m *machine) disarmUnused(s *state, l int) {
	lane := &s.lanes[l]
	after := *s
	self := &after.lanes[l]
	if lane.unused {
		m.write(&after, l, lane.rank, false)
		self.unused, self.rank = false, 0
		m.add(DisarmCommits, l, &after)
		return
	}
	if !m.cfg.Absences || !lane.armed || lane.retired || m.present(s, l, -1) || s.nodes[m.node[l]].status != live {
		return
	}
	self.unused, self.hot = true, m.cfg.StayArmed
	self.rank = m.number(s, l)
	m.unsettle(&after, l, -1)
	m.may(DisarmUnused, l, &after)
}

// retire drops a lane that nobody has used for a while. Its row goes later, without a word to anybody.
func (m *machine) retire(s *state, l int) {
	lane := &s.lanes[l]
	if s.lapses == 0 || lane.retired || lane.unused || s.nodes[m.node[l]].status != live || m.present(s, l, -1) || lane.hasSole() && !m.keepsTokens(s, l) {
		return
	}
	after := *s
	after.lapses--
	self := &after.lanes[l]
	*self = before(lane)
	for d := m.first[l]; d < m.first[l+1]; d++ {
		after.dispatchers[d] = dispatcher{phase: gone}
	}
	m.may(LaneRetires, l, &after)
}

// before is what the others know of a lane that has retired, and what it has to say.
func before(l *lane) lane {
	return lane{armed: l.armed, row: l.row, stale: l.stale, directed: l.directed, handed: l.handed, standBys: l.standBys, broadcast: l.broadcast,
		retired: true, pending: l.pending, said: l.said, tells: l.tells}
}

// rowGoes is the fallback, which deletes the rows of lanes that there are no more.
func (m *machine) rowGoes(s *state, l int) {
	if !s.lanes[l].row {
		return
	}
	after := *s
	after.lanes[l].armed, after.lanes[l].row = false, false
	m.may(LaneRowGoes, l, &after)
}
