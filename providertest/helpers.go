package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the rows have in common?

const (
	// lease outlives every row: what is claimed with it comes back only if somebody gives it back.
	lease = time.Hour

	// patience bounds what must happen: far more than it takes.
	patience = 20 * time.Second
)

var (
	now  = &pgwake.FetchOptions{LockTimeout: lease, NoWait: true}          // what is due at this moment
	soon = &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience} // what becomes due

	shortly = &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: 20 * time.Millisecond} // between two times now
)

// brief are options for a claim that ends after the Factory's LockTimeout.
func (n *node) brief(o *pgwake.FetchOptions) *pgwake.FetchOptions {
	o = new(*o)
	o.LockTimeout = n.LockTimeout
	return o
}

// node is the Provider of a row, with the Factory to make more from.
type node struct {
	Provider
	Factory
}

// another returns one more node on the same data, or skips the row.
func (n *node) another(t *testing.T) *node {
	t.Helper()
	if n.Another == nil {
		t.Skip("the Factory makes no second node on the same data")
	}
	return &node{Provider: n.Another(t, n.Provider), Factory: n.Factory}
}

// shortPoller returns a node whose fetches never wait, or skips the row.
func (n *node) shortPoller(t *testing.T) *node {
	t.Helper()
	if n.ShortPoll == nil {
		t.Skip("for short pollers only, and the Factory makes none")
	}
	return &node{Provider: n.ShortPoll(t), Factory: n.Factory}
}

// corrupt damages the history of the instance, or skips the row.
func (n *node) corrupt(t *testing.T, instance string) {
	t.Helper()
	if n.CorruptHistory == nil {
		t.Skip("the Factory cannot damage a history")
	}
	n.CorruptHistory(t, n.Provider, instance)
}

// Work items.

// enqueue adds work items with these names, due at once, in one call each.
func (n *node) enqueue(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		n.enqueueWith(t, pgwake.WorkItem{Name: name}, nil)
	}
}

func (n *node) enqueueWith(t *testing.T, item pgwake.WorkItem, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	t.Helper()
	added, err := n.EnqueueForWorker(t.Context(), item, o)
	require.NoError(t, err)
	return added
}

// take fetches an item that must be due, with a lease that outlives the row.
func (n *node) take(t *testing.T) *pgwake.ClaimedWorkItem {
	t.Helper()
	return n.takeWith(t, now)
}

// await fetches the item that is due next, with a lease that outlives the row. It asks again and again: one fetch
// that waits would not show that something can be had too early, if it knows when to look.
func (n *node) await(t *testing.T) *pgwake.ClaimedWorkItem {
	t.Helper()
	for begun := time.Now(); time.Since(begun) < patience; {
		for _, o := range []*pgwake.FetchOptions{now, shortly} {
			item, err := n.FetchWorkItem(t.Context(), o)
			if err == nil {
				return item
			}
			require.ErrorIs(t, err, pgwake.ErrNoWork)
		}
	}
	require.Fail(t, "nothing became due")
	return nil
}

func (n *node) takeWith(t *testing.T, o *pgwake.FetchOptions) *pgwake.ClaimedWorkItem {
	t.Helper()
	item, err := n.FetchWorkItem(t.Context(), o)
	require.NoError(t, err)
	require.NotNil(t, item)
	return item
}

// requireNoWork asserts that no item is due.
func (n *node) requireNoWork(t *testing.T) {
	t.Helper()
	n.requireNoWorkWith(t, now)
}

func (n *node) requireNoWorkWith(t *testing.T, o *pgwake.FetchOptions) {
	t.Helper()
	item, err := n.FetchWorkItem(t.Context(), o)
	require.ErrorIs(t, err, pgwake.ErrNoWork, "%+v", item)
	require.Nil(t, item)
}

// ack finishes an item without a completion.
func (n *node) ack(t *testing.T, item *pgwake.ClaimedWorkItem) {
	t.Helper()
	require.NoError(t, n.AckWorkItem(t.Context(), item.LockToken, nil))
}

// drain takes and finishes every item that is due, and returns their names in order.
func (n *node) drain(t *testing.T) (names []string) {
	t.Helper()
	for {
		item, err := n.FetchWorkItem(t.Context(), now)
		if errors.Is(err, pgwake.ErrNoWork) {
			return names
		}
		require.NoError(t, err)
		n.ack(t, item)
		names = append(names, item.Name)
	}
}

// Turns.

// send adds messages of these kinds for an instance, due at once, in one call each.
func (n *node) send(t *testing.T, instance string, kinds ...pgwake.MessageKind) {
	t.Helper()
	for _, kind := range kinds {
		n.sendWith(t, pgwake.Message{Instance: instance, Kind: kind}, nil)
	}
}

func (n *node) sendWith(t *testing.T, m pgwake.Message, o *pgwake.EnqueueOptions) pgwake.Enqueued {
	t.Helper()
	added, err := n.EnqueueForOrchestrator(t.Context(), m, o)
	require.NoError(t, err)
	return added
}

// startMessage opens the first execution of an instance of orchestration "flow".
func startMessage(instance string) pgwake.Message {
	return pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "flow", Version: "1.0.0", ExecutionID: 1}
}

// takeTurn fetches a turn that must be due, with a lease that outlives the row.
func (n *node) takeTurn(t *testing.T) *pgwake.OrchestrationItem {
	t.Helper()
	return n.takeTurnWith(t, now)
}

// awaitTurn is await for turns.
func (n *node) awaitTurn(t *testing.T) *pgwake.OrchestrationItem {
	t.Helper()
	for begun := time.Now(); time.Since(begun) < patience; {
		for _, o := range []*pgwake.FetchOptions{now, shortly} {
			turn, err := n.FetchOrchestrationItem(t.Context(), o)
			if err == nil {
				return turn
			}
			require.ErrorIs(t, err, pgwake.ErrNoWork)
		}
	}
	require.Fail(t, "nothing became due")
	return nil
}

func (n *node) takeTurnWith(t *testing.T, o *pgwake.FetchOptions) *pgwake.OrchestrationItem {
	t.Helper()
	turn, err := n.FetchOrchestrationItem(t.Context(), o)
	require.NoError(t, err)
	require.NotNil(t, turn)
	return turn
}

// takeTurnOf is takeTurn for a turn that must be of this instance.
func (n *node) takeTurnOf(t *testing.T, instance string) *pgwake.OrchestrationItem {
	t.Helper()
	turn := n.takeTurn(t)
	require.Equal(t, instance, turn.Instance)
	return turn
}

// requireNoTurn asserts that no instance has a turn due.
func (n *node) requireNoTurn(t *testing.T) {
	t.Helper()
	n.requireNoTurnWith(t, now)
}

func (n *node) requireNoTurnWith(t *testing.T, o *pgwake.FetchOptions) {
	t.Helper()
	turn, err := n.FetchOrchestrationItem(t.Context(), o)
	require.ErrorIs(t, err, pgwake.ErrNoWork, "%+v", turn)
	require.Nil(t, turn)
}

func (n *node) ackTurn(t *testing.T, turn *pgwake.OrchestrationItem, ack pgwake.OrchestrationAck) {
	t.Helper()
	require.NoError(t, n.AckOrchestrationItem(t.Context(), turn.LockToken, ack))
}

// running is the metadata of an instance as start makes it.
var running = pgwake.Metadata{Name: "flow", Version: "1.0.0", Status: pgwake.StatusRunning}

// start makes instances: for each a start message and the ack of its first turn, which leaves it Running in
// execution 1 with the event 1.
func (n *node) start(t *testing.T, instances ...string) {
	t.Helper()
	for _, instance := range instances {
		n.startWith(t, instance, pgwake.OrchestrationAck{History: events(1), Metadata: running})
	}
}

// startWith makes an instance by a start message and this ack of its first turn. Nothing else may be due.
func (n *node) startWith(t *testing.T, instance string, ack pgwake.OrchestrationAck) {
	t.Helper()
	n.sendWith(t, startMessage(instance), nil)
	n.ackTurn(t, n.takeTurnOf(t, instance), ack)
}

// turn has an instance take a turn, for a message of kind "poke", and acks it. Nothing else may be due.
func (n *node) turn(t *testing.T, instance string, ack pgwake.OrchestrationAck) {
	t.Helper()
	n.send(t, instance, "poke")
	n.ackTurn(t, n.takeTurnOf(t, instance), ack)
}

// end ends the execution of an instance in a turn of its own. Nothing else may be due.
func (n *node) end(t *testing.T, instance string, execution int64, status pgwake.Status, output string) {
	t.Helper()
	n.turn(t, instance, pgwake.OrchestrationAck{ExecutionID: execution, Metadata: pgwake.Metadata{Status: status, Output: output}})
}

// continueAsNew ends the current execution of an instance, in a turn of its own, and begins the next, whose first
// turn is acked with the event 1 and stays Running. Nothing else may be due.
func (n *node) continueAsNew(t *testing.T, instance string, next int64) {
	t.Helper()
	n.endForNext(t, instance, next)
	n.beginNext(t, instance, next)
}

// endForNext is the first half of continueAsNew: afterwards the message that begins the next execution is due.
func (n *node) endForNext(t *testing.T, instance string, next int64) {
	t.Helper()
	n.turn(t, instance, pgwake.OrchestrationAck{
		ExecutionID: next - 1,
		Messages: []pgwake.MessageEnqueue{{Message: pgwake.Message{
			Instance: instance, Kind: pgwake.MessageContinueAsNew, Name: "flow", Version: "1.0.0", ExecutionID: next}}},
		Metadata: pgwake.Metadata{Status: pgwake.StatusContinuedAsNew},
	})
}

// beginNext is the second half.
func (n *node) beginNext(t *testing.T, instance string, next int64) {
	t.Helper()
	n.ackTurn(t, n.takeTurnOf(t, instance), pgwake.OrchestrationAck{ExecutionID: next, History: events(1), Metadata: running})
}

// requireUnknown asserts that there is no such instance.
func (n *node) requireUnknown(t *testing.T, instance string) {
	t.Helper()
	info, err := n.GetInstanceInfo(t.Context(), instance)
	requirePermanent(t, err, pgwake.ErrNotFound)
	require.Nil(t, info)
}

// activities are work items named "activity 1" and so on, with these ids, of the first execution of an instance.
func activities(instance string, ids ...int64) []pgwake.WorkEnqueue {
	all := make([]pgwake.WorkEnqueue, len(ids))
	for i, id := range ids {
		all[i].WorkItem = pgwake.WorkItem{Name: fmt.Sprintf("activity %d", id), Instance: instance, ExecutionID: 1, ActivityID: id}
	}
	return all
}

// kinds returns the kinds of a turn's messages, in their order.
func kinds(turn *pgwake.OrchestrationItem) []pgwake.MessageKind {
	all := make([]pgwake.MessageKind, len(turn.Messages))
	for i, m := range turn.Messages {
		all[i] = m.Kind
	}
	return all
}

// History.

// events returns events with these ids, each with its id as data.
func events(ids ...int64) []pgwake.Event {
	all := make([]pgwake.Event, len(ids))
	for i, id := range ids {
		all[i] = pgwake.Event{ID: id, Type: "happened", Data: json.RawMessage(fmt.Sprint(id))}
	}
	return all
}

// requireHistory asserts that the history consists of these events, the time of storing apart.
func requireHistory(t *testing.T, want, got []pgwake.Event) {
	t.Helper()
	got = slices.Clone(got)
	for i := range got {
		require.False(t, got[i].CreatedAt.IsZero())
		got[i].CreatedAt = time.Time{}
	}
	if len(want) == 0 {
		require.Empty(t, got)
		return
	}
	require.Equal(t, want, got)
}

// requireHistoryOf asserts what the history of the instance's current execution is.
func (n *node) requireHistoryOf(t *testing.T, instance string, want []pgwake.Event) {
	t.Helper()
	got, err := n.ReadHistory(t.Context(), instance)
	require.NoError(t, err)
	requireHistory(t, want, got)
}

// Errors.

// requirePermanent asserts that err is an *Error with this cause, one that the same call would meet again.
func requirePermanent(t *testing.T, err, cause error) {
	t.Helper()
	require.ErrorIs(t, err, cause)
	var typed *pgwake.Error
	require.ErrorAs(t, err, &typed)
	require.NotEmpty(t, typed.Op)
	require.False(t, typed.Retryable, "%v", err)
}

// Time. Instants are compared by the server's clock alone, so that a machine that stalls fails no row: what must not
// happen before the end of a lease is not looked for before, but was not done before when it is found.

// claimedAt is the server's instant of a claim with a lease that outlives the row.
func claimedAt(lockedUntil time.Time) time.Time { return lockedUntil.Add(-lease) }

// requireNotBefore asserts that an instant of the server's clock is not before another.
func requireNotBefore(t *testing.T, limit, got time.Time) {
	t.Helper()
	require.False(t, got.Before(limit), "%v before %v", limit.Sub(got), limit)
}

// clock is an instant of the server's clock, between the call and its return. It stays behind in a queue that the row
// does not look at: in that of messages if it looks at the one of work, and the other way round.
func (n *node) clock(t *testing.T, looksAt pgwake.Queue) time.Time {
	t.Helper()
	return n.add(t, other(looksAt), "clock", pgwake.EnqueueOptions{Namespace: clockNamespace}).DueAt
}

// clockNamespace is used by no row.
const clockNamespace = "providertest-clock"

// passed waits until the server's clock has passed an instant: by fetching an item that is due then, in a namespace
// that no row uses.
func (n *node) passed(t *testing.T, instant time.Time) {
	t.Helper()
	n.enqueueWith(t, pgwake.WorkItem{Name: "instant"}, &pgwake.EnqueueOptions{Namespace: clockNamespace, At: instant.Add(time.Millisecond)})
	n.ack(t, n.takeWith(t, &pgwake.FetchOptions{LockTimeout: lease, PollTimeout: patience, Namespaces: []string{clockNamespace}}))
}

// within asserts that f ends within limit in one of a few tries: a machine may stall in the others.
func within(t *testing.T, limit time.Duration, f func()) {
	t.Helper()
	const tries = 5
	var took [tries]time.Duration
	for i := range took {
		begun := time.Now()
		f()
		if took[i] = time.Since(begun); took[i] <= limit {
			return
		}
	}
	require.Failf(t, "too slow", "took %v in %d tries, more than %v", took, tries, limit)
}

// awaitRetaken waits until the turn can be had again, and asserts that this is not before its lease has ended, and
// under another token.
func (n *node) awaitRetaken(t *testing.T, turn *pgwake.OrchestrationItem) *pgwake.OrchestrationItem {
	t.Helper()
	again := n.awaitTurn(t)
	require.Equal(t, turn.Instance, again.Instance)
	requireNotBefore(t, turn.LockedUntil, claimedAt(again.LockedUntil))
	require.NotEqual(t, turn.LockToken, again.LockToken)
	return again
}

// awaitWorkRetaken is awaitRetaken for a work item.
func (n *node) awaitWorkRetaken(t *testing.T, item *pgwake.ClaimedWorkItem) *pgwake.ClaimedWorkItem {
	t.Helper()
	again := n.await(t)
	require.Equal(t, item.ID, again.ID)
	requireNotBefore(t, item.LockedUntil, claimedAt(again.LockedUntil))
	require.NotEqual(t, item.LockToken, again.LockToken)
	return again
}

// Concurrency.

// together calls f(0) to f(count-1) at the same time, as far as that is possible, and returns when all have.
func together(count int, f func(i int)) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	for i := range count {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			f(i)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}
