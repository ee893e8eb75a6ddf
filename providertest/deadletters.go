package providertest

import (
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what do dead letters keep, and which of them does a filter mean?

var letters = []row{
	{"dead_letter_of_work_comes_back_as_it_was", func(t *testing.T, n *node) {
		item := pgwake.WorkItem{Name: "work", Input: []byte(`{"to": "ada"}`), Instance: "i", ExecutionID: 3, ActivityID: 4, Tag: "gpu", Session: "s",
			Headers: map[string]string{"h": "1"}}
		o := &pgwake.EnqueueOptions{Namespace: "a", Priority: 7, DedupKey: "key"}
		n.enqueueWith(t, item, o)
		fetch := by("A")
		fetch.Tags = pgwake.AnyTag()
		first := n.takeWith(t, fetch)
		require.NoError(t, n.AbandonWorkItem(t.Context(), first.LockToken, &pgwake.AbandonOptions{Error: "no answer"}))
		require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.takeWith(t, fetch).LockToken, "given up", ""))
		n.requireNoWorkWith(t, fetch)
		letter := n.requireLetter(t, pgwake.DeadLetter{Queue: pgwake.Worker, ItemID: first.ID, Namespace: "a", Priority: 7, Attempts: 2,
			EnqueuedAt: first.EnqueuedAt, Reason: "given up", Error: "no answer", Name: "work", Data: item.Input,
			Instance: "i", ExecutionID: 3, ActivityID: 4, DedupKey: "key", Tag: "gpu", Session: "s", Headers: item.Headers})
		requireNotBefore(t, first.EnqueuedAt, letter.DiedAt)

		require.False(t, n.enqueueWith(t, item, o).Duplicate, "the letter does not queue its key")
		n.requireRedriven(t, nil, 0)
		n.ack(t, n.takeWith(t, fetch))
		n.requireRedriven(t, nil, 1)
		again := n.takeWith(t, fetch)
		require.Equal(t, item, again.WorkItem)
		require.Equal(t, first.ID, again.ID)
		require.Equal(t, 7, again.Priority)
		require.Equal(t, "a", again.Namespace)
		require.Equal(t, 1, again.Attempt)
		require.True(t, n.enqueueWith(t, item, o).Duplicate)
		requirePermanent(t, n.DeadLetterWorkItem(t.Context(), first.LockToken, "given up", ""), pgwake.ErrLockLost)
	}},
	{"dead_letter_of_message_comes_back_as_it_was", func(t *testing.T, n *node) {
		m := startMessage("i")
		m.Data, m.Queue, m.Headers = []byte(`{"order": 7}`), "slow", map[string]string{"h": "1"}
		added := n.sendWith(t, m, &pgwake.EnqueueOptions{Namespace: "a", Priority: 7, DedupKey: "key"})
		turn := n.takeTurnOf(t, "i")
		require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "given up", "no answer"))
		n.requireNoTurn(t)
		n.requireLetter(t, pgwake.DeadLetter{Queue: pgwake.Orchestrator, ItemID: added.ID, Namespace: "a", Priority: 7, Attempts: 1,
			EnqueuedAt: turn.Messages[0].EnqueuedAt, Reason: "given up", Error: "no answer", Name: m.Name, Kind: m.Kind, Version: m.Version,
			Data: m.Data, Instance: "i", ExecutionID: 1, DedupKey: "key", Tag: "slow", Headers: m.Headers})

		n.requireRedriven(t, nil, 1)
		again := n.takeTurnOf(t, "i")
		require.Equal(t, turn.Messages, again.Messages)
		require.Equal(t, "slow", again.Queue)
		require.Equal(t, "a", again.Namespace)
		requirePermanent(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "given up", ""), pgwake.ErrLockLost)
	}},
	{"dead_letters_are_listed_by_filter", func(t *testing.T, n *node) {
		all := n.bury(t)
		for _, f := range letterFilters(all) {
			listed, err := n.ListDeadLetters(t.Context(), f.filter)
			require.NoError(t, err)
			require.Equal(t, f.chosen(all), listed, "%+v", f.filter)
		}
	}},
	{"dead_letters_are_purged_by_filter", func(t *testing.T, n *node) { n.requireByFilter(t, n.requirePurged, false) }},
	{"dead_letters_are_redriven_by_filter", func(t *testing.T, n *node) { n.requireByFilter(t, n.requireRedriven, true) }},
}

// bury makes four dead letters, which it returns in the order of their ids.
func (n *node) bury(t *testing.T) []pgwake.DeadLetter {
	t.Helper()
	for _, l := range []struct {
		queue                   pgwake.Queue
		name, namespace, reason string
	}{
		{pgwake.Worker, "mail", "a", "spoilt"},
		{pgwake.Worker, "print", "b", "stale"},
		{pgwake.Orchestrator, "i", "b", "spoilt"},
		{pgwake.Orchestrator, "j", "a", "stale"},
	} {
		o := &pgwake.EnqueueOptions{Namespace: l.namespace}
		if l.queue == pgwake.Worker {
			n.enqueueWith(t, pgwake.WorkItem{Name: l.name, Instance: "i"}, o)
			require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, l.reason, ""))
		} else {
			n.sendWith(t, startMessage(l.name), o)
			require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), n.takeTurnOf(t, l.name).LockToken, l.reason, ""))
		}
	}
	all := n.deadLetters(t)
	require.Len(t, all, 4)
	return all
}

// letterFilter is a filter, and which of the letters that bury makes it means.
type letterFilter struct {
	filter *pgwake.DeadLetterFilter
	means  []int
}

func letterFilters(all []pgwake.DeadLetter) []letterFilter {
	const unknown = 1 << 40
	return []letterFilter{
		{nil, []int{0, 1, 2, 3}},
		{&pgwake.DeadLetterFilter{Queue: new(pgwake.Worker)}, []int{0, 1}},
		{&pgwake.DeadLetterFilter{Queue: new(pgwake.Orchestrator)}, []int{2, 3}},
		{&pgwake.DeadLetterFilter{Namespace: "a"}, []int{0, 3}},
		{&pgwake.DeadLetterFilter{Name: "mail"}, []int{0}},
		{&pgwake.DeadLetterFilter{Name: "flow"}, []int{2, 3}},
		{&pgwake.DeadLetterFilter{Instance: "i"}, []int{0, 1, 2}},
		{&pgwake.DeadLetterFilter{Reason: "spoilt"}, []int{0, 2}},
		{&pgwake.DeadLetterFilter{DiedBefore: all[2].DiedAt}, []int{0, 1}},
		{&pgwake.DeadLetterFilter{IDs: []int64{all[3].ID, unknown, all[1].ID}}, []int{1, 3}},
		{&pgwake.DeadLetterFilter{IDs: []int64{}}, nil},
		{&pgwake.DeadLetterFilter{After: all[1].ID}, []int{2, 3}},
		{&pgwake.DeadLetterFilter{Limit: 3}, []int{0, 1, 2}},
		{&pgwake.DeadLetterFilter{Reason: "stale", After: all[0].ID, Limit: 1}, []int{1}},
		{&pgwake.DeadLetterFilter{Reason: "spoilt", Namespace: "b"}, []int{2}},
		{&pgwake.DeadLetterFilter{Reason: "unknown"}, nil},
	}
}

// chosen are the letters that the filter means.
func (f letterFilter) chosen(all []pgwake.DeadLetter) (chosen []pgwake.DeadLetter) {
	chosen = []pgwake.DeadLetter{}
	for _, i := range f.means {
		chosen = append(chosen, all[i])
	}
	return chosen
}

// requireByFilter asserts that what takes so many letters away by a filter takes those that it means, each time from
// four, and that they are due if they are to come back.
func (n *node) requireByFilter(t *testing.T, take func(*testing.T, *pgwake.DeadLetterFilter, int), back bool) {
	t.Helper()
	all := n.bury(t)
	for i := range letterFilters(all) {
		f := letterFilters(all)[i] // with the ids of this time
		chosen, left := f.chosen(all), slices.Clone(all)
		take(t, f.filter, len(chosen))
		due := make(map[pgwake.Queue][]string)
		for _, c := range chosen {
			left = slices.DeleteFunc(left, func(d pgwake.DeadLetter) bool { return c.ID == d.ID })
			if back && c.Queue == pgwake.Worker {
				due[c.Queue] = append(due[c.Queue], c.Name)
			} else if back {
				due[c.Queue] = append(due[c.Queue], c.Instance)
			}
		}
		require.Equal(t, left, n.deadLetters(t), "%+v", f.filter)
		for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
			require.Equal(t, due[queue], n.inOrder(t, queue, now), "%+v", f.filter)
		}
		n.requirePurged(t, nil, len(left))
		all = n.bury(t)
	}
}

func (n *node) requirePurged(t *testing.T, f *pgwake.DeadLetterFilter, want int) {
	t.Helper()
	purged, err := n.PurgeDeadLetters(t.Context(), f)
	require.NoError(t, err)
	require.Equal(t, want, purged, "%+v", f)
}

func (n *node) requireRedriven(t *testing.T, f *pgwake.DeadLetterFilter, want int) {
	t.Helper()
	redriven, err := n.RedriveDeadLetters(t.Context(), f)
	require.NoError(t, err)
	require.Equal(t, want, redriven, "%+v", f)
}

// deadLetters returns all of them.
func (n *node) deadLetters(t *testing.T) []pgwake.DeadLetter {
	t.Helper()
	all, err := n.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	return append([]pgwake.DeadLetter{}, all...)
}

// requireLetter asserts that there is one letter, and what it keeps, its id and the time of its death apart.
func (n *node) requireLetter(t *testing.T, want pgwake.DeadLetter) pgwake.DeadLetter {
	t.Helper()
	all := n.deadLetters(t)
	require.Len(t, all, 1)
	got := all[0]
	got.ID, got.DiedAt = 0, time.Time{}
	require.Equal(t, want, got)
	return all[0]
}
