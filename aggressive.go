package pgwake

import "time"

// This file answers: when does a node poll a queue although it listens, and how often?
//
// aggressive is a pure state machine: no I/O, no goroutine, the time is passed in. It has two states.
//
//	LongPoll   --enter(reason)--> Aggressive
//	Aggressive --AggressiveDuration since the last reason has passed
//	             AND AggressiveExitThreshold queries in a row, or polls of several lanes, succeeded and found nothing--> LongPoll
//
// A poll that finds work or fails starts the count again: while either happens, something is still amiss
// or notifications are still being missed.

// trouble is a reason to enter the aggressive state.
type trouble int

const (
	troubleListener trouble = iota // the LISTEN connection was lost or refused
	troubleFetch                   // a fetch failed in the database
	troubleDelivery                // a notification was not taken within NotifyDeliveryTimeout by a parked dispatcher
	troubleWake                    // no trouble at all: policy OnEveryWake
)

// outcome of one query for work.
type outcome int

const (
	outcomeEmpty outcome = iota
	outcomeFound
	outcomeFailed
)

// firstScoutInterval is the pause before the first poll: a glitch is found at once. It doubles up to
// AggressiveInterval, so that a long outage is not hammered.
const firstScoutInterval = 5 * time.Millisecond

type aggressive struct {
	policy    AggressivePolicy
	least     time.Duration // AggressiveDuration
	interval  time.Duration // AggressiveInterval
	threshold int           // AggressiveExitThreshold

	active  bool
	since   time.Time // of the last reason
	empties int       // successful empty fetches in a row
	step    time.Duration
	next    time.Time // when to poll next
}

func newAggressive(c *Config) *aggressive {
	return &aggressive{
		policy: c.AggressivePolicy, least: c.AggressiveDuration,
		interval: c.AggressiveInterval, threshold: c.AggressiveExitThreshold,
	}
}

// enter begins polling, or goes on with it, for the given reason.
func (a *aggressive) enter(why trouble, now time.Time) {
	if a.policy == Never || (why == troubleWake && a.policy != OnEveryWake) {
		return
	}
	if !a.active {
		a.active = true
		a.step = firstScoutInterval
		a.next = now.Add(a.step)
	}
	a.since, a.empties = now, 0
}

// observe takes the outcome of a query for work into account.
func (a *aggressive) observe(o outcome, now time.Time) {
	if !a.active {
		return
	}
	if o != outcomeEmpty {
		a.empties = 0
		return
	}
	a.empties++
	if a.empties >= a.threshold && now.Sub(a.since) >= a.least {
		a.active = false
	}
}

// poll returns when the next poll is due; false means that none is.
func (a *aggressive) poll() (time.Time, bool) { return a.next, a.active }

// polled schedules the poll after one that was made now.
func (a *aggressive) polled(now time.Time) {
	a.step = min(2*a.step, a.interval)
	a.next = now.Add(a.step)
}
