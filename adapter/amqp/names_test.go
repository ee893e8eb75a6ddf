package amqp_test

import (
	"context"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/amqp"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of names that somebody has made up to do harm?

// hostile are texts that become namespaces, and so queues and routing keys; names, headers and bodies of messages.
var hostile = map[string]string{
	"one character":    "a",
	"quotes":           "it's \"quoted\" `so`",
	"SQL":              "x'; DROP TABLE q; --",
	"format":           `%s%n%d {{.}} $1 \0`,
	"pattern":          "#.*.!",
	"path":             "../../%2f?a=b&c",
	"reserved":         "amq.direct",
	"combined":         "a\u0308ß\U0001F600",
	"right to left":    "\u202egnp.exe\u2066",
	"invisible":        "a\u200b\ufeff",
	"white":            " \t ",
	"control":          "\x01\x1b[2J\x7f",
	"NUL":              "a\x00b",
	"line":             "a\nb",
	"dead and a line":  "a.dead\n",
	"return":           "\rab",
	"no UTF-8":         "a\xffb",
	"half a pair":      "a\xed\xa0\x80",
	"longest":          strings.Repeat("é", 80),
	"longer":           strings.Repeat("x", 201),
	"longer than AMQP": strings.Repeat("x", 300),
	"dead":             "a.dead",
	"delay":            "a.delay.8",
	"none":             "",
}

// Each name is refused, and then nothing was declared or sent, or it is another one than all others, and comes out as it was.
func TestNames_Hostile_AreRefusedOrCarriedUnchanged(t *testing.T) {
	b := theBroker(t)
	check := func(t *testing.T, namespace string, m dispatch.StreamMessage) {
		s := newStream(t, b, newPrefix(t), false)
		require.NoError(t, s.Declare(t.Context(), "ab"))
		dead := message("a dead letter of another", 0)
		require.NoError(t, s.Publish(t.Context(), "a", dead))
		require.NoError(t, s.DeadLetter(t.Context(), s.one(t, time.Hour).Receipt, "poison", ""))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		err := s.Publish(ctx, namespace, m)
		if err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			if namespace != "plain" {
				require.ErrorIs(t, s.Declare(ctx, namespace), pgwake.ErrInvalid)
				_, err = s.Receive(ctx, namespace, 1, time.Hour)
				require.ErrorIs(t, err, pgwake.ErrInvalid)
			}
		} else {
			got, err := s.Receive(ctx, namespace, 10, time.Hour)
			require.NoError(t, err)
			require.Len(t, got, 1)
			if m.Name == "" { // it is for the handler that is called as the queue is
				m.Name = s.prefix + namespace
			}
			require.Equal(t, m, got[0].StreamMessage)
			require.Equal(t, namespace, got[0].Namespace)
			require.NoError(t, s.Ack(ctx, []pgwake.LockToken{got[0].Receipt}))
		}
		require.Equal(t, []int{0, 0, 1}, []int{s.ready(t, "a"), s.ready(t, "ab"), s.ready(t, "a.dead")})
	}
	plain := dispatch.StreamMessage{Name: "n", Payload: []byte("p"), Headers: map[string]string{"k": "v"}}
	for what, text := range hostile {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			t.Run("namespace", func(t *testing.T) { check(t, text, plain) })
			for part, change := range map[string]func(*dispatch.StreamMessage){
				"name":   func(m *dispatch.StreamMessage) { m.Name = text },
				"body":   func(m *dispatch.StreamMessage) { m.Payload = []byte(text) },
				"value":  func(m *dispatch.StreamMessage) { m.Headers = map[string]string{"k": text} },
				"header": func(m *dispatch.StreamMessage) { m.Headers = map[string]string{text: "v"} },
			} {
				m := plain
				change(&m)
				t.Run(part, func(t *testing.T) { check(t, "plain", m) })
			}
			t.Run("prefix", func(t *testing.T) {
				s, err := amqp.New(b.url, &amqp.Config{Prefix: text})
				if !utf8.ValidString(text) || strings.ContainsAny(text, "\r\n") {
					require.ErrorIs(t, err, pgwake.ErrConfig)
					return
				}
				require.NoError(t, err)
				s.Close()
			})
		})
	}
}
