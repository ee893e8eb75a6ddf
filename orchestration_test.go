package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type kinds = []pgwake.MessageKind

// Turns

func TestFetchOrchestrationItem_SeveralMessages_OneTurnHasAllOfThemById(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1", "2", "3")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "urgent"}, &pgwake.EnqueueOptions{Priority: 9})
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "long due"}, &pgwake.EnqueueOptions{At: time.Now().Add(-time.Hour)})
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "later"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "elsewhere"}, &pgwake.EnqueueOptions{Namespace: "other"})
	turn := n.takeTurn(t)
	require.Equal(t, kinds{"1", "2", "3", "urgent", "long due", "elsewhere"}, kindsOf(turn))
	require.True(t, slices.IsSortedFunc(turn.Messages, func(a, b pgwake.ClaimedMessage) int { return int(a.ID - b.ID) }))
	n.requireNoTurn(t)
}

func TestFetchOrchestrationItem_MessagesArriveUnderTheLock_ComeInTheNextTurn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1")
	first := n.takeTurn(t)
	n.send(t, "i", "2", "3")
	n.requireNoTurn(t)
	require.Equal(t, kinds{"1"}, kindsOf(first))

	n.ackTurn(t, first, pgwake.OrchestrationAck{})
	second := n.takeTurn(t)
	require.Equal(t, kinds{"2", "3"}, kindsOf(second), "the ack removed only the messages of its turn")
	require.NotEqual(t, first.LockToken, second.LockToken)
	n.ackTurn(t, second, pgwake.OrchestrationAck{})
	n.requireNoTurn(t)
	require.Empty(t, n.content(t)["orchestrator_queue"])
	require.Empty(t, n.content(t)["instance_locks"])
}

func TestFetchOrchestrationItem_EverythingSent_ComesBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	start := pgwake.Message{Instance: "order-7 ✉", Kind: pgwake.MessageStart, Data: json.RawMessage(`{"total": 12.50}`),
		Name: "order", Version: "1.2.3", ExecutionID: 4}
	added := n.sendWith(t, start, &pgwake.EnqueueOptions{Namespace: "shop", Priority: 3})
	turn := n.takeTurn(t)
	require.Len(t, turn.Messages, 1)
	m := turn.Messages[0]
	require.Equal(t, start, m.Message)
	require.Equal(t, added.ID, m.ID)
	require.Equal(t, 1, m.Attempt)
	require.Equal(t, added.DueAt, m.EnqueuedAt)
	require.Equal(t, "order-7 ✉", turn.Instance)
	require.Equal(t, "shop", turn.Namespace)
	require.GreaterOrEqual(t, turn.LockedUntil.Sub(added.DueAt), lease)
	require.Equal(t, 1, turn.Attempt)
}

func TestFetchOrchestrationItem_UnknownInstance_IsDescribedByItsOpeningMessage(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, kind := range (kinds{pgwake.MessageStart, pgwake.MessageContinueAsNew}) {
		instance := string(kind)
		n.send(t, instance, "early")
		n.sendWith(t, pgwake.Message{Instance: instance, Kind: kind, Name: "flow", Version: "2.0.0", ExecutionID: 5}, nil)
		turn := n.takeTurn(t)
		require.Equal(t, []any{"flow", "2.0.0", int64(5)}, []any{turn.Name, turn.Version, turn.ExecutionID})
		require.Empty(t, turn.History)
	}
	n.send(t, "nobody", "ping")
	turn := n.takeTurn(t)
	require.Equal(t, []any{"", "", int64(1)}, []any{turn.Name, turn.Version, turn.ExecutionID})
	require.Empty(t, n.content(t)["instances"], "a fetch creates no instance")
}

func TestFetchOrchestrationItem_KnownInstance_IsDescribedByWhatWasAcked(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "from message", Version: "0.1.0"}, nil)
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Name: "from ack", Version: "1.0.0"},
		History:  []pgwake.Event{{ID: 1, Type: "started", Data: json.RawMessage(`{"n":1}`)}, {ID: 2, Type: "scheduled"}},
	})
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "again", Version: "9.9.9", ExecutionID: 9}, nil)
	turn := n.takeTurn(t)
	require.Equal(t, []any{"from ack", "1.0.0", int64(1)}, []any{turn.Name, turn.Version, turn.ExecutionID})
	require.Equal(t, []string{"1 started {\"n\":1}", "2 scheduled "}, eventsOf(turn.History))
}

// A second start is the runtime's to judge. It does not hide that the instance continues as new.
func TestFetchOrchestrationItem_StartBeforeContinueAsNew_IsATurnOfTheNextExecution(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "again", Version: "9.9.9", ExecutionID: 9}, nil)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Status: pgwake.StatusContinuedAsNew}, History: []pgwake.Event{{ID: 1, Type: "e"}},
		Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", ExecutionID: 2}}},
	})
	turn = n.takeTurn(t)
	require.Equal(t, kinds{pgwake.MessageStart, pgwake.MessageContinueAsNew}, kindsOf(turn))
	require.Equal(t, []any{"flow", "1.0.0", int64(2)}, []any{turn.Name, turn.Version, turn.ExecutionID})
	require.Empty(t, turn.History, "it is that of the execution before")
}

// What such a fetch finds says nothing about what others would.
func TestFetchOrchestrationItem_NoQueueNames_GetsNothingAndKeepsNothingFromOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "k")
	_, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{PollTimeout: time.Millisecond, Queues: []string{}})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "i", turn.Instance)
}

// eventsOf writes events as "id type data".
func eventsOf(history []pgwake.Event) []string {
	texts := make([]string, len(history))
	for i, e := range history {
		texts[i] = fmt.Sprintf("%d %s %s", e.ID, e.Type, e.Data)
	}
	return texts
}

func TestFetchOrchestrationItem_TenConcurrentFetches_GetTenInstances(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	for i := range 10 {
		a.send(t, strconv.Itoa(i), "1", "2")
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	seen := make(map[string]int)
	for i := range 10 {
		wg.Go(func() {
			turn, err := []*node{a, b}[i%2].FetchOrchestrationItem(t.Context(), soon)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			seen[turn.Instance] += len(turn.Messages)
		})
	}
	wg.Wait()
	require.Len(t, seen, 10)
	for instance, messages := range seen {
		require.Equal(t, 2, messages, instance)
	}
	a.requireNoTurn(t)
}

func TestFetchOrchestrationItem_ManyFetchersOneInstance_OneWins(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for round := range 5 {
		n.send(t, strconv.Itoa(round), "1", "2", "3")
		var wg sync.WaitGroup
		var mu sync.Mutex
		won := 0
		for range 10 {
			wg.Go(func() {
				turn, err := n.FetchOrchestrationItem(t.Context(), now)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil && len(turn.Messages) == 3:
					won++
				case !errors.Is(err, pgwake.ErrNoWork):
					t.Errorf("%+v, %v", turn, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 1, won)
	}
}

func TestInstanceLock_OneInstanceLocked_OthersAreNotHindered(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "a", "1")
	a := n.takeTurn(t)
	n.send(t, "a", "2")
	n.send(t, "b", "1")
	b := n.takeTurn(t)
	require.Equal(t, "b", b.Instance)
	n.send(t, "b", "2")
	n.ackTurn(t, b, pgwake.OrchestrationAck{})
	require.Equal(t, kinds{"2"}, kindsOf(n.takeTurn(t)))
	n.requireNoTurn(t)
	n.ackTurn(t, a, pgwake.OrchestrationAck{})
	require.Equal(t, "a", n.takeTurn(t).Instance)
}

func TestFetchOrchestrationItem_DelayedMessage_InvisibleUntilDue(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "timer"}, &pgwake.EnqueueOptions{Delay: time.Hour})
	n.send(t, "i", "ping")
	turn := n.takeTurn(t)
	require.Equal(t, kinds{"ping"}, kindsOf(turn))
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	n.requireNoTurn(t)
	n.travel(t, time.Hour)
	turn = n.takeTurn(t)
	require.Equal(t, kinds{"timer"}, kindsOf(turn))
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})

	timer := n.sendWith(t, pgwake.Message{Instance: "i", Kind: "timer"}, &pgwake.EnqueueOptions{Delay: 200 * time.Millisecond})
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.False(t, claimedAt(turn.LockedUntil).Before(timer.DueAt))
}

func TestFetchOrchestrationItem_Priorities_InstanceWithTheMostUrgentMessageFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := time.Now().Add(-time.Hour)
	for _, m := range []struct {
		instance string
		priority int
		at       time.Time
	}{{"low", 0, at}, {"high", 5, at}, {"late", 5, at.Add(time.Minute)}, {"both", 0, at.Add(-time.Minute)}, {"both", 9, at.Add(time.Hour / 2)}} {
		n.sendWith(t, pgwake.Message{Instance: m.instance, Kind: "k"}, &pgwake.EnqueueOptions{Priority: m.priority, At: m.at})
	}
	for _, want := range []string{"both", "high", "late", "low"} {
		require.Equal(t, want, n.takeTurn(t).Instance)
	}
	n.requireNoTurn(t)
}

func TestFetchOrchestrationItem_NamespaceFilter_SeesOnlyThoseAndInOrderAcrossThem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := time.Now().Add(-time.Hour)
	for i, namespace := range []string{"c", "b", "a", "b", "default"} {
		n.sendWith(t, pgwake.Message{Instance: strconv.Itoa(i), Kind: "k"}, &pgwake.EnqueueOptions{Namespace: namespace, At: at.Add(time.Duration(i) * time.Second)})
	}
	fetch := func(namespaces ...string) string {
		turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: namespaces})
		if errors.Is(err, pgwake.ErrNoWork) {
			return "none"
		}
		require.NoError(t, err)
		return turn.Instance
	}
	for _, c := range []struct {
		want       string
		namespaces []string
	}{
		{"none", []string{"z"}}, {"1", []string{"a", "b"}}, {"2", []string{"b", "a"}}, {"none", []string{"a"}},
		{"3", []string{"a", "b"}}, {"4", []string{"default"}}, {"0", nil},
	} {
		require.Equal(t, c.want, fetch(c.namespaces...), "%v", c.namespaces)
	}
}

// Instances that a transaction has in its hands must not stop a fetch from finding the free one behind them.
func TestEnqueueForOrchestrator_InstanceAboutToBeKnown_MessageGoesToItsNamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	inRed := &pgwake.FetchOptions{Namespaces: []string{"red"}, LockTimeout: lease, NoWait: true}
	_, err := n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "red"})
	require.NoError(t, err)
	turn, err := n.FetchOrchestrationItem(t.Context(), inRed)
	require.NoError(t, err)
	// One that sees the message that opens the instance, and one that does not: its transaction began earlier.
	_, err = n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: "event"}, nil)
	require.NoError(t, err)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind) VALUES ('i', 'early')`)
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}))
	turn, err = n.FetchOrchestrationItem(t.Context(), inRed)
	require.NoError(t, err)
	require.Len(t, turn.Messages, 2)
	require.Equal(t, []string{"red", "red"}, query[string](t, n, `SELECT namespace FROM orchestrator_queue`))
}

// Those who serve other namespaces would look for nothing, at each new instance.
func TestAckOrchestration_FirstOfAnInstance_ConcernsItsNamespaceUnlessAMessageMayBeElsewhere(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	first := func(instance string, meanwhile func()) string {
		_, err := n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "red"})
		require.NoError(t, err)
		turn, err := n.FetchOrchestrationItem(t.Context(), soon)
		require.NoError(t, err)
		meanwhile()
		_, claim, err := turn.LockToken.Turn()
		require.NoError(t, err)
		scopes := query[string](t, n, `SELECT coalesce(namespace, '*') FROM ack_orchestration($1, $2, 1, 'flow') WHERE queue = 'freed'`, instance, claim)
		require.Len(t, scopes, 1)
		return scopes[0]
	}
	require.Equal(t, "red", first("alone", func() {}))
	tx := n.begin(t)
	require.Equal(t, "*", first("joined", func() {
		_, err := n.EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "joined", Kind: "event"}, nil)
		require.NoError(t, err)
	}))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "*", first("moved", func() {
		n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind) VALUES ('moved', 'early')`)
	}))
}

func TestEnqueueForOrchestratorMany_NewInstanceInSeveralNamespaces_IsInTheFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	_, err := n.EnqueueForOrchestratorMany(t.Context(), []pgwake.MessageEnqueue{
		{Message: pgwake.Message{Instance: "i", Kind: "k"}},
		{Message: pgwake.Message{Instance: "i", Kind: "k"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "red"}},
		{Message: pgwake.Message{Instance: "i", Kind: "k"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "blue"}},
	})
	require.NoError(t, err)
	require.Equal(t, []string{"red", "red", "red"}, query[string](t, n, `SELECT namespace FROM orchestrator_queue`))
}

// A dedup key that is taken in the namespace of the instance must not make its acks fail.
func TestAckOrchestrationItem_MessageCannotMoveToTheNamespace_AckSucceedsAndItComesNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	red := pgwake.EnqueueOptions{Namespace: "red"}
	_, err := n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &red)
	require.NoError(t, err)
	turn, err := n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, namespace, dedup_key) VALUES ('i', 'early', 'blue', 'k'), ('i', 'early', 'green', 'k')`)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, namespace, dedup_key, visible_at) VALUES ('other', 'k', 'red', 'k', now() + '1 hour')`)
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}))
	turn, err = n.FetchOrchestrationItem(t.Context(), now)
	require.NoError(t, err)
	require.Len(t, turn.Messages, 2)
}

func TestFetchOrchestrationItem_ThousandsOfLockedInstancesBefore_TheFreeOneIsReached(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO instance_locks (instance_id, lock_token, locked_until) SELECT i::text, gen_random_uuid(), now() + '1 hour' FROM generate_series(1, 2500) i`)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind) SELECT i::text, 'event' FROM generate_series(1, 2500) i`)
	n.exec(t, `SELECT enqueue_message('free', 'start', p_name => 'n')`)
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "free", turn.Instance)
	require.EqualValues(t, 3, n.Stats().Orchestrator.Looks, "a thousand are moved out of the way at a time")
}

func TestFetchOrchestrationItem_FirstFiftyInstancesLockedByOthers_TakesTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `SELECT enqueue_message('i' || g, 'k', p_namespace => (ARRAY['a','b'])[1 + g % 2]) FROM generate_series(0, 51) g`)
	for range 50 {
		n.takeTurn(t)
	}
	n.exec(t, `SELECT enqueue_message('i' || g, 'late', p_namespace => (ARRAY['a','b'])[1 + g % 2], p_visible_at => now() - interval '1 hour') FROM generate_series(0, 49) g`)
	_, err := n.begin(t).Exec(t.Context(), `SELECT FROM instance_locks FOR UPDATE`)
	require.NoError(t, err)
	for _, c := range []struct {
		want       string
		namespaces []string
	}{{"i50", []string{"a", "b"}}, {"i51", nil}} {
		turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: c.namespaces})
		require.NoError(t, err)
		require.Equal(t, c.want, turn.Instance)
	}
}

// Whatever frees an instance makes the messages that waited behind its lock due at once.

func TestInstanceLock_Released_HeldMessagesAreDueAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for how, c := range map[string]struct {
		release func(turn *pgwake.OrchestrationItem) error
		want    kinds
	}{
		"ack": {func(turn *pgwake.OrchestrationItem) error {
			return n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{})
		}, kinds{"2", "3"}},
		"abandon": {func(turn *pgwake.OrchestrationItem) error {
			return n.AbandonOrchestrationItem(ctx, turn.LockToken, nil)
		}, kinds{"1", "2", "3"}},
		"abandon with delay": {func(turn *pgwake.OrchestrationItem) error {
			return n.AbandonOrchestrationItem(ctx, turn.LockToken, &pgwake.AbandonOptions{Delay: time.Hour})
		}, kinds{"2", "3"}},
		"expiry": {func(*pgwake.OrchestrationItem) error { n.travel(t, 2*lease); return nil }, kinds{"1", "2", "3"}},
		"expiry after a renewal": {func(turn *pgwake.OrchestrationItem) error {
			_, err := n.RenewOrchestrationItemLock(ctx, turn.LockToken, 2*lease)
			n.travel(t, lease+time.Minute)
			n.requireNoTurn(t)
			n.travel(t, lease)
			return err
		}, kinds{"1", "2", "3"}},
		"undo of the claim": {func(turn *pgwake.OrchestrationItem) error {
			require.Equal(t, []bool{true}, query[bool](t, n, `SELECT true FROM instance_locks WHERE instance_id = $1`, turn.Instance))
			n.exec(t, `SELECT undo_orchestration_claim(lock_token) FROM instance_locks WHERE instance_id = $1`, turn.Instance)
			return nil
		}, kinds{"1", "2", "3"}},
	} {
		t.Run(how, func(t *testing.T) {
			n.exec(t, `TRUNCATE orchestrator_queue, instance_locks`)
			n.send(t, "i", "1")
			turn := n.takeTurn(t)
			n.send(t, "i", "2")
			n.requireNoTurn(t) // meets message 2 and moves it out of the way
			require.Equal(t, []bool{true}, query[bool](t, n, `SELECT held FROM orchestrator_queue WHERE kind = '2'`))
			n.send(t, "i", "3") // nobody has met this one
			require.NoError(t, c.release(turn))
			again := n.takeTurn(t)
			require.Equal(t, c.want, kindsOf(again))
			require.Equal(t, []bool{false}, query[bool](t, n, `SELECT DISTINCT held FROM orchestrator_queue`))
			n.ackTurn(t, again, pgwake.OrchestrationAck{})
			n.requireNoTurn(t)
		})
	}
}

// The same for whoever waits: no lease has to end first.
func TestInstanceLock_Released_WaitingFetchGetsTheHeldMessage(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	ctx := t.Context()
	for how, release := range map[string]func(pgwake.LockToken) error{
		"ack": func(token pgwake.LockToken) error {
			return a.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{})
		},
		"abandon": func(token pgwake.LockToken) error { return a.AbandonOrchestrationItem(ctx, token, nil) },
		"ack in a transaction": func(token pgwake.LockToken) error {
			tx := a.begin(t)
			return errors.Join(a.AckOrchestrationItemTx(ctx, tx, token, pgwake.OrchestrationAck{}), tx.Commit(ctx))
		},
		"abandon in a transaction": func(token pgwake.LockToken) error {
			tx := a.begin(t)
			return errors.Join(a.AbandonOrchestrationItemTx(ctx, tx, token, nil), tx.Commit(ctx))
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
			require.NoError(t, release(turn.LockToken))
			require.NoError(t, <-got)
		})
	}
}

// An ack in a transaction with a snapshot of its own cannot see what was sent after that snapshot. What it
// frees must not stay behind the lock that is gone.
func TestAckOrchestrationItemTx_RepeatableRead_MessageHeldMeanwhileIsDueAfterTheCommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1")
	turn := n.takeTurn(t)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1`)
	require.NoError(t, err)
	n.send(t, "i", "2")
	n.requireNoTurn(t)
	if err := n.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, pgwake.OrchestrationAck{}); err != nil {
		// Refusing is as good, as long as it can be tried again.
		require.True(t, requireError(t, err, err).Retryable, "%v", err)
		return
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, kinds{"2"}, kindsOf(n.takeTurn(t)))
}

func TestFetchOrchestrationItem_LockExpires_RedeliversAtExpiry(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1")
	first, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: 150 * time.Millisecond, NoWait: true})
	require.NoError(t, err)
	n.send(t, "i", "2")
	second, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, kinds{"1", "2"}, kindsOf(second))
	require.NotEqual(t, first.LockToken, second.LockToken)
	require.False(t, claimedAt(second.LockedUntil).Before(first.LockedUntil), "redelivered before the lock ended")
	require.Equal(t, []int{2, 1}, []int{second.Messages[0].Attempt, second.Messages[1].Attempt})
	require.Equal(t, 2, second.Attempt, "the most of the batch")
	requireError(t, n.AckOrchestrationItem(t.Context(), first.LockToken, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
	n.ackTurn(t, second, pgwake.OrchestrationAck{})
}

// Ack

// Between the insert that meets a dedup key and the statement that asks whose it is, that item may be finished: the
// ack waits there for another key.
func TestAckOrchestrationItem_DuplicateIsFinishedMeanwhile_TakesEffect(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueueWith(t, "original", &pgwake.EnqueueOptions{DedupKey: "a"})
	original := n.take(t)
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "b"}, &pgwake.EnqueueOptions{DedupKey: "b"})
	require.NoError(t, err)
	acked := make(chan error, 1)
	go func() {
		acked <- n.AckOrchestrationItem(context.Background(), turn.LockToken, pgwake.OrchestrationAck{
			Metadata: pgwake.Metadata{Name: "n"},
			WorkItems: []pgwake.WorkEnqueue{
				{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "a"}},
				{WorkItem: pgwake.WorkItem{Name: "y"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "b"}},
			},
		})
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, n.AckWorkItem(t.Context(), original.LockToken, nil))
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-acked)
	require.Zero(t, n.rows(t)["instance_locks"])
}

func TestAckOrchestrationItem_FirstAck_CreatesTheInstance(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "message", Version: "0.0.1"}, &pgwake.EnqueueOptions{Namespace: "orders"})
	require.NotContains(t, n.rows(t), "instances", "an enqueue creates no instance")
	turn := n.takeTurn(t)
	require.NotContains(t, n.rows(t), "instances", "a fetch creates no instance")
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Version: "1.0.0"}})
	require.Equal(t, []string{"i orders flow 1.0.0 1"},
		query[string](t, n, `SELECT concat_ws(' ', instance_id, namespace, name, version, current_execution) FROM instances`))
	require.Equal(t, []string{"i 1 Running"}, n.executions(t))
}

func (n *node) executions(t tester) []string {
	return query[string](t, n, `SELECT concat_ws(' ', instance_id, execution_id, status, output) FROM executions ORDER BY 1`)
}

func TestAckOrchestrationItem_NewInstanceWithoutName_IsRefusedAndTheTurnStaysLocked(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	before := n.content(t)
	for _, ack := range []pgwake.OrchestrationAck{
		{History: []pgwake.Event{{ID: 1, Type: "e"}}},
		{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted}},
		{Metadata: pgwake.Metadata{Version: "1.0.0"}},
		{Metadata: pgwake.Metadata{Output: "x"}},
		{Metadata: pgwake.Metadata{Queue: "q"}},
		{Metadata: pgwake.Metadata{Parent: "p"}},
		{Metadata: pgwake.Metadata{Attributes: json.RawMessage(`{}`)}},
		{Metadata: pgwake.Metadata{PinnedVersion: &pgwake.Version{}}},
	} {
		requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, ack), pgwake.ErrInvalid)
		require.Equal(t, before, n.content(t))
	}
	n.ackTurn(t, turn, pgwake.OrchestrationAck{}) // a turn that decided nothing needs no instance
	require.NotContains(t, n.rows(t), "instances")
}

func TestAckOrchestrationItem_Metadata_EmptyFieldsLeaveWhatIsStored(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	turn := func(ack pgwake.OrchestrationAck) {
		n.send(t, "i", "k")
		n.ackTurn(t, n.takeTurn(t), ack)
	}
	turn(pgwake.OrchestrationAck{})
	require.Equal(t, []string{"flow 1.0.0"}, query[string](t, n, `SELECT name || ' ' || version FROM instances`))
	turn(pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "renamed"}})
	require.Equal(t, []string{"renamed 1.0.0"}, query[string](t, n, `SELECT name || ' ' || version FROM instances`))
	turn(pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted, Output: "42"}})
	require.Equal(t, []string{"i 1 Completed 42"}, n.executions(t))
	turn(pgwake.OrchestrationAck{})
	require.Equal(t, []string{"i 1 Completed 42"}, n.executions(t))
	turn(pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Output: "43"}})
	require.Equal(t, []string{"i 1 Completed 43"}, n.executions(t))
	require.Equal(t, []bool{true}, query[bool](t, n, `SELECT completed_at IS NOT NULL FROM executions`))
}

func TestAckOrchestrationItem_EveryStatus_IsStored(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	for _, status := range []pgwake.Status{pgwake.StatusCompleted, pgwake.StatusFailed, pgwake.StatusCancelled, pgwake.StatusContinuedAsNew, pgwake.StatusRunning} {
		n.send(t, "i", "k")
		n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: status}})
		require.Equal(t, []string{"i 1 " + string(status)}, n.executions(t))
	}
}

func TestAckOrchestrationItem_HigherExecution_BecomesCurrentWithItsOwnHistory(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	for _, execution := range []int64{1, 2, 3, 2} {
		n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", ExecutionID: execution}, nil)
		n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{
			ExecutionID: execution, Metadata: pgwake.Metadata{Name: "flow"},
			History: []pgwake.Event{{ID: int64(len(n.content(t)["history"])) + 1, Type: fmt.Sprint("of ", execution)}},
		})
	}
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	require.EqualValues(t, 3, turn.ExecutionID, "a lower one does not take over")
	require.Equal(t, []string{"3 of 3 "}, eventsOf(turn.History))
	events, err := n.ReadHistoryExecution(t.Context(), "i", 2, 0)
	require.NoError(t, err)
	require.Equal(t, []string{"2 of 2 ", "4 of 2 "}, eventsOf(events))
	require.Equal(t, []string{"i 1 Running", "i 2 Running", "i 3 Running"}, n.executions(t))
}

func TestAckOrchestrationItem_EverythingAtOnce_IsAllStoredInOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "parent", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	turn := n.takeTurn(t)
	before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	ack := pgwake.OrchestrationAck{
		Metadata: pgwake.Metadata{Name: "flow"},
		History:  []pgwake.Event{{ID: 3, Type: "c"}, {ID: 1, Type: "a"}, {ID: 2, Type: "b"}, {ID: 5, Type: "e"}, {ID: 4, Type: "d"}},
	}
	for i := range 3 {
		ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{
			WorkItem:       pgwake.WorkItem{Name: fmt.Sprint("w", i), Instance: "parent", ExecutionID: 1, ActivityID: int64(i), Input: json.RawMessage(strconv.Itoa(i))},
			EnqueueOptions: pgwake.EnqueueOptions{Namespace: "work", Priority: 4},
		})
	}
	ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "later"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Hour, Namespace: "work"}})
	for i := range 3 {
		ack.Messages = append(ack.Messages, pgwake.MessageEnqueue{Message: pgwake.Message{Instance: "child", Kind: pgwake.MessageKind(fmt.Sprint("m", i)), Data: json.RawMessage(strconv.Itoa(i))}})
	}
	const delay = 10 * time.Minute
	ack.Messages = append(ack.Messages,
		pgwake.MessageEnqueue{Message: pgwake.Message{Instance: "parent", Kind: "timer"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: delay}},
		pgwake.MessageEnqueue{Message: pgwake.Message{Instance: "parent", Kind: "self"}})
	n.ackTurn(t, turn, ack)

	events, err := n.ReadHistory(t.Context(), "parent")
	require.NoError(t, err)
	require.Equal(t, []string{"1 a ", "2 b ", "3 c ", "4 d ", "5 e "}, eventsOf(events))
	items, err := n.FetchWorkItems(t.Context(), 9, &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"work"}})
	require.NoError(t, err)
	require.Equal(t, []string{"w0", "w1", "w2"}, namesOf(items))
	for i, item := range items {
		require.Equal(t, ack.WorkItems[i].WorkItem, item.WorkItem)
		require.Equal(t, 4, item.Priority)
	}
	child := n.takeTurn(t)
	require.Equal(t, "child", child.Instance)
	require.Equal(t, kinds{"m0", "m1", "m2"}, kindsOf(child))
	require.Equal(t, `2`, string(child.Messages[2].Data))
	self := n.takeTurn(t)
	require.Equal(t, kinds{"self"}, kindsOf(self))
	n.ackTurn(t, self, pgwake.OrchestrationAck{})

	due := query[time.Time](t, n, `SELECT visible_at FROM orchestrator_queue WHERE kind = 'timer'`)[0]
	require.GreaterOrEqual(t, due.Sub(before), delay)
	n.requireNoTurn(t)
	n.travel(t, delay)
	require.Equal(t, kinds{"timer"}, kindsOf(n.takeTurn(t)))
}

func TestAckOrchestrationItem_DuplicateEventID_WholeAckIsRolledBackAndTheLockStays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: 1, Type: "original"}}})
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	before := n.content(t)
	bad := pgwake.OrchestrationAck{
		Metadata:  pgwake.Metadata{Name: "changed", Status: pgwake.StatusFailed, Output: "x"},
		WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "new"}}},
		Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "j", Kind: "k"}}},
	}
	for _, events := range [][]pgwake.Event{
		{{ID: 2, Type: "fine"}, {ID: 1, Type: "again"}},
		{{ID: 3, Type: "fine"}, {ID: 3, Type: "twice in one ack"}},
	} {
		bad.History = events
		err := requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, bad), pgwake.ErrDuplicateEvent)
		require.False(t, err.Retryable)
		require.Equal(t, "23505", err.SQLState)
		require.Equal(t, before, n.content(t))
		n.requireNoTurn(t)
	}
	n.ackTurn(t, turn, pgwake.OrchestrationAck{History: []pgwake.Event{{ID: 2, Type: "fine"}}})
}

func TestAckOrchestrationItem_AnyPartIsRefused_NothingChangesAndTheLockStays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "worker_queue", "name = 'poison'")
	n.refuse(t, "orchestrator_queue", "kind = 'poison'")
	n.refuse(t, "history", "type = 'poison'")
	n.start(t, "i")
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	before := n.content(t)
	good := func() pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{
			Metadata:  pgwake.Metadata{Name: "changed", Status: pgwake.StatusCompleted},
			History:   []pgwake.Event{{ID: 1, Type: "e"}},
			WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}},
			Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "j", Kind: "k"}}},
		}
	}
	for part, spoil := range map[string]func(*pgwake.OrchestrationAck){
		"work item refused by the database": func(a *pgwake.OrchestrationAck) { a.WorkItems[0].Name = "poison" },
		"message refused by the database":   func(a *pgwake.OrchestrationAck) { a.Messages[0].Kind = "poison" },
		"event refused by the database":     func(a *pgwake.OrchestrationAck) { a.History[0].Type = "poison" },
		"work item without a name":          func(a *pgwake.OrchestrationAck) { a.WorkItems[0].Name = "" },
		"message without an instance":       func(a *pgwake.OrchestrationAck) { a.Messages[0].Instance = "" },
		"event without a type":              func(a *pgwake.OrchestrationAck) { a.History[0].Type = "" },
		"unknown status":                    func(a *pgwake.OrchestrationAck) { a.Metadata.Status = "Finished" },
		"negative execution":                func(a *pgwake.OrchestrationAck) { a.ExecutionID = -1 },
	} {
		t.Run(part, func(t *testing.T) {
			ack := good()
			spoil(&ack)
			requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, ack), pgwake.ErrInvalid)
			require.Equal(t, before, n.content(t))
		})
	}
	n.ackTurn(t, turn, good())
}

func TestAckOrchestrationItem_SameTokenConcurrently_OneSucceeds(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	errs := make([]error, 6)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			errs[i] = n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{
				Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: int64(i), Type: "e"}}})
		})
	}
	wg.Wait()
	succeeded := 0
	for _, err := range errs {
		if err == nil {
			succeeded++
			continue
		}
		requireError(t, err, pgwake.ErrLockLost)
	}
	require.Equal(t, 1, succeeded)
	require.Len(t, n.content(t)["history"], 1)
}

func TestEnqueueForOrchestrator_KnownInstance_KeepsItsNamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "other"})
	_, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"other"}})
	requireError(t, err, pgwake.ErrNoWork)
	turn := n.takeTurn(t)
	require.Equal(t, pgwake.DefaultNamespace, turn.Namespace)
}

func TestEnqueueForOrchestratorMany_OneIsRefused_NoneIsAdded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "orchestrator_queue", "kind = 'poison'")
	before := n.content(t)
	for _, kind := range (kinds{"", "poison"}) {
		_, err := n.EnqueueForOrchestratorMany(t.Context(), []pgwake.MessageEnqueue{
			{Message: pgwake.Message{Instance: "a", Kind: "k"}},
			{Message: pgwake.Message{Instance: "b", Kind: kind}},
		})
		requireError(t, err, pgwake.ErrInvalid)
		require.Equal(t, before, n.content(t))
	}
	added, err := n.EnqueueForOrchestratorMany(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, added)
}

func TestEnqueueForOrchestrator_DedupKey_AddsNothingUntilTheTurnIsAcked(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	key := &pgwake.EnqueueOptions{DedupKey: "k"}
	first := n.sendWith(t, pgwake.Message{Instance: "a", Kind: "1"}, key)
	again := n.sendWith(t, pgwake.Message{Instance: "b", Kind: "2"}, key)
	require.True(t, again.Duplicate)
	require.Equal(t, first.ID, again.ID)
	turn := n.takeTurn(t)
	require.True(t, n.sendWith(t, pgwake.Message{Instance: "a", Kind: "3"}, key).Duplicate)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	n.requireNoTurn(t)
	require.False(t, n.sendWith(t, pgwake.Message{Instance: "a", Kind: "4"}, key).Duplicate)
}

func TestEnqueueForOrchestrator_DedupKeyInAnUncommittedTransaction_ReturnsTheMessageThatCommitted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	key := &pgwake.EnqueueOptions{DedupKey: "k"}
	tx := n.begin(t)
	winner, err := n.EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "a", Kind: "k"}, key)
	require.NoError(t, err)
	type outcome struct {
		pgwake.Enqueued
		error
	}
	loser := make(chan outcome, 1)
	go func() {
		added, err := n.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "b", Kind: "k"}, key)
		loser <- outcome{added, err}
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	o := <-loser
	require.NoError(t, o.error)
	require.True(t, o.Duplicate)
	require.Equal(t, winner.ID, o.ID)
}

// Abandon and renew

func TestAbandonOrchestrationItem_Delay_ItsMessagesAreInvisibleUntilThenAndOthersAreNot(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1", "2")
	turn := n.takeTurn(t)
	now := func() time.Time { return query[time.Time](t, n, `SELECT clock_timestamp()`)[0] }
	const delay = time.Hour
	before := now()
	require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{Delay: delay}))
	after := now()
	n.send(t, "i", "3")
	free := n.takeTurn(t)
	require.Equal(t, kinds{"3"}, kindsOf(free), "the instance is free at once")
	n.ackTurn(t, free, pgwake.OrchestrationAck{})
	visible := query[time.Time](t, n, `SELECT visible_at FROM orchestrator_queue`)
	require.Len(t, visible, 2)
	for _, at := range visible {
		require.WithinRange(t, at, before.Add(delay), after.Add(delay))
	}
	n.exec(t, `UPDATE orchestrator_queue SET visible_at = clock_timestamp()`)
	again, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, kinds{"1", "2"}, kindsOf(again))
}

func TestAbandonOrchestrationItem_Attempts_AreCountedUnlessIgnoredAndNeverBelowZero(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "k")
	for i, c := range []struct {
		want   int
		ignore bool
	}{{1, true}, {1, true}, {1, false}, {2, true}, {2, false}, {3, false}} {
		turn := n.takeTurn(t)
		require.Equal(t, c.want, turn.Attempt, "fetch %d", i)
		require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: c.ignore}))
	}
	n.send(t, "i", "fresh")
	turn := n.takeTurn(t)
	require.Equal(t, []int{4, 1, 4}, []int{turn.Messages[0].Attempt, turn.Messages[1].Attempt, turn.Attempt})
	n.exec(t, `UPDATE orchestrator_queue SET attempt_count = 0`)
	require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
	require.Equal(t, 1, n.takeTurn(t).Attempt)
}

func TestRenewOrchestrationItemLock_Renewed_HoldsTurnAndLateMessagesPastTheOriginalTimeout(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1")
	turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: time.Minute, NoWait: true})
	require.NoError(t, err)
	n.send(t, "i", "2")
	n.requireNoTurn(t)
	n.travel(t, 36*time.Second)
	until, err := n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, time.Minute)
	require.NoError(t, err)
	require.GreaterOrEqual(t, until.Sub(turn.LockedUntil), time.Duration(0))
	n.send(t, "i", "3")
	n.travel(t, 36*time.Second)
	n.requireNoTurn(t)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	require.Equal(t, kinds{"2", "3"}, kindsOf(n.takeTurn(t)))
}

// The messages that wait behind the lock must not go on waiting for an end that was moved forward.
func TestRenewOrchestrationItemLock_ShorterThanWhatIsLeft_EndsTheLockSoonerForHeldMessagesToo(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.send(t, "i", "1")
	turn := n.takeTurn(t)
	n.send(t, "i", "2")
	n.requireNoTurn(t)
	until, err := n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, 100*time.Millisecond)
	require.NoError(t, err)
	again, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 5 * time.Second})
	require.NoError(t, err, "the lock ended, and the fetch that waits does not know")
	require.False(t, claimedAt(again.LockedUntil).Before(until))
	require.Equal(t, kinds{"1", "2"}, kindsOf(again))
}

// Tokens that prove nothing

func TestOrchestrationVerbs_StaleToken_LockLostAndNothingWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	turnOf := func(t *testing.T) pgwake.LockToken {
		n.send(t, "i", "1")
		turn := n.takeTurn(t)
		n.send(t, "i", "2")
		n.requireNoTurn(t) // one held message, so that a wrong release would show
		n.send(t, "i", "3")
		return turn.LockToken
	}
	stale := map[string]func(t *testing.T) pgwake.LockToken{
		"acked": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			require.NoError(t, n.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{}))
			return token
		},
		"acked and retaken": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			require.NoError(t, n.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{}))
			n.takeTurn(t)
			return token
		},
		"abandoned": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			require.NoError(t, n.AbandonOrchestrationItem(ctx, token, nil))
			return token
		},
		"expired, nobody retook it": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			n.travel(t, 2*lease)
			return token
		},
		"expired and retaken": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			n.travel(t, 2*lease)
			n.takeTurn(t)
			return token
		},
		"of a work item": func(t *testing.T) pgwake.LockToken {
			turnOf(t)
			n.enqueue(t, "w")
			return n.take(t).LockToken
		},
		"of another instance": func(t *testing.T) pgwake.LockToken {
			token := turnOf(t)
			return token[:36] + "/j"
		},
		"empty":   func(*testing.T) pgwake.LockToken { return "" },
		"garbage": func(*testing.T) pgwake.LockToken { return "garbage/i" },
		"unknown": func(t *testing.T) pgwake.LockToken {
			turnOf(t)
			return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/i"
		},
		"NUL":           func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/i\x00" },
		"invalid UTF-8": func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/\xff" },
	}
	full := pgwake.OrchestrationAck{
		Metadata:  pgwake.Metadata{Name: "flow", Status: pgwake.StatusFailed},
		History:   []pgwake.Event{{ID: 1, Type: "e"}},
		WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "new"}}},
		Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "k"}}},
	}
	verbs := map[string]func(pgwake.LockToken) error{
		"ack": func(token pgwake.LockToken) error { return n.AckOrchestrationItem(ctx, token, full) },
		"empty ack": func(token pgwake.LockToken) error {
			return n.AckOrchestrationItem(ctx, token, pgwake.OrchestrationAck{})
		},
		"abandon": func(token pgwake.LockToken) error { return n.AbandonOrchestrationItem(ctx, token, nil) },
		"abandon it": func(token pgwake.LockToken) error {
			return n.AbandonOrchestrationItem(ctx, token, &pgwake.AbandonOptions{Delay: time.Minute, IgnoreAttempt: true})
		},
		"renew": func(token pgwake.LockToken) error {
			until, err := n.RenewOrchestrationItemLock(ctx, token, lease)
			require.Zero(t, until)
			return err
		},
	}
	for how, token := range stale {
		t.Run(how, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
			old := token(t)
			before := n.content(t)
			for verb, do := range verbs {
				requireError(t, do(old), pgwake.ErrLockLost)
				require.Equal(t, before, n.content(t), verb)
			}
		})
	}
}

// Transactions of the caller

func orchestrationTxCases(ctx context.Context, n *node) map[string]txCase {
	var turn *pgwake.OrchestrationItem
	nothing := func(*testing.T) {}
	oneTaken := func(t *testing.T) {
		n.send(t, "i", "k")
		turn = n.takeTurn(t)
	}
	return map[string]txCase{
		"enqueue": {nothing, func(tx pgx.Tx) error {
			_, err := n.EnqueueForOrchestratorTx(ctx, tx, pgwake.Message{Instance: "i", Kind: "k"}, nil)
			return err
		}, func(t *testing.T) { require.Equal(t, kinds{"k"}, kindsOf(n.takeTurn(t))) }},
		"enqueue many": {nothing, func(tx pgx.Tx) error {
			_, err := n.EnqueueForOrchestratorManyTx(ctx, tx, []pgwake.MessageEnqueue{
				{Message: pgwake.Message{Instance: "i", Kind: "1"}}, {Message: pgwake.Message{Instance: "i", Kind: "2"}}})
			return err
		}, func(t *testing.T) { require.Equal(t, kinds{"1", "2"}, kindsOf(n.takeTurn(t))) }},
		"ack": {oneTaken, func(tx pgx.Tx) error {
			return n.AckOrchestrationItemTx(ctx, tx, turn.LockToken, pgwake.OrchestrationAck{
				Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: 1, Type: "e"}},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w"}}}})
		}, func(t *testing.T) {
			require.Equal(t, map[string]int{"namespaces": 1, "instances": 1, "executions": 1, "history": 1, "worker_queue": 1}, n.rows(t))
			n.exec(t, `TRUNCATE instances, executions, history`)
		}},
		"abandon": {oneTaken, func(tx pgx.Tx) error {
			return n.AbandonOrchestrationItemTx(ctx, tx, turn.LockToken, nil)
		}, func(t *testing.T) { require.Equal(t, 2, n.takeTurn(t).Attempt) }},
		"renew": {oneTaken, func(tx pgx.Tx) error {
			_, err := n.RenewOrchestrationItemLockTx(ctx, tx, turn.LockToken, 3*lease)
			return err
		}, func(t *testing.T) {
			n.travel(t, 2*lease)
			n.requireNoTurn(t)
		}},
	}
}

func TestOrchestrationTx_Committed_TakesEffectAtTheCommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for name, c := range orchestrationTxCases(t.Context(), n) {
		t.Run(name, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
			c.given(t)
			before := n.content(t)
			tx := n.begin(t)
			require.NoError(t, c.verb(tx))
			require.Equal(t, before, n.content(t), "seen before the commit")
			n.requireNoTurn(t) // and nobody waits for the transaction
			require.NoError(t, tx.Commit(t.Context()))
			c.then(t)
		})
	}
}

func TestOrchestrationTx_RolledBack_NeverHappened(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for name, c := range orchestrationTxCases(t.Context(), n) {
		t.Run(name, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
			c.given(t)
			before := n.content(t)
			tx := n.begin(t)
			require.NoError(t, c.verb(tx))
			require.NoError(t, tx.Rollback(t.Context()))
			require.Equal(t, before, n.content(t))
		})
	}
}

func TestOrchestrationTx_LockLost_TransactionIsAborted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for name, verb := range map[string]func(pgx.Tx, pgwake.LockToken) error{
		"ack": func(tx pgx.Tx, token pgwake.LockToken) error {
			return n.AckOrchestrationItemTx(ctx, tx, token, pgwake.OrchestrationAck{})
		},
		"abandon": func(tx pgx.Tx, token pgwake.LockToken) error {
			return n.AbandonOrchestrationItemTx(ctx, tx, token, nil)
		},
		"renew": func(tx pgx.Tx, token pgwake.LockToken) error {
			_, err := n.RenewOrchestrationItemLockTx(ctx, tx, token, 0)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			n.send(t, name, "k")
			turn := n.takeTurn(t)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{})
			tx := n.begin(t)
			_, err := n.EnqueueForOrchestratorTx(ctx, tx, pgwake.Message{Instance: "i", Kind: "never"}, nil)
			require.NoError(t, err)
			requireError(t, verb(tx, turn.LockToken), pgwake.ErrLockLost)
			require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxCommitRollback)
			n.requireNoTurn(t)
		})
	}
}

// A model of one instance

type modelMessage struct {
	id      int64
	kind    pgwake.MessageKind
	visible time.Duration
	attempt int
	inTurn  bool
}

// turnModel is one instance and its messages as the specification has it, in memory, on a clock that travel
// moves.
type turnModel struct {
	clock    time.Duration
	messages []*modelMessage
	token    pgwake.LockToken
	locked   time.Duration // until when
	history  []string
	work     int
	known    bool
}

func (m *turnModel) isLocked() bool { return m.token != "" && m.locked > m.clock }

// due returns the messages that the next turn would have.
func (m *turnModel) due() (due []*modelMessage) {
	if m.isLocked() {
		return nil
	}
	for _, x := range m.messages {
		if x.visible <= m.clock {
			due = append(due, x)
		}
	}
	return due
}

// Whatever is done to an instance, in whatever order, with good tokens and with old ones: the turns, their
// messages, the attempts, the history and what an ack enqueues are those of the model.
func TestInstance_RandomOperations_MatchTheModel(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	rapid.Check(t, func(t *rapid.T) {
		n.exec(t, `WITH w AS (DELETE FROM worker_queue), o AS (DELETE FROM orchestrator_queue), l AS (DELETE FROM instance_locks),
		                h AS (DELETE FROM history) DELETE FROM instances`)
		m := &turnModel{}
		var tokens []pgwake.LockToken
		serial := 0
		drawMessage := func(t *rapid.T) (pgwake.MessageEnqueue, *modelMessage) {
			serial++
			e := pgwake.MessageEnqueue{Message: pgwake.Message{Instance: "i", Kind: pgwake.MessageKind(strconv.Itoa(serial))}}
			e.Delay = time.Duration(rapid.IntRange(0, 2).Draw(t, "delay")) * time.Hour
			e.Priority = rapid.IntRange(0, 9).Draw(t, "priority")
			return e, &modelMessage{kind: e.Kind, visible: m.clock + e.Delay}
		}
		token := func(t *rapid.T) (token pgwake.LockToken, holds bool) {
			if len(tokens) == 0 {
				t.Skip("no turn was taken yet")
			}
			token = rapid.SampledFrom(tokens).Draw(t, "token")
			return token, token == m.token && m.isLocked()
		}
		requireHeld := func(t *rapid.T, holds bool, err error) bool {
			if !holds {
				requireError(t, err, pgwake.ErrLockLost)
				return false
			}
			require.NoError(t, err)
			return true
		}
		fetch := func(t *rapid.T) {
			m.clock++
			const hold = 90 * time.Minute
			turn, err := n.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{LockTimeout: hold, NoWait: true})
			want := m.due()
			if len(want) == 0 {
				requireError(t, err, pgwake.ErrNoWork)
				require.Nil(t, turn)
				return
			}
			require.NoError(t, err)
			m.token, m.locked = turn.LockToken, m.clock+hold
			require.NotContains(t, tokens, m.token)
			tokens = append(tokens, m.token)
			for _, x := range m.messages {
				x.inTurn = false
			}
			var wantKinds, got kinds
			most := 0
			for _, x := range want {
				x.attempt++
				x.inTurn, x.visible = true, m.locked
				wantKinds = append(wantKinds, x.kind)
				most = max(most, x.attempt)
			}
			for i, c := range turn.Messages {
				got = append(got, c.Kind)
				require.Equal(t, want[min(i, len(want)-1)].attempt, c.Attempt, "attempt of message %s", c.Kind)
			}
			require.Equal(t, wantKinds, got)
			require.Equal(t, most, turn.Attempt)
			require.Equal(t, m.history, eventsOfOrNil(turn.History))
		}
		t.Repeat(map[string]func(*rapid.T){
			"send": func(t *rapid.T) {
				m.clock++
				e, x := drawMessage(t)
				added, err := n.EnqueueForOrchestrator(ctx, e.Message, &e.EnqueueOptions)
				require.NoError(t, err)
				x.id = added.ID
				m.messages = append(m.messages, x)
			},
			"fetch":       fetch,
			"fetch again": fetch, // twice as often
			"ack": func(t *rapid.T) {
				m.clock++
				token, holds := token(t)
				ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}
				var sent []*modelMessage
				for range rapid.IntRange(0, 2).Draw(t, "messages") {
					e, x := drawMessage(t)
					ack.Messages, sent = append(ack.Messages, e), append(sent, x)
				}
				for range rapid.IntRange(0, 2).Draw(t, "work items") {
					ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "w"}})
				}
				next := int64(len(m.history)) + 1
				for i := range rapid.Int64Range(0, 2).Draw(t, "events") {
					ack.History = append(ack.History, pgwake.Event{ID: next + i, Type: "e"})
				}
				duplicate := len(m.history) > 0 && rapid.IntRange(0, 4).Draw(t, "duplicate") == 0
				if duplicate {
					ack.History = append(ack.History, pgwake.Event{ID: rapid.Int64Range(1, next-1).Draw(t, "id"), Type: "again"})
				}
				err := n.AckOrchestrationItem(ctx, token, ack)
				if holds && duplicate {
					requireError(t, err, pgwake.ErrDuplicateEvent)
					return
				}
				if !requireHeld(t, holds, err) {
					return
				}
				m.token, m.known = "", true
				m.messages = slices.DeleteFunc(m.messages, func(x *modelMessage) bool { return x.inTurn })
				m.messages = append(m.messages, sent...)
				m.history = append(m.history, eventsOf(ack.History)...)
				m.work += len(ack.WorkItems)
			},
			"abandon": func(t *rapid.T) {
				m.clock++
				token, holds := token(t)
				o := &pgwake.AbandonOptions{
					Delay:         time.Duration(rapid.IntRange(0, 2).Draw(t, "delay")) * time.Hour,
					IgnoreAttempt: rapid.Bool().Draw(t, "ignore attempt"),
				}
				if !requireHeld(t, holds, n.AbandonOrchestrationItem(ctx, token, o)) {
					return
				}
				m.token = ""
				for _, x := range m.messages {
					if x.inTurn {
						x.inTurn, x.visible = false, m.clock+o.Delay
						if o.IgnoreAttempt {
							x.attempt = max(x.attempt-1, 0)
						}
					}
				}
			},
			"renew": func(t *rapid.T) {
				m.clock++
				token, holds := token(t)
				extend := time.Duration(rapid.IntRange(1, 3).Draw(t, "extend")) * time.Hour
				_, err := n.RenewOrchestrationItemLock(ctx, token, extend)
				if !requireHeld(t, holds, err) {
					return
				}
				m.locked = m.clock + extend
				for _, x := range m.messages {
					if x.inTurn {
						x.visible = m.locked
					}
				}
			},
			"travel": func(t *rapid.T) {
				d := time.Duration(rapid.IntRange(1, 3).Draw(t, "hours"))*time.Hour + 15*time.Minute
				n.travel(t, d)
				m.clock += d
			},
			"": func(t *rapid.T) {
				rows := query[[]int](t, n, `SELECT ARRAY[(SELECT count(*) FROM orchestrator_queue), (SELECT count(*) FROM history),
					(SELECT count(*) FROM worker_queue), (SELECT count(*) FROM instances)]`)[0]
				require.Equal(t, len(m.messages), rows[0], "messages")
				require.Equal(t, len(m.history), rows[1], "events")
				require.Equal(t, m.work, rows[2], "work items")
				require.Equal(t, m.known, rows[3] == 1, "instance")
			},
		})
	})
}

func eventsOfOrNil(history []pgwake.Event) []string {
	if len(history) == 0 {
		return nil
	}
	return eventsOf(history)
}

// A fetch may find a message due, and by the time it has the lock another fetch had the turn and gave it
// back, or acknowledged it. Then there is nothing to take, and no lock to leave behind.
func TestFetchOrchestrationItem_RacesWithOthersThatGiveBack_TurnIsNeverEmpty(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	a.send(t, "i", "k")
	a.send(t, "j", "k")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			n := []*node{a, b}[g%2]
			o := &pgwake.FetchOptions{LockTimeout: lease, NoWait: true}
			if g%4 < 2 {
				o.Namespaces = []string{"default"}
			}
			for range testsize.Of(75, 150) {
				turn, err := n.FetchOrchestrationItem(t.Context(), o)
				if errors.Is(err, pgwake.ErrNoWork) {
					continue
				}
				if err == nil && len(turn.Messages) != 1 {
					err = fmt.Errorf("a turn of %d messages", len(turn.Messages))
				}
				if err == nil {
					err = n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true})
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.NotContains(t, a.rows(t), "instance_locks", "a lock without a turn")
	require.Equal(t, 1, a.takeTurn(t).Attempt)
	require.Equal(t, 1, a.takeTurn(t).Attempt)
}

// A circle of parents would have no root, and bulk deletion would never find it.
func TestAck_ParentThatIsADescendant_IsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	child := func(instance, parent string) error {
		n.send(t, instance, "k")
		turn := n.takeTurn(t)
		err := n.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Parent: parent}})
		if err != nil {
			require.NoError(t, n.AbandonOrchestrationItem(tctx, turn.LockToken, &pgwake.AbandonOptions{Delay: lease}))
		}
		return err
	}
	require.NoError(t, child("a", ""))
	require.NoError(t, child("b", "a"))
	require.NoError(t, child("c", "b"))
	require.NoError(t, child("c", "b"), "again")
	requireError(t, child("a", "c"), pgwake.ErrInvalid)
	requireError(t, child("b", "b"), pgwake.ErrInvalid)
	requireError(t, child("new", "new"), pgwake.ErrInvalid)
	require.NoError(t, child("other", "nobody knows it"))
	require.NoError(t, child("c", "a"), "it moves")
}

// A query gives up after it has moved many messages of locked instances out of the way; a fetch does not.
func TestFetchOrchestrationItem_ManyLockedInstancesInFront_FindsTheFreeOne(t *testing.T) {
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO instance_locks (instance_id, lock_token, locked_until)
		SELECT 'locked' || i, gen_random_uuid(), clock_timestamp() + '1 hour' FROM generate_series(1, 2500) i`)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind) SELECT 'locked' || i, 'poke' FROM generate_series(1, 2500) i`)
	n.send(t, "free", "poke")
	item, err := n.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Equal(t, "free", item.Instance)
}

// A fetch that began before the release of a lock may meet what was not held behind it first. What was held is older, and
// comes in the same turn.
func TestFetchOrchestrationItem_LockIsReleasedMeanwhile_WhatWasHeldComesFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.start(t, "busy")
	n.send(t, "i", "of the turn")
	turn := n.takeTurn(t)
	n.send(t, "busy", "of the turn")
	n.takeTurn(t)
	n.send(t, "i", "held")
	n.requireNoTurn(t)
	n.send(t, "busy", "in the way")
	n.send(t, "i", "not held")

	tx := n.begin(t)
	_, err := tx.Exec(tctx, `SELECT FROM orchestrator_queue WHERE kind = 'in the way' FOR UPDATE`)
	require.NoError(t, err)
	next := make(chan *pgwake.OrchestrationItem, 1)
	go func() {
		turn, _ := n.FetchOrchestrationItem(tctx, now)
		next <- turn
	}()
	n.awaitBlocked(t, 1) // it has begun, and is to hold what is in the way
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	require.NoError(t, tx.Rollback(tctx))
	require.Equal(t, []pgwake.MessageKind{"held", "not held"}, kindsOf(<-next))
}

// A turn of many messages takes the server long, and it sends nothing until it has all: it is at work, and says so when it is asked.
func TestFetchOrchestrationItem_ServerIsLongAtWork_IsClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.slowTurns(t, "pg_sleep(6.5)")
	n.send(t, "i", "1")
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, kinds{"1"}, kindsOf(turn))
	require.Equal(t, 1, turn.Attempt, "it was not given back meanwhile")
}

// The server does not show what a session does that is of another role, or has track_activities off. That it is in a transaction, and waits for
// nobody, is known of all.
func TestFetchOrchestrationItem_ServerHidesWhatItDoes_IsClaimedIfItIsLongAtWork(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	hidden := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["track_activities"] = "off" }), nil)
	n.slowTurns(t, "pg_sleep(CASE WHEN NEW.kind = '1' THEN 6.5 ELSE 0 END), pg_catalog.pg_advisory_xact_lock(7)")
	n.send(t, "i", "1")
	turn, err := hidden.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, kinds{"1"}, kindsOf(turn))
	require.Equal(t, 1, turn.Attempt, "it was not given back meanwhile")

	n.send(t, "j", "2")
	inTheWay := n.begin(t)
	_, err = inTheWay.Exec(t.Context(), `SELECT pg_advisory_xact_lock(7)`)
	require.NoError(t, err)
	_, err = hidden.FetchOrchestrationItem(t.Context(), soon)
	require.ErrorContains(t, err, "no connection of the pool answered within 5s", "it waits for a session")
	require.NoError(t, inTheWay.Rollback(t.Context()))
}

// The history is read by a statement of its own where some of it may be known.
func TestFetchOrchestrationItem_ServerIsLongAtTheHistory_IsClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	turn := n.turnOf(t, "i")
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, flow(event(1, `1`))))
	cold, _ := n.caching(t, pgwake.Config{})
	n.exec(t, `ALTER FUNCTION resume_history RENAME TO fast_by_test`)
	n.exec(t, `CREATE FUNCTION resume_history(text, bigint, bigint) RETURNS TABLE (event_id bigint, type text, data json, created_at timestamptz,
			event_count bigint, started_at timestamptz, appended_at timestamptz)
		LANGUAGE plpgsql SET search_path FROM CURRENT AS $$ BEGIN PERFORM pg_catalog.pg_sleep(6.5); RETURN QUERY SELECT * FROM fast_by_test($1, $2, $3); END $$`)
	n.send(t, "i", "2")
	turn, err := cold.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Len(t, turn.History, 1)
	require.Equal(t, 1, turn.Attempt, "it was not given back meanwhile")
}

// One that waits for another session is not at work: whatever that does, the next claim may do without.
func TestFetchOrchestrationItem_ServerWaitsForAnother_IsGivenUp(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.slowTurns(t, "pg_advisory_xact_lock(7)")
	n.send(t, "i", "1")
	inTheWay := n.begin(t)
	_, err := inTheWay.Exec(t.Context(), `SELECT pg_advisory_xact_lock(7)`)
	require.NoError(t, err)
	_, err = n.FetchOrchestrationItem(t.Context(), soon)
	require.ErrorContains(t, err, "no connection of the pool answered within 5s")
	require.NoError(t, inTheWay.Rollback(t.Context()))
	turn, err := n.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "i", turn.Instance)
}

// slowTurns has each claim of a turn do this as well.
func (n *node) slowTurns(tb testing.TB, what string) {
	tb.Helper()
	n.exec(tb, `CREATE FUNCTION slow_by_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.`+what+`; RETURN NULL; END $$`)
	n.exec(tb, `CREATE TRIGGER slow_by_test AFTER UPDATE ON orchestrator_queue FOR EACH ROW EXECUTE FUNCTION slow_by_test()`)
}
