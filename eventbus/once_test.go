package eventbus_test

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: is each event of a transaction in the line of its key once, whenever within that it is lined up?

// lined are the events of a key in the order in which their deliveries come.
func (l *lab) lined(key string) []int64 {
	l.t.Helper()
	return slices.Concat(all[int64](l, `SELECT (input->>'event_id')::bigint FROM worker_queue WHERE key = $1 ORDER BY id`, key),
		all[int64](l, `SELECT event_id FROM event_lines WHERE key = $1 ORDER BY place`, key))
}

// emission is a transaction that emits and does what else a user may do in it.
type emission struct {
	l  *lab
	tx pgx.Tx
}

func (e *emission) emit(keys ...string) (ids []int64) {
	e.l.t.Helper()
	events := make([]eventbus.Emission, len(keys))
	for i, key := range keys {
		events[i] = eventbus.Emission{Type: "a", EmitOptions: eventbus.EmitOptions{Key: key}}
	}
	emitted, err := e.l.WithTx(e.tx).EmitMany(e.l.within(), events)
	require.NoError(e.l.t, err)
	for _, one := range emitted {
		ids = append(ids, one.ID)
	}
	return ids
}

func (e *emission) exec(sql string) {
	e.l.t.Helper()
	_, err := e.tx.Exec(e.l.within(), sql)
	require.NoError(e.l.t, err, sql)
}

func TestKeys_FirstIsLinedUpBeforeTheNextIsEmitted_EachOnceAndInOrder(t *testing.T) {
	t.Parallel()
	for name, do := range map[string]func(*emission) (want []int64){
		"constraints are immediate from then on": func(e *emission) (want []int64) {
			want = e.emit("k")
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			return append(want, e.emit("k")...)
		},
		"twice": func(e *emission) (want []int64) {
			for range 3 {
				want = append(want, e.emit("k")...)
				e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
				e.exec(`SET CONSTRAINTS ALL DEFERRED`)
			}
			return append(want, e.emit("k", "k")...)
		},
		"one of another key between": func(e *emission) (want []int64) {
			want = e.emit("k")
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			e.emit("b")
			e.exec(`SET CONSTRAINTS ALL DEFERRED`)
			return append(want, e.emit("k")...)
		},
		"lined up in a savepoint that is rolled back": func(e *emission) (want []int64) {
			want = e.emit("k")
			e.exec(`SAVEPOINT s`)
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			e.emit("k")
			e.exec(`ROLLBACK TO s`)
			return append(want, e.emit("k")...)
		},
		"emitted and lined up in a savepoint that is rolled back": func(e *emission) (want []int64) {
			e.exec(`SAVEPOINT s`)
			e.emit("k")
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			e.exec(`ROLLBACK TO s`)
			want = e.emit("k")
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			return append(want, e.emit("k")...)
		},
		"lined up before a savepoint that is rolled back": func(e *emission) (want []int64) {
			want = e.emit("k")
			e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			e.exec(`SAVEPOINT s`)
			e.emit("k", "b")
			e.exec(`ROLLBACK TO s`)
			return append(want, e.emit("k")...)
		},
		"by a deferred trigger of the user's": func(e *emission) (want []int64) {
			e.exec(`SET LOCAL search_path = ` + pgx.Identifier{e.l.p.Schema()}.Sanitize())
			want = e.emit("k")
			e.exec(`INSERT INTO orders DEFAULT VALUES`) // whose trigger comes after that of the event
			return want
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			l.exec(`CREATE TABLE orders (n integer)`)
			l.exec(`CREATE FUNCTION order_placed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM emit(NULL, 'a', p_key => 'k'); RETURN NULL; END $$`)
			l.exec(`CREATE CONSTRAINT TRIGGER placed AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION order_placed()`)
			l.undone(`DROP TABLE orders; DROP FUNCTION order_placed()`)
			e := &emission{l, l.begin()}
			want := do(e)
			require.NoError(t, e.tx.Commit(l.within()))
			if ordered := one[int64](l, `SELECT max(event_id) FROM event_log WHERE key = 'k'`); ordered > slices.Max(want) {
				want = append(want, ordered) // by the trigger
			}
			require.Equal(t, want, l.lined("k"))
			require.Len(t, l.heads("k"), 1)
		})
	}
}

// Whatever a transaction does: what it has emitted when it commits is lined up once, in the order in which it was emitted.
func TestKeys_AnyTransaction_EachIsLinedUpOnceAndInOrder(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	rapid.Check(t, func(rt *rapid.T) {
		l.exec(`DELETE FROM event_lines; DELETE FROM event_keys; DELETE FROM worker_queue`)
		e := &emission{l, l.begin()}
		want := map[string][]int64{}
		saved := []map[string][]int64{}
		for range rapid.IntRange(1, 10).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"emit", "emit", "many", "immediate", "deferred", "savepoint", "rollback"}).Draw(rt, "what") {
			case "emit":
				key := rapid.SampledFrom([]string{"k", "b"}).Draw(rt, "key")
				want[key] = append(want[key], e.emit(key)...)
			case "many":
				ids := e.emit("k", "b")
				want["k"], want["b"] = append(want["k"], ids[0]), append(want["b"], ids[1])
			case "immediate":
				e.exec(`SET CONSTRAINTS ALL IMMEDIATE`)
			case "deferred":
				e.exec(`SET CONSTRAINTS ALL DEFERRED`)
			case "savepoint":
				e.exec(`SAVEPOINT s`)
				saved = append(saved, map[string][]int64{"k": slices.Clone(want["k"]), "b": slices.Clone(want["b"])})
			case "rollback":
				if n := len(saved); n > 0 {
					e.exec(`ROLLBACK TO s; RELEASE s`)
					want, saved = saved[n-1], saved[:n-1]
				}
			}
		}
		require.NoError(rt, e.tx.Commit(l.within()))
		for _, key := range []string{"k", "b"} {
			require.Equal(rt, slices.Concat([]int64{}, want[key]), slices.Concat([]int64{}, l.lined(key)), key)
		}
	})
}
