package dispatch

import "time"

// This file answers: how many handlers run at one time?
//
// If there is a choice, as many as get most done: now and then there is one step more, or less, and what that does to the
// number of items per second decides about the next. More places do not help, and so there are fewer, where the handlers
// wait for each other or for something that they overload. Only while every place is taken and something waits does their
// number say anything; while it is not so, nothing is changed.

const (
	leastMeasured = 100 * time.Millisecond // of one number of places
	leastGain     = 0.03                   // of a rate, that is none by chance
)

type places struct {
	least, most int
	now         int

	// The measurement that is under way.
	since time.Time
	items int

	rate float64 // of the number before, items a second; 0: unknown
	step int     // that led from that to now
}

func newPlaces(c *Config) *places {
	return &places{least: c.MinConcurrency, most: c.Concurrency, now: c.MinConcurrency, step: 1}
}

// resize changes how many there may be.
func (p *places) resize(least, most int) {
	*p = places{least: least, most: most, now: min(max(p.now, least), most), step: 1}
}

// ended counts items that were handled, and reports whether the number of places changes. saturated says that every place
// was taken, and more is there to do.
func (p *places) ended(at time.Time, items int, saturated bool) (changed bool) {
	if p.least == p.most {
		return false
	}
	if p.since.IsZero() || !saturated {
		p.since, p.items, p.rate = at, 0, 0
		return false
	}
	p.items += items
	took := at.Sub(p.since)
	if took < leastMeasured || p.items < 4*p.now {
		return false
	}
	rate := float64(p.items) / took.Seconds()
	p.since, p.items = at, 0
	switch {
	case p.rate == 0:
		p.step = 1 // nothing is known: up
	case rate > p.rate*(1+leastGain):
		// It did good: on.
	case rate < p.rate*(1-leastGain):
		p.step = -p.step
	default:
		p.step = -1 // fewer do as well
	}
	p.rate = rate
	before := p.now
	p.now = min(max(p.now+p.step*max(p.now/8, 1), p.least), p.most)
	return p.now != before
}
