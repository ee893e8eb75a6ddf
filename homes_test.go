package pgwake_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: does a message come to whom its instance belongs, whatever it copied of that when it was added?

func versions(major int) *pgwake.FetchOptions {
	r := pgwake.VersionRange{Min: pgwake.Version{Major: major}, Max: pgwake.Version{Major: major, Minor: 9}}
	return &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Versions: &pgwake.VersionFilter{Ranges: []pgwake.VersionRange{r}}}
}

// pinned makes an instance that is pinned to version 1, and moves it to version 2 between two calls.
func (n *node) pinned(t *testing.T, instance string, between func()) {
	t.Helper()
	pin := func(major int) pgwake.OrchestrationAck {
		return pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", PinnedVersion: &pgwake.Version{Major: major}}}
	}
	n.sendWith(t, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow"}, nil)
	n.ackTurn(t, n.takeTurn(t), pin(1))
	between()
	n.send(t, instance, "move")
	n.ackTurn(t, n.takeTurn(t), pin(2))
}

func TestHomes_AddedInASnapshotFromBeforeTheChange_IsFound(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, add := range map[string]func(t *testing.T, n *node, tx pgx.Tx){
			"enqueue": func(t *testing.T, n *node, tx pgx.Tx) {
				_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
				require.NoError(t, err)
			},
			"redrive": func(t *testing.T, n *node, tx pgx.Tx) {
				count, err := n.RedriveDeadLettersTx(tctx, tx, nil)
				require.NoError(t, err)
				require.Equal(t, 1, count)
			},
		} {
			t.Run(fmt.Sprint(name, " ", level), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, nil)
				tx, err := n.userPool(t, 2).BeginTx(tctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				defer func() { _ = tx.Rollback(tctx) }()
				n.pinned(t, "i", func() {
					n.send(t, "i", "dies")
					require.NoError(t, n.DeadLetterOrchestrationItem(tctx, n.takeTurn(t).LockToken, "spoilt", ""))
					_, err := tx.Exec(tctx, "SELECT count(*) FROM "+n.quoted()+".instances") // which takes the snapshot
					require.NoError(t, err)
				})
				add(t, n, tx)
				require.NoError(t, tx.Commit(tctx))
				turn, err := n.FetchOrchestrationItem(tctx, versions(2))
				require.NoError(t, err)
				require.Equal(t, "i", turn.Instance)
			})
		}
	}
}

// However it came about.
func TestHomes_FetchMeetsAMessageThatIsOutOfDate_LeavesItToWhoServesTheInstance(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.another(t)
	n.pinned(t, "i", func() {})
	n.send(t, "i", "poke")
	n.exec(t, `UPDATE orchestrator_queue SET pin = 1 + (1::bigint << 40)`)
	back := make(chan error, 1)
	go func() {
		_, err := other.FetchOrchestrationItem(tctx, versions(2))
		back <- err
	}()
	require.Eventually(t, func() bool { return other.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
	o := versions(1)
	o.PollTimeout, o.NoWait = 0, true
	_, err := n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.NoError(t, <-back)
}

// What was added for an instance that is deleted meanwhile is for another of the same id.
func TestHomes_DeletedMeanwhile_MessageIsForAnybody(t *testing.T) {
	t.Parallel()
	for name, ack := range map[string]pgwake.OrchestrationAck{
		"sticky": {Metadata: pgwake.Metadata{Name: "flow"}, Sticky: &pgwake.Sticky{Owner: "A", For: time.Hour}},
		"pinned": {Metadata: pgwake.Metadata{Name: "flow", PinnedVersion: &pgwake.Version{Major: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
			n.ackTurn(t, n.takeTurn(t), ack)
			tx := n.begin(t)
			_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
			require.NoError(t, err)
			_, err = n.DeleteInstance(tctx, "i", &pgwake.DeleteOptions{Force: true})
			require.NoError(t, err)
			require.NoError(t, tx.Commit(tctx))
			turn, err := n.FetchOrchestrationItem(tctx, versions(2))
			require.NoError(t, err)
			require.Equal(t, "i", turn.Instance)
		})
	}
}

// A note goes when nobody can add what it is about any more.
func TestHomes_TransactionsHaveEnded_NoNoteIsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	n.pinned(t, "i", func() {
		_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
		require.NoError(t, err)
	})
	notes := func() int64 { return query[int64](t, n, `SELECT count(*) FROM realignments`)[0] }
	require.EqualValues(t, 1, notes())
	o := versions(2)
	o.PollTimeout, o.NoWait = 0, true
	_, err := n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.EqualValues(t, 1, notes(), "the transaction is open")
	require.NoError(t, tx.Rollback(tctx))
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.Zero(t, notes())
}

// Those who wait for nobody's lock leave none behind on busy queues either.
func TestHomes_NobodyChangesAnything_NoNoteIsMade(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	n.start(t, "i")
	n.send(t, "i", "poke")
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Status: pgwake.StatusCompleted}})
	require.NoError(t, tx.Commit(tctx))
	require.Zero(t, query[int64](t, n, `SELECT count(*) FROM realignments`)[0])
}

// Whoever changes many instances at a time, for as long as he likes, is in nobody's way.
func TestFetch_ManyInstancesAreBeingChanged_TakesTheNextThatIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	const many = 1100
	var batch []pgwake.MessageEnqueue
	var instances []string
	for i := range many {
		instances = append(instances, fmt.Sprint("i", i))
		batch = append(batch, pgwake.MessageEnqueue{Message: pgwake.Message{Instance: instances[i], Kind: "k"}})
	}
	_, err := n.EnqueueForOrchestratorMany(tctx, batch)
	require.NoError(t, err)
	n.send(t, "free", "k")
	tx := n.begin(t)
	n.exec(t, `INSERT INTO instance_locks SELECT 'i' || g, gen_random_uuid(), clock_timestamp() FROM generate_series(0, $1) g`, many-1)
	_, err = tx.Exec(tctx, `SELECT FROM instance_locks FOR UPDATE`)
	require.NoError(t, err)
	for _, o := range []*pgwake.FetchOptions{{}, {Namespaces: []string{"default"}}} {
		o.NoWait, o.LockTimeout = true, lease
		turn, err := n.FetchOrchestrationItem(tctx, o)
		require.NoError(t, err)
		require.Equal(t, "free", turn.Instance)
		require.NoError(t, n.AbandonOrchestrationItem(tctx, turn.LockToken, nil))
	}
	require.NoError(t, tx.Rollback(tctx))
}

func inNamespace(namespace string) *pgwake.FetchOptions {
	return &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Namespaces: []string{namespace}}
}

// begun makes the first ack of an instance.
func (n *node) begun(t *testing.T, turn *pgwake.OrchestrationItem) {
	t.Helper()
	n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Status: pgwake.StatusCompleted}})
}

// displaced leaves a message with a dedup key in the default namespace, for an instance that is elsewhere.
func (n *node) displaced(t *testing.T) {
	t.Helper()
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "early"}, &pgwake.EnqueueOptions{DedupKey: "K"})
	require.NoError(t, err)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "space"})
	n.begun(t, n.takeTurn(t))
	require.NoError(t, tx.Commit(tctx))
}

// Until then it can be had where it is, and nobody is told again and again.
func TestHomes_DedupKeyIsTakenThere_MessageStaysUntilItIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	other := n.sendWith(t, pgwake.Message{Instance: "j", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "space", DedupKey: "K", Delay: lease})
	n.displaced(t)

	conn, err := pgx.Connect(tctx, n.urlWith(t, func(*pgx.ConnConfig) {}))
	require.NoError(t, err)
	defer func() { _ = conn.Close(tctx) }()
	for _, sql := range []string{
		`SELECT set_config('search_path', '` + n.quoted() + `', false)`,
		"LISTEN " + query[string](t, n, `SELECT channel('orchestrator')`)[0],
		`SELECT FROM fetch_orchestration(gen_random_uuid(), '1 min', '{space}')`,
		`SELECT FROM fetch_orchestration(gen_random_uuid(), '1 min', '{space}')`,
		`SELECT pg_notify(channel('orchestrator'), 'nothing before')`,
	} {
		_, err := conn.Exec(tctx, sql)
		require.NoError(t, err)
	}
	for said := ""; said != "nothing before"; {
		heard, err := conn.WaitForNotification(tctx)
		require.NoError(t, err)
		if heard.PID == conn.PgConn().PID() { // what the nodes say is their own affair
			said = heard.Payload
			require.Equal(t, "nothing before", said)
		}
	}

	o := inNamespace("default")
	o.NoWait, o.PollTimeout = true, 0
	turn, err := n.FetchOrchestrationItem(tctx, o)
	require.NoError(t, err)
	require.NoError(t, n.AbandonOrchestrationItem(tctx, turn.LockToken, nil))
	n.exec(t, `DELETE FROM orchestrator_queue WHERE id = $1`, other.ID)
	turn, err = n.FetchOrchestrationItem(tctx, inNamespace("space"))
	require.NoError(t, err)
	require.Equal(t, "i", turn.Instance)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	require.Zero(t, n.rows(t)["orchestrator_queue"])
}

func TestHomes_DedupKeyIsAboutToBeTakenThere_NoFetchWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.displaced(t)
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "j", Kind: "k"}, &pgwake.EnqueueOptions{Namespace: "space", DedupKey: "K"})
	require.NoError(t, err)
	o := inNamespace("space")
	o.NoWait, o.PollTimeout = true, 0
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.NoError(t, tx.Rollback(tctx))
	_, err = n.FetchOrchestrationItem(tctx, inNamespace("space"))
	require.NoError(t, err)
}

// The note of a message must outlive the transaction that makes its instance known.
func TestHomes_FirstAckIsInATransaction_MessageFollows(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	early, first := n.begin(t), n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, early, pgwake.Message{Instance: "i", Kind: "early"}, &pgwake.EnqueueOptions{Namespace: "a"})
	require.NoError(t, err)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	turn, err := n.FetchOrchestrationItem(tctx, inNamespace("default"))
	require.NoError(t, err)
	require.NoError(t, n.AckOrchestrationItemTx(tctx, first, turn.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}}))
	require.NoError(t, early.Commit(tctx))
	o := inNamespace("default")
	o.NoWait, o.PollTimeout = true, 0
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.NoError(t, first.Commit(tctx))
	_, err = n.FetchOrchestrationItem(tctx, inNamespace("default"))
	require.NoError(t, err)
}

func TestHomes_DeletedAndMadeAnewElsewhere_MessageFollows(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "space"})
	n.begun(t, n.takeTurn(t))
	tx := n.begin(t)
	_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
	require.NoError(t, err)
	_, err = n.DeleteInstance(tctx, "i", nil)
	require.NoError(t, err)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	n.begun(t, n.takeTurn(t))
	require.NoError(t, tx.Commit(tctx))
	_, err = n.FetchOrchestrationItem(tctx, inNamespace("default"))
	require.NoError(t, err)
}

// Fetches that do not select see to the notes as well.
func TestHomes_NobodySelects_MessagesFollowAndNoNoteIsLeft(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow"}, Sticky: &pgwake.Sticky{Owner: "A", For: time.Hour}})
	n.send(t, "i", "go")
	turn, err := n.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Owner: "A"})
	require.NoError(t, err)
	tx := n.begin(t)
	_, err = n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
	require.NoError(t, err)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})
	require.NoError(t, tx.Commit(tctx))
	turn, err = n.FetchOrchestrationItem(tctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience})
	require.NoError(t, err)
	n.ackTurn(t, turn, pgwake.OrchestrationAck{})

	pool := n.userPool(t, 2)
	for range 10 {
		require.NoError(t, pgx.BeginTxFunc(tctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
			_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "k"}, nil)
			return err
		}))
		n.ackTurn(t, n.takeTurn(t), pgwake.OrchestrationAck{})
	}
	require.Zero(t, n.rows(t)["realignments"])
}

// A fetch sees to so many notes. Those that it can do nothing about are not in the way of all others.
func TestHomes_TransactionHoldsManyInstancesThatAreNoted_MessagesOfOthersFollow(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	n.exec(t, `INSERT INTO instance_locks (instance_id, lock_token, locked_until)
		SELECT 'held' || i, gen_random_uuid(), clock_timestamp() FROM generate_series(1, 25) AS i`)
	n.exec(t, `INSERT INTO realignments (instance_id) SELECT 'held' || i FROM generate_series(1, 50) AS i`) // of half of them there is no row to lock
	holder := n.begin(t)
	_, err := holder.Exec(tctx, `SELECT FROM instance_locks FOR UPDATE`)
	require.NoError(t, err)
	_, err = holder.Exec(tctx, `SELECT pg_advisory_xact_lock(hashtext(current_schema()::text), hashtext('held' || i)) FROM generate_series(26, 50) AS i`)
	require.NoError(t, err)

	tx := n.begin(t)
	n.pinned(t, "i", func() {
		_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
		require.NoError(t, err)
	})
	require.NoError(t, tx.Commit(tctx))
	turn, err := n.FetchOrchestrationItem(tctx, versions(2))
	require.NoError(t, err)
	require.Equal(t, "i", turn.Instance)
	require.Equal(t, []int64{50}, query[int64](t, n, `SELECT count(*) FROM realignments WHERE instance_id LIKE 'held%'`))

	require.NoError(t, holder.Rollback(tctx))
	require.Eventually(t, func() bool {
		n.exec(t, `UPDATE realignments SET next_at = clock_timestamp()`)
		n.exec(t, `SELECT realign_messages()`)
		return query[int](t, n, `SELECT count(*) FROM realignments`)[0] == 0
	}, patience, 5*time.Millisecond)
}

// Whoever waits where the message belongs is told, although the message names another namespace.
func TestHomes_OldSnapshotNamesTheWrongNamespace_WakesTheRightOne(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx, err := n.userPool(t, 2).BeginTx(tctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(tctx) }()
	_, err = tx.Exec(tctx, "SELECT count(*) FROM "+n.quoted()+".instances")
	require.NoError(t, err)
	n.sendWith(t, pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, &pgwake.EnqueueOptions{Namespace: "space"})
	n.begun(t, n.takeTurn(t))
	_, err = n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
	require.NoError(t, err)
	back := make(chan error, 1)
	go func() {
		_, err := n.FetchOrchestrationItem(tctx, inNamespace("space"))
		back <- err
	}()
	require.Eventually(t, func() bool { return n.Stats().Orchestrator.Parked == 1 }, patience, 10*time.Millisecond)
	require.NoError(t, tx.Commit(tctx))
	require.NoError(t, <-back)
}

// The candidate was read before the other fetch changed it.
func TestHomes_AnotherFetchIsAligning_NobodyGetsWhatHeDidNotAskFor(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	tx := n.begin(t)
	n.pinned(t, "i", func() {
		_, err := n.EnqueueForOrchestratorTx(tctx, tx, pgwake.Message{Instance: "i", Kind: "late"}, nil)
		require.NoError(t, err)
	})
	require.NoError(t, tx.Commit(tctx))
	aligning := n.begin(t)
	_, err := aligning.Exec(tctx, `SELECT FROM fetch_orchestration(gen_random_uuid(), '1 min', p_queues => '{none}')`)
	require.NoError(t, err)
	o := versions(1)
	o.NoWait, o.PollTimeout = true, 0
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	require.NoError(t, aligning.Commit(tctx))
	_, err = n.FetchOrchestrationItem(tctx, o)
	requireError(t, err, pgwake.ErrNoWork)
	_, err = n.FetchOrchestrationItem(tctx, versions(2))
	require.NoError(t, err)
}

// While transactions add messages, acks move instances between queue names and owners, and six dispatchers on two nodes
// serve one name each: every message that was committed comes once, to whom the instance belongs, and no note is left.
func TestHomes_InstancesMoveUnderLoad_EveryMessageComesOnceToTheRightOne(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	nodes := []*node{n, n.another(t)}
	queues := []string{"", "q1", "q2"}
	const producers, transactions, instances = 4, 40, 20
	var mu sync.Mutex
	sent, got := make(map[string]bool), make(map[string]int)
	var producing, serving sync.WaitGroup
	for w := range producers {
		producing.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 7))
			for k := range transactions {
				tx := n.begin(t)
				var ids []string
				for j := range 1 + rng.IntN(3) {
					id := fmt.Sprintf("%d-%d-%d", w, k, j)
					m := pgwake.Message{Instance: fmt.Sprint("i", rng.IntN(instances)), Kind: pgwake.MessageStart, Name: "flow", Data: []byte(`"` + id + `"`)}
					if _, err := n.EnqueueForOrchestratorTx(tctx, tx, m, nil); err != nil {
						t.Error(err)
					}
					ids = append(ids, id)
				}
				if _, err := tx.Exec(tctx, `SELECT pg_sleep($1)`, float64(rng.IntN(10))/1000); err != nil { // the transaction is as long
					t.Error(err)
				}
				if rng.IntN(5) == 0 {
					_ = tx.Rollback(tctx)
					continue
				}
				mu.Lock()
				for _, id := range ids {
					sent[id] = true
				}
				mu.Unlock()
				if err := tx.Commit(tctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	ctx, cancel := context.WithCancel(tctx)
	defer cancel()
	for i := range 6 {
		m, queue, rng := nodes[i%2], queues[i%3], rand.New(rand.NewPCG(uint64(i), 8))
		serving.Go(func() {
			for {
				turn, err := m.FetchOrchestrationItem(ctx, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Queues: []string{queue}, Owner: fmt.Sprint("o", i)})
				switch {
				case ctx.Err() != nil:
					return
				case errors.Is(err, pgwake.ErrNoWork):
					continue
				case err != nil:
					t.Error(err)
					continue
				}
				mu.Lock()
				if turn.Queue != queue {
					t.Errorf("asked for %q, and got a turn of %q", queue, turn.Queue)
				}
				for _, message := range turn.Messages {
					got[strings.Trim(string(message.Data), `"`)]++
				}
				mu.Unlock()
				ack := pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "flow", Queue: queues[rng.IntN(3)]}}
				if rng.IntN(3) == 0 {
					ack.Sticky = &pgwake.Sticky{Owner: fmt.Sprint("o", rng.IntN(6)), For: 300 * time.Millisecond}
				}
				if err := m.AckOrchestrationItem(tctx, turn.LockToken, ack); err != nil {
					t.Error(err)
				}
			}
		})
	}
	producing.Wait()
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) >= len(sent)
	}, 2*patience, 10*time.Millisecond)
	cancel()
	serving.Wait()
	for id := range sent {
		require.Equal(t, 1, got[id], id)
	}
	require.Len(t, got, len(sent))
	require.Zero(t, n.rows(t)["orchestrator_queue"])
	for _, m := range nodes {
		require.Zero(t, m.Stats().Orchestrator.FallbackFinds)
	}
}
