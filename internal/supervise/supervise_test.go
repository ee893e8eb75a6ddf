package supervise_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake/internal/supervise"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var silent = slog.New(slog.DiscardHandler)

func TestGo_FunctionReturns_IsNotRunAgain(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		g := supervise.New(t.Context(), silent)
		runs := 0
		g.Go("once", func(context.Context) { runs++ })
		g.Wait()
		time.Sleep(time.Hour)
		require.Equal(t, 1, runs)
		require.Zero(t, g.Panics())
		require.False(t, g.Degraded())
	})
}

func TestGo_FunctionPanics_IsRunAgainAfterAPauseThatGrowsAndIsBounded(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, silent)
		var starts []time.Time
		g.Go("broken", func(context.Context) {
			starts = append(starts, time.Now())
			panic("broken")
		})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		cancel()
		g.Wait()

		require.Greater(t, len(starts), 20, "it gave up")
		require.EqualValues(t, len(starts), g.Panics())
		pause := 50 * time.Millisecond
		for i := 1; i < len(starts); i++ {
			got := starts[i].Sub(starts[i-1])
			require.GreaterOrEqual(t, got, pause, "restart %d", i)
			require.Less(t, got, pause*3/2, "restart %d", i)
			pause = min(2*pause, 5*time.Second)
		}
	})
}

func TestGo_LongHealthyRun_TheNextPauseIsShortAgain(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, silent)
		runs := 0
		var ended, restarted time.Time
		g.Go("moody", func(ctx context.Context) {
			runs++
			switch runs {
			case 8:
				time.Sleep(10 * time.Second) // healthy at last
				ended = time.Now()
			case 9:
				restarted = time.Now()
				<-ctx.Done()
				return
			}
			panic("moody")
		})
		time.Sleep(time.Hour)
		cancel()
		g.Wait()
		require.Equal(t, 9, runs)
		require.Less(t, restarted.Sub(ended), 75*time.Millisecond)
	})
}

func TestDegraded_OnlyBetweenAPanicAndTheRestart(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, silent)
		fail := make(chan struct{})
		g.Go("a", func(ctx context.Context) {
			select {
			case <-fail:
				panic("told to")
			case <-ctx.Done():
			}
		})
		g.Go("healthy", func(ctx context.Context) { <-ctx.Done() })
		synctest.Wait()
		require.False(t, g.Degraded())
		fail <- struct{}{}
		synctest.Wait()
		require.True(t, g.Degraded())
		time.Sleep(75 * time.Millisecond)
		synctest.Wait()
		require.False(t, g.Degraded())
		require.EqualValues(t, 1, g.Panics())
		cancel()
		g.Wait()
	})
}

func TestWait_ContextEnds_DuringAPauseToo(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, silent)
		var runs atomic.Int64
		g.Go("broken", func(context.Context) {
			runs.Add(1)
			panic("broken")
		})
		g.Go("obedient", func(ctx context.Context) { <-ctx.Done() })
		time.Sleep(20 * time.Second) // the pause is 5 s or more by now
		synctest.Wait()
		before, began := runs.Load(), time.Now()
		cancel()
		g.Wait()
		require.Zero(t, time.Since(began), "Wait waited for the pause to end")
		require.Equal(t, before, runs.Load())
		require.False(t, g.Degraded())
	})
}

// A function that panics because its context ended must not start again.
func TestGo_PanicAfterTheEnd_IsNotRunAgain(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, silent)
		runs := 0
		g.Go("sore loser", func(ctx context.Context) {
			runs++
			<-ctx.Done()
			panic("but I was not done")
		})
		synctest.Wait()
		cancel()
		g.Wait()
		require.Equal(t, 1, runs)
		require.EqualValues(t, 1, g.Panics())
	})
}

func TestGo_FunctionPanics_IsLoggedOnceWithNameCauseAndStack(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		g := supervise.New(ctx, slog.New(slog.NewJSONHandler(&log, nil)))
		first := true
		g.Go("listener", func(ctx context.Context) {
			if first {
				first = false
				blowUp()
			}
			<-ctx.Done()
		})
		time.Sleep(time.Minute)
		cancel()
		g.Wait()
		require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("\n")))
		var entry map[string]string
		require.NoError(t, json.Unmarshal(log.Bytes(), &entry))
		require.Equal(t, "ERROR", entry["level"])
		require.Equal(t, "listener", entry["goroutine"])
		require.Equal(t, "boom", entry["panic"])
		require.Contains(t, entry["stack"], "blowUp")
	})
}

//go:noinline
func blowUp() { panic("boom") }
