package providertest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does a verb that joins a transaction of the caller's take effect when that commits, and not
// before, and not at all if it is rolled back?

// transactions are the rows about that, each for transactions of pgx and for those of database/sql.
func transactions() (rows []row) {
	for _, way := range []struct {
		prefix string
		begin  func(*testing.T, *node) transaction
	}{{"tx_", ofPgx}, {"sql_tx_", ofSQL}} {
		put := func(name string, test func(*testing.T, *joined)) {
			rows = append(rows, row{way.prefix + name, func(t *testing.T, n *node) {
				test(t, &joined{n, func() transaction { return way.begin(t, n) }})
			}})
		}
		for _, c := range txWakes {
			put(c.name, c.test)
		}
		for _, c := range txChanges {
			put(c.name, c.test)
		}
		put("renewal_of_session", renewalOfSession)
		put("release_of_sessions", releaseOfSessions)
		put("cleanup_of_sessions", cleanupOfSessions)
		put("verb_that_fails", verbThatFails)
	}
	return rows
}

// transaction is one that the Tx verbs can join.
type transaction struct {
	pgx.Tx
	commit, rollback func() error
}

func ofPgx(t *testing.T, n *node) transaction {
	n.requireTransactions(t)
	tx := n.Begin(t, n.Provider)
	return transaction{tx, func() error { return tx.Commit(t.Context()) }, func() error { return tx.Rollback(t.Context()) }}
}

func ofSQL(t *testing.T, n *node) transaction {
	if n.BeginSQL == nil {
		t.Skip("the Factory begins no transactions of database/sql")
	}
	tx := n.BeginSQL(t, n.Provider)
	return transaction{pgwake.WrapSQLTx(tx), tx.Commit, tx.Rollback}
}

// joined is a node together with a way to begin transactions on its data.
type joined struct {
	*node
	begin func() transaction
}

// txVerb is a verb that joins a transaction.
type txVerb func(Transactional, pgx.Tx) error

// requireTransactions skips a row for which the Factory must begin transactions.
func (n *node) requireTransactions(t *testing.T) {
	t.Helper()
	if n.Begin == nil {
		t.Skip("the Factory begins no transactions")
	}
}

// transactional is the Provider, which must be.
func (n *node) transactional(t *testing.T) Transactional {
	t.Helper()
	p, ok := n.Provider.(Transactional)
	require.True(t, ok, "the Factory begins transactions, and the Provider is not Transactional")
	return p
}

// run runs a verb in a new transaction, which stays open.
func (n *joined) run(t *testing.T, verb txVerb) transaction {
	t.Helper()
	tx := n.begin()
	require.NoError(t, verb(n.transactional(t), tx))
	return tx
}

// undo runs a verb in a transaction that is rolled back.
func (n *joined) undo(t *testing.T, verb txVerb) {
	t.Helper()
	require.NoError(t, n.run(t, verb).rollback())
}

// txWake is a verb that makes something due in a queue.
type txWake struct {
	name    string
	queue   pgwake.Queue
	prepare func(*testing.T, *node) txVerb
	// before, if not nil, is what else is asserted of it, while nothing is queued, in a transaction that it rolls back.
	before func(*testing.T, *node, transaction)
}

// test asserts that the verb wakes a fetch when its transaction commits.
func (c txWake) test(t *testing.T, n *joined) {
	if c.before != nil {
		c.before(t, n.node, n.begin())
	}
	verb := c.prepare(t, n.node)
	back := n.waiting(t, c.queue)

	tx := n.run(t, verb)
	require.ErrorIs(t, n.fetch(t.Context(), c.queue, now).err, pgwake.ErrNoWork)
	require.NoError(t, tx.rollback())
	require.ErrorIs(t, n.fetch(t.Context(), c.queue, now).err, pgwake.ErrNoWork, "it has taken effect although it was rolled back")

	tx = n.run(t, verb)
	require.Empty(t, back, "it has taken effect before the commit")
	require.NoError(t, tx.commit())
	(<-back).got(t)
	require.ErrorIs(t, n.fetch(t.Context(), c.queue, now).err, pgwake.ErrNoWork, "it was due once")
}

var txWakes = []txWake{
	{"enqueue_of_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "work"}, nil)
			return err
		}
	}, nil},
	{"batch_of_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.EnqueueForWorkerManyTx(t.Context(), tx, []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "work"}}})
			return err
		}
	}, nil},
	{"abandon_of_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		n.enqueue(t, "work")
		item := n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			return p.AbandonWorkItemTx(t.Context(), tx, item.LockToken, nil)
		}
	}, nil},
	{"renewal_of_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		n.enqueue(t, "work")
		item := n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.RenewWorkItemLockTx(t.Context(), tx, item.LockToken, n.LockTimeout)
			return err
		}
	}, func(t *testing.T, n *node, tx transaction) {
		n.enqueue(t, "brief")
		item := n.takeWith(t, n.brief(now))
		_, err := n.transactional(t).RenewWorkItemLockTx(t.Context(), tx, item.LockToken, lease)
		require.NoError(t, err)
		require.NoError(t, tx.rollback())
		n.ack(t, n.awaitWorkRetaken(t, item))
	}},
	{"batch_of_renewals", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		n.enqueue(t, "work")
		item := n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.RenewWorkItemLocksTx(t.Context(), tx, []pgwake.LockToken{item.LockToken}, n.LockTimeout)
			return err
		}
	}, func(t *testing.T, n *node, tx transaction) {
		n.enqueue(t, "brief")
		item := n.takeWith(t, n.brief(now))
		_, err := n.transactional(t).RenewWorkItemLocksTx(t.Context(), tx, []pgwake.LockToken{item.LockToken}, lease)
		require.NoError(t, err)
		require.NoError(t, tx.rollback())
		n.ack(t, n.awaitWorkRetaken(t, item))
	}},
	{"turn_schedules_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, pgwake.OrchestrationAck{WorkItems: activities("i", 1), Metadata: running})
		}
	}, nil},
	{"redrive_of_work", pgwake.Worker, func(t *testing.T, n *node) txVerb {
		n.enqueue(t, "work")
		require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, "given up", ""))
		return redrive(t)
	}, nil},
	{"enqueue_of_message", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.EnqueueForOrchestratorTx(t.Context(), tx, startMessage("i"), nil)
			return err
		}
	}, nil},
	{"batch_of_messages", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.EnqueueForOrchestratorManyTx(t.Context(), tx, []pgwake.MessageEnqueue{{Message: startMessage("i")}})
			return err
		}
	}, nil},
	{"completion", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		return func(p Transactional, tx pgx.Tx) error {
			return p.AckWorkItemTx(t.Context(), tx, item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
		}
	}, nil},
	{"abandon_of_turn", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.AbandonOrchestrationItemTx(t.Context(), tx, turn.LockToken, nil)
		}
	}, nil},
	{"renewal_of_turn", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.RenewOrchestrationItemLockTx(t.Context(), tx, turn.LockToken, n.LockTimeout)
			return err
		}
	}, func(t *testing.T, n *node, tx transaction) {
		n.sendWith(t, startMessage("brief"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		_, err := n.transactional(t).RenewOrchestrationItemLockTx(t.Context(), tx, turn.LockToken, lease)
		require.NoError(t, err)
		require.NoError(t, tx.rollback())
		n.ackTurn(t, n.awaitRetaken(t, turn), pgwake.OrchestrationAck{Metadata: running})
	}},
	{"ack_frees_instance", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		turn := n.hold(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, pgwake.OrchestrationAck{Metadata: running})
		}
	}, nil},
	{"dead_letter_frees_instance", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		turn := n.hold(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.DeadLetterOrchestrationItemTx(t.Context(), tx, turn.LockToken, "given up", "")
		}
	}, nil},
	{"release_of_sticky_instances", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		n.stick(t, "i", "A", lease)
		n.send(t, "i", "poke")
		return func(p Transactional, tx pgx.Tx) error {
			released, err := p.ReleaseStickyTx(t.Context(), tx, []string{"A"})
			require.Equal(t, 1, released)
			return err
		}
	}, nil},
	{"redrive_of_message", pgwake.Orchestrator, func(t *testing.T, n *node) txVerb {
		n.sendWith(t, startMessage("i"), nil)
		require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), n.takeTurnOf(t, "i").LockToken, "given up", ""))
		return redrive(t)
	}, nil},
}

// redrive puts the only dead letter back.
func redrive(t *testing.T) txVerb {
	return func(p Transactional, tx pgx.Tx) error {
		redriven, err := p.RedriveDeadLettersTx(t.Context(), tx, nil)
		require.Equal(t, 1, redriven)
		return err
	}
}

// txChange is a verb that changes what can be seen.
type txChange struct {
	name    string
	prepare func(*testing.T, *node) (verb txVerb, see func() any)
	after   any // what is seen when the verb has taken effect
}

// test asserts that the change is seen when the verb's transaction has committed.
func (c txChange) test(t *testing.T, n *joined) {
	verb, see := c.prepare(t, n.node)
	before := see()
	require.NotEqual(t, c.after, before)

	tx := n.run(t, verb)
	require.Equal(t, before, see(), "it has taken effect before the end of the transaction")
	require.NoError(t, tx.rollback())
	require.Equal(t, before, see(), "it has taken effect although it was rolled back")

	tx = n.run(t, verb)
	require.Equal(t, before, see(), "it has taken effect before the commit")
	require.NoError(t, tx.commit())
	require.Equal(t, c.after, see())
}

var txChanges = []txChange{
	{"ack_of_work", func(t *testing.T, n *node) (txVerb, func() any) {
		n.enqueue(t, "work")
		item := n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			return p.AckWorkItemTx(t.Context(), tx, item.LockToken, nil)
		}, func() any { return n.depth(t, pgwake.Worker) }
	}, pgwake.QueueDepth{}},
	{"batch_of_acks", func(t *testing.T, n *node) (txVerb, func() any) {
		n.enqueue(t, "a", "b", "c")
		a, b := n.take(t), n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			return p.AckWorkItemsTx(t.Context(), tx, []pgwake.LockToken{a.LockToken, b.LockToken})
		}, func() any { return n.depth(t, pgwake.Worker) }
	}, pgwake.QueueDepth{Due: 1}},
	{"dead_letter_of_work", func(t *testing.T, n *node) (txVerb, func() any) {
		n.enqueue(t, "work")
		item := n.take(t)
		return func(p Transactional, tx pgx.Tx) error {
			return p.DeadLetterWorkItemTx(t.Context(), tx, item.LockToken, "given up", "")
		}, func() any { return [2]int{int(n.depth(t, pgwake.Worker).Leased), len(n.deadLetters(t))} }
	}, [2]int{0, 1}},
	{"dead_letter_of_turn", func(t *testing.T, n *node) (txVerb, func() any) {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.DeadLetterOrchestrationItemTx(t.Context(), tx, turn.LockToken, "given up", "")
		}, func() any { return [2]int{int(n.depth(t, pgwake.Orchestrator).Leased), len(n.deadLetters(t))} }
	}, [2]int{0, 1}},
	{"purge_of_dead_letters", func(t *testing.T, n *node) (txVerb, func() any) {
		n.bury(t)
		return func(p Transactional, tx pgx.Tx) error {
			purged, err := p.PurgeDeadLettersTx(t.Context(), tx, &pgwake.DeadLetterFilter{Reason: "stale"})
			require.Equal(t, 2, purged)
			return err
		}, func() any { return len(n.deadLetters(t)) }
	}, 2},
	{"append_of_history", func(t *testing.T, n *node) (txVerb, func() any) {
		n.start(t, "i")
		return func(p Transactional, tx pgx.Tx) error {
			return p.AppendHistoryTx(t.Context(), tx, "i", 1, events(2, 3))
		}, func() any { return n.execution(t, "i", 1).Events }
	}, int64(3)},
	{"deletion", func(t *testing.T, n *node) (txVerb, func() any) {
		n.completed(t, "a", "b")
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.DeleteInstanceTx(t.Context(), tx, "a", nil)
			return err
		}, func() any { return n.instances(t, nil) }
	}, []string{"b"}},
	{"deletion_of_several", func(t *testing.T, n *node) (txVerb, func() any) {
		n.completed(t, "a", "b", "c")
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.DeleteInstancesTx(t.Context(), tx, []string{"a", "c"}, nil)
			return err
		}, func() any { return n.instances(t, nil) }
	}, []string{"b"}},
	{"deletion_in_bulk", func(t *testing.T, n *node) (txVerb, func() any) {
		n.completed(t, "a", "b")
		n.start(t, "running")
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.DeleteInstancesBulkTx(t.Context(), tx, nil)
			return err
		}, func() any { return n.instances(t, nil) }
	}, []string{"running"}},
	{"prune", func(t *testing.T, n *node) (txVerb, func() any) {
		n.startExecutions(t, "i", 3)
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.PruneExecutionsTx(t.Context(), tx, "i", &pgwake.PruneOptions{KeepLast: 2})
			return err
		}, func() any { return n.executions(t, "i") }
	}, []int64{2, 3}},
	{"prune_in_bulk", func(t *testing.T, n *node) (txVerb, func() any) {
		n.startExecutions(t, "i", 3)
		return func(p Transactional, tx pgx.Tx) error {
			_, err := p.PruneExecutionsBulkTx(t.Context(), tx, nil, nil)
			return err
		}, func() any { return n.executions(t, "i") }
	}, []int64{3}},
}

// renewalOfSession cuts the lock of a session short, which shows only when it has ended.
func renewalOfSession(t *testing.T, n *joined) {
	n.enqueueIn(t, "s", "1", "2")
	n.requireTake(t, "A", "s", "1")
	cut := func(p Transactional, tx pgx.Tx) error {
		renewed, err := p.RenewSessionLockTx(t.Context(), tx, []string{"A"}, moment, lease)
		require.Equal(t, 1, renewed)
		return err
	}
	n.undo(t, cut)
	n.passed(t, n.clock(t, pgwake.Worker).Add(moment))
	n.requireNoWorkWith(t, by("B"))

	require.NoError(t, n.run(t, cut).commit())
	n.passed(t, n.clock(t, pgwake.Worker).Add(moment))
	n.requireTake(t, "B", "s", "2")
}

// releaseOfSessions wakes whoever waits for what sessions have, when it commits.
func releaseOfSessions(t *testing.T, n *joined) {
	n.enqueueIn(t, "s", "1", "2")
	n.ack(t, n.requireTake(t, "A", "s", "1"))
	back := n.waitingWith(t.Context(), t, pgwake.Worker, patiently(by("B")))
	release := func(p Transactional, tx pgx.Tx) error {
		released, err := p.ReleaseSessionsTx(t.Context(), tx, []string{"A"})
		require.Equal(t, 1, released)
		return err
	}
	n.undo(t, release)
	n.requireNoWorkWith(t, by("C"))

	tx := n.run(t, release)
	require.Empty(t, back, "it has taken effect before the commit")
	require.NoError(t, tx.commit())
	(<-back).got(t)
}

// cleanupOfSessions shows only in what another one finds.
func cleanupOfSessions(t *testing.T, n *joined) {
	n.enqueueIn(t, "s", "1")
	n.ack(t, n.takeAndLoseSession(t, "A"))
	cleanup := func(p Transactional, tx pgx.Tx) error {
		removed, err := p.CleanupSessionsTx(t.Context(), tx)
		require.Equal(t, 1, removed)
		return err
	}
	n.undo(t, cleanup)
	require.NoError(t, n.run(t, cleanup).commit())
	n.requireCleanup(t, 0)
}

// verbThatFails asserts what becomes of the transaction: it goes on if the verb was refused before the server was
// asked, or has dealt with a part, and is aborted if the verb failed on the server.
func verbThatFails(t *testing.T, n *joined) {
	n.enqueue(t, "acknowledged", "a", "b")
	acknowledged, a, b := n.take(t).LockToken, n.take(t).LockToken, n.take(t).LockToken
	require.NoError(t, n.AckWorkItem(t.Context(), acknowledged, nil))

	require.NoError(t, n.run(t, func(p Transactional, tx pgx.Tx) error {
		_, err := p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{}, nil)
		requirePermanent(t, err, pgwake.ErrInvalid)
		requireLost(t, p.AckWorkItemsTx(t.Context(), tx, []pgwake.LockToken{a, acknowledged}), acknowledged)
		_, err = p.EnqueueForOrchestratorTx(t.Context(), tx, startMessage("i"), nil)
		return err
	}).commit())
	n.takeTurnOf(t, "i")
	requirePermanent(t, n.AckWorkItem(t.Context(), a, nil), pgwake.ErrLockLost)

	tx := n.run(t, func(p Transactional, tx pgx.Tx) error {
		require.NoError(t, p.AckWorkItemTx(t.Context(), tx, b, nil))
		requirePermanent(t, p.AckWorkItemTx(t.Context(), tx, a, nil), pgwake.ErrLockLost)
		_, err := p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "too late"}, nil)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.Equal(t, "25P02", typed.SQLState)
		return nil
	})
	require.Error(t, tx.commit())
	n.requireNoWork(t)
	require.NoError(t, n.AckWorkItem(t.Context(), b, nil))
}
