package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// This file answers: are instances listed as they are, and is what is deleted gone for good, whoever works on it
// at that moment?

var force = &pgwake.DeleteOptions{Force: true}

// run gives an instance a turn of one execution that ends with the status.
func (n *node) run(tb tester, instance string, execution int64, status pgwake.Status) {
	tb.Helper()
	kind := pgwake.MessageStart
	if execution > 1 {
		kind = pgwake.MessageContinueAsNew
	}
	n.sendWith(tb, pgwake.Message{Instance: instance, Kind: kind, Name: "flow", ExecutionID: execution}, nil)
	turn := n.takeTurn(tb)
	require.Equal(tb, instance, turn.Instance)
	n.ackTurn(tb, turn, pgwake.OrchestrationAck{
		ExecutionID: execution,
		History:     []pgwake.Event{{ID: 1, Type: "started"}, {ID: 2, Type: "ended"}},
		Metadata:    pgwake.Metadata{Name: "flow", Version: "1.0.0", Status: status, Output: "out"},
	})
}

func (n *node) complete(tb tester, instances ...string) {
	tb.Helper()
	for _, instance := range instances {
		n.run(tb, instance, 1, pgwake.StatusCompleted)
	}
}

// adopt makes an instance the parent of others.
func (n *node) adopt(tb tester, parent string, children ...string) {
	tb.Helper()
	require.EqualValues(tb, len(children), n.exec(tb, `UPDATE instances SET parent_id = $1 WHERE instance_id = ANY ($2)`, parent, children))
}

// instances returns the ids of all instances.
func (n *node) instances(tb tester) []string {
	tb.Helper()
	return query[string](tb, n, `SELECT instance_id FROM instances ORDER BY instance_id`)
}

// populate makes many instances that ended, one second after the other, with an event each.
func (n *node) populate(tb tester, count int) {
	tb.Helper()
	n.exec(tb, `INSERT INTO instances (instance_id, namespace, name) SELECT 'i' || lpad(g::text, 6, '0'), 'default', 'flow' FROM generate_series(1, $1) g`, count)
	n.exec(tb, `INSERT INTO executions (instance_id, execution_id, status, completed_at)
		SELECT instance_id, 1, 'Completed', now() - interval '1 year' + interval '1 second' * row_number() OVER (ORDER BY instance_id) FROM instances`)
	n.exec(tb, `INSERT INTO history (instance_id, execution_id, event_id, type) SELECT instance_id, 1, 1, 'started' FROM instances`)
}

func idsOf(infos []pgwake.InstanceInfo) []string {
	ids := make([]string, len(infos))
	for i, info := range infos {
		ids[i] = info.Instance
	}
	return ids
}

func TestListInstances_Filters_AreAllApplied(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "a", "c")
	n.run(t, "b", 1, pgwake.StatusFailed)
	n.start(t, "d")
	n.exec(t, `UPDATE instances SET namespace = 'blue', queue = 'gpu' WHERE instance_id IN ('c', 'd')`)
	n.exec(t, `UPDATE instances SET name = 'other' WHERE instance_id = 'c'`)
	for _, tt := range []struct {
		o    *pgwake.ListOptions
		want []string
	}{
		{nil, []string{"a", "b", "c", "d"}},
		{&pgwake.ListOptions{After: "b"}, []string{"c", "d"}},
		{&pgwake.ListOptions{After: "bb", Limit: 1}, []string{"c"}},
		{&pgwake.ListOptions{Status: pgwake.StatusCompleted}, []string{"a", "c"}},
		{&pgwake.ListOptions{Status: pgwake.StatusCompleted, After: "a"}, []string{"c"}},
		{&pgwake.ListOptions{Status: pgwake.StatusCompleted, Limit: 1}, []string{"a"}},
		{&pgwake.ListOptions{Status: pgwake.StatusRunning}, []string{"d"}},
		{&pgwake.ListOptions{Status: pgwake.StatusCancelled}, []string{}},
		{&pgwake.ListOptions{Namespace: "blue"}, []string{"c", "d"}},
		{&pgwake.ListOptions{Queue: "gpu", Name: "other"}, []string{"c"}},
		{&pgwake.ListOptions{Queue: "gpu", Status: pgwake.StatusRunning, Namespace: "blue", Name: "flow"}, []string{"d"}},
		{&pgwake.ListOptions{Name: "nobody"}, []string{}},
	} {
		infos, err := n.ListInstances(t.Context(), tt.o)
		require.NoError(t, err)
		require.Equal(t, tt.want, idsOf(infos), "%+v", tt.o)
	}
}

func TestListInstances_PageAfterPage_EachInstanceOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.populate(t, 250)
	for _, status := range []pgwake.Status{"", pgwake.StatusCompleted} {
		var seen, sizes = []string{}, []int{}
		o := pgwake.ListOptions{Status: status}
		for len(sizes) == 0 || sizes[len(sizes)-1] == 100 {
			page, err := n.ListInstances(t.Context(), &o)
			require.NoError(t, err)
			sizes = append(sizes, len(page))
			seen = append(seen, idsOf(page)...)
			o.After = seen[len(seen)-1]
		}
		require.Equal(t, []int{100, 100, 50}, sizes)
		require.Equal(t, n.instances(t), seen)
	}
}

func TestGetInstanceInfo_EveryField_IsWhatIsStored(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.run(t, "i", 1, pgwake.StatusContinuedAsNew)
	n.run(t, "i", 2, pgwake.StatusCompleted)
	n.exec(t, `UPDATE instances SET queue = 'gpu', parent_id = 'p', attributes = '{"a": 1}', custom_status = 'half', custom_status_version = 3`)
	n.exec(t, `UPDATE executions SET pin = 1 + (3::bigint << 40) + (2 << 20) + 1 WHERE execution_id = 2`)
	info, err := n.GetInstanceInfo(t.Context(), "i")
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), info.CreatedAt, patience)
	require.True(t, info.UpdatedAt.After(info.CreatedAt))
	info.CreatedAt, info.UpdatedAt = time.Time{}, time.Time{}
	require.Equal(t, &pgwake.InstanceInfo{
		Instance: "i", Namespace: "default", Name: "flow", Version: "1.0.0", Queue: "gpu", Parent: "p", Attributes: []byte(`{"a": 1}`),
		ExecutionID: 2, Status: pgwake.StatusCompleted, Output: "out", PinnedVersion: &pgwake.Version{Major: 3, Minor: 2, Patch: 1},
		CustomStatus: "half", CustomStatusVersion: 3,
	}, info)
}

func TestGetInstanceInfo_OnlyEnqueued_NotFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	info, err := n.GetInstanceInfo(t.Context(), "i")
	requireError(t, err, pgwake.ErrNotFound)
	require.Nil(t, info)
}

func TestListExecutions_SeveralExecutions_EachWithItsOutcome(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.run(t, "i", 1, pgwake.StatusContinuedAsNew)
	n.run(t, "i", 2, pgwake.StatusRunning)
	executions, err := n.ListExecutions(t.Context(), "i")
	require.NoError(t, err)
	require.Len(t, executions, 2)
	for i, x := range executions {
		require.Equal(t, "i", x.Instance)
		require.EqualValues(t, i+1, x.ExecutionID)
		require.EqualValues(t, 2, x.Events)
		require.WithinDuration(t, time.Now(), x.StartedAt, patience)
		one, err := n.GetExecutionInfo(t.Context(), "i", x.ExecutionID)
		require.NoError(t, err)
		require.Equal(t, x, *one)
	}
	require.Equal(t, pgwake.StatusContinuedAsNew, executions[0].Status)
	require.False(t, executions[0].CompletedAt.Before(executions[0].StartedAt))
	require.Equal(t, pgwake.StatusRunning, executions[1].Status)
	require.Zero(t, executions[1].CompletedAt)

	executions, err = n.ListExecutions(t.Context(), "unknown")
	require.NoError(t, err)
	require.Empty(t, executions)
	_, err = n.GetExecutionInfo(t.Context(), "i", 3)
	requireError(t, err, pgwake.ErrNotFound)
	_, err = n.GetExecutionInfo(t.Context(), "unknown", 1)
	requireError(t, err, pgwake.ErrNotFound)
}

// family makes root, its children a and b, and aa, the child of a. All have ended.
func family(t *testing.T) *node {
	t.Helper()
	n := newNode(t, nil)
	n.complete(t, "root", "b", "a", "aa")
	n.adopt(t, "root", "a", "b")
	n.adopt(t, "a", "aa")
	return n
}

func TestInstanceTree_ThreeLevels_SeenFromEveryLevel(t *testing.T) {
	t.Parallel()
	n := family(t)
	for _, tt := range []struct {
		instance, parent string
		children, tree   []string
	}{
		{"root", "", []string{"a", "b"}, []string{"root", "a", "b", "aa"}},
		{"a", "root", []string{"aa"}, []string{"a", "aa"}},
		{"b", "root", []string{}, []string{"b"}},
		{"aa", "a", []string{}, []string{"aa"}},
	} {
		parent, err := n.GetParent(t.Context(), tt.instance)
		require.NoError(t, err)
		require.Equal(t, tt.parent, parent)
		children, err := n.ListChildren(t.Context(), tt.instance)
		require.NoError(t, err)
		require.Equal(t, tt.children, children)
		tree, err := n.GetInstanceTree(t.Context(), tt.instance)
		require.NoError(t, err)
		require.Equal(t, tt.tree, tree)
	}
	_, err := n.GetParent(t.Context(), "unknown")
	requireError(t, err, pgwake.ErrNotFound)
	_, err = n.GetInstanceTree(t.Context(), "unknown")
	requireError(t, err, pgwake.ErrNotFound)
	children, err := n.ListChildren(t.Context(), "unknown")
	require.NoError(t, err)
	require.Empty(t, children)
}

func TestInstanceTree_ParentsGoRoundInACircle_ItEndsAndCanBeDeleted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "a", "b")
	n.adopt(t, "a", "b")
	n.adopt(t, "b", "a")
	tree, err := n.GetInstanceTree(t.Context(), "b")
	require.NoError(t, err)
	require.Equal(t, []string{"b", "a"}, tree)
	deleted, err := n.DeleteInstance(t.Context(), "b", nil)
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted.Instances)
}

func TestDeleteInstance_Ended_NothingOfItIsLeftAndTheIDIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "other")
	before := n.content(t)
	for _, status := range []pgwake.Status{pgwake.StatusCompleted, pgwake.StatusFailed, pgwake.StatusCancelled} {
		n.run(t, "i", 1, pgwake.StatusContinuedAsNew)
		n.run(t, "i", 2, status)
		n.send(t, "i", "late")
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Instance: "i"}, nil)
		require.NoError(t, err)
		n.exec(t, `INSERT INTO kv_store VALUES ('i', 'k', 'v', 1)`)
		n.exec(t, `INSERT INTO kv_delta VALUES ('i', 'k', NULL, 2)`)
		n.exec(t, `INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, instance_id, enqueued_at, reason)
			VALUES ('worker', 1, 'default', 0, 1, 'i', now(), 'test')`)
		n.exec(t, `INSERT INTO instance_locks VALUES ('i', gen_random_uuid(), now() - interval '1 hour')`)

		deleted, err := n.DeleteInstance(t.Context(), "i", nil)
		require.NoError(t, err, status)
		require.Equal(t, pgwake.Deleted{Instances: 1, Executions: 2, Events: 4, QueueItems: 2}, deleted)
		require.Equal(t, before, n.content(t))
	}
	n.start(t, "i")
	history, err := n.ReadHistory(t.Context(), "i")
	require.NoError(t, err)
	require.Empty(t, history)
}

func TestDeleteInstance_RunningWithoutForce_IsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	before := n.content(t)
	deleted, err := n.DeleteInstance(t.Context(), "i", nil)
	require.ErrorContains(t, err, "running")
	require.False(t, requireError(t, err, pgwake.ErrInstanceRunning).Retryable)
	require.Zero(t, deleted)
	require.Equal(t, before, n.content(t))

	deleted, err = n.DeleteInstance(t.Context(), "i", force)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted.Instances)
	require.Empty(t, n.instances(t))
}

func TestDeleteInstance_Refused_DoesNotWaitForTheTurnInProgress(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken, pgwake.OrchestrationAck{}))
	_, err := n.DeleteInstance(t.Context(), "i", nil)
	requireError(t, err, pgwake.ErrInstanceRunning)
}

func TestDeleteInstance_CurrentExecutionDoesNotExistYet_IsRunning(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "i")
	n.exec(t, `UPDATE instances SET current_execution = 2`)
	info, err := n.GetInstanceInfo(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, pgwake.StatusRunning, info.Status)
	_, err = n.DeleteInstance(t.Context(), "i", nil)
	requireError(t, err, pgwake.ErrInstanceRunning)
}

func TestDeleteInstance_Unknown_NotFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	before := n.content(t)
	_, err := n.DeleteInstance(t.Context(), "i", force)
	require.False(t, requireError(t, err, pgwake.ErrNotFound).Retryable)
	require.Equal(t, before, n.content(t))
}

func TestDeleteInstance_Child_IsRefusedEvenForcedAndTheRootTakesItAlong(t *testing.T) {
	t.Parallel()
	n := family(t)
	n.complete(t, "stranger")
	for _, child := range []string{"a", "b", "aa"} {
		_, err := n.DeleteInstance(t.Context(), child, force)
		requireError(t, err, pgwake.ErrHasParent)
	}
	n.exec(t, `INSERT INTO kv_store VALUES ('aa', 'k', 'v', 1)`)
	deleted, err := n.DeleteInstance(t.Context(), "root", nil)
	require.NoError(t, err)
	require.Equal(t, pgwake.Deleted{Instances: 4, Executions: 4, Events: 8}, deleted)
	require.Equal(t, []string{"stranger"}, n.instances(t))
	require.Empty(t, n.content(t)["kv_store"])
}

func TestDeleteInstance_DescendantIsRunning_NeedsForce(t *testing.T) {
	t.Parallel()
	n := family(t)
	n.run(t, "aa", 2, pgwake.StatusRunning)
	_, err := n.DeleteInstance(t.Context(), "root", nil)
	requireError(t, err, pgwake.ErrInstanceRunning)
	require.Len(t, n.instances(t), 4)
	deleted, err := n.DeleteInstance(t.Context(), "root", force)
	require.NoError(t, err)
	require.EqualValues(t, 4, deleted.Instances)
}

// Its parent was deleted before its own first ack: otherwise nobody could ever delete it.
func TestDeleteInstance_ParentIsGone_IsARoot(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "one", "all")
	n.adopt(t, "gone", "one", "all")
	deleted, err := n.DeleteInstance(t.Context(), "one", nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted.Instances)
	deleted, err = n.DeleteInstancesBulk(t.Context(), nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, deleted.Instances)
}

func TestDeleteInstance_TurnInProgress_ItsTokenCanDoNothingAnyMore(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	_, err := n.DeleteInstance(t.Context(), "i", force)
	require.NoError(t, err)
	empty := n.content(t)
	require.Len(t, empty, 1, "namespaces")

	err = n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{
		History:  []pgwake.Event{{ID: 9, Type: "zombie"}},
		Metadata: pgwake.Metadata{Name: "zombie"},
		Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "k"}}},
	})
	requireError(t, err, pgwake.ErrLockLost)
	_, err = n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, lease)
	requireError(t, err, pgwake.ErrLockLost)
	requireError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil), pgwake.ErrLockLost)
	require.Equal(t, empty, n.content(t))

	n.start(t, "i") // not held back by the lease of the turn
	requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{}), pgwake.ErrLockLost)
}

func TestDeleteInstance_WorkItemIsClaimed_ItsTokenCanDoNothingAnyMore(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Instance: "i", ExecutionID: 1, ActivityID: 1}, nil)
	require.NoError(t, err)
	n.enqueue(t, "stranger")
	item := n.take(t)
	_, err = n.DeleteInstance(t.Context(), "i", force)
	require.NoError(t, err)
	n.start(t, "i")

	done := &pgwake.Message{Instance: "i", Kind: "done"}
	requireError(t, n.AckWorkItem(t.Context(), item.LockToken, done), pgwake.ErrLockLost)
	requireError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
	_, err = n.RenewWorkItemLock(t.Context(), item.LockToken, lease)
	requireError(t, err, pgwake.ErrLockLost)
	n.requireNoTurn(t)
	require.Equal(t, []string{"stranger"}, n.takeAll(t))
}

func TestDeleteInstance_AckIsUnderWay_WaitsAndDeletesWhatItWrote(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken, pgwake.OrchestrationAck{
		History:   []pgwake.Event{{ID: 1, Type: "e"}},
		WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w", Instance: "i", ExecutionID: 1, ActivityID: 1}}},
		Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: "timer"}}},
	}))
	deleted := make(chan pgwake.Deleted, 1)
	go func() {
		d, err := n.DeleteInstance(tctx, "i", force)
		if err != nil {
			t.Error(err)
		}
		deleted <- d
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, pgwake.Deleted{Instances: 1, Executions: 1, Events: 1, QueueItems: 2}, <-deleted)
	require.Len(t, n.content(t), 1, "namespaces")
}

func TestDeleteInstance_CompletionIsUnderWay_WaitsAndDeletesIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w", Instance: "i"}, nil)
	require.NoError(t, err)
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, n.take(t).LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
	deleted := make(chan pgwake.Deleted, 1)
	go func() {
		d, err := n.DeleteInstance(tctx, "i", force)
		if err != nil {
			t.Error(err)
		}
		deleted <- d
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.EqualValues(t, 1, (<-deleted).QueueItems)
	require.Len(t, n.content(t), 1, "namespaces")
}

func TestDeleteInstance_AckComesWhileItIsUnderWay_WaitsAndIsLost(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	tx := n.begin(t)
	_, err := n.DeleteInstanceTx(t.Context(), tx, "i", force)
	require.NoError(t, err)
	acked := make(chan error, 1)
	go func() {
		acked <- n.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "zombie"}})
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	requireError(t, <-acked, pgwake.ErrLockLost)
	require.Len(t, n.content(t), 1, "namespaces")
}

func TestDeleteInstanceTx_MessageArrivesMeanwhile_FetchNeitherWaitsNorTakesIt(t *testing.T) {
	t.Parallel()
	for _, locked := range []bool{false, true} {
		t.Run(fmt.Sprintf("its lock expired %v", locked), func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.start(t, "i")
			if locked {
				n.exec(t, `INSERT INTO instance_locks VALUES ('i', gen_random_uuid(), now() - interval '1 hour')`)
			}
			tx := n.begin(t)
			_, err := n.DeleteInstanceTx(t.Context(), tx, "i", force)
			require.NoError(t, err)
			n.send(t, "i", "k")
			n.requireNoTurn(t)
			n.start(t, "other")
			require.NoError(t, tx.Rollback(t.Context()))
			require.Equal(t, "flow", n.takeTurn(t).Name, "it was not deleted after all")
		})
	}
}

func TestDeleteInstanceTx_Committed_LateMessageIsOneForAnUnknownInstance(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	tx := n.begin(t)
	_, err := n.DeleteInstanceTx(t.Context(), tx, "i", force)
	require.NoError(t, err)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "second"}, nil)
	require.NoError(t, tx.Commit(t.Context()))
	turn := n.takeTurn(t)
	require.Equal(t, "second", turn.Name)
	require.Empty(t, turn.Version)
}

func TestDeleteInstance_ChildIsBornWhileItWaits_GoesToo(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "root")
	n.send(t, "root", "k")
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken, pgwake.OrchestrationAck{}))
	deleted := make(chan pgwake.Deleted, 1)
	go func() {
		d, err := n.DeleteInstance(tctx, "root", force)
		if err != nil {
			t.Error(err)
		}
		deleted <- d
	}()
	n.awaitBlocked(t, 1)
	n.complete(t, "child")
	n.adopt(t, "root", "child")
	require.NoError(t, tx.Commit(t.Context()))
	require.EqualValues(t, 2, (<-deleted).Instances)
	require.Empty(t, n.instances(t))
}

func TestDeleteInstance_DescendantGetsAnotherParentWhileItWaits_Stays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "root", "another", "child")
	n.adopt(t, "root", "child")
	n.send(t, "child", "k")
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken,
		pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Parent: "another", Status: pgwake.StatusRunning}}))
	deleted := make(chan pgwake.Deleted, 1)
	go func() {
		d, err := n.DeleteInstance(tctx, "root", nil)
		if err != nil {
			t.Error(err)
		}
		deleted <- d
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.EqualValues(t, 1, (<-deleted).Instances)
	require.Equal(t, []string{"another", "child"}, n.instances(t))
	require.NotContains(t, n.rows(t), "instance_locks")
	n.send(t, "child", "k")
	require.Equal(t, "child", n.takeTurn(t).Instance)
}

func TestDeleteInstance_SomebodyWaitsForIt_IsTold(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	conn, err := n.userPool(t, 1).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	channel := query[string](t, n, `SELECT channel('instance')`)[0]
	_, err = conn.Exec(t.Context(), `LISTEN `+pgx.Identifier{channel}.Sanitize())
	require.NoError(t, err)
	_, err = n.DeleteInstance(t.Context(), "i", force)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	heard, err := conn.Conn().WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, channel, heard.Channel)
}

// Everything at once on few instances: starts, fetches, acks and deletions. Nothing deadlocks, and in the
// end nothing of what was deleted is there.
func TestDeleteInstance_UnderLoad_NeitherDeadlocksNorResurrects(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	rounds := testsize.Of(75, 150)
	name := func() string { return fmt.Sprint("i", rand.IntN(4)) }
	fine := func(err error) error {
		if errors.Is(err, pgwake.ErrLockLost) || errors.Is(err, pgwake.ErrNotFound) || errors.Is(err, pgwake.ErrNoWork) ||
			errors.Is(err, pgwake.ErrDuplicateEvent) || errors.Is(err, pgwake.ErrInvalid) {
			return nil
		}
		return err
	}
	g, ctx := errgroup.WithContext(t.Context())
	loop := func(step func() error) {
		g.Go(func() error {
			for range rounds {
				if err := fine(step()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for range 2 {
		loop(func() error {
			i := name()
			_, err := n.EnqueueForOrchestrator(ctx, pgwake.Message{Instance: i, Kind: pgwake.MessageStart, Name: "flow"}, nil)
			return err
		})
		loop(func() error {
			turn, err := n.FetchOrchestrationItem(ctx, now)
			if err != nil {
				return err
			}
			return n.AckOrchestrationItem(ctx, turn.LockToken, pgwake.OrchestrationAck{
				History:   []pgwake.Event{{ID: int64(len(turn.History) + 1), Type: "e"}},
				Metadata:  pgwake.Metadata{Name: "flow"},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "w", Instance: turn.Instance}}},
			})
		})
		loop(func() error {
			items, err := n.FetchWorkItems(ctx, 3, now)
			if err != nil {
				return err
			}
			for _, item := range items {
				if err := n.AckWorkItem(ctx, item.LockToken, &pgwake.Message{Instance: item.Instance, Kind: "done"}); fine(err) != nil {
					return err
				}
			}
			return nil
		})
		loop(func() error { _, err := n.DeleteInstance(ctx, name(), force); return err })
		loop(func() error { _, err := n.DeleteInstances(ctx, []string{name(), name()}, force); return err })
	}
	require.NoError(t, g.Wait())

	for _, i := range n.instances(t) {
		_, err := n.DeleteInstance(t.Context(), i, force)
		require.NoError(t, err)
	}
	require.Empty(t, n.content(t)["history"], "of instances that do not exist")
	require.Empty(t, n.content(t)["executions"])
}

func TestDeleteInstances_SeveralAtOnce_CountsAreSummed(t *testing.T) {
	t.Parallel()
	n := family(t)
	n.complete(t, "x", "y", "z")
	deleted, err := n.DeleteInstances(t.Context(), []string{"z", "x", "z"}, nil)
	require.NoError(t, err)
	require.Equal(t, pgwake.Deleted{Instances: 2, Executions: 2, Events: 4}, deleted)
	deleted, err = n.DeleteInstances(t.Context(), []string{"y", "aa", "root", "b", "a"}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 5, deleted.Instances)
	require.Empty(t, n.instances(t))
	deleted, err = n.DeleteInstances(t.Context(), nil, nil)
	require.NoError(t, err)
	require.Zero(t, deleted)
}

func TestDeleteInstances_OneIsRefused_NoneIsDeleted(t *testing.T) {
	t.Parallel()
	n := family(t)
	n.complete(t, "fine")
	n.start(t, "running")
	before := n.content(t)
	for _, tt := range []struct {
		instances []string
		o         *pgwake.DeleteOptions
		want      error
	}{
		{[]string{"fine", "running"}, nil, pgwake.ErrInstanceRunning},
		{[]string{"fine", "unknown"}, force, pgwake.ErrNotFound},
		{[]string{"fine", "root"}, force, pgwake.ErrHasParent},               // orphans a and b
		{[]string{"fine", "root", "a", "b"}, nil, pgwake.ErrHasParent},       // orphans aa
		{[]string{"fine", "a", "aa"}, force, pgwake.ErrHasParent},            // has a parent
		{[]string{"running", "root", "a", "aa"}, force, pgwake.ErrHasParent}, // orphans b
	} {
		deleted, err := n.DeleteInstances(t.Context(), tt.instances, tt.o)
		requireError(t, err, tt.want)
		require.Zero(t, deleted)
		require.Equal(t, before, n.content(t), tt.instances)
	}
	deleted, err := n.DeleteInstances(t.Context(), []string{"fine", "running"}, force)
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted.Instances)
}

func TestDeleteInstances_SameOnesInEveryOrderAtOnce_NoDeadlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for range 5 {
		n.populate(t, 100)
		n.exec(t, `INSERT INTO worker_queue (name, instance_id) SELECT 'w', instance_id FROM instances, generate_series(1, 3)`)
		all := n.instances(t)
		var g errgroup.Group
		for i := range 6 {
			mine := slices.Clone(all)
			rand.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
			g.Go(func() (err error) {
				switch i % 3 {
				case 0:
					_, err = n.DeleteInstances(tctx, mine, nil)
				case 1:
					_, err = n.DeleteInstancesBulk(tctx, &pgwake.BulkFilter{Instances: mine})
				default:
					_, err = n.DeleteInstancesBulk(tctx, nil)
				}
				if errors.Is(err, pgwake.ErrNotFound) {
					return nil
				}
				return err
			})
		}
		require.NoError(t, g.Wait())
		require.Len(t, n.content(t), 1, "namespaces")
	}
}

func TestDeleteInstancesBulk_Filter_LimitsWhatGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "a", "b", "c", "d", "e")
	n.start(t, "running")
	n.exec(t, `UPDATE executions SET completed_at = completed_at - interval '1 hour' WHERE instance_id IN ('a', 'c', 'e')`)
	halfAnHourAgo := time.Now().Add(-30 * time.Minute)
	for _, tt := range []struct {
		f    *pgwake.BulkFilter
		left []string
	}{
		{&pgwake.BulkFilter{Instances: []string{}}, []string{"a", "b", "c", "d", "e", "running"}},
		{&pgwake.BulkFilter{Instances: []string{"unknown", "running"}}, []string{"a", "b", "c", "d", "e", "running"}},
		{&pgwake.BulkFilter{CompletedBefore: halfAnHourAgo.Add(-time.Hour)}, []string{"a", "b", "c", "d", "e", "running"}},
		{&pgwake.BulkFilter{Instances: []string{"a", "b", "a", "unknown", "running"}, CompletedBefore: halfAnHourAgo}, []string{"b", "c", "d", "e", "running"}},
		{&pgwake.BulkFilter{Instances: []string{"b", "e"}, Limit: 1}, []string{"b", "c", "d", "running"}}, // e ended first
		{&pgwake.BulkFilter{CompletedBefore: halfAnHourAgo}, []string{"b", "d", "running"}},
		{nil, []string{"running"}},
	} {
		before := len(n.instances(t))
		deleted, err := n.DeleteInstancesBulk(t.Context(), tt.f)
		require.NoError(t, err)
		require.Equal(t, tt.left, n.instances(t), "%+v", tt.f)
		require.EqualValues(t, before-len(tt.left), deleted.Instances)
	}
}

func TestDeleteInstancesBulk_Limit_DealsWithSoManyAtATimeTheOldestFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.populate(t, 4)
	n.start(t, "running1")
	n.start(t, "running2")
	for _, want := range []struct {
		deleted int64
		left    []string
	}{
		{2, []string{"i000003", "i000004", "running1", "running2"}},
		{2, []string{"running1", "running2"}},
		{0, []string{"running1", "running2"}},
	} {
		deleted, err := n.DeleteInstancesBulk(t.Context(), &pgwake.BulkFilter{Limit: 2})
		require.NoError(t, err)
		require.Equal(t, want.deleted, deleted.Instances)
		require.Equal(t, want.left, n.instances(t))
	}
}

func TestDeleteInstancesBulk_Trees_GoAsAWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	n := family(t)
	n.complete(t, "parent", "child1", "child2", "alone", "busy", "busychild")
	n.adopt(t, "parent", "child1", "child2")
	n.adopt(t, "busy", "busychild")
	n.run(t, "busychild", 2, pgwake.StatusRunning)
	deleted, err := n.DeleteInstancesBulk(t.Context(), &pgwake.BulkFilter{Instances: []string{"a", "child1", "busychild"}})
	require.NoError(t, err)
	require.Zero(t, deleted, "children")
	deleted, err = n.DeleteInstancesBulk(t.Context(), &pgwake.BulkFilter{Instances: []string{"parent", "alone", "root", "busy"}})
	require.NoError(t, err)
	require.EqualValues(t, 8, deleted.Instances)
	require.Equal(t, []string{"busy", "busychild"}, n.instances(t))
}

func TestDeleteInstancesBulk_RunsAgainOrGrowsWhileItWaits_IsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, grows := range []bool{false, true} {
		t.Run(fmt.Sprintf("grows %v", grows), func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.complete(t, "a", "b", "c")
			n.send(t, "b", "k")
			tx := n.begin(t)
			status := pgwake.StatusRunning
			if grows {
				status = pgwake.StatusCompleted
			}
			require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken,
				pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: status}}))
			deleted := make(chan pgwake.Deleted, 1)
			go func() {
				d, err := n.DeleteInstancesBulk(tctx, nil)
				if err != nil {
					t.Error(err)
				}
				deleted <- d
			}()
			n.awaitBlocked(t, 1)
			if grows {
				n.complete(t, "child")
				n.adopt(t, "b", "child")
			}
			require.NoError(t, tx.Commit(t.Context()))
			require.EqualValues(t, 2, (<-deleted).Instances)
			require.Contains(t, n.instances(t), "b")
			require.Empty(t, n.content(t)["instance_locks"])
			n.send(t, "b", "k")
			n.takeTurn(t)
		})
	}
}

func TestDeleteInstancesBulk_NoLongerMatchesWhenItHasWaited_IsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]pgwake.Metadata{
		"ended anew":   {Status: pgwake.StatusCompleted},
		"got a parent": {Parent: "parent"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.complete(t, "i", "j")
			before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
			n.complete(t, "parent")
			n.send(t, "i", "k")
			tx := n.begin(t)
			require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken, pgwake.OrchestrationAck{Metadata: m}))
			deleted := make(chan pgwake.Deleted, 1)
			go func() {
				d, err := n.DeleteInstancesBulk(tctx, &pgwake.BulkFilter{CompletedBefore: before})
				if err != nil {
					t.Error(err)
				}
				deleted <- d
			}()
			n.awaitBlocked(t, 1)
			require.NoError(t, tx.Commit(t.Context()))
			require.EqualValues(t, 1, (<-deleted).Instances)
			require.Equal(t, []string{"i", "parent"}, n.instances(t))
			require.NotContains(t, n.rows(t), "instance_locks")
		})
	}
}

func TestDeleteInstancesBulk_TenThousand_InOneCall(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.populate(t, 10_000)
	deleted, err := n.DeleteInstancesBulk(t.Context(), &pgwake.BulkFilter{Limit: 10_000})
	require.NoError(t, err)
	require.Equal(t, pgwake.Deleted{Instances: 10_000, Executions: 10_000, Events: 10_000}, deleted)
	require.Len(t, n.content(t), 1, "namespaces")
}

// What was queued since the snapshot of such a transaction would be left behind.
func TestDeletionTx_OneSnapshotForAll_IsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.complete(t, "i")
	begin := func(t *testing.T, level pgx.TxIsoLevel) pgx.Tx {
		tx := n.begin(t)
		_, err := tx.Exec(t.Context(), `ROLLBACK; BEGIN ISOLATION LEVEL `+string(level))
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `SELECT set_config('search_path', $1, true)`, n.quoted())
		require.NoError(t, err)
		return tx
	}
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, del := range map[string]func(pgx.Tx) (pgwake.Deleted, error){
			"one": func(tx pgx.Tx) (pgwake.Deleted, error) { return n.DeleteInstanceTx(t.Context(), tx, "i", force) },
			"several": func(tx pgx.Tx) (pgwake.Deleted, error) {
				return n.DeleteInstancesTx(t.Context(), tx, []string{"i"}, force)
			},
			"in bulk": func(tx pgx.Tx) (pgwake.Deleted, error) { return n.DeleteInstancesBulkTx(t.Context(), tx, nil) },
		} {
			t.Run(fmt.Sprintf("%s %s", level, name), func(t *testing.T) {
				tx := begin(t, level)
				n.send(t, "i", "late")
				before := n.content(t)
				deleted, err := del(tx)
				require.ErrorContains(t, err, "READ COMMITTED")
				require.False(t, requireError(t, err, pgwake.ErrInvalid).Retryable)
				require.Zero(t, deleted)
				require.Error(t, tx.Commit(t.Context()))
				require.Equal(t, before, n.content(t))
			})
		}
	}
	tx := begin(t, pgx.ReadUncommitted) // the same thing to PostgreSQL
	deleted, err := n.DeleteInstanceTx(t.Context(), tx, "i", force)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.EqualValues(t, 1, deleted.Instances)

	// A prune leaves nothing behind: it fails.
	n.start(t, "j")
	n.run(t, "j", 1, pgwake.StatusContinuedAsNew)
	n.run(t, "j", 2, pgwake.StatusRunning)
	tx = begin(t, pgx.RepeatableRead)
	require.NoError(t, n.AppendHistory(t.Context(), "j", 1, []pgwake.Event{{ID: 1000, Type: "late"}}))
	_, err = n.PruneExecutionsTx(t.Context(), tx, "j", nil)
	var failed *pgwake.Error
	require.ErrorAs(t, err, &failed)
	require.True(t, failed.Retryable)
	require.Equal(t, "40001", failed.SQLState)
}

func TestDeletionTx_RolledBack_EverythingIsThere(t *testing.T) {
	t.Parallel()
	n := family(t)
	before := n.content(t)
	for _, verb := range []func(tx pgx.Tx) (pgwake.Deleted, error){
		func(tx pgx.Tx) (pgwake.Deleted, error) { return n.DeleteInstanceTx(t.Context(), tx, "root", nil) },
		func(tx pgx.Tx) (pgwake.Deleted, error) {
			return n.DeleteInstancesTx(t.Context(), tx, []string{"root", "a", "b", "aa"}, nil)
		},
		func(tx pgx.Tx) (pgwake.Deleted, error) { return n.DeleteInstancesBulkTx(t.Context(), tx, nil) },
	} {
		tx := n.begin(t)
		deleted, err := verb(tx)
		require.NoError(t, err)
		require.EqualValues(t, 4, deleted.Instances)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, n.content(t))
	}
}

// renewed makes an instance with so many executions, the last of which has the status. Each ended an hour after the
// one before.
func (n *node) renewed(tb tester, instance string, executions int, status pgwake.Status) {
	tb.Helper()
	for x := 1; x < executions; x++ {
		n.run(tb, instance, int64(x), pgwake.StatusContinuedAsNew)
	}
	n.run(tb, instance, int64(executions), status)
	n.exec(tb, `UPDATE executions SET completed_at = now() - interval '1 hour' * ($2 - execution_id) WHERE instance_id = $1 AND status <> 'Running'`,
		instance, executions)
}

func (n *node) executionIDs(tb tester, instance string) []int64 {
	tb.Helper()
	return query[int64](tb, n, `SELECT execution_id FROM executions WHERE instance_id = $1 ORDER BY 1`, instance)
}

func TestPruneExecutions_Options_AllHaveToApply(t *testing.T) {
	t.Parallel()
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	for _, tt := range []struct {
		o    *pgwake.PruneOptions
		left []int64
	}{
		{nil, []int64{4}},
		{&pgwake.PruneOptions{KeepLast: 1}, []int64{4}},
		{&pgwake.PruneOptions{KeepLast: 2}, []int64{3, 4}},
		{&pgwake.PruneOptions{KeepLast: 9}, []int64{1, 2, 3, 4}},
		{&pgwake.PruneOptions{CompletedBefore: ago(90 * time.Minute)}, []int64{3, 4}},
		{&pgwake.PruneOptions{CompletedBefore: ago(-time.Hour)}, []int64{4}},
		{&pgwake.PruneOptions{CompletedBefore: ago(90 * time.Minute), KeepLast: 3}, []int64{2, 3, 4}},
		{&pgwake.PruneOptions{CompletedBefore: ago(150 * time.Minute), KeepLast: 2}, []int64{2, 3, 4}},
	} {
		t.Run(fmt.Sprintf("%+v", tt.o), func(t *testing.T) {
			t.Parallel()
			for _, status := range []pgwake.Status{pgwake.StatusCompleted, pgwake.StatusRunning} {
				n := newNode(t, nil)
				n.renewed(t, "i", 4, status)
				n.renewed(t, "other", 2, status)
				n.exec(t, `INSERT INTO kv_store VALUES ('i', 'k', 'v', 1)`)
				pruned, err := n.PruneExecutions(t.Context(), "i", tt.o)
				require.NoError(t, err)
				require.Equal(t, tt.left, n.executionIDs(t, "i"))
				gone := int64(4 - len(tt.left))
				require.Equal(t, pgwake.Pruned{Instances: min(gone, 1), Executions: gone, Events: 2 * gone}, pruned)
				require.Equal(t, tt.left, query[int64](t, n, `SELECT DISTINCT execution_id FROM history WHERE instance_id = 'i' ORDER BY 1`))
				require.Len(t, n.content(t)["kv_store"], 1)
				require.Len(t, n.executionIDs(t, "other"), 2)
			}
		})
	}
}

func TestPruneExecutions_OlderOneIsRunning_Stays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.renewed(t, "i", 3, pgwake.StatusRunning)
	n.exec(t, `UPDATE executions SET status = 'Running' WHERE execution_id = 1`)
	_, err := n.PruneExecutions(t.Context(), "i", nil)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 3}, n.executionIDs(t, "i"))
}

func TestPruneExecutions_Unknown_NotFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	_, err := n.PruneExecutions(t.Context(), "unknown", nil)
	requireError(t, err, pgwake.ErrNotFound)
}

func TestPruneExecutions_TurnInProgress_NeitherWaitsForTheOther(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.renewed(t, "i", 3, pgwake.StatusRunning)
	n.send(t, "i", "k")
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, n.takeTurn(t).LockToken, pgwake.OrchestrationAck{
		ExecutionID: 3, Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted}}))
	pruned, err := n.PruneExecutions(t.Context(), "i", nil)
	require.NoError(t, err)
	require.EqualValues(t, 2, pruned.Executions)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []int64{3}, n.executionIDs(t, "i"))
}

func TestPruneExecutionsBulk_Filter_LimitsWhatIsPruned(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, i := range []string{"a", "b", "c", "d"} {
		n.renewed(t, i, 3, pgwake.StatusCompleted)
	}
	n.renewed(t, "running", 3, pgwake.StatusRunning)
	n.complete(t, "once")
	n.exec(t, `UPDATE executions SET completed_at = completed_at - interval '1 day' WHERE instance_id = 'd'`)
	for _, tt := range []struct {
		f      *pgwake.BulkFilter
		o      *pgwake.PruneOptions
		pruned []string // so far
	}{
		{&pgwake.BulkFilter{Instances: []string{}}, nil, []string{}},
		{nil, &pgwake.PruneOptions{KeepLast: 3}, []string{}},
		{&pgwake.BulkFilter{Instances: []string{"b", "unknown", "once", "b"}}, nil, []string{"b"}},
		{&pgwake.BulkFilter{CompletedBefore: time.Now().Add(-12 * time.Hour)}, nil, []string{"b", "d"}},
		{&pgwake.BulkFilter{Limit: 1}, nil, []string{"a", "b", "d"}},
		{&pgwake.BulkFilter{Limit: 1}, nil, []string{"a", "b", "c", "d"}},
		{&pgwake.BulkFilter{Instances: []string{"running"}}, &pgwake.PruneOptions{KeepLast: 1}, []string{"a", "b", "c", "d", "running"}},
		{nil, nil, []string{"a", "b", "c", "d", "running"}},
	} {
		before := query[int64](t, n, `SELECT count(*) FROM executions`)[0]
		pruned, err := n.PruneExecutionsBulk(t.Context(), tt.f, tt.o)
		require.NoError(t, err)
		require.Equal(t, before-pruned.Executions, query[int64](t, n, `SELECT count(*) FROM executions`)[0])
		require.Equal(t, pgwake.Pruned{Instances: pruned.Executions / 2, Executions: pruned.Executions, Events: 2 * pruned.Executions}, pruned)
		require.Equal(t, tt.pruned, query[string](t, n, `SELECT instance_id FROM executions WHERE instance_id <> 'once'
			GROUP BY 1 HAVING count(*) = 1 AND max(execution_id) = 3 ORDER BY 1`), "%+v %+v", tt.f, tt.o)
	}
	info, err := n.GetInstanceInfo(t.Context(), "running")
	require.NoError(t, err)
	require.Equal(t, pgwake.StatusRunning, info.Status)
}

func TestPruneTx_RolledBack_EverythingIsThere(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.renewed(t, "i", 3, pgwake.StatusCompleted)
	before := n.content(t)
	for _, verb := range []func(tx pgx.Tx) (pgwake.Pruned, error){
		func(tx pgx.Tx) (pgwake.Pruned, error) { return n.PruneExecutionsTx(t.Context(), tx, "i", nil) },
		func(tx pgx.Tx) (pgwake.Pruned, error) { return n.PruneExecutionsBulkTx(t.Context(), tx, nil, nil) },
	} {
		tx := n.begin(t)
		pruned, err := verb(tx)
		require.NoError(t, err)
		require.EqualValues(t, 2, pruned.Executions)
		others, err := n.PruneExecutions(t.Context(), "i", nil)
		require.NoError(t, err)
		require.Zero(t, others, "somebody else is at it")
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, n.content(t))
	}
}

func TestGetSystemMetrics_OneOfEach_IsCounted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	metrics, err := n.GetSystemMetrics(t.Context())
	require.NoError(t, err)
	require.Equal(t, pgwake.SystemMetrics{ByStatus: map[pgwake.Status]int64{}}, metrics)

	n.renewed(t, "a", 2, pgwake.StatusRunning)
	n.complete(t, "b", "c")
	n.enqueue(t, "w1", "w2")
	n.send(t, "a", "k")
	n.takeTurn(t)
	n.exec(t, `INSERT INTO sessions VALUES ('s1', 'o', now() + interval '1 hour'), ('s2', 'o', now() - interval '1 hour')`)
	n.exec(t, `INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, enqueued_at, reason)
		VALUES ('worker', 1, 'default', 0, 1, now(), 'test')`)
	n.exec(t, `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at) VALUES (1, 'default', 0, 1, 'w', now())`)
	metrics, err = n.GetSystemMetrics(t.Context())
	require.NoError(t, err)
	require.Equal(t, pgwake.SystemMetrics{
		Instances: 3, ByStatus: map[pgwake.Status]int64{pgwake.StatusRunning: 1, pgwake.StatusCompleted: 2},
		Executions: 4, Events: 8, WorkItems: 2, Messages: 1, Turns: 1, Sessions: 1, DeadLetters: 1, Archived: 1,
	}, metrics)
}

func TestGetQueueDepths_DueDelayedAndLeased_AreToldApartByNamespaceAndTag(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	depths, err := n.GetQueueDepths(t.Context())
	require.NoError(t, err)
	require.Empty(t, depths)

	later := &pgwake.EnqueueOptions{Delay: time.Hour}
	n.enqueue(t, "leased")
	n.take(t)
	n.enqueue(t, "due", "due too")
	n.enqueueWith(t, "delayed", later)
	n.enqueueWith(t, "elsewhere", &pgwake.EnqueueOptions{Namespace: "blue", At: time.Now().Add(-time.Hour)}) // a head start, not a wait
	n.exec(t, `INSERT INTO worker_queue (name, tag) VALUES ('tagged', 'gpu')`)
	n.start(t, "i")
	n.send(t, "i", "k")
	n.takeTurn(t)
	n.send(t, "i", "behind it")
	n.requireNoTurn(t) // which has moved it out of the way
	n.sendWith(t, pgwake.Message{Instance: "j", Kind: "k"}, later)
	n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, queue) VALUES ('q', 'k', 'orders')`)

	depths, err = n.GetQueueDepths(t.Context())
	require.NoError(t, err)
	for i := range depths {
		require.Equal(t, depths[i].Due > 0, !depths[i].OldestDue.IsZero())
		if depths[i].Due > 0 {
			require.WithinDuration(t, time.Now(), depths[i].OldestDue, patience)
		}
		depths[i].OldestDue = time.Time{}
	}
	require.Equal(t, []pgwake.QueueDepth{
		{Queue: pgwake.Orchestrator, Namespace: "default", Delayed: 1, Leased: 2},
		{Queue: pgwake.Orchestrator, Namespace: "default", Tag: "orders", Due: 1},
		{Queue: pgwake.Worker, Namespace: "blue", Due: 1},
		{Queue: pgwake.Worker, Namespace: "default", Due: 2, Delayed: 1, Leased: 1},
		{Queue: pgwake.Worker, Namespace: "default", Tag: "gpu", Due: 1},
	}, depths)
}

// What a limit keeps waiting is neither due nor later: a key that is stuck is to be seen.
func TestGetQueueDepths_LimitsOfKeys_KeepBack(t *testing.T) {
	t.Parallel()
	for _, l := range []pgwake.Limits{{MaxRunningPerKey: 1}, {RatePerKey: pgwake.Rate{Interval: time.Hour}}} {
		n := newNode(t, nil)
		n.limit(t, l)
		n.keyed(t, "k", "k", "k")
		n.take(t)
		n.requireNoWork(t)
		n.requireNoWork(t)
		depths, err := n.GetQueueDepths(t.Context())
		require.NoError(t, err)
		require.Equal(t, []pgwake.QueueDepth{{Queue: pgwake.Worker, Namespace: "default", Leased: 1, KeptBack: 2}}, depths)
	}
}

func TestManagement_ArgumentBreaksARule_Invalid(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, long := t.Context(), strings.Repeat("x", pgwake.MaxNameLength+1)
	distant := time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, bad := range []string{"", long, "\xff", "a\x00"} {
		for verb, call := range map[string]func() error{
			"GetInstanceInfo":  func() error { _, err := n.GetInstanceInfo(ctx, bad); return err },
			"ListExecutions":   func() error { _, err := n.ListExecutions(ctx, bad); return err },
			"GetExecutionInfo": func() error { _, err := n.GetExecutionInfo(ctx, bad, 1); return err },
			"ListChildren":     func() error { _, err := n.ListChildren(ctx, bad); return err },
			"GetParent":        func() error { _, err := n.GetParent(ctx, bad); return err },
			"GetInstanceTree":  func() error { _, err := n.GetInstanceTree(ctx, bad); return err },
			"DeleteInstance":   func() error { _, err := n.DeleteInstance(ctx, bad, nil); return err },
			"DeleteInstances":  func() error { _, err := n.DeleteInstances(ctx, []string{"i", bad}, nil); return err },
			"DeleteInstancesBulk": func() error {
				_, err := n.DeleteInstancesBulk(ctx, &pgwake.BulkFilter{Instances: []string{bad}})
				return err
			},
			"PruneExecutions": func() error { _, err := n.PruneExecutions(ctx, bad, nil); return err },
			"PruneExecutionsBulk": func() error {
				_, err := n.PruneExecutionsBulk(ctx, &pgwake.BulkFilter{Instances: []string{bad}}, nil)
				return err
			},
		} {
			require.Empty(t, requireError(t, call(), pgwake.ErrInvalid).SQLState, "%s: nothing is sent", verb)
		}
	}
	for _, o := range []pgwake.ListOptions{
		{Status: "Odd"}, {Namespace: "No"}, {Name: long}, {Queue: long}, {After: long}, {Limit: -1}, {Limit: 10_001},
	} {
		_, err := n.ListInstances(ctx, &o)
		require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState)
	}
	for _, f := range []pgwake.BulkFilter{{Limit: -1}, {Limit: 10_001}, {CompletedBefore: distant}} {
		_, err := n.DeleteInstancesBulk(ctx, &f)
		require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState)
		_, err = n.PruneExecutionsBulk(ctx, &f, nil)
		require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState)
	}
	for _, o := range []pgwake.PruneOptions{{KeepLast: -1}, {KeepLast: 1 << 31}, {CompletedBefore: distant}} {
		_, err := n.PruneExecutions(ctx, "i", &o)
		require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState)
		_, err = n.PruneExecutionsBulk(ctx, nil, &o)
		require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState)
	}
}
