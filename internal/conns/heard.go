package conns

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: for how long has nothing come on a connection?

// Silence returns a context for a statement that may take as long as it needs, as long as something of its answer comes: it ends when heard
// was not called for so long, or with ctx. end is to be called.
func Silence(ctx context.Context, most time.Duration) (bounded context.Context, heard, end func()) {
	bounded, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(most, cancel)
	return bounded, func() { timer.Reset(most) }, func() {
		timer.Stop()
		cancel()
	}
}

// WhileHeard returns a context that lasts until then, and longer while something comes, of which last says when it did (LastHeard): it ends when
// nothing has come for most, which is context.DeadlineExceeded, or with ctx. Without last it lasts until then. end is to be called.
func WhileHeard(ctx context.Context, last func() time.Time, until time.Time, most time.Duration) (bounded context.Context, end context.CancelFunc) {
	if last == nil {
		return context.WithDeadline(ctx, until)
	}
	bounded, cancel := context.WithCancelCause(ctx)
	var timer *time.Timer
	var timing sync.Mutex
	timing.Lock() // until there is a timer
	defer timing.Unlock()
	timer = time.AfterFunc(time.Until(until), func() {
		timing.Lock()
		defer timing.Unlock()
		if left := time.Until(last().Add(most)); left <= 0 {
			cancel(errSilence)
		} else if bounded.Err() == nil {
			timer.Reset(left)
		}
	})
	return untilSilent{bounded}, func() {
		cancel(nil)
		timing.Lock()
		defer timing.Unlock()
		timer.Stop()
	}
}

var errSilence = errors.New("nothing came for long")

// untilSilent is a context that was cancelled, for want of a deadline that can be moved: nobody asked for that, so it is not to say so.
type untilSilent struct{ context.Context }

func (c untilSilent) Err() error {
	err := c.Context.Err()
	if err != nil && context.Cause(c.Context) == errSilence {
		return context.DeadlineExceeded
	}
	return err
}

// heard is a connection that knows when something came.
type heard struct {
	net.Conn
	last atomic.Int64 // after began
}

var began = time.Now()

func (h *heard) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if n > 0 {
		h.last.Store(int64(time.Since(began)))
	}
	return n, err
}

// NetConn is what is underneath, as of tls.Conn.
func (h *heard) NetConn() net.Conn { return h.Conn }

// LastHeard returns what tells when something came on a connection last, or nil if that is not known, as of a pool that was not tuned. A row that is
// large, or comes by a slow network, comes bit by bit, and is there for the driver when all of it is.
func LastHeard(conn *pgx.Conn) func() time.Time {
	for under := conn.PgConn().Conn(); ; {
		switch c := under.(type) {
		case *heard:
			return func() time.Time { return began.Add(time.Duration(c.last.Load())) }
		case interface{ NetConn() net.Conn }:
			under = c.NetConn()
		default:
			return nil
		}
	}
}
