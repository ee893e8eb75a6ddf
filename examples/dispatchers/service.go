package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	export "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"
)

// This file answers: what does a process have around its dispatchers? Take it as it is, and from main the context that ends with
// SIGTERM, and the bounded Close.
//
// When its context ends it says that it is not ready, claims no more, lets handlers end for a while, gives back the rest, and ends.
// Give it 15 s more than dispatch.Config.StopTimeout and CancelTimeout before it is killed: the database may be away. If it is
// killed all the same, others have its items when the leases end.

// propagator is for pgwake.Config and dispatch.Config: an item carries in its headers to which trace it belongs, from whoever
// enqueues it to the handler, and on to whatever that enqueues.
var propagator = propagation.TraceContext{}

// service is a process that does work until it is told to stop.
type service struct {
	provider    *pgwake.Provider
	dispatchers []*dispatch.Dispatcher
	registry    *prometheus.Registry
	meters      *sdk.MeterProvider    // for dispatch.Config
	tracers     *trace.TracerProvider // the same

	listener net.Listener
	stopping atomic.Bool
}

// newService listens at the address for probes and for whoever collects metrics. Spans go to the exporter, such as that of
// otlptracegrpc. Its dispatchers are the caller's to add.
func newService(p *pgwake.Provider, address string, spans trace.SpanExporter) (*service, error) {
	s := &service{provider: p, registry: prometheus.NewRegistry()}
	exporter, err := export.New(export.WithRegisterer(s.registry))
	if err != nil {
		return nil, err
	}
	s.meters = sdk.NewMeterProvider(sdk.WithReader(exporter))
	if err := s.measureProvider(); err != nil {
		return nil, err
	}
	if s.listener, err = net.Listen("tcp", address); err != nil {
		return nil, err
	}
	s.tracers = trace.NewTracerProvider(trace.WithBatcher(spans))
	return s, nil
}

// run runs the dispatchers until ctx ends, or one of them fails for good.
func (s *service) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 5 * time.Second}
	var running sync.WaitGroup
	results := make(chan error, len(s.dispatchers)+1)
	running.Go(func() {
		if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			results <- err
			stop()
		}
	})
	var dispatching sync.WaitGroup
	for _, d := range s.dispatchers {
		dispatching.Go(func() {
			defer stop() // whatever it ended for: one alone is no service
			if err := d.Run(ctx); err != nil {
				results <- err
			}
		})
	}
	<-ctx.Done()
	s.stopping.Store(true)
	dispatching.Wait()
	// The probes are answered to the end.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := errors.Join(server.Shutdown(ending), s.meters.Shutdown(ending), s.tracers.Shutdown(ending))
	running.Wait()
	close(results)
	for result := range results {
		err = errors.Join(err, result)
	}
	return err
}

func (s *service) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "alive") })
	// A process that cannot listen, or whose database is away, is ready all the same: it does what can be done, and a new one
	// could do no more. What is wrong is in the answer, for people and for alerts.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if s.stopping.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, "stopping")
			return
		}
		fmt.Fprintln(w, "ready")
		for _, problem := range s.provider.Health().Problems {
			fmt.Fprintln(w, problem)
		}
	})
	return mux
}

// measureProvider adds what the Provider counts to what the dispatchers measure.
func (s *service) measureProvider() error {
	meter := s.meters.Meter("github.com/pgwake/pgwake")
	items, err := meter.Int64ObservableCounter("pgwake.items", metric.WithDescription("work items fetched"))
	if err != nil {
		return err
	}
	looks, err := meter.Int64ObservableCounter("pgwake.looks", metric.WithDescription("queries for work items"))
	if err != nil {
		return err
	}
	unannounced, err := meter.Int64ObservableCounter("pgwake.unannounced_finds",
		metric.WithDescription("work items that the safety net found; more than 0 is worth a look"))
	if err != nil {
		return err
	}
	listening, err := meter.Int64ObservableGauge("pgwake.listening", metric.WithDescription("1: work is pushed, 0: polled for"))
	if err != nil {
		return err
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		stats := s.provider.Stats()
		o.ObserveInt64(items, stats.Worker.Items)
		o.ObserveInt64(looks, stats.Worker.Looks)
		o.ObserveInt64(unannounced, stats.Worker.FallbackFinds+stats.Worker.ScoutFinds)
		pushed := int64(0)
		if stats.Listening {
			pushed = 1
		}
		o.ObserveInt64(listening, pushed)
		return nil
	}, items, looks, unannounced, listening)
	return err
}
