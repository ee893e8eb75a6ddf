// Package streamtest is the contract of a dispatch.EventStream as a suite of tests: what any queue does that Coordinators are to
// serve, one subtest a behaviour.
//
//	func TestStream(t *testing.T) {
//		streamtest.Run(t, streamtest.Factory{New: func(tb testing.TB) dispatch.EventStream { return open(tb) }})
//	}
//
// Behaviours for which the Factory does not offer what they need are skipped, and say so.
package streamtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// This file answers: what is tested, and what has whoever wants it tested to provide?

// Factory makes what the suite needs. Only New is required. All are called from several tests at once.
type Factory struct {
	// New returns a stream without any messages. The Factory disposes of it when the test ends.
	New func(testing.TB) dispatch.EventStream

	// Another returns one more stream on the messages of s: another process. Nil: s itself.
	Another func(tb testing.TB, s dispatch.EventStream) dispatch.EventStream

	// Break cuts the connections that the stream has at this moment. Nil skips what needs it.
	Break func(tb testing.TB, s dispatch.EventStream)

	// DeadLetters returns the names of the dead letters of a namespace. Nil skips what needs it.
	DeadLetters func(tb testing.TB, s dispatch.EventStream, namespace string) []string

	// Lease is the length of the leases that rows wait to see end. Defaults to 1 s.
	Lease time.Duration
}

// Run puts the streams of the Factory through every behaviour, in parallel, each on a stream of its own. It returns when all have
// ended.
func Run(t *testing.T, f Factory) {
	t.Helper()
	if f.New == nil {
		t.Fatal("streamtest: Factory.New is nil")
	}
	if f.Lease == 0 {
		f.Lease = time.Second
	}
	t.Run("stream", func(t *testing.T) {
		for _, r := range rows {
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				r.test(t, &node{EventStream: f.New(t), Factory: f})
			})
		}
	})
}

// row is one behaviour.
type row struct {
	name string
	test func(*testing.T, *node)
}

var rows = []row{
	{"Publish_AMessage_IsHandledOnceAndAcknowledged", handledOnce},
	{"Publish_WithDelay_IsNotDueBefore", delayed},
	{"Receive_TwoProcesses_Compete", compete},
	{"Receive_ContextEnds_StrandsNothing", cancelled},
	{"Receive_AtMost_LeavesTheRestToOthers", atMost},
	{"Nack_WithDelay_IsDueThen", nackedLater},
	{"Nack_IgnoreAttempt_DoesNotCount", nackedFree},
	{"Lease_Ends_IsRedelivered", leaseEnds},
	{"Lease_IsExtended_Holds", extended},
	{"Handlers_FailAtOnce_AreRetriedAfterTheirDelays", failAtOnce},
	{"DeadLetter_AfterTheLastAttempt_IsPutAside", deadLetter},
	{"Namespace_New_IsServedAtOnce", newNamespace},
	{"Namespace_Known_IsNotTold", knownNamespaces},
	{"End_OfRun_GivesBackWhatIsInHand", endOfRun},
	{"Connection_LostWhileParked_TheNextMessageComes", lostWhileParked},
	{"Connection_LostAtWork_LosesNothing", lostAtWork},
}

const (
	patience = 20 * time.Second
	lasting  = 5 * time.Minute // a lease that is not to end
	soon     = 500 * time.Millisecond
	mainName = "first" // of the namespace that most rows use
)

type node struct {
	dispatch.EventStream
	Factory
}

func (n *node) another(t *testing.T) dispatch.EventStream {
	if n.Another == nil {
		return n.EventStream
	}
	return n.Another(t, n.EventStream)
}

func (n *node) publish(t *testing.T, namespace string, names ...string) {
	t.Helper()
	all := make([]dispatch.StreamMessage, len(names))
	for i, name := range names {
		all[i] = dispatch.StreamMessage{Name: name, Payload: []byte(`{}`)}
	}
	require.NoError(t, n.Publish(t.Context(), namespace, all...))
}

// one receives a single message.
func (n *node) one(t *testing.T, lease time.Duration) dispatch.StreamDelivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := n.Receive(ctx, mainName, 1, lease)
	require.NoError(t, err)
	require.Len(t, got, 1)
	return got[0]
}

// none makes sure that nothing is due.
func (n *node) none(t *testing.T, namespace string, within time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	got, err := n.Receive(ctx, namespace, pgwake.MaxFetch, lasting)
	require.ErrorIs(t, err, context.DeadlineExceeded, "%v", got)
	require.Empty(t, got)
}

func (n *node) ack(t *testing.T, d dispatch.StreamDelivery) {
	t.Helper()
	require.NoError(t, n.Ack(t.Context(), []pgwake.LockToken{d.Receipt}))
}

// lost makes sure that a receipt can do nothing.
func (n *node) lost(t *testing.T, d dispatch.StreamDelivery) {
	t.Helper()
	some := (*pgwake.LostLocksError)(nil)
	tokens := []pgwake.LockToken{d.Receipt}
	require.ErrorAs(t, n.Ack(t.Context(), tokens), &some)
	require.Equal(t, tokens, some.Tokens)
	require.ErrorIs(t, n.Nack(t.Context(), d.Receipt, pgwake.AbandonOptions{}), pgwake.ErrLockLost)
	if e, ok := n.EventStream.(dispatch.LeaseExtender); ok {
		some = nil
		require.ErrorAs(t, e.Extend(t.Context(), tokens, lasting), &some)
		require.Equal(t, tokens, some.Tokens)
	}
	if l, ok := n.EventStream.(dispatch.DeadLetterer); ok {
		require.ErrorIs(t, l.DeadLetter(t.Context(), d.Receipt, "reason", "cause"), pgwake.ErrLockLost)
	}
}

// serve runs Coordinators on a stream until the test ends, or stop is called.
func serve(t *testing.T, s dispatch.EventStream, config dispatch.Config, handle dispatch.Handler) (c *dispatch.Coordinators, stop func()) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	config.Logger = quiet
	c = dispatch.NewCoordinators(dispatch.StreamSource(s, nil), &dispatch.CoordinatorsConfig{
		Groups: []dispatch.Group{{Namespaces: []string{"*"}, Config: config, Handlers: func(d *dispatch.Dispatcher) { d.HandleOthers(handle) }}},
		Logger: quiet,
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return c, stop
}

// ledger counts what was handled.
type ledger struct {
	mu   sync.Mutex
	seen map[string]int
}

func newLedger() *ledger { return &ledger{seen: make(map[string]int)} }

func (l *ledger) add(name string) (times int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[name]++
	return l.seen[name]
}

func (l *ledger) names() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.seen)
}

func (l *ledger) total() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, times := range l.seen {
		n += times
	}
	return n
}

func (l *ledger) handle(_ context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
	l.add(item.Namespace + "/" + item.Name)
	return nil, nil
}

func numbered(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("m%d", i)
	}
	return names
}

// insist makes a call until it succeeds, or says that a receipt is lost.
func insist(ctx context.Context, call func() error) error {
	for {
		err := call()
		if err == nil || ctx.Err() != nil || errors.Is(err, pgwake.ErrLockLost) {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}
