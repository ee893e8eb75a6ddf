package dispatch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// settleAt feeds a measurement of what so many places get done each second, until it has chosen so often.
func settleAt(p *places, rate func(places int) float64, choices int) (chosen []int) {
	now := time.Unix(0, 0)
	p.ended(now, 1, true)
	for before := p.now; len(chosen) < choices; before = p.now {
		for range 10_000 {
			now = now.Add(time.Duration(float64(time.Second) / rate(before)))
			if p.ended(now, 1, true); p.since.Equal(now) {
				break
			}
		}
		chosen = append(chosen, p.now)
	}
	return chosen
}

func TestPlaces_EachGetsMoreDone_GrowsToTheMost(t *testing.T) {
	p := newPlaces(&Config{MinConcurrency: 1, Concurrency: 64})
	chosen := settleAt(p, func(n int) float64 { return 100 * float64(n) }, 100)
	require.Subset(t, chosen, []int{64})
	for _, n := range chosen[50:] {
		require.Greater(t, n, 40, chosen)
	}
}

func TestPlaces_MoreThanEightGetNoMoreDone_StaysAboutThere(t *testing.T) {
	p := newPlaces(&Config{MinConcurrency: 1, Concurrency: 64})
	chosen := settleAt(p, func(n int) float64 { return 100 * float64(min(n, 8)) }, 200)
	for _, n := range chosen[50:] {
		require.GreaterOrEqual(t, n, 5, chosen)
		require.LessOrEqual(t, n, 12, chosen)
	}
}

func TestPlaces_TooManyGetLessDone_ComesDown(t *testing.T) {
	p := newPlaces(&Config{MinConcurrency: 1, Concurrency: 64})
	p.now = 64
	chosen := settleAt(p, func(n int) float64 {
		if n <= 8 {
			return 100 * float64(n)
		}
		return 800 * 8 / float64(n)
	}, 200)
	for _, n := range chosen[100:] {
		require.LessOrEqual(t, n, 14, chosen)
	}
}

func TestPlaces_NotSaturated_StaysAsItIs(t *testing.T) {
	p := newPlaces(&Config{MinConcurrency: 2, Concurrency: 64})
	now := time.Unix(0, 0)
	for range 1000 {
		now = now.Add(time.Millisecond)
		p.ended(now, 1, false)
	}
	require.Equal(t, 2, p.now)
}

func TestPlaces_Fixed_NeverMoves(t *testing.T) {
	p := newPlaces(&Config{MinConcurrency: 10, Concurrency: 10})
	now := time.Unix(0, 0)
	for range 1000 {
		now = now.Add(time.Millisecond)
		p.ended(now, 1, true)
	}
	require.Equal(t, 10, p.now)
	require.Zero(t, p.since, "nothing is measured")
}
