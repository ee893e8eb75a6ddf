// Package conns answers: how is a connection of a pool had, and given back, so that one that broke takes up no place of it?
//
// A driver that gives up on a statement keeps the connection open until the server has closed its end, and has answered a request to
// cancel, or for 15 s each. A network that loses what is sent, and gives no sign, would so fill the pool with the dead.
package conns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// handshake is how long a connection that broke has, to say goodbye.
const handshake = time.Second

// ErrMaking is of an Acquire whose time was over while a connection was being made: by itself, of a pool that was tuned, or by others who have
// all places that are left. Resetting the pool would have it thrown away once it is there, and a server that takes its time would never be reached.
var ErrMaking = errors.New("a connection is being made")

// acquiring is the key of what the pool says to an Acquire.
type acquiring struct{}

type said struct {
	untried bool        // the connection is to be tried
	makes   atomic.Bool // a connection is being made
}

// Tune has Acquire try the connections of a pool that is made of this, where the pool would have tried them: what does not answer then is
// released as Release does. It comes after all else that changes config. A pool that prepares its connections goes on trying them itself, since
// that is to come first. Of each connection it is known when something came (LastHeard).
func Tune(config *pgxpool.Config) {
	should, before := config.ShouldPing, config.BeforeConnect
	if should == nil {
		should = func(_ context.Context, conn pgxpool.ShouldPingParams) bool { return conn.IdleDuration > time.Second } // as pgxpool does
	}
	//lint:ignore SA1019 it is deprecated, and works
	if config.PrepareConn == nil && config.BeforeAcquire == nil {
		config.ShouldPing = func(ctx context.Context, conn pgxpool.ShouldPingParams) bool {
			due := should(ctx, conn)
			if to, ok := ctx.Value(acquiring{}).(*said); ok {
				to.untried = to.untried || due // config may have been tuned before
				return false
			}
			return due
		}
	}
	dial := config.ConnConfig.DialFunc // and not AfterNetConnect: what is above TLS is to be that, for channel binding
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &heard{Conn: conn}, nil
	}
	config.BeforeConnect = func(ctx context.Context, config *pgx.ConnConfig) error {
		if to, ok := ctx.Value(acquiring{}).(*said); ok {
			to.makes.Store(true)
		}
		if before == nil {
			return nil
		}
		return before(ctx, config)
	}
}

// Acquire is that of the pool. One whose context ends while a connection is tried closes that.
func Acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	for {
		var pooled said // nothing, by a pool that was not tuned
		conn, err := pool.Acquire(context.WithValue(ctx, acquiring{}, &pooled))
		switch {
		case err != nil && ctx.Err() != nil && (pooled.makes.Load() || restIsBeingMade(pool)):
			return nil, fmt.Errorf("%w: %w", ErrMaking, err)
		case err != nil || !pooled.untried:
			return conn, err
		}
		if err := ping(ctx, conn, pool.Config().PingTimeout); err == nil {
			return conn, nil
		}
		Release(conn)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

func restIsBeingMade(pool *pgxpool.Pool) bool {
	s := pool.Stat()
	return s.ConstructingConns() > 0 && s.AcquiredConns()+s.ConstructingConns() == s.MaxConns()
}

func ping(ctx context.Context, conn *pgxpool.Conn, timeout time.Duration) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return conn.Ping(ctx)
}

// Release gives a connection back. The pool counts one that broke no longer.
func Release(conn *pgxpool.Conn) {
	if conn.Conn().IsClosed() {
		broken := conn.Hijack()
		time.AfterFunc(handshake, func() { _ = broken.PgConn().Conn().Close() })
		return
	}
	conn.Release()
}

// Addresses is how many a configuration leads to, which pgx tries in a row: those of each name that it has.
func Addresses(ctx context.Context, config *pgx.ConnConfig) int {
	n, host, port := count(ctx, config, config.Host), config.Host, config.Port
	for _, next := range config.Fallbacks {
		if next.Host != host || next.Port != port { // or else it is the same with TLS and without
			n, host, port = n+count(ctx, config, next.Host), next.Host, next.Port
		}
	}
	return n
}

func count(ctx context.Context, config *pgx.ConnConfig, host string) int {
	if strings.HasPrefix(host, "/") || net.ParseIP(host) != nil {
		return 1
	}
	found, err := config.LookupFunc(ctx, host)
	if err != nil {
		return 1
	}
	return max(len(found), 1)
}

// Share leaves each address of a configuration its share of the time that there is until ctx ends: pgx lets one that is silent have all of it.
func Share(ctx context.Context, config *pgx.ConnConfig) {
	end, bounded := ctx.Deadline()
	if !bounded {
		return
	}
	share := time.Until(end) / time.Duration(Addresses(ctx, config))
	if config.ConnectTimeout == 0 || config.ConnectTimeout > share {
		config.ConnectTimeout = max(share, 1)
	}
}

// preparing is the key of what is done on a connection once it is there.
type preparing struct{}

// Preparing has those who make connections of their own, as migrations do, do on them what a pool does on its.
func Preparing(ctx context.Context, after func(context.Context, *pgx.Conn) error) context.Context {
	return context.WithValue(ctx, preparing{}, after)
}

// Prepare does on a connection what Preparing has said.
func Prepare(ctx context.Context, conn *pgx.Conn) error {
	after, _ := ctx.Value(preparing{}).(func(context.Context, *pgx.Conn) error)
	if after == nil {
		return nil
	}
	return after(ctx, conn)
}

// Do has do use a connection of the pool.
func Do(ctx context.Context, pool *pgxpool.Pool, do func(*pgxpool.Conn) error) error {
	conn, err := Acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer Release(conn) // also after a panic
	return do(conn)
}

// Transactions begins them on connections of a pool, which their ends release. It is for pgx.BeginTxFunc.
type Transactions struct{ Pool *pgxpool.Pool }

// BeginTx is that of the pool. It fails with NotBegun.
func (t Transactions) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	conn, err := Acquire(ctx, t.Pool)
	if err != nil {
		return nil, NotBegun{err}
	}
	tx, err := On{conn}.BeginTx(ctx, options)
	if err != nil {
		Release(conn)
		return nil, err
	}
	return &transaction{Tx: tx, conn: conn}, nil
}

// On begins transactions on a connection. It is for pgx.BeginTxFunc.
type On struct{ *pgxpool.Conn }

// BeginTx is that of the connection. It fails with NotBegun.
func (o On) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := o.Conn.BeginTx(ctx, options)
	if err != nil {
		return nil, NotBegun{err}
	}
	return tx, nil
}

// NotBegun is the error of a transaction of which nothing can have taken effect, wherever the answer to its BEGIN is.
type NotBegun struct{ error }

// Unwrap returns what failed.
func (e NotBegun) Unwrap() error { return e.error }

type transaction struct {
	pgx.Tx
	conn *pgxpool.Conn // nil once it was released
}

// Commit does not release after a panic, since Rollback follows.
func (t *transaction) Commit(ctx context.Context) error {
	err := t.Tx.Commit(ctx)
	t.release()
	return err
}

func (t *transaction) Rollback(ctx context.Context) error {
	defer t.release()
	return t.Tx.Rollback(ctx)
}

func (t *transaction) release() {
	if t.conn != nil {
		Release(t.conn)
		t.conn = nil
	}
}
