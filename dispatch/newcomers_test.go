package dispatch

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

// This file answers: when are namespaces tried again for which the Rollout failed?

// told is a fake that tells of namespaces, and has modes.
type told struct {
	*fake
	news chan struct{}

	mu         sync.Mutex
	namespaces []string
	general    pgwake.Mode
	of         map[string]pgwake.Mode
}

func (f *told) tell(namespaces ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.namespaces = append(f.namespaces, namespaces...)
	select {
	case f.news <- struct{}{}:
	default:
	}
}

func (f *told) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	for {
		f.mu.Lock()
		added := slices.DeleteFunc(slices.Clone(f.namespaces), func(name string) bool { return slices.Contains(known, name) })
		f.mu.Unlock()
		if len(added) > 0 {
			return added, nil
		}
		select {
		case <-f.news:
		case <-ctx.Done():
			return nil, &pgwake.Error{Op: "wait for namespaces", Err: ctx.Err()}
		}
	}
}

func (f *told) SetModes(mode pgwake.Mode, of map[string]pgwake.Mode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.general, f.of = mode, maps.Clone(of)
	return nil
}

func (f *told) GetModes() (pgwake.Mode, map[string]pgwake.Mode) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.general, maps.Clone(f.of)
}

func TestCoordinators_RolloutFailsForOne_ItAloneWaitsForAMinute(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := &told{fake: newFake(), news: make(chan struct{}, 1)}
		var mu sync.Mutex
		asked, fails := map[string]int{}, map[string]bool{"bad": true, "worse": true}
		askedFor := func(namespace string) int {
			mu.Lock()
			defer mu.Unlock()
			return asked[namespace]
		}
		c := NewCoordinators(f, &CoordinatorsConfig{
			Groups: []Group{{Namespaces: []string{"*"}, Handlers: func(*Dispatcher) {}}},
			Rollout: func(namespace string) pgwake.Mode {
				mu.Lock()
				defer mu.Unlock()
				if asked[namespace]++; fails[namespace] {
					panic("oh")
				}
				return pgwake.ModeHybrid
			},
			Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()

		f.tell("bad", "good")
		synctest.Wait()
		require.Equal(t, []int{1, 1}, []int{c.Stats().Active, c.Stats().Failing})
		time.Sleep(longestPause / 2)
		f.tell("later", "worse")
		synctest.Wait()
		require.Equal(t, []int{2, 2}, []int{c.Stats().Active, c.Stats().Failing}, "at once")
		require.Equal(t, 1, askedFor("bad"))
		mu.Lock()
		delete(fails, "bad")
		mu.Unlock()
		time.Sleep(longestPause/2 - longestPause/10 - time.Second)
		require.Equal(t, 1, askedFor("bad"))
		time.Sleep(longestPause/10 + 2*time.Second)
		require.Equal(t, []int{3, 1}, []int{c.Stats().Active, c.Stats().Failing})
		require.Equal(t, 2, askedFor("worse"), "both are tried at the same time")
		time.Sleep(10 * longestPause)
		require.InDelta(t, 12, askedFor("worse"), 2, "and then once a minute")
		mu.Lock()
		delete(fails, "worse")
		mu.Unlock()
		time.Sleep(longestPause + time.Second)
		require.Equal(t, []int{4, 0}, []int{c.Stats().Active, c.Stats().Failing})
		before := askedFor("good")
		time.Sleep(time.Hour)
		require.Equal(t, before, askedFor("good"), "there is no reason to ask")
		cancel()
		require.NoError(t, <-ended)
	})
}
