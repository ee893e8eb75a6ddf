package dispatch

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgwake/pgwake"
)

// This file answers: what can be seen of it from outside?
//
// Metrics and spans by the OpenTelemetry API, under the names that the conventions for messaging have, as far as they go. An
// application without an SDK pays next to nothing.

// Scope is the name of the instrumentation.
const Scope = "github.com/pgwake/pgwake/dispatch"

// Metrics. Each has the attribute AttrName, unless it says otherwise; those that say so have AttrOutcome too.
const (
	// MetricDuration is a histogram, in seconds, of how long attempts took; by AttrOutcome. Its count is that of attempts.
	MetricDuration = "messaging.process.duration"
	// MetricWait is a histogram, in seconds, of how long items waited from when they were due to the beginning of the attempt,
	// by the clock of this process as far as it agrees with the server's; by AttrNamespace and AttrPath too. Of a StreamSource they
	// count from EnqueuedAt, so delays and former attempts are in it.
	MetricWait = "pgwake.dispatch.wait"
	// MetricRunning is the number of items that handlers are at work on.
	MetricRunning = "pgwake.dispatch.running"
	// MetricPlaces is the number of places for handlers, of all Dispatchers together that run, without attributes. Those of one
	// that is to end no longer count, although its handlers may go on.
	MetricPlaces = "pgwake.dispatch.places"
	// MetricClaimed counts items, and turns, that were claimed; by AttrNamespace and AttrPath alone.
	MetricClaimed = "pgwake.dispatch.claimed"
	// MetricClaimSize is a histogram of how many items a claim brought, of those that brought any; by AttrNamespace and AttrPath alone.
	MetricClaimSize = "pgwake.dispatch.claim.size"
	// MetricThroughput is a histogram of how many attempts ended within a second, of those seconds in which any did; by AttrNamespace
	// alone.
	MetricThroughput = "pgwake.dispatch.throughput"
	// MetricTurn is a histogram, in seconds, of how long turns of orchestrations took, from the call of the Decider to when
	// the turn was acknowledged or given back; by AttrOutcome.
	MetricTurn = "pgwake.dispatch.turn.duration"
)

// Attributes.
const (
	AttrSystem    = attribute.Key("messaging.system") // "pgwake"
	AttrName      = attribute.Key("messaging.destination.name")
	AttrNamespace = pgwake.AttrNamespace
	AttrPath      = pgwake.AttrPath                 // left out of what a StreamSource brought, which does not say
	AttrOutcome   = attribute.Key("pgwake.outcome") // an Outcome
	AttrItem      = attribute.Key("messaging.message.id")
	AttrAttempt   = attribute.Key("pgwake.attempt")
	AttrInstance  = attribute.Key("pgwake.instance") // of a span alone
)

// tracing is where spans come from, and which they belong to.
type tracing struct {
	tracer trace.Tracer
	traces propagation.TextMapPropagator
}

func newTracing(tracers trace.TracerProvider, traces propagation.TextMapPropagator) tracing {
	if tracers == nil {
		tracers = otel.GetTracerProvider()
	}
	if traces == nil {
		traces = otel.GetTextMapPropagator()
	}
	return tracing{tracers.Tracer(Scope), traces}
}

// below returns the context with the span that headers carry, if they do.
func (t *tracing) below(ctx context.Context, headers map[string]string) context.Context {
	return t.traces.Extract(ctx, propagation.MapCarrier(headers))
}

// link adds a link to the span that headers carry, if they do.
func (t *tracing) link(options []trace.SpanStartOption, headers map[string]string) []trace.SpanStartOption {
	if from := trace.SpanContextFromContext(t.below(context.Background(), headers)); from.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: from}))
	}
	return options
}

// meterOf returns the meter, and what takes note of an instrument that cannot be had.
func meterOf(meters metric.MeterProvider, k *checks) (metric.Meter, func(error)) {
	if meters == nil {
		meters = otel.GetMeterProvider()
	}
	return meters.Meter(Scope), func(err error) {
		if err != nil {
			k.bad("MeterProvider: %v", err)
		}
	}
}

// claims measures what is claimed.
type claims struct {
	items metric.Int64Counter
	size  metric.Int64Histogram
	of    *sync.Map // claimedAs -> metric.MeasurementOption: to make one costs more than to measure
}

// claimedAs is how an item was claimed.
type claimedAs struct {
	namespace string
	path      pgwake.Path
}

func (as claimedAs) attributes(also ...attribute.KeyValue) metric.MeasurementOption {
	all := append(also, AttrNamespace.String(as.namespace))
	if as.path != "" {
		all = append(all, AttrPath.String(string(as.path)))
	}
	return metric.WithAttributeSet(attribute.NewSet(all...))
}

func newClaims(meter metric.Meter, note func(error)) (c claims) {
	var err error
	c.items, err = meter.Int64Counter(MetricClaimed, metric.WithDescription("items and turns that were claimed"))
	note(err)
	c.size, err = meter.Int64Histogram(MetricClaimSize, metric.WithDescription("items that a claim brought"),
		metric.WithExplicitBucketBoundaries(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000))
	note(err)
	c.of = new(sync.Map)
	return c
}

// claimed takes note of a claim: of the items of one namespace, which came by one path.
func (c *claims) claimed(as claimedAs, n int) {
	of := c.option(as)
	c.items.Add(context.Background(), int64(n), of)
	c.size.Record(context.Background(), int64(n), of)
}

func (c *claims) option(as claimedAs) metric.MeasurementOption {
	of, ok := c.of.Load(as)
	if !ok {
		of = as.attributes()
		c.of.Store(as, of)
	}
	return of.(metric.MeasurementOption)
}

// claimedItems takes note of what a claim brought.
func (c *claims) claimedItems(items []*pgwake.ClaimedWorkItem) {
	for at := 0; at < len(items); {
		as, from := claimedAs{items[at].Namespace, items[at].Path}, at
		for at < len(items) && (claimedAs{items[at].Namespace, items[at].Path}) == as {
			at++
		}
		c.claimed(as, at-from)
	}
}

type telemetry struct {
	tracing
	claims
	duration metric.Float64Histogram
	wait     metric.Float64Histogram
	running  metric.Int64UpDownCounter
	places   metric.Int64UpDownCounter
	passed   *throughput
	others   *manyLabels
}

// buckets of durations of attempts and of waits, in seconds: from what a wake-up takes to a long batch job.
var buckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}

func newTelemetry(c *Config, k *checks) (t telemetry) {
	t.tracing = newTracing(c.TracerProvider, c.Propagator)
	t.others = &manyLabels{of: make(map[string]*labels)}
	meter, note := meterOf(c.MeterProvider, k)
	var err error
	t.duration, err = meter.Float64Histogram(MetricDuration, metric.WithUnit("s"),
		metric.WithDescription("how long attempts took"), metric.WithExplicitBucketBoundaries(buckets...))
	note(err)
	t.wait, err = meter.Float64Histogram(MetricWait, metric.WithUnit("s"),
		metric.WithDescription("from when items were due to the beginning of the attempt"), metric.WithExplicitBucketBoundaries(buckets...))
	note(err)
	t.running, err = meter.Int64UpDownCounter(MetricRunning, metric.WithDescription("items that handlers are at work on"))
	note(err)
	t.claims = newClaims(meter, note)
	claims := t.claims
	t.passed = newThroughput(meter, note, func(namespace string) metric.MeasurementOption { return claims.option(claimedAs{namespace: namespace}) })
	t.places, err = meter.Int64UpDownCounter(MetricPlaces, metric.WithDescription("places for handlers"))
	note(err)
	return t
}

// labels are the attributes of what is measured of a name. To make them costs more than to measure.
type labels struct {
	name  string
	add   []metric.AddOption
	ended map[Outcome][]metric.RecordOption

	mu     sync.RWMutex // and no sync.Map, for which each look would allocate a key
	waited map[claimedAs][]metric.RecordOption
}

func labelsOf(name string) *labels {
	named := metric.WithAttributeSet(attribute.NewSet(AttrName.String(name)))
	l := &labels{name: name, add: []metric.AddOption{named}, ended: make(map[Outcome][]metric.RecordOption), waited: make(map[claimedAs][]metric.RecordOption)}
	for _, o := range []Outcome{Done, Retried, Snoozed, DeadLettered, GivenBack, LeaseLost} {
		l.ended[o] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(AttrName.String(name), AttrOutcome.String(string(o))))}
	}
	return l
}

// manyLabels is a map from names without a handler of their own. Such names may be data, so it keeps no more than mostLabels.
type manyLabels struct {
	mu sync.RWMutex
	of map[string]*labels
}

const mostLabels = 1000

func (m *manyLabels) get(name string) *labels {
	m.mu.RLock()
	l := m.of[name]
	m.mu.RUnlock()
	if l != nil {
		return l
	}
	l = labelsOf(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.of) < mostLabels {
		m.of[name] = l
	}
	return l
}

// ofWait are those of a wait.
func (l *labels) ofWait(as claimedAs) []metric.RecordOption {
	l.mu.RLock()
	of, ok := l.waited[as]
	l.mu.RUnlock()
	if !ok {
		of = []metric.RecordOption{as.attributes(AttrName.String(l.name))}
		l.mu.Lock()
		l.waited[as] = of
		l.mu.Unlock()
	}
	return of
}

// addPlaces takes note of places that are there from now on, or no longer. It is a sum, since a process may have several Dispatchers.
func (t *telemetry) addPlaces(n int) { t.places.Add(context.Background(), int64(n)) }

// begin takes note of the beginning of an attempt. Its context is for the handler.
func (t *telemetry) begin(ctx context.Context, d *Dispatcher, l *labels, unit []*held) context.Context {
	item := unit[0].item
	t.running.Add(ctx, int64(len(unit)), l.add...)
	for _, h := range unit {
		since := h.item.DueAt
		if h.item.EnqueuedAt.After(since) { // it was given a head start
			since = h.item.EnqueuedAt
		}
		t.wait.Record(ctx, max(time.Since(d.p.LocalTime(since)), 0).Seconds(), l.ofWait(claimedAs{h.item.Namespace, h.item.Path})...)
	}
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer)}
	if len(unit) == 1 {
		ctx = t.below(ctx, item.Headers)
	} else { // they need not belong to one trace
		for _, h := range unit {
			options = t.link(options, h.item.Headers)
		}
	}
	ctx, span := t.tracer.Start(ctx, "process "+item.Name, options...)
	for _, h := range unit {
		h.span = span.SpanContext()
	}
	if span.IsRecording() {
		span.SetAttributes(AttrSystem.String("pgwake"), AttrName.String(item.Name), AttrNamespace.String(item.Namespace))
		if len(unit) == 1 {
			span.SetAttributes(AttrItem.Int64(item.ID), AttrAttempt.Int(item.Attempt))
		}
	}
	return ctx
}

// end takes note of what came of an attempt that began at that time.
func (t *telemetry) end(ctx context.Context, l *labels, unit []*held, verdicts []verdict, began time.Time) {
	t.running.Add(ctx, -int64(len(unit)), l.add...)
	now := time.Now()
	t.passed.add(now, unit)
	took := now.Sub(began).Seconds()
	span := trace.SpanFromContext(ctx)
	for _, v := range verdicts {
		t.duration.Record(ctx, took, l.ended[v.outcome()]...)
		if v.err != nil && span.IsRecording() {
			span.RecordError(errors.New(text(v.err)))
			span.SetStatus(codes.Error, string(v.outcome()))
		}
	}
	span.End()
}

// turnTelemetry is what an Orchestrator shows.
type turnTelemetry struct {
	tracing
	claims
	duration metric.Float64Histogram
}

func newTurnTelemetry(c *OrchestratorConfig, k *checks) (t turnTelemetry) {
	t.tracing = newTracing(c.TracerProvider, c.Propagator)
	meter, note := meterOf(c.MeterProvider, k)
	var err error
	t.claims = newClaims(meter, note)
	t.duration, err = meter.Float64Histogram(MetricTurn, metric.WithUnit("s"),
		metric.WithDescription("how long turns took"), metric.WithExplicitBucketBoundaries(buckets...))
	note(err)
	return t
}

// begin takes note of the beginning of a turn. Its context is for the Decider, and for the ack: what that enqueues belongs to
// the turn's span. The turn's messages may belong to several traces, so it begins one of its own.
func (t *turnTelemetry) begin(ctx context.Context, turn *pgwake.OrchestrationItem) context.Context {
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer)}
	for _, m := range turn.Messages {
		options = t.link(options, m.Headers)
	}
	ctx, span := t.tracer.Start(ctx, "turn "+turn.Name, options...)
	if span.IsRecording() {
		span.SetAttributes(AttrSystem.String("pgwake"), AttrName.String(turn.Name), AttrNamespace.String(turn.Namespace),
			AttrInstance.String(turn.Instance), AttrAttempt.Int(turn.Attempt))
	}
	return ctx
}

// end takes note of what came of it.
func (t *turnTelemetry) end(ctx context.Context, turn *pgwake.OrchestrationItem, v verdict, began time.Time) {
	outcome := string(v.outcome())
	t.duration.Record(ctx, time.Since(began).Seconds(),
		metric.WithAttributeSet(attribute.NewSet(AttrName.String(turn.Name), AttrOutcome.String(outcome))))
	span := trace.SpanFromContext(ctx)
	if v.err != nil && span.IsRecording() {
		span.RecordError(errors.New(text(v.err)))
		span.SetStatus(codes.Error, outcome)
	}
	span.End()
}
