package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is enqueued while it soaks, and in which ways?

// soakProduce enqueues, at the pace that is set, until the process is to be quiet.
func (w *workload) soakProduce(rng *rand.Rand, name string) {
	for n := 0; w.loud.Err() == nil; n++ {
		key := fmt.Sprintf("%s-%d", name, n)
		pause := between(rng, 40*time.Millisecond, 200*time.Millisecond)
		switch *w.pace.Load() {
		case paceIdle:
			nap(w.loud, 20*time.Millisecond)
			continue
		case paceTrickle:
			w.enqueueOneWay(rng, key, 1)
			pause = between(rng, 100*time.Millisecond, 700*time.Millisecond)
		default:
			switch p := rng.IntN(100); {
			case p < 2:
				w.enqueueOneWay(rng, key, 20+rng.IntN(40))
			case p < 15:
				w.enqueueOneWay(rng, key, 2+rng.IntN(6))
			default:
				w.enqueueOneWay(rng, key, 1)
			}
		}
		nap(w.loud, pause)
	}
}

// The ways to enqueue.
const (
	byLibrary  = "library"
	byTx       = "tx"
	byFunction = "function"
	byInsert   = "insert"
)

// enqueueOneWay enqueues items, or messages, in one of the ways.
func (w *workload) enqueueOneWay(rng *rand.Rand, key string, count int) {
	if rng.IntN(3) == 0 {
		w.soakMessages(rng, key, min(count, 5))
		return
	}
	w.soakEnqueue(rng, key, count, []string{byLibrary, byLibrary, byTx, byFunction, byInsert}[rng.IntN(5)], 0)
}

// produceSlowly holds transactions open that have enqueued something: now and then, for seconds.
func (w *workload) produceSlowly(rng *rand.Rand) {
	for n := 0; nap(w.loud, between(rng, 2*time.Second, 5*time.Second)); n++ {
		if *w.pace.Load() != paceIdle {
			w.soakEnqueue(rng, fmt.Sprintf("%s-slow-%d", w.process(), n), 1, byTx, between(rng, 500*time.Millisecond, 2*time.Second))
		}
	}
}

func (w *workload) soakEnqueue(rng *rand.Rand, key string, count int, way string, hold time.Duration) {
	var items []pgwake.WorkEnqueue
	var lines []entry
	for i := range count {
		j := job{Key: fmt.Sprintf("%s-%d", key, i), Do: doAck}
		switch p := rng.IntN(100); {
		case p < 10:
			j.Do = doAbandon
		case p < 15:
			j.Do = doRenew
		}
		item := pgwake.WorkItem{Name: "soak", Input: j.json()}
		o := pgwake.EnqueueOptions{Namespace: soakNamespaces[rng.IntN(len(soakNamespaces))], Priority: max(rng.IntN(14)-4, 0)}
		switch p := rng.IntN(100); {
		case p < 10:
			item.Tag, o.Namespace = gpu, "default"
		case p < 20:
			item.Session = fmt.Sprint("session-", rng.IntN(sessions))
		case p < 23:
			o.Namespace = briefNamespace
		}
		if rng.IntN(4) == 0 {
			o.Delay = between(rng, time.Millisecond, 3*time.Second)
		}
		line := entry{Key: j.Key, Do: j.Do, Delay: o.Delay}
		if rng.IntN(10) == 0 && way != byInsert && way != byFunction {
			o.DedupKey = fmt.Sprintf("%s-%d", way, rng.IntN(20))
			line.Dedup = o.Namespace + " " + o.DedupKey
		}
		items = append(items, pgwake.WorkEnqueue{WorkItem: item, EnqueueOptions: o})
		lines = append(lines, line)
	}
	commit := rng.IntN(5) > 0
	w.enqueue(lines, func(ctx context.Context) ([]pgwake.Enqueued, error) {
		switch way {
		case byLibrary:
			return w.provider.EnqueueForWorkerMany(ctx, items)
		case byFunction, byInsert:
			return w.enqueueBySQL(ctx, items, way)
		}
		return w.inTx(ctx, func(tx pgx.Tx) ([]pgwake.Enqueued, error) {
			added, err := w.provider.EnqueueForWorkerManyTx(ctx, tx, items)
			if err != nil {
				return nil, err
			}
			nap(ctx, hold+between(rng, 0, 20*time.Millisecond))
			if !commit {
				return nil, errRevoked
			}
			return added, nil
		})
	})
}

// inTx enqueues in a transaction. Before that commits nobody can have the items, so they are not due before.
func (w *workload) inTx(ctx context.Context, enqueue func(pgx.Tx) ([]pgwake.Enqueued, error)) (added []pgwake.Enqueued, err error) {
	var committing time.Time
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		added, err = enqueue(tx)
		committing = time.Now()
		return err
	})
	for i, a := range added {
		if a.DueAt.Before(committing) {
			added[i].DueAt = committing
		}
	}
	return added, err
}

// enqueueBySQL is a producer that does not know the library.
func (w *workload) enqueueBySQL(ctx context.Context, items []pgwake.WorkEnqueue, way string) ([]pgwake.Enqueued, error) {
	text := `INSERT INTO pgwake.worker_queue (name, input, namespace, priority, visible_at, tag, session_id)
		VALUES ($1, $2, $3, $4, clock_timestamp() + $5::interval, $6, nullif($7, '')) RETURNING id, visible_at`
	if way == byFunction {
		text = `SELECT pgwake.enqueue_work($1, $2, $3, $4, $5, NULL, NULL, $6, nullif($7, '')), clock_timestamp() + $5::interval`
	}
	return w.inTx(ctx, func(tx pgx.Tx) (added []pgwake.Enqueued, err error) {
		for _, i := range items {
			var a pgwake.Enqueued
			if err := tx.QueryRow(ctx, text, i.Name, i.Input, i.Namespace, i.Priority, i.Delay, i.Tag, i.Session).Scan(&a.ID, &a.DueAt); err != nil {
				return nil, err
			}
			added = append(added, a)
		}
		return added, nil
	})
}

func (w *workload) soakMessages(rng *rand.Rand, key string, count int) {
	var messages []pgwake.MessageEnqueue
	var lines []entry
	for i := range count {
		j := job{Key: fmt.Sprintf("%s-%d", key, i), Do: doTurn}
		m := pgwake.MessageEnqueue{}
		if rng.IntN(3) == 0 {
			m.Message = message(fmt.Sprintf("%s-%d", eternal, rng.IntN(4)), j)
		} else {
			m.Message = w.newFlow(rng, flow, &j)
		}
		if rng.IntN(6) == 0 {
			m.Delay = between(rng, time.Millisecond, 2*time.Second)
		}
		messages = append(messages, m)
		lines = append(lines, entry{Key: j.Key, Do: j.Do, Instance: m.Instance, Delay: m.Delay})
	}
	inTx := rng.IntN(3) == 0
	w.enqueue(lines, func(ctx context.Context) ([]pgwake.Enqueued, error) {
		if !inTx {
			return w.provider.EnqueueForOrchestratorMany(ctx, messages)
		}
		return w.inTx(ctx, func(tx pgx.Tx) ([]pgwake.Enqueued, error) {
			return w.provider.EnqueueForOrchestratorManyTx(ctx, tx, messages)
		})
	})
}

// newFlow is the message that starts an instance, and whether that is to have an activity and a timer.
func (w *workload) newFlow(rng *rand.Rand, kind string, j *job) pgwake.Message {
	j.Out, j.Again = rng.IntN(2) == 0, rng.IntN(3) == 0
	life := 1
	if j.Out {
		life++
	}
	if j.Again {
		life++
	}
	m := message(fmt.Sprintf("%s-%d-%s", kind, life, j.Key), *j)
	m.Kind, m.Name, m.ExecutionID = pgwake.MessageStart, "soak", 1
	return m
}

// watchFlows starts flows and waits until they have ended.
func (w *workload) watchFlows(rng *rand.Rand) {
	for n := 0; nap(w.loud, between(rng, 200*time.Millisecond, 1500*time.Millisecond)); n++ {
		if *w.pace.Load() == paceIdle {
			continue
		}
		j := job{Key: fmt.Sprintf("%s-watched-%d", w.process(), n), Do: doTurn}
		m := w.newFlow(rng, watched, &j)
		w.enqueue([]entry{{Key: j.Key, Do: j.Do, Instance: m.Instance}}, func(ctx context.Context) ([]pgwake.Enqueued, error) {
			return one(w.provider.EnqueueForOrchestrator(ctx, m, nil))
		})
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_, err := w.provider.WaitForInstance(ctx, m.Instance)
		cancel()
		if err != nil {
			w.ledger.write(wrong, entry{Err: fmt.Sprintf("wait for %s: %v", m.Instance, err)})
			continue
		}
		w.deleted(w.provider, m.Instance)
	}
}
