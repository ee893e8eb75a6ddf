package peers

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var server = sync.OnceValues(func() (*devpg.Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return devpg.Start(ctx, &devpg.Options{Logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, format+"\n", args...)
	}})
})

// each runs a test for each peer. What a scenario leaves behind, package measure tests.
func each(t *testing.T, run func(t *testing.T, p measure.Peer, url string)) {
	s, err := server()
	require.NoError(t, err)
	for _, p := range []measure.Peer{Published(), ShortPoll(5 * time.Millisecond), River("River, defaults", RiverSettings{}), River("River, bench", RiverBench)} {
		t.Run(p.Name(), func(t *testing.T) { run(t, p, s.URL) })
	}
}

func TestPeers_HandOverEveryItem(t *testing.T) {
	each(t, func(t *testing.T, p measure.Peer, url string) {
		r, err := measure.Pairs(t.Context(), url, measure.PairsOptions{Pairs: 2, Most: 20 * time.Millisecond, Dispatchers: 2, Peer: p})
		require.NoError(t, err)
		assert.Equal(t, p.Name(), r.Peer)
		assert.Len(t, r.First.FromCommit, 2)
		assert.Len(t, r.Second.FromCommit, 2)
		assert.Zero(t, r.Again)
	})
}

func TestPeers_Drain_CountsEveryItemOnce(t *testing.T) {
	each(t, func(t *testing.T, p measure.Peer, url string) {
		r, err := measure.PeerDrain(t.Context(), url, p, measure.DrainOptions{Items: 130, Dispatchers: 100})
		require.NoError(t, err)
		assert.Equal(t, 130, r.Done)
		assert.Equal(t, p.Settings(), r.Settings)
		assert.Positive(t, r.Took)
	})
}

func TestPeers_Drain_EndsAtItsLimit(t *testing.T) {
	each(t, func(t *testing.T, p measure.Peer, url string) {
		r, err := measure.PeerDrain(t.Context(), url, p, measure.DrainOptions{Items: 5000, Dispatchers: 1, Limit: 50 * time.Millisecond})
		require.NoError(t, err)
		assert.Less(t, r.Done, 5000)
	})
}

func TestPeers_Writers_AndBloat(t *testing.T) {
	each(t, func(t *testing.T, p measure.Peer, url string) {
		r, err := measure.Writers(t.Context(), url, measure.WritersOptions{Way: measure.ByPeer, Peer: p, Writers: 3, Duration: 50 * time.Millisecond})
		require.NoError(t, err)
		assert.Equal(t, p.Name(), r.Way)
		assert.Positive(t, r.Inserted)

		b, err := measure.Bloat(t.Context(), url, measure.BloatOptions{Duration: 50 * time.Millisecond, Chunk: 3, Peer: p})
		require.NoError(t, err)
		assert.Equal(t, p.Name(), b.Who)
		assert.Positive(t, b.Last)
	})
}

func TestPeers_Idle_CountsTheirStatements(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	r, err := measure.PeerIdle(t.Context(), s.URL, ShortPoll(5*time.Millisecond), 2, 100*time.Millisecond)
	require.NoError(t, err)
	assert.Positive(t, r.Statements)
	assert.Positive(t, r.PerSecond())
	r, err = measure.PeerIdle(t.Context(), s.URL, Published(), 2, 100*time.Millisecond)
	require.NoError(t, err)
	assert.Zero(t, r.Statements, "it waits for a notification")
}

func TestPublished_Timers_ComeByTheirNotification(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	r, err := measure.PeerTimers(t.Context(), s.URL, Published(), measure.TimersOptions{Timers: 1, Lead: 200 * time.Millisecond, Dispatchers: 2})
	require.NoError(t, err)
	assert.Len(t, r.Lateness, 1)
}

func TestPublished_Nodes_EachAsksForEachItem(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	r, err := measure.Nodes(t.Context(), s.URL, measure.NodesOptions{Nodes: 3, Dispatchers: 2, Items: 5, Peer: Published()})
	require.NoError(t, err)
	assert.GreaterOrEqual(t, r.PerItem(), 3.0)
}

func TestPublished_LostConnection_ListensAgain(t *testing.T) {
	s, err := server()
	require.NoError(t, err)
	p := Published()
	ctx := t.Context()
	pool, err := newPool(ctx, s.URL, "pgwake_peer_lost", 1, nil)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(ctx, "CREATE SCHEMA pgwake_peer_lost")
	require.NoError(t, err)
	defer func() {
		_, err := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA pgwake_peer_lost CASCADE")
		assert.NoError(t, err)
	}()
	require.NoError(t, p.Prepare(ctx, s.URL, "pgwake_peer_lost"))
	producer, err := p.Produce(ctx, s.URL, "pgwake_peer_lost", 1)
	require.NoError(t, err)
	defer producer.Close()
	came := make(chan int, 10)
	n, err := p.Open(ctx, s.URL, "pgwake_peer_lost", 1, measure.PeerHandler{Hand: func(n int) { came <- n }})
	require.NoError(t, err)
	defer func() { assert.NoError(t, n.Close(ctx)) }()
	require.NoError(t, producer.Enqueue(ctx, 1, time.Time{}))
	assert.Equal(t, 1, <-came)

	const listeners = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"pgwake_peer_lost%'"
	_, err = pool.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"pgwake_peer_lost%' AND pid <> pg_backend_pid()")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		var count int
		return pool.QueryRow(ctx, listeners+" AND backend_start > now() - interval '1 hour' AND wait_event = 'ClientRead'").Scan(&count) == nil && count == 1
	}, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, producer.Enqueue(ctx, 2, time.Time{}))
	assert.Equal(t, 2, <-came)
}

func TestRiver_JobThatFailed_FailsTheNode_AfterThoseBeforeItWereCounted(t *testing.T) {
	n := &riverNode{failed: make(chan struct{}), counted: make(chan struct{})}
	events := make(chan *river.Event, 4)
	var done int
	event := func(kind river.EventKind) *river.Event {
		return &river.Event{Kind: kind, Job: &rivertype.JobRow{ID: 7}}
	}
	go n.count(events, func(count int) { done += count })
	events <- event(river.EventKindJobCompleted)
	events <- event(river.EventKindJobCompleted)
	events <- event(river.EventKindJobFailed)
	<-n.counted
	<-n.Failed()
	assert.ErrorContains(t, n.err, "job 7: job_failed")
	assert.Equal(t, 2, done)
}

func TestRiver_SubscriptionThatEnds_EndsTheCount(t *testing.T) {
	n := &riverNode{failed: make(chan struct{}), counted: make(chan struct{})}
	events := make(chan *river.Event, 1)
	var done int
	events <- &river.Event{Kind: river.EventKindJobCompleted}
	close(events)
	n.count(events, func(count int) { done += count })
	assert.Equal(t, 1, done)
	assert.NoError(t, n.err)
}
