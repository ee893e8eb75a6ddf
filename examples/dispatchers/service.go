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
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	export "go.opentelemetry.io/otel/exporters/prometheus"
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
	meters      *meters
	tracers     *trace.TracerProvider // for dispatch.Config

	listener net.Listener
	stopping atomic.Bool
}

// meters is for pgwake.Config and dispatch.Config: what these measure is in the registry.
type meters struct {
	*sdk.MeterProvider
	registry *prometheus.Registry
}

func newMeters() (*meters, error) {
	registry := prometheus.NewRegistry()
	exporter, err := export.New(export.WithRegisterer(registry))
	if err != nil {
		return nil, err
	}
	return &meters{sdk.NewMeterProvider(sdk.WithReader(exporter)), registry}, nil
}

// newService listens at the address for probes and for whoever collects metrics. Spans go to the exporter, such as that of
// otlptracegrpc. Its dispatchers are the caller's to add.
func newService(p *pgwake.Provider, m *meters, address string, spans trace.SpanExporter) (s *service, err error) {
	s = &service{provider: p, meters: m}
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
	looking, endLooking := context.WithCancel(context.WithoutCancel(ctx)) // pages of the console that are open end with it
	defer endLooking()
	server := &http.Server{Handler: s.routes(), ReadHeaderTimeout: 5 * time.Second, BaseContext: func(net.Listener) context.Context { return looking }}
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
	endLooking()
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
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.meters.registry, promhttp.HandlerOpts{}))
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
	// For people who are at this machine, or have a port of it forwarded to theirs: nobody is asked for a password here.
	mux.Handle("/console/", http.StripPrefix("/console", console.Handler(s.provider, &console.Options{Local: true})))
	return mux
}
