package watermill_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/watermill"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// numbered publishes messages whose UUIDs are 0, 1 and so on.
func (l *lab) numbered(config *watermill.PublisherConfig, n int) {
	l.t.Helper()
	var messages []*message.Message
	for i := range n {
		messages = append(messages, message.NewMessage(strconv.Itoa(i), nil))
	}
	require.NoError(l.t, l.publisher(config).Publish("t", messages...))
}

func TestNack_MessageComesAgainBeforeThoseAfterIt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "t")
	l.numbered(&watermill.PublisherConfig{Key: watermill.KeyOfTopic}, 3)
	for i := range 3 {
		for attempt := range 7 { // more often than a delivery of the bus is tried
			m := l.receive(messages)
			require.Equal(t, strconv.Itoa(i), m.UUID)
			require.Equal(t, attempt, watermill.EventFrom(m.Context()).Redelivery)
			if attempt < 6 {
				require.True(t, m.Nack())
				<-m.Context().Done()
			} else {
				require.True(t, m.Ack())
			}
		}
	}
}

func TestNack_MaxAttempts_IsADeadLetter(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{MaxAttempts: 2}}), "t")
	l.numbered(nil, 1)
	for range 2 {
		l.receive(messages).Nack()
	}
	l.eventually(func() bool { return l.count("dead_letters") == 1 }, "it is given up")
	require.Empty(t, messages)
}

func TestSubscribe_ConcurrencyOfOne_TheNextComesAfterTheAck(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{Concurrency: 1}})
	messages := l.subscribe(s, "t")
	l.numbered(nil, 2)
	first := l.receive(messages)
	select {
	case <-messages:
		t.Fatal("there are two at one time")
	case <-time.After(100 * time.Millisecond):
	}
	first.Ack()
	l.receive(messages).Ack()
}

func TestClose_WhatNobodyReceived_GoesToOthersAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{StopTimeout: patience}})
	messages := l.subscribe(s, "t")
	l.numbered(nil, 20)
	l.receive(messages).Ack()
	require.NoError(t, s.Close())
	_, open := <-messages
	require.False(t, open)
	others := l.subscribe(l.subscriber(nil), "t")
	for range 19 {
		m := l.receive(others)
		require.Zero(t, watermill.EventFrom(m.Context()).Redelivery, "it was in nobody's hand")
		m.Ack()
	}
	l.eventually(func() bool { return l.count("worker_queue") == 0 }, "each came once")
}

func TestClose_MessageAtWork_WaitsForTheAck(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{StopTimeout: patience}})
	messages := l.subscribe(s, "t")
	l.numbered(nil, 1)
	m := l.receive(messages)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	l.eventually(func() bool { return s.SubscribeInitialize("t") != nil }, "it is about to close")
	require.NoError(t, m.Context().Err(), "it has time")
	m.Ack()
	require.NoError(t, <-closed)
	ended(l, messages)
	require.Zero(t, l.count("worker_queue"))
	require.NoError(t, s.Close())
}

func TestClose_MessageAtWorkForTooLong_ItsContextEndsAndItComesAgain(t *testing.T) {
	t.Parallel()
	for _, transactional := range []bool{false, true} {
		t.Run(fmt.Sprintf("transactional=%v", transactional), func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			config := &watermill.SubscriberConfig{Transactional: transactional, Node: eventbus.NodeConfig{StopTimeout: time.Millisecond}}
			s := l.subscriber(config)
			messages := l.subscribe(s, "t")
			l.numbered(nil, 1)
			m := l.receive(messages)
			require.NoError(t, s.Close())
			require.Error(t, m.Context().Err())
			ended(l, messages)
			again := l.receive(l.subscribe(l.subscriber(config), "t"))
			require.Equal(t, m.UUID, again.UUID)
			again.Ack()
		})
	}
}

// Its transaction is not taken away while it is in use.
func TestClose_MessageAtWorkForTooLong_HasTimeToLeaveItsTransaction(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(&watermill.SubscriberConfig{Transactional: true, Node: eventbus.NodeConfig{StopTimeout: time.Millisecond}})
	messages := l.subscribe(s, "t")
	l.numbered(nil, 1)
	m := l.receive(messages)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	ended(l, m.Context().Done())
	_, err := watermill.TxFrom(m.Context()).Exec(context.Background(), `SELECT pg_sleep(0.1)`)
	require.NoError(t, err)
	m.Nack()
	require.NoError(t, <-closed)
}

func TestSubscribe_Timeout_MessageComesAgain(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{Timeout: time.Second}}), "t")
	l.numbered(nil, 1)
	m := l.receive(messages)
	ended(l, m.Context().Done())
	again := l.receive(messages)
	require.Equal(t, 1, watermill.EventFrom(again.Context()).Redelivery)
	again.Ack()
}

func TestClose_ManyTimesAndWhileOthersSubscribe_NothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := l.subscriber(nil)
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			messages, err := s.Subscribe(context.Background(), "t")
			if err != nil {
				require.ErrorIs(t, err, pgwake.ErrClosed)
				return
			}
			if i%4 == 0 {
				require.NoError(t, s.Close())
			}
			ended(l, messages)
		})
	}
	all.Wait()
	require.NoError(t, s.Close())
	_, err := s.Subscribe(context.Background(), "t")
	require.ErrorIs(t, err, pgwake.ErrClosed)
	require.ErrorIs(t, s.SubscribeInitialize("t"), pgwake.ErrClosed)
}

type contextKey struct{}

func TestSubscribe_ItsContext_IsThatOfMessagesAndEndsIt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), contextKey{}, "value"))
	defer cancel()
	messages, err := l.subscriber(nil).Subscribe(ctx, "t")
	require.NoError(t, err)
	l.numbered(nil, 1)
	m := l.receive(messages)
	require.Equal(t, "value", m.Context().Value(contextKey{}))
	require.Nil(t, watermill.TxFrom(m.Context()))
	cancel()
	ended(l, m.Context().Done())
	m.Ack() // it was at work, and has come to its end
	ended(l, messages)
	require.Zero(t, l.count("worker_queue"))
	require.Nil(t, watermill.EventFrom(context.Background()))
}

func TestSubscribe_ProviderIsClosed_ChannelIsClosed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	messages := l.subscribe(l.subscriber(nil), "t")
	require.NoError(t, l.p.Close(l.within()))
	ended(l, messages)
}

func TestSubscribe_Transactional_EffectsAreThoseOfTheAck(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := pgx.Identifier{l.p.Schema(), "effects"}.Sanitize()
	_, err := l.p.Pool().Exec(l.within(), `CREATE TABLE `+table+` (attempt int)`)
	require.NoError(t, err)
	s := l.subscriber(&watermill.SubscriberConfig{Transactional: true})
	messages, next := l.subscribe(s, "t"), l.subscribe(s, "next")
	p := l.publisher(nil)
	l.numbered(nil, 1)
	for attempt := range 3 {
		m := l.receive(messages)
		tx := watermill.TxFrom(m.Context())
		_, err := tx.Exec(m.Context(), `INSERT INTO `+table+` VALUES ($1)`, attempt)
		require.NoError(t, err)
		require.NoError(t, p.WithTx(tx).Publish("next", message.NewMessage(strconv.Itoa(attempt), nil)))
		require.Error(t, tx.Commit(m.Context()), "that is for the ack")
		if attempt < 2 {
			m.Nack()
		} else {
			m.Ack()
		}
	}
	m := l.receive(next)
	require.Equal(t, "2", m.UUID)
	m.Ack()
	l.eventually(func() bool { return l.count("worker_queue") == 0 }, "all is done")
	require.Equal(t, 1, l.count("effects"))
	require.Equal(t, 2, l.count("event_log"))
}

func TestSubscribe_FromBeginning_IsForAGroupThatIsNew(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.numbered(nil, 2)
	config := &watermill.SubscriberConfig{FromBeginning: true, Node: eventbus.NodeConfig{Group: "late"}}
	s := l.subscriber(config)
	require.NoError(t, s.SubscribeInitialize("t"))
	messages := l.subscribe(l.subscriber(config), "t")
	for range 2 {
		l.receive(messages).Ack()
	}
	_, err := s.Subscribe(context.Background(), "other")
	require.ErrorIs(t, err, pgwake.ErrInvalid, "nobody would notice that it begins later")
}

// The Subscriber of another process makes the group, for another topic.
func TestSubscribe_FromBeginningWhileAnotherMakesTheGroup_IsRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.numbered(nil, 1)
	other, err := watermill.EventType("other")
	require.NoError(t, err)
	tx, err := l.p.Pool().Begin(l.within())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	require.NoError(t, l.bus.WithTx(tx).Subscribe(l.within(), "late", []string{other}, &eventbus.SubscribeOptions{FromBeginning: true}))
	s := l.subscriber(&watermill.SubscriberConfig{FromBeginning: true, Node: eventbus.NodeConfig{Group: "late"}})
	declared := make(chan error, 1)
	go func() { declared <- s.SubscribeInitialize("t") }()
	l.eventually(func() (waits bool) {
		require.NoError(t, l.p.Pool().QueryRow(l.within(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`,
			tx.Conn().PgConn().PID()).Scan(&waits))
		return waits
	}, "it waits for whoever makes the group")
	require.NoError(t, tx.Commit(l.within()))
	require.ErrorIs(t, <-declared, pgwake.ErrInvalid, "it would begin later")
	groups, err := l.bus.Groups(l.within())
	require.NoError(t, err)
	require.Len(t, groups, 1)
	require.Equal(t, []string{other}, groups[0].Patterns)
}

// What a message has to do with is in the trace of whoever published it.
func TestSubscribe_MessagesContext_BelongsToTheTrace(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent, Propagator: propagation.TraceContext{}})
	require.NoError(t, err)
	l := &lab{t, p, bus}
	messages := l.subscribe(l.subscriber(nil), "t")
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	sent := message.NewMessageWithContext(trace.ContextWithSpanContext(context.Background(), span), "u", nil)
	require.NoError(t, l.publisher(nil).Publish("t", sent))
	m := l.receive(messages)
	require.Equal(t, span.TraceID(), trace.SpanContextFromContext(m.Context()).TraceID())
	require.Empty(t, m.Metadata)
	m.Ack()
}

func TestSubscriber_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, err := watermill.NewSubscriber(nil, nil)
	require.ErrorIs(t, err, pgwake.ErrConfig)
	_, err = watermill.NewSubscriber(l.bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Group: "a|b"}})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	s := l.subscriber(&watermill.SubscriberConfig{Node: eventbus.NodeConfig{Concurrency: -1}})
	_, err = s.Subscribe(l.within(), "t")
	require.ErrorIs(t, err, pgwake.ErrConfig)
	_, err = s.Subscribe(l.within(), "")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorIs(t, s.SubscribeInitialize(""), pgwake.ErrInvalid)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = s.Subscribe(over, "t")
	require.ErrorIs(t, err, context.Canceled)
}

// Messages are published, and received, over two restarts, one of them a crash.
func TestSubscribe_ServerIsRestarted_NothingIsLost(t *testing.T) {
	t.Parallel()
	server := ownServer(t)
	bus := process(t, server.URL, &pgwake.Config{})
	s := newSubscriber(t, bus, &watermill.SubscriberConfig{Node: eventbus.NodeConfig{Visibility: 2 * time.Second}})
	messages, err := s.Subscribe(context.Background(), "t")
	require.NoError(t, err)
	p, err := watermill.NewPublisher(bus, &watermill.PublisherConfig{DedupFor: time.Hour})
	require.NoError(t, err)
	const all = 300
	var publishing sync.WaitGroup
	publishing.Go(func() {
		for i := range all {
			for p.Publish("t", message.NewMessage(strconv.Itoa(i), nil)) != nil && t.Context().Err() == nil {
			}
		}
	})
	restarts := map[int]devpg.Mode{all / 3: devpg.Fast, all / 2: devpg.Immediate}
	var restarting sync.WaitGroup
	got := map[string]bool{}
	for len(got) < all {
		select {
		case m := <-messages:
			got[m.UUID] = true
			m.Ack()
		case <-time.After(2 * patience):
			t.Fatalf("%d of %d came", len(got), all)
		}
		if mode, is := restarts[len(got)]; is {
			delete(restarts, len(got))
			restarting.Go(func() {
				if err := server.Restart(context.Background(), mode); err != nil {
					t.Error(err)
				}
			})
		}
	}
	publishing.Wait()
	restarting.Wait()
}
