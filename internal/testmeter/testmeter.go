// Package testmeter is a MeterProvider for tests: it keeps what is recorded, and collects what is to be observed, by the rules of
// OpenTelemetry's SDK.
package testmeter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// This file answers: what comes of measurements?

// Meters is a MeterProvider. Safe for concurrent use, but that a callback may not use it.
type Meters struct {
	noop.MeterProvider

	// Refuse is the error of every callback that is registered.
	Refuse error

	mu        sync.Mutex
	recorded  map[string][]float64
	callbacks []*registration // in the order in which they are asked, so that it is no accident whose gauge is the last
}

// New returns one that has nothing.
func New() *Meters { return &Meters{recorded: make(map[string][]float64)} }

// Meter implements metric.MeterProvider.
func (m *Meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{of: m} }

// Recorded returns what was recorded in histograms, or added to counters, by Key.
func (m *Meters) Recorded(key string) []float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.recorded[key])
}

// AllRecorded returns all of what Recorded knows.
func (m *Meters) AllRecorded() map[string][]float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(m.recorded)
	for key, values := range all {
		all[key] = slices.Clone(values)
	}
	return all
}

// Collect returns what is observed at this moment, by Key: of counters the sum over all callbacks, of gauges what the last one says.
// A callback that observes what it is not registered for is an error, and is not heard.
func (m *Meters) Collect(ctx context.Context) (observed map[string]float64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	observed = make(map[string]float64)
	for _, r := range m.callbacks {
		o := &observer{values: observed, of: r.of}
		err = errors.Join(err, r.callback(ctx, o), o.err)
	}
	return observed, err
}

func (m *Meters) record(name string, set attribute.Set, v float64) {
	key := keyOf(name, set)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recorded[key] = append(m.recorded[key], v)
}

// Key is a metric with its attributes, in their order by name.
func Key(name string, attributes ...attribute.KeyValue) string {
	return keyOf(name, attribute.NewSet(attributes...))
}

func keyOf(name string, set attribute.Set) string {
	return name + "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
}

// registration is a callback, with the instruments that it may observe.
type registration struct {
	noop.Registration
	meters   *Meters
	callback metric.Callback
	of       []metric.Observable
}

func (r *registration) Unregister() error {
	r.meters.mu.Lock()
	defer r.meters.mu.Unlock()
	r.meters.callbacks = slices.DeleteFunc(r.meters.callbacks, func(other *registration) bool { return other == r })
	return nil
}

type observer struct {
	noop.Observer
	values map[string]float64
	of     []metric.Observable
	err    error
}

func (o *observer) ObserveInt64(of metric.Int64Observable, v int64, options ...metric.ObserveOption) {
	o.observe(of, float64(v), options)
}

func (o *observer) ObserveFloat64(of metric.Float64Observable, v float64, options ...metric.ObserveOption) {
	o.observe(of, v, options)
}

func (o *observer) observe(of metric.Observable, v float64, options []metric.ObserveOption) {
	if !slices.Contains(o.of, of) {
		o.err = errors.Join(o.err, fmt.Errorf("testmeter: a callback that is not registered for it observes %+v", of))
		return
	}
	i := of.(observable).observed()
	key := keyOf(i.name, metric.NewObserveConfig(options).Attributes())
	if i.adds {
		v += o.values[key]
	}
	o.values[key] = v
}
