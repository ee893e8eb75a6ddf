package goworkflows_test

import (
	"strings"
	"testing"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/client"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/goworkflows"
	"github.com/pgwake/pgwake/internal/hostile"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of texts that workflows and their callers choose, whatever they say? They come back byte for byte, or are refused.

const (
	run          = "018f4e5a-0000-7000-8000-000000000001" // an execution id
	longestID    = 255 - len("#-9223372036854775808") - len("/") - len(run)
	longestQueue = pgwake.MaxNameLength
)

// named is a workflow that begins with these texts as its name, its queue and its metadata.
func named(text string) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_WorkflowExecutionStarted,
		&history.ExecutionStartedAttributes{Queue: workflow.Queue(text), Name: text, Metadata: &workflow.Metadata{text: text}})
}

func signalled(text string) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_SignalReceived, &history.SignalReceivedAttributes{Name: text})
}

func scheduled(id int64, name, queue string) *history.Event {
	return history.NewPendingEvent(time.Now(), history.EventType_ActivityScheduled, &history.ActivityScheduledAttributes{Name: name, Queue: workflow.Queue(queue)}, history.ScheduleEventID(id))
}

func TestTexts_OfWorkflows_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	c := client.New(l.Backend)
	names := hostile.Texts(longestQueue)
	for i, id := range hostile.Texts(longestID) {
		text := names[i]
		instance := core.NewWorkflowInstance(id, run)
		require.NoError(t, l.CreateWorkflowInstance(l.within(), instance, named(text)), "%q", text)
		require.Equal(t, backend.ErrInstanceAlreadyExists, l.CreateWorkflowInstance(l.within(), instance, named(text)))
		require.NoError(t, c.SignalWorkflow(l.within(), id, text, 1))
	}
	for i, id := range hostile.Texts(longestID) {
		text := names[i]
		task, err := l.GetWorkflowTask(l.within(), []workflow.Queue{workflow.Queue(text)})
		require.NoError(t, err)
		require.NotNil(t, task, "%q", text)
		require.Equal(t, core.NewWorkflowInstance(id, run), task.WorkflowInstance)
		require.Equal(t, workflow.Queue(text), task.Queue)
		require.Equal(t, &workflow.Metadata{text: text}, task.Metadata)
		require.Equal(t, text, task.NewEvents[0].Attributes.(*history.ExecutionStartedAttributes).Name)
		require.Equal(t, text, task.NewEvents[1].Attributes.(*history.SignalReceivedAttributes).Name)
		require.NoError(t, l.complete(task, core.WorkflowInstanceStateActive, scheduled(7, text, text)))

		activity, err := l.GetActivityTask(l.within(), []workflow.Queue{workflow.Queue(text)})
		require.NoError(t, err)
		require.NotNil(t, activity, "%q", text)
		require.Equal(t, []any{id, workflow.Queue(text), text}, []any{activity.WorkflowInstance.InstanceID, activity.Queue, activity.Event.Attributes.(*history.ActivityScheduledAttributes).Name})
		require.NoError(t, l.CompleteActivityTask(l.within(), activity, result(activity)))
		task, err = l.GetWorkflowTask(l.within(), []workflow.Queue{workflow.Queue(text)})
		require.NoError(t, err)
		require.Equal(t, id, task.WorkflowInstance.InstanceID)
		require.NoError(t, l.complete(task, core.WorkflowInstanceStateFinished))

		past, err := l.GetWorkflowInstanceHistory(l.within(), task.WorkflowInstance, nil)
		require.NoError(t, err)
		require.Equal(t, []string{text, text, text}, []string{past[0].Attributes.(*history.ExecutionStartedAttributes).Name,
			past[1].Attributes.(*history.SignalReceivedAttributes).Name, past[2].Attributes.(*history.ActivityScheduledAttributes).Name})
		ref, err := l.GetWorkflowInstance(l.within(), task.WorkflowInstance)
		require.NoError(t, err)
		require.Equal(t, []any{task.WorkflowInstance, text, core.WorkflowInstanceStateFinished}, []any{ref.Instance, ref.Queue, ref.State})
		tree, err := l.GetWorkflowTree(l.within(), task.WorkflowInstance)
		require.NoError(t, err)
		require.Equal(t, text, tree.WorkflowName)
		require.NoError(t, l.RemoveWorkflowInstance(l.within(), task.WorkflowInstance))
		_, err = l.GetWorkflowInstanceState(l.within(), task.WorkflowInstance)
		require.Equal(t, backend.ErrInstanceNotFound, err)
	}
	require.Zero(t, l.count("gowf_instances", "true"))
	require.Zero(t, l.count("worker_queue", "true")+l.count("orchestrator_queue", "true"))
}

func TestTexts_OfWorkflows_ThatNoTextCanBe_AreRefusedAndNothingIsThere(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	c := client.New(l.Backend)
	there := l.create("there")
	require.NoError(t, l.complete(l.workflowTask(), core.WorkflowInstanceStateActive))
	for why, text := range hostile.Refused(longestID) {
		instance := core.NewWorkflowInstance(text, run)
		require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), instance, started("w")), pgwake.ErrInvalid, why)
	}
	for why, text := range hostile.Refused(pgwake.MaxNameLength) {
		begun := started(text)
		require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("name", run), begun), pgwake.ErrInvalid, why)
		begun = started("w")
		begun.Attributes.(*history.ExecutionStartedAttributes).Queue = workflow.Queue(text)
		require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("queue", run), begun), pgwake.ErrInvalid, why)
		_, err := goworkflows.New(t.Context(), l.p, backend.WithWorkerName(text))
		require.ErrorIs(t, err, pgwake.ErrConfig, why)
	}
	for why, text := range hostile.NoTexts {
		instance := core.NewWorkflowInstance(text, run)
		require.ErrorIs(t, c.SignalWorkflow(l.within(), text, "s", 1), pgwake.ErrInvalid, why)
		require.ErrorIs(t, c.SignalWorkflow(l.within(), "there", text, 1), pgwake.ErrInvalid, "signal, %s", why)
		_, err := l.GetWorkflowInstanceState(l.within(), instance)
		require.ErrorIs(t, err, pgwake.ErrInvalid, why)
		_, err = l.GetWorkflowInstance(l.within(), instance)
		require.ErrorIs(t, err, pgwake.ErrInvalid, why)
		require.ErrorIs(t, l.RemoveWorkflowInstance(l.within(), instance), pgwake.ErrInvalid, why)
		for _, m := range []workflow.Metadata{{text: "x"}, {"x": text}} {
			begun := started("w")
			begun.Attributes.(*history.ExecutionStartedAttributes).Metadata = &m
			require.ErrorIs(t, l.CreateWorkflowInstance(l.within(), core.NewWorkflowInstance("metadata", run), begun), pgwake.ErrInvalid, "metadata, %s", why)
		}
	}
	l.noWorkflowTask()
	require.Equal(t, 1, l.count("gowf_instances", "true"))
	state, err := l.GetWorkflowInstanceState(l.within(), there)
	require.NoError(t, err)
	require.Equal(t, core.WorkflowInstanceStateActive, state)
}

// It would decide the same again, for ever.
func TestTexts_OfDecisions_ThatNoTextCanBe_FailTheWorkflow(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	decide := func(why string, complete func(task *backend.WorkflowTask) error) {
		instance := l.create(why)
		require.NoError(t, complete(l.workflowTask()), why)
		past, err := l.GetWorkflowInstanceHistory(l.within(), instance, nil)
		require.NoError(t, err)
		end, ok := past[len(past)-1].Attributes.(*history.ExecutionCompletedAttributes)
		require.True(t, ok, why)
		require.Contains(t, end.Error.Error(), "what the workflow decided cannot be stored", why)
		require.True(t, hostile.IsLine(strings.ReplaceAll(end.Error.Error(), "\n", "")), "%q", end.Error)
	}
	for why, text := range hostile.NoTexts {
		decide("activity, "+why, func(task *backend.WorkflowTask) error {
			return l.complete(task, core.WorkflowInstanceStateActive, scheduled(1, text, ""))
		})
		decide("activity's queue, "+why, func(task *backend.WorkflowTask) error {
			return l.complete(task, core.WorkflowInstanceStateActive, scheduled(1, "a", text))
		})
		decide("signal, "+why, func(task *backend.WorkflowTask) error {
			return l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateActive, numbered(task, task.NewEvents...), nil, nil,
				[]*history.WorkflowEvent{{WorkflowInstance: core.NewWorkflowInstance("other", run), HistoryEvent: signalled(text)}})
		})
		decide("sub-workflow, "+why, func(task *backend.WorkflowTask) error {
			return l.CompleteWorkflowTask(l.within(), task, core.WorkflowInstanceStateActive, numbered(task, task.NewEvents...), nil, nil,
				[]*history.WorkflowEvent{{WorkflowInstance: core.NewSubWorkflowInstance("sub", run, task.WorkflowInstance, 1), HistoryEvent: started(text)}})
		})
	}
	require.Zero(t, l.count("worker_queue", "true")+l.count("orchestrator_queue", "true"))
}
