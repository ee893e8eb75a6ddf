package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// bury makes the due work item that comes first a dead letter.
func (n *node) bury(tb tester, reason string) *pgwake.ClaimedWorkItem {
	tb.Helper()
	item := n.take(tb)
	require.NoError(tb, n.DeadLetterWorkItem(tctx, item.LockToken, reason, "cause of "+reason))
	return item
}

// buryTurn makes the messages of the due turn that comes first dead letters.
func (n *node) buryTurn(tb tester, reason string) *pgwake.OrchestrationItem {
	tb.Helper()
	turn := n.takeTurn(tb)
	require.NoError(tb, n.DeadLetterOrchestrationItem(tctx, turn.LockToken, reason, "cause of "+reason))
	return turn
}

func (n *node) letters(tb tester, f *pgwake.DeadLetterFilter) []pgwake.DeadLetter {
	tb.Helper()
	letters, err := n.ListDeadLetters(tctx, f)
	require.NoError(tb, err)
	return letters
}

// redrive is a redrive that has no reason to wait for anybody.
func (n *node) redrive(tb tester, f *pgwake.DeadLetterFilter) int {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tctx, patience)
	defer cancel()
	redriven, err := n.RedriveDeadLetters(ctx, f)
	require.NoError(tb, err)
	return redriven
}

// wholeItem is a work item with everything that one can have. What no verb of the tests' sets is set backstage.
func (n *node) wholeItem(tb tester) int64 {
	tb.Helper()
	added, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "w", Input: json.RawMessage(`{"a":  1.50}`), Instance: "i", ExecutionID: 2, ActivityID: 3},
		&pgwake.EnqueueOptions{Namespace: "mine", Priority: 7, DedupKey: "key"})
	require.NoError(tb, err)
	n.exec(tb, `UPDATE worker_queue SET tag = 'gpu', last_error = 'earlier', created_at = '2020-01-01Z' WHERE id = $1`, added.ID)
	return added.ID
}

// claimed marks an item backstage as taken under a token, so that it does not matter who may fetch it.
func (n *node) claimed(tb tester, id int64) pgwake.LockToken {
	tb.Helper()
	return query[pgwake.LockToken](tb, n, `UPDATE worker_queue SET lock_token = gen_random_uuid(), visible_at = now() + interval '1 hour',
		attempt_count = attempt_count + 1 WHERE id = $1 RETURNING lock_token || '/' || id`, id)[0]
}

func TestDeadLetterWorkItem_ItemWithEverything_IsListedAsItWas(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	id := n.wholeItem(t)
	n.exec(t, `UPDATE worker_queue SET session_id = 's'`)
	before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.claimed(t, id), "broken", "no such host"))

	letters := n.letters(t, nil)
	require.Len(t, letters, 1)
	require.False(t, letters[0].DiedAt.Before(before), "the server's time")
	require.True(t, letters[0].EnqueuedAt.Equal(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)))
	letters[0].DiedAt, letters[0].EnqueuedAt = time.Time{}, time.Time{}
	require.Equal(t, pgwake.DeadLetter{
		ID: letters[0].ID, Queue: pgwake.Worker, ItemID: id, Namespace: "mine", Priority: 7, Attempts: 1,
		Name: "w", Data: json.RawMessage(`{"a":  1.50}`), Instance: "i", ExecutionID: 2, ActivityID: 3,
		DedupKey: "key", Tag: "gpu", Session: "s", Reason: "broken", Error: "no such host",
	}, letters[0])
	require.Equal(t, map[string]int{"namespaces": 2, "dead_letters": 1}, n.rows(t))
}

func TestDeadLetterWorkItem_NoCause_KeepsTheErrorOfTheLatestAttempt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	id := n.wholeItem(t)
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.claimed(t, id), "broken", ""))
	require.Equal(t, "earlier", n.letters(t, nil)[0].Error)
}

// An error that nobody could store would bring its item back for ever.
func TestDeadLetter_CauseIsNoText_IsStoredAsFarAsItIs(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const most = 64 << 10
	for cause, want := range map[string]string{
		"a\x00b\xffc":                                  "a\uFFFDb\uFFFDc",
		strings.Repeat("x", most) + "y":                strings.Repeat("x", most),
		strings.Repeat("x", most-1) + "é":              strings.Repeat("x", most-1),
		strings.Repeat("x", most-2) + "é":              strings.Repeat("x", most-2) + "é",
		strings.Repeat("x", most-2) + "é" + "z":        strings.Repeat("x", most-2) + "é",
		strings.Repeat("x", most-3) + "\U0001F600":     strings.Repeat("x", most-3),
		strings.Repeat("x", most-4) + "\U0001F600tail": strings.Repeat("x", most-4) + "\U0001F600",
	} {
		n.enqueue(t, "w")
		n.send(t, "i", "k")
		require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, "r", cause))
		require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), n.takeTurn(t).LockToken, "r", cause))
		letters := n.letters(t, nil)
		require.Len(t, letters, 2)
		for _, l := range letters {
			require.True(t, want == l.Error, "%d bytes, in the end %q", len(l.Error), l.Error[max(len(l.Error)-8, 0):])
		}
		_, err := n.PurgeDeadLetters(t.Context(), nil)
		require.NoError(t, err)
	}
}

func TestDeadLetterWorkItem_DedupKey_IsFreeAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueueWith(t, "first", &pgwake.EnqueueOptions{DedupKey: "key"})
	n.bury(t, "r")
	require.False(t, n.enqueueWith(t, "second", &pgwake.EnqueueOptions{DedupKey: "key"}).Duplicate)
}

func TestDeadLetter_TokenHoldsNoMore_IsRefusedAndChangesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	n.enqueue(t, "acked", "expired")
	acked := n.take(t)
	require.NoError(t, n.AckWorkItem(ctx, acked.LockToken, nil))
	n.send(t, "acked", "k")
	turn := n.takeTurn(t)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	n.send(t, "expired", "k")
	expired, expiredTurn := n.take(t), n.takeTurn(t)
	n.travel(t, 2*lease)
	n.send(t, "acked", "k2") // not of that turn
	before := n.content(t)
	for _, token := range []pgwake.LockToken{acked.LockToken, expired.LockToken, "", "garbage", expired.LockToken + "0"} {
		requireError(t, n.DeadLetterWorkItem(ctx, token, "r", ""), pgwake.ErrLockLost)
		requireError(t, n.tried(t, func(tx pgx.Tx) error { return n.DeadLetterWorkItemTx(ctx, tx, token, "r", "") }), pgwake.ErrLockLost)
	}
	for _, token := range []pgwake.LockToken{turn.LockToken, expiredTurn.LockToken, "", "garbage", expiredTurn.LockToken + "0"} {
		requireError(t, n.DeadLetterOrchestrationItem(ctx, token, "r", ""), pgwake.ErrLockLost)
		requireError(t, n.tried(t, func(tx pgx.Tx) error { return n.DeadLetterOrchestrationItemTx(ctx, tx, token, "r", "") }), pgwake.ErrLockLost)
	}
	require.Equal(t, before, n.content(t))
}

func TestDeadLetter_ArgumentIsInvalid_IsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	n.enqueue(t, "w")
	n.send(t, "i", "k")
	item, turn := n.take(t), n.takeTurn(t)
	before := n.content(t)
	for _, reason := range []string{"", strings.Repeat("r", 256), "\xff", "a\x00"} {
		requireError(t, n.DeadLetterWorkItem(ctx, item.LockToken, reason, ""), pgwake.ErrInvalid)
		requireError(t, n.DeadLetterOrchestrationItem(ctx, turn.LockToken, reason, ""), pgwake.ErrInvalid)
	}
	for _, f := range []pgwake.DeadLetterFilter{
		{Namespace: "NO"}, {Name: "\xff"}, {Instance: strings.Repeat("i", 256)}, {Reason: "\x00"}, {After: -1}, {Limit: -1},
		{Limit: pgwake.MaxFetch + 1}, {Queue: new(pgwake.Queue(7))}, {DiedBefore: time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		_, err := n.ListDeadLetters(ctx, &f)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.RedriveDeadLetters(ctx, &f)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.PurgeDeadLetters(ctx, &f)
		requireError(t, err, pgwake.ErrInvalid)
	}
	for _, f := range []pgwake.ArchiveFilter{{Namespace: "NO"}, {Name: "\xff"}, {Instance: "\x00"}, {After: -1}, {Limit: -1}, {Limit: pgwake.MaxFetch + 1}} {
		_, err := n.ListArchive(ctx, &f)
		requireError(t, err, pgwake.ErrInvalid)
	}
	for _, before := range []time.Time{{}, time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC)} {
		_, err := n.PurgeArchive(ctx, before)
		requireError(t, err, pgwake.ErrInvalid)
	}
	require.Equal(t, before, n.content(t))
}

func TestDeadLetterOrchestrationItem_MessagesOfTheTurn_DieAndTheOthersComeNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "1", Data: json.RawMessage(`[1,  2]`), Name: "n", Version: "2.0.0", ExecutionID: 4},
		&pgwake.EnqueueOptions{Priority: 3, DedupKey: "key"})
	n.send(t, "i", "2")
	n.exec(t, `UPDATE orchestrator_queue SET queue = 'q', created_at = '2020-01-01Z'`)
	turn := n.takeTurn(t)
	n.send(t, "i", "3")
	n.requireNoTurn(t) // message 3 is held behind the lock
	require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "broken", "no such history"))

	letters := n.letters(t, nil)
	require.Len(t, letters, 2)
	require.True(t, letters[0].EnqueuedAt.Equal(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)))
	letters[0].DiedAt, letters[0].EnqueuedAt = time.Time{}, time.Time{}
	require.Equal(t, pgwake.DeadLetter{
		ID: letters[0].ID, Queue: pgwake.Orchestrator, ItemID: turn.Messages[0].ID, Namespace: "default", Priority: 3, Attempts: 1,
		Name: "n", Kind: "1", Version: "2.0.0", Data: json.RawMessage(`[1,  2]`), Instance: "i", ExecutionID: 4,
		DedupKey: "key", Tag: "q", Reason: "broken", Error: "no such history",
	}, letters[0])
	require.Equal(t, pgwake.MessageKind("2"), letters[1].Kind)
	require.Equal(t, kinds{"3"}, kindsOf(n.takeTurn(t)))
}

// As after an ack, whoever waits gets what was held behind the lock.
func TestDeadLetterOrchestrationItem_AnotherNodeWaits_GetsTheHeldMessage(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	ctx := t.Context()
	for how, bury := range map[string]func(pgwake.LockToken) error{
		"own transaction": func(token pgwake.LockToken) error {
			return a.DeadLetterOrchestrationItem(ctx, token, "r", "")
		},
		"caller's transaction": func(token pgwake.LockToken) error {
			tx := a.begin(t)
			if err := a.DeadLetterOrchestrationItemTx(ctx, tx, token, "r", ""); err != nil {
				return err
			}
			return tx.Commit(ctx)
		},
	} {
		t.Run(how, func(t *testing.T) {
			a.send(t, how, "1")
			turn := a.takeTurn(t)
			a.send(t, how, "2")
			a.requireNoTurn(t)
			b.requireNoTurn(t)
			got := make(chan error, 1)
			go func() {
				turn, err := b.FetchOrchestrationItem(ctx, soon)
				if err == nil {
					err = b.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{})
				}
				got <- err
			}()
			require.Eventually(t, func() bool { return b.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
			require.NoError(t, bury(turn.LockToken))
			require.NoError(t, <-got)
		})
	}
}

// The message commits after the last snapshot of the transaction that frees the instance, and before its commit: its
// own wake-up finds the lock still held.
func TestDeadLetterOrchestrationItemTx_MessageCommitsMeanwhile_IsDelivered(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	ctx := t.Context()
	a.send(t, "i", "1")
	turn := a.takeTurn(t)
	got := make(chan kinds, 1)
	go func() {
		turn, err := b.FetchOrchestrationItem(ctx, soon)
		if err != nil {
			got <- kinds{pgwake.MessageKind(err.Error())}
			return
		}
		got <- kindsOf(turn)
	}()
	parked := func(looks int64) func() bool {
		return func() bool {
			s := b.Stats().Orchestrator
			return s.Looks > looks && s.Parked == 1
		}
	}
	require.Eventually(t, parked(0), patience, 10*time.Millisecond)
	tx := a.begin(t)
	require.NoError(t, a.DeadLetterOrchestrationItemTx(ctx, tx, turn.LockToken, "r", ""))
	looks := b.Stats().Orchestrator.Looks
	a.send(t, "i", "2")
	require.Eventually(t, parked(looks), patience, time.Millisecond, "it is looked for in vain")
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, kinds{"2"}, <-got)
}

func TestListDeadLetters_Before_GoesBackFromTheLatest(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for i := range 5 {
		n.enqueue(t, "w"+string(rune('0'+i%2)))
		n.bury(t, "r")
	}
	all := n.letters(t, nil)
	for name, c := range map[string]struct {
		f    pgwake.DeadLetterFilter
		want []int
	}{
		"the latest":  {pgwake.DeadLetterFilter{Before: math.MaxInt64, Limit: 2}, []int{4, 3}},
		"page before": {pgwake.DeadLetterFilter{Before: all[3].ID, After: all[0].ID, Limit: 2}, []int{2, 1}},
		"of a filter": {pgwake.DeadLetterFilter{Before: all[4].ID, Name: "w0"}, []int{2, 0}},
		"the end":     {pgwake.DeadLetterFilter{Before: all[0].ID}, nil},
	} {
		var want, got []int64
		for _, i := range c.want {
			want = append(want, all[i].ID)
		}
		for _, d := range n.letters(t, &c.f) {
			got = append(got, d.ID)
		}
		require.Equal(t, want, got, name)
		_, err := n.RedriveDeadLetters(t.Context(), &c.f)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.PurgeDeadLetters(t.Context(), &c.f)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.CountDeadLetters(t.Context(), &c.f)
		requireError(t, err, pgwake.ErrInvalid)
	}
	_, err := n.ListDeadLetters(t.Context(), &pgwake.DeadLetterFilter{Before: -1})
	requireError(t, err, pgwake.ErrInvalid)
}

func TestListDeadLetters_Filter_AllConditionsHold(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for i := range 4 {
		n.enqueueWith(t, "w"+string(rune('0'+i%2)), &pgwake.EnqueueOptions{Namespace: []string{"a", "b"}[i/2]})
		n.bury(t, "r"+string(rune('0'+i%2)))
	}
	for _, instance := range []string{"i", "j"} {
		n.sendWith(t, pgwake.Message{Instance: instance, Kind: "k", Name: "w0"}, nil)
		n.buryTurn(t, "r0")
	}
	all := n.letters(t, nil)
	require.Len(t, all, 6)
	for name, c := range map[string]struct {
		f    pgwake.DeadLetterFilter
		want []int
	}{
		"all":                       {pgwake.DeadLetterFilter{}, []int{0, 1, 2, 3, 4, 5}},
		"queue":                     {pgwake.DeadLetterFilter{Queue: new(pgwake.Worker)}, []int{0, 1, 2, 3}},
		"other queue":               {pgwake.DeadLetterFilter{Queue: new(pgwake.Orchestrator)}, []int{4, 5}},
		"namespace":                 {pgwake.DeadLetterFilter{Namespace: "b"}, []int{2, 3}},
		"queue and namespace":       {pgwake.DeadLetterFilter{Queue: new(pgwake.Orchestrator), Namespace: "b"}, nil},
		"name":                      {pgwake.DeadLetterFilter{Name: "w0"}, []int{0, 2, 4, 5}},
		"instance":                  {pgwake.DeadLetterFilter{Instance: "j"}, []int{5}},
		"reason":                    {pgwake.DeadLetterFilter{Reason: "r1"}, []int{1, 3}},
		"reason of no letter":       {pgwake.DeadLetterFilter{Reason: "r"}, nil},
		"died before":               {pgwake.DeadLetterFilter{DiedBefore: all[3].DiedAt}, []int{0, 1, 2}},
		"ids":                       {pgwake.DeadLetterFilter{IDs: []int64{all[4].ID, all[1].ID, all[1].ID, -1}}, []int{1, 4}},
		"no ids":                    {pgwake.DeadLetterFilter{IDs: []int64{}}, nil},
		"ids, and another":          {pgwake.DeadLetterFilter{IDs: []int64{all[4].ID, all[1].ID}, Queue: new(pgwake.Worker)}, []int{1}},
		"page":                      {pgwake.DeadLetterFilter{Limit: 2}, []int{0, 1}},
		"next page":                 {pgwake.DeadLetterFilter{Limit: 2, After: all[1].ID}, []int{2, 3}},
		"page of a filter":          {pgwake.DeadLetterFilter{Limit: 2, After: all[0].ID, Name: "w0"}, []int{2, 4}},
		"name, namespace, reason":   {pgwake.DeadLetterFilter{Name: "w1", Namespace: "b", Reason: "r1"}, []int{3}},
		"name, but another reason":  {pgwake.DeadLetterFilter{Name: "w1", Reason: "r0"}, nil},
		"after the last one":        {pgwake.DeadLetterFilter{After: all[5].ID}, nil},
		"instance and other reason": {pgwake.DeadLetterFilter{Instance: "j", Reason: "r1"}, nil},
	} {
		var want []pgwake.DeadLetter
		for _, i := range c.want {
			want = append(want, all[i])
		}
		require.Equal(t, append([]pgwake.DeadLetter{}, want...), append([]pgwake.DeadLetter{}, n.letters(t, &c.f)...), name)
		// A redrive and a purge mean the same letters.
		for _, do := range []func(tx pgx.Tx) (int, error){
			func(tx pgx.Tx) (int, error) { return n.RedriveDeadLettersTx(t.Context(), tx, &c.f) },
			func(tx pgx.Tx) (int, error) { return n.PurgeDeadLettersTx(t.Context(), tx, &c.f) },
		} {
			tx := n.begin(t)
			met, err := do(tx)
			require.NoError(t, err)
			require.Equal(t, len(want), met, name)
			rows, err := tx.Query(t.Context(), `SELECT id FROM dead_letters ORDER BY id`)
			require.NoError(t, err)
			left, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			require.NoError(t, err)
			require.Len(t, left, len(all)-met, name)
			for _, l := range want {
				require.NotContains(t, left, l.ID, name)
			}
			require.NoError(t, tx.Rollback(t.Context()))
		}
	}
	require.Equal(t, all, n.letters(t, nil), "all was rolled back")
}

func TestRedriveDeadLetters_WorkItem_IsBackAsItWas(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	id := n.wholeItem(t)
	n.exec(t, `UPDATE worker_queue SET attempt_count = 8, session_id = 's'`)
	const kept = `SELECT to_json(k)::text FROM (SELECT id, namespace, priority, name, input, instance_id, execution_id, activity_id,
		dedup_key, tag, session_id, created_at FROM worker_queue) k`
	before := query[string](t, n, kept)
	old := n.claimed(t, id)
	require.NoError(t, n.DeadLetterWorkItem(t.Context(), old, "broken", "no such host"))
	require.Equal(t, 9, n.letters(t, nil)[0].Attempts)

	require.Equal(t, 1, n.redrive(t, nil))
	require.Equal(t, before, query[string](t, n, kept))
	require.Equal(t, []string{"0 true true no such host"}, query[string](t, n,
		`SELECT attempt_count || ' ' || (visible_at <= clock_timestamp())::text || ' ' || (lock_token IS NULL)::text || ' ' || last_error FROM worker_queue`))
	require.Equal(t, map[string]int{"namespaces": 2, "worker_queue": 1}, n.rows(t))
	require.Zero(t, n.redrive(t, nil))
	requireError(t, n.AckWorkItem(t.Context(), old, nil), pgwake.ErrLockLost)
}

func TestRedriveDeadLetters_TurnOfAnUnknownInstance_IsBackInItsOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Version: "1.2.3", ExecutionID: 5, Data: json.RawMessage(`{"x": 1}`)},
		&pgwake.EnqueueOptions{Namespace: "mine", Priority: 2, DedupKey: "key"})
	n.send(t, "i", "2", "3")
	n.exec(t, `UPDATE orchestrator_queue SET queue = 'q'`)
	const kept = `SELECT to_json(k)::text FROM (SELECT id, instance_id, namespace, priority, kind, name, version, execution_id, data,
		dedup_key, queue, pin, created_at FROM orchestrator_queue ORDER BY id) k`
	before := query[string](t, n, kept)
	old := n.buryTurn(t, "r")
	n.requireNoTurn(t)
	require.Equal(t, 3, n.redrive(t, nil))
	require.Equal(t, before, query[string](t, n, kept))
	require.Empty(t, n.letters(t, nil))
	turn := n.takeTurn(t)
	require.Equal(t, kinds{pgwake.MessageStart, "2", "3"}, kindsOf(turn))
	require.Equal(t, 1, turn.Attempt)
	require.Equal(t, "flow 1.2.3 5 mine", strings.Join([]string{turn.Name, turn.Version, string(rune('0' + turn.ExecutionID)), turn.Namespace}, " "))
	requireError(t, n.AckOrchestrationItem(t.Context(), old.LockToken, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
}

// Where an instance is can become known, and change hands, while its messages are dead.
func TestRedriveDeadLetters_InstanceMovedMeanwhile_MessagesGoToIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := func() []string {
		return query[string](t, n, `SELECT concat_ws(' ', namespace, queue, pin, priority, visible_at <= clock_timestamp()) FROM orchestrator_queue WHERE kind = 'k'`)
	}
	n.sendWith(t, pgwake.Message{Instance: "queued", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "old", Priority: 4})
	n.buryTurn(t, "r")
	n.sendWith(t, pgwake.Message{Instance: "queued", Kind: "start", Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "new"})
	n.exec(t, `UPDATE orchestrator_queue SET queue = 'q', pin = 7`)
	require.Equal(t, 1, n.redrive(t, nil))
	require.Equal(t, []string{"new q 7 4 t"}, at())
	n.exec(t, `TRUNCATE orchestrator_queue`)

	n.sendWith(t, pgwake.Message{Instance: "known", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "old"})
	n.buryTurn(t, "r")
	n.exec(t, `INSERT INTO instances (instance_id, namespace, name, current_execution, queue) VALUES ('known', 'newer', 'flow', 2, 'r')`)
	n.exec(t, `INSERT INTO executions (instance_id, execution_id, pin) VALUES ('known', 1, 8), ('known', 2, 9)`)
	require.Equal(t, 1, n.redrive(t, nil))
	require.Equal(t, []string{"newer r 9 0 t"}, at())
	turn := n.takeTurn(t)
	require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "r", ""))
	require.Equal(t, "newer", n.letters(t, nil)[0].Namespace)
}

// What was sent meanwhile guessed where the instance is, and nobody may serve that.
func TestRedriveDeadLetters_ItOpensAnInstance_GoesToWhereItWas(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "early"}, &pgwake.EnqueueOptions{Namespace: "guess"})
	n.buryTurn(t, "r")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Queue: "served"}, &pgwake.EnqueueOptions{Namespace: "mine"})
	n.buryTurn(t, "r")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "late"}, &pgwake.EnqueueOptions{Namespace: "guess"})
	require.Equal(t, 2, n.redrive(t, nil))
	turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"mine"}, Queues: []string{"served"}})
	require.NoError(t, err)
	require.Equal(t, kinds{"early", pgwake.MessageStart, "late"}, kindsOf(turn))
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}})
	require.Equal(t, []string{"mine served"}, query[string](t, n, `SELECT concat_ws(' ', namespace, queue) FROM instances`))
}

// The key of a letter is in the way where that goes, and nowhere else.
func TestRedriveDeadLetters_ItOpensAnInstance_ItsKeyCountsWhereItGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	start := func(instance, key string) {
		n.sendWith(t, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "mine", DedupKey: key})
		n.buryTurn(t, "r")
	}
	start("i", "elsewhere")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "late"}, &pgwake.EnqueueOptions{Namespace: "guess", DedupKey: "elsewhere"})
	require.Equal(t, 1, n.redrive(t, nil))
	n.exec(t, `DELETE FROM orchestrator_queue`)

	start("j", "taken")
	n.enqueue(t, "later")
	n.bury(t, "r")
	n.sendWith(t, pgwake.Message{Instance: "other", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "mine", DedupKey: "taken"})
	n.sendWith(t, pgwake.Message{Instance: "j", Kind: "late"}, &pgwake.EnqueueOptions{Namespace: "guess"})
	require.Equal(t, 1, n.redrive(t, &pgwake.DeadLetterFilter{Limit: 1}), "what cannot go holds up no other")
	require.Equal(t, []string{"later"}, n.takeAll(t))
	require.Len(t, n.letters(t, nil), 1)
}

func TestRedriveDeadLetters_InstanceIsLocked_MessagesComeWithTheNextTurn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "dead")
	n.buryTurn(t, "r")
	n.send(t, "i", "running")
	turn := n.takeTurn(t)
	require.Equal(t, 1, n.redrive(t, nil))
	n.requireNoTurn(t)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	require.Equal(t, kinds{"dead"}, kindsOf(n.takeTurn(t)))
}

func TestRedriveDeadLetters_DedupKeyIsQueued_LetterStaysAndHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	key := func(k string) *pgwake.EnqueueOptions { return &pgwake.EnqueueOptions{DedupKey: k} }
	for range 2 { // two letters of one key, of which one can go at a time
		n.enqueueWith(t, "twice", key("twice"))
		n.bury(t, "r")
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: "twice"}, key("twice"))
		n.buryTurn(t, "r")
	}
	n.enqueueWith(t, "queued", key("queued"))
	n.bury(t, "r")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "queued"}, key("queued"))
	n.buryTurn(t, "r")
	n.enqueueWith(t, "fresh", key("queued"))
	n.sendWith(t, pgwake.Message{Instance: "j", Kind: "fresh"}, key("queued"))
	n.enqueueWith(t, "free", nil)
	_, err := n.FetchWorkItems(t.Context(), 1, now) // "fresh" stays queued while it is claimed
	require.NoError(t, err)
	n.bury(t, "r")

	stay := n.letters(t, &pgwake.DeadLetterFilter{Name: "queued"})
	require.Len(t, stay, 1)
	require.Zero(t, n.redrive(t, &pgwake.DeadLetterFilter{IDs: []int64{stay[0].ID}}))
	require.Equal(t, stay, n.letters(t, &pgwake.DeadLetterFilter{Name: "queued"}))

	var redriven int
	for range 7 { // one at a time: those that stay must not come first for ever
		redriven += n.redrive(t, &pgwake.DeadLetterFilter{Limit: 1})
	}
	require.Equal(t, 3, redriven)
	require.ElementsMatch(t, []string{"free", "twice"}, n.takeAll(t))
	require.Len(t, n.letters(t, nil), 4)
	require.Zero(t, n.redrive(t, nil))

	n.exec(t, `DELETE FROM worker_queue`)
	n.exec(t, `DELETE FROM orchestrator_queue`)
	require.Equal(t, 4, n.redrive(t, nil))
	require.Empty(t, n.letters(t, nil))
}

// Two letters of one key in one batch, and a key that is enqueued while the redrive is under way.
func TestRedriveDeadLetters_KeyIsTakenInTheSameMoment_NothingIsLost(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for i := range 2 {
		n.enqueueWith(t, "w", &pgwake.EnqueueOptions{DedupKey: "a"})
		n.bury(t, string(rune('1'+i)))
	}
	n.enqueueWith(t, "w", &pgwake.EnqueueOptions{DedupKey: "b"})
	n.bury(t, "3")
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "rival"}, &pgwake.EnqueueOptions{DedupKey: "b"})
	require.NoError(t, err)
	redriven := make(chan int, 1)
	go func() {
		count, _ := n.RedriveDeadLetters(tctx, nil)
		redriven <- count
	}()
	n.awaitBlocked(t, 1) // it waits to see whether the key will be taken
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 1, <-redriven)
	var left []string
	for _, l := range n.letters(t, nil) {
		left = append(left, l.Reason)
	}
	require.Equal(t, []string{"2", "3"}, left)
	require.ElementsMatch(t, []string{"w", "rival"}, n.takeAll(t))
}

// Somebody emptied the queue and let its ids begin anew.
func TestRedriveDeadLetters_IDIsInUseAgain_LetterStays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for range 2 {
		n.enqueue(t, "w")
		n.bury(t, "r")
		n.send(t, "i", "k")
		n.buryTurn(t, "r")
		n.exec(t, `TRUNCATE worker_queue, orchestrator_queue RESTART IDENTITY`)
	}
	require.Equal(t, 2, n.redrive(t, nil))
	require.Len(t, n.letters(t, nil), 2)
	require.Zero(t, n.redrive(t, nil))
	require.Equal(t, map[string]int{"namespaces": 1, "worker_queue": 1, "orchestrator_queue": 1, "dead_letters": 2, "realignments": 1}, n.rows(t))
}

func TestRedriveDeadLetters_AnotherHasLockedSome_TakesTheRest(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for range 4 {
		n.enqueue(t, "w")
		n.bury(t, "r")
	}
	tx := n.begin(t)
	redriven, err := n.RedriveDeadLettersTx(t.Context(), tx, &pgwake.DeadLetterFilter{Limit: 2})
	require.NoError(t, err)
	require.Equal(t, 2, redriven)
	require.Equal(t, 2, n.redrive(t, nil), "and waits for nobody")
	require.NoError(t, tx.Commit(t.Context()))
	require.Len(t, n.takeAll(t), 4)
}

func TestRedriveDeadLetters_NoLimit_Are1000PerCall(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO worker_queue (name) SELECT 'w' FROM generate_series(1, 2100)`)
	n.exec(t, `SELECT bury_work(ARRAY(SELECT id FROM worker_queue), 'r', NULL)`)
	require.Len(t, n.letters(t, nil), 100)
	require.Equal(t, 1000, n.redrive(t, nil))
	purged, err := n.PurgeDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, 1000, purged)
	require.Equal(t, 100, n.redrive(t, nil))
	require.Zero(t, n.redrive(t, nil))
	require.Equal(t, map[string]int{"namespaces": 1, "worker_queue": 1100}, n.rows(t))
}

// Both queues, from this node and from another, in a transaction of one's own and in the caller's.
func TestRedriveDeadLetters_NodesWait_AreWoken(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	ctx := t.Context()
	for how, redrive := range map[string]func() (int, error){
		"own transaction": func() (int, error) { return a.RedriveDeadLetters(ctx, nil) },
		"caller's transaction": func() (int, error) {
			tx := a.begin(t)
			redriven, err := a.RedriveDeadLettersTx(ctx, tx, nil)
			if err != nil {
				return 0, err
			}
			return redriven, tx.Commit(ctx)
		},
	} {
		for where, waiting := range map[string]*node{"here": a, "there": b} {
			t.Run(how+", "+where, func(t *testing.T) {
				a.enqueueWith(t, "w", &pgwake.EnqueueOptions{Namespace: "mine"})
				a.bury(t, "r")
				a.send(t, "i", "k")
				a.buryTurn(t, "r")
				// The dispatchers park: on lanes that have met what is in the queue by now, which is nothing.
				work, turn := make(chan error, 1), make(chan error, 1)
				go func() {
					item, err := waiting.FetchWorkItem(ctx, soon)
					if err == nil {
						err = waiting.AckWorkItem(ctx, item.LockToken, nil)
					}
					work <- err
				}()
				go func() {
					item, err := waiting.FetchOrchestrationItem(ctx, soon)
					if err == nil {
						err = waiting.AckOrchestrationItem(ctx, item.LockToken, pgwake.OrchestrationAck{})
					}
					turn <- err
				}()
				require.Eventually(t, func() bool {
					s := waiting.Stats()
					return s.Worker.Parked == 1 && s.Orchestrator.Parked == 1
				}, patience, 10*time.Millisecond)
				redriven, err := redrive()
				require.NoError(t, err)
				require.Equal(t, 2, redriven)
				require.NoError(t, <-work)
				require.NoError(t, <-turn)
			})
		}
	}
}

func deadLetterTxCases(n *node) map[string]txCase {
	var item *pgwake.ClaimedWorkItem
	var turn *pgwake.OrchestrationItem
	dead := func(t *testing.T) {
		n.enqueue(t, "w")
		n.bury(t, "r")
	}
	counts := func(want map[string]int) func(*testing.T) {
		return func(t *testing.T) { require.Equal(t, want, n.rows(t)) }
	}
	return map[string]txCase{
		"work item": {func(t *testing.T) { n.enqueue(t, "w"); item = n.take(t) },
			func(tx pgx.Tx) error { return n.DeadLetterWorkItemTx(tctx, tx, item.LockToken, "r", "") },
			counts(map[string]int{"namespaces": 1, "dead_letters": 1})},
		"orchestration": {func(t *testing.T) { n.send(t, "i", "k"); turn = n.takeTurn(t) },
			func(tx pgx.Tx) error { return n.DeadLetterOrchestrationItemTx(tctx, tx, turn.LockToken, "r", "") },
			counts(map[string]int{"namespaces": 1, "dead_letters": 1})},
		"redrive": {dead,
			func(tx pgx.Tx) error { _, err := n.RedriveDeadLettersTx(tctx, tx, nil); return err },
			counts(map[string]int{"namespaces": 1, "worker_queue": 1})},
		"purge": {dead,
			func(tx pgx.Tx) error { _, err := n.PurgeDeadLettersTx(tctx, tx, nil); return err },
			counts(map[string]int{"namespaces": 1})},
		"purge of the archive": {func(t *testing.T) { n.archive(t, "w") },
			func(tx pgx.Tx) error { _, err := n.PurgeArchiveTx(tctx, tx, time.Now().Add(time.Hour)); return err },
			counts(map[string]int{"namespaces": 1})},
	}
}

func TestDeadLettersTx_CommitOrRollback_DecidesForAll(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for name, c := range deadLetterTxCases(n) {
		t.Run(name, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks, dead_letters, archive`)
			c.given(t)
			before := n.content(t)
			tx := n.begin(t)
			require.NoError(t, c.verb(tx))
			require.Equal(t, before, n.content(t), "seen before the commit")
			require.NoError(t, tx.Rollback(t.Context()))
			require.Equal(t, before, n.content(t))
			tx = n.begin(t)
			require.NoError(t, c.verb(tx))
			require.NoError(t, tx.Commit(t.Context()))
			c.then(t)
		})
	}
}

// Many redrive, and bury again what they fetch: whatever happens, each item is in one place.
func TestDeadLetters_BuryAndRedriveAtOnce_EachItemIsInOnePlace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const items = 40
	n.exec(t, `INSERT INTO worker_queue (name, dedup_key) SELECT 'w' || g, 'key ' || g % 30 FROM generate_series(1, 40) g ON CONFLICT DO NOTHING`)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind) SELECT 'i' || g % 5, 'k' FROM generate_series(1, $1) g`, items)
	want := query[string](t, n, `SELECT 'w' || id FROM worker_queue UNION ALL SELECT 'o' || id FROM orchestrator_queue ORDER BY 1`)
	ended := make(chan error)
	const rounds = 25
	loop := func(round func() error) {
		go func() {
			for range rounds {
				if err := round(); err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
	}
	for range 2 {
		loop(func() error {
			got, err := n.FetchWorkItems(tctx, 7, now)
			for _, item := range got {
				if err := n.DeadLetterWorkItem(tctx, item.LockToken, "r", ""); err != nil {
					return err
				}
			}
			return ignoreNoWork(err)
		})
		loop(func() error {
			turn, err := n.FetchOrchestrationItem(tctx, now)
			if err != nil {
				return ignoreNoWork(err)
			}
			return n.DeadLetterOrchestrationItem(tctx, turn.LockToken, "r", "")
		})
		loop(func() error {
			_, err := n.RedriveDeadLetters(tctx, &pgwake.DeadLetterFilter{Limit: 9})
			return err
		})
	}
	for range 6 {
		require.NoError(t, <-ended)
	}
	require.Equal(t, want, query[string](t, n, `SELECT 'w' || id FROM worker_queue UNION ALL SELECT 'o' || id FROM orchestrator_queue
		UNION ALL SELECT left(queue, 1) || item_id FROM dead_letters ORDER BY 1`))
}

func ignoreNoWork(err error) error {
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil
	}
	return err
}

// archive enqueues work items and acknowledges them into the archive, backstage.
func (n *node) archive(tb tester, names ...string) {
	tb.Helper()
	n.enqueue(tb, names...)
	n.exec(tb, `SELECT archive_work(ARRAY(SELECT id FROM worker_queue ORDER BY id), '1 hour')`)
	n.exec(tb, `DELETE FROM worker_queue`)
}

func (n *node) archived(tb tester, f *pgwake.ArchiveFilter) []pgwake.ArchivedItem {
	tb.Helper()
	items, err := n.ListArchive(tctx, f)
	require.NoError(tb, err)
	return items
}

func TestListArchive_ItemWithEverything_IsListedAsItWas(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	id := n.wholeItem(t)
	n.exec(t, `UPDATE worker_queue SET session_id = 's', attempt_count = 2, headers = '{"h": "1"}'`)
	before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	n.exec(t, `SELECT archive_work(ARRAY(SELECT id FROM worker_queue), '1 hour')`)
	items := n.archived(t, nil)
	require.Len(t, items, 1)
	require.False(t, items[0].FinishedAt.Before(before), "the server's time")
	require.True(t, items[0].EnqueuedAt.Equal(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)))
	items[0].FinishedAt, items[0].EnqueuedAt = time.Time{}, time.Time{}
	require.Equal(t, pgwake.ArchivedItem{
		WorkItem: pgwake.WorkItem{Name: "w", Input: json.RawMessage(`{"a":  1.50}`), Instance: "i", ExecutionID: 2, ActivityID: 3, Tag: "gpu", Session: "s",
			Headers: map[string]string{"h": "1"}},
		ID: items[0].ID, ItemID: id, Namespace: "mine", Priority: 7, Attempts: 2, DedupKey: "key",
	}, items[0])
}

func TestAckWorkItems_TokenTwice_IsArchivedOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{ArchiveFor: time.Hour})
	n.enqueue(t, "a", "b")
	token := n.take(t).LockToken
	require.NoError(t, n.AckWorkItems(t.Context(), []pgwake.LockToken{token, token}))
	require.Len(t, n.archived(t, nil), 1)
	token = n.take(t).LockToken
	_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Ack: []pgwake.LockToken{token, token}})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	require.Len(t, n.archived(t, nil), 2)
}

// What an undone claim took it gives back: the item, and the session if its owner did not have that before.
func TestUndoWorkClaim_ItemOfASession_GivesBackNoMoreThanItTook(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	enqueue := func(names ...string) {
		for _, name := range names {
			_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Session: "s"}, nil)
			require.NoError(t, err)
		}
	}
	fetch := func(owner string) (*pgwake.ClaimedWorkItem, error) {
		return n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true, LockTimeout: time.Hour,
			Session: &pgwake.SessionOptions{Owner: owner, LockTimeout: time.Hour}})
	}
	undo := func(item *pgwake.ClaimedWorkItem) {
		undone := query[int64](t, n, `SELECT undo_work_claim(lock_token, '1 hour') FROM worker_queue WHERE id = $1`, item.ID)
		require.Equal(t, []int64{1}, undone)
	}
	take := func(owner, want string) *pgwake.ClaimedWorkItem {
		item, err := fetch(owner)
		require.NoError(t, err)
		require.Equal(t, want, item.Name)
		require.Equal(t, 1, item.Attempt)
		return item
	}
	refused := func(owner string) {
		_, err := fetch(owner)
		require.ErrorIs(t, err, pgwake.ErrNoWork)
	}
	enqueue("1", "2", "3")
	undo(take("A", "1")) // it created the session
	first := take("B", "2")
	refused("A")
	undo(take("B", "3")) // the session was B's already
	refused("A")
	undo(first) // and is, by a later claim
	refused("A")
	n.exec(t, `UPDATE sessions SET locked_until = clock_timestamp()`)
	undo(take("C", "1")) // it took the session over
	take("A", "3")
}

func TestListArchive_Filter_AllConditionsHold(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.archive(t, "w0", "w1", "w0", "w1")
	n.exec(t, `UPDATE archive SET namespace = 'other', instance_id = 'i' WHERE id > (SELECT min(id) + 1 FROM archive)`)
	all := n.archived(t, nil)
	require.Len(t, all, 4)
	for name, c := range map[string]struct {
		f    pgwake.ArchiveFilter
		want []int
	}{
		"namespace":          {pgwake.ArchiveFilter{Namespace: "other"}, []int{2, 3}},
		"name":               {pgwake.ArchiveFilter{Name: "w1"}, []int{1, 3}},
		"instance":           {pgwake.ArchiveFilter{Instance: "i"}, []int{2, 3}},
		"name and instance":  {pgwake.ArchiveFilter{Name: "w0", Instance: "i"}, []int{2}},
		"name and namespace": {pgwake.ArchiveFilter{Name: "w0", Namespace: "default"}, []int{0}},
		"page":               {pgwake.ArchiveFilter{Limit: 3}, []int{0, 1, 2}},
		"next page":          {pgwake.ArchiveFilter{Limit: 3, After: all[2].ID}, []int{3}},
		"nothing":            {pgwake.ArchiveFilter{Name: "w"}, nil},
	} {
		want := []pgwake.ArchivedItem{}
		for _, i := range c.want {
			want = append(want, all[i])
		}
		require.Equal(t, want, append([]pgwake.ArchivedItem{}, n.archived(t, &c.f)...), name)
	}
}

func TestPurgeArchive_Before_RemovesWhatIsOlder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.archive(t, "old", "older", "young")
	n.exec(t, `UPDATE archive SET finished_at = '2020-01-02Z' WHERE name = 'old'`)
	n.exec(t, `UPDATE archive SET finished_at = '2020-01-01Z' WHERE name = 'older'`)
	for _, want := range []struct {
		before time.Time
		purged int
	}{
		{time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), 0}, // not that instant itself
		{time.Date(2020, 1, 2, 0, 0, 0, 0, time.UTC), 1},
		{time.Date(2020, 1, 3, 0, 0, 0, 0, time.UTC), 1},
		{time.Date(2020, 1, 3, 0, 0, 0, 0, time.UTC), 0},
	} {
		purged, err := n.PurgeArchive(t.Context(), want.before)
		require.NoError(t, err)
		require.Equal(t, want.purged, purged)
	}
	require.Equal(t, "young", n.archived(t, nil)[0].Name)
}

// Whoever adds removes twice as many and ten more of what is too old, the oldest first, and nothing else.
func TestArchiveWork_OldRows_AreRemovedBitByBit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at, finished_at)
		SELECT g, 'default', 0, 1, 'old', now(), now() - interval '1 hour' - g * interval '1 s' FROM generate_series(1, 40) g`)
	n.exec(t, `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at, finished_at)
		SELECT g, 'default', 0, 1, 'young', now(), now() - interval '59 min' FROM generate_series(1, 5) g`)
	for _, want := range []struct {
		added int
		left  int64
	}{{3, 24}, {1, 12}, {2, 0}, {1, 0}} {
		names := make([]string, want.added)
		for i := range names {
			names[i] = fmt.Sprintf("w%d", i)
		}
		n.archive(t, names...)
		require.Equal(t, []int64{want.left}, query[int64](t, n, `SELECT count(*) FROM archive WHERE name = 'old'`))
		if want.left > 0 {
			require.Equal(t, []int64{want.left}, query[int64](t, n, `SELECT max(item_id) FROM archive WHERE name = 'old'`), "the oldest went")
		}
	}
	require.Equal(t, []int64{12}, query[int64](t, n, `SELECT count(*) FROM archive`))
}

func TestArchiveWork_AnotherRemovesTheOldRows_DoesNotWaitForIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.archive(t, "old")
	n.exec(t, `UPDATE archive SET finished_at = '2020-01-01Z'`)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT archive_work('{}', '1 hour')`)
	require.NoError(t, err)
	n.archive(t, "young")
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "young", n.archived(t, nil)[0].Name)
}

// What each look finds before what it is after, it walks over again: so one look buries a hundred, and the next goes on from there.
func TestFetchWorkItem_ManyWereClaimedTooOften_AreBuriedAHundredAtATime(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO worker_queue (name, visible_at, attempt_count) SELECT 'bad', now() - interval '1 h', 3 FROM generate_series(1, 250)`)
	n.enqueue(t, "good")
	letters := func() int { return query[int](t, n, `SELECT count(*) FROM dead_letters`)[0] }

	require.Equal(t, []string{"0 100"}, query[string](t, n, `SELECT count(item_id) || ' ' || max(attempt_count) FROM fetch_work(gen_random_uuid(), '30 s', p_max_attempts => 3)`))
	require.Equal(t, 100, letters())

	item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, MaxAttempts: 3})
	require.NoError(t, err, "a look that came no further is none")
	require.Equal(t, "good", item.Name)
	require.Equal(t, 250, letters())
}
