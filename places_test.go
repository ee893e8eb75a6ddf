package pgwake_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: is each place of a key somebody's, however the items of the key come and go?

// keyedAs enqueues an item of key k for each name.
func (n *node) keyedAs(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: "k"}, nil)
		require.NoError(t, err)
	}
}

// An item that is due, and that nobody has claimed again, becomes a dead letter: it is in nobody's way, and in no place, but the place
// that it was brought back for goes to the next.
func TestLimits_LastAttemptWasGivenBack_ItsPlaceIsForTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	once := &pgwake.FetchOptions{NoWait: true, MaxAttempts: 1}
	take := func(name string) *pgwake.ClaimedWorkItem {
		t.Helper()
		item, err := n.FetchWorkItem(t.Context(), once)
		require.NoError(t, err)
		require.Equal(t, name, item.Name)
		return item
	}
	full := func() {
		t.Helper()
		_, err := n.FetchWorkItem(t.Context(), once)
		require.ErrorIs(t, err, pgwake.ErrNoWork)
	}
	n.keyedAs(t, "a", "b", "c")
	a := take("a")
	full()
	require.NoError(t, n.AbandonWorkItem(t.Context(), a.LockToken, nil))
	b := take("b")
	n.keyedAs(t, "d", "e")
	full()
	require.NoError(t, n.AckWorkItem(t.Context(), b.LockToken, nil))
	require.NoError(t, n.AckWorkItem(t.Context(), take("c").LockToken, nil))
	require.NoError(t, n.AckWorkItem(t.Context(), take("d").LockToken, nil)) // which meets a
	require.Len(t, n.letters(t, &pgwake.DeadLetterFilter{}), 1)
	take("e")
}

// Items of a key are removed, some of which are at work, and some due: others of the key come for all of them.
func TestLimits_DueItemsAreRemoved_TheirPlacesAreForOthers(t *testing.T) {
	t.Parallel()
	const most = 5
	for what, remove := range map[string]func(t *testing.T, n *node, activities []pgwake.ActivityRef){
		"cancelled by their turn": func(t *testing.T, n *node, activities []pgwake.ActivityRef) {
			n.send(t, "i", pgwake.MessageQueued)
			n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{CancelActivities: activities})
		},
		"their instance is deleted": func(t *testing.T, n *node, _ []pgwake.ActivityRef) {
			_, err := n.DeleteInstance(t.Context(), "i", &pgwake.DeleteOptions{Force: true})
			require.NoError(t, err)
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.limit(t, pgwake.Limits{MaxRunningPerKey: most})
			n.start(t, "i")
			var activities []pgwake.ActivityRef
			for i := range int64(most) {
				activities = append(activities, pgwake.ActivityRef{ExecutionID: 1, ActivityID: i})
				_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "a", Key: "k", Instance: "i", ExecutionID: 1, ActivityID: i}, nil)
				require.NoError(t, err)
			}
			n.keyedAs(t, "b", "b", "b", "b", "b")
			for range 2 { // one at a time, and with attempts that are counted items are held as soon as they are met
				_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, MaxAttempts: 10})
				require.NoError(t, err)
			}
			require.Len(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`), most, "the others are due")

			remove(t, n, activities)
			_, names := n.takeSome(t, 10)
			require.Equal(t, []string{"b", "b", "b", "b", "b"}, names)
		})
	}
}

// Places that nobody was counting on are noted with the others: that is too many, and none of them is taken. Items are not held and
// brought back in larger numbers for that either.
func TestLimits_MoreItemsAreRemovedThanThereArePlaces_NoneIsTakenTwice(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 2})
	n.keyed(t, "k", "k", "k", "k", "k", "k")
	items, _ := n.takeSome(t, 2)
	n.requireNoWork(t)
	n.requireNoWork(t)
	n.exec(t, `INSERT INTO worker_queue (name, key) SELECT 'new', 'k' FROM generate_series(1, 100)`)
	n.exec(t, `SELECT remove_work(ARRAY(SELECT id FROM worker_queue WHERE name = 'new'))`)
	held := func() int {
		return len(query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`))
	}
	require.Equal(t, 4, held())
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT take_up_releases('{default}')`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 2, held())
	require.Empty(t, query[int64](t, n, `SELECT id FROM releases`))

	n.requireNoWork(t)
	require.Equal(t, 4, held())
	require.NoError(t, n.AckWorkItem(t.Context(), items[0].LockToken, nil))
	_, names := n.takeSome(t, 10)
	require.Len(t, names, 1)
	n.requireNoWork(t)
}

// Somebody deletes rows of the queue by hand, of a key of which others are at work: each look finds a place again.
func TestLimits_RowsAreDeletedByHand_EachLookFindsAPlace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 3})
	n.keyed(t, "k", "k", "k", "k", "k", "k")
	items, _ := n.takeSome(t, 3)
	n.requireNoWork(t)
	n.requireNoWork(t)
	look := func() { n.exec(t, `SELECT look('{}', '{}', 0, '{}', 0)`) }
	look()
	n.requireNoWork(t) // all are at work

	n.exec(t, `DELETE FROM worker_queue WHERE id = ANY ($1)`, []int64{items[0].ID, items[1].ID})
	n.requireNoWork(t)
	for range 2 {
		look()
		n.take(t)
		n.requireNoWork(t)
	}
	look()
	n.requireNoWork(t)
	require.Equal(t, int64(3), query[int64](t, n, `SELECT count(*) FROM worker_queue WHERE lock_token IS NOT NULL`)[0])
}

// While a namespace is paused no claim takes up what is noted as free, and looks remove what of it is of no use; what is held there stays as
// it is, and is found a place for when it is resumed.
func TestLimits_PausedForLong_LooksRemoveWhatIsOfNoUseAndBringBackNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 2})
	n.keyed(t, "k", "k", "k", "k", "k", "k")
	items, _ := n.takeSome(t, 2)
	n.requireNoWork(t)
	n.requireNoWork(t)
	look := func() { n.exec(t, `SELECT look('{}', '{}', 0, '{}', 0)`) }
	requireHeld := func() {
		t.Helper()
		require.Len(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`), 4)
	}
	requireHeld()

	for _, of := range []string{pgwake.AllNamespaces, pgwake.DefaultNamespace} {
		require.NoError(t, n.Pause(t.Context(), pgwake.Worker, of))
		for range 2 {
			n.exec(t, `INSERT INTO worker_queue (name, key) SELECT 'new', CASE i % 2 WHEN 0 THEN 'k' ELSE 'l' || i END FROM generate_series(1, 2200) AS i`)
			n.exec(t, `SELECT remove_work(ARRAY(SELECT id FROM worker_queue WHERE name = 'new'))`)
			look()
			require.LessOrEqual(t, query[int64](t, n, `SELECT count(*) FROM releases`)[0], int64(3*2), "as many as there are places, of each 1000")
			requireHeld()
			n.exec(t, `TRUNCATE releases`)
		}
		n.exec(t, `DELETE FROM worker_queue WHERE id = $1`, items[0].ID)
		look()
		requireHeld()
		require.NoError(t, n.Resume(t.Context(), pgwake.Worker, of))
	}
	n.requireNoWork(t)
	look()
	n.take(t)
	n.requireNoWork(t)
}

// Items of keys are removed in a transaction that goes on, where others are held: no claim is kept from holding items meanwhile.
func TestLimits_RemovalGoesOn_OthersAreHeldMeanwhile(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
	n.keyed(t, "k", "k", "l")
	n.takeSome(t, 2)
	n.requireNoWork(t)
	n.requireNoWork(t)
	require.Len(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`), 1)
	n.keyed(t, "m", "l", "l")
	conn, err := n.userPool(t, 1).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `SET search_path TO `+n.quoted())
	require.NoError(t, err)
	// In one message, so that no time is between the beginning and the removal.
	_, err = conn.Conn().PgConn().Exec(t.Context(), `BEGIN; SELECT remove_work(ARRAY(SELECT id FROM worker_queue WHERE key = 'm'))`).ReadAll()
	require.NoError(t, err)
	n.requireNoWork(t)
	n.requireNoWork(t)
	require.Len(t, query[int64](t, n, `SELECT id FROM worker_queue WHERE held_due IS NOT NULL`), 3)
	_, err = conn.Exec(t.Context(), `ROLLBACK`)
	require.NoError(t, err)
}

// What must hold of each key of which items are held whenever nobody is in the middle of anything: as many as may be at work are, or are
// to be met by a claim, or are noted as free.
const forgottenPlaces = `
	SELECT format('%s of key %s: %s held, %s others, %s released', k.tag, k.key, k.held, k.others, r.released)
	  FROM (SELECT q.namespace, q.tag, q.key, count(*) FILTER (WHERE q.held_due IS NOT NULL) AS held, count(*) FILTER (WHERE q.held_due IS NULL) AS others
	          FROM worker_queue q WHERE q.key IS NOT NULL AND q.session_id IS NULL GROUP BY q.namespace, q.tag, q.key) AS k
	  JOIN limits l ON l.queue = 'worker' AND l.namespace = k.namespace
	 CROSS JOIN LATERAL (SELECT count(*) AS released FROM releases r WHERE r.namespace = k.namespace AND r.tag = k.tag AND r.key = k.key) AS r
	 WHERE k.held > 0 AND k.others + r.released < l.max_running_per_key`

func TestLimits_WhateverBecomesOfTheItems_NoPlaceIsForgotten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	rapid.Check(t, func(t *rapid.T) {
		n.exec(t, `WITH w AS (DELETE FROM worker_queue), d AS (DELETE FROM dead_letters), s AS (DELETE FROM releases), r AS (DELETE FROM rates),
		                m AS (DELETE FROM marking) DELETE FROM limits`)
		most := rapid.IntRange(1, 4).Draw(t, "places")
		limits := pgwake.Limits{MaxRunningPerKey: most, MaxRunning: rapid.SampledFrom([]int{0, 0, 3}).Draw(t, "of all")}
		if rapid.IntRange(0, 3).Draw(t, "rate") == 0 {
			limits.RatePerKey = pgwake.Rate{Interval: time.Minute, Burst: 3}
		}
		set := func(t *rapid.T) {
			require.NoError(t, n.SetLimits(tctx, pgwake.DefaultNamespace, limits))
		}
		set(t)
		var claimed []pgwake.LockToken
		end := func(end func(token pgwake.LockToken) error) func(t *rapid.T) {
			return func(t *rapid.T) {
				if len(claimed) == 0 {
					t.Skip("nothing is claimed")
				}
				i := rapid.IntRange(0, len(claimed)-1).Draw(t, "which")
				if err := end(claimed[i]); !errors.Is(err, pgwake.ErrLockLost) {
					require.NoError(t, err)
				}
				claimed = append(claimed[:i], claimed[i+1:]...)
			}
		}
		fetch := func(t *rapid.T) {
			o := &pgwake.FetchOptions{NoWait: true, MaxAttempts: rapid.IntRange(0, 2).Draw(t, "attempts")}
			if len(claimed) > 0 && rapid.Bool().Draw(t, "ack") {
				o.Ack, claimed = claimed[:1:1], claimed[1:]
			}
			items, err := n.FetchWorkItems(tctx, rapid.IntRange(1, 12).Draw(t, "count"), o)
			if !errors.Is(err, pgwake.ErrNoWork) && !errors.Is(err, pgwake.ErrLockLost) {
				require.NoError(t, err)
			}
			atWork := map[string]int{}
			for _, item := range items {
				claimed = append(claimed, item.LockToken)
				atWork[item.Key]++
				require.LessOrEqual(t, atWork[item.Key], most)
			}
		}
		remove := func(which string) func(t *rapid.T) {
			return func(t *rapid.T) {
				n.exec(t, `SELECT remove_work(ARRAY(SELECT id FROM worker_queue WHERE `+which+` ORDER BY id LIMIT $1 FOR UPDATE))`,
					rapid.IntRange(1, 4).Draw(t, "count"))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"enqueue": func(t *rapid.T) {
				n.exec(t, `SELECT enqueue_work('w', p_key => $1, p_priority => $2::smallint) FROM generate_series(1, $3::integer)`,
					fmt.Sprint("k", rapid.IntRange(0, 1).Draw(t, "key")), rapid.IntRange(0, 1).Draw(t, "priority"), rapid.IntRange(1, 6).Draw(t, "count"))
			},
			"fetch":       fetch,
			"fetch again": fetch,
			"ack":         end(func(token pgwake.LockToken) error { return n.AckWorkItem(tctx, token, nil) }),
			"abandon":     end(func(token pgwake.LockToken) error { return n.AbandonWorkItem(tctx, token, nil) }),
			"put off": end(func(token pgwake.LockToken) error {
				return n.AbandonWorkItem(tctx, token, &pgwake.AbandonOptions{Delay: time.Hour, IgnoreAttempt: true})
			}),
			"bury": end(func(token pgwake.LockToken) error { return n.DeadLetterWorkItem(tctx, token, "spoilt", "") }),
			"undo": end(func(token pgwake.LockToken) error {
				n.exec(t, `SELECT undo_work_claim($1, '24 h')`, claimOf(token))
				return nil
			}),
			"redrive":        func(t *rapid.T) { n.redrive(t, &pgwake.DeadLetterFilter{}) },
			"remove":         remove("true"),
			"remove due":     remove("lock_token IS NULL AND held_due IS NULL"),
			"remove held":    remove("held_due IS NOT NULL"),
			"remove claimed": remove("lock_token IS NOT NULL"),
			"leases end": func(t *rapid.T) {
				n.exec(t, `UPDATE worker_queue SET visible_at = clock_timestamp() WHERE lock_token IS NOT NULL`)
			},
			"limits change": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "if") == 0 {
					most = rapid.IntRange(1, 4).Draw(t, "places")
					limits.MaxRunningPerKey = most
					set(t)
				}
			},
			"": func(t *rapid.T) { require.Empty(t, query[string](t, n, forgottenPlaces)) },
		})
	})
}
