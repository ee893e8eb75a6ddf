package pgwake

import (
	"context"
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
	require.Zero(t, ofWork(MetricPutOff))
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
		require.Equal(t, of.want, seen[ofQueueOf(p, MetricDepth, AttrNamespace.String(of.namespace), AttrState.String(of.state))], "%+v", of)
	}
	require.Zero(t, seen[testmeter.Key(MetricHibernating)])
	oldest := ofQueueOf(p, MetricOldestDue, AttrNamespace.String("default"))
	require.Contains(t, seen, oldest)
	require.Less(t, seen[oldest], patient.Seconds())
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

// ofQueueOf is a metric of a Provider's worker queue that is not added to those of others.
func ofQueueOf(p *Provider, name string, also ...attribute.KeyValue) string {
	c := p.pool.Config().ConnConfig
	return testmeter.Key(name, append(also, AttrQueue.String("worker"), AttrServer.String(c.Host), AttrPort.Int(int(c.Port)),
		AttrDatabase.String(c.Database+"|"+p.cfg.Schema))...)
}

func TestTelemetry_SeveralProviders_WhatTheyCountAddsUp_AndEachQueueIsToldOfOnce(t *testing.T) {
	m := testmeter.New()
	one := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second})
	providers := []*Provider{
		one,
		testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second, Schema: one.cfg.Schema}),
		testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second}),
	}
	for i, p := range providers {
		elsewhere := *longPoll
		elsewhere.Namespaces = []string{"elsewhere"}
		fetchWork(t, p, &elsewhere)
		awaitParked(t, p, Worker, 1)
		eventually(t, "it listens", func() bool { return p.Stats().Listening })
		if i > 0 {
			mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('x') FROM generate_series(1, $1::integer)`, 5*i)
		}
	}
	seen, err := m.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3., seen[testmeter.Key(MetricListening)])
	require.Equal(t, 3., seen[testmeter.Key(MetricParked, AttrQueue.String("worker"))])
	due := func(p *Provider) float64 {
		return seen[ofQueueOf(p, MetricDepth, AttrNamespace.String("default"), AttrState.String("due"))]
	}
	require.Equal(t, 5., due(one), "two Providers say so, and it is one queue")
	require.Equal(t, 10., due(providers[2]))
	for _, p := range providers {
		require.Contains(t, seen, ofQueueOf(p, MetricOldestDue, AttrNamespace.String("default")))
	}

	require.NoError(t, providers[2].Close(t.Context()))
	seen, err = m.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2., seen[testmeter.Key(MetricListening)])
}

func TestTelemetry_NamespaceBecomesEmpty_IsToldOfOnceMore(t *testing.T) {
	m := testmeter.New()
	p := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second})
	p.cfg.MeasureDepths = time.Nanosecond
	producer := plain(t, p.cfg.Schema)
	due := ofQueueOf(p, MetricDepth, AttrNamespace.String("n"), AttrState.String("due"))
	collect := func() map[string]float64 {
		seen, err := m.Collect(t.Context())
		require.NoError(t, err)
		return seen
	}
	for range 2 {
		mustExec(t, producer, `SELECT enqueue_work('x', p_namespace => 'n')`)
		require.Equal(t, 1., collect()[due])
		mustExec(t, producer, `DELETE FROM worker_queue`)
		seen := collect()
		require.Contains(t, seen, due, "who shows the last value is to show zero")
		require.Zero(t, seen[due])
		require.NotContains(t, collect(), due)
	}
}

func TestTelemetry_DeadLetters_AreCountedByNamespaceAndQueue(t *testing.T) {
	m := testmeter.New()
	p := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second})
	p.cfg.MeasureDepths = time.Nanosecond
	for _, namespace := range []string{"a", "a", "b"} {
		_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "x"}, &EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
		item, err := p.FetchWorkItem(t.Context(), nil)
		require.NoError(t, err)
		require.NoError(t, p.DeadLetterWorkItem(t.Context(), item.LockToken, "no use", ""))
	}
	counts, err := p.CountDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, []DeadLetterCount{{Worker, "a", 2, 2}, {Worker, "b", 1, 3}}, counts)
	counts, err = p.CountDeadLetters(t.Context(), &DeadLetterFilter{Namespace: "a", After: 1, Limit: 1, Reason: "no use"})
	require.NoError(t, err)
	require.Equal(t, []DeadLetterCount{{Worker, "a", 1, 2}}, counts, "a limit is for lists")

	of := func(namespace string) string {
		return ofQueueOf(p, MetricDeadLetters, AttrNamespace.String(namespace))
	}
	seen, err := m.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2., seen[of("a")])
	require.Equal(t, 1., seen[of("b")])
	_, err = p.PurgeDeadLetters(t.Context(), &DeadLetterFilter{Namespace: "b"})
	require.NoError(t, err)
	seen, err = m.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2., seen[of("a")])
	require.Contains(t, seen, of("b"), "who shows the last value is to show zero")
	require.Zero(t, seen[of("b")])
}

func TestTelemetry_NodeHibernates_SaysSo_AndTheQueuesAreLeftAlone(t *testing.T) {
	m := testmeter.New()
	p := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second, HibernateAfter: 100 * time.Millisecond, HibernatePoll: time.Hour})
	p.cfg.MeasureDepths = time.Nanosecond
	eventually(t, "it hibernates", func() bool { return p.Stats().Hibernations == 1 }) // a moment after it has ceased to listen
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('x', p_namespace => 'n')`)
	seen, err := m.Collect(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1., seen[testmeter.Key(MetricHibernating)])
	require.Equal(t, 1., seen[testmeter.Key(MetricHibernations)])
	require.Zero(t, seen[testmeter.Key(MetricListening)])
	require.NotContains(t, seen, ofQueueOf(p, MetricDepth, AttrNamespace.String("n"), AttrState.String("due")))
}

func TestTelemetry_DepthsCannotBeRead_ItIsNotTriedAgainBeforeItsTime(t *testing.T) {
	m := testmeter.New()
	testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Hour})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := m.Collect(ctx)
	require.ErrorIs(t, err, context.Canceled)
	_, err = m.Collect(ctx)
	require.NoError(t, err, "it does not ask")
}

func TestTelemetry_MetersRefuse_NewSaysSo(t *testing.T) {
	m := testmeter.New()
	refused := errors.New("no more")
	m.Refuse = refused
	_, err := Open(t.Context(), "postgres://"+"127.0.0.1:1/x", &Config{MeterProvider: m, MeasureDepths: time.Millisecond})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "MeasureDepths")
	p := testProvider(t, Config{})
	_, err = New(t.Context(), p.pool, &Config{Schema: p.cfg.Schema, MeterProvider: m})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorIs(t, err, refused)
}

// The lock of a MeterProvider is with a collection for as long as that takes, and it may be at a statement that does not end.
func TestTelemetry_CloseDuringACollection_EndsThat(t *testing.T) {
	m := testmeter.New()
	p := testProvider(t, Config{MeterProvider: m, MeasureDepths: time.Second})
	p.cfg.MeasureDepths = time.Nanosecond
	producer := plain(t, p.cfg.Schema)
	tx, err := producer.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `LOCK TABLE worker_queue, orchestrator_queue`)
	require.NoError(t, err)
	collected := make(chan error, 1)
	go func() {
		_, err := m.Collect(context.Background())
		collected <- err
	}()
	blocked := plain(t, p.cfg.Schema)
	eventually(t, "it waits", func() bool {
		var waits bool
		require.NoError(t, blocked.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, producer.PgConn().PID()).Scan(&waits))
		return waits
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, p.Close(ctx), context.DeadlineExceeded)
	require.Error(t, <-collected)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, p.Close(t.Context()), "the rest has ended as well")
}
