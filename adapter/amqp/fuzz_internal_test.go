package amqp

import (
	"math"
	"strconv"
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

// A copy fits, whatever others have put where.
func TestFit_AnyHeaders_LeavesOutNoMoreThanItHasTo(t *testing.T) {
	const frame = 128 << 10
	long := strings.Repeat("ä", 62<<10)
	many := amqp091.Table{}
	for i := range 8000 {
		many[strconv.Itoa(i)] = long[:4]
	}
	for name, c := range map[string]struct {
		headers amqp091.Table
		left    int
	}{
		"none":                  {amqp091.Table{}, 0},
		"the name is empty":     {amqp091.Table{"": long, "k": "v"}, 1},
		"in the place of ours":  {amqp091.Table{headerLeftOut: long, "k": "v"}, 0},
		"as a table":            {amqp091.Table{headerPrefix + "x": amqp091.Table{"x": []any{long[:63<<10], []byte(long[:63<<10])}}, "k": "v"}, 1},
		"one of two is enough":  {amqp091.Table{"a": long[:110<<10], "b": long[:14<<10]}, 1},
		"both are to go":        {amqp091.Table{"a": long, "b": long}, 2},
		"many":                  {many, 0},
		"with an error of ours": {amqp091.Table{"a": long[:100<<10]}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			h := &held{Delivery: amqp091.Delivery{Headers: c.headers, Body: []byte("body")}}
			m := h.copy(1, strings.Repeat("ä", 32<<10), nil)
			m.Headers[headerNumber] = int64(1)
			fit(&m, frame)
			require.LessOrEqual(t, frameOf(&m), frame-brokersOf)
			require.NotEmpty(t, m.Headers[headerError])
			require.Equal(t, []byte("body"), m.Body)
			if left, ok := number(m.Headers[headerLeftOut]); c.left > 0 || ok {
				require.Equal(t, int64(c.left), left)
			}
		})
	}
}
