package pgwake_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// jsonLike generates texts that are JSON, or nearly.
func jsonLike() *rapid.Generator[string] {
	piece := rapid.SampledFrom([]string{
		"x", " ", "é", "😀", "\\\\", `\"`, `\/`, `\n`, `\u0041`, `\u00e9`, `\ud83d\ude00`, `\uD83D\uDE00`, `\\u0000`, `\ufffd`,
		`\ud83d`, `\ude00`, `\ude00\ud83d`, `\ud83d\ud83d\ude00`, `\u0000`, `\u000`, `\x`, `\`, "\x00", "\xff", "\xed\xa0\x80", "\n", "\"",
	})
	text := rapid.Custom(func(t *rapid.T) string {
		// Mostly the harmless pieces, or hardly any text would be valid.
		return `"` + strings.Join(rapid.SliceOfN(rapid.OneOf(rapid.SampledFrom([]string{"a", `\\`, `\ud83d\ude00`, `\u00e9`}), piece), 0, 5).Draw(t, "pieces"), "") + `"`
	})
	return rapid.Custom(func(t *rapid.T) string {
		s := text.Draw(t, "text")
		switch rapid.IntRange(0, 5).Draw(t, "shape") {
		case 0:
			s = `{"k":` + s + `}`
		case 1:
			s = `[` + s + `, null, -1.5e+3, {"n": 0}]`
		case 2:
			s = `{` + s + `:true}`
		case 3:
			s = rapid.SampledFrom([]string{"", "{}", "[]", "01", "1.", "nul", "NaN", "'a'", "{a:1}", `{"a":1,}`, "1 2", "-", "\ufeff1", "\v1"}).Draw(t, "fixed")
		}
		return s
	})
}

// What the check in Go lets pass, the server must take, and must be able to take apart; what it does not let
// pass must not reach the server.
func TestPayload_AnyText_IsRefusedBeforeItIsSentOrCanBeTakenApartByTheServer(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	accepted, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		input := jsonLike().Draw(t, "input")
		n.exec(t, `TRUNCATE worker_queue`)
		_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "x", Input: []byte(input)}, nil)
		if err != nil {
			refused++
			require.Empty(t, requireError(t, err, pgwake.ErrInvalid).SQLState, "it was sent")
			return
		}
		accepted++
		require.True(t, input == "" || json.Valid([]byte(input)))
		n.exec(t, `SELECT input::jsonb FROM worker_queue`)
		item, err := n.FetchWorkItem(tctx, now)
		require.NoError(t, err)
		require.Equal(t, input, string(item.Input))
	})
	require.Positive(t, accepted)
	require.Positive(t, refused)
}

// "Kept byte for byte" includes the white space around it.
func TestPayload_WhiteSpaceAround_IsKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	data := json.RawMessage(" {\"a\" : 1}\n")
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: data}, nil)
	require.NoError(t, err)
	require.Equal(t, string(data), string(n.take(t).Input), "input")

	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k", Data: data}, nil)
	turn := n.takeTurn(t)
	require.Equal(t, string(data), string(turn.Messages[0].Data), "message")
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, History: []pgwake.Event{{ID: 1, Type: "e", Data: data}}})
	events, err := n.ReadHistory(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, string(data), string(events[0].Data), "event")
}

// encoding/json accepts 10,000 levels. The server has its own idea of deep; what it refuses is no crash.
func TestPayload_NestedDeeply_IsKeptOrRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, depth := range []int{100, 1000, 5000, 9999, 10_001, 100_000} {
		t.Run(fmt.Sprint(depth), func(t *testing.T) {
			data := strings.Repeat("[", depth) + strings.Repeat("]", depth)
			before := n.content(t)
			_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Input: []byte(data)}, nil)
			if err != nil {
				require.False(t, requireError(t, err, pgwake.ErrInvalid).Retryable)
				require.Greater(t, depth, 1000)
				require.Equal(t, before, n.content(t))
				return
			}
			item := n.take(t)
			require.Equal(t, data, string(item.Input))
			require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
		})
	}
}

// Whatever attributes an ack accepts, a turn can bring: if it failed, it would be in everybody's way for ever.
func TestAttributes_NestedDeeply_ComeBackOrAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, depth := range []int{1000, 9999, 10_000, 10_001} {
		instance := fmt.Sprint(depth)
		n.sendWith(t, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, nil)
		turn := n.takeTurn(t)
		data := strings.Repeat("[", depth) + strings.Repeat("]", depth)
		err := n.AckOrchestrationItem(t.Context(), turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Attributes: []byte(data)}})
		if err != nil {
			require.False(t, requireError(t, err, pgwake.ErrInvalid).Retryable)
			require.Greater(t, depth, 1000)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{})
			continue
		}
		n.send(t, instance, "k")
		turn = n.takeTurn(t)
		require.Equal(t, data, string(turn.Attributes))
		n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	}
}

// Limits are inclusive: what stands on one is good.
func TestLimits_ExactlyReached_AreAccepted(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{MaxPayload: 64})
	longest := strings.Repeat("é", 127) + "x" // 255 bytes
	namespace := "a" + strings.Repeat("-", 39)
	data := json.RawMessage(`"` + strings.Repeat("x", 62) + `"`)
	_, err := n.EnqueueForWorker(t.Context(),
		pgwake.WorkItem{Name: longest, Input: data, Instance: longest, ExecutionID: 1<<63 - 1, ActivityID: 1<<63 - 1},
		&pgwake.EnqueueOptions{Namespace: namespace, Priority: 9, DedupKey: longest})
	require.NoError(t, err)
	for _, lock := range []pgwake.FetchOptions{{LockTimeout: pgwake.MinLockTimeout}, {LockTimeout: pgwake.MaxLockTimeout}} {
		lock.NoWait, lock.Namespaces = true, []string{namespace}
		item, err := n.FetchWorkItem(t.Context(), &lock)
		require.NoError(t, err)
		require.Equal(t, longest, item.Name)
		require.Equal(t, data, item.Input)
		n.travel(t, lease) // ends the short one
	}
	m := pgwake.Message{Instance: longest, Kind: pgwake.MessageKind(longest), Name: longest, Version: longest, Data: data, ExecutionID: 1<<63 - 1}
	n.sendWith(t, m, &pgwake.EnqueueOptions{Namespace: namespace, DedupKey: longest})
	turn := n.takeTurn(t)
	require.Equal(t, m, turn.Messages[0].Message)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{
		ExecutionID: 1<<63 - 1,
		Metadata:    pgwake.Metadata{Name: longest, Version: longest},
		History:     []pgwake.Event{{ID: 1<<63 - 1, Type: longest, Data: data}},
	})
	_, err = n.FetchWorkItems(t.Context(), pgwake.MaxFetch, now)
	require.ErrorIs(t, err, pgwake.ErrNoWork)
}
