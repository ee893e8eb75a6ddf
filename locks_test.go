package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what if a stranger holds our advisory locks? They have no owner, and are the database's. And: does everybody who locks
// several items do so in one order?

// hold has a transaction hold advisory locks: classes and keys, as SQL.
func (n *node) hold(t *testing.T, locks ...string) (release func()) {
	t.Helper()
	return n.holdBy(t, "pg_advisory_xact_lock", locks...)
}

func (n *node) holdBy(t *testing.T, function string, locks ...string) (release func()) {
	t.Helper()
	tx := n.begin(t)
	for _, lock := range locks {
		_, err := tx.Exec(t.Context(), `SELECT `+function+`(`+lock+`)`)
		require.NoError(t, err)
	}
	return func() { require.NoError(t, tx.Rollback(t.Context())) }
}

func TestLocks_StrangerHoldsThem_NobodyWaitsForEverAndOtherWorkFlows(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "known")
	n.start(t, "other")
	n.exec(t, `CREATE OR REPLACE FUNCTION lock_patience() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT '50ms' $$`)
	release := n.hold(t,
		`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`,
		`hashtext('pgwake histories of ' || current_schema()), hashtext('known')`,
		`hashtext('pgwake histories of ' || current_schema()), hashtext('new')`,
		`hashtext(current_schema()::text), hashtext('known')`)
	n.enqueue(t, "work")
	require.Equal(t, []string{"work"}, n.takeAll(t))
	n.send(t, "other", "message")
	turn := n.takeTurn(t)
	require.Equal(t, "other", turn.Instance)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	n.send(t, "known", "message")
	n.requireNoTurn(t) // whoever claims does not wait for the lock

	for what, call := range map[string]func() error{
		"limits":  func() error { return n.SetLimits(t.Context(), "default", pgwake.Limits{MaxRunning: 1}) },
		"history": func() error { return n.AppendHistory(t.Context(), "new", 1, []pgwake.Event{{ID: 1, Type: "e"}}) },
		"delete": func() error {
			return dropped(n.DeleteInstance(t.Context(), "known", &pgwake.DeleteOptions{Force: true}))
		},
	} {
		t.Run(what, func(t *testing.T) {
			var err *pgwake.Error
			require.ErrorAs(t, call(), &err)
			require.Equal(t, "55P03", err.SQLState, "%v", err)
			require.True(t, err.Retryable)
			require.False(t, err.Unknown)
			require.ErrorContains(t, err, "has held the advisory lock")
		})
	}
	release()
	require.Equal(t, "known", n.takeTurn(t).Instance)
	require.NoError(t, n.SetLimits(t.Context(), "default", pgwake.Limits{MaxRunning: 1}))
	require.NoError(t, n.AppendHistory(t.Context(), "new", 1, []pgwake.Event{{ID: 1, Type: "e"}}))
}

// Another database may have a schema of that name, and sessions there the same keys: they hold nobody up here, and are not to be ended.
func TestLocks_AnotherDatabaseHasTheSameKeys_WhoHoldsThemHereIsNamed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	database := fmt.Sprint("locks_", os.Getpid())
	testdb.Exec(t, testdb.URL(t), `CREATE DATABASE `+database)
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+database+` WITH (FORCE)`) })
	elsewhere, err := pgx.Connect(t.Context(), inDatabase(t, database))
	require.NoError(t, err)
	defer func() { _ = elsewhere.Close(tctx) }()
	n.exec(t, `CREATE OR REPLACE FUNCTION lock_patience() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT '50ms' $$`)
	here := n.begin(t)
	const lock = `SELECT pg_advisory_xact_lock(hashtext('pgwake histories of ' || $1), hashtext($2))`
	instances := []string{"a", "b", "c", "d", "e", "f"} // in no order that anybody knows
	_, err = elsewhere.Exec(t.Context(), `BEGIN`)
	require.NoError(t, err)
	for _, instance := range instances {
		for _, exec := range []func(context.Context, string, ...any) (pgconn.CommandTag, error){elsewhere.Exec, here.Exec} {
			_, err := exec(t.Context(), lock, n.schema, instance)
			require.NoError(t, err)
		}
	}
	for _, instance := range instances {
		err := n.AppendHistory(t.Context(), instance, 1, []pgwake.Event{{ID: 1, Type: "e"}})
		require.ErrorContains(t, err, fmt.Sprintf("(pid %d)", here.Conn().PgConn().PID()))
	}
}

// What is taken while the lock is held, and what only after it. Exclusive or shared: locks that the library shares keep others from having
// them alone.
func TestLocks_StrangerHoldsOne_NothingIsLostAndNodesComeAndGo(t *testing.T) {
	t.Parallel()
	type steps struct{ before, during, after func(t *testing.T, n *node) }
	limited := func(l pgwake.Limits) steps {
		return steps{
			before: func(t *testing.T, n *node) {
				n.limit(t, l)
				n.keyed(t, "limited")
				n.enqueueWith(t, "elsewhere", &pgwake.EnqueueOptions{Namespace: "elsewhere"})
			},
			during: func(t *testing.T, n *node) {
				require.Equal(t, []string{"elsewhere"}, n.takeAll(t))
				require.Empty(t, n.takeAll(t))
			},
			after: func(t *testing.T, n *node) { require.Equal(t, []string{"limited"}, n.takeAll(t)) },
		}
	}
	ofSession := func(n *node, ctx context.Context) (*pgwake.ClaimedWorkItem, error) {
		return n.FetchWorkItem(ctx, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: "we"}})
	}
	waits := func(t *testing.T, n *node) {
		got := make(chan *pgwake.ClaimedWorkItem, 1)
		go func() {
			item, _ := n.FetchWorkItem(context.Background(), soon)
			got <- item
		}()
		n.awaitParked(t, 1)
		n.exec(t, `SELECT enqueue_work('work')`)
		require.NotNil(t, <-got)
	}
	moved := func(t *testing.T, n *node) {
		tx := n.begin(t)
		n.pinned(t, "i", func() {
			_, err := n.EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
			require.NoError(t, err)
		})
		require.NoError(t, tx.Commit(t.Context()))
	}
	version := func(t *testing.T, n *node, major int) error {
		o := versions(major)
		o.PollTimeout, o.NoWait = 0, true
		turn, err := n.FetchOrchestrationItem(t.Context(), o)
		if err == nil {
			require.Equal(t, "i", turn.Instance)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{})
		}
		return err
	}
	for name, c := range map[string]struct {
		lock   string
		shared bool // it does the same
		steps  func() steps
	}{
		"producers": {`hashtext('pgwake producers'), 'worker_queue'::regclass::oid::integer`, true, func() steps {
			return steps{during: waits}
		}},
		"a new session": {`hashtext('pgwake sessions of ' || current_schema()), hashtext('s')`, true, func() steps {
			return steps{
				before: func(t *testing.T, n *node) {
					for _, i := range []pgwake.WorkItem{{Name: "of the session", Session: "s"}, {Name: "of another", Session: "z"}, {Name: "of none"}} {
						_, err := n.EnqueueForWorker(t.Context(), i, nil)
						require.NoError(t, err)
					}
				},
				during: func(t *testing.T, n *node) {
					for _, want := range []string{"of another", "of none"} {
						item, err := ofSession(n, t.Context())
						require.NoError(t, err)
						require.Equal(t, want, item.Name)
					}
					_, err := ofSession(n, t.Context())
					requireError(t, err, pgwake.ErrNoWork)
				},
				after: func(t *testing.T, n *node) {
					item, err := ofSession(n, t.Context())
					require.NoError(t, err)
					require.Equal(t, "of the session", item.Name)
				},
			}
		}},
		"a session that has an owner": {`hashtext('pgwake sessions of ' || current_schema()), hashtext('s')`, true, func() steps {
			add := func(t *testing.T, n *node) {
				_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "work", Session: "s"}, nil)
				require.NoError(t, err)
			}
			take := func(t *testing.T, n *node) {
				_, err := ofSession(n, t.Context())
				require.NoError(t, err)
			}
			return steps{before: func(t *testing.T, n *node) { add(t, n); take(t, n); add(t, n) }, during: take}
		}},
		"homes": {`hashtext('pgwake homes of ' || current_schema()), hashtext('i') & 127`, true, func() steps {
			return steps{
				during: func(t *testing.T, n *node) {
					moved(t, n)
					require.NotZero(t, n.rows(t)["realignments"])
					n.exec(t, `UPDATE realignments SET next_at = clock_timestamp()`) // or the first look may be that early
					require.NoError(t, version(t, n, 2))
					require.NotZero(t, n.rows(t)["realignments"], "another may come")
				},
				after: func(t *testing.T, n *node) {
					n.requireNoTurn(t)
					require.Zero(t, n.rows(t)["realignments"])
				},
			}
		}},
		"realignments": {`hashtext('pgwake realignments of ' || current_schema()), 0`, true, func() steps {
			return steps{
				during: func(t *testing.T, n *node) {
					moved(t, n)
					requireError(t, version(t, n, 2), pgwake.ErrNoWork)
					requireError(t, version(t, n, 1), pgwake.ErrNoWork) // who meets it puts it right
					require.NoError(t, version(t, n, 2))
					n.pinned(t, "j", func() {})
					n.send(t, "j", "k")
					n.takeTurn(t)
				},
				after: func(t *testing.T, n *node) {
					n.requireNoTurn(t)
					require.Zero(t, n.rows(t)["realignments"])
				},
			}
		}},
		"limits: running":         {`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`, true, func() steps { return limited(pgwake.Limits{MaxRunning: 2}) }},
		"limits: running per key": {`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`, true, func() steps { return limited(pgwake.Limits{MaxRunningPerKey: 2}) }},
		"limits: rate":            {`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`, true, func() steps { return limited(pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Second}}) }},
		"releases": {`hashtext('pgwake releases of ' || current_schema()), hashtext('default')`, true, func() steps {
			var first *pgwake.ClaimedWorkItem
			return steps{
				before: func(t *testing.T, n *node) {
					n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
					n.keyed(t, "k", "k", "k")
				},
				during: func(t *testing.T, n *node) {
					first = n.take(t)
					n.requireNoWork(t)
					n.keyed(t, "other")
					require.Equal(t, []string{"other"}, n.takeAll(t))
					n.done(t, first)
					n.done(t, n.take(t))
				},
				after: func(t *testing.T, n *node) { n.done(t, n.take(t)) },
			}
		}},
		"releases, of a long queue": {`hashtext('pgwake releases of ' || current_schema()), hashtext('default')`, true, func() steps {
			return steps{
				before: func(t *testing.T, n *node) {
					n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
					n.keyed(t, append(slices.Repeat([]string{"k"}, 300), "other")...)
				},
				during: func(t *testing.T, n *node) {
					for range 3 { // what cannot be put aside is in the way, if it is more than a look goes past
						item := n.take(t)
						require.Equal(t, "k", item.Name)
						n.requireNoWork(t)
						n.done(t, item)
					}
					require.Equal(t, "k", n.take(t).Name)
				},
				after: func(t *testing.T, n *node) { require.Equal(t, "other", n.take(t).Name) },
			}
		}},
		// What is kept back for somebody who was removed by hand the fallback brings back, once it has the lock. Until then it does the rest.
		"limits, and items are left": {`hashtext('pgwake limits of ' || current_schema()), hashtext('default')`, true, func() steps {
			return steps{
				before: func(t *testing.T, n *node) {
					n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
					n.keyed(t, "k", "k", "k")
					n.take(t)
					n.requireNoWork(t)
					require.EqualValues(t, 2, n.exec(t, `SELECT FROM worker_queue WHERE held_due IS NOT NULL`))
				},
				during: func(t *testing.T, n *node) {
					require.EqualValues(t, 1, n.exec(t, `DELETE FROM worker_queue WHERE lock_token IS NOT NULL`))
					before := n.Stats().Fallbacks
					require.Eventually(t, func() bool { return n.Stats().Fallbacks > before+2 }, patience, 10*time.Millisecond)
					require.EqualValues(t, 2, n.exec(t, `SELECT FROM worker_queue WHERE held_due IS NOT NULL`))
				},
				after: func(t *testing.T, n *node) {
					item, err := n.FetchWorkItem(t.Context(), soon)
					require.NoError(t, err)
					require.Equal(t, "k", item.Name)
				},
			}
		}},
		"a node that died": {`hashtext('pgwake nodes of ' || current_schema()), -7`, false, func() steps {
			return steps{
				during: func(t *testing.T, n *node) {
					n.ghost(t, -7) // without the lock it could be gone at once
					n.exec(t, `UPDATE waiters SET queue = 'worker', fanout = 1 WHERE node = -7 AND lane = 1`)
					for range 8 { // some of it is told to the dead one alone
						waits(t, n)
					}
					require.Positive(t, n.exec(t, `SELECT FROM waiters WHERE node = -7`))
				},
				after: func(t *testing.T, n *node) {
					require.Eventually(t, func() bool { return n.exec(t, `SELECT FROM waiters WHERE node = -7`) == 0 }, patience, 10*time.Millisecond)
				},
			}
		}},
	} {
		for _, function := range []string{"pg_advisory_xact_lock", "pg_advisory_xact_lock_shared"} {
			if function == "pg_advisory_xact_lock_shared" && !c.shared {
				continue
			}
			t.Run(name+" "+function, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, &pgwake.Config{FallbackInterval: 100 * time.Millisecond})
				s := c.steps()
				if s.before != nil {
					s.before(t, n)
				}
				release := n.holdBy(t, function, c.lock)
				s.during(t, n)
				comes := n.another(t)
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				require.NoError(t, comes.Close(ctx))
				release()
				if s.after != nil {
					s.after(t, n)
				}
			})
		}
	}
}

// Whoever locks several items locks the one with the lower id first. These look for theirs along indexes of another order.
func TestLocks_ItemsInAnotherOrder_AreLockedByID(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(t *testing.T, n *node) (sql string){
		"undo_work_claim": func(t *testing.T, n *node) string {
			_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "a", Session: "s"}, nil)
			require.NoError(t, err)
			n.enqueue(t, "b")
			items, err := n.FetchWorkItems(t.Context(), 2, ownedBy("we"))
			require.NoError(t, err)
			require.Len(t, items, 2)
			return `SELECT undo_work_claim('` + claimOf(items[0].LockToken) + `', '24 h')`
		},
		"set_limits, and items are held": func(t *testing.T, n *node) string {
			n.limit(t, pgwake.Limits{MaxRunningPerKey: 1})
			n.keyed(t, "b", "a")
			n.takeSome(t, 2)
			n.keyed(t, "b", "a")
			n.requireNoWork(t)
			n.exec(t, `DELETE FROM worker_queue WHERE held_due IS NULL`)
			return `SELECT set_limits('default', p_max_running_per_key => 2)`
		},
		"set_limits, and items have paid": func(t *testing.T, n *node) string {
			n.limit(t, pgwake.Limits{RatePerKey: pgwake.Rate{Interval: time.Hour}})
			n.keyed(t, "a", "b")
			items, _ := n.takeSome(t, 2)
			for _, i := range items {
				require.NoError(t, n.AbandonWorkItem(t.Context(), i.LockToken, &pgwake.AbandonOptions{IgnoreAttempt: true}))
			}
			n.exec(t, `UPDATE worker_queue SET priority = 9 WHERE name = 'a'`)
			return `SELECT set_limits('default', p_rate_interval => '1 min')`
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			sql := prepare(t, n)
			ids := query[int64](t, n, `SELECT id FROM worker_queue ORDER BY id`)
			require.Len(t, ids, 2)
			tx, other := n.begin(t), n.begin(t)
			lock := func(id int64) error {
				return dropped(tx.Exec(t.Context(), `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, id))
			}
			require.NoError(t, lock(ids[0]))
			changed := make(chan error, 1)
			go func() {
				_, err := other.Exec(tctx, "/* "+n.quoted()+" */ "+sql)
				changed <- err
			}()
			n.awaitBlocked(t, 1)
			locked := lock(ids[1])
			require.NoError(t, tx.Rollback(t.Context()))
			require.NoError(t, errors.Join(locked, <-changed))
			require.NoError(t, other.Commit(t.Context()))
		})
	}
}
