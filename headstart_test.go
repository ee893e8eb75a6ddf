package pgwake_test

import (
	"math"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: is a head start as long as its levels say? That items age by it is for TestT48 in dispatch.

func TestHeadStart_EachLevelIsWorthAStep(t *testing.T) {
	for _, level := range []int{1, 2, 9, 1000} {
		const step = 5 * time.Minute
		before := time.Now()
		at := pgwake.HeadStart(level, step)
		start := time.Duration(level) * step
		require.WithinRange(t, at, before.Add(-start), time.Now().Add(-start))
	}
}

func TestHeadStart_None_IsDueAtOnceByTheServersClock(t *testing.T) {
	require.Zero(t, pgwake.HeadStart(0, time.Hour))
	require.Zero(t, pgwake.HeadStart(-1, time.Hour))
	require.Zero(t, pgwake.HeadStart(1, 0))
	require.Zero(t, pgwake.HeadStart(1, -time.Hour))
}

func TestHeadStart_TooLongForADuration_IsAsLongAsThereCanBe(t *testing.T) {
	n := newNode(t, nil)
	for _, at := range []time.Time{pgwake.HeadStart(math.MaxInt, time.Nanosecond), pgwake.HeadStart(math.MaxInt, time.Hour), pgwake.HeadStart(2, math.MaxInt64)} {
		require.WithinDuration(t, time.Now().Add(math.MinInt64), at, time.Minute)
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{At: at})
		require.NoError(t, err)
	}
}
