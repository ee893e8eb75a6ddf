package testmeter_test

import (
	"context"
	"testing"

	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// This file answers: does a test see what the SDK would show?

func TestCollect_SeveralCallbacks_CountersAddUp_TheLastGaugeStays(t *testing.T) {
	m := testmeter.New()
	for _, v := range []int64{10, 20} {
		meter := m.Meter("x")
		counter, err := meter.Int64ObservableCounter("counter")
		require.NoError(t, err)
		upDown, err := meter.Int64ObservableUpDownCounter("upDown")
		require.NoError(t, err)
		gauge, err := meter.Int64ObservableGauge("gauge")
		require.NoError(t, err)
		float, err := meter.Float64ObservableGauge("float")
		require.NoError(t, err)
		_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			o.ObserveInt64(counter, v)
			o.ObserveInt64(upDown, v)
			o.ObserveInt64(gauge, v)
			o.ObserveFloat64(float, float64(v))
			return nil
		}, counter, upDown, gauge, float)
		require.NoError(t, err)
	}
	for range 2 {
		seen, err := m.Collect(t.Context())
		require.NoError(t, err)
		require.Equal(t, map[string]float64{"counter{}": 30, "upDown{}": 30, "gauge{}": 20, "float{}": 20}, seen)
	}
}

func TestCollect_InstrumentIsNotRegistered_ItIsAnErrorAndNotObserved(t *testing.T) {
	m := testmeter.New()
	meter := m.Meter("x")
	known, err := meter.Int64ObservableGauge("known")
	require.NoError(t, err)
	forgotten, err := meter.Int64ObservableGauge("forgotten")
	require.NoError(t, err)
	r, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(known, 1)
		o.ObserveInt64(forgotten, 1)
		return nil
	}, known)
	require.NoError(t, err)
	seen, err := m.Collect(t.Context())
	require.ErrorContains(t, err, "forgotten")
	require.Equal(t, map[string]float64{"known{}": 1}, seen)

	require.NoError(t, r.Unregister())
	seen, err = m.Collect(t.Context())
	require.NoError(t, err)
	require.Empty(t, seen)

	_, err = testmeter.New().Meter("x").RegisterCallback(func(context.Context, metric.Observer) error { return nil }, known)
	require.Error(t, err, "it is another's")
}

func TestRecorded_EachInstrument_KeepsWhatItWasToldByAttributes(t *testing.T) {
	m := testmeter.New()
	meter := m.Meter("x")
	at := attribute.String("k", "v")
	of := metric.WithAttributes(at)
	float, err := meter.Float64Histogram("float")
	require.NoError(t, err)
	float.Record(t.Context(), .5, of)
	whole, err := meter.Int64Histogram("whole")
	require.NoError(t, err)
	whole.Record(t.Context(), 2, of)
	counter, err := meter.Int64Counter("counter")
	require.NoError(t, err)
	counter.Add(t.Context(), 3, of)
	upDown, err := meter.Int64UpDownCounter("upDown")
	require.NoError(t, err)
	upDown.Add(t.Context(), 4)
	upDown.Add(t.Context(), -4)
	require.Equal(t, map[string][]float64{"float{k=v}": {.5}, "whole{k=v}": {2}, "counter{k=v}": {3}, "upDown{}": {4, -4}}, m.AllRecorded())
	require.Equal(t, []float64{3}, m.Recorded(testmeter.Key("counter", at)))
	require.Panics(t, func() { _, _ = meter.Float64Counter("not kept") }, "it would measure nothing, and no test would see it")
}
