package pgwake

import (
	"math"
	"time"
)

// This file answers: how is what is urgent done first, while nothing else waits for ever?

// HeadStart returns the EnqueueOptions.At of an item that is so many levels more urgent than others, where each level is worth a step of
// time: it is fetched as if it had been enqueued level*step before. So items age. One is overtaken by those that are more urgent, by as
// many levels as there are between them, while they are enqueued less than that many steps after it; what comes later waits behind it,
// however urgent it is. The order of any two items is the same at all times, and age counts without an end.
//
// It replaces Priority, which never ages: items that are to be compared have the same one, and the same step. For level 0, and less, it
// returns the zero time: due at once. Otherwise it goes by the clock of this process, so one that is ahead of the server's takes as much
// from the head start, and one that is behind adds to it.
func HeadStart(level int, step time.Duration) time.Time {
	if level <= 0 || step <= 0 {
		return time.Time{}
	}
	start := time.Duration(math.MaxInt64) // 292 years, and no overflow
	if step <= start/time.Duration(level) {
		start = time.Duration(level) * step
	}
	return time.Now().Add(-start)
}
