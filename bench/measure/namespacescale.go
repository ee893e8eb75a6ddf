package measure

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: do twice as many namespaces get twice as much done?

// NamespaceScaleOptions are the sizes of that.
type NamespaceScaleOptions struct {
	Counts   []int         // of namespaces, in order. Defaults to 1, 2, 4, 8, 16 and 32.
	Places   int           // for handlers, of each. Defaults to 2.
	Handler  time.Duration // how long each item takes. Defaults to 5 ms.
	Duration time.Duration // of counting, for each. Defaults to 2 s.
}

// NamespaceScale is what was found.
type NamespaceScale struct {
	Places  int           `json:"places"`
	Handler time.Duration `json:"handler"`
	Rates   []ScaledRate  `json:"rates"`
	// Single is that of one namespace with as many places as the last of Rates has in all.
	Single ScaledRate `json:"single"`
}

// ScaledRate is what so many namespaces got done, durably.
type ScaledRate struct {
	Namespaces int `json:"namespaces"`
	NamespaceRate
}

// scaleWarmUp is how long they are at work before anything counts.
const scaleWarmUp = 150 * time.Millisecond

// scale has namespaces with a backlog each done at the same time, by a fixed number of handlers of each.
func (o *NamespacesOptions) scale(ctx context.Context, url string, to *NamespacesResult) (err error) {
	c := o.Scale
	if c.Counts == nil {
		c.Counts = []int{1, 2, 4, 8, 16, 32}
	}
	orDefault(&c.Places, 2)
	orDefault(&c.Handler, 5*time.Millisecond)
	orDefault(&c.Duration, 2*time.Second)
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, c.Counts[len(c.Counts)-1])
	if err != nil {
		return err
	}
	defer n.close(&err)
	r := &NamespaceScale{Places: c.Places, Handler: c.Handler}
	m := newMeter(o.Progress)
	for i, count := range c.Counts {
		rate, err := c.one(n, s, fmt.Sprintf("n%d-", count), count, c.Places)
		if err != nil {
			return err
		}
		r.Rates = append(r.Rates, rate)
		m.report(Progress{Done: i + 1, Total: len(c.Counts) + 1})
	}
	if r.Single, err = c.one(n, s, "single-", 1, c.Places*c.Counts[len(c.Counts)-1]); err != nil {
		return err
	}
	m.report(Progress{Done: len(c.Counts) + 1, Total: len(c.Counts) + 1})
	to.Scale = r
	return nil
}

// one takes the rate of namespaces with so many places each.
func (c *NamespaceScaleOptions) one(n *node, s stage, prefix string, count, places int) (r ScaledRate, err error) {
	names, err := register(n.ctx, n, prefix, count)
	if err != nil {
		return r, err
	}
	// Nobody gets more done than the handlers have time for.
	enough := places * (int((c.Duration+2*scaleWarmUp)/c.Handler) + 1)
	if err := s.fillNamespaces(n.ctx, names, enough); err != nil {
		return r, err
	}
	if err := s.calm(n.ctx); err != nil {
		return r, err
	}
	source := tallied{n.Provider, newTally(count*enough + 1), new(atomic.Int64)}
	now := beginRun(n.ctx, newCoordinators(source, dispatch.Group{
		Namespaces: []string{prefix + "*"}, Config: dispatch.Config{Concurrency: places},
	}, func(ctx context.Context, _ *pgwake.ClaimedWorkItem) error { return pause(ctx, c.Handler) }))
	defer func() {
		if ended := now.end(); err == nil {
			err = ended
		}
	}()
	if err := pause(n.ctx, scaleWarmUp); err != nil {
		return r, err
	}
	began, before := time.Now(), source.t.done.Load()
	if err := pause(n.ctx, c.Duration); err != nil {
		return r, err
	}
	return ScaledRate{count, NamespaceRate{Items: int(source.t.done.Load() - before), Took: time.Since(began)}}, nil
}
