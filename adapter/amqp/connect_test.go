package amqp_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/adapter/amqp"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: what do calls do while there is no connection, and none comes about?

// mute accepts connections, and never says anything.
func mute(tb testing.TB) (address string) {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			})
		}
	})
	tb.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String()
}

func open(tb testing.TB, url string, connection amqp091.Config) *amqp.Stream {
	tb.Helper()
	s, err := amqp.New(url, &amqp.Config{Prefix: newPrefix(tb), Connection: connection, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(tb, err)
	tb.Cleanup(s.Close)
	return s
}

// returns makes sure that a call does not wait for a broker, which has 30 s to answer.
func returns(tb testing.TB, call func()) {
	tb.Helper()
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		call()
	}()
	select {
	case <-returned:
	case <-time.After(10 * time.Second):
		tb.Fatal("the call waits for the broker")
	}
}

func TestConnect_MuteBroker_ContextEnds_Returns(t *testing.T) {
	s := open(t, "amqp://guest:guest@"+mute(t)+"/", amqp091.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	returns(t, func() {
		_, err := s.Receive(ctx, "a", 1, time.Minute)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, s.Declare(ctx, "a"), context.DeadlineExceeded)
	})
	returns(t, s.Close)
}

func TestConnect_MuteBroker_Close_Returns(t *testing.T) {
	s := open(t, "amqp://guest:guest@"+mute(t)+"/", amqp091.Config{})
	ended := make(chan error, 2)
	go func() {
		_, err := s.Receive(t.Context(), "a", 1, time.Minute)
		ended <- err
	}()
	go func() { ended <- s.Declare(t.Context(), "a") }()
	returns(t, s.Close)
	returns(t, func() {
		require.ErrorIs(t, <-ended, pgwake.ErrClosed)
		require.ErrorIs(t, <-ended, pgwake.ErrClosed)
	})
}

func TestConnect_MuteBroker_TimeOfTheURLIsOver_IsSaid(t *testing.T) {
	// This Dial sets no deadline.
	dial := func(network, address string) (net.Conn, error) { return net.Dial(network, address) }
	for name, connection := range map[string]amqp091.Config{"dial of its own": {}, "dial of the Config": {Dial: dial}} {
		t.Run(name, func(t *testing.T) {
			s := open(t, "amqp://guest:guest@"+mute(t)+"/?connection_timeout=50", connection)
			returns(t, func() { require.ErrorContains(t, s.Declare(t.Context(), "a"), "no answer within 50ms") })
		})
	}
}

// closing tells when it is closed.
type closing struct {
	net.Conn
	closed chan struct{}
	once   sync.Once
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func TestConnect_DialReturnsAfterClose_ItsConnectionIsClosed(t *testing.T) {
	dialling, release := make(chan struct{}), make(chan struct{})
	here, there := net.Pipe()
	defer there.Close()
	late := &closing{Conn: here, closed: make(chan struct{})}
	s := open(t, "amqp://guest:guest@127.0.0.1/", amqp091.Config{Dial: func(string, string) (net.Conn, error) {
		close(dialling)
		<-release
		return late, nil
	}})
	ended := make(chan error, 1)
	go func() { ended <- s.Declare(t.Context(), "a") }()
	<-dialling
	returns(t, s.Close)
	require.ErrorIs(t, <-ended, pgwake.ErrClosed)
	close(release)
	returns(t, func() { <-late.closed })
}

func TestConnect_BrokerSlowerThanTheContext_TheNextCallHasTheConnection(t *testing.T) {
	b := theBroker(t)
	release := make(chan struct{})
	var dials atomic.Int64
	s := open(t, b.url, amqp091.Config{Dial: func(network, address string) (net.Conn, error) {
		dials.Add(1)
		<-release
		return amqp091.DefaultDial(patience)(network, address)
	}})
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		require.ErrorIs(t, s.Declare(ctx, "a"), context.DeadlineExceeded)
		cancel()
	}
	close(release)
	require.NoError(t, s.Declare(t.Context(), "a"))
	require.EqualValues(t, 1, dials.Load())
}

func TestConnect_NobodyListens_IsSaid(t *testing.T) {
	port, err := freePort()
	require.NoError(t, err)
	u := url.URL{Scheme: "amqp", Host: (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}).String()}
	s := open(t, u.String(), amqp091.Config{})
	require.ErrorContains(t, s.Declare(t.Context(), "a"), "connection refused")
}

func TestNamespace_WhoseQueueBelongsToAnother_IsRefused(t *testing.T) {
	for _, name := range []string{"", "a.dead", "a.delay.8", strings.Repeat("a", 250)} {
		_, err := amqp.New("amqp://localhost:1/", &amqp.Config{Namespaces: []string{name}})
		require.ErrorIs(t, err, pgwake.ErrConfig, name)
	}
	s, err := amqp.New("amqp://localhost:1/", &amqp.Config{Namespaces: []string{"dead", "a.delay", "delay.8", "a.dead.b"}})
	require.NoError(t, err)
	defer s.Close()
	require.ErrorIs(t, s.Publish(t.Context(), "a.dead", dispatch.StreamMessage{}), pgwake.ErrInvalid)
}
