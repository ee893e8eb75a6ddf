package pgwake_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: do acks that share a commit do what single ones do?

func TestAckBatched_ManyAtOnce_EachDoesItsOwn(t *testing.T) {
	t.Parallel()
	const count = 300
	n := newNode(t, nil)
	n.start(t, "known")
	var batch []pgwake.WorkEnqueue
	for i := range count {
		batch = append(batch, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{Name: strconv.Itoa(i)}})
	}
	_, err := n.EnqueueForWorkerMany(tctx, batch)
	require.NoError(t, err)
	items, err := n.FetchWorkItems(tctx, count, &pgwake.FetchOptions{LockTimeout: lease})
	require.NoError(t, err)
	require.Len(t, items, count)
	gone := make(map[string]bool)
	for i, item := range items { // every third was lost
		if i%3 == 0 {
			require.NoError(t, n.AbandonWorkItem(tctx, item.LockToken, nil))
			gone[item.Name] = true
		}
	}

	var wg sync.WaitGroup
	errs := make([]error, count)
	for i, item := range items {
		wg.Go(func() {
			var completion *pgwake.Message
			if i%2 == 0 {
				completion = &pgwake.Message{Instance: "known", Kind: "done", Data: []byte(item.Name)}
			}
			errs[i] = n.AckBatched(tctx, item.LockToken, completion)
		})
	}
	wg.Wait()
	completions := make(map[string]bool)
	for i, item := range items {
		if gone[item.Name] {
			requireError(t, errs[i], pgwake.ErrLockLost)
			continue
		}
		require.NoError(t, errs[i])
		if i%2 == 0 {
			completions[item.Name] = true
		}
	}
	left := make(map[string]bool)
	for _, name := range query[string](t, n, `SELECT name FROM worker_queue`) {
		left[name] = true
	}
	require.Equal(t, gone, left)
	turn := n.takeTurn(t)
	sent := make(map[string]bool)
	for _, m := range turn.Messages {
		sent[string(m.Data)] = true
	}
	require.Equal(t, completions, sent)
	require.Len(t, turn.Messages, len(completions))
}

// ackTogether makes these acks in one group, which gathers while as many groups as there may be are held up. For that
// tx locks the table; it keeps what it has locked before. gathered is called when it has. The result is what each hears.
func (n *node) ackTogether(t *testing.T, tx pgx.Tx, acks map[*pgwake.ClaimedWorkItem]*pgwake.Message, gathered ...func()) map[string]chan error {
	t.Helper()
	const groups = 4
	pgwake.HoldGroups(n.Provider)
	var ahead []*pgwake.ClaimedWorkItem
	for range groups {
		n.enqueue(t, "ahead")
		ahead = append(ahead, n.take(t))
	}
	hold, err := tx.Begin(tctx)
	require.NoError(t, err)
	_, err = hold.Exec(tctx, `LOCK TABLE worker_queue IN EXCLUSIVE MODE`)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for i, item := range ahead {
		wg.Go(func() { require.NoError(t, n.AckBatched(tctx, item.LockToken, nil)) })
		n.awaitBlocked(t, i+1)
	}
	heard := make(map[string]chan error)
	for item, message := range acks {
		c := make(chan error, 1)
		heard[item.Name] = c
		go func() { c <- n.AckBatched(tctx, item.LockToken, message) }()
	}
	require.Eventually(t, func() bool { return pgwake.AcksWaiting(n.Provider) == len(acks) }, patience, 10*time.Millisecond) // none of them can start
	for _, do := range gathered {
		do()
	}
	require.NoError(t, hold.Rollback(tctx))
	wg.Wait()
	return heard
}

func requireHeard(t *testing.T, heard chan error) {
	t.Helper()
	select {
	case err := <-heard:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "it waits still")
	}
}

// What the server refuses, for reasons that nobody can foresee, hits whom it is about, even in a group.
func TestAckBatched_ServerRefusesOne_TheOthersAreDone(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.refuse(t, "orchestrator_queue", `instance_id = 'refused'`)
	n.enqueue(t, "good", "bad", "better")
	to := func(instance string) *pgwake.Message { return &pgwake.Message{Instance: instance, Kind: "done"} }
	heard := n.ackTogether(t, n.begin(t), map[*pgwake.ClaimedWorkItem]*pgwake.Message{n.take(t): to("i"), n.take(t): to("refused"), n.take(t): to("i")})
	requireHeard(t, heard["good"])
	require.ErrorContains(t, <-heard["bad"], "refused_by_test")
	requireHeard(t, heard["better"])
	require.Equal(t, []string{"bad"}, query[string](t, n, `SELECT name FROM worker_queue`))
	require.Len(t, n.takeTurn(t).Messages, 2)
}

// An item that somebody else has locked, as the ack of a turn that cancels it does, costs the others nothing.
func TestAckBatched_ItemIsLocked_TheOthersDoNotWait(t *testing.T) {
	t.Parallel()
	done := &pgwake.Message{Instance: "i", Kind: "done"}
	for name, archive := range map[string]time.Duration{"deleted": 0, "archived": time.Hour} {
		for name2, cancelled := range map[string]bool{"cancelled": true, "let go": false} {
			t.Run(name+", "+name2, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, &pgwake.Config{ArchiveFor: archive})
				n.enqueue(t, "locked", "free", "silent")
				locked, free, silent := n.take(t), n.take(t), n.take(t)
				tx := n.begin(t)
				_, err := tx.Exec(tctx, `DELETE FROM worker_queue WHERE id = $1`, locked.ID)
				require.NoError(t, err)
				heard := n.ackTogether(t, tx, map[*pgwake.ClaimedWorkItem]*pgwake.Message{locked: done, free: done, silent: nil})
				requireHeard(t, heard["free"])
				requireHeard(t, heard["silent"])
				n.awaitBlocked(t, 1)
				require.Empty(t, heard["locked"])
				require.Len(t, n.takeTurn(t).Messages, 1, "what was not done has sent nothing")

				// Nor does it hold up those that come later, however many are held up.
				n.enqueue(t, "1", "2", "3", "4", "5")
				for range 5 {
					item := n.take(t)
					_, err := tx.Exec(tctx, `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, item.ID)
					require.NoError(t, err)
					ctx, cancel := context.WithTimeout(tctx, 50*time.Millisecond)
					defer cancel()
					require.ErrorIs(t, n.AckBatched(ctx, item.LockToken, done), context.DeadlineExceeded)
				}
				n.enqueue(t, "later")
				require.NoError(t, n.AckBatched(tctx, n.take(t).LockToken, nil))

				if cancelled {
					require.NoError(t, tx.Commit(tctx))
					requireError(t, <-heard["locked"], pgwake.ErrLockLost)
					return
				}
				require.NoError(t, tx.Rollback(tctx))
				requireHeard(t, heard["locked"])
				// Of the five nobody knows: who gave up has a request under way.
				require.Empty(t, query[string](t, n, `SELECT name FROM worker_queue WHERE name !~ '^[1-5]$'`))
			})
		}
	}
}

// A session is busy while somebody's transaction has acknowledged an item of it.
func TestAckBatched_SessionIsLocked_TheOthersDoNotWait(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	for name, session := range map[string]string{"theirs": "busy", "busy": "busy", "idle": "idle", "free": ""} {
		_, err := n.EnqueueForWorker(tctx, pgwake.WorkItem{Name: name, Session: session}, nil)
		require.NoError(t, err)
	}
	claimed, err := n.FetchWorkItems(tctx, 4, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Session: &pgwake.SessionOptions{Owner: "we"}})
	require.NoError(t, err)
	items := make(map[string]*pgwake.ClaimedWorkItem)
	for _, item := range claimed {
		items[item.Name] = item
	}
	tx := n.begin(t)
	require.NoError(t, n.AckWorkItemTx(tctx, tx, items["theirs"].LockToken, nil))
	heard := n.ackTogether(t, tx, map[*pgwake.ClaimedWorkItem]*pgwake.Message{items["busy"]: nil, items["idle"]: nil, items["free"]: nil})
	requireHeard(t, heard["idle"])
	requireHeard(t, heard["free"])
	n.awaitBlocked(t, 1)
	require.ElementsMatch(t, []string{"theirs", "busy"}, query[string](t, n, `SELECT name FROM worker_queue`))
	require.NoError(t, tx.Commit(tctx))
	requireHeard(t, heard["busy"])
	require.Empty(t, query[string](t, n, `SELECT name FROM worker_queue`))
}

// impatient opens one more Provider, whose sessions give up waiting once it has lost its patience: those ahead of a group wait for as long as
// it takes to gather.
func (n *node) impatient(t *testing.T, parameter string) (impatient *node, lose func()) {
	t.Helper()
	var lost atomic.Bool
	config := backstage.users.Config()
	config.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		if !lost.Load() {
			return true, nil
		}
		_, err := conn.Exec(ctx, `SET `+parameter+` = 1500`)
		return true, err
	}
	pool, err := pgxpool.NewWithConfig(tctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p, err := pgwake.New(tctx, pool, &pgwake.Config{Schema: n.schema, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(tctx)) })
	return &node{Provider: p, schema: n.schema}, func() { lost.Store(true) }
}

// On a server that gives up waiting, only what had to wait fails.
func TestAckBatched_ServerGivesUpOnOne_TheOthersAreDone(t *testing.T) {
	t.Parallel()
	for parameter, state := range map[string]string{"lock_timeout": "55P03", "statement_timeout": "57014"} {
		t.Run(parameter, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			impatient, lose := n.impatient(t, parameter)
			n.enqueue(t, "locked", "stuck", "free")
			locked, stuck, free := n.take(t), n.take(t), n.take(t)
			n.exec(t, `CREATE FUNCTION wait_by_test() RETURNS trigger LANGUAGE plpgsql AS
				$$BEGIN PERFORM pg_advisory_xact_lock(hashtext(current_schema()), 7); RETURN NULL; END$$`)
			n.exec(t, `CREATE TRIGGER waits AFTER DELETE ON worker_queue FOR EACH ROW WHEN (old.name = 'stuck') EXECUTE FUNCTION wait_by_test()`)
			tx := n.begin(t)
			_, err := tx.Exec(tctx, `SELECT pg_advisory_xact_lock(hashtext(current_schema()), 7)`)
			require.NoError(t, err)
			_, err = tx.Exec(tctx, `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, locked.ID)
			require.NoError(t, err)
			heard := impatient.ackTogether(t, tx, map[*pgwake.ClaimedWorkItem]*pgwake.Message{locked: nil, stuck: nil, free: nil}, lose)
			requireHeard(t, heard["free"])
			require.ErrorContains(t, <-heard["locked"], state)
			require.ErrorContains(t, <-heard["stuck"], state)
			require.NoError(t, tx.Rollback(tctx))
			require.ElementsMatch(t, []string{"locked", "stuck"}, query[string](t, n, `SELECT name FROM worker_queue`))
			require.NoError(t, impatient.AckBatched(tctx, stuck.LockToken, nil))
		})
	}
}

func TestAckBatched_Completion_WakesWhoeverWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.another(t)
	n.start(t, "i")
	for _, waiter := range []*node{n, other} {
		n.enqueue(t, "work")
		item := n.take(t)
		back := make(chan error, 1)
		go func() {
			turn, err := waiter.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: lease})
			if err == nil {
				err = waiter.AckOrchestrationItem(tctx, turn.LockToken, pgwake.OrchestrationAck{})
			}
			back <- err
		}()
		require.Eventually(t, func() bool { return waiter.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
		require.NoError(t, n.AckBatched(tctx, item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
		require.NoError(t, <-back)
	}
}

func TestAckBatched_Close_WaitsForWhatIsOnItsWay(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	closing := n.another(t)
	n.enqueue(t, "1", "2")
	items := []*pgwake.ClaimedWorkItem{n.take(t), n.take(t)}
	tx := n.begin(t)
	_, err := tx.Exec(tctx, `SELECT FROM worker_queue WHERE id = $1 FOR UPDATE`, items[0].ID)
	require.NoError(t, err)
	acked := make(chan error, len(items))
	go func() { acked <- closing.AckBatched(tctx, items[0].LockToken, nil) }()
	n.awaitBlocked(t, 1)
	closed := make(chan error, 1)
	go func() { closed <- closing.Close(context.Background()) }()
	require.Eventually(t, func() bool {
		_, err := closing.ReadHistory(tctx, "i")
		return errors.Is(err, pgwake.ErrClosed)
	}, patience, 10*time.Millisecond)
	requireError(t, closing.AckBatched(tctx, items[1].LockToken, nil), pgwake.ErrClosed)
	require.Empty(t, closed)
	require.NoError(t, tx.Rollback(tctx))
	require.NoError(t, <-acked)
	require.NoError(t, <-closed)
	require.Equal(t, []string{"2"}, query[string](t, n, `SELECT name FROM worker_queue`))
}

func TestAckBatched_BadInput_IsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.enqueue(t, "work")
	item := n.take(t)
	requireError(t, n.AckBatched(tctx, "nonsense", nil), pgwake.ErrLockLost)
	requireError(t, n.AckBatched(tctx, item.LockToken, &pgwake.Message{Instance: "i"}), pgwake.ErrInvalid)
	cancelled, cancel := context.WithCancel(tctx)
	cancel()
	require.ErrorIs(t, n.AckBatched(cancelled, item.LockToken, nil), context.Canceled)
	require.NoError(t, n.AckBatched(tctx, item.LockToken, nil))
	requireError(t, n.AckBatched(tctx, item.LockToken, nil), pgwake.ErrLockLost)
}

// The role's default isolation level does not matter.
func TestAckBatched_OtherIsolationLevel_DoesTheSame(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	strict := n.openAt(t, n.urlWith(t, func(c *pgx.ConnConfig) { c.RuntimeParams["default_transaction_isolation"] = "serializable" }), nil)
	n.enqueue(t, "kept", "lost")
	kept, lost := n.take(t), n.take(t)
	require.NoError(t, n.AbandonWorkItem(tctx, lost.LockToken, &pgwake.AbandonOptions{Delay: lease}))
	require.NoError(t, strict.AckBatched(tctx, kept.LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
	requireError(t, strict.AckBatched(tctx, lost.LockToken, nil), pgwake.ErrLockLost)
	require.Equal(t, map[string]int{"worker_queue": 1, "orchestrator_queue": 1, "namespaces": 1}, n.rows(t))
}
