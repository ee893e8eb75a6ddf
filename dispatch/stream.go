package dispatch

import (
	"context"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: what does another queue have to be able to do for Coordinators to serve it?
//
// What queues have in common: a message is claimed, and then acknowledged or given back. StreamSource (streamsource.go) makes of that
// what Coordinators and Dispatchers need, so that handlers, retries, leases, dead letters and routing are the same for all of them.

// EventStream is a queue with namespaces, such as one of pgmq or RabbitMQ. All methods are safe for concurrent use.
//
// Errors: pgwake.ErrInvalid for what will never succeed, pgwake.ErrLockLost for a receipt that holds no more, pgwake.ErrClosed when the
// stream is closed, and that of the context when it ends. Whatever else it returns is taken for a queue that is away and comes back, so the
// same call is made again later; a *pgwake.Error says by itself if that may help.
type EventStream interface {
	// Receive claims up to most messages of a namespace (1 to pgwake.MaxFetch), each for as long as lease, and waits for the first one: it
	// is pushed, and while there is none it costs next to nothing. It returns messages, or an error and nothing is claimed. A context that
	// ends strands nothing: what was claimed at that moment is returned, or is given back at once. context.DeadlineExceeded says that there
	// was no message in that time, and Coordinators.Health goes by it: where nobody knows, since there was no connection or no answer, the
	// error is another one.
	Receive(ctx context.Context, namespace string, most int, lease time.Duration) ([]StreamDelivery, error)

	// Ack removes messages. Those of which the receipt holds no more are told by a *pgwake.LostLocksError; all others are removed.
	Ack(ctx context.Context, receipts []pgwake.LockToken) error

	// Nack gives a message back, due again after o.Delay. Of the other options a stream does what it can.
	Nack(ctx context.Context, receipt pgwake.LockToken, o pgwake.AbandonOptions) error

	// Publish adds messages to a namespace, which the first one creates. When it returns nil they are durable.
	Publish(ctx context.Context, namespace string, messages ...StreamMessage) error

	// WaitForNamespaces returns the namespaces that are not among known, as soon as there are any. It is pushed.
	WaitForNamespaces(ctx context.Context, known []string) (added []string, err error)
}

// LeaseExtender is an EventStream whose leases can be extended. On one that is none, handlers have no longer than Config.LockTimeout, what is
// claimed ahead included; all else is the same.
type LeaseExtender interface {
	// Extend has leases end so much later than now. Lost ones are told as by Ack. Those of several that somebody else has locked need not be
	// waited for, and are told by a *NotExtendedError, which may come together with the other (errors.Join). A stream around another one that is no LeaseExtender
	// fails with errors.ErrUnsupported, and is taken for none.
	Extend(ctx context.Context, receipts []pgwake.LockToken, lease time.Duration) error
}

// NotExtendedError has the leases that an Extend of several has left as they are, since somebody else has locked the messages at this moment.
// They hold; all others were extended, or are lost. Extend them again.
type NotExtendedError struct{ Receipts []pgwake.LockToken }

func (e *NotExtendedError) Error() string {
	return fmt.Sprintf("%d leases were not extended, since the messages are locked", len(e.Receipts))
}

// DeadLetterer is an EventStream that keeps dead letters. On one that is none, what would be one is given back; see
// StreamConfig.PoisonDelay.
type DeadLetterer interface {
	// DeadLetter puts a message aside, with the reason and the cause, instead of giving it back.
	DeadLetter(ctx context.Context, receipt pgwake.LockToken, reason, cause string) error
}

// StreamMessage is a message to be published.
type StreamMessage struct {
	Name    string            // which handler it is for
	Payload []byte            // what the handler gets as Input; some streams take JSON only
	Headers map[string]string // such as to which trace it belongs
	Delay   time.Duration     // until it is due; of what was received: 0
}

// StreamDelivery is a message under a lease.
type StreamDelivery struct {
	StreamMessage
	ID         int64 // for logs
	Namespace  string
	Attempt    int // deliveries so far, this one included
	EnqueuedAt time.Time
	LastError  string // AbandonOptions.Error of the latest attempt that gave one, if the stream keeps it

	// Receipt proves the claim. It is good for this delivery only: once the lease has ended it can do nothing.
	Receipt     pgwake.LockToken
	LeasedUntil time.Time // local, rather too early than too late
}

// ProviderStream returns a Provider as an EventStream, for programs that choose a queue by their configuration. A Provider is a Source as
// it is, so StreamSource gives it back: nothing comes between, and HandleTx and completions are to be had. Its Receive goes on by itself while the
// database is away, and does not tell that from an empty queue when its context ends.
func ProviderStream(p *pgwake.Provider) EventStream { return providerStream{p} }

type providerStream struct{ p *pgwake.Provider }

func (s providerStream) Receive(ctx context.Context, namespace string, most int, lease time.Duration) ([]StreamDelivery, error) {
	o := &pgwake.FetchOptions{Namespaces: []string{namespace}, LockTimeout: lease}
	patience := patience{muted: func() bool { return true }}
	for {
		items, err := s.p.FetchWorkItems(ctx, most, o)
		if len(items) > 0 {
			return s.deliveries(items), nil
		}
		if goOn, fatal := patience.after(ctx, err); goOn {
			continue
		} else if fatal != nil {
			return nil, fatal
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, err
	}
}

func (s providerStream) deliveries(items []*pgwake.ClaimedWorkItem) []StreamDelivery {
	all := make([]StreamDelivery, len(items))
	for i, item := range items {
		all[i] = StreamDelivery{
			StreamMessage: StreamMessage{Name: item.Name, Payload: item.Input, Headers: item.Headers},
			ID:            item.ID, Namespace: item.Namespace, Attempt: item.Attempt, EnqueuedAt: item.EnqueuedAt, LastError: item.LastError,
			Receipt: item.LockToken, LeasedUntil: s.p.LocalTime(item.LockedUntil),
		}
	}
	return all
}

func (s providerStream) Ack(ctx context.Context, receipts []pgwake.LockToken) error {
	return s.p.AckWorkItems(ctx, receipts)
}

func (s providerStream) Nack(ctx context.Context, receipt pgwake.LockToken, o pgwake.AbandonOptions) error {
	return s.p.AbandonWorkItem(ctx, receipt, &o)
}

func (s providerStream) Extend(ctx context.Context, receipts []pgwake.LockToken, lease time.Duration) error {
	_, err := s.p.RenewWorkItemLocks(ctx, receipts, lease)
	return err
}

func (s providerStream) DeadLetter(ctx context.Context, receipt pgwake.LockToken, reason, cause string) error {
	return s.p.DeadLetterWorkItem(ctx, receipt, reason, cause)
}

func (s providerStream) Publish(ctx context.Context, namespace string, messages ...StreamMessage) error {
	items := make([]pgwake.WorkEnqueue, len(messages))
	for i, m := range messages {
		items[i] = pgwake.WorkEnqueue{
			WorkItem:       pgwake.WorkItem{Name: m.Name, Input: m.Payload, Headers: m.Headers},
			EnqueueOptions: pgwake.EnqueueOptions{Namespace: namespace, Delay: m.Delay},
		}
	}
	_, err := s.p.EnqueueForWorkerMany(ctx, items)
	return err
}

func (s providerStream) WaitForNamespaces(ctx context.Context, known []string) ([]string, error) {
	return s.p.WaitForNamespaces(ctx, known)
}
