package measure

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestSummary_IsByNearestRank(t *testing.T) {
	hundred := make(Samples, 0, 100)
	for i := 100; i >= 1; i-- {
		hundred = append(hundred, time.Duration(i))
	}
	asTaken := slices.Clone(hundred)
	assert.Equal(t, Summary{N: 100, Min: 1, P50: 50, P95: 95, P99: 99, Max: 100}, hundred.Summary())
	assert.Equal(t, asTaken, hundred, "the samples stay in the order in which they were taken")

	assert.Equal(t, Summary{N: 5, Min: 15, P50: 35, P95: 50, P99: 50, Max: 50}, Samples{35, 20, 15, 50, 40}.Summary())
	assert.Equal(t, Summary{N: 1, Min: 7, P50: 7, P95: 7, P99: 7, Max: 7}, Samples{7}.Summary())
	assert.Equal(t, Summary{}, Samples(nil).Summary())
}

func TestNearestRank_ReturnsTheSmallestValueThatCoversThePercentage(t *testing.T) {
	// The example of the usual definition: ordinal rank = ceil(p/100 * N).
	values := []float64{15, 20, 35, 40, 50}
	for p, want := range map[float64]float64{0: 15, 5: 15, 20: 15, 20.1: 20, 30: 20, 40: 20, 50: 35, 80: 40, 80.1: 50, 100: 50} {
		assert.Equal(t, want, NearestRank(values, p), "p%v", p)
	}
}

func TestMedian_IsTheLowerOfTwo(t *testing.T) {
	assert.Equal(t, 3.0, Median([]float64{9, 3, 1}))
	assert.Equal(t, 2.0, Median([]float64{4, 2, 3, 1}))
	assert.Zero(t, Median[float64](nil))
}

func TestLatency_FromCommit_IsZeroForAnItemThatWasFaster(t *testing.T) {
	began := time.Now()
	var l Latency
	l.add(line{sent: began, committed: began.Add(3 * time.Millisecond), inHand: began.Add(2 * time.Millisecond)})
	l.add(line{sent: began, committed: began.Add(3 * time.Millisecond), inHand: began.Add(4 * time.Millisecond)})
	assert.Equal(t, Latency{
		FromCommit: Samples{0, time.Millisecond},
		FromSend:   Samples{2 * time.Millisecond, 4 * time.Millisecond},
		Ahead:      1,
	}, l)
}

func TestServerClock_InterpolatesBetweenTwoComparisons(t *testing.T) {
	base := time.Now()
	c := &serverClock{base: base,
		before: comparison{at: 0, offset: time.Hour, err: time.Microsecond},
		after:  comparison{at: 10 * time.Second, offset: time.Hour + 2*time.Millisecond, err: 3 * time.Microsecond},
	}
	assert.Equal(t, base.Round(0).Add(5*time.Second+time.Hour+time.Millisecond), c.server(base.Add(5*time.Second)))
	assert.Equal(t, time.Millisecond+3*time.Microsecond, c.uncertainty())
}
