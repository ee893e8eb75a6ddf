package goworkflows_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: do instances begin, hear of things from outside and go as they should, beyond what the suites ask?

func TestCreateWorkflowInstance_ManyOfOneIDAtOnce_OneIsActive(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var created atomic.Int64
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			err := l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("one", uuid.NewString()), started("w"))
			if err == nil {
				created.Add(1)
			} else if err != backend.ErrInstanceAlreadyExists {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Equal(t, int64(1), created.Load())
	require.Equal(t, 1, l.count("orchestrator_queue", "true"), "nor is there a message for another")
}

// Whoever creates one meanwhile waits for the turn, and finds either execution active.
func TestCreateWorkflowInstance_WhileItContinuesAsNew_AnotherOneIsAlwaysActive(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	stop := make(chan struct{})
	var all sync.WaitGroup
	var refused atomic.Int64
	for range 3 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("w", uuid.NewString()), started("w")); err != backend.ErrInstanceAlreadyExists {
					t.Errorf("%v", err)
				}
				refused.Add(1)
			}
		})
	}
	const n = 50
	for range n {
		task := l.workflowTask()
		require.NoError(t, l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateContinuedAsNew, numbered(task, task.NewEvents...), nil, nil,
			[]*history.WorkflowEvent{{WorkflowInstance: core.NewWorkflowInstance("w", uuid.NewString()), HistoryEvent: started("w")}}))
	}
	close(stop)
	all.Wait()
	require.NotZero(t, refused.Load())
	require.Equal(t, 1, l.count("gowf_instances", "state = 0"))
	require.Equal(t, n, l.count("gowf_instances", "state = 1"))
}

func TestCompleteWorkflowTask_SubWorkflowIsCreatedElsewhereAtOnce_OneIsActiveAndTheParentIsToldOtherwise(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("parent")
	won := 0
	for i := range 30 {
		id := "sub-" + strconv.Itoa(i)
		task := l.workflowTask()
		created := make(chan error)
		go func() {
			created <- l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance(id, uuid.NewString()), started("w"))
		}()
		require.NoError(t, l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateActive, numbered(task, task.NewEvents...), nil, nil,
			[]*history.WorkflowEvent{{HistoryEvent: started("w"), WorkflowInstance: core.NewSubWorkflowInstance(id, uuid.NewString(), task.WorkflowInstance, int64(i))}}))
		err := <-created
		require.Equal(t, 1, l.count("gowf_instances", "state = 0 AND instance_id = '"+id+"'"))
		sub := l.workflowTask()
		if err == nil {
			won++
			told := l.workflowTask()
			if sub.WorkflowInstance.InstanceID == "parent" {
				sub, told = told, sub
			}
			require.Equal(t, history.EventType_SubWorkflowFailed, told.NewEvents[0].Type)
			require.Equal(t, int64(i), told.NewEvents[0].ScheduleEventID)
			require.NoError(t, l.complete(told, core.WorkflowInstanceStateActive))
		} else {
			require.Equal(t, backend.ErrInstanceAlreadyExists, err)
		}
		require.Equal(t, id, sub.WorkflowInstance.InstanceID)
		require.NoError(t, l.complete(sub, core.WorkflowInstanceStateFinished))
		require.NoError(t, client.New(l.Backend).SignalWorkflow(l.within(), "parent", "s", 1))
	}
	t.Logf("the client won %d times", won)
}

func TestCreateWorkflowInstance_IDsThatCannotBe_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for name, instance := range map[string]*core.WorkflowInstance{
		"no instance id":  core.NewWorkflowInstance("", "1"),
		"no execution id": core.NewWorkflowInstance("a", ""),
		"a slash":         core.NewWorkflowInstance("a", "b/c"),
		"too long":        core.NewWorkflowInstance(strings.Repeat("a", 200), uuid.NewString()),
		"NUL":             core.NewWorkflowInstance("a\x00b", "1"),
		"not UTF-8":       core.NewWorkflowInstance("a\xff", "1"),
	} {
		require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), instance, started("w")), pgwake.ErrInvalid, name)
	}
	require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("a", "1"), activity(1)), pgwake.ErrInvalid)
	require.Zero(t, l.count("gowf_instances", "true"))
}

func TestGowfCreate_TwoOfTheSameInOppositeOrders_DoNotDeadlock(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	const n = 200
	create := `SELECT ` + pgx.Identifier{l.p.Schema(), "gowf_create"}.Sanitize() + `(array_agg(w), array_agg($1::text), array_agg(NULL::text), array_agg(NULL::text),
		array_agg(NULL::bigint), array_agg('n'::text), array_agg('q'::text), array_agg('1'::text), 'goworkflows') FROM (SELECT n::text AS w FROM generate_series(1, $2) n ORDER BY n * $3) s`
	var all sync.WaitGroup
	for execution, order := range map[string]int{"1": 1, "2": -1} {
		all.Go(func() {
			var created []bool
			if err := l.p.Pool().QueryRow(l.within(), create, execution, n, order).Scan(&created); err != nil {
				t.Error(err)
			}
			if len(created) != n {
				t.Errorf("%d answers", len(created))
			}
		})
	}
	all.Wait()
	require.Equal(t, n, l.count("gowf_instances", "true"))
}

// The characters are those that names in the Provider are made with.
func TestWorkflow_IDWithSlashes_HasTimersAndActivitiesLikeAnyOther(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.work(func(w *worker.Worker) {
		require.NoError(t, w.RegisterActivity(echo))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context) (string, error) {
			unused, cancel := workflow.WithCancel(ctx)
			timer := workflow.ScheduleTimer(unused, time.Hour)
			if err := workflow.Sleep(ctx, time.Millisecond); err != nil {
				return "", err
			}
			cancel()
			if _, err := timer.Get(ctx); err != workflow.Canceled {
				return "", err
			}
			return workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, echo, "hello").Get(ctx)
		}, nameIs("w")))
	})
	got, err := resultOf[string](l, l.run("a/b#1/'c'", "w"))
	require.NoError(t, err)
	require.Equal(t, "hello", got)
	require.Zero(t, l.count("orchestrator_queue", "true"), "the timer is gone")
}

func TestSignalWorkflow_AfterContinueAsNew_ReachesTheActiveExecution(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	first := l.create("w")
	task := l.workflowTask()
	second := core.NewWorkflowInstance("w", uuid.NewString())
	require.NoError(t, l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateContinuedAsNew, numbered(task, task.NewEvents...), nil, nil,
		[]*history.WorkflowEvent{{WorkflowInstance: second, HistoryEvent: history.NewPendingEvent(time.Now(), history.EventType_WorkflowExecutionStarted,
			&history.ExecutionStartedAttributes{Name: "w"})}}))
	for instance, want := range map[*core.WorkflowInstance]core.WorkflowInstanceState{first: core.WorkflowInstanceStateContinuedAsNew, second: core.WorkflowInstanceStateActive} {
		got, err := l.GetWorkflowInstanceState(l.within(), instance)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	require.NoError(t, client.New(l.Backend).SignalWorkflow(l.within(), "w", "s", 1))
	next := l.workflowTask()
	require.Equal(t, second, next.WorkflowInstance)
	require.Equal(t, workflow.QueueDefault, next.Queue, "that of the one before")
	require.Equal(t, []history.EventType{history.EventType_WorkflowExecutionStarted, history.EventType_SignalReceived},
		[]history.EventType{next.NewEvents[0].Type, next.NewEvents[1].Type})
}

func TestWithTx_CreatedAndSignalled_IfItCommits(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, commit := range []bool{false, true} {
		tx, err := l.p.Pool().Begin(t.Context())
		require.NoError(t, err)
		c := client.New(l.WithTx(tx))
		instance, err := c.CreateWorkflowInstance(l.within(), client.WorkflowInstanceOptions{InstanceID: "w"}, "w")
		require.NoError(t, err)
		require.NoError(t, c.SignalWorkflow(l.within(), "w", "s", 1))
		state, err := c.GetWorkflowInstanceState(l.within(), instance)
		require.NoError(t, err)
		require.Equal(t, core.WorkflowInstanceStateActive, state)
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			_, err := l.GetWorkflowInstanceState(l.within(), instance)
			require.Equal(t, backend.ErrInstanceNotFound, err)
			require.Zero(t, l.count("orchestrator_queue", "true"))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.Len(t, l.workflowTask().NewEvents, 2)
	}
}

func TestWithTx_ItMaySeeAnExecutionThatHasEnded_SignalIsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	tx, err := l.p.Pool().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(context.Background())) }()
	require.ErrorIs(t, client.New(l.WithTx(tx)).SignalWorkflow(l.within(), "w", "s", 1), pgwake.ErrInvalid)
}

func TestRemove_InATransactionAndByTheProvider_NothingIsLeft(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ways := map[string]func(*core.WorkflowInstance) error{
		"one": func(i *core.WorkflowInstance) error { return l.RemoveWorkflowInstance(l.within(), i) },
		"in batches": func(*core.WorkflowInstance) error {
			require.NoError(t, l.RemoveWorkflowInstances(l.within(), backend.RemoveFinishedBefore(time.Now().Add(time.Hour))))
			require.Equal(t, 1, l.count("gowf_instances", "true"), "whoever waits for the result still gets it")
			for range 2 {
				l.create(uuid.NewString())
				require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished))
			}
			_, err := l.p.Pool().Exec(t.Context(), `UPDATE "`+l.p.Schema()+`".gowf_instances SET completed_at = completed_at - interval '1 minute'`)
			require.NoError(t, err)
			require.NoError(t, l.RemoveWorkflowInstances(l.within()), "no instant, none")
			require.NoError(t, l.RemoveWorkflowInstances(l.within(), backend.RemoveFinishedBefore(time.Now().Add(-time.Hour))))
			require.Equal(t, 3, l.count("gowf_instances", "true"))
			err = l.RemoveWorkflowInstances(l.within(), backend.RemoveFinishedBefore(time.Now()), backend.RemoveFinishedBatchSize(1))
			require.Zero(t, l.count("gowf_instances", "true"))
			return err
		},
		"in a transaction": func(i *core.WorkflowInstance) error {
			tx, err := l.p.Pool().Begin(t.Context())
			require.NoError(t, err)
			if err := l.WithTx(tx).RemoveWorkflowInstance(l.within(), i); err != nil {
				return errors.Join(err, tx.Rollback(t.Context()))
			}
			return tx.Commit(t.Context())
		},
		"by the Provider": func(i *core.WorkflowInstance) error {
			_, err := l.p.DeleteInstance(l.within(), i.InstanceID+"/"+i.ExecutionID, nil)
			return err
		},
	}
	for way, remove := range ways {
		instance := l.create("w")
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished), way)
		require.NoError(t, remove(instance), way)
		require.Equal(t, backend.ErrInstanceNotFound, l.RemoveWorkflowInstance(l.within(), instance), way)
		ref, err := l.GetWorkflowInstance(l.within(), instance)
		require.NoError(t, err)
		require.Nil(t, ref)
		events, err := l.GetWorkflowInstanceHistory(l.within(), instance, nil)
		require.NoError(t, err)
		require.Empty(t, events)
	}
	l.create("w")
	require.NoError(t, l.RemoveWorkflowInstances(l.within(), backend.RemoveFinishedBefore(time.Now().Add(time.Hour))), "an active one stays")
	require.Equal(t, 1, l.count("gowf_instances", "state = 0"))
}

// It would be active for ever, and no other one of its instance id could be.
func TestRemoveWorkflowInstance_WhatOpensItIsADeadLetter_Goes(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, purged := range []bool{false, true} {
		instance := l.create("w")
		require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), instance), backend.ErrInstanceNotFinished, "it can begin")
		task := l.workflowTask()
		require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), task.WorkflowInstance), backend.ErrInstanceNotFinished, "it begins")
		pgwaketest.Advance(t, l.p, l.Options().WorkflowLockTimeout)
		l.bury()
		require.NoError(t, l.CancelWorkflowInstance(l.within(), instance, history.NewWorkflowCancellationEvent(time.Now())))
		if purged {
			_, err := l.p.PurgeDeadLetters(l.within(), nil)
			require.NoError(t, err)
		}
		require.NoError(t, l.RemoveWorkflowInstance(l.within(), instance))
		require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), instance), backend.ErrInstanceNotFound)
		for _, table := range []string{"gowf_instances", "dead_letters", "orchestrator_queue", "instance_locks"} {
			require.Zero(t, l.count(table, "true"), table)
		}
	}
	instance := l.create("w")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive))
	require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), instance), backend.ErrInstanceNotFinished, "it has begun")
}

// bury makes what opens an execution a dead letter.
func (l *lab) bury() {
	l.t.Helper()
	item, err := l.p.FetchOrchestrationItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{goworkflows.Namespace}})
	require.NoError(l.t, err)
	require.NoError(l.t, l.p.DeadLetterOrchestrationItem(l.within(), item.LockToken, "unreadable", ""))
}

func TestRedrive_WhatOpensItAfterSomethingWasSentToIt_Begins(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	instance := l.create("w")
	l.bury()
	require.NoError(t, l.CancelWorkflowInstance(l.within(), instance, history.NewWorkflowCancellationEvent(time.Now())))
	n, err := l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	task := l.workflowTask()
	require.Len(t, task.NewEvents, 2)
	require.NoError(t, l.complete(task, core.WorkflowInstanceStateFinished))
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), instance))
	require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), instance), backend.ErrInstanceNotFound)
}

// child opens a sub-workflow, and returns the task of its parent's that is told of it.
func (l *lab) child(state core.WorkflowInstanceState) (parent, child *core.WorkflowInstance) {
	l.t.Helper()
	parent = l.create("parent")
	child = core.NewSubWorkflowInstance("child", uuid.NewString(), parent, 1)
	task := l.workflowTask()
	require.NoError(l.t, l.CompleteWorkflowTask(l.within(), task, state, numbered(task, task.NewEvents...), nil, nil,
		[]*history.WorkflowEvent{{WorkflowInstance: child, HistoryEvent: started("w")}}))
	return parent, child
}

func TestRemoveWorkflowInstance_SubWorkflowThatCannotBegin_ItsParentIsTold(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	parent, child := l.child(core.WorkflowInstanceStateActive)
	l.bury()
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), child))
	told := l.workflowTask()
	require.Equal(t, parent, told.WorkflowInstance)
	require.Len(t, told.NewEvents, 1)
	require.Equal(t, history.EventType_SubWorkflowFailed, told.NewEvents[0].Type)
	require.Equal(t, int64(1), told.NewEvents[0].ScheduleEventID)
}

func TestCompleteWorkflowTask_ItsParentWasRemoved_WhatItIsToldIsDropped(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	parent, child := l.child(core.WorkflowInstanceStateFinished)
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), parent))
	task := l.workflowTask()
	require.Equal(t, child.InstanceID, task.WorkflowInstance.InstanceID)
	require.NoError(t, l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateFinished, numbered(task, task.NewEvents...), nil, nil,
		[]*history.WorkflowEvent{{WorkflowInstance: parent, HistoryEvent: history.NewPendingEvent(time.Now(), history.EventType_SubWorkflowCompleted,
			&history.SubWorkflowCompletedAttributes{}, history.ScheduleEventID(1))}}))
	l.create("next")
	require.Equal(t, "next", l.workflowTask().WorkflowInstance.InstanceID)
	require.Zero(t, l.count("orchestrator_queue", "instance_id = 'parent/"+parent.ExecutionID+"'"))
}

func TestRemoveWorkflowInstances_ManyThatHaveTimeLeft_AreNotRead(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	table := pgx.Identifier{l.p.Schema(), "gowf_instances"}.Sanitize()
	_, err := l.p.Pool().Exec(t.Context(), `INSERT INTO `+table+` (instance_id, execution_id, queue, state, completed_at)
		SELECT 'w' || n, '1', 'q', 2, now() FROM generate_series(1, 5000) n`)
	require.NoError(t, err)
	_, err = l.p.Pool().Exec(t.Context(), `ANALYZE `+table)
	require.NoError(t, err)
	tx, err := l.p.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(context.Background())) }()
	require.NoError(t, l.WithTx(tx).RemoveWorkflowInstances(l.within(), backend.RemoveFinishedBefore(time.Now().Add(-time.Hour))))
	var read int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = to_regclass($1)`, table).Scan(&read))
	require.Less(t, read, 100) // the planner looks at the ends of indexes
}

// What is sent to an execution when it has ended is for nobody, and must not come for ever.
func TestSend_AfterTheEnd_IsDropped(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	gone, ended := l.create("gone"), l.create("ended")
	for range 2 {
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished))
	}
	require.NoError(t, client.New(l.Backend).CancelWorkflowInstance(l.within(), ended))
	require.NoError(t, client.New(l.Backend).CancelWorkflowInstance(l.within(), gone))
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), gone))
	next := l.create("next")
	require.Equal(t, next, l.workflowTask().WorkflowInstance)
	require.Equal(t, 1, l.count("orchestrator_queue", "true"), "that of the turn")
	state, err := l.GetWorkflowInstanceState(l.within(), ended)
	require.NoError(t, err)
	require.Equal(t, core.WorkflowInstanceStateFinished, state)
}

func TestWaitForWorkflowInstance_ItEnds_IsTold(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	instance := l.create("w")
	told := make(chan error, 1)
	go func() { told <- l.WaitForWorkflowInstance(l.within(), instance) }()
	require.Eventually(t, func() bool { return l.p.Stats().Waits == 1 }, patience, 10*time.Millisecond)
	other := l.another()
	require.NoError(t, other.complete(other.workflowTask(), core.WorkflowInstanceStateFinished))
	require.NoError(t, <-told)

	require.NoError(t, l.RemoveWorkflowInstance(l.within(), instance))
	require.Equal(t, backend.ErrInstanceNotFound, l.WaitForWorkflowInstance(l.within(), instance))
}

// An execution whose first turn is its last, and removes it, was never there for the Provider.
func TestWaitForWorkflowInstance_RemovedWithItsEnd_IsTold(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil, backend.WithRemoveContinuedAsNewInstances())
	instance := l.create("w")
	told := make(chan error, 1)
	go func() { told <- l.WaitForWorkflowInstance(l.within(), instance) }()
	require.Eventually(t, func() bool { return l.p.Stats().Waits == 1 }, patience, 10*time.Millisecond)
	task := l.workflowTask()
	require.NoError(t, l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateContinuedAsNew, numbered(task, task.NewEvents...), nil, nil,
		[]*history.WorkflowEvent{{WorkflowInstance: core.NewWorkflowInstance("w", uuid.NewString()), HistoryEvent: started("w")}}))
	require.Equal(t, backend.ErrInstanceNotFound, <-told)
}

func TestWaitForWorkflowInstance_ContextEnds_Ends(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	instance := l.create("w")
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan error, 1)
	go func() { told <- l.WaitForWorkflowInstance(ctx, instance) }()
	require.Eventually(t, func() bool { return l.p.Stats().Waits == 1 }, patience, 10*time.Millisecond)
	cancel()
	require.ErrorIs(t, <-told, context.Canceled)
}

func TestGetWorkflowInstances_ManyOfOneInstant_EachOnceOverThePages(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	want := map[string]bool{}
	for _, id := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		want[l.create(id).InstanceID] = true
	}
	_, err := l.p.Pool().Exec(t.Context(), `UPDATE "`+l.p.Schema()+`".gowf_instances SET created_at = '2026-01-01'`)
	require.NoError(t, err)
	got, last := map[string]bool{}, core.NewWorkflowInstance("", "")
	for {
		page, err := l.GetWorkflowInstances(l.within(), last.InstanceID, last.ExecutionID, 3)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, ref := range page {
			require.False(t, got[ref.Instance.InstanceID])
			got[ref.Instance.InstanceID] = true
			last = ref.Instance
		}
	}
	require.Equal(t, want, got)
	page, err := l.GetWorkflowInstances(l.within(), "unknown", "1", 3)
	require.NoError(t, err)
	require.Empty(t, page)
}

func TestGetWorkflowTree_SubWorkflows_AreBelowTheirParents(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.work(func(w *worker.Worker) {
		require.NoError(t, w.RegisterWorkflow(func(workflow.Context) error { return nil }, nameIs("leaf")))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context) error {
			_, err := workflow.CreateSubWorkflowInstance[any](ctx, workflow.SubWorkflowOptions{InstanceID: "leaf"}, "leaf").Get(ctx)
			return err
		}, nameIs("root")))
	})
	root := l.run("root", "root")
	_, err := resultOf[any](l, root)
	require.NoError(t, err)
	tree, err := l.GetWorkflowTree(l.within(), root)
	require.NoError(t, err)
	require.Equal(t, core.WorkflowInstanceStateFinished, tree.State)
	require.Len(t, tree.Children, 1)
	require.Equal(t, "leaf", tree.Children[0].Instance.InstanceID)
	require.Equal(t, "root", tree.Children[0].Instance.Parent.InstanceID)
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), root), "a parent can go before its children")
	require.Equal(t, 1, l.count("gowf_instances", "true"))
}

// Once it is queued, the workflow fails for it, or cannot even do that and has the turn again for ever.
func TestSend_WhatNoHistoryCanHold_IsRefusedAndNothingIsThere(t *testing.T) {
	t.Parallel()
	const most = 10000
	l := newLab(t, &pgwake.Config{MaxPayload: most})
	c := client.New(l.Backend)
	create := func(arg string) error {
		_, err := c.CreateWorkflowInstance(l.within(), client.WorkflowInstanceOptions{InstanceID: uuid.NewString()}, "w", arg)
		return err
	}
	signal := func(arg string) error { return c.SignalWorkflow(l.within(), "w", "s", arg) }
	l.create("w")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive))
	for name, send := range map[string]func(string) error{"create": create, "signal": signal} {
		require.ErrorIs(t, send(strings.Repeat("x", most)), pgwake.ErrPayloadTooLarge, name)
	}
	require.ErrorIs(t, c.SignalWorkflow(l.within(), "w", "\x00", 1), pgwake.ErrInvalid)
	// The first turn writes it down as attributes.
	started := started("w")
	started.Attributes.(*history.ExecutionStartedAttributes).Metadata = &workflow.Metadata{"k": "\x00"}
	require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("v", "1"), started), pgwake.ErrInvalid)
	l.noWorkflowTask()
	require.Equal(t, 1, l.count("gowf_instances", "true"))

	for name, send := range map[string]func(string) error{"create": create, "signal": signal} {
		size := most * 3 / 4 // arguments are in base64
		for send(strings.Repeat("x", size)) != nil {
			size--
		}
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive), name)
	}
	require.Equal(t, 2, l.count("gowf_instances", "state = 0"), "what is just not too large is just not too large for the history either")
}

// As they are once executions expire, each by itself.
func TestGetWorkflowTree_SomeWereRemoved_HasTheOthers(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.work(func(w *worker.Worker) {
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context, below int) error {
			if below == 0 {
				return nil
			}
			_, err := workflow.CreateSubWorkflowInstance[any](ctx, workflow.SubWorkflowOptions{InstanceID: strconv.Itoa(below - 1)}, "w", below-1).Get(ctx)
			return err
		}, nameIs("w")))
	})
	_, err := resultOf[any](l, l.run("2", "w", 2))
	require.NoError(t, err)
	all, err := l.GetWorkflowInstances(l.within(), "", "", 3)
	require.NoError(t, err)
	require.Len(t, all, 3)
	lowest, middle, root := all[0].Instance, all[1].Instance, all[2].Instance

	require.NoError(t, l.RemoveWorkflowInstance(l.within(), lowest))
	tree, err := l.GetWorkflowTree(l.within(), middle)
	require.NoError(t, err)
	require.Equal(t, root.InstanceID, tree.Instance.InstanceID)
	require.Equal(t, lowest.InstanceID, tree.Children[0].Children[0].Instance.InstanceID)
	require.NoError(t, l.RemoveWorkflowInstance(l.within(), root))
	tree, err = l.GetWorkflowTree(l.within(), middle)
	require.NoError(t, err)
	require.Equal(t, middle.InstanceID, tree.Instance.InstanceID)
	_, err = l.GetWorkflowTree(l.within(), root)
	require.Equal(t, backend.ErrInstanceNotFound, err)
}
