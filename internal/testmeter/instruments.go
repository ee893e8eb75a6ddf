package testmeter

import (
	"context"
	"fmt"
	"slices"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// This file answers: which instruments are there?

// meter has no Meter in it on purpose: an instrument that is not kept is to end the test, and not to measure nothing.
type meter struct {
	metric.Meter
	of *Meters
}

// instrument is what records at once.
type instrument struct {
	of   *Meters
	name string
}

func (i instrument) record(_ context.Context, v float64, options []metric.RecordOption) {
	i.of.record(i.name, metric.NewRecordConfig(options).Attributes(), v)
}

func (i instrument) add(_ context.Context, v float64, options []metric.AddOption) {
	i.of.record(i.name, metric.NewAddConfig(options).Attributes(), v)
}

type floatHistogram struct {
	noop.Float64Histogram
	instrument
}

func (h floatHistogram) Record(ctx context.Context, v float64, o ...metric.RecordOption) {
	h.record(ctx, v, o)
}

type intHistogram struct {
	noop.Int64Histogram
	instrument
}

func (h intHistogram) Record(ctx context.Context, v int64, o ...metric.RecordOption) {
	h.record(ctx, float64(v), o)
}

type counter struct {
	noop.Int64Counter
	instrument
}

func (c counter) Add(ctx context.Context, v int64, o ...metric.AddOption) { c.add(ctx, float64(v), o) }

type upDownCounter struct {
	noop.Int64UpDownCounter
	instrument
}

func (c upDownCounter) Add(ctx context.Context, v int64, o ...metric.AddOption) {
	c.add(ctx, float64(v), o)
}

func (m meter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return floatHistogram{instrument: instrument{m.of, name}}, nil
}

func (m meter) Int64Histogram(name string, _ ...metric.Int64HistogramOption) (metric.Int64Histogram, error) {
	return intHistogram{instrument: instrument{m.of, name}}, nil
}

func (m meter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{instrument: instrument{m.of, name}}, nil
}

func (m meter) Int64UpDownCounter(name string, _ ...metric.Int64UpDownCounterOption) (metric.Int64UpDownCounter, error) {
	return upDownCounter{instrument: instrument{m.of, name}}, nil
}

// asked is what is observed when it is collected.
type asked struct {
	of   *Meters
	name string
	adds bool // several observations of one collection are added up; else the last one counts
}

func (a asked) observed() asked { return a }

// observable is an instrument of this package.
type observable interface{ observed() asked }

type observableCounter struct {
	noop.Int64ObservableCounter
	asked
}

type observableUpDownCounter struct {
	noop.Int64ObservableUpDownCounter
	asked
}

type observableGauge struct {
	noop.Int64ObservableGauge
	asked
}

type observableFloatGauge struct {
	noop.Float64ObservableGauge
	asked
}

func (m meter) Int64ObservableCounter(name string, _ ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	return observableCounter{asked: asked{m.of, name, true}}, nil
}

func (m meter) Int64ObservableUpDownCounter(name string, _ ...metric.Int64ObservableUpDownCounterOption) (metric.Int64ObservableUpDownCounter, error) {
	return observableUpDownCounter{asked: asked{m.of, name, true}}, nil
}

func (m meter) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	return observableGauge{asked: asked{m.of, name, false}}, nil
}

func (m meter) Float64ObservableGauge(name string, _ ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	return observableFloatGauge{asked: asked{m.of, name, false}}, nil
}

// RegisterCallback implements metric.Meter. Instruments of another MeterProvider are an error.
func (m meter) RegisterCallback(callback metric.Callback, of ...metric.Observable) (metric.Registration, error) {
	if m.of.Refuse != nil {
		return nil, m.of.Refuse
	}
	for _, one := range of {
		if i, ok := one.(observable); !ok || i.observed().of != m.of {
			return nil, fmt.Errorf("testmeter: a callback for %T, which is not of this MeterProvider", one)
		}
	}
	r := &registration{meters: m.of, callback: callback, of: slices.Clone(of)}
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	m.of.callbacks = append(m.of.callbacks, r)
	return r, nil
}
