package watermill_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

func TestPublish_AnyBytes_ComeAsTheyWere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "t")
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	p := l.publisher(&watermill.PublisherConfig{Key: watermill.KeyOfTopic})
	for i, payload := range [][]byte{nil, {}, every, []byte("text"), []byte(`{"b": 1,  "a": 1e2}`), {0}, []byte("\xff"), []byte("<&>\u2028\"\\\n"), []byte("\xed\xa0\x80"),
		[]byte(`\u0000`), []byte("null")} {
		sent := message.NewMessage([]string{"", "id"}[i%2], payload)
		if i%3 == 0 {
			sent.Metadata = message.Metadata{"": "", "k": "<&>\u2028\"\\", "traceparent": "x", watermill.HeaderUUID: "mine"}
		}
		require.NoError(t, p.Publish("t", sent))
		got := l.receive(messages)
		require.True(t, sent.Equals(got), "%q came as %q with %v", payload, got.Payload, got.Metadata)
		require.True(t, got.Ack())
	}
}

func TestPublish_JSON_IsWhatOthersRead(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	require.NoError(t, l.bus.Subscribe(l.within(), "native", []string{"order.created"}, nil))
	messages := l.subscribe(l.subscriber(nil), "order.created")
	p := l.publisher(&watermill.PublisherConfig{JSON: true})
	for _, bad := range []string{"", "{", "text", "\xff"} {
		require.ErrorIs(t, p.Publish("order.created", message.NewMessage("u", []byte(bad))), pgwake.ErrInvalid, bad)
	}
	m := message.NewMessage("u", []byte(`{"id":7}`))
	m.Metadata.Set("k", "v")
	require.NoError(t, p.Publish("order.created", m))
	native := make(chan *eventbus.Event, 1)
	node, err := l.bus.Node(l.within(), &eventbus.NodeConfig{Group: "native"})
	require.NoError(t, err)
	require.NoError(t, node.OnPlain(l.within(), "order.*", func(_ context.Context, e *eventbus.Event) error {
		native <- e
		return nil
	}))
	require.NoError(t, node.Start(l.within()))
	defer func() { require.NoError(t, node.Stop(l.within())) }()
	e := <-native
	require.JSONEq(t, `{"id": 7}`, string(e.Payload))
	require.JSONEq(t, `{"k": "v"}`, string(e.Metadata))
	got := l.receive(messages)
	require.JSONEq(t, `{"id": 7}`, string(got.Payload))
	require.Equal(t, "u", got.UUID)
	require.Equal(t, message.Metadata{"k": "v"}, got.Metadata)
	require.True(t, got.Ack())
}

func TestSubscribe_EventThatIsNoMessage_IsReceivedAsOne(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "a")
	_, err := l.bus.Emit(l.within(), "a", "text", &eventbus.EmitOptions{Key: "k", Headers: map[string]string{"h": "1"}, Metadata: map[string]any{"n": 7, "s": "x"}})
	require.NoError(t, err)
	m := l.receive(messages)
	require.Equal(t, `"text"`, string(m.Payload))
	require.Equal(t, message.Metadata{"n": "7", "s": "x"}, m.Metadata)
	e := watermill.EventFrom(m.Context())
	require.Equal(t, m.UUID, json.Number(m.UUID).String())
	require.Equal(t, "k", e.Key)
	require.Equal(t, "1", e.Headers["h"])
	require.True(t, m.Ack())
}

// A broken one is a dead letter, and nobody waits for it.
func TestSubscribe_EventWithWrongHeader_IsADeadLetter(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "a")
	for kind, payload := range map[string]any{watermill.PayloadText: 7, watermill.PayloadBase64: "?"} {
		_, err := l.bus.Emit(l.within(), "a", payload, &eventbus.EmitOptions{Headers: map[string]string{watermill.HeaderPayload: kind}})
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		letters, err := l.p.ListDeadLetters(l.within(), nil)
		require.NoError(t, err)
		return len(letters) == 2
	}, patience, 10*time.Millisecond)
	require.Empty(t, messages)
}

func TestPublish_InATransaction_IsAnOutbox(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "t")
	p := l.publisher(nil)
	publish := func(uuid string, end func(pgx.Tx) error) {
		tx, err := l.p.Pool().Begin(l.within())
		require.NoError(t, err)
		require.NoError(t, p.WithTx(tx).Publish("t", message.NewMessage(uuid, nil)))
		require.NoError(t, end(tx))
	}
	publish("rolled back", func(tx pgx.Tx) error { return tx.Rollback(l.within()) })
	publish("committed", func(tx pgx.Tx) error { return tx.Commit(l.within()) })
	m := l.receive(messages)
	require.Equal(t, "committed", m.UUID)
	require.True(t, m.Ack())
	require.Equal(t, 1, l.count("event_log"))
}

func TestPublish_DedupFor_TheSameUUIDOncePerTopic(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(nil)
	a, b := l.subscribe(s, "a"), l.subscribe(s, "b")
	p := l.publisher(&watermill.PublisherConfig{DedupFor: time.Hour, Key: watermill.KeyOfTopic})
	for range 2 {
		require.NoError(t, p.Publish("a", message.NewMessage("u", nil), message.NewMessage("v", nil)))
		require.NoError(t, p.Publish("b", message.NewMessage("u", nil)))
	}
	require.NoError(t, p.Publish("a", message.NewMessage("last", nil)))
	require.NoError(t, p.Publish("b", message.NewMessage("last", nil)))
	for _, uuid := range []string{"u", "v", "last"} {
		m := l.receive(a)
		require.Equal(t, uuid, m.UUID)
		require.True(t, m.Ack())
	}
	for _, uuid := range []string{"u", "last"} {
		m := l.receive(b)
		require.Equal(t, uuid, m.UUID)
		require.True(t, m.Ack())
	}
	require.ErrorIs(t, p.Publish("a", message.NewMessage("", nil)), pgwake.ErrInvalid)
}

// All or none: what is wrong with the last keeps the first from being published.
func TestPublish_BadArguments_NothingIsPublished(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(nil)
	require.NoError(t, s.SubscribeInitialize("t"))
	p := l.publisher(&watermill.PublisherConfig{Key: func(_ string, m *message.Message) string { return m.Metadata.Get("key") }})
	good := message.NewMessage("u", nil)
	bad := func(set func(*message.Message)) *message.Message {
		m := message.NewMessage("u", nil)
		set(m)
		return m
	}
	for name, m := range map[string]*message.Message{
		"uuid":     bad(func(m *message.Message) { m.UUID = "\xff" }),
		"nul":      bad(func(m *message.Message) { m.UUID = "\x00" }),
		"name":     bad(func(m *message.Message) { m.Metadata.Set("\xff", "") }),
		"metadata": bad(func(m *message.Message) { m.Metadata.Set("k", "\x00") }),
		"key":      bad(func(m *message.Message) { m.Metadata.Set("key", string(make([]byte, 300))) }),
	} {
		require.ErrorIs(t, p.Publish("t", good, m), pgwake.ErrInvalid, name)
	}
	require.ErrorIs(t, p.Publish("t", good, message.NewMessage("u", make([]byte, 2<<20))), pgwake.ErrPayloadTooLarge)
	require.ErrorIs(t, p.Publish("", good), pgwake.ErrInvalid)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, p.Publish("t", message.NewMessageWithContext(ended, "u", nil)), context.Canceled)
	require.NoError(t, p.Publish("t"))
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	require.ErrorIs(t, p.Publish("t", good), pgwake.ErrClosed)
	require.Zero(t, l.count("event_log"))

	_, err := watermill.NewPublisher(nil, nil)
	require.ErrorIs(t, err, pgwake.ErrConfig)
	_, err = watermill.NewPublisher(l.bus, &watermill.PublisherConfig{DedupFor: -1})
	require.ErrorIs(t, err, pgwake.ErrConfig)
}
