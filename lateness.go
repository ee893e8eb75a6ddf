package pgwake

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// This file answers: do notifications come late?
//
// What is known of each is how long before it the transaction began that sent it. A transaction may take its time, so one that is old
// says little; if each of the last few is, it is the way here that is slow: the server's queue of notifications, the network, or
// this process.

const (
	latenessSample = 8
	tooLate        = time.Second
	latenessLasts  = time.Minute // after the last notification nobody knows
)

type lateness struct {
	mu   sync.Mutex
	last [latenessSample]time.Duration // a ring
	n    int                           // so far
	at   time.Time                     // of the last one
}

func (l *lateness) observe(lag time.Duration, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[l.n%latenessSample] = lag
	l.n++
	l.at = now
}

// reset forgets what came by a connection that has ended.
func (l *lateness) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n = 0
}

// lag returns the least of the last few; 0: there were too few, or none for a while.
func (l *lateness) lag(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n < latenessSample || now.Sub(l.at) > latenessLasts {
		return 0
	}
	return slices.Min(l.last[:])
}

// problem says, for operators, that they are late.
func (l *lateness) problem(now time.Time) string {
	if lag := l.lag(now); lag > tooLate {
		return fmt.Sprintf("notifications come late: each of the last %d more than %v after the transaction that sent it began", latenessSample, lag.Round(time.Millisecond))
	}
	return ""
}
