// Package dbclock relates the clock of a database server to the local monotonic clock.
//
// The server's clock is the only one that due times are measured on. Each round trip that returns
// clock_timestamp() bounds the offset between the two clocks from both sides: the server read its clock
// after the request was sent and before the reply arrived. The bounds of successive round trips are
// intersected, so the estimate is as good as the fastest of them, and widened with age, since quartz
// drifts. A sample that contradicts the bounds means that a clock was set; it replaces them.
package dbclock

import (
	"sync"
	"time"
)

// drift bounds how far two clocks diverge per second: two quartzes of 50 ppm each. While NTP slews one of them
// it can be more; what comes of that is a wake-up that is early by a part of a millisecond.
const drift = 100e-6

// Clock converts instants of the server's clock to local ones. It is safe for concurrent use.
type Clock struct {
	now  func() time.Time
	base time.Time // local instants are durations since base, on the monotonic clock

	mu         sync.Mutex
	known      bool
	low, high  time.Duration // low <= server - local <= high held at measuredAt
	measuredAt time.Duration
}

// Machine is the local clock of a Clock that is given none. A program that wants a clock that is wrong sets it before anything else runs.
var Machine = time.Now

// New returns a Clock on the given local clock; nil means Machine. Until the first Observe the two
// clocks are taken to agree.
func New(now func() time.Time) *Clock {
	if now == nil {
		now = Machine
	}
	return &Clock{now: now, base: now()}
}

// Now returns the local time.
func (c *Clock) Now() time.Time { return c.now() }

// Observe takes one measurement: server is what the server's clock read at some moment between the
// local instants sent and received.
func (c *Clock) Observe(sent, received, server time.Time) {
	reading := clamp(server.Sub(c.base))
	low, high := reading-received.Sub(c.base), reading-sent.Sub(c.base)
	at := received.Sub(c.base)

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known {
		slack := time.Duration(drift * float64(max(at-c.measuredAt, 0)))
		mergedLow, mergedHigh := max(low, c.low-slack), min(high, c.high+slack)
		if mergedLow <= mergedHigh {
			low, high = mergedLow, mergedHigh
		}
	}
	c.known, c.low, c.high, c.measuredAt = true, low, high, at
}

// Local returns the local instant by which the server's clock will have reached the given one, for
// certain: waking then is never too early, and too late by less than the fastest round trip so far.
func (c *Clock) Local(server time.Time) time.Time {
	c.mu.Lock()
	low := c.low
	c.mu.Unlock()
	return c.base.Add(clamp(server.Sub(c.base)) - low)
}

// LocalBefore returns the last local instant up to which the server's clock has not passed the given one, for certain.
func (c *Clock) LocalBefore(server time.Time) time.Time {
	c.mu.Lock()
	high := c.high
	c.mu.Unlock()
	return c.base.Add(clamp(server.Sub(c.base)) - high)
}

// clamp keeps distances so far from the limits of a Duration that sums of them cannot overflow. An instant
// beyond is as good as never.
func clamp(d time.Duration) time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	return min(max(d, -century), century)
}

// Server returns what the server's clock shows at a local instant, to the precision of Offset.
func (c *Clock) Server(local time.Time) time.Time {
	offset, _ := c.Offset()
	return c.base.Round(0).Add(local.Sub(c.base) + offset)
}

// Offset returns how far the server's clock is ahead of the local wall clock as it was when the Clock was
// made, and by how much that may be wrong.
func (c *Clock) Offset() (offset, uncertainty time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return (c.low + c.high) / 2, (c.high - c.low) / 2
}
