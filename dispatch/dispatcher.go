package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what does a Dispatcher do from its beginning to its end?
//
// One goroutine claims, for all handlers: as many items as there are places for. A place that is in use has a goroutine, which
// handles one item after the other. One renews the leases of all that is in hand, one sees when they end, and one renews the
// sessions. Two acknowledge what is done, so that no handler's place waits for a commit; another waits for the disk, and one
// sees to whatever is settled by itself.

// Provider is what a Dispatcher needs of a *pgwake.Provider. RenewWorkItemLocks fails with errors.ErrUnsupported where leases cannot be
// renewed at all.
type Provider interface {
	FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error)
	AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error
	AckBatched(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error
	Flush(ctx context.Context) error
	AckWorkItemTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, completion *pgwake.Message) error
	AbandonWorkItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error
	DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error
	LocalTime(server time.Time) time.Time
	ReleaseSessions(ctx context.Context, owners []string) (released int, err error)
	RenewSessionLock(ctx context.Context, owners []string, extend, idle time.Duration) (renewed int, err error)
	RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error)
}

// Handler does the work of an item. It is called by as many goroutines at a time as there are places. It may be called again for
// the same item, on any node, at any time after an error or a crash. Its context ends when the lease is lost, when its time is up, or when the Dispatcher cannot wait any longer;
// context.Cause says which. It has no values of the context of Run. The result is for the orchestration that scheduled the
// item, if one did.
type Handler func(ctx context.Context, item *pgwake.ClaimedWorkItem) (Result, error)

// BatchHandler does the work of several items at once; for the rest it is as a Handler. An error is that of all of them,
// unless it is BatchErrors. The context ends early when the leases of all of them are lost.
type BatchHandler func(ctx context.Context, items []*pgwake.ClaimedWorkItem) error

// BatchErrors is an error for each item of a batch, in order; nil, or nothing at the end: it is done. Joined with another error
// (errors.Join) it is an error of all items.
type BatchErrors []error

// eachOf returns the BatchErrors that an error is, or wraps. One that is joined with others is not for each alone.
func eachOf(err error) (each BatchErrors, ok bool) {
	for err != nil && !ok {
		if each, ok = err.(BatchErrors); !ok {
			err = errors.Unwrap(err)
		}
	}
	return each, ok
}

func (e BatchErrors) Error() string { return fmt.Sprintf("in a batch: %v", errors.Join(e...)) }

// Middleware wraps a handler.
type Middleware func(next Handler) Handler

// Dispatcher runs handlers on the due work items of a Provider. Register them before Run.
type Dispatcher struct {
	p   Provider
	cfg Config
	err error // of the Config, and of registrations

	fetched func(context.Context, error) // is told what came of each fetch; may be nil
	shared  bool                         // its owner goes on without it: whoever ends the owner releases the sessions

	handlers map[string]*registration
	unknown  *registration // for items of other names
	others   bool          // that was registered
	largest  int           // batch

	// triedOnce: there are items for which one attempt is all. What a process claims ahead and takes with it when it dies
	// would be such an attempt.
	triedOnce bool
	transacts string // what a HandleTx is for; "": there is none
	ran       atomic.Bool
	served    atomic.Bool // a fetch has been answered

	tags      tags
	telemetry telemetry
	work      *workshop
	leases    *leases
	acks      *acker
	apart     *apart
}

// registration is a handler with its settings.
type registration struct {
	run         func(ctx context.Context, unit []*held) []attempt
	most        int // items of one run
	maxAttempts int
	retry       RetryPolicy
	timeout     time.Duration
	labels      *labels // nil: it is for any name
}

// New returns a Dispatcher on the worker queue of a Provider. Errors of the Config, and of handlers that are registered,
// are those of Run.
func New(p Provider, config *Config) *Dispatcher {
	d := &Dispatcher{p: p, handlers: make(map[string]*registration), largest: 1}
	d.cfg, d.telemetry, d.err = config.resolve()
	d.tags.filter = d.cfg.Tags
	if p == nil {
		d.fail("there is no Provider")
	}
	d.unknown = d.newRegistration("", nil)
	d.unknown.run = single(noHandler)
	d.work = newWorkshop(d)
	d.leases = newLeases(d)
	d.acks = newAcker(d)
	d.apart = newApart(d)
	return d
}

func (d *Dispatcher) newRegistration(name string, options []Option) *registration {
	r := &registration{most: 1, retry: d.cfg.Retry, timeout: d.cfg.Timeout}
	for _, o := range options {
		if o == nil {
			d.fail("an Option of %q is nil", name)
			continue
		}
		o(r)
	}
	var k checks
	k.number("MaxAttempts", &r.maxAttempts, d.cfg.MaxAttempts, Unlimited)
	k.duration("Timeout", &r.timeout, 0, 0)
	if k.err != nil && len(options) > 0 { // or it is that of the Config
		d.err = errors.Join(d.err, fmt.Errorf("handler for %q: %w", name, k.err))
	}
	if r.retry == nil {
		r.retry = d.cfg.Retry
	}
	d.triedOnce = d.triedOnce || r.maxAttempts == 1
	return r
}

// registration returns the one for a name.
func (d *Dispatcher) registration(name string) *registration {
	if r := d.handlers[name]; r != nil {
		return r
	}
	return d.unknown
}

// Handle registers a handler for the items of a name.
func (d *Dispatcher) Handle(name string, h Handler, options ...Option) {
	d.register(name, d.newSingle(name, h, options))
}

// HandleOthers registers a handler for the items of all names that have none of their own.
func (d *Dispatcher) HandleOthers(h Handler, options ...Option) {
	const others = "other names"
	r := d.newSingle(others, h, options)
	if r.run == nil || d.others {
		d.fail("two handlers for %s, or none, or a Middleware that returned none", others)
		return
	}
	d.unknown, d.others = r, true
}

// newSingle is newRegistration for a handler of single items; it has none if there is none.
func (d *Dispatcher) newSingle(name string, h Handler, options []Option) *registration {
	r := d.newRegistration(name, options)
	for _, wrap := range slices.Backward(d.cfg.Middleware) {
		if h != nil && wrap != nil {
			h = wrap(h)
		}
	}
	if h != nil {
		r.run = single(h)
	}
	return r
}

// single has a handler take one item.
func single(h Handler) func(context.Context, []*held) []attempt {
	return func(ctx context.Context, unit []*held) []attempt {
		result, err := h(context.WithValue(ctx, heldKey{}, unit[0]), unit[0].item)
		return []attempt{{result, err}}
	}
}

// HandleBatch registers a handler that takes up to size items (1 to pgwake.MaxFetch) of a name at once, in one place: as many as are there when
// the place is free, so it gets single ones while there is little to do. Each place claims for the largest batch of the
// Dispatcher, as long as that does not bring more than can be begun, so handlers of single items that take their time are
// better off in another one, with a tag of their own. Middleware is for single items.
func (d *Dispatcher) HandleBatch(name string, size int, h BatchHandler, options ...Option) {
	r := d.newRegistration(name, options)
	r.most = size
	if size < 1 || size > pgwake.MaxFetch {
		d.fail("the batches of %q are of %d items; they may be of 1 to %d", name, size, pgwake.MaxFetch)
	}
	if h != nil {
		r.run = func(ctx context.Context, unit []*held) []attempt {
			items := make([]*pgwake.ClaimedWorkItem, len(unit))
			for i, held := range unit {
				items[i] = held.item
			}
			err := h(ctx, items)
			each, ok := eachOf(err)
			if !ok {
				return allFailed(len(unit), err)
			}
			attempts := make([]attempt, len(unit))
			for i := range attempts {
				if i < len(each) {
					attempts[i].err = each[i]
				}
			}
			return attempts
		}
	}
	d.largest = max(d.largest, size)
	d.register(name, r)
}

func (d *Dispatcher) register(name string, r *registration) {
	switch {
	case d.handlers[name] != nil:
		d.fail("two handlers for %q", name)
	case name == "":
		d.fail("a handler is registered without a name")
	case r.run == nil:
		d.fail("there is no handler for %q, or a Middleware returned none", name)
	}
	r.labels = labelsOf(name)
	d.handlers[name] = r
}

// SetConcurrency changes Config.MinConcurrency and Config.Concurrency, also while it runs: handlers that are at work beyond it come to
// their end. Fails with pgwake.ErrConfig, and changes nothing then. Safe for concurrent use.
func (d *Dispatcher) SetConcurrency(least, most int) error {
	least, most, err := resolveConcurrency(least, most)
	if err == nil {
		d.work.resize(least, most)
	}
	return err
}

// resolveConcurrency returns what these settings stand for.
func resolveConcurrency(least, most int) (int, int, error) {
	var k checks
	k.concurrency(&most)
	k.minConcurrency(&least, most)
	return least, most, k.err
}

// fail keeps a mistake for Run.
func (d *Dispatcher) fail(format string, args ...any) {
	d.err = errors.Join(d.err, fmt.Errorf("%w: "+format, append([]any{pgwake.ErrConfig}, args...)...))
}

// mistakes are those of the Config and of what was registered. Whether there are transactions is known at the end alone: a
// Dispatcher of Coordinators gets its Source, and what begins them, when it is assigned a namespace.
func (d *Dispatcher) mistakes() error {
	var k checks
	switch {
	case d.transacts == "" || d.shared: // of the latter NewCoordinators have looked
	case isStream(d.p):
		k.bad("HandleTx of %q: a stream has no transactions", d.transacts)
	case d.cfg.Begin == nil:
		k.bad("HandleTx of %q needs Config.Begin", d.transacts)
	}
	return errors.Join(d.err, k.err)
}

// Option is a setting of one handler.
type Option func(*registration)

// WithMaxAttempts is Config.MaxAttempts for one handler; 0 leaves it as it is there.
func WithMaxAttempts(n int) Option { return func(r *registration) { r.maxAttempts = n } }

// WithRetry is Config.Retry for one handler; nil leaves it as it is there.
func WithRetry(p RetryPolicy) Option { return func(r *registration) { r.retry = p } }

// WithTimeout is Config.Timeout for one handler; 0: none.
func WithTimeout(d time.Duration) Option { return func(r *registration) { r.timeout = d } }

// ErrHandlersLeft: Run has ended, and handlers have not, although their contexts have. Their items were given back.
var ErrHandlersLeft = errors.New("handlers did not end")

var errRanBefore = fmt.Errorf("%w: Run was called before", pgwake.ErrConfig)

// Run dispatches until ctx ends or the Provider is closed, and then ends as the package says. It returns nil when
// everything has ended, ErrHandlersLeft if a handler has not, ErrConfig for mistakes in the Config and in what was
// registered, and what a fetch returned that will not go away, such as pgwake.ErrPermission of the first. Later ones, and what the server is like
// for a while, it waits out: see Config.Logger. Run may be called once.
func (d *Dispatcher) Run(ctx context.Context) error {
	return d.run(ctx, claimed{}, 0)
}

// errIdle is why a Dispatcher ended that was to do so for want of work.
var errIdle = errors.New("there is no work")

// claimed is what somebody else fetched for a Dispatcher, by its fetchOptions.
type claimed struct {
	items []*pgwake.ClaimedWorkItem
	asked int // for so many; 0: nothing was fetched
}

// run is Run of a Dispatcher that begins with what was claimed for it. Unless idle is 0, it ends with errIdle when there was
// nothing to do for so long.
func (d *Dispatcher) run(ctx context.Context, first claimed, idle time.Duration) error {
	if err := d.mistakes(); err != nil {
		return err
	}
	if d.ran.Swap(true) {
		return errRanBefore
	}
	d.work.working = withSource(d.work.working, d.p)
	var engine sync.WaitGroup
	quit, end := context.WithCancel(context.WithoutCancel(ctx)) // of the goroutines that handlers need to the last
	if d.cfg.Session != nil && !d.shared {
		defer leave(d.cfg.Logger, []string{d.cfg.Session.Owner}, d.p.ReleaseSessions) // once nothing renews them
	}
	defer engine.Wait()
	defer end()
	engine.Go(func() { d.leases.run(quit) })
	engine.Go(func() { d.leases.expire(quit) })
	if d.cfg.Session != nil {
		engine.Go(func() { d.leases.keepSessions(quit) })
	}
	for range ackers {
		engine.Go(func() { d.acks.run(quit) })
	}
	engine.Go(func() { d.acks.runFlush(quit) })
	engine.Go(func() { d.apart.run(quit) })
	if len(first.items) > 0 {
		d.served.Store(true)
	}
	d.work.begin(first.items, first.asked)
	err := d.claim(ctx, idle)
	left := d.work.stop()
	d.telemetry.passed.flush()
	if left > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d items", ErrHandlersLeft, left))
	}
	return err
}

// leave gives up what is kept for owners, so that others need not wait for the end of its time.
func leave(log *slog.Logger, owners []string, release func(context.Context, []string) (int, error)) {
	bounded, cancel := context.WithTimeout(context.Background(), settlePatience)
	defer cancel()
	if _, err := release(bounded, owners); err != nil && !errors.Is(err, pgwake.ErrClosed) {
		log.Warn("dispatch: what is kept for these owners is left to the end of its time", "owners", owners, "error", err)
	}
}
