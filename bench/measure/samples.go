package measure

import (
	"math"
	"slices"
	"time"
)

// This file answers: what do many durations amount to?

// Samples are raw durations, in the order in which they were taken.
type Samples []time.Duration

// Summary is the usual extract of Samples. All fields are 0 if there were none.
type Summary struct {
	N                       int
	Min, P50, P95, P99, Max time.Duration
}

// Summary returns the extract, by nearest rank: each figure is one of the samples, none is interpolated.
func (s Samples) Summary() Summary {
	sorted := slices.Sorted(slices.Values(s))
	return Summary{
		N:   len(sorted),
		Min: NearestRank(sorted, 0),
		P50: NearestRank(sorted, 50),
		P95: NearestRank(sorted, 95),
		P99: NearestRank(sorted, 99),
		Max: NearestRank(sorted, 100),
	}
}

// NearestRank returns the smallest of the sorted values that at least p percent of them do not exceed, for
// p from 0 (the minimum) to 100 (the maximum); 0 if there are none.
func NearestRank[T any](sorted []T, p float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Median returns the middle value, the lower one of two.
func Median[T interface{ ~int64 | ~float64 }](values []T) T {
	return NearestRank(slices.Sorted(slices.Values(values)), 50)
}
