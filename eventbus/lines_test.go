package eventbus_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testroles"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// This file answers: do the events of a key come one at a time, in order, and none is left behind?

// heads are the ids of the events of a key that are in the queue and due now or later, or at work.
func (l *lab) heads(key string) []int64 {
	l.t.Helper()
	return all[int64](l, `SELECT (input->>'event_id')::bigint FROM worker_queue WHERE key = $1 AND visible_at < '9999-01-01' ORDER BY id`, key)
}

// claim claims the only delivery that is due.
func (l *lab) claim(tags ...string) *pgwake.ClaimedWorkItem {
	l.t.Helper()
	item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Tags: pgwake.Tags(tags...), PollTimeout: patience})
	require.NoError(l.t, err)
	return item
}

const tagA = "eventbus/g|a"

func TestKeys_HeadIsSettledInAnyWay_NextIsInTheQueue(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(l *lab, item *pgwake.ClaimedWorkItem) error{
		"acknowledged": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			return l.p.AckWorkItem(l.within(), item.LockToken, nil)
		},
		"many acknowledged": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			return l.p.AckWorkItems(l.within(), []pgwake.LockToken{item.LockToken})
		},
		"with a fetch": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			_, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Tags: pgwake.Tags("none"), NoWait: true, Ack: []pgwake.LockToken{item.LockToken}})
			if errors.Is(err, pgwake.ErrNoWork) {
				err = nil
			}
			return err
		},
		"dead letter": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			return l.p.DeadLetterWorkItem(l.within(), item.LockToken, "no", "no")
		},
		"max attempts of a fetch": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			if err := l.p.AbandonWorkItem(l.within(), item.LockToken, nil); err != nil {
				return err
			}
			next, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Tags: pgwake.Tags(tagA), MaxAttempts: 1})
			if err != nil {
				return err
			}
			return l.p.AbandonWorkItem(l.within(), next.LockToken, nil)
		},
		"removed by hand": func(l *lab, item *pgwake.ClaimedWorkItem) error {
			l.exec(`DELETE FROM worker_queue WHERE id = $1`, item.ID)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			first, second, third := l.emitKey("a", "k"), l.emitKey("a", "k"), l.emitKey("a", "k")
			other := l.emitKey("a", "l")
			require.Equal(t, []int64{first}, l.heads("k"))
			require.Equal(t, []int64{other}, l.heads("l"), "another key does not wait")
			item := l.claim(tagA)
			require.NoError(t, l.p.AbandonWorkItem(l.within(), item.LockToken, nil))
			require.Equal(t, []int64{first}, l.heads("k"), "it is to be tried again, and the others wait")
			item = l.claim(tagA)
			for item.Key != "k" {
				item = l.claim(tagA)
			}
			require.NoError(t, settle(l, item))
			require.Equal(t, []int64{second}, l.heads("k"))
			l.exec(`DELETE FROM worker_queue`)
			require.Equal(t, []int64{third}, l.heads("k"))
			l.exec(`DELETE FROM worker_queue`)
			require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`), "nothing is kept of what is over")
			require.Zero(t, one[int](l, `SELECT count(*) FROM event_lines`))
			fourth := l.emitKey("a", "k")
			require.Equal(t, []int64{fourth}, l.heads("k"))
		})
	}
}

// An emit that has not committed keeps neither the head from being settled nor others from their line.
func TestKeys_TransactionStaysOpen_NobodyWaitsForIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	first := l.emitKey("a", "k")
	tx := l.begin()
	late, err := l.WithTx(tx).Emit(l.within(), "a", nil, &eventbus.EmitOptions{Key: "k"})
	require.NoError(t, err)
	second := l.emitKey("a", "k")
	require.Equal(t, []int64{first}, l.heads("k"))
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Equal(t, []int64{second}, l.heads("k"))
	require.NoError(t, tx.Commit(l.within()))
	require.Equal(t, []int64{second}, l.heads("k"))
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Equal(t, []int64{late}, l.heads("k"), "it has its place as of its commit")
}

// A handler that emits an event of its own key has that come after it, and one that is rolled back has emitted nothing.
func TestKeys_HandlerEmitsOfItsOwnKey_ComesAfterIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	var s seen
	var failed atomic.Bool
	require.NoError(t, n.On(l.within(), "#", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		if e.Type != "a" {
			s.note("%s", e.Type)
			return nil
		}
		if _, err := n.WithTx(tx).Emit(ctx, "b", nil, &eventbus.EmitOptions{Key: e.Key}); err != nil {
			return err
		}
		s.note("%s", e.Type)
		if !failed.Swap(true) {
			return errors.New("again")
		}
		return nil
	}))
	l.emitKey("a", "k")
	l.eventually(func() bool { return len(l.queued()) == 0 && len(s.list()) >= 3 }, "both are handled")
	require.Equal(t, []string{"a", "a", "b"}, s.list())
}

func TestKeys_DeadLetterIsRedriven_WaitsForWhatIsThereOfItsKey(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	first, second, third := l.emitKey("a", "k"), l.emitKey("a", "k"), l.emitKey("a", "k")
	require.NoError(t, l.p.DeadLetterWorkItem(l.within(), l.claim(tagA).LockToken, "no", ""))
	redriven, err := l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
	for _, want := range []int64{second, third, first} {
		require.Equal(t, []int64{want}, l.heads("k"))
		require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	}
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))

	l.emitKey("a", "k")
	require.NoError(t, l.p.DeadLetterWorkItem(l.within(), l.claim(tagA).LockToken, "no", ""))
	_, err = l.p.RedriveDeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, l.heads("k"), 1, "nothing is before it")
	fifth := l.emitKey("a", "k")
	require.Len(t, l.heads("k"), 1)
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	require.Equal(t, []int64{fifth}, l.heads("k"))
}

// One that waits is removed by somebody who has not committed yet when the head is settled, and those behind it are not forgotten.
func TestKeys_OneThatWaitsIsRemovedWhileTheHeadIsSettled_NextIsInTheQueue(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	first := l.emitKey("a", "k")
	l.bury(tagA, "no")
	second := l.emitKey("a", "k")
	_, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	third := l.emitKey("a", "k")
	require.Equal(t, []int64{first, third}, all[int64](l, `SELECT event_id FROM event_lines ORDER BY place`))
	head := l.claim(tagA)
	require.Equal(t, []int64{second}, l.heads("k"))

	tx := l.begin()
	in := pgx.Identifier{l.p.Schema()}.Sanitize()
	_, err = tx.Exec(l.within(), `DELETE FROM `+in+`.worker_queue WHERE visible_at > '9999-01-01'; SET CONSTRAINTS ALL IMMEDIATE`)
	require.NoError(t, err)
	acked := make(chan error, 1)
	go func() { acked <- l.p.AckWorkItem(l.t.Context(), head.LockToken, nil) }()
	l.eventually(func() bool {
		return one[bool](l, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, tx.Conn().PgConn().PID())
	}, "the ack waits")
	require.NoError(t, tx.Commit(l.within()))
	require.NoError(t, <-acked)
	require.Equal(t, []int64{third}, l.heads("k"))
}

// A delivery is given up and redriven in one transaction: it was not away.
func TestKeys_DeadAndRedrivenInOneTransaction_KeepsItsPlace(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	again := func() {
		t.Helper()
		tx := l.begin()
		in := pgx.Identifier{l.p.Schema()}.Sanitize()
		_, err := tx.Exec(l.within(), `SELECT `+in+`.bury_work(ARRAY(SELECT id FROM `+in+`.worker_queue ORDER BY id), 'no', NULL)`)
		require.NoError(t, err)
		_, err = l.WithTx(tx).Redrive(l.within(), nil)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(l.within()))
	}
	first, second := l.emitKey("a", "k"), l.emitKey("a", "k")
	again()
	require.Equal(t, []int64{first}, l.heads("k"))
	l.bury(tagA, "no")
	third := l.emitKey("a", "k")
	_, err := l.Redrive(l.within(), nil) // and waits
	require.NoError(t, err)
	again()
	for _, want := range []int64{second, third, first} {
		require.Equal(t, []int64{want}, l.heads("k"))
		require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil))
	}
	require.Empty(t, l.queued())
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
}

// Whatever happens in whatever order: at most one delivery of a key is in the queue, in the order of the emits, and in the end all were.
func TestKeys_AnySequence_OneAtATimeInOrderAndNoneIsLeftBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		bus := l.In(fmt.Sprint("n", run))
		require.NoError(rt, bus.Subscribe(l.within(), "g", []string{"a"}, nil))
		waiting, handled := map[string][]int64{}, map[string][]int64{}
		check := func() {
			for key, ids := range waiting {
				heads := all[int64](l, `SELECT (input->>'event_id')::bigint FROM worker_queue WHERE key = $1 AND namespace = $2`, key, bus.Namespace())
				require.Equal(rt, ids[:min(len(ids), 1)], append([]int64{}, heads...), key)
			}
		}
		settle := func() bool {
			item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{bus.Namespace()}, Tags: pgwake.Tags(tagA), NoWait: true})
			if errors.Is(err, pgwake.ErrNoWork) {
				return false
			}
			require.NoError(rt, err)
			if rapid.Bool().Draw(rt, "fails") {
				require.NoError(rt, l.p.AbandonWorkItem(l.within(), item.LockToken, nil))
				return true
			}
			handled[item.Key] = append(handled[item.Key], waiting[item.Key][0])
			waiting[item.Key] = waiting[item.Key][1:]
			require.NoError(rt, l.p.AckWorkItem(l.within(), item.LockToken, nil))
			return true
		}
		keys := rapid.SampledFrom([]string{"k", "l"})
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			if rapid.Bool().Draw(rt, "emit") {
				var events []eventbus.Emission
				for range rapid.IntRange(1, 3).Draw(rt, "events") {
					events = append(events, eventbus.Emission{Type: "a", EmitOptions: eventbus.EmitOptions{Key: keys.Draw(rt, "key")}})
				}
				emitted, err := bus.EmitMany(l.within(), events)
				require.NoError(rt, err)
				for i, e := range emitted {
					waiting[events[i].Key] = append(waiting[events[i].Key], e.ID)
				}
			} else {
				settle()
			}
			check()
		}
		for settle() {
			check()
		}
		for key, ids := range handled {
			require.True(rt, slices.IsSorted(ids), key)
			require.Empty(rt, waiting[key])
		}
	})
}

// Emits race with acks: no event is stranded, none comes twice, and those that one producer emits come in order.
func TestKeys_ManyProducersAndNodes_InOrderAndNoneIsLeftBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var s seen
	var inHand [2]atomic.Int32
	for range 2 {
		n := l.nodeOn(l.another(), quick("g"))
		require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
			at := &inHand[e.Key[0]-'0']
			defer at.Add(-1)
			if at.Add(1) > 1 {
				t.Errorf("two of key %s at once", e.Key)
			}
			s.note("%s %s", e.Key, e.Payload)
			return nil
		}))
	}
	const producers, each = 4, 40
	var all sync.WaitGroup
	for p := range producers {
		all.Go(func() {
			for i := range each {
				_, err := l.Emit(t.Context(), "a", p*1000+i, &eventbus.EmitOptions{Key: fmt.Sprint(rand.IntN(2))})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	l.eventuallyAll(func() int { return len(s.list()) }, producers*each, "all are handled")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "and are done")
	require.Len(t, s.list(), producers*each)
	last := map[string]int{}
	for _, line := range s.list() {
		var key, of, i int
		_, err := fmt.Sscanf(line, "%d %d", &key, &of)
		require.NoError(t, err)
		of, i = of/1000, of%1000
		stream := fmt.Sprint(key, of)
		require.GreaterOrEqual(t, i, last[stream], "of one producer, in order")
		last[stream] = i
	}
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

// Transactions that emit for the same keys and groups, in whatever order, take their lines in one order. Were it not so, the first would have what
// the second waits for, which is before it in the line for what the first waits for.
func TestKeys_TransactionsEmitInOppositeOrders_NoDeadlock(t *testing.T) {
	t.Parallel()
	type events = []eventbus.Emission
	emission := func(kind, key string) eventbus.Emission {
		return eventbus.Emission{Type: kind, EmitOptions: eventbus.EmitOptions{Key: key}}
	}
	for name, c := range map[string]struct{ first, second events }{
		"one key, other groups": {events{emission("both", "k")}, events{emission("b", "k"), emission("both", "k")}},
		"two keys":              {events{emission("both", "k"), emission("both", "l")}, events{emission("both", "l"), emission("both", "k")}},
	} {
		for how, emit := range map[string]func(*testing.T, *eventbus.Bus, events) []int64{
			"at once": func(t *testing.T, bus *eventbus.Bus, all events) (ids []int64) {
				emitted, err := bus.EmitMany(t.Context(), all)
				require.NoError(t, err)
				for _, e := range emitted {
					ids = append(ids, e.ID)
				}
				return ids
			},
			"one by one": func(t *testing.T, bus *eventbus.Bus, all events) (ids []int64) {
				for _, e := range all {
					id, err := bus.Emit(t.Context(), e.Type, e.Payload, &e.EmitOptions)
					require.NoError(t, err)
					ids = append(ids, id)
				}
				return ids
			},
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				t.Parallel()
				l := newLab(t, nil)
				l.subscribe("a", "both") // whose lines come first
				l.subscribe("b", "both", "b")
				for _, key := range []string{"k", "l"} {
					l.emitKey("both", key)
				}
				held := l.begin()
				_, err := held.Exec(t.Context(), `SELECT FROM `+pgx.Identifier{l.p.Schema(), "event_keys"}.Sanitize()+` WHERE key = 'k' AND item_id = (
					SELECT min(item_id) FROM `+pgx.Identifier{l.p.Schema(), "event_keys"}.Sanitize()+` WHERE key = 'k') FOR UPDATE`)
				require.NoError(t, err)
				var commits sync.WaitGroup
				var ids []int64
				for _, all := range []events{c.first, c.second} {
					tx := l.begin()
					ids = append(ids, emit(t, l.WithTx(tx), all)...)
					pid := tx.Conn().PgConn().PID()
					commits.Go(func() {
						if err := tx.Commit(l.t.Context()); err != nil {
							t.Errorf("commit: %v", err)
						}
					})
					l.eventually(func() bool { return one[bool](l, `SELECT pg_blocking_pids($1) <> '{}'`, pid) }, "it waits for its place")
				}
				require.NoError(t, held.Rollback(t.Context()))
				commits.Wait()
				want := 0
				for _, e := range slices.Concat(c.first, c.second) {
					want += map[string]int{"both": 2, "b": 1}[e.Type]
				}
				require.Equal(t, want, one[int](l, `SELECT count(*) FROM event_lines WHERE event_id = ANY ($1)`, ids), "each is in the line of each of its groups, once")
				require.Zero(t, one[int](l, `SELECT count(*) FROM event_lines a JOIN event_lines b USING (group_id, key) WHERE a.place < b.place AND a.event_id > b.event_id
					AND (SELECT xact FROM event_log WHERE event_id = a.event_id) = (SELECT xact FROM event_log WHERE event_id = b.event_id)`), "those of a transaction are in its order")
			})
		}
	}
}

// What is lined up before the end of the transaction is not lined up again with what comes after.
func TestKeys_LinedUpBeforeTheCommit_OnceEach(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	head := l.emitKey("a", "k")
	tx := l.begin()
	var want []int64
	for range 3 {
		emitted, err := l.WithTx(tx).EmitMany(l.within(), []eventbus.Emission{{Type: "a", EmitOptions: eventbus.EmitOptions{Key: "k"}}, {Type: "a", EmitOptions: eventbus.EmitOptions{Key: "k"}}})
		require.NoError(t, err)
		want = append(want, emitted[0].ID, emitted[1].ID)
		_, err = tx.Exec(l.within(), `SET CONSTRAINTS ALL IMMEDIATE`)
		require.NoError(t, err)
		_, err = tx.Exec(l.within(), `SET CONSTRAINTS ALL DEFERRED`)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Commit(l.within()))
	require.Equal(t, []int64{head}, l.heads("k"))
	require.Equal(t, want, all[int64](l, `SELECT event_id FROM event_lines ORDER BY place`))
}

// Handlers that emit for each other's keys may lock them in opposite orders at their commits. PostgreSQL ends one of them, and that costs it
// no attempt.
func TestKeys_HandlersEmitForEachOthersKeys_AllAreHandled(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.MaxAttempts = 1
	n := l.node(config)
	var s seen
	require.NoError(t, n.On(l.within(), "#", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		s.note("%d", e.ID) // of each attempt
		if e.Type != "a" {
			return nil
		}
		_, err := n.WithTx(tx).Emit(ctx, "b", nil, &eventbus.EmitOptions{Key: map[string]string{"k": "l", "l": "k"}[e.Key]})
		return err
	}))
	const each = 15
	for range each {
		l.emitKey("a", "k")
		l.emitKey("a", "l")
	}
	l.eventuallyAll(func() int { return len(s.list()) }, 4*each, "they are handled, though each deadlock takes a second")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	require.Equal(t, 4*each, one[int](l, `SELECT count(*) FROM event_log`), "each has emitted once")
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
}

// The trigger runs as the owner of the schema, and whoever may call functions can make a table of his own call it, whose columns
// have types with casts that are his own.
func TestEventOfKeyEmitted_TableOfSomebodyElse_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	role := testroles.New(t, testroles.Worker, l.p.Schema(), "eventbus")
	conn, err := pgx.Connect(l.within(), testroles.URL(t, role))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	schema := pgx.Identifier{l.p.Schema()}.Sanitize()
	l.exec(`GRANT EXECUTE ON FUNCTION event_of_key_emitted TO ` + role)                                        // as it had when it was given all functions
	for _, made := range []string{`AS SELECT * FROM ` + schema + `.event_log LIMIT 0`, `(event_id integer)`} { // none of its columns is read
		_, err = conn.Exec(l.within(), fmt.Sprintf(`DROP TABLE IF EXISTS pg_temp.event_log; CREATE TEMP TABLE event_log %s;
			CREATE TRIGGER mine AFTER INSERT ON pg_temp.event_log FOR EACH ROW EXECUTE FUNCTION %s.event_of_key_emitted()`, made, schema))
		require.NoError(t, err)
		_, err = conn.Exec(l.within(), `SET pgwake.emits_keys = 'one'; INSERT INTO pg_temp.event_log (event_id) VALUES (1)`)
		require.ErrorContains(t, err, "event_of_key_emitted is for event_log alone")
	}
}
