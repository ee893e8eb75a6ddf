package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how does a runtime get its turns?

// TurnProvider is what an Orchestrator needs of a *pgwake.Provider.
type TurnProvider interface {
	FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error)
	AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error
	AbandonOrchestrationItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error
	LocalTime(server time.Time) time.Time
	RenewOrchestrationItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (time.Time, error)
}

// Decider takes a turn: it looks at what came for an instance and says what is to become of it. It may be called again for
// the same messages after an error or a crash, so it does nothing but decide. Its context ends as that of a Handler.
type Decider func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error)

// OrchestratorConfig says how an Orchestrator works. The zero value means the defaults, and so does a nil one.
type OrchestratorConfig struct {
	// Concurrency is how many turns are taken at one time, each of another instance. Defaults to 10.
	Concurrency int

	// Namespaces, Queues, Versions and WithoutHistory say what is fetched; see pgwake.FetchOptions.
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

	// Retry says how long to wait after a turn that failed. Defaults to Backoff(time.Second, time.Minute).
	Retry RetryPolicy

	// Poison decides a turn that was tried MaxAttempts times, or of which the Decider returned an error that is Permanent.
	// If it fails as well, the turn is given back. Defaults to FailInstance.
	Poison func(turn *pgwake.OrchestrationItem, err error) (pgwake.OrchestrationAck, error)

	// Sticky has the next turns of each instance come to the same Owner for so long, since that has the state at hand;
	// afterwards anybody gets them. An ack that says something of it prevails. At most 24 h. Defaults to 0: to anybody.
	Sticky time.Duration

	// Owner is who gets the turns of the instances that are sticky to it: one name for a process. Required with Sticky.
	Owner string

	// StopTimeout is how long turns may go on once Run is to end, and CancelTimeout how long those that did not end by then
	// may take to notice. Default to 25 s and 2 s.
	StopTimeout, CancelTimeout time.Duration

	// Logger receives what operators should know. Defaults to slog.Default().
	Logger *slog.Logger
}

// KindExecutionFailed is the type of the event that FailInstance adds to the history.
const KindExecutionFailed = "execution_failed"

// FailInstance ends the execution: its status is pgwake.StatusFailed, its output the error, and an event of the type
// KindExecutionFailed, with {"error": ..., "attempts": ...}, is the last of its history. The messages of the turn are gone.
func FailInstance(turn *pgwake.OrchestrationItem, failure error) (pgwake.OrchestrationAck, error) {
	data, err := json.Marshal(struct {
		Error    string `json:"error"`
		Attempts int    `json:"attempts"`
	}{failure.Error(), turn.Attempt})
	return pgwake.OrchestrationAck{
		ExecutionID: turn.ExecutionID,
		History:     []pgwake.Event{{ID: turn.LastEventID + 1, Type: KindExecutionFailed, Data: data}},
		Metadata:    pgwake.Metadata{Name: turn.Name, Version: turn.Version, Status: pgwake.StatusFailed, Output: failure.Error()},
	}, err
}

// Orchestrator takes the turns of a Provider's instances by a Decider.
type Orchestrator struct {
	p      TurnProvider
	decide Decider
	cfg    OrchestratorConfig
	err    error // of the OrchestratorConfig

	working  context.Context // of turns
	cutShort context.CancelCauseFunc
	inHand   atomic.Int64
}

// NewOrchestrator returns an Orchestrator. Errors of the config are those of Run.
func NewOrchestrator(p TurnProvider, decide Decider, config *OrchestratorConfig) *Orchestrator {
	o := &Orchestrator{p: p, decide: decide}
	o.cfg, o.err = config.resolve()
	if decide == nil {
		o.err = errors.Join(o.err, fmt.Errorf("%w: there is no Decider", pgwake.ErrConfig))
	}
	o.working, o.cutShort = context.WithCancelCause(context.Background())
	return o
}

func (c *OrchestratorConfig) resolve() (OrchestratorConfig, error) {
	r := OrchestratorConfig{}
	if c != nil {
		r = *c
	}
	var k checks
	k.number("Concurrency", &r.Concurrency, 10, 1)
	k.number("MaxAttempts", &r.MaxAttempts, 10, Unlimited)
	k.lockTimeout(&r.LockTimeout)
	k.duration("Timeout", &r.Timeout, 0, 0)
	k.duration("StopTimeout", &r.StopTimeout, 25*time.Second, 0)
	k.duration("CancelTimeout", &r.CancelTimeout, 2*time.Second, 0)
	if r.Sticky != 0 && (r.Sticky < pgwake.MinLockTimeout || r.Sticky > pgwake.MaxLockTimeout || r.Owner == "") {
		k.bad("Sticky %v needs an Owner, and to be between %v and %v", r.Sticky, pgwake.MinLockTimeout, pgwake.MaxLockTimeout)
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
	return r, k.err
}

// Run takes turns until ctx ends or the Provider is closed. It ends in two stages as Dispatcher.Run does, and returns what
// that does.
func (o *Orchestrator) Run(ctx context.Context) error {
	if o.err != nil {
		return o.err
	}
	fetching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var loops sync.WaitGroup
	for range o.cfg.Concurrency {
		loops.Go(func() {
			if err := o.loop(fetching); err != nil {
				cancel(err)
			}
		})
	}
	ended := make(chan struct{})
	go func() { loops.Wait(); close(ended) }()
	select {
	case <-fetching.Done():
	case <-ended: // the Provider is closed
	}
	var err error
	if ctx.Err() == nil {
		err = context.Cause(fetching) // of a loop; nil: there is none
	}
	if !within(ended, o.cfg.StopTimeout) {
		o.cutShort(ErrStopping)
		if !within(ended, o.cfg.CancelTimeout) {
			err = errors.Join(err, fmt.Errorf("%w: %d turns", ErrHandlersLeft, o.inHand.Load()))
		}
	}
	o.cutShort(ErrStopping)
	return err
}

func within(ended <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ended:
		return true
	case <-t.C:
		return false
	}
}

// loop takes one turn after the other. Its error is one that will not go away.
func (o *Orchestrator) loop(ctx context.Context) error {
	options := &pgwake.FetchOptions{
		LockTimeout: o.cfg.LockTimeout, Namespaces: o.cfg.Namespaces, Queues: o.cfg.Queues, Versions: o.cfg.Versions,
		WithoutHistory: o.cfg.WithoutHistory, Owner: o.cfg.Owner,
	}
	patience := patience{log: o.cfg.Logger}
	for {
		turn, err := o.p.FetchOrchestrationItem(ctx, options)
		if err == nil {
			o.take(turn)
		}
		if goOn, err := patience.after(ctx, err); !goOn {
			return err
		}
	}
}

// turnLease is the lease of a turn in hand.
type turnLease struct {
	mu    sync.Mutex
	until time.Time // local: its end, at the earliest
}

func (l *turnLease) end() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until
}

// take has a turn decided and acknowledged, or given back.
func (o *Orchestrator) take(turn *pgwake.OrchestrationItem) {
	o.inHand.Add(1)
	defer o.inHand.Add(-1)
	ctx, lose := context.WithCancelCause(o.working)
	defer lose(nil)
	lease := &turnLease{until: o.p.LocalTime(turn.LockedUntil)}
	renewal := time.AfterFunc(o.cfg.LockTimeout/renewals, func() { o.renew(ctx, turn, lease, lose) })
	defer renewal.Stop()
	deciding := ctx
	if o.cfg.Timeout > 0 {
		var cancel context.CancelFunc
		deciding, cancel = context.WithTimeoutCause(ctx, o.cfg.Timeout, ErrTimeout)
		defer cancel()
	}

	var ack pgwake.OrchestrationAck
	err := errNoAttemptEnded
	if o.cfg.MaxAttempts == Unlimited || turn.Attempt <= o.cfg.MaxAttempts {
		ack, err = o.try(deciding, turn)
	}
	var cause error
	if deciding.Err() != nil {
		cause = context.Cause(deciding)
	}
	if err == nil && !errors.Is(cause, pgwake.ErrLockLost) {
		err = o.ack(turn, lease, ack)
	}
	if err != nil {
		o.failed(turn, lease, err, cause)
	}
}

// try calls the Decider; a panic is an error.
func (o *Orchestrator) try(ctx context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = &PanicError{panicked, debug.Stack()}
		}
	}()
	return o.decide(ctx, turn)
}

// ack acknowledges a turn. What it leaves out of the ack is what anybody would say.
func (o *Orchestrator) ack(turn *pgwake.OrchestrationItem, lease *turnLease, ack pgwake.OrchestrationAck) error {
	if ack.ExecutionID == 0 {
		ack.ExecutionID = turn.ExecutionID
	}
	if ack.Metadata.Name == "" {
		ack.Metadata.Name = turn.Name
	}
	goesOn := ack.Metadata.Status == "" || ack.Metadata.Status == pgwake.StatusRunning || ack.Metadata.Status == pgwake.StatusContinuedAsNew
	if ack.Sticky == nil && o.cfg.Sticky > 0 && goesOn {
		ack.Sticky = &pgwake.Sticky{Owner: o.cfg.Owner, For: o.cfg.Sticky}
	}
	return persist(context.Background(), lease.end, func(ctx context.Context) error {
		return o.p.AckOrchestrationItem(ctx, turn.LockToken, ack)
	})
}

// failed ends a turn that could not be decided, or not be acknowledged.
func (o *Orchestrator) failed(turn *pgwake.OrchestrationItem, lease *turnLease, err, cause error) {
	log := o.cfg.Logger.With("instance", turn.Instance, "name", turn.Name, "namespace", turn.Namespace, "attempt", turn.Attempt)
	v := judgeAttempt(err, cause, turn.Attempt, o.cfg.MaxAttempts, o.cfg.Retry)
	if errors.Is(err, pgwake.ErrLockLost) {
		v = verdict{fate: forsake, err: err}
	}
	switch v.fate {
	case forsake:
		log.Warn("dispatch: the lease was lost", "error", v.err)
		return
	case bury:
		log.Error("dispatch: given up", "reason", v.reason, "error", v.err)
		ack, err := o.cfg.Poison(turn, v.err)
		if err == nil {
			err = o.ack(turn, lease, ack)
		}
		if err == nil || errors.Is(err, pgwake.ErrLockLost) {
			return
		}
		v = verdict{fate: retry, delay: o.cfg.Retry(turn.Attempt, err), err: fmt.Errorf("give the instance up: %w", err)}
	}
	if v.err != nil {
		log.Warn("dispatch: failed", "again_in", v.delay, "error", v.err)
	}
	options := &pgwake.AbandonOptions{Delay: v.delay, IgnoreAttempt: v.free, Error: text(v.err)}
	err = persist(context.Background(), lease.end, func(ctx context.Context) error {
		return o.p.AbandonOrchestrationItem(ctx, turn.LockToken, options)
	})
	if err != nil {
		log.Warn("dispatch: left to the end of its lease", "error", err)
	}
}

// renew renews the lease of a turn until ctx ends, or ends ctx when the lease is lost.
func (o *Orchestrator) renew(ctx context.Context, turn *pgwake.OrchestrationItem, lease *turnLease, lose context.CancelCauseFunc) {
	for length := o.cfg.LockTimeout; ctx.Err() == nil; nap(ctx, min(length/renewals, time.Until(lease.end()))) {
		sent := time.Now()
		bounded, cancel := context.WithDeadline(ctx, minTime(sent.Add(length/renewals), lease.end()))
		_, err := o.p.RenewOrchestrationItemLock(bounded, turn.LockToken, length)
		cancel()
		switch {
		case err == nil:
			lease.mu.Lock()
			lease.until = sent.Add(length)
			lease.mu.Unlock()
		case errors.Is(err, pgwake.ErrLockLost), !time.Now().Before(lease.end()):
			lose(pgwake.ErrLockLost)
		case ctx.Err() == nil:
			o.cfg.Logger.Warn("dispatch: cannot renew a lease", "instance", turn.Instance, "error", err)
		}
	}
}
