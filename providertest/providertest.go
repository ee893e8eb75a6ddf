// Package providertest is the contract of a Provider as a suite of tests: what any implementation of it does,
// one subtest a behaviour.
//
//	func TestProvider(t *testing.T) {
//		providertest.Run(t, providertest.Factory{
//			New: func(tb testing.TB) providertest.Provider { return pgwaketest.New(tb, nil) },
//		})
//	}
//
// A Provider is seen through its verbs alone. What cannot be brought about by a verb, such as a history that is
// damaged, is up to the Factory; behaviours for which it does not offer what they need are skipped, and say so.
package providertest

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is tested, and what has whoever wants it tested to provide?

// Provider is the contract: the verbs of a pgwake.Provider, where they are documented. What an implementation keeps
// beyond it, such as an archive or limits, and how it begins and ends, is its own.
type Provider interface {
	EnqueueForWorker(context.Context, pgwake.WorkItem, *pgwake.EnqueueOptions) (pgwake.Enqueued, error)
	EnqueueForWorkerMany(context.Context, []pgwake.WorkEnqueue) ([]pgwake.Enqueued, error)
	FetchWorkItem(context.Context, *pgwake.FetchOptions) (*pgwake.ClaimedWorkItem, error)
	FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error)
	AckWorkItem(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error
	AckBatched(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error
	AckWorkItems(context.Context, []pgwake.LockToken) error
	Flush(context.Context) error
	AbandonWorkItem(context.Context, pgwake.LockToken, *pgwake.AbandonOptions) error
	RenewWorkItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (time.Time, error)
	RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error)

	EnqueueForOrchestrator(context.Context, pgwake.Message, *pgwake.EnqueueOptions) (pgwake.Enqueued, error)
	EnqueueForOrchestratorMany(context.Context, []pgwake.MessageEnqueue) ([]pgwake.Enqueued, error)
	FetchOrchestrationItem(context.Context, *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error)
	AckOrchestrationItem(context.Context, pgwake.LockToken, pgwake.OrchestrationAck) error
	AbandonOrchestrationItem(context.Context, pgwake.LockToken, *pgwake.AbandonOptions) error
	RenewOrchestrationItemLock(ctx context.Context, token pgwake.LockToken, extend time.Duration) (time.Time, error)
	ReleaseSticky(ctx context.Context, owners []string) (int, error)

	ReadHistory(ctx context.Context, instance string) ([]pgwake.Event, error)
	ReadHistoryExecution(ctx context.Context, instance string, executionID, fromEventID int64) ([]pgwake.Event, error)
	AppendHistory(ctx context.Context, instance string, executionID int64, events []pgwake.Event) error

	GetCustomStatus(ctx context.Context, instance string, lastSeen int64) (*pgwake.CustomStatus, error)
	WaitForStatus(ctx context.Context, instance string, lastSeen int64) (*pgwake.CustomStatus, error)
	WaitForInstance(ctx context.Context, instance string) (*pgwake.Outcome, error)

	GetKV(ctx context.Context, instance, key string) (value string, found bool, err error)
	ListKV(ctx context.Context, instance string) (map[string]string, error)

	RenewSessionLock(ctx context.Context, owners []string, extend, idle time.Duration) (int, error)
	ReleaseSessions(ctx context.Context, owners []string) (int, error)
	CleanupSessions(context.Context) (int, error)

	ListInstances(context.Context, *pgwake.ListOptions) ([]pgwake.InstanceInfo, error)
	GetInstanceInfo(ctx context.Context, instance string) (*pgwake.InstanceInfo, error)
	ListExecutions(ctx context.Context, instance string) ([]pgwake.ExecutionInfo, error)
	GetExecutionInfo(ctx context.Context, instance string, executionID int64) (*pgwake.ExecutionInfo, error)
	ListChildren(ctx context.Context, instance string) ([]string, error)
	GetParent(ctx context.Context, instance string) (string, error)
	GetInstanceTree(ctx context.Context, instance string) ([]string, error)
	DeleteInstance(ctx context.Context, instance string, o *pgwake.DeleteOptions) (pgwake.Deleted, error)
	DeleteInstances(ctx context.Context, instances []string, o *pgwake.DeleteOptions) (pgwake.Deleted, error)
	DeleteInstancesBulk(context.Context, *pgwake.BulkFilter) (pgwake.Deleted, error)
	PruneExecutions(ctx context.Context, instance string, o *pgwake.PruneOptions) (pgwake.Pruned, error)
	PruneExecutionsBulk(context.Context, *pgwake.BulkFilter, *pgwake.PruneOptions) (pgwake.Pruned, error)
	GetSystemMetrics(context.Context) (pgwake.SystemMetrics, error)
	GetQueueDepths(context.Context) ([]pgwake.QueueDepth, error)

	DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error
	DeadLetterOrchestrationItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error
	ListDeadLetters(context.Context, *pgwake.DeadLetterFilter) ([]pgwake.DeadLetter, error)
	RedriveDeadLetters(context.Context, *pgwake.DeadLetterFilter) (int, error)
	PurgeDeadLetters(context.Context, *pgwake.DeadLetterFilter) (int, error)
}

// Transactional is a Provider whose verbs can join a transaction of the caller's; see Factory.Begin and
// Factory.BeginSQL.
type Transactional interface {
	Provider

	EnqueueForWorkerTx(context.Context, pgx.Tx, pgwake.WorkItem, *pgwake.EnqueueOptions) (pgwake.Enqueued, error)
	EnqueueForWorkerManyTx(context.Context, pgx.Tx, []pgwake.WorkEnqueue) ([]pgwake.Enqueued, error)
	AckWorkItemTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, completion *pgwake.Message) error
	AckWorkItemsTx(context.Context, pgx.Tx, []pgwake.LockToken) error
	AbandonWorkItemTx(context.Context, pgx.Tx, pgwake.LockToken, *pgwake.AbandonOptions) error
	RenewWorkItemLockTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, extend time.Duration) (time.Time, error)
	RenewWorkItemLocksTx(ctx context.Context, tx pgx.Tx, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error)

	EnqueueForOrchestratorTx(context.Context, pgx.Tx, pgwake.Message, *pgwake.EnqueueOptions) (pgwake.Enqueued, error)
	EnqueueForOrchestratorManyTx(context.Context, pgx.Tx, []pgwake.MessageEnqueue) ([]pgwake.Enqueued, error)
	AckOrchestrationItemTx(context.Context, pgx.Tx, pgwake.LockToken, pgwake.OrchestrationAck) error
	AbandonOrchestrationItemTx(context.Context, pgx.Tx, pgwake.LockToken, *pgwake.AbandonOptions) error
	RenewOrchestrationItemLockTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, extend time.Duration) (time.Time, error)
	ReleaseStickyTx(ctx context.Context, tx pgx.Tx, owners []string) (int, error)

	AppendHistoryTx(ctx context.Context, tx pgx.Tx, instance string, executionID int64, events []pgwake.Event) error

	RenewSessionLockTx(ctx context.Context, tx pgx.Tx, owners []string, extend, idle time.Duration) (int, error)
	ReleaseSessionsTx(ctx context.Context, tx pgx.Tx, owners []string) (int, error)
	CleanupSessionsTx(context.Context, pgx.Tx) (int, error)

	DeleteInstanceTx(ctx context.Context, tx pgx.Tx, instance string, o *pgwake.DeleteOptions) (pgwake.Deleted, error)
	DeleteInstancesTx(ctx context.Context, tx pgx.Tx, instances []string, o *pgwake.DeleteOptions) (pgwake.Deleted, error)
	DeleteInstancesBulkTx(context.Context, pgx.Tx, *pgwake.BulkFilter) (pgwake.Deleted, error)
	PruneExecutionsTx(ctx context.Context, tx pgx.Tx, instance string, o *pgwake.PruneOptions) (pgwake.Pruned, error)
	PruneExecutionsBulkTx(context.Context, pgx.Tx, *pgwake.BulkFilter, *pgwake.PruneOptions) (pgwake.Pruned, error)

	DeadLetterWorkItemTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, reason, cause string) error
	DeadLetterOrchestrationItemTx(ctx context.Context, tx pgx.Tx, token pgwake.LockToken, reason, cause string) error
	RedriveDeadLettersTx(context.Context, pgx.Tx, *pgwake.DeadLetterFilter) (int, error)
	PurgeDeadLettersTx(context.Context, pgx.Tx, *pgwake.DeadLetterFilter) (int, error)
}

var _ Transactional = (*pgwake.Provider)(nil)

// Factory makes what the suite needs. Only New is required; it and the others are called from several tests at once.
type Factory struct {
	// New returns a Provider without any data. The Factory disposes of it when the test ends.
	New func(testing.TB) Provider

	// Another returns one more Provider on the data of p: another node. Nil skips what needs two.
	Another func(tb testing.TB, p Provider) Provider

	// ShortPoll returns a Provider without any data whose fetches never wait, whatever their PollTimeout.
	// Nil skips what short pollers do.
	ShortPoll func(testing.TB) Provider

	// CorruptHistory damages the stored history of the instance's current execution, which has an event at least,
	// so that a fetch cannot hand it out: it becomes one that Config.ValidateEvent refuses. Nil skips what needs it.
	CorruptHistory func(tb testing.TB, p Provider, instance string)

	// Begin starts a transaction that the verbs of p can join, and rolls it back at the end of the test if it is
	// open then. p must be Transactional. Nil skips what needs transactions.
	Begin func(tb testing.TB, p Provider) pgx.Tx

	// BeginSQL is Begin for a transaction of database/sql, which the verbs join by pgwake.WrapSQLTx. Nil skips what
	// needs that.
	BeginSQL func(tb testing.TB, p Provider) *sql.Tx

	// LockTimeout is the length of the leases that rows wait to see end; it must outlast what a row does under the
	// lease, on a machine that stalls now and then. Defaults to 1 s.
	LockTimeout time.Duration
}

// Run puts the Providers of the Factory through every behaviour: a subtest for each group, and in it one for each
// row. The rows of a group run in parallel, each on a Provider of its own. It returns when all have.
func Run(t *testing.T, f Factory) {
	t.Helper()
	if f.New == nil {
		t.Fatal("providertest: Factory.New is nil")
	}
	if f.LockTimeout == 0 {
		f.LockTimeout = time.Second
	}
	for _, g := range groups {
		t.Run(g.name, func(t *testing.T) {
			for _, r := range g.rows {
				t.Run(r.name, func(t *testing.T) {
					t.Parallel()
					r.test(t, &node{Provider: f.New(t), Factory: f})
				})
			}
		})
	}
}

// group is a part of the contract.
type group struct {
	name string
	rows []row
}

// row is one behaviour.
type row struct {
	name string
	test func(*testing.T, *node)
}

// groups are the parts of the contract, in its order; each is in the file of its name or of a related one.
var groups = []group{
	atomicity,
	errorHandling,
	instanceCreation,
	instanceLocking,
	lockExpiration,
	queueSemantics,
	multiExecution,
	longPolling,
	poisonMessage,
	cancellation,
	management,
	customStatus,
	deletion,
	bulkDeletion,
	prune,
	capabilityFiltering,
	sessions,
	tagFiltering,
	kvStore,
	ours,
	sticky,
}
