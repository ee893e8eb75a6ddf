package pgwake

import "time"

// This file answers: is a database that fails our polls polled all the same?
//
// breaker is a pure state machine, like aggressive: no I/O, no goroutine, the time is passed in.
//
//	closed     --breakerFailures queries in a row failed--> open: polls are skipped
//	open       --breakerPause has passed, or a query succeeded that is no poll--> half-open: polls are made
//	half-open  --a query failed--> open
//	half-open  --breakerSuccesses queries in a row succeeded--> closed
//
// It takes note of every query for work, and of the periodic statement, and skips polls alone: whoever fetches anew asks
// the database, and so does every other verb, and the LISTEN connection is kept alive. So it keeps nobody from work for the pause:
// a dispatcher whose fetch failed comes back when it likes to, and the first answer has the others polled for again.

const (
	breakerFailures  = 10
	breakerPause     = time.Minute
	breakerSuccesses = 3
)

type breakerState int

const (
	breakerClosed breakerState = iota
	breakerOpen
	breakerHalfOpen
)

type breaker struct {
	state     breakerState
	failures  int // in a row
	successes int // in a row, since it is half-open
	until     time.Time
	skipped   int64 // polls, so far
	err       error // of the last failure; nil: none since the last success
}

// allows reports whether to poll.
func (b *breaker) allows(now time.Time) bool {
	if b.state == breakerOpen && !now.Before(b.until) {
		b.halfOpen()
	}
	if b.state == breakerOpen {
		b.skipped++
		return false
	}
	return true
}

func (b *breaker) halfOpen() { b.state, b.successes = breakerHalfOpen, 0 }

// failed takes note of a query that failed.
func (b *breaker) failed(err error, now time.Time) {
	b.err = err
	b.failures++
	if b.state == breakerHalfOpen || b.state == breakerClosed && b.failures >= breakerFailures {
		b.state, b.until = breakerOpen, now.Add(breakerPause)
	}
}

// succeeded takes note of a query that the database answered.
func (b *breaker) succeeded() {
	b.err, b.failures = nil, 0
	if b.state == breakerOpen {
		b.halfOpen()
	}
	if b.state == breakerHalfOpen {
		if b.successes++; b.successes >= breakerSuccesses {
			b.state = breakerClosed
		}
	}
}
