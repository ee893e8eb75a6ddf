package pgwaketest

import (
	"cmp"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how does a test work off what is due?

// DrainOptions says what to work off, and how often to try. Nil means the zero value.
type DrainOptions struct {
	// Fetch limits what is fetched; its PollTimeout, NoWait and Ack do not count. Defaults to everything: work items
	// of all tags, and of the sessions that nobody holds; messages of all queue names and versions. The lease is an
	// hour. Unless it has an Owner, a turn that is sticky is fetched in the name of its owner, after all others, if
	// New or Open of this package made the Provider.
	Fetch *pgwake.FetchOptions

	// MaxAttempts is how many attempts the same work item has: the test fails when the last of them fails. One that the
	// handler itself gives back may come so often as well, and no oftener. For DrainTurns it is how often in a row turns
	// of the same instance may fail: the last of these failures fails the test. Defaults to 3.
	MaxAttempts int

	// MaxHandled is how many work items or turns are handled before the test fails: with a handler that goes on
	// enqueueing what is due there would be no end. Turns and items count alike. Defaults to 10,000.
	MaxHandled int
}

const (
	drainLease   = time.Hour // longer than any handler
	drainSession = "pgwaketest"
)

// Drain claims due work items one by one and handles them, until nothing is due, and returns how many were handled
// with success. What a handler enqueues is handled as well if it is due; what is due later is not waited for: see
// Advance. The item is acknowledged if the handler returns nil, unless the handler has done so itself, and given back
// at once if it returns an error. An item that fails at its attempt number MaxAttempts fails the test. The handler's
// context is that of the test.
func Drain(tb testing.TB, p *pgwake.Provider, handler func(context.Context, *pgwake.ClaimedWorkItem) error, o *DrainOptions) int {
	tb.Helper()
	ctx := tb.Context()
	fetch := o.fetch(pgwake.FetchOptions{Tags: pgwake.AnyTag(), Session: &pgwake.SessionOptions{Owner: drainSession}})
	attempts := make(map[int64]int)
	for handled := 0; ; {
		item, err := p.FetchWorkItem(ctx, fetch)
		if errors.Is(err, pgwake.ErrNoWork) {
			return handled
		}
		if err != nil {
			tb.Fatalf("drain: %v", err)
		}
		if handled == o.maxHandled() {
			tb.Fatalf("drain: after %d work items there is still one due, %s: a handler may enqueue without end; see DrainOptions.MaxHandled",
				handled, describeWork(item.WorkItem))
		}
		attempts[item.ID]++
		failure := handler(ctx, item)
		if failure == nil {
			err = p.AckWorkItem(ctx, item.LockToken, nil)
			handled++
		} else {
			err = p.AbandonWorkItem(ctx, item.LockToken, &pgwake.AbandonOptions{Error: failure.Error()})
		}
		if err != nil && !errors.Is(err, pgwake.ErrLockLost) { // the handler's own verb was first
			tb.Fatalf("drain: work item %d, %s: %v", item.ID, describeWork(item.WorkItem), err)
		}
		if n := attempts[item.ID]; failure != nil && n >= o.maxAttempts() || err != nil && n > o.maxAttempts() {
			tb.Fatalf("drain: work item %d, %s, failed %d times, the last time with: %v", item.ID, describeWork(item.WorkItem),
				n, cmp.Or(failure, err))
		}
	}
}

// DrainTurns is Drain for turns of instances: what the handler decides is what the turn is acknowledged with. A turn
// whose handler returns an error is given back at once, and an instance of which that happens MaxAttempts times in a row
// fails the test.
func DrainTurns(tb testing.TB, p *pgwake.Provider, handler func(context.Context, *pgwake.OrchestrationItem) (pgwake.OrchestrationAck, error), o *DrainOptions) int {
	tb.Helper()
	ctx := tb.Context()
	fetch := o.fetch(pgwake.FetchOptions{})
	failures := make(map[string]int)
	for handled := 0; ; {
		turn, err := fetchTurn(tb, p, fetch)
		if errors.Is(err, pgwake.ErrNoWork) {
			return handled
		}
		if err != nil {
			tb.Fatalf("drain turns: %v", err)
		}
		if handled == o.maxHandled() {
			tb.Fatalf("drain turns: after %d turns there is still one due, of instance %q: a handler may send messages without end; see DrainOptions.MaxHandled",
				handled, turn.Instance)
		}
		ack, failure := handler(ctx, turn)
		if failure == nil {
			err = p.AckOrchestrationItem(ctx, turn.LockToken, ack)
			handled++
		} else {
			err = p.AbandonOrchestrationItem(ctx, turn.LockToken, nil)
		}
		if err != nil && !errors.Is(err, pgwake.ErrLockLost) {
			tb.Fatalf("drain turns: instance %q: %v", turn.Instance, err)
		}
		if failure == nil {
			delete(failures, turn.Instance)
			continue
		}
		if failures[turn.Instance]++; failures[turn.Instance] >= o.maxAttempts() {
			tb.Fatalf("drain turns: instance %q failed %d times, the last time with: %v", turn.Instance,
				failures[turn.Instance], failure)
		}
	}
}

// fetchTurn fetches a turn that is anybody's or, if there is none and o has no owner, one that is sticky to somebody.
func fetchTurn(tb testing.TB, p *pgwake.Provider, o *pgwake.FetchOptions) (*pgwake.OrchestrationItem, error) {
	tb.Helper()
	turn, err := p.FetchOrchestrationItem(tb.Context(), o)
	if _, ours := schemas.Load(p); !ours || !errors.Is(err, pgwake.ErrNoWork) || o.Owner != "" {
		return turn, err
	}
	var owners []string
	if err := backstage(tb, p, func(ctx context.Context, conn *pgx.Conn) (err error) {
		rows, err := conn.Query(ctx, `SELECT DISTINCT sticky_owner FROM orchestrator_queue WHERE sticky_due <= clock_timestamp() ORDER BY 1`)
		if err == nil {
			owners, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		return err
	}); err != nil {
		return nil, err
	}
	for _, owner := range owners {
		o := *o
		o.Owner = owner
		if turn, err = p.FetchOrchestrationItem(tb.Context(), &o); !errors.Is(err, pgwake.ErrNoWork) {
			break
		}
	}
	return turn, err
}

// fetch returns what to fetch, by default everything.
func (o *DrainOptions) fetch(everything pgwake.FetchOptions) *pgwake.FetchOptions {
	f := everything
	if o != nil && o.Fetch != nil {
		f = *o.Fetch
	}
	f.NoWait, f.PollTimeout, f.Ack = true, 0, nil
	f.LockTimeout = cmp.Or(f.LockTimeout, drainLease)
	return &f
}

func (o *DrainOptions) maxHandled() int {
	if o == nil || o.MaxHandled == 0 {
		return 10_000
	}
	return o.MaxHandled
}

func (o *DrainOptions) maxAttempts() int {
	if o == nil || o.MaxAttempts == 0 {
		return 3
	}
	return o.MaxAttempts
}
