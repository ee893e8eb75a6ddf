package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is enqueued?

// produce enqueues until the process is to be quiet.
func (w *workload) produce(rng *rand.Rand, name string) {
	for n := 0; w.loud.Err() == nil; n++ {
		began := time.Now()
		key := fmt.Sprintf("%s-%s-%d", w.process(), name, n)
		switch p := rng.IntN(100); {
		case p < 45:
			w.enqueueWork(rng, key, 1, false)
		case p < 60:
			w.enqueueWork(rng, key, 2+rng.IntN(15), false)
		case p < 70:
			w.enqueueWork(rng, key, 1+rng.IntN(3), true)
		default:
			w.enqueueMessages(rng, key, 1+rng.IntN(3))
		}
		w.rest(rng, began, 20*time.Millisecond, 250*time.Millisecond)
	}
}

func (w *workload) enqueueWork(rng *rand.Rand, key string, count int, inTx bool) {
	var items []pgwake.WorkEnqueue
	var lines []entry
	for i := range count {
		j := job{Key: fmt.Sprintf("%s-%d", key, i), Do: kindOfWork(rng)}
		o := pgwake.EnqueueOptions{Namespace: namespaces[rng.IntN(len(namespaces))]}
		line := entry{Key: j.Key, Do: j.Do}
		if j.Do == doSolo {
			o.Namespace = solo
		}
		if rng.IntN(5) == 0 {
			o.Priority = rng.IntN(10)
		}
		if rng.IntN(5) == 0 {
			o.Delay = between(rng, time.Millisecond, time.Second)
		}
		if rng.IntN(8) == 0 {
			o.DedupKey = fmt.Sprint("d", rng.IntN(20))
			line.Dedup = o.Namespace + " " + o.DedupKey
		}
		line.Delay = o.Delay
		item := pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "chaos", Input: j.json()}, EnqueueOptions: o}
		if inSession(rng, j.Do, &item) {
			line.Session, line.Dedup = item.Session, ""
		}
		items, lines = append(items, item), append(lines, line)
	}
	commit := rng.IntN(4) > 0
	w.enqueue(lines, func(ctx context.Context) (added []pgwake.Enqueued, err error) {
		if !inTx {
			return w.provider.EnqueueForWorkerMany(ctx, items)
		}
		err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			if added, err = w.provider.EnqueueForWorkerManyTx(ctx, tx, items); err != nil {
				return err
			}
			nap(ctx, between(rng, 0, 20*time.Millisecond))
			if !commit {
				return errRevoked
			}
			return nil
		})
		return added, err
	})
}

func kindOfWork(rng *rand.Rand) string {
	switch p := rng.IntN(100); {
	case p < 60:
		return doAck
	case p < 88:
		return doEffect
	case p < 98:
		return doAbandon
	case p < 99:
		return []string{doHang, doHang, doSolo}[rng.IntN(3)]
	}
	return doRenew
}

func (w *workload) enqueueMessages(rng *rand.Rand, key string, count int) {
	var messages []pgwake.MessageEnqueue
	var lines []entry
	for i := range count {
		instance := fmt.Sprint("instance-", rng.IntN(instances))
		j := job{Key: fmt.Sprintf("%s-%d", key, i), Do: doTurn, Out: rng.IntN(3) == 0, Again: rng.IntN(6) == 0}
		o := pgwake.EnqueueOptions{}
		if rng.IntN(8) == 0 {
			o.Delay = between(rng, time.Millisecond, time.Second)
		}
		messages = append(messages, pgwake.MessageEnqueue{Message: message(instance, j), EnqueueOptions: o})
		lines = append(lines, entry{Key: j.Key, Do: j.Do, Instance: instance, Delay: o.Delay})
	}
	w.enqueue(lines, func(ctx context.Context) ([]pgwake.Enqueued, error) {
		return w.provider.EnqueueForOrchestratorMany(ctx, messages)
	})
}

func message(instance string, j job) pgwake.Message {
	return pgwake.Message{Instance: instance, Kind: "event", Data: j.json()}
}

// sendProbes sends, until the process is to be quiet, work items to a node at random and messages to an
// instance of its own, some of them delayed.
func (w *workload) sendProbes(rng *rand.Rand) {
	for n := 0; w.loud.Err() == nil; n++ {
		j := job{Key: fmt.Sprintf("%s-probe-%d", w.process(), n), Do: doProbe}
		line := entry{Key: j.Key, Do: j.Do}
		o := &pgwake.EnqueueOptions{}
		if rng.IntN(3) == 0 {
			o.Delay = between(rng, 0, 500*time.Millisecond)
			line.Delay = o.Delay
		}
		call := func(ctx context.Context) ([]pgwake.Enqueued, error) {
			return one(w.provider.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "probe", Input: j.json()}, o))
		}
		if n%4 == 3 {
			line.Instance = fmt.Sprint("echo-", w.Node)
			call = func(ctx context.Context) ([]pgwake.Enqueued, error) {
				return one(w.provider.EnqueueForOrchestrator(ctx, message(line.Instance, j), o))
			}
		} else {
			o.Namespace = probeNamespace(separates + rng.IntN(w.Nodes-separates))
		}
		w.enqueue([]entry{line}, call)
		nap(w.loud, between(rng, 200*time.Millisecond, 800*time.Millisecond))
	}
}

func one(added pgwake.Enqueued, err error) ([]pgwake.Enqueued, error) {
	return []pgwake.Enqueued{added}, err
}
