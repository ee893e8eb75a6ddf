package conns_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/conns"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a pool of one connection.
func open(t *testing.T, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(testdb.URL(t))
	require.NoError(t, err)
	config.MaxConns = 1
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestTune_TheirHooks_AreCalledAsWell(t *testing.T) {
	var tried, made int
	refused := errors.New("no password to be had")
	var refuse bool
	pool := open(t, func(c *pgxpool.Config) {
		c.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { tried++; return true }
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if made++; refuse {
				return refused
			}
			return nil
		}
		conns.Tune(c)
	})
	for range 2 {
		require.NoError(t, conns.Do(t.Context(), pool, func(*pgxpool.Conn) error { return nil }))
		require.NoError(t, pool.AcquireFunc(t.Context(), func(*pgxpool.Conn) error { return nil }))
	}
	require.Equal(t, 4, tried)
	require.Equal(t, 1, made)
	refuse = true
	pool.Reset()
	_, err := conns.Acquire(t.Context(), pool)
	require.ErrorIs(t, err, refused)
	require.NotErrorIs(t, err, conns.ErrMaking)
}

// A pool that prepares its connections tries them before that.
func TestTune_PreparesItsConnections_TheyAreTriedBefore(t *testing.T) {
	pool := open(t, func(c *pgxpool.Config) {
		c.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
		c.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
			_, err := conn.Exec(ctx, "SELECT 1")
			return err == nil, err
		}
		conns.Tune(c)
	})
	breakIt(t, pool)
}

func TestSilence_EndsOnceNothingWasHeardForSoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bounded, heard, end := conns.Silence(t.Context(), time.Second)
		for range 5 {
			time.Sleep(time.Second - 1)
			heard()
		}
		require.NoError(t, bounded.Err())
		time.Sleep(time.Second)
		synctest.Wait()
		require.ErrorIs(t, bounded.Err(), context.Canceled)
		end()
		bounded, _, end = conns.Silence(t.Context(), time.Second)
		end()
		require.Error(t, bounded.Err())
	})
}

func TestWhileHeard_EndsOnceNothingCame(t *testing.T) {
	for name, c := range map[string]struct {
		comes []time.Duration // when something does
		deaf  bool            // nobody knows
		ends  time.Duration
	}{
		"nothing":                   {ends: 3 * time.Second},
		"something, soon":           {comes: []time.Duration{time.Second}, ends: 3 * time.Second},
		"something, late":           {comes: []time.Duration{2500 * time.Millisecond}, ends: 4500 * time.Millisecond},
		"something again and again": {comes: []time.Duration{2 * time.Second, 3500 * time.Millisecond, 5 * time.Second}, ends: 7 * time.Second},
		"something, unnoticed":      {comes: []time.Duration{2500 * time.Millisecond}, deaf: true, ends: 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				var mu sync.Mutex
				came := began
				last := func() time.Time { mu.Lock(); defer mu.Unlock(); return came }
				if c.deaf {
					last = nil
				}
				bounded, end := conns.WhileHeard(t.Context(), last, began.Add(3*time.Second), 2*time.Second)
				defer end()
				for _, at := range c.comes {
					time.Sleep(time.Until(began.Add(at)))
					mu.Lock()
					came = time.Now()
					mu.Unlock()
				}
				<-bounded.Done()
				require.Equal(t, c.ends, time.Since(began))
				require.Equal(t, context.DeadlineExceeded, bounded.Err())
			})
		})
	}
}

func TestWhileHeard_Ended_LeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		bounded, end := conns.WhileHeard(ctx, time.Now, time.Now().Add(time.Second), time.Second)
		time.Sleep(time.Minute)
		require.NoError(t, bounded.Err())
		cancel()
		require.ErrorIs(t, bounded.Err(), context.Canceled)
		end()
		bounded, end = conns.WhileHeard(t.Context(), time.Now, time.Now().Add(time.Second), time.Second)
		end()
		require.ErrorIs(t, context.Cause(bounded), context.Canceled)
	})
}

// Its connection was closed by the server meanwhile.
func TestAcquire_TriedAndBroken_IsAnother(t *testing.T) {
	pool := open(t, func(c *pgxpool.Config) {
		c.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
		conns.Tune(c)
		conns.Tune(c) // of a pool's own config, say
	})
	breakIt(t, pool)
}

// breakIt has the server close the connection of a pool, which has another to offer.
func breakIt(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var pid uint32
	require.NoError(t, conns.Do(t.Context(), pool, func(c *pgxpool.Conn) error { pid = c.Conn().PgConn().PID(); return nil }))
	testdb.Exec(t, testdb.URL(t), `SELECT pg_terminate_backend($1, 10000)`, pid)
	require.NoError(t, conns.Do(t.Context(), pool, func(c *pgxpool.Conn) error {
		require.NotEqual(t, pid, c.Conn().PgConn().PID())
		return nil
	}))
}

func TestAcquire_WhileAConnectionIsMade_ErrMaking(t *testing.T) {
	for name, tuned := range map[string]bool{"tuned": true, "not tuned": false} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			made := make(chan struct{})
			pool := open(t, func(c *pgxpool.Config) {
				c.MaxConns = 2
				c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { cancel(); <-made; return nil }
				if tuned {
					conns.Tune(c)
				}
			})
			defer close(made)
			_, err := conns.Acquire(ctx, pool)
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, tuned, errors.Is(err, conns.ErrMaking))
		})
	}
}

// All places are taken by those who have connections made.
func TestAcquire_WhileOthersHaveConnectionsMade_ErrMaking(t *testing.T) {
	making, made := make(chan struct{}), make(chan struct{})
	pool := open(t, func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { close(making); <-made; return nil }
	})
	var first sync.WaitGroup
	defer first.Wait()
	first.Go(func() {
		assert.NoError(t, conns.Do(t.Context(), pool, func(*pgxpool.Conn) error { return nil }))
	})
	defer close(made)
	<-making
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := conns.Acquire(ctx, pool)
	require.ErrorIs(t, err, conns.ErrMaking)
}

func TestDo_Panics_HasReleasedTheConnection(t *testing.T) {
	pool := open(t, nil)
	require.Panics(t, func() { _ = conns.Do(t.Context(), pool, func(*pgxpool.Conn) error { panic("bug") }) })
	require.Zero(t, pool.Stat().AcquiredConns())
}

func TestTransactions_HoweverTheyEnd_ReleaseTheirConnection(t *testing.T) {
	pool := open(t, nil)
	begin := func() pgx.Tx {
		tx, err := conns.Transactions{Pool: pool}.BeginTx(t.Context(), pgx.TxOptions{})
		require.NoError(t, err)
		return tx
	}
	for name, end := range map[string]func(pgx.Tx){
		"commit":   func(tx pgx.Tx) { require.NoError(t, tx.Commit(t.Context())) },
		"rollback": func(tx pgx.Tx) { require.NoError(t, tx.Rollback(t.Context())) },
		"both": func(tx pgx.Tx) {
			require.NoError(t, tx.Commit(t.Context()))
			require.ErrorIs(t, tx.Rollback(t.Context()), pgx.ErrTxClosed)
		},
		"close": func(tx pgx.Tx) {
			require.NoError(t, tx.Conn().Close(t.Context()))
			err := tx.Commit(t.Context())
			require.Error(t, err)
			var failure *pgwake.Error
			require.ErrorAs(t, pgwake.WrapError("commit", err), &failure)
			require.Equal(t, []bool{true, true}, []bool{failure.Unknown, failure.Retryable}, "as far as the error says the commit may have been sent")
		},
	} {
		end(begin())
		require.Zero(t, pool.Stat().AcquiredConns(), name)
	}
	_, err := conns.Transactions{Pool: pool}.BeginTx(t.Context(), pgx.TxOptions{BeginQuery: "BEGIN BY MISTAKE"})
	require.Error(t, err)
	require.Zero(t, pool.Stat().AcquiredConns())
}

// panics is a tracer that does so when a commit has ended.
type panics struct{}

func (panics) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, panics{}, d.SQL)
}

func (panics) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(panics{}) == "commit" {
		panic("bug")
	}
}

// The rollback that follows is on a connection that nobody else has.
func TestTransactions_CommitPanics_ReleasedByTheRollback(t *testing.T) {
	pool := open(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = panics{} })
	require.Panics(t, func() {
		_ = pgx.BeginTxFunc(t.Context(), conns.Transactions{Pool: pool}, pgx.TxOptions{}, func(pgx.Tx) error { return nil })
	})
	require.Zero(t, pool.Stat().AcquiredConns())
	tx, err := conns.Transactions{Pool: pool}.BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	require.Panics(t, func() { _ = tx.Commit(t.Context()) })
	require.EqualValues(t, 1, pool.Stat().AcquiredConns())
	_ = tx.Rollback(t.Context())
	require.Zero(t, pool.Stat().AcquiredConns())
}
