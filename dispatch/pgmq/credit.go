package pgmq

import (
	"sync"
	"time"
)

// This file answers: what can somebody cost the Stream who notifies it of nothing?
//
// In PostgreSQL whoever may connect to a database may notify any channel, of anything, at any rate. Each who waits and is told of
// something asks, which is a statement. So there is credit for those, as a Provider has it (trust.go there): each statement that a
// notification calls for is spent, time pays it back, and so does each that finds something, which no stranger can bring about. Instants
// that the database has named, and what it is asked because a connection is new, cost nothing.
//
// Invariants
//
//	(1) What is told is never dropped: without credit whoever is to ask does so when there is to be some again, at most mostDebt later,
//	    whether there is any by then or not.
//	(2) What is put off is a flag and an instant for each who waits, whatever the number of notifications.
//	(3) So in any time t notifications lead to no more statements than mostCredit, and one for each spendPause in t, and foundWorth for
//	    each that found something; or, where more wait than are paid for within mostDebt, one in that time for each of them.
const (
	mostCredit = 500
	spendPause = 20 * time.Millisecond
	foundWorth = 10 * spendPause
	mostDebt   = time.Second
)

// credit is a Stream's. The zero value is all of it. Safe for concurrent use, also with the Stream's mutex held.
type credit struct {
	mu   sync.Mutex
	paid time.Time // what was spent so far is paid for up to here, at one each spendPause; local
}

// until returns when there will be credit again; zero: there is some.
func (c *credit) until() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paid.After(time.Now()) {
		return c.paid
	}
	return time.Time{}
}

// spend takes note of a statement that a notification called for, with or without credit.
func (c *credit) spend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if full := now.Add(-mostCredit * spendPause); c.paid.Before(full) {
		c.paid = full
	}
	c.paid = c.paid.Add(spendPause)
	if most := now.Add(mostDebt); c.paid.After(most) {
		c.paid = most
	}
}

// earn takes note of a statement that found what somebody waited for.
func (c *credit) earn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paid = c.paid.Add(-foundWorth)
}
