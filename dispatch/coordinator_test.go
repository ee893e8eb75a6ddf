package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: how soon is a namespace served again that could not be?

func TestKeep_FailureAfterAShiftThatLasted_PauseIsShortAgain(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		k := &coordinator{c: &Coordinators{log: slog.New(slog.DiscardHandler)}}
		const failures = 15
		var ends []time.Time
		var pauses []time.Duration // before each shift but the first
		k.keep(t.Context(), func(context.Context) error {
			if len(ends) > 0 {
				pauses = append(pauses, time.Since(ends[len(ends)-1]))
			}
			if len(ends) == failures {
				time.Sleep(time.Hour)
			}
			ends = append(ends, time.Now())
			if len(ends) > failures+1 {
				return nil
			}
			return errors.New("no")
		})
		require.Len(t, pauses, failures+1)
		require.LessOrEqual(t, pauses[0], firstPause)
		require.Greater(t, pauses[failures-1], longestPause/2, "they have grown")
		require.LessOrEqual(t, pauses[failures], firstPause, "it had nothing to do with those before")
	})
}
