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
// Invariant: for every lease of this node that ends at e, the other nodes have been told of an instant in
// (commit of the claim, e]. With equal timeouts that takes one notification per half lock timeout, and
// none while idle.

type leases struct {
	mu       sync.Mutex
	instants [queueCount][]time.Time // told by anyone, server time, not past
}

// maxInstants bounds the memory for instants; forgetting one costs a needless notification.
const maxInstants = 64

// told remembers an instant at which every node will look.
func (s *leases) told(q Queue, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.instants[q]
	if len(known) >= maxInstants {
		known = known[1:]
	}
	s.instants[q] = append(known, at)
}

// announce reports whether a claim made now, at server time now, must tell the others when its lease ends.
// Half the timeout is left for the claim to commit before they look.
func (s *leases) announce(q Queue, now time.Time, timeout time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instants[q] = slices.DeleteFunc(s.instants[q], func(at time.Time) bool { return at.Before(now) })
	return !slices.ContainsFunc(s.instants[q], func(at time.Time) bool {
		return !at.Before(now.Add(timeout/2)) && !at.After(now.Add(timeout))
	})
}
