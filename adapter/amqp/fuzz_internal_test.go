package amqp

import (
	"math"
	"strings"
	"testing"

	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: what is made of the headers of a message, whoever has set them?

// Whatever others have set: an attempt has a number from 1, and a copy one that is no less, and all headers that are not of this package or of the broker.
func FuzzDelivery_AnyHeaders_HasAnAttempt(f *testing.F) {
	f.Add("pgwake-attempt", "x", int64(3), int64(1), true, "7")
	f.Add("pgwake-reason", "dead", int64(3), int64(0), false, "")
	f.Add("x-delivery-count", "", int64(math.MaxInt64), int64(math.MaxInt64), false, "id")
	f.Add("a", "b", int64(math.MinInt64), int64(-1), true, "-9223372036854775808")
	f.Fuzz(func(t *testing.T, name, value string, attempt, count int64, redelivered bool, id string) {
		h := &held{Delivery: amqp091.Delivery{MessageId: id, Redelivered: redelivered, Headers: amqp091.Table{headerAttempt: attempt, deliveryCount: count, name: value}}}
		h.attempt = attemptOf(&h.Delivery)
		require.Positive(t, h.attempt)
		require.LessOrEqual(t, h.attempt, math.MaxInt32, "it is counted on")
		d := delivery(h)
		require.Equal(t, h.attempt, d.Attempt)
		if strings.HasPrefix(name, headerPrefix) || brokers(name) {
			require.Empty(t, d.Headers)
		} else {
			require.Equal(t, map[string]string{name: value}, d.Headers)
		}
		copied := h.copy(h.attempt, "cause", nil)
		after := &held{Delivery: amqp091.Delivery{Headers: copied.Headers}}
		after.attempt = attemptOf(&after.Delivery)
		require.GreaterOrEqual(t, after.attempt, h.attempt)
		require.Equal(t, "cause", delivery(after).LastError)
		require.Equal(t, d.Headers, delivery(after).Headers)
	})
}

// A message that may be sent is delivered as it was sent.
func FuzzMessage_AnyHeader_IsRefusedOrDelivered(f *testing.F) {
	f.Add("name", "header", "value", []byte("{}"))
	f.Add("", "x-death", "", []byte(nil))
	f.Add(strings.Repeat("n", longestShortText+1), "pgwake-reason", "\xff", []byte("\x00"))
	f.Fuzz(func(t *testing.T, name, header, value string, payload []byte) {
		m := &dispatch.StreamMessage{Name: name, Headers: map[string]string{header: value}, Payload: payload}
		if checkMessage(m) != nil {
			return
		}
		p := publishing(m)
		require.NoError(t, p.Headers.Validate())
		d := delivery(&held{Delivery: amqp091.Delivery{Type: p.Type, Headers: p.Headers, Body: p.Body, MessageId: p.MessageId, RoutingKey: name}})
		require.Equal(t, []any{m.Name, m.Headers, m.Payload}, []any{d.Name, d.Headers, d.Payload})
	})
}
