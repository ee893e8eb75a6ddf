package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"golang.org/x/sync/errgroup"
)

// This file answers: how soon, and how fast, is the work of namespaces done that have a coordinator each, beside loops that poll?

// NamespacesOptions are the sizes of Namespaces.
type NamespacesOptions struct {
	Namespaces int           // that items come to one at a time. Defaults to 8.
	Items      int           // Defaults to 500.
	Gap        time.Duration // mean time from one enqueue's return to the next. Defaults to 20 ms.
	Created    int           // namespaces that begin with their first item. Defaults to 200.

	// Stretch is for how long statements are counted at the least for which time alone was the reason. A node makes one in a minute, so
	// less than that compares loops with nothing. Defaults to 70 s.
	Stretch time.Duration

	Interval time.Duration // from one poll of the baseline's loop to the next. Defaults to 1 s.
	Batch    int           // items that a poll takes at most. Defaults to 100.

	Tasks    int           // that are under way in one namespace. Defaults to 10.
	Steps    int           // of a task, each of which enqueues the next. Defaults to 3.
	Duration time.Duration // of the steps, with coordinators. Defaults to 3 s.
	Polls    int           // after which those of the loop end. Defaults to 6.
	Flood    int           // items of one namespace that were there before. Defaults to 20,000.

	Restarts NamespaceRestartsOptions
	Scale    NamespaceScaleOptions
	Many     ManyNamespacesOptions

	Progress func(Progress)
}

// NamespacesResult is what Namespaces found.
type NamespacesResult struct {
	Namespaces int           `json:"namespaces"`
	Interval   time.Duration `json:"interval"`
	Batch      int           `json:"batch"`
	Tasks      int           `json:"tasks"`
	Steps      int           `json:"steps"`

	Served  *NamespaceSingles `json:"served"`  // by Dispatchers that wait
	Retired *NamespaceSingles `json:"retired"` // by Dispatchers that begin for the item, as the last had ended
	Polled  *NamespaceSingles `json:"polled"`  // by loops
	Created *Latency          `json:"created"` // of namespaces' first items, which create them

	Chain       *NamespaceRate `json:"chain"`
	PolledChain *NamespaceRate `json:"polled_chain"`
	Flood       *NamespaceRate `json:"flood"`
	PolledFlood *NamespaceRate `json:"polled_flood"` // by a loop that polls again at once while it finds something

	Restarts *NamespaceRestarts `json:"restarts"`
	Scale    *NamespaceScale    `json:"scale"`
	Many     *ManyNamespaces    `json:"many"`
}

// NamespaceSingles is what became of items that came one at a time.
type NamespaceSingles struct {
	Latency           // to the handler
	Again   int       `json:"again"` // handlers beyond the first
	Looks   int64     `json:"looks"` // queries for work until all items were handled
	Net     SafetyNet `json:"safety_net"`

	// ByClock counts statements for which nothing was the reason but that time had passed, the periodic one of a node included, for as
	// long as Took, most of which nobody had anything to do.
	ByClock int64         `json:"by_clock"`
	Took    time.Duration `json:"took"`
}

// ByClockPerSecond is their rate.
func (r *NamespaceSingles) ByClockPerSecond() float64 {
	return float64(r.ByClock) / max(r.Took.Seconds(), 1e-9)
}

// NamespaceRate is how many items one coordinator did.
type NamespaceRate struct {
	Items int           `json:"items"`
	Took  time.Duration `json:"took"`
}

// PerSecond is the throughput.
func (r *NamespaceRate) PerSecond() float64 { return float64(r.Items) / max(r.Took.Seconds(), 1e-9) }

// Namespaces measures them one after the other.
func Namespaces(ctx context.Context, url string, o NamespacesOptions) (r *NamespacesResult, err error) {
	orDefault(&o.Namespaces, 8)
	orDefault(&o.Items, 500)
	orDefault(&o.Gap, 20*time.Millisecond)
	orDefault(&o.Created, 200)
	orDefault(&o.Stretch, 70*time.Second)
	orDefault(&o.Interval, time.Second)
	orDefault(&o.Batch, 100)
	orDefault(&o.Tasks, 10)
	orDefault(&o.Steps, 3)
	orDefault(&o.Duration, 3*time.Second)
	orDefault(&o.Polls, 6)
	orDefault(&o.Flood, 20_000)
	defer func(ctx context.Context) { err = about(ctx, "namespaces", err) }(ctx)
	r = &NamespacesResult{Namespaces: o.Namespaces, Interval: o.Interval, Batch: o.Batch, Tasks: o.Tasks, Steps: o.Steps}
	for _, part := range []func(context.Context, string, *NamespacesResult) error{
		o.coordinated, o.created, o.polled, o.restart, o.scale, o.many,
	} {
		if err := part(ctx, url, r); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// coordinated measures what coordinators do.
func (o *NamespacesOptions) coordinated(ctx context.Context, url string, r *NamespacesResult) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	for _, of := range []struct {
		to     **NamespaceSingles
		prefix string
		retire time.Duration
	}{{&r.Served, "served-", dispatch.Never}, {&r.Retired, "retired-", time.Millisecond}} {
		if *of.to, err = o.singles(ctx, s, of.prefix, warmUps, func(s *service, names []string, handle itemHandler) (func() (int64, int64), error) {
			coordinate(s, dispatch.Group{Namespaces: names, RetireAfter: of.retire}, handle)
			return looks(s.node), s.parked(len(names))
		}); err != nil {
			return err
		}
	}
	serve := func(s *service, name string, handle itemHandler) {
		coordinate(s, dispatch.Group{Namespaces: []string{name}}, handle)
	}
	if r.Chain, err = o.chain(ctx, s, o.Duration, 0, serve); err != nil {
		return err
	}
	r.Flood, err = o.flood(ctx, s, serve)
	return err
}

// polled is the baseline. The loops do nothing most of the time, so those for single items and those for tasks run at the same time.
func (o *NamespacesOptions) polled(ctx context.Context, url string, r *NamespacesResult) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	loop := func() *pollLoop { return &pollLoop{interval: o.Interval, batch: o.Batch} }
	group, both := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		r.Polled, err = o.singles(both, s, "polled-", 0, func(s *service, names []string, handle itemHandler) (func() (int64, int64), error) {
			l := loop()
			for _, name := range names {
				l.serve(s, name, handle)
			}
			return func() (int64, int64) { return l.polls.Load(), l.polls.Load() }, nil
		})
		return err
	})
	group.Go(func() (err error) {
		silent := *o
		silent.Progress = nil // the other tells
		r.PolledChain, err = silent.chain(both, s, 0, o.Polls*o.Tasks, func(s *service, name string, handle itemHandler) {
			loop().serve(s, name, handle)
		})
		return err
	})
	if err := group.Wait(); err != nil {
		return err
	}
	r.PolledFlood, err = o.flood(ctx, s, func(s *service, name string, handle itemHandler) {
		l := loop()
		l.eager = true
		l.serve(s, name, handle)
	})
	return err
}

// itemHandler does an item.
type itemHandler func(context.Context, *pgwake.ClaimedWorkItem) error

// service is whatever serves namespaces of a node, until it is to end or fails.
type service struct {
	*node
	group *errgroup.Group
	ctx   context.Context
	stop  context.CancelFunc
}

func (n *node) service() *service {
	s := &service{node: n}
	s.ctx, s.stop = context.WithCancel(n.ctx)
	s.group, s.ctx = errgroup.WithContext(s.ctx)
	return s
}

// end returns when all that was handled is acknowledged, for defer.
func (s *service) end(err *error) {
	s.stop()
	*err = errors.Join(*err, s.group.Wait())
}

// coordinate has namespaces of a node served as g says, all of them if it names none.
func coordinate(s *service, g dispatch.Group, handle itemHandler) *dispatch.Coordinators {
	c := newCoordinators(s.Provider, g, handle)
	s.group.Go(func() error { return c.Run(s.ctx) })
	return c
}

func newCoordinators(source dispatch.Source, g dispatch.Group, handle itemHandler) *dispatch.Coordinators {
	served := g.Namespaces
	g.Namespaces = []string{"*"}
	g.Handlers = func(d *dispatch.Dispatcher) {
		d.HandleOthers(func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			return nil, handle(ctx, item)
		})
	}
	return dispatch.NewCoordinators(source, &dispatch.CoordinatorsConfig{Namespaces: served, Groups: []dispatch.Group{g}})
}

// looks reads how many queries for work a node has made, and how many statements by the clock.
func looks(n *node) func() (all, byClock int64) {
	return func() (all, byClock int64) {
		s := n.Stats()
		return s.Worker.Looks, byTheClock(&s)
	}
}

// byTheClock is what compares with the polls of a loop: the periodic statement, polls, and the queries to which these led.
func byTheClock(s *pgwake.Stats) int64 {
	n := s.Fallbacks
	for _, queue := range []*pgwake.QueueStats{&s.Worker, &s.Orchestrator} {
		n += queue.Polls + queue.Tokens["fallback"] + queue.Tokens["scout"]
	}
	return n
}

// register adds namespaces, so that they are there before their first item, and returns their names.
func register(ctx context.Context, n *node, prefix string, count int) (names []string, err error) {
	for i := range count {
		name := fmt.Sprintf("%s%d", prefix, i)
		if err := n.RegisterNamespace(ctx, name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// singles has items come to namespaces, one at a time at random instants.
func (o *NamespacesOptions) singles(ctx context.Context, s stage, prefix string, warm int,
	serve func(*service, []string, itemHandler) (looks func() (int64, int64), err error),
) (r *NamespaceSingles, err error) {
	n, err := s.open(ctx, 2*o.Namespaces)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	other, err := s.open(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer other.close(&err)
	names, err := register(ctx, n, prefix, o.Namespaces)
	if err != nil {
		return nil, err
	}
	l := newLedger(warm + o.Items)
	serving := n.service()
	defer serving.end(&err)
	ctx = serving.ctx
	looks, err := serve(serving, names, func(_ context.Context, item *pgwake.ClaimedWorkItem) error { return l.take(item, time.Now()) })
	if err != nil {
		return nil, err
	}
	p := producerIn(other, l, names)
	if warm > 0 {
		if err := p.warmUp(ctx, l, ignore); err != nil {
			return nil, err
		}
	}
	r = &NamespaceSingles{}
	before, byClock := looks()
	began := time.Now()
	m := newMeter(o.Progress)
	see := func(i int) {
		r.add(l.line(i))
		if m.due() {
			m.report(Progress{Done: len(r.FromCommit), Total: o.Items, Figures: r.FromCommit.Summary()})
		}
	}
	for i := warm; i < warm+o.Items; i++ {
		if err := pause(ctx, Uniform.draw(o.Gap)); err != nil {
			return nil, err
		}
		if err := p.now(ctx, l, i); err != nil {
			return nil, err
		}
		if err := l.wait(ctx, len(l.arrived), see); err != nil {
			return nil, err
		}
	}
	if err := l.wait(ctx, o.Items-len(r.FromCommit), see); err != nil {
		return nil, err
	}
	m.report(Progress{Done: o.Items, Total: o.Items, Figures: r.FromCommit.Summary()})
	after, _ := looks()
	if err := pause(ctx, o.Stretch-time.Since(began)); err != nil {
		return nil, err
	}
	r.Net, err = safetyNet(ctx, n.Provider)
	_, byClockAfter := looks()
	r.Took = time.Since(began)
	r.Looks, r.ByClock, r.Again = after-before, byClockAfter-byClock, l.redelivered()
	return r, err
}

// producerIn enqueues each item to one of these namespaces, at random.
func producerIn(by *node, l *ledger, names []string) *producer {
	return &producer{
		enqueue: func(ctx context.Context, i int, at time.Time) error {
			_, err := by.EnqueueForWorker(ctx, l.item(i), &pgwake.EnqueueOptions{Namespace: names[rand.IntN(len(names))], At: at})
			return err
		},
		close: func(*error) {},
	}
}

// chain has tasks of one namespace go from step to step, for so long or for so many steps. A task that is done begins again.
func (o *NamespacesOptions) chain(ctx context.Context, s stage, duration time.Duration, steps int, serve func(*service, string, itemHandler)) (r *NamespaceRate, err error) {
	const name = "chain"
	n, err := s.open(ctx, 2*o.Tasks)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := n.RegisterNamespace(ctx, name); err != nil {
		return nil, err
	}
	t := newPace(o.Tasks, duration, steps)
	next := func(ctx context.Context) error {
		_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "measure"}, &pgwake.EnqueueOptions{Namespace: name})
		return err
	}
	serving := n.service()
	defer serving.end(&err)
	ctx = serving.ctx
	serve(serving, name, func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error {
		if !t.step() {
			return nil
		}
		return next(ctx)
	})
	for range o.Tasks {
		if err := next(ctx); err != nil {
			return nil, err
		}
	}
	if err := watch(ctx, newMeter(o.Progress), t.progress, t.over, ignored); err != nil {
		return nil, err
	}
	return t.rate(), nil
}

func ignored(struct{}) {}

// pace counts what is done. The first items only start the clock: so it is the same for those that come in a row and for those that
// come all at once.
type pace struct {
	first    int // items that do not count
	duration time.Duration
	most     int // with those; 0: as many as there are time for

	mu          sync.Mutex
	done        int
	began, last time.Time
	over        chan struct{}
	isOver      bool
}

func newPace(first int, duration time.Duration, most int) *pace {
	return &pace{first: first, duration: duration, most: most, over: make(chan struct{})}
}

// step counts an item, and reports whether there are to be more.
func (p *pace) step() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isOver {
		return false
	}
	p.done++
	p.last = time.Now()
	if p.began.IsZero() {
		p.began = p.last
	}
	if p.done == p.most || p.most == 0 && p.last.Sub(p.began) >= p.duration {
		p.isOver = true
		close(p.over)
	}
	return !p.isOver
}

func (p *pace) progress() Progress {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Progress{Done: p.done, Total: p.most}
}

func (p *pace) rate() *NamespaceRate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &NamespaceRate{Items: max(p.done-p.first, 0), Took: p.last.Sub(p.began)}
}

//go:embed namespaces_fill.sql
var namespacesFillSQL string

// fillNamespaces adds so many items to each of the namespaces by one statement, of which nobody is told.
func (s stage) fillNamespaces(ctx context.Context, names []string, each int) error {
	return withConn(ctx, s.url, func(conn *pgx.Conn) error {
		if err := searchPath(ctx, conn, s.schema); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "SET pgwake.notify = off"); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, namespacesFillSQL, names, each)
		return err
	})
}

// flood has one namespace's backlog done.
func (o *NamespacesOptions) flood(ctx context.Context, s stage, serve func(*service, string, itemHandler)) (r *NamespaceRate, err error) {
	const name = "flood"
	n, err := s.open(ctx, 8)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	if err := n.RegisterNamespace(ctx, name); err != nil {
		return nil, err
	}
	if err := s.fillNamespaces(ctx, []string{name}, o.Flood); err != nil {
		return nil, err
	}
	if err := s.calm(ctx); err != nil {
		return nil, err
	}
	t := newPace(0, 0, o.Flood)
	serving := n.service()
	defer serving.end(&err)
	ctx = serving.ctx
	serve(serving, name, func(context.Context, *pgwake.ClaimedWorkItem) error {
		t.step()
		return nil
	})
	if err := watch(ctx, newMeter(o.Progress), t.progress, t.over, ignored); err != nil {
		return nil, err
	}
	return t.rate(), nil
}
