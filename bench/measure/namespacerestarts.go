package measure

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"golang.org/x/sync/errgroup"
)

// This file answers: is anything lost, or done twice, when coordinators end and begin again under load?

// NamespaceRestartsOptions are the sizes of that.
type NamespaceRestartsOptions struct {
	Namespaces int           // Defaults to 4.
	Items      int           // of which the first half has no restarts. Defaults to 4000.
	Gap        time.Duration // from one enqueue to the next. Defaults to 1 ms.
	Handler    time.Duration // how long each item takes. Defaults to 5 ms.
	Pause      time.Duration // from one restart to the next. Defaults to 20 ms.
}

// NamespaceRestarts is what was found.
type NamespaceRestarts struct {
	Items   int     `json:"items"`
	Retired int     `json:"retired"`     // coordinators of single namespaces that ended and began again
	Runs    int     `json:"runs"`        // how often all of them did
	Calm    Samples `json:"calm"`        // from commit to handler, without restarts
	Shaken  Samples `json:"shaken"`      // and with them
	Again   int     `json:"again"`       // handlers beyond the first of an item
	Twice   int     `json:"acked_twice"` // items
	Lost    int     `json:"lost"`        // items that had no handler
	Left    int     `json:"left"`        // items that are not acknowledged when all is done
}

// restart has items come to namespaces whose coordinators are restarted: single ones by Retire and Spawn, and all of them.
func (o *NamespacesOptions) restart(ctx context.Context, url string, to *NamespacesResult) (err error) {
	c := o.Restarts
	orDefault(&c.Namespaces, 4)
	orDefault(&c.Items, 4000)
	orDefault(&c.Gap, time.Millisecond)
	orDefault(&c.Handler, 5*time.Millisecond)
	orDefault(&c.Pause, 20*time.Millisecond)
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 4*c.Namespaces)
	if err != nil {
		return err
	}
	defer n.close(&err)
	names, err := register(ctx, n, "n", c.Namespaces)
	if err != nil {
		return err
	}
	l := newLedger(c.Items)
	source := &ackLedger{Provider: n.Provider, items: map[pgwake.LockToken]int64{}, acks: map[int64]int{}}
	serving, stop := context.WithCancel(n.ctx)
	defer stop()
	begin := func() *coordinatorsRun {
		return beginRun(serving, newCoordinators(source, dispatch.Group{}, func(ctx context.Context, item *pgwake.ClaimedWorkItem) error {
			if err := l.take(item, time.Now()); err != nil {
				return err
			}
			return pause(ctx, c.Handler)
		}))
	}
	now := begin()
	defer func() { err = errors.Join(err, now.end()) }()

	r := &NamespaceRestarts{Items: c.Items}
	p := producerIn(n, l, names)
	m := newMeter(o.Progress)
	send := func(ctx context.Context, from, to int) error {
		for i := from; i < to; i++ {
			if err := p.now(ctx, l, i); err != nil {
				return err
			}
			if err := pause(ctx, c.Gap); err != nil {
				return err
			}
			if m.due() {
				m.report(Progress{Done: i, Total: c.Items})
			}
		}
		return nil
	}
	if err := send(serving, 0, c.Items/2); err != nil {
		return err
	}
	group, shaking := errgroup.WithContext(serving)
	sent := make(chan struct{})
	group.Go(func() error {
		defer close(sent)
		return send(shaking, c.Items/2, c.Items)
	})
	group.Go(func() error {
		for {
			for _, name := range append(names, "") { // "": all of them
				if pause(shaking, c.Pause) != nil {
					return nil
				}
				select {
				case <-sent:
					if r.Runs > 0 { // on a slow machine there was time for none
						return nil
					}
				default:
				}
				if name == "" {
					err := now.end()
					if now = begin(); err != nil {
						return err
					}
					r.Runs++
					continue
				}
				now.Retire(name)
				if err := now.Spawn(name); err != nil {
					return err
				}
				r.Retired++
			}
		}
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if err := l.wait(serving, c.Items, ignore); err != nil && serving.Err() != nil {
		return err
	}
	if err := now.end(); err != nil { // what was handled is acknowledged then
		return err
	}
	for i := range c.Items {
		line := l.line(i)
		took := max(line.inHand.Sub(line.committed), 0)
		switch {
		case line.inHand.IsZero():
			r.Lost++
		case i < c.Items/2:
			r.Calm = append(r.Calm, took)
		default:
			r.Shaken = append(r.Shaken, took)
		}
	}
	r.Again, r.Twice = l.redelivered(), source.twice()
	r.Left, err = s.left(ctx)
	to.Restarts = r
	return err
}

// coordinatorsRun is Coordinators at work.
type coordinatorsRun struct {
	*dispatch.Coordinators
	stop  context.CancelFunc
	ended chan struct{}
	err   error
}

func beginRun(ctx context.Context, c *dispatch.Coordinators) *coordinatorsRun {
	ctx, stop := context.WithCancel(ctx)
	r := &coordinatorsRun{Coordinators: c, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = c.Run(ctx)
	}()
	return r
}

// end ends them, if they have not ended, and returns how that went.
func (r *coordinatorsRun) end() error {
	r.stop()
	<-r.ended
	return r.err
}

// ackLedger notes which items were acknowledged, and by how many leases. All that is claimed here has no result and no
// transaction, so there are no other acks.
type ackLedger struct {
	*pgwake.Provider

	mu    sync.Mutex
	items map[pgwake.LockToken]int64 // of leases that have not acknowledged
	acks  map[int64]int              // by item
}

func (l *ackLedger) AckWorkItems(ctx context.Context, tokens []pgwake.LockToken) error {
	err := l.Provider.AckWorkItems(ctx, tokens)
	if err == nil {
		l.acked(tokens)
	}
	return err
}

func (l *ackLedger) AckBatched(ctx context.Context, token pgwake.LockToken, completion *pgwake.Message) error {
	err := l.Provider.AckBatched(ctx, token, completion)
	if err == nil {
		l.acked([]pgwake.LockToken{token})
	}
	return err
}

func (l *ackLedger) FetchWorkItems(ctx context.Context, n int, o *pgwake.FetchOptions) ([]*pgwake.ClaimedWorkItem, error) {
	items, err := l.Provider.FetchWorkItems(ctx, n, o)
	if err == nil || errors.Is(err, pgwake.ErrNoWork) {
		l.acked(o.Ack)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, item := range items {
		l.items[item.LockToken] = item.ID
	}
	return items, err
}

func (l *ackLedger) acked(tokens []pgwake.LockToken) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, token := range tokens {
		if item, ok := l.items[token]; ok {
			l.acks[item]++
			delete(l.items, token)
		}
	}
}

// twice returns how many items several leases have acknowledged.
func (l *ackLedger) twice() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, leases := range l.acks {
		if leases > 1 {
			n++
		}
	}
	return n
}

// left returns how many work items are in the queue, or among the dead letters.
func (s stage) left(ctx context.Context) (n int, err error) {
	err = withConn(ctx, s.url, func(conn *pgx.Conn) error {
		if err := searchPath(ctx, conn, s.schema); err != nil {
			return err
		}
		return conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM worker_queue) + (SELECT count(*) FROM dead_letters)`).Scan(&n)
	})
	return n, err
}
