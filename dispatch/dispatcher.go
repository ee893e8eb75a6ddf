package dispatch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does a Dispatcher do from its beginning to its end?
//
// One goroutine claims, for all handlers: as many items as there are places for. Each item has a goroutine of its own
// once it is begun. One goroutine renews the leases of all that is in hand, and two acknowledge what is done, so that no
// handler's place waits for a commit.

// Provider is what a Dispatcher needs of a *pgwake.Provider.
type Provider interface {
	FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error)
	AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error
	AckBatched(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error
	AbandonWorkItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error
	DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error
	RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error)
}

// Handler does the work of an item. It may be called again for the same item, on any node, at any time after an error or
// a crash. Its context ends when the lease is lost, when its time is up, or when the Dispatcher cannot wait any longer;
// context.Cause says which. The result is for the orchestration that scheduled the item, if one did.
type Handler func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error)

// Middleware wraps a handler.
type Middleware func(next Handler) Handler

// Dispatcher runs handlers on the due work items of a Provider. Register them before Run.
type Dispatcher struct {
	p   Provider
	cfg Config
	err error // of the Config, and of registrations

	handlers map[string]*registration

	work   *workshop
	leases *leases
	acks   *acker
}

// registration is a handler with its settings.
type registration struct {
	run         Handler
	maxAttempts int
	retry       RetryPolicy
	timeout     time.Duration
}

// New returns a Dispatcher on the worker queue of a Provider. Errors of the Config, and of handlers that are registered,
// are those of Run.
func New(p Provider, config *Config) *Dispatcher {
	d := &Dispatcher{p: p, handlers: make(map[string]*registration)}
	d.cfg, d.err = config.resolve()
	d.work = newWorkshop(d)
	d.leases = newLeases(d)
	d.acks = newAcker(d)
	return d
}

// Handle registers a handler for the items of a name.
func (d *Dispatcher) Handle(name string, h Handler, options ...Option) {
	r := &registration{maxAttempts: d.cfg.MaxAttempts, retry: d.cfg.Retry, timeout: d.cfg.Timeout}
	for _, o := range options {
		o(r)
	}
	for i := len(d.cfg.Middleware) - 1; i >= 0; i-- {
		h = d.cfg.Middleware[i](h)
	}
	r.run = h
	switch {
	case d.handlers[name] != nil:
		d.err = errors.Join(d.err, fmt.Errorf("%w: two handlers for %q", pgwake.ErrConfig, name))
	case name == "" || h == nil:
		d.err = errors.Join(d.err, fmt.Errorf("%w: a handler without a name, or a name without a handler: %q", pgwake.ErrConfig, name))
	}
	d.handlers[name] = r
}

// Option is a setting of one handler.
type Option func(*registration)

// WithMaxAttempts is Config.MaxAttempts for one handler.
func WithMaxAttempts(n int) Option { return func(r *registration) { r.maxAttempts = n } }

// WithRetry is Config.Retry for one handler.
func WithRetry(p RetryPolicy) Option { return func(r *registration) { r.retry = p } }

// WithTimeout is Config.Timeout for one handler; 0: none.
func WithTimeout(d time.Duration) Option { return func(r *registration) { r.timeout = d } }

// ErrHandlersLeft: Run has ended, and handlers have not, although their contexts have. Their items were given back.
var ErrHandlersLeft = errors.New("handlers did not end")

// Run dispatches until ctx ends or the Provider is closed, and then ends as the package says. It returns nil when
// everything has ended, ErrHandlersLeft if a handler has not, ErrConfig for mistakes in the Config and in what was
// registered, and what a fetch returned that will not go away, such as pgwake.ErrPermission. Run may be called once.
func (d *Dispatcher) Run(ctx context.Context) error {
	if d.err != nil {
		return d.err
	}
	var engine sync.WaitGroup
	quit, end := context.WithCancel(context.WithoutCancel(ctx)) // of the goroutines that handlers need to the last
	defer engine.Wait()
	defer end()
	engine.Go(func() { d.leases.run(quit) })
	for range ackers {
		engine.Go(func() { d.acks.run(quit) })
	}
	err := d.claim(ctx)
	left := d.work.stop()
	d.acks.drain()
	if left > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d of them", ErrHandlersLeft, left))
	}
	return err
}
