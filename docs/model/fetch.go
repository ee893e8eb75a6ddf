package model

// This file answers: what does a dispatcher do?

func (m *machine) dispatcher(s *state, d int) {
	self := &s.dispatchers[d]
	zombie := !s.nodes[m.node[m.lane[d]]].listens() // its transaction may outlive the node
	switch self.phase {
	case outside:
		m.call(s, d)
	case parked:
		m.lookAgain(s, d)
		m.takeOver(s, d)
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
	case waitingK:
		m.settle(s, d)
		m.timeOut(s, d)
	}
	if zombie && self.locks() || s.faults > 0 && self.inside() && !zombie {
		m.fail(s, d)
	}
}

// call is Fetch being called, first or after a handler. Where nothing is to be found it parks at once.
func (m *machine) call(s *state, d int) {
	l := m.lane[d]
	if s.nodes[m.node[l]] != live {
		return
	}
	if s.lanes[l].empty {
		after := *s
		after.dispatchers[d] = dispatcher{phase: parked}
		m.may(FetchParks, d, &after)
		return
	}
	m.fetch(s, d, FetchBegins, false)
}

// takeToken: a token wakes a dispatcher that waits.
func (m *machine) takeToken(s *state, d int) {
	after := *s
	after.lanes[m.lane[d]].tokens--
	m.fetch(&after, d, FetchBegins, true)
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

// fetch begins a query for work: under the node's mutex it takes its sequence number and decides what the request
// says. The request arrives whenever it does. Whoever is woken owes it; another may call Fetch whenever he likes.
func (m *machine) fetch(s *state, d int, what Transition, woken bool) {
	offer := m.may
	if woken {
		offer = m.add
	}
	l := m.lane[d]
	after := *s
	lane := &after.lanes[l]
	self := &after.dispatchers[d]
	*self = dispatcher{}
	self.duty = woken || m.keeps(FirstFind) && m.parked(&after, l) >= 0
	self.remote = self.duty && !m.parkedMatch(&after, l)
	self.arms, self.clean = !lane.settled, lane.settled
	if self.arms {
		self.rank = m.number(&after, l)
	}
	self.phase = begunFetch
	lane.contended, lane.stuck = false, false // the answer will tell
	offer(what, d, &after)

	// Several finds in a row, or many in a second: whether the lane is hot is left open, where it may be. A lane
	// that is not armed has no use for it.
	if lane.armed && (!m.keeps(HotAlone) || !m.present(&after, l, d)) {
		self.disarms, self.arms, self.clean = true, true, false
		self.rank = 0
		self.rank = m.number(&after, l)
		lane.settled, lane.empty = false, false
		offer(what, d, &after)
	}
}

// parkedMatch reports whether anybody of the node is parked whose lane may use what this lane may.
func (m *machine) parkedMatch(s *state, l int) bool {
	for other := range m.lanes {
		if m.node[other] == m.node[l] && m.takes[other]&m.takes[l] != 0 && m.parked(s, other) >= 0 {
			return true
		}
	}
	return false
}

// claim is the statement that claims, in its snapshot. It skips rows that others hold.
func (m *machine) claim(s *state, d int) {
	free := m.freeTags(s, m.lane[d])
	for t := range tagCount {
		if free&(1<<t) != 0 {
			after := *s
			after.due[t]--
			self := &after.dispatchers[d]
			self.phase, self.answer, self.tag, self.arms = claimed, found, uint8(t), false
			if !self.disarms {
				m.forgo(&after, d)
			}
			if !self.duty && !self.clean { // nobody will ask what it reports
				self.phase = reported
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
	self.duty, self.remote, self.disarms = false, false, false
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

// report reads, after the claim, what more is due, and chooses whom of the other lanes to tell.
func (m *machine) report(s *state, d int) {
	after := *s
	self := &after.dispatchers[d]
	self.phase = reported
	self.more = m.dueTags(s, m.lane[d], d)
	self.clean = self.clean && self.more == 0
	if self.more == 0 || !self.remote || !m.keeps(Chain) {
		m.add(FetchReports, d, &after)
		return
	}
	m.oneOfEach(s, self.more, m.lane[d], func(set laneSet, _ bool) {
		self.tells = set
		m.add(FetchReports, d, &after)
	})
}

// commitFind makes the claim, the disarming and the notifications of the chain take effect. From here on the item
// is the dispatcher's, and no longer due.
func (m *machine) commitFind(s *state, d int) {
	after := *s
	m.commitClaim(&after, d)
	m.add(FetchCommits, d, &after)
}

func (m *machine) commitClaim(s *state, d int) {
	self := &s.dispatchers[d]
	m.notify(s, self.tells)
	self.tells = 0
	if self.disarms {
		m.commitWrite(s, d, false)
	}
	self.disarms = false
	if !s.nodes[m.node[m.lane[d]]].listens() {
		*self = dispatcher{phase: gone}
		return
	}
	m.arrive(s, d)
}

func (m *machine) answer(s *state, d int) {
	after := *s
	m.takeAnswer(&after, d)
	m.add(FetchReturns, d, &after)
}

// takeAnswer is the return of a fetch to its node.
func (m *machine) takeAnswer(s *state, d int) {
	l := m.lane[d]
	lane := &s.lanes[l]
	self := s.dispatchers[d]
	s.dispatchers[d] = dispatcher{}
	switch self.answer {
	case found:
		m.chain(s, d, &self)
		lane.empty = lane.empty || self.clean && lane.tokens == 0
	case failed:
		if m.keeps(FailedFetchTells) {
			m.signal(s, l)
		}
	default:
		m.answerNone(s, d, &self)
	}
	if s.nodes[m.node[l]] != live {
		s.dispatchers[d] = dispatcher{phase: gone}
	}
}

// answerNone parks, or goes on to settle: then once for the lane.
func (m *machine) answerNone(s *state, d int, self *dispatcher) {
	l := m.lane[d]
	lane := &s.lanes[l]
	lane.contended = lane.contended || self.answer == contended
	lane.settled = lane.settled || self.settling
	s.dispatchers[d].phase = parked
	if self.settling || !self.arms {
		lane.empty = self.clean && lane.tokens == 0
		return
	}
	if m.settling(s, l) {
		return
	}
	if !m.keeps(Settle) || !m.keeps(SettleWaits) && !m.exclusiveFree(s) {
		lane.settled = true // as if it had
		return
	}
	m.beginSettle(s, d)
}

// chain passes a token on here, if more is due and this fetch has the duty. If it has asked SQL to tell another
// lane, a token is kept only where somebody is parked or inside a fetch. If not, because somebody was parked
// when it began, and nobody is any more, the token stays with the lane, and bounces.
func (m *machine) chain(s *state, d int, self *dispatcher) {
	if !self.duty {
		return
	}
	own := m.lane[d]
	for t := range tagCount {
		if self.more&(1<<t) == 0 {
			continue
		}
		to := m.local(s, own, t)
		if to < 0 && !self.remote && m.keeps(Chain) && m.keeps(ChainStays) {
			to = own
		}
		if to >= 0 {
			m.signal(s, to)
		}
	}
}

// local returns the lane of the same node where somebody is parked or inside a fetch that can use an item with the
// tag; its own first. -1: none.
func (m *machine) local(s *state, own, tag int) int {
	if m.present(s, own, -1) {
		return own
	}
	for l := range m.lanes {
		if m.node[l] == m.node[own] && m.matches(l, tag) && m.present(s, l, -1) {
			return l
		}
	}
	return -1
}

// fail ends a fetch that nobody hears an answer of: its transaction is rolled back, or was committed. After a
// commit the node undoes the claim. A transaction that outlived its node can only be rolled back.
func (m *machine) fail(s *state, d int) {
	zombie := !s.nodes[m.node[m.lane[d]]].listens()
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
	case waitingK:
	}
	*next = dispatcher{phase: answered, answer: failed}
	if zombie {
		*next = dispatcher{phase: gone}
		m.add(FetchRollsBack, d, &after)
		return
	}
	m.may(FetchRollsBack, d, &after)
}
