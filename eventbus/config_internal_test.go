package eventbus

import (
	"log/slog"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what is a setting that nobody has set, and what is one for that shows inside alone?

// Those that document 003 names are as it says.
func TestDefaults_OfZeroValues_AreTheDocuments(t *testing.T) {
	var n NodeConfig
	require.NoError(t, n.complete())
	require.Equal(t, []any{10, 30 * time.Second, DefaultGroup}, []any{n.BatchSize, n.Visibility, n.Group})
	require.Equal(t, []any{10, 5}, []any{n.Concurrency, n.MaxAttempts})
	c, err := (*Config)(nil).resolve()
	require.NoError(t, err)
	require.Equal(t, []any{"default", 1 << 20, 184 * 24 * time.Hour, false}, []any{c.Namespace, c.MaxPayload, c.KeepFor, c.StrictRouting})
	require.Equal(t, 2*time.Second, readPause)
}

func TestSource_HasPlacesForMany_ClaimsABatchAtATime(t *testing.T) {
	t.Parallel()
	p := pgwaketest.New(t, nil)
	bus, err := New(t.Context(), p, nil)
	require.NoError(t, err)
	require.NoError(t, bus.Subscribe(t.Context(), "g", []string{"a"}, nil))
	_, err = bus.EmitMany(t.Context(), []Emission{{Type: "a"}, {Type: "a"}, {Type: "a"}})
	require.NoError(t, err)
	s := &source{p, bus, 2, slog.New(slog.DiscardHandler)}
	for _, want := range []int{2, 1} {
		items, err := s.FetchWorkItems(t.Context(), 10, &pgwake.FetchOptions{Tags: pgwake.Tags("eventbus/g|a")})
		require.NoError(t, err)
		require.Len(t, items, want)
	}
}

// What is short is looked at again at once; what is long costs hardly anything, and is a minute late at most.
func TestReplayPause_IsAQuarterOfTheWaitAndAMinuteAtMost(t *testing.T) {
	t.Parallel()
	for waited, want := range map[time.Duration]time.Duration{
		-time.Hour: noTrouble, 0: noTrouble, 100 * time.Millisecond: noTrouble, 2 * time.Second: 500 * time.Millisecond, 4 * time.Minute: time.Minute,
		24 * time.Hour: time.Minute,
	} {
		require.Equal(t, want, replayPause(&waited), waited)
	}
	require.Equal(t, noTrouble, replayPause(nil))
}
