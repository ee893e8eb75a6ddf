package pgwake_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: is what is in a queue shown as it is, and left as it is?

func (n *node) peeked(t *testing.T, queue pgwake.Queue, f *pgwake.PeekFilter) []pgwake.QueuedItem {
	t.Helper()
	items, err := n.Peek(t.Context(), queue, f)
	require.NoError(t, err)
	return items
}

func TestPeek_ItemWithEverything_IsShownAsItIs(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	id := n.wholeItem(t)
	n.exec(t, `UPDATE worker_queue SET key = 'k', headers = '{"a": "b"}'`)
	before := n.content(t)
	items := n.peeked(t, pgwake.Worker, nil)
	require.Len(t, items, 1)
	require.WithinDuration(t, time.Now(), items[0].DueAt, time.Hour)
	require.True(t, items[0].EnqueuedAt.Equal(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)))
	items[0].DueAt, items[0].EnqueuedAt = time.Time{}, time.Time{}
	require.Equal(t, pgwake.QueuedItem{
		ID: id, Queue: pgwake.Worker, Namespace: "mine", Priority: 7, State: pgwake.ItemDue, Name: "w", Data: json.RawMessage(`{"a":  1.50}`),
		Instance: "i", ExecutionID: 2, ActivityID: 3, DedupKey: "key", Tag: "gpu", Key: "k", Headers: map[string]string{"a": "b"}, LastError: "earlier",
	}, items[0])
	require.Equal(t, before, n.content(t), "nothing is claimed")
}

func TestPeek_MessageWithEverything_IsShownAsItIs(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Data: json.RawMessage(`[1]`), Name: "n", Version: "2.0.0", ExecutionID: 4,
		Queue: "q", Headers: map[string]string{"a": "b"}}, &pgwake.EnqueueOptions{Priority: 3, DedupKey: "key", Delay: time.Hour})
	items := n.peeked(t, pgwake.Orchestrator, nil)
	require.Len(t, items, 1)
	require.WithinDuration(t, items[0].EnqueuedAt.Add(time.Hour), items[0].DueAt, time.Minute)
	items[0].DueAt, items[0].EnqueuedAt = time.Time{}, time.Time{}
	require.Equal(t, pgwake.QueuedItem{
		ID: items[0].ID, Queue: pgwake.Orchestrator, Namespace: "default", Priority: 3, State: pgwake.ItemDelayed, Name: "n", Kind: pgwake.MessageStart,
		Version: "2.0.0", Data: json.RawMessage(`[1]`), Instance: "i", ExecutionID: 4, DedupKey: "key", Tag: "q", Headers: map[string]string{"a": "b"},
	}, items[0])
}

func TestPeek_States_AreThoseOfTheDepths(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.NoError(t, n.SetLimits(t.Context(), "default", pgwake.Limits{MaxRunningPerKey: 1}))
	for _, name := range []string{"leased", "kept back"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Key: "k"}, nil)
		require.NoError(t, err)
	}
	require.Equal(t, "leased", n.take(t).Name)
	n.requireNoWork(t) // which puts the other one aside
	n.enqueue(t, "due")
	n.enqueueWith(t, "delayed", &pgwake.EnqueueOptions{Delay: time.Hour})
	for _, i := range n.peeked(t, pgwake.Worker, nil) {
		require.Equal(t, i.Name, string(i.State))
		if i.State == pgwake.ItemKeptBack {
			require.WithinDuration(t, i.EnqueuedAt, i.DueAt, time.Second, "since when, and not the year in which nothing is due")
		}
	}
	n.start(t, "i")
	n.send(t, "i", "leased")
	turn := n.takeTurn(t)
	n.send(t, "i", "leased too")
	n.requireNoTurn(t) // which holds it back
	for _, m := range n.peeked(t, pgwake.Orchestrator, nil) {
		require.Equal(t, pgwake.ItemLeased, m.State, m.Kind)
	}
	n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 1})
	require.Equal(t, pgwake.ItemDue, n.peeked(t, pgwake.Orchestrator, nil)[0].State)
}

func TestPeek_Filter_AllConditionsHold(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, name := range []string{"a", "b", "a"} {
		for _, namespace := range []string{"default", "other"} {
			_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Instance: name}, &pgwake.EnqueueOptions{Namespace: namespace})
			require.NoError(t, err)
		}
	}
	n.sendWith(t, pgwake.Message{Instance: "x", Kind: "k"}, nil)
	all := n.peeked(t, pgwake.Worker, nil)
	for _, of := range []struct {
		f    pgwake.PeekFilter
		want int
	}{
		{pgwake.PeekFilter{}, 6}, {pgwake.PeekFilter{Namespace: "other"}, 3}, {pgwake.PeekFilter{Namespace: "other", Name: "a"}, 2},
		{pgwake.PeekFilter{Instance: "b"}, 2}, {pgwake.PeekFilter{After: all[3].ID}, 2}, {pgwake.PeekFilter{Limit: 4}, 4}, {pgwake.PeekFilter{Name: "c"}, 0},
	} {
		require.Len(t, n.peeked(t, pgwake.Worker, &of.f), of.want, "%+v", of.f)
	}
	require.Len(t, n.peeked(t, pgwake.Orchestrator, &pgwake.PeekFilter{Instance: "x"}), 1)
	require.Empty(t, n.peeked(t, pgwake.Orchestrator, &pgwake.PeekFilter{Instance: "y"}))
	require.Empty(t, n.peeked(t, pgwake.Orchestrator, &pgwake.PeekFilter{Name: "a"}))
	require.Empty(t, n.peeked(t, pgwake.Orchestrator, &pgwake.PeekFilter{Namespace: "other"}))
}

func TestPeek_BadArguments_AreInvalid(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, f := range []pgwake.PeekFilter{{Namespace: "NO"}, {Name: "\xff"}, {Instance: strings.Repeat("i", 256)}, {After: -1}, {Limit: -1}, {Limit: pgwake.MaxFetch + 1}} {
		_, err := n.Peek(t.Context(), pgwake.Worker, &f)
		requireError(t, err, pgwake.ErrInvalid)
	}
	_, err := n.Peek(t.Context(), pgwake.Queue(7), nil)
	requireError(t, err, pgwake.ErrInvalid)
}
