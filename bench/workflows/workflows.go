// Package workflows puts go-workflows through the same work on two of its backends: that on pgwake, and its own for PostgreSQL, which polls. It is apart from
// package measure so that the demo, which needs that one, needs no runtime.
package workflows

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/registry"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake/bench/measure"
)

// This file answers: how soon do workflows get from one step to the next, how many are done in a second, and what does a worker ask while there is
// nothing to do?

// Options are the sizes of Measure.
type Options struct {
	Activities int // of a workflow, one after the other. Defaults to 20.
	Runs       int // of such workflows, one after the other. Defaults to 20.
	SlowRuns   int // of those, on the backend that polls. Defaults to 2.

	Backlog     int   // workflows of one activity that are created at once. Defaults to 500.
	SlowBacklog int   // on the backend that polls. Defaults to 500.
	Workers     []int // how many there are for these. Defaults to 1 and 4.

	Idle     time.Duration // a worker is watched for so long. Defaults to 2 minutes.
	SlowIdle time.Duration // the one that polls. Defaults to 10 s.

	Progress func(measure.Progress)
}

func (o *Options) setDefaults() {
	setDefault(&o.Activities, 20)
	setDefault(&o.Runs, 20)
	setDefault(&o.SlowRuns, 2)
	setDefault(&o.Backlog, 500)
	setDefault(&o.SlowBacklog, 500)
	setDefault(&o.Idle, 2*time.Minute)
	setDefault(&o.SlowIdle, 10*time.Second)
	if o.Workers == nil {
		o.Workers = []int{1, 4}
	}
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Result is what Measure found.
type Result struct {
	Activities int      `json:"activities"`
	Ours       *Subject `json:"ours"`
	Theirs     *Subject `json:"theirs"`
}

// Subject is what was found on one backend.
type Subject struct {
	Runs  int             `json:"runs"`  // one after the other
	Took  time.Duration   `json:"took"`  // from the first one's creation to the last one's end
	Hops  measure.Samples `json:"hops"`  // from when an activity returns to when its workflow goes on, and from then to when the next activity begins
	Rates []Rate          `json:"rates"` // of a backlog

	IdleFor time.Duration `json:"idle_for"`
	Idle    int64         `json:"idle"` // statements meanwhile
}

// Rate is how fast a backlog was done.
type Rate struct {
	Workers   int           `json:"workers"`
	Workflows int           `json:"workflows"`
	Took      time.Duration `json:"took"`
}

// PerSecond is the rate.
func (r Rate) PerSecond() float64 { return float64(r.Workflows) / max(r.Took.Seconds(), 1e-9) }

// Sequential is the rate of workflows one after the other.
func (s *Subject) Sequential() float64 { return float64(s.Runs) / max(s.Took.Seconds(), 1e-9) }

// PerMinute is the rate of statements of an idle worker.
func (s *Subject) PerMinute() float64 { return float64(s.Idle) / max(s.IdleFor.Minutes(), 1e-9) }

// process is one of a deployment, as far as the database can tell.
type process interface {
	backend() backend.Backend
	options() *worker.Options // of a worker, such as the documentation has them
	close() error
}

// Measure runs one backend after the other, each in a database of its own, which it drops.
func Measure(ctx context.Context, url string, o Options) (*Result, error) {
	o.setDefaults()
	r := &Result{Activities: o.Activities}
	var err error
	if r.Ours, err = measureOne(ctx, url, ours, o, o.Runs, o.Backlog, o.Idle); err != nil {
		return nil, fmt.Errorf("workflows on pgwake: %w", err)
	}
	if r.Theirs, err = measureOne(ctx, url, theirs, o, o.SlowRuns, o.SlowBacklog, o.SlowIdle); err != nil {
		return nil, fmt.Errorf("workflows on the runtime's own backend: %w", err)
	}
	return r, nil
}

func measureOne(ctx context.Context, url string, open func(context.Context, string) (process, error), o Options, runs, backlog int, idle time.Duration) (s *Subject, err error) {
	c, err := measure.NewCounter(ctx, url)
	if err != nil {
		return nil, err
	}
	defer c.Close(&err)
	d := &deployment{url: c.URL, open: open, steps: &steps{}}
	defer d.close(&err)
	if err := d.workers(ctx, 1); err != nil {
		return nil, err
	}
	s = &Subject{Runs: runs}
	// Before anything else: where there was work, somebody looks once more when the leases of it would have ended.
	if s.Idle, s.IdleFor, err = c.Idle(ctx, idle); err != nil {
		return nil, err
	}
	if _, err := d.run(ctx, "chain", 1, o.Activities); err != nil { // connections are made, statements prepared
		return nil, err
	}
	for n := range runs {
		d.steps.forget()
		took, err := d.run(ctx, "chain", 1, o.Activities)
		if err != nil {
			return nil, err
		}
		s.Took += took
		s.Hops = append(s.Hops, d.steps.hops()...)
		if o.Progress != nil {
			o.Progress(measure.Progress{Done: n + 1, Total: runs, Figures: s.Hops.Summary()})
		}
	}
	for _, workers := range o.Workers {
		if err := d.workers(ctx, workers); err != nil {
			return nil, err
		}
		took, err := d.run(ctx, "chain", backlog, 1)
		if err != nil {
			return nil, err
		}
		s.Rates = append(s.Rates, Rate{workers, backlog, took})
	}
	return s, nil
}

// deployment are processes with a worker each.
type deployment struct {
	url   string
	open  func(context.Context, string) (process, error)
	steps *steps

	processes []process
	stops     []func() error
}

// workers adds to those that there are.
func (d *deployment) workers(ctx context.Context, n int) error {
	for len(d.processes) < n {
		p, err := d.open(ctx, d.url)
		if err != nil {
			return err
		}
		d.processes = append(d.processes, p)
		w := worker.New(p.backend(), p.options())
		if err := w.RegisterWorkflow(d.steps.chain, registry.WithName("chain")); err != nil {
			return err
		}
		if err := w.RegisterActivity(d.steps.nothing, registry.WithName("nothing")); err != nil {
			return err
		}
		working, stop := context.WithCancel(context.WithoutCancel(ctx))
		if err := w.Start(working); err != nil {
			stop()
			return err
		}
		d.stops = append(d.stops, func() error { stop(); return w.WaitForCompletion() })
	}
	return nil
}

func (d *deployment) close(err *error) {
	for _, stop := range d.stops {
		keep(err, stop())
	}
	for _, p := range d.processes {
		keep(err, p.close())
	}
}

func keep(err *error, other error) {
	if *err == nil {
		*err = other
	}
}

// look is how often it is looked whether a workflow has ended.
const look = 2 * time.Millisecond

// run has so many workflows done, which are created at once, and returns how long that took.
func (d *deployment) run(ctx context.Context, name string, count, activities int) (time.Duration, error) {
	b := d.processes[0].backend()
	c := client.New(b)
	began := time.Now()
	instances := make([]*workflow.Instance, count)
	for i := range instances {
		var err error
		if instances[i], err = c.CreateWorkflowInstance(ctx, client.WorkflowInstanceOptions{InstanceID: rand.Text()}, name, activities); err != nil {
			return 0, err
		}
	}
	for _, instance := range instances {
		for {
			state, err := b.GetWorkflowInstanceState(ctx, instance)
			if err != nil {
				return 0, err
			}
			if state == core.WorkflowInstanceStateFinished {
				break
			}
			time.Sleep(look)
		}
	}
	return time.Since(began), nil
}

// steps is the code of the workflows, and when it was where.
type steps struct {
	mu       sync.Mutex
	instants []time.Time
}

func (s *steps) now() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instants = append(s.instants, time.Now())
}

func (s *steps) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instants = nil
}

// hops are the times between instants.
func (s *steps) hops() (hops measure.Samples) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := 1; i < len(s.instants); i++ {
		hops = append(hops, s.instants[i].Sub(s.instants[i-1]))
	}
	return hops
}

// chain calls activities, one after the other.
func (s *steps) chain(ctx workflow.Context, activities int) error {
	for range activities {
		if _, err := workflow.ExecuteActivity[any](ctx, workflow.DefaultActivityOptions, "nothing").Get(ctx); err != nil {
			return err
		}
		if !workflow.Replaying(ctx) {
			s.now()
		}
	}
	return nil
}

func (s *steps) nothing(context.Context) error {
	s.now()
	return nil
}

// silent is the log of the backends.
var silent = slog.New(slog.DiscardHandler)
