package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what does a process do while it soaks?
//
// All that the library is for, mixed: two Providers that stay and one that comes and goes, each with dispatchers of
// many kinds, and producers of every kind. Nothing accumulates by itself: instances end and are deleted, those that
// stay continue as new and are pruned, copies in the archive expire. So whatever grows has been left behind. There are
// many more dispatchers than work for them, so that nothing has a reason to be late.

// The paces of producers, which the parent sets.
const (
	paceBusy    = "busy"
	paceTrickle = "trickle" // so rarely that a wake-up that is lost is not made good by the next one
	paceIdle    = "idle"
)

const (
	soakLease = 30 * time.Second // which no handler comes near

	briefNamespace = "brief" // with few items, for dispatchers that are gone after a moment
	gpu            = "gpu"   // a tag
	sessions       = 6

	// A lane that nobody uses is dropped after a minute, by the next fallback.
	briefLife = time.Minute + 2*fallbackInterval
)

var soakNamespaces = []string{"default", "default", "bulk", "bulk", "third"}

// The instances. The digit in the name of a flow is how many messages it lives on.
const (
	flow    = "flow"
	watched = "watched" // a flow that somebody waits for, and deletes
	eternal = "eternal" // continues as new for ever
)

// soak starts everything.
func (w *workload) soak() {
	w.pace.Store(new(paceBusy))
	w.members.joined(w.provider)
	w.loop("first", func(rng *rand.Rand) { w.dispatch(w.alive, rng, w.provider, true) })
	w.loop("second", func(rng *rand.Rand) {
		w.member(w.alive, rng, &pgwake.Config{HistoryCache: 1 << 20, ArchiveFor: 5 * time.Second}, true)
	})
	w.loop("comes and goes", func(rng *rand.Rand) {
		for w.alive.Err() == nil {
			life, cancel := context.WithTimeout(w.alive, between(rng, time.Second, 3*time.Second))
			w.member(life, rng, &pgwake.Config{}, false)
			cancel()
			nap(w.alive, between(rng, 0, 300*time.Millisecond))
		}
	})
	w.loop("brief", w.fetchBriefly)
	for i := range 3 {
		w.loop(fmt.Sprint("produce", i), func(rng *rand.Rand) { w.soakProduce(rng, fmt.Sprintf("%s-%d", w.process(), i)) })
	}
	w.loop("slow", w.produceSlowly)
	w.loop("watch", w.watchFlows)
	w.loop("tidy", w.tidy)
	for _, defect := range w.Plant {
		w.loops.Go(func() { plants[defect](w) })
	}
}

// dispatch takes what is due by many dispatchers, until the life ends and all of them have finished.
func (w *workload) dispatch(life context.Context, rng *rand.Rand, p *pgwake.Provider, whole bool) {
	var all sync.WaitGroup
	start := func(n int, f func(*rand.Rand)) {
		for range n {
			own := rand.New(rand.NewPCG(w.Seed, rng.Uint64()))
			all.Go(func() { f(own) })
		}
	}
	work := func(n int, o pgwake.FetchOptions) {
		o.LockTimeout = soakLease
		start(n, func(rng *rand.Rand) { w.soakWork(life, rng, p, &o) })
	}
	turns := func(n int, o pgwake.FetchOptions) {
		o.LockTimeout = soakLease
		start(n, func(rng *rand.Rand) { w.soakTurns(life, rng, p, &o) })
	}
	work(4, pgwake.FetchOptions{})
	turns(2, pgwake.FetchOptions{})
	if whole {
		work(4, pgwake.FetchOptions{PollTimeout: time.Second})
		work(2, pgwake.FetchOptions{Namespaces: []string{"bulk", "third"}})
		work(2, pgwake.FetchOptions{Tags: pgwake.Tags(gpu)})
		work(2, pgwake.FetchOptions{Tags: pgwake.AnyTag(), Namespaces: []string{"default"}})
		work(3, pgwake.FetchOptions{Session: &pgwake.SessionOptions{Owner: w.process(), LockTimeout: time.Second}})
		start(2, func(rng *rand.Rand) { w.soakBatches(life, p) })
		start(2, func(rng *rand.Rand) { w.soakChain(life, rng, p) })
		turns(3, pgwake.FetchOptions{WithoutHistory: true, PollTimeout: time.Second})
		turns(2, pgwake.FetchOptions{Namespaces: []string{"default", "bulk"}})
	}
	all.Wait()
}

// fetchBriefly has dispatchers come that fetch what nobody has fetched before, and go.
func (w *workload) fetchBriefly(rng *rand.Rand) {
	for n := 0; nap(w.alive, between(rng, 0, time.Second)); n++ {
		w.members.mu.Lock()
		w.members.brief = append(w.members.brief, time.Now())
		w.members.mu.Unlock()
		life, cancel := context.WithTimeout(w.alive, between(rng, 50*time.Millisecond, time.Second))
		w.soakWork(life, rng, w.provider, &pgwake.FetchOptions{
			LockTimeout: soakLease, Namespaces: []string{briefNamespace, fmt.Sprintf("none-%d-%d", w.Node, n)},
		})
		cancel()
	}
}

func (w *workload) soakWork(life context.Context, rng *rand.Rand, p *pgwake.Provider, o *pgwake.FetchOptions) {
	for life.Err() == nil {
		ctx, cancel := patience(life, rng)
		item, err := p.FetchWorkItem(ctx, o)
		none := w.noFetch(ctx, err)
		if cancel(); none {
			continue
		}
		w.soakItem(rng, p, item)
	}
}

// takeSoaked writes down what is in hand.
func (w *workload) takeSoaked(item *pgwake.ClaimedWorkItem) (j job, claim entry) {
	_ = json.Unmarshal(item.Input, &j)
	claim = entry{Key: j.Key, ID: item.ID, Namespace: item.Namespace, Tag: item.Tag, Session: item.Session,
		Token: string(item.LockToken), Until: item.LockedUntil, Due: item.DueAt}
	w.ledger.write(got, claim)
	return j, claim
}

func (w *workload) soakItem(rng *rand.Rand, p *pgwake.Provider, item *pgwake.ClaimedWorkItem) {
	j, claim := w.takeSoaked(item)
	token := item.LockToken
	nap(context.Background(), between(rng, 0, 5*time.Millisecond))
	switch {
	case j.Do == doAbandon && item.Attempt == 1:
		o := &pgwake.AbandonOptions{Delay: between(rng, 0, time.Second), Error: "again"}
		claim.Delay = o.Delay
		w.finish(returning, []entry{claim}, nil, func(ctx context.Context) error { return p.AbandonWorkItem(ctx, token, o) })
		return
	case j.Do == doRenew:
		if !w.renew([]entry{claim}, func(ctx context.Context) (time.Time, error) {
			return p.RenewWorkItemLock(ctx, token, soakLease)
		}) {
			return
		}
	case j.Do == doReply:
		done := job{Key: j.Key + ".done", Do: doTurn}
		m := message(j.Instance, done)
		w.finish(acking, []entry{claim}, []entry{{Key: done.Key, Do: doTurn, Instance: j.Instance}},
			func(ctx context.Context) error { return p.AckBatched(ctx, token, &m) })
		return
	}
	w.finish(acking, []entry{claim}, nil, func(ctx context.Context) error {
		switch rng.IntN(4) {
		case 0:
			return p.AckWorkItem(ctx, token, nil)
		case 1:
			return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error { return p.AckWorkItemTx(ctx, tx, token, nil) })
		}
		return p.AckBatched(ctx, token, nil)
	})
}

func (w *workload) soakBatches(life context.Context, p *pgwake.Provider) {
	for life.Err() == nil {
		ctx := fickle(life)
		items, err := p.FetchWorkItems(ctx, 5, &pgwake.FetchOptions{LockTimeout: soakLease, Namespaces: []string{"bulk"}})
		if w.noFetch(ctx, err) {
			continue
		}
		var tokens []pgwake.LockToken
		var claims []entry
		for _, item := range items {
			_, claim := w.takeSoaked(item)
			tokens, claims = append(tokens, item.LockToken), append(claims, claim)
		}
		w.finish(acking, claims, nil, func(ctx context.Context) error { return p.AckWorkItems(ctx, tokens) })
	}
}

// soakChain acknowledges each item by the fetch of the next.
func (w *workload) soakChain(life context.Context, rng *rand.Rand, p *pgwake.Provider) {
	var last []entry
	for life.Err() == nil || len(last) > 0 {
		// To the end, since nobody would know what an interrupted one has acknowledged.
		o := &pgwake.FetchOptions{LockTimeout: soakLease, PollTimeout: 2 * time.Second, Namespaces: []string{"default", "third"}}
		if o.NoWait = life.Err() != nil; o.NoWait {
			o.PollTimeout, o.Namespaces = 0, []string{} // the last ack alone
		}
		for _, claim := range last {
			o.Ack = append(o.Ack, pgwake.LockToken(claim.Token))
		}
		if len(last) > 0 {
			w.ledger.write(acking, last...)
		}
		ctx, cancel := context.WithTimeout(context.Background(), o.PollTimeout+verbTimeout)
		item, err := p.FetchWorkItem(ctx, o)
		none := w.noFetch(calling{Context: ctx}, err)
		cancel()
		var lost *pgwake.LostLocksError
		switch {
		case errors.As(err, &lost):
			w.ledger.write(refused, last...)
		case len(last) > 0 && (err == nil || errors.Is(err, pgwake.ErrNoWork)):
			w.ledger.write(acked, last...)
		case len(last) > 0: // nobody knows; if it did, this ack is refused
			w.try("ack after a failed fetch", func(ctx context.Context) error {
				err := p.AckWorkItem(ctx, o.Ack[0], nil)
				if err == nil || errors.Is(err, pgwake.ErrLockLost) {
					w.ledger.write(acked, last...)
					return nil
				}
				return err
			})
		}
		last = nil
		if none {
			continue
		}
		var j job
		if _ = json.Unmarshal(item.Input, &j); j.Do != doAck {
			w.soakItem(rng, p, item)
			continue
		}
		_, claim := w.takeSoaked(item)
		last = []entry{claim}
	}
}

func (w *workload) soakTurns(life context.Context, rng *rand.Rand, p *pgwake.Provider, o *pgwake.FetchOptions) {
	for life.Err() == nil {
		ctx, cancel := patience(life, rng)
		turn, err := p.FetchOrchestrationItem(ctx, o)
		none := w.noFetch(ctx, err)
		if cancel(); none {
			continue
		}
		w.soakTurn(rng, p, turn)
	}
}

// soakTurn puts each message into the history, sends what it asks for, and ends the instance after its last.
func (w *workload) soakTurn(rng *rand.Rand, p *pgwake.Provider, turn *pgwake.OrchestrationItem) {
	ack := pgwake.OrchestrationAck{ExecutionID: turn.ExecutionID, Metadata: pgwake.Metadata{Name: "soak"},
		KV: []pgwake.KVUpdate{{Key: "turn", Value: fmt.Sprint(turn.LastEventID)}}}
	timeout := turn.Instance + ":timeout"
	var claims, sends []entry
	for i, m := range turn.Messages {
		var j job
		_ = json.Unmarshal(m.Data, &j)
		claims = append(claims, entry{Key: j.Key, ID: m.ID, Token: string(turn.LockToken), Until: turn.LockedUntil})
		if j.Out { // an activity, and a time by which it is to have answered
			out := job{Key: j.Key + ".out", Do: doReply, Instance: turn.Instance}
			ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{
				WorkItem: pgwake.WorkItem{Name: "soak", Input: out.json(), Instance: turn.Instance, ExecutionID: turn.ExecutionID, ActivityID: m.ID},
			})
			ack.Messages = append(ack.Messages, pgwake.MessageEnqueue{Message: message(turn.Instance, job{Key: timeout}),
				EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Hour, DedupKey: timeout}})
			sends = append(sends, entry{Key: out.Key, Do: out.Do})
		}
		if j.Again { // a timer
			again := job{Key: j.Key + ".again", Do: doTurn}
			o := pgwake.EnqueueOptions{Delay: between(rng, 0, 2*time.Second)}
			ack.Messages = append(ack.Messages, pgwake.MessageEnqueue{Message: message(turn.Instance, again), EnqueueOptions: o})
			sends = append(sends, entry{Key: again.Key, Do: again.Do, Instance: turn.Instance, Delay: o.Delay})
		}
		content, _ := json.Marshal(remembered{Key: j.Key, ID: m.ID})
		ack.History = append(ack.History, pgwake.Event{ID: turn.LastEventID + int64(i) + 1, Type: "message", Data: content})
	}
	kind, rest, _ := strings.Cut(turn.Instance, "-")
	events := turn.LastEventID + int64(len(turn.Messages))
	ended := kind != eternal && events >= int64(rest[0]-'0')
	switch {
	case ended:
		ack.Metadata.Status, ack.CancelMessages = pgwake.StatusCompleted, []string{timeout}
	case kind == eternal && events > 20:
		ack.Metadata.Status = pgwake.StatusContinuedAsNew
		next := job{Key: claims[0].Key + ".next", Do: doTurn}
		m := message(turn.Instance, next)
		m.Kind, m.Name, m.ExecutionID = pgwake.MessageContinueAsNew, "soak", turn.ExecutionID+1
		ack.Messages = append(ack.Messages, pgwake.MessageEnqueue{Message: m})
		sends = append(sends, entry{Key: next.Key, Do: doTurn, Instance: turn.Instance})
	}
	w.ledger.write(got, claims...)
	nap(context.Background(), between(rng, 0, 5*time.Millisecond))
	if rng.IntN(20) == 0 {
		o := &pgwake.AbandonOptions{Delay: between(rng, 0, 200*time.Millisecond)}
		for i := range claims {
			claims[i].Delay = o.Delay
		}
		w.finish(returning, claims, nil, func(ctx context.Context) error { return p.AbandonOrchestrationItem(ctx, turn.LockToken, o) })
		return
	}
	w.finish(acking, claims, sends, func(ctx context.Context) error { return p.AckOrchestrationItem(ctx, turn.LockToken, ack) })
	if ended && kind == flow && rng.IntN(2) == 0 {
		w.deleted(p, turn.Instance)
	}
}

func (w *workload) deleted(p *pgwake.Provider, instance string) {
	w.try("delete instance", func(ctx context.Context) error {
		if _, err := p.DeleteInstance(ctx, instance, nil); !errors.Is(err, pgwake.ErrNotFound) { // tidied away
			return err
		}
		return nil
	})
}

// try makes a call that is not in the ledger.
func (w *workload) try(what string, call func(context.Context) error) {
	ctx, cancel := verb(context.Background())
	defer cancel()
	if err := call(ctx); err != nil {
		w.failed(ctx, what, err)
	}
}

// tidy does what an operator's cron would.
func (w *workload) tidy(*rand.Rand) {
	for nap(w.alive, time.Second) {
		w.try("tidy instances", func(ctx context.Context) error {
			infos, err := w.provider.ListInstances(ctx, &pgwake.ListOptions{Status: pgwake.StatusCompleted, Limit: 1000})
			if err != nil {
				return err
			}
			old := []string{}
			for _, info := range infos {
				if strings.HasPrefix(info.Instance, flow) && info.UpdatedAt.Before(time.Now().Add(-time.Second)) {
					old = append(old, info.Instance)
				}
			}
			_, err = w.provider.DeleteInstancesBulk(ctx, &pgwake.BulkFilter{Instances: old})
			return err
		})
		w.try("prune executions", func(ctx context.Context) error {
			_, err := w.provider.PruneExecutionsBulk(ctx, nil, &pgwake.PruneOptions{KeepLast: 2})
			return err
		})
		w.try("tidy sessions", func(ctx context.Context) error {
			_, err := w.provider.CleanupSessions(ctx)
			return err
		})
	}
}
