package pgwake_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// instance makes an instance known behind the scenes, with one execution that runs.
func (n *node) instance(tb tester, id string) {
	tb.Helper()
	n.exec(tb, `WITH made AS (INSERT INTO instances (instance_id, namespace, name) VALUES ($1, 'default', 'flow') RETURNING instance_id)
		INSERT INTO executions (instance_id, execution_id) SELECT instance_id, 1 FROM made`, id)
}

// applyKV calls apply_kv for an execution. An update is "key=value", "-key", or "-" for all.
func (n *node) applyKV(tb tester, instance string, execution int, updates ...string) {
	tb.Helper()
	ops, keys, values := columnsOf(updates)
	n.exec(tb, `SELECT apply_kv($1, $2, $3, $4, $5)`, instance, execution, ops, keys, values)
}

func columnsOf(updates []string) (ops, keys, values []string) {
	for _, u := range updates {
		key, value, isSet := strings.Cut(u, "=")
		op := "set"
		if !isSet {
			op, key = "clear", strings.TrimPrefix(u, "-")
			if key == "" {
				op = "clear_all"
			}
		}
		ops, keys, values = append(ops, op), append(keys, key), append(values, value)
	}
	return ops, keys, values
}

// requireKV asserts what clients read, by both verbs, and what a turn would see.
func (n *node) requireKV(tb tester, instance string, client map[string]string, turn string) {
	tb.Helper()
	pairs, err := n.ListKV(tctx, instance)
	require.NoError(tb, err)
	require.NotNil(tb, pairs)
	require.Equal(tb, client, pairs)
	for _, key := range []string{"a", "b", "c", "d"} {
		v, found, err := n.GetKV(tctx, instance, key)
		require.NoError(tb, err)
		want, wanted := client[key]
		require.Equal(tb, wanted, found, key)
		require.Equal(tb, want, v, key)
	}
	require.JSONEq(tb, turn, query[string](tb, n, `SELECT kv_snapshot($1)::text`, instance)[0])
}

func TestKV_WritesOfAnExecution_ClientsSeeAtOnceAndTurnsOnceItHasEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	n.requireKV(t, "i", map[string]string{}, `{}`)

	n.applyKV(t, "i", 1, "a=1", "b=2")
	n.requireKV(t, "i", map[string]string{"a": "1", "b": "2"}, `{}`)
	n.exec(t, `SELECT merge_kv('i')`)
	n.requireKV(t, "i", map[string]string{"a": "1", "b": "2"}, `{"a":"1","b":"2"}`)

	n.applyKV(t, "i", 2, "a=one", "-b", "c=3")
	n.requireKV(t, "i", map[string]string{"a": "one", "c": "3"}, `{"a":"1","b":"2"}`)
	n.applyKV(t, "i", 2, "b=again", "-c")
	n.requireKV(t, "i", map[string]string{"a": "one", "b": "again"}, `{"a":"1","b":"2"}`)
	n.exec(t, `SELECT merge_kv('i')`)
	n.requireKV(t, "i", map[string]string{"a": "one", "b": "again"}, `{"a":"one","b":"again"}`)
	require.Equal(t, map[string]int{"instances": 1, "executions": 1, "kv_store": 2, "namespaces": 1}, n.rows(t), "the delta is used up")
	require.Equal(t, []int64{2, 2}, query[int64](t, n, `SELECT execution_id FROM kv_store`), "who wrote last")
	n.exec(t, `SELECT merge_kv('i'), merge_kv('nobody')`)
	n.requireKV(t, "i", map[string]string{"a": "one", "b": "again"}, `{"a":"one","b":"again"}`)
}

func TestKV_SeveralUpdatesInOneTurn_ApplyInTheirOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for name, c := range map[string]struct {
		updates string
		want    map[string]string
	}{
		"the last one counts":       {"a=1 a=2 a=3", map[string]string{"a": "3", "b": "stored", "d": "written"}},
		"cleared and set again":     {"-b b=new", map[string]string{"b": "new", "d": "written"}},
		"set and cleared":           {"a=1 -a", map[string]string{"b": "stored", "d": "written"}},
		"clear all, then set":       {"a=1 - c=3", map[string]string{"c": "3"}},
		"clear all, then set again": {"b=2 - b=3", map[string]string{"b": "3"}},
		"clear all, last":           {"a=1 b=2 -", map[string]string{}},
		"clear all twice":           {"- a=1 - c=3 -b", map[string]string{"c": "3"}},
		"a key that is not there":   {"-c", map[string]string{"b": "stored", "d": "written"}},
		"nothing":                   {"", map[string]string{"b": "stored", "d": "written"}},
	} {
		n.instance(t, name)
		n.applyKV(t, name, 1, "b=stored")
		n.exec(t, `SELECT merge_kv($1)`, name)
		n.applyKV(t, name, 2, "d=written")
		n.applyKV(t, name, 2, strings.Fields(c.updates)...)
		n.requireKV(t, name, c.want, `{"b":"stored"}`)
		n.exec(t, `SELECT merge_kv($1)`, name)
		pairs, err := n.ListKV(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, c.want, pairs, "%s: after the merge", name)
		require.Len(t, query[string](t, n, `SELECT key FROM kv_store WHERE instance_id = $1`, name), len(c.want), name)
	}
}

func TestKV_OtherInstances_AreLeftAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, id := range []string{"i", "j"} {
		n.instance(t, id)
		n.applyKV(t, id, 1, "a="+id)
		n.exec(t, `SELECT merge_kv($1)`, id)
		n.applyKV(t, id, 2, "b="+id)
	}
	n.applyKV(t, "i", 2, "-")
	n.requireKV(t, "i", map[string]string{}, `{"a":"i"}`)
	n.requireKV(t, "j", map[string]string{"a": "j", "b": "j"}, `{"a":"j"}`)
	n.exec(t, `SELECT merge_kv('i')`)
	n.requireKV(t, "i", map[string]string{}, `{}`)
	n.requireKV(t, "j", map[string]string{"a": "j", "b": "j"}, `{"a":"j"}`)
	n.requireKV(t, "nobody", map[string]string{}, `{}`)
}

func TestKV_OddKeysAndValues_AreKeptAsTheyAre(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	want := map[string]string{
		" ": " ", "a b": "", "ö/.\\\"'": "\U0001F600 \"\\\n\t", "-": "minus", "large": strings.Repeat("x", 64<<10),
		strings.Repeat("k", pgwake.MaxNameLength): `{"json":true}`,
	}
	for key, v := range want {
		n.exec(t, `SELECT apply_kv('i', 1, '{set}', $1, $2)`, []string{key}, []string{v})
	}
	pairs, err := n.ListKV(t.Context(), "i")
	require.NoError(t, err)
	require.Equal(t, want, pairs)
	for key, v := range want {
		got, found, err := n.GetKV(t.Context(), "i", key)
		require.NoError(t, err)
		require.True(t, found, key)
		require.Equal(t, v, got)
	}
	n.exec(t, `SELECT merge_kv('i')`)
	require.Len(t, query[string](t, n, `SELECT json_object_keys(kv_snapshot('i'))`), len(want))
}

func TestApplyKV_UpdateBreaksARule_NothingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.instance(t, "i")
	before := n.content(t)
	for name, args := range map[string][]any{
		"unknown operation": {"i", "{set,drop}", "{a,b}", "{1,2}"},
		"no operation":      {"i", "{NULL}", "{a}", "{1}"},
		"no key":            {"i", "{set,set}", "{a,NULL}", "{1,2}"},
		"empty key":         {"i", "{clear}", `{""}`, `{""}`},
		"long key":          {"i", "{set}", "{" + strings.Repeat("k", pgwake.MaxNameLength+1) + "}", "{1}"},
		"no value":          {"i", "{set}", "{a}", "{NULL}"},
		"unknown instance":  {"nobody", "{set}", "{a}", "{1}"},
	} {
		err := n.tried(t, func(tx pgx.Tx) error {
			return dropped(tx.Exec(t.Context(), `SELECT apply_kv($1, 1, $2::text::text[], $3::text::text[], $4::text::text[])`, args...))
		})
		require.ErrorContains(t, err, "PW003", name)
	}
	require.Equal(t, before, n.content(t))
}

func TestGetKV_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, args := range [][2]string{{"", "a"}, {"i", ""}, {"i\x00", "a"}, {"i", "\xff"}, {"i", strings.Repeat("k", pgwake.MaxNameLength+1)}} {
		_, found, err := n.GetKV(t.Context(), args[0], args[1])
		requireError(t, err, pgwake.ErrInvalid)
		require.False(t, found)
	}
	_, err := n.ListKV(t.Context(), "")
	requireError(t, err, pgwake.ErrInvalid)
}

// turn takes the instance through one turn of an execution.
func (n *node) turn(tb tester, instance string, execution int64, ack pgwake.OrchestrationAck) *pgwake.OrchestrationItem {
	tb.Helper()
	n.send(tb, instance, "k")
	item := n.takeTurn(tb)
	require.Equal(tb, instance, item.Instance)
	ack.ExecutionID, ack.Metadata.Name = execution, "flow"
	n.ackTurn(tb, item, ack)
	return item
}

func TestAckOrchestrationItem_KV_TurnsSeeWhatEndedExecutionsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	status := func(s pgwake.Status, kv ...pgwake.KVUpdate) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: s}, KV: kv}
	}
	require.Empty(t, n.turn(t, "i", 1, status("", pgwake.KVUpdate{Key: "a", Value: "1"}, pgwake.KVUpdate{Key: "b", Value: "2"})).KV)
	require.Empty(t, n.turn(t, "i", 1, status("")).KV, "its own writes")
	n.requireKV(t, "i", map[string]string{"a": "1", "b": "2"}, `{}`)

	// Continued as new: in the turn that ends the execution, or only by the first of the next.
	n.turn(t, "i", 1, status(pgwake.StatusContinuedAsNew, pgwake.KVUpdate{Op: pgwake.KVClear, Key: "b"}))
	require.Equal(t, map[string]string{"a": "1"}, n.turn(t, "i", 2, status("", pgwake.KVUpdate{Key: "c", Value: ""})).KV)
	n.requireKV(t, "i", map[string]string{"a": "1", "c": ""}, `{"a":"1"}`)
	n.turn(t, "i", 3, status("", pgwake.KVUpdate{Op: pgwake.KVClearAll}, pgwake.KVUpdate{Key: "d", Value: "4"}))
	n.requireKV(t, "i", map[string]string{"d": "4"}, `{"a":"1","c":""}`)
	n.turn(t, "i", 3, status(pgwake.StatusCompleted))
	n.requireKV(t, "i", map[string]string{"d": "4"}, `{"d":"4"}`)
	require.Equal(t, map[string]string{"d": "4"}, n.turn(t, "i", 3, status("")).KV)
}

func TestAckOrchestrationItem_KVOrStatusBreaksARule_IsRefusedAndTheTurnGoesOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{MaxPayload: 100})
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	before := n.content(t)
	kv := func(u pgwake.KVUpdate) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{KV: []pgwake.KVUpdate{{Key: "fine"}, u}}
	}
	status := func(u pgwake.CustomStatusUpdate) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{CustomStatus: &u}
	}
	long := strings.Repeat("x", 101)
	for name, ack := range map[string]pgwake.OrchestrationAck{
		"unknown operation":    kv(pgwake.KVUpdate{Op: 3, Key: "a"}),
		"no key":               kv(pgwake.KVUpdate{Value: "v"}),
		"no key to clear":      kv(pgwake.KVUpdate{Op: pgwake.KVClear}),
		"a value to clear":     kv(pgwake.KVUpdate{Op: pgwake.KVClear, Key: "a", Value: "v"}),
		"a key to clear all":   kv(pgwake.KVUpdate{Op: pgwake.KVClearAll, Key: "a"}),
		"long key":             kv(pgwake.KVUpdate{Key: strings.Repeat("k", pgwake.MaxNameLength+1)}),
		"value too large":      kv(pgwake.KVUpdate{Key: "a", Value: long}),
		"value with NUL":       kv(pgwake.KVUpdate{Key: "a", Value: "\x00"}),
		"status too large":     status(pgwake.CustomStatusUpdate{Value: long}),
		"status not UTF-8":     status(pgwake.CustomStatusUpdate{Value: "\xff"}),
		"status set and clear": status(pgwake.CustomStatusUpdate{Value: "v", Clear: true}),
		"status of nobody":     status(pgwake.CustomStatusUpdate{Value: "v"}),
		"cleared of nobody":    status(pgwake.CustomStatusUpdate{Clear: true}),
		"pairs of nobody":      kv(pgwake.KVUpdate{Key: "a", Value: "v"}),
	} {
		if !strings.Contains(name, "nobody") {
			ack.Metadata.Name = "flow"
		}
		err := requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, ack), pgwake.ErrInvalid)
		require.Equal(t, strings.Contains(name, "too large"), errors.Is(err, pgwake.ErrPayloadTooLarge), name)
		require.Equal(t, before, n.content(t), name)
	}
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, KV: []pgwake.KVUpdate{{Key: "a"}}})
}

// atMostKV has the pairs of an instance come to so much, and two more for each.
func (n *node) atMostKV(t *testing.T, most int) {
	t.Helper()
	const bound = "134217728"
	require.Equal(t, bound, strconv.Itoa(pgwake.MaxKVBytes))
	source := query[string](t, n, `SELECT pg_get_functiondef('apply_kv'::regproc)`)[0]
	require.Equal(t, 1, strings.Count(source, bound))
	n.exec(t, strings.Replace(source, bound, strconv.Itoa(most), 1))
}

// All that an instance has is one value in each claim of a turn, which the server has to be able to make.
func TestApplyKV_TooMuchInAll_IsRefusedAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.atMostKV(t, 100)
	n.instance(t, "i")
	n.instance(t, "full")
	value := func(bytes int) string { return "=" + strings.Repeat("x", bytes) }
	refused := func(why string, updates ...string) {
		t.Helper()
		before := n.content(t)
		ops, keys, values := columnsOf(updates)
		err := n.tried(t, func(tx pgx.Tx) error {
			return dropped(tx.Exec(t.Context(), `SELECT apply_kv('i', 1, $1, $2, $3)`, ops, keys, values))
		})
		require.ErrorContains(t, err, "PW003", why)
		requireError(t, pgwake.WrapError("ack", err), pgwake.ErrInvalid)
		require.Equal(t, before, n.content(t), why)
	}
	n.applyKV(t, "full", 1, "a"+value(97))
	refused("one alone", "a"+value(98))
	refused("its characters have two bytes", "a="+strings.Repeat("é", 49))
	n.applyKV(t, "i", 1, "a"+value(90), "a"+value(91), "b=")
	refused("with what there is", "c"+value(1))
	refused("and what is set again", "b"+value(4))
	n.applyKV(t, "i", 1, "a"+value(90), "b"+value(4))
	n.exec(t, `SELECT merge_kv('i')`)
	refused("with what the executions before left", "c=")
	n.applyKV(t, "i", 2, "a"+value(10), "c"+value(77)) // 13 + 7 + 80
	refused("each key once, of both", "d=")
	n.applyKV(t, "i", 2, "-c", "d"+value(77))
	refused("what was cleared and is set again", "c=")
	n.exec(t, `SELECT merge_kv('i')`)
	n.applyKV(t, "i", 3, "d"+value(77), "-", "e"+value(97))
	refused("after all were cleared", "f=")
	n.applyKV(t, "i", 3, "-")
	n.applyKV(t, "i", 3, "f"+value(97))

	// What came there before there was a bound may become less.
	n.exec(t, `INSERT INTO kv_store (instance_id, key, value, execution_id) VALUES ('i', 'old', repeat('x', 1000), 1)`)
	refused("more than before", "g=")
	n.applyKV(t, "i", 3, "-f")
	n.applyKV(t, "i", 3, "-old", "g=")
}

func TestAckOrchestrationItem_KVTooMuchInAll_IsRefusedAndTheTurnGoesOn(t *testing.T) {
	t.Parallel()
	n := newNode(t, &pgwake.Config{MaxPayload: 100 << 20})
	n.send(t, "i", "k")
	turn := n.takeTurn(t)
	large, small := strings.Repeat("x", 70<<20), strings.Repeat("x", 50)
	ack := func(updates ...pgwake.KVUpdate) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, KV: updates}
	}
	before := n.content(t)
	refused := func(ack pgwake.OrchestrationAck) *pgwake.Error {
		t.Helper()
		err := requireError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, ack), pgwake.ErrInvalid)
		require.False(t, err.Retryable)
		require.Equal(t, before, n.content(t))
		return err
	}
	require.Empty(t, refused(ack(pgwake.KVUpdate{Key: "a", Value: large}, pgwake.KVUpdate{Key: "b", Value: large})).SQLState, "the server is not asked")
	n.atMostKV(t, 100)
	require.Equal(t, "PW003", refused(ack(pgwake.KVUpdate{Key: "a", Value: small}, pgwake.KVUpdate{Key: "b", Value: small})).SQLState)
	n.ackTurn(t, turn, ack(pgwake.KVUpdate{Key: "a", Value: small}, pgwake.KVUpdate{Key: "b", Value: small}, pgwake.KVUpdate{Key: "a"}))
}
