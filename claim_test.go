package pgwake

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: how long is a claim undone of which no answer came?

func TestGiveBack_DatabaseIsAway_GoesOnUntilTheLeaseEnds(t *testing.T) {
	unreachable := errors.New("unreachable")
	for name, c := range map[string]struct {
		away   time.Duration // from the claim on
		undone bool
		tried  time.Duration // the last time
	}{
		"not at all":              {0, true, 0},
		"for a moment":            {time.Second, true, 1100 * time.Millisecond},
		"for long":                {20 * time.Second, true, 21100 * time.Millisecond},
		"until the lease ends":    {time.Hour, false, 31100 * time.Millisecond},
		"and it was no claim":     {20 * time.Second, false, 21100 * time.Millisecond},
		"there was never a claim": {0, false, 6100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			virtualtime.Test(t, func(t *testing.T) {
				p := &Provider{closing: make(chan struct{}), abort: t.Context()}
				p.cfg.Logger = slog.New(slog.DiscardHandler)
				began, last := time.Now(), time.Duration(-1)
				p.giveBack(func(context.Context, time.Duration) (bool, error) {
					if last = time.Since(began); last < c.away {
						return false, unreachable
					}
					return c.undone, nil
				}, 30*time.Second)
				require.Equal(t, c.tried, last)
			})
		})
	}
}

func TestGiveBack_DatabaseIsAwayForAMomentDuringClose_ClaimIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &Provider{closing: make(chan struct{}), abort: t.Context()}
		close(p.closing)
		began, tries := time.Now(), 0
		away := errors.New("away")
		p.giveBack(func(context.Context, time.Duration) (bool, error) {
			if tries++; tries < 3 {
				return false, away
			}
			return true, nil
		}, time.Hour)
		require.Equal(t, 3, tries)
		p.giveBack(func(context.Context, time.Duration) (bool, error) { return false, away }, time.Hour)
		require.Less(t, time.Since(began), 2*closingPatience, "Close may have no end of its own")
	})
}
