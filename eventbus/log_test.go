package eventbus_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: is the log read, and replayed, without a gap?

// read reads what is after a cursor, one by one, and returns the ids and where it got.
func (l *lab) read(after eventbus.Cursor) (ids []int64, to eventbus.Cursor) {
	l.t.Helper()
	for {
		events, err := l.Read(l.within(), after, 1)
		require.NoError(l.t, err)
		if len(events) == 0 {
			return ids, after
		}
		ids, after = append(ids, events[0].ID), events[0].Cursor()
	}
}

func TestRead_TransactionCommitsLate_IsNotPassedOver(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	first := l.emit("a")
	tx := l.begin()
	late, err := l.WithTx(tx).Emit(l.within(), "late", nil, nil)
	require.NoError(t, err)
	second := l.emit("b")
	require.Equal(t, first, l.log(1)[0].ID, "what came after an open transaction waits for that")
	_, cursor := l.read(eventbus.Cursor{})
	require.NoError(t, tx.Commit(l.within()))
	var rest []int64
	l.afterOthers(func() bool { // transactions of other tests are older
		var more []int64
		more, cursor = l.read(cursor)
		rest = append(rest, more...)
		return len(rest) == 2
	}, "all that was emitted")
	require.Equal(t, []int64{late, second}, rest)

	kept, err := eventbus.ParseCursor(cursor.String())
	require.NoError(t, err)
	require.Equal(t, cursor, kept)
	for _, bad := range []string{"", "1", "x/1", "1/-1", "1/2/3"} {
		_, err := eventbus.ParseCursor(bad)
		require.ErrorIs(t, err, pgwake.ErrInvalid, bad)
	}
	only, err := l.Read(l.within(), eventbus.Cursor{}, 10, "late", "c")
	require.NoError(t, err)
	require.Len(t, only, 1)
	_, err = l.Read(l.within(), eventbus.Cursor{}, 0)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	others, err := l.In("other").Read(l.within(), eventbus.Cursor{}, 10)
	require.NoError(t, err)
	require.Empty(t, others)
}

// ended waits for the end of a replay.
func (l *lab) ended(id int64) *eventbus.ReplayStatus {
	l.t.Helper()
	var status *eventbus.ReplayStatus
	l.eventually(func() bool {
		var err error
		status, err = l.GetReplay(l.within(), id)
		require.NoError(l.t, err)
		return !status.EndedAt.IsZero()
	}, "the replay ends")
	return status
}

func TestFind_PayloadBytes_TheBeginningStandsForWhatIsLonger(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	long := strings.Repeat("x", 3000)
	for _, payload := range []any{long, 1} {
		_, err := l.Emit(l.within(), "a", payload, nil)
		require.NoError(t, err)
	}
	events, err := l.Find(l.within(), &eventbus.FindFilter{PayloadBytes: 100})
	require.NoError(t, err)
	require.Len(t, events, 2)
	require.Equal(t, []any{`1`, (*pgwake.Cut)(nil)}, []any{string(events[0].Payload), events[0].PayloadCut})
	require.Equal(t, []any{json.RawMessage(nil), &pgwake.Cut{Bytes: 3002, Start: `"` + long[:99]}}, []any{events[1].Payload, events[1].PayloadCut})
	whole, err := l.Find(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, []any{`"` + long + `"`, (*pgwake.Cut)(nil)}, []any{string(whole[1].Payload), whole[1].PayloadCut})
	_, err = l.Find(l.within(), &eventbus.FindFilter{PayloadBytes: -1})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

func TestFind_TheLatestFirst_PageByPage(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var ids []int64
	for i := range 6 {
		id, err := l.Emit(l.within(), []string{"a", "b"}[i%2], i, &eventbus.EmitOptions{Key: []string{"", "", "k"}[i%3]})
		require.NoError(t, err)
		ids = append(ids, id)
	}
	_, err := l.In("other").Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	find := func(f *eventbus.FindFilter) (found []int64) {
		events, err := l.Find(l.within(), f)
		require.NoError(t, err)
		for _, e := range events {
			found = append(found, e.ID)
		}
		return found
	}
	var pages [][]int64
	f := &eventbus.FindFilter{Limit: 4}
	for {
		events, err := l.Find(l.within(), f)
		require.NoError(t, err)
		var page []int64
		for _, e := range events {
			page, f.Before = append(page, e.ID), e.Cursor()
		}
		pages = append(pages, page)
		if len(page) < f.Limit {
			break
		}
	}
	require.Equal(t, [][]int64{{ids[5], ids[4], ids[3], ids[2]}, {ids[1], ids[0]}}, pages)
	require.Equal(t, []int64{ids[5], ids[3], ids[1]}, find(&eventbus.FindFilter{Types: []string{"b", "c"}}))
	require.Equal(t, []int64{ids[5], ids[2]}, find(&eventbus.FindFilter{Key: "k"}))
	require.Equal(t, []int64{ids[3]}, find(&eventbus.FindFilter{ID: ids[3]}))
	all, err := l.Find(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, ids[:3], reversed(find(&eventbus.FindFilter{To: all[2].EmittedAt})))
	require.Equal(t, ids[3:], reversed(find(&eventbus.FindFilter{From: all[2].EmittedAt})))
	for _, bad := range []*eventbus.FindFilter{{Limit: -1}, {Limit: 10_001}, {ID: -1}, {Types: []string{"a.*"}}, {Before: eventbus.Cursor{ID: -1}}} {
		_, err := l.Find(l.within(), bad)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
}

func reversed(ids []int64) []int64 {
	slices.Reverse(ids)
	return ids
}

func TestReplay_RangeOfIDsOrTime_ComesOnceMore(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	var ids []string
	for range 10 {
		ids = append(ids, fmt.Sprint(l.emit("a")))
		l.emit("b")
	}
	l.eventually(func() bool { return len(s.list()) == 10 }, "they are handled")
	first, _ := strconv.ParseInt(ids[2], 10, 64)
	last, _ := strconv.ParseInt(ids[5], 10, 64)
	id, err := l.Replay(l.within(), "g", eventbus.Range{FirstID: first, LastID: last})
	require.NoError(t, err)
	require.EqualValues(t, 4, l.ended(id).Delivered)
	l.eventually(func() bool { return len(s.list()) == 14 }, "four more")
	require.ElementsMatch(t, ids[2:6], s.list()[10:])

	at := one[time.Time](l, `SELECT emitted_at FROM event_log WHERE event_id = $1`, first)
	id, err = l.Replay(l.within(), "g", eventbus.Range{To: at})
	require.NoError(t, err)
	require.EqualValues(t, 2, l.ended(id).Delivered)
	id, err = l.Replay(l.within(), "g", eventbus.Range{From: at})
	require.NoError(t, err)
	require.EqualValues(t, 8, l.ended(id).Delivered)
	_, err = l.Replay(l.within(), "nobody", eventbus.Range{})
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	_, err = l.GetReplay(l.within(), 1<<40)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
}

// A replay waits for whoever had emitted before it began, and has not committed yet.
func TestReplay_TransactionCommitsLate_IsNotLeftOut(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(l *lab){
		"replay": func(l *lab) {
			_, err := l.Replay(l.within(), "g", eventbus.Range{})
			require.NoError(l.t, err)
		},
		"group from the beginning": func(l *lab) {
			require.NoError(l.t, l.Subscribe(l.within(), "new", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			l.subscribe("g", "a")
			tx := l.begin()
			late, err := l.WithTx(tx).Emit(l.within(), "a", nil, nil)
			require.NoError(t, err)
			second := l.emit("a")
			begin(l)
			id := one[int64](l, `SELECT replay_id FROM event_replays`)
			goOn := func() (state string) {
				for state = "more"; state == "more"; {
					state = one[string](l, `SELECT replay_some($1)`, id)
				}
				return state
			}
			require.Equal(t, "wait", goOn())
			l.emit("a")
			require.Equal(t, "wait", goOn())
			require.NoError(t, tx.Commit(l.within()))
			l.afterOthers(func() bool { return goOn() == "done" }, "it waits no longer")
			times := func(event int64) int {
				return one[int](l, `SELECT count(*) FROM worker_queue WHERE input ->> 'event_id' = $1::text`, fmt.Sprint(event))
			}
			require.Equal(t, []int{2, 2}, []int{times(late), times(second)}, "for g, and by the replay")
		})
	}
}

// statements counts what a pool sends, by what it has in it.
type statements struct {
	mu  sync.Mutex
	all []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, data.SQL)
	return ctx
}
func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) with(words string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sql := range s.all {
		if strings.Contains(sql, words) {
			n++
		}
	}
	return n
}

// A transaction that stays open keeps a replay from its end, and nobody asks all the time whether it has ended.
func TestReplay_TransactionStaysOpen_AsksOnceAMinuteAtLast(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	tx := l.begin() // whatever it is about
	_, err := tx.Exec(l.within(), `SELECT pg_current_xact_id()`)
	require.NoError(t, err)
	l.emit("a")
	id, err := l.Replay(l.within(), "g", eventbus.Range{})
	require.NoError(t, err)
	require.Equal(t, "wait", one[string](l, `SELECT replay_some($1)`, id))
	l.exec(`UPDATE event_replays SET waiting_since = waiting_since - interval '5 minutes'`) // it has waited for that long
	var sent statements
	bus, p := l.onPool(func(config *pgxpool.Config) { config.ConnConfig.Tracer = &sent })
	l.nodeOn(bus, &eventbus.NodeConfig{Group: "g"})
	l.eventually(func() bool { return sent.with("replay_some") > 0 }, "it asks")
	l.eventually(func() bool {
		s := p.Stats().Worker
		return s.Parked == 1 && s.Settled && sent.with("keep_event_log") > 0 && one[bool](l, `SELECT lock_token IS NULL FROM worker_queue WHERE name = 'eventbus|replay'`)
	}, "the node waits, and has done what it does when it begins")
	asked, all, since := sent.with("replay_some"), sent.with(""), time.Now()
	require.Never(t, func() bool { return sent.with("replay_some") > asked }, time.Second, 50*time.Millisecond)
	require.Less(t, float64(sent.with("")-all), 5*max(1, time.Since(since).Seconds()), "statements in a second, of whatever kind")
	require.Equal(t, 1, asked)
	require.InDelta(t, 60, one[float64](l, `SELECT extract(epoch FROM visible_at - clock_timestamp())::float8 FROM worker_queue WHERE name = 'eventbus|replay'`), 30)

	require.NoError(t, tx.Commit(l.within()))
	l.afterOthers(func() bool {
		// Each time: transactions of whoever else is on the server may be open, too, and then it waits for another minute.
		l.exec(`WITH waits AS (UPDATE worker_queue SET visible_at = clock_timestamp()
			WHERE name = 'eventbus|replay' AND lock_token IS NULL AND visible_at > clock_timestamp() RETURNING id)
			SELECT notify_queue('worker', 1, NULL, 'default') FROM waits`)
		r, err := l.GetReplay(l.within(), id)
		return err == nil && r.Delivered == 1
	}, "it goes on")
}

// A step of a replay gets no answer, and no sign of why.
func TestReplay_NoAnswer_TriesAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	l.emit("a")
	id, err := l.Replay(l.within(), "g", eventbus.Range{})
	require.NoError(t, err)
	tx := l.begin()
	_, err = tx.Exec(l.within(), `LOCK TABLE `+pgx.Identifier{l.p.Schema(), "event_replays"}.Sanitize()+` IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	n, err := l.Bus.Node(l.within(), nil)
	require.NoError(t, err)
	eventbus.SetStepPatience(n, 2*time.Second) // which are enough for a step that has an answer
	require.NoError(t, n.Start(l.within()))
	defer func() { require.NoError(t, n.Stop(context.Background())) }()
	l.eventually(func() bool {
		return one[bool](l, `SELECT EXISTS (SELECT FROM worker_queue WHERE name = 'eventbus|replay' AND lock_token IS NULL AND visible_at > now())`)
	}, "it gives up, for now")
	require.NoError(t, tx.Rollback(l.within()))
	l.eventually(func() bool {
		r, err := l.GetReplay(l.within(), id)
		return err == nil && !r.EndedAt.IsZero()
	}, "it goes on")
}

// A new group that begins at the beginning gets each event once, whatever is emitted, and commits late, meanwhile.
func TestSubscribe_FromTheBeginningWhileEventsAreEmitted_EachOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var want []string
	for range 1200 / 100 {
		emitted, err := l.EmitMany(l.within(), hundred())
		require.NoError(t, err)
		for _, e := range emitted {
			want = append(want, fmt.Sprint(e.ID))
		}
	}
	late := l.begin() // begins to emit before the group is there, and commits when that has begun
	id, err := l.WithTx(late).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	want = append(want, fmt.Sprint(id))

	var mu sync.Mutex
	stop := make(chan struct{})
	var emitters sync.WaitGroup
	for i := range 3 {
		emitters.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				id, err := l.Emit(t.Context(), "a", nil, &eventbus.EmitOptions{Key: map[bool]string{true: "k"}[i == 0]})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				want = append(want, fmt.Sprint(id))
				mu.Unlock()
			}
		})
	}
	config := quick("new")
	config.BatchSize = 100
	n := l.node(config)
	require.NoError(t, l.Subscribe(l.within(), "new", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	l.eventually(func() bool { return len(s.list()) > 100 }, "it has begun")
	inTx, err := l.WithTx(late).Emit(l.within(), "a", nil, nil) // by a transaction that is older than the group, which sees it by now
	require.NoError(t, err)
	require.NoError(t, late.Commit(l.within()))
	close(stop)
	emitters.Wait()
	want = append(want, fmt.Sprint(inTx))
	l.ended(one[int64](l, `SELECT replay_id FROM event_replays`))
	l.eventuallyAll(func() int { return len(s.list()) }, len(want), "they are handled")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	require.ElementsMatch(t, want, s.list())
}

// What a group that begins at the beginning gets of a key is in order: the log before what is emitted meanwhile, and nothing is left in a line.
func TestSubscribe_FromTheBeginning_EventsOfAKeyComeInOrder(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	const keys = 5
	var emitting [keys]sync.Mutex // its holder's emit commits before the next begins
	var want [keys][]int64
	emit := func(ctx context.Context, i int) error {
		emitting[i].Lock()
		defer emitting[i].Unlock()
		id, err := l.Emit(ctx, "a", nil, &eventbus.EmitOptions{Key: fmt.Sprint(i)})
		want[i] = append(want[i], id)
		return err
	}
	for i := range 20 * keys {
		require.NoError(t, emit(l.within(), i%keys))
	}
	late := l.begin() // holds the replay up, so that the group is behind for a while
	_, err := l.WithTx(late).Emit(l.within(), "a", nil, nil)
	require.NoError(t, err)
	n := l.node(quick("new"))
	require.NoError(t, l.Subscribe(l.within(), "new", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	var mu sync.Mutex
	got := map[string][]int64{}
	handled := 0
	require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		mu.Lock()
		defer mu.Unlock()
		got[e.Key] = append(got[e.Key], e.ID)
		handled++
		return nil
	}))
	stop := make(chan struct{})
	var emitters sync.WaitGroup
	for e := range 3 {
		emitters.Go(func() {
			for i := e; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond): // the replay may have to wait for other tests, and all of it is to be handled after that
					if err := emit(t.Context(), i%keys); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	waiting := `SELECT count(*) FROM event_lines WHERE place > 0`
	l.eventually(func() bool { return one[int](l, waiting) > 20 }, "they wait behind the log")
	require.NoError(t, late.Commit(l.within()))
	replay := one[int64](l, `SELECT replay_id FROM event_replays`)
	l.ended(replay)
	close(stop)
	emitters.Wait()
	emitted := 1 + len(slices.Concat(want[:]...)) // with that of late
	l.eventuallyAll(func() int {
		mu.Lock()
		defer mu.Unlock()
		return handled
	}, emitted, "they are handled")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	mu.Lock()
	defer mu.Unlock()
	for i := range keys {
		require.Equal(t, want[i], got[fmt.Sprint(i)])
	}
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
	require.False(t, one[bool](l, `SELECT behind FROM event_groups`))
}

// The same step by step: what waits, and when it goes on.
func TestSubscribe_FromTheBeginning_LinesAreHeldUntilTheLogIsDelivered(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	first, second := l.emitKey("a", "k"), l.emitKey("a", "k")
	require.NoError(t, l.Subscribe(l.within(), "g", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	third := l.emitKey("a", "k")
	replay := one[int64](l, `SELECT replay_id FROM event_replays`)
	some := func(want string) {
		t.Helper()
		l.afterOthers(func() bool { // transactions of other tests may hold it up
			is := one[string](l, `SELECT replay_some($1, 1)`, replay)
			require.Contains(t, []string{"wait", want}, is)
			return is == want
		}, "it goes on")
	}
	ack := func() { require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(tagA).LockToken, nil)) }
	require.Empty(t, l.heads("k"))
	some("more")
	require.Equal(t, []int64{first}, l.heads("k"))
	ack()
	require.Empty(t, l.heads("k"), "the log comes first")
	some("more")
	require.Equal(t, []int64{second}, l.heads("k"))
	ack()
	require.Empty(t, l.heads("k"), "who knows what else is in the log?")

	tx := l.begin()
	fourth, err := l.WithTx(tx).Emit(l.within(), "a", nil, &eventbus.EmitOptions{Key: "k"})
	require.NoError(t, err)
	_, err = tx.Exec(l.within(), `SET CONSTRAINTS ALL IMMEDIATE`) // as its commit does: it takes its place behind the third, which is held
	require.NoError(t, err)
	l.exec(`SET lock_timeout = '20 ms'`)
	l.eventually(func() bool {
		var is string
		err := l.conn.QueryRow(l.within(), `SELECT replay_some($1, 1)`, replay).Scan(&is)
		if err == nil {
			require.Equal(t, "wait", is, "the group is behind as long as anybody goes by that")
			return false
		}
		require.ErrorContains(t, err, "lock timeout")
		return true
	}, "it waits for that")
	l.exec(`RESET lock_timeout`)
	require.NoError(t, tx.Commit(l.within()))

	some("more")
	require.Empty(t, l.heads("k"))
	fifth := l.emitKey("a", "k")
	require.Empty(t, l.heads("k"), "those before are to be moved on")
	some("more")
	require.Equal(t, []int64{third}, l.heads("k"))
	some("done")
	ack()
	require.Equal(t, []int64{fourth}, l.heads("k"))
	ack()
	require.Equal(t, []int64{fifth}, l.heads("k"))
	ack()
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

func TestDeleteGroup_WhileItIsBehind_NothingIsLeft(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.emitKey("a", "k")
	require.NoError(t, l.Subscribe(l.within(), "new", []string{"a"}, &eventbus.SubscribeOptions{FromBeginning: true}))
	l.emitKey("a", "k")
	require.Empty(t, l.heads("k"), "what was before is yet to come")
	_, err := l.DeleteGroup(l.within(), "new")
	require.NoError(t, err)
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_keys) + (SELECT count(*) FROM event_lines)`))
}

func hundred() []eventbus.Emission {
	events := make([]eventbus.Emission, 100)
	for i := range events {
		events[i].Type = "a"
	}
	return events
}
