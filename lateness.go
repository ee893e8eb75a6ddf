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
)

type lateness struct {
	mu   sync.Mutex
	last [latenessSample]time.Duration // a ring
	n    int                           // so far
}

func (l *lateness) observe(lag time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[l.n%latenessSample] = lag
	l.n++
}

// reset forgets what came by a connection that has ended.
func (l *lateness) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n = 0
}

// lag returns the least of the last few; 0: there were too few.
func (l *lateness) lag() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n < latenessSample {
		return 0
	}
	return slices.Min(l.last[:])
}

// problem says, for operators, that they are late.
func (l *lateness) problem() string {
	if lag := l.lag(); lag > tooLate {
		return fmt.Sprintf("notifications come late: each of the last %d more than %v after the transaction that sent it began", latenessSample, lag.Round(time.Millisecond))
	}
	return ""
}
