package pgwake

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patient bounds what must come by push or timer. It is far from both the fallback (60 s) and the
// milliseconds that it takes: a test that waits so long has lost a wake-up.
const patient = 20 * time.Second

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// testProvider opens a Provider on the schema of cfg, or on a fresh one. Unless cfg says how soon a notification must be
// taken up, a machine that stands still is no trouble: it would make the queue poll, and counts of queries differ.
// BorrowSchema is that of testschema.Core, which imports this package.
var BorrowSchema func(testing.TB) string

func testProvider(t *testing.T, cfg Config) *Provider {
	t.Helper()
	if cfg.Schema == "" {
		cfg.Schema = BorrowSchema(t)
	}
	if cfg.Logger == nil {
		cfg.Logger = silent
	}
	if cfg.NotifyDeliveryTimeout == 0 {
		cfg.NotifyDeliveryTimeout = patient
	}
	p, err := Open(t.Context(), testdb.URL(t), &cfg)
	require.NoError(t, err)
	// One that is to listen and could not at the first attempt, which is for a machine that stands still, would poll for a minute.
	ordinary := cfg.ListenConfig == nil && cfg.HibernateAfter == 0 && cfg.fault == nil && p.engine.listener != nil && !p.engine.listener.rests()
	for try := 0; try < 3 && ordinary && (p.engine.epoch() == 0 || p.engine.isAggressive(Worker)); try++ {
		require.NoError(t, p.Close(t.Context()))
		p, err = Open(t.Context(), testdb.URL(t), &cfg)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patient)
		defer cancel()
		require.NoError(t, p.Close(ctx))
	})
	return p
}

// plain is a connection that knows nothing of the library: a producer in any language.
func plain(t *testing.T, schema string) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func mustExec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// delivery is what a dispatcher of a test got.
type delivery struct {
	item *ClaimedWorkItem
	turn *OrchestrationItem
	err  error
	at   time.Time
}

// fetchWork starts one fetch and returns the channel for its outcome.
func fetchWork(t *testing.T, p *Provider, o *FetchOptions) <-chan delivery {
	t.Helper()
	out := make(chan delivery, 1)
	ctx := t.Context()
	go func() {
		item, err := p.FetchWorkItem(ctx, o)
		out <- delivery{item: item, err: err, at: time.Now()}
	}()
	return out
}

func fetchTurn(t *testing.T, p *Provider, o *FetchOptions) <-chan delivery {
	t.Helper()
	out := make(chan delivery, 1)
	ctx := t.Context()
	go func() {
		turn, err := p.FetchOrchestrationItem(ctx, o)
		out <- delivery{turn: turn, err: err, at: time.Now()}
	}()
	return out
}

// get waits for a delivery that must come.
func get(t *testing.T, from <-chan delivery) delivery {
	t.Helper()
	select {
	case d := <-from:
		require.NoError(t, d.err)
		return d
	case <-time.After(patient):
		require.Fail(t, "no delivery: a wake-up was lost")
		return delivery{}
	}
}

// eventually waits for a condition of the engine.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, patient, time.Millisecond, what)
}

// awaitParked waits until n dispatchers of the queue wait.
func awaitParked(t *testing.T, p *Provider, q Queue, n int) {
	t.Helper()
	eventually(t, "dispatchers are parked", func() bool {
		w := p.engine.waiters
		return w.parked(q) == n && (p.engine.epoch() == 0 || w.settled(q)) && w.parked(q) == n
	})
}

// somebodyWaits has producers notify, as if the connection were a node's that wants to hear everything.
func somebodyWaits(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	mustExec(t, conn, `SELECT listen_session(1, 1, true)`)
}

// requireNoSafetyNet asserts that everything so far was found because it was announced.
func requireNoSafetyNet(t *testing.T, p *Provider) {
	t.Helper()
	s := p.Stats()
	for _, q := range []QueueStats{s.Orchestrator, s.Worker} {
		require.Zero(t, q.FallbackFinds, "fallback_finds")
		require.Zero(t, q.ScoutFinds, "scout finds")
	}
}

var longPoll = &FetchOptions{PollTimeout: time.Minute}

func TestFetch_SingleItem_CostsOneQuery(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	var waits []<-chan delivery
	for range 4 {
		waits = append(waits, fetchWork(t, p, longPoll))
	}
	awaitParked(t, p, Worker, 4)
	before := p.Stats().Worker.Looks

	mustExec(t, producer, `SELECT enqueue_work('one')`)
	merged := make(chan delivery, 4)
	for _, w := range waits {
		go func() { merged <- <-w }()
	}
	d := get(t, merged)
	require.Equal(t, "one", d.item.Name)
	awaitParked(t, p, Worker, 3)
	require.EqualValues(t, 1, p.Stats().Worker.Looks-before)

	// The answer said that nothing was left: the next fetch waits without asking.
	require.NoError(t, p.AckWorkItem(t.Context(), d.item.LockToken, nil))
	fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 4)
	require.EqualValues(t, 1, p.Stats().Worker.Looks-before)
	requireNoSafetyNet(t, p)
}

func TestFetch_KnownEmptyLane_ManyShortFetchesAskOnce(t *testing.T) {
	p := testProvider(t, Config{})
	idle := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	looks := p.Stats().Worker.Looks
	for i := range 50 {
		_, err := p.FetchWorkItem(t.Context(), &FetchOptions{PollTimeout: 2 * time.Millisecond})
		require.ErrorIs(t, err, ErrNoWork)
		require.EqualValues(t, looks, p.Stats().Worker.Looks, "after fetch %d", i)
	}
	// A fetch that does not wait has nothing to be woken by, so it asks.
	_, err := p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true})
	require.ErrorIs(t, err, ErrNoWork)
	require.EqualValues(t, looks+1, p.Stats().Worker.Looks)
	require.Empty(t, idle)
}

func TestFetch_PollTimeout_IsNeverCutShort(t *testing.T) {
	p := testProvider(t, Config{})
	for _, timeout := range []time.Duration{time.Millisecond, 50 * time.Millisecond, 300 * time.Millisecond} {
		began := time.Now()
		_, err := p.FetchOrchestrationItem(t.Context(), &FetchOptions{PollTimeout: timeout})
		require.ErrorIs(t, err, ErrNoWork)
		require.GreaterOrEqual(t, time.Since(began), timeout)
	}
}

func TestFetch_LongPollDisabled_AsksAndReturnsAtOnce(t *testing.T) {
	p := testProvider(t, Config{DisableLongPoll: true})
	for i := range int64(3) {
		_, err := p.FetchWorkItem(t.Context(), longPoll)
		require.ErrorIs(t, err, ErrNoWork)
		require.Equal(t, i+1, p.Stats().Worker.Looks)
	}
	require.False(t, p.Stats().Listening)
}

// A burst wakes the dispatchers by a chain, one token each and a few to wind down, not one per item.
func TestWakeChain_BurstOf100On4Dispatchers_UsesAFewTokens(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	done := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 4)
	for range 4 {
		go func() {
			for {
				item, err := p.FetchWorkItem(ctx, longPoll)
				if err == nil {
					err = p.AckWorkItem(ctx, item.LockToken, nil)
					done <- struct{}{}
				}
				if err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	awaitParked(t, p, Worker, 4)
	mustExec(t, producer, `SELECT enqueue_work_many(array_agg('n' || i), NULL) FROM generate_series(1, 100) i`)
	for range 100 {
		select {
		case <-done:
		case <-time.After(patient):
			require.Fail(t, "the burst was not drained")
		}
	}
	awaitParked(t, p, Worker, 4)
	cancel()
	for range 4 {
		require.ErrorIs(t, <-ended, context.Canceled)
	}
	s := p.Stats().Worker
	tokens := int64(0)
	for _, n := range s.Tokens {
		tokens += n
	}
	require.LessOrEqual(t, tokens, int64(16), "tokens: %v", s.Tokens)
	require.EqualValues(t, 1, s.Tokens["notify"])
	requireNoSafetyNet(t, p)
}

// A wake-up for one lane must reach that lane, and leave the others alone.
func TestLanes_ItemOfOneNamespace_WakesOnlyWhoServesIt(t *testing.T) {
	p := testProvider(t, Config{})
	producer := plain(t, p.cfg.Schema)
	red := fetchWork(t, p, &FetchOptions{PollTimeout: time.Minute, Namespaces: []string{"red"}})
	blue := fetchWork(t, p, &FetchOptions{PollTimeout: time.Minute, Namespaces: []string{"blue", "default"}})
	awaitParked(t, p, Worker, 2)
	before := p.Stats().Worker.Looks
	mustExec(t, producer, `SELECT enqueue_work('a', p_namespace => 'red')`)
	require.Equal(t, "red", get(t, red).item.Namespace)
	require.EqualValues(t, 1, p.Stats().Worker.Looks-before)
	require.Len(t, blue, 0)

	// One statement with several namespaces calls everyone whom it may concern.
	red = fetchWork(t, p, &FetchOptions{PollTimeout: time.Minute, Namespaces: []string{"red"}})
	awaitParked(t, p, Worker, 2)
	mustExec(t, producer, `SELECT enqueue_work_many('{a,b}', NULL, '{red,blue}')`)
	require.Equal(t, "red", get(t, red).item.Namespace)
	require.Equal(t, "blue", get(t, blue).item.Namespace)
	requireNoSafetyNet(t, p)
}

func TestLocalEnqueue_WakesThisNodeAndTellsTheOthers(t *testing.T) {
	here := testProvider(t, Config{})
	there := testProvider(t, Config{Schema: here.cfg.Schema})
	for i := range 5 {
		near, far := fetchWork(t, here, longPoll), fetchWork(t, there, longPoll)
		awaitParked(t, here, Worker, 1)
		awaitParked(t, there, Worker, 1)
		added, err := here.EnqueueForWorkerMany(t.Context(), []WorkEnqueue{
			{WorkItem: WorkItem{Name: "a"}}, {WorkItem: WorkItem{Name: "b"}}})
		require.NoError(t, err)
		require.Len(t, added, 2)
		got := []string{get(t, near).item.Name, get(t, far).item.Name}
		require.ElementsMatch(t, []string{"a", "b"}, got, "round %d", i)
	}
	require.Positive(t, here.Stats().Worker.Finds["local"])
	require.Positive(t, there.Stats().Worker.Finds["notify"])
	requireNoSafetyNet(t, here)
	requireNoSafetyNet(t, there)
}

// The notification that a node sends on its own account must not wake it a second time.
func TestLocalEnqueue_OwnEcho_IsNotHeard(t *testing.T) {
	p := testProvider(t, Config{})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "a"}, nil)
	require.NoError(t, err)
	get(t, wait)
	// Another node's notification is behind the echo in the server's queue, so the echo has come by now.
	wait = fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('b')`)
	get(t, wait)
	s := p.Stats().Worker
	require.EqualValues(t, 1, s.Tokens["local"])
	require.EqualValues(t, 1, s.Tokens["notify"])
}

// A batch that got all that it asked for has not looked what is left. Somebody does, and so learns of the timer.
func TestFetchWorkItems_FullBatch_AnotherLooksWhatIsLeft(t *testing.T) {
	for _, o := range []FetchOptions{{}, {Namespaces: []string{DefaultNamespace}}} {
		p := testProvider(t, Config{})
		const batch = 10
		o.PollTimeout = 10 * time.Second
		waits := make(chan []*ClaimedWorkItem, 2)
		for range 2 {
			go func() {
				items, err := p.FetchWorkItems(t.Context(), batch, &o)
				assert.NoError(t, err)
				waits <- items
			}()
		}
		eventually(t, "both wait for a token", func() bool { s := p.Stats().Worker; return s.Parked == 2 && s.Settled })
		// At once, so that the batch comes before the timer.
		mustExec(t, plain(t, p.cfg.Schema), fmt.Sprintf(`SET pgwake.notify = off; SELECT enqueue_work('later', p_delay => '1 s');
			RESET pgwake.notify; SELECT enqueue_work('now') FROM generate_series(1, %d)`, batch))
		require.Len(t, <-waits, batch)
		later := <-waits
		require.Len(t, later, 1)
		require.Equal(t, "later", later[0].Name)
		require.EqualValues(t, 1, p.Stats().Worker.Tokens["chain"])
		requireNoSafetyNet(t, p)
	}
}

// A batch does not try what a transaction that is under way has locked. One that was rolled back leaves its mark on the row.
func TestFetchWorkItems_OthersHadLockedIt_IsInItsPlace(t *testing.T) {
	p := testProvider(t, Config{})
	sql := plain(t, p.cfg.Schema)
	mustExec(t, sql, `SELECT enqueue_work('locked'), enqueue_work('freed')`)
	mustExec(t, sql, `SELECT enqueue_work('later') FROM generate_series(1, 20)`)
	for _, end := range []string{"COMMIT", "ROLLBACK"} {
		other := plain(t, p.cfg.Schema)
		mustExec(t, other, "BEGIN")
		mustExec(t, other, `SELECT FROM worker_queue WHERE name = 'freed' FOR UPDATE`)
		if end == "ROLLBACK" {
			mustExec(t, other, `DELETE FROM worker_queue WHERE name = 'freed'`)
		}
		mustExec(t, other, end)
	}
	mustExec(t, sql, "BEGIN")
	mustExec(t, sql, `SELECT FROM worker_queue WHERE name = 'locked' FOR UPDATE`)
	items, err := p.FetchWorkItems(t.Context(), 10, &FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Len(t, items, 10)
	require.Equal(t, "freed", items[0].Name)
	mustExec(t, sql, "ROLLBACK")
	items, err = p.FetchWorkItems(t.Context(), 20, &FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Len(t, items, 12)
	require.Equal(t, "locked", items[0].Name)
}

func TestFallback_ItemThatNobodyAnnounced_IsFoundAndCounted(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: 300 * time.Millisecond})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	// Of what has just become due somebody may be on the way to tell.
	silently(t, plain(t, p.cfg.Schema), `INSERT INTO worker_queue (name, visible_at) VALUES ('quiet', clock_timestamp() - interval '1 minute')`)
	require.Equal(t, "quiet", get(t, wait).item.Name)
	require.EqualValues(t, 1, p.Stats().Worker.Finds["fallback"])
	eventually(t, "the find is counted", func() bool { return p.Stats().Worker.FallbackFinds == 1 })
}

// A schema that is restored, or a table that is emptied by hand, while a node listens: nobody would notify it any more, and so all of its items would
// be found by the fallback alone.
func TestFallback_RowsOfTheNodeAreGone_ListensAnew(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: 300 * time.Millisecond})
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	conn := plain(t, p.cfg.Schema)
	rows := func(lanes string) (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM waiters WHERE node = $1 AND lane `+lanes, p.engine.node).Scan(&n))
		return n
	}
	eventually(t, "the lane is armed", func() bool { return rows("> 0 AND armed") == 1 })
	mustExec(t, conn, `TRUNCATE waiters`)
	eventually(t, "the node has its row again", func() bool { return rows("= 0") == 1 })
	eventually(t, "and its lane", func() bool { return rows("> 0 AND armed") == 1 })
	require.EqualValues(t, 1, p.Stats().Reconnects)
	mustExec(t, conn, `SELECT enqueue_work('heard')`)
	require.NoError(t, get(t, wait).err)
}

// The server has become a standby of another one, or is about to be stopped for that, and has kept its sessions.
func TestReadOnlyServer_SessionsThatAreLeft_AreGivenUp(t *testing.T) {
	const turnsReadOnly = `SELECT pg_catalog.set_config('default_transaction_read_only', 'on', false)`
	p := testProvider(t, Config{FallbackInterval: 300 * time.Millisecond})
	var said string
	require.NoError(t, p.engine.exec(t.Context(), &said, turnsReadOnly))
	eventually(t, "it listens anew", func() bool { return p.Stats().Reconnects == 1 && p.Stats().Listening })

	readOnly := func() {
		p.mu.Lock()
		p.lastReset = time.Time{}
		p.mu.Unlock()
		eventually(t, "nobody uses a connection", func() bool { s := p.pool.Stat(); return s.AcquiredConns()+s.ConstructingConns() == 0 })
		conns := p.pool.AcquireAllIdle(t.Context())
		require.NotEmpty(t, conns)
		for _, conn := range conns {
			require.NoError(t, conn.QueryRow(t.Context(), turnsReadOnly).Scan(&said))
			conn.Release()
		}
	}
	for name, verb := range map[string]func() error{
		"enqueue": func() error { _, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "w"}, nil); return err },
		"fetch":   func() error { _, err := p.FetchWorkItem(t.Context(), longPoll); return err },
	} {
		require.NoError(t, p.RegisterNamespace(t.Context(), "another"), "which makes a connection")
		readOnly()
		if name == "fetch" {
			mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('w')`)
		}
		err := verb()
		var failure *Error
		require.ErrorAs(t, err, &failure, name)
		require.Equal(t, "25006", failure.SQLState, name)
		require.True(t, failure.Retryable, name)
		require.NoError(t, verb(), name)
	}
}

// What a node asks for many namespaces takes its time, and the connection has not lost its peer for that.
func TestFallback_ManyNamespaces_MayTakeLonger(t *testing.T) {
	t.Parallel()
	p := testProvider(t, Config{FallbackInterval: 300 * time.Millisecond})
	o := *longPoll
	for i := range 4000 {
		o.Namespaces = append(o.Namespaces, fmt.Sprint("n", i))
	}
	wait := fetchWork(t, p, &o)
	awaitParked(t, p, Worker, 1)
	conn := plain(t, p.cfg.Schema)
	mustExec(t, conn, fmt.Sprintf(`DO $do$ BEGIN EXECUTE replace(pg_get_functiondef('look'::regproc), '-- First,', 'PERFORM pg_sleep(%v); -- First,'); END $do$`,
		(answerDeadline+time.Second).Seconds()))
	began := p.Stats()
	mustExec(t, conn, `SELECT set_config('pgwake.notify', 'off', false), enqueue_work('quiet', p_namespace => 'n7')`)
	select { // the statement that is under way may have begun before
	case d := <-wait:
		require.NoError(t, d.err)
		require.Equal(t, "quiet", d.item.Name)
	case <-time.After(4 * patient):
		require.Fail(t, "the fallback has not found it")
	}
	require.Equal(t, began.Reconnects, p.Stats().Reconnects)
}

func TestFallback_SwitchedOff_WakesNobody(t *testing.T) {
	for name, cfg := range map[string]Config{
		"mode":   {Mode: ModeEventDriven, FallbackInterval: 100 * time.Millisecond},
		"option": {FallbackEnabled: new(false), FallbackInterval: 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			p := testProvider(t, cfg)
			wait := fetchWork(t, p, longPoll)
			awaitParked(t, p, Worker, 1)
			producer := plain(t, p.cfg.Schema)
			mustExec(t, producer, `SELECT set_config('pgwake.notify', 'off', false), enqueue_work('quiet')`)
			began := p.Stats().Fallbacks
			eventually(t, "the keep-alive runs", func() bool { return p.Stats().Fallbacks >= began+3 })
			require.Len(t, wait, 0)
			mustExec(t, producer, `SELECT set_config('pgwake.notify', '', false), enqueue_work('loud')`)
			require.Equal(t, "quiet", get(t, wait).item.Name)
		})
	}
}

// ModePolling costs a poll per interval and queue, not per dispatcher, and meets timers exactly.
func TestPolling_EightDispatchers_AskOnceAnInterval(t *testing.T) {
	const interval = 500 * time.Millisecond // if a poll is late by another, the dispatchers rightly ask themselves, that time
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: interval})
	require.False(t, p.Stats().Listening)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	items := make(chan *ClaimedWorkItem, 8)
	ended := make(chan struct{}, 8)
	for range 8 {
		go func() {
			defer func() { ended <- struct{}{} }()
			for ctx.Err() == nil {
				item, err := p.FetchWorkItem(ctx, &FetchOptions{PollTimeout: 50 * time.Millisecond})
				if err == nil {
					items <- item
				}
			}
		}()
	}
	eventually(t, "all have asked once", func() bool { return p.Stats().Worker.Looks >= 8 })
	eventually(t, "the dispatchers do not poll on their own account", func() bool {
		before, began := p.Stats().Worker.Looks, time.Now()
		eventually(t, "polls", func() bool { return p.Stats().Worker.Looks >= before+6 })
		return time.Since(began) >= 3*interval
	})

	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('polled')`)
	select {
	case item := <-items:
		require.Equal(t, "polled", item.Name)
	case <-time.After(patient):
		require.Fail(t, "the scout did not find the item")
	}
	cancel()
	for range 8 {
		<-ended
	}
}

// A panic in any goroutine of the engine costs a pause, not the wake-ups.
func TestAggressive_OnEveryWake_ItsOwnPollsDoNotKeepItUp(t *testing.T) {
	p := testProvider(t, Config{AggressivePolicy: OnEveryWake, AggressiveDuration: 2 * time.Second, AggressiveExitThreshold: 1})
	first, second := fetchWork(t, p, longPoll), fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 2)
	eventually(t, "it has settled", func() bool { return !p.Stats().Worker.Aggressive })
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('w')`)
	select {
	case <-first:
	case <-second:
	}
	require.True(t, p.Stats().Worker.Aggressive)
	eventually(t, "the polling ends", func() bool { return !p.Stats().Worker.Aggressive })
}

func TestEngine_PanicInAnyGoroutine_IsSurvived(t *testing.T) {
	for _, point := range []string{"timer", "coalescer", "listener"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			bomb := make(chan struct{}, 1)
			p := testProvider(t, Config{fault: func(at string) {
				if at == point {
					select {
					case <-bomb:
						panic("injected")
					default:
					}
				}
			}})
			wait := fetchWork(t, p, longPoll)
			awaitParked(t, p, Worker, 1)
			bomb <- struct{}{}
			producer := plain(t, p.cfg.Schema)
			mustExec(t, producer, `SELECT enqueue_work('pushed')`)
			get(t, wait)
			_, err := p.EnqueueForWorker(t.Context(), WorkItem{Name: "local"}, &EnqueueOptions{Delay: 20 * time.Millisecond})
			require.NoError(t, err)
			require.Equal(t, "local", get(t, fetchWork(t, p, longPoll)).item.Name)
			eventually(t, "the goroutine is back", func() bool {
				return p.Stats().Panics == 1 && p.Health().OK
			})
		})
	}
}

// awaitLine reads until a line of the output is the wanted one.
func awaitLine(t *testing.T, out io.Reader, want string) {
	t.Helper()
	found := make(chan bool, 1)
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			if s.Text() == want {
				found <- true
				return
			}
		}
		found <- false
	}()
	select {
	case ok := <-found:
		require.True(t, ok, "the process ended without saying %q", want)
	case <-time.After(time.Minute):
		require.Fail(t, "the process did not say "+want)
	}
}
