package amqp_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/amqp"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/streamtest"
	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: are RabbitMQ's queues an EventStream, also while connections break and the broker is killed?

func TestMain(m *testing.M) {
	code := m.Run()
	shared.stop()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

const patience = 30 * time.Second

var prefixes atomic.Int64

// stream is a Stream whose connections a test can cut.
type stream struct {
	*amqp.Stream
	url, prefix string

	mu     sync.Mutex
	conns  []net.Conn
	beside *amqp091.Connection // see channel
}

func newStream(tb testing.TB, b *broker, prefix string, quorum bool, changes ...func(*amqp.Config)) *stream {
	tb.Helper()
	s := &stream{url: b.url, prefix: prefix}
	config := amqp091.Config{Dial: func(network, address string) (net.Conn, error) {
		conn, err := amqp091.DefaultDial(10*time.Second)(network, address)
		if err == nil {
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
		}
		return conn, err
	}}
	cfg := amqp.Config{Prefix: prefix, Quorum: quorum, Connection: config, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for _, change := range changes {
		change(&cfg)
	}
	var err error
	s.Stream, err = amqp.New(b.url, &cfg)
	require.NoError(tb, err)
	tb.Cleanup(s.Close)
	return s
}

func newPrefix(testing.TB) string {
	return fmt.Sprintf("test.%d.%d.", os.Getpid(), prefixes.Add(1))
}

func (s *stream) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.conns = nil
}

// dialled is how many connections it has made.
func (s *stream) dialled() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// channel is one of a connection that a test has beside those of the Stream. To begin a connection costs the broker far more than most
// of what is asked by it.
func (s *stream) channel(tb testing.TB) *amqp091.Channel {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.beside == nil || s.beside.IsClosed() {
		conn, err := amqp091.Dial(s.url)
		require.NoError(tb, err)
		tb.Cleanup(func() { _ = conn.Close() })
		s.beside = conn
	}
	ch, err := s.beside.Channel()
	require.NoError(tb, err)
	return ch
}

// take gets all messages of a queue.
func (s *stream) take(tb testing.TB, queue string, requeue bool) (all []amqp091.Delivery) {
	tb.Helper()
	conn, err := amqp091.Dial(s.url)
	require.NoError(tb, err)
	defer conn.Close()
	ch, err := conn.Channel()
	require.NoError(tb, err)
	for {
		d, ok, err := ch.Get(queue, !requeue)
		require.NoError(tb, err)
		if !ok {
			return all // and the end of the connection puts them back
		}
		all = append(all, d)
	}
}

func TestStream_Contract(t *testing.T) { contract(t, false) }

func TestStream_Contract_QuorumQueues(t *testing.T) { contract(t, true) }

func contract(t *testing.T, quorum bool) {
	b := theBroker(t)
	var streams sync.Map
	keep := func(s *stream) dispatch.EventStream {
		streams.Store(s.Stream, s)
		return s.Stream
	}
	of := func(s dispatch.EventStream) *stream {
		v, _ := streams.Load(s)
		return v.(*stream)
	}
	streamtest.Run(t, streamtest.Factory{
		New: func(tb testing.TB) dispatch.EventStream { return keep(newStream(tb, b, newPrefix(tb), quorum)) },
		Another: func(tb testing.TB, s dispatch.EventStream) dispatch.EventStream {
			return keep(newStream(tb, b, of(s).prefix, quorum))
		},
		Break: func(_ testing.TB, s dispatch.EventStream) { of(s).cut() },
		DeadLetters: func(tb testing.TB, s dispatch.EventStream, namespace string) (names []string) {
			for _, d := range of(s).take(tb, of(s).prefix+namespace+".dead", true) {
				names = append(names, d.Type)
			}
			return names
		},
	})
}

// A broker of its own is killed in the middle of the work, and started again: what was confirmed is handled.
func TestStream_BrokerIsKilled_LosesNothing(t *testing.T) {
	if os.Getenv("PGWAKE_AMQP_URL") != "" {
		t.Skip("the broker at PGWAKE_AMQP_URL is not one to kill")
	}
	b := theBroker(t)
	s := newStream(t, b, newPrefix(t), false)
	const count = 300
	var mu sync.Mutex
	seen := make(map[string]bool)
	missing := func(first int) (names []string) {
		mu.Lock()
		defer mu.Unlock()
		for i := range first {
			if name := fmt.Sprint(i); !seen[name] {
				names = append(names, name)
			}
		}
		return names
	}
	quiet := slog.New(slog.DiscardHandler)
	c := dispatch.NewCoordinators(dispatch.StreamSource(s.Stream, nil), &dispatch.CoordinatorsConfig{Logger: quiet, Groups: []dispatch.Group{{
		Namespaces: []string{"*"},
		Config:     dispatch.Config{Concurrency: 2, Ahead: dispatch.NotAhead, Logger: quiet, LockTimeout: time.Second, Retry: dispatch.Backoff(time.Millisecond, time.Millisecond)},
		Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
				if n, _ := strconv.Atoi(item.Name); item.Attempt == 1 && n < count/3 && n%5 == 0 {
					return nil, fmt.Errorf("once")
				}
				mu.Lock()
				defer mu.Unlock()
				seen[item.Name] = true
				return nil, nil
			})
		},
	}}})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
	}()
	bounded, cancel := context.WithTimeout(t.Context(), patience+beginning)
	defer cancel()
	for i := range count {
		message := dispatch.StreamMessage{Name: fmt.Sprint(i), Payload: []byte(`{}`)}
		for s.Publish(bounded, "a", message) != nil {
			require.NoError(t, bounded.Err())
			select {
			case <-time.After(10 * time.Millisecond):
			case <-bounded.Done():
			}
		}
		if i == count/2 {
			// What is about to come out of a delay could be lost.
			require.Eventually(t, func() bool { return len(missing(count/3)) == 0 }, patience, 10*time.Millisecond)
			b.kill()
			restarted := make(chan error, 1)
			go func() { restarted <- b.start() }()
			defer func() { require.NoError(t, <-restarted) }()
		}
	}
	assert.Eventually(t, func() bool { return len(missing(count)) == 0 }, patience, 10*time.Millisecond)
	require.Empty(t, missing(count))
}
