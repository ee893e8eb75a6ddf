package taskgraph_test

import (
	"math"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: does the next attempt come when it should?

func TestT13_Backoff_AttemptAfterAttempt_DoublesUpToTheCap(t *testing.T) {
	t.Parallel()
	b := taskgraph.Backoff{Jitter: taskgraph.NoJitter}
	require.NoError(t, b.Check())
	for attempts, seconds := range []int{0, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60} {
		require.Equal(t, time.Duration(seconds)*time.Second, b.Delay(attempts), "%d attempts", attempts)
	}
	for _, attempts := range []int{30, 31, 32, 40, 62, 63, 64, 10_000, math.MaxInt} {
		require.Equal(t, time.Minute, b.Delay(attempts), "%d attempts", attempts)
	}
	require.Zero(t, b.Delay(-1))
	require.Zero(t, b.Delay(math.MinInt))
}

func TestT13_Backoff_Jitter_IsATenthAndNeverExceedsTheCap(t *testing.T) {
	t.Parallel()
	var b taskgraph.Backoff
	for attempts, seconds := range []float64{0, 2, 4, 8, 16, 32, 60, 60} {
		least, most := time.Duration(0.9*seconds*float64(time.Second)), min(time.Duration(1.1*seconds*float64(time.Second)), time.Minute)
		seen := map[time.Duration]bool{}
		for range 1000 {
			d := b.Delay(attempts)
			require.GreaterOrEqual(t, d, least)
			require.LessOrEqual(t, d, most)
			seen[d] = true
		}
		require.True(t, attempts == 0 || len(seen) > 900, "at the cap too they are spread, and not all at it: %d", len(seen))
	}
}

func TestBackoff_AnyThatIsValid_StaysWithinItsCap(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := taskgraph.Backoff{
			Base: time.Duration(rapid.Int64Min(1).Draw(t, "base")), Max: time.Duration(rapid.Int64Min(1).Draw(t, "max")),
			Multiplier: rapid.Float64Range(1, math.MaxFloat64).Draw(t, "multiplier"), Jitter: rapid.Float64Range(0, 1).Draw(t, "jitter"),
		}
		require.NoError(t, b.Check())
		d := b.Delay(rapid.IntMin(1).Draw(t, "attempts"))
		require.GreaterOrEqual(t, d, time.Duration(0))
		require.LessOrEqual(t, d, b.Max)
	})
}

func TestBackoff_Invalid_IsRefusedAndTakenForTheDefault(t *testing.T) {
	t.Parallel()
	for problem, b := range map[string]taskgraph.Backoff{
		"Base -1ns is negative":                                  {Base: -1},
		"Max -1s is negative":                                    {Max: -time.Second},
		"Multiplier 0.5 is not a number from 1":                  {Multiplier: 0.5},
		"Multiplier NaN is not a number from 1":                  {Multiplier: math.NaN()},
		"Multiplier +Inf is not a number from 1":                 {Multiplier: math.Inf(1)},
		"Jitter 1.1 is neither between 0 and 1 nor NoJitter":     {Jitter: 1.1},
		"Jitter -0.5 is neither between 0 and 1 nor NoJitter":    {Jitter: -0.5},
		"Backoff: Jitter NaN is neither between 0 and 1 nor NoJ": {Jitter: math.NaN()},
	} {
		require.ErrorIs(t, b.Check(), pgwake.ErrInvalid)
		require.ErrorContains(t, b.Check(), problem)
		require.LessOrEqual(t, b.Delay(1), 2200*time.Millisecond)
		require.GreaterOrEqual(t, b.Delay(1), 1800*time.Millisecond)
	}
}

func TestBackoff_AServerAsksForADelay_GetsItUpToTheCap(t *testing.T) {
	t.Parallel()
	b := taskgraph.Backoff{Max: 30 * time.Second}
	require.Equal(t, 20*time.Second, b.Requested(20*time.Second))
	require.Equal(t, 30*time.Second, b.Requested(math.MaxInt64))
	require.Zero(t, b.Requested(-1))
	require.Equal(t, time.Minute, taskgraph.Backoff{}.Requested(time.Hour))
}

func TestParseRetryAfter_SecondsOrADate_IsHowLongToWait(t *testing.T) {
	t.Parallel()
	now := time.Date(1994, 11, 6, 8, 49, 7, 0, time.FixedZone("", 0)).In(time.FixedZone("elsewhere", 3600))
	for header, delay := range map[string]time.Duration{
		"0":                               0,
		"20":                              20 * time.Second,
		" \t120 ":                         2 * time.Minute,
		"0020":                            20 * time.Second,
		"9223372036":                      9223372036 * time.Second,
		"9223372037":                      math.MaxInt64,
		"99999999999999999999999999":      math.MaxInt64,
		"Sun, 06 Nov 1994 08:49:37 GMT":   30 * time.Second, // the examples of RFC 9110
		"Sunday, 06-Nov-94 08:49:37 GMT":  30 * time.Second,
		"Sun Nov  6 08:49:37 1994":        30 * time.Second,
		"Sun, 06 Nov 1994 08:49:06 GMT":   0,
		" Sun, 06 Nov 1994 08:50:07 GMT ": time.Minute,
		"Fri, 31 Dec 9999 23:59:59 GMT":   math.MaxInt64,
	} {
		got, ok := taskgraph.ParseRetryAfter(header, now)
		require.True(t, ok, header)
		require.Equal(t, delay, got, header)
	}
	for _, header := range []string{"", " ", "-1", "+1", "1.5", "1s", "soon", "Sun, 06 Nov 1994 08:49:37", "1994-11-06T08:49:37Z", "Sun, 32 Nov 1994 08:49:37 GMT", "１"} {
		got, ok := taskgraph.ParseRetryAfter(header, now)
		require.False(t, ok, header)
		require.Zero(t, got, header)
	}
}
