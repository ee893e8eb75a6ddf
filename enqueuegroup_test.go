package pgwake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: do enqueues that share a commit do what single ones do?

// heardOf is what an enqueue of a group came to.
type heardOf struct {
	pgwake.Enqueued
	err error
}

// enqueueTogether makes these enqueues in one group, which gathers while as many are held up as there may be. For that a
// transaction locks the table; meanwhile is called while it does. What each hears comes in the order of the items.
func (n *node) enqueueTogether(t *testing.T, items []pgwake.WorkEnqueue, ctxs map[int]context.Context, meanwhile func()) []chan heardOf {
	t.Helper()
	const singles, groups = 4, 4
	pgwake.HoldGroups(n.Provider)
	hold := n.begin(t)
	_, err := hold.Exec(tctx, `LOCK TABLE worker_queue IN EXCLUSIVE MODE`)
	require.NoError(t, err)
	await := func(waiting, groups, singles int) {
		t.Helper()
		require.Eventually(t, func() bool {
			w, g, s := pgwake.EnqueuesUnderWay(n.Provider)
			return w == waiting && g == groups && s == singles
		}, patience, 10*time.Millisecond)
	}
	var ahead sync.WaitGroup
	for i := range singles + groups {
		ahead.Go(func() {
			_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "ahead"}, nil)
			require.NoError(t, err)
		})
		await(0, max(0, i+1-singles), min(i+1, singles))
	}
	var heard []chan heardOf
	for i, item := range items {
		c := make(chan heardOf, 1)
		heard = append(heard, c)
		ctx, ok := ctxs[i]
		if !ok {
			ctx = tctx
		}
		go func() {
			e, err := n.EnqueueForWorker(ctx, item.WorkItem, &item.EnqueueOptions)
			c <- heardOf{e, err}
		}()
		await(i+1, groups, singles)
	}
	if meanwhile != nil {
		meanwhile()
	}
	require.NoError(t, hold.Rollback(tctx))
	ahead.Wait()
	return heard
}

func workItems(names ...string) (items []pgwake.WorkEnqueue) {
	for _, name := range names {
		items = append(items, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: name}})
	}
	return items
}

func TestEnqueueForWorker_ManyShareACommit_EachHearsOfItsOwn(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	at := time.Now().Add(time.Hour).Truncate(time.Microsecond)
	var items []pgwake.WorkEnqueue
	for i := range 12 {
		item := pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: strconv.Itoa(i), Input: json.RawMessage(fmt.Sprintf(`{"n":  %d}`, i))}}
		switch i % 6 {
		case 1:
			item.Namespace = "other" + item.Name
		case 2:
			item.Delay = time.Duration(i) * time.Hour
		case 3:
			item.At = at.Add(time.Duration(i) * time.Hour)
		case 4:
			item.Tag, item.Priority = "tag"+item.Name, 3
		case 5:
			item.Session, item.Instance, item.ExecutionID, item.ActivityID = "s"+item.Name, "i", 2, int64(i)
		}
		items = append(items, item)
	}
	outcomes := n.enqueueTogether(t, items, nil, nil)
	var ids []int64
	for i, item := range items {
		heard := <-outcomes[i]
		require.NoError(t, heard.err)
		require.False(t, heard.Duplicate)
		ids = append(ids, heard.ID)
		input, namespace := string(item.Input), item.Namespace
		if namespace == "" {
			namespace = pgwake.DefaultNamespace
		}
		require.Equal(t, []string{strings.Join([]string{item.Name, input, namespace, strconv.Itoa(item.Priority), item.Tag, item.Session, item.Instance}, "|")},
			query[string](t, n, `SELECT concat_ws('|', name, input::text, namespace, priority, tag, coalesce(session_id, ''), coalesce(instance_id, '')) FROM worker_queue WHERE id = $1`, heard.ID))
		due := query[time.Time](t, n, `SELECT visible_at FROM worker_queue WHERE id = $1`, heard.ID)[0]
		require.True(t, due.Equal(heard.DueAt), "%v is not %v", heard.DueAt, due)
		if !item.At.IsZero() {
			require.True(t, due.Equal(item.At))
		}
		delay := query[float64](t, n, `SELECT extract(epoch FROM visible_at - created_at)::float8 FROM worker_queue WHERE id = $1`, heard.ID)[0]
		if item.At.IsZero() {
			require.InDelta(t, item.Delay.Seconds(), delay, 1e-3)
		}
	}
	require.IsIncreasing(t, ids)
	require.Equal(t, []int64{1}, query[int64](t, n, `SELECT count(DISTINCT xmin::text) FROM worker_queue WHERE name <> 'ahead'`), "transactions")
	require.Equal(t, []int64{int64(len(items))}, query[int64](t, n, `SELECT count(*) FROM worker_queue WHERE name <> 'ahead'`))
}

// What the server refuses, for reasons that nobody can foresee, hits whom it is about, even in a group.
func TestEnqueueForWorker_ServerRefusesOneOfAGroup_TheOthersLand(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "worker_queue", `name = 'bad'`)
	outcomes := n.enqueueTogether(t, workItems("good", "bad", "better", "best", "last"), nil, nil)
	for i, c := range outcomes {
		if heard := <-c; i == 1 {
			requireError(t, heard.err, pgwake.ErrInvalid)
			require.ErrorContains(t, heard.err, "refused_by_test")
			require.Zero(t, heard.Enqueued)
		} else {
			require.NoError(t, heard.err)
		}
	}
	require.ElementsMatch(t, []string{"good", "better", "best", "last"}, query[string](t, n, `SELECT name FROM worker_queue WHERE name <> 'ahead'`))
}

// Nobody knows whether it was committed, so nobody makes it again but its callers, who are told that they may.
func TestEnqueueForWorker_ConnectionBreaksUnderAGroup_AllHearOfItAndNothingIsTwice(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		shake func(t *testing.T, n *node, l *link, hold pgx.Tx)
		kept  bool
	}{
		"before the commit": {func(t *testing.T, n *node, _ *link, _ pgx.Tx) {
			for _, pid := range n.blocked(t) {
				n.exec(t, `SELECT pg_terminate_backend($1)`, pid)
			}
		}, false},
		"after the commit": {func(t *testing.T, _ *node, l *link, hold pgx.Tx) {
			l.mode.Store(cutAnswer)
			require.NoError(t, hold.Rollback(tctx))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.exec(t, `CREATE FUNCTION wait_by_test() RETURNS trigger LANGUAGE plpgsql AS
				$$BEGIN PERFORM pg_advisory_xact_lock(hashtext(current_schema()), 7); RETURN NULL; END$$`)
			n.exec(t, `CREATE TRIGGER waits AFTER INSERT ON worker_queue FOR EACH ROW WHEN (new.name = 'stuck') EXECUTE FUNCTION wait_by_test()`)
			hold := n.begin(t)
			_, err := hold.Exec(tctx, `SELECT pg_advisory_xact_lock(hashtext(current_schema()), 7)`)
			require.NoError(t, err)
			link := newLink(t, backstage.users.Config().ConnConfig)
			direct, err := pgx.ParseConfig(n.urlWith(t, func(*pgx.ConnConfig) {}))
			require.NoError(t, err)
			p := n.openAt(t, n.urlWith(t, link.use), &pgwake.Config{ListenConfig: direct}) // the group alone is under way over the link
			names := []string{"1", "2", "stuck", "4", "5"}
			outcomes := p.enqueueTogether(t, workItems(names...), nil, nil)
			n.awaitBlocked(t, 1)
			c.shake(t, n, link, hold)
			for _, outcome := range outcomes {
				select {
				case heard := <-outcome:
					var failed *pgwake.Error
					require.ErrorAs(t, heard.err, &failed)
					require.True(t, failed.Retryable, "%v", heard.err)
					require.Zero(t, heard.Enqueued)
				case <-time.After(patience):
					require.Fail(t, "a caller hangs")
				}
			}
			_ = hold.Rollback(tctx)
			_, err = p.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "afterwards"}, nil)
			require.NoError(t, err)
			want := []string{"afterwards"}
			if c.kept {
				want = append(want, names...)
			}
			require.ElementsMatch(t, want, query[string](t, n, `SELECT name FROM worker_queue WHERE name <> 'ahead'`))
		})
	}
}

func TestEnqueueForWorker_CallerLeavesItsGroup_TheOthersLand(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ctx, leave := context.WithCancel(tctx)
	outcomes := n.enqueueTogether(t, workItems("1", "2", "3", "4", "5", "6"), map[int]context.Context{1: ctx}, func() {
		leave()
		require.Eventually(t, func() bool {
			waiting, _, _ := pgwake.EnqueuesUnderWay(n.Provider)
			return waiting == 5
		}, patience, 10*time.Millisecond)
	})
	for i, c := range outcomes {
		if heard := <-c; i == 1 {
			require.ErrorIs(t, heard.err, context.Canceled)
		} else {
			require.NoError(t, heard.err)
		}
	}
	require.ElementsMatch(t, []string{"1", "3", "4", "5", "6"}, query[string](t, n, `SELECT name FROM worker_queue WHERE name <> 'ahead'`))
}

// A bad item reaches no group, and what does not share goes whatever the groups are up to.
func TestEnqueueForWorker_GroupsAreHeldUp_BadItemIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueueTogether(t, nil, nil, func() {
		for _, o := range []pgwake.EnqueueOptions{{Priority: 10}, {Namespace: "NO"}, {Delay: -1}, {Delay: 1, At: time.Now()}} {
			_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "bad"}, &o)
			requireError(t, err, pgwake.ErrInvalid)
		}
		_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "bad", Input: json.RawMessage(`{`)}, nil)
		requireError(t, err, pgwake.ErrInvalid)
	})
	require.Empty(t, query[string](t, n, `SELECT name FROM worker_queue WHERE name <> 'ahead'`))
}

// A dedup key waits for a transaction that has queued it, and so shares no commit.
func TestEnqueueForWorker_DedupKeyIsBeingQueued_OthersDoNotWait(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := n.EnqueueForWorkerTx(tctx, tx, pgwake.WorkItem{Name: "first"}, &pgwake.EnqueueOptions{DedupKey: "key"})
	require.NoError(t, err)
	heard := make(chan heardOf, 1)
	go func() {
		e, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: "second"}, &pgwake.EnqueueOptions{DedupKey: "key"})
		heard <- heardOf{e, err}
	}()
	n.awaitBlocked(t, 1)
	waiting, groups, singles := pgwake.EnqueuesUnderWay(n.Provider)
	require.Zero(t, waiting+groups+singles)
	require.NoError(t, tx.Commit(tctx))
	h := <-heard
	require.NoError(t, h.err)
	require.True(t, h.Duplicate)
}

// Whatever returned without an error before Close is there, and nothing else, each in the order of its caller.
func TestEnqueueForWorker_CloseUnderLoad_KeepsWhatWasPromised(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	closing := n.another(t)
	const callers = 24
	var promised [callers][]int64
	var total atomic.Int64
	var wg sync.WaitGroup
	for caller := range callers {
		wg.Go(func() {
			for i := 0; ; i++ {
				e, err := closing.EnqueueForWorker(tctx, pgwake.WorkItem{Name: strconv.Itoa(caller), Input: json.RawMessage(strconv.Itoa(i))}, nil)
				if errors.Is(err, pgwake.ErrClosed) {
					return
				}
				require.NoError(t, err)
				promised[caller] = append(promised[caller], e.ID)
				total.Add(1)
			}
		})
	}
	require.Eventually(t, func() bool { return total.Load() > 20*callers }, patience, 10*time.Millisecond)
	require.NoError(t, closing.Close(tctx))
	wg.Wait()
	require.Less(t, query[int64](t, n, `SELECT count(DISTINCT xmin::text) FROM worker_queue`)[0], total.Load(), "transactions")
	for caller, ids := range promised {
		require.Equal(t, ids, query[int64](t, n, `SELECT id FROM worker_queue WHERE name = $1 ORDER BY (input #>> '{}')::int`, strconv.Itoa(caller)))
		require.IsIncreasing(t, append(ids, ids[len(ids)-1]+1))
	}
}

// The role's default isolation level does not matter.
func TestEnqueueForWorker_OtherIsolationLevel_SharesACommit(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	strict := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["default_transaction_isolation"] = "serializable" }), nil)
	for _, c := range strict.enqueueTogether(t, workItems("1", "2", "3", "4", "5"), nil, nil) {
		require.NoError(t, (<-c).err)
	}
	require.Len(t, query[string](t, n, `SELECT name FROM worker_queue WHERE name <> 'ahead'`), 5)
}
