package pgwake_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does a message come to whom its instance belongs, whatever it copied of that when it was added?

func versions(major int) *pgwake.FetchOptions {
	r := pgwake.VersionRange{Min: pgwake.Version{Major: major}, Max: pgwake.Version{Major: major, Minor: 9}}
	return &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Versions: &pgwake.VersionFilter{Ranges: []pgwake.VersionRange{r}}}
}

// pinned makes an instance that is pinned to version 1, and moves it to version 2 between two calls.
func (n *node) pinned(t *testing.T, instance string, between func()) {
	t.Helper()
	pin := func(major int) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", PinnedVersion: &pgwake.Version{Major: major}}}
	}
	n.sendWith(t, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, nil)
	n.ackTurn(t, n.takeTurn(t), pin(1))
	between()
	n.send(t, instance, "move")
	n.ackTurn(t, n.takeTurn(t), pin(2))
}

func TestHomes_AddedInASnapshotFromBeforeTheChange_IsFound(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, add := range map[string]func(t *testing.T, n *node, tx pgx.Tx){
			"enqueue": func(t *testing.T, n *node, tx pgx.Tx) {
				_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
				require.NoError(t, err)
			},
			"redrive": func(t *testing.T, n *node, tx pgx.Tx) {
				count, err := n.RedriveDeadLettersTx(tctx, tx, nil)
				require.NoError(t, err)
				require.Equal(t, 1, count)
			},
		} {
			t.Run(fmt.Sprint(name, " ", level), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, nil)
				tx, err := n.userPool(t, 2).BeginTx(tctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				defer func() { _ = tx.Rollback(tctx) }()
				n.pinned(t, "i", func() {
					n.send(t, "i", "dies")
					require.NoError(t, n.DeadLetterOrchestrationItem(tctx, n.takeTurn(t).LockToken, "spoilt", ""))
					_, err := tx.Exec(tctx, "SELECT count(*) FROM "+n.quoted()+".instances") // which takes the snapshot
					require.NoError(t, err)
				})
				add(t, n, tx)
				require.NoError(t, tx.Commit(tctx))
				turn, err := n.FetchOrchestrationItem(tctx, versions(2))
				require.NoError(t, err)
				require.Equal(t, "i", turn.Instance)
			})
		}
	}
}

// However it came about.
func TestHomes_FetchMeetsAMessageThatIsOutOfDate_LeavesItToWhoServesTheInstance(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.another(t)
	n.pinned(t, "i", func() {})
	n.send(t, "i", "poke")
	n.exec(t, `UPDATE orchestrator_queue SET pin = 1 + (1::bigint << 40)`)
	back := make(chan error, 1)
	go func() {
		_, err := other.FetchOrchestrationItem(tctx, versions(2))
		back <- err
	}()
	require.Eventually(t, func() bool { return other.Stats().Orchestrator.Parked == 1 }, patience, time.Millisecond)
	o := versions(1)
	o.PollTimeout, o.NoWait = 0, true
	_, err := n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.NoError(t, <-back)
}

// What was added for an instance that is deleted meanwhile is for another of the same id.
func TestHomes_DeletedMeanwhile_MessageIsForAnybody(t *testing.T) {
	t.Parallel()
	for name, ack := range map[string]pgwake.OrchestrationAck{
		"sticky": {Metadata: pgwake.Metadata{Name: "flow"}, Sticky: &pgwake.Sticky{Owner: "A", For: time.Hour}},
		"pinned": {Metadata: pgwake.Metadata{Name: "flow", PinnedVersion: &pgwake.Version{Major: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
			n.ackTurn(t, n.takeTurn(t), ack)
			tx := n.begin(t)
			_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
			require.NoError(t, err)
			_, err = n.DeleteInstance(tctx, "i", &pgwake.DeleteOptions{Force: true})
			require.NoError(t, err)
			require.NoError(t, tx.Commit(tctx))
			turn, err := n.FetchOrchestrationItem(tctx, versions(2))
			require.NoError(t, err)
			require.Equal(t, "i", turn.Instance)
		})
	}
}

// A note goes when nobody can add what it is about any more.
func TestHomes_TransactionsHaveEnded_NoNoteIsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	n.pinned(t, "i", func() {
		_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
		require.NoError(t, err)
	})
	notes := func() int64 { return query[int64](t, n, `SELECT count(*) FROM realignments`)[0] }
	require.EqualValues(t, 1, notes())
	o := versions(2)
	o.PollTimeout, o.NoWait = 0, true
	_, err := n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.EqualValues(t, 1, notes(), "the transaction is open")
	require.NoError(t, tx.Rollback(tctx))
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.Zero(t, notes())
}

// Those who wait for nobody's lock leave none behind on busy queues either.
func TestHomes_NobodyChangesAnything_NoNoteIsMade(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	n.start(t, "i")
	n.send(t, "i", "poke")
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted}})
	require.NoError(t, tx.Commit(tctx))
	require.Zero(t, query[int64](t, n, `SELECT count(*) FROM realignments`)[0])
}

// Whoever changes many instances at a time, for as long as he likes, is in nobody's way.
func TestFetch_ManyInstancesAreBeingChanged_TakesTheNextThatIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const many = 1100
	var batch []pgwake.MessageEnqueue
	var instances []string
	for i := range many {
		instances = append(instances, fmt.Sprint("i", i))
		batch = append(batch, pgwake.MessageEnqueue{Message: pgwake.Message{Instance: instances[i], Kind: "k"}})
	}
	_, err := n.EnqueueForOrchestratorMany(tctx, batch)
	require.NoError(t, err)
	n.send(t, "free", "k")
	tx := n.begin(t)
	n.exec(t, `INSERT INTO instance_locks SELECT 'i' || g, gen_random_uuid(), clock_timestamp() FROM generate_series(0, $1) g`, many-1)
	_, err = tx.Exec(tctx, `SELECT FROM instance_locks FOR UPDATE`)
	require.NoError(t, err)
	for _, o := range []*pgwake.FetchOptions{{}, {Namespaces: []string{"default"}}} {
		o.NoWait, o.LockTimeout = true, lease
		turn, err := n.FetchOrchestrationItem(tctx, o)
		require.NoError(t, err)
		require.Equal(t, "free", turn.Instance)
		require.NoError(t, n.AbandonOrchestrationItem(tctx, turn.LockToken, nil))
	}
	require.NoError(t, tx.Rollback(tctx))
}
