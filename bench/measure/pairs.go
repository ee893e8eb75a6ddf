package measure

import (
	"context"
	"math/rand/v2"
	"time"
)

// This file answers: is a second item, soon after the first, as soon in hand? Queues that limit how often
// they notify, and drop what is over the limit, leave it to their next poll.

// PairsOptions are the sizes of Pairs.
type PairsOptions struct {
	Pairs       int           // Defaults to 100.
	Least, Most time.Duration // From the return of the first enqueue to the second. Default to 1 and 200 ms.
	Rest        time.Duration // Mean time from the end of one pair to the next. Defaults to 20 ms.
	Producer    Producer      // Defaults to OtherProvider.
	Peer        Peer          // Defaults to nil: pgwake. A peer's producer is always another node.
	Dispatchers int           // Defaults to 8.
	Progress    func(Progress)
}

// PairsResult is what Pairs found, in the order of the pairs.
type PairsResult struct {
	Peer     string    `json:"peer,omitempty"` // "": pgwake
	Producer Producer  `json:"producer"`
	Gaps     Samples   `json:"gaps"` // as drawn
	First    Latency   `json:"first"`
	Second   Latency   `json:"second"`
	Again    int       `json:"again"`
	Net      SafetyNet `json:"safety_net"`
}

// Pairs enqueues two items, the second 1 to 200 ms after the first, and waits for both before the next pair.
func Pairs(ctx context.Context, url string, o PairsOptions) (r *PairsResult, err error) {
	orDefault(&o.Pairs, 100)
	orDefault(&o.Least, time.Millisecond)
	orDefault(&o.Most, 200*time.Millisecond)
	orDefault(&o.Rest, 20*time.Millisecond)
	orDefault(&o.Producer, OtherProvider)
	orDefault(&o.Dispatchers, 8)
	defer func(ctx context.Context) { err = about(ctx, "pairs", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	l := newLedger(warmUps + 2*o.Pairs)
	p, err := s.cast(ctx, o.Peer, o.Producer, o.Dispatchers, l)
	if err != nil {
		return nil, err
	}
	defer p.leave(&err)
	ctx = p.ctx
	if err := p.warmUp(ctx, l, ignore); err != nil {
		return nil, err
	}

	r = &PairsResult{Peer: nameOf(o.Peer), Producer: o.Producer}
	m := newMeter(o.Progress)
	for n := warmUps; n < warmUps+2*o.Pairs; n += 2 {
		if err := pause(ctx, Uniform.draw(o.Rest)); err != nil {
			return nil, err
		}
		if err := p.now(ctx, l, n); err != nil {
			return nil, err
		}
		gap := o.Least + rand.N(o.Most-o.Least+1)
		if err := pause(ctx, gap); err != nil {
			return nil, err
		}
		if err := p.now(ctx, l, n+1); err != nil {
			return nil, err
		}
		if err := l.wait(ctx, 2, ignore); err != nil {
			return nil, err
		}
		r.Gaps = append(r.Gaps, gap)
		r.First.add(l.line(n))
		r.Second.add(l.line(n + 1))
		if done := len(r.Gaps); m.due() || done == o.Pairs {
			m.report(Progress{Done: done, Total: o.Pairs, Figures: r.Second.FromCommit.Summary()})
		}
	}
	r.Again = l.redelivered()
	r.Net, err = p.net(ctx)
	return r, err
}
