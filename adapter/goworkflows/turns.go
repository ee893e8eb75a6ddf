package goworkflows

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/backend/metadata"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/jsonvalue"
)

// This file answers: how are workflow tasks handed out?
//
// A task is a turn: one execution under its lock, with the events that have come.

// turn is what a task has as its CustomData.
type turn struct {
	token pgwake.LockToken
	about description
	name  string // of the workflow, if this is the first turn; its ack says who the instance is
}

// PrepareWorkflowQueues is called when a worker starts. It asks once, and gets nothing.
func (b *Backend) PrepareWorkflowQueues(ctx context.Context, _ []workflow.Queue) error {
	_, err := b.p.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{NoWait: true, Namespaces: []string{Namespace}, Queues: []string{nobodys}, WithoutHistory: true})
	return prepared(err)
}

// GetWorkflowTask waits for an execution with new events in one of the queues, up to pgwake.Config.MaxWait, holding no connection and asking nothing. Nil
// if none came.
func (b *Backend) GetWorkflowTask(ctx context.Context, queues []workflow.Queue) (*backend.WorkflowTask, error) {
	if len(queues) == 0 {
		return nil, errNoQueues
	}
	o := &pgwake.FetchOptions{LockTimeout: b.options.WorkflowLockTimeout, Namespaces: []string{Namespace}, Queues: names(queues), WithoutHistory: true}
	if b.options.StickyTimeout > 0 {
		o.Owner = b.owner
	}
	var task *backend.WorkflowTask
	err := b.fetch(ctx, func(ctx context.Context) error {
		for {
			item, err := b.p.FetchOrchestrationItem(ctx, o)
			if err != nil {
				return err
			}
			t, err := taskOf(item)
			switch {
			case err != nil && item.Attempt < readings:
				err = b.p.AbandonOrchestrationItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: untilNextReading(item.Attempt)})
			case err != nil:
				err = b.p.DeadLetterOrchestrationItem(ctx, item.LockToken, unreadable, err.Error())
			case t.WorkflowInstanceState != core.WorkflowInstanceStateActive: // what comes after the end is dropped
				err = b.p.AckOrchestrationItem(ctx, item.LockToken, pgwake.OrchestrationAck{})
			case b.maxAttempts.turns > 0 && item.Attempt > b.maxAttempts.turns:
				err = b.p.DeadLetterOrchestrationItem(ctx, item.LockToken, maxAttempts, noAttemptEnded)
			default:
				task = t
				return nil
			}
			if err != nil && !errors.Is(err, pgwake.ErrLockLost) { // what is lost is somebody else's by now
				return err
			}
		}
	})
	return task, err
}

const noAttemptEnded = "no worker has completed the turn"

// taskOf is the task of a turn. Invariant: it has what this backend or the runtime sends to a workflow, and in an order that the runtime knows, or else
// the worker would panic: the opening is first, and there is none in any later turn.
func taskOf(item *pgwake.OrchestrationItem) (*backend.WorkflowTask, error) {
	t := &turn{token: item.LockToken}
	known := item.Attributes != nil
	if known {
		if err := jsonvalue.Unmarshal(item.Attributes, &t.about); err != nil {
			return nil, fmt.Errorf("read the attributes: %w", err)
		}
	}
	events, opened := make([]*history.Event, 0, len(item.Messages)), known
	for i := range item.Messages {
		m := &item.Messages[i]
		if m.Kind == pgwake.MessageContinueAsNew {
			return nil, errAnother
		}
		if m.Kind != pgwake.MessageStart {
			event, err := decodeEvent(m.Data)
			if err != nil {
				return nil, err
			}
			if !sent(event.Type) {
				return nil, fmt.Errorf("nobody sends %v to a workflow", event.Type)
			}
			events = append(events, event)
			continue
		}
		var first opening
		if err := jsonvalue.Unmarshal(m.Data, &first); err != nil {
			return nil, fmt.Errorf("read the opening: %w", err)
		}
		if first.Event.Event == nil || first.Instance == nil {
			return nil, errNoOpening
		}
		a, ok := first.Event.Attributes.(*history.ExecutionStartedAttributes)
		if !ok {
			return nil, errNoOpening
		}
		switch {
		case opened:
			return nil, errors.New("the instance is open already")
		case instanceOf(first.Instance) != item.Instance:
			return nil, errors.New("the message is to open another instance")
		}
		opened = true
		events = slices.Insert(events, 0, first.Event.Event) // whoever sent both by SQL may have sent a signal before
		t.name, t.about = m.Name, description{Instance: first.Instance, Metadata: a.Metadata}
	}
	switch {
	case t.about.Instance == nil:
		return nil, errors.New("nothing has opened the instance")
	case item.ExecutionID != execution:
		return nil, errAnother
	}
	if t.about.Metadata == nil {
		t.about.Metadata = &metadata.WorkflowMetadata{}
	}
	return &backend.WorkflowTask{
		ID:                    t.about.Instance.InstanceID,
		Queue:                 workflow.Queue(item.Queue),
		WorkflowInstance:      t.about.Instance,
		WorkflowInstanceState: t.about.State,
		Metadata:              t.about.Metadata,
		LastSequenceID:        item.LastEventID,
		NewEvents:             events,
		CustomData:            t,
	}, nil
}

// sent reports whether events of a type come to a workflow from elsewhere, other than its opening: from clients, other workflows, activities and timers.
// All others it writes into its history by itself, and would take for what it has done before.
func sent(t history.EventType) bool {
	switch t {
	case history.EventType_SignalReceived, history.EventType_WorkflowExecutionCanceled, history.EventType_TimerFired,
		history.EventType_ActivityCompleted, history.EventType_ActivityFailed,
		history.EventType_SubWorkflowCompleted, history.EventType_SubWorkflowFailed:
		return true
	}
	return false
}

var errNoOpening = errors.New("the message that opens the instance is not of this backend")

var errAnother = errors.New("a message opens another execution of the instance, which has one")

var errForeign = errors.New("the task is from another backend")

// ExtendWorkflowTask makes the lease of a task end WorkflowLockTimeout from now. pgwake.ErrLockLost if it has ended.
func (b *Backend) ExtendWorkflowTask(ctx context.Context, task *backend.WorkflowTask) error {
	t, ok := task.CustomData.(*turn)
	if !ok {
		return errForeign
	}
	return b.renew(ctx, b.options.WorkflowLockTimeout, func() error {
		_, err := b.p.RenewOrchestrationItemLock(ctx, t.token, b.options.WorkflowLockTimeout)
		return err
	})
}

// CompleteWorkflowTask stores what a task has come to, all or nothing: in one round trip, or in a transaction if it creates executions. pgwake.ErrLockLost
// if the lease has ended, whoever has the execution by now; but if no answer came to an ack, and a repeated one finds no lease, nobody knows which of the
// two has ended it: the log has a warning then, and there is no error. A workflow that decides what cannot be stored, such as an activity whose arguments are too
// large, has failed: it would decide the same again for ever.
func (b *Backend) CompleteWorkflowTask(ctx context.Context, task *backend.WorkflowTask, state core.WorkflowInstanceState,
	executed, activityEvents, timerEvents []*history.Event, workflowEvents []*history.WorkflowEvent) error {
	t, ok := task.CustomData.(*turn)
	if !ok {
		return errForeign
	}
	err := b.completeTurn(ctx, task, t, state, executed, activityEvents, timerEvents, workflowEvents)
	if errors.Is(err, pgwake.ErrInvalid) {
		executed, workflowEvents = failure(task, fmt.Errorf("what the workflow decided cannot be stored: %w", err))
		b.forget(ctx, task.WorkflowInstance)
		err = b.completeTurn(ctx, task, t, core.WorkflowInstanceStateFinished, executed, nil, nil, workflowEvents)
	}
	if err != nil {
		b.forget(ctx, task.WorkflowInstance)
	}
	return b.settled(ctx, task.WorkflowInstance, err)
}

func (b *Backend) completeTurn(ctx context.Context, task *backend.WorkflowTask, t *turn, state core.WorkflowInstanceState,
	executed, activityEvents, timerEvents []*history.Event, workflowEvents []*history.WorkflowEvent) error {
	return b.settle(ctx, b.options.WorkflowLockTimeout, func() error {
		d, err := b.decide(task, t, state, executed, activityEvents, timerEvents, workflowEvents) // anew, as timers have less time left
		if err != nil {
			return err
		}
		return b.ack(ctx, t, d)
	})
}

// failure is what a workflow that has failed comes to.
func failure(task *backend.WorkflowTask, reason error) (executed []*history.Event, workflowEvents []*history.WorkflowEvent) {
	now, cause := time.Now(), asError(workflow.NewPermanentError(reason))
	executed = []*history.Event{history.NewHistoryEvent(task.LastSequenceID+1, now, history.EventType_WorkflowExecutionFinished,
		&history.ExecutionCompletedAttributes{Error: cause})}
	if w := task.WorkflowInstance; w.SubWorkflow() {
		workflowEvents = append(workflowEvents, &history.WorkflowEvent{WorkflowInstance: w.Parent, HistoryEvent: history.NewPendingEvent(now,
			history.EventType_SubWorkflowFailed, &history.SubWorkflowFailedAttributes{Error: cause}, history.ScheduleEventID(w.ParentEventID))})
	}
	return executed, workflowEvents
}
