package eventbus_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of a node whose reads fail, or which polls?

// A read that fails, for whatever reason, is tried again after 2 s, and the node goes on.
func TestNode_ReadFails_WaitsTwoSecondsAndGoesOn(t *testing.T) {
	t.Parallel()
	lines := &logged{}
	l := newLab(t, &eventbus.Config{Logger: slog.New(lines)})
	n := l.node(quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	l.emit("a")
	l.eventually(func() bool { return len(s.list()) == 1 }, "it works")
	// A function that is gone is no error that passes by itself.
	l.exec(`ALTER FUNCTION fetch_work RENAME TO fetch_work_gone`)
	l.emit("a")
	failed := func() []time.Time { return lines.of("eventbus: cannot read deliveries") }
	l.eventually(func() bool { return len(failed()) >= 2 }, "reads fail")
	l.exec(`ALTER FUNCTION fetch_work_gone RENAME TO fetch_work`)
	l.eventually(func() bool { return len(s.list()) == 2 }, "it goes on")
	require.GreaterOrEqual(t, failed()[1].Sub(failed()[0]), 2*time.Second)
}

// logged is a slog.Handler that keeps when each message was logged.
type logged struct {
	slog.Handler
	mu    sync.Mutex
	times map[string][]time.Time
}

func (*logged) Enabled(context.Context, slog.Level) bool { return true }
func (h *logged) WithAttrs([]slog.Attr) slog.Handler     { return h }

func (h *logged) Handle(_ context.Context, r slog.Record) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.times == nil {
		h.times = make(map[string][]time.Time)
	}
	h.times[r.Message] = append(h.times[r.Message], r.Time)
	return nil
}

func (h *logged) of(message string) []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.times[message])
}

func TestNode_PollingProvider_HandlesWhatIsEmittedElsewhere(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	p := pgwaketest.Open(t, &pgwake.Config{Schema: l.p.Schema(), SkipMigrate: true, Mode: pgwake.ModePolling, PollInterval: time.Second})
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	n := l.nodeOn(bus, quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "a", s.ids))
	for range 3 {
		l.emit("a")
	}
	l.eventually(func() bool { return len(s.list()) == 3 }, "all are handled")
	require.False(t, p.Stats().Listening)
}
