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
	bell      chan struct{} // what follows has changed

	// Under the Stream's mutex.
	at     time.Time // local: when to ask, for what was heard; zero: never
	putOff bool      // at is when there is to be credit for that (credit.go), and nothing that is heard makes it sooner
	anyway bool      // ask now, whatever was heard: much may have been missed
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
		s.forget(p)
		next, found, err := ask()
		if found {
			s.credit.earn()
		}
		if err != nil || found {
			return err
		}
		until := time.Now().Add(s.cfg.FallbackInterval)
		switch {
		case !due(next):
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

// sleep waits for an instant, or for what is heard of meanwhile.
func (s *Stream) sleep(ctx context.Context, p *parked, until time.Time) error {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.bell:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.closed:
			return pgwake.ErrClosed
		}
		at, told := s.next(p, until)
		if pause := time.Until(at); pause > 0 {
			timer.Reset(pause)
			continue
		}
		if told {
			s.credit.spend()
		}
		return nil
	}
}

// next returns when somebody asks who does so at an instant, or sooner because of what he was told.
func (s *Stream) next(p *parked, until time.Time) (at time.Time, told bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.anyway {
		return time.Now(), false
	}
	if !p.at.IsZero() && !p.putOff && !p.at.After(time.Now()) {
		if again := s.credit.until(); !again.IsZero() {
			p.at, p.putOff = again, true
		}
	}
	if p.at.IsZero() || !p.at.Before(until) {
		return until, false
	}
	return p.at, true
}

// forget is called when somebody is about to ask: what he has heard is about to be answered.
func (s *Stream) forget(p *parked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.at, p.putOff, p.anyway = time.Time{}, false, false
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

// tellAll has all who wait ask.
func (s *Stream) tellAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for p := range s.parked {
		p.hear(now)
	}
}

// lookAround has all who wait ask, and no credit is spent for it.
func (s *Stream) lookAround() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.parked {
		p.anyway = true
		p.ring()
	}
}

// hear is called with the Stream's mutex held.
func (p *parked) hear(at time.Time) {
	if p.putOff || !p.at.IsZero() && !at.Before(p.at) {
		return
	}
	p.at = at
	p.ring()
}

func (p *parked) ring() {
	select {
	case p.bell <- struct{}{}:
	default:
	}
}
