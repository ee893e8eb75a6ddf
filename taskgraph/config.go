package taskgraph

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
)

// This file answers: how can an Engine be set?

// Config holds every setting of an Engine. The zero value means the defaults, and so does a nil *Config.
type Config struct {
	// Namespaces are those that this node serves: names, or patterns as path.Match has them. Default to all.
	Namespaces []string

	// Tags are those of the steps that handlers of this node may run, besides steps without a tag. Default to none.
	Tags []string

	// Steps says how steps are run, in each namespace; Namespaces, Tags, MaxAttempts and Completion are not to be set. An Engine without
	// handlers runs none, and evaluates tasks only. Defaults as in package dispatch: 10 at a time.
	Steps dispatch.Config

	// Turns says how tasks are evaluated, in each namespace; Namespaces, Queues and MaxAttempts are not to be set. Defaults as in package
	// dispatch: 10 at a time.
	Turns dispatch.OrchestratorConfig

	// RetireAfter is how long a namespace has no work before what serves it ends. Defaults to 10 s.
	RetireAfter time.Duration

	// Rollout says how the node learns of the work of each namespace; see dispatch.CoordinatorsConfig. Defaults to nil: as the Provider does.
	Rollout func(namespace string) pgwake.Mode

	// Backoff says how long a step waits after an attempt that failed, unless its definition or its handler does. Defaults as
	// Backoff has them.
	Backoff Backoff

	// MaxResult is the largest result of a step, in bytes of JSON, also by CompleteStep. Defaults to 1 MiB. For what tasks begin with, and
	// what steps keep, there is pgwake.Config.MaxPayload.
	MaxResult int

	// UpkeepInterval is how often, on average and a fourth more, this node looks after tasks that nobody else would: see Upkeep. While it
	// evaluates tasks, it refreshes rollups (RefreshRollups) five times as often. At least 1 s. Defaults to 5 min.
	UpkeepInterval time.Duration

	// FailStale has Upkeep end tasks that have been in the same state for too long, or have taken too long in all (Lifecycle). It ends none
	// until it has found the server there, and its clock not set, for an UpkeepInterval: after an outage, or a start of all nodes, they may go
	// on first. It is for the tasks of all namespaces, whatever Namespaces says. Defaults to false: they are left as they are.
	FailStale bool

	// KeepFor has Upkeep remove tasks that ended so long ago, in whatever way, with all that belongs to them (Graph.Purge): also their
	// idempotency keys, their transitions, and their entries in the DLQ; tasks of all namespaces, whatever Namespaces says. Nothing is removed while the clocks of the server and of this node
	// differ by more than a day. Up to 100 years. Defaults to 0: they are kept for ever.
	KeepFor time.Duration

	// Propagator puts into the headers of what is enqueued to which trace it belongs, and takes it out of them, unless Steps or Turns have
	// another one. Defaults to OpenTelemetry's global one.
	Propagator propagation.TextMapPropagator

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c *Config) resolve() (Config, error) {
	var r Config
	if c != nil {
		r = *c
	}
	var problems []error
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if r.Steps.Namespaces != nil || !reflect.ValueOf(r.Steps.Tags).IsZero() || r.Steps.MaxAttempts != 0 || r.Steps.Completion != nil {
		wrong("Steps: Namespaces, Tags, MaxAttempts and Completion are the Engine's")
	}
	if r.Turns.Namespaces != nil || r.Turns.Queues != nil || r.Turns.MaxAttempts != 0 {
		wrong("Turns: Namespaces, Queues and MaxAttempts are the Engine's")
	}
	for _, tag := range r.Tags {
		if problem := textProblem(tag, 1, MaxTagLength); problem != "" {
			wrong("Tags: %s %s", quoteShort(tag), problem)
		}
	}
	if r.MaxResult < 0 {
		wrong("MaxResult is negative")
	}
	r.MaxResult = cmp.Or(r.MaxResult, 1<<20)
	r.UpkeepInterval = cmp.Or(r.UpkeepInterval, 5*time.Minute)
	if r.UpkeepInterval < time.Second {
		wrong("UpkeepInterval is less than 1 s")
	}
	if r.KeepFor < 0 || r.KeepFor > longestDelay {
		wrong("KeepFor %v is not between 0 and 100 years", r.KeepFor)
	}
	if err := r.Backoff.Check(); err != nil {
		wrong("Backoff: %w", err)
	}
	if r.Propagator == nil {
		r.Propagator = otel.GetTextMapPropagator()
	}
	if r.Steps.Propagator == nil {
		r.Steps.Propagator = r.Propagator
	}
	if r.Turns.Propagator == nil {
		r.Turns.Propagator = r.Propagator
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	if r.Steps.Logger == nil {
		r.Steps.Logger = r.Logger
	}
	if r.Turns.Logger == nil {
		r.Turns.Logger = r.Logger
	}
	if len(problems) > 0 {
		return r, fmt.Errorf("%w: %w", pgwake.ErrConfig, errors.Join(problems...))
	}
	return r, nil
}

// newProcessor is a random UUID.
func newProcessor() string {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails
	id.Bytes[6], id.Bytes[8] = id.Bytes[6]&0x0f|0x40, id.Bytes[8]&0x3f|0x80
	return id.String()
}
