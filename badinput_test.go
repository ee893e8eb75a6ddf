package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/hostile"
	"github.com/stretchr/testify/require"
)

// This file answers: what happens to arguments that break a rule? A typed error, before anything is sent.

// badPayloads are payloads that are no JSON or that PostgreSQL cannot take apart, and why.
var badPayloads = map[string]string{
	"no JSON":                      `{"a":`,
	"two values":                   `1 2`,
	"white space only":             ` `,
	"raw NUL":                      "\"a\x00\"",
	"NUL behind":                   "1\x00",
	"escaped NUL":                  `{"a":"x\u0000"}`,
	"escaped NUL in a key":         `{"\u0000":1}`,
	"escaped NUL after an escape":  `"\\\u0000"`,
	"high half of a surrogate":     `"\ud83d"`,
	"high half and another escape": `"\ud83d\n"`,
	"high half and a letter":       `"\ud83d\u0041"`,
	"low half of a surrogate":      `"\ude00"`,
	"halves in the wrong order":    `"\ude00\ud83d"`,
	"invalid UTF-8":                "\"a\xff\"",
	"surrogate in UTF-8":           "\"\xed\xa0\x80\"",
}

// badOptions are options of an enqueue that break a rule.
var badOptions = map[string]pgwake.EnqueueOptions{
	"priority -1":           {Priority: -1},
	"priority 10":           {Priority: 10},
	"priority 65536":        {Priority: 65536}, // 0 as a smallint
	"negative delay":        {Delay: -1},
	"delay of 300 years":    {Delay: 1<<63 - 1},
	"delay and time":        {Delay: time.Second, At: time.Now()},
	"year 10000":            {At: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)},
	"year 0":                {At: time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)},
	"year -5000":            {At: time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC)},
	"kept, negative":        {DedupKey: "k", DedupFor: -1},
	"kept for 300 years":    {DedupKey: "k", DedupFor: 1<<63 - 1},
	"kept without a key":    {DedupFor: 1},
	"scope without a key":   {DedupScope: pgwake.DedupWaiting},
	"scope -1":              {DedupKey: "k", DedupScope: -1},
	"scope 3":               {DedupKey: "k", DedupScope: 3},
	"namespace with NUL":    {Namespace: "a\x00"},
	"namespace not UTF-8":   {Namespace: "a\xff"},
	"namespace, good start": {Namespace: "default; DROP TABLE worker_queue"},
}

func init() {
	for _, name := range badNamespaces {
		badOptions[fmt.Sprintf("namespace %q", name)] = pgwake.EnqueueOptions{Namespace: name}
	}
}

// claims that hold.
type claims struct {
	work, turn pgwake.LockToken
}

// badCalls are calls that break a rule, by what they do wrong.
func badCalls(n *node, ctx context.Context, c claims) map[string]func() error {
	calls := make(map[string]func() error)

	work := func(what string, item pgwake.WorkItem, o *pgwake.EnqueueOptions) {
		calls["enqueue work: "+what] = func() error { return dropped(n.EnqueueForWorker(ctx, item, o)) }
		e := pgwake.WorkEnqueue{WorkItem: item}
		if o != nil {
			e.EnqueueOptions = *o
		}
		calls["ack of a turn with work: "+what] = func() error {
			return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "good"}}, e}})
		}
	}
	message := func(what string, m pgwake.Message, o *pgwake.EnqueueOptions) {
		calls["enqueue message: "+what] = func() error { return dropped(n.EnqueueForOrchestrator(ctx, m, o)) }
		e := pgwake.MessageEnqueue{Message: m}
		if o != nil {
			e.EnqueueOptions = *o
		} else if m.Instance != "" { // without an instance, an ack's Message would say "none"
			calls["ack of work with message: "+what] = func() error { return n.AckWorkItem(ctx, c.work, &m) }
		}
		calls["ack of a turn with message: "+what] = func() error {
			return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"},
				Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "good"}}, e}})
		}
	}
	event := func(what string, e pgwake.Event) {
		calls["append history: "+what] = func() error {
			return n.AppendHistory(ctx, "i", 1, []pgwake.Event{{ID: 1, Type: "good"}, e})
		}
		calls["ack of a turn with event: "+what] = func() error {
			return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"},
				History: []pgwake.Event{{ID: 1, Type: "good"}, e}})
		}
	}
	metadata := func(what string, m pgwake.Metadata) {
		calls["ack of a turn with metadata: "+what] = func() error {
			return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{Metadata: m})
		}
	}
	fetch := func(what string, o pgwake.FetchOptions) {
		calls["fetch work: "+what] = func() error { return dropped(n.FetchWorkItem(ctx, &o)) }
		calls["fetch several: "+what] = func() error { return dropped(n.FetchWorkItems(ctx, 2, &o)) }
		calls["fetch a turn: "+what] = func() error { return dropped(n.FetchOrchestrationItem(ctx, &o)) }
	}

	work("no name", pgwake.WorkItem{}, nil)
	message("no instance", pgwake.Message{Kind: "k"}, nil)
	message("no kind", pgwake.Message{Instance: "i"}, nil)
	calls["ack of work with message: nothing in it"] = func() error { return n.AckWorkItem(ctx, c.work, &pgwake.Message{}) }
	event("no type", pgwake.Event{ID: 2})
	for _, headers := range []map[string]string{{"": "x"}, {"x": "\x00"}, {"x": "\xff"}} {
		work(fmt.Sprintf("headers %q", headers), pgwake.WorkItem{Name: "x", Headers: headers}, nil)
		message(fmt.Sprintf("headers %q", headers), pgwake.Message{Instance: "i", Kind: "k", Headers: headers}, nil)
	}
	for why, text := range hostile.Refused(pgwake.MaxNameLength) {
		work("name, "+why, pgwake.WorkItem{Name: text}, nil)
		work("instance, "+why, pgwake.WorkItem{Name: "x", Instance: text}, nil)
		work("header name, "+why, pgwake.WorkItem{Name: "x", Headers: map[string]string{text: ""}}, nil)
		message("header name, "+why, pgwake.Message{Instance: "i", Kind: "k", Headers: map[string]string{text: ""}}, nil)
		message("instance, "+why, pgwake.Message{Instance: text, Kind: "k"}, nil)
		message("kind, "+why, pgwake.Message{Instance: "i", Kind: pgwake.MessageKind(text)}, nil)
		message("name, "+why, pgwake.Message{Instance: "i", Kind: "k", Name: text}, nil)
		message("version, "+why, pgwake.Message{Instance: "i", Kind: "k", Version: text}, nil)
		event("type, "+why, pgwake.Event{ID: 2, Type: text})
		metadata("name, "+why, pgwake.Metadata{Name: text})
		metadata("version, "+why, pgwake.Metadata{Name: "flow", Version: text})
		metadata("status, "+why, pgwake.Metadata{Name: "flow", Status: pgwake.Status(text)})
		work("tag, "+why, pgwake.WorkItem{Name: "x", Tag: text}, nil)
		work("session, "+why, pgwake.WorkItem{Name: "x", Session: text}, nil)
		work("key, "+why, pgwake.WorkItem{Name: "x", Key: text}, nil)
		work("dedup key, "+why, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{DedupKey: text})
		message("dedup key, "+why, pgwake.Message{Instance: "i", Kind: "k"}, &pgwake.EnqueueOptions{DedupKey: text})
		message("version, "+why, pgwake.Message{Instance: "i", Kind: "k", Version: text}, nil)
		message("queue, "+why, pgwake.Message{Instance: "i", Kind: "k", Queue: text}, nil)
		metadata("queue, "+why, pgwake.Metadata{Name: "flow", Queue: text})
		metadata("parent, "+why, pgwake.Metadata{Name: "flow", Parent: text})
		for what, ack := range map[string]pgwake.OrchestrationAck{
			"sticky owner":   {Sticky: &pgwake.Sticky{Owner: text, For: time.Second}},
			"cancelled key":  {CancelMessages: []string{"good", text}},
			"key of a pair":  {KV: []pgwake.KVUpdate{{Key: "good"}, {Key: text}}},
			"key to clear":   {KV: []pgwake.KVUpdate{{Op: pgwake.KVClear, Key: text}}},
			"key of nothing": {KV: []pgwake.KVUpdate{{Op: pgwake.KVClearAll, Key: text}}},
		} {
			ack.Metadata.Name = "flow"
			calls["ack of a turn: "+what+", "+why] = func() error { return n.AckOrchestrationItem(ctx, c.turn, ack) }
		}
		for what, o := range map[string]*pgwake.FetchOptions{
			"tag":       {NoWait: true, Tags: pgwake.DefaultAnd(text)},
			"session's": {NoWait: true, Session: &pgwake.SessionOptions{Owner: text}},
		} {
			calls["fetch work: "+what+", "+why] = func() error { return dropped(n.FetchWorkItem(ctx, o)) }
		}
		for what, o := range map[string]*pgwake.FetchOptions{"queue": {NoWait: true, Queues: []string{"", text}}, "owner": {NoWait: true, Owner: text}} {
			calls["fetch a turn: "+what+", "+why] = func() error { return dropped(n.FetchOrchestrationItem(ctx, o)) }
		}
		calls["dead letter: reason, "+why] = func() error { return n.DeadLetterWorkItem(ctx, c.work, text, "") }
		calls["dead letters of a turn: reason, "+why] = func() error { return n.DeadLetterOrchestrationItem(ctx, c.turn, text, "") }
		for what, f := range map[string]pgwake.DeadLetterFilter{"name": {Name: text}, "instance": {Instance: text}, "reason": {Reason: text}} {
			calls["list dead letters: "+what+", "+why] = func() error { return dropped(n.ListDeadLetters(ctx, &f)) }
			calls["count dead letters: "+what+", "+why] = func() error { return dropped(n.CountDeadLetters(ctx, &f)) }
			calls["redrive dead letters: "+what+", "+why] = func() error { return dropped(n.RedriveDeadLetters(ctx, &f)) }
			calls["purge dead letters: "+what+", "+why] = func() error { return dropped(n.PurgeDeadLetters(ctx, &f)) }
		}
		calls["peek: name, "+why] = func() error { return dropped(n.Peek(ctx, pgwake.Worker, &pgwake.PeekFilter{Name: text})) }
		calls["peek: instance, "+why] = func() error { return dropped(n.Peek(ctx, pgwake.Orchestrator, &pgwake.PeekFilter{Instance: text})) }
		calls["list the archive: name, "+why] = func() error { return dropped(n.ListArchive(ctx, &pgwake.ArchiveFilter{Name: text})) }
		calls["list the archive: instance, "+why] = func() error { return dropped(n.ListArchive(ctx, &pgwake.ArchiveFilter{Instance: text})) }
		calls["list instances: name, "+why] = func() error { return dropped(n.ListInstances(ctx, &pgwake.ListOptions{Name: text})) }
		calls["list instances: queue, "+why] = func() error { return dropped(n.ListInstances(ctx, &pgwake.ListOptions{Queue: text})) }
		calls["list instances: after, "+why] = func() error { return dropped(n.ListInstances(ctx, &pgwake.ListOptions{After: text})) }
		calls["instance info, "+why] = func() error { return dropped(n.GetInstanceInfo(ctx, text)) }
		calls["custom status, "+why] = func() error { return dropped(n.GetCustomStatus(ctx, text, 0)) }
		calls["wait for an instance, "+why] = func() error { return dropped(n.WaitForInstance(ctx, text)) }
		calls["wait for a status, "+why] = func() error { return dropped(n.WaitForStatus(ctx, text, 0)) }
		calls["pairs, "+why] = func() error { return dropped(n.ListKV(ctx, text)) }
		calls["renew sessions, "+why] = func() error { return dropped(n.RenewSessionLock(ctx, []string{"good", text}, 0, time.Hour)) }
		calls["release sessions, "+why] = func() error { return dropped(n.ReleaseSessions(ctx, []string{"good", text})) }
		calls["release sticky, "+why] = func() error { return dropped(n.ReleaseSticky(ctx, []string{"good", text})) }
		calls["append history: instance, "+why] = func() error { return n.AppendHistory(ctx, text, 1, []pgwake.Event{{ID: 1, Type: "e"}}) }
		calls["read history: instance, "+why] = func() error { return dropped(n.ReadHistory(ctx, text)) }
		calls["read an execution: instance, "+why] = func() error { return dropped(n.ReadHistoryExecution(ctx, text, 1, 0)) }
	}
	for why, payload := range badPayloads {
		data := json.RawMessage(payload)
		work("input, "+why, pgwake.WorkItem{Name: "x", Input: data}, nil)
		message("data, "+why, pgwake.Message{Instance: "i", Kind: "k", Data: data}, nil)
		event("data, "+why, pgwake.Event{ID: 2, Type: "e", Data: data})
	}
	for what, o := range badOptions {
		work(what, pgwake.WorkItem{Name: "x"}, &o)
		message(what, pgwake.Message{Instance: "i", Kind: "k"}, &o)
		if o.Namespace != "" {
			fetch(what, pgwake.FetchOptions{NoWait: true, Namespaces: []string{"default", o.Namespace}})
		}
	}
	fetch("an empty namespace", pgwake.FetchOptions{NoWait: true, Namespaces: []string{""}})
	for what, d := range map[string]time.Duration{"negative": -1, "1 ns": 1, "under 10 ms": 10*time.Millisecond - 1, "over 24 h": 24*time.Hour + 1, "longest": 1<<63 - 1, "lowest": -1 << 63} {
		fetch("lock timeout, "+what, pgwake.FetchOptions{LockTimeout: d, NoWait: true})
		calls["renew work: extend, "+what] = func() error { return dropped(n.RenewWorkItemLock(ctx, c.work, d)) }
		calls["renew several: extend, "+what] = func() error { return dropped(n.RenewWorkItemLocks(ctx, []pgwake.LockToken{c.work}, d)) }
		calls["renew a turn: extend, "+what] = func() error { return dropped(n.RenewOrchestrationItemLock(ctx, c.turn, d)) }
	}
	fetch("negative poll timeout", pgwake.FetchOptions{PollTimeout: -1})
	fetch("NoWait with a poll timeout", pgwake.FetchOptions{NoWait: true, PollTimeout: time.Second})
	for _, count := range []int{0, -1, pgwake.MaxFetch + 1, 1<<63 - 1, -1 << 63} {
		calls[fmt.Sprintf("fetch %d items", count)] = func() error { return dropped(n.FetchWorkItems(ctx, count, now)) }
	}
	for what, d := range map[string]time.Duration{"negative": -1, "300 years": 1<<63 - 1} {
		o := &pgwake.AbandonOptions{Delay: d}
		calls["abandon work: delay, "+what] = func() error { return n.AbandonWorkItem(ctx, c.work, o) }
		calls["abandon a turn: delay, "+what] = func() error { return n.AbandonOrchestrationItem(ctx, c.turn, o) }
	}
	fetch("too many attempts", pgwake.FetchOptions{NoWait: true, MaxAttempts: 1 << 31})
	message("negative execution", pgwake.Message{Instance: "i", Kind: "k", ExecutionID: -1}, nil)
	message("start without a name", pgwake.Message{Instance: "i", Kind: pgwake.MessageStart}, nil)
	message("continue as new without a name", pgwake.Message{Instance: "i", Kind: pgwake.MessageContinueAsNew, ExecutionID: 2}, nil)
	metadata("unknown status", pgwake.Metadata{Name: "flow", Status: "running"})
	calls["ack of a turn: negative execution"] = func() error {
		return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{ExecutionID: -1, Metadata: pgwake.Metadata{Name: "flow"}})
	}
	calls["append history: no instance"] = func() error { return n.AppendHistory(ctx, "", 1, []pgwake.Event{{ID: 1, Type: "e"}}) }
	calls["append history: execution 0"] = func() error { return n.AppendHistory(ctx, "i", 0, []pgwake.Event{{ID: 1, Type: "e"}}) }
	calls["append history: execution -1"] = func() error { return n.AppendHistory(ctx, "i", -1, []pgwake.Event{{ID: 1, Type: "e"}}) }
	calls["read history: no instance"] = func() error { return dropped(n.ReadHistory(ctx, "")) }

	var tx pgx.Tx
	for name, call := range txVerbs(n, ctx, c) {
		calls["nil transaction: "+name] = func() error { return call(tx) }
	}
	return calls
}

// dropped returns the error of a call that has a result.
func dropped[T any](_ T, err error) error { return err }

// txVerbs are the verbs that join a transaction, in calls that break no rule.
func txVerbs(n *node, ctx context.Context, c claims) map[string]func(pgx.Tx) error {
	item, m := pgwake.WorkItem{Name: "x"}, pgwake.Message{Instance: "i", Kind: "k"}
	return map[string]func(pgx.Tx) error{
		"enqueue work": func(tx pgx.Tx) error { return dropped(n.EnqueueForWorkerTx(ctx, tx, item, nil)) },
		"enqueue works": func(tx pgx.Tx) error {
			return dropped(n.EnqueueForWorkerManyTx(ctx, tx, []pgwake.WorkEnqueue{{WorkItem: item}}))
		},
		"enqueue message": func(tx pgx.Tx) error { return dropped(n.EnqueueForOrchestratorTx(ctx, tx, m, nil)) },
		"enqueue messages": func(tx pgx.Tx) error {
			return dropped(n.EnqueueForOrchestratorManyTx(ctx, tx, []pgwake.MessageEnqueue{{Message: m}}))
		},
		"ack work":          func(tx pgx.Tx) error { return n.AckWorkItemTx(ctx, tx, c.work, nil) },
		"ack works":         func(tx pgx.Tx) error { return n.AckWorkItemsTx(ctx, tx, []pgwake.LockToken{c.work}) },
		"abandon work":      func(tx pgx.Tx) error { return n.AbandonWorkItemTx(ctx, tx, c.work, nil) },
		"renew works":       func(tx pgx.Tx) error { return dropped(n.RenewWorkItemLocksTx(ctx, tx, []pgwake.LockToken{c.work}, 0)) },
		"ack a turn":        func(tx pgx.Tx) error { return n.AckOrchestrationItemTx(ctx, tx, c.turn, pgwake.OrchestrationAck{}) },
		"abandon a turn":    func(tx pgx.Tx) error { return n.AbandonOrchestrationItemTx(ctx, tx, c.turn, nil) },
		"renew a turn":      func(tx pgx.Tx) error { return dropped(n.RenewOrchestrationItemLockTx(ctx, tx, c.turn, 0)) },
		"append to history": func(tx pgx.Tx) error { return n.AppendHistoryTx(ctx, tx, "i", 1, []pgwake.Event{{ID: 1, Type: "e"}}) },
	}
}

// poolVerbs are all verbs, in calls that break no rule.
func poolVerbs(n *node, ctx context.Context, c claims) map[string]func() error {
	item, m := pgwake.WorkItem{Name: "x"}, pgwake.Message{Instance: "i", Kind: "k"}
	return map[string]func() error{
		"enqueue work":      func() error { return dropped(n.EnqueueForWorker(ctx, item, nil)) },
		"enqueue works":     func() error { return dropped(n.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{{WorkItem: item}})) },
		"enqueue message":   func() error { return dropped(n.EnqueueForOrchestrator(ctx, m, nil)) },
		"enqueue messages":  func() error { return dropped(n.EnqueueForOrchestratorMany(ctx, []pgwake.MessageEnqueue{{Message: m}})) },
		"fetch work":        func() error { return dropped(n.FetchWorkItem(ctx, now)) },
		"fetch works":       func() error { return dropped(n.FetchWorkItems(ctx, 2, now)) },
		"fetch a turn":      func() error { return dropped(n.FetchOrchestrationItem(ctx, now)) },
		"ack work":          func() error { return n.AckWorkItem(ctx, c.work, &m) },
		"ack works":         func() error { return n.AckWorkItems(ctx, []pgwake.LockToken{c.work}) },
		"ack in a group":    func() error { return n.AckBatched(ctx, c.work, nil) },
		"abandon work":      func() error { return n.AbandonWorkItem(ctx, c.work, nil) },
		"renew work":        func() error { return dropped(n.RenewWorkItemLock(ctx, c.work, 0)) },
		"renew works":       func() error { return dropped(n.RenewWorkItemLocks(ctx, []pgwake.LockToken{c.work}, 0)) },
		"ack a turn":        func() error { return n.AckOrchestrationItem(ctx, c.turn, pgwake.OrchestrationAck{}) },
		"abandon a turn":    func() error { return n.AbandonOrchestrationItem(ctx, c.turn, nil) },
		"renew a turn":      func() error { return dropped(n.RenewOrchestrationItemLock(ctx, c.turn, 0)) },
		"append to history": func() error { return n.AppendHistory(ctx, "i", 1, []pgwake.Event{{ID: 1, Type: "e"}}) },
		"read history":      func() error { return dropped(n.ReadHistory(ctx, "i")) },
		"read an execution": func() error { return dropped(n.ReadHistoryExecution(ctx, "i", 1, 0)) },
	}
}

// claimBoth leaves one work item and one turn claimed.
func (n *node) claimBoth(t *testing.T) claims {
	t.Helper()
	n.enqueue(t, "claimed")
	n.send(t, "i", "claimed")
	return claims{n.take(t).LockToken, n.takeTurn(t).LockToken}
}

func TestVerbs_ArgumentBreaksARule_InvalidAndNothingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	before := n.content(t)
	for what, call := range badCalls(n, t.Context(), c) {
		t.Run(what, func(t *testing.T) {
			err := requireError(t, call(), pgwake.ErrInvalid)
			require.Empty(t, err.SQLState, "it was sent: %v", err)
			require.False(t, err.Retryable)
			require.True(t, hostile.IsLine(err.Error()) && len(err.Error()) < 1000, "%q is for a log line", err)
		})
	}
	require.Equal(t, before, n.content(t))
}

// The output is a text of the caller's like any other.
func TestAckOrchestrationItem_OutputNoTextThatPostgreSQLCanHold_InvalidAndNothingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{MaxPayload: 1000})
	c := n.claimBoth(t)
	before := n.content(t)
	for what, output := range map[string]string{"NUL": "a\x00", "invalid UTF-8": "\xff", "over the limit": strings.Repeat("x", 1001)} {
		t.Run(what, func(t *testing.T) {
			err := n.AckOrchestrationItem(t.Context(), c.turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Output: output}})
			require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState, "it was sent: %v", err)
			require.Equal(t, before, n.content(t))
		})
	}
}

func TestVerbs_PayloadOverTheLimit_TooLargeAndNothingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{MaxPayload: 100})
	c := n.claimBoth(t)
	before := n.content(t)
	data := json.RawMessage(`"` + strings.Repeat("x", 99) + `"`)
	m := pgwake.Message{Instance: "i", Kind: "k", Data: data}
	event := pgwake.Event{ID: 1, Type: "e", Data: data}
	for what, call := range map[string]func() error{
		"work": func() error {
			return dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: data}, nil))
		},
		"message": func() error { return dropped(n.EnqueueForOrchestrator(t.Context(), m, nil)) },
		"ack":     func() error { return n.AckWorkItem(t.Context(), c.work, &m) },
		"event":   func() error { return n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event}) },
		"turn": func() error {
			return n.AckOrchestrationItem(t.Context(), c.turn, pgwake.OrchestrationAck{History: []pgwake.Event{event}})
		},
	} {
		err := requireError(t, call(), pgwake.ErrPayloadTooLarge)
		require.ErrorIs(t, err, pgwake.ErrInvalid, what)
		require.Empty(t, err.SQLState)
	}
	require.Equal(t, before, n.content(t))
}

func TestEnqueueForWorker_PayloadLimitByDefault_IsOneMiB(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	fits := json.RawMessage(`"` + strings.Repeat("x", 1<<20-2) + `"`)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: fits}, nil)
	require.NoError(t, err)
	require.Equal(t, fits, n.take(t).Input)
	_, err = n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: append(fits, ' ')}, nil)
	requireError(t, err, pgwake.ErrPayloadTooLarge)
}

// An error goes to a log. What it is about may be megabytes of anything.
func TestVerbs_HugeArgument_IsNotRepeatedInTheError(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	huge := strings.Repeat("a", 1<<20)
	for what, call := range map[string]func() error{
		"name": func() error { return dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: huge}, nil)) },
		"namespace": func() error {
			return dropped(n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: huge}))
		},
		"lock token": func() error { return n.AckWorkItem(t.Context(), pgwake.LockToken(huge), nil) },
		"batch":      func() error { return n.AckWorkItems(t.Context(), []pgwake.LockToken{pgwake.LockToken(huge)}) },
		"status": func() error {
			return n.AckOrchestrationItem(t.Context(), "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/i", pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.Status(huge)}})
		},
	} {
		t.Run(what, func(t *testing.T) {
			err := call()
			require.Error(t, err)
			require.Less(t, len(err.Error()), 2000)
		})
	}
}

// A check that fails before anything is sent leaves the caller's transaction as it was.
func TestTxVerbs_ArgumentBreaksARule_TransactionIsStillUsable(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{}, nil)
	requireError(t, err, pgwake.ErrInvalid)
	_, err = n.EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{}, nil)
	requireError(t, err, pgwake.ErrInvalid)
	_, err = n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "good"}, nil)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"good"}, n.takeAll(t))
}

func TestVerbs_ContextAlreadyEnded_ItsErrorAndNothingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	c := n.claimBoth(t)
	n.enqueue(t, "due") // a fetch could succeed
	n.send(t, "j", "due")
	before := n.content(t)

	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	why := errors.New("why")
	caused, because := context.WithCancelCause(t.Context())
	because(why)
	for ctx, want := range map[context.Context]error{cancelled: context.Canceled, expired: context.DeadlineExceeded, caused: context.Canceled} {
		calls := poolVerbs(n, ctx, c)
		tx := n.begin(t)
		for name, call := range txVerbs(n, ctx, c) {
			calls["in a transaction: "+name] = func() error { return call(tx) }
		}
		for what, call := range calls {
			err := requireError(t, call(), want)
			require.Equal(t, want == context.DeadlineExceeded, err.Retryable, what)
			require.Empty(t, err.SQLState)
		}
		require.NoError(t, tx.Commit(t.Context()), "the transaction is untouched")
	}
	require.Equal(t, before, n.content(t))
}

// Opening

func TestOpen_UnusableURL_IsErrConfig(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"postgres://%zz", "postgres://host:port/db", "nonsense", "host=localhost port=abc", "postgres://localhost:99999999/db",
		"postgres://localhost/db?sslmode=sometimes", "postgres://localhost/db?pool_max_conns=many", "postgres://localhost/db?pool_max_conns=0",
		"host=localhost user='", "\x00",
	} {
		p, err := pgwake.Open(t.Context(), url, nil)
		require.Nil(t, p, "%q", url)
		require.False(t, requireError(t, err, pgwake.ErrConfig).Retryable, "%q", url)
	}
}

func TestOpen_PasswordInAnUnusableURL_IsNotRepeated(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"postgres://me:hunter2@localhost:port/db", "postgres://me:hunter2@localhost/db?sslmode=sometimes", "host=localhost password=hunter2 port=abc"} {
		_, err := pgwake.Open(t.Context(), url, nil)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "hunter2")
	}
}

func TestNew_NilPool_IsErrConfig(t *testing.T) {
	t.Parallel()
	p, err := pgwake.New(t.Context(), nil, nil)
	require.Nil(t, p)
	requireError(t, err, pgwake.ErrConfig)
}

func TestOpen_BadSchemaName_IsErrConfigAndNothingIsCreated(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	schemas := func() []string {
		return query[string](t, n, `SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'test\_%' AND nspname NOT LIKE 'pg\_toast%' AND nspname NOT LIKE 'pg\_temp%' ORDER BY 1`)
	}
	before := schemas()
	for _, schema := range []string{
		strings.Repeat("x", 200), strings.Repeat("x", 64), strings.Repeat("é", 32), "a\x00b", "\xff", "pg_wake", "pg_", "pg_temp", "pg_catalog",
	} {
		p, err := pgwake.Open(t.Context(), backstage.users.Config().ConnString(), &pgwake.Config{Schema: schema})
		require.Nil(t, p)
		require.ErrorContains(t, requireError(t, err, pgwake.ErrConfig), "Schema")
	}
	require.Equal(t, before, schemas())
}

func TestVerbs_SQLInNames_IsOnlyText(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const evil = `'; DROP TABLE worker_queue; --"` + "`$1 \\"
	added, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: evil, Instance: evil}, &pgwake.EnqueueOptions{DedupKey: evil})
	require.NoError(t, err)
	item := n.take(t)
	require.Equal(t, []any{added.ID, evil, evil}, []any{item.ID, item.Name, item.Instance})
	m := pgwake.Message{Instance: evil, Kind: evil, Name: evil, Version: evil}
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, &m))
	turn := n.takeTurn(t)
	require.Equal(t, m, turn.Messages[0].Message)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: evil, Version: evil, Status: pgwake.StatusCompleted, Output: evil}})
	require.Equal(t, []string{evil}, query[string](t, n, `SELECT output FROM executions`))
	require.ElementsMatch(t, []string{"executions", "instances", "namespaces"}, mapsKeys(n.rows(t)))
}

func mapsKeys[V any](m map[string]V) (keys []string) {
	for key := range maps.Keys(m) {
		keys = append(keys, key)
	}
	return keys
}
