package console_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: what does looking cost the database?

// statements counts what is sent, by whatever connection.
type statements struct{ sent atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.sent.Add(1)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// counted is a site all of whose statements are counted.
func counted(t *testing.T) (*site, *statements) {
	t.Helper()
	var sent statements
	url := pgwaketest.URL(t)
	pools, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	pools.ConnConfig.Tracer = &sent
	listen, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	listen.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), pools)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	first := pgwaketest.New(t, &pgwake.Config{Mode: pgwake.ModeDisabled}) // makes the schema, and drops it in the end
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: first.Schema(), ListenConfig: listen})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return newSite(t, p, &console.Options{}), &sent
}

// A page that is open costs two statements a second at most, several cost no more than one as far as they show the same, and none cost none.
func TestBudget_StatementsWhilePagesAreOpen_AndWhileNoneIs(t *testing.T) {
	t.Parallel()
	s, sent := counted(t)
	during := func(d time.Duration) float64 {
		before, began := sent.sent.Load(), time.Now()
		time.Sleep(d) // that nothing happens can only be seen by waiting
		return float64(sent.sent.Load()-before) / time.Since(began).Seconds()
	}
	var streams []*listening
	for _, page := range []string{"overview", "queues", "nodes", "overview"} {
		streams = append(streams, s.listen(t, "stream/"+page))
		streams[len(streams)-1].next("live")
	}
	const window = 8 * time.Second // in which the nodes are asked once
	rate := during(window)
	require.LessOrEqual(t, rate, 2+1/window.Seconds(), "pages of the hub, as one of them; and a statement that began just before")
	require.GreaterOrEqual(t, rate, 0.5, "it does look")
	streams = append(streams, s.listen(t, "stream/letters"))
	streams[len(streams)-1].next("live")
	require.LessOrEqual(t, during(3*time.Second), 4+2.0, "and one of its own; the nodes may be asked just then")

	for _, l := range streams {
		l.end()
	}
	require.Eventually(t, func() bool { return during(500*time.Millisecond) == 0 }, patience, time.Millisecond)
	require.Zero(t, during(2*time.Second), "nobody looks")
}
