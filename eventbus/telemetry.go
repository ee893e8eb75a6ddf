package eventbus

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: what can be seen of emitting from outside? What is seen of handling is package dispatch's: a delivery is a work item
// whose name is the event's type, and its span belongs to the trace that the event carries.

// Scope is the name of the instrumentation.
const Scope = "github.com/pgwake/pgwake/eventbus"

// Metrics, by AttrNamespace and AttrType.
const (
	// MetricEmitted counts events that were emitted. In a transaction of the caller's they count although it may be rolled back.
	MetricEmitted = "pgwake.eventbus.emitted"
	// MetricDeliveries counts to how many groups they go.
	MetricDeliveries = "pgwake.eventbus.deliveries"
	// MetricUnrouted counts those of them that no group is subscribed to.
	MetricUnrouted = "pgwake.eventbus.unrouted"
	// MetricDuplicates counts events that were not emitted, since their dedup key is taken.
	MetricDuplicates = "pgwake.eventbus.duplicates"
)

// Attributes.
const (
	AttrNamespace = pgwake.AttrNamespace
	AttrType      = attribute.Key("messaging.destination.name")
)

type telemetry struct {
	tracer                                    trace.Tracer
	traces                                    propagation.TextMapPropagator
	emitted, deliveries, unrouted, duplicates metric.Int64Counter
}

func newTelemetry(c *Config) (*telemetry, error) {
	meter := c.MeterProvider.Meter(Scope)
	t := &telemetry{tracer: c.TracerProvider.Tracer(Scope), traces: c.Propagator}
	var errs [4]error
	t.emitted, errs[0] = meter.Int64Counter(MetricEmitted, metric.WithDescription("Events that were emitted."))
	t.deliveries, errs[1] = meter.Int64Counter(MetricDeliveries, metric.WithDescription("To how many groups they go."))
	t.unrouted, errs[2] = meter.Int64Counter(MetricUnrouted, metric.WithDescription("Events that no group is subscribed to."))
	t.duplicates, errs[3] = meter.Int64Counter(MetricDuplicates, metric.WithDescription("Events whose dedup key is taken."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("%w: MeterProvider: %w", pgwake.ErrConfig, err)
	}
	return t, nil
}

// begin begins the span of an emit, which end ends.
func (t *telemetry) begin(ctx context.Context, namespace string, events []Emission) (_ context.Context, end func([]Emitted, error)) {
	ctx, span := t.tracer.Start(ctx, "send "+events[0].Type, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
		attribute.String("messaging.system", "pgwake"), AttrNamespace.String(namespace), AttrType.String(events[0].Type),
		attribute.Int("messaging.batch.message_count", len(events))))
	return ctx, func(emitted []Emitted, err error) {
		defer span.End()
		if err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, "")
			return
		}
		for i, e := range emitted {
			as := metric.WithAttributes(AttrNamespace.String(namespace), AttrType.String(events[i].Type))
			if e.Duplicate {
				t.duplicates.Add(ctx, 1, as)
				continue
			}
			t.emitted.Add(ctx, 1, as)
			t.deliveries.Add(ctx, int64(e.Deliveries), as)
			if e.Deliveries == 0 {
				t.unrouted.Add(ctx, 1, as)
			}
		}
	}
}

// inject returns the headers with the trace that the context belongs to, unless they say so themselves, or have no room for it.
func (t *telemetry) inject(ctx context.Context, headers map[string]string) map[string]string {
	for _, field := range t.traces.Fields() {
		if _, own := headers[field]; own {
			return headers
		}
	}
	added := propagation.MapCarrier{}
	t.traces.Inject(ctx, added)
	if len(added) == 0 {
		return headers
	}
	maps.Copy(added, headers)
	if pgwake.CheckHeaders(added) != nil {
		return headers
	}
	return added
}
