package pgwake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// One test for each way in which the published designs lose a wake-up (docs/architecture.md, "The holes").
// Each fails when its hole is opened again: `make mutants` does that.
//
// In all of them the fallback is a minute away, so a delivery within `patient` came by push or timer.

// Hole 1: only the earliest timer is known, and it is forgotten when it fires.
func TestHole01_SecondEarliestTimer_FiresOnTime(t *testing.T) {
	p := testProvider(t, Config{})
	first, second := fetchWork(t, p, longPoll), fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 2)
	// One statement, one notification: it names the earliest instant only.
	mustExec(t, plain(t, p.cfg.Schema),
		`SELECT enqueue_work_many('{a,b,c}', NULL, p_delays => '{200ms,400ms,600ms}')`)
	get(t, first)
	get(t, second)
	third := get(t, fetchWork(t, p, longPoll))
	require.Equal(t, "c", third.item.Name)
	requireNoSafetyNet(t, p)
}

// Hole 2: timers scheduled before the node started are unknown to it.
func TestHole02_TimerScheduledBeforeTheStart_FiresOnTime(t *testing.T) {
	schema := testdb.Schema(t)
	testProvider(t, Config{Schema: schema})
	mustExec(t, plain(t, schema), `SELECT enqueue_work('early', p_delay => '1 second'),
		enqueue_message('i', 'start', p_name => 'n', p_delay => '1 second')`)
	late := testProvider(t, Config{Schema: schema})
	work, turn := fetchWork(t, late, longPoll), fetchTurn(t, late, longPoll)
	require.Equal(t, "early", get(t, work).item.Name)
	require.Equal(t, "i", get(t, turn).turn.Instance)
	requireNoSafetyNet(t, late)
}

// Hole 3: what is notified while the LISTEN connection is down is lost.
func TestHole03_EnqueuedWhileNotListening_FoundOnReconnect(t *testing.T) {
	gate := make(chan struct{}, 1)
	gate <- struct{}{} // the first connection
	p := testProvider(t, Config{AggressivePolicy: Never, fault: func(point string) {
		if point == "connect" {
			select {
			case <-gate:
			case <-time.After(patient):
			}
		}
	}})
	work, turn := fetchWork(t, p, longPoll), fetchTurn(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	awaitParked(t, p, Orchestrator, 1)
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT pg_terminate_backend($1)`, p.engine.listener.pid.Load())
	eventually(t, "the loss is noticed", func() bool { return !p.Stats().Listening })
	mustExec(t, producer, `SELECT enqueue_work('unheard'), enqueue_message('i', 'start', p_name => 'n')`)
	gate <- struct{}{}
	require.Equal(t, "unheard", get(t, work).item.Name)
	require.Equal(t, "i", get(t, turn).turn.Instance)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["reconnect"])
	require.EqualValues(t, 1, p.Stats().Reconnects)
}

// claimAndHang is the child process of hole 4: it claims one item and one turn, says so, and waits for its
// end.
const claimAndHang = "PGWAKE_TEST_CLAIM_AND_HANG"

func TestHelperProcess_ClaimAndHang(t *testing.T) {
	schema, lockTimeout := os.Getenv(claimAndHang), time.Second
	if schema == "" {
		t.Skip("runs as the child process of hole 4")
	}
	p, err := Open(t.Context(), testdb.URL(t), &Config{Schema: schema})
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), &FetchOptions{LockTimeout: lockTimeout})
	require.NoError(t, err)
	_, err = p.FetchOrchestrationItem(t.Context(), &FetchOptions{LockTimeout: lockTimeout})
	require.NoError(t, err)
	fmt.Println("claimed")
	select {}
}

// Hole 4: the lease of a killed process ends silently. The other process has parked since before the claim,
// so it cannot know of the lease unless it is told.
func TestHole04_ProcessKilledWithItsLease_RedeliversWhenTheLeaseEnds(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	work, turn := fetchWork(t, p, longPoll), fetchTurn(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	awaitParked(t, p, Orchestrator, 1)

	// Silent items, so that the child takes them and not this process.
	mustExec(t, producer, `SELECT set_config('pgwake.notify', 'off', false)`)
	mustExec(t, producer, `SELECT enqueue_work('orphan'), enqueue_message('i', 'start', p_name => 'n')`)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHelperProcess_ClaimAndHang$")
	child.Env = append(os.Environ(), claimAndHang+"="+p.cfg.Schema, "PGWAKE_DATABASE_URL="+testdb.URL(t))
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	awaitLine(t, out, "claimed")
	require.NoError(t, child.Process.Kill())
	_ = child.Wait()

	var ends *time.Time // nil: it has ended
	err = producer.QueryRow(t.Context(), `SELECT min(visible_at) FROM worker_queue WHERE attempt_count = 1`).Scan(&ends)
	require.NoError(t, err)
	got := get(t, work)
	require.Equal(t, "orphan", got.item.Name)
	require.Equal(t, 2, got.item.Attempt)
	require.False(t, ends != nil && p.engine.clock.Server(got.at).Before(*ends), "redelivered before the lease ended")
	require.Equal(t, 2, get(t, turn).turn.Attempt)
	requireNoSafetyNet(t, p)
}

// The same within one process: a dispatcher that never acks.
func TestHole04_DispatcherGoneWithItsLease_RedeliversWhenTheLeaseEnds(t *testing.T) {
	p := testProvider(t, Config{})
	_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "orphan"}, nil)
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), &FetchOptions{LockTimeout: 500 * time.Millisecond})
	require.NoError(t, err)
	require.Equal(t, 2, get(t, fetchWork(t, p, longPoll)).item.Attempt)
	requireNoSafetyNet(t, p)
}

// Whoever was told of an instant looks at it, even if an answer since says that nothing is due then: a claim made
// after that answer counts on it, and says nothing.
func TestHole04_InstantThatWasTold_IsLookedAtWhateverAnAnswerSays(t *testing.T) {
	const lockTimeout = 4 * time.Second // the second claim is in the first half of it
	p := testProvider(t, Config{})
	dies := testProvider(t, Config{Schema: p.cfg.Schema})
	producer := plain(t, p.cfg.Schema)
	silently := func(name string) *ClaimedWorkItem {
		mustExec(t, producer, `BEGIN`)
		mustExec(t, producer, `SET LOCAL pgwake.notify = off`)
		mustExec(t, producer, `SELECT enqueue_work($1)`, name)
		mustExec(t, producer, `COMMIT`)
		item, err := dies.FetchWorkItem(t.Context(), &FetchOptions{LockTimeout: lockTimeout, NoWait: true})
		require.NoError(t, err)
		return item
	}
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	told := func() time.Time { return p.engine.leases.next(Worker, time.Now().Add(-time.Hour)) }
	first := silently("first") // tells of the end of its lease
	eventually(t, "it is known", func() bool { return !told().IsZero() })
	require.NoError(t, dies.AckWorkItem(t.Context(), first.LockToken, nil))
	looks := p.Stats().Worker.Looks
	mustExec(t, producer, `SELECT notify_queue('worker', 1, NULL)`)
	eventually(t, "it looks and finds nothing", func() bool { return p.Stats().Worker.Looks > looks })
	awaitParked(t, p, Worker, 1)
	silently("second") // its lease ends soon after that instant, so it tells of nothing
	require.Equal(t, "second", get(t, wait).item.Name)
	requireNoSafetyNet(t, p)
}

// Hole 5: items that become visible without an INSERT fire no trigger.
func TestHole05_AbandonedItem_WakesAnotherNode(t *testing.T) {
	for name, abandon := range map[string]func(*Provider, LockToken, LockToken, *AbandonOptions) error{
		"own transaction": func(p *Provider, work, turn LockToken, o *AbandonOptions) error { // the coalescer tells
			return errors.Join(p.AbandonWorkItem(t.Context(), work, o), p.AbandonOrchestrationItem(t.Context(), turn, o))
		},
		"caller's transaction": func(p *Provider, work, turn LockToken, o *AbandonOptions) error { // the functions notify
			return pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error {
				return errors.Join(p.AbandonWorkItemTx(t.Context(), tx, work, o), p.AbandonOrchestrationItemTx(t.Context(), tx, turn, o))
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, Config{})
			holder := testProvider(t, Config{Schema: p.cfg.Schema})
			for _, delay := range []time.Duration{0, 200 * time.Millisecond} {
				_, err := holder.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil)
				require.NoError(t, err)
				_, err = holder.EnqueueForOrchestrator(t.Context(), Message{Instance: "i", Kind: MessageStart, Name: "n"}, nil)
				require.NoError(t, err)
				held, err := holder.FetchWorkItem(t.Context(), nil)
				require.NoError(t, err)
				heldTurn, err := holder.FetchOrchestrationItem(t.Context(), nil)
				require.NoError(t, err)
				work, turn := fetchWork(t, p, longPoll), fetchTurn(t, p, longPoll)
				awaitParked(t, p, Worker, 1)
				awaitParked(t, p, Orchestrator, 1)

				require.NoError(t, abandon(holder, held.LockToken, heldTurn.LockToken, &AbandonOptions{Delay: delay}))
				require.NoError(t, p.AckWorkItem(t.Context(), get(t, work).item.LockToken, nil))
				require.NoError(t, p.AckOrchestrationItem(t.Context(), get(t, turn).turn.LockToken, OrchestrationAck{}))
			}
			requireNoSafetyNet(t, p)
		})
	}
}

func TestHole05_AckReleasesInstanceWithNewMessage_WakesAnotherNode(t *testing.T) {
	for name, ack := range map[string]func(*Provider, LockToken) error{
		"own transaction": func(p *Provider, token LockToken) error {
			return p.AckOrchestrationItem(t.Context(), token, OrchestrationAck{Metadata: Metadata{Name: "n"}})
		},
		"caller's transaction": func(p *Provider, token LockToken) error {
			return pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error {
				return p.AckOrchestrationItemTx(t.Context(), tx, token, OrchestrationAck{Metadata: Metadata{Name: "n"}})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, Config{})
			holder := testProvider(t, Config{Schema: p.cfg.Schema})
			producer := plain(t, p.cfg.Schema)
			mustExec(t, producer, `SELECT enqueue_message('i', 'start', p_name => 'n')`)
			held, err := holder.FetchOrchestrationItem(t.Context(), nil)
			require.NoError(t, err)
			turn := fetchTurn(t, p, longPoll)
			awaitParked(t, p, Orchestrator, 1)
			// Its wake-up finds the instance locked.
			looks := p.Stats().Orchestrator.Looks
			mustExec(t, producer, `SELECT enqueue_message('i', 'event')`)
			eventually(t, "the message is looked for in vain", func() bool {
				s := p.Stats().Orchestrator
				return s.Looks > looks && s.Parked == 1
			})
			require.NoError(t, ack(holder, held.LockToken))
			require.Equal(t, MessageKind("event"), get(t, turn).turn.Messages[0].Kind)
			requireNoSafetyNet(t, p)
		})
	}
}

// The write skew of a release: the message commits after the last snapshot of the ack and before its commit,
// so the ack does not see the message and the message's wake-up finds the lease still held.
func TestHole05_MessageCommitsWhileAckIsUncommitted_IsDelivered(t *testing.T) {
	p := testProvider(t, Config{})
	holder := testProvider(t, Config{Schema: p.cfg.Schema})
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_message('i', 'start', p_name => 'n')`)
	held, err := holder.FetchOrchestrationItem(t.Context(), nil)
	require.NoError(t, err)
	turn := fetchTurn(t, p, longPoll)
	awaitParked(t, p, Orchestrator, 1)

	tx, err := holder.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, holder.AckOrchestrationItemTx(t.Context(), tx, held.LockToken, OrchestrationAck{Metadata: Metadata{Name: "n"}}))
	looks := p.Stats().Orchestrator.Looks
	mustExec(t, producer, `SELECT enqueue_message('i', 'event')`)
	eventually(t, "the message is looked for in vain", func() bool {
		s := p.Stats().Orchestrator
		return s.Looks > looks && s.Parked == 1
	})
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, MessageKind("event"), get(t, turn).turn.Messages[0].Kind)
}

// Hole 6: the notification of the worker queue does not say when the item is due.
func TestHole06_DelayedWorkItem_FiresOnTime(t *testing.T) {
	p := testProvider(t, Config{})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	var due *time.Time // nil: it has been delivered
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_work('timer', p_delay => '300ms')`)
	require.NoError(t, producer.QueryRow(t.Context(), `SELECT min(visible_at) FROM worker_queue WHERE attempt_count = 0`).Scan(&due))
	got := get(t, wait)
	require.False(t, due != nil && p.engine.clock.Server(got.at).Before(*due), "delivered before it was due")
	require.EqualValues(t, 1, p.Stats().Worker.Finds["timer"])
	requireNoSafetyNet(t, p)
}

// An earlier timer replaces a later one.
func TestHole06_EarlierTimer_ReplacesALaterOne(t *testing.T) {
	p := testProvider(t, Config{})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_work('late', p_delay => '1 hour')`)
	mustExec(t, producer, `SELECT enqueue_work('soon', p_delay => '100ms')`)
	require.Equal(t, "soon", get(t, wait).item.Name)
	requireNoSafetyNet(t, p)
}

// Hole 7: a statement with a thousand rows sends a thousand notifications.
func TestHole07_BatchOf1000Rows_SendsOneNotification(t *testing.T) {
	p := testProvider(t, Config{Notify: NotifyBroadcast})
	producer, ear := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	var channel string
	require.NoError(t, ear.QueryRow(t.Context(), `SELECT channel('worker')`).Scan(&channel))
	mustExec(t, ear, "LISTEN "+channel)
	mustExec(t, producer, `SELECT enqueue_work_many(array_agg('n' || i), NULL, p_delays => array_agg(i * interval '1 ms'))
		FROM generate_series(1, 1000) i`)
	mustExec(t, producer, `SELECT pg_notify($1, 'end 0')`, channel)
	var heard []string
	for len(heard) == 0 || heard[len(heard)-1] != "end 0" {
		ctx, cancel := context.WithTimeout(t.Context(), patient)
		n, err := ear.WaitForNotification(ctx)
		cancel()
		require.NoError(t, err)
		if !strings.HasPrefix(n.Payload, "0 0 * ") { // the node's greeting
			heard = append(heard, n.Payload)
		}
	}
	require.Len(t, heard, 2, "%v", heard)
	require.Regexp(t, `^\d+ \d{16} default \d{16}$`, heard[0])
}

// Hole 8: a channel named after a long schema is truncated by LISTEN and refused by pg_notify.
func TestHole08_SchemaNameAtTheLimit_IsNotified(t *testing.T) {
	schema := fmt.Sprintf("Ü \"%s", strings.Repeat("x", 59))
	require.Len(t, schema, 63)
	testdb.OwnSchema(t, schema)
	p := testProvider(t, Config{Schema: schema})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	mustExec(t, plain(t, schema), `SELECT enqueue_work('loud')`)
	require.Equal(t, "loud", get(t, wait).item.Name)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["notify"])
}

// Hole 9: the clocks of application and database differ.
func TestHole09_ClocksHoursApart_ChangeNothing(t *testing.T) {
	for _, skew := range []time.Duration{5 * time.Hour, -5 * time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			p := testProvider(t, Config{clock: func() time.Time { return time.Now().Add(skew) }})
			wait := fetchWork(t, p, longPoll)
			awaitParked(t, p, Worker, 1)
			looks := p.Stats().Worker.Looks
			producer := plain(t, p.cfg.Schema)
			mustExec(t, producer, `SELECT enqueue_work('timer', p_delay => '300ms')`)
			require.Equal(t, "timer", get(t, wait).item.Name)
			require.EqualValues(t, 1, p.Stats().Worker.Looks-looks, "it looked before the item was due")
			offset := p.Stats().ClockOffset
			require.InDelta(t, -skew, offset, float64(time.Minute))
			requireNoSafetyNet(t, p)
		})
	}
}

// Hole 10: in trouble every dispatcher polls on its own.
func TestHole10_AggressiveMode_OneDispatcherPollsForAll(t *testing.T) {
	const interval, duration = 20 * time.Millisecond, 600 * time.Millisecond
	p := testProvider(t, Config{AggressiveInterval: interval, AggressiveDuration: duration, AggressiveExitThreshold: 1})
	for range 8 {
		fetchWork(t, p, longPoll)
	}
	awaitParked(t, p, Worker, 8)
	before, began := p.Stats().Worker.Looks, time.Now()
	p.engine.enterAggressive(Worker, troubleFetch)
	eventually(t, "it calms down", func() bool { return !p.Stats().Worker.Aggressive })
	passed := time.Since(began)
	require.GreaterOrEqual(t, passed, duration)
	polls := p.Stats().Worker.Looks - before
	require.Positive(t, polls)
	require.LessOrEqual(t, polls, int64(passed/interval)+3, "three more for the steps of 5 and 10 ms")
}
