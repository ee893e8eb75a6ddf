package pgwake

import (
	"fmt"
	"sync"
	"time"
)

// This file answers: what can somebody cost this node who notifies it of nothing?
//
// In PostgreSQL whoever may connect to a database may notify any channel, of anything, at any rate. Of what a notification says a node
// believes only that it is time to look; but a look is a statement. So there is credit for those. Each statement that a notification, or an
// instant that one may have told of, calls for is spent; time pays it back, and so does each query that finds work, which no stranger can
// bring about. What producers do pays for itself like that, although all nodes may be told of one item, and but one of them finds it.
//
// Only statements are spent, not notifications. Any number that come while one statement is owed are answered by it (wakechain.go).
//
// Invariants
//
//	(1) A notification is never dropped: without credit it is put off, to an instant at which somebody looks whether there is credit or not.
//	    That is when there is to be credit again, at most mostDebt later.
//	(2) What is put off is a flag and an instant: for a lane, for those who wait for instances, for a Watch, for what the coalescer is to say
//	    on behalf of others. Only of questions (reports.go) there is a list, with an end: who asks can ask again.
//	(3) So in any time t notifications lead to no more statements than mostCredit, and one for each spendPause in t, and foundWorth, or two for
//	    each node that the database knows of, for each query that found work; and those that were called for at one moment, one for each
//	    waiting dispatcher at most.
const (
	mostCredit = 500
	spendPause = 20 * time.Millisecond
	foundWorth = 10 * spendPause
	mostDebt   = time.Second
)

// trust is a node's credit. Safe for concurrent use, also with a lane's mutex held.
type trust struct {
	now func() time.Time

	mu    sync.Mutex
	paid  time.Time // what was spent so far is paid for up to here, at one each spendPause; local
	nodes int64     // that listen
}

func newTrust(now func() time.Time) *trust { return &trust{now: now} }

// until returns when there will be credit again; zero: there is some.
func (t *trust) until() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.paid.After(t.now()) {
		return t.paid
	}
	return time.Time{}
}

// spend takes note of a statement that a notification called for, with or without credit.
func (t *trust) spend() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	if full := now.Add(-mostCredit * spendPause); t.paid.Before(full) {
		t.paid = full
	}
	t.paid = t.paid.Add(spendPause)
	if most := now.Add(mostDebt); t.paid.After(most) {
		t.paid = most
	}
}

// earn takes note of a query that found what somebody waited for.
func (t *trust) earn() {
	t.mu.Lock()
	defer t.mu.Unlock()
	// Of what all are told each finds its share, more or less.
	t.paid = t.paid.Add(-max(foundWorth, time.Duration(2*t.nodes)*spendPause))
}

// among takes note of how many nodes the database knows of.
func (t *trust) among(nodes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.nodes = nodes
}

// putOff reports whether something has to wait, and sets at to the instant until when. If at is set, it waits already, for whoever clears that.
func (t *trust) putOff(at *time.Time) bool {
	if at.IsZero() {
		*at = t.until()
	}
	return !at.IsZero()
}

// problem says, for operators, that there is no credit.
func (t *trust) problem() string {
	if t.until().IsZero() {
		return ""
	}
	const text = "more notifications come than there is work: they are looked into %d times a second, and up to %v later"
	return fmt.Sprintf(text, time.Second/spendPause, mostDebt)
}
