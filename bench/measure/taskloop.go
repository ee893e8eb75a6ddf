package measure

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what do the coordinators of document 000 do, which poll for tasks?

// taskLoop serves namespaces, each by two loops: every so often the one takes turns of the tasks for which something is to be done,
// and the other steps that are enqueued. What is done about either is what an Engine does, by the same SQL functions, so that the loops
// are all that differs.
type taskLoop struct {
	p                       *pgwake.Provider
	interval                time.Duration
	batch                   int
	evaluate, start, finish string
	claims                  *taskClaims

	polls atomic.Int64
}

// taskQueue is the queue of tasks, and the tag of their steps.
const taskQueue = "taskgraph"

func newTaskLoop(p *pgwake.Provider, interval time.Duration, batch int, claims *taskClaims) *taskLoop {
	in := pgx.Identifier{p.Schema()}.Sanitize() + "."
	return &taskLoop{p: p, interval: interval, batch: batch, claims: claims,
		evaluate: "SELECT FROM " + in + "evaluate_task($1, $2, NULL)",
		start:    "SELECT FROM " + in + "start_step((($1::json) ->> 'step')::uuid, $2, $3, NULL)",
		finish:   "SELECT " + in + "finish_step((($1::json) ->> 'step')::uuid, $2, $3, NULL, true, NULL)",
	}
}

// serve begins with a namespace, at random instants within the interval, and ends with the service.
func (l *taskLoop) serve(s *service, namespace string) {
	fetch := pgwake.FetchOptions{NoWait: true, Namespaces: []string{namespace}}
	turns := fetch
	turns.Queues, turns.WithoutHistory = []string{taskQueue}, true
	steps := fetch
	steps.Tags = pgwake.Tags(taskQueue)
	for _, cycle := range []func(context.Context) error{
		func(ctx context.Context) error { return l.turns(ctx, &turns) },
		func(ctx context.Context) error { return l.steps(ctx, &steps) },
	} {
		s.group.Go(func() error {
			for wait := rand.N(l.interval); pause(s.ctx, wait) == nil; wait = l.interval {
				l.polls.Add(1)
				if err := cycle(s.ctx); err != nil && s.ctx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
}

func (l *taskLoop) turns(ctx context.Context, o *pgwake.FetchOptions) error {
	for range l.batch {
		turn, err := l.p.FetchOrchestrationItem(ctx, o)
		if err != nil {
			return noWork(err)
		}
		l.claims.turn(turn)
		task, claim, err := turn.LockToken.Turn()
		if err != nil {
			return err
		}
		if _, err := l.p.Pool().Exec(ctx, l.evaluate, task, claim); err != nil {
			return err
		}
	}
	return nil
}

func (l *taskLoop) steps(ctx context.Context, o *pgwake.FetchOptions) error {
	items, err := l.p.FetchWorkItems(ctx, l.batch, o)
	if err != nil {
		return noWork(err)
	}
	for _, item := range items {
		l.claims.step(item)
		id, token, err := item.LockToken.WorkItem()
		if err != nil {
			return err
		}
		for _, sql := range []string{l.start, l.finish} {
			if _, err := l.p.Pool().Exec(ctx, sql, string(item.Input), id, token); err != nil {
				return err
			}
		}
	}
	return nil
}

// noWork makes of ErrNoWork what it is to a loop.
func noWork(err error) error {
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil
	}
	return err
}
