package dispatch

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// This file answers: how many items a second are handled?
//
// Nothing ticks for it: a second begins with an attempt that ends, and what ended within it is told by the first one after, or when Run
// ends. So an idle Dispatcher is not woken, and seconds in which nothing ended are not told.

type throughput struct {
	perSecond metric.Int64Histogram
	of        func(namespace string) metric.MeasurementOption

	mu    sync.Mutex
	until time.Time        // of the second that goes on
	ended map[string]int64 // in it, by namespace
}

func newThroughput(meter metric.Meter, note func(error), of func(namespace string) metric.MeasurementOption) *throughput {
	perSecond, err := meter.Int64Histogram(MetricThroughput, metric.WithDescription("attempts that ended within a second"),
		metric.WithExplicitBucketBoundaries(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000))
	note(err)
	return &throughput{perSecond: perSecond, of: of, ended: make(map[string]int64)}
}

// add takes note of attempts that have ended by now.
func (t *throughput) add(now time.Time, unit []*held) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !now.Before(t.until) {
		t.tell()
		t.until = now.Add(time.Second)
	}
	for _, h := range unit {
		t.ended[h.item.Namespace]++
	}
}

// tell is called with mu held.
func (t *throughput) tell() {
	for namespace, n := range t.ended {
		t.perSecond.Record(context.Background(), n, t.of(namespace))
	}
	clear(t.ended)
}

// flush tells of the last second.
func (t *throughput) flush() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tell()
}
