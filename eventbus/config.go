package eventbus

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how can a Bus be set?

// DefaultGroup is the group of a namespace when none is named.
const DefaultGroup = "default"

// Config holds every setting of a Bus. The zero value means the defaults, and so does a nil *Config.
type Config struct {
	// Namespace is where events are emitted and handled; see Bus.In for others. Defaults to pgwake.DefaultNamespace.
	Namespace string

	// MaxPayload is the largest payload, in bytes of JSON. At most 100 MiB, which is also how long its numbers may be when their exponents are
	// written out, as jsonb does. Defaults to 1 MiB.
	MaxPayload int

	// StrictRouting makes an event that no group is subscribed to a dead letter, with the reason "No handler for event <type>". Defaults
	// to false: it is in the log alone, and counted (MetricUnrouted).
	StrictRouting bool

	// KeepFor is how long events stay in the log, at least: a month is removed at a time, once all of it is older, unless one of its events
	// is still to be handled or is a dead letter. It is done by whichever node comes first, so have all say the same. At least 24 h; negative:
	// for ever. Defaults to six months, 184 days.
	KeepFor time.Duration

	// MeterProvider, TracerProvider and Propagator are for OpenTelemetry; see the Metric names. Default to the global ones.
	MeterProvider  metric.MeterProvider
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

const (
	mostPayload = 100 << 20
	day         = 24 * time.Hour
)

func (c *Config) resolve() (Config, error) {
	var r Config
	if c != nil {
		r = *c
	}
	var problems []error
	r.Namespace = cmp.Or(r.Namespace, pgwake.DefaultNamespace)
	if err := pgwake.CheckNamespace(r.Namespace); err != nil {
		problems = append(problems, err)
	}
	r.MaxPayload = cmp.Or(r.MaxPayload, 1<<20)
	if r.MaxPayload < 0 || r.MaxPayload > mostPayload {
		problems = append(problems, fmt.Errorf("MaxPayload %d is not between 1 and %d", r.MaxPayload, mostPayload))
	}
	r.KeepFor = cmp.Or(r.KeepFor, 184*day)
	if r.KeepFor >= 0 && r.KeepFor < day {
		problems = append(problems, fmt.Errorf("KeepFor %v is less than 24 h", r.KeepFor))
	}
	if r.MeterProvider == nil {
		r.MeterProvider = otel.GetMeterProvider()
	}
	if r.TracerProvider == nil {
		r.TracerProvider = otel.GetTracerProvider()
	}
	if r.Propagator == nil {
		r.Propagator = otel.GetTextMapPropagator()
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	if len(problems) > 0 {
		return r, fmt.Errorf("%w: %w", pgwake.ErrConfig, errors.Join(problems...))
	}
	return r, nil
}
