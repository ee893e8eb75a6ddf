package pgwake

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var errPoll = errors.New("poll failed")

// Ten failures open it; for a minute polls are skipped; then they are made, and three successes close it, or a failure opens it
// anew. Skipping is no failure.
func TestBreaker_Protocol(t *testing.T) {
	now := time.Now()
	var b breaker
	for range breakerFailures - 1 {
		require.True(t, b.allows(now))
		b.failed(errPoll, now)
	}
	b.succeeded()
	for range breakerFailures {
		require.True(t, b.allows(now), "failures count in a row")
		b.failed(errPoll, now)
	}
	require.False(t, b.allows(now.Add(breakerPause-1)))
	require.EqualValues(t, 1, b.skipped)
	now = now.Add(breakerPause)
	require.True(t, b.allows(now))
	b.succeeded()
	b.succeeded()
	b.failed(errPoll, now)
	require.False(t, b.allows(now), "half-open, one failure is enough")

	now = now.Add(time.Second)
	b.succeeded()
	require.True(t, b.allows(now), "somebody got an answer")
	b.succeeded()
	require.Equal(t, breakerHalfOpen, b.state)
	b.succeeded()
	require.Equal(t, breakerClosed, b.state)
	require.NoError(t, b.err)
}

// It never skips after a success, nor for longer than the pause, nor before ten failures.
func TestBreaker_AnyCourse_SkipsOnlyWhatFails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b breaker
		now := time.Now()
		var failed time.Time // the last failure
		failures, succeeded := 0, false
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"fail", "fail", "fail", "succeed", "wait"}).Draw(t, "step") {
			case "fail":
				b.failed(errPoll, now)
				failures, failed, succeeded = failures+1, now, false
			case "succeed":
				b.succeeded()
				failures, succeeded = 0, true
			case "wait":
				now = now.Add(time.Duration(rapid.IntRange(0, 50).Draw(t, "seconds")) * time.Second)
			}
			if !b.allows(now) {
				require.False(t, succeeded, "the database answered last")
				require.Less(t, now.Sub(failed), breakerPause)
				require.Positive(t, failures)
			}
		}
	})
}

func TestLateness_OneThatIsLate_IsNoSign(t *testing.T) {
	var l lateness
	now := time.Now()
	for range latenessSample {
		require.Empty(t, l.problem(now))
		l.observe(time.Hour, now)
	}
	require.Contains(t, l.problem(now), "1h0m0s")
	l.observe(time.Millisecond, now)
	for range latenessSample - 1 {
		require.Empty(t, l.problem(now), "a transaction may take an hour")
		l.observe(time.Hour, now)
	}
	l.observe(time.Hour, now)
	require.NotEmpty(t, l.problem(now))
	require.Empty(t, l.problem(now.Add(latenessLasts+1)), "it is long ago")
	l.reset()
	require.Empty(t, l.problem(now), "another connection")
}

// breakFunction has a function fail until it is mended.
func breakFunction(t *testing.T, p *Provider, name string) (mend func()) {
	conn := plain(t, p.cfg.Schema)
	mustExec(t, conn, "ALTER FUNCTION "+name+" RENAME TO "+name+"_away")
	return func() { mustExec(t, conn, "ALTER FUNCTION "+name+"_away RENAME TO "+name) }
}

// Every query for work fails. Polls stop after ten of that, and nothing else does: acks and renewals go on, and who waits does not
// hear of it. The first fetch that gets an answer has polls made again, before the minute is over.
func TestT58_QueriesForWorkFail_PollsAreSkipped_NothingElseIs(t *testing.T) {
	p := testProvider(t, Config{Mode: ModePolling, PollInterval: 50 * time.Millisecond}) // or many polls are under way when it opens
	producer := plain(t, p.cfg.Schema)
	mustExec(t, producer, `SELECT enqueue_work('held')`)
	held, err := p.FetchWorkItem(t.Context(), nil)
	require.NoError(t, err)
	const waiting = breakerFailures + 10
	fetches := make(chan delivery, waiting)
	for range waiting {
		one := fetchWork(t, p, longPoll)
		go func() { fetches <- <-one }()
	}
	awaitParked(t, p, Worker, waiting)
	mend := breakFunction(t, p, "fetch_work")
	awaitFailed := func(many int) {
		t.Helper()
		for range many {
			select {
			case d := <-fetches:
				require.Error(t, d.err)
			case <-time.After(patient):
				require.Fail(t, "no poll was made")
			}
		}
	}
	awaitFailed(breakerFailures)
	skipped := func(more int64) {
		before := p.Stats().Breaker.Skipped
		eventually(t, "polls are skipped", func() bool { return p.Stats().Breaker.Skipped >= before+more })
	}
	skipped(10)
	b := p.Stats().Breaker
	require.True(t, b.Open)
	require.GreaterOrEqual(t, b.Failures, breakerFailures) // a poll may have been under way when it opened
	left := waiting - b.Failures
	require.Positive(t, left)
	awaitFailed(b.Failures - breakerFailures)
	require.ErrorContains(t, b.Err, "fetch_work")
	require.Equal(t, []Part{PartDatabase, PartPolls}, []Part{p.Health().Problems[0].With, p.Health().Problems[1].With})
	_, err = p.RenewWorkItemLock(t.Context(), held.LockToken, time.Minute)
	require.NoError(t, err)
	require.NoError(t, p.AckWorkItem(t.Context(), held.LockToken, nil))
	require.Equal(t, left, p.Stats().Worker.Parked)

	mend()
	mustExec(t, producer, `SELECT enqueue_work('x') FROM generate_series(1, `+strconv.Itoa(left)+`)`)
	skipped(3)
	require.Equal(t, left, p.Stats().Worker.Parked, "nobody has asked")
	_, err = p.FetchWorkItem(t.Context(), &FetchOptions{NoWait: true, Namespaces: []string{"elsewhere"}})
	require.ErrorIs(t, err, ErrNoWork)
	for range left {
		got := get(t, fetches)
		require.NoError(t, got.err)
		require.Equal(t, PathPolling, got.item.Path)
	}
	eventually(t, "it is closed", func() bool { return p.Health().OK })
	require.Equal(t, map[Path]int64{PathFetch: 1, PathPolling: int64(left), PathEvent: 0}, p.Stats().Worker.ItemsBy)
}

// The periodic statement fails, time and again: the connection that it is made on is kept, and heard on.
func TestBreaker_FallbackFails_TheListenConnectionIsKept(t *testing.T) {
	p := testProvider(t, Config{FallbackInterval: 100 * time.Millisecond})
	pid := p.engine.listener.pid.Load()
	mend := breakFunction(t, p, "look")
	eventually(t, "it is skipped", func() bool { return p.Stats().Breaker.Skipped >= 2 })
	require.Equal(t, pid, p.engine.listener.pid.Load())
	require.True(t, p.Stats().Listening)
	mend()
	wait := fetchWork(t, p, longPoll)
	awaitParked(t, p, Worker, 1)
	heard := p.Stats().Worker.Notifications
	mustExec(t, plain(t, p.cfg.Schema), `SELECT enqueue_work('heard')`)
	require.NoError(t, get(t, wait).err) // whichever came first: there are polls as well
	eventually(t, "it is heard on", func() bool { return p.Stats().Worker.Notifications > heard })
	before := p.Stats().Fallbacks
	eventually(t, "it is made again", func() bool { return p.Stats().Fallbacks >= before+breakerSuccesses && p.Health().OK })
	require.Equal(t, pid, p.engine.listener.pid.Load())
	require.Zero(t, p.Stats().Reconnects)
}
