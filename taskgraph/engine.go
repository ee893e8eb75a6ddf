package taskgraph

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/taskgraph/migrations"
	"go.opentelemetry.io/otel/propagation"
)

// This file answers: who evaluates tasks and runs their steps?

// queueName is the queue name of tasks, and the tag of their steps: other programs on the same Provider do not fetch them.
const queueName = "taskgraph"

// Engine is the verbs of the task graph (Register, Submit and all the others of Graph), and runs tasks: it evaluates them, and has their steps run by handlers. Make one per
// process with New. Safe for concurrent use but for Handle, which is to be called before Run.
type Engine struct {
	*Graph
	pool      *pgxpool.Pool
	cfg       Config
	processor string // who this is, in transitions
	handlers  map[string]Handler
	err       error // of what was registered

	coordinators *dispatch.Coordinators
	once         sync.Once
	turned       atomic.Bool      // a turn was taken since rollups were refreshed
	patience     time.Duration    // upkeepPatience, but in tests
	clock        func() time.Time // time.Now, but in tests

	steadyMu    sync.Mutex
	steadySince clocks // see steady
}

// New returns an Engine on the Provider's database, and creates or migrates its tables in the Provider's schema, unless the Provider was
// told not to migrate. A nil Config means the defaults. Errors: pgwake.ErrConfig, and those of pgwake.Provider.Migrate. What package
// dispatch does not take of Config.Steps and Config.Turns is told by Run.
func New(ctx context.Context, p *pgwake.Provider, config *Config) (*Engine, error) {
	cfg, err := config.resolve()
	if err != nil {
		return nil, err
	}
	e := &Engine{pool: p.Pool(), cfg: cfg, processor: newProcessor(), handlers: make(map[string]Handler), patience: upkeepPatience, clock: time.Now}
	e.Graph = &Graph{p: p, in: pgx.Identifier{p.Schema()}.Sanitize() + ".", headers: func(ctx context.Context) *string { return headers(ctx, cfg.Propagator) },
		maxResult: cfg.MaxResult}
	return e, p.Migrate(ctx, migrations.Layer())
}

// headers are what travels with what is enqueued: the trace that the context belongs to. What is too much, or what PostgreSQL cannot hold, is
// left out: it is no reason to refuse a task, or what a step came to.
func headers(ctx context.Context, p propagation.TextMapPropagator) *string {
	carrier := propagation.MapCarrier{}
	p.Inject(ctx, carrier)
	if len(carrier) == 0 || pgwake.CheckHeaders(carrier) != nil {
		return nil
	}
	data, err := json.Marshal(carrier)
	if err != nil {
		return nil
	}
	text := string(data)
	return &text
}

// Handle registers the Handler of steps whose definitions name it. A step whose handler nobody has registered waits, for a while, for a
// process that has it.
func (e *Engine) Handle(name string, h Handler) {
	switch _, taken := e.handlers[name]; {
	case h == nil || textProblem(name, 1, pgwake.MaxNameLength) != "":
		e.err = errors.Join(e.err, fmt.Errorf("%w: there is no handler, or no name for it: %q", pgwake.ErrConfig, name))
	case taken:
		e.err = errors.Join(e.err, fmt.Errorf("%w: there are two handlers %q", pgwake.ErrConfig, name))
	default:
		e.handlers[name] = h
	}
}

// Coordinators returns what serves the namespaces, for its health, its stats and its settings at run time (dispatch.Coordinators).
func (e *Engine) Coordinators() *dispatch.Coordinators {
	e.once.Do(func() {
		group := dispatch.Group{Name: "taskgraph", Namespaces: []string{"*"}, Config: e.cfg.Steps, Turns: e.cfg.Turns, Decider: e.evaluate,
			RetireAfter: e.cfg.RetireAfter}
		group.Config.Tags = pgwake.Tags(e.tags()...)
		group.Turns.Queues = []string{queueName}
		group.Turns.WithoutHistory = true
		// The tables say what is to be done, so a turn that cannot be taken now can be later: nothing is given up for that.
		group.Turns.MaxAttempts = dispatch.Unlimited
		if len(e.handlers) > 0 {
			group.Handlers = func(d *dispatch.Dispatcher) {
				for _, name := range slices.Sorted(maps.Keys(e.handlers)) {
					d.Handle(name, e.runStep(e.handlers[name]))
				}
			}
		}
		e.coordinators = dispatch.NewCoordinators(e.p, &dispatch.CoordinatorsConfig{
			Namespaces: e.cfg.Namespaces, Groups: []dispatch.Group{group}, Rollout: e.cfg.Rollout, MeterProvider: e.cfg.Steps.MeterProvider, Logger: e.cfg.Logger})
	})
	return e.coordinators
}

func (e *Engine) tags() []string {
	tags := []string{queueName}
	for _, tag := range e.cfg.Tags {
		tags = append(tags, queueName+"/"+tag)
	}
	return tags
}

// Run evaluates tasks and runs their steps until ctx ends or the Provider is closed, and then ends as dispatch.Dispatcher.Run does:
// handlers that do not come to their end are stopped, and their steps are ready again at once. Run may be called once. pgwake.ErrConfig, at
// once, for what is wrong with the handlers, or with Config.Steps and Config.Turns.
func (e *Engine) Run(ctx context.Context) error {
	if e.err != nil {
		return e.err
	}
	ctx, end := context.WithCancel(ctx)
	var upkeep sync.WaitGroup
	upkeep.Go(func() { e.keepUp(ctx) })
	defer upkeep.Wait()
	defer end()
	return e.Coordinators().Run(ctx)
}

// evaluate takes a turn of a task. Of what the messages say, only a cancel and a work item that
// was given up matter: the tables tell the rest.
//
// Invariant: whatever a message says, the database takes what is made of it. What it refused would come back for ever, and with it all
// that comes for the task; and whoever may add to the queues sends what he likes.
func (e *Engine) evaluate(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
	if !isUUID(turn.Instance) || turn.Instance != strings.ToLower(turn.Instance) { // as in the database
		return pgwake.OrchestrationAck{}, dispatch.Permanent(fmt.Errorf("the instance %s is no task", quoteShort(turn.Instance)))
	}
	e.turned.Store(true)
	cancel := false
	var positions []int32
	var errs []string
	for _, m := range turn.Messages {
		switch m.Kind {
		case "cancel":
			cancel = true
		case dispatch.KindFailed: // its work item was given up without a word from a handler
			var c dispatch.Completion
			if json.Unmarshal(m.Data, &c) == nil && c.ActivityID > 0 && c.ActivityID <= math.MaxInt32 {
				positions, errs = append(positions, int32(c.ActivityID)), append(errs, text(errors.New(c.Error)))
			}
		}
	}
	return pgwake.OrchestrationAck{}, dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
		task, claim, err := token.Turn()
		if err != nil {
			return err
		}
		const op = "evaluate task"
		return failed(op, e.p.DoAck(ctx, op, token, func(ctx context.Context, q pgwake.Querier, quiet bool) (pgx.Rows, error) {
			args := []any{task, claim, e.processor, cancel, positions, errs, e.headers(ctx), quiet}
			return q.Query(ctx, "SELECT * FROM "+e.call("evaluate_task", len(args)), args...)
		}))
	})
}

// Pause has nobody evaluate tasks of these namespaces, or run steps of them, until Resume. What is at work goes on.
func (e *Engine) Pause(ctx context.Context, namespaces ...string) error {
	return pgx.BeginTxFunc(ctx, conns.Transactions{Pool: e.pool}, readCommitted, func(tx pgx.Tx) error {
		if err := e.p.PauseTx(ctx, tx, pgwake.Worker, namespaces...); err != nil {
			return err
		}
		return e.p.PauseTx(ctx, tx, pgwake.Orchestrator, namespaces...)
	})
}

// Resume ends a Pause.
func (e *Engine) Resume(ctx context.Context, namespaces ...string) error {
	return pgx.BeginTxFunc(ctx, conns.Transactions{Pool: e.pool}, readCommitted, func(tx pgx.Tx) error {
		if err := e.p.ResumeTx(ctx, tx, pgwake.Worker, namespaces...); err != nil {
			return err
		}
		return e.p.ResumeTx(ctx, tx, pgwake.Orchestrator, namespaces...)
	})
}

// Wait returns a task when it has ended, in whatever way. It is pushed, and while it waits it costs neither a query nor a connection. A
// task that is blocked by failures has not ended. Errors as of pgwake.Provider.WaitForInstance.
func (e *Engine) Wait(ctx context.Context, task string) (*Task, error) {
	if err := checkID("wait for task", "task", task); err != nil {
		return nil, err
	}
	if _, err := e.p.WaitForInstance(ctx, task); err != nil {
		return nil, err
	}
	return e.Task(ctx, task)
}

// Progress is how far a task has got.
type Progress struct {
	State     TaskState `json:"state"`
	Completed int       `json:"completed"` // steps
	Total     int       `json:"total"`
}

// Watch returns how far a task has got, and then again whenever that has changed, until it has ended or ctx ends, which is the last error.
// It is pushed; what changes in quick succession is told once.
func (e *Engine) Watch(ctx context.Context, task string) iter.Seq2[Progress, error] {
	return func(yield func(Progress, error) bool) {
		if err := checkID("watch task", "task", task); err != nil {
			yield(Progress{}, err)
			return
		}
		for seen := int64(0); ; {
			status, err := e.p.WaitForStatus(ctx, task, seen)
			var p Progress
			if err == nil {
				seen = status.Version
				err = json.Unmarshal([]byte(status.Value), &p)
			}
			if !yield(p, err) || err != nil || p.State.IsTerminal() {
				return
			}
		}
	}
}
