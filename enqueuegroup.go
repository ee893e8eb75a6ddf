package pgwake

import (
	"context"
	"maps"
	"slices"
)

// This file answers: which enqueues of the same moment share a commit?

const (
	directEnqueues = 4       // so many at a time go as if there were no groups: one of a few items costs the server more than they do
	ampleEnqueues  = 2       // with more groups on their way, each is smaller, and the server does more for each item
	groupedInput   = 4 << 10 // a larger input gains little by sharing, and would hold up others
)

// groupedEnqueue is the enqueue of one item, whose arguments were checked.
type groupedEnqueue struct {
	item  WorkEnqueue
	added Enqueued // once it was made
}

func newEnqueueGroups(p *Provider) *groups[*groupedEnqueue] {
	g := &groups[*groupedEnqueue]{p: p, direct: directEnqueues, ample: ampleEnqueues}
	g.transact = func(ctx context.Context, calls []*groupedEnqueue, _ []error) error {
		items := make([]WorkEnqueue, len(calls))
		for i, c := range calls {
			items[i] = c.item
		}
		added, err := p.addWork(ctx, items)
		if err != nil {
			return err
		}
		for i, c := range calls {
			c.added = added[i]
		}
		return nil
	}
	g.alone = func(ctx context.Context, c *groupedEnqueue) (err error) {
		c.added, err = first(p.addWork(ctx, []WorkEnqueue{c.item}))
		return err
	}
	g.init()
	return g
}

// EnqueueForWorker adds a work item, durably once it returns. The error is ErrInvalid if the item or an
// option breaks a rule.
//
// Calls that other goroutines make on this Provider at the same moment may share a round trip and a commit, unless they
// have a dedup key or an input of more than 4 KiB: while four are on their way, what comes next goes together. Each has its
// own outcome; one that hangs, since its connection gives no sign, holds up others for 5 s at most. The values of their
// contexts do not reach what the pool calls, such as a tracer, then.
func (p *Provider) EnqueueForWorker(ctx context.Context, item WorkItem, o *EnqueueOptions) (Enqueued, error) {
	batch := one(item, o)
	if batch[0].DedupKey != "" || len(item.Input) > groupedInput {
		return first(p.EnqueueForWorkerMany(ctx, batch))
	}
	ctx, done, err := p.begin(ctx)
	if err != nil {
		return Enqueued{}, failed(opEnqueueWork, err)
	}
	defer done()
	call := &groupedEnqueue{item: batch[0]}
	// The group may read them when the caller has left, and knows nothing of its context.
	call.item.Input, call.item.Headers = slices.Clone(item.Input), p.withTrace(ctx, maps.Clone(item.Headers))
	err = p.checkWorkEnqueue(&call.item)
	if err == nil {
		err = p.enqueues.do(ctx, call)
	}
	if err != nil {
		return Enqueued{}, p.ended(ctx, opEnqueueWork, err)
	}
	return call.added, nil
}
