package amqp_test

import (
	"context"
	"errors"
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
		require.ErrorContains(t, err, "not connected")
		require.NotErrorIs(t, err, context.DeadlineExceeded, "it would say that there are no messages")
		require.ErrorIs(t, s.Declare(ctx, "a"), context.DeadlineExceeded)
	})
	gone, leave := context.WithCancel(t.Context())
	leave()
	_, err := s.Receive(gone, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.Canceled)
	returns(t, s.Close)
}

// silenced is a connection that nothing goes through any more once it is silent: neither end is told.
type silenced struct {
	net.Conn
	silent *atomic.Bool
}

func (c silenced) Write(b []byte) (int, error) {
	if c.silent.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c silenced) Read(b []byte) (n int, err error) {
	for {
		if n, err = c.Conn.Read(b); err != nil || !c.silent.Load() {
			return n, err
		}
	}
}

// timed is a context whose time is over when over is closed.
type timed struct {
	context.Context
	over chan struct{}
}

func (c timed) Done() <-chan struct{} { return c.over }

func (c timed) Err() error {
	select {
	case <-c.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// The heartbeats find it out.
func TestReceive_BrokerFallsSilent_TheTimeOfTheReceiveIsOver_IsSaid(t *testing.T) {
	b := theBroker(t)
	var silent atomic.Bool
	s := open(t, b.url, amqp091.Config{Heartbeat: time.Second, Dial: func(network, address string) (net.Conn, error) {
		conn, err := amqp091.DefaultDial(patience)(network, address)
		return silenced{conn, &silent}, err
	}})
	ctx := timed{t.Context(), make(chan struct{})}
	failure := make(chan error, 1)
	go func() {
		_, err := s.Receive(ctx, "a", 1, time.Minute)
		failure <- err
	}()
	require.Eventually(t, func() bool { return s.Lanes() == 1 }, patience, 10*time.Millisecond)
	silent.Store(true)
	close(ctx.over)
	returns(t, func() {
		err := <-failure
		require.Error(t, err)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "it would say that there are no messages")
	})
}

// Each attempt to connect takes longer than a fetch waits after a failure.
func TestConnect_MuteBroker_HealthSaysSo(t *testing.T) {
	s := open(t, "amqp://guest:guest@"+mute(t)+"/", amqp091.Config{})
	quiet := slog.New(slog.DiscardHandler)
	c := dispatch.NewCoordinators(dispatch.StreamSource(s, &dispatch.StreamConfig{MaxWait: 50 * time.Millisecond}), &dispatch.CoordinatorsConfig{
		Logger: quiet, Groups: []dispatch.Group{{Namespaces: []string{"*"}, Config: dispatch.Config{Logger: quiet}, Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) { return nil, nil })
		}}},
	})
	require.NoError(t, c.Spawn("a"))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	failing, healed := false, false
	require.Eventually(t, func() bool {
		status := c.Health().Status
		healed = healed || failing && status == dispatch.Healthy
		failing = failing || status == dispatch.Degraded
		return status == dispatch.Unhealthy
	}, patience, 10*time.Millisecond)
	require.False(t, healed, "the broker was away all the time")
	stop()
	returns(t, func() { require.NoError(t, <-ended) })
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

func TestNew_MalformedURL_ErrorDoesNotTellThePassword(t *testing.T) {
	t.Parallel()
	const malformed, scheme = "the URL is malformed", "the scheme of the URL must be amqp:// or amqps://"
	for url, why := range map[string]string{
		"amqp://u:s3cr3t%ss@h/":            malformed,
		"amqps://u:s3cr3t@h:port/":         malformed,
		"AMQP://u:s3cr3t@h /":              malformed,
		"amqp://u:s3cr3t#x@h:y/":           malformed,
		"amqp://u:p@h/?channel_max=s3cr3t": malformed,
		"amqp://u:s3cr3t\x00@h/":           malformed,
		"u:s3cr3t@h":                       scheme,
		"s3cr3t://u@h/":                    scheme,
		"s3cr3t":                           scheme,
		"":                                 scheme,
	} {
		_, err := amqp.New(url, nil)
		require.ErrorIs(t, err, pgwake.ErrConfig, url)
		require.ErrorContains(t, err, why, url)
		for ; err != nil; err = errors.Unwrap(err) {
			require.NotContains(t, err.Error(), "s3cr3t")
		}
	}
}
