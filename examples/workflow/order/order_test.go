package order

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun_ProcessDies_OrderIsFulfilledAllTheSame(t *testing.T) {
	var lines []string
	r, err := Run(t.Context(), pgwaketest.URL(t), func(line string) { lines = append(lines, line) })
	require.NoError(t, err)

	assert.Len(t, r.Reservations, articleCount, "every activity had its effect")
	total := 0
	for _, n := range r.Reservations {
		total += n
	}
	assert.Greater(t, total, articleCount, "that of the dead process was repeated")
	assert.Equal(t, []pgwake.Status{pgwake.StatusContinuedAsNew, pgwake.StatusCompleted}, r.Statuses)
	assert.Equal(t, "20 articles for 389.00, paid by ACME Bank, sent as parcel 7", r.Output)
	for _, history := range r.Histories {
		for i, e := range history {
			assert.Equal(t, int64(i)+1, e.ID)
		}
	}
	assert.Positive(t, r.FromPayment)
	assert.NotEmpty(t, lines)
	assert.Empty(t, schemas(t))
}

func TestRun_Interrupted_LeavesNoSchema(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
	defer cancel()
	_, err := Run(ctx, pgwaketest.URL(t), func(string) {})
	require.ErrorIs(t, err, context.Canceled)
	assert.Empty(t, schemas(t))
}

func schemas(t *testing.T) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), // other tests may share the server
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname = $1)`, fmt.Sprintf("workflow_%d", os.Getpid())).Scan(&names))
	return names
}

// world delivers what decide sends, in any order and in any portions, as the queues may.
type world struct {
	t         *testing.T
	item      pgwake.OrchestrationItem
	pending   []pgwake.Message
	scheduled map[string]int // activities by name
	status    pgwake.Status
	output    string
}

// turn delivers the n first pending messages.
func (w *world) turn(n int) {
	w.item.Messages = nil
	for _, m := range w.pending[:n] {
		w.item.Messages = append(w.item.Messages, pgwake.ClaimedMessage{Message: m})
	}
	w.pending = w.pending[n:]

	ack, err := decide(fulfil, &w.item)
	require.NoError(w.t, err)
	again, err := decide(fulfil, &w.item)
	require.NoError(w.t, err)
	require.Equal(w.t, ack, again, "a turn that is repeated decides the same")

	if ack.ExecutionID > w.item.ExecutionID {
		w.item.ExecutionID, w.item.History = ack.ExecutionID, nil
	}
	for _, e := range ack.History {
		require.Equal(w.t, int64(len(w.item.History))+1, e.ID)
		w.item.History = append(w.item.History, e)
	}
	for _, a := range ack.WorkItems {
		w.scheduled[a.Name]++
		if a.Instance == "" {
			continue // the news of the end
		}
		result := json.RawMessage(`100`)
		if a.Name == "ship" {
			result = json.RawMessage(`"parcel 7"`)
		}
		w.pending = append(w.pending, pgwake.Message{Instance: a.Instance, Kind: activityCompleted,
			Data: encode(detail{Execution: a.ExecutionID, Call: a.ActivityID, Data: result})})
	}
	for _, m := range ack.Messages {
		w.pending = append(w.pending, m.Message)
	}
	if ack.Metadata.Status != "" {
		w.status, w.output = ack.Metadata.Status, ack.Metadata.Output
	}
}

func TestDecide_MessagesInAnyOrder_EverythingOnce(t *testing.T) {
	for range 200 {
		w := &world{t: t, item: pgwake.OrchestrationItem{Instance: instance, Name: workflowName, ExecutionID: 1}, scheduled: map[string]int{}}
		w.pending = []pgwake.Message{
			{Instance: instance, Kind: pgwake.MessageStart, Data: encode(order{Articles: []string{"a", "b", "c"}})}}
		w.turn(1)
		w.pending = append(w.pending, // the customer pays early, and twice
			pgwake.Message{Instance: instance, Kind: paid, Data: encode("ACME Bank")},
			pgwake.Message{Instance: instance, Kind: paid, Data: encode("another")})
		rand.Shuffle(len(w.pending), func(i, j int) { w.pending[i], w.pending[j] = w.pending[j], w.pending[i] })
		first := w.item.Messages
		for turns := 0; len(w.pending) > 0; turns++ {
			require.Less(t, turns, 100)
			w.turn(1 + rand.N(len(w.pending)))
		}
		assert.Equal(t, map[string]int{"reserve": 3, "invoice": 1, "ship": 1, "ended": 1}, w.scheduled)
		assert.Equal(t, pgwake.StatusCompleted, w.status)
		assert.Regexp(t, `^3 articles for 3\.00, paid by (ACME Bank|another), sent as parcel 7$`, w.output)
		assert.Equal(t, int64(2), w.item.ExecutionID)

		for _, m := range first { // too late
			w.pending = append(w.pending, m.Message)
		}
		events := len(w.item.History)
		w.turn(len(w.pending))
		assert.Len(t, w.item.History, events)
	}
}

func TestDecide_AnswerToAnEarlierExecution_IsDropped(t *testing.T) {
	item := &pgwake.OrchestrationItem{Instance: instance, Name: workflowName, ExecutionID: 2,
		History: []pgwake.Event{{ID: 1, Type: started, Data: encode(order{PaidBy: "ACME Bank"})},
			{ID: 2, Type: activityScheduled, Data: encode(detail{Call: 1, Name: "ship"})}},
		Messages: []pgwake.ClaimedMessage{{Message: pgwake.Message{Kind: activityCompleted, Data: encode(detail{Execution: 1, Call: 1})}}}}
	ack, err := decide(fulfil, item)
	require.NoError(t, err)
	assert.Empty(t, ack.History)
	assert.Empty(t, ack.WorkItems)
}

func TestDecide_NobodyStartedTheInstance_MessagesAreDropped(t *testing.T) {
	ack, err := decide(nil, &pgwake.OrchestrationItem{Instance: "x", ExecutionID: 1,
		Messages: []pgwake.ClaimedMessage{{Message: pgwake.Message{Kind: paid}}}})
	require.NoError(t, err)
	assert.Zero(t, ack)
}

func TestDecide_WorkflowChangedUnderItsHistory_Error(t *testing.T) {
	item := &pgwake.OrchestrationItem{Instance: instance, Name: workflowName, ExecutionID: 1,
		History: []pgwake.Event{{ID: 1, Type: started, Data: encode(order{Articles: []string{"a"}})},
			{ID: 2, Type: activityScheduled, Data: encode(detail{Call: 1, Name: "something else"})}}}
	_, err := decide(fulfil, item)
	assert.ErrorContains(t, err, `call 1 is "activity.scheduled reserve" and was "activity.scheduled something else"`)
}

func TestProcess_PoisonousTurnAndActivity_InstancesFail(t *testing.T) {
	p := startProcess(t.Context(), pgwaketest.New(t, nil), map[string]workflow{
		"panics": func(*turn, json.RawMessage) error { panic("a bug") },
		"unlucky": func(t *turn, _ json.RawMessage) error {
			if broken := t.activity("broken", nil); broken.here {
				return t.fail(errors.New(broken.err))
			}
			return nil
		},
	}, map[string]activity{
		"broken": func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("no luck") },
	})
	defer func() { assert.NoError(t, p.stop()) }()
	for _, name := range []string{"panics", "unlucky"} {
		_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: name, Kind: pgwake.MessageStart, Name: name}, nil)
		require.NoError(t, err)
	}
	outputs := map[string]string{}
	for range 2 {
		news, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{Namespaces: []string{endings}, PollTimeout: time.Minute})
		require.NoError(t, err)
		var end ending
		require.NoError(t, json.Unmarshal(news.Input, &end))
		assert.Equal(t, pgwake.StatusFailed, end.Status)
		outputs[end.Instance] = end.Output
	}
	assert.Equal(t, map[string]string{
		"panics":  fmt.Sprintf("turn given up after %d attempts", maxAttempts),
		"unlucky": "broken: no luck",
	}, outputs)
	history, err := p.ReadHistory(t.Context(), "panics")
	require.NoError(t, err)
	require.Len(t, history, 1)
	assert.Equal(t, failed, history[0].Type)
}
