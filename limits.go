package pgwake

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: how much of a namespace may be at work, or may not at all for now?

// Limits bound what of a namespace is at work, over all nodes. They are for work items without a session; an item is at work
// from its claim until it is acknowledged, given back or a dead letter, or else until its lease ends. The zero value means no
// limits.
type Limits struct {
	// MaxRunning is how many items may be at work at one time. Defaults to 0: any number.
	MaxRunning int

	// MaxRunningPerKey is how many of those with the same WorkItem.Key, and the same tag, may be. What is too much waits
	// aside and holds up no other key. Defaults to 0: any number.
	MaxRunningPerKey int

	// RatePerKey is how often an item of a key, and tag, may begin; each claim is a beginning, unless the item is given
	// back at once and the attempt does not count (AbandonOptions.IgnoreAttempt). Defaults to the zero Rate: any number of times.
	RatePerKey Rate

	// Weight are the chances of the namespace in fetches with FetchOptions.Fair. From 1 to MaxWeight. Defaults to 1.
	Weight int
}

// Rate is one item in each Interval, on average. An item that may not begin yet is due when it may. Where nobody claims for a
// while, what might have begun is not made up for: Burst of them begin, and the others one in each Interval after that.
type Rate struct {
	// Interval is from 1 µs to 100 years, in whole microseconds. Defaults to 0: no limit.
	Interval time.Duration

	// Burst is how many may begin at once, if none has for Burst intervals, which are 100 years at most. Not without an
	// Interval. A beginning that is late by more than a burst is not made up for, so a short Interval is only reached on average
	// with a Burst of some 10 ms or more. Defaults to 1.
	Burst int
}

// MaxWeight is the largest Limits.Weight.
const MaxWeight = 1000

func (l *Limits) args(namespace string) ([]any, error) {
	if err := CheckNamespace(namespace); err != nil {
		return nil, err
	}
	weight, burst := l.Weight, l.RatePerKey.Burst
	if weight == 0 {
		weight = 1
	}
	if burst == 0 {
		burst = 1
	}
	const most = 1<<31 - 1
	switch r := l.RatePerKey; {
	case weight < 1 || weight > MaxWeight:
		return nil, invalid("weight %d is not between 1 and %d", l.Weight, MaxWeight)
	case l.MaxRunning < 0 || l.MaxRunning > most, l.MaxRunningPerKey < 0 || l.MaxRunningPerKey > most, burst < 1 || burst > most:
		return nil, invalid("a limit of %+v is not between 0 and %d", *l, most)
	case r.Interval < 0 || r.Interval > maxDelay || r.Interval > 0 && r.Interval < time.Microsecond:
		return nil, invalid("a rate of one in %v is not between one in %v and one in %v", r.Interval, time.Microsecond, maxDelay)
	case r.Interval > 0 && burst > int(maxDelay/r.Interval):
		return nil, invalid("%d intervals of %v are more than %v", burst, r.Interval, maxDelay)
	case r.Interval == 0 && r.Burst != 0:
		return nil, invalid("a burst of %d is for a rate", r.Burst)
	}
	return []any{namespace, weight, optional(l.MaxRunning, l.MaxRunning == 0), optional(l.MaxRunningPerKey, l.MaxRunningPerKey == 0),
		optional(l.RatePerKey.Interval, l.RatePerKey.Interval == 0), burst}, nil
}

// SetLimits sets the limits of a namespace for all nodes, from the next claim on; the zero Limits removes them. What is at
// work by then counts, and goes on even if it is too much. Items that wait aside, or for their share of a rate, are looked
// at anew, in one statement. ErrInvalid if a limit is out of its range.
func (p *Provider) SetLimits(ctx context.Context, namespace string, l Limits) error {
	return p.doAndTell(ctx, "set limits", func(ctx context.Context, q querier) error {
		return p.setLimits(ctx, q, namespace, l)
	}, p.engine.stir)
}

// SetLimitsTx is SetLimits as part of the transaction, which has to be READ COMMITTED: ErrInvalid.
func (p *Provider) SetLimitsTx(ctx context.Context, tx pgx.Tx, namespace string, l Limits) error {
	return p.doTx(ctx, tx, "set limits", func(ctx context.Context, q querier) error {
		return p.setLimits(ctx, q, namespace, l)
	})
}

func (p *Provider) setLimits(ctx context.Context, q querier, namespace string, l Limits) error {
	args, err := l.args(namespace)
	if err != nil {
		return err
	}
	_, err = q.Exec(ctx, p.sql.setLimits, args...)
	return err
}

// GetLimits returns the limits of all namespaces that have any, weights included, by namespace.
func (p *Provider) GetLimits(ctx context.Context) (limits map[string]Limits, err error) {
	err = p.do(ctx, "get limits", func(ctx context.Context, q querier) error {
		rows, err := q.Query(ctx, p.sql.listLimits)
		if err != nil {
			return err
		}
		limits = make(map[string]Limits)
		var namespace string
		var running, perKey *int
		var interval *time.Duration
		var l Limits
		_, err = pgx.ForEachRow(rows, []any{&namespace, &l.Weight, &running, &perKey, &interval, &l.RatePerKey.Burst}, func() error {
			found := l
			found.MaxRunning, found.MaxRunningPerKey, found.RatePerKey.Interval = value(running), value(perKey), value(interval)
			if interval == nil {
				found.RatePerKey.Burst = 0
			}
			limits[namespace] = found
			return nil
		})
		return err
	})
	return limits, err
}

// AllNamespaces is what to Pause and Resume for a queue as a whole.
const AllNamespaces = "*"

// Pause has no node claim from these namespaces of a queue, or from the whole queue with AllNamespaces, until Resume says
// otherwise. What is at work goes on, and what is enqueued waits. A namespace need not exist yet. None at all is ErrInvalid.
func (p *Provider) Pause(ctx context.Context, queue Queue, namespaces ...string) error {
	defer p.engine.changed()
	return p.do(ctx, "pause", func(ctx context.Context, q querier) error {
		return p.pause(ctx, q, queue, namespaces, true)
	})
}

// PauseTx is Pause as part of the transaction.
func (p *Provider) PauseTx(ctx context.Context, tx pgx.Tx, queue Queue, namespaces ...string) error {
	return p.doTx(ctx, tx, "pause", func(ctx context.Context, q querier) error {
		return p.pause(ctx, q, queue, namespaces, true)
	})
}

// Resume ends a Pause of these namespaces, or with AllNamespaces that of the whole queue, on all nodes at once. Namespaces that
// were paused by themselves remain so when the queue is resumed.
func (p *Provider) Resume(ctx context.Context, queue Queue, namespaces ...string) error {
	return p.doAndTell(ctx, "resume", func(ctx context.Context, q querier) error {
		return p.pause(ctx, q, queue, namespaces, false)
	}, p.engine.stir)
}

// ResumeTx is Resume as part of the transaction.
func (p *Provider) ResumeTx(ctx context.Context, tx pgx.Tx, queue Queue, namespaces ...string) error {
	return p.doTx(ctx, tx, "resume", func(ctx context.Context, q querier) error {
		return p.pause(ctx, q, queue, namespaces, false)
	})
}

func (p *Provider) pause(ctx context.Context, q querier, queue Queue, namespaces []string, paused bool) error {
	if queue != Worker && queue != Orchestrator {
		return invalid("queue %d is unknown", int(queue))
	}
	var set []string // nil: the whole queue
	switch {
	case len(namespaces) == 0:
		return invalid("no namespace is given; the whole queue is AllNamespaces")
	case len(namespaces) == 1 && namespaces[0] == AllNamespaces:
	default:
		var err error
		if set, err = namespaceSet(namespaces); err != nil {
			return err
		}
	}
	_, err := q.Exec(ctx, p.sql.pause, queue.String(), set, paused)
	return err
}

// PausedNamespaces are the namespaces of a queue that are paused.
type PausedNamespaces struct {
	All        bool     // the whole queue
	Namespaces []string // in order, by themselves
}

// GetPaused returns what of a queue is paused.
func (p *Provider) GetPaused(ctx context.Context, queue Queue) (paused PausedNamespaces, err error) {
	err = p.do(ctx, "get paused", func(ctx context.Context, q querier) error {
		if queue != Worker && queue != Orchestrator {
			return invalid("queue %d is unknown", int(queue))
		}
		rows, err := q.Query(ctx, p.sql.listPaused, queue.String())
		if err != nil {
			return err
		}
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if i := slices.Index(all, AllNamespaces); i >= 0 {
			paused.All, all = true, slices.Delete(all, i, i+1)
		}
		paused.Namespaces = all
		return err
	})
	return paused, err
}
