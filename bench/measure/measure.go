// Package measure finds out how soon pgwake hands work over, and what that costs. The demo and the bench
// command take every figure from here, so both mean the same by it.
//
// Each function is a scenario. It works on a schema of its own, which it creates and drops again, also when
// ctx ends; it opens Providers with the default settings, runs, and returns typed results with the raw
// samples. It logs nothing and prints nothing.
//
//	r, err := measure.Singles(ctx, url, measure.SinglesOptions{Items: 500})
//	fmt.Println(r.FromCommit.Summary().P50)
//
// # Definitions
//
// Handing an item over has three instants, all read from the clock of this process:
//
//	sent       just before the producer sends its enqueue, which is one statement and so commits itself
//	committed  when that statement has returned to the producer: the item is durable, and the producer knows
//	in hand    when a dispatcher's Fetch has returned the item
//
// Latency from commit is in hand - committed. A dispatcher may well be faster than the answer to the
// producer: then the latency is 0, and [Latency.Ahead] counts it. Latency from send is in hand - sent; it
// contains the producer's own commit, so only comparisons with a baseline that commits as well make sense.
// The baseline of both is [Baseline].
//
// Lateness, of timers and of leases, is in hand, in server time, minus the due instant, which the server
// knows to the microsecond. Reading the server's clock from here has an error; the results tell it.
//
// Before samples are taken, a scenario waits until its dispatchers are parked and sends some items that do
// not count, so that connections are made and statements prepared: the figures are those of a process that
// has been up for a while and is idle, not of its first second.
package measure

import (
	"context"
	"time"

	"github.com/pgwake/pgwake"
)

// Progress is how far a scenario is. Fields that mean nothing in a scenario are 0.
type Progress struct {
	Done, Total int           // items or timers
	Elapsed     time.Duration // since sampling began
	Statements  int64         // counted by the server since sampling began
	Figures     Summary       // of the samples so far: latency from commit, or lateness
}

// progressPause is the least time between two reports of progress.
const progressPause = 100 * time.Millisecond

// meter reports progress, not too often, from the goroutine of its scenario.
type meter struct {
	tell  func(Progress)
	began time.Time
	last  time.Time
}

func newMeter(tell func(Progress)) *meter { return &meter{tell: tell, began: time.Now()} }

// due reports whether it is time to tell.
func (m *meter) due() bool {
	return m.tell != nil && time.Since(m.last) >= progressPause
}

func (m *meter) report(p Progress) {
	if m.tell == nil {
		return
	}
	m.last = time.Now()
	p.Elapsed = m.last.Sub(m.began)
	m.tell(p)
}

// SafetyNet is how much work was found by other means than a notification or a timer. Both are 0 unless
// something is broken.
type SafetyNet struct {
	FallbackFinds int64 `json:"fallback_finds"` // by the statement once a minute
	ScoutFinds    int64 `json:"scout_finds"`    // by polling
}

// Plus adds up.
func (s SafetyNet) Plus(t SafetyNet) SafetyNet {
	return SafetyNet{s.FallbackFinds + t.FallbackFinds, s.ScoutFinds + t.ScoutFinds}
}

// safetyGrace is longer than the time in which a signal may still turn up for a find by the safety net. The
// counters are only final after it.
const safetyGrace = 150 * time.Millisecond

// safetyNet reads the counters of a Provider when they are final.
func safetyNet(ctx context.Context, p *pgwake.Provider) (SafetyNet, error) {
	if err := pause(ctx, safetyGrace); err != nil {
		return SafetyNet{}, err
	}
	s := p.Stats()
	return SafetyNet{
		FallbackFinds: s.Worker.FallbackFinds + s.Orchestrator.FallbackFinds,
		ScoutFinds:    s.Worker.ScoutFinds + s.Orchestrator.ScoutFinds,
	}, nil
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	wait := time.NewTimer(d)
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// orDefault replaces a zero option.
func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
