package pgwake_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testclock"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of leases and delays if the server's clock is set while there is work?

// clocked opens a Provider on a server whose clock can be set.
func clocked(t *testing.T, s *testclock.Server, fallback time.Duration) *node {
	t.Helper()
	p, err := pgwake.Open(t.Context(), s.URL, &pgwake.Config{Schema: "clocks", FallbackInterval: fallback, AggressivePolicy: pgwake.Never, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return &node{Provider: p, schema: "clocks"}
}

// serverTime is what the server's clock shows.
func (n *node) serverTime(t *testing.T) (now time.Time) {
	t.Helper()
	require.NoError(t, n.Pool().QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now))
	return now
}

// delivered are names of work items, and instances of turns, as they come to somebody who waits for those of a namespace and keeps them.
type delivered struct{ items, turns chan string }

func (n *node) deliver(t *testing.T, namespace string) *delivered {
	t.Helper()
	d := &delivered{make(chan string, 100), make(chan string, 100)}
	ctx, end := context.WithCancel(context.Background())
	var all sync.WaitGroup
	t.Cleanup(func() { end(); all.Wait() })
	o := &pgwake.FetchOptions{Namespaces: []string{namespace}, LockTimeout: 24 * time.Hour, PollTimeout: patience}
	all.Go(func() {
		for ctx.Err() == nil {
			if item, err := n.FetchWorkItem(ctx, o); err == nil {
				d.items <- item.Name
			}
		}
	})
	all.Go(func() {
		for ctx.Err() == nil {
			if turn, err := n.FetchOrchestrationItem(ctx, o); err == nil {
				d.turns <- turn.Instance
			}
		}
	})
	require.Eventually(t, func() bool {
		s := n.Stats()
		return s.Listening && s.Worker.Parked == 1 && s.Orchestrator.Parked == 1
	}, patience, 10*time.Millisecond)
	return d
}

// require asserts that these come, as items and as turns, in any order.
func (d *delivered) require(t *testing.T, want ...string) {
	t.Helper()
	for _, c := range []chan string{d.items, d.turns} {
		var got []string
		for range want {
			select {
			case name := <-c:
				got = append(got, name)
			case <-time.After(patience):
				require.Fail(t, "it did not come", "%v of %v", got, want)
			}
		}
		require.ElementsMatch(t, want, got)
	}
}

// both enqueues a work item, and a message for an instance, of the same name.
func (n *node) both(t *testing.T, name string, o pgwake.EnqueueOptions) {
	t.Helper()
	n.enqueueWith(t, name, &o)
	n.sendWith(t, pgwake.Message{Instance: name, Kind: "k"}, &o)
}

// claimItemAndTurn takes both.
func (n *node) claimItemAndTurn(t *testing.T, namespace string, lease time.Duration) (*pgwake.ClaimedWorkItem, *pgwake.OrchestrationItem) {
	t.Helper()
	o := &pgwake.FetchOptions{Namespaces: []string{namespace}, LockTimeout: lease, NoWait: true}
	item, err := n.FetchWorkItem(t.Context(), o)
	require.NoError(t, err)
	turn, err := n.FetchOrchestrationItem(t.Context(), o)
	require.NoError(t, err)
	return item, turn
}

// requireNothing asserts that neither an item nor a turn of a namespace is due.
func (n *node) requireNothing(t *testing.T, namespace string) {
	t.Helper()
	o := &pgwake.FetchOptions{Namespaces: []string{namespace}, NoWait: true}
	_, err := n.FetchWorkItem(t.Context(), o)
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	_, err = n.FetchOrchestrationItem(t.Context(), o)
	require.ErrorIs(t, err, pgwake.ErrNoWork)
}

func TestClock_OfTheServerIsSetBack_WhatWasMeasuredBeforeWaitsAndWhatComesDoesNot(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a server")
	}
	t.Parallel()
	s := testclock.Start(t)
	s.Set(t, time.Hour)
	n := clocked(t, s, time.Hour)
	in := func(namespace string) pgwake.EnqueueOptions { return pgwake.EnqueueOptions{Namespace: namespace} }
	n.both(t, "died", in("before"))
	died, _ := n.claimItemAndTurn(t, "before", time.Minute)
	require.Equal(t, 1, died.Attempt)
	n.both(t, "queued", in("before"))
	n.both(t, "delayed", pgwake.EnqueueOptions{Namespace: "before", Delay: time.Minute})
	require.NoError(t, n.SetLimits(t.Context(), "rated", pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Second}}))
	ofKey := func(key, name string) pgwake.Enqueued {
		added, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: key}, &pgwake.EnqueueOptions{Namespace: "rated", DedupKey: name, DedupFor: time.Minute})
		require.NoError(t, err)
		return added
	}
	rated := &pgwake.FetchOptions{Namespaces: []string{"rated"}, NoWait: true}
	ofKey("k", "first")
	_, err := n.FetchWorkItem(t.Context(), rated)
	require.NoError(t, err)
	n.both(t, "lives", in("lives"))
	item, turn := n.claimItemAndTurn(t, "lives", time.Minute)
	come := clocked(t, s, time.Hour).deliver(t, "new") // by a node that has learnt how far ahead the server is

	s.Set(t, 0)
	n.requireNothing(t, "before")
	var waits []float64
	rows, err := n.Pool().Query(t.Context(), `SELECT extract(epoch FROM visible_at - clock_timestamp())::float8 FROM clocks.worker_queue WHERE namespace = 'before'
		UNION ALL SELECT extract(epoch FROM visible_at - clock_timestamp())::float8 FROM clocks.orchestrator_queue WHERE namespace = 'before'`)
	require.NoError(t, err)
	for rows.Next() {
		var seconds float64
		require.NoError(t, rows.Scan(&seconds))
		waits = append(waits, seconds)
	}
	require.NoError(t, rows.Err())
	require.Len(t, waits, 6)
	for _, seconds := range waits {
		require.InDelta(t, time.Hour.Seconds(), seconds, 120)
	}

	// What comes new is on time: what is due, and what is delayed, by timers, since the fallback is far away.
	n.both(t, "late", pgwake.EnqueueOptions{Namespace: "new", Delay: time.Second})
	n.both(t, "now", in("new"))
	come.require(t, "now", "late")
	// So it overtakes what an instance had before.
	n.sendWith(t, pgwake.Message{Instance: "queued", Kind: "new"}, &pgwake.EnqueueOptions{Namespace: "before"})
	first, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{Namespaces: []string{"before"}, NoWait: true})
	require.NoError(t, err)
	require.Equal(t, []pgwake.MessageKind{"new"}, kindsOf(first))
	n.ackTurn(t, first, pgwake.OrchestrationAck{})

	// And what comes of a key is bound by what the key has done before.
	require.True(t, ofKey("another", "first").Duplicate)
	ofKey("k", "second")
	ofKey("another", "third")
	third, err := n.FetchWorkItem(t.Context(), rated)
	require.NoError(t, err)
	require.Equal(t, "third", third.Name)
	n.requireNothing(t, "rated")

	// A lease that is renewed has its proper length again, and those who live go on.
	until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, time.Minute)
	require.NoError(t, err)
	require.WithinDuration(t, n.serverTime(t).Add(time.Minute), until, patience)
	until, err = n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, time.Minute)
	require.NoError(t, err)
	require.WithinDuration(t, n.serverTime(t).Add(time.Minute), until, patience)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})

	// Nothing is lost: when the clock has come so far again, all of it comes.
	s.Set(t, time.Hour+2*time.Minute)
	clocked(t, s, time.Hour).deliver(t, "before").require(t, "died", "queued", "delayed")
	n.requireNothing(t, "before")
}

func TestClock_OfTheServerIsSetForward_LeasesEndAndStaleTokensAreRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a server")
	}
	t.Parallel()
	s := testclock.Start(t)
	n := clocked(t, s, time.Hour)
	in := func(namespace string) pgwake.EnqueueOptions { return pgwake.EnqueueOptions{Namespace: namespace} }
	n.both(t, "leased", in("served"))
	item, turn := n.claimItemAndTurn(t, "served", 30*time.Minute)
	n.both(t, "delayed", pgwake.EnqueueOptions{Namespace: "served", Delay: 30 * time.Minute})
	n.both(t, "alone", in("unserved"))
	alone, aloneTurn := n.claimItemAndTurn(t, "unserved", 30*time.Minute)
	come := clocked(t, s, time.Second).deliver(t, "served")

	// Whoever waits learns of it by the next answer: here, of the fallback.
	s.Set(t, time.Hour)
	come.require(t, "leased", "delayed")
	requireLost := func(item *pgwake.ClaimedWorkItem, turn *pgwake.OrchestrationItem) {
		t.Helper()
		_, err := n.RenewWorkItemLock(t.Context(), item.LockToken, time.Hour)
		require.ErrorIs(t, err, pgwake.ErrLockLost)
		require.ErrorIs(t, n.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
		_, err = n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, time.Hour)
		require.ErrorIs(t, err, pgwake.ErrLockLost)
		require.ErrorIs(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
	}
	requireLost(item, turn)
	requireLost(alone, aloneTurn) // also while nobody else has it
	again, _ := n.claimItemAndTurn(t, "unserved", time.Minute)
	require.Equal(t, 2, again.Attempt)

	// What comes new is as ever.
	n.both(t, "now", in("served"))
	n.both(t, "late", pgwake.EnqueueOptions{Namespace: "served", Delay: time.Second})
	come.require(t, "now", "late")
}

// A claim of a turn takes the lock of the instance, which may take a moment, and then its messages.
func TestClock_OfTheServerIsSetBackWhileATurnIsClaimed_TheTurnHasItsMessages(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a server")
	}
	t.Parallel()
	s := testclock.Start(t)
	s.Set(t, time.Hour)
	n := clocked(t, s, time.Hour)
	exec := func(sql string) {
		t.Helper()
		_, err := n.Pool().Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	exec(`CREATE FUNCTION clocks.wait_by_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$`)
	exec(`CREATE TRIGGER wait_by_test BEFORE INSERT ON clocks.instance_locks FOR EACH ROW EXECUTE FUNCTION clocks.wait_by_test()`)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k"}, nil)
	holder, err := n.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = holder.Exec(t.Context(), `SELECT pg_advisory_xact_lock(7)`)
	require.NoError(t, err)
	type outcome struct {
		turn *pgwake.OrchestrationItem
		err  error
	}
	came := make(chan outcome, 1)
	go func() {
		turn, err := n.FetchOrchestrationItem(t.Context(), now)
		came <- outcome{turn, err}
	}()
	require.Eventually(t, func() (waits bool) {
		err := n.Pool().QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`).Scan(&waits)
		return err == nil && waits
	}, patience, 10*time.Millisecond)
	s.Set(t, 0)
	require.NoError(t, holder.Rollback(t.Context()))
	o := <-came
	require.NoError(t, o.err)
	require.Equal(t, []pgwake.MessageKind{"k"}, kindsOf(o.turn))
	require.Equal(t, 1, o.turn.Attempt)
	n.ackTurn(t, o.turn, pgwake.OrchestrationAck{})
}

// Whoever fetches is not to end for it, and the instance is not to stay locked.
func TestFetchOrchestrationItem_TurnWithoutItsMessages_IsGivenBackAndMayBeTriedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "k")
	redefine := func(from, to string) {
		t.Helper()
		n.exec(t, `DO $do$ DECLARE
				v_before text := pg_get_functiondef('fetch_orchestration'::regproc);
				v_after  text := replace(v_before, $$`+from+`$$, $$`+to+`$$);
			BEGIN
				ASSERT v_before <> v_after;
				EXECUTE v_after;
			END $do$`)
	}
	const good, bad = `greatest(v_now, clock_timestamp())`, `v_now - interval '1 hour'`
	redefine(good, bad)
	_, err := n.FetchOrchestrationItem(t.Context(), now)
	var failure *pgwake.Error
	require.ErrorAs(t, err, &failure)
	require.True(t, failure.Retryable, "%v", err)
	redefine(bad, good)
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, []pgwake.MessageKind{"k"}, kindsOf(turn))
	require.Equal(t, 1, turn.Attempt)
}
