package pgwake_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testsize"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// stalled is a connection to a machine that stands still in the middle of a long answer: it reads no more, and closes nothing.
type stalled struct {
	net.Conn
	left atomic.Int64 // to be read until then; pgx reads on in another goroutine when it gives up
	*halt
}

// halt is the end of a machine's work.
type halt struct {
	reached, over chan struct{}
	once          sync.Once
}

func (s *stalled) Read(b []byte) (int, error) {
	if s.left.Load() <= 0 {
		s.once.Do(func() { close(s.reached) })
		<-s.over
	}
	n, err := s.Conn.Read(b)
	s.left.Add(int64(-n))
	return n, err
}

func (s *stalled) Close() error {
	select {
	case <-s.reached:
		<-s.over
	default:
	}
	return s.Conn.Close()
}

func (s *stalled) NetConn() net.Conn { return s.Conn }

// The server was sending what it had claimed, more than it and the network have room for, and so had not committed.
func TestClaim_ItsMachineStandsStillBeforeItIsCommitted_ServerGivesUp(t *testing.T) {
	t.Parallel()
	if !testsize.Full() {
		t.Skip("it takes the server 25 s")
	}
	n := newNode(t, nil)
	const items = 24
	for range items {
		n.exec(t, `SELECT enqueue_work('x', $1)`, `"`+strings.Repeat("x", 1<<20-2)+`"`)
	}
	config, err := pgxpool.ParseConfig(pgwaketest.URL(t))
	require.NoError(t, err)
	machine := &halt{reached: make(chan struct{}), over: make(chan struct{})}
	claim := make(chan error, 1)
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		if err := conn.(*net.TCPConn).SetReadBuffer(1 << 20); err != nil { // a system may have room for more than 24 MiB, if it is to choose
			return nil, err
		}
		s := &stalled{Conn: conn, halt: machine}
		s.left.Store(1 << 20)
		return s, nil
	}
	pgwake.TunePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: n.schema, Mode: pgwake.ModePolling, Logger: silent})
	require.NoError(t, err)
	defer func() {
		close(machine.over)
		require.Error(t, <-claim)
		_ = p.Close(context.Background())
		pool.Close()
	}()
	go func() { _, err := p.FetchWorkItems(t.Context(), items, now); claim <- err }()
	<-machine.reached
	for range items {
		item, err := n.FetchWorkItem(t.Context(), &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 2 * time.Minute})
		require.NoError(t, err)
		require.NotNil(t, item)
		require.Equal(t, 1, item.Attempt)
		require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
	}
}
