package measure

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/taskgraph"
	"golang.org/x/sync/errgroup"
)

// This file answers: how soon, and how fast, are tasks done that are made of steps, beside coordinators that poll?

// TasksOptions are the sizes of Tasks.
type TasksOptions struct {
	Namespaces int           // that tasks come to one at a time, with a coordinator each. Defaults to 50.
	Singles    int           // tasks of those. Defaults to 200.
	Gap        time.Duration // mean time from the end of one to the next. Defaults to 20 ms.
	Stretch    time.Duration // as of NamespacesOptions. Defaults to 70 s.

	Interval time.Duration // from one poll of the baseline's loops to the next. Defaults to 1 s.
	Batch    int           // turns, and steps, that a poll takes at most. Defaults to 100.

	AtATime  int           // tasks that are under way in one namespace. Defaults to 10.
	Duration time.Duration // of those. Defaults to 5 s.
	Polled   int           // of those, after which the loops end. Defaults to 30.

	Width int // steps between the first and the last of the task that fans out. Defaults to 1,000.

	Progress func(Progress)
}

func (o *TasksOptions) setDefaults() {
	orDefault(&o.Namespaces, 50)
	orDefault(&o.Singles, 200)
	orDefault(&o.Gap, 20*time.Millisecond)
	orDefault(&o.Stretch, 70*time.Second)
	orDefault(&o.Interval, time.Second)
	orDefault(&o.Batch, 100)
	orDefault(&o.AtATime, 10)
	orDefault(&o.Duration, 5*time.Second)
	orDefault(&o.Polled, 30)
	orDefault(&o.Width, 1000)
}

// TasksResult is what Tasks found.
type TasksResult struct {
	Namespaces int           `json:"namespaces"`
	Interval   time.Duration `json:"interval"`
	AtATime    int           `json:"at_a_time"`
	Steps      int           `json:"steps"` // of a task

	Singles *TaskSingles `json:"singles"`
	Polled  *TaskSingles `json:"polled"`

	Rate       *NamespaceRate `json:"rate"` // tasks
	PolledRate *NamespaceRate `json:"polled_rate"`

	Fan *FanOut `json:"fan"`
}

// TaskSingles is what became of tasks that came one at a time. What is claimed is timed by the server's clock alone, from when the change
// was written, which is before its commit: so each has the commit of the change in it.
type TaskSingles struct {
	Turns   Samples `json:"turns"`   // from the creation of a task to the claim of its first turn
	Steps   Samples `json:"steps"`   // from when a step was enqueued to the claim of its work item
	Results Samples `json:"results"` // from the result of a step to the claim of the next turn
	Begun   Samples `json:"begun"`   // from when a step was enqueued to when it was at work
	Known   Samples `json:"known"`   // from the result of a step to its new state, by the next turn
	Whole   Samples `json:"whole"`   // from a task's creation to its end

	ByClock int64         `json:"by_clock"` // as of NamespaceSingles
	Took    time.Duration `json:"took"`
}

// Claims are all three kinds.
func (t *TaskSingles) Claims() Samples {
	return append(append(append(Samples{}, t.Turns...), t.Steps...), t.Results...)
}

// ByClockPerSecond is the rate of statements for which time was the reason.
func (t *TaskSingles) ByClockPerSecond() float64 {
	return float64(t.ByClock) / max(t.Took.Seconds(), 1e-9)
}

// FanOut is a task of one step, many that wait for it, and one that waits for all of these.
type FanOut struct {
	Width int           `json:"width"`
	Took  time.Duration `json:"took"`
	Joins int           `json:"joins"` // how often the last one was begun
	Again int           `json:"again"` // attempts beyond one of each step
}

// PerSecond is how many steps were done.
func (f *FanOut) PerSecond() float64 { return float64(f.Width+2) / max(f.Took.Seconds(), 1e-9) }

// taskSteps is how many steps the tasks have that are linear.
const taskSteps = 3

// taskServer serves namespaces: an Engine, or loops.
type taskServer func(s *service, e *taskgraph.Engine, namespaces []string, claims *taskClaims) (byClock func() int64, err error)

// taskClaims are the claims that were made for tasks.
type taskClaims struct {
	mu    sync.Mutex
	steps Samples                // from when they were enqueued to the claims of their work items
	turns map[string][]time.Time // of each task, in the order of their claims
}

func (c *taskClaims) step(item *pgwake.ClaimedWorkItem) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps = append(c.steps, max(0, claimedAt(item.LockedUntil).Sub(item.EnqueuedAt)))
}

func (c *taskClaims) turn(turn *pgwake.OrchestrationItem) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.turns == nil {
		c.turns = make(map[string][]time.Time)
	}
	c.turns[turn.Instance] = append(c.turns[turn.Instance], claimedAt(turn.LockedUntil))
}

// claimedAt is when a lease began: as the claim did, which may find what was committed after that.
func claimedAt(lockedUntil time.Time) time.Time { return lockedUntil.Add(-pgwake.DefaultLockTimeout) }

// config is that of an Engine whose claims are to be kept.
func (c *taskClaims) config() *taskgraph.Config {
	return &taskgraph.Config{
		Steps: dispatch.Config{Middleware: []dispatch.Middleware{func(next dispatch.Handler) dispatch.Handler {
			return func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				c.step(item)
				return next(ctx, item)
			}
		}}},
		Turns: dispatch.OrchestratorConfig{Middleware: []dispatch.TurnMiddleware{func(next dispatch.Decider) dispatch.Decider {
			return func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
				c.turn(turn)
				return next(ctx, turn)
			}
		}}},
	}
}

// stepsAfter returns those of steps after the first n.
func (c *taskClaims) stepsAfter(n int) Samples {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.steps[n:])
}

// change is something for which a task wants a turn.
type change struct {
	Task string
	At   time.Time
}

// until returns the times from changes to the first turns that were claimed after them; none if the last one had begun its claim before.
func (c *taskClaims) until(changes []change) (s Samples, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, change := range changes {
		claims := c.turns[change.Task]
		next := slices.IndexFunc(claims, func(at time.Time) bool { return at.After(change.At) })
		switch {
		case len(claims) == 0:
			return nil, fmt.Errorf("no turn of task %s was claimed", change.Task)
		case next < 0:
			s = append(s, 0)
		default:
			s = append(s, claims[next].Sub(change.At))
		}
	}
	return s, nil
}

// Tasks measures them one after the other.
func Tasks(ctx context.Context, url string, o TasksOptions) (r *TasksResult, err error) {
	o.setDefaults()
	defer func(ctx context.Context) { err = about(ctx, "tasks", err) }(ctx)
	r = &TasksResult{Namespaces: o.Namespaces, Interval: o.Interval, AtATime: o.AtATime, Steps: taskSteps}
	if r.Singles, err = o.singles(ctx, url, pushedTasks); err != nil {
		return nil, err
	}
	if r.Rate, err = o.rate(ctx, url, o.Duration, 0, pushedTasks); err != nil {
		return nil, err
	}
	if r.Fan, err = o.fan(ctx, url); err != nil {
		return nil, err
	}
	// The loops do nothing most of the time, so both measurements of them run at the same time.
	group, both := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		r.Polled, err = o.singles(both, url, o.polledTasks)
		return err
	})
	group.Go(func() (err error) {
		silent := o
		silent.Progress = nil // the other tells
		r.PolledRate, err = silent.rate(both, url, 0, o.Polled, o.polledTasks)
		return err
	})
	return r, group.Wait()
}

// upkeep is how often an Engine looks after its tables, at the most, while there is work.
const upkeep = time.Minute

// pushedTasks are those of an Engine. What it does by the clock is what the Provider does, and its upkeep.
func pushedTasks(s *service, e *taskgraph.Engine, _ []string, _ *taskClaims) (byClock func() int64, err error) {
	began := time.Now()
	s.group.Go(func() error { return e.Run(s.ctx) })
	return func() int64 {
		stats := s.Stats()
		return byTheClock(&stats) + int64(time.Since(began)/upkeep) + 1
	}, nil
}

// polledTasks are those of the loops that document 000 wants to be rid of.
func (o *TasksOptions) polledTasks(s *service, _ *taskgraph.Engine, namespaces []string, claims *taskClaims) (byClock func() int64, err error) {
	l := newTaskLoop(s.Provider, o.Interval, o.Batch, claims)
	for _, namespace := range namespaces {
		l.serve(s, namespace)
	}
	return l.polls.Load, nil
}

// linear is a definition whose steps wait for one another.
func linear(namespace string) *taskgraph.Definition {
	d := taskgraph.Define(namespace, "linear", "1").Step("step1", "measure")
	for i := 2; i <= taskSteps; i++ {
		d.Step("step"+strconv.Itoa(i), "measure", taskgraph.After("step"+strconv.Itoa(i-1)))
	}
	return d
}

// taskNode is a node with an Engine, and definitions.
func (s stage) taskNode(ctx context.Context, c *taskgraph.Config, definitions ...*taskgraph.Definition) (*node, *taskgraph.Engine, error) {
	n, err := s.openPooled(ctx, 16, pgwake.Config{})
	if err != nil {
		return nil, nil, err
	}
	e, err := taskgraph.New(ctx, n.Provider, c)
	if err == nil {
		err = e.Register(ctx, definitions...)
	}
	if err != nil {
		n.close(&err)
		return nil, nil, err
	}
	e.Handle("measure", func(context.Context, *taskgraph.Step) (any, error) { return nil, nil })
	return n, e, nil
}

// singles has tasks come one at a time.
func (o *TasksOptions) singles(ctx context.Context, url string, serve taskServer) (r *TaskSingles, err error) {
	s := newStage(url)
	defer s.drop(&err)
	var names []string
	var definitions []*taskgraph.Definition
	for i := range o.Namespaces {
		names = append(names, fmt.Sprintf("tasks-%d", i))
		definitions = append(definitions, linear(names[i]))
	}
	var claims taskClaims
	n, e, err := s.taskNode(ctx, claims.config(), definitions...)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	serving := n.service()
	defer serving.end(&err)
	ctx = serving.ctx
	byClock, err := serve(serving, e, names, &claims)
	if err != nil {
		return nil, err
	}
	submit := func() error {
		task, err := e.Submit(ctx, taskgraph.Submission{Namespace: names[rand.IntN(len(names))], Name: "linear", Version: "1"})
		if err != nil {
			return err
		}
		_, err = e.Wait(ctx, task.ID)
		return err
	}
	if err := submit(); err != nil { // connections and plans are there then
		return nil, err
	}
	r = &TaskSingles{}
	warm := len(claims.stepsAfter(0))
	before, began := byClock(), time.Now()
	m := newMeter(o.Progress)
	singles := o.Singles
	for i := 0; i < singles; i++ {
		if err := pause(ctx, Uniform.draw(o.Gap)); err != nil {
			return nil, err
		}
		at := time.Now()
		if err := submit(); err != nil {
			return nil, err
		}
		r.Whole = append(r.Whole, time.Since(at))
		if m.due() {
			m.report(Progress{Done: i + 1, Total: singles, Figures: r.Whole.Summary()})
		}
		if time.Since(began) > o.Stretch { // of loops that poll there are fewer
			break
		}
	}
	if err := pause(ctx, o.Stretch-time.Since(began)); err != nil {
		return nil, err
	}
	r.Took = time.Since(began)
	r.ByClock = byClock() - before
	r.Steps = claims.stepsAfter(warm)
	return r, r.read(ctx, s, &claims, len(r.Whole))
}

var (
	//go:embed tasks_changes.sql
	tasksChangesSQL string
	//go:embed tasks_begun.sql
	tasksBegunSQL string
	//go:embed tasks_known.sql
	tasksKnownSQL string
)

// read takes the times of the latest tasks from their transitions, and the claims of their turns.
func (t *TaskSingles) read(ctx context.Context, s stage, claims *taskClaims, tasks int) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	for _, of := range []struct {
		to  *Samples
		sql string
	}{
		{&t.Begun, tasksBegunSQL},
		{&t.Known, tasksKnownSQL},
	} {
		rows, err := conn.Query(ctx, of.sql, tasks)
		if err != nil {
			return err
		}
		if *of.to, err = pgx.CollectRows(rows, pgx.RowTo[time.Duration]); err != nil {
			return err
		}
	}
	for _, of := range []struct {
		to    *Samples
		state taskgraph.StepState // "": they were created
	}{
		{&t.Turns, ""},
		{&t.Results, taskgraph.StepEnqueuedForOrchestration},
	} {
		rows, err := conn.Query(ctx, tasksChangesSQL, tasks, of.state)
		if err != nil {
			return err
		}
		changes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[change])
		if err != nil {
			return err
		}
		if *of.to, err = claims.until(changes); err != nil {
			return err
		}
	}
	return nil
}

// rate has tasks of one namespace done, so many at a time, for so long or until so many are.
func (o *TasksOptions) rate(ctx context.Context, url string, duration time.Duration, most int, serve taskServer) (r *NamespaceRate, err error) {
	s := newStage(url)
	defer s.drop(&err)
	const name = "tasks"
	n, e, err := s.taskNode(ctx, nil, linear(name))
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	serving := n.service()
	defer serving.end(&err)
	if _, err := serve(serving, e, []string{name}, &taskClaims{}); err != nil {
		return nil, err
	}
	t := newPace(o.AtATime, duration, most)
	group, submitting := errgroup.WithContext(serving.ctx)
	for range o.AtATime {
		group.Go(func() error {
			for more := true; more; more = t.step() {
				task, err := e.Submit(submitting, taskgraph.Submission{Namespace: name, Name: "linear", Version: "1"})
				if err == nil {
					_, err = e.Wait(submitting, task.ID)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := watch(serving.ctx, newMeter(o.Progress), t.progress, t.over, ignored); err != nil {
		return nil, errors.Join(err, group.Wait())
	}
	return t.rate(), group.Wait()
}

// fan has one task done whose steps are many.
func (o *TasksOptions) fan(ctx context.Context, url string) (r *FanOut, err error) {
	s := newStage(url)
	defer s.drop(&err)
	const name = "fan"
	var begun atomic.Int64
	d := taskgraph.Define(name, name, "1").Step("first", "measure")
	var middle []string
	for i := range o.Width {
		middle = append(middle, fmt.Sprintf("middle%d", i))
		d.Step(middle[i], "measure", taskgraph.After("first"))
	}
	d.Step("last", "join", taskgraph.After(middle...))
	n, e, err := s.taskNode(ctx, nil, linear(name), d)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	e.Handle("join", func(context.Context, *taskgraph.Step) (any, error) {
		begun.Add(1)
		return nil, nil
	})
	serving := n.service()
	defer serving.end(&err)
	serving.group.Go(func() error { return e.Run(serving.ctx) })
	var task taskgraph.Submitted
	for _, of := range []string{"linear", name} { // connections and plans are there then
		if task, err = e.Submit(serving.ctx, taskgraph.Submission{Namespace: name, Name: of, Version: "1"}); err != nil {
			return nil, err
		}
		if _, err := e.Wait(serving.ctx, task.ID); err != nil {
			return nil, err
		}
	}
	r = &FanOut{Width: o.Width, Joins: int(begun.Load())}
	done, err := e.Task(serving.ctx, task.ID)
	if err != nil {
		return nil, err
	}
	r.Took = done.CompletedAt.Sub(done.RequestedAt)
	return r, s.one(ctx, &r.Again, `SELECT coalesce(sum(attempts - 1), 0) FROM steps WHERE task_id = $1`, task.ID)
}

// one reads one value.
func (s stage) one(ctx context.Context, to any, sql string, args ...any) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	return conn.QueryRow(ctx, sql, args...).Scan(to)
}
