package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: what can be set, and to what?

// Config says how a Dispatcher works. The zero value means the defaults, and so does a nil *Config.
type Config struct {
	// Concurrency is how many handlers run at one time, at most. Up to MaxConcurrency. Defaults to 10.
	Concurrency int

	// MinConcurrency is how many may run at one time at the least: between it and Concurrency, as many do as get most done.
	// Defaults to Concurrency, and so to a fixed number.
	MinConcurrency int

	// Namespaces, Tags and Session say what is fetched; see pgwake.FetchOptions. The sessions of which something is in hand
	// are renewed; their items run side by side, as others do. When Run ends, those of which nothing is in hand are released.
	// Default to everything that has neither tag nor session.
	Namespaces []string
	Tags       pgwake.TagFilter
	Session    *pgwake.SessionOptions

	// Fair has the namespaces take turns, so that a flood in one keeps no other waiting; see pgwake.FetchOptions. Defaults to
	// false.
	Fair bool

	// LockTimeout is how long the items of a process that died are kept from others. While a handler runs, the lease is
	// renewed; where that cannot be done (see LeaseExtender), it is all the time that there is. From 1 s to 24 h. Defaults to 30 s.
	LockTimeout time.Duration

	// Timeout ends the context of a handler, with ErrTimeout as the cause. Defaults to 0: none, and then a handler that waits for what
	// never comes, such as an answer on a connection that vanished, keeps its item for as long as the process lives.
	Timeout time.Duration

	// MaxAttempts is how often an item is tried before it becomes a dead letter, or the orchestration that scheduled it is
	// told; Unlimited for ever. An attempt is a claim, also by a process that died before it called the handler, and of a HandleTx
	// whose commit has no answer. Defaults to 25.
	MaxAttempts int

	// Retry says how long to wait after an attempt that failed. Defaults to Backoff(time.Second, time.Hour).
	Retry RetryPolicy

	// Ahead is how many items may be claimed beyond those at work, so that short handlers need not wait for the database. It
	// claims as many as are likely to be begun within 20 ms, and gives back what is not; none where MaxAttempts is 1. While
	// items come that have one of the places of a limit (pgwake.Limits), it is at most a quarter of those, and a sixteenth
	// while they are scarce.
	// Defaults to 1000; NotAhead is for none.
	Ahead int

	// Begin begins the transactions of HandleTx, on the Provider's database; a pool's Begin will do. They are to be READ
	// COMMITTED: at a higher level the ack fails of every item whose lease was renewed while the handler ran. Each handler at
	// work holds a connection, so a pool that the Provider uses as well needs Concurrency and four more. Of a Group it is for the
	// Source of NewCoordinators, and Shard.Begin for others. Defaults to nil: there is no HandleTx.
	Begin func(context.Context) (pgx.Tx, error)

	// StopTimeout is how long handlers may go on once Run is to end. At least 1 ns. Defaults to 25 s.
	StopTimeout time.Duration

	// CancelTimeout is how long those that did not end by then may take to notice. After that Run waits for what became of the
	// items to be in the database, until nothing of it could be for 5 s, or for CancelTimeout if that is longer. At least 1 ns.
	// Defaults to 2 s.
	CancelTimeout time.Duration

	// Middleware wraps every handler of single items, the first outermost, when that is registered; what it returns is called by
	// several goroutines at a time. The context that it passes on is to be its own or one made of that.
	Middleware []Middleware

	// Completion makes the message for the orchestration that scheduled an item, out of the handler's result or the error
	// of the last attempt; nil: none. If it fails, or the Provider refuses the message (see pgwake.Config.MaxPayload), it is
	// asked for one with that as the error; if that is of no use either, the item becomes a dead letter. It is called by several
	// goroutines at a time. Defaults to CompletionMessage.
	Completion func(item *pgwake.ClaimedWorkItem, result Result, err error) (*pgwake.Message, error)

	// OnEnd is called once for each claim, when it is known what is to become of the item, and before that is in the
	// database. It runs on a goroutine of its own, for which the handler's place waits, or whoever gives the item back; several
	// at a time. It must not block; if it panics, or ends its goroutine, that is logged. Defaults to nil.
	OnEnd func(Ended)

	// MeterProvider and TracerProvider are for OpenTelemetry; see the Metric names, and there is a span around each call of a
	// handler. Default to the global ones.
	MeterProvider  metric.MeterProvider
	TracerProvider trace.TracerProvider

	// Propagator takes out of an item's headers to which trace it belongs: the one that enqueued it. Defaults to
	// OpenTelemetry's global one. What handlers enqueue with their context belongs to it as well; see pgwake.Config.
	Propagator propagation.TextMapPropagator

	// Logger receives what operators should know: a line for each attempt that failed, at level Warn, for each dead letter,
	// at level Error, and for a database that is away. Defaults to slog.Default().
	Logger *slog.Logger
}

// MaxConcurrency is the most handlers, or turns, at one time of a Dispatcher or an Orchestrator.
const MaxConcurrency = 100_000

// Values for fields of which 0 means the default.
const (
	Unlimited = -1 // Config.MaxAttempts
	NotAhead  = -1 // Config.Ahead
)

func (c *Config) resolve() (Config, telemetry, error) {
	r := Config{}
	if c != nil {
		r = *c
	}
	var k checks
	k.concurrency(&r.Concurrency)
	k.minConcurrency(&r.MinConcurrency, r.Concurrency)
	k.number("MaxAttempts", &r.MaxAttempts, 25, Unlimited)
	k.number("Ahead", &r.Ahead, 1000, NotAhead)
	k.lockTimeout(&r.LockTimeout)
	k.duration("Timeout", &r.Timeout, 0, 0)
	k.duration("StopTimeout", &r.StopTimeout, 25*time.Second, 0)
	k.duration("CancelTimeout", &r.CancelTimeout, 2*time.Second, 0)
	for _, m := range r.Middleware {
		if m == nil {
			k.bad("a Middleware is nil")
		}
	}
	if r.Retry == nil {
		r.Retry = Backoff(time.Second, time.Hour)
	}
	if r.Completion == nil {
		r.Completion = CompletionMessage
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	t := newTelemetry(&r, &k)
	return r, t, k.err
}

// OrchestratorConfig says how an Orchestrator works. The zero value means the defaults, and so does a nil one.
type OrchestratorConfig struct {
	// Concurrency is how many turns are taken at one time, each of another instance. Up to MaxConcurrency. Defaults to 10.
	Concurrency int

	// Namespaces, Queues, Versions and WithoutHistory say what is fetched; see pgwake.FetchOptions. Default to everything, with
	// its history.
	Namespaces     []string
	Queues         []string
	Versions       *pgwake.VersionFilter
	WithoutHistory bool

	// LockTimeout is how long an instance is kept from others whose process died. While the Decider runs, the lease is
	// renewed. From 1 s to 24 h. Defaults to 30 s.
	LockTimeout time.Duration

	// Timeout ends the context of the Decider, with ErrTimeout as the cause. Defaults to 0: none.
	Timeout time.Duration

	// MaxAttempts is how often a turn is tried before the instance fails; Unlimited for ever. Defaults to 10.
	MaxAttempts int

	// Retry says how long to wait after a turn that failed, or could not be acknowledged. Defaults to
	// Backoff(time.Second, time.Minute).
	Retry RetryPolicy

	// Poison decides a turn that was tried MaxAttempts times, or of which the Decider returned an error that is Permanent. If it
	// fails as well, or the Provider refuses what it decided, the messages of the turn become dead letters. It is called by
	// several goroutines at a time. Defaults to FailInstance.
	Poison func(turn *pgwake.OrchestrationItem, err error) (pgwake.OrchestrationAck, error)

	// Sticky has the next turns of each instance come to the same Owner for so long, since that has the state at hand;
	// afterwards, and once Run has ended, anybody gets them. An ack that says something of it prevails. From 10 ms to 24 h.
	// Defaults to 0: to anybody.
	Sticky time.Duration

	// Owner is who gets the turns of the instances that are sticky to it: one name for a process, whose Orchestrators end
	// together. Required with Sticky. Defaults to "": nobody.
	Owner string

	// Middleware wraps the Decider, the first outermost; what it returns is called by several goroutines at a time. The context that it
	// passes on is to be its own or one made of that. Defaults to none.
	Middleware []TurnMiddleware

	// StopTimeout is how long turns may go on once Run is to end, and CancelTimeout how long those that did not end by then
	// may take to notice. After that Run waits for what became of the turns to be in the database, for 5 s at most, or for
	// CancelTimeout if that is longer. At least 1 ns. Default to 25 s and 2 s.
	StopTimeout, CancelTimeout time.Duration

	// MeterProvider, TracerProvider and Propagator are for OpenTelemetry: see MetricTurn, and there is a span around each
	// turn, with links to the traces of its messages. What the ack enqueues belongs to it. Default to the global ones.
	MeterProvider  metric.MeterProvider
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c *OrchestratorConfig) resolve() (OrchestratorConfig, turnTelemetry, error) {
	r := OrchestratorConfig{}
	if c != nil {
		r = *c
	}
	var k checks
	k.concurrency(&r.Concurrency)
	k.number("MaxAttempts", &r.MaxAttempts, 10, Unlimited)
	k.lockTimeout(&r.LockTimeout)
	k.duration("Timeout", &r.Timeout, 0, 0)
	k.duration("StopTimeout", &r.StopTimeout, 25*time.Second, 0)
	k.duration("CancelTimeout", &r.CancelTimeout, 2*time.Second, 0)
	if r.Sticky != 0 && (r.Sticky < pgwake.MinLockTimeout || r.Sticky > pgwake.MaxLockTimeout || r.Owner == "") {
		k.bad("Sticky %v needs an Owner, and to be between %v and %v", r.Sticky, pgwake.MinLockTimeout, pgwake.MaxLockTimeout)
	}
	for _, m := range r.Middleware {
		if m == nil {
			k.bad("a TurnMiddleware is nil")
		}
	}
	if r.Retry == nil {
		r.Retry = Backoff(time.Second, time.Minute)
	}
	if r.Poison == nil {
		r.Poison = FailInstance
	}
	if r.Logger == nil {
		r.Logger = slog.Default()
	}
	t := newTurnTelemetry(&r, &k)
	return r, t, k.err
}

// checks completes settings and collects what is wrong with them.
type checks struct{ err error }

func (k *checks) bad(format string, args ...any) {
	k.err = errors.Join(k.err, fmt.Errorf("%w: "+format, append([]any{pgwake.ErrConfig}, args...)...))
}

func (k *checks) number(name string, v *int, unless, least int) {
	if *v == 0 {
		*v = unless
	}
	if *v < least {
		k.bad("%s %d is less than %d", name, *v, least)
	}
}

func (k *checks) concurrency(v *int) {
	k.number("Concurrency", v, 10, 1)
	if *v > MaxConcurrency {
		k.bad("Concurrency %d is more than %d", *v, MaxConcurrency)
	}
}

func (k *checks) minConcurrency(v *int, most int) {
	k.number("MinConcurrency", v, most, 1)
	if *v > most {
		k.bad("MinConcurrency %d is more than Concurrency %d", *v, most)
	}
}

func (k *checks) duration(name string, v *time.Duration, unless, least time.Duration) {
	if *v == 0 {
		*v = unless
	}
	if *v < least {
		k.bad("%s %v is less than %v", name, *v, least)
	}
}

// lockTimeout: a lease that is to be renewed in time is not too short for that.
func (k *checks) lockTimeout(v *time.Duration) {
	k.duration("LockTimeout", v, pgwake.DefaultLockTimeout, time.Second)
	if *v > pgwake.MaxLockTimeout {
		k.bad("LockTimeout %v is more than %v", *v, pgwake.MaxLockTimeout)
	}
}
