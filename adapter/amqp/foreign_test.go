package amqp_test

import (
	"context"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of a message that the client library does not read?

// Each delivery of it ends the connection. A quorum queue with a limit puts it to the dead letters, and all others are received.
func TestReceive_HeadersThatTheClientDoesNotRead_DeliveryLimitEndsIt(t *testing.T) {
	b := theBroker(t).own(t)
	s := newStream(t, b, newPrefix(t), true)
	require.NoError(t, s.Declare(t.Context(), "a"))
	b.control(t, "set_policy", "limit", "^"+s.prefix, `{"delivery-limit": 2}`, "--apply-to", "queues")
	defer b.control(t, "clear_policy", "limit")
	deep := amqp091.Table{"k": "v"}
	for range 40 {
		deep = amqp091.Table{"k": deep}
	}
	require.NoError(t, s.foreign(t, deep))
	require.NoError(t, s.Publish(t.Context(), "a", message("good", 0)))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	failures := 0
	for {
		got, err := s.Receive(ctx, "a", 1, time.Minute)
		if err == nil {
			require.Equal(t, "good", got[0].Name)
			break
		}
		require.NoError(t, ctx.Err(), err)
		failures++
	}
	require.Positive(t, failures, "the library reads it, and so there is no need for a limit")
	require.Eventually(t, func() bool { return s.ready(t, "a.dead") == 1 }, patience, 10*time.Millisecond)
}
