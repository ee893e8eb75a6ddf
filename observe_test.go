package pgwake_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
)

// This file answers: does somebody who only looks learn that something has happened, whoever did it, and nothing while nothing does?

// observing is an Observe of a Provider that does not listen, in a goroutine of its own.
type observing struct {
	t       *testing.T
	said    chan pgwake.Observation
	unasked []pgwake.NodeReport // seen so far
	end     func()
}

func (n *node) observe(t *testing.T) *observing {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	o := &observing{t: t, said: make(chan pgwake.Observation, 1000)}
	ended := make(chan error, 1)
	go func() {
		for try := 1; ; try++ { // a machine may stand still for as long as the notification that tests LISTEN is waited for
			var failed error
			begun := false
			for what, err := range n.Observe(ctx) {
				if failed = err; err == nil {
					begun = true
					o.said <- what
				}
			}
			if failed == nil || begun || try == 3 {
				ended <- failed
				return
			}
		}
	}()
	o.end = func() {
		cancel()
		require.NoError(t, <-ended)
		ended <- nil
	}
	t.Cleanup(o.end)
	return o
}

// next returns the next Observation of which a condition holds.
func (o *observing) next(what string, is func(pgwake.Observation) bool) pgwake.Observation {
	o.t.Helper()
	late := time.After(patience)
	for {
		select {
		case said := <-o.said:
			o.keep(said)
			if is(said) {
				return said
			}
		case <-late:
			o.t.Fatal("it did not say: " + what)
		}
	}
}

func happened(o pgwake.Observation) bool { return o.For > 2*time.Second }

// hears waits until it hears what is inserted, and nothing happens any more.
func (o *observing) hears() {
	o.t.Helper()
	o.next("that it hears now", func(o pgwake.Observation) bool { return o.For > 0 && !happened(o) })
}

// forget forgets what was said so far.
func (o *observing) forget() {
	for len(o.said) > 0 {
		o.keep(<-o.said)
	}
}

// keep keeps what nodes say of their own accord.
func (o *observing) keep(said pgwake.Observation) {
	if !said.Asked {
		o.unasked = append(o.unasked, said.Reports...)
	}
}

func TestObserve_WhoeverDoesSomething_ItSaysSo(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	looker := n.openAt(t, pgwaketest.URL(t), &pgwake.Config{Mode: pgwake.ModeDisabled})
	o := looker.observe(t)
	asked := o.next("how the nodes are", func(o pgwake.Observation) bool {
		if o.Asked && len(o.Reports) == 0 { // its answer was late: it is asked again if a node seems to have come
			n.exec(t, `SELECT notify_queue('worker', 0, NULL)`)
		}
		return o.Asked && len(o.Reports) > 0
	})
	require.Len(t, asked.Reports, 1)
	require.Len(t, asked.Nodes, 1, "somebody who looks is no node")
	for _, step := range []struct {
		what  string
		hears bool // it is inserted, and by no node: nobody says so but the database
		do    func()
	}{
		{"plain SQL inserts", true, func() { n.exec(t, `SELECT enqueue_work('plain', '{}')`) }},
		{"a Provider that does not listen enqueues", true, func() { looker.enqueue(t, "x") }},
		{"a node fetches", false, func() { n.take(t) }},
		{"a node pauses a queue", false, func() { require.NoError(t, n.Pause(t.Context(), pgwake.Worker, "n")) }},
	} {
		if step.hears {
			o.hears()
		}
		o.forget()
		step.do()
		o.next(step.what, happened)
	}
	ofItem := func(r pgwake.NodeReport) bool { return r.Stats.Worker.Items == 1 }
	if !slices.ContainsFunc(o.unasked, ofItem) { // it may have been what told of the pause
		o.next("how the node is that was at work", func(said pgwake.Observation) bool { return !said.Asked && slices.ContainsFunc(said.Reports, ofItem) })
	}
	o.end()
	require.Zero(t, n.armedObservers(t))
}

func TestObserve_ItHearsNothing_ItSaysNothingAndSoDoNodes(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	o := n.observe(t)
	o.hears()
	require.Eventually(t, func() bool { // that nothing happens can only be seen by waiting; the node may just have begun
		o.forget()
		time.Sleep(time.Second)
		return len(o.said) == 0
	}, patience, 10*time.Millisecond)
	depths, err := n.GetQueueDepths(t.Context())
	require.NoError(t, err)
	require.Empty(t, depths)
	require.Empty(t, o.said, "whoever looks has done nothing")
}

func TestObserve_ManyInsert_TheySoonDoSoInSilence(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	o := n.observe(t)
	o.hears()
	armed := func() int { return n.armedObservers(t) }
	// The node may just have begun, which is news.
	require.Eventually(t, func() bool { return armed() == 2 }, patience, 10*time.Millisecond, "a row for each queue")
	o.forget()
	n.exec(t, `SELECT enqueue_work('plain', '{}')`)
	o.next("an insert", happened)
	require.Eventually(t, func() bool { return armed() == 0 }, patience, 10*time.Millisecond, "who inserts more pays nothing for somebody who looks")
	o.hears()
	require.Equal(t, 2, armed())
	require.Zero(t, n.Stats().Worker.Unreadable)
}

// Whoever dies without a word is not to have producers tell everybody until the server finds out.
func TestObserve_SessionThatHears_EndsSoonAfterItsClient(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	for _, hears := range []bool{false, true} {
		var channels, set []string
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT `+n.quoted()+`.observe(1, $1)`, hears).Scan(&channels))
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT array_agg(name ORDER BY name) FROM pg_settings WHERE source = 'session' AND name LIKE ANY ('{tcp%,idle_session%}')`).Scan(&set))
		want := []string{"idle_session_timeout", "tcp_keepalives_count", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_user_timeout"}
		if !hears { // it may be a pooler's, for all that is known
			want = nil
		}
		require.Equal(t, want, set)
	}
}

func TestObserve_ManyNodesBeginToListen_AllAreAskedOnceASecond(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	o := n.observe(t)
	o.hears()
	const nodes = 300
	began, asked := time.Now(), 0
	for range nodes {
		n.exec(t, `SELECT notify_queue('worker', 0, NULL)`)
	}
	for len(o.said) > 0 { // of many greetings at once it says one thing
		if said := <-o.said; said.Asked {
			asked++
		}
	}
	n.exec(t, `SELECT notify_queue('worker', 0, NULL)`) // all of those before may have been asked by now
	o.next("that those who came are asked", func(o pgwake.Observation) bool { return o.Asked })
	asked++
	require.LessOrEqual(t, asked, 2+int(time.Since(began)/time.Second))
}

func TestObserve_SomethingIsSlow_NotificationsAreNotLate(t *testing.T) {
	t.Parallel()
	const slow = 1100 * time.Millisecond
	for name, c := range map[string]struct {
		question bool // it is slow, or else the loop is
		asked    int
	}{"the question": {true, 1}, "the loop": {false, 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, nil)
			if c.question {
				n.exec(t, `ALTER FUNCTION ask_nodes RENAME TO ask_nodes_at_once`)
				n.exec(t, fmt.Sprintf(`CREATE FUNCTION ask_nodes(p_reply text, p_follow boolean) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
					BEGIN PERFORM pg_sleep(%f), ask_nodes_at_once(p_reply, p_follow); END $$`, slow.Seconds()))
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			asked := 0
			for o, err := range n.Observe(ctx) {
				require.NoError(t, err)
				switch {
				case happened(o):
					<-time.After(slow)
				case o.Asked:
					if asked++; asked == c.asked {
						cancel()
					}
					// Of a node that begins to listen it hears twice, and asks in between.
					n.exec(t, `SELECT notify_queue('worker', 0, NULL), notify_queue('orchestrator', 0, NULL)`)
				}
			}
			require.Equal(t, c.asked, asked)
		})
	}
}

func TestObserve_CannotBe_SaysWhy(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	ended := make(chan error, 1)
	begun := make(chan struct{}, 10)
	go func() {
		for o, err := range n.Observe(t.Context()) {
			if err != nil {
				ended <- err
			} else if o.Asked {
				begun <- struct{}{}
			}
		}
		close(ended)
	}()
	<-begun
	require.NoError(t, n.Close(t.Context()))
	requireError(t, <-ended, pgwake.ErrClosed)
	require.NoError(t, <-ended)
	for _, err := range n.Observe(t.Context()) {
		requireError(t, err, pgwake.ErrClosed)
	}
}

// armedObservers is how many rows say that somebody who looks is to be told of everything.
func (n *node) armedObservers(t *testing.T) (rows int) {
	t.Helper()
	require.NoError(t, n.Pool().QueryRow(t.Context(), "SELECT count(*) FROM "+n.quoted()+".waiters WHERE node = 0 AND armed").Scan(&rows))
	return rows
}
