package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how is one namespace served, while it has work and while it has none?
//
// While it has none, a goroutine waits in a fetch, as a parked dispatcher does: no query, no connection, no more than its stack. What it
// is woken for it claims itself, and hands to a Dispatcher that begins with it: so nothing has to be found twice. When that had
// nothing to do for a while it ends, and the goroutine waits again. It is the same for turns and an Orchestrator.
//
// Invariant: while a coordinator runs, somebody waits for the namespace, or is at work on it, or makes a pause after an error of the
// database; what a fetch brought is in the hands of one who settles it.

// longestPause is that between attempts to serve a namespace for which the last ones failed for a reason that stays.
const longestPause = time.Minute

type coordinator struct {
	c      *Coordinators
	at     place
	source Source
	group  *group
	since  time.Time
	end    context.CancelFunc
	ended  chan struct{}

	workServed, turnsServed atomic.Bool // a fetch of such has been answered

	retired bool // by Retire; under the mutex of the Coordinators

	mu          sync.Mutex
	least, most int         // set by Scale; 0: as the group has it
	dispatcher  *Dispatcher // at work; nil: there is no work
	deciding    bool        // an Orchestrator is at work

	// Each says for itself that it can do its part again: what goes well in one is no sign that the others do.
	work, turns, handlers failing
}

// failing is why something cannot be done at this moment.
type failing struct {
	err   error // nil: it can
	times int   // in a row
}

func (f *failing) note(err error) {
	if f.err = err; err == nil {
		f.times = 0
		return
	}
	f.times++
}

func newCoordinator(c *Coordinators, at place) *coordinator {
	return &coordinator{c: c, at: at, source: c.sources[at.source], group: c.groups.of(at.namespace), since: time.Now(), ended: make(chan struct{})}
}

func (p place) compare(q place) int {
	return cmp.Or(strings.Compare(p.namespace, q.namespace), cmp.Compare(p.source, q.source))
}

// run serves the namespace until ctx ends or the Source is closed.
func (k *coordinator) run(ctx context.Context) {
	if k.group.proto == nil {
		k.serveTurns(ctx)
		return
	}
	var turns sync.WaitGroup
	if k.group.Decider != nil {
		turns.Go(func() { k.serveTurns(ctx) })
	}
	shift := &workShift{coordinator: k}
	k.keep(ctx, shift.serve)
	turns.Wait()
}

func (k *coordinator) serveTurns(ctx context.Context) {
	shift := &turnShift{coordinator: k}
	k.keep(ctx, shift.serve)
	if err := shift.giveBack(); err != nil {
		k.c.log.Warn("dispatch: left to the end of its lease", "namespace", k.at.namespace, "error", err)
	}
}

// keep has shifts follow each other. Each returns errIdle when it has retired, nil when ctx has ended or the Source is closed, or else
// why the namespace cannot be served. Pauses grow with failures that follow each other.
func (k *coordinator) keep(ctx context.Context, serve func(context.Context) error) {
	for pause := firstPause; ; {
		began := time.Now()
		err := serve(ctx)
		switch {
		case err == nil:
			return
		case errors.Is(err, errIdle):
			pause = firstPause
			continue
		case ctx.Err() != nil:
			k.c.failed(err)
			return
		}
		if time.Since(began) >= longestPause { // it went well meanwhile, and this is another failure
			pause = firstPause
		}
		k.c.log.Error("dispatch: cannot serve a namespace", "namespace", k.at.namespace, "error", err, "again_in", pause)
		nap(ctx, jittered(pause))
		pause = min(2*pause, longestPause)
	}
}

// note takes note of how one part of the service does.
func (k *coordinator) note(of *failing, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of.note(err)
}

// fetched takes note of what came of a fetch, be it of those who wait or of those at work.
func (k *coordinator) fetched(ctx context.Context, of *failing, err error) {
	switch {
	case err == nil, errors.Is(err, pgwake.ErrNoWork):
		k.note(of, nil)
	case ctx.Err() != nil, errors.Is(err, pgwake.ErrClosed):
	default:
		k.note(of, err)
	}
}

// pollTimeout is how long to wait for work; 0: as long as the Source likes. After a failure it is short, so that it is known soon
// that there is none any more.
func (k *coordinator) pollTimeout(of *failing) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if of.err != nil {
		return lastPause
	}
	return 0
}

// failed takes note of what is to be said at the end of Run.
func (c *Coordinators) failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = append(c.failures, err)
}

// workShift is a Dispatcher, from when there is work until there is none.
type workShift struct {
	*coordinator
	ran     bool
	options *pgwake.FetchOptions // of those that wait
}

func (s *workShift) serve(ctx context.Context) error {
	var first claimed
	if s.ran || !s.group.Eager {
		var err error
		if first, err = s.wait(ctx); first.items == nil {
			return err
		}
	}
	s.ran = true
	d, first, err := s.ready(first)
	if err != nil {
		s.note(&s.handlers, err)
		return errors.Join(err, s.giveBack(first))
	}
	d.assign(s.source, s.c.beginOf(s.at.source, s.group), s.at.namespace, func(ctx context.Context, err error) { s.fetched(ctx, &s.work, err) })
	s.begin(d)
	defer s.over()
	return d.run(ctx, first, s.group.idle())
}

// ready returns a Dispatcher, and what is left for it of what was claimed. Nobody renews leases while Handlers registers. So when half of
// one is over, all is given back, as if it had never been claimed: the Dispatcher begins with nothing, and no attempt is lost.
func (s *workShift) ready(first claimed) (d *Dispatcher, left claimed, err error) {
	if len(first.items) == 0 {
		d, err = s.group.take()
		return d, first, err
	}
	gaveBack := make(chan struct{})
	end := s.source.LocalTime(first.items[0].LockedUntil) // of all of them: they came by one fetch
	late := time.AfterFunc(time.Until(end)/2, func() {
		defer close(gaveBack)
		if err := s.giveBack(first); err != nil {
			s.c.log.Warn("dispatch: left to the end of its lease", "namespace", s.at.namespace, "error", err)
		}
	})
	if d, err = s.group.take(); late.Stop() {
		return d, first, err
	}
	<-gaveBack
	return d, claimed{}, err
}

// assign has a Dispatcher serve one namespace of several, and tell what came of each fetch. It is called before run.
//
// Invariant: begin is for the database of p, or nil. So what HandleTx does and the ack of the item are in one database.
func (d *Dispatcher) assign(p Provider, begin func(context.Context) (pgx.Tx, error), namespace string, fetched func(context.Context, error)) {
	d.p, d.cfg.Begin, d.cfg.Namespaces, d.fetched, d.shared = p, begin, []string{namespace}, fetched, true
}

// wait waits for the first items. None: ctx has ended, the Source is closed, or it fails for a reason that stays.
func (s *workShift) wait(ctx context.Context) (claimed, error) {
	if s.options == nil {
		s.options = s.group.proto.fetchOptions()
		s.options.Namespaces = []string{s.at.namespace}
	}
	patience := s.c.patience(&s.workServed)
	for {
		n := s.firstAsk()
		s.options.PollTimeout = s.pollTimeout(&s.work)
		items, err := s.source.FetchWorkItems(ctx, n, s.options)
		patience.heard(err)
		s.fetched(ctx, &s.work, err)
		if len(items) > 0 {
			return claimed{items, n}, nil
		}
		if goOn, err := patience.after(ctx, err); !goOn {
			return claimed{}, err
		}
	}
}

// firstAsk is how many items a Dispatcher can begin at once.
func (s *workShift) firstAsk() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(cmp.Or(s.least, s.group.proto.cfg.MinConcurrency)*s.group.proto.largest, pgwake.MaxFetch)
}

// giveBack gives back items for which there is no Dispatcher.
func (s *workShift) giveBack(first claimed) (err error) {
	bounded, cancel := context.WithTimeout(context.Background(), settlePatience)
	defer cancel()
	for _, item := range first.items {
		err = errors.Join(err, s.source.AbandonWorkItem(bounded, item.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true, DueAt: item.DueAt}))
	}
	return err
}

func (s *workShift) begin(d *Dispatcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dispatcher = d
	s.handlers.note(nil)
	s.c.shifts.Add(1)
	if s.most > 0 {
		d.work.resize(s.least, s.most)
	}
}

func (s *workShift) over() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dispatcher = nil
}

// scale sets the number of handlers, of the Dispatcher that is at work and of those to come.
func (k *coordinator) scale(least, most int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.group.proto == nil {
		return fmt.Errorf("%w: its Group has no Handlers", pgwake.ErrConfig)
	}
	least, most, err := resolveConcurrency(least, most)
	if err != nil {
		return err
	}
	if k.least, k.most = least, most; k.dispatcher != nil {
		k.dispatcher.work.resize(least, most)
	}
	return nil
}

// turnShift is an Orchestrator, from when there is a turn until there is none.
type turnShift struct {
	*coordinator
	ran     bool
	options *pgwake.FetchOptions        // of those that wait
	left    []*pgwake.OrchestrationItem // came when the last was about to retire
}

func (s *turnShift) serve(ctx context.Context) error {
	p := s.source.(TurnProvider)
	first := s.left
	if first == nil && (s.ran || !s.group.Eager) {
		turn, err := s.wait(ctx, p)
		if turn == nil {
			return err
		}
		first = append(first, turn)
	}
	s.ran = true
	cfg := s.group.Turns
	cfg.Namespaces = []string{s.at.namespace}
	o := NewOrchestrator(p, s.group.Decider, &cfg)
	o.fetched, o.shared = func(ctx context.Context, err error) { s.fetched(ctx, &s.turns, err) }, true
	s.begin()
	defer s.over()
	err := o.run(ctx, first, s.group.idle())
	s.left = o.left
	return err
}

// wait waits for the first turn. None: as for work.
func (s *turnShift) wait(ctx context.Context, p TurnProvider) (*pgwake.OrchestrationItem, error) {
	if s.options == nil {
		s.options = s.group.protoTurns.fetchOptions()
		s.options.Namespaces = []string{s.at.namespace}
	}
	patience := s.c.patience(&s.turnsServed)
	for {
		s.options.PollTimeout = s.pollTimeout(&s.turns)
		turn, err := p.FetchOrchestrationItem(ctx, s.options)
		patience.heard(err)
		s.fetched(ctx, &s.turns, err)
		if err == nil {
			return turn, nil
		}
		if goOn, err := patience.after(ctx, err); !goOn {
			return nil, err
		}
	}
}

func (s *turnShift) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deciding = true
	s.c.shifts.Add(1)
}

func (s *turnShift) over() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deciding = false
}

// giveBack gives back turns that came when all was about to end.
func (s *turnShift) giveBack() (err error) {
	bounded, cancel := context.WithTimeout(context.Background(), settlePatience)
	defer cancel()
	for _, turn := range s.left {
		err = errors.Join(err, s.source.(TurnProvider).AbandonOrchestrationItem(bounded, turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
	}
	return err
}
