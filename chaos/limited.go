package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: is a limit kept by Dispatchers, whatever goes wrong?
//
// Two processes have a schema of their own, since a limit in one namespace changes the claims of all. Each of them enqueues, and
// runs a Dispatcher with more places than may be in use. A handler writes down, again and again, that it has its item, and only if
// the row of the queue says so at that moment: it has had it from the first time to the last, by the server's clock, however
// late it noticed anything. At the end no more such stretches than the limit may overlap anywhere. One whose process was
// killed goes on until its lease ends, as the server had it: nobody gives it back before.

// limitedSchema is that of the dispatchers, the first processes of the deployment.
const (
	limitedSchema    = "limited"
	limitedNamespace = "default"
	dispatchers      = 2
	placesOfEach     = 2 // of a dispatcher
)

var limits = pgwake.Limits{MaxRunning: 3, MaxRunningPerKey: 2}

// stretchesTable is when handlers are known to have had their items. until is the end of the lease.
const stretchesTable = `CREATE TABLE stretches (item text, token text, key text NOT NULL, since timestamptz NOT NULL,
	seen timestamptz NOT NULL, until timestamptz NOT NULL, PRIMARY KEY (item, token))`

// insertStretch goes by when it came to the server, which is before its snapshot.
const insertStretch = `INSERT INTO stretches AS s (item, token, key, since, seen, until)
	SELECT $1, $2, q.key, statement_timestamp(), statement_timestamp(), q.visible_at FROM limited.worker_queue q
	 WHERE q.id = $3 AND q.lock_token::text = split_part($2, '/', 1) AND q.visible_at > statement_timestamp()
	ON CONFLICT (item, token) DO UPDATE SET seen = greatest(s.seen, excluded.seen), until = greatest(s.until, excluded.until)`

// dispatched reports whether a Dispatcher takes these, so that nobody knows when it acknowledges them or gives them back.
func dispatched(do string) bool { return do == doLimited || do == doLimitedTx }

// produceLimited enqueues what the dispatchers take, until the process is to be quiet.
func (w *workload) produceLimited(rng *rand.Rand) {
	for n := 0; w.loud.Err() == nil; n++ {
		began := time.Now()
		var items []pgwake.WorkEnqueue
		var lines []entry
		for i := range 1 + rng.IntN(6) { // more than may be in work at once
			j := job{Key: fmt.Sprintf("%s-limited-%d-%d", w.process(), n, i), Do: []string{doLimited, doLimitedTx}[rng.IntN(2)]}
			items = append(items, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: j.Do, Key: fmt.Sprint("k", rng.IntN(3)), Input: j.json()}})
			lines = append(lines, entry{Key: j.Key, Do: j.Do})
		}
		w.enqueue(lines, func(ctx context.Context) ([]pgwake.Enqueued, error) {
			return w.provider.EnqueueForWorkerMany(ctx, items)
		})
		w.rest(rng, began, 50*time.Millisecond, 300*time.Millisecond)
	}
}

// dispatchLimited runs a Dispatcher until the process is to end.
func (w *workload) dispatchLimited(*rand.Rand) {
	d := dispatch.New(w.provider, &dispatch.Config{
		Concurrency: placesOfEach, LockTimeout: lease, MaxAttempts: dispatch.Unlimited, Begin: w.pool.Begin,
		Retry: dispatch.Backoff(20*time.Millisecond, 200*time.Millisecond), StopTimeout: time.Second, CancelTimeout: time.Second,
	})
	d.Handle(doLimited, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		_, err := w.have(ctx, item)
		return nil, err
	})
	dispatch.HandleTx(d, doLimitedTx, func(ctx context.Context, tx pgx.Tx, _ job) (struct{}, error) {
		claim, err := w.have(ctx, dispatch.ItemFrom(ctx))
		if err == nil {
			_, err = tx.Exec(ctx, insertEffect, claim.Key, claim.Token)
		}
		return struct{}{}, err
	})
	// A rollback on a connection that lost its peer keeps its handler for a while.
	if err := d.Run(w.alive); err != nil && !errors.Is(err, dispatch.ErrHandlersLeft) {
		w.ledger.write(wrong, entry{Err: fmt.Sprintf("dispatch: %v", err)})
	}
}

// have has an item in hand for a while, one in a hundred for longer than its first lease.
func (w *workload) have(ctx context.Context, item *pgwake.ClaimedWorkItem) (entry, error) {
	j, claim := w.take(item)
	rng := rand.New(rand.NewPCG(w.Seed, uint64(item.ID)))
	left := between(rng, 10*time.Millisecond, 150*time.Millisecond)
	if rng.IntN(100) == 0 {
		left = lease + lease/2
	}
	// From the end of the context on, the Dispatcher may give it back.
	letGo := context.AfterFunc(ctx, func() { w.ledger.write(returning, claim) })
	err := w.haveStretch(ctx, j, item)
	for end := time.Now().Add(left); err == nil && time.Now().Before(end); {
		nap(ctx, between(rng, 10*time.Millisecond, 50*time.Millisecond))
		err = w.haveStretch(ctx, j, item)
	}
	switch {
	case !letGo():
		return claim, cmp.Or(err, context.Cause(ctx))
	case err != nil:
		w.ledger.write(returning, claim)
		return claim, err
	}
	w.ledger.write(acking, claim)
	return claim, nil
}

func (w *workload) haveStretch(ctx context.Context, j job, item *pgwake.ClaimedWorkItem) error {
	ctx, cancel := context.WithTimeout(ctx, verbTimeout)
	defer cancel()
	tag, err := w.pool.Exec(ctx, insertStretch, j.Key, string(item.LockToken), item.ID)
	if err == nil && tag.RowsAffected() == 0 {
		err = pgwake.ErrLockLost
	}
	return err
}

// stretch is a time during which a handler had its item, as the server knows.
type stretch struct {
	item, token, key   string
	since, seen, until time.Time
}

// checkLimits: at no moment more items were had than may be, nor one by two.
func (j *judge) checkLimits(all []stretch) {
	var had []stretch
	byKey, byItem := map[string][]stretch{}, map[string][]stretch{}
	for _, s := range all {
		c := j.claims[s.item+s.token]
		if c == nil {
			j.complain("%s was had by token %s, which nobody got", s.item, s.token)
			continue
		}
		if c.tried == "" { // its process was killed
			s.seen = s.until
		}
		had = append(had, s)
		byKey[s.key] = append(byKey[s.key], s)
		byItem[s.item] = append(byItem[s.item], s)
	}
	j.v.stretches, j.v.running = len(had), j.atMost(limits.MaxRunning, "items in the namespace", had)
	for key, some := range byKey {
		j.v.runningPerKey = max(j.v.runningPerKey, j.atMost(limits.MaxRunningPerKey, "items with key "+key, some))
	}
	for item, some := range byItem {
		j.atMost(1, "claims of "+item, some)
	}
}

// atMost returns how many of these overlap at most, and complains if those are more than may be.
func (j *judge) atMost(limit int, of string, all []stretch) (most int) {
	slices.SortFunc(all, func(a, b stretch) int { return a.since.Compare(b.since) })
	var now []stretch
	for _, s := range all {
		now = slices.DeleteFunc(now, func(o stretch) bool { return !o.seen.After(s.since) })
		now = append(now, s)
		if most = max(most, len(now)); len(now) == limit+1 {
			var who []string
			for _, o := range now {
				who = append(who, fmt.Sprintf("%s by %s, %s to %s", o.item, o.token, o.since.Format(time.StampMicro), o.seen.Format(time.StampMicro)))
			}
			j.complain("%d %s at once, %d may be: %q", len(now), of, limit, who)
		}
	}
	return most
}
