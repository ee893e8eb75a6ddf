// Package testmeter is a MeterProvider for tests: it keeps what is recorded, and collects what is to be observed.
package testmeter

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// Meters is a MeterProvider. Safe for concurrent use.
type Meters struct {
	noop.MeterProvider

	// Refuse is the error of every callback that is registered.
	Refuse error

	mu        sync.Mutex
	recorded  map[string][]float64
	callbacks map[*registration]metric.Callback
}

// New returns one that has nothing.
func New() *Meters {
	return &Meters{recorded: make(map[string][]float64), callbacks: make(map[*registration]metric.Callback)}
}

// Meter implements metric.MeterProvider.
func (m *Meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{of: m} }

// Recorded returns what was recorded in histograms, by Key.
func (m *Meters) Recorded(key string) []float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]float64(nil), m.recorded[key]...)
}

// Collect returns what is observed at this moment, by Key.
func (m *Meters) Collect(ctx context.Context) (observed map[string]float64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := observer{values: make(map[string]float64)}
	for _, callback := range m.callbacks {
		err = errors.Join(err, callback(ctx, o))
	}
	return o.values, err
}

// Key is a metric with its attributes, in their order by name.
func Key(name string, attributes ...attribute.KeyValue) string {
	return keyOf(name, attribute.NewSet(attributes...))
}

func keyOf(name string, set attribute.Set) string {
	return name + "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
}

type meter struct {
	noop.Meter
	of *Meters
}

func (m meter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return histogram{of: m.of, name: name}, nil
}

func (m meter) Int64ObservableCounter(name string, _ ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	return counter{name: name}, nil
}

func (m meter) Int64ObservableGauge(name string, _ ...metric.Int64ObservableGaugeOption) (metric.Int64ObservableGauge, error) {
	return gauge{name: name}, nil
}

func (m meter) Float64ObservableGauge(name string, _ ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	return floatGauge{name: name}, nil
}

func (m meter) RegisterCallback(callback metric.Callback, _ ...metric.Observable) (metric.Registration, error) {
	if m.of.Refuse != nil {
		return nil, m.of.Refuse
	}
	r := &registration{of: m.of}
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	m.of.callbacks[r] = callback
	return r, nil
}

type registration struct {
	noop.Registration
	of *Meters
}

func (r *registration) Unregister() error {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	delete(r.of.callbacks, r)
	return nil
}

type histogram struct {
	noop.Float64Histogram
	of   *Meters
	name string
}

func (h histogram) Record(_ context.Context, v float64, options ...metric.RecordOption) {
	key := keyOf(h.name, metric.NewRecordConfig(options).Attributes())
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	h.of.recorded[key] = append(h.of.recorded[key], v)
}

type counter struct {
	noop.Int64ObservableCounter
	name string
}

type gauge struct {
	noop.Int64ObservableGauge
	name string
}

type floatGauge struct {
	noop.Float64ObservableGauge
	name string
}

type named interface{ metricName() string }

func (c counter) metricName() string    { return c.name }
func (g gauge) metricName() string      { return g.name }
func (g floatGauge) metricName() string { return g.name }

type observer struct {
	noop.Observer
	values map[string]float64
}

func (o observer) ObserveInt64(of metric.Int64Observable, v int64, options ...metric.ObserveOption) {
	o.observe(of.(named).metricName(), float64(v), options)
}

func (o observer) ObserveFloat64(of metric.Float64Observable, v float64, options ...metric.ObserveOption) {
	o.observe(of.(named).metricName(), v, options)
}

func (o observer) observe(name string, v float64, options []metric.ObserveOption) {
	o.values[keyOf(name, metric.NewObserveConfig(options).Attributes())] += v
}
