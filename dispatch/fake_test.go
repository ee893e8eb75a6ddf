package dispatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"go.opentelemetry.io/otel/trace"
)

// fake is a worker queue in memory, with leases, on the clock of the bubble.
type fake struct {
	mu    sync.Mutex
	items []*fakeItem
	next  int64
	news  chan struct{}

	fail     func(verb string) error // nil: none
	fetched  []int                   // how many each fetch asked for
	acked    []string                // names, in the order of the acks
	buried   map[string]string       // name to cause
	sent     []pgwake.Message
	sentFrom []trace.SpanContext // in whose trace
	renewed  int                 // statements

	as        claimedAs // how they are claimed
	limit     int       // how many may be at work; 0: any number
	ackedWith []int     // of fetches that acknowledge: how many each asked for

	calls    map[string]int // by verb
	sessions []string       // owners whose sessions were renewed
	released []string       // owners whose sessions were released

	leasedAtRelease int // items

	unanswered map[string]int // how many calls of a verb succeed, and seem to have failed

	noCauses bool // dead letters are refused that have one

	poisoned map[string]bool // names of items that no ack may be about
	unheld   bool            // nor any renewal

	locked map[string]bool // names of items that a transaction has locked: verbs wait for them, and renewals of several pass them by

	waiting, mostWaiting int // verbs that wait for what is locked

	hang bool          // renewals hang until their context ends
	late time.Duration // how long the answer to a renewal takes that has had its effect
	last bool          // leases end when they end: there are no renewals
	disk bool          // is gone: a flush hangs until its context ends
	slow time.Duration // what every verb but the fetch takes

	uploads map[string]time.Duration // by name: what an ack by itself takes to be sent, or the others of its statement as well

	stuck bool // items cannot be given back: that hangs until its context ends
}

type fakeItem struct {
	pgwake.ClaimedWorkItem
	visible time.Time
	claims  int
}

func newFake() *fake {
	return &fake{news: make(chan struct{}, 1), buried: map[string]string{}, calls: map[string]int{}, locked: map[string]bool{}}
}

// come has what is claimed from now on be of this namespace, found by this path.
func (f *fake) come(namespace string, path pgwake.Path) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.as = claimedAs{namespace, path}
}

func (f *fake) changed() {
	select {
	case f.news <- struct{}{}:
	default:
	}
}

func (f *fake) enqueue(names ...string) {
	for _, name := range names {
		f.add(pgwake.WorkItem{Name: name})
	}
}

func (f *fake) add(w pgwake.WorkItem) { f.addAll(w) }

// addAll adds them at once.
func (f *fake) addAll(items ...pgwake.WorkItem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range items {
		f.next++
		f.items = append(f.items, &fakeItem{ClaimedWorkItem: pgwake.ClaimedWorkItem{WorkItem: w, ID: f.next}, visible: time.Now()})
	}
	f.changed()
}

func retryable(verb string) error {
	return &pgwake.Error{Op: verb, Err: context.DeadlineExceeded, Retryable: true}
}

func (f *fake) failing(verb string) error {
	if f.fail == nil {
		return nil
	}
	return f.fail(verb)
}

func (f *fake) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	end := time.Now().Add(30 * time.Second)
	if o.Ack != nil {
		if err := f.AckWorkItems(ctx, o.Ack); err != nil {
			return nil, err
		}
		if !o.AckAsync {
			if err := f.Flush(ctx); err != nil {
				return nil, err
			}
		}
	}
	f.mu.Lock()
	if o.Ack != nil {
		f.ackedWith = append(f.ackedWith, n)
	} else {
		f.fetched = append(f.fetched, n)
	}
	f.mu.Unlock()
	if o.NoWait {
		end = time.Now()
	}
	for {
		f.mu.Lock()
		err := f.failing("fetch")
		got := f.claim(n, o)
		wait := time.Until(end)
		for _, i := range f.items {
			if left := time.Until(i.visible); left > 0 || f.limit == 0 { // what is due waits for a place, and hears of it
				wait = min(wait, max(left, 0))
			}
		}
		f.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if len(got) > 0 {
			return got, nil
		}
		if !time.Now().Before(end) {
			return nil, pgwake.ErrNoWork
		}
		t := time.NewTimer(wait)
		select {
		case <-f.news:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, ctx.Err()
		}
		t.Stop()
	}
}

// claim is called with mu held.
func (f *fake) claim(n int, o *pgwake.FetchOptions) (got []*pgwake.ClaimedWorkItem) {
	now := time.Now()
	atWork := 0
	for _, i := range f.items {
		if i.LockToken != "" && i.visible.After(now) {
			atWork++
		}
	}
	for _, i := range f.items {
		if len(got) == n || i.visible.After(now) || f.limit > 0 && atWork == f.limit {
			continue
		}
		atWork++
		i.Places = f.limit
		i.claims++
		i.Attempt++
		due := i.visible
		i.visible = now.Add(o.LockTimeout)
		i.LockToken = pgwake.LockToken(fmt.Sprintf("%d/%d", i.ID, i.claims))
		i.DueAt, i.LockedUntil = due.Add(skew), i.visible.Add(skew)
		c := i.ClaimedWorkItem
		c.Namespace, c.Path = f.as.namespace, f.as.path
		got = append(got, &c)
	}
	return got
}

// by returns the item of a token whose lease holds. It is called with mu held.
func (f *fake) by(token pgwake.LockToken) *fakeItem {
	for _, i := range f.items {
		if i.LockToken == token && i.visible.After(time.Now()) {
			return i
		}
	}
	return nil
}

func (f *fake) remove(i *fakeItem) {
	f.items = slices.DeleteFunc(f.items, func(o *fakeItem) bool { return o == i })
}

// verb makes a change to the item of a token.
func (f *fake) verb(ctx context.Context, name string, token pgwake.LockToken, change func(*fakeItem)) error {
	nap(ctx, f.slow)
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.changed()
	f.calls[name]++
	if err := ctx.Err(); err != nil {
		return &pgwake.Error{Op: name, Err: err, Retryable: errors.Is(err, context.DeadlineExceeded)}
	}
	if err := f.failing(name); err != nil {
		return err
	}
	i := f.by(token)
	if i == nil {
		return &pgwake.Error{Op: name, Err: pgwake.ErrLockLost}
	}
	change(i)
	if f.unanswered[name] > 0 {
		f.unanswered[name]--
		return &pgwake.Error{Op: name, Err: context.DeadlineExceeded, Retryable: true, Unknown: true}
	}
	return nil
}

// refused is what the Provider says to texts and delays that it does not take.
func refused(verb string, delay time.Duration, texts ...string) error {
	bad := delay < 0 || delay > longestDelay
	for _, t := range texts {
		bad = bad || len(t) > 1<<20 || !utf8.ValidString(t) || strings.Contains(t, "\x00") || strings.Contains(t, `\u0000`)
	}
	if bad {
		return &pgwake.Error{Op: verb, Err: pgwake.ErrInvalid}
	}
	return nil
}

// await waits until none of the items is locked, as their rows do.
func (f *fake) await(ctx context.Context, tokens ...pgwake.LockToken) error {
	isLocked := func(t pgwake.LockToken) bool { i := f.by(t); return i != nil && f.locked[i.Name] }
	waits := 0
	for {
		f.mu.Lock()
		locked := slices.ContainsFunc(tokens, isLocked)
		f.waiting -= waits
		if waits = 0; locked && ctx.Err() == nil {
			waits = 1
		}
		f.waiting += waits
		f.mostWaiting = max(f.mostWaiting, f.waiting)
		f.mu.Unlock()
		switch {
		case !locked:
			return nil
		case ctx.Err() != nil:
			return &pgwake.Error{Op: "ack", Err: ctx.Err(), Retryable: errors.Is(ctx.Err(), context.DeadlineExceeded), Unknown: true}
		}
		nap(ctx, time.Millisecond)
	}
}

// upload takes as long as the item does that takes longest.
func (f *fake) upload(ctx context.Context, tokens ...pgwake.LockToken) error {
	var takes time.Duration
	f.mu.Lock()
	for _, t := range tokens {
		if i := f.by(t); i != nil {
			takes = max(takes, f.uploads[i.Name])
		}
	}
	f.mu.Unlock()
	if nap(ctx, takes); ctx.Err() != nil {
		return &pgwake.Error{Op: "ack", Err: ctx.Err(), Retryable: errors.Is(ctx.Err(), context.DeadlineExceeded), Unknown: true}
	}
	return nil
}

// refuse refuses a statement that is about an item that none may be about.
func (f *fake) refuse(verb string, tokens ...pgwake.LockToken) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range tokens {
		if i := f.by(t); i != nil && f.poisoned[i.Name] {
			return &pgwake.Error{Op: verb, Err: pgwake.ErrInvalid}
		}
	}
	return nil
}

func (f *fake) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	if err := f.upload(ctx, tokens...); err != nil {
		return err
	}
	if err := f.await(ctx, tokens...); err != nil {
		return err
	}
	if err := f.refuse("ack", tokens...); err != nil {
		return err
	}
	var lost []pgwake.LockToken
	for _, t := range tokens {
		err := f.verb(ctx, "ack", t, func(i *fakeItem) {
			f.acked = append(f.acked, i.Name)
			f.remove(i)
		})
		switch failure := (*pgwake.Error)(nil); {
		case err == nil:
		case errors.As(err, &failure) && failure.Err == pgwake.ErrLockLost:
			lost = append(lost, t)
		default:
			return err
		}
	}
	if lost != nil {
		return &pgwake.Error{Op: "ack", Err: &pgwake.LostLocksError{Tokens: lost}}
	}
	return nil
}

func (f *fake) AckBatched(ctx context.Context, token pgwake.LockToken, m *pgwake.Message) error {
	if m != nil {
		if err := refused("ack", 0, string(m.Data)); err != nil {
			return err
		}
	}
	if err := f.upload(ctx, token); err != nil {
		return err
	}
	if err := f.await(ctx, token); err != nil {
		return err
	}
	if err := f.refuse("ack", token); err != nil {
		return err
	}
	return f.verb(ctx, "ack", token, func(i *fakeItem) {
		f.acked = append(f.acked, i.Name)
		if m != nil {
			f.sent = append(f.sent, *m)
			f.sentFrom = append(f.sentFrom, trace.SpanContextFromContext(ctx))
		}
		f.remove(i)
	})
}

func (f *fake) Flush(ctx context.Context) error {
	f.mu.Lock()
	disk := f.disk
	f.mu.Unlock()
	if disk {
		<-ctx.Done()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls["flush"]++
	if err := ctx.Err(); err != nil {
		return &pgwake.Error{Op: "flush", Err: err, Retryable: errors.Is(err, context.DeadlineExceeded)}
	}
	return f.failing("flush")
}

// skew is how far the server's clock is ahead.
const skew = -time.Hour

func (f *fake) LocalTime(server time.Time) time.Time { return server.Add(-skew) }

func (f *fake) RenewSessionLock(_ context.Context, owners []string, _, _ time.Duration) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sessions = append(f.sessions, owners...)
	return 1, nil
}

func (f *fake) ReleaseSessions(_ context.Context, owners []string) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.released = append(f.released, owners...)
	for _, i := range f.items {
		if i.visible.After(time.Now()) {
			f.leasedAtRelease++
		}
	}
	return 1, f.failing("release")
}

// AckWorkItemTx does not wait for the commit.
func (f *fake) AckWorkItemTx(ctx context.Context, _ pgx.Tx, token pgwake.LockToken, m *pgwake.Message) error {
	if m == nil {
		return f.AckWorkItems(ctx, []pgwake.LockToken{token})
	}
	return f.AckBatched(ctx, token, m)
}

// fakeTx is a transaction in which nothing happens.
type fakeTx struct{ pgx.Tx }

func (fakeTx) Commit(context.Context) error   { return nil }
func (fakeTx) Rollback(context.Context) error { return nil }

func (f *fake) AbandonWorkItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	if err := refused("abandon", o.Delay, o.Error); err != nil {
		return err
	}
	if f.stuck {
		<-ctx.Done()
		return &pgwake.Error{Op: "abandon", Err: ctx.Err(), Retryable: errors.Is(ctx.Err(), context.DeadlineExceeded)}
	}
	if err := f.await(ctx, token); err != nil {
		return err
	}
	return f.verb(ctx, "abandon", token, func(i *fakeItem) {
		i.visible, i.LockToken, i.LastError = time.Now().Add(o.Delay), "", o.Error
		if o.IgnoreAttempt {
			i.Attempt--
		}
	})
}

func (f *fake) DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error {
	if f.noCauses && cause != "" {
		return &pgwake.Error{Op: "dead letter", Err: pgwake.ErrInvalid}
	}
	if err := f.await(ctx, token); err != nil {
		return err
	}
	return f.verb(ctx, "dead letter", token, func(i *fakeItem) {
		f.buried[i.Name] = reason + ": " + cause
		f.remove(i)
	})
}

func (f *fake) RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error) {
	f.mu.Lock()
	f.renewed++
	hang, last := f.hang, f.last
	f.mu.Unlock()
	if last {
		return nil, errors.ErrUnsupported
	}
	if hang {
		<-ctx.Done()
		return nil, &pgwake.Error{Op: "renew", Err: ctx.Err(), Retryable: true}
	}
	if f.unheld {
		if err := f.refuse("renew", tokens...); err != nil {
			return nil, err
		}
	}
	if len(tokens) == 1 {
		if err := f.await(ctx, tokens...); err != nil {
			return nil, err
		}
	}
	var lost []pgwake.LockToken
	renewed := map[pgwake.LockToken]time.Time{}
	for n, t := range tokens {
		if slices.Contains(tokens[:n], t) {
			continue
		}
		f.mu.Lock()
		i := f.by(t)
		passed := i != nil && f.locked[i.Name]
		f.mu.Unlock()
		if passed {
			continue
		}
		err := f.verb(ctx, "renew", t, func(i *fakeItem) {
			i.visible = time.Now().Add(extend)
			renewed[t] = i.visible
		})
		switch failure := (*pgwake.Error)(nil); {
		case err == nil:
		case errors.As(err, &failure) && failure.Err == pgwake.ErrLockLost:
			lost = append(lost, t)
		default:
			return nil, err
		}
	}
	nap(ctx, f.late)
	if lost != nil {
		return renewed, &pgwake.Error{Op: "renew", Err: &pgwake.LostLocksError{Tokens: lost}}
	}
	return renewed, nil
}
