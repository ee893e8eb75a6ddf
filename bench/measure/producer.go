package measure

import (
	"context"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: who enqueues?

// Producer says who enqueues.
type Producer string

const (
	// OtherProvider is another Provider, as in another process: the wake-up crosses the database.
	OtherProvider Producer = "another provider"
	// PlainSQL is a connection that calls the SQL function enqueue_work: any program in any language.
	PlainSQL Producer = "plain SQL"
	// SameProvider is the Provider whose dispatchers wait.
	SameProvider Producer = "the same provider"
)

// producer enqueues items by their number, each by one statement that commits itself.
type producer struct {
	enqueue func(ctx context.Context, n int, at time.Time) error
	close   func(*error)
}

// produce enqueues for a consumer in the given way. at is the due time; zero: now.
func (s stage) produce(ctx context.Context, by Producer, consumer *node, l *ledger) (*producer, error) {
	var p producer
	switch by {
	case SameProvider:
		p.enqueue = provided(consumer, l)
		p.close = func(*error) {}
	case OtherProvider:
		other, err := s.open(ctx, 1)
		if err != nil {
			return nil, err
		}
		p.enqueue = provided(other, l)
		p.close = other.close
	case PlainSQL:
		conn, err := s.connect(ctx)
		if err != nil {
			return nil, err
		}
		p.enqueue = func(ctx context.Context, n int, at time.Time) error {
			var due *time.Time
			if !at.IsZero() {
				due = &at
			}
			_, err := conn.Exec(ctx, "SELECT enqueue_work('measure', $1, p_visible_at => $2)", number(n), due)
			return err
		}
		p.close = func(*error) { hangUp(conn) }
	default:
		return nil, fmt.Errorf("unknown producer %q", by)
	}
	return &p, nil
}

func provided(by *node, l *ledger) func(context.Context, int, time.Time) error {
	return func(ctx context.Context, n int, at time.Time) error {
		_, err := by.EnqueueForWorker(ctx, l.item(n), &pgwake.EnqueueOptions{At: at})
		return err
	}
}

// now enqueues an item that is due at once, and notes when.
func (p *producer) now(ctx context.Context, l *ledger, n int) error {
	sent := time.Now()
	if err := p.enqueue(ctx, n, time.Time{}); err != nil {
		return err
	}
	l.enqueued(n, sent, time.Now())
	return nil
}

// warmUps is how many items are sent, and handled, before sampling begins.
const warmUps = 32

// warmUp sends items, one after another, until connections are up and statements prepared. They have the
// first numbers. What else arrives meanwhile is shown to see.
func (p *producer) warmUp(ctx context.Context, l *ledger, see func(n int)) error {
	for n := range warmUps {
		if err := p.now(ctx, l, n); err != nil {
			return err
		}
		if err := l.wait(ctx, 1, see); err != nil {
			return err
		}
	}
	return nil
}

func ignore(int) {}
