package dispatch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does a handler's error mean for its item?

// The causes of the end of a handler's context, for context.Cause.
var (
	// ErrTimeout: the handler has had its time (Config.Timeout).
	ErrTimeout = errors.New("handler timed out")
	// ErrStopping: the Dispatcher ends, and has waited for the handler (Config.StopTimeout). The attempt does not count.
	ErrStopping = errors.New("dispatcher is stopping")
)

// ErrNoHandler: nothing is registered for the item's name.
var ErrNoHandler = errors.New("no handler for the item")

// RetryPolicy returns how long to wait after the attempt, 1 for the first, that failed with err. Less than 0 is taken for
// 0, and more than 100 years for that; for one that panics there is Backoff(time.Second, time.Hour). It is called by several
// goroutines at a time.
type RetryPolicy func(attempt int, err error) time.Duration

// longestDelay is the Provider's.
const longestDelay = 100 * 365 * 24 * time.Hour

// Backoff returns a policy that waits for first after the first attempt, and twice as long after each that follows, up to
// most; each time a fifth more or less, at random.
func Backoff(first, most time.Duration) RetryPolicy {
	return func(attempt int, _ error) time.Duration {
		d := first
		for n := 1; n < attempt && 0 < d && d < most; n++ {
			d *= 2
		}
		if d = min(d, most, longestDelay); d <= 0 {
			return 0
		}
		return d - d/5 + rand.N(2*(d/5)+1)
	}
}

type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

// Permanent returns an error that no further attempt would help: the item becomes a dead letter. Of nil it returns nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanentError{err}
}

type retryError struct {
	error
	after time.Duration
	free  bool // the attempt does not count
}

func (e retryError) Unwrap() error { return e.error }

// RetryAfter returns an error that says how long to wait before the next attempt, not less than 0 and not more than 100
// years, or than what an EventStream takes: 40 days on RabbitMQ. Of nil it returns nil.
func RetryAfter(err error, delay time.Duration) error {
	if err == nil {
		return nil
	}
	return retryError{err, bounded(delay), false}
}

// Snooze returns an error for a handler that cannot do its item yet: it is due again after the delay, and the attempt does
// not count.
func Snooze(delay time.Duration) error {
	return retryError{fmt.Errorf("snoozed for %v", delay), bounded(delay), true}
}

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any
	Stack []byte // of the goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack) }

// Unwrap returns the value, if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// fate is what becomes of an item.
type fate int

const (
	acknowledge fate = iota
	retry            // due again after a delay
	bury             // a dead letter
	forsake          // the lease is lost
	committed        // nothing is left to be done: the handler has acknowledged it itself
)

// verdict says what is to become of an item.
type verdict struct {
	fate    fate
	delay   time.Duration
	free    bool   // the attempt does not count
	snoozed bool   // as the handler wished
	reason  string // of a dead letter
	err     error
}

// The reasons of dead letters. The first is also the Provider's, for items of which every attempt ended its process.
const (
	ReasonMaxAttempts = "max attempts"
	ReasonPermanent   = "permanent error"
)

// judge says what becomes of an item whose attempt ended with err, under a context that ended for cause, if it did.
func (r *registration) judge(h *held, err, cause error) verdict {
	switch own := h.byHandler.outcome(); {
	case own.lost:
		return verdict{fate: forsake, err: own.failure}
	case own.acked:
		return verdict{fate: committed, err: err}
	case err == nil && own.failure != nil: // it did not do what it was to
		err = own.failure
	case err == nil && !errors.Is(cause, pgwake.ErrLockLost):
		return verdict{fate: acknowledge}
	}
	return judgeAttempt(err, cause, h.item.Attempt, r.maxAttempts, r.retry)
}

// judgeAttempt says what comes of an attempt that did not succeed.
func judgeAttempt(err, cause error, attempt, maxAttempts int, policy RetryPolicy) (v verdict) {
	defer func() {
		if panicked := recover(); panicked != nil { // a nil pointer in an error, say, that it unwraps
			v = judgeAttempt(errors.New(text(err)), cause, attempt, maxAttempts, policy)
		}
	}()
	var wish retryError
	var permanent permanentError
	switch {
	case errors.Is(cause, pgwake.ErrLockLost):
		return verdict{fate: forsake, err: cause}
	case errors.Is(cause, ErrStopping):
		return verdict{fate: retry, free: true, err: beside(cause, err)}
	case errors.As(err, &permanent):
		return verdict{fate: bury, reason: ReasonPermanent, err: err}
	case errors.As(err, &wish) && wish.free:
		return verdict{fate: retry, delay: wish.after, free: true, snoozed: true}
	}
	if errors.Is(cause, ErrTimeout) && errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	switch {
	case maxAttempts != Unlimited && attempt >= maxAttempts:
		return verdict{fate: bury, reason: ReasonMaxAttempts, err: err}
	case errors.As(err, &wish):
		return verdict{fate: retry, delay: wish.after, err: err}
	}
	return verdict{fate: retry, delay: policy.after(attempt, err), err: err}
}

// beside returns why a context ended, with what the handler says to that, if it says more.
func beside(cause, err error) error {
	switch {
	case err == nil, err == context.Canceled:
		return cause
	case errors.Is(err, cause):
		return err
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// after is what the policy says, within the Provider's limits. One that does not return waits as long as the default would.
func (p RetryPolicy) after(attempt int, err error) time.Duration {
	delay, failure := hooked(func() (time.Duration, error) { return p(attempt, err), nil })
	if failure != nil {
		delay = Backoff(time.Second, time.Hour)(attempt, err)
	}
	return bounded(delay)
}

func bounded(d time.Duration) time.Duration { return min(max(d, 0), longestDelay) }
