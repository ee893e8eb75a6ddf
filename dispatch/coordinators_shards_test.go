package dispatch_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: does what is wrong with one Source, or one part, leave the others alone, and does Health say so?

// sharded has two Sources, of which the second has the namespaces that begin with x.
func sharded(t *testing.T, config dispatch.CoordinatorsConfig) (c *dispatch.Coordinators, one, other *pgwake.Provider, l *ledger) {
	one, other, l = testschema.Core.New(t, nil), testschema.Core.New(t, nil), newLedger()
	config.Groups = []dispatch.Group{l.all()}
	config.Shards = []dispatch.Shard{{Namespaces: []string{"x*"}, Source: other}}
	return dispatch.NewCoordinators(one, &config), one, other, l
}

func TestCoordinators_RetireThenSpawn_EverySourceIsServedAgain(t *testing.T) {
	c, one, other, l := sharded(t, dispatch.CoordinatorsConfig{})
	running(t, c)
	enqueueIn(t, one, "x", "before it was moved")
	enqueueIn(t, other, "x", "since")
	require.Eventually(t, func() bool { return l.total() == 2 }, patience, 10*time.Millisecond)
	c.Retire("x")
	require.EqualValues(t, 2, c.Stats().Retired)
	require.NoError(t, c.Spawn("x"))
	enqueueIn(t, one, "x", "too late")
	enqueueIn(t, other, "x", "in time")
	require.Eventually(t, func() bool { return l.total() == 4 }, patience, 10*time.Millisecond)
}

func TestCoordinators_RetiredBeforeRun_IsNotServed(t *testing.T) {
	c, one, _, l := sharded(t, dispatch.CoordinatorsConfig{})
	require.NoError(t, c.Spawn("a"))
	c.Retire("a")
	running(t, c)
	enqueueIn(t, one, "a", "x")
	enqueueIn(t, one, "b", "x")
	require.Eventually(t, func() bool { return l.count("b/x") == 1 }, patience, 10*time.Millisecond)
	require.Zero(t, l.count("a/x"))
}

func TestCoordinators_OneSourceIsClosed_TheOtherIsServedAsBefore(t *testing.T) {
	c, one, other, l := sharded(t, dispatch.CoordinatorsConfig{Rollout: constantly(pgwake.ModeShadow)})
	running(t, c)
	served(t, c, "default")
	require.NoError(t, one.Close(t.Context()))
	require.Eventually(t, func() bool { return c.Stats().Active == 1 }, patience, 10*time.Millisecond)
	h := c.Health()
	require.Equal(t, dispatch.Degraded, h.Status)
	require.Equal(t, []string{"source 0: closed"}, healthOf(h, "source").Reasons)
	code, _ := probe(t, c, "/readyz")
	require.Equal(t, http.StatusOK, code)

	enqueueIn(t, other, "x", "1")
	served(t, c, "x")
	mode, of := other.GetModes()
	require.Equal(t, pgwake.ModeHybrid, mode)
	require.Equal(t, pgwake.ModeShadow, of["x"])
	require.Zero(t, l.total())
	require.NoError(t, c.SetRollout(constantly(pgwake.ModePolling)))
	require.Eventually(t, func() bool { return l.total() == 1 }, patience, 10*time.Millisecond)
}

func TestCoordinators_NamesThatThereCannotBe_AreRefused(t *testing.T) {
	c, one, _, l := sharded(t, dispatch.CoordinatorsConfig{Rollout: constantly(pgwake.ModeShadow)})
	running(t, c)
	require.ErrorIs(t, c.Spawn("Tenant A"), pgwake.ErrInvalid)
	enqueueIn(t, one, "a", "x")
	served(t, c, "a")
	_, of := one.GetModes()
	require.Equal(t, pgwake.ModeShadow, of["a"])
	require.Zero(t, l.total())
}

// What is to be watched alone is not claimed because nobody could say so, and nobody else waits for that: neither those that came at the
// same time, nor those to come.
func TestCoordinators_RolloutFailsForSome_TheOthersAreServed(t *testing.T) {
	var mended, late atomic.Bool
	c, one, _, l := sharded(t, dispatch.CoordinatorsConfig{Rollout: func(namespace string) pgwake.Mode {
		switch {
		case namespace == "a" && !mended.Load(), namespace == "early" && late.Load():
			panic("oh")
		case namespace == "b" && !mended.Load():
			return pgwake.ModeDisabled + 1
		case namespace == "early":
			return pgwake.ModePolling
		}
		return pgwake.ModeHybrid
	}})
	enqueueIn(t, one, "a", "x")
	enqueueIn(t, one, "b", "x")
	enqueueIn(t, one, "early", "x")
	running(t, c)
	require.Eventually(t, func() bool { return l.count("early/x") == 1 }, patience, time.Millisecond, "it comes with the two")
	late.Store(true)
	enqueueIn(t, one, "late", "x")
	require.Eventually(t, func() bool { return l.count("late/x") == 1 }, patience, time.Millisecond, "and this after them")
	_, of := one.GetModes()
	require.Equal(t, pgwake.ModePolling, of["early"], "what is served remains as it is")

	require.Equal(t, 2, c.Stats().Failing)
	h := healthOf(c.Health(), "coordinators")
	require.Equal(t, dispatch.Degraded, h.Status)
	require.Len(t, h.Reasons, 2)
	require.Contains(t, h.Reasons[0], `namespace "a": panic: oh`)
	require.Contains(t, h.Reasons[1], `namespace "b": invalid argument: mode 5 is unknown`)
	require.ErrorContains(t, c.Spawn("a"), "oh")
	require.ErrorIs(t, c.Spawn("b"), pgwake.ErrInvalid)
	require.Error(t, c.SetRollout(func(string) pgwake.Mode { panic("no") }))
	c.Retire("a")
	c.Retire("b")
	require.Zero(t, c.Stats().Failing, "that they are not served is as it should be")
	require.Equal(t, dispatch.Healthy, c.Health().Status)
	require.Equal(t, 2, l.total())
	mended.Store(true)
	require.NoError(t, c.Spawn("a"), "without a wait for the next attempt")
	require.NoError(t, c.Spawn("b"))
	require.Eventually(t, func() bool { return l.total() == 4 }, patience, 10*time.Millisecond)
	require.Zero(t, c.Stats().Failing)
	require.Equal(t, dispatch.Healthy, c.Health().Status)
}

// Whoever finds out first that a namespace is to be served, and how many at a time: it has one coordinator.
func TestCoordinators_SpawnedByAllAtOnce_OneEach(t *testing.T) {
	c, one, _, l := sharded(t, dispatch.CoordinatorsConfig{})
	running(t, c)
	served(t, c, "default")
	const rounds, atOnce = 30, 8
	for i := range rounds {
		namespace := "a" + string(rune('a'+i%26)) + string(rune('a'+i/26))
		var all sync.WaitGroup
		begin := make(chan struct{})
		for range atOnce {
			all.Go(func() {
				<-begin
				if err := c.Spawn(namespace); err != nil {
					t.Error(err)
				}
			})
		}
		all.Go(func() { <-begin; enqueueIn(t, one, namespace, "x") })
		close(begin)
		all.Wait()
	}
	require.Eventually(t, func() bool { return l.total() == rounds }, patience, 10*time.Millisecond)
	require.EqualValues(t, rounds+2, c.Stats().Spawned, "and default, of each Source")
	require.Eventually(t, func() bool { s := one.Stats().Worker; return s.Parked == rounds+1 && s.Settled }, patience, 10*time.Millisecond)
}

func TestCoordinators_ScaledToTheDefault_PlacesRemain(t *testing.T) {
	p, l := testschema.Core.New(t, nil), newLedger()
	g := l.all()
	g.Config.Concurrency = 3
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{g}})
	running(t, c)
	served(t, c, "default")
	require.NoError(t, c.Scale("default", 0, 1))
	names := make([]string, 100)
	for i := range names {
		names[i] = string(rune('a' + i%26))
	}
	enqueueIn(t, p, "default", names...)
	require.Eventually(t, func() bool { return c.Stats().Places == 1 || l.total() == len(names) }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return l.total() == len(names) }, patience, 10*time.Millisecond)
	require.ErrorIs(t, c.Scale("default", -1, 1), pgwake.ErrConfig)
}

// faulty is a Source that can be made to fail.
type faulty struct {
	*pgwake.Provider
	fetches, namespaces atomic.Pointer[pgwake.Error]
}

func (f *faulty) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	if err := f.fetches.Load(); err != nil {
		return nil, err
	}
	return f.Provider.FetchWorkItems(ctx, n, o)
}

func (f *faulty) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	if err := f.namespaces.Load(); err != nil {
		return nil, err
	}
	return f.Provider.WaitForNamespaces(ctx, known)
}

func TestHealth_WorkFails_TurnsDoNotHideIt(t *testing.T) {
	f := &faulty{Provider: testschema.Core.New(t, &pgwake.Config{MaxWait: time.Millisecond})}
	g := newLedger().all()
	g.Decider = func(context.Context, *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
		return ack, nil
	}
	c := dispatch.NewCoordinators(f, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{g}})
	f.fetches.Store(&pgwake.Error{Op: "fetch", Err: errors.New("away"), Retryable: true})
	running(t, c)
	unhealthy := func() bool { return c.Health().Status == dispatch.Unhealthy }
	require.Eventually(t, unhealthy, patience, 10*time.Millisecond)
	require.Never(t, func() bool { return !unhealthy() }, 200*time.Millisecond, time.Millisecond)
	require.ErrorContains(t, c.Namespaces()[0].Err, "away")
	f.fetches.Store(nil)
	require.Eventually(t, func() bool { return c.Health().Status == dispatch.Healthy }, patience, 10*time.Millisecond)
	require.NoError(t, c.Namespaces()[0].Err)
}

func TestHealth_HandlersPanic_ThatThereIsWorkIsNoCure(t *testing.T) {
	p := testschema.Core.New(t, nil)
	var times atomic.Int64
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{{Namespaces: []string{"*"}, Handlers: func(*dispatch.Dispatcher) {
		if times.Add(1) > 1 { // the first is when the Group is looked at
			panic("oh")
		}
	}}}})
	stop := running(t, c)
	enqueueIn(t, p, "default", "x")
	require.Eventually(t, func() bool { return times.Load() > 3 }, patience, 10*time.Millisecond)
	require.ErrorContains(t, c.Namespaces()[0].Err, "oh")
	require.GreaterOrEqual(t, c.Namespaces()[0].Failures, 2)
	_ = stop() // which says so too, if it was at it
}

func TestHealth_NoNamespaceCanBeLearnt_NotReady(t *testing.T) {
	f := &faulty{Provider: testschema.Core.New(t, nil)}
	f.namespaces.Store(&pgwake.Error{Op: "wait", Err: errors.New("away"), Retryable: true})
	c := dispatch.NewCoordinators(f, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{newLedger().all()}})
	running(t, c)
	require.Eventually(t, func() bool { return c.Health().Status == dispatch.Unhealthy }, patience, 10*time.Millisecond)
	f.namespaces.Store(nil)
	require.Eventually(t, func() bool { return c.Health().Status == dispatch.Healthy }, patience, 10*time.Millisecond)
}

func TestHealth_AStreamIsAway_NotReady(t *testing.T) {
	s := &plain{err: errors.New("connection refused")}
	c := dispatch.NewCoordinators(dispatch.StreamSource(s, nil), &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{newLedger().all()}})
	require.NoError(t, c.Spawn("a"))
	running(t, c)
	require.Eventually(t, func() bool { return c.Health().Status == dispatch.Unhealthy }, patience, 10*time.Millisecond)
	require.Len(t, c.Health().Parts, 1, "it has neither a listener nor polls")
	code, _ := probe(t, c, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
}

func TestHealth_OneQueryFails_StillReady(t *testing.T) {
	m := newModal(t, pgwake.Config{})
	running(t, m.c)
	m.waits(t, 1)
	m.exec(t, `ALTER TABLE worker_queue RENAME TO away`)
	_, err := m.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.Error(t, err)
	m.exec(t, `ALTER TABLE away RENAME TO worker_queue`)
	require.Equal(t, dispatch.Degraded, healthOf(m.c.Health(), "database").Status)
	require.Equal(t, dispatch.Degraded, m.c.Health().Status)
}

func TestHealth_BeforeRun_NotReadyWhateverElseIsWrong(t *testing.T) {
	c, one, _, _ := sharded(t, dispatch.CoordinatorsConfig{})
	require.NoError(t, one.Close(t.Context()))
	require.Equal(t, dispatch.Unknown, c.Health().Status)
	require.Equal(t, dispatch.Degraded, healthOf(c.Health(), "source").Status)
	code, _ := probe(t, c, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, code)
}
