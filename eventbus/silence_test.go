package eventbus_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of a delivery if a connection loses its peer around a handler, and gives no sign of it?

// quietNetwork loses what one connection carries from the moment on at which it is to carry certain words, and tells nobody.
type quietNetwork struct {
	words atomic.Pointer[string]
	lost  atomic.Pointer[quietConn]
}

type quietConn struct {
	net.Conn
	network *quietNetwork
	lost    atomic.Bool
}

func (c *quietConn) Write(b []byte) (int, error) {
	if words := c.network.words.Load(); words != nil && bytes.Contains(b, []byte(*words)) && c.network.words.CompareAndSwap(words, nil) {
		c.lost.Store(true)
		c.network.lost.Store(c)
	}
	if c.lost.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// onQuietNetwork returns another Bus on the schema of l, on a pool that is the caller's.
func (l *lab) onQuietNetwork(n *quietNetwork) *eventbus.Bus {
	l.t.Helper()
	dialer := &net.Dialer{}
	bus, _ := l.onPool(func(config *pgxpool.Config) {
		config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &quietConn{Conn: c, network: n}, nil
		}
	})
	l.t.Cleanup(func() {
		if c := n.lost.Load(); c != nil {
			_ = c.Conn.Close() // or the pool waits for it
		}
	})
	return bus
}

func TestNode_ConnectionGivesNoSign_DeliveryIsHandledOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		words   string
		timeout time.Duration
		payload int
	}{
		"as the events of a claim are read":            {"get_events", 0, 5000},
		"as a transaction begins":                      {"begin isolation level", 0, 0},
		"as one begins, until the handler has no time": {"begin isolation level", 500 * time.Millisecond, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, nil)
			network := &quietNetwork{}
			n := l.nodeOn(l.onQuietNetwork(network), &eventbus.NodeConfig{Visibility: 6 * time.Second, Concurrency: 1, MaxAttempts: 1, Timeout: c.timeout})
			var handled atomic.Int64
			require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { handled.Add(1); return nil }))
			network.words.Store(&c.words)
			_, err := l.Emit(l.within(), "a", json.RawMessage(`"`+strings.Repeat("x", c.payload)+`"`), nil)
			require.NoError(t, err)
			l.eventually(func() bool { return handled.Load() == 1 }, "it is handled")
			require.NotNil(t, network.lost.Load())
			l.emit("a")
			l.eventually(func() bool { return handled.Load() == 2 }, "the node goes on")
			require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
		})
	}
}

// slowNetwork hands out what comes bit by bit, at 40 kB/s, once it is slow.
type slowNetwork struct{ slow atomic.Bool }

type slowConn struct {
	net.Conn
	network *slowNetwork
}

func (c slowConn) Read(b []byte) (int, error) {
	if c.network.slow.Load() {
		time.Sleep(50 * time.Millisecond)
		b = b[:min(len(b), 2<<10)]
	}
	return c.Conn.Read(b)
}

// An event takes longer to arrive than a server may be silent, and comes by and by all the same.
func TestNode_EventTakesLongToArrive_IsHandled(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	network := &slowNetwork{}
	dialer := &net.Dialer{}
	bus, _ := l.onPool(func(config *pgxpool.Config) {
		config.ConnConfig.DialFunc = func(ctx context.Context, host, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, host, address)
			return slowConn{c, network}, err
		}
		pgwake.TunePool(config) // of what is dialled now
	})
	n := l.nodeOn(bus, &eventbus.NodeConfig{Concurrency: 1, MaxAttempts: 1})
	payload := json.RawMessage(`"` + strings.Repeat("x", 500_000) + `"`) // 12.5 s
	var handled atomic.Int64
	require.NoError(t, n.On(l.within(), "a", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		handled.Add(int64(len(e.Payload)))
		return nil
	}))
	network.slow.Store(true)
	_, err := l.Emit(l.within(), "a", payload, nil)
	require.NoError(t, err)
	l.eventuallyWithin(4*patience, func() bool { return handled.Load() == int64(len(payload)) }, "it is handled")
	network.slow.Store(false) // the rest is not waited for
}
