package pgwake

import (
	"errors"
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
)

// This file answers: does OpenTelemetry see what Stats says?

func TestTelemetry_WhatHappens_IsMeasured(t *testing.T) {
	m := testmeter.New()
	p := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second})
	producer := plain(t, p.cfg.Schema)
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	eventually(t, "it is told alone", func() bool { return p.Stats().Worker.Settled })
	mustExec(t, producer, `SELECT enqueue_work('x')`)
	item := get(t, wait).item
	require.Equal(t, PathEvent, item.Path)
	_, err := p.RenewWorkItemLock(t.Context(), item.LockToken, time.Minute)
	require.NoError(t, err)
	mustExec(t, producer, `SELECT pg_notify($1, 'what a stranger says')`, channelOf(t, p, Worker))
	eventually(t, "it is heard", func() bool { return p.Stats().Worker.Unreadable == 1 })
	mustExec(t, producer, `SELECT enqueue_work('y'), enqueue_work('z', p_delay => '1 hour'), enqueue_work('elsewhere', p_namespace => 'n')`)

	seen, err := m.Collect(t.Context())
	require.NoError(t, err)
	ofWork := func(name string, also ...attribute.KeyValue) float64 {
		key := testmeter.Key(name, append(also, AttrQueue.String("worker"))...)
		require.Contains(t, seen, key)
		return seen[key]
	}
	received := ofWork(MetricReceived)
	require.GreaterOrEqual(t, received, 2.0)
	require.Equal(t, received-1, ofWork(MetricProcessed))
	require.Equal(t, 1.0, ofWork(MetricUnreadable))
	require.Equal(t, 1.0, ofWork(MetricItems, AttrPath.String("event")))
	require.Zero(t, ofWork(MetricItems, AttrPath.String("polling")))
	require.Equal(t, 1.0, ofWork(MetricFinds, AttrReason.String("notify")))
	require.GreaterOrEqual(t, ofWork(MetricWakes, AttrReason.String("notify")), 1.0)
	require.Zero(t, ofWork(MetricUnannounced, AttrReason.String("fallback")))
	require.Equal(t, 1.0, ofWork(MetricRenewals))
	require.Equal(t, 1.0, seen[testmeter.Key(MetricListening)])
	for _, of := range []struct {
		namespace, state string
		want             float64
	}{{"default", "due", 1}, {"default", "delayed", 1}, {"default", "leased", 1}, {"n", "due", 1}} {
		require.Equal(t, of.want, ofWork(MetricDepth, AttrNamespace.String(of.namespace), AttrState.String(of.state)), "%+v", of)
	}
	require.Less(t, ofWork(MetricOldestDue, AttrNamespace.String("default")), patient.Seconds())
	for _, name := range []string{MetricLag, MetricLatency} {
		for _, seconds := range m.Recorded(testmeter.Key(name, AttrQueue.String("worker"))) {
			require.Less(t, seconds, patient.Seconds(), name)
		}
		require.NotEmpty(t, m.Recorded(testmeter.Key(name, AttrQueue.String("worker"))), name)
	}
	s := p.Stats().Worker
	require.Less(t, s.NotificationLag.Quantile(1), patient)

	require.NoError(t, p.Close(t.Context()))
	seen, err = m.Collect(t.Context())
	require.NoError(t, err)
	require.Empty(t, seen, "who is closed is not asked")
}

func TestTelemetry_MetersRefuse_NewSaysSo(t *testing.T) {
	m := testmeter.New()
	m.Refuse = errors.New("no more")
	_, err := Open(t.Context(), "postgres://"+"127.0.0.1:1/x", &Config{MeterProvider: m, MeasureDepths: time.Millisecond})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "MeasureDepths")
	p := testProvider(t, Config{})
	_, err = New(t.Context(), p.pool, &Config{Schema: p.cfg.Schema, MeterProvider: m})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "no more")
}
