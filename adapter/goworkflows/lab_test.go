package goworkflows_test

import (
	"context"
	"log/slog"
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
	"github.com/pgwake/pgwake/adapter/goworkflows/migrations"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the tests have in common?

// patience is far more than anything here should take.
const patience = 30 * time.Second

var silent = slog.New(slog.DiscardHandler)

// lab is a Backend on a schema of its own.
type lab struct {
	*goworkflows.Backend
	t *testing.T
	p *pgwake.Provider
}

// schemas are those of all tests.
var schemas = testschema.With(migrations.Layer())

// newLab makes one whose instances are sticky to nobody, unless an option says otherwise.
func newLab(t *testing.T, config *pgwake.Config, options ...backend.BackendOption) *lab {
	t.Helper()
	return labOn(t, schemas.New(t, config), options...)
}

func labOn(t *testing.T, p *pgwake.Provider, options ...backend.BackendOption) *lab {
	t.Helper()
	b, err := goworkflows.New(t.Context(), p, append([]backend.BackendOption{backend.WithStickyTimeout(0), backend.WithLogger(silent)}, options...)...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return &lab{b, t, p}
}

// another is another process on the same schema, as far as the database can tell.
func (l *lab) another(options ...backend.BackendOption) *lab {
	l.t.Helper()
	return labOn(l.t, pgwaketest.Open(l.t, &pgwake.Config{Schema: l.p.Schema()}), options...)
}

func (l *lab) within() context.Context {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	l.t.Cleanup(cancel)
	return ctx
}

var queues = []workflow.Queue{workflow.QueueDefault, core.QueueSystem}

func started(name string) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_WorkflowExecutionStarted,
		&history.ExecutionStartedAttributes{Queue: workflow.QueueDefault, Name: name, Metadata: &workflow.Metadata{}})
}

// create creates an execution without a worker.
func (l *lab) create(instanceID string) *core.WorkflowInstance {
	l.t.Helper()
	instance := core.NewWorkflowInstance(instanceID, uuid.NewString())
	require.NoError(l.t, l.CreateWorkflowInstance(l.within(), instance, started("w")))
	return instance
}

func (l *lab) workflowTask() *backend.WorkflowTask {
	l.t.Helper()
	task, err := l.GetWorkflowTask(l.within(), queues)
	require.NoError(l.t, err)
	require.NotNil(l.t, task)
	return task
}

func (l *lab) activityTask() *backend.ActivityTask {
	l.t.Helper()
	task, err := l.GetActivityTask(l.within(), queues)
	require.NoError(l.t, err)
	require.NotNil(l.t, task)
	return task
}

// noWorkflowTask asserts that there is none, without waiting for one.
func (l *lab) noWorkflowTask() {
	l.t.Helper()
	s, err := l.GetStats(l.within())
	require.NoError(l.t, err)
	require.Empty(l.t, s.PendingWorkflowTasks)
}

// numbered gives events the numbers that the runtime would.
func numbered(task *backend.WorkflowTask, events ...*history.Event) []*history.Event {
	for i, e := range events {
		e.SequenceID = task.LastSequenceID + int64(i) + 1
	}
	return events
}

// complete completes a task that has come to these events besides those that it is about.
func (l *lab) complete(task *backend.WorkflowTask, state core.WorkflowInstanceState, activities ...*history.Event) error {
	return l.CompleteWorkflowTask(l.within(), task, state, numbered(task, append(task.NewEvents, activities...)...), activities, nil, nil)
}

func activity(id int64) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_ActivityScheduled, &history.ActivityScheduledAttributes{Name: "a"}, history.ScheduleEventID(id))
}

func result(of *backend.ActivityTask) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_ActivityCompleted, &history.ActivityCompletedAttributes{}, history.ScheduleEventID(of.Event.ScheduleEventID))
}

// work runs a worker until the test ends, or stop is called.
func (l *lab) work(register func(w *worker.Worker)) (stop func()) {
	l.t.Helper()
	return l.workOn(l.Backend, register)
}

// workOn is work with what a test has put around the Backend.
func (l *lab) workOn(b backend.Backend, register func(w *worker.Worker)) (stop func()) {
	l.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w := worker.New(b, l.WorkerOptions())
	register(w)
	require.NoError(l.t, w.Start(ctx))
	stopped := false
	stop = func() {
		if cancel(); !stopped {
			stopped = true
			require.NoError(l.t, w.WaitForCompletion())
		}
	}
	l.t.Cleanup(stop)
	return stop
}

// run starts a workflow by its name.
func (l *lab) run(instanceID, name string, args ...any) *workflow.Instance {
	l.t.Helper()
	instance, err := client.New(l.Backend).CreateWorkflowInstance(l.within(), client.WorkflowInstanceOptions{InstanceID: instanceID}, name, args...)
	require.NoError(l.t, err)
	return instance
}

// resultOf waits for the end of a workflow.
func resultOf[T any](l *lab, instance *workflow.Instance) (T, error) {
	l.t.Helper()
	require.NoError(l.t, l.WaitForWorkflowInstance(l.within(), instance))
	return client.GetWorkflowResult[T](l.within(), client.New(l.Backend), instance, patience)
}

// count asks for a number, with {} for the schema.
func (l *lab) count(table, where string) (n int) {
	l.t.Helper()
	require.NoError(l.t, l.p.Pool().QueryRow(l.within(), `SELECT count(*) FROM `+pgx.Identifier{l.p.Schema(), table}.Sanitize()+` WHERE `+where).Scan(&n))
	return n
}

// parked waits until so many Gets wait and none of them looks.
func (l *lab) parked(of func(pgwake.Stats) pgwake.QueueStats, n int) {
	l.t.Helper()
	require.Eventually(l.t, func() bool { s := of(l.p.Stats()); return s.Parked == n && s.Settled }, patience, 10*time.Millisecond)
}

func turns(s pgwake.Stats) pgwake.QueueStats { return s.Orchestrator }
func work(s pgwake.Stats) pgwake.QueueStats  { return s.Worker }
