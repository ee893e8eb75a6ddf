package eventbus_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

func TestEmit_EachSubscribedGroupGetsOneDelivery_ByItsMostSpecificPattern(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("mail", "order.*", "order.created", "#")
	l.subscribe("audit", "#")
	l.subscribe("stock", "item.*")
	id, err := l.Emit(l.within(), "order.created", map[string]any{"order": 7}, &eventbus.EmitOptions{Headers: map[string]string{"by": "ada"}, Metadata: map[string]int{"v": 1}})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"order.created eventbus/mail|order.created", "order.created eventbus/audit|#"}, l.queued())

	e := l.log(1)[0]
	require.Equal(t, []any{id, "default", "order.created", "", "", ""}, []any{e.ID, e.Namespace, e.Type, e.Producer, e.Key, e.ScheduledTaskID})
	require.JSONEq(t, `{"order": 7}`, string(e.Payload))
	require.JSONEq(t, `{"v": 1}`, string(e.Metadata))
	require.Equal(t, map[string]string{"by": "ada"}, e.Headers)
	require.WithinDuration(t, time.Now(), e.EmittedAt, time.Minute)
	require.Equal(t, 2, one[int](l, `SELECT count(*) FROM worker_queue WHERE headers = '{"by": "ada"}'`))
	require.Equal(t, time.Now().UTC().Format("event_log_p2006_01"), one[string](l, `SELECT tableoid::regclass::text FROM event_log`))
}

func TestEmit_BySQL_IsTheSame(t *testing.T) {
	t.Parallel()
	l := newLab(t, &eventbus.Config{Namespace: "shop"})
	l.subscribe("", "order.*")
	id := one[int64](l, `SELECT emit('shop', 'order.created', '{}')`)
	require.Equal(t, []string{"order.created eventbus/default|order.*"}, l.queued())
	require.Equal(t, id, one[int64](l, `SELECT event_id FROM event_log WHERE namespace = 'shop' AND payload = '{}'`))
	require.Equal(t, id+1, one[int64](l, `SELECT emit('shop', 'order.paid', '{}', p_dedup_key => 'k')`))
	require.Equal(t, id+1, one[int64](l, `SELECT emit('shop', 'order.paid', '{}', p_dedup_key => 'k')`))
	require.Greater(t, one[int64](l, `SELECT append_event_log('shop', 'order.seen', '{}', 'me')`), id)
	require.Len(t, l.queued(), 2, "what is appended is delivered to nobody")
	namespaces, err := l.p.ListNamespaces(l.within())
	require.NoError(t, err)
	require.Len(t, namespaces, 2)
}

func TestWithTx_RolledBack_NobodySeesIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	tx := l.begin()
	_, err := l.WithTx(tx).Emit(l.within(), "a", nil, &eventbus.EmitOptions{DedupKey: "k"})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(l.within()))
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log`))

	db := stdlib.OpenDBFromPool(l.p.Pool())
	defer db.Close()
	sqlTx, err := db.Begin()
	require.NoError(t, err)
	emitted, err := l.WithTx(pgwake.WrapSQLTx(sqlTx)).EmitMany(l.within(), []eventbus.Emission{{Type: "a", EmitOptions: eventbus.EmitOptions{DedupKey: "k", Key: "x"}}, {Type: "a"}})
	require.NoError(t, err)
	require.False(t, emitted[0].Duplicate, "the key is free")
	require.Empty(t, l.queued())
	require.NoError(t, sqlTx.Commit())
	require.Len(t, l.queued(), 2)
}

func TestEmitMany_InOneStatement_AllOrNone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	var events []eventbus.Emission
	for i := range 100 {
		events = append(events, eventbus.Emission{Type: string(rune('a' + i%3)), Payload: i, EmitOptions: eventbus.EmitOptions{DedupKey: fmt.Sprint(i / 2)}})
	}
	emitted, err := l.EmitMany(l.within(), events)
	require.NoError(t, err)
	for i, e := range emitted {
		require.Equal(t, i%2 == 1, e.Duplicate, i)
		switch {
		case e.Duplicate:
			require.Equal(t, emitted[i-1].ID, e.ID)
			require.Zero(t, e.Deliveries)
		case i%3 == 2:
			require.Zero(t, e.Deliveries)
		default:
			require.Equal(t, 1, e.Deliveries)
		}
	}
	require.Equal(t, 50, one[int](l, `SELECT count(*) FROM event_log`))
	require.True(t, one[bool](l, `SELECT array_agg(payload::text::int ORDER BY event_id) = array_agg(payload::text::int ORDER BY payload::text::int) FROM event_log`), "ids are in order")

	events = append(events[:3], eventbus.Emission{Type: "a", Payload: json.RawMessage(`1e400000`)})
	_, err = l.EmitMany(l.within(), events)
	require.ErrorIs(t, err, pgwake.ErrInvalid, "only the server knows that")
	require.Equal(t, 50, one[int](l, `SELECT count(*) FROM event_log`))
	none, err := l.EmitMany(l.within(), nil)
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestEmit_DedupKey_FirstIdUntilItsTimeIsOver(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	emit := func(bus *eventbus.Bus, key string) eventbus.Emitted {
		emitted, err := bus.EmitMany(l.within(), []eventbus.Emission{{Type: "a", EmitOptions: eventbus.EmitOptions{DedupKey: key, DedupFor: time.Hour}}})
		require.NoError(t, err)
		return emitted[0]
	}
	first := emit(l.Bus, "k")
	require.Equal(t, eventbus.Emitted{ID: first.ID, Duplicate: true}, emit(l.Bus, "k"))
	require.False(t, emit(l.In("other"), "k").Duplicate, "another namespace")
	require.False(t, emit(l.Bus, "l").Duplicate)
	l.exec(`UPDATE event_dedup_keys SET kept_until = kept_until - interval '61 min'`)
	again := emit(l.Bus, "k")
	require.False(t, again.Duplicate)
	require.Equal(t, eventbus.Emitted{ID: again.ID, Duplicate: true}, emit(l.Bus, "k"))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_dedup_keys`), "the others are forgotten")
}

func TestEmit_SameDedupKeyAtOnce_OneEvent(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	tx := l.begin()
	first, err := l.WithTx(tx).Emit(l.within(), "a", nil, &eventbus.EmitOptions{DedupKey: "k"})
	require.NoError(t, err)
	var all sync.WaitGroup
	ids := make([]int64, 4)
	for i := range ids {
		all.Go(func() {
			id, err := l.Emit(l.t.Context(), "a", nil, &eventbus.EmitOptions{DedupKey: "k"})
			if err != nil {
				t.Error(err)
			}
			ids[i] = id
		})
	}
	l.eventually(func() bool {
		return one[int](l, `SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'`) > 0
	}, "somebody waits for the first")
	require.NoError(t, tx.Commit(l.within()))
	all.Wait()
	require.Equal(t, []int64{first, first, first, first}, ids)
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM event_log`))
}

func TestEmit_BadInput_IsATypedErrorAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	l := newLab(t, &eventbus.Config{MaxPayload: 2000})
	deep := strings.Repeat("[", 1001) + strings.Repeat("]", 1001)
	for name, c := range map[string]eventbus.Emission{
		"no type":         {},
		"empty segment":   {Type: "a..b"},
		"dot at the end":  {Type: "a."},
		"wildcard":        {Type: "a.*"},
		"hash":            {Type: "a#"},
		"bar":             {Type: "a|b"},
		"space":           {Type: "a b"},
		"control":         {Type: "a\x01"},
		"NUL":             {Type: "a\x00"},
		"no UTF-8":        {Type: "a\xff"},
		"long type":       {Type: strings.Repeat("a", 181)},
		"no JSON":         {Type: "a", Payload: json.RawMessage("{")},
		"NaN":             {Type: "a", Payload: math.NaN()},
		"raw NaN":         {Type: "a", Payload: json.RawMessage("NaN")},
		"function":        {Type: "a", Payload: func() {}},
		"NUL in string":   {Type: "a", Payload: "x\x00y"},
		"half a pair":     {Type: "a", Payload: json.RawMessage(`"\ud800"`)},
		"too deep":        {Type: "a", Payload: json.RawMessage(deep)},
		"too large":       {Type: "a", Payload: strings.Repeat("x", 1999)},
		"number":          {Type: "a", Payload: json.RawMessage("1e1000000")},
		"long key":        {Type: "a", EmitOptions: eventbus.EmitOptions{Key: strings.Repeat("k", 256)}},
		"NUL in key":      {Type: "a", EmitOptions: eventbus.EmitOptions{Key: "\x00"}},
		"long dedup key":  {Type: "a", EmitOptions: eventbus.EmitOptions{DedupKey: strings.Repeat("k", 256)}},
		"window, no key":  {Type: "a", EmitOptions: eventbus.EmitOptions{DedupFor: time.Hour}},
		"negative window": {Type: "a", EmitOptions: eventbus.EmitOptions{DedupKey: "k", DedupFor: -1}},
		"headers":         {Type: "a", EmitOptions: eventbus.EmitOptions{Headers: map[string]string{"h": strings.Repeat("x", 8193)}}},
		"metadata":        {Type: "a", EmitOptions: eventbus.EmitOptions{Metadata: 7}},
	} {
		_, err := l.EmitMany(l.within(), []eventbus.Emission{{Type: "good"}, c})
		require.ErrorIs(t, err, pgwake.ErrInvalid, name)
		var e *pgwake.Error
		require.ErrorAs(t, err, &e, name)
		require.Equal(t, "emit", e.Op)
	}
	_, err := l.In("No").Emit(l.within(), "a", nil, nil)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	for _, sql := range []string{
		`SELECT emit('default', 'a..b')`, `SELECT emit('default', '')`, `SELECT emit('default', 'a b')`, `SELECT emit('Default', 'a')`, `SELECT emit('default', NULL)`,
		`SELECT emit('default', 'a', 'NaN')`, `SELECT emit('default', 'a', '"\u0000"')`, `SELECT emit('default', 'a', to_jsonb(repeat('x', 1048575)))`,
		`SELECT emit('default', 'a', repeat('[', 100000)::jsonb)`, `SELECT emit('default', 'a', p_headers => '[]')`, `SELECT emit('default', 'a', p_headers => '{"h": 1}')`,
		`SELECT emit('default', 'a', p_key => '')`, `SELECT emit('default', 'a', p_dedup_key => '')`, `SELECT emit('default', 'a', p_dedup_key => 'k', p_dedup_for => '-1 s')`,
		`SELECT append_event_log('default', 'a*', '{}', 'n')`,
	} {
		_, err := l.conn.Exec(l.within(), sql)
		require.Error(t, err, sql)
	}
	for _, arrays := range []string{`NULL, NULL`, `ARRAY[NULL], NULL`, `ARRAY['a', NULL], NULL`, `ARRAY['a'], ARRAY['1', '2']`, `ARRAY['a', 'b'], NULL, ARRAY['k']`} {
		_, err := l.conn.Exec(l.within(), `SELECT emit_many('default', `+arrays+`)`)
		require.ErrorContains(t, err, "PW003", arrays)
	}
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log`))
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_dedup_keys`))
	for _, good := range []eventbus.Emission{{Type: "Ä.ö_1-2/x:y"}, {Type: strings.Repeat("a", 180)}, {Type: "a", Payload: json.RawMessage(deep[1 : len(deep)-1])}} {
		_, err := l.EmitMany(l.within(), []eventbus.Emission{good})
		require.NoError(t, err, good.Type)
	}
}

// The exponent of a number is what makes it long: what can be emitted can be read.
func TestEmit_NumbersThatAreLongWhenWrittenOut_AreRefusedOrRead(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	numbers := func(n int, exponent string) json.RawMessage {
		return json.RawMessage(`{"e1000000": [true, "9e1000000", ` + strings.Repeat("7"+exponent+", ", n) + `2.5]}`)
	}
	for _, exponent := range []string{"e131071", "E+131071", ".5e-16382"} {
		_, err := l.Emit(l.within(), "a", numbers(10000, exponent), nil)
		require.ErrorIs(t, err, pgwake.ErrInvalid, exponent)
		_, err = l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{Metadata: numbers(10000, exponent)})
		require.ErrorIs(t, err, pgwake.ErrInvalid, exponent)
	}
	_, err := l.Emit(l.within(), "a", numbers(100, "e+300"), nil)
	require.NoError(t, err)
	require.Greater(t, len(l.log(1)[0].Payload), 30000)
}

// Who calls the function may say any bound. What no node could read, or would have to read at its own cost, is refused all the same.
func TestEmitMany_BySQL_WhatNobodyCouldReadIsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.redefines(`max_event_payload`, `CREATE OR REPLACE FUNCTION max_event_payload() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS 'SELECT 1000000'`)
	for what, arguments := range map[string]string{
		"larger than the bound of the bus": `ARRAY[to_json(repeat('x', 1000000))::text], p_max_payload => 2147483647`,
		"metadata":                         `NULL, p_metadata => ARRAY[json_build_object('x', repeat('x', 1000000))::text], p_max_payload => 2147483647`,
		"larger than the default bound":    `ARRAY[to_json(repeat('x', 1048576))::text], p_max_payload => NULL`,
		"small numbers":                    `ARRAY['[-7.5' || repeat('E-16000, -7.5', 400) || ']']`,
		"a few kB of numbers":              `ARRAY['[7' || repeat('e131071,7', 500) || ']']`,
		"metadata with such":               `NULL, p_metadata => ARRAY['{"a":[7' || repeat('e131071,7', 500) || ']}']`,
		"the second":                       `ARRAY['1', '[7' || repeat('E+131071,7', 500) || ']']`,
	} {
		types := `ARRAY['a']`
		if what == "the second" {
			types = `ARRAY['a', 'a']`
		}
		_, err := l.conn.Exec(l.within(), `SELECT emit_many('default', `+types+`, `+arguments+`)`)
		require.ErrorContains(t, err, "PW003", what)
		require.Less(t, len(err.Error()), 200, what)
	}
	if testsize.Full() { // PostgreSQL takes many seconds to find that this is too large for itself: not in a transaction that horizons wait for
		_, err := l.conn.Exec(l.t.Context(), `SELECT check_written_out('[7' || repeat('e131071, 7', 10000) || ']')`)
		require.ErrorContains(t, err, "PW003")
	}
	_, err := l.conn.Exec(l.within(), `SELECT append_event_log('default', 'a', to_jsonb(repeat('x', 104857600)), NULL)`)
	require.ErrorContains(t, err, "PW003")
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log`))
	l.exec(`SELECT emit_many('default', ARRAY['a'], ARRAY['["1e131071 ' || repeat('7e131071,7', 10000) || '"]'])`)
	l.exec(`SELECT emit_many('default', ARRAY['a'], ARRAY[to_json(repeat('x', 999998))::text], p_max_payload => NULL)`)
	l.exec(`SELECT append_event_log('default', 'a', NULL, NULL, NULL, NULL)`)
	l.log(3)
}

// locked is a writer for several goroutines.
type locked struct {
	sync.Locker
	to io.Writer
}

func (l locked) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.to.Write(p)
}

// Within these bounds a Node takes what comes, whatever Config.MaxPayload is.
func TestNode_PayloadBySQLFarOverMaxPayload_IsHandledAndNotLogged(t *testing.T) {
	t.Parallel()
	var logged bytes.Buffer
	var mu sync.Mutex
	size := testsize.Of(4<<20, 32<<20)
	l := newLab(t, &eventbus.Config{MaxPayload: 1000, Logger: slog.New(slog.NewTextHandler(locked{&mu, &logged}, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	sizes, others := make(chan int, 10), make(chan int, 10)
	next := func(from chan int) (n int) {
		select {
		case n = <-from:
		case <-l.within().Done():
			require.FailNow(t, "it does not come")
		}
		return n
	}
	how := quick("g")
	how.MaxAttempts = 2
	n := l.node(how)
	require.NoError(t, n.OnPlain(l.within(), "large", func(_ context.Context, e *eventbus.Event) error {
		sizes <- len(e.Payload)
		return errors.New("no luck")
	}))
	require.NoError(t, n.OnPlain(l.within(), "small", func(context.Context, *eventbus.Event) error {
		others <- 0
		return nil
	}))
	_, err := l.conn.Exec(l.within(), `SELECT emit_many('default', '{large,small}', ARRAY[to_json(repeat('x', $1::integer - 2))::text, '1'], p_max_payload => 2147483647)`, size)
	require.NoError(t, err)
	require.Equal(t, size, next(sizes))
	next(others)
	require.Equal(t, size, next(sizes))
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM dead_letters WHERE error = 'no luck'`) == 1 }, "it is given up")
	mu.Lock()
	defer mu.Unlock()
	require.Less(t, logged.Len(), 100_000)
	require.NotContains(t, logged.String(), "xxxx")
}

// A time zone of the session whose offset has seconds is none that JSON has.
func TestEmit_BySQLInAnyTimeZone_IsHandled(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var s seen
	n := l.node(quick("g"))
	require.NoError(t, n.On(l.within(), "a", s.ids))
	l.exec(`SET TIME ZONE -7.51`)
	l.exec(`SET DateStyle = 'SQL, DMY'`)
	first, second := one[int64](l, `SELECT emit(NULL, 'a')`), one[int64](l, `SELECT emit(NULL, 'a', p_key => 'k')`)
	l.eventually(func() bool { return len(l.queued()) == 0 }, "both are handled")
	require.ElementsMatch(t, []string{fmt.Sprint(first), fmt.Sprint(second)}, s.list())
}

func TestStrictRouting_NobodyIsSubscribed_IsADeadLetterThatARedriveRoutes(t *testing.T) {
	t.Parallel()
	l := newLab(t, &eventbus.Config{StrictRouting: true})
	id := l.emit("order.created")
	letters, err := l.p.ListDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, "No handler for event order.created", letters[0].Reason)
	require.Empty(t, l.queued())

	n := l.node(quick("g"))
	redriven, err := l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	l.eventually(func() bool {
		letters, err = l.p.ListDeadLetters(l.within(), nil)
		require.NoError(t, err)
		return len(letters) == 1
	}, "there is nobody still")
	require.Equal(t, "No handler for event order.created", letters[0].Reason)
	var s seen
	require.NoError(t, n.On(l.within(), "order.*", s.ids))
	_, err = l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	l.eventually(func() bool { return len(s.list()) == 1 }, "the event goes to who is there by now")
	require.Equal(t, fmt.Sprint(id), s.list()[0])
	l.eventually(func() bool { return len(l.queued()) == 0 }, "and is done")
}

// A group gets each event of its subscriptions that is emitted after it was declared, even while emits and declarations go on at once.
func TestSubscribe_WhileEventsAreEmitted_GetsAllThatComeAfter(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	var emitters sync.WaitGroup
	for range 3 {
		emitters.Go(func() {
			for ctx.Err() == nil {
				if _, err := l.Emit(t.Context(), "a", nil, nil); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM event_log`) > 20 }, "events are emitted")
	l.subscribe("g", "a")
	last := l.emit("a")
	cancel()
	emitters.Wait()
	first := one[int64](l, `SELECT min((input->>'event_id')::bigint) FROM worker_queue`)
	require.LessOrEqual(t, first, last)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_log e WHERE e.event_id >= $1 AND cardinality(e.routes) <>
		(SELECT count(*) FROM worker_queue q WHERE (q.input->>'event_id')::bigint = e.event_id)`, first), "what the log says, is")
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue q WHERE (q.input->>'event_id')::bigint = $1`, last))
}

func TestNew_BadConfig_SaysSo(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	for _, c := range []eventbus.Config{{Namespace: "No"}, {MaxPayload: -1}, {MaxPayload: 1 << 40}} {
		_, err := eventbus.New(t.Context(), p, &c)
		require.ErrorIs(t, err, pgwake.ErrConfig)
	}
	_, err := eventbus.New(t.Context(), nil, nil)
	require.ErrorIs(t, err, pgwake.ErrConfig)
}
