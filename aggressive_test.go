package pgwake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func testAggressive(policy AggressivePolicy) *aggressive {
	return &aggressive{policy: policy, least: time.Minute, interval: 100 * time.Millisecond, threshold: 5}
}

func TestAggressive_Policies_DecideWhatMakesItPoll(t *testing.T) {
	for _, c := range []struct {
		policy AggressivePolicy
		why    trouble
		polls  bool
	}{
		{OnTrouble, troubleListener, true},
		{OnTrouble, troubleFetch, true},
		{OnTrouble, troubleDelivery, true},
		{OnTrouble, troubleWake, false},
		{OnEveryWake, troubleWake, true},
		{OnEveryWake, troubleFetch, true},
		{Never, troubleListener, false},
		{Never, troubleWake, false},
	} {
		a := testAggressive(c.policy)
		a.enter(c.why, time.Now())
		_, active := a.poll()
		require.Equal(t, c.polls, active, "%v on trouble %d", c.policy, c.why)
	}
}

func TestAggressive_Exit_NeedsTimeAndEmptyPollsInARow(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	a := testAggressive(OnTrouble)
	a.enter(troubleFetch, start)
	active := func() bool { _, active := a.poll(); return active }

	for range 20 { // enough empty polls, too early
		a.observe(outcomeEmpty, at(59*time.Second))
	}
	require.True(t, active())

	for _, interruption := range []outcome{outcomeFailed, outcomeFound} {
		for range 10 { // late enough, never five in a row
			for range 4 {
				a.empties = min(a.empties, 3)
				a.observe(outcomeEmpty, at(61*time.Second))
			}
			a.observe(interruption, at(61*time.Second))
			require.True(t, active())
		}
	}

	for i := range 5 {
		require.True(t, active(), "after %d", i)
		a.observe(outcomeEmpty, at(62*time.Second))
	}
	require.False(t, active())
}

func TestAggressive_NewReason_StartsTheTimeAgain(t *testing.T) {
	start := time.Now()
	a := testAggressive(OnTrouble)
	a.enter(troubleListener, start)
	a.enter(troubleFetch, start.Add(50*time.Second))
	for range 10 {
		a.observe(outcomeEmpty, start.Add(100*time.Second))
	}
	_, active := a.poll()
	require.True(t, active)
	a.observe(outcomeEmpty, start.Add(110*time.Second))
	_, active = a.poll()
	require.False(t, active)
}

// A glitch is found within 5 ms; a long outage is polled once an interval, and a new reason in the middle of
// it does not start the quick polls again.
func TestAggressive_PollTimes_DoubleUpToTheInterval(t *testing.T) {
	now := time.Now()
	a := testAggressive(OnTrouble)
	a.enter(troubleListener, now)
	var steps []time.Duration
	for range 8 {
		next, active := a.poll()
		require.True(t, active)
		steps = append(steps, next.Sub(now))
		now = next
		a.polled(now)
		a.enter(troubleFetch, now)
	}
	ms := time.Millisecond
	require.Equal(t, []time.Duration{5 * ms, 10 * ms, 20 * ms, 40 * ms, 80 * ms, 100 * ms, 100 * ms, 100 * ms}, steps)
}

// Property: it never leaves before the duration, never without `threshold` empty outcomes in a row, and always
// once both hold.
func TestAggressive_AnySequence_LeavesExactlyWhenBothConditionsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := testAggressive(OnTrouble)
		now := time.Now()
		var active bool
		var since time.Time
		empties := 0
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 20).Draw(t, "seconds")) * time.Second)
			switch rapid.SampledFrom([]string{"enter", "empty", "empty", "empty", "empty", "found", "failed"}).Draw(t, "event") {
			case "enter":
				a.enter(troubleFetch, now)
				active, since, empties = true, now, 0
			case "empty":
				a.observe(outcomeEmpty, now)
				empties++
				if empties >= a.threshold && now.Sub(since) >= a.least {
					active = false
				}
			case "found":
				a.observe(outcomeFound, now)
				empties = 0
			case "failed":
				a.observe(outcomeFailed, now)
				empties = 0
			}
			_, got := a.poll()
			require.Equal(t, active, got)
			if !active {
				empties = 0
			}
		}
	})
}
