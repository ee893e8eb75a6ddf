package pgwake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Invariant of leases.go: every lease has an instant that was told after its claim and not past its end, and
// equal timeouts cost at most one notification per half of it.
func TestLeases_AnyClaims_AreCoveredByAnAnnouncedInstant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var known leases
		var told []time.Time
		now := time.Now()
		timeouts := rapid.SliceOfN(rapid.IntRange(1, 60), 1, 3).Draw(t, "timeouts")
		last := make(map[int]time.Time)
		for range rapid.IntRange(1, 100).Draw(t, "claims") {
			now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond)
			seconds := rapid.SampledFrom(timeouts).Draw(t, "timeout")
			timeout := time.Duration(seconds) * time.Second
			end := now.Add(timeout)
			if known.announce(Worker, now, timeout) {
				if before, ok := last[seconds]; ok {
					require.GreaterOrEqual(t, now.Sub(before), timeout/2, "announced twice within half the timeout")
				}
				last[seconds] = now
				known.told(Worker, end)
				told = append(told, end)
			}
			covered := false
			for _, at := range told {
				covered = covered || (at.After(now) && !at.After(end))
			}
			require.True(t, covered, "a lease of %v claimed at %v", timeout, now)
		}
	})
}

// What was told before a node began to listen does not cover it, and is looked at all the same.
func TestLeases_NodeJoins_IsToldTheNextInstantAndCoveredAnew(t *testing.T) {
	var known leases
	now := time.Now()
	at := now.Add(30 * time.Second)
	known.told(Worker, at)
	require.Equal(t, at, known.joined(Worker, now))
	require.True(t, known.announce(Worker, now, 30*time.Second))
	require.Equal(t, at, known.next(Worker, now))
	known.told(Worker, at)
	require.False(t, known.announce(Worker, now, 30*time.Second))
	require.Zero(t, known.joined(Orchestrator, now))
}

func TestLeases_OtherQueue_IsNotCovered(t *testing.T) {
	var known leases
	now := time.Now()
	known.told(Worker, now.Add(30*time.Second))
	require.False(t, known.announce(Worker, now, 30*time.Second))
	require.True(t, known.announce(Orchestrator, now, 30*time.Second))
}
