package dbclock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Invariant: if every measurement is honest, Local never names an instant before the server's clock gets
// there, whatever the skew and the latencies, and is late by less than the fastest reply.
func TestClock_Local_NeverEarlyAndAtMostOneTripLate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := time.Now()
		local := start
		skew := time.Duration(rapid.Int64Range(-int64(48*time.Hour), int64(48*time.Hour)).Draw(t, "skew"))
		c := New(func() time.Time { return local })
		fastest, slowest := time.Hour, time.Duration(0) // replies, and requests
		for range rapid.IntRange(1, 20).Draw(t, "trips") {
			there := time.Duration(rapid.Int64Range(0, int64(50*time.Millisecond)).Draw(t, "there"))
			back := time.Duration(rapid.Int64Range(0, int64(50*time.Millisecond)).Draw(t, "back"))
			sent := local
			read := sent.Add(there)
			local = read.Add(back)
			c.Observe(sent, local, read.Add(skew))
			fastest, slowest = min(fastest, back), max(slowest, there)
		}
		due := local.Add(time.Second)
		earliness := due.Sub(c.LocalBefore(due.Add(skew)))
		require.GreaterOrEqual(t, earliness, time.Duration(0))
		require.LessOrEqual(t, earliness, slowest+2*time.Millisecond)
		lateness := c.Local(due.Add(skew)).Sub(due)
		require.GreaterOrEqual(t, lateness, time.Duration(0))
		// The oldest measurement may be about 2 s old by now: allow its drift.
		require.LessOrEqual(t, lateness, fastest+2*time.Millisecond)
	})
}

func TestClock_ServerClockIsSet_NextSampleReplacesTheEstimate(t *testing.T) {
	now := time.Now()
	c := New(func() time.Time { return now })
	c.Observe(now, now.Add(time.Millisecond), now)
	for _, jump := range []time.Duration{5 * time.Hour, -3 * time.Hour} {
		c.Observe(now, now.Add(time.Millisecond), now.Add(jump))
		offset, uncertainty := c.Offset()
		require.InDelta(t, jump, offset, float64(time.Millisecond))
		require.LessOrEqual(t, uncertainty, time.Millisecond)
	}
}

func TestClock_WithoutMeasurement_AssumesAgreement(t *testing.T) {
	c := New(nil)
	now := time.Now()
	require.WithinDuration(t, now, c.Local(now.Round(0)), time.Millisecond)
}
