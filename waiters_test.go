package pgwake

import (
	"testing"
	"time"

	"github.com/pgwake/pgwake/internal/virtualtime"
	"github.com/stretchr/testify/require"
)

func TestWaiters_SameFilter_SharesALane(t *testing.T) {
	w := testEngine(t, Config{}).waiters
	all, err := w.enter(Worker, filter{})
	require.NoError(t, err)
	again, err := w.enter(Worker, filter{})
	require.NoError(t, err)
	require.Same(t, all, again)
	red, err := w.enter(Worker, filter{Namespaces: []string{"red"}})
	require.NoError(t, err)
	require.NotSame(t, all, red)
	other, err := w.enter(Orchestrator, filter{})
	require.NoError(t, err)
	require.NotSame(t, all, other)

	var served []*lane
	w.each(Worker, "red", func(l *lane) { served = append(served, l) })
	require.ElementsMatch(t, []*lane{all, red}, served)
	served = nil
	w.each(Worker, "blue", func(l *lane) { served = append(served, l) })
	require.Equal(t, []*lane{all}, served)
}

func TestWaiters_LaneThatNobodyUses_IsDroppedAfterAMinute(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w := testEngine(t, Config{}).waiters
		used, err := w.enter(Worker, filter{Namespaces: []string{"used"}})
		require.NoError(t, err)
		gone, err := w.enter(Worker, filter{Namespaces: []string{"gone"}})
		require.NoError(t, err)
		gone.leave(true)
		time.Sleep(time.Minute)
		w.retire()
		require.Len(t, w.lanes(Worker), 2)
		time.Sleep(time.Second)
		w.retire()
		require.Equal(t, []*lane{used}, w.lanes(Worker))
	})
}

func TestWaiters_Closed_AdmitsNobody(t *testing.T) {
	w := testEngine(t, Config{}).waiters
	l, err := w.enter(Worker, filter{})
	require.NoError(t, err)
	w.close()
	w.close()
	_, err = l.park(t.Context(), nil)
	require.ErrorIs(t, err, ErrClosed)
	_, err = w.enter(Worker, filter{})
	require.ErrorIs(t, err, ErrClosed)
}
