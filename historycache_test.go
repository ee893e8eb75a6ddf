package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// reads counts what the server sends for turns: rows, and queries for what a node lacks.
type reads struct{ rows, queries atomic.Int64 }

type sqlKey struct{}

func (r *reads) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, sqlKey{}, data.SQL)
}

func (r *reads) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if sql, _ := ctx.Value(sqlKey{}).(string); strings.Contains(sql, ".resume_history(") {
		r.queries.Add(1)
		r.rows.Add(data.CommandTag.RowsAffected())
	}
}

func (r *reads) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (r *reads) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	if strings.Contains(data.SQL, ".fetch_orchestration(") {
		r.rows.Add(data.CommandTag.RowsAffected())
	}
}

func (r *reads) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// since returns how many there were since the last call.
func (r *reads) since() (rows, queries int64) { return r.rows.Swap(0), r.queries.Swap(0) }

// caching opens one more node, which keeps histories.
func (n *node) caching(tb testing.TB, config pgwake.Config) (*node, *reads) {
	tb.Helper()
	counts := &reads{}
	like := backstage.users.Config()
	like.MaxConns = 4
	like.ConnConfig.Tracer = counts
	pool, err := pgxpool.NewWithConfig(context.Background(), like)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	config.Schema, config.Logger = n.schema, silent
	if config.HistoryCache == 0 {
		config.HistoryCache = 64 << 20
	}
	p, err := pgwake.New(context.Background(), pool, &config)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, p.Close(context.Background())) })
	return &node{Provider: p, schema: n.schema}, counts
}

// turnOf sends the instance a message, takes its turn, and requires that it comes with the history as it is stored.
func (n *node) turnOf(tb tester, instance string) *pgwake.OrchestrationItem {
	tb.Helper()
	n.send(tb, instance, "k")
	turn := n.takeTurn(tb)
	require.Equal(tb, instance, turn.Instance)
	n.requireStored(tb, turn)
	return turn
}

func (n *node) requireStored(tb tester, turn *pgwake.OrchestrationItem) {
	tb.Helper()
	stored, err := n.ReadHistoryExecution(tctx, turn.Instance, turn.ExecutionID, math.MinInt64)
	require.NoError(tb, err)
	require.Equal(tb, len(stored), len(turn.History))
	for i := range stored {
		require.Equal(tb, stored[i], turn.History[i])
	}
	if len(stored) > 0 {
		require.Equal(tb, stored[len(stored)-1].ID, turn.LastEventID)
	}
}

func event(id int64, data string) pgwake.Event {
	return pgwake.Event{ID: id, Type: "e", Data: json.RawMessage(data)}
}

func flow(events ...pgwake.Event) pgwake.OrchestrationAck {
	return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, History: events}
}

func TestHistoryCache_OwnTurns_ReadNoEvent(t *testing.T) {
	t.Parallel()
	n, sent := newNode(t, nil).caching(t, pgwake.Config{})
	for _, events := range [][]pgwake.Event{
		{event(5, `{"a":  1}`)}, {}, {event(8, ``), event(7, `[]`)}, {event(6, `"between"`), event(9, `9`)}, {event(1, `1`)}, {event(12, `12`)},
	} {
		turn := n.turnOf(t, "i")
		rows, queries := sent.since()
		require.Zero(t, queries)
		require.Equal(t, int64(3), rows, "the item, its message, and the outlook")
		n.ackTurn(t, turn, flow(events...))
	}
	require.Len(t, n.turnOf(t, "i").History, 7)
}

func TestHistoryCache_LongHistory_ATurnReadsNoMoreThanWithAShortOne(t *testing.T) {
	t.Parallel()
	plain := newNode(t, nil)
	n, sent := plain.caching(t, pgwake.Config{})
	for _, length := range []int64{20, 20_000} {
		instance := fmt.Sprint(length)
		n.ackTurn(t, n.turnOf(t, instance), flow(event(1, `1`)))
		more := make([]pgwake.Event, 0, length)
		for id := range length {
			more = append(more, event(id+2, `{"n": 1}`))
		}
		require.NoError(t, plain.AppendHistory(t.Context(), instance, 1, more))
		sent.since()
		n.ackTurn(t, n.turnOf(t, instance), flow(event(length+2, `1`)))
		rows, queries := sent.since()
		require.Equal(t, int64(1), queries)
		require.Equal(t, 3+1+1+length, rows, "what it lacked, once, after the last that it knew")
		for range 3 {
			turn := n.turnOf(t, instance)
			rows, queries = sent.since()
			require.Zero(t, queries)
			require.Equal(t, int64(3), rows)
			n.ackTurn(t, turn, flow(event(turn.LastEventID+1, `1`)))
		}
	}
}

func TestHistoryCache_AnotherNodeTookTurns_ReadsWhatThatAdded(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, sent := other.caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`), event(2, `2`)))
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(3, `3`)))
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(4, `4`)))
	sent.since()
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(5, `5`)))
	rows, queries := sent.since()
	require.Equal(t, int64(1), queries)
	require.Equal(t, int64(3+1+1+2), rows)
	n.turnOf(t, "i")
	_, queries = sent.since()
	require.Zero(t, queries)
}

func TestHistoryCache_AppendedBelowTheLastEvent_IsNoticed(t *testing.T) {
	t.Parallel()
	for name, added := range map[string][]pgwake.Event{
		"below": {event(3, `3`)}, "below and above": {event(3, `3`), event(99, `99`)}, "above": {event(99, `99`)}, "first": {event(-7, `0`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			other := newNode(t, nil)
			n, _ := other.caching(t, pgwake.Config{})
			n.ackTurn(t, n.turnOf(t, "i"), flow(event(2, `2`), event(10, `10`)))
			require.NoError(t, other.AppendHistory(t.Context(), "i", 1, added))
			turn := n.turnOf(t, "i")
			require.NoError(t, other.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event(4, `"under the lock"`)}))
			n.ackTurn(t, turn, flow(event(50, `50`)))
			n.ackTurn(t, n.turnOf(t, "i"), flow())
			n.turnOf(t, "i")
		})
	}
}

func TestHistoryCache_InstanceMadeAnew_HasNothingOfTheOldOne(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `"old"`), event(2, `"old"`)))
	at := n.turnOf(t, "i").History[0].CreatedAt
	_, err := other.DeleteInstance(t.Context(), "i", &pgwake.DeleteOptions{Force: true})
	require.NoError(t, err)
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(1, `"new"`), event(2, `"new"`)))
	// The clock of the server may stand still, or be set back.
	n.exec(t, `UPDATE history SET created_at = $1`, at)
	n.exec(t, `UPDATE executions SET appended_at = $1`, at)
	require.Equal(t, []string{`1 e "new"`, `2 e "new"`}, eventsOf(n.turnOf(t, "i").History))
}

func TestHistoryCache_MadeAnewAndLonger_HasNothingOfTheOldOne(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `"old"`), event(2, `"old"`)))
	at := n.turnOf(t, "i").History[0].CreatedAt
	_, err := other.DeleteInstance(t.Context(), "i", &pgwake.DeleteOptions{Force: true})
	require.NoError(t, err)
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(1, `"new"`), event(2, `"new"`), event(3, `"new"`)))
	n.exec(t, `UPDATE history SET created_at = $1`, at)
	require.Equal(t, []string{`1 e "new"`, `2 e "new"`, `3 e "new"`}, eventsOf(n.turnOf(t, "i").History))
}

// A crash with synchronous_commit off, or a standby that was behind when it took over.
func TestHistoryCache_ServerLostACommit_TurnHasWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, instead := range map[string][]pgwake.Event{
		"another event": {event(2, `"another"`)}, "others": {event(2, `"another"`), event(3, `3`)}, "others with other ids": {event(3, `3`), event(4, `4`)}, "nothing": nil,
	} {
		for _, unseen := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", unseen ", unseen), func(t *testing.T) {
				t.Parallel()
				other := newNode(t, nil)
				n, _ := other.caching(t, pgwake.Config{})
				n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
				was := query[string](t, n, `SELECT to_json(executions) FROM executions`)[0]
				n.ackTurn(t, n.turnOf(t, "i"), flow(event(2, `"lost"`)))
				n.exec(t, `DELETE FROM history WHERE event_id = 2`)
				n.exec(t, `UPDATE executions x SET (event_count, last_event, appended_at) =
					(SELECT w.event_count, w.last_event, w.appended_at FROM json_populate_record(x, $1) w)`, was)
				if instead != nil {
					other.ackTurn(t, other.turnOf(t, "i"), flow(instead...))
				}
				if unseen { // this node does not look at the history before it adds to it
					n.send(t, "i", "k")
					turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, WithoutHistory: true})
					require.NoError(t, err)
					n.ackTurn(t, turn, flow(event(9, `9`)))
				}
				n.ackTurn(t, n.turnOf(t, "i"), flow(event(10, `10`)))
				n.turnOf(t, "i")
			})
		}
	}
}

func TestHistoryCache_AckFailed_IsNotInTheHistory(t *testing.T) {
	t.Parallel()
	n, sent := newNode(t, nil).caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
	turn := n.turnOf(t, "i")
	require.ErrorIs(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, flow(event(2, `2`), event(1, `again`))), pgwake.ErrInvalid)
	require.ErrorIs(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, flow(event(2, `2`), event(1, `1`))), pgwake.ErrDuplicateEvent)
	n.travel(t, 2*lease)
	require.ErrorIs(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, flow(event(2, `2`))), pgwake.ErrLockLost)
	sent.since()
	turn = n.takeTurn(t)
	n.requireStored(t, turn)
	_, queries := sent.since()
	require.Equal(t, int64(1), queries, "nothing is taken for granted")
	n.ackTurn(t, turn, flow(event(3, `3`)))
	require.Len(t, n.turnOf(t, "i").History, 2)
}

func TestHistoryCache_OutcomeOfTheAckIsUnknown_TurnHasWhatIsStored(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
	turn := n.turnOf(t, "i")
	blocker := n.begin(t)
	_, err := blocker.Exec(t.Context(), `SELECT FROM executions FOR UPDATE`)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	outcome := make(chan error)
	go func() { outcome <- n.AckOrchestrationItem(ctx, turn.LockToken, flow(event(2, `2`))) }()
	n.awaitBlocked(t, 1)
	cancel()
	require.ErrorIs(t, <-outcome, context.Canceled)
	require.NoError(t, blocker.Rollback(t.Context()))
	require.Eventually(t, func() bool { return len(n.blocked(t)) == 0 }, patience, 10*time.Millisecond)
	n.travel(t, 2*lease)
	n.send(t, "i", "k")
	n.requireStored(t, n.takeTurn(t))
}

func TestHistoryCache_AckInATransaction_CountsOnceItIsCommitted(t *testing.T) {
	t.Parallel()
	n, sent := newNode(t, nil).caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
	for id, commit := range []bool{false, true} {
		turn := n.turnOf(t, "i")
		tx := n.begin(t)
		require.NoError(t, n.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, flow(event(int64(10+id), `"x"`))))
		if commit {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil))
			n.requireStored(t, n.takeTurn(t))
			n.travel(t, 2*lease)
		}
	}
	sent.since()
	require.Len(t, n.turnOf(t, "i").History, 2)
	rows, _ := sent.since()
	require.Equal(t, int64(3+1+1+1), rows, "not all of it")
}

func TestHistoryCache_ValidateEvent_IsAskedEachTimeAndItsErrorLeavesNoTrace(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	var refuse atomic.Bool
	var asked atomic.Int64
	n, _ := newNode(t, nil).caching(t, pgwake.Config{ValidateEvent: func(e *pgwake.Event) error {
		asked.Add(1)
		e.Type, e.Data[0] = "validated", '#'
		if refuse.Load() && e.ID == 2 {
			return broken
		}
		return nil
	}})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`), event(2, `2`), event(3, `3`)))
	for _, bad := range []bool{false, false, true, true, false} {
		refuse.Store(bad)
		asked.Store(0)
		n.send(t, "i", "k")
		turn := n.takeTurn(t)
		if bad {
			require.ErrorIs(t, turn.HistoryError, broken)
			require.Empty(t, turn.History)
			require.Equal(t, int64(2), asked.Load())
		} else {
			require.NoError(t, turn.HistoryError)
			require.Equal(t, []string{"1 validated #", "2 validated #", "3 validated #"}, eventsOf(turn.History))
			require.Equal(t, int64(3), asked.Load())
		}
		require.Equal(t, int64(3), turn.LastEventID)
		n.ackTurn(t, turn, flow())
	}
}

func TestHistoryCache_CallerWritesToWhatItGotOrGave_NextTurnIsWhole(t *testing.T) {
	t.Parallel()
	n, _ := newNode(t, nil).caching(t, pgwake.Config{})
	given := []pgwake.Event{event(1, `"one"`), event(2, `"two"`)}
	n.ackTurn(t, n.turnOf(t, "i"), flow(given...))
	spoil := func(events []pgwake.Event) {
		for i := range events {
			_ = append(events[i].Data, `xxxxxxxx`...)
			copy(events[i].Data, `########`)
			events[i].ID, events[i].Type = 99, "spoilt"
		}
		_ = append(events, event(98, `98`))
	}
	spoil(given)
	for range 3 {
		turn := n.turnOf(t, "i")
		whole := slices.Clone(turn.History[1].Data)
		_ = append(turn.History[0].Data, 'x')
		require.Equal(t, whole, turn.History[1].Data, "appending to one event's data leaves the next alone")
		spoil(turn.History)
		n.ackTurn(t, turn, flow())
	}
	require.NoError(t, n.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event(3, `3`)}))
	spoil(n.turnOf(t, "i").History) // which was just read
	n.travel(t, 2*lease)
	n.requireStored(t, n.takeTurn(t))
}

func TestHistoryCache_ExecutionsOfAnInstance_EachHasItsOwn(t *testing.T) {
	t.Parallel()
	n, sent := newNode(t, nil).caching(t, pgwake.Config{})
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `"first"`)))
	turn := n.turnOf(t, "i")
	ack := flow(event(2, `"first"`))
	ack.Metadata.Status = pgwake.StatusContinuedAsNew
	ack.Messages = []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "i", Kind: pgwake.MessageContinueAsNew, Name: "flow", ExecutionID: 2}}}
	n.ackTurn(t, turn, ack)
	turn = n.takeTurn(t)
	require.Equal(t, int64(2), turn.ExecutionID)
	require.Empty(t, turn.History)
	ack = flow(event(1, `"second"`))
	ack.ExecutionID = 2
	n.ackTurn(t, turn, ack)
	sent.since()
	turn = n.turnOf(t, "i")
	require.Equal(t, []string{`1 e "second"`}, eventsOf(turn.History))
	_, queries := sent.since()
	require.Zero(t, queries)
	ack.History, ack.Metadata.Status = []pgwake.Event{event(2, `"end"`)}, pgwake.StatusCompleted
	n.ackTurn(t, turn, ack)
	n.turnOf(t, "i")
	_, queries = sent.since()
	require.Equal(t, int64(1), queries, "what has ended is not kept")
}

func TestResumeHistory_LongHistory_ReadsOnlyItsEnd(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.start(t, "i")
	n.exec(t, `SELECT append_history('i', 1, array_agg(g), array_agg('e'::text), array_agg('1'::text)) FROM generate_series(1, 5000) g`)
	tx := n.begin(t)
	for _, sql := range []string{`SELECT FROM resume_history('i', 1, 4998)`, `SELECT FROM read_history('i', 1, 4998)`} {
		read := `SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables WHERE schemaname = $1`
		var before, after int64
		require.NoError(t, tx.QueryRow(t.Context(), read, n.schema).Scan(&before))
		_, err := tx.Exec(t.Context(), sql)
		require.NoError(t, err)
		require.NoError(t, tx.QueryRow(t.Context(), read, n.schema).Scan(&after))
		require.LessOrEqual(t, after-before, int64(10), sql)
	}
}

func TestHistoryCache_TooSmall_KeepsWhatWasUsedLast(t *testing.T) {
	t.Parallel()
	n, sent := newNode(t, nil).caching(t, pgwake.Config{HistoryCache: 25_000})
	data := `"` + strings.Repeat("x", 10_000) + `"`
	for _, instance := range []string{"a", "b"} {
		n.ackTurn(t, n.turnOf(t, instance), flow(event(1, data)))
	}
	turn := func(instance string) int64 {
		sent.since()
		n.ackTurn(t, n.turnOf(t, instance), flow())
		_, queries := sent.since()
		return queries
	}
	require.Zero(t, turn("b"))
	require.Zero(t, turn("a"))
	n.ackTurn(t, n.turnOf(t, "c"), flow(event(1, data))) // there is room for two
	require.Zero(t, turn("a"))
	require.Zero(t, turn("c"))
	require.Equal(t, int64(1), turn("b"))
	require.Zero(t, turn("b"))
	require.Zero(t, turn("c"))
	require.Equal(t, int64(1), turn("a"))

	n.ackTurn(t, n.turnOf(t, "large"), flow(event(1, data), event(2, data), event(3, data)))
	require.Equal(t, int64(1), turn("large"))
	require.Equal(t, int64(1), turn("large"), "what has no room at all is not kept")
	require.Zero(t, turn("a"), "nor does it drive out what has")
	require.Zero(t, turn("c"))
}

func TestHistoryCache_NotAskedFor_ReadsNothing(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, sent := other.caching(t, pgwake.Config{})
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(1, `1`)))
	n.send(t, "i", "k")
	turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, WithoutHistory: true})
	require.NoError(t, err)
	require.Empty(t, turn.History)
	require.Equal(t, int64(1), turn.LastEventID)
	_, queries := sent.since()
	require.Zero(t, queries)
}

func TestHistoryCache_SecondQueryFails_TurnIsGivenBack(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	other.ackTurn(t, other.turnOf(t, "i"), flow(event(1, `1`)))
	other.send(t, "i", "k")
	n.exec(t, `ALTER FUNCTION resume_history RENAME TO gone`)
	_, err := n.FetchOrchestrationItem(t.Context(), now)
	require.ErrorContains(t, err, "resume_history")
	n.exec(t, `ALTER FUNCTION gone RENAME TO resume_history`)
	turn, err := other.FetchOrchestrationItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, 1, turn.Attempt)
}

// The history of an execution may begin before the execution does.
func TestAppendHistory_BeforeTheFirstAck_IsCounted(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	require.NoError(t, other.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event(0, `0`)}))
	require.Len(t, n.turnOf(t, "i").History, 1)
	require.NoError(t, other.AppendHistory(t.Context(), "i", 1, []pgwake.Event{event(7, `7`)}))
	n.travel(t, 2*lease)
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(2, `2`)))
	n.turnOf(t, "i")
	require.Equal(t, []string{"4 7"}, query[string](t, n, `SELECT event_count || ' ' || last_event FROM executions`))
}

func TestAppendHistory_WhileTheFirstAckIsMade_IsCounted(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"append", "ack"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			other := newNode(t, nil)
			n, _ := other.caching(t, pgwake.Config{})
			turn := n.turnOf(t, "i")
			add := func(tx pgx.Tx) error {
				return other.AppendHistoryTx(t.Context(), tx, "i", 1, []pgwake.Event{event(7, `7`)})
			}
			ack := func(tx pgx.Tx) error {
				return other.AckOrchestrationItemTx(t.Context(), tx, turn.LockToken, flow(event(1, `1`)))
			}
			one, two := add, ack
			if first == "ack" {
				one, two = ack, add
			}
			a, b := n.begin(t), n.begin(t)
			require.NoError(t, one(a))
			outcome := make(chan error)
			go func() { outcome <- two(b) }()
			n.awaitBlocked(t, 1)
			require.NoError(t, a.Commit(t.Context()))
			require.NoError(t, <-outcome)
			require.NoError(t, b.Commit(t.Context()))
			require.Len(t, n.turnOf(t, "i").History, 2)
			require.Equal(t, []string{"2 7"}, query[string](t, n, `SELECT event_count || ' ' || last_event FROM executions`))
		})
	}
}

// Whoever does not see that the execution is known would not count what he adds, and who has a copy would not miss it.
func TestAppendHistoryTx_FirstAckIsAfterItsSnapshot_IsRefused(t *testing.T) {
	t.Parallel()
	other := newNode(t, nil)
	n, _ := other.caching(t, pgwake.Config{})
	tx := other.begin(t)
	_, err := tx.Exec(t.Context(), `COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1`)
	require.NoError(t, err)
	n.ackTurn(t, n.turnOf(t, "i"), flow(event(1, `1`)))
	err = other.AppendHistoryTx(t.Context(), tx, "i", 1, []pgwake.Event{event(2, `2`)})
	require.ErrorContains(t, err, "READ COMMITTED")
	require.False(t, requireError(t, err, pgwake.ErrInvalid).Retryable)
	require.Error(t, tx.Commit(t.Context()))
	require.Len(t, n.turnOf(t, "i").History, 1)
	require.Equal(t, []string{"1 1"}, query[string](t, n, `SELECT event_count || ' ' || last_event FROM executions`))
}

func TestHistoryCache_AnythingGoes_EachTurnHasWhatIsStored(t *testing.T) {
	t.Parallel()
	plain := newNode(t, nil)
	large, _ := plain.caching(t, pgwake.Config{})
	small, _ := plain.caching(t, pgwake.Config{HistoryCache: 1500})
	nodes := []*node{large, large, small, plain}
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		instances := []string{fmt.Sprintf("%d-a", run), fmt.Sprintf("%d-b", run)}
		taken := make(map[string]map[int64]bool)
		events := func(t *rapid.T, instance string) (all []pgwake.Event) {
			if taken[instance] == nil {
				taken[instance] = make(map[int64]bool)
			}
			for range rapid.IntRange(0, 3).Draw(t, "events") {
				id := rapid.Int64Range(0, 60).Draw(t, "id")
				if !taken[instance][id] {
					taken[instance][id] = true
					all = append(all, event(id, fmt.Sprint(rapid.IntRange(0, 99).Draw(t, "data"))))
				}
			}
			return all
		}
		t.Repeat(map[string]func(*rapid.T){
			"turn": func(t *rapid.T) {
				instance := rapid.SampledFrom(instances).Draw(t, "instance")
				n := rapid.SampledFrom(nodes).Draw(t, "node")
				n.send(t, instance, "k")
				o := *now
				o.WithoutHistory = rapid.IntRange(0, 4).Draw(t, "without history") == 0
				turn, err := n.FetchOrchestrationItem(tctx, &o)
				require.NoError(t, err)
				if !o.WithoutHistory {
					plain.requireStored(t, turn)
				}
				if rapid.IntRange(0, 3).Draw(t, "append under the lock") == 0 {
					require.NoError(t, plain.AppendHistory(tctx, instance, 1, events(t, instance)))
				}
				switch rapid.IntRange(0, 5).Draw(t, "end") {
				case 0:
					require.NoError(t, n.AbandonOrchestrationItem(tctx, turn.LockToken, nil))
					turn = plain.takeTurn(t)
					plain.ackTurn(t, turn, flow())
				case 1:
					tx := n.begin(t)
					require.NoError(t, n.AckOrchestrationItemTx(tctx, tx, turn.LockToken, flow(events(t, instance)...)))
					require.NoError(t, tx.Commit(tctx))
				default:
					n.ackTurn(t, turn, flow(events(t, instance)...))
				}
			},
			"append": func(t *rapid.T) {
				instance := rapid.SampledFrom(instances).Draw(t, "instance")
				require.NoError(t, plain.AppendHistory(tctx, instance, 1, events(t, instance)))
			},
			"make anew": func(t *rapid.T) {
				instance := rapid.SampledFrom(instances).Draw(t, "instance")
				_, err := plain.DeleteInstance(tctx, instance, &pgwake.DeleteOptions{Force: true})
				if errors.Is(err, pgwake.ErrNotFound) {
					return
				}
				require.NoError(t, err)
				delete(taken, instance)
			},
			"": func(t *rapid.T) {
				require.Empty(t, query[string](t, plain, `SELECT x.instance_id FROM executions x
					WHERE (x.event_count, x.last_event) NOT IN
						(SELECT count(*), greatest(max(h.event_id), 0) FROM history h WHERE h.instance_id = x.instance_id AND h.execution_id = x.execution_id)`))
			},
		})
	})
}

func TestHistoryCache_ManyAtOnce_EachTurnIsWhole(t *testing.T) {
	t.Parallel()
	plain := newNode(t, nil)
	a, _ := plain.caching(t, pgwake.Config{})
	b, _ := plain.caching(t, pgwake.Config{HistoryCache: 6000})
	const instances, turns = 8, 12
	for i := range instances {
		plain.send(t, fmt.Sprint(i), "k")
	}
	var all sync.WaitGroup
	var left atomic.Int64
	left.Store(instances * turns)
	for _, n := range []*node{a, a, a, b, b} {
		all.Go(func() {
			for left.Load() > 0 {
				turn, err := n.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 50 * time.Millisecond})
				if errors.Is(err, pgwake.ErrNoWork) || errors.Is(err, context.DeadlineExceeded) { // or it got no connection in time
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				for i, e := range turn.History {
					if e.ID != int64(i+1) || string(e.Data) != fmt.Sprint(e.ID) {
						t.Errorf("event %d is %d, %s", i, e.ID, e.Data)
					}
				}
				next := int64(len(turn.History) + 1)
				ack := flow(event(next, fmt.Sprint(next)))
				if next < turns {
					ack.Messages = []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: turn.Instance, Kind: "k"}}}
				}
				if err := n.AckOrchestrationItem(tctx, turn.LockToken, ack); err != nil {
					t.Error(err)
					return
				}
				left.Add(-1)
			}
		})
	}
	all.Wait()
	require.Equal(t, instances*turns, plain.rows(t)["history"])
}
