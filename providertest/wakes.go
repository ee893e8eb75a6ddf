package providertest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what does this library promise beyond the table, above all to a fetch that waits?

var ours = group{"pgwake", slices.Concat([]row{
	{"long_poll_of_work_never_ends_early", func(t *testing.T, n *node) {
		for _, timeout := range timeouts {
			begun := time.Now()
			n.requireNoWorkWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
			require.GreaterOrEqual(t, time.Since(begun), timeout)
		}
	}},
	{"long_poll_of_turns_never_ends_early", func(t *testing.T, n *node) {
		for _, timeout := range timeouts {
			begun := time.Now()
			n.requireNoTurnWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
			require.GreaterOrEqual(t, time.Since(begun), timeout)
		}
	}},
	{"long_poll_of_work_ends_soon_after_its_timeout", func(t *testing.T, n *node) {
		for _, timeout := range timeouts {
			within(t, timeout+overrun+queryTime(func() { n.requireNoWork(t) }), func() {
				n.requireNoWorkWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
			})
		}
	}},
	{"long_poll_of_turns_ends_soon_after_its_timeout", func(t *testing.T, n *node) {
		for _, timeout := range timeouts {
			within(t, timeout+overrun+queryTime(func() { n.requireNoTurn(t) }), func() {
				n.requireNoTurnWith(t, &pgwake.FetchOptions{PollTimeout: timeout})
			})
		}
	}},
	{"long_poll_ends_with_its_context", func(t *testing.T, n *node) {
		for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
			ctx, cancel := context.WithCancel(t.Context())
			waiting := n.waitingWith(ctx, t, queue, soon)
			cancel()
			require.ErrorIs(t, (<-waiting).err, context.Canceled)
		}
	}},
	{"namespaces_of_work_are_apart", func(t *testing.T, n *node) {
		a := &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: []string{"a"}}
		n.enqueueWith(t, pgwake.WorkItem{Name: "of b"}, &pgwake.EnqueueOptions{Namespace: "b", Priority: 9})
		n.requireNoWorkWith(t, a)
		n.enqueueWith(t, pgwake.WorkItem{Name: "of a"}, &pgwake.EnqueueOptions{Namespace: "a"})
		item := n.takeWith(t, a)
		require.Equal(t, "of a", item.Name)
		require.Equal(t, "a", item.Namespace)
		n.requireNoWorkWith(t, a)
		require.Equal(t, "of b", n.take(t).Name, "a fetch without namespaces serves all")
	}},
	{"namespaces_of_turns_are_apart", func(t *testing.T, n *node) {
		a := &pgwake.FetchOptions{LockTimeout: lease, NoWait: true, Namespaces: []string{"a"}}
		n.sendWith(t, startMessage("of b"), &pgwake.EnqueueOptions{Namespace: "b", Priority: 9})
		n.requireNoTurnWith(t, a)
		n.sendWith(t, startMessage("of a"), &pgwake.EnqueueOptions{Namespace: "a"})
		turn := n.takeTurnWith(t, a)
		require.Equal(t, "of a", turn.Instance)
		require.Equal(t, "a", turn.Namespace)
		n.ackTurn(t, turn, pgwake.OrchestrationAck{
			Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{Instance: "of a", Kind: "poke"}}},
			Metadata: running,
		})
		require.Equal(t, "of a", n.takeTurnWith(t, a).Instance, "what it sends itself stays in its namespace")
		n.requireNoTurnWith(t, a)
		n.takeTurnOf(t, "of b")
	}},
	{"namespaces_of_waiting_fetches_are_apart", func(t *testing.T, n *node) {
		a, b := []string{"a"}, []string{"b"}
		for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
			inA := n.waitingWith(t.Context(), t, queue, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Namespaces: a})
			inB := n.waitingWith(t.Context(), t, queue, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Namespaces: b})
			add := func(namespace string) {
				o := &pgwake.EnqueueOptions{Namespace: namespace}
				if queue == pgwake.Worker {
					n.enqueueWith(t, pgwake.WorkItem{Name: "work"}, o)
				} else {
					n.sendWith(t, startMessage("i in "+namespace), o)
				}
			}
			add("b")
			require.Equal(t, "b", (<-inB).got(t).namespace)
			select {
			case f := <-inA:
				require.Failf(t, "it was of the other namespace", "%+v", f)
			default:
			}
			add("a")
			require.Equal(t, "a", (<-inA).got(t).namespace)
		}
	}},
}, queueing, batches, headers(), turns, homes, letters, wakes(), transactions(), sessionEnds(), waits())}

var timeouts = []time.Duration{time.Millisecond, 40 * time.Millisecond, 300 * time.Millisecond}

// queryTime is how long one query for work takes here and now.
func queryTime(query func()) time.Duration {
	begun := time.Now()
	query()
	return time.Since(begun)
}

// fetched is what a fetch came back with.
type fetched struct {
	subject   string // the item's name, or the turn's instance
	namespace string
	claimedAt time.Time // server time, if it was claimed with lease
	token     pgwake.LockToken
	err       error
}

// got asserts that something was fetched, and returns it.
func (f fetched) got(t *testing.T) fetched {
	t.Helper()
	require.NoError(t, f.err, "it was not woken")
	return f
}

// fetch fetches from a queue.
func (n *node) fetch(ctx context.Context, queue pgwake.Queue, o *pgwake.FetchOptions) (f fetched) {
	if queue == pgwake.Worker {
		item, err := n.FetchWorkItem(ctx, o)
		if err != nil {
			return fetched{err: err}
		}
		return fetched{item.Name, item.Namespace, claimedAt(item.LockedUntil), item.LockToken, nil}
	}
	turn, err := n.FetchOrchestrationItem(ctx, o)
	if err != nil {
		return fetched{err: err}
	}
	return fetched{turn.Instance, turn.Namespace, claimedAt(turn.LockedUntil), turn.LockToken, nil}
}

// waiting starts a fetch and returns when it waits. The channel then has what it comes back with.
func (n *node) waiting(t *testing.T, queue pgwake.Queue) <-chan fetched {
	t.Helper()
	return n.waitingWith(t.Context(), t, queue, soon)
}

func (n *node) waitingWith(ctx context.Context, t *testing.T, queue pgwake.Queue, o *pgwake.FetchOptions) <-chan fetched {
	t.Helper()
	before, known := n.parked(queue)
	back := make(chan fetched, 1)
	go func() { back <- n.fetch(ctx, queue, o) }()
	if !known {
		time.Sleep(settle)
		return back
	}
	for begun := time.Now(); time.Since(begun) < patience; time.Sleep(time.Millisecond) {
		if parked, _ := n.parked(queue); parked > before || len(back) > 0 {
			n.awaitSettled(queue)
			return back
		}
	}
	require.Fail(t, "the fetch neither waits nor returns")
	return nil
}

// settle is enough for a wait to have begun that nobody can see. If it was not, the row shows a little less.
const settle = 100 * time.Millisecond

// settlePatience is enough for that unless a transaction of the row's stays open.
const settlePatience = 2 * time.Second

// awaitSettled waits until those who wait will not look by themselves any more: what happens before is found whether
// anybody tells of it or not.
func (n *node) awaitSettled(queue pgwake.Queue) {
	p := n.Provider.(interface{ Stats() pgwake.Stats })
	for begun := time.Now(); time.Since(begun) < settlePatience; time.Sleep(time.Millisecond) {
		if stats := p.Stats(); !stats.Listening || statsOf(stats, queue).Settled {
			return
		}
	}
}

func statsOf(stats pgwake.Stats, queue pgwake.Queue) pgwake.QueueStats {
	if queue == pgwake.Worker {
		return stats.Worker
	}
	return stats.Orchestrator
}

// parked is how many fetches wait, if the Provider tells.
func (n *node) parked(queue pgwake.Queue) (count int, known bool) {
	p, known := n.Provider.(interface{ Stats() pgwake.Stats })
	if !known {
		return 0, false
	}
	of := statsOf(p.Stats(), queue)
	return of.Parked, true
}

// cause is a way in which something becomes due.
type cause struct {
	name  string
	queue pgwake.Queue
	// prepare brings the node to where nothing is due. It returns what makes something due, and the instant from
	// which it is: the zero time stands for at once.
	prepare func(t *testing.T, n *node) (happen func() (due time.Time))
}

// wakes are the rows about causes, each for a fetch on the same node and for one on another.
func wakes() (rows []row) {
	for _, c := range slices.Concat(causes, causesFromBefore) {
		rows = append(rows, row{"wake_when_" + c.name, func(t *testing.T, n *node) { c.wakes(t, n, c.prepare(t, n)) }})
	}
	for _, c := range causes {
		rows = append(rows, row{"other_node_wakes_when_" + c.name, func(t *testing.T, n *node) {
			waiter := n.another(t)
			c.wakes(t, waiter, c.prepare(t, n))
		}})
	}
	for _, c := range causesFromBefore {
		rows = append(rows, row{"other_node_wakes_when_" + c.name, func(t *testing.T, n *node) {
			happen := c.prepare(t, n)
			c.wakes(t, n.another(t), happen) // it begins when it is too late to be told
		}})
	}
	return rows
}

// wakes asserts that the cause ends the wait of a fetch, and not before something is due.
func (c cause) wakes(t *testing.T, waiter *node, happen func() (due time.Time)) {
	back := waiter.waiting(t, c.queue)
	due := happen()
	requireNotBefore(t, due, (<-back).got(t).claimedAt)
	require.ErrorIs(t, waiter.fetch(t.Context(), c.queue, now).err, pgwake.ErrNoWork, "it was due once")
}

var causes = []cause{
	{"work_is_enqueued", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		return func() time.Time {
			n.enqueue(t, "work")
			return time.Time{}
		}
	}},
	{"delay_of_work_ends", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		return func() time.Time { return n.addDelayed(t, pgwake.Worker) }
	}},
	{"work_is_abandoned", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		item := n.take(t)
		return func() time.Time {
			require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, nil))
			return time.Time{}
		}
	}},
	{"work_is_abandoned_with_delay", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		item := n.take(t)
		return func() time.Time {
			before := n.clock(t, pgwake.Worker)
			require.NoError(t, n.AbandonWorkItem(t.Context(), item.LockToken, &pgwake.AbandonOptions{Delay: n.LockTimeout}))
			return before.Add(n.LockTimeout)
		}
	}},
	{"lease_of_work_ends", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		item := n.takeWith(t, n.brief(now))
		return func() time.Time { return item.LockedUntil }
	}},
	{"renewed_lease_of_work_ends", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		item := n.takeWith(t, &pgwake.FetchOptions{LockTimeout: 4 * n.LockTimeout, NoWait: true})
		return func() time.Time {
			until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, 4*n.LockTimeout)
			require.NoError(t, err)
			return until
		}
	}},
	{"lease_of_work_is_cut_short", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		item := n.take(t)
		return func() time.Time {
			until, err := n.RenewWorkItemLock(t.Context(), item.LockToken, n.LockTimeout)
			require.NoError(t, err)
			return until
		}
	}},
	{"turn_schedules_work", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			n.ackTurn(t, turn, pgwake.OrchestrationAck{WorkItems: activities("i", 1), Metadata: running})
			return time.Time{}
		}
	}},
	{"work_is_redriven", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		n.enqueue(t, "work")
		require.NoError(t, n.DeadLetterWorkItem(t.Context(), n.take(t).LockToken, "given up", ""))
		return func() time.Time {
			redriven, err := n.RedriveDeadLetters(t.Context(), nil)
			require.NoError(t, err)
			require.Equal(t, 1, redriven)
			return time.Time{}
		}
	}},

	{"message_is_sent", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		return func() time.Time {
			n.sendWith(t, startMessage("i"), nil)
			return time.Time{}
		}
	}},
	{"delay_of_message_ends", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		return func() time.Time { return n.addDelayed(t, pgwake.Orchestrator) }
	}},
	{"turn_is_abandoned", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, nil))
			return time.Time{}
		}
	}},
	{"turn_is_abandoned_with_delay", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			before := n.clock(t, pgwake.Orchestrator)
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{Delay: n.LockTimeout}))
			return before.Add(n.LockTimeout)
		}
	}},
	{"lease_of_turn_ends", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, n.brief(now))
		return func() time.Time { return turn.LockedUntil }
	}},
	{"renewed_lease_of_turn_ends", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnWith(t, &pgwake.FetchOptions{LockTimeout: 4 * n.LockTimeout, NoWait: true})
		return func() time.Time {
			until, err := n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, 4*n.LockTimeout)
			require.NoError(t, err)
			return until
		}
	}},
	{"lease_of_turn_is_cut_short", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			until, err := n.RenewOrchestrationItemLock(t.Context(), turn.LockToken, n.LockTimeout)
			require.NoError(t, err)
			return until
		}
	}},
	{"completion_is_sent", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.startWithActivities(t, "i", 1)
		item := n.takeActivity(t, "i", 1)
		return func() time.Time {
			require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, &pgwake.Message{Instance: "i", Kind: "done"}))
			return time.Time{}
		}
	}},
	{"turn_sends_message", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			n.ackTurn(t, turn, pgwake.OrchestrationAck{Messages: []pgwake.MessageEnqueue{{Message: startMessage("child")}}, Metadata: running})
			return time.Time{}
		}
	}},
	{"timer_of_turn_fires", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		turn := n.takeTurnOf(t, "i")
		return func() time.Time {
			before := n.clock(t, pgwake.Orchestrator)
			n.ackTurn(t, turn, pgwake.OrchestrationAck{
				Messages: []pgwake.MessageEnqueue{{
					Message:        pgwake.Message{Instance: "i", Kind: "timer_fired"},
					EnqueueOptions: pgwake.EnqueueOptions{Delay: n.LockTimeout},
				}},
				Metadata: running,
			})
			return before.Add(n.LockTimeout)
		}
	}},
	{"ack_frees_instance_with_held_message", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		turn := n.hold(t, "i")
		return func() time.Time {
			n.ackTurn(t, turn, pgwake.OrchestrationAck{Metadata: running})
			return time.Time{}
		}
	}},
	{"abandon_frees_instance_with_held_message", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		turn := n.hold(t, "i")
		return func() time.Time {
			require.NoError(t, n.AbandonOrchestrationItem(t.Context(), turn.LockToken, &pgwake.AbandonOptions{Delay: lease}))
			return time.Time{}
		}
	}},
	{"dead_letter_frees_instance_with_held_message", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		turn := n.hold(t, "i")
		return func() time.Time {
			require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), turn.LockToken, "given up", ""))
			return time.Time{}
		}
	}},
	{"message_is_redriven", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		n.sendWith(t, startMessage("i"), nil)
		require.NoError(t, n.DeadLetterOrchestrationItem(t.Context(), n.takeTurnOf(t, "i").LockToken, "given up", ""))
		return func() time.Time {
			redriven, err := n.RedriveDeadLetters(t.Context(), nil)
			require.NoError(t, err)
			require.Equal(t, 1, redriven)
			return time.Time{}
		}
	}},
}

// causesFromBefore have nothing left to happen: who waits is to see for itself what will become due.
var causesFromBefore = []cause{
	{"delay_of_work_from_before_ends", pgwake.Worker, func(t *testing.T, n *node) func() time.Time {
		due := n.addDelayed(t, pgwake.Worker)
		return func() time.Time { return due }
	}},
	{"delay_of_message_from_before_ends", pgwake.Orchestrator, func(t *testing.T, n *node) func() time.Time {
		due := n.addDelayed(t, pgwake.Orchestrator)
		return func() time.Time { return due }
	}},
}

// addDelayed adds something with a delay, and asserts that the delay counts from that instant. It returns when it is due.
func (n *node) addDelayed(t *testing.T, queue pgwake.Queue) (due time.Time) {
	t.Helper()
	before := n.clock(t, queue)
	due = n.add(t, queue, "delayed", pgwake.EnqueueOptions{Delay: n.LockTimeout}).DueAt
	requireNotBefore(t, before.Add(n.LockTimeout), due)
	requireNotBefore(t, due, n.clock(t, queue).Add(n.LockTimeout))
	return due
}

// hold takes a turn, and has a message arrive behind its lock, where a fetch meets it.
func (n *node) hold(t *testing.T, instance string) *pgwake.OrchestrationItem {
	t.Helper()
	n.sendWith(t, startMessage(instance), nil)
	turn := n.takeTurnOf(t, instance)
	n.send(t, instance, "held")
	n.requireNoTurn(t)
	return turn
}

// sessionEnds are the rows about those who wait for a session of another owner to end sooner than it was to.
func sessionEnds() (rows []row) {
	for _, on := range []struct {
		name   string
		waiter func(*testing.T, *node) *node
	}{
		{"wake_when_session_is_cut_short", func(_ *testing.T, n *node) *node { return n }},
		{"other_node_wakes_when_session_is_cut_short", func(t *testing.T, n *node) *node { return n.another(t) }},
	} {
		rows = append(rows, row{on.name, func(t *testing.T, n *node) {
			w := on.waiter(t, n)
			n.enqueueIn(t, "s", "1", "2")
			n.requireTake(t, "A", "s", "1")
			back := w.waitingWith(t.Context(), t, pgwake.Worker, patiently(by("B")))
			before := n.clock(t, pgwake.Worker)
			renewed, err := n.RenewSessionLock(t.Context(), []string{"A"}, n.LockTimeout, lease)
			require.NoError(t, err)
			require.Equal(t, 1, renewed)
			requireNotBefore(t, before.Add(n.LockTimeout), (<-back).got(t).claimedAt)
		}})
	}
	return rows
}

// waits are the rows about those who wait for an instance, on the node where it changes and on another.
func waits() []row {
	here := func(_ *testing.T, n *node) *node { return n }
	there := func(t *testing.T, n *node) *node { return n.another(t) }
	return []row{
		{"wait_for_status_ends_with_the_change", statusWait(here)},
		{"other_node_wait_for_status_ends_with_the_change", statusWait(there)},
		{"wait_for_instance_ends_with_its_outcome", outcomeWait(here)},
		{"other_node_wait_for_instance_ends_with_its_outcome", outcomeWait(there)},
		{"wait_ends_with_the_instance", lostWait(here)},
		{"other_node_wait_ends_with_the_instance", lostWait(there)},
	}
}

func statusWait(waiter func(*testing.T, *node) *node) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		w := waiter(t, n)
		seen := int64(0)
		for _, value := range []string{"first", "second"} { // for the first, before there is an instance
			back := await(t, func(ctx context.Context) (*pgwake.CustomStatus, error) { return w.WaitForStatus(ctx, "i", seen) })
			if seen == 0 {
				n.start(t, "i")
			}
			require.Empty(t, back)
			n.setStatus(t, "i", value)
			seen++
			want := &pgwake.CustomStatus{Value: value, Set: true, Version: seen}
			require.Equal(t, told[*pgwake.CustomStatus]{want, nil}, <-back)
		}
	}
}

// silence is how long a row looks on while a wait does not end that must not.
const silence = 200 * time.Millisecond

func outcomeWait(waiter func(*testing.T, *node) *node) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		w := waiter(t, n)
		back := await(t, func(ctx context.Context) (*pgwake.Outcome, error) { return w.WaitForInstance(ctx, "i") })
		n.start(t, "i")
		n.endForNext(t, "i", 2)
		meanwhile, cancel := context.WithTimeout(t.Context(), silence)
		defer cancel()
		_, err := w.WaitForInstance(meanwhile, "i")
		require.ErrorIs(t, err, context.DeadlineExceeded, "an instance that continues as new has not ended")
		require.Empty(t, back, "an instance that continues as new has not ended")
		n.beginNext(t, "i", 2)
		running := await(t, func(ctx context.Context) (*pgwake.Outcome, error) { return w.WaitForInstance(ctx, "i") })
		n.end(t, "i", 2, pgwake.StatusFailed, "broken")
		want := &pgwake.Outcome{Instance: "i", ExecutionID: 2, Status: pgwake.StatusFailed, Output: "broken"}
		require.Equal(t, told[*pgwake.Outcome]{want, nil}, <-back)
		require.Equal(t, told[*pgwake.Outcome]{want, nil}, <-running)
	}
}

// lostWait: another instance with the same id is not the one that was waited for. Nobody can see when the wait has found that one, and
// a machine may stall: it gets longer each time.
func lostWait(waiter func(*testing.T, *node) *node) func(*testing.T, *node) {
	return func(t *testing.T, n *node) {
		w := waiter(t, n)
		for _, instance := range []string{"i", "j", "k"} {
			n.start(t, instance)
			n.setStatus(t, instance, "first")
			outcome := await(t, func(ctx context.Context) (*pgwake.Outcome, error) { return w.WaitForInstance(ctx, instance) })
			status := await(t, func(ctx context.Context) (*pgwake.CustomStatus, error) { return w.WaitForStatus(ctx, instance, 1) })
			if instance != "i" {
				time.Sleep(10 * settle)
			}
			_, err := n.DeleteInstance(t.Context(), instance, force)
			require.NoError(t, err)
			n.start(t, instance)
			n.setStatus(t, instance, "first")
			n.setStatus(t, instance, "second")
			n.end(t, instance, 1, pgwake.StatusCompleted, "done")
			ofOutcome, ofStatus := <-outcome, <-status
			if foundLate := ofOutcome.err == nil || ofStatus.err == nil; foundLate && instance != "k" {
				continue
			}
			requirePermanent(t, ofOutcome.err, pgwake.ErrNotFound)
			requirePermanent(t, ofStatus.err, pgwake.ErrNotFound)
			return
		}
	}
}

// told is what a wait came back with.
type told[T any] struct {
	what T
	err  error
}

// await calls wait, for as long as patience lasts, and returns when it waits. The channel then has what it comes
// back with.
func await[T any](t *testing.T, wait func(context.Context) (T, error)) <-chan told[T] {
	t.Helper()
	back := make(chan told[T], 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	go func() {
		what, err := wait(ctx)
		back <- told[T]{what, err}
	}()
	time.Sleep(settle)
	return back
}
