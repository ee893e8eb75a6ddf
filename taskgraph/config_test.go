package taskgraph_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// This file answers: does an Engine do as its Config says?

func TestConfig_WhatCannotBe_IsToldByNew(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	for says, spoil := range map[string]func(c *taskgraph.Config){
		"Steps: Namespaces, Tags, MaxAttempts and Completion are the Engine's": func(c *taskgraph.Config) { c.Steps.Namespaces = []string{"a"} },
		"Namespaces, Tags":                        func(c *taskgraph.Config) { c.Steps.Tags = pgwake.AnyTag() },
		"Tags, MaxAttempts":                       func(c *taskgraph.Config) { c.Steps.Tags = pgwake.Tags("gpu") },
		"MaxAttempts and":                         func(c *taskgraph.Config) { c.Steps.MaxAttempts = 3 },
		"and Completion are":                      func(c *taskgraph.Config) { c.Steps.Completion = dispatch.CompletionMessage },
		"Turns: Namespaces":                       func(c *taskgraph.Config) { c.Turns.Namespaces = []string{"a"} },
		"Turns: Namespaces, Queues":               func(c *taskgraph.Config) { c.Turns.Queues = []string{"a"} },
		"Queues and MaxAttempts":                  func(c *taskgraph.Config) { c.Turns.MaxAttempts = 3 },
		`Tags: "" is empty`:                       func(c *taskgraph.Config) { c.Tags = []string{"gpu", ""} },
		"is 201 bytes long":                       func(c *taskgraph.Config) { c.Tags = []string{strings.Repeat("x", 201)} },
		`Tags: "\x00" "\x00" contains NUL`:        func(c *taskgraph.Config) { c.Tags = []string{"\x00"} },
		"MaxResult is negative":                   func(c *taskgraph.Config) { c.MaxResult = -1 },
		"UpkeepInterval is less":                  func(c *taskgraph.Config) { c.UpkeepInterval = time.Millisecond },
		"UpkeepInterval is less than 1 s":         func(c *taskgraph.Config) { c.UpkeepInterval = -time.Hour },
		"KeepFor -1ns is not":                     func(c *taskgraph.Config) { c.KeepFor = -1 },
		"is not between 0 and 100 years":          func(c *taskgraph.Config) { c.KeepFor = math.MaxInt64 },
		"Backoff: Multiplier 0.5 is not a number": func(c *taskgraph.Config) { c.Backoff.Multiplier = 0.5 },
	} {
		var c taskgraph.Config
		spoil(&c)
		_, err := taskgraph.New(t.Context(), p, &c)
		require.ErrorIs(t, err, pgwake.ErrConfig, says)
		require.ErrorContains(t, err, says)
	}
	_, err := taskgraph.New(t.Context(), p, &taskgraph.Config{MaxResult: -1, KeepFor: -1, Tags: []string{""}})
	for _, says := range []string{"MaxResult", "KeepFor", "Tags"} {
		require.ErrorContains(t, err, says, "all of it")
	}
	// What is not looked at before it is used is told by Run.
	for says, spoil := range map[string]func(c *taskgraph.Config){
		"Concurrency -1": func(c *taskgraph.Config) { c.Turns.Concurrency = -1 },
		"Concurrency -2": func(c *taskgraph.Config) { c.Steps.Concurrency = -2 }, // although there is no handler
	} {
		config := &taskgraph.Config{}
		spoil(config)
		e, err := taskgraph.New(t.Context(), p, config)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		err = e.Run(ctx)
		require.ErrorIs(t, err, pgwake.ErrConfig, says)
		require.ErrorContains(t, err, says)
	}
}

func TestHandle_TwiceOrNothing_IsToldByRun(t *testing.T) {
	t.Parallel()
	ok, _ := failing(0, nil)
	p := schemas.New(t, nil)
	for says, handle := range map[string]func(e *taskgraph.Engine){
		`two handlers "h"`:               func(e *taskgraph.Engine) { e.Handle("h", ok); e.Handle("h", ok) },
		`no handler, or no name for it`:  func(e *taskgraph.Engine) { e.Handle("h", nil) },
		`or no name for it: ""`:          func(e *taskgraph.Engine) { e.Handle("", ok) },
		`or no name for it: "xxxxxxxxxx`: func(e *taskgraph.Engine) { e.Handle(strings.Repeat("x", 256), ok) },
	} {
		e, err := taskgraph.New(t.Context(), p, nil)
		require.NoError(t, err)
		handle(e)
		err = e.Run(t.Context())
		require.ErrorIs(t, err, pgwake.ErrConfig)
		require.ErrorContains(t, err, says)
	}
}

func TestRun_Twice_IsRefused(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	g.run()
	g.complete(g.submit(taskgraph.Define("shop", "nothing", "1")))
	require.ErrorIs(t, g.Run(t.Context()), pgwake.ErrConfig)
}

func TestTags_StepsWithATag_RunWhereItIsAskedFor(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	plain, gpu := onProvider(t, p, nil), onProvider(t, p, &taskgraph.Config{Tags: []string{"gpu", "tpu"}})
	var mu sync.Mutex
	ran := make(map[string]string)
	for name, g := range map[string]*graph{"plain": plain, "gpu": gpu} {
		g.Handle("h", func(_ context.Context, s *taskgraph.Step) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			ran[s.Name] = name
			return nil, nil
		})
	}
	plain.run()
	task := plain.submit(taskgraph.Define("shop", "tags", "1").Step("a", "h").Step("b", "h", taskgraph.After("a"), taskgraph.Tag("gpu")).Step("c", "h", taskgraph.After("a"), taskgraph.Tag("tpu")).
		Step("d", "h", taskgraph.After("a"), taskgraph.Tag("other")))
	eventually(t, func() bool { return plain.step(task, "c").State == taskgraph.StepEnqueued })
	require.Equal(t, []string{"taskgraph/gpu", "taskgraph/other", "taskgraph/tpu"}, plain.query(`SELECT tag FROM worker_queue ORDER BY tag`))
	gpu.run()
	for p, err := range gpu.Watch(gpu.within(), task) {
		require.NoError(t, err)
		if p.Completed == 3 {
			break
		}
	}
	require.NoError(t, plain.stop())
	require.NoError(t, gpu.stop())
	require.Equal(t, map[string]string{"a": "plain", "b": "gpu", "c": "gpu"}, ran)
	require.Equal(t, taskgraph.StepEnqueued, gpu.step(task, "d").State)
}

func TestLimitKey_StepsThatShareOne_KeepToItsLimit(t *testing.T) {
	t.Parallel()
	g := newGraph(t, nil)
	var now, most atomic.Int32
	free := newBarrier(3)
	g.Handle("limited", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		select { // what is claimed with it would have come by then
		case <-free.open:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	})
	g.Handle("free", func(ctx context.Context, _ *taskgraph.Step) (any, error) { return nil, free.wait(ctx) })
	require.NoError(t, g.p.SetLimits(t.Context(), "shop", pgwake.Limits{MaxRunningPerKey: 1}))
	g.run()
	d := taskgraph.Define("shop", "limits", "1")
	for i := range 5 {
		d.Step(fmt.Sprint("limited", i), "limited", taskgraph.LimitKey("bank"))
	}
	for i := range 3 {
		d.Step(fmt.Sprint("free", i), "free")
	}
	g.complete(g.submit(d))
	require.EqualValues(t, 1, most.Load())
}

func TestMaxResult_WhatIsLarger_FailsTheStepForGood(t *testing.T) {
	t.Parallel()
	g := newGraph(t, &taskgraph.Config{MaxResult: 10})
	g.Handle("h", func(_ context.Context, s *taskgraph.Step) (any, error) {
		return strings.Repeat("x", map[string]int{"fits": 8, "large": 9}[s.Name]), nil
	})
	g.run()
	task := g.submit(taskgraph.Define("shop", "results", "1").Step("fits", "h").Step("large", "h", taskgraph.After("fits")))
	g.until(task, taskgraph.TaskBlockedByFailures)
	require.Equal(t, taskgraph.StepComplete, g.step(task, "fits").State)
	require.Equal(t, "the result: has 11 bytes, and 10 is the most", g.step(task, "large").Err())
	require.Equal(t, 1, g.step(task, "large").Attempts)
}

// spans are the spans that were begun.
type spans struct {
	noop.TracerProvider
	mu    sync.Mutex
	n     byte
	begun []begunSpan
}

type begunSpan struct {
	name  string
	trace trace.TraceID
	id    trace.SpanID
	below trace.SpanID
	links []trace.SpanID
}

type tracer struct {
	noop.Tracer
	*spans
}

func (s *spans) Tracer(string, ...trace.TracerOption) trace.Tracer { return tracer{spans: s} }

func (s tracer) Start(ctx context.Context, name string, o ...trace.SpanStartOption) (context.Context, trace.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	parent := trace.SpanContextFromContext(ctx)
	span := begunSpan{name: name, trace: parent.TraceID(), id: trace.SpanID{s.n}, below: parent.SpanID()}
	if !span.trace.IsValid() {
		span.trace = trace.TraceID{s.n}
	}
	started := trace.NewSpanStartConfig(o...)
	for _, l := range started.Links() {
		span.links = append(span.links, l.SpanContext.SpanID())
	}
	s.begun = append(s.begun, span)
	c := trace.NewSpanContext(trace.SpanContextConfig{TraceID: span.trace, SpanID: span.id, TraceFlags: trace.FlagsSampled})
	return trace.ContextWithSpanContext(ctx, c), noop.Span{}
}

// A turn is linked to what asked for it, a step is below the turn that enqueued it, and the turn after it is linked to the step.
func TestPropagator_TheTrace_GoesFromSubmitToTheTurnToTheStepAndBack(t *testing.T) {
	t.Parallel()
	var s spans
	config := &taskgraph.Config{Propagator: propagation.TraceContext{}}
	config.Steps.TracerProvider, config.Turns.TracerProvider = &s, &s
	g := newGraph(t, config)
	var seen trace.SpanContext
	g.Handle("h", func(ctx context.Context, _ *taskgraph.Step) (any, error) {
		seen = trace.SpanContextFromContext(ctx)
		return nil, nil
	})
	g.register(single("traced"))
	asker := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{200}, SpanID: trace.SpanID{200}, TraceFlags: trace.FlagsSampled})
	done, err := g.Submit(trace.ContextWithSpanContext(g.within(), asker), aTask(single("traced")))
	require.NoError(t, err)
	require.Contains(t, g.one(`SELECT headers ->> 'traceparent' FROM orchestrator_queue`), asker.TraceID().String()+"-"+asker.SpanID().String())
	g.run()
	g.complete(done.ID)
	require.NoError(t, g.stop())
	require.Len(t, s.begun, 3)
	first, step, last := s.begun[0], s.begun[1], s.begun[2]
	require.Equal(t, []string{"turn traced", "process h", "turn traced"}, []string{first.name, step.name, last.name})
	require.Equal(t, []trace.SpanID{asker.SpanID()}, first.links)
	require.Equal(t, first.id, step.below)
	require.Equal(t, first.trace, step.trace)
	require.Equal(t, step.id, seen.SpanID())
	require.Equal(t, []trace.SpanID{step.id}, last.links)

	other := newGraph(t, nil)
	other.register(single("traced"))
	_, err = other.Submit(trace.ContextWithSpanContext(other.within(), asker), aTask(single("traced")))
	require.NoError(t, err)
	require.Equal(t, "true", other.one(`SELECT (headers IS NULL)::text FROM orchestrator_queue`), "there is no propagator")
}

// flooding is a propagator that has more to say, once it floods, than there is room for.
type flooding struct {
	propagation.TraceContext
	floods atomic.Bool
}

func (f *flooding) Inject(ctx context.Context, to propagation.TextMapCarrier) {
	f.TraceContext.Inject(ctx, to)
	if f.floods.Load() {
		to.Set("baggage", strings.Repeat("x", pgwake.MaxHeaderBytes))
	}
}

func TestPropagator_TooMuchToPropagate_TasksGoOnWithoutIt(t *testing.T) {
	t.Parallel()
	flood := &flooding{}
	g := newGraph(t, &taskgraph.Config{Propagator: flood, Backoff: taskgraph.Backoff{Base: time.Millisecond}})
	for name, fails := range map[string]int32{"ends": 0, "fails": 1} {
		h, _ := failing(fails, errBroken)
		g.Handle(name, func(ctx context.Context, s *taskgraph.Step) (any, error) { flood.floods.Store(true); return h(ctx, s) })
	}
	g.run()
	d := taskgraph.Define("shop", "floods", "1").Step("a", "ends", taskgraph.MaxAttempts(1)).Step("b", "fails", taskgraph.After("a"))
	g.complete(g.submit(d)) // the flood comes with the first result
	require.Equal(t, "0", g.lostWorkers())
	g.complete(g.submit(d))
}
