package dispatch

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

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

	mu          sync.Mutex
	least, most int         // set by Scale; 0: as the group has it
	dispatcher  *Dispatcher // at work; nil: there is no work
	err         error       // why it cannot be served at this moment
}

func newCoordinator(c *Coordinators, at place) *coordinator {
	return &coordinator{c: c, at: at, source: c.sources[at.source], group: c.groups.of(at.namespace), since: time.Now(), ended: make(chan struct{})}
}

func (p place) compare(q place) int {
	return cmp.Or(strings.Compare(p.namespace, q.namespace), cmp.Compare(p.source, q.source))
}

// run serves the namespace until ctx ends or the Source is closed.
func (k *coordinator) run(ctx context.Context) {
	defer close(k.ended)
	var turns sync.WaitGroup
	if k.group.Decider != nil {
		shift := &turnShift{coordinator: k}
		if k.group.proto == nil {
			k.keep(ctx, shift.serve)
			return
		}
		turns.Go(func() { k.keep(ctx, shift.serve) })
	}
	shift := &workShift{coordinator: k}
	k.keep(ctx, shift.serve)
	turns.Wait()
}

// keep has shifts follow each other. Each returns errIdle when it has retired, nil when ctx has ended or the Source is closed, or else
// why the namespace cannot be served.
func (k *coordinator) keep(ctx context.Context, serve func(context.Context) error) {
	for pause := firstPause; ; {
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
		k.failed(err)
		k.c.log.Error("dispatch: cannot serve a namespace", "namespace", k.at.namespace, "error", err, "again_in", pause)
		nap(ctx, jittered(pause))
		pause = min(2*pause, longestPause)
	}
}

func (k *coordinator) failed(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = err
}

// answered takes note of a fetch that brought nothing, but shows that the namespace can be served.
func (k *coordinator) answered(err error) {
	if errors.Is(err, pgwake.ErrNoWork) {
		k.failed(nil)
	}
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
	d, err := s.group.take()
	if err != nil {
		return errors.Join(err, s.giveBack(first))
	}
	d.assign(s.source, s.at.namespace)
	s.begin(d)
	defer s.over()
	return d.run(ctx, first, s.group.idle())
}

// assign has a Dispatcher serve one namespace. It is called before run.
func (d *Dispatcher) assign(p Provider, namespace string) {
	d.p, d.cfg.Namespaces = p, []string{namespace}
}

// wait waits for the first items. None: ctx has ended, the Source is closed, or it fails for a reason that stays.
func (s *workShift) wait(ctx context.Context) (claimed, error) {
	if s.options == nil {
		s.options = s.group.proto.fetchOptions()
		s.options.Namespaces = []string{s.at.namespace}
	}
	patience := s.c.patience()
	for {
		n := s.firstAsk()
		items, err := s.source.FetchWorkItems(ctx, n, s.options)
		if len(items) > 0 {
			return claimed{items, n}, nil
		}
		s.answered(err)
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
	s.dispatcher, s.err = d, nil
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
		return nil
	}
	d := k.dispatcher
	if d == nil {
		d = New(nobody, nil) // to be told what is wrong
	}
	if err := d.SetConcurrency(least, most); err != nil {
		return err
	}
	k.least, k.most = least, most
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
	s.begin()
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
	patience := s.c.patience()
	for {
		turn, err := p.FetchOrchestrationItem(ctx, s.options)
		if err == nil {
			return turn, nil
		}
		s.answered(err)
		if goOn, err := patience.after(ctx, err); !goOn {
			return nil, err
		}
	}
}

func (s *turnShift) begin() {
	s.c.shifts.Add(1)
	s.failed(nil)
}
