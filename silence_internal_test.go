package pgwake

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

func TestSilence_IsOver_WhenTheServerIsNotAtWork(t *testing.T) {
	const lease = 30 * time.Second
	never := func(context.Context) bool { return false }
	always := func(context.Context) bool { return true }
	gone := func(ctx context.Context) bool { <-ctx.Done(); return false }
	until := func(end time.Duration) func(context.Context) bool {
		began := time.Now()
		return func(context.Context) bool { return time.Since(began) < end }
	}
	for name, c := range map[string]struct {
		atWork func() func(context.Context) bool
		rows   []time.Duration // when they come
		ends   time.Duration   // zero: it does not
		err    error
	}{
		"it says that it does nothing":      {atWork: func() func(context.Context) bool { return never }, ends: 5 * time.Second, err: errPoolSilent},
		"it says nothing":                   {atWork: func() func(context.Context) bool { return gone }, ends: 5 * time.Second, err: errPoolSilent},
		"a row came":                        {atWork: func() func(context.Context) bool { return never }, rows: []time.Duration{3 * time.Second}, ends: 8 * time.Second, err: errPoolSilent},
		"a row came while it was asked":     {atWork: func() func(context.Context) bool { return gone }, rows: []time.Duration{4500 * time.Millisecond}, ends: 9500 * time.Millisecond, err: errPoolSilent},
		"rows come for longer than a lease": {atWork: func() func(context.Context) bool { return never }, rows: every(4500*time.Millisecond, 40*time.Second)},
		"it was at work":                    {atWork: func() func(context.Context) bool { return until(14 * time.Second) }, ends: 17 * time.Second, err: errPoolSilent},
		"it is at work beyond the lease":    {atWork: func() func(context.Context) bool { return always }, ends: lease, err: context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				ctx, giveUp := context.WithCancelCause(t.Context())
				began := time.Now()
				s := &silence{ctx: ctx, giveUp: giveUp, longest: 5 * time.Second, lease: lease, sent: began}
				s.begin(c.atWork())
				for _, at := range c.rows {
					time.Sleep(time.Until(began.Add(at)))
					require.NoError(t, ctx.Err())
					s.rowCame()
				}
				if c.ends == 0 {
					s.stop()
					require.ErrorIs(t, context.Cause(ctx), context.Canceled)
					return
				}
				<-ctx.Done()
				require.Equal(t, c.ends, time.Since(began))
				require.ErrorIs(t, context.Cause(ctx), c.err)
				s.stop()
			})
		})
	}
}

func every(step, end time.Duration) (instants []time.Duration) {
	for at := step; at <= end; at += step {
		instants = append(instants, at)
	}
	return instants
}

// A claim that is answered while the server is asked about it waits for the one who asks, and for nothing else.
func TestSilence_StoppedWhileTheServerIsAsked_EndsAtOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, giveUp := context.WithCancelCause(t.Context())
		began := time.Now()
		s := &silence{ctx: ctx, giveUp: giveUp, longest: 5 * time.Second, lease: time.Minute, sent: began}
		asked := make(chan struct{})
		s.begin(func(ctx context.Context) bool { close(asked); <-ctx.Done(); return true })
		<-asked
		s.stop()
		require.Equal(t, 2*time.Second, time.Since(began))
		require.ErrorIs(t, context.Cause(ctx), context.Canceled)
	})
}

// Hooks of the pool are the caller's: they may panic, or not know when to end.
func TestClaimsAtWork_HookPanicsOrTakesLong_NobodyIsHeldUp(t *testing.T) {
	p := testProvider(t, Config{Logger: slog.New(slog.DiscardHandler)})
	p.inFlight.Add(1) // the claim
	defer p.inFlight.Done()
	oldest := func(ctx context.Context) time.Duration {
		return p.claimsAtWork(ctx, Worker).age
	}
	require.Zero(t, oldest(t.Context()), "there is none")

	before := p.direct.before
	p.direct.before = func(context.Context, *pgx.ConnConfig) error { panic("of the caller's") }
	require.Zero(t, oldest(t.Context()))

	var asked atomic.Int32
	hook := make(chan struct{})
	p.direct.before = func(context.Context, *pgx.ConnConfig) error { asked.Add(1); <-hook; return nil }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan time.Duration)
	for range 10 {
		go func() { ended <- oldest(ctx) }()
	}
	eventually(t, "it is asked", func() bool { return asked.Load() > 0 })
	cancel()
	for range 10 {
		require.Zero(t, <-ended)
	}
	require.EqualValues(t, 1, asked.Load(), "one asks for all")
	close(hook)
	eventually(t, "the answer is there", func() bool {
		p.inquiries[Worker].mu.Lock()
		defer p.inquiries[Worker].mu.Unlock()
		return p.inquiries[Worker].last == nil
	})
	p.direct.before = before
}
