package watermill_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

func TestEventType_Topics(t *testing.T) {
	for topic, want := range map[string]string{
		"orders":         "orders",
		"order.created":  "order.created",
		"größe/日本":       "größe/日本",
		"a b\tc":         "a%20b%09c",
		"100%":           "100%25",
		"*.#|":           "%2A.%23%7C",
		".":              "%2E",
		"..":             "%2E%2E",
		"a..b":           "a.%2Eb",
		".a.":            "%2Ea%2E",
		"\xff\x00":       "%FF%00",
		"a\u200bb\u00a0": "a%E2%80%8Bb%C2%A0",
	} {
		got, err := watermill.EventType(topic)
		require.NoError(t, err, "%q", topic)
		require.Equal(t, want, got, "%q", topic)
	}
	for _, topic := range []string{"", strings.Repeat("a", eventbus.MaxTypeLength+1), strings.Repeat(" ", eventbus.MaxTypeLength/3+1)} {
		_, err := watermill.EventType(topic)
		require.ErrorIs(t, err, pgwake.ErrInvalid, "%q", topic)
	}
}

// What decodes back to the topic is not the type of another one; and it is one that there can be.
func FuzzEventType_DecodedIsTheTopic(f *testing.F) {
	for _, topic := range []string{"a", "..a..", "%", "%2E", "a%2Eb", "*#| \xff\u2028\u0085", "\u0378\U000e0001.\ufffd"} {
		f.Add(topic)
	}
	f.Fuzz(func(t *testing.T, topic string) {
		eventType, err := watermill.EventType(topic)
		if err != nil {
			require.True(t, topic == "" || 3*len(topic) > eventbus.MaxTypeLength, "%q: %v", topic, err)
			return
		}
		require.NoError(t, eventbus.CheckType(eventType))
		decoded, err := url.PathUnescape(eventType)
		require.NoError(t, err)
		require.Equal(t, topic, decoded)
	})
}

// The database has a rule of its own for what may be in a type.
func TestPublish_OddTopics_EachReachesItsSubscriberAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	topics := []string{"a", "a.", ".a", "a..b", "a.b", "a%2Eb", "a b", "a*", "#", "|", "\x00", "\xff", "\u0085", "\u00ad", "\u180e", "\u2028", "\u3000", "\ufeff",
		"\ufffd", "\ue000", "ä", "日本"}
	s, p := l.subscriber(nil), l.publisher(&watermill.PublisherConfig{Key: watermill.KeyOfTopic, DedupFor: time.Hour})
	got := make(map[string]<-chan *message.Message)
	for _, topic := range topics {
		got[topic] = l.subscribe(s, topic)
	}
	for _, topic := range topics {
		require.NoError(t, p.Publish(topic, message.NewMessage("u", []byte(topic))), "%q", topic)
	}
	for _, topic := range topics {
		m := l.receive(got[topic])
		require.Equal(t, topic, string(m.Payload))
		m.Ack()
	}
}
