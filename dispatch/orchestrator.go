package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
	"go.opentelemetry.io/otel/trace"
)

// This file answers: how does a runtime get its turns?

// TurnProvider is what an Orchestrator needs of a *pgwake.Provider.
type TurnProvider interface {
	FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error)
	AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error
	AbandonOrchestrationItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error
	DeadLetterOrchestrationItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error
	LocalTime(server time.Time) time.Time
	ReleaseSticky(ctx context.Context, owners []string) (released int, err error)
	RenewOrchestrationItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (time.Time, error)
}

// Decider takes a turn: it looks at what came for an instance and says what is to become of it. It may be called again for
// the same messages after an error or a crash, so it does nothing but decide, unless it does so by AckBy. It is called by several
// goroutines at a time, each for another instance. Its context ends as that of a Handler.
type Decider func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error)

// TurnMiddleware wraps a Decider.
type TurnMiddleware func(next Decider) Decider

// KindExecutionFailed is the type of the event that FailInstance adds to the history.
const KindExecutionFailed = "execution_failed"

// FailInstance ends the execution: its status is pgwake.StatusFailed, its output the error, of at most 16 KiB, and an event of
// the type KindExecutionFailed, with {"error": ..., "attempts": ...}, is the last of its history. The messages of the turn are
// gone. An execution that has ended already fails all the same: a Decider acknowledges what comes too late. An instance that
// nobody has opened cannot fail: the Provider refuses that, and the messages become dead letters.
func FailInstance(turn *pgwake.OrchestrationItem, failure error) (pgwake.OrchestrationAck, error) {
	data, err := json.Marshal(struct {
		Error    string `json:"error"`
		Attempts int    `json:"attempts"`
	}{text(failure), turn.Attempt})
	return pgwake.OrchestrationAck{
		ExecutionID: turn.ExecutionID,
		History:     []pgwake.Event{{ID: turn.LastEventID + 1, Type: KindExecutionFailed, Data: data}},
		Metadata:    pgwake.Metadata{Name: turn.Name, Version: turn.Version, Status: pgwake.StatusFailed, Output: text(failure)},
	}, err
}

// Orchestrator takes the turns of a Provider's instances by a Decider.
type Orchestrator struct {
	p      TurnProvider
	decide Decider
	cfg    OrchestratorConfig
	err    error // of the OrchestratorConfig

	fetched func(context.Context, error) // is told what came of each fetch; may be nil
	shared  bool                         // its owner goes on without it: whoever ends the owner releases what is sticky to it

	telemetry turnTelemetry

	working  context.Context // of turns
	cutShort context.CancelCauseFunc
	settling context.Context // of the calls that end them
	giveUp   context.CancelFunc
	ran      atomic.Bool
	served   atomic.Bool // a fetch has been answered
	renewing sync.WaitGroup

	mu      sync.Mutex
	inHand  map[*heldTurn]bool
	news    chan struct{}               // one has ended
	retired bool                        // no turn is taken any more: there was none for a while
	left    []*pgwake.OrchestrationItem // came after that
}

// NewOrchestrator returns an Orchestrator. Errors of the config are those of Run.
func NewOrchestrator(p TurnProvider, decide Decider, config *OrchestratorConfig) *Orchestrator {
	o := &Orchestrator{p: p, decide: decide, inHand: make(map[*heldTurn]bool), news: make(chan struct{}, 1)}
	o.cfg, o.telemetry, o.err = config.resolve()
	for _, wrap := range slices.Backward(o.cfg.Middleware) {
		if o.decide != nil && wrap != nil {
			o.decide = wrap(o.decide)
		}
	}
	if p == nil || o.decide == nil {
		o.err = errors.Join(o.err, fmt.Errorf("%w: there is no Provider, or no Decider, or a TurnMiddleware returned none", pgwake.ErrConfig))
	}
	o.working, o.cutShort = context.WithCancelCause(withSource(context.Background(), p))
	o.settling, o.giveUp = context.WithCancel(context.Background())
	return o
}

// errOver is why the loops end when one of them has found the Provider closed.
var errOver = errors.New("the provider is closed")

// Run takes turns until ctx ends or the Provider is closed. It ends in two stages as Dispatcher.Run does, and returns what
// that does. Run may be called once.
func (o *Orchestrator) Run(ctx context.Context) error { return o.run(ctx, nil, 0) }

// run is Run of an Orchestrator that begins with turns that were fetched for it. Unless idle is 0, it ends with errIdle when there
// was none for so long; then those of o.left came too late.
func (o *Orchestrator) run(ctx context.Context, first []*pgwake.OrchestrationItem, idle time.Duration) error {
	if o.err != nil {
		return o.err
	}
	if o.ran.Swap(true) {
		return errRanBefore
	}
	var err error
	if len(first) > 0 {
		o.served.Store(true)
	}
	if o.cfg.Owner != "" && !o.shared {
		defer leave(o.cfg.Logger, []string{o.cfg.Owner}, o.p.ReleaseSticky)
	}
	defer o.renewing.Wait()
	defer o.giveUp()
	fetching, end := context.WithCancelCause(ctx)
	defer end(nil)
	var loops sync.WaitGroup
	for i := range o.cfg.Concurrency {
		loops.Go(func() {
			for at := i; at < len(first); at += o.cfg.Concurrency {
				o.take(first[at])
			}
			err := o.loop(fetching, idle)
			if err == nil {
				err = errOver
			}
			end(err)
		})
	}
	ended := make(chan struct{})
	go func() { loops.Wait(); close(ended) }()
	<-fetching.Done()
	if cause := context.Cause(fetching); ctx.Err() == nil && cause != errOver {
		err = cause
	}
	stopped := within(ended, o.cfg.StopTimeout)
	if !stopped {
		o.cutShort(ErrStopping)
		stopped = within(ended, o.cfg.CancelTimeout)
	}
	o.cutShort(ErrStopping)
	if stopped {
		return err
	}
	// What is left is Deciders that do not heed their context, and turns that are about to be settled, or cannot be.
	left, acking := o.giveBackAll(max(o.cfg.CancelTimeout, settlePatience))
	o.giveUp()
	var patience time.Duration
	if acking > 0 { // and their Deciders probably have nothing more to do
		patience = o.cfg.CancelTimeout
	}
	if left == 0 {
		within(ended, verbTimeout) // what was on its way is over at once: nothing is called after Run
	} else if !within(ended, patience) {
		err = errors.Join(err, fmt.Errorf("%w: %d turns", ErrHandlersLeft, left))
	}
	return err
}

// giveBackAll gives back the turns whose Decider has not ended, waits until the others are settled, and returns how many of the former
// there are, and how many of them the Decider was about to acknowledge.
func (o *Orchestrator) giveBackAll(patience time.Duration) (left, acking int) {
	o.mu.Lock()
	var turns []*heldTurn
	for t := range o.inHand {
		if t.deciding {
			t.givenBack = true
			turns = append(turns, t)
		}
	}
	o.mu.Unlock()
	bounded, cancel := context.WithTimeout(o.settling, patience)
	defer cancel()
	var all sync.WaitGroup
	for _, t := range turns {
		under := t.byDecider.close()
		if under != nil {
			acking++
		}
		all.Go(func() {
			if under != nil { // what becomes of it is known when that has ended
				select {
				case <-under:
				case <-bounded.Done():
				}
			}
			if own := t.byDecider.outcome(); !own.acked && !own.lost {
				o.giveBack(bounded, t, verdict{fate: retry, free: true, err: ErrStopping})
			}
		})
	}
	all.Wait()
	for o.settlesAny() && bounded.Err() == nil {
		select {
		case <-o.news:
		case <-bounded.Done():
		}
	}
	return len(turns), acking
}

// retire reports whether no turn is in hand. Then none is taken any more.
func (o *Orchestrator) retire() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.retired = o.retired || len(o.inHand) == 0
	return o.retired
}

// settlesAny reports whether a turn is decided, and not yet settled.
func (o *Orchestrator) settlesAny() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for t := range o.inHand {
		if !t.deciding {
			return true
		}
	}
	return false
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

func (o *Orchestrator) fetchOptions() *pgwake.FetchOptions {
	return &pgwake.FetchOptions{
		LockTimeout: o.cfg.LockTimeout, Namespaces: o.cfg.Namespaces, Queues: o.cfg.Queues, Versions: o.cfg.Versions,
		WithoutHistory: o.cfg.WithoutHistory, Owner: o.cfg.Owner,
	}
}

// loop takes one turn after the other. Its error is errIdle (see run), or one that will not go away.
func (o *Orchestrator) loop(ctx context.Context, idle time.Duration) error {
	options := o.fetchOptions()
	options.PollTimeout = idle
	patience := patience{log: o.cfg.Logger, poll: idle, served: &o.served}
	for began := time.Now(); ; {
		turn, err := o.p.FetchOrchestrationItem(ctx, options)
		patience.heard(err)
		if o.fetched != nil {
			o.fetched(ctx, err)
		}
		if err == nil {
			o.take(turn)
			began = time.Now()
		}
		if idle > 0 && errors.Is(err, pgwake.ErrNoWork) && time.Since(began) >= idle && o.retire() {
			return errIdle
		}
		if goOn, err := patience.after(ctx, err); !goOn {
			return err
		}
	}
}

// heldTurn is a turn in hand.
type heldTurn struct {
	*pgwake.OrchestrationItem

	o *Orchestrator

	// Under the Orchestrator's mutex.
	deciding  bool
	givenBack bool // since the Decider did not end: what that says later is for nobody

	byDecider ownAck

	mu     sync.Mutex
	until  time.Time               // local: end of the lease, at the earliest
	latest time.Time               // local: about the latest that it can be on the server, for what was sent; never before until
	lost   bool                    // here
	gone   bool                    // there, which the server has said
	lose   context.CancelCauseFunc // ends the context of the Decider
	acking bool                    // the Decider acknowledges it, or has, and is not to hear of that
	ended  context.CancelFunc      // ends the renewals
}

func (t *heldTurn) own() *ownAck              { return &t.byDecider }
func (t *heldTurn) token() pgwake.LockToken   { return t.LockToken }
func (t *heldTurn) settling() context.Context { return t.o.settling }

func (t *heldTurn) holdOn() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.acking = !t.lost; t.lost {
		return pgwake.ErrLockLost
	}
	return nil
}

func (t *heldTurn) goOn(acked bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if acked {
		t.ended()
		return
	}
	if t.acking = false; t.lost {
		t.lose(pgwake.ErrLockLost)
	}
}

// loseIt is for a lease that is lost.
func (t *heldTurn) loseIt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lost = true; !t.acking {
		t.lose(pgwake.ErrLockLost)
	}
}

// end is when the lease ends here.
func (t *heldTurn) end() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.until
}

// atTheLatest is when it ends on the server: until then that is told what became of the turn (see leases).
func (t *heldTurn) atTheLatest() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.latest
}

// lasts reports whether the lease may last on the server.
func (t *heldTurn) lasts() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.gone && time.Now().Before(t.latest)
}

func (t *heldTurn) told() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.gone = true
}

// renewed takes note of a renewal.
func (t *heldTurn) renewed(sent time.Time, length time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var failure *pgwake.Error
	switch {
	case err == nil:
		t.until = sent.Add(length)
		t.latest = t.until
	case errors.Is(err, pgwake.ErrLockLost):
		t.gone = true
	case errors.As(err, &failure) && failure.Unknown:
		t.latest = time.Now().Add(length)
	}
}

func (o *Orchestrator) log(t *heldTurn) *slog.Logger {
	return o.cfg.Logger.With("instance", t.Instance, "name", t.Name, "namespace", t.Namespace, "attempt", t.Attempt)
}

// take has a turn decided and acknowledged, or given back.
func (o *Orchestrator) take(turn *pgwake.OrchestrationItem) {
	o.telemetry.claimed(claimedAs{turn.Namespace, turn.Path}, 1)
	until := o.p.LocalTime(turn.LockedUntil)
	t := &heldTurn{o: o, OrchestrationItem: turn, until: until, latest: until}
	if !o.admit(t) {
		return
	}
	defer o.drop(t)
	ctx, lose := context.WithCancelCause(o.working)
	defer lose(nil)
	// A long history may have taken a part of the lease.
	first := min(o.cfg.LockTimeout/renewals, time.Until(t.until)/2)
	inHand, done := context.WithCancel(o.settling) // longer than ctx, which ends before a Decider has noticed
	defer done()
	t.lose, t.ended = lose, done
	o.renewing.Go(func() { o.renew(inHand, t, first) })
	deciding := ctx
	if o.cfg.Timeout > 0 {
		var cancel context.CancelFunc
		deciding, cancel = context.WithTimeoutCause(ctx, o.cfg.Timeout, ErrTimeout)
		defer cancel()
	}

	began := time.Now()
	deciding = o.telemetry.begin(deciding, turn)
	v := verdict{fate: acknowledge}
	defer func() { o.telemetry.end(deciding, turn, v, began) }()
	ack, failure := pgwake.OrchestrationAck{}, errNoAttemptEnded
	if o.cfg.MaxAttempts == Unlimited || turn.Attempt <= o.cfg.MaxAttempts {
		own := context.WithValue(deciding, heldKey{}, t)
		ack, failure = hooked(func() (pgwake.OrchestrationAck, error) { return o.decide(own, turn) })
	}
	own := t.byDecider.over()
	givenBack := o.decided(t)
	switch {
	case own.acked:
		v = verdict{fate: committed, err: failure}
		if failure != nil {
			o.log(t).Warn("dispatch: failed after it was acknowledged", "error", text(failure))
		}
		return
	case givenBack:
		v = verdict{fate: retry, free: true, err: ErrStopping}
		return
	}
	var cause error
	if deciding.Err() != nil {
		cause = context.Cause(deciding)
	}
	if own.lost {
		cause = own.failure
	}
	if own.failure != nil && failure == nil { // it did not do what it was to
		failure = own.failure
	}
	if retryable := own.retryable; (failure == nil || own.isWhy(failure)) && !errors.Is(cause, pgwake.ErrLockLost) {
		if failure == nil {
			if failure = o.ack(deciding, t, ack); failure == nil {
				return
			}
			if retryable = outage.Passes(failure); errors.Is(failure, pgwake.ErrLockLost) {
				t.told()
				cause = failure
			}
		}
		if retryable { // it was decided: the database is away, and the instance is not to blame
			v = verdict{fate: retry, free: true, delay: o.cfg.Retry.after(t.Attempt, failure), err: failure}
			o.log(t).Warn("dispatch: cannot acknowledge", "again_in", v.delay, "error", text(failure))
			o.giveBack(o.settling, t, v)
			return
		}
	}
	v = judgeAttempt(failure, cause, t.Attempt, o.cfg.MaxAttempts, o.cfg.Retry)
	v = o.failed(deciding, t, v)
}

// admit takes a turn in hand, unless the Orchestrator has retired.
func (o *Orchestrator) admit(t *heldTurn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.retired {
		o.left = append(o.left, t.OrchestrationItem)
		return false
	}
	o.inHand[t], t.deciding = true, true
	return true
}

// decided takes note that the Decider has ended, and reports whether the turn was given back.
func (o *Orchestrator) decided(t *heldTurn) (givenBack bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	t.deciding = false
	return t.givenBack
}

func (o *Orchestrator) drop(t *heldTurn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.inHand, t)
	select {
	case o.news <- struct{}{}:
	default:
	}
}

// ack acknowledges a turn, in the trace of its context. What is left out of the ack is what anybody would say.
func (o *Orchestrator) ack(traced context.Context, t *heldTurn, ack pgwake.OrchestrationAck) error {
	if ack.ExecutionID == 0 {
		ack.ExecutionID = t.ExecutionID
	}
	if ack.Metadata.Name == "" {
		ack.Metadata.Name = t.Name
	}
	goesOn := ack.Metadata.Status == "" || ack.Metadata.Status == pgwake.StatusRunning || ack.Metadata.Status == pgwake.StatusContinuedAsNew
	if ack.Sticky == nil && o.cfg.Sticky > 0 && goesOn {
		ack.Sticky = &pgwake.Sticky{Owner: o.cfg.Owner, For: o.cfg.Sticky}
	}
	mayHave, err := persist(o.settling, t.atTheLatest, func(ctx context.Context) error {
		return o.p.AckOrchestrationItem(trace.ContextWithSpan(ctx, trace.SpanFromContext(traced)), t.LockToken, ack)
	})
	if mayHave && errors.Is(err, pgwake.ErrLockLost) {
		return nil
	}
	return err
}

// failed ends a turn that could not be decided, or not be acknowledged.
func (o *Orchestrator) failed(traced context.Context, t *heldTurn, v verdict) verdict {
	switch v.fate {
	case forsake:
		o.log(t).Warn("dispatch: the lease was lost", "error", text(v.err))
		if t.lasts() { // only here: until the server knows, nobody else gets the instance
			o.giveBack(o.settling, t, v)
		}
		return v
	case bury:
		o.log(t).Error("dispatch: given up", "reason", v.reason, "error", text(v.err))
		ack, err := hooked(func() (pgwake.OrchestrationAck, error) { return o.cfg.Poison(t.OrchestrationItem, v.err) })
		if err == nil {
			err = o.ack(traced, t, ack)
		}
		switch {
		case err == nil, errors.Is(err, pgwake.ErrLockLost):
			return v
		case !outage.Passes(err):
			o.log(t).Error("dispatch: cannot give the instance up: its messages become dead letters", "error", text(err))
			if err = o.bury(t, v.reason, fmt.Sprintf("%s; give the instance up: %s", text(v.err), text(err))); err == nil || errors.Is(err, pgwake.ErrLockLost) {
				return v
			}
		}
		v = verdict{fate: retry, delay: o.cfg.Retry.after(t.Attempt, err), err: fmt.Errorf("give the instance up: %s", text(err))}
	}
	o.giveBack(o.settling, t, v)
	return v
}

// bury makes dead letters of a turn's messages.
func (o *Orchestrator) bury(t *heldTurn, reason, cause string) error {
	call := func(ctx context.Context) error {
		return o.p.DeadLetterOrchestrationItem(ctx, t.LockToken, reason, cause)
	}
	mayHave, err := persist(o.settling, t.atTheLatest, call)
	if errors.Is(err, pgwake.ErrInvalid) { // a smaller Config.MaxPayload than the text has
		cause = ""
		mayHave, err = persist(o.settling, t.atTheLatest, call)
	}
	if mayHave && errors.Is(err, pgwake.ErrLockLost) {
		return nil
	}
	return err
}

func (o *Orchestrator) giveBack(ctx context.Context, t *heldTurn, v verdict) {
	if v.err != nil && !v.free && v.fate != forsake { // the end of the Orchestrator is no failure
		o.log(t).Warn("dispatch: failed", "again_in", v.delay, "error", text(v.err))
	}
	options := &pgwake.AbandonOptions{Delay: v.delay, IgnoreAttempt: v.free, Error: text(v.err)}
	call := func(ctx context.Context) error { return o.p.AbandonOrchestrationItem(ctx, t.LockToken, options) }
	mayHave, err := persist(ctx, t.atTheLatest, call)
	if errors.Is(err, pgwake.ErrInvalid) { // a smaller Config.MaxPayload than the text has
		options.Error = ""
		mayHave, err = persist(ctx, t.atTheLatest, call)
	}
	mayHave = mayHave || v.fate == forsake || t.byDecider.outcome().unsure
	if err != nil && !(mayHave && errors.Is(err, pgwake.ErrLockLost)) {
		o.log(t).Warn("dispatch: left to the end of its lease", "error", err)
	}
}

// renew renews the lease of a turn, after a pause, until ctx ends, or the lease is lost. A turn that ends does not
// cut short the renewal that is on its way: that would cost its connection.
func (o *Orchestrator) renew(ctx context.Context, t *heldTurn, pause time.Duration) {
	length := o.cfg.LockTimeout
	allowance := newAllowance(length)
	for nap(ctx, jittered(pause)); ctx.Err() == nil; nap(ctx, min(jittered(pause), time.Until(t.end()))) {
		sent := time.Now()
		bounded, cancel := context.WithDeadline(o.settling, minTime(sent.Add(allowance.now), t.end()))
		_, err := o.p.RenewOrchestrationItemLock(bounded, t.LockToken, length)
		cancel()
		allowance.after(time.Since(sent), err == nil)
		t.renewed(sent, length, err)
		pause = length/looks - time.Since(sent)
		switch {
		case err == nil:
			pause = length / renewals
		case errors.Is(err, pgwake.ErrLockLost), !time.Now().Before(t.end()):
			t.loseIt()
			return
		case ctx.Err() == nil:
			o.log(t).Warn("dispatch: cannot renew a lease", "error", err)
		}
	}
}
