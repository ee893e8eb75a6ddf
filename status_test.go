package pgwake_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

func TestGetCustomStatus_SetSetClear_VersionGoesUpByOneEach(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	get := func(lastSeen int64) *pgwake.CustomStatus {
		s, err := n.GetCustomStatus(t.Context(), "i", lastSeen)
		require.NoError(t, err)
		return s
	}
	require.Nil(t, get(0), "unknown instance")
	require.Nil(t, get(-1), "unknown instance")
	n.instance(t, "i")
	n.instance(t, "j")
	require.Nil(t, get(0), "never set")
	require.Equal(t, &pgwake.CustomStatus{}, get(-1))

	n.exec(t, `SELECT apply_custom_status('i', false, 'half way')`)
	require.Equal(t, &pgwake.CustomStatus{Value: "half way", Set: true, Version: 1}, get(0))
	require.Nil(t, get(1))
	n.exec(t, `SELECT apply_custom_status('i', false, '')`)
	require.Equal(t, &pgwake.CustomStatus{Set: true, Version: 2}, get(1), "an empty one is set")
	n.exec(t, `SELECT apply_custom_status('i', true, 'ignored')`)
	require.Equal(t, &pgwake.CustomStatus{Version: 3}, get(0))
	require.Equal(t, &pgwake.CustomStatus{Version: 3}, get(2))
	require.Nil(t, get(3))
	require.Nil(t, get(99))
	require.Equal(t, []int64{0}, query[int64](t, n, `SELECT custom_status_version FROM instances WHERE instance_id = 'j'`))
}

func TestApplyCustomStatus_BreaksARule_IsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	for _, sql := range []string{`SELECT apply_custom_status('nobody', false, 'v')`, `SELECT apply_custom_status('i', false, NULL)`} {
		_, err := n.begin(t).Exec(t.Context(), sql)
		require.ErrorContains(t, err, "PW003")
	}
}

// ending is what a wait for an instance returned.
type ending struct {
	outcome *pgwake.Outcome
	err     error
}

// await starts to wait for the end of an instance, and returns once the wait is registered.
func (n *node) await(t *testing.T, ctx context.Context, instance string) <-chan ending {
	t.Helper()
	before := n.Stats().Waits
	out := make(chan ending, 1)
	go func() {
		o, err := n.WaitForInstance(ctx, instance)
		out <- ending{o, err}
	}()
	require.Eventually(t, func() bool { return n.Stats().Waits == before+1 || len(out) > 0 }, patience, 10*time.Millisecond)
	return out
}

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		require.Fail(t, "a change was lost")
		panic("unreachable")
	}
}

// requireWaitsOn asserts that, after a change that it is to see, a waiter still waits: one that came later and has
// seen a change that came later still is the proof.
func (n *node) requireWaitsOn(t *testing.T, from <-chan ending) {
	t.Helper()
	n.exec(t, `DELETE FROM instances WHERE instance_id = 'probe'`)
	n.instance(t, "probe")
	probe := n.await(t, t.Context(), "probe")
	n.end(t, "probe", 1, pgwake.StatusCompleted, "")
	require.NoError(t, receive(t, probe).err)
	require.Empty(t, from)
}

// end gives an execution a status, as ack_orchestration does.
func (n *node) end(t *testing.T, instance string, execution int64, status pgwake.Status, output string) {
	t.Helper()
	n.exec(t, `WITH ended AS (
			INSERT INTO executions (instance_id, execution_id, status, output) VALUES ($1, $2, $3, nullif($4, ''))
			ON CONFLICT (instance_id, execution_id) DO UPDATE SET status = excluded.status, output = excluded.output),
		current AS (UPDATE instances SET current_execution = $2 WHERE instance_id = $1)
		SELECT notify_instance($1)`, instance, execution, string(status), output)
}

func TestWaitForInstance_EachWayToEnd_ReturnsTheOutcome(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, status := range []pgwake.Status{pgwake.StatusCompleted, pgwake.StatusFailed, pgwake.StatusCancelled} {
		instance := string(status)
		n.instance(t, instance)
		out := n.await(t, t.Context(), instance)
		n.end(t, instance, 1, status, "42")
		got := receive(t, out)
		require.NoError(t, got.err)
		want := &pgwake.Outcome{Instance: instance, ExecutionID: 1, Status: status, Output: "42"}
		require.Equal(t, want, got.outcome)

		// One that has ended already is not waited for.
		again, err := n.WaitForInstance(t.Context(), instance)
		require.NoError(t, err)
		require.Equal(t, want, again)
	}
	require.Zero(t, n.Stats().Waits)
}

func TestWaitForInstance_ContinuesAsNew_WaitsForTheExecutionThatEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	out := n.await(t, t.Context(), "i")
	n.end(t, "i", 1, pgwake.StatusContinuedAsNew, "for the next")
	n.requireWaitsOn(t, out)
	n.end(t, "i", 2, pgwake.StatusRunning, "")
	n.requireWaitsOn(t, out)
	n.exec(t, `SELECT apply_custom_status('i', false, 'nearly')`)
	n.requireWaitsOn(t, out)
	n.end(t, "i", 2, pgwake.StatusFailed, "boom")
	got := receive(t, out)
	require.NoError(t, got.err)
	require.Equal(t, &pgwake.Outcome{Instance: "i", ExecutionID: 2, Status: pgwake.StatusFailed, Output: "boom"}, got.outcome)
}

func TestWaitForInstance_DoesNotExistYet_IsWaitedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	out := n.await(t, t.Context(), "i")
	n.exec(t, `SELECT notify_instance('i')`)
	n.requireWaitsOn(t, out)
	n.instance(t, "i")
	n.requireWaitsOn(t, out) // nobody was told, and nothing has ended
	n.end(t, "i", 1, pgwake.StatusCompleted, "")
	got := receive(t, out)
	require.NoError(t, got.err)
	require.Equal(t, pgwake.StatusCompleted, got.outcome.Status)
}

func TestWait_InstanceIsDeleted_IsNotFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	out := n.await(t, t.Context(), "i")
	status := make(chan error, 1)
	go func() {
		_, err := n.WaitForStatus(t.Context(), "i", 7)
		status <- err
	}()
	require.Eventually(t, func() bool { return n.Stats().Waits == 2 }, patience, 10*time.Millisecond)
	n.requireWaitsOn(t, out) // both have been read: it exists
	n.exec(t, `WITH gone AS (DELETE FROM instances WHERE instance_id = 'i') SELECT notify_instance('i')`)
	require.False(t, requireError(t, receive(t, out).err, pgwake.ErrNotFound).Retryable)
	requireError(t, receive(t, status), pgwake.ErrNotFound)

	// To whoever comes now it is one that does not exist yet.
	out = n.await(t, t.Context(), "i")
	n.requireWaitsOn(t, out)
}

// Another instance with the same id, made before anybody looked, is not the one that was waited for.
func TestWait_InstanceIsDeletedAndMadeAnew_IsNotFound(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	n.exec(t, `SELECT apply_custom_status('i', false, 'one')`)
	outs := []<-chan ending{n.await(t, t.Context(), "i"), n.await(t, t.Context(), "i")}
	status := make(chan error, 1)
	go func() {
		_, err := n.WaitForStatus(t.Context(), "i", 1)
		status <- err
	}()
	require.Eventually(t, func() bool { return n.Stats().Waits == 3 }, patience, 10*time.Millisecond)
	n.requireWaitsOn(t, outs[0]) // all have been read: it exists

	tx := n.begin(t)
	_, err := n.DeleteInstanceTx(t.Context(), tx, "i", &pgwake.DeleteOptions{Force: true})
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO instances (instance_id, namespace, name) VALUES ('i', 'default', 'another')`)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO executions (instance_id, execution_id, status) VALUES ('i', 1, 'Completed')`)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT apply_custom_status('i', false, 'one'), apply_custom_status('i', false, 'two')`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	for _, out := range outs {
		requireError(t, receive(t, out).err, pgwake.ErrNotFound)
	}
	requireError(t, receive(t, status), pgwake.ErrNotFound)
	outcome, err := n.WaitForInstance(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, pgwake.StatusCompleted, outcome.Status)
}

func TestWaitForStatus_NewerThanLastSeen_ReturnsTheLatest(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	statuses := make(chan *pgwake.CustomStatus, 1)
	wait := func(lastSeen int64) {
		before := n.Stats().Waits
		go func() {
			s, err := n.WaitForStatus(t.Context(), "i", lastSeen)
			if err != nil {
				t.Errorf("wait for a version after %d: %v", lastSeen, err)
			}
			statuses <- s
		}()
		require.Eventually(t, func() bool { return n.Stats().Waits == before+1 || len(statuses) > 0 }, patience, 10*time.Millisecond)
	}
	wait(0) // does not exist yet
	n.instance(t, "i")
	n.exec(t, `SELECT apply_custom_status('i', false, 'one')`)
	require.Equal(t, &pgwake.CustomStatus{Value: "one", Set: true, Version: 1}, receive(t, statuses))
	wait(1)
	n.exec(t, `SELECT apply_custom_status('i', false, 'two'), apply_custom_status('i', false, 'three')`)
	require.Equal(t, &pgwake.CustomStatus{Value: "three", Set: true, Version: 3}, receive(t, statuses))
	wait(1) // newer already
	require.Equal(t, &pgwake.CustomStatus{Value: "three", Set: true, Version: 3}, receive(t, statuses))
	wait(3)
	n.exec(t, `SELECT apply_custom_status('i', true, NULL)`)
	require.Equal(t, &pgwake.CustomStatus{Version: 4}, receive(t, statuses))
	require.Zero(t, n.Stats().Waits)
}

func TestWait_ContextEnds_FreesTheWaiter(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	out := n.await(t, ctx, "i")
	cancel()
	require.False(t, requireError(t, receive(t, out).err, context.Canceled).Retryable)
	require.Zero(t, n.Stats().Waits)

	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	s, err := n.WaitForStatus(short, "i", 0)
	require.Nil(t, s)
	requireError(t, err, context.DeadlineExceeded)
	require.Zero(t, n.Stats().Waits)

	_, err = n.WaitForInstance(ctx, "i") // over before it began
	requireError(t, err, context.Canceled)
	for _, bad := range []string{"", "\x00", "\xff"} {
		_, err = n.WaitForInstance(t.Context(), bad)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.WaitForStatus(t.Context(), bad, 0)
		requireError(t, err, pgwake.ErrInvalid)
		_, err = n.GetCustomStatus(t.Context(), bad, 0)
		requireError(t, err, pgwake.ErrInvalid)
	}
}

// What a turn says about its instance reaches whoever waits, on this node and on others, however they learn of it.
func TestAckOrchestrationItem_StatusAndOutcome_ReachWhoeverWaits(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]pgwake.Config{
		"pushed": {},
		"polled": {Mode: pgwake.ModePolling, PollInterval: time.Hour}, // what this node did itself it knows
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, &config)
			nodes := []*node{n}
			if config.Mode != pgwake.ModePolling {
				nodes = append(nodes, n.another(t))
			}
			statuses := make(chan pgwake.CustomStatus, len(nodes))
			var outcomes []<-chan ending
			for _, at := range nodes {
				outcomes = append(outcomes, at.await(t, t.Context(), "i"))
			}
			for version, update := range []pgwake.CustomStatusUpdate{{Value: "one"}, {Value: "two"}, {Clear: true}} {
				for _, at := range nodes {
					go func() {
						s, err := at.WaitForStatus(t.Context(), "i", int64(version))
						if err != nil {
							t.Errorf("wait after version %d: %v", version, err)
							return
						}
						statuses <- *s
					}()
					require.Eventually(t, func() bool { return at.Stats().Waits == 2 }, patience, 10*time.Millisecond)
				}
				n.turn(t, "i", 1, pgwake.OrchestrationAck{CustomStatus: &update})
				n.turn(t, "i", 1, pgwake.OrchestrationAck{}) // leaves it as it is
				for range nodes {
					want := pgwake.CustomStatus{Value: update.Value, Set: !update.Clear, Version: int64(version + 1)}
					require.Equal(t, want, receive(t, statuses))
				}
			}
			n.turn(t, "i", 1, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusContinuedAsNew, Output: "next"}})
			n.turn(t, "i", 2, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted, Output: "done"}})
			for _, out := range outcomes {
				got := receive(t, out)
				require.NoError(t, got.err)
				require.Equal(t, &pgwake.Outcome{Instance: "i", ExecutionID: 2, Status: pgwake.StatusCompleted, Output: "done"}, got.outcome)
			}
		})
	}
}

// A status that is rolled back was never there.
func TestAckOrchestrationItemTx_Status_TakesEffectWithTheCommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	statuses := make(chan *pgwake.CustomStatus, 1)
	go func() {
		s, _ := n.WaitForStatus(t.Context(), "i", 0)
		statuses <- s
	}()
	require.Eventually(t, func() bool { return n.Stats().Waits == 1 }, patience, 10*time.Millisecond)
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	for _, value := range []string{"rolled back", "committed"} {
		tx := n.begin(t)
		require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken,
			pgwake.OrchestrationAck{CustomStatus: &pgwake.CustomStatusUpdate{Value: value}}))
		require.Empty(t, statuses)
		if value == "committed" {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
	}
	require.Equal(t, &pgwake.CustomStatus{Value: "committed", Set: true, Version: 1}, receive(t, statuses))
}
