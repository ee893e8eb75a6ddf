package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Timed assertions belong to the bench command. These tests say that the scenarios count what they should.

func TestBaseline_TakesOneSampleOfEachKindPerRound(t *testing.T) {
	var last Progress
	r, err := Baseline(t.Context(), serverURL(t), BaselineOptions{Rounds: 5, Gap: time.Millisecond, Progress: keep(&last)})
	require.NoError(t, err)
	assert.Len(t, r.Trip.FromSend, 5)
	assert.Len(t, r.Trip.FromCommit, 5)
	assert.Len(t, r.Claim, 5)
	assert.Len(t, r.DurableClaim, 5)
	assert.Len(t, r.RoundTrip, 5)
	assert.Len(t, r.Insert, 5)
	assert.Len(t, r.Sleep, 15)
	assert.Equal(t, 5, last.Done)
	noneNegative(t, r.RoundTrip, r.Insert, r.Trip.FromSend, r.Trip.FromCommit, r.Claim, r.DurableClaim, r.Sleep)
	assertNothingLeft(t)
}

func TestSingles_TakesTheLatencyOfEveryItem(t *testing.T) {
	for _, by := range []Producer{OtherProvider, PlainSQL, SameProvider} {
		t.Run(string(by), func(t *testing.T) {
			var last Progress
			r, err := Singles(t.Context(), serverURL(t), SinglesOptions{
				Items: 20, Gap: time.Millisecond, Gaps: Exponential, Producer: by, Dispatchers: 2, Progress: keep(&last)})
			require.NoError(t, err)
			assert.Len(t, r.FromCommit, 20)
			assert.Len(t, r.FromSend, 20)
			noneNegative(t, r.FromCommit, r.FromSend)
			for i := range r.FromSend {
				assert.Greater(t, r.FromSend[i], r.FromCommit[i], "an enqueue takes time")
			}
			assert.Zero(t, r.Again)
			assert.Zero(t, r.Net)
			assert.Equal(t, Progress{Done: 20, Total: 20, Elapsed: last.Elapsed, Figures: r.FromCommit.Summary()}, last)
			assertNothingLeft(t)
		})
	}
}

func TestPairs_TakesBothLatenciesOfEachPair(t *testing.T) {
	var last Progress
	r, err := Pairs(t.Context(), serverURL(t), PairsOptions{
		Pairs: 8, Most: 20 * time.Millisecond, Rest: time.Millisecond, Dispatchers: 2, Progress: keep(&last)})
	require.NoError(t, err)
	require.Len(t, r.Gaps, 8)
	assert.Len(t, r.First.FromCommit, 8)
	assert.Len(t, r.Second.FromCommit, 8)
	for _, gap := range r.Gaps {
		assert.GreaterOrEqual(t, gap, time.Millisecond)
		assert.LessOrEqual(t, gap, 20*time.Millisecond)
	}
	assert.Zero(t, r.Net)
	assert.Equal(t, 8, last.Done)
	assertNothingLeft(t)
}

func TestTimers_TakesTheLatenessOfEveryTimer_AndNoneIsEarly(t *testing.T) {
	var last Progress
	var r *TimersResult
	for _, lead := range []time.Duration{2 * time.Second, 30 * time.Second} {
		var err error
		r, err = Timers(t.Context(), serverURL(t), TimersOptions{
			Timers: 24, Window: time.Second, Lead: lead, Dispatchers: 2, Progress: keep(&last)})
		require.NoError(t, err)
		if len(r.Before) > 0 && len(r.Other) > 0 && len(r.Own) > 0 { // or they were due before anybody waited
			break
		}
	}
	assert.Len(t, r.All(), 24-r.TooSoon)
	assert.NotEmpty(t, r.Before)
	assert.NotEmpty(t, r.Other)
	assert.NotEmpty(t, r.Own)
	assert.Equal(t, r.All().Summary().Min, r.Earliest)
	assert.GreaterOrEqual(t, r.Earliest, -r.ClockError)
	assert.Zero(t, r.Net)
	assert.Equal(t, 24, last.Done)
	assertNothingLeft(t)
}

func TestTimers_DueBeforeAnybodyWaits_AreLeftOut(t *testing.T) {
	r, err := Timers(t.Context(), serverURL(t), TimersOptions{
		Timers: 6, Window: time.Millisecond, Lead: time.Millisecond, Dispatchers: 1})
	require.NoError(t, err)
	assert.Equal(t, 6, r.TooSoon)
	assert.Empty(t, r.All())
	assertNothingLeft(t)
}

func TestBurst_HandlesEveryItemOnce(t *testing.T) {
	for _, prefill := range []bool{false, true} {
		var last Progress
		r, err := Burst(t.Context(), serverURL(t), BurstOptions{
			Items: 1010, Chunk: 100, Batch: 20, Dispatchers: 4, Prefill: prefill, Progress: keep(&last)})
		require.NoError(t, err)
		assert.Equal(t, 1010, last.Done)
		assert.Zero(t, r.Again)
		assert.Zero(t, r.Net)
		assert.Positive(t, r.PerSecond())
		assert.GreaterOrEqual(t, r.Looks, int64(1010/20), "a query takes 20 items at most")
		if !prefill {
			assert.Positive(t, r.TokenCount(), "all dispatchers waited when the items came")
		}
	}
	assertNothingLeft(t)
}

func TestBareBurst_DrainsTheTable(t *testing.T) {
	took, err := BareBurst(t.Context(), serverURL(t), BurstOptions{Items: 1010, Batch: 20, Dispatchers: 4})
	require.NoError(t, err)
	assert.Positive(t, took)
	assertNothingLeft(t)
}

func TestRedelivery_KilledProcess_ItsItemsComeAfterTheirLeases(t *testing.T) {
	var last Progress
	r, err := Redelivery(t.Context(), serverURL(t), RedeliveryOptions{
		Kills: 2, Items: 2, LockTimeout: 1500 * time.Millisecond, Dispatchers: 2, Progress: keep(&last)})
	require.NoError(t, err)
	assert.Len(t, r.Lateness, 4)
	assert.GreaterOrEqual(t, r.Lateness.Summary().Min, -r.ClockError, "no lease was cut short")
	assert.Zero(t, r.Net)
	assert.Equal(t, 4, last.Done)
	assertNothingLeft(t)
}

func TestRestarts_ProcessesEndAndAreKilled_NothingIsLost(t *testing.T) {
	var last Progress
	r, err := Restarts(t.Context(), serverURL(t), RestartsOptions{
		Processes: 2, Handler: 20 * time.Millisecond, Calm: 600 * time.Millisecond, Kills: 1, LockTimeout: 2 * time.Second, Progress: keep(&last)})
	require.NoError(t, err)
	assert.NotEmpty(t, r.Calm)
	assert.NotEmpty(t, r.Rolling)
	assert.Zero(t, r.Lost)
	assert.Equal(t, 5, last.Done)
	assertNothingLeft(t)
}

func TestNamespaces_ByTheClock_IsEachStatementThatNobodyAskedFor(t *testing.T) {
	s := pgwake.Stats{Fallbacks: 1, Worker: pgwake.QueueStats{Polls: 10_000, Tokens: map[string]int64{
		"fallback": 10, "scout": 100, "notify": 1000, "timer": 1000, "local": 1000, "chain": 1000, "reconnect": 1000, "settle": 1000,
	}}}
	assert.EqualValues(t, 10_111, byTheClock(&s))
}

func TestNamespaces_MeasuresCoordinatorsAndLoops_AndNothingIsLost(t *testing.T) {
	var last Progress
	var r *NamespacesResult
	for _, times := range []time.Duration{1, 10} {
		var err error
		r, err = Namespaces(t.Context(), serverURL(t), NamespacesOptions{
			Namespaces: 3, Items: 12, Created: 5, Gap: time.Millisecond, Stretch: times * 500 * time.Millisecond, Interval: 20 * time.Millisecond, Batch: 5,
			Tasks: 4, Duration: times * time.Second, Polls: 3, Flood: 60,
			Restarts: NamespaceRestartsOptions{Namespaces: 2, Items: 200, Pause: 5 * time.Millisecond},
			Scale:    NamespaceScaleOptions{Counts: []int{1, 3}, Duration: times * 500 * time.Millisecond},
			Many:     ManyNamespacesOptions{Namespaces: 20, Duration: 100 * time.Millisecond, Lease: time.Second},
			Progress: keep(&last),
		})
		require.NoError(t, err)
		enough := r.Polled.Looks < r.Polled.ByClock && r.Chain.Items > 0
		for _, rate := range append(r.Scale.Rates, r.Scale.Single) {
			enough = enough && rate.Items > 0
		}
		if enough { // or there was too little time for this machine
			break
		}
	}
	for _, singles := range []*NamespaceSingles{r.Served, r.Retired, r.Polled} {
		assert.Len(t, singles.FromCommit, 12)
		noneNegative(t, singles.FromCommit, singles.FromSend)
		assert.Zero(t, singles.Again)
		assert.Zero(t, singles.Net)
		assert.Positive(t, singles.Looks)
	}
	// The engine looks by the clock where something is in its way, such as a row that somebody has locked, but not for the items.
	assert.Less(t, r.Served.ByClock, r.Served.Looks/2)
	assert.Less(t, r.Retired.ByClock, r.Retired.Looks/2)
	assert.Less(t, r.Polled.Looks, r.Polled.ByClock, "loops poll on when all is done")
	for _, singles := range []*NamespaceSingles{r.Served, r.Retired, r.Polled} {
		assert.GreaterOrEqual(t, singles.Took, 500*time.Millisecond)
	}
	assert.Len(t, r.Created.FromCommit, 5)
	noneNegative(t, r.Created.FromCommit)
	for _, rate := range []*NamespaceRate{r.Chain, r.PolledChain, r.Flood, r.PolledFlood} {
		assert.Positive(t, rate.PerSecond())
	}
	assert.Equal(t, 2*4, r.PolledChain.Items, "the first round starts the clock")
	assert.Equal(t, 60, r.Flood.Items)

	shaken := r.Restarts
	assert.Len(t, shaken.Calm, 100)
	assert.Len(t, shaken.Shaken, 100)
	assert.Positive(t, shaken.Retired)
	assert.Positive(t, shaken.Runs)
	assert.Zero(t, shaken.Lost)
	assert.Zero(t, shaken.Left)
	assert.Zero(t, shaken.Twice)

	require.Len(t, r.Scale.Rates, 2)
	assert.Equal(t, 3, r.Scale.Rates[1].Namespaces)
	for _, rate := range append(r.Scale.Rates, r.Scale.Single) {
		assert.Positive(t, rate.Items)
	}
	assert.Equal(t, 1, r.Many.Listening)
	assert.Positive(t, r.Many.Connections)
	assert.Zero(t, r.Many.Statements, "what many idle namespaces ask: %v", r.Many.Texts)
	assert.GreaterOrEqual(t, r.Many.Polled, int64(20), "each is polled")
	assert.Positive(t, last.Elapsed)
	assertNothingLeft(t)
}

func TestIdle_CountsStartAndSteadyStateApart(t *testing.T) {
	var last Progress
	r, err := Idle(t.Context(), serverURL(t), IdleOptions{
		Duration: 600 * time.Millisecond, Workers: 3, Orchestrators: 2, PollTimeout: 50 * time.Millisecond, Progress: keep(&last)})
	require.NoError(t, err)
	assert.Positive(t, r.StartUp, "the migrations alone are statements")
	assert.Zero(t, r.Statements, "what a node asks while idle: %v", r.Texts)
	assert.GreaterOrEqual(t, r.Duration, 600*time.Millisecond)
	assert.Equal(t, r.Statements, last.Statements)
	assert.Zero(t, r.Net)
	assertNothingLeft(t)
}

func TestShortPoll_CountsAboutTheStatementsThatItMakes(t *testing.T) {
	began := time.Now()
	r, err := ShortPoll(t.Context(), serverURL(t), time.Second)
	require.NoError(t, err)
	// Each of the 8 dispatchers pauses for 50 ms before each statement.
	assert.LessOrEqual(t, r.Statements, 8*int64(time.Since(began)/r.Interval))
	assert.Positive(t, r.Statements)
	assert.GreaterOrEqual(t, r.Duration, time.Second)
	assertNothingLeft(t)
}

func TestStress_CompletesEveryInstanceThatItStarts(t *testing.T) {
	for name, shortPoll := range map[string]time.Duration{"pushed": 0, "polled": 20 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			r, err := Stress(t.Context(), serverURL(t), StressOptions{
				Duration: 300 * time.Millisecond, Instances: 3, Tasks: 2, TaskTime: time.Millisecond, Orchestrators: 2, Workers: 2, ShortPoll: shortPoll})
			require.NoError(t, err)
			assert.GreaterOrEqual(t, len(r.Completed), 3)
			assert.GreaterOrEqual(t, r.Duration, 300*time.Millisecond)
			assert.GreaterOrEqual(t, r.Looks, int64(len(r.Completed))*3, "a turn to start, and two tasks")
			noneNegative(t, r.Completed)
			assert.Zero(t, r.Net)
			assertNothingLeft(t)
		})
	}
}

// tidyUpDifferently are scenarios of which each of the others tidies up as one does.
var tidyUpDifferently = []string{"baseline", "idle", "redelivery", "restarts", "namespaces, restarts", "namespaces, many", "bare writers", "nodes", "events, drain", "the log of events", "lock convoy"}

func TestScenarios_CancelledContext_LeavesNothing(t *testing.T) {
	enough := errors.New("enough")
	for name, run := range map[string]func(ctx context.Context, url string, stop func(Progress)) error{
		"baseline": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Baseline(ctx, url, BaselineOptions{Gap: time.Millisecond, Progress: stop})
			return err
		},
		"idle": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Idle(ctx, url, IdleOptions{Workers: 2, Orchestrators: -1, Progress: stop})
			return err
		},
		"singles": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Singles(ctx, url, SinglesOptions{Gap: time.Millisecond, Progress: stop})
			return err
		},
		"pairs": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Pairs(ctx, url, PairsOptions{Progress: stop})
			return err
		},
		"timers": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Timers(ctx, url, TimersOptions{Timers: 50, Window: 30 * time.Second, Progress: stop})
			return err
		},
		"burst": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Burst(ctx, url, BurstOptions{Items: 100_000, Batch: 1, Progress: stop})
			return err
		},
		"redelivery": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Redelivery(ctx, url, RedeliveryOptions{Kills: 100, Items: 1, LockTimeout: 200 * time.Millisecond, Progress: stop})
			return err
		},
		"restarts": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Restarts(ctx, url, RestartsOptions{Calm: 300 * time.Millisecond, Kills: 100, LockTimeout: time.Second, Progress: stop})
			return err
		},
		"namespaces": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Namespaces(ctx, url, NamespacesOptions{Gap: time.Millisecond, Progress: stop})
			return err
		},
		"namespaces, restarts": func(ctx context.Context, url string, stop func(Progress)) error {
			o := NamespacesOptions{Restarts: NamespaceRestartsOptions{Items: 100_000}, Progress: stop}
			return about(ctx, "restarts", o.restart(ctx, url, &NamespacesResult{}))
		},
		"namespaces, scale": func(ctx context.Context, url string, stop func(Progress)) error {
			o := NamespacesOptions{Scale: NamespaceScaleOptions{Duration: 10 * time.Millisecond}, Progress: stop}
			return about(ctx, "scale", o.scale(ctx, url, &NamespacesResult{}))
		},
		"namespaces, many": func(ctx context.Context, url string, stop func(Progress)) error {
			o := NamespacesOptions{Many: ManyNamespacesOptions{Namespaces: 50}, Progress: stop}
			return about(ctx, "many", o.many(ctx, url, &NamespacesResult{}))
		},
		"stress": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Stress(ctx, url, StressOptions{Progress: stop})
			return err
		},
		"histories": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Histories(ctx, url, HistoriesOptions{Turns: 100_000, Long: 100, Progress: stop})
			return err
		},
		"fan-in": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := FanIn(ctx, url, FanInOptions{Turns: 100_000, Large: 100, Progress: stop})
			return err
		},
		"drain": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Drain(ctx, url, DrainOptions{Items: 100_000, Way: OneByOne, Progress: stop})
			return err
		},
		"the drain's limit": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := BareDrain(ctx, url, DrainOptions{Items: 100_000, Batch: 1, Progress: stop})
			return err
		},
		"writers": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Writers(ctx, url, WritersOptions{Writers: 2, Duration: time.Minute, Progress: stop})
			return err
		},
		"bare writers": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Writers(ctx, url, WritersOptions{Way: BareTable, Writers: 2, Busy: 6, Duration: time.Minute, Progress: stop})
			return err
		},
		"nodes": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Nodes(ctx, url, NodesOptions{Nodes: 2, Items: 100_000, Progress: stop})
			return err
		},
		"events": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Events(ctx, url, EventsOptions{Singles: 100_000, Gap: time.Millisecond, Progress: stop})
			return err
		},
		"events, drain": func(ctx context.Context, url string, stop func(Progress)) error {
			o := EventsOptions{Backlog: 5000, Dispatchers: 1, Progress: stop}
			_, err := o.drain(ctx, url, "events", eventBacklog)
			return about(ctx, "events", err)
		},
		"the log of events": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := EventLog(ctx, url, EventLogOptions{Rows: 1000, Emits: 100_000, Kept: 1000, Progress: stop})
			return err
		},
		"schedules": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Schedules(ctx, url, SchedulesOptions{Schedules: 5, Every: time.Second, Nodes: 1, Duration: time.Hour, Progress: stop})
			return err
		},
		"fetch costs": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := FetchCosts(ctx, url, FetchCostOptions{Timers: 10, Fetches: 10_000, Progress: stop})
			return err
		},
		"bloat": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := Bloat(ctx, url, BloatOptions{Duration: time.Hour, Progress: stop})
			return err
		},
		"lock convoy": func(ctx context.Context, url string, stop func(Progress)) error {
			_, err := LockConvoy(ctx, url, ConvoyOptions{Acks: 100_000, Slices: 10_000, Workers: 2, Progress: stop})
			return err
		},
	} {
		if !testsize.Full() && !slices.Contains(tidyUpDifferently, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			err := run(ctx, serverURL(t), func(Progress) { cancel(enough) })
			require.ErrorIs(t, err, enough)
			assertNothingLeft(t)
		})
	}
}

func TestHistories_TakesTheTimeOfEveryTurn(t *testing.T) {
	var last Progress
	r, err := Histories(t.Context(), serverURL(t), HistoriesOptions{Turns: 10, Short: 2, Long: 50, Progress: keep(&last)})
	require.NoError(t, err)
	assert.Len(t, r.Short, 10)
	assert.Len(t, r.Long, 10)
	assert.Len(t, r.LongRead, 1)
	noneNegative(t, r.Short, r.Long, r.LongRead)
	assert.Equal(t, 10, last.Done)
	assertNothingLeft(t)
}

func TestFanIn_TakesTheTimeOfEveryTurn(t *testing.T) {
	var last Progress
	r, err := FanIn(t.Context(), serverURL(t), FanInOptions{
		Turns: 2, Small: 5, Large: 1010, Singles: 10, Few: 20, Many: 1010, Progress: keep(&last)})
	require.NoError(t, err)
	for _, of := range []struct {
		turns TurnTimes
		count int
	}{{r.SmallTurns, 2 * smallPerLarge}, {r.LargeTurns, 2}, {r.AmongFew, 10}, {r.AmongMany, 10}} {
		assert.Len(t, of.turns.Fetch, of.count)
		assert.Len(t, of.turns.Ack, of.count)
		noneNegative(t, of.turns.Fetch, of.turns.Ack)
	}
	assert.Len(t, r.BehindSmall, 2*smallPerLarge*looksBehind)
	assert.Len(t, r.BehindLarge, 2*looksBehind)
	noneNegative(t, r.BehindSmall, r.BehindLarge)
	assert.Equal(t, 12, last.Done)
	assertNothingLeft(t)
}

func TestFanIn_MoreTurnsThanInstances_IsAnError(t *testing.T) {
	_, err := FanIn(t.Context(), serverURL(t), FanInOptions{Turns: 1, Large: 10, Singles: 10, Few: 10})
	assert.ErrorContains(t, err, "more than 10 instances")
	assertNothingLeft(t)
}

func TestLockConvoy_TakesTheTimeOfEveryAck_AndEachCompletionHasItsTurn(t *testing.T) {
	var last Progress
	r, err := LockConvoy(t.Context(), serverURL(t), ConvoyOptions{
		Acks: 60, Workers: 3, Dispatchers: 2, Slices: 2, Interval: time.Millisecond, Progress: keep(&last)})
	require.NoError(t, err)
	for _, c := range []Convoy{r.Apart, r.Shared, r.Crowded} {
		assert.Len(t, c.Acks, 60)
		noneNegative(t, c.Acks)
		assert.Positive(t, c.PerSecond())
		assert.Positive(t, c.Looks)
	}
	assert.Equal(t, 3, last.Done)
	assertNothingLeft(t)
}

// What LockConvoy does not find is not there: it would see a worker that waits for a row.
func TestLockWaits_WaitForRow_IsSeenWithTheFunction(t *testing.T) {
	s := newStage(serverURL(t))
	n, err := s.open(t.Context(), 1)
	require.NoError(t, err)
	defer func() {
		n.close(&err)
		s.drop(&err)
		assert.NoError(t, err)
		assertNothingLeft(t)
	}()
	require.NoError(t, sendTo(t.Context(), n, 1, func(int) string { return "instance" }))
	item, err := n.FetchOrchestrationItem(t.Context(), nil)
	require.NoError(t, err)

	eye, err := s.connect(t.Context())
	require.NoError(t, err)
	defer hangUp(eye)
	holder, err := s.connect(t.Context())
	require.NoError(t, err)
	defer hangUp(holder)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM instance_locks FOR UPDATE")
	require.NoError(t, err)

	url, err := withSetting(s.url, "application_name", s.schema)
	require.NoError(t, err)
	acker, err := stage{url, s.schema}.open(t.Context(), 1)
	require.NoError(t, err)
	defer acker.close(&err)
	acked := make(chan error, 1)
	go func() {
		acked <- acker.AckOrchestrationItem(t.Context(), item.LockToken, pgwake.OrchestrationAck{Metadata: pgwake.Metadata{Name: "x"}})
	}()
	var waits []LockWait
	require.Eventually(t, func() bool {
		waits, err = lockWaits(t.Context(), eye, s.schema)
		return err != nil || len(waits) > 0
	}, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, err)
	assert.Equal(t, []LockWait{{Kind: "transactionid", Function: "ack_orchestration", Seen: 1}}, waits)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-acked)
}

func TestDrain_DoesEveryItem(t *testing.T) {
	for _, way := range []DrainWay{InBatches, OneByOne, GroupedAcks} {
		t.Run(string(way), func(t *testing.T) {
			var last Progress
			r, err := Drain(t.Context(), serverURL(t), DrainOptions{Items: 210, Batch: 20, Dispatchers: 3, Way: way, Progress: keep(&last)})
			require.NoError(t, err)
			assert.Equal(t, 210, r.Done)
			assert.Equal(t, 210, last.Done)
			assert.Positive(t, r.PerSecond())
			assertNothingLeft(t)
		})
	}
}

func TestDrain_Limit_CountsWhatWasDoneUntilThen(t *testing.T) {
	r, err := Drain(t.Context(), serverURL(t), DrainOptions{Items: 5000, Dispatchers: 1, Way: OneByOne, Limit: 50 * time.Millisecond})
	require.NoError(t, err)
	assert.Less(t, r.Done, 5000)
	assert.Equal(t, 5000, r.Items)
	assertNothingLeft(t)
}

func TestBareDrain_EmptiesTheTable(t *testing.T) {
	r, err := BareDrain(t.Context(), serverURL(t), DrainOptions{Items: 1010, Batch: 20, Dispatchers: 4})
	require.NoError(t, err)
	assert.Equal(t, 1010, r.Done)
	assertNothingLeft(t)
}

func TestWriters_CountsWhatIsEnqueued_BesideDispatchersThatAreBusyAndIdle(t *testing.T) {
	for _, way := range []WritersWay{BareTable, Library, Trigger} {
		for _, busy := range []int{3, 1} {
			if busy == 3 && way != Library && !testsize.Full() {
				continue // nobody handles anything, whatever the way
			}
			t.Run(fmt.Sprintf("%s, %d busy", way, busy), func(t *testing.T) {
				var r *WritersResult
				for _, d := range []time.Duration{200 * time.Millisecond, 5 * time.Second} {
					var err error
					r, err = Writers(t.Context(), serverURL(t), WritersOptions{
						Way: way, Writers: 4, Dispatchers: 3, Busy: busy, Duration: d})
					require.NoError(t, err)
					if r.Inserted > 0 && (busy == 3 || r.Handled > 0) { // or there was too little time for this machine
						break
					}
				}
				assert.Positive(t, r.Inserted)
				assert.Equal(t, 3-busy, r.Working)
				if busy == 3 {
					assert.Zero(t, r.Handled)
				} else {
					assert.Positive(t, r.Handled)
				}
				assertNothingLeft(t)
			})
		}
	}
}

func TestWriters_UnknownWay_IsAnError(t *testing.T) {
	_, err := Writers(t.Context(), serverURL(t), WritersOptions{Way: "by hand"})
	assert.ErrorContains(t, err, "by hand")
	assertNothingLeft(t)
}

func TestNodes_CountsTheQueriesOfAllNodes(t *testing.T) {
	var last Progress
	r, err := Nodes(t.Context(), serverURL(t), NodesOptions{Nodes: 3, Dispatchers: 2, Items: 10, Gap: time.Millisecond, Progress: keep(&last)})
	require.NoError(t, err)
	assert.GreaterOrEqual(t, r.PerItem(), 1.0, "somebody has to ask")
	assert.Len(t, r.Latency.FromCommit, 10)
	assert.Zero(t, r.Net)
	assert.Equal(t, 10, last.Done)
	var tokens int64
	for _, count := range r.Tokens {
		tokens += count
	}
	assert.Positive(t, tokens)
	assertNothingLeft(t)
}

func TestFetchCosts_TakesBothTimesOfEachCase(t *testing.T) {
	var last Progress
	costs, err := FetchCosts(t.Context(), serverURL(t), FetchCostOptions{
		Backlog: 50, Locked: 50, Timers: 50, LockedInstances: 50, Fetches: 5, Progress: keep(&last)})
	require.NoError(t, err)
	var names []string
	for _, c := range costs {
		names = append(names, c.Case)
		assert.Len(t, c.Full, 5)
		assert.Len(t, c.Empty, 5)
		assert.Positive(t, c.Ratio())
	}
	assert.Equal(t, []string{CaseBacklog, CaseLocked, CaseTimers, CaseLockedInstances}, names)
	costs, err = FetchCosts(t.Context(), serverURL(t), FetchCostOptions{})
	require.NoError(t, err)
	assert.Empty(t, costs)
	assertNothingLeft(t)
}

func TestBloat_ComparesThroughputBeforeAndAfter(t *testing.T) {
	r, err := Bloat(t.Context(), serverURL(t), BloatOptions{Duration: 200 * time.Millisecond, Chunk: 5})
	require.NoError(t, err)
	assert.Positive(t, r.Before)
	assert.Positive(t, r.First)
	assert.Positive(t, r.Last)
	assert.Positive(t, r.Items)
	assert.Positive(t, r.Size)
	assert.Positive(t, r.Ratio())
	assertNothingLeft(t)
}

func TestScenarios_UnusableURL_IsAnError(t *testing.T) {
	_, err := Singles(t.Context(), "postgres://127.0.0.1:1/none", SinglesOptions{})
	assert.ErrorContains(t, err, "measure singles")
}

func keep(last *Progress) func(Progress) { return func(p Progress) { *last = p } }

func noneNegative(t *testing.T, all ...Samples) {
	t.Helper()
	for _, s := range all {
		assert.GreaterOrEqual(t, s.Summary().Min, time.Duration(0))
	}
}

// assertNothingLeft looks for schemas and databases of this process. No two of its tests run at a time.
func assertNothingLeft(t *testing.T) {
	t.Helper()
	conn, err := connect(t.Context(), serverURL(t))
	require.NoError(t, err)
	defer hangUp(conn)
	var left []string
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT array(SELECT nspname FROM pg_namespace WHERE starts_with(nspname, $1)
		             UNION ALL SELECT datname FROM pg_database WHERE starts_with(datname, $1))`, ownPrefix()).Scan(&left))
	assert.Empty(t, left)
}

func TestTasks_MeasuresAnEngineAndLoops_AndJoinsOnce(t *testing.T) {
	const least = 2 * 2 * 10 / 2
	var r *TasksResult
	for _, times := range []time.Duration{1, 10} {
		var err error
		r, err = Tasks(t.Context(), serverURL(t), TasksOptions{
			Namespaces: 2, Singles: 5, Gap: time.Millisecond, Stretch: times * 300 * time.Millisecond, Interval: 20 * time.Millisecond,
			AtATime: 3, Duration: times * time.Second, Polled: 7, Width: 20,
		})
		require.NoError(t, err)
		if r.Polled.ByClock >= least && r.Rate.Items > 0 { // or there was too little time for this machine
			break
		}
	}
	for _, singles := range []*TaskSingles{r.Singles, r.Polled} {
		n := len(singles.Whole)
		require.Positive(t, n)
		assert.Len(t, singles.Turns, n)
		assert.Len(t, singles.Steps, n*r.Steps)
		assert.Len(t, singles.Results, n*r.Steps)
		noneNegative(t, singles.Claims(), singles.Whole)
		assert.GreaterOrEqual(t, singles.Took, 300*time.Millisecond)
	}
	assert.GreaterOrEqual(t, r.Polled.ByClock, int64(least), "two loops of each namespace, and half as often as on a machine that does nothing else")
	assert.Equal(t, 7-3, r.PolledRate.Items, "the first ones start the clock")
	assert.Positive(t, r.Rate.PerSecond())
	assert.Equal(t, &FanOut{Width: 20, Took: r.Fan.Took, Joins: 1}, r.Fan)
	assert.Positive(t, r.Fan.Took)
}

func TestManyTasks_AsksEachQuestion(t *testing.T) {
	r, err := ManyTasks(t.Context(), serverURL(t), ManyTasksOptions{Tasks: 60, Large: 300, Reads: 2})
	require.NoError(t, err)
	assert.Equal(t, 600, r.Steps)
	assert.Equal(t, 200*5, r.Edges)
	require.Len(t, r.Queries, len(manyTasksQueries))
	for _, q := range r.Queries {
		assert.Len(t, q.Times, 2, q.SQL)
		noneNegative(t, q.Times)
	}
	rows := func(begins string) int64 { return r.Query(begins).Rows }
	assert.EqualValues(t, 7, rows(NextReadyTasks), "a tenth is ready, and the large one")
	assert.EqualValues(t, 10, rows(`SELECT * FROM get_step_readiness_status($task)`))
	assert.EqualValues(t, 1, rows(`SELECT * FROM get_ready_steps`))
	assert.EqualValues(t, 9, rows(`SELECT * FROM get_step_transitive_dependencies`))
	assert.Nil(t, r.Query("nothing"))
}

func TestEvents_MeasuresEventsAndItemsInTurns_AndEachIsDone(t *testing.T) {
	var last Progress
	r, err := Events(t.Context(), serverURL(t), EventsOptions{Singles: 8, Gap: time.Millisecond, Backlog: 110, Dispatchers: 3, Progress: keep(&last)})
	require.NoError(t, err)
	for _, of := range []Latency{r.Items, r.Tx, r.Plain} {
		assert.Len(t, of.FromCommit, 8)
		noneNegative(t, of.FromCommit, of.FromSend)
	}
	assert.Zero(t, r.Again)
	assert.Zero(t, r.Net)
	for _, drain := range []*DrainResult{r.Drain, r.ItemsDrain, r.ItemsTxDrain, r.SharedDrain} {
		assert.Equal(t, 110, drain.Done, drain.Who)
		assert.Positive(t, drain.PerSecond())
	}
	assert.Positive(t, r.RateRatio())
	assert.Positive(t, last.Elapsed)
	assertNothingLeft(t)
}

func TestSchedules_TakesTheTimeOfEveryTick(t *testing.T) {
	var last Progress
	var r *SchedulesResult
	for _, d := range []time.Duration{2 * time.Second, 20 * time.Second} {
		var err error
		r, err = Schedules(t.Context(), serverURL(t), SchedulesOptions{Schedules: 10, Every: time.Second, Nodes: 2, Duration: d, Idle: 50, IdleFor: time.Millisecond, Progress: keep(&last)})
		require.NoError(t, err)
		if len(r.Handled) >= 10 && len(r.Polled) >= 10 { // or there was too little time for this machine
			break
		}
	}
	assert.GreaterOrEqual(t, len(r.Handled), 10)
	assert.GreaterOrEqual(t, len(r.Emitted), len(r.Handled))
	assert.GreaterOrEqual(t, len(r.Polled), 10)
	assert.NotEmpty(t, r.Together)
	noneNegative(t, r.Emitted, r.Polled)
	assert.GreaterOrEqual(t, r.Handled.Summary().Min, -r.ClockError)
	assert.Zero(t, r.Again)
	assert.EqualValues(t, 0, r.PolledCalls)
	assert.Positive(t, last.Total)
	assertNothingLeft(t)
}

func TestEventLog_TakesTheTimeOfEveryEmit(t *testing.T) {
	var last Progress
	r, err := EventLog(t.Context(), serverURL(t), EventLogOptions{Rows: 250, Emits: 5, Kept: 20_000, Progress: keep(&last)})
	require.NoError(t, err)
	assert.Len(t, r.Before, 5)
	assert.NotEmpty(t, r.Beside)
	assert.Positive(t, r.Keep)
	assert.Len(t, r.Full, 5)
	assert.Len(t, r.Empty, 5)
	noneNegative(t, r.Full, r.Empty, r.Before, r.Beside)
	assert.Positive(t, r.Filled)
	assert.Positive(t, last.Total)
	assertNothingLeft(t)
}

// What is filled is in the partition of the month, and not in the default one.
func TestFillLog_EventsOfThisMonth(t *testing.T) {
	s := newStage(serverURL(t))
	n, _, err := s.openBus(t.Context(), 4)
	require.NoError(t, err)
	defer func() {
		n.close(&err)
		s.drop(&err)
		assert.NoError(t, err)
		assertNothingLeft(t)
	}()
	require.NoError(t, s.fillLog(t.Context(), 250, newMeter(nil)))
	var events, elsewhere, types int
	require.NoError(t, s.one(t.Context(), &events, `SELECT count(*) FROM event_log`))
	require.NoError(t, s.one(t.Context(), &elsewhere, `SELECT count(*) FROM event_log_default`))
	require.NoError(t, s.one(t.Context(), &types, `SELECT count(DISTINCT event_type) FROM event_log`))
	assert.Equal(t, []int{250, 0, 100}, []int{events, elsewhere, types})
}
