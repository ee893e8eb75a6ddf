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
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// recorder keeps what is measured and traced.
type recorder struct {
	mu     sync.Mutex
	values map[string][]float64 // by metric and attributes
	spans  []string
}

func (r *recorder) add(name string, set attribute.Set, value float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := name + "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
	r.values[key] = append(r.values[key], value)
}

type meters struct {
	metricnoop.MeterProvider
	*recorder
}

func (m meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{recorder: m.recorder} }

type meter struct {
	metricnoop.Meter
	*recorder
}

func (m meter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return instrument{name: name, recorder: m.recorder}, nil
}

func (m meter) Int64UpDownCounter(name string, _ ...metric.Int64UpDownCounterOption) (metric.Int64UpDownCounter, error) {
	return counter{name: name, recorder: m.recorder}, nil
}

type instrument struct {
	metricnoop.Float64Histogram
	*recorder
	name string
}

func (i instrument) Record(_ context.Context, v float64, o ...metric.RecordOption) {
	i.add(i.name, metric.NewRecordConfig(o).Attributes(), v)
}

type counter struct {
	metricnoop.Int64UpDownCounter
	*recorder
	name string
}

func (c counter) Add(_ context.Context, v int64, o ...metric.AddOption) {
	c.add(c.name, metric.NewAddConfig(o).Attributes(), float64(v))
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
	r := &recorder{values: map[string][]float64{}}
	var ended []Ended
	dispatching(t, Config{
		Concurrency: 1, Retry: func(int, error) time.Duration { return time.Second },
		MeterProvider: meters{recorder: r}, TracerProvider: tracers{recorder: r},
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
		f.enqueue("a")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, map[string][]float64{
			`messaging.process.duration{messaging.destination.name=a,pgwake.outcome=retried}`: {1},
			`messaging.process.duration{messaging.destination.name=a,pgwake.outcome=done}`:    {1},
			`pgwake.dispatch.wait{messaging.destination.name=a}`:                              {0, 0},
			`pgwake.dispatch.running{messaging.destination.name=a}`:                           {1, -1, 1, -1},
			`pgwake.dispatch.places{}`: {1},
		}, r.values)
		require.Equal(t, []string{
			"process a consumer messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace= messaging.message.id=1,pgwake.attempt=1 Error: retried",
			"process a consumer messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace= messaging.message.id=1,pgwake.attempt=2",
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
	r := &recorder{values: map[string][]float64{}}
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
	r := &recorder{values: map[string][]float64{}}
	dispatching(t, Config{Concurrency: 1, TracerProvider: tracers{recorder: r}, Propagator: propagation.TraceContext{}}, func(d *Dispatcher) {
		d.HandleBatch("a", 3, func(context.Context, []*pgwake.ClaimedWorkItem) error { return nil })
	}, func(t *testing.T, f *fake, _ func() error) {
		f.addAll(pgwake.WorkItem{Name: "a", Headers: ofSpan(1)}, pgwake.WorkItem{Name: "a"}, pgwake.WorkItem{Name: "a", Headers: ofSpan(2)})
		synctest.Wait()
		require.Equal(t, []string{"process a consumer beside 0000000000000001 beside 0000000000000002 messaging.destination.name=a,messaging.system=pgwake,pgwake.namespace="}, r.spans)
	})
}

func TestTelemetry_Turns_AreMeasuredAndTraced(t *testing.T) {
	r := &recorder{values: map[string][]float64{}}
	virtualtime.Test(t, func(t *testing.T) {
		f := newTurns("i")
		f.items["i"].Messages = []pgwake.ClaimedMessage{{Message: pgwake.Message{Headers: ofSpan(1)}}, {}}
		o := NewOrchestrator(f, func(_ context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
			time.Sleep(time.Second)
			if turn.Attempt == 1 {
				return pgwake.OrchestrationAck{}, errors.New("no")
			}
			return pgwake.OrchestrationAck{}, nil
		}, &OrchestratorConfig{
			Concurrency: 1, Retry: func(int, error) time.Duration { return time.Second }, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			MeterProvider: meters{recorder: r}, TracerProvider: tracers{recorder: r}, Propagator: propagation.TraceContext{},
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
		}, r.values)
		const turn = "turn flow consumer beside 0000000000000001 messaging.destination.name=flow,messaging.system=pgwake,pgwake.attempt=%d,pgwake.instance=i,pgwake.namespace=%s"
		require.Equal(t, []string{fmt.Sprintf(turn, 1, " Error: retried"), fmt.Sprintf(turn, 2, "")}, r.spans)
		require.Equal(t, []trace.SpanContext{attemptSpan}, f.ackedFrom)
	})
}

func TestTelemetry_PlacesComeAndGo_TheirSumIsMeasured(t *testing.T) {
	r := &recorder{values: map[string][]float64{}}
	dispatching(t, Config{MinConcurrency: 1, Concurrency: 64, MeterProvider: meters{recorder: r}}, func(d *Dispatcher) {
		d.Handle("a", does(func(context.Context, *pgwake.ClaimedWorkItem) error { time.Sleep(time.Millisecond); return nil }))
	}, func(t *testing.T, f *fake, stop func() error) {
		sum := func() (now float64) {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, change := range r.values["pgwake.dispatch.places{}"] {
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
