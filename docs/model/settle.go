package model

// This file answers: how does a lane become sure that there is nothing for it?
//
// In the background: the node's settler waits for K on behalf of the lanes that were armed. Then they are settled, and
// somebody of each looks again, in a snapshot that is younger than the grant.

func (m *machine) settler(s *state, n int) {
	if s.nodes[n].status != live {
		return
	}
	switch s.nodes[n].settler {
	case idle:
		m.beginSettle(s, n)
	case waits:
		m.grantSettle(s, n)
		m.patience(s, n)
		m.failSettle(s, n)
	case pauses:
		m.waitOn(s, n, waits)
	case pausesAlone:
		m.waitOn(s, n, waitsAlone)
	case waitsAlone:
		m.grantSettle(s, n)
		m.askAgain(s, n)
		m.failSettle(s, n)
	case granted:
		after := *s
		m.settleLanes(&after, n)
		m.add(SettleReturns, n, &after)
	}
}

func (m *machine) beginSettle(s *state, n int) {
	after := *s
	any := false
	m.each(m.of[n], func(l int) {
		if lane := &after.lanes[l]; lane.settle == wanted {
			any, lane.settle = true, inWait
		}
	})
	if !any {
		return
	}
	after.nodes[n].settler = waits
	if !m.keeps(SettleWaits) && !m.exclusiveFree(s) {
		m.settleLanes(&after, n) // as if it had
	}
	m.add(SettleBegins, n, &after)
}

// grantSettle is the grant of K, which is released at once, and the answer. Whatever others do between the two they may
// as well do before, or after: Config.Split takes them apart.
func (m *machine) grantSettle(s *state, n int) {
	if !m.exclusiveFree(s) {
		return
	}
	after := *s
	if m.cfg.Split {
		after.nodes[n].settler = granted
	} else {
		m.settleLanes(&after, n)
	}
	m.add(SettleGranted, n, &after)
}

// settleLanes settles those that the wait was for, unless they have begun to disarm since.
func (m *machine) settleLanes(s *state, n int) {
	s.nodes[n].settler = idle
	m.waitsForOne(s, n, false)
	m.each(m.of[n], func(l int) {
		lane := &s.lanes[l]
		if lane.settle != inWait {
			return
		}
		lane.settle, lane.settled, lane.scout = noSettle, true, false
		if m.keeps(SettleLooks) && m.keeps(SettleWaits) {
			m.signal(s, l, plain)
		}
	})
}

// patience: the wait takes long. So it goes on on another connection, and the settler asks for how many producers it is,
// now and again if they are several: while it waits, or else one that is not among them may get K in between.
func (m *machine) patience(s *state, n int) {
	if !m.cfg.Patience || m.exclusiveFree(s) {
		return
	}
	after := *s
	after.nodes[n].settler = pauses
	m.may(SettlePauses, n, &after)
	m.askAgain(s, n)
	m.ask(s, n)
}

// askAgain is for what has become of the lanes meanwhile. Those that were armed join: whoever may have read otherwise got K
// before, and is waited for. If there are none left that are to be settled, the wait ends.
func (m *machine) askAgain(s *state, n int) {
	if !m.cfg.Patience || m.exclusiveFree(s) {
		return
	}
	joins, left := false, false
	m.each(m.of[n], func(l int) {
		joins, left = joins || s.lanes[l].settle == wanted, left || s.lanes[l].settle == inWait
	})
	after := *s
	switch {
	case joins && m.holders(s) > 1:
		m.joinWait(&after, n)
		m.may(SettleAsks, n, &after)
	case joins && s.nodes[n].settler == waitsAlone:
		m.ask(s, n)
	case !joins && !left:
		after.nodes[n].settler = idle
		m.may(SettleReturns, n, &after)
	}
}

func (m *machine) joinWait(s *state, n int) {
	m.each(m.of[n], func(l int) {
		if lane := &s.lanes[l]; lane.settle == wanted {
			lane.settle = inWait
		}
	})
}

func (m *machine) ask(s *state, n int) {
	if m.holders(s) > 1 {
		return
	}
	after := *s
	m.joinWait(&after, n)
	after.nodes[n].settler = waitsAlone
	m.waitsForOne(&after, n, true)
	if !m.keeps(AsksWhileWaiting) {
		after.nodes[n].settler = pausesAlone
	}
	m.may(SettleAsks, n, &after)
}

// waitsForOne lets the lanes of the wait know whether it is for one producer only.
func (m *machine) waitsForOne(s *state, n int, one bool) {
	m.each(m.of[n], func(l int) {
		if s.lanes[l].settle != inWait {
			return
		}
		s.lanes[l].lastOne = one
		m.ofLane(s, l, func(d *dispatcher) { d.lastOne = d.lastOne && one })
	})
}

// failSettle is a long wait whose connection breaks. It begins anew, and may be for others then.
func (m *machine) failSettle(s *state, n int) {
	if !m.cfg.Patience || s.faults == 0 || m.exclusiveFree(s) {
		return
	}
	after := *s
	after.faults--
	m.waitsForOne(&after, n, false)
	after.nodes[n].settler = pauses
	m.each(m.of[n], func(l int) {
		if lane := &after.lanes[l]; lane.settle == inWait && m.keeps(ScoutAfterFailure) {
			lane.scout = m.keeps(ScoutWhileWaiting)
		}
	})
	m.may(SettleFails, n, &after)
}

func (m *machine) waitOn(s *state, n int, as settlerPhase) {
	after := *s
	after.nodes[n].settler = as
	m.add(SettleBegins, n, &after)
}

// settleScout looks while the settler waits: a producer may have ended that was silent, and another keep it waiting.
// The looks that find nothing make a difference only if they may be the last.
func (m *machine) settleScout(s *state, l int) {
	lane := &s.lanes[l]
	if !lane.scout || m.parked(s, l) < 0 || lane.settle == noSettle {
		return
	}
	offer := m.add
	if m.freeTags(s, l) == 0 {
		if !lane.lastOne {
			return
		}
		offer = m.may
	}
	after := *s
	after.lanes[l].scout = m.keeps(ScoutGoesOn)
	m.signal(&after, l, plain)
	offer(SettleScouts, l, &after)
}

// lookAgain is the scout of a lane that met rows which others had locked. It looks until it meets none; the looks
// that say the same again are left out.
func (m *machine) lookAgain(s *state, d int) {
	l := m.lane[d]
	if !s.lanes[l].contended || d != m.parked(s, l) {
		return
	}
	if m.freeTags(s, l) != 0 || m.lockedTags(s, d)&m.takes[l] == 0 {
		after := *s
		m.retry(&after, l)
		m.add(ScoutLooks, d, &after)
	}
}

// retryAbsent is the same where nobody is. It makes a difference only if nobody else may know of those rows.
func (m *machine) retryAbsent(s *state, l int) {
	if lane := &s.lanes[l]; !lane.contended || !lane.alone || m.present(s, l, -1) {
		return
	}
	after := *s
	m.retry(&after, l)
	m.add(RetryFires, l, &after)
}

func (m *machine) retry(s *state, l int) {
	lane := &s.lanes[l]
	lane.contended = false // the answer will tell
	t := plain
	if lane.alone && m.keeps(ContendedKeepsSole) {
		t = sole
	}
	lane.alone = lane.alone && m.cfg.RetriesStaySole
	m.signal(s, l, t)
}
