package model

// This file answers: how does a node go, planned or not?

import "math/bits"

func (m *machine) nodeSteps(s *state, n int) {
	m.settler(s, n)
	m.greet(s, n)
	switch s.nodes[n].status {
	case live:
		if m.count(s, leaving, leavingK, leavingOut, left) < m.cfg.Leaves {
			m.leave(s, n)
		}
		m.die(s, n)
		m.lose(s, n)
	case leaving:
		m.disarm(s, n)
		m.die(s, n)
	case leavingK:
		m.leaveGranted(s, n)
		m.die(s, n)
	case leavingOut:
		m.passOn(s, n)
		m.die(s, n)
	case deaf:
		m.listenAgain(s, n)
	case absent:
		m.join(s, n)
	case joining:
		m.listenAgain(s, n)
	case dead:
		m.sweep(s, n)
	case sweepingK:
		m.sweepGranted(s, n)
	case sweeping:
		m.sweepChooses(s, n)
	case sweptSoon:
		m.sweepCommits(s, n)
	}
}

// count returns how many nodes of the configuration have one of the statuses.
func (m *machine) count(s *state, statuses ...nodeStatus) (count int) {
	for n := range m.cfg.Nodes {
		for _, status := range statuses {
			if s.nodes[n].status == status {
				count++
			}
		}
	}
	return count
}

func (m *machine) each(set laneSet, visit func(l int)) {
	for ; set != 0; set &= set - 1 {
		visit(bits.TrailingZeros8(uint8(set)))
	}
}

// leave ends every wait. A fetch under way ends as it does.
func (m *machine) leave(s *state, n int) {
	after := *s
	after.nodes[n].status, after.nodes[n].settler = leaving, idle
	m.each(m.of[n], func(l int) {
		for d := m.first[l]; d < m.first[l+1]; d++ {
			self := &after.dispatchers[d]
			if !self.inside() {
				*self = dispatcher{phase: gone}
			}
		}
	})
	m.may(LeaveBegins, n, &after)
}

// disarm has a number newer than all: no fetch begins any more, but one that was cut short may yet write.
func (m *machine) disarm(s *state, n int) {
	after := *s
	m.each(m.of[n], func(l int) {
		if m.keeps(LeaveIsLast) {
			m.write(&after, l, m.number(s, l), false)
		}
		after.lanes[l].armed = false
		m.unsettle(&after, l, -1)
		after.lanes[l].settle, after.lanes[l].contended, after.lanes[l].alone = noSettle, false, false
		after.lanes[l].scout, after.lanes[l].lastOne = false, false
	})
	after.nodes[n].status = leavingK
	if !m.keeps(LeaveWaits) {
		after.nodes[n].status = leavingOut
	}
	m.add(LeaveDisarms, n, &after)
}

// leaveGranted is the grant of K, which is released at once: every producer that may have chosen this node has
// ended, and its item is there to be seen.
func (m *machine) leaveGranted(s *state, n int) {
	if !m.exclusiveFree(s) {
		m.leaveGivesUp(s, n)
		return
	}
	after := *s
	after.nodes[n].status = leavingOut
	m.add(LeaveGranted, n, &after)
}

// leaveGivesUp: the wait takes longer than it has time. Its rows stay, disarmed, and others sweep them like those of
// the dead.
func (m *machine) leaveGivesUp(s *state, n int) {
	after := *s
	m.clear(&after, n)
	after.nodes[n].status = dead
	m.may(LeaveGivesUp, n, &after)
}

// passOn comes after all fetches of the node. It notifies others of whatever is due that the node could have taken, and
// stops listening: no matter what tokens there are, or notifications under way. Somebody who chose this node for a
// chain or a bounce, without holding K, did so before it disarmed, and for what was due then: the node sees that too.
func (m *machine) passOn(s *state, n int) {
	ready := true
	var due Tags
	m.each(m.of[n], func(l int) {
		ready = ready && !m.present(s, l, -1)
		due |= m.dueTags(s, l, -1)
	})
	switch {
	case !m.keeps(LeavePassesOn):
		due = 0
	case !m.keeps(PassOnByDueRows) && m.keeps(LeaveWaits):
		tokens, heard := m.tokensOf(s, n)
		ready = ready && heard
		if !tokens {
			due = 0
		}
	}
	if !ready {
		return
	}
	m.oneOfEach(s, due, m.of[n], func(set laneSet) {
		after := *s
		m.notify(&after, set, sole)
		after.nodes[n] = node{status: left}
		m.clear(&after, n)
		m.add(LeaveUnlistens, n, &after)
	})
}

// tokensOf is for the rule as first specified, to pass on tokens: then the node has to hear first what was notified
// before it was granted K. It reports whether the node has tokens, and whether it has heard all.
func (m *machine) tokensOf(s *state, n int) (tokens, heard bool) {
	heard = true
	m.each(m.of[n], func(l int) {
		tokens = tokens || s.lanes[l].tokens[0] != noToken
		heard = heard && s.lanes[l].directed == 0 && s.lanes[l].handed == 0 && s.lanes[l].broadcast == 0
	})
	return tokens, heard
}

// clear forgets the memory of a node that is gone, and its rows.
func (m *machine) clear(s *state, n int) {
	m.each(m.of[n], func(l int) {
		s.lanes[l] = lane{}
		for d := m.first[l]; d < m.first[l+1]; d++ {
			if !s.dispatchers[d].locks() {
				s.dispatchers[d] = dispatcher{phase: gone}
			}
		}
	})
}

// die ends a node without a word. Its rows stay. A transaction that has claimed may live on for a while; one that has
// not might as well never have begun, or have ended just before. What dispatchers had in hand is for the expiry of
// their leases.
func (m *machine) die(s *state, n int) {
	if m.count(s, dead, sweepingK, sweeping, sweptSoon, swept) >= m.cfg.Deaths {
		return
	}
	after := *s
	m.clear(&after, n)
	m.each(m.of[n], func(l int) {
		after.lanes[l].armed = s.lanes[l].armed
		for d := m.first[l]; d < m.first[l+1]; d++ {
			after.dispatchers[d].rank = 0
		}
	})
	after.nodes[n] = node{status: dead}
	m.may(NodeDies, n, &after)
}

// sweep: some other node, if there is one, finds the rows of the dead.
func (m *machine) sweep(s *state, n int) {
	if m.count(s, live) == 0 {
		return
	}
	after := *s
	if m.keeps(SweepSettles|SweepPassesOn) && m.keeps(SweepSettles) && m.keeps(SweepPassesOn) {
		after.nodes[n].status = sweepingK
		m.add(SweepBegins, n, &after)
		return
	}
	after.nodes[n].status = swept
	m.each(m.of[n], func(l int) { after.lanes[l].armed = false })
	if !m.keeps(SweepSettles) {
		m.add(SweepCommits, n, &after)
		return
	}
	m.askToSettle(&after, n)
}

// askToSettle is what was first specified: one other node, an armed one, is asked to settle again.
func (m *machine) askToSettle(s *state, n int) {
	nobody := true
	for other := range m.cfg.Nodes {
		after := *s
		armed := false
		m.each(m.of[other], func(l int) {
			armed = armed || s.lanes[l].armed
			after.lanes[l].settled, after.lanes[l].empty, after.lanes[l].settle = false, false, wanted
		})
		if armed && s.nodes[other].listens() {
			nobody = false
			m.add(SweepCommits, n, &after)
		}
	}
	if nobody {
		m.add(SweepCommits, n, s)
	}
}

// sweepGranted is the grant of K: every producer that may have chosen the dead node has ended.
func (m *machine) sweepGranted(s *state, n int) {
	if !m.exclusiveFree(s) {
		return
	}
	after := *s
	after.nodes[n].status = sweeping
	m.add(SweepGranted, n, &after)
}

// sweepChooses deletes the rows of all nodes that are dead by now, and passes on what is due for them, in the same
// transaction. A sweeper that dies before leaves the rows to the next.
func (m *machine) sweepChooses(s *state, n int) {
	if m.count(s, live) == 0 { // the sweeper is gone as well
		return
	}
	var due Tags
	rows := m.dead(s, n)
	m.each(rows, func(l int) { due |= m.dueTags(s, l, -1) })
	m.oneOfEach(s, due, rows, func(set laneSet) {
		after := *s
		m.each(rows, func(l int) { after.nodes[m.node[l]].status = sweptSoon })
		after.lanes[m.firstLane(n)].tells = set
		m.add(SweepChooses, n, &after)
	})
}

func (m *machine) firstLane(n int) int { return bits.TrailingZeros8(uint8(m.of[n])) }

// dead returns the lanes of the node that is swept, and those of others that have died.
func (m *machine) dead(s *state, n int) (rows laneSet) {
	rows = m.of[n]
	for other := range m.cfg.Nodes {
		if status := s.nodes[other].status; status == dead || status == sweepingK {
			rows |= m.of[other]
		}
	}
	return rows
}

func (m *machine) sweepCommits(s *state, n int) {
	after := *s
	told := &after.lanes[m.firstLane(n)].tells
	m.notify(&after, *told, sole)
	*told = 0
	m.each(m.of[n], func(l int) { after.lanes[l].armed = false })
	after.nodes[n].status = swept
	m.add(SweepCommits, n, &after)
}

// lose is the loss of the LISTEN session: whatever is known by it is void, and notifications under way are lost.
func (m *machine) lose(s *state, n int) {
	if s.losses == 0 {
		return
	}
	after := *s
	after.losses--
	after.nodes[n].status = deaf
	m.each(m.of[n], func(l int) {
		lane := &after.lanes[l]
		lane.stale = lane.armed
		lane.directed, lane.handed, lane.standBys, lane.broadcast = 0, 0, 0, 0
		m.unsettle(&after, l, -1)
		m.ofLane(&after, l, func(d *dispatcher) { d.old = true })
	})
	m.may(SessionLost, n, &after)
}

// join is a node that begins to listen. It asks who else there is before its own row is committed, so two that join at
// the same time may both believe to be alone.
func (m *machine) join(s *state, n int) {
	after := *s
	after.nodes[n].status, after.nodes[n].alone = joining, m.alone(s, n)
	m.may(NodeJoins, n, &after)
}

// alone reports whether there are rows of no other node.
func (m *machine) alone(s *state, n int) bool {
	for other := range m.cfg.Nodes {
		if status := s.nodes[other].status; other != n && status != left && status != swept && status != absent && status != joining {
			return false
		}
	}
	return true
}

// listenAgain comes back on the same channel, after LISTEN. The rows of the session before go.
func (m *machine) listenAgain(s *state, n int) {
	after := *s
	self := &after.nodes[n]
	if self.status == deaf {
		self.alone = m.alone(s, n)
	}
	self.status, self.greets = live, m.cfg.Joins > 0
	t := sole
	if !m.keeps(ReconnectSole) {
		t = plain
	}
	m.each(m.of[n], func(l int) {
		lane := &after.lanes[l]
		lane.armed, lane.row, lane.stale = false, false, false
		if m.keeps(ReturnLooks) && !lane.retired {
			m.signal(&after, l, t)
		}
	})
	m.add(SessionBack, n, &after)
}

// greet: the others hear that the node has begun to listen.
func (m *machine) greet(s *state, n int) {
	if !s.nodes[n].greets {
		return
	}
	after := *s
	after.nodes[n].greets = false
	for other := range m.cfg.Nodes {
		if other != n && after.nodes[other].listens() && m.keeps(GreetingFrees) {
			after.nodes[other].alone = false
		}
	}
	m.add(GreetingArrives, n, &after)
}
