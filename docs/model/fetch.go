package model

// This file answers: what does a dispatcher do?

func (m *machine) dispatcher(s *state, d int) {
	self := &s.dispatchers[d]
	zombie := !s.nodes[m.node[m.lane[d]]].runs() // its transaction may outlive the node
	switch self.phase {
	case outside:
		m.call(s, d)
	case parked:
		m.lookAgain(s, d)
		m.timeOut(s, d)
	case begunFetch:
		m.claim(s, d)
	case foundNone:
		m.commitNone(s, d)
	case claimed:
		m.report(s, d)
	case reported:
		m.commitFind(s, d)
	case answered:
		m.answer(s, d)
	}
	if zombie && self.locks() || s.faults > 0 && self.inside() && !zombie {
		m.fail(s, d)
	}
}

// call is Fetch being called, first or after a handler. Where nothing is to be found it parks at once.
func (m *machine) call(s *state, d int) {
	l := m.lane[d]
	if status := s.nodes[m.node[l]].status; status != live && status != deaf {
		return
	}
	if s.lanes[l].empty {
		after := *s
		after.dispatchers[d] = dispatcher{phase: parked}
		m.may(FetchParks, d, &after)
		return
	}
	m.fetch(s, d, FetchBegins, noToken, false)
}

// takeToken: a token wakes a dispatcher that waits.
func (m *machine) takeToken(s *state, d int) {
	l := m.lane[d]
	after := *s
	stored := after.lanes[l].stored()
	fresh := false
	m.ofLane(s, l, func(other *dispatcher) { fresh = fresh || other.newer >= stored })
	m.fetch(&after, d, FetchBegins, m.take(&after, l), fresh)
}

// timeOut: the time of a Fetch that waits is up, or its context ends; the user calls it again whenever he likes.
func (m *machine) timeOut(s *state, d int) {
	if !m.cfg.TimeOuts {
		return
	}
	after := *s
	after.dispatchers[d] = dispatcher{}
	m.may(FetchTimesOut, d, &after)
}

// fetch begins a query for work: under the lane's mutex it takes its sequence number and decides what the request
// says. The request arrives whenever it does. Whoever is woken owes it; another may call Fetch whenever he likes.
func (m *machine) fetch(s *state, d int, what Transition, by token, fresh bool) {
	offer := m.may
	if by != noToken {
		offer = m.add
	}
	l := m.lane[d]
	after := *s
	m.ofLane(&after, l, func(other *dispatcher) { other.fresh = false })
	lane := &after.lanes[l]
	self := &after.dispatchers[d]
	*self = dispatcher{by: by, fresh: fresh && m.cfg.Faults > 0, lastOne: lane.lastOne, stands: lane.standsBy, arms: !lane.settled, clean: lane.settled || !m.keeps(EmptyIfSettled)}
	if s.nodes[m.node[l]].status == deaf {
		self.arms, self.clean = false, false // it has no row
	}
	if self.arms {
		self.rank = m.number(&after, l)
	}
	self.phase = begunFetch
	offer(what, d, &after)

	// Several finds in a row, or many in a second: whether the lane is hot is left open, where it may be. A lane
	// that is not armed has no use for it. For a second after a disarm it is not hot; so then it has found something since.
	if !m.cfg.StayArmed && lane.hot && lane.armed && !lane.stale && s.nodes[m.node[l]].status != deaf && (!m.keeps(HotAlone) || !m.present(&after, l, d)) {
		lane.hot = !m.keeps(DisarmPause)
		self.disarms, self.arms, self.clean = true, true, !m.keeps(EmptyIfSettled)
		self.rank = 0
		self.rank = m.number(&after, l)
		m.unsettle(&after, l, d)
		offer(what, d, &after)
	}
}

// claim is the statement that claims, in its snapshot. It skips rows that others hold.
func (m *machine) claim(s *state, d int) {
	l := m.lane[d]
	free := m.freeTags(s, l)
	for t := range tagCount {
		if free&(1<<t) != 0 {
			after := *s
			after.due[t]--
			self := &after.dispatchers[d]
			self.phase, self.answer, self.tag, self.arms = claimed, found, uint8(t), false
			if !self.disarms {
				m.forgo(&after, d)
			}
			lane := &s.lanes[l]
			if alone := m.first[l+1]-m.first[l] == 1; alone && self.by == noToken && !self.clean && lane.stored() <= self.newer && !lane.contended {
				self.phase = reported // nobody will ask what it reports
			}
			m.add(FetchClaims, d, &after)
		}
	}
	if free == 0 {
		m.claimNone(s, d)
	}
}

// claimNone is a claim that got nothing. What has nothing to write ends at once: nobody can see it commit.
func (m *machine) claimNone(s *state, d int) {
	l := m.lane[d]
	after := *s
	self := &after.dispatchers[d]
	self.disarms = false
	if m.lockedTags(s, d)&m.takes[l] != 0 && m.keeps(Contended) {
		self.answer, self.clean = contended, false
	}
	self.phase = foundNone
	if !m.keeps(SkipByMemory) && s.lanes[l].armed {
		self.arms = false
	}
	if !self.arms || !m.keeps(ArmByMemory) && s.lanes[l].armed {
		m.forgo(&after, d)
		self.phase = answered
	}
	m.add(FetchClaims, d, &after)
}

// forgo gives up the sequence number of a fetch that will write nothing.
func (m *machine) forgo(s *state, d int) {
	rank := s.dispatchers[d].rank
	s.dispatchers[d].rank = 0
	m.closeRanks(s, m.lane[d], rank)
}

// commitNone writes that the lane is armed, and commits. The write is the last statement, and takes effect with the
// commit: until then it can only make another write of this row wait, which is as if that came later.
func (m *machine) commitNone(s *state, d int) {
	after := *s
	m.commitWrite(&after, d, true)
	m.arrive(&after, d)
	m.add(FetchCommits, d, &after)
}

func (m *machine) commitWrite(s *state, d int, armed bool) {
	self := &s.dispatchers[d]
	if self.rank > 0 || !m.keeps(Sequence) {
		s.lanes[m.lane[d]].stale = self.old
	}
	m.write(s, m.lane[d], self.rank, armed)
	self.rank = 0
}

// arrive brings the answer of a fetch that has written to its node. If it can get lost it is under way for a while;
// otherwise that makes no difference to anybody, and is left out: what the node does with the answer, the database
// does not see, and the node's other steps lead to the same before it and after. Config.Split leaves nothing out.
func (m *machine) arrive(s *state, d int) {
	s.dispatchers[d].phase = answered
	if s.faults == 0 && !m.cfg.Split {
		m.takeAnswer(s, d)
	}
}

// report reads, after the claim, what more is due.
func (m *machine) report(s *state, d int) {
	after := *s
	self := &after.dispatchers[d]
	self.phase = reported
	self.more = m.dueTags(s, m.lane[d], d)
	m.add(FetchReports, d, &after)
}

// commitFind makes the claim and the disarming take effect. From here on the item is the dispatcher's, and no longer
// due.
func (m *machine) commitFind(s *state, d int) {
	after := *s
	self := &after.dispatchers[d]
	if self.disarms {
		m.commitWrite(&after, d, false)
	}
	self.disarms = false
	if s.nodes[m.node[m.lane[d]]].runs() {
		m.arrive(&after, d)
	} else {
		*self = dispatcher{phase: gone}
	}
	m.add(FetchCommits, d, &after)
}

func (m *machine) answer(s *state, d int) {
	after := *s
	m.takeAnswer(&after, d)
	m.add(FetchReturns, d, &after)
}

// takeAnswer is the return of a fetch to its node.
func (m *machine) takeAnswer(s *state, d int) {
	l := m.lane[d]
	self := s.dispatchers[d]
	s.dispatchers[d] = dispatcher{}
	switch self.answer {
	case found:
		s.lanes[l].hot = true
		m.digest(s, l, &self, self.more != 0)
		m.chain(s, l, &self)
	case failed:
		if m.keeps(FailedFetchTells) && self.by != noToken {
			m.handBack(s, l, self.by, self.fresh)
		}
	default:
		s.dispatchers[d].phase = parked
		m.armed(s, l, &self)
		m.digest(s, l, &self, self.answer == contended)
		if lane := &s.lanes[l]; self.answer == contended {
			lane.contended, lane.alone = true, lane.alone || self.by.isSole()
		}
	}
	if status := s.nodes[m.node[l]].status; status != live && status != deaf {
		s.dispatchers[d] = dispatcher{phase: gone}
	}
}

// digest takes an answer into account that says whether anything is left.
func (m *machine) digest(s *state, l int, self *dispatcher, more bool) {
	lane := &s.lanes[l]
	if more {
		lane.empty = false
		m.ofLane(s, l, func(other *dispatcher) { other.clean, other.passed = false, true })
		return
	}
	m.pay(s, l, self.newer)
	if self.stands {
		lane.standsBy = false
	}
	if !self.passed {
		lane.contended, lane.alone = false, false
		lane.empty = lane.empty || self.clean
	}
}

// armed: the fetch has armed the lane, if it was to. Then the settler has to settle it.
func (m *machine) armed(s *state, l int, self *dispatcher) {
	lane := &s.lanes[l]
	if !m.keeps(SkipByMemory) && !self.arms {
		lane.settled = true
	}
	if !self.arms || self.void || lane.settled {
		return
	}
	if !m.keeps(Settle) {
		lane.settled = true
		return
	}
	lastOne := lane.lastOne && self.lastOne
	if !m.keeps(AloneLooks) {
		lastOne = s.nodes[m.node[l]].forOne()
	}
	switch {
	case !m.keeps(ScoutWhileWaiting):
	case lastOne:
		lane.scout = false // what was silent is found, but for the last one, which ends the wait by its end
	case lane.settle == noSettle || !m.keeps(ScoutGoesOn):
		lane.scout = true
	}
	if lane.settle == noSettle {
		lane.settle = wanted
	}
}

// chain leaves a token with the lane if more is due than what one took that came by a token. If nobody of the lane
// is there, and nobody else knows, it bounces.
func (m *machine) chain(s *state, l int, self *dispatcher) {
	if self.by == noToken || self.more == 0 || !m.keeps(Chain) {
		return
	}
	t := plain
	if self.by.isSole() && m.keeps(ChainKeepsSole) {
		t = sole
	}
	m.signal(s, l, t)
}

// fail ends a fetch that nobody hears an answer of: its transaction is rolled back, or was committed. After a
// commit the node undoes the claim. A transaction that outlived its node can only be rolled back.
func (m *machine) fail(s *state, d int) {
	zombie := !s.nodes[m.node[m.lane[d]]].runs()
	self := &s.dispatchers[d]
	after := *s
	if !zombie {
		after.faults--
	}
	next := &after.dispatchers[d]
	switch self.phase {
	case begunFetch, foundNone, claimed, reported:
		m.forgo(&after, d)
		if self.locks() {
			after.due[self.tag]++
		}
	case answered:
		if self.answer == failed {
			return
		}
		if self.answer == found {
			m.undo(&after, int(self.tag))
		}
	}
	if zombie {
		*next = dispatcher{phase: gone}
		m.add(FetchRollsBack, d, &after)
		return
	}
	*next = dispatcher{phase: answered, answer: failed, by: self.by, fresh: self.fresh}
	m.may(FetchRollsBack, d, &after)
}
