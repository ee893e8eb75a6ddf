package pgwake

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// This file answers: what do the nodes of wakeproperty_test.go do, and how do they end?

// propertyNode is a Provider whose connections can be cut.
type propertyNode struct {
	*Provider
	drawnNode
	w       *world
	name    string // application_name
	pool    *pgxpool.Pool
	lease   time.Duration
	started []bool

	ctx     context.Context
	stop    context.CancelFunc
	gone    chan struct{} // closed when its handlers are to end
	away    bool          // it has left, or died
	running sync.WaitGroup

	ordered atomic.Int64 // how many fallbacks there are to be
	engine  atomic.Pointer[engine]
	frozen  atomic.Pointer[chan struct{}]

	mu    sync.Mutex
	dead  bool
	conns []net.Conn
}

type propertyDispatcher struct {
	drawnDispatcher
	n        *propertyNode
	lane     drawnLane
	fetching atomic.Bool
}

func (n *propertyNode) open() error {
	config, err := pgxpool.ParseConfig(testdbURL)
	if err != nil {
		return err
	}
	config.MaxConns = 6
	config.ConnConfig.RuntimeParams["application_name"] = n.name
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.dead {
			_ = conn.Close()
			return nil, errors.New("the node is dead")
		}
		n.conns = append(n.conns, conn)
		return conn, nil
	}
	if n.pool, err = pgxpool.NewWithConfig(tctx, config); err != nil {
		return err
	}
	n.Provider, err = New(tctx, n.pool, &Config{
		Schema: n.w.schema, SkipMigrate: true, Logger: silent, QuietAbove: n.quietAbove,
		Notify: n.notify, WakeFanout: n.fanout, clock: func() time.Time { return time.Now().Add(n.skew) },
		FallbackInterval: time.Hour, AggressivePolicy: Never, NotifyDeliveryTimeout: patient, fault: n.fault,
	})
	if err == nil {
		n.engine.Store(n.Provider.engine)
	}
	return err
}

// fault runs in the goroutine of the listener: it stops it, and brings a fallback forward. The order stands until one was
// made: a listener that was stopped may bring it to a connection that is dead, and the next one plans anew.
func (n *propertyNode) fault(point string) {
	if point != "listener" {
		return
	}
	if frozen := n.frozen.Load(); frozen != nil {
		<-*frozen
	}
	if e := n.engine.Load(); e != nil && e.stats.fallbacks.Load() < n.ordered.Load() {
		e.listener.nextFallback = time.Now()
	}
}

// fallback has the node make one, and waits for it.
func (n *propertyNode) fallback() {
	before := n.Stats().Fallbacks
	n.ordered.Store(before + 1)
	ctx, cancel := context.WithTimeout(tctx, patient)
	defer cancel()
	var one int
	if err := n.Provider.engine.exec(ctx, &one, "SELECT 1"); err != nil { // which moves the listener
		n.w.problem("order a fallback: %v", err)
	}
	n.w.eventually("the fallback", func() bool { return n.Stats().Fallbacks > before })
}

func (n *propertyNode) start(lane int) {
	if n.started[lane] || n.away {
		return
	}
	n.started[lane] = true
	for _, drawn := range n.dispatchers[lane] {
		d := &propertyDispatcher{drawnDispatcher: drawn, n: n, lane: n.lanes[lane]}
		n.w.mu.Lock()
		n.w.dispatchers = append(n.w.dispatchers, d)
		n.w.mu.Unlock()
		n.running.Go(d.run)
	}
}

// dispatched is an item in the hands of a dispatcher.
type dispatched struct {
	item  *propertyItem
	token LockToken
}

func (d *propertyDispatcher) run() {
	var owed []LockToken
	defer func() {
		if len(owed) == 0 {
			return
		}
		if err := d.n.w.nodes[0].AckWorkItems(tctx, owed); !errors.Is(err, ErrLockLost) { // the last fetch may have done it
			d.settle(nil, err)
		}
	}()
	for d.n.ctx.Err() == nil {
		o := &FetchOptions{LockTimeout: d.n.lease, PollTimeout: d.poll, Namespaces: d.lane.namespaces, Tags: d.lane.tags, Ack: owed}
		if d.lane.Queue == Orchestrator {
			o.Tags, o.Ack = TagFilter{}, nil
		}
		ctx, cancel := d.n.ctx, context.CancelFunc(func() {})
		switch {
		case d.poll == 0:
			o.PollTimeout = time.Hour
		case d.cancel && len(owed) == 0:
			ctx, cancel = context.WithTimeout(ctx, d.poll)
			o.PollTimeout = time.Hour
		}
		d.fetching.Store(true)
		got, err := d.fetch(ctx, o)
		d.fetching.Store(false)
		cancel()
		var lost *LostLocksError
		switch {
		case err == nil, errors.Is(err, ErrNoWork):
			owed = nil
		case d.n.w.faults && errors.As(err, &lost):
			owed = nil
		case errors.Is(err, ErrClosed):
			return
		case d.n.ctx.Err() != nil:
			owed = nil // it was done when the wait began
			return
		case errors.Is(err, context.DeadlineExceeded): // its own, or that of a poll for which no connection came free
		case d.n.w.faults:
			sleep(d.n.ctx, 2*time.Millisecond)
		default:
			d.n.w.problem("fetch: %v", err)
			return
		}
		for _, g := range got {
			if d.handle(g) {
				owed = append(owed, g.token)
			}
		}
	}
}

func (d *propertyDispatcher) fetch(ctx context.Context, o *FetchOptions) (got []dispatched, err error) {
	if d.lane.Queue == Orchestrator {
		turn, err := d.n.FetchOrchestrationItem(ctx, o)
		if err != nil {
			return nil, err
		}
		return []dispatched{{d.n.w.fetched(turn.Instance), turn.LockToken}}, nil
	}
	items, err := d.n.FetchWorkItems(ctx, d.batch, o)
	for _, i := range items {
		got = append(got, dispatched{d.n.w.fetched(i.Name), i.LockToken})
	}
	return got, err
}

// fetched takes it down that an item was delivered.
func (w *world) fetched(name string) *propertyItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.byName[name]
	if i == nil {
		w.problems = append(w.problems, "nobody has added "+name)
		return &propertyItem{name: name}
	}
	i.fetched++
	i.held++
	if !w.faults && i.held > 1 {
		w.problems = append(w.problems, name+" was handed out twice")
	}
	return i
}

// handle does what the item demands. It returns whether the next fetch is to acknowledge it.
func (d *propertyDispatcher) handle(g dispatched) (owed bool) {
	w, item, worker := d.n.w, g.item, d.lane.Queue == Worker
	w.mu.Lock()
	released, first := w.released, item.fetched == 1
	w.mu.Unlock()
	switch item.handling {
	case "brief":
		sleep(d.n.ctx, 2*time.Millisecond)
	case "blocks":
		select {
		case <-released:
		case <-d.n.gone:
		}
	case "abandons":
		if !first {
			break
		}
		w.mu.Lock()
		item.abandoned++
		item.held--
		w.mu.Unlock()
		o := &AbandonOptions{Delay: item.delay}
		abandon := d.n.AbandonWorkItem
		if !worker {
			abandon = d.n.AbandonOrchestrationItem
		}
		err := abandon(tctx, g.token, o)
		if errors.Is(err, ErrClosed) && !d.n.isDead() {
			abandon = w.nodes[0].AbandonWorkItem
			if !worker {
				abandon = w.nodes[0].AbandonOrchestrationItem
			}
			err = abandon(tctx, g.token, o)
		}
		d.settle(nil, err)
		return false
	}
	if d.n.isDead() {
		return false
	}
	if worker && d.ackBy {
		w.mu.Lock()
		item.held--
		w.mu.Unlock()
		return true
	}
	ack := func(p *Provider) error {
		if worker {
			if d.batch == 3 {
				return p.AckBatched(tctx, g.token, nil)
			}
			return p.AckWorkItem(tctx, g.token, nil)
		}
		return p.AckOrchestrationItem(tctx, g.token, OrchestrationAck{Metadata: Metadata{Name: "flow"}})
	}
	w.mu.Lock()
	item.held--
	w.mu.Unlock()
	err := ack(d.n.Provider)
	if errors.Is(err, ErrClosed) && !d.n.isDead() {
		err = ack(w.nodes[0].Provider)
	}
	d.settle(item, err)
	return false
}

func (d *propertyDispatcher) settle(item *propertyItem, err error) {
	if err != nil && !d.n.w.faults {
		d.n.w.problem("end of %v: %v", item, err)
	}
}

func (n *propertyNode) isDead() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dead
}

func (n *propertyNode) thawUp() {
	if frozen := n.frozen.Swap(nil); frozen != nil {
		close(*frozen)
	}
}

// release ends all handlers that are blocked at this moment.
func (w *world) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.released)
	w.released = make(chan struct{})
}

// leave closes a node in good order, with dispatchers that wait. The first one stays.
func (w *world) leave(n *propertyNode) {
	if n == w.nodes[0] || n.away {
		return
	}
	w.pending.Wait()
	n.away = true
	n.thawUp()
	close(n.gone)
	n.close()
}

func (n *propertyNode) close() {
	ctx, cancel := context.WithTimeout(tctx, patient)
	defer cancel()
	if n.Provider != nil {
		if err := n.Close(ctx); err != nil && !n.isDead() {
			n.w.problem("close: %v", err)
		}
	}
	n.running.Wait()
}

// die has a node end without a word, as the process does.
func (w *world) die(n *propertyNode) {
	if !n.mortal || n.away {
		return
	}
	n.away = true
	w.cut(n, true)
	n.stop()
	close(n.gone)
	n.thawUp()
	n.running.Wait()
}

// cut closes the sockets of a node.
func (w *world) cut(n *propertyNode, forEver bool) {
	rows, err := w.peek.Query(tctx, `SELECT pid FROM pg_stat_activity WHERE application_name = $1`, n.name)
	require.NoError(w.t, err)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	require.NoError(w.t, err)
	w.severed = append(w.severed, pids...)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead = forEver
	for _, conn := range n.conns {
		_ = conn.Close()
	}
	n.conns = nil
}
