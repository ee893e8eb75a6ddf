package order

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how do workflows and activities get to run? Any runtime on pgwake has these loops; this
// one is as small as they come.

const (
	orchestratorCount = 2 // dispatchers per process
	workerCount       = 4

	// lockTimeout is how long a process that died keeps its items from the others. Nothing here takes
	// nearly as long, so no lease is renewed; for what does, see examples/dispatchers.
	lockTimeout = time.Second

	// maxAttempts is how often something is tried. Whatever takes its process down with it must not do so
	// for ever.
	maxAttempts = 4
)

// activity does what a workflow must not: anything with side effects. It may run more than once.
type activity func(ctx context.Context, input json.RawMessage) (any, error)

// process is one node: a Provider and the dispatchers of both queues.
type process struct {
	*pgwake.Provider
	workflows  map[string]workflow
	activities map[string]activity

	living       context.Context // of whatever is at work; ends by kill only
	kill         context.CancelFunc
	stopFetching context.CancelFunc
	dispatchers  sync.WaitGroup
}

// startProcess has dispatchers wait for turns and for activities until ctx ends.
func startProcess(ctx context.Context, p *pgwake.Provider, workflows map[string]workflow, activities map[string]activity) *process {
	r := &process{Provider: p, workflows: workflows, activities: activities}
	// What is at work when ctx ends is finished and acknowledged.
	r.living, r.kill = context.WithCancel(context.WithoutCancel(ctx))
	fetching, stop := context.WithCancel(ctx)
	r.stopFetching = stop
	context.AfterFunc(r.living, stop)
	for range orchestratorCount {
		r.dispatchers.Go(func() { dispatch(fetching, r.living, p.FetchOrchestrationItem, r.turn) })
	}
	for range workerCount {
		r.dispatchers.Go(func() { dispatch(fetching, r.living, p.FetchWorkItem, r.work) })
	}
	return r
}

// stop lets everything at work end, fetches nothing more, and closes the Provider.
func (r *process) stop() error {
	r.stopFetching()
	r.dispatchers.Wait()
	r.kill()
	return r.Close(context.WithoutCancel(r.living))
}

// crash stops in the middle of everything: nothing more is acknowledged, and nothing given back. As after a
// kill -9, what was in hand comes back when its lease ends.
func (r *process) crash() error {
	r.kill()
	return r.stop()
}

// dispatch handles one item, or turn, after another. Between them it waits in fetch, which asks the database
// nothing while nothing is due.
func dispatch[T any](fetching, living context.Context, fetch func(context.Context, *pgwake.FetchOptions) (T, error), handle func(context.Context, T) error) {
	options := &pgwake.FetchOptions{LockTimeout: lockTimeout, Namespaces: []string{pgwake.DefaultNamespace}}
	for {
		item, err := fetch(fetching, options)
		switch {
		case err == nil:
			// An error here is no reason to stop. Unless somebody else has it by now (ErrLockLost), it comes
			// back when the lease ends.
			if err := handle(living, item); err != nil && living.Err() == nil {
				slog.Warn("left to its lease", "err", err)
			}
		case errors.Is(err, pgwake.ErrNoWork):
		case fetching.Err() != nil, errors.Is(err, pgwake.ErrClosed):
			return
		default: // the database is away, or rights are missing: it may get better
			slog.Error("cannot fetch", "err", err)
			select {
			case <-time.After(time.Second):
			case <-fetching.Done():
			}
		}
	}
}

// turn runs a workflow over what happened to one instance. Nobody else does that while we hold its lock.
func (r *process) turn(ctx context.Context, item *pgwake.OrchestrationItem) error {
	if item.Attempt > maxAttempts {
		return r.AckOrchestrationItem(ctx, item.LockToken, giveUp(item))
	}
	run, ok := r.workflows[item.Name]
	if !ok && item.Name != "" { // without a name nobody has started it, and decide drops the messages
		return r.tryAgain(ctx, item, errors.New("no such workflow here"))
	}
	ack, err := decide(run, item)
	if err != nil {
		return r.tryAgain(ctx, item, err)
	}
	return r.AckOrchestrationItem(ctx, item.LockToken, ack)
}

// tryAgain gives a turn back, for a while: another version of the program may know better.
func (r *process) tryAgain(ctx context.Context, item *pgwake.OrchestrationItem, why error) error {
	slog.Warn("turn failed", "instance", item.Instance, "workflow", item.Name, "attempt", item.Attempt, "err", why)
	return r.AbandonOrchestrationItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: backOff(item.Attempt)})
}

// giveUp ends an instance whose turn failed too often, or killed its processes, without looking at it again.
func giveUp(item *pgwake.OrchestrationItem) pgwake.OrchestrationAck {
	execution, history := current(item)
	if item.Name == "" {
		return pgwake.OrchestrationAck{}
	}
	t := turn{instance: item.Instance, next: nextEvent(history), ack: pgwake.OrchestrationAck{
		ExecutionID: execution, Metadata: pgwake.Metadata{Name: item.Name, Version: item.Version}}}
	_ = t.fail(fmt.Errorf("turn given up after %d attempts", maxAttempts))
	return t.ack
}

// work runs an activity. Its answer and the end of the work item are one transaction.
func (r *process) work(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
	answer := detail{Execution: item.ExecutionID, Call: item.ActivityID}
	result, err := r.perform(ctx, item)
	switch {
	case ctx.Err() != nil:
		return ctx.Err() // we are dead
	case err == nil:
		answer.Data = encode(result)
	case item.Attempt < maxAttempts:
		slog.Warn("activity failed", "activity", item.Name, "attempt", item.Attempt, "err", err)
		return r.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: backOff(item.Attempt)})
	default:
		answer.Error = fmt.Sprintf("%s: %v", item.Name, err) // for the workflow to deal with
	}
	return r.AckWorkItem(ctx, item.LockToken, &pgwake.Message{
		Instance: item.Instance, Kind: activityCompleted, Data: encode(answer)})
}

func (r *process) perform(ctx context.Context, item *pgwake.ClaimedWorkItem) (result any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panicked: %v", p)
		}
	}()
	// One that took down process after process does not get as far as returning an error.
	if item.Attempt > maxAttempts {
		return nil, fmt.Errorf("given up after %d attempts", maxAttempts)
	}
	run, ok := r.activities[item.Name]
	if !ok {
		return nil, errors.New("no such activity here")
	}
	return run(ctx, item.Input)
}

// backOff is the pause after an attempt.
func backOff(attempt int) time.Duration {
	return 25 * time.Millisecond << min(attempt, 10)
}
