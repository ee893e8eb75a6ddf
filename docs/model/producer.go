package model

// This file answers: what does a transaction do that makes an item due?
//
// A producer is one transaction, but for the library's own (coalesce). Nothing of it is owed: it may stay open at any point for as long as it likes,
// and the promise has to hold meanwhile. So a long transaction needs no variant of its own.

func (m *machine) producer(s *state, p int) {
	if m.cfg.Producers[p].Coalesced {
		m.coalesce(s, p)
		return
	}
	switch s.producers[p].phase {
	case notBegun:
		if m.reads(p) != inserted {
			m.begin(s, p)
		} else {
			m.insert(s, p)
		}
	case begun:
		m.insert(s, p)
	case inserted:
		m.readArmed(s, p)
	case open:
		m.commit(s, p)
		if !m.cfg.NoRollback {
			after := *s
			after.producers[p] = producer{phase: ended}
			m.may(ProducerRollback, p, &after)
		}
	}
}

// reads says at which point a producer takes the snapshot in which it reads who is armed. What a producer that
// notifies all reads does not matter, and it is spared the step.
func (m *machine) reads(p int) producerPhase {
	if m.cfg.Producers[p].OldSnapshot && !m.keeps(OldSnapshotTellsAll) || !m.keeps(FreshRead) {
		return begun
	}
	return inserted
}

// begin takes the snapshot of a transaction, or of the statement that inserts, before K is tried.
func (m *machine) begin(s *state, p int) {
	after := *s
	after.producers[p] = producer{phase: begun, seen: m.targets(s, m.tags[p])}
	m.may(ProducerBegin, p, &after)
}

// insert inserts the item, which nobody sees before the commit, and tries K.
func (m *machine) insert(s *state, p int) {
	after := *s
	after.producers[p].phase = inserted
	after.producers[p].locked = m.sharedFree(s)
	m.may(ProducerInsert, p, &after)
}

// readArmed is the statement after: in its new snapshot it reads who is armed, and decides whom to notify.
func (m *machine) readArmed(s *state, p int) {
	after := *s
	self := &after.producers[p]
	self.phase = open
	armed := m.targets(s, m.tags[p])
	if m.reads(p) == begun {
		armed = self.seen
	}
	self.seen = 0
	blind := m.cfg.Producers[p].OldSnapshot && m.keeps(OldSnapshotTellsAll)
	unlocked := !self.locked && (armed == 0 && m.keeps(UnlockedTells) || m.keeps(UnlockedTellsAll))
	if blind || unlocked {
		self.all = true
		m.may(ProducerReadArmed, p, &after)
		return
	}
	choices(armed, max(m.cfg.Fanout, 1), func(set laneSet) {
		self.tells = set
		m.standBy(set, func(stands laneSet) {
			self.seen = stands
			m.may(ProducerReadArmed, p, &after)
		})
	})
}

// commit makes, in one step, the items visible, the notifications deliverable, and K free. PostgreSQL does it in
// this order; between the first and the last others can only wait longer.
func (m *machine) commit(s *state, p int) {
	after := *s
	self := &after.producers[p]
	after.due[m.tags[p]] += m.items(p)
	if self.all {
		m.tellAll(&after, m.tags[p])
	}
	m.callChosen(&after, self)
	*self = producer{phase: ended}
	m.may(ProducerCommit, p, &after)
}

// standBy calls choose with each way to have all lanes of the set but one stand by.
func (m *machine) standBy(set laneSet, choose func(laneSet)) {
	if set&(set-1) == 0 {
		choose(0)
		return
	}
	m.each(set, func(l int) { choose(set &^ (1 << l)) })
}

// callChosen notifies those whom the producer has chosen.
func (m *machine) callChosen(s *state, p *producer) {
	m.notify(s, p.tells&^p.seen, sole)
	m.each(p.seen, func(l int) {
		if s.nodes[m.node[l]].listens() {
			s.lanes[l].standBys++
		}
	})
}

func (m *machine) items(p int) uint8 { return uint8(max(m.cfg.Producers[p].Items, 1)) }

// coalesce is the way of the library's own producers. The items are visible before anybody reads who is armed, so K is
// not needed: who is not armed yet will settle, and see them. From its commit on the rest is owed.
func (m *machine) coalesce(s *state, p int) {
	after := *s
	self := &after.producers[p]
	switch s.producers[p].phase {
	case notBegun:
		after.due[m.tags[p]] += m.items(p)
		self.phase = inserted
		m.may(ProducerCommit, p, &after)
	case inserted:
		m.coalesceHere(s, p)
	case told:
		self.phase = open
		choices(m.targets(s, m.tags[p])&^m.of[m.cfg.Producers[p].Node], max(m.cfg.Fanout, 1), func(set laneSet) {
			self.tells = set
			m.standBy(set, func(stands laneSet) {
				self.seen = stands
				m.add(CoalescerChooses, p, &after)
			})
		})
	case open:
		m.callChosen(&after, self)
		*self = producer{phase: ended}
		m.add(CoalescerCommits, p, &after)
	}
}

// coalesceHere tells the producer's own node. If somebody is parked here who can take an item he gets a token, and nobody
// else is told. Otherwise the lanes here get tokens of which others know, and others are told.
func (m *machine) coalesceHere(s *state, p int) {
	spared := false
	var here laneSet
	m.each(m.of[m.cfg.Producers[p].Node], func(l int) {
		if !m.matches(l, m.tags[p]) || s.nodes[m.node[l]].status != live || s.lanes[l].retired {
			return
		}
		here |= 1 << l
		if m.parked(s, l) < 0 {
			return
		}
		spared = true
		after := *s
		after.producers[p] = producer{phase: ended}
		t := sole
		if !m.keeps(SoleIfAlone) {
			t = plain
		}
		m.signal(&after, l, t)
		m.add(CoalescerTells, p, &after)
	})
	if spared {
		return
	}
	after := *s
	after.producers[p].phase = told
	if !m.keeps(CoalescerTellsOthers) && here != 0 {
		after.producers[p] = producer{phase: ended}
	}
	m.each(here, func(l int) { m.signal(&after, l, plain) })
	m.add(CoalescerTells, p, &after)
}

// undo makes the item of a claim due again, as a producer would: by its own transaction, some time. A producer
// of an item with that tag has ended, since somebody had the item.
func (m *machine) undo(s *state, tag int) {
	for p := range m.cfg.Producers {
		if m.tags[p] == tag && s.producers[p].phase == ended {
			s.producers[p] = producer{}
			return
		}
	}
}
