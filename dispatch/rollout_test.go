package dispatch_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: can namespaces go over from polling to events, and back, while work goes on?

func TestPercent_TheSameOnEveryNode_SmallerPartsAreInLargerOnes(t *testing.T) {
	const names = 2000
	for _, percent := range []float64{0, 1, 10, 50, 99, 100} {
		part := 0
		for i := range names {
			name := fmt.Sprintf("tenant-%d", i)
			if dispatch.Percent(percent, pgwake.ModeHybrid, pgwake.ModePolling)(name) != pgwake.ModeHybrid {
				continue
			}
			part++
			require.Equal(t, pgwake.ModeHybrid, dispatch.Percent(percent+0.1, pgwake.ModeHybrid, pgwake.ModePolling)(name))
		}
		require.InDelta(t, percent*names/100, part, names*0.03)
	}
}

// traffic enqueues to namespaces, a hundred times a second to each, until it is stopped, and says how much that was.
type traffic struct {
	stop    chan struct{}
	senders sync.WaitGroup
	mu      sync.Mutex
	sent    map[string]int // items by "namespace/name"
}

func newTraffic(t *testing.T, p *pgwake.Provider, namespaces ...string) *traffic {
	f := &traffic{stop: make(chan struct{}), sent: make(map[string]int)}
	for _, namespace := range namespaces {
		f.senders.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-f.stop:
					return
				case <-tick.C:
				}
				name := fmt.Sprint(i)
				_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: name}, &pgwake.EnqueueOptions{Namespace: namespace})
				if err != nil {
					t.Error(err)
					return
				}
				f.mu.Lock()
				f.sent[namespace+"/"+name]++
				f.mu.Unlock()
			}
		})
	}
	return f
}

// end ends it, and returns what was sent.
func (f *traffic) end() map[string]int {
	close(f.stop)
	f.senders.Wait()
	return f.sent
}

// progress waits until so many more items are handled.
func (l *ledger) progress(t *testing.T, more int) {
	t.Helper()
	before := l.total()
	require.Eventually(t, func() bool { return l.total() >= before+more }, patience, 10*time.Millisecond)
}

func constantly(mode pgwake.Mode) func(string) pgwake.Mode {
	return func(string) pgwake.Mode { return mode }
}

// A node that polls goes over to events, namespace by namespace, and then back, while items come all the time.
func TestT42_ModesChangeUnderLoad_NothingIsLostOrDoubled(t *testing.T) {
	t.Parallel()
	p := testschema.Core.New(t, &pgwake.Config{Mode: pgwake.ModePolling, PollInterval: 5 * time.Millisecond})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}, Rollout: constantly(pgwake.ModePolling)})
	running(t, c)
	require.False(t, p.Stats().Listening)
	load := newTraffic(t, p, "a", "b", "c", "d")
	for range 3 {
		l.progress(t, 100)
		for _, percent := range []float64{25, 50, 75, 100} {
			require.NoError(t, c.SetRollout(dispatch.Percent(percent, pgwake.ModeHybrid, pgwake.ModePolling)))
			l.progress(t, 50)
		}
		require.Eventually(t, func() bool { return p.Stats().Listening }, patience, 10*time.Millisecond)
		require.NoError(t, c.SetRollout(constantly(pgwake.ModeEventDriven)))
		l.progress(t, 100)
		require.NoError(t, c.SetRollout(constantly(pgwake.ModePolling)))
		require.Eventually(t, func() bool { return !p.Stats().Listening }, patience, 10*time.Millisecond)
	}
	sent := load.end()
	awaitEmpty(t, p)
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Equal(t, sent, l.seen)
	require.GreaterOrEqual(t, len(sent), 1000)
}

// The way from polling to events, and back, as docs/operations.md tells it, while items come all the time.
func TestRollout_Rehearsal_ThereAndBackUnderTraffic(t *testing.T) {
	t.Parallel()
	p := testschema.Core.New(t, &pgwake.Config{PollInterval: 5 * time.Millisecond})
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{l.all()}, Rollout: constantly(pgwake.ModeShadow)})
	running(t, c)
	load := newTraffic(t, p, "a", "b", "c", "d")
	mode := func(namespace string) pgwake.Mode {
		general, of := p.GetModes()
		if m, ok := of[namespace]; ok {
			return m
		}
		return general
	}

	served(t, c, "a", "b", "c", "d")
	require.Zero(t, l.total(), "it watches")
	steps := []struct {
		rollout func(string) pgwake.Mode
		listens bool
	}{
		{constantly(pgwake.ModePolling), false},
		{func(namespace string) pgwake.Mode {
			if namespace == "a" {
				return pgwake.ModeHybrid
			}
			return pgwake.ModePolling
		}, true},
		{dispatch.Percent(50, pgwake.ModeHybrid, pgwake.ModePolling), true},
		{constantly(pgwake.ModeHybrid), true},
		{constantly(pgwake.ModePolling), false},
	}
	for i, step := range steps {
		require.NoError(t, c.SetRollout(step.rollout))
		for _, namespace := range []string{"a", "b", "c", "d"} {
			require.Equal(t, step.rollout(namespace), mode(namespace), "step %d", i)
		}
		require.Eventually(t, func() bool { return p.Stats().Listening == step.listens }, patience, time.Millisecond, "step %d", i)
		l.progress(t, 200)
	}
	sent := load.end()
	awaitEmpty(t, p)
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Equal(t, sent, l.seen)
	s := p.Stats().Worker
	var items int64
	for _, n := range s.ItemsBy {
		items += n
	}
	require.Equal(t, s.Items, items, "each came by a path")
}

// stubborn is a Provider whose modes cannot be set.
type stubborn struct{ *pgwake.Provider }

var errStubborn = errors.New("stubborn")

func (s *stubborn) SetModes(pgwake.Mode, map[string]pgwake.Mode) error { return errStubborn }

// Whether or not there was a Rollout: without one, the modes are those that somebody else has set.
func TestSetRollout_TheSecondSourceRefuses_TheFirstIsAsBefore(t *testing.T) {
	one := testschema.Core.New(t, &pgwake.Config{Mode: pgwake.ModeEventDriven, Modes: map[string]pgwake.Mode{"a": pgwake.ModeHybrid}})
	other := &stubborn{testschema.Core.New(t, nil)}
	c := dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{newLedger().all()},
		Shards: []dispatch.Shard{{Namespaces: []string{"x"}, Source: other}},
	})
	for _, namespace := range []string{"a", "x"} { // before Run, so that all of it happens here
		require.NoError(t, c.Spawn(namespace))
	}
	asBefore := func() {
		t.Helper()
		mode, of := one.GetModes()
		require.Equal(t, pgwake.ModeEventDriven, mode)
		require.Equal(t, map[string]pgwake.Mode{"a": pgwake.ModeHybrid}, of)
	}
	require.ErrorIs(t, c.SetRollout(constantly(pgwake.ModeShadow)), errStubborn)
	asBefore()
	require.NoError(t, c.Spawn("b"), "without a Rollout, as before")
	asBefore()

	hybrid := constantly(pgwake.ModeHybrid) // of which the second Source need not be told
	require.NoError(t, c.SetRollout(hybrid))
	before, of := one.GetModes()
	require.ErrorIs(t, c.SetRollout(constantly(pgwake.ModePolling)), errStubborn)
	mode, now := one.GetModes()
	require.Equal(t, before, mode)
	require.Equal(t, of, now)
}

// Without a Rollout the general mode is whoever's who sets it, and with the next Rollout it remains.
func TestSetRollout_GeneralModeWasChangedSinceTheLast_Remains(t *testing.T) {
	p := testschema.Core.New(t, nil)
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{newLedger().all()}})
	require.NoError(t, c.Spawn("a"))
	general := func() pgwake.Mode { mode, _ := p.GetModes(); return mode }
	require.NoError(t, c.SetRollout(constantly(pgwake.ModePolling)))
	require.Equal(t, pgwake.ModePolling, general(), "so nothing listens")
	require.NoError(t, c.SetRollout(nil))
	require.Equal(t, pgwake.ModePolling, general())
	require.NoError(t, c.SetRollout(constantly(pgwake.ModeShadow)))
	require.Equal(t, pgwake.ModeHybrid, general(), "which the Rollout had changed, and nobody else")

	require.NoError(t, c.SetRollout(nil))
	require.NoError(t, p.SetModes(pgwake.ModeEventDriven, nil))
	require.NoError(t, c.SetRollout(constantly(pgwake.ModeShadow)))
	require.Equal(t, pgwake.ModeEventDriven, general())
	require.NoError(t, c.SetRollout(constantly(pgwake.ModePolling)))
	require.NoError(t, c.SetRollout(constantly(pgwake.ModeShadow)))
	require.Equal(t, pgwake.ModeEventDriven, general())

	require.NoError(t, p.SetModes(pgwake.ModeHybrid, nil)) // which is the Rollout's business
	require.NoError(t, c.Spawn("b"))
	require.Equal(t, pgwake.ModeEventDriven, general())
}
