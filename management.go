package pgwake

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: which instances are there, how are they doing, and how are they removed?

// InstanceInfo describes an instance and its current execution.
type InstanceInfo struct {
	Instance   string
	Namespace  string
	Name       string
	Version    string
	Queue      string
	Parent     string // instance that started it; empty for a root
	Attributes json.RawMessage

	ExecutionID   int64 // the current one
	Status        Status
	Output        string
	PinnedVersion *Version // nil: none

	CustomStatus        string
	CustomStatusVersion int64 // 0: it was never set

	CreatedAt, UpdatedAt time.Time // first and latest ack, server time

	// Attributes, Output and CustomStatus, of those that are longer than ListOptions.PayloadBytes.
	AttributesCut, OutputCut, CustomStatusCut *Cut
}

// ListOptions says which instances to list. Nil means the zero value.
type ListOptions struct {
	// Status of the current execution. Defaults to any.
	Status Status

	// Namespace, Name and Queue limit the list to these. Default to any.
	Namespace, Name, Queue string

	// After is the id that the list begins after: the last one of the page before. Defaults to the beginning.
	After string

	// Limit is how many to list, up to 10,000. Defaults to 100.
	Limit int

	// PayloadBytes is up to how many bytes Attributes, Output and CustomStatus are read whole. Of a longer one there is the beginning, see
	// Cut. Defaults to 0: all are.
	PayloadBytes int
}

// ListInstances returns instances in the order of their ids, as the database sorts text. A page that is shorter than
// the limit is the last. It walks along the ids, or along those of one status; namespace, name and queue are looked up
// on the way, so a filter that few instances match costs what lies between them.
func (p *Provider) ListInstances(ctx context.Context, o *ListOptions) (infos []InstanceInfo, err error) {
	err = p.do(ctx, "list instances", func(ctx context.Context, q querier) error {
		if o == nil {
			o = &ListOptions{}
		}
		if o.Namespace != "" {
			if err := CheckNamespace(o.Namespace); err != nil {
				return err
			}
		}
		limit, limitErr := pageLimit(0, o.Limit, 100)
		payload, err := payloadLimit(o.PayloadBytes)
		err = cmp.Or(limitErr, err, checkStatus(o.Status), checkText("orchestration name", o.Name, false),
			checkText("queue name", o.Queue, false), checkText("instance id", o.After, false))
		if err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.listInstances, text(string(o.Status)), text(o.Namespace), text(o.Name), text(o.Queue),
			text(o.After), limit, payload)
		if err != nil {
			return err
		}
		infos, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (i InstanceInfo, err error) {
			err = scanInstance(row, &i, &i.AttributesCut, &i.OutputCut, &i.CustomStatusCut)
			return i, err
		})
		return err
	})
	return infos, err
}

// GetInstanceInfo returns one instance. ErrNotFound if there is none, which is also so before its first ack.
func (p *Provider) GetInstanceInfo(ctx context.Context, instance string) (info *InstanceInfo, err error) {
	err = p.do(ctx, "get instance info", func(ctx context.Context, q querier) error {
		found, err := onInstance(ctx, q, scanInstanceInfo, p.sql.getInstanceInfo, instance)
		if err == nil {
			info = &found[0]
		}
		return err
	})
	return info, err
}

const instanceColumns = "instance_id, namespace, name, version, queue, parent_id, attributes, execution_id, status, output, custom_status, " +
	"custom_status_version, pin, created_at, updated_at"

func scanInstanceInfo(row pgx.CollectableRow) (i InstanceInfo, err error) {
	err = scanInstance(row, &i)
	return i, err
}

// scanInstance takes in instanceColumns, and what comes after them.
func scanInstance(row pgx.CollectableRow, i *InstanceInfo, more ...any) error {
	var version, parent, output, customStatus *string
	var pin int64
	err := row.Scan(append([]any{&i.Instance, &i.Namespace, &i.Name, &version, &i.Queue, &parent, (*[]byte)(&i.Attributes), &i.ExecutionID,
		&i.Status, &output, &customStatus, &i.CustomStatusVersion, &pin, &i.CreatedAt, &i.UpdatedAt}, more...)...)
	i.Version, i.Parent, i.Output, i.CustomStatus = value(version), value(parent), value(output), value(customStatus)
	i.PinnedVersion = pinned(pin)
	return err
}

// ExecutionInfo describes an execution.
type ExecutionInfo struct {
	Instance      string
	ExecutionID   int64
	Status        Status
	Output        string
	PinnedVersion *Version // nil: none
	Events        int64    // in its history
	StartedAt     time.Time
	CompletedAt   time.Time // zero while it is running
}

// ListExecutions returns the executions of an instance by id; none for an unknown instance.
func (p *Provider) ListExecutions(ctx context.Context, instance string) (infos []ExecutionInfo, err error) {
	err = p.do(ctx, "list executions", func(ctx context.Context, q querier) error {
		infos, err = onInstance(ctx, q, scanExecutionInfo(instance), p.sql.listExecutions, instance, nil)
		return err
	})
	return infos, err
}

// GetExecutionInfo returns one execution. ErrNotFound if there is none.
func (p *Provider) GetExecutionInfo(ctx context.Context, instance string, executionID int64) (info *ExecutionInfo, err error) {
	err = p.do(ctx, "get execution info", func(ctx context.Context, q querier) error {
		found, err := onInstance(ctx, q, scanExecutionInfo(instance), p.sql.listExecutions, instance, executionID)
		if err == nil {
			info = &found[0]
		}
		return err
	})
	return info, err
}

func scanExecutionInfo(instance string) pgx.RowToFunc[ExecutionInfo] {
	return func(row pgx.CollectableRow) (ExecutionInfo, error) {
		x := ExecutionInfo{Instance: instance}
		var output *string
		var pin int64
		var completedAt *time.Time
		err := row.Scan(&x.ExecutionID, &x.Status, &output, &pin, &x.Events, &x.StartedAt, &completedAt)
		x.Output, x.PinnedVersion, x.CompletedAt = value(output), pinned(pin), value(completedAt)
		return x, err
	}
}

// ListChildren returns the instances that this one started, by id, and not those that they started. None for an
// unknown instance.
func (p *Provider) ListChildren(ctx context.Context, instance string) (children []string, err error) {
	err = p.do(ctx, "list children", func(ctx context.Context, q querier) error {
		children, err = onInstance(ctx, q, pgx.RowTo[string], p.sql.listChildren, instance)
		return err
	})
	return children, err
}

// GetParent returns the instance that started this one, and "" for a root. ErrNotFound if there is no such
// instance. The parent itself may be gone, if it was deleted before this one's first ack.
func (p *Provider) GetParent(ctx context.Context, instance string) (parent string, err error) {
	err = p.do(ctx, "get parent", func(ctx context.Context, q querier) error {
		found, err := onInstance(ctx, q, pgx.RowTo[*string], p.sql.getParent, instance)
		if err == nil {
			parent = value(found[0])
		}
		return err
	})
	return parent, err
}

// GetInstanceTree returns an instance and its descendants: itself first, then its children by id, then theirs.
// ErrNotFound if there is no such instance.
func (p *Provider) GetInstanceTree(ctx context.Context, instance string) (tree []string, err error) {
	err = p.do(ctx, "get instance tree", func(ctx context.Context, q querier) error {
		tree, err = onInstance(ctx, q, pgx.RowTo[string], p.sql.getInstanceTree, instance)
		return err
	})
	return tree, err
}

// onInstance runs a query about one instance, whose id is its first argument.
func onInstance[T any](ctx context.Context, q querier, scan pgx.RowToFunc[T], sql, instance string, args ...any) ([]T, error) {
	if err := checkText("instance id", instance, true); err != nil {
		return nil, err
	}
	rows, err := q.Query(ctx, sql, append([]any{instance}, args...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scan)
}

// DeleteOptions says how to delete. Nil means the zero value.
type DeleteOptions struct {
	// Force also deletes running instances. Whoever works on them finds out by ErrLockLost. Defaults to
	// false: they are refused with ErrInstanceRunning.
	Force bool
}

// Deleted counts what a deletion removed.
type Deleted struct {
	Instances, Executions, Events int64

	QueueItems int64 // messages for the instances, and work items that they scheduled
}

// DeleteInstance deletes an instance with all its descendants and whatever belongs to them: executions,
// history, key-value pairs, messages, work items, dead letters, locks. The archive keeps what it has. Turns and work items
// of theirs that are in progress can no longer be acknowledged: ErrLockLost. Acks under way are waited for, and nobody
// else is held up. The id can be used again at once.
//
// ErrNotFound if there is no such instance, ErrInstanceRunning if it or a descendant is running, unless forced,
// and ErrHasParent, even if forced, for a child: delete its root. A running instance is one whose current
// execution is neither completed, failed nor cancelled; one that has continued as new, and whose next execution has
// not begun yet, is running too.
func (p *Provider) DeleteInstance(ctx context.Context, instance string, o *DeleteOptions) (d Deleted, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "delete instance", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstance(ctx, q, instance, o)
		return err
	})
	return d, err
}

// DeleteInstanceTx is DeleteInstance as part of the transaction. Until that ends, acks for the deleted instances
// wait. ErrInvalid unless the transaction is READ COMMITTED: another does not see, and would leave behind, what was
// queued since it began.
func (p *Provider) DeleteInstanceTx(ctx context.Context, tx pgx.Tx, instance string, o *DeleteOptions) (d Deleted, err error) {
	err = p.doTx(ctx, tx, "delete instance", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstance(ctx, q, instance, o)
		return err
	})
	return d, err
}

func (p *Provider) deleteInstance(ctx context.Context, q querier, instance string, o *DeleteOptions) (d Deleted, err error) {
	if err := checkText("instance id", instance, true); err != nil {
		return d, err
	}
	return scanDeleted(q.QueryRow(ctx, p.sql.deleteInstance, instance, value(o).Force))
}

func scanDeleted(row pgx.Row) (d Deleted, err error) {
	err = row.Scan(&d.Instances, &d.Executions, &d.Events, &d.QueueItems)
	return d, err
}

// DeleteInstances deletes exactly these instances, all or none, as DeleteInstance does. ErrHasParent if one of
// them has a parent or a child that is not among them.
func (p *Provider) DeleteInstances(ctx context.Context, instances []string, o *DeleteOptions) (d Deleted, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "delete instances", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstances(ctx, q, instances, o)
		return err
	})
	return d, err
}

// DeleteInstancesTx is DeleteInstances as part of the transaction, which must be READ COMMITTED, as for
// DeleteInstanceTx.
func (p *Provider) DeleteInstancesTx(ctx context.Context, tx pgx.Tx, instances []string, o *DeleteOptions) (d Deleted, err error) {
	err = p.doTx(ctx, tx, "delete instances", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstances(ctx, q, instances, o)
		return err
	})
	return d, err
}

func (p *Provider) deleteInstances(ctx context.Context, q querier, instances []string, o *DeleteOptions) (d Deleted, err error) {
	if err := checkInstances(instances); err != nil || len(instances) == 0 {
		return d, err
	}
	return scanDeleted(q.QueryRow(ctx, p.sql.deleteInstances, instances, value(o).Force))
}

// BulkFilter says which instances a bulk verb is for: those to which all of it applies. Nil means the zero
// value.
type BulkFilter struct {
	// Instances limits the verb to these; those that are unknown are passed over. Nil means any, and an empty
	// slice that is not nil means none.
	Instances []string

	// CompletedBefore limits it to instances whose current execution ended before, by the server's clock.
	// Defaults to the zero time: no such limit.
	CompletedBefore time.Time

	// Limit is how many instances to deal with, up to 10,000; descendants do not count. Defaults to 1000.
	Limit int
}

// none reports whether no instance can match.
func (f *BulkFilter) none() bool { return f != nil && f.Instances != nil && len(f.Instances) == 0 }

func (f *BulkFilter) args() ([]any, error) {
	if f == nil {
		f = &BulkFilter{}
	}
	limit, err := pageLimit(0, f.Limit, 1000)
	err = cmp.Or(err, checkInstances(f.Instances), checkInstant("CompletedBefore", f.CompletedBefore))
	return []any{f.Instances, optional(f.CompletedBefore, f.CompletedBefore.IsZero()), limit}, err
}

// DeleteInstancesBulk deletes root instances that are not running, each with all its descendants, in one
// transaction. It passes over whatever DeleteInstance would refuse. A circle of parents, which two acks at the same
// moment can make, has no root: it goes by DeleteInstance of any of them. Without Instances in the filter those go
// first that ended first: to enforce a retention, call it until it deletes nothing.
func (p *Provider) DeleteInstancesBulk(ctx context.Context, f *BulkFilter) (d Deleted, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "delete instances in bulk", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstancesBulk(ctx, q, f)
		return err
	})
	return d, err
}

// DeleteInstancesBulkTx is DeleteInstancesBulk as part of the transaction, which must be READ COMMITTED, as for
// DeleteInstanceTx.
func (p *Provider) DeleteInstancesBulkTx(ctx context.Context, tx pgx.Tx, f *BulkFilter) (d Deleted, err error) {
	err = p.doTx(ctx, tx, "delete instances in bulk", func(ctx context.Context, q querier) error {
		d, err = p.deleteInstancesBulk(ctx, q, f)
		return err
	})
	return d, err
}

func (p *Provider) deleteInstancesBulk(ctx context.Context, q querier, f *BulkFilter) (d Deleted, err error) {
	args, err := f.args()
	if err != nil || f.none() {
		return d, err
	}
	return scanDeleted(q.QueryRow(ctx, p.sql.deleteInstancesBulk, args...))
}

// PruneOptions says which executions of an instance to delete: those to which all of it applies. The current
// execution and running ones always stay. Nil means the zero value: all others.
type PruneOptions struct {
	// KeepLast keeps the so many latest executions, the current one included. Defaults to 0, which is as good
	// as 1.
	KeepLast int

	// CompletedBefore keeps those that ended at this instant of the server's clock or later. Defaults to the zero
	// time: no such limit.
	CompletedBefore time.Time
}

func (o *PruneOptions) args() ([]any, error) {
	if o == nil {
		o = &PruneOptions{}
	}
	if o.KeepLast < 0 || o.KeepLast > maxKeepLast {
		return nil, invalid("number of executions to keep %d is not between 0 and %d", o.KeepLast, maxKeepLast)
	}
	return []any{max(o.KeepLast, 1), optional(o.CompletedBefore, o.CompletedBefore.IsZero())}, checkInstant("CompletedBefore", o.CompletedBefore)
}

const maxKeepLast = 1 << 30

// Pruned counts what was pruned.
type Pruned struct {
	Instances  int64 // that lost an execution
	Executions int64
	Events     int64
}

// PruneExecutions deletes executions of an instance, with their history, running or not. Its key-value pairs
// stay. ErrNotFound if there is no such instance. It holds nobody up, and leaves out what is being pruned or deleted at this
// moment.
func (p *Provider) PruneExecutions(ctx context.Context, instance string, o *PruneOptions) (pruned Pruned, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "prune executions", func(ctx context.Context, q querier) error {
		pruned, err = p.pruneExecutions(ctx, q, instance, o)
		return err
	})
	return pruned, err
}

// PruneExecutionsTx is PruneExecutions as part of the transaction, of whatever isolation level: an execution that
// changed after its snapshot makes it fail with a serialization failure.
func (p *Provider) PruneExecutionsTx(ctx context.Context, tx pgx.Tx, instance string, o *PruneOptions) (pruned Pruned, err error) {
	err = p.doTx(ctx, tx, "prune executions", func(ctx context.Context, q querier) error {
		pruned, err = p.pruneExecutions(ctx, q, instance, o)
		return err
	})
	return pruned, err
}

func (p *Provider) pruneExecutions(ctx context.Context, q querier, instance string, o *PruneOptions) (pruned Pruned, err error) {
	if err := checkText("instance id", instance, true); err != nil {
		return pruned, err
	}
	args, err := o.args()
	if err != nil {
		return pruned, err
	}
	return scanPruned(q.QueryRow(ctx, p.sql.pruneExecutions, slices.Concat([]any{instance}, args)...))
}

func scanPruned(row pgx.Row) (pruned Pruned, err error) {
	err = row.Scan(&pruned.Instances, &pruned.Executions, &pruned.Events)
	return pruned, err
}

// PruneExecutionsBulk does what PruneExecutions does to instances that have something to prune, running ones
// and children included, in one transaction. Without Instances in the filter it reads all instances. To prune
// everything, call it until it prunes nothing.
func (p *Provider) PruneExecutionsBulk(ctx context.Context, f *BulkFilter, o *PruneOptions) (pruned Pruned, err error) {
	defer p.engine.changed()
	err = p.do(ctx, "prune executions in bulk", func(ctx context.Context, q querier) error {
		pruned, err = p.pruneExecutionsBulk(ctx, q, f, o)
		return err
	})
	return pruned, err
}

// PruneExecutionsBulkTx is PruneExecutionsBulk as part of the transaction.
func (p *Provider) PruneExecutionsBulkTx(ctx context.Context, tx pgx.Tx, f *BulkFilter, o *PruneOptions) (pruned Pruned, err error) {
	err = p.doTx(ctx, tx, "prune executions in bulk", func(ctx context.Context, q querier) error {
		pruned, err = p.pruneExecutionsBulk(ctx, q, f, o)
		return err
	})
	return pruned, err
}

func (p *Provider) pruneExecutionsBulk(ctx context.Context, q querier, f *BulkFilter, o *PruneOptions) (pruned Pruned, err error) {
	filter, err := f.args()
	if err != nil {
		return pruned, err
	}
	args, err := o.args()
	if err != nil || f.none() {
		return pruned, err
	}
	return scanPruned(q.QueryRow(ctx, p.sql.pruneExecutionsBulk, slices.Concat(filter, args)...))
}

// SystemMetrics counts everything that a schema holds.
type SystemMetrics struct {
	Instances  int64
	ByStatus   map[Status]int64 // instances by the status of their current execution; a status that none has is missing
	Executions int64
	Events     int64

	WorkItems   int64 // due, delayed and leased ones; see GetQueueDepths
	Messages    int64 // the same
	Turns       int64 // in progress
	Sessions    int64 // that have an owner
	DeadLetters int64
	Archived    int64
}

// GetSystemMetrics counts everything. It reads an index of each table from end to end, which takes seconds
// where there are millions of events: call it every few minutes rather than every few seconds.
func (p *Provider) GetSystemMetrics(ctx context.Context) (m SystemMetrics, err error) {
	err = p.do(ctx, "get system metrics", func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.systemMetrics)
		if err != nil {
			return err
		}
		all := SystemMetrics{ByStatus: make(map[Status]int64)}
		to := map[string]*int64{
			"executions": &all.Executions, "events": &all.Events, "work_items": &all.WorkItems, "messages": &all.Messages,
			"turns": &all.Turns, "sessions": &all.Sessions, "dead_letters": &all.DeadLetters, "archived": &all.Archived,
		}
		var metric string
		var label *string
		var count int64
		_, err = pgx.ForEachRow(rows, []any{&metric, &label, &count}, func() error {
			if metric == "instances" {
				all.Instances += count
				all.ByStatus[Status(value(label))] = count
			} else if counter, known := to[metric]; known {
				*counter = count
			}
			return nil
		})
		if err == nil {
			m = all
		}
		return err
	})
	return m, err
}

// QueueDepth is how much is queued in one part of a queue.
type QueueDepth struct {
	Queue     Queue
	Namespace string
	Tag       string // tag of the work items, or queue name of the messages; empty for those without

	Due      int64 // could be fetched now, but for what is paused, or in a namespace with Limits.MaxRunning at work
	Delayed  int64 // due later
	Leased   int64 // claimed, or held back behind a turn of their instance
	KeptBack int64 // of work items: would be due, but as many of their key are at work as may be, or it has had its share of a rate

	OldestDue time.Time // since when the first of those that are due has been so, server time; zero if none is
}

// GetQueueDepths returns how much is queued, messages first, by namespace and tag. A part that is empty is missing.
// It reads both queues from end to end: tens of milliseconds for 100,000 items.
func (p *Provider) GetQueueDepths(ctx context.Context) (depths []QueueDepth, err error) {
	err = p.do(ctx, "get queue depths", func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.queueDepths)
		if err != nil {
			return err
		}
		depths, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (d QueueDepth, err error) {
			var queue string
			var oldest *time.Time
			err = row.Scan(&queue, &d.Namespace, &d.Tag, &d.Due, &d.Delayed, &d.Leased, &d.KeptBack, &oldest)
			if err != nil {
				return d, err
			}
			d.OldestDue = value(oldest)
			d.Queue, err = queueNamed(queue)
			return d, err
		})
		return err
	})
	return depths, err
}

func checkInstances(instances []string) error {
	for i, instance := range instances {
		if err := checkText("instance id", instance, true); err != nil {
			return at(i, len(instances), err)
		}
	}
	return nil
}

func checkStatus(status Status) error {
	if !slices.Contains(statuses, status) {
		return invalid("status %s is unknown", quote(string(status)))
	}
	return nil
}
