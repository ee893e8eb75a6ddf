package eventbus_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: what is seen from outside?

func TestEmit_IsCounted_AlsoWhatIsForNobodyOrWasThereBefore(t *testing.T) {
	t.Parallel()
	meters := testmeter.New()
	l := newLab(t, &eventbus.Config{MeterProvider: meters})
	l.subscribe("g", "a")
	l.subscribe("h", "a")
	for range 2 {
		_, err := l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{DedupKey: "k"})
		require.NoError(t, err)
	}
	l.emit("b")
	sum := func(name string) (total float64) {
		for key, values := range meters.AllRecorded() {
			if len(key) >= len(name) && key[:len(name)] == name {
				for _, v := range values {
					total += v
				}
			}
		}
		return total
	}
	require.Equal(t, []float64{2, 2, 1, 1}, []float64{sum(eventbus.MetricEmitted), sum(eventbus.MetricDeliveries), sum(eventbus.MetricUnrouted), sum(eventbus.MetricDuplicates)})
}

// An event carries the trace that it was emitted in, to its handlers.
func TestEmit_InATrace_HandlerIsInIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, &eventbus.Config{Propagator: propagation.TraceContext{}})
	from := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	n := l.node(quick("g"))
	traces := make(chan trace.TraceID, 2)
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, _ pgx.Tx) error {
		traces <- trace.SpanContextFromContext(ctx).TraceID()
		return nil
	}))
	for _, key := range []string{"", "k"} {
		_, err := l.Emit(trace.ContextWithSpanContext(l.within(), from), "a", nil, &eventbus.EmitOptions{Key: key})
		require.NoError(t, err)
		require.Equal(t, from.TraceID(), <-traces)
	}
	require.Contains(t, l.log(2)[0].Headers["traceparent"], from.TraceID().String())
}
