package pgwake_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does everybody learn of a new namespace, whoever adds it and whatever happens meanwhile?

// awaitNamespaces waits for one besides default and these, and hands it out.
func (n *node) awaitNamespaces(t *testing.T, known ...string) <-chan []string {
	t.Helper()
	got := make(chan []string, 1)
	reads := n.Stats().WaitReads
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if added, err := n.WaitForNamespaces(ctx, append(known, pgwake.DefaultNamespace)); err == nil {
			got <- added
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	require.Eventually(t, func() bool { return n.Stats().Waits == 1 && n.Stats().WaitReads > reads }, patience, 10*time.Millisecond)
	return got
}

func (n *node) requireAdded(t *testing.T, got <-chan []string, want ...string) {
	t.Helper()
	select {
	case added := <-got:
		require.Equal(t, want, added)
	case <-time.After(patience):
		require.Fail(t, "nobody told of the namespace")
	}
}

func TestWaitForNamespaces_WhoeverAddsOne_IsPushed(t *testing.T) {
	t.Parallel()
	for name, add := range map[string]func(t *testing.T, n *node){
		"library": func(t *testing.T, n *node) { n.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "new"}) },
		"batch": func(t *testing.T, n *node) {
			_, err := n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "x"}},
				{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "new"}}})
			require.NoError(t, err)
		},
		"ack": func(t *testing.T, n *node) {
			n.send(t, "i", "k")
			o := pgwake.EnqueueOptions{Namespace: "new"}
			turn := n.takeTurn(t)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"},
				WorkItems: []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{Name: "x"}}},
				Messages:  []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "j", Kind: "k"}, EnqueueOptions: o}}})
		},
		"message": func(t *testing.T, n *node) {
			n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "new"})
		},
		"SQL":       func(t *testing.T, n *node) { n.exec(t, `SELECT enqueue_work('x', p_namespace => 'new')`) },
		"register":  func(t *testing.T, n *node) { require.NoError(t, n.RegisterNamespace(t.Context(), "new")) },
		"the table": func(t *testing.T, n *node) { n.exec(t, `INSERT INTO namespaces (name) VALUES ('new')`) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			require.Eventually(t, func() bool { return n.Stats().Listening }, patience, 10*time.Millisecond)
			got := n.awaitNamespaces(t)
			reads := n.Stats().WaitReads
			add(t, n)
			n.requireAdded(t, got, "new")
			require.LessOrEqual(t, n.Stats().WaitReads, reads+1) // the first read may have been under way still
		})
	}
}

// Each of two transactions is the first. What one of them brings is not lost with the other.
func TestWaitForNamespaces_TheFirstTransactionRollsBack_TheSecondIsHeardOf(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	got := n.awaitNamespaces(t)
	enqueue := func(tx pgx.Tx) {
		_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: "new"})
		require.NoError(t, err)
	}
	first, second := n.begin(t), n.begin(t)
	enqueue(first)
	enqueue(second) // and does not wait for the first
	require.NoError(t, first.Rollback(t.Context()))
	require.Empty(t, got)
	require.NoError(t, second.Commit(t.Context()))
	n.requireAdded(t, got, "new")
}

func TestWaitForNamespaces_AddedWhileNobodyListens_IsFoundAfterwards(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.Eventually(t, func() bool { return n.Stats().Listening }, patience, 10*time.Millisecond)
	got := n.awaitNamespaces(t)
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks
		 WHERE locktype = 'advisory' AND pid <> pg_backend_pid()
		   AND objid IN (SELECT listener::oid FROM waiters)`)
	require.NoError(t, err)
	_, err = n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: "new"})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	n.requireAdded(t, got, "new")
	require.Eventually(t, func() bool { return n.Stats().Reconnects == 1 }, patience, 10*time.Millisecond)
}

// As many were removed as are added, so their number is the same.
func TestWaitForNamespaces_OneIsRemovedAndOneAdded_IsFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config pgwake.Config
		notify string
	}{
		"pushed":   {pgwake.Config{}, "on"},
		"polled":   {pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 10 * time.Millisecond}, "on"},
		"fallback": {pgwake.Config{FallbackInterval: time.Second, AggressivePolicy: pgwake.Never}, "off"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, &c.config)
			require.NoError(t, n.RegisterNamespace(t.Context(), "old"))
			got := n.awaitNamespaces(t, "old")
			tx := n.begin(t)
			_, err := tx.Exec(t.Context(), `DELETE FROM namespaces WHERE name = 'old'`)
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `SELECT set_config('pgwake.notify', $1, true)`, c.notify)
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `SELECT enqueue_work('x', p_namespace => 'new')`)
			require.NoError(t, err)
			require.NoError(t, tx.Commit(t.Context()))
			n.requireAdded(t, got, "new")
		})
	}
}

// Whoever waits where nothing is pushed has the namespaces counted, and read only if there are others: nodes of before went by how many there are.
func TestNewNamespaces_AsManyAsKnown_AreNotRead(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	first, second := n.begin(t), n.begin(t) // each is the first: two rows
	for _, tx := range []pgx.Tx{first, second} {
		require.NoError(t, n.RegisterNamespaceTx(t.Context(), tx, "new"))
	}
	require.NoError(t, first.Commit(t.Context()))
	require.NoError(t, second.Commit(t.Context()))
	require.Equal(t, []string{"default", "new"}, query[string](t, n, `SELECT name FROM new_namespaces(0)`))
	require.Equal(t, []int64{3, 3}, query[int64](t, n, `SELECT known FROM new_namespaces(2)`))
	require.Empty(t, query[string](t, n, `SELECT name FROM new_namespaces(3)`))
}

func TestWaitForNamespaces_Polling_IsFoundByPolls(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 10 * time.Millisecond})
	got := n.awaitNamespaces(t)
	n.exec(t, `SELECT enqueue_work('x', p_namespace => 'new')`)
	n.requireAdded(t, got, "new")
}

func TestNamespaces_BadOnes_AreRefusedBeforeAnythingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	requireError(t, n.RegisterNamespace(t.Context(), "No"), pgwake.ErrInvalid)
	_, err := n.WaitForNamespaces(t.Context(), []string{"a,b"})
	requireError(t, err, pgwake.ErrInvalid)
	for range 2 {
		require.NoError(t, n.RegisterNamespace(t.Context(), "twice"))
	}
	require.Equal(t, []string{"default", "twice"}, query[string](t, n, `SELECT name FROM namespaces ORDER BY 1`))
}
