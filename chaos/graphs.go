package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/taskgraph"
)

// This file answers: who submits tasks, who runs their steps, and what is written down of it?
//
// Each of these processes has an Engine, and submits tasks of all shapes, some in a transaction with a row of its own, some
// twice with an idempotency key; it cancels some, waits for the end of some, and decides about those that are blocked. A
// handler writes down that its attempt has begun, whose results it was given, and what it is about to return.

const graphSchema = "graphs"

// graphTables are where effects of steps go, which have no key, so that a second one is seen; and what is written with a
// submission.
const graphTables = `CREATE TABLE graph_effects (task text NOT NULL, step text NOT NULL, run text NOT NULL);
	CREATE TABLE graph_orders (task text NOT NULL)`

// What lines say of tasks, besides what they say of items: a cancellation is cancelling, then cancelled, refused or nothing; a
// decision about one that is blocked is deciding, then decided, refused or nothing. An attempt at a step is got, then saw,
// then done or failing, or it is returning, if it is to stop; one with an effect is acking before it is acked, refused or
// nothing.
const (
	cancelling = "cancelling"
	cancelled  = "cancelled"
	deciding   = "deciding"
	decided    = "decided"
	ended      = "ended"   // whoever waited for it was told its final state
	saw        = "saw"     // the results of the steps before
	kept       = "kept"    // a checkpoint, which is refused of an attempt that is over
	done       = "done"    // it is about to return a result
	failing    = "failing" // or an error
)

// graphLine is what lines of tasks have besides others. Their Key is the id of the task.
type graphLine struct {
	Task   string            `json:"task,omitempty"` // that a submission returned
	State  string            `json:"state,omitempty"`
	Decide string            `json:"decide,omitempty"` // what somebody decides, of Step if it is about one
	Order  bool              `json:"order,omitempty"`  // it is submitted with a row in graph_orders
	Step   string            `json:"step,omitempty"`
	Try    int               `json:"try,omitempty"`  // which attempt
	Run    string            `json:"run,omitempty"`  // unique
	Since  time.Time         `json:"since,omitzero"` // before the call
	Seen   map[string]string `json:"seen,omitempty"` // whose run the result of which step is
}

// outcome is the result of each step.
type outcome struct {
	Run string `json:"run"`
	Go  bool   `json:"go"` // what waits for that is skipped
}

// calls numbers the calls of handlers of a process.
var calls atomic.Int64

func prepareGraphs(ctx context.Context, p *pgwake.Provider) error {
	e, err := taskgraph.New(ctx, p, nil)
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		if err == nil {
			err = e.Register(ctx, shapes[name].definition())
		}
	}
	return err
}

func (w *workload) openEngine(ctx context.Context) (err error) {
	w.engine, err = taskgraph.New(ctx, w.provider, &taskgraph.Config{
		Steps: dispatch.Config{Concurrency: 2, LockTimeout: lease, StopTimeout: time.Second, CancelTimeout: time.Second},
		Turns: dispatch.OrchestratorConfig{Concurrency: 2, LockTimeout: lease, StopTimeout: time.Second, CancelTimeout: time.Second,
			Retry: dispatch.Backoff(20*time.Millisecond, 200*time.Millisecond)},
		Backoff:        stepBackoff,
		UpkeepInterval: 5 * time.Second, // beside all faults: where the server's clock is shifted it takes tasks for old
		RetireAfter:    time.Second,     // so that probes find their namespace with and without somebody who serves it
	})
	if err == nil {
		for _, do := range stepHandlers {
			w.engine.Handle(do, w.runStep)
		}
	}
	return err
}

// beginEngine starts the loops of an engine.
func (w *workload) beginEngine() {
	w.loop("engine", func(*rand.Rand) {
		if err := w.engine.Run(w.alive); err != nil && !errors.Is(err, dispatch.ErrHandlersLeft) {
			w.ledger.write(wrong, entry{Err: fmt.Sprintf("engine: %v", err)})
		}
	})
	w.loop("submit", w.submitTasks)
	w.loop("submit probes", w.submitProbes)
	w.loop("decide", w.decideTasks)
}

// uuid is one that nobody else makes, since each loop has random numbers of its own.
func uuid(rng *rand.Rand) string {
	a, b := rng.Uint64(), rng.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", uint32(a>>32), uint16(a>>16), uint16(a)&0xfff, uint16(b>>48)&0xfff, b&(1<<48-1))
}

// submitTasks submits tasks until the process is to be quiet.
func (w *workload) submitTasks(rng *rand.Rand) {
	for w.loud.Err() == nil {
		began := time.Now()
		switch p := rng.IntN(100); {
		case p < 50:
			w.submitSome(rng, 1, false)
		case p < 70:
			w.submitSome(rng, 2+rng.IntN(3), false)
		case p < 90:
			w.submitSome(rng, 1, true)
		default:
			w.submitTwice(rng)
		}
		w.rest(rng, began, 20*time.Millisecond, 400*time.Millisecond)
	}
}

func (w *workload) submitProbes(rng *rand.Rand) {
	for w.loud.Err() == nil {
		s := submission(rng, shapes[probeShape])
		if w.submit([]taskgraph.Submission{s}, false, false) {
			w.loops.Go(func() { w.awaitTask(s.ID) })
		}
		w.restProbes(between(rng, 200*time.Millisecond, 1500*time.Millisecond))
	}
}

func submission(rng *rand.Rand, s *shape) taskgraph.Submission {
	return taskgraph.Submission{ID: uuid(rng), Namespace: s.namespace(), Name: s.name, Version: shapeVersion}
}

// someShape draws one by weight.
func someShape(rng *rand.Rand) *shape {
	p := rng.IntN(100)
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		if p -= shapes[name].weight; p < 0 {
			return shapes[name]
		}
	}
	panic("the weights of the shapes are less than 100")
}

func (w *workload) submitSome(rng *rand.Rand, count int, inTx bool) {
	var all []taskgraph.Submission
	for range count {
		s := submission(rng, someShape(rng))
		if rng.IntN(8) == 0 {
			s.Delay = between(rng, time.Millisecond, 500*time.Millisecond)
		}
		all = append(all, s)
	}
	commit := rng.IntN(4) > 0
	if !w.submit(all, inTx, !commit) {
		return
	}
	for _, s := range all {
		if rng.IntN(6) == 0 {
			after := between(rng, 0, 500*time.Millisecond)
			w.loops.Go(func() { w.cancelTask(s.ID, after) })
		}
		if rng.IntN(3) == 0 {
			w.loops.Go(func() { w.awaitTask(s.ID) })
		}
	}
}

// submitTwice submits a task, and then, whatever came of it, again under another id.
func (w *workload) submitTwice(rng *rand.Rand) {
	s := submission(rng, someShape(rng))
	s.IdempotencyKey = s.ID
	w.submit([]taskgraph.Submission{s}, false, false)
	s.ID = uuid(rng)
	w.submit([]taskgraph.Submission{s}, false, false)
}

// submit submits tasks between the lines that say so, and reports whether they are there.
func (w *workload) submit(all []taskgraph.Submission, inTx, revoke bool) bool {
	var lines []entry
	for _, s := range all {
		lines = append(lines, entry{Key: s.ID, Do: s.Name, Delay: s.Delay, Dedup: s.IdempotencyKey, Graph: &graphLine{Order: inTx}})
	}
	w.ledger.write(sending, lines...)
	ctx, cancel := verb(context.Background())
	defer cancel()
	var came []taskgraph.Submitted
	var err error
	if inTx {
		err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			for _, s := range all {
				if _, err := tx.Exec(ctx, `INSERT INTO graph_orders VALUES ($1)`, s.ID); err != nil {
					return err
				}
			}
			if came, err = w.engine.WithTx(tx).SubmitMany(ctx, all); err == nil && revoke {
				err = errRevoked
			}
			return err
		})
	} else {
		came, err = w.engine.SubmitMany(ctx, all)
	}
	switch {
	case errors.Is(err, errRevoked):
		w.ledger.write(revoked, lines...)
	case err != nil:
		w.failed(ctx, "submit", err)
	default:
		for i, s := range came {
			lines[i] = entry{Key: lines[i].Key, Duplicate: s.Duplicate, Graph: &graphLine{Task: s.ID}}
		}
		w.ledger.write(sent, lines...)
		return true
	}
	return false
}

// act does something to a task between the lines that say so.
func (w *workload) act(trying, did string, line entry, call func(context.Context) (bool, error)) {
	w.ledger.write(trying, line)
	ctx, cancel := verb(context.Background())
	defer cancel()
	switch ok, err := call(ctx); {
	case err != nil:
		w.failed(ctx, trying, err)
	case ok:
		w.ledger.write(did, line)
	default:
		w.ledger.write(refused, line)
	}
}

func (w *workload) cancelTask(id string, after time.Duration) {
	if nap(w.alive, after) {
		w.act(cancelling, cancelled, entry{Key: id, Graph: &graphLine{Decide: cancelling}}, func(ctx context.Context) (bool, error) {
			return w.engine.Cancel(ctx, id, "chaos")
		})
	}
}

// awaitTask waits for the end of a task, or until the process is to end.
func (w *workload) awaitTask(id string) {
	for w.alive.Err() == nil {
		ctx := fickle(w.alive)
		task, err := w.engine.Wait(ctx, id)
		if err == nil {
			w.ledger.write(ended, entry{Key: id, Graph: &graphLine{State: string(task.State)}})
			return
		}
		w.failed(ctx, "wait for task", err)
		nap(w.alive, 50*time.Millisecond)
	}
}

// decideTasks decides about tasks that are blocked until the process is to end: those of a round are to be done by the
// end of the run.
func (w *workload) decideTasks(rng *rand.Rand) {
	for nap(w.alive, between(rng, 100*time.Millisecond, 300*time.Millisecond)) {
		ctx, cancel := verb(w.alive)
		blocked, err := w.engine.ListTasks(ctx, &taskgraph.TaskFilter{State: taskgraph.TaskBlockedByFailures})
		if err != nil {
			w.failed(ctx, "list tasks", err)
		}
		cancel()
		for _, t := range blocked {
			w.decide(t)
		}
	}
}

func (w *workload) decide(t taskgraph.Task) {
	s := shapes[t.Name]
	line := entry{Key: t.ID, Graph: &graphLine{Decide: s.blocked}}
	switch s.blocked {
	case giveUp:
		w.act(deciding, decided, line, func(ctx context.Context) (bool, error) { return w.engine.GiveUp(ctx, t.ID, "chaos") })
	case resolveTask:
		w.act(deciding, decided, line, func(ctx context.Context) (bool, error) { return w.engine.ResolveTask(ctx, t.ID, "chaos") })
	case resolveStep, resetStep:
		ctx, cancel := verb(w.alive)
		defer cancel()
		steps, err := w.engine.Steps(ctx, t.ID)
		if err != nil {
			w.failed(ctx, "list steps", err)
			return
		}
		for _, step := range steps {
			if step.State != taskgraph.StepError {
				continue
			}
			verb := w.engine.ResetStep
			if s.blocked == resolveStep {
				verb = w.engine.ResolveStep
			}
			line.Graph.Step = step.Name
			w.act(deciding, decided, line, func(ctx context.Context) (bool, error) { return verb(ctx, step.ID, "chaos") })
		}
	}
}

var errOnPurpose = errors.New("as it should")

// runStep is the handler of all steps.
func (w *workload) runStep(ctx context.Context, s *taskgraph.Step) (any, error) {
	run := graphLine{Step: s.Name, Try: s.Attempt, Run: fmt.Sprintf("%s/%d", w.process(), calls.Add(1))}
	write := func(what string, say func(*graphLine)) {
		line := run
		if say != nil {
			say(&line)
		}
		w.ledger.write(what, entry{Key: s.TaskID, Graph: &line})
	}
	write(got, nil)
	// From the end of the context on, but if its lease is lost, the attempt may be given back, and not count.
	defer context.AfterFunc(ctx, func() {
		if !errors.Is(context.Cause(ctx), pgwake.ErrLockLost) {
			write(returning, nil)
		}
	})()
	fail := func(err error) (any, error) {
		write(failing, nil)
		return nil, err
	}
	rng := rand.New(rand.NewPCG(w.Seed, uint64(hash(run.Run))))
	before, err := s.Results(ctx)
	if err != nil {
		return fail(err)
	}
	write(saw, func(l *graphLine) {
		l.Seen = map[string]string{}
		for name, result := range before {
			var o outcome
			_ = json.Unmarshal(result, &o) // one of a task has no run of its own
			l.Seen[name] = o.Run
		}
	})
	result := outcome{Run: run.Run}
	if s.Handler == stepProbe {
		write(done, nil)
		return result, nil
	}
	switch p := rng.IntN(200); {
	case p == 0:
		nap(ctx, lease+lease/2)
	case p < 150:
		nap(ctx, between(rng, 0, 30*time.Millisecond))
	case s.Handler != stepRelent:
		nap(ctx, between(rng, 0, 10*time.Millisecond))
		keeping := fickle(ctx)
		if err := s.Checkpoint(ctx, result); err != nil {
			w.failed(keeping, "checkpoint", err)
			return fail(err)
		}
		write(kept, func(l *graphLine) { l.Since = keeping.since })
	}
	switch {
	case s.Handler == stepRefuse:
		return fail(taskgraph.Permanent(errOnPurpose))
	case s.Handler == stepExhaust, s.Handler == stepFlaky && s.Attempt <= twoAttempts, s.Attempt == 1 && rng.IntN(30) == 0:
		return fail(errOnPurpose)
	case s.Handler == stepRelent:
		if reset, _ := s.LastCheckpoint(new(bool)); !reset {
			keeping := fickle(ctx)
			if err := s.Checkpoint(ctx, true); err != nil {
				w.failed(keeping, "checkpoint", err)
				return fail(err)
			}
			return fail(taskgraph.Permanent(errOnPurpose))
		}
	case s.Handler == stepEffect:
		if err := w.completeWithEffect(ctx, s, run, result); err != nil {
			return fail(err)
		}
		return result, nil
	case s.Handler == stepDecide:
		write(done, nil)
		decision := taskgraph.Decision{Result: result}
		for i := range extras(s.TaskID) {
			decision.Steps = append(decision.Steps, taskgraph.AddedStep{
				Name: fmt.Sprint(stepExtra, i), Template: stepExtra, After: []string{decider}, Before: []string{joining}})
		}
		return decision, nil
	}
	write(done, nil)
	return result, nil
}

// completeWithEffect completes a step from within its handler, in a transaction with an effect: the one way to have one exactly
// once in the database.
func (w *workload) completeWithEffect(of context.Context, s *taskgraph.Step, run graphLine, result outcome) error {
	ctx, cancel := verb(of)
	defer cancel()
	line := entry{Key: s.TaskID, Graph: &run}
	w.ledger.write(acking, line)
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO graph_effects VALUES ($1, $2, $3)`, s.TaskID, s.Name, run.Run); err != nil {
			return err
		}
		completed, err := w.engine.WithTx(tx).CompleteStep(ctx, s.ID, result, "its handler")
		if err == nil && !completed {
			err = errRevoked
		}
		return err
	})
	switch {
	case err == nil:
		w.ledger.write(acked, line)
	case errors.Is(err, errRevoked):
		w.ledger.write(refused, line)
	default:
		w.failed(ctx, "complete step", err)
	}
	return err
}
