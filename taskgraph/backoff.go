package taskgraph

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how long is it until the next attempt?

// Backoff says how long to wait after an attempt that failed, if neither the step nor the error says so. The zero Backoff
// means the defaults.
type Backoff struct {
	Base       time.Duration // Defaults to 1 s.
	Max        time.Duration // of any delay, also of one that a server asked for. Defaults to 60 s.
	Multiplier float64       // from one attempt to the next. At least 1. Defaults to 2.

	// Jitter spreads delays at random, by this part of them to either side, so that what failed together does not come back
	// together. It never exceeds Max. Up to 1; NoJitter for none. Defaults to 0.1.
	Jitter float64
}

// NoJitter is a Backoff.Jitter without which 0 would mean the default.
const NoJitter = -1

// resolve returns b with its defaults, or says what of it is invalid.
func (b Backoff) resolve() (Backoff, error) {
	if b.Base == 0 {
		b.Base = time.Second
	}
	if b.Max == 0 {
		b.Max = time.Minute
	}
	if b.Multiplier == 0 {
		b.Multiplier = 2
	}
	switch {
	case b.Jitter == 0:
		b.Jitter = 0.1
	case b.Jitter == NoJitter:
		b.Jitter = 0
	}
	var problem string
	switch {
	case b.Base < 0:
		problem = fmt.Sprintf("Base %v is negative", b.Base)
	case b.Max < 0:
		problem = fmt.Sprintf("Max %v is negative", b.Max)
	case !(b.Multiplier >= 1) || math.IsInf(b.Multiplier, 1):
		problem = fmt.Sprintf("Multiplier %v is not a number from 1", b.Multiplier)
	case !(b.Jitter >= 0 && b.Jitter <= 1):
		problem = fmt.Sprintf("Jitter %v is neither between 0 and 1 nor NoJitter", b.Jitter)
	default:
		return b, nil
	}
	return Backoff{}, fmt.Errorf("%w: Backoff: %s", pgwake.ErrInvalid, problem)
}

// Check fails with pgwake.ErrInvalid unless each field is within its limits.
func (b Backoff) Check() error {
	_, err := b.resolve()
	return err
}

// Delay returns how long to wait after that many attempts: Base * Multiplier^attempts, but not more than Max; 2, 4, 8, 16, 32,
// 60, 60 s by default, give or take a tenth. After none it is 0. A Backoff that fails Check is taken for the zero one.
func (b Backoff) Delay(attempts int) time.Duration { return b.delay(attempts, rand.Float64()) }

// delay spreads by chance, from 0 to 1.
func (b Backoff) delay(attempts int, chance float64) time.Duration {
	if attempts <= 0 {
		return 0
	}
	r := b.resolved()
	longest := float64(r.Max)
	middle := min(float64(r.Base)*math.Pow(r.Multiplier, float64(attempts)), longest) // which may be infinite before
	least, most := middle*(1-r.Jitter), min(middle*(1+r.Jitter), longest)
	if delay := least + chance*(most-least); delay < longest {
		return time.Duration(delay)
	}
	return r.Max
}

// Requested returns how long to wait if somebody asks for d, such as a server with Retry-After: that, but not more than Max
// and not less than 0.
func (b Backoff) Requested(d time.Duration) time.Duration { return min(max(d, 0), b.resolved().Max) }

func (b Backoff) resolved() Backoff {
	r, err := b.resolve()
	if err != nil {
		r, _ = Backoff{}.resolve()
	}
	return r
}

// ParseRetryAfter reads the value of a Retry-After header (RFC 9110, section 10.2.3): a number of seconds, or a date, from
// which now is subtracted. A date that has passed is 0. It reports false if the header is neither. See Backoff.Requested for
// what to make of it.
func ParseRetryAfter(header string, now time.Time) (time.Duration, bool) {
	header = strings.Trim(header, " \t")
	if header != "" && strings.Trim(header, "0123456789") == "" {
		seconds, err := strconv.ParseInt(header, 10, 64)
		if err != nil || seconds > int64(math.MaxInt64/time.Second) {
			return math.MaxInt64, true
		}
		return time.Duration(seconds) * time.Second, true
	}
	// In the order of RFC 9110, section 5.6.7: the form of today, that of RFC 850, and that of C's asctime. All are in GMT.
	for _, layout := range [...]string{"Mon, 02 Jan 2006 15:04:05 GMT", "Monday, 02-Jan-06 15:04:05 GMT", time.ANSIC} {
		if at, err := time.Parse(layout, header); err == nil {
			return max(at.Sub(now), 0), true
		}
	}
	return 0, false
}
