package eventbus_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// This file answers: are dead letters found, redriven and purged by what they are of?

// bury has deliveries become dead letters.
func (l *lab) bury(tag string, reason string) {
	l.t.Helper()
	require.NoError(l.t, l.p.DeadLetterWorkItem(l.within(), l.claim(tag).LockToken, reason, "it is broken"))
}

func TestDeadLetters_EachFilter_ChoosesThose(t *testing.T) {
	t.Parallel()
	l := newLab(t, &eventbus.Config{StrictRouting: true})
	l.subscribe("g", "a", "b")
	l.subscribe("other", "a")
	id, err := l.Emit(l.within(), "a", map[string]int{"n": 1}, &eventbus.EmitOptions{Key: "k", Headers: map[string]string{"h": "v"}, Metadata: map[string]int{"m": 2}})
	require.NoError(t, err)
	l.bury(eventTag("g", "a"), "first")
	l.bury(eventTag("other", "a"), "second")
	l.emit("b")
	l.bury(eventTag("g", "b"), "first")
	l.emitKey("nobody's", "n")
	// What others bury in the namespace is not of the bus, whatever it looks like.
	_, err = l.p.EnqueueForWorker(l.within(), pgwake.WorkItem{Name: "a", Tag: "mine", Input: json.RawMessage(`{"event_id": "x"}`)}, nil)
	require.NoError(t, err)
	l.bury("mine", "first")

	list := func(f *eventbus.LetterFilter) (letters []eventbus.Letter) {
		letters, err := l.DeadLetters(l.within(), f)
		require.NoError(t, err)
		return letters
	}
	all := list(nil)
	require.Len(t, all, 4)
	first := all[0]
	require.WithinDuration(t, time.Now(), first.FailedAt, time.Minute)
	require.WithinDuration(t, time.Now(), first.Event.EmittedAt, time.Minute)
	require.Equal(t, []any{"g", "first", "it is broken", 1}, []any{first.Group, first.Reason, first.Error, first.Attempts})
	e := first.Event
	require.Equal(t, []any{id, "default", "a", `{"n": 1}`, `{"m": 2}`, "k", "v", 0},
		[]any{e.ID, e.Namespace, e.Type, string(e.Payload), string(e.Metadata), e.Key, e.Headers["h"], e.Redelivery})
	require.NotZero(t, e.MessageID)
	cut := list(&eventbus.LetterFilter{PayloadBytes: 4})
	require.Equal(t, []any{json.RawMessage(nil), &pgwake.Cut{Bytes: 8, Start: `{"n"`}}, []any{cut[0].Event.Payload, cut[0].Event.PayloadCut})
	require.Equal(t, all[3], cut[3], "a short one")
	_, err = l.DeadLetters(l.within(), &eventbus.LetterFilter{PayloadBytes: -1})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.Equal(t, []any{"", "No handler for event nobody's", "n"}, []any{all[3].Group, all[3].Reason, all[3].Event.Key})
	for name, c := range map[string]struct {
		filter eventbus.LetterFilter
		want   []int // of all
	}{
		"group":         {eventbus.LetterFilter{Group: "g"}, []int{0, 2}},
		"type":          {eventbus.LetterFilter{Type: "a"}, []int{0, 1}},
		"reason":        {eventbus.LetterFilter{Reason: "first"}, []int{0, 2}},
		"ids":           {eventbus.LetterFilter{IDs: []int64{all[1].ID, all[2].ID}}, []int{1, 2}},
		"no ids":        {eventbus.LetterFilter{IDs: []int64{}}, nil},
		"died before":   {eventbus.LetterFilter{DiedBefore: first.FailedAt.Add(time.Microsecond)}, []int{0}},
		"after":         {eventbus.LetterFilter{After: all[1].ID}, []int{2, 3}},
		"limit":         {eventbus.LetterFilter{Limit: 1}, []int{0}},
		"all of those":  {eventbus.LetterFilter{Group: "g", Type: "b", Reason: "first"}, []int{2}},
		"another group": {eventbus.LetterFilter{Group: "none"}, nil},
	} {
		var want []eventbus.Letter
		for _, i := range c.want {
			want = append(want, all[i])
		}
		require.ElementsMatch(t, want, list(&c.filter), name)
	}
	elsewhere, err := l.In("elsewhere").DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Empty(t, elsewhere)

	purged, err := l.Purge(l.within(), &eventbus.LetterFilter{Group: "other"})
	require.NoError(t, err)
	require.Equal(t, 1, purged)
	redriven, err := l.Redrive(l.within(), &eventbus.LetterFilter{Type: "b"})
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Equal(t, []string{"b " + eventTag("g", "b")}, l.queued())
	require.Equal(t, []eventbus.Letter{all[0], all[3]}, list(nil))
	tx := l.begin()
	redriven, err = l.WithTx(tx).Redrive(l.within(), &eventbus.LetterFilter{Group: "g"})
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.Len(t, list(nil), 2)
	require.NoError(t, tx.Rollback(l.within()))
	letters, err := l.p.ListDeadLetters(l.within(), &pgwake.DeadLetterFilter{Reason: "first"})
	require.NoError(t, err)
	require.Len(t, letters, 2, "that of the transaction, and that of others")
}

func TestDeadLetters_EventIsNotInTheLogAnyMore_TheRestIsThere(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	id, err := l.Emit(l.within(), "a", strings.Repeat("x", 5000), &eventbus.EmitOptions{Key: "k"}) // what is small is there as well
	require.NoError(t, err)
	l.bury(eventTag("g", "a"), "no")
	l.exec(`DELETE FROM event_log`)
	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	e := letters[0].Event
	require.Equal(t, []any{id, "a", "k", []byte(nil)}, []any{e.ID, e.Type, e.Key, []byte(e.Payload)})
}

// Items with the tags of a group that nothing of the bus has made become dead letters, and are in nobody's way there.
func TestDeadLetters_NotOfDeliveries_AreListedRedrivenAndPurgedWithTheOthers(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a")
	bad := []string{`"x"`, `[]`, `null`, `{}`, `{"event_id": "x"}`, `{"event_id": 1, "emitted_at": "never"}`, `{"event_id": 1e30}`, `{"xact": -1}`,
		`{"event_id": 1, "emitted_at": "2020-01-01T00:00:00Z", "scheduled_task_id": "x"}`, `{"event_id": 1, "metadata": "\ud800"}`}
	for i, input := range bad {
		_, err := l.conn.Exec(l.within(), `SELECT enqueue_work('a', $1, p_tag => $2, p_key => $3)`, input, tagA, fmt.Sprint(i%2))
		require.NoError(t, err, input)
	}
	l.exec(`SELECT bury_work(ARRAY(SELECT id FROM worker_queue), 'Not a delivery', NULL)`)
	id := l.emitKey("a", "0") // for which those of its key are to wait
	l.bury(tagA, "no")
	l.emitKey("a", "0")

	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, letters, len(bad)+1)
	require.Zero(t, letters[0].Event.ID)
	require.Equal(t, []any{"Not a delivery", "a", "0", "g"}, []any{letters[0].Reason, letters[0].Event.Type, letters[0].Event.Key, letters[0].Group})
	require.Equal(t, id, letters[len(bad)].Event.ID)
	n, err := l.Redrive(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, len(bad)+1, n)
	l.exec(`SELECT bury_work(ARRAY(SELECT id FROM worker_queue), 'no', NULL)`)
	n, err = l.Purge(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, len(bad)+2, n)
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_lines`))
	require.Zero(t, one[int](l, `SELECT count(*) FROM event_keys`))
}

func TestDeadLetters_BadFilters_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, f := range []eventbus.LetterFilter{{Group: "a b"}, {Type: "a..b"}, {Reason: "\x00"}, {Limit: -1}, {Limit: pgwake.MaxFetch + 1}, {After: -1},
		{DiedBefore: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}} {
		_, err := l.DeadLetters(l.within(), &f)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%+v", f)
		_, err = l.Redrive(l.within(), &f)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%+v", f)
	}
}

func eventTag(group, pattern string) string { return "eventbus/" + group + "|" + pattern }

// deletedGroup deletes a group that has dead letters, and waits until nothing is left of it but those.
func (l *lab) deletedGroup(group string) {
	l.t.Helper()
	was, err := l.DeleteGroup(l.within(), group)
	require.NoError(l.t, err)
	require.True(l.t, was)
	l.afterOthers(func() bool {
		l.exec(`SELECT remove_strays()`)
		return one[int](l, `SELECT count(*) FROM event_retirements`) == 0
	}, "its subscriptions are retired")
}

// In the queue nobody would claim them, and nobody would see them.
func TestRedrive_GroupIsGone_ItsLettersStayAndAreInNobodysWay(t *testing.T) {
	t.Parallel()
	for name, redrive := range map[string]func(*lab, *eventbus.LetterFilter) (int, error){
		"of a bus": func(l *lab, f *eventbus.LetterFilter) (int, error) { return l.Redrive(l.within(), f) },
		"in a transaction": func(l *lab, f *eventbus.LetterFilter) (n int, err error) {
			return n, pgx.BeginFunc(l.within(), l.p.Pool(), func(tx pgx.Tx) (err error) {
				n, err = l.WithTx(tx).Redrive(l.within(), f)
				return err
			})
		},
		"of all kinds": func(l *lab, f *eventbus.LetterFilter) (int, error) {
			if f == nil {
				return eventbus.RedriveDeadLetters(l.within(), l.p, nil)
			}
			return eventbus.RedriveDeadLetters(l.within(), l.p, &pgwake.DeadLetterFilter{IDs: f.IDs, Limit: f.Limit})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, &eventbus.Config{StrictRouting: true})
			l.subscribe("gone", "a")
			l.subscribe("g", "b")
			l.subscribe("gone.too", "c")
			for range 3 {
				l.emit("a")
				l.bury(eventTag("gone", "a"), "no")
			}
			l.emitKey("c", "k")
			l.bury(eventTag("gone.too", "c"), "no")
			l.emit("b")
			l.bury(eventTag("g", "b"), "no")
			l.emit("nobody's")
			l.emit("b")
			l.bury(eventTag("g", "b"), "no")
			l.deletedGroup("gone")
			l.deletedGroup("gone.too")
			letters, err := l.DeadLetters(l.within(), nil)
			require.NoError(t, err)
			require.Len(t, letters, 7)

			n, err := redrive(l, &eventbus.LetterFilter{IDs: []int64{letters[0].ID, letters[3].ID}})
			require.NoError(t, err)
			require.Zero(t, n, "nor are they if they are asked for")
			n, err = redrive(l, &eventbus.LetterFilter{Limit: 1})
			require.NoError(t, err)
			require.Equal(t, 1, n, "they do not fill the batch")
			n, err = redrive(l, nil)
			require.NoError(t, err)
			require.Equal(t, 2, n)
			require.Equal(t, []string{"b " + eventTag("g", "b"), "nobody's eventbus", "b " + eventTag("g", "b")}, l.queued())
			stay, err := l.DeadLetters(l.within(), nil)
			require.NoError(t, err)
			require.Equal(t, letters[:4], stay)

			l.subscribe("gone", "a")
			n, err = redrive(l, nil)
			require.NoError(t, err)
			require.Equal(t, 3, n, "there is such a group again")
			purged, err := l.Purge(l.within(), nil)
			require.NoError(t, err)
			require.Equal(t, 1, purged)
		})
	}
}

// It would have the key of what comes by another pattern, under a tag that nobody claims.
func TestRedrive_GroupIsNotSubscribedToThePatternAnyMore_ItsLettersStayAndTheirKeysGoOn(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "a", "b")
	l.emitKey("a", "k")
	l.bury(eventTag("g", "a"), "broken")
	_, err := l.Unsubscribe(l.within(), "g", "a")
	require.NoError(t, err)
	redrive := func(want int) {
		t.Helper()
		n, err := l.Redrive(l.within(), nil)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	redrive(0)
	n, err := eventbus.RedriveDeadLetters(l.within(), l.p, nil)
	require.NoError(t, err)
	require.Zero(t, n)
	l.emitKey("b", "k")
	require.NoError(t, l.p.AckWorkItem(l.within(), l.claim(eventTag("g", "b")).LockToken, nil))
	l.subscribe("g", "a")
	redrive(1)
	l.claim(eventTag("g", "a"))
}

// Whoever comes later, the redrive or the end of the retirement, sees what the other has done.
func TestRedrive_RetirementOfTheSubscriptionIsAboutToEnd_LetterGoesByAnotherOrStays(t *testing.T) {
	t.Parallel()
	retiring := func(t *testing.T) *lab {
		l := newLab(t, nil)
		l.subscribe("g", "a", "#")
		l.emitKey("a", "k")
		l.bury(eventTag("g", "a"), "broken")
		_, err := l.Unsubscribe(l.within(), "g", "a")
		require.NoError(t, err)
		l.exec(`SELECT remove_strays()`)
		l.afterOthers(func() bool {
			return one[bool](l, `SELECT bool_and(horizon <= log_xact(pg_snapshot_xmin(pg_current_snapshot()))) FROM event_retirements`)
		}, "nobody is left who has not seen its end")
		return l
	}
	t.Run("it ends later", func(t *testing.T) {
		t.Parallel()
		l := retiring(t)
		tx := l.begin()
		n, err := l.WithTx(tx).Redrive(l.within(), nil)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		l.exec(`SELECT remove_strays()`)
		require.NoError(t, tx.Commit(l.within()))
		l.exec(`SELECT remove_strays()`)
		l.claim(eventTag("g", "#"))
	})
	for name, redrive := range map[string]func(l *lab) (int, error){
		"it ends before, of a bus":       func(l *lab) (int, error) { return l.Redrive(l.t.Context(), nil) },
		"it ends before, of all letters": func(l *lab) (int, error) { return eventbus.RedriveDeadLetters(l.t.Context(), l.p, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := retiring(t)
			tx := l.begin()
			_, err := tx.Exec(l.within(), `SELECT `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.remove_strays()`)
			require.NoError(t, err)
			redriven := make(chan int, 1)
			go func() {
				n, err := redrive(l)
				assert.NoError(t, err)
				redriven <- n
			}()
			l.eventually(func() bool {
				return one[bool](l, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, tx.Conn().PgConn().PID())
			}, "it waits")
			require.NoError(t, tx.Commit(l.within()))
			require.Zero(t, <-redriven)
			require.Equal(t, 1, one[int](l, `SELECT count(*) FROM dead_letters`))
		})
	}
}

func TestRedriveDeadLetters_OfWhatIsNotTheBuss_IsThatOfTheProvider(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	bury := func(p *pgwake.Provider, item pgwake.WorkItem, o *pgwake.EnqueueOptions) {
		t.Helper()
		_, err := p.EnqueueForWorker(l.within(), item, o)
		require.NoError(t, err)
		claimed, err := p.FetchWorkItem(l.within(), &pgwake.FetchOptions{NoWait: true, Tags: pgwake.AnyTag()})
		require.NoError(t, err)
		require.NoError(t, p.DeadLetterWorkItem(l.within(), claimed.LockToken, "no", ""))
	}
	redrive := func(p *pgwake.Provider, f *pgwake.DeadLetterFilter, want int) {
		t.Helper()
		n, err := eventbus.RedriveDeadLetters(l.within(), p, f)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	// Of a dedup key that is queued again the letter stays, and does not fill the batch.
	for _, name := range []string{"x", "y"} {
		bury(l.p, pgwake.WorkItem{Name: name, Tag: "mine"}, &pgwake.EnqueueOptions{DedupKey: name})
	}
	_, err := l.p.EnqueueForWorker(l.within(), pgwake.WorkItem{Name: "x", Tag: "mine"}, &pgwake.EnqueueOptions{DedupKey: "x"})
	require.NoError(t, err)
	redrive(l.p, &pgwake.DeadLetterFilter{Limit: 1}, 1)
	require.Equal(t, []string{"y mine", "x mine"}, l.queued())
	for _, bad := range []pgwake.DeadLetterFilter{{Before: 1}, {Limit: -1}, {Limit: pgwake.MaxFetch + 1}, {Namespace: "No!"}} {
		_, err := eventbus.RedriveDeadLetters(l.within(), l.p, &bad)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%+v", bad)
	}

	// Without a bus such a tag is anybody's.
	p := testschema.Core.New(t, nil)
	bury(p, pgwake.WorkItem{Name: "x", Tag: eventTag("g", "a")}, nil)
	redrive(p, nil, 1)
}
