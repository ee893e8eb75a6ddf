package pgwake_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: do acks that share a commit do what single ones do?

func TestAckBatched_ManyAtOnce_EachDoesItsOwn(t *testing.T) {
	t.Parallel()
	const count = 300
	n := newNode(t, nil)
	n.start(t, "known")
	var batch []pgwake.WorkEnqueue
	for i := range count {
		batch = append(batch, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: strconv.Itoa(i)}})
	}
	_, err := n.EnqueueForWorkerMany(tctx, batch)
	require.NoError(t, err)
	items, err := n.FetchWorkItems(tctx, count, &pgwake.FetchOptions{LockTimeout: lease})
	require.NoError(t, err)
	require.Len(t, items, count)
	gone := make(map[string]bool)
	for i, item := range items { // every third was lost
		if i%3 == 0 {
			require.NoError(t, n.AbandonWorkItem(tctx, item.LockToken, nil))
			gone[item.Name] = true
		}
	}

	var wg sync.WaitGroup
	errs := make([]error, count)
	for i, item := range items {
		wg.Go(func() {
			var completion *pgwake.Message
			if i%2 == 0 {
				completion = &pgwake.Message{Instance: "known", Kind: "done", Data: []byte(item.Name)}
			}
			errs[i] = n.AckBatched(tctx, item.LockToken, completion)
		})
	}
	wg.Wait()
	completions := make(map[string]bool)
	for i, item := range items {
		if gone[item.Name] {
			requireError(t, errs[i], pgwake.ErrLockLost)
			continue
		}
		require.NoError(t, errs[i])
		if i%2 == 0 {
			completions[item.Name] = true
		}
	}
	left := make(map[string]bool)
	for _, name := range query[string](t, n, `SELECT name FROM worker_queue`) {
		left[name] = true
	}
	require.Equal(t, gone, left)
	turn := n.takeTurn(t)
	sent := make(map[string]bool)
	for _, m := range turn.Messages {
		sent[string(m.Data)] = true
	}
	require.Equal(t, completions, sent)
	require.Len(t, turn.Messages, len(completions))
}

// What the server refuses, for reasons that nobody can foresee, hits whom it is about, even in a group.
func TestAckBatched_ServerRefusesOne_TheOthersAreDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "orchestrator_queue", `instance_id = 'refused'`)
	n.enqueue(t, "first", "good", "bad", "better")
	first, good, bad, better := n.take(t), n.take(t), n.take(t), n.take(t)

	// While the first is held up, the others gather.
	tx := n.begin(t)
	_, err := tx.Exec(tctx, `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, first.ID)
	require.NoError(t, err)
	var wg sync.WaitGroup
	ack := func(item *pgwake.ClaimedWorkItem, instance string, check func(error)) {
		wg.Go(func() {
			check(n.AckBatched(tctx, item.LockToken, &pgwake.Message{Instance: instance, Kind: "done"}))
		})
	}
	fine := func(err error) { require.NoError(t, err) }
	ack(first, "i", fine)
	n.awaitBlocked(t, 1)
	ack(good, "i", fine)
	ack(bad, "refused", func(err error) {
		require.ErrorContains(t, err, "refused_by_test")
	})
	ack(better, "i", fine)
	require.NoError(t, tx.Rollback(tctx))
	wg.Wait()
	require.Equal(t, []string{"bad"}, query[string](t, n, `SELECT name FROM worker_queue`))
	require.Len(t, n.takeTurn(t).Messages, 3)
}

func TestAckBatched_Completion_WakesWhoeverWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.another(t)
	n.start(t, "i")
	for _, waiter := range []*node{n, other} {
		n.enqueue(t, "work")
		item := n.take(t)
		back := make(chan error, 1)
		go func() {
			turn, err := waiter.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: lease})
			if err == nil {
				err = waiter.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{})
			}
			back <- err
		}()
		require.Eventually(t, func() bool { return waiter.Stats().Orchestrator.Parked == 1 }, patience, time.Millisecond)
		require.NoError(t, n.AckBatched(tctx, item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
		require.NoError(t, <-back)
	}
}

func TestAckBatched_Close_WaitsForWhatIsOnItsWay(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	closing := n.another(t)
	n.enqueue(t, "1", "2")
	items := []*pgwake.ClaimedWorkItem{n.take(t), n.take(t)}
	tx := n.begin(t)
	_, err := tx.Exec(tctx, `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, items[0].ID)
	require.NoError(t, err)
	acked := make(chan error, len(items))
	go func() { acked <- closing.AckBatched(tctx, items[0].LockToken, nil) }()
	n.awaitBlocked(t, 1)
	closed := make(chan error, 1)
	go func() { closed <- closing.Close(context.Background()) }()
	require.Eventually(t, func() bool {
		_, err := closing.ReadHistory(tctx, "i")
		return errors.Is(err, pgwake.ErrClosed)
	}, patience, time.Millisecond)
	requireError(t, closing.AckBatched(tctx, items[1].LockToken, nil), pgwake.ErrClosed)
	require.Empty(t, closed)
	require.NoError(t, tx.Rollback(tctx))
	require.NoError(t, <-acked)
	require.NoError(t, <-closed)
	require.Equal(t, []string{"2"}, query[string](t, n, `SELECT name FROM worker_queue`))
}

func TestAckBatched_BadInput_IsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "work")
	item := n.take(t)
	requireError(t, n.AckBatched(tctx, "nonsense", nil), pgwake.ErrLockLost)
	requireError(t, n.AckBatched(tctx, item.LockToken, &pgwake.Message{Instance: "i"}), pgwake.ErrInvalid)
	cancelled, cancel := context.WithCancel(tctx)
	cancel()
	require.ErrorIs(t, n.AckBatched(cancelled, item.LockToken, nil), context.Canceled)
	require.NoError(t, n.AckBatched(tctx, item.LockToken, nil))
	requireError(t, n.AckBatched(tctx, item.LockToken, nil), pgwake.ErrLockLost)
}

// The role's default isolation level does not matter.
func TestAckBatched_OtherIsolationLevel_DoesTheSame(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	strict := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["default_transaction_isolation"] = "serializable" }), nil)
	n.enqueue(t, "kept", "lost")
	kept, lost := n.take(t), n.take(t)
	require.NoError(t, n.AbandonWorkItem(tctx, lost.LockToken, &pgwake.AbandonOptions{Delay: lease}))
	require.NoError(t, strict.AckBatched(tctx, kept.LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
	requireError(t, strict.AckBatched(tctx, lost.LockToken, nil), pgwake.ErrLockLost)
	require.Equal(t, map[string]int{"worker_queue": 1, "orchestrator_queue": 1, "namespaces": 1}, n.rows(t))
}
