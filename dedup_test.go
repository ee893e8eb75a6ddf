package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: for how long, and against what, is an item unique? The plain dedup key is in providertest.

func (n *node) enqueueUnique(t *testing.T, name string, o pgwake.EnqueueOptions) pgwake.Enqueued {
	t.Helper()
	if o.DedupKey == "" {
		o.DedupKey = "key"
	}
	added, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name}, &o)
	require.NoError(t, err)
	return added
}

func (n *node) done(t *testing.T, item *pgwake.ClaimedWorkItem) {
	t.Helper()
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
}

func TestDedupFor_WindowIsOpen_NothingIsAddedWhateverBecameOfTheItem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	window := pgwake.EnqueueOptions{DedupFor: time.Hour}
	first := n.enqueueUnique(t, "first", window)
	require.False(t, first.Duplicate)
	again := n.enqueueUnique(t, "again", window)
	require.Equal(t, pgwake.Enqueued{Duplicate: true, ID: first.ID, DueAt: again.DueAt}, withoutNow(again))
	require.True(t, again.DueAt.Equal(first.DueAt))
	n.done(t, n.take(t))
	for _, o := range []pgwake.EnqueueOptions{window, {}, {DedupScope: pgwake.DedupWaiting}, {DedupScope: pgwake.DedupQueuedOrDead}} {
		require.Equal(t, pgwake.Enqueued{Duplicate: true, ID: first.ID}, withoutNow(n.enqueueUnique(t, "again", o)), o)
	}
	require.False(t, n.enqueueUnique(t, "elsewhere", pgwake.EnqueueOptions{Namespace: "elsewhere", DedupFor: time.Hour}).Duplicate)
	require.False(t, n.enqueueUnique(t, "another", pgwake.EnqueueOptions{DedupKey: "another", DedupFor: time.Hour}).Duplicate)

	pgwaketest.Advance(t, n.Provider, time.Hour)
	next := n.enqueueUnique(t, "next", window)
	require.False(t, next.Duplicate)
	require.NotEqual(t, first.ID, next.ID)
	require.Equal(t, next.ID, n.enqueueUnique(t, "again", window).ID)
}

func TestDedupFor_KeyIsQueuedWithoutAWindow_NoWindowBegins(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	first := n.enqueueUnique(t, "first", pgwake.EnqueueOptions{})
	require.Equal(t, first.ID, n.enqueueUnique(t, "again", pgwake.EnqueueOptions{DedupFor: time.Hour}).ID)
	n.done(t, n.take(t))
	require.False(t, n.enqueueUnique(t, "next", pgwake.EnqueueOptions{}).Duplicate)
}

func TestDedupFor_SameKeyTwiceInABatch_TheFirstIsAdded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	var batch []pgwake.WorkEnqueue
	for _, key := range []string{"b", "a", "b", "", "a"} {
		e := pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "w"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: key}}
		if key != "" {
			e.DedupFor = time.Hour
		}
		batch = append(batch, e)
	}
	added, err := n.EnqueueForWorkerMany(t.Context(), batch)
	require.NoError(t, err)
	for i, duplicate := range []bool{false, false, true, false, true} {
		require.Equal(t, duplicate, added[i].Duplicate, i)
	}
	require.Equal(t, added[0].ID, added[2].ID)
	require.Equal(t, added[1].ID, added[4].ID)
}

func TestDedupFor_OverInTheMeantime_KeysAreRemovedByEnqueues(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for i := range 30 {
		n.enqueueUnique(t, "w", pgwake.EnqueueOptions{DedupKey: fmt.Sprint(i), DedupFor: time.Minute})
	}
	pgwaketest.Advance(t, n.Provider, time.Minute)
	for i := range 3 {
		n.enqueueUnique(t, "w", pgwake.EnqueueOptions{DedupKey: fmt.Sprint("later ", i), DedupFor: time.Minute})
	}
	require.Equal(t, []int64{3}, query[int64](t, n, `SELECT count(*) FROM dedup_keys`))
}

func TestDedupFor_ManyAtOnce_OneIsAdded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const callers = 16
	for round := range 5 {
		key := fmt.Sprint(round)
		added := make([]pgwake.Enqueued, callers)
		var all sync.WaitGroup
		for i := range callers {
			all.Go(func() {
				var err error
				added[i], err = n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, &pgwake.EnqueueOptions{DedupKey: key, DedupFor: time.Hour})
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		news := 0
		for _, a := range added {
			require.Equal(t, added[0].ID, a.ID)
			if !a.Duplicate {
				news++
			}
		}
		require.Equal(t, 1, news)
		n.done(t, n.take(t))
		n.requireNoWork(t)
	}
}

func TestDedupWaiting_ItemIsAtWork_AnotherIsAdded_AndOnlyOne(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	waiting := pgwake.EnqueueOptions{DedupScope: pgwake.DedupWaiting}
	first := n.enqueueUnique(t, "first", waiting)
	require.Equal(t, first.ID, n.enqueueUnique(t, "again", waiting).ID)
	item := n.take(t)
	require.Equal(t, first.ID, n.enqueueUnique(t, "again", pgwake.EnqueueOptions{}).ID, "by default it is in the way")
	second := n.enqueueUnique(t, "second", waiting)
	require.False(t, second.Duplicate)
	require.Equal(t, second.ID, n.enqueueUnique(t, "again", waiting).ID)
	require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
	require.Equal(t, second.ID, n.enqueueUnique(t, "again", waiting).ID)
	require.Equal(t, "second", n.take(t).Name)
	require.Equal(t, "first", n.take(t).Name, "its attempt failed")
}

// Who changes something, and adds an item that is queued already, counts on that to see the change.
func TestDedupWaiting_InATransaction_ItemIsNotClaimedBeforeItsEnd(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	waiting := pgwake.EnqueueOptions{DedupScope: pgwake.DedupWaiting}
	first := n.enqueueUnique(t, "first", waiting)
	for _, end := range []func(pgx.Tx, context.Context) error{pgx.Tx.Rollback, pgx.Tx.Commit} {
		tx := n.begin(t)
		o := waiting
		o.DedupKey = "key"
		added, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "again"}, &o)
		require.NoError(t, err)
		require.Equal(t, first.ID, added.ID)
		n.requireNoWork(t)
		got := make(chan *pgwake.ClaimedWorkItem, 1)
		go func() {
			item, _ := n.FetchWorkItem(context.Background(), soon)
			got <- item
		}()
		require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 1 }, patience, 10*time.Millisecond)
		require.NoError(t, end(tx, t.Context()))
		item := <-got
		require.Equal(t, first.ID, item.ID)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
	}
}

// An item that the enqueue could not see, and had to wait for, is not claimed either.
func TestDedupWaiting_ItemCommittedMeanwhile_IsNotClaimedBeforeTheEnd(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	waiting := pgwake.EnqueueOptions{DedupKey: "key", DedupScope: pgwake.DedupWaiting}
	before, tx := n.begin(t), n.begin(t)
	first, err := n.EnqueueForWorkerTx(t.Context(), before, pgwake.WorkItem{Name: "first"}, &waiting)
	require.NoError(t, err)
	added := make(chan pgwake.Enqueued)
	go func() {
		e, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "again"}, &waiting)
		if err != nil {
			t.Error(err)
		}
		added <- e
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, before.Commit(t.Context()))
	require.Equal(t, first.ID, (<-added).ID)
	n.requireNoWork(t)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, first.ID, n.take(t).ID)
}

// Of two batches with the same keys that meet items at work one may be the victim of a deadlock: it has a key that the other still needs,
// and an item in the way of which the other has taken the key. It says that it can be made again, and then each key has one item that waits.
func TestDedupWaiting_TwoBatchesOfTheSameKeys_WhoFailsMayTryAgainAndNothingIsLost(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	batch := func(round int, keys ...string) (items []pgwake.WorkEnqueue) {
		for _, key := range keys {
			items = append(items, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "new"}, EnqueueOptions: pgwake.EnqueueOptions{
				DedupKey: fmt.Sprint(key, round), DedupScope: pgwake.DedupWaiting}})
		}
		return items
	}
	for round := range 6 {
		before := n.begin(t)
		_, err := n.EnqueueForWorkerTx(t.Context(), before, pgwake.WorkItem{Name: "never"}, &pgwake.EnqueueOptions{DedupKey: fmt.Sprint("a", round)})
		require.NoError(t, err)
		ended := make(chan error, 2)
		add := func(keys ...string) {
			for {
				_, err := n.EnqueueForWorkerMany(tctx, batch(round, keys...))
				var failed *pgwake.Error
				if errors.As(err, &failed) && failed.Retryable && !failed.Unknown && failed.SQLState == "40P01" {
					continue
				}
				ended <- err
				return
			}
		}
		go add("a", "b")
		n.awaitBlocked(t, 1)
		n.enqueueUnique(t, "old", pgwake.EnqueueOptions{DedupKey: fmt.Sprint("b", round)})
		old := n.take(t)
		go add("b", "a")
		n.awaitBlocked(t, 2)
		require.NoError(t, before.Rollback(t.Context()))
		require.NoError(t, errors.Join(<-ended, <-ended))
		require.Equal(t, []string{"new", "new"}, n.takeAll(t))
		n.done(t, old)
		require.Equal(t, 2*(round+1), n.rows(t)["worker_queue"])
	}
}

func TestDedupWaiting_LeaseHasEnded_ItWaitsAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	waiting := pgwake.EnqueueOptions{DedupScope: pgwake.DedupWaiting}
	first := n.enqueueUnique(t, "first", waiting)
	n.take(t)
	pgwaketest.Advance(t, n.Provider, 24*time.Hour)
	require.Equal(t, first.ID, n.enqueueUnique(t, "again", waiting).ID)
}

func TestDedupQueuedOrDead_DeadLetter_IsInTheWay(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	orDead := pgwake.EnqueueOptions{DedupScope: pgwake.DedupQueuedOrDead}
	first := n.enqueueUnique(t, "first", orDead)
	require.Equal(t, first.ID, n.enqueueUnique(t, "again", orDead).ID)
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, "spoilt", ""))
	require.Equal(t, pgwake.Enqueued{Duplicate: true, ID: first.ID}, withoutNow(n.enqueueUnique(t, "again", orDead)))
	n.requireNoWork(t)
	require.False(t, n.enqueueUnique(t, "next", pgwake.EnqueueOptions{}).Duplicate, "by default it is not")
	n.done(t, n.take(t))
	purged, err := n.PurgeDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, purged)
	require.False(t, n.enqueueUnique(t, "next", orDead).Duplicate)
}

// A transaction that makes the item a dead letter has not committed when the enqueue comes.
func TestDedupQueuedOrDead_DiesMeanwhile_IsInTheWay(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	orDead := pgwake.EnqueueOptions{DedupKey: "key", DedupScope: pgwake.DedupQueuedOrDead}
	first := n.enqueueUnique(t, "first", orDead)
	tx := n.begin(t)
	require.NoError(t, n.DeadLetterWorkItemTx(t.Context(), tx, n.take(t).LockToken, "spoilt", ""))
	added := make(chan pgwake.Enqueued)
	go func() {
		e, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "again"}, &orDead)
		if err != nil {
			t.Error(err)
		}
		added <- e
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, pgwake.Enqueued{Duplicate: true, ID: first.ID}, withoutNow(<-added))
	n.requireNoWork(t)
}

// An enqueue that has waited for another one of the same key goes by what became of that, and of its item, whatever each of them has asked for.
func TestDedup_WaitsForAnother_GoesByWhatThatHasCommitted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const (
		rolledBack = "rolled back"
		queued     = "queued"
		atWork     = "at work"
		leaseOver  = "its lease is over"
		finished   = "finished"
		dead       = "a dead letter"
	)
	claim := `UPDATE worker_queue SET lock_token = gen_random_uuid(), visible_at = clock_timestamp() + $2::interval WHERE id = $1`
	become := map[string]func(tx pgx.Tx, id int64) error{
		rolledBack: func(pgx.Tx, int64) error { return nil },
		queued:     func(pgx.Tx, int64) error { return nil },
		atWork:     func(tx pgx.Tx, id int64) error { return dropped(tx.Exec(tctx, claim, id, "1 hour")) },
		leaseOver:  func(tx pgx.Tx, id int64) error { return dropped(tx.Exec(tctx, claim, id, "0")) }, // which was later when the other one began
		finished: func(tx pgx.Tx, id int64) error {
			return dropped(tx.Exec(tctx, `DELETE FROM worker_queue WHERE id = $1`, id))
		},
		dead: func(tx pgx.Tx, id int64) error {
			return dropped(tx.Exec(tctx, `SELECT bury_work(ARRAY[$1::bigint], 'spoilt', NULL)`, id))
		},
	}
	var modes []pgwake.EnqueueOptions
	for _, scope := range []pgwake.DedupScope{pgwake.DedupQueued, pgwake.DedupWaiting, pgwake.DedupQueuedOrDead} {
		modes = append(modes, pgwake.EnqueueOptions{DedupScope: scope}, pgwake.EnqueueOptions{DedupScope: scope, DedupFor: time.Hour})
	}
	for _, one := range modes {
		for _, other := range modes {
			for _, busy := range []bool{false, true}[:1+one.DedupScope%2] { // an item of the key is at work, which only a DedupWaiting one replaces
				for fate, become := range become {
					name := fmt.Sprintf("%d for %v, %s; then %d for %v; busy %t", one.DedupScope, one.DedupFor, fate, other.DedupScope, other.DedupFor, busy)
					one.DedupKey, other.DedupKey = name, name
					t.Run(name, func(t *testing.T) {
						var holder int64 // of the key, while it is queued
						if busy {
							holder = n.enqueueUnique(t, "at work", pgwake.EnqueueOptions{DedupKey: name}).ID
							n.exec(t, claim, holder, "1 hour")
						}
						tx := n.begin(t)
						first, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "first"}, &one)
						require.NoError(t, err)
						require.False(t, first.Duplicate)
						got := make(chan pgwake.Enqueued, 1)
						go func() {
							e, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "second"}, &other)
							if err != nil {
								t.Error(err)
							}
							got <- e
						}()
						n.awaitBlocked(t, 1)
						require.NoError(t, become(tx, first.ID))
						if fate == rolledBack {
							require.NoError(t, tx.Rollback(t.Context()))
						} else {
							require.NoError(t, tx.Commit(t.Context()))
						}
						second := <-got

						committed := fate != rolledBack
						duplicate := committed && (one.DedupFor > 0 || fate == queued || fate == leaseOver ||
							fate == atWork && other.DedupScope != pgwake.DedupWaiting || fate == dead && other.DedupScope == pgwake.DedupQueuedOrDead)
						existing := first.ID
						if busy && !committed {
							duplicate, existing = other.DedupScope != pgwake.DedupWaiting, holder
						}
						require.Equal(t, duplicate, second.Duplicate)
						switch {
						case !duplicate:
							holder = second.ID
						case committed:
							holder = 0
							if fate == queued || fate == atWork || fate == leaseOver {
								holder = first.ID
							}
						}
						if duplicate {
							require.Equal(t, existing, second.ID)
						}
						require.Equal(t, holder, append(query[int64](t, n, `SELECT id FROM worker_queue WHERE dedup_key = $1`, name), 0)[0], "who has the key in the queue")
						var keeper int64
						switch {
						case one.DedupFor > 0 && committed:
							keeper = first.ID
						case other.DedupFor > 0 && !duplicate:
							keeper = second.ID
						}
						require.Equal(t, keeper, append(query[int64](t, n, `SELECT item_id FROM dedup_keys WHERE dedup_key = $1`, name), 0)[0], "who keeps the key")
						n.exec(t, `DELETE FROM worker_queue`)
					})
				}
			}
		}
	}
}

// withoutNow leaves out what is not exported.
func withoutNow(e pgwake.Enqueued) pgwake.Enqueued {
	return pgwake.Enqueued{Duplicate: e.Duplicate, ID: e.ID, DueAt: e.DueAt}
}
