package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: is each message that was published in a queue, also when somebody has deleted that?

// manage has a channel for something that a Stream does not do.
func (s *stream) manage(tb testing.TB, do func(*amqp091.Channel) error) error {
	tb.Helper()
	ch := s.channel(tb)
	defer ch.Close() // which is answered once all of it was done
	return do(ch)
}

func (s *stream) remove(tb testing.TB, queue string) {
	tb.Helper()
	require.NoError(tb, s.manage(tb, func(ch *amqp091.Channel) error {
		_, err := ch.QueueDelete(s.prefix+queue, false, false, false)
		return err
	}))
}

// ready is how many messages of a queue are in nobody's hand; -1: there is no such queue.
func (s *stream) ready(tb testing.TB, queue string) (n int) {
	tb.Helper()
	err := s.manage(tb, func(ch *amqp091.Channel) error {
		q, err := ch.QueueDeclarePassive(s.prefix+queue, true, false, false, false, nil)
		n = q.Messages
		return err
	})
	if answer := (*amqp091.Error)(nil); errors.As(err, &answer) && answer.Code == amqp091.NotFound {
		return -1
	}
	require.NoError(tb, err)
	return n
}

func message(name string, delay time.Duration) dispatch.StreamMessage {
	return dispatch.StreamMessage{Name: name, Payload: []byte(`{}`), Delay: delay}
}

func (s *stream) one(tb testing.TB, lease time.Duration) dispatch.StreamDelivery {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	got, err := s.Receive(ctx, "a", 1, lease)
	require.NoError(tb, err)
	require.Len(tb, got, 1)
	return got[0]
}

func eachType(t *testing.T, test func(t *testing.T, s *stream)) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		t.Run(name, func(t *testing.T) { test(t, newStream(t, theBroker(t), newPrefix(t), quorum)) })
	}
}

func TestPublish_QueueDeleted_IsDeclaredAgain(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Declare(t.Context(), "a"))
		s.remove(t, "a")
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0), message("second", 0)))
		require.Len(t, s.take(t, s.prefix+"a", false), 2)
	})
}

func TestPublish_OneQueueOfTwoDeleted_SendsNoneTwice(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	const delay = 8 * time.Millisecond
	require.NoError(t, s.Publish(t.Context(), "a", message("before", delay)))
	require.Equal(t, "before", s.one(t, time.Hour).Name)
	s.remove(t, "a.delay.8")
	require.NoError(t, s.Publish(t.Context(), "a", message("later", delay), message("now", 0)))
	require.Eventually(t, func() bool { return s.ready(t, "a") >= 2 }, patience, 10*time.Millisecond)
	names := make(map[string]int)
	for _, d := range s.take(t, s.prefix+"a", false) {
		names[d.Type]++
	}
	require.Equal(t, map[string]int{"later": 1, "now": 1}, names)
}

func TestPublish_WithDelay_QueueDeleted_IsDeclaredAgainSoon(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	require.NoError(t, s.Publish(t.Context(), "a", message("before", time.Hour)))
	s.remove(t, "a")
	require.Eventually(t, func() bool {
		require.NoError(t, s.Publish(t.Context(), "a", message("after", time.Hour)))
		return s.ready(t, "a") == 0
	}, patience, 50*time.Millisecond)
}

func TestNack_QueueDeleted_IsDeclaredAgain(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
		d := s.one(t, time.Hour)
		s.remove(t, "a")
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Error: "not now"}))
		again := s.one(t, time.Hour)
		require.Equal(t, "first", again.Name)
		require.Equal(t, "not now", again.LastError)
	})
}

// While everything is at work nobody is a consumer, whom RabbitMQ would tell.
func TestReceive_QueueDeletedWhileNobodyReceives_IsDeclaredAgain(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
		d := s.one(t, time.Hour)
		s.remove(t, "a")
		require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}))
		received := make(chan string, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			got, err := s.Receive(ctx, "a", 1, time.Hour)
			for err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "not connected") { // the broker takes its time to declare it
				got, err = s.Receive(ctx, "a", 1, time.Hour)
			}
			if err != nil {
				t.Errorf("receive: %v", err)
				close(received)
				return
			}
			received <- got[0].Name
		}()
		require.Eventually(t, func() bool { return s.ready(t, "a") == 0 }, patience, 10*time.Millisecond)
		// Who sends it knows nothing of Streams, and declares nothing.
		require.Eventually(t, func() bool { // a queue of several brokers refuses messages until it has a leader
			err := s.confirmed(t, amqp091.Publishing{Type: "second"})
			if !errors.Is(err, errNotConfirmed) {
				require.NoError(t, err)
			}
			return err == nil
		}, patience, 10*time.Millisecond)
		require.Equal(t, "second", <-received)
	})
}

func TestNack_DelayThatRabbitMQCannotKeep_IsTheLongestThatItCan(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
		d := s.one(t, time.Hour)
		require.ErrorIs(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Delay: -1}), pgwake.ErrInvalid)
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Delay: 60 * 24 * time.Hour}))
		const kept = "a.delay.3489660928" // 40 days, rounded up
		require.Equal(t, 1, s.ready(t, kept))
		s.remove(t, kept)
	})
}

func TestDeadLetter_QueueDeleted_IsDeclaredAgain(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
		d := s.one(t, time.Hour)
		s.remove(t, "a.dead")
		require.NoError(t, s.DeadLetter(t.Context(), d.Receipt, "reason", "cause"))
		require.Len(t, s.take(t, s.prefix+"a.dead", false), 1)
	})
}

// A dead letter that somebody sends again, as it is in its queue, is a message that was never tried.
func TestReceive_DeadLetterSentAgain_BeginsAnew(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
		for _, next := range []func(dispatch.StreamDelivery) error{
			func(d dispatch.StreamDelivery) error {
				return s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Error: "no luck"})
			},
			func(d dispatch.StreamDelivery) error {
				return s.DeadLetter(t.Context(), d.Receipt, "poison", "cause")
			},
		} {
			require.NoError(t, next(s.one(t, time.Hour)))
		}
		dead := s.take(t, s.prefix+"a.dead", false)
		require.Len(t, dead, 1)
		require.NoError(t, s.manage(t, func(ch *amqp091.Channel) error {
			return ch.PublishWithContext(t.Context(), "", s.prefix+"a", true, false, amqp091.Publishing{Type: dead[0].Type, Headers: dead[0].Headers, Body: dead[0].Body})
		}))
		for attempt := 1; attempt <= 3; attempt++ {
			d := s.one(t, time.Hour)
			require.Equal(t, "first", d.Name)
			require.Equal(t, attempt, d.Attempt)
			if attempt == 1 {
				require.Empty(t, d.LastError)
			}
			require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}))
		}
		require.NoError(t, s.DeadLetter(t.Context(), s.one(t, time.Hour).Receipt, "again", "another cause"))
		dead = s.take(t, s.prefix+"a.dead", false)
		require.Len(t, dead, 1)
		require.Equal(t, []any{int64(4), "again", "another cause"}, []any{dead[0].Headers["pgwake-attempt"], dead[0].Headers["pgwake-reason"], dead[0].Headers["pgwake-cause"]})
	})
}

// RabbitMQ would end the connection, and with it what others publish.
func TestPublish_HeadersThatNoFrameHolds_AreInvalid(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	m := message("first", 0)
	m.Headers = map[string]string{"a": strings.Repeat("x", 30<<10), "b": strings.Repeat("x", 30<<10)}
	require.NoError(t, s.Publish(t.Context(), "a", m))
	require.NoError(t, s.Nack(t.Context(), s.one(t, time.Hour).Receipt, pgwake.AbandonOptions{Error: strings.Repeat("e", 16<<10)}))
	require.NoError(t, s.DeadLetter(t.Context(), s.one(t, time.Hour).Receipt, "poison", strings.Repeat("c", 16<<10)))
	require.Len(t, s.take(t, s.prefix+"a.dead", false), 1)
	m.Headers["c"] = strings.Repeat("x", 200<<10)
	require.ErrorIs(t, s.Publish(t.Context(), "a", message("second", 0), m), pgwake.ErrInvalid)
	require.Zero(t, s.ready(t, "a"))
}

// RabbitMQ would put copies to other queues, or, since a text is no list of them, end the channel, and with it what others publish.
func TestPublish_HeadersThatRouteCopies_AreInvalid(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	require.NoError(t, s.Declare(t.Context(), "a"))
	for _, header := range []string{"CC", "BCC"} {
		m := message("second", 0)
		m.Headers = map[string]string{header: s.prefix + "b"}
		err := s.Publish(t.Context(), "a", message("first", 0), m)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
		require.ErrorContains(t, err, fmt.Sprintf("%q", header))
	}
	require.Zero(t, s.ready(t, "a"))
	m := message("first", 0)
	m.Headers = map[string]string{"CCs": "x", "cc": "y"} // which are like any other
	require.NoError(t, s.Publish(t.Context(), "a", m))
	require.Equal(t, m.Headers, s.one(t, time.Hour).Headers)
}

// Whoever sent it has chosen who gets a copy of that, and not of what becomes of it.
func TestNackAndDeadLetter_HeadersThatRouteCopies_AreDropped(t *testing.T) {
	eachType(t, func(t *testing.T, s *stream) {
		for _, namespace := range []string{"a", "other", "hidden"} {
			require.NoError(t, s.Declare(t.Context(), namespace))
		}
		require.NoError(t, s.manage(t, func(ch *amqp091.Channel) error {
			return ch.PublishWithContext(t.Context(), "", s.prefix+"a", true, false, amqp091.Publishing{Type: "first", Headers: amqp091.Table{
				"CC": []any{s.prefix + "other"}, "BCC": []any{s.prefix + "hidden"}, "k": "v",
			}})
		}))
		require.Eventually(t, func() bool { return s.ready(t, "other") == 1 && s.ready(t, "hidden") == 1 }, patience, 10*time.Millisecond)
		again := func(d dispatch.StreamDelivery) {
			t.Helper()
			require.Equal(t, map[string]string{"k": "v"}, d.Headers, "what a handler may send on")
		}
		d := s.one(t, time.Hour)
		again(d)
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}))
		again(s.one(t, 10*time.Millisecond)) // nobody extends it
		d = s.one(t, time.Hour)
		again(d)
		require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Delay: time.Millisecond}))
		d = s.one(t, time.Hour)
		again(d)
		require.NoError(t, s.DeadLetter(t.Context(), d.Receipt, "poison", "cause"))
		require.Len(t, s.take(t, s.prefix+"a.dead", true), 1)
		require.Equal(t, 1, s.ready(t, "other"))
		require.Equal(t, 1, s.ready(t, "hidden"))
	})
}

func TestLease_Ends_QueueDeleted_IsDeclaredAgain(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
	d := s.one(t, time.Hour)
	s.remove(t, "a")
	require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, time.Millisecond)) // not sooner, or it is in the queue that is removed
	require.Eventually(t, func() bool { return s.ready(t, "a") == 1 }, patience, 10*time.Millisecond)
}

// Returns and confirmations come by one goroutine, and whoever waits for them is many.
func TestPublish_QueueDeletedAgainAndAgain_EachCallReturns(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var publishers sync.WaitGroup
	for p := range 8 {
		publishers.Go(func() {
			for i := range 50 {
				_ = s.Publish(ctx, "a", message(fmt.Sprintf("%d-%d", p, i), 0)) // or there was no queue twice
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		publishers.Wait()
	}()
	for deleted := false; !deleted; {
		s.remove(t, "a")
		select {
		case <-ended:
			deleted = true
		default:
		}
	}
	require.NoError(t, ctx.Err())
	require.NoError(t, s.Publish(ctx, "a", message("last", 0)))
	require.Equal(t, 1, s.ready(t, "a"))
}

// foreign sends a message to queue a as others may, with what headers they like.
func (s *stream) foreign(tb testing.TB, headers amqp091.Table) error {
	tb.Helper()
	return s.confirmed(tb, amqp091.Publishing{Type: "first", Headers: headers, Body: []byte(`{"n": 1}`)})
}

var errNotConfirmed = errors.New("not confirmed")

// confirmed sends a message to queue a, and waits until it is there: a quorum queue that has no leader yet loses it when the channel ends.
func (s *stream) confirmed(tb testing.TB, m amqp091.Publishing) error {
	tb.Helper()
	return s.manage(tb, func(ch *amqp091.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		c, err := ch.PublishWithDeferredConfirm("", s.prefix+"a", true, false, m)
		if err == nil && !c.Wait() {
			err = errNotConfirmed
		}
		return err
	})
}

// Others may send headers that fill a frame, so that a copy with more in it would be too large for one: RabbitMQ ends the connection for that.
func TestCopies_HeadersFillAFrame_FitAndCostNobodyTheConnection(t *testing.T) {
	const frame = 128 << 10
	eachType(t, func(t *testing.T, s *stream) {
		require.NoError(t, s.Declare(t.Context(), "a"))
		again := func(d dispatch.StreamDelivery, attempt, headers int) {
			t.Helper()
			require.Equal(t, attempt, d.Attempt)
			require.Equal(t, []string{"first", `{"n": 1}`}, []string{d.Name, string(d.Payload)})
			require.Len(t, d.Headers, headers)
			require.Equal(t, "v", d.Headers["k"])
		}
		for _, c := range []struct{ room, kept int }{{20 << 10, 3}, {5 << 10, 3}, {1 << 10, 2}, {60, 2}} {
			dialled := s.dialled()
			long := strings.Repeat("x", frame-c.room-6100)
			require.NoError(t, s.foreign(t, amqp091.Table{"k": "v", "long": long, "short": strings.Repeat("y", 6000)}))
			again(s.one(t, 10*time.Millisecond), 1, 3) // nobody extends it
			d := s.one(t, time.Hour)
			require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Error: strings.Repeat("ä", 8<<10)}))
			d = s.one(t, time.Hour)
			again(d, 3, c.kept)
			require.Equal(t, long, d.Headers["long"])
			require.NotEmpty(t, d.LastError)
			require.True(t, utf8.ValidString(d.LastError))
			require.NoError(t, s.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{Delay: time.Millisecond}))
			d = s.one(t, time.Hour)
			again(d, 4, c.kept)
			require.NoError(t, s.DeadLetter(t.Context(), d.Receipt, "poison", strings.Repeat("z", 64<<10)))
			dead := s.take(t, s.prefix+"a.dead", false)
			require.Len(t, dead, 1)
			require.Equal(t, "poison", dead[0].Headers["pgwake-reason"])
			require.NotEmpty(t, dead[0].Headers["pgwake-cause"])
			require.Equal(t, `{"n": 1}`, string(dead[0].Body))
			require.LessOrEqual(t, s.dialled()-dialled, 2, "both connections are made once")
		}
	})
}
