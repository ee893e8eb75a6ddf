package goworkflows

import (
	"context"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
)

// This file answers: what does a completed task change, and in which order?

// decision is what a task has come to.
type decision struct {
	ack     pgwake.OrchestrationAck
	created creation
	targets []target                // of created
	later   []pgwake.MessageEnqueue // for what is created

	continues *string // this execution ends with created
	remove    bool    // and goes at once

	queue      string // of this execution
	maxPayload int
}

// target is an execution that is created, as whoever creates it knows it.
type target struct {
	instance string
	eventID  int64
}

// decide turns what the runtime says into what the Provider is told.
func (b *Backend) decide(task *backend.WorkflowTask, t *turn, state core.WorkflowInstanceState,
	executed, activityEvents, timerEvents []*history.Event, workflowEvents []*history.WorkflowEvent) (*decision, error) {
	self := instanceOf(task.WorkflowInstance)
	d := &decision{ack: pgwake.OrchestrationAck{ExecutionID: execution}, queue: string(task.Queue), maxPayload: b.p.MaxPayload()}
	if err := d.describe(t, state); err != nil {
		return nil, err
	}
	switch {
	case state == core.WorkflowInstanceStateContinuedAsNew:
		d.continues, d.remove = &self, b.options.RemoveContinuedAsNewInstances
	case state == core.WorkflowInstanceStateActive && b.options.StickyTimeout > 0:
		d.ack.Sticky = &pgwake.Sticky{Owner: b.owner, For: b.options.StickyTimeout}
	}
	cancelled := map[int64]bool{}
	for _, e := range executed {
		if e.Type == history.EventType_TimerCanceled {
			cancelled[e.ScheduleEventID] = true
			d.ack.CancelMessages = append(d.ack.CancelMessages, timerKey(self, e.ScheduleEventID))
		}
		data, err := encode(e)
		if err != nil {
			return nil, err
		}
		d.ack.History = append(d.ack.History, pgwake.Event{ID: e.SequenceID, Type: e.Type.String(), Data: data})
	}
	for _, e := range activityEvents {
		if err := d.schedule(self, task.Queue, e); err != nil {
			return nil, err
		}
	}
	for _, e := range timerEvents {
		if cancelled[e.ScheduleEventID] {
			continue
		}
		m, err := d.event(self, e)
		if err != nil {
			return nil, err
		}
		m.DedupKey = timerKey(self, e.ScheduleEventID)
		if e.VisibleAt != nil {
			m.Delay = min(max(time.Until(*e.VisibleAt), 0), maxDelay) // the server's clock may be another
		}
		d.ack.Messages = append(d.ack.Messages, m)
	}
	return d, d.send(task.Queue, workflowEvents)
}

// maxDelay is the longest that the Provider has.
const maxDelay = 100 * 365 * 24 * time.Hour

// describe says who the instance is in its first turn, and how it ended in its last.
func (d *decision) describe(t *turn, state core.WorkflowInstanceState) (err error) {
	d.ack.Metadata.Name = t.name
	if state != core.WorkflowInstanceStateActive {
		d.ack.Metadata.Status = pgwake.StatusCompleted
	}
	if t.name != "" || state != core.WorkflowInstanceStateActive {
		about := t.about
		about.State = state
		d.ack.Metadata.Attributes, err = encode(about)
	}
	return err
}

// schedule adds an activity.
func (d *decision) schedule(self string, otherwise workflow.Queue, e *history.Event) error {
	a := e.Attributes.(*history.ActivityScheduledAttributes)
	queue := a.Queue
	if queue == "" {
		queue = otherwise
	}
	data, err := encode(e)
	d.ack.WorkItems = append(d.ack.WorkItems, pgwake.WorkEnqueue{
		WorkItem: pgwake.WorkItem{Name: nameOf(a.Name), Input: data, Tag: string(queue), Instance: self, ExecutionID: execution,
			ActivityID: e.ScheduleEventID},
		EnqueueOptions: pgwake.EnqueueOptions{Namespace: Namespace},
	})
	return err
}

// send adds the events for other executions, and those that are to be created.
func (d *decision) send(otherwise workflow.Queue, events []*history.WorkflowEvent) error {
	opened := map[string]bool{}
	for _, e := range events {
		instance := instanceOf(e.WorkflowInstance)
		if a, opens := e.HistoryEvent.Attributes.(*history.ExecutionStartedAttributes); opens {
			if err := d.created.add(e.WorkflowInstance, a, e.HistoryEvent, otherwise, d.maxPayload); err != nil {
				return err
			}
			opened[instance] = true
			d.targets = append(d.targets, target{instance, e.WorkflowInstance.ParentEventID})
			continue
		}
		m, err := d.event(instance, e.HistoryEvent)
		if err != nil {
			return err
		}
		if opened[instance] {
			d.later = append(d.later, m) // after the message that opens it
		} else {
			d.ack.Messages = append(d.ack.Messages, m)
		}
	}
	return nil
}

// event is an event as a message: for an execution that there is, and nobody is told if not. Then it is where the workers of this execution drop it.
func (d *decision) event(instance string, e *history.Event) (pgwake.MessageEnqueue, error) {
	data, err := encodeSent("an event", e, d.maxPayload)
	return pgwake.MessageEnqueue{
		Message:        pgwake.Message{Instance: instance, Kind: pgwake.MessageQueued, Data: data, Queue: d.queue},
		EnqueueOptions: pgwake.EnqueueOptions{Namespace: Namespace},
	}, err
}

// ack carries the decision out.
func (b *Backend) ack(ctx context.Context, t *turn, d *decision) error {
	if len(d.targets) == 0 {
		return b.p.AckOrchestrationItem(ctx, t.token, d.ack)
	}
	err := pgx.BeginTxFunc(ctx, conns.Transactions{Pool: b.p.Pool()}, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		return b.ackTx(ctx, tx, t, d)
	})
	return pgwake.WrapError("complete workflow task", err)
}

// The order of locks is that of a deletion: the instance, then its row in gowf_instances.
func (b *Backend) ackTx(ctx context.Context, tx pgx.Tx, t *turn, d *decision) error {
	if err := b.p.AckOrchestrationItemTx(ctx, tx, t.token, d.ack); err != nil {
		return err
	}
	var created []bool
	err := b.p.DoTx(ctx, tx, "create sub-workflow instances", func(ctx context.Context, q pgwake.Querier) (err error) {
		created, err = d.created.send(ctx, q, b.in, d.continues)
		return err
	})
	if err != nil {
		return err
	}
	later, err := d.afterwards(t.about.Instance, created)
	if err != nil {
		return err
	}
	if len(later) > 0 {
		if _, err := b.p.EnqueueForOrchestratorManyTx(ctx, tx, later); err != nil {
			return err
		}
	}
	if d.remove {
		_, err = b.p.DeleteInstanceTx(ctx, tx, instanceOf(t.about.Instance), nil)
	}
	return err
}

// afterwards returns what remains to be sent. An execution that could not be created, as another one of its instance id is active, is a
// sub-workflow that has failed, and what was for it is dropped.
func (d *decision) afterwards(self *core.WorkflowInstance, created []bool) ([]pgwake.MessageEnqueue, error) {
	var later []pgwake.MessageEnqueue
	refused := map[string]bool{}
	for i, of := range d.targets {
		if created[i] {
			continue
		}
		refused[of.instance] = true
		m, err := d.event(instanceOf(self), history.NewPendingEvent(time.Now(), history.EventType_SubWorkflowFailed,
			&history.SubWorkflowFailedAttributes{Error: asError(backend.ErrInstanceAlreadyExists)}, history.ScheduleEventID(of.eventID)))
		if err != nil {
			return nil, err
		}
		later = append(later, m)
	}
	for _, m := range d.later {
		if !refused[m.Instance] {
			later = append(later, m)
		}
	}
	return later, nil
}
