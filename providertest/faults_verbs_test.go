package providertest_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what are the Providers that break a verb or two? Their embedded node does the others.

// asks changes the options of every fetch.
type asks struct {
	node
	change func(*pgwake.FetchOptions)
}

func (b asks) options(o *pgwake.FetchOptions) *pgwake.FetchOptions {
	var changed pgwake.FetchOptions
	if o != nil {
		changed = *o
	}
	b.change(&changed)
	return &changed
}

func (b asks) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	return b.node.FetchWorkItem(ctx, b.options(o))
}

func (b asks) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	return b.node.FetchOrchestrationItem(ctx, b.options(o))
}

// bulk changes the filter of bulk deletions.
type bulk struct {
	node
	change func(*pgwake.BulkFilter)
}

func (b bulk) DeleteInstancesBulk(ctx context.Context, f *pgwake.BulkFilter) (pgwake.Deleted, error) {
	var changed pgwake.BulkFilter
	if f != nil {
		changed = *f
	}
	b.change(&changed)
	return b.node.DeleteInstancesBulk(ctx, &changed)
}

// eagerAck enqueues the work items of a turn before it is acknowledged.
type eagerAck struct{ node }

func (b eagerAck) AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	if _, err := b.EnqueueForWorkerMany(ctx, ack.WorkItems); err != nil {
		return err
	}
	ack.WorkItems = nil
	return b.node.AckOrchestrationItem(ctx, token, ack)
}

// dropsTurn gives a turn back when its ack fails.
type dropsTurn struct{ node }

func (b dropsTurn) AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	err := b.node.AckOrchestrationItem(ctx, token, ack)
	if err != nil {
		_ = b.AbandonOrchestrationItem(ctx, token, nil)
	}
	return err
}

// forgive makes a lost lock no error.
func forgive(err error) error {
	if errors.Is(err, pgwake.ErrLockLost) {
		return nil
	}
	return err
}

type forgivesAck struct{ node }

func (b forgivesAck) AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	return forgive(b.node.AckOrchestrationItem(ctx, token, ack))
}

type forgivesAbandon struct{ node }

func (b forgivesAbandon) AbandonWorkItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	return forgive(b.node.AbandonWorkItem(ctx, token, o))
}

func (b forgivesAbandon) AbandonOrchestrationItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	return forgive(b.node.AbandonOrchestrationItem(ctx, token, o))
}

type forgivesRenewal struct{ node }

func (b forgivesRenewal) RenewWorkItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (time.Time, error) {
	until, err := b.node.RenewWorkItemLock(ctx, token, extend)
	return until, forgive(err)
}

// oneToken gives every turn the token of the first.
type oneToken struct {
	node
	mu    sync.Mutex
	first pgwake.LockToken
}

func (b *oneToken) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	turn, err := b.node.FetchOrchestrationItem(ctx, o)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.first == "" {
		b.first = turn.LockToken
	}
	turn.LockToken = b.first
	return turn, nil
}

// oneWorkToken gives every work item the token of the first.
type oneWorkToken struct {
	node
	mu    sync.Mutex
	first pgwake.LockToken
}

func (b *oneWorkToken) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	item, err := b.node.FetchWorkItem(ctx, o)
	if err != nil || item.Namespace != pgwake.DefaultNamespace { // such as the items by which the suite waits
		return item, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.first == "" {
		b.first = item.LockToken
	}
	item.LockToken = b.first
	return item, nil
}

// eagerCompletion sends a completion whatever becomes of the ack.
type eagerCompletion struct{ node }

func (b eagerCompletion) AckWorkItem(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error {
	if completion != nil {
		if _, err := b.EnqueueForOrchestrator(ctx, *completion, nil); err != nil {
			return err
		}
	}
	return b.node.AckWorkItem(ctx, token, nil)
}

// chattyAck completes what is acknowledged without a completion.
type chattyAck struct{ node }

func (b chattyAck) AckWorkItem(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error {
	if completion == nil {
		completion = &pgwake.Message{Instance: "i", Kind: "done"}
	}
	return b.node.AckWorkItem(ctx, token, completion)
}

// fromZero counts attempts from 0.
type fromZero struct{ node }

func (b fromZero) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	item, err := b.node.FetchWorkItem(ctx, o)
	if err == nil {
		item.Attempt--
	}
	return item, err
}

func (b fromZero) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	turn, err := b.node.FetchOrchestrationItem(ctx, o)
	if err == nil {
		turn.Attempt--
	}
	return turn, err
}

// hidesDamage hands a damaged history out as an empty one.
type hidesDamage struct{ node }

func (b hidesDamage) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	turn, err := b.node.FetchOrchestrationItem(ctx, o)
	if err == nil {
		turn.HistoryError = nil
	}
	return turn, err
}

// refusesDamage makes a damaged history an error.
type refusesDamage struct{ node }

func (b refusesDamage) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	turn, err := b.node.FetchOrchestrationItem(ctx, o)
	if err == nil && turn.HistoryError != nil {
		return nil, turn.HistoryError
	}
	return turn, err
}

// locksSkipped takes what a version filter leaves out, and keeps it to itself.
type locksSkipped struct{ node }

func (b locksSkipped) FetchOrchestrationItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	turn, err := b.node.FetchOrchestrationItem(ctx, o)
	if errors.Is(err, pgwake.ErrNoWork) && o.Versions != nil {
		_, _ = b.node.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{LockTimeout: o.LockTimeout, NoWait: true})
	}
	return turn, err
}

// labelled says whether two filters are the same.
func labelled(a, b pgwake.TagFilter) bool { return reflect.DeepEqual(a, b) }

// knowsAll has something to say of instances that it does not know.
type knowsAll struct{ node }

func (b knowsAll) GetInstanceInfo(ctx context.Context, instance string) (*pgwake.InstanceInfo, error) {
	info, err := b.node.GetInstanceInfo(ctx, instance)
	if errors.Is(err, pgwake.ErrNotFound) {
		return nil, nil
	}
	return info, err
}

// oneByOne deletes several instances in as many transactions.
type oneByOne struct{ node }

func (b oneByOne) DeleteInstances(ctx context.Context, instances []string, o *pgwake.DeleteOptions) (all pgwake.Deleted, err error) {
	for _, instance := range instances {
		d, err := b.DeleteInstance(ctx, instance, o)
		if err != nil {
			return pgwake.Deleted{}, err
		}
		all.Instances += d.Instances
	}
	return all, nil
}

// prunesEither prunes by each criterion in turn.
type prunesEither struct{ node }

func (b prunesEither) PruneExecutions(ctx context.Context, instance string, o *pgwake.PruneOptions) (pgwake.Pruned, error) {
	if o == nil || o.CompletedBefore.IsZero() || o.KeepLast == 0 {
		return b.node.PruneExecutions(ctx, instance, o)
	}
	return b.node.PruneExecutions(ctx, instance, &pgwake.PruneOptions{CompletedBefore: o.CompletedBefore})
}

// deafToContext waits for work whatever its caller does, for a second.
type deafToContext struct{ node }

func (b deafToContext) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	changed := *o
	changed.PollTimeout = min(o.PollTimeout, time.Second)
	return b.node.FetchWorkItem(context.WithoutCancel(ctx), &changed)
}

// claims fetches several items in its own way.
type claims struct {
	node
	fetch func(ctx context.Context, n node, count int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error)
}

func (b claims) FetchWorkItems(ctx context.Context, count int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	return b.fetch(ctx, b.node, count, o)
}

// oneMore claims one more than asked for.
func oneMore(ctx context.Context, n node, count int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	return n.FetchWorkItems(ctx, count+1, o)
}

// maybeNone comes back with nothing and no error.
func maybeNone(ctx context.Context, n node, count int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	items, err := n.FetchWorkItems(ctx, count, o)
	if errors.Is(err, pgwake.ErrNoWork) {
		return nil, nil
	}
	return items, err
}

// fills waits until it has as many items as were asked for.
func fills(ctx context.Context, n node, count int, o *pgwake.FetchOptions) (items []*pgwake.ClaimedWorkItem, err error) {
	for len(items) < count {
		more, err := n.FetchWorkItems(ctx, count-len(items), o)
		if err != nil && len(items) == 0 {
			return nil, err
		} else if err != nil {
			break
		}
		items = append(items, more...)
	}
	return items, nil
}

// sharesToken gives all items of a batch the token of the first.
func sharesToken(ctx context.Context, n node, count int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	items, err := n.FetchWorkItems(ctx, count, o)
	for _, item := range items {
		item.LockToken = items[0].LockToken
	}
	return items, err
}

// forgivesBatch makes a lost lease of several no error.
type forgivesBatch struct{ node }

func (b forgivesBatch) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	return forgive(b.node.AckWorkItems(ctx, tokens))
}

func (b forgivesBatch) RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error) {
	until, err := b.node.RenewWorkItemLocks(ctx, tokens, extend)
	return until, forgive(err)
}

// allOrNone does nothing with several leases, or items that were enqueued, if one of them is no good.
type allOrNone struct{ node }

func (b allOrNone) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	if _, err := b.node.RenewWorkItemLocks(ctx, tokens, time.Hour); err != nil {
		return err
	}
	return b.node.AckWorkItems(ctx, tokens)
}

func (b allOrNone) RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error) {
	if _, err := b.node.RenewWorkItemLocks(ctx, tokens, time.Hour); err != nil {
		return nil, err
	}
	return b.node.RenewWorkItemLocks(ctx, tokens, extend)
}

func (b allOrNone) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	if o.Ack != nil {
		if _, err := b.node.RenewWorkItemLocks(ctx, o.Ack, time.Hour); err != nil {
			return nil, err
		}
	}
	return b.node.FetchWorkItem(ctx, o)
}

// claimsAnyway claims although a lease is lost that was to be acknowledged before, and keeps that to itself.
type claimsAnyway struct{ node }

func (b claimsAnyway) FetchWorkItem(ctx context.Context, o *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error) {
	item, err := b.node.FetchWorkItem(ctx, o)
	if errors.Is(err, pgwake.ErrLockLost) {
		_, _ = b.node.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: o.LockTimeout, NoWait: true})
	}
	return item, err
}

// piecemeal does one after the other what is to be done at once.
type piecemeal struct{ node }

func (b piecemeal) EnqueueForWorkerMany(ctx context.Context, items []pgwake.WorkEnqueue) (added []pgwake.Enqueued, err error) {
	for _, item := range items {
		one, err := b.node.EnqueueForWorkerMany(ctx, []pgwake.WorkEnqueue{item})
		if err != nil {
			return nil, err
		}
		added = append(added, one...)
	}
	return added, nil
}

func (b piecemeal) EnqueueForOrchestratorMany(ctx context.Context, messages []pgwake.MessageEnqueue) (added []pgwake.Enqueued, err error) {
	for _, m := range messages {
		one, err := b.node.EnqueueForOrchestratorMany(ctx, []pgwake.MessageEnqueue{m})
		if err != nil {
			return nil, err
		}
		added = append(added, one...)
	}
	return added, nil
}

func (b piecemeal) AppendHistory(ctx context.Context, instance string, execution int64, events []pgwake.Event) error {
	for _, e := range events {
		if err := b.node.AppendHistory(ctx, instance, execution, []pgwake.Event{e}); err != nil {
			return err
		}
	}
	return nil
}

// backwards tells of several enqueues in the wrong order.
type backwards struct{ node }

func (b backwards) EnqueueForWorkerMany(ctx context.Context, items []pgwake.WorkEnqueue) ([]pgwake.Enqueued, error) {
	added, err := b.node.EnqueueForWorkerMany(ctx, items)
	slices.Reverse(added)
	return added, err
}

func (b backwards) EnqueueForOrchestratorMany(ctx context.Context, messages []pgwake.MessageEnqueue) ([]pgwake.Enqueued, error) {
	added, err := b.node.EnqueueForOrchestratorMany(ctx, messages)
	slices.Reverse(added)
	return added, err
}

// eagerTimers sends the delayed messages of an ack, whatever becomes of it.
type eagerTimers struct{ node }

func (b eagerTimers) AckOrchestrationItem(ctx context.Context, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	err := b.node.AckOrchestrationItem(ctx, token, ack)
	if errors.Is(err, pgwake.ErrLockLost) {
		timers := slices.DeleteFunc(slices.Clone(ack.Messages), func(m pgwake.MessageEnqueue) bool { return m.Delay == 0 })
		_, _ = b.EnqueueForOrchestratorMany(ctx, timers)
	}
	return err
}

// savesTx has the transaction go on after an ack that failed.
type savesTx struct{ node }

func (b savesTx) AckWorkItemTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, completion *pgwake.Message) error {
	if _, err := tx.Exec(ctx, "SAVEPOINT before"); err != nil {
		return err
	}
	err := b.node.AckWorkItemTx(ctx, tx, token, completion)
	if err != nil {
		_, _ = tx.Exec(ctx, "ROLLBACK TO before")
	}
	return err
}

// abortsTx has the transaction end with an enqueue that is refused.
type abortsTx struct{ node }

func (b abortsTx) EnqueueForWorkerTx(ctx context.Context, tx pgx.Tx, item pgwake.WorkItem, o *pgwake.EnqueueOptions) (pgwake.Enqueued, error) {
	added, err := b.node.EnqueueForWorkerTx(ctx, tx, item, o)
	if errors.Is(err, pgwake.ErrInvalid) {
		_, _ = tx.Exec(ctx, "SELECT 1 / 0")
	}
	return added, err
}

// outsideTx takes a transaction and does without.
type outsideTx struct{ node }

func (b outsideTx) EnqueueForWorkerTx(ctx context.Context, _ pgx.Tx, item pgwake.WorkItem, o *pgwake.EnqueueOptions) (pgwake.Enqueued, error) {
	return b.EnqueueForWorker(ctx, item, o)
}

func (b outsideTx) EnqueueForWorkerManyTx(ctx context.Context, _ pgx.Tx, items []pgwake.WorkEnqueue) ([]pgwake.Enqueued, error) {
	return b.EnqueueForWorkerMany(ctx, items)
}

func (b outsideTx) EnqueueForOrchestratorTx(ctx context.Context, _ pgx.Tx, m pgwake.Message, o *pgwake.EnqueueOptions) (pgwake.Enqueued, error) {
	return b.EnqueueForOrchestrator(ctx, m, o)
}

func (b outsideTx) EnqueueForOrchestratorManyTx(ctx context.Context, _ pgx.Tx, messages []pgwake.MessageEnqueue) ([]pgwake.Enqueued, error) {
	return b.EnqueueForOrchestratorMany(ctx, messages)
}

func (b outsideTx) AckWorkItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, completion *pgwake.Message) error {
	return b.AckWorkItem(ctx, token, completion)
}

func (b outsideTx) AckWorkItemsTx(ctx context.Context, _ pgx.Tx, tokens []pgwake.LockToken) error {
	return b.AckWorkItems(ctx, tokens)
}

func (b outsideTx) AbandonWorkItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	return b.AbandonWorkItem(ctx, token, o)
}

func (b outsideTx) RenewWorkItemLockTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, extend time.Duration) (time.Time, error) {
	return b.RenewWorkItemLock(ctx, token, extend)
}

func (b outsideTx) RenewWorkItemLocksTx(ctx context.Context, _ pgx.Tx, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error) {
	return b.RenewWorkItemLocks(ctx, tokens, extend)
}

func (b outsideTx) AckOrchestrationItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, ack pgwake.OrchestrationAck) error {
	return b.AckOrchestrationItem(ctx, token, ack)
}

func (b outsideTx) AbandonOrchestrationItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	return b.AbandonOrchestrationItem(ctx, token, o)
}

func (b outsideTx) RenewOrchestrationItemLockTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, extend time.Duration) (time.Time, error) {
	return b.RenewOrchestrationItemLock(ctx, token, extend)
}

func (b outsideTx) AppendHistoryTx(ctx context.Context, _ pgx.Tx, instance string, execution int64, events []pgwake.Event) error {
	return b.AppendHistory(ctx, instance, execution, events)
}

func (b outsideTx) RenewSessionLockTx(ctx context.Context, _ pgx.Tx, owners []string, extend, idle time.Duration) (int, error) {
	return b.RenewSessionLock(ctx, owners, extend, idle)
}

func (b outsideTx) ReleaseSessionsTx(ctx context.Context, _ pgx.Tx, owners []string) (int, error) {
	return b.ReleaseSessions(ctx, owners)
}

func (b outsideTx) ReleaseStickyTx(ctx context.Context, _ pgx.Tx, owners []string) (int, error) {
	return b.ReleaseSticky(ctx, owners)
}

func (b outsideTx) CleanupSessionsTx(ctx context.Context, _ pgx.Tx) (int, error) {
	return b.CleanupSessions(ctx)
}

func (b outsideTx) DeleteInstanceTx(ctx context.Context, _ pgx.Tx, instance string, o *pgwake.DeleteOptions) (pgwake.Deleted, error) {
	return b.DeleteInstance(ctx, instance, o)
}

func (b outsideTx) DeleteInstancesTx(ctx context.Context, _ pgx.Tx, instances []string, o *pgwake.DeleteOptions) (pgwake.Deleted, error) {
	return b.DeleteInstances(ctx, instances, o)
}

func (b outsideTx) DeleteInstancesBulkTx(ctx context.Context, _ pgx.Tx, f *pgwake.BulkFilter) (pgwake.Deleted, error) {
	return b.DeleteInstancesBulk(ctx, f)
}

func (b outsideTx) PruneExecutionsTx(ctx context.Context, _ pgx.Tx, instance string, o *pgwake.PruneOptions) (pgwake.Pruned, error) {
	return b.PruneExecutions(ctx, instance, o)
}

func (b outsideTx) PruneExecutionsBulkTx(ctx context.Context, _ pgx.Tx, f *pgwake.BulkFilter, o *pgwake.PruneOptions) (pgwake.Pruned, error) {
	return b.PruneExecutionsBulk(ctx, f, o)
}

func (b outsideTx) DeadLetterWorkItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, reason, cause string) error {
	return b.DeadLetterWorkItem(ctx, token, reason, cause)
}

func (b outsideTx) DeadLetterOrchestrationItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, reason, cause string) error {
	return b.DeadLetterOrchestrationItem(ctx, token, reason, cause)
}

func (b outsideTx) RedriveDeadLettersTx(ctx context.Context, _ pgx.Tx, f *pgwake.DeadLetterFilter) (int, error) {
	return b.RedriveDeadLetters(ctx, f)
}

func (b outsideTx) PurgeDeadLettersTx(ctx context.Context, _ pgx.Tx, f *pgwake.DeadLetterFilter) (int, error) {
	return b.PurgeDeadLetters(ctx, f)
}
