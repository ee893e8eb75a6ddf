package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what if two names, which have nothing to do with each other, have the same advisory lock? Its keys are hashes of 32 bits.

// twins returns two names that hash alike behind the prefix.
func (n *node) twins(t *testing.T, prefix string) (a, b string) {
	t.Helper()
	pairs := n.pairs(t, prefix, 1)
	return pairs[0][0], pairs[0][1]
}

// alike are the pairs that were found, by prefix. To look for them takes longer than most tests.
var alike = struct {
	mu    sync.Mutex
	found map[string][][]string
}{found: make(map[string][][]string)}

func (n *node) pairs(t *testing.T, prefix string, count int) [][]string {
	t.Helper()
	alike.mu.Lock()
	defer alike.mu.Unlock()
	found, known := alike.found[prefix]
	if !known {
		found = query[[]string](t, n, `SELECT ARRAY[min(name), max(name)] FROM (SELECT 'n' || i AS name FROM generate_series(1, 300000) AS i) AS s
			GROUP BY hashtext($1 || name) HAVING count(*) = 2 ORDER BY 1`, prefix)
		alike.found[prefix] = found
	}
	require.GreaterOrEqual(t, len(found), count)
	return slices.Clone(found[:count])
}

func TestCollisions_TwoInstances_BothHaveTheirTurns(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	a, b := n.twins(t, "")
	n.start(t, a)
	n.start(t, b)
	n.send(t, a, "k")
	n.send(t, b, "k")
	first, second := n.takeTurn(t), n.takeTurn(t)
	require.ElementsMatch(t, []string{a, b}, []string{first.Instance, second.Instance}, "at the same time")
	n.ackTurn(t, second, pgwake.OrchestrationAck{})
	n.ackTurn(t, first, pgwake.OrchestrationAck{})

	// As long as a transaction has the lock the other one waits, and nobody else.
	tx := n.begin(t)
	_, err := n.DeleteInstanceTx(t.Context(), tx, a, &pgwake.DeleteOptions{Force: true})
	require.NoError(t, err)
	n.send(t, b, "k")
	n.requireNoTurn(t)
	n.start(t, "c")
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, b, n.takeTurn(t).Instance)
}

// Whatever is done with the two of them at once, and in whichever order.
func TestCollisions_TwoInstancesManyAtWork_EachMessageIsHandledOnceAndNothingDeadlocks(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	a, b := n.twins(t, "")
	n.start(t, a)
	n.start(t, b)
	const messages = 60
	ctx, end := context.WithCancel(t.Context())
	defer end()
	var mu sync.Mutex
	handled := make(map[string]int)
	var producers, workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for {
				turn, err := n.FetchOrchestrationItem(ctx, soon)
				if ctx.Err() != nil {
					return
				}
				if err == nil {
					err = n.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{})
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, m := range turn.Messages {
					handled[turn.Instance+string(m.Kind)]++
				}
				if len(handled) == 2*2*messages {
					end()
				}
				mu.Unlock()
			}
		})
	}
	for _, instances := range [][]string{{a, b}, {b, a}} {
		producers.Go(func() {
			for i := range messages {
				var batch []pgwake.MessageEnqueue
				for _, instance := range instances {
					kind := pgwake.MessageKind(fmt.Sprint(" ", i, " with ", instances[0]))
					batch = append(batch, pgwake.MessageEnqueue{Message: pgwake.Message{Instance: instance, Kind: kind}})
				}
				if _, err := n.EnqueueForOrchestratorMany(tctx, batch); err != nil {
					t.Error(err)
				}
			}
		})
	}
	producers.Wait()
	workers.Wait()
	require.Len(t, handled, 2*2*messages)
	for what, times := range handled {
		require.Equal(t, 1, times, what)
	}
	require.Empty(t, n.rows(t)["orchestrator_queue"])
}

// Two pairs, each of which has one lock: deletions take locks in the order of their keys, and not of the ids.
func TestCollisions_InstancesAreDeletedManyAtATime_NoDeadlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	pairs := n.pairs(t, "", 5)
	a, b := pairs[0][0], pairs[0][1]
	i := slices.IndexFunc(pairs, func(p []string) bool { return a < p[0] && p[0] < b })
	require.Positive(t, i)
	c, d := pairs[i][0], pairs[i][1]
	for _, instance := range []string{a, b, c, d} {
		n.start(t, instance)
	}
	release := n.hold(t, `hashtext(current_schema()::text), hashtext('`+a+`')`, `hashtext(current_schema()::text), hashtext('`+c+`')`)
	ended := make(chan error, 2)
	for _, instances := range [][]string{{a, d}, {c, b}} {
		go func() {
			_, err := n.DeleteInstances(tctx, instances, &pgwake.DeleteOptions{Force: true})
			ended <- err
		}()
	}
	n.awaitBlocked(t, 2) // for the first lock of each
	release()
	require.NoError(t, errors.Join(<-ended, <-ended))
	require.Empty(t, query[string](t, n, `SELECT instance_id FROM instances UNION SELECT instance_id FROM instance_locks`))
}

func TestCollisions_TwoHistories_OneWaitsForTheOther(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	a, b := n.twins(t, "")
	tx := n.begin(t)
	event := []pgwake.Event{{ID: 1, Type: "e"}}
	require.NoError(t, n.AppendHistoryTx(t.Context(), tx, a, 1, event))
	ended := make(chan error, 1)
	go func() { ended <- n.AppendHistory(context.Background(), b, 1, event) }()
	n.awaitBlocked(t, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-ended)
	for _, instance := range []string{a, b} {
		events, err := n.ReadHistoryExecution(t.Context(), instance, 1, 1)
		require.NoError(t, err)
		require.Len(t, events, 1)
	}
}

func TestCollisions_TwoSessions_EachHasItsOwner(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	a, b := n.twins(t, "")
	add := func() {
		for _, session := range []string{a, b, a, b} {
			_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: session, Session: session}, nil)
			require.NoError(t, err)
		}
	}
	take := func(owner string, count int) (names []string) {
		items, err := n.FetchWorkItems(t.Context(), count, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: owner}})
		require.NoError(t, err)
		for _, item := range items {
			n.done(t, item)
			names = append(names, item.Name)
		}
		return names
	}
	add()
	require.Equal(t, []string{a}, take("A", 1))
	require.Equal(t, []string{b}, take("B", 1))
	require.Equal(t, []string{a}, take("A", 4))
	require.Equal(t, []string{b}, take("B", 4))
	n.exec(t, `DELETE FROM sessions`)
	add()
	require.Equal(t, []string{a, b, a, b}, take("C", 4), "both at once")
}

func TestCollisions_TwoNamespacesWithLimits_EachHasItsOwn(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]pgwake.Limits{
		"running": {MaxRunning: 1}, "running per key": {MaxRunningPerKey: 1}, "rate": {RatePerKey: pgwake.Rate{Interval: time.Hour}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			a, b := n.twins(t, "")
			for _, namespace := range []string{a, b} {
				require.NoError(t, n.SetLimits(t.Context(), namespace, l))
				for range 3 {
					_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: namespace, Key: "k"}, &pgwake.EnqueueOptions{Namespace: namespace})
					require.NoError(t, err)
				}
			}
			require.ElementsMatch(t, []string{a, b}, n.takeAll(t))
			require.Empty(t, n.takeAll(t))
			require.Empty(t, n.takeAll(t, a))
			require.Empty(t, n.takeAll(t, b))
		})
	}
}

// Whatever the lock is for that they have in common.
func TestCollisions_TwoSchemas_WorkSideBySide(t *testing.T) {
	t.Parallel()
	for name, prefix := range map[string]string{"turns": "", "nodes": "pgwake nodes of ", "limits": "pgwake limits of ", "homes": "pgwake homes of "} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			openBackstage(t)
			a, b := (&node{schema: "pg_catalog"}).twins(t, prefix)
			var nodes []*node
			for _, schema := range []string{a, b} {
				n := newNode(t, &pgwake.Config{Schema: schema, FallbackInterval: 100 * time.Millisecond})
				n.limit(t, pgwake.Limits{MaxRunning: 2})
				nodes = append(nodes, n)
			}
			if name == "nodes" { // the worst: each has the row of a node that died, whose key a node of the other has
				for i, n := range nodes {
					listener := query[int32](t, nodes[1-i], `SELECT listener FROM waiters WHERE lane = 0`)[0]
					n.ghost(t, listener)
					n.exec(t, `UPDATE waiters SET queue = 'worker', fanout = 1 WHERE node = -7 AND lane = 1`)
				}
			}
			const count = 30
			var all sync.WaitGroup
			for _, n := range nodes {
				all.Go(func() { // whoever works waits first: what is enqueued afterwards wakes him, or the fallback does
					for range count {
						item, err := n.FetchWorkItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Session: &pgwake.SessionOptions{Owner: "we"}})
						if err == nil {
							err = n.AckWorkItem(tctx, item.LockToken, nil)
						}
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
				all.Go(func() {
					for i := range count {
						if _, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "w", Session: "s"[i%2:]}, nil); err != nil {
							t.Error(err)
						}
					}
				})
				all.Go(func() {
					for i := range count {
						kind := pgwake.MessageKind("k")
						if i == 0 {
							kind = pgwake.MessageStart
						}
						if _, err := n.EnqueueForOrchestrator(tctx, pgwake.Message{Instance: "i", Kind: kind, Name: "flow"}, nil); err != nil {
							t.Error(err)
						}
						turn, err := n.FetchOrchestrationItem(tctx, soon)
						if err == nil {
							err = n.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{
								Name: "flow", PinnedVersion: &pgwake.Version{Major: i + 1}}})
						}
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			all.Wait()
			for _, n := range nodes {
				require.Empty(t, n.rows(t)["worker_queue"])
				require.Empty(t, n.rows(t)["orchestrator_queue"])
			}
		})
	}
}
