package pgwake_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: do the nodes say how they are, when they are asked and only then?

// reported returns the first reports that are of so many nodes, or of more: one may need longer for its answer than it is waited for.
func (n *node) reported(t *testing.T, nodes int) []pgwake.NodeReport {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for reports, err := range n.NodeReports(ctx, time.Millisecond) {
		require.NoError(t, err)
		if len(reports) >= nodes {
			return reports
		}
	}
	t.Fatal("there were too few")
	return nil
}

func TestNodeReports_SeveralNodes_EachSaysWhatItsStatsSay(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.openAt(t, pgwaketest.URL(t), &pgwake.Config{Schema: n.schema, Mode: pgwake.ModeEventDriven})
	n.enqueue(t, "x")
	n.take(t)
	before := n.Stats().Worker
	reports := n.reported(t, 2)
	require.Len(t, reports, 2)
	modes := map[pgwake.Mode]pgwake.NodeReport{}
	for _, r := range reports {
		modes[r.Stats.Mode] = r
		require.Equal(t, n.schema, r.Schema)
		require.NotEmpty(t, r.Host)
		require.NotZero(t, r.PID)
		require.WithinDuration(t, time.Now(), r.At, time.Hour)
		require.True(t, r.Stats.Listening)
		require.Empty(t, r.Problems)
	}
	require.Equal(t, n.Stats().Worker.Finds, modes[pgwake.ModeHybrid].Stats.Worker.Finds)
	require.Equal(t, n.Stats().Worker.WakeLatency, modes[pgwake.ModeHybrid].Stats.Worker.WakeLatency)
	require.Equal(t, other.Stats().Worker.Items, modes[pgwake.ModeEventDriven].Stats.Worker.Items)
	after := n.Stats().Worker
	require.Equal(t, before.Tokens, after.Tokens, "it wakes nobody")
	require.Equal(t, before.Looks, after.Looks)
}

func TestNodeReports_GoesOn_AsOftenAsItIsAsked(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	times := 0
	for reports, err := range n.NodeReports(ctx, time.Millisecond) {
		require.NoError(t, err)
		require.LessOrEqual(t, len(reports), 1)
		if len(reports) == 0 { // its answer is late
			continue
		}
		if times++; times == 3 {
			cancel()
		}
	}
	require.Equal(t, 3, times, "it ends with its context")
}

func TestNodeReports_NodeDoesNotAnswer_IsMissing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	// One of a version that does not know the question holds the lock that says that it is there.
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtext('pgwake nodes of ' || $1), -7)`, n.schema)
	require.NoError(t, err)
	n.ghost(t, -7)
	n.nodeWith(t, func(i pgwake.NodeInfo) bool { return i.Key == -7 && i.Listening })

	// Meanwhile somebody answers for others. Anybody can hear the question.
	forger, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer func() { _ = forger.Close(context.Background()) }()
	_, err = forger.Exec(t.Context(), `LISTEN `+query[string](t, n, `SELECT channel('instance')`)[0])
	require.NoError(t, err)
	forged := make(chan error, 1)
	go func() {
		question, err := forger.WaitForNotification(t.Context())
		if err == nil {
			_, err = forger.Exec(t.Context(), `SELECT pg_notify($1, format('{"Key": %s}', i)) FROM generate_series(1, 1000) AS i`, strings.TrimPrefix(question.Payload, "pgwake report to "))
		}
		forged <- err
	}()
	require.Len(t, n.reported(t, 1), 1)
	require.NoError(t, <-forged)
}

func TestNodeReports_AskerDoesNotListenItself_HearsTheOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	asker := n.openAt(t, pgwaketest.URL(t), &pgwake.Config{Schema: n.schema, Mode: pgwake.ModeDisabled})
	require.Len(t, asker.reported(t, 1), 1)
}

func TestNodeReports_QuestionOfAStranger_IsNotAnswered(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	elsewhere, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer func() { _ = elsewhere.Close(context.Background()) }()
	channel := "elsewhere_" + n.schema
	_, err = elsewhere.Exec(t.Context(), `LISTEN `+channel)
	require.NoError(t, err)
	for _, reply := range []string{"", channel, "pgwake_report_", `pgwake_report_A"`, "pgwake_report_a b"} {
		n.exec(t, `SELECT ask_nodes($1)`, reply)
	}
	require.Len(t, n.reported(t, 1), 1, "and it goes on")
	n.exec(t, `SELECT pg_notify($1, 'the first')`, channel)
	heard, err := elsewhere.WaitForNotification(t.Context())
	require.NoError(t, err)
	require.Equal(t, "the first", heard.Payload)
}

func TestNodeReports_CannotBe_SaysWhy(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, err := range n.NodeReports(t.Context(), 0) {
		requireError(t, err, pgwake.ErrInvalid)
	}
	require.NoError(t, n.Close(t.Context()))
	for _, err := range n.NodeReports(t.Context(), time.Second) {
		requireError(t, err, pgwake.ErrClosed)
	}
}
