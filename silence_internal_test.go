package pgwake

import (
	"context"
	"testing"
	"time"

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
		"it is at work beyond the lease":    {atWork: func() func(context.Context) bool { return always }, ends: 32 * time.Second, err: context.DeadlineExceeded},
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
		require.Equal(t, 4*time.Second, time.Since(began))
		require.ErrorIs(t, context.Cause(ctx), context.Canceled)
	})
}
