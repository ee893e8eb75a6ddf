package pgwake_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of sessions, and of instances that are sticky, when their owner says that it leaves?

// ownedBy asks for what is an owner's, for as long as it may be.
func ownedBy(owner string) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: owner, LockTimeout: time.Hour}}
}

// ownSession has an owner handle an item of the session.
func (n *node) ownSession(t *testing.T, owner, session string) {
	t.Helper()
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Session: session}, nil)
	require.NoError(t, err)
	item, err := n.FetchWorkItem(t.Context(), ownedBy(owner))
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
}

// stick makes an instance sticky to an owner for an hour.
func (n *node) stick(t *testing.T, instance, owner string) {
	t.Helper()
	n.start(t, instance)
	n.send(t, instance, "go")
	turn := n.takeTurn(t)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{ExecutionID: 1, Sticky: &pgwake.Sticky{Owner: owner, For: time.Hour}})
}

// releasing are the ways in which an owner can say it.
var releasing = map[string]func(t *testing.T, n *node, tx func(context.Context, pgx.Tx) error, verb func() error){
	"on the pool": func(t *testing.T, _ *node, _ func(context.Context, pgx.Tx) error, verb func() error) {
		require.NoError(t, verb())
	},
	"in a transaction": func(t *testing.T, n *node, twin func(context.Context, pgx.Tx) error, _ func() error) {
		tx := n.begin(t)
		require.NoError(t, twin(t.Context(), tx))
		require.NoError(t, tx.Commit(t.Context()))
	},
}

func TestReleaseSessions_WhoeverWaits_IsTold(t *testing.T) {
	t.Parallel()
	for way, release := range releasing {
		for where, waiter := range map[string]func(*node) *node{
			"here": func(n *node) *node { return n }, "on another node": func(n *node) *node { return n.another(t) },
		} {
			t.Run(way+", "+where, func(t *testing.T) {
				n := newNode(t, nil)
				n.ownSession(t, "a", "s")
				_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "next", Session: "s"}, nil)
				require.NoError(t, err)
				w := waiter(n)
				got := make(chan string, 1)
				go func() {
					o := ownedBy("b")
					o.NoWait, o.PollTimeout = false, patience
					item, err := w.FetchWorkItem(t.Context(), o)
					if err != nil {
						got <- err.Error()
						return
					}
					got <- item.Name
				}()
				require.Eventually(t, func() bool { s := w.Stats().Worker; return s.Parked == 1 && s.Settled }, patience, 10*time.Millisecond)
				release(t, n, func(ctx context.Context, tx pgx.Tx) error {
					_, err := n.ReleaseSessionsTx(ctx, tx, []string{"a"})
					return err
				}, func() error { _, err := n.ReleaseSessions(t.Context(), []string{"a"}); return err })
				require.Equal(t, "next", <-got)
				s := w.Stats().Worker
				require.Equal(t, int64(1), s.Finds["notify"]+s.Finds["local"], "%v", s.Finds)
				require.Zero(t, s.FallbackFinds+s.ScoutFinds)
			})
		}
	}
}

func TestReleaseSessions_OnlyWhatIsTheOwners_AndNothingOfWhichIsAtWork(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, session := range []string{"1", "2"} {
		n.ownSession(t, "a", session)
	}
	n.ownSession(t, "b", "3")
	n.ownSession(t, "a", "ended")
	n.exec(t, `UPDATE sessions SET locked_until = clock_timestamp() WHERE session_id = 'ended'`)
	for _, name := range []string{"at work", "next"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Session: "2"}, nil)
		require.NoError(t, err)
	}
	atWork, err := n.FetchWorkItem(t.Context(), ownedBy("a"))
	require.NoError(t, err)
	for owner, want := range map[string]int{"nobody": 0, "b": 1} {
		released, err := n.ReleaseSessions(t.Context(), []string{owner})
		require.NoError(t, err)
		require.Equal(t, want, released, owner)
	}
	released, err := n.ReleaseSessions(t.Context(), []string{"a"})
	require.NoError(t, err)
	require.Equal(t, 1, released)
	_, err = n.FetchWorkItem(t.Context(), ownedBy("b"))
	require.ErrorIs(t, err, pgwake.ErrNoWork, "an item of the session is at work elsewhere")

	require.NoError(t, n.AckWorkItem(t.Context(), atWork.LockToken, nil))
	released, err = n.ReleaseSessions(t.Context(), []string{"nobody", "a"})
	require.NoError(t, err)
	require.Equal(t, 1, released)
	renewed, err := n.RenewSessionLock(t.Context(), []string{"a"}, time.Hour, time.Hour)
	require.NoError(t, err)
	require.Zero(t, renewed, "a renewal revives none")
	item, err := n.FetchWorkItem(t.Context(), ownedBy("b"))
	require.NoError(t, err)
	require.Equal(t, "next", item.Name)
}

// Of a session whose item is acknowledged in a transaction that is open, nothing is known yet.
func TestReleaseSessions_AnItemIsBeingSettledInATransaction_ItIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Session: "s"}, nil)
	require.NoError(t, err)
	item, err := n.FetchWorkItem(t.Context(), ownedBy("a"))
	require.NoError(t, err)
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
	released, err := n.ReleaseSessions(t.Context(), []string{"a"})
	require.NoError(t, err)
	require.Zero(t, released)
}

func TestReleaseSticky_WhoeverWaits_IsTold(t *testing.T) {
	t.Parallel()
	for way, release := range releasing {
		for where, waiter := range map[string]func(*node) *node{
			"here": func(n *node) *node { return n }, "on another node": func(n *node) *node { return n.another(t) },
		} {
			for owner, by := range map[string]*pgwake.FetchOptions{
				"nobody's": {LockTimeout: lease, PollTimeout: patience},
				"another":  {LockTimeout: lease, PollTimeout: patience, Owner: "b"},
				"selects":  {LockTimeout: lease, PollTimeout: patience, Namespaces: []string{"default"}},
			} {
				t.Run(strings.Join([]string{way, where, owner}, ", "), func(t *testing.T) {
					n := newNode(t, nil)
					n.stick(t, "i", "a")
					n.send(t, "i", "next")
					w := waiter(n)
					got := make(chan error, 1)
					go func() {
						_, err := w.FetchOrchestrationItem(t.Context(), by)
						got <- err
					}()
					require.Eventually(t, func() bool { s := w.Stats().Orchestrator; return s.Parked == 1 && s.Settled }, patience, 10*time.Millisecond)
					release(t, n, func(ctx context.Context, tx pgx.Tx) error {
						_, err := n.ReleaseStickyTx(ctx, tx, []string{"a"})
						return err
					}, func() error { _, err := n.ReleaseSticky(t.Context(), []string{"a"}); return err })
					require.NoError(t, <-got)
					s := w.Stats().Orchestrator
					require.Equal(t, int64(1), s.Finds["notify"]+s.Finds["local"], "%v", s.Finds)
					require.Zero(t, s.FallbackFinds+s.ScoutFinds)
				})
			}
		}
	}
}

func TestReleaseSticky_OnlyWhatIsTheOwners(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.stick(t, "1", "a")
	n.stick(t, "2", "b")
	n.stick(t, "over", "a")
	n.exec(t, `UPDATE instances SET sticky_until = clock_timestamp() WHERE instance_id = 'over'`)
	n.send(t, "2", "next")
	for owner, want := range map[string]int{"nobody": 0, "a": 1} {
		released, err := n.ReleaseSticky(t.Context(), []string{owner})
		require.NoError(t, err)
		require.Equal(t, want, released, owner)
	}
	n.requireNoTurn(t)
	released, err := n.ReleaseSticky(t.Context(), []string{"a", "b"})
	require.NoError(t, err)
	require.Equal(t, 1, released)
	require.Equal(t, "2", n.takeTurn(t).Instance)
}

// More than one fetch brings in line, some of it not due yet.
func TestReleaseSticky_ManyInstancesWithTimers_EachIsDueWhenItsTimerIs(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const many = 50
	for i := range many {
		n.stick(t, fmt.Sprint(i), "a")
		n.sendWith(t, pgwake.Message{Instance: fmt.Sprint(i), Kind: "timer"}, &pgwake.EnqueueOptions{Delay: 10 * time.Minute})
	}
	released, err := n.ReleaseSticky(t.Context(), []string{"a"})
	require.NoError(t, err)
	require.Equal(t, many, released)
	n.requireNoTurn(t)
	n.exec(t, `UPDATE orchestrator_queue SET visible_at = visible_at - interval '10 minutes', sticky_due = sticky_due - interval '10 minutes'`)
	n.exec(t, `UPDATE realignments SET next_at = next_at - interval '10 minutes'`)
	for range many {
		n.takeTurn(t)
	}
	require.Zero(t, n.rows(t)["realignments"])
}

// A message that read the instance before, and is committed after.
func TestReleaseSticky_AMessageIsOnItsWay_ItComesToWhoeverWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.stick(t, "i", "a")
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(t.Context(), tx, pgwake.Message{Instance: "i", Kind: "next"}, nil)
	require.NoError(t, err)
	w := n.another(t)
	got := make(chan error, 1)
	go func() {
		_, err := w.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Owner: "b"})
		got <- err
	}()
	require.Eventually(t, func() bool { return w.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
	released, err := n.ReleaseSticky(t.Context(), []string{"a"})
	require.NoError(t, err)
	require.Equal(t, 1, released)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-got)
	require.Zero(t, w.Stats().Orchestrator.FallbackFinds)
}

// It waits for nobody: that ack says to whom the instance is.
func TestReleaseSticky_AnAckIsOnItsWay_ItIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.stick(t, "i", "a")
	n.send(t, "i", "next")
	turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Owner: "a"})
	require.NoError(t, err)
	tx := n.begin(t)
	require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, pgwake.OrchestrationAck{ExecutionID: 1}))
	released, err := n.ReleaseSticky(t.Context(), []string{"a"})
	require.NoError(t, err)
	require.Zero(t, released)
}

func TestRelease_OwnerThatNobodyCanBe_IsInvalid(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, owners := range [][]string{{""}, {"a", strings.Repeat("b", 256)}} {
		_, err := n.ReleaseSessions(t.Context(), owners)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
		_, err = n.ReleaseSticky(t.Context(), owners)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	for _, release := range []func(context.Context, []string) (int, error){n.ReleaseSessions, n.ReleaseSticky} {
		released, err := release(t.Context(), nil)
		require.NoError(t, err)
		require.Zero(t, released)
	}
}
