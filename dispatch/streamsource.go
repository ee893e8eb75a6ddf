package dispatch

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: how does another queue look like a Provider?

// StreamConfig is for StreamSource. The zero value means the defaults, and so does a nil one.
type StreamConfig struct {
	// MaxWait is how long a fetch waits whose options do not say. At least 1 ms. Defaults to 1 min.
	MaxWait time.Duration

	// PoisonDelay is after what time a message is due again that was to become a dead letter, where the stream keeps none. Not negative.
	// Defaults to 1 h.
	PoisonDelay time.Duration
}

// StreamSource returns a Source on an EventStream: NewCoordinators serve its namespaces, and so does a Dispatcher of one of them
// (Config.Namespaces). What a queue lacks is an error of the fetch, pgwake.ErrInvalid: tags, sessions, and fetches over several namespaces
// at a time. Such messages have neither a transaction (HandleTx) nor an orchestration. Their Path is empty, since a stream does not say
// how it came to know of them, and their DueAt is EnqueuedAt, since it does not say until when they were delayed. Safe for concurrent use.
func StreamSource(stream EventStream, config *StreamConfig) Source {
	if s, ok := stream.(providerStream); ok && s.p != nil {
		return s.p
	}
	s := &streamSource{stream: stream}
	if config != nil {
		s.cfg = *config
	}
	var k checks
	k.duration("MaxWait", &s.cfg.MaxWait, time.Minute, time.Millisecond)
	k.duration("PoisonDelay", &s.cfg.PoisonDelay, time.Hour, 0)
	if p, ok := stream.(providerStream); stream == nil || ok && p.p == nil {
		k.bad("there is no EventStream")
	}
	s.err = k.err
	return s
}

// isStream reports whether items come from an EventStream that is no Provider, where no transaction acknowledges them.
func isStream(p Provider) bool {
	_, ok := p.(*streamSource)
	return ok
}

type streamSource struct {
	stream EventStream
	cfg    StreamConfig
	err    error // of the StreamConfig: that of every fetch
}

func (s *streamSource) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	const op = "receive"
	if s.err != nil {
		return nil, s.err
	}
	if o == nil {
		o = &pgwake.FetchOptions{}
	}
	switch {
	case n < 1 || n > pgwake.MaxFetch:
		return nil, streamError(op, fmt.Errorf("%w: number of messages %d", pgwake.ErrInvalid, n))
	case len(o.Namespaces) != 1:
		return nil, streamError(op, fmt.Errorf("%w: a stream is received from one namespace at a time, and not from %d", pgwake.ErrInvalid, len(o.Namespaces)))
	case o.Session != nil || !reflect.ValueOf(o.Tags).IsZero() || o.MaxAttempts != 0 || o.NoWait || o.Ack != nil:
		return nil, streamError(op, fmt.Errorf("%w: a stream has no sessions, tags, or fetches that do more than receive", pgwake.ErrInvalid))
	}
	wait, lease := s.cfg.MaxWait, pgwake.DefaultLockTimeout
	if o.PollTimeout > 0 {
		wait = o.PollTimeout
	}
	if o.LockTimeout > 0 {
		lease = o.LockTimeout
	}
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	got, err := s.stream.Receive(waiting, o.Namespaces[0], n, lease)
	if err != nil {
		if waiting.Err() != nil && ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) { // a queue that is away has another error
			err = pgwake.ErrNoWork
		}
		return nil, streamError(op, err)
	}
	if len(got) == 0 {
		return nil, streamError(op, pgwake.ErrNoWork)
	}
	items := make([]*pgwake.ClaimedWorkItem, len(got))
	for i, d := range got {
		items[i] = &pgwake.ClaimedWorkItem{
			WorkItem: pgwake.WorkItem{Name: d.Name, Input: d.Payload, Headers: d.Headers},
			ID:       d.ID, Namespace: d.Namespace, Attempt: d.Attempt, EnqueuedAt: d.EnqueuedAt, DueAt: d.EnqueuedAt,
			LastError: d.LastError, LockToken: d.Receipt, LockedUntil: d.LeasedUntil,
		}
	}
	return items, nil
}

// streamError returns an error as Dispatchers take it.
func streamError(op string, err error) error {
	var known *pgwake.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	for _, stays := range []error{pgwake.ErrNoWork, pgwake.ErrLockLost, pgwake.ErrInvalid, pgwake.ErrClosed, pgwake.ErrPermission, pgwake.ErrConfig, errors.ErrUnsupported, context.Canceled} {
		if errors.Is(err, stays) {
			return &pgwake.Error{Op: op, Err: err}
		}
	}
	// Nobody knows if it has taken effect: it is made again, and then a receipt that is lost is no news.
	return &pgwake.Error{Op: op, Err: err, Retryable: true, Unknown: true}
}

func (s *streamSource) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	return streamError("ack", s.stream.Ack(ctx, tokens))
}

func (s *streamSource) AckBatched(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error {
	if completion != nil {
		return streamError("ack", fmt.Errorf("%w: a stream has no orchestrations", pgwake.ErrInvalid))
	}
	return s.AckWorkItems(ctx, []pgwake.LockToken{token})
}

// Flush has nothing to wait for: what Ack returned for is acknowledged.
func (s *streamSource) Flush(context.Context) error { return nil }

func (s *streamSource) AckWorkItemTx(ctx context.Context, _ pgx.Tx, _ pgwake.LockToken, _ *pgwake.Message) error {
	return streamError("ack", fmt.Errorf("%w: a stream takes no part in transactions", pgwake.ErrInvalid))
}

func (s *streamSource) AbandonWorkItem(ctx context.Context, token pgwake.LockToken, o *pgwake.AbandonOptions) error {
	if o == nil {
		o = &pgwake.AbandonOptions{}
	}
	return streamError("nack", s.stream.Nack(ctx, token, *o))
}

func (s *streamSource) DeadLetterWorkItem(ctx context.Context, token pgwake.LockToken, reason, cause string) error {
	if d, ok := s.stream.(DeadLetterer); ok {
		return streamError("dead letter", d.DeadLetter(ctx, token, reason, cause))
	}
	return s.AbandonWorkItem(ctx, token, &pgwake.AbandonOptions{Delay: s.cfg.PoisonDelay, Error: reason + ": " + cause})
}

func (s *streamSource) RenewWorkItemLocks(ctx context.Context, tokens []pgwake.LockToken, extend time.Duration) (map[pgwake.LockToken]time.Time, error) {
	e, ok := s.stream.(LeaseExtender)
	if !ok {
		return nil, streamError("extend", fmt.Errorf("%w: the stream is no LeaseExtender", errors.ErrUnsupported))
	}
	sent := time.Now()
	err := e.Extend(ctx, tokens, extend)
	var locked *NotExtendedError
	lost, known := lostOf(err)
	if errors.As(err, &locked) {
		if known = true; lost == nil {
			err = nil // as a Provider, which leaves them out
		}
	}
	if !known {
		return nil, streamError("extend", err)
	}
	until := make(map[pgwake.LockToken]time.Time, len(tokens))
	for _, t := range tokens {
		if !lost[t] && (locked == nil || !slices.Contains(locked.Receipts, t)) {
			until[t] = sent.Add(extend)
		}
	}
	return until, streamError("extend", err)
}

// LocalTime is what it is: a stream tells the ends of its leases in local time.
func (s *streamSource) LocalTime(local time.Time) time.Time { return local }

// There are no sessions.
func (s *streamSource) ReleaseSessions(context.Context, []string) (int, error) { return 0, nil }

func (s *streamSource) RenewSessionLock(context.Context, []string, time.Duration, time.Duration) (int, error) {
	return 0, nil
}

func (s *streamSource) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	if s.err != nil {
		return nil, s.err
	}
	added, err := s.stream.WaitForNamespaces(ctx, known)
	return added, streamError("wait for namespaces", err)
}
