package pgmq

import (
	"context"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when does somebody who waits ask?
//
// Invariant: whoever waits is among the parked from before it asks until it has its answer. So what is told after the answer was made
// is heard: there is no moment in between.

// parked is somebody who waits.
type parked struct {
	namespace string        // "": for namespaces
	bell      chan struct{} // at has become earlier

	at time.Time // local: when to ask, for what was heard; zero: never. Under the Stream's mutex
}

// What is due and locked is somebody else's, or comes back when that transaction ends, which nobody tells: then these are the pauses.
const (
	firstLook = 5 * time.Millisecond
	lastLook  = 100 * time.Millisecond
)

// await asks until something is found, or ctx ends, or the Stream is closed. What ask fails with is returned as it is.
func (s *Stream) await(ctx context.Context, namespace string, ask func() (next time.Time, found bool, err error)) error {
	p := &parked{namespace: namespace, bell: make(chan struct{}, 1)}
	s.mu.Lock()
	s.parked[p] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.parked, p)
	}()
	for pause := firstLook; ; {
		select {
		case <-s.closed:
			return pgwake.ErrClosed
		default:
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		s.heard(p, true)
		next, found, err := ask()
		if err != nil || found {
			return err
		}
		until := time.Now().Add(s.cfg.FallbackInterval)
		switch {
		case next.IsZero() || next.After(time.Now()):
			pause = firstLook
		default:
			next = time.Now().Add(pause)
			pause = min(2*pause, lastLook)
		}
		if !next.IsZero() && next.Before(until) {
			until = next
		}
		if err := s.sleep(ctx, p, until); err != nil {
			return err
		}
	}
}

// sleep waits for an instant, or one that is heard of.
func (s *Stream) sleep(ctx context.Context, p *parked, until time.Time) error {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return nil
		case <-p.bell:
			if at := s.heard(p, false); !at.IsZero() && at.Before(until) {
				until = at
				timer.Reset(time.Until(until))
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-s.closed:
			return pgwake.ErrClosed
		}
	}
}

// heard returns when to ask for what was heard, or forgets it: it is about to be answered.
func (s *Stream) heard(p *parked, forget bool) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if forget {
		p.at = time.Time{}
	}
	return p.at
}

// tell has those ask at an instant who wait for a namespace.
func (s *Stream) tell(namespace string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.parked {
		if p.namespace == namespace {
			p.hear(at)
		}
	}
}

// tellAll has all who wait ask now.
func (s *Stream) tellAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.parked {
		p.hear(time.Now())
	}
}

// hear is called with the Stream's mutex held.
func (p *parked) hear(at time.Time) {
	if !p.at.IsZero() && !at.Before(p.at) {
		return
	}
	p.at = at
	select {
	case p.bell <- struct{}{}:
	default:
	}
}
