package pgwake_test

import (
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/hostile"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of texts that callers choose, whatever they say? Each comes back byte for byte, and finds itself alone.

var anyTexts = hostile.Texts(pgwake.MaxNameLength)

// only asserts that a call returned the one thing that a text stands for, and returns it.
func only[T any](t *testing.T, text string) func(all []T, err error) T {
	return func(all []T, err error) T {
		t.Helper()
		require.NoError(t, err, "%q", text)
		require.Len(t, all, 1, "%q", text)
		return all[0]
	}
}

// quotedJSON is a text as a payload.
func quotedJSON(text string) json.RawMessage {
	data, _ := json.Marshal(text)
	return data
}

func TestTexts_OfWorkItems_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{ArchiveFor: time.Hour})
	ctx := t.Context()
	var items []pgwake.WorkEnqueue
	of := map[string]pgwake.WorkItem{}
	for i, text := range anyTexts {
		item := pgwake.WorkItem{Name: text, Input: quotedJSON(text), Instance: text, ExecutionID: 1, ActivityID: int64(i), Tag: text, Key: text, Headers: map[string]string{text: text, "x": text}}
		of[text] = item
		items = append(items, pgwake.WorkEnqueue{WorkItem: item, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: text}})
	}
	added, err := n.EnqueueForWorkerMany(ctx, items)
	require.NoError(t, err)
	again, err := n.EnqueueForWorkerMany(ctx, items)
	require.NoError(t, err)
	for i, text := range anyTexts {
		require.Equal(t, []bool{false, true}, []bool{added[i].Duplicate, again[i].Duplicate}, "%q", text)
		require.Equal(t, added[i].ID, again[i].ID, "%q", text)
	}

	for i, text := range anyTexts {
		for _, f := range []pgwake.PeekFilter{{Name: text}, {Instance: text}} {
			got := only[pgwake.QueuedItem](t, text)(n.Peek(ctx, pgwake.Worker, &f))
			require.Equal(t, of[text], pgwake.WorkItem{Name: got.Name, Input: got.Data, Instance: got.Instance, ExecutionID: got.ExecutionID, ActivityID: got.ActivityID,
				Tag: got.Tag, Session: got.Session, Key: got.Key, Headers: got.Headers})
			require.Equal(t, []any{added[i].ID, text}, []any{got.ID, got.DedupKey})
		}
		item := only[*pgwake.ClaimedWorkItem](t, text)(n.FetchWorkItems(ctx, 10, &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Tags: pgwake.Tags(text)}))
		require.Equal(t, of[text], item.WorkItem)
		require.NoError(t, n.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Error: text}))
	}
	claimed, err := n.FetchWorkItems(ctx, pgwake.MaxFetch, &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Tags: pgwake.DefaultAnd(anyTexts[:pgwake.MaxTags]...)})
	require.NoError(t, err)
	require.Len(t, claimed, pgwake.MaxTags)
	rest, err := n.FetchWorkItems(ctx, pgwake.MaxFetch, &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Tags: pgwake.AnyTag()})
	require.NoError(t, err)
	require.Len(t, rest, len(anyTexts)-pgwake.MaxTags)
	for _, item := range append(claimed, rest...) {
		require.Equal(t, item.Name, item.LastError)
		require.NoError(t, n.DeadLetterWorkItem(ctx, item.LockToken, item.Name, item.Name))
	}

	for i, text := range anyTexts {
		filters := []pgwake.DeadLetterFilter{{Name: text}, {Instance: text}, {Reason: text}}
		for _, f := range filters {
			got := only[pgwake.DeadLetter](t, text)(n.ListDeadLetters(ctx, &f))
			require.Equal(t, of[text], pgwake.WorkItem{Name: got.Name, Input: got.Data, Instance: got.Instance, ExecutionID: got.ExecutionID, ActivityID: got.ActivityID,
				Tag: got.Tag, Session: got.Session, Key: got.Key, Headers: got.Headers})
			require.Equal(t, []any{added[i].ID, text, text, text}, []any{got.ItemID, got.DedupKey, got.Reason, got.Error})
		}
		redriven, err := n.RedriveDeadLetters(ctx, &filters[i%len(filters)])
		require.NoError(t, err)
		require.Equal(t, 1, redriven, "%q", text)
	}
	claimed, err = n.FetchWorkItems(ctx, pgwake.MaxFetch, &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Tags: pgwake.AnyTag()})
	require.NoError(t, err)
	require.ElementsMatch(t, anyTexts, namesOf(claimed))
	for i, item := range claimed {
		if i%2 == 0 {
			require.NoError(t, n.AckWorkItem(ctx, item.LockToken, nil))
			for _, f := range []pgwake.ArchiveFilter{{Name: item.Name}, {Instance: item.Name}} {
				got := only[pgwake.ArchivedItem](t, item.Name)(n.ListArchive(ctx, &f))
				require.Equal(t, of[item.Name], got.WorkItem)
				require.Equal(t, item.Name, got.DedupKey)
			}
			continue
		}
		require.NoError(t, n.DeadLetterWorkItem(ctx, item.LockToken, item.Name, ""))
		purged, err := n.PurgeDeadLetters(ctx, &[]pgwake.DeadLetterFilter{{Name: item.Name}, {Reason: item.Name}}[i/2%2])
		require.NoError(t, err)
		require.Equal(t, 1, purged, "%q", item.Name)
	}
	require.Equal(t, map[string]int{"namespaces": 1, "archive": (len(claimed) + 1) / 2}, n.rows(t))
}

func TestTexts_OfSessionsAndOwners_AreThoseAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for _, text := range anyTexts {
		_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w", Session: text}, nil)
		require.NoError(t, err)
	}
	tokens := map[string]pgwake.LockToken{}
	for _, text := range anyTexts {
		item, err := n.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Session: &pgwake.SessionOptions{Owner: text, LockTimeout: lease}})
		require.NoError(t, err)
		require.Equal(t, text, item.Session)
		tokens[text] = item.LockToken
	}
	for _, text := range anyTexts {
		renewed, err := n.RenewSessionLock(ctx, []string{text}, lease, lease)
		require.NoError(t, err)
		require.Equal(t, 1, renewed, "%q", text)
		require.NoError(t, n.AbandonWorkItem(ctx, tokens[text], nil))
		released, err := n.ReleaseSessions(ctx, []string{text})
		require.NoError(t, err)
		require.Equal(t, 1, released, "%q", text)
	}
}

func TestTexts_OfInstances_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	fetch := func(text string) *pgwake.FetchOptions {
		return &pgwake.FetchOptions{NoWait: true, LockTimeout: lease, Queues: []string{text}, Owner: text}
	}
	var messages []pgwake.MessageEnqueue
	of := map[string]pgwake.Message{}
	half := len(anyTexts) / 2 // so many are parents, and as many their children
	anyTexts := anyTexts[:2*half]
	for _, text := range anyTexts {
		m := pgwake.Message{Instance: text, Kind: pgwake.MessageKind(text), Data: quotedJSON(text), Name: text, Version: text, ExecutionID: 1, Queue: text, Headers: map[string]string{text: text}}
		of[text] = m
		messages = append(messages, pgwake.MessageEnqueue{Message: m, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: text}})
	}
	added, err := n.EnqueueForOrchestratorMany(ctx, messages)
	require.NoError(t, err)

	for i, text := range anyTexts {
		for _, f := range []pgwake.PeekFilter{{Name: text}, {Instance: text}} {
			got := only[pgwake.QueuedItem](t, text)(n.Peek(ctx, pgwake.Orchestrator, &f))
			require.Equal(t, of[text], pgwake.Message{Instance: got.Instance, Kind: got.Kind, Data: got.Data, Name: got.Name, Version: got.Version, ExecutionID: got.ExecutionID, Queue: got.Tag, Headers: got.Headers})
			require.Equal(t, []any{added[i].ID, text}, []any{got.ID, got.DedupKey})
		}
		turn, err := n.FetchOrchestrationItem(ctx, fetch(text))
		require.NoError(t, err, "%q", text)
		require.Equal(t, []string{text, text}, []string{turn.Instance, turn.Queue})
		m := of[text]
		m.Queue = "" // that is the turn's
		require.Equal(t, m, turn.Messages[0].Message)
		ack := pgwake.OrchestrationAck{
			Metadata:     pgwake.Metadata{Name: text, Version: text, Queue: text, Attributes: quotedJSON(text)},
			History:      []pgwake.Event{{ID: 1, Type: text, Data: quotedJSON(text)}},
			KV:           []pgwake.KVUpdate{{Key: text, Value: text}, {Key: "another", Value: ""}},
			CustomStatus: &pgwake.CustomStatusUpdate{Value: text},
			Sticky:       &pgwake.Sticky{Owner: text, For: lease},
			Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: text, Kind: "next"}},
				{Message: pgwake.Message{Instance: text, Kind: "timer"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: lease, DedupKey: text}}},
		}
		if i >= half {
			ack.Metadata.Parent = anyTexts[i-half]
		}
		n.ackTurn(t, turn, ack)
	}

	// How each ends is told to whoever waits for that one.
	ended := make([]*pgwake.Outcome, len(anyTexts))
	var waiting sync.WaitGroup
	for i, text := range anyTexts {
		waiting.Go(func() {
			var err error
			if ended[i], err = n.WaitForInstance(ctx, text); err != nil {
				t.Errorf("%q: %v", text, err)
			}
		})
	}
	for i, text := range anyTexts {
		owner := fetch(text)
		if i%2 == 0 {
			released, err := n.ReleaseSticky(ctx, []string{text})
			require.NoError(t, err)
			require.Equal(t, 1, released, "%q", text)
			owner.Owner = ""
		}
		turn, err := n.FetchOrchestrationItem(ctx, owner)
		require.NoError(t, err, "%q is sticky to it", text)
		require.Equal(t, text, turn.Instance)
		require.Equal(t, quotedJSON(text), turn.Attributes)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted, Output: text}, CancelMessages: []string{text}})
	}
	require.Zero(t, n.rows(t)["orchestrator_queue"], "the timers of all are cancelled")
	waiting.Wait()

	for i, text := range anyTexts {
		require.Equal(t, &pgwake.Outcome{Instance: text, ExecutionID: 1, Status: pgwake.StatusCompleted, Output: text}, ended[i])
		info, err := n.GetInstanceInfo(ctx, text)
		require.NoError(t, err)
		parent := ""
		if i >= half {
			parent = anyTexts[i-half]
		}
		require.Equal(t, []string{text, text, text, text, text, parent, text, string(quotedJSON(text))},
			[]string{info.Instance, info.Name, info.Version, info.Queue, info.Output, info.Parent, info.CustomStatus, string(info.Attributes)})
		for _, o := range []pgwake.ListOptions{{Name: text}, {Queue: text}} {
			require.Equal(t, *info, only[pgwake.InstanceInfo](t, text)(n.ListInstances(ctx, &o)))
		}
		require.Equal(t, text, only[pgwake.ExecutionInfo](t, text)(n.ListExecutions(ctx, text)).Output)
		require.Equal(t, pgwake.Event{ID: 1, Type: text, Data: quotedJSON(text)}, withoutTime(only[pgwake.Event](t, text)(n.ReadHistory(ctx, text))))
		value, found, err := n.GetKV(ctx, text, text)
		require.NoError(t, err)
		require.Equal(t, []any{text, true}, []any{value, found})
		pairs, err := n.ListKV(ctx, text)
		require.NoError(t, err)
		require.Equal(t, map[string]string{text: text, "another": ""}, pairs)
		status, err := n.GetCustomStatus(ctx, text, 0)
		require.NoError(t, err)
		require.Equal(t, text, status.Value)
		if i >= half {
			require.Equal(t, text, only[string](t, parent)(n.ListChildren(ctx, parent)))
			tree, err := n.GetInstanceTree(ctx, parent)
			require.NoError(t, err)
			require.ElementsMatch(t, []string{parent, text}, tree)
		}
	}
	var listed []string
	for {
		page, err := n.ListInstances(ctx, &pgwake.ListOptions{Limit: 7, After: last(listed)})
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, info := range page {
			listed = append(listed, info.Instance)
		}
	}
	require.ElementsMatch(t, anyTexts, listed, "each is after itself")

	for _, text := range anyTexts[:half] {
		gone, err := n.DeleteInstance(ctx, text, nil)
		require.NoError(t, err, "%q", text)
		require.Equal(t, int64(2), gone.Instances, "%q", text)
	}
	require.Equal(t, map[string]int{"namespaces": 1}, n.rows(t))
}

func last(all []string) string {
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

func withoutTime(e pgwake.Event) pgwake.Event {
	e.CreatedAt = time.Time{}
	return e
}

// A namespace is a word that stands in notifications and lists, so few texts are one. Those that are, are no other.
func TestTexts_OfNamespaces_AreRefusedByAllVerbsOrThatOne(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	var good, bad []string
	for _, text := range hostile.Texts(40) {
		if pgwake.CheckNamespace(text) == nil {
			good = append(good, text)
		} else {
			bad = append(bad, text)
		}
	}
	for _, text := range hostile.Refused(40) {
		bad = append(bad, text)
	}
	require.Subset(t, good, []string{"null", "true", "default", "public", "undefined"})
	before := n.content(t)
	for _, text := range bad {
		calls := map[string]func() error{
			"register": func() error { return n.RegisterNamespace(ctx, text) },
			"wait":     func() error { return dropped(n.WaitForNamespaces(ctx, []string{text})) },
			"limits":   func() error { return n.SetLimits(ctx, text, pgwake.Limits{MaxRunning: 1}) },
			"modes":    func() error { return n.SetModes(pgwake.ModeHybrid, map[string]pgwake.Mode{text: pgwake.ModePolling}) },
			"peek":     func() error { return dropped(n.Peek(ctx, pgwake.Worker, &pgwake.PeekFilter{Namespace: text})) },
			"letters":  func() error { return dropped(n.ListDeadLetters(ctx, &pgwake.DeadLetterFilter{Namespace: text})) },
			"redrive":  func() error { return dropped(n.RedriveDeadLetters(ctx, &pgwake.DeadLetterFilter{Namespace: text})) },
			"purge":    func() error { return dropped(n.PurgeDeadLetters(ctx, &pgwake.DeadLetterFilter{Namespace: text})) },
			"archive":  func() error { return dropped(n.ListArchive(ctx, &pgwake.ArchiveFilter{Namespace: text})) },
			"list":     func() error { return dropped(n.ListInstances(ctx, &pgwake.ListOptions{Namespace: text})) },
			"enqueue": func() error {
				return dropped(n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "w"}, &pgwake.EnqueueOptions{Namespace: text}))
			},
			"send": func() error {
				return dropped(n.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: "i", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: text}))
			},
			"fetch": func() error {
				return dropped(n.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true, Namespaces: []string{text}}))
			},
		}
		if text != pgwake.AllNamespaces {
			calls["pause"] = func() error { return n.Pause(ctx, pgwake.Worker, text) }
			calls["resume"] = func() error { return n.Resume(ctx, pgwake.Worker, text) }
		}
		for verb, call := range calls {
			err := requireError(t, call(), pgwake.ErrInvalid)
			require.Empty(t, err.SQLState, "%s %q: it was sent", verb, text)
			require.True(t, hostile.IsLine(err.Error()), "%q", err)
		}
	}
	require.Equal(t, before, n.content(t))

	for _, text := range good {
		n.enqueueWith(t, text, &pgwake.EnqueueOptions{Namespace: text})
		require.NoError(t, n.SetLimits(ctx, text, pgwake.Limits{MaxRunning: len(text)}))
		require.NoError(t, n.Pause(ctx, pgwake.Orchestrator, text))
	}
	paused, err := n.GetPaused(ctx, pgwake.Orchestrator)
	require.NoError(t, err)
	require.False(t, paused.All)
	require.ElementsMatch(t, good, paused.Namespaces)
	limits, err := n.GetLimits(ctx)
	require.NoError(t, err)
	for _, text := range good {
		require.Equal(t, len(text), limits[text].MaxRunning, "%q", text)
		require.Equal(t, []string{text}, n.takeAll(t, text))
	}
	require.Len(t, limits, len(good))
}

// A token that no fetch has made is lost, whatever it says.
func TestTexts_OfLockTokens_AreLostAndChangeNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	c := n.claimBoth(t)
	before := n.content(t)
	texts := slices.Clone(anyTexts)
	for _, text := range hostile.Refused(pgwake.MaxNameLength) {
		texts = append(texts, text)
	}
	for _, text := range texts {
		text := pgwake.LockToken(text)
		for _, token := range []pgwake.LockToken{text, c.turn[:37] + text, c.work + text, c.turn + text, text + c.work} {
			for _, err := range []error{n.AckWorkItem(ctx, token, nil), n.AckWorkItems(ctx, []pgwake.LockToken{token}), n.AbandonWorkItem(ctx, token, nil),
				n.DeadLetterWorkItem(ctx, token, "r", ""), dropped(n.RenewWorkItemLock(ctx, token, 0)),
				n.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}), n.AbandonOrchestrationItem(ctx, token, nil),
				n.DeadLetterOrchestrationItem(ctx, token, "r", ""), dropped(n.RenewOrchestrationItemLock(ctx, token, 0))} {
				require.ErrorIs(t, err, pgwake.ErrLockLost, "%q", token)
			}
		}
	}
	require.Equal(t, before, n.content(t))
}
