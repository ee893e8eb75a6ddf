package dispatch_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of that which is kept for an owner, which all namespaces of a process share?

// owned serves everything as owner "me", and keeps sessions, and instances, for an hour.
func owned(l *ledger, retireAfter time.Duration) dispatch.Group {
	return dispatch.Group{
		Namespaces: []string{"*"}, RetireAfter: retireAfter, Handlers: l.register,
		Config: dispatch.Config{Session: &pgwake.SessionOptions{Owner: "me", LockTimeout: time.Hour}},
		Turns:  dispatch.OrchestratorConfig{Owner: "me", Sticky: time.Hour},
		Decider: func(_ context.Context, turn *pgwake.OrchestrationItem) (ack pgwake.OrchestrationAck, err error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.seen[turn.Namespace+"/"+turn.Instance]++
			return ack, nil
		},
	}
}

// bind adds an item of a session of the namespace, and a message of its instance.
func bind(t *testing.T, p *pgwake.Provider, namespace string) {
	t.Helper()
	in := &pgwake.EnqueueOptions{Namespace: namespace}
	_, err := p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "x", Session: namespace}, in)
	require.NoError(t, err)
	_, err = p.EnqueueForOrchestrator(t.Context(), pgwake.Message{Instance: namespace, Kind: pgwake.MessageStart, Name: "flow"}, in)
	require.NoError(t, err)
}

// bound has a namespace's session, and its instance, kept for the owner.
func bound(t *testing.T, p *pgwake.Provider, l *ledger, namespace string) {
	t.Helper()
	before, turns := l.count(namespace+"/x"), l.count(namespace+"/"+namespace)
	bind(t, p, namespace)
	require.Eventually(t, func() bool {
		return l.count(namespace+"/x") > before && l.count(namespace+"/"+namespace) > turns
	}, patience, 10*time.Millisecond)
	awaitEmpty(t, p)
}

// othersHave reports whether another owner is given what is due of the namespace's session and of its instance, and gives it back.
func othersHave(t *testing.T, p *pgwake.Provider, namespace string) (work, turn bool) {
	t.Helper()
	in := []string{namespace}
	item, err := p.FetchWorkItem(t.Context(), &pgwake.FetchOptions{Namespaces: in, NoWait: true, Session: &pgwake.SessionOptions{Owner: "another"}})
	if work = err == nil; work {
		require.NoError(t, p.AbandonWorkItem(t.Context(), item.LockToken, nil))
	} else {
		require.ErrorIs(t, err, pgwake.ErrNoWork)
	}
	o, err := p.FetchOrchestrationItem(t.Context(), &pgwake.FetchOptions{Namespaces: in, NoWait: true, Owner: "another"})
	if turn = err == nil; turn {
		require.NoError(t, p.AbandonOrchestrationItem(t.Context(), o.LockToken, nil))
	} else {
		require.ErrorIs(t, err, pgwake.ErrNoWork)
	}
	return work, turn
}

// awaitOthersHave waits until they do: a query for work that was on its way when its dispatcher ended may have claimed what came
// after, and gives it back.
func awaitOthersHave(t *testing.T, p *pgwake.Provider, namespace string) {
	t.Helper()
	require.Eventually(t, func() bool {
		work, turn := othersHave(t, p, namespace)
		return work && turn
	}, patience, 10*time.Millisecond)
}

// Nobody is at work any more who could say goodbye.
func TestCoordinators_EndWhileAllIsIdle_OthersHaveWhatWasKeptForTheOwner(t *testing.T) {
	one, other := beside(t)
	l := newLedger()
	c := dispatch.NewCoordinators(one, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{owned(l, 20*time.Millisecond)}})
	stop := running(t, c)
	bound(t, one, l, "a")
	require.Eventually(t, func() bool { return c.Stats().Working == 0 }, patience, 10*time.Millisecond)
	require.NoError(t, stop())
	bind(t, other, "a")
	awaitOthersHave(t, other, "a")
}

// What retires, or cannot be served any more, is one namespace of many.
func TestCoordinators_OneNamespaceEnds_TheOwnerKeepsWhatItHasInOthers(t *testing.T) {
	one, other := beside(t)
	p := &barred{Provider: one, namespace: "bad"}
	p.open.Store(true)
	l := newLedger()
	c := dispatch.NewCoordinators(p, &dispatch.CoordinatorsConfig{Groups: []dispatch.Group{owned(l, dispatch.Never)}})
	stop := running(t, c)
	for _, namespace := range []string{"a", "bad", "b"} {
		bound(t, one, l, namespace)
	}
	served(t, c, "a")
	c.Retire("a")
	p.open.Store(false)
	enqueueIn(t, one, "bad", "last") // after which the Dispatcher asks again, in vain
	require.Eventually(t, func() bool { return p.refused.Load() >= 2 }, patience, 10*time.Millisecond)

	c.Retire("b") // so that what comes next is not taken here
	for _, namespace := range []string{"a", "b"} {
		bind(t, other, namespace)
		work, turn := othersHave(t, other, namespace)
		require.False(t, work, "the session of %s is the owner's", namespace)
		require.False(t, turn, "the instance of %s is the owner's", namespace)
	}
	require.NoError(t, stop())
	for _, namespace := range []string{"a", "b"} {
		awaitOthersHave(t, other, namespace)
	}
}
