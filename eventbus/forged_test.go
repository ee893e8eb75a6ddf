package eventbus_test

import (
	"math"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of what nothing of the bus has made? Whoever may enqueue work may do so under any tag, those of the bus included.

// enqueue adds a work item as a producer does by SQL.
func (l *lab) enqueue(args string) { l.t.Helper(); l.exec(`SELECT enqueue_work(` + args + `)`) }

// The dedup key is taken, so nothing is added, and nothing has a place.
func TestKeys_DuplicateUnderATagOfTheBus_HoldsNothingUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.enqueue(`'x', p_tag => 'other', p_dedup_key => 'd'`)
	for range 2 { // while the key is at rest, and in its line
		l.enqueue(`'x', p_tag => 'eventbus/g|a', p_key => 'k', p_dedup_key => 'd'`)
		first, second := l.emitKey("a", "k"), l.emitKey("a", "k")
		require.Equal(t, []int64{first}, l.heads("k"))
		l.enqueue(`'x', p_tag => 'eventbus/g|a', p_key => 'k', p_dedup_key => 'd'`)
		third := l.emitKey("a", "k")
		for _, want := range []int64{first, second, third} {
			require.Equal(t, []int64{want}, l.heads("k"))
			require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
		}
		require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
		require.Zero(t, one[int](l, `SELECT count(*) FROM event_lines`))
	}
}

// What is added under a tag of the bus waits for its key like anything else, and the key for it.
func TestKeys_ItemsUnderATagOfTheBus_ComeOneAtATime(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.exec(`SELECT enqueue_work_many('{x,y,z}', '{1,2,3}', p_tags => '{eventbus/g|a,eventbus/g|a,eventbus/g|a}', p_keys => '{k,k,k}')`)
	l.emitKey("a", "k")
	l.enqueue(`'last', p_tag => 'eventbus/g|a', p_key => 'k', p_delay => '1 h'`)
	for _, want := range []string{"x", "y", "z", "a", "last"} {
		require.Equal(t, []string{want}, all[string](l, `SELECT name FROM worker_queue WHERE key = 'k' AND visible_at < '9999-01-01'`))
		require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	}
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
}

// That is so with what is due later as well, and with what no subscription has the tag of: docs/security.md says so.
func TestKeys_ItemUnderATagOfTheBusIsNotToBeClaimed_HoldsItsKeyUntilItIsRemoved(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]string{"later": `p_tag => 'eventbus/g|a', p_visible_at => '2999-01-01'`, "by no one": `p_tag => 'eventbus/g|b'`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			l.enqueue(`'x', p_key => 'k', ` + args)
			id := l.emitKey("a", "k")
			items, err := l.p.Peek(l.within(), pgwake.Worker, nil)
			require.NoError(t, err)
			require.Len(t, items, 1)
			require.Equal(t, []string{"x", "k"}, []string{items[0].Name, items[0].Key})
			l.exec(`DELETE FROM worker_queue WHERE id = $1`, items[0].ID)
			require.Equal(t, []int64{id}, l.heads("k"))
		})
	}
}

// Several dead letters of a key go back in one statement, some with what was there before them.
func TestKeys_DeadLettersOfAKeyAreRedrivenTogether_ComeOneAtATime(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	var want []int64
	for range 3 {
		want = append(want, l.emitKey("a", "k"))
		l.bury(tagA, "no")
	}
	n, err := l.p.RedriveDeadLetters(l.within(), &pgwake.DeadLetterFilter{Limit: 2})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	want = append(want[:2], l.emitKey("a", "k"), want[2])
	n, err = l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	for _, id := range want {
		require.Equal(t, []int64{id}, l.heads("k"))
		require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	}
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
}

// letters are the types and reasons of all dead letters.
func (l *lab) letters() []string {
	l.t.Helper()
	return all[string](l, `SELECT name || ': ' || reason FROM dead_letters ORDER BY item_id`)
}

func TestNode_TypeIsNotForThePatternOfItsTag_IsADeadLetter(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "order.*", s.types))
	for _, name := range []string{"x", "order", "order.x.y", "order.*.#"} {
		l.enqueue(`'` + name + `', '{"event_id": 1, "payload": 1}', p_tag => 'eventbus/g|order.*'`)
	}
	l.emit("order.paid")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are over")
	require.Equal(t, []string{"x: Not a delivery", "order: Not a delivery", "order.x.y: Not a delivery", "order.*.#: Not a delivery"}, l.letters())
	require.Equal(t, []string{"order.paid"}, s.list())
}

func TestNode_ChoreThatNamesNothing_IsADeadLetterAndHoldsNoOtherUp(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	bad := []string{`'{"task_id": "x"}'`, `'{"task_id": ""}'`, `'{"task_id": null}'`, `'{"task_id": 7}'`, `'{}'`, `'[]'`, `'null'`, `NULL`, `'{"task_id": "11111111-2222-3333-4444-55555555555x"}'`}
	replays := []string{`'{}'`, `'{"replay_id": 0}'`, `'{"replay_id": -1}'`, `'{"replay_id": 1.5}'`, `'{"replay_id": 9223372036854775808}'`, `'{"replay_id": "1"}'`}
	var want []string
	for _, input := range bad {
		l.enqueue(`'eventbus|schedule', ` + input + `, p_tag => 'eventbus'`)
		want = append(want, "eventbus|schedule: Not a delivery")
	}
	for _, input := range replays {
		l.enqueue(`'eventbus|replay', ` + input + `, p_tag => 'eventbus'`)
		want = append(want, "eventbus|replay: Not a delivery")
	}
	// Of these there is none: they are over.
	l.enqueue(`'eventbus|replay', '{"replay_id": 9223372036854775807}', p_tag => 'eventbus'`)
	l.enqueue(`'eventbus|schedule', '{"task_id": "11111111222203333044440555555555555"}', p_tag => 'eventbus'`)
	want = append(want, "eventbus|schedule: Not a delivery")
	l.enqueue(`'eventbus|schedule', '{"task_id": "11111111x2222x3333x4444x555555555555"}', p_tag => 'eventbus'`)
	const many = 20
	l.exec(`SELECT schedule_task(NULL, 's' || n, '@every 1h', 'a') FROM generate_series(1, $1::integer) AS n`, many)
	l.exec(`UPDATE scheduled_tasks SET next_at = now(), since = now() - interval '1 h'`)
	l.exec(`UPDATE worker_queue SET visible_at = now()`)
	l.node(quick("g"))
	l.eventually(func() bool { return l.emitted() == many && len(l.queued()) == many }, "all are over, and the next occurrences are there")
	require.Equal(t, want, l.letters())
}

// What one letter has once its numbers are written out keeps nobody from reading the others.
func TestDeadLetters_NumbersThatNobodyCanWriteOut_AreOfNoEvent(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	id := l.emit("a")
	l.exec(`SELECT enqueue_work('x', format('{"event_id": 1, "emitted_at": "2020-01-01T00:00:00Z", "payload": [%s]}', repeat('1e131071,', 9000) || 1)::json, p_tag => 'eventbus/g|a')`)
	l.bury(tagA, "no")
	l.bury(tagA, "no")
	for _, length := range []int{0, 100} {
		letters, err := l.DeadLetters(l.within(), &eventbus.LetterFilter{PayloadBytes: length})
		require.NoError(t, err)
		require.Equal(t, []any{2, id, "a", int64(0), "x"}, []any{len(letters), letters[0].Event.ID, letters[0].Event.Type, letters[1].Event.ID, letters[1].Event.Type})
	}
}

func TestRegisterNode_HeartbeatsThatNoNodeHas_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	refused := func(state, sql string, args ...any) {
		t.Helper()
		_, err := l.conn.Exec(l.within(), sql, args...)
		require.ErrorContains(t, err, state, args)
		_, err = l.Nodes(l.within())
		require.NoError(t, err)
		l.eventually(func() bool { return one[string](l, `SELECT keep_event_log()`) == "done" }, "all of its steps are done")
	}
	bad := []any{"100000 years", "-1 s", "0", "9 ms", "301 years", nil}
	if one[int](l, `SELECT current_setting('server_version_num')::integer`) >= 170000 {
		bad = append(bad, "infinity", "-infinity")
	}
	for _, heartbeats := range bad {
		refused("PW003", `SELECT register_node('n', p_heartbeats => $1::text::interval)`, heartbeats)
	}
	refused("23514", `SELECT register_node('n', p_heartbeats => $1::text::interval)`, "-100000 years 36000001 days")
	l.exec(`SELECT register_node('n', p_heartbeats => '10 ms')`)
	for _, heartbeats := range []string{"30 s", "1 day", "300 years"} {
		l.exec(`SELECT register_node('n', p_heartbeats => $1::text::interval)`, heartbeats)
		require.True(t, l.live(), heartbeats)
	}
	// Whoever writes to the table himself has no more.
	refused("23514", `UPDATE event_nodes SET heartbeats = $1::text::interval`, "100000 years")
	refused("23514", `SELECT beat('n', 'default', 'g', NULL, $1::text::interval)`, "100000 years")
	l.exec(`SELECT beat('n', 'default', 'g', NULL, $1)`, time.Duration(math.MaxInt64)) // as a NodeConfig may have it
	require.True(t, l.live())
}
