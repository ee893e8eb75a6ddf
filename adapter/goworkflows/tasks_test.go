package goworkflows_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
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
	"github.com/cschleiden/go-workflows/registry"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: are tasks handed out at once, to one at a time, and at no cost while there is none?

func nameIs(name string) registry.RegisterOption { return registry.WithName(name) }

func echo(_ context.Context, text string) (string, error) { return text, nil }

// The runtime's own backends know who has a task by the name of the process, and cannot tell its former claim from its present one.
func TestCompleteWorkflowTask_LeaseEndedAndTakenAgain_OnlyTheLatestClaimCan(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	stale := l.workflowTask()
	require.NoError(t, l.ExtendWorkflowTask(l.within(), stale))
	pgwaketest.Advance(t, l.p, l.Options().WorkflowLockTimeout)
	require.ErrorIs(t, l.complete(stale, core.WorkflowInstanceStateActive), pgwake.ErrLockLost, "although nobody has taken it yet")
	fresh := l.workflowTask()
	require.Equal(t, stale.WorkflowInstance, fresh.WorkflowInstance)
	require.ErrorIs(t, l.ExtendWorkflowTask(l.within(), stale), pgwake.ErrLockLost)
	require.ErrorIs(t, l.complete(stale, core.WorkflowInstanceStateFinished, activity(1)), pgwake.ErrLockLost)
	require.NoError(t, l.ExtendWorkflowTask(l.within(), fresh))
	require.NoError(t, l.complete(fresh, core.WorkflowInstanceStateActive, activity(1)))
	require.ErrorIs(t, l.complete(fresh, core.WorkflowInstanceStateActive), pgwake.ErrLockLost, "twice")
	require.Equal(t, 1, l.count("worker_queue", "true"))
	require.Error(t, l.complete(&backend.WorkflowTask{WorkflowInstance: fresh.WorkflowInstance}, core.WorkflowInstanceStateActive), "of somebody else")
}

// So is a turn that creates executions, and takes a transaction.
func TestCompleteWorkflowTask_LeaseEndedAndItCreates_CreatesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	parent := l.create("w")
	stale := l.workflowTask()
	pgwaketest.Advance(t, l.p, l.Options().WorkflowLockTimeout)
	require.ErrorIs(t, l.CompleteWorkflowTask(l.within(), stale, core.WorkflowInstanceStateActive, numbered(stale, stale.NewEvents...), nil, nil,
		[]*history.WorkflowEvent{{WorkflowInstance: core.NewSubWorkflowInstance("sub", uuid.NewString(), parent, 1), HistoryEvent: started("sub")}}), pgwake.ErrLockLost)
	require.Equal(t, 1, l.count("gowf_instances", "true"))
}

func TestCompleteActivityTask_LeaseEndedAndTakenAgain_OnlyTheLatestClaimCan(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
	stale := l.activityTask()
	require.NoError(t, l.ExtendActivityTask(l.within(), stale))
	pgwaketest.Advance(t, l.p, l.Options().ActivityLockTimeout)
	require.ErrorIs(t, l.CompleteActivityTask(l.within(), stale, result(stale)), pgwake.ErrLockLost, "although nobody has taken it yet")
	fresh := l.activityTask()
	require.Equal(t, stale.ActivityID, fresh.ActivityID)
	require.NotEqual(t, stale.ID, fresh.ID)
	require.ErrorIs(t, l.ExtendActivityTask(l.within(), stale), pgwake.ErrLockLost)
	require.ErrorIs(t, l.CompleteActivityTask(l.within(), stale, result(stale)), pgwake.ErrLockLost)
	require.NoError(t, l.ExtendActivityTask(l.within(), fresh))
	require.NoError(t, l.CompleteActivityTask(l.within(), fresh, result(fresh)))
	require.Len(t, l.workflowTask().NewEvents, 1, "one result")
}

func TestGet_NothingToDo_WaitsWithoutAskingUntilItIsTold(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	other := l.another()
	got := make(chan *backend.WorkflowTask, 1)
	go func() {
		task, err := l.GetWorkflowTask(l.within(), queues)
		if err != nil {
			t.Error(err)
		}
		got <- task
	}()
	l.parked(turns, 1)
	before := turns(l.p.Stats())
	instance := other.create("w")
	require.Equal(t, instance, (<-got).WorkflowInstance)
	after := turns(l.p.Stats())
	require.Equal(t, int64(1), after.Finds["notify"]-before.Finds["notify"], "%v", after.Finds)
	require.Zero(t, after.FallbackFinds+after.ScoutFinds)
	require.Equal(t, int64(1), after.Looks-before.Looks, "asked once, and that found it")
}

// Each hop of a workflow is told of, also from one process to another: the periodic statement is a minute away.
func TestWorkflow_WorkersInTwoProcesses_NothingIsFoundByLookingForIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, &pgwake.Config{FallbackInterval: time.Hour})
	other := labOn(t, pgwaketest.Open(t, &pgwake.Config{Schema: l.p.Schema(), FallbackInterval: time.Hour}))
	ctx, cancel := context.WithCancel(context.Background())
	flows, steps := worker.NewWorkflowWorker(l.Backend, &l.WorkerOptions().WorkflowWorkerOptions), worker.NewActivityWorker(other.Backend, &other.WorkerOptions().ActivityWorkerOptions)
	require.NoError(t, flows.RegisterWorkflow(chain, nameIs("chain")))
	require.NoError(t, steps.RegisterActivity(echo))
	for _, w := range []*worker.Worker{flows, steps} {
		require.NoError(t, w.Start(ctx))
	}
	defer func() {
		cancel()
		require.NoError(t, errors.Join(flows.WaitForCompletion(), steps.WaitForCompletion()))
	}()
	l.parked(turns, 2)
	other.parked(work, 2)
	got, err := resultOf[int](l, l.run("w", "chain", 20))
	require.NoError(t, err)
	require.Equal(t, 20, got)
	for _, s := range []pgwake.QueueStats{l.p.Stats().Orchestrator, other.p.Stats().Worker} {
		require.Zero(t, s.FallbackFinds+s.ScoutFinds, "%v", s.Finds)
		require.NotZero(t, s.Finds["notify"])
	}
}

// chain calls activities, one after the other.
func chain(ctx workflow.Context, length int) (int, error) {
	for n := range length {
		if _, err := workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, echo, "x").Get(ctx); err != nil {
			return n, err
		}
	}
	return length, nil
}

func TestGet_FiftyOfThemWaiting_HoldNoConnectionAndEachTaskGoesToOne(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	config.MaxConns = 2
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: schemas.Borrow(t), Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	l := labOn(t, p)
	const n = 25
	got := make(chan string, 2*n)
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if task, err := l.GetWorkflowTask(l.within(), queues); err != nil {
				t.Error(err)
			} else {
				got <- task.WorkflowInstance.InstanceID
			}
		})
		all.Go(func() {
			if task, err := l.GetActivityTask(l.within(), queues); err != nil {
				t.Error(err)
			} else {
				got <- task.WorkflowInstance.InstanceID
			}
		})
	}
	l.parked(turns, n)
	l.parked(work, n)
	require.Zero(t, pool.Stat().AcquiredConns())

	for range n {
		l.create(uuid.NewString())
		<-got
	}
	l.parked(turns, 0)
	l.create("last")
	scheduled := make([]*history.Event, n)
	for i := range scheduled {
		scheduled[i] = activity(int64(i))
	}
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, scheduled...))
	for range n {
		require.Equal(t, "last", <-got)
	}
	all.Wait()
}

func TestClose_GetsThatWait_ReturnAndLaterOnesDoNotSpin(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	returned := make(chan error, 2)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _, err := l.GetWorkflowTask(ctx, queues); returned <- err }()
	go func() { _, err := l.GetActivityTask(ctx, queues); returned <- err }()
	l.parked(turns, 1)
	l.parked(work, 1)
	require.NoError(t, l.Close())
	l.parked(turns, 0)
	l.parked(work, 0)
	require.Empty(t, returned, "a worker would call again at once")
	cancel()
	for range 2 { // each by what it sees first
		err := <-returned
		require.True(t, errors.Is(err, pgwake.ErrClosed) || errors.Is(err, context.Canceled), "%v", err)
	}
	require.NoError(t, l.Close(), "again")
}

func TestGet_ContextEnds_NoTaskAndNothingIsStranded(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	task, err := l.GetWorkflowTask(ctx, queues)
	require.NoError(t, err)
	require.Nil(t, task)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.GetActivityTask(cancelled, queues)
	require.ErrorIs(t, err, context.Canceled, "as workers expect")
	_, err = l.GetWorkflowTask(t.Context(), nil)
	require.Error(t, err)
	_, err = l.GetActivityTask(t.Context(), nil)
	require.Error(t, err)
	l.create("w")
	l.workflowTask()
}

// Whoever starts a worker has the server plan what it will ask, and takes nothing.
func TestPrepare_WorkIsThere_IsLeftAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	require.NoError(t, l.PrepareWorkflowQueues(l.within(), queues))
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
	require.NoError(t, l.PrepareActivityQueues(l.within(), queues))
	l.activityTask()
	require.Equal(t, int64(2), l.p.Stats().Worker.Looks)
	require.NoError(t, l.p.Close(t.Context()))
	require.ErrorIs(t, l.PrepareWorkflowQueues(l.within(), queues), pgwake.ErrClosed)
	require.ErrorIs(t, l.PrepareActivityQueues(l.within(), queues), pgwake.ErrClosed)
}

func TestSticky_TurnsComeToTheWorkerThatHasTheState_UntilItLeaves(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil, backend.WithStickyTimeout(time.Hour), backend.WithWorkerName("one"))
	other := l.another(backend.WithStickyTimeout(time.Hour))
	l.create("w")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive))
	signal := func() { require.NoError(t, client.New(other.Backend).SignalWorkflow(l.within(), "w", "s", 1)) }

	signal()
	_, err := l.p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{goworkflows.Namespace}})
	require.ErrorIs(t, err, pgwake.ErrNoWork, "nobody else gets it")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive))

	got := make(chan *backend.WorkflowTask, 1)
	go func() {
		task, err := other.GetWorkflowTask(other.within(), queues)
		if err != nil {
			t.Error(err)
		}
		got <- task
	}()
	other.parked(turns, 1)
	signal()
	require.NoError(t, l.Close())
	require.Equal(t, "w", (<-got).WorkflowInstance.InstanceID)
}

func TestWorkflow_OthersOnTheProvider_NeitherGetsWhatIsTheOthers(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	_, err := l.p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "theirs", Kind: pgwake.MessageStart, Name: "x", Queue: string(workflow.QueueDefault)}, nil)
	require.NoError(t, err)
	_, err = l.p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Tag: string(workflow.QueueDefault)}, nil)
	require.NoError(t, err)
	l.create("ours")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
	require.Equal(t, "ours", l.activityTask().WorkflowInstance.InstanceID)
	require.NoError(t, client.New(l.Backend).SignalWorkflow(t.Context(), "ours", "s", 1))
	s, err := l.GetStats(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[workflow.Queue]int64{workflow.QueueDefault: 1}, s.PendingWorkflowTasks)
	require.Equal(t, map[workflow.Queue]int64{workflow.QueueDefault: 1}, s.PendingActivityTasks)
	theirs, err := l.p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{pgwake.DefaultNamespace}})
	require.NoError(t, err)
	require.Equal(t, "theirs", theirs.Instance)
	for _, namespace := range []string{goworkflows.Namespace, pgwake.DefaultNamespace} {
		require.Equal(t, 1, l.count("worker_queue", "namespace = '"+namespace+"'"), namespace)
	}
}

// They may be of a role without rights on it.
func TestAck_TheEndOfSomebodyElsesInstance_DoesNotTouchTheTable(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	_, err := l.p.Pool().Exec(t.Context(), `ALTER TABLE `+pgx.Identifier{l.p.Schema(), "gowf_instances"}.Sanitize()+` RENAME TO away`)
	require.NoError(t, err)
	_, err = l.p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "theirs", Kind: pgwake.MessageStart, Name: "x"}, nil)
	require.NoError(t, err)
	item, err := l.p.FetchOrchestrationItem(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, l.p.AckOrchestrationItem(t.Context(), item.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "x", Status: pgwake.StatusCompleted}}))
}

// Code of a later version may be able to, so these are kept, and come again for a while.
func TestGet_WhatCannotBeRead_IsGivenBackOftenThenPutAsideAndTheNextComes(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	in := &pgwake.EnqueueOptions{Namespace: goworkflows.Namespace}
	opening := pgwake.Message{Kind: pgwake.MessageStart, Name: "x", Queue: string(workflow.QueueDefault)}
	for instance, data := range map[string]string{"1/1": `{}`, "2/2": `[]`, "3/3": `{"instance":{},"event":{"t":99}}`, "4/4": `{"instance":{},"event":{}}`, "5/5": `null`} {
		opening.Instance, opening.Data = instance, []byte(data)
		_, err := l.p.EnqueueForOrchestrator(t.Context(), opening, in)
		require.NoError(t, err)
	}
	_, err := l.p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "6/6", Kind: "foreign", Queue: string(workflow.QueueDefault)}, in)
	require.NoError(t, err)
	_, err = l.p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "7/7", Kind: "foreign", Queue: string(workflow.QueueDefault), Data: []byte(`{"t":17,"attr":null}`)}, in)
	require.NoError(t, err)
	for _, input := range []string{"", "null", `{}`, `{"attr":{}}`, `{"from":"elsewhere"}`, `{"t":17,"attr":{}}`} {
		_, err = l.p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Tag: string(workflow.QueueDefault), Input: []byte(input)}, in)
		require.NoError(t, err)
	}
	for reading := 1; reading <= 10; reading++ {
		l.create("w" + strconv.Itoa(reading))
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
		a := l.activityTask()
		require.NoError(t, l.CompleteActivityTask(l.within(), a, result(a)))
		require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished))
		letters, err := l.p.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		if reading < 10 {
			require.Empty(t, letters)
		} else {
			require.Len(t, letters, 13)
		}
		pgwaketest.Advance(t, l.p, 5*time.Minute)
	}
}

// A worker would pause for an error.
func TestGetWorkflowTask_LeaseOfATurnToBeDroppedEnds_TheNextComes(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ended := l.create("ended")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateFinished))
	require.NoError(t, l.CancelWorkflowInstance(l.within(), ended, history.NewWorkflowCancellationEvent(time.Now())))
	in := pgx.Identifier{l.p.Schema()}.Sanitize()
	_, err := l.p.Pool().Exec(l.within(), `CREATE SEQUENCE `+in+`.lost; CREATE FUNCTION `+in+`.lose() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('`+in+`.lost') = 1 THEN
				RAISE EXCEPTION 'lost' USING ERRCODE = 'PW001';
			END IF;
			RETURN OLD;
		END $$; CREATE TRIGGER lose BEFORE DELETE ON `+in+`.orchestrator_queue FOR EACH ROW EXECUTE FUNCTION `+in+`.lose()`)
	require.NoError(t, err)
	l.create("next")
	require.Equal(t, "next", l.workflowTask().WorkflowInstance.InstanceID)
}

// A result, or a decision, that is too large would come again for ever.
func TestWorkflow_PayloadsThatAreTooLarge_FailWhatHasThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, &pgwake.Config{MaxPayload: 10000})
	huge := strings.Repeat("x", 20000)
	l.work(func(w *worker.Worker) {
		require.NoError(t, w.RegisterActivity(echo))
		require.NoError(t, w.RegisterActivity(func(context.Context) (string, error) { return huge, nil }, nameIs("huge")))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context) (string, error) {
			return workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, "huge").Get(ctx)
		}, nameIs("result")))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context) (string, error) {
			return workflow.ExecuteActivity[string](ctx, workflow.DefaultActivityOptions, echo, huge).Get(ctx)
		}, nameIs("argument")))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context) (string, error) {
			return workflow.CreateSubWorkflowInstance[string](ctx, workflow.DefaultSubWorkflowOptions, "argument").Get(ctx)
		}, nameIs("parent")))
	})
	for _, name := range []string{"result", "argument", "parent"} {
		_, err := resultOf[string](l, l.run(name, name))
		require.ErrorContains(t, err, "cannot be stored", name)
		require.ErrorContains(t, err, "payload too large", name)
	}
	l.noWorkflowTask()
	require.Zero(t, l.count("worker_queue", "true"))
}

// unlucky cannot complete every second task, as if the database had been away until their leases had ended.
type unlucky struct {
	*goworkflows.Backend
	completed atomic.Int64
}

func (b *unlucky) CompleteWorkflowTask(ctx context.Context, task *backend.WorkflowTask, state core.WorkflowInstanceState,
	executed, activityEvents, timerEvents []*history.Event, workflowEvents []*history.WorkflowEvent) error {
	if b.completed.Add(1)%2 == 0 {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		ctx = ended
	}
	return b.Backend.CompleteWorkflowTask(ctx, task, state, executed, activityEvents, timerEvents, workflowEvents)
}

// broken has a call wait for the rows of a table, ends its connection after a while, and lets go of them.
func (l *lab) broken(table string, after time.Duration, call func() error) error {
	l.t.Helper()
	return l.brokenBy(`SELECT FROM `+pgx.Identifier{l.p.Schema(), table}.Sanitize()+` FOR UPDATE`, after, call)
}

// brokenBy is broken by a statement that takes effect.
func (l *lab) brokenBy(statement string, after time.Duration, call func() error) error {
	l.t.Helper()
	tx, err := l.p.Pool().Begin(l.t.Context())
	require.NoError(l.t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(l.t.Context())) }()
	_, err = tx.Exec(l.t.Context(), statement)
	require.NoError(l.t, err)
	returned, began := make(chan error, 1), time.Now()
	go func() { returned <- call() }()
	require.Eventually(l.t, func() bool {
		if time.Since(began) < after {
			return false
		}
		tag, err := l.p.Pool().Exec(l.t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND query ~ 'ack_|renew_' AND $1 = ANY (pg_blocking_pids(pid))`, tx.Conn().PgConn().PID())
		return err == nil && tag.RowsAffected() > 0
	}, patience, 10*time.Millisecond)
	require.NoError(l.t, tx.Commit(l.t.Context()))
	return <-returned
}

// A worker takes whatever error for the loss of the lease, and an activity fails whose context ends.
func TestExtend_ConnectionBreaks_IsRepeated(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	task := l.workflowTask()
	require.NoError(t, l.broken("instance_locks", 0, func() error { return l.ExtendWorkflowTask(l.within(), task) }))
	require.NoError(t, l.complete(task, core.WorkflowInstanceStateActive, activity(1)))
	step := l.activityTask()
	require.NoError(t, l.broken("worker_queue", 0, func() error { return l.ExtendActivityTask(l.within(), step) }))
	require.NoError(t, l.CompleteActivityTask(l.within(), step, result(step)))
}

// The first try may have been what ended the lease, so an error would say too much.
func TestComplete_NoAnswerCameAndTheLeaseIsGone_IsAWarning(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := newLab(t, nil, backend.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	taken := func(table string) string {
		return `UPDATE ` + pgx.Identifier{l.p.Schema(), table}.Sanitize() + ` SET lock_token = gen_random_uuid()`
	}
	l.create("w")
	task := l.workflowTask()
	require.NoError(t, l.brokenBy(taken("instance_locks"), 0, func() error { return l.complete(task, core.WorkflowInstanceStateActive, activity(1)) }))
	require.Regexp(t, `level=WARN msg="[^"]*a task is completed, or else its lease was lost.* instance_id=w `, log.String())
	require.ErrorIs(t, l.complete(task, core.WorkflowInstanceStateActive, activity(1)), pgwake.ErrLockLost, "here an answer came")

	l.create("x")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive, activity(1)))
	step := l.activityTask()
	log.Reset()
	require.NoError(t, l.brokenBy(taken("worker_queue"), 0, func() error { return l.CompleteActivityTask(l.within(), step, result(step)) }))
	require.Regexp(t, `level=WARN msg="[^"]*a task is completed, or else its lease was lost.* instance_id=x `, log.String())
	require.ErrorIs(t, l.CompleteActivityTask(l.within(), step, result(step)), pgwake.ErrLockLost, "here an answer came")
	require.NotContains(t, log.String(), "level=ERROR")
}

// The worker that stores them says when they are due, by its own clock.
func TestCompleteWorkflowTask_DatabaseIsAwayForAWhile_TimersAreNoLaterForIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.create("w")
	task := l.workflowTask()
	at := time.Now().Add(time.Hour)
	timer := history.NewPendingEvent(time.Now(), history.EventType_TimerFired, &history.TimerFiredAttributes{At: at}, history.ScheduleEventID(1), history.VisibleAt(at))
	const away = 2 * time.Second
	require.NoError(t, l.broken("instance_locks", away, func() error {
		return l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateActive, numbered(task, task.NewEvents...), nil, []*history.Event{timer}, nil)
	}))
	var due time.Time
	require.NoError(t, l.p.Pool().QueryRow(l.within(), `SELECT visible_at FROM `+pgx.Identifier{l.p.Schema(), "orchestrator_queue"}.Sanitize()).Scan(&due))
	require.Less(t, due.Sub(at), away)
}

// The worker's own state is ahead then, and it must not be what the next task is refused for.
func TestWorkflow_TasksCannotBeCompletedInTime_GoOnAfterwards(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil, backend.WithWorkflowLockTimeout(time.Second))
	b := &unlucky{Backend: l.Backend}
	l.workOn(b, func(w *worker.Worker) {
		require.NoError(t, w.RegisterActivity(echo))
		require.NoError(t, w.RegisterWorkflow(chain, nameIs("chain")))
	})
	got, err := resultOf[int](l, l.run("w", "chain", 2))
	require.NoError(t, err)
	require.Equal(t, 2, got)
	require.Greater(t, b.completed.Load(), int64(3), "some were lost")
}

func TestWorkflow_ConnectionsAreKilledAllTheTime_AllComplete(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second // what was claimed, and the answer was lost, comes again
	l := newLab(t, nil, backend.WithWorkflowLockTimeout(lease), backend.WithActivityLockTimeout(lease))
	l.work(func(w *worker.Worker) {
		require.NoError(t, w.RegisterActivity(echo))
		require.NoError(t, w.RegisterWorkflow(chain, nameIs("chain")))
		require.NoError(t, w.RegisterWorkflow(func(ctx workflow.Context, length int) (int, error) {
			return workflow.CreateSubWorkflowInstance[int](ctx, workflow.DefaultSubWorkflowOptions, "chain", length).Get(ctx)
		}, nameIs("parent")))
	})
	var instances []*workflow.Instance
	for range 10 {
		instances = append(instances, l.run(uuid.NewString(), "parent", 10))
	}
	// So many that each hop loses some, and not for ever: on a machine on which a hop takes longer than the pause, none would get through.
	const enough = 100
	killer := pgwaketest.Open(t, &pgwake.Config{Schema: l.p.Schema()})
	done := make(chan struct{})
	var killing sync.WaitGroup
	killed := int64(0)
	killing.Go(func() {
		every := time.NewTicker(100 * time.Millisecond)
		defer every.Stop()
		for killed < enough {
			select {
			case <-done:
				return
			case <-every.C:
				tag, err := killer.Pool().Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE pid <> pg_backend_pid() AND query LIKE '%"' || $1 || '".%' AND (query LIKE '%ack\_%' OR query LIKE '%gowf\_create%')`, l.p.Schema())
				if err != nil {
					t.Error(err)
				}
				killed += tag.RowsAffected()
			}
		}
	})
	stop := sync.OnceFunc(func() {
		close(done)
		killing.Wait()
	})
	defer stop()
	for _, instance := range instances {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		for l.WaitForWorkflowInstance(ctx, instance) != nil && ctx.Err() == nil {
		}
		require.NoError(t, ctx.Err())
		cancel()
	}
	stop()
	t.Log("killed:", killed)
	require.NotZero(t, killed)
	for _, instance := range instances {
		got, err := resultOf[int](l, instance)
		require.NoError(t, err)
		require.Equal(t, 10, got)
	}
}
