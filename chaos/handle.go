package main

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how is what is due taken, and what becomes of it?

// fetchWork takes work items, n at a time, until the process is to end.
func (w *workload) fetchWork(rng *rand.Rand, o *pgwake.FetchOptions, n int) {
	for w.alive.Err() == nil {
		ctx, cancel := patience(w.alive, rng)
		items, err := w.provider.FetchWorkItems(ctx, n, o)
		none := w.noFetch(ctx, err)
		if cancel(); none {
			continue
		}
		if n > 1 {
			w.handleBatch(items)
			continue
		}
		w.handle(rng, items[0])
	}
}

// patience is how long a dispatcher waits: most until the process ends; some give up at any moment, or in the
// middle of the first query.
func patience(life context.Context, rng *rand.Rand) (calling, context.CancelFunc) {
	most := []time.Duration{300 * time.Millisecond, 3 * time.Millisecond}
	if i := rng.IntN(20); i < len(most) {
		ctx, cancel := context.WithTimeout(life, between(rng, 0, most[i]))
		return fickle(ctx), cancel
	}
	ctx, cancel := context.WithCancel(life)
	return fickle(ctx), cancel
}

// noFetch reports whether a fetch has brought nothing, and takes note if that is for an error.
func (w *workload) noFetch(ctx calling, err error) bool {
	if err != nil && !errors.Is(err, pgwake.ErrNoWork) {
		w.failed(ctx, "fetch", err)
		nap(w.alive, 50*time.Millisecond)
	}
	return err != nil
}

// take writes down what is in hand.
func (w *workload) take(item *pgwake.ClaimedWorkItem) (j job, claim entry) {
	_ = json.Unmarshal(item.Input, &j)
	claim = entry{Key: j.Key, ID: item.ID, Token: string(item.LockToken), Until: w.local(item.LockedUntil)}
	if item.Session != "" {
		claim.Session, claim.Due = item.Session, w.local(item.DueAt)
	}
	w.ledger.write(got, claim)
	return j, claim
}

func (w *workload) handleBatch(items []*pgwake.ClaimedWorkItem) {
	var tokens []pgwake.LockToken
	var plain []entry
	for _, item := range items {
		j, claim := w.take(item)
		if hasEffect(j.Do) {
			w.finish(acking, []entry{claim}, nil, func(ctx context.Context) error { return w.effect(ctx, claim) })
			continue
		}
		tokens, plain = append(tokens, item.LockToken), append(plain, claim)
	}
	if len(tokens) == 0 {
		return
	}
	w.ledger.write(acking, plain...)
	ctx, cancel := verb(context.Background())
	defer cancel()
	err := w.provider.AckWorkItems(ctx, tokens)
	lost := map[string]bool{}
	var some *pgwake.LostLocksError
	if errors.As(err, &some) {
		for _, t := range some.Tokens {
			lost[string(t)] = true
		}
	} else if err != nil {
		w.failed(ctx, "ack", err)
		return
	}
	for _, claim := range plain {
		if lost[claim.Token] {
			w.ledger.write(refused, claim)
		} else {
			w.ledger.write(acked, claim)
		}
	}
}

func (w *workload) handle(rng *rand.Rand, item *pgwake.ClaimedWorkItem) {
	j, claim := w.take(item)
	first := item.Attempt == 1
	ack := func(ctx context.Context) error { return w.provider.AckWorkItem(ctx, item.LockToken, nil) }
	switch {
	case j.Do == doAck:
		nap(w.alive, between(rng, 0, 30*time.Millisecond))
	case j.Do == doAbandon && first:
		claim.Delay = between(rng, 0, 300*time.Millisecond)
		w.finish(returning, []entry{claim}, nil, func(ctx context.Context) error {
			return w.provider.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: claim.Delay})
		})
		return
	case (j.Do == doHang || j.Do == doSolo) && first:
		if !w.overstay(claim.Until) {
			return
		}
	case j.Do == doRenew:
		nap(w.alive, lease/2)
		if !w.renew([]entry{claim}, func(ctx context.Context) (time.Time, error) {
			return w.provider.RenewWorkItemLock(ctx, item.LockToken, lease)
		}) {
			return
		}
		nap(w.alive, time.Until(w.local(item.LockedUntil))+lease/4)
	case j.Do == doReply:
		done := job{Key: j.Key + ".done", Do: doTurn}
		m := message(j.Instance, done)
		w.finish(acking, []entry{claim}, []entry{{Key: done.Key, Do: doTurn, Instance: j.Instance}},
			func(ctx context.Context) error { return w.provider.AckWorkItem(ctx, item.LockToken, &m) })
		return
	}
	if hasEffect(j.Do) {
		ack = func(ctx context.Context) error { return w.effect(ctx, claim) }
	}
	w.finish(acking, []entry{claim}, nil, ack)
}

// effect inserts a row and acks, in one transaction.
func (w *workload) effect(ctx context.Context, claim entry) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, insertEffect, claim.Key, claim.Token); err != nil {
			return err
		}
		return w.provider.AckWorkItemTx(ctx, tx, pgwake.LockToken(claim.Token), nil)
	})
}

// overstay hangs until a lease has ended. It reports false if the process is to end before.
func (w *workload) overstay(until time.Time) bool {
	return nap(w.alive, time.Until(until)+2*surelyOver)
}

// fetchTurns takes turns of instances until the process is to end.
func (w *workload) fetchTurns(rng *rand.Rand) {
	for w.alive.Err() == nil {
		ctx, cancel := patience(w.alive, rng)
		turn, err := w.provider.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{LockTimeout: lease})
		none := w.noFetch(ctx, err)
		if cancel(); none {
			continue
		}
		w.handleTurn(rng, turn)
	}
}

// handleTurn puts each message into the history, and sends what it asks for.
func (w *workload) handleTurn(rng *rand.Rand, turn *pgwake.OrchestrationItem) {
	ack := pgwake.OrchestrationAck{ExecutionID: turn.ExecutionID, Metadata: pgwake.Metadata{Name: "chaos"}}
	next := int64(1)
	if n := len(turn.History); n > 0 {
		next = turn.History[n-1].ID + 1
	}
	var claims, sends []entry
	probed := false
	for i, m := range turn.Messages {
		var j job
		_ = json.Unmarshal(m.Data, &j)
		probed = probed || j.Do == doProbe
		claims = append(claims, entry{Key: j.Key, ID: m.ID, Token: string(turn.LockToken), Until: w.local(turn.LockedUntil)})
		event := remembered{Key: j.Key, ID: m.ID, Token: string(turn.LockToken)}
		if j.Out {
			out := job{Key: j.Key + ".out", Do: doReply, Instance: turn.Instance}
			ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "chaos", Input: out.json()}})
			sends, event.Sends = append(sends, entry{Key: out.Key, Do: out.Do}), append(event.Sends, out.Key)
		}
		if j.Again {
			again := job{Key: j.Key + ".again", Do: doTurn}
			o := pgwake.EnqueueOptions{Delay: between(rng, 0, 500*time.Millisecond)}
			ack.Messages = append(ack.Messages, pgwake.MessageEnqueue{Message: message(turn.Instance, again), EnqueueOptions: o})
			sends = append(sends, entry{Key: again.Key, Do: again.Do, Instance: turn.Instance, Delay: time.Second})
			event.Sends = append(event.Sends, again.Key)
		}
		content, _ := json.Marshal(event)
		ack.History = append(ack.History, pgwake.Event{ID: next + int64(i), Type: "message", Data: content})
	}
	w.ledger.write(got, claims...)
	if !probed {
		switch p := rng.IntN(100); {
		case p < 5: // without a delay, which would let younger messages pass
			w.finish(returning, claims, nil, func(ctx context.Context) error {
				return w.provider.AbandonOrchestrationItem(ctx, turn.LockToken, nil)
			})
			return
		case p < 7:
			if !w.overstay(w.local(turn.LockedUntil)) {
				return
			}
		case p < 10:
			nap(w.alive, lease/4)
			if !w.renew(claims, func(ctx context.Context) (time.Time, error) {
				return w.provider.RenewOrchestrationItemLock(ctx, turn.LockToken, lease)
			}) {
				return
			}
		default:
			nap(w.alive, between(rng, 0, 10*time.Millisecond))
		}
	}
	w.finish(acking, claims, sends, func(ctx context.Context) error {
		return w.provider.AckOrchestrationItem(ctx, turn.LockToken, ack)
	})
}
