package measure

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"golang.org/x/sync/errgroup"
)

// This file answers: what do very many namespaces cost that have nothing to do?

// ManyNamespacesOptions are the sizes of that.
type ManyNamespacesOptions struct {
	Namespaces int           // Defaults to 1000.
	Duration   time.Duration // to count statements. Defaults to 30 s.
	Lease      time.Duration // of items. Defaults to that of a Provider.
}

// ManyNamespaces is what was found.
type ManyNamespaces struct {
	Namespaces int           `json:"namespaces"`
	How        string        `json:"how"` // statements are counted
	Duration   time.Duration `json:"duration"`
	Statements int64         `json:"statements"` // of a node that serves all of them
	OfOne      int64         `json:"of_one"`     // in the same time, of a node that serves one
	Texts      calls         `json:"texts"`      // what those of all were, if the server tells

	// While one of the namespaces has an item each second, from one lease after the first on.
	BusyItems int           `json:"busy_items"`
	BusyFor   time.Duration `json:"busy_for"`
	BusyTexts calls         `json:"busy_texts"`

	PolledFor time.Duration `json:"polled_for"`
	Polled    int64         `json:"polled"` // polls of loops that poll all of them

	Listening   int `json:"listening"`   // LISTEN connections of the node that serves all
	Connections int `json:"connections"` // all that it has

	// The node's memory, heap and stacks after a collection, for each namespace beyond the first: while it has had no item, and when
	// the Dispatcher for its first has ended.
	Bytes      int64 `json:"bytes"`
	BytesAfter int64 `json:"bytes_after"`
}

// PerSecond is the rate of statements of the node that serves all.
func (r *ManyNamespaces) PerSecond() float64 { return float64(r.Statements) / r.Duration.Seconds() }

// BusyPerSecond is that rate while one has items, without those of the enqueues.
func (r *ManyNamespaces) BusyPerSecond() float64 {
	return float64(r.BusyTexts.total()-int64(r.BusyItems)) / max(r.BusyFor.Seconds(), 1e-9)
}

// PolledPerSecond is that of the loops, for each of whose polls one statement counts; here a poll has one more, for its settings.
func (r *ManyNamespaces) PolledPerSecond() float64 { return float64(r.Polled) / r.PolledFor.Seconds() }

// manySpell without a statement means that the node has settled.
const manySpell = 500 * time.Millisecond

// countedNode is a node in a database of its own.
type countedNode struct {
	*node
	*counter
	stage stage
	exit  func(*error)
}

// openCounted opens it, without anybody who waits.
func openCounted(ctx context.Context, url string, dispatchers int) (_ *countedNode, err error) {
	s := newStage(url)
	c, err := newCounter(ctx, url, pgx.Identifier{s.schema}.Sanitize())
	if err != nil {
		return nil, err
	}
	s.url = c.URL
	n, err := s.open(ctx, dispatchers)
	if err != nil {
		s.drop(&err)
		c.close(&err)
		return nil, err
	}
	return &countedNode{n, c, s, func(err *error) {
		n.close(err)
		s.drop(err)
		c.close(err)
	}}, nil
}

// many has a node serve very many namespaces, beside one that serves one, and loops that poll all of them.
func (o *NamespacesOptions) many(ctx context.Context, url string, to *NamespacesResult) (err error) {
	c := o.Many
	orDefault(&c.Namespaces, 1000)
	orDefault(&c.Duration, 30*time.Second)
	orDefault(&c.Lease, pgwake.DefaultLockTimeout)
	r := &ManyNamespaces{Namespaces: c.Namespaces}
	m := newMeter(o.Progress)
	one, err := openCounted(ctx, url, 1)
	if err != nil {
		return err
	}
	defer one.exit(&err)
	all, err := openCounted(one.ctx, url, 8)
	if err != nil {
		return err
	}
	defer all.exit(&err)
	ctx = all.ctx
	nothing := func(context.Context, *pgwake.ClaimedWorkItem) error { return nil }
	servingOne, serving := one.service(), all.service()
	defer servingOne.end(&err)
	defer serving.end(&err)
	g := dispatch.Group{RetireAfter: 100 * time.Millisecond, Config: dispatch.Config{LockTimeout: c.Lease}}
	coordinate(servingOne, g, nothing)
	coordinators := coordinate(serving, g, nothing)
	for _, n := range []*node{one.node, all.node} {
		if err := n.parked(1); err != nil { // for DefaultNamespace
			return err
		}
	}
	m.report(Progress{Total: c.Namespaces})
	before := memory()
	if err := all.stage.exec(ctx, `INSERT INTO namespaces (name) SELECT 'n' || i FROM generate_series(1, $1::integer) AS i`, c.Namespaces); err != nil {
		return err
	}
	if err := all.parked(c.Namespaces + 1); err != nil {
		return err
	}
	r.Bytes = (memory() - before) / int64(c.Namespaces)
	if err := r.listeners(ctx, all); err != nil {
		return err
	}
	if err := r.count(ctx, one, all, c.Duration, m, func(ctx context.Context) error { return r.poll(ctx, url, o) }); err != nil {
		return err
	}
	if err := r.busy(ctx, all, &c, m); err != nil {
		return err
	}
	if err := r.work(ctx, all, coordinators, before); err != nil {
		return err
	}
	to.Many = r
	return nil
}

// count counts the statements of both nodes, each in its database, and has loops poll meanwhile, which count by themselves.
func (r *ManyNamespaces) count(ctx context.Context, one, all *countedNode, d time.Duration, m *meter, poll func(context.Context) error) (err error) {
	loops, polling := errgroup.WithContext(ctx)
	loops.Go(func() error { return poll(polling) })
	defer func() { err = errors.Join(err, loops.Wait()) }()
	began, err := all.settle(ctx, manySpell)
	if err != nil {
		return err
	}
	beganOne, err := one.read(ctx)
	if err != nil {
		return err
	}
	at := time.Now()
	if err := m.pause(ctx, d); err != nil {
		return err
	}
	r.Duration, r.How = time.Since(at), all.How
	ended, err := all.read(ctx)
	if err != nil {
		return err
	}
	endedOne, err := one.read(ctx)
	r.Texts = ended.since(began)
	r.Statements, r.OfOne = r.Texts.total(), endedOne.since(beganOne).total()
	return err
}

// pause waits, and reports progress.
func (m *meter) pause(ctx context.Context, d time.Duration) error {
	for began := time.Now(); ; m.report(Progress{}) {
		left := d - time.Since(began)
		if left <= 0 {
			return nil
		}
		if err := pause(ctx, min(left, time.Second/2)); err != nil {
			return err
		}
	}
}

// memory is what is in use after a collection, stacks included.
func memory() int64 {
	runtime.GC()
	runtime.GC() // or what the first has only marked as unused counts, and stacks that it has not shrunk
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc + s.StackInuse)
}

// busy counts statements while one of the namespaces has an item each second. The instants at which leases end are part of it, of
// which the first is a lease away: so it begins with an item, and counts from there on.
func (r *ManyNamespaces) busy(ctx context.Context, n *countedNode, o *ManyNamespacesOptions, m *meter) error {
	item := func() error {
		_, err := n.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "measure"}, &pgwake.EnqueueOptions{Namespace: "n1"})
		return err
	}
	if err := item(); err != nil {
		return err
	}
	if err := m.pause(ctx, o.Lease); err != nil {
		return err
	}
	began, err := n.read(ctx)
	if err != nil {
		return err
	}
	at := time.Now()
	for time.Since(at) < o.Duration {
		if err := item(); err != nil {
			return err
		}
		r.BusyItems++
		if err := m.pause(ctx, min(time.Second, o.Lease)); err != nil {
			return err
		}
	}
	ended, err := n.read(ctx)
	r.BusyFor, r.BusyTexts = time.Since(at), ended.since(began)
	return err
}

// work gives each namespace an item, and looks at the node when it is idle again.
func (r *ManyNamespaces) work(ctx context.Context, n *countedNode, c *dispatch.Coordinators, before int64) error {
	had := c.Stats().Shifts
	if err := r.enqueue(ctx, n); err != nil {
		return err
	}
	if err := until(ctx, func() bool {
		return c.Stats().Shifts >= had+int64(r.Namespaces) && n.Stats().Worker.Parked > r.Namespaces && c.Stats().Working == 0
	}); err != nil {
		return err
	}
	r.BytesAfter = (memory() - before) / int64(r.Namespaces)
	return nil
}

// enqueue gives each an item.
func (r *ManyNamespaces) enqueue(ctx context.Context, n *countedNode) error {
	items := make([]pgwake.WorkEnqueue, r.Namespaces)
	for i := range items {
		items[i].Name, items[i].Namespace = "measure", fmt.Sprintf("n%d", i+1)
	}
	_, err := n.EnqueueForWorkerMany(ctx, items)
	return err
}

// until waits for something that costs little to look at.
func until(ctx context.Context, is func() bool) error {
	for !is() {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// listeners counts the connections of the node.
func (r *ManyNamespaces) listeners(ctx context.Context, n *countedNode) error {
	conn, err := n.stage.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	// Each node that listens holds a lock, by which the others know that it is alive.
	return conn.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = d.oid
		                                        AND objid IN (SELECT listener::oid FROM waiters WHERE lane = 0)),
		       (SELECT count(*) FROM pg_stat_activity WHERE datid = d.oid AND backend_type = 'client backend' AND pid <> ALL ($1))
		  FROM pg_database d WHERE datname = current_database()`, []int32{int32(conn.PgConn().PID()), int32(n.conn.PgConn().PID())},
	).Scan(&r.Listening, &r.Connections)
}

// poll has loops poll as many namespaces. Each begins at a random instant of the interval, so there is one poll of each in that.
func (r *ManyNamespaces) poll(ctx context.Context, url string, o *NamespacesOptions) (err error) {
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 8)
	if err != nil {
		return err
	}
	defer n.close(&err)
	if err := n.connectAll(8); err != nil {
		return err
	}
	serving := n.service()
	defer serving.end(&err)
	l := &pollLoop{interval: o.Interval, batch: o.Batch}
	at := time.Now()
	for i := range r.Namespaces {
		l.serve(serving, fmt.Sprintf("n%d", i+1), nil)
	}
	if err := pause(serving.ctx, o.Interval); err != nil {
		return err
	}
	// On a server that is not quick enough it takes longer.
	if err := until(serving.ctx, func() bool { return l.polls.Load() >= int64(r.Namespaces) }); err != nil {
		return err
	}
	r.Polled, r.PolledFor = l.polls.Load(), time.Since(at)
	return nil
}
