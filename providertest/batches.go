package providertest

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what is queued only once, what comes first, and what becomes of several at once?

// queueing are the rows about enqueues and the order of what is queued, each for both queues.
var queueing = slices.Concat(
	ofBoth("dedup_key_of_%s_is_queued_once", func(t *testing.T, n *node, queue pgwake.Queue) {
		key := pgwake.EnqueueOptions{DedupKey: "key"}
		first := n.add(t, queue, "first", key)
		require.False(t, first.Duplicate)
		second := n.add(t, queue, "second", key)
		require.True(t, second.Duplicate)
		require.Equal(t, first.ID, second.ID)
		require.True(t, second.DueAt.Equal(first.DueAt))

		require.False(t, n.add(t, queue, "third", pgwake.EnqueueOptions{DedupKey: "another"}).Duplicate)
		require.False(t, n.add(t, queue, "fourth", pgwake.EnqueueOptions{DedupKey: "key", Namespace: "another"}).Duplicate)
		require.False(t, n.add(t, other(queue), "first", key).Duplicate)

		claimed := n.fetch(t.Context(), queue, now).got(t)
		require.Equal(t, "first", claimed.subject)
		second = n.add(t, queue, "second", key)
		require.True(t, second.Duplicate, "it is queued, although it is claimed")
		require.Equal(t, first.ID, second.ID)
		n.finish(t, queue, claimed)
		require.False(t, n.add(t, queue, "second", key).Duplicate, "nothing with the key is queued any more")
		require.Equal(t, []string{"third", "fourth", "second"}, n.inOrder(t, queue, now))
	}),
	ofBoth("priority_of_%s_comes_first", func(t *testing.T, n *node, queue pgwake.Queue) {
		for round, o := range []*pgwake.FetchOptions{now, {LockTimeout: lease, NoWait: true, Namespaces: []string{pgwake.DefaultNamespace}}} {
			name := func(i int) string { return fmt.Sprintf("%d of round %d", i, round) }
			for i, priority := range []int{0, 9, 5, 0, 9, 1} {
				n.add(t, queue, name(i), pgwake.EnqueueOptions{Priority: priority})
			}
			require.Equal(t, []string{name(1), name(4), name(2), name(5), name(0), name(3)}, n.inOrder(t, queue, o))
		}
	}),
	[]row{{"work_that_was_not_begun_keeps_its_place", func(t *testing.T, n *node) {
		n.enqueue(t, "1", "2", "3")
		item := n.take(t)
		for _, bad := range []pgwake.AbandonOptions{{DueAt: item.DueAt, Delay: 1}, {DueAt: time.Unix(1<<60, 0)}} {
			requirePermanent(t, n.AbandonWorkItem(t.Context(), item.LockToken, &bad), pgwake.ErrInvalid)
		}
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{DueAt: item.DueAt, IgnoreAttempt: true}))
		again := n.take(t)
		require.Equal(t, "1", again.Name)
		require.True(t, again.DueAt.Equal(item.DueAt))
		require.NoError(t, n.AbandonWorkItem(t.Context(), again.LockToken, &pgwake.AbandonOptions{DueAt: item.DueAt.Add(time.Hour)}))
		require.Equal(t, []string{"2", "3", "1"}, n.inOrder(t, pgwake.Worker, now), "an instant to come is no delay")
	}}},
	ofBoth("due_time_of_%s_decides_within_a_priority", func(t *testing.T, n *node, queue pgwake.Queue) {
		before := n.add(t, queue, "given back", pgwake.EnqueueOptions{}).DueAt
		back := n.fetch(t.Context(), queue, now).got(t)
		n.add(t, queue, "waiting", pgwake.EnqueueOptions{})
		n.add(t, queue, "overdue", pgwake.EnqueueOptions{At: before.Add(-time.Hour)})
		if queue == pgwake.Worker {
			require.NoError(t, n.AbandonWorkItem(t.Context(), back.token, nil))
		} else {
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), back.token, nil))
		}
		require.Equal(t, []string{"overdue", "waiting", "given back"}, n.inOrder(t, queue, now))
	}),
	ofBoth("batch_of_%s_is_told_in_its_order", func(t *testing.T, n *node, queue pgwake.Queue) {
		added, err := n.addMany(t, queue, []entry{
			{"a", pgwake.EnqueueOptions{}},
			{"b", pgwake.EnqueueOptions{DedupKey: "key"}},
			{"c", pgwake.EnqueueOptions{DedupKey: "key"}},
			{"d", pgwake.EnqueueOptions{Delay: lease}},
			{"e", pgwake.EnqueueOptions{Priority: 9}},
		})
		require.NoError(t, err)
		require.Len(t, added, 5)
		ids := make(map[int64]bool)
		for i, e := range added {
			require.Equal(t, i == 2, e.Duplicate, i)
			ids[e.ID] = true
		}
		require.Len(t, ids, 4)
		require.Equal(t, added[1].ID, added[2].ID)
		for i, delay := range map[int]time.Duration{1: 0, 3: lease, 4: 0} {
			requireNotBefore(t, added[0].DueAt.Add(delay), added[i].DueAt)
			requireNotBefore(t, added[i].DueAt, added[0].DueAt.Add(delay+patience))
		}
		require.Equal(t, []string{"e", "a", "b"}, n.inOrder(t, queue, now))
		require.Equal(t, pgwake.QueueDepth{Delayed: 1}, n.depth(t, queue))
	}),
	ofBoth("batch_of_%s_is_all_or_none", func(t *testing.T, n *node, queue pgwake.Queue) {
		for _, broken := range []entry{
			{"", pgwake.EnqueueOptions{}},
			{"b", pgwake.EnqueueOptions{Priority: 10}},
			{"b", pgwake.EnqueueOptions{Delay: -time.Second}},
		} {
			added, err := n.addMany(t, queue, []entry{{"a", pgwake.EnqueueOptions{}}, broken, {"c", pgwake.EnqueueOptions{}}})
			requirePermanent(t, err, pgwake.ErrInvalid)
			require.Empty(t, added)
			require.Zero(t, n.depth(t, queue))
		}
	}),
)

// batches are the rows about claiming, acknowledging and renewing several work items at once.
var batches = []row{
	{"batch_of_claims_is_what_is_due_up_to_its_size", func(t *testing.T, n *node) {
		n.enqueue(t, "a", "b", "c", "d")
		n.enqueueWith(t, pgwake.WorkItem{Name: "first"}, &pgwake.EnqueueOptions{Priority: 9})
		n.enqueueWith(t, pgwake.WorkItem{Name: "delayed"}, &pgwake.EnqueueOptions{Delay: lease})
		batch := n.takeSome(t, 3, now)
		require.Equal(t, []string{"first", "a", "b"}, names(batch))
		rest := n.takeSome(t, 3, now)
		require.Equal(t, []string{"c", "d"}, names(rest))
		nothing, err := n.FetchWorkItems(t.Context(), 3, now)
		require.ErrorIs(t, err, pgwake.ErrNoWork)
		require.Empty(t, nothing)

		seen := make(map[pgwake.LockToken]bool)
		for _, item := range append(batch, rest...) {
			require.Equal(t, 1, item.Attempt)
			seen[item.LockToken] = true
		}
		require.Len(t, seen, 5)
		require.NoError(t, n.AbandonWorkItem(t.Context(), batch[1].LockToken, nil))
		require.Equal(t, []string{"a"}, names(n.takeSome(t, 3, now)), "each has a lease of its own")
		for _, size := range []int{-1, 0} {
			_, err := n.FetchWorkItems(t.Context(), size, now)
			requirePermanent(t, err, pgwake.ErrInvalid)
		}
	}},
	{"batch_of_claims_waits_for_the_first_alone", func(t *testing.T, n *node) {
		begun := time.Now()
		n.enqueueWith(t, pgwake.WorkItem{Name: "work"}, &pgwake.EnqueueOptions{Delay: moment})
		require.Equal(t, []string{"work"}, names(n.takeSome(t, 10, soon)))
		require.Less(t, time.Since(begun), patience*3/4)
	}},
	{"batch_of_acks_reports_leases_that_are_lost", func(t *testing.T, n *node) {
		retaken, held, lost := n.takeAndLoseOne(t)
		err := n.AckWorkItems(t.Context(), []pgwake.LockToken{lost, held[0], "no such token", held[1]})
		requireLost(t, err, lost, "no such token")
		require.Equal(t, pgwake.QueueDepth{Leased: 1}, n.depth(t, pgwake.Worker), "the others are acknowledged")
		requireLost(t, n.AckWorkItems(t.Context(), held), held...)
		require.NoError(t, n.AckWorkItems(t.Context(), []pgwake.LockToken{retaken}))
		require.Zero(t, n.depth(t, pgwake.Worker))
	}},
	{"acks_at_the_same_moment_have_outcomes_of_their_own", func(t *testing.T, n *node) {
		n.start(t, "i")
		retaken, held, lost := n.takeAndLoseOne(t)
		tokens := append(held, lost)
		holds := []bool{true, true, false}
		for i := range 16 { // so many that most of them share
			n.enqueue(t, "more")
			item := n.take(t)
			tokens, holds = append(tokens, item.LockToken), append(holds, i%2 == 0)
			if i%2 != 0 {
				require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{Delay: time.Hour}))
			}
		}
		errs := make([]error, len(tokens))
		together(len(tokens), func(i int) {
			errs[i] = n.AckBatched(t.Context(), tokens[i], &pgwake.Message{Instance: "i", Kind: "done"})
		})
		for i, err := range errs {
			if holds[i] {
				require.NoError(t, err)
			} else {
				requirePermanent(t, err, pgwake.ErrLockLost)
			}
		}
		require.Len(t, n.takeTurnOf(t, "i").Messages, 10, "those that lost their leases send nothing")
		require.NoError(t, n.AckBatched(t.Context(), retaken, nil))
		require.Equal(t, pgwake.QueueDepth{Delayed: 8}, n.depth(t, pgwake.Worker))
	}},
	{"batch_of_renewals_reports_leases_that_are_lost", func(t *testing.T, n *node) {
		retaken, held, lost := n.takeAndLoseOne(t)
		until, err := n.RenewWorkItemLocks(t.Context(), []pgwake.LockToken{held[0], lost, held[1]}, n.LockTimeout)
		requireLost(t, err, lost)
		require.Len(t, until, len(held))
		ends := map[string]time.Time{"held 0": until[held[0]], "held 1": until[held[1]]}
		for range held {
			again := n.await(t)
			require.NotZero(t, ends[again.Name], again.Name)
			requireNotBefore(t, ends[again.Name], claimedAt(again.LockedUntil))
			delete(ends, again.Name)
		}
		require.NoError(t, n.AckWorkItem(t.Context(), retaken, nil), "it was not cut short")
	}},
	{"fetch_acknowledges_before_it_claims", func(t *testing.T, n *node) {
		n.enqueue(t, "a", "b", "c")
		done := n.take(t)
		for _, want := range []string{"b", "c"} {
			item := n.takeWith(t, acking(done))
			require.Equal(t, want, item.Name)
			requirePermanent(t, n.AckWorkItem(t.Context(), done.LockToken, nil), pgwake.ErrLockLost)
			done = item
		}
		require.Equal(t, pgwake.QueueDepth{Leased: 1}, n.depth(t, pgwake.Worker))
		n.requireNoWorkWith(t, acking(done))
		require.Zero(t, n.depth(t, pgwake.Worker), "it is acknowledged although there was nothing to claim")
	}},
	{"asynchronous_ack_is_an_ack", func(t *testing.T, n *node) {
		n.enqueue(t, "1", "2")
		o := acking(n.take(t))
		o.AckAsync = true
		item := n.takeWith(t, o)
		require.Equal(t, "2", item.Name)
		require.Equal(t, pgwake.QueueDepth{Leased: 1}, n.depth(t, pgwake.Worker))
		o.Ack = []pgwake.LockToken{item.LockToken}
		n.requireNoWorkWith(t, o)
		require.NoError(t, n.Flush(t.Context()))
		require.Zero(t, n.depth(t, pgwake.Worker))
	}},
	{"fetch_that_acknowledges_a_lost_lease_claims_nothing", func(t *testing.T, n *node) {
		_, held, lost := n.takeAndLoseOne(t)
		n.enqueue(t, "due")
		item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Ack: append(held, lost)})
		requireLost(t, err, lost)
		require.Nil(t, item)
		require.Equal(t, pgwake.QueueDepth{Due: 1, Leased: 1}, n.depth(t, pgwake.Worker), "the others are acknowledged")
		require.Equal(t, 1, n.take(t).Attempt)
	}},
}

// ofBoth makes two rows of a behaviour: for work, and for messages.
func ofBoth(name string, test func(*testing.T, *node, pgwake.Queue)) []row {
	return []row{
		{fmt.Sprintf(name, "work"), func(t *testing.T, n *node) { test(t, n, pgwake.Worker) }},
		{fmt.Sprintf(name, "messages"), func(t *testing.T, n *node) { test(t, n, pgwake.Orchestrator) }},
	}
}

func other(queue pgwake.Queue) pgwake.Queue {
	if queue == pgwake.Worker {
		return pgwake.Orchestrator
	}
	return pgwake.Worker
}

// entry is a work item of this name, or a message that opens an instance of this name.
type entry struct {
	name string
	o    pgwake.EnqueueOptions
}

// add enqueues one of them.
func (n *node) add(t *testing.T, queue pgwake.Queue, name string, o pgwake.EnqueueOptions) pgwake.Enqueued {
	t.Helper()
	if queue == pgwake.Worker {
		return n.enqueueWith(t, pgwake.WorkItem{Name: name}, &o)
	}
	return n.sendWith(t, startMessage(name), &o)
}

// addMany enqueues several in one call.
func (n *node) addMany(t *testing.T, queue pgwake.Queue, entries []entry) ([]pgwake.Enqueued, error) {
	if queue == pgwake.Worker {
		items := make([]pgwake.WorkEnqueue, len(entries))
		for i, e := range entries {
			items[i] = pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: e.name}, EnqueueOptions: e.o}
		}
		return n.EnqueueForWorkerMany(t.Context(), items)
	}
	messages := make([]pgwake.MessageEnqueue, len(entries))
	for i, e := range entries {
		messages[i] = pgwake.MessageEnqueue{Message: startMessage(e.name), EnqueueOptions: e.o}
	}
	return n.EnqueueForOrchestratorMany(t.Context(), messages)
}

// finish acknowledges what was fetched. An instance stays unknown.
func (n *node) finish(t *testing.T, queue pgwake.Queue, f fetched) {
	t.Helper()
	if queue == pgwake.Worker {
		require.NoError(t, n.AckWorkItem(t.Context(), f.token, nil))
		return
	}
	require.NoError(t, n.AckOrchestrationItem(t.Context(), f.token, pgwake.OrchestrationAck{}))
}

// inOrder fetches and finishes whatever is due, one by one, and returns what that was.
func (n *node) inOrder(t *testing.T, queue pgwake.Queue, o *pgwake.FetchOptions) (subjects []string) {
	t.Helper()
	for {
		f := n.fetch(t.Context(), queue, o)
		if errors.Is(f.err, pgwake.ErrNoWork) {
			return subjects
		}
		n.finish(t, queue, f.got(t))
		subjects = append(subjects, f.subject)
	}
}

// takeSome fetches up to so many items, of which one must be due or become so.
func (n *node) takeSome(t *testing.T, count int, o *pgwake.FetchOptions) []*pgwake.ClaimedWorkItem {
	t.Helper()
	items, err := n.FetchWorkItems(t.Context(), count, o)
	require.NoError(t, err)
	return items
}

// takeAndLoseOne claims "lost", "held 0" and "held 1". The lease of the first is lost: it was given back, and taken
// again with another token.
func (n *node) takeAndLoseOne(t *testing.T) (retaken pgwake.LockToken, held []pgwake.LockToken, lost pgwake.LockToken) {
	t.Helper()
	n.enqueue(t, "lost", "held 0", "held 1")
	lost = n.take(t).LockToken
	held = []pgwake.LockToken{n.take(t).LockToken, n.take(t).LockToken}
	require.NoError(t, n.AbandonWorkItem(t.Context(), lost, nil))
	return n.take(t).LockToken, held, lost
}

// requireLost asserts that err is about these leases and no others.
func requireLost(t *testing.T, err error, tokens ...pgwake.LockToken) {
	t.Helper()
	requirePermanent(t, err, pgwake.ErrLockLost)
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &lost)
	require.ElementsMatch(t, tokens, lost.Tokens)
}

// acking are the options now for a fetch that acknowledges an item first.
func acking(item *pgwake.ClaimedWorkItem) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Ack: []pgwake.LockToken{item.LockToken}}
}

func names(items []*pgwake.ClaimedWorkItem) []string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Name
	}
	return all
}
