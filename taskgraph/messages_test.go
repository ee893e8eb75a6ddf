package taskgraph_test

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: do the verbs that have the names of pgmq's do what those who call them expect?

func TestT64_SpecificMessage_OneOfManyReadsIt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const callers = 8
	p := pool(t, l.p, callers)
	id, err := l.SendWithNotify(l.within(), "worker_billing_queue", map[string]int{"invoice": 7}, &taskgraph.MessageOptions{Headers: map[string]string{"trace": "x"}})
	require.NoError(t, err)
	other, err := l.SendWithNotify(l.within(), "worker_billing_queue", "another", nil)
	require.NoError(t, err)
	var wait sync.WaitGroup
	read := make(chan *taskgraph.QueueMessage, callers)
	for range callers {
		wait.Go(func() {
			err := l.apart(p, func(g *taskgraph.Graph) error {
				m, err := g.ReadSpecificMessage(t.Context(), "worker_billing_queue", id, time.Minute)
				read <- m
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	close(read)
	var won *taskgraph.QueueMessage
	for m := range read {
		if m != nil {
			require.Nil(t, won, "two have it")
			won = m
		}
	}
	require.NotNil(t, won)
	require.Equal(t, []any{id, 1}, []any{won.ID, won.Reads})
	require.JSONEq(t, `{"invoice": 7}`, string(won.Message))
	require.JSONEq(t, `{"trace": "x"}`, string(won.Headers))
	require.WithinDuration(t, time.Now().Add(time.Minute), won.VisibleAt, 10*time.Second)
	require.WithinDuration(t, time.Now(), won.EnqueuedAt, 10*time.Second)

	pgwaketest.Advance(t, l.p, 2*time.Minute)
	require.ErrorIs(t, l.p.AckWorkItem(t.Context(), won.Token(), nil), pgwake.ErrLockLost)
	again, err := l.ReadSpecificMessage(l.within(), "worker_billing_queue", id, 1500*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, 2, again.Reads, "the lease had ended")
	require.NotEqual(t, won.ClaimID, again.ClaimID)
	require.WithinDuration(t, time.Now().Add(2*time.Second), again.VisibleAt, 1500*time.Millisecond, "whole seconds, rounded up")
	_, err = l.p.RenewWorkItemLock(t.Context(), again.Token(), time.Minute)
	require.NoError(t, err)
	require.NoError(t, l.p.AckWorkItem(t.Context(), again.Token(), nil))
	for name, id := range map[string]int64{"acknowledged": id, "never was": 1 << 40} {
		m, err := l.ReadSpecificMessage(l.within(), "worker_billing_queue", id, time.Minute)
		require.NoError(t, err)
		require.Nil(t, m, name)
	}
	m, err := l.ReadSpecificMessage(l.within(), "billing_queue", other, time.Minute)
	require.NoError(t, err)
	require.Nil(t, m, "of another queue, of the same namespace")
	_, err = l.ReadSpecificMessage(l.within(), "nowhere_queue", other, time.Minute)
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	m, err = l.ReadSpecificMessage(l.within(), "worker_billing_queue", other, time.Minute)
	require.NoError(t, err)
	require.JSONEq(t, `"another"`, string(m.Message))
	require.Nil(t, m.Headers)
}

func TestReadSpecificMessage_NotDueYet_IsNobodys(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	id, err := l.SendWithNotify(l.within(), "jobs_queue", 1, &taskgraph.MessageOptions{Delay: time.Hour})
	require.NoError(t, err)
	m, err := l.ReadSpecificMessage(l.within(), "jobs_queue", id, time.Minute)
	require.NoError(t, err)
	require.Nil(t, m)
	pgwaketest.Advance(t, l.p, time.Hour)
	m, err = l.ReadSpecificMessage(l.within(), "jobs_queue", id, time.Minute)
	require.NoError(t, err)
	require.NotNil(t, m)
}

// What a node waits for it gets, when the lease of somebody who reads by id ends, without a look at the clock.
func TestReadSpecificMessage_ReaderDies_ANodeThatWaitsGetsItWhenTheLeaseEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	id, err := l.SendWithNotify(l.within(), "jobs_queue", 1, nil)
	require.NoError(t, err)
	m, err := l.ReadSpecificMessage(l.within(), "jobs_queue", id, time.Second)
	require.NoError(t, err)
	require.NotNil(t, m)
	item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{"jobs"}, PollTimeout: labPatience})
	require.NoError(t, err)
	require.Equal(t, []any{id, "jobs_queue", 2}, []any{item.ID, item.Name, item.Attempt})
	require.Equal(t, "1", string(item.Input))
}

// A node that waits already hears of a lease that somebody takes who reads by id.
func TestReadSpecificMessage_ANodeWaitsAlready_IsToldWhenTheLeaseEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	got := make(chan int64, 1)
	go func() {
		item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{"jobs"}, PollTimeout: labPatience})
		if err != nil {
			t.Error(err)
			got <- 0
			return
		}
		got <- item.ID
	}()
	require.Eventually(t, func() bool { s := l.p.Stats().Worker; return s.Parked == 1 && s.Settled }, labPatience, 10*time.Millisecond)
	// Sent and read in one transaction: nobody is told of a message that is due.
	tx, err := l.conn.Begin(t.Context())
	require.NoError(t, err)
	g := l.WithTx(tx)
	_, err = tx.Exec(t.Context(), `SELECT set_config('pgwake.notify', 'off', true)`)
	require.NoError(t, err)
	id, err := g.SendWithNotify(l.within(), "jobs_queue", 1, nil)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT set_config('pgwake.notify', 'on', true)`)
	require.NoError(t, err)
	m, err := g.ReadSpecificMessage(l.within(), "jobs_queue", id, time.Second)
	require.NoError(t, err)
	require.NotNil(t, m)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, id, <-got)
}

func TestReadSpecificMessage_LimitsSessionsAndPauses(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	send := func() int64 {
		id, err := l.SendWithNotify(l.within(), "jobs_queue", 1, nil)
		require.NoError(t, err)
		return id
	}
	id := send()
	read := func(id int64) (*taskgraph.QueueMessage, error) {
		return l.ReadSpecificMessage(l.within(), "jobs_queue", id, time.Minute)
	}
	require.NoError(t, l.p.SetLimits(t.Context(), "jobs", pgwake.Limits{MaxRunning: 1}))
	_, err := read(id)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, "namespace jobs has limits")
	require.NoError(t, l.p.SetLimits(t.Context(), "jobs", pgwake.Limits{Weight: 3}))
	for _, namespaces := range [][]string{{"jobs"}, nil} {
		l.exec(`SELECT pause('worker', $1)`, namespaces)
		m, err := read(id)
		require.NoError(t, err)
		require.Nil(t, m, "it is paused")
		l.exec(`SELECT pause('worker', $1, false)`, namespaces)
	}
	m, err := read(id)
	require.NoError(t, err)
	require.NotNil(t, m)

	of := one[int64](l, `SELECT enqueue_work('jobs_queue', '1', 'jobs', p_session => 's')`)
	_, err = read(of)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	require.ErrorContains(t, err, "session s")
	require.Equal(t, 0, one[int](l, `SELECT attempt_count FROM worker_queue WHERE id = $1`, of))
}

func TestSendWithNotify_Message_IsAWorkItem(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	id, err := l.SendWithNotify(l.within(), "payments_queue", map[string]string{"to": "ada"}, &taskgraph.MessageOptions{Headers: map[string]string{"trace": "x"}})
	require.NoError(t, err)
	item, err := l.p.FetchWorkItem(l.within(), &pgwake.FetchOptions{Namespaces: []string{"payments"}, NoWait: true})
	require.NoError(t, err)
	require.Equal(t, []any{id, "payments_queue", "payments"}, []any{item.ID, item.Name, item.Namespace})
	require.JSONEq(t, `{"to": "ada"}`, string(item.Input))
	require.Equal(t, map[string]string{"trace": "x"}, item.Headers)

	tx, err := l.conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = l.WithTx(tx).SendWithNotify(l.within(), "payments_queue", 1, nil)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue`))

	null, err := l.SendWithNotify(l.within(), "payments_queue", nil, nil)
	require.NoError(t, err)
	m, err := l.ReadSpecificMessage(l.within(), "payments_queue", null, time.Minute)
	require.NoError(t, err)
	require.Equal(t, "null", string(m.Message))
}

func TestT65_ExtractQueueNamespace(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for queue, want := range map[string]string{
		"orchestration_x":                  "orchestration",
		"orchestration":                    "orchestration",
		"worker_a_b_queue":                 "a_b",
		"payments_queue":                   "payments",
		"Bad-Name":                         "default",
		"worker_queue":                     "worker",
		"worker__queue":                    "worker",
		"worker_queue_queue":               "queue",
		"queue":                            "default",
		"_queue":                           "default",
		"":                                 "default",
		"Payments_queue":                   "default", // what would be its name is none
		"worker_Big_queue":                 "default",
		"worker_a-b_queue":                 "a-b",
		"a-b_queue":                        "default",
		"a_queue_b":                        "default",
		"worker_1_queue":                   "default",
		strings.Repeat("a", 40) + "_queue": strings.Repeat("a", 40),
		strings.Repeat("a", 41) + "_queue": "default",
		"worker_" + strings.Repeat("a", 40) + "_queue": strings.Repeat("a", 40),
		"a_queue\n":                     "default",
		"'; DROP TABLE tasks; --_queue": "default",
	} {
		require.Equal(t, want, one[string](l, `SELECT extract_queue_namespace($1)`, queue), "%q in SQL", queue)
		require.Equal(t, want, taskgraph.ExtractQueueNamespace(queue), "%q in Go", queue)
	}
	require.Equal(t, "default", one[string](l, `SELECT extract_queue_namespace(NULL)`))
}

func TestMessages_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, queue := range []string{"", "a b", "1a", "_queue", "a;b", strings.Repeat("a", 64), "ä_queue", "a_queue\n"} {
		_, err := l.ReadSpecificMessage(l.within(), queue, 1, time.Second)
		require.ErrorIs(t, err, pgwake.ErrInvalid, queue)
		_, err = l.SendWithNotify(l.within(), queue, 1, nil)
		require.ErrorIs(t, err, pgwake.ErrInvalid, queue)
		require.ErrorIs(t, l.EnsureTaskQueue(l.within(), queue), pgwake.ErrInvalid, queue)
		_, err = l.QueueStatistics(l.within(), queue)
		require.ErrorIs(t, err, pgwake.ErrInvalid, queue)
		for _, call := range []string{`pgmq_read_specific_message($1, 1)`, `pgmq_send_with_notify($1, '1')`, `ensure_task_queue($1)`, `get_queue_statistics($1)`} {
			l.fails("PW003", `SELECT `+call, queue)
			l.fails("PW003", `SELECT `+call, nil)
		}
	}
	for _, lease := range []time.Duration{0, -time.Second, 200 * 365 * 24 * time.Hour} {
		_, err := l.ReadSpecificMessage(l.within(), "a_queue", 1, lease)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	for _, o := range []taskgraph.MessageOptions{{Delay: -1}, {Delay: 200 * 365 * 24 * time.Hour}, {Headers: map[string]string{"": "x"}}, {Headers: map[string]string{"a": "b\x00"}}} {
		_, err := l.SendWithNotify(l.within(), "a_queue", 1, &o)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	for _, message := range []any{func() {}, "a\x00b", json.RawMessage(`{`)} {
		_, err := l.SendWithNotify(l.within(), "a_queue", message, nil)
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
	l.fails("PW003", `SELECT pgmq_send_with_notify('a_queue', '1', -1)`)
	l.fails("PW003", `SELECT pgmq_send_with_notify('a_queue', '1', 0, '[]')`)
	l.fails("PW003", `SELECT pgmq_read_specific_message('a_queue', 1, 0)`)
	l.fails("PW003", `SELECT pgmq_read_specific_message('a_queue', 1, NULL)`)
	require.Equal(t, 0, one[int](l, `SELECT count(*) FROM worker_queue`))
	require.Equal(t, []string{"default"}, all[string](l, `SELECT name FROM namespaces`))
}

func TestEnsureTaskQueue_Again_ChangesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for range 3 {
		require.NoError(t, l.EnsureTaskQueue(l.within(), "worker_jobs_queue"))
		require.True(t, one[bool](l, `SELECT ensure_task_queue('worker_jobs_queue')`))
	}
	require.Equal(t, []string{"default", "jobs"}, all[string](l, `SELECT name FROM namespaces ORDER BY name`))
}

func TestQueueStatistics_EmptyFullAndUnknown(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, err := l.QueueStatistics(l.within(), "jobs_queue")
	require.ErrorIs(t, err, pgwake.ErrNotFound)
	require.NoError(t, l.EnsureTaskQueue(l.within(), "jobs_queue"))
	s, err := l.QueueStatistics(l.within(), "jobs_queue")
	require.NoError(t, err)
	require.Equal(t, taskgraph.QueueStatistics{Queue: "jobs_queue"}, s)
	for _, age := range []int{100, 50, 10} {
		id, err := l.SendWithNotify(l.within(), "jobs_queue", 1, nil)
		require.NoError(t, err)
		l.exec(`UPDATE worker_queue SET created_at = created_at - make_interval(secs => $2) WHERE id = $1`, id, age)
	}
	_, err = l.SendWithNotify(l.within(), "worker_jobs_queue", 1, nil) // another queue of the namespace
	require.NoError(t, err)
	l.exec(`SELECT pgmq_read_specific_message('jobs_queue', min(id)) FROM worker_queue`)
	s, err = l.QueueStatistics(l.within(), "jobs_queue")
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Length, "the one that was read as well")
	require.InDelta(t, 100, *s.OldestAgeSeconds, 5)
	require.InDelta(t, 10, *s.NewestAgeSeconds, 5)
}
