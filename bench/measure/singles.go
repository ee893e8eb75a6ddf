package measure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// This file answers: how soon is a single item in hand, on a node that has nothing to do?

// Gaps says how the times between two enqueues are distributed.
type Gaps string

const (
	// Uniform gaps are anything from 0 to twice the mean.
	Uniform Gaps = "uniform"
	// Exponential gaps are those of independent producers; some are very short, none is over 5 times the
	// mean here.
	Exponential Gaps = "exponential"
)

func (g Gaps) draw(mean time.Duration) time.Duration {
	if g == Exponential {
		return min(time.Duration(rand.ExpFloat64()*float64(mean)), 5*mean)
	}
	return rand.N(2*mean + 1)
}

// SinglesOptions are the sizes of Singles.
type SinglesOptions struct {
	Items       int           // Defaults to 500.
	Gap         time.Duration // Mean time from one enqueue's return to the next. Defaults to 20 ms.
	Gaps        Gaps          // Defaults to Uniform.
	Producer    Producer      // Defaults to OtherProvider.
	Peer        Peer          // Defaults to nil: pgwake. A peer's producer is always another node.
	Dispatchers int           // Defaults to 8.
	Progress    func(Progress)
}

// SinglesResult is what Singles found.
type SinglesResult struct {
	Peer     string   `json:"peer,omitempty"` // "": pgwake
	Producer Producer `json:"producer"`
	Latency
	Again int       `json:"again"` // deliveries beyond the first
	Net   SafetyNet `json:"safety_net"`
}

// Singles enqueues items one at a time at random instants and takes the latency of each.
func Singles(ctx context.Context, url string, o SinglesOptions) (r *SinglesResult, err error) {
	orDefault(&o.Items, 500)
	orDefault(&o.Gap, 20*time.Millisecond)
	orDefault(&o.Gaps, Uniform)
	orDefault(&o.Producer, OtherProvider)
	orDefault(&o.Dispatchers, 8)
	defer func(ctx context.Context) { err = about(ctx, "singles", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	l := newLedger(warmUps + o.Items)
	p, err := s.cast(ctx, o.Peer, o.Producer, o.Dispatchers, l)
	if err != nil {
		return nil, err
	}
	defer p.leave(&err)
	ctx = p.ctx
	if err := p.warmUp(ctx, l, ignore); err != nil {
		return nil, err
	}

	r = &SinglesResult{Peer: nameOf(o.Peer), Producer: o.Producer}
	m := newMeter(o.Progress)
	see := func(n int) {
		r.add(l.line(n))
		if m.due() {
			m.report(Progress{Done: len(r.FromCommit), Total: o.Items, Figures: r.FromCommit.Summary()})
		}
	}
	for n := warmUps; n < warmUps+o.Items; n++ {
		if err := pause(ctx, o.Gaps.draw(o.Gap)); err != nil {
			return nil, err
		}
		if err := p.now(ctx, l, n); err != nil {
			return nil, err
		}
		if err := l.wait(ctx, len(l.arrived), see); err != nil {
			return nil, err
		}
	}
	if err := l.wait(ctx, o.Items-len(r.FromCommit), see); err != nil {
		return nil, err
	}
	r.Again = l.redelivered()
	m.report(Progress{Done: o.Items, Total: o.Items, Figures: r.FromCommit.Summary()})
	r.Net, err = p.net(ctx)
	return r, err
}

// about says which scenario failed, and why ctx has ended if others were told that it has.
func about(ctx context.Context, scenario string, err error) error {
	if err == nil {
		return nil
	}
	if why := context.Cause(ctx); why != nil && !errors.Is(err, why) {
		err = errors.Join(why, err)
	}
	return fmt.Errorf("measure %s: %w", scenario, err)
}
