package pgwake

import (
	"slices"
	"sync"
	"time"
)

// This file answers: who looks for the items of a node that was killed?
//
// A node that parked before this one claimed does not know that the claim's lease will end. So a claim
// tells the others, in its own transaction, unless an instant is already known to all at which they will
// look, see the lease as it then is, and know the rest. Knowledge is passed on by such looks: whoever looks
// and finds nothing due learns the next instant, renewed leases included.
//
// Invariants
//
//	(1) For every lease of this node that ends at e, the other nodes have been told of an instant in (commit of
//	    the claim, e]. With equal timeouts that takes one notification per half lock timeout, and none while
//	    idle; a node that begins to listen says so, and is told of the next one. If the server's queue of notifications
//	    is full, each claim leaves word, and the first end of all is told as soon as it can be, though that be past:
//	    whoever looks then sees what was claimed meanwhile, and nothing claimed later counts on an end that was not told.
//	(2) Whoever was told of an instant looks at it, even if an answer since says that nothing becomes due then:
//	    somebody may have claimed after that answer, and counted on it.

type leases struct {
	mu       sync.Mutex
	instants [queueCount][]instant // not past, in order
	joins    [queueCount]int       // how often a node has begun to listen, as far as this one knows
}

// instant was told by anyone; server time.
type instant struct {
	at time.Time

	// all: every node that listens was told. One that began to listen later was not.
	all bool
}

// Of many instants the nearest are kept, and of those a node counts on the nearest few: others, who heard about the
// same, keep them too.
const (
	keptInstants    = 1024
	countedInstants = 64
)

// heard remembers an instant that somebody told every node of.
func (s *leases) heard(q Queue, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remember(q, at, true)
}

// told remembers an instant that this node told the others of, with a claim for which announce returned joins: a
// node that joined between the two may not have been there to hear it.
func (s *leases) told(q Queue, at time.Time, joins int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remember(q, at, joins == s.joins[q])
}

func (s *leases) remember(q Queue, at time.Time, all bool) {
	known := s.instants[q]
	place, found := slices.BinarySearchFunc(known, at, instant.compare)
	if !found {
		known = slices.Insert(known, place, instant{at: at})
	}
	known[place].all = known[place].all || all
	s.instants[q] = known[:min(len(known), keptInstants)]
}

func (i instant) compare(at time.Time) int { return i.at.Compare(at) }

// announce reports whether a claim made now, at server time now, must tell the others when its lease ends.
// Half the timeout is left for the claim to commit before they look. joins is for told.
func (s *leases) announce(q Queue, now time.Time, timeout time.Duration) (joins int, announce bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.ahead(q, now)
	return s.joins[q], !slices.ContainsFunc(known[:min(len(known), countedInstants)], func(i instant) bool {
		return i.all && !i.at.Before(now.Add(timeout/2)) && !i.at.After(now.Add(timeout))
	})
}

// joined is told that a node has begun to listen, at server time now. It returns the instant to tell that node of:
// there it will see, and so know from then on, what was claimed before.
func (s *leases) joined(q Queue, now time.Time) (next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.joins[q]++
	known := s.ahead(q, now)
	for i := range known {
		known[i].all = false
	}
	if len(known) > 0 {
		next = known[0].at
	}
	return next
}

// next returns the first instant after now that was told of; zero: none.
func (s *leases) next(q Queue, now time.Time) (next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.ahead(q, now); len(known) > 0 {
		next = known[0].at
	}
	return next
}

// ahead forgets the instants that are past and returns the others.
func (s *leases) ahead(q Queue, now time.Time) []instant {
	past, _ := slices.BinarySearchFunc(s.instants[q], now.Add(1), instant.compare)
	s.instants[q] = slices.Delete(s.instants[q], 0, past)
	return s.instants[q]
}
