package measure

import (
	"context"
	"fmt"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: how soon is a namespace served that did not exist?

// created has each item be the first of its namespace, at random instants, on a node that serves all.
func (o *NamespacesOptions) created(ctx context.Context, url string, r *NamespacesResult) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, o.Namespaces)
	if err != nil {
		return err
	}
	defer n.close(&err)
	other, err := s.open(ctx, 1)
	if err != nil {
		return err
	}
	defer other.close(&err)
	l := newLedger(o.Created)
	serving := n.service()
	defer serving.end(&err)
	coordinate(serving, dispatch.Group{}, func(_ context.Context, item *pgwake.ClaimedWorkItem) error { return l.take(item, time.Now()) })
	if err := serving.parked(1); err != nil { // for DefaultNamespace
		return err
	}
	p := &producer{enqueue: func(ctx context.Context, i int, at time.Time) error {
		_, err := other.EnqueueForWorker(ctx, l.item(i), &pgwake.EnqueueOptions{Namespace: fmt.Sprintf("created-%d", i), At: at})
		return err
	}}
	r.Created = &Latency{}
	m := newMeter(o.Progress)
	for i := range o.Created {
		if err := pause(serving.ctx, Uniform.draw(o.Gap)); err != nil {
			return err
		}
		if err := p.now(serving.ctx, l, i); err != nil {
			return err
		}
		if err := l.wait(serving.ctx, 1, func(i int) { r.Created.add(l.line(i)) }); err != nil {
			return err
		}
		if m.due() {
			m.report(Progress{Done: i + 1, Total: o.Created, Figures: r.Created.FromCommit.Summary()})
		}
	}
	return nil
}
