package pgwake_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

func TestReadHistory_UnknownInstance_IsEmptyAndNoError(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, read := range []func() ([]pgwake.Event, error){
		func() ([]pgwake.Event, error) { return n.ReadHistory(t.Context(), "nobody") },
		func() ([]pgwake.Event, error) { return n.ReadHistoryExecution(t.Context(), "nobody", 1, 0) },
	} {
		events, err := read()
		require.NoError(t, err)
		require.Empty(t, events)
	}
}

func TestAppendHistory_EventsOutOfOrder_AreReadById(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	data := json.RawMessage(`{"a":  [1, 2.50], "a": "\u00e9"}`)
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{
		{ID: 3, Type: "third"}, {ID: 1, Type: "first", Data: data}, {ID: 99999, Type: "last"}, {ID: 2, Type: "second"},
	}))
	events, err := n.ReadHistory(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, []string{"1 first " + string(data), "2 second ", "3 third ", "99999 last "}, eventsOf(events))
	for _, e := range events {
		require.False(t, e.CreatedAt.Before(before), "the server's time")
	}
}

func TestReadHistoryExecution_FromEventID_StartsThere(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, execution := range []int64{1, 2} {
		require.NoError(t, n.AppendHistory(t.Context(), "i", execution, []pgwake.Event{{ID: 1, Type: "a"}, {ID: 2, Type: "b"}, {ID: 4, Type: "d"}}))
	}
	require.NoError(t, n.AppendHistory(t.Context(), "j", 1, []pgwake.Event{{ID: 1, Type: "other instance"}}))
	for from, want := range map[int64][]string{
		0: {"1 a ", "2 b ", "4 d "}, 1: {"1 a ", "2 b ", "4 d "}, 2: {"2 b ", "4 d "}, 3: {"4 d "}, 4: {"4 d "}, 5: {},
	} {
		events, err := n.ReadHistoryExecution(t.Context(), "i", 2, from)
		require.NoError(t, err)
		require.Equal(t, want, eventsOf(events), "from %d", from)
	}
	events, err := n.ReadHistoryExecution(t.Context(), "i", 3, 0)
	require.NoError(t, err)
	require.Empty(t, events)

	page, err := n.ReadHistoryPage(t.Context(), "i", 2, 2, 1)
	require.NoError(t, err)
	require.Equal(t, []string{"2 b "}, eventsOf(page))
	for _, limit := range []int{0, -1, pgwake.MaxFetch + 1} {
		_, err = n.ReadHistoryPage(t.Context(), "i", 2, 0, limit)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
}

func TestReadHistory_SeveralExecutions_ReadsTheCurrentOneAndAllStayReadable(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for execution := int64(1); execution <= 3; execution++ {
		n.send(t, "i", "k")
		n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{ExecutionID: execution,
			Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: 10 * execution, Type: "e"}}})
		events, err := n.ReadHistory(t.Context(), "i")
		require.NoError(t, err)
		require.Len(t, events, 1)
		require.Equal(t, 10*execution, events[0].ID)
	}
	for execution := int64(1); execution <= 3; execution++ {
		events, err := n.ReadHistoryExecution(t.Context(), "i", execution, 0)
		require.NoError(t, err)
		require.Len(t, events, 1)
		require.Equal(t, 10*execution, events[0].ID)
	}
}

func TestAppendHistory_EventIDIsTaken_NoneIsAddedAndTheOriginalStays(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 1, Type: "original"}}))
	before := n.content(t)
	for _, events := range [][]pgwake.Event{
		{{ID: 2, Type: "fine"}, {ID: 1, Type: "again"}},
		{{ID: 2, Type: "twice"}, {ID: 2, Type: "twice"}},
	} {
		err := requireError(t, n.AppendHistory(t.Context(), "i", 1, events), pgwake.ErrDuplicateEvent)
		require.False(t, err.Retryable)
		require.Equal(t, before, n.content(t))
	}
	require.NoError(t, n.AppendHistory(t.Context(), "i", 2, []pgwake.Event{{ID: 1, Type: "another execution"}}))
	require.NoError(t, n.AppendHistory(t.Context(), "j", 1, []pgwake.Event{{ID: 1, Type: "another instance"}}))
}

func TestAppendHistory_NoEvents_DoesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := n.content(t)
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, nil))
	require.Equal(t, before, n.content(t))
}

func TestAppendHistory_InstanceUnderALock_DoesNotWaitForTheTurn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 99999, Type: "broken"}}))
	n.ackTurn(t, turn, pgwake.OrchestrationAck{History: []pgwake.Event{{ID: 1, Type: "e"}}})
	events, err := n.ReadHistory(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, []string{"1 e ", "99999 broken "}, eventsOf(events))
}

func TestAppendHistory_WhileATurnIsFetched_LastEventIDIsThatOfTheHistory(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 1, Type: "e"}}))
	n.send(t, "i", "k")
	tx := n.begin(t)
	_, err := tx.Exec(t.Context(), `LOCK TABLE kv_store`) // of which the description of the instance has a part
	require.NoError(t, err)
	turns := make(chan *pgwake.OrchestrationItem, 1)
	go func() {
		turn, err := n.FetchOrchestrationItem(tctx, now)
		if err != nil {
			t.Error(err)
		}
		turns <- turn
	}()
	n.awaitBlocked(t, 1)
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{{ID: 2, Type: "e"}}))
	require.NoError(t, tx.Commit(t.Context()))
	turn := <-turns
	require.NotNil(t, turn)
	require.Equal(t, []string{"1 e ", "2 e "}, eventsOf(turn.History))
	require.EqualValues(t, 2, turn.LastEventID)
}

func TestAppendHistoryTx_CommitOrRollback_DecidesForAll(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, commit := range []bool{false, true} {
		tx := n.begin(t)
		require.NoError(t, n.AppendHistoryTx(t.Context(), tx, "i", 1, []pgwake.Event{{ID: 1, Type: "a"}, {ID: 2, Type: "b"}}))
		require.NotContains(t, n.rows(t), "history", "seen before the commit")
		if commit {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
		require.Equal(t, map[bool]int{true: 2}[commit], n.rows(t)["history"])
	}
	tx := n.begin(t)
	requireError(t, n.AppendHistoryTx(t.Context(), tx, "i", 1, []pgwake.Event{{ID: 2, Type: "again"}}), pgwake.ErrDuplicateEvent)
	require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
}
