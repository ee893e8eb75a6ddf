package pgwake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: does the library do what the test plans of the published designs ask for?
//
// They are document 002, "Long Polling Design (Simplified)", and document 004, "Optimized Polling Design".
// Each test says which item of which plan it is. docs/source-tests.md lists the items, and says where our
// rule is another and why; the test then sets the option that brings the document's rule back, if there is
// one. The file is long because the plans are: it can be read side by side with them.
//
// Where the documents wait for a while and then measure a duration, these tests wait for the state itself
// and count: queries, wake-ups, reasons. What must come by push or timer comes within `patient`, and the
// fallback is a minute away unless a test says otherwise.

// stressTime is how long a test under load lasts: a moment, or as long as the documents ask for, by
// PGWAKE_STRESS=30s.
func stressTime(t *testing.T, moment time.Duration) time.Duration {
	t.Helper()
	long := os.Getenv("PGWAKE_STRESS")
	if long == "" {
		return moment
	}
	d, err := time.ParseDuration(long)
	require.NoError(t, err, "PGWAKE_STRESS is a duration, such as 30s")
	require.Positive(t, d, "PGWAKE_STRESS")
	return d
}

// eitherQueue is what a test needs in order to run on both queues.
type eitherQueue struct {
	Queue
	row     string // plain SQL: inserts one row, due after $1, and returns its id and due time
	enqueue func(context.Context, *Provider, *EnqueueOptions) (Enqueued, error)
	fetch   func(*testing.T, *Provider, *FetchOptions) <-chan delivery
}

var orchestratorQueue = eitherQueue{
	Queue: Orchestrator,
	row: `INSERT INTO orchestrator_queue (instance_id, kind, name, visible_at)
	      VALUES (gen_random_uuid(), 'start', 'n', clock_timestamp() + $1) RETURNING id, visible_at`,
	enqueue: func(ctx context.Context, p *Provider, o *EnqueueOptions) (Enqueued, error) {
		instance := "instance-" + strconv.FormatInt(time.Now().UnixNano(), 36)
		return p.EnqueueForOrchestrator(ctx, Message{Instance: instance, Kind: MessageStart, Name: "n"}, o)
	},
	fetch: fetchTurn,
}

var workerQueue = eitherQueue{
	Queue: Worker,
	row:   `INSERT INTO worker_queue (name, visible_at) VALUES ('n', clock_timestamp() + $1) RETURNING id, visible_at`,
	enqueue: func(ctx context.Context, p *Provider, o *EnqueueOptions) (Enqueued, error) {
		return p.EnqueueForWorker(ctx, WorkItem{Name: "n"}, o)
	},
	fetch: fetchWork,
}

var bothQueues = []eitherQueue{orchestratorQueue, workerQueue}

// onBothQueues runs the test as a subtest for each queue.
func onBothQueues(t *testing.T, test func(*testing.T, eitherQueue)) {
	for _, q := range bothQueues {
		t.Run(q.String(), func(t *testing.T) { test(t, q) })
	}
}

// insert is a producer in any language: a bare INSERT, which nothing but the trigger can announce.
func (q eitherQueue) insert(t *testing.T, as querier, delay time.Duration) (id int64, due time.Time) {
	t.Helper()
	require.NoError(t, as.QueryRow(t.Context(), q.row, delay).Scan(&id, &due))
	return id, due
}

// insertSilently inserts a row that is due and tells nobody.
func (q eitherQueue) insertSilently(t *testing.T, conn *pgx.Conn) (id int64) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL pgwake.notify = off`); err != nil {
			return err
		}
		id, _ = q.insert(t, tx, 0)
		return nil
	}))
	return id
}

// add enqueues by the library.
func (q eitherQueue) add(t *testing.T, p *Provider, o *EnqueueOptions) Enqueued {
	t.Helper()
	added, err := q.enqueue(t.Context(), p, o)
	require.NoError(t, err)
	return added
}

func (q eitherQueue) stats(p *Provider) QueueStats {
	if q.Queue == Orchestrator {
		return p.Stats().Orchestrator
	}
	return p.Stats().Worker
}

func (q eitherQueue) ack(t *testing.T, p *Provider, d delivery) {
	t.Helper()
	if d.turn != nil {
		require.NoError(t, p.AckOrchestrationItem(t.Context(), d.turn.LockToken, OrchestrationAck{Metadata: Metadata{Name: "n"}}))
	} else {
		require.NoError(t, p.AckWorkItem(t.Context(), d.item.LockToken, nil))
	}
}

// rowID is the id of the row that was delivered.
func (d delivery) rowID() int64 {
	if d.turn != nil {
		return d.turn.Messages[0].ID
	}
	return d.item.ID
}

// claimedAt is the server's instant of the claim, which was made with the default lock timeout.
func (d delivery) claimedAt() time.Time {
	if d.turn != nil {
		return d.turn.LockedUntil.Add(-DefaultLockTimeout)
	}
	return d.item.LockedUntil.Add(-DefaultLockTimeout)
}

// hear returns the next notification.
func hear(t *testing.T, ear *pgx.Conn) (channel, payload string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	n, err := ear.WaitForNotification(ctx)
	require.NoError(t, err)
	return n.Channel, said(t, n)
}

// Unit tests

// Document 004, 1: test_triggers_created_on_migration. Document 002, 1: Trigger creation.
func TestSource004_TriggersCreatedOnMigration(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	rows, err := plain(t, p.cfg.Schema).Query(t.Context(), `
		SELECT concat_ws(' ', trigger_name, action_timing, event_manipulation, event_object_table, action_orientation)
		  FROM information_schema.triggers WHERE trigger_schema = $1`, p.cfg.Schema)
	require.NoError(t, err)
	triggers, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, triggers, "orchestrator_queue_notify AFTER INSERT orchestrator_queue STATEMENT")
	require.Contains(t, triggers, "worker_queue_notify AFTER INSERT worker_queue STATEMENT")
}

// Document 004, 2: test_notify_emitted_on_orchestrator_insert. Document 002, 2: NOTIFY emission.
func TestSource004_NotifyEmittedOnOrchestratorInsert(t *testing.T) {
	t.Parallel()
	testNotifyEmitted(t, orchestratorQueue)
}

// Document 004, 2: test_notify_emitted_on_worker_insert. Document 002, 2: NOTIFY emission.
func TestSource004_NotifyEmittedOnWorkerInsert(t *testing.T) {
	t.Parallel()
	testNotifyEmitted(t, workerQueue)
}

func testNotifyEmitted(t *testing.T, q eitherQueue) {
	p := testProvider(t, Config{Notify: NotifyBroadcast})
	producer, ear := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	wanted := listenTo(t, ear, p, q.Queue)
	for name, produce := range map[string]func(){
		"a bare INSERT": func() { q.insert(t, producer, 0) },
		"the library":   func() { q.add(t, p, nil) },
	} {
		produce()
		channel, payload := hear(t, ear)
		require.Equal(t, wanted, channel, name)
		require.Equal(t, note{due: 1, namespace: DefaultNamespace}, noteOf(t, payload), name)
		// One, and no more: the coalescer has nothing left to say, and the server keeps the order.
		require.NoError(t, p.engine.coalescer.flush(t.Context()))
		mustExec(t, producer, `SELECT pg_notify($1, 'that was all ' || (extract(epoch FROM now()) * 1000000)::bigint)`, wanted)
		_, payload = hear(t, ear)
		require.Equal(t, "that was all", payload, name)
	}
}

// Document 004, 2: test_notify_payload_contains_visible_at. Document 002, 3: Payload parsing.
func TestSource004_NotifyPayloadContainsVisibleAt(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{Notify: NotifyBroadcast})
	producer, ear := plain(t, p.cfg.Schema), plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		listenTo(t, ear, p, q.Queue)
		fireAt := time.Now().Add(time.Minute).Truncate(time.Microsecond)
		for name, produce := range map[string]func() time.Time{
			"a bare INSERT": func() time.Time { _, due := q.insert(t, producer, time.Minute); return due },
			"the library":   func() time.Time { q.add(t, p, &EnqueueOptions{At: fireAt}); return fireAt },
		} {
			due := produce()
			_, payload := hear(t, ear)
			require.Equal(t, fmt.Sprintf("0 %d default", due.UnixMicro()), payload, name)
			n := noteOf(t, payload)
			require.True(t, n.next.Equal(due), name)
			require.Zero(t, n.due, name)
		}
	})
}

// Integration tests

// Document 004, 3: test_fetch_waits_when_no_work.
func TestSource004_FetchWaitsWhenNoWork(t *testing.T) {
	t.Parallel()
	const maxWait = 500 * time.Millisecond
	p := testProvider(t, Config{FallbackInterval: 5 * time.Minute, MaxWait: maxWait})
	once := &FetchOptions{PollTimeout: time.Minute}
	turns, items := fetchTurn(t, p, once), fetchWork(t, p, once)
	awaitParked(t, p, Orchestrator, 1)
	awaitParked(t, p, Worker, 1)
	before := p.Stats()
	began := time.Now()
	turn, work := fetchTurn(t, p, nil), fetchWork(t, p, nil)
	for _, from := range []<-chan delivery{turn, work} {
		select {
		case d := <-from:
			require.ErrorIs(t, d.err, ErrNoWork)
			require.GreaterOrEqual(t, d.at.Sub(began), maxWait)
		case <-time.After(patient):
			require.Fail(t, "a fetch waits for longer than MaxWait")
		}
	}
	// It waited; it did not poll.
	require.Equal(t, before.Orchestrator.Looks, p.Stats().Orchestrator.Looks)
	require.Equal(t, before.Worker.Looks, p.Stats().Worker.Looks)
	require.Empty(t, turns)
	require.Empty(t, items)
}

// Document 004, 3: test_fetch_returns_immediately_when_work_available.
func TestSource004_FetchReturnsImmediatelyWhenWorkAvailable(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	for _, q := range bothQueues {
		added := q.add(t, p, nil)
		require.Equal(t, added.ID, get(t, q.fetch(t, p, longPoll)).rowID())
		// The first query found it: there was nothing to wait for.
		require.EqualValues(t, 1, q.stats(p).Looks)
		require.EqualValues(t, 1, q.stats(p).Finds["fetch"])
	}
}

// Document 004, 4: test_fetch_wakes_on_notify. Document 002, 4: Immediate wake.
func TestSource004_FetchWakesOnNotify(t *testing.T) {
	t.Parallel()
	const rounds = 20
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		for range rounds {
			wait := q.fetch(t, p, longPoll)
			awaitParked(t, p, q.Queue, 1)
			looks := q.stats(p).Looks
			id, _ := q.insert(t, producer, 0)
			d := get(t, wait)
			require.Equal(t, id, d.rowID())
			require.EqualValues(t, 1, q.stats(p).Looks-looks)
			q.ack(t, p, d)
		}
		require.EqualValues(t, rounds, q.stats(p).Finds["notify"])
		requireNoSafetyNet(t, p)
		require.False(t, q.stats(p).Aggressive, "a wake-up is no trouble, unless the policy says so")
		// Each was found by one query that a notification called for, and nothing else looked. How soon, which is
		// 10 ms in document 002, is for the benchmarks.
	})
}

// Document 004, 5: test_timer_wakes_at_correct_time. Document 002, 5: Timer wake.
func TestSource004_TimerWakesAtCorrectTime(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		t.Parallel()
		delay := 400 * time.Millisecond
		onTime := func(d delivery, due time.Time) {
			t.Helper()
			require.False(t, d.claimedAt().Before(due), "claimed at %v, due at %v", d.claimedAt(), due)
			q.ack(t, p, d)
		}

		// The fetch begins after the timer was set: one query finds out when it is due, one more when the lane has
		// settled, and one takes it. A scout may look while it settles. If the machine stalls, the item is due before the fetch waits.
		var before QueueStats
		for stalled := true; stalled; delay *= 4 {
			before = q.stats(p)
			due := q.add(t, p, &EnqueueOptions{Delay: delay}).DueAt
			onTime(get(t, q.fetch(t, p, longPoll)), due)
			stalled = q.stats(p).Finds["timer"] == 0 && delay < 10*time.Second
		}
		looks := func() int64 { return q.stats(p).Looks - before.Looks }
		require.LessOrEqual(t, looks()-(q.stats(p).Tokens["scout"]-before.Tokens["scout"]), int64(3))
		require.EqualValues(t, 1, q.stats(p).Finds["timer"])

		// The timer is set, by another producer, while the dispatcher waits: one query.
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		before = q.stats(p)
		_, due := q.insert(t, plain(t, p.cfg.Schema), delay)
		onTime(get(t, wait), due)
		require.EqualValues(t, 1, looks())
		require.EqualValues(t, 2, q.stats(p).Finds["timer"])
		requireNoSafetyNet(t, p)
	})
}

// Document 004, 6: test_only_one_dispatcher_wakes_per_notify. Document 002, 6: Competing consumer.
func TestSource004_OnlyOneDispatcherWakesPerNotify(t *testing.T) {
	t.Parallel()
	const dispatchers = 4
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		for reason, produce := range map[string]func(){
			"notify": func() { q.insert(t, producer, 0) },
			"local":  func() { q.add(t, p, nil) },
		} {
			woken := make(chan delivery, dispatchers)
			for range dispatchers {
				wait := q.fetch(t, p, longPoll)
				go func() { woken <- <-wait }()
			}
			awaitParked(t, p, q.Queue, dispatchers)
			before := q.stats(p)
			// Each item wakes one more dispatcher, and that one alone asks the database.
			for n := 1; n <= dispatchers; n++ {
				produce()
				get(t, woken)
				awaitParked(t, p, q.Queue, dispatchers-n)
				require.EqualValues(t, n, q.stats(p).Looks-before.Looks, reason)
			}
			want := maps.Clone(before.Tokens)
			want[reason] += dispatchers
			require.Equal(t, want, q.stats(p).Tokens)
		}
	})
}

// Document 004, 6: test_multiple_dispatchers_single_winner.
func TestSource004_MultipleDispatchersSingleWinner(t *testing.T) {
	t.Parallel()
	const dispatchers = 4
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		ended := make(chan delivery, dispatchers)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range dispatchers {
			go func() {
				var d delivery
				if q.Queue == Orchestrator {
					d.turn, d.err = p.FetchOrchestrationItem(ctx, longPoll)
				} else {
					d.item, d.err = p.FetchWorkItem(ctx, longPoll)
				}
				ended <- d
			}()
		}
		awaitParked(t, p, q.Queue, dispatchers)
		// One item, and everybody is sent to race for it.
		looks := q.stats(p).Looks
		id := q.insertSilently(t, producer)
		for range dispatchers {
			mustExec(t, producer, `SELECT notify_queue($1, 1, NULL)`, q.String())
		}
		require.Equal(t, id, get(t, ended).rowID())
		eventually(t, "everybody has raced", func() bool {
			s := q.stats(p)
			return s.Tokens["notify"] == dispatchers && s.Parked == dispatchers-1
		})
		require.GreaterOrEqual(t, q.stats(p).Looks-looks, int64(dispatchers))
		cancel()
		for range dispatchers - 1 {
			require.ErrorIs(t, (<-ended).err, context.Canceled)
		}
		require.EqualValues(t, 1, q.stats(p).Items)
	})
}

// Document 002, 7: Fallback.
func TestSource002_FallbackWithNotifyDisabled(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{FallbackInterval: 200 * time.Millisecond})
	producer := plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		before := q.stats(p).Tokens
		id := q.insertSilently(t, producer)
		require.Equal(t, id, get(t, wait).rowID())
		require.EqualValues(t, 1, q.stats(p).Finds["fallback"])
		for _, reason := range []string{"notify", "timer", "local", "scout"} {
			require.Equal(t, before[reason], q.stats(p).Tokens[reason], reason)
		}
	})
}

// Document 002, 8: Timer update.
func TestSource002_EarlierTimerReplacesLaterOne(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	onBothQueues(t, func(t *testing.T, q eitherQueue) {
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		_, later := q.insert(t, producer, time.Hour)
		eventually(t, "the later timer is known", func() bool {
			l := p.engine.waiters.lanes(q.Queue)[0]
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.earliest.Equal(later)
		})
		soon, due := q.insert(t, producer, 300*time.Millisecond)
		d := get(t, wait)
		require.Equal(t, soon, d.rowID())
		require.False(t, d.claimedAt().Before(due), "claimed at %v, due at %v", d.claimedAt(), due)
		require.EqualValues(t, 1, q.stats(p).Finds["timer"])
		requireNoSafetyNet(t, p)
	})
}

// The aggressive state machine

// silentItemIsPolledFor shows that a queue is being polled: what nobody announces is found all the same,
// although the fallback is a minute away.
func silentItemIsPolledFor(t *testing.T, p *Provider, q eitherQueue) {
	t.Helper()
	polled := q.stats(p).Finds["scout"]
	wait := q.fetch(t, p, longPoll)
	awaitParked(t, p, q.Queue, 1)
	id := q.insertSilently(t, plain(t, p.cfg.Schema))
	require.Equal(t, id, get(t, wait).rowID())
	require.Equal(t, polled+1, q.stats(p).Finds["scout"])
}

// Document 004, 7: test_enters_aggressive_mode_on_notify; and on the other wake-ups of its table of reasons.
func TestSource004_EntersAggressiveModeOnNotify(t *testing.T) {
	t.Parallel()
	q := orchestratorQueue
	for _, c := range []struct {
		reason string
		insert func(*pgx.Conn)
	}{
		{"notify", func(c *pgx.Conn) { q.insert(t, c, 0) }},
		{"timer", func(c *pgx.Conn) { q.insert(t, c, 300*time.Millisecond) }},
		{"fallback", func(c *pgx.Conn) { q.insertSilently(t, c) }},
	} {
		cfg := Config{AggressivePolicy: OnEveryWake}
		if c.reason == "fallback" {
			cfg.FallbackInterval = 100 * time.Millisecond
		}
		p := testProvider(t, cfg)
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		require.False(t, q.stats(p).Aggressive)
		c.insert(plain(t, p.cfg.Schema))
		get(t, wait)
		require.EqualValues(t, 1, q.stats(p).Finds[c.reason], c.reason)
		require.True(t, q.stats(p).Aggressive, c.reason)
		require.False(t, p.Stats().Worker.Aggressive, "the other queue had no wake-up")
		if c.reason == "notify" {
			silentItemIsPolledFor(t, p, q)
		}
	}
}

// breakFetches makes every fetch of a turn fail in the database, until the returned function is called. No
// fetch may be in flight.
func breakFetches(p *Provider) (repair func()) {
	intact := p.sql.fetchOrchestration
	p.sql.fetchOrchestration = strings.Replace(intact, "fetch_orchestration", "no_such_function", 1)
	return func() { p.sql.fetchOrchestration = intact }
}

// Document 004, 8: test_enters_aggressive_mode_on_db_error.
func TestSource004_EntersAggressiveModeOnDBError(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{})
	repair := breakFetches(p)
	require.False(t, p.Stats().Orchestrator.Aggressive)
	_, err := p.FetchOrchestrationItem(t.Context(), longPoll)
	var failure *Error
	require.ErrorAs(t, err, &failure)
	require.True(t, p.Stats().Orchestrator.Aggressive)
	require.False(t, p.Stats().Worker.Aggressive)
	repair()
	silentItemIsPolledFor(t, p, orchestratorQueue)
}

// madeUpClock is a local clock that tests advance.
type madeUpClock struct {
	ahead, step, steps atomic.Int64
}

func (c *madeUpClock) now() time.Time {
	if c.steps.Add(-1) >= 0 {
		c.pass(time.Duration(c.step.Load()))
	}
	return time.Now().Add(time.Duration(c.ahead.Load()))
}

// pass lets time pass at once.
func (c *madeUpClock) pass(d time.Duration) { c.ahead.Add(int64(d)) }

// crawl lets so much time pass before each of the next readings of the clock, as on a machine that is
// overloaded.
func (c *madeUpClock) crawl(step time.Duration, readings int64) {
	c.step.Store(int64(step))
	c.steps.Store(readings)
}

// pollState is the aggressive state as the document's tests handle it.
type pollState struct {
	enter      func()
	record     func(outcome)
	sleep      func(time.Duration)
	aggressive func() bool
}

// onMachineAndProvider runs a test of the state machine on the machine alone, and on a Provider, where every
// outcome is a fetch that finds nothing, finds something, or fails. Both are on a clock of the test.
func onMachineAndProvider(t *testing.T, cfg Config, test func(*testing.T, *pollState)) {
	cfg.AggressivePolicy = OnEveryWake // troubleWake is the document's NotifyReceived
	t.Run("machine", func(t *testing.T) {
		a, now := newAggressive(&cfg), time.Now()
		test(t, &pollState{
			enter:      func() { a.enter(troubleWake, now) },
			record:     func(o outcome) { a.observe(o, now) },
			sleep:      func(d time.Duration) { now = now.Add(d) },
			aggressive: func() bool { _, active := a.poll(); return active },
		})
	})
	t.Run("provider", func(t *testing.T) {
		var clock madeUpClock
		cfg.clock = clock.now
		p := testProvider(t, cfg)
		test(t, &pollState{
			enter: func() { p.engine.enterAggressive(Orchestrator, troubleWake) },
			record: func(o outcome) {
				repair := func() {}
				switch o {
				case outcomeFound:
					orchestratorQueue.add(t, p, nil)
				case outcomeFailed:
					repair = breakFetches(p)
				}
				_, err := p.FetchOrchestrationItem(t.Context(), &FetchOptions{NoWait: true})
				repair()
				switch o {
				case outcomeFound:
					require.NoError(t, err)
				case outcomeEmpty:
					require.ErrorIs(t, err, ErrNoWork)
				case outcomeFailed:
					require.Error(t, err)
					require.NotErrorIs(t, err, ErrNoWork)
				}
			},
			sleep:      clock.pass,
			aggressive: func() bool { return p.Stats().Orchestrator.Aggressive },
		})
	})
}

// Document 004, 9: test_stays_aggressive_during_intermittent_errors.
func TestSource004_StaysAggressiveDuringIntermittentErrors(t *testing.T) {
	t.Parallel()
	cfg := Config{AggressiveDuration: 2 * time.Second, AggressiveInterval: 100 * time.Millisecond, AggressiveExitThreshold: 3}
	onMachineAndProvider(t, cfg, func(t *testing.T, s *pollState) {
		require.False(t, s.aggressive())
		s.enter()
		for range 2 {
			s.record(outcomeEmpty)
			s.record(outcomeFailed)
		}
		s.sleep(3 * time.Second)
		require.True(t, s.aggressive())
		// Two outcomes before each error are one too few, however late it is.
		for range 3 {
			s.record(outcomeEmpty)
			s.record(outcomeEmpty)
			s.record(outcomeFailed)
			require.True(t, s.aggressive())
			s.sleep(3 * time.Second)
		}
		// The errors are over.
		for range 3 {
			require.True(t, s.aggressive())
			s.record(outcomeEmpty)
		}
		require.False(t, s.aggressive())
	})
}

// Document 004, 10: test_exits_aggressive_after_consecutive_empty_successes.
func TestSource004_ExitsAggressiveAfterConsecutiveEmptySuccesses(t *testing.T) {
	t.Parallel()
	cfg := Config{AggressiveDuration: time.Minute, AggressiveInterval: 100 * time.Millisecond, AggressiveExitThreshold: 3}
	onMachineAndProvider(t, cfg, func(t *testing.T, s *pollState) {
		require.False(t, s.aggressive())
		s.enter()
		require.True(t, s.aggressive())
		s.sleep(2 * time.Minute)
		for range 3 {
			require.True(t, s.aggressive())
			s.record(outcomeEmpty)
		}
		require.False(t, s.aggressive())

		// Enough of them, but too early.
		s.enter()
		for range 10 {
			s.record(outcomeEmpty)
		}
		require.True(t, s.aggressive())
		s.sleep(2 * time.Minute)
		s.record(outcomeEmpty)
		require.False(t, s.aggressive())
	})
}

// Document 004, 11: test_stays_aggressive_while_processing_work.
func TestSource004_StaysAggressiveWhileProcessingWork(t *testing.T) {
	t.Parallel()
	cfg := Config{AggressiveDuration: time.Second, AggressiveInterval: 100 * time.Millisecond, AggressiveExitThreshold: 3}
	onMachineAndProvider(t, cfg, func(t *testing.T, s *pollState) {
		s.enter()
		s.sleep(2 * time.Second)
		s.record(outcomeFound)
		s.record(outcomeEmpty)
		s.record(outcomeFound)
		require.True(t, s.aggressive())
		for range 3 {
			s.record(outcomeEmpty)
			s.record(outcomeEmpty)
			s.record(outcomeFound)
			require.True(t, s.aggressive())
		}
	})
}

// Document 004, 11b: test_enters_aggressive_when_notify_delivery_times_out.
func TestSource004_EntersAggressiveWhenNotifyDeliveryTimesOut(t *testing.T) {
	t.Parallel()
	q := orchestratorQueue

	// A dispatcher waits, and takes the notification too late.
	t.Run("parked", func(t *testing.T) {
		const timeout = 50 * time.Millisecond
		var clock madeUpClock
		p := testProvider(t, Config{NotifyDeliveryTimeout: timeout, clock: clock.now})
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		require.False(t, q.stats(p).Aggressive)
		clock.crawl(timeout+1, 100)
		id, _ := q.insert(t, plain(t, p.cfg.Schema), 0)
		require.Equal(t, id, get(t, wait).rowID())
		require.EqualValues(t, 1, q.stats(p).Finds["notify"])
		require.True(t, q.stats(p).Aggressive)
		require.False(t, p.Stats().Worker.Aggressive)
		silentItemIsPolledFor(t, p, q)
	})

	// All dispatchers are busy, as the document has it: nothing is late, since the first query after the
	// handler finds the item. Time passes meanwhile.
	t.Run("busy", func(t *testing.T) {
		const timeout = 10 * time.Second // twice that is less than a lease
		var clock madeUpClock
		p := testProvider(t, Config{NotifyDeliveryTimeout: timeout, clock: clock.now})
		producer := plain(t, p.cfg.Schema)
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		q.insert(t, producer, 0)
		inHand := get(t, wait)
		id, _ := q.insert(t, producer, 0)
		eventually(t, "the notification is heard", func() bool { return q.stats(p).Tokens["notify"] == 2 })
		clock.pass(2 * timeout)
		looks := q.stats(p).Looks
		q.ack(t, p, inHand)
		require.Equal(t, id, get(t, q.fetch(t, p, longPoll)).rowID())
		require.EqualValues(t, 1, q.stats(p).Looks-looks)
		require.EqualValues(t, 1, q.stats(p).Finds["fetch"])
		require.False(t, q.stats(p).Aggressive)
	})
}

// Failure modes

// Document 004, 12: test_listener_reconnects_on_failure.
func TestSource004_ListenerReconnectsOnFailure(t *testing.T) {
	t.Parallel()
	// Never: after the loss the node would poll for a minute, and might be quicker than a push.
	p := testProvider(t, Config{AggressivePolicy: Never})
	producer := plain(t, p.cfg.Schema)
	waits := make(map[Queue]<-chan delivery)
	for _, q := range bothQueues {
		waits[q.Queue] = q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
	}
	mustExec(t, producer, `SELECT pg_terminate_backend($1)`, p.engine.listener.pid.Load())
	for _, q := range bothQueues {
		eventually(t, "it listens again", func() bool { return q.stats(p).Tokens["reconnect"] == 1 })
		awaitParked(t, p, q.Queue, 1) // having looked once
	}
	require.True(t, p.Stats().Listening)
	require.EqualValues(t, 1, p.Stats().Reconnects)
	require.True(t, p.Health().OK)
	for _, q := range bothQueues {
		id, _ := q.insert(t, producer, 0)
		require.Equal(t, id, get(t, waits[q.Queue]).rowID())
		require.EqualValues(t, 1, q.stats(p).Finds["notify"])
	}
	requireNoSafetyNet(t, p)
}

// Document 004, 13: test_falls_back_to_polling_on_listener_failure.
func TestSource004_FallsBackToPollingOnListenerFailure(t *testing.T) {
	t.Parallel()
	schema := testProvider(t, Config{}).cfg.Schema // migrated while all is well
	pool, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	listen := pool.ConnConfig
	dial, down := listen.DialFunc, atomic.Bool{}
	listen.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if down.Load() {
			return nil, errors.New("the test lets nobody listen")
		}
		return dial(ctx, network, address)
	}
	down.Store(true)
	p := testProvider(t, Config{Schema: schema, ListenConfig: listen})
	require.False(t, p.Stats().Listening)
	require.False(t, p.Health().OK)
	producer := plain(t, schema)
	for _, q := range bothQueues {
		require.True(t, q.stats(p).Aggressive)
		wait := q.fetch(t, p, longPoll)
		awaitParked(t, p, q.Queue, 1)
		id, _ := q.insert(t, producer, 0)
		require.Equal(t, id, get(t, wait).rowID())
		require.EqualValues(t, 1, q.stats(p).Finds["scout"])
		require.Zero(t, q.stats(p).Finds["notify"])
	}
	require.False(t, p.Stats().Listening)

	// It recovers by itself.
	down.Store(false)
	eventually(t, "it listens", func() bool { return p.Stats().Listening && p.Health().OK })
	for _, q := range bothQueues {
		for round := 0; q.stats(p).Finds["notify"] == 0; round++ {
			require.Less(t, round, 50, "a push was never quicker than a poll")
			wait := q.fetch(t, p, longPoll)
			awaitParked(t, p, q.Queue, 1)
			q.insert(t, producer, 0)
			get(t, wait)
		}
	}
}

// Backward compatibility

// Document 004, 14: test_default_provider_does_not_long_poll.
func TestSource004_DefaultProviderDoesNotLongPoll(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{DisableLongPoll: true}) // the document's default
	for n := int64(1); n <= 3; n++ {
		for _, q := range bothQueues {
			select {
			case d := <-q.fetch(t, p, longPoll): // which has a minute's patience
				require.ErrorIs(t, d.err, ErrNoWork)
			case <-time.After(patient):
				require.Fail(t, "the fetch waits")
			}
			require.Equal(t, n, q.stats(p).Looks)
		}
	}
	require.False(t, p.Stats().Listening)
	require.True(t, p.Health().OK)
	for _, q := range bothQueues {
		added := q.add(t, p, nil)
		require.Equal(t, added.ID, get(t, q.fetch(t, p, nil)).rowID())
	}
}

// Stress tests

// fanOut is the load of document 004: a number of instances at a time, of which each schedules activities
// and completes when all of them have answered.
type fanOut struct {
	instances     int           // at a time
	activities    int           // of each
	activity      time.Duration // how long one takes
	orchestrators int           // dispatchers
	workers       int
	idleSleep     time.Duration // of a dispatcher that found nothing; for short polling
}

var documentLoad = fanOut{instances: 20, activities: 5, activity: 10 * time.Millisecond, orchestrators: 4, workers: 4}

const answered = "answered"

// turn handles one turn, and reports the instance if that completed it.
func (load *fanOut) turn(ctx context.Context, p *Provider, completed chan<- string) error {
	turn, err := p.FetchOrchestrationItem(ctx, longPoll)
	if err != nil {
		return err
	}
	answers := make(map[string]bool)
	for _, e := range turn.History {
		if e.Type == answered {
			answers[string(e.Data)] = true
		}
	}
	ack := OrchestrationAck{Metadata: Metadata{Name: turn.Name}}
	for _, m := range turn.Messages {
		id := int64(len(turn.History) + len(ack.History) + 1)
		ack.History = append(ack.History, Event{ID: id, Type: string(m.Kind), Data: m.Data})
		if m.Kind == MessageStart {
			for n := range load.activities {
				ack.WorkItems = append(ack.WorkItems, WorkEnqueue{WorkItem: WorkItem{Name: "activity", Instance: turn.Instance, ActivityID: int64(n + 1)}})
			}
		} else {
			answers[string(m.Data)] = true
		}
	}
	done := len(answers) == load.activities
	if done {
		ack.Metadata.Status = StatusCompleted
	}
	if err := p.AckOrchestrationItem(ctx, turn.LockToken, ack); err != nil {
		return fmt.Errorf("instance %s: %w", turn.Instance, err)
	}
	if done {
		completed <- turn.Instance
	}
	return nil
}

// work executes one activity.
func (load *fanOut) work(ctx context.Context, p *Provider) error {
	item, err := p.FetchWorkItem(ctx, longPoll)
	if err != nil {
		return err
	}
	if item.Attempt != 1 {
		return fmt.Errorf("activity %d of %s: attempt %d", item.ActivityID, item.Instance, item.Attempt)
	}
	time.Sleep(load.activity)
	answer := &Message{Instance: item.Instance, Kind: answered, Data: []byte(strconv.FormatInt(item.ActivityID, 10))}
	return p.AckWorkItem(ctx, item.LockToken, answer)
}

// run starts instances for so long, waits for all of them to complete, and returns how many did, and how
// many a second. Any failure fails the test.
func (load *fanOut) run(t *testing.T, p *Provider, duration time.Duration) (completed int, perSecond float64) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var dispatchers sync.WaitGroup
	defer dispatchers.Wait()
	defer cancel()
	done := make(chan string, load.instances)
	failed := make(chan error, 1)
	dispatch := func(n int, one func() error) {
		for range n {
			dispatchers.Go(func() {
				for ctx.Err() == nil {
					err := one()
					switch {
					case err == nil || ctx.Err() != nil:
					case errors.Is(err, ErrNoWork):
						time.Sleep(load.idleSleep)
					default:
						select {
						case failed <- err:
						default:
						}
						return
					}
				}
			})
		}
	}
	dispatch(load.orchestrators, func() error { return load.turn(ctx, p, done) })
	dispatch(load.workers, func() error { return load.work(ctx, p) })

	started := 0
	start := func() {
		started++
		_, err := p.EnqueueForOrchestrator(ctx, Message{Instance: fmt.Sprintf("i-%d", started), Kind: MessageStart, Name: "fan-out"}, nil)
		require.NoError(t, err)
	}
	began := time.Now()
	for range load.instances {
		start()
	}
	seen := make(map[string]bool)
	for len(seen) < started {
		select {
		case instance := <-done:
			require.False(t, seen[instance], "%s completed twice", instance)
			seen[instance] = true
			if time.Since(began) < duration {
				start()
			}
		case err := <-failed:
			require.NoError(t, err)
		case <-time.After(patient):
			require.Fail(t, "instances do not complete", "%d of %d", started-len(seen), started)
		}
	}
	took := time.Since(began)
	cancel()
	dispatchers.Wait()
	select {
	case err := <-failed:
		require.NoError(t, err)
	default:
	}

	// The database agrees, and nothing is left over.
	var counts [4]int
	require.NoError(t, plain(t, p.cfg.Schema).QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM executions WHERE status = 'Completed'), (SELECT count(*) FROM history),
		       (SELECT count(*) FROM orchestrator_queue), (SELECT count(*) FROM worker_queue)`).
		Scan(&counts[0], &counts[1], &counts[2], &counts[3]))
	require.Equal(t, [4]int{started, started * (1 + load.activities), 0, 0}, counts)
	return started, float64(started) / took.Seconds()
}

// Document 004, 15: stress_test_long_poll_throughput.
func TestSource004_StressLongPollThroughput(t *testing.T) {
	const moment = 500 * time.Millisecond
	duration := stressTime(t, moment)
	if duration == moment {
		t.Parallel() // it runs alone only if somebody wants to know the figure
	}
	p := testProvider(t, Config{})
	load := documentLoad
	completed, perSecond := load.run(t, p, duration)
	require.Positive(t, completed)
	requireNoSafetyNet(t, p)
	t.Logf("%.1f orchestrations/s (%d)", perSecond, completed)
}

// Document 002, 9: Throughput.
func TestSource002_ThroughputNoRegressionAgainstShortPolling(t *testing.T) {
	duration := stressTime(t, 500*time.Millisecond)
	long, short := documentLoad, documentLoad
	short.idleSleep = 50 * time.Millisecond
	var longPolling, shortPolling float64
	// At the same time: what disturbs one disturbs the other.
	t.Run("polling", func(t *testing.T) {
		t.Run("long", func(t *testing.T) {
			t.Parallel()
			_, longPolling = long.run(t, testProvider(t, Config{}), duration)
		})
		t.Run("short", func(t *testing.T) {
			t.Parallel()
			_, shortPolling = short.run(t, testProvider(t, Config{DisableLongPoll: true}), duration)
		})
	})
	t.Logf("%.1f orchestrations/s; short polling every %v: %.1f", longPolling, short.idleSleep, shortPolling)
	// Both are bound by the workers, who are never idle, so they are alike. What the machine does meanwhile may be to one more than to
	// the other, within a second; the benchmarks compare them.
	require.Greater(t, longPolling, shortPolling/10)
}

// sentStatements counts what the library sends to the server, on all of its connections.
type sentStatements struct{ atomic.Int64 }

func (s *sentStatements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.Add(1)
	return ctx
}
func (s *sentStatements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *sentStatements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (s *sentStatements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
	s.Add(1)
}
func (s *sentStatements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// ownDatabase makes the configuration point to a new database, and returns what counts the statements that
// the server runs there; nil if the role may not make one, or the server has no pg_stat_statements.
func ownDatabase(t *testing.T, config *pgxpool.Config) (ran func() int64) {
	t.Helper()
	admin := plain(t, "public")
	name := strings.Replace(testdb.Schema(t), "test_", "test_idle_", 1)
	if _, err := admin.Exec(t.Context(), `CREATE DATABASE `+name+` TEMPLATE template0`); err != nil {
		t.Logf("no database of its own: %v", err)
		return nil
	}
	t.Cleanup(func() { testdb.Exec(t, testdb.URL(t), `DROP DATABASE `+name+` WITH (FORCE)`) })
	config.ConnConfig.Database = name
	there, err := pgx.ConnectConfig(t.Context(), config.ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = there.Close(context.Background()) })
	count := func() (n int64, err error) {
		err = there.QueryRow(t.Context(), `
			SELECT coalesce(sum(s.calls), 0)::bigint FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
			 WHERE d.datname = current_database() AND s.toplevel AND position('pg_stat_statements' IN s.query) = 0`).Scan(&n)
		return n, err
	}
	_, err = there.Exec(t.Context(), `CREATE EXTENSION pg_stat_statements`)
	if err == nil {
		_, err = count()
	}
	if err != nil {
		t.Logf("the server does not count: %v", err)
		return nil
	}
	return func() int64 {
		n, err := count()
		require.NoError(t, err)
		return n
	}
}

// Document 004, 16: stress_test_idle_query_load. Document 002, 10: Idle load.
func TestSource004_StressIdleQueryLoad(t *testing.T) {
	t.Parallel()
	const dispatchers = 4
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	ran := ownDatabase(t, config)
	sent := &sentStatements{}
	config.ConnConfig.Tracer = sent
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	opened := time.Now()
	p, err := New(t.Context(), pool, &Config{Schema: testdb.Schema(t), Logger: silent, NotifyDeliveryTimeout: patient})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })

	// They come back from their fetches all the time, and must not ask the database for it.
	ctx, cancel := context.WithCancel(t.Context())
	var idlers sync.WaitGroup
	defer idlers.Wait()
	defer cancel()
	var fetches atomic.Int64
	again := &FetchOptions{PollTimeout: 200 * time.Millisecond}
	for range dispatchers {
		idlers.Go(func() {
			for ctx.Err() == nil {
				_, _ = p.FetchOrchestrationItem(ctx, again)
				fetches.Add(1)
			}
		})
		idlers.Go(func() {
			for ctx.Err() == nil {
				_, _ = p.FetchWorkItem(ctx, again)
				fetches.Add(1)
			}
		})
	}
	awaitParked(t, p, Orchestrator, dispatchers)
	awaitParked(t, p, Worker, dispatchers)

	idle := stressTime(t, 2*time.Second)
	fetchesBefore, sentBefore := fetches.Load(), sent.Load()
	var ranBefore int64
	if ran != nil {
		ranBefore = ran()
	}
	time.Sleep(idle) // this is what is measured
	// One a minute, the fallback, and nothing else.
	statements := sent.Load() - sentBefore
	require.LessOrEqual(t, statements, int64(time.Since(opened)/time.Minute), "sent by the library")
	if ran != nil {
		counted := ran() - ranBefore
		require.LessOrEqual(t, counted, int64(time.Since(opened)/time.Minute), "counted by the server")
	}
	require.Greater(t, fetches.Load()-fetchesBefore, int64(2*dispatchers))
	t.Logf("%d statements in %v: %.3f a second; short polling every 50 ms: 160", statements, idle, float64(statements)/idle.Seconds())
}
