package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
)

// This file answers: what is done while the database is away?

// The pauses between fetches, or the attempts of a verb.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = time.Second

	untilMended = 5 * time.Second // for what somebody has to do something about
)

// emptyPause is from one fetch to the next of a Source that does not wait for work, such as a Provider with DisableLongPoll.
const emptyPause = 100 * time.Millisecond

// longer is the pause after one; 0: the first.
func longer(pause time.Duration) time.Duration { return min(max(2*pause, firstPause), lastPause) }

// patience is how a loop of fetches takes their errors.
type patience struct {
	log    *slog.Logger
	muted  func() bool   // nil: it logs each time
	pause  time.Duration // 0: the last one did not fail
	served *atomic.Bool  // whether a fetch has been answered, of whoever shares this; nil: only what is Retryable is waited out
	poll   time.Duration // for how long the Source is to wait for work; 0: as it likes
	asked  time.Time     // about when the last one began; zero: there was none
}

// after reports whether to fetch again after one that returned err, when it is time for that. The error is one that will
// not go away. Invariant: nothing that the server is like for a while ends who fetches. That a right or a table is missing is a mistake if it
// is so from the beginning, and otherwise something that is being done there.
func (p *patience) after(ctx context.Context, err error) (goOn bool, _ error) {
	asked := p.asked
	defer func() { p.asked = time.Now() }()
	var failure *pgwake.Error
	switch {
	case err == nil, errors.Is(err, pgwake.ErrNoWork):
		p.pause = 0
		if least := emptyPause; err != nil && !asked.IsZero() {
			if p.poll > 0 {
				least = min(least, p.poll)
			}
			if left := least - time.Since(asked); left > 0 {
				nap(ctx, jittered(left))
			}
		}
		return ctx.Err() == nil, nil
	case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
		return false, nil
	case !outage.Passes(err), !errors.As(err, &failure):
		return false, err
	case failure.Retryable:
		p.pause = longer(p.pause)
	case p.served != nil && (p.served.Load() || outage.OfTheServer(failure)):
		p.pause = untilMended
	default:
		return false, err
	}
	again := jittered(p.pause)
	if p.muted == nil || !p.muted() {
		p.log.Warn("dispatch: cannot fetch", "error", err, "again_in", again)
	}
	nap(ctx, again)
	return ctx.Err() == nil, nil
}

// heard takes note of what came of a fetch, before what it brought is dealt with: others may fetch meanwhile.
func (p *patience) heard(err error) {
	if p.served != nil && (err == nil || errors.Is(err, pgwake.ErrNoWork)) {
		p.served.Store(true)
	}
}

// jittered returns d or up to a tenth less, at random: what many processes do now and then they are not to do together.
func jittered(d time.Duration) time.Duration { return d - rand.N(max(d/10, 0)+1) }

// nap waits for d, or until ctx ends.
func nap(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// verbTimeout bounds one attempt of a verb: the first, of one that is made again until it succeeds. Such a one may send much over a slow
// network, and no number of attempts would ever do if each were ended before it can be over. So each that was ended by its time leaves
// the next twice as long; one that is sent into the void, which is more likely at first, is made again soon all the same.
const verbTimeout = 10 * time.Second

// mending is for how long a call is repeated that somebody has to do something about: he is not to find that all has come to stand for the sake of
// what cannot be done, with leases that are kept for as long.
type mending struct{ since time.Time }

// mendingPatience is that long. It is the default of LockTimeout, after which others would have the item.
const mendingPatience = 30 * time.Second

// over reports whether that time is over, for an error that passes. What is Retryable needs nobody, and has all the time of the lease.
func (m *mending) over(err error) bool {
	var failure *pgwake.Error
	switch {
	case errors.As(err, &failure) && failure.Retryable:
		m.since = time.Time{}
		return false
	case m.since.IsZero():
		m.since = time.Now()
	}
	return time.Since(m.since) >= mendingPatience
}

// persist makes a call until it succeeds, fails for a reason that stays, or that nobody mends, or the lease is about to end. mayHave says that one before
// the last may have succeeded, since no answer to it came: that the lease is lost is no news then.
func persist(ctx context.Context, end func() time.Time, call func(context.Context) error) (mayHave bool, _ error) {
	allowed := min(verbTimeout, max(time.Until(end()), firstPause))
	var mending mending
	for pause := firstPause; ; pause = longer(pause) {
		timeUp, err := try(ctx, allowed, end, call)
		if timeUp {
			allowed *= 2
		}
		if !outage.Passes(err) || mending.over(err) || ctx.Err() != nil || !time.Now().Before(end().Add(-firstPause)) {
			return mayHave, err
		}
		mayHave = mayHave || unknown(err)
		nap(ctx, time.Until(nextAttempt(pause, end())))
	}
}

// unknown reports whether what failed with err may have taken effect all the same.
func unknown(err error) bool {
	var failure *pgwake.Error
	return errors.As(err, &failure) && failure.Unknown
}

// try makes a call, which has so much time, and none beyond the end of the lease: as that is then, since the lease may be renewed
// meanwhile. timeUp says that it failed since what it was allowed was over; if the lease was, the error is Retryable as well.
func try(ctx context.Context, allowed time.Duration, end func() time.Time, call func(context.Context) error) (timeUp bool, err error) {
	bounded, cancel := context.WithTimeout(ctx, allowed)
	defer cancel()
	switch left := time.Until(end()); {
	case left <= 0:
		cancel()
	case left < allowed:
		go func() {
			defer cancel()
			for left > 0 && bounded.Err() == nil {
				nap(bounded, left)
				left = time.Until(end())
			}
		}()
	}
	err = call(bounded)
	if err == nil || ctx.Err() != nil {
		return false, err
	}
	// A context that ends at an instant yet to be known is cancelled, which whoever is called takes for the wish of its caller.
	if failure := (*pgwake.Error)(nil); bounded.Err() == context.Canceled && errors.Is(err, context.Canceled) && errors.As(err, &failure) {
		err = &pgwake.Error{Op: failure.Op, Err: errNoTime, Retryable: true, Unknown: failure.Unknown}
	}
	return bounded.Err() == context.DeadlineExceeded, err
}

// nextAttempt is after a pause, but for the last one: that is made just before the lease ends, and leaves time to give back.
func nextAttempt(pause time.Duration, end time.Time) time.Time {
	next, last := time.Now().Add(jittered(pause)), end.Add(-firstPause)
	if last.After(time.Now()) {
		return minTime(next, last)
	}
	return next
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
