package console_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/internal/testschema"
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

// counted is a site all of whose statements are counted, and another Provider of the schema, which does not listen.
func counted(t *testing.T) (*site, *statements, *pgwake.Provider) {
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
	first := testschema.Core.New(t, &pgwake.Config{Mode: pgwake.ModeDisabled}) // has the schema
	p, err := pgwake.New(t.Context(), pool, &pgwake.Config{Schema: first.Schema(), ListenConfig: listen})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return newSite(t, p, &console.Options{}), &sent, first
}

// rate is how many statements a second there are, for so long: that nothing happens can only be seen by waiting.
func (s *statements) rate(d time.Duration) float64 {
	before, began := s.sent.Load(), time.Now()
	time.Sleep(d)
	return float64(s.sent.Load()-before) / time.Since(began).Seconds()
}

// A page that is open costs two statements a second at most while things happen, several cost no more than one as far as they show the same; nearly none
// while nothing happens; and none when none is open.
func TestBudget_StatementsWhilePagesAreOpen_AndWhileNoneIs(t *testing.T) {
	t.Parallel()
	s, sent, other := counted(t)
	pages := []string{"overview", "queues", "nodes", "overview", "letters", "items", "instances"}
	var streams []*listening
	for _, page := range pages {
		streams = append(streams, s.listen(t, "stream/"+page))
		streams[len(streams)-1].next("live")
	}
	const window = 8 * time.Second
	require.Eventually(t, func() bool { return sent.rate(time.Second) == 0 }, patience, time.Millisecond, "nothing happens")
	require.LessOrEqual(t, sent.rate(window), 1.0, "seven pages look once in 15 seconds how old all is, four of them as one, and the nodes are asked once in 30")
	for _, l := range streams[3:] {
		l.end()
	}

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { // as others do who are not asked, and not counted
		defer close(ended)
		for ctx.Err() == nil {
			_, _ = other.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "x"}, nil)
			time.Sleep(100 * time.Millisecond)
		}
	}()
	streams[0].next("live")
	rate := sent.rate(window)
	require.LessOrEqual(t, rate, 2+1/window.Seconds(), "pages of the hub, as one of them; and a statement that began just before")
	require.GreaterOrEqual(t, rate, 0.5, "it does look")
	stop()
	<-ended

	for _, l := range streams {
		l.end()
	}
	require.Eventually(t, func() bool { return sent.rate(500*time.Millisecond) == 0 }, patience, 10*time.Millisecond)
	require.Zero(t, sent.rate(2*time.Second), "nobody looks")
}

// What is done elsewhere is on pages that have been still for a while as soon as it is done: whoever did it.
func TestBudget_PageThatWasStill_ChangesAtOnce(t *testing.T) {
	t.Parallel()
	s, sent, other := counted(t)
	overview, letters := s.listen(t, "stream/overview"), s.listen(t, "stream/letters")
	for _, l := range []*listening{overview, letters} {
		l.next("live")
	}
	still := func() {
		require.Eventually(t, func() bool { return sent.rate(time.Second) == 0 }, patience, 10*time.Millisecond)
	}
	soon := func(l *listening, text string) {
		began := time.Now()
		for !strings.Contains(l.next("live"), text) {
		}
		t.Log(text, "after", time.Since(began))
		require.Less(t, time.Since(began), 8*time.Second) // 0.1 s on a machine that has time; 15 s would be the look that comes in any case
	}
	still()
	_, err := other.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "by-another"}, &pgwake.EnqueueOptions{Namespace: "elsewhere"})
	require.NoError(t, err)
	soon(overview, "elsewhere")
	still()
	item, err := s.FetchWorkItem(t.Context(), &pgwake.FetchOptions{NoWait: true})
	require.NoError(t, err)
	require.NoError(t, s.DeadLetterWorkItem(t.Context(), item.LockToken, "poison", ""))
	soon(letters, "by-another")
}
