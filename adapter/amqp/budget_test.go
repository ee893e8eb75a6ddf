package amqp_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/amqp"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/stretchr/testify/require"
)

// This file answers: is what a Stream has in memory bounded, and does whoever would have more of it wait?

const mib = 1 << 20

func (s *stream) publishLarge(t *testing.T, count, size int) {
	t.Helper()
	for i := range count {
		require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: fmt.Sprint(i), Payload: bytes.Repeat([]byte{'x'}, size)}))
	}
}

// warm has the lane have seen so many small messages that it asks for many.
func (s *stream) warm(t *testing.T) {
	t.Helper()
	s.warmBy(t, s)
}

// warmBy is for a Stream that cannot publish.
func (s *stream) warmBy(t *testing.T, publisher *stream) {
	t.Helper()
	const count = 1 + 2 + 4 + 8 + 16
	small := make([]dispatch.StreamMessage, count)
	require.NoError(t, publisher.Publish(t.Context(), "a", small...))
	for seen := 0; seen < count; {
		seen += len(s.settle(t))
	}
}

// settle acknowledges some messages, which have one attempt each.
func (s *stream) settle(t *testing.T) []dispatch.StreamDelivery {
	t.Helper()
	got := s.some(t, 100, time.Hour)
	for _, d := range got {
		require.Equal(t, 1, d.Attempt, d.Name)
		require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}))
	}
	return got
}

func (s *stream) some(t *testing.T, most int, lease time.Duration) []dispatch.StreamDelivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := s.Receive(ctx, "a", most, lease)
	require.NoError(t, err)
	return got
}

func TestReceive_LargeMessages_HeldAreBoundedAndTheRestIsOthers(t *testing.T) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		t.Run(name, func(t *testing.T) {
			const count, held = 12, 4 * mib
			s := newStream(t, theBroker(t), newPrefix(t), quorum, func(c *amqp.Config) { c.HeldBytes = held })
			other := newStream(t, theBroker(t), s.prefix, quorum)
			s.warm(t)
			s.publishLarge(t, count, mib)
			mine := s.some(t, count, time.Hour)
			for len(mine) < 3 { // the broker takes its time
				mine = append(mine, s.some(t, count, time.Hour)...)
			}
			require.Len(t, mine, 3, "with what they weigh themselves, there is no room for a fourth")

			// Until some are settled there is no room, which is not to say that there are no messages.
			mine = append(mine, s.some(t, 1, time.Hour)...)
			require.Less(t, s.Held(), int64(held+mib))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := s.Receive(ctx, "a", 1, time.Hour)
			require.ErrorContains(t, err, "HeldBytes")
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			gone, leave := context.WithCancel(t.Context())
			leave()
			_, err = s.Receive(gone, "a", 1, time.Hour)
			require.ErrorIs(t, err, context.Canceled)

			// What was too much is there for others, at once.
			seen := make(map[string]bool)
			for len(seen) < count-len(mine) {
				for _, d := range other.settle(t) {
					seen[d.Name] = true
				}
			}
			for _, d := range mine {
				require.False(t, seen[d.Name])
				seen[d.Name] = true
				require.Len(t, d.Payload, mib)
			}
			require.Len(t, seen, count)

			// Whatever settles it makes room.
			require.NoError(t, s.Nack(t.Context(), mine[0].Receipt, pgwake.AbandonOptions{}))
			require.NoError(t, s.DeadLetter(t.Context(), mine[1].Receipt, "poison", ""))
			require.NoError(t, s.Extend(t.Context(), []pgwake.LockToken{mine[2].Receipt}, time.Millisecond))
			require.Eventually(t, func() bool { return s.ready(t, "a") == 2 }, patience, 10*time.Millisecond)
			require.Greater(t, s.Held(), int64(mib))
			s.cut()
			require.Eventually(t, func() bool { return s.Held() == 0 }, patience, 10*time.Millisecond)
		})
	}
}

// Each that waits gets one, and what is more is of the budget of all.
func TestReceive_LargeMessages_ManyNamespacesHaveOneBudget(t *testing.T) {
	const namespaces, each, held = 6, 4, 4 * mib
	s := newStream(t, theBroker(t), newPrefix(t), false, func(c *amqp.Config) { c.HeldBytes = held })
	s.SpareFor(time.Hour)
	large := make([]dispatch.StreamMessage, each)
	for i := range large {
		large[i].Payload = make([]byte, mib)
	}
	for i := range namespaces {
		require.NoError(t, s.Publish(t.Context(), fmt.Sprint(i), large...))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	for i := range namespaces {
		all.Go(func() { _, _ = s.Receive(ctx, fmt.Sprint(i), each, time.Hour) }) // or others have had all
	}
	require.Eventually(t, func() bool { return s.Held() >= held-mib }, patience, 10*time.Millisecond)
	time.AfterFunc(time.Second, cancel) // for those that would have too much
	all.Wait()
	require.GreaterOrEqual(t, s.Held(), int64(held-mib))
	require.Less(t, s.Held(), int64(held+(namespaces+1)*mib))
}

// tooMany is how many messages of 8 MiB are more than one Receive has.
var tooMany = testsize.Of(10, 12)

func TestReceive_LargeMessages_OneAnswerIsBounded(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false)
	count, size := tooMany, 8*mib
	s.publishLarge(t, count, size)
	seen := make(map[string]bool)
	for len(seen) < count {
		got := s.some(t, count, time.Hour)
		require.LessOrEqual(t, len(got)*size, 64*mib)
		for _, d := range got {
			require.False(t, seen[d.Name])
			seen[d.Name] = true
		}
	}
}

func TestReceive_TooMuchForOne_IsForTheNext_InOrder(t *testing.T) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		t.Run(name, func(t *testing.T) {
			count, size := tooMany, 8*mib
			s := newStream(t, theBroker(t), newPrefix(t), quorum)
			s.warm(t)
			s.publishLarge(t, count, size)
			for seen := 0; seen < count; {
				got := s.settle(t)
				require.LessOrEqual(t, len(got)*size, 64*mib)
				for _, d := range got {
					require.Equal(t, fmt.Sprint(seen), d.Name)
					seen++
				}
			}
			require.Zero(t, s.Held())
		})
	}
}

// Nobody receives any more, or the Stream is closed: what was kept for the next Receive is others', and has had no attempt.
func TestReceive_TooMuchForOne_NobodyTakesTheRest_IsOthers(t *testing.T) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		for end, leave := range map[string]func(*stream){"idle": func(*stream) {}, "closed": func(s *stream) { s.Close() }} {
			t.Run(name+" "+end, func(t *testing.T) {
				count := tooMany
				s := newStream(t, theBroker(t), newPrefix(t), quorum)
				if end == "idle" {
					s.SpareFor(time.Millisecond)
				} else {
					s.SpareFor(time.Hour)
				}
				other := newStream(t, theBroker(t), s.prefix, quorum)
				s.warm(t)
				s.publishLarge(t, count, 8*mib)
				seen := len(s.settle(t))
				require.Less(t, seen, count)
				leave(s)
				for seen < count {
					seen += len(other.settle(t))
				}
				require.Eventually(t, func() bool { return s.Held() == 0 }, patience, 10*time.Millisecond)
			})
		}
	}
}

// What can neither be held nor go back, since nothing can be published, is for the next Receive, although there is no room.
func TestReceive_TooMuch_NothingCanBePublished_IsForTheNext(t *testing.T) {
	t.Parallel()
	const count = 12
	s := newStream(t, theBroker(t), newPrefix(t), false, func(c *amqp.Config) { c.HeldBytes = 4 * mib })
	s.PublishAhead(0)
	other := newStream(t, theBroker(t), s.prefix, false)
	s.warmBy(t, other)
	other.publishLarge(t, count, mib)
	first := s.some(t, count, time.Hour)
	require.Less(t, len(first), count)
	require.Greater(t, s.Held(), int64(count*mib))
	for seen := len(first); seen < count; {
		for _, d := range s.settle(t) {
			require.Equal(t, fmt.Sprint(seen), d.Name)
			seen++
		}
	}
	require.Zero(t, s.ready(t, "a"))
}

// While others publish, each of many Receives takes what has come so far: none of it has an attempt that nobody made.
func TestReceive_WhileOthersPublish_CountsNoAttempt(t *testing.T) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		t.Run(name, func(t *testing.T) {
			const count = 200
			s := newStream(t, theBroker(t), newPrefix(t), quorum)
			published := make(chan error, 1)
			go func() {
				for range count {
					if err := s.Publish(t.Context(), "a", message("x", 0)); err != nil {
						published <- err
						return
					}
				}
				published <- nil
			}()
			for seen := 0; seen < count; {
				seen += len(s.settle(t))
			}
			require.NoError(t, <-published)
		})
	}
}

// The only attempt is one that a handler makes: what was too much for a Receive, or for the budget, was in nobody's hand.
func TestReceive_TooMuch_MaxAttemptsOne_AllIsHandled(t *testing.T) {
	for name, quorum := range map[string]bool{"classic": false, "quorum": true} {
		for kind, c := range map[string]struct{ count, size, held int }{"large": {testsize.Of(10, 16), 10 * mib, 0}, "little room": {200, 4 << 10, 64 << 10}} {
			t.Run(name+" "+kind, func(t *testing.T) {
				s := newStream(t, theBroker(t), newPrefix(t), quorum, func(cfg *amqp.Config) { cfg.HeldBytes = int64(c.held) })
				s.warm(t)
				s.publishLarge(t, c.count, c.size)
				var handled atomic.Int64
				quiet := slog.New(slog.DiscardHandler)
				coordinators := dispatch.NewCoordinators(dispatch.StreamSource(s.Stream, nil), &dispatch.CoordinatorsConfig{Logger: quiet, Groups: []dispatch.Group{{
					Namespaces: []string{"*"},
					Config:     dispatch.Config{Concurrency: 16, MaxAttempts: 1, Logger: quiet},
					Handlers: func(d *dispatch.Dispatcher) {
						d.HandleOthers(func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
							handled.Add(1)
							return nil, nil
						})
					},
				}}})
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- coordinators.Run(ctx) }()
				dead := func() int { return len(s.take(t, s.prefix+"a.dead", true)) }
				require.Eventually(t, func() bool { return int(handled.Load()) == c.count || dead() > 0 }, patience, 100*time.Millisecond)
				stop()
				require.NoError(t, <-ended)
				require.Zero(t, dead())
				require.EqualValues(t, c.count, handled.Load())
			})
		}
	}
}

func TestReceive_NoRoom_SomeIsSettled_GoesOn(t *testing.T) {
	s := newStream(t, theBroker(t), newPrefix(t), false, func(c *amqp.Config) { c.HeldBytes = 1 })
	s.publishLarge(t, 2, 1)
	first := s.some(t, 2, time.Hour)
	require.Len(t, first, 1)
	received := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := s.Receive(ctx, "a", 1, time.Hour)
		received <- err
	}()
	require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{first[0].Receipt}))
	require.NoError(t, <-received)
	waiting := make(chan error, 1)
	go func() {
		_, err := s.Receive(t.Context(), "a", 1, time.Hour)
		waiting <- err
	}()
	s.Close()
	require.ErrorIs(t, <-waiting, pgwake.ErrClosed)
}

// full waits until whoever publishes would wait.
func (s *stream) full(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, full, err := s.Underway(t.Context())
		return err == nil && full
	}, patience, time.Millisecond)
}

// A broker that confirms nothing: what is under way is bounded, whoever it is of, and who waits for room leaves when he likes.
func TestPublish_NothingIsConfirmed_UnderwayIsBounded(t *testing.T) {
	b := theBroker(t).own(t)
	s := newStream(t, b, newPrefix(t), false)
	const room = 32
	s.PublishAhead(room * 2 * amqp.OwnWeight) // a message has less than that, and more than the half
	require.NoError(t, s.Declare(t.Context(), "a"))
	thaw := b.freeze(t)
	const calls, each = 40, 25
	published := make(chan error, calls)
	for range calls {
		go func() {
			all := make([]dispatch.StreamMessage, each)
			published <- s.Publish(t.Context(), "a", all...)
		}()
	}
	s.full(t)
	underway := func() int {
		n, _, err := s.Underway(t.Context())
		require.NoError(t, err)
		return n
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	returns(t, func() { require.ErrorIs(t, s.Publish(ctx, "a", message("late", 0)), context.DeadlineExceeded) })
	require.LessOrEqual(t, underway(), 3*room)
	thaw()
	for range calls {
		require.NoError(t, <-published)
	}
	require.Zero(t, underway())
	require.Equal(t, calls*each, s.ready(t, "a"))
}

// A broker that has no memory left does not read from who publishes: whoever wrote to it would wait for it, whatever his context says.
func TestPublish_BrokerTakesNothing_ContextEnds_Returns(t *testing.T) {
	b := theBroker(t).own(t)
	s := newStream(t, b, newPrefix(t), false)
	require.NoError(t, s.Publish(t.Context(), "a", message("first", 0)))
	b.control(t, "set_vm_memory_high_watermark", "absolute", "1")
	relieve := func() { b.control(t, "set_vm_memory_high_watermark", "0.4") }
	t.Cleanup(func() {
		if relieve != nil {
			relieve()
		}
	})
	published := make(chan error, 1)
	go func() { published <- s.Publish(t.Context(), "a", message("second", 0)) }()
	s.full(t)
	large := dispatch.StreamMessage{Name: "large", Payload: make([]byte, 16*mib)}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	returns(t, func() { require.ErrorIs(t, s.Publish(ctx, "a", large), context.DeadlineExceeded) })
	relieve()
	relieve = nil
	require.NoError(t, <-published)
	require.Equal(t, 2, s.ready(t, "a"))
}

func TestNamespaces_AsManyAsThereMayBe_NoMore(t *testing.T) {
	all := make([]string, 100_000)
	for i := range all {
		all[i] = fmt.Sprint(i)
	}
	const nowhere = "amqp://localhost:1/"
	_, err := amqp.New(nowhere, &amqp.Config{Namespaces: append(all, "one more")})
	require.ErrorIs(t, err, pgwake.ErrConfig)
	require.ErrorIs(t, err, pgwake.ErrTooManyNamespaces)
	s, err := amqp.New(nowhere, &amqp.Config{Namespaces: all})
	require.NoError(t, err)
	defer s.Close()
	require.ErrorIs(t, s.Publish(t.Context(), "one more", message("x", 0)), pgwake.ErrTooManyNamespaces)
	require.ErrorIs(t, s.Declare(t.Context(), "one more"), pgwake.ErrTooManyNamespaces)
	known, err := s.WaitForNamespaces(t.Context(), all[1:])
	require.NoError(t, err)
	require.Equal(t, all[:1], known)
}
