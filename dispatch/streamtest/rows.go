package streamtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what does an EventStream do?

func handledOnce(t *testing.T, n *node) {
	l := newLedger()
	items := make(chan *pgwake.ClaimedWorkItem, 1)
	_, stop := serve(t, n.EventStream, dispatch.Config{}, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		if item.Name == "special" {
			items <- item
		}
		return l.handle(ctx, item)
	})
	headers := map[string]string{"trace": "ä=1"}
	require.NoError(t, n.Publish(t.Context(), mainName, dispatch.StreamMessage{Name: "special", Payload: []byte(`{"n":1}`), Headers: headers}))
	item := <-items
	require.Equal(t, mainName, item.Namespace)
	require.JSONEq(t, `{"n":1}`, string(item.Input))
	require.Equal(t, headers, item.Headers)
	require.Equal(t, 1, item.Attempt)
	require.WithinDuration(t, time.Now(), item.EnqueuedAt, time.Minute)
	names := numbered(50)
	n.publish(t, mainName, names...)
	n.publish(t, "second", names...)
	want := 2*len(names) + 1
	require.Eventually(t, func() bool { return l.names() == want }, patience, time.Millisecond)
	stop()
	require.Equal(t, want, l.total())
	n.none(t, mainName, soon)
	n.none(t, "second", soon)
}

func delayed(t *testing.T, n *node) {
	const delay = 700 * time.Millisecond
	begun := time.Now()
	require.NoError(t, n.Publish(t.Context(), mainName,
		dispatch.StreamMessage{Name: "later", Payload: []byte(`{}`), Delay: delay}, dispatch.StreamMessage{Name: "now", Payload: []byte(`{}`)}))
	first := n.one(t, lasting)
	require.Equal(t, "now", first.Name)
	second := n.one(t, lasting) // parked: nobody tells it but the clock
	require.Equal(t, "later", second.Name)
	require.GreaterOrEqual(t, time.Since(begun), delay)
	require.Equal(t, 1, second.Attempt)
	n.ack(t, first)
	n.ack(t, second)
}

func compete(t *testing.T, n *node) {
	l := newLedger()
	var begun sync.WaitGroup // by both
	begun.Add(2)
	n.publish(t, mainName, numbered(60)...)
	for _, s := range []dispatch.EventStream{n.EventStream, n.another(t)} {
		first := sync.OnceFunc(func() {
			begun.Done()
			begun.Wait()
		})
		c, _ := serve(t, s, dispatch.Config{Concurrency: 1, Ahead: dispatch.NotAhead}, func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			first()
			return l.handle(ctx, item)
		})
		require.NoError(t, c.Spawn(mainName))
	}
	require.Eventually(t, func() bool { return l.names() == 60 }, patience, time.Millisecond)
	require.Equal(t, 60, l.total())
}

// What was claimed when the context ended is in somebody's hand, or can be claimed at once: no lease ends here.
func cancelled(t *testing.T, n *node) {
	names := numbered(100)
	n.publish(t, mainName, names...)
	seen := make(map[string]bool)
	deadline := time.Now().Add(patience)
	longest := 20 * time.Millisecond
	for len(seen) < len(names) {
		require.True(t, time.Now().Before(deadline), "%d of %d came", len(seen), len(names))
		ctx, cancel := context.WithTimeout(t.Context(), rand.N(longest))
		got, err := n.Receive(ctx, mainName, 7, lasting)
		cancel()
		if err != nil {
			require.Empty(t, got)
			require.Error(t, ctx.Err())
			longest += 2 * time.Millisecond // a claim may take longer than that here
			continue
		}
		for _, d := range got {
			seen[d.Name] = true
			n.ack(t, d)
		}
	}
	n.none(t, mainName, soon)
}

func atMost(t *testing.T, n *node) {
	n.publish(t, mainName, numbered(10)...)
	other := &node{EventStream: n.another(t), Factory: n.Factory}
	seen := make(map[string]bool)
	for i := range 10 {
		from := []*node{n, other}[i%2]
		d := from.one(t, lasting)
		require.False(t, seen[d.Name])
		seen[d.Name] = true
		defer from.ack(t, d)
	}
}

func nackedLater(t *testing.T, n *node) {
	n.publish(t, mainName, "x")
	first := n.one(t, lasting)
	const delay = 600 * time.Millisecond
	begun := time.Now()
	require.NoError(t, n.Nack(t.Context(), first.Receipt, pgwake.AbandonOptions{Delay: delay, Error: "no luck"}))
	n.lost(t, first)
	second := n.one(t, lasting)
	require.GreaterOrEqual(t, time.Since(begun), delay)
	require.Equal(t, 2, second.Attempt)
	require.Equal(t, "x", second.Name)
	require.JSONEq(t, `{}`, string(second.Payload))
	require.Contains(t, []string{"no luck", ""}, second.LastError)
	n.lost(t, first)
	require.NoError(t, n.Nack(t.Context(), second.Receipt, pgwake.AbandonOptions{}))
	third := n.one(t, lasting)
	require.Equal(t, 3, third.Attempt)
	n.lost(t, second)
	n.ack(t, third)
	n.lost(t, third)
	n.none(t, mainName, soon)
}

func nackedFree(t *testing.T, n *node) {
	n.publish(t, mainName, "x")
	for range 3 {
		d := n.one(t, lasting)
		require.Equal(t, 1, d.Attempt)
		require.NoError(t, n.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{IgnoreAttempt: true}))
		n.lost(t, d)
	}
}

func leaseEnds(t *testing.T, n *node) {
	n.publish(t, mainName, "x")
	begun := time.Now()
	first := n.one(t, n.Lease)
	require.WithinRange(t, first.LeasedUntil, begun, time.Now().Add(n.Lease))
	second := n.one(t, lasting)
	require.False(t, time.Now().Before(first.LeasedUntil), "it was taken from somebody who had it")
	require.Equal(t, "x", second.Name)
	require.Equal(t, 2, second.Attempt)
	n.lost(t, first)
	n.ack(t, second)
	n.none(t, mainName, soon)
}

func extended(t *testing.T, n *node) {
	e, ok := n.EventStream.(dispatch.LeaseExtender)
	if !ok {
		t.Skip("the stream does not extend leases")
	}
	n.publish(t, mainName, "x")
	d := n.one(t, n.Lease)
	require.NoError(t, e.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, lasting))
	n.none(t, mainName, 2*n.Lease)
	require.NoError(t, e.Extend(t.Context(), []pgwake.LockToken{d.Receipt}, n.Lease))
	again := n.one(t, lasting)
	require.Equal(t, 2, again.Attempt)
	n.lost(t, d)
	n.ack(t, again)
}

// All are given back in the same moment, and long before their leases would have them come again.
func failAtOnce(t *testing.T, n *node) {
	const count = 20
	l := newLedger()
	var begun sync.WaitGroup
	begun.Add(count)
	retried := make(chan string, count)
	n.publish(t, mainName, numbered(count)...)
	c, stop := serve(t, n.EventStream, dispatch.Config{Concurrency: count, LockTimeout: lasting, Retry: dispatch.Backoff(time.Millisecond, time.Millisecond)},
		func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			if l.add(item.Name) == 1 {
				begun.Done()
				begun.Wait()
				return nil, errors.New("not now")
			}
			retried <- item.Name
			return nil, nil
		})
	require.NoError(t, c.Spawn(mainName))
	late := time.After(patience)
	for i := range count {
		select {
		case <-retried:
		case <-late:
			require.Fail(t, "not retried", "%d of %d were", i, count)
		}
	}
	stop()
	require.Equal(t, 2*count, l.total())
	n.none(t, mainName, soon)
}

func deadLetter(t *testing.T, n *node) {
	if n.DeadLetters == nil {
		t.Skip("the Factory does not tell dead letters")
	}
	l := newLedger()
	_, stop := serve(t, n.EventStream, dispatch.Config{MaxAttempts: 2, Retry: dispatch.Backoff(time.Millisecond, time.Millisecond)},
		func(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
			if l.add(item.Name); item.Name == "permanent" {
				return nil, dispatch.Permanent(errors.New("never"))
			}
			return nil, errors.New("not now")
		})
	n.publish(t, mainName, "permanent", "poison")
	require.Eventually(t, func() bool { return len(n.DeadLetters(t, n.EventStream, mainName)) == 2 }, patience, 10*time.Millisecond)
	require.ElementsMatch(t, []string{"permanent", "poison"}, n.DeadLetters(t, n.EventStream, mainName))
	require.Equal(t, 3, l.total())
	stop()
	n.none(t, mainName, soon)
}

// The fastest of several tells pushed from polled, on a machine that stalls now and then. On one that is slow all the time a few calls take as long.
func newNamespace(t *testing.T, n *node) {
	handled := make(chan time.Time, 1)
	c, _ := serve(t, n.EventStream, dispatch.Config{}, func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		handled <- time.Now()
		return nil, nil
	})
	var took []time.Duration
	for i := range 5 {
		namespace := fmt.Sprintf("tenant%d", i)
		begun := time.Now()
		n.publish(t, namespace, "x")
		published := time.Now()
		select {
		case at := <-handled:
			took = append(took, at.Sub(published)-5*published.Sub(begun))
		case <-time.After(patience):
			require.Fail(t, "not served", namespace)
		}
		require.True(t, slices.ContainsFunc(c.Namespaces(), func(s dispatch.NamespaceStats) bool { return s.Namespace == namespace }))
	}
	require.Less(t, slices.Min(took), 100*time.Millisecond, "%v", took)
}

func knownNamespaces(t *testing.T, n *node) {
	n.publish(t, "a", "x")
	n.publish(t, "b", "x")
	bounded, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var known []string
	for !slices.Contains(known, "a") || !slices.Contains(known, "b") {
		added, err := n.WaitForNamespaces(bounded, known)
		require.NoError(t, err)
		require.NotEmpty(t, added)
		for _, name := range added {
			require.NotContains(t, known, name)
			known = append(known, name)
		}
	}
	added := make(chan []string, 1)
	go func() {
		names, err := n.WaitForNamespaces(bounded, known)
		if err != nil {
			t.Errorf("wait: %v", err)
		}
		added <- names
	}()
	n.publish(t, "c", "x")
	require.Equal(t, []string{"c"}, <-added)
	short, end := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer end()
	_, err := n.WaitForNamespaces(short, append(known, "c"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func endOfRun(t *testing.T, n *node) {
	n.publish(t, mainName, numbered(20)...)
	begun := make(chan struct{}, 20)
	c, stop := serve(t, n.EventStream, dispatch.Config{Concurrency: 4, StopTimeout: time.Millisecond}, func(ctx context.Context, _ *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		begun <- struct{}{}
		<-ctx.Done()
		return nil, context.Cause(ctx)
	})
	require.NoError(t, c.Spawn(mainName))
	for range 4 {
		<-begun
	}
	stop()
	seen := make(map[string]bool)
	for len(seen) < 20 {
		d := n.one(t, lasting)
		require.False(t, seen[d.Name])
		seen[d.Name] = true
		defer n.ack(t, d)
	}
}

func lostWhileParked(t *testing.T, n *node) {
	if n.Break == nil {
		t.Skip("the Factory does not break connections")
	}
	n.publish(t, mainName, "before")
	n.ack(t, n.one(t, lasting))
	bounded, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for round := range 3 {
		got := make(chan string, 1)
		go func() {
			for {
				all, err := n.Receive(bounded, mainName, 1, lasting)
				if err == nil {
					err = insist(bounded, func() error { return n.Ack(bounded, []pgwake.LockToken{all[0].Receipt}) })
					if some := (*pgwake.LostLocksError)(nil); errors.As(err, &some) {
						continue // it comes again
					}
					got <- all[0].Name
					return
				}
				if bounded.Err() != nil {
					t.Errorf("receive: %v", err)
					got <- ""
					return
				}
			}
		}()
		n.Break(t, n.EventStream)
		name := fmt.Sprint(round)
		message := dispatch.StreamMessage{Name: name, Payload: []byte(`{}`)}
		require.NoError(t, insist(bounded, func() error { return n.Publish(bounded, mainName, message) }))
		require.Equal(t, name, <-got)
	}
}

func lostAtWork(t *testing.T, n *node) {
	if n.Break == nil {
		t.Skip("the Factory does not break connections")
	}
	l := newLedger()
	_, _ = serve(t, n.EventStream, dispatch.Config{LockTimeout: max(n.Lease, time.Second), Retry: dispatch.Backoff(time.Millisecond, time.Millisecond)}, l.handle)
	bounded, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	for i := range 100 {
		message := dispatch.StreamMessage{Name: fmt.Sprint(i), Payload: []byte(`{}`)}
		require.NoError(t, insist(bounded, func() error { return n.Publish(bounded, mainName, message) }))
		if i%30 == 20 {
			n.Break(t, n.EventStream)
		}
	}
	require.Eventually(t, func() bool { return l.names() == 100 }, patience, time.Millisecond)
}
