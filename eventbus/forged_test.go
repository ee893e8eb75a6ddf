package eventbus_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of what nothing of the bus has made? Whoever may enqueue work may do so under any tag, those of the bus included.

// enqueue adds a work item as a producer does by SQL.
func (l *lab) enqueue(args string) { l.t.Helper(); l.exec(`SELECT enqueue_work(` + args + `)`) }

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
