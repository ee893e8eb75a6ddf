package main

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// echo serves connections that give back what they get, until the test ends, and returns a way there.
func echo(t *testing.T) *way {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
	w, err := newNetwork(l.Addr().String()).newWay("test")
	require.NoError(t, err)
	t.Cleanup(w.proxy.Stop)
	return w
}

func dial(t *testing.T, w *way) net.Conn {
	conn, err := net.Dial("tcp", w.address())
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// replies reports whether a byte comes back, and the error if the connection broke.
func replies(t *testing.T, conn net.Conn, within time.Duration) (bool, error) {
	_, err := conn.Write([]byte{1})
	if err != nil {
		return false, err
	}
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(within)))
	_, err = conn.Read(make([]byte, 1))
	var silent net.Error
	if e, ok := err.(net.Error); ok {
		silent = e
	}
	if silent != nil && silent.Timeout() {
		return false, nil
	}
	return err == nil, err
}

func TestVanish_OldConnectionsGoSilent_NewOnesWork(t *testing.T) {
	w := echo(t)
	old := dial(t, w)
	ok, err := replies(t, old, 5*time.Second)
	require.NoError(t, err)
	require.True(t, ok)

	until, err := w.vanish()
	require.NoError(t, err)
	ok, err = replies(t, old, 100*time.Millisecond)
	assert.NoError(t, err)
	assert.False(t, ok)

	time.Sleep(time.Until(until)) // the instant is part of what is tested
	ok, err = replies(t, dial(t, w), 5*time.Second)
	assert.NoError(t, err)
	assert.True(t, ok)
	ok, err = replies(t, old, 100*time.Millisecond)
	assert.NoError(t, err)
	assert.False(t, ok)

	heal, err := w.slow(1) // another toxic that comes and goes changes nothing for either
	require.NoError(t, err)
	require.NoError(t, heal())
	ok, _ = replies(t, old, 100*time.Millisecond)
	assert.False(t, ok)
}

func TestBlackhole_SilentForAll_AndClosedWhenHealed(t *testing.T) {
	w := echo(t)
	old := dial(t, w)
	heal, err := w.blackhole()
	require.NoError(t, err)
	fresh := dial(t, w)
	for _, conn := range []net.Conn{old, fresh} {
		ok, err := replies(t, conn, 100*time.Millisecond)
		assert.NoError(t, err)
		assert.False(t, ok)
	}
	require.NoError(t, heal())
	for _, conn := range []net.Conn{old, fresh} {
		_, err := replies(t, conn, 5*time.Second)
		assert.Error(t, err)
	}
	ok, err := replies(t, dial(t, w), 5*time.Second)
	assert.NoError(t, err)
	assert.True(t, ok)
}

func TestShut_RefusesUntilHealed(t *testing.T) {
	w := echo(t)
	old := dial(t, w)
	heal, err := w.shut()
	require.NoError(t, err)
	_, err = replies(t, old, 5*time.Second)
	assert.Error(t, err)
	_, err = net.Dial("tcp", w.address())
	assert.Error(t, err)
	require.NoError(t, heal())
	ok, err := replies(t, dial(t, w), 5*time.Second)
	assert.NoError(t, err)
	assert.True(t, ok)
}
