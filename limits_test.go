package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: are limits kept, and does nobody wait longer for a place than until one is free?

func (n *node) limit(t *testing.T, l pgwake.Limits) {
	t.Helper()
	require.NoError(t, n.SetLimits(t.Context(), pgwake.DefaultNamespace, l))
}

// keyed enqueues an item for each key, with that as its name.
func (n *node) keyed(t *testing.T, keys ...string) {
	t.Helper()
	for _, key := range keys {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: key, Key: key}, nil)
		require.NoError(t, err)
	}
}

// awaitParked waits until so many dispatchers wait for work.
func (n *node) awaitParked(t *testing.T, dispatchers int) {
	t.Helper()
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == dispatchers }, patience, 10*time.Millisecond)
}

// takeSome fetches up to count items, and returns them with their names.
func (n *node) takeSome(t *testing.T, count int) (items []*pgwake.ClaimedWorkItem, names []string) {
	t.Helper()
	items, err := n.FetchWorkItems(t.Context(), count, now)
	if !errors.Is(err, pgwake.ErrNoWork) {
		require.NoError(t, err)
	}
	for _, i := range items {
		names = append(names, i.Name)
	}
	return items, names
}

func TestLimits_MaxRunning_SoManyAreClaimed_AndOneForEachThatEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunning: 3})
	n.enqueue(t, "a", "b", "c", "d", "e", "f")
	items, names := n.takeSome(t, 10)
	require.Equal(t, []string{"a", "b", "c"}, names)
	require.Equal(t, 3, items[0].Places)
	n.requireNoWork(t)

	require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
	_, names = n.takeSome(t, 10)
	require.Equal(t, []string{"d"}, names)
	require.NoError(t, n.AbandonWorkItem(t.Context(), items[1].LockToken, &pgwake.AbandonOptions{Delay: time.Hour}))
	_, names = n.takeSome(t, 10)
	require.Equal(t, []string{"e"}, names)
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), items[2].LockToken, "spoilt", ""))
	_, names = n.takeSome(t, 10)
	require.Equal(t, []string{"f"}, names)
}

// An ack hands its place on to what is claimed with it, whoever else is claiming then; but not if there are more at work than
// there may be by now.
func TestLimits_AckedWithAFetch_ItsPlaceIsHandedOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunning: 4})
	n.enqueue(t, "a", "b", "c", "d", "e", "f", "g", "h")
	items, _ := n.takeSome(t, 4)
	ackedWith := func(fetched int, acked ...*pgwake.ClaimedWorkItem) (names []string) {
		o := &pgwake.FetchOptions{NoWait: true}
		for _, item := range acked {
			o.Ack = append(o.Ack, item.LockToken)
		}
		claimed, err := n.FetchWorkItems(t.Context(), fetched, o)
		if !errors.Is(err, pgwake.ErrNoWork) {
			require.NoError(t, err)
		}
		for _, item := range claimed {
			items, names = append(items, item), append(names, item.Name)
		}
		return names
	}
	require.Equal(t, []string{"e"}, ackedWith(2, items[0])) // counted, and known to fit

	claiming := n.begin(t)
	_, err := claiming.Exec(t.Context(), `SELECT lock_namespace('default')`)
	require.NoError(t, err)
	require.Equal(t, []string{"f"}, ackedWith(1, items[1]))
	require.Equal(t, []string{"g"}, ackedWith(2, items[2]))
	require.Empty(t, ackedWith(1))
	require.NoError(t, claiming.Rollback(t.Context()))

	n.limit(t, pgwake.Limits{MaxRunning: 2})
	require.Empty(t, ackedWith(1, items[3]))
	require.Empty(t, ackedWith(1, items[4]))
	require.Equal(t, []string{"h"}, ackedWith(1, items[5]))
}

// Somebody renews a lease, or gives a place away, in time, but commits after the end of that lease. Nobody else has taken the
// place by then.
func TestLimits_LeaseEndsBeforeACommit_PlaceIsStillTaken(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunning: 1}, {MaxRunningPerKey: 1}} {
		n := newNode(t, nil)
		n.limit(t, l)
		n.keyed(t, "k", "k")
		tx := n.begin(t)
		item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: 2 * time.Second})
		require.NoError(t, err)
		_, err = n.RenewWorkItemLockTx(t.Context(), tx, item.LockToken, time.Hour)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			return n.exec(t, `SELECT WHERE clock_timestamp() > $1`, item.LockedUntil) == 1
		}, patience, 50*time.Millisecond)
		n.requireNoWork(t)
		require.NoError(t, tx.Commit(t.Context()))
		n.requireNoWork(t)
	}
}

// An item whose lease has ended, and that waits aside or for its share since, is nobody's.
func TestLimits_LeaseEndedAndKeyIsFull_OldTokenIsNoGood(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunningPerKey: 1}, {RatePerKey: pgwake.Rate{Interval: 3 * time.Hour}}} {
		n := newNode(t, nil)
		n.limit(t, l)
		n.keyed(t, "k")
		late := n.take(t)
		pgwaketest.Advance(t, n.Provider, 2*time.Hour)
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "urgent", Key: "k"}, &pgwake.EnqueueOptions{Priority: 9})
		require.NoError(t, err)
		items, _ := n.takeSome(t, 10)
		requireError(t, n.AckWorkItem(t.Context(), late.LockToken, nil), pgwake.ErrLockLost)
		for _, item := range items {
			require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		}
		count := len(items)
		for range 2 { // of a key with a rate one at a time
			pgwaketest.Advance(t, n.Provider, 4*time.Hour)
			items, _ = n.takeSome(t, 10)
			for count += len(items); len(items) > 0; items = items[1:] {
				require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
			}
		}
		require.Equal(t, 2, count)
	}
}

// As long as no key is full, acks leave nothing for others to take up.
// An ack frees the place of a key when the limit that it was for is another already: nobody takes that up, or looks for it.
func TestLimits_ReleaseOfAKeyComesAfterItsLimit_NobodyPolls(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.NoError(t, n.SetLimits(t.Context(), pgwake.DefaultNamespace, pgwake.Limits{MaxRunningPerKey: 1}))
	for range 3 {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Key: "k"}, nil)
		require.NoError(t, err)
	}
	item := n.take(t)
	n.requireNoWork(t)
	n.requireNoWork(t) // the others are held
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
	require.NoError(t, n.SetLimits(t.Context(), pgwake.DefaultNamespace, pgwake.Limits{MaxRunning: 1}))
	require.NoError(t, tx.Commit(t.Context()))
	_, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, []int64{1}, query[int64](t, n, `SELECT count(*) FROM releases`))
	_, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: 200 * time.Millisecond})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	var looks int64
	for range 5 { // until it has settled, whoever waits may look more than once
		before := n.Stats().Worker.Looks
		_, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: time.Second})
		require.ErrorIs(t, err, pgwake.ErrNoWork)
		if looks = n.Stats().Worker.Looks - before; looks <= 1 {
			break
		}
	}
	require.LessOrEqual(t, looks, int64(1))
}

func TestLimits_ReleasesAreNoted_WhileItemsAreHeld(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	released := func() int { return query[int](t, n, `SELECT count(*) FROM releases`)[0] }
	held := func() int { return query[int](t, n, `SELECT count(*) FROM worker_queue WHERE held_due IS NOT NULL`)[0] }

	ack := func(token pgwake.LockToken) error { return n.AckWorkItem(t.Context(), token, nil) }
	// A transaction that is a few milliseconds old is taken for one that may stay open, and that of an ack may be so by chance.
	soonZero := func(releases func() int) {
		for releases() > 0 {
			require.NoError(t, t.Context().Err())
		}
	}
	ackOf := func(key string, ack func(pgwake.LockToken) error) func() int {
		return func() int {
			n.keyed(t, key)
			require.NoError(t, ack(n.take(t).LockToken))
			return released()
		}
	}
	for _, ack := range []func(pgwake.LockToken) error{
		ack,
		func(token pgwake.LockToken) error { return n.AckWorkItems(t.Context(), []pgwake.LockToken{token}) },
		func(token pgwake.LockToken) error { return n.AckBatched(t.Context(), token, nil) },
		func(token pgwake.LockToken) error {
			_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Ack: []pgwake.LockToken{token}})
			require.ErrorIs(t, err, pgwake.ErrNoWork)
			return nil
		},
	} {
		soonZero(ackOf("a", ack)) // each by itself: a slow machine seldom has all of them quick
	}

	n.keyed(t, "a")
	acking := n.begin(t)
	_, err := acking.Exec(t.Context(), `SELECT pg_sleep(0.01)`)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItemTx(t.Context(), acking, n.take(t).LockToken, nil))
	require.NoError(t, acking.Commit(t.Context()))
	require.Equal(t, 1, released(), "it might have stayed open for long")
	require.Equal(t, []*time.Time{nil}, query[*time.Time](t, n, `SELECT earliest_work(NULL)`))
	n.keyed(t, "b")
	item := n.take(t)
	require.Zero(t, released(), "it is taken up")
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	soonZero(ackOf("b", ack))

	// An ack is under way that leaves nothing: until it has ended, no item is held that it might have brought back.
	n.keyed(t, "k", "k", "k")
	acking = n.begin(t)
	_, err = acking.Exec(t.Context(), `SELECT pg_advisory_xact_lock_shared(hashtext('pgwake releases of ' || current_schema()), hashtext('default'))`)
	require.NoError(t, err)
	items, _ := n.takeSome(t, 10)
	require.Len(t, items, 1)
	n.requireNoWork(t)
	require.Zero(t, held())
	require.NoError(t, acking.Rollback(t.Context()))
	n.requireNoWork(t)
	require.Equal(t, 2, held())

	require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
	require.Equal(t, 1, released())
	for range 2 {
		require.NoError(t, n.AckWorkItem(t.Context(), n.take(t).LockToken, nil))
	}
	pgwaketest.Advance(t, n.Provider, time.Minute)
	n.requireNoWork(t)
	soonZero(ackOf("k", ack))
}

func TestLimits_LeaseEnds_PlaceIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunning: 1})
	n.enqueue(t, "a")
	n.take(t)
	n.enqueue(t, "b")
	n.requireNoWork(t)
	pgwaketest.Advance(t, n.Provider, 24*time.Hour)
	_, names := n.takeSome(t, 2)
	require.Equal(t, []string{"b"}, names, "it was due before the lease of the other ended")
	n.requireNoWork(t)
}

func TestLimits_MaxRunningPerKey_OthersOfTheKeyWaitAside(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 2})
	n.keyed(t, "a", "a", "a", "a", "b", "a", "b", "c")
	n.enqueue(t, "none")
	items, names := n.takeSome(t, 20)
	require.Equal(t, []string{"a", "a", "b", "b", "c", "none"}, names)
	n.requireNoWork(t)
	require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
	second, names := n.takeSome(t, 20)
	require.Equal(t, []string{"a"}, names)
	require.NoError(t, n.AckWorkItems(t.Context(), []pgwake.LockToken{items[1].LockToken, second[0].LockToken}))
	_, names = n.takeSome(t, 20)
	require.Equal(t, []string{"a", "a"}, names)
}

// nothingRuns has a claim see that nothing is at work from before the limits. An ack that took its time leaves word of the place that it
// left (2 ms: note_releases), which the next claim takes up.
func (n *node) nothingRuns(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		n.keyed(t, "before")
		require.NoError(t, n.AckWorkItem(t.Context(), n.take(t).LockToken, nil))
		require.Equal(t, []int{0}, query[int](t, n, `SELECT count(*) FROM marking`))
		return query[int](t, n, `SELECT count(*) FROM releases`)[0] == 0
	}, patience, time.Millisecond)
}

func TestLimits_KeyIsFull_NextOfAnotherComesAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	n.nothingRuns(t)
	n.keyed(t, "a", "a", "b")
	for _, want := range []string{"a", "b"} {
		_, names := n.takeSome(t, 1)
		require.Equal(t, []string{want}, names)
	}
	require.Equal(t, []int{0, 1, 1}, query[int](t, n, `SELECT attempt_count FROM worker_queue ORDER BY attempt_count`))
}

// Claims do not wait for each other before they take, but before they are counted.
func TestLimits_AnotherClaimOfTheKeyIsUnderWay_OnlyOthersAreTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	n.nothingRuns(t)
	n.keyed(t, "k", "k")
	n.enqueue(t, "none")
	tx := n.begin(t)
	var first int64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT item_id FROM fetch_work(gen_random_uuid(), '1 h') WHERE item_id IS NOT NULL`).Scan(&first))
	_, names := n.takeSome(t, 10)
	require.Equal(t, []string{"none"}, names)
	require.Equal(t, []int{0}, query[int](t, n, `SELECT attempt_count FROM worker_queue WHERE id > $1 AND key IS NOT NULL`, first))
	require.NoError(t, tx.Commit(t.Context()))
	n.requireNoWork(t)
	n.exec(t, `SELECT ack_work_many(ARRAY[$1::bigint], ARRAY[(SELECT lock_token FROM worker_queue WHERE id = $1)])`, first)
	_, names = n.takeSome(t, 10)
	require.Equal(t, []string{"k"}, names)
}

func TestLimits_HeldItems_ComeBackInTheirOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	add := func(name string, priority int) {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: "k"}, &pgwake.EnqueueOptions{Priority: priority})
		require.NoError(t, err)
	}
	add("first", 0)
	item := n.take(t)
	add("third", 1)
	add("fourth", 0)
	add("second", 9)
	n.requireNoWork(t)
	for _, want := range []string{"second", "third", "fourth"} {
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		item = n.take(t)
		require.Equal(t, want, item.Name)
		n.requireNoWork(t)
	}
}

// The ack has not committed when the claim holds an item for which there is no place.
func TestLimits_PlaceIsLeftInAnOpenTransaction_HeldItemComesWhenItCommits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	n.keyed(t, "k")
	item := n.take(t)
	n.keyed(t, "k")
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
	next := make(chan error, 1)
	go func() {
		_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
		next <- err
	}()
	n.awaitParked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-next)
	require.Zero(t, n.Stats().Worker.FallbackFinds)
}

// Nobody fetches a tag any more. What its items left is not kept for ever.
func TestLimits_PlaceOfATagIsLeft_WhoeverFetchesTakesItUp(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	for range 2 {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "tagged", Key: "k", Tag: "gone"}, nil)
		require.NoError(t, err)
	}
	tagged := &pgwake.FetchOptions{NoWait: true, Tags: pgwake.Tags("gone")}
	items, err := n.FetchWorkItems(t.Context(), 2, tagged)
	require.NoError(t, err)
	require.Len(t, items, 1)
	n.keyed(t, "other")
	require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
	require.Equal(t, []int{1}, query[int](t, n, `SELECT count(*) FROM releases`))
	require.Equal(t, "other", n.take(t).Name)
	require.Equal(t, []int{0}, query[int](t, n, `SELECT count(*) FROM releases`))
	_, err = n.FetchWorkItem(t.Context(), tagged)
	require.NoError(t, err)
}

func TestLimits_PlaceBecomesFree_WhoeverWaitsIsTold(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunning: 1}, {MaxRunningPerKey: 1}} {
		n := newNode(t, nil)
		n.limit(t, l)
		n.keyed(t, "k", "k")
		item := n.another(t).take(t)
		next := make(chan error, 1)
		go func() {
			_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
			next <- err
		}()
		require.Eventually(t, func() bool { s := n.Stats().Worker; return s.Parked == 1 && s.Settled }, patience, 10*time.Millisecond)
		n.exec(t, `SELECT ack_work_many(ARRAY[$1::bigint], ARRAY[$2::uuid])`, item.ID, claimOf(item.LockToken))
		require.NoError(t, <-next, "%+v", l)
		require.Zero(t, n.Stats().Worker.FallbackFinds)
	}
}

// claimOf is the token as SQL has it.
func claimOf(token pgwake.LockToken) string {
	claim, _, _ := strings.Cut(string(token), "/")
	return claim
}

func TestLimits_RatePerKey_TheNextIsDueWhenItMayBegin(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: 10 * time.Minute, Burst: 2}})
	n.keyed(t, "a", "a", "a", "a", "b")
	_, names := n.takeSome(t, 20)
	require.Equal(t, []string{"a", "a", "b"}, names)
	n.requireNoWork(t)
	for range 2 {
		pgwaketest.Advance(t, n.Provider, 9*time.Minute)
		n.requireNoWork(t)
		pgwaketest.Advance(t, n.Provider, time.Minute)
		items, names := n.takeSome(t, 20)
		names = onlyKey(items, names)
		require.Equal(t, []string{"a"}, names)
	}
}

// Whoever claims an item too early for its key, so that it is put off, may have all hands full when it is due.
func TestLimits_RatePerKey_WhoPutItOffIsBusy_AnotherNodeComesInTime(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: 10 * time.Second}}) // more than all up to the end of it takes
	fetch := func(n *node, tags pgwake.TagFilter) <-chan string {
		got := make(chan string, 1)
		go func() {
			item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: 10 * time.Minute, PollTimeout: time.Minute, Tags: tags})
			if err != nil {
				got <- err.Error()
				return
			}
			got <- item.Name
		}()
		return got
	}
	come := func(got <-chan string) string {
		t.Helper()
		select {
		case name := <-got:
			return name
		case <-time.After(patience):
			require.Fail(t, "nothing came", "%+v", n.Stats().Worker)
			return ""
		}
	}
	first, second := fetch(n, pgwake.DefaultAnd("busy")), fetch(n, pgwake.DefaultAnd("busy"))
	n.awaitParked(t, 2)
	other := n.another(t)
	third := fetch(other, pgwake.DefaultOnly())
	other.awaitParked(t, 1)

	n.keyed(t, "a")
	n.awaitParked(t, 1)
	n.keyed(t, "a")
	require.Eventually(t, func() bool {
		return query[int](t, n, `SELECT count(*) FILTER (WHERE lock_token IS NULL AND visible_at > now()) FROM worker_queue`)[0] == 1
	}, patience, 10*time.Millisecond, "the second is put off")
	n.awaitParked(t, 1)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "b", Key: "b", Tag: "busy"}, nil) // which the other node does not take
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"a", "b"}, []string{come(first), come(second)})
	require.Equal(t, "a", come(third))
	require.Zero(t, other.Stats().Worker.FallbackFinds)
}

// A claim that finds something paused or limited tells when the next item is due, and that may be an instant for which a notification has no number.
func TestLimits_NextIsDueTooLateToTell_OtherNodesAreToldOfWhatComes(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{FallbackInterval: time.Hour, AggressivePolicy: pgwake.Never})
	require.NoError(t, n.Pause(t.Context(), pgwake.Worker, "other"))
	other := n.anotherWith(t, &pgwake.Config{FallbackInterval: time.Hour, AggressivePolicy: pgwake.Never})
	got := make(chan *pgwake.ClaimedWorkItem, 1)
	go func() {
		item, _ := other.FetchWorkItem(t.Context(), soon)
		got <- item
	}()
	other.awaitParked(t, 1)
	require.Eventually(t, func() bool { return n.Stats().Listening && other.Stats().Listening }, patience, 10*time.Millisecond)
	n.exec(t, `SELECT enqueue_work_many('{far}', NULL, p_visible_ats => '{294270-01-01}', p_quiet => true)`)
	n.requireNoWork(t)
	n.enqueue(t, "near")
	item := <-got
	require.NotNil(t, item, "nothing came")
	require.Equal(t, "near", item.Name)
	require.Equal(t, pgwake.PathEvent, item.Path)
}

// onlyKey leaves out those whose lease has ended and who come again.
func onlyKey(items []*pgwake.ClaimedWorkItem, names []string) (left []string) {
	for i, item := range items {
		if item.Attempt == 1 {
			left = append(left, names[i])
		}
	}
	return left
}

// Nobody claims for hours. Those that might have begun in that time come no faster for it, and in their order.
func TestLimits_RatePerKey_OneByOne_EachPays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Hour, Burst: 2}})
	for range 2 {
		n.keyed(t, "k", "another")
		_, names := n.takeSome(t, 2)
		require.Equal(t, []string{"k", "another"}, names)
	}
	n.enqueue(t, "none")
	n.keyed(t, "k")
	_, names := n.takeSome(t, 2)
	require.Equal(t, []string{"none"}, names)
	require.Equal(t, []int{0}, query[int](t, n, `SELECT attempt_count FROM worker_queue WHERE charged`))
	n.keyed(t, "third")
	_, names = n.takeSome(t, 1)
	require.Equal(t, []string{"third"}, names)
}

func TestLimits_RatePerKey_NobodyClaimsForLong_NoMoreThanABurstBegins(t *testing.T) {
	t.Parallel()
	for _, one := range []struct{ burst, batch int }{{1, 1}, {1, 100}, {2, 4}, {3, 4}} {
		burst, batch := one.burst, one.batch
		n := newNode(t, nil)
		n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: 10 * time.Minute, Burst: burst}})
		var all, began []string
		add := func(count int) {
			for range count {
				name := fmt.Sprint(len(all))
				_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: "k"}, nil)
				require.NoError(t, err)
				all = append(all, name)
			}
		}
		begin := func(most int) {
			t.Helper()
			for count := 0; ; {
				items, names := n.takeSome(t, batch)
				if count += len(items); len(items) == 0 {
					require.Equal(t, most, count, "burst %d, batches of %d", burst, batch)
					return
				}
				began = append(began, names...)
				for _, item := range items {
					require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
				}
			}
		}
		add(12 + burst)
		begin(burst)
		for _, lull := range []time.Duration{10 * time.Hour, 65 * time.Minute} {
			pgwaketest.Advance(t, n.Provider, lull)
			add(1)
			begin(burst)
			pgwaketest.Advance(t, n.Provider, 5*time.Minute)
			begin(0)
			pgwaketest.Advance(t, n.Provider, 5*time.Minute)
			begin(1)
		}
		pgwaketest.Advance(t, n.Provider, 24*time.Hour)
		add(1)
		for begin(burst); len(began) < len(all); begin(1) {
			pgwaketest.Advance(t, n.Provider, 10*time.Minute)
		}
		require.Equal(t, all, began)
	}
}

// The one whose share is the oldest goes first, and not the one for which the key has a place by the order in the queue: that is
// still there for the next.
func TestLimits_RateAndMaxRunningPerKey_NobodyClaimsForLong_NoneIsHeldAndAtWork(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 2, RatePerKey: pgwake.Rate{Interval: 10 * time.Minute}})
	add := func(name string, priority int) {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: "k"}, &pgwake.EnqueueOptions{Priority: priority})
		require.NoError(t, err)
	}
	add("first", 0)
	first, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, LockTimeout: 23 * time.Hour})
	require.NoError(t, err)
	add("second", 0)
	n.requireNoWork(t)
	add("third", 9)
	n.requireNoWork(t)
	pgwaketest.Advance(t, n.Provider, 5*time.Hour)
	n.exec(t, `UPDATE limits SET holding_since = clock_timestamp()`)
	items, names := n.takeSome(t, 10)
	require.Equal(t, []string{"second"}, names)
	require.Equal(t, []int{0}, query[int](t, n, `SELECT count(*) FROM worker_queue WHERE lock_token IS NOT NULL AND held_due IS NOT NULL`))
	require.NoError(t, n.AckWorkItems(t.Context(), []pgwake.LockToken{first.LockToken, items[0].LockToken}))
	n.requireNoWork(t)
	pgwaketest.Advance(t, n.Provider, 10*time.Minute)
	require.Equal(t, "third", n.take(t).Name)
}

// Another rate makes nobody due who waits for a place of his key.
func TestLimits_RateIsChanged_HeldItemThatHasPaid_IsHeldStill(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1, RatePerKey: pgwake.Rate{Interval: 10 * time.Minute}})
	n.keyed(t, "k")
	n.exec(t, `UPDATE worker_queue SET charged = true, held_due = visible_at, visible_at = '9999-12-31'`)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1, RatePerKey: pgwake.Rate{Interval: time.Hour}})
	n.requireNoWork(t)
	n.limit(t, pgwake.Limits{})
	n.take(t)
}

func TestLimits_RatePerKey_UrgentItemsPassThoseThatWait_NoMoreThanABurstBegins(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: 10 * time.Minute}})
	for priority := range 5 {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Key: "k"}, &pgwake.EnqueueOptions{Priority: priority})
		require.NoError(t, err)
		n.takeSome(t, 1)
	}
	pgwaketest.Advance(t, n.Provider, 30*time.Minute)
	for range 4 {
		items, _ := n.takeSome(t, 1)
		require.Len(t, items, 1)
		require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
		n.requireNoWork(t)
		pgwaketest.Advance(t, n.Provider, 10*time.Minute)
	}
}

func TestLimits_RatePerKey_ItemIsGivenBackUnbegun_HasPaid(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Hour}})
	n.keyed(t, "a", "a")
	give := func(o pgwake.AbandonOptions) {
		t.Helper()
		require.NoError(t, n.AbandonWorkItem(t.Context(), n.take(t).LockToken, &o))
	}
	give(pgwake.AbandonOptions{IgnoreAttempt: true})
	give(pgwake.AbandonOptions{}) // it has paid once, for this one
	n.requireNoWork(t)
	pgwaketest.Advance(t, n.Provider, time.Hour)
	item := n.take(t)
	require.Equal(t, []int64{1}, query[int64](t, n, `SELECT undo_work_claim('`+claimOf(item.LockToken)+`', '24 h')`))
	require.Equal(t, item.ID, n.take(t).ID)
	n.requireNoWork(t)
}

// What is given back while the rate is lifted has paid for a rate that is no more by the time it commits. Whoever takes it then has it.
func TestLimits_GivenBackWhileTheRateIsLifted_TheNextRateEndsNoLease(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	rate := pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Hour}}
	n.limit(t, rate)
	n.keyed(t, "a")
	tx := n.begin(t)
	require.NoError(t, n.AbandonWorkItemTx(t.Context(), tx, n.take(t).LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
	n.limit(t, pgwake.Limits{})
	require.NoError(t, tx.Commit(t.Context()))
	item := n.take(t)
	require.Equal(t, []bool{true}, query[bool](t, n, `SELECT charged FROM worker_queue`), "what this is about")
	n.limit(t, rate)
	n.requireNoWork(t)
	require.Equal(t, []bool{false}, query[bool](t, n, `SELECT charged FROM worker_queue`))
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
}

func TestLimits_AreLifted_WhatWaitedIsDue(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1, RatePerKey: pgwake.Rate{Interval: time.Hour}, MaxRunning: 10, Weight: 3})
	limits, err := n.GetLimits(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]pgwake.Limits{pgwake.DefaultNamespace: {MaxRunningPerKey: 1, MaxRunning: 10, Weight: 3,
		RatePerKey: pgwake.Rate{Interval: time.Hour, Burst: 1}}}, limits)
	n.keyed(t, "a", "a", "b", "a")
	_, names := n.takeSome(t, 20)
	require.Equal(t, []string{"a", "b"}, names)
	waiting := make(chan int, 1)
	go func() {
		items, err := n.FetchWorkItems(t.Context(), 20, &pgwake.FetchOptions{PollTimeout: patience})
		if err != nil {
			t.Error(err)
		}
		waiting <- len(items)
	}()
	n.awaitParked(t, 1)
	n.limit(t, pgwake.Limits{})
	require.Equal(t, 2, <-waiting)
	limits, err = n.GetLimits(t.Context())
	require.NoError(t, err)
	require.Empty(t, limits)
	require.Equal(t, []int64{0}, query[int64](t, n, `SELECT (SELECT count(*) FROM limits) + (SELECT count(*) FROM rates) + (SELECT count(*) FROM releases)`))
}

func TestLimits_SetWhileItemsAreAtWork_TheyCount(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c")
	first := n.take(t)
	n.take(t)
	n.limit(t, pgwake.Limits{MaxRunning: 2})
	n.requireNoWork(t)
	require.NoError(t, n.AckWorkItem(t.Context(), first.LockToken, nil))
	require.Equal(t, "c", n.take(t).Name)
}

// Limits, of whichever namespace, do not keep items of sessions from their turn.
func TestLimits_ItemsOfSessions_AreInTheirPlaceAndHaveNoLimit(t *testing.T) {
	t.Parallel()
	for what, l := range map[string]map[string]pgwake.Limits{
		"fair":         {},
		"elsewhere":    {"other": {MaxRunning: 5}},
		"in namespace": {"default": {MaxRunning: 2}},
		"of keys":      {"default": {MaxRunning: 2, MaxRunningPerKey: 2, RatePerKey: pgwake.Rate{Interval: time.Hour, Burst: 9}}},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t, nil)
			for namespace, limits := range l {
				require.NoError(t, n.SetLimits(t.Context(), namespace, limits))
			}
			add := func(name, session string, priority int) {
				t.Helper()
				_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Session: session}, &pgwake.EnqueueOptions{Priority: priority})
				require.NoError(t, err)
			}
			add("2", "a", 5)
			add("1", "", 7)
			add("3", "b", 5)
			add("0", "a", 9)
			add("4", "", 5)
			add("5", "b", 0)
			take := func(count int) (names []string) {
				items, err := n.FetchWorkItems(t.Context(), count, &pgwake.FetchOptions{NoWait: true, Fair: what == "fair", Session: &pgwake.SessionOptions{Owner: "me"}})
				require.NoError(t, err)
				for _, item := range items {
					names = append(names, item.Name)
				}
				return names
			}
			require.Equal(t, []string{"0"}, take(1))
			require.Equal(t, []string{"1", "2", "3"}, take(3))
			require.Equal(t, []string{"4", "5"}, take(10))
			add("6", "", 9)
			add("7", "a", 0)
			if _, limited := l["default"]; limited {
				require.Equal(t, []string{"7"}, take(10))
			} else {
				require.Equal(t, []string{"6", "7"}, take(10))
			}
		})
	}
}

func TestFair_ItemsOfSessions_HaveTheTurnsOfTheirNamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `SELECT enqueue_work('flood', p_priority => 9) FROM generate_series(1, 100)`)
	for _, namespace := range []string{"a", "b"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: namespace, Session: namespace}, &pgwake.EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
	}
	items, err := n.FetchWorkItems(t.Context(), 20, &pgwake.FetchOptions{NoWait: true, Fair: true, Session: &pgwake.SessionOptions{Owner: "me"}})
	require.NoError(t, err)
	count := map[string]int{}
	for _, item := range items {
		count[item.Namespace]++
	}
	require.Equal(t, map[string]int{"default": 18, "a": 1, "b": 1}, count)
}

// Somebody has locked an item that is at work when limits are set. It counts, then and later.
func TestLimits_SetWhileALeaseIsRenewed_ItCounts(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunning: 1}, {MaxRunningPerKey: 1}, {MaxRunning: 9, MaxRunningPerKey: 1}} {
		n := newNode(t, nil)
		n.keyed(t, "k", "k", "k")
		item := n.take(t)
		tx := n.begin(t)
		_, err := n.RenewWorkItemLockTx(t.Context(), tx, item.LockToken, time.Hour)
		require.NoError(t, err)
		n.limit(t, l)
		n.requireNoWork(t)
		require.NoError(t, tx.Commit(t.Context()))
		n.requireNoWork(t)
		require.Equal(t, []int{0}, query[int](t, n, `SELECT count(*) FROM marking`))
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		item = n.take(t)
		n.requireNoWork(t)

		for _, before := range []pgwake.Limits{{}, {MaxRunning: 9}} { // who acknowledges sees no limit of keys
			n.limit(t, before)
			tx = n.begin(t)
			require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
			n.limit(t, l)
			n.keyed(t, "k")
			next := make(chan error, 1)
			go func() {
				var err error
				item, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
				next <- err
			}()
			n.awaitParked(t, 1)
			require.NoError(t, tx.Commit(t.Context()))
			require.NoError(t, <-next, "%+v", l)
		}
	}
}

// Limits that are set in a transaction that stays open cost nobody a lease.
func TestLimits_SetInAnOpenTransaction_LeasesAreRenewed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b")
	item := n.take(t)
	tx := n.begin(t)
	require.NoError(t, n.SetLimitsTx(t.Context(), tx, pgwake.DefaultNamespace, pgwake.Limits{MaxRunning: 1, MaxRunningPerKey: 1}))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := n.RenewWorkItemLock(ctx, item.LockToken, time.Hour)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	n.requireNoWork(t)
}

// A claim is under way that began before there were limits. What it has claimed counts as soon as anybody can see it.
func TestLimits_SetWhileAClaimIsUnderWay_ItCounts(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunning: 1}, {MaxRunningPerKey: 1}} {
		n := newNode(t, nil)
		n.keyed(t, "k", "k", "k")
		tx := n.begin(t)
		var first int64
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT item_id FROM fetch_work(gen_random_uuid(), '1 h') WHERE item_id IS NOT NULL`).Scan(&first))
		n.limit(t, l)
		second := n.take(t)
		n.requireNoWork(t)
		require.NoError(t, tx.Commit(t.Context()))
		n.requireNoWork(t)
		require.NoError(t, n.AckWorkItem(t.Context(), second.LockToken, nil))
		n.requireNoWork(t)
		require.Equal(t, []int{0}, query[int](t, n, `SELECT count(*) FROM marking`))
		n.exec(t, `SELECT ack_work_many(ARRAY[$1::bigint], ARRAY[(SELECT lock_token FROM worker_queue WHERE id = $1)])`, first)
		n.take(t)
	}
}

// The first items of a namespace are committed while a claim is under way that has seen none.
func TestLimits_FirstItemsComeDuringAClaim_TheyCount(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunning: 1})
	producer := n.begin(t)
	_, err := n.EnqueueForWorkerManyTx(t.Context(), producer, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "a"}}, {WorkItem: pgwake.WorkItem{Name: "b"}}})
	require.NoError(t, err)
	tx := n.begin(t)
	_, err = tx.Exec(t.Context(), `LOCK TABLE releases`) // which a claim reads once it knows where to count
	require.NoError(t, err)
	claimed := make(chan int, 1)
	go func() {
		items, _ := n.FetchWorkItems(t.Context(), 2, now)
		claimed <- len(items)
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, producer.Commit(t.Context()))
	require.NoError(t, tx.Commit(t.Context()))
	_, names := n.takeSome(t, 2)
	require.Equal(t, 1, <-claimed+len(names))
}

// Somebody has locked the item that a place has become free for, and leaves it as it was.
func TestLimits_HeldItemIsLockedWhenItsPlaceIsTakenUp_ComesAfterThat(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	n.keyed(t, "k", "k")
	first := n.take(t)
	n.requireNoWork(t)
	n.requireNoWork(t)
	require.Len(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`), 1)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT FROM worker_queue WHERE held_due IS NOT NULL FOR UPDATE`)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItem(t.Context(), first.LockToken, nil))
	n.requireNoWork(t) // which looks for what the place is for
	require.NoError(t, tx.Rollback(t.Context()))
	n.take(t)
}

// However few are asked for at one time, what is too early is out of the way in a few rounds.
func TestLimits_RatePerKey_ManyAreEarly_ClaimOfOnePutsThemOffTogether(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Hour}})
	n.exec(t, `INSERT INTO worker_queue (name, key) SELECT 'w', 'k' FROM generate_series(1, 500)`)
	n.take(t)
	tx := n.begin(t)
	var explained []struct {
		Plan struct {
			Pages int64 `json:"Shared Hit Blocks"`
		}
	}
	require.NoError(t, tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`).Scan(&explained))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []int{499}, query[int](t, n, `SELECT count(*) FROM worker_queue WHERE share_at IS NOT NULL`))
	require.Less(t, explained[0].Plan.Pages, int64(200_000), "each found by itself they read 750,000")
}

// A rate that takes its items past the end of time keeps them, and nobody else.
func TestLimits_RatePerKey_SlowestThatThereIs_OthersAreClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const century = 100 * 365 * 24 * time.Hour
	for _, r := range []pgwake.Rate{{Interval: century}, {Interval: time.Microsecond, Burst: 1<<31 - 1}} {
		n.exec(t, `DELETE FROM worker_queue`)
		n.limit(t, pgwake.Limits{RatePerKey: r})
		n.exec(t, `INSERT INTO worker_queue (name, key) SELECT 'w', 'k' FROM generate_series(1, 6000)`)
		n.exec(t, `INSERT INTO worker_queue (name) VALUES ('free')`)
		require.Eventually(t, func() bool {
			_, names := n.takeSome(t, 1000)
			return slices.Contains(names, "free")
		}, patience, 10*time.Millisecond)
	}
}

// And so for as many at a time as there may be, whichever way they are claimed: what the last of them would have to wait for is more than any
// instant or interval can be.
func TestLimits_RatePerKey_SlowestThatThereIs_ManyAtOnce_OthersAreClaimed(t *testing.T) {
	t.Parallel()
	const century = 100 * 365 * 24 * time.Hour
	for name, r := range map[string]pgwake.Rate{"one": {Interval: century}, "burst": {Interval: century / 2, Burst: 2}} {
		for _, lists := range []int{1, 2} {
			t.Run(fmt.Sprint(name, " ", lists), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, nil)
				n.limit(t, pgwake.Limits{RatePerKey: r})
				n.exec(t, `INSERT INTO worker_queue (name, key) SELECT 'w', 'k' FROM generate_series(1, 9000)`)
				n.exec(t, `INSERT INTO worker_queue (name, key, tag) SELECT 'w', 'k', CASE $1::int WHEN 1 THEN '' ELSE 'tag' END FROM generate_series(1, 500)`, lists)
				n.exec(t, `INSERT INTO worker_queue (name) VALUES ('free')`)
				_, names := n.takeSome(t, 10_000)
				require.Contains(t, names, "free")
				require.Equal(t, []int64{int64(max(r.Burst, 1))}, query[int64](t, n, `SELECT count(*) FROM worker_queue WHERE key = 'k' AND tag = '' AND lock_token IS NOT NULL`))
				require.Zero(t, query[int64](t, n, `SELECT count(*) FROM worker_queue WHERE visible_at > '9999-12-30'`)[0])
				require.Equal(t, []bool{true}, query[bool](t, n, `SELECT bool_and(visible_at = share_at) FROM worker_queue WHERE share_at > clock_timestamp()`))
			})
		}
	}
}

func TestPause_NamespaceOrQueue_NothingIsClaimedUntilItIsResumed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, namespace := range []string{"a", "b"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: namespace}, &pgwake.EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
		_, err = n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: namespace, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
	}
	require.NoError(t, n.Pause(t.Context(), pgwake.Worker, "a"))
	require.NoError(t, n.Pause(t.Context(), pgwake.Orchestrator, "a"))
	paused, err := n.GetPaused(t.Context(), pgwake.Worker)
	require.NoError(t, err)
	require.Equal(t, pgwake.PausedNamespaces{Namespaces: []string{"a"}}, paused)
	require.Equal(t, "b", n.take(t).Name)
	n.requireNoWork(t)
	turn, err := n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.Equal(t, "b", turn.Instance)
	_, err = n.FetchOrchestrationItem(t.Context(), now)
	require.ErrorIs(t, err, pgwake.ErrNoWork)

	wait := make(chan string, 2)
	go func() {
		item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience})
		if err != nil {
			t.Error(err)
			wait <- ""
			return
		}
		wait <- item.Name
	}()
	n.awaitParked(t, 1)
	require.NoError(t, n.Resume(t.Context(), pgwake.Worker, "a"))
	require.Equal(t, "a", <-wait)
	require.NoError(t, n.Resume(t.Context(), pgwake.Orchestrator, "a"))
	turn, err = n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.Equal(t, "a", turn.Instance)

	n.enqueue(t, "c")
	require.NoError(t, n.Pause(t.Context(), pgwake.Worker, pgwake.AllNamespaces))
	n.requireNoWork(t)
	require.NoError(t, n.Resume(t.Context(), pgwake.Worker, "default"))
	n.requireNoWork(t)
	require.NoError(t, n.Resume(t.Context(), pgwake.Worker, pgwake.AllNamespaces))
	require.Equal(t, "c", n.take(t).Name)
	require.Equal(t, []int64{0}, query[int64](t, n, `SELECT count(*) FROM limits`))
}

// Of a queue that is paused nobody asks again and again.
func TestPause_DueItems_CostNoQueries(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	require.NoError(t, n.Pause(t.Context(), pgwake.Worker, pgwake.AllNamespaces))
	var looks int64
	for range 2 { // the first may be told of what has happened before
		before := n.Stats().Worker.Looks
		_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: 300 * time.Millisecond})
		require.ErrorIs(t, err, pgwake.ErrNoWork)
		looks = n.Stats().Worker.Looks - before
	}
	require.LessOrEqual(t, looks, int64(3))
}

func TestFair_FloodInOneNamespace_OthersAreNotKeptWaiting(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `SELECT enqueue_work('flood', p_namespace => 'flood', p_priority => 9) FROM generate_series(1, 1000)`)
	for _, namespace := range []string{"a", "b"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: namespace}, &pgwake.EnqueueOptions{Namespace: namespace})
		require.NoError(t, err)
	}
	items, err := n.FetchWorkItems(t.Context(), 20, &pgwake.FetchOptions{NoWait: true, Fair: true})
	require.NoError(t, err)
	require.Len(t, items, 20)
	count := map[string]int{}
	for _, item := range items {
		count[item.Namespace]++
	}
	require.Equal(t, map[string]int{"flood": 18, "a": 1, "b": 1}, count)
}

func TestFair_Weights_AreChances(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.NoError(t, n.SetLimits(t.Context(), "heavy", pgwake.Limits{Weight: 9}))
	const rounds = 300
	n.exec(t, `SELECT enqueue_work('w', p_namespace => s) FROM unnest(ARRAY['heavy', 'light']) AS s, generate_series(1, $1::integer)`, rounds)
	heavy := 0
	for range rounds {
		item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Fair: true})
		require.NoError(t, err)
		if item.Namespace == "heavy" {
			heavy++
		}
	}
	require.InDelta(t, 0.9*rounds, heavy, 45, "eight standard deviations")
}

// Five nodes, with more places than there may be items at work. None too many ever is; each place is taken as soon as it
// is free; and nobody needs the fallback.
func TestLimits_FiveNodes_NeverTooMany_AndNoPlaceIdle(t *testing.T) {
	t.Parallel()
	const most, items, took = 10, 100, 10 * time.Millisecond
	for _, l := range []pgwake.Limits{{MaxRunning: most}, {MaxRunningPerKey: most / 2}} {
		n := newNode(t, nil)
		n.limit(t, l)
		nodes := []*node{n}
		for range 4 {
			nodes = append(nodes, n.another(t))
		}
		n.exec(t, `SELECT enqueue_work('w', p_key => 'k' || i % 2) FROM generate_series(1, $1::integer) AS i`, items)
		var running, done, tooMany atomic.Int64
		ctx, stop := context.WithTimeout(t.Context(), 2*patience) // before the fallback
		var all sync.WaitGroup
		for _, n := range nodes {
			for range 4 {
				all.Go(func() {
					for done.Load() < items {
						item, err := n.FetchWorkItem(ctx, nil)
						if err != nil {
							if ctx.Err() == nil {
								t.Error(err)
							}
							return
						}
						if running.Add(1) > most {
							tooMany.Add(1)
						}
						time.Sleep(took)
						running.Add(-1)
						if err := n.AckWorkItem(ctx, item.LockToken, nil); err != nil {
							t.Error(err)
						}
						if done.Add(1) == items {
							stop()
						}
					}
				})
			}
		}
		all.Wait()
		stop()
		require.EqualValues(t, items, done.Load(), fmt.Sprint(l))
		require.Zero(t, tooMany.Load())
		for _, n := range nodes {
			require.Zero(t, n.Stats().Worker.FallbackFinds)
		}
	}
}

func TestLimits_Bad_AreRefusedAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := n.content(t)
	for _, l := range []pgwake.Limits{{MaxRunning: -1}, {MaxRunningPerKey: -1}, {Weight: -1}, {Weight: 1001}, {MaxRunning: 1 << 31},
		{RatePerKey: pgwake.Rate{Interval: -1}}, {RatePerKey: pgwake.Rate{Interval: 1}}, {RatePerKey: pgwake.Rate{Burst: 1}},
		{RatePerKey: pgwake.Rate{Interval: time.Second, Burst: -1}}, {RatePerKey: pgwake.Rate{Interval: 1<<63 - 1}},
		{RatePerKey: pgwake.Rate{Interval: time.Hour, Burst: 1<<31 - 1}}} {
		require.Empty(t, requireError(t, n.SetLimits(t.Context(), "default", l), pgwake.ErrInvalid).SQLState, "%+v", l)
	}
	requireError(t, n.SetLimits(t.Context(), "*", pgwake.Limits{MaxRunning: 1}), pgwake.ErrInvalid)
	requireError(t, n.Pause(t.Context(), pgwake.Worker), pgwake.ErrInvalid)
	requireError(t, n.Resume(t.Context(), pgwake.Worker), pgwake.ErrInvalid)
	requireError(t, n.Pause(t.Context(), pgwake.Worker, pgwake.AllNamespaces, "a"), pgwake.ErrInvalid)
	requireError(t, n.Pause(t.Context(), pgwake.Queue(7), "a"), pgwake.ErrInvalid)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Key: "k", Session: "s"}, nil)
	requireError(t, err, pgwake.ErrInvalid)
	require.Equal(t, before, n.content(t))
}

// Whatever removes an item that is at work makes room for another of its key.
func TestLimits_ItemIsRemovedByOtherMeans_AnotherOfItsKeyComes(t *testing.T) {
	t.Parallel()
	for what, remove := range map[string]func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem){
		"dead letter": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			require.NoError(t, n.DeadLetterWorkItem(t.Context(), item.LockToken, "spoilt", ""))
		},
		"abandoned": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{Delay: time.Hour}))
		},
		"batched": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			require.NoError(t, n.AckBatched(t.Context(), item.LockToken, nil))
		},
		"with a fetch": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"elsewhere"}, Ack: []pgwake.LockToken{item.LockToken}})
			require.ErrorIs(t, err, pgwake.ErrNoWork)
		},
		"rolled back first": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			tx := n.begin(t)
			require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
			require.NoError(t, tx.Rollback(t.Context()))
			n.requireNoWork(t)
			require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		},
		"undone": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			n.exec(t, `SELECT undo_work_claim($1, '24 h')`, claimOf(item.LockToken))
			n.exec(t, `DELETE FROM worker_queue WHERE id = $1`, item.ID)
		},
		"its instance was deleted": func(t *testing.T, n *node, item *pgwake.ClaimedWorkItem) {
			n.exec(t, `SELECT remove_work(ARRAY[$1::bigint])`, item.ID)
		},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t, nil)
			n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
			n.keyed(t, "k", "k")
			item := n.take(t)
			n.requireNoWork(t)
			remove(t, n, item)
			require.NotEqual(t, item.ID, n.take(t).ID)
		})
	}
}

// Who has waited for the others to pay is not early: nothing that may begin is put off, which would have all that claim look at
// what waits.
func TestLimits_RatePerKey_OthersPayWhileItWaits_BeginsAllTheSame(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Millisecond, Burst: 5}})
	n.keyed(t, "k", "k")
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT lock_namespace('default')`)
	require.NoError(t, err)
	taken := make(chan error, 1)
	go func() {
		_, err := n.FetchWorkItem(tctx, soon)
		taken <- err
	}()
	n.awaitBlocked(t, 1)
	_, err = tx.Exec(t.Context(), `SELECT pg_sleep(0.05)`) // its instant is that much later than that of the one that waits
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT count(*) FROM fetch_work(gen_random_uuid(), '1 min')`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-taken)
	require.Empty(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE share_at IS NOT NULL`))
}

func TestLimits_RatePerKey_KeysThatAreNotUsed_AreForgotten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Millisecond, Burst: 5}})
	known := func() []string { return query[string](t, n, `SELECT key FROM rates ORDER BY key`) }
	n.keyed(t, "a", "b")
	n.takeAll(t)
	require.Equal(t, []string{"a", "b"}, known(), "not at once: they may be used again")
	require.Zero(t, n.exec(t, `UPDATE rates SET forget_at = now() WHERE NOT forget_at - tat BETWEEN '1 minute' AND '2 minutes'`))
	n.exec(t, `UPDATE rates SET tat = tat - interval '3 minutes', begun = begun - interval '3 minutes', forget_at = forget_at - interval '3 minutes'`)
	n.keyed(t, "b", "c")
	n.takeAll(t)
	require.Equal(t, []string{"b", "c"}, known())
}

// flushes counts how often somebody waits for the disk apart from a commit.
type flushes struct{ atomic.Int64 }

func (f *flushes) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, ".flush(") {
		f.Add(1)
	}
	return ctx
}

func (*flushes) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// What a claim has locked for a limit is free before the disk has what is acknowledged, and whoever acknowledges hears of it after.
func TestLimits_AckedWithAFetch_IsFlushedAfterTheCommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	var f flushes
	config.ConnConfig.Tracer = &f
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModePolling})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	n.enqueue(t, "1", "2", "3", "4", "5", "6", "7")
	var last pgwake.LockToken
	next := func(o pgwake.FetchOptions) {
		t.Helper()
		o.NoWait, o.LockTimeout = true, lease
		if last != "" {
			o.Ack = []pgwake.LockToken{last}
		}
		item, err := p.FetchWorkItem(t.Context(), &o)
		require.NoError(t, err)
		last = item.LockToken
	}
	next(pgwake.FetchOptions{})
	next(pgwake.FetchOptions{})
	require.Zero(t, f.Load(), "without limits it is flushed as it commits")
	require.NoError(t, n.SetLimits(t.Context(), pgwake.DefaultNamespace, pgwake.Limits{MaxRunning: 3}))
	next(pgwake.FetchOptions{}) // and learns of limits
	next(pgwake.FetchOptions{})
	require.EqualValues(t, 1, f.Load())
	next(pgwake.FetchOptions{AckAsync: true})
	require.EqualValues(t, 1, f.Load(), "that is left to Flush")
	require.NoError(t, p.Flush(t.Context()))
	require.EqualValues(t, 2, f.Load())
	require.NoError(t, n.SetLimits(t.Context(), pgwake.DefaultNamespace, pgwake.Limits{}))
	next(pgwake.FetchOptions{})
	next(pgwake.FetchOptions{})
	require.EqualValues(t, 3, f.Load(), "the last one that had reason to")
	require.Equal(t, 1, n.rows(t)["worker_queue"], "all of the others are acknowledged")
}
