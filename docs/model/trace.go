package model

// This file answers: how did it come to this?

import (
	"fmt"
	"strings"
)

// trace retells a path. Its states are representatives, in which the alike may have changed places; the same steps
// taken from the initial state, without exchanging anybody, are the story.
func (x *explorer) trace(path []int) (lines []string) {
	s := x.m.initial()
	for _, next := range path[1:] {
		more, after := x.retell(s, x.space.at(next))
		if more == nil {
			panic("a step of the story is not there: " + strings.Join(lines, "\n"))
		}
		lines, s = append(lines, more...), after
	}
	return append(lines, "=> "+x.m.summary(&s))
}

// retell finds the steps from s to what the goal stands for.
func (x *explorer) retell(s state, goal encoded) (lines []string, after state) {
	x.m.steps = nil
	steps := x.m.successors(&s)
	for i := range steps {
		if t := &steps[i]; x.codec.encode(&t.after) == goal {
			return []string{x.m.describe(&s, t)}, t.after
		}
	}
	for i := range steps {
		t := &steps[i]
		if x.walk.whole || !x.m.wakesAny(&t.after) {
			continue
		}
		if lines, after = x.retell(t.after, goal); lines != nil {
			return append([]string{x.m.describe(&s, t)}, lines...), after
		}
	}
	return nil, s
}

func (m *machine) describe(before *state, t *step) string {
	return fmt.Sprintf("%-8s %s%s", m.actor(t), t.what, m.detail(before, t))
}

func (m *machine) actor(t *step) string {
	switch t.what {
	case ProducerBegin, ProducerInsert, ProducerReadArmed, ProducerCommit, ProducerRollback, CoalescerTells, CoalescerChooses, CoalescerCommits:
		return fmt.Sprintf("P%d", t.who+1)
	case NotificationArrives, StandByEnds, BounceBegins, BounceChooses, BounceTells, BounceCommits, BounceFails, DisarmUnused, DisarmCommits, LaneRetires, LaneRowGoes, SettleScouts, RetryFires:
		return m.laneName(int(t.who))
	case SettleBegins, SettlePauses, SettleAsks, SettleFails, SettleGranted, SettleReturns, LeaveBegins, LeaveDisarms, LeaveGranted, LeaveGivesUp, LeaveUnlistens, NodeDies, SessionLost, NodeJoins, SessionBack, GreetingArrives, SweepBegins, SweepGranted, SweepChooses, SweepCommits:
		return m.nodeName(int(t.who))
	}
	return m.dispatcherName(int(t.who))
}

func (m *machine) nodeName(n int) string { return "node " + string(rune('A'+n)) }

func (m *machine) laneName(l int) string {
	name := string(rune('A' + m.node[l]))
	if len(m.cfg.Nodes[m.node[l]]) > 1 {
		name += map[Tags]string{TagA: ".a", TagB: ".b", TagA | TagB: ".ab"}[m.takes[l]]
	}
	return name
}

func (m *machine) dispatcherName(d int) string {
	l := m.lane[d]
	return fmt.Sprintf("%s.D%d", m.laneName(l), d-m.first[l]+1)
}

// detail says what came of the step.
func (m *machine) detail(before *state, t *step) string {
	after := &t.after
	var parts []string
	say := func(is bool, format string, args ...any) {
		if is {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	switch t.what {
	case ProducerInsert:
		say(after.producers[t.who].locked, "holds K")
		say(!after.producers[t.who].locked, "K is not to be had")
	case ProducerBegin:
		say(true, "its snapshot shows armed: %s", m.lanesName(after.producers[t.who].seen))
	case ProducerReadArmed, CoalescerChooses:
		say(after.producers[t.who].all, "will notify all")
		say(!after.producers[t.who].all, "will notify %s", m.lanesName(after.producers[t.who].tells))
		say(after.producers[t.who].seen != 0, "of which %s stands by", m.lanesName(after.producers[t.who].seen))
	case BounceChooses:
		say(true, "%s", m.lanesName(after.lanes[t.who].tells))
	case SweepChooses:
		say(true, "%s", m.lanesName(after.lanes[m.firstLane(int(t.who))].tells))
	}
	if m.actor(t) == m.dispatcherName(int(t.who)) {
		parts = append(parts, m.fetchDetail(before, t)...)
	}
	for l := range m.lanes {
		was, is := &before.lanes[l], &after.lanes[l]
		say(is.armed && !was.armed, "%s is armed", m.laneName(l))
		say(!is.armed && was.armed, "%s is disarmed", m.laneName(l))
		say(is.directed > was.directed, "a notification to %s alone is on its way", m.laneName(l))
		say(is.handed > was.handed, "a notification to %s alone, passed on once, is on its way", m.laneName(l))
		say(is.standBys > was.standBys, "one to stand by is on its way to %s", m.laneName(l))
		say(is.broadcast > was.broadcast, "a broadcast to %s is on its way", m.laneName(l))
		say(is.settled && !was.settled, "%s is settled", m.laneName(l))
		say(is.tokens != was.tokens, "%s has in store: %s", m.laneName(l), tokensName(is.tokens))
		say(is.empty && !was.empty, "%s is known empty", m.laneName(l))
	}
	if len(parts) == 0 {
		return ""
	}
	return ": " + strings.Join(parts, ", ")
}

func (m *machine) fetchDetail(before *state, t *step) (parts []string) {
	was, is := &before.dispatchers[t.who], &t.after.dispatchers[t.who]
	say := func(is bool, text string) {
		if is {
			parts = append(parts, text)
		}
	}
	switch t.what {
	case FetchBegins:
		say(was.phase == parked, "woken")
		say(is.arms, "will arm if it finds nothing")
		say(is.disarms, "and disarm if it finds something")
		say(!is.arms, "knows the lane armed and settled")
	case FetchClaims:
		say(is.answer == none, "nothing")
		say(is.answer == contended, "contended")
		say(is.answer == found, "an item")
		say(is.phase == foundNone, "the arm write is to come")
	case FetchReports:
		say(is.more != 0, "more is due")
	case FetchRollsBack:
		say(was.answer == found && was.phase == answered, "it was committed, and will be undone")
	}
	switch {
	case is.phase == was.phase:
	case is.phase == parked:
		say(true, "parks")
	case is.phase == outside:
		say(t.what == FetchReturns && was.answer == found, "goes into its handler")
	}
	return parts
}

func (m *machine) lanesName(set laneSet) string {
	if set == 0 {
		return "nobody"
	}
	var names []string
	m.each(set, func(l int) { names = append(names, m.laneName(l)) })
	return strings.Join(names, " and ")
}

// summary says how things stand.
func (m *machine) summary(s *state) string {
	var parts []string
	for t := range tagCount {
		if s.due[t] > 0 {
			parts = append(parts, fmt.Sprintf("%d due (%c)", s.due[t], 'a'+t))
		}
	}
	for d := range m.first[m.lanes] {
		where := [...]string{"in a handler", "parked", "in a fetch", "in a fetch", "in a fetch", "in a fetch", "in a fetch", "gone"}
		parts = append(parts, m.dispatcherName(d)+" is "+where[s.dispatchers[d].phase])
	}
	for p := range m.cfg.Producers {
		if s.producers[p].phase == open {
			parts = append(parts, fmt.Sprintf("P%d is open", p+1))
		}
	}
	return strings.Join(parts, ", ")
}

func tokensName(tokens [maxOfLane]token) string {
	name := map[token]string{plain: "a token", sole: "a sole token", passed: "a sole token, passed on once"}
	switch {
	case tokens[0] == noToken:
		return "nothing"
	case tokens[1] == noToken:
		return name[tokens[0]]
	}
	return name[tokens[0]] + ", " + name[tokens[1]]
}
