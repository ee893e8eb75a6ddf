package amqp_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This file answers: is what a lost connection gives back still one message?

// lose cuts the connections, and waits until both ends know of it.
func (s *stream) lose(tb testing.TB) {
	s.cut()
	require.Eventually(tb, func() bool { return s.Lanes() == 0 && s.ready(tb, "a") == 1 }, patience, 10*time.Millisecond)
}

func TestReceive_ConnectionLostAfterTheClaim_HandsNothingOut(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
	got, err := s.ReceiveOne(t.Context(), "a", func() { s.lose(t) })
	require.Error(t, err)
	require.Empty(t, got)
	require.Equal(t, 2, s.one(t, time.Hour).Attempt)
}

func TestLease_EndsAfterTheConnectionIsLost_IsStillOneMessage(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
	require.NoError(t, s.ExpireOne(t.Context(), "a", func() { s.lose(t) }))
	require.Equal(t, 1, s.ready(t, "a"))
}
