package goworkflows

import (
	"cmp"
	"context"
	"time"

	"github.com/cschleiden/go-workflows/backend"
	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/diag"
	"github.com/cschleiden/go-workflows/workflow"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what can be seen of the workflows from outside?

// GetStats counts the active executions, the events that wait for a worker by queue, and the activities by queue, those at work included. It reads what
// is queued from end to end.
func (b *Backend) GetStats(ctx context.Context) (*backend.Stats, error) {
	s := &backend.Stats{PendingActivityTasks: map[workflow.Queue]int64{}, PendingWorkflowTasks: map[workflow.Queue]int64{}}
	err := b.do(ctx, "count active workflow instances", func(ctx context.Context, q pgwake.Querier) error {
		return q.QueryRow(ctx, `SELECT count(*) FROM `+b.in+`gowf_instances WHERE state = 0`).Scan(&s.ActiveWorkflowInstances)
	})
	if err != nil {
		return nil, err
	}
	depths, err := b.p.GetQueueDepths(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range depths {
		switch {
		case d.Namespace != Namespace:
		case d.Queue == pgwake.Worker:
			s.PendingActivityTasks[workflow.Queue(d.Tag)] = d.Due + d.Delayed + d.Leased + d.KeptBack
		case d.Due > 0:
			s.PendingWorkflowTasks[workflow.Queue(d.Tag)] = d.Due
		}
	}
	return s, nil
}

const columns = `instance_id, execution_id, parent_instance_id, parent_execution_id, parent_event_id, queue, state, created_at, completed_at`

func scanRef(row pgx.CollectableRow) (*diag.WorkflowInstanceRef, error) {
	ref := &diag.WorkflowInstanceRef{Instance: &core.WorkflowInstance{}}
	var parent, run *string
	var at *int64
	var completed *time.Time
	err := row.Scan(&ref.Instance.InstanceID, &ref.Instance.ExecutionID, &parent, &run, &at, &ref.Queue, &ref.State, &ref.CreatedAt, &completed)
	if ref.CompletedAt = completed; parent != nil && run != nil && at != nil {
		ref.Instance.Parent, ref.Instance.ParentEventID = core.NewWorkflowInstance(*parent, *run), *at
	}
	return ref, err
}

func (b *Backend) refs(ctx context.Context, op, where string, args ...any) (refs []*diag.WorkflowInstanceRef, err error) {
	err = b.do(ctx, op, func(ctx context.Context, q pgwake.Querier) error {
		rows, err := q.Query(ctx, `SELECT `+columns+` FROM `+b.in+`gowf_instances g `+where, args...)
		if err != nil {
			return err
		}
		refs, err = pgx.CollectRows(rows, scanRef)
		return err
	})
	return refs, err
}

// GetWorkflowInstance returns an execution; nil if there is none.
func (b *Backend) GetWorkflowInstance(ctx context.Context, instance *core.WorkflowInstance) (*diag.WorkflowInstanceRef, error) {
	refs, err := b.refs(ctx, "get workflow instance", `WHERE instance = $1`, instanceOf(instance))
	if err != nil || len(refs) == 0 {
		return nil, err
	}
	return refs[0], nil
}

// GetWorkflowInstances returns executions, the latest first: count of them, after one or, if afterInstanceID is empty, from the beginning. Nothing comes after
// an unknown one.
func (b *Backend) GetWorkflowInstances(ctx context.Context, afterInstanceID, afterExecutionID string, count int) ([]*diag.WorkflowInstanceRef, error) {
	const op = "get workflow instances"
	if afterInstanceID == "" {
		return b.refs(ctx, op, `ORDER BY created_at DESC, instance DESC LIMIT $1`, count)
	}
	return b.refs(ctx, op, `WHERE (created_at, instance) < (SELECT a.created_at, a.instance FROM `+b.in+`gowf_instances a WHERE a.instance = $1)
		ORDER BY created_at DESC, instance DESC LIMIT $2`, instanceOf(core.NewWorkflowInstance(afterInstanceID, afterExecutionID)), count)
}

// GetWorkflowTree returns the tree of sub-workflows that an execution is in, from the first one above it that was not removed. Of one below that was removed
// it has the ids alone, as of one that has finished. backend.ErrInstanceNotFound if the execution is not there.
func (b *Backend) GetWorkflowTree(ctx context.Context, instance *core.WorkflowInstance) (*diag.WorkflowInstanceTree, error) {
	if ref, err := b.GetWorkflowInstance(ctx, instance); err != nil || ref == nil {
		return nil, cmp.Or(err, backend.ErrInstanceNotFound)
	}
	return diag.NewInstanceTreeBuilder(inTree{b}).BuildWorkflowInstanceTree(ctx, instance)
}

// inTree is a Backend for the builder of trees, which counts on every execution that another one names.
type inTree struct{ *Backend }

func (b inTree) GetWorkflowInstance(ctx context.Context, instance *core.WorkflowInstance) (*diag.WorkflowInstanceRef, error) {
	ref, err := b.Backend.GetWorkflowInstance(ctx, instance)
	switch {
	case err != nil:
		return nil, err
	case ref == nil:
		return &diag.WorkflowInstanceRef{Instance: instance, State: core.WorkflowInstanceStateFinished}, nil
	case ref.Instance.Parent == nil:
		return ref, nil
	}
	above, err := b.Backend.GetWorkflowInstance(ctx, ref.Instance.Parent)
	if above == nil {
		ref.Instance.Parent = nil
	}
	return ref, err
}
