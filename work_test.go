package pgwake_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Order

func TestFetchWorkItem_SamePriority_FirstInFirstOut(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c", "d", "e")
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		require.Equal(t, name, n.take(t).Name)
	}
	n.requireNoWork(t)
}

// fetch_work picks by itself what nearly all fetches ask for; pick_work does it for poison, and otherwise for filters.
func TestFetchWorkItems_EachWayToPick_HasTheSameOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := time.Now().Add(-time.Hour).Truncate(time.Second)
	var items []pgwake.WorkEnqueue
	for i := range 60 { // in each order, with ties
		items = append(items, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: strconv.Itoa(i)},
			EnqueueOptions: pgwake.EnqueueOptions{Priority: i * 7 % 10, At: at.Add(time.Duration(i*11%4) * time.Second)}})
	}
	items = append(items,
		pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "tagged", Tag: "x"}, EnqueueOptions: pgwake.EnqueueOptions{At: at}},
		pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "of a session", Session: "s"}, EnqueueOptions: pgwake.EnqueueOptions{At: at}},
		pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "later"}, EnqueueOptions: pgwake.EnqueueOptions{Delay: time.Hour}})
	for name, o := range map[string]pgwake.FetchOptions{
		"without a filter":         {},
		"with a limit of attempts": {MaxAttempts: 100},
		"with a namespace":         {Namespaces: []string{pgwake.DefaultNamespace}},
	} {
		n.exec(t, `TRUNCATE worker_queue RESTART IDENTITY`)
		_, err := n.EnqueueForWorkerMany(tctx, items)
		require.NoError(t, err)
		hold := n.begin(t)
		_, err = hold.Exec(tctx, `SELECT FROM worker_queue WHERE id % 7 = 3 FOR UPDATE`)
		require.NoError(t, err)
		want := query[string](t, n, `SELECT name FROM worker_queue WHERE id % 7 <> 3 AND id <= 60 ORDER BY priority DESC, visible_at, id`)
		var got []string
		for o.LockTimeout, o.NoWait = lease, true; ; {
			batch, err := n.FetchWorkItems(tctx, 4, &o)
			if errors.Is(err, pgwake.ErrNoWork) {
				break
			}
			require.NoError(t, err)
			got = append(got, namesOf(batch)...)
		}
		require.Equal(t, want, got, name)
		require.NoError(t, hold.Rollback(tctx))
	}
}

func TestFetchWorkItem_Priorities_HighestFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, priority := range []int{0, 9, 5, 1, 8, 2, 7, 3, 6, 4} {
		n.enqueueWith(t, "item", &pgwake.EnqueueOptions{Priority: priority})
	}
	for want := 9; want >= 0; want-- {
		require.Equal(t, want, n.take(t).Priority)
	}
}

func TestFetchWorkItems_DueTimesDiffer_EarliestDueFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	base := time.Now().Add(-time.Hour)
	for _, minute := range []int{3, 1, 2, 0} {
		n.enqueueWith(t, strconv.Itoa(minute), &pgwake.EnqueueOptions{At: base.Add(time.Duration(minute) * time.Minute)})
	}
	n.enqueue(t, "now")
	require.Equal(t, []string{"0", "1", "2", "3", "now"}, n.takeAll(t))
}

func TestFetchWorkItems_SeveralNamespaces_OrderRunsAcrossThem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := time.Now().Add(-time.Hour)
	for i, e := range []pgwake.EnqueueOptions{
		{Namespace: "a", Priority: 1, At: at.Add(time.Second)},
		{Namespace: "b", Priority: 1, At: at},
		{Namespace: "a", Priority: 2, At: at.Add(time.Minute)},
		{Namespace: "c", Priority: 9},
		{Namespace: "b", Priority: 1, At: at.Add(time.Second)}, // as the first, but a later id
		{Namespace: "a"},
	} {
		n.enqueueWith(t, strconv.Itoa(i), &e)
	}
	require.Equal(t, []string{"2", "1", "0", "4", "5"}, n.takeAll(t, "b", "a"))
	require.Equal(t, []string{"3"}, n.takeAll(t))
}

// Whoever reads ahead must not stop at rows that others have locked, and must not skip one that is free.
func TestFetchWorkItems_FirstHundredRowsLockedByOthers_TakesTheNextInOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	items := make([]pgwake.WorkEnqueue, 110)
	for i := range items {
		items[i].Name, items[i].Namespace = strconv.Itoa(i), []string{"a", "b"}[i%2]
	}
	_, err := n.EnqueueForWorkerMany(t.Context(), items)
	require.NoError(t, err)
	_, err = n.begin(t).Exec(t.Context(), `SELECT FROM worker_queue ORDER BY id LIMIT 100 FOR UPDATE`)
	require.NoError(t, err)

	for _, namespaces := range [][]string{{"a", "b"}, nil} {
		got, err := n.FetchWorkItems(t.Context(), 5, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: namespaces})
		require.NoError(t, err)
		from := 100
		if namespaces == nil {
			from = 105
		}
		want := make([]string, 5)
		for i := range want {
			want[i] = strconv.Itoa(from + i)
		}
		require.Equal(t, want, namesOf(got))
	}
	n.requireNoWork(t)
}

// modelItem is a work item as the model of the queue sees it. Its instants are offsets from the begin of
// the check on a clock that travel moves.
type modelItem struct {
	name      string
	id        int64
	namespace string
	priority  int
	visible   time.Duration
	key       string
	attempt   int
	token     pgwake.LockToken // of the latest claim
	leased    bool             // token is good until visible
}

// workModel is the queue of work items as the specification has it, in memory.
type workModel struct {
	items []*modelItem
	clock time.Duration
}

// due returns what a fetch may take, in the order of the specification.
func (m *workModel) due(namespaces []string) (due []*modelItem) {
	for _, i := range m.items {
		if i.visible <= m.clock && (len(namespaces) == 0 || slices.Contains(namespaces, i.namespace)) {
			due = append(due, i)
		}
	}
	slices.SortFunc(due, func(a, b *modelItem) int {
		return cmp.Or(-cmp.Compare(a.priority, b.priority), cmp.Compare(a.visible, b.visible), cmp.Compare(a.id, b.id))
	})
	return due
}

// holder returns the item that the token has under lease, or nil.
func (m *workModel) holder(token pgwake.LockToken) *modelItem {
	for _, i := range m.items {
		if i.token == token && i.leased && i.visible > m.clock {
			return i
		}
	}
	return nil
}

func (m *workModel) remove(i *modelItem) {
	m.items = slices.DeleteFunc(m.items, func(other *modelItem) bool { return other == i })
}

// Whatever is done, in whatever order, with good tokens and with old ones: the queue does what the model
// says, item by item, in the exact order, attempts included.
func TestWorkQueue_RandomOperations_MatchTheModel(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	namespaces := []string{"default", "a", "b-1"}
	rapid.Check(t, func(t *rapid.T) {
		n.exec(t, `DELETE FROM worker_queue`)
		m := &workModel{}
		var tokens []pgwake.LockToken
		serial, began := 0, time.Now()
		// The clock ticks once for each call, and the call's instant on the real clock lies within
		// seconds of it, while whatever the model compares is minutes apart or ordered by calls.
		tick := func() { m.clock += time.Microsecond }
		token := func(t *rapid.T) pgwake.LockToken {
			if len(tokens) == 0 {
				t.Skip("nothing was claimed yet")
			}
			return rapid.SampledFrom(tokens).Draw(t, "token")
		}
		requireHeld := func(t *rapid.T, i *modelItem, err error) bool {
			if i == nil {
				requireError(t, err, pgwake.ErrLockLost)
				return false
			}
			require.NoError(t, err)
			return true
		}
		t.Repeat(map[string]func(*rapid.T){
			"enqueue": func(t *rapid.T) {
				tick()
				batch := make([]pgwake.WorkEnqueue, rapid.IntRange(1, 8).Draw(t, "batch"))
				added := make([]*modelItem, len(batch))
				for b := range batch {
					serial++
					e := &batch[b]
					e.Name = strconv.Itoa(serial)
					e.Namespace = rapid.SampledFrom(namespaces).Draw(t, "namespace")
					e.Priority = rapid.SampledFrom([]int{0, 0, 1, 9}).Draw(t, "priority")
					i := &modelItem{name: e.Name, namespace: e.Namespace, priority: e.Priority, visible: m.clock}
					switch hours := rapid.IntRange(-3, 3).Draw(t, "hours"); {
					case hours > 0:
						e.Delay = time.Duration(hours) * time.Hour
						i.visible += e.Delay
					case hours < 0: // the same few instants, so that ids decide
						i.visible = time.Duration(hours)*time.Hour - 24*time.Hour
						e.At = began.Add(i.visible).Add(-m.travelled())
					}
					if rapid.IntRange(0, 3).Draw(t, "keyed") == 0 {
						e.DedupKey = rapid.SampledFrom([]string{"k1", "k2"}).Draw(t, "key")
						i.key = e.DedupKey
					}
					added[b] = i
				}
				got, err := n.EnqueueForWorkerMany(ctx, batch)
				require.NoError(t, err)
				require.Len(t, got, len(batch))
				for b, i := range added {
					at := slices.IndexFunc(m.items, func(other *modelItem) bool {
						return i.key != "" && other.key == i.key && other.namespace == i.namespace
					})
					require.Equal(t, at >= 0, got[b].Duplicate, "item %s", i.name)
					if at >= 0 {
						require.Equal(t, m.items[at].id, got[b].ID)
						continue
					}
					i.id = got[b].ID
					m.items = append(m.items, i)
				}
			},
			"fetch": func(t *rapid.T) {
				tick()
				filter := rapid.SliceOfNDistinct(rapid.SampledFrom(namespaces), 0, 3, rapid.ID).Draw(t, "filter")
				most := rapid.IntRange(1, 10).Draw(t, "n")
				due := m.due(filter)
				want := due[:min(most, len(due))]
				got, err := n.FetchWorkItems(ctx, most, &pgwake.FetchOptions{LockTimeout: 90 * time.Minute, NoWait: true, Namespaces: filter})
				if len(want) == 0 {
					requireError(t, err, pgwake.ErrNoWork)
					require.Nil(t, got)
					return
				}
				require.NoError(t, err)
				require.Len(t, got, len(want))
				for at, i := range want {
					require.Equal(t, i.name, got[at].Name, "place %d", at)
					i.attempt++
					i.visible, i.leased, i.token = m.clock+90*time.Minute, true, got[at].LockToken
					require.Equal(t, i.attempt, got[at].Attempt)
					require.NotContains(t, tokens, i.token)
					tokens = append(tokens, i.token)
				}
			},
			"ack": func(t *rapid.T) {
				tick()
				token := token(t)
				i := m.holder(token)
				if requireHeld(t, i, n.AckWorkItem(ctx, token, nil)) {
					m.remove(i)
				}
			},
			"abandon": func(t *rapid.T) {
				tick()
				token := token(t)
				o := &pgwake.AbandonOptions{
					Delay:         time.Duration(rapid.IntRange(0, 2).Draw(t, "hours")) * time.Hour,
					IgnoreAttempt: rapid.Bool().Draw(t, "ignore attempt"),
				}
				i := m.holder(token)
				if requireHeld(t, i, n.AbandonWorkItem(ctx, token, o)) {
					i.visible, i.leased = m.clock+o.Delay, false
					if o.IgnoreAttempt {
						i.attempt = max(i.attempt-1, 0)
					}
				}
			},
			"renew": func(t *rapid.T) {
				tick()
				token := token(t)
				extend := time.Duration(rapid.IntRange(1, 3).Draw(t, "hours")) * time.Hour
				i := m.holder(token)
				_, err := n.RenewWorkItemLock(ctx, token, extend)
				if requireHeld(t, i, err) {
					i.visible = m.clock + extend
				}
			},
			"travel": func(t *rapid.T) {
				d := time.Duration(rapid.IntRange(1, 4).Draw(t, "hours"))*time.Hour + 15*time.Minute
				n.travel(t, d)
				m.clock += d
			},
			"": func(t *rapid.T) {
				require.Equal(t, []int64{int64(len(m.items))}, query[int64](t, n, `SELECT count(*) FROM worker_queue`))
			},
		})
	})
}

// travelled is how far the clock was moved, without its ticks.
func (m *workModel) travelled() time.Duration { return m.clock.Truncate(time.Second) }

// Delay

func TestEnqueueForWorker_Delay_InvisibleUntilDue(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const delay = 200 * time.Millisecond
	plain := n.enqueueWith(t, "first", nil)
	added := n.enqueueWith(t, "later", &pgwake.EnqueueOptions{Delay: delay})
	require.GreaterOrEqual(t, added.DueAt.Sub(plain.DueAt), delay)
	require.Equal(t, "first", n.take(t).Name)

	item, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "later", item.Name)
	require.False(t, claimedAt(item.LockedUntil).Before(added.DueAt), "claimed %v before it was due", added.DueAt.Sub(claimedAt(item.LockedUntil)))
}

func TestEnqueueForWorker_AbsoluteTime_DueAtThatInstant(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	clock := func() time.Time { return query[time.Time](t, n, `SELECT clock_timestamp()`)[0] }
	n.enqueueWith(t, "in an hour", &pgwake.EnqueueOptions{At: clock().Add(time.Hour)})
	n.requireNoWork(t)
	at := clock().Add(250 * time.Millisecond)
	added := n.enqueueWith(t, "at", &pgwake.EnqueueOptions{At: at})
	require.True(t, added.DueAt.Equal(at))
	item, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "at", item.Name)
	require.False(t, claimedAt(item.LockedUntil).Before(at))
}

func TestEnqueueForWorker_AbsoluteTimeInThePast_DueAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, at := range []time.Time{time.Now().Add(-time.Hour), time.Unix(0, 0), time.Date(1, 1, 2, 0, 0, 0, 0, time.UTC)} {
		n.enqueueWith(t, at.UTC().String(), &pgwake.EnqueueOptions{At: at})
		require.Equal(t, at.UTC().String(), n.take(t).Name)
	}
}

// An instant centuries away does not fit into a time.Duration. Waiting for it must cost nothing, and must
// not hide what is due sooner.
func TestEnqueueForWorker_DueInTheYear9999_WaitersNeitherSpinNorMissOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	far := n.enqueueWith(t, "far", &pgwake.EnqueueOptions{At: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)})
	require.Equal(t, 9999, far.DueAt.UTC().Year())
	_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: 300 * time.Millisecond})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	require.Less(t, n.Stats().Worker.Looks, int64(20), "queries while nothing was due")

	near := n.enqueueWith(t, "near", &pgwake.EnqueueOptions{Delay: 100 * time.Millisecond})
	item, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, near.ID, item.ID)
}

// Dedup keys

func TestEnqueueForWorker_DedupKeyQueued_AddsNothingAndReturnsTheQueuedOne(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	keyed := &pgwake.EnqueueOptions{DedupKey: "k"}
	first := n.enqueueWith(t, "first", keyed)
	require.False(t, first.Duplicate)
	second := n.enqueueWith(t, "second", keyed)
	require.True(t, second.Duplicate)
	require.Equal(t, first.ID, second.ID)

	item := n.take(t)
	require.Equal(t, "first", item.Name)
	n.requireNoWork(t)
	third := n.enqueueWith(t, "third", keyed)
	require.True(t, third.Duplicate, "while the item is claimed")
	require.Equal(t, first.ID, third.ID)

	require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
	require.True(t, n.enqueueWith(t, "fourth", keyed).Duplicate, "after an abandon")

	require.NoError(t, n.AckWorkItem(t.Context(), n.take(t).LockToken, nil))
	require.False(t, n.enqueueWith(t, "fifth", keyed).Duplicate, "after the ack")
	require.Equal(t, []string{"fifth"}, n.takeAll(t))
}

func TestEnqueueForWorkerMany_SameDedupKeyTwiceInABatch_AddsTheFirst(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	key := pgwake.EnqueueOptions{DedupKey: "k"}
	added, err := n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{
		{WorkItem: pgwake.WorkItem{Name: "a"}, EnqueueOptions: key},
		{WorkItem: pgwake.WorkItem{Name: "plain"}},
		{WorkItem: pgwake.WorkItem{Name: "b"}, EnqueueOptions: key},
	})
	require.NoError(t, err)
	require.Equal(t, []bool{false, false, true}, []bool{added[0].Duplicate, added[1].Duplicate, added[2].Duplicate})
	require.Equal(t, added[0].ID, added[2].ID)
	require.Equal(t, []string{"a", "plain"}, n.takeAll(t))
}

func TestEnqueueForWorker_SameDedupKeyInAnotherNamespaceOrQueue_IsAnotherItem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	require.False(t, n.enqueueWith(t, "a", &pgwake.EnqueueOptions{DedupKey: "k"}).Duplicate)
	require.False(t, n.enqueueWith(t, "b", &pgwake.EnqueueOptions{DedupKey: "k", Namespace: "other"}).Duplicate)
	require.False(t, n.sendWith(t, pgwake.Message{Instance: "i", Kind: "ping"}, &pgwake.EnqueueOptions{DedupKey: "k"}).Duplicate)
	require.Equal(t, []string{"a", "b"}, n.takeAll(t))
}

func TestEnqueueForWorker_SameDedupKeyConcurrently_ExactlyOneRowAndAllAgreeOnIt(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.another(t)
	for round := range 10 {
		key := &pgwake.EnqueueOptions{DedupKey: fmt.Sprint(round)}
		added := make([]pgwake.Enqueued, 8)
		errs := make([]error, len(added))
		var wg sync.WaitGroup
		for i := range added {
			wg.Go(func() {
				p := []*node{n, other}[i%2]
				added[i], errs[i] = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "once"}, key)
			})
		}
		wg.Wait()
		fresh := 0
		row := query[int64](t, n, `SELECT id FROM worker_queue WHERE dedup_key = $1`, key.DedupKey)
		require.Len(t, row, 1)
		for i, a := range added {
			require.NoError(t, errs[i])
			require.Equal(t, row[0], a.ID, "the id of the queued item")
			if !a.Duplicate {
				fresh++
			}
		}
		require.Equal(t, 1, fresh)
	}
}

// The one that loses the race waits for the winner's commit, and must then name the winner's item.
func TestEnqueueForWorker_DedupKeyInAnUncommittedTransaction_ReturnsTheItemThatCommitted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	key := &pgwake.EnqueueOptions{DedupKey: "k"}
	for _, commit := range []bool{true, false} {
		tx := n.begin(t)
		winner, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "winner"}, key)
		require.NoError(t, err)
		type outcome struct {
			pgwake.Enqueued
			error
		}
		loser := make(chan outcome, 1)
		go func() {
			added, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "loser"}, key)
			loser <- outcome{added, err}
		}()
		n.awaitBlocked(t, 1)
		if commit {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
		o := <-loser
		require.NoError(t, o.error)
		require.Equal(t, commit, o.Duplicate)
		item := n.take(t)
		require.Equal(t, item.ID, o.ID, "the id of the queued item")
		require.Equal(t, commit, o.ID == winner.ID)
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	}
}

// Several at once

func TestEnqueueForWorkerMany_Empty_DoesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	added, err := n.EnqueueForWorkerMany(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, added)
}

func TestEnqueueForWorkerMany_OneIsRefused_NoneIsAdded(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "worker_queue", "name = 'poison'")
	before := n.content(t)
	for name, want := range map[string]string{"": "element 2", "poison": ""} {
		batch := []pgwake.WorkEnqueue{{}, {}, {}, {}}
		for i := range batch {
			batch[i].Name, batch[i].Namespace = "good", "fresh"
		}
		batch[2].Name = name
		_, err := n.EnqueueForWorkerMany(t.Context(), batch)
		requireError(t, err, pgwake.ErrInvalid)
		require.ErrorContains(t, err, want)
		require.Equal(t, before, n.content(t))
	}
}

func TestEnqueueForWorkerMany_ThousandItems_OutcomesAreInTheOrderOfTheItems(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	batch := make([]pgwake.WorkEnqueue, 1000)
	want := make([]string, len(batch))
	for i := range batch {
		batch[i].Name = strconv.Itoa(i)
		want[i] = batch[i].Name
	}
	added, err := n.EnqueueForWorkerMany(t.Context(), batch)
	require.NoError(t, err)
	require.True(t, slices.IsSortedFunc(added, func(a, b pgwake.Enqueued) int { return cmp.Compare(a.ID, b.ID) }))
	items, err := n.FetchWorkItems(t.Context(), len(batch), now)
	require.NoError(t, err)
	require.Equal(t, want, namesOf(items))
	for i, item := range items {
		require.Equal(t, added[i].ID, item.ID)
	}
}

// What is kept

func TestFetchWorkItem_EverythingEnqueued_ComesBack(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	item := pgwake.WorkItem{
		Name: "email.send ✉", Input: json.RawMessage(`{"b":1, "a": 1e400 ,"a":"\u00e9\ud83d\ude00 \\u0000"}`),
		Instance: "order-7", ExecutionID: 3, ActivityID: 11,
	}
	added, err := n.EnqueueForWorker(t.Context(), item, &pgwake.EnqueueOptions{Namespace: "mail-1_x", Priority: 7})
	require.NoError(t, err)
	got := n.take(t)
	require.Equal(t, item, got.WorkItem)
	require.Equal(t, added.ID, got.ID)
	require.Equal(t, "mail-1_x", got.Namespace)
	require.Equal(t, 7, got.Priority)
	require.Equal(t, 1, got.Attempt)
	require.Equal(t, added.DueAt, got.EnqueuedAt)

	n.enqueue(t, "bare")
	require.Equal(t, pgwake.WorkItem{Name: "bare"}, n.take(t).WorkItem)
}

// Claims

func TestFetchWorkItems_NothingDue_IsErrNoWorkAndNeverAnEmptySlice(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueueWith(t, "later", &pgwake.EnqueueOptions{Delay: time.Hour})
	for _, o := range []*pgwake.FetchOptions{now, {PollTimeout: time.Millisecond}} {
		items, err := n.FetchWorkItems(t.Context(), 3, o)
		requireError(t, err, pgwake.ErrNoWork)
		require.Nil(t, items)
	}
}

func TestFetchWorkItems_MoreDueThanAsked_ReturnsAsManyAsAsked(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "1", "2", "3", "4", "5")
	for _, want := range [][]string{{"1", "2"}, {"3", "4"}, {"5"}} {
		items, err := n.FetchWorkItems(t.Context(), 2, now)
		require.NoError(t, err)
		require.Equal(t, want, namesOf(items))
	}
	n.requireNoWork(t)
}

func TestFetchWorkItems_Batch_TokensAreDistinctAndIndependent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "1", "2", "3")
	items, err := n.FetchWorkItems(t.Context(), 3, now)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItem(t.Context(), items[1].LockToken, nil))
	require.NoError(t, n.AbandonWorkItem(t.Context(), items[0].LockToken, nil))
	require.Equal(t, "1", n.take(t).Name)
	require.NoError(t, n.AckWorkItem(t.Context(), items[2].LockToken, nil))
}

func TestFetchWorkItem_Claimed_StaysQueuedAndUnseenUntilTheAck(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	n.requireNoWork(t)
	require.Len(t, n.content(t)["worker_queue"], 1, "peek-lock: the row stays")
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	require.Empty(t, n.content(t)["worker_queue"])
	n.travel(t, 2*lease)
	n.requireNoWork(t)
}

func TestFetchWorkItems_ManyFetchersOnTwoNodes_NoItemIsSharedOrMissed(t *testing.T) {
	t.Parallel()
	a := newNode(t, nil)
	b := a.another(t)
	const count = 300
	batch := make([]pgwake.WorkEnqueue, count)
	for i := range batch {
		batch[i] = pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{
			Namespace: []string{"a", "b"}[i%2], Priority: i % 3}}
	}
	added, err := a.EnqueueForWorkerMany(t.Context(), batch)
	require.NoError(t, err)

	var mu sync.Mutex
	var wg sync.WaitGroup
	claims := make(map[int64]int)
	for f := range 12 {
		wg.Go(func() {
			p := []*node{a, b}[f%2]
			o := &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: [][]string{nil, {"a"}, {"a", "b"}}[f%3]}
			for {
				items, err := p.FetchWorkItems(t.Context(), 1+f%7, o)
				if errors.Is(err, pgwake.ErrNoWork) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, item := range items {
					claims[item.ID]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	// Who looked while another had the last ones locked may have gone too early.
	for {
		items, err := a.FetchWorkItems(t.Context(), count, now)
		if errors.Is(err, pgwake.ErrNoWork) {
			break
		}
		require.NoError(t, err)
		for _, item := range items {
			claims[item.ID]++
		}
	}
	require.Len(t, claims, count)
	for _, e := range added {
		require.Equal(t, 1, claims[e.ID], "claims of item %d", e.ID)
	}
}

// The two claims see nothing of each other.
func TestFetchWorkItems_PlainItemBeforeThoseOfASession_SessionStaysWithOneOwner(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "plain")
	for range 2 {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "of the session", Session: "s"}, nil)
		require.NoError(t, err)
	}
	tx := n.begin(t)
	tag, err := tx.Exec(t.Context(), `SELECT fetch_work(gen_random_uuid(), '1 h', 2, p_owner => 'A')`)
	require.NoError(t, err)
	require.EqualValues(t, 3, tag.RowsAffected(), "the plain item, one of the session, and the outlook")
	_, err = n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: "B"}})
	require.ErrorIs(t, err, pgwake.ErrNoWork)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"A"}, query[string](t, n, `SELECT owner FROM sessions`))
}

func TestFetchWorkItem_LockExpires_RedeliversAtExpiry(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	first, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: 150 * time.Millisecond, NoWait: true})
	require.NoError(t, err)
	require.Equal(t, 1, first.Attempt)

	second, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, first.ID, second.ID)
	require.Equal(t, 2, second.Attempt)
	require.NotEqual(t, first.LockToken, second.LockToken)
	require.False(t, claimedAt(second.LockedUntil).Before(first.LockedUntil), "redelivered before the lease ended")

	requireError(t, n.AckWorkItem(t.Context(), first.LockToken, nil), pgwake.ErrLockLost)
	require.NoError(t, n.AckWorkItem(t.Context(), second.LockToken, nil))
}

func TestFetchWorkItem_NoLockTimeoutGiven_LeaseIsTheDefault(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	added := n.enqueueWith(t, "a", nil)
	item, err := n.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	require.GreaterOrEqual(t, item.LockedUntil.Sub(added.DueAt), pgwake.DefaultLockTimeout)
	require.Less(t, item.LockedUntil.Sub(added.DueAt), pgwake.DefaultLockTimeout+patience)
}

// Ack

func TestAckWorkItem_Twice_SecondIsLockLost(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	requireError(t, n.AckWorkItem(t.Context(), item.LockToken, nil), pgwake.ErrLockLost)
}

func TestAckWorkItem_SameTokenConcurrently_OneSucceedsAndOneCompletionIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	errs := make([]error, 6)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			errs[i] = n.AckWorkItem(t.Context(), item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
		})
	}
	wg.Wait()
	succeeded := 0
	for _, err := range errs {
		if err == nil {
			succeeded++
			continue
		}
		requireError(t, err, pgwake.ErrLockLost)
	}
	require.Equal(t, 1, succeeded)
	require.Len(t, n.takeTurn(t).Messages, 1)
}

func TestAckWorkItem_WithCompletion_SendsItAndRemovesTheItem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	m := pgwake.Message{Instance: "order-7", Kind: "activity.completed", Data: json.RawMessage(`{"ok":true}`)}
	require.NoError(t, n.AckWorkItem(t.Context(), n.take(t).LockToken, &m))
	require.Empty(t, n.content(t)["worker_queue"])
	turn := n.takeTurn(t)
	require.Len(t, turn.Messages, 1)
	require.Equal(t, m, turn.Messages[0].Message)
}

func TestAckWorkItem_CompletionIsRefused_ItemStaysClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "orchestrator_queue", "kind = 'poison'")
	n.enqueue(t, "a")
	item := n.take(t)
	before := n.content(t)
	for _, m := range []pgwake.Message{{Instance: "i", Kind: "poison"}, {Instance: "i"}, {Kind: "k"}, {Instance: "i", Kind: "k", Data: []byte("{")}} {
		requireError(t, n.AckWorkItem(t.Context(), item.LockToken, &m), pgwake.ErrInvalid)
		require.Equal(t, before, n.content(t))
	}
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, &pgwake.Message{Instance: "i", Kind: "fine"}))
}

func TestAckWorkItem_CompletionOfKnownInstance_KeepsTheInstanceNamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "orders"})
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}})
	n.enqueue(t, "a")
	require.NoError(t, n.AckWorkItem(t.Context(), n.take(t).LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
	turn, err := n.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{NoWait: true, Namespaces: []string{"orders"}})
	require.NoError(t, err)
	require.Equal(t, "orders", turn.Namespace)
}

func TestAckWorkItems_SomeLocksLost_OthersAreAckedAndTheLostOnesListed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c", "d")
	items, err := n.FetchWorkItems(t.Context(), 4, now)
	require.NoError(t, err)
	require.NoError(t, n.AbandonWorkItem(t.Context(), items[1].LockToken, nil))
	require.NoError(t, n.AckWorkItem(t.Context(), items[3].LockToken, nil))

	err = n.AckWorkItems(t.Context(), tokensOf(items))
	requireError(t, err, pgwake.ErrLockLost)
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, []pgwake.LockToken{items[1].LockToken, items[3].LockToken}, lost.Tokens)
	require.Equal(t, []string{"b"}, n.takeAll(t))
	require.Len(t, n.content(t)["worker_queue"], 1)
}

func TestAckWorkItems_AllHeld_RemovesThem(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c")
	items, err := n.FetchWorkItems(t.Context(), 3, now)
	require.NoError(t, err)
	require.NoError(t, n.AckWorkItems(t.Context(), tokensOf(items)))
	require.Empty(t, n.content(t)["worker_queue"])
	require.NoError(t, n.AckWorkItems(t.Context(), nil))
}

func TestAckWorkItems_GarbageAmongGoodTokens_IsOneMoreLostLock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	const garbage = pgwake.LockToken("garbage")
	err := n.AckWorkItems(t.Context(), []pgwake.LockToken{garbage, item.LockToken})
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, []pgwake.LockToken{garbage}, lost.Tokens)
	require.Empty(t, n.content(t)["worker_queue"], "the good one is acked")
}

func TestFetchWorkItem_AcknowledgesAndWaits_AcknowledgesOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	done := n.take(t)
	type outcome struct {
		item *pgwake.ClaimedWorkItem
		err  error
	}
	got := make(chan outcome, 1)
	go func() {
		item, err := n.FetchWorkItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Ack: []pgwake.LockToken{done.LockToken}})
		got <- outcome{item, err}
	}()
	require.Eventually(t, func() bool { return n.Stats().Worker.Parked == 1 }, patience, 10*time.Millisecond)
	require.Empty(t, n.content(t)["worker_queue"])
	n.enqueue(t, "b")
	o := <-got
	require.NoError(t, o.err)
	require.Equal(t, "b", o.item.Name)
}

func TestFetchWorkItem_GarbageAmongTokensToAck_IsOneMoreLostLock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "lost", "due")
	item, lost := n.take(t), n.take(t)
	require.NoError(t, n.AckWorkItem(t.Context(), lost.LockToken, nil))
	const garbage = pgwake.LockToken("garbage")
	options := &pgwake.FetchOptions{NoWait: true, Ack: []pgwake.LockToken{garbage, item.LockToken, lost.LockToken}}
	_, err := n.FetchWorkItems(t.Context(), 0, options)
	requireError(t, err, pgwake.ErrInvalid)
	_, err = n.FetchWorkItem(t.Context(), options)
	requireError(t, err, pgwake.ErrLockLost)
	var lostLocks *pgwake.LostLocksError
	require.ErrorAs(t, err, &lostLocks)
	require.ElementsMatch(t, []pgwake.LockToken{garbage, lost.LockToken}, lostLocks.Tokens)
	require.Equal(t, []string{"due 0"}, query[string](t, n, `SELECT name || ' ' || attempt_count FROM worker_queue`),
		"the good one is acked, and nothing is claimed")
}

// The database answered: there is no reason to poll.
func TestFetchWorkItem_LeaseToAckHasEnded_IsNoTrouble(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	lost := n.take(t)
	require.NoError(t, n.AckWorkItem(t.Context(), lost.LockToken, nil))
	_, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{PollTimeout: patience, Ack: []pgwake.LockToken{lost.LockToken}})
	requireError(t, err, pgwake.ErrLockLost)
	require.False(t, n.Stats().Worker.Aggressive)
}

// A dispatcher that got an item again, because its first lease ran out, may still have the old token.
func TestAckWorkItems_OldAndNewTokenOfOneItem_OnlyTheOldOneIsLost(t *testing.T) {
	t.Parallel()
	for _, newFirst := range []bool{true, false} {
		n := newNode(t, nil)
		n.enqueue(t, "a")
		old := n.take(t).LockToken
		n.travel(t, 2*lease)
		current := n.take(t).LockToken
		tokens := []pgwake.LockToken{old, current}
		if newFirst {
			slices.Reverse(tokens)
		}

		until, err := n.RenewWorkItemLocks(t.Context(), tokens, lease)
		var lost *pgwake.LostLocksError
		require.ErrorAs(t, err, &lost)
		require.Equal(t, []pgwake.LockToken{old}, lost.Tokens, "renew")
		require.Contains(t, until, current)
		require.NotContains(t, until, old)

		require.ErrorAs(t, n.AckWorkItems(t.Context(), tokens), &lost)
		require.Equal(t, []pgwake.LockToken{old}, lost.Tokens, "ack")
		require.Empty(t, n.content(t)["worker_queue"])
	}
}

func TestAckWorkItems_SameTokenTwice_CountsOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	token := n.take(t).LockToken
	require.NoError(t, n.AckWorkItems(t.Context(), []pgwake.LockToken{token, token}))
	require.Empty(t, n.content(t)["worker_queue"])
}

func tokensOf(items []*pgwake.ClaimedWorkItem) []pgwake.LockToken {
	tokens := make([]pgwake.LockToken, len(items))
	for i, item := range items {
		tokens[i] = item.LockToken
	}
	return tokens
}

// Abandon

func TestAbandonWorkItem_NoDelay_DueAtOnceUnderANewToken(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	first := n.take(t)
	require.NoError(t, n.AbandonWorkItem(t.Context(), first.LockToken, nil))
	second := n.take(t)
	require.Equal(t, first.ID, second.ID)
	require.NotEqual(t, first.LockToken, second.LockToken)
	require.Equal(t, 2, second.Attempt)
}

func TestAbandonWorkItem_Delay_InvisibleUntilThenAndOthersAreServed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b")
	first := n.take(t)
	before := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	const delay = 200 * time.Millisecond
	require.NoError(t, n.AbandonWorkItem(t.Context(), first.LockToken, &pgwake.AbandonOptions{Delay: delay}))
	require.Equal(t, "b", n.take(t).Name)
	again, err := n.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	require.Equal(t, "a", again.Name)
	require.GreaterOrEqual(t, claimedAt(again.LockedUntil).Sub(before), delay)
}

func TestAbandonWorkItem_GivenBack_TakesItsPlaceByTheNewDueTime(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b")
	require.NoError(t, n.AbandonWorkItem(t.Context(), n.take(t).LockToken, nil))
	n.enqueue(t, "c")
	require.Equal(t, []string{"b", "a", "c"}, n.takeAll(t))
}

func TestAbandonWorkItem_IgnoreAttempt_UndoesTheCountButNeverBelowZero(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	ignore := &pgwake.AbandonOptions{IgnoreAttempt: true}
	for range 3 {
		item := n.take(t)
		require.Equal(t, 1, item.Attempt)
		require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, ignore))
	}
	require.NoError(t, n.AbandonWorkItem(t.Context(), n.take(t).LockToken, nil))
	second := n.take(t)
	require.Equal(t, 2, second.Attempt)
	require.NoError(t, n.AbandonWorkItem(t.Context(), second.LockToken, ignore))
	require.Equal(t, 2, n.take(t).Attempt)

	n.exec(t, `UPDATE worker_queue SET attempt_count = 0`) // as an older version may have left it
	n.travel(t, 2*lease)
	item := n.take(t)
	n.exec(t, `UPDATE worker_queue SET attempt_count = 0`)
	require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, ignore))
	require.Equal(t, 1, n.take(t).Attempt)
}

// Renew

func TestRenewWorkItemLock_Renewed_HoldsPastTheOriginalTimeout(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: time.Minute, NoWait: true})
	require.NoError(t, err)
	n.travel(t, 36*time.Second)
	until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, time.Minute)
	require.NoError(t, err)
	n.travel(t, 36*time.Second)
	n.requireNoWork(t)
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil), "72 s into a lease of 60 s")
	require.GreaterOrEqual(t, until.Sub(item.LockedUntil), time.Duration(0))
}

// A heartbeat may well be shorter than the first lease. If its sender dies, the item is due at the end of
// the heartbeat, and whoever waits must look then.
func TestRenewWorkItemLock_ShorterThanWhatIsLeft_EndsTheLeaseSooner(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, 100*time.Millisecond)
	require.NoError(t, err)
	again, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 5 * time.Second})
	require.NoError(t, err, "the lease ended, and the fetch that waits does not know")
	require.False(t, claimedAt(again.LockedUntil).Before(until))
}

func TestRenewWorkItemLocks_SomeLost_OthersAreRenewedAndTheLostOnesListed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c")
	items, err := n.FetchWorkItems(t.Context(), 3, &pgwake.FetchOptions{LockTimeout: time.Minute, NoWait: true})
	require.NoError(t, err)
	tokens := tokensOf(items)
	require.NoError(t, n.AckWorkItem(t.Context(), tokens[1], nil))
	until, err := n.RenewWorkItemLocks(t.Context(), tokens, lease)
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, tokens[1:2], lost.Tokens)
	require.Len(t, until, 2)
	require.Equal(t, until[tokens[0]], until[tokens[2]])
	require.GreaterOrEqual(t, until[tokens[0]].Sub(items[0].LockedUntil), lease-time.Minute)
	n.travel(t, 2*time.Minute)
	n.requireNoWork(t)
}

func TestRenewWorkItemLock_NoExtendGiven_IsTheDefault(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	item := n.take(t)
	until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, 0)
	require.NoError(t, err)
	require.GreaterOrEqual(t, until.Sub(claimedAt(item.LockedUntil)), pgwake.DefaultLockTimeout)
	require.Less(t, until.Sub(claimedAt(item.LockedUntil)), pgwake.DefaultLockTimeout+patience)
}

// Attempts

func TestFetchWorkItem_RefetchedAfterExpiry_EachItemCountsItsOwnAttempts(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	for attempt := 1; attempt <= 3; attempt++ {
		require.Equal(t, attempt, n.take(t).Attempt)
		n.travel(t, 2*lease)
	}
	n.enqueue(t, "b")
	items, err := n.FetchWorkItems(t.Context(), 2, now)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, namesOf(items))
	require.Equal(t, []int{4, 1}, []int{items[0].Attempt, items[1].Attempt})
}

// Tokens that prove nothing

func TestWorkVerbs_StaleToken_LockLostAndNothingWritten(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	stale := map[string]func(t *testing.T) pgwake.LockToken{
		"acked": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "acked")
			token := n.take(t).LockToken
			require.NoError(t, n.AckWorkItem(ctx, token, nil))
			return token
		},
		"abandoned": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "abandoned")
			token := n.take(t).LockToken
			require.NoError(t, n.AbandonWorkItem(ctx, token, nil))
			return token
		},
		"abandoned with delay": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "abandoned")
			token := n.take(t).LockToken
			require.NoError(t, n.AbandonWorkItem(ctx, token, &pgwake.AbandonOptions{Delay: time.Hour}))
			return token
		},
		"expired, nobody retook it": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "expired")
			token := n.take(t).LockToken
			n.travel(t, 2*lease)
			return token
		},
		"expired and retaken": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "retaken")
			token := n.take(t).LockToken
			n.travel(t, 2*lease)
			n.take(t)
			return token
		},
		"item deleted": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "deleted")
			token := n.take(t).LockToken
			n.exec(t, `DELETE FROM worker_queue`)
			return token
		},
		"of a turn": func(t *testing.T) pgwake.LockToken {
			n.enqueue(t, "claimed")
			n.take(t)
			id := query[string](t, n, `SELECT id::text FROM worker_queue`)[0]
			n.send(t, id, "ping") // an instance whose id is that of an item
			return n.takeTurn(t).LockToken
		},
		"empty":                func(*testing.T) pgwake.LockToken { return "" },
		"garbage":              func(*testing.T) pgwake.LockToken { return "garbage" },
		"no subject":           func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/" },
		"subject out of range": func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/99999999999999999999" },
		"unknown":              func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/1" },
		"injection": func(*testing.T) pgwake.LockToken {
			return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/1; DROP TABLE worker_queue"
		},
		"NUL": func(*testing.T) pgwake.LockToken { return "8c0fbd0e-2f8f-4a0f-9a0b-0d8f6e7c1a11/1\x00" },
	}
	verbs := map[string]func(pgwake.LockToken) error{
		"ack": func(token pgwake.LockToken) error { return n.AckWorkItem(ctx, token, nil) },
		"ack with completion": func(token pgwake.LockToken) error {
			return n.AckWorkItem(ctx, token, &pgwake.Message{Instance: "i", Kind: "k"})
		},
		"ack batch": func(token pgwake.LockToken) error { return n.AckWorkItems(ctx, []pgwake.LockToken{token}) },
		"abandon":   func(token pgwake.LockToken) error { return n.AbandonWorkItem(ctx, token, nil) },
		"abandon with delay": func(token pgwake.LockToken) error {
			return n.AbandonWorkItem(ctx, token, &pgwake.AbandonOptions{Delay: time.Minute, IgnoreAttempt: true})
		},
		"renew": func(token pgwake.LockToken) error {
			until, err := n.RenewWorkItemLock(ctx, token, lease)
			require.Zero(t, until)
			return err
		},
		"renew batch": func(token pgwake.LockToken) error {
			until, err := n.RenewWorkItemLocks(ctx, []pgwake.LockToken{token}, lease)
			require.Empty(t, until)
			return err
		},
	}
	for how, token := range stale {
		t.Run(how, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks RESTART IDENTITY`)
			old := token(t)
			before := n.content(t)
			for verb, do := range verbs {
				requireError(t, do(old), pgwake.ErrLockLost)
				require.Equal(t, before, n.content(t), verb)
			}
		})
	}
}

// Transactions of the caller

func TestWorkTx_Committed_TakesEffectAtTheCommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for name, c := range workTxCases(ctx, n) {
		t.Run(name, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
			c.given(t)
			before := n.content(t)
			tx := n.begin(t)
			require.NoError(t, c.verb(tx))
			require.Equal(t, before, n.content(t), "seen before the commit")
			require.NoError(t, tx.Commit(ctx))
			c.then(t)
		})
	}
}

func TestWorkTx_RolledBack_NeverHappened(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for name, c := range workTxCases(ctx, n) {
		t.Run(name, func(t *testing.T) {
			n.exec(t, `TRUNCATE worker_queue, orchestrator_queue, instance_locks`)
			c.given(t)
			before := n.content(t)
			tx := n.begin(t)
			require.NoError(t, c.verb(tx))
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, before, n.content(t))
		})
	}
}

type txCase struct {
	given func(t *testing.T)
	verb  func(tx pgx.Tx) error
	then  func(t *testing.T)
}

func workTxCases(ctx context.Context, n *node) map[string]txCase {
	var claimed *pgwake.ClaimedWorkItem
	nothing := func(*testing.T) {}
	oneClaimed := func(t *testing.T) {
		n.enqueue(t, "a")
		claimed = n.take(t)
	}
	gone := func(t *testing.T) { require.Empty(t, n.content(t)["worker_queue"]) }
	return map[string]txCase{
		"enqueue": {nothing, func(tx pgx.Tx) error {
			_, err := n.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "a"}, &pgwake.EnqueueOptions{Namespace: "tx"})
			return err
		}, func(t *testing.T) {
			require.Equal(t, []string{"a"}, n.takeAll(t, "tx"))
			n.exec(t, `DELETE FROM namespaces WHERE name = 'tx'`)
		}},
		"enqueue many": {nothing, func(tx pgx.Tx) error {
			_, err := n.EnqueueForWorkerManyTx(ctx, tx, []pgwake.WorkEnqueue{
				{WorkItem: pgwake.WorkItem{Name: "a"}}, {WorkItem: pgwake.WorkItem{Name: "b"}}})
			return err
		}, func(t *testing.T) { require.Equal(t, []string{"a", "b"}, n.takeAll(t)) }},
		"ack": {oneClaimed, func(tx pgx.Tx) error {
			return n.AckWorkItemTx(ctx, tx, claimed.LockToken, &pgwake.Message{Instance: "i", Kind: "done"})
		}, func(t *testing.T) {
			gone(t)
			require.Equal(t, []pgwake.MessageKind{"done"}, kindsOf(n.takeTurn(t)))
		}},
		"ack several": {oneClaimed, func(tx pgx.Tx) error {
			return n.AckWorkItemsTx(ctx, tx, []pgwake.LockToken{claimed.LockToken})
		}, gone},
		"abandon": {oneClaimed, func(tx pgx.Tx) error {
			return n.AbandonWorkItemTx(ctx, tx, claimed.LockToken, nil)
		}, func(t *testing.T) { require.Equal(t, 2, n.take(t).Attempt) }},
		"renew": {oneClaimed, func(tx pgx.Tx) error {
			_, err := n.RenewWorkItemLocksTx(ctx, tx, []pgwake.LockToken{claimed.LockToken}, 3*lease)
			return err
		}, func(t *testing.T) {
			n.travel(t, 2*lease)
			n.requireNoWork(t)
		}},
	}
}

func TestAckWorkItemTx_LockLost_TransactionIsAborted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx := t.Context()
	for name, verb := range map[string]func(pgx.Tx, pgwake.LockToken) error{
		"ack":     func(tx pgx.Tx, token pgwake.LockToken) error { return n.AckWorkItemTx(ctx, tx, token, nil) },
		"abandon": func(tx pgx.Tx, token pgwake.LockToken) error { return n.AbandonWorkItemTx(ctx, tx, token, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			n.enqueue(t, "a")
			token := n.take(t).LockToken
			require.NoError(t, n.AckWorkItem(ctx, token, nil))
			tx := n.begin(t)
			_, err := n.EnqueueForWorkerTx(ctx, tx, pgwake.WorkItem{Name: "never"}, nil)
			require.NoError(t, err)
			requireError(t, verb(tx, token), pgwake.ErrLockLost)
			require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxCommitRollback)
			n.requireNoWork(t)
		})
	}
}

func TestEnqueueForWorkerTx_RefusedByADatabaseRule_TransactionIsAborted(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "worker_queue", "name = 'poison'")
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "poison"}, nil)
	requireError(t, err, pgwake.ErrInvalid)
	require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
}

func TestEnqueueForWorkerTx_Savepoint_RolledBackToItLeavesTheRest(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "kept"}, nil)
	require.NoError(t, err)
	inner, err := tx.Begin(t.Context())
	require.NoError(t, err)
	_, err = n.EnqueueForWorkerTx(t.Context(), inner, pgwake.WorkItem{Name: "dropped"}, nil)
	require.NoError(t, err)
	require.NoError(t, inner.Rollback(t.Context()))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"kept"}, n.takeAll(t))
}

// An ack that shares the transaction of a handler's own writes: both or neither.
func TestAckWorkItemTx_WithTheHandlersOwnWrites_BothOrNeither(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `CREATE TABLE ledger (item bigint PRIMARY KEY)`)
	n.enqueue(t, "pay")
	for attempt := 1; attempt <= 2; attempt++ {
		item := n.take(t)
		tx := n.begin(t)
		_, err := tx.Exec(t.Context(), `INSERT INTO ledger VALUES ($1)`, item.ID)
		require.NoError(t, err)
		require.NoError(t, n.AckWorkItemTx(t.Context(), tx, item.LockToken, nil))
		if attempt == 1 { // the process dies before the commit
			require.NoError(t, tx.Rollback(t.Context()))
			n.travel(t, 2*lease)
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
	}
	require.Len(t, query[int64](t, n, `SELECT item FROM ledger`), 1)
	n.requireNoWork(t)
}

// Namespaces

func TestFetchWorkItem_NamespaceFilter_SeesOnlyThose(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, namespace := range []string{"", "a", "b", "a-b"} {
		n.enqueueWith(t, cmp.Or(namespace, "none"), &pgwake.EnqueueOptions{Namespace: namespace})
	}
	require.Equal(t, []string{"a"}, n.takeAll(t, "a"))
	require.Empty(t, n.takeAll(t, "a"))
	require.Empty(t, n.takeAll(t, "unknown"))
	require.Equal(t, []string{"b", "a-b"}, n.takeAll(t, "b", "a-b", "b"))
	require.Equal(t, []string{"none"}, n.takeAll(t, pgwake.DefaultNamespace))
}

func TestEnqueueForWorker_NewNamespace_IsRegisteredInTheSameTransaction(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	registry := func() []string { return query[string](t, n, `SELECT name FROM namespaces ORDER BY name`) }
	require.Equal(t, []string{"default"}, registry())

	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: "rolled-back"})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, []string{"default"}, registry())

	n.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "billing"})
	n.enqueueWith(t, "x", &pgwake.EnqueueOptions{Namespace: "billing"})
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "orders"})
	require.Equal(t, []string{"billing", "default", "orders"}, registry())
}

func TestEnqueueForWorker_NewNamespaceConcurrently_AllSucceed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			_, err := n.EnqueueForWorkerMany(t.Context(), []pgwake.WorkEnqueue{
				{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: fmt.Sprintf("n%d", i%5)}},
				{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: fmt.Sprintf("n%d", (i+2)%5)}},
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Len(t, query[string](t, n, `SELECT DISTINCT name FROM namespaces`), 6)
	require.Len(t, n.takeAll(t), 48)
}

func TestNamespaces_BadNamesPastGo_AreRefusedByTheTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	before := n.content(t)
	for _, name := range badNamespaces {
		for _, sql := range []string{
			`INSERT INTO namespaces (name) VALUES ($1)`,
			`INSERT INTO worker_queue (name, namespace) VALUES ('x', $1)`,
			`INSERT INTO orchestrator_queue (instance_id, kind, namespace) VALUES ('x', 'k', $1)`,
			`INSERT INTO instances (instance_id, name, namespace) VALUES ('x', 'x', $1)`,
			`SELECT enqueue_work('x', p_namespace => $1)`,
			`SELECT enqueue_message('x', 'k', p_namespace => $1)`,
		} {
			tx := n.begin(t)
			_, err := tx.Exec(t.Context(), sql, name)
			require.ErrorContains(t, err, "namespace", "%q: %s", name, sql)
			require.NoError(t, tx.Rollback(t.Context()))
		}
	}
	require.Equal(t, before, n.content(t))
}

// badNamespaces break ^[a-z][a-z0-9_-]{0,39}$ in one way each. None has a NUL, which no parameter can carry.
var badNamespaces = []string{
	" ", "A", "aB", "1a", "-a", "_a", "a b", "a.b", "a\n", "\na", "a/b", "é", "aé", "a'", `a"`, "a,b", "*",
	"aaaaaaaaaabbbbbbbbbbccccccccccdddddddddde", // 41
}

// A heartbeat renews a batch while another goroutine acknowledges it, or a second heartbeat overlaps the
// first: whoever comes later waits for the other, and neither is made to fail.
func TestWorkItems_BatchesOverlapInOppositeOrder_NoDeadlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for round := range 8 {
		batch := make([]pgwake.WorkEnqueue, 200)
		for i := range batch {
			batch[i].Name = "x"
		}
		_, err := n.EnqueueForWorkerMany(t.Context(), batch)
		require.NoError(t, err)
		items, err := n.FetchWorkItems(t.Context(), len(batch), now)
		require.NoError(t, err)
		tokens := tokensOf(items)
		backwards := slices.Clone(tokens)
		slices.Reverse(backwards)
		errs := make([]error, 4)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				order := [][]pgwake.LockToken{tokens, backwards}[i%2]
				if i == 3 {
					errs[i] = n.AckWorkItems(t.Context(), order)
					return
				}
				_, errs[i] = n.RenewWorkItemLocks(t.Context(), order, lease)
			})
		}
		wg.Wait()
		for i, err := range errs {
			if i != 3 && errors.Is(err, pgwake.ErrLockLost) { // the ack was first
				continue
			}
			require.NoError(t, err, "round %d", round)
		}
		require.NotContains(t, n.rows(t), "worker_queue")
	}
}

func TestEnqueueForWorkerMany_SameDedupKeysInOppositeOrder_NoDeadlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const keys = 100
	for round := range 8 {
		forward := make([]pgwake.WorkEnqueue, keys)
		for i := range forward {
			forward[i].Name, forward[i].DedupKey = "x", fmt.Sprint(round, " ", i)
		}
		backwards := slices.Clone(forward)
		slices.Reverse(backwards)
		var fresh [4]int
		var errs [4]error
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				var added []pgwake.Enqueued
				added, errs[i] = n.EnqueueForWorkerMany(t.Context(), [][]pgwake.WorkEnqueue{forward, backwards}[i%2])
				for _, a := range added {
					if !a.Duplicate {
						fresh[i]++
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs[:]...), "round %d", round)
		require.Equal(t, keys, fresh[0]+fresh[1]+fresh[2]+fresh[3])
		require.Equal(t, (round+1)*keys, n.rows(t)["worker_queue"])
	}
}

// Also where one says that a namespace is the default one and the other says nothing. Each of them has to wait before it comes to the keys of
// the second namespace.
func TestEnqueueForWorkerMany_DefaultNamespaceNamedOrNot_NoDeadlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	between := n.begin(t)
	for _, namespace := range []string{pgwake.DefaultNamespace, "orders"} {
		_, err := n.EnqueueForWorkerTx(t.Context(), between, pgwake.WorkItem{Name: "x"}, &pgwake.EnqueueOptions{Namespace: namespace, DedupKey: "z"})
		require.NoError(t, err)
	}
	errs := make(chan error, 2)
	go func() {
		_, err := n.EnqueueForWorkerMany(tctx, []pgwake.WorkEnqueue{
			{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "a"}},
			{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{DedupKey: "z"}},
			{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "orders", DedupKey: "a"}},
			{WorkItem: pgwake.WorkItem{Name: "x"}, EnqueueOptions: pgwake.EnqueueOptions{Namespace: "orders", DedupKey: "z"}},
		})
		errs <- err
	}()
	other := n.begin(t)
	go func() {
		_, err := other.Exec(tctx, `SELECT `+n.quoted()+`.enqueue_work_many(array_fill('x'::text, '{4}'), array_fill('1'::text, '{4}'), '{default,default,orders,orders}', p_dedup_keys => '{a,z,a,z}')`)
		errs <- errors.Join(err, other.Commit(tctx))
	}()
	n.awaitBlocked(t, 2)
	require.NoError(t, between.Rollback(t.Context()))
	require.NoError(t, errors.Join(<-errs, <-errs))
	require.Equal(t, 4, n.rows(t)["worker_queue"])
}

// A lease that is waited for has all of the time that was asked for, from when it is renewed.
func TestRenewWorkItemLock_ItemIsLockedByATransaction_ExtendsFromTheEndOfTheWait(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	token := n.take(t).LockToken
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, token, nil))
	renewed := make(chan error, 1)
	go func() {
		_, err := n.RenewWorkItemLock(context.Background(), token, time.Hour)
		renewed <- err
	}()
	n.awaitBlocked(t, 1)
	waited := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-renewed)
	require.False(t, query[time.Time](t, n, `SELECT visible_at FROM worker_queue`)[0].Before(waited.Add(time.Hour)))
}

// waitPastTheLease does it while a transaction that changes nothing has the rows of the table locked, which are those of one lease, until that is over.
func (n *node) waitPastTheLease(t *testing.T, table, end string, do func() error) error {
	t.Helper()
	tx := n.begin(t)
	require.NoError(t, dropped(tx.Exec(t.Context(), `SELECT FROM `+n.quoted()+`.`+table+` FOR UPDATE`)))
	done := make(chan error, 1)
	go func() { done <- do() }()
	n.awaitBlocked(t, 1)
	require.Eventually(t, func() bool {
		return n.exec(t, `SELECT FROM `+table+` WHERE `+end+` > clock_timestamp()`) == 0
	}, patience, 50*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	return <-done
}

var briefly = &pgwake.FetchOptions{LockTimeout: 4 * time.Second, NoWait: true}

// Where a statement has waited for somebody who changed nothing, its conditions are not asked again.
func TestVerbs_LeaseEndsWhileTheyWaitForTheLock_LockLostAndNothingWritten(t *testing.T) {
	t.Parallel()
	type verb = func(*node, pgwake.LockToken) error
	check := func(name, table, end string, claim func(*testing.T, *node) pgwake.LockToken, do verb) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			token := claim(t, n)
			before := n.content(t)
			requireError(t, n.waitPastTheLease(t, table, end, func() error { return do(n, token) }), pgwake.ErrLockLost)
			require.Equal(t, before, n.content(t))
		})
	}
	for name, do := range map[string]verb{
		"abandon":     func(n *node, token pgwake.LockToken) error { return n.AbandonWorkItem(tctx, token, nil) },
		"dead letter": func(n *node, token pgwake.LockToken) error { return n.DeadLetterWorkItem(tctx, token, "broken", "") },
		"renew": func(n *node, token pgwake.LockToken) error {
			return dropped(n.RenewWorkItemLock(tctx, token, time.Hour))
		},
	} {
		check("work "+name, "worker_queue", "visible_at", func(t *testing.T, n *node) pgwake.LockToken {
			n.enqueue(t, "a")
			item, err := n.FetchWorkItem(t.Context(), briefly)
			require.NoError(t, err)
			return item.LockToken
		}, do)
	}
	for name, do := range map[string]verb{
		"ack": func(n *node, token pgwake.LockToken) error {
			return n.AckOrchestrationItem(tctx, token, pgwake.OrchestrationAck{})
		},
		"abandon": func(n *node, token pgwake.LockToken) error { return n.AbandonOrchestrationItem(tctx, token, nil) },
		"dead letter": func(n *node, token pgwake.LockToken) error {
			return n.DeadLetterOrchestrationItem(tctx, token, "broken", "")
		},
		"renew": func(n *node, token pgwake.LockToken) error {
			return dropped(n.RenewOrchestrationItemLock(tctx, token, time.Hour))
		},
	} {
		check("turn "+name, "instance_locks", "locked_until", func(t *testing.T, n *node) pgwake.LockToken {
			n.send(t, "i", "ping")
			turn, err := n.FetchOrchestrationItem(t.Context(), briefly)
			require.NoError(t, err)
			return turn.LockToken
		}, do)
	}
}

// What is done, and was acknowledged in time, is not done again: whoever had it locked kept everybody else from it.
func TestAckWorkItem_LeaseEndsWhileItWaitsForTheLock_IsDone(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]*pgwake.Config{"": nil, "archived": {ArchiveFor: time.Hour}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, config)
			n.enqueue(t, "a")
			item, err := n.FetchWorkItem(t.Context(), briefly)
			require.NoError(t, err)
			require.NoError(t, n.waitPastTheLease(t, "worker_queue", "visible_at", func() error { return n.AckWorkItem(tctx, item.LockToken, nil) }))
			require.Zero(t, n.rows(t)["worker_queue"])
		})
	}
}

func TestAbandonWorkItem_ItemIsLockedByATransaction_DelayCountsFromTheEndOfTheWait(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a")
	token := n.take(t).LockToken
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, token, nil))
	abandoned := make(chan error, 1)
	go func() {
		abandoned <- n.AbandonWorkItem(tctx, token, &pgwake.AbandonOptions{Delay: time.Hour})
	}()
	n.awaitBlocked(t, 1)
	waited := query[time.Time](t, n, `SELECT clock_timestamp()`)[0]
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-abandoned)
	require.False(t, query[time.Time](t, n, `SELECT visible_at FROM worker_queue`)[0].Before(waited.Add(time.Hour)))
}

func TestRenewWorkItemLocks_OneIsLockedByATransaction_TheOthersAreRenewed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "a", "b", "c")
	var tokens []pgwake.LockToken
	for range 3 {
		tokens = append(tokens, n.take(t).LockToken)
	}
	tx := n.begin(t)
	defer tx.Rollback(context.Background())
	require.NoError(t, n.AckWorkItemTx(t.Context(), tx, tokens[1], nil))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	until, err := n.RenewWorkItemLocks(ctx, append(tokens, "no token"), time.Hour)
	var lost *pgwake.LostLocksError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, []pgwake.LockToken{"no token"}, lost.Tokens, "nobody knows yet what becomes of the one in between")
	require.ElementsMatch(t, []pgwake.LockToken{tokens[0], tokens[2]}, slices.Collect(maps.Keys(until)))

	require.NoError(t, tx.Rollback(ctx))
	until, err = n.RenewWorkItemLocks(ctx, tokens, time.Hour)
	require.NoError(t, err)
	require.Len(t, until, 3)
}

// Items of a session come in order, also past one that somebody has locked for a moment.
func TestFetchWorkItem_ItemOfASessionIsLocked_NothingBehindItIsClaimed(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for _, name := range []string{"first", "second"} {
		_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name, Session: "s"}, nil)
		require.NoError(t, err)
	}
	_, err := n.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "of another", Session: "u"}, nil)
	require.NoError(t, err)
	inTheWay := n.begin(t)
	_, err = inTheWay.Exec(t.Context(), `SELECT FROM worker_queue WHERE name = 'first' FOR UPDATE`)
	require.NoError(t, err)

	o := &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: "A"}}
	items, err := n.FetchWorkItems(t.Context(), 3, o)
	require.NoError(t, err)
	require.Equal(t, []string{"of another"}, namesOf(items))
	require.NoError(t, inTheWay.Rollback(t.Context()))
	items, err = n.FetchWorkItems(t.Context(), 3, o)
	require.NoError(t, err)
	require.Equal(t, []string{"first", "second"}, namesOf(items))
}

// However much is behind the item that is in the way, and whatever it is that is locked.
func TestFetchWorkItem_SessionIsInUse_WhatIsBehindIsNotRead(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO worker_queue (name, session_id) SELECT i::text, 's' FROM generate_series(1, 2000) AS i`)
	n.exec(t, `INSERT INTO sessions (session_id, owner, locked_until) VALUES ('s', 'A', now() + interval '1 h')`)
	for _, locked := range []string{`worker_queue WHERE name = '1'`, `sessions`} {
		inTheWay := n.begin(t)
		_, err := inTheWay.Exec(t.Context(), `SELECT FROM `+locked+` FOR UPDATE`)
		require.NoError(t, err)
		for _, fair := range []bool{false, true} {
			tx := n.begin(t)
			var items, read int
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(item_id) FROM fetch_work(gen_random_uuid(), '30 s', p_owner => 'A', p_fair => $1)`, fair).Scan(&items))
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT idx_tup_fetch FROM pg_stat_xact_user_tables WHERE schemaname = $1 AND relname = 'worker_queue'`, n.schema).Scan(&read))
			require.Zero(t, items, locked)
			require.Less(t, read, 500, "%s, fair %v", locked, fair)
			require.NoError(t, tx.Rollback(t.Context()))
		}
		require.NoError(t, inTheWay.Rollback(t.Context()))
	}
}
