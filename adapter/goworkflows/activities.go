package goworkflows

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/pgwake/pgwake"
)

// This file answers: how are activities handed out and completed?
//
// An activity is a work item, its queue the tag, and its completion the message that the ack of the item sends.

// PrepareActivityQueues is called when a worker starts. It asks once, and gets nothing.
func (b *Backend) PrepareActivityQueues(ctx context.Context, _ []workflow.Queue) error {
	_, err := b.p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true, Namespaces: []string{Namespace}, Tags: pgwake.Tags(nobodys)})
	return prepared(err)
}

// GetActivityTask waits for an activity in one of the queues, up to pgwake.Config.MaxWait, holding no connection and asking nothing. Nil if none came. The ID
// of the task is the lock token.
func (b *Backend) GetActivityTask(ctx context.Context, queues []workflow.Queue) (*backend.ActivityTask, error) {
	if len(queues) == 0 {
		return nil, errNoQueues
	}
	o := &pgwake.FetchOptions{LockTimeout: b.options.ActivityLockTimeout, Namespaces: []string{Namespace}, Tags: pgwake.Tags(names(queues)...),
		MaxAttempts: b.maxAttempts.activities}
	var task *backend.ActivityTask
	err := b.fetch(ctx, func(ctx context.Context) error {
		for {
			item, err := b.p.FetchWorkItem(ctx, o)
			if err != nil {
				return err
			}
			event, err := decodeEvent(item.Input)
			if err == nil && event.Type != history.EventType_ActivityScheduled {
				err = fmt.Errorf("%v is no activity", event.Type)
			}
			if err == nil {
				task = &backend.ActivityTask{ID: string(item.LockToken), ActivityID: event.ID, Queue: workflow.Queue(item.Tag),
					WorkflowInstance: executionOf(item.Instance), Event: event}
				return nil
			}
			if item.Attempt < readings {
				err = b.p.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Delay: untilNextReading(item.Attempt), Error: err.Error()})
			} else {
				err = b.p.DeadLetterWorkItem(ctx, item.LockToken, unreadable, err.Error())
			}
			if err != nil && !errors.Is(err, pgwake.ErrLockLost) {
				return err
			}
		}
	})
	return task, err
}

// What a worker cannot read, one of a later version may, if both are there while that is rolled out. So it is given back this often, for twice as long each
// time, some eight minutes in all. Then it becomes a dead letter, since it would come again for ever: it is kept, and can be redriven by code that understands it.
const readings = 10

func untilNextReading(attempt int) time.Duration {
	return time.Second << min(max(attempt-1, 0), readings-2)
}

// The reasons of dead letters. The second is the one that the Provider has for work items.
const (
	unreadable  = "unreadable"
	maxAttempts = "max attempts"
)

var errNoQueues = errors.New("no queues to get tasks from")

// ExtendActivityTask makes the lease of an activity end ActivityLockTimeout from now. pgwake.ErrLockLost if it has ended.
func (b *Backend) ExtendActivityTask(ctx context.Context, task *backend.ActivityTask) error {
	return b.renew(ctx, b.options.ActivityLockTimeout, func() error {
		_, err := b.p.RenewWorkItemLock(ctx, pgwake.LockToken(task.ID), b.options.ActivityLockTimeout)
		return err
	})
}

// CompleteActivityTask ends an activity and sends its instance the result, both or neither. pgwake.ErrLockLost if the lease has ended,
// whoever has the activity by now; but a warning in the log, as for CompleteWorkflowTask, if no answer came to an ack. A result that cannot be stored, as it is too large, fails the activity for good.
func (b *Backend) CompleteActivityTask(ctx context.Context, task *backend.ActivityTask, result *history.Event) error {
	err := b.complete(ctx, task, result)
	if !errors.Is(err, pgwake.ErrInvalid) {
		return b.settled(ctx, task.WorkflowInstance, err)
	}
	refused := workflow.NewPermanentError(fmt.Errorf("the result of the activity cannot be stored: %w", err))
	return b.settled(ctx, task.WorkflowInstance, b.complete(ctx, task, history.NewPendingEvent(time.Now(), history.EventType_ActivityFailed,
		&history.ActivityFailedAttributes{Error: asError(refused)}, history.ScheduleEventID(result.ScheduleEventID))))
}

func (b *Backend) complete(ctx context.Context, task *backend.ActivityTask, result *history.Event) error {
	data, err := encodeSent("the result", result, b.p.MaxPayload())
	if err != nil {
		return err
	}
	m := &pgwake.Message{Instance: instanceOf(task.WorkflowInstance), Kind: pgwake.MessageQueued, Data: data}
	return b.settle(ctx, b.options.ActivityLockTimeout, func() error {
		return b.p.AckWorkItem(ctx, pgwake.LockToken(task.ID), m)
	})
}
