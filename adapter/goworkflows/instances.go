package goworkflows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/backend/history"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how do instances begin, hear of things from outside, and go?

// CreateWorkflowInstance creates an execution, for which it needs one round trip. backend.ErrInstanceAlreadyExists if one of the same instance id is
// active; pgwake.ErrInvalid for ids that are too long, together some 230 bytes, for an execution id with a slash, or for names or arguments that cannot be stored.
func (b *Backend) CreateWorkflowInstance(ctx context.Context, instance *workflow.Instance, event *history.Event) error {
	a, ok := event.Attributes.(*history.ExecutionStartedAttributes)
	if !ok {
		return fmt.Errorf("%w: an instance begins with an event that is no %v", pgwake.ErrInvalid, history.EventType_WorkflowExecutionStarted)
	}
	var c creation
	if err := c.add(instance, a, event, workflow.QueueDefault, b.p.MaxPayload()); err != nil {
		return err
	}
	var created []bool
	err := b.do(ctx, "create workflow instance", func(ctx context.Context, q pgwake.Querier) (err error) {
		created, err = c.send(ctx, q, b.in, nil)
		return err
	}, pgwake.Orchestrator)
	if err == nil && !created[0] {
		return backend.ErrInstanceAlreadyExists
	}
	return err
}

// creation are executions to be created, as the arrays that gowf_create takes.
type creation struct {
	instanceIDs, executionIDs   []string
	parentInstances, parentRuns []*string
	parentEvents                []*int64
	names, queues, datas        []string
}

func (c *creation) add(instance *core.WorkflowInstance, a *history.ExecutionStartedAttributes, event *history.Event, otherwise workflow.Queue, maxPayload int) error {
	if err := checkInstance(instance); err != nil {
		return err
	}
	queue := a.Queue
	if queue == "" {
		queue = otherwise
	}
	data, err := encodeSent("what opens an instance", opening{withoutAncestors(instance), openingEvent{event}}, maxPayload)
	if err != nil {
		return err
	}
	c.instanceIDs = append(c.instanceIDs, instance.InstanceID)
	c.executionIDs = append(c.executionIDs, instance.ExecutionID)
	var parent, run *string
	var at *int64
	if p := instance.Parent; p != nil {
		parent, run, at = &p.InstanceID, &p.ExecutionID, &instance.ParentEventID
	}
	c.parentInstances, c.parentRuns, c.parentEvents = append(c.parentInstances, parent), append(c.parentRuns, run), append(c.parentEvents, at)
	c.names, c.queues, c.datas = append(c.names, nameOf(a.Name)), append(c.queues, string(queue)), append(c.datas, string(data))
	return nil
}

// send creates them, and reports of each whether that was possible. The instance continues is ended by it.
func (c *creation) send(ctx context.Context, q pgwake.Querier, in string, continues *string) (created []bool, err error) {
	err = q.QueryRow(ctx, `SELECT `+in+`gowf_create($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`, c.instanceIDs, c.executionIDs,
		c.parentInstances, c.parentRuns, c.parentEvents, c.names, c.queues, c.datas, Namespace, continues).Scan(&created)
	return created, err
}

// CancelWorkflowInstance sends the execution the event. backend.ErrInstanceNotFound if there is no such execution.
func (b *Backend) CancelWorkflowInstance(ctx context.Context, instance *workflow.Instance, cancelEvent *history.Event) error {
	return b.send(ctx, "cancel workflow instance", instance.InstanceID, &instance.ExecutionID, cancelEvent)
}

// SignalWorkflow sends the active execution of the instance the event. backend.ErrInstanceNotFound if none is active; pgwake.ErrInvalid for a name
// or an argument that cannot be stored.
func (b *Backend) SignalWorkflow(ctx context.Context, instanceID string, event *history.Event) error {
	return b.send(ctx, "signal workflow", instanceID, nil, event)
}

func (b *Backend) send(ctx context.Context, op, instanceID string, executionID *string, event *history.Event) error {
	data, err := encodeSent("an event", event, b.p.MaxPayload())
	if err != nil {
		return err
	}
	var sent bool
	err = b.do(ctx, op, func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, `SELECT `+b.in+`gowf_send($1, $2, $3, $4)`, instanceID, executionID, string(data), Namespace).Scan(&sent)
	}, pgwake.Orchestrator)
	if err == nil && !sent {
		return backend.ErrInstanceNotFound
	}
	return err
}

// GetWorkflowInstanceState returns the state of an execution. backend.ErrInstanceNotFound if there is none.
func (b *Backend) GetWorkflowInstanceState(ctx context.Context, instance *workflow.Instance) (state core.WorkflowInstanceState, err error) {
	err = b.do(ctx, "get workflow instance state", func(ctx context.Context, q pgwake.Querier) error {
		err := q.QueryRow(ctx, `SELECT state FROM `+b.in+`gowf_instances WHERE instance = $1`, instanceOf(instance)).Scan(&state)
		if errors.Is(err, pgx.ErrNoRows) {
			state = notFound
			return nil
		}
		return err
	})
	if err == nil && state == notFound {
		return core.WorkflowInstanceStateActive, backend.ErrInstanceNotFound
	}
	return state, err
}

// notFound is none of the runtime's states.
const notFound core.WorkflowInstanceState = -1

// WaitForWorkflowInstance waits until an execution has finished, or has continued as new, for as long as ctx lets it. Unlike that of client.Client it
// is pushed, and costs a query or two a minute meanwhile. Afterwards client.GetWorkflowResult returns at once. backend.ErrInstanceNotFound if there is
// none, or if it is removed meanwhile.
func (b *Backend) WaitForWorkflowInstance(ctx context.Context, instance *workflow.Instance) error {
	for patience := time.Second; ; patience = min(2*patience, time.Minute) {
		state, err := b.GetWorkflowInstanceState(ctx, instance)
		if err != nil || state != core.WorkflowInstanceStateActive {
			return err
		}
		// One that goes in the moment of its end, before its first ack even, was never there for the Provider: hence looking again.
		waiting, cancel := context.WithTimeout(ctx, patience)
		_, err = b.p.WaitForInstance(waiting, instanceOf(instance))
		ended := waiting.Err() != nil
		cancel()
		switch {
		case errors.Is(err, pgwake.ErrNotFound):
			return backend.ErrInstanceNotFound
		case ctx.Err() != nil || err == nil || !ended:
			return err
		}
	}
}

// GetWorkflowInstanceHistory returns the history of an execution, or what of it is after lastSequenceID; empty for an unknown one.
func (b *Backend) GetWorkflowInstanceHistory(ctx context.Context, instance *workflow.Instance, lastSequenceID *int64) ([]*history.Event, error) {
	from := int64(0)
	if lastSequenceID != nil {
		from = *lastSequenceID + 1
	}
	stored, err := b.p.ReadHistoryExecution(ctx, instanceOf(instance), execution, from)
	if err != nil {
		return nil, err
	}
	events := make([]*history.Event, len(stored))
	for i := range stored {
		if events[i], err = decodeEvent(json.RawMessage(stored[i].Data)); err != nil {
			return nil, fmt.Errorf("history of %s: event %d: %w", instanceOf(instance), stored[i].ID, err)
		}
	}
	return events, nil
}

// execution is the only one that an instance of the Provider has here: to continue as new is to begin another instance.
const execution = 1

// RemoveWorkflowInstance removes an execution that is not active, and its history; also one that cannot begin, since what opens it is a dead letter or was
// purged: then its parent, if it has one, is told that it failed. backend.ErrInstanceNotFound and backend.ErrInstanceNotFinished.
func (b *Backend) RemoveWorkflowInstance(ctx context.Context, instance *workflow.Instance) error {
	state, err := b.GetWorkflowInstanceState(ctx, instance)
	switch {
	case err != nil:
		return err
	case state == core.WorkflowInstanceStateActive:
		return b.removeUnopened(ctx, instance)
	case b.tx != nil:
		_, err = b.p.DeleteInstanceTx(ctx, b.tx, instanceOf(instance), nil)
	default:
		_, err = b.p.DeleteInstance(ctx, instanceOf(instance), nil)
	}
	if errors.Is(err, pgwake.ErrNotFound) { // somebody else has removed it meanwhile
		return backend.ErrInstanceNotFound
	}
	return err
}

func (b *Backend) removeUnopened(ctx context.Context, instance *workflow.Instance) error {
	ref, err := b.GetWorkflowInstance(ctx, instance)
	if err != nil {
		return err
	}
	if ref == nil {
		return backend.ErrInstanceNotFound
	}
	var told *string // to its parent, which would wait for it for ever
	if ref.Instance.SubWorkflow() {
		data, err := encode(history.NewPendingEvent(time.Now(), history.EventType_SubWorkflowFailed,
			&history.SubWorkflowFailedAttributes{Error: asError(workflow.NewPermanentError(errUnopened))}, history.ScheduleEventID(ref.Instance.ParentEventID)))
		if err != nil {
			return err
		}
		text := string(data)
		told = &text
	}
	var removed *bool
	err = b.do(ctx, "remove workflow instance", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, `SELECT `+b.in+`gowf_remove_unopened($1, $2, $3)`, instanceOf(instance), told, Namespace).Scan(&removed)
	}, pgwake.Orchestrator)
	switch {
	case err != nil:
		return err
	case removed == nil:
		return backend.ErrInstanceNotFound
	case !*removed:
		return backend.ErrInstanceNotFinished
	}
	return nil
}

var errUnopened = errors.New("it could not begin, and was removed")

// maxBatch is how many instances the Provider removes in one transaction.
const maxBatch = 10000

// RemoveWorkflowInstances removes executions that ended before an instant, those first that ended first, each batch in a transaction of its own. One
// that ended less than half a second ago stays until the next call: a client.Client polls, and would not see the result that it waits for.
func (b *Backend) RemoveWorkflowInstances(ctx context.Context, options ...backend.RemovalOption) error {
	o := backend.DefaultRemovalOptions
	for _, set := range options {
		set(&o)
	}
	if o.BatchSize < 1 || o.BatchSize > maxBatch {
		o.BatchSize = backend.DefaultRemovalOptions.BatchSize
	}
	if o.FinishedBefore.IsZero() {
		return nil
	}
	for {
		var ended []string
		err := b.do(ctx, "list ended workflow instances", func(ctx context.Context, q pgwake.Querier) error {
			rows, err := q.Query(ctx, `SELECT instance FROM `+b.in+`gowf_instances WHERE completed_at < least($1, statement_timestamp() - interval '0.5 s')
				ORDER BY completed_at LIMIT $2`, o.FinishedBefore, o.BatchSize)
			if err != nil {
				return err
			}
			ended, err = pgx.CollectRows(rows, pgx.RowTo[string])
			return err
		})
		if err != nil || len(ended) == 0 {
			return err
		}
		filter := &pgwake.BulkFilter{Instances: ended, Limit: len(ended)}
		var d pgwake.Deleted
		if b.tx != nil {
			d, err = b.p.DeleteInstancesBulkTx(ctx, b.tx, filter)
		} else {
			d, err = b.p.DeleteInstancesBulk(ctx, filter)
		}
		if err != nil || d.Instances == 0 { // none: somebody else is removing them
			return err
		}
	}
}
