package dispatch

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: what can be seen of it from outside?
//
// Metrics and spans by the OpenTelemetry API, under the names that the conventions for messaging have, as far as they go. An
// application without an SDK pays next to nothing.

// Scope is the name of the instrumentation.
const Scope = "github.com/pgwake/pgwake/dispatch"

// Metrics. Each has the attribute AttrName; those that say so have AttrOutcome too.
const (
	// MetricDuration is a histogram, in seconds, of how long attempts took; by AttrOutcome. Its count is that of attempts.
	MetricDuration = "messaging.process.duration"
	// MetricWait is a histogram, in seconds, of how long items waited from when they were due to the beginning of the attempt,
	// by the clock of this process as far as it agrees with the server's.
	MetricWait = "pgwake.dispatch.wait"
	// MetricRunning is the number of items that handlers are at work on.
	MetricRunning = "pgwake.dispatch.running"
	// MetricPlaces is the number of places for handlers, without attributes.
	MetricPlaces = "pgwake.dispatch.places"
)

// Attributes.
const (
	AttrSystem    = attribute.Key("messaging.system") // "pgwake"
	AttrName      = attribute.Key("messaging.destination.name")
	AttrNamespace = attribute.Key("pgwake.namespace")
	AttrOutcome   = attribute.Key("pgwake.outcome") // an Outcome
	AttrItem      = attribute.Key("messaging.message.id")
	AttrAttempt   = attribute.Key("pgwake.attempt")
)

type telemetry struct {
	tracer   trace.Tracer
	duration metric.Float64Histogram
	wait     metric.Float64Histogram
	running  metric.Int64UpDownCounter
	places   metric.Int64Gauge
}

// buckets of durations of attempts and of waits, in seconds: from what a wake-up takes to a long batch job.
var buckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}

func newTelemetry(c *Config, k *checks) (t telemetry) {
	tracers, meters := c.TracerProvider, c.MeterProvider
	if tracers == nil {
		tracers = otel.GetTracerProvider()
	}
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	t.tracer = tracers.Tracer(Scope)
	meter := meters.Meter(Scope)
	note := func(err error) {
		if err != nil {
			k.bad("MeterProvider: %v", err)
		}
	}
	var err error
	t.duration, err = meter.Float64Histogram(MetricDuration, metric.WithUnit("s"),
		metric.WithDescription("how long attempts took"), metric.WithExplicitBucketBoundaries(buckets...))
	note(err)
	t.wait, err = meter.Float64Histogram(MetricWait, metric.WithUnit("s"),
		metric.WithDescription("from when items were due to the beginning of the attempt"), metric.WithExplicitBucketBoundaries(buckets...))
	note(err)
	t.running, err = meter.Int64UpDownCounter(MetricRunning, metric.WithDescription("items that handlers are at work on"))
	note(err)
	t.places, err = meter.Int64Gauge(MetricPlaces, metric.WithDescription("places for handlers"))
	note(err)
	return t
}

func (t *telemetry) hasPlaces(n int) { t.places.Record(context.Background(), int64(n)) }

// begin takes note of the beginning of an attempt. Its context is for the handler.
func (t *telemetry) begin(ctx context.Context, d *Dispatcher, unit []*held) context.Context {
	item := unit[0].item
	named := metric.WithAttributeSet(attribute.NewSet(AttrName.String(item.Name)))
	t.running.Add(ctx, int64(len(unit)), named)
	for _, h := range unit {
		t.wait.Record(ctx, max(time.Since(d.p.LocalTime(h.item.DueAt)), 0).Seconds(), named)
	}
	ctx, span := t.tracer.Start(ctx, "process "+item.Name, trace.WithSpanKind(trace.SpanKindConsumer))
	if span.IsRecording() {
		span.SetAttributes(AttrSystem.String("pgwake"), AttrName.String(item.Name), AttrNamespace.String(item.Namespace))
		if len(unit) == 1 {
			span.SetAttributes(AttrItem.Int64(item.ID), AttrAttempt.Int(item.Attempt))
		}
	}
	return ctx
}

// end takes note of what came of an attempt that began at that time.
func (t *telemetry) end(ctx context.Context, unit []*held, verdicts []verdict, began time.Time) {
	name := unit[0].item.Name
	t.running.Add(ctx, -int64(len(unit)), metric.WithAttributeSet(attribute.NewSet(AttrName.String(name))))
	took := time.Since(began).Seconds()
	span := trace.SpanFromContext(ctx)
	for _, v := range verdicts {
		t.duration.Record(ctx, took, metric.WithAttributeSet(attribute.NewSet(AttrName.String(name), AttrOutcome.String(string(v.outcome())))))
		if v.err != nil && span.IsRecording() {
			span.RecordError(errors.New(text(v.err)))
			span.SetStatus(codes.Error, string(v.outcome()))
		}
	}
	span.End()
}
