package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

const patience = 20 * time.Second

// running runs a Dispatcher, or an Orchestrator, until the test ends.
func running(t *testing.T, d interface{ Run(context.Context) error }) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	stopped := false
	stop = func() error {
		stopped = true
		cancel()
		return awaited(t, ended, 3*patience)
	}
	t.Cleanup(func() {
		if !stopped {
			require.NoError(t, stop())
		}
	})
	return stop
}

// await returns what must come. A test that waits in vain says so, and who waits for whom, rather than not end.
func await[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	return awaited(t, from, patience)
}

func awaited[T any](t *testing.T, from <-chan T, patience time.Duration) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(patience):
		stacks := make([]byte, 1<<20)
		require.FailNow(t, "it does not come", "%s", stacks[:runtime.Stack(stacks, true)])
	}
	return v
}

func enqueue(t *testing.T, p *pgwake.Provider, n int, item pgwake.WorkItem) {
	t.Helper()
	items := make([]pgwake.WorkEnqueue, n)
	for i := range items {
		items[i].WorkItem = item
		if item.Input == nil {
			items[i].Input = json.RawMessage(fmt.Sprint(i))
		}
	}
	_, err := p.EnqueueForWorkerMany(t.Context(), items)
	require.NoError(t, err)
}

// depth is how much of the queues is queued, and claimed.
func depth(t *testing.T, p *pgwake.Provider) (all, leased int64) {
	t.Helper()
	depths, err := p.GetQueueDepths(t.Context())
	require.NoError(t, err)
	for _, d := range depths {
		all += d.Due + d.Delayed + d.Leased
		leased += d.Leased
	}
	return all, leased
}

// awaitEmpty waits until the queues are empty.
func awaitEmpty(t *testing.T, p *pgwake.Provider) {
	t.Helper()
	require.Eventually(t, func() bool { all, _ := depth(t, p); return all == 0 }, patience, 10*time.Millisecond)
}

// raise has most be n at the least.
func raise(most *atomic.Int64, n int64) {
	for before := most.Load(); before < n && !most.CompareAndSwap(before, n); before = most.Load() {
	}
}

func TestT59_BurstAndSlowHandlers_ClaimsStopAtCapacity_NothingIsDropped(t *testing.T) {
	p := testschema.Core.New(t, nil)
	const places = 4
	items := testsize.Of(2_000, 10_000)
	enqueue(t, p, items, pgwake.WorkItem{Name: "slow"})
	var done, most, now atomic.Int64
	gate := make(chan struct{})
	d := dispatch.New(p, &dispatch.Config{Concurrency: places})
	dispatch.Handle(d, "slow", func(ctx context.Context, n int) (struct{}, error) {
		raise(&most, now.Add(1))
		defer now.Add(-1)
		if done.Add(1) <= places {
			<-gate
		}
		return struct{}{}, nil
	})
	running(t, d)
	require.Eventually(t, func() bool { return now.Load() == places }, patience, 10*time.Millisecond)
	all, leased := depth(t, p)
	require.EqualValues(t, items, all)
	require.EqualValues(t, places, leased, "the others stay there for other processes")
	close(gate)
	awaitEmpty(t, p)
	require.EqualValues(t, items, done.Load(), "each once")
	require.LessOrEqual(t, most.Load(), int64(places))
}

func TestT60_StopWithItemsInFlight_NoNewClaims_WhatRunsEndsOrIsReturned(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, 10, pgwake.WorkItem{Name: "work"})
	begun := make(chan int, 10)
	finish := make(chan struct{})
	d := dispatch.New(p, &dispatch.Config{Concurrency: 2, StopTimeout: 100 * time.Millisecond})
	dispatch.Handle(d, "work", func(ctx context.Context, n int) (struct{}, error) {
		begun <- n
		if n == 0 {
			<-finish
			return struct{}{}, nil
		}
		<-ctx.Done() // for longer than it may
		return struct{}{}, context.Cause(ctx)
	})
	stop := running(t, d)
	await(t, begun)
	await(t, begun)
	close(finish)
	require.NoError(t, stop())
	// The first is done; another was begun in its place, perhaps; all others are there for anybody at once.
	items, err := p.FetchWorkItems(t.Context(), 20, &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.Len(t, items, 9)
	for _, item := range items {
		require.Equal(t, 1, item.Attempt, "an attempt that the end cut short does not count")
	}
}

func TestT62_HandlerPanicsOrTimesOut_RetryRuleApplies_WorkerSurvives(t *testing.T) {
	p := testschema.Core.New(t, nil)
	var panics, timeouts, after atomic.Int64
	d := dispatch.New(p, &dispatch.Config{Concurrency: 1, MaxAttempts: 2, Retry: func(int, error) time.Duration { return time.Millisecond }})
	dispatch.Handle(d, "panics", func(context.Context, int) (struct{}, error) {
		panics.Add(1)
		panic("oh")
	})
	dispatch.Handle(d, "hangs", func(ctx context.Context, _ int) (struct{}, error) {
		timeouts.Add(1)
		<-ctx.Done()
		return struct{}{}, ctx.Err()
	}, dispatch.WithTimeout(10*time.Millisecond))
	dispatch.Handle(d, "fine", func(context.Context, int) (struct{}, error) { after.Add(1); return struct{}{}, nil })
	running(t, d)
	for _, name := range []string{"panics", "hangs", "fine"} {
		enqueue(t, p, 1, pgwake.WorkItem{Name: name})
	}
	awaitEmpty(t, p)
	require.Equal(t, []int64{2, 2, 1}, []int64{panics.Load(), timeouts.Load(), after.Load()})
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 2)
	for _, l := range letters {
		require.Equal(t, dispatch.ReasonMaxAttempts, l.Reason)
		require.Equal(t, 2, l.Attempts)
		switch l.Name {
		case "panics":
			require.Contains(t, l.Error, "panic: oh")
			require.Contains(t, l.Error, "dispatch_test.go", "its stack")
		case "hangs":
			require.Contains(t, l.Error, dispatch.ErrTimeout.Error())
		}
	}
}

func TestHandleTx_EffectsAndAckAreOneTransaction(t *testing.T) {
	p := testschema.Core.New(t, nil)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer pool.Close()
	table := fmt.Sprintf("effects_%d", time.Now().UnixNano())
	_, err = pool.Exec(t.Context(), `CREATE TABLE `+table+` (n integer)`)
	require.NoError(t, err)
	defer pool.Exec(context.Background(), `DROP TABLE `+table)
	var calls atomic.Int64
	d := dispatch.New(p, &dispatch.Config{Begin: pool.Begin, Retry: func(int, error) time.Duration { return 0 }})
	dispatch.HandleTx(d, "insert", func(ctx context.Context, tx pgx.Tx, n int) (struct{}, error) {
		if _, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1)`, n); err != nil {
			return struct{}{}, err
		}
		if calls.Add(1)%3 == 0 {
			return struct{}{}, errors.New("after its effect")
		}
		if dispatch.ItemFrom(ctx).Name != "insert" {
			return struct{}{}, dispatch.Permanent(errors.New("no item"))
		}
		return struct{}{}, nil
	})
	running(t, d)
	enqueue(t, p, 100, pgwake.WorkItem{Name: "insert"})
	awaitEmpty(t, p)
	var rows, distinct int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT n) FROM `+table).Scan(&rows, &distinct))
	require.Equal(t, []int{100, 100}, []int{rows, distinct})
	require.Greater(t, calls.Load(), int64(100))
}

// Nobody can take back what a handler has committed itself: it is not called again.
func TestHandleTx_HandlerCommits_IsNotTriedAgain(t *testing.T) {
	p := testschema.Core.New(t, nil)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer pool.Close()
	var calls atomic.Int64
	d := dispatch.New(p, &dispatch.Config{Begin: pool.Begin, Retry: func(int, error) time.Duration { return 0 }})
	dispatch.HandleTx(d, "commit", func(ctx context.Context, tx pgx.Tx, _ struct{}) (struct{}, error) {
		calls.Add(1)
		return struct{}{}, tx.Commit(ctx)
	})
	running(t, d)
	enqueue(t, p, 1, pgwake.WorkItem{Name: "commit", Input: json.RawMessage("{}")})
	awaitEmpty(t, p)
	require.EqualValues(t, 1, calls.Load())
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
}

// A result that no orchestration waits for is nobody's business.
func TestHandle_ResultCannotBeEncoded_ItemIsDone(t *testing.T) {
	p := testschema.Core.New(t, nil)
	d := dispatch.New(p, nil)
	dispatch.Handle(d, "w", func(context.Context, struct{}) (float64, error) { return math.NaN(), nil })
	running(t, d)
	enqueue(t, p, 1, pgwake.WorkItem{Name: "w", Input: json.RawMessage("{}")})
	awaitEmpty(t, p)
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, letters)
}

func TestHandleTx_LeaseIsLostMeanwhile_NothingHappens(t *testing.T) {
	p := testschema.Core.New(t, nil)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer pool.Close()
	table := fmt.Sprintf("effects_lost_%d", time.Now().UnixNano())
	_, err = pool.Exec(t.Context(), `CREATE TABLE `+table+` (n integer)`)
	require.NoError(t, err)
	defer pool.Exec(context.Background(), `DROP TABLE `+table)
	first := true
	d := dispatch.New(p, &dispatch.Config{Concurrency: 1, Begin: pool.Begin})
	dispatch.HandleTx(d, "insert", func(ctx context.Context, tx pgx.Tx, n int) (struct{}, error) {
		if first { // somebody gives it back behind our back
			first = false
			require.NoError(t, p.AbandonWorkItem(ctx, dispatch.ItemFrom(ctx).LockToken, nil))
		}
		_, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1)`, n)
		return struct{}{}, err
	})
	running(t, d)
	enqueue(t, p, 1, pgwake.WorkItem{Name: "insert"})
	awaitEmpty(t, p)
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table).Scan(&rows))
	require.Equal(t, 1, rows)
}

// One statement has the effect and acknowledges the item. Handlers fail afterwards, or before, and answers are lost.
func TestAckBy_EffectsAndAckAreOneStatement(t *testing.T) {
	p := testschema.Core.New(t, nil)
	effects, ack := pgx.Identifier{p.Schema(), "effects"}.Sanitize(), pgx.Identifier{p.Schema(), "ack_work"}.Sanitize()
	_, err := p.Pool().Exec(t.Context(), `CREATE TABLE `+effects+` (n integer)`)
	require.NoError(t, err)
	var calls, done, retried atomic.Int64
	d := dispatch.New(p, &dispatch.Config{Retry: func(int, error) time.Duration { return 0 }, OnEnd: func(e dispatch.Ended) {
		switch e.Outcome {
		case dispatch.Done:
			done.Add(1)
		case dispatch.Retried:
			retried.Add(1)
		case dispatch.GivenBack: // claimed ahead, and not begun
		default:
			t.Errorf("%s: %v", e.Outcome, e.Err)
		}
	}})
	dispatch.Handle(d, "insert", func(ctx context.Context, n int) (struct{}, error) {
		call := calls.Add(1)
		err := dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
			id, claim, err := token.WorkItem()
			if err != nil || call%5 == 1 {
				return errors.Join(errors.New("before its effect"), err)
			}
			err = p.Do(ctx, "insert", func(ctx context.Context, q pgwake.Querier) error {
				_, err := q.Exec(ctx, `WITH effect AS (INSERT INTO `+effects+` VALUES ($3)) SELECT `+ack+`($1, $2)`, id, claim, n)
				return err
			})
			if err == nil && call%5 == 2 {
				return io.ErrUnexpectedEOF // as if the connection had broken
			}
			return err
		})
		switch call % 5 {
		case 3:
			return struct{}{}, errors.New("after its effect")
		case 4:
			panic("after its effect")
		}
		return struct{}{}, err
	})
	stop := running(t, d)
	enqueue(t, p, 100, pgwake.WorkItem{Name: "insert"})
	awaitEmpty(t, p)
	require.NoError(t, stop())
	var rows, distinct int
	require.NoError(t, p.Pool().QueryRow(t.Context(), `SELECT count(*), count(DISTINCT n) FROM `+effects).Scan(&rows, &distinct))
	require.Equal(t, []int{100, 100}, []int{rows, distinct})
	require.Equal(t, calls.Load(), done.Load()+retried.Load())
	require.Greater(t, calls.Load(), int64(100))
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, letters)
}

func TestAckBy_OfADecider_TurnsAreAcknowledgedBySQL(t *testing.T) {
	p := testschema.Core.New(t, nil)
	ack := pgx.Identifier{p.Schema(), "ack_orchestration"}.Sanitize()
	var turns atomic.Int64
	o := dispatch.NewOrchestrator(p, func(ctx context.Context, turn *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error) {
		turns.Add(1)
		return pgwake.OrchestrationAck{}, dispatch.AckBy(ctx, func(ctx context.Context, token pgwake.LockToken) error {
			instance, claim, err := token.Turn()
			if err != nil {
				return err
			}
			status := pgwake.StatusRunning
			if turn.Messages[len(turn.Messages)-1].Kind == "end" {
				status = pgwake.StatusCompleted
			}
			return p.Do(ctx, "decide", func(ctx context.Context, q pgwake.Querier) error {
				_, err := q.Exec(ctx, `SELECT `+ack+`($1, $2, $3, p_name => 'flow', p_status => $4)`, instance, claim, turn.ExecutionID, status)
				return err
			})
		})
	}, nil)
	running(t, o)
	for n := range 10 {
		_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: fmt.Sprint(n), Kind: pgwake.MessageStart, Name: "flow"}, nil)
		require.NoError(t, err)
	}
	awaitEmpty(t, p)
	for n := range 10 {
		_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: fmt.Sprint(n), Kind: "end"}, nil)
		require.NoError(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for n := range 10 {
		outcome, err := p.WaitForInstance(ctx, fmt.Sprint(n))
		require.NoError(t, err)
		require.Equal(t, pgwake.StatusCompleted, outcome.Status)
	}
	require.EqualValues(t, 20, turns.Load(), "none was taken again")
}

func TestHandleBatch_TakesWhatIsThere_EachHasItsOwnFate(t *testing.T) {
	p := testschema.Core.New(t, nil)
	enqueue(t, p, 250, pgwake.WorkItem{Name: "many"})
	var sizes []int
	d := dispatch.New(p, &dispatch.Config{Concurrency: 1, MaxAttempts: 1})
	d.HandleBatch("many", 100, func(_ context.Context, items []*pgwake.ClaimedWorkItem) error {
		sizes = append(sizes, len(items))
		errs := make(dispatch.BatchErrors, len(items))
		for i, item := range items {
			if string(item.Input) == "7" {
				errs[i] = errors.New("seven")
			}
		}
		return errs
	})
	stop := running(t, d)
	awaitEmpty(t, p)
	require.NoError(t, stop())
	require.Equal(t, []int{100, 100, 50}, sizes)
	letters, err := p.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, "seven", letters[0].Error)
}

func TestOrchestrator_RunsAnInstanceWithActivities(t *testing.T) {
	p := testschema.Core.New(t, nil)
	d := dispatch.New(p, nil)
	dispatch.Handle(d, "double", func(_ context.Context, n int) (int, error) { return 2 * n, nil })
	running(t, d)
	o := dispatch.NewOrchestrator(p, func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
		for i, m := range turn.Messages {
			ack.History = append(ack.History, pgwake.Event{ID: turn.LastEventID + int64(i) + 1, Type: string(m.Kind), Data: m.Data})
			switch m.Kind {
			case pgwake.MessageStart:
				ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
					Name: "double", Input: m.Data, Instance: turn.Instance, ExecutionID: turn.ExecutionID, ActivityID: 1}})
			case dispatch.KindCompleted:
				var c dispatch.Completion
				if err := json.Unmarshal(m.Data, &c); err != nil {
					return ack, dispatch.Permanent(err)
				}
				ack.Metadata.Status, ack.Metadata.Output = pgwake.StatusCompleted, string(c.Result)
			}
		}
		return ack, nil
	}, nil)
	running(t, o)
	_, err := p.EnqueueForOrchestrator(t.Context(), pgwake.Message{
		Instance: "i", Kind: pgwake.MessageStart, Name: "flow", Data: json.RawMessage(`21`)}, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	outcome, err := p.WaitForInstance(ctx, "i")
	require.NoError(t, err)
	require.Equal(t, pgwake.StatusCompleted, outcome.Status)
	require.Equal(t, "42", outcome.Output)
}

// A turn and a completion take longer to send than a lease is long.
func TestRun_LargeAcksOverASlowNetwork_AreMadeAtTheFirstAttempt(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	p := testschema.Core.New(t, nil)
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	config.MaxConns = 10
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return slowly{conn}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	slow, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: p.Schema()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, slow.Close(context.Background())) })

	large := strings.Repeat("x", 300<<10)
	var handled, decided atomic.Int64
	d := dispatch.New(slow, &dispatch.Config{LockTimeout: lease})
	dispatch.Handle(d, "large", func(context.Context, struct{}) (string, error) { handled.Add(1); return large, nil })
	running(t, d)
	running(t, dispatch.NewOrchestrator(slow, func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
		decided.Add(1)
		if turn.Messages[0].Kind == dispatch.KindCompleted {
			ack.Metadata.Status = pgwake.StatusCompleted
			return ack, nil
		}
		ack.History = []pgwake.Event{{ID: turn.LastEventID + 1, Type: "large", Data: json.RawMessage(`"` + large + `"`)}}
		ack.WorkItems = []pgwake.WorkEnqueue{{WorkItem: pgwake.WorkItem{
			Name: "large", Input: json.RawMessage(`{}`), Instance: turn.Instance, ExecutionID: turn.ExecutionID, ActivityID: 1}}}
		return ack, nil
	}, &dispatch.OrchestratorConfig{LockTimeout: lease}))
	_, err = p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: pgwake.MessageStart, Name: "flow"}, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	outcome, err := p.WaitForInstance(ctx, "i")
	require.NoError(t, err)
	require.Equal(t, pgwake.StatusCompleted, outcome.Status)
	require.EqualValues(t, 1, handled.Load())
	require.EqualValues(t, 2, decided.Load())
}

// slowly sends 64 kB a second.
type slowly struct{ net.Conn }

func (c slowly) Write(data []byte) (sent int, err error) {
	const bytes = 4 << 10
	for part := range slices.Chunk(data, bytes) {
		time.Sleep(time.Duration(len(part)) * time.Second / (16 * bytes))
		n, err := c.Conn.Write(part)
		if sent += n; err != nil {
			return sent, err
		}
	}
	return sent, nil
}

func TestRun_ItemIsLockedByATransaction_TheOthersKeepTheirLeases(t *testing.T) {
	t.Parallel()
	p := testschema.Core.New(t, nil)
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer pool.Close()
	const places, lease = 5, 4 * time.Second
	var begun, lost atomic.Int64
	finish := make(chan struct{})
	d := dispatch.New(p, &dispatch.Config{Concurrency: places, LockTimeout: lease})
	dispatch.Handle(d, "work", func(ctx context.Context, _ int) (struct{}, error) {
		begun.Add(1)
		select {
		case <-ctx.Done():
			lost.Add(1)
		case <-finish:
		}
		return struct{}{}, context.Cause(ctx)
	})
	running(t, d)
	enqueue(t, p, places-1, pgwake.WorkItem{Name: "work"})
	unique := &pgwake.EnqueueOptions{DedupKey: "k", DedupScope: pgwake.DedupWaiting}
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "work", Input: json.RawMessage(`0`)}, unique)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return begun.Load() == places }, patience, 10*time.Millisecond)

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = p.EnqueueForWorkerTx(t.Context(), tx, pgwake.WorkItem{Name: "work", Input: json.RawMessage(`0`)}, unique) // takes its key
	require.NoError(t, err)
	time.Sleep(2 * lease)
	require.LessOrEqual(t, lost.Load(), int64(1), "nothing but the one itself")
	require.NoError(t, tx.Rollback(t.Context()))
	close(finish)
	awaitEmpty(t, p)
}

func TestRun_DoneItemsAreLockedByATransaction_OthersAreAcknowledged(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string]pgwake.Limits{"no limit": {}, "a limit": {MaxRunning: 40}} {
		t.Run(name, func(t *testing.T) { testDoneItemsAreLocked(t, limits) })
	}
}

func testDoneItemsAreLocked(t *testing.T, limits pgwake.Limits) {
	p := testschema.Core.New(t, nil)
	require.NoError(t, p.SetLimits(t.Context(), "default", limits))
	pool, err := pgxpool.New(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer pool.Close()
	const locked, others = 4, 20
	var begun atomic.Int64
	finish := make(chan struct{})
	d := dispatch.New(p, &dispatch.Config{Concurrency: 50, Ahead: dispatch.NotAhead})
	dispatch.Handle(d, "locked", func(context.Context, int) (struct{}, error) {
		begun.Add(1)
		<-finish
		return struct{}{}, nil
	})
	dispatch.Handle(d, "other", func(context.Context, int) (struct{}, error) { return struct{}{}, nil })
	running(t, d)
	unique := func(i int) *pgwake.EnqueueOptions {
		return &pgwake.EnqueueOptions{DedupKey: fmt.Sprint(i), DedupScope: pgwake.DedupWaiting}
	}
	item := pgwake.WorkItem{Name: "locked", Input: json.RawMessage(`0`)}
	for i := range locked {
		_, err := p.EnqueueForWorker(t.Context(), item, unique(i))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return begun.Load() == locked }, patience, 10*time.Millisecond)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	for i := range locked {
		_, err = p.EnqueueForWorkerTx(t.Context(), tx, item, unique(i)) // takes its key
		require.NoError(t, err)
	}
	for range locked {
		finish <- struct{}{}
		time.Sleep(50 * time.Millisecond) // an ack of its own
	}
	enqueue(t, p, others, pgwake.WorkItem{Name: "other"})
	require.Eventually(t, func() bool { all, _ := depth(t, p); return all == locked }, patience, 10*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	close(finish)
	awaitEmpty(t, p)
	require.EqualValues(t, locked, begun.Load(), "each once")
}

// awaitSettled waits until somebody waits who has to be told.
func awaitSettled(t *testing.T, p *pgwake.Provider, queue func(pgwake.Stats) pgwake.QueueStats) {
	t.Helper()
	require.Eventually(t, func() bool { s := queue(p.Stats()); return s.Parked > 0 && s.Settled }, patience, 10*time.Millisecond)
}

// beside opens another node on the schema of a new one.
func beside(t *testing.T) (one, other *pgwake.Provider) {
	schema := testschema.Core.Borrow(t)
	return pgwaketest.Open(t, &pgwake.Config{Schema: schema}), pgwaketest.Open(t, &pgwake.Config{Schema: schema})
}

func TestStop_ItemsOfASession_AnotherNodeHasThemAtOnce(t *testing.T) {
	one, other := beside(t)
	dispatcher := func(p *pgwake.Provider, owner string, h dispatch.Handler) (stop func() error) {
		d := dispatch.New(p, &dispatch.Config{Session: &pgwake.SessionOptions{Owner: owner, LockTimeout: time.Hour}, StopTimeout: 1})
		d.Handle("x", h)
		return running(t, d)
	}
	began, handled := make(chan bool), make(chan bool)
	stop := dispatcher(one, "a", func(ctx context.Context, _ *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		began <- true
		<-ctx.Done()
		return nil, ctx.Err()
	})
	enqueue(t, one, 1, pgwake.WorkItem{Name: "x", Session: "s"})
	await(t, began)
	dispatcher(other, "b", func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		handled <- true
		return nil, nil
	})
	awaitSettled(t, other, func(s pgwake.Stats) pgwake.QueueStats { return s.Worker })
	require.NoError(t, stop())
	await(t, handled)
	s := other.Stats().Worker
	require.Equal(t, int64(1), s.Finds["notify"])
	require.Zero(t, s.FallbackFinds+s.ScoutFinds)
}

func TestOrchestrator_Stops_WhatWasStickyToItComesToOthersAtOnce(t *testing.T) {
	one, other := beside(t)
	orchestrator := func(p *pgwake.Provider, owner string) (turns chan pgwake.MessageKind, stop func() error) {
		turns = make(chan pgwake.MessageKind, 10)
		return turns, running(t, dispatch.NewOrchestrator(p, func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			turns <- turn.Messages[0].Kind
			return ack, nil
		}, &dispatch.OrchestratorConfig{Owner: owner, Sticky: time.Hour}))
	}
	mine, stop := orchestrator(one, "a")
	send := func(kind pgwake.MessageKind) {
		_, err := one.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: "i", Kind: kind, Name: "flow"}, nil)
		require.NoError(t, err)
	}
	send(pgwake.MessageStart)
	require.Equal(t, pgwake.MessageStart, await(t, mine))
	awaitEmpty(t, one)
	others, _ := orchestrator(other, "b")
	awaitSettled(t, other, func(s pgwake.Stats) pgwake.QueueStats { return s.Orchestrator })
	require.NoError(t, stop())
	send("event")
	require.Equal(t, pgwake.MessageKind("event"), await(t, others))
	s := other.Stats().Orchestrator
	require.Zero(t, s.FallbackFinds+s.ScoutFinds)
}
