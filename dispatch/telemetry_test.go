package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testmeter"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// This file answers: what is measured and traced of attempts and turns?

// recorder keeps what is traced.
type recorder struct {
	mu    sync.Mutex
	spans []string
}

type tracers struct {
	tracenoop.TracerProvider
	*recorder
}

func (t tracers) Tracer(string, ...trace.TracerOption) trace.Tracer {
	return tracer{recorder: t.recorder}
}

type tracer struct {
	tracenoop.Tracer
	*recorder
}

func (t tracer) Start(ctx context.Context, name string, o ...trace.SpanStartOption) (context.Context, trace.Span) {
	c := trace.NewSpanStartConfig(o...)
	s := &span{recorder: t.recorder, text: fmt.Sprint(name, " ", c.SpanKind())}
	if from := trace.SpanContextFromContext(ctx); from.IsValid() {
		s.text += " below " + from.SpanID().String()
	}
	for _, l := range c.Links() {
		s.text += " beside " + l.SpanContext.SpanID().String()
	}
	return trace.ContextWithSpan(ctx, s), s
}

type span struct {
	tracenoop.Span
	*recorder
	text string
}

func (s *span) IsRecording() bool { return true }

// attemptSpan is the context of every span.
var attemptSpan = trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{9}, SpanID: trace.SpanID{9}})

func (s *span) SpanContext() trace.SpanContext { return attemptSpan }

func (s *span) SetAttributes(kv ...attribute.KeyValue) {
	set := attribute.NewSet(kv...)
	s.text += " " + set.Encoded(attribute.DefaultEncoder())
}
func (s *span) SetStatus(code codes.Code, text string) { s.text += fmt.Sprint(" ", code, ": ", text) }
func (s *span) End(...trace.SpanEndOption) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spans = append(s.spans, s.text)
}

func TestTelemetry_Attempts_AreMeasuredAndTraced(t *testing.T) {
	r, m := &recorder{}, testmeter.New()
	var ended []Ended
	dispatching(t, Config{
		Concurrency: 1, Retry: func(int, error) time.Duration { return time.Second },
		MeterProvider: m, TracerProvider: tracers{recorder: r},
		OnEnd: func(e Ended) { ended = append(ended, e) },
	}, func(d *Dispatcher) {
		d.Handle("a", does(func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			time.Sleep(time.Second)
			if item.Attempt == 1 {
				return errors.New("no")
			}
			_, inSpan := trace.SpanFromContext(ctx).(*span)
			require.True(t, inSpan, "the handler's spans are below it")
			return nil
		}))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.come("n", pgwake.PathEvent)
		f.enqueue("a")
		time.Sleep(1500 * time.Millisecond)
		f.come("n", pgwake.PathPolling)
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, map[string][]float64{
			`messaging.process.duration{messaging.destination.name=a,pgwake.outcome=retried}`:           {1},
			`messaging.process.duration{messaging.destination.name=a,pgwake.outcome=done}`:              {1},
			`pgwake.dispatch.wait{messaging.destination.name=a,pgwake.namespace=n,pgwake.path=event}`:   {0},
			`pgwake.dispatch.wait{messaging.destination.name=a,pgwake.namespace=n,pgwake.path=polling}`: {0},
			`pgwake.dispatch.claimed{pgwake.namespace=n,pgwake.path=event}`:                             {1},
			`pgwake.dispatch.claimed{pgwake.namespace=n,pgwake.path=polling}`:                           {1},
			`pgwake.dispatch.claim.size{pgwake.namespace=n,pgwake.path=event}`:                          {1},
			`pgwake.dispatch.claim.size{pgwake.namespace=n,pgwake.path=polling}`:                        {1},
			`pgwake.dispatch.throughput{pgwake.namespace=n}`:                                            {1},
			`pgwake.dispatch.running{messaging.destination.name=a}`:                                     {1, -1, 1, -1},
			`pgwake.dispatch.places{}`: {1},
		}, m.AllRecorded())
		require.Equal(t, []string{
			"process a consumer messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace=n messaging.message.id=1,pgwake.attempt=1 Error: retried",
			"process a consumer messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace=n messaging.message.id=1,pgwake.attempt=2",
		}, r.spans)
		outcomes := []Outcome{}
		for _, e := range ended {
			outcomes = append(outcomes, e.Outcome)
		}
		require.True(t, slices.Equal([]Outcome{Retried, Done}, outcomes), outcomes)
		require.EqualError(t, ended[0].Err, "no")
		require.Equal(t, time.Second, ended[0].Delay)
	})
}

// ofSpan returns headers of a span with this id.
func ofSpan(id byte) map[string]string {
	return map[string]string{"traceparent": fmt.Sprintf("00-%032x-%016x-01", id, id)}
}

func TestTelemetry_ItemOfATrace_SpanIsBelowItsOwn_AndTheCompletionBelowThat(t *testing.T) {
	r := &recorder{}
	dispatching(t, Config{TracerProvider: tracers{recorder: r}, Propagator: propagation.TraceContext{}}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }))
	}, func(t *testing.T, f *fake, _ func() error) {
		f.add(pgwake.WorkItem{Name: "a", Instance: "i", Headers: ofSpan(1)})
		synctest.Wait()
		require.Equal(t, []string{"process a consumer below 0000000000000001 messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace= messaging.message.id=1,pgwake.attempt=1"}, r.spans)
		require.Equal(t, []trace.SpanContext{attemptSpan}, f.sentFrom)
	})
}

func TestTelemetry_Batch_HasLinksToTheTracesOfItsItems(t *testing.T) {
	r, m := &recorder{}, testmeter.New()
	dispatching(t, Config{Concurrency: 1, MeterProvider: m, TracerProvider: tracers{recorder: r}, Propagator: propagation.TraceContext{}}, func(d *Dispatcher) {
		d.HandleBatch("a", 3, func(context.Context, []*pgwake.ClaimedWorkItem) error { return nil })
	}, func(t *testing.T, f *fake, _ func() error) {
		f.addAll(pgwake.WorkItem{Name: "a", Headers: ofSpan(1)}, pgwake.WorkItem{Name: "a"}, pgwake.WorkItem{Name: "a", Headers: ofSpan(2)})
		synctest.Wait()
		require.Equal(t, []string{"process a consumer beside 0000000000000001 beside 0000000000000002 messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace="}, r.spans)
		require.Equal(t, []float64{3}, m.Recorded(testmeter.Key(MetricClaimed, AttrNamespace.String(""))), "the path is left out that is not known")
		require.Equal(t, []float64{3}, m.Recorded(testmeter.Key(MetricClaimSize, AttrNamespace.String(""))))
	})
}

func TestTelemetry_Turns_AreMeasuredAndTraced(t *testing.T) {
	r, m := &recorder{}, testmeter.New()
	virtualtime.Test(t, func(t *testing.T) {
		f := newTurns("i")
		f.items["i"].Namespace, f.items["i"].Path = "n", pgwake.PathEvent
		f.items["i"].Messages = []pgwake.ClaimedMessage{{Message: pgwake.Message{Headers: ofSpan(1)}}, {}}
		o := NewOrchestrator(f, func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			time.Sleep(time.Second)
			if turn.Attempt == 1 {
				return pgwake.OrchestrationAck{}, errors.New("no")
			}
			return pgwake.OrchestrationAck{}, nil
		}, &OrchestratorConfig{
			Concurrency: 1, Retry: func(int, error) time.Duration { return time.Second }, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			MeterProvider: m, TracerProvider: tracers{recorder: r}, Propagator: propagation.TraceContext{},
		})
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- o.Run(ctx) }()
		time.Sleep(4 * time.Second)
		synctest.Wait()
		stop()
		require.NoError(t, <-ran)
		require.Equal(t, map[string][]float64{
			`pgwake.dispatch.turn.duration{messaging.destination.name=flow,pgwake.outcome=retried}`: {1},
			`pgwake.dispatch.turn.duration{messaging.destination.name=flow,pgwake.outcome=done}`:    {1},
			`pgwake.dispatch.claimed{pgwake.namespace=n,pgwake.path=event}`:                         {1, 1},
			`pgwake.dispatch.claim.size{pgwake.namespace=n,pgwake.path=event}`:                      {1, 1},
		}, m.AllRecorded())
		const turn = "turn flow consumer beside 0000000000000001 messaging.destination.name=flow,messaging.system=pgwake,pgwake.attempt=%d,pgwake.instance=i,pgwake.namespace=n%s"
		require.Equal(t, []string{fmt.Sprintf(turn, 1, " Error: retried"), fmt.Sprintf(turn, 2, "")}, r.spans)
		require.Equal(t, []trace.SpanContext{attemptSpan}, f.ackedFrom)
	})
}

func TestTelemetry_PlacesComeAndGo_TheirSumIsMeasured(t *testing.T) {
	m := testmeter.New()
	dispatching(t, Config{MinConcurrency: 1, Concurrency: 64, MeterProvider: m}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Millisecond); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		sum := func() (now float64) {
			for _, change := range m.Recorded(testmeter.Key(MetricPlaces)) {
				now += change
			}
			return now
		}
		synctest.Wait()
		require.EqualValues(t, 1, sum())
		enqueueMany(f, "a", 2_000)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Greater(t, sum(), 2.)
		require.NoError(t, stop())
		require.Zero(t, sum())
	})
}

// Ten a second, then a minute without any, then three at the end.
func TestTelemetry_Throughput_IsThatOfTheSecondsInWhichAnythingEnds(t *testing.T) {
	m := testmeter.New()
	perSecond := func() []float64 { return m.Recorded(testmeter.Key(MetricThroughput, AttrNamespace.String("n"))) }
	dispatching(t, Config{Concurrency: 1, Ahead: NotAhead, MeterProvider: m}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(100 * time.Millisecond); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		f.come("n", pgwake.PathEvent)
		enqueueMany(f, "a", 30)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []float64{10, 10}, perSecond(), "the third second goes on")
		enqueueMany(f, "a", 3)
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, []float64{10, 10, 10}, perSecond())
		require.NoError(t, stop())
		require.Equal(t, []float64{10, 10, 10, 3}, perSecond())
	})
}

// Two namespaces, of which one is served by events and one by polls, are told apart by their waits, and a claim that brought items of
// both counts for each.
func TestTelemetry_Namespaces_TheirWaitsCanBeCompared(t *testing.T) {
	m := testmeter.New()
	d := New(newFake(), &Config{MeterProvider: m, TracerProvider: tracenoop.NewTracerProvider()})
	due := time.Now().Add(-time.Hour)
	items := []*pgwake.ClaimedWorkItem{
		{WorkItem: pgwake.WorkItem{Name: "a"}, Namespace: "new", Path: pgwake.PathEvent, DueAt: due},
		{WorkItem: pgwake.WorkItem{Name: "a"}, Namespace: "new", Path: pgwake.PathEvent, DueAt: due},
		{WorkItem: pgwake.WorkItem{Name: "a"}, Namespace: "old", Path: pgwake.PathPolling, DueAt: due},
	}
	d.telemetry.claimedItems(items)
	l := labelsOf("a")
	for _, item := range items {
		d.telemetry.begin(t.Context(), d, l, []*held{{item: item}})
	}
	for _, of := range []struct {
		namespace string
		path      pgwake.Path
		items     int
	}{{"new", pgwake.PathEvent, 2}, {"old", pgwake.PathPolling, 1}} {
		as := []attribute.KeyValue{AttrNamespace.String(of.namespace), AttrPath.String(string(of.path))}
		require.Equal(t, []float64{float64(of.items)}, m.Recorded(testmeter.Key(MetricClaimed, as...)))
		require.Equal(t, []float64{float64(of.items)}, m.Recorded(testmeter.Key(MetricClaimSize, as...)))
		require.Len(t, m.Recorded(testmeter.Key(MetricWait, append(as, AttrName.String("a"))...)), of.items)
	}
}

// What an attempt measures is to cost no more than the measuring: attributes are made once.
func TestTelemetry_Attributes_AreMadeOnce(t *testing.T) {
	d := New(newFake(), nil)
	of := func(n int) claimedAs { return claimedAs{fmt.Sprint(n % 3), pgwake.PathEvent} }
	first := d.telemetry.others.get("a").ofWait(of(0))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		d.telemetry.others.get("a").ofWait(claimedAs{"0", pgwake.PathEvent})
	}))
	var all sync.WaitGroup
	for n := range 8 {
		all.Go(func() { d.telemetry.others.get("a").ofWait(of(n)) })
	}
	all.Wait()
	require.Same(t, &first[0], &d.telemetry.others.get("a").ofWait(of(0))[0])
	for n := range 2 * mostLabels {
		require.Equal(t, fmt.Sprint(n), d.telemetry.others.get(fmt.Sprint(n)).name)
	}
	require.Len(t, d.telemetry.others.of, mostLabels, "names may be data")
}
